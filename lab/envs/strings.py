"""Strings: apply a sequence of operations to a string and write every intermediate result. One turn.

The task gives a string and k operations; the response is the string after each of them, k strings, and is
correct if its last string is. Pretraining has problems of one or two operations on six letters (split "id").
Four axes lead out of this distribution: more operations (depth), longer strings (length), other letters
(representation: capitals, which pretraining only copies), and held-out pairs of consecutive operations, of
which pretraining has each alone (composition). --rho mixes a small share of all four into pretraining. Made
for lab/studies/origin.py, which measures what GRPO adds to such a base model (arXiv:2510.15990). Left out:
operations that change the length of a string.

    python gcd.py --env lab/envs/strings.py --rho 0.01 --split depth
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field

import envs
from envs import Demonstration, Reply, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COPY, COPY_SHARE = "copy", 1 / 8       # the only operation on capitals in pretraining, and its share there
PRETRAINED_DEPTH = 2                   # most operations of a problem in pretraining
DEPTHS, LENGTHS = (3, 4, 6), (8, 10, 12)   # operations, and letters of a string, outside of pretraining
AXES = ("depth", "length", "representation", "composition")
PARTS = 16                             # hash buckets of problems: 0 for splits, 1 for dev, the rest to train
MAX_DRAWS = 1000                       # draws until the search for a fitting problem fails
MAX_LISTED = 4096                      # most possible responses that a reply lists


# Operations: functions of a string and its alphabet, in order

def rotate(text, letters):
    """Move the first letter to the end: abcd -> bcda."""
    return text[1:] + text[:1]


def reverse(text, letters):
    """Reverse the string: abcd -> dcba."""
    return text[::-1]


def swap(text, letters):
    """Exchange the first and the last letter: abcd -> dbca."""
    return text[-1] + text[1:-1] + text[0] if len(text) > 1 else text


def shift(text, letters):
    """Replace each letter by the next of the alphabet, the last by the first: abcd -> bcde."""
    return "".join(letters[(letters.index(letter) + 1) % len(letters)] for letter in text)


def double(text, letters):
    """Write each letter twice, cut to the old length: abcd -> aabb."""
    return "".join(letter * 2 for letter in text)[:len(text)]


def mirror(text, letters):
    """The first half, then its reverse: abcd -> abba, abcde -> abcba."""
    half = text[:(len(text) + 1) // 2]
    return half + half[::-1][len(text) % 2:]


OPERATIONS = {function.__name__: function for function in (rotate, reverse, swap, shift, double, mirror)}
NAMES = tuple(OPERATIONS)
HELD_OUT = tuple((name, NAMES[(i + 2) % len(NAMES)]) for i, name in enumerate(NAMES))   # pairs of operations


def solution(text, operations, letters):
    """The string after each operation."""
    results = []
    for name in operations:
        text = text if name == COPY else OPERATIONS[name](text, letters)
        results.append(text)
    return results


def has_held_out_pair(operations):
    """Whether two consecutive operations are a pair that pretraining leaves out."""
    return any(pair in HELD_OUT for pair in itertools.pairwise(operations))


@dataclass(frozen=True, slots=True)
class Problem:
    """A string, its operations and its alphabet. kind: an axis, "id" or "copy"."""

    kind: str
    text: str
    operations: tuple[str, ...]
    letters: str

    def __str__(self):
        return " ".join([self.text, *self.operations])

    @property
    def part(self):
        """Its hash bucket, 0 to PARTS - 1, by string and operations alone."""
        return hashlib.sha256(str(self).encode()).digest()[0] % PARTS

    @property
    def response(self):
        """The correct response: every intermediate result."""
        return " ".join(solution(self.text, self.operations, self.letters))

    def is_solved_by(self, command):
        """Whether the last string of a response is the last of the solution."""
        return command.split(" ")[-1] == self.response.split(" ")[-1]

    def responses(self):
        """All responses of the solution's shape, sorted; [] if there are more than MAX_LISTED."""
        lengths = [len(self.text)] * len(self.operations)
        if len(self.letters) ** sum(lengths) > MAX_LISTED:
            return []
        strings = ["".join(letters) for letters in itertools.product(self.letters, repeat=lengths[0])]
        return sorted(" ".join(response) for response in itertools.product(strings, repeat=len(lengths)))


class Game:
    """A game of one problem and one response. Every response is accepted, and is correct or not."""

    def reset(self, task, seed=0):
        self.problem = task.problem
        return Reply(str(self.problem), self.problem.responses(), False, False)

    def step(self, command):
        won = self.problem.is_solved_by(command)
        return Reply("Right." if won else "Wrong.", [], won, True, taken=True)

    def close(self):
        pass


class Expert:
    """An expert that writes the solution."""

    restarts = 0

    def show(self, task, seed, mistake_rate, max_turns):
        """The solution as one command. mistake_rate is ignored: no later turn could correct a mistake."""
        game = Game()
        return Demonstration([game.reset(task), game.step(task.problem.response)], [task.problem.response],
                             [False])


class Environment(envs.Environment):
    """Strings. The cold start ("all") imitates the mixture of --rho, RL ("part") trains on --split."""

    @dataclass(frozen=True)
    class Settings:
        """The problems of pretraining and of RL."""
        split: str = field(default="id", metadata={
            "help": "problems of RL: id (as in pretraining), or beyond it on one axis",
            "choices": ("id", *AXES)})
        rho: float = field(default=0.0, metadata={
            "help": "share of pretraining from each of the four axes", "low": 0, "high": 0.2})
        k: int = field(default=0, metadata={
            "help": "operations in a problem of RL; 0: any that --split has", "low": 0,
            "high": max(DEPTHS)})
        omit_pair: int = field(default=-1, metadata={
            "help": "the held-out pair of operations, from 0, that RL on --split composition omits; "
                    "-1: none", "low": -1, "high": len(HELD_OUT) - 1})
        letters: int = field(default=12, metadata={"help": "letters of the alphabet", "low": 2, "high": 26})
        length: int = field(default=6, metadata={"help": "letters of a string in pretraining", "low": 2,
                                                 "high": 6})
        problems: int = field(default=64, metadata={"help": "problems in each split", "low": 1,
                                                    "high": 10**4})

    defaults = {"max_turns": 1, "context": 96, "max_response_tokens": 48, "gcd": False,
                "judge_demonstrations": 0, "invalid_penalty": 0.0, "mistake_rate": 0.0}
    captions = {"dev": "a fifth of each kind, for tuning", "id": "as in pretraining",
                "depth": "3, 4 or 6 operations", "length": "strings of 8, 10 or 12 letters",
                "representation": "capitals", "composition": "a held-out pair of operations"}
    splits = tuple(captions)

    def __init__(self, settings=None, train_types="part", seed=0):
        super().__init__(settings, train_types, seed)
        chosen = self.settings
        if chosen.k and chosen.k not in self._depths(chosen.split):
            known = " or ".join(map(str, self._depths(chosen.split)))
            raise ValueError(f"--k={chosen.k}: --split {chosen.split} has {known}; pretraining has at most "
                             f"{PRETRAINED_DEPTH}, --split depth has {', '.join(map(str, DEPTHS))}")
        if chosen.omit_pair >= 0 and chosen.split != "composition":
            raise ValueError(f"--omit-pair={chosen.omit_pair}: --split {chosen.split} has no held-out pair; "
                             "--split composition has")
        if chosen.problems < len(HELD_OUT):
            raise ValueError(f"--problems={chosen.problems}: fewer than the {len(HELD_OUT)} held-out pairs "
                             "of operations; the split composition has each of them")

    def make(self, n):
        """n games."""
        return [Game() for _ in range(n)]

    @staticmethod
    def _depths(kind):
        """The possible numbers of operations in a problem of this kind."""
        if kind == "depth":
            return DEPTHS
        return (PRETRAINED_DEPTH,) if kind == "composition" else tuple(range(1, PRETRAINED_DEPTH + 1))

    def _draw(self, kind, rng, k=0):
        """Draw a problem of this kind, with k operations (0: any number that the kind has)."""
        settings = self.settings
        letters = LETTERS[:settings.letters]
        if kind in ("representation", COPY):
            letters = letters.upper()
        length = rng.choice(LENGTHS) if kind == "length" else settings.length
        text = "".join(rng.choices(letters, k=length))
        if kind == COPY:
            return Problem(kind, text, (COPY,), letters)
        if kind == "composition":
            return Problem(kind, text, rng.choice(HELD_OUT), letters)
        operations = HELD_OUT[0]
        k = k or rng.choice(self._depths(kind))
        while has_held_out_pair(operations):
            operations = tuple(rng.choices(NAMES, k=k))
        return Problem(kind, text, operations, letters)

    def _named_problem(self, name, kind, fits=lambda problem: problem.part > 1, k=0):
        """The first problem that fits, drawn with `name` as the seed. ValueError if none is found.

        fits: by default, the problem is one to train on.
        """
        rng = random.Random(name)
        for _ in range(MAX_DRAWS):
            if fits(problem := self._draw(kind, rng, k)):
                return problem
        raise ValueError(f"--letters={self.settings.letters} --length={self.settings.length}: too few "
                         f"problems of {kind} for --problems={self.settings.problems}")

    def train_tasks(self, types, start, n):
        """n training tasks: of the pretraining mixture for "all", else of --split."""
        return [self._pretraining_task(f"{self.seed} pretraining/{i}") if types == "all" else
                self._rl_task(f"{self.seed} {self.settings.split}/{i}") for i in range(start, start + n)]

    def _pretraining_task(self, name):
        """A task of pretraining: of each axis with probability rho, a copy, or "id"."""
        draw, rho = random.Random(f"{name} cell").random(), self.settings.rho
        kinds = [*AXES, COPY, "id"]
        edges = itertools.accumulate([rho] * len(AXES) + [COPY_SHARE, 1.0])
        kind = next(kind for kind, edge in zip(kinds, edges) if draw < edge)
        return Task(name, "train", kind, self._named_problem(name, kind))

    def _rl_task(self, name):
        """A training task of --split, without the pair of --omit-pair."""
        split, omitted = self.settings.split, self.settings.omit_pair
        return Task(name, "train", split, self._named_problem(name, split, lambda problem: (
            problem.part > 1 and (omitted < 0 or problem.operations != HELD_OUT[omitted])),
            self.settings.k))

    def split_tasks(self, name):
        """The split's distinct problems, none of which is trained on.

        Numbers of operations, lengths and held-out pairs take turns, so that each is equally frequent.
        """
        problems, part = [], 1 if name == "dev" else 0
        for i in range(self.settings.problems):
            kind, turn = (("id", *AXES)[i % 5], i // 5) if name == "dev" else (name, i)
            depths, pair = self._depths(kind), HELD_OUT[turn % len(HELD_OUT)]
            problems.append(self._named_problem(f"{name}/{i}", kind, lambda problem: (
                problem.part == part and problem not in problems
                and len(problem.operations) == depths[turn % len(depths)]
                and (kind != "length" or len(problem.text) == LENGTHS[turn % len(LENGTHS)])
                and (kind != "composition" or problem.operations == pair))))
        return [Task(f"{name}/{i}", name, problem.kind, problem) for i, problem in enumerate(problems)]

    def vocabulary(self):
        """The operations, each with its leading space, and the answers; every letter is a token anyway."""
        return [*(f" {name}" for name in (*NAMES, COPY)), "Right.", "Wrong.", self.noop_message]

    def expert(self, games):
        """An expert that writes the solution."""
        return Expert()

    def task_content(self, task):
        """The problem as text."""
        return str(task.problem)
