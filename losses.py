"""Pure functions of a policy gradient: group-relative advantage, importance ratio, clipped surrogate, KL
estimates, token weights.

Each cites the equation it implements. No model, no text, no ranks, no randomness. Logprobs are in nats.
Shapes: E episodes, B samples, N sampled tokens (flat over everything).
"""

import math

import torch


def group_relative_advantage(reward_E, group_E, normalize_std=False, correction=0):
    """Return advantage_E: each episode's (or turn's) reward, normalized within its group.

        A_i = (R_i - mean_g R) / (std_g R + 1e-6)         GRPO, arXiv:2402.03300 §4.1.2
        A_i =  R_i - mean_g R                             normalize_std=False: Dr. GRPO, arXiv:2503.20783

    reward_E: float. group_E: int, the episode's group, those of one task. correction: of the std; 0 (over the
    population) is used for episodes; 1 (unbiased) for turns, as in verl-agent. A group of equal rewards gets
    exactly 0: the division would amplify the mean's rounding (eleven float32 rewards of 0.7 gave 0.107).
    """
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = group_E == group
        reward = reward_E[members]
        if (reward != reward[0]).any():
            scale = reward.std(correction=correction) + 1e-6 if normalize_std else 1.0
            advantage_E[members] = (reward - reward.mean()) / scale
    return advantage_E


def sequence_ratio(logprob_N, logprob_old_N, sequence_N):
    """The geometric mean of pi / pi_old over the tokens of a sequence, for each of its tokens.

        s = exp(mean over the sequence of log pi - log pi_old)                GSPO, arXiv:2507.18071 Eq. 7

    sequence_N: the number of each token's sequence, below N. Each token's s has the gradient of its own log
    pi (Eq. 14). If all tokens of a sequence have one advantage and weight, the loss's gradient is that of
    Eq. 5. If a sequence's turns have different advantages, each token keeps its own; Eq. 7's gradient would
    give all of them the mean.
    """
    numbers_2N = torch.stack([(logprob_N - logprob_old_N).detach(), torch.ones_like(logprob_N)])
    total_N, count_N = torch.zeros_like(numbers_2N).index_add_(1, sequence_N, numbers_2N)[:, sequence_N]
    return (total_N / count_N + logprob_N - logprob_N.detach()).exp()


def clipped_surrogate(ratio_N, advantage_N, clip_low=0.2, clip_high=0.28, dual_clip=0.0):
    """PPO's clipped surrogate loss per token, and the tokens whose gradient the clip removes.

        L = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = pi / pi_old

    PPO, arXiv:1707.06347 Eq. 7; with two different bounds: DAPO, arXiv:2503.14476. With dual_clip = c > 1 the
    loss of a token with a negative advantage is at most -c * A at any ratio (arXiv:1912.09729 Eq. 5; verl's c
    is 3); 0: no such bound. Returns loss_N and clipped_N (bool: a bound is active, the gradient is 0).
    """
    free_N = ratio_N * advantage_N
    bound_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    loss_N, clipped_N = -torch.minimum(free_N, bound_N), bound_N < free_N
    if dual_clip:
        most_N = torch.where(advantage_N < 0, -dual_clip * advantage_N, math.inf)
        loss_N, clipped_N = torch.minimum(loss_N, most_N), clipped_N | (most_N < loss_N)
    return loss_N, clipped_N


def sampler_weight(logprob_old_N, logprob_sampler_N, cap):
    """The weight of each token for having been sampled by another distribution than the old policy.

        w = min(pi_old / pi_sampler, cap)

    Truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"; verl's rollout correction, of tokens, with its threshold of 2. The weighted
    gradient is in expectation that under pi_old, but that a token above the cap counts with
    cap * pi_sampler in place of pi_old.
    Returns weight_N, and cut_N (bool: the cap is active).
    """
    weight_N = (logprob_old_N - logprob_sampler_N).exp()
    return weight_N.clamp(max=cap), weight_N > cap


def kl_k3(logprob_N, logprob_ref_N, limit=10.0):
    """Schulman's k3 estimate of KL(pi || ref) per token, for use in the loss.

        k3 = e^d - d - 1,  d = log ref - log pi           GRPO, arXiv:2402.03300 Eq. 4

    d is clamped to +-limit (verl clamps k3 to 10, so that its gradient is 0 beyond d = 2.6). The gradient is
    in expectation that of KL(ref || pi): E_pi[(1 - e^d) grad log pi] = -E_ref[grad log pi].
    """
    d_N = (logprob_ref_N - logprob_N).clamp(-limit, limit)
    return d_N.exp() - d_N - 1


def kl_k1(logprob_N, logprob_ref_N):
    """The k1 estimate log pi - log ref per token: subtracted from the reward, it penalizes KL(pi || ref)."""
    return logprob_N - logprob_ref_N


def token_weight(tokens_B, episode_B, reduction="token", longest=1):
    """The loss weight of a sample's tokens, and the number of units: loss = sum(weight * loss_N) / units.

        token:     1                    divided by all tokens          (DAPO: every token counts equally)
        episode:   1 / |episode|        divided by all episodes        (GRPO's 1/G sum 1/|o_i| sum_t)
        constant:  1 / longest          divided by all episodes        (Dr. GRPO: no length bias)

    tokens_B: the number of sampled tokens of each sample. episode_B: its episode, which may have several
    samples. longest: tokens, for "constant" only. Returns weight_B and units (float).
    """
    if reduction == "token":
        return torch.ones(len(tokens_B)), float(tokens_B.sum())
    episodes, index_B = episode_B.unique(return_inverse=True)
    if reduction == "constant":
        return torch.full((len(tokens_B),), 1.0 / longest), float(len(episodes))
    length_E = torch.zeros(len(episodes)).index_add_(0, index_B, tokens_B.float())
    return 1.0 / length_E[index_B].clamp(min=1), float(len(episodes))
