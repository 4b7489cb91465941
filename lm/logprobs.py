"""Logprobs and entropies of given tokens, computed inside the model's forward in chunks of bounded memory.

Shapes: M tokens of a sequence, N targets, V vocabulary, C hidden size.
"""

import torch
from torch.utils.checkpoint import checkpoint

from lm.restrict import restricted

CHUNK_LOGITS = 2**26      # most logits computed at once: 256 MB in fp32; a step needs a few such tensors


def token_logprobs(model, micro, temperature, entropies=False, entropy_grad=False):
    """Logprob of each target token and, if `entropies`, the entropy at its position (with a gradient if
    `entropy_grad`).

    micro: a batching.Microbatch: ids_1M with their attention layout, the positions column_N that predict the
    tokens target_N, and per target the ids `allowed` that it was sampled from (None: all), to which the
    distribution is renormalized. temperature: divides the logits. Returns logprob_N and entropy_N in fp32, in
    nats (entropies are 0 unless requested).
    """
    def head(hidden_NC, lm_head, target_N, allowed):
        logits_NV = lm_head(hidden_NC).float()
        logits_NV = restricted(logits_NV if temperature == 1 else logits_NV / temperature, allowed)
        logprob_NV = logits_NV.log_softmax(-1)
        logprob_N1 = logprob_NV.gather(1, target_N[:, None])                   # FSDP warns about views
        # last, so that recomputation in backward stops before it where it has no gradient
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            return logprob_N1, entropy(logprob_NV) if entropies else torch.zeros(len(logprob_NV))

    chunked = in_chunks(head, micro.target_N, micro.allowed)
    logprob_N1, entropy_N = model(micro.ids_1M, micro.attention, micro.column_N, chunked)
    return logprob_N1[:, 0], entropy_N


def in_chunks(head, target_N, allowed):
    """A head for `Model.forward` that applies head(hidden_NC, lm_head, target_N, allowed) in chunks.

    head returns a tuple of tensors with one row per position; the chunks' results are concatenated. With
    more than CHUNK_LOGITS logits, backward recomputes each chunk, so that one chunk's logits are in memory at
    a time.
    """
    def chunked(hidden_NC, lm_head):
        size, n = max(CHUNK_LOGITS // lm_head.out_features, 1), len(target_N)
        if n <= size:
            return head(hidden_NC, lm_head, target_N, allowed)
        chunks = [checkpoint(head, hidden_NC[i:i + size], lm_head, target_N[i:i + size],
                             allowed and allowed[i:i + size], use_reentrant=False, preserve_rng_state=False)
                  for i in range(0, n, size)]
        return tuple(torch.cat(parts) for parts in zip(*chunks))

    return chunked


def entropy(logprob_NV):
    """Entropy of each row's distribution, in nats."""
    return -(logprob_NV.exp() * logprob_NV).sum(-1)
