"""REINFORCE++: an episode's reward against the mean and std of the whole batch (arXiv:2501.03262).

    A_t = (R - sum_{k >= t} kl_k - mean) / std          over all sampled tokens t of the batch, ranks included

No groups and no critic: 128 tasks are played once each. With --kl reward each token's k1 penalty (coefficient
included) is taken off from that token on, as in the paper; without it every token of an episode has the same
advantage. The paper's reward comes at the end of one response; here at the end of the episode, undiscounted.
"""

import itertools

import algorithms
from algorithms import rewards


def less_later_kl(reward, kl):
    """Per token, the reward less the penalties from that token to the episode's end. kl: a list per turn."""
    flat = [penalty for turn in kl for penalty in turn]
    later = iter([*itertools.accumulate(reversed(flat))][::-1])
    return [[reward - next(later) for _ in turn] for turn in kl]


class Method(algorithms.Method):
    """Whitened rewards; nothing is compared within a task."""

    groups = False
    defaults = dict(tasks=128, group_size=1, dynamic_sampling="keep")

    def assign(self, episodes, decay=1.0):
        """The episode's reward at each turn, less the later KL where that is in it, whitened over tokens."""
        for episode in episodes:
            kl = [turn.kl for turn in episode.turns]
            by_turn = less_later_kl(episode.reward, kl) if kl[0] else itertools.repeat(None)
            for turn, advantages in zip(episode.turns, by_turn):
                turn.advantage, turn.token_advantage = episode.reward, advantages
        rewards.whiten_tokens(episodes)
        return {}

    def penalize(self, episodes):
        """Nothing: `assign` has the penalties in the reward."""
