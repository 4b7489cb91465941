"""The mathematics of the methods, and nothing else: rewards, advantages, losses, token weights, intervals.

Pure functions of tensors: no model, no text, no rank, no randomness. Each cites the equation it transcribes;
where papers and their released code differ, the docstring says which one is the default here. What needs sums over
ranks takes them as `moments`, which the caller adds up.

Shapes: E episodes, S turns (GiGPO's and RLVMR's "step"; flat over the episodes, in order: turns_E cuts them apart),
B samples, N sampled tokens (flat over everything), V vocabulary, d hidden size. Logprobs are in nats.

    python -m pytest tests/test_algorithms.py
"""

import math
import re

import torch


# Rewards

def episode_reward(won_E, invalid_E, turns_E, success_reward=1.0, invalid_penalty=0.1, invalid_unit="share"):
    """What an episode earned, before any baseline.

        share:  R = success_reward * won - invalid_penalty * invalid / turns      (the small model's default)
        turn:   R = success_reward * won - invalid_penalty * invalid              (verl-agent: 10 and 0.1)
        own:    the same sum; but advantages are of row_rewards

    won_E bool, invalid_E and turns_E counts.  An episode without turns has no invalid share.
    """
    if invalid_unit == "share":
        invalid_E = invalid_E / turns_E.clamp(min=1)
    return success_reward * won_E.float() - invalid_penalty * invalid_E


def turn_rewards(won_E, valid_S, turns_E, success_reward=1.0, invalid_penalty=0.1, invalid_unit="share"):
    """What an episode earned, turn by turn: success at its last turn, the penalty where it was due.

        r_t = success_reward * won [t last] - invalid_penalty * invalid_t  (/ turns, if the unit is "share")

    Sums to episode_reward over each episode that has turns. Returns reward_S.
    """
    reward_S = -invalid_penalty * (~valid_S).float()
    if invalid_unit == "share":
        reward_S = reward_S / turns_E.repeat_interleave(turns_E)
    played_E = turns_E > 0
    last_E = turns_E.cumsum(0) - 1
    reward_S[last_E[played_E]] += success_reward * won_E[played_E].float()
    return reward_S


def row_rewards(won_E, valid_S, turns_E, success_reward=1.0, invalid_penalty=0.1):
    """What verl-agent's code compares, where each turn is a training row: the episode's success on all of its rows, and
    on a row its own penalty alone.

        R_t = success_reward * won - invalid_penalty * invalid_t                          Returns reward_S.

    GiGPO's returns there are discounted before the penalty comes off, so that no earlier turn feels it.
    """
    return success_reward * won_E.float().repeat_interleave(turns_E) - invalid_penalty * (~valid_S).float()


def discounted_returns(reward_S, turns_E, gamma):
    """What each turn still led to, within its episode.

        R_t = sum_{k >= t} gamma^(k-t) r_k                                GiGPO, arXiv:2505.10978 Eq. 5

    Summed in double precision. Returns return_S.
    """
    assert int(turns_E.sum()) == len(reward_S), f"{int(turns_E.sum())} turns, {len(reward_S)} rewards"
    reward, returns = reward_S.tolist(), [0.0] * len(reward_S)
    last_E = turns_E.cumsum(0) - 1
    ends = set(last_E[turns_E > 0].tolist())
    for t in reversed(range(len(reward))):
        returns[t] = reward[t] + (0.0 if t in ends else gamma * returns[t + 1])
    return torch.tensor(returns, dtype=reward_S.dtype, device=reward_S.device)


SMALL_WORDS = {"around", "at", "from", "in", "into", "of", "off", "on", "onto", "the", "to", "up", "using", "with"}
TAG_GROUPS = ("none", "planning", "explore", "reflection")     # RLVMR: what a turn is compared as; tag_S indexes it


def tag_rewards(tags, actions, valid, won, rule="paper"):
    """RLVMR's reward of each turn's meta-reasoning tag, for one episode.

                     paper (arXiv:2507.22844 §3)                       code (its released code)
        planning     1 if the episode was won                          the same
        explore      1 if the action names an object or location       1 unless an earlier turn had the same action
                     that no earlier action named
        reflection   1 if the turn before was malformed or not         1 if that turn was so, and the action differs from
                     admissible, and this one is admissible            that turn's; 1 at the first turn
        monitor, or a malformed turn: 0, and compared as "none"

    tags: "planning" | "explore" | "reflection" | "monitor" | None; actions: texts, None where the turn was malformed;
    valid: admissible.  Returns the rewards and the tags they are compared by (of TAG_GROUPS).
    The paper gives no magnitudes; 1 is the code's. Algorithm 3 of its appendix differs from both: it compares whole
    transitions and discounts repeated planning.
    """
    rewards, compared, given, named = [], [], set(), set()
    for t, (tag, action) in enumerate(zip(tags, actions, strict=True)):
        tag = tag if action is not None and tag in TAG_GROUPS else "none"
        names, failed = names_in(action) if action is not None else set(), t > 0 and not valid[t - 1]
        if tag == "planning":
            earned = won
        elif tag == "explore":
            earned = action not in given if rule == "code" else bool(names - named)
        elif tag == "reflection":
            earned = (t == 0 or failed and action != actions[t - 1]) if rule == "code" else failed and valid[t]
        else:
            earned = False
        given, named = given | {action}, named | names
        rewards.append(float(earned))
        compared.append(tag)
    return rewards, compared


def names_in(action):
    """What a command names beside its verb: its words, each with the number after it ("drawer 2"), but small ones."""
    return set(re.findall(r"[a-z]+(?: \d+)?", action.lower().partition(" ")[2])) - SMALL_WORDS


# Advantages of episodes: GRPO

def group_relative_advantage(reward_E, group_E, normalize_std=False, correction=0, eps=1e-6):
    """Each episode's (or turn's) reward, centred (and scaled, if asked) within its group.

        A_i = (R_i - mean_g R) / (std_g R + eps)          GRPO, arXiv:2402.03300 §4.1.2
        A_i =  R_i - mean_g R                             normalize_std=False: Dr. GRPO, arXiv:2503.20783

    reward_E float; group_E int, which task the episode played.  Returns advantage_E.
    correction: of the std; 0, over the population, for episodes; 1, unbiased, for turns. With one entry per turn in
    place of one per episode, long episodes weigh more: what verl-agent's code does by default (its paper says episodes).
    A group whose rewards are all equal gets exactly 0: rounding of the mean would otherwise be blown up by
    1/eps (eleven rewards of 0.7 in float32 came out as 0.107).
    """
    advantage_E = torch.zeros_like(reward_E)
    for group in group_E.unique():
        members = (group_E == group).nonzero()[:, 0]
        reward = reward_E[members]
        if (reward == reward[0]).all():
            continue
        scale = reward.std(correction=correction) + eps if normalize_std else 1.0
        advantage_E[members] = (reward - reward.mean()) / scale
    return advantage_E


def zero_variance(reward_E, group_E):
    """Which episodes belong to a group whose rewards are all equal, and so teach nothing. Returns bool_E."""
    equal_E = torch.zeros_like(group_E, dtype=torch.bool)
    for group in group_E.unique():
        members = group_E == group
        equal_E[members] = bool((reward_E[members] == reward_E[members][0]).all())
    return equal_E


# Advantages of turns: GiGPO (arXiv:2505.10978), RLVMR (arXiv:2507.22844), PPO (arXiv:1707.06347)

def anchor_advantage(return_S, anchor_S, normalize_std, eps=1e-6):
    """Each turn's return against those of the turns that began in the same state: GiGPO's step level.

        A^S = (R_t - mean_anchor R) / F,   F = std + eps, or 1          GiGPO Eq. 6 and 7

    anchor_S: int, the state before acting, distinct between task groups; turns of one episode may share it.
    A state met once gives 0, and so do equal returns, exactly. std is unbiased, as in verl-agent's code; the paper
    does not say.
    """
    return group_relative_advantage(return_S, anchor_S, normalize_std, correction=1, eps=eps)


def gigpo_advantage(episode_advantage_S, step_advantage_S, omega):
    """A = A^E + omega * A^S, the first that of the turn's episode (GiGPO Eq. 8). Returns advantage_S.

    Where no state is met twice this is GRPO.
    """
    return episode_advantage_S + omega * step_advantage_S


def anchor_sizes(anchor_S):
    """Shares of turns whose state was met once, 2 to 4, 5 to 16, or more times in its group; all 0 without turns."""
    _, index_S, count = anchor_S.unique(return_inverse=True, return_counts=True)
    size_S = count[index_S]
    bounds = {"1": (1, 1), "2-4": (2, 4), "5-16": (5, 16), "17+": (17, len(anchor_S))}
    turns = max(1, len(anchor_S))
    return {name: int(((size_S >= low) & (size_S <= high)).sum()) / turns for name, (low, high) in bounds.items()}


def tag_moments(tag_reward_S, tag_S):
    """Per tag: count, sum and sum of squares of its rewards. Doubles, shape (3, tags): add them up over ranks."""
    reward_S = tag_reward_S.double()
    row_3S = torch.stack([torch.ones_like(reward_S), reward_S, reward_S.square()])
    return torch.zeros(3, len(TAG_GROUPS), dtype=torch.double, device=reward_S.device).index_add_(1, tag_S, row_3S)


def rlvmr_paper_advantage(reward_E, group_E, turns_E, tag_reward_S, tag_S, moments, alpha=0.5):
    """RLVMR as its paper's text has it: tags are compared over the whole batch.

        A_t    = alpha * A_traj + (1 - alpha) * A_MR
        A_traj = (R - mean_g R) / std_g R over the episodes of the group
        A_MR   = (r_t - mean_tag r) / std_tag r over every turn of the batch with this tag

    moments: tag_moments of the batch, summed over ranks.  Returns advantage_S. A tag with equal rewards gives exactly
    0. std is over the population on both levels; the paper does not say.
    """
    mean, std = mean_std(moments)
    trajectory_E = group_relative_advantage(reward_E, group_E, normalize_std=True)
    tag_advantage_S = whitened(tag_reward_S, mean[tag_S], std[tag_S], eps=1e-6)
    return alpha * trajectory_E.repeat_interleave(turns_E) + (1 - alpha) * tag_advantage_S


def rlvmr_code_advantage(reward_S, group_S, tag_reward_S, tag_S, w, normalize_std=True):
    """RLVMR as its released code has it (and Algorithm 2 of its appendix): tags are compared within a task.

        A_t    = A_ep + w * A_step,   w = 0.5 in its settings file, 1.0 in its script
        A_ep   = (R - mean_g R) / std over the *turns* of the group, each a row with its episode's reward (row_rewards,
                 or the same for all turns of an episode)
        A_step = (r_t - mean r) / std r over the turns of the group with this tag

    std unbiased, or 1 (normalize_std=False: its "mean_norm").  Returns advantage_S. A turn that stands alone counts as
    mean 0 and std 1: a tag used once in a group keeps its raw reward (GiGPO would give 0), and so does an episode alone
    in its group if it has one turn only. Equal rewards of several turns give exactly 0.
    """
    assert (tag_S < len(TAG_GROUPS)).all(), f"tag {int(tag_S.max())} of {len(TAG_GROUPS)}"
    episode_S = code_normalized(reward_S, group_S, normalize_std)
    return episode_S + w * code_normalized(tag_reward_S, group_S * len(TAG_GROUPS) + tag_S, normalize_std)


def code_normalized(reward_S, group_S, normalize_std):
    """Centred and scaled within the group, over its turns; a turn alone in its group keeps its reward."""
    advantage_S = group_relative_advantage(reward_S, group_S, normalize_std, correction=1)
    _, index_S, count = group_S.unique(return_inverse=True, return_counts=True)
    return torch.where(count[index_S] == 1, reward_S, advantage_S)


def gae(reward_S, value_S, turns_E, gamma=1.0, lam=0.95):
    """Generalized advantage estimation over the turns of each episode, and the critic's target.

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = sum_k (gamma lam)^k delta_{t+k}     arXiv:1506.02438 Eq. 16
        return_t = A_t + V_t

    value_S: V before the turn's response.  After the last turn V is 0, won or not: the turn limit is part of the task.
    Returns advantage_S and return_S. verl-agent's PPO has no link between turns: with tokens for turns, each turn's
    tokens for an episode, the episode's reward at the last of them and gamma = lam = 1, this is its A = R - V.
    """
    next_S = torch.cat([value_S[1:], value_S.new_zeros(min(1, len(value_S)))])
    next_S[(turns_E.cumsum(0) - 1)[turns_E > 0]] = 0.0
    advantage_S = discounted_returns(reward_S + gamma * next_S - value_S, turns_E, gamma * lam)
    return advantage_S, advantage_S + value_S


def moments(x_N):
    """Count, sum and sum of squares, as three doubles: add them up over ranks."""
    x_N = x_N.double()
    return torch.stack([x_N.new_tensor(len(x_N)), x_N.sum(), x_N.square().sum()])


def mean_std(moments):
    """Mean and population std from count, sum and sum of squares. A std that is only rounding, or of nothing, is 0."""
    count, total, squares = moments
    mean, square = total / count.clamp(min=1), squares / count.clamp(min=1)
    variance = square - mean.square()
    return mean, torch.where(variance > 1e-12 * square, variance, 0.0).sqrt()


def whitened(x_N, mean, std, eps=1e-8):
    """(x - mean) / (std + eps); exactly 0 where std is 0. verl's is unbiased: a factor sqrt(1 - 1/N) smaller."""
    return torch.where(std > 0, (x_N - mean) / (std + eps), 0.0).to(x_N.dtype)


# Losses

def clipped_policy_loss(logprob_N, logprob_old_N, advantage_N, clip_low=0.2, clip_high=0.28, dual_clip=0.0):
    """The clipped surrogate, per token, and where the clip took the gradient away.

        L = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = pi / pi_old

    PPO, arXiv:1707.06347 Eq. 7; with two different bounds: DAPO, arXiv:2503.14476. With dual_clip = c > 1 the loss of a
    token of negative advantage is at most -c * A, however far its ratio has run (Ye et al., arXiv:1912.09729 Eq. 5; verl's
    c is 3); 0: no such bound.

    Returns loss_N and clipped_N (bool: a bound is what counts, so this token has no gradient).
    """
    ratio_N = (logprob_N - logprob_old_N).exp()
    free_N = ratio_N * advantage_N
    bound_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantage_N
    loss_N, clipped_N = -torch.minimum(free_N, bound_N), bound_N < free_N
    if dual_clip:
        most_N = torch.where(advantage_N < 0, -dual_clip * advantage_N, math.inf)
        loss_N, clipped_N = torch.minimum(loss_N, most_N), clipped_N | (most_N < loss_N)
    return loss_N, clipped_N


def clipped_value_loss(value_N, value_old_N, return_N, clip):
    """Half the squared error of the critic; where its move is clipped, the worse of the two.

        L = 0.5 * max((V - R)^2, (V_old + clip(V - V_old, -clip, clip) - R)^2)       as in baselines' PPO2 and verl

    clip 0: no clipping.  Returns loss_N and clipped_N (bool: the clipped term counts, so no gradient).
    """
    free_N = (value_N - return_N).square()
    if clip == 0:
        return 0.5 * free_N, torch.zeros_like(free_N, dtype=torch.bool)
    bound_N = (value_old_N + (value_N - value_old_N).clamp(-clip, clip) - return_N).square()
    return 0.5 * torch.maximum(free_N, bound_N), bound_N > free_N


def explained_variance(value_N, return_N):
    """1 - Var(R - V) / Var(R): 1 is a perfect critic, 0 a constant one; nan where the returns do not vary."""
    if len(return_N) == 0 or (return_N == return_N[0]).all():
        return math.nan
    return float(1 - (return_N - value_N).var(correction=0) / return_N.var(correction=0))


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


def token_weight(tokens_B, episode_B, reduction="token", longest=1):
    """What one token of each sample weighs in the *sum* that is divided by the number of units.

        token:     1                    divided by all tokens          (DAPO; every token counts alike)
        episode:   1 / |episode|        divided by all episodes        (GRPO's 1/G sum 1/|o_i| sum_t)
        constant:  1 / longest          divided by all episodes        (Dr. GRPO: no length bias)

    tokens_B: sampled tokens of each sample; episode_B: its episode (a sample is a whole episode or one of its
    turns: the result does not depend on which). longest: tokens, for "constant" only.
    Returns weight_B and units (float), the divisor.
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


# Which tokens of lost episodes pull at won ones: NTHR (arXiv:2505.18830)

def prediction_error(logits_NV, target_N, columns):
    """g = e_y - pi per token, in the given columns of the vocabulary: what it pushes at the output layer.

    columns: int, V* = the tokens that occur in the group's responses (the targets among them); pi is not renormalised
    to them. With every column, g h^T is the gradient of log pi(y) by the weights of an untied output layer.
    """
    hit_NV = target_N[:, None] == columns
    assert hit_NV.any(1).all(), f"targets {target_N[~hit_NV.any(1)].tolist()} not among the columns"
    return hit_NV.float() - logits_NV.float().softmax(-1)[:, columns]


def nthr_scores(hidden_Nd, error_NV, episode_N, won_E, beta=1.0):
    """How much the update of the won episodes' tokens moves each token of the group, and from where on that is much.

        s(token) = sum over tokens k of won episodes of <g_k, g> <h_k, h> = g^T M h,   M = sum_k g_k h_k^T     Eq. 7
        tau = beta * min over won episodes of the mean of s over their tokens

    One task group: hidden_Nd the last hidden state that predicted each token, error_NV prediction_error, both of the
    sampling policy; episode_N indexes won_E. A won episode's own tokens count in its s, as the equation has it; the
    text says "other correct responses".
    Returns score_N and tau (inf without a token of a won episode). Summed in float32, or double if so given.
    """
    exact = torch.promote_types(hidden_Nd.dtype, torch.float32)
    hidden_Nd, error_NV = hidden_Nd.to(exact), error_NV.to(exact)
    won_N = won_E[episode_N]
    pull_Vd = error_NV[won_N].T @ hidden_Nd[won_N]
    score_N = ((error_NV @ pull_Vd) * hidden_Nd).sum(1)
    count_E = torch.bincount(episode_N, minlength=len(won_E))
    mean_E = score_N.new_zeros(len(won_E)).index_add_(0, episode_N, score_N) / count_E.clamp(min=1)
    own = mean_E[won_E & (count_E > 0)]
    return score_N, beta * float(own.min()) if len(own) else math.inf


def nthr_weights(hidden_Nd, error_NV, episode_N, won_E, beta=1.0):
    """What multiplies each token's advantage: eta = 2 |1/2 - p| where a lost episode's token scores above tau, else 1.

    p: share of won episodes; at p = 1/2 those tokens are dropped. Arguments as in nthr_scores; weight_N is all 1 in a
    group that was won or lost as a whole. The negatives' "response" is all sampled tokens of an episode, its label the
    outcome: a choice made here, as the papers do not say what it is for agents.
    """
    weight_N = torch.ones(len(episode_N), device=hidden_Nd.device)
    if won_E.all() or not won_E.any():
        return weight_N
    score_N, threshold = nthr_scores(hidden_Nd, error_NV, episode_N, won_E, beta)
    weight_N[~won_E[episode_N] & (score_N > threshold)] = 2 * abs(0.5 - float(won_E.float().mean()))
    return weight_N


# Statistics of results

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
