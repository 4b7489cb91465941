"""Samples → one optimizer step. It knows no algorithm: a sample has its sampled tokens and their advantages.

A policy episode is a sample (or several, see `samples_of`), a judge's answer is one, and so is a cold-start
demonstration (advantage 1, no old logprob: its gradient is that of cross-entropy). The objective of one step:

    L = sum_policy / N_policy + weight * sum_judge / N_judge              GCD, arXiv:2509.23870 Eq. 3

with both counts taken over all ranks, so that microbatches and ranks change nothing but the time it takes.
Left out: accumulation over steps, and any optimizer but AdamW. Shapes: B rows of a microbatch, T positions,
N sampled tokens of it, V vocabulary, S samples.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from algorithms.losses import clipped_policy_loss, entropy, kl_k1, kl_k3, token_weight
from lm.attention import Packed, Rows, varlen
from lm.engine import bucket
from lm.restrict import restricted
from run import parallel

CHUNK_LOGITS = 2**26      # at most so many are made at once: 256 MB in fp32, a few of them live in a step


@dataclass(slots=True)
class Sample:
    """One token sequence with, per token, whether it was sampled and what to make of that."""

    ids: list[int]
    sampled: list[bool]                   # False: prompt and observations, which carry no loss
    advantage: list[float]                # 0 where not sampled
    logprob_old: list[float] | None       # nats, 0 where not sampled; None = on-policy (ratio 1)
    episode: int                          # what it is a part of: reductions count episodes, not samples
    kind: str = "policy"                  # or "judge": its own denominator and weight
    count: int = 1                        # equal draws (judge answers) are one sample that counts this often
    logprob_ref: list[float] | None = None
    label: float | None = None            # of a judged turn for the value head, 1 good, 0 bad
    weight: float = 1.0                   # of each token in the loss; set by `accumulate`
    turns: list = field(default_factory=list)       # rollout.Turns that it was made of, in order
    allowed: dict = field(default_factory=dict)     # {place: the ids that its token was drawn from}; else all
    trunk: tuple | None = None            # (name, n): all of that name begin with the same n tokens, none of
                                          # them sampled, and these are run once

    @property
    def silent(self):
        """No token has an advantage: without a KL term there is nothing to compute."""
        return not any(self.advantage)


@dataclass(frozen=True, slots=True)
class Objective:
    """How samples become a loss; gcd.py sets it from its flags."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0                # bound on the loss of negative advantages; 0 = none
    reduction: str = "token"              # token | episode | constant: see losses.token_weight
    longest: int = 1                      # tokens; the divisor of "constant"
    kl_coef: float = 0.0                  # weight of k3 in the loss; needs logprob_ref
    judge_weight: float = 0.1             # lambda
    judge_grad_cap: float = 0.0           # judge gradient norm at most this times the policy's; 0 = no cap
    temperature: float = 1.0              # the sampler's: logprobs are of the distribution drawn from
    max_grad_norm: float = 1.0            # 0 = no limit
    microbatch_tokens: int = 16384        # padding included


class NonFinite(FloatingPointError):
    """A loss or gradient that is not a number; raised on every rank before the weights are touched."""


def adam(model):
    """The optimizer of a model; its learning rate is set at each step. Fused on CUDA: no temporaries."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0,
                             fused=True if device_of(model).type == "cuda" else None)


def samples_of(episode, make=Sample):
    """An episode's turns as samples, with the turns' advantages (or, where they have them, their tokens').

    A turn whose prompt extends the previous prompt and response joins its sample: an append-only conversation
    is one sample, a re-rendered one a sample per turn; the token ids decide. make: Sample or a subclass.
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
    """Samples in n lists, one optimizer step each, by episode number: whole episodes, groups spread out."""
    return [[sample for sample in samples if sample.episode % n == i] for i in range(n)]


def families(samples):
    """The samples by what they begin with: those of one trunk side by side, shortest row first."""
    found = {}
    for sample in samples:
        found.setdefault(sample.trunk or object(), []).append(sample)
    return sorted(found.values(), key=width)


def width(family):
    """The tokens of a family's row: its first sample's, and what the others do not share with it."""
    return len(family[0].ids) + sum(len(sample.ids) - sample.trunk[1] for sample in family[1:])


def microbatches(samples, max_tokens, packed=False):
    """Samples, by length, in lists of at most max_tokens; where rows are padded, padding counts (but for what
    rounds them up to 16). A family is never parted."""
    batches, tokens = [], 0
    for family in families(samples):
        n = width(family)
        tokens = tokens + n if packed else n * (len(batches[-1]) + 1) if batches else n
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = n
        batches[-1].append(family)
    return [list(itertools.chain.from_iterable(batch)) for batch in batches]


def packing(model):
    """The attention for packed rows, where the device has one; None: rows are padded."""
    return varlen(device_of(model), model.compute_dtype, model.config.head_dim)


def laid_out(samples, model):
    """A microbatch for a forward: ids_BT, their place (lm.attention), and place_of(i, t), the row and the
    column of sample i's token t. A family is a row: the trunk, then what of each sample goes on from there.
    """
    device, attention, rows, lengths, begins = device_of(model), packing(model), [], [], []
    for _, family in itertools.groupby(samples, key=lambda sample: sample.trunk or object()):
        first, *others = family = list(family)
        trunk = first.trunk[1] if others else len(first.ids)
        ids, parts = first.ids[:trunk], [trunk]
        for sample in family:
            assert sample.ids[:trunk] == first.ids[:trunk], f"samples of trunk {sample.trunk} do not share it"
            begins.append((len(rows), trunk, len(ids) - trunk))
            ids = ids + sample.ids[trunk:]
            parts += [len(sample.ids) - trunk] if others else []
        rows.append(ids)
        lengths.append(parts)
    shift = [0, *itertools.accumulate(map(len, rows))] if attention else [0] * len(rows)

    def place_of(i, t):
        row, trunk, behind = begins[i]
        return 0 if attention else row, shift[row] + t + (behind if t >= trunk else 0)

    if attention:
        ids_1T = torch.tensor([[*itertools.chain(*rows)]], device=device)
        return ids_1T, Packed(lengths, device, attention), place_of
    longest = bucket(max(map(len, rows)), 16)
    ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows], device=device)
    return ids_BT, Rows(longest, device, lengths), place_of


def collate(samples, model):
    """A microbatch as tensors: `laid_out` and, per sampled token, its place and its numbers.

    Masks come from what was recorded, never from token ids. Position t - 1 predicts token t.
    """
    ids_BT, place, place_of = laid_out(samples, model)
    device, spoken = ids_BT.device, [[*itertools.compress(range(len(s.ids)), s.sampled)] for s in samples]
    assert all(where[0] > 0 for where in spoken if where), (
        "a sample's first token cannot be sampled: nothing predicts it")

    def numbers(name):
        columns = [getattr(sample, name) for sample in samples]
        known = sum(column is not None for column in columns)
        assert known in (0, len(samples)), f"{name} is known for some samples of a microbatch only"
        return torch.tensor(of_spoken(columns), device=device) if known else None

    def of_spoken(columns):
        return [column[t] for column, where in zip(columns, spoken) for t in where]

    before = [place_of(i, t - 1) for i, where in enumerate(spoken) for t in where]
    target_N = torch.tensor(of_spoken([sample.ids for sample in samples]), device=device)
    weight_N = torch.tensor([s.weight for s, where in zip(samples, spoken) for _ in where], device=device)
    restrict = any(sample.allowed for sample in samples)
    allowed = [s.allowed.get(t) for s, where in zip(samples, spoken) for t in where] if restrict else None
    return (ids_BT, place, torch.tensor(before, device=device).unbind(1), target_N, numbers("advantage"),
            weight_N, numbers("logprob_old"), numbers("logprob_ref"), allowed)


def token_logprobs(model, ids_BT, place, select, target_N, temperature, allowed, entropies=False):
    """Logprob of each target at its position and, if asked for, the entropy there (without a gradient), fp32,
    both at this temperature and over what was allowed there."""
    def said(hidden_NC, lm_head, target_N, allowed):
        logits_NV = restricted(lm_head(hidden_NC).float() / temperature, allowed)
        logprob_N1 = logits_NV.log_softmax(-1).gather(1, target_N[:, None])    # FSDP warns of views
        with torch.no_grad():        # last: what backward makes again stops at what has a gradient
            return logprob_N1, entropy(logits_NV) if entropies else torch.zeros(len(logits_NV))

    logprob_N1, entropy_N = model(ids_BT, place, select, in_chunks(said, target_N, allowed))
    return logprob_N1[:, 0], entropy_N


def in_chunks(said, target_N, allowed):
    """A head of the model: said(hidden_NC, lm_head, target_N, allowed), tensors with a row for each position.

    Where that takes more than CHUNK_LOGITS logits, it is computed chunk by chunk, and again in backward, so
    that the logits of one chunk at most are alive.
    """
    def head(hidden_NC, lm_head):
        size, n = max(CHUNK_LOGITS // lm_head.out_features, 1), len(target_N)
        if n <= size:
            return said(hidden_NC, lm_head, target_N, allowed)
        chunks = [checkpoint(said, hidden_NC[i:i + size], lm_head, target_N[i:i + size],
                             allowed and allowed[i:i + size], use_reentrant=False, preserve_rng_state=False)
                  for i in range(0, n, size)]
        return tuple(torch.cat(parts) for parts in zip(*chunks))

    return head


def score(model, samples, objective):
    """Each sample's logprobs under `model`, aligned with its ids: for a reference, or old ones in bf16."""
    def logprobs(batch):
        *where, target_N, _, _, _, _, allowed = collate(batch, model)
        logprob_N, _ = token_logprobs(model, *where, target_N, objective.temperature, allowed)
        return [part.tolist() for part in logprob_N.split([sum(sample.sampled) for sample in batch])]

    spoken = [sample for sample in samples if any(sample.sampled)]      # a classifier's have no sampled token
    scores = itertools.chain.from_iterable(per_sample(model, spoken, objective, logprobs))
    return [[next(scores) if sampled else 0.0 for sampled in sample.sampled] for sample in samples]


@torch.no_grad()
def per_sample(model, samples, objective, of_batch):
    """One result per sample, in their order; of_batch(batch) gives those of a microbatch. Ranks may hold
    different numbers of samples: short ones run empty forwards."""
    results = {}
    for batch in padded(microbatches(samples, objective.microbatch_tokens, packing(model))):
        if batch:
            results |= zip(map(id, batch), of_batch(batch), strict=True)
        else:
            empty_forward(model)
    return [results[id(sample)] for sample in samples]


def device_of(model):
    return next(model.parameters()).device


def rescore(model, samples, objective):
    """Replace old logprobs by the trainer's own (in bf16 the sampler's differ by up to 0.03). Returns how far
    off they were, mean and maximum over all ranks (nan: there was none)."""
    samples, gaps = [sample for sample in samples if any(sample.sampled)], []      # a classifier's have none
    for sample, new in zip(samples, score(model, samples, objective)):
        gaps.append([abs(a - b) for a, b, sampled in zip(sample.logprob_old, new, sample.sampled) if sampled])
        sample.logprob_old = new
    total = parallel.all_sum({"gap": sum(map(sum, gaps)), "tokens": sum(map(len, gaps))})
    largest = parallel.all_max(max([0.0, *itertools.chain(*gaps)]))
    return {"policy/logprob_gap_nats": total["gap"] / (total["tokens"] or math.nan),
            "policy/logprob_gap_max_nats": largest if total["tokens"] else math.nan}


def write_kl(model, reference, episodes, objective, coef, rescored):
    """Write `turn.kl`: coef * k1 of each token, by the sampler's logprobs or (rescored) by the trainer's."""
    samples = [sample for episode in episodes for sample in samples_of(episode)]
    if rescored:
        rescore(model, samples, objective)
    for sample, ref in zip(samples, score(reference, samples, objective)):
        penalties = iter([coef * kl_k1(old, new) for old, new, sampled in
                          zip(sample.logprob_old, ref, sample.sampled) if sampled])
        for turn in sample.turns:
            turn.kl = [next(penalties) for _ in turn.response_ids]


def padded(batches):
    """The list with empty microbatches up to the longest rank's: FSDP ranks make equally many forwards."""
    return batches + [[]] * (int(parallel.all_max(len(batches))) - len(batches))


def empty_forward(model, head="lm"):
    """A loss of 0 by a forward over padding, so that its backward touches what a real one touches."""
    ids_BT = torch.zeros(1, 16, dtype=torch.long, device=device_of(model))
    return model(ids_BT, select=([0], [0]), head=head).sum() * 0.0


def backward(model, samples, objective, head, loss_of):
    """Backward through the samples, equally many microbatches on all ranks. Returns the sum of the losses."""
    total = 0.0
    for batch in padded(microbatches(samples, objective.microbatch_tokens, packing(model))):
        loss = loss_of(batch) if batch else empty_forward(model, head)
        loss.backward()
        total += float(loss.detach())
    return total


def loud(samples, objective):
    """Those of the samples that have a gradient: by their advantages, or by the KL, which is the policy's."""
    return [s for s in samples if not s.silent or (objective.kl_coef and s.kind == "policy")]


def accumulate(model, samples, objective, sums):
    """Backward through all samples of one kind: their summed gradient stays in .grad, counts go to `sums`."""
    kind = samples[0].kind if samples else "policy"
    tokens_S = torch.tensor([sum(sample.sampled) * sample.count for sample in samples])
    episode_S = torch.tensor([sample.episode for sample in samples])
    reduction = objective.reduction if kind == "policy" else "token"
    weight_S, units = token_weight(tokens_S, episode_S, reduction, objective.longest)
    units = max(parallel.all_sum(units), 1.0)
    for sample, weight in zip(samples, weight_S):
        sample.weight = float(weight) * sample.count / units
    sums["loss"] += backward(model, loud(samples, objective), objective, "lm",
                             lambda batch: batch_loss(model, batch, objective, sums))
    sums["tokens"] += float(tokens_S.sum())


def batch_loss(model, batch, objective, sums):
    """Weighted loss of one microbatch; adds what `loss_metrics` reports to `sums`."""
    *where, target_N, advantage_N, weight_N, old_N, ref_N, allowed = collate(batch, model)
    logprob_N, entropy_N = token_logprobs(model, *where, target_N, objective.temperature, allowed,
                                          entropies=True)
    now_N = logprob_N.detach()
    loss_N, clipped_N = clipped_policy_loss(logprob_N, now_N if old_N is None else old_N, advantage_N,
                                            objective.clip_low, objective.clip_high, objective.dual_clip)
    if objective.kl_coef and batch[0].kind == "policy":
        kl_N = kl_k3(logprob_N, ref_N)
        loss_N = loss_N + objective.kl_coef * kl_N
        sums["kl"] += float(kl_N.detach().sum())
    with torch.no_grad():
        sums["nll"] -= float(now_N.sum())
        sums["entropy"] += float(entropy_N.sum())
        sums["clipped"] += float(clipped_N.sum())
        sums["scored"] += len(now_N)
        if old_N is not None:
            gap_N = (now_N - old_N).abs()
            sums["gap"] += float(gap_N.sum())
            sums["gap_max"] = max(sums["gap_max"], float(gap_N.max()))
    return (weight_N * loss_N).sum()


def update(model, optimizer, samples, objective, lr):
    """One optimizer step on the samples (policy and judge). Returns metrics, equal on every rank.

    The two kinds are backpropagated apart, so that their gradients can be compared and the judge's limited:

        g = g_policy + weight * min(1, cap * |g_policy| / (weight * |g_judge|)) * g_judge

    then clipped to max_grad_norm. Raises NonFinite as `step` does.
    """
    of_kind = {kind: [s for s in samples if s.kind == kind] for kind in ("policy", "judge")}
    counted = ("loss", "tokens", "scored", "nll", "entropy", "clipped", "kl", "gap", "gap_max")
    sums, grads = {kind: dict.fromkeys(counted, 0.0) for kind in of_kind}, {}
    for kind, members in of_kind.items():
        if parallel.any_rank(bool(members)):
            labelled = parallel.any_rank(any(s.label is not None for s in members))
            assert all((s.label is not None) == labelled for s in members), f"{kind}: some labelled, some not"
            (accumulate_labels if labelled else accumulate)(model, members, objective, sums[kind])
            grads[kind] = parallel.take_grads(model)
    norms = {kind: parallel.norm(g) for kind, g in grads.items()}
    weight = {"policy": 1.0, "judge": objective.judge_weight}
    if objective.judge_grad_cap and weight["judge"] * norms.get("judge", 0.0) > 0:
        cap = objective.judge_grad_cap * norms.get("policy", 0.0) / (weight["judge"] * norms["judge"])
        weight["judge"] *= min(1.0, cap)
    metrics = gradient_metrics(grads, norms, weight) | loss_metrics(sums)
    losses = {"loss": metrics["policy/loss"], "judge loss": metrics["judge/loss"]}
    weighted = [(weight[kind], grad) for kind, grad in grads.items()]
    step(model, optimizer, weighted, losses, metrics["policy/grad_norm"], objective.max_grad_norm, lr)
    return metrics


def mean_of(steps):
    """The mean of several steps' metrics; what a step did not measure is left out, nan where none did."""
    keys = dict.fromkeys(key for step in steps for key in step)
    known = {key: [step[key] for step in steps if not math.isnan(step.get(key, math.nan))] for key in keys}
    return {key: sum(values) / len(values) if values else math.nan for key, values in known.items()}


def step(model, optimizer, weighted, losses, norm, max_norm, lr):
    """Clip the sum of weight * gradient, which has this norm, to max_norm (0 = no limit), and step on it, or
    raise NonFinite on all ranks where the norm or one of the losses, {name: loss}, is not finite."""
    numbers = losses | {"gradient norm": norm}
    if parallel.any_rank(not math.isfinite(sum(numbers.values()))):
        raise NonFinite(", ".join(f"{name} {number}" for name, number in numbers.items()))
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    parallel.put_grads(model, [(scale * weight, grads) for weight, grads in weighted])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def gradient_metrics(grads, norms, weight):
    """The norm of the weighted sum, before clipping; with both kinds also the judge's norm over the policy's
    (unweighted), their cosine, and the judge's weight after the cap."""
    policy, judge = norms.get("policy", 0.0), norms.get("judge", 0.0)
    metrics = {"policy/grad_norm": weight["policy"] * policy + weight["judge"] * judge}
    if len(grads) == 2:
        product = parallel.dot(grads["policy"], grads["judge"])
        square = policy**2 + 2 * weight["judge"] * product + (weight["judge"] * judge) ** 2
        metrics["policy/grad_norm"] = math.sqrt(max(square, 0.0))
        metrics["judge/grad_ratio"] = judge / policy if policy else math.nan
        metrics["judge/grad_cosine"] = product / (policy * judge) if policy * judge else math.nan
        metrics["judge/weight"] = weight["judge"]
    return metrics


def loss_metrics(sums):
    """Per kind, over all ranks: the loss before judge_weight, the tokens (a labelled turn counts as one), and
    means over the tokens that were run (silent samples are not, equal draws are once), nan if none was."""
    metrics = {}
    means = (("nll_nats", "nll"), ("entropy_nats", "entropy"), ("clip_frac", "clipped"), ("kl_nats", "kl"),
             ("logprob_gap_nats", "gap"))
    for kind, counted in sums.items():
        total, worst = parallel.all_sum(counted), parallel.all_max(counted["gap_max"])
        metrics |= {f"{kind}/{key}": total[name] / (total["scored"] or math.nan) for key, name in means}
        metrics |= {f"{kind}/loss": total["loss"], f"{kind}/tokens": total["tokens"],
                    f"{kind}/logprob_gap_max_nats": worst if total["scored"] else math.nan}
    return metrics


def accumulate_labels(model, samples, objective, sums):
    """`accumulate` for labelled samples: binary cross-entropy, mean over the judged turns of all ranks."""
    units = max(parallel.all_sum(float(sum(sample.count for sample in samples))), 1.0)

    def loss_of(batch):
        logit_B = last_values(model, batch)
        numbers = [(float(sample.label), sample.count) for sample in batch]
        label_B, count_B = torch.tensor(numbers, device=logit_B.device).unbind(1)
        loss_B = F.binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        now_B = logit_B.detach()
        sums["nll"] += float(loss_B.detach().sum())
        sums["entropy"] += float(F.binary_cross_entropy_with_logits(now_B, now_B.sigmoid(), reduction="sum"))
        sums["scored"] += len(batch)
        return (count_B * loss_B).sum() / units

    sums["loss"] += backward(model, samples, objective, "value", loss_of)
    sums["tokens"] += float(sum(sample.count for sample in samples))


def judgements(model, samples, objective):
    """The classifier's probability that each sample's turn is good."""
    return per_sample(model, samples, objective, lambda batch: last_values(model, batch).sigmoid().tolist())


def last_values(model, batch):
    """The value head's output, here a logit, at the last token of each sample of a microbatch."""
    return values_at(model, batch, [[len(sample.ids) - 1] for sample in batch])


def values_at(model, batch, positions):
    """value_N in fp32 at the listed positions of each sample of a microbatch."""
    ids_BT, place, place_of = laid_out(batch, model)
    select = torch.tensor([place_of(i, t) for i, of_sample in enumerate(positions) for t in of_sample],
                          device=ids_BT.device)
    return model(ids_BT, place, select.unbind(1), "value")
