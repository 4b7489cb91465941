"""Tests of RLVMR's tag rewards and advantages: the paper's, and those of its released code.

    python -m pytest tests/algorithms/test_rlvmr.py

Oracles: tables of cases by hand, and plain Python over the records with the statistics module.
"""

from statistics import fmean, pstdev, stdev

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
    random_episodes,
    relative_advantage,
)

from algorithms import rlvmr

# Tag rewards

@pytest.mark.parametrize("tags, actions, valid, won, tag_reward, tag_group", [
    (["planning", "monitor"], "ab", [1, 1], True, [1, 0], ["planning", "none"]),
    (["planning", "planning"], "ab", [1, 0], False, [0, 0], ["planning", "planning"]),
    (["explore", "explore", "explore"], "aba", [1, 1, 1], False, [1, 1, 0], ["explore"] * 3),
    (["explore"] * 3, [None, "a", "b"], [0, 1, 1], True, [0, 1, 1], ["none", "explore", "explore"]),
    (["monitor", "explore"], "aa", [0, 1], True, [0, 0], ["none", "explore"]),
    (["reflection", "reflection"], "ab", [1, 1], False, [1, 0], ["reflection"] * 2),
    (["monitor", "reflection"], "ab", [0, 1], False, [0, 1], ["none", "reflection"]),
    (["monitor", "reflection"], "aa", [0, 1], False, [0, 0], ["none", "reflection"]),
    (["monitor", "reflection"], "ab", [0, 0], False, [0, 1], ["none", "reflection"]),
    ([None, "reflection"], [None, "b"], [0, 1], False, [0, 1], ["none", "reflection"]),
    ([None, None], [None, None], [0, 0], True, [0, 0], ["none", "none"]),
    ([], [], [], True, [], [])])
def test_tag_rewards_of_the_code_case_by_case(tags, actions, valid, won, tag_reward, tag_group):
    assert rlvmr.tag_rewards(tags, list(actions), valid, won, "code") == (tag_reward, tag_group)


@pytest.mark.parametrize("tags, actions, valid, won, tag_reward", [
    (["planning", "monitor"], ["go to desk 1", "look"], [1, 1], True, [1, 0]),
    (["explore"] * 4, ["go to desk 1", "open desk 1", "take cup 1 from desk 1", "look"], [1] * 4, False,
     [1, 0, 1, 0]),
    (["explore"] * 4, ["go to hall", "look at hall", "open door to hall", "go to attic"], [1] * 4, False,
     [1, 0, 1, 1]),
    (["monitor", "explore"], ["go to desk 1", "examine desk 2"], [0, 1], False, [0, 1]),
    (["explore"] * 3, ["go to desk 1", "go to Desk 1", "GO TO desk 1"], [1, 0, 0], False, [1, 0, 0]),
    (["explore"] * 2, ["connect red wire terminal 1 to battery anode",
                       "connect blue wire terminal 1 to battery anode"], [1, 1], False, [1, 1]),
    (["reflection", "reflection"], ["a", "b"], [1, 1], False, [0, 0]),            # no failure before
    # only the admissible one is rewarded
    (["monitor", "reflection", "reflection"], ["a", "b", "c"], [0, 0, 1], False, [0, 0, 1]),
    ([None, "reflection"], [None, "b"], [0, 1], False, [0, 1])])
def test_tag_rewards_of_the_paper_case_by_case(tags, actions, valid, won, tag_reward):
    assert rlvmr.tag_rewards(tags, actions, valid, won)[0] == tag_reward


# Full episodes

NAMED = {letter: {letter} for letter in "abcd"}


def tags_by_loops(episode, settings):
    """(tag by which the turn is compared, tag reward) per turn."""
    found, turns, code = [], episode.turns, settings.variant == "code"
    for t, turn in enumerate(turns):
        reward, last = 0.0, turns[t - 1] if t else None
        if turn.tag == "planning" and episode.won:
            reward = 1.0
        if turn.tag == "explore" and all(before.action != turn.action for before in turns[:t]):
            reward = 1.0
        if turn.tag == "reflection" and code:
            reward = float(last is None or not last.valid and last.action != turn.action)
        if turn.tag == "reflection" and not code:
            reward = float(last is not None and not last.valid and turn.valid)
        found.append((turn.tag if turn.tag != "monitor" else None, reward))
    return found


def rlvmr_by_loops(episodes, settings):
    """The advantage of every turn."""
    turns, tags = flat_turns(episodes), {id(e): tags_by_loops(e, settings) for e in episodes}
    advantages = []
    for e, t in turns:
        tag, reward = tags[id(e)][t]
        same = [(other.group, tags[id(other)][k][1]) for other, k in turns if tags[id(other)][k][0] == tag]
        level = episode_level(e, t, episodes, settings, normalize=True)
        if settings.variant == "paper":
            alpha, of_batch = 1 - settings.step_weight, [r for _, r in same]
            step = relative_advantage(reward, of_batch, True, pstdev)
            advantages.append(alpha * level + (1 - alpha) * step)
        else:
            of_task = [r for group, r in same if group == e.group]
            step = reward if len(of_task) == 1 else relative_advantage(reward, of_task, True, stdev)
            advantages.append(level + settings.step_weight * step)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"step_weight": 0.2}, SUCCESS_10, {"invalid": "format"},
                                     {"variant": "code"}, CODE, {"step_weight": 1.0, **CODE}])
@pytest.mark.parametrize("seed", [6, 7])
def test_rlvmr_is_its_equations_written_out(changes, seed, monkeypatch):
    monkeypatch.setattr(rlvmr, "names_in", NAMED.get)                    # commands here are one letter
    method, episodes = method_of("rlvmr", **{"step_weight": 0.7, **changes}), random_episodes(seed)
    got, metrics = advantages_of(method, episodes)
    assert got == pytest.approx(rlvmr_by_loops(episodes, method.settings), abs=1e-4)
    found = [pair for e in episodes for pair in tags_by_loops(e, method.settings)]
    tags = [tag or "none" for tag, _ in found]
    want = {f"rlvmr/{name}_frac": tags.count(name) / len(tags)
            for name in ("none", "planning", "explore", "reflection")}
    assert metrics == pytest.approx(want | {"rlvmr/tag_reward": fmean(reward for _, reward in found)})
    assert all(share > 0 for share in metrics.values())


def test_a_malformed_turn_is_a_failure_without_an_action():
    """A malformed turn counts as no earlier action, and a reflection after it is rewarded."""
    episode = make_episode([("a", "hall", "explore", 1), (None, NOOP_MESSAGE, None, 1),
                            ("b", "attic", "reflection", 1), ("a", "hall", "explore", 1),
                            ("c", "roof", "reflection", 1)], won=True)
    other = make_episode([("a", "hall", "planning", 1)])
    got, metrics = advantages_of(method_of("rlvmr", variant="code", step_weight=1.0), [episode, other])
    # explore 1, 0; reflection 1, 0; the lost episode's planning and the malformed turn are single, with 0
    assert metrics["rlvmr/tag_reward"] == pytest.approx(2 / 6)
    # turn rewards 1, 0.9, 1, 1, 1 and 0 have the mean 4.9 / 6; tag rewards 1 and 0 have a std of 1 / sqrt 2
    rows = [1, 0.9, 1, 1, 1, 0]
    level = [(r - 4.9 / 6) / (stdev(rows) + 1e-6) for r in rows]
    half = 0.5 ** 0.5
    want = [a + step for a, step in zip(level, [half, 0.0, half, -half, -half, 0.0])]
    assert got == pytest.approx(want, abs=1e-4)


def test_alpha_cannot_be_negative():
    with pytest.raises(ValueError, match="--step-weight=1.5"):
        method_of("rlvmr", step_weight=1.5)
    assert method_of("rlvmr", step_weight=1.5, variant="code").settings.step_weight == 1.5


# The two advantages, as functions of tensors

def test_tag_moments_of_ranks_add_up_and_equal_rewards_give_exactly_zero():
    reward, tag = torch.tensor([0.7] * 11 + [1.0, 0.0]), torch.tensor([1] * 11 + [2, 2])
    parts = sum(rlvmr.tag_moments(reward[half], tag[half]) for half in (slice(0, 6), slice(6, 13)))
    assert torch.allclose(parts, rlvmr.tag_moments(reward, tag))
    assert parts[0].tolist() == [0, 11, 2, 0] and parts[1, 2] == 1 and parts[2, 2] == 1
    got = rlvmr.paper_advantage(torch.ones(1), torch.zeros(1).long(), torch.tensor([13]), reward, tag, parts)
    assert got[:11].tolist() == [0.0] * 11
    assert got[11:].tolist() == pytest.approx([0.5, -0.5], abs=1e-5)


def test_the_code_keeps_the_raw_reward_of_a_single_turn():
    """Group 0: one episode of one turn. Group 1: one episode of three turns with equal rewards: 0."""
    args = torch.full((4,), 10.0), torch.tensor([0, 1, 1, 1])
    got = rlvmr.code_advantage(*args, torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([1, 1, 2, 2]), 0.5)
    half = 0.5 * 0.5 ** 0.5                              # of 1 and 0: std 1 / sqrt 2, so +-0.707
    assert got.tolist() == pytest.approx([10.5, 0.5, half, -half], abs=1e-5)
