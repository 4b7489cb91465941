"""A study: its config file, and the cells it defines, each of which is one run of gcd.py.

A config is a JSON file with rows (flags of gcd.py), the cold starts they begin from, seeds, and the training
runs that a benchmark needs (real games need two, because L2 is played by a model that was not trained on its
task types). Each combination of row, seed and training run is a cell. Left out: running cells
(lab/bench/jobs.py) and storing their results (lab/bench/cells.py).

A row may have a "note", which is printed below its table, and "splits", if it is evaluated on some of the
splits only; training runs that evaluate none of them are skipped. A row with "rerun" is read from stored
cells and never run, because no flag selects its method any more; the value of "rerun" is the reason.
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from infra import files

ROOT = Path(__file__).resolve().parents[2]
RUNS, RESULTS = ROOT / "runs" / "table1", ROOT / "lab" / "results"
PAPER = ROOT / "lab" / "results" / "paper.json"
GCD = (sys.executable, "gcd.py")
# The paper's column that a benchmark is compared with
COLUMN = {"household": "ALFWorld", "alfworld": "ALFWorld", "scienceworld": "ScienceWorld"}
OPTIONAL = {"study", "env", "paper_of_cold_starts", "one_cold_start", "processes"}
# Types of entries, and of what these hold
KINDS = {"what": (str, object), "benchmark": (str, object), "paper_model": (str, object),
         "model": (str, object), "games": (str, object), "runs": (list, dict), "seeds": (list, int),
         "common": (list, str), "cold_starts": (dict, list), "rows": (dict, dict),
         "differences": (list, list), "study": (str, object), "env": (str, object),
         "paper_of_cold_starts": (dict, str), "one_cold_start": (bool, object), "processes": (int, object)}
ROW, ROW_OPTIONAL = {"start", "flags", "paper"}, {"note", "rerun", "splits"}
RUN = {"train_types", "splits"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of gcd.py."""

    study: str               # subfolder of runs/table1 and lab/results/cells; default: the benchmark's name
    row: str
    seed: int
    suffix: str              # "", or "-" and the train types for a benchmark's second training run
    splits: tuple            # evaluated by this run
    flags: tuple             # of gcd.py, without --seed, --out and the flags of the initial model
    model: str               # initial model of cells without a cold start; empty: a new small model
    start: "Cell | None"     # the cold start that it begins from
    cold: bool               # True if it is a cold start itself
    processes: int = 1       # above 1: run by torchrun
    rerun: str = ""          # why it must not be run again; empty: it may be run

    @property
    def folder(self):
        """The run's output folder."""
        return RUNS / self.study / f"seed{self.seed}" / (self.row + self.suffix)

    @property
    def result(self):
        """The file of its stored result."""
        return RESULTS / "cells" / self.study / self.row / f"seed{self.seed}{self.suffix}.json"

    @property
    def arguments(self):
        """The arguments of gcd.py, without --resume and --overwrite."""
        if self.start:
            initial = ["--model", below_root(self.start.folder / "checkpoint"), "--demonstrations", "0"]
        else:
            initial = ["--model", self.model] if self.model else []
        return [*self.flags, *initial, "--seed", str(self.seed), "--out", below_root(self.folder)]

    @property
    def command(self):
        """The command that runs the cell, without --resume and --overwrite."""
        torchrun = (str(Path(GCD[0]).with_name("torchrun")), "--standalone",
                    "--nproc-per-node", str(self.processes))
        return [*(torchrun if self.processes > 1 else GCD[:1]), *GCD[1:], *self.arguments]


def below_root(path):
    """Return a path as text, relative to the repository's root (where gcd.py runs) if it lies below it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


# Reading and checking

def read_config(path):
    """Read and check a config file; ValueError for a mistake in it."""
    if not Path(path).exists():
        raise ValueError(f"--config={path}: no such file")
    config = files.read_json(path)
    check_kinds(path, config)
    if wrong := sorted(KINDS.keys() - OPTIONAL - set(config) | set(config) - KINDS.keys()):
        raise ValueError(f"{path}: missing or unknown {', '.join(wrong)}")
    if config["benchmark"] not in COLUMN:
        raise ValueError(f"{path}: benchmark {config['benchmark']!r}: expected one of {', '.join(COLUMN)}")
    if config["paper_model"] not in (names := files.read_json(PAPER)["table1"]):
        raise ValueError(f"{path}: paper_model {config['paper_model']!r}: expected one of {', '.join(names)}")
    check_shapes(path, config)
    check_names(path, config)
    return config


def check_kinds(path, config):
    """Check the types of what a config holds, as far as it holds it."""
    def expect(place, value, kind, of=object):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(item, of) for item in values):
            expected = kind.__name__ + (f" of {of.__name__}" if of is not object else "")
            raise ValueError(f"{path}: {place}{json.dumps(value)[:60]}: expected {expected}")

    expect("", config, dict)
    for key, (kind, of) in KINDS.items():
        if key in config:
            expect(f"{key}: ", config[key], kind, of)
    for run in config.get("runs", ()):
        expect("runs: splits: ", run.get("splits", []), list, str)
        expect("runs: train_types: ", run.get("train_types", ""), str)
    for name, row in config.get("rows", {}).items():
        expect(f"row {name}: flags: ", row.get("flags", []), list, str)
        for key in ("start", "paper", "note", "rerun"):
            expect(f"row {name}: {key}: ", row.get(key) or "", str)
    for pair in config.get("differences", ()):
        if len(pair) != 2:
            raise ValueError(f"{path}: differences: {json.dumps(pair)[:60]}: expected two names")
        expect("differences: ", pair, list, str)


def check_shapes(path, config):
    """Check the keys of rows and training runs, and that the runs evaluate each split once."""
    for run in config["runs"]:
        if set(run) != RUN:
            raise ValueError(f"{path}: a run has {', '.join(run)}: expected train_types and splits")
    if config["cold_starts"] and "--preset" not in config["common"]:
        raise ValueError(f"{path}: common: name the --preset; it cannot be inferred from a cold start that "
                         "has not run yet")
    for name, row in config["rows"].items():
        if not ROW <= set(row) <= ROW | ROW_OPTIONAL:
            raise ValueError(f"{path}: row {name} has {', '.join(row)}: expected start, flags, paper and "
                             "optionally note, rerun, splits")
        if unknown := set(row.get("splits", ())) - set(splits_of(config)):
            raise ValueError(f"{path}: row {name}: splits {', '.join(sorted(unknown))}: expected some of "
                             f"{', '.join(splits_of(config))}")
    if not splits_of(config) or len({*splits_of(config)}) < len(splits_of(config)):
        raise ValueError(f"{path}: runs evaluate {splits_of(config)}: expected splits, each once")


def check_names(path, config):
    """Check that every name used is defined, and that no row and cold start share a name."""
    names = [*config["cold_starts"], *config["rows"]]
    starts = {row["start"] for row in config["rows"].values()} - {None}
    if len({*config["seeds"]}) < len(config["seeds"]):
        raise ValueError(f"{path}: seeds: {config['seeds']}: expected each once")
    compared = {name for pair in config["differences"] for name in pair}
    if undefined := starts - set(config["cold_starts"]) | compared - set(names):
        raise ValueError(f"{path}: {', '.join(sorted(undefined))}: used but not defined")
    if duplicates := set(config["cold_starts"]) & set(config["rows"]):
        raise ValueError(f"{path}: {', '.join(sorted(duplicates))}: a row and a cold start of the same name")


def splits_of(config):
    """The splits that a config's training runs evaluate."""
    return [split for run in config["runs"] for split in run["splits"]]


# Cells

def cells_of(config):
    """All cells, in running order: row by row, each cold start just before the first row that needs it.

    With "one_cold_start" all training runs of a benchmark begin from the same cold start, which sees all task
    types.
    """
    order = [name for row, settings in config["rows"].items() for name in (settings["start"], row) if name]
    cells, cold = [], {}
    for name in dict.fromkeys([*order, *config["cold_starts"]]):        # last: cold starts that no row needs
        for seed in config["seeds"]:
            for k, run in enumerate(config["runs"]):
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
    """The cell of a row or cold start in training run k.

    cold: {(name, seed, k): cell} of the cold starts so far.
    """
    is_cold = name in config["cold_starts"]
    cold_start = {"start": None, "flags": [*config["cold_starts"].get(name, ()), "--iterations", "0"]}
    row = cold_start if is_cold else config["rows"][name]
    start = cold[row["start"], seed, k] if row["start"] else None
    games = ["--games", config["games"]] if config["games"] else []
    environment = ["--env", config.get("env", config["benchmark"]), *games]
    splits = splits_of(config) if is_cold and config.get("one_cold_start") else run["splits"]
    flags = [*environment, "--train-types", run["train_types"], "--evaluate", ",".join(splits),
             *config["common"], *row["flags"]]
    return Cell(study=config.get("study", config["benchmark"]), row=name, seed=seed,
                suffix=f"-{run['train_types']}" if k else "", splits=tuple(splits), flags=tuple(flags),
                model=config["model"], start=start, cold=is_cold,
                processes=config.get("processes", 1), rerun=row.get("rerun", ""))


def choose(cells, rows, seeds, splits=""):
    """Select cells by --rows, --seeds and --splits ("": all), plus the cold starts that they begin from."""
    chosen = cells
    for flag, given, names_of in (("--rows", rows, lambda cell: (cell.row,)),
                                  ("--seeds", seeds, lambda cell: (str(cell.seed),)),
                                  ("--splits", splits, lambda cell: cell.splits)):
        known = dict.fromkeys(name for cell in cells for name in names_of(cell))
        selected = set(given.split(",")) if given else set(known)
        if unknown := selected - set(known):
            raise ValueError(f"{flag}={','.join(sorted(unknown))}: the config has {', '.join(known)}")
        chosen = [cell for cell in chosen if selected & set(names_of(cell))]
    starts = {cell.start for cell in chosen if not cell.rerun}
    return [cell for cell in cells if cell in chosen or cell in starts]


def add_dirty(parser):
    """Add --dirty, the flag of a command that writes results."""
    parser.add_argument("--dirty", action="store_true",
                        help="write results of a tree with uncommitted changes; a + marks their commit")


def parse_clean(parser, argv=None):
    """Parse a benchmark's flags, with --dirty. options.command and options.commit are for the result to name.
    Ends the program, as argparse does, before it measures what would name no commit, unless with --dry.
    """
    add_dirty(parser)
    options = parser.parse_args(argv)
    try:
        options.commit = files.clean_commit(options.dirty or getattr(options, "dry", False))
    except ValueError as error:
        parser.error(str(error))
    options.command = shlex.join([*parser.prog.split(), *(sys.argv[1:] if argv is None else argv)])
    return options
