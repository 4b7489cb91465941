"""Table 4 of the paper: the time of an iteration with GCD, and the gain in success in equal time.

Measures seconds by stage for rows of a lab.bench.table1 config with and without GCD, one run after another
from the first seed's cold start; the machine should be idle otherwise. Rows alternate, so that a slow minute
affects all of them. A run's first iteration is discarded; the result is the median of the others. The gains
come from lab.bench.table1, whose rows "...@75" train for 75 % of the iterations. Both are written to
table4_STUDY.json and .md in the config's folder. Left out: memory (lab/bench/memory.py).

    python -m lab.bench.table1 --config lab/results/table1_household.json --rows cold_start --seeds 0  # first
    python -m lab.bench.table4 --config lab/results/table1_household.json               # about 4 minutes
    python -m lab.bench.table4 --config lab/results/table1_household.json --repeats 0   # print the table only
"""

import argparse
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

from infra import files
from lab.bench.cells import config_of
from lab.bench.intervals import markdown, number, percent
from lab.bench.study import PAPER, ROOT, add_dirty, below_root, cells_of, read_config, splits_of

STAGES = ("rollout", "judge", "update")
LATER = "@75"                         # suffix of rows that train for 75 % of the iterations


def pairs_of(config):
    """The rows with GCD that have a counterpart without: [(with, without)]."""
    pairs = [(row, row.removesuffix("+gcd")) for row in config["rows"] if row.endswith("+gcd")]
    return [(row, base) for row, base in pairs if base in config["rows"]]


# Measuring

def log_of(cell):
    """Output folder of a cell's timing runs."""
    return cell.folder.parent / f"seconds_{cell.row}"


def measure(cell, iterations):
    """{stage: median seconds per iteration} of one run of a cell without evaluation."""
    out = log_of(cell)
    command = [*cell.command, "--iterations", str(iterations), "--evaluate", "none", "--out", below_root(out)]
    shutil.rmtree(out, ignore_errors=True)                   # of the previous measurement
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        message = ended.stderr.strip()[-500:]
        raise ValueError(f"{shlex.join(command)} ended with {ended.returncode}: {message}")
    counted = files.iterations_in(files.read_lines(out / files.METRICS)[0])[1:]
    return {stage: statistics.median(line[f"time/{stage}_s"] for line in counted) for stage in STAGES}


def measured(cells, iterations, repeats):
    """Time every row `repeats` times, alternating between rows.

    Returns {row: {"seconds": [{stage: seconds}], "iterations", "commit", "versions"}}.
    """
    seconds = {cell.row: [] for cell in cells}
    with tqdm(total=repeats * len(cells), unit="run") as bar:
        for _ in range(repeats):
            for cell in cells:
                bar.set_description(cell.row)
                seconds[cell.row].append(measure(cell, iterations))
                bar.update()
    head = files.read_lines(log_of(cells[0]) / files.METRICS)[0][0]
    taken = {"iterations": iterations, "commit": head["commit"], "versions": head["versions"]}
    return {row: taken | {"seconds": runs} for row, runs in seconds.items()}


def chosen(config, rows):
    """The first seed's cells of the rows and of their counterparts with GCD.

    ValueError if a row is unknown, must not be run again, or has no cold start to begin from.
    """
    known = {base: row for row, base in pairs_of(config)}
    if unknown := set(rows.split(",")) - set(known):
        raise ValueError(f"--rows={','.join(sorted(unknown))}: the config has {', '.join(known)} with and "
                         "without GCD")
    names = [name for base in rows.split(",") for name in (base, known[base])]
    by_row = {cell.row: cell for cell in reversed(cells_of(config)) if cell.seed == config["seeds"][0]}
    for cell in (by_row[name] for name in names):
        if cell.rerun:
            raise ValueError(f"--rows={rows}: {cell.row} must not be run again: {cell.rerun}")
        if cell.start and not (cell.start.folder / "checkpoint").is_dir():
            raise ValueError(f"{below_root(cell.start.folder)}: no checkpoint to begin from; run "
                             f"lab.bench.table1 --rows {cell.start.row} --seeds {cell.seed} first, with this "
                             "--config (it skips a cell that is stored: move that away); --repeats 0 prints "
                             "what is stored")
    return [by_row[name] for name in names]


# The table

def iterations_of(cell):
    """A cell's number of RL iterations, from its stored result if any, else from its flags."""
    stored = files.read_json(cell.result)
    return stored["config"]["iterations"] if stored else config_of(cell).iterations


def table(config, taken, result, paper):
    """One entry per pair: seconds by stage, ratio by repeat, and lab.bench.table1's success differences."""
    rows, cells = [], {cell.row: cell for cell in reversed(cells_of(config))}    # the first seed's
    for row, base in pairs_of(config):
        if not (row in taken and base in taken):
            continue
        seconds = {name: taken[name]["seconds"] for name in (base, row)}
        total = {name: [sum(run[s] for s in STAGES) for run in runs] for name, runs in seconds.items()}
        later, share = row + LATER, None
        if later in cells:
            share = iterations_of(cells[later]) / iterations_of(cells[base])
        rows.append({
            "row": row, "base": base,
            "seconds": {name: {stage: statistics.fmean(run[stage] for run in runs) for stage in STAGES}
                        | {"total": statistics.fmean(total[name])} for name, runs in seconds.items()},
            "ratios": [a / b for a, b in zip(total[row], total[base])],
            "share_of_iterations": share,
            "all": result["differences"].get(f"{row} - {base}"),
            "later": result["differences"].get(f"{later} - {base}"),
            "paper": of_paper(paper["table4"], config["rows"][base]["paper"])})
    return rows


def of_paper(table4, method):
    """The paper's time ratio and success difference of a method; None if Table 4 does not have it."""
    if method not in table4["columns"]:
        return None
    k = table4["columns"].index(method)
    seconds, success = table4["time"], table4["performance"]
    return {"ratio": seconds["GCD"][k] / seconds["vanilla"][k],
            "success": success["GCD"][k] - success["vanilla"][k]}


# As text

def text(taken, rows, splits, seeds):
    """The result as Markdown."""
    lines = [f"Seconds per iteration, {how_text(taken, rows)}; ×: multiples of the row without GCD, lowest "
             "and highest run; paper: Table 4.", ""]
    lines.append(markdown(["seconds", *STAGES, "total", "×", "paper ×"], seconds_rows(rows)))
    head = ["success in points", "iterations", "time ×", *splits, "paper time ×", "paper L2"]
    lines += ["What GCD brings, with as many iterations and with fewer (temperature 1, paired by seed ± half "
              f"the 95 % t interval, {seeds} seeds):", ""]
    return "\n".join([*lines, markdown(head, gain_rows(rows, splits, seeds))])


def how_text(taken, rows):
    """How the seconds were measured; rows may have been measured at different times."""
    rows_of = {}
    for row in rows:
        facts = taken[row["row"]]
        method = (f"median of {facts['iterations'] - 1}, mean of {len(facts['seconds'])} runs taken in turns "
                  f"({facts['versions']['machine']}; commit {facts['commit']})")
        rows_of.setdefault(method, []).append(row["row"])
    if len(rows_of) == 1:
        return next(iter(rows_of))
    return "; ".join(f"{', '.join(names)}: {method}" for method, names in rows_of.items())


def seconds_rows(rows):
    """Two table rows per pair, without and with GCD: seconds by stage, and the ratio of the totals."""
    lines = []
    for row in rows:
        ratios, paper = row["ratios"], row["paper"] and row["paper"]["ratio"]
        span = f"{statistics.fmean(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        for name, more in ((row["base"], ["", ""]), (row["row"], [span, number(paper, ".2f")])):
            seconds = [number(row["seconds"][name][key], ".2f") for key in (*STAGES, "total")]
            lines.append([name, *seconds, *more])
    return lines


def gain_rows(rows, splits, seeds):
    """GCD's gain in success, and its time ratio, with all iterations and with 75 % of them."""
    lines = []
    for row in rows:
        for key, share in (("all", 1.0), ("later", row["share_of_iterations"])):
            if not row[key]:
                continue
            time = paper = None
            if row["paper"]:
                time = row["paper"]["ratio"] * share
                paper = row["paper"]["success"] if key == "later" else None
            lines.append([f"{row['row']} − {row['base']}", f"{share:.0%}",
                          f"{statistics.fmean(row['ratios']) * share:.2f}",
                          *(percent(row[key][split], seeds, "+") for split in splits),
                          number(time, ".2f"), number(paper, "+.1f")])
    return lines


# The command

def parse(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="lab.bench.table1's JSON file")
    parser.add_argument("--rows", default="grpo,gigpo", help="rows without GCD; those with GCD run too")
    parser.add_argument("--iterations", type=int, default=10, help="of a run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each row; 0: print the table only")
    add_dirty(parser)
    options = parser.parse_args(argv)
    if options.iterations < 2 or options.repeats < 0:
        parser.error(f"--iterations={options.iterations} --repeats={options.repeats}: expected at least 2, 0")
    return options


def main(argv=None):
    options = parse(argv)
    try:
        path = Path(options.config)
        config = read_config(path)
        result = files.read_json(path.with_name(path.stem + "_result.json")) or {"differences": {}}
        file = path.with_name(f"table4_{config.get('study', config['benchmark'])}.json")
        taken = files.read_json(file).get("taken", {})
        if options.repeats:
            files.clean_commit(options.dirty)
            taken |= measured(chosen(config, options.rows), options.iterations, options.repeats)
        if not taken:
            raise ValueError(f"--repeats=0: no measurements yet, {file} is missing")
        if not (rows := table(config, taken, result, files.read_json(PAPER))):
            raise ValueError(f"{file}: measures no row of {path} both with and without GCD")
    except (ValueError, OSError) as error:
        print(f"lab.bench.table4: error: {error}", file=sys.stderr)
        return 2
    printed = text(taken, rows, splits_of(config), len(config["seeds"]))
    files.write_json(file, {"taken": taken, "rows": rows})
    files.write_text(file.with_suffix(".md"), printed + "\n")
    print(printed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
