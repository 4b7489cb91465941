"""Stage 3: every game of the splits in each mode, the headline at temperature 1, or others' protocols."""

import random
import time

from rollout import Seat, success_rate, summary
from run import files, parallel
from run.parallel import stream

EVALUATION = 8                                  # what a random stream is for: the second number of its name
# Temperatures by --protocol; how often each game is played; turns of others' evaluations, of 128 games
MODES = {"full": {"sampled": 1.0, "greedy": 0.0, "t0.4": 0.4}, "sampled": {"sampled": 1.0},
         "eight": {"sampled": 1.0, "t0.4": 0.4}, "verl-agent": {"sampled": 0.4}, "rlvmr": {"sampled": 0.4}}
PLAYS = {"eight": 8}
TURNS = {"verl-agent": 50, "rlvmr": 30}


def evaluation(run):
    """Success on each split in each mode; written to evaluation.json, some episodes to episodes.jsonl."""
    config, started = run.config, time.perf_counter()
    modes, plays = MODES[config.protocol], PLAYS.get(config.protocol, 1)
    instruction = run.instruction.text if run.instruction and config.correction_at_evaluation else ""
    turns, splits = TURNS.get(config.protocol), {}
    parallel.copy_weights(run.model, run.sampler)
    if run.ranks.rank == 0:                                # an earlier evaluation's, of a run that went on
        files.keep(run.out / files.EPISODES, lambda record: record.get("phase") != "evaluation")
    for name in config.splits:
        tasks, splits[name] = run.world.split(name), {}
        if turns:
            tasks = random.Random(config.seed).choices(tasks, k=128)          # drawn with replacement
        for m, (mode, temperature) in enumerate(modes.items()):
            seats = [Seat(task, g, stream(config.seed, EVALUATION, m, g, *([k] if k else [])), g,
                          instruction)
                     for k in range(plays) for g, task in enumerate(tasks)][run.ranks.rank::run.ranks.world]
            sampling = run.sampling(temperature=temperature)
            episodes = run.play(seats, sampling, f"{name} {mode}", turns) if seats else []
            run.stop_if_asked(None)
            splits[name][mode] = success_rate(parallel.all_sum(summary(episodes)), plays)
            if mode == "sampled":
                shown = to_look_at(episodes[:len(episodes) // plays])
                run.store(shown, {"phase": "evaluation", "split": name})
    if run.ranks.rank == 0:
        files.write_json(run.out / files.EVALUATION, {
            **run.origin, "games_hash": {split: run.origin["games_hash"][split] for split in splits},
            "splits": splits, "seed": config.seed, "protocol": config.protocol, "instruction": instruction,
            "temperature": modes["sampled"], "seconds": time.perf_counter() - started})
    return splits


def to_look_at(episodes):
    """Twelve to store, spread over the split; of both ends, won and lost, where there are both."""
    shown = episodes[::len(episodes) // 12 or 1][:12]
    for won in (True, False):
        if shown and all(episode.won != won for episode in shown):
            shown[-1:] = [episode for episode in episodes if episode.won == won][:1] or shown[-1:]
    return shown
