"""The checks of lab.bench.gpu that train: whole iterations of the product, beside what was computed for them.

--preset paper whole: KL to a reference, eight minibatches, layers recomputed, a judge. Episodes have the
lengths of recorded ones (lab/envs/message_lengths.py), responses end at random, with the mean of
`simulation.Work`; verdicts alternate, since a random model's cannot be read. As in gpu_checks.py a check
takes a `Bench` and returns its measurements and whether they meet the target. `pretrained` trains a real
model, where its weights are there.
"""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

import config
import gcd
import judge
import session
from infra import files, job
from lab.bench import memory
from lab.bench.study import ROOT
from lm import smollm2
from session import prepare

ENVIRONMENT = "lab/envs/message_lengths.py"
STAGES = {"rollout": "collect", "judge": "judge_turns", "update": "optimize"}   # gcd.py's functions
OVER = 1.15                 # times the estimate: at most this much is right
TINY = "--demonstrations 8 --judge-demonstrations 4 --tasks 2 --group-size 2".split()       # of `pretrained`
SMOLLM2 = ("--model smollm2 --preset small --prompt plain --demonstrations 96 --judge-demonstrations 48 "
           "--cold-start-lr 1e-4 --lr 1e-5 --dtype bfloat16 --context 4096 --max-response-tokens 24").split()


def iteration(bench):
    """The second of two iterations of GRPO with GCD, with a reference: seconds and peak bytes by stage."""
    return measured_iteration(bench)


def no_gcd(bench):
    """The same without GCD."""
    return measured_iteration(bench, "--no-gcd")


def run(bench):
    """gcd.py itself, with set-up and checkpoint: two iterations, and the seconds of all of it."""
    out, start = bench.folder / "run", time.perf_counter()
    with as_in_a_run(bench) as found:
        status = gcd.main([*arguments(bench, out), "--iterations", "2", "--overwrite"])
    lines = rl_lines(out)
    times = {stage: lines[-1][f"time/{stage}_s"] for stage in STAGES} if lines else {}
    compared, right = beside_estimate(bench, config.parsed(arguments(bench, out)), times, found)
    saved = (out / files.CHECKPOINT / "model.safetensors").exists()
    found = {"exit_status": status, "iterations": len(lines), "run_s": time.perf_counter() - start}
    return found | compared, status == 0 and len(lines) == 2 and saved and right


def pretrained(bench):
    """SmolLM2-135M learns household rooms in a short run, which is killed in RL and resumed; where its
    weights are missing, nothing is run. With --tiny a fresh small model does.
    """
    if not (bench.tiny or (smollm2.FOLDER / "config.json").is_file()):
        return {"skipped": f"no weights: {smollm2.HOW}"}, True
    out, start, iterations = bench.folder / "pretrained", time.perf_counter(), 3 if bench.tiny else 10
    command = [sys.executable, "gcd.py", "--out", str(out), "--algo", "grpo", "--iterations", str(iterations),
               "--checkpoint-every", "1", "--evaluate", "none", "--device", bench.device.type,
               *(TINY if bench.tiny else SMOLLM2)]
    killed = killed_in_rl([*command, "--overwrite"], out, iterations // 2)
    resumed = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True)
    lines = rl_lines(out)
    found = {"killed_after": killed, "exit_status": resumed.returncode, "iterations": len(lines),
             "success": [line["rollout/success"] for line in lines], "run_s": time.perf_counter() - start}
    if resumed.returncode:
        found["stderr"] = resumed.stderr[-300:]
    return found, (0 < killed < iterations and resumed.returncode == 0
                   and [line["iteration"] for line in lines] == [*range(iterations)])


def killed_in_rl(command, out, iterations):
    """Start a run and kill it -9 once so many iterations are logged. Returns how many were; 0 if it ended."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        done = len(rl_lines(out))
        if done >= iterations and (out / files.CHECKPOINT).is_dir():
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return done
        time.sleep(0.02)
    return 0


# Parts of the checks

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
    """Let a random model's responses end and its verdicts be read; yield {stage: peak bytes} of gcd.py's
    stages, of the last iteration. Each stage's seconds and gigabytes are reported as it ends.
    """
    verdicts, record, make_chat = itertools.cycle(judge.ANSWERS), judge.record, session.make_chat
    found, ended = {}, []

    def chat_that_stops(*settings):
        chat = make_chat(*settings)
        ends = round(bench.shape.vocab_size / bench.work.response)
        chat.stop_ids = tuple(sorted(random.Random(0).sample(range(bench.shape.vocab_size), ends)))
        return chat

    def alternating(question, answers):
        record(question, [next(verdicts) for _ in answers])

    def measured(stage, function):
        def call(*given):
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            result = function(*given)
            found[stage] = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0
            ended.append([stage, time.perf_counter() - start, found[stage] / 1e9])
            bench.report({"stages_s_gb": ended})
            return result
        return call

    with ExitStack() as patches:
        for module, name, function in (
                (session, "make_chat", chat_that_stops), (judge, "record", alternating),
                *((gcd, name, measured(stage, getattr(gcd, name))) for stage, name in STAGES.items())):
            patches.enter_context(mock.patch.object(module, name, function))
        yield found


def measured_iteration(bench, *flags):
    """Two iterations, the first a warm-up: see `iteration`."""
    out = bench.folder / ("iteration" + "".join(flags))
    settings = config.parsed([*arguments(bench, out), "--overwrite", *flags])
    with as_in_a_run(bench) as found, ExitStack() as resources:
        made = prepare(settings, job.Ranks(0, 1, bench.device), False, resources)
        settings.algorithm.begin(made.model, made.objective, settings.minibatches, made.shard)
        with mock.patch.object(session, "save_reference", lambda run: bench.model_folder):
            reference = session.frozen_copy(made, 0)                # that folder has the same weights
        for i in range(2):
            start = time.perf_counter()
            metrics = gcd.iteration(made, i, reference)
            seconds = time.perf_counter() - start
    times = {stage: metrics[f"time/{stage}_s"] for stage in STAGES}
    compared, right = beside_estimate(bench, settings, times, found)
    names = ("policy/grad_norm", "policy/steps", "policy/kl_nats", "judge/tokens", "rollout/turns",
             "rollout/response_tokens", "memory/cache_tokens", "memory/cache_used_frac",
             "policy/logprob_gap_nats")
    found = {"s": seconds, **compared, **{name: metrics[name] for name in names if name in metrics}}
    trained = metrics["policy/grad_norm"] > 0 and (bool(flags) or metrics["judge/tokens"] > 0)
    return found, trained and metrics["policy/steps"] == settings.minibatches and right


def beside_estimate(bench, settings, times, peaks):
    """{"seconds", "gb": {stage: [measured, estimated]}}; whether all are at most OVER times the estimate.

    Estimated are the slow end of the seconds and the bytes that torch allocates, without slack. "update" is
    the larger of update and step, and its seconds include the scoring passes. On a CPU nothing is estimated.
    """
    if bench.device.type != "cuda":
        return {"seconds": {stage: [s] for stage, s in times.items()}}, True
    work = bench.work if settings.gcd else replace(bench.work, judged=0)
    estimate = memory.estimate("1.5B", 1, settings, work, memory.Machine(*bench.sheet or ()))
    size = {stage: (total - memory.OUTSIDE) / memory.SLACK for stage, total in estimate["bytes"].items()}
    size["update"] = max(size["update"], size["step"])
    slow = {stage: ends[0] for stage, ends in estimate["seconds"].items()}
    slow["update"] += slow["score"]
    seconds = {stage: [s, slow[stage]] for stage, s in times.items()}
    gb = {stage: [peaks[stage] / 1e9, size[stage] / 1e9] for stage in times if stage in peaks}
    if not settings.gcd:
        seconds.pop("judge")
    right = all(ours <= OVER * theirs for pairs in (seconds, gb) for ours, theirs in pairs.values())
    return {"seconds": seconds, "gb": gb}, right
