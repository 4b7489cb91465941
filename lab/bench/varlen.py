"""Variable-length attention (lm.attention.Varlen) against fp32 masks on the same numbers, by path.

The paths are those of the layouts: decoding with many rows and with few, prefill into a cache, answers over
their own keys and over those of a shared prompt (whose query heads are as many queries of a key's head); to
train, packed texts without and with common prefixes, with gradients. Lengths are skewed, the rows of a cache
lie in any order, and between them are large numbers, which must not be read. A check of lab.bench.gpu.
"""

import random
from types import SimpleNamespace

import torch

from lm.attention import Shared

LONG = -1                   # stands for the longest length
PATHS = {                   # (queries, keys) of each sequence
    "decode": [(1, 1), (1, 2), (1, 9), (1, LONG), (1, 1), (1, 33)] * 12,       # one key: a row not in use
    "decode_few": [(1, 1), (1, LONG), (1, 7)],
    "prefill": [(1, 5), (30, LONG), (7, 7), (1, 1), (17, 40)],
    "answers_own": [(6, 1), (6, LONG), (6, 39)],
    "answers_prompt": [(48, 1), (48, LONG), (48, 39)],
    "packed": [(1, 1), (LONG, LONG), (1, 1), (39, 39)],
    "prefixes": [(LONG, LONG), (9, 39), (1, LONG), (33, 40)],
}
TRAINED, SHARED = ("packed", "prefixes"), ("answers_own", "answers_prompt")


def errors(varlen, config, device, dtype, longest):
    """{path: largest error, relative to the largest number of the result}, and of gradients and sums."""
    result = {}
    for path, lengths in PATHS.items():
        lengths = [tuple(longest if n == LONG else n for n in pair) for pair in lengths]
        result |= errors_of(varlen, path, lengths, config, device, dtype)
    return result


def errors_of(varlen, path, lengths, config, device, dtype):
    """The errors of one path with sequences of these (queries, keys)."""
    torch.manual_seed(len(lengths))
    queries, keys = zip(*lengths)
    (q_first, _), (k_first, n_slots) = rows_of(queries, 0), rows_of(keys, 0 if path in TRAINED else 5)
    heads = config.num_key_value_heads if path in SHARED else config.num_attention_heads
    q = torch.randn(sum(queries), heads, config.head_dim)
    k, v = torch.full((2, n_slots, config.num_key_value_heads, config.head_dim), 1e4)
    for first, m in zip(k_first, keys):
        k[first:first + m], v[first:first + m] = torch.randn(2, m, *k.shape[1:])
    inputs = [x.to(device, dtype).requires_grad_(path in TRAINED) for x in (q, k, v)]
    exact = [x.detach().float().requires_grad_(path in TRAINED) for x in inputs]
    causal = path not in SHARED
    want, sums = zip(*(masked(*(x[a:a + n] for x, a, n in zip(exact, (a, b, b), (n, m, m))), causal)
                       for a, b, (n, m) in zip(q_first, k_first, lengths)))
    starts = [torch.tensor(x, dtype=torch.int32, device=device)
              for x in ([*q_first, sum(queries)], [*k_first, n_slots])]
    arguments, want = (*inputs, *starts, max(queries), max(keys)), torch.cat(want)
    keys_B = torch.tensor(keys, dtype=torch.int32, device=device)
    if path in TRAINED:
        out, direction = varlen.causal(*arguments), torch.randn(want.shape).to(device)
        (out.float() * direction).sum().backward()
        (want * direction).sum().backward()
        gradients = [error(x.grad, y.grad) for x, y in zip(inputs, exact)]
        return {path: error(out, want), f"{path}_backward": max(gradients)}
    if path in SHARED:
        pool = SimpleNamespace(varlen=varlen, kv=[inputs[1:]], first_B=starts[1][:-1])
        out, found = Shared(pool, keys_B, queries[0], max(keys)).attend(0, inputs[0])
        return {path: error(out, want), f"{path}_sums": error(found.T, torch.cat(sums, 1))}
    return {path: error(varlen.cached(*arguments, keys_B), want)}


def rows_of(lengths, gap):
    """(first slot of each row, number of slots) of rows with these lengths: without gaps in order, else in
    any order.
    """
    order, first, end = [*range(len(lengths))], [0] * len(lengths), 0
    if gap:
        random.Random(0).shuffle(order)
    for i in order:
        first[i], end = end + gap, end + gap + lengths[i]
    return first, end + gap


def masked(q_NHD, k_MKD, v_MKD, causal):
    """Attention of one sequence with a mask, [N, H, D], and the log of the sums of exp(score), [H, N]."""
    (N, H, D), M = q_NHD.shape, len(k_MKD)
    q_HND, k_HMD, v_HMD = (x.repeat_interleave(H // x.shape[1], 1).transpose(0, 1)
                           for x in (q_NHD, k_MKD, v_MKD))
    score_HNM = q_HND @ k_HMD.transpose(1, 2) * D ** -0.5
    if causal:
        future_NM = torch.ones(N, M, dtype=torch.bool, device=q_NHD.device).triu(M - N + 1)
        score_HNM = score_HNM.masked_fill(future_NM, -torch.inf)
    return (score_HNM.softmax(-1) @ v_HMD).transpose(0, 1), score_HNM.logsumexp(-1)


def error(found, want):
    """Largest difference relative to the largest number of `want`; infinite for a wrong shape or NaN."""
    if found.shape != want.shape or not found.isfinite().all():
        return float("inf")
    return ((found.float() - want).abs().max() / want.abs().max()).item()
