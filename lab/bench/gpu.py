"""Checks to run first on a new GPU: one JSON line per check, with its target.

Weights are random, so nothing is downloaded. A check that fails or raises an error is a line with "ok":
false, and the next check runs. In this order: the device's peak performance; variable-length attention
against masks, path by path; variable-length decoding against full forward passes; CUDA graphs against eager
steps, token for token; the sampler against the trainer in bf16; time and memory of the update at two sizes;
offloading a model; a full iteration of GRPO and of GRPO with GCD at ALFWorld's sizes; two injected faults,
which must be detected. The targets are computed, not measured.

    python -m lab.bench.gpu                   # 1.5B; under ten minutes on an H100
    python -m lab.bench.gpu --tiny            # the checks on any device in seconds: tests/lab/test_gpu.py
"""

import argparse
import collections
import itertools
import json
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from unittest import mock

import torch

import batching
import config
import gcd
import judge
import update
from algorithms import rewards
from envs.alfred import rooms
from infra import parallel
from infra.streams import stream
from lab.bench import memory
from lab.bench import varlen as paths
from lab.bench.rollout import recorded
from lm import attention, engine, small
from lm import model as qwen
from lm.chat import Chat
from lm.optim import adamw
from session import prepare


class Bench:
    """A model of random weights on a device, and the sizes of the checks."""

    def __init__(self, tiny, folder):
        self.tiny, self.folder = tiny, Path(folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.work, shape = memory.Work(), memory.shape("1.5B")
        vocabulary = len(small.save_small_tokenizer(rooms.phrases(), folder))
        if tiny:
            self.work = memory.Work(turns=3, most_turns=3, observation=20, response=8, judged=4, answers=2)
            shape = replace(shape, vocab_size=vocabulary, hidden_size=32, intermediate_size=96,
                            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        self.shape, self.rows = shape, 4 if tiny else 128
        model = qwen.Model(shape)
        qwen.init_weights(model, 0)
        qwen.save_pretrained(model.to(torch.bfloat16), folder)
        self.chat = Chat(qwen.load_tokenizer(folder), "plain")

    def model(self, dtype=None):
        """Load the weights to the device."""
        return qwen.load_pretrained(self.folder, dtype or self.dtype, self.device)

    @cached_property
    def sampler(self):
        """The model that generates, loaded once."""
        return self.model().requires_grad_(False)

    @cached_property
    def prompts(self):
        """One episode's first prompt for each row."""
        return [self.chat.message(seen[0], first=True) for seen in recorded(self.rows)[1]]

    def sync(self):
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action, times=3):
        """Seconds of the fastest of `times` calls, after a warm-up call."""
        action()
        spent = []
        for _ in range(times):
            self.sync()
            start = time.perf_counter()
            action()
            self.sync()
            spent.append(time.perf_counter() - start)
        return min(spent)


# The checks: each returns its measurements, a dict, and whether they meet the target

def limits(bench):
    """Bytes per second of a copy and FLOPs per second of a matrix product; targets are shares of these."""
    n = 2**20 if bench.tiny else 2**30
    a, b = torch.zeros(n, dtype=torch.uint8, device=bench.device), torch.zeros(n, dtype=torch.uint8,
                                                                              device=bench.device)
    bandwidth = 2 * n / bench.seconds(lambda: b.copy_(a))
    m = 256 if bench.tiny else 8192
    x = torch.randn(m, m, dtype=bench.dtype, device=bench.device)
    flops = 2 * m**3 / bench.seconds(lambda: x @ x)
    return {"bytes_per_s": bandwidth, "flops_per_s": flops}, bandwidth > 0 and flops > 0


def varlen(bench):
    """Variable-length attention in half precision, path by path: see lab/bench/varlen.py."""
    used = attention.varlen(bench.device, bench.dtype, bench.shape.head_dim)
    if not used:
        return {"varlen": False}, bench.device.type != "cuda"
    found = paths.errors(used, bench.shape, bench.device, bench.dtype, 60 if bench.tiny else 4000)
    return found | {"varlen": True}, max(found.values()) < 0.03


def lengths(bench):
    """Rounding in bf16: logprobs from decoding with variable-length attention and from a full forward with
    masks, on the same tokens.
    """
    ids, logprobs = decode(bench, 24)
    with without_varlen():
        found = update.rescore(bench.sampler, samples_of(bench, ids, logprobs), update.Objective())
    gap = found["policy/logprob_gap_max_nats"]
    used = bool(attention.varlen(bench.device, bench.dtype, bench.shape.head_dim))
    return {"largest_gap_nats": gap, "varlen": used}, gap < 0.3


def graphs(bench):
    """Tokens and seconds of decoding with CUDA graphs and with eager steps, with prefill and captures."""
    def step(slots, n):
        slots.step(slice(0, n), slots.context)

    eager = mock.patch.object(engine.Slots, "replay", step)
    n, start = 8 if bench.tiny else 128, time.perf_counter()
    captured, _ = decode(bench, n)
    middle = time.perf_counter()
    with eager:
        stepped, _ = decode(bench, n)
    seconds = {"graphs_s": middle - start, "eager_s": time.perf_counter() - middle}
    equal, used = sum(a == b for a, b in zip(captured, stepped)), bench.device.type == "cuda"
    faster = seconds["graphs_s"] < seconds["eager_s"] or not used
    return seconds | {"equal_rows": equal, "rows": bench.rows, "graphs": used}, equal == bench.rows and faster


def floor(bench):
    """Seconds of a decoding step at 1,000 tokens per row, compared with reading weights and cache once."""
    model, length = bench.sampler, 40 if bench.tiny else 1000
    slots = engine.Slots(model, bench.rows, length + 80, bench.chat.stop_ids, engine.Sampling(1.0, 64))
    slots.begin(range(bench.rows), [[5] * length] * bench.rows, range(bench.rows))
    slots.active_B.fill_(True)
    seconds = bench.seconds(slots.tick) / engine.TICK
    tokens = bench.rows * (length + 2 * engine.TICK)              # in the middle of the measured ticks
    read = 2 * sum(p.numel() for p in model.parameters()) + 2 * tokens * sum(kv[:, 0].numel()
                                                                             for kv in slots.cache.kv)
    share = read / limits(bench)[0]["bytes_per_s"] / seconds
    return {"s_per_token": seconds, "share_of_floor": share}, share > 0.57


def trainer_gap(bench):
    """Gap in nats between the sampler's and the trainer's logprobs of sampled tokens, on equal weights."""
    gap = gap_of(bench)
    return {"mean_nats": gap[0], "largest_nats": gap[1]}, gap[0] < 0.02


def update_16k(bench):
    """Forward and backward of one microbatch of 16,384 tokens: seconds, share of peak FLOPs, peak memory."""
    return update_at(bench, 16384)


def update_32k(bench):
    """The same with 32,768 tokens."""
    return update_at(bench, 32768)


def offload(bench):
    """Seconds to move a model and its optimizer state to the device and back, as PPO's critic is; memory that
    stays allocated; whether the outputs are unchanged.
    """

    def allocated():
        return torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0

    used, before = bench.sampler, allocated()
    model = parallel.shard(bench.model(torch.float32), parallel.Ranks(0, 1, bench.device), bench.dtype)
    optimizer, ids_BT = adamw(model), torch.zeros(1, 16, dtype=torch.long, device=bench.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    outputs = [model(ids_BT).detach()]

    def round_trip():
        with parallel.onloaded(used, model, optimizer):
            outputs.append(model(ids_BT).detach() if len(outputs) == 1 else None)

    seconds, equal = bench.seconds(round_trip, 2), torch.equal(*outputs[:2])
    outputs.clear()
    left = allocated() - before
    return {"s": seconds, "left_gb": left / 1e9, "equal": equal}, equal and left < 0.2e9


def grpo(bench):
    """Seconds and peak bytes of one iteration of GRPO: 16 x 8 episodes of 15 turns of 150 tokens."""
    return full_iteration(bench, "--no-gcd")


def grpo_gcd(bench):
    """The same with GCD, whose labels alternate, because a random model has no good turns."""
    return full_iteration(bench, "--gcd")


def stale_sampler(bench):
    """Injected fault: the sampler's weights differ from the trainer's; the gap must be large."""
    gap = gap_of(bench, stale=True)
    return {"mean_nats": gap[0]}, gap[0] > 0.1


def other_temperature(bench):
    """Injected fault: the trainer's temperature differs from the sampler's; the gap must be large."""
    gap = gap_of(bench, temperature=0.5)
    return {"mean_nats": gap[0]}, gap[0] > 0.1


CHECKS = (limits, varlen, lengths, graphs, floor, trainer_gap, update_16k, update_32k, offload, grpo,
          grpo_gcd, stale_sampler, other_temperature)
TARGETS = {"limits": "an H100: 3.35e12 and 989e12", "varlen": "errors under .03 on every path",
           "lengths": "under .3 nats", "graphs": "equal, and faster",
           "floor": "57 to 66 %", "trainer_gap": "under .02 in the mean", "update_16k": "45 % of the peak",
           "update_32k": "45 % of the peak", "offload": "under 5 s, no memory left allocated",
           "grpo": "36 s, under 60 GB", "grpo_gcd": "at most 10 % more than grpo",
           "stale_sampler": "detected", "other_temperature": "detected"}


# Parts of the checks

@contextmanager
def without_varlen():
    """Use masked attention, even if the device supports variable-length attention."""
    with ExitStack() as stack:
        for module in (attention, batching):
            stack.enter_context(mock.patch.object(module, "varlen", lambda *_: None))
        yield


def decode(bench, n):
    """Sample n tokens after each of the prompts. Returns ids and logprobs, a list per row each."""
    longest = max(map(len, bench.prompts)) + n
    slots = engine.Slots(bench.sampler, bench.rows, longest, (), engine.Sampling(1.0, n))
    slots.stop_tensor = torch.tensor([-1], device=bench.device)                # no token stops a response
    responses = engine.generate(slots, bench.prompts, [stream(0, i) for i in range(bench.rows)])
    bench.sync()
    return [r.ids for r in responses], [r.logprob for r in responses]


def samples_of(bench, ids, logprobs):
    """Samples of the prompts and the responses decoded after them."""
    return [batching.Sample(p + r, [False] * len(p) + [True] * len(r), [0.0] * len(p + r),
                            [0.0] * len(p) + old, i)
            for i, (p, r, old) in enumerate(zip(bench.prompts, ids, logprobs))]


def gap_of(bench, stale=False, temperature=1.0):
    """Mean and largest gap between the sampler's logprobs and those of a trainer under FSDP, in nats."""
    samples, model = samples_of(bench, *decode(bench, 16)), bench.model(torch.float32)
    if stale:
        qwen.init_weights(model, 1)
    model = parallel.shard(model, parallel.Ranks(0, 1, bench.device), bench.dtype)
    found = update.rescore(model, samples, replace(update.Objective(), temperature=temperature))
    return found["policy/logprob_gap_nats"], found["policy/logprob_gap_max_nats"]


def update_at(bench, tokens):
    """Forward and backward of one microbatch of `tokens` tokens: see `update_16k`."""
    tokens = 256 if bench.tiny else tokens
    model = parallel.shard(bench.model(torch.float32), parallel.Ranks(0, 1, bench.device), bench.dtype)
    model.recompute_layers(True)
    one = memory.episode(bench.work.turns, bench.work)
    samples = [memory.episode(bench.work.turns, bench.work) for _ in range(tokens // len(one.ids) or 1)]
    objective = replace(update.Objective(), microbatch_tokens=2 * tokens)
    sums = collections.Counter()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def forward_backward():
        parts, _ = update.weighted_kinds(samples, objective, {"policy": sums})
        trained = update.with_gradient(parts["policy"], objective)
        for batch in batching.equal_microbatches(model, trained, objective.microbatch_tokens):
            update.policy_loss(model, batch, objective, {"policy": 1.0}, {"policy": sums}).backward()
        model.zero_grad()

    seconds = bench.seconds(forward_backward, 2)
    parameters = sum(p.numel() for p in model.parameters())
    done = 8 * parameters * sum(len(sample.ids) for sample in samples) / seconds
    share = done / limits(bench)[0]["flops_per_s"]
    peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0
    return {"s": seconds, "share_of_peak": share, "peak_gb": peak / 1e9}, share > 0.45


def full_iteration(bench, *flags):
    """Seconds by stage and peak memory of gcd.iteration in household rooms."""
    work, out = bench.work, bench.folder / flags[0].strip("-")
    sizes = ["--tasks", 2, "--group-size", 2] if bench.tiny else []
    settings = config.parsed([str(flag) for flag in [
        "--model", bench.folder, "--preset", "paper", "--out", out, "--demonstrations", 0, "--kl", "none",
        "--minibatches", 1, "--max-turns", work.turns, "--max-response-tokens", work.response,
        "--judge-response-tokens", work.response, "--judge-turns", work.judged, "--judge-group-size",
        work.answers, "--context", 1024 if bench.tiny else 16384, "--evaluate", "none", "--device",
        bench.device.type, "--dtype", str(bench.dtype).removeprefix("torch."), "--prompt", "plain",
        *sizes, *flags]])

    def alternating_labels(episodes, *_):
        return [(e.index, t, judge.ANSWERS[(e.index + t) % 2]) for e in episodes for t in range(len(e.turns))]

    def alternating_rewards(episodes, *_):       # a random model never wins, but the update needs gradients
        for i, episode in enumerate(episodes):
            episode.reward = float(i % 2)

    def alternating_verdicts(question, answers):
        record(question, [next(verdicts) for _ in answers])

    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    record, verdicts = judge.record, itertools.cycle(judge.ANSWERS)
    with ExitStack() as resources:
        for module, name, function in ((judge, "candidates", alternating_labels),
                                       (rewards, "write_rewards", alternating_rewards),
                                       (judge, "record", alternating_verdicts)):
            resources.enter_context(mock.patch.object(module, name, function))
        run = prepare(settings, parallel.Ranks(0, 1, bench.device), False, resources)
        settings.algorithm.begin(run.model, run.objective, settings.minibatches, run.shard)
        for i in range(2):                                        # the second counts; the first is a warm-up
            start = time.perf_counter()
            metrics = gcd.iteration(run, i, None)
            seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 1e9 if bench.device.type == "cuda" else 0.0
    reported = ("policy/grad_norm", "judge/tokens", *(key for key in metrics if key.startswith("time/")))
    kept = {key: metrics[key] for key in reported if key in metrics}
    trained = metrics["policy/grad_norm"] > 0 and (flags == ("--no-gcd",) or metrics["judge/tokens"] > 0)
    return {"s": seconds, "peak_gb": peak, **kept}, trained and peak < 60


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a two-layer model, on any device")
    parser.add_argument("--few-rows", type=int, default=attention.FEW_ROWS,
                        help="when decoding fewer rows, let torch split a row's keys (0: never)")
    options = parser.parse_args(argv)
    attention.FEW_ROWS = options.few_rows
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device (--tiny runs anywhere)")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.tiny, folder)
        for check in CHECKS:
            start, line = time.perf_counter(), {"check": check.__name__, "target": TARGETS[check.__name__]}
            try:
                measured, line["ok"] = check(bench)
                line |= measured
            except Exception as error:                            # the next check is independent of this one
                message = " ".join(str(error).split())[:300]
                line |= {"ok": False, "error": f"{type(error).__name__}: {message}"}
            line["check_s"] = time.perf_counter() - start
            print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()}),
                  flush=True)
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
