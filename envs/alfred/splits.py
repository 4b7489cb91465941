"""Training tasks and evaluation splits, of generated rooms or of real ALFWorld games.

            generated rooms (rooms.py)                      real games (games.py)
    train   training rooms, endless                         train, 3,553 games, then also rearranged
    dev     for tuning: training and other rooms            valid_train, 199
    L0      training rooms, new placements and goals        valid_seen, 140
    L1      other rooms                                     valid_unseen, 134
    L2      other rooms, the two held-out task types        valid_unseen of those two types, 38

The splits L0, L1 and L2 are RLVMR's (arXiv:2507.22844). L2 is held out only if training leaves its types out.
"""

import os
import random
from collections import defaultdict
from functools import lru_cache
from numbers import Integral

from . import games, rooms
from .problem import parse_goal
from .rearranged import rearranged, scene_type

TYPES = {"part": rooms.TRAINED_TYPES, "all": rooms.ALL_TYPES}
HELD_OUT = tuple(t for t in rooms.ALL_TYPES if t not in rooms.TRAINED_TYPES)
FOLDER = {"train": "train", "dev": "valid_train", "L0": "valid_seen", "L1": "valid_unseen",
          "L2": "valid_unseen"}
TRAIN_TASKS = 10_000_000  # number of training tasks in a Split; real games repeat in it
REAL_EVERY = 3          # with rearranged games, every third task is still a real one
CAPTIONS = {"dev": "for tuning, training rooms and other rooms", "L0": "training rooms, new tasks",
            "L1": "other rooms", "L2": "other rooms, the task types that --train-types part leaves out"}
OF_REAL_GAMES = {"dev": "for tuning, training rooms", "L0": "training rooms, objects placed anew"}


class Tasks:
    """The tasks of one run.

    source: "" for generated rooms, else the value of --games, a folder or file for games.load_games. Each
    split is read once, at its first use; a source that cannot have games raises ValueError before that.
    train_types: task types that RL trains on: "all" six, or "part", which leaves L2's two out.
    rearrange: where two in three real training games are rearranged: "always" (everywhere), "never", or
    "later" (after one pass over the games: in RL's later passes, and in the cold start and refill's further
    rounds, whose indices are far beyond one pass).
    """

    def __init__(self, source, train_types, seed, rearrange="never"):
        self.source, self.train_types, self.seed, self.rearrange = source, train_types, seed, rearrange
        self.loaded, self.checked = {}, set()      # games by (split, types); ids of parsed games
        self.mixing = {}                           # {types: (games by scene type, goals)}, to rearrange games

    def real_games(self, split, types):
        """The real games of these types in a split, read once."""
        if not self.loaded:
            games.check_source(self.source, dict.fromkeys(FOLDER.values()))
        if (split, types) not in self.loaded:
            self.loaded[split, types] = games.load_games(self.source, FOLDER[split], types)
        return self.loaded[split, types]

    def validated(self, tasks):
        """These real games, each parsed once to check it. ValueError, with its file, for an invalid one."""
        for task in tasks:
            if task.id not in self.checked:
                parse_goal(task.problem.parse().task_desc, task.problem.source)
                self.checked.add(task.id)
        return tasks

    def train_tasks(self, types, start, n):
        """n training tasks, from index `start` of an endless sequence that the seed fixes.

        types: "all", or "part": without the task types that are held out for L2.
        """
        if not self.source:
            start += self.seed * TRAIN_TASKS
            return [rooms.task("train", start + i, TYPES[types]) for i in range(n)]
        tasks, games_of_types = self.original_tasks(types, start, n), self.real_games("train", TYPES[types])
        first = {"always": 0, "later": len(games_of_types)}.get(self.rearrange, start + n)
        if start + n <= first:
            return tasks
        if types not in self.mixing:
            by_scene, goals = defaultdict(list), []
            for task in games_of_types:
                by_scene[scene_type(task)].append(task)
                text = task.problem.task_desc
                goals.append((text, parse_goal(text, task.problem.source)))
            self.mixing[types] = by_scene, goals
        return [task if index < first or index % REAL_EVERY == 0 else
                self.rearranged_task(task, *self.mixing[types], index)
                for index, task in enumerate(tasks, start)]

    def original_tasks(self, types, start, n):
        """n real training games, not rearranged, in a cyclic order fixed by the seed."""
        order = list(self.real_games("train", TYPES[types]))
        random.Random(self.seed).shuffle(order)
        return self.validated([order[(start + i) % len(order)] for i in range(n)])

    def rearranged_task(self, task, by_scene, goals, index):
        """A real game, rearranged at random; the seed and its index in the sequence fix how."""
        name = f"rearranged/{self.seed}-{index}"
        rng = random.Random(name)
        (other,) = self.validated([rng.choice(by_scene[scene_type(task)])])
        return rearranged(task, other, goals, rng, name)

    def split_tasks(self, name):
        """All tasks of a split, in a fixed order. ValueError for an unknown split."""
        if not self.source:
            return rooms.tasks(name)
        if name not in FOLDER:
            raise ValueError(f"split {name!r}: expected one of {', '.join(FOLDER)}")
        return self.validated(self.real_games(name, HELD_OUT if name == "L2" else TYPES["all"]))

    def unseen_splits(self):
        """The splits that are evaluated by default: of real games L2 if its task types are left out of
        training, L0 and L1 if none is.
        """
        if self.train_types == "all":
            return ["L0", "L1"]
        return ["L2"] if self.source else ["L0", "L1", "L2"]


class Split:
    """The tasks of one split by their numbers, for use without a run: see `find_split`.

    `len` of it is the number of tasks, TRAIN_TASKS for "train", and a loop over it ends after so many.
    Numbers start at 0 and wrap around.
    """

    def __init__(self, name, source, types):
        self.tasks, self.types = Tasks(source, "part", seed=0), types
        self.fixed = None if name == "train" else self.tasks.split_tasks(name)
        if name == "train":
            self[0]                                # raises ValueError if there are none

    def __len__(self):
        return TRAIN_TASKS if self.fixed is None else len(self.fixed)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index):
        if not isinstance(index, Integral):
            raise ValueError(f"index={index!r:.60}: expected an integer")
        if self.fixed is not None:
            return self.fixed[index % len(self.fixed)]
        (task,) = self.tasks.train_tasks(self.types, int(index) % TRAIN_TASKS, 1)
        return task


def find_split(name, source="", types="part"):
    """The Split of this name, read once in a process.

    source: a json_2.1.1 folder or a .jsonl.gz of real games; "" for generated rooms. types: the task types of
    "train": "part", without L2's two, or "all". ValueError for a split that is unknown or has no games; it
    says games=DIR, as callers do, and not --games=DIR, as a run.
    """
    if not isinstance(name, str):
        raise ValueError(f"split={name!r:.60}: expected text")
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(f"games={source!r:.60}: expected a path")
    if not isinstance(types, str) or types not in TYPES:
        raise ValueError(f"types={types!r:.60}: expected one of {', '.join(TYPES)}")
    try:
        return read_split(name, os.fspath(source), types)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("--")) from None


read_split = lru_cache(maxsize=None)(Split)


def check_positive(name, value):
    """Raise ValueError, naming the argument, for what is no integer above 0."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r:.60}: expected 1 or more")
