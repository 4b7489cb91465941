"""Tests of REINFORCE++: rewards minus later KL penalties, whitened over all sampled tokens of the batch.

    python -m pytest tests/algorithms/test_reinforce.py

The oracle, `by_double_loop`, is plain Python over the records.
"""

import math
import random

import pytest
from hand_made import (
    SUCCESS_10,
    advantages_of,
    make_episode,
    method_of,
    on_two_ranks,
    random_episodes,
    reward_of,
)

from algorithms import reinforce


def by_double_loop(episodes, settings):
    """The advantage of each sampled token, turn by turn, with the penalties of `turn.kl` if any."""
    numbers = []
    for e in episodes:
        penalties = [x for turn in e.turns for x in turn.kl or [0.0] * len(turn.response_ids)]
        for t in range(len(penalties)):
            numbers.append(reward_of(e, settings) - sum(penalties[k] for k in range(t, len(penalties))))
    mean = sum(numbers) / len(numbers)
    std = math.sqrt(sum((x - mean) ** 2 for x in numbers) / len(numbers))
    white = iter([(x - mean) / std for x in numbers])
    return [[next(white) for _ in turn.response_ids] for e in episodes for turn in e.turns]


def token_advantages(episodes):
    """The advantages written to the tokens: a list per turn."""
    return [turn.token_advantage or [turn.advantage] * len(turn.response_ids)
            for e in episodes for turn in e.turns]


def assert_close(got, want):
    assert [len(turn) for turn in got] == [len(turn) for turn in want]
    assert sum(got, []) == pytest.approx(sum(want, []), abs=1e-4)


def with_kl(episodes, seed=5):
    """The episodes, with a random KL penalty per token."""
    rng = random.Random(seed)
    for turn in (turn for e in episodes for turn in e.turns):
        turn.kl = [rng.gauss(0.02, 0.1) for _ in turn.response_ids]
    return episodes


def test_whitening_by_hand():
    """Won with one token, lost with three: rewards 1, 0, 0, 0; mean 1/4, std sqrt(3)/4."""
    episodes = [make_episode([("a", "hall", None, 1)], won=True), make_episode([("a", "hall", None, 3)], 1)]
    got, metrics = advantages_of(method_of("reinforce"), episodes)
    assert got == pytest.approx([math.sqrt(3), -1 / math.sqrt(3)], abs=1e-6) and metrics == {}


@pytest.mark.parametrize("changes", [{}, SUCCESS_10, {"invalid": "format"}])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kl", [False, True])
def test_advantages_are_the_double_loop_over_tokens(changes, seed, kl):
    method, episodes = method_of("reinforce", **changes), random_episodes(seed)
    want = by_double_loop(with_kl(episodes) if kl else episodes, method.settings)
    got, _ = advantages_of(method, episodes)
    assert_close(token_advantages(episodes), want)
    assert got == pytest.approx([turn[0] for turn in want], abs=1e-4)        # the first token's of each turn
    assert all((turn.token_advantage is None) == (not kl) for e in episodes for turn in e.turns)


def test_each_token_has_the_penalties_from_it_to_the_end_subtracted_once():
    """Two turns: the last token has its own penalty of 0.5, the first all three; subtract_kl adds none."""
    assert reinforce.subtract_later_kl(1.0, [[0.1, -0.2], [0.5]]) == [pytest.approx([0.6, 0.7]), [0.5]]
    assert reinforce.subtract_later_kl(0.0, [[], [0.25]]) == [[], [-0.25]]
    method, episodes = method_of("reinforce"), with_kl(random_episodes(2))
    got, _ = advantages_of(method, episodes)
    tokens = token_advantages(episodes)
    method.subtract_kl(episodes)
    assert token_advantages(episodes) == tokens
    assert [turn.advantage for e in episodes for turn in e.turns] == got


@pytest.mark.parametrize("won", [False, True])
def test_equal_rewards_give_exactly_zero(won):
    episodes = [make_episode([("a", "hall", None, n)] * n, n, won) for n in range(1, 12)]
    got, _ = advantages_of(method_of("reinforce", success_reward=0.7), episodes)
    assert got == [0.0] * len(got)
    got, _ = advantages_of(method_of("reinforce", success_reward=0.7), episodes[:1])
    assert got == [0.0]


@pytest.mark.parametrize("kl", [False, True])
@pytest.mark.parametrize("cut", [15, 20])
def test_two_ranks_whiten_as_one(monkeypatch, cut, kl):
    """Also if one of them has no episode."""
    method, episodes = method_of("reinforce"), random_episodes(6)
    want = by_double_loop(with_kl(episodes) if kl else episodes, method.settings)

    def call(part):
        advantages_of(method, part)
        return token_advantages(part)

    first, second = on_two_ranks(monkeypatch, call, (episodes[:cut], episodes[cut:]))
    assert_close(first + second, want)


def test_a_second_assignment_replaces_the_first():
    """The same episodes are assigned credit with the penalty, then without."""
    method, episodes = method_of("reinforce"), with_kl(random_episodes(7))
    advantages_of(method, episodes)
    for turn in (turn for e in episodes for turn in e.turns):
        turn.kl = None
    got, _ = advantages_of(method, episodes)
    assert_close(token_advantages(episodes), by_double_loop(episodes, method.settings))
    assert got == [turn[0] for turn in token_advantages(episodes)]
