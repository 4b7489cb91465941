"""Tests that lab.bench.spotcheck finds differences between stored episodes and the engine, and its counts.

The household game on generated rooms takes the place of the real engine.

    python -m pytest tests/lab/test_spotcheck.py
"""

import json

import pytest

from envs import household
from envs.alfred import expert, rooms
from envs.alfred.game import Game
from lab.bench import spotcheck


class Rooms(household.Environment):
    """Takes the place of the real engine's environment; ignores --games."""

    def __init__(self, settings):
        super().__init__()


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """(folder, episodes) of a run with three stored episodes of L0 and two of L1, all won by the expert."""
    tasks = [rooms.task("L0", k) for k in range(3)] + [rooms.task("L1", k) for k in range(2)]
    monkeypatch.setattr(spotcheck.alfworld, "Environment", Rooms)
    episodes = [episode_of(task, "L0" if k < 3 else "L1") for k, task in enumerate(tasks)]
    write(tmp_path, [{"phase": "rl"}, *episodes])
    return tmp_path, episodes


def episode_of(task, split):
    demonstration = expert.demonstrate(Game(), task, expert.learn_prior(rooms.tasks("L0")), 0, 0.0, 50)
    turns = [{"observation": reply.observation, "action": command, "valid": command in reply.admissible}
             for reply, command in zip(demonstration.replies, demonstration.commands)]
    return {"phase": "evaluation", "split": split, "task_id": task.id, "won": demonstration.won,
            "turns": turns, "final_observation": demonstration.observations[-1]}


def write(folder, rows):
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def check(folder, capsys, *flags):
    status = spotcheck.main([str(folder), "--games", "any", *flags])
    return status, json.loads(capsys.readouterr().out)


def test_equal_episodes_are_equal_and_splits_alternate(stored, capsys):
    folder, episodes = stored
    status, line = check(folder, capsys, "--n", "4")
    assert (status, line["differ"], line["episodes"], line["won"]) == (False, [], 4, 4)
    assert line["turns"] == sum(len(episodes[k]["turns"]) for k in (0, 3, 1, 4))
    assert check(folder, capsys, "--n", "6")[0]                  # fewer than requested


@pytest.mark.parametrize("change", [lambda e: e["turns"][2].update(observation="You see nothing."),
                                    lambda e: e["turns"][1].update(valid=not e["turns"][1]["valid"]),
                                    lambda e: e.update(won=not e["won"]),
                                    lambda e: e.update(final_observation="")])
def test_a_difference_is_found_and_named(stored, capsys, change):
    folder, episodes = stored
    change(episodes[3])
    write(folder, episodes)
    status, line = check(folder, capsys, "--n", "5")
    assert status and line["differ"] == [episodes[3]["task_id"]]


def test_an_episode_with_a_turn_without_command_is_left_out(stored):
    folder, episodes = stored
    episodes[0]["turns"][0]["action"] = None
    write(folder, episodes)
    assert spotcheck.replayable(folder, 9) == [episodes[k] for k in (1, 3, 2, 4)]


def test_lost_episodes_are_replayed_too(stored):
    folder, episodes = stored
    episodes[2]["won"] = False
    write(folder, episodes)
    assert spotcheck.replayable(folder, 3) == [episodes[k] for k in (0, 2, 3)]


def test_missing_games_are_an_error_of_one_line(tmp_path, capsys):
    write(tmp_path, [episode_of(rooms.task("L0", 0), "L0")])
    assert spotcheck.main([str(tmp_path), "--games", str(tmp_path / "gone")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lab.bench.spotcheck: error: ") and error.count("\n") == 1
