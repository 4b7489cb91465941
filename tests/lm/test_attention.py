"""Proves that the layouts of lm/attention.py are equivalent: texts with common prefixes computed once = a
forward for each, and variable-length attention = masks.

    python -m pytest tests/lm/test_attention.py

torch's variable-length attention runs only on a GPU. Here `by_loop` stands in for it, written from torch's
documentation, one sequence at a time. tests/lm/test_model.py compares masked appends with transformers.
"""

import itertools
import math
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import Recorder, tiny_model
from hand_made import make_sample
from test_engine import slow_response
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import batching
import update
from lm import attention, engine, logprobs
from lm import model as decoder
from lm.engine import Answers, Sampling, Slots
from losses import clipped_surrogate

GROUP = 6, 7, 8, 5, 9           # tokens after the prompt, which is 20, of a group's episodes


def assert_arguments(*starts_and_keys):
    """What torch's operator checks on a GPU."""
    given = [x for x in starts_and_keys if x is not None]
    assert {x.dtype for x in given} == {torch.int32} and all(x.is_contiguous() for x in given)


def by_loop(query, key, value, q_starts, k_starts, longest_q, longest_k, keys_B=None):
    """Stands in for `causal` and `cached` of `Varlen`: query i of a sequence's n attends to keys 0 to
    m - n + i of its m.
    """
    assert_arguments(q_starts, k_starts, keys_B)
    out = []
    for i, (a, b) in enumerate(zip(q_starts.tolist(), q_starts.tolist()[1:])):
        first = int(k_starts[i])
        m = int(k_starts[i + 1]) - first if keys_B is None else int(keys_B[i])
        assert 0 < b - a <= longest_q and b - a <= m <= longest_k and first + m <= len(key), (a, b, m, first)
        mask = torch.ones(b - a, m, dtype=torch.bool).tril(m - (b - a))
        keys = slice(first, first + m)
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[keys], value[keys]))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0])
    return torch.cat(out, 1).transpose(0, 1)


def shared_by_loop(query, key, value, q_starts, k_starts, longest_q, longest_k, keys_B):
    """Stands in for `Varlen.shared`: every query of a sequence attends to all of its keys."""
    assert_arguments(q_starts, k_starts, keys_B)
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1::-1])
    group = query.shape[1] // key.shape[1]
    for i, (a, b) in enumerate(zip(q_starts.tolist(), q_starts.tolist()[1:])):
        first, m = int(k_starts[i]), int(keys_B[i])
        assert 0 < b - a <= longest_q and 0 <= m <= longest_k and (first + m <= len(key) or not m)
        if not m:
            out[a:b], sums[:, a:b] = 0.0, torch.inf                          # as flash attention does
            continue
        for n, h in itertools.product(range(a, b), range(query.shape[1])):
            score_S = key[first:first + m, h // group] @ query[n, h] / query.shape[2] ** 0.5
            out[n, h] = score_S.softmax(0) @ value[first:first + m, h // group]
            sums[h, n] = score_S.exp().sum().log()
    return out, sums


@pytest.fixture
def with_varlen(monkeypatch):
    """A function that gives the device variable-length attention."""
    def use(function=by_loop, shared=shared_by_loop):
        for module in (attention, batching):
            used = attention.Varlen(function, function, shared)
            monkeypatch.setattr(module, "varlen", lambda *_, used=used: used)
    return use


@pytest.fixture(params=["qwen2", "qwen3"])
def model(request, tokenizer):
    return tiny_model(tokenizer, model_type=request.param, head_dim=12).double()


def answers_to(question, rng, lengths):
    """Judge samples with the same question and different answers of these lengths."""
    n = len(question)
    return [replace(make_sample(rng, kind="judge"), ids=question + [90 + i] + [rng.randrange(90)] * (m - 1),
                    sampled=[False] * n + [True] * m, advantage=[0.0] * n + [rng.gauss(0, 1)] * m,
                    logprob_old=[0.0] * n + [-3.0] * m) for i, m in enumerate(lengths)]


@pytest.fixture
def samples():
    """Single samples; questions without their episode, with one to three answers; an episode of four turns
    with questions about two of them, which branch off in its middle and at its end; and a group's
    episodes with one prompt, the last with a question."""
    rng, made = random.Random(0), []
    for k, lengths in enumerate([[2, 5, 1], [4], [3, 3]]):
        made += answers_to([rng.randrange(90) for _ in range(9 + 7 * k)], rng, lengths)
    episode = make_sample(rng, n=30)
    made += [episode, *answers_to(episode.ids[:17] + [91, 92, 93], rng, [3, 1]),
             *answers_to(episode.ids + [91, 92, 93], rng, [2, 4, 1])]
    prompt = [rng.randrange(90) for _ in range(20)]
    for m in GROUP:
        sample, zeros = make_sample(rng, n=m), [0.0] * len(prompt)
        made.append(replace(sample, ids=prompt + sample.ids,
                            sampled=[False] * len(prompt) + [True] + sample.sampled[1:],
                            advantage=zeros + sample.advantage, logprob_old=zeros + sample.logprob_old))
    made += answers_to(made[-1].ids + [91, 92], rng, [2])
    return made + [make_sample(rng, kind="judge") for _ in range(3)]


def gradient_of(model, samples, **objective):
    """The gradient of an update's loss, as a vector, and its metrics."""
    recorder = Recorder(model)
    settings = replace(update.Objective(), **{"judge_weight": 0.7, "max_grad_norm": 0.0} | objective)
    metrics = update.update(model, recorder, samples, settings, lr=0.1)
    return recorder.gradient, metrics


def assert_close(got, want):
    """Equal up to the order of sums. In a double model, too, logprobs and losses are fp32."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max().clamp(min=1)))


def plain(samples, model):
    """`batching.layout` of a single sample, without a tree of prefixes."""
    (sample,), T = samples, len(samples[0].ids)
    return torch.tensor([sample.ids]), attention.Rows(T, torch.device("cpu")), [range(T)]


def apart(run, model, samples, *settings):
    """What `run` returns with each sample in a forward of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "layout", plain)
        patch.setattr(batching, "microbatches", lambda samples, _: [[sample] for sample in samples])
        return run(model, samples, *settings)


def n_prefixes(samples):
    """How many different prefixes samples have: the tokens to compute, since logits depend on a prefix."""
    return len({tuple(sample.ids[:n + 1]) for sample in samples for n in range(len(sample.ids))})


@pytest.mark.parametrize("max_tokens", [1, 40, 16384])
@pytest.mark.parametrize("packed", [False, True])
def test_texts_with_common_prefixes_equal_a_forward_each(model, samples, with_varlen, packed, max_tokens):
    """Loss, logprobs and gradient are equal, and common prefixes are run once."""
    want, expected = apart(gradient_of, model, samples)
    scores = apart(update.logprobs, model, samples, update.Objective())
    if packed:
        with_varlen()
    run = []
    model.register_forward_pre_hook(lambda module, args: run.append(args[0].numel()))
    got, sums = gradient_of(model, samples, microbatch_tokens=max_tokens)
    if max_tokens > 1000:
        assert sum(run) == n_prefixes(samples)
    assert_close(got, want)
    assert sums == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True)
    for one, other in zip(update.logprobs(model, samples, update.Objective()), scores, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("a, b, n", [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2),
                                     ([1, 2, 3, 4], [1, 2, 9, 4], 2), ([5, 2], [1, 2], 0)])
def test_common_prefix_len(a, b, n):
    assert batching.common_prefix_len(a, b) == batching.common_prefix_len(b, a) == n


@pytest.mark.parametrize("seed", range(20))
def test_a_prefix_tree_has_each_prefix_once_and_each_samples_tokens(seed):
    """Of random samples with two token ids, some equal and some a prefix of another."""
    rng = random.Random(seed)
    samples = [replace(make_sample(rng), ids=rng.choices([3, 5], k=rng.randint(1, 9))) for _ in range(12)]
    tree = batching.PrefixTree(samples)
    assert len(tree.ids) == n_prefixes(samples) == sum(n for n, _ in tree.parts)
    prefix_of, first = {}, 0                       # by column: all columns that its query attends to
    for n, prefix in tree.parts:
        prefix_of |= {first + t: [*prefix, *range(first, first + t + 1)] for t in range(n)}
        first += n
    for sample, columns in zip(samples, tree.columns, strict=True):
        assert [tree.ids[column] for column in columns] == sample.ids
        assert prefix_of[columns[-1]] == columns


@pytest.mark.parametrize("seed", range(4))
def test_masked_attention_equals_that_of_each_text_alone(seed):
    """Of texts that branch off from each other, with long and short prefixes; heads in groups. It can be laid
    out where numbers are not known, as lab.bench.memory does."""
    rng, samples = random.Random(seed), []
    for m in (90, 70, 5, 40, 6, 1, 33, 64, 65, 7):
        ids = rng.choice(samples).ids if samples else []
        ids = ids[:rng.randrange(len(ids) + 1)] + [rng.randrange(90) for _ in range(m)]
        samples.append(replace(make_sample(rng), ids=ids))
    tree = batching.PrefixTree(samples)
    layout, N = attention.Masked(tree.parts, torch.device("cpu")), len(tree.ids)
    assert {mask is None for *_, mask in layout.groups} == {True, False}
    q, k, v = (torch.randn(1, N, heads, 8, dtype=torch.double) for heads in (6, 2, 2))
    masks = []
    for layer in range(2):
        out_NX = layout.attend(layer, q, k, v)[0]
        masks.append([mask for *_, mask in layout.groups if mask is not None])
        for columns in tree.columns:
            one = attention.Rows(len(columns), "cpu").attend(0, *(x[:, columns] for x in (q, k, v)))[0]
            torch.testing.assert_close(out_NX[columns], one, rtol=0, atol=1e-12)
            assert layout.position_BT[0, columns].tolist() == [*range(len(columns))]
    assert all(one is other and one.dtype == q.dtype for one, other in zip(*masks, strict=True))
    with FakeTensorMode():
        attention.Masked(tree.parts, torch.device("cpu"))


def test_masked_attention_has_groups_of_a_size_and_causal_ones_for_short_prefixes():
    ten, later = [*range(10)], [*range(30, 40)]
    parts = [(10, []), (30, ten), (20, ten), (31, []), (4, [*ten, *range(10, 30)]), (3, ten), (2, later)]
    groups = attention.Masked(parts, torch.device("cpu")).groups
    assert [(B, len(queries) // B, len(keys) // B, mask is None) for B, queries, keys, mask in groups] == [
        (2, 31, 31, True), (1, 40, 40, True), (3, 20, 30, False), (1, 4, 34, False)]
    assert groups[1][1].tolist() == [*range(40)]


@pytest.mark.parametrize("seed", range(20))
def test_microbatches_cost_as_little_as_any_cut(seed):
    """Of random samples, sorted by their ids; compared with all cuts."""
    rng = random.Random(seed)
    samples = [replace(make_sample(rng), ids=rng.choices([3, 5], k=rng.randint(1, rng.choice([9, 40]))))
               for _ in range(9)]
    ordered, max_tokens = sorted(samples, key=lambda sample: sample.ids), rng.choice([1, 9, 16, 20, 32, 48])
    limit = max(max_tokens, *(len(sample.ids) for sample in samples))

    def cost(batches):
        return sum(n_prefixes(batch) + limit // 16 for batch in batches)

    def within(batch):
        return n_prefixes(batch) <= limit

    cuts = [[0, *cut, 9] for k in range(9) for cut in itertools.combinations(range(1, 9), k)]
    splits = [[ordered[a:b] for a, b in itertools.pairwise(cut)] for cut in cuts]
    found = batching.microbatches(samples, max_tokens)
    assert [*itertools.chain(*found)] == ordered and all(map(within, found))
    assert cost(found) == min(cost(split) for split in splits if all(map(within, split)))
    assert batching.microbatches([], max_tokens) == []


def test_a_further_microbatch_costs_a_sixteenth_of_its_tokens():
    """Two lists have 120 tokens; three, which compute a prefix of two once, have 118, but a list costs 4."""
    sample = make_sample(random.Random(0))
    samples = [replace(sample, ids=ids) for ids in
               ([1] * 30, [2, 2, *[3] * 28], [2, 2, *[4] * 28], [5] * 30)]
    assert [len(batch) for batch in batching.microbatches(samples, 64)] == [2, 2]
    assert [len(batch) for batch in batching.microbatches(samples, 31)] == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_common_prefixes_can_be_recomputed(model, samples, with_varlen, packed):
    want, _ = gradient_of(model, samples)
    if packed:
        with_varlen()
    model.recompute_layers(True)
    assert_close(gradient_of(model, samples)[0], want)


# Answers that share their prompt

@pytest.mark.slow
@pytest.mark.parametrize("part", [None, 640, 7])
@pytest.mark.parametrize("n_slots", [1, 7, 64])
def test_answers_share_their_prompt_and_are_the_oracles(model, with_varlen, chat, monkeypatch, n_slots, part):
    """Some end at once, and the last batch is smaller. A prompt is run and cached once for its answers. With
    masks, and with keys read in parts: all at once, and in parts of which short prompts have none.
    """
    if part:
        with_varlen()
        monkeypatch.setattr(attention, "SPLIT_KEYS", part)
    prompts = [[7, 8, 9], [10] * 37, [3, 4, 5, 6] * 11]
    streams = [[17 * p + i for i in range(3)] for p in range(3)]
    prefilled = []

    def count(module, args):
        if isinstance(layout := args[1], attention.PackedAppend):
            prefilled.append(len(layout.slot_N))
        if isinstance(layout, attention.MaskedAppend):
            prefilled.append(int((layout.row_N < layout.cache.n_rows).sum()))

    hook = model.register_forward_pre_hook(count)
    decoder.init_weights(model, 3)
    stops = tuple(range(0, 272, 12))
    answers = engine.answer(model, prompts, streams, stops, Sampling(1.0, 20), n_slots)
    hook.remove()
    assert sum(prefilled) == sum(map(len, prompts))
    for prompt, given, of_prompt in zip(prompts, answers, streams, strict=True):
        for one, stream in zip(given, of_prompt, strict=True):
            ids, logprobs = slow_response(model, prompt, stream, stops, 1.0, 20, one.ids)
            assert one.ids == ids and one.logprob == pytest.approx(logprobs, abs=1e-5)
            assert one.truncated == (ids[-1] not in stops)
    lengths = [len(one.ids) for given in answers for one in given]
    assert min(lengths) < 3 and max(lengths) > 17
    assert engine.answer(model, [], [], chat.stop_ids, Sampling(1.0, 20), n_slots) == []


def test_a_short_answers_share_beside_a_long_prompt_is_not_rounded():
    """To the model's dtype: in bf16 a share below .002 would be 0, one below .01 off by up to a half."""
    for own in (1, 3, 8):
        log_own, log_prompt = (torch.tensor([float(n)]).log() for n in (own, 3000))
        ones, zeros = (torch.full((1, 4), x, dtype=torch.bfloat16) for x in (1.0, 0.0))
        merged = attention.merge(ones, log_own, zeros, log_prompt)
        assert merged.dtype == torch.bfloat16
        assert merged[0, 0].item() == pytest.approx(own / (own + 3000), rel=2**-8)


# Room in the cache

def assert_room(cache):
    """No two rows share a slot, and none is outside of the pool."""
    spans = sorted((first, first + room) for first, room in zip(cache.first, cache.room) if room)
    assert cache.first_B.tolist() == cache.first and spans[-1][1] <= cache.positions
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


@pytest.mark.parametrize("limit, rooms", [(math.inf, [49, 49, 49, 39]), (45, [45] * 4), (40, [40] * 4)])
def test_a_pool_grows_by_a_quarter_but_no_further_than_the_limit(model, limit, rooms):
    cache = attention.Pool(model.config, 4, None, torch.float32, torch.device("cpu"))
    needed = [40, 40, 40, 30]
    assert cache.fit([0] * 4, needed, limit) and cache.room == rooms
    assert not cache.fit(needed, needed, limit)
    assert_room(cache)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("model", "seed"), [("qwen2", 0), ("qwen3", 1), ("qwen2", 2)], indirect=["model"])
def test_rows_that_grow_move_end_and_start_again_sample_the_oracles_tokens(model, with_varlen, chat,
                                                                           monkeypatch, seed, packed):
    """Two rollouts in the same Slots, the second with other weights and settings: conversations of random
    lengths, of which some wait for their next prompt, some end, and some take the place of others.
    """
    if packed:
        with_varlen()
    monkeypatch.setattr(engine, "TICK", 3)
    monkeypatch.setattr(engine, "PLANNED", 8)
    monkeypatch.setattr(attention, "GROWTH", 32)
    rng, layouts, streams = random.Random(seed), set(), iter(range(10**6))
    slots = Slots(model, 6, 300, chat.stop_ids, Sampling(1.0, 5))

    def chunk(longest):
        return [rng.randrange(90) for _ in range(rng.randint(1, longest))]

    for settings in (Sampling(1.0, 5), Sampling(0.7, 9)):
        decoder.init_weights(model, settings.max_response_tokens)
        slots.restart(300, settings)
        live, waiting, streams_of = [chunk(40) for _ in range(6)], {*range(6)}, {}
        responses = 0
        while live and responses < 60:
            slots.tick()
            for row, response in slots.pop_finished():
                ids, logprobs = slow_response(model, live[row], streams_of.pop(row), chat.stop_ids,
                                              settings.temperature, settings.max_response_tokens,
                                              response.ids)
                assert response.ids == ids and response.logprob == pytest.approx(logprobs, abs=1e-5)
                live[row] = live[row] + ids + chunk(60)
                waiting.add(row)
                responses += 1
            for row in sorted(waiting, reverse=True):
                if len(live[row]) > 280 or rng.random() < 0.1:
                    if responses < 30:
                        live[row], slots.cached[row] = chunk(80), []
                        continue
                    last, live[row] = len(live) - 1, live[-1]
                    live.pop()
                    slots.move(last, row)
                    waiting = {row if r == last else r for r in waiting - {row}}
                    streams_of = {row if r == last else r: stream for r, stream in streams_of.items()}
            if starting := sorted(row for row in waiting if rng.random() < 0.7):
                streams_of |= {row: next(streams) for row in starting}
                slots.begin(starting, [live[row] for row in starting], [streams_of[row] for row in starting])
                waiting -= {*starting}
                if packed:
                    assert_room(slots.cache)
                else:
                    busy = {*range(len(live))} - waiting
                    assert max(len(live[row]) for row in busy) <= slots.cache.room <= 304
                layouts.add((slots.cache.positions, *(slots.cache.first if packed else ())))
    sizes = {size for size, *_ in layouts}
    assert len(sizes) > 2 and (len(layouts) > len(sizes) + 5 or not packed)
    most, size = slots.usage
    assert most < size < (2 if packed else 10) * most


@pytest.mark.parametrize("packed", [False, True])
def test_equal_prompts_are_run_once_and_copied_whether_they_are_the_first_or_later_ones(
        model, with_varlen, packed):
    """Of five rows two and two have equal second prompts, whose last two ids the fifth one's has, too."""
    if packed:
        with_varlen()
    slots, run = Slots(model, 5, 64, (), Sampling(1.0, 3)), []
    model.register_forward_pre_hook(lambda module, arguments: run.append(arguments[0].shape[1]))

    def responses(prompts, streams):
        slots.begin(range(5), prompts, streams)
        run_by_begin, finished = run[-1], {}
        while slots.running:
            slots.tick()
            finished |= slots.pop_finished()
        for row, (prompt, stream) in enumerate(zip(prompts, streams)):
            ids, logprobs = slow_response(model, prompt, stream, (), 1.0, 3, finished[row].ids)
            assert finished[row].ids == ids and finished[row].logprob == pytest.approx(logprobs, abs=1e-5)
        return run_by_begin, [prompt + finished[row].ids for row, prompt in enumerate(prompts)]

    first = [[7, 8, 9, 10]] * 4 + [[11, 12, 13]]
    n, texts = responses(first, [1, 2, 1, 2, 3])
    assert n == 4 + 3 and texts[0] == texts[2] != texts[1] == texts[3]
    n, texts = responses([text + [20, 21] for text in texts], [4, 5, 6, 7, 8])
    assert n == 3 * 3                            # the last token of the first response, and 20, 21
    assert len({*map(tuple, texts)}) == 5


def test_rows_get_what_they_need_and_share_the_rest_of_the_pool(model, with_varlen):
    with_varlen()
    cache = attention.kv_cache(model.config, 4, torch.double, "cpu")
    assert cache.fit([0] * 4, [8, 0, 40, 80]) and cache.positions == 160     # a quarter more than is needed
    assert cache.room == [18, 0, 50, 90] and cache.first == [0, 18, 18, 68]
    for kv in cache.kv:
        kv.normal_()
    before = [cache.export_row(row, 0, n) for row, n in ((0, 8), (2, 40), (3, 80))]
    assert not cache.fit([8, 0, 40, 80], [10, 0, 50, 90])                    # there is room
    assert not cache.fit([8, 0, 40, 80], [19, 0, 50, 80])                    # laid out again, in place
    assert cache.room == [22, 0, 53, 83] and cache.positions == 160
    assert cache.fit([8, 0, 40, 80], [19, 1, 50, 90]) and cache.positions == 200
    for row, n, kept in ((0, 8, before[0]), (2, 40, before[1]), (3, 80, before[2])):
        assert all(torch.equal(a, b) for a, b in zip(cache.export_row(row, 0, n), kept, strict=True))
    cache.move(3, 0, 80)                                                     # by exchanging their room
    assert all(torch.equal(a, b) for a, b in zip(cache.export_row(0, 0, 80), before[2], strict=True))


def test_rows_of_equal_room_keep_their_tokens_and_the_memory(model):
    """They grow by an eighth or GROWTH beyond the need, and get less room once nothing is kept. After
    the last row in use nothing is kept.
    """
    cache = attention.Rectangle(model.config, 3, 0, torch.double, "cpu")
    assert cache.fit([0] * 3, [0, 9, 40]) and cache.room == 112 and cache.positions == 3 * 112
    for kv in cache.kv:
        kv.normal_()
    before = {row: cache.export_row(row, 0, n) for row, n in ((1, 9), (2, 40))}
    assert not cache.fit([0, 9, 40], [0, 20, 112])                           # there is room
    for kept, needed, room in (([0, 9, 40], 113, 192), ([0, 9, 0], 1000, 1136)):
        assert cache.fit(kept, [0, needed, 50]) and cache.room == room
        for row, n in enumerate(kept):
            assert not n or all(map(torch.equal, cache.export_row(row, 0, n), before[row]))
    memory = {kv.data_ptr() for kv in cache.kv}
    for needed, limit, room in ((8, 500, 80), (400, 500, 464), (400, 410, 416)):
        assert cache.fit([0] * 3, [needed, 0, 0], limit) and cache.room == room
        assert all(kv.isfinite().all() for kv in cache.kv) and cache.positions == 3 * 1136
    assert memory == {kv.data_ptr() for kv in cache.kv}
    cache.import_rows([0, 2], 0, before[2])
    cache.move(2, 1, 40)
    assert all(map(torch.equal, cache.export_row(1, 0, 40), before[2]))


# torch's versions

@pytest.fixture
def torch_with(monkeypatch):
    """A function that lets torch's variable-length attention be another one, or missing (None)."""
    def use(function):
        module = SimpleNamespace(varlen_attn=function) if function else None
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        attention.varlen.cache_clear()
    yield use
    attention.varlen.cache_clear()


META = torch.device("meta")


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    """Has the signature of torch 2.10's varlen_attn."""


def of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
            window_size=(-1, -1)):
    """Has the signature of torch 2.11's varlen_attn. Returns how it was called."""
    return {"max_q": max_q, "window_size": window_size}


def of_2_13(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
            window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):
    """Has the signature of torch 2.13's varlen_attn. Returns how it was called."""
    assert enable_gqa and block_table is seqused_k is num_splits is None
    return {"max_q": max_q, "window_size": window_size}


def test_a_gpu_without_varlen_falls_back_with_one_warning(capsys, torch_with):
    torch_with(of_2_13)
    assert attention.varlen(torch.device("cpu"), torch.bfloat16, 64) is None
    assert capsys.readouterr().err == ""                         # no warning on the CPU
    for _ in range(2):
        assert attention.varlen(META, torch.float32, 64) is None
    assert capsys.readouterr().err.count("\n") == 1
    assert attention.varlen(META, torch.bfloat16, 12) is None
    assert "a head size of 12" in capsys.readouterr().err
    assert attention.varlen(META, torch.bfloat16, 264) is None
    assert "a head size of 264" in capsys.readouterr().err


def test_a_gpu_before_ampere_and_a_torch_without_flash_attention_have_masks(capsys, torch_with, monkeypatch):
    torch_with(of_2_13)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, built, warning in (((7, 5), True, "a Tesla T4: falling back"), ((8, 0), True, ""),
                                       ((8, 0), False, "built without flash attention: falling back")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda found=built: found)
        attention.varlen.cache_clear()
        found, printed = attention.varlen(torch.device("cuda"), torch.bfloat16, 64), capsys.readouterr().err
        assert bool(found) == (not printed) == (not warning) and warning in printed


@pytest.mark.parametrize("function", [None, of_2_10])
def test_before_torch_2_11_there_are_masks(capsys, torch_with, function):
    torch_with(function)
    for _ in range(2):
        assert attention.varlen(META, torch.bfloat16, 64) is None
    assert capsys.readouterr().err.count("variable-length attention is older than 2.11's") == 1


@pytest.mark.parametrize("version", [of_2_11, of_2_13])
def test_training_uses_varlen_attn(torch_with, version):
    torch_with(version)
    used = attention.varlen(META, torch.bfloat16, 64)
    assert used.causal(*[None] * 5, 7, 9) == {"max_q": 7, "window_size": (-1, 0)}


@pytest.mark.parametrize("can_split", [False, True])
@pytest.mark.parametrize("longest_k, longest_q, window, splits", [
    (16384, 1, -1, 26), (640, 1, -1, 1), (10**6, 1, -1, 128), (16384, 5, 0, 1)])
def test_decoding_uses_the_operator_and_from_torch_2_13_on_its_splits(torch_with, monkeypatch, longest_k,
                                                                      longest_q, window, splits, can_split):
    called = {}

    def operator(q, k, v, q_starts, k_starts, max_q, max_k, dropout, causal, debug, **named):
        called.update(named, max_q=max_q, max_k=max_k, dropout=dropout, causal=causal, debug=debug)
        return "out", "sums"

    torch_with(of_2_13 if can_split else of_2_11)
    used = attention.varlen(META, torch.bfloat16, 64)
    monkeypatch.setattr(attention, "can_split", lambda: can_split)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", operator)
    assert used.cached(*[None] * 5, longest_q, longest_k, "lengths") == "out"
    assert called == {"max_q": longest_q, "max_k": longest_k, "dropout": 0.0, "causal": longest_q > 1,
                      "debug": False, "seqused_k": "lengths", "window_size_left": -1,
                      "window_size_right": window} | ({"num_splits": splits} if can_split else {})


@pytest.mark.parametrize("version, can_split", [
    ("2.9.1", False), ("2.11.0+cu130", False), ("2.12.0+cu130", False), ("2.12.1", False),
    ("2.13.0+cpu", True), ("2.14.0.dev20261101+cu130", True), ("3.0.0", True)])
def test_torch_2_12_has_splits_but_refuses_them(monkeypatch, version, can_split):
    """`strings libtorch_cuda.so` of 2.12.0 and 2.12.1 has "num_splits requires FA3", 2.13.0's has not."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert attention.can_split() is can_split


CASES = {"decode": [(1, 7), (1, 1), (1, 90)], "prefill": [(5, 9), (1, 30), (12, 12)],
         "packed": [(4, 4), (70, 70), (1, 1)], "prefixes": [(9, 9), (3, 12), (2, 11)]}


@pytest.mark.parametrize("case", CASES)
def test_the_installed_torchs_operators_give_the_shape_and_type_of_masks(case):
    """On tensors without data; `python -m lab.bench.gpu` compares the numbers on a GPU."""
    lengths, (H, K, D) = CASES[case], (6, 2, 16)
    n, m = (sum(column) for column in zip(*lengths))
    q_starts, k_starts = (torch.tensor([0, *accumulate(column)], dtype=torch.int32)
                          for column in zip(*lengths))
    keys_B = torch.tensor([m for _, m in lengths], dtype=torch.int32)
    longest = max(n for n, _ in lengths), max(m for _, m in lengths)
    want = by_loop(*(torch.randn(*shape) for shape in ((n, H, D), (m, K, D), (m, K, D))), q_starts, k_starts,
                   *longest, keys_B)
    q, k, v = (torch.zeros(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
               for shape in ((n, H, D), (m, K, D), (m, K, D)))
    index = [x.to("meta") for x in (q_starts, k_starts)]
    attention.varlen.cache_clear()
    if not (used := attention.varlen(META, torch.bfloat16, D)):
        pytest.skip("this torch has no variable-length attention")
    if case in ("decode", "prefill"):
        with torch.no_grad():
            out = used.cached(q, k, v, *index, *longest, keys_B.to("meta"))
        assert (out.shape, out.dtype) == (want.shape, torch.bfloat16)
        out, sums = used.shared(q, k, v, *index, *longest, keys_B.to("meta"))
        assert (out.shape, out.dtype) == (want.shape, torch.bfloat16)
        assert (sums.shape, sums.dtype) == ((H, n), torch.float32)
    else:
        out = used.causal(q, k, v, *index, *longest)
        assert (out.shape, out.dtype) == (want.shape, torch.bfloat16)
        out.sum().backward()
        assert all(x.grad.shape == x.shape and x.grad.dtype == x.dtype for x in (q, k, v))


# CUDA graphs

@pytest.mark.parametrize("rows, length, key", [(3, 10, (4, 64)), (8, 47, (8, 64)), (8, 48, (8, 64)),
                                               (9, 49, (16, 128)), (18, 150, (18, 190))])
def test_a_step_is_captured_for_rows_and_for_a_length_that_none_exceeds(model, with_varlen, chat, monkeypatch,
                                                                        rows, length, key):
    """Of 18 rows with a context of 190; responses of few tokens have no more steps than they can use."""
    with_varlen()
    keys = []
    monkeypatch.setattr(engine, "PLANNED", 64)
    monkeypatch.setattr(Slots, "replay", lambda slots, *given: keys.append(given))
    slots = Slots(model, 18, 190, chat.stop_ids, Sampling(1.0, 40))
    slots.begin(range(rows), [[7] * length] * rows, range(rows))
    slots.device = torch.device("cuda")
    slots.tick()
    assert keys == [key] * engine.TICK
    keys.clear()
    slots.sampling = Sampling(1.0, 4)
    slots.tick()
    assert len(keys) == 3                                               # `begin` drew the first


def test_a_step_is_captured_once_for_each_temperature(model, chat, monkeypatch):
    """With stand-ins for CUDA's: a graph keeps the temperature that it was captured with."""
    replayed, temperatures = [], []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(engine, "side_stream", lambda device: stream)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(
        current_stream=lambda: stream, stream=nullcontext, graph_pool_handle=object,
        graph=lambda graph, **more: nullcontext(),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: replayed.append(temperatures[-1]))))

    def step(slots, *given):
        assert not slots.active_B.any()                        # it draws no token of a response
        temperatures.append(slots.sampling.temperature)

    monkeypatch.setattr(Slots, "step", step)
    slots = Slots(model, 2, 64, chat.stop_ids, Sampling(1.0, 4))
    for temperature, limit in ((1.0, 4), (1.0, 3), (0.4, 4)):
        slots.restart(64, Sampling(temperature, limit))
        slots.active_B.fill_(True)
        slots.replay(2, 64)
        assert slots.active_B.all()
    assert temperatures == [1.0] * 3 + [0.4] * 3               # two to warm up, and the capture
    assert replayed == [1.0, 1.0, 0.4] and len(slots.graphs) == 2


@pytest.mark.slow
def test_graphs_are_forgotten_with_the_tensors_that_they_refer_to(model, with_varlen, chat):
    """Longer responses, a cache that grows, and of answers longer prompts."""
    with_varlen()
    slots = Slots(model, 2, 900, chat.stop_ids, Sampling(1.0, 4))
    answers = Answers(model, 1, 2, chat.stop_ids, Sampling(1.0, 4))
    for of, change in ((slots, lambda: slots.restart(900, Sampling(1.0, 9))),
                       (slots, lambda: slots.begin([0], [[7] * 800], [1])),
                       (answers, lambda: answers.begin([0, 1], [[7] * 9] * 2, [1, 2])),
                       (answers, lambda: answers.begin([0, 1], [[7] * 800] * 2, [3, 4]))):
        of.graphs = {"a key": "a graph"}
        change()
        assert of.graphs == {}
    slots.graphs = graphs = {"a key": "a graph"}
    slots.restart(900, Sampling(0.4, 5))                       # replaces no tensor
    assert slots.graphs is graphs


def test_scores_of_large_keys_are_not_rounded_to_the_models_dtype():
    """In bf16 with a few channels far from 0, as a key's bias makes them: of fp64 on the same numbers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 64) for n in (3, 40, 40))
    q[..., :3], k[..., :3] = q[..., :3] + 8, k[..., :3] + 16
    q, k, v = (x.bfloat16() for x in (q, k, v))
    hidden = torch.arange(40)[None, None, None].expand(2, 1, 1, 40) > 30
    found, sums = attention.weighted_mean(q, k, v, hidden)
    want, exact = attention.weighted_mean(*(x.double() for x in (q, k, v)), hidden)
    assert sums.dtype == torch.float32 and exact.abs().max() > 32
    assert (sums - exact).abs().max() < 1e-4                 # 24 bits of up to 64; bf16's 8 are off by .1
    assert (found - want).abs().max() < 2**-7 * v.abs().max()           # weights and result are rounded


class HostReads(TorchDispatchMode):
    """Fails on operations with a host sync or data-dependent shapes, and on tensors that are not on meta."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select", "isin"), name
        out = function(*args, **(kwargs or {}))
        devices = {tensor.device.type for tensor in tree_leaves((args, kwargs, out))
                   if isinstance(tensor, torch.Tensor)}
        assert devices <= {"meta"}, f"{name} of tensors on {devices}"
        return out


def on_meta(model):
    with torch.device("meta"):
        return decoder.Model(model.config).to(torch.bfloat16)


@pytest.mark.parametrize("lengths, part", [(False, None), (True, 640), (True, 24)])
def test_a_decoding_step_has_no_host_sync_and_fixed_shapes(model, with_varlen, chat, monkeypatch, lengths,
                                                           part):
    """For two steps, including sampling, so that a CUDA graph can capture it."""
    if lengths:
        with_varlen(lambda query, *_, **__: torch.empty_like(query),
                    lambda query, *_: (torch.empty_like(query), query.new_empty(query.shape[1::-1])))
        monkeypatch.setattr(attention, "SPLIT_KEYS", part)
    answers = engine.Answers(on_meta(model), 2, 3, chat.stop_ids, Sampling(1.0, 32))
    answers.prompts.fit([0] * 2, [64] * 2)
    answers.longest = 64
    with torch.no_grad(), HostReads():
        for _ in range(2):
            answers.step(slice(0, 6), answers.context)
    slots = Slots(on_meta(model), 4, 256, chat.stop_ids, Sampling(1.0, 32))
    slots.cache.fit([0] * 4, [192] * 4)
    with torch.no_grad(), HostReads():
        for _ in range(2):
            slots.step(slice(0, 3), 192)


def test_a_step_without_active_rows_changes_nothing(model, chat):
    """Like the warm-up steps before a graph is captured; running responses continue unchanged."""
    found = []
    for idle in (0, 2):
        slots = Slots(model, 3, 64, chat.stop_ids, Sampling(1.0, 8))
        slots.begin(range(3), [[7, 8], [9] * 5, [3, 4, 5]], [1, 2, 3])
        active_B = slots.active_B.clone()
        assert active_B.any()
        slots.active_B.zero_()
        for _ in range(idle):
            with torch.no_grad():
                slots.step(slice(0, 3), slots.context)
        slots.active_B.copy_(active_B)
        finished = []
        while slots.running:
            slots.tick()
            finished += slots.pop_finished()
        found.append([(row, response.ids, response.logprob) for row, response in sorted(finished)])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("packed, bonus", [(False, False), (True, False), (True, True)])
def test_forward_and_backward_of_an_update_have_no_host_sync(model, samples, with_varlen, packed, bonus):
    """From a microbatch's tensors to its gradients; metrics are read afterwards."""
    meta = on_meta(model)
    if packed:
        with_varlen(lambda query, key, value, *_: query + key.mean() + value.mean())
    given = batching.collate(samples, meta)
    assert isinstance(given.attention, attention.Packed if packed else attention.Masked)
    with HostReads():
        logprob_N, entropy_N = logprobs.token_logprobs(meta, given, 1.0, entropies=True, entropy_grad=bonus)
        loss_N, _ = clipped_surrogate((logprob_N - given.old_N).exp(), given.advantage_N, 0.2, 0.28, 0.0)
        (given.weight_N * (loss_N - entropy_N)).sum().backward()
    assert all(p.grad is not None for p in meta.parameters())
    assert logprob_N.dtype == entropy_N.dtype == torch.float32 and entropy_N.requires_grad == bonus


def test_host_reads_detects_a_host_sync_and_another_device():
    with HostReads(), pytest.raises(AssertionError, match="nonzero"):
        torch.ones(3, device="meta").nonzero()
    with HostReads(), pytest.raises(AssertionError, match="on {'cpu'}"):
        torch.tensor(1.0).neg()
    on_meta = torch.ones(3, device="meta")
    with HostReads(), pytest.raises(AssertionError, match="cpu"):
        on_meta + torch.tensor(1.0)
