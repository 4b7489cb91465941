"""Samples → one optimizer step. It knows no algorithm: a sample gives, token by token, what was sampled and
its advantage.

A policy episode is a sample (or several, see `samples_of`), a judge's answer is one, and so is a cold-start
demonstration (advantage 1, no old logprob: its gradient is that of cross-entropy). The objective of one step:

    L = sum_policy / N_policy + weight * sum_judge / N_judge              GCD, arXiv:2509.23870 Eq. 3

with both counts taken over all ranks, so that microbatches and ranks change nothing but the time it takes.
Sections of their own at the end: the judge as a classifier, PPO's critic, NTHR's token weights.
Left out: gradient accumulation over steps, and any optimizer but AdamW.

Shapes: B rows of a microbatch, T positions, N sampled tokens of it, V vocabulary, S samples, E episodes of a
group, d hidden size.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import parallel
from algorithms import (
    clipped_policy_loss,
    clipped_value_loss,
    entropy,
    explained_variance,
    kl_k3,
    nthr_weights,
    prediction_error,
    token_weight,
)


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
    label: float | None = None            # a judged turn for the value head, 1 good, 0 bad; nothing is sampled

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
    reduction: str = "token"              # token | episode | constant: see algorithms.token_weight
    longest: int = 1                      # tokens; the divisor of "constant"
    kl_coef: float = 0.0                  # weight of k3 in the loss; needs logprob_ref
    judge_weight: float = 0.1             # lambda
    judge_grad_cap: float = 0.0           # judge gradient norm at most this times the policy's; 0 = no cap
    temperature: float = 1.0              # the sampler's: logprobs are of the distribution drawn from
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 16384        # padding included
    value_clip: float = 0.5               # how far a value may move in the critic's loss; 0 = no limit


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
    """Samples in lists of at most max_tokens, each as long as the longest; sorted by length so that little is padded.

    (A row is then rounded up to 16 tokens: a list of short ones may be larger by that.)
    """
    batches = []
    for sample in sorted(samples, key=lambda sample: len(sample.ids)):
        if not batches or len(sample.ids) * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(sample)
    return batches


def right_padded(samples):
    """The samples' ids as rows of one tensor, ids_BT."""
    width = -(-max(len(sample.ids) for sample in samples) // 16) * 16
    return torch.tensor([sample.ids + [0] * (width - len(sample.ids)) for sample in samples])


def collate(samples, weights, device):
    """A microbatch as tensors: ids_BT (right-padded) and, per sampled token, its place and its numbers.

    Masks come from what was recorded, never from token ids. Position t - 1 predicts token t.
    """
    ids_BT = right_padded(samples)
    place = [(row, t) for row, sample in enumerate(samples)
             for t, sampled in enumerate(sample.sampled) if sampled]
    row_N, t_N = torch.tensor(place).reshape(-1, 2).unbind(1)
    assert (t_N > 0).all(), "a sample's first token cannot be sampled: nothing predicts it"

    def numbers(get):
        return torch.tensor([get(samples[row])[t] for row, t in place])

    def optional(name):
        known = [getattr(sample, name) is not None for sample in samples]
        assert all(known) or not any(known), f"{name} is known for some samples of a microbatch only"
        return numbers(lambda sample: getattr(sample, name)).to(device) if known[0] else None

    weight_N = torch.tensor([weights[id(samples[row])] for row, _ in place])
    return (ids_BT.to(device), (row_N.to(device), (t_N - 1).to(device)), ids_BT[row_N, t_N].to(device),
            numbers(lambda sample: sample.advantage).to(device), weight_N.to(device), optional("logprob_old"),
            optional("logprob_ref"))


def token_logprobs(model, ids_BT, select, target_N, temperature):
    """Logprob of each target under log_softmax(logits / temperature) at its position, and those scaled logits
    (fp32)."""
    logits_NV = model(ids_BT, select=select).float() / temperature
    return logits_NV.log_softmax(-1).gather(1, target_N[:, None])[:, 0], logits_NV


def score(model, samples, objective):
    """Each sample's logprobs under `model`, aligned with its ids: for a reference, or old logprobs in bf16.

    Ranks may hold different numbers of samples, as in all that goes by `per_sample`.
    """
    def logprobs(batch):
        ids_BT, select, target_N, *_ = collate(batch, dict.fromkeys(map(id, batch), 1.0), device_of(model))
        logprob_N, _ = token_logprobs(model, ids_BT, select, target_N, objective.temperature)
        return logprob_N.split([sum(sample.sampled) for sample in batch])

    spoken = [sample for sample in samples if any(sample.sampled)]
    scores = per_sample(model, spoken, objective, logprobs)
    return [aligned(sample, scores.get(id(sample))) for sample in samples]


@torch.no_grad()
def per_sample(model, samples, objective, of_batch):
    """{id(sample): result} from `of_batch`, which gives the results of a microbatch, one per sample.

    Ranks may hold different numbers of samples: short ones run empty forwards.
    """
    results = {}
    for batch in padded(microbatches(samples, objective.microbatch_tokens)):
        if batch:
            results.update(zip(map(id, batch), of_batch(batch), strict=True))
        else:
            empty_forward(model)
    return results


def aligned(sample, number_N):
    """The numbers of a sample's sampled tokens as a list aligned with its ids, 0 elsewhere."""
    numbers = iter(number_N.tolist() if any(sample.sampled) else ())
    return [next(numbers) if sampled else 0.0 for sampled in sample.sampled]


def device_of(model):
    return next(model.parameters()).device


def rescore(model, samples, objective):
    """Replace old logprobs by the trainer's own (in bf16 the sampler's differ by up to 0.03).

    Returns how far off they were, mean and maximum over all ranks.
    """
    samples = [sample for sample in samples if any(sample.sampled)]       # a classifier's have no old logprobs
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


def empty_forward(model, head="lm"):
    """A loss of 0 by a forward over padding, so that its backward touches what a real one touches."""
    ids_BT = torch.zeros(1, 16, dtype=torch.long, device=device_of(model))
    return model(ids_BT, select=([0], [0]), head=head).sum() * 0.0


def backward(model, batches, head, loss_of):
    """Backward through the microbatches, empty ones up to the longest rank's; returns the sum of the losses."""
    total = 0.0
    for batch in padded(batches):
        loss = loss_of(batch) if batch else empty_forward(model, head)
        loss.backward()
        total += float(loss.detach())
    return total


def accumulate(model, samples, objective, sums):
    """Backward through all samples of one kind: their summed gradient stays in .grad, counts go to `sums`."""
    device = device_of(model)
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
    sums["loss"] += backward(model, microbatches(loud, objective.microbatch_tokens), "lm",
                             lambda batch: batch_loss(model, batch, weights, objective, sums, device))
    sums["tokens"] += float(tokens_S.sum())


def batch_loss(model, batch, weights, objective, sums, device):
    """Weighted loss of one microbatch; adds what `loss_metrics` reports to `sums`."""
    ids_BT, select, target_N, advantage_N, weight_N, old_N, ref_N = collate(batch, weights, device)
    logprob_N, logits_NV = token_logprobs(model, ids_BT, select, target_N, objective.temperature)
    now_N = logprob_N.detach()
    loss_N, clipped_N = clipped_policy_loss(logprob_N, now_N if old_N is None else old_N, advantage_N,
                                            objective.clip_low, objective.clip_high, objective.dual_clip)
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
            labelled = parallel.any_rank(any(s.label is not None for s in members))
            assert all((s.label is not None) == labelled for s in members), f"{kind} samples with and without a label"
            (accumulate_labels if labelled else accumulate)(model, members, objective, sums[kind])
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
    step(model, optimizer, [(weight[kind], g) for kind, g in grads.items()], total, objective.max_grad_norm, lr)
    return metrics


def step(model, optimizer, weighted, norm, max_norm, lr):
    """Clip the sum of weight * gradient, which has this norm, to max_norm (0 = no limit), and step on it."""
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
    that were run (silent samples are not, equal draws are once): nan if none was. A labelled turn counts as one token."""
    metrics = {}
    for kind, own in sums.items():
        total = parallel.all_sum({key: value for key, value in own.items() if key != "gap_max"})
        scored = total["scored"] or math.nan
        metrics |= {f"{kind}/loss": total["loss"], f"{kind}/tokens": total["tokens"],
                    f"{kind}/nll_nats": total["nll"] / scored,
                    f"{kind}/entropy_nats": total["entropy"] / scored,
                    f"{kind}/clip_frac": total["clipped"] / scored, f"{kind}/kl_nats": total["kl"] / scored,
                    f"{kind}/logprob_gap_nats": total["gap"] / scored,
                    f"{kind}/logprob_gap_max_nats": parallel.all_max(own["gap_max"]) if total["scored"] else math.nan}
    return metrics


# The judge as a classifier: the value head at the last token of a judged turn, in place of a generated verdict

def accumulate_labels(model, samples, objective, sums):
    """`accumulate` for labelled samples: binary cross-entropy, mean over the judged turns of all ranks."""
    units = max(parallel.all_sum(float(sum(sample.count for sample in samples))), 1.0)

    def loss_of(batch):
        logit_B = last_values(model, batch)
        label_B = torch.tensor([float(sample.label) for sample in batch], device=logit_B.device)
        count_B = torch.tensor([sample.count for sample in batch], device=logit_B.device)
        loss_B = F.binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
        now_B = logit_B.detach()
        sums["nll"] += float(loss_B.detach().sum())
        sums["entropy"] += float(F.binary_cross_entropy_with_logits(now_B, now_B.sigmoid(), reduction="sum"))
        sums["scored"] += len(batch)
        return (count_B * loss_B).sum() / units

    sums["loss"] += backward(model, microbatches(samples, objective.microbatch_tokens), "value", loss_of)
    sums["tokens"] += float(sum(sample.count for sample in samples))


def judgements(model, samples, objective):
    """The classifier's probability that each sample's turn is good."""
    found = per_sample(model, samples, objective, lambda batch: last_values(model, batch).sigmoid().tolist())
    return [found[id(sample)] for sample in samples]


def last_values(model, batch):
    """The value head's output, here a logit, at the last token of each sample of a microbatch."""
    return values_at(model, batch, [[len(sample.ids) - 1] for sample in batch])


def values_at(model, batch, positions):
    """value_N in fp32 at the listed positions of each sample of a microbatch."""
    row_N, t_N = torch.tensor([(row, t) for row, own in enumerate(positions) for t in own]).unbind(1)
    device = device_of(model)
    return model(right_padded(batch).to(device), select=(row_N.to(device), t_N.to(device)), head="value")


# The critic (PPO): a second model, whose value head tells the return that is still to come

def values(critic, samples, objective):
    """V of the text before each sampled token, aligned with the samples' ids; 0 where nothing was sampled."""
    def of_batch(batch):
        positions = [[t - 1 for t, sampled in enumerate(sample.sampled) if sampled] for sample in batch]
        return values_at(critic, batch, positions).split([len(own) for own in positions])

    spoken = [sample for sample in samples if any(sample.sampled)]
    found = per_sample(critic, spoken, objective, of_batch)
    return [aligned(sample, found.get(id(sample))) for sample in samples]


def update_critic(critic, optimizer, samples, returns, values_old, objective, lr):
    """One optimizer step of the critic on the clipped value loss, mean over the targets of all ranks.

    returns: per sample, aligned with its ids, the return that V before that token should tell; nan = no target.
    values_old: `values` before the first step on these samples. Returns metrics, equal on every rank; raises
    NonFinite on all, before the step.
    """
    targets = {id(sample): [(t, r, v) for t, (r, v) in enumerate(zip(own, old, strict=True)) if not math.isnan(r)]
               for sample, own, old in zip(samples, returns, values_old, strict=True)}
    for sample in samples:
        assert all(sample.sampled[t] for t, *_ in targets[id(sample)]), "a target where nothing was sampled"
    sums = {"targets": float(sum(map(len, targets.values()))), "clipped": 0.0, "value": 0.0}
    units = max(parallel.all_sum(sums["targets"]), 1.0)

    def loss_of(batch):
        value_N = values_at(critic, batch, [[t - 1 for t, *_ in targets[id(sample)]] for sample in batch])
        numbers = [(r, v) for sample in batch for _, r, v in targets[id(sample)]]
        return_N, old_N = torch.tensor(numbers, device=value_N.device).unbind(1)
        loss_N, clipped_N = clipped_value_loss(value_N, old_N, return_N, objective.value_clip)
        sums["clipped"] += float(clipped_N.sum())
        sums["value"] += float(value_N.detach().sum())
        return loss_N.sum() / units

    taught = [sample for sample in samples if targets[id(sample)]]
    sums["loss"] = backward(critic, microbatches(taught, objective.microbatch_tokens), "value", loss_of)
    grads, total = parallel.take_grads(critic), parallel.all_sum(sums)
    norm = parallel.norm(grads)
    if parallel.any_rank(not math.isfinite(total["loss"] + norm)):
        raise NonFinite(f"critic loss {total['loss']}, gradient norm {norm}")
    step(critic, optimizer, [(1.0, grads)], norm, objective.max_grad_norm, lr)
    return {"critic/loss": total["loss"], "critic/clip_frac": total["clipped"] / units, "critic/grad_norm": norm,
            "critic/value_mean": total["value"] / units}


def value_fit(returns, values_old):
    """How much of the returns' variance the critic's values explained, over the targets of all ranks."""
    pairs = [(v, r) for own, old in zip(returns, values_old, strict=True)
             for r, v in zip(own, old, strict=True) if not math.isnan(r)]
    every = [pair for own in parallel.gather(pairs) for pair in own]
    value_N, return_N = torch.tensor(every, dtype=torch.double).reshape(-1, 2).unbind(1)
    return {"critic/explained_variance": explained_variance(value_N, return_N)}


# NTHR: weaken the tokens of lost episodes that say what the won ones of their group say

def nthr(model, samples, won, group, objective, beta=1.0):
    """The samples with the advantages of lost episodes' tokens times `algorithms.nthr_weights`, and metrics.

    won, group: by episode number. The response of arXiv:2505.18830 is here all that an episode sampled, its
    label whether it won, its group the episodes of its task, whole on one rank; groups without both labels
    stay as they are. Hidden states and probabilities are those of `model`: call it before the first step.
    """
    by_group = defaultdict(list)
    for sample in samples:
        by_group[int(group[sample.episode])].append(sample)
    mixed = [own for own in by_group.values() if len({bool(won[sample.episode]) for sample in own}) == 2]
    sums = {"groups": len(by_group), "mixed": len(mixed), "lost": 0, "weakened": 0}
    weights = {}
    for own in padded(mixed):                        # an empty group still makes its forwards
        for sample, weight_N in zip(own, group_weights(model, own, won, objective, beta), strict=True):
            weights[id(sample)] = aligned(sample, weight_N)
            if not won[sample.episode]:
                sums["lost"] += len(weight_N)
                sums["weakened"] += int((weight_N < 1).sum())
    total = parallel.all_sum(sums)
    weakened = [replace(s, advantage=[a * w for a, w in zip(s.advantage, weights[id(s)])]) if id(s) in weights else s
                for s in samples]
    return weakened, {"nthr/mixed_frac": total["mixed"] / max(total["groups"], 1),
                      "nthr/weakened_frac": total["weakened"] / max(total["lost"], 1)}


def group_weights(model, samples, won, objective, beta):
    """weight_N for each sample of one group."""
    columns = sorted({token for sample in samples for token, sampled in zip(sample.ids, sample.sampled) if sampled})
    read = hidden_and_error(model, samples, columns, objective)
    if not samples:
        return []
    hidden_Nd, error_NV = (torch.cat(own) for own in zip(*read))
    episodes = sorted({sample.episode for sample in samples})
    counts = [sum(sample.sampled) for sample in samples]
    episode_S = torch.tensor([episodes.index(sample.episode) for sample in samples])
    episode_N = episode_S.repeat_interleave(torch.tensor(counts)).to(hidden_Nd.device)
    won_E = torch.tensor([bool(won[episode]) for episode in episodes], device=hidden_Nd.device)
    return nthr_weights(hidden_Nd, error_NV, episode_N, won_E, beta).split(counts)


def hidden_and_error(model, samples, columns, objective):
    """Per sample hidden_Nd, what lm_head read to predict each sampled token, and error_NV, `prediction_error` of
    that token over the vocabulary `columns`; fp32."""
    device = device_of(model)
    column_V = torch.tensor(columns, dtype=torch.long, device=device)

    def of_batch(batch):
        ids_BT, select, target_N, *_ = collate(batch, dict.fromkeys(map(id, batch), 1.0), device)
        hidden_Nd, logits_NV = model(ids_BT, select=select, head="hidden+lm")
        error_NV = prediction_error(logits_NV.float() / objective.temperature, target_N, column_V)
        counts = [sum(sample.sampled) for sample in batch]
        return zip(hidden_Nd.float().split(counts), error_NV.split(counts))

    found = per_sample(model, samples, objective, of_batch)
    return [found[id(sample)] for sample in samples]
