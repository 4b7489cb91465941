"""ALFWorld on its own engine: the pip packages alfworld and textworld, with the games in worker processes.

Tasks, replies and texts are the same as household's; the tests compare the two. The engine is slow, and each
of its games needs a copy of a C++ library. So workers cache what does not change: one library copy per live
game, the translated PDDL of the last games, and the command of each ground operator. The file has, in this
order: the environment, the games in the main process, the worker process, the command line. Left out:
textworld's batches, its planner and alfworld's experts.

    python -m envs.alfworld --game game.tw-pddl           # play an ALFWorld game, one command a line
    python -m envs.alfworld --games $ALFWORLD_DATA/json_2.1.1 --split valid_seen --index 3 --json
"""

import argparse
import ctypes
import os
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

from . import EpisodeLost, Reply, Task, household
from ._terminal import play_in_terminal
from .alfred.games import PddlText, check_source, load_game, load_games, problem_from_pddl
from .alfred.problem import NOOP_MESSAGE

PACKAGES = {"alfworld": "alfworld", "textworld": "textworld", "fast_downward": "fast_downward_textworld"}
ANSWER_TIMEOUT_S = 120   # a worker without an answer hangs; a first load takes at most 1 s, a turn some ms
CACHED_GAMES = 16        # translated games in a worker, some MB each: those of a batch played in groups of 8


def make(n, workers=2):
    """n games on min(n, workers) worker processes; neighbours, such as a group's, share a worker.

    The workers end when the last game is closed, and with this process, however it ends. Raises ValueError if
    ALFWorld is not installed.
    """
    check_installed()
    pool = Pool(n, min(n, workers))
    return [Alfworld(pool, i) for i in range(n)]


def versions():
    """{package: version} of the engine's packages. ValueError if one is missing."""
    check_installed()
    return {package: version(package) for package in PACKAGES.values()}


def check_installed():
    """ValueError if a package is missing."""
    if not all(map(find_spec, PACKAGES)):
        raise ValueError("--env=alfworld: not installed; pip install -r requirements-alfworld.txt")


class Environment(household.Environment):
    """Real games on the real engine. Tasks, vocabulary, expert and oracle are household's."""

    _rearranges = False         # the engine plays existing games only

    @dataclass(frozen=True)
    class Settings:
        """The source of the games."""
        games: str = field(default="", metadata={"help": "a json_2.1.1 folder or games.jsonl.gz"})

    def __init__(self, settings=None, train_types="part", seed=0):
        if settings is None or not settings.games:
            raise ValueError("--env=alfworld: needs --games, a json_2.1.1 folder or games.jsonl.gz")
        super().__init__(settings, train_types, seed)

    def make(self, n):
        """n games on two worker processes, see `make`."""
        return make(n)

    def description(self):
        """What is played, in words."""
        return "real ALFWorld games, alfworld engine"

    def versions(self):
        """{package: version} of the engine's packages."""
        return versions()


# In the main process

class Alfworld:
    """A Game whose turns are played by a worker. If the worker died, `reset` uses a new one."""

    def __init__(self, pool, number):
        self.pool, self.number = pool, number
        self.worker = None
        self.task = None           # the current task; the engine itself names it in the first turn only
        self.sent = 0

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start the task's game. Games are deterministic: `seed` has no effect.

        Raises ValueError for broken PDDL and for a generated room, EpisodeLost as `step` does.
        """
        self.send("reset", task, seed)
        return self.receive()

    def step(self, command: str) -> Reply:
        """Carry out a command. One that is not admissible has no effect. Case matters, outer spaces do not.

        Raises EpisodeLost if the worker died since the reset, or does not answer within ANSWER_TIMEOUT_S.
        """
        self.send("step", command)
        return self.receive()

    def send(self, method, argument, seed=0):
        """Send "reset" and a task, or "step" and a command; `receive` waits for the reply."""
        if method == "reset":
            text = pddl_text(argument)
            self.worker, self.task, argument = self.pool.worker_of(self.number), argument, text
        self.sent += 1
        self.worker.ask((self.number, self.sent, method, argument))

    def receive(self) -> Reply:
        """The reply to the last `send`. Raises ValueError and EpisodeLost as `reset` and `step` do."""
        try:
            answer = self.worker.answer(self.number, self.sent)
        except EpisodeLost as loss:
            raise EpisodeLost(f"task {self.task.id}: {loss}") from loss
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self) -> None:
        """Close the game; the last one to close ends the workers."""
        self.pool.leave(self.number)


def pddl_text(task):
    """The PDDL text of a task. ValueError for a generated room, which has no such text."""
    if not isinstance(task.problem, PddlText):
        raise ValueError(f"--env=alfworld: plays real games only, so needs --games; "
                         f"task {task.id} is a generated room")
    return task.problem


class Pool:
    """The workers of n games. Each worker plays a contiguous part of them, of equal size."""

    def __init__(self, n, workers):
        self.n = n
        self.open = set(range(n))
        self.workers = [Worker() for _ in range(workers)]

    def worker_of(self, number):
        """The worker of a game; a new one if it died."""
        index = number * len(self.workers) // self.n
        if self.workers[index].lost:
            self.workers[index] = Worker()
        return self.workers[index]

    def leave(self, number):
        """Close a game; with the last one, the workers end."""
        self.open.discard(number)
        if not self.open:
            for worker in self.workers:
                worker.stop(timeout_s=10)


class Worker:
    """A process that plays games, and the pipe to it. It answers requests in their order.

    It is a new process and not a fork, because this process may use a GPU and has imported more than a worker
    needs. It ends when the pipe closes, so also when this process is killed. It has its own session, so that
    a Ctrl-C does not reach it.
    """

    def __init__(self):
        ours, theirs = socket.socketpair()
        set_timeout(ours)
        root = str(Path(__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from envs.alfworld import serve; serve({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True)
        self.pipe = Connection(ours.detach())
        self.answers = {}          # game -> (request number, content) of its last answer that was received
        self.lost = None           # why no answer will come; None while the worker lives

    def ask(self, request):
        """Send a request; an error is raised by the `answer` calls that wait for it."""
        if not self.lost:
            try:
                self.pipe.send(request)
            except OSError as error:
                self.fail(error)

    def answer(self, game, number):
        """The answer to a game's request of that number; raises EpisodeLost if none will come."""
        while self.answers.get(game, (0, None))[0] != number:
            if self.lost:
                raise EpisodeLost(self.lost)
            try:
                game_, number_, answer = self.pipe.recv()
                self.answers[game_] = number_, answer
            except (EOFError, OSError) as error:
                self.fail(error)
        return self.answers.pop(game)[1]

    def fail(self, error):
        """Stop the worker after an error of its pipe, and record the reason in `lost`."""
        hangs = isinstance(error, BlockingIOError)
        self.stop(timeout_s=0 if hangs else 1)
        self.lost = f"its worker gave no answer for {ANSWER_TIMEOUT_S} s" if hangs else (
            f"its worker died with exit code {self.process.returncode}")

    def stop(self, timeout_s):
        """Close the pipe, which ends the worker; kill it if that takes longer than `timeout_s`."""
        self.lost = "its worker was closed"
        self.pipe.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def set_timeout(end):
    """Let reads and writes on this end of a pipe raise BlockingIOError after ANSWER_TIMEOUT_S."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", ANSWER_TIMEOUT_S, 0))


# In a worker process

def serve(descriptor):
    """The main loop of a worker: answer requests, with one engine per game, until the pipe closes."""
    pipe, requests = Connection(descriptor), queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(pipe, requests), daemon=True).start()
    logic, engines = prepare(), {}
    while True:
        game, number, method, argument = requests.get()
        if game not in engines:
            engines[game] = Engine(logic)
        engine = engines[game]
        answer = start(engine, argument) if method == "reset" else engine.step(argument)
        try:
            pipe.send((game, number, answer))
        except BrokenPipeError:
            return


def read_requests(pipe, requests):
    """Move requests from the pipe to a queue; end the process when the pipe closes, even if the engine runs.

    Without the queue, the main process could block on a send while the worker blocks on an answer.
    """
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def start(engine, text):
    """The first reply of a game, or a ValueError with its name, whatever the translator raises."""
    try:
        problem_from_pddl(text.pddl, text.task_desc)
        return engine.reset(text)
    except (Exception, SystemExit) as error:
        return ValueError(f"{text.source}: {error or type(error).__name__}")


def prepare():
    """Install the caches in this process's engine; returns ALFWorld's domain and grammar as a GameLogic."""
    os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())   # or the import creates a folder in $HOME
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from fast_downward import interface
    from textworld.envs.pddl.logic import GameLogic
    cache_translations()
    cache_parses()
    interface.DOWNWARD_LIB_PATH = strip_symbols(interface.DOWNWARD_LIB_PATH)
    paths = ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    return GameLogic(*(Path(path).read_text(encoding="utf-8") for path in paths))


def cache_translations():
    """Cache the translation of a game's PDDL, and skip the second one of each reset, which the planner needs.

    The caches of textworld are cleared at each translation: they hold every fact of every game, 1 MB a game.
    Unused heap is returned to the system: the translator's temporary objects double its size.
    """
    import fast_downward
    import mementos.core
    stock = fast_downward.pddl2sas
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda padding: 0)    # glibc only

    @lru_cache(CACHED_GAMES)
    def translate(domain, problem):
        mementos.core._memento_cache.clear()
        task, sas = stock(domain, problem)                    # overwrites sys.argv of this worker
        trim(0)
        return task, sas

    def cached(domain, problem, verbose=False, optimize=False):
        return (None, "") if optimize else translate(domain, problem)

    fast_downward.pddl2sas = cached


def cache_parses():
    """Cache the parsed text templates and conditions of the grammar, about 100 in all.

    Contexts are copied without their names and entities, which are never modified.
    """
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule
    parse = lru_cache(None)(textgen._parse_and_convert)
    # deep copies, because the caller adds a context to them
    textgen._parse_and_convert = lambda text, **options: deepcopy(parse(text, **options))
    Rule.parse_conjunctive_query = lru_cache(None)(Rule.parse_conjunctive_query)
    textgen.copy_context = lambda context: context | {
        "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def strip_symbols(path):
    """Path of a copy of the library without the parts that are never loaded: 1 MB of 34.

    Every game has a copy of the library, in memory and on the disk.
    """
    elf = Path(path).read_bytes()
    if elf[:6] != b"\x7fELF\x02\x01":                                # 64 bits, little-endian
        return path
    (table,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    end = max(offset + length for kind, _, offset, _, _, length in segments if kind == 1)
    descriptor = os.memfd_create("libdownward")                      # freed with the process
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(elf[:end])
    return f"/proc/self/fd/{descriptor}"


class Engine:
    """Plays one game at a time on textworld's PDDL state and grammar, as textworld's PddlEnv does.

    PddlEnv itself translates a game four times and derives each command again at every turn. Fast Downward's
    library is loaded once and reused, because it cannot be unloaded completely.
    """

    def __init__(self, logic):
        from fast_downward import load_lib
        self.logic, self.downward = logic, load_lib()
        self.downward.load_sas_replan = lambda sas: None              # for the planner only

    def reset(self, text) -> Reply:
        """Load the game of a PddlText and return its first reply."""
        from textworld.envs.pddl.logic import PddlState
        self.grammar = grammar_of(self.logic, text.task_desc)
        self.state = PddlState(self.downward, text.pddl, self.logic)
        self.entities = named_entities(self.state)
        self.names = {i: entity.name for i, entity in self.entities.items()}
        self.command_of = command_cache(text.pddl)
        return self._reply(self._derive("#intro#", {}))

    def step(self, command) -> Reply:
        """Carry out a command; one that is not admissible has no effect."""
        action = self.actions.get(command.strip())
        if action is None:
            return self._reply(NOOP_MESSAGE)
        self.state.apply(action)
        return self._reply(self._derive(action.feedback_rule, action.mapping))

    def _reply(self, observation):
        """The reply in the current state. Of two operators with the same command, the first is used."""
        self.actions = {}
        for action in self.state.all_applicable_actions():
            if action.id not in self.command_of:
                action.command_template = self._derive(action.command_template, action.mapping)
                self.command_of[action.id] = action.format_command(self.names)
            self.actions.setdefault(self.command_of[action.id], action)
        won = self.state.check_goal()
        return Reply(observation, sorted(self.actions), won, won)

    def _derive(self, rule, mapping):
        """The text that the grammar derives from a rule, with its placeholders filled by `mapping`."""
        variables = {placeholder.name: self.entities[variable.name]
                     for placeholder, variable in mapping.items()}
        return self.grammar.derive(rule, {"state": self.state, "facts": (), "variables": variables,
                                          "mapping": mapping, "entity_infos": self.entities})


@lru_cache(CACHED_GAMES)
def command_cache(pddl):
    """{id of a ground operator: its command}, filled during play and shared by all plays of a game."""
    return {}


def grammar_of(logic, task_desc):
    """ALFWorld's grammar with the task's text, verbatim; of two rules for "task" the first is used."""
    from textworld.envs.pddl.textgen import ContextSensitiveGrammar, ProductionRule, TerminalSymbol
    grammar = ContextSensitiveGrammar()
    grammar.add_rule(ProductionRule("task", [TerminalSymbol(f"Your task is to: {task_desc}.")]))
    grammar.update(logic.grammar)
    return grammar


def named_entities(state):
    """{PDDL id: textworld's record}, with the names that observations use."""
    from alfworld.agents.utils.misc import Demangler
    from textworld.generator.game import EntityInfo
    entities = {v.name: EntityInfo(v.name, v.type) for fact in state.facts for v in fact.arguments}
    demangler = Demangler(game_infos=entities)
    for i, entity in entities.items():
        entity.name, entity.definite, entity.indefinite = demangler.demangle_alfred_name(i), "the", "a"
    return entities


# The command line

def main(argv=None):
    """Play one game on the terminal."""
    parser = argparse.ArgumentParser("python -m envs.alfworld", allow_abbrev=False,
                                     description="Play a game on ALFWorld's engine.")
    parser.add_argument("--game", help="play this game.tw-pddl file")
    parser.add_argument("--games", help="play a game of this json_2.1.1 folder or .jsonl.gz file")
    parser.add_argument("--split", default="valid_seen", help="split of --games")
    parser.add_argument("--index", type=int, default=0, help="number of the game in its split")
    play_in_terminal(parser, argv, chosen_task, make)


def chosen_task(options):
    """The task that the command line names. ValueError unless exactly one of --game and --games is given."""
    if (options.game is None) == (options.games is None):
        raise ValueError("expected --game or --games")
    if options.game is not None:
        return load_game(options.game)
    check_source(options.games, [options.split])
    tasks = load_games(options.games, options.split)
    if not 0 <= options.index < len(tasks):
        raise ValueError(f"--index={options.index}: {options.split} has games 0 to {len(tasks) - 1}")
    return tasks[options.index]


if __name__ == "__main__":
    main()
