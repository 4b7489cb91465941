"""What is kept of a cell's run in results/cells, and whether it is what the config asks for now.

A kept result is one JSON file without a path of the machine that made it: the settings, the evaluation, the
judge's last ten iterations, a little of the training. Results outlive flags: `today` says in today's
settings what an older run did. Left out: running (bench/jobs.py), tables (bench/table1.py).
"""

import shlex
import shutil

from bench.intervals import mean_known
from bench.study import below_root
from config import changed, parse
from run import files

PLACES = ("out", "model", "resume", "overwrite", "evaluate", "games")     # name places: not kept
YOUNGER = {"dual_clip": 0.0, "invalid": "admissible", "correction_from": "auto",   # flags; what was before
           "admissible_only": False, "judge_normalize_std": False, "positions": "rotary",
           "rearranged": False}
# Settings that --variant took the place of: without it, and in the released code of each algorithm's paper.
PAPER_FORM = {"baseline": "episode", "anchor": "state", "composition": "paper", "tag_rewards": "paper",
              "ppo_form": "turn"}
CODE_FORM = {"grpo": {"baseline": "turn"}, "gigpo": {"baseline": "turn", "anchor": "raw"},
             "rlvmr": {"composition": "code", "tag_rewards": "code"}, "ppo": {"ppo_form": "verl-agent"}}


# Settings then and now

def today(then):
    """The settings of a run, a dict, as they are called today.

    A run without a flag in its settings was made before there was one. What no flag asks for any more is a
    "mixed" variant, which equals none. Keys that mean nothing today stay: nobody compares them.
    """
    now = YOUNGER | then
    if "variant" in then:
        return now
    algorithm = now.get("algo")
    if algorithm == "rlvmr":
        now.setdefault("tag_rewards", "code")
    form = {key: now.pop(key, paper) for key, paper in PAPER_FORM.items()}
    if now.pop("nthr", False):
        now["algo"] = "nthr"
    if form == PAPER_FORM:
        return now | {"variant": "paper"}
    if form == PAPER_FORM | CODE_FORM.get(algorithm, {}):
        if now.get("invalid_unit") == "own":                 # the code's variant says so itself
            del now["invalid_unit"]
        return now | {"variant": "code"}
    mixed = [f"{key} {value}" for key, value in form.items() if value != PAPER_FORM[key]]
    return now | {"variant": f"mixed: {', '.join(mixed)}"}


def wanted(cell):
    """The settings that gcd.py makes of a cell's flags: its Config."""
    try:
        return parse(cell.arguments)
    except SystemExit:
        raise ValueError(f"{cell.row}: gcd.py does not take these flags: {shlex.join(cell.flags)}") from None


def differences_of(then, cell, apart=()):
    """Where the settings of a run differ from those that its cell asks for now: {name: [then, now]}."""
    return {name: list(both) for name, both in changed(today(then), wanted(cell), apart).items()}


def check_results(cells):
    """Flags that gcd.py refuses, and results of other settings than the config's, are a ValueError.

    Results of two settings, or of other games, would be mixed in one row otherwise. Adopted ones say what
    differs; rows that are not to be run again are what they are.
    """
    games = {}
    for cell in cells:
        if not cell.result.exists():
            if not cell.rerun:
                wanted(cell)
            continue
        stored = files.read_json(cell.result)
        if "adopted" not in stored and not cell.rerun:
            check_settings(cell, stored)
        for split, played in (stored.get("games_hash") or {}).items():
            known, file = games.setdefault(split, (played, cell.result))
            if split in cell.splits and known != played:
                raise ValueError(f"{below_root(cell.result)}: played other games of {split} than "
                                 f"{below_root(file)}; remove one")


def check_settings(cell, stored):
    """ValueError where a result was made with other settings. Games are told by their hash."""
    if other := differences_of(stored["config"], cell, apart=("games",)):
        changes = "; ".join(f"{key} was {then}, is {now}" for key, (then, now) in other.items())
        raise ValueError(f"{below_root(cell.result)}: made with other settings: {changes}; remove it or "
                         "restore them")


# What is kept of a run

def result_of(cell, folder):
    """What matters of a finished run, as plain values without a path of this machine."""
    lines, _ = files.read_lines(folder / files.METRICS)
    evaluation = files.read_json(folder / files.EVALUATION)
    if not evaluation:
        raise ValueError(f"{below_root(folder)}: has no {files.EVALUATION}")
    settings, rl = files.settings_in(lines), files.iterations_in(lines)
    heads = [line for line in lines if "config" in line]
    return {
        "study": cell.study, "row": cell.row, "seed": cell.seed, "splits": cell.splits,
        "start": cell.start.row if cell.start else None,
        "command": shlex.join(["python", "gcd.py", *cell.arguments]),
        "config": {key: value for key, value in settings.items() if key not in PLACES},
        "commits": sorted({head["commit"] for head in heads}), "versions": heads[-1]["versions"],
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
    """Means of what was measured of the judge."""
    keys = dict.fromkeys(key for line in iterations for key in line if key.startswith("judge/"))
    return {key.removeprefix("judge/"): mean_known(line.get(key) for line in iterations) for key in keys}


def adopt(cells, folder):
    """Take over what another study finished of these cells: their results, and cold starts to begin from.

    Each result names the study's folder and the settings that differ; rows that are not to be run again are
    left where they are, because nothing says what they should be. Returns how many results were taken.
    """
    taken = 0
    for cell in cells:
        source = folder / f"seed{cell.seed}" / (cell.row + cell.suffix)
        if cell.rerun or not (source / files.STAGES).exists():
            continue
        if not cell.result.exists():
            settings = files.settings_in(files.read_lines(source / files.METRICS)[0])
            origin = {"command": None, "adopted": folder.name,
                      "differs": differences_of(settings, cell, apart=("games",))}
            files.write_json(cell.result, result_of(cell, source) | origin)
            taken += 1
        if cell.cold and not cell.folder.exists():
            shutil.copytree(source / "checkpoint", cell.folder / "checkpoint")
            shutil.copy(source / files.STAGES, cell.folder)
    return taken
