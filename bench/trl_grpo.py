"""The household world under TRL's GRPOTrainer: the environment in a `rollout_func`, all the rest TRL's.

A step is gcd.py's iteration with one minibatch: `--tasks` rooms, `--group-size` episodes of each, an update.
TRL samples, scores and steps; this file plays. Left out: a cold start (take gcd.py's checkpoint), the judge,
evaluation (gcd.py reads the folder that this file writes). TRL.md says what else differs.

    pip install -r requirements-trl.txt
    python -m bench.trl_grpo --model runs/main/cold_start/checkpoint --steps 1
"""

import argparse
import itertools
import json
import os
import time

import torch

import envs
from lm import chat as chats
from lm import model as qwen


class Episode:
    """One episode as TRL wants it: the first prompt, and all that follows as one completion with a mask.

    Token in, token out: completion_ids grows by what was sampled and by each observation's tokens; nothing is
    tokenised again. env_mask is 1 on sampled tokens, 0 on the environment's.
    """

    def __init__(self, env, task, chat):
        self.env, self.chat, self.reply = env, chat, env.reset(task)
        self.prompt_ids = chat.observe(self.reply, first=True)
        self.completion_ids, self.env_mask, self.logprobs = [], [], []
        self.turns, self.refused, self.ended = 0, 0, False

    def add(self, ids, sampled, logprobs=None):
        """Append tokens; where the sampler gave no logprobs they are 0."""
        self.completion_ids += ids
        self.env_mask += [int(sampled)] * len(ids)
        self.logprobs += logprobs or [0.0] * len(ids)

    def take(self, response_ids, logprobs, max_turns, room):
        """Play a sampled response. As in gcd.py, one cut at its length ends the episode as failed, and so
        does a next prompt of more than `room` tokens. A completion never ends with an observation."""
        self.add(response_ids, True, logprobs)
        self.turns += 1
        cut = response_ids[-1] not in self.chat.stop_ids
        command = None if cut else self.chat.parse(self.chat.decode(response_ids))[0]
        self.refused += command not in self.reply.admissible
        if not cut:
            self.reply = self.env.step(command or "")   # a malformed response is a command that no game takes
        heard = self.chat.observe(self.reply)
        self.ended = (cut or self.reply.done or self.turns == max_turns
                      or len(self.prompt_ids) + len(self.completion_ids) + len(heard) > room)
        if not self.ended:
            self.add(heard, False)


class Rollout:
    """TRL's rollout_func: plays the tasks whose ids are the prompts.

    TRL 1.16 calls it once per generation batch, every prompt there `num_generations` times, and wants
    prompt_ids, completion_ids and logprobs, a list per episode (logprobs for vLLM alone, else None will do).
    Other keys become arguments of the reward functions, but for env_mask: TRL pads it, calls it `tool_mask`
    and multiplies the completion mask by it wherever tokens are summed or counted; attention sees them all.
    """

    def __init__(self, world, tasks, chat, n, max_turns):
        self.envs, self.chat, self.max_turns = world.make(n), chat, max_turns
        self.tasks = {task.id: task for task in tasks}

    def __call__(self, prompts, trainer):
        episodes = [Episode(env, self.tasks[task_id], self.chat)
                    for env, task_id in zip(self.envs, prompts, strict=True)]
        room = trainer.model.config.max_position_embeddings - trainer.args.max_completion_length
        live = episodes
        while live:
            # what TRL's own tool loop calls: transformers' generate, or vLLM where the trainer has it
            responses, logprobs = trainer._generate_single_turn(
                [e.prompt_ids + e.completion_ids for e in live], None, {}, num_generations=1)
            for i, episode in enumerate(live):
                episode.take(responses[i], logprobs and logprobs[i], self.max_turns, room)
            live = [e for e in live if not e.ended]
        return {"prompt_ids": [e.prompt_ids for e in episodes],
                "completion_ids": [e.completion_ids for e in episodes],
                "logprobs": [e.logprobs for e in episodes] if trainer.use_vllm else None,
                "env_mask": [e.env_mask for e in episodes], "won": [e.reply.won for e in episodes],
                "refused_share": [e.refused / e.turns for e in episodes]}


def reward(won, refused_share, log_metric, **others):
    """R = won - 0.1 * share of refused turns, gcd.py's default. others: what else TRL passes."""
    log_metric("success", sum(won) / len(won))
    log_metric("refused_share", sum(refused_share) / len(won))
    return [float(w) - 0.1 * share for w, share in zip(won, refused_share)]


def make_trainer(options):
    """A GRPOTrainer with gcd.py's default loss: mean over tokens, no KL, no division by the group's std."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")      # or TRL reports to its makers; read at import
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = qwen.load_tokenizer(options.model)
    chat = chats.Chat(tokenizer, "plain" if chats.is_small(tokenizer) else "think")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = list(chat.stop_ids)  # TRL ends a response at these
    world = envs.find("household")(seed=options.seed)
    tasks = world.train("part", 0, options.tasks * options.steps)
    settings = GRPOConfig(
        output_dir=options.out, max_steps=options.steps, seed=options.seed, shuffle_dataset=False,
        per_device_train_batch_size=options.group_size, num_generations=options.group_size,
        gradient_accumulation_steps=options.tasks, max_completion_length=options.max_response_tokens,
        learning_rate=options.lr, lr_scheduler_type="constant", max_grad_norm=1.0, beta=0.0, epsilon=0.2,
        epsilon_high=0.28, loss_type="dapo", scale_rewards="none", bf16=False, gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(), logging_steps=1, save_strategy="no", report_to="none")
    rollout = Rollout(world, tasks, chat, options.tasks * options.group_size, options.max_turns)
    prompts = Dataset.from_list([{"prompt": task.id} for task in tasks])
    return GRPOTrainer(model, reward, settings, prompts, processing_class=tokenizer, rollout_func=rollout)


def stopwatch(trainer):
    """The times at which training begins and each of its steps ends, as they come."""
    from transformers import TrainerCallback
    clock = []

    class Stopwatch(TrainerCallback):
        """Looks at the clock."""

        def on_train_begin(self, *_, **__):
            clock.append(time.perf_counter())

        on_step_end = on_train_begin

    trainer.add_callback(Stopwatch())
    return clock


def main(argv=None):
    """Train, save, and print one JSON line; TRL prints its metrics after each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", required=True, help="Hugging Face folder: gcd.py's checkpoint, a Qwen2.5")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps, each on new tasks")
    parser.add_argument("--tasks", type=int, default=16, help="tasks in a step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per task, at least 2")
    parser.add_argument("--max-turns", type=int, default=20, help="turns in an episode")
    parser.add_argument("--max-response-tokens", type=int, default=16, help="tokens in a response")
    parser.add_argument("--lr", type=float, default=6e-4, help="learning rate, constant")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and of sampling")
    parser.add_argument("--out", default="runs/trl", help="where the trained model goes")
    options = parser.parse_args(argv)
    try:
        trainer = make_trainer(options)
    except ModuleNotFoundError as missing:
        parser.error(f"{missing}: pip install -r requirements-trl.txt")
    except ValueError as mistake:
        parser.error(str(mistake))
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
