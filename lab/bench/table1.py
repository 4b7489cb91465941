"""Table 1 of the paper, from runs of this project: rows x (L0, L1, L2), means over seeds with t intervals.

A config (lab/bench/study.py) lists rows, cold starts and seeds. A cell is one run of gcd.py: a row, a seed
and a training run. It runs in runs/table1/STUDY/seedK/ROW and its result is stored in
lab/results/cells/STUDY/ROW/seedK.json (STUDY: by default the benchmark's name). A cell with a stored result
is not run again and an interrupted one resumes, so the command can be stopped and repeated at any time.
Finally the table (success at temperatures 1 and 0.4) and the paired differences are written to
CONFIG_result.json and CONFIG.md. Left out: tuning of settings, figures, and run times (lab.bench.table4).

    python -m lab.bench.table1 --config lab/results/table1_household.json            # run missing cells
    python -m lab.bench.table1 --config lab/results/table1_household.json --jobs 0   # write the table
    python -m lab.bench.table1 --config lab/results/table1_household.json --rows grpo --seeds 0,1 --jobs 1
    python -m lab.bench.table1 --config lab/results/table1_alfworld_qwen.json --rows grpo --splits L2 --jobs 1
"""

import argparse
import json
import signal
import sys
from pathlib import Path

from infra import files
from infra.signals import signals_here
from lab.bench.cells import check_results
from lab.bench.intervals import interval, markdown, mean_known, number, paired, percent
from lab.bench.jobs import run_due, to_run
from lab.bench.study import COLUMN, PAPER, add_dirty, cells_of, choose, read_config, splits_of

JUDGE = ("balanced_accuracy", "auc", "balanced_accuracy_oracle", "auc_oracle", "auc_oracle_within_verbs",
         "variance_frac", "grad_ratio", "grad_cosine")
SHARES = ("invalid_frac", "repeated_frac", "score_100")
# Columns with a share of turns; the last is for pages alone
OF_TURNS = {"invalid": "invalid_frac", "flawed": "flawed_frac", "repeated": "repeated_frac"}
NO_COLD_START = ", no cold start"                            # suffix of rows of the paper's Table 2
INFERRED = ("†: the paper does not say on which split. Table 3 (kinds of cold start, NTHR) repeats Table 1's "
            "GRPO of ALFWorld L1, so its others are taken for L1; of Table 2 (no cold start) ScienceWorld's "
            "GRPO and GiGPO are RLVMR's published numbers of L2, so its numbers are taken for L2.")


# The result

def collect(config, cells):
    """The study's result from all stored cells: rows, differences, judge metrics, and what ran."""
    stored = [files.read_json(cell.result) for cell in cells if cell.result.exists()]
    names = dict.fromkeys([*config["cold_starts"], *config["rows"]])
    paper = files.read_json(PAPER)
    rows = {name: {split: summary([cell for cell in stored if cell["row"] == name], split)
                          | paper_number(paper, config, name, split) for split in splits_of(config)}
            for name in names}
    for part in (part for row in rows.values() for part in row.values()):
        if len(part["seeds"]) < len(config["seeds"]):
            part["of"] = len(config["seeds"])
    return {key: config[key] for key in ("what", "benchmark", "seeds", "paper_model")} | {
        "splits": splits_of(config), "ran": what_ran(config, stored), "rows": rows,
        "differences": {f"{a} - {b}": difference(rows[a], rows[b]) for a, b in config["differences"]},
        "judge": judges(config, names, stored), "notes": texts(config, "note"),
        "not_rerun": texts(config, "rerun")}


def summary(cells, split):
    """One row on one split: success at temperatures 1 and 0.4, and further measures at temperature 1."""
    modes = {cell["seed"]: cell["evaluation"][split] for cell in cells if split in cell["evaluation"]}
    if not modes:
        return interval({}) | {"n": [], "t0.4": None}
    shares = {key: mean_known(mode["sampled"].get(key) for mode in modes.values()) for key in SHARES}
    if (flawed := mean_known(mode["sampled"].get("flawed_frac") for mode in modes.values())) is not None:
        shares["flawed_frac"] = flawed                        # not in older cells
    at_04 = {seed: mode["t0.4"]["success"] for seed, mode in modes.items() if "t0.4" in mode}
    return interval({seed: mode["sampled"]["success"] for seed, mode in modes.items()}) | {
        "n": sorted({mode["sampled"]["n"] for mode in modes.values()}),
        "t0.4": interval(at_04) if at_04 else None} | shares


def difference(minuend, subtrahend):
    """Difference of two rows, {split: `summary`}, paired over the seeds that both have."""
    result = {split: paired(minuend[split]["seeds"], subtrahend[split]["seeds"]) for split in minuend}
    for split in minuend:
        a, b = minuend[split]["t0.4"], subtrahend[split]["t0.4"]
        result[split]["t0.4"] = paired(a["seeds"], b["seeds"]) if a and b else None
    return result


def paper_number(paper, config, name, split):
    """The paper's number for a row and split: {"paper": per cent or None}, and "inferred" (see INFERRED)."""
    cold_start = {"paper": config.get("paper_of_cold_starts", {}).get(name)}
    method = config["rows"].get(name, cold_start)["paper"] or ""
    benchmark, model = COLUMN[config["benchmark"]], config["paper_model"]
    if values := paper["table1"][model].get(method):
        return {"paper": dict(zip(paper["table1"]["columns"], values)).get(f"{benchmark} {split}")}
    guess = None
    if method.endswith(NO_COLD_START) and split == "L2":
        values = paper["table2"].get(model, {}).get(method.removesuffix(NO_COLD_START), ())
        guess = dict(zip(paper["table2"]["columns"], values)).get(benchmark)
    if benchmark == "ALFWorld" and split == "L1":
        guess = dict(zip(paper["table3"]["columns"], paper["table3"][model])).get(method)
    return {"paper": guess} if guess is None else {"paper": guess, "inferred": True}


def models(config):
    """The models that cold starts, and rows without one, begin with."""
    firsts = [*config["cold_starts"].values(),
              *(row["flags"] for row in config["rows"].values() if not row["start"])]
    usual = config.get("model") or "the small model, from scratch"
    return " or ".join(dict.fromkeys(
        flags[flags.index("--model") + 1] if "--model" in flags else usual for flags in firsts))


def what_ran(config, stored):
    """The model, each row's numbers of parameters, the games, versions and commits of the stored cells."""
    def distinct(key):
        texts = sorted({json.dumps(cell[key]) for cell in stored if cell[key] is not None})
        return [json.loads(text) for text in texts]
    sizes = {}
    for cell in stored:
        if cell["parameters"]:
            sizes.setdefault(cell["row"], set()).add(cell["parameters"])
    return {"model": models(config), "cells": len(stored),
            "parameters": {row: sorted(found) for row, found in sizes.items()}, "games": distinct("games"),
            "commits": sorted({commit for cell in stored for commit in cell["commits"]}),
            "versions": distinct("versions")}


def judges(config, names, stored):
    """Mean over seeds of each row's judge metrics over the last ten iterations. Of several training runs the
    config's first counts; rows without a judge are left out. "of": {metric: [seeds that have it, seeds of the
    config]}, where these differ.
    """
    result = {}
    for name in names:
        for run in config["runs"]:
            found = [cell["judge"] for cell in stored
                     if cell["row"] == name and {*cell["splits"]} <= {*run["splits"]}]
            found = [judge for judge in found if judge.get("auc") is not None]
            if found and name not in result:
                result[name] = {key: mean_known(judge.get(key) for judge in found) for key in JUDGE}
                known = {key: sum(judge.get(key) is not None for judge in found) for key in JUDGE}
                n = len(config["seeds"])
                if of := {key: [k, n] for key, k in known.items() if 0 < k < n}:
                    result[name]["of"] = of
    return result


def texts(config, key):
    """The rows' texts under config key `key`, as {text: names of the rows that have it}."""
    result = {}
    for name, row in config["rows"].items():
        if row.get(key):
            result.setdefault(row[key], []).append(name)
    return result


# As text

def text(result):
    """The result as Markdown."""
    splits, seeds = result["splits"], len(result["seeds"])
    columns = [name for split in splits for name in (split, "at 0.4")]
    shares = ["invalid", *["flawed"] * has_flawed(result)]
    rows = [[name, *successes(row, seeds), *(shares_text(row, head) for head in shares),
             "/".join(count(row[s]["n"]) for s in splits), paper_text(row)]
            for name, row in result["rows"].items()]
    pairs = [[name, *successes(row, seeds, "+")] for name, row in result["differences"].items()]
    lines = [f"# {result['what']}", "", *introduction(result), "",
             markdown([result["benchmark"], *columns, *shares, "n", "paper " + " / ".join(splits)], rows)]
    if any("†" in row[-1] for row in rows):
        lines += [INFERRED, ""]
    lines += ["Differences, paired by seed, in points:", "", markdown(["difference", *columns], pairs)]
    return "\n".join(lines + notes_text(result) + score_text(result, splits) + judge_text(result))


def introduction(result):
    """Lines above the table: what ran, and how to read the columns."""
    ran, column = result["ran"], COLUMN[result["benchmark"]]
    sizes = sorted(set().union(*ran["parameters"].values()))
    parameters = " or ".join(f"{n:,}" for n in sizes) or "an unrecorded number of"
    most = max((len(row[split]["seeds"]) for row in result["rows"].values() for split in result["splits"]
                if split in row), default=0)
    seeds = f"{most} of " * (most < len(result["seeds"])) + f"{len(result['seeds'])} seeds"
    return [f"Ran: {ran['model']}, {parameters} parameters; {', '.join(ran['games']) or 'nothing yet'}; "
            f"commit {', '.join(ran['commits']) or '–'}.",
            f"Success in per cent at temperature 1 and at 0.4, mean over {seeds} ± half its 95 % t "
            "interval; invalid: turns with no command or one that the game refused, in per cent at "
            "temperature 1, by split; n: episodes a split and seed. The last column is the paper's, "
            f"{result['paper_model']} on {column}."] + (
        ["Flawed: turns that the game took and the oracle calls bad."] * has_flawed(result))


def has_flawed(result):
    """Whether any row has a share of flawed turns, which takes an oracle."""
    return any(split.get(OF_TURNS["flawed"]) is not None for row in result["rows"].values()
               for split in row.values())


def successes(row, seeds, sign=""):
    """Two table cells per split: success, or a difference, at temperatures 1 and 0.4."""
    return [percent(value, seeds, sign) for split in row.values() for value in (split, split["t0.4"])]


def shares_text(row, head):
    """The share of turns in a column of OF_TURNS on each split, in per cent; with the number of seeds if a
    split with a share has fewer than the config (the fewest).
    """
    shares = [split.get(OF_TURNS[head]) for split in row.values()]
    few = min(((len(split["seeds"]), split["of"]) for split, share in zip(row.values(), shares)
               if share is not None and "of" in split), default=None)
    return "/".join(number(share and 100 * share, ".0f") for share in shares) + few_text(few)


def few_text(few):
    """(k, n), k of n seeds, as " (k/n)"; of None ""."""
    return " ({}/{})".format(*few) if few else ""


def paper_text(row):
    """The paper's number for each split; a † marks those whose split is inferred."""
    return " / ".join(number(split["paper"]) + "†" * split.get("inferred", False) for split in row.values())


def count(n):
    """Number of episodes, as a range if it differs between seeds; n: sorted list of the numbers."""
    return "–".join(map(str, n[:1] + n[1:][-1:])) or "–"


def notes_text(result):
    """Lines below the table: the config's notes on rows."""
    lines = [f"- {', '.join(names)}: {note}" for note, names in result["notes"].items()]
    for reason, names in result["not_rerun"].items():
        lines.append(f"- {', '.join(names)}: not to be run again: {reason}")
    return ["About the rows:", "", *lines, ""] if lines else []


def score_text(result, splits):
    """Table of mean game scores; no lines if the game has none."""
    scores = {name: [row[split].get("score_100") for split in splits] for name, row in result["rows"].items()}
    rows = [[name, *map(number, score)] for name, score in scores.items() if set(score) != {None}]
    return ["Mean score, of 100:", "", markdown(["score", *splits], rows)] if rows else []


def judge_text(result):
    """Table of judge metrics; no lines if no row has a judge."""
    rows = [[name, *(number(judge[key], ".2f") + few_text(judge.get("of", {}).get(key)) for key in JUDGE)]
            for name, judge in result["judge"].items()]
    head = "The judge, mean over the last ten iterations of each row's first training run, over seeds:"
    return [head, "", markdown(["judge", *JUDGE], rows)] if rows else []


# The command

def parse(argv):
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="JSON file with rows, cold starts, seeds and flags")
    parser.add_argument("--rows", default="", help="only these rows or cold starts (grpo,gigpo); empty: all")
    parser.add_argument("--seeds", default="", help="only these seeds (0,1); empty: all")
    parser.add_argument("--splits", default="", help="only runs that evaluate these splits (L2); empty: all")
    parser.add_argument("--jobs", type=int, default=2,
                        help="cells run in parallel; 0: none, only write the table")
    add_dirty(parser)
    options = parser.parse_args(argv)
    if options.jobs < 0:
        parser.error(f"--jobs={options.jobs}: expected 0 or more")
    return options


def work(options, config, cells):
    """Run cells as the options say; returns the failures. ValueError before anything runs."""
    chosen = choose(cells, options.rows, options.seeds, options.splits)
    if options.jobs > 1 and config.get("processes", 1) > 1:
        raise ValueError(f"--jobs={options.jobs}: "
                         f"each run of this config uses {config['processes']} processes; use --jobs 1")
    check_results(cells)
    if never := [cell for cell in chosen if cell.rerun and not cell.result.exists()]:
        names = ", ".join(dict.fromkeys(cell.row for cell in never))
        print(f"{len(never)} missing cells of {names} are not run: {never[0].rerun}", file=sys.stderr)
    due = to_run(chosen) if options.jobs else []
    if not due:
        return []
    failures = run_due(due, options.jobs, options.dirty)
    check_results(cells)                                     # includes the new results
    return failures


def main(argv=None):
    options = parse(argv)
    for signum in signals_here():                            # SIGINT, too: background jobs ignore it
        signal.signal(signum, signal.default_int_handler)
    try:
        config = read_config(options.config)
        cells = cells_of(config)
        failures = work(options, config, cells)
        result, config_file = collect(config, cells), Path(options.config)
        files.write_json(config_file.with_name(config_file.stem + "_result.json"), result)
        files.write_text(config_file.with_suffix(".md"), text(result) + "\n")
    except (ValueError, OSError) as error:
        print(f"lab.bench.table1: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        return 130
    print(text(result))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
