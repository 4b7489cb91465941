"""Runs of gcd.py that several studies measure, with the models kept during training.

All arms of an environment and a seed start from one cold start with judge questions, except the value head,
which has a cold start of its own. A run's folder is runs/studies/ENVIRONMENT/seedS/ARM. A finished run with
the same settings is not repeated, an interrupted one is resumed (lab/bench/jobs.py). Left out: measurements.
"""

from dataclasses import dataclass
from pathlib import Path

from infra import files
from lab.bench import jobs
from lab.bench.study import ROOT, Cell, below_root
from lab.studies import common

RUNS = ROOT / "runs" / "studies"
ITERATIONS, EVERY = 40, 5                     # RL iterations; iterations between kept models
COLD, COLD_VALUE = "cold_start", "cold_start_value"
# Generated rooms as in lab/results/table1_household.json, without evaluation and with half the iterations;
# real games with a short cold start, which takes one or two minutes, and none of the hour's flags. Strings
# have pretraining as in lab/studies/origin.py, with fewer problems: on seed 90, 5,000 bring the model to
# 17 %, 8,000 to 78 %
ENVIRONMENTS = {
    "household": ("--env", "household", "--hidden-size", "64", "--layers", "3", "--max-turns", "20",
                  "--demonstrations", "4500", "--judge-demonstrations", "2000"),
    "alfworld": ("--env", "household", "--hidden-size", "96", "--layers", "3", "--max-turns", "30",
                 "--train-types", "all", "--demonstrations", "2250", "--judge-demonstrations", "500"),
    "strings": ("--env", "lab/envs/strings.py", "--rho", "0.01", "--problems", "96", "--demonstrations",
                "6500", "--cold-start-batch", "24", "--cold-start-lr", "4e-3"),
    "twins": ("--env", "lab/envs/twins.py", "--judge-labels", "oracle", "--demonstrations", "2000"),
}
# {arm: (its cold start, its flags)}
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
    """One arm of an environment and a seed."""

    root: Path = RUNS
    iterations: int = 0

    @property
    def folder(self):
        """The run's output folder."""
        return self.root / self.study / f"seed{self.seed}" / self.row

    @property
    def models(self):
        """{iterations: folder} of its kept models; a cold start has model 0. ValueError if one is missing."""
        if self.cold:
            return {0: self.folder / files.CHECKPOINT}
        found, required = common.kept_models(self.folder), range(0, self.iterations + 1, EVERY)
        if missing := [n for n in required if n not in found]:
            raise ValueError(f"{below_root(self.folder / files.KEPT)}: no model of iteration {missing[0]}; "
                             f"remove {below_root(self.folder)} to repeat the run")
        return {n: found[n] for n in required}

    def actor(self, iteration):
        """Load the model kept after that many iterations, a studies.common.Actor."""
        return common.load_actor(self.models[iteration], self.flags)

    @property
    def metrics(self):
        """The records of RL iterations in its metrics.jsonl."""
        return files.iterations_in(files.read_lines(self.folder / files.METRICS)[0])


def runs_of(environment, arms, seeds, flags=(), iterations=ITERATIONS, root=RUNS):
    """{(arm, seed): Run} of an environment's arms and of their cold starts, which come first.

    flags: of gcd.py, appended to all runs' (--games of real games). ValueError for an unknown environment or
    arm.
    """
    for kind, name, known in (("environment", environment, ENVIRONMENTS),
                              *(("arm", arm, ARMS) for arm in arms)):
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
                study=environment, row=name, seed=seed, suffix="", splits=(), model="",
                flags=("--preset", "small", "--device", "cpu", "--evaluate", "none",
                       *ENVIRONMENTS[environment], *own, "--iterations", str(length), *every,
                       *map(str, flags)),
                start=found[start, seed] if start else None, cold=start is None, root=root,
                iterations=length)
    return found


def make(runs, processes):
    """Make the missing runs, `processes` in parallel. Raises jobs.Failed, which names the run and its log.

    They store no result: whether the tree may have uncommitted changes, a study checks for its cells.
    """
    due = [run for run in runs.values() if not jobs.finished(run)]
    if failures := jobs.run_due(due, processes, dirty=True) if due else []:
        raise failures[0]
