"""Proves that the slot engine samples what a full forward per token gives, with the right frequencies.

    python -m pytest tests/lm/test_engine.py

The oracle is `slow_response`: a full forward per token, or per response, without a cache, and splitmix64 in
Python.
tests/core/test_rollout.py compares entire episodes with it.
"""

import itertools

import pytest
import torch
from conftest import tiny_model

from lm import engine
from lm import model as decoder
from lm.attention import Rectangle
from lm.engine import Sampling


@pytest.fixture
def model(model):
    """The tiny model in double precision, so that rounding does not change which token is drawn.

    In float32, two ways to compute a probability differ by up to 1.3e-6, and of thousands of random numbers
    some are closer than that to a cumulative probability.
    """
    return model.double()


@pytest.fixture(params=["qwen2", "qwen3"])
def either(request, tokenizer):
    """A tiny model of each family, in double precision."""
    return tiny_model(tokenizer, model_type=request.param, head_dim=12).double()


# The slow oracle

def splitmix64(state, n):
    """Output n of the splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014) seeded with `state`."""
    z = (state + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@torch.no_grad()
def slow_response(model, prompt, stream, stops, temperature, limit, given=()):
    """Token ids and logprobs of a response, by one uncached forward per token.

    given: ids of which a response is expected to consist; as long as it does, one forward of them all serves.
    """
    ids, logprobs, given_TV = [], [], model(torch.tensor([[*prompt, *given]]))[0]
    while len(ids) < limit and not (ids and ids[-1] in stops):
        expected = ids == [*given[:len(ids)]]
        logits_V = (given_TV[len(prompt) + len(ids) - 1] if expected else
                    model(torch.tensor([prompt + ids]))[0, -1]).float()
        logprob_V = (logits_V / (temperature or 1.0)).log_softmax(-1)
        cumulative = list(itertools.accumulate(logprob_V.exp().tolist()))
        u = ((splitmix64(stream, len(ids)) >> 12) + 0.5) / 2**52
        token = next(i for i, c in enumerate(cumulative) if c >= u * cumulative[-1])
        ids.append(token if temperature else int(logprob_V.argmax()))
        logprobs.append(logprob_V[ids[-1]].item())
    return ids, logprobs


# The engine against it

def test_prefill_runs_only_the_tokens_that_are_not_cached(model):
    slots = engine.Slots(model, 2, 32, (1,), Sampling())
    slots.cache.fit([0, 0], [48, 48])
    slots.cached = [[5, 6, 7, 8, 9], [5, 6]]
    run = []
    model.register_forward_pre_hook(lambda module, args: run.append(
        [args[0][0, args[1].row_N == row].tolist() for row in range(2)]))
    with torch.no_grad():
        slots.prefill([0, 1], [[5, 6, 1, 2], [5, 6]])
    assert run == [[[1, 2], [6]]]           # a fully cached prompt runs its last token, for the logits


def test_long_prefills_are_split_into_blocks_of_rows(model):
    prompts = [[i + 1] * (3 + i) for i in range(5)]
    logits, widths = [], []
    model.register_forward_pre_hook(lambda module, arguments: widths.append(arguments[0].shape))
    for max_tokens in (16384, 10):
        cache = Rectangle(model.config, 5, 32, torch.float64, "cpu")
        with torch.no_grad():
            logits.append(engine.run_chunks(model, cache, range(5), prompts, [0] * 5, max_tokens))
    torch.testing.assert_close(*logits, rtol=0, atol=1e-9)             # double precision
    assert widths == [(1, 25), (1, 7), (1, 5), (1, 6), (1, 7)]


@pytest.mark.slow
def test_of_first_prompts_the_last_are_kept_as_far_as_they_are_small(model):
    """An evaluation that plays each game several times has hundreds; one that is gone is run again."""
    slots = engine.Slots(model, 4, 64, (), Sampling(max_response_tokens=4))
    prompts, kept = [[i % 30 + 1] * (5 + i % 3) + [i // 30] for i in range(40)], []
    for i in [*range(0, 40, 4), 32, 0]:
        slots.cached = [[] for _ in range(4)]
        slots.begin(range(4), prompts[i:i + 4], [7] * 4, share=True)
        while slots.running:
            slots.tick()
            finished = slots.pop_finished()
        assert [response.ids for _, response in finished] == [
            slow_response(model, prompt, 7, (), 1.0, 4)[0] for prompt in prompts[i:i + 4]]
        kept.append(sum(map(len, slots.first_prompts)))
    assert 0 < max(kept) <= slots.cache.positions // engine.KEPT
    assert [*slots.first_prompts][-1] == tuple(prompts[3])
    assert all(logits_V.untyped_storage().nbytes() == logits_V.nbytes
               for _, logits_V in slots.first_prompts.values())


def test_a_row_may_need_all_of_its_room(model):
    """Row 0 ends, at its longest, while row 1, which began a tick later, goes on."""
    slots = engine.Slots(model, 2, 128, (), Sampling(max_response_tokens=24))
    slots.begin([0], [[7] * 30], [1])
    while not (ended := slots.pop_finished()):
        slots.tick()
    room = slots.cache.room
    prompt = [7] * 30 + ended[0][1].ids + [8] * (room - 54 - 24)
    slots.begin([0], [prompt], [2])
    slots.tick()
    slots.begin([1], [[9] * 5], [3])
    finished = {}
    while slots.running:
        slots.tick()
        finished |= slots.pop_finished()
    assert slots.cache.room == room == len(prompt) + 24
    for row, given, stream in ((0, prompt, 2), (1, [9] * 5, 3)):
        assert finished[row].ids == slow_response(model, given, stream, (), 1.0, 24, finished[row].ids)[0]


def contents(cache):
    """A copy of the keys and values of all layers, [L, 2, B, K, room, D]."""
    return torch.stack([kv[:, :-1] for kv in cache.kv])


@pytest.mark.parametrize("rows", [range(7), [0, 2, 3, 5, 6, 7, 9]])
def test_chunks_of_any_length_get_the_logits_of_full_forwards(model, rows):
    """Rows adjacent or not, chunks long and short; rows without a chunk keep their contents."""
    prefixes = [[i + 1] * (2 + i) for i in range(7)]
    chunks = [[20 + i] * n for i, n in enumerate((3, 64, 1, 4, 70, 2, 16))]
    cache, runs = Rectangle(model.config, 10, 96, torch.float64, "cpu"), []
    with torch.no_grad():
        engine.run_chunks(model, cache, rows, prefixes, [0] * 7)
        before = contents(cache)
        model.register_forward_pre_hook(lambda module, args: runs.extend(args[1:2]))
        logits = engine.run_chunks(model, cache, rows, chunks, [*map(len, prefixes)])
        assert len(runs) == 1
        groups = [(token_BT.shape, S) for _, token_BT, S, *_ in runs[0].groups]
        assert groups == [((7, 16), 32), ((2, 48), 80), ((1, 6), 80)]
        in_place = [isinstance(used, slice) for used, *_ in runs[0].groups]
        assert in_place == [rows == range(7), False, True]
        for row, prefix, chunk, logits_V in zip(rows, prefixes, chunks, logits):
            expected_V = model(torch.tensor([prefix + chunk]))[0, -1]
            torch.testing.assert_close(logits_V, expected_V, rtol=0, atol=1e-9)
            kept = slice(len(prefix))
            assert torch.equal(contents(cache)[:, :, row, :, kept], before[:, :, row, :, kept])
    for row in {*range(10)} - {*rows}:
        assert torch.equal(contents(cache)[:, :, row], before[:, :, row])


def test_greedy_answers_equal_transformers_generate(either, chat, tmp_path):
    from transformers import AutoModelForCausalLM
    with torch.no_grad():
        either.model.embed_tokens.weight[:, :2] = 0.0       # otherwise the biases choose every token
    decoder.save_pretrained(either, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = [chat.message(f"You are at {i}.", first=True) for i in range(6)]
    ours = engine.answer(either, prompts, [[0]] * 6, chat.stop_ids, Sampling(0.0, 24), 6)
    for prompt, (answer,) in zip(prompts, ours):
        theirs = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24,
                                    pad_token_id=0, eos_token_id=list(chat.stop_ids))
        assert answer.ids == theirs[0, len(prompt):].tolist()
    assert len({tuple(answer.ids) for answer, in ours}) > 1


def test_without_prompts_nothing_is_sampled_and_an_empty_prompt_is_refused(model):
    """It was answered from the logits of another row."""
    slots = engine.Slots(model, 2, 32, (1,), Sampling())
    assert engine.generate(slots, [], []) == []
    with pytest.raises(AssertionError, match="an empty prompt"):
        engine.generate(slots, [[], [3]], [1, 2])
    with pytest.raises(ValueError, match="^max_response_tokens=0: expected 1 or more$"):
        Sampling(max_response_tokens=0)


# Drawing one token

def test_uniform_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of seed 1234567
    assert [splitmix64(1234567, n) for n in range(3)] == published
    streams = [0, 1, 1234567, 2**62 + 12345, 2**63 - 1]
    for position in (0, 1, 2, 500):
        got = engine.uniform(torch.tensor(streams), torch.tensor(position)).tolist()
        assert got == [((splitmix64(s, position) >> 12) + 0.5) / 2**52 for s in streams]


def unmix(z):
    """The state whose first splitmix64 output is z, by inverting each step."""
    z = z ^ z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = z ^ z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    z = z ^ z >> 30 ^ z >> 60
    return (z - 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("output", [0, 2**64 - 1])
def test_uniform_never_reaches_0_or_1(output):
    """With 53 bits, the largest number would round up to exactly 1."""
    state = unmix(output)
    assert splitmix64(state, 0) == output
    u = engine.uniform(torch.tensor([state - 2**64 if state >= 2**63 else state]), torch.tensor(0)).item()
    assert 0 < u < 1


def draws(logits_V, n=200_000, **options):
    """Frequencies of n draws from the logits; the tokens drawn, and their logprobs."""
    uniform = engine.uniform(torch.arange(n), torch.tensor(0))
    token, logprob = engine.sample_tokens(logits_V.expand(n, -1), uniform, **options)
    return torch.bincount(token, minlength=len(logits_V)).double() / n, token, logprob


def assert_frequencies(got, want, n=200_000):
    """Assert that every frequency is within 4.5 standard errors of its probability."""
    assert ((got - want).abs() <= 4.5 * (want * (1 - want) / n).sqrt()).all(), (got, want)


LOGITS = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 1.0, 0.0, -3.0, 0.9])


@pytest.mark.parametrize(("temperature", "block"), [(1.0, 8), (1.0, 3), (0.5, 2), (2.0, 8)])
def test_frequencies_over_200000_draws_are_the_softmax(monkeypatch, temperature, block):
    monkeypatch.setattr(engine, "BLOCK", block)
    frequency, token, logprob = draws(LOGITS, temperature=temperature)
    assert_frequencies(frequency, (LOGITS.double() / temperature).softmax(0))
    assert torch.allclose(logprob, (LOGITS / temperature).log_softmax(0)[token], atol=1e-6)


@pytest.mark.parametrize("block", [1, 2, 3, 9])
@pytest.mark.parametrize("u", [1e-300, 2**-54, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(monkeypatch, u, block):
    monkeypatch.setattr(engine, "BLOCK", block)
    logits = torch.full((1, 9), -torch.inf)
    logits[0, [2, 5]] = 0.0
    token, _ = engine.sample_tokens(logits, torch.tensor([u], dtype=torch.double))
    assert token.item() == (2 if u <= 0.5 else 5)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [engine.BLOCK + 1, 4 * engine.BLOCK, 50_000])
def test_a_search_by_blocks_finds_the_token_that_a_share_lies_in(vocabulary):
    """Of 200 tokens each, of weights that lie nine powers of ten apart, by the middle of its share."""
    torch.manual_seed(vocabulary)
    weight_BV, token_B = torch.randn(200, vocabulary).mul(3).softmax(-1), torch.randint(vocabulary, (200,))
    upto_B, own_B = (x.double().gather(1, token_B[:, None])[:, 0] for x in (
        weight_BV.double().cumsum(-1), weight_BV))
    share_B = (upto_B - own_B / 2) / weight_BV.double().sum(-1)
    assert engine.first_reaching(weight_BV, share_B).tolist() == token_B.tolist()
    ends_B = torch.tensor([1e-300, 1.0], dtype=torch.double)
    assert engine.first_reaching(weight_BV[:2], ends_B).tolist() == [0, vocabulary - 1]


def test_temperature_zero_is_argmax_and_reports_the_logprob_at_one():
    _, token, logprob = draws(LOGITS, n=50, temperature=0.0)
    assert set(token.tolist()) == {2}
    assert logprob[0] == pytest.approx(LOGITS.log_softmax(0)[2].item(), rel=1e-5)


def test_a_longer_limit_holds_from_the_next_rollout_on(model):
    """Two rows that begin one after the other, so that one goes on when the other is finished."""
    slots = engine.Slots(model, 2, 64, (), Sampling(max_response_tokens=19))
    slots.restart(64, Sampling(max_response_tokens=20))
    slots.begin([0], [[1, 2, 3]], [5])
    slots.tick()
    slots.begin([1], [[1, 2, 4]], [6])
    found = {}
    while slots.running:
        slots.tick()
        found |= slots.pop_finished()
    fresh = engine.Slots(model, 1, 64, (), Sampling(max_response_tokens=20))
    (expected,) = engine.generate(fresh, [[1, 2, 3]], [5])
    assert found[0].ids == expected.ids and found[0].logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_a_restart_forgets_the_cached_tokens(model):
    slots = engine.Slots(model, 1, 64, (), Sampling(max_response_tokens=4))
    engine.generate(slots, [[1, 2, 3]], [5])
    slots.restart(64, Sampling(max_response_tokens=4))
    assert slots.cached == [[]]
