"""Turns a second of the household game on real games, and of the stock ALFWorld engine where it is installed.

Every turn is a random admissible command, with the next admissible commands computed. Prints one JSON line.

    python -m bench.envs --games ../shared/data/alfworld/games.jsonl.gz
"""

import argparse
import json
import platform
import random
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from envs.games import load_games
from envs.household import Household


def main():
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--games", default="../shared/data/alfworld/games.jsonl.gz", help="folder or .jsonl.gz file")
    parser.add_argument("--split", default="valid_unseen", help="split to play")
    parser.add_argument("--turns", type=int, default=100_000, help="turns of the household game")
    parser.add_argument("--stock-turns", type=int, default=150, help="turns of the stock engine")
    options = parser.parse_args()

    tasks = load_games(options.games, options.split)
    random.Random(0).shuffle(tasks)
    started_s = time.perf_counter()
    for task in tasks:
        task.problem.parse()
    parse_ms = 1000 * (time.perf_counter() - started_s) / len(tasks)
    household = turns_per_s(household_players(tasks), options.turns)
    stock = turns_per_s(stock_players(tasks), options.stock_turns) if installed("alfworld") else None
    print(json.dumps({
        "bench": "envs", "split": options.split, "games": len(tasks), "parse_ms": round(parse_ms, 2),
        "household_turns_per_s": round(household), "stock_turns_per_s": stock and round(stock, 1),
        "ratio": stock and round(household / stock), "python": platform.python_version(),
        "alfworld": installed("alfworld"), "textworld": installed("textworld")}))


def turns_per_s(players, turns, turns_per_game=50):
    """Random play; only the turns are timed, not the start of a game. A player is (first commands, step)."""
    rng, played, spent_s = random.Random(0), 0, 0.0
    while played < turns:
        admissible, step = next(players)
        started_s = time.perf_counter()
        for _ in range(min(turns_per_game, turns - played)):
            admissible = step(rng.choice(admissible))
            played += 1
        spent_s += time.perf_counter() - started_s
    return played / spent_s


def household_players(tasks):
    env = Household()
    while True:
        for task in tasks:
            yield env.reset(task).admissible, lambda command: env.step(command).admissible


def stock_players(tasks):
    """The same games on the stock engine, alfworld's domain and grammar around them."""
    arguments = sys.argv[:]                  # the engine's translator overwrites sys.argv
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from textworld.envs.pddl import PddlEnv
    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    for task in tasks:
        env.load({"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", task.problem.task_desc),
                  "pddl_problem": task.problem.pddl})
        sys.argv[:] = arguments
        yield env.reset()["admissible_commands"], lambda command: env.step(command)[0]["admissible_commands"]


def installed(package):
    """The package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
