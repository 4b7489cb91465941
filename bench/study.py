"""A study: from its config file to cells, each of which is one run of gcd.py.

A config is JSON: rows (flags of gcd.py), the cold starts they begin from, the seeds, and the training runs
that a benchmark needs (real games need two: L2 is played by a model that never trained on its types). Every
row, seed and training run is a cell. Left out: running them (bench/jobs.py) and what is kept of them
(bench/cells.py).

A row may have a "note", which its table shows, and "splits", where only some are asked of it (a training run
that evaluates none of these is left out). One with "rerun", the reason in words, is read from the
cells that there are and never run: a method that no flag asks for any more.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from run.files import read_json

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "runs" / "table1", ROOT / "results"
PAPER = ROOT / "results" / "paper.json"
GCD = (sys.executable, "gcd.py")
# The paper's columns that a benchmark is put beside
COLUMN = {"household": "ALFWorld", "alfworld": "ALFWorld", "scienceworld": "ScienceWorld"}
NEEDED = {"what", "benchmark", "splits", "seeds", "paper_model", "common", "cold_starts", "rows",
          "differences"}
OPTIONAL = {"study", "env", "model", "games", "runs", "paper_of_cold_starts", "one_cold_start", "processes"}
ROW, ROW_OPTIONAL = {"start", "flags", "paper"}, {"note", "rerun", "splits"}
RUN, RUN_OPTIONAL = {"train_types", "splits"}, {"flags"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of gcd.py."""

    study: str               # its folder in runs/table1 and results/cells; the benchmark, if none is given
    row: str
    seed: int
    suffix: str              # "" or, for a benchmark's second run, "-" and its train types
    splits: tuple            # evaluated by this run
    flags: tuple             # of gcd.py, without --seed, --out, and where the model comes from
    model: str               # to start from where no cold start comes first; empty: a fresh small model
    start: "Cell | None"     # the cold start that it begins from
    cold: bool               # is itself a cold start
    processes: int = 1       # more than one: under torchrun
    rerun: str = ""          # why it is not to be run again; empty: it may be

    @property
    def folder(self):
        """Where it runs."""
        return RUNS / self.study / f"seed{self.seed}" / (self.row + self.suffix)

    @property
    def result(self):
        """The file that keeps what matters of it."""
        return RESULTS / "cells" / self.study / self.row / f"seed{self.seed}{self.suffix}.json"

    @property
    def arguments(self):
        """What gcd.py is called with, less --resume and --overwrite."""
        if self.start:
            begin = ["--model", below_root(self.start.folder / "checkpoint"), "--demonstrations", "0"]
        else:
            begin = ["--model", self.model] if self.model else []
        return [*self.flags, *begin, "--seed", str(self.seed), "--out", below_root(self.folder)]

    @property
    def command(self):
        """How gcd.py is started, less --resume and --overwrite."""
        torchrun = str(Path(GCD[0]).with_name("torchrun"))
        many = (torchrun, "--standalone", "--nproc-per-node", str(self.processes))
        return [*(many if self.processes > 1 else GCD[:1]), *GCD[1:], *self.arguments]


def below_root(path):
    """A path as gcd.py, which runs in the repository's root, is given it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


# Reading and checking

def read_config(path):
    """The config file, checked: a mistake in it is a ValueError before anything runs."""
    if not Path(path).exists():
        raise ValueError(f"--config={path}: no such file")
    config = read_json(path)
    if wrong := sorted(NEEDED - set(config) | set(config) - NEEDED - OPTIONAL):
        raise ValueError(f"{path}: missing or unknown {', '.join(wrong)}")
    if config["benchmark"] not in COLUMN:
        raise ValueError(f"{path}: benchmark {config['benchmark']!r}: expected one of {', '.join(COLUMN)}")
    if config["paper_model"] not in (names := read_json(PAPER)["table1"]):
        raise ValueError(f"{path}: paper_model {config['paper_model']!r}: expected one of {', '.join(names)}")
    check_shapes(path, config)
    check_names(path, config)
    return config


def check_shapes(path, config):
    """Each row and each training run has what it needs, and the runs evaluate every split once."""
    for run in config.get("runs", ()):
        if not RUN <= set(run) <= RUN | RUN_OPTIONAL:
            raise ValueError(f"{path}: a run has {', '.join(run)}: expected train_types, splits and, if need "
                             "be, flags")
    if config["cold_starts"] and "--preset" not in config["common"]:
        raise ValueError(f"{path}: common: name the --preset; a cold start that is to come cannot tell it")
    for name, row in config["rows"].items():
        if not ROW <= set(row) <= ROW | ROW_OPTIONAL:
            raise ValueError(f"{path}: row {name} has {', '.join(row)}: expected start, flags, paper and, if "
                             "need be, note, rerun, splits")
    if sorted(split for run in runs_of(config) for split in run["splits"]) != sorted(config["splits"]):
        raise ValueError(f"{path}: runs must evaluate each of the splits {config['splits']} once")


def check_names(path, config):
    """What is named is defined, once."""
    names = [*config["cold_starts"], *config["rows"]]
    starts = {row["start"] for row in config["rows"].values()} - {None}
    compared = {name for pair in config["differences"] for name in pair}
    if undefined := starts - set(config["cold_starts"]) | compared - set(names):
        raise ValueError(f"{path}: {', '.join(sorted(undefined))}: used and not defined")
    if twice := set(config["cold_starts"]) & set(config["rows"]):
        raise ValueError(f"{path}: {', '.join(sorted(twice))}: a row and a cold start of one name")


def runs_of(config):
    """The training runs behind each row; one, without L2's types, where the config names none."""
    return config.get("runs") or [{"train_types": "part", "splits": config["splits"]}]


# Cells

def cells_of(config):
    """Every cell: a row's seeds together, rows as listed, cold starts just before what needs them first.

    With "one_cold_start" a benchmark's training runs begin from the same one (it sees all task types anyway).
    """
    order = [name for row, settings in config["rows"].items() for name in (settings["start"], row) if name]
    cells, cold = [], {}
    for name in dict.fromkeys([*order, *config["cold_starts"]]):        # cold starts that no row needs: last
        for seed in config["seeds"]:
            for k, run in enumerate(runs_of(config)):
                if k and name in config["cold_starts"] and config.get("one_cold_start"):
                    cold[name, seed, k] = cold[name, seed, 0]
                    continue
                if not set(run["splits"]) & set(config["rows"].get(name, {}).get("splits", run["splits"])):
                    continue
                cell = make_cell(config, name, seed, run, k, cold)
                cells.append(cell)
                if name in config["cold_starts"]:
                    cold[name, seed, k] = cell
    return cells


def make_cell(config, name, seed, run, k, cold):
    """The cell of a row or cold start in a benchmark's k-th training run; cold: the cold starts' cells."""
    is_cold = name in config["cold_starts"]
    cold_start = {"start": None, "flags": [*config["cold_starts"].get(name, ()), "--iterations", "0"]}
    row = cold_start if is_cold else config["rows"][name]
    start = cold[row["start"], seed, k] if row["start"] else None
    games = ["--games", config["games"]] if config.get("games") else []
    world = ["--env", config.get("env", config["benchmark"]), *games, "--train-types", run["train_types"]]
    splits = config["splits"] if is_cold and config.get("one_cold_start") else run["splits"]
    flags = [*world, "--evaluate", ",".join(splits), *config["common"], *run.get("flags", ()), *row["flags"]]
    return Cell(study=config.get("study", config["benchmark"]), row=name, seed=seed,
                suffix=f"-{run['train_types']}" if k else "", splits=tuple(splits), flags=tuple(flags),
                model=config.get("model", ""), start=start, cold=is_cold,
                processes=config.get("processes", 1), rerun=row.get("rerun", ""))


def choose(cells, rows, seeds, splits=""):
    """The cells of --rows, --seeds and --splits ("" for all), and the cold starts they begin from."""
    chosen = cells
    for flag, given, names_of in (("--rows", rows, lambda cell: (cell.row,)),
                                  ("--seeds", seeds, lambda cell: (str(cell.seed),)),
                                  ("--splits", splits, lambda cell: cell.splits)):
        known = dict.fromkeys(name for cell in cells for name in names_of(cell))
        wanted = set(given.split(",")) if given else set(known)
        if unknown := wanted - set(known):
            raise ValueError(f"{flag}={','.join(sorted(unknown))}: the config has {', '.join(known)}")
        chosen = [cell for cell in chosen if wanted & set(names_of(cell))]
    starts = {cell.start for cell in chosen if not cell.rerun}
    return [cell for cell in cells if cell in chosen or cell in starts]
