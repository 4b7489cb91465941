"""RLVMR: the episode's reward, plus one for the kind of reasoning that each turn declares (arXiv:2507.22844).

A response starts with one tag (planning, explore, reflection, monitor). `tag_rewards` rewards the tags, and
turns with the same tag are compared. Paper and released code differ in what earns a tag reward and in how
rewards are compared (`paper_advantage`, where step_weight is 1 - alpha; `code_advantage`, where it is w);
--variant chooses both.
Left out: Algorithm 3 of its appendix, which compares full transitions and discounts repeated planning.
"""

import re
from dataclasses import dataclass

import torch

import algorithms
import losses
from algorithms import rewards
from infra import parallel
from infra.flags import setting

STOPWORDS = set("around at from in into of off on onto the to up using with".split())
TAG_GROUPS = ("none", "planning", "explore", "reflection")     # what turns are compared by; tag_S indexes it


@dataclass(frozen=True)
class Settings(rewards.Settings):
    """RLVMR's flags."""

    variant: str = setting("paper", "tags rewarded and compared as in the paper, or as in its code",
                           ("paper", "code"))
    step_weight: float = setting(0.5, "weight of the tag-level advantage: 1 - alpha (paper), w (code, 1 by "
                                 "its scripts)", low=0)


def tag_rewards(tags, actions, valid, won, variant="paper"):
    """Reward each turn's meta-reasoning tag in one episode.

                     paper (§3)                                   code
        planning     1 if the episode was won                     the same
        explore      1 if the action has a name (a word with      1 unless an earlier turn had the same
                     its number) that no earlier action had       action
        reflection   1 if the previous turn was malformed or      1 if the previous turn was malformed or
                     not admissible, and this one is              not admissible and had another action;
                     admissible                                   1 at the first turn
        monitor, or a malformed turn: 0, and compared as "none"

    tags: texts or None; actions: texts, None for a malformed turn; valid: admissible. Returns the rewards and
    each turn's comparison group (of TAG_GROUPS). The paper gives no magnitudes of these; 1 is the code's.
    Left out: its -0.1 for a malformed turn; the episode's reward has a penalty (`rewards.episode_reward`).
    A malformed turn has no action here; the code compares what it holds between the tags.
    """
    tag_reward, tag_group, named, code = [], [], set(), variant == "code"
    for t, (tag, action) in enumerate(zip(tags, actions, strict=True)):
        names, failed = names_in(action) if action is not None else set(), t > 0 and not valid[t - 1]
        rewarded = {
            "none": False, "planning": won,
            "explore": action not in actions[:t] if code else not names <= named,
            "reflection": (t == 0 or failed and action != actions[t - 1]) if code else failed and valid[t]}
        tag_group.append(tag if action is not None and tag in rewarded else "none")
        tag_reward.append(float(rewarded[tag_group[-1]]))
        named |= names
    return tag_reward, tag_group


def names_in(action):
    """The names after a command's verb, each with its number if any ("drawer 2"), except STOPWORDS."""
    return set(re.findall(r"[a-z]+(?: \d+)?", action.lower().partition(" ")[2])) - STOPWORDS


def tag_moments(tag_reward_S, tag_S):
    """Per tag, the `rewards.moments` of its turns' rewards, shape (3, tags): sum them over ranks."""
    return torch.stack([rewards.moments(tag_reward_S[tag_S == tag]) for tag in range(len(TAG_GROUPS))], dim=1)


def paper_advantage(reward_E, group_E, turns_E, tag_reward_S, tag_S, moments, alpha=0.5):
    """RLVMR as in its paper's text: tags are compared over the full batch.

        A_t    = alpha * A_traj + (1 - alpha) * A_MR
        A_traj = (R - mean_g R) / std_g R over the episodes of the group
        A_MR   = (r_t - mean_tag r) / std_tag r over every turn of the batch with this tag

    moments: tag_moments of the batch, summed over ranks. Returns advantage_S. A tag with equal rewards gives
    exactly 0. The std is over the population on both levels; the paper does not specify it.
    """
    trajectory_E = losses.group_relative_advantage(reward_E, group_E, normalize_std=True)
    tag_advantage_S = rewards.whitened(tag_reward_S, moments[:, tag_S], eps=1e-6)
    return alpha * trajectory_E.repeat_interleave(turns_E) + (1 - alpha) * tag_advantage_S


def code_advantage(reward_S, group_S, tag_reward_S, tag_S, w):
    """RLVMR as in its released code (and Algorithm 2 of its appendix): tags are compared within a task.

        A_t    = A_ep + w * A_step,   w = 0.5 in its settings file, 1.0 in its script
        A_ep   = (R - mean_g R) / std over the *turns* of the group (R: rewards.code_turn_rewards)
        A_step = (r_t - mean r) / std r over the turns of the group with this tag

    The std is unbiased. Returns advantage_S. A turn with no other to compare with (a tag used once in a
    group; a group with one turn) keeps its raw reward, where GiGPO gives 0. Equal rewards of several turns
    give exactly 0.
    """
    tag_group_S = group_S * len(TAG_GROUPS) + tag_S
    return code_normalized(reward_S, group_S) + w * code_normalized(tag_reward_S, tag_group_S)


def code_normalized(reward_S, group_S):
    """Normalize rewards within each group of turns; the only turn of a group keeps its reward."""
    advantage_S = losses.group_relative_advantage(reward_S, group_S, normalize_std=True, correction=1)
    _, index_S, count = group_S.unique(return_inverse=True, return_counts=True)
    return torch.where(count[index_S] == 1, reward_S, advantage_S)


class Method(algorithms.Method):
    """Episode-level and tag-level advantages, combined as in the paper or as in the code."""

    Settings = Settings
    tags = True
    code_defaults = algorithms.Method.code_defaults | dict(step_weight=1.0)     # of its scripts, not its yaml

    def __init__(self, settings):
        super().__init__(settings)
        if settings.variant == "paper" and settings.step_weight > 1:
            raise ValueError(f"--step-weight={settings.step_weight}: 1 - alpha is at most 1")

    def assign(self, episodes):
        """Write both levels. Metrics: the share of turns in each group of tags ("none": monitor's, and those
        without a tag), and the mean tag reward.
        """
        weight, variant = self.settings.step_weight, self.settings.variant
        tag_reward, tag_group = [], []
        for e in episodes:
            columns = ([getattr(turn, name) for turn in e.turns] for name in ("tag", "action", "valid"))
            reward, tags = tag_rewards(*columns, e.won, variant)
            tag_reward += reward
            tag_group += map(TAG_GROUPS.index, tags)
        tagged = torch.tensor(tag_reward), torch.tensor(tag_group, dtype=torch.long)
        moments = parallel.all_sum(tag_moments(*tagged))
        reward, group, turns = rewards.grouped_rewards(episodes, self.settings)
        if variant == "code":
            advantage_S = code_advantage(reward, group, *tagged, weight)
        else:
            advantage_S = paper_advantage(reward, group, turns, *tagged, moments, 1 - weight)
        rewards.write_advantages(episodes, advantage_S)
        count, total, _ = moments
        metrics = {f"rlvmr/{name}_frac": float(n / count.sum()) for name, n in zip(TAG_GROUPS, count)}
        return metrics | {"rlvmr/tag_reward": float(total.sum() / count.sum())}
