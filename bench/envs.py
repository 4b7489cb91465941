"""Turns a second of the household game on real games, of the stock ALFWorld engine and of our pool of it, if installed.

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

from envs import alfworld
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
    pool = alfworld_pool(tasks) if installed("alfworld") else {}
    print(json.dumps({
        "bench": "envs", "split": options.split, "games": len(tasks), "parse_ms": round(parse_ms, 2),
        "household_turns_per_s": round(household), "stock_turns_per_s": stock and round(stock, 1),
        "ratio": stock and round(household / stock), **pool, "python": platform.python_version(),
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


def alfworld_pool(tasks, n=128, group=8, turns=20, workers=2):
    """n live games in groups on envs/alfworld.py: seconds to start them, turns a second, memory of the workers.

    Every turn is a random admissible command for each game, all sent before one is waited for. Games are started
    twice: the first start has the workers' own in it, the second does not.
    """
    envs, rng, start_s = alfworld.make(n, workers), random.Random(0), []
    for games in (tasks[:n // group], tasks[n // group:2 * n // group]):
        started_s = time.perf_counter()
        replies = ask(envs, "reset", [games[i // group] for i in range(n)])
        start_s.append(round(time.perf_counter() - started_s, 1))
    started_s = time.perf_counter()
    for _ in range(turns):
        replies = ask(envs, "step", [rng.choice(reply.admissible) for reply in replies])
    spent_s = time.perf_counter() - started_s
    pss_mb = sum(pss_of(worker.process.pid) for worker in envs[0].pool.workers)
    for env in envs:
        env.close()
    return {"alfworld_live": n, "alfworld_workers": workers, "alfworld_start_s": start_s,
            "alfworld_turns_per_s": round(n * turns / spent_s), "alfworld_pss_mb": round(pss_mb)}


def ask(envs, verb, arguments):
    """The replies of all environments, none of which waits for another."""
    for env, argument in zip(envs, arguments):
        env.send(verb, argument)
    return [env.receive() for env in envs]


def pss_of(pid):
    """A process's proportional set size in MB: shared pages are shared out."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def installed(package):
    """The package's version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
