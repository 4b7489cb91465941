"""The checks of lab.bench.gpu on the engine and the update: model, tokenizer and prompts of a real size.

Each check takes a `Bench` and returns its measurements, a dict, and whether they meet the target that gpu.py
names. In a process of its own, each loads what it needs from the bench's folder, which the first one fills.
"""

import gc
import json
import random
import re
import shutil
import statistics
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile

import batching
import update
from infra import checkpoint, job, parallel
from infra.streams import stream
from judge import QUESTION
from lab.bench import lengths as recorded
from lab.bench import memory
from lab.bench import varlen as paths
from lab.bench.simulation import Messages, Work
from lab.envs.message_lengths import WORDS, text_of
from lm import attention, engine
from lm import model as decoder
from lm.chat import ASK, RULES, Chat
from lm.optim import adamw

# Bytes and bf16 FLOPs per second by the data sheets, dense, by the first pattern in the device's name
SHEETS = {r"\bH100 PCIe": (2.0e12, 756e12), r"\bH100 NVL": (3.9e12, 835e12), r"\bH100": (3.35e12, 989e12),
          r"\bH200 NVL": (4.8e12, 835e12), r"\bH200": (4.8e12, 989e12), r"\bB200": (8.0e12, 2250e12),
          r"\bA100.*40GB": (1.56e12, 312e12), r"\bA100": (2.04e12, 312e12),
          r"RTX 4090": (1.008e12, 165.2e12)}
OVER = 1.15         # times the estimate: at most this much is right
NAMED = 14          # kernels of a step, the others together
OFFLOAD_S = 15      # of a round trip: 18.5 GB each way, at 2.5 GB/s from memory that is not pinned
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (          # ChatML, as Qwen2.5's without its tools
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You "
    "are a helpful assistant.<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>"
    "{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{% endif %}")


def device_name():
    """The GPU's, or "CPU"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def sheet_of(name):
    """A GPU's (bytes, FLOPs) per second by its data sheet; None: not listed."""
    return next((peaks for pattern, peaks in SHEETS.items() if re.search(pattern, name)), None)


class Bench:
    """A model of random weights, a tokenizer, a device, and the sizes of the checks.

    sheet: the device's (bytes, FLOPs) per second, or None. tokenizer: whose it is. vocabulary: the number of
    its tokens. report: called with what a check has measured so far, a dict, lest it be lost.
    """

    def __init__(self, tiny, folder, report):
        self.tiny, self.folder, self.report = tiny, Path(folder), report
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.sheet = sheet_of(device_name())
        self.work = Work(response=8.0, spread=None, turns=3, judged=4, answers=2) if tiny else Work(
            spread=None)
        self.rows, self.shape = 4 if tiny else 128, memory.shape("1.5B")
        self.model_folder = self.folder / "model"
        theirs = Path(recorded.TOKENIZER)
        own = tiny or not theirs.is_dir()
        self.vocabulary = 2000 if tiny else 151665
        self.tokenizer = f"a stand-in of {self.vocabulary} tokens" if own else "Qwen2.5's"
        if tiny:
            self.shape = replace(self.shape, vocab_size=2048, hidden_size=32, intermediate_size=96,
                                 head_dim=8, num_hidden_layers=2, num_attention_heads=4,
                                 num_key_value_heads=2)
        if not self.model_folder.is_dir():
            checkpoint.replace(self.model_folder, partial(self.fill, theirs=None if own else theirs))
        self.chat = Chat(decoder.load_tokenizer(self.model_folder), "think")

    def fill(self, folder, theirs):
        """Write config.json, random weights and a tokenizer: theirs, a folder's, or (None) the stand-in."""
        if theirs:
            shutil.copytree(theirs, folder, dirs_exist_ok=True)
        else:
            save_stand_in(folder, self.vocabulary)
        with torch.device("meta"):
            model = decoder.Model(self.shape).to(torch.bfloat16)
        model = parallel.with_memory(model, self.device)
        randomize(model, 0)
        decoder.save_pretrained(model, folder)

    def model(self, dtype=None):
        """Load the weights to the device."""
        return decoder.load_pretrained(self.model_folder, dtype or self.dtype, self.device)

    def trainer(self):
        """The weights in fp32 as a run trains them: sharded, with the layers recomputed."""
        model = parallel.shard(self.model(torch.float32), job.Ranks(0, 1, self.device), self.dtype)
        model.recompute_layers(True)
        return model

    @cached_property
    def sampler(self):
        """The model that generates, loaded once, as a run has it."""
        model = self.model().requires_grad_(False)
        model.fuse()
        return model

    @cached_property
    def prompts(self):
        """A first prompt of recorded length for each row."""
        messages, rng = Messages(self.work), random.Random(0)
        return [self.chat.message(text_of(messages.draw(row, rng)[0] - messages.first, rng), first=True)
                for row in range(self.rows)]

    def samples(self, tokens):
        """Samples of episodes of recorded lengths, of random ids, of about so many tokens in all."""
        messages, rng, found = Messages(self.work), random.Random(0), []
        while not found or sum(len(sample.ids) for sample in found) < tokens:
            sampled = []
            for n in messages.draw(len(found), rng):
                sampled += [False] * n + [True] * self.work.response_tokens(rng, 512)
            numbers = [float(x) for x in sampled]
            ids = rng.choices(range(self.vocabulary), k=len(sampled))
            found.append(batching.Sample(ids, sampled, numbers, [0.0] * len(ids), len(found)))
        return found

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

    @property
    def machine(self):
        """What the meter assumes of this GPU; of one without a data sheet, by what it reaches."""
        return memory.Machine(*(self.sheet or peaks(self)))

    def shares(self, per_s, which):
        """{"share_of_sheet", "share_of_measured"} of a rate. which: 0 for bytes, 1 for FLOPs per second."""
        found = {"share_of_measured": per_s / peaks(self)[which]}
        return found | ({"share_of_sheet": per_s / self.sheet[which]} if self.sheet else {})


@torch.no_grad()
def randomize(model, seed):
    """Random weights as of `lm.model.init_weights`, but drawn on the model's device, which takes a second
    where a CPU takes half a minute.
    """
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.normal_(0.0, model.config.hidden_size ** -0.5)


def save_stand_in(folder, vocabulary):
    """Write a tokenizer of so many tokens: bytes, the WORDS with a space before them, the words of what
    surrounds them in a prompt, and tokens that no text has; its chat template is ChatML's.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {f" {word}" for word in WORDS}
    around = f"{TEMPLATE} {RULES}\n{ASK['think']} {QUESTION['think']}"
    pieces |= {*re.findall(r" ?[a-zA-Z]{2,}| [^\w\s]+|[^\w\s]{2,}", around)}
    unused = [f"unused{i}" for i in range(vocabulary - len(alphabet) - len(CONTROL) - len(pieces))]
    vocab = {token: i for i, token in enumerate(alphabet + unused)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in sorted(pieces)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": CONTROL[2], "pad_token": CONTROL[0],
                "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")


# The device

def peaks(bench):
    """(bytes per second of a copy, FLOPs per second of a matrix product)."""
    n, m = (2**20, 256) if bench.tiny else (2**30, 8192)
    a, b = (torch.zeros(n, dtype=torch.uint8, device=bench.device) for _ in range(2))
    x = torch.randn(m, m, dtype=bench.dtype, device=bench.device)
    return 2 * n / bench.seconds(lambda: b.copy_(a)), 2 * m**3 / bench.seconds(lambda: x @ x)


def limits(bench):
    """Bytes per second of a copy and FLOPs per second of a matrix product."""
    measured = peaks(bench)
    found = {"bytes_per_s": measured[0], "flops_per_s": measured[1]}
    if not bench.sheet:
        return found | {"data_sheet": "unknown"}, True
    shares = [one / peak for one, peak in zip(measured, bench.sheet)]
    return found | {"shares_of_sheet": shares}, shares[0] > 0.8 and shares[1] > 0.6


# The engine

def varlen(bench):
    """Variable-length attention in half precision, path by path: see lab/bench/varlen.py."""
    used = attention.varlen(bench.device, bench.dtype, bench.shape.head_dim)
    if not used:
        return {"varlen": False}, bench.device.type != "cuda"
    found = paths.errors(used, bench.shape, bench.device, bench.dtype, 60 if bench.tiny else 4000)
    return found | {"varlen": True}, max(found.values()) < 0.03


def lengths(bench):
    """Rounding in bf16: logprobs from decoding with variable-length attention and from a full forward with
    masks, on the same tokens; of responses, of later ones to prompts that continue them, of which two and two
    are equal, and of answers that share their prompt.
    """
    n, few = (4, 2) if bench.tiny else (24, 16)
    streams = [[stream(1, i, j) for j in range(8)] for i in range(few)]
    answers = engine.answer(bench.sampler, bench.prompts[:few], streams, (-1,), engine.Sampling(1.0, n), 32)
    given = [(prompt, one.ids, one.logprob) for prompt, of_prompt in zip(bench.prompts, answers)
             for one in of_prompt]
    decoded, half = decode(bench, n), bench.prompts[::2]
    prompts, streams = (half * 2)[:bench.rows], [stream(2, i % len(half)) for i in range(bench.rows)]
    slots = token_slots(bench, bench.rows, max(map(len, prompts)) + 2 * n + 3, n)
    first = engine.generate(slots, prompts, streams)
    prompts = [prompt + one.ids + [7, 8, 9] for prompt, one in zip(prompts, first)]
    copied = bench.rows - len({*map(tuple, prompts)})
    later = engine.generate(slots, prompts, streams)
    with without_varlen():
        found = {name: gaps(bench.sampler, samples_of(*sampled)) for name, sampled in (
            ("largest_gap_nats", (bench.prompts, *decoded)), ("of_answers_nats", zip(*given)),
            ("of_later_nats", (prompts, [one.ids for one in later], [one.logprob for one in later])))}
    ok = copied and all(gap < 0.3 for of_name in found.values() for gap in of_name)       # False for nan
    used = bool(attention.varlen(bench.device, bench.dtype, bench.shape.head_dim))
    return {name: max(of_name) for name, of_name in found.items()} | {"copied": copied, "varlen": used}, ok


def graphs(bench):
    """Tokens and seconds of decoding with CUDA graphs and with eager steps, with prefill and captures, after
    an eager step.
    """
    def step(slots, n, context):
        slots.step(slice(0, n), context)

    eager = mock.patch.object(engine.Slots, "replay", step)
    n = 8 if bench.tiny else 128
    with eager:
        decode(bench, 2)                                      # the weights are loaded, and the kernels
    start = time.perf_counter()
    captured, _ = decode(bench, n)
    middle = time.perf_counter()
    with eager:
        stepped, _ = decode(bench, n)
    seconds = {"graphs_s": middle - start, "eager_s": time.perf_counter() - middle}
    equal, used = sum(a == b for a, b in zip(captured, stepped)), bench.device.type == "cuda"
    faster = seconds["graphs_s"] < seconds["eager_s"] or not used
    return seconds | {"equal_rows": equal, "rows": bench.rows, "graphs": used}, equal == bench.rows and faster


def floor(bench):
    """Seconds of a decoding step of 128 rows of 3,000 tokens, and of 16 rows; the bytes that they must read;
    and by these two points the time that does not depend on the bytes, and the share of the bandwidth that
    the rest takes.
    """
    layers = bench.shape.num_hidden_layers
    seconds, read = decode_step(bench, bench.rows)
    few_s, few_read = decode_step(bench, min(bench.rows, 16))
    found = {"s": seconds, "read_gb": read / 1e9, "few_s": few_s, "few_read_gb": few_read / 1e9}
    if read > few_read and seconds > few_s:
        per_s = (read - few_read) / (seconds - few_s)
        found |= {"s_per_layer": (seconds - read / per_s) / layers, **bench.shares(per_s, 0)}
    estimate = bench.machine.decoding_s(0, layers, 1, read)
    return found | {"estimated_s": estimate}, seconds <= OVER * estimate


def decode_step(bench, rows, length=3000):
    """Seconds of a decoding step of so many rows of so many tokens, and the bytes that it must read."""
    model, slots = bench.sampler, filled(bench, rows, length)
    tokens = rows * (len(slots.running[0][0]) + 2 * engine.TICK)    # in the middle of the measured ticks
    seconds = bench.seconds(slots.tick) / engine.TICK
    dtype = next(model.parameters()).dtype
    return seconds, (dtype.itemsize * sum(memory.multiplied_weights(model)) +
                     tokens * memory.cached_bytes(model.config, dtype))


def filled(bench, rows, length=3000):
    """Slots of so many rows of so many tokens, which are about to decode."""
    length, context = (40, 512) if bench.tiny else (length, 16384)
    slots = token_slots(bench, rows, context, 80)                       # more than four ticks draw
    slots.begin(range(rows), [[5] * length] * rows, range(rows))
    return slots


def kernels(bench):
    """Where the time of `floor`'s decoding steps goes: by number of rows, the kernels in which the device
    spends most, and all others, as [name, microseconds, calls] of a step.
    """
    on_gpu, found = bench.device.type == "cuda", {}
    for rows in (bench.rows, min(bench.rows, 16)):
        slots = filled(bench, rows)
        slots.tick()
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
            slots.tick()
            bench.sync()
        by_name = {}
        for event in profiled.key_averages():
            parts = re.findall(r"\w*(?:[kK]ernel|Functor|Ops|Copy)\w*", event.key)     # of a C++ template
            name = (" ".join(dict.fromkeys(parts)) or event.key)[:90]
            us, calls = by_name.get(name, (0.0, 0.0))
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            by_name[name] = us + spent / engine.TICK, calls + event.count / engine.TICK
        entries = sorted(((name, us, calls) for name, (us, calls) in by_name.items()), key=lambda e: -e[1])
        others = "others", *(sum(entry[i] for entry in entries[NAMED:]) for i in (1, 2))
        found[f"rows_{rows}"] = [[name, round(us, 1), round(calls, 1)]
                                 for name, us, calls in (*entries[:NAMED], others)]
        bench.report(found)
    return found, True


def splits(bench):
    """Seconds of a decoding step of 64 rows of 3,000 tokens (the middle of a rollout), of 8 rows of 9,000
    (its end), and of the judge's answers: as planned, and planned for the whole context without SPLIT_KEYS.
    """
    found = {}
    for name, keys, planned in (("planned", attention.SPLIT_KEYS, engine.PLANNED), ("long", 10**6, 10**6)):
        with (mock.patch.object(attention, "SPLIT_KEYS", keys),
              mock.patch.object(engine, "PLANNED", planned)):
            for step, rows, length in (("middle", 64, 3000), ("end", 8, 9000)):
                found[f"{step}_{name}_s"], _ = decode_step(bench, min(bench.rows, rows), length)
            found[f"judge_{name}_s"] = judge_step(bench)
            bench.report(found)
    steps = "middle", "end", "judge"
    return found, all(found[f"{step}_planned_s"] <= 1.05 * found[f"{step}_long_s"] for step in steps)


def judge_step(bench):
    """Seconds of a decoding step of eight answers to each of 32 episodes of recorded lengths."""
    R, A = (2, 2) if bench.tiny else (32, 8)
    prompts = [[5] * len(sample.ids) for sample in bench.samples(10**4 * R)[:R] for _ in range(A)]
    slots = endless(engine.Answers(bench.sampler, R, A, (), engine.Sampling(1.0, 80)))
    slots.begin(range(R * A), prompts, range(R * A))
    return bench.seconds(slots.tick) / engine.TICK


def trainer_gap(bench):
    """Gap in nats between the sampler's and the trainer's logprobs of sampled tokens, on equal weights.

    Both round to half precision, which alone is the gap between the trainer and the same in fp32. With other
    weights, and at another temperature, the gap must be large: two injected faults.
    """
    decoded, found, logprobs = decode(bench, 16), {}, {}
    for name, seed, dtype, temperature in (
            ("equal", None, bench.dtype, 1.0), ("other_temperature", None, bench.dtype, 0.5),
            ("other_weights", 1, bench.dtype, 1.0), ("fp32", None, torch.float32, 1.0)):
        model, samples = bench.model(torch.float32), samples_of(bench.prompts, *decoded)
        if seed is not None:
            randomize(model, seed)
        model = parallel.shard(model, job.Ranks(0, 1, bench.device), dtype)
        nats = gaps(model, samples, temperature)
        found |= {f"{name}_mean_nats": statistics.fmean(nats), f"{name}_largest_nats": max(nats)}
        logprobs[name] = [logprob for sample in samples for logprob in sample.logprob_old]
        bench.report(found)
        del model
        gc.collect()                                       # a sharded model is part of cycles
    n, faults = len(nats), (found["other_temperature_mean_nats"], found["other_weights_mean_nats"])
    rounding = sum(abs(a - b) for a, b in zip(logprobs["equal"], logprobs["fp32"])) / n
    within = found["equal_mean_nats"] < max(2 * rounding, 1e-5)            # on a CPU both are fp32
    between = max(rounding, found["fp32_mean_nats"]) < 0.1 < min(faults)
    return found | {"rounding_mean_nats": rounding}, within and between


# The update

def gradient(bench):
    """Cosine and ratio of norms of a microbatch's gradient, in half precision as a run computes it, to the
    same in fp32 with masks. Texts share prefixes. Without one of the texts, an injected fault, both must be
    off.
    """
    fewer = [replace(sample, logprob_old=None) for sample in bench.samples(64 if bench.tiny else 4096)]
    n = len(fewer[0].ids) // 2
    other = replace(fewer[0], ids=[*fewer[0].ids[:n], *fewer[0].ids[:n - 1:-1]], episode=len(fewer))
    found, right = {}, [*fewer, other]
    for name, dtype, samples in (("fp32", torch.float32, right), ("half", bench.dtype, right),
                                 ("fault", bench.dtype, fewer)):
        model = parallel.shard(bench.model(torch.float32), job.Ranks(0, 1, bench.device), dtype)
        model.recompute_layers(True)
        update_of(model, [replace(sample) for sample in samples])
        found[name] = [parallel.full_tensor(parameter.grad).cpu() for parameter in model.parameters()]
        del model
        gc.collect()                                       # a sharded model is part of cycles
    norms = {name: parallel.norm(grad) for name, grad in found.items()}
    cosine, wrong = (parallel.dot(found["fp32"], found[name]) / (norms["fp32"] * norms[name])
                     for name in ("half", "fault"))
    ratio, other_ratio = (norms[name] / norms["fp32"] for name in ("half", "fault"))
    return {"cosine": cosine, "norm_ratio": ratio, "fault_cosine": wrong, "fault_norm_ratio": other_ratio}, (
        cosine > 0.99 and abs(ratio - 1) < 0.02 and wrong < 0.99 and abs(other_ratio - 1) > 0.02)


def update_16k(bench):
    """Forward and backward of a microbatch of about 16,384 tokens: seconds, shares of peak FLOPs, memory."""
    return update_at(bench, 16384)


def update_32k(bench):
    """The same with 32,768 tokens."""
    return update_at(bench, 32768)


def update_at(bench, tokens):
    """Forward, repetition and backward of one microbatch of about `tokens` tokens of recorded episodes."""
    model, samples = bench.trainer(), bench.samples(256 if bench.tiny else tokens)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def forward_backward():
        batch = [replace(sample) for sample in samples]
        update_of(model, batch)
        model.zero_grad()

    seconds = bench.seconds(forward_backward, 2)
    lengths = [len(sample.ids) for sample in samples]
    scored = sum(sum(sample.sampled) for sample in samples)
    flops = memory.forward_flops(model, sum(lengths), sum(n * n for n in lengths) // 2, scored)
    shares = bench.shares(4 * flops / seconds, 1)
    peak = torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0
    found = {"tokens": sum(lengths), "median_episode": statistics.median(lengths), "s": seconds, **shares,
             "peak_gb": peak / 1e9}
    return found, shares.get("share_of_sheet", shares["share_of_measured"]) >= memory.Machine().of_flops[0]


def update_of(model, samples):
    """One microbatch's loss, forward and backward."""
    objective = replace(update.Objective(), microbatch_tokens=10**9)
    sums = {"policy": dict.fromkeys(update.COUNTED, 0.0)}
    parts = update.write_token_weights(samples, objective, sums)
    for batch in batching.equal_microbatches(parts["policy"], objective.microbatch_tokens):
        update.token_loss(model, batch, objective, {"policy": 1.0}, sums).backward()


def offload(bench):
    """Seconds to move a model and its optimizer state to the device and back, as PPO's critic is; memory that
    stays allocated; whether the outputs are unchanged.
    """

    def allocated():
        return torch.cuda.memory_allocated() if bench.device.type == "cuda" else 0

    # bf16, and fp32 weights, gradients and moments, with some room
    if reason := no_room(bench, 20 * sum(parameter.numel() for parameter in bench.sampler.parameters())):
        return {"skipped": reason}, True
    used, before = bench.sampler, allocated()
    model = parallel.shard(bench.model(torch.float32), job.Ranks(0, 1, bench.device), bench.dtype)
    optimizer, ids_BT = adamw(model), torch.zeros(1, 16, dtype=torch.long, device=bench.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    outputs = [model(ids_BT).detach()]
    parallel.offload(model, optimizer)

    def round_trip():
        with parallel.onloaded(used, model, optimizer):
            outputs.append(model(ids_BT).detach())

    seconds = bench.seconds(round_trip, 2)
    equal = all(torch.equal(outputs[0], output) for output in outputs[1:])
    outputs.clear()
    left = allocated() - before
    return {"s": seconds, "left_gb": left / 1e9, "equal": equal}, (
        equal and left < 0.2e9 and seconds < OFFLOAD_S)


# Parts of the checks

def no_room(bench, required, source=""):
    """Why a GPU has no room for so many bytes; "" if it has, elsewhere, and with --tiny."""
    if bench.device.type != "cuda" or bench.tiny:
        return ""
    there = torch.cuda.get_device_properties(bench.device).total_memory
    return f"needs {required / 1e9:.0f} GB{source}, has {there / 1e9:.0f}" * (required > there)


@contextmanager
def without_varlen():
    """Use masked attention, even if the device supports variable-length attention."""
    with ExitStack() as stack:
        for module in (attention, batching):
            stack.enter_context(mock.patch.object(module, "varlen", lambda *_: None))
        yield


def token_slots(bench, rows, context, n):
    """Slots that sample n tokens in each row."""
    return endless(engine.Slots(bench.sampler, rows, context, (), engine.Sampling(1.0, n)))


def endless(slots):
    """The slots, in which no token stops a response."""
    slots.stop_tensor = torch.tensor([-1], device=slots.device)
    return slots


def decode(bench, n):
    """Sample n tokens after each of the prompts. Returns ids and logprobs, a list per row each."""
    slots = token_slots(bench, bench.rows, max(map(len, bench.prompts)) + n, n)
    responses = engine.generate(slots, bench.prompts, [stream(0, i) for i in range(bench.rows)])
    bench.sync()
    return [r.ids for r in responses], [r.logprob for r in responses]


def samples_of(prompts, ids, logprobs):
    """Samples of prompts and the responses decoded after them."""
    return [batching.sample_of(prompt, response, 0.0, i, old)
            for i, (prompt, response, old) in enumerate(zip(prompts, ids, logprobs))]


def gaps(model, samples, temperature=1.0):
    """Gap between the sampler's logprob of each sampled token and the model's, in nats."""
    update.rescore(model, samples, update.Objective(temperature=temperature))
    return [abs(a - b) for sample in samples
            for a, b, sampled in zip(sample.logprob_sampler, sample.logprob_old, sample.sampled) if sampled]
