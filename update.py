"""Samples → one optimizer step. It knows no algorithm: a sample has its sampled tokens and their advantages.

A policy episode is a sample (or several, see `samples_of`), a judge's answer is one, and so is a cold-start
demonstration (advantage 1, no old logprob: its gradient is that of cross-entropy). The objective of one step:

    L = sum_policy / N_policy + weight * sum_judge / N_judge              GCD, arXiv:2509.23870 Eq. 3

with both counts taken over all ranks, so that microbatches and ranks change nothing but the time it takes.
Left out: accumulation over steps, and optimizers but AdamW and Muon. Shapes: B rows of a microbatch, T
positions, N sampled tokens of it, V vocabulary, S samples.
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
    turns: list = field(default_factory=list)       # rollout.Turns that it is made of, in order, or about
    allowed: dict = field(default_factory=dict)     # {place: the ids that its token was drawn from}; else all

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


def adam(model, but=()):
    """AdamW of a model's parameters `but` some; its learning rate is set at each step. Fused on CUDA: no
    temporaries."""
    others = {id(parameter) for parameter in but}
    return torch.optim.AdamW([p for p in model.parameters() if id(p) not in others], lr=0.0,
                             betas=(0.9, 0.999), weight_decay=0.0,
                             fused=True if device_of(model).type == "cuda" else None)


class Muon:
    """Muon for the matrices of the layers, AdamW for all else, as one optimizer: what learns from nothing
    needs fewer steps with it (results/tries_alfworld.md).

    torch's, with the step's size matched to AdamW's (arXiv:2502.16982 Eq. 4), so that one learning rate will
    do. A matrix over several ranks is gathered, stepped whole on each, and parted again.
    """

    def __init__(self, model):
        self.matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        self.whole = [parallel.whole(p) for p in self.matrices]
        self.parts = (torch.optim.Muon(self.whole, lr=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                      adam(model, but=self.matrices))
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self):
        """Step on the parameters' gradients."""
        for matrix, whole in zip(self.matrices, self.whole):
            whole.grad = None if matrix.grad is None else parallel.whole(matrix.grad)
        for part in self.parts:
            part.step()
        for matrix, whole in zip(self.matrices, self.whole):
            parallel.put_whole(matrix, whole)

    def states(self):
        """(a part, its parameter) in a fixed order."""
        return [(part, parameter) for part in self.parts for group in part.param_groups
                for parameter in group["params"]]

    def saved(self):
        """All that it remembers, as plain tensors on the CPU of every rank: for `load`, at any number."""
        return [{key: parallel.whole(value).cpu() for key, value in part.state[parameter].items()}
                for part, parameter in self.states()]

    def load(self, saved):
        """Remember what another of the same model has saved."""
        for (part, parameter), state in zip(self.states(), saved, strict=True):
            if part.defaults.get("fused"):                   # it counts its steps where the parameter is
                state = {key: tensor.to(parameter.device) for key, tensor in state.items()}
            part.state[parameter] = {key: parallel.laid_out_as(parameter, t) for key, t in state.items()}

    def zero_grad(self, set_to_none=True):
        """Forget them."""
        for parameter in (*self.matrices, *self.whole, *self.parts[1].param_groups[0]["params"]):
            parameter.grad = None


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


class Row:
    """Samples in one row of tokens, in which what they begin with in common is there, and is run, once.

    ids: the row's. columns: for each sample those of its tokens. parts: see lm.attention.Rows.
    """

    def __init__(self, samples):
        self.samples, self.ids, self.columns, self.parts = samples, [], [], []
        for sample in samples:
            shared = [columns[:alike(sample.ids, other.ids)] for other, columns in zip(samples, self.columns)]
            before = max(shared, key=len, default=[])
            new = range(len(self.ids), len(self.ids) + len(sample.ids) - len(before))
            self.columns.append([*before, *new])
            self.ids = self.ids + sample.ids[len(before):]
            self.parts += [(len(new), before)] if new else []


def alike(a, b):
    """How many ids two lists begin with in common."""
    known, end = 0, min(len(a), len(b))
    while known < end:
        middle = (known + end + 1) // 2
        known, end = (middle, end) if a[known:middle] == b[known:middle] else (known, middle - 1)
    return known


def rows_of(samples):
    """The samples in Rows, shortest first: those with a turn in common in one, as a judged turn's answers and
    the episode that it is of."""
    found, of_turn = [], {}
    for sample in samples:
        together = next((of_turn[id(turn)] for turn in sample.turns if id(turn) in of_turn), None)
        if together is None:
            found.append(together := [])
        together.append(sample)
        of_turn |= {id(turn): together for turn in sample.turns}
    return sorted(map(Row, found), key=lambda row: len(row.ids))


def microbatches(samples, max_tokens, packed=False):
    """Samples, by length, in lists of at most max_tokens; where rows are padded, padding counts (but for what
    rounds them up to 16). A row is never parted."""
    batches, tokens = [], 0
    for row in rows_of(samples):
        n = len(row.ids)
        tokens = tokens + n if packed else n * (len(batches[-1]) + 1) if batches else n
        if not batches or tokens > max_tokens:
            batches.append([])
            tokens = n
        batches[-1].append(row)
    return [[sample for row in batch for sample in row.samples] for batch in batches]


def packing(model):
    """The attention for packed rows, where the device has one; None: rows are padded."""
    return varlen(device_of(model), model.compute_dtype, model.config.head_dim)


def laid_out(samples, model):
    """A microbatch for a forward: ids_BT, their place (lm.attention), and place_of(i, t), the row and the
    column of sample i's token t."""
    device, attention, rows = device_of(model), packing(model), rows_of(samples)
    first = itertools.accumulate([len(row.ids) for row in rows], initial=0)       # of each row, where packed
    where = {id(sample): (0, start, columns) if attention else (b, 0, columns)
             for b, (row, start) in enumerate(zip(rows, first))
             for sample, columns in zip(row.samples, row.columns)}

    def place_of(i, t):
        b, start, columns = where[id(samples[i])]
        return b, start + columns[t]

    parts = [row.parts for row in rows]
    if attention:
        ids_1T = torch.tensor([[token for row in rows for token in row.ids]], device=device)
        return ids_1T, Packed(parts, device, attention), place_of
    longest = bucket(max(len(row.ids) for row in rows), 16)
    ids_BT = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows], device=device)
    return ids_BT, Rows(longest, device, parts), place_of


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
        assert known in (0, len(samples)) or name == "logprob_ref", (
            f"{name} is known for some samples of a microbatch only")
        columns = [column or [math.nan] * len(sample.ids) for sample, column in zip(samples, columns)]
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
    write_reference(model, reference, samples, objective)
    for sample in samples:
        penalties = iter([coef * kl_k1(old, new) for old, new, sampled in
                          zip(sample.logprob_old, sample.logprob_ref, sample.sampled) if sampled])
        for turn in sample.turns:
            turn.kl = [next(penalties) for _ in turn.response_ids]


def write_reference(model, reference, samples, objective):
    """Write the `logprob_ref` of the policy's samples; the judge has no KL. The reference is on the model's
    device for that time."""
    policy = [sample for sample in samples if sample.kind == "policy"]
    with parallel.beside(model, reference):
        for sample, ref in zip(policy, score(reference, policy, objective)):
            sample.logprob_ref = ref


def padded(batches):
    """The list with empty microbatches up to the longest rank's: FSDP ranks make equally many forwards."""
    return batches + [[]] * (int(parallel.all_max(len(batches))) - len(batches))


def empty_forward(model, head="lm"):
    """A loss of 0 by a forward over padding, so that its backward touches what a real one touches."""
    ids_BT = torch.zeros(1, 16, dtype=torch.long, device=device_of(model))
    return model(ids_BT, select=([0], [0]), head=head).sum() * 0.0


def backward(model, samples, objective, head, loss_of):
    """Backward through the samples, equally many microbatches on all ranks."""
    for batch in padded(microbatches(samples, objective.microbatch_tokens, packing(model))):
        loss = loss_of(batch) if batch else empty_forward(model, head)
        loss.backward()


def loud(samples, objective):
    """Those of the samples that have a gradient: by their advantages, or by the KL, which is the policy's."""
    return [s for s in samples if not s.silent or (objective.kl_coef and s.kind == "policy")]


def accumulate(model, of_kind, objective, scale, sums):
    """Backward through samples, {kind: its own}: the gradient of the losses, each times its kind's scale,
    stays in .grad, counts go to sums[kind]."""
    for kind, samples in of_kind.items():
        tokens_S = torch.tensor([sum(sample.sampled) * sample.count for sample in samples])
        episode_S = torch.tensor([sample.episode for sample in samples])
        reduction = objective.reduction if kind == "policy" else "token"
        weight_S, units = token_weight(tokens_S, episode_S, reduction, objective.longest)
        units = max(parallel.all_sum(units), 1.0)
        for sample, weight in zip(samples, weight_S):
            sample.weight = float(weight) * sample.count / units
        sums[kind]["tokens"] += float(tokens_S.sum())
    backward(model, loud([*itertools.chain(*of_kind.values())], objective), objective, "lm",
             lambda batch: batch_loss(model, batch, objective, scale, sums))


def batch_loss(model, batch, objective, scale, sums):
    """Weighted loss of one microbatch; adds what `loss_metrics` reports to `sums`."""
    *where, target_N, advantage_N, weight_N, old_N, ref_N, allowed = collate(batch, model)
    kinds, device = [sample.kind for sample in batch for _ in range(sum(sample.sampled))], target_N.device
    logprob_N, entropy_N = token_logprobs(model, *where, target_N, objective.temperature, allowed,
                                          entropies=True)
    now_N = logprob_N.detach()
    old_N = now_N if old_N is None else old_N
    loss_N, clipped_N = clipped_policy_loss(logprob_N, old_N, advantage_N,
                                            objective.clip_low, objective.clip_high, objective.dual_clip)
    kl_N = torch.zeros_like(now_N)
    if objective.kl_coef and "policy" in kinds:
        judge_N = torch.tensor([kind == "judge" for kind in kinds], device=device)
        kl_N = kl_k3(logprob_N, ref_N.where(~judge_N, now_N))          # the judge's is 0, without a gradient
        loss_N = loss_N + objective.kl_coef * kl_N
    loss_N, gap_N = weight_N * loss_N, (now_N - old_N).abs()
    added = {"loss": loss_N, "nll": -now_N, "entropy": entropy_N, "clipped": clipped_N, "kl": kl_N,
             "gap": gap_N}
    for kind in {*kinds}:
        here = torch.tensor([n for n, other in enumerate(kinds) if other == kind], device=device)
        found = [of_token_N.detach()[here].double() for of_token_N in added.values()]
        *totals, largest = torch.stack([*(of_kind.sum() for of_kind in found), found[-1].max()]).tolist()
        for name, total in zip(added, totals):
            sums[kind][name] += total
        sums[kind]["scored"] += len(here)
        sums[kind]["gap_max"] = max(sums[kind]["gap_max"], largest)
    return (torch.tensor([scale[kind] for kind in kinds], device=device) * loss_N).sum()


def update(model, optimizer, samples, objective, lr, compare=False):
    """One optimizer step on the samples (policy and judge). Returns metrics, equal on every rank.

        g = g_policy + weight * min(1, cap * |g_policy| / (weight * |g_judge|)) * g_judge

    then clipped to max_grad_norm. Without a cap the two kinds are backpropagated as one loss, and answers go
    on from their episode's row; with one, or to compare the two gradients, each kind for itself. Raises
    NonFinite as `step` does.
    """
    of_kind = {kind: [s for s in samples if s.kind == kind] for kind in ("policy", "judge")}
    of_kind = {kind: members for kind, members in of_kind.items() if parallel.any_rank(bool(members))}
    counted = ("loss", "tokens", "scored", "nll", "entropy", "clipped", "kl", "gap", "gap_max")
    sums = {kind: dict.fromkeys(counted, 0.0) for kind in ("policy", "judge")}
    weight = {"policy": 1.0, "judge": objective.judge_weight}
    if compare or objective.judge_grad_cap:
        grads = {}
        for kind, members in of_kind.items():
            backpropagate(model, {kind: members}, objective, {kind: 1.0}, sums)
            grads[kind] = parallel.take_grads(model)
        norms = {kind: parallel.norm(g) for kind, g in grads.items()}
        if objective.judge_grad_cap and weight["judge"] * norms.get("judge", 0.0) > 0:
            cap = objective.judge_grad_cap * norms.get("policy", 0.0) / (weight["judge"] * norms["judge"])
            weight["judge"] *= min(1.0, cap)
        metrics = gradient_metrics(grads, norms, weight)
        weighted = [(weight[kind], grad) for kind, grad in grads.items()]
    else:
        backpropagate(model, of_kind, objective, weight, sums)
        grads = parallel.take_grads(model)
        metrics, weighted = {"policy/grad_norm": parallel.norm(grads)}, [(1.0, grads)]
    metrics |= loss_metrics(sums) | ({"judge/weight": weight["judge"]} if len(of_kind) == 2 else {})
    losses = {"loss": metrics["policy/loss"], "judge loss": metrics["judge/loss"]}
    step(model, optimizer, weighted, losses, metrics["policy/grad_norm"], objective.max_grad_norm, lr)
    return metrics


def backpropagate(model, of_kind, objective, scale, sums):
    """`accumulate`, but for labelled samples, a kind of which is labelled whole, `accumulate_labels`."""
    labelled = [kind for kind, members in of_kind.items()
                if parallel.any_rank(any(sample.label is not None for sample in members))]
    for kind, members in of_kind.items():
        assert all((s.label is not None) == (kind in labelled) for s in members), (
            f"{kind}: some labelled, some not")
    if spoken := {kind: members for kind, members in of_kind.items() if kind not in labelled}:
        accumulate(model, spoken, objective, scale, sums)
    for kind in labelled:
        accumulate_labels(model, of_kind[kind], objective, scale[kind], sums[kind])


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
    (unweighted) and their cosine."""
    policy, judge = norms.get("policy", 0.0), norms.get("judge", 0.0)
    metrics = {"policy/grad_norm": weight["policy"] * policy + weight["judge"] * judge}
    if len(grads) == 2:
        product = parallel.dot(grads["policy"], grads["judge"])
        square = policy**2 + 2 * weight["judge"] * product + (weight["judge"] * judge) ** 2
        metrics["policy/grad_norm"] = math.sqrt(max(square, 0.0))
        metrics["judge/grad_ratio"] = judge / policy if policy else math.nan
        metrics["judge/grad_cosine"] = product / (policy * judge) if policy * judge else math.nan
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


def accumulate_labels(model, samples, objective, scale, sums):
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
        loss = (count_B * loss_B).sum() / units
        sums["loss"] += float(loss.detach())
        return scale * loss

    backward(model, samples, objective, "value", loss_of)
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
