"""Proves that a plug-in's mistake is one line: which plug-in, where, what came and what was expected.

    python -m pytest tests/core/test_plugin_mistakes.py
"""

import copy
import inspect
import math
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Corridor
from hand_made import make_episode
from tiny_runs import rows

import algorithms
import config
import envs
import evaluation
import gcd
import labels
import models
import rollout
from envs import Demonstration, EpisodeLost, Reply, Task, _checks
from infra import files, plugins, signals
from infra.plugins import PluginError
from infra.signals import Stop, time_limit
from lm.chat import Chat

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GUESS, OPO = ((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in ("guess", "opo"))
TINY = ("--device cpu --hidden-size 16 --layers 1 --max-turns 3 --tasks 2 --group-size 2 --iterations 1 "
        "--minibatches 1 --context 256 --demonstrations 0 --no-gcd --evaluate none "
        "--admissible-only").split()         # a model without training gives no command otherwise


# What a game answers

NUMBER, BOOL = "expected a number from -100 to 100, or None", "expected True or False, Python's own"
REWARD = "expected a Python number, of at most 1e+09 either way"
WRONG_REPLIES = [
    (None, "it returned None; expected a Reply"), (("a room", [], False, False), "expected a Reply"),
    ("a room", "it returned 'a room'; expected a Reply"),
    (Reply(None, [], False, False), "observation is None; expected text"),
    (Reply(b"a", [], False, False), "observation is b'a'; expected text"),
    (Reply(3, [], False, False), "observation is 3; expected text"),
    (Reply("a", None, False, False), "admissible is None; expected a list of texts"),
    (Reply("a", "look", False, False), "admissible is 'look'; expected a list of texts"),
    (Reply("a", ["look", 3], False, False), "expected a list of texts"),
    (Reply("a", [], math.nan, False), f"won is nan; {BOOL}"),
    (Reply("a", [], "yes", False), f"won is 'yes'; {BOOL}"),
    (Reply("a", [], None, False), f"won is None; {BOOL}"),
    (Reply("a", [], False, 1), f"done is 1; {BOOL}"),
    (Reply("a", [], False, False, objects="cup"), "objects is 'cup'; expected a tuple of texts"),
    (Reply("a", [], False, False, score_100=math.nan), f"score_100 is nan; {NUMBER}"),
    (Reply("a", [], False, False, score_100=math.inf), f"score_100 is inf; {NUMBER}"),
    (Reply("a", [], False, False, score_100="9"), f"score_100 is '9'; {NUMBER}"),
    (Reply("a", [], np.True_, False), f"won is np.True_; {BOOL}"),
    (Reply("a", reward=np.float32(0.5)), f"reward is np.float32(0.5); {REWARD}"),
    (Reply("a", reward=math.nan), f"reward is nan; {REWARD}"),
    (Reply("a", reward=-1e10), f"reward is -10000000000.0; {REWARD}"),
    (Reply("a", [], False, False, taken="no"), "taken is 'no'; expected True, False or None")]


class Faulty(Corridor):
    """A corridor that answers turn `at` (0: the reset) with `answer`, or raises it."""

    def __init__(self, answer, at):
        super().__init__()
        self.answer, self.left = answer, at

    def reset(self, task, seed=0):
        return self.faulty(super().reset(task, seed))

    def step(self, command):
        return self.faulty(super().step(command))

    def faulty(self, reply):
        self.left -= 1
        if self.left >= 0:
            return reply
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def played(tokenizer, game):
    """A conversation of three turns."""
    chat = Chat(tokenizer, "plain")
    spec = rollout.EpisodeSpec(Task("train/7", "train", "walk", (2, 4)), 0, 1)
    conversation = rollout.Conversation(spec, game, chat, 0).start()
    for _ in range(3):
        ids = chat.respond("left")
        conversation.act(rollout.Response(ids, [0.0] * len(ids), False), 9, 400)


@pytest.mark.parametrize("at, place", [(0, "task train/7, reset"), (2, "task train/7, turn 2")])
@pytest.mark.parametrize("reply, expected", WRONG_REPLIES)
def test_a_wrong_reply_is_refused_with_task_and_turn(tokenizer, reply, expected, at, place):
    with pytest.raises(PluginError) as refused:
        played(tokenizer, Faulty(reply, at))
    text = str(refused.value)
    assert text.startswith(f"{__file__}: {place}: ") and text.endswith(expected)


def test_a_game_that_is_done_at_its_reset_is_refused(tokenizer):
    with pytest.raises(PluginError, match="task train/7, reset: done is True; expected False before the"):
        played(tokenizer, Faulty(Reply("It is over.", [], True, True), 0))


def test_right_replies_are_accepted(tokenizer):
    played(tokenizer, Faulty(None, 99))
    assert _checks.wrong_reply(Reply("", (), True, True, [], 100, True)) == ""
    assert _checks.wrong_reply(Reply("x", ["a"], False, False, ("b",), -100.0, None)) == ""


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), SystemExit(), EpisodeLost("died")])
def test_a_games_own_error_is_noted_with_task_and_turn(tokenizer, error):
    with pytest.raises(type(error)) as raised:
        played(tokenizer, Faulty(error, 1))
    assert raised.value.__notes__ == ["task train/7, turn 1"]


# A time limit

class Hanging(Corridor):
    """A corridor whose second step never ends, unless it is interrupted."""

    time_limit_s = 0.2

    def step(self, command):
        self.steps = getattr(self, "steps", 0) + 1
        while self.steps == 2:
            time.sleep(0.01)
        return super().step(command)


@pytest.mark.slow
def test_a_game_with_a_time_limit_that_hangs_loses_its_episode(tokenizer):
    with pytest.raises(EpisodeLost, match="no answer within 0.2 s"):
        played(tokenizer, Hanging())


@pytest.mark.slow
def test_an_experts_calls_of_a_game_with_a_time_limit_are_limited_too():
    game = rollout.limited(Hanging())
    assert game.reset(Task("train/7", "train", "walk", (2, 4))).observation and game.place == 2
    game.step("left")
    with pytest.raises(EpisodeLost, match="no answer within 0.2 s"):
        game.step("left")
    free = Corridor()
    assert rollout.limited(free) is free


@pytest.mark.slow
def test_a_game_with_a_time_limit_takes_named_arguments_and_can_be_copied():
    """As an expert may that plans ahead."""
    game = rollout.limited(Hanging())
    assert game.reset(task=Task("train/7", "train", "walk", (2, 4)), seed=3).observation
    ahead = copy.deepcopy(game)
    ahead.step("left")
    assert ahead.game is not game.game and ahead.steps == 1 and not hasattr(game, "steps")
    with pytest.raises(EpisodeLost, match="no answer within 0.2 s"):
        ahead.step("left")


class Mailing(Hanging):
    """A game with a method of its own named `send`."""

    def send(self, to, text):
        raise AssertionError("no call of the run's")


@pytest.mark.slow
def test_a_game_of_this_process_may_have_a_method_named_send(tokenizer):
    with pytest.raises(EpisodeLost, match="no answer within 0.2 s"):
        played(tokenizer, Mailing())


class Templates(Corridor):
    """Lists templates, and does not say whether a command was taken."""

    taken = None

    def step(self, command):
        return super().step(command)._replace(admissible=["go OBJ"], objects=("left",), taken=self.taken)


@pytest.mark.parametrize("taken, valid", [(None, True), (True, True), (False, False)])
def test_where_templates_are_listed_a_command_is_valid_unless_it_was_not_taken(tokenizer, taken, valid):
    game, chat = Templates(), Chat(tokenizer, "plain")
    game.taken = taken
    spec = rollout.EpisodeSpec(Task("train/7", "train", "walk", (2, 4)), 0, 1)
    conversation = rollout.Conversation(spec, game, chat, 0).start()
    for _ in range(2):
        ids = chat.respond("left")
        conversation.act(rollout.Response(ids, [0.0] * len(ids), False), 9, 400)
    assert conversation.episode.turns[1].valid is valid


def test_an_alarm_just_after_the_block_leaves_no_alarm_behind():
    """It strikes after the last line of the block, before the alarm is switched off."""
    lines, first = inspect.getsourcelines(time_limit)
    last = first + next(i for i, line in enumerate(lines) if "inside = False" in line)

    def strike(frame, event, argument):
        if frame.f_code is time_limit.__wrapped__.__code__:
            if event == "line" and frame.f_lineno == last:
                signal.raise_signal(signal.SIGALRM)
            return strike

    before, tracing = signal.getsignal(signal.SIGALRM), sys.gettrace()
    try:
        with pytest.raises(EpisodeLost), time_limit(60, EpisodeLost("late")):
            sys.settrace(strike)
    finally:
        sys.settrace(tracing)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0) and signal.getsignal(signal.SIGALRM) is before


@pytest.mark.slow
def test_in_another_thread_there_is_no_time_limit(tokenizer):
    game = Hanging()
    game.steps = 2                                          # it no longer hangs
    with ThreadPoolExecutor(1) as pool:
        pool.submit(played, tokenizer, game).result()
    assert game.steps == 5


@pytest.mark.slow
def test_a_time_limit_is_raised_again_if_it_is_swallowed_and_is_gone_afterwards(monkeypatch):
    monkeypatch.setattr(signals, "AGAIN_S", 0.4)
    began, swallowed = time.monotonic(), []
    with pytest.raises(EpisodeLost):
        with time_limit(0.05, EpisodeLost("late")):
            try:
                time.sleep(60)
            except EpisodeLost as error:
                swallowed.append(error)
            time.sleep(60)
    assert len(swallowed) == 1 and time.monotonic() - began < 30
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


# What an algorithm writes, and what it keeps

LINEAR = torch.nn.Linear(2, 2)
ADAM = torch.optim.Adam(LINEAR.parameters())

TURNS = [("left", "A room.", None, 3), ("right", "Another room.", None, 3)]


def credited(assign, change=lambda episodes: None, state=None, critic=None):
    """Call `assign_checked` of a method whose `assign` is this function on two episodes of two turns. It also
    changes the list of episodes, and has this state and critic.
    """
    class Method(algorithms.Method):
        def assign(self, episodes):
            change(episodes)
            self.state = {} if state is None else state
            return assign([turn for e in episodes for turn in e.turns])

    method = Method(algorithms.Method.Settings())
    method.critic = critic
    return method.assign_checked([make_episode(TURNS, won=True), make_episode(TURNS)])


def writes(name, value):
    """An `assign` that writes an attribute of the second turn, and returns no metrics."""
    def assign(turns):
        setattr(turns[1], name, value)
        return {}

    return assign


THREE = "expected a list of 3 numbers, or None"


@pytest.mark.parametrize("name, value, expected", [
    ("advantage", math.nan, "its advantage is nan; expected a finite number"),
    ("advantage", None, "its advantage is None; expected a finite number"),
    ("advantage", [1.0], r"its advantage is \[1.0\]; expected a finite number"),
    ("token_advantage", [1.0] * 6, THREE),
    ("token_advantage", [1.0] * 2, r"its token_advantage is \[1.0, 1.0\]; " + THREE),
    ("token_advantage", 1.0, "its token_advantage is 1.0; " + THREE),
    ("token_advantage", [1.0, math.inf, 0.0], "its token_advantage has inf; expected finite numbers"),
    ("logprob_old", None, "its logprob_old is None; expected a list of 3 numbers"),
    ("logprob_old", [-1.0] * 2, r"its logprob_old is \[-1.0, -1.0\]; expected a list of 3 numbers")])
def test_a_wrong_advantage_is_refused_with_task_and_turn(name, value, expected):
    with pytest.raises(PluginError, match=f"task .*, turn 2: .*{expected}"):
        credited(writes(name, value))


@pytest.mark.parametrize("metrics, expected", [
    (None, "it returned None; expected a dict of metrics, {} for none"), ([], "it returned []; expected a"),
    ({"phase": 1.0}, "its metric is named 'phase'; expected \"group/name\""),
    ({"iteration": 7}, "its metric is named 'iteration'"), ({3: 1.0}, "its metric is named 3"),
    ({"policy/loss": 1.0}, "its metric is named 'policy/loss'; expected \"group/name\", the group none of"),
    ({"own/x": None}, "its metric own/x is None; expected a number"),
    ({"own/x": [1.0]}, "its metric own/x is [1.0]"), ({"own/x": True}, "its metric own/x is True")])
def test_wrong_metrics_are_refused(metrics, expected):
    with pytest.raises(PluginError) as refused:
        credited(lambda turns: metrics)
    assert "assign: " + expected in str(refused.value)


def test_right_advantages_and_metrics_are_accepted():
    assert math.isnan(credited(lambda turns: {"own/x": math.nan, "own/y": 2})["own/x"])
    credited(writes("token_advantage", [1, 0.5, 0.0]))


def test_an_algorithm_may_add_episodes_but_must_leave_one():
    credited(lambda turns: {}, lambda episodes: episodes.append(make_episode(TURNS)))
    with pytest.raises(PluginError, match="assign: it left no episode; expected at least one"):
        credited(lambda turns: {}, list.clear)


KINDS = "expected a number of Python's own, a text, bytes, a tensor, a list, or a dict with texts or numbers"


@pytest.mark.parametrize("state, expected", [
    ([1], "its state is [1]; expected a dict"), ({"x": {1, 2}}, f"its state['x'] is {{1, 2}}; {KINDS}"),
    ({"x": [1, [torch.float32]]}, "its state['x'][1][0] is torch.float32"),
    ({"x": {(1, 2): 3}}, "its state['x'] is {(1, 2): 3}"), ({"n": np.float64(2)}, "its state['n'] is"),
    ({"r": Reply("a", [])}, "its state['r'] is Reply(")])
def test_a_state_that_could_not_be_read_again_is_refused(state, expected):
    with pytest.raises(PluginError) as refused:
        credited(lambda turns: {}, state=state)
    assert f"assign: {expected}" in str(refused.value)


@pytest.mark.parametrize("kind, key", [(torch.optim.Adafactor, "row_var"), (torch.optim.LBFGS, "func_evals"),
                                       (torch.optim.SGD, None), (torch.optim.AdamW, None)])
def test_a_critics_optimizer_that_could_not_be_restored_is_refused(kind, key):
    """In the first iteration, before anything is saved."""
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters())

    def loss():
        optimizer.zero_grad()
        (found := model(torch.ones(1, 3)).square().sum()).backward()
        return found

    def learned(turns):
        optimizer.step(loss)
        return {}

    if key is None:
        credited(learned, critic=(model, optimizer))
        return
    with pytest.raises(PluginError, match=f"critic: its optimizer {kind.__name__} has {key} "):
        credited(learned, critic=(model, optimizer))


def test_a_state_that_is_accepted_is_read_again(tmp_path):
    state = {"n": 1, 2: None, "t": {"u": torch.eye(2)},
             "x": [0.5, True, "a", b"\0\xff", (1, [torch.arange(3)])]}
    credited(lambda turns: {}, state=state)
    torch.save(state, tmp_path / "state.pt")
    assert str(torch.load(tmp_path / "state.pt", weights_only=True)) == str(state)


@pytest.mark.parametrize("trains, critic, expected", [
    (True, None, "trains_critic is True, and critic is None"),
    (False, (LINEAR, ADAM), "trains_critic is False, and critic is (Linear"),
    (True, LINEAR, "critic is Linear(in_features=2, out_features=2, bias=True); expected (torch.nn.Module, "),
    (True, (LINEAR,), "critic is (Linear"), (True, (ADAM, LINEAR), "critic is (Adam"),
    (True, (torch.nn.Linear(2, 2), ADAM), "the critic's optimizer has a parameter that is not the critic's"),
    (True, (LINEAR, ADAM), "")])
def test_a_critic_that_could_not_be_saved_is_refused_when_rl_begins(trains, critic, expected):
    class Method(algorithms.Method):
        trains_critic = trains

        def begin(self, *arguments):
            super().begin(*arguments)
            self.critic = critic

    method = Method(algorithms.Method.Settings())
    if not expected:
        method.begin_checked(None, None, 1, None)
        return
    with pytest.raises(PluginError) as refused:
        method.begin_checked(None, None, 1, None)
    assert f"begin: {expected}" in str(refused.value)


# What else an environment returns

@pytest.mark.parametrize("given", [None, ["good"], ["good", "fine"], "ab", [True, False]])
def test_wrong_labels_are_refused(given):
    class Judging(envs.Environment):
        oracle = staticmethod(lambda observations, commands: given)
        labels = {"own": lambda episode: given}

    for kind in ("oracle", "own"):
        with pytest.raises(PluginError, match='expected a list of 2, each "good", "bad" or None'):
            labels.label_turns(make_episode(TURNS), kind, Judging())


@pytest.mark.parametrize("demonstration, expected", [
    (None, "expected a Demonstration"),
    (Demonstration([], ["x"], [False]), "1 commands, 0 replies, 1 mistakes"),
    (Demonstration([None, None], ["x"], [False]), "reply 0: it returned None; expected a Reply"),
    (Demonstration([Reply("a", [], True, True)], [], []), "reply 0: done is True; expected False"),
    (Demonstration([Reply("a", [], False, False)], [], [True]), "0 commands, 1 replies, 1 mistakes"),
    (Demonstration([Reply("a", [], True, False)], [], []), "it is won without a command"),
    (Demonstration([Reply("a"), Reply("b", [], True, True), Reply("c", [], True, True)], ["x", "y"],
                   [False, False]), "reply 1 is done, and 1 commands follow; expected none"),
    (Demonstration([Reply("a", [], False, False)], [], None), "mistakes is None; expected a list"),
    (Demonstration(iter([]), [], []), "expected a list")])
def test_a_wrong_demonstration_is_described(demonstration, expected):
    assert expected in _checks.wrong_demonstration(demonstration)


def test_wrong_tasks_are_described():
    task = Task("a", "train", "walk", None)
    assert _checks.wrong_tasks([task]) == _checks.wrong_tasks([task], 1) == _checks.wrong_tasks([], 0) == ""
    for tasks, n in ((None, None), ([], None), ([task], 2), (["a"], 1), ("ab", 2)):
        assert "expected a list of" in _checks.wrong_tasks(tasks, n)
    for names in ((1, "train", "walk"), ("a", None, "walk"), ("a", "train", 3)):
        assert "expected text in id, split and task_type" in _checks.wrong_tasks([task, Task(*names, None)])


# Through the command

def fails(folder, capsys, flag, text, *more):
    """Run gcd.py with a plug-in of this text; return its one line. The trace is in OUT/traceback.txt."""
    path = folder / f"{'mine' if flag == '--env' else 'own'}.py"
    path.write_text(text, encoding="utf-8")
    given = {"--env": EXAMPLES / "guess.py", "--algo": "grpo", flag: path}
    flags = [part for pair in given.items() for part in pair]
    with Stop.restored():
        status = gcd.main([*TINY, "--out", str(folder / "out"), *map(str, flags), *map(str, more)])
    lines = capsys.readouterr().err.splitlines(keepends=True)
    error = "".join(line for line in lines if not line.startswith("RL: in iteration"))    # it may win nothing
    assert status == 1 and error.count("\n") == 1 and "Traceback" not in error, error
    assert "Traceback" in (folder / "out" / "traceback.txt").read_text(encoding="utf-8")
    start = f"gcd.py: error: {flag}={path}: "
    assert error.startswith(start), error
    assert error.endswith(f" (traceback in {folder / 'out'}/traceback.txt)\n"), error
    return error.removeprefix(start)


STEP, RESET = "    def step(self, command):\n", "    def reset(self, task, seed=0):\n"
MAKE, TASKS = "    def make(self, n):\n", "    def train_tasks(self, types, start, n):\n"
WORDS, SHOW = "        numbers = [str(n)", "        rng, replies"
REMOTE = """    def send(self, method, *given):
        self.sent = method, given

    def receive(self):
        return next(iter(())) if self.sent[0] == "step" else self.reset(*self.sent[1])

"""
END = "        return {}\n"                                # of OPO's assign


def changed(text, old, new):
    """The text with one place replaced."""
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("old, new, expected", [
    (STEP, STEP + "        1 / 0\n", ", in step: ZeroDivisionError: division by zero (task train/"),
    (STEP, STEP + "        int('x')\n", ", in step: ValueError: invalid literal for int()"),
    (STEP, STEP + "        raise SystemExit\n", ", in step: SystemExit (task train/"),
    (STEP, STEP + "        import asyncio\n        raise asyncio.CancelledError('late')\n",
     ", in step: CancelledError: late (task train/"),
    (RESET, RESET + "        {}[task.id]\n", ", in reset: KeyError: "),
    ("won=n == self.secret", "won=float('nan')", ": won is nan; expected True or False"),
    (MAKE, MAKE + "        1 / 0\n", ", in make: ZeroDivisionError"),
    (MAKE, "    def parse(self, text):\n        int('x')\n\n" + MAKE, ", in parse: ValueError: invalid"),
    (MAKE, MAKE + "        return [self]\n", "make(4): it returned [<"),
    ("    def close(self):", "    def _close(self):", "of class Game, which has no method close"),
    (MAKE, MAKE + "        return [Game(9)] * n\n", "make(4): it returned a game more than once"),
    (RESET, "    def reset(self, task):\n", "make(4): reset(task); expected reset(task, seed)"),
    ("from 1 to {len", "{random.random()} from 1 to {len", ", reset: another first observation than"),
    (WORDS, "        return [3]\n" + WORDS, "vocabulary: it returned [3]"),
    (WORDS, "        return ['\u00e9']\n" + WORDS, "vocabulary: it has '\u00e9'; expected nonempty ASCII"),
    ("for i in range(start, start + n)]", "for i in range(n // 2)]", "train_tasks('part', 0, 1): it"),
    ("for i in range(start, start + n)]", "for i in range(start, min(start + n, 1))]",
     "train_tasks('part', 1, 1): it returned []"),                        # the second task of RL's two
    (STEP, REMOTE + STEP, ", in receive: StopIteration (task train/"),
    (MAKE, MAKE + "        Game.time_limit_s = 0\n", "make(4): it returned games whose time_limit_s is 0"),
    (TASKS, TASKS + "        {}['x']\n", ", in train_tasks: KeyError: 'x'")])
def test_an_environments_mistake_is_one_line(tmp_path, capsys, old, new, expected):
    line = fails(tmp_path, capsys, "--env", changed(GUESS, old, new))
    assert expected in line and line.startswith(("task train/", "line ", "make(", "train_tasks(", "vocab"))


@pytest.mark.slow
def test_tasks_of_all_rounds_of_refill_are_asked_for_at_once(tmp_path, capsys):
    text = changed(GUESS, "for i in range(start, start + n)]", "for i in range(start, min(start + n, 5000))]")
    line = fails(tmp_path, capsys, "--env", text, "--dynamic-sampling", "refill")
    assert line.startswith("train_tasks('part', 3000001, 1): it returned []")


@pytest.mark.slow
def test_a_game_may_change_the_working_directory_and_leave_threads(tmp_path, monkeypatch, capsys):
    """A run writes where it began; what the process still waits for is said."""
    waits = ("import os, threading\nEVENT = threading.Event()\n"
             "LATER = threading.Thread(target=EVENT.wait, name='later')\n")
    leaves = "        os.chdir('/')\n        if not LATER.is_alive():\n            LATER.start()\n"
    text = changed(changed(GUESS, STEP, STEP + leaves), RESET, RESET + "        os.chdir('/')\n")
    (tmp_path / "mine.py").write_text(waits + text, encoding="utf-8")
    evaluates = ["--evaluate", "test", "--protocol", "sampled", "--evaluate-tasks", "2"]
    monkeypatch.chdir(tmp_path)
    with Stop.restored():
        assert gcd.main([*TINY, "--env", "mine.py", "--out", "runs/out", *evaluates]) == 0
        assert Path.cwd() != tmp_path
        monkeypatch.chdir(tmp_path)
        flags = [*evaluates[2:], "--out", "runs/evaluated"]
        assert evaluation.main(["--player", "runs/out/checkpoint", "--env", "mine.py", *flags]) == 0
        monkeypatch.chdir(tmp_path)
        given = dict(env="mine.py", iterations=1, demonstrations=0, tasks=2, group_size=2, evaluate="none")
        assert gcd.train(**given, gcd=False, out="runs/trained").model and Path.cwd() == tmp_path
    assert len(files.read_lines(tmp_path / "runs" / "evaluated" / "episodes.jsonl")[0]) > 1
    game = next(module for name, module in sys.modules.items() if name.endswith("_mine") and
                hasattr(module, "LATER") and module.LATER.is_alive())
    game.EVENT.set()
    game.LATER.join()
    assert rows(tmp_path / "runs" / "out") and (tmp_path / "runs" / "out" / "checkpoint").is_dir()
    assert "waits for threads that are no daemons, as a game's may be: later" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mistake_in_a_file_that_the_plug_in_imports_names_that_file(tmp_path, capsys):
    """Also a ValueError, which is no message for the user there."""
    (tmp_path / "neighbour_of_mine.py").write_text("def fail():\n    int('x')\n", encoding="utf-8")
    imports = STEP + "        import neighbour_of_mine\n        neighbour_of_mine.fail()\n"
    line = fails(tmp_path, capsys, "--env", changed(GUESS, STEP, imports))
    assert line.startswith("neighbour_of_mine.py, line 2, in fail: ValueError: invalid literal for int()")
    assert "(task train/" in line


@pytest.mark.slow
@pytest.mark.parametrize("old, new, expected", [
    (SHOW, "        {}['x']\n" + SHOW, "KeyError: 'x' (expert.show, task "),
    ("seed, mistake_rate, max_turns):", "seed, mistake_rate):", "show(task, seed, mistake_rate); expected"),
    ("    restarts = 0", "    _restarts = 0", "expert of class Expert, which has no number `restarts`"),
    ("        return Expert(games[0])", "        pass", "of class NoneType, which has no method show")])
def test_an_experts_mistake_is_one_line(tmp_path, capsys, old, new, expected):
    assert expected in fails(tmp_path, capsys, "--env", changed(GUESS, old, new), "--demonstrations", 4)


@pytest.mark.slow
@pytest.mark.parametrize("new, expected", [
    ("        return None\n", "assign: it returned None; expected a dict"),
    ("        return {'phase': 'x'}\n", "assign: its metric is named 'phase'"),
    ("        episodes[0].turns[0].token_advantage = [0.0] * 99\n" + END, "turn 1: its token_advantage is ["),
    ("        return {}['x']\n", ", in assign: KeyError: 'x'")])
def test_an_algorithms_mistake_is_one_line(tmp_path, capsys, new, expected):
    assert expected in fails(tmp_path, capsys, "--algo", changed(OPO, END, new))


@pytest.mark.slow
def test_a_mistake_late_in_a_run_leaves_its_last_checkpoint(tmp_path, capsys):
    late = "        self._n = getattr(self, '_n', 0) + 1\n        return {}[1] if self._n == 3 else {}\n"
    more = "--iterations", 4, "--checkpoint-every", 1
    line = fails(tmp_path, capsys, "--algo", changed(OPO, END, late), *more)
    assert "in assign: KeyError: 1" in line and len(rows(tmp_path / "out")) == 2
    assert (tmp_path / "out" / "checkpoint" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_library_raises_the_same_line(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(changed(GUESS, STEP, STEP + "        raise SystemExit\n"), encoding="utf-8")
    expected = r"mine.py: line \d+, in step: SystemExit \(task train/.*, turn 1\)"
    with pytest.raises(PluginError, match=expected):
        gcd.train(env=str(path), out=str(tmp_path / "out"), demonstrations=0, iterations=1, tasks=2,
                  group_size=2, max_turns=3, minibatches=1, gcd=False, evaluate="none", admissible_only=True)


# Before a run

DEFAULTS, SPLITS = '    defaults = {"max_turns": 8}', "    def unseen_splits(self):\n"


@pytest.mark.parametrize("before, after, expected", [
    (DEFAULTS, "    defaults = []", "class Environment: defaults is []; expected a dict"),
    (DEFAULTS, '    defaults = {"max_turns": "8"}', "--max-turns='8': expected int"),
    ('    splits = ("dev", "test")', '    splits = "test"', "splits is 'test'; expected a tuple"),
    ('    labels = {"halves": halves}', "    labels = halves", "expected a dict"),
    ("    @dataclass(frozen=True)\n", "", "expected a dataclass"),
    ('"""Guess', 'from __future__ import annotations\n"""Guess', "leave out `from __future__"),
    (MAKE, f"    def __init__(self, *given):\n        1 / 0\n\n{MAKE}", "in __init__: ZeroDivisionError"),
    (SPLITS, SPLITS + "        1 / 0\n", "in unseen_splits: ZeroDivisionError"),
    (MAKE, "    def _make(self, n):\n", "class Environment: lacks make(self, n), which it has to define"),
    (MAKE, "    def make(self):\n", "make(self); expected make(self, n)"),
    (TASKS, "    def train_tasks(self, start, n):\n", "expected train_tasks(self, types, start, n)"),
    ("    def expert(self, games):\n", "    def expert(self):\n", "expected expert(self, games)"),
    ("    def oracle(self, observations, commands):\n", "    def oracle(self, episode):\n",
     "oracle(self, episode); expected oracle(self, observations, commands)"),
    (MAKE, f"    def __init__(self):\n        pass\n\n{MAKE}", "__init__(self); expected __init__(self, set"),
    (DEFAULTS, '    defaults = {"max_turn": 8}', "class Environment: defaults: 'max_turn' is no setting"),
    (DEFAULTS, '    defaults = {"algo": "ppo"}', "defaults: 'algo' is chosen before defaults are known"),
    (DEFAULTS, '    defaults = {"preset": "paper"}', "'preset' is chosen before defaults are known"),
    (DEFAULTS, '    defaults = {}\n    sources = ("lowest",)', "sources has 'lowest'; expected the name of"),
    (DEFAULTS, '    defaults = {}\n    free_settings = ("low",)', "free_settings has 'low'; expected the"),
    ("int = field(default=20, ", "int = field(default_factory=int, ", "Settings.highest has no default"),
    ("int = field(default=20, ", "tuple = field(default=20, ", "the type of Settings.highest is <class 'tup"),
    ("int = field(default=20, ", "int = field(default='20', ", "--highest='20': expected int (a default of "),
    ('"help": "numbers are 1 to this"', '"help": 3', "the help of Settings.highest is 3; expected a text"),
    ('"low": 5', '"low": "5"', "the bounds of Settings.highest are ['5', 99]; expected numbers"),
    (SPLITS, SPLITS + "        return None\n", "unseen_splits returned None; expected a list of texts"),
    ('("dev", "test")', '("dev", "train")', "splits has 'train'; expected a text, and none of train, auto"),
    (MAKE, f"    def __init__(self, *given):\n        pass\n\n{MAKE}", "it does not call super().__init__"),
    ('{"halves": halves}', '{"halves": lambda: 0}', "labels: halves(); expected halves(episode)"),
    ('{"halves": halves}', '{"halves": "good"}', "labels has 'good'; expected a function"),
    ('{"halves": halves}', '{"dense": halves}', "labels: dense is a kind of the run's own"),
    ("captions = {", "captions = {'dev': 3} or {", "captions has 3; expected a text"),
    ("    def oracle(", "    oracle = 5\n\n    def _oracle(", "oracle is 5; expected a function")])
def test_a_wrong_class_is_refused_before_a_run(tmp_path, before, after, expected):
    path = tmp_path / "wrong.py"
    path.write_text(changed(GUESS, before, after), encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        config.parse(["--env", str(path)])
    assert expected in str(refused.value)


FLAG = "        highest: int = field("


@pytest.mark.parametrize("setting, expected", [
    ("no_hints: bool = False", "--no-hints: a setting that is True or False and begins with no_; --hints has "
     "--no-hints already"), ("lr: float = 3.0", "have settings of the same name: lr")])
def test_a_setting_whose_flag_has_two_meanings_is_refused(tmp_path, setting, expected):
    name, _, default = setting.partition(" = ")
    path = tmp_path / "twice.py"
    mine = f"        {name} = field(default={default}, metadata={{'help': 'x'}})\n"
    path.write_text(changed(GUESS, FLAG, mine + FLAG), encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        config.parse(["--env", str(path)])
    assert expected in str(refused.value)


def test_of_two_plug_ins_in_a_folder_the_one_that_called_a_third_file_is_named(tmp_path):
    (tmp_path / "common_of_two.py").write_text("def fail():\n    {}[1]\n", encoding="utf-8")
    first = "        _, turns_E"
    calls = f"        import common_of_two\n        common_of_two.fail()\n{first}"
    for name, text in (("mine", GUESS), ("own", changed(OPO, first, calls))):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    settings = config.parse(["--algo", str(tmp_path / "own.py"), "--env", str(tmp_path / "mine.py")])
    expected = r"^--algo=.*own\.py: common_of_two\.py, line 2, in fail: KeyError: 1$"
    with pytest.raises(PluginError, match=expected), plugins.blamed():
        settings.algorithm.assign([])


@pytest.mark.parametrize("style, bare, refused", [("think", False, True), ("tags", True, False),
                                                  ("plain", True, False)])
def test_how_to_answer_needs_a_function_that_reads_the_answer(monkeypatch, style, bare, refused):
    """Where a prompt says it: a small model's says nothing, and `plain` takes all that is written."""
    class Asking(envs.Environment):
        ask = "Answer: NUMBER"

    monkeypatch.setattr(models, "is_small", lambda tokenizer: False)
    monkeypatch.setattr(models, "Chat", lambda *given: SimpleNamespace(bare=bare, small=False))
    given = SimpleNamespace(prompt=style, environment=Asking(), show_admissible=False, thoughts="template",
                            correction="off", algo="grpo", algorithm=SimpleNamespace(tags=False))
    expected = pytest.raises(PluginError, match="ask: the class has no parse") if refused else nullcontext()
    with expected:
        models.make_chat(given, None)


def test_choices_may_be_numbers(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(changed(GUESS, '"low": 5, "high": 99', '"choices": (5, 20)'), encoding="utf-8")
    assert config.parse(["--env", str(path), "--highest", "5"]).environment.settings.highest == 5
    with pytest.raises(ValueError, match="^--highest=6: expected one of 5, 20$"):
        config.parse(["--env", str(path), "--highest", "6"])


def test_an_experts_and_a_follower_s_methods_have_the_parameters_that_they_are_called_with():
    class Follower:
        def observe(self, observation):
            pass

        def command(self):
            return "left"

    class Followed(envs.Environment):
        online_expert = staticmethod(lambda task, seed: Follower())

    task = Task("train/7", "train", "walk", None)
    expert = rollout.OnlineExpert(Followed(), rollout.EpisodeSpec(task, 0, 1))
    with pytest.raises(PluginError, match=r"online_expert: observe\(observation\); expected observe\(obs"):
        expert.begin()


@pytest.mark.parametrize("old, new, expected", [
    ("@dataclass(frozen=True)\n", "", "class Method: Settings declares fields; expected @dataclass"),
    ("""setting("tokens", "unit of an episode's length", ("tokens", "turns"))""", '"tokens"',
     "--length-in: a field without a help text; infra.flags.setting(default, help) makes it a flag")])
def test_a_field_that_would_be_no_flag_is_explained(tmp_path, old, new, expected):
    path = tmp_path / "mine.py"
    path.write_text(changed(OPO, old, new), encoding="utf-8")
    with pytest.raises(ValueError) as refused:
        config.parse(["--algo", str(path), "--length-in", "turns"])
    assert expected in str(refused.value)


@pytest.mark.slow
def test_a_fresh_model_replaces_no_folder_in_out(tmp_path):
    mine = tmp_path / "out" / "fresh" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine", encoding="utf-8")
    with Stop.restored():
        assert gcd.main([*TINY, "--env", str(EXAMPLES / "guess.py"), "--out", str(tmp_path / "out")]) == 0
    assert mine.read_text(encoding="utf-8") == "mine"
    assert [path.name for path in (tmp_path / "out").glob("fresh*")] == ["fresh"]


@pytest.mark.slow
def test_a_tuple_of_tasks_and_a_game_that_cannot_be_closed_end_no_run(tmp_path, capsys):
    path, closing = tmp_path / "mine.py", "    def close(self):\n        pass\n"
    text = changed(GUESS, closing, closing.replace("pass", "raise RuntimeError('gone\\nfor good')"))
    found = re.search(r"( +return )(\[.*for i in range\(start, start \+ n\)\])", text)
    path.write_text(changed(text, found[0], f"{found[1]}tuple({found[2]})"), encoding="utf-8")
    flags = [*TINY, "--env", str(path), "--out", str(tmp_path / "out")]
    with Stop.restored():
        assert gcd.main(flags) == 0
    printed = capsys.readouterr().err
    assert printed.count("a game's close failed: RuntimeError: gone for good\n") == 4


def test_a_file_may_hand_on_a_class_of_the_tree(tmp_path):
    path = tmp_path / "again.py"
    path.write_text("from algorithms.gigpo import Method\n", encoding="utf-8")
    assert config.parse(["--algo", str(path)]).algorithm.settings.step_weight > 0


def test_a_message_for_the_user_stays_as_it_is(tmp_path):
    path = tmp_path / "strict.py"
    refusal = "    def __init__(self, *given):\n        raise ValueError('--highest=6: odd numbers')\n\n"
    path.write_text(changed(GUESS, MAKE, refusal + MAKE), encoding="utf-8")
    with pytest.raises(ValueError, match="^--highest=6: odd numbers$"):
        config.parse(["--env", str(path), "--highest", "6"])


def test_errors_of_other_code_and_lack_of_memory_pass():
    for error in (KeyError("x"), MemoryError(), EpisodeLost("x"), PluginError("x")):
        with pytest.raises(type(error)) as raised, plugins.blamed(EpisodeLost):
            raise error
        assert raised.value is error
