"""What a fast engine is worth: the engine's share of an iteration's seconds, with ALFWorld's own and ours.

The step is TRL's GRPOTrainer (lab/bench/trl_grpo.py) with the small model trained here, on real games behind
ALFWorld's interface, `AlfredTWEnv`: the installed one and our drop-in. Both start with the same seeds and
answer the same, so they play the same episodes. A group is one game in each of `--group-size` batches; the
installed engine runs a process per game, so that a batch uses all cores. The first step is not counted. Left
out: a large model, whose own share of the step is larger; docs/household.md cites one.

Needs TRL and alfworld (`pip install -r requirements-trl.txt -r requirements-alfworld.txt`).

    python -m lab.bench.engine_share            # writes lab/results/engine_share.json, in some minutes
"""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time

import torch

from envs import Reply
from envs.alfred.games import load_games
from envs.alfred.tw_env import AlfredTWEnv
from infra import files
from lab.bench import envs, trl_grpo
from lab.bench.study import ROOT, parse_clean

OUT = ROOT / "lab" / "results" / "engine_share.json"
MODEL = ROOT / "lab" / "results" / "alfworld_model"
TASKS, GROUP_SIZE, MAX_TURNS = 4, 8, 30
ENGINES = {"alfworld": envs.stock_environment, "household": AlfredTWEnv}


class Place:
    """A game of a batch as trl_grpo.Episode knows games: its reply was received before it is asked for."""

    reply = None

    def reset(self, task):
        """The reply to the batch's reset."""
        return self.reply

    def step(self, command):
        """The reply to the batch's last commands."""
        return self.reply


class Rollout:
    """trl_grpo.Rollout on batches of an AlfredTWEnv: group member i plays in batch i.

    engine_s: a list of the engine's seconds and a list of its turns, an entry for each call.
    """

    def __init__(self, environment, chat, options):
        self.batches = [environment.init_env(options.tasks) for _ in range(options.group_size)]
        self.chat, self.max_turns, self.engine_s, self.turns = chat, options.max_turns, [], []

    def __call__(self, prompts, trainer):
        self.engine_s.append(0.0)
        self.turns.append(0)
        places = [Place() for _ in prompts]
        self.receive(places, self.timed(lambda batch, _: batch.reset()))
        episodes = [trl_grpo.Episode(place, None, self.chat) for place in places]
        room = trainer.model.config.max_position_embeddings - trainer.args.max_completion_length
        while live := [i for i, episode in enumerate(episodes) if not episode.ended]:
            prompts = [episodes[i].prompt_ids + episodes[i].completion_ids for i in live]
            responses, _ = trainer._generate_single_turn(prompts, None, {}, num_generations=1)
            commands = ["look"] * len(places)             # ignored: the episode is over
            for i, response in zip(live, responses, strict=True):
                commands[i] = self.chat.parse(self.chat.decode(response))[0] or ""
            size = len(self.batches)
            self.receive(places, self.timed(lambda batch, b: batch.step(commands[b::size])))
            self.turns[-1] += len(live)
            for i, response in zip(live, responses, strict=True):
                episodes[i].submit(response, self.max_turns, room)
        return {"prompt_ids": [e.prompt_ids for e in episodes],
                "completion_ids": [e.completion_ids for e in episodes], "logprobs": None,
                "env_mask": [e.env_mask for e in episodes], "won": [e.reply.won for e in episodes],
                "refused_share": [e.refused / e.turns for e in episodes]}

    def timed(self, call):
        """[call(batch, its number)] of all batches, whose seconds are the engine's."""
        started_s = time.perf_counter()
        answers = [call(batch, b) for b, batch in enumerate(self.batches)]
        self.engine_s[-1] += time.perf_counter() - started_s
        return answers

    def receive(self, places, answers):
        """Give each game its part of its batch's answer. Prompt p is task p // size, member p % size."""
        for p, place in enumerate(places):
            observations, *_, infos = answers[p % len(answers)]
            i = p // len(answers)
            won = bool(infos["won"][i])
            place.reply = Reply(observations[i], list(infos["admissible_commands"][i]), won, won)


def measure(options, engine, config):
    """Seconds of the last step with this engine, and the engine's part of them."""
    def make_rollout(options, chat):
        rollouts.append(Rollout(ENGINES[engine](config), chat, options))
        return rollouts[0], [f"task {i}" for i in range(options.tasks * options.steps)]

    rollouts = []
    with contextlib.redirect_stdout(sys.stderr):              # TRL prints its metrics
        trainer = trl_grpo.make_trainer(options, make_rollout)
        clock = trl_grpo.stopwatch(trainer)
        trainer.train()
    for batch in rollouts[0].batches:
        batch.close()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    *_, step_s = (end - start for start, end in itertools.pairwise(clock))
    return {"row": engine, "step_s": step_s, "engine_s": rollouts[0].engine_s[-1],
            "turns": rollouts[0].turns[-1], "rewards": rewards}


def main(argv=None):
    """Measure, write the file, and print a line for each engine."""
    parser = argparse.ArgumentParser("python -m lab.bench.engine_share", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--games", help="folder or .jsonl.gz file (default: $ALFWORLD_DATA/json_2.1.1)")
    options = parse_clean(parser, argv)
    if missing := [name for name in ("alfworld", "trl") if not envs.installed(name)]:
        parser.error(f"needs {', '.join(missing)}: pip install -r requirements-{missing[0]}.txt")
    try:
        tasks = load_games(options.games or envs.found_games(), "train")[:200]
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = argparse.Namespace(
            model=str(MODEL), steps=2, seed=0, lr=1e-5, tasks=TASKS, group_size=GROUP_SIZE,
            max_turns=MAX_TURNS, max_response_tokens=16, out=f"{folder}/trl")
        config = envs.written(tasks, f"{folder}/games")
        rows = [measure(settings, engine, config) for engine in ENGINES]
    if rows[0]["rewards"] != rows[1]["rewards"] or rows[0]["turns"] != rows[1]["turns"]:
        raise SystemExit(f"the engines played different episodes: {rows}")
    files.write_json(OUT, {
        "what": "seconds of a step of TRL's GRPOTrainer, and the engine's part of them",
        "command": options.command, "commit": options.commit, "torch": torch.__version__,
        "alfworld": envs.installed("alfworld"), "textworld": envs.installed("textworld"),
        "trl": envs.installed("trl"), "cores": os.cpu_count(), "model": MODEL.relative_to(ROOT).as_posix(),
        "episodes": TASKS * GROUP_SIZE, "max_turns": MAX_TURNS, "rows": rows})
    for row in rows:
        print(f"{row['row']}: {row['engine_s']:.2f} of {row['step_s']:.2f} s, "
              f"{row['engine_s'] / row['step_s']:.1%} of the step, {row['turns']} turns")


if __name__ == "__main__":
    main()
