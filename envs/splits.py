"""Which tasks there are to train on and to evaluate, of generated rooms or of real ALFWorld games.

            generated rooms (rooms.py)                      real games (games.py)
    train   training rooms, endless                         train, 3,553 games
    dev     for tuning: training and other rooms            valid_train, 199
    L0      training rooms, new placements and goals        valid_seen, 140
    L1      other rooms                                     valid_unseen, 134
    L2      other rooms, the two types kept from RL         valid_unseen of those two types, 38

The splits L0, L1 and L2 are RLVMR's (arXiv:2507.22844); L2 needs a training run without its types.
"""

import random

from envs import games, rooms

TYPES = {"four": rooms.TRAINED_TYPES, "six": rooms.ALL_TYPES}
HELD_OUT = tuple(t for t in rooms.ALL_TYPES if t not in rooms.TRAINED_TYPES)
FOLDER = {"train": "train", "dev": "valid_train", "L0": "valid_seen", "L1": "valid_unseen",
          "L2": "valid_unseen"}


class Tasks:
    """The tasks of one run.

    source: "" for generated rooms, else a folder or file for games.load_games; each split is read once.
    train_types: "four" or "six", the task types that the run trains on.
    """

    def __init__(self, source, train_types, seed):
        self.source, self.train_types, self.seed = source, train_types, seed
        self.loaded = {}

    def real(self, split, types):
        """The real games of a split that are of these types, remembered."""
        if (split, types) not in self.loaded:
            self.loaded[split, types] = games.load_games(self.source, FOLDER[split], types)
        return self.loaded[split, types]

    def train(self, types, start, n):
        """n training tasks of "four" or "six" types, from place `start` of an endless sequence that
        the seed fixes."""
        if not self.source:
            first = self.seed * 10_000_000 + start
            return [rooms.task("train", first + i, TYPES[types]) for i in range(n)]
        real = list(self.real("train", TYPES[types]))
        random.Random(self.seed).shuffle(real)
        return [real[(start + i) % len(real)] for i in range(n)]

    def split(self, name):
        """Every task of a split, in a fixed order."""
        if not self.source:
            return rooms.tasks(name)
        return self.real(name, HELD_OUT if name == "L2" else TYPES["six"])

    def unseen(self):
        """The splits whose tasks this training leaves unseen: what is evaluated unless one says otherwise."""
        if self.train_types == "six":
            return ["L0", "L1"]
        return ["L2"] if self.source else ["L0", "L1", "L2"]
