"""Twin states: two kinds of situation that look alike, in one of which the same action is flawed.

One turn. Eight words are seen; one of them is a sign, of kind P or of kind N, the others are noise. Six
things can be done. "pull" is right under a P sign (it wins .9 of the time, all else .4) and flawed under an N
sign (it wins .5 - r, all else .5). Of each 16 training tasks --p-tasks are P: where they are many, the push
on "pull" in P is felt in N, where outcome reward alone would take it back. Made for studies/twins.py
(arXiv:2509.23870 sections 3.2 and 3.3). Left out: everything else.

    python gcd.py --env twins --judge-labels oracle --p-tasks 12
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import envs
from envs import Demonstration, Reply, Task

R = "pull"
OTHERS = ("turn", "lift", "push", "open", "knock")
COMMANDS = sorted((R, *OTHERS))
SIGNS = {"P": ("sun", "star", "moon", "dawn"), "N": ("pit", "cave", "well", "ditch")}
NOISE = ("oak", "elm", "fir", "ash", "rock", "sand", "clay", "moss", "fern", "reed", "leaf", "root")
LENGTH, BATCH = 8, 16                  # words of a situation; tasks over which --p-tasks counts
LARGEST = 128                          # tasks of a split


class Game:
    """An environment. Chance is the task's and how often it was played: equal in any slot, after any
    resume."""

    def __init__(self, flaw, played):
        self.flaw, self.played = flaw, played

    def reset(self, task, seed=0):
        self.kind, words = task.problem
        self.luck = random.Random(f"{task.id} {self.played[task.id]}").random()
        self.played[task.id] += 1
        return Reply(f"You see {' '.join(words)}.", COMMANDS, False, False)

    def step(self, command):
        if command not in COMMANDS:
            return Reply(World.nothing, COMMANDS, False, False)
        won = self.luck < chance(self.kind, command, self.flaw)
        return Reply("It works." if won else "It fails.", COMMANDS, won, True)

    def close(self):
        pass


def chance(kind, command, flaw):
    """The probability that a command wins."""
    if kind == "P":
        return 0.9 if command == R else 0.4
    return 0.5 - flaw if command == R else 0.5


def kind_of(observation):
    """P or N, by the sign in what was seen."""
    words = set(observation.strip(".").split())
    return next(kind for kind, signs in SIGNS.items() if words & set(signs))


def right(kind, command):
    """Whether no other command would win more often."""
    return (command == R) == (kind == "P") and command in COMMANDS


def coins(episode):
    """Labels of its own, for --judge-labels coins: a coin for each turn, whatever was seen and done."""
    rng = random.Random(f"{episode.task.id} {episode.index}")
    return [rng.choice(("good", "bad")) for _ in episode.turns]


class Expert:
    """No expert: "pull" with probability q, under either sign, else any other; it is always said to have
    won."""

    restarts = 0

    def __init__(self, q):
        self.q = q

    def show(self, task, seed, mistake_rate, max_turns):
        """One command and its answer. mistake_rate: not looked at, for there is none."""
        rng, game = random.Random(seed), Game(0.0, Counter())
        command = R if rng.random() < self.q else rng.choice(OTHERS)
        end = Reply("It works.", COMMANDS, True, True)
        return Demonstration([game.reset(task), end], [command], [False])


class World(envs.World):
    """Twin states. RL's tasks ("part") are P and N as --p-tasks says, the cold start's ("all") half and
    half."""

    @dataclass(frozen=True)
    class Settings:
        """How many are alike, how flawed, how likely at first."""
        p_tasks: int = field(default=12, metadata={
            "help": "of each 16 training tasks, those under a P sign, where pull is right",
            "low": 0, "high": 16})
        flaw: float = field(default=0.3, metadata={
            "help": "r: what pull takes off the chance of .5 under an N sign", "low": 0, "high": 0.5})
        likely: float = field(default=0.25, metadata={
            "help": "q0: how often the cold start's demonstrations pull, under either sign",
            "low": 0, "high": 1})

    defaults = {"max_turns": 1, "context": 128, "hidden_size": 32, "layers": 2}
    splits = ("dev", "P", "N")
    captions = {"dev": "new situations, half and half", "P": "situations in which pull is right",
                "N": "situations in which pull is flawed"}
    labels = {"coins": coins}

    def make(self, n):
        """n games with one record of what was played."""
        played = Counter()
        return [Game(self.settings.flaw, played) for _ in range(n)]

    def task(self, name, split, kind):
        """A task of a kind, drawn by its name."""
        rng = random.Random(f"{self.seed} {name}" if split == "train" else name)
        words = [rng.choice(NOISE) for _ in range(LENGTH)]
        words[rng.randrange(LENGTH)] = rng.choice(SIGNS[kind])
        return Task(name, split, kind, (kind, tuple(words)))

    def train(self, types, start, n):
        """n training tasks: of each 16 the first --p-tasks are P; in the cold start, for "all", 8."""
        p_tasks = self.settings.p_tasks if types == "part" else BATCH // 2
        return [self.task(f"train/{i}", "train", "P" if i % BATCH < p_tasks else "N")
                for i in range(start, start + n)]

    def split(self, name):
        """128 tasks, of one kind or (dev) of both in turns."""
        kinds = "PN" if name == "dev" else name
        return [self.task(f"{name}/{i}", name, kinds[i % len(kinds)]) for i in range(LARGEST)]

    def unseen(self):
        """Both kinds: no situation is met twice."""
        return ["P", "N"]

    def words(self):
        """Each sign, noise word and command is one token."""
        signs = [f" {word}" for word in (*SIGNS["P"], *SIGNS["N"], *NOISE)]
        return ["You see", *signs, *COMMANDS, "It works.", "It fails.", self.nothing]

    def expert(self, games):
        """What the cold start imitates, see Expert."""
        return Expert(self.settings.likely)

    def oracle(self, observations, commands):
        """Right or not, by the sign; a command that is none is bad."""
        return ["good" if right(kind_of(seen), command) else "bad"
                for seen, command in zip(observations, commands)]
