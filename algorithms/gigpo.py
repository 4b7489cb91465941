"""GiGPO: GRPO plus a comparison of turns that start in the same state (arXiv:2505.10978).

    A_t = A^E + omega * A^S            Eq. 8; A^E is GRPO's (by default with --normalize-std)

A "step" of the paper is a turn here. The state before a turn is by default the last informative observation
(`turn.anchor`): the raw "Nothing happens." would merge all turns after a refused command, in any room. The
paper's text and its released code (verl-agent) use the raw observation, as does --variant code, which also
compares turns on the episode level and subtracts penalties after discounting.
"""

from dataclasses import dataclass

import torch

import losses
from algorithms import grpo, rewards
from infra import parallel
from infra.flags import setting


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """GiGPO's flags."""

    variant: str = setting("paper", "the paper, or verl-agent's code: its rewards, turns compared on the "
                           "episode level, raw observations as states, penalties not discounted",
                           ("paper", "code"))
    normalize_std: bool = setting(True, "divide advantages by the std, on both levels")
    step_gamma: float = setting(0.95, "discount of a turn's return", low=0, high=1)
    step_weight: float = setting(1.0, "omega: weight of the turn-level advantage", low=0)


def anchor_advantage(return_S, anchor_S, normalize_std):
    """The step level: each turn's return relative to those of the turns that start in the same state.

        A^S = (R_t - mean_anchor R) / F,   F = std + 1e-6, or 1         GiGPO Eq. 6 and 7

    anchor_S: int, the state before acting, different in each task group; turns of one episode may share it.
    Returns advantage_S: exactly 0 for a state that occurs once and for equal returns. The std is unbiased, as
    in verl-agent; the paper does not specify it.
    """
    return losses.group_relative_advantage(return_S, anchor_S, normalize_std, correction=1)


def anchor_numbers(episodes, raw):
    """Return anchor_S: equal for turns of a group with equal `turn.anchor` (raw: `turn.observation`)."""
    keys = [(e.group, turn.observation if raw else turn.anchor) for e in episodes for turn in e.turns]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys], dtype=torch.long)


def anchor_sizes(anchor_S):
    """Count the turns whose state occurs once, 2 to 4, 5 to 16, or more times in its group."""
    _, index_S, count = anchor_S.unique(return_inverse=True, return_counts=True)
    range_S = torch.bucketize(count[index_S], torch.tensor([1, 4, 16]))
    return dict(zip(("1", "2-4", "5-16", "17+"), range_S.bincount(minlength=4).tolist()))


class Method(grpo.Method):
    """GiGPO: GRPO's episode-level advantage plus a step-level one."""

    Settings = Settings
    allows_refill = False

    def assign(self, episodes):
        """Write A^E + omega * A^S. Metrics: how often states are shared."""
        settings, code = self.settings, self.settings.variant == "code"
        won_E, turns_E, _, valid_S = rewards.episode_tensors(episodes, settings)
        reward_S = rewards.turn_rewards(won_E, valid_S | code, turns_E, settings)
        reward_S = reward_S + rewards.own_turn_rewards(episodes)
        return_S = rewards.discounted_returns(reward_S, turns_E, settings.step_gamma)
        if code:                                             # penalties are not discounted
            return_S = return_S - settings.invalid_penalty * (~valid_S).float()
        anchor_S = anchor_numbers(episodes, raw=code)
        step_S = anchor_advantage(return_S, anchor_S, settings.normalize_std)
        rewards.write_advantages(episodes, self._episode_level(episodes) + settings.step_weight * step_S)
        sizes = parallel.all_sum(anchor_sizes(anchor_S))
        turns = max(sum(sizes.values()), 1)
        return {f"gigpo/anchor_{key}_frac": count / turns for key, count in sizes.items()}
