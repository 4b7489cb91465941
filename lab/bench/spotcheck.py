"""Replays stored evaluation episodes of runs on real games on the real ALFWorld engine and compares them.

Runs play ALFWorld's games in envs/household.py, whose texts equal ALFWorld's; this verifies it with the
commands of a trained model. Prints one JSON line. The exit status is 1 if an observation or an outcome
differs, or if there are fewer episodes than requested. Left out: episodes with a malformed or truncated
response, because that turn reached no game.

    python -m lab.bench.spotcheck runs/table1/alfworld_hour/seed0/grpo --games $ALFWORLD_DATA/json_2.1.1

Of a model: its evaluation by evaluation.py takes the run's place.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

from tqdm import tqdm

from envs import alfworld
from infra import files


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", help="output folders of gcd.py, evaluated with --games")
    parser.add_argument("--games", required=True, help="the runs' --games: a folder or a games.jsonl.gz")
    parser.add_argument("--n", type=int, default=20, help="episodes to replay per run")
    options = parser.parse_args(argv)
    try:
        environment = alfworld.Environment(alfworld.Environment.Settings(options.games))
        episodes = [episode for run in options.runs for episode in replayable(run, options.n)]
        tasks = {task.id: task for split in {e["split"] for e in episodes}
                 for task in environment.split_tasks(split)}
        game = environment.make(1)[0]
    except (ValueError, OSError) as error:
        print(f"lab.bench.spotcheck: error: {error}", file=sys.stderr)
        return 2
    differ = [e["task_id"] for e in tqdm(episodes, unit="episode") if not same(game, tasks[e["task_id"]], e)]
    game.close()
    print(json.dumps({"bench": "spotcheck", "runs": options.runs, "episodes": len(episodes),
                      "won": sum(e["won"] for e in episodes), "turns": sum(len(e["turns"]) for e in episodes),
                      "differ": differ, "commit": files.commit()} | environment.versions()))
    return bool(differ) or len(episodes) < options.n * len(options.runs)


def replayable(run, n):
    """Up to n of a run's stored evaluation episodes in which every turn has a command: in turn of each split,
    won and lost.
    """
    by_kind = {}
    for episode in files.read_lines(Path(run) / files.EPISODES)[0]:
        if episode["phase"] == "evaluation" and all(turn["action"] for turn in episode["turns"]):
            by_kind.setdefault((episode["split"], episode["won"]), []).append(episode)
    rounds = itertools.zip_longest(*by_kind.values())
    return [episode for episodes in rounds for episode in episodes if episode][:n]


def same(game, task, episode):
    """True if the engine reproduces the stored episode's observations, valid commands and outcome."""
    reply = game.reset(task)
    for turn in episode["turns"]:
        if reply.observation != turn["observation"] or (turn["action"] in reply.admissible) != turn["valid"]:
            return False
        reply = game.step(turn["action"])
    return (reply.observation, reply.won) == (episode["final_observation"], episode["won"])


if __name__ == "__main__":
    sys.exit(main())
