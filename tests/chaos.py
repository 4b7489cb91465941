"""What a saboteur would try, and what is left afterwards: the chaos target. Not part of the tests.

    bash run.sh chaos                # everything, at most 20 minutes on 2 cores; writes results/chaos.json
    bash run.sh chaos --part         # a five-minute part of it, as CI runs it; writes nothing
    bash run.sh chaos --only kills   # one attack

Runs are tiny, real, and forked from one process that has imported everything: a point costs a second or two.
An attack is a function that yields (what was tried, what went wrong or ""). Survived means: what had been saved
is there, and goes on to the weights, optimizer and logs of a run that nobody disturbed, bit for bit; or one
clear line and no traceback, in ten seconds.
"""

import argparse
import json
import os
import platform
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import gcd  # noqa: E402
from envs.alfred import games  # noqa: E402
from lm import model as qwen  # noqa: E402
from report import __main__ as report  # noqa: E402
from run import files, parallel  # noqa: E402

TINY = ("--device cpu --hidden-size 16 --layers 1 --max-turns 4 --tasks 2 --group-size 4 --iterations 2 "
        "--minibatches 2 --judge-labels oracle --judge-turns 4 --judge-group-size 2 --evaluate none "
        "--context 512 --checkpoint-every 1").split()
ALL = "--algo ppo --kl loss --gcd".split()          # the critic, the reference, the judge: all that a run saves
LONGEST_S = 10
SLOW_S = 40                    # an update longer than the 30 s that torchrun waits by default
RESULT = ROOT / "results" / "chaos.json"


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


def difference(out, whole):
    """In what a run's folder differs from that of the undisturbed one; "" in nothing."""
    if not (out / "stages.json").exists():
        return "not finished"
    for name in ("model.safetensors",):
        mine, theirs = (load_file(folder / "checkpoint" / name) for folder in (out, whole))
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


def untimed(line):
    return {key: value for key, value in line.items() if not key.startswith("time/")}


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
        return wrong_end(child(run(out, *flags), folder / "said"), folder / "said", (0,)) or difference(out, whole)

    points = list(range(1, events + 1))[::6 if part else 1]
    for at, problem in in_two_processes(points, attack, place):
        yield f"event {at} of {events}", problem


def undisturbed(place):
    """The folder of a run of two iterations that nobody disturbs, and the checkpoint that it began from."""
    start, whole = place.parent / "start", place.parent / "whole"
    if not (whole / "stages.json").exists():
        cold = ["--demonstrations", 40, "--judge-demonstrations", 20, "--iterations", 0, "--max-turns", 12]
        assert child(run(start, *cold), place / "said") == 0, (place / "said").read_text()[-2000:]
        flags = [*ALL, "--model", start / "checkpoint", "--demonstrations", 0]
        assert child(run(whole, *flags), place / "said") == 0, (place / "said").read_text()[-2000:]
    return whole, start / "checkpoint"


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
        return wrong_end(child(run(out, *flags), folder / "said"), folder / "said", (0,)) or difference(out, whole)

    for seed, problem in in_two_processes(list(range(10 if part else 50)), attack, place):
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
        return wrong_end(child(run(out, *flags), folder / "said"), folder / "said", (0,)) or difference(out, whole)

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
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".venv", "runs", ".git", "results", "tests"))
    (checkout / "results").mkdir()
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    tiny = " ".join([*TINY, "--iterations", "400", "--demonstrations", "${D:-0}", "--judge-demonstrations", "0"])
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
            shell = subprocess.Popen(["bash", "run.sh"], cwd=checkout, stdout=said, stderr=said, env=environment,
                                     start_new_session=True)
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
    slow.write_text(f"import os, sys, time\nsys.path.insert(0, {str(ROOT)!r})\nimport gcd\ntrain = gcd.train\n"
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
        return "" if status == 0 and len(rows) == iterations else f"on {n} ranks: status {status}, {len(rows)} rows"

    out = place / "killed"
    job, pids = begun(out, 2, step_s=0.3)
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    status = job.wait(120)
    seconds = time.monotonic() - began
    yield "a rank killed", "the job ended well" if not status else "" if seconds < 60 else f"took {seconds:.0f} s"
    yield "on with two ranks", resumed(out, 2)
    out = place / "agent"
    job, pids = begun(out, 2, step_s=0.3)
    job.kill()
    job.wait()
    yield "the agent killed", "" if wait_until(lambda: not files.holder(out), 60) else "its ranks go on"
    yield "on with one rank", resumed(out, 1)
    if part or "SHUTDOWN_TIMEOUT" not in Path(torch.distributed.launcher.api.__file__).read_text():
        return                               # torch 2.9 waits 30 s whatever one says
    out = place / "slow"
    job, pids = begun(out, 2, step_s=SLOW_S)
    job.send_signal(signal.SIGINT)
    job.wait(300)
    state = parallel.read_trainer(out / "checkpoint")["state"] if (out / "checkpoint").exists() else {}
    yield f"Ctrl-C in a step of {SLOW_S} s", "" if state.get("iteration") == 2 else f"saved {state.get('iteration')}"


# Disks

def full_disks(place, part):
    """A disk that is full, of every size that a run needs a part of, its temporary directory too."""
    whole, start = undisturbed(place)
    need = sum(map(len, contents(whole).values())) * 3
    disk, flags = place / "disk", [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],
                                      capture_output=True).returncode:
        print("    (no small disk can be mounted here: the size of each file is limited instead)")
        disk = None
    sizes = [int(need * k / 40) + 4096 for k in (range(0, 40, 8) if part else range(40))]
    try:
        for size in sizes:
            yield f"{size} bytes", one_full_disk(place, disk, size, flags, whole)
    finally:
        if disk:
            subprocess.run(["umount", disk], check=True)


def one_full_disk(place, disk, size, flags, whole):
    """A run on a disk of so many bytes: one line or success; then with room again, as if nothing had been."""
    out = (disk or place / f"limited{size}") / "run"

    def resized(n):
        if disk:
            subprocess.run(["mount", "-o", f"remount,size={n}", disk], check=True)

    def limited():
        if disk:
            tempfile.tempdir = str(disk)
            os.environ["TMPDIR"] = str(disk)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, size // 8))
        return run(out, *flags)()

    resized(size)
    if problem := wrong_end(child(limited, place / "said"), place / "said", (0, 1)):
        return problem
    text = (place / "said").read_text(errors="replace")
    resized(10**9)
    problem = wrong_end(child(run(out, *flags), place / "said"), place / "said", (0,)) or difference(out, whole)
    for folder in out.parent.glob("run*"):
        shutil.rmtree(folder)
    return problem or ("" if "error" not in text or str(out) in text else f"names no file: {text[-200:]}")


# Broken input

def numbers(rng):
    """A value that nobody expects."""
    return rng.choice([0, -1, 1.5, 10**12, 1e300, float("nan"), float("inf"), "", "x", "64", None, True, [], [[]],
                       {}, {"a": 1}, "\ud800", "é" * 50])


def mutated_json(text, rng):
    """A JSON text with something else in one place, or cut, or with a byte changed."""
    kind = rng.randrange(4)
    if kind == 0:
        return text[:rng.randrange(len(text))]
    if kind == 1:
        k = rng.randrange(len(text))
        return text[:k] + rng.choice("{}[],:\"0x\n\0") + text[k + 1:]
    value = json.loads(text)
    holder, key = value, rng.choice(list(value))
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.7:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(min(len(holder), 50))
    if kind == 2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = numbers(rng)
    return json.dumps(value)


def mutated_bytes(content, rng):
    """A file cut, with some bytes changed, or with others put in."""
    content = bytearray(content)
    kind, k = rng.randrange(3), rng.randrange(len(content))
    if kind == 0:
        return bytes(content[:k])
    for _ in range(rng.choice([1, 8, 64])):
        k = rng.randrange(min(len(content), rng.choice([64, 4096, len(content)])))
        content[k:k + kind] = rng.randbytes(kind)
    return bytes(content)


def mutated_trainer(path, rng):
    """trainer.pt with a value of another type in one place."""
    value = torch.load(path, weights_only=True)
    holder, key = value, rng.choice(list(value))
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    if rng.random() < 0.3 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = rng.choice([numbers(rng), torch.zeros(3), torch.zeros(0), [], {}])
    torch.save(value, path)


PDDL = """(define (problem p) (:domain alfred) (:objects a - agent) (:init (atlocation a loc_0)
 (receptacletype Fridge_bar_1 FridgeType) (receptacleatlocation Fridge_bar_1 loc_1) (openable Fridge_bar_1)
 (receptacletype Table_bar_2 TableType) (receptacleatlocation Table_bar_2 loc_0)
 (cancontain FridgeType AppleType) (cancontain TableType AppleType) (objecttype Apple_bar_3 AppleType)
 (pickupable Apple_bar_3) (inreceptacle Apple_bar_3 Table_bar_2) (objectatlocation Apple_bar_3 loc_0))
 (:goal (and """ + games.GOALS["pick_and_place_simple"].replace("OBJECT", "Apple").replace(
    "RECEPTACLE", "Fridge") + ")))"
GAME = {"split": "train", "solvable": True, "rel": "train/a/b", "task_type": "pick_and_place_simple",
        "task_desc": "put a apple in fridge", "pddl_problem": PDDL}


def mutated_pddl(rng):
    """A game's PDDL with words doubled, lost, swapped, or nested without end."""
    words = PDDL.replace("(", " ( ").replace(")", " ) ").split()
    for _ in range(rng.choice([1, 3])):
        k, kind = rng.randrange(len(words)), rng.randrange(5)
        if kind == 0:
            del words[k]
        elif kind == 1:
            words.insert(k, rng.choice(["(", ")", "x", "define", ":init", "Apple_bar_3", "é", "\0"]))
        elif kind == 2:
            words[k] = rng.choice(words)
        elif kind == 3:
            words[k:k] = ["("] * 5000 + [")"] * 5000
        else:
            words[k] *= 1000
    return " ".join(words)


def mutations(place, part):
    """config.json, tokenizer, trainer.pt, safetensors, logs and games with something broken in each."""
    import gzip
    whole, start = undisturbed(place)
    kinds = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "trainer.pt",
             "trainer.pt bytes", "games.jsonl", "PDDL", "metrics.jsonl", "evaluation.json", "episodes.jsonl")

    def attack(item, folder):
        kind, seed = item
        rng, said = random.Random(f"{kind} {seed}"), folder / "said"
        if kind in ("games.jsonl", "PDDL"):
            row = json.dumps(GAME | {"pddl_problem": mutated_pddl(rng)} if kind == "PDDL" else GAME)
            row = row if kind == "PDDL" else mutated_json(row, rng)
            lines = [row] + [json.dumps(GAME | {"rel": f"train/a/{k}"}) for k in range(3)]
            with gzip.open(folder / "games.jsonl.gz", "wt", errors="surrogatepass") as file:
                file.write("\n".join(lines))
            flags = ["--games", folder / "games.jsonl.gz", "--model", start, "--demonstrations", 0,
                     "--preset", "small", "--iterations", 1]
            return wrong_end(child(run(folder / "out", *flags), said, LONGEST_S), said, (0, 1, 2))
        if kind in ("metrics.jsonl", "evaluation.json", "episodes.jsonl"):
            method = shutil.copytree(whole, folder / "runs" / "grpo")
            if kind == "evaluation.json":
                (method / kind).write_text('{"splits": {"L0": {"sampled": {"success": 0.5, "n": 4, "low": 0.1,'
                                           '"high": 0.9}}}, "games": "generated rooms", "seconds": 3}')
            lines = (method / kind).read_text().splitlines()
            k = rng.randrange(len(lines))
            lines[k] = mutated_json(lines[k], rng)
            (method / kind).write_text("\n".join(lines), errors="replace")
            if problem := wrong_end(child(lambda: report.main([str(folder / "runs")]), said, LONGEST_S), said):
                return problem
            return wrong_end(child(run(method, *ALL, "--resume", "--demonstrations", 0), said, LONGEST_S), said)
        out = shutil.copytree(whole, folder / "run")
        path = out / "checkpoint" / kind.split()[0]
        if kind == "trainer.pt":
            mutated_trainer(path, rng)
        elif kind in ("model.safetensors", "trainer.pt bytes"):
            path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        else:
            path.write_text(mutated_json(path.read_text(), rng), errors="surrogatepass")
        flags = [*ALL, "--resume", "--demonstrations", 0]
        if "trainer" not in kind and rng.random() < 0.5:
            flags = ["--preset", "small", "--model", out / "checkpoint", "--demonstrations", 0, "--out", folder / "o"]
        return wrong_end(child(run(out, *flags), said, LONGEST_S), said)

    items = [(kind, seed) for seed in range(6 if part else 40) for kind in kinds]
    for (kind, seed), problem in in_two_processes(items, attack, place):
        yield f"{kind} {seed}", problem


def not_numbers(place, part):
    """Weights that are no numbers, and a config.json that makes none."""
    _, start = undisturbed(place)
    tensors = load_file(start / "model.safetensors")
    names = sorted(tensors)[:: 4 if part else 1]
    for k, (name, value) in enumerate([(n, v) for n in names for v in (float("nan"), float("inf"))]):
        folder = shutil.copytree(start, place / f"weights{k}")
        broken = {key: tensor.clone() for key, tensor in tensors.items()}
        broken[name].view(-1)[-1] = value
        save_file(broken, folder / "model.safetensors", metadata={"format": "pt"})
        flags = ["--preset", "small", "--model", folder, "--demonstrations", 0, "--evaluate", "L0"]
        status = child(run(place / f"out{k}", *flags), place / "said", LONGEST_S)
        text = (place / "said").read_text()
        yield f"{value} in {name}", "" if status == 1 and name in text and "Traceback" not in text else (
            f"status {status}: {text[-150:]}")


# Others

def hostile_http(place, part):
    """A large model's server that drips, floods, lies or goes away: the question fails, in time."""
    from run.endpoint import Endpoint
    os.environ |= {"CHAOS_KEY": "sk-chaos-0123456789", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

    def drip(send):
        send(b"HTTP/1.1 200 OK\r\n")
        for k in range(1000):
            send(b"X-%d: y\r\n" % k)
            time.sleep(0.3)

    def flood(send):
        send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            send(b"10000\r\n" + b" " * 65536 + b"\r\n")

    def slow_body(send):
        send(head + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(1000):
            send(b" ")
            time.sleep(0.3)

    def continues(send):
        while True:
            send(b"HTTP/1.1 100 Continue\r\n\r\n")

    servers = {
        "headers dripped": drip, "endless body": flood, "a body dripped": slow_body, "endless 100 Continue": continues,
        "endless header": lambda send: [send(b"X: " + b"y" * 65536) for _ in iter(int, 1)],
        "nothing": lambda send: time.sleep(60), "closed at once": lambda send: None,
        "no HTTP": lambda send: send(b"\0\xff" * 1000),
        "a length that lies": lambda send: send(head + b"Content-Length: 99\r\n\r\n{}"),
        "nested JSON": lambda send: send(head + b"Content-Length: 100000\r\n\r\n" + b"[" * 100000),
        "redirects to itself": lambda send: send(b"HTTP/1.1 307 X\r\nLocation: /v1\r\nContent-Length: 0\r\n\r\n"),
        "an answer of 3 MB": lambda send: send(head + b"Connection: close\r\n\r\n" + json.dumps(
            {"choices": [{"message": {"content": "x" * 3_000_000}}]}).encode())}
    for name, serve in servers.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            stop = threading.Event()

            def accept(serve=serve, server=server, stop=stop):
                server.settimeout(0.2)
                while not stop.is_set():
                    try:
                        line, _ = server.accept()
                    except OSError:
                        continue
                    threading.Thread(target=answer, args=(line, serve), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            endpoint = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "m", "CHAOS_KEY",
                                place / f"{name}.jsonl", timeout_s=1.5, retries=1, first_wait_s=0.01)
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
            try:
                given = endpoint.ask(["was that good?"])
                problem = "" if given[0] is None or len(given[0]) == 3_000_000 else f"answered {given[0][:50]!r}"
            except ValueError as error:
                problem = "" if str(error).startswith("--endpoint") else str(error)
            seconds = time.monotonic() - began
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            endpoint.close()
            stop.set()
        yield name, problem or (f"took {seconds:.1f} s" if seconds > 6 else "") or (
            f"took {grown:.0f} MB" if grown > 200 else "")


def answer(line, serve):
    """One connection of a hostile server."""
    with line:
        try:
            line.recv(65536)
            serve(line.sendall)
        except OSError:
            pass


def dead_terminals(place, part):
    """A log pipe or terminal that dies, and a log disk that is full, while a run writes to it."""
    whole, start = undisturbed(place)
    flags = [*ALL, "--model", start, "--demonstrations", 0]

    def piped():
        reader, writer = os.pipe()
        os.close(reader)
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)
        return run(place / "piped", *flags)()

    def full():
        for descriptor in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
        return run(place / "full", *flags)()

    def closed():
        os.close(1)
        os.close(2)
        return run(place / "closed", *flags)()

    for name, action in {"piped": piped, "full": full, "closed": closed}.items():
        status = child(action, place / "said")
        yield f"its output is {name}", f"status {status}" if status else difference(place / name, whole)


def soak(place, part):
    """1,000 iterations: memory and open files stay as they are."""
    _, start = undisturbed(place)
    iterations, watched = (200 if part else 1000), place / "watched"

    def watching():
        iteration = gcd.iteration

        def counted(run, i, reference):
            if i % 50 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                with open(watched, "a") as file:
                    print(i, pages * resource.getpagesize() / 2**20, len(os.listdir("/proc/self/fd")), file=file)
            return iteration(run, i, reference)

        gcd.iteration = counted
        return run(place / "run", "--model", start, "--demonstrations", 0, "--max-turns", 2, "--tasks", 1,
                   "--group-size", 2, "--minibatches", 1, "--judge-turns", 2, "--iterations", iterations,
                   "--checkpoint-every", 100)()

    status = child(watching, place / "said", limit_s=600)
    rows = [tuple(map(float, line.split())) for line in watched.read_text().splitlines()]
    settled, last = rows[len(rows) // 4], rows[-1]
    yield f"{iterations} iterations, {settled[1]:.0f} to {last[1]:.0f} MB", (
        f"status {status}" if status else f"grew from {settled[1]:.0f} to {last[1]:.0f} MB"
        if last[1] > settled[1] * 1.1 + 5 else f"{settled[2]:.0f} files, then {last[2]:.0f}"
        if last[2] > settled[2] else "")


ATTACKS = {"kills": kills, "random kills": random_kills, "interrupts": interrupts, "reruns": reruns,
           "two writers": two_writers, "orphans": orphans, "ranks": ranks, "full disks": full_disks,
           "mutations": mutations, "not numbers": not_numbers, "hostile HTTP": hostile_http,
           "dead terminals": dead_terminals, "soak": soak}


def main(argv=None):
    parser = argparse.ArgumentParser("bash run.sh chaos", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--part", action="store_true", help="a five-minute part of it")
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        for name, attack in ATTACKS.items():
            if options.only not in (None, name):
                continue
            place, started = Path(folder) / name.replace(" ", "_"), time.monotonic()
            place.mkdir()
            outcomes = list(attack(place, options.part))
            failures = [f"{tried}: {problem}" for tried, problem in outcomes if problem]
            rows.append({"attack": name, "what": " ".join(attack.__doc__.split()), "tries": len(outcomes),
                         "survived": len(outcomes) - len(failures), "failures": failures,
                         "seconds": round(time.monotonic() - started, 1)})
            print(f"{name:15} {len(outcomes):5} tries {len(outcomes) - len(failures):5} survived "
                  f"{rows[-1]['seconds']:7.1f} s", flush=True)
            for failure in failures[:20]:
                print(f"    {failure}", flush=True)
    lost = sum(len(row["failures"]) for row in rows)
    print(f"{sum(row['tries'] for row in rows)} tries, {lost} not survived, {time.monotonic() - began:.0f} s")
    if not options.part and not options.only:
        files.write_json(RESULT, {
            "command": "bash run.sh chaos", "commit": files.commit(), "python": platform.python_version(),
            "torch": torch.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "attacks": rows})
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
