"""Proves that twin states are what studies/twins.py needs: alike to look at, apart in what wins, repeatable.

    python -m pytest tests/test_twins.py
"""

from collections import Counter

import pytest
from tiny_runs import rows, train

from envs import twins
from rollout import Episode, Turn

pytestmark = pytest.mark.fast


def world(**settings):
    return twins.World(twins.World.Settings(**settings))


def play(game, task, command):
    return game.reset(task), game.step(command)


@pytest.mark.parametrize("p_tasks", [4, 8, 12])
def test_training_mixes_the_kinds_as_asked_and_the_cold_start_evenly(p_tasks):
    for types, wanted in (("part", p_tasks), ("all", 8)):
        tasks = world(p_tasks=p_tasks).train(types, 5_000_000, 64)
        assert Counter(task.task_type for task in tasks) == {"P": 4 * wanted, "N": 64 - 4 * wanted}
        assert len({task.id for task in tasks}) == 64


def test_a_situation_has_one_sign_among_noise_and_is_fixed_by_seed_and_name():
    one, again, other = world(), world(), twins.World(seed=1)
    for task in one.train("part", 0, 32):
        kind, words = task.problem
        assert len(words) == 8 and sum(word in twins.SIGNS[kind] for word in words) == 1
        assert sum(word in twins.NOISE for word in words) == 7
        seen = one.make(1)[0].reset(task).observation
        assert twins.kind_of(seen) == kind and "".join(one.words()[1:]).count(f" {words[0]}")
    assert one.train("part", 0, 32) == again.train("part", 0, 32) != other.train("part", 0, 32)
    assert {task.task_type for task in one.split("N")} == {"N"} and one.split("P") == other.split("P")


@pytest.mark.parametrize("kind, command, wins", [("P", "pull", 0.9), ("P", "lift", 0.4), ("N", "pull", 0.2),
                                                 ("N", "lift", 0.5)])
def test_what_wins_how_often(kind, command, wins):
    game = world(flaw=0.3).make(1)[0]
    task = world().task("dev/0", "dev", kind)
    assert twins.chance(kind, command, 0.3) == pytest.approx(wins)
    won = [play(game, task, command)[1].won for _ in range(4000)]
    assert sum(won) / 4000 == pytest.approx(wins, abs=4 * (wins * (1 - wins) / 4000) ** 0.5)


def test_chance_is_the_same_in_any_slot_and_every_play_has_its_own():
    task = world().train("part", 0, 1)[0]
    one, two = world().make(1), world().make(3)
    outcomes = [[play(games[k % len(games)], task, "pull")[1].won for k in range(40)] for games in (one, two)]
    assert outcomes[0] == outcomes[1] and 0 < sum(outcomes[0]) < 40


def test_a_word_that_is_no_command_is_refused():
    before, after = play(world().make(1)[0], world().split("P")[0], "dance")
    assert after.observation == twins.World.nothing and not after.done and "pull" in before.admissible


def test_the_expert_pulls_as_often_as_asked_under_either_sign():
    expert = world(likely=0.25).expert([])
    for kind in "PN":
        shown = [expert.show(world().task(f"t/{i}", "train", kind), i, 0.2, 1) for i in range(2000)]
        assert all(s.won and len(s.commands) == 1 and not any(s.mistakes) for s in shown)
        assert sum(s.commands == ["pull"] for s in shown) / 2000 == pytest.approx(0.25, abs=0.04)


def test_labels():
    P, N = (f"You see oak {sign} elm." for sign in ("moon", "well"))
    assert world().oracle([P, P, N, N, N], ["pull", "lift", "pull", "lift", "dance"]) == [
        "good", "bad", "bad", "good", "bad"]
    tasks = world().train("part", 0, 400)
    drawn = [twins.coins(Episode(task, 0, k, turns=[Turn(P, [], [], [], "", "pull", True, P)]))[0]
             for k, task in enumerate(tasks)]
    assert 160 < drawn.count("good") < 240


def test_it_is_trained_by_gcd(tmp_path):
    flags = ["--env", "twins", "--max-turns", 1, "--demonstrations", 64, "--judge-demonstrations", 32]
    assert train(tmp_path, *flags, "--cold-start-lr", 3e-3, "--cold-start-epochs", 24, "--tasks", 16) == 0
    assert [row["rollout/turns"] for row in rows(tmp_path)] == [1.0, 1.0]
    assert all(row["judge/turns"] > 0 and row["rollout/invalid_frac"] < 0.5 for row in rows(tmp_path))
