"""OPO: a complete algorithm in one file.

    A_i = R_i - sum_j l_j R_j / sum_j l_j        over the episodes j of its task        arXiv:2505.23585

This baseline has the least variance if the squared gradient of an episode grows with its length l. In the
paper l is the tokens of one response; here it is all sampled tokens, or all turns, of an episode.

    python gcd.py --algo examples/opo.py --length-in turns

The file may be anywhere; copied to algorithms/opo.py it is `--algo opo`.
"""

from dataclasses import dataclass

import torch

import algorithms
from algorithms import rewards
from infra.flags import setting


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """The flags that every algorithm has, and one more."""

    length_in: str = setting("tokens", "unit of an episode's length", ("tokens", "turns"))


def length_weighted_advantage(reward_E, length_E, group_E):
    """Return advantage_E as above; exactly 0 in a group of equal rewards."""
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = group_E == group
        offset = reward_E[members] - reward_E[members][0]          # exactly 0 if the rewards are equal
        advantage_E[members] = offset - (length_E[members] * offset).sum() / length_E[members].sum()
    return advantage_E


class Method(algorithms.Method):
    """Every turn of an episode has the episode's advantage."""

    Settings = Settings
    allows_refill = True                  # a group has a gradient exactly if its rewards are unequal

    def assign(self, episodes):
        """Write the advantages of this rank's episodes, which are full groups. Returns metrics."""
        _, turns_E, group_E, _ = rewards.episode_tensors(episodes, self.settings)
        tokens_E = torch.tensor([sum(len(turn.response_ids) for turn in e.turns) for e in episodes])
        length_E = turns_E if self.settings.length_in == "turns" else tokens_E
        advantage_E = length_weighted_advantage(rewards.stored_rewards(episodes), length_E, group_E)
        rewards.write_advantages(episodes, advantage_E.repeat_interleave(turns_E))
        return {}
