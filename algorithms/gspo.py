"""GSPO: one importance ratio for a sequence, the geometric mean of its tokens' (arXiv:2507.18071 Eq. 5 to 7).

    L = -mean over sequences of min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)
    s = (pi(sequence) / pi_old(sequence))^(1 / tokens)

The paper's sequence is the answer to a question. Here it is, by --sequence, all sampled tokens of an episode,
which have one reward, or those of each turn, weighted by their share of the episode's tokens. A judge's
answer is a sequence, and its loss a mean over tokens. The bounds, 3e-4 and 4e-4, are the paper's. See
losses.sequence_ratio.
"""

from dataclasses import dataclass

from algorithms import grpo
from infra.flags import setting


@dataclass(frozen=True)
class Settings(grpo.Settings):
    """GRPO's flags and what a sequence is."""

    sequence: str = setting("episode", "what has one ratio: the sampled tokens of an episode (not with "
                            "--history), or of a turn", ("episode", "turn"))


class Loss:
    """GSPO's ratio and bounds, for any algorithm's advantages: class Method(gspo.Loss, gigpo.Method)."""

    ratio = "episode"
    defaults = dict(clip_low=3e-4, clip_high=4e-4, reduction="episode", dual_clip=0.0)


class Method(Loss, grpo.Method):
    """GRPO's advantages, by default with --normalize-std, with GSPO's ratio."""

    Settings = Settings
    defaults = dict(normalize_std=True, kl="none", entropy_coef=0.0)

    def __init__(self, settings):
        super().__init__(settings)
        self.ratio = settings.sequence
