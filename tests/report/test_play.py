"""Proves that a person can play beside a model: its command, its judge's word, either's command in the game.

    python -m pytest tests/test_play.py
"""

import io
import re
from types import SimpleNamespace

import pytest
import torch
from conftest import Corridor
from test_household import GAMES, needs_games
from tiny_runs import ROOT

import judge
from envs import Task
from lm.engine import Response
from report import play

pytestmark = pytest.mark.fast

TASK = Task("train/3", "train", "walk", (1, 4))
SETTINGS = SimpleNamespace(max_response_tokens=4, judge_response_tokens=2, history=0, max_turns=5, seed=0,
                           context=400, on_truncation="fail", admissible_only=False)


class Recording(Corridor):
    """The corridor, and the commands that it was given."""

    def __init__(self):
        super().__init__()
        self.commands = []

    def step(self, command):
        self.commands.append(command)
        return super().step(command)


@pytest.fixture
def player(model, chat):
    return play.Player(model, chat, SETTINGS)


def typed(what):
    """A stdin in which this is typed."""
    return io.TextIOWrapper(io.BytesIO(what if isinstance(what, bytes) else what.encode()), encoding="utf-8")


def saying(chat, monkeypatch, command):
    """The model would always give this command."""
    monkeypatch.setattr(play.Player, "respond", lambda *_: Response(chat.respond(command), [], False))


def played(player, capsys, *lines):
    """(commands that the game was given, what was printed, whether it was won)."""
    env = Recording()
    won = play.play(player, TASK, env, iter(lines))
    return env.commands, capsys.readouterr().out, won


def test_an_empty_line_is_the_models_command_and_any_other_the_persons(player, capsys, monkeypatch):
    saying(player.chat, monkeypatch, "left")
    commands, text, won = played(player, capsys, "\n", " right\n", "\n")
    assert commands == ["left", "right", "left"] and won is False
    assert text.count("the model: left ") == 4 and text.count("of yours it says") == 1


def test_its_own_response_is_what_it_would_sample(player, capsys):
    """Played without a word from the person, the model's commands are those that were shown."""
    commands, text, _ = played(player, capsys, *["\n"] * 9)
    shown = re.findall(r"the model: (.*)   \(", text)
    assert 0 < len(commands) <= len(shown) <= 5 and [c for c in shown if c in commands] == commands


def test_a_won_game_says_so_and_the_turn_limit_ends_one(player, capsys, monkeypatch):
    for command, n, end in (("right", 3, "You have won."), ("left", 5, "Over after 5 turns, not won.")):
        saying(player.chat, monkeypatch, command)
        commands, text, won = played(player, capsys, *["\n"] * 9)
        assert commands == [command] * n and text.endswith(f"{end}\n") and won == (command == "right")


def test_the_judge_is_asked_eight_times_about_just_this_response(player, monkeypatch):
    pending, prompts = play.answer, []
    monkeypatch.setattr(play, "answer", lambda model, questions, *rest: prompts.append(questions[0])
                        or pending(model, questions, *rest))
    said = player.judged([5, 6], [7], 3)
    assert prompts == [[5, 6, 7] + player.chat.message(judge.QUESTION["plain"])]
    assert sum(map(int, re.findall(r"\d+", said))) == 8 and said == player.judged([5, 6], [7], 3)


@pytest.mark.parametrize("name", ["L9/0", "L0", "L0/x", "L0/-1", "L0/99999"])
def test_a_game_that_there_is_not_is_named(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(""))
    environment = SimpleNamespace(splits=("dev", "L0"), split=lambda _: [TASK])
    with pytest.raises(ValueError, match=f"--game={name}: "):
        play.task_named(environment, name)
    assert play.task_named(environment, "L0/0") is TASK
    with pytest.raises(SystemExit):
        play.main(["--model", str(tmp_path / "none")])
    assert "none" in capsys.readouterr().err


COMMITTED = ROOT / "lab" / "results" / "alfworld_model"


def test_the_committed_model_can_be_played_beside_at_once(capsys, monkeypatch):
    """It learned in real games, and wins most generated ones too; no games are needed to try it. (A third
    is asked for: rounding differs between machines.)"""
    monkeypatch.setattr(play.Player, "judged", lambda *_: "")
    won = 0
    for k in range(12):
        monkeypatch.setattr("sys.stdin", typed("\n" * 20))
        play.main(["--model", str(COMMITTED), "--game", f"L0/{k}"])
        won += capsys.readouterr().out.endswith("You have won.\n")
    assert won >= 4
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) < 2.5e6


def test_a_model_can_be_held_to_what_is_possible(capsys, monkeypatch):
    """One of noise gives no command, unless it is."""
    load = play.qwen.load_pretrained

    def noise(folder):
        model = load(folder)
        with torch.no_grad():
            for k, parameter in enumerate(model.parameters()):
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(k))
        return model

    monkeypatch.setattr(play.qwen, "load_pretrained", noise)
    monkeypatch.setattr(play.Player, "judged", lambda *_: "")
    turns = []
    for flags in ([], ["--admissible-only"]):
        monkeypatch.setattr("sys.stdin", typed("\n" * 20))
        play.main(["--model", str(COMMITTED), "--game", "L1/0", "--dagger", "8", *flags])
        text = capsys.readouterr().out
        turns.append(text.count("the model: "))
    assert turns[0] == 1 < turns[1] and "Nothing happens." not in text


@pytest.mark.parametrize("flags, said", [(["--judge-kind", "value"], "--judge-kind=value"), ([], "closed")])
def test_what_cannot_be_played_is_said_in_one_line(flags, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed("") if flags else None)
    with pytest.raises(SystemExit):
        play.main(["--model", str(COMMITTED), *flags])
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_what_is_typed_may_be_no_text_and_ctrl_c_ends_it(capsys, monkeypatch):
    monkeypatch.setattr(play.Player, "judged", lambda *_: "")
    monkeypatch.setattr("sys.stdin", typed(b"\xff\xfe\n"))
    play.main(["--model", str(COMMITTED)])
    assert capsys.readouterr().out.count("the model:") == 2

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(play, "play", interrupted)
    play.main(["--model", str(COMMITTED)])


@needs_games
def test_it_wins_real_games(capsys, monkeypatch):
    monkeypatch.setattr(play.Player, "judged", lambda *_: "")
    won = 0
    for k in range(0, 130, 13):
        monkeypatch.setattr("sys.stdin", typed("\n" * 30))
        play.main(["--model", str(COMMITTED), "--game", f"L1/{k}", "--games", str(GAMES),
                   "--max-turns", "30"])
        won += capsys.readouterr().out.endswith("You have won.\n")
    assert won >= 7
