"""Guess the number with JSON actions: an environment whose commands are JSON objects, in one file.

    python gcd.py --env examples/json_guess.py --iterations 20

The game parses commands with `json`: {"guess": 7} and {"guess":7} are the same action. Anything else is
refused with `noop_message`. `Reply.taken` reports it, because `admissible` lists only one spelling. A model
that writes is told the environment's own rules, and how to answer; it may think first.
"""

import json
import random
import re

import envs
from envs import Demonstration, Reply, Task

NUMBERS = range(1, 16)
ACTIONS = {number: json.dumps({"guess": number}) for number in NUMBERS}
PROMPT = 'I think of a number from 1 to 15. Your task is to: guess it. Answer in JSON, such as {"guess": 8}.'


def parse(command):
    """The number that a command guesses; None if it is not {"guess": NUMBER} with one of the numbers."""
    try:
        action = json.loads(command)
    except (ValueError, RecursionError):            # not JSON, or nested too deeply
        return None
    number = action.get("guess") if isinstance(action, dict) and len(action) == 1 else None
    return number if type(number) is int and number in NUMBERS else None


def candidates(observations):
    """The numbers that are still possible after these observations."""
    low, high = (re.findall(rf"(\d+) is too {word}", " ".join(observations)) for word in ("low", "high"))
    return range(max(map(int, low), default=0) + 1, min(map(int, high), default=16))


class Game:
    """One playable instance."""

    def reset(self, task, seed=0):
        self.secret = task.problem
        return Reply(PROMPT, sorted(ACTIONS.values()), won=False, done=False)

    def step(self, command):
        number = parse(command)
        won, hint = number == self.secret, "low" if number and number < self.secret else "high"
        answer = "Correct." if won else f"{number} is too {hint}." if number else Environment.noop_message
        return Reply(answer, sorted(ACTIONS.values()), won, done=won, taken=number is not None)

    def close(self):
        """There is nothing to free."""


class Expert:
    """Binary search. An injected mistake guesses a number that is no longer possible."""

    restarts = 0

    def show(self, task, seed, mistake_rate, max_turns):
        game, rng = Game(), random.Random(seed)
        replies, commands, mistakes = [game.reset(task)], [], []
        while not replies[-1].done and len(commands) < max_turns:
            possible = candidates([reply.observation for reply in replies])
            wrong = [number for number in NUMBERS if number not in possible]
            mistakes.append(bool(wrong) and rng.random() < mistake_rate)
            commands.append(ACTIONS[rng.choice(wrong) if mistakes[-1] else possible[len(possible) // 2]])
            replies.append(game.step(commands[-1]))
        return Demonstration(replies, commands, mistakes)


class Environment(envs.Environment):
    """One task per number; none is held out."""

    rules = "You guess a number. After each guess you are told whether it is too low or too high."
    ask = 'Give your next guess as JSON and nothing else, such as {"guess": 8}.'
    defaults = {"max_turns": 8}
    splits = ("dev",)
    noop_message = 'Expected JSON such as {"guess": 8}.'

    def parse(self, text):
        """The response itself; None if it is no JSON object."""
        return text.strip() if text.strip().startswith("{") else None

    def make(self, n):
        return [Game() for _ in range(n)]

    def train_tasks(self, types, start, n):
        numbers = [random.Random(f"{self.seed} {i}").choice(NUMBERS) for i in range(start, start + n)]
        return [Task(f"train/{number}", "train", "guess", number) for number in numbers]

    def split_tasks(self, name):
        return [Task(f"{name}/{number}", name, "guess", number) for number in NUMBERS]

    def vocabulary(self):
        return [PROMPT, self.noop_message, "Correct.", " is too low.", " is too high.", '{"guess": ', "}",
                *map(str, NUMBERS)]

    def expert(self, games):
        return Expert()

    def oracle(self, observations, commands):
        return ["good" if parse(command) in candidates(observations[:t + 1]) else "bad"
                for t, command in enumerate(commands)]
