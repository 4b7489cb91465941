"""Tests of RLOO's leave-one-out advantage: by hand, and by a double loop in plain Python.

    python -m pytest tests/algorithms/test_rloo.py
"""

import pytest
import torch
from conftest import NOOP_MESSAGE
from hand_made import (
    SUCCESS_10,
    advantages_of,
    flat_turns,
    make_episode,
    method_of,
    random_episodes,
    reward_of,
)

from algorithms import rloo


def test_leave_one_out_by_hand():
    """Rewards 1, 0 and 0.5 of task 7: the means of the others are 0.25, 0.75 and 0.5. Task 2: 1 and 3."""
    reward, group = torch.tensor([1.0, 1.0, 0.0, 3.0, 0.5]), torch.tensor([7, 2, 7, 2, 7])
    got = rloo.leave_one_out_advantage(reward, group)
    assert got.tolist() == pytest.approx([0.75, -2.0, -0.75, 2.0, 0.0], abs=1e-6)


def by_double_loop(episodes, settings):
    """The advantage of every turn."""
    advantages = []
    for e, _ in flat_turns(episodes):
        total, others = 0.0, 0
        for other in episodes:
            if other is not e and other.group == e.group:
                total, others = total + reward_of(other, settings), others + 1
        advantages.append(reward_of(e, settings) - total / others if others else 0.0)
    return advantages


@pytest.mark.parametrize("changes", [{}, SUCCESS_10, {"invalid": "format"}])
@pytest.mark.parametrize("seed", range(3))
def test_rloo_is_the_double_loop_over_the_others(changes, seed):
    """Groups of five, four, two and one."""
    episodes = [e for k, e in enumerate(random_episodes(seed)) if k not in (7, 10, 11, 12, 15, 16, 17, 18)]
    method = method_of("rloo", **changes)
    got, metrics = advantages_of(method, episodes)
    assert got == pytest.approx(by_double_loop(episodes, method.settings), abs=1e-4)
    assert metrics == {} and max(got) > 0.1


@pytest.mark.parametrize("value", [0.1, 0.7, -1.3])
def test_equal_rewards_give_exactly_zero(value):
    for size in range(1, 65):
        got = rloo.leave_one_out_advantage(torch.full((size,), value), torch.zeros(size, dtype=torch.long))
        assert got.tolist() == [0.0] * size


def test_the_only_episode_of_a_group_has_no_advantage():
    episodes = [make_episode([("a", "hall", None, 2), ("b", NOOP_MESSAGE, None, 1)], won=True)]
    assert advantages_of(method_of("rloo"), episodes)[0] == [0.0, 0.0]
    assert advantages_of(method_of("rloo"), [])[0] == []


def test_a_kl_penalty_is_part_of_the_reward():
    """Each episode's R - KL (0.9, -0.3 and 0.2) minus the mean R - KL of the others."""
    episodes = [make_episode([("a", "hall", None, n)], won=won)
                for n, won in ((2, True), (1, False), (1, False))]
    for e, kl in zip(episodes, ([0.04, 0.06], [0.3], [-0.2])):
        e.turns[0].kl = kl
    method = method_of("rloo")
    advantages_of(method, episodes)
    method.subtract_kl(episodes)
    want = [0.9 - (-0.3 + 0.2) / 2, -0.3 - (0.9 + 0.2) / 2, 0.2 - (0.9 - 0.3) / 2]
    assert [e.turns[0].advantage for e in episodes] == pytest.approx(want, abs=1e-6)
