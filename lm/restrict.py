"""Which tokens may come next, where a response can only give commands that are possible now.

The commands' token ids are a trie; a `Restriction` walks it as a response is sampled and keeps what was
allowed at each token. Sampler and trainer bar the others with the same function, so logprobs stay exact: they
are of the model's distribution, renormalised to the tokens allowed. Where one token is left, its logprob is
0 and it has no gradient (it still counts as a token of the loss's mean). Demonstrations are imitated, and the
judge's questions answered, over the whole vocabulary. Left out: what the commands are (lm/chat.py).
Shapes: N rows, V vocabulary, P pairs of a row and a token.
"""

import torch

BARRED = -1e30       # a logit whose probability is exactly 0; with -inf an entropy would have 0 * inf


def trie_of(sequences):
    """Token sequences as nested dicts, {token: what may follow}; each ends in a stop, so none begins
    another."""
    root = {}
    for ids in sequences:
        node = root
        for token in ids:
            node = node.setdefault(token, {})
    return root


def restricted(logits_NV, allowed=None):
    """The logits, in row n BARRED for all tokens but those of allowed[n], if it holds any."""
    places = [(n, token) for n, ids in enumerate(allowed or ()) for token in ids or ()]
    if not places:
        return logits_NV
    row_P, token_P = torch.tensor(places, device=logits_NV.device).unbind(1)
    barred_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
    barred_NV[row_P] = True
    barred_NV[row_P, token_P] = False
    return logits_NV.masked_fill(barred_NV, BARRED)


class Restriction:
    """One response under way: free until its command begins, then along the trie to its stop token.

    begins(ids): whether the command begins after these ids; None: the response is nothing but a command.
    """

    def __init__(self, trie, begins=None):
        self.trie, self.begins = trie, begins
        self.node = None if begins else trie     # None: free; {}: the response has ended
        self.ids, self.allowed = [], []          # what was taken, and what might have been

    @property
    def next(self):
        """The ids that may come next; None: all."""
        return tuple(self.node) if self.node else None

    def take(self, token):
        """Go on with this token."""
        self.ids.append(token)
        self.allowed.append(self.next)
        if self.node:
            self.node = self.node[token]
        elif self.node is None and self.begins(self.ids):
            self.node = self.trie
