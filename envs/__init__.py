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

    id: str            # "L0/17" for a generated room, the game's relative path for a real one, "boil/3" in ScienceWorld
    split: str         # "train", "dev", "L0", "L1", "L2"; "valid_train" ... for real games
    task_type: str     # ALFWorld's name, "pick_clean_then_place_in_recep", ...; ScienceWorld's, "boil", ...
    problem: object    # what the environment needs to start it


class Reply(NamedTuple):
    """What an environment says after `reset` and after each command."""

    observation: str
    admissible: list[str]    # commands that would do something now, sorted; in ScienceWorld templates, "open OBJ"
    won: bool
    done: bool               # the game takes no more commands; the turn limit is the player's to keep
    objects: tuple[str, ...] = ()        # what may stand for OBJ, where `admissible` holds templates
    score_100: float | None = None       # the game's own score so far, 0 to 100, where it has one
    taken: bool | None = None            # whether the last command was; None: the list before it tells


class EpisodeLost(RuntimeError):
    """What ran the game died or hung. The next reset has another; the episode has to start again."""


class Env(Protocol):
    """The three methods that an environment needs.

    One whose games run in other processes also has `send` ("reset" or "step", and its arguments) and
    `receive` (the Reply to what was sent), so that all of them get their command before any is waited for; its
    `reset` and `step` are a send and a receive. Both verbs may raise EpisodeLost.
    """

    def reset(self, task: Task, seed: int = 0) -> Reply: ...

    def step(self, command: str) -> Reply: ...

    def close(self) -> None: ...


def make_envs(name, n):
    """n environments that can be played at once: "household" (built in), "alfworld", "scienceworld" (the real
    engines). Raises ValueError for an unknown name or one whose package is not installed."""
    if name == "household":
        from envs.household import Household
        return [Household() for _ in range(n)]
    if name == "alfworld":
        from envs import alfworld
        return alfworld.make(n)
    if name == "scienceworld":
        from envs import scienceworld
        return scienceworld.make(n)
    raise ValueError(f"--env={name}: expected household, alfworld or scienceworld")


def engine_versions(name):
    """Versions of the packages that run an environment's games; none for the built-in one."""
    if name == "alfworld":
        from envs import alfworld
        return alfworld.versions()
    if name == "scienceworld":
        from envs import scienceworld
        return scienceworld.versions()
    return {}
