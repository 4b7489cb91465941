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


def ragged(seed):
    """Episodes of 0 to 6 turns in groups of 1 to 5, as plain lists of turns: a dict of columns per turn."""
    rng = random.Random(seed)
    episodes = []
    for group in range(5):
        for _ in range(1 if group == 0 else rng.randint(1, 5)):
            turns = [dict(valid=rng.random() < 0.7, formatted=rng.random() < 0.8, state=(group, rng.randrange(5)),
                          action=rng.choice("abc"), tag=rng.choice([*algorithms.TAG_GROUPS[1:], "monitor", None]),
                          value=rng.random()) for _ in range(rng.choice([0, 1, 2, 4, 6]))]
            episodes.append(dict(group=group, won=bool(turns) and rng.random() < 0.5, turns=turns))
    rng.shuffle(episodes)
    return episodes


def column(episodes, name, dtype=torch.double):
    return torch.tensor([turn[name] for e in episodes for turn in e["turns"]], dtype=dtype)


def shape_of(episodes):
    """won_E, group_E, turns_E."""
    return (torch.tensor([e["won"] for e in episodes], dtype=torch.bool),
            torch.tensor([e["group"] for e in episodes], dtype=torch.long),
            torch.tensor([len(e["turns"]) for e in episodes], dtype=torch.long))


def flat(nested):
    return [x for part in nested for x in part]


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
    row = torch.arange(len(reward)).repeat_interleave(turns)
    got = algorithms.group_relative_advantage(reward[row], group[row], normalize_std=True, correction=1)
    for i, got in zip(row.tolist(), got.tolist(), strict=True):
        rows = [reward[j].item() for j in range(len(reward)) if group[j] == group[i] for _ in range(turns[j])]
        if len(set(rows)) > 1:
            assert got == pytest.approx(
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


@pytest.mark.parametrize("ratio, advantage, loss, gradient", [
    (2.9, -2.0, 5.8, 5.8), (3.5, -2.0, 6.0, 0.0), (3.5, 2.0, -2.56, 0.0), (0.5, -2.0, 1.6, 0.0), (1.1, 2.0, -2.2, -2.2)])
def test_dual_clip_bounds_the_loss_of_bad_tokens_alone(ratio, advantage, loss, gradient):
    """c = 3: max(min(r A, clip(r) A), c A) where A < 0, as arXiv:1912.09729 writes what is maximised."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    got, clipped = algorithms.clipped_policy_loss(logprob, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28, 3.0)
    got.sum().backward()
    assert (got.item(), logprob.grad.item()) == pytest.approx((loss, gradient), abs=1e-5)
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


# Rewards, turn by turn

def test_turn_rewards_by_hand():
    won, turns = torch.tensor([True, False, True]), torch.tensor([2, 0, 1])
    valid = torch.tensor([False, True, False])
    share = algorithms.turn_rewards(won, valid, turns)
    assert share.tolist() == pytest.approx([-0.05, 1.0, 0.9])
    paper = algorithms.turn_rewards(won, valid, turns, success_reward=10, invalid_unit="turn")
    assert paper.tolist() == pytest.approx([-0.1, 10.0, 9.9])


@pytest.mark.parametrize("unit", ["share", "turn"])
@pytest.mark.parametrize("seed", range(3))
def test_turn_rewards_add_up_to_the_episodes(seed, unit):
    episodes = ragged(seed)
    won, _, turns = shape_of(episodes)
    valid = column(episodes, "valid", torch.bool)
    invalid = torch.tensor([sum(not turn["valid"] for turn in e["turns"]) for e in episodes])
    reward = algorithms.turn_rewards(won, valid, turns, 10.0, 0.1, unit)
    sums = torch.stack([part.sum() for part in reward.split(turns.tolist())])
    assert torch.allclose(sums, algorithms.episode_reward(won, invalid, turns, 10.0, 0.1, unit), atol=1e-5)


def test_discounted_returns_by_hand():
    got = algorithms.discounted_returns(torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([3, 0, 1]), 0.5)
    assert got.tolist() == [1.5, 1.0, 2.0, 5.0]


@pytest.mark.parametrize("seed", range(3))
def test_discounted_returns_are_the_double_loop(seed):
    episodes = ragged(seed)
    reward = column(episodes, "value")
    got = algorithms.discounted_returns(reward, shape_of(episodes)[2], 0.95)
    want = [sum(0.95 ** (k - t) * e["turns"][k]["value"] for k in range(t, len(e["turns"])))
            for e in episodes for t in range(len(e["turns"]))]
    assert got.tolist() == pytest.approx(want)


def test_returns_refuse_turns_that_do_not_fit():
    with pytest.raises(AssertionError, match="3 turns, 2 rewards"):
        algorithms.discounted_returns(torch.zeros(2), torch.tensor([3]), 0.9)


# GiGPO

def anchor_ids(episodes):
    states = sorted({turn["state"] for e in episodes for turn in e["turns"]})
    return torch.tensor([states.index(turn["state"]) for e in episodes for turn in e["turns"]], dtype=torch.long)


def test_anchor_advantage_by_hand():
    """State 0: returns 3, 1, 2; state 1: met once; state 2: equal returns."""
    returns, anchor = torch.tensor([3.0, 9.0, 1.0, 0.7, 2.0, 0.7]), torch.tensor([0, 1, 0, 2, 0, 2])
    assert algorithms.anchor_advantage(returns, anchor, False).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    scaled = algorithms.anchor_advantage(2 * returns, anchor, True)                # std of 6, 2, 4, unbiased: 2
    assert scaled.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0, 0.0], abs=1e-5)
    assert scaled[[1, 3, 5]].tolist() == [0.0] * 3


def literal_gigpo(episodes, omega, gamma, normalize, own_turn):
    """Equations 3 and 5 to 8 with loops and the statistics module; own_turn: verl-agent's place of the penalty."""
    def scaled(x, among, spread):
        if len(set(among)) == 1:
            return 0.0
        return (x - statistics.fmean(among)) / (spread(among) + 1e-6 if normalize else 1.0)

    def reward(e, t):
        penalty = 0.0 if own_turn or e["turns"][t]["valid"] else 0.1
        return 10.0 * (e["won"] and t == len(e["turns"]) - 1) - penalty

    def step_return(e, t):
        penalty = 0.1 if own_turn and not e["turns"][t]["valid"] else 0.0
        return sum(gamma ** (k - t) * reward(e, k) for k in range(t, len(e["turns"]))) - penalty

    total = [10.0 * e["won"] - 0.1 * sum(not turn["valid"] for turn in e["turns"]) for e in episodes]
    advantages = []
    for e, episode in enumerate(episodes):
        group = [(r, o) for r, o in zip(total, episodes) if o["group"] == episode["group"]]
        for t, turn in enumerate(episode["turns"]):
            if own_turn:                       # every turn is a row: the episode's success and this turn's penalty
                score = 10.0 * episode["won"] - 0.1 * (not turn["valid"])
                rows = [10.0 * o["won"] - 0.1 * (not other["valid"]) for _, o in group for other in o["turns"]]
                level_e = scaled(score, rows, statistics.stdev)
            else:
                level_e = scaled(total[e], [r for r, _ in group], statistics.pstdev)
            same = [step_return(other, k) for other in episodes for k in range(len(other["turns"]))
                    if other["turns"][k]["state"] == turn["state"]]
            advantages.append(level_e + omega * scaled(step_return(episode, t), same, statistics.stdev))
    return advantages


@pytest.mark.parametrize("own_turn", [False, True], ids=["paper", "verl-agent"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gigpo_is_the_literal_equations(seed, normalize, own_turn):
    episodes = ragged(seed)
    won, group, turns = shape_of(episodes)
    valid = column(episodes, "valid", torch.bool)
    whole = algorithms.turn_rewards(won, valid, turns, 10.0, 0.1, "turn").double()
    returns = algorithms.discounted_returns(whole, turns, 0.95)
    reward = torch.tensor([10.0 * e["won"] - 0.1 * sum(not t["valid"] for t in e["turns"]) for e in episodes]).double()
    level_e = algorithms.group_relative_advantage(reward, group, normalize_std=normalize).repeat_interleave(turns)
    if own_turn:
        bare = algorithms.turn_rewards(won, valid, turns, 10.0, 0.0, "turn").double()
        returns = algorithms.discounted_returns(bare, turns, 0.95) - 0.1 * ~valid
        rows, groups = algorithms.row_rewards(won, valid, turns, 10.0, 0.1).double(), group.repeat_interleave(turns)
        level_e = algorithms.group_relative_advantage(rows, groups, normalize, correction=1)
    level_s = algorithms.anchor_advantage(returns, anchor_ids(episodes), normalize)
    got = algorithms.gigpo_advantage(level_e, level_s, 0.7)
    assert got.tolist() == pytest.approx(literal_gigpo(episodes, 0.7, 0.95, normalize, own_turn), abs=1e-4)


def test_gigpo_without_a_repeated_state_is_grpo():
    reward, group, turns = random_groups(1)
    level_e = algorithms.group_relative_advantage(reward, group).repeat_interleave(turns)
    returns = torch.rand(int(turns.sum()))
    level_s = algorithms.anchor_advantage(returns, torch.arange(len(returns)), True)
    assert algorithms.gigpo_advantage(level_e, level_s, 1.0).tolist() == level_e.tolist()


@pytest.mark.parametrize("normalize", [False, True])
def test_a_loop_costs_its_first_visit_where_the_episode_was_won(normalize):
    """One task, two episodes: A B A C, won; A D, lost. The turn that began the loop earns less than the last visit."""
    won, turns, anchor = torch.tensor([True, False]), torch.tensor([4, 2]), torch.tensor([0, 1, 0, 2, 0, 3])
    reward = algorithms.turn_rewards(won, torch.ones(6, dtype=torch.bool), turns)
    step = algorithms.anchor_advantage(algorithms.discounted_returns(reward, turns, 0.95), anchor, normalize)
    assert step[2] > step[0] > step[4]
    if not normalize:
        first, last, mean = 0.95 ** 3, 0.95, (0.95 ** 3 + 0.95) / 3
        assert step.tolist() == pytest.approx([first - mean, 0, last - mean, 0, -mean, 0])


def test_a_loop_in_a_lost_group_teaches_nothing():
    turns = torch.tensor([3, 3])
    returns = algorithms.discounted_returns(torch.zeros(6), turns, 0.95)
    assert algorithms.anchor_advantage(returns, torch.tensor([0, 1, 0, 0, 0, 1]), True).tolist() == [0.0] * 6


def test_anchor_sizes_by_hand():
    anchor = torch.tensor([7] + [1] * 2 + [2] * 4 + [3] * 5 + [4] * 20)
    want = {"1": 1 / 32, "2-4": 6 / 32, "5-16": 5 / 32, "17+": 20 / 32}
    assert algorithms.anchor_sizes(anchor) == pytest.approx(want)
    assert algorithms.anchor_sizes(anchor[:0]) == {"1": 0, "2-4": 0, "5-16": 0, "17+": 0}


# RLVMR

@pytest.mark.parametrize("tags, actions, valid, won, rewards, compared", [
    (["planning", "monitor"], "ab", [1, 1], True, [1, 0], ["planning", "none"]),
    (["planning", "planning"], "ab", [1, 0], False, [0, 0], ["planning", "planning"]),
    (["explore", "explore", "explore"], "aba", [1, 1, 1], False, [1, 1, 0], ["explore"] * 3),
    (["explore", "explore", "explore"], [None, "a", "b"], [0, 1, 1], True, [0, 1, 1], ["none", "explore", "explore"]),
    (["monitor", "explore"], "aa", [0, 1], True, [0, 0], ["none", "explore"]),
    (["reflection", "reflection"], "ab", [1, 1], False, [1, 0], ["reflection"] * 2),
    (["monitor", "reflection"], "ab", [0, 1], False, [0, 1], ["none", "reflection"]),
    (["monitor", "reflection"], "aa", [0, 1], False, [0, 0], ["none", "reflection"]),
    (["monitor", "reflection"], "ab", [0, 0], False, [0, 1], ["none", "reflection"]),
    ([None, "reflection"], [None, "b"], [0, 1], False, [0, 1], ["none", "reflection"]),
    ([None, None], [None, None], [0, 0], True, [0, 0], ["none", "none"]),
    ([], [], [], True, [], [])])
def test_tag_rewards_of_the_code_case_by_case(tags, actions, valid, won, rewards, compared):
    assert algorithms.tag_rewards(tags, list(actions), valid, won, "code") == (rewards, compared)


@pytest.mark.parametrize("tags, actions, valid, won, rewards", [
    (["planning", "monitor"], ["go to desk 1", "look"], [1, 1], True, [1, 0]),
    (["explore"] * 4, ["go to desk 1", "open desk 1", "take cup 1 from desk 1", "look"], [1] * 4, False, [1, 0, 1, 0]),
    (["explore"] * 4, ["go to hall", "look at hall", "open door to hall", "go to attic"], [1] * 4, False, [1, 0, 1, 1]),
    (["monitor", "explore"], ["go to desk 1", "examine desk 2"], [0, 1], False, [0, 1]),
    (["explore"] * 3, ["go to desk 1", "go to Desk 1", "GO TO desk 1"], [1, 0, 0], False, [1, 0, 0]),
    (["explore"] * 2, ["connect red wire terminal 1 to battery anode", "connect blue wire terminal 1 to battery anode"],
     [1, 1], False, [1, 1]),
    (["reflection", "reflection"], ["a", "b"], [1, 1], False, [0, 0]),                       # nothing had failed
    (["monitor", "reflection", "reflection"], ["a", "b", "c"], [0, 0, 1], False, [0, 0, 1]), # corrective: admissible
    ([None, "reflection"], [None, "b"], [0, 1], False, [0, 1])])
def test_tag_rewards_of_the_paper_case_by_case(tags, actions, valid, won, rewards):
    assert algorithms.tag_rewards(tags, actions, valid, won)[0] == rewards


def tagged(episodes):
    """tag_reward_S and tag_S of ragged episodes."""
    both = [algorithms.tag_rewards([turn["tag"] for turn in e["turns"]],
                                   [turn["action"] if turn["formatted"] else None for turn in e["turns"]],
                                   [turn["valid"] and turn["formatted"] for turn in e["turns"]], e["won"], "code")
            for e in episodes]
    tags = [algorithms.TAG_GROUPS.index(tag) for tag in flat(used for _, used in both)]
    return torch.tensor(flat(r for r, _ in both), dtype=torch.double), torch.tensor(tags, dtype=torch.long)


@pytest.mark.parametrize("seed", range(4))
def test_rlvmr_of_the_paper_is_the_literal_equation(seed):
    episodes = ragged(seed)
    won, group, turns = shape_of(episodes)
    reward, (tag_reward, tag) = 10 * won.double(), tagged(episodes)
    got = algorithms.rlvmr_paper_advantage(reward, group, turns, tag_reward, tag,
                                           algorithms.tag_moments(tag_reward, tag), alpha=0.3)

    def scaled(x, among):
        return 0.0 if len(set(among)) == 1 else (x - statistics.fmean(among)) / (statistics.pstdev(among) + 1e-6)

    row = 0
    for e, episode in enumerate(episodes):
        own = [10.0 * o["won"] for o in episodes if o["group"] == episode["group"]]
        for _ in episode["turns"]:
            same = [r for r, k in zip(tag_reward.tolist(), tag.tolist()) if k == tag[row]]
            want = 0.3 * scaled(10.0 * episode["won"], own) + 0.7 * scaled(tag_reward[row].item(), same)
            assert got[row].item() == pytest.approx(want, abs=1e-4)
            row += 1
    assert row == len(got)


def test_tag_moments_of_ranks_add_up_and_equal_rewards_give_exactly_zero():
    reward, tag = torch.tensor([0.7] * 11 + [1.0, 0.0]), torch.tensor([1] * 11 + [2, 2])
    parts = sum(algorithms.tag_moments(reward[half], tag[half]) for half in (slice(0, 6), slice(6, 13)))
    assert torch.allclose(parts, algorithms.tag_moments(reward, tag))
    assert parts[0].tolist() == [0, 11, 2, 0] and parts[1, 2] == 1 and parts[2, 2] == 1
    got = algorithms.rlvmr_paper_advantage(torch.ones(1), torch.zeros(1).long(), torch.tensor([13]), reward, tag, parts)
    assert got[:11].tolist() == [0.0] * 11
    assert got[11:].tolist() == pytest.approx([0.5, -0.5], abs=1e-5)


def literal_rlvmr_code(episodes, tag_reward, tag, w, normalize):
    """The released code's two tables, keyed by task and by (task, tag), filled turn by turn."""
    def normalized(values, keys):
        table = {key: [v for v, k in zip(values, keys) if k == key] for key in keys}
        mean = {key: statistics.fmean(row) if len(row) > 1 else 0.0 for key, row in table.items()}
        std = {key: statistics.stdev(row) if len(row) > 1 else 1.0 for key, row in table.items()}
        return [(v - mean[k]) / (std[k] + 1e-6 if normalize else 1.0) for v, k in zip(values, keys)]

    tasks = [e["group"] for e in episodes for _ in e["turns"]]
    level_e = normalized([10.0 * e["won"] for e in episodes for _ in e["turns"]], tasks)
    level_s = normalized(tag_reward.tolist(), list(zip(tasks, tag.tolist())))
    return [a + w * b for a, b in zip(level_e, level_s)]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rlvmr_of_the_code_is_its_tables(seed, normalize):
    episodes = ragged(seed)
    won, group, turns = shape_of(episodes)
    tag_reward, tag = tagged(episodes)
    rows = [x.repeat_interleave(turns) for x in (10 * won.double(), group)]
    got = algorithms.rlvmr_code_advantage(*rows, tag_reward, tag, 0.5, normalize)
    assert got.tolist() == pytest.approx(literal_rlvmr_code(episodes, tag_reward, tag, 0.5, normalize), abs=1e-4)


def test_rlvmr_code_keeps_what_stands_alone_raw():
    """Group 0: one episode, one turn. Group 1: one episode of three turns, its 10 compared with itself: 0."""
    args = torch.full((4,), 10.0), torch.tensor([0, 1, 1, 1])
    got = algorithms.rlvmr_code_advantage(*args, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 2, 2]), 0.5)
    half = 0.5 * 0.5 ** 0.5                                                 # of 1 and 0: std 1 / sqrt 2, so +-0.707
    assert got.tolist() == pytest.approx([10.5, 0.5, half, -half], abs=1e-5)


def test_the_two_rlvmr_compositions_differ():
    """A tag that one task always earns and the other never: the batch sees it, the task does not."""
    args = torch.zeros(2), torch.tensor([0, 1]), torch.tensor([2, 2])
    reward, tag = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.ones(4, dtype=torch.long)
    paper = algorithms.rlvmr_paper_advantage(*args, reward, tag, algorithms.tag_moments(reward, tag))
    assert paper.tolist() == pytest.approx([0.5, 0.5, -0.5, -0.5], abs=1e-5)
    code = algorithms.rlvmr_code_advantage(torch.zeros(4), torch.tensor([0, 0, 1, 1]), reward, tag, 1.0)
    assert code.tolist() == [0.0] * 4


# PPO

def test_gae_by_hand():
    """Two turns, gamma 0.5, lambda 0.5: delta = 1 + 0.5 * 4 - 2 and 3 - 4; then an episode of one turn."""
    advantage, returns = algorithms.gae(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2.0, 4.0, 0.5]),
                                        torch.tensor([2, 1]), gamma=0.5, lam=0.5)
    assert advantage.tolist() == [1 - 0.25, -1.0, 1.5]
    assert returns.tolist() == [2.75, 3.0, 2.0]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.0), (0.95, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_double_loop(seed, gamma, lam):
    episodes = ragged(seed)
    won, _, turns = shape_of(episodes)
    reward = algorithms.turn_rewards(won, column(episodes, "valid", torch.bool), turns, 10.0, 0.1, "turn").double()
    value = column(episodes, "value")
    got, returns = algorithms.gae(reward, value, turns, gamma, lam)
    want = []
    for r, v in zip(reward.split(turns.tolist()), value.split(turns.tolist())):
        after = [*v.tolist(), 0.0]
        delta = [float(r[t]) + gamma * after[t + 1] - after[t] for t in range(len(v))]
        want += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(v))) for t in range(len(v))]
    assert got.tolist() == pytest.approx(want)
    assert torch.allclose(returns, got + value)
    if gamma == lam == 1.0:                                  # Monte Carlo: what was still earned, minus the value
        assert torch.allclose(got, algorithms.discounted_returns(reward, turns, 1.0) - value)


def test_moments_of_ranks_give_the_whitening_of_all():
    x = torch.randn(50) * 3 + 100
    mean, std = algorithms.mean_std(algorithms.moments(x[:20]) + algorithms.moments(x[20:]))
    assert float(mean) == pytest.approx(statistics.fmean(x.tolist()))
    assert float(std) == pytest.approx(statistics.pstdev(x.tolist()))
    white = algorithms.whitened(x, mean, std)
    assert white.dtype == x.dtype and abs(white.mean()) < 1e-5 and abs(white.std(correction=0) - 1) < 1e-5


@pytest.mark.parametrize("x", [torch.full((n,), value, dtype=torch.double) for n in (1, 3, 10, 11) for value in
                               (0.1, 0.7, -1.3)] + [torch.full((11,), 0.7), torch.zeros(4), torch.zeros(0)])
def test_whitening_what_does_not_vary_gives_exactly_zero(x):
    """Ten doubles of 0.1: their mean and the difference of their squares both round."""
    assert algorithms.whitened(x, *algorithms.mean_std(algorithms.moments(x))).tolist() == [0.0] * len(x)


@pytest.mark.parametrize("value, old, target, clip, loss, gradient", [
    (1.0, 0.0, 3.0, 0.5, 0.5 * 2.5 ** 2, 0.0),        # towards the target, further than allowed: clipped
    (1.0, 0.0, 0.0, 0.5, 0.5 * 1.0, 1.0),             # away from it: the free term is the worse
    (0.3, 0.0, 3.0, 0.5, 0.5 * 2.7 ** 2, -2.7),       # within the range
    (1.0, 0.0, 3.0, 0.0, 0.5 * 2.0 ** 2, -2.0)])      # no clipping
def test_value_loss_by_hand(value, old, target, clip, loss, gradient):
    value = torch.tensor([value], requires_grad=True)
    got, clipped = algorithms.clipped_value_loss(value, torch.tensor([old]), torch.tensor([target]), clip)
    got.sum().backward()
    assert got.item() == pytest.approx(loss) and value.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_explained_variance_by_hand():
    target = torch.tensor([0.0, 2.0, 4.0])
    assert algorithms.explained_variance(target, target) == 1.0
    assert algorithms.explained_variance(torch.full((3,), 7.0), target) == pytest.approx(0.0)
    assert algorithms.explained_variance(torch.tensor([0.0, 1.0, 2.0]), target) == pytest.approx(0.75)
    assert math.isnan(algorithms.explained_variance(target, torch.full((3,), 0.7)))
    assert math.isnan(algorithms.explained_variance(torch.zeros(0), torch.zeros(0)))


# NTHR

def token_group(seed, vocabulary=11, d=6):
    """One task group of four episodes, 0 and 2 won: 1 to 5 tokens each, with a random untied output layer."""
    torch.manual_seed(seed)
    tokens = [random.Random(seed + e).randint(1, 5) for e in range(4)]
    episode = torch.arange(4).repeat_interleave(torch.tensor(tokens))
    hidden = torch.randn(len(episode), d, dtype=torch.double)
    head = torch.randn(vocabulary, d, dtype=torch.double, requires_grad=True)
    return hidden, head, torch.randint(vocabulary, (len(episode),)), episode, torch.tensor([True, False, True, False])


def test_prediction_error_by_hand():
    logits = torch.tensor([[0.0, 0.0, math.log(2.0)]])
    got = algorithms.prediction_error(logits, torch.tensor([2]), torch.tensor([0, 2]))
    assert got[0].tolist() == pytest.approx([-0.25, 0.5])                        # not renormalised: 1/4 and 1 - 1/2
    with pytest.raises(AssertionError, match="targets .2. not among"):
        algorithms.prediction_error(logits, torch.tensor([2]), torch.tensor([0, 1]))


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_nthr_is_the_double_loop_over_token_pairs(seed, restricted):
    hidden, head, target, episode, won = token_group(seed)
    columns = target.unique() if restricted else torch.arange(11)
    error = algorithms.prediction_error(hidden @ head.detach().T, target, columns).double()
    got, threshold = algorithms.nthr_scores(hidden, error, episode, won, beta=0.8)
    probs = (hidden @ head.detach().T).softmax(-1).tolist()
    h, y = hidden.tolist(), target.tolist()
    want = []
    for a in range(len(y)):
        want.append(0.0)
        for b in range(len(y)):
            if won[episode[b]]:
                alpha = sum(((y[a] == v) - probs[a][v]) * ((y[b] == v) - probs[b][v]) for v in columns.tolist())
                want[a] += alpha * sum(p * q for p, q in zip(h[a], h[b]))
    assert got.tolist() == pytest.approx(want, abs=1e-5)
    means = [statistics.fmean(s for s, e in zip(want, episode.tolist()) if e == i) for i in (0, 2)]
    assert threshold == pytest.approx(0.8 * min(means), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_nthr_score_is_the_inner_product_of_output_layer_gradients(seed):
    hidden, head, target, episode, won = token_group(seed)
    logprob = (hidden @ head.T).log_softmax(-1)[torch.arange(len(target)), target]
    error = algorithms.prediction_error(hidden @ head.detach().T, target, torch.arange(11)).double()
    got, _ = algorithms.nthr_scores(hidden, error, episode, won)
    pull, = torch.autograd.grad(logprob[won[episode]].sum(), head, retain_graph=True)
    for k in range(len(target)):
        own, = torch.autograd.grad(logprob[k], head, retain_graph=True)
        assert float(got[k]) == pytest.approx(float((own * pull).sum()), abs=1e-5)


def test_nthr_weights_by_hand():
    """Won: one token with h = g = (1, 0), so M = g h^T and s = g_0 h_0; tau = 1. One of three won: eta = 1/3."""
    hidden = torch.tensor([[1.0, 0.0], [3.0, 5.0], [1.0, 0.0], [-3.0, 0.0], [9.0, 9.0]])
    error = torch.tensor([[1.0, 0.0], [0.5, 7.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    episode, won = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([True, False, False])
    score, threshold = algorithms.nthr_scores(hidden, error, episode, won)
    assert score.tolist() == [1.0, 1.5, 1.0, -3.0, 0.0] and threshold == 1.0
    assert algorithms.nthr_weights(hidden, error, episode, won).tolist() == pytest.approx([1, 1 / 3, 1, 1, 1])
    assert algorithms.nthr_weights(hidden, error, episode, won, beta=2.0).tolist() == [1.0] * 5
    half = algorithms.nthr_weights(hidden, error, episode, won, beta=0.5)
    assert half.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1, 1])


def test_nthr_drops_the_tokens_at_half_and_leaves_uniform_groups_alone():
    hidden, error, episode = torch.tensor([[1.0], [5.0]]), torch.ones(2, 1), torch.tensor([0, 1])
    assert algorithms.nthr_weights(hidden, error, episode, torch.tensor([True, False])).tolist() == [1.0, 0.0]
    for won in (True, False):
        assert algorithms.nthr_weights(hidden, error, episode, torch.tensor([won, won])).tolist() == [1.0, 1.0]


def test_nthr_passes_over_won_episodes_without_tokens():
    """The lost token scores 1, the won one 4: a mean of 0 for the empty episode would put tau below both."""
    hidden, error = torch.tensor([[2.0], [0.5]]), torch.ones(2, 1)
    weight = algorithms.nthr_weights(hidden, error, torch.tensor([1, 2]), torch.tensor([True, True, False]))
    assert weight.tolist() == [1.0, 1.0]
    alone = algorithms.nthr_weights(hidden[1:], error[1:], torch.tensor([1]), torch.tensor([True, False]))
    assert alone.tolist() == [1.0]


# What all of them share

def test_nothing_in_gives_nothing_out():
    none, int_none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    reward = algorithms.turn_rewards(none.bool(), none.bool(), int_none)
    outputs = [reward, algorithms.discounted_returns(none, int_none, 0.9), *algorithms.gae(none, none, int_none),
               algorithms.gigpo_advantage(none, algorithms.anchor_advantage(none, int_none, True), 1.0),
               algorithms.rlvmr_code_advantage(none, int_none, none, int_none, 0.5),
               algorithms.row_rewards(none.bool(), none.bool(), int_none),
               algorithms.rlvmr_paper_advantage(none, int_none, int_none, none, int_none,
                                                algorithms.tag_moments(none, int_none))]
    assert all(len(output) == 0 for output in outputs)


def test_turn_functions_leave_their_inputs_alone():
    episodes = ragged(5)
    won, group, turns = shape_of(episodes)
    tag_reward, tag = tagged(episodes)
    valid, value, anchor = column(episodes, "valid", torch.bool), column(episodes, "value"), anchor_ids(episodes)
    inputs = [won, group, turns, tag_reward, tag, valid, value, anchor]
    before = [x.clone() for x in inputs]
    algorithms.turn_rewards(won, valid, turns)
    algorithms.gae(value, value, turns)
    algorithms.anchor_advantage(value, anchor, True)
    algorithms.rlvmr_code_advantage(value, anchor, tag_reward, tag, 0.5)
    moments = algorithms.tag_moments(tag_reward, tag)
    algorithms.rlvmr_paper_advantage(won.double(), group, turns, tag_reward, tag, moments)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))
