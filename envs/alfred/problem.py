"""An ALFWorld game before its first turn: the records that it is played from, and the text of its task.

Generated rooms (rooms.py) and ALFWorld's own games (games.py) are both read into these. Left out: what
changes during a game (game.py), and goals outside ALFWorld's six types.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from envs import Task

NOTHING = "Nothing happens."      # the game's answer to a command that it does not take
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
# What a task does to its thing: the verb, what it is done with, and which things take it
TREATED = {"pick_clean_then_place_in_recep": ("clean", "sinkbasin", "cleanable"),
           "pick_heat_then_place_in_recep": ("heat", "microwave", "heatable"),
           "pick_cool_then_place_in_recep": ("cool", "fridge", "coolable")}
UNTREATED = None, None, None


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place: "cabinet 2". Its type is its name without the number, unless `kind` says otherwise."""

    name: str
    location: int                  # receptacles that share a location are reached together
    openable: bool
    opened: bool                   # at the start
    accepts: frozenset[str]        # object types that may be put here (PDDL canContain)
    kind: str = ""                 # in some bathrooms "bathtubbasin 1" is of type "sinkbasin"

    @property
    def type(self):
        """Its type, "cabinet"."""
        return self.kind or type_of(self.name)


@dataclass(frozen=True, slots=True)
class Thing:
    """An object: "apple 1". Its type is its name without the number."""

    name: str
    receptacle: str | None         # name of the receptacle it starts in, or None
    location: int                  # where it is sliced, not always where its receptacle is; -1: nowhere
    pickupable: bool = True
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    toggleable: bool = False
    sliceable: bool = False
    cool: bool = False             # at the start
    holds_things: bool = False     # a bowl, a box: examined, it says what is in it
    holding: tuple[str, ...] = ()  # names of the things in it; the engine never changes this
    also_in: tuple[str, ...] = ()  # further receptacles it starts in: real games list some things twice

    @property
    def type(self):
        """Its type, "apple"."""
        return type_of(self.name)


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins: an object of this type in such a receptacle, cleaned, heated or cooled as the task says."""

    task_type: str
    object: str                    # lower-case type, "apple"
    receptacle: str = ""           # lower-case type, "fridge"; "" for look_at_obj_in_light
    toggle: str = ""               # lower-case type, "desklamp"; "" but for look_at_obj_in_light


@dataclass(frozen=True, slots=True)
class Problem:
    """One game, before its first turn."""

    task_desc: str                 # "put a clean apple in fridge" (the intro adds the full stop)
    receptacles: tuple[Receptacle, ...]    # in the order in which the intro names them
    things: tuple[Thing, ...]      # in the order in which lists name them
    goal: Goal
    start: int = -1                # the location where the player starts; -1: where no receptacle is


def parse_goal(text, source=""):
    """The goal in a task's text, in any of ALFWorld's phrasings. ValueError, with its source, for another."""
    for pattern, task_type in TASKS:
        match = pattern.fullmatch(text)
        if match:
            return Goal(task_type, **match.groupdict())
    raise ValueError(f"{source}{': ' * bool(source)}task {text!r}: not one of ALFWorld's phrasings")


@lru_cache(maxsize=4096)
def type_of(name):
    """The type in a name: "apple" of "apple 1"."""
    return name.rpartition(" ")[0]


def listing(names, article="a "):
    """As the game lists things: "a cup 1, a pan 2, and a mug 1"; "nothing" for none."""
    *first, last = [article + name for name in names] or ["nothing"]
    return f"{', '.join(first)}, and {last}" if first else last


def problem_of(task: Task) -> Problem:
    """The task's problem; one that is still text, as games.PddlText is, parses itself now.

    Raises ValueError naming the game whose text is broken.
    """
    return task.problem.parse() if hasattr(task.problem, "parse") else task.problem
