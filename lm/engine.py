"""The KV-cached slot engine: prompts in, sampled responses out.

Every token is computed once. An episode keeps its slot, and of each new prompt only what the slot does not
hold yet is run: with an append-only conversation that is the last observation. The members of a group start
from one prefill. Token in, token out: what was sampled is what is trained on, no response is tokenised again.
Left out: paged caches. Shapes: B slots in use, T tokens of a chunk, V vocabulary.

    python -m bench.rollout           # against transformers' generate
"""

import math
from dataclasses import dataclass, field

import torch

from lm.model import KVCache
from lm.restrict import restricted


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


def uniform(stream_B, position):
    """One number in (0, 1) per row, from a counter: splitmix64 of (stream, position), 52 bits, in int64.

    So an episode draws the same numbers in any slot, beside any other, on any rank.
    """
    step = (position + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    x = stream_B + (step - 2**64 if step >= 2**63 else step)
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
    """The rows of a KV cache and the token ids that each of them holds; live rows are kept at the front."""

    def __init__(self, model, n, context):
        weight = next(model.parameters())
        self.cache = KVCache(model.config, n, context, weight.dtype, weight.device)
        self.held = [[] for _ in range(n)]
        self.first_prompts = {}          # prompt -> (K/V, logits_V): what a group's later members start from

    def move(self, source, target):
        """Let `target` hold what `source` held: an ended episode's hole is filled from the back."""
        if source != target:
            self.cache.copy_row(source, target, len(self.held[source]))
        self.held[target], self.held[source] = self.held[source], []


def bucket(n, size=64):
    """n rounded up to a multiple of `size`: few distinct shapes, so kernels and allocations are reused."""
    return -(-n // size) * size


def common_prefix(held, prompt):
    """How many tokens of the prompt a slot already holds; at least one is left to run, for its logits."""
    n = min(len(held), len(prompt) - 1)
    return n if held[:n] == prompt[:n] else next(i for i in range(n) if held[i] != prompt[i])


def run_chunks(model, cache, chunks, starts, context, max_tokens=16384):
    """Append chunks[i] to row i at position starts[i], at most max_tokens (padding included) in one forward.

    Returns logits_BV after each chunk's last token; of a row with an empty chunk they mean nothing.
    """
    device = next(model.parameters()).device
    width = bucket(max(map(len, chunks)), 16)
    ids_BT = torch.tensor([c + [0] * (width - len(c)) for c in chunks], device=device)
    start_B, n_B = torch.tensor([starts, [len(c) for c in chunks]], device=device)
    block, logits = max(1, max_tokens // width), []
    for a in range(0, len(chunks), block):
        b = min(a + block, len(chunks))
        last = torch.arange(b - a, device=device), (n_B[a:b] - 1).clamp(min=0)
        logits.append(model(ids_BT[a:b], cache=cache.rows(b, start=a), start_B=start_B[a:b],
                            n_valid_B=n_B[a:b], context=min(context, cache.length), select=last))
    return torch.cat(logits)


def prefill(model, slots, prompts, share):
    """Bring slot i to hold prompts[i] and return logits_BV after it, running only what is not there yet.

    Prompts that start from nothing are run once each and copied (a group's members begin alike), and kept
    with `share` for members that start later.
    """
    keep = [common_prefix(held, prompt) for held, prompt in zip(slots.held, prompts)]
    fresh = [i for i, k in enumerate(keep) if k == 0]
    known = slots.first_prompts if share else {}
    if new := list(dict.fromkeys(tuple(prompts[i]) for i in fresh if tuple(prompts[i]) not in known)):
        width = bucket(max(map(len, new)), 16)
        scratch = Slots(model, len(new), width).cache
        new_logits = run_chunks(model, scratch, [list(p) for p in new], [0] * len(new), width)
        known.update((p, (scratch.export_row(j, len(p)), new_logits[j])) for j, p in enumerate(new))
    if len(fresh) < len(prompts):
        chunks = [prompt[k:] if k else [] for prompt, k in zip(prompts, keep)]
        context = bucket(max(map(len, prompts)) + 16)
        logits_BV = run_chunks(model, slots.cache.rows(len(prompts)), chunks, keep, context)
    else:
        logits_BV = next(iter(known.values()))[1].new_empty(len(prompts), model.config.vocab_size)
    for i in fresh:
        kv, logits_BV[i] = known[tuple(prompts[i])]
        slots.cache.import_row(i, kv)
    return logits_BV


@torch.no_grad()
def generate(model, slots, prompts, streams, stops, sampling, share=False, restrictions=None):
    """Sample one response to each prompt: prompts[i] in slot i, from streams[i]. Returns list[Response].

    A row that has sampled a stop id waits for the others. Whether all have is looked up every 16 tokens: a
    look makes the host wait for the device (on the CPU it costs nothing: at every token). restrictions: a
    Restriction for each prompt; the host then looks at every token.
    """
    device = next(model.parameters()).device
    n, longest = len(prompts), max(map(len, prompts))
    assert longest + sampling.max_response_tokens <= slots.cache.length, (longest, slots.cache.length)
    logits_BV = prefill(model, slots, prompts, share)
    cache, first = slots.cache.rows(n), (torch.arange(n, device=device), torch.zeros(n, device=device).long())
    stream_B, stop = torch.tensor(streams, device=device), torch.tensor(stops, device=device)
    length_B = torch.tensor([len(p) for p in prompts], device=device)
    live_B = torch.ones(n, dtype=torch.bool, device=device)
    check, sampled = 1 if device.type == "cpu" else 16, []           # (token_B, logprob_B) by position
    for t in range(sampling.max_response_tokens):
        if restrictions:
            logits_BV = restricted(logits_BV, [restriction.next for restriction in restrictions])
        sampled.append(sample_tokens(logits_BV, uniform(stream_B, t), sampling.temperature))
        token_B = sampled[-1][0]
        for restriction, token in zip(restrictions, token_B.tolist()) if restrictions else ():
            restriction.take(token)
        live_B = live_B & ~torch.isin(token_B, stop)
        if t + 1 == sampling.max_response_tokens or (t % check == check - 1 and not live_B.any()):
            break
        logits_BV = model(token_B[:, None], cache=cache, start_B=length_B, n_valid_B=live_B.long(),
                          context=min(bucket(longest + t + 1), cache.length), select=first)
        length_B = length_B + live_B
    ids, logprobs = (torch.stack(columns, 1).tolist() for columns in zip(*sampled))
    responses = [cut(i, p, stops) for i, p in zip(ids, logprobs)]
    for i, response in enumerate(responses):     # the last token was sampled, not run: it is not in the cache
        slots.held[i] = prompts[i] + response.ids[:-1]
        if restrictions:
            response.allowed = restrictions[i].allowed[:len(response.ids)]
    return responses


def cut(ids, logprob, stops):
    """The response within a row of samples: up to the first stop token, that token included."""
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
    if not math.isfinite(sum(logprob[:end])):
        raise FloatingPointError("the model's logprobs are not finite: its weights, or the numbers in its "
                                 "config.json, give no probabilities")
    return Response(ids[:end], logprob[:end], truncated=end is None)


def answer(model, prompts, streams, stops, sampling, n_slots):
    """Several answers to each prompt, a list of Responses: streams[i] holds a stream for each to prompts[i].

    A prompt is prefilled once and copied to the slots of its answers.
    """
    answers, each = [], max(map(len, streams), default=1)
    per_batch = max(1, n_slots // each)
    for a in range(0, len(prompts), per_batch):
        batch = [p for p in prompts[a:a + per_batch] for _ in range(each)]
        slots = Slots(model, len(batch), bucket(max(map(len, batch)) + sampling.max_response_tokens))
        flat = [s for row in streams[a:a + per_batch] for s in row]
        responses = generate(model, slots, batch, flat, stops, sampling)
        answers += [responses[i:i + each] for i in range(0, len(responses), each)]
    return answers
