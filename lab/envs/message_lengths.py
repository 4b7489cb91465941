"""Episodes whose messages are as long as those of real ALFWorld games, in tokens, and that need no games.

Lengths are drawn from envs/lengths.json; the texts are words that are one token each in Qwen's tokenizers.
Any response is a command. An episode has as many turns as a recorded one, in which an expert played, and is
won if it ends before 30. Given a task and the commands, all of it repeats. For measuring what training
costs (lab/bench/gpu_runs.py); there is nothing to learn. Left out: an expert, admissible commands.

    python gcd.py --env lab/envs/message_lengths.py --model DIR --demonstrations 0 --judge-labels alternating
"""

import random

import envs
from envs import MessageLengths, Reply, Task
from lm.chat import ASK

WORDS = ("apple", "bed", "bread", "cabinet", "chair", "desk", "door", "glass", "knife", "lamp", "paper",
         "phone", "plate", "room", "shelf", "table", "water", "window")
MOST_TURNS = 30


def text_of(tokens, rng):
    """A text of so many tokens, of WORDS, each with a space before it."""
    return "".join(f" {word}" for word in rng.choices(WORDS, k=tokens))


class Game:
    """An episode of drawn lengths. Its random numbers depend on the task and on the commands so far."""

    def __init__(self, lengths):
        self.lengths = lengths

    def reset(self, task, seed=0):
        self.task, self.left = task, None
        self.rng = random.Random(task.id)
        return Reply(text_of(self.lengths.draw(random.Random(task.id), 1)[0], self.rng))

    def step(self, command):
        self.rng = random.Random(f"{self.rng.random()} {command}")
        if self.left is None:                         # only now: a group's members have the same start
            turns = len(self.rng.choice(self.lengths.episodes)[0])
            self.won = turns < MOST_TURNS
            self.left = self.lengths.draw(random.Random(self.task.id), turns)[1:]
        if not self.left:
            return Reply("The end.", won=self.won, done=True)
        return Reply(text_of(self.left.pop(), self.rng))

    def close(self):
        pass


def alternating(episode):
    """Labels by turn, good and bad in turn, since commands are neither."""
    return [("good", "bad")[(episode.index + t) % 2] for t in range(len(episode.turns))]


class Environment(envs.Environment):
    """Episodes of the recorded lengths."""

    splits = ("L0",)
    ask = ASK["think"].replace(", word for word from the list,", "")
    labels = {"alternating": alternating}

    def parse(self, text):
        """Any text is a command."""
        return text.strip()[:40] or "nothing"

    def make(self, n):
        lengths = MessageLengths("alfworld")
        return [Game(lengths) for _ in range(n)]

    def train_tasks(self, types, start, n):
        return [Task(f"lengths/{self.seed}/{start + i}", "train", "lengths", None) for i in range(n)]

    def split_tasks(self, name):
        return [Task(f"lengths/{name}/{i}", name, "lengths", None) for i in range(128)]
