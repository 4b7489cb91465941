"""Turns per second of the household game on real ALFWorld games.

Also of 64 games side by side in the vectorised class. If alfworld is installed, also of its engine and of our
worker pool around it, and of its AlfredTWEnv next to our drop-in replacement, at batch sizes 1 and 8, on
the same games and commands. Every turn is a random admissible command and includes the computation of the
next admissible commands. Prints one JSON line; each ratio is to ALFWorld's own engine in the same run.

    python -m lab.bench.envs [--games $ALFWORLD_DATA/json_2.1.1]
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from envs import alfworld
from envs.alfred.game import Game
from envs.alfred.games import expand_variables, load_games
from envs.alfred.tw_env import AlfredTWEnv
from envs.alfred.vector import Games

PLACES = (expand_variables("$ALFWORLD_DATA/json_2.1.1"), "../shared/data/alfworld/games.jsonl.gz")
NO_GAMES = ("no ALFWorld games: python -m envs.household download puts them into $ALFWORLD_DATA; --games "
            "takes another json_2.1.1 folder or a games.jsonl.gz")
SPLIT = "valid_unseen"
TURNS, STOCK_TURNS = 100_000, 150         # played in the household game, and in ALFWorld's own engine
BATCHES = (1, 8)
SIDE_BY_SIDE = 64         # games of the vectorised class


def main(argv=None):
    """Measure and print; returns the exit status, 2 if there are no games."""
    parser = argparse.ArgumentParser("python -m lab.bench.envs", description=__doc__, allow_abbrev=False)
    parser.add_argument("--games", help="folder or .jsonl.gz file (default: $ALFWORLD_DATA/json_2.1.1)")
    options = parser.parse_args(argv)
    try:
        tasks = load_games(options.games or found_games(), SPLIT)
    except ValueError as error:
        print(f"lab.bench.envs: {error}", file=sys.stderr)
        return 2
    random.Random(0).shuffle(tasks)
    print(json.dumps({
        "bench": "envs", "split": SPLIT, "games": len(tasks),
        **measured(tasks, TURNS, STOCK_TURNS), "python": platform.python_version(),
        "cores": os.cpu_count(), "alfworld": installed("alfworld"), "textworld": installed("textworld")}))
    return 0


def found_games():
    """The first default path that exists; ValueError, which says how to get games, if none does."""
    for path in PLACES:
        if Path(path).exists():
            return path
    raise ValueError(NO_GAMES)


def measured(tasks, turns, stock_turns):
    """All measured values of the printed line."""
    started_s = time.perf_counter()
    for task in tasks:
        task.problem.parse()
    parse_ms = 1000 * (time.perf_counter() - started_s) / len(tasks)
    household = turns_per_s(household_players(tasks), turns)
    stock = turns_per_s(stock_players(tasks), stock_turns) if installed("alfworld") else None
    return {"parse_ms": round(parse_ms, 2), "household_turns_per_s": round(household),
            "stock_turns_per_s": stock and round(stock, 1), "ratio": stock and round(household / stock),
            "vector": vector(tasks, turns, stock),
            "tw_env": [tw_env(tasks, size, turns, stock_turns) for size in BATCHES],
            **(alfworld_pool(tasks) if installed("alfworld") else {})}


def turns_per_s(players, turns, turns_per_game=50):
    """Turns per second of random play; starting a game is not timed.

    players: iterator of (first admissible commands, step), one per game; step(command) returns the next
    admissible commands.
    """
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
    """Players of the tasks in our household game, repeated endlessly: see `turns_per_s`."""
    env = Game()
    for task in itertools.cycle(tasks):
        yield env.reset(task).admissible, lambda command: env.step(command).admissible


def stock_players(tasks):
    """Players of the tasks in the installed engine, with alfworld's domain and grammar."""
    arguments = sys.argv[:]                  # the engine's translator overwrites sys.argv
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs.pddl import PddlEnv
    env = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
    for task in tasks:
        env.load(game_file(task))
        sys.argv[:] = arguments
        yield env.reset()["admissible_commands"], lambda command: env.step(command)[0]["admissible_commands"]


def vector(tasks, turns, stock, turns_per_game=50):
    """Turns per second of SIDE_BY_SIDE games in one call, and as a ratio to `stock`; starts are not timed."""
    games, following = Games(SIDE_BY_SIDE, max_turns=turns_per_game), itertools.cycle(tasks)
    rng, played, spent_s = random.Random(0), 0, 0.0
    while played < turns:
        games.reset(list(itertools.islice(following, SIDE_BY_SIDE)))
        while not all(games.dones):
            commands = [rng.choice(admissible) for admissible in games.admissible]
            played += games.dones.count(False)
            started_s = time.perf_counter()
            games.step(commands)
            spent_s += time.perf_counter() - started_s
    speed = played / spent_s
    return {"games": SIDE_BY_SIDE, "turns_per_s": round(speed), "ratio": stock and round(speed / stock)}


# AlfredTWEnv

def tw_env(tasks, size, turns, stock_turns):
    """Turns per second of a batch and seconds to start it: of the drop-in and, if any, the installed one."""
    with tempfile.TemporaryDirectory() as folder:
        config = written(tasks[:max(BATCHES)], f"{folder}/games")
        speed, start_s = batch_speed(AlfredTWEnv(config), size, turns)
        line = {"batch": size, "turns_per_s": round(speed), "start_s": round(start_s, 2)}
        if not installed("alfworld"):
            return line
        stock_speed, stock_start_s = batch_speed(stock_environment(config), size, max(stock_turns, 2 * size))
        return line | {"stock_turns_per_s": round(stock_speed, 1), "stock_start_s": round(stock_start_s, 2),
                       "ratio": round(speed / stock_speed)}


def written(tasks, folder):
    """Write the games as alfworld's files to a folder that is not there yet; returns `config_of` it."""
    for number, task in enumerate(tasks):
        trial = Path(folder, task.task_type, f"trial_{number}")
        trial.mkdir(parents=True)
        (trial / "game.tw-pddl").write_text(json.dumps(game_file(task)), encoding="utf-8")
        (trial / "traj_data.json").write_text(json.dumps({"task_type": task.task_type}), encoding="utf-8")
    return config_of(folder)


def batch_speed(environment, size, turns, turns_per_game=50):
    """(turns per second, mean seconds of a reset) of random play; finished games count no turns."""
    env, rng, played, spent_s, start_s = environment.init_env(size), random.Random(0), 0, 0.0, []
    while played < turns:
        started_s = time.perf_counter()
        _, infos = env.reset()
        start_s.append(time.perf_counter() - started_s)
        live = size
        for _ in range(min(turns_per_game, -(-(turns - played) // size))):
            commands = [rng.choice(admissible) for admissible in infos["admissible_commands"]]
            started_s = time.perf_counter()
            _, _, dones, infos = env.step(commands)
            spent_s += time.perf_counter() - started_s
            played, live = played + live, size - sum(dones)
    env.close()
    return played / spent_s, sum(start_s) / len(start_s)


def stock_environment(config):
    """The installed AlfredTWEnv; its output is redirected to stderr."""
    os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())    # else the import creates one in $HOME
    sys.unraisablehook = lambda unraisable: None       # each of its processes ends with an error in __del__
    with contextlib.redirect_stdout(sys.stderr):
        from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv as Installed
        return Installed(config)


def config_of(folder):
    """alfworld's config to play a folder of games without a step limit."""
    return {"env": {"domain_randomization": False, "goal_desc_human_anns_prob": 0.0,
                    "expert_type": "handcoded", "task_types": [1, 2, 3, 4, 5, 6]},
            "general": {"training_method": "dqn"}, "dataset": {"data_path": folder, "num_train_games": -1},
            "rl": {"training": {"max_nb_steps_per_episode": 0}}}


def game_file(task):
    """A game in alfworld's file format, with the installed domain and grammar, or our copy of them."""
    domain, grammar = "", ('grammar :: """{"task": [{"rhs": "Your task is to: UNKNOWN GOAL."}]}""";\n'
                           'action PutObject { template :: "move {o} to {r}"; }')
    if installed("alfworld"):
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
        domain, grammar = (Path(path).read_text("utf-8") for path in (ALFRED_PDDL_PATH, ALFRED_TWL2_PATH))
    return {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", task.problem.task_desc),
            "pddl_problem": task.problem.pddl, "solvable": True, "walkthrough": None}


# envs/alfworld.py

def alfworld_pool(tasks, n=128, group=8, turns=20, workers=2):
    """n parallel games in groups on envs/alfworld.py: seconds to start them, turns per second, worker memory.

    Each turn sends a random admissible command to every game before it waits for the first reply. Games are
    started twice, because the first start includes the start of the workers.
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
    """Send `verb` with one argument to each environment, then collect the replies: they run in parallel."""
    for env, argument in zip(envs, arguments):
        env.send(verb, argument)
    return [env.receive() for env in envs]


def pss_of(pid):
    """A process's proportional set size in MB: shared pages are divided among their processes."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def installed(package):
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
