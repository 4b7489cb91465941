"""Proves that GRPO credits episodes by its equation, of the paper and of verl-agent's code, and which groups
teach.

    python -m pytest tests/test_grpo.py

The oracle, hand_made's `episode_level`, is plain Python over the records.
"""

from types import SimpleNamespace

import pytest
from conftest import NOTHING
from hand_made import (
    CODE,
    TENFOLD,
    credited,
    episode_level,
    flat_turns,
    make_episode,
    method_of,
    random_episodes,
)

import gcd
from algorithms import rewards

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("changes", [{}, {"normalize_std": True}, TENFOLD, {"invalid": "format"},
                                     {"normalize_std": True, **TENFOLD}, {"variant": "code"}, CODE,
                                     {"normalize_std": True, **CODE}])
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_gives_every_turn_its_episodes_advantage(changes, seed):
    """With --variant code, each turn its row's."""
    grpo, episodes = method_of("grpo", **changes), random_episodes(seed)
    got, metrics = credited(grpo, episodes)
    want = [episode_level(e, t, episodes, grpo.settings, grpo.settings.normalize_std)
            for e, t in flat_turns(episodes)]
    assert got == pytest.approx(want, abs=1e-4)
    assert metrics == {} and max(want) > 0.1


def test_the_codes_rows_by_hand():
    """Rows 1, 1 - 0.1 (an invalid turn) and 0: their mean is 19/30, and the long episode counts twice."""
    episodes = [make_episode([("a", "hall", None, 1), ("b", NOTHING, None, 1)], won=True),
                make_episode([("a", "hall", None, 1)])]
    got, _ = credited(method_of("grpo", variant="code"), episodes)
    assert got == pytest.approx([1 - 19 / 30, 0.9 - 19 / 30, -19 / 30], abs=1e-6)


def test_what_an_earlier_iteration_gave_to_tokens_is_gone():
    episodes = random_episodes(1)
    want, _ = credited(method_of("grpo"), episodes)
    episodes[0].turns[0].token_advantage = [9.0] * len(episodes[0].turns[0].response_ids)
    assert credited(method_of("grpo"), episodes)[0] == want
    assert episodes[0].turns[0].token_advantage is None


# Which groups teach

def run_of(method, dynamic_sampling="drop", kl="none"):
    """What gcd.py asks of a run to see what teaches."""
    return SimpleNamespace(config=SimpleNamespace(algorithm=method, dynamic_sampling=dynamic_sampling, kl=kl))


@pytest.mark.parametrize("name", ["grpo", "rloo", "nthr", "rlvmr"])
def test_groups_whose_episodes_earned_alike_have_no_spread(name):
    method, episodes = method_of(name), random_episodes(2)
    rewards.write_rewards(episodes, method.settings)
    equal = {group for group in range(4) if len({e.reward for e in episodes if e.group == group}) == 1}
    assert method.without_spread(episodes) == equal == {3}


def test_groups_whose_rows_differ_did_not_earn_alike():
    """Lost alike, one invalid turn each: the sums are equal, the rows are not."""
    lines = [("a", "hall", None, 1), ("dance", NOTHING, None, 1)]
    episodes = [make_episode(lines) for _ in range(2)] + [make_episode(lines[:1], 1) for _ in range(2)]
    for changes, equal in ((TENFOLD, {0, 1}), ({**CODE, "invalid": "admissible"}, {1}), (CODE, {0, 1})):
        method = method_of("grpo", **changes)
        rewards.write_rewards(episodes, method.settings)
        assert method.without_spread(episodes) == equal


def test_silent_episodes_are_those_of_groups_without_any_advantage():
    turns_and_groups = (2, 7), (1, 3), (3, 7), (2, 5), (1, 3)
    episodes = [make_episode([("a", "hall", None, 1)] * n, group) for n, group in turns_and_groups]
    episodes[2].turns[-1].advantage = -0.5
    method = method_of("grpo")
    assert gcd.teaching(run_of(method), episodes) == [episodes[0], episodes[2]]
    assert gcd.teaching(run_of(method, "keep"), episodes) == episodes
    assert gcd.teaching(run_of(method, kl="loss"), episodes) == episodes


@pytest.mark.parametrize("name", ["grpo", "gigpo"])
def test_groups_that_earned_alike_are_silent_unless_their_turns_differ(name):
    """Won alike in one group, by ways of different length: GRPO learns nothing, GiGPO prefers the short
    one."""
    short, long = [("a", "end", None, 1)], [("a", "start of 0", None, 1), ("b", "end", None, 1)]
    episodes = [make_episode(short, won=True), make_episode(long, won=True), make_episode(short, group=1),
                make_episode(long, group=1)]
    method = method_of(name)
    got, _ = credited(method, episodes)
    taught = name == "gigpo"
    assert gcd.teaching(run_of(method), episodes) == (episodes[:2] if taught else [])
    assert (got[1] < 0) == taught
