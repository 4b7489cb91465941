"""How much memory a run would take on GPUs that are not there, stage by stage, and how long an iteration.

The code itself is run on "meta" tensors, which have shapes and no numbers, and the bytes of every tensor are
counted from when it is made until nobody holds it: the rollout's largest prefill and one decoding step, one
microbatch of the update, forward and backward. What lies there all along (master weights, Adam's moments,
gradients, the sampler, a reference) is arithmetic, and so are the seconds: a roofline with the shares of a
machine's peaks named in `Machine`. So all of it is computed, not measured; on a CPU the same count is held
against a real process in tests/test_meter.py. Left out: fragmentation, NCCL's buffers, the CUDA context.

    python -m bench.memory            # 1.5B and 7B at --preset paper: results/memory.json
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

import config
import update
from bench.study import ROOT
from lm import model as qwen
from lm.engine import Sampling, Slots
from run import files
from run.memory import state_bytes

GB = 1e9
OUT = ROOT / "results" / "memory.json"
# Shapes of Qwen2.5's config.json: layers, width, heads, K/V heads, intermediate, vocabulary, tied
SHAPES = {"1.5B": (28, 1536, 12, 2, 8960, 151936, True), "7B": (28, 3584, 28, 4, 18944, 152064, False)}


class Meter(TorchDispatchMode):
    """Bytes of the tensors made inside it, while they live: `now`, and `peak`, the most at once."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            self.see(tensor, 0)                           # made before: a view of it is nothing new
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            self.see(tensor, 1)
        return out

    def see(self, tensor, counts):
        """Count a tensor's storage, once, until it is gone."""
        if isinstance(tensor, torch.Tensor) and id(storage := tensor.untyped_storage()) not in self.known:
            self.known[id(storage)] = size = counts * storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, id(storage))

    def gone(self, name):
        self.now -= self.known.pop(name)


@dataclass(frozen=True)
class Work:
    """An iteration's load: an episode of ALFWorld in the paper's prompts (a guess: nothing has been run); the
    longest decides how far the cache grows."""

    turns: int = 15
    most_turns: int = 30
    observation: int = 100              # tokens a turn that the environment and the chat bring
    response: int = 150
    judged: int = 32                    # turns, each with different answers
    question: int = 52                  # tokens, and so many answers of `response` tokens
    answers: int = 8


@dataclass(frozen=True)
class Machine:
    """An H100 SXM: its peaks, and the shares of them that a roofline may count on."""

    bandwidth: float = 3.35e12 * 0.6
    flops: float = 989e12 * 0.45
    memory_gb: float = 80.0


def shape(name):
    """A ModelConfig of a Qwen2.5 of this size."""
    layers, width, heads, kv_heads, inner, vocabulary, tied = SHAPES[name]
    return qwen.ModelConfig(vocabulary, width, inner, layers, heads, kv_heads, width // heads, 1e6,
                            tie_word_embeddings=tied)


def on_meta(model_config, dtype):
    """A model without numbers."""
    with torch.device("meta"):
        return qwen.Model(model_config).to(dtype)


def rollout_bytes(model, slots, context, longest, chunk):
    """Bytes of the largest moment of a rollout: the cache, and a prefill or a step beside it.

    slots rows hold `longest` tokens each, of which the last `chunk` are new. context: the most that a row may
    come to.
    """
    with Meter() as meter, torch.no_grad():
        held = Slots(model, slots, context, (0,), Sampling(1.0, 512))
        for length in range(chunk, longest, chunk):         # as it grows turn by turn
            held.reserve(length + 512)
        held.held = [[0] * (longest - chunk) for _ in range(slots)]
        held.begin(range(slots), [[0] * longest] * slots, range(slots))
        held.step(slice(0, slots), held.cache.length)
    return meter.peak


def update_bytes(model, samples, objective):
    """Bytes of the last microbatch's forward and backward beside weights and gradients."""
    for parameter in model.parameters():                 # FSDP reduces a layer's as soon as they are made
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    batch = update.microbatches(samples, objective.microbatch_tokens, update.packing(model))[-1]
    with Meter() as meter:
        *where, target_N, advantage_N, weight_N, old_N, _, allowed = update.collate(batch, model)
        logprob_N, _ = update.token_logprobs(model, *where, target_N, 1.0, allowed, entropies=True)
        (weight_N * advantage_N * (logprob_N - old_N).exp()).sum().backward()
    return meter.peak


def episode(turns, work):
    """A Sample of an episode of so many turns."""
    sampled = ([False] * work.observation + [True] * work.response) * turns
    numbers = [float(x) for x in sampled]
    return update.Sample([0] * len(sampled), sampled, numbers, numbers, 0)


def judged(sample, work):
    """A Sample, and those of the answers to a question about its middle."""
    n, sample.turns = len(sample.ids) // 2 + work.question, [object()]
    sampled = [False] * n + [True] * work.response
    numbers = [float(x) for x in sampled]
    return [sample, *(update.Sample([0] * (n - work.question) + [1] * work.question + [2 + i] * work.response,
                                    sampled, numbers, numbers, 0, "judge", turns=sample.turns)
                      for i in range(work.answers))]


def layers_whole(model):
    """Bytes of what FSDP has whole at once in bf16: embedding and head, and two layers, with one's gradients
    before and after their cast to fp32."""
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - layer * len(model.model.layers)
    return 2 * root + 2 * 2 * layer + 6 * max(layer, root)


def stages(name, ranks, settings, work, before=False):
    """{stage: bytes a GPU} of a run of Qwen2.5 of this size at these settings, in bf16.

    before: the engine of 2026-11-20, which reserved slots x context, sampled with FSDP's gathered weights and
    an fp32 reference, made all logits of a microbatch at once, kept all activations, and stepped on a third
    set of gradients.
    """
    model, dtype = on_meta(shape(name), torch.bfloat16), torch.bfloat16
    model.compute_dtype = dtype
    model.recompute_layers(not before)
    P, slots = sum(p.numel() for p in model.parameters()), settings.tasks * settings.group_size // ranks
    lies = state_bytes(P, ranks, dtype)
    gradients, sampler = lies.pop("gradients"), lies["sampler"]
    if before:
        lies["reference"] = 4 * P / ranks
        gradients *= 1.5
    longest = settings.context - 512 if before else work.most_turns * (work.observation + work.response)
    playing = rollout_bytes(model, slots, settings.context, longest, work.observation)
    with mock.patch.object(update, "CHUNK_LOGITS", 2**62 if before else update.CHUNK_LOGITS):
        asked = 0 if before else work.judged * 8 // (settings.tasks * settings.group_size)
        samples = [sample for _ in range(asked) for sample in judged(episode(work.turns, work), work)]
        training = update_bytes(model, samples + [episode(work.turns, work) for _ in range(8 - asked)],
                                update.Objective(microbatch_tokens=settings.microbatch_tokens))
    here, sets = sum(lies.values()), 3 if before else 2
    there = here - sampler * before                                    # what was gathered is given back
    training += layers_whole(model) + gradients / sets * 2
    return {"rollout": here + playing, "update": there + training, "step": there + gradients}


def seconds(name, ranks, settings, work, machine):
    """{stage: seconds} of an iteration: bytes that decoding reads, and FLOPs of everything else."""
    model = on_meta(shape(name), torch.bfloat16)
    P, config_ = sum(p.numel() for p in model.parameters()), model.config
    episodes = settings.tasks * settings.group_size / ranks
    tokens = episodes * work.turns * (work.observation + work.response)
    kept = 4 * config_.num_hidden_layers * config_.num_key_value_heads * config_.head_dim    # bytes a token
    held = kept * episodes * work.turns * (work.observation + work.response) / 2
    judged = work.judged / ranks
    question = work.turns / 2 * (work.observation + work.response)
    steps = {"rollout": work.turns * work.response, "judge": work.response}
    read = {"rollout": 2 * P + held, "judge": 2 * P + kept * judged * work.answers * question}
    flops = {"rollout": 2 * P * tokens, "judge": 2 * P * judged * question,
             "score": 2 * P * tokens * (1 + (settings.kl != "none")),
             "update": 8 * P * (tokens + judged * (work.question + work.answers * work.response))}
    return {stage: steps.get(stage, 0) * read.get(stage, 0) / machine.bandwidth + flops[stage] / machine.flops
            for stage in flops}


def table(work, machine):
    """The rows: size and GPUs -> bytes by stage now and before, and seconds."""
    settings = config.parsed(["--preset", "paper", "--evaluate", "none"])
    rows = []
    for name, ranks in (("1.5B", 1), ("1.5B", 8), ("7B", 8)):
        now, then = (stages(name, ranks, settings, work, before) for before in (False, True))
        rows.append({"row": f"{name} on {ranks} × 80 GB", "now": now, "before": then,
                     "seconds": seconds(name, ranks, settings, work, machine),
                     "seconds_without_gcd": seconds(name, ranks, settings, replace(work, judged=0), machine)})
    return {"what": "computed on meta tensors, not measured: peak bytes a GPU and seconds an iteration",
            "command": "python -m bench.memory", "commit": files.commit(), "torch": torch.__version__,
            "settings": {key: getattr(settings, key) for key in
                         ("tasks", "group_size", "context", "microbatch_tokens", "kl")},
            "work": asdict(work), "machine": asdict(machine), "rows": rows}


def on_this_cpu():
    """Bytes of one update of a small fp32 model: predicted of fake tensors, and this process's."""
    shape_ = qwen.ModelConfig(2000, 256, 768, 4, 4, 2, 64, tie_word_embeddings=True)
    samples, objective = [episode(3, Work()) for _ in range(8)], update.Objective(microbatch_tokens=6000)
    with FakeTensorMode():
        predicted = update_bytes(qwen.Model(shape_), samples, objective)
    model = qwen.Model(shape_)
    qwen.init_weights(model, 0)
    update_bytes(model, samples[:1], objective)                         # what is loaded at first use
    Path("/proc/self/clear_refs").write_text("5")                       # the high-water mark begins anew
    before = status("VmRSS")
    update_bytes(model, samples, objective)
    return predicted, status("VmHWM") - before


def status(name):
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def main():
    parser = argparse.ArgumentParser("python -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="hold the count against this process (Linux; with "
                        "MALLOC_MMAP_THRESHOLD_=65536, or the allocator keeps what is freed)")
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
