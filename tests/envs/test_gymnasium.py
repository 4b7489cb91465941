"""Proves --env gymnasium:ID: what a game answers, how it is found, and what becomes of a bad environment.

    python -m pytest tests/envs/test_gymnasium.py

Oracles: the household game itself, played directly, and environments of counter_env.py that go wrong in one
way.
"""

import importlib.util
import itertools
import os
import socket
import sys
import time
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from tiny_runs import rows

gymnasium = pytest.importorskip("gymnasium", reason="needs: pip install gymnasium")
from counter_env import Counter  # noqa: E402

import config  # noqa: E402
import envs  # noqa: E402
import gcd  # noqa: E402
import rollout  # noqa: E402
from envs import EpisodeLost, Task  # noqa: E402
from envs._workers import set_timeout, worker_games  # noqa: E402
from envs.alfred.gym import Household  # noqa: E402
from infra import files  # noqa: E402
from infra.signals import Stop  # noqa: E402

HERE = Path(__file__).resolve().parent
HOUSEHOLD = "envs.alfred.gym:gcd/Household-v0"
TINY = dict(device="cpu", hidden_size=16, layers=1, tasks=2, group_size=2, iterations=2, minibatches=1,
            max_turns=4, slots=4, evaluate="none", gcd=False, context=512)


def environment(name, **settings):
    """The environment of an ID, as the command line makes it."""
    return config.parse([f"--env=gymnasium:{name}", "--no-gcd", *config.arguments(settings)]).environment


def task(seed=7):
    return Task(f"train/{seed}", "train", "count", seed)


def test_replies_hold_rewards_the_end_and_its_reason():
    (game,) = environment("tests/Counter-v0").make(1)
    assert game.reset(task()) == envs.Reply("Count from 7.", ("more", "wait"))
    got = [game.step(command) for command in ("more", "hm", "more", "more")]
    assert [(reply.observation, reply.reward, reply.won, reply.done, reply.ended) for reply in got] == [
        ("1", 0.25, False, False, ""), ("1", 0.0, False, False, ""), ("2", 0.25, False, False, ""),
        ("3", 0.25, True, True, "won")]
    game.reset(task())
    assert game.step("stop")[2:4] == (False, True) and game.step("stop").ended == "truncated"
    game.close()


@pytest.mark.parametrize("reward, terminated, info, won", [
    (1.0, True, {}, True), (0.0, True, {}, False), (1.0, False, {}, False),
    (0.0, True, {"success": True}, True), (1.0, True, {"success": True, "won": False}, False)])
def test_an_episode_is_won_if_info_says_so_or_else_if_it_ended_with_a_reward(
        monkeypatch, reward, terminated, info, won):
    monkeypatch.setattr(Counter, "step", lambda self, action: ("1", reward, terminated, False, info))
    (game,) = environment("tests/Counter-v0").make(1)
    game.reset(task())
    assert game.step("more").won == won


def test_the_household_through_gymnasium_is_the_household():
    (game,), own = environment(HOUSEHOLD).make(1), gymnasium.make(HOUSEHOLD)
    for seed in (3, 4):
        observation, info = own.reset(seed=seed)
        reply = game.reset(task(seed))
        assert (reply.observation, reply.admissible) == (observation, tuple(info["admissible_commands"]))
        for k in range(6):
            command = reply.admissible[k % len(reply.admissible)]
            observation, *_, info = own.step(command)
            reply = game.step(command)
            assert (reply.observation, reply.admissible) == (observation, tuple(info["admissible_commands"]))
    assert isinstance(own.unwrapped, Household)


def test_seeds_are_the_tasks_and_no_split_is_trained_on():
    made = environment("tests/Counter-v0")
    seeds = {split: {task.problem for task in made.split_tasks(split)} for split in made.splits}
    trained = made.train_tasks("part", 0, 500)
    assert seeds == {"dev": set(range(64)), "test": set(range(64, 192))}
    assert made.train_tasks("all", 100, 5) == trained[100:105] and len({t.problem for t in trained}) == 500
    assert min(t.problem for t in trained) > 191 and max(t.problem for t in trained) < 2**31
    assert made.vocabulary()[:2] == ["Count", " from"] and made.description() == "gymnasium tests/Counter-v0"
    assert trained != environment("tests/Counter-v0", seed=1).train_tasks("part", 0, 500)


def test_a_value_after_the_name_is_the_first_setting():
    parsed = config.parse(["--env", "gymnasium:a:b/C-v0", "--no-gcd"])
    coded = config.parse(["--env", "gymnasium:a:b/C-v0", "--no-gcd", "--variant", "code"])
    assert coded.algorithm.settings.success_reward == 0.0          # its rewards are its own
    one, other = (config.parse(["--env", f"gymnasium:{name}", "--no-gcd"]).environment
                  for name in ("A-v0", "B-v0"))
    contents = {made.task_content(made.split_tasks("dev")[0]) for made in (one, other)}
    assert contents == {"A-v0", "B-v0"}
    assert (parsed.env, parsed.environment.settings.id) == ("gymnasium", "a:b/C-v0")
    assert parsed.algorithm.settings.success_reward == 0.0 and parsed.slots == 16
    for flags, message in (
            (["--env=gymnasium"], "--env=gymnasium: needs an ID, as in --env gymnasium:ID"),
            (["--env=gymnasium:"], "--env=gymnasium: needs an ID"),
            (["--env=nope:x"], "--env=nope: expected one"),
            (["--env=household:nothere"], "--games=nothere: no such file or folder"),
            (["--env=a/b.py:x"], "--env=a/b.py:x: expected one of")):
        with pytest.raises(ValueError, match=f"^{message}"):
            config.parse(flags).environment.train_tasks("all", 0, 1)


@pytest.mark.parametrize("name, reason", [
    ("nope-v0", "NameNotFound: Environment `nope` doesn't exist"),
    ("nosuchmodule:x-v0", "ModuleNotFoundError: No module named 'nosuchmodule'")])
def test_an_unknown_environment_is_refused_in_a_line(name, reason):
    (game,) = environment(name).make(1)
    with pytest.raises(ValueError, match=f"^--env=gymnasium:{name}: {reason}") as refused:
        game.reset(task())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fails", [range(1, 16), range(16)])
def test_a_lost_reset_is_left_out_of_the_vocabulary(monkeypatch, fails):
    given, reset, calls = environment("tests/Counter-v0"), Counter.reset, iter(range(16))

    def fragile(self, **options):
        if next(calls) in fails:
            raise OSError("busy")
        return reset(self, **options)

    monkeypatch.setattr(Counter, "reset", fragile)
    with pytest.raises(EpisodeLost, match="busy") if 0 in fails else nullcontext():
        assert given.vocabulary()


# Bad environments

BAD = {"text": "step: observation is None; expected text", "raises": r"step raised KeyError: 'two\\nlines'",
       "long": "step: an observation of 10000000 characters; expected at most 100000",
       "nan": "step: reward is nan; expected a Python number",
       "cancels": "step raised CancelledError: late",
       "four": "step raised ValueError: not enough values to unpack",
       "info": r"step: admissible is \(3,\); expected a list of texts"}


@pytest.mark.parametrize("kind", BAD)
def test_what_goes_wrong_loses_the_episode_and_is_named(kind):
    """The next reset has a new environment."""
    (game,) = environment(f"tests/{kind}-v0").make(1)
    for _ in range(2):
        game.reset(task())
        assert game.step("more").observation == "1"
        with pytest.raises(EpisodeLost, match=f"^--env=gymnasium:tests/{kind}-v0: {BAD[kind]}"):
            game.step("more")
        assert game.env is None


def test_an_environment_that_cannot_be_made_again_loses_the_episode(monkeypatch):
    (game,) = environment("tests/raises-v0").make(1)
    game.reset(task())
    game.step("more")
    with pytest.raises(EpisodeLost):
        game.step("more")
    with monkeypatch.context() as broken:
        broken.setattr(Counter, "__init__", lambda self, bad: 1 / 0)
        with pytest.raises(EpisodeLost, match="^--env=gymnasium:tests/raises-v0: ZeroDivisionError"):
            game.reset(task())
    assert game.reset(task()).observation == "Count from 7."


@pytest.mark.slow
def test_a_step_that_hangs_is_interrupted_and_its_environment_has_time_to_close(monkeypatch):
    closed = []
    monkeypatch.setattr(Counter, "close", lambda self: (time.sleep(1.5), closed.append(self)))
    (game,) = environment("tests/hangs-v0", time_limit_s=0.2).make(1)
    local = rollout.LocalGame(game)
    for method, argument in (("reset", task()), ("step", "more")):
        local.send(method, argument)
        local.receive()
    local.send("step", "more")
    began = time.monotonic()
    with pytest.raises(EpisodeLost, match="no answer within 0.2 s"):
        local.receive()
    assert time.monotonic() - began < 30 and game.env is None and len(closed) == 1


def test_there_are_no_more_workers_than_games(monkeypatch):
    monkeypatch.setattr(envs.gymnasium, "worker_games", lambda n, workers, *given: (n, workers))
    assert [environment("tests/Counter-v0", processes=3).make(n) for n in (2, 4)] == [(2, 2), (4, 3)]


@pytest.fixture
def workers(monkeypatch):
    """workers(name, **settings): two games on one worker process, which finds counter_env.py."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{HERE.parent}:{HERE.parents[1]}")
    made = []

    def make(name, **settings):
        made.extend(environment(f"counter_env:{name}", processes=1, **settings).make(2))
        return made[-2:]

    yield make
    for game in made:
        game.close()


@pytest.mark.slow
def test_worker_processes_play_the_same(workers):
    games, (local,) = workers("tests/Counter-v0"), environment("tests/Counter-v0").make(1)
    for game in games:
        game.send("reset", task(), 0)
    assert [game.receive() for game in games] == [local.reset(task())] * 2
    for command in ("more", "no", "more", "more"):
        assert games[1].step(command) == local.step(command)


@pytest.mark.slow
@pytest.mark.parametrize("kind, reason", [
    ("raises", "--env=gymnasium:counter_env:tests/raises-v0: step raised KeyError"),
    ("dies", "its worker died with exit code 7"), ("hangs", "its worker gave no answer for 2 s")])
def test_a_worker_that_fails_loses_the_episode_and_is_replaced(workers, kind, reason):
    game, _ = workers(f"tests/{kind}-v0", time_limit_s=60.0)
    game.reset(task())
    if kind == "hangs":                          # its start takes longer than the limit that is tested
        with socket.socket(fileno=os.dup(game.worker.pipe.fileno())) as end:
            set_timeout(end, 2)
        game.worker.timeout_s = 2
    assert game.step("more").observation == "1"
    with pytest.raises(EpisodeLost, match=reason):
        game.step("more")
    assert game.reset(task()).observation == "Count from 7."


@pytest.mark.slow
def test_a_worker_that_cannot_import_a_class_of_its_settings_has_died(monkeypatch):
    """As one of a plug-in's file, whose module only this process has."""
    module = ModuleType("plugin_of_this_process")
    exec("class Settings: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (game,) = worker_games(1, 1, "envs.gymnasium:engines", 60.0, lambda task: 0, module.Settings())
    began = time.monotonic()
    with closing(game), pytest.raises(EpisodeLost, match="its worker died with exit code 1"):
        game.reset(task())
    assert time.monotonic() - began < 50


# Runs

def train(out, name, **changes):
    with Stop.restored():
        return gcd.main(config.arguments(TINY | {"out": str(out), "env": f"gymnasium:{name}"} | changes))


@pytest.mark.slow
def test_two_iterations_log_game_times_rewards_and_reasons(tmp_path):
    assert train(tmp_path / "run", HOUSEHOLD, admissible_only=True) == 0
    (first, *_), lines = files.read_lines(tmp_path / "run" / "metrics.jsonl")[0], rows(tmp_path / "run")
    assert first["games"] == f"gymnasium {HOUSEHOLD}" and first["config"]["id"] == HOUSEHOLD
    assert [line["iteration"] for line in lines] == [0, 1]
    for line in lines:
        assert 0 < line["time/game_ms"] < 1000 * line["time/rollout_s"]
        assert line["rollout/invalid_frac"] == 0.0
    episodes, _ = files.read_lines(tmp_path / "run" / "episodes.jsonl")
    assert {episode["ended"] for episode in episodes} <= {"won", "turn limit", "context full"}
    assert all(turn["reward"] == 0.0 for episode in episodes for turn in episode["turns"])


@pytest.mark.slow
def test_a_lost_episode_is_counted_and_one_that_is_always_lost_is_named(tmp_path, capsys, monkeypatch):
    """Here the first steps fail."""
    failing, step = [3], Counter.step

    def sometimes(self, action):
        self.bad, self.n = "raises" if failing[0] > 0 else "", max(self.n, 1)
        try:
            return step(self, action)
        except KeyError:
            failing[0] -= 1
            raise

    monkeypatch.setattr(Counter, "step", sometimes)
    changes = dict(iterations=1, admissible_only=True)
    assert train(tmp_path / "some", "tests/Counter-v0", **changes) == 0
    (row,) = rows(tmp_path / "some")
    assert row["rollout/restarts"] == 3
    failing[0] = 10**6
    assert train(tmp_path / "all", "tests/Counter-v0", **changes) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("gcd.py: error: ")
    assert "lost 6 times: --env=gymnasium:tests/Counter-v0: step" in error


@pytest.mark.slow
def test_a_lost_reset_of_the_check_before_a_run_is_repeated(tmp_path, monkeypatch):
    reset, calls = Counter.reset, itertools.count()

    def fragile(self, **options):
        if next(calls) == envs.gymnasium.SAMPLE:                  # the first after the vocabulary's
            raise OSError("busy")
        return reset(self, **options)

    monkeypatch.setattr(Counter, "reset", fragile)
    assert train(tmp_path, "tests/Counter-v0", iterations=1) == 0
    assert rows(tmp_path)[0]["rollout/restarts"] == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="needs: pip install textarena")
def test_a_game_of_textarena_trains_for_two_iterations(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE.parents[1] / "examples")
    name = "textarena_gym:TextArena/GuessTheNumber-v0"
    (game,) = environment(name).make(1)
    first = game.reset(task(3))
    assert "number between 1 and 20" in first.observation and first == game.reset(task(3))
    texts = [game.step(f"[{n}]") for n in range(1, 21) if not game.reset(task(3)).done]
    assert sum(reply.won for reply in texts) == 1
    assert "higher" in texts[0].observation and len(texts[0].observation) < 200
    assert train(tmp_path / "run", name, max_response_tokens=4) == 0
    for row in rows(tmp_path / "run"):
        assert row["rollout/episodes"] == 4 and row["time/game_ms"] > 0
