"""What an environment is: tasks in, text out.

An environment plays one task at a time through two verbs, `reset` and `step`, which both answer with a
`Reply`; `close` frees what it holds. The same task and seed always give the same first observation: a GRPO
group relies on it.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

NOTHING = "Nothing happens."      # ALFWorld's answer to a command that it does not take


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: the game, and where it comes from. Equal ids mean the same start."""

    id: str            # "L0/17" for a generated room, the game's relative path for a real one
    split: str         # "train", "dev", "L0", "L1", "L2"; "valid_train" ... for real games
    task_type: str     # ALFWorld's name, "pick_clean_then_place_in_recep", ...
    problem: object    # what the environment needs to start it


class Reply(NamedTuple):
    """What an environment says after `reset` and after each command."""

    observation: str
    admissible: list[str]    # commands that would do something now, sorted
    won: bool
    done: bool               # the game takes no more commands; the turn limit is the player's to keep


class Env(Protocol):
    """The three methods that `rollout.play` uses."""

    def reset(self, task: Task, seed: int = 0) -> Reply: ...

    def step(self, command: str) -> Reply: ...

    def close(self) -> None: ...


def make_env(name):
    """A new environment: "household" is the built-in text game. Raises ValueError for an unknown name."""
    if name == "household":
        from envs.household import Household
        return Household()
    raise ValueError(f"--env={name}: expected household")
