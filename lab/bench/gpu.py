"""Checks to run first on a new GPU: one JSON line per check with its target and verdict, then a table.

Each check is a process of its own with a time limit, so that one that faults or hangs is a line and the next
one runs. They are in the order of what would change the design. Weights are random, so nothing is
downloaded; prompts have Qwen2.5's tokenizer and template where ../shared has them, else a stand-in with
about as many tokens; messages have the lengths of envs/lengths.json. Targets are computed
(lab/bench/memory.py), and shares are given of the data sheet's peak and of what this GPU reaches.

A command ends within ten minutes: a check starts if ENOUGH of its time limit is left, and if that was not
enough it is left to the next one. What --out holds of this GPU, torch and target is not run again, but for
checks that were skipped, and for those that ended by an error, which come last: while checks are left, the
exit status is 3 (1 if one fell short), and the same command goes on. A line of a check that fails, dies or
hangs has its traceback, and what it had measured before. The checks are in gpu_checks.py (the engine) and
gpu_runs.py (training).

    python -m lab.bench.gpu --minutes 10      # what would change the design; 30: all, in several commands
    python -m lab.bench.gpu --tiny            # the checks on any device in seconds: tests/lab/test_gpu.py
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from infra import files
from lab.bench.study import ROOT

OUT, FOLDER = ROOT / "lab" / "results" / "gpu.jsonl", ROOT / "runs" / "gpu"
MOST_S, TINY_S = 560, 200   # of one command, which takes some seconds more; of a check with --tiny
STACK, STACK_S = "stack.txt", 3     # file of a check's stack; written so long before its time limit
ENOUGH = 0.6                # of a check's time limit
MORE_TO_RUN = 3             # exit status
ENGINE, RUNS = "lab.bench.gpu_checks", "lab.bench.gpu_runs"


@dataclass(frozen=True)
class Check:
    """A check: a function `name` of a module. minutes: the smallest --minutes that runs it."""

    name: str
    module: str
    minutes: int
    limit_s: int
    target: str


CHECKS = [Check(*row) for row in (
    ("limits", ENGINE, 10, 180, "80 % of the data sheet's bandwidth, 60 % of its FLOPs"),
    ("varlen", ENGINE, 10, 90, "errors under .03 on each path, with keys in parts too"),
    ("graphs", ENGINE, 10, 120, "equal tokens, and faster"),
    ("trainer_gap", ENGINE, 10, 120, "twice bf16's rounding at most, under .1 nats; over .1 with faults"),
    ("gradient", ENGINE, 10, 120, "cosine over .99 and norm within 2 % of fp32's; not so with a fault"),
    ("update_16k", ENGINE, 10, 120, "the estimate's share of the data sheet's FLOPs, counted where computed"),
    ("iteration", RUNS, 10, 400, "gcd.py: each stage's seconds and bytes at most 15 % over the estimate"),
    ("ranks", RUNS, 10, 300, "on all GPUs a cold start as on one, within 2 %; RL, Ctrl-C, --resume"),
    ("floor", ENGINE, 10, 90, "a decode step of long rows at most 15 % over the estimate"),
    ("lengths", ENGINE, 10, 120, "under .3 nats, of later prompts and answers too"),
    ("offload", ENGINE, 30, 120, "under 15 s, equal outputs, no memory left allocated"),
    ("update_32k", ENGINE, 30, 120, "as update_16k"),
    ("splits", ENGINE, 30, 90, "steps as planned at most 5 % slower than planned for the whole context"),
    ("kernels", ENGINE, 30, 60, "none: microseconds of a decode step by kernel"),
    ("no_gcd", RUNS, 30, 400, "as iteration"),
    ("pretrained", RUNS, 30, 540, "cold start, ten iterations, kill -9, --resume: all ten are logged"))]


def main(argv=None):
    """Run what --minutes asks for and --out does not hold. Exit status 0; 1 if a check fell short; 3 if time
    was up before all had run.
    """
    parser = argparse.ArgumentParser("python -m lab.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=int, choices=(10, 30), default=10, help="how much to run")
    parser.add_argument("--tiny", action="store_true", help="all checks, a two-layer model, on any device")
    parser.add_argument("--out", type=Path, help=f"JSON lines; default {OUT.relative_to(ROOT)}, --tiny: none")
    options = parser.parse_args(argv)
    out = options.out or (None if options.tiny else OUT)
    wanted = ([replace(check, limit_s=min(check.limit_s, TINY_S)) for check in CHECKS] if options.tiny else
              [check for check in CHECKS if check.minutes <= options.minutes])
    start, stored = time.monotonic(), files.read_lines(out)[0] if out and out.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.tiny else FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")        # forks of a process that has loaded torch
        context.set_forkserver_preload([ENGINE, RUNS])
        here = device_and_torch(context) if stored else None
        known = {line["check"]: line for line in stored               # without a device: a process that died
                 if (line.get("device"), line.get("torch")) in (here, (None, None))
                 and line.get("tiny", False) == options.tiny}
        done = {name: line for name, line in known.items() if not {"error", "skipped"} & {*line}
                and line.get("target") in [check.target for check in wanted if check.name == name]}
        lines = [done[check.name] for check in wanted if check.name in done]
        left = [check for check in wanted if check.name not in done]
        for check in sorted(left, key=lambda check: "error" in known.get(check.name, ())):
            limit_s = min(check.limit_s, start + MOST_S - time.monotonic())
            if limit_s < ENOUGH * check.limit_s:
                continue
            line = run(context, replace(check, limit_s=int(limit_s)), options.tiny, folder)
            line |= {"tiny": True} if options.tiny else {}        # no check of the real thing
            print(json.dumps(files.nan_to_null(line)), flush=True)
            if not (limit_s < check.limit_s and line.get("error", "").startswith("did not end")):
                lines.append(line)                         # else it is left to a command with more time
            if line.get("error", "").startswith("no CUDA"):
                parser.error("torch sees no CUDA device (--tiny runs anywhere)")
            if out:
                files.append(out, line)
    print(table(wanted, lines))
    if left := len(wanted) - len(lines):
        print(f"{left} left: the same command goes on")
    return 1 if not all(line["ok"] for line in lines) else MORE_TO_RUN if left else 0


def device_and_torch(context):
    """The device's name and torch's version, by a process of its own; None if it dies or hangs."""
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(ours,), daemon=True)
    process.start()
    ours.close()
    with suppress(EOFError):
        return theirs.recv() if theirs.poll(TINY_S) else None


def tell(pipe):
    """Send them."""
    import torch

    from lab.bench.gpu_checks import device_name
    pipe.send((device_name(), str(torch.__version__)))


def run(context, check, tiny, folder):
    """Run a check in a process of its own. Returns its line: ok is False if it raised, died or took too
    long; what it reported before is in it all the same.
    """
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(check, tiny, folder, ours))
    process.start()                                        # of the first check: the server loads torch
    ours.close()
    found, start, late = {}, time.monotonic(), False
    try:
        while "ok" not in found:
            try:
                late = not theirs.poll(max(0, start + check.limit_s - time.monotonic()))
                found |= ({"ok": False, "error": f"did not end within {check.limit_s} s"} if late
                          else theirs.recv())
            except EOFError:
                process.join(10)
                found |= {"ok": False, "error": f"died with exit status {process.exitcode}"}
        if "error" in found and "traceback" not in found and (folder / STACK).exists():
            found["traceback"] = (folder / STACK).read_text().partition("\nExtension modules")[0][:3000]
        process.join(0 if late else 10)
    finally:                                               # also after Ctrl-C
        end(process)
    if "traceback" in found:
        found["traceback"] = found["traceback"].replace(f"{ROOT}{os.sep}", "")
    found = {key: float(f"{value:.4g}") if isinstance(value, float) else value
             for key, value in found.items()}
    return {"check": check.name, "target": check.target, **found,
            "check_s": round(time.monotonic() - start, 1)}


def end(process):
    """End a check's process, and what it has started in its group. torchrun, whose ranks are in sessions of
    their own, ends them in 30 s if it is asked to.
    """
    for signum, patience_s in (signal.SIGTERM, 40), (signal.SIGKILL, 0):
        until = time.monotonic() + patience_s
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
            while time.monotonic() < until:
                process.join(0.1)
                os.killpg(process.pid, 0)                  # is one left?
    process.kill()                                         # which may not lead its group yet
    process.join()


def child(check, tiny, folder, pipe):
    """In the check's process: send what it measured, and whether it meets the target."""
    os.setpgrp()
    os.dup2(2, 1)                                          # stdout is for the lines
    stack = open(folder / STACK, "w")                      # stays open: of a check that dies or hangs
    faulthandler.enable(stack)
    faulthandler.dump_traceback_later(max(check.limit_s - STACK_S, 1), file=stack)
    import torch

    from lab.bench.gpu_checks import Bench, device_name
    try:
        if not (tiny or torch.cuda.is_available()):
            raise RuntimeError("no CUDA device")
        pipe.send({"device": device_name(), "torch": str(torch.__version__), "commit": files.commit()})
        bench = Bench(tiny, folder, pipe.send)
        pipe.send({"tokenizer": bench.tokenizer})
        measured, ok = getattr(import_module(check.module), check.name)(bench)
        measured = measured | {"ok": bool(ok)}
    except Exception as error:                             # the next check is independent of this one
        message = " ".join(str(error).split())[:300]
        measured = {"ok": False, "error": f"{type(error).__name__}: {message}" if str(error) !=
                    "no CUDA device" else message, "traceback": traceback.format_exc()[-3000:]}
    pipe.send(measured)


def table(wanted, lines):
    """The checks with verdict and target, as text."""
    by_name = {line["check"]: line for line in lines}
    rows = [(check.name, "not run" if check.name not in by_name else
             "skipped" if "skipped" in by_name[check.name] else
             "met" if by_name[check.name]["ok"] else "short", check.target) for check in wanted]
    return "\n".join(f"{name:18} {verdict:8} {target}" for name, verdict, target in rows)


if __name__ == "__main__":
    sys.exit(main())
