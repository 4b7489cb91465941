"""Rewards of episodes and turns, and the normalization that several algorithms share.

Pure functions of tensors first, then functions that read episodes and write advantages. No group is split
over ranks; a normalization over the full batch uses `moments`, which are summed over ranks.
Shapes: E episodes, S turns (flat over the episodes, in order; turns_E splits them), N numbers.
"""

from dataclasses import dataclass

import torch

from infra import parallel
from infra.flags import setting


@dataclass(frozen=True)
class Settings:
    """The reward of an episode. Every algorithm has these flags."""

    variant = "paper"            # not a flag, unless the algorithm has a second variant
    success_reward: float = setting(1.0, "reward of a won episode", low=0)
    invalid: str = setting("admissible", "a turn is invalid if its command is not admissible, or (format, as "
                           "in verl-agent's code) if it has no command", ("admissible", "format"), rare=True)
    invalid_penalty: float = setting(0.1, "subtracted for invalid turns", low=0)
    invalid_unit: str = setting("share")   # the penalty is times the "share" of invalid turns, or per "turn"


def episode_reward(won_E, invalid_E, turns_E, settings):
    """Return reward_E, the reward of each episode before any baseline.

        share:  R = success_reward * won - invalid_penalty * invalid / turns      (the small model's default)
        turn:   R = success_reward * won - invalid_penalty * invalid     (10 and 0.1 are verl-agent's numbers;
                                                                          its formula is `code_turn_rewards`)

    won_E is bool, invalid_E and turns_E are counts. An episode without turns has an invalid share of 0. What
    is added here belongs in `turn_rewards` and `code_turn_rewards`, too.
    """
    if settings.invalid_unit == "share":
        invalid_E = invalid_E / turns_E.clamp(min=1)
    return settings.success_reward * won_E.float() - settings.invalid_penalty * invalid_E


def turn_rewards(won_E, valid_S, turns_E, settings):
    """Return reward_S, the episode's reward by turn: success at the last turn, a penalty at each invalid one.

        r_t = success_reward * won [t last] - invalid_penalty * invalid_t  (/ turns, if the unit is "share")

    Sums to episode_reward over each episode that has turns.
    """
    reward_S = -settings.invalid_penalty * (~valid_S).float()
    if settings.invalid_unit == "share":
        reward_S = reward_S / turns_E.repeat_interleave(turns_E)
    played_E = turns_E > 0
    reward_S[(turns_E.cumsum(0) - 1)[played_E]] += settings.success_reward * won_E[played_E].float()
    return reward_S


def code_turn_rewards(won_E, valid_S, turns_E, settings):
    """Return reward_S as verl-agent's code has it: each turn has its episode's success and its own penalty.

        R_t = success_reward * won - invalid_penalty * invalid_t
    """
    success_S = settings.success_reward * won_E.float().repeat_interleave(turns_E)
    return success_S - settings.invalid_penalty * (~valid_S).float()


def discounted_returns(reward_S, turns_E, gamma):
    """Return return_S, the discounted sum of rewards from each turn to the end of its episode.

        R_t = sum_{k >= t} gamma^(k-t) r_k                                GiGPO, arXiv:2505.10978 Eq. 5

    Summed in double precision. AssertionError, "3 turns, 2 rewards", unless turns_E adds up to the rewards.
    """
    assert int(turns_E.sum()) == len(reward_S), f"{int(turns_E.sum())} turns, {len(reward_S)} rewards"
    reward, returns = reward_S.tolist(), [0.0] * len(reward_S)
    ends = set((turns_E.cumsum(0) - 1)[turns_E > 0].tolist())
    for t in reversed(range(len(reward))):
        returns[t] = reward[t] + (0.0 if t in ends else gamma * returns[t + 1])
    return torch.tensor(returns, dtype=reward_S.dtype, device=reward_S.device)


def moments(x_N):
    """Count, sum and sum of squares, as three doubles: sum them over ranks."""
    x_N = x_N.double()
    return torch.stack([x_N.new_tensor(len(x_N)), x_N.sum(), x_N.square().sum()])


def whitened(x_N, moments, eps=1e-8):
    """(x - mean) / (std + eps); exactly 0 if the std is 0 up to rounding.

    The std is over the population; verl's is unbiased: its result is sqrt(1 - 1/N) times this one.
    """
    count, total, squares = moments
    mean, square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = square - mean.square()
    std = torch.where(variance > 1e-12 * square, variance, 0.0).sqrt()
    return torch.where(std > 0, (x_N - mean) / (std + eps), 0.0).to(x_N.dtype)


def episode_tensors(episodes, settings):
    """Return won_E, turns_E (number of turns), group_E and valid_S (False: the turn has a penalty)."""
    valid = [turn.valid if settings.invalid == "admissible" else turn.action is not None
             for e in episodes for turn in e.turns]
    return (torch.tensor([e.won for e in episodes], dtype=torch.bool),
            torch.tensor([len(e.turns) for e in episodes], dtype=torch.long),
            torch.tensor([e.group for e in episodes], dtype=torch.long),
            torch.tensor(valid, dtype=torch.bool))


def own_turn_rewards(episodes):
    """Return reward_S, the environment's own reward of each turn, which is added to the outcome's."""
    return torch.tensor([turn.reward for e in episodes for turn in e.turns], dtype=torch.float)


def own_rewards(episodes):
    """Return own_E, the sum of the environment's own rewards in each episode."""
    return torch.tensor([sum(turn.reward for turn in e.turns) for e in episodes], dtype=torch.float)


def write_rewards(episodes, settings):
    """Write `episode.reward` of each episode: the outcome's, and the sum of the environment's own."""
    won_E, turns_E, _, valid_S = episode_tensors(episodes, settings)
    invalid_E = torch.tensor([int((~valid).sum()) for valid in valid_S.split(turns_E.tolist())])
    reward_E = episode_reward(won_E, invalid_E, turns_E, settings) + own_rewards(episodes)
    for episode, reward in zip(episodes, reward_E.tolist()):
        episode.reward = reward


def stored_rewards(episodes):
    """Return reward_E, the episodes' rewards as written by `write_rewards`."""
    return torch.tensor([e.reward for e in episodes])


def grouped_rewards(episodes, settings):
    """The rewards that are compared within groups: reward_E, group_E, turns_E (turns that share each reward).

    With --variant code every turn counts separately: reward_S (`code_turn_rewards`), group_S and ones.
    """
    won_E, turns_E, group_E, valid_S = episode_tensors(episodes, settings)
    if settings.variant == "paper":
        return stored_rewards(episodes), group_E, turns_E
    reward_S = code_turn_rewards(won_E, valid_S, turns_E, settings)
    reward_S = reward_S + own_rewards(episodes).repeat_interleave(turns_E)
    return reward_S, group_E.repeat_interleave(turns_E), torch.ones(len(reward_S), dtype=torch.long)


def write_advantages(episodes, advantage_S):
    """Write `turn.advantage`, which is that of all its tokens. advantage_S: in the order of the turns."""
    turns = [turn for episode in episodes for turn in episode.turns]
    for turn, advantage in zip(turns, advantage_S.tolist(), strict=True):
        turn.advantage, turn.token_advantage = advantage, None


def groups_of(episodes):
    """Return {group: its episodes}, in order of appearance."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return groups


def whiten_tokens(episodes):
    """Whiten the advantages of all sampled tokens over the batch of all ranks, in place.

    Every token counts once, as in verl and OpenRLHF: a long response weighs more in mean and std than a short
    one. `turn.advantage` becomes that of the turn's first token.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    tokens = [turn.token_advantage or [turn.advantage] * len(turn.response_ids) for turn in turns]
    advantage_N = torch.tensor([advantage for of_turn in tokens for advantage in of_turn], dtype=torch.float)
    white_N = whitened(advantage_N, parallel.all_sum(moments(advantage_N)))
    for turn, of_turn in zip(turns, white_N.split([len(of_turn) for of_turn in tokens])):
        turn.advantage = float(of_turn[0])
        turn.token_advantage = of_turn.tolist() if turn.token_advantage else None
