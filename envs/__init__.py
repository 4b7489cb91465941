"""What a world is: games to play, the tasks of them, and whatever else it has for training.

`--env NAME` finds class `World` in envs/NAME.py. Its environments play one task at a time through two verbs,
`reset` and `step`, which both answer with a `Reply`; `close` frees what they hold. The same task and seed
always give the same first observation: a GRPO group relies on it. The folder needs nothing else of this
project: copy it alone into another. Left out: observations that are not text.

    python -m envs.household                # play a generated room; also envs.alfworld, envs.scienceworld
"""

import hashlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: the game, and where it comes from. Equal ids mean the same start."""

    id: str           # "L0/17" for a generated room, a real game's relative path, "boil/3" in ScienceWorld
    split: str        # "train", "dev", "L0", "L1", "L2"; "valid_train" ... for real games
    task_type: str    # ALFWorld's name, "pick_clean_then_place_in_recep", ...; ScienceWorld's, "boil", ...
    problem: object   # what the environment needs to start it


class Reply(NamedTuple):
    """What an environment says after `reset` and after each command."""

    observation: str
    admissible: list[str]   # commands that would do something now, sorted; or templates, "open OBJ"
    won: bool
    done: bool              # the game takes no more commands; the turn limit is the player's to keep
    objects: tuple[str, ...] = ()        # what may stand for OBJ, where `admissible` holds templates
    score_100: float | None = None       # the game's own score so far, 0 to 100, where it has one
    taken: bool | None = None            # whether the last command was; None: the list before it tells


class EpisodeLost(RuntimeError):
    """What ran the game died or hung. The next reset has another; the episode has to start again."""


class Env(Protocol):
    """The three methods that an environment needs.

    An environment whose games run in other processes also has `send` ("reset" or "step", and its arguments)
    and `receive` (the Reply to what was sent), so that all get their command before any is waited for; its
    `reset` and `step` are a send and a receive. Both verbs may raise EpisodeLost.
    """

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start the task; the first observation."""

    def step(self, command: str) -> Reply:
        """Do a command; what comes of it."""

    def close(self) -> None:
        """Free what the game holds."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An expert's episode. replies[0] is the intro's; replies[i + 1] answers commands[i]."""

    replies: list[Reply]
    commands: list[str]
    mistakes: list[bool]       # which commands were injected
    tries: int = 1             # how often it was played, where the game has chance or an engine that dies

    @property
    def won(self):
        """Whether the last reply says so."""
        return self.replies[-1].won

    @property
    def observations(self):
        """What the player saw: one more than there are commands."""
        return [reply.observation for reply in self.replies]


class World:
    """One world: its games, its tasks, and what else it has.

    A world needs `make`, `train`, `split` and `words`; the rest has a default, and what it lacks is None. It
    is made of the flags of its own, the task types that RL trains on ("part" leaves L2's out, "all" does
    not), and the run's seed. That is quick and raises ValueError, with flag and value, for settings that
    cannot be right.
    """

    @dataclass(frozen=True)
    class Settings:
        """Flags of its own: one field a flag, its default and metadata={"help": meaning and unit}."""

    defaults = {}                        # what it changes of the run's other defaults: {"slots": 16}
    splits = ("dev", "L0", "L1", "L2")   # what can be evaluated
    captions = {}                        # {split: what its tasks are, a clause}, for tables and the report
    nothing = "Nothing happens."         # the observation that means: refused, nothing has changed
    searches = ()                        # verbs, first words, of commands that look for something
    templates = False                    # whether replies list templates, "open OBJ", and not commands

    # What a world may have
    expert = None      # expert(envs): has .show(task, seed, mistake_rate, max_turns) and .restarts so far
    coach = None       # coach(task, seed): the expert beside a player; has .see(observation, command=None),
                       # the first observation or a command's answer, and .advice(), a command
    oracle = None      # oracle(observations, commands): "good", "bad" or None for each, from its prefix
    labels = {}        # {kind: function(episode) -> a label per turn}: kinds of labels beside the judge's

    def __init__(self, settings=None, train_types="part", seed=0):
        self.settings = self.Settings() if settings is None else settings
        self.train_types, self.seed = train_types, seed

    def make(self, n):
        """n environments that can be played at once. Raises ValueError where a package is missing."""
        raise NotImplementedError

    def train(self, types, start, n):
        """n training tasks of "part" or "all" types, from place `start` of an endless sequence that the seed
        fixes."""
        raise NotImplementedError

    def split(self, name):
        """Every task of a split, in a fixed order. Raises ValueError for a split that is absent or empty."""
        raise NotImplementedError

    def words(self):
        """Phrases that are one token each in the small model's vocabulary, in the order of their ids."""
        raise NotImplementedError

    def unseen(self):
        """The splits whose tasks this training leaves unseen: what is evaluated unless one says otherwise."""
        return [name for name in self.splits if name != "dev"]

    def games(self):
        """What is played, in words."""
        return type(self).__module__.rpartition(".")[2]

    def versions(self):
        """{package: version} of what runs the games."""
        return {}

    def text_of(self, task):
        """What tells a task from another of its id: a game file's text; "" where the id says all."""
        return ""

    def tasks_hash(self, tasks):
        """The first 16 hex digits of a SHA-256 over the tasks in order: equal games, equal hash."""
        digest = hashlib.sha256()
        for task in tasks:
            digest.update(f"{task.id}\n{self.text_of(task)}\n".encode())
        return digest.hexdigest()[:16]

    def warning(self):
        """What nobody who sees a number of this world must miss: a sentence, or ""."""
        return ""

    @staticmethod
    def note(settings):
        """What a report must say of a run with these settings, {flag: value}: a sentence, or ""."""
        return ""


def names():
    """The worlds that there are: the files of this folder but the private ones, sorted. Imports none."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("_"))


def find(name):
    """Class World of envs/NAME.py. Raises ValueError for a name without a file and a file without it."""
    if name not in names():
        raise ValueError(f"--env={name}: expected one of {', '.join(names())}")
    try:
        module = import_module(f"envs.{name}")
    except Exception as error:           # of any kind: the file may be anybody's, and its error is what helps
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"--env={name}: cannot import envs/{name}.py: {reason}") from error
    world = getattr(module, "World", None)
    if not (isinstance(world, type) and issubclass(world, World)):
        raise ValueError(f"--env={name}: envs/{name}.py has no class World(envs.World)")
    return world
