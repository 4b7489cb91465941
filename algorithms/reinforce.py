"""REINFORCE++: an episode's reward, normalized by the mean and std of the full batch (arXiv:2501.03262).

    A_t = (R - sum_{k >= t} kl_k - mean) / std          over all sampled tokens t of the batch, on all ranks

No groups and no critic: 128 tasks are played once each. kl_k is the k1 penalty of token k, coefficient
included, with --kl reward; without it every token of an episode has the same advantage. The paper's reward is
at the end of one response; here it is at the end of the episode, undiscounted.
"""

import itertools

import algorithms
from algorithms import rewards


def subtract_later_kl(reward, kl):
    """Per token, the reward minus the penalties from that token to the episode's end. kl: a list per turn."""
    flat = [penalty for turn in kl for penalty in turn]
    later = iter([*itertools.accumulate(reversed(flat))][::-1])
    return [[reward - next(later) for _ in turn] for turn in kl]


class Method(algorithms.Method):
    """Rewards whitened over the batch, without groups."""

    groups = False

    def assign(self, episodes):
        """Write the episode's reward, minus later KL penalties if there are any, whitened over tokens."""
        for episode in episodes:
            kl = [turn.kl for turn in episode.turns]
            by_turn = subtract_later_kl(episode.reward, kl) if any(kl) else itertools.repeat(None)
            for turn, advantages in zip(episode.turns, by_turn):
                turn.advantage, turn.token_advantage = episode.reward, advantages
        rewards.whiten_tokens(episodes)
        return {}

    def subtract_kl(self, episodes):
        """Override that does nothing: `assign` has subtracted the penalties from the rewards already."""
