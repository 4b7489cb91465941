"""Fills the tables and code blocks of README.md and docs/*.md from lab/results and from the source files.

A page chooses the rows and columns of a table; this writes the numbers. A table below a line <!-- NAME --> is
filled: NAME is a key of TABLES, whose function says what a row has, or a benchmark, lab/results/
table1_NAME_result.json. A row is found by its first cell: the text in backticks at its end, if any, else all
of it; so is a column of `pretrained`. The rows of a benchmark are rows or differences of
lab.bench.table1, and the head of a column says what it contains:

    L0              success on that split at temperature 1, or the difference
    at 0.4          the same at temperature 0.4, of the preceding column's split
    L2 ... (`_x`)   success on that split of the row whose name is this row's name and _x
    invalid         turns with no command or a refused one, in per cent, by split; flawed and repeated
                    likewise
    paper ...       the paper's numbers, by split

A code block below <!-- FILE.py --> is filled with the file, below
<!-- FILE.py NAME --> with its class or function NAME. Left out: numbers in sentences, and tables below other
comments.

    python -m lab.bench.readme    # rewrite the pages; tests/lab/test_readme.py fails if one is out of date
"""

import argparse
import ast
import re
import statistics
import sys

from infra import files
from lab.bench.intervals import number, percent, range_of, with_half
from lab.bench.study import ROOT
from lab.bench.table1 import OF_TURNS, paper_text, shares_text

TABLE = re.compile(r"^<!-- (\w+) -->\n((?:\|.*\n)+)", re.MULTILINE)
VARIANT = re.compile(r"^(\w+)\b.* \(`(_\w+)`\)$")          # head of a column that reads another row
JUDGED = re.compile(r"\+(gcd|taken|oracle|dense|flaws)(_[.\d]+)*(_std$|_redrawn$)?")         # of a row's name
CODE = re.compile(r"^<!-- (\S+\.py)(?: (\w+))? -->\n```python\n.*?^```$", re.MULTILINE | re.DOTALL)
KL_NAMES = {"KL .01": "", "KL .03": ", thrice the KL", "KL .1": ", ten times the KL",       # of twin states
            "KL .1, then .01": ", ten times the KL, then once"}
RESULTS = ROOT / "lab" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def result_path(name):
    """The file that fills the tables of this name."""
    return RESULTS / (TABLES[name][0] if name in TABLES else f"table1_{name}_result.json")


def stored(path):
    """A file of results: its JSON; of JSON lines, all lines; of a folder, the results of lab.bench.table1."""
    if path.is_dir():
        return [files.read_json(file) for file in sorted(path.glob("table*_result.json"))]
    if path.suffix == ".jsonl":
        return files.read_lines(path)[0]
    return files.read_json(path)


def chaos_row(result, name, _):
    """An attack of `bash run.sh chaos`: what is promised, what is done, number of tries, number survived."""
    row = next(row for row in result["attacks"] if row["attack"] == name)
    return [name, row.get("promise", ""), row["what"], str(row["tries"]), str(row["survived"])]


def origin_row(result, name, _):
    """An axis of the origin study, named "AXIS, rho RHO" or "AXIS, rho RHO, no positions".

    Columns: pass@1 of the base model, after GRPO, and the gain; then the same for pass@256.
    """
    axis, rho, *bare = name.replace("rho ", "").split(", ")
    row = next(row for row in result["axes"] if (row["axis"], row["rho"], row["positions"] == "none")
               == (axis, float(rho), bool(bare)))
    return [name, *(percent(value, len(value["seeds"]), "+" if which == "gain" else "") for k in ("1", "256")
                    for which, value in row["curve"][k].items())]


def table4_row(result, name, _):
    """A row of Table 4: seconds without and with GCD, their ratio, and the paper's ratio."""
    row = next(row for row in result["rows"] if row["row"] == name)
    base, ours = (row["seconds"][key]["total"] for key in (row["base"], name))
    paper = number(row["paper"] and row["paper"]["ratio"], ".2f")
    return [name, f"{base:.2f}", f"{ours:.2f}", f"{statistics.fmean(row['ratios']):.2f}", paper]


def result_row(result, name, heads):
    """A row or a difference of a lab.bench.table1 result, in the columns `heads`."""
    is_difference = name in result["differences"]
    splits = result["differences" if is_difference else "rows"][name]
    cells, split = [name], ""
    for head in heads[1:]:
        if variant := VARIANT.match(head):
            value = result["rows"].get(name + variant[2], {}).get(variant[1])
            cells.append(percent(value, len(result["seeds"])) if value else "–")
            continue
        split = head.split()[0] if head.split()[:1] and head.split()[0] in splits else split
        if head.startswith("paper") or head in OF_TURNS:
            cells.append("" if is_difference else shares_text(splits, head) if head in OF_TURNS
                         else paper_text(splits))
        elif head in (split, "at 0.4") and split:
            value = splits[split]["t0.4"] if head == "at 0.4" else splits[split]
            cells.append(percent(value, len(result["seeds"]), "+" if is_difference else ""))
        else:
            known = ", ".join([*splits, "at 0.4", *OF_TURNS])
            raise ValueError(f"column {head!r}: expected {known} or paper")
    return cells


def memory_row(result, name, _):
    """A model size and number of GPUs, ranges over the loads: an episode's tokens, decode steps, gigabytes by
    stage, and seconds of an iteration.
    """
    loads = next(row for row in result["rows"] if row["row"] == name)["loads"].values()
    tokens = [range_of([load["tokens"][q] / 1000 for load in loads], "{:.1f}") for q in ("p50", "p90", "max")]
    gb = gigabytes(loads, "rollout", "judge", "update", "step")
    steps = range_of([load["counts"]["decode steps"] for load in loads], "{:,.0f}")
    seconds = range_of([sum(ends[end] for ends in load["seconds"].values())
                        for load in loads for end in (0, 1)])
    return [name, " / ".join(tokens), steps, *gb, seconds]


def room_row(result, name, _):
    """The same model's gigabytes in the rollout, with rows of their own length and with rows of equal room;
    and in judging, with one copy of a prompt for all answers and with one for each.
    """
    loads = next(row for row in result["rows"] if row["row"] == name)["loads"].values()
    return [name, *gigabytes(loads, "rollout", "rollout, equal rooms", "judge", "judge, a copy each")]


def gigabytes(loads, *stages):
    """The range over the loads of each stage's gigabytes."""
    return [range_of([load["bytes"][stage] / 1e9 for load in loads]) for stage in stages]


def gpu_row(result, name, _):
    """A stage of an iteration on an H200: seconds, gigabytes of tensors and decode steps, measured by
    lab.bench.gpu's check `iteration` in the second of two iterations, and computed by lab.bench.memory; or
    "total", the measured seconds.
    """
    *_, last = [line["stages_s_gb_steps"] for line in result if line.get("device") == "NVIDIA H200"
                and line["check"] == "iteration" and len(line.get("stages_s_gb_steps", ())) == 6]
    measured = {stage: rest for stage, *rest in last[3:]}
    computed = files.read_json(result_path("memory"))
    load = next(row for row in computed["rows"] if row["row"] == "1.5B on 1 × 141 GB")["loads"][
        "150 tokens a response"]
    if name == "total":
        return [name, f"{sum(s for s, *_ in measured.values()):.1f}", "", "", "", "", ""]
    seconds, gb, steps = measured[name]
    ends = [load["seconds"][name][end] + (load["seconds"]["score"][end] if name == "update" else 0)
            for end in (0, 1)]
    size = (load["bytes"][name] - computed["outside"]) / computed["slack"] / 1e9
    predicted = {"rollout": "decode steps", "judge": "judge steps"}
    counts = [f"{steps:,}", f"{load['counts'][predicted[name]]:,}"] if name in predicted else ["", ""]
    return [name, f"{seconds:.1f}", range_of(ends), f"{gb:.1f}", f"{size:.1f}", *counts]


def cpu_row(result, name, _):
    """A ratio of times: "rollout of N turns" (ours and generate's, with seconds and tokens per episode),
    "iteration" (TRL's over ours) or "GCD" (with over without), each with ", " and an instruction set.
    """
    what, capability = name.split(", ")
    result = result[capability]
    if what in ("iteration", "GCD"):
        ours, theirs = {"iteration": ("grpo", "trl"), "GCD": ("gcd", "grpo")}[what]
        seconds = (f"{statistics.fmean(result['seconds'][side]):.2f} s" for side in (ours, theirs))
        return [name, with_half(result[what.lower()]), *seconds, "", ""]
    row = result["rollout"][what.split()[2]]
    sides = [row["ours"], row["generate"]]
    return [name, with_half(row["ratio"]), *(f"{1000 * side['s_per_episode']:.1f} ms" for side in sides),
            *(f"{side['tokens_per_episode']:,.0f}" for side in sides)]


def gcd_row(results, name, _):
    """A split, or "all": the number of differences between a method with GCD and the same without, at both
    temperatures, of at least two seeds that are not all equal; how many are above and below 0; how many
    intervals are.
    """
    found = []
    for result in results:
        for difference, splits in result["differences"].items():
            row, other = difference.split(" - ")
            base = JUDGED.sub("", row)
            if row != base and other == (f"{base}+grpo" if f"{base}+grpo" in result["rows"] else base):
                found += [value for split, of_split in splits.items() if name in (split, "all")
                          for value in (of_split, of_split["t0.4"]) if value and value["half"]]
    beyond = [sum(sign * value["mean"] > halves * value["half"] for value in found)
              for halves in (0, 1) for sign in (1, -1)]
    return [name, *map(str, (len(found), *beyond))]


def cures_row(result, name, heads):
    """Seeds that removed the flaw in the arms whose names begin so, with and without a KL."""
    cells = [name]
    for head in heads[1:]:
        kl = "KL 0.01" if head.startswith("KL") else "no KL"
        arms = [f"{name}, {kl}, {embeddings}" for embeddings in ("tied", "untied")]
        found = [row for row in result["rows"] if row["name"] in arms]
        cells.append(f"{sum(row['removed'] for row in found)} of {sum(row['n'] for row in found)}")
    return cells


def decided_row(result, name, _):
    """A difference of the twins' decisive seeds: of the flaw's final probability, with its interval; in how
    many runs each side removed the flaw; of the chance to win at temperature 1 and at 0.4, in points; and the
    first in all seeds with outcomes of their own, if more.
    """
    decisive, every = result["decided"][name].values()
    (one, other), n = decisive["removed"], decisive["n"]
    won, sharp = ({key: 100 * value for key, value in decisive[at].items()} for at in ("wins", "sharp wins"))
    cells = [with_half(value, form).replace("-", "−")
             for value, form in ((decisive, "+.2f"), (won, "+.1f"), (sharp, "+.1f"), (every, "+.2f"))]
    return [name, cells[0], f"{one} and {other} of {n}", *cells[1:3], cells[3] if every["n"] > n else "–"]


def twins_row(result, name, heads):
    """Runs of the decisive seeds that removed the flaw, and their mean chance to win in per cent, at
    temperature 1 and at 0.4, by the row, "ARM after QUESTIONS", and the KL of the column.
    """
    arm, _, questions = name.rpartition(" after ")
    found = [result["decisive"].get(f"{arm}{KL_NAMES[head]} after {questions}") for head in heads[1:]]
    cells = (of and [of["removed"], of["n"], 100 * of["wins"], 100 * of["sharp wins"]] for of in found)
    return [name, *("{} of {}; {:.1f}, {:.1f}".format(*cell) if cell else "–" for cell in cells)]


def natural_row(result, name, _):
    """A start of natural twins: the flawed command's final probability in N with a KL (GRPO, GCD, shuffled
    labels) and without (GRPO, GCD); GRPO's with a KL on untrained templates; the judge's AUC, with a KL, when
    RL begins and after GRPO, GCD and shuffled labels.
    """
    rows, kl = {row["name"]: row for row in result["rows"]}, "KL 0.01"
    found = {arm: rows.get(f"{arm[0]} after {name}, {arm[1]}") for arm in
             [*((arm, kl) for arm in ("GRPO", "+GCD", "+shuffled")), ("GRPO", "no KL"), ("+GCD", "no KL")]}
    cells = [with_half(row["trained"]["final"]) if row else "–" for row in found.values()]
    cells.append(with_half(found["GRPO", kl]["untrained"]["final"]))
    auc = [found["GRPO", kl]["trained"]["auc_start"],
           *(row and row["trained"]["auc"] for row in [*found.values()][:3])]
    return [name, *cells, *(number(value, ".2f") for value in auc)]


def losses_row(result, name, _):
    """A loss of lab.bench.losses, or "cold_start": success in training over the first and the last ten
    iterations; on L0, with its 95 % interval; clipped tokens. All in per cent.
    """
    row = result["cold_start"] if name == "cold_start" else next(
        row for row in result["rows"] if row["loss"] == name)
    l0, success, clipped = row["evaluated"]["L0"], row.get("success"), row.get("clip_frac")
    means = [statistics.fmean(numbers) for numbers in (success[:10], success[-10:])] if success else []
    cells = [number(100 * mean, ".1f") for mean in means] or ["–", "–"]
    on_l0 = f"{100 * l0['success']:.1f} [{100 * l0['low']:.1f}, {100 * l0['high']:.1f}]"
    return [name, *cells, on_l0, number(100 * statistics.fmean(clipped), ".1f") if clipped else "–"]


def share_row(result, name, _):
    """An engine: seconds of an iteration, the engine's part of them, and that as a share."""
    row = next(row for row in result["rows"] if row["row"] == name)
    return [name, f"{row['step_s']:.1f} s", f"{row['engine_s']:.2f} s",
            f"{100 * row['engine_s'] / row['step_s']:.1f} %"]


def trained_row(result, name, _):
    """What is trained: its parameters, tokens a CPU second, and those relative to the whole model's."""
    row = next(row for row in result["rows"] if (row["way"] or "the whole model") == name)
    return [name, f"{row['trained_parameters'] / 1e6:.1f} million", with_half(row["tokens_per_cpu_s"], ".0f"),
            with_half(row["times_full"])]


def pretrained_row(result, name, heads):
    """A model's numbers of lab.studies.pretrained, by the keys at the end of the columns' heads."""
    keys = [re.search("`(.*)`$", head)[1] for head in heads[1:]]
    return [name, *(with_half(result["rows"][name][key]).replace("-", "−") for key in keys)]


# {table's name: (file below lab/results, function of a row)}; any other is a benchmark's, of lab.bench.table1
TABLES = {
    "ablation": ("table3_household_result.json", result_row),
    "admissible": ("table3_admissible_result.json", result_row),
    "chaos": ("chaos.json", chaos_row),
    "cpu": ("cpu.json", cpu_row),
    "cures": ("studies/cures.json", cures_row),
    "decided": ("studies/cures.json", decided_row),
    "early": ("table1_alfworld_early_result.json", result_row),
    "gcd": (".", gcd_row),
    "gpu": ("gpu.jsonl", gpu_row),
    "hour": ("table1_alfworld_hour_result.json", result_row),
    "losses": ("losses.json", losses_row),
    "memory": ("memory.json", memory_row),
    "natural": ("studies/natural_twins.json", natural_row),
    "origin": ("studies/origin.json", origin_row),
    "pretrained": ("studies/pretrained.json", pretrained_row),
    "room": ("memory.json", room_row),
    "share": ("engine_share.json", share_row),
    "table4": ("table4_household.json", table4_row),
    "trained": ("trained_tokens.json", trained_row),
    "twins": ("studies/cures.json", twins_row)}


def cells_of(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def row_name(label):
    """The row that a table's first cell names: the text in backticks at its end, if any, else all of it."""
    found = re.search(r"`([^`]+)`$", label)
    return found[1] if found else label


def source_of(path, name):
    """Source text of a file, or of its class or function `name` (None: the entire file)."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if name is None:
        return text.strip()
    return next(ast.get_source_segment(text, node) for node in ast.parse(text).body
                if getattr(node, "name", None) == name)


def filled(text):
    """Return a page's text with current numbers and code.

    KeyError or StopIteration if there is no such result, or row of it, or if a file has no such class or
    function.
    """
    def fill(found):
        name, (head, rule, *lines) = found[1], found[2].splitlines()
        result = stored(result_path(name))
        labels = [cells_of(line)[0] for line in lines]
        heads, row_of = cells_of(head), TABLES[name][1] if name in TABLES else result_row
        done = [[label, *row_of(result, row_name(label), heads)[1:]] for label in labels]
        return "\n".join([f"<!-- {name} -->", head, rule, *(f"| {' | '.join(row)} |" for row in done), ""])

    def quote(found):
        head = found[0].partition("\n")[0]
        return f"{head}\n```python\n{source_of(found[1], found[2])}\n```"

    return CODE.sub(quote, TABLE.sub(fill, text))


def main(argv=()):
    """Rewrite the pages. --help prints this file's docstring, and changes nothing."""
    argparse.ArgumentParser(prog="python -m lab.bench.readme", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        files.write_text(page, filled(text))
        print(f"{page.name}: {', '.join(name for name, _ in TABLE.findall(text)) or 'no tables'}")


if __name__ == "__main__":
    main(sys.argv[1:])
