"""Proves playing with a model on the terminal: its command, its judge's opinion, the person's command.

    python -m pytest tests/report/test_play.py
"""

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Corridor, rounding
from test_household import GAMES, needs_games
from tiny_runs import ROOT

import agent
import judge
from agent import Agent
from envs import Task
from infra.streams import stream
from lm.chat import Chat
from lm.engine import Response, Sampling, answer
from report import play

TASK = Task("train/3", "train", "walk", (1, 4))
COMMITTED = ROOT / "lab" / "results" / "alfworld_model"


class Recording(Corridor):
    """A corridor that records the commands that it receives."""

    def __init__(self):
        super().__init__()
        self.commands = []

    def step(self, command):
        self.commands.append(command)
        return super().step(command)


@pytest.fixture
def settings(tmp_path):
    return SimpleNamespace(env="corridor", max_response_tokens=4, judge_response_tokens=2, history=0,
                           max_turns=5, seed=0, context=400, on_truncation="fail", admissible_only=False,
                           model=tmp_path / "model")


@pytest.fixture
def player(model, chat, settings):
    return Agent(model, chat, settings)


def typed(text):
    """A stdin in which this text, or these bytes, is typed."""
    data = text if isinstance(text, bytes) else text.encode()
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def always_respond(chat, monkeypatch, command):
    """Make the model always give this command."""
    monkeypatch.setattr(Agent, "respond", lambda *_: Response(chat.respond(command), [], False))


def without_opinions(monkeypatch):
    """Leave out the judge, which takes most of the time."""
    monkeypatch.setattr(play, "opinion", lambda *_: "")


def played(player, capsys, *lines):
    """(the commands that the game received, the printed text, whether it was won)."""
    env = Recording()
    won = play.play(player, TASK, env, iter(lines))
    return env.commands, capsys.readouterr().out, won


# The game

def test_an_empty_line_takes_the_models_command_and_another_line_is_a_command(player, capsys, monkeypatch):
    always_respond(player.chat, monkeypatch, "left")
    commands, text, won = played(player, capsys, "\n", " right\n", "\n")
    assert commands == ["left", "right", "left"] and won is False
    assert text.count("the model: left ") == 4 and text.count("of yours: its judge: ") == 1


def test_the_models_commands_are_those_that_it_samples(player, capsys):
    """With empty lines only, the game receives the commands that were printed."""
    commands, text, _ = played(player, capsys, *["\n"] * 9)
    printed = re.findall(r"the model: (.*)   \(", text)
    assert 0 < len(commands) <= len(printed) <= 5 and [c for c in printed if c in commands] == commands


def test_winning_and_the_turn_limit_end_a_game(player, capsys, monkeypatch):
    for command, n, end in (("right", 3, "You have won."),
                            ("left", 5, "Over after 5 turns, not won (turn limit).")):
        always_respond(player.chat, monkeypatch, command)
        commands, text, won = played(player, capsys, *["\n"] * 9)
        assert commands == [command] * n and text.endswith(f"{end}\n") and won == (command == "right")


def test_a_corrected_models_instruction_precedes_the_game(player, capsys, monkeypatch):
    prompts = []

    def respond(_, conversation):
        prompts.append([*conversation.prompt])
        return Response(player.chat.respond("left"), [], False)

    monkeypatch.setattr(Agent, "respond", respond)
    for env in ("elsewhere", "lab/envs/corridor.py"):                        # of the run that trained it
        state = {"instruction": "go right", "settings": {"env": env}}
        played(replace(player, state=state), capsys)
    first = Corridor().reset(TASK)
    assert prompts == [player.chat.observe(first, True, text) for text in ("", "go right")]


@pytest.mark.parametrize("on_truncation, sent, end", [
    ("fail", [], "Over after 1 turns, not won (response too long)."),
    ("invalid", ["right"], "Over after 5 turns, not won (turn limit).")])
def test_a_response_that_is_cut_off_is_not_shown_as_a_command(
        player, capsys, monkeypatch, on_truncation, sent, end):
    """What is shown as the model's command is sent."""
    player.config.on_truncation = on_truncation
    cut = Response(player.chat.respond("left")[:1], [], True)
    given = [cut, Response(player.chat.respond("right"), [], False), cut, cut, cut]
    monkeypatch.setattr(Agent, "respond", lambda *_: given.pop(0))
    commands, text, _ = played(player, capsys, *["\n"] * 9)
    assert "[1] the model: (no command, cut off) left   (" in text and text.endswith(f"{end}\n")
    assert commands == sent and text.count("the model: right   (") == len(sent)


def test_a_first_prompt_that_leaves_no_room_is_an_error_as_in_the_library(player, capsys):
    player.config.context = 12
    with pytest.raises(ValueError, match=r"--context=12: the first prompt of task train/3 has \d+ tokens, "):
        play.play(player, TASK, Recording(), iter(["\n"]))
    assert capsys.readouterr().out == ""


# The judge's opinion

def question_of(chat, prompt_ids, response_ids):
    return prompt_ids + chat.closed(response_ids) + chat.message(judge.QUESTION[judge.question_style(chat)])


def test_p_good_of_a_one_token_judge_is_exact(player):
    """P(good) / (P(good) + P(bad)) at the first token of the answer, by an uncached forward."""
    (good,), (bad,) = (player.chat.encode(label) for label in ("good", "bad"))
    question = question_of(player.chat, [5, 6], [7])
    with torch.no_grad():
        probabilities = player.model(torch.tensor([question]))[0, -1].softmax(-1)
    exact = float(probabilities[good] / (probabilities[good] + probabilities[bad]))
    assert 0.02 < exact < 0.98 and player.probability_good([5, 6], [7]) == pytest.approx(exact, rel=1e-4)
    assert play.opinion(player, [5, 6], [7]) == f"its judge: {exact:.0%} good"


def share_good(player, prompt_ids, response_ids, n=500):
    """(share of "good" among the readable first words of n sampled answers, how many are readable)."""
    streams = [[stream(17, i) for i in range(n)]]
    answers, = answer(player.model, [question_of(player.chat, prompt_ids, response_ids)], streams,
                      player.chat.stop_ids, Sampling(1.0, 1), 500)
    texts = [player.chat.decode(given.ids) for given in answers]
    readable = [text for text in texts if text in judge.ANSWERS]
    return readable.count("good") / len(readable), len(readable)


@pytest.mark.slow
def test_p_good_is_the_share_of_good_among_sampled_answers(player):
    """Within 4.5 standard deviations, of the random model and of the committed one."""
    committed = agent.load(COMMITTED)
    turns = committed.play("household", "L0/3").turns
    cases = [(player, [5, 6], [7]), *((committed, turn.prompt_ids, turn.response_ids) for turn in turns[:3])]
    for judging, *ids in cases:
        p, (share, n) = judging.probability_good(*ids), share_good(judging, *ids)
        assert n > 50 and abs(share - p) <= 4.5 * (p * (1 - p) / n)**0.5 + rounding(1.0), (p, share, n)


def test_a_judge_that_writes_answers_eight_times(model, tokenizer, settings, monkeypatch):
    """P(good) is the share of "good" among the readable answers; a truncated answer is not readable."""
    chat = Chat(tokenizer, "think")
    player, prompts, streams = Agent(model, chat, settings), [], []
    texts = [f"Hm. <judge>{verdict}</judge>" for verdict in ("good", "bad", "good", "good", "bad")]

    def answers(model, questions, numbers, *rest):
        prompts.extend(questions)
        streams.extend(numbers)
        responses = [Response(chat.encode(text), [], False) for text in [*texts, "Well.", ""]]
        return [[*responses, Response(chat.encode(texts[0]), [], True)]]

    monkeypatch.setattr(agent, "answer", answers)
    assert player.probability_good([5, 6], [7]) == pytest.approx(3 / 5)
    assert prompts == [[5, 6, 7] + chat.end_ids + chat.message(judge.QUESTION["think"])]
    assert len(set(streams[0])) == 8
    assert play.opinion(player, [5, 6], [7]) == "its judge: 60% good" and streams[0] == streams[1]
    texts[:] = ["Well."] * 5
    assert play.opinion(player, [5, 6], [7]) == "its judge gives no verdict on this"


def test_an_untrained_model_was_never_taught_to_judge(player):
    with torch.no_grad():
        for parameter in player.model.parameters():
            parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert play.opinion(player, [5, 6], [7]) == "its judge gives no verdict on this"
    with pytest.raises(ValueError, match="never taught to judge"):
        player.probability_good([5, 6], [7])


@pytest.mark.slow
def test_the_committed_models_auc_is_that_of_its_cell(capsys, monkeypatch):
    known = json.loads((COMMITTED / "judge.json").read_text())
    assert known["cell"] == "cells/alfworld_hour/grpo+gcd/seed0.json"
    cell = json.loads((COMMITTED.parent / known["cell"]).read_text())
    assert (known["labels"], known["oracle"]) == (cell["judge"]["auc"], cell["judge"]["auc_oracle"])
    line = (f"The judge's AUC in training: {known['oracle']:.2f} against the oracle, {known['labels']:.2f} "
            "against its training labels (0.5 is chance).")
    monkeypatch.setattr("sys.stdin", typed(""))
    play.main(["--model", str(COMMITTED)])
    assert capsys.readouterr().out.count(line) == 1


def test_an_unknown_auc_is_not_printed(player, capsys):
    assert play.reliability(player) == ""
    _, text, _ = played(player, capsys)
    assert "AUC" not in text


# The command line

@pytest.mark.slow
@pytest.mark.parametrize("name", ["L9/0", "L0", "L0/x", "L0/-1", "L0/99999"])
def test_a_game_that_does_not_exist_is_named(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(""))
    environment = SimpleNamespace(splits=("dev", "L0"), split_tasks=lambda _: [TASK])
    with pytest.raises(ValueError, match=f"task '{name}': "):
        agent.task_named(environment, name)
    assert agent.task_named(environment, "L0/0") is TASK
    with pytest.raises(SystemExit):
        play.main(["--model", str(COMMITTED), "--game", name])
    assert f"task '{name}': " in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        play.main(["--model", str(tmp_path / "none")])
    assert "none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_committed_model_plays_at_once(capsys, monkeypatch):
    """It was trained on real games and wins most generated ones too; to try it, no games are needed.

    At least a third is required, because rounding differs between machines.
    """
    without_opinions(monkeypatch)
    won = 0
    for k in range(6):
        monkeypatch.setattr("sys.stdin", typed("\n" * 20))
        play.main(["--model", str(COMMITTED), "--game", f"L0/{k}"])
        won += capsys.readouterr().out.endswith("You have won.\n")
    assert won >= 2
    assert sum(path.stat().st_size for path in COMMITTED.iterdir()) < 2.5e6


@pytest.mark.slow
def test_a_model_can_be_restricted_to_admissible_commands(capsys, monkeypatch):
    """A model of random weights gives no command otherwise."""
    load = agent.decoder.load_pretrained

    def random_weights(*arguments):
        model = load(*arguments)
        with torch.no_grad():
            for k, parameter in enumerate(model.parameters()):
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(k))
        return model

    monkeypatch.setattr(agent.decoder, "load_pretrained", random_weights)
    without_opinions(monkeypatch)
    turns = []
    for flags in ([], ["--admissible-only"]):
        monkeypatch.setattr("sys.stdin", typed("\n" * 20))
        play.main(["--model", str(COMMITTED), "--game", "L1/0", "--dagger", "8", *flags])
        text = capsys.readouterr().out
        turns.append(text.count("the model: "))
    assert turns[0] == 1 < turns[1] and "Nothing happens." not in text


@pytest.mark.slow
@pytest.mark.parametrize("flags, message",
                         [(["--history", "-1"], "--history=-1"), ([], "closed"),
                          (["--context", "32"], "--context=32: the first prompt of task L0/0/")])
def test_an_error_is_one_line(flags, message, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed("") if flags else None)
    with pytest.raises(SystemExit):
        play.main(["--model", str(COMMITTED), *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_typed_bytes_need_not_be_text_and_ctrl_c_ends_the_program(capsys, monkeypatch):
    without_opinions(monkeypatch)
    monkeypatch.setattr("sys.stdin", typed(b"\xff\xfe\n"))
    play.main(["--model", str(COMMITTED)])
    assert capsys.readouterr().out.count("the model:") == 2

    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(play, "play", interrupted)
    play.main(["--model", str(COMMITTED)])


@pytest.mark.slow
@needs_games
def test_it_wins_real_games(capsys, monkeypatch):
    without_opinions(monkeypatch)
    won = 0
    for k in range(0, 130, 13):
        monkeypatch.setattr("sys.stdin", typed("\n" * 30))
        play.main(["--model", str(COMMITTED), "--game", f"L1/{k}", "--games", str(GAMES),
                   "--max-turns", "30"])
        won += capsys.readouterr().out.endswith("You have won.\n")
    assert won >= 7
