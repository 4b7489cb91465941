"""Tests of GRPO's advantages (the paper's and verl-agent's code's), and of which groups have a gradient.

    python -m pytest tests/algorithms/test_grpo.py

The oracle, hand_made's `episode_level`, is plain Python over the records.
"""

from types import SimpleNamespace

import pytest
from conftest import NOOP_MESSAGE
from hand_made import (
    CODE,
    SUCCESS_10,
    advantages_of,
    episode_level,
    flat_turns,
    make_episode,
    method_of,
    random_episodes,
)

import gcd
from algorithms import rewards


@pytest.mark.parametrize("changes", [{}, {"normalize_std": True}, SUCCESS_10, {"invalid": "format"},
                                     {"normalize_std": True, **SUCCESS_10}, {"variant": "code"}, CODE,
                                     {"normalize_std": True, **CODE}])
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_gives_every_turn_its_episodes_advantage(changes, seed):
    """With --variant code, every turn has the advantage of its own reward."""
    grpo, episodes = method_of("grpo", **changes), random_episodes(seed, pays=seed == 1)
    got, metrics = advantages_of(grpo, episodes)
    want = [episode_level(e, t, episodes, grpo.settings, grpo.settings.normalize_std)
            for e, t in flat_turns(episodes)]
    assert got == pytest.approx(want, abs=1e-4)
    assert metrics == {} and max(want) > 0.1


def test_the_codes_turn_rewards_by_hand():
    """Rewards 1, 1 - 0.1 (an invalid turn) and 0: their mean is 19/30, and the long episode counts twice."""
    episodes = [make_episode([("a", "hall", None, 1), ("b", NOOP_MESSAGE, None, 1)], won=True),
                make_episode([("a", "hall", None, 1)])]
    got, _ = advantages_of(method_of("grpo", variant="code"), episodes)
    assert got == pytest.approx([1 - 19 / 30, 0.9 - 19 / 30, -19 / 30], abs=1e-6)


# Which groups have a gradient

def run_of(method, dynamic_sampling="drop", kl="none"):
    """A run with the settings that gcd.drop_zero_advantage_groups reads."""
    return SimpleNamespace(config=SimpleNamespace(algorithm=method, dynamic_sampling=dynamic_sampling, kl=kl,
                                                  entropy_coef=0.0))


@pytest.mark.parametrize("name", ["grpo", "rloo", "nthr", "rlvmr"])
def test_groups_of_equal_rewards_are_zero_variance_groups(name):
    method, episodes = method_of(name), random_episodes(2)
    rewards.write_rewards(episodes, method.settings)
    equal = {group for group in range(4) if len({e.reward for e in episodes if e.group == group}) == 1}
    assert method.zero_variance_groups(episodes) == equal == {3}


def test_groups_whose_turn_rewards_differ_are_no_zero_variance_groups():
    """Two lost episodes with one invalid turn each: their rewards are equal, their turns' rewards are not."""
    lines = [("a", "hall", None, 1), ("dance", NOOP_MESSAGE, None, 1)]
    episodes = [make_episode(lines) for _ in range(2)] + [make_episode(lines[:1], 1) for _ in range(2)]
    for changes, equal in ((SUCCESS_10, {0, 1}), ({**CODE, "invalid": "admissible"}, {1}), (CODE, {0, 1})):
        method = method_of("grpo", **changes)
        rewards.write_rewards(episodes, method.settings)
        assert method.zero_variance_groups(episodes) == equal


def test_groups_without_any_advantage_are_dropped():
    turns_and_groups = (2, 7), (1, 3), (3, 7), (2, 5), (1, 3)
    episodes = [make_episode([("a", "hall", None, 1)] * n, group) for n, group in turns_and_groups]
    episodes[2].turns[-1].advantage = -0.5
    method = method_of("grpo")
    assert gcd.drop_zero_advantage_groups(run_of(method), episodes) == [episodes[0], episodes[2]]
    assert gcd.drop_zero_advantage_groups(run_of(method, "keep"), episodes) == episodes
    assert gcd.drop_zero_advantage_groups(run_of(method, kl="loss"), episodes) == episodes


def test_groups_whose_only_advantages_are_of_tokens_are_kept():
    """`turn.advantage` may be 0 where `turn.token_advantage` is not; token advantages of 0 do not count."""
    turns_and_groups = (2, 7), (1, 3), (1, 7), (1, 5)
    episodes = [make_episode([("a", "hall", None, 2)] * n, group) for n, group in turns_and_groups]
    episodes[0].turns[1].token_advantage = [0.0, -0.25]
    episodes[3].turns[0].token_advantage = [0.0, 0.0]
    assert not any(turn.advantage for e in episodes for turn in e.turns)
    assert gcd.drop_zero_advantage_groups(run_of(method_of("grpo")), episodes) == [episodes[0], episodes[2]]


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_groups_of_equal_rewards_are_kept_only_if_their_turns_differ(name):
    """Group 0 is won in one turn and in two: GRPO has no gradient, GiGPO prefers the short episode."""
    short, long = [("a", "end", None, 1)], [("a", "start of 0", None, 1), ("b", "end", None, 1)]
    episodes = [make_episode(short, won=True), make_episode(long, won=True), make_episode(short, group=1),
                make_episode(long, group=1)]
    method = method_of(name)
    got, _ = advantages_of(method, episodes)
    by_turn = name == "gigpo"
    assert gcd.drop_zero_advantage_groups(run_of(method), episodes) == (episodes[:2] if by_turn else [])
    assert (got[1] < 0) == by_turn
