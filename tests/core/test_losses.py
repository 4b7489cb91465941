"""Tests of losses.py, and of the entropy in lm/logprobs.py, against hand arithmetic, slow loops or autograd.

    python -m pytest tests/core/test_losses.py          # group_relative_advantage: algorithms/test_rewards.py
"""

import math
import random
import statistics

import pytest
import torch

import losses
from lm import logprobs


@pytest.fixture(autouse=True)
def fixed_seed():
    """Seed torch before every test, so that its numbers do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.mark.parametrize("ratio, advantage, gradient", [
    (1.5, 1.0, 0.0), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.0), (1.1, 1.0, -1.1),
    (1.1, -2.0, 2.2)])
def test_clipping_removes_the_gradient_on_the_right_side(ratio, advantage, gradient):
    """d loss / d logprob is -ratio * A if the surrogate is not clipped, else 0."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, clipped = losses.clipped_surrogate(logprob.exp(), torch.tensor([advantage]), 0.2, 0.28)
    loss.sum().backward()
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert clipped.item() == (gradient == 0.0)


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (2.9, -2.0, 5.8, 5.8), (3.5, -2.0, 6.0, 0.0), (3.5, 2.0, -2.56, 0.0), (0.5, -2.0, 1.6, 0.0),
    (1.1, 2.0, -2.2, -2.2)])
def test_dual_clip_bounds_the_loss_of_negative_advantages_only(ratio, advantage, loss, gradient):
    """c = 3: arXiv:1912.09729 maximizes max(min(r A, clip(r) A), c A) for A < 0."""
    logprob, advantage = torch.tensor([math.log(ratio)], requires_grad=True), torch.tensor([advantage])
    got, clipped = losses.clipped_surrogate(logprob.exp(), advantage, 0.2, 0.28, 3.0)
    got.sum().backward()
    assert (got.item(), logprob.grad.item()) == pytest.approx((loss, gradient), abs=1e-5)
    assert clipped.item() == (gradient == 0.0)


def test_kl_estimates_have_the_mean_kl_and_k3_has_the_gradient_of_the_kl_from_the_reference():
    """E_pi[k1] = E_pi[k3] = KL(pi||ref); as a loss on samples, k3 has the gradient of KL(ref||pi)."""
    logits = torch.randn(6, dtype=torch.double, requires_grad=True)
    ref = torch.randn(6, dtype=torch.double).log_softmax(0)
    logprob = logits.log_softmax(0)
    p = logprob.exp().detach()
    kl = (p * (logprob.detach() - ref)).sum()
    assert torch.isclose((p * losses.kl_k1(logprob.detach(), ref)).sum(), kl)
    assert torch.isclose((p * losses.kl_k3(logprob.detach(), ref)).sum(), kl)
    got, = torch.autograd.grad((p * losses.kl_k3(logprob, ref)).sum(), logits, retain_graph=True)
    want, = torch.autograd.grad((ref.exp() * (ref - logprob)).sum(), logits)
    assert torch.allclose(got, want)


def test_the_samplers_weight_by_hand():
    """pi_old over pi_sampler, at most the cap."""
    old, sampler = torch.tensor([0.5, 0.2, 0.9]).log(), torch.tensor([0.25, 0.4, 0.3]).log()
    weight, cut = losses.sampler_weight(old, sampler, 2.5)
    assert weight.tolist() == pytest.approx([2.0, 0.5, 2.5]) and cut.tolist() == [False, False, True]


def test_kl_k3_is_never_negative_and_clamped():
    far = losses.kl_k3(torch.tensor([-100.0, 0.0, 1.0, 100.0]), torch.tensor([0.0, 0.0, 0.5, 0.0]))
    assert (far >= 0).all() and far[1] == 0 and far[0] == pytest.approx(math.exp(10) - 11, rel=1e-5)
    assert far[3] == pytest.approx(math.exp(-10) + 9, rel=1e-5)


@pytest.mark.parametrize("reduction", ["token", "episode", "constant"])
def test_reductions_do_not_depend_on_how_episodes_are_split_into_samples(reduction):
    """One sample per episode or one per turn: the weighted sum over the units is that of the slow loop."""
    rng = random.Random(3)
    episodes = [[[rng.random() for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 4))]
                for _ in range(6)]

    def reduced(split):
        samples = [(e, tokens) for e, turns in enumerate(episodes) for tokens in split(turns)]
        weight, units = losses.token_weight(torch.tensor([len(t) for _, t in samples]),
                                            torch.tensor([e for e, _ in samples]), reduction, longest=20)
        return sum(w * sum(t) for w, (_, t) in zip(weight.tolist(), samples)) / units

    flat = [[x for turn in turns for x in turn] for turns in episodes]
    slow = {"token": statistics.fmean(x for f in flat for x in f),
            "episode": statistics.fmean(statistics.fmean(f) for f in flat),
            "constant": statistics.fmean(sum(f) / 20 for f in flat)}[reduction]
    assert reduced(lambda turns: turns) == pytest.approx(slow, abs=1e-6)
    assert reduced(lambda turns: [[x for turn in turns for x in turn]]) == pytest.approx(slow, abs=1e-6)


def test_entropy_is_that_of_torch():
    logits = torch.randn(4, 9)
    want = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(logprobs.entropy(logits.log_softmax(-1)), want, atol=1e-6)
