"""The slot engine: sampling with a KV cache, prompts in, responses out.

Every token is computed once. An episode keeps its slot, a row of the cache, and only the part of each new
prompt that the slot does not contain yet is run: in an append-only conversation, the last observation. The
members of a group share the prefill of their first prompt, and of later ones as long as these are equal.
Responses stay token ids: training uses the sampled ids, and no response is tokenized again.
Left out: paged caches.
Shapes: B rows of a step, R rows that a call starts or draws for, T tokens of a chunk, V vocabulary, M tokens
of the longest response. Of answers that share their prompt: R prompts, A answers to each.

    python -m lab.bench.iteration         # against transformers' generate
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, chain

import torch
import torch.nn.functional as F

from lm.attention import Forked, kv_cache, upload
from lm.restrict import restricted

TICK = 16          # tokens drawn per response before the host checks which responses have ended
# A decoding step is planned for a row length rounded up to a multiple of PLANNED, for each of which a CUDA
# graph is captured. By this length attention splits a row's keys among blocks of threads: planned for much
# longer rows, most blocks have no keys.
PLANNED = 2048
KEPT = 8           # first prompts are kept in at most 1 / KEPT of the cache's size
BLOCK = 1024       # weights that are added up one by one to draw a token


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. Without top-k and top-p, as training scores the distribution sampled from.

    ValueError for a temperature below 0, or for responses without a token.
    """

    temperature: float = 1.0      # 0 = greedy
    max_response_tokens: int = 16

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: expected 0 (greedy) or more")
        if self.max_response_tokens < 1:
            raise ValueError(f"max_response_tokens={self.max_response_tokens}: expected 1 or more")


@dataclass(slots=True)
class Response:
    """A sampled response."""

    ids: list[int]                # with the stop token, if any
    logprob: list[float]          # nats, one per id, at the sampling temperature
    truncated: bool               # no stop token within max_response_tokens
    allowed: list = field(default_factory=list)     # per id the ids it was drawn from (None: all)


def uniform(stream_B, position_B):
    """One random number in (0, 1) per row: splitmix64 of (stream, position), 52 bits, in int64.

    The generator is counter-based, so that an episode draws the same numbers in any slot, next to any other
    episode, on any rank.
    """
    x = stream_B + (position_B + 1) * (0x9E3779B97F4A7C15 - 2**64)     # int64 arithmetic wraps
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) / 2**52   # with 53 bits this could round up to 1


def sample_tokens(logits_BV, uniform_B, temperature=1.0):
    """One token per row by inverse transform: the first whose cumulative probability reaches uniform_B of its
    row's sum, which rounding may leave below 1 (`first_reaching`).

    Returns token_B and its logprob_B under log_softmax(logits / temperature). Temperature 0 is greedy and
    reports the logprob at temperature 1. No host sync.
    """
    # one expression, so that the fp32 logits, 600 kB a row, are not kept beside their log-softmax
    logprob_BV = (logits_BV.float() if temperature in (0, 1) else
                  logits_BV.float() / temperature).log_softmax(-1)
    token_B = first_reaching(logprob_BV.exp(), uniform_B) if temperature else logprob_BV.argmax(-1)
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]


def first_reaching(weight_BV, share_B):
    """The first index at which a row's cumulative weight reaches the given share of its sum, in double.

    Where a row has more than BLOCK weights, the sums of its blocks are searched, and then one block: a GPU
    takes several times as long to add up a long row as to read it.
    """
    if weight_BV.shape[1] <= BLOCK:
        upto_BV = weight_BV.double().cumsum(-1)
        return (upto_BV < share_B[:, None] * upto_BV[:, -1:]).sum(-1)
    weight_BNM = F.pad(weight_BV, (0, -weight_BV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    upto_BN = weight_BNM.sum(-1, dtype=torch.double).cumsum(-1)
    wanted_B1 = share_B[:, None] * upto_BN[:, -1:]
    block_B1 = (upto_BN < wanted_B1).sum(-1, keepdim=True)
    before_B1 = F.pad(upto_BN, (1, 0)).gather(1, block_B1)
    share_B1 = (wanted_B1 - before_B1) / (upto_BN.gather(1, block_B1) - before_B1)
    share_B1.clamp_(max=1)                            # sums by a GPU's threads may round to more
    weight_BM = weight_BNM.gather(1, block_B1[:, :, None].expand(-1, -1, BLOCK))[:, 0]
    index_B = block_B1[:, 0] * BLOCK + first_reaching(weight_BM, share_B1[:, 0])
    return index_B.clamp_(max=weight_BV.shape[1] - 1)


class Slots:
    """The rows of a KV cache, the token ids cached in each, and the responses being sampled in them.

    `begin` prefills prompts and draws their first tokens, `tick` draws up to TICK more tokens of every
    running response, `pop_finished` returns the responses that have ended: rows do not wait for each other.
    Between `begin` and `pop_finished` all state stays on the device, without a host sync (on a GPU, if no
    response is restricted). `restart` forgets all rows, but keeps the cache's memory and the CUDA graphs.
    After a FloatingPointError, make new Slots: a NaN in that memory reaches later responses.
    n: number of rows. context: maximum number of tokens of a row; the cache grows as needed. stop_ids: token
    ids that end a response. Rows in use are best kept at the front: a step runs all rows up to the last one
    in use.
    """

    all_rows = False      # whether a step runs all of them, whichever are active

    def __init__(self, model, n, context, stop_ids, sampling):
        weight = next(model.parameters())
        device = weight.device
        self.model, self.n, self.device = model, n, device
        self.cache = kv_cache(model.config, n, weight.dtype, device)
        self.varlen = self.cache.varlen
        self.drop_graphs()
        self.stop_ids, self.stop_tensor = stop_ids, torch.tensor(stop_ids, device=device)
        self.row_B, self.most_drawn = torch.arange(n, device=device), torch.zeros((), device=device).long()
        self.stream_B, self.length_B, self.drawn_B, self.token_B = torch.zeros(4, n, device=device).long()
        self.active_B = torch.zeros(n, dtype=torch.bool, device=device)
        self.most_tokens = 0             # cached at once; a caller may set it back
        self.ids_BM = torch.zeros(n, 0, device=device).long()
        self.restart(context, sampling)

    def restart(self, context, sampling):
        """Forget all rows and their responses. Needed once the model's weights have changed."""
        self.context, self.sampling, longest = context, sampling, sampling.max_response_tokens
        self.cached = [[] for _ in range(self.n)]
        self.first_prompts = {}          # prompt -> (K/V, logits_V), reused by later members of a group
        self.running = {}                # row -> (prompt, tokens cached before its response, first step)
        self.restrictions, self.steps = {}, 0
        self.active_B.zero_()
        self.most_drawn.fill_(longest)        # on the device, as graphs read it
        if self.ids_BM.shape[1] <= longest:
            self.ids_BM = torch.zeros(self.n, longest + 1, device=self.device).long()
            self.logprob_BM = torch.zeros(self.n, longest + 1, device=self.device)   # the last takes padding
            self.drop_graphs()

    @torch.no_grad()
    def begin(self, rows, prompts, streams, share=False, restrictions=None):
        """Start sampling a response to prompts[i] in row rows[i], with random stream streams[i].

        share: keep the prefill of prompts that start an episode, for members of the same group that start
        later. restrictions: a Restriction (or None) per prompt.
        """
        assert all(prompts), "an empty prompt"
        logits_RV, lengths = self.prefill(rows, prompts, share)
        row_R, stream_R, length_R = upload(self.device, rows, streams, lengths)
        self.stream_B[row_R], self.length_B[row_R] = stream_R, length_R
        self.drawn_B[row_R], self.active_B[row_R] = 0, True
        self.running |= {row: (*entry, self.steps) for row, *entry in zip(rows, prompts, lengths)}
        self.restrictions |= zip(rows, restrictions or ())
        self.draw(logits_RV, row_R)

    def prefill(self, rows, prompts, share=False):
        """Fill row rows[i] with prompts[i], running only the tokens that are not cached.

        Returns logits_RV after each prompt, and the number of tokens in each row. rows: in ascending order.
        Equal prompts, as of a group's members until their commands differ, are run once and copied; with
        `share` those of which no token is cached are kept in `first_prompts` for members that start later:
        the newest, of up to 1 / KEPT of the cache's tokens, and at least two.
        """
        reused = [reusable_prefix(self.cached[row], prompt) for row, prompt in zip(rows, prompts)]
        self.reserve(rows, prompts, reused)
        members_of, known, logits = {}, self.first_prompts, {}
        for i, prompt in enumerate(prompts):
            members_of.setdefault((reused[i], tuple(prompt)), []).append(i)
        run = [members[0] for (n, prompt), members in members_of.items() if n or prompt not in known]
        if run:
            chunks, starts = [prompts[i][reused[i]:] for i in run], [reused[i] for i in run]
            used = [rows[i] for i in run]
            logits = dict(zip(run, run_chunks(self.model, self.cache, used, chunks, starts)))
        for (n, prompt), members in members_of.items():
            copies = [i for i in members if i not in logits]
            if members[0] not in logits:
                found = known[prompt]
            elif copies or share and not n:
                found = (self.cache.export_row(rows[members[0]], n, len(prompt)),
                         logits[members[0]].clone())           # a view would keep all rows' logits in memory
                if share and not n:
                    known[prompt] = found
            if copies:
                self.cache.import_rows([rows[i] for i in copies], n, found[0])
                logits |= dict.fromkeys(copies, found[1])
        while len(known) > 2 and sum(map(len, known)) > self.cache.positions // KEPT:
            del known[next(iter(known))]                        # the oldest: an evaluation has hundreds
        return torch.stack([logits[i] for i in range(len(rows))]), [len(prompt) for prompt in prompts]

    def reserve(self, rows, prompts, reused):
        """Make room for prompts[i] and its response in row rows[i], of which reused[i] tokens are kept."""
        kept = [len(ids) for ids in self.cached]
        needed, longest = list(kept), self.sampling.max_response_tokens
        for row, (_, length, _) in self.running.items():
            kept[row], needed[row] = self.length_bound(row), length + longest
        for row, prompt, n in zip(rows, prompts, reused):
            kept[row], needed[row] = n, len(prompt) + longest
        assert max(needed) <= self.context, (max(needed), self.context)
        new = sum(map(len, prompts)) - sum(reused)
        self.most_tokens = max(self.most_tokens, sum(kept) + new)
        if self.cache.fit(kept, needed, self.context):
            self.drop_graphs()

    def drop_graphs(self):
        """Forget the CUDA graphs, which refer to tensors that were replaced, and their memory."""
        self.graphs, self.graph_memory = {}, None

    @property
    def usage(self):
        """(most tokens that the cache held since `most_tokens` was 0, tokens that it has room for)."""
        return self.most_tokens, self.cache.positions

    def draw(self, logits_RV, rows):
        """Draw the next token of each active row. rows: a slice or a tensor of indices."""
        drawn_R, active_R, row_R = self.drawn_B[rows], self.active_B[rows], self.row_B[rows]
        if self.restrictions:
            restrictions = [self.restrictions.get(row) for row in row_R.tolist()]
            logits_RV = restricted(logits_RV, [one and one.next for one in restrictions])
        token_R, logprob_R = sample_tokens(logits_RV, uniform(self.stream_B[rows], drawn_R),
                                           self.sampling.temperature)
        if self.restrictions:
            for restriction, token, active in zip(restrictions, token_R.tolist(), active_R.tolist()):
                if restriction and active:
                    restriction.take(token)
        column_R = torch.where(active_R, drawn_R, self.ids_BM.shape[1] - 1)
        self.ids_BM[row_R, column_R], self.logprob_BM[row_R, column_R] = token_R, logprob_R
        drawn_R = drawn_R + active_R
        self.token_B[rows] = torch.where(active_R, token_R, self.token_B[rows])
        self.drawn_B[rows] = drawn_R
        stops_R = (token_R[:, None] == self.stop_tensor).any(-1)     # isin sorts many stops, with a host sync
        self.active_B[rows] = active_R & ~stops_R & (drawn_R < self.most_drawn)

    def step(self, rows, bound):
        """Run the last token of each active row among `rows`, and draw the next one.

        bound: upper bound on the rows' lengths after it.
        """
        active_B, start_B = self.active_B[rows], self.length_B[rows]
        logits_BV = self.forward(rows, start_B, active_B, bound)
        self.length_B[rows] = start_B + active_B
        self.draw(logits_BV, rows)

    def forward(self, rows, start_B, active_B, bound):
        """Logits after the last token of each row of `rows`, which is appended at position start_B."""
        layout = self.cache.append_one(rows, start_B, active_B, bound)
        return self.model(self.token_B[None, rows], layout)[0]

    @torch.no_grad()
    def tick(self):
        """Draw up to TICK tokens of each running response.

        Reading which rows are active is a host sync. It is done on the CPU, where it is free, and for
        restricted responses, which sync anyway; then, if under half of the rows are active, only those are
        run.
        """
        if not self.running:
            return
        n = self.n if self.all_rows else max(self.running) + 1
        planned = min(bucket(self.longest_row(TICK), PLANNED), self.context) if self.varlen else None
        sync = self.device.type == "cpu" or self.restrictions
        use_graphs = self.device.type == "cuda" and not sync and self.varlen
        for _ in range(min(TICK, self.sampling.max_response_tokens - 1)):        # `begin` draws the first
            rows = slice(0, n)
            if sync and 2 * len(active := self.active_B[:n].nonzero()[:, 0]) < n:
                if not len(active):
                    break
                rows = rows if self.all_rows else active
            if use_graphs:
                size = 4 if n <= 8 else 16          # finer at a rollout's end, which has half of its steps
                self.replay(min(bucket(n, size), self.n), planned)
            else:
                self.step(rows, planned or bucket(self.longest_row(1), 16))
            self.steps += 1

    def longest_row(self, more):
        """The largest `length_bound` after so many more steps."""
        return max(self.length_bound(row, more) for row in self.running)

    def length_bound(self, row, more=0):
        """Upper bound on the number of tokens in a row with a running response after so many more steps,
        known without a host sync.
        """
        _, length, first_step = self.running[row]
        return length + min(self.steps - first_step + more, self.sampling.max_response_tokens)

    def replay(self, n, bound):
        """`step` as a CUDA graph, captured at the first call: its ~660 kernels are launched at once."""
        key = n, bound, replace(self.sampling, max_response_tokens=1)       # what a graph has as constants
        if key not in self.graphs:
            active_B, side = self.active_B.clone(), side_stream(self.device)
            self.active_B.zero_()                   # so that warm-up and capture change nothing
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(slice(0, n), bound)
            torch.cuda.current_stream().wait_stream(side)
            # one memory for all: graphs never run concurrently
            self.graph_memory = self.graph_memory or torch.cuda.graph_pool_handle()
            self.graphs[key] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.graph_memory, stream=side,
                                  capture_error_mode="thread_local"):     # other threads may call CUDA
                self.step(slice(0, n), bound)
            self.active_B.copy_(active_B)
        self.graphs[key].replay()

    def pop_finished(self):
        """Remove and return the responses that have ended, [(row, Response)] in row order. A host sync.

        FloatingPointError if a logprob is not finite.
        """
        active = self.active_B.tolist() if self.running else ()
        rows = [row for row in sorted(self.running) if not active[row]]
        row_R, finished = torch.tensor(rows, device=self.device).long(), []
        columns = (x[row_R].tolist() for x in (self.drawn_B, self.ids_BM, self.logprob_BM))
        for row, n, ids, logprob in zip(rows, *columns):
            (prompt, *_), ids, logprob = self.running.pop(row), ids[:n], logprob[:n]
            if not math.isfinite(sum(logprob)):
                raise FloatingPointError("the model's logprobs are not finite: its weights or config.json "
                                         "give no valid probabilities")
            restriction = self.restrictions.pop(row, None)
            finished.append((row, Response(ids, logprob, ids[-1] not in self.stop_ids,
                                           restriction.allowed if restriction else [])))
            self.cached[row] = prompt + ids[:-1]                  # the last token was drawn, not run
        return finished

    def move(self, source, target):
        """Move a row's cached tokens and running response to the row `target`; `source` becomes free."""
        if source != target:
            for x in (self.stream_B, self.length_B, self.drawn_B, self.token_B, self.active_B, self.ids_BM,
                      self.logprob_BM):
                x[target] = x[source]
            length = len(self.cached[source])
            if source in self.running:
                length = self.length_bound(source)
                self.running[target] = self.running.pop(source)
            if source in self.restrictions:
                self.restrictions[target] = self.restrictions.pop(source)
            self.cache.move(source, target, length)
            self.cached[target] = self.cached[source]
        self.cached[source], self.active_B[source] = [], False


@cache
def side_stream(device):
    """The CUDA stream on which steps are captured: only one, since cuBLAS keeps a workspace per stream."""
    return torch.cuda.Stream(device)


def bucket(n, size):
    """n rounded up to a multiple of `size`: with few distinct shapes, kernels and memory are reused."""
    return -(-n // size) * size


def reusable_prefix(cached, prompt):
    """How many of the prompt's first tokens are cached; at most all but one, which is run for its logits."""
    n = min(len(cached), len(prompt) - 1)
    return n if cached[:n] == prompt[:n] else next(i for i in range(n) if cached[i] != prompt[i])


def run_chunks(model, cache, rows, chunks, starts, max_tokens=16384):
    """Append chunks[i] to cache row rows[i] at position starts[i].

    Returns logits_RV at each chunk's last token. rows: in ascending order. One forward runs at most
    max_tokens tokens, or a single chunk; attention with masks pads them to 16, 64, 256, ... tokens, or to the
    longest.
    """
    blocks, tokens, logits = [], 0, []
    for i, chunk in enumerate(chunks):
        tokens += len(chunk)
        if not blocks or tokens > max_tokens:
            blocks.append([])
            tokens = len(chunk)
        blocks[-1].append(i)
    for block in blocks:
        lengths = [len(chunks[i]) for i in block]
        layout = cache.append([rows[i] for i in block], [starts[i] for i in block], lengths)
        ids_N, last_R = upload(layout.position_BT.device, [token for i in block for token in chunks[i]],
                               [end - 1 for end in accumulate(lengths)])
        logits.append(model(ids_N[None], layout, last_R))
    return torch.cat(logits)


def generate(slots, prompts, streams, restrictions=None):
    """Sample one Response per prompt: prompts[i] in slot i, with random stream streams[i]."""
    responses = {}
    if prompts:
        slots.begin(range(len(prompts)), prompts, streams, restrictions=restrictions)
    while slots.running:
        slots.tick()
        responses |= slots.pop_finished()
    return [responses[row] for row in range(len(prompts))]


class Answers(Slots):
    """Slots in which each A consecutive rows answer one prompt, which is cached once for all of them.

    A row of the cache then holds its answer alone. n_prompts: R. n_answers: A.
    """

    all_rows = True

    def __init__(self, model, n_prompts, n_answers, stop_ids, sampling):
        room, dtype = bucket(sampling.max_response_tokens, 16), next(model.parameters()).dtype
        super().__init__(model, n_prompts * n_answers, room, stop_ids, sampling)
        self.cache.fit([0] * self.n, [room] * self.n, room)
        self.prompts, self.longest = kv_cache(model.config, n_prompts, dtype, self.device), 0
        self.prompt_R, self.n_answers = torch.zeros(n_prompts, device=self.device).long(), n_answers

    def prefill(self, rows, prompts, share=False):
        """Cache prompts[r * A], which rows r * A to r * A + A - 1 answer. Returns logits_BV after it, and 0
        cached tokens for each row. rows: from 0 on, without gaps.
        """
        prompts = prompts[::self.n_answers]
        R, lengths = len(prompts), [len(prompt) for prompt in prompts]
        longest, unused = bucket(max(lengths), 16), [0] * (len(self.prompt_R) - R)
        grown = self.prompts.fit([0] * (R + len(unused)), lengths + unused, max(lengths))
        if grown or longest > self.longest:
            self.drop_graphs()
        self.longest = max(longest, self.longest) if self.varlen else longest
        self.prompt_R.copy_(torch.tensor(lengths + unused))
        logits_RV = run_chunks(self.model, self.prompts, range(R), prompts, [0] * R)
        return logits_RV.repeat_interleave(self.n_answers, 0), [0] * len(rows)

    def forward(self, rows, start_B, active_B, bound):
        """Logits after the last token of every row."""
        bounds = self.longest, min(bound, self.context)
        layout = Forked(self.prompts, self.cache, self.prompt_R, start_B, active_B, bounds)
        return self.model(self.token_B[:, None], layout)[:, 0]


def answer(model, prompts, streams, stop_ids, sampling, n_slots):
    """Sample several answers to each prompt. Returns per prompt a list of Responses.

    streams[i]: a random stream for each answer to prompts[i], equally many for all prompts. A prompt is
    prefilled and cached once for all its answers. n_slots: most answers that are sampled at once, but all
    of at least one prompt.
    """
    if not prompts:
        return []
    answers, per_prompt = [], len(streams[0])
    per_batch = min(max(1, n_slots // per_prompt), len(prompts))
    slots = Answers(model, per_batch, per_prompt, stop_ids, sampling)
    for a in range(0, len(prompts), per_batch):
        batch = [prompt for prompt in prompts[a:a + per_batch] for _ in range(per_prompt)]
        slots.restart(slots.context, sampling)
        responses = generate(slots, batch, [*chain(*streams[a:a + per_batch])])
        answers += [responses[i:i + per_prompt] for i in range(0, len(responses), per_prompt)]
    return answers
