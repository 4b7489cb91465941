"""The first ten minutes on a GPU: what nobody could check without one, a JSON line a check with its target.

Random weights, so nothing is downloaded. A check that fails, or ends in an error, is a line with "ok": false,
and the next one goes on. In this order: what the device can do; decoding by lengths against whole forwards,
and by graphs against eager, token for token; sampler and trainer in bf16; the update at two sizes, and its
memory; a whole iteration of GRPO and of GRPO with GCD at ALFWorld's sizes; faults put in, which must be seen.
Targets are computed until somebody has met them.

    python -m bench.gpu                            # 1.5B; under ten minutes on an H100
    python -m bench.gpu --tiny                     # the same on anything, in seconds: tests/test_gpu.py
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

import config
import gcd
import judge
import update
from algorithms import rewards
from bench import memory
from bench.rollout import recorded
from envs.alfred import rooms
from lm import attention, engine
from lm import model as qwen
from lm.chat import Chat
from run import parallel
from run.parallel import stream
from run.setup import prepare


class Bench:
    """A model of random weights on a device, and the sizes of the checks."""

    def __init__(self, tiny, folder):
        self.tiny, self.folder = tiny, Path(folder)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.work, shape = memory.Work(), memory.shape("1.5B")
        vocabulary = len(qwen.save_small_tokenizer(rooms.phrases(), folder))
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
        """The weights, on the device."""
        return qwen.load_pretrained(self.folder, dtype or self.dtype, self.device)

    @cached_property
    def sampler(self):
        """What generates: loaded once."""
        return self.model().requires_grad_(False)

    @cached_property
    def prompts(self):
        """A first prompt for each row."""
        return [self.chat.message(seen[0], first=True) for seen in recorded(self.rows)[1]]

    def sync(self):
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, action, times=3):
        """The fastest of some calls, after one that warms up."""
        action()
        spent = []
        for _ in range(times):
            self.sync()
            start = time.perf_counter()
            action()
            self.sync()
            spent.append(time.perf_counter() - start)
        return min(spent)


# The checks: each returns what it measured, and whether that is what it should be

def limits(bench):
    """Bytes a second of a copy, and FLOPs a second of a matrix product: what the targets are shares of."""
    n = 2**20 if bench.tiny else 2**30
    a, b = torch.zeros(n, dtype=torch.uint8, device=bench.device), torch.zeros(n, dtype=torch.uint8,
                                                                              device=bench.device)
    bandwidth = 2 * n / bench.seconds(lambda: b.copy_(a))
    m = 256 if bench.tiny else 8192
    x = torch.randn(m, m, dtype=bench.dtype, device=bench.device)
    flops = 2 * m**3 / bench.seconds(lambda: x @ x)
    return {"bytes_per_s": bandwidth, "flops_per_s": flops}, bandwidth > 0 and flops > 0


def lengths(bench):
    """Logprobs of the same tokens, decoded by variable-length attention and scored whole without: what bf16
    rounds."""
    ids, logprobs = decode(bench, 24)
    with without_varlen():
        found = update.rescore(bench.sampler, spoken(bench, ids, logprobs), update.Objective())
    gap = found["policy/logprob_gap_max_nats"]
    used = bool(attention.varlen(bench.device, bench.dtype, bench.shape.head_dim))
    return {"largest_gap_nats": gap, "varlen": used}, gap < 0.3


def graphs(bench):
    """The tokens of graphs and of eager steps, and the seconds of both: prefill, captures and all."""
    def step(slots, n):
        slots.step(slice(0, n), slots.cache.length)

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
    """A decoding step's seconds against those of reading weights and cache once, at 1,000 tokens a row."""
    model, held = bench.sampler, 40 if bench.tiny else 1000
    slots = engine.Slots(model, bench.rows, held + 80, bench.chat.stop_ids, engine.Sampling(1.0, 64))
    slots.begin(range(bench.rows), [[5] * held] * bench.rows, range(bench.rows))
    slots.live_B.fill_(True)
    seconds = bench.seconds(slots.tick) / engine.TICK
    read = sum(p.numel() for p in model.parameters()) * 2 + sum(kv.numel() for kv in slots.cache.kv) * 2
    share = read / limits(bench)[0]["bytes_per_s"] / seconds
    return {"s_per_token": seconds, "share_of_floor": share}, share > 0.57


def trainer_gap(bench):
    """Nats between what the sampler said of its tokens and what the trainer says, on equal weights."""
    gap = gap_of(bench)
    return {"mean_nats": gap[0], "largest_nats": gap[1]}, gap[0] < 0.02


def update_16k(bench):
    """One microbatch of 16,384 tokens, forward and backward: seconds, share of the peak, bytes."""
    return update_at(bench, 16384)


def update_32k(bench):
    """The same with 32,768."""
    return update_at(bench, 32768)


def away(bench):
    """Seconds in which a model in training and its moments come to the device and go again, as PPO's critic
    does; bytes that are left there; whether it says what it said."""

    def allocated():
        return torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0

    used, before = bench.sampler, allocated()
    model = parallel.shard(bench.model(torch.float32), parallel.Ranks(0, 1, bench.device), bench.dtype)
    optimizer, ids_BT = update.adam(model), torch.zeros(1, 16, dtype=torch.long, device=bench.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    said = [model(ids_BT).detach()]

    def there_and_back():
        with parallel.beside(used, model, optimizer):
            said.append(model(ids_BT).detach() if len(said) == 1 else None)

    seconds, equal = bench.seconds(there_and_back, 2), torch.equal(*said[:2])
    said.clear()
    left = allocated() - before
    return {"s": seconds, "left_gb": left / 1e9, "equal": equal}, equal and left < 0.2e9


def grpo(bench):
    """Seconds and peak bytes of one iteration of GRPO: 16 x 8 episodes of 15 turns of 150 tokens."""
    return whole_iteration(bench, "--no-gcd")


def grpo_gcd(bench):
    """The same with GCD, whose labels are coins: a random model has no good turn."""
    return whole_iteration(bench, "--gcd")


def stale_sampler(bench):
    """A sampler with other weights than the trainer's: the gap must show it."""
    gap = gap_of(bench, stale=True)
    return {"mean_nats": gap[0]}, gap[0] > 0.1


def other_temperature(bench):
    """Logprobs at another temperature than the sampler's: likewise."""
    gap = gap_of(bench, temperature=0.5)
    return {"mean_nats": gap[0]}, gap[0] > 0.1


CHECKS = (limits, lengths, graphs, floor, trainer_gap, update_16k, update_32k, away, grpo, grpo_gcd,
          stale_sampler, other_temperature)
TARGETS = {"limits": "an H100: 3.35e12 and 989e12", "lengths": "under .3 nats", "graphs": "equal, and faster",
           "floor": "57 to 66 %", "trainer_gap": "under .02 in the mean", "update_16k": "45 % of the peak",
           "update_32k": "45 % of the peak", "away": "under 5 s, nothing left", "grpo": "36 s, under 60 GB",
           "grpo_gcd": "at most 10 % more than grpo", "stale_sampler": "seen", "other_temperature": "seen"}


# What they are made of

@contextmanager
def without_varlen():
    """Masks, whatever the device has."""
    with ExitStack() as stack:
        for module in (attention, update):
            stack.enter_context(mock.patch.object(module, "varlen", lambda *_: None))
        yield


def decode(bench, n):
    """n tokens after each of the prompts: ids and logprobs by row."""
    longest = max(map(len, bench.prompts)) + n
    slots = engine.Slots(bench.sampler, bench.rows, longest, (), engine.Sampling(1.0, n))
    slots.stop = torch.tensor([-1], device=bench.device)                       # nothing stops
    responses = engine.generate(slots, bench.prompts, [stream(0, i) for i in range(bench.rows)])
    bench.sync()
    return [r.ids for r in responses], [r.logprob for r in responses]


def spoken(bench, ids, logprobs):
    """What was decoded after the prompts, as Samples."""
    return [update.Sample(p + r, [False] * len(p) + [True] * len(r), [0.0] * len(p + r),
                          [0.0] * len(p) + old, i)
            for i, (p, r, old) in enumerate(zip(bench.prompts, ids, logprobs))]


def gap_of(bench, stale=False, temperature=1.0):
    """Mean and largest gap between the sampler's logprobs and a trainer's, FSDP and all."""
    samples, model = spoken(bench, *decode(bench, 16)), bench.model(torch.float32)
    if stale:
        qwen.init_weights(model, 1)
    model = parallel.shard(model, parallel.Ranks(0, 1, bench.device), bench.dtype)
    found = update.rescore(model, samples, replace(update.Objective(), temperature=temperature))
    return found["policy/logprob_gap_nats"], found["policy/logprob_gap_max_nats"]


def update_at(bench, tokens):
    """One microbatch of so many tokens."""
    tokens = 256 if bench.tiny else tokens
    model = parallel.shard(bench.model(torch.float32), parallel.Ranks(0, 1, bench.device), bench.dtype)
    model.recompute_layers(True)
    one = memory.episode(bench.work.turns, bench.work)
    samples = [memory.episode(bench.work.turns, bench.work) for _ in range(tokens // len(one.ids) or 1)]
    objective = replace(update.Objective(), microbatch_tokens=2 * tokens)
    sums = collections.Counter()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def there_and_back():
        update.accumulate(model, {"policy": samples}, objective, {"policy": 1.0}, {"policy": sums})
        model.zero_grad()

    seconds = bench.seconds(there_and_back, 2)
    parameters = sum(p.numel() for p in model.parameters())
    done = 8 * parameters * sum(len(sample.ids) for sample in samples) / seconds
    share = done / limits(bench)[0]["flops_per_s"]
    peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0
    return {"s": seconds, "share_of_peak": share, "peak_gb": peak / 1e9}, share > 0.45


def whole_iteration(bench, *flags):
    """Seconds by stage, and peak bytes, of gcd.iteration in household rooms."""
    work, out = bench.work, bench.folder / flags[0].strip("-")
    sizes = ["--tasks", 2, "--group-size", 2] if bench.tiny else []
    settings = config.parsed([str(flag) for flag in [
        "--model", bench.folder, "--preset", "paper", "--out", out, "--demonstrations", 0, "--kl", "none",
        "--minibatches", 1, "--max-turns", work.turns, "--max-response-tokens", work.response,
        "--judge-response-tokens", work.response, "--judge-turns", work.judged, "--judge-group-size",
        work.answers, "--context", 1024 if bench.tiny else 16384, "--evaluate", "none", "--device",
        bench.device.type, "--dtype", str(bench.dtype).removeprefix("torch."), "--prompt", "plain",
        *sizes, *flags]])

    def coins(episodes, *_):
        return [(e.index, t, judge.ANSWERS[(e.index + t) % 2]) for e in episodes for t in range(len(e.turns))]

    def lottery(episodes, *_):                          # a random model wins nothing, and there is an update
        for i, episode in enumerate(episodes):
            episode.reward = float(i % 2)

    def said(question, given):
        record(question, [next(verdicts) for _ in given])

    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    record, verdicts = judge.record, itertools.cycle(judge.ANSWERS)
    with ExitStack() as held:
        for module, name, function in ((judge, "candidates", coins), (rewards, "write_rewards", lottery),
                                       (judge, "record", said)):
            held.enter_context(mock.patch.object(module, name, function))
        run = prepare(settings, parallel.Ranks(0, 1, bench.device), False, held)
        settings.algorithm.begin(run.model, run.objective(), settings.minibatches, run.shard)
        for i in range(2):                                        # the second, once all is compiled and warm
            start = time.perf_counter()
            metrics = gcd.iteration(run, i, None)
            seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 1e9 if bench.device.type == "cuda" else 0.0
    told = ("policy/grad_norm", "judge/tokens", *(key for key in metrics if key.startswith("time/")))
    kept = {key: metrics[key] for key in told if key in metrics}
    trained = metrics["policy/grad_norm"] > 0 and (flags == ("--no-gcd",) or metrics["judge/tokens"] > 0)
    return {"s": seconds, "peak_gb": peak, **kept}, trained and peak < 60


def main(argv=None):
    parser = argparse.ArgumentParser("python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model of two layers, and any device")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device (--tiny runs anywhere)")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.tiny, folder)
        for check in CHECKS:
            start, line = time.perf_counter(), {"check": check.__name__, "target": TARGETS[check.__name__]}
            try:
                measured, line["ok"] = check(bench)
                line |= measured
            except Exception as error:                            # the next check tells something of its own
                why = " ".join(str(error).split())[:300]
                line |= {"ok": False, "error": f"{type(error).__name__}: {why}"}
            line["check_s"] = time.perf_counter() - start
            print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in line.items()}),
                  flush=True)
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
