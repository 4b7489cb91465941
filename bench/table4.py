"""The paper's Table 4 form: what an iteration with GCD costs, and what it brings in equal time.

Seconds by stage of rows of a bench.table1 config, with and without GCD, measured one run after another from seed 0's cold
start: on a machine that does nothing else. The rows take turns, so that a slow minute hits all of them; a run's first
iteration is left out, the median of the others counts. The success beside it is bench.table1's: its rows "...@75" train
for 75 % of the iterations. Both go to table4_STUDY.json and .md beside the config.

    python -m bench.table1 --config results/table1_household.json --rows cold_start,cold_start_tags --seeds 0   # starts
    python -m bench.table4 --config results/table1_household.json               # about 6 minutes
    python -m bench.table4 --config results/table1_household.json --repeats 0   # only the table, of what is there
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from bench import table1
from bench.table1 import markdown, number, percent

STAGES = ("rollout", "judge", "update")
LATER = "@75"                                       # ends the name of a row that trains for 75 % of the iterations


def pairs_of(config):
    """Rows with GCD and their counterparts without, [(with, without)]."""
    rows = config["rows"]
    return [(row, base) for row in rows if row.endswith("+gcd") and (base := row.removesuffix("+gcd")) in rows]


def measure(cell, iterations):
    """One run of a cell for some iterations, nothing evaluated. Returns each stage's median seconds per iteration."""
    out = cell.folder.parent / f"seconds_{cell.row}"
    command = [*cell.command, "--iterations", str(iterations), "--evaluate", "none",
               "--out", table1.below_root(out)]
    ended = subprocess.run(command, cwd=table1.ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise ValueError(f"{shlex.join(command)} ended with {ended.returncode}: {ended.stderr.strip()[-500:]}")
    rows = [row for row in table1.read_lines(out / "metrics.jsonl") if row.get("phase") == "rl"][1:]
    return {stage: statistics.median(row[f"time/{stage}_s"] for row in rows) for stage in STAGES}


def measured(cells, iterations, repeats):
    """Every row `repeats` times, in turns: {row: {"seconds": [{stage: seconds}], and what they were taken on}}."""
    seconds = {cell.row: [] for cell in cells}
    with tqdm(total=repeats * len(cells), unit="run") as bar:
        for _ in range(repeats):
            for cell in cells:
                bar.set_description(cell.row)
                seconds[cell.row].append(measure(cell, iterations))
                bar.update()
    head = table1.read_lines(cells[0].folder.parent / f"seconds_{cells[0].row}" / "metrics.jsonl")[0]
    taken = {"iterations": iterations, "commit": head["commit"], "versions": head["versions"]}
    return {row: taken | {"seconds": own} for row, own in seconds.items()}


def table(config, taken, result, paper):
    """Per pair: seconds by stage, their ratio by repeat, and the differences in success, of bench.table1's result."""
    rows, cells = [], {cell.row: cell for cell in table1.cells_of(config)}
    for row, base in pairs_of(config):
        if not (row in taken and base in taken):
            continue
        seconds = {name: taken[name]["seconds"] for name in (row, base)}
        total = {name: [sum(run[stage] for stage in STAGES) for run in seconds[name]] for name in (row, base)}
        later, share = row + LATER, None
        if later in cells:
            share = table1.wanted(cells[later]).iterations / table1.wanted(cells[base]).iterations
        method = config["rows"][base]["paper"]
        rows.append({
            "row": row, "base": base,
            "seconds": {name: {stage: statistics.fmean(run[stage] for run in seconds[name]) for stage in STAGES}
                        | {"total": statistics.fmean(total[name])} for name in (base, row)},
            "ratios": [a / b for a, b in zip(total[row], total[base])],
            "share_of_iterations": share,
            "all": result["differences"].get(f"{row} - {base}"), "later": result["differences"].get(f"{later} - {base}"),
            "paper": of_paper(paper["table4"], method)})
    return rows


def of_paper(table4, method):
    """The paper's ratio of times and difference in success, or None."""
    if method not in table4["columns"]:
        return None
    k = table4["columns"].index(method)
    time, success = ({name: table4[key][name][k] for name in ("GCD", "vanilla")} for key in ("time", "performance"))
    return {"ratio": time["GCD"] / time["vanilla"], "success": success["GCD"] - success["vanilla"]}


def text(taken, rows, splits, seeds):
    """The result as Markdown."""
    how = {}                                        # rows may have been measured on different days
    for own in rows:
        one = taken[own["row"]]
        said = f"median of {one['iterations'] - 1}, mean of {len(one['seconds'])} runs taken in turns " \
               f"({one['versions']['machine']}; commit {one['commit']})"
        how.setdefault(said, []).append(own["row"])
    said = "; ".join(said if len(how) == 1 else f"{', '.join(names)}: {said}" for said, names in how.items())
    lines = [f"Seconds per iteration, {said}; ×: multiples of the row without GCD, lowest and highest run; paper: Table 4.", ""]
    times = []
    for own in rows:
        for name in (own["base"], own["row"]):
            ratio = [f"{statistics.fmean(own['ratios']):.2f} ({min(own['ratios']):.2f}–{max(own['ratios']):.2f})",
                     number(own["paper"] and own["paper"]["ratio"], ".2f")] if name == own["row"] else ["", ""]
            times.append([name, *(number(own["seconds"][name][key], ".2f") for key in (*STAGES, "total")), *ratio])
    lines += markdown(["seconds", *STAGES, "total", "×", "paper ×"], times)
    gains = []
    for own in rows:
        for key, share in (("all", 1.0), ("later", own["share_of_iterations"])):
            if own[key]:
                ratio = statistics.fmean(own["ratios"]) * share
                paper = own["paper"] and (own["paper"]["ratio"] * share, own["paper"]["success"] if key == "later" else None)
                gains.append([f"{own['row']} − {own['base']}", f"{share:.0%}", f"{ratio:.2f}",
                              *(percent(own[key][split], seeds, "+") for split in splits),
                              number(paper and paper[0], ".2f"), number(paper and paper[1], "+.1f")])
    head = ["success in points", "iterations", "time ×", *splits, "paper time ×", "paper L2"]
    return "\n".join([*lines, "What GCD brings, with as many iterations and with fewer (paired by seed ± half the 95 % t "
                      f"interval, {seeds} seeds):", "", *markdown(head, gains)])


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="bench.table1's JSON file")
    parser.add_argument("--rows", default="grpo,gigpo,rlvmr", help="rows without GCD; those with it are run beside them")
    parser.add_argument("--iterations", type=int, default=10, help="of a run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a row; 0: table only")
    options = parser.parse_args(argv)
    if options.iterations < 2 or options.repeats < 0:
        parser.error(f"--iterations={options.iterations} --repeats={options.repeats}: expected at least 2 and 0")
    return options


def main(argv=None):
    options = parse(argv)
    try:
        path = Path(options.config)
        config, paper = table1.read_config(path), table1.read_json(table1.ROOT / "results" / "paper.json")
        beside = path.with_name(path.stem + "_result.json")
        result = table1.read_json(beside) if beside.exists() else {"differences": {}}
        file = path.with_name(f"table4_{config.get('study', config['benchmark'])}.json")
        taken = table1.read_json(file)["taken"] if file.exists() else {}
        if options.repeats:
            taken |= measured(chosen(config, options.rows), options.iterations, options.repeats)
        if not taken:
            raise ValueError(f"--repeats=0: nothing was measured yet, {file} is missing")
        if not (rows := table(config, taken, result, paper)):
            raise ValueError(f"{file}: nothing of it is a row of {path} with and without GCD")
    except (ValueError, OSError) as error:
        print(f"bench.table4: error: {error}", file=sys.stderr)
        return 2
    said = text(taken, rows, config["splits"], len(config["seeds"]))
    table1.write(file, json.dumps({"taken": taken, "rows": rows}, indent=1))
    table1.write(file.with_suffix(".md"), said)
    print(said)
    return 0


def chosen(config, rows):
    """The first seed's cells of rows without GCD and of those with it. ValueError where one, or its start, is missing."""
    known = {base: row for row, base in pairs_of(config)}
    if unknown := set(rows.split(",")) - set(known):
        raise ValueError(f"--rows={','.join(sorted(unknown))}: the config has {', '.join(known)} with and without GCD")
    names = [name for base in rows.split(",") for name in (base, known[base])]
    first = {cell.row: cell for cell in reversed(table1.cells_of(config)) if cell.seed == config["seeds"][0]}
    cells = [first[name] for name in names]
    for cell in cells:
        if cell.start and not (cell.start.folder / "checkpoint").is_dir():
            raise ValueError(f"{table1.below_root(cell.start.folder)}: no checkpoint to begin from; run bench.table1 --rows "
                             f"{cell.start.row} --seeds {cell.seed} first")
    return cells


if __name__ == "__main__":
    sys.exit(main())
