"""Stage 3: evaluation of every game of the splits, or of 128 drawn games, by --protocol."""

import random
import time

from infra import files, parallel
from infra.streams import EVALUATION, stream
from labels import flaw_labels
from rollout import EpisodeSpec, success_rate, summary
from session import split_tasks

# By --protocol: {mode: temperature}
MODES = {"full": {"sampled": 1.0, "greedy": 0.0, "t0.4": 0.4}, "sampled": {"sampled": 1.0},
         "eight": {"sampled": 1.0, "t0.4": 0.4}, "verl-agent": {"sampled": 0.4}, "rlvmr": {"sampled": 0.4}}
# Plays of each game; 1 where none is given
PLAYS = {"eight": 8}
# Turns, in other projects' protocols of 128 drawn games
TURNS = {"verl-agent": 50, "rlvmr": 30}


def evaluation(run):
    """Evaluate each split in each mode. Writes evaluation.json, and some episodes to episodes.jsonl.

    Returns {split: {mode: rollout.success_rate}}. All ranks call this, and share the games.
    """
    config, started = run.config, time.perf_counter()
    modes, plays = MODES[config.protocol], PLAYS.get(config.protocol, 1)
    instruction = run.instruction.text if run.instruction and config.correction_at_evaluation else ""
    turns, splits = TURNS.get(config.protocol), {}
    parallel.copy_weights(run.model, run.sampler)
    if run.ranks.rank == 0:                                # drop those of an earlier evaluation of this run
        files.filter_lines(run.out / files.EPISODES, lambda record: record.get("phase") != "evaluation")
    for name in config.splits:
        tasks, splits[name] = split_tasks(run.environment, name), {}
        if turns:
            tasks = random.Random(config.seed).choices(tasks, k=128)          # drawn with replacement
        for m, (mode, temperature) in enumerate(modes.items()):
            specs = [EpisodeSpec(task, g, stream(config.seed, EVALUATION, m, g, *([k] if k else [])), g,
                                 instruction)
                     for k in range(plays) for g, task in enumerate(tasks)]
            specs = specs[run.ranks.rank::run.ranks.world_size]                # this rank's
            sampling = run.sampling(temperature=temperature)
            episodes = run.play(specs, sampling, f"{name} {mode}", turns) if specs else []
            run.stop_if_asked(None)
            counts = summary(episodes) | flawed(episodes, run.environment)
            splits[name][mode] = success_rate(parallel.all_sum(counts), plays)
            if mode == "sampled":
                run.store(examples(episodes[:len(episodes) // plays]), {"phase": "evaluation", "split": name})
    if run.ranks.rank == 0:
        files.write_json(run.out / files.EVALUATION, {
            **run.origin, "games_hash": {split: run.origin["games_hash"][split] for split in splits},
            "splits": splits, "seed": config.seed, "protocol": config.protocol, "instruction": instruction,
            "temperature": modes["sampled"], "seconds": time.perf_counter() - started})
    return splits


def flawed(episodes, environment):
    """{"flawed": number of turns that the game took and the oracle calls bad}; {} without an oracle."""
    if not environment.oracle:
        return {}
    labels = (label for episode in episodes for label in flaw_labels(episode, environment))
    return {"flawed": sum(label == "bad" for label in labels)}


def examples(episodes):
    """Pick up to 12 episodes to store, spread over the split, with a win and a loss if there are both."""
    picked = episodes[::len(episodes) // 12 or 1][:12]
    for won in (True, False):
        if picked and all(episode.won != won for episode in picked):
            picked[-1:] = [episode for episode in episodes if episode.won == won][:1] or picked[-1:]
    return picked
