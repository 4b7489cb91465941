"""GRPO: an episode's reward relative to the mean reward of its task's group (arXiv:2402.03300).

Every turn of an episode has the episode's advantage. The paper compares episodes. verl-agent's code compares
turns: a turn's reward is its episode's success reward minus its own penalty, and the std is unbiased
(--variant code). --preset small does not divide by the group's std (Dr. GRPO, arXiv:2503.20783), and has
DAPO's clip and mean over tokens, without a KL; --preset paper divides, and has a KL and equal clips. The
flags of GRPO as first published:

    --normalize-std --reduction episode --clip-high .2 --kl loss --kl-coef .04 --minibatches 1
    --dynamic-sampling keep
"""

from dataclasses import dataclass

import algorithms
import losses
from algorithms import rewards
from infra.flags import setting


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """GRPO's flags."""

    variant: str = setting("paper", "group mean (and std) over episodes (paper), or over turns, with "
                           "verl-agent's rewards (its code)", ("paper", "code"))
    normalize_std: bool = setting(False, "divide advantages by the group's std")


class Method(algorithms.Method):
    """GRPO over episodes or turns, with or without division by the std."""

    Settings = Settings
    allows_refill = True
    code_defaults = algorithms.Method.code_defaults | dict(normalize_std=True)

    def assign(self, episodes):
        """Write each turn's advantage, from the rewards that `rewards.write_rewards` wrote."""
        rewards.write_advantages(episodes, self._episode_level(episodes))
        return {}

    def _episode_level(self, episodes):
        """Return advantage_S of the S turns, to which GiGPO adds its own. U: the units that are compared,
        episodes or (--variant code) turns.
        """
        settings = self.settings
        reward_U, group_U, turns_U = rewards.grouped_rewards(episodes, settings)
        advantage_U = losses.group_relative_advantage(reward_U, group_U, settings.normalize_std,
                                                      correction=int(settings.variant == "code"))
        return advantage_U.repeat_interleave(turns_U)        # an episode's, to each of its turns
