"""The mathematics of the method, and nothing else: rewards, advantages, the clipped loss, KL, intervals.

Pure functions of tensors: no model, no text, no rank, no randomness. Each cites the equation it transcribes;
where papers and their released code differ, the docstring says which one is the default here.

Shapes: E episodes, S samples, N sampled tokens (flat over everything), V vocabulary. Logprobs are in nats.
"""

import math

import torch


def episode_reward(won_E, invalid_E, turns_E, success_reward=1.0, invalid_penalty=0.1, invalid_unit="share"):
    """What an episode earned, before any baseline.

        share:  R = success_reward * won - invalid_penalty * invalid / turns      (the small model's default)
        turn:   R = success_reward * won - invalid_penalty * invalid              (verl-agent: 10 and 0.1)

    won_E bool, invalid_E and turns_E counts.  An episode without turns has no invalid share.
    """
    if invalid_unit == "share":
        invalid_E = invalid_E / turns_E.clamp(min=1)
    return success_reward * won_E.float() - invalid_penalty * invalid_E


def group_relative_advantage(reward_E, group_E, turns_E=None, normalize_std=False, eps=1e-6):
    """Each episode's reward, centred (and scaled, if asked) within its group.

        A_i = (R_i - mean_g R) / (std_g R + eps)          GRPO, arXiv:2402.03300 §4.1.2
        A_i =  R_i - mean_g R                             normalize_std=False: Dr. GRPO, arXiv:2503.20783

    reward_E float; group_E int, which task the episode played.  Returns advantage_E.
    turns_E given: mean and std run over turns, each counting its episode's reward once, so that long episodes
    weigh more: what verl-agent's code does by default (its paper says episodes). std is over the population
    (correction 0) for episodes and unbiased for turns, as that code has it.
    A group whose rewards are all equal gets exactly 0: rounding of the mean would otherwise be blown up by
    1/eps (eleven rewards of 0.7 in float32 came out as 0.107).
    """
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = (group_E == group).nonzero()[:, 0]
        reward = reward_E[members]
        if (reward == reward[0]).all():
            continue
        row = reward if turns_E is None else reward.repeat_interleave(turns_E[members])
        centred = reward - row.mean()
        scale = row.std(correction=0 if turns_E is None else 1) + eps if normalize_std else 1.0
        advantage_E[members] = centred / scale
    return advantage_E


def zero_variance(reward_E, group_E):
    """Which episodes belong to a group whose rewards are all equal, and so teach nothing. Returns bool_E."""
    equal_E = torch.zeros_like(group_E, dtype=torch.bool)
    for group in group_E.unique():
        members = group_E == group
        equal_E[members] = bool((reward_E[members] == reward_E[members][0]).all())
    return equal_E


def clipped_policy_loss(logprob_N, logprob_old_N, advantage_N, clip_low=0.2, clip_high=0.28):
    """The clipped surrogate, per token, and where the clip took the gradient away.

        L = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = pi / pi_old

    PPO, arXiv:1707.06347 Eq. 7; with two different bounds: DAPO, arXiv:2503.14476.

    Returns loss_N and clipped_N (bool: the minimum is the clipped term, so this token has no gradient).
    """
    ratio_N = (logprob_N - logprob_old_N).exp()
    free_N = ratio_N * advantage_N
    bound_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    return -torch.minimum(free_N, bound_N), bound_N < free_N


def kl_k3(logprob_N, logprob_ref_N, limit=10.0):
    """Schulman's k3 estimate of KL(pi || ref) per token, for use in the loss.

        k3 = e^d - d - 1,  d = log ref - log pi           GRPO, arXiv:2402.03300 Eq. 4

    Never negative. d is clamped to +-limit, as verl does. As a *loss* its gradient is that of KL(ref || pi).
    """
    d_N = (logprob_ref_N - logprob_N).clamp(-limit, limit)
    return d_N.exp() - d_N - 1


def kl_k1(logprob_N, logprob_ref_N):
    """The k1 estimate log pi - log ref per token: subtracted from the reward it penalises KL(pi || ref)."""
    return logprob_N - logprob_ref_N


def token_weight(tokens_S, episode_S, reduction="token", longest=1):
    """What one token of each sample weighs in the *sum* that is divided by the number of units.

        token:     1                    divided by all tokens          (DAPO; every token counts alike)
        episode:   1 / |episode|        divided by all episodes        (GRPO's 1/G sum 1/|o_i| sum_t)
        constant:  1 / longest          divided by all episodes        (Dr. GRPO: no length bias)

    tokens_S: sampled tokens of each sample; episode_S: its episode (a sample is a whole episode or one of its
    turns: the result does not depend on which). longest: tokens, for "constant" only.
    Returns weight_S and units (float), the divisor.
    """
    if reduction == "token":
        return torch.ones(len(tokens_S)), float(tokens_S.sum())
    episodes, index_S = episode_S.unique(return_inverse=True)
    if reduction == "constant":
        return torch.full((len(tokens_S),), 1.0 / longest), float(len(episodes))
    length_E = torch.zeros(len(episodes)).index_add_(0, index_S, tokens_S.float())
    return 1.0 / length_E[index_S].clamp(min=1), float(len(episodes))


def entropy(logits_NV):
    """Entropy of each row's distribution, in nats."""
    logprob_NV = logits_NV.log_softmax(-1)
    return -(logprob_NV.exp() * logprob_NV).sum(-1)


def wilson(successes, n, z=1.96):
    """The Wilson score interval of a share: (low, high), 95 % by default. n = 0 gives (0, 1).

        (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)        Wilson 1927
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def auc(score_N, positive_N):
    """Chance that a positive scores above a negative, ties half (Mann-Whitney); nan without both classes."""
    positive, negative = score_N[positive_N], score_N[~positive_N]
    if len(positive) == 0 or len(negative) == 0:
        return math.nan
    difference = positive[:, None] - negative[None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())
