"""The checks of lab.bench.gpu that train: gcd.py itself, beside what was computed for it.

--preset paper whole: KL to a reference, eight minibatches, layers recomputed, a judge. Episodes have the
lengths of recorded ones (lab/envs/message_lengths.py), responses end at random, with the mean of
`simulation.Work` (one that does not end in time is no command, but does not end its episode); verdicts
alternate, since a random model's cannot be read. As in gpu_checks.py a check takes a `Bench` and returns its
measurements and whether they meet the target. `pretrained` trains a real model, where its weights are there.
"""

import itertools
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

import config
import gcd
import judge
import models
from infra import files
from lab.bench import memory
from lab.bench.gpu_checks import OVER, no_room
from lab.bench.study import ROOT
from lm import engine, smollm2

ENVIRONMENT = "lab/envs/message_lengths.py"
STAGES = {"rollout": "collect", "judge": "judge_turns", "update": "optimize"}   # gcd.py's functions
# Of engine.Slots; the last waits for the device, the others only to copy rows or to capture a graph
HOST = ("begin", "tick", "pop_finished")
MEASURED = ("time/rollout_device_s", "time/rollout_environments_s", "policy/grad_norm", "policy/steps",
            "policy/kl_nats", "policy/logprob_gap_nats", "judge/tokens", "rollout/turns",
            "rollout/response_tokens", "memory/cache_tokens", "memory/cache_used_frac")
TINY = "--demonstrations 8 --judge-demonstrations 4 --tasks 2 --group-size 2".split()       # of `pretrained`
SMALL = "--demonstrations 96 --judge-demonstrations 48 --dtype bfloat16".split()
SMOLLM2 = ("--model smollm2 --preset small --prompt plain --demonstrations 96 --judge-demonstrations 48 "
           "--cold-start-lr 1e-4 --lr 1e-5 --dtype bfloat16 --context 4096 --max-response-tokens 24").split()


def iteration(bench, *flags):
    """Two iterations of GRPO with GCD, with set-up and checkpoint: of the second, which finds its memory
    allocated, seconds and peak bytes by stage.
    """
    out = unused(bench.folder / "iteration")
    command = [*arguments(bench, out), *flags]
    settings = config.parse(command)
    estimate = estimated(bench, settings) if bench.device.type == "cuda" else None
    if reason := too_small(bench, estimate):
        return {"skipped": reason}, True
    start = time.perf_counter()
    with as_in_a_run(bench) as found:
        status = gcd.main([*command, "--iterations", "2", "--overwrite"])
    run_s, lines = time.perf_counter() - start, rl_lines(out)
    assert len(lines) == 2 and status == 0, f"{len(lines)} iterations, exit status {status}"
    last = lines[-1]
    compared, right = beside_estimate(settings, last, found, estimate)
    trained = last["policy/grad_norm"] > 0 and (not settings.gcd or last["judge/tokens"] > 0)
    complete = trained and last["policy/steps"] == settings.minibatches and (
        out / files.CHECKPOINT / "model.safetensors").exists()
    shutil.rmtree(out)                                                     # 18 GB
    return {"run_s": run_s, **compared, **{name: last[name] for name in MEASURED if name in last}}, (
        complete and right)


def too_small(bench, estimate):
    """Why a GPU has no room for a run with this estimate; "" if it has, and without an estimate."""
    required = max(estimate["bytes"][stage] for stage in (*STAGES, "step")) if estimate else 0
    return no_room(bench, required, " by lab.bench.memory")


def estimated(bench, settings):
    """The estimate of an iteration on this machine, see lab.bench.memory."""
    work = bench.work if settings.gcd else replace(bench.work, judged=0)
    return memory.estimate("1.5B", 1, settings, work, bench.machine)


def no_gcd(bench):
    """The same without GCD."""
    return iteration(bench, "--no-gcd")


def pretrained(bench):
    """SmolLM2-135M learns household rooms in a short run, which is killed in RL and resumed. With --tiny, or
    where its weights are missing, a fresh small model does.
    """
    weights = not bench.tiny and (smollm2.FOLDER / "config.json").is_file()
    out, start = unused(bench.folder / "pretrained"), time.perf_counter()
    iterations = 3 if bench.tiny else 10
    command = [sys.executable, "gcd.py", "--out", str(out), "--algo", "grpo", "--iterations", str(iterations),
               "--checkpoint-every", "1", "--evaluate", "none", "--device", bench.device.type,
               *(TINY if bench.tiny else SMOLLM2 if weights else SMALL)]
    killed, stderr = stopped_in_rl([*command, "--overwrite"], out, iterations // 2, signal.SIGKILL)
    resumed = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True)
    lines = rl_lines(out)
    found = {"model": "SmolLM2-135M" if weights else f"fresh, for want of weights: {smollm2.HOW}",
             "killed_after": killed, "exit_status": resumed.returncode, "iterations": len(lines),
             "success": [line["rollout/success"] for line in lines], "run_s": time.perf_counter() - start}
    if resumed.returncode or not killed:
        found["stderr"] = stderr[-300:] + resumed.stderr[-300:]
    return found, (0 < killed < iterations and resumed.returncode == 0
                   and [line["iteration"] for line in lines] == [*range(iterations)])


def ranks(bench):
    """A small model's cold start on several GPUs, as many as divide --tasks, with sharded weights: losses
    beside those on one. Then RL, which is interrupted and resumed.
    """
    n = 2 if bench.tiny else max(n for n in (1, 2, 4, 8, 16) if n <= torch.cuda.device_count())
    if n < 2:
        return {"skipped": "needs several GPUs"}, True

    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    torchrun = shutil.which("torchrun", path=folders)

    def command(size, *flags):
        out = str(bench.folder / f"ranks-{size}")
        launcher = [torchrun, "--standalone", "--nproc-per-node", str(size)] if size > 1 else [sys.executable]
        return [*launcher, "gcd.py", "--out", out, "--evaluate", "none", "--device", bench.device.type,
                *flags, *(TINY if bench.tiny else SMALL)]

    alone, shared = (unused(bench.folder / f"ranks-{size}") for size in (1, n))
    single = subprocess.run(command(1, "--iterations", "0"), cwd=ROOT, capture_output=True, text=True)
    on_all = command(n, "--iterations", "3", "--checkpoint-every", "1")
    stopped, stderr = stopped_in_rl(on_all, shared, 1, signal.SIGINT)
    resumed = subprocess.run([*on_all, "--resume"], cwd=ROOT, capture_output=True, text=True)
    of_one, of_all = ([line["cold_start/loss"] for line in files.read_lines(out / files.METRICS)[0]
                       if line.get("phase") == "cold_start"] for out in (alone, shared))
    gap = max((abs(a / b - 1) for a, b in zip(of_all, of_one)), default=math.inf)
    first_gap = abs(norm_of(shared) / norm_of(alone) - 1)           # of equal weights: sums, and not means
    found = {"ranks": n, "losses": len(of_one), "largest_gap": gap, "gradient_gap": first_gap,
             "stopped_after": stopped,
             "exit_status": resumed.returncode, "iterations": len(rl_lines(shared))}
    if single.returncode or resumed.returncode or not stopped:
        found["stderr"] = single.stderr[-300:] + stderr[-300:] + resumed.stderr[-300:]
    return found, (gap < 0.02 and len(of_one) == len(of_all) and first_gap < 0.02 and 0 < stopped < 3
                   and resumed.returncode == 0
                   and [line["iteration"] for line in rl_lines(shared)] == [0, 1, 2])


def norm_of(out):
    """The norm of a run's first gradient, of its cold start."""
    return next((line["cold_start/grad_norm"] for line in files.read_lines(out / files.METRICS)[0]
                 if line.get("phase") == "cold_start"), math.inf)


def stopped_in_rl(command, out, iterations, signum):
    """Start a run and send it a signal once so many iterations are logged. Returns how many were, 0 if it
    ended, and what it wrote to stderr.
    """
    with tempfile.TemporaryFile("w+") as stderr:
        process, done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stderr), 0
        while process.poll() is None:
            done = len(rl_lines(out))
            if done >= iterations and (out / files.CHECKPOINT).is_dir():
                os.kill(process.pid, signum)
                process.wait()
                break
            done = 0
            time.sleep(0.02)
        stderr.seek(0)
        return done, stderr.read()


# Parts of the checks

def unused(out):
    """The folder of a run, without what tries that ended early left there, up to 25 GB each."""
    for left in out.parent.glob(f"{out.name}*"):
        shutil.rmtree(left)
    return out


def rl_lines(out):
    """The iterations' lines in a run's metrics.jsonl."""
    return [line for line in files.read_lines(out / files.METRICS)[0] if line.get("phase") == "rl"]


def arguments(bench, out):
    """The flags of a run at --preset paper with the bench's model and sizes."""
    tiny = ["--tasks", "2", "--group-size", "2", "--minibatches", "2", "--max-turns", "2", "--context",
            "4096", "--max-response-tokens", "16", "--judge-response-tokens", "16", "--judge-turns", "4",
            "--judge-group-size", "2", "--checkpoint-activations", "on"]
    return ["--model", str(bench.model_folder), "--preset", "paper", "--env", ENVIRONMENT, "--out", str(out),
            "--demonstrations", "0", "--judge-labels", "alternating", "--evaluate", "none", "--seed", "1",
            "--device", bench.device.type, "--dtype", str(bench.dtype).removeprefix("torch."),
            *(tiny if bench.tiny else [])]


@contextmanager
def as_in_a_run(bench):
    """Let a random model's responses end and its verdicts be read; yield {stage: (peak bytes, decode steps)}
    of gcd.py's stages, of the last iteration. Each stage's are reported as it ends, with the gigabytes that
    torch's allocator had reserved and the host's seconds in each of HOST; so is what the device holds beside
    the allocator's, as CUDA's context and graphs (memory.OUTSIDE).
    """
    verdicts = itertools.cycle(judge.ANSWERS)
    write_verdicts, make_chat = judge.write_verdicts, models.make_chat
    found, ended, hosts, steps, spent = {}, [], [], [0], {}

    def chat_that_stops(*settings):
        chat = make_chat(*settings)
        ends = round(bench.shape.vocab_size / bench.work.response)
        chat.stop_ids = tuple(sorted(random.Random(0).sample(range(bench.shape.vocab_size), ends)))
        return chat

    def alternating(question, answers):
        write_verdicts(question, [next(verdicts) for _ in answers])

    def measured(stage, function):
        def call(*given):
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent.clear()
            steps[0], start = 0, time.perf_counter()
            result = function(*given)
            seconds = time.perf_counter() - start
            allocated, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if (
                bench.device.type == "cuda") else (0, 0)
            found[stage] = allocated, steps[0]
            ended.append([stage, seconds, allocated / 1e9, steps[0]])
            hosts.append([stage, reserved / 1e9, dict(spent)])
            bench.report({"stages_s_gb_steps": ended, "stages_reserved_gb_host_s": hosts,
                          "outside_gb": outside_allocator(bench.device) / 1e9})
            return result
        return call

    def timed(name, method):
        def call(slots, *given, **named):
            before, start = slots.steps, time.perf_counter()
            result = method(slots, *given, **named)
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
            steps[0] += slots.steps - before
            return result
        return call

    with ExitStack() as patches:
        for module, name, function in (
                (models, "make_chat", chat_that_stops), (judge, "write_verdicts", alternating),
                *((engine.Slots, name, timed(name, getattr(engine.Slots, name))) for name in HOST),
                *((gcd, name, measured(stage, getattr(gcd, name))) for stage, name in STAGES.items())):
            patches.enter_context(mock.patch.object(module, name, function))
        yield found


def outside_allocator(device):
    """Bytes in use on a GPU that torch's allocator has not reserved; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def beside_estimate(settings, line, measured, estimate):
    """{"seconds", "gb", "steps": {stage: [measured, estimated]}} of an iteration, by its line of
    metrics.jsonl; whether seconds and bytes are at most OVER times the estimate.

    Estimated are the slow end of the seconds and the bytes that torch allocates, without slack. "update" is
    the larger of update and step, and its seconds include the scoring passes. estimate: None on a CPU.
    """
    stages = [stage for stage in STAGES if stage != "judge" or settings.gcd]
    found = {"seconds": {stage: [line[f"time/{stage}_s"]] for stage in stages},
             "gb": {stage: [measured[stage][0] / 1e9] for stage in stages},
             "steps": {stage: [measured[stage][1]] for stage in stages if stage != "update"}}
    if not estimate:
        return found, True
    size = {stage: (total - memory.OUTSIDE) / memory.SLACK for stage, total in estimate["bytes"].items()}
    size["update"] = max(size["update"], size["step"])
    slow = {stage: ends[0] for stage, ends in estimate["seconds"].items()}
    slow["update"] += slow["score"]
    for stage in stages:
        found["seconds"][stage].append(slow[stage])
        found["gb"][stage].append(size[stage] / 1e9)
    for stage, name in (("rollout", "decode steps"), ("judge", "judge steps")):
        if stage in found["steps"]:
            found["steps"][stage].append(estimate["counts"][name])
    return found, all(ours <= OVER * theirs for kind in ("seconds", "gb")
                      for ours, theirs in found[kind].values())
