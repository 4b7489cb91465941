"""ALFWorld's engine behind worker processes: equal to the stock engine and household, and hard to bring down.

    python -m pytest tests/test_alfworld.py             # a minute with alfworld installed; skipped without
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_household
from conftest import is_alive
from test_household import (
    BROKEN,
    GAMES,
    TOUR,
    goal_of,
    kitchen,
    needs_games,
    next_command,
    task_of,
    write_game,
)

from envs import EpisodeLost, alfworld
from envs.alfred import rooms
from envs.alfred.game import Game
from envs.alfred.games import GOALS, load_game, load_games
from envs.alfred.problem import NOTHING

ROOT = Path(__file__).parent.parent
INSTALLED = all(map(find_spec, alfworld.PACKAGES))
needs_engine = pytest.mark.skipif(not INSTALLED,
                                  reason="needs the engine: pip install -r requirements-alfworld.txt")
# stock(pddl, task_desc) starts a game in this process, stock.step goes on
stock = test_household.engine
HEAT, PICK = "pick_heat_then_place_in_recep", "pick_and_place_simple"
WIN = ["go to countertop 2", "take apple 1 from countertop 2", "go to fridge 1", "open fridge 1",
       "move apple 1 to fridge 1"]


def kitchen_task(task_type=PICK, start="l0", desc="put an apple in fridge"):
    return task_of(kitchen(goal_of(task_type), start), desc)


def close(envs):
    for env in envs:
        env.close()


@pytest.fixture
def make():
    """alfworld.make, closed when the test is over."""
    made = []

    def making(*arguments):
        made.append(alfworld.make(*arguments))
        return made[-1]

    yield making
    for envs in made:
        close(envs)


@pytest.fixture(scope="module")
def env():
    """One environment for the tests that leave it in order."""
    (env,) = alfworld.make(1)
    yield env
    env.close()


def replies(envs, verb, arguments):
    """What each environment answers, all of them asked before one is waited for."""
    for env, argument in zip(envs, arguments):
        env.send(verb, argument)
    return [env.receive() for env in envs]


def processes(env):
    return [worker.process for worker in env.pool.workers]


# Against household and the stock engine

@needs_engine
@needs_games
def test_twenty_real_games_at_once_equal_household_under_random_commands(make):
    rng = random.Random(20)
    tasks = rng.sample(load_games(GAMES, "valid_unseen") + load_games(GAMES, "valid_seen"), 20)
    assert {task.task_type for task in tasks} == set(GOALS)
    theirs, ours = make(20), [Game() for _ in tasks]
    want, got = [env.reset(task) for env, task in zip(ours, tasks)], replies(theirs, "reset", tasks)
    seen = [{"look"} for _ in tasks]
    for _ in range(25):
        assert got == want
        for commands, reply in zip(seen, want):
            commands.update(reply.admissible)
        commands = [next_command(reply.admissible, known, rng) for reply, known in zip(want, seen)]
        want = [env.step(command) for env, command in zip(ours, commands)]
        got = replies(theirs, "step", commands)
    assert got == want
    assert [env.task for env in theirs] == tasks       # known after any number of turns


@needs_engine
@needs_games
def test_three_real_games_equal_the_stock_engine(env, stock):
    rng = random.Random(3)
    # small ones, because the stock engine is slow
    small = sorted(load_games(GAMES, "valid_train"), key=lambda task: len(task.problem.pddl))[:60]
    for task in rng.sample(small, 3):
        theirs, ours, seen = stock(task.problem.pddl, task.problem.task_desc), env.reset(task), {"look"}
        for _ in range(6):
            assert ours[:4] == (theirs.feedback, theirs["admissible_commands"], theirs["won"], theirs["won"])
            seen.update(ours.admissible)
            command = next_command(ours.admissible, seen, rng)
            theirs, ours = stock.step(command), env.step(command)


@needs_engine
@pytest.mark.parametrize("task_type", sorted(GOALS))
def test_a_kitchen_of_corner_cases_equals_household(env, task_type):
    """Things in two receptacles, cold from the start, sliced, hot and clean; then random commands."""
    rng, ours = random.Random(task_type), Game()
    task = task_of(kitchen(goal_of(task_type, receptacle="CounterTop"), "l2" if task_type == PICK else "l0"))
    want, got, seen, won = ours.reset(task), env.reset(task), {"look"}, False
    for turn in range(len(TOUR) + 60):
        assert got == want
        seen.update(want.admissible)
        won |= want.won
        command = TOUR[turn] if turn < len(TOUR) else next_command(want.admissible, seen, rng)
        want, got = ours.step(command), env.step(command)
    assert won


@needs_engine
def test_neighbours_order_and_workers_change_nothing(make):
    """Every slot has its own game: in a textworld batch of wrapper instances all would be the last one."""
    tasks = [kitchen_task(task_type, start, f"{task_type} from {start}")
             for task_type in (PICK, HEAT) for start in ("l0", "l2", "l5")]
    places = ["desk 1", "fridge 1", "countertop 1", "sinkbasin 1", "microwave 1", "countertop 2"]
    walks = [["look", f"go to {place}", "look", *TOUR[k:k + 4]] for k, place in enumerate(places)]
    (one,), three, six = make(1), make(6, 3), make(6, 1)
    alone = [[one.reset(task), *map(one.step, walk)] for task, walk in zip(tasks, walks)]
    together = [replies(three, "reset", tasks),
                *[replies(three, "step", commands) for commands in zip(*walks)]]
    backwards = [replies(six, "reset", tasks[::-1]),
                 *[replies(six, "step", commands) for commands in zip(*walks[::-1])]]
    assert alone == [list(row) for row in zip(*together)] == [list(row) for row in zip(*backwards)][::-1]
    assert len({row[0].observation for row in alone}) == 6
    assert [len(processes(envs[0])) for envs in ([one], three, six)] == [1, 3, 1]


@needs_engine
def test_the_quirks_of_the_engine(env):
    first = env.reset(kitchen_task())
    assert first.observation.endswith("\n\nYour task is to: put an apple in fridge.")
    assert env.step("look").observation.endswith("of a room. Looking quickly around you, you see nothing.")
    assert env.step("Look").observation == NOTHING
    assert env.step(" go to fridge 1 \n").observation == "You arrive at fridge 1. The fridge 1 is closed."
    env.reset(kitchen_task())
    assert [env.step(command).won for command in WIN] == [False] * 4 + [True]
    assert env.step("look").done                               # a won game is played on, and stays won
    assert not env.reset(kitchen_task()).won


@pytest.mark.fast
@needs_engine
@pytest.mark.parametrize("desc", ["put {o} in #task#", 'say "so" [\\n]', "x" * 300_000])
def test_a_tasks_text_is_taken_word_for_word(env, desc):
    """The stock engine would read it as a part of its grammar, in JSON."""
    task = kitchen_task(desc=desc)
    assert env.reset(task) == Game().reset(task)


# What the engine keeps, and what it leaves

def library_maps(env):
    maps = Path(f"/proc/{processes(env)[0].pid}/maps").read_text()
    return sum("libdownward" in line for line in maps.splitlines())


@needs_engine
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no /proc here, which says what a process has loaded")
def test_a_hundred_loads_use_one_copy_of_the_library_per_environment(make):
    arguments = sys.argv[:]
    envs = make(3, 1)
    tasks = [kitchen_task(task_type) for task_type in sorted(GOALS)]
    replies(envs, "reset", tasks)
    maps = library_maps(envs[0])
    for k in range(34):
        replies(envs, "reset", [tasks[k % 6]] * 3)
    assert library_maps(envs[0]) == maps > 0
    assert sys.argv == arguments                               # the engine's translator overwrites it


@needs_engine
def test_a_group_is_translated_once_its_library_copies_are_small_and_old_games_are_forgotten():
    """In a process of its own: what a worker changes in the engine's modules is not for the stock engine
    here."""
    script = """if True:
        import os, fast_downward, mementos.core
        from test_alfworld import PICK, goal_of, kitchen, kitchen_task, task_of
        from envs import alfworld
        calls, stock = [], fast_downward.pddl2sas
        fast_downward.pddl2sas = lambda *a, **k: calls.append(k.get("optimize", False)) or stock(*a, **k)
        logic = alfworld.prepare()
        for _ in range(8):
            alfworld.Engine(logic).reset(kitchen_task().problem)
        print(calls, os.stat(fast_downward.interface.DOWNWARD_LIB_PATH).st_size < 4_000_000)
        kept = mementos.core._memento_cache
        one, engine = len(kept), alfworld.Engine(logic)
        for k in range(5):
            engine.reset(task_of(kitchen(goal_of(PICK)).replace("bar_2", f"bar_2{k}")).problem)
        print(0 < len(kept) < 1.2 * one, len(calls))"""
    done = run("-c", script, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    assert done.stdout == "[False] True\nTrue 6\n", done.stderr


@needs_engine
def test_the_last_environment_closed_ends_the_workers_and_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    envs = alfworld.make(4)
    workers = processes(envs[0])
    replies(envs, "reset", [kitchen_task()] * 4)
    for env in envs[:3] * 2:                                   # closing twice is closing once
        env.close()
    assert envs[3].step("look").admissible and [w.poll() for w in workers] == [None, None]
    envs[3].close()
    assert [worker.returncode for worker in workers] == [0, 0]
    assert list(tmp_path.iterdir()) == []


@needs_engine
def test_workers_end_with_a_player_who_is_killed():
    script = """if True:
        from test_alfworld import kitchen_task, processes, replies
        from envs import alfworld
        envs = alfworld.make(2)
        replies(envs, "reset", [kitchen_task()] * 2)
        print(*[p.pid for p in processes(envs[0])], flush=True)
        envs[0].receive()"""
    player = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                              env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"})
    pids = [int(pid) for pid in player.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    player.kill()
    player.communicate()
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


# Bad input

@pytest.mark.fast
@needs_engine
@pytest.mark.parametrize("command",
                         ["look" * 2500, "go to \udcff\udcfe", "look\0", "go to\nfridge 1", "", "  ", "{r}",
                                     "#intro#", b"look"], ids=lambda command: repr(command[:20]))
def test_what_is_no_command_changes_nothing(env, command):
    reply = env.reset(kitchen_task())
    assert env.step(command) == reply._replace(observation=NOTHING)
    assert env.step("go to fridge 1").observation == "You arrive at fridge 1. The fridge 1 is closed."


@pytest.mark.fast
@needs_engine
@pytest.mark.parametrize("message", [m for m, change in BROKEN.items() if isinstance(change, dict)
                                     and isinstance(change.get("pddl_problem"), str)])
def test_broken_pddl_is_refused_with_its_name_and_the_worker_lives(env, message):
    (process,) = processes(env)
    with pytest.raises(ValueError, match=f"^kitchen.pddl: .*{message}"):
        env.reset(task_of(BROKEN[message]["pddl_problem"]))
    assert processes(env) == [process]
    assert env.reset(kitchen_task()) == Game().reset(kitchen_task())


@pytest.mark.fast
@needs_engine
def test_pddl_that_only_the_engine_refuses_is_named_too(env):
    pddl = kitchen(goal_of(PICK)).replace("agent1 - agent", "")
    Game().reset(task_of(pddl))
    with pytest.raises(ValueError, match="^kitchen.pddl: "):
        env.reset(task_of(pddl))
    assert env.reset(kitchen_task()).admissible


@pytest.mark.fast
@needs_engine
def test_a_generated_room_is_refused(env):
    with pytest.raises(ValueError,
                       match="--env=alfworld: plays real games only, so needs --games; task L0/3"):
        env.reset(rooms.task("L0", 3))


@pytest.mark.fast
def test_without_the_package_it_says_what_installs_it(monkeypatch):
    monkeypatch.setattr(alfworld, "find_spec", lambda name: None)
    with pytest.raises(ValueError,
                       match="--env=alfworld: not installed; pip install -r requirements-alfworld.txt"):
        alfworld.make(2)


@needs_engine
def test_a_killed_worker_loses_its_episodes_and_no_others(make):
    envs = make(4)
    task, (process, other) = kitchen_task(), processes(envs[0])
    start = replies(envs, "reset", [task] * 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for env in envs:
        env.send("step", "go to fridge 1")
    for env in envs[:2]:
        with pytest.raises(EpisodeLost, match="task kitchen: its worker died with exit code -9"):
            env.receive()
    assert [env.receive().observation[:21] for env in envs[2:]] == ["You arrive at fridge "] * 2
    assert envs[0].reset(task) == start[0]
    with pytest.raises(EpisodeLost):                           # the other episode is on no worker yet
        envs[1].step("look")
    assert envs[1].reset(task) == start[1]
    assert replies(envs, "step", ["go to desk 1"] * 4)[0].observation.startswith("You arrive at desk 1.")
    assert processes(envs[0])[0] is not process and processes(envs[0])[1] is other
    assert not is_alive(process.pid)


@needs_engine
def test_a_worker_killed_while_it_plays_is_noticed(make):
    (env,) = make(1)
    env.reset(kitchen_task())
    os.kill(processes(env)[0].pid, signal.SIGSTOP)
    env.send("step", "look")
    processes(env)[0].kill()
    with pytest.raises(EpisodeLost, match="exit code -9"):
        env.receive()
    assert env.reset(kitchen_task()).admissible


@needs_engine
@pytest.mark.parametrize("length", [4, 10_000_000], ids=["no answer", "no end of the sending"])
def test_a_worker_that_hangs_is_replaced(make, monkeypatch, length):
    (env,) = make(1)
    env.reset(kitchen_task())
    (process,) = processes(env)
    os.kill(process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch, socket.socket(fileno=os.dup(env.worker.pipe.fileno())) as end:
        patch.setattr(alfworld, "LIMIT_S", 1)
        alfworld.limit_waits(end)
        with pytest.raises(EpisodeLost, match="no answer for 1 s"):
            env.step("look".ljust(length))
    assert not is_alive(process.pid)
    assert env.reset(kitchen_task()).admissible


@needs_engine
def test_many_long_messages_both_ways_do_not_wait_for_each_other(make):
    """Neither pipe holds them: a player who sends while the worker waits to answer would wait for ever."""
    envs = make(12, 1)
    desc = "x" * 1_000_000
    got = replies(envs, "reset", [kitchen_task(desc=f"{k} {desc}") for k in range(12)])
    assert all(reply.observation.endswith(f"Your task is to: {k} {desc}.") for k, reply in enumerate(got))
    assert len(got) == 12


@pytest.mark.fast
@needs_engine
def test_an_answer_nobody_waited_for_is_not_taken_for_a_later_one(env):
    env.reset(kitchen_task())
    env.send("step", "inventory")
    assert env.reset(kitchen_task()) == Game().reset(kitchen_task())
    assert env.step("look").observation.startswith("You are in the middle of a room.")


# The command line, versions

def run(*arguments, commands="", env=None):
    return subprocess.run([sys.executable, *arguments], input=commands, cwd=ROOT, text=True,
                          capture_output=True, check=False, env=os.environ | (env or {}),
                          errors="surrogateescape")


@needs_engine
def test_json_on_the_terminal_is_what_household_answers(tmp_path):
    path = write_game(tmp_path / "train/x/y")
    commands = ["go to countertop 2", "take apple 1 from countertop 2", "\udcff", "", "inventory"]
    done = run("-m", "envs.alfworld", "--game", str(path), "--json", commands="\n".join(commands))
    household = Game()
    wanted = [household.reset(load_game(path)), *map(household.step, commands)]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        json.loads(json.dumps(reply._asdict())) for reply in wanted]
    assert (done.returncode, done.stderr) == (0, "")


@needs_engine
def test_a_game_of_a_folder_is_played_by_number(tmp_path):
    for trial in ("a", "b"):
        start = {"a": "l1", "b": "l5"}[trial]
        write_game(tmp_path / "valid_seen/pick" / trial, pddl_problem=kitchen(goal_of(PICK), start))
    done = run("-m", "envs.alfworld", "--games", str(tmp_path), "--index", "1", commands="\n".join(WIN))
    assert done.stdout.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are facing the desk 1.")
    assert done.stdout.endswith("\n> You move the apple 1 to the fridge 1.\nYou have won.\n> \n")


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


@pytest.mark.fast
@needs_engine
def test_the_versions_are_those_of_the_requirements_file():
    lines = (ROOT / "requirements-alfworld.txt").read_text().split()
    required = dict(line.split("==") for line in lines if "==" in line)
    assert alfworld.versions() == required
