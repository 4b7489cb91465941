"""Proves that environments with tools train: the small model from scratch, and a model with a chat template.

    python -m pytest tests/core/test_tools_run.py         # minutes

The second is a Qwen2 with random weights, a tokenizer of its own in which the texts of the shop are tokens,
and the chat template of Qwen2.5 with tools, from the installed TRL package.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_runs import ROOT, assert_one_error, rows

import config
import gcd
import judge
from infra import files
from infra.signals import Stop
from lm import small
from lm.chat import OWN_THOUGHT
from lm.model import load_tokenizer

SHOP, CALCULATOR = str(ROOT / "examples" / "shop.py"), str(ROOT / "examples" / "calculator.py")
TRL = find_spec("trl")
TINY = dict(device="cpu", tasks=8, group_size=4, iterations=2, minibatches=2, judge_group_size=4,
            judge_turns=16, max_turns=6, slots=32, evaluate="none", demonstrations=600,
            judge_demonstrations=40, cold_start_lr=8e-3)


def train(out, **changes):
    """Do a run; returns its exit status."""
    with Stop.restored():
        return gcd.main(config.arguments(TINY | {"out": str(out)} | changes))


def assert_trained(out):
    """Assert that both iterations played, judged 8 turns of each class, and had a gradient."""
    found = rows(out)
    assert [row["iteration"] for row in found] == [0, 1]
    for row in found:
        assert row["judge/turns"] == 16 and row["policy/grad_norm"] > 0
        assert row["rollout/invalid_frac"] < 0.9 and row["rollout/episodes"] == 32
    episodes, _ = files.read_lines(out / "episodes.jsonl")
    return [turn for episode in episodes for turn in episode["turns"]], {e["ended"] for e in episodes}


@pytest.mark.slow
@pytest.mark.parametrize("env", [SHOP, CALCULATOR], ids=["shop", "calculator"])
def test_the_small_model_learns_to_call_tools_from_scratch(tmp_path, env):
    assert train(tmp_path / "run", env=env, hidden_size=32, layers=2) == 0
    turns, ended = assert_trained(tmp_path / "run")
    assert any(turn["valid"] and turn["action"].startswith("<tool_call>\n{") for turn in turns)
    assert ended <= {"bought", "bought the wrong thing", "not in stock", "turn limit", "right", "wrong",
                     "response too long", "context full"}
    if env == CALCULATOR:
        assert min(turn["reward"] for turn in turns) <= -0.02
        assert all(turn["reward"] <= 0 and (turn["valid"] or turn["reward"] > -0.02 * 5) for turn in turns)


def chat_model(folder, environment, monkeypatch):
    """Write a Qwen2 with random weights whose tokenizer has Qwen's special tokens and TRL's chat template."""
    template = Path(TRL.submodule_search_locations[0]) / "chat_templates" / "qwen2_5.jinja"
    monkeypatch.setattr(small, "SPECIAL_TOKENS", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    monkeypatch.setattr(small, "CHAT_TEMPLATE", template.read_text(encoding="utf-8"))
    schemas = [json.dumps(tool) for tool in environment.tools()]
    system = re.findall(r"\\n\\n?([A-Z][^\\{]+)", template.read_text(encoding="utf-8"))
    phrases = [*environment.vocabulary(), *schemas, *system, environment.rules, "system\n", "user\n", "\n\n",
               "assistant\n", "<tool_response>\n", "\n</tool_response>", judge.QUESTION["think"],
               f"<think>\n{OWN_THOUGHT}\n</think>\n\n", "<judge>good</judge>", "<judge>bad</judge>"]
    small.save_small_model(folder, [*dict.fromkeys(phrases)], 64, 2, 1024, True, True, 0)
    monkeypatch.undo()
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not TRL, reason="needs TRL's chat templates: pip install trl")
def test_a_model_with_a_chat_template_trains_with_its_tools(tmp_path, monkeypatch):
    """Prompts are the template's, tool role included; the run's files hold the calls and the answers."""
    environment = config.parse(["--env", SHOP]).environment
    model = chat_model(tmp_path / "qwen", environment, monkeypatch)
    assert train(tmp_path / "run", env=SHOP, model=str(model), preset="small", max_response_tokens=32,
                 judge_response_tokens=16) == 0
    turns, _ = assert_trained(tmp_path / "run")
    called = [turn for turn in turns if turn["valid"]]
    assert called and all("<tool_call>" in turn["response"] for turn in called)
    assert any(turn["observation"].startswith("article ") for turn in turns)
    tokenizer = load_tokenizer(tmp_path / "run" / "checkpoint")
    assert "<tool_response>" in tokenizer.chat_template and "<|user|>" not in tokenizer.get_added_vocab()
    agent = gcd.load(tmp_path / "run" / "checkpoint", env=SHOP, max_response_tokens=32)
    episode = agent.play(SHOP, "test/3")
    text = tokenizer.decode(episode.turns[0].prompt_ids)
    assert text == tokenizer.apply_chat_template(
        [{"role": "system", "content": environment.rules},
         {"role": "user", "content": episode.turns[0].observation}],
        tools=environment.tools(), add_generation_prompt=True, tokenize=False)


@pytest.mark.slow
def test_a_model_whose_template_has_no_tools_is_refused_before_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small, "SPECIAL_TOKENS", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    small.save_small_model(tmp_path / "qwen", ["good"], 32, 1, 1024, True, True, 0)
    assert train(tmp_path / "run", env=SHOP, model=str(tmp_path / "qwen"), preset="small") == 1
    assert_one_error(capsys, "qwen: its chat template shows no tools, or none in <tool_call>")
