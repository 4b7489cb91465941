"""Episodes to training samples, and samples to microbatches of tensors.

A `Sample` is a token sequence with the advantage and the old logprob of each sampled token. An append-only
episode is one sample; each of its judge answers is another. A prefix that samples share is computed once
(`shared_rows`). Left out: the loss (update.py).
Shapes: B rows of a microbatch, T positions, N sampled tokens (flat over the microbatch).
"""

import itertools
import math
from dataclasses import dataclass, field

import torch

from infra import parallel
from lm.attention import Packed, Rows, varlen
from lm.engine import bucket

# FLOPs of padding for which a microbatch is split on a CPU, about .1 s of a core: a model of one million
# parameters never is, one of a hundred million at some fifty tokens
PADDING = 1e10


@dataclass(slots=True)
class Sample:
    """One token sequence with per-token training targets."""

    ids: list[int]
    sampled: list[bool]                   # False: prompt and observations, which carry no loss
    advantage: list[float]                # 0 where not sampled
    logprob_old: list[float] | None       # nats, 0 where not sampled; None: on-policy (ratio 1)
    episode: int                          # its index: minibatches, ranks and reductions go by it; of judge
                                          # demonstrations and value-head samples the index of their pair
    kind: str = "policy"                  # or "judge", which has its own denominator and weight
    count: int = 1                        # multiplicity: equal judge answers are stored once
    logprob_ref: list[float] | None = None
    logprob_sampler: list[float] | None = None      # where it is not logprob_old: see `update.rescore`
    label: float | None = None            # value-head judge only: 1 good, 0 bad
    weight: float = 1.0                   # per-token loss weight, set by `update.weighted_kinds`
    turns: list = field(default_factory=list)       # the rollout.Turns it consists of, or is a question about
    allowed: dict = field(default_factory=dict)     # {position: ids it was sampled from}; absent: all ids


def samples_of(episode, make=Sample):
    """Convert an episode's turns to samples that carry the turns' (or their tokens') advantages.

    A turn whose prompt extends the previous prompt and response joins that sample, by token ids: an
    append-only conversation becomes one sample, a re-rendered one a sample per turn. make: Sample or a
    subclass.
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
    """Split samples by episode index into n lists, one optimizer step each; each group is spread over
    them.
    """
    return [[sample for sample in samples if sample.episode % n == i] for i in range(n)]


class SharedRow:
    """Samples laid out in one row of tokens, with common prefixes stored and computed once.

    ids: the row's token ids. columns: for each sample, the columns of its tokens. parts: see
    lm.attention.Rows.
    """

    def __init__(self, samples):
        self.samples, self.ids, self.columns, self.parts = samples, [], [], []
        for sample in samples:
            shared = [columns[:common_prefix_len(sample.ids, other.ids)]
                      for other, columns in zip(samples, self.columns)]
            prefix = max(shared, key=len, default=[])
            new = range(len(self.ids), len(self.ids) + len(sample.ids) - len(prefix))
            self.columns.append([*prefix, *new])
            self.ids = self.ids + sample.ids[len(prefix):]
            self.parts += [(len(new), prefix)] if new else []


def common_prefix_len(a, b):
    """Length of the longest common prefix of two lists, by bisection over slice comparisons."""
    known, end = 0, min(len(a), len(b))
    while known < end:
        middle = (known + end + 1) // 2
        known, end = (middle, end) if a[known:middle] == b[known:middle] else (known, middle - 1)
    return known


def shared_rows(samples):
    """Group samples into rows that run common tokens once, shortest first.

    Together are samples that have a turn in common, an episode and its judge answers, and samples with the
    same tokens before the first sampled one, as a group's: as many as have no more tokens after that prompt
    than in it, so that a row costs less than its samples apart.
    """
    groups, group_of_turn, with_room = [], {}, {}
    for sample in samples:
        group = next((group_of_turn[id(turn)] for turn in sample.turns if id(turn) in group_of_turn), None)
        if group is None:
            n = sample.sampled.index(True) if any(sample.sampled) else 0
            prompt, rest = tuple(sample.ids[:n]), len(sample.ids) - n
            group, room = with_room.get(prompt, (None, 0))
            if rest > room:
                groups.append(group := [])
                room = n
            with_room[prompt] = group, room - rest
        group.append(sample)
        group_of_turn |= {id(turn): group for turn in sample.turns}
    return sorted(map(SharedRow, groups), key=lambda row: len(row.ids))


def microbatches(samples, max_tokens, packed=False, max_padding=math.inf):
    """Split samples by length into lists of at most max_tokens tokens, never cutting a row.

    Where rows are padded (not `packed`), padding counts, except the rounding to a multiple of 16; a list has
    at most max_padding tokens of it.
    """
    batches, filled = [], 0
    for row in shared_rows(samples):
        n = len(row.ids)
        filled += n
        tokens = filled if packed else n * (len(batches[-1]) + 1) if batches else n
        if not batches or tokens > max_tokens or tokens - filled > max_padding:
            batches.append([])
            filled = n
        batches[-1].append(row)
    return [[sample for row in batch for sample in row.samples] for batch in batches]


def equal_microbatches(model, samples, max_tokens):
    """`microbatches`, filled up with empty lists to the largest number on any rank: FSDP needs equal
    forwards.
    """
    on_cpu = device_of(model).type == "cpu"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return pad_to_all_ranks(microbatches(samples, max_tokens, packed_attention(model),
                                         PADDING / (2 * parameters) if on_cpu else math.inf))


def pad_to_all_ranks(batches):
    """Append empty lists up to the largest number of batches on any rank."""
    return batches + [[]] * (int(parallel.all_max(len(batches))) - len(batches))


def packed_attention(model):
    """The variable-length attention for packed rows on this device; None: rows are padded instead."""
    return varlen(device_of(model), model.compute_dtype, model.config.head_dim)


def layout(samples, model):
    """Lay a microbatch out for a forward pass.

    Returns ids_BT, its attention layout (of lm.attention), and a function (i, t) -> (row, column) of token t
    of sample i.
    """
    device, attention, rows = device_of(model), packed_attention(model), shared_rows(samples)
    starts = itertools.accumulate([len(row.ids) for row in rows], initial=0)       # of each row, where packed
    where = {id(sample): (0, start, columns) if attention else (b, 0, columns)
             for b, (row, start) in enumerate(zip(rows, starts))
             for sample, columns in zip(row.samples, row.columns)}

    def position(i, t):
        b, start, columns = where[id(samples[i])]
        return b, start + columns[t]

    parts = [row.parts for row in rows]
    if attention:
        ids_1T = torch.tensor([[token for row in rows for token in row.ids]], device=device)
        return ids_1T, Packed(parts, device, attention), position
    longest = bucket(max(len(row.ids) for row in rows), 16)
    ids_BT = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows], device=device)
    return ids_BT, Rows(longest, device, parts), position


def collate(samples, model):
    """A microbatch as tensors.

    Returns ids_BT, its attention layout, (row_N, column_N) of the positions that predict the sampled tokens,
    target_N, advantage_N, weight_N, logprob_old_N, logprob_ref_N and logprob_sampler_N (each or None), and
    allowed: per sampled token the ids it was sampled from (None: all), or None if none is restricted.

    Masks come from what was recorded, never from token ids. Position t - 1 predicts token t.
    """
    ids_BT, place, position = layout(samples, model)
    device = ids_BT.device
    sampled = [[*itertools.compress(range(len(s.ids)), s.sampled)] for s in samples]
    assert all(where[0] > 0 for where in sampled if where), (
        "a sample's first token cannot be sampled: nothing predicts it")

    def numbers(name):
        columns = [getattr(sample, name) for sample in samples]
        known = sum(column is not None for column in columns)
        assert known in (0, len(samples)) or name == "logprob_ref", (
            f"{name} is known for some samples of a microbatch only")
        columns = [column or [math.nan] * len(sample.ids) for sample, column in zip(samples, columns)]
        return torch.tensor(at_sampled(columns), device=device) if known else None

    def at_sampled(columns):
        return [column[t] for column, where in zip(columns, sampled) for t in where]

    before = [position(i, t - 1) for i, where in enumerate(sampled) for t in where]
    target_N = torch.tensor(at_sampled([sample.ids for sample in samples]), device=device)
    weight_N = torch.tensor([s.weight for s, where in zip(samples, sampled) for _ in where], device=device)
    restricted = any(sample.allowed for sample in samples)
    allowed = [s.allowed.get(t) for s, where in zip(samples, sampled) for t in where] if restricted else None
    return (ids_BT, place, torch.tensor(before, device=device).unbind(1), target_N, numbers("advantage"),
            weight_N, numbers("logprob_old"), numbers("logprob_ref"), numbers("logprob_sampler"), allowed)


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
