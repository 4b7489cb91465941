"""CISPO: the ratio is clipped as a weight, so every token keeps its gradient (arXiv:2506.13585 Eq. 4, 5).

    L = -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi             sg: stop-gradient

The paper has no lower bound ("we did not impose a lower bound on the IS weight"), as with clip_low 1, and
gives no upper one; 5 is from ScaleRL (arXiv:2510.13786). The loss is a mean over an optimizer step's tokens
(Eq. 4: over those of each group). Left out: DAPO's dynamic sampling, which the paper also uses
(--dynamic-sampling refill), and its length penalty.
"""

import torch

from algorithms import grpo


class Loss:
    """CISPO's loss, for any algorithm's advantages: class Method(cispo.Loss, gigpo.Method)."""

    defaults = dict(clip_low=1.0, clip_high=4.0, dual_clip=0.0)

    def loss(self, ratio_N, advantage_N):
        """The gradient is that of the equation; log ratio is log pi less a constant."""
        low, high = 1 - self.objective.clip_low, 1 + self.objective.clip_high
        weight_N = ratio_N.detach().clamp(low, high)
        tiny = torch.finfo(ratio_N.dtype).tiny         # of a ratio that underflowed to 0, the log is finite
        return -weight_N * advantage_N * ratio_N.clamp(min=tiny).log(), weight_N != ratio_N


class Method(Loss, grpo.Method):
    """GRPO's advantages, by default with --normalize-std, with CISPO's loss."""

    defaults = dict(normalize_std=True, kl="none", entropy_coef=0.0)
