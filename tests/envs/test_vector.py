"""Tests of the vectorised class: equal to single games, groups, limits, errors.

    python -m pytest tests/envs/test_vector.py
"""

import random
import re
from dataclasses import replace

import pytest
from test_household import WIN, goal_of, kitchen, write_game

from envs.alfred.game import Game
from envs.alfred.games import PddlText
from envs.alfred.splits import TRAIN_TASKS, find_split
from envs.alfred.vector import Games


@pytest.fixture
def real(tmp_path):
    """A folder in ALFWorld's layout with two games in valid_seen that the commands WIN win."""
    for trial in "ab":
        write_game(tmp_path / "valid_seen/pick" / trial,
                   pddl_problem=kitchen(goal_of("pick_and_place_simple")))
    return str(tmp_path)


@pytest.mark.parametrize("split", ["train", "L2"])
def test_each_game_answers_as_it_does_alone(split):
    """Over several resets, with random commands, some of them refused, and with games that are won."""
    games, rng = Games(12, split, max_turns=9, group_size=3), random.Random(1)
    for _ in range(4):
        observations = games.reset()
        alone = [Game() for _ in range(12)]
        replies = [game.reset(task) for game, task in zip(alone, games.tasks)]
        assert observations == [reply.observation for reply in replies]
        over = [False] * 12
        for turn in range(1, 11):
            commands = [rng.choice([*reply.admissible, "fly"]) for reply in replies]
            expected = [0.0] * 12
            for i, command in enumerate(commands):
                if not over[i]:
                    replies[i] = alone[i].step(command)
                    expected[i] = float(replies[i].won)
                    over[i] = replies[i].won or turn >= 9
            assert games.step(commands) == ([reply.observation for reply in replies], expected, over)
            assert games.admissible == [reply.admissible for reply in replies]
            assert games.won == [reply.won for reply in replies] and games.dones == over
    assert all(games.dones)


def test_a_group_plays_the_same_task_and_the_next_reset_the_next_ones():
    games, tasks = Games(6, "L0", group_size=3), find_split("L0")
    for first in (0, 2, 4):
        games.reset()
        assert games.tasks == [tasks[first]] * 3 + [tasks[first + 1]] * 3
    own = [tasks[7], tasks[3]]
    games.reset(own)
    assert games.tasks == [own[0]] * 3 + [own[1]] * 3
    games.reset()
    assert games.tasks[0] == tasks[6]


def test_a_split_begins_again_after_its_last_task(real):
    games = Games(3, "L0", real)
    games.reset()
    assert [task.id for task in games.tasks] == [f"valid_seen/pick/{trial}" for trial in "aba"]
    assert len(games.split) == 2 and games.split[-1].id.endswith("b")


def test_a_won_game_is_rewarded_once_and_ignores_what_follows(real):
    games = Games(2, "L0", real, max_turns=6)
    games.reset()
    earned = [games.step([command, "look"]) for command in WIN]
    assert [rewards for _, rewards, _ in earned] == [[0.0, 0.0]] * 4 + [[1.0, 0.0]]
    assert earned[-1][2] == games.won == [True, False]
    observations, rewards, dones = games.step([None, "look"])
    assert observations[0] == earned[-1][0][0] and rewards == [0.0, 0.0] and dones == [True, True]


def test_what_it_returns_is_the_callers_own(real):
    games = Games(1, "L0", real)
    games.reset()[0] = "changed"
    answer = games.step(["look"])
    for values in answer:
        values[0] = "changed"
    assert games.step(["fly"]) == (["Nothing happens."], [0.0], [False]) and games.dones == [False]


@pytest.mark.parametrize(("changes", "message"), [
    ({"n": 0}, "n=0: expected 1 or more"), ({"n": "4"}, "n='4': expected 1 or more"),
    ({"n": True}, "n=True: expected 1 or more"), ({"max_turns": 0}, "max_turns=0: expected 1 or more"),
    ({"group_size": 3}, "group_size=3: expected a divisor of n=4"),
    ({"split": "L9"}, "split 'L9': expected one of train, dev"), ({"split": []}, "split=[]: expected text"),
    ({"types": "some"}, "types='some': expected one of part, all"),
    ({"games": "nothere"}, "games=nothere: no such file or folder"),
    ({"games": 3}, "games=3: expected a path")])
def test_invalid_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Games(**{"n": 4} | changes)


def test_invalid_calls_are_refused_and_change_nothing(real):
    games = Games(2, "L0", real)
    with pytest.raises(ValueError, match="call reset first"):
        games.step(["look", "look"])
    games.reset()
    games.step([WIN[0], "look"])
    for commands in (["look"], "look", None, ["look"] * 3, ["look", 3], [None, "look"]):
        with pytest.raises(ValueError, match="^step: (expected a list of 2|commands.*expected text)"):
            games.step(commands)
    for tasks in ([], "ab", 3, [None] * 3):
        with pytest.raises(ValueError, match="reset: expected a list of 2 tasks"):
            games.reset(tasks)
    broken = replace(games.split[0], problem=PddlText("broken", "broken", "broken"))
    with pytest.raises(ValueError):
        games.reset([games.split[0], broken])
    assert games.turns == 1
    assert games.step([WIN[1], "look"])[0][0] == "You pick up the apple 1 from the countertop 2."


def test_training_tasks_go_on_and_the_types_choose_them():
    part, every = find_split("train"), find_split("train", types="all")
    assert len(part) == len(every) == TRAIN_TASKS and part is find_split("train")
    kinds = [{split[i].task_type for i in range(60)} for split in (part, every)]
    assert len(kinds[0]) == 4 and len(kinds[1]) == 6
    assert part[TRAIN_TASKS + 5] == part[5]
    with pytest.raises(ValueError, match="index='5': expected an integer"):
        part["5"]
