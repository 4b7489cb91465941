"""README.md's numbers, from results/ and from the files themselves: the README chooses the rows, this fills in the rest.

A table below a line <!-- NAME --> is filled by that name, each row by its first cell: `files` (a path → its lines),
`table4` (a row with GCD → its time), or a benchmark (a row or a difference of bench.table1 → success, the paper's beside
it). Left out: numbers in sentences, but for the core's lines.

    python -m bench.readme            # rewrite what has changed; tests/test_readme.py fails where this was forgotten
"""

import re
import statistics

from bench.table1 import ROOT, number, percent, read_json, write

TABLE = re.compile(r"^<!-- (\w+) -->\n((?:\|.*\n)+)", re.MULTILINE)
RESULTS = ROOT / "results"


def lines_of(path):
    """Lines of a file, or of the Python files of a folder."""
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def files_row(path, _, what):
    return [path, str(lines_of(ROOT / path.strip("*"))), what]


def table4_row(row, *_):
    own = next(own for own in read_json(RESULTS / "table4_household.json")["rows"] if own["row"] == row)
    base, ours = (own["seconds"][name]["total"] for name in (own["base"], row))
    later = [percent(own["later"][split], len(own["later"][split]["seeds"]), "+") if own["later"] else "–"
             for split in ("L0", "L1", "L2")]
    return [row, f"{base:.2f}", f"{ours:.2f}", f"{statistics.fmean(own['ratios']):.2f}",
            number(own["paper"] and own["paper"]["ratio"], ".2f"), *later]


def result_row(result, name):
    """A row or a difference: success on each split, and the paper's number for rows."""
    seeds, splits = len(result["seeds"]), result["splits"]
    if " - " in name:
        return [name, *(percent(result["differences"][name][split], seeds, "+") for split in splits), ""]
    own = result["rows"][name]
    paper = [own[split]["paper"] for split in splits]
    said = " / ".join(map(number, paper)) if any(paper) else ""
    return [name, *(percent(own[split], seeds) for split in splits), said]


def filled(text):
    """The README with today's numbers. A row that results/ does not have is a KeyError or StopIteration."""
    def fill(found):
        name, (head, rule, *rows) = found[1], found[2].splitlines()
        result = {} if name in ("files", "table4") else read_json(RESULTS / f"table1_{name}_result.json")
        fillers = {"files": files_row, "table4": table4_row}
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        done = [fillers[name](*own) if name in fillers else result_row(result, own[0]) for own in cells]
        return "\n".join([f"<!-- {name} -->", head, rule, *(f"| {' | '.join(own)} |" for own in done), ""])
    core = sum(lines_of(ROOT / path) for path in re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE))
    return re.sub(r"a core of [\d,]+ lines", f"a core of {core:,} lines", TABLE.sub(fill, text))


if __name__ == "__main__":
    readme = ROOT / "README.md"
    write(readme, filled(readme.read_text(encoding="utf-8")).removesuffix("\n"))
