"""Every function of algorithms.py against hand arithmetic, a slow loop or autograd.

    python -m pytest tests/test_algorithms.py
"""

import math
import random
import statistics

import pytest
import torch

import algorithms

pytestmark = pytest.mark.fast


def random_groups(seed):
    rng = random.Random(seed)
    groups = [g for g in range(5) for _ in range(rng.randint(1, 6))]
    rng.shuffle(groups)
    rewards = [round(rng.choice([0.0, 1.0]) - 0.1 * rng.random(), 3) for _ in groups]
    turns = [rng.randint(1, 9) for _ in groups]
    return torch.tensor(rewards), torch.tensor(groups), torch.tensor(turns)


def test_episode_reward_by_hand():
    won, invalid, turns = torch.tensor([True, False, False]), torch.tensor([1, 2, 0]), torch.tensor([4, 5, 0])
    share = algorithms.episode_reward(won, invalid, turns)
    assert share.tolist() == pytest.approx([1 - 0.1 / 4, -0.1 * 2 / 5, 0.0])
    paper = algorithms.episode_reward(won, invalid, turns, success_reward=10, invalid_unit="turn")
    assert paper.tolist() == pytest.approx([9.9, -0.2, 0.0])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_group_advantage_over_episodes_is_the_double_loop(seed, normalize):
    reward, group, _ = random_groups(seed)
    got = algorithms.group_relative_advantage(reward, group, normalize_std=normalize)
    for i in range(len(reward)):
        own = [reward[j].item() for j in range(len(reward)) if group[j] == group[i]]
        want = reward[i].item() - statistics.fmean(own)
        if normalize:
            want /= statistics.pstdev(own) + 1e-6
        assert got[i].item() == pytest.approx(0.0 if len(set(own)) == 1 else want, abs=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_group_advantage_over_turns_counts_each_turn(seed):
    """verl-agent's rows: a long episode's reward enters mean and (unbiased) std once per turn."""
    reward, group, turns = random_groups(seed)
    got = algorithms.group_relative_advantage(reward, group, turns, normalize_std=True)
    for i in range(len(reward)):
        rows = [reward[j].item() for j in range(len(reward)) if group[j] == group[i] for _ in range(turns[j])]
        if len(set(rows)) > 1:
            assert got[i].item() == pytest.approx(
                (reward[i].item() - statistics.fmean(rows)) / (statistics.stdev(rows) + 1e-6), abs=2e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_exactly_zero(normalize):
    """Eleven float32 rewards of 0.7 gave 0.107: the mean rounds, and the std is that rounding error."""
    reward, group = torch.full((11,), 0.7), torch.zeros(11, dtype=torch.long)
    assert algorithms.group_relative_advantage(reward, group, normalize_std=normalize).tolist() == [0.0] * 11
    assert algorithms.zero_variance(reward, group).all()
    naive = (reward - reward.mean()) / (reward.std(correction=0) + 1e-6)
    assert normalize is False or naive.abs().max() > 0.05


def test_advantage_ignores_shift_and_order():
    reward, group, _ = random_groups(7)
    base = algorithms.group_relative_advantage(reward, group)
    assert torch.allclose(algorithms.group_relative_advantage(reward + 3, group), base, atol=1e-5)
    order = torch.randperm(len(reward))
    assert torch.allclose(algorithms.group_relative_advantage(reward[order], group[order]), base[order], atol=1e-6)


def test_zero_variance_marks_whole_groups_only():
    equal = algorithms.zero_variance(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([3, 3, 5, 5]))
    assert equal.tolist() == [False, False, True, True]


@pytest.mark.parametrize("ratio, advantage, gradient", [
    (1.5, 1.0, 0.0), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.0), (1.1, 1.0, -1.1), (1.1, -2.0, 2.2)])
def test_clip_bites_on_the_right_side(ratio, advantage, gradient):
    """d loss / d logprob = -ratio * A where the surrogate is free, 0 where it is clipped."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, clipped = algorithms.clipped_policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28)
    loss.sum().backward()
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_on_policy_gradient_is_the_score_function():
    """Two-token toy policy: the gradient is -A times the softmax's score, by hand."""
    logits = torch.tensor([0.3, -0.4], requires_grad=True)
    logprob = logits.log_softmax(0)[:1]
    algorithms.clipped_policy_loss(logprob, logprob.detach(), torch.tensor([2.0]))[0].sum().backward()
    p = logits.detach().softmax(0)
    assert torch.allclose(logits.grad, -2.0 * torch.tensor([1 - p[0], -p[1]]))


def test_kl_estimates_average_to_the_kl_and_their_gradients_differ():
    """E_pi[k1] = E_pi[k3] = KL(pi||ref); as losses on samples, k3's gradient is that of KL(ref||pi)."""
    logits, ref = torch.randn(6, dtype=torch.double, requires_grad=True), torch.randn(6, dtype=torch.double).log_softmax(0)
    logprob = logits.log_softmax(0)
    p = logprob.exp().detach()
    kl = (p * (logprob.detach() - ref)).sum()
    assert torch.isclose((p * algorithms.kl_k1(logprob.detach(), ref)).sum(), kl)
    assert torch.isclose((p * algorithms.kl_k3(logprob.detach(), ref)).sum(), kl)
    got, = torch.autograd.grad((p * algorithms.kl_k3(logprob, ref)).sum(), logits, retain_graph=True)
    want, = torch.autograd.grad((ref.exp() * (ref - logprob)).sum(), logits)
    assert torch.allclose(got, want)


def test_kl_k3_is_never_negative_and_clamped():
    far = algorithms.kl_k3(torch.tensor([-100.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 0.5]))
    assert (far >= 0).all() and far[1] == 0 and far[0] == pytest.approx(math.exp(10) - 11, rel=1e-5)


@pytest.mark.parametrize("reduction", ["token", "episode", "constant"])
def test_reductions_do_not_depend_on_how_episodes_are_cut_into_samples(reduction):
    """One sample per episode or one per turn: the weighted sum over its units is the same, and the slow loop's."""
    rng = random.Random(3)
    episodes = [[[rng.random() for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 4))] for _ in range(6)]

    def reduced(cut):
        samples = [(e, tokens) for e, turns in enumerate(episodes) for tokens in cut(turns)]
        weight, units = algorithms.token_weight(torch.tensor([len(t) for _, t in samples]),
                                                torch.tensor([e for e, _ in samples]), reduction, longest=20)
        return sum(w * sum(t) for w, (_, t) in zip(weight.tolist(), samples)) / units

    flat = [[x for turn in turns for x in turn] for turns in episodes]
    slow = {"token": statistics.fmean(x for f in flat for x in f),
            "episode": statistics.fmean(statistics.fmean(f) for f in flat),
            "constant": statistics.fmean(sum(f) / 20 for f in flat)}[reduction]
    assert reduced(lambda turns: turns) == pytest.approx(slow, abs=1e-6)
    assert reduced(lambda turns: [[x for turn in turns for x in turn]]) == pytest.approx(slow, abs=1e-6)


def test_entropy_is_torchs_own():
    logits = torch.randn(4, 9)
    want = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(algorithms.entropy(logits), want, atol=1e-6)


def test_wilson_by_hand():
    """Newcombe 1998, Table I: 81/263 gives 0.2553 to 0.3662; 0/20 gives 0 to 0.1611."""
    assert algorithms.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert algorithms.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert algorithms.wilson(0, 0) == (0.0, 1.0)


def test_auc_is_the_pair_count():
    score, positive = torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, True, False, True])
    pairs = [(0.4 > 0.1), 0.5, (0.9 > 0.1), (0.9 > 0.4)]
    assert algorithms.auc(score, positive) == pytest.approx(sum(pairs) / 4)
    assert math.isnan(algorithms.auc(score, torch.ones(4, dtype=torch.bool)))
