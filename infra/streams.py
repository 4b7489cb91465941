"""Named random streams: every random draw of training is from a stream whose name is computed here, but the
first weights, which are drawn from the seed itself (lm/model.py), and an environment's choice of tasks.

A stream is named by the run's seed, a purpose (all are listed here), and numbers such as the iteration and
the episode, so a draw does not depend on batch, rank or order.
"""

import operator

import torch

MASK64 = (1 << 64) - 1
# Purposes: the first number after the seed
DEMONSTRATIONS, QUESTIONS, COLD_START_ORDER, ROLLOUT, JUDGE, CORRECTION, EVALUATION, DAGGER, DAGGER_ORDER, \
    LORA, CREDIT = range(2, 13)
# Of an iteration's JUDGE stream: 0 chooses turns, 1 samples answers, 2 chooses a large model's, 3 redraws


def mix64(x):
    """splitmix64's output function: a bijection of 64-bit integers that spreads each input bit over all."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def stream(seed, *path):
    """Return the 63-bit name of a random stream, such as stream(seed, ROLLOUT, iteration, episode).

    It is the same on every machine. TypeError for a number that is not an integer.
    """
    state = 0
    for number in (seed, *path):
        state = mix64(state ^ (operator.index(number) & MASK64))
    return state >> 1


def generator(seed, *path):
    """Return a torch.Generator for this stream. On the CPU torch uses only the low 32 bits of its name."""
    return torch.Generator("cpu").manual_seed(stream(seed, *path))
