"""Attacks that stop a run: kills at every event and at random times, Ctrl-C, second runs, shells, ranks."""

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
    PART,
    ROOT,
    TINY,
    again,
    child,
    contents,
    difference,
    exit_problem,
    in_two_processes,
    resume_problem,
    run,
    sampled,
    undisturbed,
)
from tiny_runs import copy_code

import gcd
from infra import checkpoint, files
from lm import model as decoder

SLOW_S = 40                    # of an update, longer than the 30 s that torchrun waits by default


# Kills

class DieAt:
    """Count events that change files below a folder, and end the process by SIGKILL at event number `at`.

    Events are Python's audit events (open to write, rename, mkdir, remove, chmod), fsync, and three moments
    of each write by torch and safetensors: before it, with half of the file written, and after it.
    """

    EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate")

    def __init__(self, folder, at):
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self.audit)
        fsync, save, save_tensors = os.fsync, torch.save, decoder.save_file
        os.fsync = lambda descriptor: (self.count_event(), fsync(descriptor))[1]
        torch.save = lambda value, path: self.wrap_write(lambda: save(value, path), path)
        decoder.save_file = lambda state, path, **more: self.wrap_write(
            lambda: save_tensors(state, path, **more), path)

    def audit(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and str(path).startswith(self.folder):
                self.count_event()
        elif event in self.EVENTS and (str(arguments[0]).startswith(self.folder) or arguments[-1] != -1):
            self.count_event()

    def count_event(self, before_death=lambda: None):
        self.count += 1
        if self.count == self.at:
            before_death()
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap_write(self, write, path):
        def half():
            write()
            os.truncate(path, os.path.getsize(path) // 2)

        self.count_event()
        self.count_event(half)
        write()
        self.count_event()


def kills(workdir, size):
    """SIGKILL at every file-system event of a run, then --resume --overwrite, as run.sh does."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def counted():
        die = DieAt(workdir / "counting", -1)
        status = run(workdir / "counting", *flags)()
        (workdir / "events").write_text(str(die.count))
        return status

    assert child(counted, workdir / "output") == 0, (workdir / "output").read_text()[-2000:]
    events = int((workdir / "events").read_text())

    def attack(at, folder):
        out = folder / "run"

        def dying():
            DieAt(out, at)
            return run(out, *flags)()

        if (status := child(dying, folder / "dying")) != -signal.SIGKILL:
            return f"not killed: status {status}"
        return resume_problem(out, flags, expected, folder / "output")

    points = sampled(range(1, events + 1), size, 10, 60)
    for at, problem in in_two_processes(points, attack, workdir):
        yield f"event {at} of {events}", problem


def random_kills(workdir, size):
    """Up to four SIGKILLs at random times, --resume --overwrite after each, until the run is complete."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def attack(seed, folder):
        rng, out = random.Random(seed), folder / "run"
        for _ in range(rng.randint(1, 4)):
            status, lost = again(out, flags, folder / "output", kill_after_s=rng.uniform(0.05, 1.5))
            if lost:
                return lost
            if status == 0:
                break
            if status != -signal.SIGKILL:
                return exit_problem(status, folder / "output", ())
        return resume_problem(out, flags, expected, folder / "output")

    for seed, problem in in_two_processes(sampled(range(50), size, 5, 30), attack, workdir):
        yield f"seed {seed}", problem


def reruns(workdir, size):
    """The same command again, which is refused; then with --overwrite, ended by Ctrl-C, SIGKILL or SIGHUP."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0]

    def attack(item, folder):
        signum, after_s = item
        out = shutil.copytree(expected, folder / "run")
        before = contents(out)
        status = child(run(out, *flags), folder / "output")
        if status != 1 or "holds a run" not in (folder / "output").read_text() or contents(out) != before:
            return f"not refused: status {status}"
        child(run(out, *flags, "--overwrite"), folder / "output", kill_after_s=after_s, signum=signum)
        aside = out.with_name("run.old-1")
        kept = contents(aside if aside.exists() else out)
        if kept != before:
            return "the earlier run has changed"
        if problem := exit_problem(child(run(out, *flags, "--resume", "--overwrite"), folder / "output"),
                                   folder / "output", (0,)):
            return problem
        return difference(out, expected)

    rng = random.Random(0)
    tries = [(signum, rng.uniform(0.05, 1.5)) for signum in (signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
             for _ in range(1 if size == PART else 8)]
    for (signum, after_s), problem in in_two_processes(tries, attack, workdir):
        yield f"{signum.name} after {after_s:.2f} s", problem


def interrupts(workdir, size):
    """Ctrl-C at a random time: the run saves, reports it, and resumes."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]

    def attack(after_s, folder):
        out = folder / "run"
        status = child(run(out, *flags), folder / "output", kill_after_s=after_s, signum=signal.SIGINT)
        if problem := exit_problem(status, folder / "output", (0, 130, -signal.SIGINT)):
            return problem
        output = (folder / "output").read_text(errors="replace")
        if status == 130 and (out / files.METRICS).exists() and "stopped; " not in output:
            return "it did not say what it saved"
        return resume_problem(out, flags, expected, folder / "output")

    rng = random.Random(1)
    times = [rng.uniform(0.05, 1.5) for _ in range(4 if size == PART else 16)]
    for after_s, problem in in_two_processes(times, attack, workdir):
        yield f"after {after_s:.2f} s", problem


def two_writers(workdir, size):
    """A second run in the folder of a run that has not ended: it is refused."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0]
    for k, more in enumerate(([], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"])):
        out, statuses = workdir / f"run{k}", []

        def first(out=out):
            def waits(*arguments, iteration=gcd.iteration):
                while not (out / "go").exists():
                    time.sleep(0.01)
                return iteration(*arguments)
            gcd.iteration = waits
            return run(out, *flags)()

        writer = threading.Thread(target=lambda: statuses.append(child(first, workdir / f"first{k}")))
        writer.start()
        while not (out / "metrics.jsonl").exists():
            time.sleep(0.01)
        status = child(run(out, *flags, *more), workdir / "second")
        refused = " is writing there" in (workdir / "second").read_text()
        (out / "go").touch()
        writer.join()
        (out / "go").unlink()
        yield f"second with {' '.join(more) or 'no flag'}", (
            f"not refused: status {status}" if status != 1 or not refused else
            f"the first ended with {statuses[0]}" if statuses[0] else difference(out, expected))


# Shells, ranks

def orphans(workdir, size):
    """run.sh killed by SIGKILL while its two methods run: they save and end, and run.sh resumes them."""
    checkout = workdir / "checkout"
    copy_code(checkout)
    (checkout / "lab" / "results").mkdir()
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    tiny = " ".join([*TINY, *"--iterations 400 --demonstrations ${D:-0} --judge-demonstrations 0".split()])
    python.write_text("#!/usr/bin/env bash\ncase \"$*\" in *cold_start\\ *) D='20 --iterations 0';; esac\n"
                      f"case $1 in gcd.py) exec '{sys.executable}' \"$@\" {tiny} $MORE;; "
                      f"*) exec '{sys.executable}' \"$@\";; esac\n")
    shutil.copy(python, python.with_name("pip"))
    for path in (python, python.with_name("pip")):
        path.chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", checkout / ".venv")
    environment = os.environ | {"MORE": "--max-turns 12", "OMP_NUM_THREADS": "1", "OUT": "", "SEED": ""}
    out = checkout / "runs" / "main"
    for number in range(1 if size == PART else 3):
        with open(workdir / "shell", "w") as output:
            shell = subprocess.Popen(["bash", "run.sh"], cwd=checkout, stdout=output, stderr=output,
                                     env=environment, start_new_session=True)
        logs = [out / name / "metrics.jsonl" for name in ("grpo", "grpo+gcd")]
        counted = [len(files.iterations_in(files.read_lines(log)[0])) for log in logs]
        enough = wait_until(lambda: all(len(files.iterations_in(files.read_lines(log)[0])) > before + 3
                                        for log, before in zip(logs, counted)), 120)
        holders = [files.lock_holder(log.parent) for log in logs]
        shell.kill()
        shell.wait()
        ended = wait_until(lambda: not any(map(files.lock_holder, out.glob("*/"))), 30)
        done = [len(files.iterations_in(files.read_lines(log)[0])) for log in logs]
        saved = [checkpoint.read_trainer(log.parent / "checkpoint")["state"]["iteration"] for log in logs]
        in_order = all(numbers == list(range(len(numbers))) for numbers in map(logged, logs))
        yield f"kill {number + 1}", (
            "the runs did not start: " + (workdir / "shell").read_text()[-200:] if not enough else
            "the folders were not locked" if not all(holders) else "the runs did not end" if not ended else
            f"saved {saved}, logged {done}" if saved != done else "" if in_order else "metrics are mixed")


def logged(log):
    """The numbers of RL's iterations as a metrics.jsonl has them, one that was logged twice twice."""
    return [record["iteration"] for record in files.read_lines(log)[0] if record.get("phase") == "rl"]


def wait_until(condition, limit_s):
    """Wait until a condition is true; return whether it was within limit_s."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ranks(workdir, size):
    """torchrun with two ranks: a rank killed, torchrun's agent killed, Ctrl-C in a step longer than its time
    limit; then resumed on two ranks, or on one."""
    _, start = undisturbed(workdir)
    slow = workdir / "slow_gcd.py"
    slow.write_text("import os, sys, time\n"
                    f"sys.path.insert(0, {str(ROOT)!r})\nimport gcd\noptimize = gcd.optimize\n"
                    "def long_step(*arguments):\n"
                    "    open(os.environ['PIDS'], 'a').write(f'{os.getpid()}\\n')\n"
                    "    time.sleep(float(os.environ.get('STEP_S', 0)))\n    return optimize(*arguments)\n"
                    "gcd.optimize = long_step\nsys.exit(gcd.main())\n")
    flags = [*TINY, "--model", str(start), "--demonstrations", "0", "--resume", "--overwrite"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def start_job(out, n, step_s=0.0, iterations=6):
        pids = out.with_suffix(".pids")
        pids.write_text("")
        environment = os.environ | {"PIDS": str(pids), "STEP_S": str(step_s), "OMP_NUM_THREADS": "1",
                                    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
        with open(out.with_suffix(".output"), "w") as output:
            job = subprocess.Popen([*torchrun, str(n), str(slow), *flags, "--out", str(out), "--iterations",
                                    str(iterations)], env=environment, stdout=output, stderr=output)
        wait_until(lambda: len(pids.read_text().split()) >= 2 * n or job.poll() is not None, 120)
        return job, [int(pid) for pid in pids.read_text().split()]

    def rerun(out, n, iterations=6):
        job, _ = start_job(out, n, iterations=iterations)
        status = job.wait(180)
        numbers = logged(out / "metrics.jsonl")
        return "" if status == 0 and numbers == [*range(iterations)] else f"status {status}, logged {numbers}"

    out = workdir / "killed"
    job, pids = start_job(out, 2, step_s=0.3)
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    status = job.wait(120)
    seconds = time.monotonic() - began
    yield "a rank killed", ("its job succeeded" if not status else "" if seconds < 60 else
                            f"took {seconds:.0f} s")
    yield "resumed on two ranks", rerun(out, 2)
    out = workdir / "agent"
    job, pids = start_job(out, 2, step_s=0.3)
    job.kill()
    job.wait()
    ended = wait_until(lambda: not files.lock_holder(out), 60)
    yield "the agent killed", "" if ended else "its ranks did not end"
    yield "resumed on one rank", rerun(out, 1)
    if size == PART or "SHUTDOWN_TIMEOUT" not in Path(launcher.__file__).read_text():
        return                               # torch 2.9 always waits 30 s
    out = workdir / "slow"
    job, pids = start_job(out, 2, step_s=SLOW_S)
    job.send_signal(signal.SIGINT)
    job.wait(300)
    state = checkpoint.read_trainer(out / "checkpoint")["state"] if (out / "checkpoint").exists() else {}
    saved = state.get("iteration")
    yield f"Ctrl-C in a step of {SLOW_S} s", "" if saved == 2 else f"saved {saved}"
