"""Proves that lab/bench/lengths.py counts the tokens that a model is given, and draws from them.

    python -m pytest tests/lab/test_lengths.py
"""

import random
import statistics

import pytest
from conftest import QWEN_TOKENIZER, needs_qwen

from envs import Reply
from lab.bench import lengths
from lm.chat import Chat
from lm.model import load_tokenizer

pytestmark = pytest.mark.fast


@needs_qwen
@pytest.mark.parametrize("style, listed", [("think", True), ("think", False), ("plain", False)])
def test_lengths_are_those_of_the_rendered_conversation(style, listed):
    """The sum over an episode's messages is its whole conversation less the responses."""
    tokenizer = load_tokenizer(QWEN_TOKENIZER)
    chat = Chat(tokenizer, style, listed)
    texts = ["A room with a desk 1.", "The desk 1 is closed.", "You open the desk 1.", "Done."]
    episode = [Reply(text, ["go to desk 1", "look", "help"], False, False) for text in texts]
    found = lengths.lengths(chat, [episode, episode[:2]])
    messages = [{"role": role, "content": text} for text in (chat.content(reply, first) for first, reply in
                zip((True, False, False), episode)) for role, text in (("user", text), ("assistant", "look"))]
    rendered = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    responses = 2 * (len(chat.encode("look")) + len(chat.end_ids))
    assert found["first"][0] + sum(found["later"]) == len(rendered) - responses
    assert len(found["first"]) == 2 and len(found["later"]) == 2 and found["later"] == sorted(found["later"])
    assert any(text["content"].count("go to desk 1") for text in messages) == listed


def test_thinned_lengths_keep_the_ends_and_the_middle():
    values = sorted(random.Random(0).choices(range(1000), k=5000))
    kept = lengths.thinned(values)
    assert len(kept) == 101 and (kept[0], kept[-1]) == (values[0], values[-1])
    assert abs(kept[50] - statistics.median(values)) <= 1
    assert lengths.thinned([3, 5], 3) == [3, 3, 5] or lengths.thinned([3, 5], 3) == [3, 5, 5]


def test_drawn_lengths_have_the_measured_distribution():
    rng = random.Random(1)
    values = sorted(round(rng.gammavariate(2.0, 60.0)) for _ in range(20_000))
    drawn = [lengths.draw(lengths.thinned(values), rng) for _ in range(20_000)]
    assert abs(statistics.mean(drawn) - statistics.mean(values)) < 5      # five standard errors and the tail
    for quantile in (0.1, 0.5, 0.9):
        one, other = (sorted(found)[int(quantile * 20_000)] for found in (drawn, values))
        assert abs(one - other) <= 0.05 * other + 2
    assert values[0] <= min(drawn) and max(drawn) <= values[-1]
