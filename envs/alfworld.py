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
import struct
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from . import Reply, household
from ._terminal import play_in_terminal
from ._workers import worker_games
from .alfred.games import PddlText, check_source, load_game, load_games, problem_from_pddl
from .alfred.problem import NOOP_MESSAGE

PACKAGES = {"alfworld": "alfworld", "textworld": "textworld", "fast_downward": "fast_downward_textworld"}
ANSWER_TIMEOUT_S = 120   # a worker without an answer hangs; a first load takes at most 1 s, a turn some ms
CACHED_GAMES = 16        # translated games in a worker, some MB each: those of a batch played in groups of 8


def make(n, workers=2):
    """n games on so many worker processes, see `worker_games`. ValueError if ALFWorld is not installed."""
    check_installed()
    return worker_games(n, min(n, workers), f"{__spec__.name}:engines", ANSWER_TIMEOUT_S, pddl_text)


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
        """{package: version} of the engine's packages. ValueError if one is missing."""
        check_installed()
        return {package: version(package) for package in PACKAGES.values()}


# In the main process

def pddl_text(task):
    """The PDDL text of a task. ValueError for a generated room, which has no such text."""
    if not isinstance(task.problem, PddlText):
        raise ValueError(f"--env=alfworld: plays real games only, so needs --games; "
                         f"task {task.id} is a generated room")
    return task.problem


# In a worker process

def engines(settings):
    """What makes the engine of each game in a worker, see _workers.serve. settings: ignored."""
    logic = prepare()
    return lambda: Engine(logic)


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
        """The first reply of a PddlText's game. ValueError with its name, whatever the translator raises."""
        try:
            problem_from_pddl(text.pddl, text.task_desc)
            return self._start(text)
        except (Exception, SystemExit) as error:
            raise ValueError(f"{text.source}: {error or type(error).__name__}") from error

    def _start(self, text):
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
