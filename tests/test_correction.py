"""Proves what instructions are made of mistakes, their control, and a cold start with them, by scripts.

    python -m pytest tests/test_correction.py
"""

import itertools
import math
import random
import re
from collections import Counter
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from conftest import QWEN_TOKENIZER, needs_qwen
from test_judge import Large, answered, scripted

import correction
import judge
from envs.alfred import rooms
from envs.alfred.problem import NOTHING
from judge import Judged
from lm import model as qwen
from lm.chat import Chat
from lm.engine import Response, Sampling
from run import parallel

TABLE = "You arrive at table 1. On the table 1, you see nothing."
# command, the answer to it, the kind of mistake
MISTAKES = [
    ("look", "You are in the middle of a room.", "other"),
    ("go to table 1", TABLE, "undone"),                      # this view of the room comes back at turn 3
    ("dance", NOTHING, "refused"),
    ("look", "You are in the middle of a room.", "revisited"),
    ("dance", NOTHING, "refused"),                           # refused comes first, repeated or not
    ("go to table 1", TABLE, "repeated"),                    # and repeated before revisited
    (None, NOTHING, "refused"),
    ("open box 1", "You open the box 1.", "other"),
]


class Writer(Chat):
    """A chat with a model that can write."""

    writes = True


@pytest.mark.fast
def test_kinds_of_mistakes_on_a_script(chat):
    episode = scripted(chat, MISTAKES, won=False)
    assert [correction.kind_of(episode, t) for t in range(len(MISTAKES))] == [line[2] for line in MISTAKES]


@pytest.mark.fast
def test_the_first_refusal_is_no_return_to_the_same_state(chat):
    """A command that the game lists, and answers with nothing: seen before."""
    episode = scripted(chat, [("look", NOTHING), ("look", NOTHING)], won=False)
    for turn in episode.turns:
        turn.valid = True
    assert [correction.kind_of(episode, t) for t in (0, 1)] == ["revisited", "repeated"]


@pytest.mark.fast
def test_turns_that_most_answers_call_bad_are_found(chat):
    judged = [answered(chat, texts, index, label) for index, (texts, label) in enumerate([
        (["bad", "bad", "good"], "good"), (["bad", "good"], "bad"), (["bad", "jump", "jump"], "bad"),
        (["good"], "bad"), (["bad"], "bad")])]
    found = correction.found_bad(judged)
    assert found == [judged[0], judged[4]]


@pytest.mark.fast
@pytest.mark.parametrize("counts, kinds", [
    ({"other": 9, "undone": 3, "refused": 5, "repeated": 4}, ["refused", "repeated"]),
    ({"undone": 1}, ["undone"]),
    ({"revisited": 2, "repeated": 2, "undone": 2}, ["repeated", "revisited"]),
    ({"other": 9}, []), ({}, [])])
def test_the_most_frequent_kinds_are_named(counts, kinds):
    assert correction.counted_instruction(counts) == " ".join(correction.KINDS[kind] for kind in kinds)


def small_chat(folder):
    vocabulary = len(qwen.save_small_tokenizer([*rooms.phrases(), *correction.instruction_phrases()], folder))
    qwen.ModelConfig(vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                     max_position_embeddings=64).save(folder)
    return Chat(qwen.load_tokenizer(folder), "plain")


@pytest.mark.fast
def test_sentences_are_single_tokens_of_the_small_model_and_so_is_their_control(tmp_path):
    chat = small_chat(tmp_path)
    for first, second in itertools.permutations(correction.KINDS, 2):
        counted = correction.counted_instruction({first: 2, second: 2})
        control = correction.irrelevant(counted, chat)
        assert len(chat.encode(counted)) == len(chat.encode(control)) == 3      # two and the space between
    assert correction.irrelevant(correction.counted_instruction({"undone": 1, "refused": 2}), chat) == (
        "Sing only songs that are popular there. Do not say what you will have to sing.")
    assert correction.KINDS.keys() == correction.IRRELEVANT.keys()
    assert len(set(correction.instruction_phrases())) == 2 * len(correction.KINDS)


@needs_qwen
def test_the_control_adds_as_many_tokens_to_a_prompt_as_the_instruction():
    """Counted in the whole message: a full stop and the line feeds after it are one token."""
    chat = Chat(qwen.load_tokenizer(QWEN_TOKENIZER), "think")
    rng = random.Random(0)
    words = "never open the fridge twice unless its contents changed; détours cost ~3 turns, don't!".split()
    written = [" ".join(rng.choices(words, k=rng.randint(1, 60))) + rng.choice((".", "", "!", " ..."))
               for _ in range(60)]
    written += ["Stop.", "Stop", "No", "好", *correction.KINDS.values(), " ".join(correction.KINDS.values())]

    def prompt_length(text):
        return len(chat.message(f"{text}\n\nYou play a text game.", first=True))

    for text in written:
        control = correction.irrelevant(text, chat)
        assert prompt_length(control) == prompt_length(text), (text, control)
        assert not re.search(r"\b(fridge|twice unless|command|turns|never)\b", control)
    assert correction.irrelevant("Read what the game answers before you go on.", chat) == (
        "The rivers of the north freeze in winter and.")


@needs_qwen
def test_the_judges_question_fits_the_tokens_kept_for_it():
    """gcd.py keeps 64 beside the answer's."""
    chat = Chat(qwen.load_tokenizer(QWEN_TOKENIZER), "think")
    assert len(chat.message(judge.QUESTION["think"])) <= 64


@pytest.mark.fast
@pytest.mark.parametrize("text, plain", [
    ("Look  first.\n\nThen go.", "Look first. Then go."), ("<think>a < b\n</think> Look.", "Look."),
    ("<b>Look.</b><|im_end|>", "Look."), ("a <b", "a b"), ("<|im_<|x|>end|>", "|im_ end|"), ("", "")])
def test_written_text_cannot_break_a_prompt(text, plain):
    assert correction.plain_text(text) == plain


def said(chat, text):
    """An answer with these words."""
    ids = chat.encode(text) + chat.encode("<|im_end|>")
    return Response(ids, [0.0] * len(ids), False)


def bad_turns(chat, *critiques):
    """Turns of a script, found bad: refused three times, repeated once, other twice; each with a critique, or
    a bare verdict."""
    judged = []
    for i, t in enumerate((0, 2, 4, 5, 6, 7) * max(1, len(critiques) // 6)):
        question = Judged(10 + i, scripted(chat, MISTAKES, won=False), t, "good", [])
        question.turn.verdicts = ["good", "bad", "bad"]
        why = critiques[i] if i < len(critiques) else ""
        question.answers = [said(chat, f"{text}<judge>{verdict}</judge>") for text, verdict in zip(
            ("It was new. ", "", f"{why} "), question.turn.verdicts)]
        judged.append(question)
    return judged


@pytest.mark.fast
@pytest.mark.parametrize("texts, why", [
    (["<judge>bad</judge>"], ""), (["I came <b>back. <judge>bad</judge>"], "I came back."),
    (["<think>I came\nback.</think> So: <judge>bad</judge>"], "I came back. So:"),
    (["<judge>bad</judge>", "No <judge>! <judge>bad</judge>", "Later. <judge>bad</judge>"], "No !"),
    (["word " * 200 + "<judge>bad</judge>"], ("word " * 100).strip())])
def test_a_critique_is_what_the_judge_says_before_its_verdict(chat, texts, why):
    """Of the first answer that says more than its verdict; one that calls the turn good is passed over."""
    question, = bad_turns(chat)[:1]
    question.answers = [said(chat, "Well done. <judge>good</judge>"), *(said(chat, text) for text in texts)]
    question.turn.verdicts = ["good"] + ["bad"] * len(texts)
    assert correction.critique(chat, question) == why


def corrected(chat, judged, i=7, model=None, endpoint=None, sampling=Sampling(), seed=0, slots=4, **changes):
    """The Instruction that `correct` gives a run, or None; it is logged."""
    settings = SimpleNamespace(**{"correction": "critiques", "correction_every": 1, "correction_from": "auto",
                                  "seed": seed, "slots": slots} | changes)
    rows = []
    run = SimpleNamespace(config=settings, chat=chat, sampler=model, endpoint=endpoint, instruction=None,
                          sampling=lambda: sampling, log=rows.append, log_endpoint=lambda: None)
    correction.correct(run, i, judged)
    assert rows == ([{"phase": "correction"} | asdict(run.instruction)] if run.instruction else [])
    return run.instruction


@pytest.mark.fast
def test_a_small_models_instruction_counts_its_mistakes(chat):
    made = corrected(chat, bad_turns(chat))
    assert made.text == f"{correction.KINDS['refused']} {correction.KINDS['repeated']}"
    assert made.made_from == {"refused": 3, "other": 2, "repeated": 1}
    assert (made.iteration, made.control) == (7, False)
    text = f"{correction.IRRELEVANT['refused']} {correction.IRRELEVANT['repeated']}"
    control = corrected(chat, bad_turns(chat), correction="irrelevant")
    assert control == replace(made, control=True, text=text)
    assert correction.Instruction(**asdict(made)) == made
    for nothing in ([], bad_turns(chat)[:1]):
        assert corrected(chat, nothing) is None


@pytest.mark.fast
def test_a_writing_models_mistakes_are_counted_on_demand(tokenizer):
    chat = Writer(tokenizer, "plain")
    made = corrected(chat, bad_turns(chat), correction_from="counts")
    assert made.made_from == {"refused": 3, "other": 2, "repeated": 1}


@pytest.mark.fast
def test_only_every_so_many_iterations_bring_an_instruction(chat):
    made = [corrected(chat, bad_turns(chat), i, correction_every=3) for i in range(7)]
    assert [i for i, instruction in enumerate(made) if instruction] == [2, 5]
    assert corrected(chat, bad_turns(chat), correction="off") is None


@pytest.fixture
def actor(monkeypatch):
    """An engine that gives set answers in turn. `actor(chat, *texts)` sets more and returns the prompts of
    all calls."""
    words, prompts = [], []

    def answer(model, asked, streams, stops, sampling, n_slots):
        prompts.append(asked)
        assert len({number for numbers in streams for number in numbers}) == len(asked) == len(streams)
        return [[words.pop(0)] for _ in asked]

    def say(chat, *texts):
        words.extend(said(chat, text) for text in texts)
        return prompts

    monkeypatch.setattr(correction, "answer", answer)
    return say


@pytest.mark.fast
def test_critiques_are_merged_by_the_large_model_or_else_by_the_actor(tokenizer, actor):
    chat = Writer(tokenizer, "think")
    bad = bad_turns(chat, "I repeat myself.", "I open what is open.")[:2]
    question = ("An agent that plays text games said this of its own mistakes:\n\n- I repeat myself.\n"
                "- I open what is open.\n\nMerge what they have in common into one coherent instruction to "
                "the agent, of at most 60 words, that helps in other games too. Give the instruction alone.")
    large = Large("<b>Do not</b> repeat.")
    prompts = actor(chat, "Look before\nyou act.")
    assert corrected(chat, bad, endpoint=large).text == "Do not repeat."
    assert large.asked == [[question]] and not prompts
    assert corrected(chat, bad).text == "Look before you act."
    assert prompts == [[chat.message(question, first=True)]]
    for silence in (None, "", " ... "):
        assert corrected(chat, bad, endpoint=Large(silence)) is None
    long = corrected(chat, bad, endpoint=Large("many words " * 100)).text
    assert 480 < len(long) <= 500 and set(long.split()) == {"many", "words"}


@pytest.mark.fast
def test_a_writing_models_instruction_is_merged_from_its_critiques(tokenizer):
    """Of these 24 turns the first two are criticised in no words; of the others the first 16 count."""
    chat, large = Writer(tokenizer, "think"), Large("Do better.")
    bad = bad_turns(chat, "", "<x>", *[f"Mistake {i}." for i in range(2, 24)])
    made = corrected(chat, bad[::-1], endpoint=large)
    assert made.text == "Do better." and made.made_from == [f"Mistake {i}." for i in range(2, 18)]
    merged = "\n".join(f"- {text}" for text in made.made_from)
    assert large.asked == [[correction.MERGE.format(critiques=merged)]]
    for nothing in ([], bad[:2]):
        assert corrected(chat, nothing, endpoint=large) is None
    assert len(large.asked) == 1


def test_a_model_writes_its_own_instruction_through_the_engine(model, tokenizer):
    """The random model's words, but the real path: the merge is asked of the actor.

    In double precision: no CPU's rounding moves a draw to another token."""
    chat, sampling, model = Writer(tokenizer, "think"), Sampling(max_response_tokens=6), model.double()
    runs = [corrected(chat, bad_turns(chat, "I repeat myself."), 3, model, None, sampling, seed, slots)
            for seed in range(6) for slots in (1, 16)]
    assert runs[::2] == runs[1::2]                            # what is said does not depend on the slots
    assert any(runs) and len({instruction.text for instruction in runs if instruction}) > 1


@pytest.mark.fast
def test_every_ranks_mistakes_make_one_instruction(chat, monkeypatch):
    """What the other rank would send is added to the gathering: counts are summed."""
    def gather(value):
        return [value, [(index, "revisited", "") for index in range(5)]]

    monkeypatch.setattr(parallel, "gather", gather)
    made = corrected(chat, bad_turns(chat), 0)
    assert made.made_from == {"revisited": 5, "refused": 3, "other": 2, "repeated": 1}
    assert made.text == f"{correction.KINDS['revisited']} {correction.KINDS['refused']}"


# A cold start with instructions

@pytest.mark.fast
def test_random_instructions_are_empty_half_of_the_time_and_name_every_sentence():
    rng = random.Random(0)
    drawn = [correction.random_instruction(rng) for _ in range(4000)]
    found = [[sentence.strip() for sentence in re.findall(r"[^.]+\.", text)] for text in drawn]
    sizes = Counter(map(len, found))
    assert abs(sizes[0] - 2000) < 4.5 * math.sqrt(1000)
    assert abs(sizes[1] - sizes[2]) < 4.5 * math.sqrt(2000)
    often = Counter(sentence for sentences in found for sentence in sentences)
    assert set(often) == set(correction.instruction_phrases()) and len(often) == 8
    assert max(often.values()) < 1.4 * min(often.values())
    assert all(len(set(sentences)) == len(sentences) for sentences in found)
    rng = random.Random(0)
    assert drawn[:50] == [correction.random_instruction(rng) for _ in range(50)]


@pytest.mark.fast
def test_what_an_instruction_forbids(chat):
    episode = scripted(chat, MISTAKES, won=False)
    pairs = itertools.permutations(correction.KINDS, 2)
    for kinds in [*itertools.combinations(correction.KINDS, 1), *pairs]:
        text = " ".join(correction.KINDS[kind] for kind in kinds)
        assert correction.forbidden(text, episode) == [line[2] in kinds for line in MISTAKES]
        assert not any(correction.forbidden(correction.irrelevant(text, chat), episode))
    assert not any(correction.forbidden("", episode))
