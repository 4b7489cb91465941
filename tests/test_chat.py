"""Proves that what is rendered is the tokenizers' own template, and that responses are read as meant.

    python -m pytest tests/test_chat.py
"""

import pytest
from conftest import QWEN_TOKENIZER, needs_qwen

from envs import Reply
from lm.chat import TAGS, Chat

pytestmark = pytest.mark.fast


def assert_template(tokenizer, style):
    """The hand-rendered ids are apply_chat_template's, after every turn."""
    chat = Chat(tokenizer, style)
    texts = ["You are in a room.\n\nYour task is to: put a mug in drawer.", "go to drawer 1",
             "You arrive at drawer 1.", "open drawer 1", "The drawer 1 is open. In it, you see nothing."]
    ids, messages = [], []
    for i, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        ids += chat.encode(text) + chat.encode("<|im_end|>") if i % 2 else chat.message(text, first=i == 0)
        if i % 2 == 0:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ids == rendered


def test_the_rendered_chat_is_apply_chat_template(tokenizer):
    assert_template(tokenizer, "plain")


@needs_qwen
def test_the_rendered_chat_is_qwens_template_with_its_default_system_message():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(QWEN_TOKENIZER, local_files_only=True)
    assert_template(tokenizer, "think")
    chat = Chat(tokenizer, "think")
    assert chat.stop_ids == (151643, 151645)
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    said = tokenizer.decode(chat.message("Hello", first=True))
    assert said.startswith(f"<|im_start|>system\n{system}<|im_end|>\n")


def test_the_think_style_shows_rules_once_and_the_admissible_commands_always(tokenizer):
    chat = Chat(tokenizer, "think")
    reply = Reply("A room.", ["go left", "help", "look"], False, False)
    first, later = (tokenizer.decode(chat.observe(reply, first)) for first in (True, False))
    assert "text game" in first and "text game" not in later
    for text in (first, later):
        assert text.count("A room.") == 1 and "\ngo left\nlook\n" in text and "\nhelp" not in text
    assert tokenizer.decode(Chat(tokenizer, "plain").observe(reply)) == "<|user|>A room.<|assistant|>"


@pytest.mark.parametrize("style, text, action", [
    ("plain", "go to drawer 1", "go to drawer 1"), ("plain", " look \n", "look"), ("plain", "", None),
    ("plain", " ", None), ("plain", "<|user|>", "<|user|>"),
    ("think", "<think>It is there.</think><action>look</action>", "look"),
    ("think", " <think>a\nb</think>\n\n<action> go to drawer 1\n</action> ", "go to drawer 1"),
    ("think", "<think></think><action>look</action>", "look"),
    ("think", "<action>look</action>", None), ("think", "look", None),
    ("think", "<think>a</think>look", None), ("think", "<think>a</think><action></action>", None),
    ("think", "<think>a</think><action> </action>", None), ("think", "<think>a</think><action>look", None),
    ("think", "<think>a<action>look</action>", None),
    ("think", "<think>a</think><action>look</action> and more", None),
    ("think", "<think>a</think><action>look</action><action>left</action>", None)])
def test_parse(tokenizer, style, text, action):
    assert Chat(tokenizer, style).parse(text) == (action, None)


@pytest.mark.parametrize("style", ["plain", "think"])
def test_a_demonstrated_response_parses_to_its_command(tokenizer, style):
    chat = Chat(tokenizer, style)
    ids = chat.respond("go to drawer 1")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.parse(chat.decode(ids)) == ("go to drawer 1", None)


TAG_CASES = [
    ("<explore>look", "look", "explore"), ("<monitor> go left", "go left", "monitor"), ("look", None, None),
    ("<explore>", None, None), ("<explore><monitor>look", None, None), ("<think>look", None, None)]
LONG_TAG_CASES = [
    ("<planning>First A.</planning><action>look</action>", "look", "planning"),
    (" <reflection>\nB failed.\n</reflection>\n<action> go left </action> ", "go left", "reflection"),
    ("<planning> </planning><action>look</action>", None, None), ("<planning>a</planning>look", None, None),
    ("<planning>a</explore><action>look</action>", None, None), ("<action>look</action>", None, None),
    ("<planning>a</planning><explore>b</explore><action>look</action>", None, None),
    ("<planning>a</planning><action>look</action><action>left</action>", None, None)]


@pytest.mark.parametrize("text, command, tag", TAG_CASES)
def test_the_small_models_tag_comes_before_its_command(tokenizer, text, command, tag):
    assert Chat(tokenizer, "tags").parse(text) == (command, tag)


@pytest.mark.parametrize("text, command, tag", LONG_TAG_CASES)
def test_exactly_one_filled_tag_comes_before_exactly_one_action(tokenizer, text, command, tag):
    chat = Chat(tokenizer, "tags")
    chat.small = False                           # the form that Hugging Face models are asked for
    assert chat.parse(text) == (command, tag)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("tag", TAGS)
def test_a_demonstrated_tag_parses_to_itself(tokenizer, small, tag):
    chat = Chat(tokenizer, "tags")
    chat.small = small
    assert chat.parse(chat.decode(chat.respond("go to drawer 1", tag))) == ("go to drawer 1", tag)


def test_what_is_possible_is_shown_with_its_objects_or_hidden(tokenizer):
    reply = Reply("A room.", ["look", "open OBJ"], False, False, ("door", "jar"))
    chats = [Chat(tokenizer, "think", admissible) for admissible in (True, False)]
    shown, hidden = (tokenizer.decode(chat.observe(reply)) for chat in chats)
    assert "look\nopen OBJ" in shown and "OBJ stands for one of: door, jar" in shown
    assert "OBJ" not in hidden and "from the list" not in hidden and "<action>" in hidden


def test_an_instruction_stands_before_the_first_observation(tokenizer, chat):
    reply = Reply("A room.", [], False, False)
    seen = tokenizer.decode(chat.observe(reply, True, "Look around."))
    assert seen == "<|user|>Look around.\n\nA room.<|assistant|>"


def test_decode_drops_the_stop_token_only(tokenizer, chat):
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    word = chat.encode("look")
    assert chat.decode(word + [end]) == chat.decode(word) == "look"
    assert chat.decode(word + [start, end]) == "look<|user|>" and chat.decode([end]) == chat.decode([]) == ""
