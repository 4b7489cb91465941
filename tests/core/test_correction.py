"""Proves which instructions are made from which mistakes, their control, and a cold start with them.

    python -m pytest tests/core/test_correction.py

By scripted episodes.
"""

import itertools
import math
import random
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from test_judge import Large, answered, scripted

import correction
import judge
from envs.alfred import rooms
from envs.alfred.problem import NOOP_MESSAGE
from infra import parallel
from judge import Question
from lm import model as decoder
from lm import small
from lm.chat import Chat
from lm.engine import Response, Sampling

TABLE = "You arrive at table 1. On the table 1, you see nothing."
# command, its reply, the kind of mistake
MISTAKES = [
    ("look", "You are in the middle of a room.", "other"),
    ("go to table 1", TABLE, "undone"),                      # this turn's anchor is seen again at turn 3
    ("dance", NOOP_MESSAGE, "refused"),
    ("look", "You are in the middle of a room.", "revisited"),
    ("dance", NOOP_MESSAGE, "refused"),                      # "refused" has precedence over "repeated"
    ("go to table 1", TABLE, "repeated"),                    # and "repeated" over "revisited"
    (None, NOOP_MESSAGE, "refused"),
    ("open box 1", "You open the box 1.", "other"),
]


def test_kinds_of_mistakes_on_a_script(chat):
    episode = scripted(chat, MISTAKES, won=False)
    assert [correction.kind_of(episode, t) for t in range(len(MISTAKES))] == [line[2] for line in MISTAKES]


def test_an_admissible_command_without_effect_revisits(chat):
    """The game lists the command and replies with its no-op message: the anchor was seen before."""
    episode = scripted(chat, [("look", NOOP_MESSAGE), ("look", NOOP_MESSAGE)], won=False)
    for turn in episode.turns:
        turn.valid = True
    assert [correction.kind_of(episode, t) for t in (0, 1)] == ["revisited", "repeated"]


def test_a_turn_is_undone_by_the_last_one_too(chat):
    start = scripted(chat, []).last_anchor
    episode = scripted(chat, [("go to table 1", TABLE), ("go back", start)], won=False)
    assert [correction.kind_of(episode, t) for t in (0, 1)] == ["undone", "revisited"]


def test_turns_that_most_verdicts_call_bad_are_found(chat):
    judged = [answered(chat, texts, index, label) for index, (texts, label) in enumerate([
        (["bad", "bad", "good"], "good"), (["bad", "good"], "bad"), (["bad", "jump", "jump"], "bad"),
        (["good"], "bad"), (["bad"], "bad")])]
    found = correction.found_bad(judged)
    assert found == [judged[0], judged[4]]


@pytest.mark.parametrize("counts, kinds", [
    ({"other": 9, "undone": 3, "refused": 5, "repeated": 4}, ["refused", "repeated"]),
    ({"undone": 1}, ["undone"]),
    ({"revisited": 2, "repeated": 2, "undone": 2}, ["repeated", "revisited"]),
    ({"other": 9}, []), ({}, [])])
def test_the_most_frequent_kinds_are_named(counts, kinds):
    assert correction.counted_instruction(counts) == " ".join(correction.KINDS[kind] for kind in kinds)


def small_chat(folder):
    phrases = [*rooms.phrases(), *correction.instruction_phrases()]
    vocabulary = len(small.save_small_tokenizer(phrases, folder))
    decoder.ModelConfig(vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                        max_position_embeddings=64).save(folder)
    return Chat(decoder.load_tokenizer(folder), "plain")


def test_sentences_and_their_controls_are_single_tokens_of_the_small_model(tmp_path):
    chat = small_chat(tmp_path)
    for first, second in itertools.permutations(correction.KINDS, 2):
        counted = correction.counted_instruction({first: 2, second: 2})
        control = correction.irrelevant(counted, chat)
        assert len(chat.encode(counted)) == len(chat.encode(control)) == 3      # two, and a space
    assert correction.irrelevant(correction.counted_instruction({"undone": 1, "refused": 2}), chat) == (
        "Sing only songs that are popular there. Do not say what you will have to sing.")
    assert correction.KINDS.keys() == correction.IRRELEVANT.keys()
    assert len(set(correction.instruction_phrases())) == 2 * len(correction.KINDS)


@pytest.mark.slow
def test_the_control_adds_as_many_tokens_to_a_prompt_as_the_instruction(qwen_tokenizer):
    """Counted in the full message: a full stop and the line feeds after it are one token."""
    chat = Chat(qwen_tokenizer, "think")
    rng = random.Random(0)
    phrase = "never open the fridge twice unless its contents changed; détours cost ~3 turns, don't!"
    written = [" ".join(rng.choices(phrase.split(), k=rng.randint(1, 60)))
               + rng.choice((".", "", "!", " ...")) for _ in range(60)]
    written += ["Stop.", "Stop", "No", "好", *correction.KINDS.values(), " ".join(correction.KINDS.values())]

    def prompt_length(text):
        return len(chat.message(f"{text}\n\nYou play a text game.", first=True))

    for text in written:
        control = correction.irrelevant(text, chat)
        assert prompt_length(control) == prompt_length(text), (text, control)
        assert not re.search(r"\b(fridge|twice unless|command|turns|never)\b", control)
    assert correction.irrelevant("Read what the game answers before you go on.", chat) == (
        "The rivers of the north freeze in winter and.")


@pytest.mark.slow
def test_the_judges_question_fits_its_reserved_tokens(qwen_tokenizer):
    """Config.question_room reserves 64, in addition to the answer's."""
    chat = Chat(qwen_tokenizer, "think")
    assert len(chat.message(judge.QUESTION["think"])) <= 64


@pytest.mark.parametrize("text, plain", [
    ("Look  first.\n\nThen go.", "Look first. Then go."), ("<think>a < b\n</think> Look.", "Look."),
    ("<b>Look.</b><|im_end|>", "Look."), ("a <b", "a b"), ("<|im_<|x|>end|>", "|im_ end|"), ("", "")])
def test_written_text_cannot_break_a_prompt(text, plain):
    assert correction.plain_text(text) == plain


def response(chat, text):
    """A complete response with this text."""
    ids = chat.encode(text) + chat.end_ids
    return Response(ids, [0.0] * len(ids), False)


def bad_turns(chat, *critiques):
    """Judged turns of a script that were found bad: three refused, one repeated, two other.

    critiques: the reasoning about each (default: a bare verdict).
    """
    judged = []
    for i, t in enumerate((0, 2, 4, 5, 6, 7) * max(1, len(critiques) // 6)):
        question = Question(10 + i, scripted(chat, MISTAKES, won=False), t, "good", [])
        question.turn.verdicts = ["good", "bad", "bad"]
        why = critiques[i] if i < len(critiques) else ""
        question.answers = [response(chat, f"{text}<judge>{verdict}</judge>") for text, verdict in zip(
            ("It was new. ", "", f"{why} "), question.turn.verdicts)]
        judged.append(question)
    return judged


@pytest.mark.parametrize("texts, why", [
    (["<judge>bad</judge>"], ""), (["I came <b>back. <judge>bad</judge>"], "I came back."),
    (["<think>I came\nback.</think> So: <judge>bad</judge>"], "I came back. So:"),
    (["<judge>bad</judge>", "No <judge>! <judge>bad</judge>", "Later. <judge>bad</judge>"], "No !"),
    (["word " * 200 + "<judge>bad</judge>"], ("word " * 100).strip())])
def test_a_critique_is_the_text_before_the_verdict(chat, texts, why):
    """Of the first "bad" answer with more than a verdict; answers that call the turn good are skipped."""
    question, = bad_turns(chat)[:1]
    question.answers = [response(chat, text) for text in ("Well done. <judge>good</judge>", *texts)]
    question.turn.verdicts = ["good"] + ["bad"] * len(texts)
    assert correction.critique(chat, question) == why


def corrected(chat, judged, i=7, model=None, endpoint=None, sampling=Sampling(), seed=0, slots=4, **changes):
    """What `correct` logs of the instruction that it gives a run, or None. Asserts that it is the run's."""
    settings = SimpleNamespace(**{"correction": "critiques", "correction_every": 1, "seed": seed,
                                  "slots": slots} | changes)
    rows, warned = [], []
    run = SimpleNamespace(config=settings, chat=chat, sampler=model, endpoint=endpoint, instruction="",
                          sampling=lambda: sampling, log=rows.append, log_endpoint=lambda: None,
                          warn_once=lambda kind, text: warned.append(text))
    correction.correct(run, i, judged)
    due = settings.correction != "off" and (i + 1) % settings.correction_every == 0
    assert bool(warned) == (due and not run.instruction)
    assert [row["text"] for row in rows] == ([run.instruction] if run.instruction else [])
    return rows[0] if rows else None


def test_a_small_models_instruction_counts_its_mistakes(chat):
    made = corrected(chat, bad_turns(chat))
    assert made["text"] == f"{correction.KINDS['refused']} {correction.KINDS['repeated']}"
    assert made["made_from"] == {"refused": 3, "other": 2, "repeated": 1}
    assert made["control"] is False
    text = f"{correction.IRRELEVANT['refused']} {correction.IRRELEVANT['repeated']}"
    control = corrected(chat, bad_turns(chat), correction="irrelevant")
    assert control == made | {"control": True, "text": text}
    for too_few in ([], bad_turns(chat)[:1]):
        assert corrected(chat, too_few) is None


def test_a_writing_models_mistakes_are_counted_where_its_verdicts_have_no_reasons(tokenizer):
    """With --prompt plain a verdict is the word alone."""
    chat = Chat(tokenizer, "plain")
    assert corrected(chat, bad_turns(chat))["made_from"] == {"refused": 3, "other": 2, "repeated": 1}


def test_an_instruction_is_made_every_n_iterations(chat):
    made = [corrected(chat, bad_turns(chat), i, correction_every=3) for i in range(7)]
    assert [i for i, instruction in enumerate(made) if instruction] == [2, 5]


@pytest.fixture
def actor(monkeypatch):
    """An engine that gives fixed answers in turn. `actor(chat, *texts)` adds answers, all cut or none, and
    returns the list of every call's prompts."""
    answers, calls = [], []

    def answer(model, prompts, streams, stops, sampling, n_slots):
        calls.append(prompts)
        assert len({number for numbers in streams for number in numbers}) == len(prompts) == len(streams)
        return [[answers.pop(0)] for _ in prompts]

    def add(chat, *texts, cut=False):
        answers.extend(replace(response(chat, text), truncated=cut) for text in texts)
        return calls

    monkeypatch.setattr(correction, "answer", answer)
    return add


def test_critiques_are_merged_by_the_large_model_or_without_one_by_the_model(tokenizer, actor):
    chat = Chat(tokenizer, "think")
    bad = bad_turns(chat, "I repeat myself.", "I open what is open.")[:2]
    question = ("An agent that plays text games said this of its own mistakes:\n\n- I repeat myself.\n"
                "- I open what is open.\n\nMerge what they have in common into one coherent instruction to "
                "the agent, of at most 60 words, that helps in other games too. Give the instruction alone.")
    large = Large("<b>Do not</b> repeat.")
    prompts = actor(chat, "Look before\nyou act.")
    assert corrected(chat, bad, endpoint=large)["text"] == "Do not repeat."
    assert large.calls == [[question]] and not prompts
    assert corrected(chat, bad)["text"] == "Look before you act."
    assert prompts == [[chat.message(question, first=True)]]
    actor(chat, "Look before you", cut=True)
    assert corrected(chat, bad) is None
    for silence in (None, "", " ... "):
        assert corrected(chat, bad, endpoint=Large(silence)) is None
    long = corrected(chat, bad, endpoint=Large("many words " * 100))["text"]
    assert 480 < len(long) <= 500 and set(long.split()) == {"many", "words"}


def test_a_writing_models_instruction_is_merged_from_its_critiques(tokenizer):
    """Of these 24 turns the first two have an empty critique; of the others the first 16 are merged."""
    chat, large = Chat(tokenizer, "think"), Large("Do better.")
    bad = bad_turns(chat, "", "<x>", *[f"Mistake {i}." for i in range(2, 24)])
    made = corrected(chat, bad[::-1], endpoint=large)
    assert made["text"] == "Do better." and made["made_from"] == [f"Mistake {i}." for i in range(2, 18)]
    merged = "\n".join(f"- {text}" for text in made["made_from"])
    assert large.calls == [[correction.MERGE.format(critiques=merged)]]
    for without_critique in ([], bad[:2]):
        assert corrected(chat, without_critique, endpoint=large) is None
    assert len(large.calls) == 1


@pytest.mark.slow
def test_a_model_writes_its_own_instruction_through_the_engine(model, tokenizer):
    """The real path, though the random model writes nonsense: it merges its critiques.

    In double precision, so that no CPU's rounding changes a sampled token."""
    chat, sampling, model = Chat(tokenizer, "think"), Sampling(max_response_tokens=6), model.double()
    runs = [corrected(chat, bad_turns(chat, "I repeat myself."), 3, model, None, sampling, seed, slots)
            for seed in range(6) for slots in (1, 16)]
    assert runs[::2] == runs[1::2]                            # independent of the number of slots
    assert any(runs) and len({row["text"] for row in runs if row}) > 1


def test_all_ranks_mistakes_make_one_instruction(chat, monkeypatch):
    """The gathered list gets a second rank's mistakes: counts are summed."""
    def gather(value):
        return [value, [(index, "revisited", "") for index in range(5)]]

    monkeypatch.setattr(parallel, "all_gather", gather)
    made = corrected(chat, bad_turns(chat), 0)
    assert made["made_from"] == {"revisited": 5, "refused": 3, "other": 2, "repeated": 1}
    assert made["text"] == f"{correction.KINDS['revisited']} {correction.KINDS['refused']}"


# A cold start with instructions

def test_random_instructions_are_empty_half_of_the_time_and_use_every_sentence():
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


def test_an_instruction_forbids_the_kinds_that_it_names(chat):
    episode = scripted(chat, MISTAKES, won=False)
    pairs = itertools.permutations(correction.KINDS, 2)
    for kinds in [*itertools.combinations(correction.KINDS, 1), *pairs]:
        text = " ".join(correction.KINDS[kind] for kind in kinds)
        assert correction.forbidden(text, episode) == [line[2] in kinds for line in MISTAKES]
        assert not any(correction.forbidden(correction.irrelevant(text, chat), episode))
    assert not any(correction.forbidden("", episode))


@pytest.mark.slow
def test_each_merge_has_random_draws_of_its_own(monkeypatch):
    seeds = []
    monkeypatch.setattr(correction, "merged", lambda run, critiques, seed: seeds.append(seed) or "")
    run = SimpleNamespace(config=SimpleNamespace(correction_every=1, seed=3, correction="critiques"),
                          chat=SimpleNamespace(bare=False), warn_once=lambda *_: None)
    for i in (0, 1):
        correction.correct(run, i, [])
    assert seeds[0] != seeds[1]
