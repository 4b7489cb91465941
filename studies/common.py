"""What the studies share: cells saved as they finish, kept models read back, figures, the files of a study.

A study is measured cell by cell (an arm and a seed, say); each is a line of NAME.jsonl once it is finished:
a study that was interrupted goes on where it stopped. Its numbers are NAME.json, its page NAME.md. Left out:
training as such, which is gcd.py's.
"""

import multiprocessing
import os
import platform
import shlex
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

import config
import gcd
import rollout
from lm import model as qwen
from lm.chat import Chat
from lm.engine import Sampling
from run import files
from run.setup import chat_of

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "studies"
AGREES = ("yes", "partly", "no", "not measurable")         # what a figure's "agrees" may say


# Cells

def cells(path, wanted, work, jobs):
    """The result of every cell: those that the file at `path` lacks are run, `jobs` processes at once.

    wanted: {name: settings}, plain values; work(name, settings) gives a cell's result, a dict. A line whose
    settings are others than those asked for does not count, and stays. Returns {name: result} in the order of
    `wanted`.
    """
    todo, path = missing(path, wanted), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.keep(path, lambda record: True)                    # a line that a kill cut short goes
    with tqdm(total=len(wanted), initial=len(wanted) - len(todo), desc=path.stem, unit="cell") as bar:
        for name, result in results_of(todo, work, jobs):
            files.append(path, {"cell": name, "settings": todo[name], "commit": files.commit(),
                                "result": result})
            bar.update()
    return {name: record["result"] for name, record in finished(path, wanted).items()}


def missing(path, wanted):
    """Those of the cells that the file at `path` has no result of."""
    found = finished(path, wanted)
    return {name: settings for name, settings in wanted.items() if name not in found}


def finished(path, wanted):
    """The lines of a file that are of these cells with these settings, {name: record}, in that order."""
    lines = [record for record in files.read_lines(path)[0] if "cell" in record]
    found = {record["cell"]: record for record in lines if record["settings"] == wanted.get(record["cell"])}
    return {name: found[name] for name in wanted if name in found}


def results_of(todo, work, jobs):
    """(name, result) of each cell as it ends. What is stopped or fails ends all; what has ended is kept."""
    if jobs == 1:
        for name, settings in todo.items():
            yield name, work(name, settings)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, name, settings): name for name, settings in todo.items()}
        try:
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train(flags, out):
    """One run of gcd.py in this process; what it prints goes to OUT.log, which goes when all is well.
    KeyboardInterrupt where it was stopped, RuntimeError where it failed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{out}.log", "w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        status = gcd.main([*map(str, flags), "--out", str(out)])
    if status == 130:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"{out}.log: gcd.py ended with {status}")
    Path(f"{out}.log").unlink()


def make(folders, work, jobs, name):
    """The runs of these {folder: settings} that have not ended, made by work(folder, settings)."""
    lacking = {folder: settings for folder, settings in folders.items()
               if not (Path(folder) / files.STAGES).exists()}
    for _ in tqdm(results_of(lacking, work, jobs), name, len(lacking)):
        pass


# Kept models

@dataclass(slots=True)
class Actor:
    """A model that was kept, with what it takes to play it."""

    model: torch.nn.Module
    chat: Chat
    config: config.Config

    def play(self, seats, temperature=1.0):
        """Episodes of the seats, as in a run."""
        envs = self.config.world.make(min(len(seats), self.config.slots))
        try:
            sampling = Sampling(temperature, self.config.max_response_tokens)
            return rollout.play(self.model, self.chat, envs, seats, sampling, self.config.max_turns,
                                self.config.context, self.config.history, self.config.on_truncation,
                                admissible_only=self.config.admissible_only)
        finally:
            for env in envs:
                env.close()


def actor(folder, flags):
    """The model in a folder under the flags of gcd.py that it was made with. ValueError names what lacks."""
    settings = config.parsed(["--model", str(folder), "--demonstrations", "0", *map(str, flags)])
    return Actor(qwen.load_pretrained(folder), chat_of(settings, qwen.load_tokenizer(folder)), settings)


def kept(out):
    """{iterations: folder} of the models that a run with --keep-checkpoints left; ValueError if none."""
    folders = sorted(path for path in (Path(out) / files.KEPT).glob("*") if path.name.isdecimal())
    if not folders:
        raise ValueError(f"{Path(out) / files.KEPT}: no models; run gcd.py with --keep-checkpoints")
    return {int(path.name): path for path in folders}


# What a study leaves

def pyplot(name):
    """matplotlib for SVG files that are equal where their numbers are."""
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = name
    matplotlib.rcParams["svg.fonttype"] = "none"       # text as text: a third of the size, and it can be read
    from matplotlib import pyplot as plotted
    return plotted


def save(figure, path):
    """Write a figure as SVG and close it."""
    from matplotlib import pyplot as plotted
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plotted.close(figure)


def publish(out, name, command, seeds, found, figures, page):
    """Write OUT/NAME.json and OUT/NAME.md. The commits of the cells are those in OUT/NAME.jsonl.

    figures: what the study has to say of the paper's figures and claims, a list of {"paper": which one,
    "claim": in our words, "found": here, "agrees": of AGREES, "picture": a file in OUT}; page: the text.
    """
    assert all(figure["agrees"] in AGREES for figure in figures), figures
    lines = files.read_lines(Path(out) / f"{name}.jsonl")[0]
    files.write_json(Path(out) / f"{name}.json", {
        "study": name, "command": shlex.join(command), "commit": files.commit(), "seeds": list(seeds),
        "commits of the cells": sorted({record["commit"] for record in lines if "commit" in record}),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "machine": f"{platform.machine()}, {os.cpu_count()} cores"},
        "figures": figures} | found)
    files.write_text(Path(out) / f"{name}.md", page)
