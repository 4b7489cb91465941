"""Strings: operations to be done one after the other, every string on the way written out. One turn.

The task names a string and k operations; the response is the string after each of them, k strings, and it is
right if its last string is. What pretraining saw ("id": one or two operations, six letters) ends on four
axes: more operations (depth), longer strings (length), other letters (representation: capitals, which
pretraining only copies), pairs of operations that it never saw one after the other, though each of both
(composition). --rho puts a little of all four into pretraining. Made for studies/origin.py, which asks what
GRPO adds to such a base (arXiv:2510.15990). Left out: strings that become longer or shorter.

    python gcd.py --env strings --rho 0.01 --split depth
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field

import envs
from envs import Demonstration, Reply, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
COPY, COPIES = "copy", 1 / 8           # what capitals are seen in, and this share of pretraining
SEEN = 2                               # operations that pretraining has at most
DEPTHS, LENGTHS = (3, 4, 6), (8, 10, 12)   # operations, and letters of a string, beyond it
AXES = ("depth", "length", "representation", "composition")
PARTS = 16                             # of all problems: one for the splits, one for dev, the rest to train
TRIES = 1000                           # draws until a problem of the wanted part is given up
MOST = 4096                            # responses that are worth listing


# Operations: of a string and the letters that it is of, in their order

def rotate(text, letters):
    """The first letter becomes the last: abcd -> bcda."""
    return text[1:] + text[:1]


def reverse(text, letters):
    """abcd -> dcba."""
    return text[::-1]


def swap(text, letters):
    """The first and the last letter change places: abcd -> dbca."""
    return text[-1] + text[1:-1] + text[0] if len(text) > 1 else text


def shift(text, letters):
    """Each letter becomes the next one, the last the first: abcd -> bcde."""
    return "".join(letters[(letters.index(letter) + 1) % len(letters)] for letter in text)


def double(text, letters):
    """Each letter twice, cut to the old length: abcd -> aabb."""
    return "".join(letter * 2 for letter in text)[:len(text)]


def mirror(text, letters):
    """The first half, then it backwards: abcd -> abba, abcde -> abcba."""
    half = text[:(len(text) + 1) // 2]
    return half + half[::-1][len(text) % 2:]


OPERATIONS = {function.__name__: function for function in (rotate, reverse, swap, shift, double, mirror)}
NAMES = tuple(OPERATIONS)
WITHHELD = tuple((name, NAMES[(i + 2) % len(NAMES)]) for i, name in enumerate(NAMES))


def solution(text, operations, letters):
    """The string after each operation."""
    written = []
    for name in operations:
        text = text if name == COPY else OPERATIONS[name](text, letters)
        written.append(text)
    return written


def withheld(operations):
    """Whether an operation follows another that it never follows in pretraining."""
    return any(pair in WITHHELD for pair in itertools.pairwise(operations))


@dataclass(frozen=True, slots=True)
class Problem:
    """A string, what to do with it, and the letters that it is of; cell: what it was drawn as."""

    cell: str
    text: str
    operations: tuple[str, ...]
    letters: str

    def __str__(self):
        return " ".join([self.text, *self.operations])

    @property
    def part(self):
        """Which of PARTS it belongs to, by what it says alone."""
        return hashlib.sha256(str(self).encode()).digest()[0] % PARTS

    @property
    def response(self):
        """What a perfect response says."""
        return " ".join(solution(self.text, self.operations, self.letters))

    def right(self, command):
        """Whether the last string of a response is the last string of the solution."""
        return command.split(" ")[-1] == self.response.split(" ")[-1]

    def responses(self):
        """Every response of strings as many and as long as the solution's, if these are at most MOST."""
        lengths = [len(self.text)] * len(self.operations)
        if len(self.letters) ** sum(lengths) > MOST:
            return []
        strings = ["".join(letters) for letters in itertools.product(self.letters, repeat=lengths[0])]
        return sorted(" ".join(written) for written in itertools.product(strings, repeat=len(lengths)))


class Game:
    """An environment: one problem, one response. Every response is taken; it is right or not."""

    def reset(self, task, seed=0):
        self.problem = task.problem
        return Reply(str(self.problem), self.problem.responses(), False, False)

    def step(self, command):
        won = self.problem.right(command)
        return Reply("Right." if won else "Wrong.", [], won, True, taken=True)

    def close(self):
        pass


class Expert:
    """Writes the solution."""

    restarts = 0

    def show(self, task, seed, mistake_rate, max_turns):
        """The solution as one command. mistake_rate: not looked at, for nothing could mend a mistake."""
        game = Game()
        return Demonstration([game.reset(task), game.step(task.problem.response)], [task.problem.response],
                             [False])


class World(envs.World):
    """Strings. The cold start ("all") imitates what --rho says, RL ("part") trains on --split."""

    @dataclass(frozen=True)
    class Settings:
        """What pretraining holds, and what RL trains on."""
        split: str = field(default="id", metadata={
            "help": "what RL trains on: id (as in pretraining), or one axis away from it",
            "choices": ("id", *AXES)})
        rho: float = field(default=0.0, metadata={
            "help": "share of pretraining that is of an axis, for each of the four", "low": 0, "high": 0.2})
        k: int = field(default=0, metadata={
            "help": "operations in RL's problems; 0: all numbers that --split has", "low": 0,
            "high": max(DEPTHS)})
        letters: int = field(default=12, metadata={"help": "of the alphabet", "low": 2, "high": 26})
        length: int = field(default=6, metadata={"help": "letters of a string in pretraining", "low": 2,
                                                 "high": 6})
        problems: int = field(default=64, metadata={"help": "in each split", "low": 1, "high": 10**4})

    defaults = {"max_turns": 1, "context": 96, "max_response_tokens": 48, "gcd": False,
                "judge_demonstrations": 0, "invalid_penalty": 0.0, "mistake_rate": 0.0}
    captions = {"dev": "a fifth of each kind, to tune on", "id": "what pretraining saw",
                "depth": "3, 4 or 6 operations", "length": "strings of 8, 10 or 12 letters",
                "representation": "capitals", "composition": "two operations in an order not seen"}
    splits = tuple(captions)

    def __init__(self, settings=None, train_types="part", seed=0):
        super().__init__(settings, train_types, seed)
        chosen = self.settings
        if chosen.k and chosen.k not in self.depths(chosen.split):
            known = " or ".join(map(str, self.depths(chosen.split)))
            raise ValueError(f"--k={chosen.k}: --split {chosen.split} has {known}; pretraining saw at most "
                             f"{SEEN}, --split depth has {', '.join(map(str, DEPTHS))}")
        if chosen.problems < len(WITHHELD):
            raise ValueError(f"--problems={chosen.problems}: fewer than the {len(WITHHELD)} pairs of "
                             "operations that are withheld; composition has to try each")

    def make(self, n):
        """n games."""
        return [Game() for _ in range(n)]

    @staticmethod
    def depths(cell):
        """How many operations the problems of an axis (or "id") have."""
        return DEPTHS if cell == "depth" else (SEEN,) if cell == "composition" else tuple(range(1, SEEN + 1))

    def draw(self, cell, rng, k=0):
        """A problem of a split, of an axis, or of "copy"."""
        settings = self.settings
        letters = LETTERS[:settings.letters]
        if cell in ("representation", COPY):
            letters = letters.upper()
        length = rng.choice(LENGTHS) if cell == "length" else settings.length
        text = "".join(rng.choices(letters, k=length))
        if cell == COPY:
            return Problem(cell, text, (COPY,), letters)
        if cell == "composition":
            return Problem(cell, text, rng.choice(WITHHELD), letters)
        operations = WITHHELD[0]
        k = k or rng.choice(self.depths(cell))
        while withheld(operations):
            operations = tuple(rng.choices(NAMES, k=k))
        return Problem(cell, text, operations, letters)

    def drawn(self, name, cell, fits=lambda problem: problem.part > 1, k=0):
        """A problem by its name, to train on or as it has to fit. ValueError if none is found."""
        rng = random.Random(name)
        for _ in range(TRIES):
            if fits(problem := self.draw(cell, rng, k)):
                return problem
        raise ValueError(f"--letters={self.settings.letters} --length={self.settings.length}: too few "
                         f"problems of {cell} for --problems={self.settings.problems}")

    def train(self, types, start, n):
        """n training tasks: the cold start's mixture for "all", else --split's."""
        return [self.pretrained(f"{self.seed} pretraining/{i}") if types == "all" else
                self.task(f"{self.seed} {self.settings.split}/{i}") for i in range(start, start + n)]

    def pretrained(self, name):
        """A task of the cold start."""
        draw, rho = random.Random(f"{name} cell").random(), self.settings.rho
        cells = [*AXES, COPY, "id"]
        edges = itertools.accumulate([rho] * len(AXES) + [COPIES, 1.0])
        cell = next(cell for cell, edge in zip(cells, edges) if draw < edge)
        return Task(name, "train", cell, self.drawn(name, cell))

    def task(self, name):
        """A task of RL."""
        split = self.settings.split
        return Task(name, "train", split, self.drawn(name, split, k=self.settings.k))

    def split(self, name):
        """Its problems, no two alike and none that is trained on; numbers of operations, lengths and withheld
        pairs in turns."""
        problems, part = [], 1 if name == "dev" else 0
        for i in range(self.settings.problems):
            cell, turn = (("id", *AXES)[i % 5], i // 5) if name == "dev" else (name, i)
            depths, pair = self.depths(cell), WITHHELD[turn % len(WITHHELD)]
            problems.append(self.drawn(f"{name}/{i}", cell, lambda problem: (
                problem.part == part and problem not in problems
                and len(problem.operations) == depths[turn % len(depths)]
                and (cell != "length" or len(problem.text) == LENGTHS[turn % len(LENGTHS)])
                and (cell != "composition" or problem.operations == pair))))
        return [Task(f"{name}/{i}", name, problem.cell, problem) for i, problem in enumerate(problems)]

    def words(self):
        """Each operation, what comes before a string, and the answers; a letter is a token anyway."""
        return [*(f" {name}" for name in (*NAMES, COPY)), "Right.", "Wrong.", self.nothing]

    def expert(self, games):
        """Who writes the solution."""
        return Expert()

    def text_of(self, task):
        """The problem."""
        return str(task.problem)
