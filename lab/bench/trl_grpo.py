"""The household environment under TRL's GRPOTrainer, by a `rollout_func`; everything else is TRL's.

A step corresponds to an iteration of gcd.py with one minibatch: `--tasks` rooms, `--group-size` episodes of
each, one update. TRL samples, computes logprobs and steps; this file plays. Left out: the cold start (use a
checkpoint of gcd.py), the judge, evaluation (gcd.py reads the folder that this file writes). docs/trl.md
lists further differences.

    pip install -r requirements-trl.txt
    python -m lab.bench.trl_grpo --model runs/main/cold_start/checkpoint --steps 1
"""

import argparse
import itertools
import json
import os
import time

import torch

import config
from lm import chat as chats
from lm import model as decoder
from lm import smollm2


class Episode:
    """One episode in TRL's format: the first prompt, and everything after it as one completion with a mask.

    completion_ids consists of the sampled tokens and of each observation's tokens; no text is tokenized
    twice. env_mask is 1 on sampled tokens, 0 on the environment's.
    """

    def __init__(self, game, task, chat):
        self.game, self.chat, self.reply = game, chat, game.reset(task)
        self.prompt_ids = chat.observe(self.reply, first=True)
        self.completion_ids, self.env_mask = [], []
        self.turns, self.refused, self.ended = 0, 0, False

    def add(self, ids, sampled):
        """Append tokens to the completion."""
        self.completion_ids += ids
        self.env_mask += [int(sampled)] * len(ids)

    def submit(self, response_ids, max_turns, room):
        """Play a sampled response and append the next observation unless the episode ends.

        As in gcd.py with a small model, a truncated response ends the episode as failed, and so does a next
        prompt of more than `room` tokens. A completion never ends with an observation.
        """
        self.add(response_ids, True)
        self.turns += 1
        truncated = response_ids[-1] not in self.chat.stop_ids
        command = None if truncated else self.chat.parse(self.chat.decode(response_ids))[0]
        self.refused += command not in self.reply.admissible
        if not truncated:
            self.reply = self.game.step(command or "")   # malformed: a command that every game refuses
        observation_ids = self.chat.observe(self.reply)
        self.ended = (truncated or self.reply.done or self.turns == max_turns
                      or len(self.prompt_ids) + len(self.completion_ids) + len(observation_ids) > room)
        if not self.ended:
            self.add(observation_ids, False)


class Rollout:
    """TRL's rollout_func: plays the tasks whose ids are the prompts.

    TRL 1.16 calls it once per generation batch, in which every prompt occurs `num_generations` times. It
    expects prompt_ids, completion_ids and logprobs, a list per episode (logprobs: None without vLLM). Other
    keys become arguments of the reward functions, except env_mask: TRL pads it, calls it `tool_mask`
    and multiplies the completion mask by it wherever tokens are summed or counted. Attention covers all
    tokens.
    """

    def __init__(self, environment, tasks, chat, n, max_turns):
        self.games, self.chat, self.max_turns = environment.make(n), chat, max_turns
        self.tasks = {task.id: task for task in tasks}

    def __call__(self, prompts, trainer):
        episodes = [Episode(game, self.tasks[task_id], self.chat)
                    for game, task_id in zip(self.games, prompts, strict=True)]
        room = trainer.model.config.max_position_embeddings - trainer.args.max_completion_length
        live = episodes
        while live:
            # transformers' generate, as TRL's own tool loop calls it
            responses, _ = trainer._generate_single_turn(
                [e.prompt_ids + e.completion_ids for e in live], None, {}, num_generations=1)
            for episode, response in zip(live, responses, strict=True):
                episode.submit(response, self.max_turns, room)
            live = [e for e in live if not e.ended]
        return {"prompt_ids": [e.prompt_ids for e in episodes],
                "completion_ids": [e.completion_ids for e in episodes],
                "logprobs": None, "env_mask": [e.env_mask for e in episodes],
                "won": [e.reply.won for e in episodes],
                "refused_share": [e.refused / e.turns for e in episodes]}


def reward(won, refused_share, log_metric, **others):
    """R = won - 0.1 * share of refused turns, gcd.py's default. others: further arguments of TRL, unused."""
    log_metric("success", sum(won) / len(won))
    log_metric("refused_share", sum(refused_share) / len(won))
    return [float(w) - 0.1 * share for w, share in zip(won, refused_share)]


def household_rollout(options, chat):
    """(rollout_func, prompts) of the household environment."""
    environment = config.find_environment("household")(seed=options.seed)
    tasks = environment.train_tasks("part", 0, options.tasks * options.steps)
    rollout = Rollout(environment, tasks, chat, options.tasks * options.group_size, options.max_turns)
    return rollout, [task.id for task in tasks]


def make_trainer(options, make_rollout=household_rollout):
    """A GRPOTrainer with gcd.py's default loss: mean over tokens, no KL, no division by the group's std.

    make_rollout(options, chat) returns its rollout_func and a prompt for each task of each step.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")      # disables TRL's telemetry; read at import
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = decoder.load_tokenizer(options.model)
    chat = chats.Chat(tokenizer, "plain" if chats.is_small(tokenizer) else "think")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = list(chat.stop_ids)  # TRL ends a response at these
    rollout, prompts = make_rollout(options, chat)
    settings = GRPOConfig(
        output_dir=options.out, max_steps=options.steps, seed=options.seed, shuffle_dataset=False,
        per_device_train_batch_size=options.group_size, num_generations=options.group_size,
        gradient_accumulation_steps=options.tasks, max_completion_length=options.max_response_tokens,
        learning_rate=options.lr, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0, epsilon=0.2,
        epsilon_high=0.28, loss_type="dapo", scale_rewards="none", bf16=False, gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(), logging_steps=1, save_strategy="no", report_to="none")
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    return GRPOTrainer(model, reward, settings, rows, processing_class=tokenizer, rollout_func=rollout)


def stopwatch(trainer):
    """A list to which the trainer appends the time when training begins and when each step ends."""
    from transformers import TrainerCallback
    clock = []

    class Stopwatch(TrainerCallback):
        """Appends the current time."""

        def on_train_begin(self, *_, **__):
            clock.append(time.perf_counter())

        on_step_end = on_train_begin

    trainer.add_callback(Stopwatch())
    return clock


def main(argv=None):
    """Train, save, and print one JSON line; TRL prints its metrics after each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Hugging Face folder, or smollm2")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps, each on new tasks")
    parser.add_argument("--tasks", type=int, default=16, help="tasks per step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per task, at least 2")
    parser.add_argument("--max-turns", type=int, default=20, help="maximum turns of an episode")
    parser.add_argument("--max-response-tokens", type=int, default=16, help="maximum tokens of a response")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate (constant)")
    parser.add_argument("--seed", type=int, default=0, help="seed of tasks and sampling")
    parser.add_argument("--out", default="runs/trl", help="output folder of the trained model")
    options = parser.parse_args(argv)
    try:
        options.model = smollm2.named(options.model)
        trainer = make_trainer(options)
    except ModuleNotFoundError as error:
        parser.error(f"{error}: pip install -r requirements-trl.txt")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    clock = stopwatch(trainer)
    trainer.train()
    seconds = [end - start for start, end in itertools.pairwise(clock)]
    trainer.save_model()
    last = next(line for line in reversed(trainer.state.log_history) if "success" in line)
    print(json.dumps({"bench": "trl_grpo", "steps": options.steps,
                      "s_per_step": [round(s, 3) for s in seconds],
                      "success": last["success"], "reward": last["reward"]}))


if __name__ == "__main__":
    main()
