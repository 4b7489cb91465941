"""Who sees what: where the tokens of a forward stand, and which keys and values their queries meet.

A forward takes one of three places: `Rows`, to train on (None is the plainest of them, one sample a row);
`Packed`, the same tokens without padding; `Append`, a chunk after what a `KVCache` holds of its row. Where
the device has attention over sequences of any length (`varlen`), Packed and Append use it; elsewhere Rows and
Append mask what is not to be seen.

B rows, T positions of a chunk, S cache slots read, H query heads, K key/value heads, G = H / K query heads
that share one of them, Q = G * T queries of one key/value head, D head size.
"""

import inspect
import sys
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F


@cache
def varlen(device, dtype, head_dim):
    """torch's attention over sequences of any length, where this torch and this device have all of it that is
    used here (2.12 and up, Ampere and up, half precision, heads of a multiple of 8); else None, and each rank
    says why, once, where it might be missed."""
    if device.type == "cpu":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
        known = inspect.signature(varlen_attn).parameters
    except ImportError:
        known = {}
    lacks = [name for name in ("enable_gqa", "seqused_k", "num_splits") if name not in known]
    if lacks:
        lack = f"torch {torch.__version__}'s varlen_attn without {', '.join(lacks)}"
    elif dtype not in (torch.bfloat16, torch.float16):
        lack = f"{dtype}"
    elif head_dim % 8:
        lack = f"a head size of {head_dim}"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        lack = f"a {torch.cuda.get_device_name(device)}"
    else:
        return varlen_attn
    print(f"{lack}: attention is masked, rows are padded and decoding is not captured, which is slower",
          file=sys.stderr)
    return None


class KVCache:
    """Keys and values of some rows of text: kv[layer] is [2, B, length + 1, K, D].

    Slot index = absolute position = RoPE position. The last slot is a bin for padding: written, never read.
    """

    def __init__(self, config, slots, length, dtype, device):
        self.length, self.group = length, config.num_attention_heads // config.num_key_value_heads
        self.varlen = varlen(torch.device(device), dtype, config.head_dim)
        shape = (2, slots, length + 1, config.num_key_value_heads, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device)       # zeros: masked garbage must be finite
                   for _ in range(config.num_hidden_layers)]

    def grow(self, length):
        """Make room for so many positions a row; a layer at a time, so that little is held twice."""
        for layer, kv in enumerate(self.kv):
            self.kv[layer] = kv.new_zeros(*kv.shape[:2], length + 1, *kv.shape[3:])
            self.kv[layer][:, :, :self.length] = kv[:, :, :self.length]
        self.length = length

    def copy_row(self, src, dst, length):
        """Let row dst hold what row src holds in its first `length` slots."""
        for kv in self.kv:
            kv[:, dst, :length] = kv[:, src, :length]

    def export_row(self, row, length):
        """A copy of the row's first `length` slots, a [2, length, K, D] a layer, for `import_rows`."""
        return [kv[:, row, :length].clone() for kv in self.kv]

    def import_rows(self, rows, exported):
        """Write what `export_row` gave into the first slots of some rows."""
        for kv, given in zip(self.kv, exported):
            kv[:, rows, :given.shape[1]] = given[:, None]


class Append:
    """A chunk that is appended to rows of a cache, and sees what these hold before it.

    rows: a slice of the cache's, or a tensor of their numbers. Row b's first n_valid[b] ids (all T if None)
    go to slot start_B[b] onwards and see its earlier slots; logits beyond mean nothing, and a row with 0
    keeps all it holds. n_valid: a list of chunks' lengths, or a tensor where T is 1. context: slots to read,
    at least the longest row's length after this chunk; an int, to spare a sync. Under no_grad: writes to a
    cache have no gradient.
    """

    def __init__(self, cache, rows, start_B, n_valid, T, context):
        assert not torch.is_grad_enabled(), "a forward with a cache has no gradient: use torch.no_grad()"
        assert 0 < context <= cache.length, f"context {context} of a cache of length {cache.length}"
        self.cache, self.rows, self.context, device = cache, rows, context, start_B.device
        dtype, step_T = cache.kv[0].dtype, torch.arange(T, device=device)
        self.position_BT = self.slot_BT = start_B[:, None] + step_T
        if n_valid is not None:
            n_valid_B = torch.as_tensor(n_valid, device=device)
            self.slot_BT = self.position_BT.masked_fill(step_T >= n_valid_B[:, None], cache.length)
        row_B = torch.arange(cache.kv[0].shape[1], device=device)[rows]
        self.row_B1 = row_B[:, None]
        if cache.varlen:
            first_B = (row_B * (cache.length + 1)).int()
            self.k_starts = torch.cat([first_B, first_B[-1:] + cache.length + 1])
            self.valid, asked_B = slice(None), torch.full_like(start_B, T)
            if isinstance(n_valid, list):        # a chunk's padding is left out; a step's shapes stay
                asked_B = n_valid_B
                valid_BT = torch.arange(T) < torch.tensor(n_valid)[:, None]
                self.valid = valid_BT.flatten().nonzero()[:, 0].to(device)
            self.q_starts = F.pad(asked_B.cumsum(0), (1, 0)).int()
            self.seen_B = (start_B + asked_B).int()
        else:
            future_BTS = torch.arange(context, device=device) > self.position_BT[:, :, None]
            mask_BTS = torch.zeros_like(future_BTS, dtype=dtype).masked_fill_(future_BTS, -torch.inf)
            self.mask_B1QS = mask_BTS.repeat(1, cache.group, 1)[:, None]    # head-major, like the queries

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """What the queries make of the chunk, which is written, and of all before it, [B, T, H * D]."""
        (B, T, H, D), (k, v) = q_BTHD.shape, self.cache.kv[layer]
        k[self.row_B1, self.slot_BT] = k_BTKD
        v[self.row_B1, self.slot_BT] = v_BTKD
        if self.cache.varlen:
            # a single query is causal by seqused_k; told so, it would lose the kernel that reads K/V once for
            # all heads of a group. One split: else what a row gets depends on the others' lengths
            out, window = torch.zeros_like(q_BTHD).view(B * T, H, D), (-1, -1 if T == 1 else 0)
            out[self.valid] = self.cache.varlen(
                q_BTHD.reshape(B * T, H, D)[self.valid], k.flatten(0, 1), v.flatten(0, 1), self.q_starts,
                self.k_starts, T, k.shape[1], window_size=window, enable_gqa=True, seqused_k=self.seen_B,
                num_splits=1)
            return out.view(B, T, -1)
        k_BKSD, v_BKSD = (x[self.rows, :self.context].transpose(1, 2) for x in (k, v))
        # G heads of T queries become one head of G * T: K/V are never repeated
        q_BKQD = q_BTHD.transpose(1, 2).reshape(B, k.shape[2], -1, D)
        out = F.scaled_dot_product_attention(q_BKQD, k_BKSD, v_BKSD, attn_mask=self.mask_B1QS)
        return out.reshape(B, H, T, D).transpose(1, 2).reshape(B, T, -1)


class Rows:
    """Rows of tokens to train on, each causal from position 0; pad on the right with anything.

    parts: for each row those of which it is made, one after the other: (n, before), n tokens that see each
    other causally and, before themselves, the columns of the row in this list, in this order. So a row may
    hold a text and what goes on from some place in it. None: each row is one part.
    """

    def __init__(self, T, device, parts=None):
        self.position_BT, self.mask_B1TT = torch.arange(T, device=device)[None], None
        if parts and any(len(of_row) > 1 for of_row in parts):
            position_BT = torch.zeros(len(parts), T, dtype=torch.long)
            mask_BTT = torch.eye(T, dtype=torch.bool).repeat(len(parts), 1, 1)    # padding sees itself
            for position_T, mask_TT, of_row in zip(position_BT, mask_BTT, parts):
                first = 0
                for n, before in of_row:
                    here = slice(first, first := first + n)
                    position_T[here] = torch.arange(len(before), len(before) + n)
                    mask_TT[here, before] = True
                    mask_TT[here, here] = torch.ones(n, n, dtype=torch.bool).tril()
            self.position_BT, self.mask_B1TT = position_BT.to(device), mask_BTT.to(device)[:, None]

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """What the queries make of what each may see, [B, T, H * D]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_B1TT,
                                             is_causal=self.mask_B1TT is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Packed:
    """`Rows` one after the other in a single row without padding, for `varlen`.

    A part meets the keys that it sees and then its own: they are gathered, and nothing else is repeated.
    """

    def __init__(self, parts, device, attention):
        self.attention, positions, keys, q_lengths, k_lengths = attention, [], [], [], []
        for of_row in parts:
            first = len(positions)                   # of the row, in the single one
            for n, before in of_row:
                here = len(positions)
                keys += [*(first + column for column in before), *range(here, here + n)]
                positions += range(len(before), len(before) + n)
                q_lengths.append(n)
                k_lengths.append(len(before) + n)
        self.position_BT = torch.tensor([positions], device=device)
        self.keys = torch.tensor(keys, device=device) if len(keys) > len(positions) else slice(None)
        self.q_starts, self.k_starts = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device)
                                        for n in (q_lengths, k_lengths))
        self.longest = max(q_lengths), max(k_lengths)

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """What the queries make of what each may see, [1, T, H * D]."""
        k, v = (x[0][self.keys] for x in (k_BTKD, v_BTKD))
        out = self.attention(q_BTHD[0], k, v, self.q_starts, self.k_starts, *self.longest,
                             window_size=(-1, 0), enable_gqa=True)
        return out.reshape(1, len(q_BTHD[0]), -1)
