"""Attention layouts: the position of each token in a forward, and the keys that its query attends to.

There are three layouts: `Rows`, padded rows to train on; `Packed`, the same tokens in one row without
padding; `Append`, chunks that continue the rows of a `KVCache`. Packed and Append use variable-length
attention if the device has it (`varlen`); otherwise rows are padded, and Rows and Append use masks.

Shapes: B rows, T positions of a chunk, S cache slots read, H query heads, K key/value heads, G = H / K query
heads per key/value head, Q = G * T queries of one key/value head, D head size.
"""

import inspect
import sys
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F


@cache
def varlen(device, dtype, head_dim):
    """torch's variable-length attention, or None if it cannot be used here.

    It needs torch 2.12, an Ampere GPU, half precision and a head size that is a multiple of 8. If it is
    missing on a GPU, each rank warns once, with the reason.
    """
    if device.type == "cpu":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
        parameters = inspect.signature(varlen_attn).parameters
    except ImportError:
        parameters = {}
    missing = [name for name in ("enable_gqa", "seqused_k", "num_splits") if name not in parameters]
    if missing:
        reason = f"torch {torch.__version__}'s varlen_attn without {', '.join(missing)}"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"{dtype}"
    elif head_dim % 8:
        reason = f"a head size of {head_dim}"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"a {torch.cuda.get_device_name(device)}"
    else:
        return varlen_attn
    print(f"{reason}: falling back to masked attention, padded rows and decoding without CUDA graphs, which "
          "is slower", file=sys.stderr)
    return None


class KVCache:
    """Keys and values of B token sequences: kv[layer] is [2, B, length + 1, K, D].

    Slot index = absolute position = RoPE position. The last slot takes padding: it is written, never read.
    """

    def __init__(self, config, slots, length, dtype, device):
        self.length, self.group = length, config.num_attention_heads // config.num_key_value_heads
        self.varlen = varlen(torch.device(device), dtype, config.head_dim)
        shape = (2, slots, length + 1, config.num_key_value_heads, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device)       # zeros: masked garbage must be finite
                   for _ in range(config.num_hidden_layers)]

    def grow(self, length):
        """Grow every row to `length` positions, layer by layer, so that only one layer is in memory twice."""
        for layer, kv in enumerate(self.kv):
            self.kv[layer] = kv.new_zeros(*kv.shape[:2], length + 1, *kv.shape[3:])
            self.kv[layer][:, :, :self.length] = kv[:, :, :self.length]
        self.length = length

    def copy_row(self, src, dst, length):
        """Copy the first `length` slots of row src to row dst."""
        for kv in self.kv:
            kv[:, dst, :length] = kv[:, src, :length]

    def export_row(self, row, length):
        """A copy of a row's first `length` slots: per layer a [2, length, K, D], for `import_rows`."""
        return [kv[:, row, :length].clone() for kv in self.kv]

    def import_rows(self, rows, exported):
        """Write the result of `export_row` into the first slots of each of `rows`."""
        for kv, values in zip(self.kv, exported):
            kv[:, rows, :values.shape[1]] = values[:, None]


class Append:
    """Layout of a chunk [B, T] that is appended to rows of a cache and attends to their earlier slots.

    rows: the cache rows, as a slice or a tensor of indices. start_B: the slot of each row's first new token.
    n_valid: how many of each row's T tokens are real, as a list, or as a tensor if T is 1 (None: all T). The
    rest is padding, whose logits are meaningless; a row with 0 keeps its contents. context: number of slots
    to read, at least the longest row's length after this chunk; an int, to avoid a host sync.
    Use under torch.no_grad(): writes to a cache have no gradient.
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
            self.valid, queries_B = slice(None), torch.full_like(start_B, T)
            if isinstance(n_valid, list):        # drop a chunk's padding; a decoding step keeps fixed shapes
                queries_B = n_valid_B
                valid_BT = torch.arange(T) < torch.tensor(n_valid)[:, None]
                self.valid = valid_BT.flatten().nonzero()[:, 0].to(device)
            self.q_starts = F.pad(queries_B.cumsum(0), (1, 0)).int()
            self.keys_B = (start_B + queries_B).int()
        else:
            future_BTS = torch.arange(context, device=device) > self.position_BT[:, :, None]
            mask_BTS = torch.zeros_like(future_BTS, dtype=dtype).masked_fill_(future_BTS, -torch.inf)
            self.mask_B1QS = mask_BTS.repeat(1, cache.group, 1)[:, None]   # ordered by head, like the queries

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Write the chunk's keys and values, and attend to them and all earlier slots: [B, T, H * D]."""
        (B, T, H, D), (k, v) = q_BTHD.shape, self.cache.kv[layer]
        k[self.row_B1, self.slot_BT] = k_BTKD
        v[self.row_B1, self.slot_BT] = v_BTKD
        if self.cache.varlen:
            # seqused_k already makes a single query causal; a causal window would disable the kernel that
            # reads K/V once for all heads of a group. One split: with more, a row's result depends on the
            # lengths of other rows
            out, window = torch.zeros_like(q_BTHD).view(B * T, H, D), (-1, -1 if T == 1 else 0)
            out[self.valid] = self.cache.varlen(
                q_BTHD.reshape(B * T, H, D)[self.valid], k.flatten(0, 1), v.flatten(0, 1), self.q_starts,
                self.k_starts, T, k.shape[1], window_size=window, enable_gqa=True, seqused_k=self.keys_B,
                num_splits=1)
            return out.view(B, T, -1)
        k_BKSD, v_BKSD = (x[self.rows, :self.context].transpose(1, 2) for x in (k, v))
        # treat G heads of T queries as one head of G * T queries, so that K/V are never repeated
        q_BKQD = q_BTHD.transpose(1, 2).reshape(B, k.shape[2], -1, D)
        out = F.scaled_dot_product_attention(q_BKQD, k_BKSD, v_BKSD, attn_mask=self.mask_B1QS)
        return out.reshape(B, H, T, D).transpose(1, 2).reshape(B, T, -1)


class Rows:
    """Layout of padded rows to train on, each causal from position 0; padding (any ids) is on the right.

    parts: for each row its consecutive parts (n, prefix): n tokens that attend to each other causally and to
    `prefix`, a list of earlier columns of the row, which precede them in this order. So a row can contain a
    text and branches that continue from points within it. None: each row is one part without a prefix.
    """

    def __init__(self, T, device, parts=None):
        self.position_BT, self.mask_B1TT = torch.arange(T, device=device)[None], None
        if parts and any(len(row_parts) > 1 for row_parts in parts):
            position_BT = torch.zeros(len(parts), T, dtype=torch.long)
            mask_BTT = torch.eye(T, dtype=torch.bool).repeat(len(parts), 1, 1)    # padding attends to itself
            for position_T, mask_TT, row_parts in zip(position_BT, mask_BTT, parts):
                first = 0
                for n, prefix in row_parts:
                    part = slice(first, first := first + n)
                    position_T[part] = torch.arange(len(prefix), len(prefix) + n)
                    mask_TT[part, prefix] = True
                    mask_TT[part, part] = torch.ones(n, n, dtype=torch.bool).tril()
            self.position_BT, self.mask_B1TT = position_BT.to(device), mask_BTT.to(device)[:, None]

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Attention of each query over the keys of its part and prefix: [B, T, H * D]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask_B1TT,
                                             is_causal=self.mask_B1TT is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Packed:
    """The layout of `Rows`, concatenated into a single row without padding, for `varlen`.

    Each part is one sequence of `attention`: its keys are its prefix's, gathered, and then its own.
    """

    def __init__(self, parts, device, attention):
        self.attention, positions, keys, q_lengths, k_lengths = attention, [], [], [], []
        for row_parts in parts:
            row_start = len(positions)
            for n, prefix in row_parts:
                start = len(positions)
                keys += [*(row_start + column for column in prefix), *range(start, start + n)]
                positions += range(len(prefix), len(prefix) + n)
                q_lengths.append(n)
                k_lengths.append(len(prefix) + n)
        self.position_BT = torch.tensor([positions], device=device)
        self.keys = torch.tensor(keys, device=device) if len(keys) > len(positions) else slice(None)
        self.q_starts, self.k_starts = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device)
                                        for n in (q_lengths, k_lengths))
        self.longest = max(q_lengths), max(k_lengths)

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Attention of each query over the keys of its part and prefix: [1, T, H * D]."""
        k, v = (x[0][self.keys] for x in (k_BTKD, v_BTKD))
        out = self.attention(q_BTHD[0], k, v, self.q_starts, self.k_starts, *self.longest,
                             window_size=(-1, 0), enable_gqa=True)
        return out.reshape(1, len(q_BTHD[0]), -1)
