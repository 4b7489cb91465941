"""Speed on a CPU: rollouts compared with transformers, an iteration compared with TRL, and the cost of GCD.

Every ratio comes from three alternating measurements in one process and has a confidence interval. Rollouts
use a random model and recorded observations; ours keeps its cache from one to the next, as a run does. For
the others the default run's cold start is trained first; both sides continue from it at a learning rate so
small that the policy stays the same.

    rollout     new tokens per second of episodes of 10, 20 and 40 turns: ours over `generate`, which is given
                the full conversation each turn; also tokens computed and seconds per episode
    iteration   seconds of 128 episodes in household rooms and one optimizer step: TRL's GRPOTrainer, which
                also calls `generate` on full conversations (lab/bench/trl_grpo.py), over gcd.iteration
    GCD         seconds of gcd.iteration with GCD over without

Needs TRL (`pip install -r requirements-trl.txt`). The file keeps one measurement for each instruction set.

    python -m lab.bench.iteration                               # adds to lab/results/cpu.json, in 15 minutes
    ATEN_CPU_CAPABILITY=avx2 python -m lab.bench.iteration      # torch's kernels as on a CPU without AVX-512
"""

import argparse
import contextlib
import io
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import config
import gcd
from infra import files, job
from lab.bench import envs, rollout, trl_grpo
from lab.bench.intervals import interval, with_half
from lab.bench.machine import this_cpu
from lab.bench.study import ROOT, parse_clean
from session import prepare

OUT = ROOT / "lab" / "results" / "cpu.json"
TURNS, EPISODES, REPEATS, STEPS = (10, 20, 40), 64, 3, 3
COLD_START = ("--iterations", "0", "--evaluate", "none")
NO_LEARNING = ("--demonstrations", "0", "--minibatches", "1", "--lr", "1e-12", "--evaluate", "none",
               "--dynamic-sampling", "keep")


def ratio(ours, theirs):
    """Interval of the ratio theirs / ours of two lists of seconds, paired by repeat."""
    return interval({i: b / a for i, (a, b) in enumerate(zip(ours, theirs, strict=True))})


def rollout_ratios(turns, repeats):
    """{turns: ratio of new tokens per second, and each side's seconds and computed tokens per episode}."""
    found, (model, peer, chat) = {}, rollout.both_models(64)
    for n in turns:
        tasks, seen = rollout.recorded(EPISODES)
        slots, ran = rollout.new_slots(model, chat, EPISODES), {"ours": [], "generate": []}
        for _ in range(1 + repeats):
            ran["ours"].append(rollout.ours(model, chat, tasks, seen, n, slots))
            ran["generate"].append(rollout.theirs(peer, chat, seen, n))
        ran = {side: runs[1:] for side, runs in ran.items()}                   # the first ones warm up
        per_token = {side: [s / new for s, new, *_ in runs] for side, runs in ran.items()}
        found[n] = {"ratio": ratio(per_token["ours"], per_token["generate"])} | {
            side: {"s_per_episode": statistics.fmean(s for s, *_ in runs) / EPISODES,
                   "tokens_per_episode": runs[0][2] / EPISODES} for side, runs in ran.items()}
    return found


@contextlib.contextmanager
def prepared_run(folder, out, *flags):
    """Yield a Run with these flags from the model in `folder`, ready for its first iteration."""
    settings = config.parse(["--model", str(folder), "--out", str(out), "--overwrite", *NO_LEARNING, *flags])
    with contextlib.ExitStack() as resources, contextlib.redirect_stderr(io.StringIO()):
        run = prepare(settings, job.Ranks(0, 1, torch.device("cpu")), False, resources)
        settings.algorithm.begin_checked(run.model, run.objective, settings.minibatches, run.shard)
        yield run


def iteration_seconds(folder, out, *flags):
    """Seconds of gcd.iteration: the median of STEPS calls after a first one, which warms up the allocator."""
    clock = []
    with prepared_run(folder, out, *flags) as run:
        for i in range(1 + STEPS):
            gcd.iteration(run, i, None)
            clock.append(time.perf_counter())
    return statistics.median(end - start for start, end in itertools.pairwise(clock))


def kernels(folder, out):
    """{torch operator: share of CPU time} in an iteration of GRPO with GCD, for shares above 2 %."""
    with prepared_run(folder, out) as run:
        gcd.iteration(run, 0, None)
        with torch.profiler.profile() as profile:
            gcd.iteration(run, 1, None)
    spent = {event.key: event.self_cpu_time_total for event in profile.key_averages()}
    total = sum(spent.values())
    return {key: t / total for key, t in sorted(spent.items(), key=lambda item: -item[1]) if t > 0.02 * total}


def trl_seconds(folder, out):
    """Seconds of a step of TRL's trainer with as many episodes: the median of STEPS after a first one."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        trl_grpo.main(["--model", str(folder), "--out", str(out), "--lr", "1e-12",
                        "--steps", str(1 + STEPS)])
    line = next(line for line in printed.getvalue().splitlines() if line.startswith('{"bench"'))
    return statistics.median(json.loads(line)["s_per_step"][1:])


def measure(commit, turns=TURNS, repeats=REPEATS):
    """All measurements, as the dict that OUT keeps under this CPU's instruction set."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cold, out = Path(folder) / "cold", Path(folder) / "run"
        assert gcd.main([*COLD_START, "--out", str(cold)]) == 0
        start = cold / files.CHECKPOINT
        sides = {"grpo": lambda: iteration_seconds(start, out, "--no-gcd"),
                 "gcd": lambda: iteration_seconds(start, out, "--gcd"),
                 "trl": lambda: trl_seconds(start, out)}
        seconds = {side: [] for side in sides}
        for _ in range(repeats):
            for side, run in sides.items():
                seconds[side].append(run())
        shares = kernels(start, out)
    return {"what": "seconds on this CPU, one thread", "command": "python -m lab.bench.iteration",
            "commit": commit, "torch": torch.__version__, "cpu": this_cpu(), "repeats": repeats,
            "rollout": rollout_ratios(turns, repeats), "seconds": seconds,
            "iteration": ratio(seconds["grpo"], seconds["trl"]),
            "gcd": ratio(seconds["grpo"], seconds["gcd"]), "kernels": shares}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.bench.iteration", description=__doc__.splitlines()[0])
    options = parse_clean(parser, argv)
    if not envs.installed("trl"):
        parser.error("trl is not installed; pip install -r requirements-trl.txt")
    found = measure(options.commit)
    files.write_json(OUT, (files.read_json(OUT) or {}) | {found["cpu"]["capability"]: found})
    print("{name}, {capability}, one thread".format(**found["cpu"]))
    for turns, row in found["rollout"].items():
        print(f"rollout of {turns} turns: {with_half(row['ratio'])} times generate")
    print(f"iteration: TRL takes {with_half(found['iteration'])} times as long")
    print(f"GCD: {with_half(found['gcd'])} times without")


if __name__ == "__main__":
    main()
