"""Tests of games in worker processes: what an engine's errors become, and what is left when workers end.

    python -m pytest tests/envs/test_workers.py

A worker imports this file, so that nothing slow is imported at the top.
"""

import os
import socket
import subprocess
import time

import pytest
from waiting import PATIENCE_S, wait_for

from envs import EpisodeLost, Reply, Task, _workers

TASK = Task("train/1", "train", "count", 1)


class Refused(ValueError):
    """A ValueError that pickle cannot make again: its constructor takes two arguments."""

    def __init__(self, what, why):
        super().__init__(f"{what} is {why}")


class Engine:
    """Counts its steps, and starts a process whose number is the first observation."""

    def __init__(self, folder):
        self.folder, self.steps, self.stays = folder, 0, False
        self.child = subprocess.Popen(["sleep", "600"])

    def reset(self, problem):
        return Reply(str(self.child.pid))

    def step(self, command):
        self.steps += 1
        if command == "key":
            raise KeyError("two\nlines")
        if command == "refuse":
            raise Refused("it", "wrong")
        if command == "odd":
            return Reply(lambda: 0)
        if command == "die":
            os._exit(7)
        if command == "hang":
            time.sleep(600)
        self.stays = command == "stay"
        return Reply(str(self.steps))

    def close(self):
        if self.stays:
            time.sleep(600)
        self.child.kill()
        (self.folder / f"closed after {self.steps}").touch()


def engines(folder):
    """See _workers.serve."""
    _workers.CLOSE_S = PATIENCE_S if folder.name == "patient" else 0.2
    return lambda: Engine(folder)


def refuses(cups):
    """A factory that refuses its settings."""
    raise ValueError(f"--cups={cups}: too many")


@pytest.fixture
def make():
    """make(folder): two games on one worker, closed after the test, and the pids of what they started."""
    made = []

    def games(folder):
        folder.mkdir()
        made.extend(_workers.worker_games(2, 1, f"{__name__}:engines", PATIENCE_S, lambda task: 0, folder))
        return made[-2:], [int(game.reset(TASK).observation) for game in made[-2:]]

    yield games
    for game in made:
        game.close()


@pytest.mark.slow
@pytest.mark.parametrize("command, error, reason", [
    ("key", EpisodeLost, r"^KeyError: 'two\\nlines'$"),
    ("odd", EpisodeLost, "^AttributeError: .*pickle"),
    ("refuse", ValueError, "^it is wrong$")])
def test_an_engines_error_is_its_own_games_alone(make, tmp_path, command, error, reason):
    """The worker and its other game go on. After another error than ValueError the game has a new engine."""
    (first, second), _ = make(tmp_path / "patient")
    worker = first.worker.process
    assert [first.step("more").observation, second.step("more").observation] == ["1", "1"]
    with pytest.raises(error, match=reason) as raised:
        first.step(command)
    assert type(raised.value) is error
    first.reset(TASK)
    assert first.worker.process is worker
    assert first.step("more").observation == ("3" if error is ValueError else "1")
    assert second.step("more").observation == "2"


@pytest.mark.slow
@pytest.mark.parametrize("factory, settings, reason", [
    ("no_such_module:engines", 0, "^no_such_module:engines: ModuleNotFoundError: No module named"),
    (f"{__name__}:none", 0, f"^{__name__}:none: AttributeError: "),
    (f"{__name__}:refuses", 5, "^--cups=5: too many$")])
def test_a_factory_that_makes_no_engine_is_an_error_and_no_lost_episode(factory, settings, reason):
    (game,) = _workers.worker_games(1, 1, factory, PATIENCE_S, lambda task: 0, settings)
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            game.reset(TASK)
    game.close()


@pytest.mark.slow
def test_engines_are_closed_with_the_last_game(make, tmp_path):
    from conftest import is_alive
    (first, second), pids = make(tmp_path / "patient")
    first.step("more")
    for game in (first, second):
        game.close()
    assert {path.name for path in (tmp_path / "patient").iterdir()} == {"closed after 0", "closed after 1"}
    wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "hangs", "does not close"])
def test_what_engines_started_ends_with_their_worker(make, tmp_path, how):
    from conftest import is_alive
    (first, second), pids = make(tmp_path / "engines")
    if how == "hangs":
        with socket.socket(fileno=os.dup(first.worker.pipe.fileno())) as end:
            _workers.set_timeout(end, 0.5)
    if how == "does not close":
        assert first.step("stay").observation == "1"
        for game in (first, second):
            game.close()
    else:
        with pytest.raises(EpisodeLost, match="exit code 7" if how == "dies" else "no answer for"):
            first.step(how.removesuffix("s"))
    wait_for(lambda: not any(map(is_alive, pids)))
