"""The household game as a Gymnasium environment: generated rooms, or ALFWorld's own games from a folder.

    import gymnasium
    env = gymnasium.make("envs.alfred.gym:gcd/Household-v0", split="train", max_turns=50)
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(info["admissible_commands"][0])

`reset` draws a task of the split with the environment's random numbers. The reward is 1 for the command that
wins and 0 for any other. `import envs.alfred.gym` registers the name "gcd/Household-v0", too. Left out:
rendering, and an action space of the admissible commands, which are in `info`.

    pip install gymnasium
"""

import os
import string
from numbers import Integral

import gymnasium
from gymnasium.spaces import Text

from .game import Game
from .splits import Tasks

MAX_CHARACTERS = 4096     # of a text; the longest of 20,000 turns in real games has 899
TRAIN_TASKS = 10_000_000  # number of training tasks to draw from; real games repeat in it


class Household(gymnasium.Env):
    """Text commands in, text observations out. The answer to a refused command is "Nothing happens."."""

    metadata = {"render_modes": []}

    def __init__(self, split="train", games="", max_turns=50):
        """split: "train" (the four task types of training), "dev", "L0", "L1" or "L2", see splits.py.
        games: a json_2.1.1 folder or a .jsonl.gz of real games; "" for generated rooms.

        ValueError for a split without games and for a turn limit below 1.
        """
        if not isinstance(split, str):
            raise ValueError(f"split={split!r:.60}: expected text")
        if not isinstance(games, (str, os.PathLike)):
            raise ValueError(f"games={games!r:.60}: expected a path")
        if not isinstance(max_turns, Integral) or max_turns < 1:
            raise ValueError(f"max_turns={max_turns!r:.60}: expected 1 or more")
        self.tasks = Tasks(games, "part", seed=0)
        self.fixed = None if split == "train" else self.tasks.split_tasks(split)
        if split == "train":
            self.tasks.train_tasks("part", 0, 1)      # raises ValueError if there are none
        self.max_turns = max_turns
        self.observation_space = Text(MAX_CHARACTERS, charset=string.printable)
        self.action_space = Text(MAX_CHARACTERS, min_length=0, charset=string.printable)
        self.game, self.turns = Game(), None       # None before the first reset

    def reset(self, *, seed=None, options=None):
        """Start a newly drawn task of the split: (observation, info). `options` are ignored."""
        super().reset(seed=seed)
        self.task, self.turns = self._draw(), 0
        reply = self.game.reset(self.task)
        return reply.observation, self._info(reply)

    def step(self, action):
        """Carry out a command: (observation, reward, terminated, truncated, info).

        Winning terminates, also in the last turn. Otherwise the turn limit truncates. ValueError, before
        anything changes, for an action that is not text.
        """
        if self.turns is None:
            raise gymnasium.error.ResetNeeded("step: call reset first")
        reply = self.game.step(action)
        self.turns += 1
        truncated = not reply.won and self.turns >= self.max_turns
        return reply.observation, float(reply.won), reply.won, truncated, self._info(reply)

    def _draw(self):
        if self.fixed is not None:
            return self.fixed[int(self.np_random.integers(len(self.fixed)))]
        (task,) = self.tasks.train_tasks("part", int(self.np_random.integers(TRAIN_TASKS)), 1)
        return task

    def _info(self, reply):
        return {"admissible_commands": reply.admissible, "won": reply.won, "task": self.task.id}


gymnasium.register("gcd/Household-v0", entry_point=f"{__name__}:Household")
