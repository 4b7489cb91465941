"""One optimizer step on samples of the policy and the judge. It knows no algorithm, only advantages and the
loss that it is given.

    L = sum_policy / N_policy + lambda * sum_judge / N_judge        GCD, after arXiv:2509.23870 Eq. 3

The equation is a picture that was not read: lambda and the two divisors are ours. Both counts are taken over
all ranks, so that microbatches and ranks change only the time it takes. A cold-start demonstration is a
sample with advantage 1 and no old logprob: its gradient is that of cross-entropy. Read `update`, then
`token_loss`. Left out: gradient accumulation over steps. Shapes: B samples, of a step or a microbatch, M
tokens of a microbatch, N sampled tokens.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import losses
from batching import collate, device_of, equal_microbatches, layout, samples_of, sequences
from infra import parallel, plugins
from lm import lora
from lm.logprobs import token_logprobs

KINDS = "policy", "judge"
# Of each kind's tokens: what is summed up for `loss_metrics`, and of what the mean is reported
MEANS = "nll_nats", "entropy_nats", "clip_frac", "approx_kl_nats", "logprob_gap_nats"
SAMPLER_MEANS = "sampler_weight", "sampler_cut_frac"
COUNTED = ("loss", "tokens", "trained_tokens", "kl_nats", "gap_max", *MEANS, *SAMPLER_MEANS)


@dataclass(frozen=True, slots=True)
class Objective:
    """The settings of the loss and the step."""

    loss: Callable | None = None          # an algorithm's, as of algorithms.Method; None: clipped_surrogate
    ratio: str = "token"                  # token | turn | episode: what a ratio is of
    sampler_cap: float = 2.0              # see losses.sampler_weight; 0: no such weight
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 0.0                # bound on the loss where the advantage is negative; 0: none
    reduction: str = "token"              # token | episode | constant: see losses.token_weight
    longest: int = 1                      # tokens; the divisor of "constant"
    kl_coef: float = 0.0                  # weight of k3 in the loss; needs logprob_ref
    entropy_coef: float = 0.0             # weight of the entropy, which is subtracted from the policy's loss
    judge_weight: float = 0.1             # lambda
    value_judge: bool = False             # a value head judges, and judge samples have a label
    temperature: float = 1.0              # the sampler's: logprobs are of the distribution sampled from
    max_grad_norm: float = 1.0            # 0: no clipping
    microbatch_tokens: int = 16384        # of a forward pass; a common prefix counts once

    def by_head(self, kind):
        """Whether samples of this kind are turns that a value head judges."""
        return kind == "judge" and self.value_judge


class NonFinite(FloatingPointError):
    """A loss or gradient that is not finite; raised on every rank before the weights change.

    samples: this rank's samples of the step.
    """

    def __init__(self, message, samples=()):
        super().__init__(message)
        self.samples = samples


def update(model, optimizer, samples, objective, lr, compare=False):
    """Take one optimizer step on policy and judge samples. Returns metrics, equal on every rank.

        g = g_policy + judge_weight * g_judge

    then clipped to max_grad_norm. Both kinds share microbatches, in which a common prefix is computed once:
    of a group's episodes in the same minibatch, and of an episode and questions about it. A value head's
    turns have microbatches of their own, as has each kind with `compare`, which measures the two gradients'
    norms and cosine.
    All ranks call this; if none has samples, there is no step, and no metrics. Raises NonFinite.
    """
    sums = {kind: dict.fromkeys(COUNTED, 0.0) for kind in KINDS}      # metrics: the losses below add to them
    by_kind = write_token_weights(samples, objective, sums)
    if not by_kind:
        return {}
    factor = {"policy": 1.0, "judge": objective.judge_weight}
    # gradients to compute, {name: {kind: factor of its loss}}: that of the weighted sum or, with `compare`,
    # one of each kind, which `step` weights
    wanted = ({kind: {kind: 1.0} for kind in by_kind} if compare else
              {"all": {kind: factor[kind] for kind in by_kind}})
    grads = {}
    for name, scale in wanted.items():
        if in_tokens := [kind for kind in scale if not objective.by_head(kind)]:
            trained = with_gradient([s for kind in in_tokens for s in by_kind[kind]], objective)
            for batch in equal_microbatches(trained, objective.microbatch_tokens):
                loss = token_loss(model, batch, objective, scale, sums) if batch else empty_loss(model)
                loss.backward()
        for kind in filter(objective.by_head, scale):
            for batch in equal_microbatches(by_kind[kind], objective.microbatch_tokens):
                loss = value_head_loss(model, batch, sums[kind]) if batch else empty_loss(model, "value")
                (scale[kind] * loss).backward()
        grads[name] = parallel.pop_grads(model)
    metrics = gradient_metrics(grads, factor) | loss_metrics(sums, objective)
    check_finite(samples, {"loss": sums["policy"]["loss"], "judge loss": sums["judge"]["loss"],
                           "gradient norm": metrics["policy/grad_norm"]})
    weighted = [(factor.get(name, 1.0), grad) for name, grad in grads.items()]     # "all" is weighted already
    step(model, optimizer, weighted, metrics["policy/grad_norm"], objective.max_grad_norm, lr)
    return metrics


def token_loss(model, batch, objective, scale, sums):
    """The loss of a microbatch of sampled tokens: the algorithm's, and k3 and the entropy on policy samples
    if asked for.

        L = sum_n scale[kind_n] * weight_n * (sampler_weight_n * loss_n + kl_coef * k3_n - entropy_coef * H_n)

    batch: Samples, policy's and judge's mixed. Adds what `loss_metrics` reports to sums[kind]. PluginError
    if the algorithm's loss returns something else.
    """
    micro = collate(batch, model)
    kinds = [sample.kind for sample in batch for _ in range(sum(sample.sampled))]
    logprob_N, entropy_N = token_logprobs(model, micro, objective.temperature, entropies=True,
                                          entropy_grad=objective.entropy_coef != 0)
    now_N, device = logprob_N.detach(), logprob_N.device
    old_N = now_N if micro.old_N is None else micro.old_N
    ratio_N = (logprob_N - old_N).exp()
    if objective.ratio != "token":
        ratio_N = losses.sequence_ratio(logprob_N, old_N, sequences(batch, objective.ratio).to(device))
    if objective.loss:
        result = objective.loss(ratio_N, micro.advantage_N)
        plugins.refuse(wrong_result(result, ratio_N), objective.loss, "loss")
        loss_N, clipped_N = result
    else:
        loss_N, clipped_N = losses.clipped_surrogate(ratio_N, micro.advantage_N, objective.clip_low,
                                                     objective.clip_high, objective.dual_clip)
    moved_N = (now_N - old_N).clamp(-10, 10)         # by the steps before; its k3 as in losses.kl_k3
    measured = {"nll_nats": -now_N, "entropy_nats": entropy_N, "clip_frac": clipped_N,
                "approx_kl_nats": moved_N.exp() - moved_N - 1}
    if micro.sampler_N is not None and objective.sampler_cap:
        sampler_weight_N, cut_N = losses.sampler_weight(old_N, micro.sampler_N, objective.sampler_cap)
        loss_N = sampler_weight_N * loss_N
        measured |= {"sampler_weight": sampler_weight_N, "sampler_cut_frac": cut_N}
    if "policy" in kinds and (objective.kl_coef or objective.entropy_coef):
        policy_N = torch.tensor([kind == "policy" for kind in kinds], device=device)
        if objective.kl_coef:
            kl_N = losses.kl_k3(logprob_N, micro.reference_N.where(policy_N, now_N))    # the judge's is 0
            loss_N = loss_N + objective.kl_coef * kl_N
            measured["kl_nats"] = kl_N
        if objective.entropy_coef:
            loss_N = loss_N - objective.entropy_coef * entropy_N.where(policy_N, 0.0)
    loss_N = micro.weight_N * loss_N
    gap_N = (now_N - (old_N if micro.sampler_N is None else micro.sampler_N)).abs()
    measure(sums, batch, kinds, loss_N, gap_N, measured)
    return (torch.tensor([scale[kind] for kind in kinds], device=device) * loss_N).sum()


def measure(sums, batch, kinds, loss_N, gap_N, measured):
    """Add to sums[kind] a microbatch's loss (whose weights hold the counts), its largest gap, and each of
    `measured` times the count of its token's sample. kinds: that of each token.
    """
    counts = [sample.count for sample in batch for _ in range(sum(sample.sampled))]
    count_N = torch.tensor(counts, device=loss_N.device)
    measured = {"trained_tokens": torch.ones_like(gap_N)} | measured | {"logprob_gap_nats": gap_N}
    counted = {"loss": loss_N} | {name: count_N * of_token_N for name, of_token_N in measured.items()}
    for kind in {*kinds}:
        here = torch.tensor([n for n, other in enumerate(kinds) if other == kind], device=loss_N.device)
        totals = [of_token_N.detach()[here].double().sum() for of_token_N in counted.values()]
        *totals, largest = torch.stack([*totals, gap_N[here].double().max()]).tolist()
        for name, total in zip(counted, totals):
            sums[kind][name] += total
        sums[kind]["gap_max"] = max(sums[kind]["gap_max"], largest)


def wrong_result(result, ratio_N):
    """What is wrong with what an algorithm's loss returned; "" if nothing, or if its input was not finite."""
    if not (isinstance(result, tuple) and len(result) == 2 and all(map(torch.is_tensor, result))):
        return f"it returned {result!r:.60}; expected two tensors, loss_N and clipped_N"
    shapes = [tuple(tensor.shape) for tensor in (ratio_N, *result)]
    if len({*shapes}) > 1:
        return f"it returned shapes {shapes[1]} and {shapes[2]}; expected that of the ratio, {shapes[0]}"
    if not result[0].requires_grad:
        return "its loss has no gradient; expected a function of the ratio, not detached"
    if not result[0].isfinite().all() and ratio_N.isfinite().all():
        return f"its loss is {result[0][~result[0].isfinite()][0]:g}; expected finite numbers"
    return ""


def value_head_loss(model, batch, sums):
    """Binary cross-entropy of the value head's verdicts on a microbatch, by the samples' weights."""
    logit_B = last_values(model, batch)
    numbers = [(float(sample.label), sample.count, sample.weight) for sample in batch]
    label_B, count_B, weight_B = torch.tensor(numbers, device=logit_B.device).unbind(1)
    loss_B = F.binary_cross_entropy_with_logits(logit_B, label_B, reduction="none")
    now_B = logit_B.detach()
    entropy_B = F.binary_cross_entropy_with_logits(now_B, now_B.sigmoid(), reduction="none")
    sums["nll_nats"] += float((count_B * loss_B.detach()).sum())
    sums["entropy_nats"] += float((count_B * entropy_B).sum())
    for name in ("logprob_gap_nats", "clip_frac", "approx_kl_nats"):     # nothing is sampled, and no ratio
        sums[name] = math.nan
    sums["trained_tokens"] += float(count_B.sum())
    loss = (weight_B * loss_B).sum()
    sums["loss"] += float(loss.detach())
    return loss


def empty_loss(model, head="lm"):
    """A loss of 0 through a forward over padding, for a rank without samples: FSDP needs equal forwards."""
    ids_BT = torch.zeros(1, 16, dtype=torch.long, device=device_of(model))
    return model(ids_BT, column_N=[0], head=head).sum() * 0.0


def write_token_weights(samples, objective, sums):
    """Write each sample's per-token weight, normalized over all ranks, and count the tokens in sums. Returns
    {kind: this rank's samples} of the kinds that any rank has.

    The policy's tokens are weighted by objective.reduction, the judge's all by 1: see losses.token_weight. A
    turn that a value head judges counts as one token.
    """
    parts, weights, units = {}, {}, {}
    for kind in KINDS:
        parts[kind] = part = [sample for sample in samples if sample.kind == kind]
        if not part:
            continue
        by_head, reduction = objective.by_head(kind), objective.reduction if kind == "policy" else "token"
        assert all((sample.label is not None) == by_head for sample in part), (
            f"{kind}: samples have labels where, and only where, a value head judges them")
        tokens_B = torch.tensor([sample.count * (1 if by_head else sum(sample.sampled)) for sample in part])
        episode_B = torch.tensor([sample.episode for sample in part])
        assert (objective.ratio, kind) != ("episode", "policy") or len(episode_B.unique()) == len(part), (
            "an episode in several samples has no ratio of its own")
        weights[kind], units[kind] = losses.token_weight(tokens_B, episode_B, reduction, objective.longest)
        sums[kind]["tokens"] += float(tokens_B.sum())
    units = {kind: max(total, 1.0) for kind, total in parallel.all_sum(units).items()}
    for kind, weight_B in weights.items():
        for sample, weight in zip(parts[kind], weight_B):
            sample.weight = float(weight) * sample.count / units[kind]
    return {kind: part for kind, part in parts.items() if kind in units}


def with_gradient(samples, objective):
    """Samples with a nonzero advantage; all policy samples too if the loss has a KL or the entropy."""
    always = objective.kl_coef or objective.entropy_coef
    return [s for s in samples if any(s.advantage) or (always and s.kind == "policy")]


def check_finite(samples, numbers):
    """Raise NonFinite on all ranks if one of the numbers, {name: number}, is not finite on any."""
    if parallel.any_rank(not math.isfinite(sum(numbers.values()))):
        raise NonFinite(", ".join(f"{name} {number}" for name, number in numbers.items()), samples)


def step(model, optimizer, weighted, norm, max_norm, lr):
    """Step on the sum of weight * gradient over `weighted`, clipped from its `norm` to max_norm (0: not)."""
    scale = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    parallel.set_grads(model, [(scale * weight, grads) for weight, grads in weighted])
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# Metrics

def gradient_metrics(grads, factor):
    """Norm of the weighted sum before clipping; with both kinds also the ratio judge/policy of the unweighted
    norms, and their cosine.

    grads: {kind: a gradient or None for each parameter} or {"all": that of all kinds, weighted}. factor: each
    kind's, {kind: number}.
    """
    if "all" in grads:
        return {"policy/grad_norm": parallel.norm(grads["all"])}
    policy, judge = (parallel.norm(grads[kind]) if kind in grads else 0.0 for kind in KINDS)
    metrics = {"policy/grad_norm": factor["policy"] * policy + factor["judge"] * judge}
    if len(grads) == 2:
        product = parallel.dot(grads["policy"], grads["judge"])
        square = policy**2 + 2 * factor["judge"] * product + (factor["judge"] * judge) ** 2
        metrics["policy/grad_norm"] = math.sqrt(max(square, 0.0))
        metrics["judge/grad_ratio"] = judge / policy if policy else math.nan
        metrics["judge/grad_cosine"] = product / (policy * judge) if policy * judge else math.nan
    return metrics


def loss_metrics(sums, objective):
    """Metrics per kind, over all ranks: the loss before lambda, the number of tokens (a turn that the value
    head judges counts as one), and means over the tokens in the backward pass; nan if there were none."""
    metrics = {}
    for kind, counted in sums.items():
        total, largest = parallel.all_sum(counted), parallel.all_max(counted["gap_max"])
        measured = MEANS + SAMPLER_MEANS if total["sampler_weight"] else MEANS     # never 0 where it is used
        measured += ("kl_nats",) if objective.kl_coef and kind == "policy" else ()
        trained = total["trained_tokens"]
        metrics |= {f"{kind}/{name}": total[name] / (trained or math.nan) for name in measured}
        compared = trained and not math.isnan(total["logprob_gap_nats"])
        metrics |= {f"{kind}/loss": total["loss"] if total["tokens"] else math.nan,
                    f"{kind}/tokens": total["tokens"],
                    f"{kind}/logprob_gap_max_nats": largest if compared else math.nan}
    return metrics


def mean_of(steps):
    """Mean of several steps' metrics over the steps that measured them; nan where none did."""
    keys = dict.fromkeys(key for step in steps for key in step)
    known = {key: [step[key] for step in steps if not math.isnan(step.get(key, math.nan))] for key in keys}
    return {key: sum(values) / len(values) if values else math.nan for key, values in known.items()}


# Logprobs and values without a step

@torch.no_grad()
def per_sample(model, samples, objective, of_batch):
    """Apply of_batch, microbatch -> one result per sample, to all samples; results in the samples' order.

    Ranks may hold different numbers of samples.
    """
    results = {}
    for batch in equal_microbatches(samples, objective.microbatch_tokens):
        if batch:
            results |= zip(map(id, batch), of_batch(batch), strict=True)
        else:
            empty_loss(model)
    parallel.reshard(model)
    return [results[id(sample)] for sample in samples]


def logprobs(model, samples, objective):
    """Each sample's logprobs under `model`, aligned with its ids (0 where not sampled); no value head's."""
    def of_batch(batch):
        logprob_N, _ = token_logprobs(model, collate(batch, model), objective.temperature)
        return [part.tolist() for part in logprob_N.split([sum(sample.sampled) for sample in batch])]

    flat = itertools.chain.from_iterable(per_sample(model, samples, objective, of_batch))
    return [[next(flat) if sampled else 0.0 for sampled in sample.sampled] for sample in samples]


def rescore(model, samples, objective):
    """Replace old logprobs by the trainer's own, and keep the sampler's (in bf16, some 0.02 nats off)."""
    for sample, new in zip(samples, logprobs(model, samples, objective)):
        sample.logprob_sampler, sample.logprob_old = sample.logprob_old, new


def write_reference(model, reference, samples, objective):
    """Write `logprob_ref` of the policy's samples (the judge has no KL).

    reference: a model, which is on the device of `model` only meanwhile; or `model` itself, with its adapters
    off meanwhile.
    """
    policy = [sample for sample in samples if sample.kind == "policy"]
    with lora.disabled(model) if reference is model else parallel.onloaded(model, reference):
        for sample, ref in zip(policy, logprobs(reference, policy, objective)):
            sample.logprob_ref = ref


def write_kl(model, reference, episodes, objective, coef, rescored):
    """Write `turn.kl`, coef * k1 of each token, from the sampler's logprobs or (rescored) the trainer's."""
    samples = [sample for episode in episodes for sample in samples_of(episode)]
    if rescored:
        rescore(model, samples, objective)
    write_reference(model, reference, samples, objective)
    for sample in samples:
        penalties = iter([coef * losses.kl_k1(old, ref) for old, ref, sampled in
                          zip(sample.logprob_old, sample.logprob_ref, sample.sampled) if sampled])
        for turn in sample.turns:
            turn.kl = [next(penalties) for _ in turn.response_ids]


def value_head_probabilities(model, samples, objective):
    """The value head's probability that each sample's turn is good."""
    return per_sample(model, samples, objective, lambda batch: last_values(model, batch).sigmoid().tolist())


def last_values(model, batch):
    """The value head's output, here a logit, at the last token of each sample of a microbatch."""
    return values_at(model, batch, [[len(sample.ids) - 1] for sample in batch])


def values_at(model, batch, positions):
    """value_N in fp32 at the listed positions of each sample of a microbatch."""
    ids_1M, attention, columns_of = layout(batch, model)
    columns = [columns[t] for columns, of_sample in zip(columns_of, positions) for t in of_sample]
    return model(ids_1M, attention, torch.tensor(columns, device=ids_1M.device), "value")
