"""Tests of the household game as TRL's environment class, by hand and in GRPOTrainer with a tiny random Qwen.

    python -m pytest tests/envs/test_trl_class.py     # the trainer's part needs the trl package
"""

import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.utils import get_json_schema

from envs.alfred.expert import Expert
from envs.alfred.game import Game
from envs.alfred.splits import find_split
from envs.alfred.trl import OVER, Household, rows

needs_trl = pytest.mark.skipif(find_spec("trl") is None,
                               reason="needs the trl package: pip install -r requirements-trl.txt")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "household.md"
EOS = "<|im_end|>"


@pytest.fixture(scope="module")
def expert():
    """expert(index) returns the commands with which the search expert wins that training task."""
    searcher = Expert(find_split("train").tasks.train_tasks("all", 5_000_000, 50))

    def commands(index):
        played = searcher.show(find_split("train")[index], 0, 0.0, 50)
        assert played.won
        return played.commands
    return commands


def called(command):
    """A response that calls the tool `act`, as Qwen2.5's template writes it."""
    call = json.dumps({"name": "act", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>{EOS}"


# By hand

def test_an_episode_is_the_games_and_its_reward_that_of_winning(expert):
    (row,), game = rows(1, start=3, show_admissible=False), Game()
    env = Household()
    assert env.get_reward() == 0.0
    assert env.reset(**row) == game.reset(find_split("train")[3]).observation
    commands = expert(3)
    for command in commands[:-1]:
        assert env.act(command) == game.step(command).observation and env.get_reward() == 0.0
    assert env.act(commands[-1]) == f"{game.step(commands[-1]).observation}\n{OVER}"
    assert env.get_reward() == 1.0
    assert env.act("look") == OVER and env.get_reward() == 1.0
    assert OVER not in env.reset(**row) and env.get_reward() == 0.0


def test_the_turn_limit_ends_it_and_the_admissible_commands_can_be_shown():
    env = Household()
    first = env.reset(split="L0", index=2, max_turns=2, other="a column that is not used")
    reply = Game().reset(find_split("L0")[2])
    assert first == f"{reply.observation}\nAdmissible commands: {', '.join(reply.admissible)}"
    assert "\nAdmissible commands: " in env.act("fly")
    assert env.act("look").endswith(f"\n{OVER}") and env.act("look") == OVER and env.get_reward() == 0.0


def test_its_only_tool_has_a_schema():
    public = [name for name, _ in inspect.getmembers(Household, inspect.isfunction) if name[0] != "_"]
    assert public == ["act", "get_reward", "reset"]
    schema = get_json_schema(Household().act)["function"]
    assert schema["parameters"]["required"] == ["command"] and "fridge" in json.dumps(schema)


@pytest.mark.parametrize(("row", "message"), [
    ({"split": "L9"}, "split 'L9': expected"), ({"index": "x"}, "index='x': expected an integer"),
    ({"max_turns": 0}, "max_turns=0: expected"),
    ({"games": "nothere"}, "games=nothere: no such file or folder")])
def test_a_bad_row_is_named(row, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Household().reset(**row)


def test_rows_of_a_split_without_games_are_refused_at_once():
    for settings, message in (({"games": "nothere"}, "games=nothere: no such file or folder"),
                              ({"split": "L9"}, "split 'L9': expected"), ({"types": "x"}, "types='x': exp")):
        with pytest.raises(ValueError, match=f"^{message}"):
            rows(3, **settings)


def test_a_column_that_a_row_lacks_has_its_default():
    """Datasets fill it with None where other rows have it."""
    names = "split", "index", "games", "types", "max_turns", "show_admissible"
    first = Household().reset()
    assert Household().reset(**dict.fromkeys(names)) == first and "Admissible commands: " in first


def test_what_a_model_may_pass_for_a_command_is_refused_and_changes_nothing():
    env, game = Household(), Game()
    with pytest.raises(ValueError, match="call reset first"):
        env.act("look")
    env.reset(index=3, show_admissible=False)
    game.reset(find_split("train")[3])
    for wrong in (None, 3, ["look"], {}):
        with pytest.raises(ValueError, match="expected text"):
            env.act(wrong)
    assert env.act("look") == game.step("look").observation


# In the trainer

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Qwen2 whose tokens are bytes, with Qwen2.5's chat template, which knows tools."""
    import trl
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    path = tmp_path_factory.mktemp("qwen")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    letters.add_special_tokens(["<|endoftext|>", "<|im_start|>", EOS])
    letters.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=EOS, pad_token="<|endoftext|>")
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id, tie_word_embeddings=True)).save_pretrained(path)
    return path


def example(folder, out, **numbers):
    """The page's example with the tiny model, other numbers and this project's name of the package."""
    (text,) = re.findall(r"^```python\n(.*?environment_factory.*?)^```$",
                         PAGE.read_text(encoding="utf-8").partition("## In TRL")[2], re.M | re.S)
    text = text.replace("household.alfred", "envs.alfred").replace("Qwen/Qwen3-0.6B", str(folder))
    text = text.replace('"runs/trl"', f'"{out}", use_cpu=True, bf16=False, report_to="none"')
    for name, number in numbers.items():
        text, found = re.subn(rf"{name}=\d+", f"{name}={number}", text)
        assert found == 1, name
    return text.rpartition("trainer.train()")[0]


@pytest.mark.slow
@needs_trl
@pytest.mark.filterwarnings("ignore")
def test_the_pages_example_trains_a_random_model(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    names = {}
    exec(example(folder, tmp_path, max_steps=1, per_device_train_batch_size=2, num_generations=2,
                 max_completion_length=24), names)
    names["trainer"].train()
    log = names["trainer"].state.log_history
    assert next(line for line in log if "reward" in line)["rewards/Household/mean"] == 0.0


@pytest.mark.slow
@needs_trl
@pytest.mark.filterwarnings("ignore")
def test_tool_calls_play_the_game_and_the_winner_is_rewarded(folder, tmp_path, monkeypatch, expert):
    """Scripted responses: one of the two episodes of a task plays the expert, the other gives up."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    names = {}
    exec(example(folder, tmp_path, max_steps=1, per_device_train_batch_size=2, num_generations=2,
                 max_completion_length=20_000), names)                    # tokens are bytes here
    trainer = names["trainer"]
    tokenizer, seen = trainer.processing_class, []
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]

    def scripted(prompts, *_, **__):
        """The expert's next command for the first episode; the other one, there in the first call, ends."""
        if not seen:
            assert len(started) == 2 and started[0] == started[1]         # a group: the same task twice
            left.extend(expert(started[0]))
        seen.append([tokenizer.decode(prompt) for prompt in prompts])
        texts = [called(left.pop(0)) if left else f"Done.{EOS}", f"I give up.{EOS}"][:len(prompts)]
        return [tokenizer.encode(text) for text in texts], None

    def noted(self, **row):
        started.append(row["index"])
        return reset(self, **row)

    left, started, reset = [], [], Household.reset
    monkeypatch.setattr(Household, "reset", noted)
    monkeypatch.setattr(trainer, "_generate_single_turn", scripted)
    trainer.train()
    line = next(line for line in trainer.state.log_history if "reward" in line)
    assert line["rewards/Household/mean"] == 0.5 and line["tools/failure_frequency"] == 0.0
    assert '"name": "act"' in seen[0][0] and "You play a text game" in seen[0][0]
    assert "<tool_response>" in seen[1][0] and OVER in seen[-1][0] and not left
    assert any(not torch.equal(old, new) for old, new in zip(weights, trainer.model.parameters()))
