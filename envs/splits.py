"""Which tasks there are to train on and to evaluate, of generated rooms or of real ALFWorld games.

            generated rooms (rooms.py)                      real games (games.py)
    train   training rooms, endless                         train, 3,553 games
    dev     for tuning: training and other rooms            valid_train, 199
    L0      training rooms, new placements and goals        valid_seen, 140
    L1      other rooms                                     valid_unseen, 134
    L2      other rooms, the two types kept from RL         valid_unseen of those two types, 38

The splits L0, L1 and L2 are RLVMR's (arXiv:2507.22844); L2 needs a training run without its types. Those of
ScienceWorld are in scienceworld.py.
"""

import hashlib
import random

from envs import games, rooms

TYPES = {"part": rooms.TRAINED_TYPES, "all": rooms.ALL_TYPES}
HELD_OUT = tuple(t for t in rooms.ALL_TYPES if t not in rooms.TRAINED_TYPES)
FOLDER = {"train": "train", "dev": "valid_train", "L0": "valid_seen", "L1": "valid_unseen",
          "L2": "valid_unseen"}


def make_tasks(env, source, train_types, seed, only=()):
    """The tasks of one run in an environment: `Tasks`, or ScienceWorld's class of the same methods.

    only: ScienceWorld's task ids, () for all. Raises ValueError where source or ids do not suit the environment.
    """
    if env == "scienceworld":
        from envs import scienceworld
        return scienceworld.Tasks(source, train_types, seed, only)
    if only:
        raise ValueError(f"--task-ids={','.join(map(str, only))}: ScienceWorld's; not for --env {env}")
    if env == "alfworld" and not source:
        raise ValueError("--env=alfworld: needs --games, a json_2.1.1 folder or games.jsonl.gz")
    return Tasks(source, train_types, seed)


def games_hash(tasks):
    """The first 16 hex digits of a SHA-256 over the tasks in order: equal games, equal hash.

    Of real games their texts count; a generated room or a ScienceWorld variation is all in its id.
    """
    digest = hashlib.sha256()
    for task in tasks:
        text = f"{task.problem.task_desc}\n{task.problem.pddl}" if hasattr(task.problem, "pddl") else ""
        digest.update(f"{task.id}\n{text}\n".encode())
    return digest.hexdigest()[:16]


class Tasks:
    """The tasks of one run.

    source: "" for generated rooms, else a folder or file for games.load_games; each split is read once.
    train_types: what the run trains on: "all" six task types, or the "part" that leaves L2's two out.
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
        """n training tasks of "part" or "all" types, from place `start` of an endless sequence that the seed
        fixes."""
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
        return self.real(name, HELD_OUT if name == "L2" else TYPES["all"])

    def unseen(self):
        """The splits whose tasks this training leaves unseen: what is evaluated unless one says otherwise."""
        if self.train_types == "all":
            return ["L0", "L1"]
        return ["L2"] if self.source else ["L0", "L1", "L2"]
