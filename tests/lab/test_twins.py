"""Proves lab/envs/twins.py: similar states, different probabilities to win, reproducible games.

    python -m pytest tests/lab/test_twins.py
"""

from collections import Counter

import pytest
from tiny_runs import rows, train

from lab.envs import twins
from rollout import Episode, Turn


def environment(**settings):
    return twins.Environment(twins.Environment.Settings(**settings))


def play(game, task, command):
    return game.reset(task), game.step(command)


@pytest.mark.fast
@pytest.mark.parametrize("p_tasks", [4, 8, 12])
def test_training_has_p_tasks_of_kind_p_and_the_cold_start_half(p_tasks):
    for types, expected in (("part", p_tasks), ("all", 8)):
        tasks = environment(p_tasks=p_tasks).train_tasks(types, 5_000_000, 64)
        assert Counter(task.task_type for task in tasks) == {"P": 4 * expected, "N": 64 - 4 * expected}
        assert len({task.id for task in tasks}) == 64


@pytest.mark.fast
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


@pytest.mark.fast
@pytest.mark.parametrize("kind, command, wins", [("P", "pull", 0.9), ("P", "lift", 0.4), ("N", "pull", 0.2),
                                                 ("N", "lift", 0.5)])
def test_the_probability_to_win(kind, command, wins):
    game = environment(flaw=0.3).make(1)[0]
    task = twins.task("dev/0", "dev", kind)
    assert twins.chance(kind, command == "pull", 0.3) == pytest.approx(wins)
    won = [play(game, task, command)[1].won for _ in range(4000)]
    assert sum(won) / 4000 == pytest.approx(wins, abs=4 * (wins * (1 - wins) / 4000) ** 0.5)


@pytest.mark.fast
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


@pytest.mark.fast
def test_random_outcomes_are_the_same_in_any_slot_and_differ_between_plays():
    task = environment().train_tasks("part", 0, 1)[0]
    one, two = environment().make(1), environment().make(3)
    outcomes = [[play(games[k % len(games)], task, "pull")[1].won for k in range(40)] for games in (one, two)]
    assert outcomes[0] == outcomes[1] and 0 < sum(outcomes[0]) < 40


@pytest.mark.fast
def test_an_unknown_command_ends_the_episode():
    before, after = play(environment().make(1)[0], environment().split_tasks("P")[0], "dance")
    assert after.observation == twins.Environment.noop_message
    assert after.done and after.taken is False and not after.won
    assert "pull" in before.admissible


@pytest.mark.fast
def test_the_expert_pulls_with_probability_q_under_either_sign():
    expert = environment(likely=0.25).expert([])
    for kind in "PN":
        plays = [expert.show(twins.task(f"t/{i}", "train", kind), i, 0.2, 1) for i in range(2000)]
        assert all(s.won and len(s.commands) == 1 and not any(s.mistakes) for s in plays)
        assert sum(s.commands == ["pull"] for s in plays) / 2000 == pytest.approx(0.25, abs=0.04)


@pytest.mark.fast
def test_labels():
    P, N = (f"You see oak {sign} elm." for sign in ("moon", "well"))
    assert environment().oracle([P, P, N, N, N], ["pull", "lift", "pull", "lift", "dance"]) == [
        "good", "bad", "bad", "good", "bad"]
    tasks = environment().train_tasks("part", 0, 400)
    drawn = [twins.coins(Episode(task, 0, k, turns=[Turn(P, [], [], [], "", "pull", True, P)]))[0]
             for k, task in enumerate(tasks)]
    assert 160 < drawn.count("good") < 240


def test_it_is_trained_by_gcd(tmp_path):
    cold = "--demonstrations 64 --judge-demonstrations 32 --cold-start-lr 3e-3 --cold-start-epochs 24".split()
    assert train(tmp_path, "--env", "lab/envs/twins.py", "--max-turns", 1, *cold, "--tasks", 16) == 0
    assert [row["rollout/turns"] for row in rows(tmp_path)] == [1.0, 1.0]
    assert all(row["judge/turns"] > 0 and row["rollout/invalid_frac"] < 0.5 for row in rows(tmp_path))
