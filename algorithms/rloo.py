"""RLOO: an episode's reward minus the mean reward of the *other* episodes of its task (arXiv:2402.14740).

    A_i = R_i - 1/(G-1) sum_{j != i} R_j   =   G/(G-1) * (R_i - mean R)

The baseline is independent of the episode: the paper's gradient, REINFORCE's, is unbiased. The loss here is
the run's, clipped and averaged over tokens, which is not. The advantage is G/(G-1) times that of GRPO without
the std. The paper's response is the full answer; here it is all sampled tokens of an episode.
"""

import algorithms
import losses
from algorithms import rewards


def leave_one_out_advantage(reward_E, group_E):
    """R_i minus the mean of the others in its group; exactly 0 in a group of one, or of equal rewards."""
    count_E = (group_E[:, None] == group_E).sum(1)
    return losses.group_relative_advantage(reward_E, group_E) * count_E / (count_E - 1).clamp(min=1)


class Method(algorithms.Method):
    """Every turn of an episode has its leave-one-out advantage."""

    allows_refill = True

    def assign(self, episodes):
        """Write `leave_one_out_advantage` of the episodes."""
        reward_E, group_E, turns_E = rewards.grouped_rewards(episodes, self.settings)
        advantage_E = leave_one_out_advantage(reward_E, group_E)
        rewards.write_advantages(episodes, advantage_E.repeat_interleave(turns_E))
        return {}

    def center_kl(self, penalty_E, group_E):
        """Use the leave-one-out baseline for penalties too: in the paper they are part of the reward."""
        return leave_one_out_advantage(penalty_E, group_E)
