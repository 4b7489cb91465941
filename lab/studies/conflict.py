"""Figure 10b: whether the policy's and the judge's gradients agree, and how much of a batch's is noise.

A cosine near 0 between two losses' gradients on a batch need not mean that they do not conflict
(arXiv:2509.23870, appendix B): the gradients are noisy, and noise alone takes any cosine to 0. So a kept
model gets many batches. Two batches share no task and no draw, and the mean product of their gradients is
that of the expected ones; a batch's product with itself is larger by the noise. With g_b, h_b the gradients
of policy and judge on batch b, and means over pairs b != c:

    r_policy = mean g_b . g_c / mean |g_b|^2          r_judge = mean h_b . h_c / mean |h_b|^2
    between  = mean g_b . h_c / sqrt(mean |g_b|^2 mean |h_b|^2)
    cosine   = between / sqrt(r_policy r_judge)       of the expected gradients

r is the share of a batch's squared norm that is no noise, and sqrt(r_policy r_judge) the cosine that equal
expected gradients would have between batches (the correction for attenuation: Spearman, 1904). An r is small
and may come out below 0, so the ratio is taken of means over seeds, whose interval is the jackknife's. Left
out: runs and figures (lab/studies/coupling.py).
Shapes: B batches, X parameters that both losses have: all but the value head's own.
"""

import math
import tempfile
from contextlib import ExitStack
from dataclasses import replace

import torch

import batching
import config
import gcd
import update
from infra import job
from lab.bench.intervals import interval, mean_known
from lm import model as decoder
from session import prepare

BATCHES = 64                                                       # for each model
NUMBERS = ("policy", "judge", "between", "same", "ratio")          # of `products`


def batch_gradients(run, iteration, n):
    """Play, judge and credit n batches with a kept model of a run, and take the gradients of the two losses.

    run: a lab.studies.runs.Run whose model is kept after `iteration` iterations. The batches' numbers, which
    name their tasks and random draws as in gcd.iteration, go on from run.iterations: on none of the tasks it
    was trained. No step is taken. Returns {"policy": gradient_BX, "judge": gradient_BX}, before the judge's
    weight and without clipping; rows of zeros where there is no sample.
    """
    found = {kind: [] for kind in update.KINDS}
    with tempfile.TemporaryDirectory() as out, ExitStack() as resources:
        flags = ["--model", run.models[iteration], "--demonstrations", 0, "--seed", run.seed, "--out", out]
        settings = config.parse([*run.flags, *map(str, flags)])
        trained = prepare(settings, job.setup(settings.device), False, resources)
        for i in range(run.iterations, run.iterations + n):
            episodes, _ = gcd.collect(trained, i)
            _, answers, _ = gcd.judge_turns(trained, i, episodes)
            gcd.assign_credit(trained, i, episodes, None)
            samples = [sample for episode in gcd.drop_zero_advantage_groups(trained, episodes)
                       for sample in batching.samples_of(episode)]
            for kind, gradient_X in gradients(trained.model, samples + answers, trained.objective).items():
                found[kind].append(gradient_X)
    return {kind: torch.stack(rows) for kind, rows in found.items()}


class Recorder:
    """An optimizer that keeps the gradient, in place of a step."""

    param_groups = ()

    def __init__(self, model):
        self.parameters = [p for name, p in model.named_parameters() if name not in decoder.VALUE_HEAD]
        self.gradient_X = torch.zeros(sum(p.numel() for p in self.parameters))

    def step(self):
        """Keep the gradient."""
        self.gradient_X = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu()
                                     for p in self.parameters])

    def zero_grad(self, set_to_none):
        """Drop it from the parameters."""
        for p in self.parameters:
            p.grad = None


def gradients(model, samples, objective):
    """{kind: gradient_X} of the losses of samples of both kinds, by `update.update`."""
    alone, found = replace(objective, judge_weight=1.0, max_grad_norm=0.0), {}
    for kind in update.KINDS:
        recorder = Recorder(model)
        update.update(model, recorder, [sample for sample in samples if sample.kind == kind], alone, 0.0)
        found[kind] = recorder.gradient_X
    return found


def products(policy_BX, judge_BX):
    """The module's numbers of one model: NUMBERS, None where a gradient is 0 in all batches.

    "policy", "judge": r. "same": as "between", of gradients of the same batch. "ratio": the judge's norm over
    the policy's, root mean squares over batches.
    """
    stacked_RX = torch.cat([policy_BX, judge_BX]).double()
    n, product_RR = len(policy_BX), stacked_RX @ stacked_RX.T                 # R = 2 B rows
    blocks = {"policy": product_RR[:n, :n], "judge": product_RR[n:, n:], "between": product_RR[:n, n:]}
    same = {name: float(block.trace()) / n for name, block in blocks.items()}
    other = {name: float(block.sum() - block.trace()) / (n * (n - 1)) for name, block in blocks.items()}
    norms = math.sqrt(same["policy"] * same["judge"])

    def share(product, norm):
        return product / norm if norm else None

    return {"policy": share(other["policy"], same["policy"]), "judge": share(other["judge"], same["judge"]),
            "between": share(other["between"], norms), "same": share(same["between"], norms),
            "ratio": math.sqrt(same["judge"] / same["policy"]) if same["policy"] else None}


def ceiling(policy, judge):
    """sqrt(r_policy r_judge), 0 where one is below 0."""
    return math.sqrt(max(policy, 0.0) * max(judge, 0.0))


def cosine(points):
    """The cosine of the expected gradients, an interval over seeds; None if it cannot be told.

    points: {seed: `products` of models at the same stages of their runs}. Of each stage `between` and r are
    means over seeds; the sum over stages of `between` is divided by that of the ceilings, which makes 1 of
    equal expected gradients. The interval is that of the jackknife's values, n t - (n - 1) t_without_seed
    (Tukey, 1958), whose mean also corrects most of the ratio's bias.
    """
    def of(seeds):
        stages = [[mean_known(point[key] for point in stage) or 0.0 for key in ("policy", "judge", "between")]
                  for stage in zip(*(points[seed] for seed in seeds), strict=True)]
        most = sum(ceiling(policy, judge) for policy, judge, _ in stages)
        return sum(between for *_, between in stages) / most if most else None

    seeds = [*points]
    n, found, without = len(seeds), of(seeds), {}
    for seed in seeds if n > 1 else ():
        without[seed] = of([other for other in seeds if other != seed])
    if found is None or None in without.values():
        return None
    return interval({seed: n * found - (n - 1) * less for seed, less in without.items()} or {seeds[0]: found})
