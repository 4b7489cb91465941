"""Credit: episodes → one advantage per turn, by the algorithm that the flags choose.

    grpo   the episode's reward against its group's: every turn of an episode alike           (`advantages`)
    gigpo  that, and each turn's return against other turns in the same state                 (`advantages`)
    rlvmr  that, and each turn's tag reward against other turns of the same tag               (`advantages`)
    ppo    the turns' rewards against a critic's values: GAE over turns                       (`ppo_samples`)

The formulas are algorithms.py's; here is what they are fed with. Groups lie whole on a rank, so only RLVMR's tags (over
the batch) and PPO's whitening need numbers of the others. Left out: how an advantage becomes a step (update.py).

Shapes: E episodes, S turns (flat over the episodes, in order), N tokens.
"""

import math
from dataclasses import dataclass

import torch

import algorithms
import parallel
import update


@dataclass(frozen=True, slots=True)
class Estimator:
    """How episodes are credited; gcd.py sets it from its flags of these names."""

    algo: str
    success_reward: float
    invalid: str
    invalid_penalty: float
    invalid_unit: str
    baseline: str
    normalize_std: bool
    step_gamma: float
    step_weight: float
    anchor: str
    composition: str
    tag_rewards: str
    gae_lambda: float
    ppo_form: str

    @property
    def reward(self):
        return self.success_reward, self.invalid_penalty, self.invalid_unit


def facts(episodes, estimator):
    """What every algorithm needs: won_E, turns_E, group_E and, per turn, whether no penalty is due (valid_S)."""
    return (torch.tensor([e.won for e in episodes]), torch.tensor([len(e.turns) for e in episodes]),
            torch.tensor([e.group for e in episodes]),
            torch.tensor([is_valid(turn, estimator) for e in episodes for turn in e.turns], dtype=torch.bool))


def is_valid(turn, estimator):
    """Whether a turn has no penalty: its command was admissible, or, with "format", it had one."""
    return turn.valid if estimator.invalid == "admissible" else turn.action is not None


def rewards(episodes, estimator):
    """reward_E, and which episodes' groups have equal rewards (equal_E), on every row where rows are compared."""
    won_E, turns_E, group_E, _ = facts(episodes, estimator)
    invalid_E = torch.tensor([sum(not is_valid(turn, estimator) for turn in e.turns) for e in episodes])
    reward_E = algorithms.episode_reward(won_E, invalid_E, turns_E, *estimator.reward)
    if estimator.invalid_unit != "own":
        return reward_E, algorithms.zero_variance(reward_E, group_E)
    group_S = group_E.repeat_interleave(turns_E)
    unequal = group_S[~algorithms.zero_variance(rows(episodes, estimator), group_S)]
    return reward_E, ~torch.isin(group_E, unequal)


def advantages(episodes, estimator):
    """advantage_S of grpo, gigpo or rlvmr, and what is to be logged of it. All ranks call it."""
    if estimator.algo == "rlvmr":
        return rlvmr(episodes, estimator)
    _, turns_E, group_E, _ = facts(episodes, estimator)
    if estimator.baseline == "turn":
        group_S = group_E.repeat_interleave(turns_E)
        advantage_S = algorithms.group_relative_advantage(rows(episodes, estimator), group_S, estimator.normalize_std,
                                                          correction=1)
    else:
        reward_E, _ = rewards(episodes, estimator)
        advantage_S = algorithms.group_relative_advantage(
            reward_E, group_E, estimator.normalize_std).repeat_interleave(turns_E)
    return gigpo(episodes, advantage_S, estimator) if estimator.algo == "gigpo" else (advantage_S, {})


def rows(episodes, estimator):
    """What each turn is compared by, where each is a row with its episode's reward: reward_S."""
    won_E, turns_E, _, valid_S = facts(episodes, estimator)
    if estimator.invalid_unit == "own":
        return algorithms.row_rewards(won_E, valid_S, turns_E, estimator.success_reward, estimator.invalid_penalty)
    return rewards(episodes, estimator)[0].repeat_interleave(turns_E)


def gigpo(episodes, advantage_S, estimator):
    """The episode's advantage plus omega times the turn's return against the others of its anchor."""
    won_E, turns_E, _, valid_S = facts(episodes, estimator)
    own = estimator.invalid_unit == "own"
    reward_S = algorithms.turn_rewards(won_E, valid_S | own, turns_E, *estimator.reward)
    return_S = algorithms.discounted_returns(reward_S, turns_E, estimator.step_gamma)
    if own:                                                  # the penalties, after discounting
        return_S = return_S - estimator.invalid_penalty * (~valid_S).float()
    anchor_S = anchors(episodes, estimator.anchor)
    step_S = algorithms.anchor_advantage(return_S, anchor_S, estimator.normalize_std)
    advantage_S = algorithms.gigpo_advantage(advantage_S, step_S, estimator.step_weight)
    sizes = parallel.all_sum({key: share * len(anchor_S) for key, share in algorithms.anchor_sizes(anchor_S).items()})
    turns = max(sum(sizes.values()), 1)
    return advantage_S, {f"gigpo/anchor_{key}_frac": count / turns for key, count in sizes.items()}


def anchors(episodes, kind):
    """anchor_S: turns of one group that were taken in the same state have the same number.

    "raw" is the paper's text, the observation as it was; "state" the last one that is not "Nothing happens.", for that
    answer would put all refused turns into one state, whatever the room.
    """
    keys = [(e.group, turn.observation if kind == "raw" else turn.anchor) for e in episodes for turn in e.turns]
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([number[key] for key in keys], dtype=torch.long)


def rlvmr(episodes, estimator):
    """Episode advantage and tag advantage, composed as the paper or as the code says."""
    _, turns_E, group_E, _ = facts(episodes, estimator)
    rewards_S, tags_S = [], []
    for e in episodes:
        reward, tags = algorithms.tag_rewards([t.tag for t in e.turns], [t.action for t in e.turns],
                                              [t.valid for t in e.turns], e.won, estimator.tag_rewards)
        rewards_S += reward
        tags_S += tags
    tag_S = torch.tensor([algorithms.TAG_GROUPS.index(tag) for tag in tags_S], dtype=torch.long)
    tag_reward_S = torch.tensor(rewards_S)
    moments = parallel.all_sum(algorithms.tag_moments(tag_reward_S, tag_S))
    if estimator.composition == "code":
        advantage_S = algorithms.rlvmr_code_advantage(rows(episodes, estimator), group_E.repeat_interleave(turns_E),
                                                      tag_reward_S, tag_S, estimator.step_weight, estimator.normalize_std)
    else:
        advantage_S = algorithms.rlvmr_paper_advantage(rewards(episodes, estimator)[0], group_E, turns_E, tag_reward_S, tag_S,
                                                       moments, 1 - estimator.step_weight)
    count, total, _ = moments
    metrics = {f"rlvmr/{name}_frac": float(n / count.sum()) for name, n in zip(algorithms.TAG_GROUPS, count)}
    return advantage_S, metrics | {"rlvmr/tag_reward": float(total.sum() / count.sum())}


def silent(episodes, advantage_S):
    """Which episodes belong to a group without any advantage. Returns silent_E."""
    loud = {e.group for e, own in zip(episodes, by_episode(episodes, advantage_S)) if any(own)}
    return torch.tensor([e.group not in loud for e in episodes])


def by_episode(episodes, value_S):
    """A value per turn, flat → one list per episode."""
    values = iter(value_S.tolist())
    return [[next(values) for _ in e.turns] for e in episodes]


# PPO

@dataclass(slots=True)
class Critic:
    """A second model that values states, and its optimizer."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(slots=True)
class Valued:
    """A sample of the policy with what its critic is to learn: lists as long as its ids, nan where nothing."""

    sample: update.Sample
    target: list[float]
    value_old: list[float]


def ppo_samples(critic, episodes, estimator, objective, first):
    """Samples with PPO's advantages, whitened over all ranks, and the critic's targets.

    Returns valued, advantage_S (that of each turn's first token) and metrics. All ranks call it.

    turn:        V at a turn's last prompt token; GAE over turns with gamma 1, no bootstrap at the end, for the turn
                 limit is part of the task. Every token of a turn has its advantage.
    verl-agent:  each turn for itself: A = R - V at every token (gamma = lambda = 1 within the response), where R is the
                 episode's success reward less this turn's own penalty.
    """
    marked = [s for k, e in enumerate(episodes) for s in update.samples_of(e, range(1, len(e.turns) + 1), first + k)]
    values = update.values(critic.model, marked, objective)
    offset = [0]
    for e in episodes:
        offset.append(offset[-1] + len(e.turns))
    place = [(i, t, offset[s.episode - first] + int(s.advantage[t]) - 1)        # sample, position, turn
             for i, s in enumerate(marked) for t, sampled in enumerate(s.sampled) if sampled]
    won_E, turns_E, _, valid_S = facts(episodes, estimator)
    if estimator.ppo_form == "turn":
        of_turn = {turn: (i, t) for i, t, turn in reversed(place)}              # the first token of each
        starts = [of_turn[turn] for turn in range(offset[-1])]
        value_S = torch.tensor([values[i][t] for i, t in starts])
        reward_S = algorithms.turn_rewards(won_E, valid_S, turns_E, *estimator.reward)
        advantage_S, return_S = algorithms.gae(reward_S, value_S, turns_E, 1.0, estimator.gae_lambda)
        targets = {start: float(r) for start, r in zip(starts, return_S)}
        unit, row = advantage_S, [turn for _, _, turn in place]
    else:
        return_S = algorithms.row_rewards(won_E, valid_S, turns_E, estimator.success_reward, estimator.invalid_penalty)
        targets = {(i, t): float(return_S[turn]) for i, t, turn in place}
        unit = torch.tensor([target - values[i][t] for (i, t), target in targets.items()])
        row = range(len(place))
    mean, std = algorithms.mean_std(parallel.all_sum(algorithms.moments(unit)))
    unit = algorithms.whitened(unit, mean, std).tolist()
    valued = [Valued(s, [math.nan] * len(s.ids), old) for s, old in zip(marked, values)]
    advantage_S = torch.zeros(offset[-1])
    for (i, t, turn), k in reversed(list(zip(place, row))):
        valued[i].sample.advantage[t] = advantage_S[turn] = unit[k]
    for (i, t), target in targets.items():
        valued[i].target[t] = target
    return valued, advantage_S, update.value_fit([v.target for v in valued], values)
