"""Runs of gcd.py that several studies look into, with the models that are kept along them.

All arms of a world and a seed begin from one cold start, which holds judge questions, but the value head's
from one of its own. runs/studies/WORLD/seedS/ARM holds a run; one that is there, finished and of these
settings, is not made again, an interrupted one goes on (bench/jobs.py). Left out: what is looked at in them.
"""

from dataclasses import dataclass
from pathlib import Path

from bench import jobs
from bench.study import ROOT, Cell, below_root
from run import files
from studies import common

RUNS = ROOT / "runs" / "studies"
ITERATIONS, EVERY = 40, 5                     # of RL, and between kept models
COLD, COLD_VALUE = "cold_start", "cold_start_value"
# Settings of bench's tables, less what is evaluated and half of the iterations. Real games start from a
# quarter of the demonstrations: a minute or two instead of seven
WORLDS = {
    "household": ("--env", "household", "--hidden-size", "64", "--layers", "3", "--max-turns", "20",
                  "--demonstrations", "4500", "--judge-demonstrations", "2000"),
    "alfworld": ("--env", "household", "--hidden-size", "96", "--layers", "3", "--max-turns", "30",
                 "--train-types", "all", "--demonstrations", "2250", "--judge-demonstrations", "500"),
    "twins": ("--env", "twins", "--judge-labels", "oracle", "--demonstrations", "2000"),
}
# Arm: (the cold start that it begins from, its flags)
ARMS = {
    COLD: (None, ()),
    COLD_VALUE: (None, ("--judge-kind", "value")),
    "grpo": (COLD, ("--no-gcd",)),
    "gigpo": (COLD, ("--algo", "gigpo", "--no-gcd")),
    "grpo+gcd": (COLD, ()),
    "grpo+shuffled": (COLD, ("--judge-labels", "shuffled")),
    "grpo+value": (COLD_VALUE, ("--judge-kind", "value")),
}


@dataclass(frozen=True, slots=True)
class Run(Cell):
    """One arm of a world and a seed."""

    root: Path = RUNS
    iterations: int = 0

    @property
    def folder(self):
        """Where it runs."""
        return self.root / self.study / f"seed{self.seed}" / self.row

    @property
    def models(self):
        """{iterations: folder} of its kept models, a cold start's as 0. ValueError for one that lacks."""
        if self.cold:
            return {0: self.folder / files.CHECKPOINT}
        found, wanted = common.kept(self.folder), range(0, self.iterations + 1, EVERY)
        if lacking := [n for n in wanted if n not in found]:
            raise ValueError(f"{below_root(self.folder / files.KEPT)}: no model of iteration {lacking[0]}; "
                             f"remove {below_root(self.folder)}, and the run is made again")
        return {n: found[n] for n in wanted}

    def actor(self, iteration):
        """The model kept after so many iterations, a studies.common.Actor."""
        return common.actor(self.models[iteration], self.flags)

    @property
    def metrics(self):
        """The RL iterations' lines of its metrics.jsonl."""
        return files.iterations_in(files.read_lines(self.folder / files.METRICS)[0])


def runs_of(world, arms, seeds, flags=(), iterations=ITERATIONS, root=RUNS):
    """{(arm, seed): Run} of a world's arms and of the cold starts that they begin from, these first.

    flags: of gcd.py, after all others (--games of real games). ValueError for an unknown world or arm.
    """
    for kind, name, known in (("world", world, WORLDS), *(("arm", arm, ARMS) for arm in arms)):
        if name not in known:
            raise ValueError(f"{kind} {name!r}: expected one of {', '.join(known)}")
    cold = [name for name in ARMS if name in {arm if ARMS[arm][0] is None else ARMS[arm][0] for arm in arms}]
    found = {}
    for name in dict.fromkeys([*cold, *arms]):
        start, own = ARMS[name]
        length = iterations if start else 0
        every = ("--keep-checkpoints", str(EVERY)) if start else ()
        for seed in seeds:
            found[name, seed] = Run(
                study=world, row=name, seed=seed, suffix="", splits=(), model="",
                flags=("--preset", "small", "--device", "cpu", "--evaluate", "none", *WORLDS[world], *own,
                       "--iterations", str(length), *every, *map(str, flags)),
                start=found[start, seed] if start else None, cold=start is None, root=root,
                iterations=length)
    return found


def make(runs, processes):
    """Make the runs that lack, so many at once. Raises jobs.Failed, which names the run and its log."""
    due = [run for run in runs.values() if not jobs.finished(run)]
    if failures := jobs.run_due(due, processes) if due else []:
        raise failures[0]
