"""Which switch: an environment in thirty lines, learned in eight seconds on a CPU without an expert.

    python gcd.py --env examples/lamps.py --iterations 10 --evaluate dev
"""

import envs

LAMPS = ("lamp 1", "lamp 2", "lamp 3")


class Game:
    """One playable game: an observation and the admissible commands, then whether the command won."""

    def reset(self, task, seed=0):
        self.wanted = task.problem
        return envs.Reply(f"Your task is to: light {self.wanted}.", [f"switch {lamp}" for lamp in LAMPS])

    def step(self, command):
        won = command == f"switch {self.wanted}"
        return envs.Reply("It is on." if won else "It stays dark.", [], won, done=True)

    def close(self):
        pass


class Environment(envs.Environment):
    """Three tasks. No expert, so no cold start: a fresh model may only write admissible commands."""

    defaults = {"demonstrations": 0, "admissible_only": True, "gcd": False}      # of flags that a run has
    splits = ("dev",)

    def make(self, n):
        return [Game() for _ in range(n)]

    def train_tasks(self, types, start, n):              # from an endless sequence, by index
        return [envs.Task(f"train/{i}", "train", "lamp", LAMPS[i % 3]) for i in range(start, start + n)]

    def split_tasks(self, name):                         # all of a split
        return [envs.Task(f"{name}/{i}", name, "lamp", lamp) for i, lamp in enumerate(LAMPS)]

    def vocabulary(self):                                # a fresh model's tokens
        return ["Your task is to: light ", ".", "It is on.", "It stays dark.", "switch ", *LAMPS]
