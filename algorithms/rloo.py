"""RLOO: an episode's reward against the mean of the *other* episodes of its task (arXiv:2402.14740).

    A_i = R_i - 1/(G-1) sum_{j != i} R_j   =   G/(G-1) * (R_i - mean R)

The baseline is independent of the episode, so the gradient is unbiased; against GRPO without the std it is a
longer step, by G/(G-1). The paper's response is the whole answer; here it is all that an episode sampled.
"""

import algorithms
from algorithms import rewards


def leave_one_out_advantage(reward_E, group_E):
    """R_i less the mean of the others of its group; exactly 0 for an episode alone, or if all are equal."""
    count_E = (group_E[:, None] == group_E).sum(1)
    return rewards.group_relative_advantage(reward_E, group_E) * count_E / (count_E - 1).clamp(min=1)


class Method(algorithms.Method):
    """Every turn of an episode has its leave-one-out advantage."""

    reward_alone = True
    centred = staticmethod(leave_one_out_advantage)     # penalties too: in the paper they are part of R

    def assign(self, episodes, decay=1.0):
        """See `leave_one_out_advantage`."""
        reward_E, group_E, turns_E = rewards.compared(episodes, self.settings)
        advantage_E = leave_one_out_advantage(reward_E, group_E)
        rewards.write_advantages(episodes, advantage_E.repeat_interleave(turns_E))
        return {}
