"""Proves that the slot engine samples what a full forward per token would, and that `play` records what happened.

    python -m pytest tests/test_rollout.py

The oracle is `slow_play`: one episode at a time, no cache, a whole forward for every token, a splitmix64 in Python.
"""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import Corridor, make_seats

import model as qwen
import parallel
import rollout
from envs import EpisodeLost, Reply, Task
from rollout import NOTHING, Episode, Response, Sampling, Turn

pytestmark = pytest.mark.fast
QWEN_TOKENIZER = Path("../shared/data/qwen2.5-tokenizer")
LIMIT = 3                                        # max_response_tokens: short enough to cut some responses


# The slow oracle

def splitmix64(state, n):
    """The n-th output of Steele, Lea and Flood's generator started at `state` (OOPSLA 2014)."""
    z = (state + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def slow_response(model, prompt, stream, stops, temperature, limit):
    """Token ids and logprobs, one uncached forward per token."""
    ids, logprobs = [], []
    while len(ids) < limit and not (ids and ids[-1] in stops):
        with torch.no_grad():
            logprob_V = (model(torch.tensor([prompt + ids]))[0, -1] / (temperature or 1.0)).log_softmax(-1)
        cumulative = list(itertools.accumulate(logprob_V.exp().tolist()))
        u = ((splitmix64(stream, len(ids)) >> 12) + 0.5) / 2**52
        token = next(i for i, c in enumerate(cumulative) if c >= u * cumulative[-1])
        ids.append(token if temperature else int(logprob_V.argmax()))
        logprobs.append(logprob_V[ids[-1]].item())
    return ids, logprobs


def slow_play(model, tokenizer, seat, sampling, max_turns, history=0, on_truncation="fail"):
    """(prompt ids, response ids, logprobs) of each turn of an episode; the prompt is put together from scratch."""
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    stops = encode("<|im_end|><|endoftext|>")
    env, turns, exchanges = Corridor(), [], []
    reply = env.reset(seat.task)
    head = encode(f"<|user|>{reply.observation}<|assistant|>")
    while len(turns) < max_turns and not reply.done:
        prompt = head + [i for exchange in exchanges[-history:] for i in exchange]        # -0 is 0: all of them
        ids, logprobs = slow_response(model, prompt, parallel.stream(seat.stream, len(turns)), stops,
                                      sampling.temperature, sampling.max_response_tokens)
        turns.append((prompt, ids, logprobs))
        cut = ids[-1] not in stops
        if cut and on_truncation == "fail":
            break
        action = "" if cut else tokenizer.decode(ids[:-1]).strip()
        reply = env.step(action) if action else Reply(NOTHING, env.admissible(), False, False)
        exchanges.append(ids + encode(f"<|user|>{reply.observation}<|assistant|>"))
    return turns


def fast_play(model, chat, seats, sampling=None, slots=4, max_turns=6, **options):
    sampling = sampling or Sampling(max_response_tokens=LIMIT)
    return rollout.play(model, chat, [Corridor() for _ in range(slots)], seats, sampling, max_turns, 400, **options)


def tokens_of(episodes):
    return [[(turn.prompt_ids, turn.response_ids) for turn in episode.turns] for episode in episodes]


# The engine against it

@pytest.mark.parametrize("temperature, history, on_truncation", [
    (1.0, 0, "fail"), (1.0, 0, "invalid"), (1.0, 2, "invalid"), (0.6, 0, "invalid"), (1.7, 1, "invalid"), (0.0, 0, "fail")])
def test_played_tokens_and_logprobs_are_the_slow_ones(model, chat, tokenizer, temperature, history, on_truncation):
    seats, sampling = make_seats(3, 3), Sampling(temperature, LIMIT)
    options = {"history": history, "on_truncation": on_truncation}
    episodes = fast_play(model, chat, seats, sampling, **options)
    for seat, episode in zip(seats, episodes):
        slow = slow_play(model, tokenizer, seat, sampling, 6, **options)
        assert [(turn.prompt_ids, turn.response_ids) for turn in episode.turns] == [(p, ids) for p, ids, _ in slow]
        for turn, (_, _, logprobs) in zip(episode.turns, slow):
            assert turn.logprob_old == pytest.approx(logprobs, abs=1e-5)


def test_the_fixture_meets_every_case(model, chat):
    """Else the tests above prove less than they say."""
    episodes = fast_play(model, chat, make_seats(6, 4), on_truncation="invalid")
    turns = [turn for episode in episodes for turn in episode.turns]
    assert any(episode.won for episode in episodes) and not all(episode.won for episode in episodes)
    assert any(turn.valid for turn in turns) and any(turn.action and not turn.valid for turn in turns)
    assert any(turn.action is None for turn in turns)
    assert {turn.response_ids[-1] for turn in turns} > set(chat.stop_ids)        # both stops, and cut responses


@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("slots", [2, 5, 12, 40])
def test_any_number_of_slots_plays_the_same_episodes(model, chat, slots, history):
    """One at a time, refilled slots, holes filled from the back: nothing but the time changes."""
    seats = make_seats(4, 3)
    options = {"history": history, "on_truncation": "invalid"}
    alone = [fast_play(model, chat, [seat], slots=1, **options)[0] for seat in seats]
    together = fast_play(model, chat, seats, slots=slots, **options)
    assert tokens_of(together) == tokens_of(alone)
    assert [e.won for e in together] == [e.won for e in alone]
    assert [(e.task, e.group) for e in together] == [(seat.task, seat.group) for seat in seats]


def test_same_streams_same_episodes_and_other_streams_others(model, chat):
    one, same = (tokens_of(fast_play(model, chat, make_seats(2, 4))) for _ in range(2))
    other = tokens_of(fast_play(model, chat, make_seats(2, 4, first_stream=5)))
    assert one == same != other
    assert len({json.dumps(episode) for episode in one}) > 4                     # members of a group differ


@pytest.mark.parametrize("slots, groups, size", [(2, 1, 4), (3, 2, 3), (8, 2, 4)])
def test_every_token_is_computed_once_and_a_groups_first_prompt_once(model, chat, slots, groups, size):
    computed = []

    def count(module, args, kwargs):
        computed.append(int(kwargs["n_valid_B"].sum()))
    model.register_forward_pre_hook(count, with_kwargs=True)
    episodes = fast_play(model, chat, make_seats(groups, size), slots=slots, on_truncation="invalid")
    first = {e.group: len(e.turns[0].prompt_ids) for e in episodes}
    last = [len(e.turns[-1].prompt_ids) + len(e.turns[-1].response_ids) - 1 for e in episodes]   # the last is not run
    assert sum(computed) == sum(first.values()) + sum(n - first[e.group] for e, n in zip(episodes, last))


def test_a_re_rendered_prompt_runs_only_what_the_slot_does_not_hold(model):
    cache = rollout.Slots(model, 2, 32)
    cache.held = [[5, 6, 7, 8, 9], [5, 6]]
    chunks = []
    model.register_forward_pre_hook(lambda module, args, kwargs: chunks.append(
        (kwargs["start_B"].tolist(), kwargs["n_valid_B"].tolist())), with_kwargs=True)
    with torch.no_grad():
        rollout.prefill(model, cache, [[5, 6, 1, 2], [5, 6]], share=False)
    assert chunks == [([2, 1], [2, 1])]          # a prompt that is held whole runs its last token, for the logits


def test_long_prefills_are_cut_into_blocks_of_rows(model):
    prompts = [[i + 1] * (3 + i) for i in range(5)]
    logits, widths = [], []
    model.register_forward_pre_hook(lambda module, args, kwargs: widths.append(args[0].shape), with_kwargs=True)
    for max_tokens in (16384, 40):
        cache = qwen.KVCache(model.config, 5, 32, torch.float32, "cpu")
        with torch.no_grad():
            logits.append(rollout.run_chunks(model, cache, prompts, [0] * 5, 32, max_tokens))
    assert torch.allclose(*logits, atol=1e-5)
    assert widths == [(5, 16), (2, 16), (2, 16), (1, 16)]


def test_answers_to_several_prompts_are_the_slow_ones(model, chat):
    prompts = [[7, 8, 9], [10] * 20, [3, 4]]
    streams = [[17 * p + i for i in range(3)] for p in range(3)]
    for n_slots in (1, 3, 7, 64):
        answers = rollout.answer(model, chat, prompts, streams, Sampling(1.0, 4), n_slots)
        for prompt, own, row in zip(prompts, answers, streams, strict=True):
            for answer, stream in zip(own, row, strict=True):
                ids, logprobs = slow_response(model, prompt, stream, chat.stop_ids, 1.0, 4)
                assert answer.ids == ids and answer.logprob == pytest.approx(logprobs, abs=1e-5)
                assert answer.truncated == (ids[-1] not in chat.stop_ids)


def test_greedy_answers_are_transformers_generate(model, chat, tokenizer_folder, tmp_path):
    from transformers import AutoModelForCausalLM
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :2] = 0.0        # else the biases choose every token
    qwen.save_pretrained(model, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompts = [chat.message(f"You are at {i}.", first=True) for i in range(6)]
    ours = rollout.answer(model, chat, prompts, [[0]] * 6, Sampling(0.0, 24), 6)
    for prompt, (answer,) in zip(prompts, ours):
        theirs = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24, pad_token_id=0,
                                    eos_token_id=list(chat.stop_ids))
        assert answer.ids == theirs[0, len(prompt):].tolist()
    assert len({tuple(answer.ids) for answer, in ours}) > 1


def test_a_response_ends_with_its_first_stop_token_and_both_stop():
    assert rollout.cut([5, 9, 8, 9], [-1.0, -2.0, -3.0, -4.0], (8, 9)) == Response([5, 9], [-1.0, -2.0], False)
    assert rollout.cut([8, 5], [-1.0, -2.0], (8, 9)) == Response([8], [-1.0], False)
    assert rollout.cut([5, 6], [-1.0, -2.0], (8, 9)) == Response([5, 6], [-1.0, -2.0], True)


# Drawing one token

def test_uniform_is_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of seed 1234567
    assert [splitmix64(1234567, n) for n in range(3)] == published
    streams = [0, 1, 1234567, 2**62 + 12345, 2**63 - 1]
    for position in (0, 1, 2, 500):
        got = rollout.uniform(torch.tensor(streams), position).tolist()
        assert got == [((splitmix64(s, position) >> 12) + 0.5) / 2**52 for s in streams]


def unmix(z):
    """The state whose first splitmix64 output is z: each step undone."""
    z = z ^ z >> 31 ^ z >> 62
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = z ^ z >> 27 ^ z >> 54
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    z = z ^ z >> 30 ^ z >> 60
    return (z - 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("output", [0, 2**64 - 1])
def test_uniform_never_reaches_0_or_1(output):
    """With 53 bits, the largest and its half rounded up to exactly 1."""
    state = unmix(output)
    assert splitmix64(state, 0) == output
    u = rollout.uniform(torch.tensor([state - 2**64 if state >= 2**63 else state]), 0).item()
    assert 0 < u < 1


def draws(logits_V, n=200_000, **options):
    uniform = rollout.uniform(torch.arange(n), 0)
    token, logprob = rollout.sample_tokens(logits_V.expand(n, -1), uniform, **options)
    return torch.bincount(token, minlength=len(logits_V)).double() / n, token, logprob


def assert_frequencies(got, want, n=200_000):
    """Every frequency within 4.5 standard errors of its probability."""
    assert ((got - want).abs() <= 4.5 * (want * (1 - want) / n).sqrt()).all(), (got, want)


LOGITS = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 1.0, 0.0, -3.0, 0.9])


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_over_200000_draws_are_the_softmax(temperature):
    frequency, token, logprob = draws(LOGITS, temperature=temperature)
    assert_frequencies(frequency, (LOGITS.double() / temperature).softmax(0))
    assert torch.allclose(logprob, (LOGITS / temperature).log_softmax(0)[token], atol=1e-6)


@pytest.mark.parametrize("top_p, top_k", [(0.5, 0), (0.8, 0), (0.999, 0), (1.0, 1), (1.0, 3), (0.8, 2), (0.6, 5)])
def test_top_p_and_top_k_draw_from_their_set_only(top_p, top_k):
    p = LOGITS.double().softmax(0)
    kept, mass = [], 0.0
    for i in p.argsort(descending=True).tolist():
        if mass >= top_p or (top_k and len(kept) == top_k):
            break
        kept.append(i)
        mass += p[i].item()
    want = torch.zeros_like(p)
    want[kept] = p[kept] / mass
    frequency, token, logprob = draws(LOGITS, top_p=top_p, top_k=top_k)
    assert set(token.tolist()) <= set(kept)
    assert_frequencies(frequency, want)
    assert torch.allclose(logprob, LOGITS.log_softmax(0)[token], atol=1e-6)      # of the full distribution


@pytest.mark.parametrize("u", [1e-300, 2**-54, 0.5, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(u):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, [2, 5]] = 0.0
    token, _ = rollout.sample_tokens(logits, torch.tensor([u], dtype=torch.double))
    assert token.item() == (2 if u <= 0.5 else 5)


def test_temperature_zero_is_argmax_and_reports_the_logprob_at_one():
    _, token, logprob = draws(LOGITS, n=50, temperature=0.0)
    assert set(token.tolist()) == {2}
    assert logprob[0] == pytest.approx(LOGITS.log_softmax(0)[2].item())


# The chat

def test_each_prompt_extends_the_last_prompt_and_response(model, chat):
    episodes = fast_play(model, chat, make_seats(3, 2), on_truncation="invalid")
    pairs = [(a, b) for episode in episodes for a, b in itertools.pairwise(episode.turns)]
    assert len(pairs) > 10
    for a, b in pairs:
        assert b.prompt_ids[:len(a.prompt_ids + a.response_ids)] == a.prompt_ids + a.response_ids


def test_a_history_window_keeps_the_first_message_and_the_last_exchanges(model, chat):
    episode = max(fast_play(model, chat, make_seats(3, 2), history=2, on_truncation="invalid"), key=lambda e: len(e.turns))
    assert len(episode.turns) >= 4
    for t, turn in enumerate(episode.turns):
        text = f"<|user|>{episode.turns[0].observation}<|assistant|>"
        for u in range(max(0, t - 2), t):
            text += chat.tokenizer.decode(episode.turns[u].response_ids)
            text += f"<|user|>{episode.turns[u + 1].observation}<|assistant|>"
        assert chat.tokenizer.decode(turn.prompt_ids) == text


def assert_template(tokenizer, style):
    """The hand-rendered ids are apply_chat_template's, after every turn."""
    chat = rollout.Chat(tokenizer, style)
    texts = ["You are in a room.\n\nYour task is to: put a mug in drawer.", "go to drawer 1", "You arrive at drawer 1.",
             "open drawer 1", "The drawer 1 is open. In it, you see nothing."]
    ids, messages = [], []
    for i, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        ids += chat.encode(text) + chat.encode("<|im_end|>") if i % 2 else chat.message(text, first=i == 0)
        if i % 2 == 0:
            assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_the_rendered_chat_is_apply_chat_template(tokenizer):
    assert_template(tokenizer, "plain")


@pytest.mark.skipif(not QWEN_TOKENIZER.is_dir(), reason=f"{QWEN_TOKENIZER} is not here")
def test_the_rendered_chat_is_qwens_template_with_its_default_system_message():
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(QWEN_TOKENIZER, local_files_only=True)
    assert_template(tokenizer, "think")
    chat = rollout.Chat(tokenizer, "think")
    assert chat.stop_ids == (151643, 151645)
    assert tokenizer.decode(chat.message("Hello", first=True)).startswith(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n")


def test_the_think_style_shows_rules_once_and_the_admissible_commands_always(tokenizer):
    chat = rollout.Chat(tokenizer, "think")
    reply = Reply("A room.", ["go left", "help", "look"], False, False)
    first, later = (tokenizer.decode(chat.observe(reply, first)) for first in (True, False))
    assert "text game" in first and "text game" not in later
    for text in (first, later):
        assert text.count("A room.") == 1 and "\ngo left\nlook\n" in text and "\nhelp" not in text
    assert tokenizer.decode(rollout.Chat(tokenizer, "plain").observe(reply)) == "<|user|>A room.<|assistant|>"


@pytest.mark.parametrize("style, text, action", [
    ("plain", "go to drawer 1", "go to drawer 1"), ("plain", " look \n", "look"), ("plain", "", None), ("plain", " ", None),
    ("plain", "<|user|>", "<|user|>"),
    ("think", "<think>It is there.</think><action>look</action>", "look"),
    ("think", " <think>a\nb</think>\n\n<action> go to drawer 1\n</action> ", "go to drawer 1"),
    ("think", "<think></think><action>look</action>", "look"),
    ("think", "<action>look</action>", None), ("think", "look", None), ("think", "<think>a</think>look", None),
    ("think", "<think>a</think><action></action>", None), ("think", "<think>a</think><action> </action>", None),
    ("think", "<think>a</think><action>look", None), ("think", "<think>a<action>look</action>", None),
    ("think", "<think>a</think><action>look</action> and more", None),
    ("think", "<think>a</think><action>look</action><action>left</action>", None)])
def test_parse(tokenizer, style, text, action):
    assert rollout.Chat(tokenizer, style).parse(text) == (action, None)


@pytest.mark.parametrize("style", ["plain", "think"])
def test_a_demonstrated_response_parses_to_its_command(tokenizer, style):
    chat = rollout.Chat(tokenizer, style)
    ids = chat.respond("go to drawer 1")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.parse(chat.decode(ids)) == ("go to drawer 1", None)


TAG_CASES = [
    ("<explore>look", "look", "explore"), ("<monitor> go left", "go left", "monitor"), ("look", None, None),
    ("<explore>", None, None), ("<explore><monitor>look", None, None), ("<think>look", None, None)]
LONG_TAG_CASES = [
    ("<planning>First A.</planning><action>look</action>", "look", "planning"),
    (" <reflection>\nB failed.\n</reflection>\n<action> go left </action> ", "go left", "reflection"),
    ("<planning> </planning><action>look</action>", None, None), ("<planning>a</planning>look", None, None),
    ("<planning>a</explore><action>look</action>", None, None), ("<action>look</action>", None, None),
    ("<planning>a</planning><explore>b</explore><action>look</action>", None, None),
    ("<planning>a</planning><action>look</action><action>left</action>", None, None)]


@pytest.mark.parametrize("text, command, tag", TAG_CASES)
def test_the_small_models_tag_comes_before_its_command(tokenizer, text, command, tag):
    assert rollout.Chat(tokenizer, "tags").parse(text) == (command, tag)


@pytest.mark.parametrize("text, command, tag", LONG_TAG_CASES)
def test_exactly_one_filled_tag_comes_before_exactly_one_action(tokenizer, text, command, tag):
    chat = rollout.Chat(tokenizer, "tags")
    chat.small = False                           # the form that Hugging Face models are asked for
    assert chat.parse(text) == (command, tag)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("tag", rollout.TAGS)
def test_a_demonstrated_tag_parses_to_itself(tokenizer, small, tag):
    chat = rollout.Chat(tokenizer, "tags")
    chat.small = small
    assert chat.parse(chat.decode(chat.respond("go to drawer 1", tag))) == ("go to drawer 1", tag)


def test_what_is_possible_is_shown_with_its_objects_or_hidden(tokenizer):
    reply = Reply("A room.", ["look", "open OBJ"], False, False, ("door", "jar"))
    chats = [rollout.Chat(tokenizer, "think", admissible) for admissible in (True, False)]
    shown, hidden = (tokenizer.decode(chat.observe(reply)) for chat in chats)
    assert "look\nopen OBJ" in shown and "OBJ stands for one of: door, jar" in shown
    assert "OBJ" not in hidden and "from the list" not in hidden and "<action>" in hidden


def test_an_instruction_stands_before_the_first_observation(tokenizer, chat):
    reply = Reply("A room.", [], False, False)
    assert tokenizer.decode(chat.observe(reply, True, "Look around.")) == "<|user|>Look around.\n\nA room.<|assistant|>"


def test_decode_drops_the_stop_token_only(tokenizer, chat):
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    word = chat.encode("look")
    assert chat.decode(word + [end]) == chat.decode(word) == "look"
    assert chat.decode(word + [start, end]) == "look<|user|>" and chat.decode([end]) == chat.decode([]) == ""


# What a turn records

def talk_to_corridor(chat, problem=(2, 4)):
    return rollout.Conversation(rollout.Seat(Task("c", "train", "walk", problem), 0, 1), Corridor(), chat, 0).begin()


def say(chat, text, stop="<|im_end|>"):
    ids = chat.encode(text) + chat.encode(stop) if stop else chat.encode(text)
    return Response(ids, [-0.5] * len(ids), truncated=not stop)


def test_turns_record_what_was_seen_said_and_done(chat):
    talk = talk_to_corridor(chat)
    texts = ["right", "jump", "", "right"]
    ended = [talk.act(say(chat, text), max_turns=9, room=400) for text in texts]
    assert ended == [False, False, False, True]
    episode = talk.episode
    assert (episode.won, episode.truncated, episode.overflowed, episode.final_observation) == (
        True, False, False, "You are at 4.")
    start = "Walk to 4. You are at 2."
    assert [t.observation for t in episode.turns] == [start, "You are at 3.", NOTHING, NOTHING]
    assert [t.anchor for t in episode.turns] == [start] + ["You are at 3."] * 3
    assert [t.action for t in episode.turns] == ["right", "jump", None, "right"]
    assert [t.valid for t in episode.turns] == [True, False, False, True]
    assert [t.response for t in episode.turns] == texts
    assert all(len(t.logprob_old) == len(t.response_ids) for t in episode.turns)


def test_a_cut_response_ends_the_episode_as_failed(chat):
    talk = talk_to_corridor(chat, (3, 4))
    assert talk.act(say(chat, "right", stop=""), 9, 400, "fail")
    episode = talk.episode
    assert episode.truncated and not episode.won and episode.turns[0].action is None
    assert talk.env.env.place == 3                   # though its text was the winning command
    assert episode.final_observation == episode.turns[0].observation


def test_a_cut_response_may_be_an_invalid_turn_instead(chat):
    talk = talk_to_corridor(chat, (3, 4))
    assert not talk.act(say(chat, "right", stop=""), 9, 400, "invalid")
    assert talk.env.env.place == 3 and talk.reply.observation == NOTHING and not talk.episode.truncated
    assert talk.act(say(chat, "right"), 9, 400, "invalid") and talk.episode.won


def test_the_turn_limit_ends_an_episode(chat):
    talk = talk_to_corridor(chat)
    assert [talk.act(say(chat, "look"), 3, 400) for _ in range(3)] == [False, False, True]
    assert not talk.episode.won and not talk.episode.overflowed


class Fragile(Corridor):
    """Its engine dies at the calls whose numbers are in `deaths`; `calls` counts over all of them."""

    calls, deaths = 0, ()

    def reset(self, task, seed=0):
        self.live()
        return super().reset(task, seed)

    def step(self, command):
        self.live()
        return super().step(command)

    def live(self):
        Fragile.calls += 1
        if Fragile.calls in Fragile.deaths:
            raise EpisodeLost("the engine died")


class Elsewhere(Fragile):
    """The same in another process, as it were."""

    def send(self, verb, *arguments):
        self.asked = verb, arguments

    def receive(self):
        verb, arguments = self.asked
        return getattr(self, verb)(*arguments)


@pytest.mark.parametrize("kind", [Fragile, Elsewhere])
@pytest.mark.parametrize("deaths", [(1,), (5,), (7, 8, 9), (12,)])
def test_a_lost_episode_begins_again(model, chat, deaths, kind):
    """Resets and turns are lost alike. A restarted one plays other draws, the same in every run; its neighbours do not
    notice, and an episode that was not restarted is as it would have been."""
    def played(envs):
        return rollout.play(model, chat, envs, make_seats(2, 2), Sampling(max_response_tokens=4), 6, 400)
    Fragile.calls, Fragile.deaths = 0, deaths
    lost, whole = played([kind() for _ in range(2)]), played([Corridor() for _ in range(2)])
    Fragile.calls = 0
    again = played([kind() for _ in range(2)])
    assert sum(e.restarts for e in lost) == len(deaths) == rollout.summary(lost)["restarts"]
    for a, b, c in zip(lost, whole, again):
        said = [[t.response_ids for t in episode.turns] for episode in (a, b, c)]
        assert a.turns and said[0] == said[2] and (said[0] == said[1] or a.restarts)


def test_an_engine_that_keeps_dying_is_an_error(model, chat):
    Fragile.calls, Fragile.deaths = 0, range(3, 99)
    with pytest.raises(EpisodeLost, match="corridor/0: lost 6 times"):
        rollout.play(model, chat, [Fragile()], make_seats(1, 1), Sampling(max_response_tokens=4), 6, 400)


@pytest.mark.parametrize("spare", [0, -1, 7])
def test_a_prompt_that_outgrows_the_context_ends_its_episode_only(model, chat, spare):
    """At spare 0 the middle episode's last prompt fits to the last token; at -1 it does not."""
    seats = make_seats(3, 3)
    whole = fast_play(model, chat, seats, max_turns=8, on_truncation="invalid")
    context = sorted(len(episode.turns[-1].prompt_ids) for episode in whole)[4] + LIMIT + spare
    tight = rollout.play(model, chat, [Corridor() for _ in range(4)], seats, Sampling(max_response_tokens=LIMIT), 8, context,
                         on_truncation="invalid")
    assert any(e.overflowed for e in tight) and not all(e.overflowed for e in tight)
    for a, b in zip(whole, tight):
        fitting = [t for t in a.turns if len(t.prompt_ids) + LIMIT <= context]
        assert tokens_of([b])[0] == [(t.prompt_ids, t.response_ids) for t in fitting]
        assert b.overflowed == (len(fitting) < len(a.turns)) and b.won == (a.won and not b.overflowed)


def test_too_long_a_first_prompt_names_the_flag(model, chat):
    with pytest.raises(ValueError, match=r"--context=8: the first prompt of task corridor/0 has \d+ tokens"):
        rollout.play(model, chat, [Corridor()], make_seats(1, 1), Sampling(max_response_tokens=2), 3, 8)


@pytest.mark.parametrize("slots", [1, 2])
def test_group_members_that_start_differently_are_refused(model, chat, slots):
    class Moody(Corridor):
        starts = itertools.count()

        def reset(self, task, seed=0):
            return super().reset(task)._replace(observation=f"Start {next(self.starts)}.")

    with pytest.raises(AssertionError, match="group 0 does not start alike"):
        rollout.play(model, chat, [Moody() for _ in range(slots)], make_seats(1, 2), Sampling(), 2, 400)


def test_every_ended_episode_is_reported_once_and_nothing_is_played_for_no_seats(model, chat):
    told = []
    episodes = fast_play(model, chat, make_seats(2, 3), slots=2, on_end=told.append)
    assert Counter(map(id, told)) == Counter(map(id, episodes))
    assert fast_play(model, chat, []) == []


# What episodes add up to

def turn(anchor, action, valid=True, tokens=2):
    return Turn(anchor, [1], [2] * tokens, [0.0] * tokens, action or "", action, valid, anchor)


def test_summary_and_success_rate_by_hand():
    task = Task("a", "train", "walk", None)
    turns = [turn("x", "look"), turn("x", "look"), turn("y", "look"), turn("x", "look"), turn("x", None, valid=False),
             turn("x", None, valid=False, tokens=5)]
    assert rollout.repeated_turns(Episode(task, 0, turns)) == 3
    episodes = [Episode(task, 0, turns, won=True), Episode(task, 0, [turn("x", "left", tokens=1)], truncated=True),
                Episode(task, 1, [turn("x", "left")], overflowed=True), Episode(task, 1, [turn("x", "left")])]
    counts = rollout.summary(episodes)
    assert counts == {"episodes": 4, "won": 1, "truncated": 2, "turns": 9, "invalid": 2, "repeated": 3,
                      "response_tokens": 5 * 2 + 5 + 1 + 2 * 2, "restarts": 0, "scored": 0, "score_100": 0.0}
    shares = rollout.success_rate(counts)
    assert (shares["success"], shares["n"], shares["turns"], shares["truncated_frac"]) == (0.25, 4, 2.25, 0.5)
    assert (shares["invalid_frac"], shares["repeated_frac"]) == (2 / 9, 3 / 9)
    assert (shares["low"], shares["high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)      # Wilson 95 % of 1 in 4


def test_no_episodes_have_no_success_and_divide_nothing():
    shares = rollout.success_rate(rollout.summary([]))
    assert shares["success"] == 0 and (shares["low"], shares["high"]) == (0.0, 1.0)
