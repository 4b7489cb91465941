"""Figure 10b: the policy's and the judge's gradients on one batch, and the most that noise lets them agree.

A cosine near 0 between two losses' gradients need not mean that they do not conflict (arXiv:2509.23870,
appendix B): a batch's gradients are noisy, and noise alone takes any cosine to 0. So the batch's tasks are
split into halves at random, again and again; the two halves share no episode:

    r_policy = cos(policy of A, policy of B)    r_judge = cos(judge of A, judge of B)
    between  = mean of cos(policy of A, judge of B) and cos(policy of B, judge of A)
    ceiling  = sqrt(r_policy r_judge)

If the two losses had the same expected gradient, `between` would be about `ceiling`, as in the correction for
attenuation (Spearman, 1904). Of a batch's questions half are good turns and half bad, so what one half of the
tasks has more of one kind, the other has less; what all verdicts share would then enter with opposite signs.
So the splits are those of many in which good and bad are most nearly equal. Left out: runs, means and figures
(lab/studies/coupling.py).
Shapes: U tasks of a batch, X parameters of the model.
"""

import math
import tempfile
from contextlib import ExitStack

import torch

import batching
import config
import gcd
import update
from infra import job, parallel
from infra.streams import generator
from session import prepare

SPLITS, OF, DRAW = 200, 20, 22           # random splits into halves, of so many times as many; their stream
NUMBERS = ("policy", "judge", "between", "whole", "ratio", "imbalance")           # of `half_cosines`


def batch_gradients(run, iteration, i):
    """Play, judge and credit one batch with a kept model of a run, and take its gradients task by task.

    run: a lab.studies.runs.Run whose model is kept after `iteration` iterations; i: the batch's number, which
    names its tasks and random draws as in gcd.iteration (from run.iterations on, none was trained on). No
    step is taken. Returns {"policy": gradient_UX, "judge": gradient_UX}: their sums over U are the gradients
    of the batch's two losses, before the judge's weight. A kind without samples has zeros. And "balance":
    good less bad questions, of each task.
    """
    with tempfile.TemporaryDirectory() as out, ExitStack() as resources:
        flags = ["--model", run.models[iteration], "--demonstrations", 0, "--seed", run.seed, "--out", out]
        settings = config.parsed([*run.flags, *map(str, flags)])
        trained = prepare(settings, job.setup(settings.device), False, resources)
        episodes, _ = gcd.collect(trained, i)
        judged, answers = gcd.judge_turns(trained, i, episodes)
        name_episodes(judged, answers)
        gcd.assign_credit(trained, i, episodes, None)
        samples = [sample for episode in episodes for sample in batching.samples_of(episode)]
        task_of = {episode.index: episode.group for episode in episodes}
        gradients = gradients_by_task(trained.model, samples + answers, trained.objective, task_of)
        balance = dict.fromkeys(sorted({*task_of.values()}), 0.0)
        for question in judged:
            balance[question.episode.group] += 1.0 if question.label == "good" else -1.0
        return gradients | {"balance": torch.tensor([*balance.values()], dtype=torch.double)}


def name_episodes(judged, samples):
    """Write its episode's index to each of a value head's samples, which have the number of their pair."""
    if samples and samples[0].label is not None:
        for question, sample in zip(judged, samples, strict=True):
            sample.episode = question.episode.index


def gradients_by_task(model, samples, objective, task_of):
    """{kind: gradient_UX} of a batch's loss of each kind, by task, in fp32 on the CPU.

    task_of: {episode's index: task}. The samples' weights are those of the whole batch, so the gradients add
    up to the batch's.
    """
    sums = {kind: dict.fromkeys(update.COUNTED, 0.0) for kind in update.KINDS}
    parts, judged = update.weighted_kinds(samples, objective, sums)
    tasks, found = sorted({*task_of.values()}), {}
    for kind in update.KINDS:
        rows = []
        for task in tasks:
            members = [sample for sample in parts.get(kind, []) if task_of[sample.episode] == task]
            if kind not in judged:
                members = update.with_gradient(members, objective)
            for batch in batching.equal_microbatches(members, objective.microbatch_tokens):
                loss = (update.value_head_loss(model, batch, judged[kind], sums[kind]) if kind in judged else
                        update.policy_loss(model, batch, objective, {kind: 1.0}, sums))
                loss.backward()
            grads = parallel.pop_grads(model)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten()
                                   for p, g in zip(model.parameters(), grads)]).cpu())
        found[kind] = torch.stack(rows)
    return found


def half_cosines(gradients, seed):
    """The module's cosines of one batch, means over SPLITS random halves of its tasks, and the whole's.

    gradients: of `batch_gradients`. Returns NUMBERS: "policy", "judge" (r of the halves), "between", "whole"
    (the cosine of the whole batch's two gradients), "ratio" (judge's norm over the policy's) and "imbalance"
    (of good and bad questions in a half); None where a gradient is 0 (in all splits).
    """
    n = len(gradients["policy"])
    stacked_RX = torch.cat([gradients[kind] for kind in update.KINDS]).double()
    product_RR = stacked_RX @ stacked_RX.T                    # R = 2 U rows: all that the cosines need
    rng, half_SU = generator(seed, DRAW), torch.zeros(OF * SPLITS, n, dtype=torch.double)
    for half_U in half_SU:
        half_U[torch.randperm(n, generator=rng)[:n // 2]] = 1.0
    balance_U = gradients.get("balance", torch.zeros(n, dtype=torch.double))
    imbalance_S, order_S = (half_SU @ balance_U - balance_U.sum() / 2).abs().sort(stable=True)
    half_SU = half_SU[order_S[:SPLITS]]
    none_SU = torch.zeros_like(half_SU)
    policy_a, policy_b = (torch.cat([of, none_SU], 1) for of in (half_SU, 1 - half_SU))
    judge_a, judge_b = (torch.cat([none_SU, of], 1) for of in (half_SU, 1 - half_SU))
    policy, judge = (torch.cat(pair)[None] for pair in ((torch.ones(n), torch.zeros(n)),
                                                        (torch.zeros(n), torch.ones(n))))

    def cosines(left_SR, right_SR):
        """The cosines of pairs of sums of rows, without those of a zero vector, as a list."""
        squares = [(side @ product_RR * side).sum(1) for side in (left_SR, right_SR)]
        norm_S = (squares[0].clamp(min=0) * squares[1].clamp(min=0)).sqrt()
        return ((left_SR @ product_RR * right_SR).sum(1) / norm_S)[norm_S > 0].tolist()

    pairs = {"policy": [(policy_a, policy_b)], "judge": [(judge_a, judge_b)],
             "between": [(policy_a, judge_b), (policy_b, judge_a)],
             "whole": [(policy.double(), judge.double())]}
    found = {name: [x for pair in of_pairs for x in cosines(*pair)] for name, of_pairs in pairs.items()}
    norms = [float(gradients[kind].double().sum(0).norm()) for kind in update.KINDS]
    return {name: sum(values) / len(values) if values else None for name, values in found.items()} | {
        "ratio": norms[1] / norms[0] if norms[0] else None, "imbalance": float(imbalance_S[:SPLITS].mean())}


def ceiling(policy, judge):
    """sqrt(r_policy r_judge); None unless both are known and above 0: else a cosine tells nothing."""
    return math.sqrt(policy * judge) if policy and judge and min(policy, judge) > 0 else None
