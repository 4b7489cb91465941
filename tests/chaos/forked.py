"""Tiny runs in forked processes, how they ended, and whether what they left is what it would have been.

One process has imported everything; a fork of it costs nothing, so that a whole run takes about a second.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny_runs import untimed

import gcd
from run import files, parallel

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--device cpu --hidden-size 16 --layers 1 --max-turns 4 --tasks 2 --group-size 4 --iterations 2 "
        "--minibatches 2 --judge-labels oracle --judge-turns 4 --judge-group-size 2 --evaluate none "
        "--context 512 --checkpoint-every 1").split()
ALL = "--algo ppo --kl loss --gcd".split()          # critic, reference, judge: all that a run saves


# One child: a run, or whatever may die

def child(action, said, limit_s=120, kill_after_s=None, signum=signal.SIGKILL):
    """action() in a forked process, its output in the file `said`. Returns its exit status, negative for a
    signal, or None where it had to be ended after limit_s."""
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
    """gcd.py's command, as an action."""
    return lambda: gcd.main([*TINY, "--out", str(out), *map(str, flags)])


def wrong_end(status, said, allowed=(0, 1, 2)):
    """What is wrong with how a child ended; "" where it is one clear line or success."""
    text = Path(said).read_text(errors="replace")
    if status is None:
        return "hangs"
    if "Traceback" in text:
        return "traceback: " + text.strip().splitlines()[-1][:150]
    return "" if status in allowed else f"status {status}: {text[-150:]}"


def goes_on(out, flags, whole, said):
    """What is wrong once the same command has gone on with a run: with its end, or with what it left."""
    return wrong_end(child(run(out, *flags), said), said, (0,)) or difference(out, whole)


def difference(out, whole):
    """In what a run's folder differs from that of the undisturbed one; "" in nothing."""
    if not (out / "stages.json").exists():
        return "not finished"
    mine, theirs = (load_file(folder / "checkpoint" / "model.safetensors") for folder in (out, whole))
    if not same(mine, theirs):
        return "weights differ"
    mine, theirs = (parallel.read_trainer(folder / "checkpoint") for folder in (out, whole))
    if not (same(mine["optimizer"]["state"], theirs["optimizer"]["state"])
            and same(mine["critic"], theirs["critic"])):
        return "the optimizer's state differs"
    mine, theirs = ([untimed(line) for line in files.read_lines(folder / "metrics.jsonl")[0]
                     if "config" not in line] for folder in (out, whole))
    if mine != theirs:
        return f"metrics differ: {len(mine)} lines and {len(theirs)}"
    mine, theirs = ((folder / "episodes.jsonl").read_bytes() for folder in (out, whole))
    return "" if mine == theirs else "episodes differ"


def same(a, b):
    """Equal to the bit: tensors, and dicts, lists and plain values of them."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def contents(folder):
    """{path: bytes} of all in a folder but the lock."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != files.LOCK}


def in_two_processes(items, attack, folder):
    """attack(item, its own folder) -> problem, for all items on two cores. Yields (item, problem)."""
    pids = []
    for half in range(2):
        if (pid := os.fork()) == 0:
            with open(folder / f"outcomes{half}", "w") as outcomes:
                for k, item in list(enumerate(items))[half::2]:
                    place = folder / f"try{k}"
                    place.mkdir()
                    try:
                        problem = attack(item, place)
                    except BaseException as error:
                        problem = f"{type(error).__name__}: {error}"
                    print(json.dumps([k, problem]), file=outcomes, flush=True)
                    if not problem:
                        shutil.rmtree(place, ignore_errors=True)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    found = dict(json.loads(line) for half in range(2)
                 for line in (folder / f"outcomes{half}").read_text().splitlines())
    for k, item in enumerate(items):
        yield item, found.get(k, "the attacker died")


def undisturbed(place):
    """The folder of a run of two iterations that nobody disturbs, and the checkpoint that it began from."""
    start, whole = place.parent / "start", place.parent / "whole"
    if not (whole / "stages.json").exists():
        cold = ["--demonstrations", 40, "--judge-demonstrations", 20, "--iterations", 0, "--max-turns", 12]
        assert child(run(start, *cold), place / "said") == 0, (place / "said").read_text()[-2000:]
        flags = [*ALL, "--model", start / "checkpoint", "--demonstrations", 0]
        assert child(run(whole, *flags), place / "said") == 0, (place / "said").read_text()[-2000:]
    return whole, start / "checkpoint"
