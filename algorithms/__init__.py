"""What an algorithm is: from what episodes earned to the advantage of each of their turns.

One file here is one method: its equations with their sources, its settings, which are flags of gcd.py once
it is chosen, and `assign`. `--algo NAME` finds class Method in algorithms/NAME.py; nothing else has its name.

    python gcd.py --algo gigpo --help          # the flags that it has beside those of every run
"""

import importlib
from pathlib import Path

import torch

from algorithms import rewards


class Method:
    """One algorithm. `assign` writes each turn's advantage; the attributes say what else it can do.

    Where a paper's released code differs from the paper, `Settings` has a field `variant`, "paper" or "code".
    """

    Settings = rewards.Settings  # a frozen dataclass: each field is a flag of this algorithm alone
    defaults = {}                # what it changes of the run's other defaults
    code_defaults = dict(success_reward=10.0, invalid="format", invalid_unit="turn")    # with --variant code
    groups = True                # compares the episodes of a task: a group with equal rewards teaches nothing
    reward_alone = False         # groups whose rewards differ always teach: others may be refilled
    tags = False                 # needs RLVMR's tags in the responses
    kl_in_reward = True          # knows what to do with --kl reward
    critic = None                # (model, optimizer), where it trains a second network
    centred = staticmethod(rewards.group_relative_advantage)      # penalty_E, group_E -> what is taken off

    def __init__(self, settings):
        self.settings = settings

    def begin(self, model, objective, minibatches, shard):
        """RL begins with this policy. objective: update.Objective; shard(model): spread it over the ranks."""
        self.model, self.objective, self.minibatches = model, objective, minibatches

    def assign(self, episodes, decay=1.0):
        """Write `turn.advantage` (`turn.token_advantage`, where tokens differ) of this rank's episodes.

        All ranks call it; groups lie whole on one. decay: what learning rates of the algorithm's own are
        multiplied with in this iteration. Returns metrics, equal on all ranks.
        """
        raise NotImplementedError(type(self))

    def without_spread(self, episodes):
        """The groups in which what is compared is all equal: where only rewards count, they teach nothing."""
        reward, group, _ = rewards.compared(episodes, self.settings)
        return {int(number) for number in group.unique() if len(reward[group == number].unique()) == 1}

    def penalize(self, episodes):
        """--kl reward: take each episode's summed `turn.kl`, centred in its group, off its advantages (apart:
        the task's reward alone is scaled by its std, and equal rewards keep their exact zeros)."""
        penalty_E = torch.tensor([sum(sum(turn.kl) for turn in e.turns) for e in episodes])
        centred_E = self.centred(penalty_E, torch.tensor([e.group for e in episodes]))
        for episode, penalty in zip(episodes, centred_E.tolist()):
            for turn in episode.turns:
                turn.advantage -= penalty


def names():
    """The algorithms that there are: the files of this folder that define a Method."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if "\nclass Method(" in file.read_text(encoding="utf-8")]


def find(name):
    """The class Method of algorithms/NAME.py. ValueError names those there are."""
    if name not in names():
        raise ValueError(f"--algo={name}: expected one of {', '.join(names())}")
    try:
        return importlib.import_module(f"algorithms.{name}").Method
    except Exception as error:
        raise ValueError(f"--algo={name}: algorithms/{name}.py: {type(error).__name__}: {error}") from error
