"""Tests the closed forms of lab/studies/tilting.py by numerical optima, enumeration and known values.

    python -m pytest tests/lab/test_tilting.py
"""

import itertools
import math

import pytest
import torch

from lab.studies import tilting
from losses import kl_k3

REWARD_Y = torch.tensor([0.0, 1.0, 0.0, 1.0, 0.3, -0.5, 0.0, 1.0], dtype=torch.double)
GRID = [1e-6, 1e-3, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999]


def random_logprob(n, seed=0):
    """Log-probabilities of a random policy over n responses."""
    draws = torch.randn(n, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    return (1.5 * draws).log_softmax(-1)


def optimum(reward_Y, logprob_Y, beta):
    """Log-probabilities of the policy that maximizes E[r] - beta KL(pi || pi_ref), by L-BFGS from uniform."""
    logit_Y = torch.zeros_like(logprob_Y, requires_grad=True)
    optimizer = torch.optim.LBFGS([logit_Y], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-15,
                                  line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        policy_Y = logit_Y.log_softmax(-1)
        value = (policy_Y.exp() * (beta * (policy_Y - logprob_Y) - reward_Y)).sum()
        value.backward()
        return value

    optimizer.step(loss)
    return logit_Y.detach().log_softmax(-1)


def groups(p, group):
    """Every sequence of a group's rewards, with its probability."""
    for rewards in itertools.product((0, 1), repeat=group):
        yield rewards, math.prod(p if reward else 1 - p for reward in rewards)


# The tilted optimum

@pytest.mark.parametrize("beta", [0.3, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_tilted_mass_is_that_of_the_numerical_optimum(beta, seed):
    logprob_Y, reward_Y = random_logprob(8, seed), (REWARD_Y == 1).double()
    q, best = (float(of_Y.exp() @ reward_Y) for of_Y in (logprob_Y, optimum(reward_Y, logprob_Y, beta)))
    assert tilting.tilted(q, beta) == pytest.approx(best, abs=1e-6)
    assert [tilting.tilted(q, beta) for q in (0, 1)] == [0, 1]


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_no_response_of_the_optimum_changes_by_more_than_one_over_beta_nats(beta):
    """The bound on what a run with a KL may have grown, which origin's toy is compared with."""
    logprob_Y, reward_Y = random_logprob(8), (REWARD_Y == 1).double()
    change_Y = optimum(reward_Y, logprob_Y, beta) - logprob_Y
    assert 0 < float(change_Y.max()) <= 1 / beta + 1e-6 and -1 / beta - 1e-6 <= float(change_Y.min()) < 0
    assert float(change_Y[reward_Y == 1].max() - change_Y[reward_Y == 1].min()) < 1e-5     # alike, if equal


@pytest.mark.parametrize("q, beta, p, digits", [(1e-3, 1, 0.0027, 4), (0.1, 1, 0.232, 3), (0.5, 1, 0.731, 3),
                                                (1e-6, 0.1, 0.022, 3), (1e-3, 0.1, 0.957, 3)])
def test_known_values(q, beta, p, digits):
    assert round(tilting.tilted(q, beta), digits) == p


def test_sigmoid_inverts_logit_and_neither_overflows():
    for p in GRID:
        assert tilting.sigmoid(tilting.logit(p)) == pytest.approx(p, rel=1e-12)
    assert (tilting.logit(0), tilting.logit(1), tilting.logit(0.5)) == (-math.inf, math.inf, 0)
    assert [tilting.sigmoid(x) for x in (-math.inf, -1e4, 0, 1e4, math.inf)] == [0, 0, 0.5, 1, 1]


# k3 in the loss

def test_the_expected_gradient_of_k3_is_that_of_forward_kl():
    """Averaged over pi; the gradient goes through the logarithms only, as in a sampled loss."""
    logprob_ref_Y = random_logprob(6, 1)
    logit_Y = random_logprob(6, 2).requires_grad_()
    policy_Y = logit_Y.log_softmax(-1)
    sampled, = torch.autograd.grad(policy_Y.detach().exp() @ kl_k3(policy_Y, logprob_ref_Y), logit_Y,
                                   retain_graph=True)
    forward, = torch.autograd.grad(logprob_ref_Y.exp() @ (logprob_ref_Y - policy_Y), logit_Y,
                                   retain_graph=True)
    reverse, = torch.autograd.grad(policy_Y.exp() @ (policy_Y - logprob_ref_Y), logit_Y)
    torch.testing.assert_close(sampled, forward, atol=1e-12, rtol=0)
    assert (sampled - reverse).abs().max() > 0.01


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 3.0])
def test_k3_stops_where_reward_and_penalty_cancel(beta):
    for q in GRID:
        p = tilting.k3_mass(q, beta)
        assert q < p < 1 and p * (1 - p) == pytest.approx(beta * (p - q), abs=1e-12)
        logit = torch.tensor([0.0, tilting.logit(p)], dtype=torch.double, requires_grad=True)
        policy, reference = logit.log_softmax(-1), torch.tensor([1 - q, q], dtype=torch.double).log()
        penalty = policy.detach().exp() @ kl_k3(policy, reference, limit=50.0)     # the default 10 would clip
        (policy.exp()[1] - beta * penalty).backward()
        assert float(logit.grad.abs().max()) < 1e-12
    assert tilting.k3_mass(0.001, 0.5) == pytest.approx(0.501, abs=5e-5)


@pytest.mark.parametrize("value", [1e-9, 0.1, 0.5, 0.9, 1.0])
def test_k3_of_one_decision_stops_where_its_value_and_the_penalty_cancel(value):
    for q, beta in itertools.product(GRID, (0.1, 0.5, 3.0)):
        p = tilting.k3_mass(q, beta, value)
        assert q <= p < 1 and value * p * (1 - p) == pytest.approx(beta * (p - q), rel=1e-6, abs=1e-12)
    assert tilting.k3_mass(0.3, 0.5, 0.0) == 0.3


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_k3_token_by_token_stops_where_the_enumerated_gradient_is_zero(group, seed):
    """Against gradient ascent for a table of a policy's tokens: all eight responses of three letters of two.

    The gradient is the sum over all responses of (1 - 1/G) (R - mean R) and of k3 at each token. For groups
    of 2 it is also the sum over all pairs of responses, with the pair's own mean.
    """
    draws = torch.randn(7, 2, dtype=torch.double, generator=torch.Generator().manual_seed(seed))
    base_N2, right, beta = (1.5 * draws).log_softmax(-1), 5, 0.5
    node_YK = torch.tensor([[2**k - 1 + (y >> (3 - k)) for k in range(3)] for y in range(8)])   # a heap
    letter_YK = torch.tensor([[y >> (2 - k) & 1 for k in range(3)] for y in range(8)])
    reward_Y = torch.zeros(8, dtype=torch.double)
    reward_Y[right] = 1

    def objective(logit_N2, pairs):
        logprob_YK = logit_N2.log_softmax(-1)[node_YK, letter_YK]
        chance_Y = logprob_YK.sum(1).detach().exp()
        penalty = chance_Y @ kl_k3(logprob_YK, base_YK, limit=50.0).sum(1)
        if not pairs:
            advantage_Y = (1 - 1 / group) * (reward_Y - chance_Y @ reward_Y)
            return (chance_Y * advantage_Y) @ logprob_YK.sum(1) - beta * penalty
        total = torch.zeros((), dtype=torch.double)
        for a, b in itertools.product(range(8), repeat=2):
            half = (reward_Y[a] - reward_Y[b]) / 2                                # R less the pair's own mean
            total = total + chance_Y[a] * chance_Y[b] * half * (logprob_YK[a].sum() - logprob_YK[b].sum()) / 2
        return total - beta * penalty

    base_YK = base_N2[node_YK, letter_YK]
    logit_N2 = base_N2.clone().requires_grad_()
    for _ in range(1200):
        grad, = torch.autograd.grad(objective(logit_N2, pairs=False), logit_N2)
        with torch.no_grad():
            logit_N2 += 2 * grad
    end_YK = logit_N2.log_softmax(-1)[node_YK, letter_YK]
    found = tilting.k3_tokens(base_YK[right].exp().tolist(), beta, group)
    assert found == pytest.approx(float(end_YK.detach()[right].sum().exp()), abs=1e-3)
    of_response = tilting.k3_mass(float(base_YK[right].sum().exp()), beta)
    assert abs(of_response - found) > 0.02                   # whole responses have another curve
    if group == 2:
        one, other = (torch.autograd.grad(objective(logit_N2, pairs), logit_N2)[0] for pairs in (False, True))
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


# Rewards over their std

@pytest.mark.parametrize("q, beta", [(0.1, 1.0), (0.1, 2.0), (0.01, 5.0), (0.3, 2.0), (0.5, 2.0), (0.5, 10.0),
                                     (0.9, 10.0)])
def test_rewards_over_their_std_have_a_fixed_point_at_a_large_beta(q, beta):
    p = tilting.std_mass(q, beta)
    assert q < p < 1
    assert tilting.logit(p) == pytest.approx(tilting.logit(q) + 1 / (beta * math.sqrt(p * (1 - p))), abs=1e-4)


@pytest.mark.parametrize("q", [1e-4, 0.001, 0.02, 0.04, 0.3])
def test_rewards_over_their_std_stop_where_small_steps_stop(q):
    """At beta .5: below 1 if Q is below about .03, else at 1."""
    x = tilting.logit(q)
    for _ in range(20_000):
        p = tilting.sigmoid(x)
        x += 1e-3 * (tilting.logit(q) + 2 / (math.sqrt(p * (1 - p)) + 1e-6) - x)
        if x > 30:
            break
    assert tilting.std_mass(q, 0.5) == pytest.approx(tilting.sigmoid(x), abs=1e-3)
    assert (tilting.std_mass(q, 0.5) == 1) == (q > 0.03)


# Groups

@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("group", [2, 4, 6])
def test_the_push_is_the_sum_over_all_groups(group, outside):
    """Computed episode by episode: (reward - penalty - mean) times the derivative of the log-probability.

    The mean is of reward - penalty or, with the penalty outside, of the rewards only.
    """
    for p, q, beta in itertools.product((0.05, 0.4, 0.9), (0.01, 0.4), (0.2, 1.0)):
        total = 0.0
        for rewards, chance in groups(p, group):
            penalties = [beta * (math.log(p / q) if r else math.log((1 - p) / (1 - q))) for r in rewards]
            centered = [0.0] * group if outside else penalties
            mean = sum(r - penalty for r, penalty in zip(rewards, centered)) / group
            slopes = [1 - p if r else -p for r in rewards]
            total += chance * sum((r - penalty - mean) * slope
                                  for r, penalty, slope in zip(rewards, penalties, slopes))
        assert tilting.push(p, q, beta, group, outside) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("q", [1e-3, 0.1, 0.5, 0.8])
@pytest.mark.parametrize("beta, group, outside, shift", [(0.5, 4, False, 2.0), (0.5, 4, True, 1.5),
                                                         (0.5, 16, True, 1.875), (1.0, 2, True, 0.5)])
def test_a_groups_own_mean_shortens_the_shift_if_the_penalty_is_outside(q, beta, group, outside, shift):
    p = tilting.group_mass(q, beta, group, outside)
    assert tilting.logit(p) - tilting.logit(q) == pytest.approx(shift, abs=1e-6)
    assert tilting.push(p, q, beta, group, outside) == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("outside, shift", [(False, 2.0), (True, 1.0)])
def test_pairs_tell_the_two_centerings_apart(outside, shift):
    """Groups of 2, beta .5: every pair of eight responses of any policy, by ascent to the end.

    A table of eight logits, and each pair's own mean of the rewards, and jointly of the penalties, too. The
    closed form knows only the sum of the correct ones' probabilities.
    """
    logprob_Y, reward_Y, beta = random_logprob(8, 3), (REWARD_Y == 1).double(), 0.5
    logit_Y = logprob_Y.clone()
    for _ in range(2000):
        policy_Y = logit_Y.log_softmax(-1)
        penalty_Y, chance_Y = beta * (policy_Y - logprob_Y), policy_Y.exp()
        centered_Y = reward_Y if outside else reward_Y - penalty_Y
        half_YY = (centered_Y[:, None] - centered_Y) / 2                      # less the pair's own mean
        advantage_YY = half_YY - penalty_Y[:, None] * outside
        weight_Y = (chance_Y[:, None] * chance_Y * advantage_YY).sum(1)
        logit_Y = logit_Y + weight_Y - chance_Y * weight_Y.sum()              # sum of A times d log pi
    q, p = (float(logprobs.log_softmax(-1).exp() @ reward_Y) for logprobs in (logprob_Y, logit_Y))
    assert tilting.logit(p) - tilting.logit(q) == pytest.approx(shift, abs=1e-3)
    assert tilting.group_mass(q, beta, 2, outside) == pytest.approx(p, abs=1e-3)


# Measures

def test_pass_at_k_is_the_average_over_all_choices_of_k():
    for n, right in ((n, right) for n in range(1, 8) for right in range(n + 1)):
        responses = [1] * right + [0] * (n - right)
        for k in range(1, n + 1):
            chosen = [max(some) for some in itertools.combinations(responses, k)]
            assert tilting.pass_at(k, n, right) == pytest.approx(sum(chosen) / len(chosen), abs=1e-12)


@pytest.mark.parametrize("k", [0, 9])
def test_pass_at_an_invalid_k_fails(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 8 responses: expected 1 to 8"):
        tilting.pass_at(k, 8, 3)


@pytest.mark.parametrize("shift", [-1.5, 0.0, 0.374, 1.875, 2.0, 9.0])
def test_the_shift_is_recovered(shift):
    pairs = [(q, tilting.sigmoid(tilting.logit(q) + shift)) for q in GRID]
    assert tilting.shift_of(pairs) == pytest.approx(shift, abs=0.0051)
    assert tilting.shift_of([(0, 0.9), *pairs, (1, 0.2)]) == tilting.shift_of(pairs)


def test_the_shift_needs_a_problem_with_0_lt_q_lt_1():
    assert tilting.shift_of([]) is tilting.shift_of([(0, 0.5), (1, 1), (0.0, 0.0)]) is None
