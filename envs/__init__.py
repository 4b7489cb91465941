"""What an environment is: tasks in splits, games that play them, and what else it offers for training.

`--env NAME` is class `Environment` of envs/NAME.py, `--env path/to/file.py` that of any file. Its games play
one task at a time through `reset` and `step`, which both return a `Reply`. The same task and seed always give
the same first observation: a GRPO group relies on it. The folder needs nothing else of this project and can
be copied alone. Left out: observations that are not text.

    python -m envs.household                # play a generated room; also envs.alfworld, envs.scienceworld
"""

import hashlib
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One task to play. Equal ids mean the same start."""

    id: str           # "L0/17/look_at_obj_in_light"; a real game's relative path; in ScienceWorld "boil/3"
    split: str        # "train", "dev", "L0", "L1", "L2"; "valid_train" ... for real games
    task_type: str    # ALFWorld's name, "pick_clean_then_place_in_recep", ...; ScienceWorld's, "boil", ...
    problem: object   # what a game needs to start it


class Reply(NamedTuple):
    """What a game answers to `reset` and to each command; _checks.py tests it."""

    observation: str
    admissible: list[str] = ()           # commands that are possible now, in an order that the state fixes;
                                         # or templates, "open OBJ"; with templates, or empty, not listed: a
                                         # command is valid unless `taken` is False
    won: bool = False
    done: bool = False                   # no more commands are taken; the caller enforces the turn limit
    objects: tuple[str, ...] = ()        # what may replace OBJ, if `admissible` holds templates
    score_100: float | None = None       # the game's own score so far, -100 to 100, if it has one
    taken: bool | None = None            # whether the last command was accepted; None: unknown
    reward: float = 0.0                  # for the last command alone, added to the outcome's
    ended: str = ""                      # with done: why, in a word or two, such as "sold out"
    answers: tuple[str, ...] = ()        # of the functions that the command called: messages of role "tool"


class EpisodeLost(RuntimeError):
    """The game's engine died or hung. The next reset has a new one; the episode must be started again."""


# What the run calls of a game and of an expert: {method: its parameters}
GAME = {"reset": ("task", "seed"), "step": ("command",)}
EXPERT = {"show": ("task", "seed", "mistake_rate", "max_turns")}
ONLINE_EXPERT = {"observe": ("observation", "command"), "command": ()}


class Game(Protocol):
    """One playable instance, which plays one task at a time (Gymnasium calls this an environment).

    A game that runs in another process has both `send` ("reset" or "step", and its arguments) and `receive`
    (the Reply), so that all games can work before any is waited for; its `reset` and `step` are a send
    and a receive. Both may raise EpisodeLost. Of a game without them, an attribute `time_limit_s` limits the
    seconds of each call: it is interrupted, as if it had raised EpisodeLost.
    """

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start a task; the reply holds the first observation."""

    def step(self, command: str) -> Reply:
        """Carry out a command; the reply holds its result."""

    def close(self) -> None:
        """Free the game's resources."""


class SentGame:
    """A Game whose `reset` and `step` are a `send` and a `receive`, which a subclass has."""

    def reset(self, task: Task, seed: int = 0) -> Reply:
        """Start a task. Raises what `send` and `receive` raise."""
        self.send("reset", task, seed)
        return self.receive()

    def step(self, command: str) -> Reply:
        """Carry out a command. Raises what `send` and `receive` raise."""
        self.send("step", command)
        return self.receive()


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An expert's episode. replies[0] is the first observation; replies[i + 1] answers commands[i]."""

    replies: list[Reply]
    commands: list[str]
    mistakes: list[bool]       # which commands are injected mistakes
    tries: int = 1             # attempts, for games with randomness or an engine that dies

    @property
    def won(self):
        """Whether the episode was won."""
        return self.replies[-1].won

    @property
    def observations(self):
        """The observations: one more than there are commands."""
        return [reply.observation for reply in self.replies]


class MessageLengths:
    """How many tokens the messages of recorded episodes have, from lengths.json.

    `python -m lab.bench.lengths` writes that file: an expert plays, with mistakes. episodes: of each episode,
    the tokens of its observations and of its lists of admissible commands, a list each, with one entry a
    turn. vocab_size: of the tokenizer that counted them. What surrounds a text, the chat template, rules and
    the response's format, is not counted.
    """

    def __init__(self, name):
        found = json.loads((Path(__file__).parent / "lengths.json").read_text(encoding="utf-8"))
        self.vocab_size, self.episodes = found["vocab_size"], found["episodes"][name]

    def draw(self, rng, turns=None, listed=True):
        """Tokens of each message of a random episode: as recorded, or of `turns` turns.

        Then later messages are drawn from that episode's, with replacement: large rooms stay large. rng:
        random.Random. listed: whether messages list the admissible commands.
        """
        observations, commands = rng.choice(self.episodes)
        first, *later = [a + b for a, b in zip(observations, commands)] if listed else observations
        return [first, *(later if turns is None else rng.choices(later or [first], k=turns - 1))]


class Environment:
    """An environment: its tasks, its games, and what else it offers. Base class of every --env.

    A subclass must define `make`, `train_tasks` and `split_tasks`; the rest has defaults, and None means that
    it is not offered. Public names that are not declared here are refused: a helper's name begins with an
    underscore. The constructor gets the environment's own settings, the task types that RL trains on ("part"
    leaves out L2's, "all" does not) and the run's seed. It must be quick, and raise ValueError with flag and
    value for settings that cannot be right.
    """

    @dataclass(frozen=True)
    class Settings:
        """The environment's own flags: fields with a default and metadata={"help": meaning and unit}."""

    _required = ("make", "train_tasks", "split_tasks")
    _hooks = {"expert": ("games",), "online_expert": ("task", "seed"), "parse": ("text",),
              "oracle": ("observations", "commands")}
    defaults = {}                        # what it changes of the run's other defaults: {"slots": 16}
    splits = ("dev", "L0", "L1", "L2")   # splits that can be evaluated
    captions = {}                        # {split: what its tasks are, a clause}, for tables and the report
    noop_message = "Nothing happens."    # the observation after a refused command, which changed nothing
    rules = ""                           # opens the first prompt of a model that writes; "": lm.chat.RULES
    ask = ""           # how to answer, in each of its prompts (of `plain` in the first); "": as the run says.
                       # Define it and `parse` together: either one replaces the run's format
    search_verbs = ()                    # first words of commands that search for something
    templates = False                    # whether replies list templates, "open OBJ", instead of commands
    known_phrases = ()                   # some of `vocabulary`'s phrases, if listing all of them takes long
    sources = ()                         # names of its settings that say where its games are: these may move,
                                         # since equal games have an equal `tasks_hash`
    free_settings = ()                   # names of its settings that change no game, such as a number of
                                         # processes: these may differ when a run or an evaluation goes on

    # expert(games): has .show(task, seed, mistake_rate, max_turns) -> Demonstration, and .restarts, the
    # number of its engines that died
    expert = None
    # online_expert(task, seed): an expert that follows another player. It has .observe(observation,
    # command=None), for the first observation and for each command with its reply, and .command(), what it
    # would do now: a text that `parse` returns unchanged
    online_expert = None
    # oracle(observations, commands): "good", "bad" or None for each command, by what was known at that time
    oracle = None
    # parse(text): the command in a response, without the thought before it, or None; a demonstrated command
    # must be read back as itself. None: the run's format, <action>COMMAND</action>, or all that a small model
    # writes
    parse = None
    # {kind: function(episode) -> a label per turn}: further kinds for --judge-labels
    labels = {}

    def __init__(self, settings=None, train_types="part", seed=0):
        self.settings = self.Settings() if settings is None else settings
        self.train_types, self.seed = train_types, seed

    def make(self, n):
        """n Games that can be played at the same time. ValueError if a package is missing."""
        raise NotImplementedError

    def train_tasks(self, types, start, n):
        """n training tasks, from index `start` of an endless sequence that the seed fixes.

        types: "all", or "part": without the task types that are held out for L2.
        """
        raise NotImplementedError

    def split_tasks(self, name):
        """All tasks of a split, in a fixed order. ValueError for a split that is missing or empty."""
        raise NotImplementedError

    def vocabulary(self):
        """Phrases that are one token each in the small model's tokenizer, in the order of their ids."""
        return []

    def tools(self):
        """JSON schemas of functions for the chat template of a model that writes, see envs/tools.py."""
        return []

    def message_lengths(self):
        """The MessageLengths of its games; None: not recorded."""
        return None

    def verb(self, command):
        """What kind of command this is, its first word: the judge is measured within each kind, too."""
        return command.partition(" ")[0]

    def unseen_splits(self):
        """The splits that are evaluated by default: those that fit what is trained on."""
        return [name for name in self.splits if name != "dev"]

    def description(self):
        """What is played, in words."""
        return Path(inspect.getfile(type(self))).stem

    def versions(self):
        """{package: version} of the packages that run the games. ValueError if one is missing."""
        return {}

    def task_content(self, task):
        """Content that distinguishes tasks that share an id: a game file's text; "" if the id says all."""
        return ""

    def tasks_hash(self, tasks):
        """First 16 hex digits of the SHA-256 over the tasks in order: equal games, equal hash."""
        digest = hashlib.sha256()
        for task in tasks:
            text = f"{task.id}\n{self.task_content(task)}\n"
            digest.update(text.encode("utf-8", "surrogatepass"))           # a name of a file may be any bytes
        return digest.hexdigest()[:16]

    def warning(self):
        """What every reader of this environment's numbers must know: a sentence, or ""."""
        return ""

    @staticmethod
    def note(settings):
        """What a report must say about a run with these settings, {flag: value}: a sentence, or ""."""
        return ""
