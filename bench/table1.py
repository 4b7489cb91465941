"""The paper's Table 1 form from runs of this project: rows x (L0, L1, L2), mean over seeds with a 95 % t interval.

A config names the rows (flags of gcd.py), the cold starts they begin from, the seeds, and the training runs that a
benchmark needs (real games need two: L2 is played by a model that never trained on its types). One cell is one run of
gcd.py, row x seed x run, in runs/table1/STUDY/seedK/ROW; when it ends, what matters of it goes to
results/cells/STUDY/ROW/seedK.json (STUDY: the benchmark, if the config names no other). A cell with such a file is not
run again, an interrupted one resumes: stop and start at will (under torchrun, which kills its workers half a minute
after Ctrl-C, from the last checkpoint). Then the table and paired differences go to CONFIG_result.json and CONFIG.md.
Left out: choosing settings, figures, and time (bench.table4).

    python -m bench.table1 --config results/table1_household.json                     # run what is missing, then print
    python -m bench.table1 --config results/table1_household.json --rows grpo,grpo+gcd --seeds 0,1 --jobs 1
    python -m bench.table1 --config results/table1_household.json --jobs 0            # only the table, of what is there
    python -m bench.table1 --config results/table1_alfworld_qwen.json --rows grpo --splits L2 --jobs 1   # on eight GPUs
    python -m bench.table1 --config results/table1_household.json --adopt runs/household --jobs 0

--adopt takes over finished cells of another folder laid out as seedK/ROW, cold starts with their checkpoints.
"""

import argparse
import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import gcd
from config import changed

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "runs" / "table1", ROOT / "results"
GCD = (sys.executable, "gcd.py")
PAPER = {"household": "ALFWorld", "alfworld": "ALFWorld", "scienceworld": "ScienceWorld"}     # the paper's column
RUN = {"train_types", "splits", "flags"}
NEEDED = {"what", "benchmark", "splits", "seeds", "paper_model", "common", "cold_starts", "rows", "differences"}
OPTIONAL = {"study", "env", "model", "games", "runs", "paper_of_cold_starts", "one_cold_start", "processes"}
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)   # two-sided, by degrees of freedom from 1
PLACES = ("out", "model", "resume", "evaluate", "games")      # settings that a result does not keep: they name places
JUDGE = ("balanced_accuracy", "auc", "balanced_accuracy_oracle", "auc_oracle", "auc_oracle_within_verbs",
         "variance_frac", "grad_ratio", "grad_cosine")
SHARES = ("invalid_frac", "repeated_frac", "truncated_frac", "turns", "score_100")


# Cells

@dataclass(frozen=True, slots=True)
class Cell:
    """One run of gcd.py."""

    study: str               # its folder in runs/table1 and results/cells: the benchmark, if the config names no other
    row: str
    seed: int
    suffix: str              # "" or, for a benchmark's second run, "-" and its train types
    splits: tuple            # evaluated by this run
    flags: tuple             # of gcd.py, without --seed, --out, and where the model comes from
    model: str               # folder to start from where no cold start comes first; empty: a fresh small model
    start: "Cell | None"     # the cold start that it begins from
    cold: bool               # is itself a cold start
    processes: int = 1       # more than one: under torchrun

    @property
    def folder(self):
        return RUNS / self.study / f"seed{self.seed}" / (self.row + self.suffix)

    @property
    def result(self):
        return RESULTS / "cells" / self.study / self.row / f"seed{self.seed}{self.suffix}.json"

    @property
    def arguments(self):
        """What gcd.py is called with, less --resume."""
        if self.start:
            begin = ["--model", below_root(self.start.folder / "checkpoint"), "--demonstrations", "0"]
        else:
            begin = ["--model", self.model] if self.model else []
        return [*self.flags, *begin, "--seed", str(self.seed), "--out", below_root(self.folder)]

    @property
    def command(self):
        """How gcd.py is started."""
        torchrun = (str(Path(GCD[0]).with_name("torchrun")), "--standalone", "--nproc-per-node", str(self.processes))
        return [*(torchrun if self.processes > 1 else GCD[:1]), *GCD[1:], *self.arguments]


def below_root(path):
    """A path as gcd.py, which runs in the repository's root, is given it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def read_config(path):
    """The config file, checked: a mistake in it is a ValueError before anything runs."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if wrong := sorted(NEEDED - set(config) | set(config) - NEEDED - OPTIONAL):
        raise ValueError(f"{path}: missing or unknown {', '.join(wrong)}")
    if config["benchmark"] not in PAPER:
        raise ValueError(f"{path}: benchmark {config['benchmark']!r}: expected one of {', '.join(PAPER)}")
    if config["paper_model"] not in (models := read_json(ROOT / "results" / "paper.json")["table1"]):
        raise ValueError(f"{path}: paper_model {config['paper_model']!r}: expected one of {', '.join(models)}")
    for run in config.get("runs", ()):
        if not {"train_types", "splits"} <= set(run) <= RUN:
            raise ValueError(f"{path}: a run has {', '.join(run)}: expected train_types, splits and, if need be, flags")
    if len(config["seeds"]) > len(T_95) + 1:
        raise ValueError(f"{path}: {len(config['seeds'])} seeds: at most {len(T_95) + 1}")
    names = [*config["cold_starts"], *config["rows"]]
    for name, row in config["rows"].items():
        if set(row) != {"start", "flags", "paper"}:
            raise ValueError(f"{path}: row {name} has {', '.join(row)}: expected start, flags and paper")
    starts = {row["start"] for row in config["rows"].values()} - {None}
    compared = {name for pair in config["differences"] for name in pair}
    if undefined := starts - set(config["cold_starts"]) | compared - set(names):
        raise ValueError(f"{path}: {', '.join(sorted(undefined))}: used and not defined")
    if twice := set(config["cold_starts"]) & set(config["rows"]):
        raise ValueError(f"{path}: {', '.join(sorted(twice))}: a row and a cold start of one name")
    if sorted(split for run in runs_of(config) for split in run["splits"]) != sorted(config["splits"]):
        raise ValueError(f"{path}: runs must evaluate each of the splits {config['splits']} once")
    return config


def runs_of(config):
    """The training runs behind each row; one, without L2's types, where the config names none."""
    return config.get("runs") or [{"train_types": "part", "splits": config["splits"]}]


def cells_of(config):
    """Every cell: a row's seeds together, rows as listed, each cold start just before the first row that needs it.

    With "one_cold_start" a benchmark's training runs begin from the same one (it sees all task types anyway).
    """
    order = dict.fromkeys(name for row, own in config["rows"].items() for name in (own["start"], row) if name)
    cells, cold = [], {}
    for name in dict.fromkeys([*order, *config["cold_starts"]]):        # cold starts that no row needs: last
        for seed in config["seeds"]:
            for k, run in enumerate(runs_of(config)):
                if k and name in config["cold_starts"] and config.get("one_cold_start"):
                    cold[name, seed, k] = cold[name, seed, 0]
                    continue
                cell = make_cell(config, name, seed, run, k, cold)
                cells.append(cell)
                if name in config["cold_starts"]:
                    cold[name, seed, k] = cell
    return cells


def make_cell(config, name, seed, run, k, cold):
    """The cell of row or cold start `name` in a benchmark's k-th training run; cold: the cold starts' cells."""
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
                model=config.get("model", ""), start=start, cold=is_cold, processes=config.get("processes", 1))


def wanted(cell):
    """The settings that gcd.py makes of a cell's flags: its Config."""
    try:
        return gcd.parse(cell.arguments)
    except SystemExit:
        raise ValueError(f"{cell.row}: gcd.py does not take these flags: {shlex.join(cell.flags)}") from None


def differences_of(then, cell, apart=()):
    """Where settings that a run was made with differ from those that its cell asks for now: {name: [then, now]}.

    A run without a flag in its settings was made before there was one, and did what is said of it here.
    """
    before = {"dual_clip": 0.0, "invalid": "admissible", "correction_from": "auto"}
    before |= {"tag_rewards": "code"} if then.get("algo") == "rlvmr" else {}
    return {name: list(both) for name, both in changed(before | then, wanted(cell), apart).items()}


def check_results(cells):
    """Flags that gcd.py refuses, and results made with other settings than the config's, are an error before any run.

    Results of two settings, or of other games, would be mixed in one row otherwise. Adopted ones say what differs.
    """
    games = {}
    for cell in cells:
        if not cell.result.exists():
            wanted(cell)
            continue
        stored = read_json(cell.result)
        other = differences_of(stored["config"], cell, apart=("games",))       # those are told by their hash
        if other and "adopted" not in stored:
            said = "; ".join(f"{key} was {then}, is {now}" for key, (then, now) in other.items())
            raise ValueError(f"{below_root(cell.result)}: made with other settings: {said}; remove it or restore them")
        for split, own in (stored.get("games_hash") or {}).items():
            first, file = games.setdefault(split, (own, cell.result))
            if split in cell.splits and first != own:
                raise ValueError(f"{below_root(cell.result)}: played other games of {split} than {below_root(file)}; remove one")


# Running

class Failed(Exception):
    """A cell that did not end well; its message names it."""


class Children:
    """The runs of gcd.py under way. Asked to stop, each saves a checkpoint and ends."""

    def __init__(self):
        self.running, self.lock, self.stopping = set(), threading.Lock(), False

    def run(self, command, log):
        """Run to the end, in a session of its own: Ctrl-C reaches it once, through `stop`. Returns the exit status."""
        with self.lock:
            if self.stopping:
                raise Failed("stopped")
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
            self.running.add(child)
        status = child.wait()
        with self.lock:
            self.running.discard(child)
        return status

    def stop(self):
        with self.lock:
            self.stopping = True
            for child in self.running:
                child.send_signal(signal.SIGINT)


def to_run(cells):
    """Those without a result, and of the cold starts also those that such a one needs and whose checkpoint is gone."""
    missing = [cell for cell in cells if not cell.result.exists()]
    gone = {cell.start for cell in missing if cell.start and not finished(cell.start)}
    return [cell for cell in cells if cell in missing or cell in gone]


def finished(cell):
    """Whether a cell's folder holds its finished run: of these settings and, to start from, with its checkpoint."""
    there = (cell.folder / "stages.json").exists() and same_settings(cell)
    return there and (not cell.cold or (cell.folder / "checkpoint").is_dir())


def same_settings(cell):
    """Whether the run in a cell's folder was made with the settings that the cell asks for now."""
    log = cell.folder / "metrics.jsonl"
    return not log.exists() or not differences_of(header(read_lines(log)), cell)


def resumable(cell):
    """Whether gcd.py can go on where an earlier run of the cell stopped: within its RL stage, with equal settings."""
    log = cell.folder / "metrics.jsonl"
    if not (cell.folder / "checkpoint" / "trainer.pt").exists() or not log.exists():
        return False
    return same_settings(cell) and any(row.get("phase") == "rl" for row in read_lines(log))


def run_cell(cell, jobs, children):
    """Run a cell to its end, unless its folder holds the finished run, and save its result."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{cell.folder}.log", "a", encoding="utf-8") as log:
        try:                                                 # gcd.py inherits the lock, and outlives a table1 that is killed
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failed(f"{below_root(cell.folder)}: another process is running it") from None
        if not finished(cell):
            resume = resumable(cell)
            if not resume:                                   # or the next --resume might find another run's
                shutil.rmtree(cell.folder / "checkpoint", ignore_errors=True)
            status = children.run([*cell.command, *(["--resume"] if resume else [])], log)
            if status or not (cell.folder / "stages.json").exists():
                raise Failed(f"{below_root(cell.folder)}: gcd.py ended with {status}; see {below_root(Path(log.name))}")
    write(cell.result, json.dumps(result_of(cell, cell.folder) | {"jobs": jobs}, indent=1))


def run_all(cells, jobs, report):
    """Run cells in order, `jobs` at once; a failed one is reported and stops only those that begin from it.

    report(failure or None) is called as each ends. Interrupted, all are asked to stop and waited for.
    """
    children, futures = Children(), {}

    def work(cell):
        if cell.start in futures and futures[cell.start].exception():
            raise Failed(f"{below_root(cell.folder)}: not run, because {cell.start.row} failed")
        try:
            run_cell(cell, jobs, children)
        except (ValueError, OSError) as error:               # files of an earlier run that are not what they should be
            raise Failed(f"{below_root(cell.folder)}: {type(error).__name__}: {error}") from error

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for cell in cells:                               # in order: who waits for a cold start came after it
                futures[cell] = pool.submit(work, cell)
            for done in as_completed(futures.values()):
                failure = done.exception()
                if failure and not isinstance(failure, Failed):
                    raise failure
                report(failure)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise


# What is kept of a run

def result_of(cell, folder):
    """What matters of a finished run, as plain values without a path of this machine."""
    lines, evaluation = read_lines(folder / "metrics.jsonl"), read_json(folder / "evaluation.json")
    heads = [row for row in lines if "config" in row]
    rl = {row["iteration"]: row for row in lines if row.get("phase") == "rl"}      # an iteration run twice: the later
    rl = [rl[i] for i in sorted(rl)]
    return {
        "study": cell.study, "row": cell.row, "seed": cell.seed, "splits": cell.splits,
        "start": cell.start.row if cell.start else None,
        "command": shlex.join(["python", "gcd.py", *cell.arguments]),
        "config": {key: value for key, value in header(lines).items() if key not in PLACES},
        "commits": sorted({row["commit"] for row in heads}), "versions": heads[-1]["versions"],
        "parameters": heads[-1].get("parameters"), "started": heads[0].get("started"), "resumed": len(heads) - 1,
        "games": evaluation["games"], "games_hash": evaluation.get("games_hash"),
        "protocol": evaluation.get("protocol"), "instruction": evaluation.get("instruction"),
        "evaluation": {split: evaluation["splits"][split] for split in cell.splits},
        "seconds": read_json(folder / "stages.json"), "iterations": len(rl),
        "judge": last_judge(rl[-10:]),
        "training": [[row["iteration"], row["rollout/success"]] for row in rl
                     if row["iteration"] % 10 == 0 or row is rl[-1]]}


def last_judge(rows):
    """Means of what was measured of the judge."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("judge/"))
    return {key.removeprefix("judge/"): mean_known(row.get(key) for row in rows) for key in keys}


def header(lines):
    """The settings in a run's metrics.jsonl: its first line."""
    if not lines or "config" not in lines[0]:
        raise ValueError("metrics.jsonl does not begin with settings")
    return lines[0]["config"]


def mean_known(values):
    """The mean of the values that are numbers; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def read_lines(path):
    """The objects of a .jsonl file; a line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, text):
    """Written beside and renamed: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text + "\n", encoding="utf-8")
    os.replace(beside, path)


def adopt(cells, folder):
    """Take over what another study finished of these cells: their results, and cold starts to begin from.

    Each result names the study's folder and the settings that differ. Returns how many results were taken.
    """
    taken = 0
    for cell in cells:
        source = folder / f"seed{cell.seed}" / (cell.row + cell.suffix)
        if not (source / "stages.json").exists():
            continue
        if not cell.result.exists():
            differs = differences_of(header(read_lines(source / "metrics.jsonl")), cell, apart=("games",))
            origin = {"command": None, "adopted": folder.name, "differs": differs}
            write(cell.result, json.dumps(result_of(cell, source) | origin, indent=1))
            taken += 1
        if cell.cold and not cell.folder.exists():
            shutil.copytree(source / "checkpoint", cell.folder / "checkpoint")
            shutil.copy(source / "stages.json", cell.folder)
    return taken


# The table

def interval(values):
    """Mean over seeds and the half width of its 95 % t interval (None for one seed). values: {seed: value}."""
    n, known = len(values), list(values.values())
    half = T_95[n - 2] * statistics.stdev(known) / math.sqrt(n) if n > 1 else None
    return {"mean": statistics.fmean(known), "half": half, "seeds": values}


def collect(config, cells):
    """Every stored cell → the study's result: rows, differences, judges, and what ran."""
    stored = [read_json(cell.result) for cell in cells if cell.result.exists()]
    rows = dict.fromkeys([*config["cold_starts"], *config["rows"]])
    paper = read_json(ROOT / "results" / "paper.json")
    table = {row: {split: summary([cell for cell in stored if cell["row"] == row], split) for split in config["splits"]}
             for row in rows}
    for row in rows:
        for split in config["splits"]:
            table[row][split]["paper"] = paper_number(paper, config, row, split)
    return {key: config[key] for key in ("what", "benchmark", "seeds", "splits", "paper_model")} | {
        "ran": what_ran(config, stored), "rows": table,
        "differences": {f"{a} - {b}": difference(table, a, b, config["splits"]) for a, b in config["differences"]},
        "judge": judges(rows, stored)}


def summary(cells, split):
    """One row on one split: success over seeds, and means of the rest."""
    own = {cell["seed"]: cell["evaluation"][split] for cell in cells if split in cell["evaluation"]}
    if not own:
        return {"mean": None, "half": None, "seeds": {}, "n": []}
    modes = {mode: statistics.fmean(e[mode]["success"] for e in own.values())
             for mode in ("greedy", "t0.4") if all(mode in e for e in own.values())}
    shares = {key: mean_known(e["sampled"].get(key) for e in own.values()) for key in SHARES}
    return interval({seed: e["sampled"]["success"] for seed, e in own.items()}) | {
        "n": sorted({e["sampled"]["n"] for e in own.values()})} | modes | shares


def difference(table, a, b, splits):
    """Row a minus row b, paired by seed, on the seeds that both have."""
    pairs = {split: (table[a][split]["seeds"], table[b][split]["seeds"]) for split in splits}
    pairs = {split: {seed: x[seed] - y[seed] for seed in x if seed in y} for split, (x, y) in pairs.items()}
    return {split: interval(own) if own else {"mean": None, "half": None, "seeds": {}} for split, own in pairs.items()}


def paper_number(paper, config, row, split):
    """The paper's number for a row and split, in per cent; None where it has none.

    Table 3 does not name its split; its GRPO numbers are Table 1's of ALFWorld L1, so its others are taken for that.
    """
    own = config["rows"].get(row, {"paper": config.get("paper_of_cold_starts", {}).get(row)})["paper"]
    benchmark, model = PAPER[config["benchmark"]], config["paper_model"]
    if values := paper["table1"][model].get(own):
        return dict(zip(paper["table1"]["columns"], values)).get(f"{benchmark} {split}")
    if benchmark == "ALFWorld" and split == "L1":
        return dict(zip(paper["table3"]["columns"], paper["table3"][model])).get(own)
    return None


def what_ran(config, stored):
    """The model, its parameters, the games, versions and commits behind the numbers."""
    def each(key):
        return sorted({json.dumps(cell[key]) for cell in stored if cell[key] is not None})
    return {"model": config.get("model") or "the small model, from nothing", "cells": len(stored),
            "parameters": [json.loads(p) for p in each("parameters")], "games": [json.loads(g) for g in each("games")],
            "commits": sorted({commit for cell in stored for commit in cell["commits"]}),
            "versions": [json.loads(v) for v in each("versions")],
            "adopted": sorted({f"{cell['row']} from {cell['adopted']}" for cell in stored if "adopted" in cell}),
            "differs": {key: then for cell in stored for key, then in cell.get("differs", {}).items()}}


def judges(rows, stored):
    """Means over seeds of each row's judge in its last ten iterations; rows without a judge are left out."""
    result = {}
    for row in rows:
        own = [cell["judge"] for cell in stored if cell["row"] == row and cell["judge"].get("auc") is not None]
        if own:
            result[row] = {key: mean_known(judge.get(key) for judge in own) for key in JUDGE}
    return result


# As text

def percent(own, seeds, sign=""):
    """A mean with its half width, in per cent; how many seeds it is of, where not all are there."""
    count = "" if len(own["seeds"]) == seeds else f" ({len(own['seeds'])}/{seeds})"
    if own["mean"] is None:
        return f"–{count}"
    half = "" if own["half"] is None else f" ± {100 * own['half']:.1f}"
    return f"{100 * own['mean']:{sign}.1f}{half}{count}"


def number(value, form=".1f"):
    return "–" if value is None else f"{value:{form}}"


def markdown(head, rows):
    """A table; `rows` are lists of texts."""
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows), ""]


def text(result):
    """The whole result as Markdown."""
    splits, seeds, ran = result["splits"], len(result["seeds"]), result["ran"]
    benchmark = PAPER[result["benchmark"]]
    rows = [[row, *(percent(own[s], seeds) for s in splits), "/".join(count(own[s]["n"]) for s in splits),
             " / ".join(number(own[s]["paper"]) for s in splits)] for row, own in result["rows"].items()]
    paired = [[name, *(percent(own[s], seeds, "+") for s in splits)] for name, own in result["differences"].items()]
    parameters = " or ".join(f"{n:,}" for n in ran["parameters"]) or "an unrecorded number of"
    lines = [f"# {result['what']}", "", f"Ran: {ran['model']}, {parameters} parameters; "
             f"{', '.join(ran['games']) or 'nothing yet'}; commit {', '.join(ran['commits']) or '–'}.",
             f"Success in per cent, mean over {seeds} seeds ± half its 95 % t interval; n: episodes a split and seed. "
             f"The last column is the paper's, {result['paper_model']} on {benchmark}.", "",
             *markdown([result["benchmark"], *splits, "n", "paper " + " / ".join(splits)], rows),
             "Differences, paired by seed, in points:", "", *markdown(["difference", *splits], paired)]
    if ran["adopted"]:
        said = ", ".join(f"{key} {then} (here {now})" for key, (then, now) in ran["differs"].items())
        lines += [f"Taken over: {'; '.join(ran['adopted'])}. Settings that differ: {said or 'none'}.", ""]
    return "\n".join(lines + score_text(result, splits) + judge_text(result))


def count(n):
    """How many episodes; seeds with unequal numbers are a range."""
    return "–".join(map(str, n[:1] + n[1:][-1:])) or "–"


def score_text(result, splits):
    """The mean game score, where the game has one."""
    rows = [[row, *(number(own[s].get("score_100")) for s in splits)] for row, own in result["rows"].items()
            if any(own[s].get("score_100") is not None for s in splits)]
    return ["Mean score, of 100:", "", *markdown(["score", *splits], rows)] if rows else []


def judge_text(result):
    rows = [[row, *(number(own[key], ".2f") for key in JUDGE)] for row, own in result["judge"].items()]
    return ["The judge, mean over the last ten iterations:", "", *markdown(["judge", *JUDGE], rows)] if rows else []


# The command

def choose(cells, rows, seeds, splits=""):
    """The cells of --rows, --seeds and --splits ("" for all), and the cold starts that they begin from."""
    chosen = cells
    for flag, given, of in (("--rows", rows, lambda cell: (cell.row,)), ("--seeds", seeds, lambda cell: (str(cell.seed),)),
                            ("--splits", splits, lambda cell: cell.splits)):
        known = dict.fromkeys(name for cell in cells for name in of(cell))
        asked = set(given.split(",")) if given else set(known)
        if unknown := asked - set(known):
            raise ValueError(f"{flag}={','.join(sorted(unknown))}: the config has {', '.join(known)}")
        chosen = [cell for cell in chosen if asked & set(of(cell))]
    starts = {cell.start for cell in chosen}
    return [cell for cell in cells if cell in chosen or cell in starts]


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", required=True, help="JSON file: rows, cold starts, seeds and flags")
    parser.add_argument("--rows", default="", help="only these rows or cold starts, by name: grpo,gigpo; empty: all")
    parser.add_argument("--seeds", default="", help="only these seeds: 0,1; empty: all")
    parser.add_argument("--splits", default="", help="only the runs that evaluate these: L2; empty: all")
    parser.add_argument("--jobs", type=int, default=2, help="cells run at a time, one CPU thread each; 0: table only")
    parser.add_argument("--adopt", default="", help="take finished cells from another study's folder: runs/household")
    options = parser.parse_args(argv)
    if options.jobs < 0:
        parser.error(f"--jobs={options.jobs}: expected 0 or more")
    return options


def run_due(due, jobs):
    """Run cells behind a progress bar. Returns the failures, each printed as it happens."""
    failures = []
    with tqdm(total=len(due), unit="cell") as bar:
        def report(failure):
            bar.update()
            if failure:
                failures.append(failure)
                bar.write(str(failure), file=sys.stderr)
        run_all(due, jobs, report)
    return failures


def main(argv=None):
    options = parse(argv)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):          # SIGINT too: a shell's background jobs ignore it
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:                  # unless under nohup
            signal.signal(signum, signal.default_int_handler)
    try:
        config = read_config(options.config)
        cells = cells_of(config)
        chosen = choose(cells, options.rows, options.seeds, options.splits)
        if options.adopt:
            print(f"adopted {adopt(cells, Path(options.adopt))} cells of {options.adopt}")
        if options.jobs > 1 and config.get("processes", 1) > 1:
            raise ValueError(f"--jobs={options.jobs}: each run of this config is {config['processes']} processes; --jobs 1")
        check_results(cells)
        failures, due = [], to_run(chosen) if options.jobs else []
        if due:
            failures = run_due(due, options.jobs)
            check_results(cells)                             # of what has just been run, too
    except (ValueError, OSError) as error:
        print(f"bench.table1: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    result, config_file = collect(config, cells), Path(options.config)
    write(config_file.with_name(config_file.stem + "_result.json"), json.dumps(result, indent=1))
    write(config_file.with_suffix(".md"), text(result))
    print(text(result))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
