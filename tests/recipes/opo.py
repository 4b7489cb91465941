"""OPO: an algorithm in one file. As algorithms/opo.py it is there for `--algo opo`, and nothing else changes.

    A_i = R_i - sum_j l_j R_j / sum_j l_j        over the episodes j of its task        arXiv:2505.23585

This baseline has the least variance where the squared gradient of an episode grows with its length l. The
paper's is of one response, in tokens; here it is of all that an episode sampled, in tokens or in turns.

    python gcd.py --algo opo --length-in turns
"""

from dataclasses import dataclass

import torch

import algorithms
from algorithms import rewards
from run.flags import opt


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """The flags that every algorithm has, and one more."""

    length_in: str = opt("tokens", "what an episode's length is counted in", ("tokens", "turns"))


def length_weighted_advantage(reward_E, length_E, group_E):
    """A as above; exactly 0 in a group whose rewards are all equal."""
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = group_E == group
        above = reward_E[members] - reward_E[members][0]          # so that equal ones are 0, not a rounding
        advantage_E[members] = above - (length_E[members] * above).sum() / length_E[members].sum()
    return advantage_E


class Method(algorithms.Method):
    """Every turn of an episode has the episode's advantage."""

    Settings = Settings
    reward_alone = True                  # groups of unequal rewards always teach: --dynamic-sampling refill

    def assign(self, episodes, decay=1.0):
        """Write the advantages of this rank's episodes, whose groups are whole. Returns what to log."""
        _, turns_E, group_E, _ = rewards.facts(episodes, self.settings)
        tokens_E = torch.tensor([sum(len(turn.response_ids) for turn in e.turns) for e in episodes])
        length_E = turns_E if self.settings.length_in == "turns" else tokens_E
        advantage_E = length_weighted_advantage(rewards.reward_of(episodes), length_E, group_E)
        rewards.write_advantages(episodes, advantage_E.repeat_interleave(turns_E))
        return {}
