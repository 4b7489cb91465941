"""Proves envs/alfworld.py: equal to the stock engine and to household, and robust against dying workers.

    python -m pytest tests/envs/test_alfworld.py        # a minute with alfworld installed; skipped without
"""

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_household
from conftest import is_alive, suspend
from test_household import (
    BROKEN,
    GAMES,
    TOUR,
    WIN,
    goal_of,
    kitchen,
    needs_games,
    next_command,
    task_of,
    write_game,
)
from waiting import wait_for

from envs import EpisodeLost, alfworld
from envs._workers import set_timeout
from envs.alfred import rooms
from envs.alfred.game import Game
from envs.alfred.games import GOALS, load_game, load_games
from envs.alfred.problem import NOOP_MESSAGE

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = all(map(find_spec, alfworld.PACKAGES))
needs_engine = pytest.mark.skipif(not INSTALLED,
                                  reason="needs the engine: pip install -r requirements-alfworld.txt")
# stock(pddl, task_desc) starts a game in this process, stock.step plays it
stock = test_household.engine
HEAT, PICK = "pick_heat_then_place_in_recep", "pick_and_place_simple"


def kitchen_task(task_type=PICK, start="l0", desc="put an apple in fridge"):
    return task_of(kitchen(goal_of(task_type), start), desc)


def close(games):
    for game in games:
        game.close()


@pytest.fixture
def make():
    """alfworld.make; its games are closed after the test."""
    made = []

    def make_games(*arguments):
        made.append(alfworld.make(*arguments))
        return made[-1]

    yield make_games
    for games in made:
        close(games)


@pytest.fixture(scope="module")
def game():
    """One game, shared by the tests that leave it usable."""
    (game,) = alfworld.make(1)
    yield game
    game.close()


def replies(games, method, arguments):
    """The reply of each game; all requests are sent before the first reply is received."""
    for game, argument in zip(games, arguments):
        game.send(method, argument)
    return [game.receive() for game in games]


def processes(game):
    return [worker.process for worker in game.pool.workers]


# Against household and the stock engine

@pytest.mark.slow
@needs_engine
@needs_games
def test_twenty_real_games_at_once_equal_household_under_random_commands(make):
    rng = random.Random(20)
    tasks = rng.sample(load_games(GAMES, "valid_unseen") + load_games(GAMES, "valid_seen"), 20)
    assert {task.task_type for task in tasks} == set(GOALS)
    theirs, ours = make(20), [Game() for _ in tasks]
    want, got = [game.reset(task) for game, task in zip(ours, tasks)], replies(theirs, "reset", tasks)
    known = [{"look"} for _ in tasks]
    for _ in range(25):
        assert got == want
        for commands, reply in zip(known, want):
            commands.update(reply.admissible)
        commands = [next_command(reply.admissible, of_game, rng) for reply, of_game in zip(want, known)]
        want = [game.step(command) for game, command in zip(ours, commands)]
        got = replies(theirs, "step", commands)
    assert got == want


@pytest.mark.slow
@needs_engine
@needs_games
def test_three_real_games_equal_the_stock_engine(game, stock):
    rng = random.Random(3)
    # small ones, because the stock engine is slow
    small = sorted(load_games(GAMES, "valid_train"), key=lambda task: len(task.problem.pddl))[:60]
    for task in rng.sample(small, 3):
        theirs, ours, known = stock(task.problem.pddl, task.problem.task_desc), game.reset(task), {"look"}
        for _ in range(6):
            assert ours[:4] == (theirs.feedback, theirs["admissible_commands"], theirs["won"], theirs["won"])
            known.update(ours.admissible)
            command = next_command(ours.admissible, known, rng)
            theirs, ours = stock.step(command), game.step(command)


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("task_type", sorted(GOALS))
def test_a_kitchen_of_corner_cases_equals_household(game, task_type):
    """Objects in two receptacles, cold from the start, sliced, hot and clean; then random commands."""
    rng, ours = random.Random(task_type), Game()
    task = task_of(kitchen(goal_of(task_type, receptacle="CounterTop"), "l2" if task_type == PICK else "l0"))
    want, got, known, won = ours.reset(task), game.reset(task), {"look"}, False
    for turn in range(len(TOUR) + 60):
        assert got == want
        known.update(want.admissible)
        won |= want.won
        command = TOUR[turn] if turn < len(TOUR) else next_command(want.admissible, known, rng)
        want, got = ours.step(command), game.step(command)
    assert won


@pytest.mark.slow
@needs_engine
def test_replies_do_not_depend_on_neighbours_order_or_number_of_workers(game, make):
    """Every slot has its own game: in a textworld batch of wrapper instances, all would play the last one."""
    tasks = [kitchen_task(task_type, start, f"{task_type} from {start}")
             for task_type in (PICK, HEAT) for start in ("l0", "l2", "l5")]
    receptacles = ["desk 1", "fridge 1", "countertop 1", "sinkbasin 1", "microwave 1", "countertop 2"]
    walks = [["look", f"go to {name}", "look", *TOUR[k:k + 4]] for k, name in enumerate(receptacles)]
    three, six = make(6, 3), make(6, 1)
    alone = [[game.reset(task), *map(game.step, walk)] for task, walk in zip(tasks, walks)]
    at_once = [replies(three, "reset", tasks),
               *[replies(three, "step", commands) for commands in zip(*walks)]]
    backwards = [replies(six, "reset", tasks[::-1]),
                 *[replies(six, "step", commands) for commands in zip(*walks[::-1])]]
    assert alone == [list(row) for row in zip(*at_once)] == [list(row) for row in zip(*backwards)][::-1]
    assert len({row[0].observation for row in alone}) == 6
    assert [len(processes(games[0])) for games in ([game], three, six)] == [1, 3, 1]


@pytest.mark.slow
@needs_engine
def test_the_quirks_of_the_engine(game):
    first = game.reset(kitchen_task())
    assert first.observation.endswith("\n\nYour task is to: put an apple in fridge.")
    assert game.step("look").observation.endswith("of a room. Looking quickly around you, you see nothing.")
    assert game.step("Look").observation == NOOP_MESSAGE
    assert game.step(" go to fridge 1 \n").observation == "You arrive at fridge 1. The fridge 1 is closed."
    game.reset(kitchen_task())
    assert [game.step(command).won for command in WIN] == [False] * 4 + [True]
    assert game.step("look").done                               # a won game accepts commands, and stays won
    assert not game.reset(kitchen_task()).won


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("desc", ["put {o} in #task#", 'say "so" [\\n]', "x" * 300_000])
def test_a_tasks_text_is_used_verbatim(game, desc):
    """The stock engine would parse it as a part of its grammar, in JSON."""
    task = kitchen_task(desc=desc)
    assert game.reset(task) == Game().reset(task)


# Caches and clean-up

def library_maps(game):
    maps = Path(f"/proc/{processes(game)[0].pid}/maps").read_text()
    return sum("libdownward" in line for line in maps.splitlines())


@pytest.mark.slow
@needs_engine
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc, which lists a process's libraries")
def test_a_hundred_loads_use_one_copy_of_the_library_per_game(make):
    arguments = sys.argv[:]
    games = make(3, 1)
    tasks = [kitchen_task(task_type) for task_type in sorted(GOALS)]
    replies(games, "reset", tasks)
    maps = library_maps(games[0])
    for k in range(34):
        replies(games, "reset", [tasks[k % 6]] * 3)
    assert library_maps(games[0]) == maps > 0
    assert sys.argv == arguments                               # the engine's translator overwrites it


@pytest.mark.slow
@needs_engine
def test_a_group_is_translated_once_with_small_library_copies_and_old_games_are_dropped(tmp_path):
    """In a new process: a worker patches the engine's modules, which other tests use unpatched."""
    others = [task_of(kitchen(goal_of(PICK)).replace("bar_2", f"bar_2{k}")) for k in range(5)]
    (tmp_path / "tasks").write_bytes(pickle.dumps((kitchen_task(), others)))
    script = """if True:
        import os, pickle, sys, fast_downward, mementos.core
        from envs import alfworld
        with open(sys.argv[1], "rb") as file:
            content = file.read()
        calls, stock = [], fast_downward.pddl2sas
        fast_downward.pddl2sas = lambda *a, **k: calls.append(k.get("optimize", False)) or stock(*a, **k)
        logic = alfworld.prepare()
        for _ in range(8):
            task, others = pickle.loads(content)                   # new objects, as a worker gets them
            alfworld.Engine(logic).reset(task.problem)
        print(calls, os.stat(fast_downward.interface.DOWNWARD_LIB_PATH).st_size < 4_000_000)
        cache = mementos.core._memento_cache
        one, engine = len(cache), alfworld.Engine(logic)
        for other in others:
            engine.reset(other.problem)
        print(0 < len(cache) < 1.2 * one, len(calls))"""
    done = run("-c", script, tmp_path / "tasks")
    assert done.stdout == "[False] True\nTrue 6\n", done.stderr


@pytest.mark.slow
@needs_engine
def test_closing_the_last_game_ends_the_workers_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    games = alfworld.make(4)
    workers = processes(games[0])
    replies(games, "reset", [kitchen_task()] * 4)
    for game in games[:3] * 2:                                 # a second close has no effect
        game.close()
    assert games[3].step("look").admissible and [w.poll() for w in workers] == [None, None]
    games[3].close()
    assert None not in [worker.returncode for worker in workers]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_engine
def test_workers_end_with_a_killed_main_process(tmp_path):
    (tmp_path / "task").write_bytes(pickle.dumps(kitchen_task()))
    script = """if True:
        import pickle, sys
        from envs import alfworld
        games = alfworld.make(2)
        with open(sys.argv[1], "rb") as file:
            task = pickle.load(file)
        for game in games:
            game.send("reset", task)
        for game in games:
            game.receive()
        print(*[worker.process.pid for worker in games[0].pool.workers], flush=True)
        games[0].receive()"""
    main = subprocess.Popen([sys.executable, "-c", script, tmp_path / "task"], stdout=subprocess.PIPE,
                            text=True, cwd=ROOT)
    pids = [int(pid) for pid in main.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    main.kill()
    main.communicate()
    wait_for(lambda: not any(map(is_alive, pids)), limit_s=10)


# Bad input

@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("command",
                         ["look" * 2500, "go to \udcff\udcfe", "look\0", "go to\nfridge 1", "", "  ", "{r}",
                                     "#intro#", b"look"], ids=lambda command: repr(command[:20]))
def test_an_invalid_command_has_no_effect(game, command):
    reply = game.reset(kitchen_task())
    assert game.step(command) == reply._replace(observation=NOOP_MESSAGE)
    assert game.step("go to fridge 1").observation == "You arrive at fridge 1. The fridge 1 is closed."


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("message", [m for m, change in BROKEN.items() if isinstance(change, dict)
                                     and isinstance(change.get("pddl_problem"), str)])
def test_broken_pddl_is_refused_by_name_and_the_worker_lives(game, message):
    (process,) = processes(game)
    with pytest.raises(ValueError, match=f"^kitchen.pddl: .*{message}"):
        game.reset(task_of(BROKEN[message]["pddl_problem"]))
    assert processes(game) == [process]
    assert game.reset(kitchen_task()) == Game().reset(kitchen_task())


@pytest.mark.slow
@needs_engine
def test_pddl_that_only_the_engine_refuses_is_named_too(game):
    pddl = kitchen(goal_of(PICK)).replace("agent1 - agent", "")
    Game().reset(task_of(pddl))
    with pytest.raises(ValueError, match="^kitchen.pddl: "):
        game.reset(task_of(pddl))
    assert game.reset(kitchen_task()).admissible


@needs_engine
def test_a_generated_room_is_refused(game):
    with pytest.raises(ValueError,
                       match="--env=alfworld: plays real games only, so needs --games; task L0/3"):
        game.reset(rooms.task("L0", 3))


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(alfworld, "find_spec", lambda name: None)
    with pytest.raises(ValueError,
                       match="--env=alfworld: not installed; pip install -r requirements-alfworld.txt"):
        alfworld.make(2)


@pytest.mark.slow
@needs_engine
def test_a_killed_worker_loses_only_its_own_episodes(make):
    games = make(4)
    task, (process, other) = kitchen_task(), processes(games[0])
    start = replies(games, "reset", [task] * 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for game in games:
        game.send("step", "go to fridge 1")
    for game in games[:2]:
        with pytest.raises(EpisodeLost, match="^its worker died with exit code -9"):
            game.receive()
    assert [game.receive().observation[:21] for game in games[2:]] == ["You arrive at fridge "] * 2
    assert games[0].reset(task) == start[0]
    with pytest.raises(EpisodeLost):                           # the second game was not reset yet
        games[1].step("look")
    assert games[1].reset(task) == start[1]
    assert replies(games, "step", ["go to desk 1"] * 4)[0].observation.startswith("You arrive at desk 1.")
    assert processes(games[0])[0] is not process and processes(games[0])[1] is other
    assert not is_alive(process.pid)


@pytest.mark.slow
@needs_engine
def test_a_worker_that_hangs_while_it_is_sent_to_is_replaced(make):
    (game,) = make(1)
    game.reset(kitchen_task())
    (process,) = processes(game)
    suspend(process.pid)
    with socket.socket(fileno=os.dup(game.worker.pipe.fileno())) as end:
        game.worker.timeout_s = 1
        set_timeout(end, 1)
        with pytest.raises(EpisodeLost, match="no answer for 1 s"):
            game.step("look".ljust(10_000_000))
    assert not is_alive(process.pid)
    assert game.reset(kitchen_task()).admissible


@pytest.mark.slow
@needs_engine
def test_many_long_messages_both_ways_do_not_deadlock(make):
    """They exceed the pipes' buffers: if both sides blocked on a send, neither would continue."""
    games = make(12, 1)
    desc = "x" * 1_000_000
    got = replies(games, "reset", [kitchen_task(desc=f"{k} {desc}") for k in range(12)])
    assert all(reply.observation.endswith(f"Your task is to: {k} {desc}.") for k, reply in enumerate(got))
    assert len(got) == 12


@pytest.mark.slow
@needs_engine
def test_an_answer_that_was_not_received_is_dropped(game):
    game.reset(kitchen_task())
    game.send("step", "inventory")
    assert game.reset(kitchen_task()) == Game().reset(kitchen_task())
    assert game.step("look").observation.startswith("You are in the middle of a room.")


# The command line, versions

def run(*arguments, commands=""):
    return subprocess.run([sys.executable, *arguments], input=commands, cwd=ROOT, text=True,
                          capture_output=True, check=False, errors="surrogateescape")


@pytest.mark.slow
@needs_engine
def test_json_on_the_terminal_equals_households_replies(tmp_path):
    path = write_game(tmp_path / "train/x/y")
    commands = ["go to countertop 2", "take apple 1 from countertop 2", "\udcff", "", "inventory"]
    done = run("-m", "envs.alfworld", "--game", str(path), "--json", commands="\n".join(commands))
    household = Game()
    expected = [household.reset(load_game(path)), *map(household.step, commands)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        json.loads(json.dumps(reply._asdict())) for reply in expected]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@needs_engine
def test_a_game_of_a_folder_is_chosen_by_its_index(tmp_path):
    for trial in ("a", "b"):
        start = {"a": "l1", "b": "l5"}[trial]
        write_game(tmp_path / "valid_seen/pick" / trial, pddl_problem=kitchen(goal_of(PICK), start))
    done = run("-m", "envs.alfworld", "--games", str(tmp_path), "--index", "1", commands="\n".join(WIN))
    assert done.stdout.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are facing the desk 1.")
    assert done.stdout.endswith("\n> You move the apple 1 to the fridge 1.\nYou have won.\n> \n")


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), [
    ((), "expected --game or --games"), (("--game", "nothere"), "nothere: cannot read it"),
    (("--games", "nothere"), "--games=nothere: no such file or folder"),
    (("--colour",), "unrecognized arguments"),
    pytest.param(("--games", str(GAMES), "--index", "140"), "--index=140: valid_seen has games 0 to 139",
                 marks=needs_games),
])
def test_wrong_flags_fail(flags, message):
    done = run("-m", "envs.alfworld", *flags)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@needs_engine
def test_the_versions_equal_those_of_the_requirements_file():
    lines = (ROOT / "requirements-alfworld.txt").read_text().split()
    required = dict(line.split("==") for line in lines if "==" in line)
    assert alfworld.Environment.versions(None) == required
