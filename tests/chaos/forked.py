"""Tiny runs in forked processes; how they ended, and whether their files equal those of an undisturbed run.

One process has imported everything, and a fork of it costs nothing, so a complete run takes about a second.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_runs import without_times

import gcd
from infra import checkpoint, files

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--device cpu --hidden-size 16 --layers 1 --max-turns 4 --tasks 2 --group-size 4 --iterations 2 "
        "--minibatches 2 --judge-labels oracle --judge-turns 4 --judge-group-size 2 --evaluate none "
        "--context 512 --checkpoint-every 1").split()
ALL = "--algo ppo --kl loss --gcd".split()          # critic, reference, judge: everything that a run can save


PART, USUAL, ALL_TRIES = range(3)                     # sizes of an attack: --part, without a flag, --all


def sampled(items, size, part, usual):
    """A seeded sample of an attack's tries, in their order: at most `part` or `usual` of them, or all."""
    items = list(items)
    n = min(len(items), (part, usual, len(items))[size])
    return [items[k] for k in sorted(random.Random(0).sample(range(len(items)), n))]


# One child process

def child(action, output, limit_s=120, kill_after_s=None, signum=signal.SIGKILL):
    """Call action() in a forked process, with its output in the file `output`.

    Returns the exit status, negative for a signal; None if the process had to be killed after limit_s. If
    kill_after_s is given, it gets the signal `signum` after that time.
    """
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            status = action() or 0
        except SystemExit as stopped:
            status = stopped.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    pass
            os._exit(status)
    began, sent = time.monotonic(), False
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        if kill_after_s is not None and seconds > kill_after_s and not sent:
            os.kill(pid, signum)
            sent = True
        if seconds > limit_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def run(out, *flags):
    """The command gcd.py, as an action for `child`."""
    return lambda: gcd.main([*TINY, "--out", str(out), *map(str, flags)])


def exit_problem(status, output, allowed=(0, 1, 2)):
    """What is wrong with how a child ended; "" for success, or an exit with one clear line."""
    text = Path(output).read_text(errors="replace")
    if status is None:
        return "hangs"
    if "Traceback" in text:
        return "traceback: " + text.strip().splitlines()[-1][:150]
    return "" if status in allowed else f"status {status}: {text[-150:]}"


def again(out, flags, output, **kill):
    """Run the command once more in a child (kill: for `child`). Returns its exit status, and what it did to a
    checkpoint of the folder: "" unless it starts over in place of using it.
    """
    saved = any((out / folder / checkpoint.TRAINER_FILE).is_file()
                for folder in (files.CHECKPOINT, f"{files.CHECKPOINT}.old"))
    aside = len(list(out.parent.glob(f"{out.name}.old-*")))
    status = child(run(out, *flags), output, **kill)
    lost = saved and len(list(out.parent.glob(f"{out.name}.old-*"))) > aside
    return status, "it starts over where there was a checkpoint" if lost else ""


def resume_problem(out, flags, expected, output):
    """Run the same command again to resume a run; return what is wrong with its exit, with what it did to a
    checkpoint, or with its files, or "".
    """
    status, lost = again(out, flags, output)
    return exit_problem(status, output, (0,)) or lost or difference(out, expected)


def difference(out, expected):
    """How a run's folder differs from that of the undisturbed run; "" if it does not."""
    if not (out / "stages.json").exists():
        return "not finished"
    mine, theirs = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (out, expected))
    if not same(mine, theirs):
        return "weights differ"
    mine, theirs = (checkpoint.read_trainer(folder / "checkpoint") for folder in (out, expected))
    if not (same(mine["optimizer"]["state"], theirs["optimizer"]["state"])
            and same(mine["critic"], theirs["critic"])):
        return "the optimizer's state differs"
    mine, theirs = ([without_times(line) for line in files.read_lines(folder / "metrics.jsonl")[0]
                     if "config" not in line] for folder in (out, expected))
    if mine != theirs:
        return f"metrics differ: {len(mine)} lines and {len(theirs)}"
    mine, theirs = ((folder / "episodes.jsonl").read_bytes() for folder in (out, expected))
    return "" if mine == theirs else "episodes differ"


def same(a, b):
    """Whether tensors, or dicts, lists and plain values of them, are equal bit for bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def contents(folder):
    """{path: bytes} of all files in a folder except the lock."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != files.LOCK}


def in_two_processes(items, attack, folder):
    """Call attack(item, new folder), which returns the problem, for all items; yield (item, problem)."""
    pids = []
    for half in range(2):
        if (pid := os.fork()) == 0:
            with open(folder / f"outcomes{half}", "w") as outcomes:
                for k, item in list(enumerate(items))[half::2]:
                    workdir = folder / f"try{k}"
                    workdir.mkdir()
                    try:
                        problem = attack(item, workdir)
                    except BaseException as error:
                        problem = f"{type(error).__name__}: {error}"
                    print(json.dumps([k, problem]), file=outcomes, flush=True)
                    if not problem:
                        shutil.rmtree(workdir, ignore_errors=True)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    found = dict(json.loads(line) for half in range(2)
                 for line in (folder / f"outcomes{half}").read_text().splitlines())
    for k, item in enumerate(items):
        yield item, found.get(k, "the attacker died")


def undisturbed(workdir):
    """The folder of an undisturbed run of two iterations, and the checkpoint that it started from."""
    start, expected = workdir.parent / "start", workdir.parent / "undisturbed"
    if not (expected / "stages.json").exists():
        cold = ["--demonstrations", 40, "--judge-demonstrations", 20, "--iterations", 0, "--max-turns", 12]
        assert child(run(start, *cold), workdir / "output") == 0, (workdir / "output").read_text()[-2000:]
        flags = [*ALL, "--model", start / "checkpoint", "--demonstrations", 0]
        assert child(run(expected, *flags), workdir / "output") == 0, (workdir / "output").read_text()[-2000:]
    return expected, start / "checkpoint"
