"""DAPO: GRPO with four changes, all of them settings here (arXiv:2503.14476).

    clip-higher            ratio between 1 - 0.2 and 1 + 0.28
    token-level loss       the mean over all tokens of an optimizer step (Eq. 8: of each group)
    dynamic sampling       groups of equal rewards, penalties included, are replaced: refill
                           (the paper's: all right or all wrong)
    no KL                  and advantages are divided by the group's std

Left out: its overlong handling. The filter masks answers that were cut: a response cut here ends its episode,
which is lost, or is an invalid turn. The soft penalty is on the length of one long answer: an agent's
responses are commands, and what an episode may be long in, its turns, is limited by the task.
"""

from algorithms import grpo


class Method(grpo.Method):
    """GRPO with DAPO's settings."""

    defaults = dict(clip_low=0.2, clip_high=0.28, dual_clip=0.0, entropy_coef=0.0, reduction="token",
                    normalize_std=True, dynamic_sampling="refill", kl="none")
