"""Variable-length attention (lm.attention.Varlen) against fp32 masks on the same numbers, by path.

The paths are those of the layouts: decoding with many rows and with few, prefill into a cache, answers that
share a prompt; to train, packed texts without and with common prefixes, with gradients. Lengths are skewed,
the rows of a cache lie in any order, and between them are large numbers, which must not be read. A check of
lab.bench.gpu.
"""

import random

import torch

from lm.attention import Forked, Pool

LONG = -1                   # stands for the longest length
PATHS = {                   # (queries, keys) of each sequence; of answers (own keys, the prompt's)
    "decode": [(1, 1), (1, 2), (1, 9), (1, LONG), (1, 1), (1, 33)] * 12,       # one key: a row not in use
    "decode_few": [(1, 1), (1, LONG), (1, 7)],
    "prefill": [(1, 5), (30, LONG), (7, 7), (1, 1), (17, 40)],
    "answers": [(0, 1), (40, LONG), (0, LONG), (9, 39), (40, 39), (1, 1)],
    "packed": [(1, 1), (LONG, LONG), (1, 1), (39, 39)],
    "prefixes": [(LONG, LONG), (9, 39), (1, LONG), (33, 40)],
}
TRAINED = ("packed", "prefixes")


def errors(varlen, config, device, dtype, longest):
    """{path: largest error, relative to the largest number of the result}, and of gradients and sums."""
    result = {}
    for path, lengths in PATHS.items():
        lengths = [tuple(longest if n == LONG else n for n in pair) for pair in lengths]
        of_path = errors_of_answers if path == "answers" else errors_of
        result |= of_path(varlen, path, lengths, config, device, dtype)
    return result


def errors_of(varlen, path, lengths, config, device, dtype):
    """The errors of one path with sequences of these (queries, keys)."""
    torch.manual_seed(len(lengths))
    queries, keys = zip(*lengths)
    (q_first, _), (k_first, n_slots) = rows_of(queries, 0), rows_of(keys, 0 if path in TRAINED else 5)
    q = torch.randn(sum(queries), config.num_attention_heads, config.head_dim)
    k, v = torch.full((2, n_slots, config.num_key_value_heads, config.head_dim), 1e4)
    for first, m in zip(k_first, keys):
        k[first:first + m], v[first:first + m] = torch.randn(2, m, *k.shape[1:])
    inputs = [x.to(device, dtype).requires_grad_(path in TRAINED) for x in (q, k, v)]
    exact = [x.detach().float().requires_grad_(path in TRAINED) for x in inputs]
    want = [masked(*(x[a:a + n] for x, a, n in zip(exact, (a, b, b), (n, m, m))))
            for a, b, (n, m) in zip(q_first, k_first, lengths)]
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
    return {path: error(varlen.cached(*arguments, keys_B), want)}


@torch.no_grad()
def errors_of_answers(varlen, path, lengths, config, device, dtype):
    """The error of a decoding step of two answers to each prompt, of these (own keys, prompt's keys)."""
    torch.manual_seed(0)
    own_keys, keys = [n for n, _ in lengths for _ in range(2)], [m for _, m in lengths]
    caches = [Pool(config, len(n), varlen, dtype, device) for n in (keys, own_keys)]
    for cache, n, gap in zip(caches, (keys, own_keys), (5, 6)):         # own rows have room for a new token
        cache.fit([0] * len(n), [m + gap for m in n])
        cache.kv[0].fill_(1e4)
        for first, m in zip(cache.first, n):
            cache.kv[0][:, first:first + m].normal_()
    B, H, K, D = len(own_keys), config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (torch.randn(B, 1, heads, D, device=device).to(dtype) for heads in (H, K, K))
    keys_R, own_B = (torch.tensor(n, device=device) for n in (keys, own_keys))
    active_B = torch.ones(B, dtype=torch.bool, device=device)
    layout = Forked(*caches, keys_R, own_B, active_B, (max(keys), max(own_keys) + 1))
    out, want = layout.attend(0, q, k, v), []
    for b in range(B):
        parts = [cache.export_row(row, 0, n)[0].float()
                 for cache, row, n in zip(caches, (b // 2, b), (keys[b // 2], own_keys[b] + 1))]
        want.append(masked(q[b].float(), *torch.cat(parts, 1)).flatten(1))
    return {path: error(out[:, 0], torch.cat(want))}


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


def masked(q_NHD, k_MKD, v_MKD):
    """Causal attention of one sequence with a mask, [N, H, D]; the last query attends to all keys."""
    (N, H, D), M = q_NHD.shape, len(k_MKD)
    q_HND, k_HMD, v_HMD = (x.repeat_interleave(H // x.shape[1], 1).transpose(0, 1)
                           for x in (q_NHD, k_MKD, v_MKD))
    future_NM = torch.ones(N, M, dtype=torch.bool, device=q_NHD.device).triu(M - N + 1)
    score_HNM = (q_HND @ k_HMD.transpose(1, 2) * D ** -0.5).masked_fill(future_NM, -torch.inf)
    return (score_HNM.softmax(-1) @ v_HMD).transpose(0, 1)


def error(found, want):
    """Largest difference relative to the largest number of `want`; infinite for a wrong shape or NaN."""
    if found.shape != want.shape or not found.isfinite().all():
        return float("inf")
    return ((found.float() - want).abs().max() / want.abs().max()).item()
