"""Records that describe an ALFWorld game at its start, and the parser of its task's text.

Both generated rooms (rooms.py) and ALFWorld's own games (games.py) become these records. Left out: what
changes during a game (game.py), and goals outside ALFWorld's six types.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from .. import Task

NOOP_MESSAGE = "Nothing happens."      # the game's answer to a command that is not admissible
TASKS = [(re.compile(pattern), task_type) for pattern, task_type in (
    (r"(?:find|put) two (?P<object>\w+)(?: and put them)? in (?P<receptacle>\w+)", "pick_two_obj_and_place"),
    (r"(?:look at|examine the) (?P<object>\w+) (?:under|with) the (?P<toggle>\w+)", "look_at_obj_in_light"),
    (r"put a clean (?P<object>\w+) in (?P<receptacle>\w+)", "pick_clean_then_place_in_recep"),
    (r"clean some (?P<object>\w+) and put it in (?P<receptacle>\w+)", "pick_clean_then_place_in_recep"),
    (r"put a hot (?P<object>\w+) in (?P<receptacle>\w+)", "pick_heat_then_place_in_recep"),
    (r"heat some (?P<object>\w+) and put it in (?P<receptacle>\w+)", "pick_heat_then_place_in_recep"),
    (r"put a cool (?P<object>\w+) in (?P<receptacle>\w+)", "pick_cool_then_place_in_recep"),
    (r"cool some (?P<object>\w+) and put it in (?P<receptacle>\w+)", "pick_cool_then_place_in_recep"),
    (r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<receptacle>\w+)", "pick_and_place_simple"),
)]
# {task type that treats its object: (verb, type of the appliance, flag of the Things that can be treated)}
TREATED = {"pick_clean_then_place_in_recep": ("clean", "sinkbasin", "cleanable"),
           "pick_heat_then_place_in_recep": ("heat", "microwave", "heatable"),
           "pick_cool_then_place_in_recep": ("cool", "fridge", "coolable")}
UNTREATED = None, None, None
OPENABLE = frozenset(("cabinet", "drawer", "fridge", "microwave", "safe"))     # types of receptacles


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place for things: "cabinet 2". Its type is `kind` or, by default, its name without the number."""

    name: str
    location: int                  # receptacles that share a location are reached together
    openable: bool
    opened: bool                   # at the start
    accepts: frozenset[str]        # object types that may be put here (PDDL canContain)
    kind: str = ""                 # "sinkbasin" for some real bathrooms' "bathtubbasin 1"

    @property
    def type(self):
        """Its type, "cabinet"."""
        return self.kind or type_of(self.name)


@dataclass(frozen=True, slots=True)
class Thing:
    """An object: "apple 1". Its type is its name without the number."""

    name: str
    receptacle: str | None         # name of the receptacle in which it starts, or None
    location: int                  # where it can be sliced, not always its receptacle's location; -1: nowhere
    pickupable: bool = True
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    toggleable: bool = False
    sliceable: bool = False
    cool: bool = False             # at the start
    holds_things: bool = False     # a container, such as a bowl: "examine" lists its contents
    holding: tuple[str, ...] = ()  # names of the things in it; constant, as in the engine
    also_in: tuple[str, ...] = ()  # further receptacles in which it starts: real games list some things twice

    @property
    def type(self):
        """Its type, "apple"."""
        return type_of(self.name)


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins: an object of a type in or on a receptacle of a type, treated as the task type asks."""

    task_type: str
    object: str                    # lower-case type, "apple"
    receptacle: str = ""           # lower-case type, "fridge"; "" for look_at_obj_in_light
    toggle: str = ""               # lower-case type, "desklamp", for look_at_obj_in_light only


@dataclass(frozen=True, slots=True)
class Problem:
    """One game at its start."""

    task_desc: str                 # "put a clean apple in fridge", without the full stop
    receptacles: tuple[Receptacle, ...]    # in the order of the first observation
    things: tuple[Thing, ...]      # in the order of the game's lists
    goal: Goal
    start: int = -1                # the location where the player starts; -1: one without receptacles


def parse_goal(text, source=""):
    """The Goal of a task's text. ValueError, with the source, if it is none of ALFWorld's phrasings."""
    for pattern, task_type in TASKS:
        match = pattern.fullmatch(text)
        if match:
            return Goal(task_type, **match.groupdict())
    raise ValueError(f"{source}{': ' * bool(source)}task {text!r}: not one of ALFWorld's phrasings")


@lru_cache(maxsize=4096)
def type_of(name):
    """The type in a name: "apple" for "apple 1"."""
    return name.rpartition(" ")[0]


def listing(names, article="a "):
    """Names as the game lists them: "a cup 1, a pan 2, and a mug 1", or "nothing"."""
    *first, last = [article + name for name in names] or ["nothing"]
    return f"{', '.join(first)}, and {last}" if first else last


def problem_of(task: Task) -> Problem:
    """The task's Problem; a games.PddlText is parsed. ValueError, with the game, for invalid text."""
    return task.problem.parse() if hasattr(task.problem, "parse") else task.problem
