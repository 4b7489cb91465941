"""Proves that bench.spotcheck sees where stored episodes and the engine differ, and counts what it looked at.

    python -m pytest tests/test_spotcheck.py

The engine is household here, on generated rooms.
"""

import json

import pytest

from bench import spotcheck
from envs import household
from envs.alfred import expert, rooms
from envs.alfred.game import Game

pytestmark = pytest.mark.fast


class Rooms(household.World):
    """Where the real engine's world is; --games is not looked at."""

    def __init__(self, settings):
        super().__init__()


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A run's folder with three episodes of L0 and two of L1, all won by the expert, and these episodes."""
    tasks = [rooms.task("L0", k) for k in range(3)] + [rooms.task("L1", k) for k in range(2)]
    monkeypatch.setattr(spotcheck.alfworld, "World", Rooms)
    episodes = [episode_of(task, "L0" if k < 3 else "L1") for k, task in enumerate(tasks)]
    write(tmp_path, [{"phase": "rl"}, *episodes])
    return tmp_path, episodes


def episode_of(task, split):
    shown = expert.demonstrate(Game(), task, expert.learn_prior(rooms.tasks("L0")), 0, 0.0, 50)
    turns = [{"observation": reply.observation, "action": command, "valid": command in reply.admissible}
             for reply, command in zip(shown.replies, shown.commands)]
    return {"phase": "evaluation", "split": split, "task_id": task.id, "won": shown.won, "turns": turns,
            "final_observation": shown.observations[-1]}


def write(folder, rows):
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(folder, capsys, *flags):
    status = spotcheck.main([str(folder), "--games", "any", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_equal_episodes_are_equal_and_splits_take_turns(stored, capsys):
    folder, episodes = stored
    status, said = check(folder, capsys, "--n", "4")
    assert (status, said["differ"], said["episodes"], said["won"]) == (False, [], 4, 4)
    assert said["turns"] == sum(len(episodes[k]["turns"]) for k in (0, 3, 1, 4))
    assert check(folder, capsys, "--n", "6")[0]                  # fewer than asked


@pytest.mark.parametrize("change", [lambda e: e["turns"][2].update(observation="You see nothing."),
                                    lambda e: e["turns"][1].update(valid=not e["turns"][1]["valid"]),
                                    lambda e: e.update(won=not e["won"]),
                                    lambda e: e.update(final_observation="")])
def test_a_difference_is_found_and_named(stored, capsys, change):
    folder, episodes = stored
    change(episodes[3])
    write(folder, episodes)
    status, said = check(folder, capsys, "--n", "5")
    assert status and said["differ"] == [episodes[3]["task_id"]]


def test_a_turn_that_reached_no_game_is_left_out(stored, capsys):
    folder, episodes = stored
    episodes[0]["turns"][0]["action"] = None
    write(folder, episodes)
    assert spotcheck.replayable(folder, 9) == [episodes[k] for k in (1, 3, 2, 4)]


def test_games_that_are_not_there_are_one_line(tmp_path, capsys):
    write(tmp_path, [episode_of(rooms.task("L0", 0), "L0")])
    assert spotcheck.main([str(tmp_path), "--games", str(tmp_path / "gone")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.spotcheck: error: ") and error.count("\n") == 1
