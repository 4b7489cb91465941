"""Attacks on a run under way: kills at every event and at any moment, Ctrl-C, second runs, shells, ranks."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed.launcher.api as launcher
from forked import (
    ALL,
    ROOT,
    TINY,
    child,
    contents,
    difference,
    goes_on,
    in_two_processes,
    run,
    undisturbed,
    wrong_end,
)

import gcd
from lm import model as qwen
from run import files, parallel

SLOW_S = 40                    # an update longer than the 30 s that torchrun waits by default


# Kills

class DieAt:
    """Counts what changes files below a folder, and ends the process by SIGKILL at event number `at`.

    Python's audit events (open to write, rename, mkdir, remove, chmod), fsync, and the two libraries that
    write by themselves: before they begin, with half of the file written, and when they have ended.
    """

    EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate")

    def __init__(self, folder, at):
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self.heard)
        fsync, save, save_tensors = os.fsync, torch.save, qwen.save_file
        os.fsync = lambda descriptor: (self.event(), fsync(descriptor))[1]
        torch.save = lambda value, path: self.written(lambda: save(value, path), path)
        qwen.save_file = lambda state, path, **more: self.written(
            lambda: save_tensors(state, path, **more), path)

    def heard(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and str(path).startswith(self.folder):
                self.event()
        elif event in self.EVENTS and (str(arguments[0]).startswith(self.folder) or arguments[-1] != -1):
            self.event()

    def event(self, before_death=lambda: None):
        self.count += 1
        if self.count == self.at:
            before_death()
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self, write, path):
        def half():
            write()
            os.truncate(path, os.path.getsize(path) // 2)

        self.event()
        self.event(half)
        write()
        self.event()


def kills(place, part):
    """SIGKILL at every file-system event of a run, then the run again by run.sh's rule."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def counted():
        die = DieAt(place / "counting", -1)
        status = run(place / "counting", *flags)()
        (place / "events").write_text(str(die.count))
        return status

    assert child(counted, place / "said") == 0, (place / "said").read_text()[-2000:]
    events = int((place / "events").read_text())

    def attack(at, folder):
        out = folder / "run"

        def dying():
            DieAt(out, at)
            return run(out, *flags)()

        if (status := child(dying, folder / "dying")) != -signal.SIGKILL:
            return f"not killed: status {status}"
        return goes_on(out, flags, whole, folder / "said")

    points = list(range(1, events + 1))[::10 if part else 1]
    for at, problem in in_two_processes(points, attack, place):
        yield f"event {at} of {events}", problem


def random_kills(place, part):
    """Several SIGKILLs at any moment, run.sh's rule after each, until the run has ended."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def attack(seed, folder):
        rng, out = random.Random(seed), folder / "run"
        for _ in range(rng.randint(1, 4)):
            status = child(run(out, *flags), folder / "said", kill_after_s=rng.uniform(0.05, 1.5))
            if status == 0:
                break
            if status != -signal.SIGKILL:
                return wrong_end(status, folder / "said", ())
        return goes_on(out, flags, whole, folder / "said")

    for seed, problem in in_two_processes(list(range(6 if part else 50)), attack, place):
        yield f"seed {seed}", problem


def reruns(place, part):
    """The same command again without --resume; then with --overwrite, ended by Ctrl-C or SIGKILL."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0]

    def attack(item, folder):
        signum, after_s = item
        out = shutil.copytree(whole, folder / "run")
        before = contents(out)
        status = child(run(out, *flags), folder / "said")
        if status != 1 or "holds a run" not in (folder / "said").read_text() or contents(out) != before:
            return f"not refused: status {status}"
        child(run(out, *flags, "--overwrite"), folder / "said", kill_after_s=after_s, signum=signum)
        aside = out.with_name("run.old-1")
        kept = contents(aside if aside.exists() else out)
        if kept != before:
            return "the earlier run has changed"
        if problem := wrong_end(child(run(out, *flags, "--resume", "--overwrite"), folder / "said"),
                                folder / "said", (0,)):
            return problem
        return difference(out, whole)

    rng = random.Random(0)
    tries = [(signum, rng.uniform(0.05, 1.5)) for signum in (signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
             for _ in range(2 if part else 8)]
    for (signum, after_s), problem in in_two_processes(tries, attack, place):
        yield f"{signum.name} after {after_s:.2f} s", problem


def interrupts(place, part):
    """Ctrl-C at any moment of a run: saved, said, and gone on with."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def attack(after_s, folder):
        out = folder / "run"
        status = child(run(out, *flags), folder / "said", kill_after_s=after_s, signum=signal.SIGINT)
        if problem := wrong_end(status, folder / "said", (0, 130, -signal.SIGINT)):
            return problem
        return goes_on(out, flags, whole, folder / "said")

    rng = random.Random(1)
    for after_s, problem in in_two_processes([rng.uniform(0.05, 1.5) for _ in range(4 if part else 16)],
                                             attack, place):
        yield f"after {after_s:.2f} s", problem


def two_writers(place, part):
    """A second run into the folder of one that is under way."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0]
    for k, more in enumerate(([], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"])):
        out, said = place / f"run{k}", []

        def first(out=out):
            def waits(*arguments, iteration=gcd.iteration):
                while not (out / "go").exists():
                    time.sleep(0.01)
                return iteration(*arguments)
            gcd.iteration = waits
            return run(out, *flags)()

        writer = threading.Thread(target=lambda: said.append(child(first, place / f"first{k}")))
        writer.start()
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.01)
        status = child(run(out, *flags, *more), place / "second")
        told = " is writing there" in (place / "second").read_text()
        (out / "go").touch()
        writer.join()
        (out / "go").unlink()
        yield f"second with {' '.join(more) or 'no flag'}", (
            f"not refused: status {status}" if status != 1 or not told else
            f"the first ended with {said[0]}" if said[0] else difference(out, whole))


# Shells, ranks

def orphans(place, part):
    """run.sh killed by SIGKILL while its two methods run: they save and end, and its rerun goes on."""
    checkout = place / "checkout"
    without = shutil.ignore_patterns(".venv", "runs", ".git", "results", "tests")
    shutil.copytree(ROOT, checkout, ignore=without)
    (checkout / "results").mkdir()
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    tiny = " ".join([*TINY, *"--iterations 400 --demonstrations ${D:-0} --judge-demonstrations 0".split()])
    python.write_text("#!/usr/bin/env bash\ncase \"$*\" in *cold_start\\ *) D=20;; esac\n"
                      f"case $1 in gcd.py) exec {sys.executable} \"$@\" {tiny} $MORE;; "
                      f"*) exec {sys.executable} \"$@\";; esac\n")
    shutil.copy(python, python.with_name("pip"))
    for path in (python, python.with_name("pip")):
        path.chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", checkout / ".venv")
    environment = os.environ | {"MORE": "--max-turns 12", "OMP_NUM_THREADS": "1"}
    out = checkout / "runs" / "main"
    for number in range(1 if part else 3):
        with open(place / "shell", "w") as said:
            shell = subprocess.Popen(["bash", "run.sh"], cwd=checkout, stdout=said, stderr=said,
                                     env=environment, start_new_session=True)
        logs = [out / name / "metrics.jsonl" for name in ("grpo", "grpo+gcd")]
        counted = [len(files.iterations_in(files.read_lines(log)[0])) for log in logs]
        enough = wait_until(lambda: all(len(files.iterations_in(files.read_lines(log)[0])) > before + 3
                                        for log, before in zip(logs, counted)), 120)
        holders = [files.holder(log.parent) for log in logs]
        shell.kill()
        shell.wait()
        ended = wait_until(lambda: not any(files.holder(log.parent) for log in logs), 30)
        done = [len(files.iterations_in(files.read_lines(log)[0])) for log in logs]
        saved = [parallel.read_trainer(log.parent / "checkpoint")["state"]["iteration"] for log in logs]
        numbers = [files.iterations_in(files.read_lines(log)[0]) for log in logs]
        in_order = all([row["iteration"] for row in rows] == list(range(len(rows))) for rows in numbers)
        yield f"kill {number + 1}", (
            "the runs did not begin: " + (place / "shell").read_text()[-200:] if not enough else
            "nobody held the folders" if not all(holders) else "the runs go on" if not ended else
            f"saved {saved}, logged {done}" if saved != done else "" if in_order else "metrics are mixed")


def wait_until(condition, limit_s):
    """Whether the condition came true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ranks(place, part):
    """torchrun with two ranks: one killed, a step that outlasts torchrun's patience, the agent killed; then
    on with it on one rank and on two."""
    _, start = undisturbed(place)
    slow = place / "slow_gcd.py"
    slow.write_text("import os, sys, time\n"
                    f"sys.path.insert(0, {str(ROOT)!r})\nimport gcd\ntrain = gcd.train\n"
                    "def long_step(*arguments):\n"
                    "    open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\n"
                    "    time.sleep(float(os.environ.get('STEP_S', 0)))\n    return train(*arguments)\n"
                    "gcd.train = long_step\nsys.exit(gcd.main())\n")
    flags = [*TINY, "--model", str(start), "--demonstrations", "0", "--resume", "--overwrite"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def begun(out, n, step_s=0.0, iterations=6):
        pids = out.with_suffix(".pids")
        pids.write_text("")
        environment = os.environ | {"PIDS": str(pids), "STEP_S": str(step_s), "OMP_NUM_THREADS": "1",
                                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
        with open(out.with_suffix(".said"), "w") as said:
            job = subprocess.Popen([*torchrun, str(n), str(slow), *flags, "--out", str(out), "--iterations",
                                    str(iterations)], env=environment, stdout=said, stderr=said)
        wait_until(lambda: len(pids.read_text().split()) >= 2 * n or job.poll() is not None, 120)
        return job, [int(pid) for pid in pids.read_text().split()]

    def resumed(out, n, iterations=6):
        job, _ = begun(out, n, iterations=iterations)
        status = job.wait(180)
        rows = files.iterations_in(files.read_lines(out / "metrics.jsonl")[0])
        return "" if status == 0 and len(rows) == iterations else f"status {status}, {len(rows)} iterations"

    out = place / "killed"
    job, pids = begun(out, 2, step_s=0.3)
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    status = job.wait(120)
    seconds = time.monotonic() - began
    yield "a rank killed", "it ended well" if not status else "" if seconds < 60 else f"took {seconds:.0f} s"
    yield "on with two ranks", resumed(out, 2)
    out = place / "agent"
    job, pids = begun(out, 2, step_s=0.3)
    job.kill()
    job.wait()
    yield "the agent killed", "" if wait_until(lambda: not files.holder(out), 60) else "its ranks go on"
    yield "on with one rank", resumed(out, 1)
    if part or "SHUTDOWN_TIMEOUT" not in Path(launcher.__file__).read_text():
        return                               # torch 2.9 waits 30 s whatever one says
    out = place / "slow"
    job, pids = begun(out, 2, step_s=SLOW_S)
    job.send_signal(signal.SIGINT)
    job.wait(300)
    state = parallel.read_trainer(out / "checkpoint")["state"] if (out / "checkpoint").exists() else {}
    saved = state.get("iteration")
    yield f"Ctrl-C in a step of {SLOW_S} s", "" if saved == 2 else f"saved {saved}"
