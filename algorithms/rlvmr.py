"""RLVMR: the episode's reward, and one for the thinking that each turn says it does (arXiv:2507.22844).

A response opens with one tag (planning, explore, reflection, monitor); `tag_rewards` says what a tag earns,
and turns of equal tag are compared. Paper and released code differ in both halves, so --variant chooses both,
the second between `paper_advantage` (step_weight = 1 - alpha) and `code_advantage` (step_weight = w).
Left out: Algorithm 3 of its appendix, which compares whole transitions and discounts repeated planning.
"""

import re
from dataclasses import dataclass

import torch

import algorithms
from algorithms import rewards
from run import parallel
from run.flags import opt

SMALL_WORDS = set("around at from in into of off on onto the to up using with".split())
TAG_GROUPS = ("none", "planning", "explore", "reflection")     # what a turn is compared as; tag_S indexes it


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """RLVMR's flags."""

    variant: str = opt("paper", "tags rewarded and compared as the paper says, or as its code does",
                       ("paper", "code"))
    step_weight: float = opt(0.5, "weight of the tags' level: 1 - alpha (paper), w (code)", low=0)


def tag_rewards(tags, actions, valid, won, variant="paper"):
    """The reward of each turn's meta-reasoning tag, for one episode.

                     paper (§3)                                   code
        planning     1 if the episode was won                     the same
        explore      1 if the action names an object or           1 unless an earlier turn had the same
                     location that no earlier action named        action
        reflection   1 if the turn before was malformed or not    1 if that turn was so, and the action
                     admissible, and this one is admissible       differs from its; 1 at the first turn
        monitor, or a malformed turn: 0, and compared as "none"

    tags: texts or None; actions: texts, None where the turn was malformed; valid: admissible.  Returns the
    rewards and the tags they are compared by (of TAG_GROUPS). The paper gives no magnitudes; 1 is the code's.
    """
    earned, compared, named, code = [], [], set(), variant == "code"
    for t, (tag, action) in enumerate(zip(tags, actions, strict=True)):
        names, failed = names_in(action) if action is not None else set(), t > 0 and not valid[t - 1]
        deserved = {
            "none": False, "planning": won,
            "explore": action not in actions[:t] if code else not names <= named,
            "reflection": (t == 0 or failed and action != actions[t - 1]) if code else failed and valid[t]}
        compared.append(tag if action is not None and tag in deserved else "none")
        earned.append(float(deserved[compared[-1]]))
        named |= names
    return earned, compared


def names_in(action):
    """The words after a command's verb, each with the number after it ("drawer 2"), but small ones."""
    return set(re.findall(r"[a-z]+(?: \d+)?", action.lower().partition(" ")[2])) - SMALL_WORDS


def tag_moments(tag_reward_S, tag_S):
    """Per tag the `rewards.moments` of its turns' rewards, shape (3, tags): add them up over ranks."""
    return torch.stack([rewards.moments(tag_reward_S[tag_S == tag]) for tag in range(len(TAG_GROUPS))], dim=1)


def paper_advantage(reward_E, group_E, turns_E, tag_reward_S, tag_S, moments, alpha=0.5):
    """RLVMR as its paper's text has it: tags are compared over the whole batch.

        A_t    = alpha * A_traj + (1 - alpha) * A_MR
        A_traj = (R - mean_g R) / std_g R over the episodes of the group
        A_MR   = (r_t - mean_tag r) / std_tag r over every turn of the batch with this tag

    moments: tag_moments of the batch, summed over ranks.  Returns advantage_S. A tag with equal rewards gives
    exactly 0. std is over the population on both levels; the paper does not say.
    """
    trajectory_E = rewards.group_relative_advantage(reward_E, group_E, normalize_std=True)
    tag_advantage_S = rewards.whitened(tag_reward_S, moments[:, tag_S], eps=1e-6)
    return alpha * trajectory_E.repeat_interleave(turns_E) + (1 - alpha) * tag_advantage_S


def code_advantage(reward_S, group_S, tag_reward_S, tag_S, w):
    """RLVMR as its released code has it (and Algorithm 2 of its appendix): tags are compared within a task.

        A_t    = A_ep + w * A_step,   w = 0.5 in its settings file, 1.0 in its script
        A_ep   = (R - mean_g R) / std over the *turns* of the group, each a row (turn_row_rewards)
        A_step = (r_t - mean r) / std r over the turns of the group with this tag

    std unbiased.  Returns advantage_S. A turn that stands alone (a tag used once in a group, an episode alone
    with one turn) keeps its raw reward (GiGPO would give 0). Equal rewards of several turns give exactly 0.
    """
    tag_group_S = group_S * len(TAG_GROUPS) + tag_S
    return code_normalized(reward_S, group_S) + w * code_normalized(tag_reward_S, tag_group_S)


def code_normalized(reward_S, group_S):
    """Centred and scaled within the group, over its turns; a turn alone in its group keeps its reward."""
    advantage_S = rewards.group_relative_advantage(reward_S, group_S, normalize_std=True, correction=1)
    _, index_S, count = group_S.unique(return_inverse=True, return_counts=True)
    return torch.where(count[index_S] == 1, reward_S, advantage_S)


class Method(algorithms.Method):
    """The episodes' level and the tags', composed as the paper or as the code says."""

    Settings = Settings
    tags = True

    def __init__(self, settings):
        super().__init__(settings)
        if settings.variant == "paper" and settings.step_weight > 1:
            raise ValueError(f"--step-weight={settings.step_weight}: 1 - alpha is at most 1")

    def assign(self, episodes, decay=1.0):
        """Both levels; logs how often each tag is used and what tags earn."""
        weight, variant = self.settings.step_weight, self.settings.variant
        earned, compared = [], []
        for e in episodes:
            columns = ([getattr(turn, name) for turn in e.turns] for name in ("tag", "action", "valid"))
            reward, tags = tag_rewards(*columns, e.won, variant)
            earned += reward
            compared += map(TAG_GROUPS.index, tags)
        tagged = torch.tensor(earned), torch.tensor(compared, dtype=torch.long)
        moments = parallel.all_sum(tag_moments(*tagged))
        reward, group, turns = rewards.compared(episodes, self.settings)
        if variant == "code":
            advantage_S = code_advantage(reward, group, *tagged, weight)
        else:
            advantage_S = paper_advantage(reward, group, turns, *tagged, moments, 1 - weight)
        rewards.write_advantages(episodes, advantage_S)
        count, total, _ = moments
        metrics = {f"rlvmr/{name}_frac": float(n / count.sum()) for name, n in zip(TAG_GROUPS, count)}
        return metrics | {"rlvmr/tag_reward": float(total.sum() / count.sum())}
