"""Twin states: two kinds of similar states; the action that is best in one is flawed in the other.

One turn. The observation has eight words: a sign of kind P or N, and seven noise words. There are six
commands. "pull" is right under a P sign (it wins with probability .9, every other command with .4) and flawed
under an N sign (it wins with .5 - r, every other command with .5). Of each 16 training tasks --p-tasks are P:
if they are many, the policy gradient towards "pull" in P generalizes to N, against outcome reward there. Made
for lab/studies/cures.py (arXiv:2509.23870, sections 3.2 and 3.3). Left out: more than one turn.

    python gcd.py --env lab/envs/twins.py --judge-labels oracle --p-tasks 12
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import envs
from envs import Demonstration, Reply, Task

PULL = "pull"
OTHERS = ("turn", "lift", "push", "open", "knock")
COMMANDS = sorted((PULL, *OTHERS))
SIGNS = {"P": ("sun", "star", "moon", "dawn"), "N": ("pit", "cave", "well", "ditch")}
NOISE = ("oak", "elm", "fir", "ash", "rock", "sand", "clay", "moss", "fern", "reed", "leaf", "root")
LENGTH, BATCH = 8, 16                  # words of an observation; training tasks of which --p-tasks are P
SPLIT_SIZE = 128                       # tasks of a split


class Game:
    """A game of one command. Its random number depends on the task, in training with the state that the run's
    seed drew, and on how often it was played.

    So it is the same in any slot, after a resume and in every arm of a study, and another with another seed.
    played: {task id: number of plays}, shared by all games.
    """

    answers = ("It fails.", "It works.")         # by whether the command won
    flawed, others = PULL, OTHERS                # the command that is flawed in N, and the rest
    commands = COMMANDS                          # all, sorted

    def __init__(self, flaw, played, label_reward=0.0):
        self.flaw, self.played, self.label_reward = flaw, played, label_reward

    def reset(self, task, seed=0):
        observation = self.observe(task.problem)
        self.luck = random.Random(f"{task} {self.played[task.id]}").random()
        self.played[task.id] += 1
        return Reply(observation, self.commands, False, False)

    def observe(self, problem):
        """Set up a task's state. Returns its observation."""
        self.kind, tokens = problem
        return f"You see {' '.join(tokens)}."

    def step(self, command):
        if command not in self.commands:         # the episode ends: there is no second turn
            return Reply(Environment.noop_message, self.commands, False, True, taken=False)
        flawed = command == self.flawed
        won = self.luck < chance(self.kind, flawed, self.flaw)
        return Reply(self.answers[won], self.commands, won, True,
                     reward=self.label_reward * is_best(self.kind, flawed))

    def close(self):
        pass


def chance(kind, flawed, flaw):
    """The probability that a command wins. flawed: whether it is the one that is flawed in N."""
    if kind == "P":
        return 0.9 if flawed else 0.4
    return 0.5 - flaw if flawed else 0.5


def kind_of(observation):
    """P or N, by the sign in the observation."""
    tokens = set(observation.strip(".").split())
    return next(kind for kind, signs in SIGNS.items() if tokens & set(signs))


def is_best(kind, flawed):
    """Whether no other command has a higher probability to win. flawed: see `chance`."""
    return flawed == (kind == "P")


def coins(episode):
    """Random labels, for --judge-labels coins: a coin flip per turn, independent of state and command."""
    rng = random.Random(f"{episode.task} {episode.index}")
    return [rng.choice(("good", "bad")) for _ in episode.turns]


def signs(episode):
    """Which sign is seen, for --judge-labels signs: "good" under P, "bad" under N, whatever the command."""
    return ["good" if kind_of(turn.observation) == "P" else "bad" for turn in episode.turns]


def parity(episode):
    """For --judge-labels parity: "good" for every other sign of each kind, which tells neither P nor N."""
    rank = {sign: k for of_kind in SIGNS.values() for k, sign in enumerate(of_kind)}
    found = [next(rank[token] for token in turn.observation.strip(".").split() if token in rank)
             for turn in episode.turns]
    return ["bad" if k % 2 else "good" for k in found]


class Expert:
    """A policy for the cold start: the command that is flawed in N with probability q, in P and in N, else
    any other.

    Its demonstrations are recorded as won, whatever their command.
    """

    restarts = 0

    def __init__(self, q, game):
        self.q, self.game = q, game

    def show(self, task, seed, mistake_rate, max_turns):
        """A demonstration of one command. mistake_rate is ignored."""
        rng, start = random.Random(seed), self.game.reset(task)
        command = self.game.flawed if rng.random() < self.q else rng.choice(self.game.others)
        end = Reply(self.game.answers[True], start.admissible, True, True)
        return Demonstration([start, end], [command], [False])


def task(name, split, kind, seed=0):
    """A task of kind P or N, drawn with its name as the seed; in training, with the run's seed too."""
    rng = random.Random(f"{seed} {name}" if split == "train" else name)
    tokens = [rng.choice(NOISE) for _ in range(LENGTH)]
    tokens[rng.randrange(LENGTH)] = rng.choice(SIGNS[kind])
    return Task(name, split, kind, (kind, tuple(tokens)))


class Environment(envs.Environment):
    """Twin states. Of 16 tasks, --p-tasks are P in RL ("part") and 8 in the cold start ("all")."""

    @dataclass(frozen=True)
    class Settings:
        """Share of P tasks, size of the flaw, how often the cold start gives the flawed command, and whether
        the oracle's labels are rewarded.
        """
        p_tasks: int = field(default=12, metadata={
            "help": "P tasks among each 16 training tasks: in them one command is right that is flawed in N",
            "low": 0, "high": 16})
        flaw: float = field(default=0.3, metadata={
            "help": "r: in N, that command wins with probability .5 - r", "low": 0, "high": 0.5})
        likely: float = field(default=0.25, metadata={
            "help": "q0: share of the cold start's demonstrations that give it, in P and in N",
            "low": 0, "high": 1})
        label_reward: float = field(default=0.0, metadata={
            "help": "reward, in addition to that of winning, of a command that the oracle calls good",
            "low": 0, "high": 100})

    _game = Game
    defaults = {"max_turns": 1, "context": 128, "hidden_size": 32, "layers": 2}
    splits = ("dev", "P", "N")
    captions = {"dev": "new states, half of each kind", "P": "states in which pull is right",
                "N": "states in which pull is flawed"}
    labels = {"coins": coins, "signs": signs, "parity": parity}

    def make(self, n):
        """n games that share the counts of plays."""
        played = Counter()
        return [self._game(self.settings.flaw, played, self.settings.label_reward) for _ in range(n)]

    def train_tasks(self, types, start, n):
        """n training tasks: of each 16, the first --p-tasks are P for "part", the first 8 for "all"."""
        p_tasks = self.settings.p_tasks if types == "part" else BATCH // 2
        return [task(f"train/{i}", "train", "P" if i % BATCH < p_tasks else "N", self.seed)
                for i in range(start, start + n)]

    def split_tasks(self, name):
        """128 tasks of one kind or, in dev, of both kinds in turns."""
        kinds = "PN" if name == "dev" else name
        return [task(f"{name}/{i}", name, kinds[i % len(kinds)]) for i in range(SPLIT_SIZE)]

    def unseen_splits(self):
        """P and N: their tasks are not trained on."""
        return ["P", "N"]

    def vocabulary(self):
        """Every sign, noise word, command and answer."""
        signs = [f" {token}" for token in (*SIGNS["P"], *SIGNS["N"], *NOISE)]
        return ["You see", *signs, *COMMANDS, "It works.", "It fails.", self.noop_message]

    def expert(self, games):
        """The policy that the cold start imitates, see Expert."""
        return Expert(self.settings.likely, self._game(self.settings.flaw, Counter()))

    def oracle(self, observations, commands):
        """"good" for a best command under the observation's sign, else "bad", also for an invalid command."""
        return ["good" if command in COMMANDS and is_best(kind_of(observation), command == PULL) else "bad"
                for observation, command in zip(observations, commands)]
