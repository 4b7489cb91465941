"""Proves lab/envs/twins.py: similar states, different probabilities to win, a seed's own outcomes.

What natural twins inherit (games, expert, coins) is tested there.

    python -m pytest tests/lab/test_twins.py
"""

from collections import Counter

import pytest

from lab.envs import twins
from rollout import Episode, Turn


def environment(**settings):
    return twins.Environment(twins.Environment.Settings(**settings))


def play(game, task, command):
    return game.reset(task), game.step(command)


@pytest.mark.parametrize("p_tasks", [4, 8, 12])
def test_training_has_p_tasks_of_kind_p_and_the_cold_start_half(p_tasks):
    for types, expected in (("part", p_tasks), ("all", 8)):
        tasks = environment(p_tasks=p_tasks).train_tasks(types, 5_000_000, 64)
        assert Counter(task.task_type for task in tasks) == {"P": 4 * expected, "N": 64 - 4 * expected}
        assert len({task.id for task in tasks}) == 64


def test_a_state_has_one_sign_among_noise_and_depends_on_seed_and_name_only():
    one, same, other = environment(), environment(), twins.Environment(seed=1)
    for task in one.train_tasks("part", 0, 32):
        kind, tokens = task.problem
        assert len(tokens) == 8 and sum(token in twins.SIGNS[kind] for token in tokens) == 1
        assert sum(token in twins.NOISE for token in tokens) == 7
        observation = one.make(1)[0].reset(task).observation
        assert twins.kind_of(observation) == kind and "".join(one.vocabulary()[1:]).count(f" {tokens[0]}")
    first, repeated, reseeded = (each.train_tasks("part", 0, 32) for each in (one, same, other))
    assert first == repeated != reseeded
    assert {task.task_type for task in one.split_tasks("N")} == {"N"}
    assert one.split_tasks("P") == other.split_tasks("P")


@pytest.mark.parametrize("kind, command, wins", [("P", "pull", 0.9), ("P", "lift", 0.4), ("N", "pull", 0.2),
                                                 ("N", "lift", 0.5)])
def test_the_probability_to_win(kind, command, wins):
    game = environment(flaw=0.3).make(1)[0]
    task = twins.task("dev/0", "dev", kind)
    assert twins.chance(kind, command == "pull", 0.3) == pytest.approx(wins)
    won = [play(game, task, command)[1].won for _ in range(4000)]
    assert sum(won) / 4000 == pytest.approx(wins, abs=4 * (wins * (1 - wins) / 4000) ** 0.5)


def test_outcomes_and_coins_are_a_seeds_own():
    drawn = []
    for seed in (0, 0, 1):
        env = twins.Environment(seed=seed)
        game, tasks = env.make(1)[0], env.train_tasks("part", 0, 64)
        turn = Turn("", [], [], [], "", "pull", True, "")
        drawn.append([(game.reset(task), game.luck, twins.coins(Episode(task, 0, 3, turns=[turn])))[1:]
                      for task in tasks])
    assert drawn[0] == drawn[1] and not {luck for luck, _ in drawn[0]} & {luck for luck, _ in drawn[2]}
    assert 16 < sum(one[1] == other[1] for one, other in zip(drawn[0], drawn[2])) < 48


def test_labels():
    P, N = (f"You see oak {sign} elm." for sign in ("moon", "well"))
    assert environment().oracle([P, P, N, N, N], ["pull", "lift", "pull", "lift", "dance"]) == [
        "good", "bad", "bad", "good", "bad"]


def test_the_oracles_labels_are_rewarded_if_told_to():
    for worth in (0.0, 2.0):
        env = environment(label_reward=worth)
        for kind in "PN":
            for command in twins.COMMANDS:
                start, end = play(env.make(1)[0], twins.task("dev/0", "dev", kind), command)
                assert end.reward == worth * (env.oracle([start.observation], [command]) == ["good"])
        assert play(env.make(1)[0], twins.task("dev/0", "dev", "P"), "dance")[1].reward == 0
