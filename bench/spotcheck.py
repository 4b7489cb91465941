"""Stored evaluation episodes of runs on real games, replayed on the real ALFWorld engine: same commands, same outcome?

A run plays ALFWorld's games in household.py, which is ALFWorld word for word; this looks again, with the commands of a
trained model. Prints one JSON line and ends with status 1 if an observation or an outcome differs, or if there are fewer
episodes than asked. Left out: episodes with a malformed or cut response, whose turn reached no game.

    python -m bench.spotcheck runs/table1/alfworld/seed0/grpo runs/table1/alfworld/seed0/grpo+gcd
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from tqdm import tqdm

from bench.table1 import read_lines
from envs import alfworld
from envs.games import load_games
from envs.splits import FOLDER


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="output folders of gcd.py, evaluated with --games")
    parser.add_argument("--games", default="../shared/data/alfworld/games.jsonl.gz", help="the same as the run's")
    parser.add_argument("--n", type=int, default=20, help="episodes of each run")
    options = parser.parse_args(argv)
    rows = [row for run in options.runs for row in replayable(run, options.n)]
    tasks = {task.id: task for split in {row["split"] for row in rows} for task in load_games(options.games, FOLDER[split])}
    env = alfworld.make(1)[0]
    differ = [row["task_id"] for row in tqdm(rows, unit="episode") if not same(env, tasks[row["task_id"]], row)]
    env.close()
    print(json.dumps({"bench": "spotcheck", "runs": options.runs, "episodes": len(rows), "won": sum(r["won"] for r in rows),
                      "turns": sum(len(r["turns"]) for r in rows), "differ": differ} | alfworld.versions()))
    return bool(differ) or len(rows) < options.n * len(options.runs)


def replayable(run, n):
    """n of a run's stored evaluation episodes whose every turn gave a command, from its splits in turns."""
    by_split = {}
    for row in read_lines(Path(run) / "episodes.jsonl"):
        if row["phase"] == "evaluation" and all(turn["action"] for turn in row["turns"]):
            by_split.setdefault(row["split"], []).append(row)
    return [row for rows in itertools.zip_longest(*by_split.values()) for row in rows if row][:n]


def same(env, task, row):
    """Whether the engine says what the stored episode says, turn by turn, and ends as it ended."""
    reply = env.reset(task)
    for turn in row["turns"]:
        if reply.observation != turn["observation"] or (turn["action"] in reply.admissible) != turn["valid"]:
            return False
        reply = env.step(turn["action"])
    return (reply.observation, reply.won) == (row["final_observation"], row["won"])


if __name__ == "__main__":
    sys.exit(main())
