"""The KV-cached slot engine: prompts in, sampled responses out.

Every token is computed once. An episode keeps its slot, and of each new prompt only what the slot does not
hold yet is run: with an append-only conversation that is the last observation. The members of a group start
from one prefill. Token in, token out: what was sampled is what is trained on, no response is tokenised again.
Left out: paged caches. Shapes: B slots in use, R of them, T tokens of a chunk, V vocabulary, M tokens of the
longest response.

    python -m bench.rollout           # against transformers' generate
"""

import math
from dataclasses import dataclass, field
from functools import cache

import torch

from lm.attention import Append, KVCache
from lm.restrict import restricted

TICK = 16          # tokens that are drawn before the host looks at what has ended
GROWTH = 2048      # slots by which a row's cache grows


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn: from the full distribution, or what a Restriction leaves of it. It is what
    training scores."""

    temperature: float = 1.0      # 0 = greedy
    max_response_tokens: int = 16


@dataclass(slots=True)
class Response:
    """What was sampled after a prompt."""

    ids: list[int]                # the stop token included
    logprob: list[float]          # nats, one per id, at the sampling temperature
    truncated: bool               # no stop token within max_response_tokens
    allowed: list = field(default_factory=list)     # per id those it was drawn from (None: all)


def uniform(stream_B, position_B):
    """One number in (0, 1) per row, from a counter: splitmix64 of (stream, position), 52 bits, in int64.

    So an episode draws the same numbers in any slot, beside any other, on any rank.
    """
    x = stream_B + (position_B + 1) * (0x9E3779B97F4A7C15 - 2**64)     # in int64, where it wraps
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) / 2**52   # with 53 bits the half may round up to 1


def sample_tokens(logits_BV, uniform_B, temperature=1.0):
    """One token per row by inverse transform: the first whose cumulative probability reaches uniform_B.

    Stays on the device (no host sync). Returns token_B and its logprob_B under log_softmax(logits /
    temperature); greedy (temperature 0) reports the logprob at temperature 1.
    """
    logprob_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token_B = logprob_BV.argmax(-1)
    else:
        cumulative_BV = logprob_BV.exp().double().cumsum(-1)
        below_BV = cumulative_BV < uniform_B[:, None] * cumulative_BV[:, -1:]
        token_B = below_BV.sum(-1).clamp_(max=logits_BV.shape[1] - 1)
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]


class Slots:
    """The rows of a KV cache: the token ids that each holds, and the responses under way in them.

    `begin` prefills prompts and draws their first tokens, `tick` draws some more of every response under way,
    `land` hands over those that have ended: rows do not wait for each other. Between `begin` and `land` all
    that changes is on the device, and no number is read by the host. context: the most tokens of a row; the
    cache grows to what is needed. Rows in use are best kept at the front: a step runs up to the last of them.
    """

    def __init__(self, model, n, context, stops, sampling):
        weight = next(model.parameters())
        device, longest = weight.device, sampling.max_response_tokens
        self.model, self.sampling, self.context, self.device = model, sampling, context, device
        self.cache = KVCache(model.config, n, 1, weight.dtype, device)
        self.held = [[] for _ in range(n)]
        self.first_prompts = {}          # prompt -> (K/V, logits_V): what a group's later members start from
        self.running, self.restrictions, self.steps, self.graphs, self.pool = {}, {}, 0, {}, None
        self.stops, self.stop = stops, torch.tensor(stops, device=device)
        self.row_B = torch.arange(n, device=device)
        self.stream_B, self.length_B, self.drawn_B, self.token_B = torch.zeros(4, n, device=device).long()
        self.live_B = torch.zeros(n, dtype=torch.bool, device=device)
        self.ids_BM = torch.zeros(n, longest + 1, device=device).long()     # the last column is a bin
        self.logprob_BM = torch.zeros(n, longest + 1, device=device)

    @torch.no_grad()
    def begin(self, rows, prompts, streams, share=False, restrictions=None):
        """Start a response to each of the prompts, prompts[i] in row rows[i], from streams[i].

        share: keep the prompts that start from nothing for members of their groups that start later.
        restrictions: a Restriction for each.
        """
        longest = max(map(len, prompts)) + self.sampling.max_response_tokens
        assert longest <= self.context, (longest, self.context)
        logits_RV = prefill(self, rows, prompts, share)
        row_R = torch.tensor(rows, device=self.device)
        self.stream_B[row_R], self.length_B[row_R] = torch.tensor(
            [streams, [len(prompt) for prompt in prompts]], device=self.device)
        self.drawn_B[row_R], self.live_B[row_R] = 0, True
        self.running |= {row: (prompt, self.steps) for row, prompt in zip(rows, prompts)}
        self.restrictions |= zip(rows, restrictions or ())
        self.draw(logits_RV, row_R)

    def reserve(self, length):
        """Have room for so many tokens in every row: the cache grows by GROWTH, up to the context."""
        if length > self.cache.length:
            self.cache.grow(min(bucket(length, GROWTH), bucket(self.context + 16)))
            self.graphs.clear()                                 # they know the tensors that there were
            self.pool = None

    def draw(self, logits_RV, rows):
        """The next token of those of the rows that are live. rows: a slice, or a tensor of numbers."""
        drawn_R, live_R, row_R = self.drawn_B[rows], self.live_B[rows], self.row_B[rows]
        if self.restrictions:
            limits = [self.restrictions.get(row) for row in row_R.tolist()]
            logits_RV = restricted(logits_RV, [limit and limit.next for limit in limits])
        token_R, logprob_R = sample_tokens(logits_RV, uniform(self.stream_B[rows], drawn_R),
                                           self.sampling.temperature)
        if self.restrictions:
            for limit, token, live in zip(limits, token_R.tolist(), live_R.tolist()):
                if limit and live:
                    limit.take(token)
        longest = self.sampling.max_response_tokens
        place_R = torch.where(live_R, drawn_R, longest)
        self.ids_BM[row_R, place_R], self.logprob_BM[row_R, place_R] = token_R, logprob_R
        drawn_R = drawn_R + live_R
        self.token_B[rows] = torch.where(live_R, token_R, self.token_B[rows])
        self.drawn_B[rows] = drawn_R
        self.live_B[rows] = live_R & ~torch.isin(token_R, self.stop) & (drawn_R < longest)

    def step(self, rows, context):
        """Run the last token of those of the rows that are live and draw the next one."""
        live_B, start_B = self.live_B[rows], self.length_B[rows]
        place = Append(self.cache, rows, start_B, live_B.long(), 1, context)
        first = self.row_B[:len(live_B)], torch.zeros_like(start_B)
        logits_BV = self.model(self.token_B[rows, None], place, select=first)
        self.length_B[rows] = start_B + live_B
        self.draw(logits_BV, rows)

    @torch.no_grad()
    def tick(self):
        """Draw up to TICK tokens of each response under way. What has ended is looked up where that costs
        nothing, on the CPU, and where the host chooses what may be drawn: a few rows are then run alone."""
        n = max(self.running, default=-1) + 1
        looks = self.device.type == "cpu" or self.restrictions
        graphs = self.device.type == "cuda" and not looks and self.cache.varlen
        for _ in range(TICK if n else 0):
            rows = slice(0, n)
            if looks and 2 * len(live := self.live_B[:n].nonzero()[:, 0]) < n:
                rows = live
                if not len(live):
                    break
            if graphs:
                self.replay(min(bucket(n, 16), len(self.held)))
            else:
                reach = bucket(max(map(self.reach, self.running)) + 1, 16)
                self.step(rows, min(reach, self.cache.length))
            self.steps += 1

    def reach(self, row):
        """The most tokens that a row's response has brought it to."""
        prompt, since = self.running[row]
        return len(prompt) + self.steps - since

    def replay(self, n):
        """`step` as one CUDA graph, captured where it is not yet: its ~760 kernels are launched at once."""
        if n not in self.graphs:
            live_B, side = self.live_B.clone(), side_stream(self.device)
            self.live_B.zero_()                        # so that the steps before the capture change nothing
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.step(slice(0, n), self.cache.length)
            torch.cuda.current_stream().wait_stream(side)
            self.pool = self.pool or torch.cuda.graph_pool_handle()     # one: they never run side by side
            self.graphs[n] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, stream=side):
                self.step(slice(0, n), self.cache.length)
            self.live_B.copy_(live_B)
        self.graphs[n].replay()

    def land(self):
        """The responses that have ended, [(row, Response)] in the order of the rows; waits for the device."""
        live = self.live_B.tolist() if self.running else ()
        rows = [row for row in sorted(self.running) if not live[row]]
        row_R, landed = torch.tensor(rows, device=self.device).long(), []
        columns = (x[row_R].tolist() for x in (self.drawn_B, self.ids_BM, self.logprob_BM))
        for row, n, ids, logprob in zip(rows, *columns):
            (prompt, _), ids, logprob = self.running.pop(row), ids[:n], logprob[:n]
            if not math.isfinite(sum(logprob)):
                raise FloatingPointError("the model's logprobs are not finite: its weights, or the numbers "
                                         "in its config.json, give no probabilities")
            restriction = self.restrictions.pop(row, None)
            landed.append((row, Response(ids, logprob, ids[-1] not in self.stops,
                                         restriction.allowed if restriction else [])))
            self.held[row] = prompt + ids[:-1]                  # the last token was drawn, not run
        return landed

    def move(self, source, target):
        """Let `target` hold what `source` held, and what is under way there; `source` is free."""
        if source != target:
            for x in (self.stream_B, self.length_B, self.drawn_B, self.token_B, self.live_B, self.ids_BM,
                      self.logprob_BM):
                x[target] = x[source]
            holds = len(self.held[source])
            if source in self.running:
                holds = min(self.reach(source), self.cache.length)
                self.running[target] = self.running.pop(source)
            if source in self.restrictions:
                self.restrictions[target] = self.restrictions.pop(source)
            self.cache.copy_row(source, target, holds)
            self.held[target] = self.held[source]
        self.held[source], self.live_B[source] = [], False


@cache
def side_stream(device):
    """The stream on which steps are captured: one, for cuBLAS keeps a workspace for each."""
    return torch.cuda.Stream(device)


def bucket(n, size=64):
    """n rounded up to a multiple of `size`: few distinct shapes, so kernels and allocations are reused."""
    return -(-n // size) * size


def common_prefix(held, prompt):
    """How many tokens of the prompt a slot already holds; at least one is left to run, for its logits."""
    n = min(len(held), len(prompt) - 1)
    return n if held[:n] == prompt[:n] else next(i for i in range(n) if held[i] != prompt[i])


def run_chunks(model, cache, rows, chunks, starts, max_tokens=16384):
    """Append chunks[i] to row rows[i], ascending, at position starts[i]. Returns logits_RV after each chunk's
    last token.

    Chunks of up to 4, 16, 64, ... tokens go together, so that long ones pad no short ones; at most max_tokens
    (padding included) in one forward.
    """
    device, order, logits, alike = cache.kv[0].device, [], [], {}
    for i, chunk in enumerate(chunks):
        alike.setdefault(((len(chunk) - 1).bit_length() + 1) // 2 or 1, []).append(i)
    for members in alike.values():
        longest = max(len(chunks[i]) for i in members)
        width = bucket(longest, 4 if longest <= 16 else 16)
        size = max(1, max_tokens // width)
        for block in (members[a:a + size] for a in range(0, len(members), size)):
            first, last = rows[block[0]], rows[block[-1]]
            dense = last - first < min(2 * len(block), size)       # then K/V are read where they are
            run = dict(zip((rows[i] for i in block), block))
            lying = range(first, last + 1) if dense else [*run]
            here = [chunks[run[row]] if row in run else [] for row in lying]
            ids_BT = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in here], device=device)
            start_B = torch.tensor([starts[run[row]] if row in run else 0 for row in lying], device=device)
            context = bucket(max(starts[i] + len(chunks[i]) for i in block), 16)
            place = Append(cache, slice(first, last + 1) if dense else torch.tensor(lying, device=device),
                           start_B, [len(chunk) for chunk in here], width, min(context, cache.length))
            ends = [(b, len(chunk) - 1) for b, chunk in enumerate(here) if chunk]
            logits.append(model(ids_BT, place, select=torch.tensor(ends, device=device).unbind(1)))
            order += block
    return torch.cat(logits)[torch.tensor(order, device=device).argsort()]


def prefill(slots, rows, prompts, share):
    """Bring row rows[i], in ascending order, to hold prompts[i] and return logits_RV after it, running only
    what is not there yet.

    Prompts that start from nothing are run once each and copied (a group's members begin alike), and kept
    with `share` for members that start later.
    """
    model, keep = slots.model, [common_prefix(slots.held[row], prompt) for row, prompt in zip(rows, prompts)]
    slots.reserve(max(map(len, prompts)) + max(16, slots.sampling.max_response_tokens))
    known, members, going_on = slots.first_prompts if share else {}, {}, []
    for i, prompt in enumerate(prompts):
        if keep[i]:
            going_on.append(i)
        else:
            members.setdefault(tuple(prompt), []).append(i)
    if new := [list(prompt) for prompt in members if prompt not in known]:
        width = bucket(max(map(len, new)), 16)
        scratch = KVCache(model.config, len(new), width, slots.cache.kv[0].dtype, slots.device)
        logits = run_chunks(model, scratch, range(len(new)), new, [0] * len(new))
        known |= {tuple(p): (scratch.export_row(j, len(p)), logits[j]) for j, p in enumerate(new)}
    parts, order = [], list(going_on)
    if going_on:
        parts.append(run_chunks(model, slots.cache, [rows[i] for i in going_on],
                                [prompts[i][keep[i]:] for i in going_on], [keep[i] for i in going_on]))
    for prompt, of in members.items():
        exported, logits_V = known[prompt]
        slots.cache.import_rows([rows[i] for i in of], exported)
        parts.append(logits_V.expand(len(of), -1))
        order += of
    return torch.cat(parts)[torch.tensor(order, device=slots.device).argsort()]


def generate(slots, prompts, streams, share=False, restrictions=None):
    """One response to each prompt, prompts[i] in slot i, from streams[i]: a list of Responses."""
    responses = {}
    slots.begin(range(len(prompts)), prompts, streams, share, restrictions)
    while slots.running:
        slots.tick()
        responses |= slots.land()
    return [responses[row] for row in range(len(prompts))]


def answer(model, prompts, streams, stops, sampling, n_slots):
    """Several answers to each prompt, a list of Responses: streams[i] holds a stream for each to prompts[i].

    A prompt is prefilled once and copied to the slots of its answers.
    """
    answers, each = [], max(map(len, streams), default=1)
    per_batch = max(1, n_slots // each)
    for a in range(0, len(prompts), per_batch):
        batch = [p for p in prompts[a:a + per_batch] for _ in range(each)]
        flat = [s for row in streams[a:a + per_batch] for s in row]
        longest = max(map(len, batch)) + sampling.max_response_tokens
        responses = generate(Slots(model, len(batch), longest, stops, sampling), batch, flat)
        answers += [responses[i:i + each] for i in range(0, len(responses), each)]
    return answers
