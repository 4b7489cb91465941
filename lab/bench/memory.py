"""Estimates of a run's GPU memory by stage and of its seconds per iteration, computed without a GPU.

The project's code runs on "meta" tensors, which have shapes but no data, and the bytes of every tensor count
from its creation until it is freed: in the rollout's largest prefill and one decoding step, and in the
forward and backward pass of one microbatch. Memory that is occupied throughout (master weights, Adam's
moments, gradients, the sampler) is arithmetic. So are the seconds, by a roofline model with the fractions of
peak performance in `Machine`. Everything is computed, not measured; tests/lab/test_meter.py compares the same
count with a real process on a CPU. Left out: fragmentation, NCCL's buffers, the CUDA context.

    python -m lab.bench.memory            # 1.5B and 7B at --preset paper; writes lab/results/memory.json
"""

import argparse
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import batching
import config
import update
from infra import files
from infra.memory import state_bytes
from lab.bench.study import ROOT
from lm import logprobs
from lm import model as qwen
from lm.attention import KVCache
from lm.engine import Sampling, Slots
from lm.optim import trained
from session import choose_trained

GB = 1e9
OUT = ROOT / "lab" / "results" / "memory.json"
# Shapes of Qwen2.5's config.json: layers, width, heads, K/V heads, intermediate, vocabulary, tied
SHAPES = {"1.5B": (28, 1536, 12, 2, 8960, 151936, True), "7B": (28, 3584, 28, 4, 18944, 152064, False)}


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors created while it is active: `now` (still alive) and `peak` (maximum)."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            self.count(tensor, 0)                         # existed before, so that views of it are free too
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self.count(tensor, 1)
        return out

    def count(self, tensor, factor):
        """Count `factor` times the bytes of a tensor's storage, once, until the storage is freed."""
        if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
            self.known[id(storage)] = size = factor * storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, id(storage))

    def release(self, key):
        """Stop counting a storage that was freed."""
        self.now -= self.known.pop(key)


@dataclass(frozen=True)
class Work:
    """The load of an iteration: estimated lengths of ALFWorld episodes in the paper's prompts."""

    turns: int = 15                     # of an average episode
    most_turns: int = 30                # of the longest episode
    observation: int = 100              # tokens per turn from the environment and the chat template
    response: int = 150                 # tokens
    judged: int = 32                    # judged turns
    question: int = 52                  # tokens
    answers: int = 8                    # per judged turn, all different, each of `response` tokens

    def turns_of(self, episodes):
        """Turns of each episode: evenly spread, with a mean of about `turns` and at most `most_turns`."""
        return [max(1, round(self.most_turns * (i + 1) / episodes)) for i in range(episodes)]


@dataclass(frozen=True)
class Machine:
    """An H100 SXM: peak bandwidth and peak FLOPs, each times the fraction assumed to be reached."""

    bandwidth: float = 3.35e12 * 0.6    # bytes per second
    flops: float = 989e12 * 0.45        # per second, in bf16
    memory_gb: float = 80.0


def shape(name):
    """The ModelConfig of the Qwen2.5 model of this size, a key of SHAPES."""
    layers, width, heads, kv_heads, inner, vocabulary, tied = SHAPES[name]
    return qwen.ModelConfig(vocabulary, width, inner, layers, heads, kv_heads, width // heads, 1e6,
                            tie_word_embeddings=tied)


def meta_model(model_config, dtype):
    """A model on the "meta" device: parameters without data."""
    with torch.device("meta"):
        return qwen.Model(model_config).to(dtype)


def rollout_bytes(model, lengths, context, chunk, before=False):
    """Peak bytes of a rollout in addition to the weights, that is, of the cache and of a prefill or a
    decoding step; and the bytes that stay allocated afterwards, the cache's.

    lengths: tokens of each row at the end, of which the last `chunk` are new; no row is freed before.
    context: maximum tokens of a row. before: reserve it for every row.
    """
    slots, longest = len(lengths), max(lengths)
    with Meter() as meter, torch.no_grad():
        pool = Slots(model, slots, context, (0,), Sampling(1.0, 512))
        if before:
            pool.cache = KVCache(model.config, slots, context, torch.bfloat16, "meta")
        for now in range(chunk, longest, chunk):            # the cache grows turn by turn
            kept = [min(now - chunk, length) for length in lengths]
            pool.cache.fit(kept, [min(now, length) + 512 for length in lengths])
        pool.cached = [[0] * (length - chunk) for length in lengths]
        pool.begin(range(slots), [[0] * length for length in lengths], range(slots))
        pool.step(slice(0, slots), context)
    return meter.peak, 0 if before else sum(kv.nbytes for kv in pool.cache.kv)


def update_bytes(model, samples, objective):
    """Peak bytes of the last microbatch's forward and backward, without weights and gradients."""
    for parameter in trained(model):                     # FSDP reduces a layer's gradients at once
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    batch = batching.microbatches(samples, objective.microbatch_tokens, batching.packed_attention(model))[-1]
    with Meter() as meter:
        *where, target_N, advantage_N, weight_N, old_N, _, _, allowed = batching.collate(batch, model)
        logprob_N, _ = logprobs.token_logprobs(model, *where, target_N, 1.0, allowed, entropies=True)
        (weight_N * advantage_N * (logprob_N - old_N).exp()).sum().backward()
    return meter.peak


def episode(turns, work):
    """A Sample of an episode with `turns` turns."""
    sampled = ([False] * work.observation + [True] * work.response) * turns
    numbers = [float(x) for x in sampled]
    return batching.Sample([0] * len(sampled), sampled, numbers, numbers, 0)


def with_answers(sample, work):
    """An episode's Sample, and the Samples of the answers to a question about its middle turn."""
    n, sample.turns = len(sample.ids) // 2 + work.question, [object()]
    sampled = [False] * n + [True] * work.response
    numbers = [float(x) for x in sampled]
    prompt = [0] * (n - work.question) + [1] * work.question
    return [sample, *(batching.Sample(prompt + [2 + i] * work.response, sampled, numbers, numbers, 0, "judge",
                                      turns=sample.turns)
                      for i in range(work.answers))]


def gathered_bytes(model):
    """Bytes that FSDP holds unsharded at once, in bf16: embedding and head, and two layers, the gradients of
    one of them before and after their cast to fp32.
    """
    def of_root_and_layer(parameters):
        layer = numbers(parameters(model.model.layers[0]))
        return numbers(parameters(model)) - layer * len(model.model.layers), layer

    root, layer = of_root_and_layer(qwen.Model.parameters)
    return 2 * root + 2 * 2 * layer + 6 * max(of_root_and_layer(trained))


def numbers(parameters):
    """How many numbers these parameters hold."""
    return sum(parameter.numel() for parameter in parameters)


def stages(name, ranks, settings, work, before=False):
    """{stage: bytes per GPU} of a run of the Qwen2.5 model `name` with these settings, in bf16.

    With settings.lora, only adapters of that rank are trained. before: count the engine of 2026-11-20
    instead, which reserved slots x context, sampled from FSDP's gathered weights, kept an fp32 reference on
    the GPU, computed all logits of a microbatch at once, stored all activations, and used a third set of
    gradients in the step; it had no adapters.
    """
    model, dtype = meta_model(shape(name), torch.bfloat16), torch.bfloat16
    model.compute_dtype = dtype
    model.recompute_layers(not before)
    P, slots = numbers(model.parameters()), settings.tasks * settings.group_size // ranks
    turns = [settings.context] * slots if before else work.turns_of(slots)
    lengths = [min(n * (work.observation + work.response), settings.context - 512) for n in turns]
    playing, kept = rollout_bytes(model, lengths, settings.context, work.observation, before)
    choose_trained(model, settings)
    resident = state_bytes(P, ranks, dtype, numbers(trained(model)), settings.lora > 0)
    gradients, sampler = resident.pop("gradients"), resident["sampler"]
    if before:
        resident["reference"] = 4 * P / ranks
        gradients *= 1.5
    with mock.patch.object(logprobs, "CHUNK_LOGITS", 2**62 if before else logprobs.CHUNK_LOGITS):
        judged = 0 if before else work.judged * 8 // (settings.tasks * settings.group_size)
        samples = [sample for _ in range(judged) for sample in with_answers(episode(work.turns, work), work)]
        training = update_bytes(model, samples + [episode(work.turns, work) for _ in range(8 - judged)],
                                update.Objective(microbatch_tokens=settings.microbatch_tokens))
    in_rollout, sets = sum(resident.values()), 3 if before else 2
    in_update = in_rollout + kept - sampler * before                   # the gathered weights are freed
    training += gathered_bytes(model) + gradients / sets * 2
    return {"rollout": in_rollout + playing, "update": in_update + training, "step": in_update + gradients}


def seconds(name, ranks, settings, work, machine):
    """{stage: seconds} of an iteration: decoding by the bytes it reads, everything else by its FLOPs.

    A pass through the model takes 2 per parameter and token. An update has four: forward, its repetition, and
    the gradients of activations and of weights; with settings.lora, the last is left out.
    """
    model = meta_model(shape(name), torch.bfloat16)
    P, config_ = numbers(model.parameters()), model.config
    episodes = settings.tasks * settings.group_size / ranks
    tokens = episodes * work.turns * (work.observation + work.response)
    kv_bytes = 4 * config_.num_hidden_layers * config_.num_key_value_heads * config_.head_dim    # per token
    cached = kv_bytes * episodes * work.turns * (work.observation + work.response) / 2
    judged = work.judged / ranks
    question = work.turns / 2 * (work.observation + work.response)
    steps = {"rollout": work.turns * work.response, "judge": work.response}
    read = {"rollout": 2 * P + cached, "judge": 2 * P + kv_bytes * judged * work.answers * question}
    trained_tokens = tokens + judged * (work.question + work.answers * work.response)
    flops = {"rollout": 2 * P * tokens, "judge": 2 * P * judged * question,
             "score": 2 * P * tokens * (1 + (settings.kl != "none")),
             "update": (6 if settings.lora else 8) * P * trained_tokens}
    return {stage: steps.get(stage, 0) * read.get(stage, 0) / machine.bandwidth + flops[stage] / machine.flops
            for stage in flops}


def table(work, machine):
    """The content of OUT: for each model size and number of GPUs, bytes by stage and seconds."""
    settings = config.parsed(["--preset", "paper", "--evaluate", "none"])
    rows = []
    for name, ranks, rank in (("1.5B", 1, 0), ("1.5B", 8, 0), ("7B", 8, 0), ("1.5B", 1, 16), ("7B", 4, 16)):
        chosen = replace(settings, lora=rank)
        row = f"{name} on {ranks} × 80 GB" + (f", --lora {rank}" if rank else "")
        rows.append({"row": row, "now": stages(name, ranks, chosen, work),
                     "before": stages(name, ranks, settings, work, before=True),
                     "seconds": seconds(name, ranks, chosen, work, machine),
                     "seconds_without_gcd": seconds(name, ranks, chosen, replace(work, judged=0), machine)})
    return {"what": "computed on meta tensors, not measured: peak bytes a GPU and seconds an iteration",
            "command": "python -m lab.bench.memory", "commit": files.commit(), "torch": torch.__version__,
            "settings": {key: getattr(settings, key) for key in
                         ("tasks", "group_size", "context", "microbatch_tokens", "kl")},
            "work": asdict(work), "machine": asdict(machine), "rows": rows}


def on_this_cpu():
    """Peak bytes of an update of a small fp32 model: (predicted on fake tensors, measured on this CPU)."""
    shape_ = qwen.ModelConfig(2000, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True)
    samples, objective = [episode(3, Work()) for _ in range(8)], update.Objective(microbatch_tokens=6000)
    with FakeTensorMode():
        predicted = update_bytes(qwen.Model(shape_), samples, objective)
    model = qwen.Model(shape_)
    qwen.init_weights(model, 0)
    update_bytes(model, samples[:1], objective)                         # loads libraries at first use
    Path("/proc/self/clear_refs").write_text("5")                       # resets the high-water mark
    before = status("VmRSS")
    update_bytes(model, samples, objective)
    return predicted, status("VmHWM") - before


def status(name):
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def main():
    parser = argparse.ArgumentParser("python -m lab.bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="compare the count with this process (Linux; set "
                        "MALLOC_MMAP_THRESHOLD_=65536, or the allocator keeps freed memory)")
    if parser.parse_args().cpu:
        predicted, measured = on_this_cpu()
        print(f"predicted {predicted / 1e6:.0f} MB, measured {measured / 1e6:.0f}")
        return
    found = table(Work(), Machine())
    files.write_json(OUT, found)
    for row in found["rows"]:
        print(row["row"], {stage: f"{size / GB:.1f} GB, was {row['before'][stage] / GB:.1f}"
                           for stage, size in row["now"].items()},
              {stage: f"{s:.1f} s" for stage, s in row["seconds"].items()},
              f"without GCD {sum(row['seconds_without_gcd'].values()):.1f} s")


if __name__ == "__main__":
    main()
