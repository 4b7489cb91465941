"""Which tasks there are to train on and to evaluate, of generated rooms or of real ALFWorld games.

            generated rooms (rooms.py)                      real games (games.py)
    train   training rooms, endless                         train, 3,553 games, then also rearranged
    dev     for tuning: training and other rooms            valid_train, 199
    L0      training rooms, new placements and goals        valid_seen, 140
    L1      other rooms                                     valid_unseen, 134
    L2      other rooms, the two types kept from RL         valid_unseen of those two types, 38

The splits L0, L1 and L2 are RLVMR's (arXiv:2507.22844); L2 needs a training run without its types.
"""

import random
from collections import defaultdict

from envs.alfred import games, rooms
from envs.alfred.problem import parse_goal
from envs.alfred.rearranged import rearranged, sort_of

TYPES = {"part": rooms.TRAINED_TYPES, "all": rooms.ALL_TYPES}
HELD_OUT = tuple(t for t in rooms.ALL_TYPES if t not in rooms.TRAINED_TYPES)
FOLDER = {"train": "train", "dev": "valid_train", "L0": "valid_seen", "L1": "valid_unseen",
          "L2": "valid_unseen"}
REAL = 3                # one task in so many is a real game, where others come rearranged
CAPTIONS = {"dev": "for tuning, training rooms and other rooms", "L0": "training rooms, new tasks",
            "L1": "other rooms", "L2": "other rooms and task types that RL never trains on"}


class Tasks:
    """The tasks of one run.

    source: "" for generated rooms, else what --games names, a folder or file for games.load_games; each split
    is read once, when it is needed; before the first is, a source where no game can be raises ValueError.
    train_types: what the run trains on: "all" six task types, or the "part" that leaves L2's two out.
    rearrange: when two real training games in three come rearranged: "later", beyond as many places as there
    are games (so RL's after one pass, and all of a cold start's, whose places lie far beyond), or "always";
    "never": they all come again.
    """

    def __init__(self, source, train_types, seed, rearrange="never"):
        self.source, self.train_types, self.seed, self.rearrange = source, train_types, seed, rearrange
        self.loaded, self.checked, self.to_mix = {}, set(), {}

    def real(self, split, types):
        """The real games of a split that are of these types, remembered."""
        if not self.loaded:
            games.check_source(self.source, dict.fromkeys(FOLDER.values()))
        if (split, types) not in self.loaded:
            self.loaded[split, types] = games.load_games(self.source, FOLDER[split], types)
        return self.loaded[split, types]

    def sound(self, tasks):
        """The same real games, each found to be one that can be played: ValueError names one that cannot."""
        for task in tasks:
            if task.id not in self.checked:
                parse_goal(task.problem.parse().task_desc, task.problem.source)
                self.checked.add(task.id)
        return tasks

    def train(self, types, start, n):
        """n training tasks of "part" or "all" types, from place `start` of an endless sequence that the seed
        fixes."""
        if not self.source:
            start += self.seed * 10_000_000
            return [rooms.task("train", start + i, TYPES[types]) for i in range(n)]
        tasks, real = self.whole(types, start, n), self.real("train", TYPES[types])
        first = {"always": 0, "later": len(real)}.get(self.rearrange, start + n)
        if start + n <= first:
            return tasks
        if types not in self.to_mix:
            sorts, goals = defaultdict(list), []
            for task in real:
                sorts[sort_of(task)].append(task)
                text = task.problem.task_desc
                goals.append((text, parse_goal(text, task.problem.source)))
            self.to_mix[types] = sorts, goals
        return [task if place < first or place % REAL == 0 else
                self.another(task, *self.to_mix[types], place) for place, task in enumerate(tasks, start)]

    def whole(self, types, start, n):
        """n real training games as they are, in an order that the seed fixes; after the last the first."""
        real = list(self.real("train", TYPES[types]))
        random.Random(self.seed).shuffle(real)
        return self.sound([real[(start + i) % len(real)] for i in range(n)])

    def another(self, task, sorts, goals, place):
        """A real game rearranged; the seed and its place in the sequence say how."""
        name = f"rearranged/{self.seed}-{place}"
        rng = random.Random(name)
        (other,) = self.sound([rng.choice(sorts[sort_of(task)])])
        return rearranged(task, other, goals, rng, name)

    def split(self, name):
        """Every task of a split, in a fixed order. Raises ValueError for a split that there is not."""
        if not self.source:
            return rooms.tasks(name)
        if name not in FOLDER:
            raise ValueError(f"split {name!r}: expected one of {', '.join(FOLDER)}")
        return self.sound(self.real(name, HELD_OUT if name == "L2" else TYPES["all"]))

    def unseen(self):
        """The splits whose tasks this training leaves unseen: what is evaluated unless one says otherwise."""
        if self.train_types == "all":
            return ["L0", "L1"]
        return ["L2"] if self.source else ["L0", "L1", "L2"]
