"""Stage 3: every split once per mode, the headline at temperature 1 over every game, or others' protocols.

Left out: training curves (metrics.jsonl has them), and comparing seeds (bench.table1).
"""

import random
import time

from rollout import Seat, success_rate, summary
from run import files, parallel
from run.parallel import stream

EVALUATION = 8                                  # what a random stream is for: the second number of its name
MODES = {"sampled": 1.0, "greedy": 0.0, "t0.4": 0.4}
PROTOCOL = {"verl-agent": 50, "rlvmr": 30}      # turns of others' evaluations: 128 games at temperature 0.4


def evaluation(run):
    """Success on each split in each mode; written to evaluation.json, some episodes to episodes.jsonl."""
    config, started = run.config, time.perf_counter()
    modes = {"full": MODES, "sampled": {"sampled": 1.0}}.get(config.protocol, {"sampled": 0.4})
    instruction = run.instruction.text if run.instruction and config.correction_at_evaluation else ""
    splits = {}
    for name in config.splits:
        tasks, splits[name] = run.world.split(name), {}
        if config.protocol in PROTOCOL:
            tasks = random.Random(config.seed).choices(tasks, k=128)          # drawn with replacement
        for m, (mode, temperature) in enumerate(modes.items()):
            seats = [Seat(task, g, stream(config.seed, EVALUATION, m, g), g, instruction)
                     for g, task in enumerate(tasks)]
            mine = seats[run.ranks.rank::run.ranks.world]
            sampling = run.sampling(temperature=temperature, top_p=config.top_p, top_k=config.top_k)
            turns = PROTOCOL.get(config.protocol)
            with parallel.gathered(run.model):
                episodes = run.play(mine, sampling, f"{name} {mode}", turns) if mine else []
            splits[name][mode] = success_rate(parallel.all_sum(summary(episodes)))
            if mode == "sampled":
                shown = episodes[::max(1, len(episodes) // 12)][:12]
                run.store(shown, {"phase": "evaluation", "split": name})
            run.stop_if_asked(None)
    if run.ranks.rank == 0:
        games = {split: run.origin["games_hash"][split] for split in splits}
        files.write_json(run.out / files.EVALUATION, {
            **run.origin, "games_hash": games, "splits": splits, "seed": config.seed,
            "protocol": config.protocol, "temperature": modes["sampled"], "instruction": instruction,
            "seconds": time.perf_counter() - started})
    return splits
