"""Tests of algorithms/rewards.py and losses.group_relative_advantage: rewards and their normalization.

    python -m pytest tests/algorithms/test_rewards.py

Oracles: hand arithmetic, and double loops with the statistics module.
"""

import random
import statistics
from dataclasses import fields

import pytest
import torch
from hand_made import (
    SUCCESS_10,
    make_episode,
    random_episodes,
    reward_of,
    whitened,
)

import algorithms
import losses
from algorithms import rewards
from algorithms.rewards import Settings
from infra import parallel


def random_groups(seed):
    """reward_E, group_E and turns_E of random episodes."""
    rng = random.Random(seed)
    groups = [g for g in range(5) for _ in range(rng.randint(1, 6))]
    rng.shuffle(groups)
    reward = [round(rng.choice([0.0, 1.0]) - 0.1 * rng.random(), 3) for _ in groups]
    turns = [rng.randint(1, 9) for _ in groups]
    return torch.tensor(reward), torch.tensor(groups), torch.tensor(turns)


# Rewards and returns

def test_episode_reward_by_hand():
    won, invalid, turns = torch.tensor([True, False, False]), torch.tensor([1, 2, 0]), torch.tensor([4, 5, 0])
    share = rewards.episode_reward(won, invalid, turns, Settings())
    assert share.tolist() == pytest.approx([1 - 0.1 / 4, -0.1 * 2 / 5, 0.0])
    paper = rewards.episode_reward(won, invalid, turns, Settings(**SUCCESS_10))
    assert paper.tolist() == pytest.approx([9.9, -0.2, 0.0])


def test_turn_rewards_by_hand():
    won, turns = torch.tensor([True, False, True]), torch.tensor([2, 0, 1])
    valid = torch.tensor([False, True, False])
    share = rewards.turn_rewards(won, valid, turns, Settings())
    assert share.tolist() == pytest.approx([-0.05, 1.0, 0.9])
    paper = rewards.turn_rewards(won, valid, turns, Settings(**SUCCESS_10))
    assert paper.tolist() == pytest.approx([-0.1, 10.0, 9.9])
    rows = rewards.code_turn_rewards(won, valid, turns, Settings(**SUCCESS_10))
    assert rows.tolist() == pytest.approx([9.9, 10.0, 9.9])


def test_the_rewards_of_turns_add_up_to_the_episodes_by_every_setting():
    """Also by settings that this test does not know."""
    for unit in ("share", "turn"):
        numbers = {f.name: 0.7 for f in fields(Settings) if f.type in (int, float)}
        settings = Settings(**numbers | {"invalid_unit": unit})
        won, turns = torch.tensor([True, False, True]), torch.tensor([2, 3, 1])
        valid = torch.tensor([False, True, False, True, True, True])
        by_turn = rewards.turn_rewards(won, valid, turns, settings).split(turns.tolist())
        by_episode = rewards.episode_reward(won, torch.tensor([1, 1, 0]), turns, settings)
        assert [float(part.sum()) for part in by_turn] == pytest.approx(by_episode.tolist())


def test_discounted_returns_by_hand():
    got = rewards.discounted_returns(torch.tensor([1.0, 0.0, 2.0, 5.0]), torch.tensor([3, 0, 1]), 0.5)
    assert got.tolist() == [1.5, 1.0, 2.0, 5.0]


def test_returns_refuse_a_wrong_number_of_turns():
    with pytest.raises(AssertionError, match="3 turns, 2 rewards"):
        rewards.discounted_returns(torch.zeros(2), torch.tensor([3]), 0.9)


# Normalization

@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_group_advantage_over_episodes_is_the_double_loop(seed, normalize):
    reward, group, _ = random_groups(seed)
    got = losses.group_relative_advantage(reward, group, normalize_std=normalize)
    for i in range(len(reward)):
        members = [reward[j].item() for j in range(len(reward)) if group[j] == group[i]]
        want = reward[i].item() - statistics.fmean(members)
        if normalize:
            want /= statistics.pstdev(members) + 1e-6
        assert got[i].item() == pytest.approx(0.0 if len(set(members)) == 1 else want, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_group_advantage_over_turns_counts_each_turn(seed):
    """verl-agent's normalization: a long episode's reward enters mean and (unbiased) std once per turn."""
    reward, group, turns = random_groups(seed)
    index = torch.arange(len(reward)).repeat_interleave(turns)
    got = losses.group_relative_advantage(reward[index], group[index], normalize_std=True, correction=1)
    for i, got in zip(index.tolist(), got.tolist(), strict=True):
        rows = [reward[j].item() for j in range(len(reward)) if group[j] == group[i] for _ in range(turns[j])]
        if len(set(rows)) > 1:
            want = (reward[i].item() - statistics.fmean(rows)) / (statistics.stdev(rows) + 1e-6)
            assert got == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("value", [0.1, 0.7, -1.3])
def test_equal_rewards_give_exactly_zero(value, normalize):
    """Eleven float32 rewards of 0.7 gave 0.107 on one CPU: the mean is rounded, and the std is its rounding.

    Which sizes are affected depends on the CPU; on any CPU some of these are.
    """
    for size in range(1, 65):
        reward, group = torch.full((size,), value), torch.zeros(size, dtype=torch.long)
        got = losses.group_relative_advantage(reward, group, normalize_std=normalize)
        assert got.tolist() == [0.0] * size


def test_summed_moments_of_ranks_whiten_as_one_rank():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3 + 100
    got = rewards.whitened(x, rewards.moments(x[:20]) + rewards.moments(x[20:]))
    mean, std = statistics.fmean(x.tolist()), statistics.pstdev(x.tolist())
    assert got.dtype == x.dtype
    assert got.tolist() == pytest.approx([(a - mean) / std for a in x.tolist()], abs=1e-4)


@pytest.mark.parametrize("x", [torch.full((n,), value, dtype=torch.double) for n in (1, 3, 10, 11)
                               for value in (0.1, 0.7, -1.3)]
                         + [torch.full((11,), 0.7), torch.zeros(4), torch.zeros(0)])
def test_whitening_equal_numbers_gives_exactly_zero(x):
    """For ten doubles of 0.1, the mean and the difference of squares are both rounded."""
    assert rewards.whitened(x, rewards.moments(x)).tolist() == [0.0] * len(x)


# From episodes to tensors, and back

@pytest.mark.parametrize("changes", [{}, SUCCESS_10, {"invalid": "format"}, {"invalid_penalty": 0.0}])
def test_every_episode_has_its_reward_written(changes):
    settings, episodes = Settings(**changes), random_episodes(2, pays=True)
    rewards.write_rewards(episodes, settings)
    assert [e.reward for e in episodes] == pytest.approx([reward_of(e, settings) for e in episodes], abs=1e-5)
    assert rewards.stored_rewards(episodes).tolist() == [e.reward for e in episodes]


def test_advantages_are_written_to_turns_and_token_advantages_removed():
    episodes = random_episodes(8)
    turns = [turn for e in episodes for turn in e.turns]
    turns[3].token_advantage = [7.0] * len(turns[3].response_ids)
    rewards.write_advantages(episodes, torch.arange(float(len(turns))))
    assert [turn.advantage for turn in turns] == list(range(len(turns)))
    assert turns[3].token_advantage is None
    with pytest.raises(ValueError):
        rewards.write_advantages(episodes, torch.zeros(len(turns) + 1))


def test_groups_keep_their_episodes_in_order():
    episodes = [make_episode([], group) for group in (7, 3, 7)]
    found = rewards.groups_of(episodes)
    assert list(found) == [7, 3] and [e is episodes[i] for e, i in zip(found[7], (0, 2))] == [True, True]
    assert found[3][0] is episodes[1]


def test_the_kl_penalty_is_centered_within_the_group():
    """Penalties 0.6, 0.2 and 0.1 have the mean 0.3; the only episode of a group keeps its advantage."""
    episodes = [make_episode([("a", "hall", None, n) for n in tokens], group)
                for tokens, group in (((2, 1), 0), ((1,), 0), ((1,), 0), ((1,), 1))]
    for e, kl in zip(episodes, ([[0.1, 0.2], [0.3]], [[0.2]], [[0.1]], [[5.0]])):
        for turn, penalties in zip(e.turns, kl):
            turn.advantage, turn.kl = 1.0, penalties
    algorithms.Method(Settings()).subtract_kl(episodes)
    got = [turn.advantage for e in episodes for turn in e.turns]
    assert got == pytest.approx([0.7, 0.7, 1.1, 1.2, 1.0], abs=1e-6)


def token_advantages(episodes):
    """The advantage of every sampled token."""
    return [a for e in episodes for turn in e.turns
            for a in turn.token_advantage or [turn.advantage] * len(turn.response_ids)]


def with_advantages(episodes, seed=3):
    """The episodes, with random advantages; every second turn has one per token."""
    rng = random.Random(seed)
    for k, turn in enumerate(turn for e in episodes for turn in e.turns):
        turn.advantage = rng.gauss(1, 2)
        turn.token_advantage = [rng.gauss(1, 2) for _ in turn.response_ids] if k % 2 else None
    return episodes


def test_whitening_counts_tokens_and_a_turns_advantage_is_its_first_tokens():
    episodes = with_advantages(random_episodes(4))
    want = whitened(token_advantages(episodes))
    kept = [turn.token_advantage is not None for e in episodes for turn in e.turns]
    rewards.whiten_tokens(episodes)
    assert token_advantages(episodes) == pytest.approx(want, abs=1e-4)
    turns = [turn for e in episodes for turn in e.turns]
    assert [turn.token_advantage is not None for turn in turns] == kept
    assert all(turn.advantage == turn.token_advantage[0] for turn in turns if turn.token_advantage)


def test_without_groups_the_kl_penalty_is_centered_over_the_batch():
    """Each episode is a group of its own, so that a group's mean would leave nothing."""
    class Alone(algorithms.Method):
        groups = False

    episodes = [make_episode([("a", "hall", None, 1)], group) for group in range(3)]
    for e, penalty in zip(episodes, (1.0, 2.0, 6.0)):
        e.turns[0].advantage, e.turns[0].kl = 0.5, [penalty]
    Alone(Settings()).subtract_kl(episodes)
    assert [e.turns[0].advantage for e in episodes] == pytest.approx([2.5, 1.5, -2.5])
    Alone(Settings()).subtract_kl([])


def test_without_groups_the_kl_penalty_is_centered_over_all_ranks(monkeypatch):
    """Here the other rank has two episodes, of penalties 3 and 5; tokens with an advantage lose it, too."""
    class Alone(algorithms.Method):
        groups = False

    episode = make_episode([("a", "hall", None, 2)], 0)
    (turn,) = episode.turns
    turn.advantage, turn.token_advantage, turn.kl = 0.5, [0.5, 0.7], [0.5, 0.5]
    monkeypatch.setattr(parallel, "all_sum", lambda sums: {"penalty": sums["penalty"] + 8,
                                                          "episodes": sums["episodes"] + 2})
    Alone(Settings()).subtract_kl([episode])
    assert (turn.advantage, turn.token_advantage) == (2.5, pytest.approx([2.5, 2.7]))


def test_no_episodes_give_empty_tensors_of_the_right_dtypes():
    won_E, turns_E, group_E, valid_S = rewards.episode_tensors([], Settings())
    assert (won_E.dtype, turns_E.dtype, group_E.dtype, valid_S.dtype) == (
        torch.bool, torch.long, torch.long, torch.bool)
    rewards.write_rewards([], Settings())
    algorithms.Method(Settings()).subtract_kl([])
