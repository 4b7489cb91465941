"""Constrained decoding (--admissible-only): responses that can only give admissible commands.

The commands' token sequences form a trie. A `Restriction` follows it as a response is sampled, and records
the allowed ids at each token. Sampler and trainer mask all other ids with the same function, so that logprobs
are exact: those of the model's distribution, renormalized to the allowed ids. If only one id is allowed, its
logprob is 0 and it has no gradient, but it counts as a token in the loss's mean. Demonstrations and the
judge's answers are not restricted.
Left out: which commands there are (lm/chat.py).
Shapes: N rows, V vocabulary, P pairs of a row and a token.
"""

import torch

MASKED_LOGIT = -1e30       # gives probability exactly 0; with -inf the entropy would contain 0 * inf


def trie_of(sequences):
    """Token sequences as nested dicts {token: subtrie}. Each must end in a stop token, so that none is a
    prefix of a different one."""
    root = {}
    for ids in sequences:
        node = root
        for token in ids:
            node = node.setdefault(token, {})
    return root


def restricted(logits_NV, allowed=None):
    """The logits, with MASKED_LOGIT in row n for all ids not in allowed[n] (None or empty: unchanged)."""
    pairs = [(n, token) for n, ids in enumerate(allowed or ()) for token in ids or ()]
    if not pairs:
        return logits_NV
    row_P, token_P = torch.tensor(pairs, device=logits_NV.device).unbind(1)
    masked_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    masked_NV[row_P] = True
    masked_NV[row_P, token_P] = False
    return logits_NV.masked_fill(masked_NV, MASKED_LOGIT)


class Restriction:
    """The state of one restricted response: free until its command starts, then in the trie up to its end.

    command_starts(ids): whether the command starts after these ids; None: the response is only a command.
    """

    def __init__(self, trie, command_starts=None):
        self.trie, self.command_starts = trie, command_starts
        self.node = None if command_starts else trie     # None: free; {}: the response has ended
        self.ids, self.allowed = [], []                  # sampled ids; for each, the ids that were allowed

    @property
    def next(self):
        """The ids that are allowed next; None: all."""
        return tuple(self.node) if self.node else None

    def take(self, token):
        """Append a sampled token."""
        self.ids.append(token)
        self.allowed.append(self.next)
        if self.node and token not in self.node:
            raise FloatingPointError("the model's logprobs are not finite: a token that is not allowed")
        if self.node:
            self.node = self.node[token]
        elif self.node is None and self.command_starts(self.ids):
            self.node = self.trie
