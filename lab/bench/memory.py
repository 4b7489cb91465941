"""Estimates of a run's GPU memory by stage and of its seconds per iteration, computed without a GPU.

The load is drawn from recorded episodes and played by the product's own loop and cache, without a model
(lab/bench/simulation.py). The project's code then runs on "meta" tensors, which have shapes but no data, and
the bytes of every tensor count from its creation until it is freed: throughout the rollout with its largest
prefills and decode steps, in the judge's answers, and in the forward and backward pass of the largest
microbatch. Memory that is occupied throughout (master weights, Adam's moments, gradients, the sampler) is
arithmetic; so is what is added for the allocator's slack, the CUDA context and NCCL. Seconds are a roofline
with the shares of a data sheet's peak in `Machine`. Everything is computed, not measured;
lab/bench/memory_check.py compares the count with a real process on a CPU. Left out: the host's own time,
loads other than LOADS.

    python -m lab.bench.memory            # 0.5B to 7B at --preset paper; writes lab/results/memory.json
"""

import argparse
import itertools
import random
import weakref
from dataclasses import asdict, dataclass, replace
from operator import itemgetter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import batching
import config
import judge
from infra import files
from infra.memory import state_bytes
from lab.bench.intervals import range_of
from lab.bench.simulation import Work, play, samples_of
from lab.bench.study import ROOT, parse_clean
from lm import logprobs
from lm import model as decoder
from lm.engine import TICK, Answers, Sampling, bucket
from lm.optim import trained
from models import choose_trained

GB = 1e9
OUT = ROOT / "lab" / "results" / "memory.json"
# Shapes of Qwen2.5's config.json: layers, width, heads, K/V heads, intermediate, vocabulary, tied
SHAPES = {"0.5B": (24, 896, 14, 2, 4864, 151936, True), "1.5B": (28, 1536, 12, 2, 8960, 151936, True),
          "7B": (28, 3584, 28, 4, 18944, 152064, False)}


class Meter(TorchDispatchMode):
    """Counts the bytes of tensors created while it is active: `now` (still alive) and `peak`, their most."""

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
class Machine:
    """A GPU by its data sheet, the range of the shares of it that are assumed to be reached, and times per
    layer that no data sheet has: an H200's (`by_hand` in lab/results/gpu.jsonl), as is the slow share of the
    bandwidth.
    """

    bandwidth: float = 3.35e12          # bytes per second; an H100 SXM's, as the next
    flops: float = 989e12               # per second, in bf16
    of_bandwidth: tuple = (0.40, 0.60)  # of a decode step, less step_s; a copy reaches 86 %
    of_flops: tuple = (0.20, 0.34)      # of an update; 34 % in one large microbatch
    step_s: float = 50e-6               # a layer of a decode step, whatever it reads: 23 kernels
    launch_s: float = 550e-6            # a layer of a forward that is launched kernel by kernel

    def decoding_s(self, end, layers, steps, read):
        """Seconds of decode steps that read so many bytes in all. end: of the range, 0 (slow) or 1."""
        return steps * layers * self.step_s + read / (self.bandwidth * self.of_bandwidth[end])


# By a GPU's memory: an H100 SXM, an H200, an RTX 4090 (NVIDIA's Ada whitepaper, bf16 with fp32 sums)
MACHINES = {"80 GB": Machine(), "141 GB": Machine(bandwidth=4.8e12),
            "24 GB": Machine(bandwidth=1.008e12, flops=165.2e12)}


@dataclass(frozen=True)
class Row:
    """A line of the table: a Qwen2.5 of this size on so many GPUs with this memory, at --preset paper but for
    flags. turns: of every episode; None: as recorded.
    """

    name: str
    ranks: int
    memory: str = "80 GB"
    flags: tuple = ()
    turns: int | None = None

    def __str__(self):
        turns = (f"every episode of {self.turns} turns",) if self.turns else ()
        return ", ".join((f"{self.name} on {self.ranks} × {self.memory}", *self.flags, *turns))

    @property
    def settings(self):
        """Those of gcd.py."""
        model = ["--model", f"Qwen2.5-{self.name}", "--preset", "paper"]
        return config.parse([*model, "--evaluate", "none", *" ".join(self.flags).split()])


ROWS = (Row("1.5B", 1), Row("1.5B", 1, turns=30), Row("1.5B", 4), Row("1.5B", 8), Row("7B", 8),
        Row("1.5B", 1, flags=("--lora 16",)), Row("7B", 4, flags=("--lora 16",)),
        Row("0.5B", 1, "24 GB", ("--slots 64",)), Row("1.5B", 1, "24 GB", ("--lora 16", "--slots 32")),
        Row("1.5B", 1, "141 GB"), Row("1.5B", 1, "141 GB", ("--checkpoint-activations off",)))
# The loads between which a run's lies: responses as long as demonstrated ones, and of an untrained thinker
LOADS = {"32 tokens a response": Work(response=32.0), "150 tokens a response": Work()}
SLACK = 1.1                             # torch's allocator keeps more than is allocated
OUTSIDE = 2e9                           # bytes of the CUDA context and of NCCL's buffers


def shape(name):
    """The ModelConfig of the Qwen2.5 model of this size, a key of SHAPES."""
    layers, width, heads, kv_heads, inner, vocabulary, tied = SHAPES[name]
    return decoder.ModelConfig(vocabulary, width, inner, layers, heads, kv_heads, width // heads, 1e6,
                               tie_word_embeddings=tied)


def meta_model(model_config, dtype):
    """A model on the "meta" device: parameters without data."""
    with torch.device("meta"):
        return decoder.Model(model_config).to(dtype)


def rollout_bytes(model, settings, ranks, work, seed=0):
    """Peak bytes of a simulated rollout in addition to the weights; the bytes of cache and CUDA graphs, which
    stay allocated afterwards; the episodes; the slots.
    """
    with Meter() as meter, torch.no_grad():
        episodes, slots = play(model, settings, ranks, work, seed, runs=True)
    with Meter() as graph, torch.no_grad():
        slots.step(slice(0, slots.n), settings.context if slots.varlen else slots.cache.room)
    graphs = graph.peak if slots.varlen else 0           # their memory is not shared with other work
    return meter.peak + graphs, sum(kv.nbytes for kv in slots.cache.kv) + graphs, episodes, slots


def judge_bytes(model, settings, prompts, answers):
    """Peak bytes of answering the longest of these prompts, as many as are answered at once."""
    per_batch = min(prompts_at_once(settings, answers), len(prompts))
    prompts = sorted(prompts, key=len)[-per_batch:]
    sampling = Sampling(1.0, settings.judge_response_tokens)
    with Meter() as meter, torch.no_grad():
        slots = Answers(model, per_batch, answers, (), sampling)
        slots.restart(slots.context, sampling)
        slots.begin(range(slots.n), [prompt for prompt in prompts for _ in range(answers)], [0] * slots.n)
        slots.step(slice(0, slots.n), slots.context)
    return meter.peak


def cached_bytes(config, dtype):
    """Bytes of one token's keys and values, over all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize


def prompts_at_once(settings, answers):
    """How many prompts, with so many answers each, are answered at once."""
    return max(1, judge.ANSWERS_PER_SLOT * settings.slots // answers)


def largest_microbatch(samples, settings):
    """The microbatch with the most tokens, of all minibatches of these samples; and each minibatch's tokens.
    """
    parts = [[(len(batching.PrefixTree(batch).ids), batch)
              for batch in batching.microbatches(part, settings.microbatch_tokens)]
             for part in batching.minibatches(samples, settings.minibatches)]
    _, largest = max(itertools.chain(*parts), key=itemgetter(0))
    return largest, [sum(tokens for tokens, _ in part) for part in parts]


def update_bytes(model, batch):
    """Peak bytes of a microbatch's forward and backward, without weights and gradients; the entropy has a
    gradient, as with --preset paper.
    """
    for parameter in trained(model):                     # FSDP reduces a layer's gradients at once
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Meter() as meter:
        micro = batching.collate(batch, model)
        logprob_N, entropy_N = logprobs.token_logprobs(model, micro, 1.0, entropies=True, entropy_grad=True)
        gain_N = micro.advantage_N * (logprob_N - micro.old_N).exp() + entropy_N
        (micro.weight_N * gain_N).sum().backward()
    return meter.peak


def gathered_bytes(model):
    """Bytes that FSDP holds unsharded at once, in bf16: embedding and head, and two layers, the gradients of
    one of them before and after their cast to fp32.
    """
    def of_root_and_layer(parameters):
        layer = numbers(parameters(model.model.layers[0]))
        return numbers(parameters(model)) - layer * len(model.model.layers), layer

    root, layer = of_root_and_layer(decoder.Model.parameters)
    return 2 * root + 2 * 2 * layer + 6 * max(of_root_and_layer(trained))


def numbers(parameters):
    """How many numbers these parameters hold."""
    return sum(parameter.numel() for parameter in parameters)


@dataclass(frozen=True)
class Load:
    """What an iteration plays, judges and trains on, whichever parameters are trained: bytes and microbatch
    of the rank that holds most tokens, counts the largest over the ranks.
    """

    rollout: int              # peak bytes of the rollout, in addition to the weights
    kept: int                 # bytes that stay allocated after it
    judge: int                # peak bytes of the judge, in addition to those
    equal_rooms: int          # bytes more in the rollout if every row had the longest row's room
    copies: int               # bytes more in the judge if each answer had a copy of its prompt's cache
    microbatch: list          # the largest, as Samples
    counts: dict              # of what takes time
    tokens: dict              # quantiles of an episode's


def load_of(model, ranks, settings, work):
    """The Load of an iteration of a bf16 model on "meta". settings.lora is not read."""
    rolled = rollout_bytes(model, settings, ranks, work) if ranks == 1 else None
    played = [rolled[2:]] if rolled else [play(model, settings, ranks, work, seed) for seed in range(ranks)]
    fullest = max(range(ranks), key=lambda rank: played[rank][1].usage[0])
    playing, kept, _, slots = rolled or rollout_bytes(model, settings, ranks, work, fullest)
    share, longest = replace(work, judged=-(-work.judged // ranks)), settings.judge_response_tokens
    of_ranks = [samples_of(episodes, share, random.Random(rank), longest)
                for rank, (episodes, _) in enumerate(played)]
    questions = questions_of(of_ranks[fullest])
    judging = judge_bytes(model, settings, questions, work.answers) if questions else 0
    microbatches = [largest_microbatch(samples, settings) for samples in of_ranks]
    batch, _ = microbatches[fullest]
    equal = slots.n * bucket(max(len(turn.prompt_ids) for episode in played[fullest][0]
                                 for turn in episode.turns) + settings.max_response_tokens, 1024)
    of_token = cached_bytes(model.config, torch.bfloat16)
    more, copies = (equal - slots.cache.positions) * of_token, (work.answers - 1) * of_token * sum(
        sorted(map(len, questions))[-prompts_at_once(settings, work.answers):])
    found = [counts_of(samples, slots_, work, settings)
             for samples, (_, slots_) in zip(of_ranks, played)]
    counts = {name: max(counts[name] for counts in found) for name in found[0]} | {
        # in each optimizer step the ranks wait for the one with most tokens
        "trained tokens": sum(map(max, zip(*(tokens for _, tokens in microbatches))))}
    return Load(playing, kept, judging, more, copies, batch, counts, quantiles(
        [len(sample.ids) for samples in of_ranks for sample in samples if sample.kind == "policy"]))


def stages(model, ranks, settings, work):
    """{"bytes": by stage, "counts": of what takes time, "tokens": quantiles of an episode's} of an iteration
    of a bf16 model on "meta": each the largest over the ranks, bytes of the rank that holds most tokens.

    Stages are rollout, judge, update (the largest microbatch) and step; "rollout, equal rooms" is the rollout
    if every row had the longest row's room, "judge, a copy each" the judge if each answer had a copy of its
    prompt's keys and values. With settings.lora, only adapters of that rank are trained.
    """
    load = load_of(model, ranks, settings, work)
    adapted = meta_model(model.config, torch.bfloat16)
    adapted.compute_dtype = torch.bfloat16
    adapted.recompute_layers(settings.checkpoint_activations != "off")
    choose_trained(adapted, settings)
    resident = state_bytes(numbers(model.parameters()), ranks, torch.bfloat16, numbers(trained(adapted)),
                           settings.lora > 0, compared=settings.compares_gradients)
    gradients = resident.pop("gradients")
    training = update_bytes(adapted, load.microbatch) + gathered_bytes(adapted) + gradients
    sizes = {"rollout": load.rollout, "judge": load.kept + load.judge, "update": load.kept + training,
             "step": load.kept + gradients, "rollout, equal rooms": load.rollout + load.equal_rooms,
             "judge, a copy each": load.kept + load.judge + load.copies}
    return {"bytes": {stage: SLACK * (sum(resident.values()) + size) + OUTSIDE
                      for stage, size in sizes.items()},
            "counts": load.counts, "tokens": load.tokens}


def questions_of(samples):
    """The prompts of the judge's samples, once each."""
    return [*{(sample.episode, n): sample.ids[:n] for sample in samples if sample.kind == "judge"
              for n in [len(sample.ids) - sum(sample.sampled)]}.values()]


def counts_of(samples, slots, work, settings):
    """What takes time in a rank's iteration, but for training: steps, and tokens by kind."""
    lengths = [len(sample.ids) for sample in samples if sample.kind == "policy"]
    answers = [sum(sample.sampled) for sample in samples if sample.kind == "judge"]
    questions = [*map(len, questions_of(samples))]
    at_once = prompts_at_once(settings, work.answers)
    of_batches = [min(bucket(max(answers[a:a + at_once * work.answers]) - 1, TICK),    # `begin` draws, too
                      settings.judge_response_tokens - 1)
                  for a in range(0, len(answers), at_once * work.answers)]
    read = [steps * sum(questions[i * at_once:(i + 1) * at_once]) for i, steps in enumerate(of_batches)]
    return {"decode steps": slots.steps, "keys read": slots.read, "prefilled": slots.prefilled,
            "prefills": slots.prefills,
            "policy tokens": sum(lengths), "pairs": sum(n * n for n in lengths) // 2,
            "scored tokens": sum(sum(sample.sampled) for sample in samples),
            "questions": sum(questions), "judge steps": sum(of_batches),
            "judge keys read": sum(read) + sum(n * (n - 1) // 2 for n in answers)}


def multiplied_weights(model):
    """How many weights a token is multiplied with: of the layers, and of lm_head. The embedding is not."""
    layers, norm = model.model.layers, model.model.norm
    return numbers(layers.parameters()) + numbers(norm.parameters()), model.lm_head.weight.numel()


def forward_flops(model, tokens, pairs=0, scored=0):
    """FLOPs of a forward pass: 2 for each token and weight of the layers, and for each scored token and
    weight of lm_head; 4 per layer and number of the query heads for each pair of a token and one before it.
    """
    of_layers, of_head = multiplied_weights(model)
    attended = model.config.num_hidden_layers * model.config.num_attention_heads * model.config.head_dim
    return 2 * of_layers * tokens + 4 * attended * pairs + 2 * of_head * scored


def quantiles(values):
    """{"p50", "p90", "max"} of a list of numbers."""
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p90": ordered[len(ordered) * 9 // 10], "max": ordered[-1]}


def seconds(model, settings, counts, machine, end):
    """{stage: seconds} of an iteration: decoding by the bytes it reads, everything else by its FLOPs; in
    addition a decode step and a prefill take a time per layer.

    An update has four times a forward's FLOPs: forward, its repetition, and the gradients of activations and
    of weights; with settings.lora, the last is left out, and where layers are not recomputed, the second. The
    score is the old logprobs, which the first minibatch does not need, and the KL's. end: of the machine's
    ranges, 0 (slow) or 1.
    """
    shape_, weights = model.config, sum(multiplied_weights(model))
    layers, flops = shape_.num_hidden_layers, machine.flops * machine.of_flops[end]
    kv_bytes = cached_bytes(shape_, torch.bfloat16)                                           # per token
    policy, trained, scored = (counts[f"{name} tokens"] for name in ("policy", "trained", "scored"))
    once = forward_flops(model, policy, counts["pairs"], scored)
    all_once = forward_flops(model, trained, counts["pairs"] * trained / policy, scored)
    passes = 4 - (settings.lora > 0) - (settings.checkpoint_activations == "off")

    def decoding(steps, keys):
        return machine.decoding_s(end, layers, steps, steps * 2 * weights + kv_bytes * keys)

    return {"rollout": decoding(counts["decode steps"], counts["keys read"])
            + forward_flops(model, counts["prefilled"]) / flops
            + layers * counts["prefills"] * machine.launch_s,
            "judge": decoding(counts["judge steps"], counts["judge keys read"])
            + forward_flops(model, counts["questions"]) / flops,
            "score": (all_once * (1 - 1 / settings.minibatches) + once * (settings.kl != "none")) / flops,
            "update": passes * all_once / flops}


def estimate(name, ranks, settings, work, machine):
    """`stages`, and the range of `seconds`, of the Qwen2.5 model of this name."""
    model = meta_model(shape(name), torch.bfloat16)
    found = stages(model, ranks, settings, work)
    return found | {"seconds": {stage: [slow, fast] for (stage, slow), fast in zip(
        seconds(model, settings, found["counts"], machine, 0).items(),
        seconds(model, settings, found["counts"], machine, 1).values())}}


def table(commit, rows=ROWS):
    """The content of OUT: for each row and load an `estimate`."""
    settings, result = Row("1.5B", 1).settings, []
    for row in rows:
        loads = {load: estimate(row.name, row.ranks, row.settings, replace(work, turns=row.turns),
                                MACHINES[row.memory]) for load, work in LOADS.items()}
        result.append({"row": str(row), "loads": loads})
    return {"what": "computed on meta tensors, not measured: peak bytes a GPU and seconds an iteration",
            "command": "python -m lab.bench.memory", "commit": commit, "torch": torch.__version__,
            "settings": {key: getattr(settings, key) for key in
                         ("tasks", "group_size", "context", "microbatch_tokens", "minibatches", "kl")},
            "works": {load: asdict(work) for load, work in LOADS.items()},
            "machines": {memory: asdict(machine) for memory, machine in MACHINES.items()},
            "slack": SLACK, "outside": OUTSIDE, "rows": result}


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.bench.memory", description=__doc__.splitlines()[0])
    found = table(parse_clean(parser, argv).commit)
    files.write_json(OUT, found)
    for row in found["rows"]:
        for load, one in row["loads"].items():
            print(f"{row['row']}, {load}: " + ", ".join(f"{stage} {size / GB:.1f} GB"
                                                         for stage, size in one["bytes"].items()),
                  f"{one['counts']['decode steps']} decode steps;",
                  ", ".join(f"{stage} {range_of(ends)} s" for stage, ends in one["seconds"].items()),
                  f"episodes {one['tokens']}")


if __name__ == "__main__":
    main()
