"""Attention layouts: the position of each token in a forward, and the keys that its query attends to.

There are six. `Rows` is of whole texts. To train on texts with common prefixes: `Packed` and `Masked`. To
continue the rows of a cache: `PackedAppend` those of a `Pool`, `MaskedAppend` those of a `Rectangle`.
`Packed` and `PackedAppend` need variable-length attention, which some GPUs have (`varlen`); `Masked` and
`MaskedAppend` do not. `Forked` continues rows that share a prompt, in either way.

Shapes: B rows, T positions of a chunk, N tokens of all chunks or texts, S keys read, C parts of them, P slots
of a cache, H query heads, K key/value heads, G = H / K query heads per key/value head, Q = G * T queries of
one key/value head, D head size, R prompts, each of A = B / R rows.
"""

import inspect
import math
import sys
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain, count
from typing import NamedTuple

import torch
import torch.nn.functional as F

from infra.parallel import print0

GROWTH = 64        # positions that rows of equal room get beyond what they need, at least
SPLIT_KEYS = 640   # read by one block of threads in decoding, where torch does not choose how many


class Varlen(NamedTuple):
    """torch's variable-length attention over sequences that lie one after the other, in three functions.

    causal(q, k, v, q_starts, k_starts, longest_q, longest_k): sequence i has queries q_starts[i] to
    q_starts[i + 1], and keys likewise; the last query attends to all keys, the one before to all but the
    last, and so on. Has a gradient.
    cached(q, k, v, q_starts, k_starts, longest_q, longest_k, keys_B): the same, but sequence i has keys_B[i]
    keys, from k_starts[i] on, wherever that is. No gradient.
    shared(the same arguments): as `cached`, but each query attends to all keys of its sequence. Returns the
    output and the log of the sum of the exponentials of each query's scores, [H, N].
    """

    causal: object
    cached: object
    shared: object


@cache
def varlen(device, dtype, head_dim):
    """The `Varlen` of the installed torch, or None if it cannot be used here.

    It needs torch 2.11, an Ampere GPU, half precision and a head size that is a multiple of 8 and at most
    256. If it is missing on a GPU, rank 0 warns once, with the reason.
    """
    if device.type == "cpu":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
        parameters = inspect.signature(varlen_attn).parameters
    except ImportError:
        parameters = {}
    if "window_size" not in parameters:
        reason = f"torch {torch.__version__}, whose variable-length attention is older than 2.11's"
    elif dtype not in (torch.bfloat16, torch.float16):
        reason = f"{dtype}"
    elif head_dim % 8 or head_dim > 256:
        reason = f"a head size of {head_dim}"
    elif torch.version.hip:
        reason = f"ROCm {torch.version.hip}"
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        reason = f"a {torch.cuda.get_device_name(device)}"
    elif device.type == "cuda" and not torch.backends.cuda.is_flash_attention_available():
        reason = f"torch {torch.__version__}, which was built without flash attention"
    else:
        gqa = {"enable_gqa": True} if "enable_gqa" in parameters else {}     # 2.11 needs no permission
        causal = partial(varlen_attn, window_size=(-1, 0), **gqa)
        return Varlen(causal, cached_by_operator, shared_by_operator)
    print0(f"{reason}: falling back to masked attention and decoding without CUDA graphs, which is slower, "
           "and takes memory that grows with the square of --context", file=sys.stderr)
    return None


def can_split():
    """Whether this torch lets one choose how many blocks of threads share a row's keys: from 2.13 on.

    2.12's operator has the argument, but refuses it ("num_splits requires FA3").
    """
    return torch.__version__ >= (2, 13)


def cached_by_operator(q, k, v, q_starts, k_starts, longest_q, longest_k, keys_B):
    """`Varlen.cached`, by the operator under varlen_attn: torch 2.11's varlen_attn has no seqused_k.

    For single queries several blocks of threads share a row's keys, since one alone would leave a GPU idle,
    but only in models whose query heads share keys. From torch 2.13 on they are longest_k / SPLIT_KEYS;
    earlier ones choose how many, by longest_k, and fewer the more rows there are.
    """
    # Causal, but for single queries, which keys_B makes causal: for them a window would disable the kernel
    # that reads K/V once for all heads of a group.
    right, splits = -1 if longest_q == 1 else 0, {}
    if can_split():
        splits["num_splits"] = min(128, -(-longest_k // SPLIT_KEYS)) if longest_q == 1 else 1
    return torch.ops.aten._flash_attention_forward(
        q, k, v, q_starts, k_starts, longest_q, longest_k, 0.0, right == 0, False, window_size_left=-1,
        window_size_right=right, seqused_k=keys_B, **splits)[0]


def shared_by_operator(q, k, v, q_starts, k_starts, longest_q, longest_k, keys_B):
    """`Varlen.shared`, by the operator under varlen_attn, whose extra outputs have changed their names."""
    return torch.ops.aten._flash_attention_forward(
        q, k, v, q_starts, k_starts, longest_q, longest_k, 0.0, False, False, seqused_k=keys_B)[:2]


def kv_cache(config, rows, dtype, device):
    """A cache of rows without room yet: a `Pool` if there is variable-length attention, or a `Rectangle`."""
    device = torch.device(device)
    if attention := varlen(device, dtype, config.head_dim):
        return Pool(config, rows, attention, dtype, device)
    return Rectangle(config, rows, 0, dtype, device)


class Pool:
    """Keys and values of B token sequences, for variable-length attention: kv[layer] is [2, P + 1, K, D].

    Row b has room for room[b] positions in consecutive slots: position p, which is also the RoPE position,
    is in slot first[b] + p. The last slot of the pool takes padding: it is written, never read. Each row has
    the room that it needs, so that the pool is about as large as the sum of the rows' lengths. Rows are not
    paged: a row that runs out of room makes all rows be laid out again (`fit`).
    """

    def __init__(self, config, rows, attention, dtype, device):
        self.varlen, self.group = attention, config.num_attention_heads // config.num_key_value_heads
        self.first, self.room, self.first_B = [0] * rows, [0] * rows, torch.zeros(rows, device=device).long()
        shape = (2, 1, config.num_key_value_heads, config.head_dim)
        self.kv = [torch.zeros(shape, dtype=dtype, device=device)       # zeros: masked garbage must be finite
                   for _ in range(config.num_hidden_layers)]

    @property
    def positions(self):
        """P, which is also the number of the slot for padding."""
        return self.kv[0].shape[1] - 1

    def fit(self, kept, needed, limit=math.inf):
        """Give each row b room for needed[b] positions, of which the first kept[b] are kept.

        Does nothing if there is room. Otherwise all rows are laid out again, layer by layer, so that copies
        of only one layer are in memory. Rows in use share what they leave of the pool; it grows by a quarter
        once they leave less than a sixteenth, but no further than all rows need at `limit` positions, which
        then each row has. Returns whether the pool has grown, which gives it other addresses.
        """
        if all(need <= room for need, room in zip(needed, self.room)):
            return False
        total, size, used = sum(needed), self.positions, sum(need > 0 for need in needed)
        most = limit * len(needed)
        if min(total + total // 16, most) > size:
            size = min(total + total // 4, most)
        share = (size - total) // used
        room = [need + share * (need > 0) for need in needed] if size < most else [limit] * len(needed)
        first = [*accumulate(room, initial=0)][:-1]
        source, target = (torch.cat([torch.arange(start, start + n) for start, n in zip(starts, kept)])
                          .to(self.first_B.device) for starts in (self.first, first))
        grown = size != self.positions
        for layer, kv in enumerate(self.kv):
            moved = kv[:, source]
            if grown:
                self.kv[layer] = kv = kv.new_zeros(2, size + 1, *kv.shape[2:])
            kv[:, target] = moved
        self.first, self.room = first, room
        self.first_B.copy_(torch.tensor(first))
        return grown

    def move(self, source, target, length):
        """Move row source to row target, whose own tokens are lost: they exchange their room."""
        for values in (self.first, self.room):
            values[source], values[target] = values[target], values[source]
        self.first_B.copy_(torch.tensor(self.first))

    def export_row(self, row, start, end):
        """A copy of a row's positions from start to end: per layer a [2, T, K, D], for `import_rows`."""
        first = self.first[row]
        return [kv[:, first + start:first + end].clone() for kv in self.kv]

    def import_rows(self, rows, start, exported):
        """Write the result of `export_row` into each of `rows`, from position `start` on."""
        first, length = [self.first[row] + start for row in rows], exported[0].shape[1]
        first_R, within_T = upload(self.first_B.device, first, range(length))
        slot_RT = first_R[:, None] + within_T
        for kv, values in zip(self.kv, exported):
            kv[:, slot_RT] = values[:, None]

    def append(self, rows, starts, lengths):
        """The layout of lengths[i] tokens that row rows[i] gets from position starts[i] on. Host data."""
        position = [starts[i] + t for i, n in enumerate(lengths) for t in range(n)]
        slot = [self.first[row] + starts[i] + t for i, (row, n) in enumerate(zip(rows, lengths))
                for t in range(n)]
        keys = [start + n for start, n in zip(starts, lengths)]
        position_N, *tensors = upload(self.first_B.device, position, slot, [0, *accumulate(lengths)],
                                      [self.first[row] for row in rows], keys)
        return PackedAppend(self, position_N[None], *tensors, max(lengths), max(keys))

    def append_one(self, rows, start_B, active_B, longest):
        """The layout of one token for each of `rows`, a slice or a tensor of indices, at position start_B;
        that of an inactive row is padding. longest: upper bound on a row's length after it.
        """
        first_B = self.first_B[rows]
        slot_B = torch.where(active_B, first_B + start_B, self.positions)
        q_starts = torch.arange(len(start_B) + 1, device=start_B.device)
        keys_B = torch.where(active_B, start_B + 1, 1)        # other rows may have less room than they had
        return PackedAppend(self, start_B[None], slot_B, q_starts, first_B, keys_B, 1, longest)


class Rectangle:
    """Keys and values of B token sequences, for masks: kv[layer] is [2, B + 1, K, room, D].

    All rows have the same room. Keys of a row and head lie in the order of their positions, and a step reads
    the room of all rows from end to end: a CPU reads memory without gaps twice as fast. The last row takes
    padding: it is written, never read.
    """

    varlen = None

    def __init__(self, config, n_rows, room, dtype, device):
        shape = (2, n_rows + 1, config.num_key_value_heads, room, config.head_dim)
        self.n_rows, self.largest = n_rows, room         # n_rows is also the number of the row for padding
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.kv = [torch.zeros(shape, dtype=dtype, device=device)       # zeros: masked garbage must be finite
                   for _ in range(config.num_hidden_layers)]
        self.memory = [kv.flatten() for kv in self.kv]

    @property
    def room(self):
        """Positions of each row."""
        return self.kv[0].shape[3]

    @property
    def positions(self):
        """Positions for which there is memory."""
        return self.n_rows * self.largest

    def fit(self, kept, needed, limit=math.inf):
        """Give each row room for max(needed) positions, of which the first kept[b] are kept, and for an
        eighth more, at least GROWTH, but no more than `limit` positions, rounded up to 16.

        Does nothing if there is room, unless nothing is kept: then there may be less room, too. The memory
        stays, since new memory is slow at first. Returns whether the keys have other addresses.
        """
        most, keep = max(needed), max(kept)
        room = -(-min(most + max(GROWTH, most // 8), limit) // 16) * 16
        if most <= self.room if keep else room == self.room:
            return False
        self.largest = max(room, self.largest)
        used = max((row for row, n in enumerate(kept, start=1) if n), default=0)    # up to the last in use
        for layer, kv in enumerate(self.kv):
            kept_kv, shape = kv[:, :used, :, :keep].clone(), (*kv.shape[:3], room, kv.shape[4])
            if (size := math.prod(shape)) > self.memory[layer].numel():
                self.memory[layer] = kv.new_zeros(size)
            self.kv[layer] = self.memory[layer][:size].view(shape)
            self.kv[layer][:, :used, :, :keep] = kept_kv
        return True

    def move(self, source, target, length):
        """Move the first `length` positions of row source to row target, whose own are lost."""
        for kv in self.kv:
            kv[:, target, :, :length] = kv[:, source, :, :length]

    def export_row(self, row, start, end):
        """A copy of a row's positions from start to end: per layer a [2, K, T, D], for `import_rows`."""
        return [kv[:, row, :, start:end].clone() for kv in self.kv]

    def import_rows(self, rows, start, exported):
        """Write the result of `export_row` into each of `rows`, from position `start` on."""
        row_R = torch.tensor(rows, device=self.kv[0].device)
        for kv, values in zip(self.kv, exported):
            kv[:, row_R, :, start:start + values.shape[2]] = values[:, None]

    def append(self, rows, starts, lengths):
        """The layout of chunks of lengths[i] tokens that row rows[i] gets from position starts[i] on. Host
        data; rows in ascending order.

        Chunks are cut after 16, 64, 256, ... tokens; the pieces between two cuts are a group. So short chunks
        are not padded to long ones, and most rows are in the first group, next to each other: keys are copied
        only of rows that are not.
        """
        groups, grids, place, size, done, end = [], [], [0] * sum(lengths), 0, 0, 16
        firsts, device = [*accumulate(lengths, initial=0)], self.kv[0].device
        while members := [i for i, n in enumerate(lengths) if n > done]:
            used, T = [rows[i] for i in members], min(max(lengths), end) - done
            grid = [0] * (len(used) * T)
            for b, i in zip(count(0, T), members):
                a, n = firsts[i] + done, min(lengths[i] - done, T)
                grid[b:b + n], place[a:a + n] = range(a, a + n), range(size + b, size + b + n)
            size += len(grid)
            longest = max(starts[i] + min(lengths[i], done + T) for i in members)
            adjacent = used[-1] - used[0] < len(used)
            used = slice(used[0], used[-1] + 1) if adjacent else torch.tensor(used, device=device)
            groups.append((used, T, min(-(-longest // 16) * 16, self.room)))
            grids.append(grid)
            done, end = end, 4 * end
        position = [start + t for start, n in zip(starts, lengths) for t in range(n)]
        row = [row for row, n in zip(rows, lengths) for _ in range(n)]
        row_N, position_N, place_N, *grids = upload(device, row, position, place, *grids)
        groups = [(used, grid.view(-1, T), S) for (used, T, S), grid in zip(groups, grids)]
        return MaskedAppend(self, row_N, position_N, position_N, groups, place_N)

    def append_one(self, rows, start_B, active_B, longest):
        """The layout of one token for each of `rows`, a slice or a tensor of indices, at position start_B;
        that of an inactive row is padding. longest: upper bound on a row's length after it.
        """
        assert longest <= self.room, f"{longest} tokens in rows with room for {self.room}"
        row_B = torch.arange(self.n_rows, device=start_B.device)[rows]
        row_B, slot_B = torch.where(active_B, row_B, self.n_rows), torch.where(active_B, start_B, 0)
        S = self.room if isinstance(rows, slice) else longest      # rows that are copied first have no gaps
        return MaskedAppend(self, row_B, slot_B, start_B, [(rows, None, S)])


@dataclass
class PackedAppend:
    """Layout of chunks [1, N], one after the other, that are appended to rows of a `Pool`.

    position_BT: [1, N]. slot_N: where the tokens' keys and values go. q_starts: the first token of each
    chunk, and N. first_B: the first slot of each chunk's row. keys_B: the row's length after the chunk.
    longest_q, longest_k: upper bounds of a chunk's and a row's length.
    """

    cache: Pool
    position_BT: torch.Tensor
    slot_N: torch.Tensor
    q_starts: torch.Tensor
    first_B: torch.Tensor
    keys_B: torch.Tensor
    longest_q: int
    longest_k: int

    def __post_init__(self):
        assert not torch.is_grad_enabled(), "a forward with a cache has no gradient: use torch.no_grad()"
        self.q_starts, self.keys_B = self.q_starts.int(), self.keys_B.int()
        self.k_starts = F.pad(self.first_B, (0, 1)).int()       # the last is not read, since keys_B is given

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Write the chunks' keys and values, and attend to them and all earlier slots: [1, N, H * D]."""
        k, v = self.cache.kv[layer]
        k.index_copy_(0, self.slot_N, k_BTKD[0])
        v.index_copy_(0, self.slot_N, v_BTKD[0])
        return self.cache.varlen.cached(q_BTHD[0], k, v, self.q_starts, self.k_starts, self.longest_q,
                                        self.longest_k, self.keys_B).flatten(1)[None]


class MaskedAppend:
    """Layout of chunks [1, N], one after the other, that are appended to rows of a `Rectangle`.

    row_N, slot_N: where the tokens' keys and values go. position_N: the tokens' positions.
    groups: (rows, token_BT, S): pieces of chunks whose attention is computed at once, padded to T tokens; the
    rows, as a slice or indices; which of the N tokens are their queries, any for padding (None: one for each
    row, in order); how many positions to read. place_N: where each token is among all groups' queries (None:
    in order).
    """

    def __init__(self, cache, row_N, slot_N, position_N, groups, place_N=None):
        assert not torch.is_grad_enabled(), "a forward with a cache has no gradient: use torch.no_grad()"
        self.cache, self.row_N, self.slot_N, self.place_N = cache, row_N, slot_N, place_N
        self.position_BT, self.groups, dtype = position_N[None], [], cache.kv[0].dtype
        for rows, token_BT, S in groups:
            position_BT = position_N[:, None] if token_BT is None else position_N[token_BT]
            hidden_BTS = torch.arange(S, device=row_N.device) > position_BT[:, :, None]
            # of one query a row, plain products are four times as fast as flash attention on a CPU
            plain = position_BT.shape[1] == 1 and dtype.itemsize >= 4
            # without `plain`, ordered by head, like the queries
            mask = hidden_BTS if plain else additive(hidden_BTS, dtype).repeat(1, cache.group, 1)
            self.groups.append((rows, token_BT, S, plain, mask[:, None]))

    def attend(self, layer, q_1NHD, k_1NKD, v_1NKD):
        """Write the chunks' keys and values, and attend to them and all earlier positions: [1, N, H * D]."""
        (k, v), (q_NHD,), found = self.cache.kv[layer], q_1NHD, []
        k[self.row_N, :, self.slot_N] = k_1NKD[0]
        v[self.row_N, :, self.slot_N] = v_1NKD[0]
        for rows, token_BT, S, plain, mask in self.groups:
            q_BTHD = q_NHD[:, None] if token_BT is None else q_NHD[token_BT]
            k_BKSD, v_BKSD = (x[rows, :, :S] if isinstance(rows, slice) else x[:, :, :S].index_select(0, rows)
                              for x in (k, v))                 # index_select is faster than x[rows, :, :S]
            (B, T, H, D), K = q_BTHD.shape, k.shape[1]
            # treat G heads of T queries as one head of G * T queries, so that K/V are never repeated
            q_BKQD = q_BTHD.transpose(1, 2).reshape(B, K, -1, D)
            if plain:
                out_BKQD = scores(q_BKQD, k_BKSD, mask).softmax(-1) @ v_BKSD
            else:
                out_BKQD = F.scaled_dot_product_attention(q_BKQD, k_BKSD, v_BKSD, attn_mask=mask)
            found.append(out_BKQD.reshape(B, H, T, D).transpose(1, 2).reshape(B * T, -1))
        return (found[0] if self.place_N is None else torch.cat(found)[self.place_N])[None]


class Forked:
    """Layout of one new token [B, 1] for each of B rows, of which A after A continue the same prompt.

    prompts: a cache of R prompts, of prompt_R tokens each. own: a cache of the same kind, of B rows, which
    hold what follows the prompt, from position 0 on. start_B: how many tokens of its own each row has.
    active_B: which rows have a new token; those of the others are padding. contexts: how many positions to
    read of a prompt and of a row's own tokens, at least the longest's.

    A prompt's keys are read once for all its rows. Its attention and that to a row's own keys are each a mean
    of values weighted by exp(score); the sums of these weights merge the two (arXiv:2205.14135, §3.1).
    """

    def __init__(self, prompts, own, prompt_R, start_B, active_B, contexts):
        assert not torch.is_grad_enabled(), "a forward with a cache has no gradient: use torch.no_grad()"
        self.prompts, self.own, self.contexts, device = prompts, own, contexts, start_B.device
        self.R, self.A = len(prompt_R), len(start_B) // len(prompt_R)
        self.position_BT = (prompt_R[:, None] + start_B.view(self.R, self.A)).view(-1, 1)
        keys_R = prompt_R.clamp(min=1)                               # a row without a prompt reads one slot
        if prompts.varlen:
            self.slot_B = torch.where(active_B, own.first_B + start_B, own.positions)
            keys_B = torch.where(active_B, start_B + 1, 1)
            self.of_prompts = InParts(prompts, keys_R, self.A * own.group, contexts[0])
            self.of_own = InParts(own, keys_B, own.group, contexts[1])
        else:
            row_B = torch.arange(len(start_B), device=device)
            self.row_B = torch.where(active_B, row_B, own.n_rows)
            self.slot_B = torch.where(active_B, start_B, 0)
            self.hidden_R11S, self.hidden_B11M = (
                (torch.arange(n, device=device) >= length[:, None])[:, None, None]
                for n, length in zip(contexts, (keys_R, start_B + 1)))

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Write the tokens' keys and values, and attend to them and to all earlier ones: [B, 1, H * D]."""
        attend = self.by_length if self.prompts.varlen else self.by_masks
        q_BKGD = q_BTHD.view(len(q_BTHD), k_BTKD.shape[2], -1, q_BTHD.shape[3])
        return attend(layer, q_BKGD, k_BTKD[:, 0], v_BTKD[:, 0]).reshape(len(q_BTHD), 1, -1)

    def by_length(self, layer, q_BKGD, k_BKD, v_BKD):
        """`attend` by variable-length attention: [B, K, G, D].

        To it, a group's G heads are G queries of one head, so that keys are read once for all of them.
        """
        B, K, G, D = q_BKGD.shape
        k, v = self.own.kv[layer]
        k.index_copy_(0, self.slot_B, k_BKD)
        v.index_copy_(0, self.slot_B, v_BKD)
        q_NKD = q_BKGD.transpose(1, 2).reshape(B * G, K, D)                       # here N is B * G queries
        merged = merge(*self.of_own.attend(layer, q_NKD), *self.of_prompts.attend(layer, q_NKD))
        return merged.view(B, G, K, D).transpose(1, 2)

    def by_masks(self, layer, q_BKGD, k_BKD, v_BKD):
        """`attend` with masks: [B, K, G, D]."""
        (B, K, _, D), (S, M) = q_BKGD.shape, self.contexts
        k, v = self.own.kv[layer]
        k[self.row_B, :, self.slot_B], v[self.row_B, :, self.slot_B] = k_BKD, v_BKD
        own_BKGD, own_sum_BKG = weighted_mean(q_BKGD, k[:B, :, :M], v[:B, :, :M], self.hidden_B11M)
        k_RKSD, v_RKSD = (x[:self.R, :, :S] for x in self.prompts.kv[layer])
        q_RKQD = q_BKGD.view(self.R, self.A, K, -1, D).transpose(1, 2).flatten(2, 3)         # Q = A * G
        out_RKQD, sum_RKQ = weighted_mean(q_RKQD, k_RKSD, v_RKSD, self.hidden_R11S)
        out_BKGD, sum_BKG = (x.unflatten(2, (self.A, -1)).transpose(1, 2).reshape(like.shape)
                             for x, like in ((out_RKQD, own_BKGD), (sum_RKQ, own_sum_BKG)))
        return merge(own_BKGD, own_sum_BKG, out_BKGD, sum_BKG)


class InParts:
    """Attention of N queries, equally many for each row of a pool, to all keys of their row.

    keys_B: the keys of each row, at least 1. queries: the queries of each row. longest: upper bound of
    keys_B. Keys are read in C parts of SPLIT_KEYS, as if each were a row. Otherwise one block of threads
    would read the longest row alone, and all would wait for it.
    """

    def __init__(self, pool, keys_B, queries, longest):
        self.pool, self.n = pool, -(-longest // SPLIT_KEYS)
        self.longest = queries, min(longest, SPLIT_KEYS)
        before_C1 = torch.arange(0, longest, SPLIT_KEYS, device=keys_B.device)[:, None]
        keys_CB, first_CB = (keys_B - before_C1).clamp(0, SPLIT_KEYS), pool.first_B + before_C1
        self.keys, self.k_starts = keys_CB.flatten().int(), F.pad(first_CB.flatten(), (0, 1)).int()
        self.q_starts = (torch.arange(len(self.keys) + 1, device=keys_B.device) * queries).int()
        self.unread_CN1 = (keys_CB == 0).repeat_interleave(queries, 1)[:, :, None]

    def attend(self, layer, q_NKD):
        """The queries' output [N, K, D], and the log of each one's sum of exp(score), [N, K]."""
        q = q_NKD.expand(self.n, *q_NKD.shape)
        out, sums = self.pool.varlen.shared(q.flatten(0, 1), *self.pool.kv[layer], self.q_starts,
                                            self.k_starts, *self.longest, self.keys)
        if self.n == 1:
            return out, sums.T
        sum_CNK = sums.T.unflatten(0, q.shape[:2]).masked_fill(self.unread_CN1, -torch.inf)
        share_CNK = sum_CNK.log_softmax(0)             # less the log of all parts' sum: one kernel, not seven
        out_NKD = (out.view(q.shape) * share_CNK.exp()[..., None]).sum(0).to(out.dtype)
        return out_NKD, sum_CNK[0] - share_CNK[0]      # of the first part, which is never empty


def merge(a, log_a, b, log_b):
    """The mean of two weighted means [..., D], given the logs of their sums of weights [...], in fp32: of a
    prompt of 3,000 tokens and an answer of three, bf16 would round the answer's share to 0.
    """
    share = (log_b - log_a).sigmoid()[..., None]
    return torch.lerp(a.to(share.dtype), b.to(share.dtype), share).to(a.dtype)


def scores(q_BKQD, k_BKSD, hidden):
    """Scaled products of queries and keys, -inf where `hidden`; in fp32, as in flash attention: rounded to
    bf16, those of large keys are off by halves.
    """
    wide = torch.promote_types(q_BKQD.dtype, torch.float32)
    score_BKQS = (q_BKQD.to(wide) * q_BKQD.shape[-1] ** -0.5) @ k_BKSD.to(wide).transpose(-1, -2)
    return score_BKQS.masked_fill_(hidden, -torch.inf)


def weighted_mean(q_BKQD, k_BKSD, v_BKSD, hidden_B11S):
    """Attention without the keys that are `hidden`, and the log of each query's sum of exp(score)."""
    score_BKQS = scores(q_BKQD, k_BKSD, hidden_B11S)
    return score_BKQS.softmax(-1).to(v_BKSD.dtype) @ v_BKSD, score_BKQS.logsumexp(-1)


def additive(hidden, dtype):
    """A mask to add to scores: -inf where `hidden`, else 0."""
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)


def upload(device, *lists):
    """Tensors on a device, of lists that are all of integers or all of floats: one for each, by one copy, for
    which the host does not wait.
    """
    lists = [[*numbers] for numbers in lists]
    numbers = torch.tensor([*chain(*lists)])
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device).split([*map(len, lists)])


class Rows:
    """Layout of rows [B, T] of one text each, causal from position 0; padding (any ids) is on the right."""

    def __init__(self, T, device):
        self.position_BT = torch.arange(T, device=device)[None]

    def attend(self, layer, q_BTHD, k_BTKD, v_BTKD):
        """Attention of each query over the keys up to its own: [B, T, H * D]."""
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class Packed:
    """Layout of texts to train on [1, N], in parts, one after the other, for `Varlen.causal`.

    parts: (n, prefix): n tokens that attend to each other causally and to `prefix`, a list of earlier columns
    that precede them in this order. So texts can share their common prefixes.
    """

    def __init__(self, parts, device, attention):
        self.attention, positions, keys, q_lengths, k_lengths = attention, [], [], [], []
        for n, prefix in parts:
            keys += [*prefix, *range(len(positions), len(positions) + n)]
            positions += range(len(prefix), len(prefix) + n)
            q_lengths.append(n)
            k_lengths.append(len(prefix) + n)
        starts = ([0, *accumulate(n)] for n in (q_lengths, k_lengths))
        position_N, keys_S, q_starts, k_starts = upload(device, positions, keys, *starts)
        self.position_BT, self.q_starts, self.k_starts = position_N[None], q_starts.int(), k_starts.int()
        self.keys = keys_S if len(keys) > len(positions) else slice(None)
        self.longest = max(q_lengths), max(k_lengths)

    def attend(self, layer, q_1NHD, k_1NKD, v_1NKD):
        """Attention of each query over the keys of its part and prefix: [1, N, H * D]."""
        k, v = (x[0][self.keys] for x in (k_1NKD, v_1NKD))
        out = self.attention.causal(q_1NHD[0], k, v, self.q_starts, self.k_starts, *self.longest)
        return out.flatten(1)[None]


class Masked:
    """The layout of `Packed`, for devices without `Varlen`: parts with about as many queries at once, padded.

    Of a part with a short prefix, the prefix's queries are computed again: causal attention without a mask
    then computes less than masked attention of the part's own queries.
    """

    def __init__(self, parts, device):
        by_size, positions, size, self.groups = {}, [], 0, []
        for n, prefix in parts:
            again = prefix if 2 * len(prefix) < n else []
            masked = 0 if len(again) == len(prefix) else len(prefix).bit_length()
            by_size.setdefault((-(-(len(again) + n) // 32), masked), []).append(
                (len(positions), n, prefix, again))
            positions += range(len(prefix), len(prefix) + n)
        place = [0] * len(positions)
        for (_, masked), members in by_size.items():
            T = max(len(again) + n for _, n, _, again in members)
            S = max(len(prefix) + n for _, n, prefix, _ in members)
            q_columns, k_columns, mask = [], [], None             # padding repeats a part's first
            for first, n, prefix, again in members:
                at = size + len(q_columns) + len(again)
                place[first:first + n] = range(at, at + n)
                q_columns += [*again, *range(first, first + n), *[first] * (T - len(again) - n)]
                k_columns += [*prefix, *range(first, first + n), *[first] * (S - len(prefix) - n)]
            size += len(q_columns)
            before = [len(prefix) for _, _, prefix, _ in members]
            q_columns, k_columns, before_B = upload(device, q_columns, k_columns, before)
            if masked:
                last_BT1 = (before_B[:, None] + torch.arange(T, device=device))[:, :, None]
                mask = (torch.arange(S, device=device) > last_BT1)[:, None]
            self.groups.append((len(members), q_columns, k_columns, mask))
        self.place_N, position_N = upload(device, place, positions)
        self.position_BT = position_N[None]

    def attend(self, layer, q_1NHD, k_1NKD, v_1NKD):
        """Attention of each query over the keys of its part and prefix: [1, N, H * D]."""
        (q_NHD,), (k_NKD,), (v_NKD,), found = q_1NHD, k_1NKD, v_1NKD, []
        for i, (B, q_columns, k_columns, mask) in enumerate(self.groups):
            if mask is not None and mask.dtype == torch.bool:     # once: each layer would store its own
                mask = additive(mask, q_NHD.dtype)
                self.groups[i] = B, q_columns, k_columns, mask
            q, k, v = (x.index_select(0, columns).unflatten(0, (B, -1)).transpose(1, 2)
                       for x, columns in ((q_NHD, q_columns), (k_NKD, k_columns), (v_NKD, k_columns)))
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
            found.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(found).index_select(0, self.place_N).flatten(1)[None]
