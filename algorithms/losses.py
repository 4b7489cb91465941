"""The losses of a policy and what is measured beside them: clipped surrogate, KL, token weights, entropy.

Pure functions of tensors: no model, no text, no rank, no randomness. Each cites the equation it transcribes.
Shapes: B samples, N sampled tokens (flat over everything), V vocabulary. Logprobs are in nats.
"""

import math

import torch


def clipped_policy_loss(logprob_N, logprob_old_N, advantage_N, clip_low=0.2, clip_high=0.28, dual_clip=0.0):
    """The clipped surrogate, per token, and where the clip took the gradient away.

        L = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = pi / pi_old

    PPO, arXiv:1707.06347 Eq. 7; with two different bounds: DAPO, arXiv:2503.14476. With dual_clip = c > 1 the
    loss of a token of negative advantage is at most -c * A, however far its ratio has run (arXiv:1912.09729
    Eq. 5; verl's c is 3); 0: no such bound. Returns loss_N and clipped_N (bool: a bound counts: no gradient).
    """
    ratio_N = (logprob_N - logprob_old_N).exp()
    free_N = ratio_N * advantage_N
    bound_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    loss_N, clipped_N = -torch.minimum(free_N, bound_N), bound_N < free_N
    if dual_clip:
        most_N = torch.where(advantage_N < 0, -dual_clip * advantage_N, math.inf)
        loss_N, clipped_N = torch.minimum(loss_N, most_N), clipped_N | (most_N < loss_N)
    return loss_N, clipped_N


def kl_k3(logprob_N, logprob_ref_N, limit=10.0):
    """Schulman's k3 estimate of KL(pi || ref) per token, for use in the loss.

        k3 = e^d - d - 1,  d = log ref - log pi           GRPO, arXiv:2402.03300 Eq. 4

    d is clamped to +-limit (verl clamps k3 to 10, and so d at 2.6). Its gradient is that of KL(ref || pi).
    """
    d_N = (logprob_ref_N - logprob_N).clamp(-limit, limit)
    return d_N.exp() - d_N - 1


def kl_k1(logprob_N, logprob_ref_N):
    """The k1 estimate log pi - log ref per token: subtracted from the reward it penalises KL(pi || ref)."""
    return logprob_N - logprob_ref_N


def token_weight(tokens_B, episode_B, reduction="token", longest=1):
    """What one token of each sample weighs in the *sum* that is divided by the number of units.

        token:     1                    divided by all tokens          (DAPO; every token counts alike)
        episode:   1 / |episode|        divided by all episodes        (GRPO's 1/G sum 1/|o_i| sum_t)
        constant:  1 / longest          divided by all episodes        (Dr. GRPO: no length bias)

    tokens_B: sampled tokens of each sample; episode_B: its episode (all of which is a sample, or each turn:
    no matter). longest: tokens, for "constant" only. Returns weight_B and units (float), the divisor.
    """
    if reduction == "token":
        return torch.ones(len(tokens_B)), float(tokens_B.sum())
    episodes, index_B = episode_B.unique(return_inverse=True)
    if reduction == "constant":
        return torch.full((len(tokens_B),), 1.0 / longest), float(len(episodes))
    length_E = torch.zeros(len(episodes)).index_add_(0, index_B, tokens_B.float())
    return 1.0 / length_E[index_B].clamp(min=1), float(len(episodes))


def entropy(logits_NV):
    """Entropy of each row's distribution, in nats."""
    logprob_NV = logits_NV.log_softmax(-1)
    return -(logprob_NV.exp() * logprob_NV).sum(-1)
