"""Samples → one optimizer step. It knows no algorithm: a sample gives, token by token, what was sampled and
its advantage.

A policy episode is a sample (or several, see `samples_of`), a judge's answer is one, and so is a cold-start
demonstration (advantage 1, no old logprob: its gradient is that of cross-entropy). The objective of one step:

    L = sum_policy / N_policy + weight * sum_judge / N_judge              GCD, arXiv:2509.23870 Eq. 3

with both counts taken over all ranks, so that microbatches and ranks change nothing but the time it takes.
Left out: gradient accumulation over steps, and any optimizer but AdamW.

Shapes: B rows of a microbatch, T positions, N sampled tokens of it, V vocabulary, S samples.
"""

import math
from dataclasses import dataclass, replace

import torch

import parallel
from algorithms import clipped_policy_loss, entropy, kl_k3, token_weight


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

    @property
    def silent(self):
        """No token has an advantage: without a KL term there is nothing to compute."""
        return not any(self.advantage)


@dataclass(frozen=True, slots=True)
class Objective:
    """How samples become a loss; gcd.py sets it from its flags."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    reduction: str = "token"              # token | episode | constant: see algorithms.token_weight
    longest: int = 1                      # tokens; the divisor of "constant"
    kl_coef: float = 0.0                  # weight of k3 in the loss; needs logprob_ref
    judge_weight: float = 0.1             # lambda
    judge_grad_cap: float = 0.0           # judge gradient norm at most this times the policy's; 0 = no cap
    temperature: float = 1.0              # the sampler's: logprobs are of the distribution drawn from
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 16384        # padding included


class NonFinite(FloatingPointError):
    """A loss or gradient that is not a number; raised on every rank before the weights are touched."""


def samples_of(episode, advantages, index):
    """An episode's turns as samples, given one advantage per turn.

    A turn whose prompt extends the previous prompt and response joins its sample, so an append-only
    conversation is one sample and a re-rendered one is a sample per turn; the token ids decide.
    index: the number that the samples carry as their `episode`.
    """
    samples = []
    for turn, advantage in zip(episode.turns, advantages, strict=True):
        last = samples[-1] if samples else None
        if last is None or turn.prompt_ids[:len(last.ids)] != last.ids:
            last = Sample([], [], [], [], index)
            samples.append(last)
        context, n = turn.prompt_ids[len(last.ids):], len(turn.response_ids)
        last.ids += context + turn.response_ids
        last.sampled += [False] * len(context) + [True] * n
        last.advantage += [0.0] * len(context) + [advantage] * n
        last.logprob_old += [0.0] * len(context) + turn.logprob_old
    return samples


def demonstration(samples):
    """The same samples to be imitated: no old logprobs, whatever advantage they carry."""
    return [replace(sample, logprob_old=None) for sample in samples]


def minibatches(samples, n):
    """Cut samples by episode into n lists, one optimizer step each; an episode is never split.

    Dealt out by episode number, not by place in the list: the members of a group spread over the lists,
    however the ranks share them out.
    """
    return [[sample for sample in samples if sample.episode % n == i] for i in range(n)]


def microbatches(samples, max_tokens):
    """Samples in lists of at most max_tokens, padding included; sorted by length so that little is padded."""
    batches = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if not batches or len(sample.ids) * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(sample)
    return batches


def collate(samples, weights, device):
    """A microbatch as tensors: ids_BT (right-padded) and, per sampled token, its place and its numbers.

    Masks come from what was recorded, never from token ids. Position t - 1 predicts token t.
    """
    width = -(-max(len(sample.ids) for sample in samples) // 16) * 16
    ids_BT = torch.tensor([sample.ids + [0] * (width - len(sample.ids)) for sample in samples])
    place = [(row, t) for row, sample in enumerate(samples)
             for t, sampled in enumerate(sample.sampled) if sampled]
    row_N, t_N = torch.tensor(place).reshape(-1, 2).unbind(1)
    assert (t_N > 0).all(), "a sample's first token cannot be sampled: nothing predicts it"

    def values(get):
        return torch.tensor([get(samples[row])[t] for row, t in place])

    def optional(name):
        known = [getattr(sample, name) is not None for sample in samples]
        assert all(known) or not any(known), f"{name} is known for some samples of a microbatch only"
        return values(lambda sample: getattr(sample, name)).to(device) if known[0] else None

    weight_N = torch.tensor([weights[id(samples[row])] for row, _ in place])
    return (ids_BT.to(device), (row_N.to(device), (t_N - 1).to(device)), ids_BT[row_N, t_N].to(device),
            values(lambda sample: sample.advantage).to(device), weight_N.to(device), optional("logprob_old"),
            optional("logprob_ref"))


def token_logprobs(model, ids_BT, select, target_N, temperature):
    """Logprob of each target under log_softmax(logits / temperature) at its position, and those scaled logits
    (fp32)."""
    logits_NV = model(ids_BT, select=select).float() / temperature
    return logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0], logits_NV


@torch.no_grad()
def score(model, samples, objective):
    """Each sample's logprobs under `model`, aligned with its ids: for a reference, or old logprobs in bf16.

    Ranks may hold different numbers of samples: short ones run empty forwards.
    """
    device = next(model.parameters()).device
    scores = {}
    for batch in padded(microbatches(samples, objective.microbatch_tokens)):
        if not batch:
            model(torch.zeros(1, 16, dtype=torch.long, device=device), select=([0], [0]))
            continue
        ids_BT, select, target_N, *_ = collate(batch, dict.fromkeys(map(id, batch), 1.0), device)
        values = iter(token_logprobs(model, ids_BT, select, target_N, objective.temperature)[0].tolist())
        for sample in batch:
            scores[id(sample)] = [next(values) if sampled else 0.0 for sampled in sample.sampled]
    return [scores[id(sample)] for sample in samples]


def rescore(model, samples, objective):
    """Replace old logprobs by the trainer's own (in bf16 the sampler's differ by up to 0.03).

    Returns how far off they were, mean and maximum over all ranks.
    """
    sums = {"gap": 0.0, "tokens": 0.0}
    worst = 0.0
    for sample, new in zip(samples, score(model, samples, objective)):
        gaps = [abs(a - b) for a, b, sampled in zip(sample.logprob_old, new, sample.sampled) if sampled]
        sums["gap"] += sum(gaps)
        sums["tokens"] += len(gaps)
        worst = max([worst, *gaps])
        sample.logprob_old = new
    total = parallel.all_sum(sums)
    return {"policy/logprob_gap_nats": total["gap"] / max(total["tokens"], 1.0),
            "policy/logprob_gap_max_nats": parallel.all_max(worst)}


def padded(batches):
    """The list with empty microbatches up to the longest rank's: FSDP ranks make equally many forwards."""
    return batches + [[]] * (int(parallel.all_max(len(batches))) - len(batches))


def accumulate(model, samples, objective, sums):
    """Backward through all samples of one kind: their summed gradient stays in .grad, counts go to `sums`."""
    device = next(model.parameters()).device
    kind = samples[0].kind if samples else "policy"
    tokens_S = torch.tensor([sum(sample.sampled) * sample.count for sample in samples])
    episode_S = torch.tensor([sample.episode for sample in samples])
    reduction = objective.reduction if kind == "policy" else "token"
    weight_S, units = [], 0.0
    if samples:
        weight_S, units = token_weight(tokens_S, episode_S, reduction, objective.longest)
    units = max(parallel.all_sum(units), 1.0)
    weights = {id(s): float(w) * s.count / units for s, w in zip(samples, weight_S)}
    loud = [s for s in samples if not s.silent or (objective.kl_coef and kind == "policy")]
    for batch in padded(microbatches(loud, objective.microbatch_tokens)):
        if not batch:
            loss = model(torch.zeros(1, 16, dtype=torch.long, device=device), select=([0], [0])).sum() * 0.0
        else:
            loss = batch_loss(model, batch, weights, objective, sums, device)
        loss.backward()
        sums["loss"] += float(loss.detach())
    sums["tokens"] += float(tokens_S.sum())


def batch_loss(model, batch, weights, objective, sums, device):
    """Weighted loss of one microbatch; adds what `loss_metrics` reports to `sums`."""
    ids_BT, select, target_N, advantage_N, weight_N, old_N, ref_N = collate(batch, weights, device)
    logprob_N, logits_NV = token_logprobs(model, ids_BT, select, target_N, objective.temperature)
    now_N = logprob_N.detach()
    loss_N, clipped_N = clipped_policy_loss(logprob_N, now_N if old_N is None else old_N, advantage_N,
                                            objective.clip_low, objective.clip_high)
    if objective.kl_coef and batch[0].kind == "policy":
        kl_N = kl_k3(logprob_N, ref_N)
        loss_N = loss_N + objective.kl_coef * kl_N
        sums["kl"] += float(kl_N.detach().sum())
    with torch.no_grad():
        sums["nll"] -= float(now_N.sum())
        sums["entropy"] += float(entropy(logits_NV).sum())
        sums["clipped"] += float(clipped_N.sum())
        sums["scored"] += len(now_N)
        if old_N is not None:
            gap_N = (now_N - old_N).abs()
            sums["gap"] += float(gap_N.sum())
            sums["gap_max"] = max(sums["gap_max"], float(gap_N.max()))
    return (weight_N * loss_N).sum()


def new_sums():
    keys = ("loss", "tokens", "scored", "nll", "entropy", "clipped", "kl", "gap", "gap_max")
    return dict.fromkeys(keys, 0.0)


def update(model, optimizer, samples, objective, lr):
    """One optimizer step on the samples (policy and judge). Returns metrics, equal on every rank.

    The two kinds are backpropagated apart, so that their gradients can be compared and the judge's limited:

        g = g_policy + weight * min(1, cap * |g_policy| / (weight * |g_judge|)) * g_judge

    then clipped to max_grad_norm. Raises NonFinite on all ranks, before the step, if loss or gradient is not
    finite.
    """
    of_kind = {kind: [s for s in samples if s.kind == kind] for kind in ("policy", "judge")}
    sums = {kind: new_sums() for kind in of_kind}
    grads = {}
    for kind, members in of_kind.items():
        if parallel.any_rank(bool(members)):
            accumulate(model, members, objective, sums[kind])
            grads[kind] = parallel.take_grads(model)
    norms = {kind: parallel.norm(g) for kind, g in grads.items()}
    weight = {"policy": 1.0, "judge": objective.judge_weight}
    if objective.judge_grad_cap and weight["judge"] * norms.get("judge", 0.0) > 0:
        cap = objective.judge_grad_cap * norms.get("policy", 0.0) / (weight["judge"] * norms["judge"])
        weight["judge"] *= min(1.0, cap)
    metrics = gradient_metrics(grads, norms, weight) | loss_metrics(sums)
    total = metrics["policy/grad_norm"]
    if parallel.any_rank(not math.isfinite(total + metrics["policy/loss"] + metrics["judge/loss"])):
        raise NonFinite(f"loss {metrics['policy/loss']}, judge loss {metrics['judge/loss']}, "
                        f"gradient norm {total}")
    scale = min(1.0, objective.max_grad_norm / (total + 1e-6)) if objective.max_grad_norm else 1.0
    parallel.put_grads(model, [(scale * weight[kind], g) for kind, g in grads.items()])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return metrics


def gradient_metrics(grads, norms, weight):
    """The norm of the weighted sum, before clipping; with both kinds also the judge's norm over the policy's
    (unweighted), their cosine, and the judge's weight after the cap."""
    policy, judge = norms.get("policy", 0.0), norms.get("judge", 0.0)
    metrics = {"policy/grad_norm": weight["policy"] * policy}
    if len(grads) == 2:
        product = parallel.dot(grads["policy"], grads["judge"])
        square = policy**2 + 2 * weight["judge"] * product + (weight["judge"] * judge) ** 2
        metrics["policy/grad_norm"] = math.sqrt(max(square, 0.0))
        metrics["judge/grad_ratio"] = judge / policy if policy else math.nan
        metrics["judge/grad_cosine"] = product / (policy * judge) if policy * judge else math.nan
        metrics["judge/weight"] = weight["judge"]
    elif "judge" in grads:
        metrics["policy/grad_norm"] = weight["judge"] * judge
    return metrics


def loss_metrics(sums):
    """Per kind, over all ranks: the loss before judge_weight, the number of tokens, and means over the tokens
    that were run (silent samples are not, equal draws are once)."""
    metrics = {}
    for kind, own in sums.items():
        total = parallel.all_sum({key: value for key, value in own.items() if key != "gap_max"})
        scored = max(total["scored"], 1.0)
        metrics |= {f"{kind}/loss": total["loss"], f"{kind}/tokens": total["tokens"],
                    f"{kind}/nll_nats": total["nll"] / scored,
                    f"{kind}/entropy_nats": total["entropy"] / scored,
                    f"{kind}/clip_frac": total["clipped"] / scored, f"{kind}/kl_nats": total["kl"] / scored,
                    f"{kind}/logprob_gap_nats": total["gap"] / scored,
                    f"{kind}/logprob_gap_max_nats": parallel.all_max(own["gap_max"])}
    return metrics
