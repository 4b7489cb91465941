"""What GRPO does to a base model, in closed form: the tilted optimum, and the fixed point of each estimator.

Q is the base model's probability of a correct response, p the trained policy's; beta is the coefficient of
the KL term. All results are for a reward of 0 or 1. The theorems are those of arXiv:2510.15990, as its
public reviews describe them (its abstract has no formula); formulas and recursions are derived here. Left
out: runs (lab/studies/origin.py compares them with these formulas).
"""

import math

import torch


def logit(p):
    """ln p / (1 - p); -inf and inf at the ends."""
    return math.log(p) - math.log1p(-p) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


def sigmoid(x):
    """The inverse of `logit`."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def tilted(q, beta):
    """Probability p* of a correct response under the policy that maximizes E[r] - beta KL(pi || pi_ref).

        pi*(y) = pi_ref(y) exp(r(y) / beta) / Z,   so   logit p* = logit Q + 1 / beta
    """
    return sigmoid(logit(q) + 1 / beta)


def k3_mass(q, beta, value=1.0):
    """Fixed point of p with k3 in the loss, for one decision: value p (1 - p) = beta (p - Q).

    k3's gradient is that of KL(pi_ref || pi). value: what the decision is worth; 0 leaves p at Q.
    """
    gap = value - beta
    root = math.sqrt(gap**2 + 4 * value * beta * q)
    return (gap + root) / (2 * value) if gap > 0 else 2 * beta * q / (root - gap)      # no cancellation


def k3_tokens(base_K, beta, group):
    """Probability of the one correct response at the fixed point with k3 in the loss, token by token.

    base_K: the base's probabilities of its tokens, each given those before it. The loss applies k3 to each
    token under the policy's own prefixes, and the group's own mean scales the reward by 1 - 1/G. So from the
    last token, with V the probability that the correct tokens after it follow:

        (1 - 1/G) V p (1 - p) = beta (p - q)

    Applied to the response as a whole, `k3_mass` has no V and is another curve.
    """
    follows = 1.0
    for q in reversed(base_K):
        follows *= k3_mass(q, beta, (1 - 1 / group) * follows)
    return follows


def std_mass(q, beta, eps=1e-6):
    """Fixed point of p with rewards divided by their std, for large groups; 1 if there is none.

    The smallest p > Q with logit p = logit Q + 1 / (beta std), std = sqrt(p (1 - p)) + eps: the one that
    small steps from Q reach first. With the previous step's p on the right-hand side, the equation is a
    recursion (of the form of Mroueh's, arXiv:2503.06639); its steps are not small and may jump past this p.
    """
    def excess(x):
        return x - logit(q) - 1 / (beta * (math.sqrt(sigmoid(x) * (1 - sigmoid(x))) + eps))

    # high: the maximum of the concave function x - 1 / (beta std); without eps, 1 / std = 2 cosh(x / 2)
    low, high = logit(q), 2 * math.asinh(beta)
    if low >= high or excess(high) < 0:
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return sigmoid(low)


def push(p, q, beta, group, outside):
    """Expected gradient of one group with respect to the policy's logit; p: its probability to be correct.

    The sum over all 2^G groups, by their number c of correct responses. An advantage is the reward minus the
    group's mean reward, minus the penalty beta ln(pi / pi_ref); the penalty is centered by the group's mean
    too, unless `outside`.
    """
    total, growth = 0.0, (math.log(p / q), math.log((1 - p) / (1 - q)))
    for c in range(group + 1):
        chance = math.comb(group, c) * p ** c * (1 - p) ** (group - c)
        mean = 0.0 if outside else (c * growth[0] + (group - c) * growth[1]) / group
        correct = 1 - c / group - beta * (growth[0] - mean)
        incorrect = -c / group - beta * (growth[1] - mean)
        total += chance * (c * correct * (1 - p) - (group - c) * incorrect * p)
    return total


def group_mass(q, beta, group, outside=False):
    """Fixed point of p with groups of G and their own mean as the baseline, by bisection of `push`.

    logit p - logit Q is 1 / beta if reward and penalty are centered jointly (--kl reward), (1 - 1/G) / beta
    if the penalty is outside.
    """
    low, high = logit(q), logit(q) + 2 / beta
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if push(sigmoid(middle), q, beta, group, outside) > 0 else (low, middle)
    return sigmoid(low)


def pass_at(k, n, correct):
    """Unbiased estimate of pass@k from n responses, `correct` of them correct.

    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, section 2.1). ValueError for k < 1 or k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses: expected 1 to {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def shift_of(pairs):
    """The shift of log-odds from Q to p that fits all problems best, by least squares of p.

    pairs: (Q, p) of each problem. None if no problem has 0 < Q < 1.
    """
    q_N, p_N = torch.tensor([pair for pair in pairs if 0 < pair[0] < 1], dtype=torch.double).reshape(-1, 2).T
    if not len(q_N):
        return None
    shifts = torch.linspace(-6, 12, 1801, dtype=torch.double)
    error = (torch.sigmoid(torch.logit(q_N)[:, None] + shifts) - p_N[:, None]).square().sum(0)
    return float(shifts[error.argmin()])
