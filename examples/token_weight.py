"""Token-weighted GRPO: an algorithm that gives each token of a turn its own advantage, in one file.

    A_t = w_t * A,   w_t = n * d^t / sum_s d^s        t, s = 0 ... n - 1 over the n tokens of a response

A is GRPO's group-relative advantage of the episode and d is --token-decay. The first tokens of a response get
more of the advantage, and its mean over the response stays A; at d = 1 this is GRPO.

    python gcd.py --algo examples/token_weight.py --token-decay 0.5
"""

from dataclasses import dataclass

import algorithms
import losses
from algorithms import rewards
from infra.flags import setting


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """The flags that every algorithm has, and one more."""

    token_decay: float = setting(0.8, "factor on the advantage from one token of a response to the next",
                                 low=0.01, high=1)


def token_weights(n, decay):
    """w_t of a response of n tokens, as above."""
    powers = [decay**t for t in range(n)]
    total = sum(powers)
    return [n * power / total for power in powers]


class Method(algorithms.Method):
    """Writes `turn.token_advantage`, which the update reads; `turn.advantage` is its mean, for the report."""

    Settings = Settings
    allows_refill = True                  # unequal rewards always give a gradient: allows refill

    def assign(self, episodes):
        """Write the advantages of this rank's episodes, which are full groups. Returns metrics."""
        reward_E, group_E, turns_E = rewards.grouped_rewards(episodes, self.settings)
        advantage_E = losses.group_relative_advantage(reward_E, group_E)
        rewards.write_advantages(episodes, advantage_E.repeat_interleave(turns_E))
        for turn in (turn for episode in episodes for turn in episode.turns):
            weights = token_weights(len(turn.response_ids), self.settings.token_decay)
            turn.token_advantage = [turn.advantage * weight for weight in weights]
        return {}
