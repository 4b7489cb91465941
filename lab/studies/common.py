"""Shared by all studies: cells that are stored as they finish, kept models, figures, and a study's files.

A study consists of cells, e.g. one per arm and seed. A finished cell is a line of NAME.jsonl, so an
interrupted study continues with the cells that are missing. Its numbers are in NAME.json, its page in
NAME.md. Left out: training (gcd.py).
"""

import io
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import config
import gcd
import rollout
from infra import files
from infra.signals import Stop, as_completed, signals_here
from lab.bench.intervals import paired
from lab.bench.study import ROOT, add_dirty, below_root
from lm import model as decoder
from lm.chat import Chat
from lm.engine import Sampling
from models import make_chat

OUT = ROOT / "lab" / "results" / "studies"
AGREES = ("yes", "partly", "no", "not measurable")         # values of a figure's "agrees"


# Cells

def run_cells(path, requested, work, options):
    """Return the result of every requested cell; cells that the file at `path` does not have are run first.

    requested: {name: settings}, plain values. work(name, settings) returns a cell's result, a dict;
    options.jobs processes run in parallel, and with 0 none runs. A stored cell with other settings is not
    used, and stays in the file. A cell names its versions and the commit that its run began from. Returns
    {name: result} in the order of `requested`. ValueError as `missing_cells`.
    """
    path, commit = Path(path), ""
    if todo := missing_cells(path, requested, options):
        commit = files.clean_commit(options.dirty)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.filter_lines(path, lambda record: True)                # drop a line that a kill cut short
    there = len(requested) - len(todo)
    for name, result in tqdm(results_of(todo, work, options.jobs), path.stem, len(requested), initial=there,
                             unit="cell", disable=not todo):
        files.append(path, {"cell": name, "settings": todo[name], "commit": commit, "versions": versions(),
                            "result": result})
    return stored_cells(path, requested)


def versions():
    """Of what a cell, or a page, was made with."""
    return {"python": platform.python_version(), "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


def add_cells(parser, jobs, runs, holds="runs and their cold starts"):
    """Add the flags of a study that makes runs and stores cells: --jobs, --out, --runs (which `holds` what)
    and --dirty.
    """
    parser.add_argument("--jobs", type=int, default=jobs, help="runs in parallel; 0: use stored cells only")
    parser.add_argument("--out", type=Path, default=OUT, help="output folder")
    parser.add_argument("--runs", type=Path, default=runs, help=f"folder of the {holds}")
    add_dirty(parser)


def command_of(parser, options):
    """The command that remakes a study, a list: its flags that are not at their defaults, but for those of
    place and speed.
    """
    changed = {name: value for name, value in vars(options).items()
               if name not in ("jobs", "runs", "out", "dirty") and value != parser.get_default(name)}
    return [*parser.prog.split(), *(text for name, value in changed.items()
                                    for text in (f"--{name}", str(value)))]


def check_ranges(parser, *ranges):
    """End the program with one line, as argparse does, if a flag's value is out of range.

    ranges: (name, value, lowest, highest).
    """
    for name, value, low, high in ranges:
        if not low <= value <= high:
            parser.error(f"--{name}={value}: expected {low} to {high}")


def split_lists(parser, options, **known):
    """Replace --seeds and the flags `known`, {name: its possible values}, by lists of what they name between
    commas: seeds as numbers, others in the order of the possible values. Ends the program as `check_ranges`
    does.
    """
    for name, possible in known.items():
        given = [value for value in getattr(options, name).split(",") if value]
        if unknown := [value for value in given if value not in possible]:
            parser.error(f"--{name}={unknown[0]}: expected some of {','.join(possible)}")
        setattr(options, name, [value for value in possible if value in given])
    if not re.fullmatch(r"\d{1,2}(,\d{1,2})*", options.seeds):
        parser.error(f"--seeds={options.seeds}: expected numbers from 0 to 99, separated by commas")
    options.seeds = [*dict.fromkeys(map(int, options.seeds.split(",")))]


def all_cells(path, requested, work, options):
    """`run_cells`; ValueError if one that was requested has no result, with --jobs 0."""
    found = run_cells(path, requested, work, options)
    if lacking := [name for name in requested if name not in found]:
        raise ValueError(f"--jobs={options.jobs}: {path} has no cell {lacking[0]}")
    return found


def missing_cells(path, requested, options):
    """The requested cells to run, {name: settings}: those without a result in the file at `path`; with
    --jobs 0 none. ValueError if the tree has local changes, which no commit names, unless --dirty is given.
    """
    found = stored_cells(path, requested)
    missing = {name: settings for name, settings in requested.items() if name not in found and options.jobs}
    if missing:
        files.clean_commit(options.dirty)
    return missing


def stored_cells(path, requested):
    """The file's results of the requested cells with these settings, {name: result}, in that order."""
    lines = [record for record in files.read_lines(path)[0] if "cell" in record]
    found = {record["cell"]: record["result"] for record in lines
             if record["settings"] == requested.get(record["cell"])}
    return {name: found[name] for name in requested if name in found}


def results_of(todo, work, jobs):
    """Run cells in `jobs` processes and yield (name, result) of each as it finishes.

    Each on one thread (more cores: more jobs): two processes of two threads on two cores took seven times as
    long. An interrupt, SIGTERM too, or a failed cell ends all others, and is raised.
    """
    if jobs == 1 or not todo:
        for name, settings in todo.items():
            torch.set_num_threads(1)
            yield name, work(name, settings)
        return
    spawn = multiprocessing.get_context("spawn")
    with Stop.restored(), ProcessPoolExecutor(jobs, spawn, torch.set_num_threads, (1,)) as pool:
        for signum in signals_here():
            signal.signal(signum, signal.default_int_handler)
        futures = {pool.submit(work, name, settings): name for name, settings in todo.items()}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise


def train(flags, out):
    """Run gcd.py in this process; its output goes to OUT.log, which is removed if the run succeeds.

    Raises KeyboardInterrupt if the run was interrupted, RuntimeError if it failed.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out}.log", "w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        status = gcd.main([*map(str, flags), "--out", str(out)])
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"{out}.log: gcd.py ended with {status}")
    Path(f"{out}.log").unlink()


def make_runs(folders, work, jobs, name):
    """Make the runs of {folder: settings} by work(folder, settings), `jobs` in parallel. work: by `make`."""
    for _ in tqdm(results_of(folders, work, jobs), name, len(folders), disable=not folders):
        pass


def make(flags, out):
    """`train`, unless OUT holds the finished run with these flags."""
    if not is_made(out, flags):
        train(flags, out)


def is_made(out, flags):
    """Whether the folder `out` holds the finished run with these flags of gcd.py."""
    if not (out / files.STAGES).exists():
        return False
    made = files.settings_in(files.read_lines(out / files.METRICS)[0])
    wanted = json.loads(json.dumps(config.parse([*map(str, flags)]).settings()))
    return all(made.get(name) == value for name, value in wanted.items() if name not in config.WHERE)


# Verdicts

def agreement(signs):
    """One of AGREES for pairs (sign of a difference, claimed sign), of intervals.sign_of.

    "yes" if every difference has the claimed sign, "no" if one has the opposite one. An interval that
    contains 0 decides nothing: "partly" with others as claimed, "not measurable" alone or without interval.
    """
    if not signs or any(sign is None for sign, _ in signs):
        return "not measurable"
    if any(sign == -claimed for sign, claimed in signs):
        return "no"
    as_claimed = [sign == claimed for sign, claimed in signs]
    return "yes" if all(as_claimed) else "partly" if any(as_claimed) else "not measurable"


# Kept models

@dataclass(slots=True)
class Actor:
    """A kept model with the chat format and the settings that are needed to play it."""

    model: torch.nn.Module
    chat: Chat
    config: config.Config

    def play(self, specs, temperature=1.0):
        """Play the specs with the run's settings; returns the episodes."""
        games = self.config.environment.make(min(len(specs), self.config.slots))
        try:
            sampling = Sampling(temperature, self.config.max_response_tokens)
            return rollout.play(self.model, self.chat, games, specs, sampling, self.config.max_turns,
                                self.config.context, self.config.history, self.config.on_truncation,
                                admissible_only=self.config.admissible_only)
        finally:
            for game in games:
                game.close()


def load_actor(folder, flags):
    """Load the model in a folder, or a named one. flags: of gcd.py, those that it was trained with; the model
    that these name is what its training began with.

    ValueError for wrong flags or an incomplete folder.
    """
    settings = config.parse([*map(str, flags), "--model", str(folder), "--demonstrations", "0"])
    model, tokenizer = decoder.load_pretrained(settings.model), decoder.load_tokenizer(settings.model)
    return Actor(model, make_chat(settings, tokenizer), settings)


def kept_models(out):
    """{iterations: folder} of the models kept by a run with --keep-checkpoints; ValueError if none."""
    folders = sorted(path for path in (Path(out) / files.KEPT).glob("*") if path.name.isdecimal())
    if not folders:
        raise ValueError(f"{Path(out) / files.KEPT}: no models; run gcd.py with --keep-checkpoints")
    return {int(path.name): path for path in folders}


# A study's files

def pyplot(name):
    """Return matplotlib.pyplot, set up so that equal numbers give equal SVG files. name: of the study."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name
    matplotlib.rcParams["svg.fonttype"] = "none"       # text stays text: a third of the size, and searchable
    from matplotlib import pyplot as plotted
    return plotted


def save(figure, path):
    """Write a figure as SVG, coordinates to a hundredth of a point, and close it."""
    from matplotlib import pyplot as plotted
    text = io.StringIO()
    figure.savefig(text, metadata={"Date": None})
    files.write_text(path, re.sub(r"(\d\.\d\d)\d+", r"\1", text.getvalue()))
    plotted.close(figure)


def results_by_arm(names, name_of, everything, results):
    """{arm's name: {seed: result}} of the stored results, in the order of `names`; only arms with some.

    everything: {cell: settings}. name_of(settings): the arm's name.
    """
    found = {name: {} for name in names}
    for cell, settings in everything.items():
        if cell in results:
            found[name_of(settings)][settings["seed"]] = results[cell]
    return {name: of_seed for name, of_seed in found.items() if of_seed}


def paired_arms(table, one, other, number):
    """An arm's number minus another's, paired by seed (`intervals.paired`); None if one is not stored.

    table: {arm: {seed: result}}. number(result): what is compared.
    """
    if one not in table or other not in table:
        return None
    return paired(*({seed: number(result) for seed, result in table[name].items()} for name in (one, other)))


def publish(out, name, command, seeds, found, figures, page):
    """Write OUT/NAME.json and OUT/NAME.md. The commits of the cells are read from OUT/NAME.jsonl.

    The page's own commit is the one that it is committed in, so none is named.
    figures: the study's results on the paper's figures and claims, a list of {"paper": the figure or claim,
    "claim": in our words, "found": the result here, "agrees": one of AGREES, "picture": a file in OUT}.
    found: further entries of the JSON file. page: the text.
    """
    assert all(figure["agrees"] in AGREES for figure in figures), figures
    lines = files.read_lines(Path(out) / f"{name}.jsonl")[0]
    files.write_json(Path(out) / f"{name}.json", {
        "study": name, "command": shlex.join(command), "seeds": list(seeds),
        "commits of the cells": sorted({record["commit"] for record in lines if "commit" in record}),
        "versions of the page": versions(), "figures": figures} | found)
    files.write_text(Path(out) / f"{name}.md", page)


def claims_text(figures):
    """A page's paragraphs on the paper's claims. figures: see `publish`."""
    return "\n".join(f"**{figure['paper']}.** The paper: {figure['claim']} Here: {figure['found']} "
                     f"Agrees: {figure['agrees']}.\n" for figure in figures)


def result_of_table(parser, config_path):
    """The result that lab.bench.table1 wrote for a config; ends with the parser's error if there is none."""
    path = config_path.with_name(f"{config_path.stem}_result.json")
    result = files.read_json(path)
    if not result:
        parser.error(f"{path}: no such file; run python -m lab.bench.table1 --config {config_path}")
    return result


def publish_of_table(options, name, title, result, figures):
    """Publish a study of a table: a page of its figures' claims, all with the picture OUT/NAME.svg."""
    stem = options.config.stem
    page = "\n\n".join([
        f"# {title}",
        f"Computed from {stem}_result.json, which lists its cells, versions and seeds; the table is "
        f"[{stem}](../{stem}.md). Predictions: lab/predictions.md.",
        f"![Success]({name}.svg)",
        *(f"**{figure['paper']}.** {figure['claim']} {figure['found']} Agrees: {figure['agrees']}."
          for figure in figures)]) + "\n"
    command = ["python", "-m", f"lab.studies.{name}", "--config", below_root(options.config)]
    publish(options.out, name, command, result["seeds"], {}, figures, page)
    print(page)
