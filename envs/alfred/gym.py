"""The household game as a Gymnasium environment: generated rooms, or ALFWorld's own games from a folder.

    import gymnasium
    env = gymnasium.make("envs.alfred.gym:gcd/Household-v0", split="train", max_turns=50)
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(info["admissible_commands"][0])

`reset` draws a task of the split with the environment's random numbers. The reward is 1 for the command that
wins and 0 for any other. `import envs.alfred.gym` registers the name "gcd/Household-v0", too. An asynchronous
vector of environments needs `vector_kwargs={"shared_memory": False}`: else Gymnasium (1.4) gives each text as
zeros. Left out: rendering, and an action space of the admissible commands, which are in `info`.

    pip install gymnasium
"""

import string

import gymnasium
from gymnasium.spaces import Text

from .game import Game
from .splits import check_positive, find_split

MAX_CHARACTERS = 4096     # of a text; the longest of 20,000 turns in real games has 899


class Household(gymnasium.Env):
    """Text commands in, text observations out. The answer to a refused command is "Nothing happens."."""

    metadata = {"render_modes": []}

    def __init__(self, split="train", games="", types="part", max_turns=50):
        """split: "train", "dev", "L0", "L1" or "L2", see splits.py. games: a json_2.1.1 folder or a .jsonl.gz
        of real games; "" for generated rooms. types: of "train": "part", the four task types that L2 does not
        hold, or "all" six.

        ValueError for a split without games and for a turn limit below 1.
        """
        check_positive("max_turns", max_turns)
        self.split = find_split(split, games, types)
        self.max_turns = max_turns
        self.observation_space = Text(MAX_CHARACTERS, charset=string.printable)
        self.action_space = Text(MAX_CHARACTERS, min_length=0, charset=string.printable)
        self.game, self.turns = Game(), None       # None before the first reset

    def reset(self, *, seed=None, options=None):
        """Start a newly drawn task of the split: (observation, info). `options` are ignored."""
        super().reset(seed=seed)
        self.task, self.turns = self.split[self.np_random.integers(len(self.split))], 0
        reply = self.game.reset(self.task)
        self.won = reply.won
        return reply.observation, self._info(reply)

    def step(self, action):
        """Carry out a command: (observation, reward, terminated, truncated, info).

        Winning terminates, also in the last turn. Otherwise the turn limit truncates. ValueError, before
        anything changes, for an action that is not text.
        """
        if self.turns is None:
            raise gymnasium.error.ResetNeeded("step: call reset first")
        reply = self.game.step(action)
        wins = reply.won and not self.won                     # a game that goes on may be won again
        self.won, self.turns = self.won or wins, self.turns + 1
        truncated = not reply.won and self.turns >= self.max_turns
        return reply.observation, float(wins), reply.won, truncated, self._info(reply)

    def _info(self, reply):
        return {"admissible_commands": reply.admissible, "won": reply.won, "task": self.task.id}


gymnasium.register("gcd/Household-v0", entry_point=f"{__name__}:Household")
