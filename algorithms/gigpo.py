"""GiGPO: GRPO, and each turn's return against those of turns that began in the same state (arXiv:2505.10978).

    A_t = A^E + omega * A^S            Eq. 8; where no state is met twice this is GRPO

A "step" of the paper is a turn here. A state is by default the last observation with news: "Nothing happens."
would put all refused turns into one state, whatever the room. The paper's text and its released code
(verl-agent) take the raw observation; --variant code does, compares turns on the episode level too, and takes
penalties off after discounting.
"""

from dataclasses import dataclass

import torch

from algorithms import grpo, rewards
from run import parallel
from run.flags import opt


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """GiGPO's flags."""

    normalize_std: bool = opt(True, "divide advantages by the std, on both levels")
    step_gamma: float = opt(0.95, "discount of a turn's return", low=0, high=1)
    step_weight: float = opt(1.0, "omega: weight of the turns' level", low=0)


def anchor_advantage(return_S, anchor_S, normalize_std):
    """Each turn's return against those of the turns that began in the same state: the step level.

        A^S = (R_t - mean_anchor R) / F,   F = std + 1e-6, or 1         GiGPO Eq. 6 and 7

    anchor_S: int, the state before acting, distinct between task groups; turns of one episode may share it.
    A state met once and equal returns give exactly 0. std is unbiased, as in verl-agent; the paper is silent.
    """
    return rewards.group_relative_advantage(return_S, anchor_S, normalize_std, correction=1)


def anchors(episodes, raw):
    """anchor_S: one number for all turns of a group with this `turn.anchor` (raw: `turn.observation`)."""
    keys = [(e.group, turn.observation if raw else turn.anchor) for e in episodes for turn in e.turns]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys], dtype=torch.long)


def anchor_sizes(anchor_S):
    """How many turns had a state that was met once, 2 to 4, 5 to 16, or more times in its group."""
    _, index_S, count = anchor_S.unique(return_inverse=True, return_counts=True)
    range_S = torch.bucketize(count[index_S], torch.tensor([1, 4, 16]))
    return dict(zip(("1", "2-4", "5-16", "17+"), range_S.bincount(minlength=4).tolist()))


class Method(grpo.Method):
    """GiGPO: the episode's level is GRPO's."""

    Settings = Settings
    reward_alone = False

    def assign(self, episodes, decay=1.0):
        """A^E + omega * A^S; logs how often states are shared."""
        settings, code = self.settings, self.settings.variant == "code"
        won_E, turns_E, _, valid_S = rewards.facts(episodes, settings)
        reward_S = rewards.turn_rewards(won_E, valid_S | code, turns_E, settings)
        return_S = rewards.discounted_returns(reward_S, turns_E, settings.step_gamma)
        if code:                                             # the penalties, after discounting
            return_S = return_S - settings.invalid_penalty * (~valid_S).float()
        anchor_S = anchors(episodes, raw=code)
        step_S = anchor_advantage(return_S, anchor_S, settings.normalize_std)
        rewards.write_advantages(episodes, self.relative(episodes) + settings.step_weight * step_S)
        sizes = parallel.all_sum(anchor_sizes(anchor_S))
        turns = max(sum(sizes.values()), 1)
        return {f"gigpo/anchor_{key}_frac": count / turns for key, count in sizes.items()}
