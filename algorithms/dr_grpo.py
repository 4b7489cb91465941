"""Dr. GRPO: GRPO without its two biases (arXiv:2503.20783).

    A = R - mean_g R                          no division by the std, which favours easy and hard tasks
    L = 1/episodes * sum over tokens / longest         no division by the length, which favours long failures

longest: the sampled tokens that an episode may have, --max-turns times --max-response-tokens. It is constant,
and no episode is dropped. AdamW's step does not depend on such a divisor, but for three things: gradients are
clipped to --max-grad-norm, AdamW's eps of 1e-8 is not small beside tiny ones, and with GCD lambda is relative
to it, for the judge's loss stays a mean over tokens.
"""

from algorithms import grpo


class Method(grpo.Method):
    """GRPO with Dr. GRPO's settings."""

    defaults = dict(normalize_std=False, reduction="constant", clip_low=0.2, clip_high=0.2, dual_clip=0.0,
                    entropy_coef=0.0, dynamic_sampling="keep", kl="none")
    code_defaults = grpo.Method.code_defaults | dict(normalize_std=False)
