"""GRPO: an episode's reward against those of the other episodes of its task (arXiv:2402.03300).

Every turn of an episode has the episode's advantage. The default does not divide by the group's std (Dr.
GRPO, arXiv:2503.20783); --normalize-std does. The paper compares episodes; verl-agent's code compares turns,
each a row with its episode's success less its own penalty, with an unbiased std (--variant code).
"""

from dataclasses import dataclass

import algorithms
from algorithms import rewards
from run.flags import opt


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """GRPO's flags."""

    variant: str = opt("paper", "group mean (and std) over episodes (paper), or over turns (verl-agent's "
                       "code)", ("paper", "code"))
    normalize_std: bool = opt(False, "divide advantages by the group's std")


class Method(algorithms.Method):
    """GRPO, with and without the std, of episodes or of turns."""

    Settings = Settings
    reward_alone = True
    code_defaults = algorithms.Method.code_defaults | dict(normalize_std=True)

    def assign(self, episodes, decay=1.0):
        """`group_relative_advantage` of the episodes' rewards, or of the turns' rows."""
        rewards.write_advantages(episodes, self.relative(episodes))
        return {}

    def relative(self, episodes):
        """advantage_S of the episode level, which GiGPO adds to."""
        settings, (reward, group, turns) = self.settings, rewards.compared(episodes, self.settings)
        advantage = rewards.group_relative_advantage(reward, group, settings.normalize_std,
                                                     correction=int(settings.variant == "code"))
        return advantage.repeat_interleave(turns)
