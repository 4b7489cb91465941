"""A calculator as a tool: a complete environment with function calls in one file.

    python gcd.py --env examples/calculator.py --iterations 20

The model computes (7 + 5) * 3 in two calls and gives the result with a third. Each calculation costs a
little, as a reward of the turn. Type hints and docstrings of the game's public methods are all that a model
is told of the tools.
"""

import random
import re
from typing import Literal

from envs import Demonstration, Task
from envs.tools import Game, ToolEnvironment, ToolError, call, schemas

OPERATORS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
LARGEST = 200


class Calculator(Game):
    """One playable instance. Its public methods are the tools."""

    def begin(self, task, seed):
        self._formula = task.problem
        return "Compute ({} {} {}) {} {}.".format(*self._formula)

    def calculate(self, left: int, operator: Literal["+", "-", "*"], right: int) -> str:
        """Calculate with two numbers.

        Args:
            left: the number before the operator
            operator: what to do with the two
            right: the number after it
        """
        if max(abs(left), abs(right)) > LARGEST:
            raise ToolError(f"expected numbers up to {LARGEST}")
        self.reward -= 0.02
        return str(OPERATORS[operator](left, right))

    def answer(self, value: int) -> str:
        """Give the result. This ends the task.

        Args:
            value: the result
        """
        right = value == results(self._formula)[1]
        self.finish(right, "right" if right else "wrong")
        return "right" if right else "wrong"


def results(formula):
    """The intermediate result and the result."""
    a, first, b, second, c = formula
    return (inner := OPERATORS[first](a, b)), OPERATORS[second](inner, c)


def right_calls(formula):
    """The calls that solve a task, as (tool, arguments)."""
    a, first, b, second, c = formula
    inner, result = results(formula)
    return [("calculate", {"left": a, "operator": first, "right": b}),
            ("calculate", {"left": inner, "operator": second, "right": c}), ("answer", {"value": result})]


class Expert:
    """The right calls in order. An injected mistake calculates something else."""

    restarts = 0

    def __init__(self, game):
        self.game = game

    def show(self, task, seed, mistake_rate, max_turns):
        rng, replies, commands, mistakes = random.Random(seed), [self.game.reset(task)], [], []
        pending = right_calls(task.problem)
        while pending and len(commands) < max_turns:
            mistakes.append(rng.random() < mistake_rate)
            name, arguments = pending[0]
            if mistakes[-1]:
                name, arguments = "calculate", {"left": 0, "operator": "+", "right": rng.randrange(1, 10)}
            else:
                pending.pop(0)
            commands.append(call(name, **arguments))
            replies.append(self.game.step(commands[-1]))
        return Demonstration(replies, commands, mistakes)


class Environment(ToolEnvironment):
    """Formulas of three numbers from 1 to 9; every fifth is held out."""

    rules = "Compute the result with the calculator, then give it with the tool for answers."
    defaults = {"max_turns": 6, "max_response_tokens": 24, "judge_labels": "oracle"}
    splits = ("dev", "test")
    captions = {"dev": "formulas as in training", "test": "formulas held out"}

    def make(self, n):
        return [Calculator() for _ in range(n)]

    def tools(self):
        return schemas(Calculator)

    def _task(self, split, name):
        rng, held_out = random.Random(name), split == "test"
        while True:
            a, b, c = (rng.randrange(1, 10) for _ in range(3))
            if (sum((a, b, c)) % 5 == 0) == held_out:
                return Task(name, split, "compute", (a, rng.choice("+-*"), b, rng.choice("+-*"), c))

    def train_tasks(self, types, start, n):
        return [self._task("train", f"train/{self.seed}/{i}") for i in range(start, start + n)]

    def split_tasks(self, name):
        return [self._task(name, f"{name}/{i}") for i in range(100)]

    def unseen_splits(self):
        return ["test"]

    def vocabulary(self):
        numbers = [str(n) for n in range(-LARGEST // 2, 9 * 81 + 1)]
        return [*super().vocabulary(), "Compute (", ") ", " ", ".", "right", "wrong", *numbers]

    def expert(self, games):
        return Expert(games[0])

    def oracle(self, observations, commands):
        a, first, b, second, c = re.match(r"Compute \((\d+) (.) (\d+)\) (.) (\d+)", observations[0]).groups()
        pending, labels = right_calls((int(a), first, int(b), second, int(c))), []
        for calls in map(self._calls, commands):
            good = calls and calls == pending[:len(calls)]
            labels.append("good" if good else "bad")
            pending = pending[len(calls):] if good else pending
        return labels
