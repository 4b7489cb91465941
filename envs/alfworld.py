"""ALFWorld on its own engine: the pip packages alfworld and textworld, with the games in worker processes.

The same tasks, replies and texts as household's, whose answers the tests hold against these. The engine is
slow and holds its games in copies of a C++ library, so workers keep what does not change: a library copy per
live game, the translated PDDL of the last games, the command of each ground operator. First comes the world,
then the player's side, the worker's, and the player on the command line. Left out: textworld's batches, the
planner and alfworld's experts.

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

from envs import EpisodeLost, Reply, Task, household
from envs._terminal import play_in_terminal
from envs.alfred.games import PddlText, check_source, load_game, load_games, problem_from_pddl
from envs.alfred.problem import NOTHING

PACKAGES = {"alfworld": "alfworld", "textworld": "textworld", "fast_downward": "fast_downward_textworld"}
LIMIT_S = 120          # a worker silent for so long hangs; a first load takes it 1 s at most, a turn some ms
GAMES_KEPT = 16        # translated games in a worker, some MB each: those of a batch played in groups of 8


def make(n, workers=2):
    """n environments on min(n, workers) worker processes; neighbours, so groups, are on the same one.

    The workers end with the last environment that is closed, and with this process, however it ends.
    Raises ValueError where ALFWorld is not installed.
    """
    if not all(map(find_spec, PACKAGES)):
        raise ValueError("--env=alfworld: not installed; pip install -r requirements-alfworld.txt")
    pool = Pool(n, min(n, workers))
    return [Alfworld(pool, i) for i in range(n)]


def versions():
    """The versions of what the engine consists of, for logs."""
    return {package: version(package) for package in PACKAGES.values()}


class World(household.World):
    """Real games on the real engine. Tasks, words, expert and oracle are household's."""

    rearranges = False         # the engine plays games that there are

    @dataclass(frozen=True)
    class Settings:
        """Where the games come from."""
        games: str = field(default="", metadata={"help": "a json_2.1.1 folder or games.jsonl.gz"})

    def __init__(self, settings=None, train_types="part", seed=0):
        if settings is None or not settings.games:
            raise ValueError("--env=alfworld: needs --games, a json_2.1.1 folder or games.jsonl.gz")
        super().__init__(settings, train_types, seed)

    def make(self, n):
        """n environments on two worker processes, see `make`."""
        return make(n)

    def games(self):
        """What is played."""
        return "real ALFWorld games, alfworld engine"

    def versions(self):
        """The versions of the engine's packages."""
        return versions()


# The player's side

class Alfworld:
    """One environment: its turns are played by a worker, which may die; a reset then starts on a new one."""

    def __init__(self, pool, number):
        self.pool, self.number = pool, number
        self.worker = None
        self.task = None           # what is played; the engine itself forgets it after the first turn
        self.sent = 0

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start the task's game. The game has no chance in it: `seed` changes nothing.

        Raises ValueError for broken PDDL and for a generated room, EpisodeLost as `step` does.
        """
        self.send("reset", task, seed)
        return self.receive()

    def step(self, command: str) -> Reply:
        """Do a command; one that is not admissible changes nothing. Case matters, spaces around it do not.

        Raises EpisodeLost where the worker died since the reset or is silent for LIMIT_S.
        """
        self.send("step", command)
        return self.receive()

    def send(self, verb, argument, seed=0):
        """Send "reset" and a task, or "step" and a command; `receive` waits for what comes of it."""
        if verb == "reset":
            text = pddl_text(argument)
            self.worker, self.task, argument = self.pool.worker_of(self.number), argument, text
        self.sent += 1
        self.worker.ask((self.number, self.sent, verb, argument))

    def receive(self) -> Reply:
        """The answer to what was sent. Raises ValueError and EpisodeLost as `reset` and `step` do."""
        try:
            answer = self.worker.answer(self.number, self.sent)
        except EpisodeLost as loss:
            raise EpisodeLost(f"task {self.task.id}: {loss}") from loss
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def close(self) -> None:
        """Leave the workers; the last environment ends them."""
        self.pool.leave(self.number)


def pddl_text(task):
    """The PDDL text of a task. ValueError for a generated room, which has none."""
    if not isinstance(task.problem, PddlText):
        raise ValueError(f"--env=alfworld: plays real games only, so needs --games; "
                         f"task {task.id} is a generated room")
    return task.problem


class Pool:
    """The workers that a number of environments share: contiguous parts of them, of equal size."""

    def __init__(self, n, workers):
        self.n = n
        self.open = set(range(n))
        self.workers = [Worker() for _ in range(workers)]

    def worker_of(self, number):
        """The worker of an environment, a new one where it died."""
        place = number * len(self.workers) // self.n
        if self.workers[place].lost:
            self.workers[place] = Worker()
        return self.workers[place]

    def leave(self, number):
        """Close an environment; with the last one, the workers end."""
        self.open.discard(number)
        if not self.open:
            for worker in self.workers:
                worker.end(patience_s=10)


class Worker:
    """A process that plays games, and the pipe to it. It answers in the order in which it is asked.

    A process of its own and not a fork: the player may hold a GPU, and has imported what a worker does not
    need. It ends when its end of the pipe closes, so also when the player is killed. A session of its own
    keeps a Ctrl-C from it that is meant for the player.
    """

    def __init__(self):
        ours, theirs = socket.socketpair()
        limit_waits(ours)
        root = str(Path(__file__).resolve().parent.parent)
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from envs.alfworld import serve; serve({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True)
        self.pipe = Connection(ours.detach())
        self.answers = {}          # environment -> number and content of the last answer that has come for it
        self.lost = None           # why there is nothing more to hear from it

    def ask(self, request):
        """Send a request; what goes wrong is told to those who wait for the answer."""
        if not self.lost:
            try:
                self.pipe.send(request)
            except OSError as error:
                self.lose(error)

    def answer(self, environment, number):
        """The answer to an environment's request of that number; raises EpisodeLost where none will come."""
        while self.answers.get(environment, (0, None))[0] != number:
            if self.lost:
                raise EpisodeLost(self.lost)
            try:
                environment_, number_, answer = self.pipe.recv()
                self.answers[environment_] = number_, answer
            except (EOFError, OSError) as error:
                self.lose(error)
        return self.answers.pop(environment)[1]

    def lose(self, error):
        """End the worker, and note what became of it for those who wait."""
        hangs = isinstance(error, BlockingIOError)
        self.end(patience_s=0 if hangs else 1)
        self.lost = f"its worker gave no answer for {LIMIT_S} s" if hangs else (
            f"its worker died with exit code {self.process.returncode}")

    def end(self, patience_s):
        """Close the pipe, which ends the worker; kill it where it takes longer than that."""
        self.lost = "its worker was closed"
        self.pipe.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def limit_waits(end):
    """Let no read or write on this end of a pipe last longer than LIMIT_S: it raises BlockingIOError then."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", LIMIT_S, 0))


# The worker's side

def serve(descriptor):
    """What a worker does: play one game for each environment that asks, until the pipe closes."""
    pipe, requests = Connection(descriptor), queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(pipe, requests), daemon=True).start()
    logic, engines = prepare(), {}
    while True:
        environment, number, verb, argument = requests.get()
        if environment not in engines:
            engines[environment] = Engine(logic)
        engine = engines[environment]
        answer = start(engine, argument) if verb == "reset" else engine.step(argument)
        try:
            pipe.send((environment, number, answer))
        except BrokenPipeError:
            return


def read_requests(pipe, requests):
    """Take requests as they come, so that no player waits to send while this waits to answer; end with the
    pipe, whatever the engine is doing."""
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(0)


def start(engine, text):
    """The first reply of a game, or a ValueError that names it: the translator's own are of many kinds."""
    try:
        problem_from_pddl(text.pddl, text.task_desc)
        return engine.reset(text)
    except (Exception, SystemExit) as error:
        return ValueError(f"{text.source}: {error or type(error).__name__}")


def prepare():
    """Make the engine of this process keep what it works out; returns ALFWorld's domain and grammar, read."""
    os.environ.setdefault("ALFWORLD_DATA", tempfile.gettempdir())   # or the import makes a folder in the home
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    from fast_downward import interface
    from textworld.envs.pddl.logic import GameLogic
    keep_translations()
    keep_parses()
    interface.DOWNWARD_LIB_PATH = without_symbols(interface.DOWNWARD_LIB_PATH)
    paths = ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
    return GameLogic(*(Path(path).read_text(encoding="utf-8") for path in paths))


def keep_translations():
    """Translate a game's PDDL once, not twice at each reset; the second time, `optimize`, is for the planner.

    What other games have left behind is dropped: textworld remembers each fact that it ever met, 1 MB a game,
    and the translator's litter keeps the heap twice as large.
    """
    import fast_downward
    import mementos.core
    stock = fast_downward.pddl2sas
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: 0)       # glibc's alone

    @lru_cache(GAMES_KEPT)
    def translate(domain, problem):
        mementos.core._memento_cache.clear()
        task, sas = stock(domain, problem)                    # overwrites sys.argv: not the player's, here
        trim(0)
        return task, sas

    def keeping(domain, problem, verbose=False, optimize=False):
        return (None, "") if optimize else translate(domain, problem)

    fast_downward.pddl2sas = keeping


def keep_parses():
    """Parse each text template and each condition of the grammar once, not at each use; there are about 100.
    And copy no names and variables where texts are made: nobody changes them."""
    from textworld.envs.pddl import textgen
    from textworld.logic import Rule
    parse = lru_cache(None)(textgen._parse_and_convert)
    # deep copies, because who uses them adds a context
    textgen._parse_and_convert = lambda text, **options: deepcopy(parse(text, **options))
    Rule.parse_conjunctive_query = lru_cache(None)(Rule.parse_conjunctive_query)
    textgen.copy_context = lambda context: context | {
        "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}


def without_symbols(path):
    """The path of the same library without what is never loaded: 1 MB of 34. Each game holds a copy, on disk
    too."""
    elf = Path(path).read_bytes()
    if elf[:6] != b"\x7fELF\x02\x01":                                # 64 bits, little end first
        return path
    (table,), (size, count) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    end = max(offset + length for kind, _, offset, _, _, length in segments if kind == 1)
    descriptor = os.memfd_create("libdownward")                      # gone with the process
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(elf[:end])
    return f"/proc/self/fd/{descriptor}"


class Engine:
    """One game at a time on textworld's PDDL state and grammar, as textworld's PddlEnv with alfworld's names.

    PddlEnv itself translates a game four times and derives each command anew at every turn. The library copy
    is loaded once: it can be reused, but never quite unloaded.
    """

    def __init__(self, logic):
        from fast_downward import load_lib
        self.logic, self.downward = logic, load_lib()
        self.downward.load_sas_replan = lambda sas: None              # the planner's

    def reset(self, text) -> Reply:
        """Load a game, a PddlText; its first reply."""
        from textworld.envs.pddl.logic import PddlState
        self.grammar = grammar_of(self.logic, text.task_desc)
        self.state = PddlState(self.downward, text.pddl, self.logic)
        self.entities = named_entities(self.state)
        self.names = {i: entity.name for i, entity in self.entities.items()}
        self.command_of = known_commands(text.pddl)
        return self._reply(self._say("#intro#", {}))

    def step(self, command) -> Reply:
        """Do a command, or nothing."""
        action = self.actions.get(command.strip())
        if action is None:
            return self._reply(NOTHING)
        self.state.apply(action)
        return self._reply(self._say(action.feedback_rule, action.mapping))

    def _reply(self, observation):
        """The reply after the state has changed. Of two operators with the same command the first counts."""
        self.actions = {}
        for action in self.state.all_applicable_actions():
            if action.id not in self.command_of:
                action.command_template = self._say(action.command_template, action.mapping)
                self.command_of[action.id] = action.format_command(self.names)
            self.actions.setdefault(self.command_of[action.id], action)
        won = self.state.check_goal()
        return Reply(observation, sorted(self.actions), won, won)

    def _say(self, rule, mapping):
        """What the grammar makes of a rule, its placeholders filled by `mapping`."""
        variables = {placeholder.name: self.entities[variable.name]
                     for placeholder, variable in mapping.items()}
        return self.grammar.derive(rule, {"state": self.state, "facts": (), "variables": variables,
                                          "mapping": mapping, "entity_infos": self.entities})


@lru_cache(GAMES_KEPT)
def known_commands(pddl):
    """Ground operator's id -> command, filled as a game is played: all who play it share it."""
    return {}


def grammar_of(logic, task_desc):
    """ALFWorld's grammar with the task's text, word for word; of two rules for "task" the first is taken."""
    from textworld.envs.pddl.textgen import ContextSensitiveGrammar, ProductionRule, TerminalSymbol
    grammar = ContextSensitiveGrammar()
    grammar.add_rule(ProductionRule("task", [TerminalSymbol(f"Your task is to: {task_desc}.")]))
    grammar.update(logic.grammar)
    return grammar


def named_entities(state):
    """PDDL id -> textworld's record of it, under the name that the player reads."""
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
    """The task that the command line names. Raises ValueError for none, and for a game beside games."""
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
