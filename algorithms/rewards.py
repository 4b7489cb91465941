"""What several algorithms need: what an episode earned, and how it compares with others.

Pure functions of tensors first, then what reads episodes and writes advantages. Groups lie whole on a rank;
what is compared over the whole batch goes by `moments`, which are summed over ranks.
Shapes: E episodes, S turns (flat over the episodes, in order: turns_E cuts them apart), N numbers.
"""

from dataclasses import dataclass

import torch

from run import parallel
from run.flags import opt


@dataclass(frozen=True)
class Settings:
    """What an episode earns; every algorithm has these flags."""

    variant = "paper"            # no flag; an algorithm that has a second variant makes it one
    success_reward: float = opt(1.0)       # of a won episode
    invalid: str = opt("admissible", "invalid is a turn whose command is not admissible, or (verl-agent's "
                       "code) without a command", ("admissible", "format"))
    invalid_penalty: float = opt(0.1, "taken off for invalid turns", low=0)
    invalid_unit: str = opt("share")       # of invalid turns; or for each "turn" (--variant code: off it)


def episode_reward(won_E, invalid_E, turns_E, settings):
    """What an episode earned, before any baseline.

        share:  R = success_reward * won - invalid_penalty * invalid / turns      (the small model's default)
        turn:   R = success_reward * won - invalid_penalty * invalid              (verl-agent: 10 and 0.1)

    won_E bool, invalid_E and turns_E counts.  An episode without turns has no invalid share.
    """
    if settings.invalid_unit == "share":
        invalid_E = invalid_E / turns_E.clamp(min=1)
    return settings.success_reward * won_E.float() - settings.invalid_penalty * invalid_E


def turn_rewards(won_E, valid_S, turns_E, settings):
    """What an episode earned, turn by turn: success at its last turn, the penalty where it was due.

        r_t = success_reward * won [t last] - invalid_penalty * invalid_t  (/ turns, if the unit is "share")

    Sums to episode_reward over each episode that has turns. Returns reward_S.
    """
    reward_S = -settings.invalid_penalty * (~valid_S).float()
    if settings.invalid_unit == "share":
        reward_S = reward_S / turns_E.repeat_interleave(turns_E)
    played_E = turns_E > 0
    reward_S[(turns_E.cumsum(0) - 1)[played_E]] += settings.success_reward * won_E[played_E].float()
    return reward_S


def turn_row_rewards(won_E, valid_S, turns_E, settings):
    """What verl-agent's code compares, where each turn is a row: its episode's success, its own penalty.

        R_t = success_reward * won - invalid_penalty * invalid_t                          Returns reward_S.

    GiGPO's returns there are discounted before the penalty comes off, so that no earlier turn feels it.
    """
    success_S = settings.success_reward * won_E.float().repeat_interleave(turns_E)
    return success_S - settings.invalid_penalty * (~valid_S).float()


def discounted_returns(reward_S, turns_E, gamma):
    """What each turn still led to, within its episode.

        R_t = sum_{k >= t} gamma^(k-t) r_k                                GiGPO, arXiv:2505.10978 Eq. 5

    Summed in double precision. Returns return_S.
    """
    assert int(turns_E.sum()) == len(reward_S), f"{int(turns_E.sum())} turns, {len(reward_S)} rewards"
    reward, returns = reward_S.tolist(), [0.0] * len(reward_S)
    ends = set((turns_E.cumsum(0) - 1)[turns_E > 0].tolist())
    for t in reversed(range(len(reward))):
        returns[t] = reward[t] + (0.0 if t in ends else gamma * returns[t + 1])
    return torch.tensor(returns, dtype=reward_S.dtype, device=reward_S.device)


def group_relative_advantage(reward_E, group_E, normalize_std=False, correction=0, eps=1e-6):
    """Each episode's (or turn's) reward, centred (and scaled, if asked) within its group.

        A_i = (R_i - mean_g R) / (std_g R + eps)          GRPO, arXiv:2402.03300 §4.1.2
        A_i =  R_i - mean_g R                             normalize_std=False: Dr. GRPO, arXiv:2503.20783

    reward_E float; group_E int, which task the episode played.  Returns advantage_E.
    correction: of the std; 0, over the population, for episodes; 1, unbiased, for turns, of which long
    episodes have more: verl-agent's default (its paper says episodes). A group of equal rewards gets exactly
    0: rounding of the mean would be blown up by 1/eps (eleven rewards of 0.7 in float32 came out as 0.107).
    """
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = group_E == group
        reward = reward_E[members]
        if (reward != reward[0]).any():
            scale = reward.std(correction=correction) + eps if normalize_std else 1.0
            advantage_E[members] = (reward - reward.mean()) / scale
    return advantage_E


def moments(x_N):
    """Count, sum and sum of squares, as three doubles: add them up over ranks."""
    x_N = x_N.double()
    return torch.stack([x_N.new_tensor(len(x_N)), x_N.sum(), x_N.square().sum()])


def whitened(x_N, moments, eps=1e-8):
    """(x - mean) / (std + eps); exactly 0 where there is no std, or only rounding. It is the population's;
    verl's is unbiased: a factor sqrt(1 - 1/N) smaller."""
    count, total, squares = moments
    mean, square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = square - mean.square()
    std = torch.where(variance > 1e-12 * square, variance, 0.0).sqrt()
    return torch.where(std > 0, (x_N - mean) / (std + eps), 0.0).to(x_N.dtype)


def facts(episodes, settings):
    """won_E, turns_E, group_E and, per turn, whether no penalty is due (valid_S)."""
    valid = [turn.valid if settings.invalid == "admissible" else turn.action is not None
             for e in episodes for turn in e.turns]
    return (torch.tensor([e.won for e in episodes], dtype=torch.bool),
            torch.tensor([len(e.turns) for e in episodes], dtype=torch.long),
            torch.tensor([e.group for e in episodes], dtype=torch.long),
            torch.tensor(valid, dtype=torch.bool))


def write_rewards(episodes, settings):
    """Write `episode.reward`, what each episode earned."""
    won_E, turns_E, _, valid_S = facts(episodes, settings)
    invalid_E = torch.tensor([int((~valid).sum()) for valid in valid_S.split(turns_E.tolist())])
    for episode, reward in zip(episodes, episode_reward(won_E, invalid_E, turns_E, settings).tolist()):
        episode.reward = reward


def reward_of(episodes):
    """reward_E, as written."""
    return torch.tensor([e.reward for e in episodes])


def compared(episodes, settings):
    """What is compared, within which group, and of how many turns: reward_E, group_E, turns_E; with --variant
    code each turn is a row: reward_S, group_S and 1's."""
    won_E, turns_E, group_E, valid_S = facts(episodes, settings)
    if settings.variant == "paper":
        return reward_of(episodes), group_E, turns_E
    reward_S = turn_row_rewards(won_E, valid_S, turns_E, settings)
    return reward_S, group_E.repeat_interleave(turns_E), torch.ones(len(reward_S), dtype=torch.long)


def write_advantages(episodes, advantage_S):
    """Write `turn.advantage`, of all its tokens, from a flat tensor in the order of the episodes' turns."""
    turns = [turn for episode in episodes for turn in episode.turns]
    for turn, advantage in zip(turns, advantage_S.tolist(), strict=True):
        turn.advantage, turn.token_advantage = advantage, None


def groups_of(episodes):
    """{group: its episodes}, in order."""
    groups = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return groups


def whiten_tokens(episodes):
    """Whiten the advantages of all sampled tokens over the whole batch, ranks included, in place. Every token
    counts, as in verl and OpenRLHF: a long response weighs more in mean and std than a short one."""
    turns = [turn for episode in episodes for turn in episode.turns]
    tokens = [turn.token_advantage or [turn.advantage] * len(turn.response_ids) for turn in turns]
    unit_N = torch.tensor([advantage for of_turn in tokens for advantage in of_turn], dtype=torch.float)
    white_N = whitened(unit_N, parallel.all_sum(moments(unit_N)))
    for turn, unit in zip(turns, white_N.split([len(of_turn) for of_turn in tokens])):
        turn.advantage = float(unit[0])
        turn.token_advantage = unit.tolist() if turn.token_advantage else None
