"""What an algorithm is: it turns the rewards of episodes into the advantage of each of their turns.

One file is one method: its equations with their sources, its settings, which become flags of gcd.py when it
is chosen, and `assign`. `--algo NAME` is class Method of algorithms/NAME.py, `--algo path/to/file.py` that of
any file.

    python gcd.py --algo gigpo --help          # gigpo's own flags, in addition to those of every run
"""

import torch

import losses
from algorithms import rewards


class Method:
    """Base class of every --algo: `assign` writes advantages, the attributes declare what else it supports.

    A public name that is not declared here is refused; a helper's name begins with an underscore. If a
    paper's released code differs from the paper, `Settings` has a field `variant`, "paper" or "code".
    """

    Settings = rewards.Settings  # a frozen dataclass: each field is a flag of this algorithm
    defaults = {}                # changed defaults of the run's other settings
    code_defaults = dict(success_reward=10.0, invalid="format", invalid_unit="turn")    # with --variant code
    groups = True                # compares the episodes of a task: a group with equal rewards has no gradient
    allows_refill = False         # unequal rewards in a group always give a gradient: allows refill
    tags = False                 # needs RLVMR's tags in the responses
    kl_in_reward = True          # supports --kl reward
    critic = None                # (model, optimizer), if it trains a second network

    def __init__(self, settings):
        self.settings = settings

    def begin(self, model, objective, minibatches, shard):
        """Called once, when RL starts: the policy, update.Objective, the number of optimizer steps per
        iteration, and shard(model), which shards a model over the ranks."""
        self.model, self.objective, self.minibatches = model, objective, minibatches

    def assign(self, episodes, decay=1.0):
        """Write `turn.advantage` (and `turn.token_advantage`, if tokens differ) of this rank's episodes.

        All ranks call it; no group is split over ranks. decay: factor on the algorithm's own learning rates
        in this iteration. Returns metrics, equal on all ranks.
        """
        raise NotImplementedError(type(self))

    def zero_variance_groups(self, episodes):
        """The groups whose compared values are all equal: if only rewards count, they have no gradient."""
        reward, group, _ = rewards.grouped_rewards(episodes, self.settings)
        return {int(number) for number in group.unique() if len(reward[group == number].unique()) == 1}

    def center_kl(self, penalty_E, group_E):
        """Subtract its baseline, by default the group's mean, from each episode's KL penalty."""
        return losses.group_relative_advantage(penalty_E, group_E)

    def subtract_kl(self, episodes):
        """For --kl reward: subtract each episode's centered sum of `turn.kl` from its advantages.

        The task's reward is normalized separately, so equal rewards keep their exact zeros.
        """
        penalty_E = torch.tensor([sum(sum(turn.kl) for turn in e.turns) for e in episodes])
        centered_E = self.center_kl(penalty_E, torch.tensor([e.group for e in episodes]))
        for episode, penalty in zip(episodes, centered_E.tolist()):
            for turn in episode.turns:
                turn.advantage -= penalty
                if turn.token_advantage:
                    turn.token_advantage = [advantage - penalty for advantage in turn.token_advantage]
