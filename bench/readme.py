"""The tables of README.md and RESULTS.md, from results/: a page chooses rows and columns, this fills them in.

A table below a line <!-- NAME --> is filled, each row by its first cell. NAME is `table4` (the cost of GCD),
`chaos` (attacks and what was survived), `twins` (the study's arms), `origin` (its axes), `memory` (stages),
`cpu` (ratios) or a benchmark (`hour`: ALFWorld in an hour; `ablation`, `admissible`: Table 3's): its rows are
rows or differences of bench.table1, its columns are told by their heads:

    L0              success on that split at temperature 1, or the difference
    L0 at 0.4       the same at temperature 0.4 ("at 0.4" alone: of the split before it)
    refused         commands that were not admissible, in per cent of turns, by split
    paper ...       the paper's numbers, by split

A column with an empty head stays empty. A block of code below <!-- FILE.py --> is filled with the file, below
<!-- FILE.py NAME --> with what it defines under that name. Left out: numbers in sentences, and tables below
other comments.

    python -m bench.readme    # rewrite what has changed; tests/test_readme.py fails where it was forgotten
"""

import ast
import re
import statistics

from bench.intervals import number, percent, with_half
from bench.study import ROOT
from bench.table1 import paper_text, shares_text
from run import files

TABLE = re.compile(r"^<!-- (\w+) -->\n((?:\|.*\n)+)", re.MULTILINE)
CODE = re.compile(r"^<!-- (\S+\.py)(?: (\w+))? -->\n```python\n.*?^```$", re.MULTILINE | re.DOTALL)
RESULTS = ROOT / "results"
PAGES = tuple(ROOT / f"{name}.md" for name in ("README", "RESULTS", "RELIABILITY"))
NAMED = {"table4": "table4_household.json", "chaos": "chaos.json",     # files of other names
         "twins": "studies/twins.json", "origin": "studies/origin.json", "memory": "memory.json",
         "cpu": "cpu.json", "admissible": "table3_admissible_result.json",
         "ablation": "table3_household_result.json", "hour": "table1_alfworld_hour_result.json"}


def result_path(name):
    """The file behind the tables of this name."""
    return RESULTS / NAMED.get(name, f"table1_{name}_result.json")


def chaos_row(result, name, _):
    """An attack of the chaos target: what was tried, how often, how often it was survived."""
    row = next(row for row in result["attacks"] if row["attack"] == name)
    return [name, row["what"], str(row["tries"]), str(row["survived"])]


def twins_row(result, name, _):
    """An arm of the twin states' main grid, "COLD START: ARM"."""
    row = next(row for row in result["rows"] if f"{row['cold']}: {row['arm']}" == name and not row["changes"])
    low, high = row["removed_interval"]
    removed = f"{row['removed']} of {row['n']} [{100 * low:.0f}, {100 * high:.0f}]"
    return [name, with_half(row["final"]), removed,
            *(number(row[key], ".2f") for key in ("q_P", "cosine", "auc"))]


def origin_row(result, name, _):
    """An axis of the study of GRPO's origin, "AXIS, rho RHO", or that and ", no positions": pass@1 of the
    base, after GRPO, and the gain; the same of pass@256."""
    axis, rho, *bare = name.replace("rho ", "").split(", ")
    row = next(row for row in result["axes"] if (row["axis"], row["rho"], row["positions"] == "none")
               == (axis, float(rho), bool(bare)))
    return [name, *(percent(value, len(value["seeds"]), "+" if which == "gain" else "") for k in ("1", "256")
                    for which, value in row["curve"][k].items())]


def table4_row(result, name, _):
    """A row with GCD: seconds without and with it, their ratio, the paper's, and 75 % of the iterations."""
    row = next(row for row in result["rows"] if row["row"] == name)
    base, ours = (row["seconds"][key]["total"] for key in (row["base"], name))
    later = [percent(row["later"][split], len(row["later"][split]["seeds"]), "+") if row["later"] else "–"
             for split in ("L0", "L1", "L2")]
    paper = number(row["paper"] and row["paper"]["ratio"], ".2f")
    return [name, f"{base:.2f}", f"{ours:.2f}", f"{statistics.fmean(row['ratios']):.2f}", paper, *later]


def result_row(result, name, heads):
    """A row or a difference of a result under these heads."""
    is_difference = name in result["differences"]
    splits = result["differences" if is_difference else "rows"][name]
    cells, split = [name], ""
    for head in heads[1:]:
        split = head.split()[0] if head.split()[:1] and head.split()[0] in splits else split
        if head.startswith("paper") or head == "refused":
            texts = paper_text if head.startswith("paper") else shares_text
            cells.append("" if is_difference else texts(splits))
        elif head in (split, f"{split} at 0.4", "at 0.4") and split:
            value = splits[split]["t0.4"] if head.endswith("0.4") else splits[split]
            cells.append(percent(value, len(result["seeds"]), "+" if is_difference else ""))
        elif head:
            raise ValueError(f"column {head!r}: expected {', '.join(splits)}, at 0.4, refused or paper")
        else:
            cells.append("")
    return cells


def memory_row(result, name, _):
    """A model on some GPUs: gigabytes by stage, and before; seconds of an iteration."""
    row = next(row for row in result["rows"] if row["row"] == name)
    sizes = [f"{row['now'][stage] / 1e9:.0f} ({row['before'][stage] / 1e9:.0f})" for stage in row["now"]]
    return [name, *sizes, f"{sum(row['seconds'].values()):.0f}"]


def cpu_row(result, name, _):
    """A ratio of seconds: "rollout of N turns" with seconds and tokens of an episode, ours and generate's;
    "iteration", TRL's over ours; "GCD", with it over without."""
    if name in ("iteration", "GCD"):
        ours, theirs = {"iteration": ("grpo", "trl"), "GCD": ("gcd", "grpo")}[name]
        seconds = (f"{statistics.fmean(result['seconds'][side]):.2f} s" for side in (ours, theirs))
        return [name, with_half(result[name.lower()]), *seconds, "", ""]
    row = result["rollout"][name.split()[2]]
    sides = [row["ours"], row["generate"]]
    return [name, with_half(row["ratio"]), *(f"{1000 * side['s_per_episode']:.1f} ms" for side in sides),
            *(f"{side['tokens_per_episode']:,.0f}" for side in sides)]


ROWS = {"table4": table4_row, "chaos": chaos_row, "twins": twins_row, "origin": origin_row,
        "memory": memory_row, "cpu": cpu_row}


def cells_of(line):
    """The cells of a table's line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def source_of(path, name):
    """A file's text, or that of the class or function of this name in it."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is None:
        return text.strip()
    return next(ast.get_source_segment(text, node) for node in ast.parse(text).body
                if getattr(node, "name", None) == name)


def filled(text):
    """A page with today's numbers and code. What is not there is a KeyError or StopIteration."""
    def fill(found):
        name, (head, rule, *lines) = found[1], found[2].splitlines()
        if not result_path(name).exists():
            return found[0]
        result = files.read_json(result_path(name))
        rows = [cells_of(line)[0] for line in lines]
        heads, row_of = cells_of(head), ROWS.get(name, result_row)
        done = [row_of(result, row, heads) for row in rows]
        return "\n".join([f"<!-- {name} -->", head, rule, *(f"| {' | '.join(row)} |" for row in done), ""])
    def quote(found):
        head = found[0].partition("\n")[0]
        return f"{head}\n```python\n{source_of(found[1], found[2])}\n```"
    return CODE.sub(quote, TABLE.sub(fill, text))


def main():
    for page in PAGES:
        if page.exists():
            text = page.read_text(encoding="utf-8")
            names = [name for name, _ in TABLE.findall(text) if result_path(name).exists()]
            files.write_text(page, filled(text))
            print(f"{page.name}: {', '.join(names) or 'no tables'}")


if __name__ == "__main__":
    main()
