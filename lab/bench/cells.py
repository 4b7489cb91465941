"""Stored results of cells in lab/results/cells, and the check that they match the config.

A result is one JSON file without machine-specific paths: the settings, the evaluation, the judge's last ten
iterations, and the training success every ten iterations. Results outlive flags: `today` translates the
settings of an older run into the current ones. Left out: running cells (lab/bench/jobs.py), tables
(lab/bench/table1.py).
"""

import shlex
from pathlib import Path

from config import changed, parse_or_exit
from infra import files
from infra.endpoint import without_path
from lab.bench.intervals import mean_known
from lab.bench.study import below_root
from lm import smollm2

PATH_FLAGS = ("out", "model", "resume", "overwrite", "evaluate", "games")     # paths of a machine: not stored
# Flags newer than some stored results: the value that describes a run made before the flag existed
NEWER_FLAGS = {"dual_clip": 0.0, "entropy_coef": 0.0, "invalid": "admissible",
               "admissible_only": False, "judge_normalize_std": False, "positions": "rotary",
               "rearranged": False, "untied": False, "judge_redraw": False, "variant": "paper"}
RENAMED = {"four": "part", "six": "all"}                      # values of --train-types and --cold-start-types


# Stored and current settings

def today(then):
    """Translate a stored run's settings, a dict, into the current flags.

    A flag missing from the settings is newer than the run. Keys that are no longer flags stay: they are not
    compared.
    """
    now = NEWER_FLAGS | then
    now |= {name: RENAMED.get(now[name], now[name]) for name in ("train_types", "cold_start_types")
            if name in now}
    return now | {"algo": "nthr"} if now.get("nthr") else now


def config_of(cell):
    """The Config that gcd.py makes of a cell's flags, for which SmolLM2 need not have been converted.
    ValueError if gcd.py rejects them.
    """
    try:
        return parse_or_exit([str(smollm2.FOLDER) if value == smollm2.NAME else value
                              for value in cell.arguments])
    except SystemExit:
        raise ValueError(f"{cell.row}: gcd.py rejects these flags: {shlex.join(cell.flags)}") from None


def differences_of(then, cell, ignored=()):
    """Differences between a run's settings and its cell's current ones: {name: [then, now]}.

    on_truncation has no flag, and its default depends on the model's folder, so without that folder it is not
    compared.
    """
    now = config_of(cell)
    if now.model and not Path(now.model).is_dir():
        ignored = *ignored, "on_truncation"
    return {name: list(values) for name, values in changed(today(then), now, ignored).items()}


def check_results(cells):
    """Raise ValueError for flags that gcd.py rejects, and for results made with other settings or games, or
    from other cold starts.

    Otherwise one row could mix results of different settings, and a difference of two rows include that of a
    cold start trained twice. Rows that must not be run again are exempt from the check of settings. Results
    from before 2026-11-30 do not name the weights that they began from.
    """
    games, starts = {}, {}
    for cell in cells:
        if not cell.result.exists():
            if not cell.rerun:
                config_of(cell)
            continue
        stored = files.read_json(cell.result)
        if not cell.rerun:
            check_settings(cell, stored)
        row = cell.start.row if cell.start else None
        if stored["start"] != row:
            raise ValueError(f"{below_root(cell.result)}: began from {stored['start']}, is to begin from "
                             f"{row}; remove it or restore the row")
        if row and (weights := stored.get("start_weights")):
            known, file = starts.setdefault(cell.start.folder, (weights, cell.result))
            if known != weights:
                raise ValueError(f"{below_root(cell.result)}: began from another {row} than "
                                 f"{below_root(file)}: it was trained again; remove one of the two")
        for split, played in (stored.get("games_hash") or {}).items():
            known, file = games.setdefault(split, (played, cell.result))
            if split in cell.splits and known != played:
                raise ValueError(f"{below_root(cell.result)}: its games of {split} differ from those of "
                                 f"{below_root(file)}; remove one of the two")


def check_settings(cell, stored):
    """Raise ValueError if a result was made with other settings. Games are compared by hash, not by path."""
    if other := differences_of(stored["config"], cell, ignored=("games",)):
        changes = "; ".join(f"{key} was {then}, is {now}" for key, (then, now) in other.items())
        raise ValueError(f"{below_root(cell.result)}: made with other settings: {changes}; remove it or "
                         "restore them")


# Results

def result_of(cell, folder, dirty=False):
    """The result of the finished run in `folder`: plain values without machine-specific paths.

    ValueError for a run, or a part of it, from a tree with uncommitted changes or without git, unless
    `dirty`: "commits" then shows a "+" or an empty text.
    """
    lines, _ = files.read_lines(folder / files.METRICS)
    evaluation = files.read_json(folder / files.EVALUATION)
    if missing := [split for split in cell.splits if split not in evaluation.get("splits", {})]:
        raise ValueError(f"{below_root(folder)}: {files.EVALUATION} has no {', '.join(missing)}")
    settings, rl = files.settings_in(lines), files.iterations_in(lines)
    heads = [line for line in lines if "config" in line]
    commits = sorted({head["commit"] for head in heads})
    if not dirty and any(not commit or commit.endswith("+") for commit in commits):
        raise ValueError(f"{below_root(folder)}: run from a tree with uncommitted changes ({commits}), so "
                         "its result would name no code that can be had again; remove it to run it again, "
                         "or mark its result by --dirty")
    return {
        "study": cell.study, "row": cell.row, "seed": cell.seed, "splits": cell.splits,
        "start": cell.start.row if cell.start else None, "start_weights": heads[0].get("start"),
        "command": shlex.join(["python", "gcd.py", *map(without_path, cell.arguments)]),
        "config": {key: value for key, value in settings.items() if key not in PATH_FLAGS},
        "commits": commits, "versions": heads[-1]["versions"],
        "parameters": heads[-1].get("parameters"), "started": heads[0].get("started"),
        "resumed": len(heads) - 1,
        "games": evaluation["games"], "games_hash": evaluation.get("games_hash"),
        "protocol": evaluation.get("protocol"), "instruction": evaluation.get("instruction"),
        "evaluation": {split: evaluation["splits"][split] for split in cell.splits},
        "seconds": files.read_json(folder / files.STAGES), "iterations": len(rl),
        "judge": last_judge(rl[-10:]),
        "training": [[line["iteration"], line["rollout/success"]] for line in rl
                     if line["iteration"] % 10 == 0 or line is rl[-1]]}


def last_judge(iterations):
    """Mean of each judge metric over the given iterations' metrics: {name without "judge/": mean}."""
    keys = dict.fromkeys(key for line in iterations for key in line if key.startswith("judge/"))
    return {key.removeprefix("judge/"): mean_known(line.get(key) for line in iterations) for key in keys}
