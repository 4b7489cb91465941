"""Tests of GiGPO's advantages (Eq. 3 and 5 to 8): the paper's, and those of verl-agent's code.

    python -m pytest tests/algorithms/test_gigpo.py

The oracles (`gigpo_by_loops`, `literal_gigpo`) are plain Python with the statistics module.
"""

import statistics

import pytest
import torch
from conftest import NOOP_MESSAGE
from hand_made import (
    CODE,
    SUCCESS_10,
    advantages_of,
    episode_level,
    flat_turns,
    make_episode,
    method_of,
    on_two_ranks,
    penalized,
    random_episodes,
    relative_advantage,
    turn_reward,
)

from algorithms import gigpo

# Full episodes

def step_returns(episode, settings):
    """The discounted return of each turn; in the code's variant, earlier turns do not get later penalties."""
    def penalty(t):
        return settings.invalid_penalty * penalized(episode.turns[t], settings)

    def success(t):
        won = settings.success_reward * (episode.won and t == len(episode.turns) - 1)
        return won + episode.turns[t].reward

    code, turns = settings.variant == "code", range(len(episode.turns))
    return [sum(settings.step_gamma ** (k - t) * (success(k) if code else turn_reward(episode, k, settings))
                for k in turns[t:]) - code * penalty(t) for t in turns]


def gigpo_by_loops(episodes, settings):
    """The advantage of every turn."""
    def state(e, t):
        return e.group, e.turns[t].observation if settings.variant == "code" else e.turns[t].anchor

    turns = flat_turns(episodes)
    returns = {id(e): step_returns(e, settings) for e in episodes}
    advantages = []
    for e, t in turns:
        met = [returns[id(other)][k] for other, k in turns if state(other, k) == state(e, t)]
        step = relative_advantage(returns[id(e)][t], met, settings.normalize_std, statistics.stdev)
        level = episode_level(e, t, episodes, settings, settings.normalize_std)
        advantages.append(level + settings.step_weight * step)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"normalize_std": True}, SUCCESS_10, {"invalid": "format"},
                                     {"variant": "code"}, CODE, {"normalize_std": True, **CODE}])
@pytest.mark.parametrize("seed", [3, 4])
def test_gigpo_is_its_equations_written_out(changes, seed):
    changes = dict(step_gamma=0.9, step_weight=0.7, normalize_std=False) | changes
    method, episodes = method_of("gigpo", **changes), random_episodes(seed, pays=seed == 4)
    got, metrics = advantages_of(method, episodes)
    assert got == pytest.approx(gigpo_by_loops(episodes, method.settings), abs=1e-4)
    assert sum(metrics.values()) == pytest.approx(1) and len(metrics) == 4


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_gigpo_with_step_weight_0_is_grpo(variant):
    episodes, changes = random_episodes(5), dict(variant=variant, normalize_std=False)
    alone, _ = advantages_of(method_of("gigpo", step_weight=0.0, **changes), episodes)
    assert alone == advantages_of(method_of("grpo", **changes), episodes)[0]


def equal_pairs(keys):
    """A matrix: which pairs of keys are equal."""
    return [[a == b for a in keys] for b in keys]


def test_a_refused_turn_does_not_change_the_state():
    """The raw observation would compare the turns after "Nothing happens.", which are in different rooms."""
    refused = ("dance", NOOP_MESSAGE, None, 1)
    kitchen = make_episode([("a", "kitchen", None, 1), refused, ("b", "hall", None, 1)], won=True)
    cellar = make_episode([("b", "cellar", None, 1), refused, ("a", "hall", None, 1)])
    other_game = make_episode([("a", "kitchen", None, 1)], group=1)
    episodes = [kitchen, cellar, other_game]
    for raw, rooms in ((False, ["start", "kitchen", "kitchen", "start", "cellar", "cellar", "other start"]),
                       (True, ["start", "kitchen", "nothing", "start", "cellar", "nothing", "other start"])):
        assert equal_pairs(gigpo.anchor_numbers(episodes, raw).tolist()) == equal_pairs(rooms)
    episodes, step = episodes[:2], {}
    for variant in ("paper", "code"):
        changes = dict(variant=variant, normalize_std=False, invalid_penalty=0.0)
        both, _ = advantages_of(method_of("gigpo", step_gamma=0.9, step_weight=1.0, **changes), episodes)
        grpo, _ = advantages_of(method_of("grpo", **changes), episodes)
        step[variant] = [a - b for a, b in zip(both, grpo)]
    assert step["code"] == pytest.approx([0.405, 0.0, 0.5, -0.405, 0.0, -0.5], abs=1e-6)
    # kitchen: returns 0.9 and 1; cellar: both are 0
    assert step["paper"] == pytest.approx([0.405, -0.05, 0.05, -0.405, 0.0, 0.0], abs=1e-6)


def test_anchor_shares_count_turns():
    """9 turns: 4 share the start, 2 share a room, and 3 have a state of their own."""
    lines = [[("a", "hall", None, 1), ("b", "end", None, 1)], [("a", "hall", None, 1), ("b", "end", None, 1)],
             [("a", "attic", None, 1), ("b", "end", None, 1)],
             [("a", "cellar", None, 1), ("a", "roof", None, 1), ("b", "end", None, 1)]]
    _, metrics = advantages_of(method_of("gigpo"), [make_episode(turns) for turns in lines])
    assert metrics == pytest.approx({"gigpo/anchor_1_frac": 3 / 9, "gigpo/anchor_2-4_frac": 6 / 9,
                                     "gigpo/anchor_5-16_frac": 0, "gigpo/anchor_17+_frac": 0})


@pytest.mark.parametrize("name", ["gigpo", "rlvmr"])
@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("cut", [15, 20])
def test_two_ranks_give_the_credit_of_one(monkeypatch, name, variant, cut):
    """The second rank has one of the four groups, or none; RLVMR's tags are compared over both ranks."""
    method, episodes = method_of(name, variant=variant), random_episodes(16)
    single_rank, metrics = advantages_of(method, episodes)
    (first, of_first), (second, of_second) = on_two_ranks(
        monkeypatch, lambda part: advantages_of(method, part), (episodes[:cut], episodes[cut:]))
    assert first + second == pytest.approx(single_rank, abs=1e-4)
    assert of_first == of_second == pytest.approx(metrics)


# The two levels, as functions of tensors

def test_anchor_advantage_by_hand():
    """State 0: returns 3, 1, 2; state 1: occurs once; state 2: equal returns."""
    returns, anchor = torch.tensor([3.0, 9.0, 1.0, 0.7, 2.0, 0.7]), torch.tensor([0, 1, 0, 2, 0, 2])
    assert gigpo.anchor_advantage(returns, anchor, False).tolist() == [1.0, 0.0, -1.0, 0.0, 0.0, 0.0]
    scaled = gigpo.anchor_advantage(2 * returns, anchor, True)                # std of 6, 2, 4, unbiased: 2
    assert scaled.tolist() == pytest.approx([1.0, 0.0, -1.0, 0.0, 0.0, 0.0], abs=1e-5)
    assert scaled[[1, 3, 5]].tolist() == [0.0] * 3


def test_anchor_sizes_by_hand():
    anchor = torch.tensor([7] + [1] * 2 + [2] * 4 + [3] * 5 + [4] * 20)
    assert gigpo.anchor_sizes(anchor) == {"1": 1, "2-4": 6, "5-16": 5, "17+": 20}
    assert gigpo.anchor_sizes(anchor[:0]) == {"1": 0, "2-4": 0, "5-16": 0, "17+": 0}
