"""What GRPO does to a base model, in closed form: the tilted optimum, and where each estimator really stops.

Q is the base's probability of a right response, p the trained policy's; beta the coefficient of the KL term.
Everything is for a reward of 0 or 1. The theorems are arXiv:2510.15990's as far as its abstract says them;
the forms and the recursions are worked out here. Left out: runs, which studies/origin.py holds against them.
"""

import math

import torch


def logit(p):
    """ln p / (1 - p); -inf and inf at the ends."""
    return math.log(p) - math.log1p(-p) if 0 < p < 1 else math.copysign(math.inf, p - 0.5)


def sigmoid(x):
    """The inverse of `logit`."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def tilted_policy(logprob_Y, reward_Y, beta):
    """The log of the optimum of E[r] - beta KL(pi || pi_ref) over all responses Y.

        pi*(y) = pi_ref(y) exp(r(y) / beta) / Z

    So a response that the base never gives (-inf) is never given, no probability changes by more than a
    factor exp((r_max - r_min) / beta), and among equal rewards all ratios stay.
    """
    return (logprob_Y + reward_Y / beta).log_softmax(-1)


def tilted(q, beta):
    """The right responses' share of it: logit p* = logit Q + 1 / beta."""
    return sigmoid(logit(q) + 1 / beta)


def gain(q, beta):
    """p* - Q = Q (1 - Q) (e^(1/beta) - 1) / (1 - Q + Q e^(1/beta))."""
    grown = math.expm1(1 / beta)
    return q * (1 - q) * grown / (1 + q * grown)


def best_mass(beta):
    """The Q at which the gain is largest: 1 / (1 + e^(1 / 2 beta))."""
    return sigmoid(-1 / (2 * beta))


def k3_mass(q, beta):
    """Where k3 in the loss stops: p (1 - p) = beta (p - Q), for its gradient is that of KL(pi_ref || pi)."""
    return ((1 - beta) + math.sqrt((1 - beta) ** 2 + 4 * beta * q)) / 2


def std_mass(q, beta, eps=1e-6):
    """Where rewards over their std lead: the smallest p above Q with logit p = logit Q + 1 / (beta std),
    std sqrt(p (1 - p)) + eps, which small steps from Q come to first; 1 where there is none.

    With p on the right from the step before it is a recursion (of the form of Mroueh's, arXiv:2503.06639),
    whose steps are not small and may jump past it.
    """
    def beyond(x):
        return x - logit(q) - 1 / (beta * (math.sqrt(sigmoid(x) * (1 - sigmoid(x))) + eps))

    low, high = logit(q), 2 * math.asinh(beta)     # there x - 1 / (beta std), concave, is largest: 1 / std is
    if low >= high or beyond(high) < 0:            # 2 cosh(x / 2), but for eps
        return 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) < 0 else (low, middle)
    return sigmoid(low)


def signal(q, group):
    """How likely the rewards of a group differ: 1 - Q^G - (1 - Q)^G."""
    return -math.expm1(group * math.log1p(-q)) - q ** group if q < 1 else 0.0


def push(p, q, beta, group, outside):
    """The expected gradient of one group, to the logit of a policy that is right with probability p.

    All 2^G groups by their number c of right ones: rewards less their mean times the score, and the penalty
    beta ln(pi / pi_ref), less its own mean, or (outside) as it is.
    """
    total, grown = 0.0, (math.log(p / q), math.log((1 - p) / (1 - q)))
    for c in range(group + 1):
        chance = math.comb(group, c) * p ** c * (1 - p) ** (group - c)
        mean = 0.0 if outside else (c * grown[0] + (group - c) * grown[1]) / group
        right = 1 - c / group - beta * (grown[0] - mean)
        wrong = -c / group - beta * (grown[1] - mean)
        total += chance * (c * right * (1 - p) - (group - c) * wrong * p)
    return total


def group_mass(q, beta, group, outside=False):
    """Where groups of G with their own mean stop, by bisection of `push`: logit p = logit Q + 1 / beta where
    reward and penalty are centred together (--kl reward), (1 - 1/G) / beta where the penalty is outside."""
    low, high = logit(q), logit(q) + 2 / beta
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if push(sigmoid(middle), q, beta, group, outside) > 0 else (low, middle)
    return sigmoid(low)


def pass_at(k, n, right):
    """The chance that one of k responses is right, unbiased from n of which so many are (Chen et al.,
    arXiv:2107.03374 section 2.1): 1 - C(n - c, k) / C(n, k). ValueError for k above n."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} responses: expected 1 to {n}")
    return 1 - math.comb(n - right, k) / math.comb(n, k)


def shift_of(pairs):
    """The one shift of log-odds that explains how p came from Q best, in squares of p. pairs: (Q, p) of
    problems; None where no problem has 0 < Q < 1."""
    q_N, p_N = torch.tensor([pair for pair in pairs if 0 < pair[0] < 1], dtype=torch.double).reshape(-1, 2).T
    if not len(q_N):
        return None
    shifts = torch.linspace(-6, 12, 1801, dtype=torch.double)
    error = (torch.sigmoid(torch.logit(q_N)[:, None] + shifts) - p_N[:, None]).square().sum(0)
    return float(shifts[error.argmin()])
