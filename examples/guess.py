"""Guess the number: a complete environment in one file.

    python gcd.py --env examples/guess.py --demonstrations 400 --judge-demonstrations 200 --iterations 20
    # its own flag and labels
    python gcd.py --env examples/guess.py --highest 50 --judge-labels halves --out runs/halves

The file may be anywhere; copied to envs/guess.py it is `--env guess`. The first command takes half a minute
on a CPU, and evaluates on numbers that RL has not played (the cold start shows all).
"""

import random
import re
from dataclasses import dataclass, field

import envs
from envs import Demonstration, Reply, Task


class Game:
    """One playable instance. Each Reply has an observation and the commands that are admissible now."""

    def __init__(self, highest):
        self.commands = [f"guess {n}" for n in range(1, highest + 1)]

    def reset(self, task, seed=0):
        self.secret = task.problem
        return self.reply(f"I think of a number from 1 to {len(self.commands)}. Your task is to: guess it.")

    def step(self, command):
        if command not in self.commands:
            return self.reply(Environment.noop_message)
        n = number_in(command)
        where = "That is it." if n == self.secret else f"It is {'above' if n < self.secret else 'below'} {n}."
        return self.reply(where, won=n == self.secret)

    def reply(self, observation, won=False):
        return Reply(observation, [*self.commands], won, done=won)

    def close(self):
        pass


def number_in(command):
    """The number that a command guesses: 7 for "guess 7"; 0 for any other command."""
    return int(command[6:]) if re.fullmatch(r"guess \d+", command or "") else 0


def candidates(observations):
    """The numbers that are still possible after these observations, as a range."""
    above, below, highest = (re.findall(rf"{word} (\d+)", " ".join(observations))
                             for word in ("above", "below", "to"))
    return range(max(map(int, above), default=0) + 1, min(map(int, below), default=int(highest[0]) + 1))


class Expert:
    """Binary search. An injected mistake guesses a number that is no longer possible."""

    restarts = 0                        # of game engines in other processes; this environment has none

    def __init__(self, game):
        self.game = game

    def show(self, task, seed, mistake_rate, max_turns):
        rng, replies, commands, mistakes = random.Random(seed), [self.game.reset(task)], [], []
        while not replies[-1].done and len(commands) < max_turns:
            numbers = candidates([reply.observation for reply in replies])
            wrong = [command for command in self.game.commands if number_in(command) not in numbers]
            mistakes.append(bool(wrong) and rng.random() < mistake_rate)
            commands.append(rng.choice(wrong) if mistakes[-1] else f"guess {numbers[len(numbers) // 2]}")
            replies.append(self.game.step(commands[-1]))
        return Demonstration(replies, commands, mistakes)


def halves(episode):
    """Labels for --judge-labels halves: a guess is good if it leaves at most half of the candidates."""
    observations = [turn.observation for turn in episode.turns]
    options = [candidates(observations[:t + 1]) for t in range(len(observations))]
    guesses = [number_in(turn.action) for turn in episode.turns]
    return ["good" if numbers[0] + numbers[-1] in range(2 * n - 1, 2 * n + 2) else "bad"
            for numbers, n in zip(options, guesses)]


class Environment(envs.Environment):
    """Every third number is held out: RL on "part" of the task types has no task with one of them."""

    @dataclass(frozen=True)
    class Settings:
        highest: int = field(default=20, metadata={"help": "numbers are 1 to this", "low": 5, "high": 99})

    defaults = {"max_turns": 8}
    splits = ("dev", "test")
    captions = {"dev": "numbers that RL trains on", "test": "the numbers held out, those divisible by three"}
    labels = {"halves": halves}

    def make(self, n):
        return [Game(self.settings.highest) for _ in range(n)]

    def _tasks(self, split, types):
        """All tasks of "part" or "all" types, or those held out (None)."""
        return [Task(f"{split}/{n}", split, "guess", n) for n in range(1, self.settings.highest + 1)
                if types == "all" or bool(n % 3) == (types == "part")]

    def train_tasks(self, types, start, n):
        tasks = self._tasks("train", types)
        return [random.Random(f"{self.seed} {i}").choice(tasks) for i in range(start, start + n)]

    def split_tasks(self, name):
        return self._tasks(name, "part" if name == "dev" else None)

    def unseen_splits(self):
        return ["test"] if self.train_types == "part" else []

    def vocabulary(self):
        numbers = [str(n) for n in range(1, self.settings.highest + 1)]
        return ["I think of a number from 1 to ", ". Your task is to: guess it.", "It is above ",
                "It is below ", "That is it.", self.noop_message, "guess ", *numbers]

    def expert(self, games):
        return Expert(games[0])

    def oracle(self, observations, commands):
        return ["good" if number_in(command) in candidates(observations[:t + 1]) else "bad"
                for t, command in enumerate(commands)]
