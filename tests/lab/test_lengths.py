"""Proves that lab/bench/lengths.py counts the tokens that a model is given, and that draws are of them.

    python -m pytest tests/lab/test_lengths.py
"""

import json
import random
import re
import statistics
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace

import pytest
from conftest import QWEN_TOKENIZER, needs_qwen
from test_household import GAMES, needs_games
from tiny_runs import random_qwen

import config
import models
import session
from envs import MessageLengths, Reply
from infra import job
from lab.bench import lengths
from lm import model as decoder
from lm.chat import Chat

TEXTS = ["A room with a desk 1.", "The desk 1 is closed.", "You open the desk 1. In it, you see a pen 2."]


@pytest.mark.slow
@pytest.mark.parametrize("style, listed", [("think", True), ("think", False), ("tags", True),
                                           ("plain", False)])
def test_observation_commands_and_frame_are_the_rendered_conversation(qwen_tokenizer, style, listed):
    """Their sum over an episode is its whole conversation less the responses, to a token a message: texts may
    merge with what follows them.
    """
    chat = Chat(qwen_tokenizer, style, listed)
    replies = [Reply(text, ["go to desk 1", "look", "help"]) for text in TEXTS]
    observations, commands = lengths.counted(chat.encode, replies)
    frames = [chat.frame_tokens(lengths.EXAMPLE, first) for first in (True, False, False)]
    messages = [{"role": role, "content": text} for t, reply in enumerate(replies)
                for role, text in (("user", chat.content(reply, not t)), ("assistant", "look"))]
    rendered = qwen_tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True,
                                                  return_dict=False)
    responses = 2 * (len(chat.encode("look")) + len(chat.end_ids))
    counted = sum(observations) + sum(frames) + (sum(commands) if listed else 0)
    assert abs(counted - (len(rendered) - responses)) <= len(TEXTS)
    assert any(text["content"].count("go to desk 1") for text in messages) == listed


@pytest.mark.slow
def test_stored_frames_are_those_of_the_template(qwen_tokenizer):
    environment = lengths.environment_of("household", "")
    stored = json.loads(lengths.OUT.read_text())
    assert lengths.frames(qwen_tokenizer, environment) == stored["frames"]["alfworld"]


@pytest.mark.parametrize("name", lengths.EPISODES)
def test_draws_are_recorded_episodes_or_longer_ones_of_the_same_room(name):
    recorded, rng = MessageLengths(name), random.Random(0)
    episodes = [[a + b for a, b in zip(*episode)] for episode in recorded.episodes]
    assert len(episodes) == lengths.EPISODES[name][1] and max(map(len, episodes)) == lengths.MOST_TURNS
    for _ in range(50):
        assert recorded.draw(rng) in episodes
        first, *later = recorded.draw(rng, 40)
        assert len(later) == 39 and any(
            first == messages[0] and {*later} <= {*(messages[1:] or messages)} for messages in episodes)
    unlisted = [recorded.draw(rng, 20, listed=False) for _ in range(300)]
    listed = [recorded.draw(rng, 20) for _ in range(300)]
    means = [statistics.fmean(map(sum, drawn)) for drawn in (unlisted, listed)]
    assert means[0] < means[1] / 2                              # lists of commands are most of a prompt


# What is said before a run

@pytest.fixture
def chat(qwen_tokenizer):
    return Chat(qwen_tokenizer, "think")


def warning(chat, context, recorded="alfworld", turns=30, longest=65536):
    given = SimpleNamespace(history=0, demonstrations=1, iterations=0, splits=[], max_turns=turns,
                            max_response_tokens=512, context=context, environment=SimpleNamespace(
                                message_lengths=lambda: recorded and MessageLengths(recorded)))
    return models.context_warning(given, chat, longest)


@pytest.mark.slow
def test_a_context_that_is_too_small_is_told_with_the_share(chat):
    """The share, counted here over the recorded rooms themselves instead of over draws of them."""
    text = warning(chat, 16384)
    first, later = (chat.frame_tokens(lengths.EXAMPLE, opens) for opens in (True, False))
    needed = []
    for episode in MessageLengths("alfworld").episodes:
        first_message, *others = [a + b for a, b in zip(*episode)]
        mean = statistics.fmean(others or [first_message])
        needed.append(first_message + first + 29 * (mean + later + 150) + 512)
    share = statistics.fmean(n > 16384 for n in needed)
    assert abs(int(re.search(r": (\d+)% of 30-turn episodes exceed it", text)[1]) - 100 * share) <= 3
    assert text.startswith("--context=16384: ")
    holds = int(text.partition("--context ")[2].split()[0])
    assert warning(chat, holds) == ""
    assert max(needed) * 0.95 < holds < max(needed) * 1.2
    assert "holds 100%" in text and "--no-show-admissible" in text
    assert "100%" in warning(chat, 2048)
    within = [n <= 20000 for n in needed]
    limited = re.search(r"--context 20000 \(holds (\d+)%\)", warning(chat, 16384, longest=20000))
    assert abs(int(limited[1]) - 100 * statistics.fmean(within)) <= 3
    assert "--context " not in warning(chat, 16384, longest=16384)                  # the model has no more


@pytest.mark.slow
def test_nothing_is_told_where_lengths_are_unknown(chat, tmp_path):
    assert warning(chat, 2048, recorded=None) == ""
    chat.tokenizer = type("Other", (), {"vocab_size": 49152})()
    assert warning(chat, 2048) == ""


def test_an_environment_knows_its_lengths_where_its_games_are_real():
    assert lengths.environment_of("scienceworld", "").message_lengths().vocab_size == 151643
    assert lengths.environment_of("household", "").message_lengths() is None


@pytest.mark.slow
@needs_qwen
@needs_games
def test_a_run_of_a_model_that_writes_says_it_before_it_starts(tmp_path, capsys, monkeypatch):
    """And not with a window of past exchanges, which bounds the prompt. The tokenizer is read once."""
    monkeypatch.setattr(decoder, "load_tokenizer", cache(decoder.load_tokenizer))
    folder = random_qwen(tmp_path / "model", QWEN_TOKENIZER)
    flags = ["--model", str(folder), "--games", str(GAMES), "--demonstrations", "0", "--context", "3000",
             "--evaluate", "none", "--device", "cpu", "--slots", "1", "--out", str(tmp_path / "run")]
    evaluated = ["--iterations", "0", "--evaluate", "L0", "--protocol", "verl-agent", "--overwrite"]
    window = ["--history", "2", "--overwrite"]
    for more, turns, expected in (([], 30, 1), (window, 30, 0), (evaluated, 50, 1)):
        with ExitStack() as resources:
            session.prepare(config.parse([*flags, *more]), job.setup("cpu"), False, resources)
        assert capsys.readouterr().err.count(f"% of {turns}-turn episodes exceed it") == expected
