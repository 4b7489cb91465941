"""Episodes to training samples, and samples to microbatches of tensors.

A `Sample` is a token sequence with the advantage and the old logprob of each sampled token. An append-only
episode is one sample; each of its judge answers is another. Samples of a microbatch are one sequence, in
which a prefix that some have in common is computed once (`PrefixTree`). Left out: the loss (update.py).
Shapes: M tokens of a microbatch, N sampled ones.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from infra import parallel
from lm.attention import Masked, Packed, upload, varlen


@dataclass(slots=True)
class Sample:
    """One token sequence with per-token training targets."""

    ids: list[int]
    sampled: list[bool]                   # False: prompt and observations, which carry no loss
    advantage: list[float]                # 0 where not sampled
    logprob_old: list[float] | None       # nats, 0 where not sampled; None: on-policy (ratio 1)
    episode: int                          # by which minibatches are cut: the episode's index or, of judge
                                          # demonstrations and value-head samples, the number of the pair
    kind: str = "policy"                  # or "judge", which has its own denominator and weight
    count: int = 1                        # multiplicity: equal judge answers are stored once
    logprob_ref: list[float] | None = None
    logprob_sampler: list[float] | None = None      # where it is not logprob_old: see `update.rescore`
    label: float | None = None            # value-head judge only: 1 good, 0 bad
    weight: float = 1.0                   # per-token loss weight, set by `update.write_token_weights`
    turns: list = field(default_factory=list)       # the rollout.Turns it consists of, or is a question about
    allowed: dict = field(default_factory=dict)     # {position: ids it was sampled from}; absent: all ids


def sample_of(prompt, response, advantage=0.0, episode=0, logprob=None, **more):
    """A Sample of one response to one prompt. logprob: the old ones of the response's tokens, if there are
    any. more: other fields of the sample.
    """
    n, m = len(prompt), len(response)
    return Sample([*prompt, *response], [False] * n + [True] * m, [0.0] * n + [advantage] * m,
                  None if logprob is None else [0.0] * n + logprob, episode, **more)


def samples_of(episode, make=Sample):
    """Convert an episode's turns to samples that carry the turns' (or their tokens') advantages.

    A turn whose prompt extends the previous prompt and response joins that sample, by token ids: an
    append-only conversation becomes one sample, one with --history a sample per turn once exchanges are
    left out. make: Sample or a subclass.
    """
    samples = []
    for turn in episode.turns:
        if not samples or turn.prompt_ids[:len(samples[-1].ids)] != samples[-1].ids:
            samples.append(make([], [], [], [], episode.index))
        last = samples[-1]
        context, n = turn.prompt_ids[len(last.ids):], len(turn.response_ids)
        first = len(last.ids) + len(context)
        last.allowed |= {t: ids for t, ids in enumerate(turn.allowed, first) if ids}
        last.ids += context + turn.response_ids
        last.sampled += [False] * len(context) + [True] * n
        last.advantage += [0.0] * len(context) + (turn.token_advantage or [turn.advantage] * n)
        last.logprob_old += [0.0] * len(context) + turn.logprob_old
        last.turns.append(turn)
    return samples


def minibatches(samples, n):
    """Split samples by episode index into n lists, one per optimizer step; each group is spread over them."""
    return [[sample for sample in samples if sample.episode % n == i] for i in range(n)]


def common_prefix_len(a, b):
    """Length of the longest common prefix of two lists, by bisection over slice comparisons."""
    known, end = 0, min(len(a), len(b))
    while known < end:
        middle = (known + end + 1) // 2
        known, end = (middle, end) if a[known:middle] == b[known:middle] else (known, middle - 1)
    return known


def microbatches(samples, max_tokens):
    """Split samples, sorted by their ids, into lists of at most max_tokens tokens.

    A prefix that samples of a list have in common counts once (`PrefixTree`); the copies of its keys that
    attention makes are not counted. Dynamic programming finds the cuts of least cost: tokens and, for each
    list's own forward and backward, max_tokens // 16 (ours). A sample longer than max_tokens raises it to its
    length.
    """
    samples = sorted(samples, key=lambda sample: sample.ids)
    ids = [sample.ids for sample in samples]
    max_tokens = max(max_tokens, *map(len, ids), 0)
    # common[j]: tokens that sample j has in common with the one before; computed again where a list starts
    # upto[i]: new tokens of the first i samples, so that a list j..i-1 has upto[i] - upto[j] + common[j]
    # best[i]: (cost of cutting the first i samples, beyond upto[i]; start of their last list)
    common = [0, *map(common_prefix_len, ids, ids[1:])]
    upto = [*itertools.accumulate((len(x) - n for x, n in zip(ids, common)), initial=0)]
    best = [(0, 0)]
    for i in range(1, len(ids) + 1):
        fit = itertools.takewhile(lambda j: upto[i] - upto[j] + common[j] <= max_tokens, range(i - 1, -1, -1))
        best.append(min((best[j][0] + common[j] + max_tokens // 16, j) for j in fit))
    batches, end = [], len(ids)
    while end:
        start = best[end][1]
        batches.insert(0, samples[start:end])
        end = start
    return batches


def equal_microbatches(samples, max_tokens):
    """`microbatches`, and empty lists up to the largest number on any rank: FSDP needs equal forwards."""
    return pad_to_all_ranks(microbatches(samples, max_tokens))


def pad_to_all_ranks(batches):
    """Append empty lists up to the largest number of batches on any rank."""
    return batches + [[]] * (parallel.all_max(len(batches)) - len(batches))


class PrefixTree:
    """Samples as one sequence of tokens, in which a prefix that some have in common is computed once.

    ids: the sequence. columns: for each sample, those of its tokens. parts: see lm.attention.Packed.
    Sorted by their ids, no sample has more in common with an earlier one than with the one before.
    """

    def __init__(self, samples):
        self.ids, self.parts, self.columns = [], [], [None] * len(samples)
        last_ids, columns = [], []
        for i in sorted(range(len(samples)), key=lambda i: samples[i].ids):
            prefix = columns[:common_prefix_len(last_ids, samples[i].ids)]
            last_ids, new = samples[i].ids, samples[i].ids[len(prefix):]
            self.columns[i] = columns = [*prefix, *range(len(self.ids), len(self.ids) + len(new))]
            self.ids += new
            self.parts += [(len(new), prefix)] if new else []


def layout(samples, model):
    """Lay a microbatch out for a forward pass.

    Returns ids_1M, its attention layout (of lm.attention), and for each sample the columns of its tokens.
    """
    device, tree = device_of(model), PrefixTree(samples)
    kernels = varlen(device, model.compute_dtype, model.config.head_dim)
    attention = Packed(tree.parts, device, kernels) if kernels else Masked(tree.parts, device)
    return upload(device, tree.ids)[0][None], attention, tree.columns


class Microbatch(NamedTuple):
    """A microbatch as tensors; those that end in _N have a number for each sampled token.

    ids_1M, attention: a sequence, and its layout (of lm.attention). column_N: the positions that predict the
    sampled tokens target_N. old_N, reference_N, sampler_N: logprobs; None if unknown. allowed: for each
    sampled token the ids it was sampled from (None: all); None if none is restricted.
    """

    ids_1M: torch.Tensor
    attention: object
    column_N: torch.Tensor
    target_N: torch.Tensor
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    old_N: torch.Tensor | None
    reference_N: torch.Tensor | None
    sampler_N: torch.Tensor | None
    allowed: list | None


def collate(samples, model):
    """The Microbatch of these samples. Masks come from what was recorded, never from token ids; position
    t - 1 predicts token t.
    """
    ids_1M, attention, columns_of = layout(samples, model)
    device = ids_1M.device
    sampled = [[*itertools.compress(range(len(s.ids)), s.sampled)] for s in samples]
    assert all(where[0] > 0 for where in sampled if where), (
        "a sample's first token cannot be sampled: nothing predicts it")

    def tensor_of(name):
        lists = [getattr(sample, name) for sample in samples]
        known = sum(numbers is not None for numbers in lists)
        assert known in (0, len(samples)) or name == "logprob_ref", (     # judge samples have no KL
            f"{name} is known for some samples of a microbatch only")
        lists = [numbers or [math.nan] * len(sample.ids) for sample, numbers in zip(samples, lists)]
        return upload(device, at_sampled(lists))[0] if known else None

    def at_sampled(lists):
        return [numbers[t] for numbers, where in zip(lists, sampled) for t in where]

    before = [columns[t - 1] for columns, where in zip(columns_of, sampled) for t in where]
    column_N, target_N = upload(device, before, at_sampled([sample.ids for sample in samples]))
    weight_N = upload(device, [s.weight for s, where in zip(samples, sampled) for _ in where])[0]
    restricted = any(sample.allowed for sample in samples)
    allowed = [s.allowed.get(t) for s, where in zip(samples, sampled) for t in where] if restricted else None
    return Microbatch(ids_1M, attention, column_N, target_N, tensor_of("advantage"), weight_N,
                      tensor_of("logprob_old"), tensor_of("logprob_ref"), tensor_of("logprob_sampler"),
                      allowed)


def sequences(samples, unit):
    """Return sequence_N: the number of the turn, or (unit "episode") of the sample, of each sampled token.

    A turn is an unbroken run of sampled tokens; a judge's answer is one run, in a sample of its own.
    """
    numbers, n = [], -1
    for sample in samples:
        n += unit == "episode"
        for before, here in zip([False, *sample.sampled], sample.sampled):
            n += unit == "turn" and here and not before
            numbers += [n] if here else []
    return torch.tensor(numbers, dtype=torch.long)


def device_of(model):
    """The device of a model's parameters."""
    return next(model.parameters()).device
