"""Gymnasium environments that count to three, of which some go wrong in one way, for test_gymnasium.py.

Its workers import this file alone, and so neither torch nor gcd.py.
"""

import asyncio
import os
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Text


class Counter(gymnasium.Env):
    """Count to three by saying "more"; each pays a quarter. bad: what goes wrong at the second "more"."""

    observation_space = action_space = Text(99)

    def __init__(self, bad=""):
        self.bad = bad

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.seed = 0, seed
        return f"Count from {seed}.", {"admissible_commands": ["more", "wait"]}

    def step(self, action):
        self.n += action == "more"
        ended, reward = self.n == 3, 0.25 * (action == "more")
        if self.n == 2 and self.bad:
            if self.bad == "cancels":
                raise asyncio.CancelledError("late")
            if self.bad == "raises":
                raise KeyError("two\nlines")
            if self.bad == "hangs":
                time.sleep(60)
            if self.bad == "dies":
                os._exit(7)
            return {"text": (None, reward, ended, False, {}), "long": ("x" * 10**7, reward, ended, False, {}),
                    "nan": ("2", float("nan"), ended, False, {}), "four": ("2", reward, ended, {}),
                    "info": ("2", reward, ended, False, {"admissible_commands": [3]})}[self.bad]
        info = {"success": ended, "admissible_commands": ["more", "wait"]}
        return str(self.n), reward, np.bool_(ended), np.bool_(self.n == 0 and action == "stop"), info


gymnasium.register("tests/Counter-v0", entry_point=Counter)
for kind in ("raises", "cancels", "hangs", "dies", "text", "long", "nan", "four", "info"):
    gymnasium.register(f"tests/{kind}-v0", entry_point=Counter, kwargs={"bad": kind})
