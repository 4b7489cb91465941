"""ALFWorld's text game in pure Python. (The engine is being written; the records below are the contract.)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place: "cabinet 2". Its type is its name without the number."""

    name: str
    location: int                  # receptacles that share a location are reached together
    openable: bool
    opened: bool                   # at the start
    accepts: frozenset[str]        # object types that may be put here (PDDL canContain)


@dataclass(frozen=True, slots=True)
class Thing:
    """An object: "apple 1". Its type is its name without the number."""

    name: str
    receptacle: str | None         # name of the receptacle it starts in, or None
    location: int
    pickupable: bool = True
    cleanable: bool = False
    heatable: bool = False
    coolable: bool = False
    toggleable: bool = False
    sliceable: bool = False


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins: an object of this type in a receptacle of that type, once cleaned, heated or cooled as the task says."""

    task_type: str
    object: str                    # lower-case type, "apple"
    receptacle: str = ""           # lower-case type, "fridge"; "" for look_at_obj_in_light
    toggle: str = ""               # lower-case type, "desklamp"; "" but for look_at_obj_in_light


@dataclass(frozen=True, slots=True)
class Problem:
    """One game, before its first turn."""

    task_desc: str                 # "put a clean apple in fridge" (the intro adds the full stop as the stock engine does)
    receptacles: tuple[Receptacle, ...]    # in the order in which the intro names them
    things: tuple[Thing, ...]
    goal: Goal
