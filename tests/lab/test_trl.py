"""Tests the household environment under TRL's GRPOTrainer: the rollout_func's output, and one CPU step.

    python -m pytest tests/lab/test_trl.py           # half a minute; skipped without the trl package
"""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="needs the trl package: pip install -r requirements-trl.txt")
from config import find_environment  # noqa: E402
from lab.bench import trl_grpo  # noqa: E402
from lm import model as decoder  # noqa: E402


class Script:
    """A stand-in for the trainer that gives each episode prepared responses."""

    def __init__(self, scripts):
        self.left, self.seen = [list(script) for script in scripts], []
        self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100_000))
        self.args = SimpleNamespace(max_completion_length=16)

    def _generate_single_turn(self, prompts, images, fields, num_generations):
        self.seen.append(prompts)
        return [script.pop(0) for script in self.left if script], None


@pytest.fixture(scope="module")
def game():
    """The household environment, its first training task, and an expert's commands, which win."""
    environment = find_environment("household")()
    task = environment.train_tasks("part", 0, 1)[0]
    return environment, task, environment.expert(environment.make(1)).show(task, 0, 0.0, 50).commands


def conversation(game, task, chat, responses):
    """(prompt, completion, mask) of an episode, assembled turn by turn."""
    prompt, completion, mask = chat.observe(game.reset(task), first=True), [], []
    for turn, ids in enumerate(responses):
        completion, mask = completion + ids, mask + [1] * len(ids)
        reply = game.step(chat.parse(chat.decode(ids))[0] or "")
        if turn + 1 < len(responses):
            observation = chat.observe(reply)
            completion, mask = completion + observation, mask + [0] * len(observation)
    return prompt, completion, mask


def test_a_rollout_is_the_conversation_token_for_token(game, chat):
    environment, task, commands = game
    won = [chat.respond(command) for command in commands]
    lost = [chat.respond("look"), chat.respond(""), chat.respond("fly away")]   # accepted, malformed, refused
    truncated = [chat.respond("look"), chat.encode("go to")]                      # no stop token
    scripts = [won, lost + [chat.respond("look")] * (len(won) - 3), truncated]
    trainer = Script(scripts)
    rollout = trl_grpo.Rollout(environment, [task], chat, 3, max_turns=len(won))
    given = rollout([task.id] * 3, trainer)
    kept = zip(given["prompt_ids"], given["completion_ids"], given["env_mask"])
    for responses, episode in zip(scripts, kept, strict=True):
        prompt, completion, mask = conversation(environment.make(1)[0], task, chat, responses)
        assert episode == (prompt, completion, mask)
        assert [t for t, m in zip(completion, mask) if m] == sum(responses, [])
    assert [len(prompts) for prompts in trainer.seen[:3]] == [3, 3, 2]            # the truncated one ended
    assert given["won"] == [True, False, False] and given["logprobs"] is None
    assert given["refused_share"] == [0.0, 2 / len(won), 1 / 2]
    logged = {}
    rewards = trl_grpo.reward(given["won"], given["refused_share"], logged.__setitem__, prompts=None)
    assert rewards == pytest.approx([1.0, -0.2 / len(won), -0.05])
    assert logged["success"] == 1 / 3


def test_a_prompt_that_leaves_no_room_for_a_response_ends_the_episode(game, chat):
    environment, task, _ = game
    trainer = Script([[chat.respond("look")] * 9])
    prompt = chat.observe(environment.make(1)[0].reset(task), first=True)
    trainer.model.config.max_position_embeddings = len(prompt) + 20
    given = trl_grpo.Rollout(environment, [task], chat, 1, max_turns=9)([task.id], trainer)
    assert given["completion_ids"] == [chat.respond("look")] and given["won"] == [False]


@pytest.mark.slow
@pytest.mark.parametrize("wrong, message", [
    (["--model", "none"], "none/tokenizer.json: not found"),
    (["--group-size", "1"], "at least 2 generations")])
def test_a_mistake_is_an_error_of_one_line(tokenizer_folder, model, tmp_path, capsys, wrong, message):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "start")
    decoder.save_pretrained(model, folder)
    with pytest.raises(SystemExit):
        trl_grpo.main(["--model", str(folder), "--out", str(tmp_path / "end"), *wrong])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_step_trains_on_sampled_tokens_alone(tokenizer_folder, model, chat, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants
    from trl import GRPOTrainer
    start, end = tmp_path / "start", tmp_path / "end"
    shutil.copytree(tokenizer_folder, start)
    decoder.save_pretrained(model, start)
    played, batches, reward, compute_loss = [], [], trl_grpo.reward, GRPOTrainer._compute_loss

    def alternating(**columns):
        """Rewards that differ within every group, whatever is sampled."""
        reward(**columns)
        return [float(i % 2) for i in range(len(columns["won"]))]

    class Watched(trl_grpo.Rollout):
        def __call__(self, prompts, trainer):
            assert set(trainer.eos_token_ids) == set(chat.stop_ids)
            assert prompts == [task_id for task_id in dict.fromkeys(prompts) for _ in range(4)]
            played.append(super().__call__(prompts, trainer))
            return played[-1]

    def watched_loss(self, model, inputs):
        batches.append(inputs)
        return compute_loss(self, model, inputs)

    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)   # it may be imported already
    monkeypatch.setattr(trl_grpo, "reward", alternating)
    monkeypatch.setattr(trl_grpo, "Rollout", Watched)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", watched_loss)
    trl_grpo.main(["--model", str(start), "--out", str(end), "--tasks", "2", "--group-size", "4",
                   "--max-turns", "3", "--max-response-tokens", "4"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["steps"] == 1 and line["reward"] == 0.5 and min(line["s_per_step"]) > 0
    [episodes] = played                                            # one rollout per step, a loss per group
    masked = zip(episodes["completion_ids"], episodes["env_mask"], strict=True)
    sampled = [[token for token, mask in zip(*episode, strict=True) if mask] for episode in masked]
    trained = [ids[mask.bool()].tolist() for batch in batches for ids, mask in
               zip(batch["completion_ids"], batch["completion_mask"] * batch["tool_mask"])]
    assert len(batches) == 2 and sorted(trained) == sorted(sampled)
    assert all(int(batch["num_items_in_batch"]) == sum(map(len, sampled)) for batch in batches)
    after = decoder.load_pretrained(end)                              # gcd.py reads what TRL wrote
    assert decoder.load_tokenizer(end).get_vocab() == decoder.load_tokenizer(start).get_vocab()
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), after.parameters(), strict=True))
