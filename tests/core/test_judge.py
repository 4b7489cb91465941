"""Proves the labels of turns, the judge's questions, and the rewards of its answers, by scripted episodes.

    python -m pytest tests/core/test_judge.py
"""

import itertools
import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import Corridor, Recorder, assert_same, make_specs

import batching
import correction
import envs
import judge
import labels as turn_labels
import rollout
import update
from envs import Task, household
from judge import Question, VerdictRecord
from lm import chat as chat_module
from lm.chat import Chat
from lm.engine import Response, Sampling
from rollout import Episode, Turn

ENVIRONMENT = household.Environment()
NOOP = ENVIRONMENT.noop_message

INTRO = ("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around "
         "you, you see a cabinet 1, a countertop 1, and a drawer 1.\n\nYour task is to: put a mug in drawer.")
CABINET = "You arrive at cabinet 1. The cabinet 1 is closed."
COUNTER = "You arrive at countertop 1. On the countertop 1, you see a mug 1."
# command, its reply; then its labels by hand: rule, dense, oracle, rule+oracle
SCRIPT = [
    ("go to cabinet 1", CABINET, None, None, "good", "good"),
    ("open cabinet 1", "You open the cabinet 1. The cabinet 1 is open. In it, you see a plate 1.",
     "bad", "bad", "good", None),                             # labels differ: it is seen closed again
    ("dance", NOOP, "bad", "bad", "bad", "bad"),
    ("close cabinet 1", "You close the cabinet 1.", None, "good", None, None),
    ("go to countertop 1", COUNTER, None, None, "good", "good"),
    ("go to cabinet 1", CABINET, "bad", "bad", "bad", "bad"),            # a revisit, away from the mug
    ("go to countertop 1", COUNTER, None, None, "good", "good"),
    ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1.",
     None, "good", "good", "good"),
    ("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.", None, "good", "good", "good"),
    ("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see nothing.",
     None, "good", "good", "good"),
    ("move mug 1 to drawer 1", "You move the mug 1 to the drawer 1.", "good", "good", "good", "good"),
]
COLUMN = {"rule": 2, "dense": 3, "oracle": 4, "rule+oracle": 5}
# By hand: a refused turn has none; from the counter to the cabinet and back nothing new is seen
TAKEN = ["good", "good", None, "good", "good", "bad", "bad", "good", "good", "good", "good"]


def scripted(chat, lines=SCRIPT, won=True, truncated=False, index=0):
    """The Episode that `play` would record for a script; a command None is a malformed response."""
    task = Task("room", "train", "pick_and_place_simple", None)
    episode = Episode(task, 0, index, won=won, truncated=truncated)
    prompt, observation, anchor = chat.message(INTRO, first=True), INTRO, INTRO
    for command, answer, *_ in lines:
        response = chat.encode(command or "") + chat.end_ids
        valid = command is not None and answer != NOOP
        episode.turns.append(Turn(observation, prompt, response, [-0.1] * len(response), command or "",
                                  command, valid, anchor))
        prompt, observation = prompt + response + chat.message(answer), answer
        anchor = anchor if answer == NOOP else answer
    episode.final_observation, episode.last_anchor = observation, anchor
    return episode


# Labels

@pytest.mark.parametrize("kind", COLUMN)
def test_labels_of_the_script(chat, kind):
    episode = scripted(chat)
    labels = turn_labels.label_turns(episode, kind, ENVIRONMENT)
    assert labels == [line[COLUMN[kind]] for line in SCRIPT] == [turn.label for turn in episode.turns]


@pytest.mark.parametrize("won", [True, False])
def test_taken_labels_of_the_script_do_not_depend_on_the_outcome(chat, won):
    episode = scripted(chat, won=won)
    assert turn_labels.label_turns(episode, "taken", ENVIRONMENT) == TAKEN


def test_flaws_are_the_oracles_labels_of_what_the_game_took(chat):
    labels = turn_labels.label_turns(scripted(chat), "flaws", ENVIRONMENT)
    assert labels == [None if line[1] == NOOP else line[4] for line in SCRIPT]
    assert "bad" in labels and turn_labels.label_turns(scripted(chat), "oracle", ENVIRONMENT) != labels


@pytest.mark.parametrize("seed", range(40))
def test_taken_labels_are_those_of_the_definition(seed):
    """Against a double loop over pairs of turns, on random walks through few rooms, with refused turns."""
    rng = random.Random(seed)
    episode = Episode(Task("walk", "train", "walk", None), 0, won=rng.random() < 0.5)
    here = ["room 0"]
    for _ in range(rng.randint(1, 14)):
        valid = rng.random() < 0.7
        episode.turns.append(Turn(here[-1], [], [], [], "", "go", valid, here[-1]))
        here = [*here, f"room {rng.randrange(5)}" if valid else here[-1]]
    episode.last_anchor = here[-1]
    for t, (turn, label) in enumerate(zip(episode.turns, turn_labels.taken_labels(episode), strict=True)):
        on_loop = any(here[a] == here[b] and set(here[a + 1:b + 1]) <= set(here[:a + 1])
                      for a in range(t + 1) for b in range(t + 1, len(here)))
        news = here[t + 1] not in here[:t + 1]
        assert label == (None if not turn.valid else "bad" if on_loop else "good" if news else None)


def test_a_failed_episode_has_no_turn_that_the_rule_calls_good(chat):
    failed = scripted(chat, won=False)
    by_rule = ["bad" if line[2] == "bad" else None for line in SCRIPT]
    for kind in ("rule", "dense"):
        assert turn_labels.label_turns(failed, kind, ENVIRONMENT) == by_rule
    assert turn_labels.label_turns(failed, "oracle", ENVIRONMENT) == [line[4] for line in SCRIPT]


def test_rule_and_oracle_adds_the_oracles_good_turns_not_its_bad_ones(chat):
    lines = [("go to countertop 1", COUNTER),
             ("take mug 1 from countertop 1", "You pick up the mug 1 from the countertop 1."),
             ("move mug 1 to countertop 1", "You move the mug 1 to the countertop 1.")]
    episode = scripted(chat, lines, won=False)
    assert turn_labels.label_turns(episode, "oracle", ENVIRONMENT) == ["good", "good", "bad"]
    assert turn_labels.label_turns(episode, "rule+oracle", ENVIRONMENT) == ["good", "good", None]


def test_a_command_that_was_not_admissible_is_never_dense_good(chat):
    """Real games accept some commands that they do not list."""
    episode = scripted(chat)
    episode.turns[7].valid = False
    assert turn_labels.dense_labels(episode) == [None if t == 7 else line[3] for t, line in enumerate(SCRIPT)]


def test_shuffled_labels_the_turns_that_dense_labels(chat):
    episode = scripted(chat)
    shuffled = turn_labels.label_turns(episode, "shuffled", ENVIRONMENT)
    assert shuffled == turn_labels.label_turns(episode, "dense", ENVIRONMENT)
    assert set(shuffled) > {"good", "bad"}


def test_the_noop_message_is_not_a_state(chat):
    """By raw observations, the second no-op message would be a revisit and mark an innocent turn. By anchors,
    the two inadmissible turns are marked."""
    lines = [("dance", NOOP), ("go to cabinet 1", CABINET), ("dance", NOOP),
             ("go to drawer 1", "You arrive at drawer 1.")]
    episode = scripted(chat, lines, won=False)
    assert turn_labels.anchors(episode) == [INTRO, INTRO, CABINET, CABINET, "You arrive at drawer 1."]
    assert turn_labels.rule_labels(episode) == ["bad", None, "bad", None]


def test_the_turn_that_wins_is_good_wherever_it_leads(chat):
    episode = scripted(chat, [("go to cabinet 1", CABINET), ("look", CABINET)], won=True)
    assert turn_labels.rule_labels(episode) == [None, "good"]


def test_a_last_turn_without_effect_is_bad(chat):
    episode = scripted(chat, [("go to cabinet 1", CABINET), (None, NOOP)], won=False)
    assert turn_labels.rule_labels(episode) == [None, "bad"]


@pytest.mark.parametrize("before", [[], [("go to cabinet 1", CABINET)], [("dance", NOOP)]])
def test_a_truncated_episode_can_be_labelled(chat, before):
    """The final observation after a cut response is the one before it again, as the command was not sent."""
    episode = scripted(chat, [*before, (None, "")], won=False, truncated=True)
    episode.final_observation, episode.last_anchor = episode.turns[-1].observation, episode.turns[-1].anchor
    for kind in set(turn_labels.LABELS) - {"endpoint", "taken", "flaws"}:
        assert turn_labels.label_turns(episode, kind, ENVIRONMENT)[-1] == "bad"


def test_no_oracle_label_changes_when_the_future_does(chat):
    full = turn_labels.oracle_labels(scripted(chat), ENVIRONMENT)
    for t in range(1, len(SCRIPT)):
        for tail in ([], [("dance", NOOP)] * 3, SCRIPT[:2]):
            other = scripted(chat, SCRIPT[:t] + tail, won=False)
            assert turn_labels.oracle_labels(other, ENVIRONMENT)[:t] == full[:t]


def test_the_oracle_is_called_once_and_its_labels_are_kept(chat):
    calls = []
    environment = envs.Environment()
    environment.oracle = lambda observations, commands: (
        calls.append((observations, commands)) or ["good", "bad"])
    episode = scripted(chat, [("look", "A mug."), (None, NOOP)], won=False)
    for _ in range(2):
        assert turn_labels.oracle_labels(episode, environment) == ["good", "bad"]
    assert [turn.oracle for turn in episode.turns] == ["good", "bad"]
    assert calls == [([INTRO, "A mug.", NOOP], ["look", ""])]


def test_an_environment_without_an_oracle_gives_no_labels(chat):
    environment = envs.Environment()
    episode = scripted(chat, [("look around", "This room is called the hallway."), ("dance", NOOP)],
                       won=False)
    assert turn_labels.oracle_labels(episode, environment) == [None, None]
    labels = turn_labels.label_turns(episode, "rule+oracle", environment)
    assert labels == turn_labels.rule_labels(episode) == [None, "bad"]


def test_an_environment_may_have_its_own_labels(chat):
    def long_commands(episode):
        return ["good" if len(turn.action) > 15 else "bad" for turn in episode.turns]

    environment, episode = envs.Environment(), scripted(chat)
    environment.labels = {"length": long_commands}
    assert turn_labels.label_turns(episode, "length", environment) == long_commands(episode)


# Labels from a large model

class Large:
    """A stand-in for the endpoint: gives fixed answers in turn and records the questions of each call."""

    def __init__(self, *answers):
        self.answers, self.calls = itertools.cycle(answers or ["<judge>good</judge>"]), []

    def ask(self, questions):
        self.calls.append(questions)
        return [next(self.answers) for _ in questions]


@pytest.mark.parametrize("rule, other, expected, undisputed", [
    ("good", "good", "good", "good"),
    ("good", "bad", "good", None),
    ("good", None, "good", "good"),
    ("bad", "good", "bad", None),
    ("bad", "bad", "bad", "bad"),
    ("bad", None, "bad", "bad"),
    (None, "good", "good", "good"),
    (None, "bad", None, None),
    (None, None, None, None)])
def test_how_the_labels_of_the_rule_are_combined_with_others(rule, other, expected, undisputed):
    assert turn_labels.combine(rule, other) == expected
    assert turn_labels.combine(rule, other, undisputed=True) == undisputed


def test_labels_and_candidates_with_a_large_model(chat):
    """The rule calls turns 1, 2 and 5 bad, and 10 good."""
    by_large = {(41, t): label for t, label in (
        (0, "good"), (1, "bad"), (2, "good"), (3, "bad"), (4, None), (10, "bad"))}
    expected = {"endpoint": {0: "good", 1: "bad", 2: "good", 3: "bad", 10: "bad"},
                "rule+endpoint": {0: "good", 1: "bad", 2: "bad", 5: "bad", 10: "good"}}
    episodes = [scripted(chat, won=False, index=40), scripted(chat, index=41)]
    for kind, labels in expected.items():
        got = turn_labels.label_turns(episodes[1], kind, ENVIRONMENT, by_large)
        assert got == [labels.get(t) for t in range(len(SCRIPT))]
        places = judge.candidates(episodes, kind, 10_000, ENVIRONMENT, by_large)
        assert {t: label for e, t, label in places if e == 41} == labels
        assert (40, 0, "good") not in places                     # which is the other episode's label
    without_large = turn_labels.label_turns(episodes[1], "rule+endpoint", ENVIRONMENT)
    assert without_large == turn_labels.rule_labels(episodes[1])
    assert turn_labels.label_turns(episodes[1], "endpoint", ENVIRONMENT) == [None] * len(SCRIPT)


@pytest.mark.parametrize("kind, n_places", [("rule+endpoint", 7 + 8), ("endpoint", 22)])
def test_which_turns_a_large_model_is_asked_about(chat, kind, n_places):
    episodes = [scripted(chat, index=40), scripted(chat, won=False, index=41)]
    rule = {episode.index: turn_labels.rule_labels(episode) for episode in episodes}
    assert len(judge.endpoint_labels(episodes, Large(), 1000, 0, kind)) == n_places
    room = episodes[1].turns[6].tokens                     # six turns of the second are shorter
    found = judge.endpoint_labels(episodes, Large(), 1000, 0, kind, room)
    assert {t for e, t in found if e == 41} == {
        t for t in range(6) if kind == "endpoint" or rule[41][t] is None}
    often = Counter()
    for seed in range(200):
        large = Large("<judge>good</judge>", "<judge>bad</judge>", "Well.", None)
        labels = judge.endpoint_labels(episodes, large, 6, seed, kind)
        assert len(labels) == 6 and [len(questions) for questions in large.calls] == [6]
        assert list(labels.values()) == ["good", "bad", None, None, "good", "bad"]
        for (e, t), question in zip(labels, large.calls[0]):
            assert f"> {SCRIPT[t][0]}\n\nThe game has not yet answered" in question
        often.update(list(labels))
    assert len(often) == n_places        # each is drawn with probability 6/n: more than 30 of 200 times
    assert all(rule[e][t] is None for e, t in often) == (kind == "rule+endpoint")


def test_a_large_model_without_questions(chat):
    assert judge.endpoint_labels([], Large(), 6, 0) == {}
    assert judge.endpoint_labels([scripted(chat)], Large(), 0, 0) == {}


def test_the_question_to_a_large_model_is_this_text(chat):
    large = Large()
    episode = scripted(chat, [SCRIPT[0], (None, NOOP), SCRIPT[1]], won=False)
    episode.turns[1].response = "Hm."
    places = judge.endpoint_labels([episode], large, 3, 0, "endpoint")
    questions = dict(zip([t for _, t in places], large.calls[0]))
    assert questions[2] == (
        'An agent plays a text game. This is what it has seen, and after each ">" the command that it '
        f"gave:\n\n{INTRO}\n\n> go to cabinet 1\n\n{CABINET}\n\n> Hm.\n\n{NOOP}\n\n> open cabinet 1\n\n"
        "The game has not yet answered the last command. Given the task and all that has been seen, was that "
        "command a good step? Think briefly, then end with <judge>good</judge> or <judge>bad</judge>.")


def test_no_question_to_a_large_model_changes_when_the_future_does(chat):
    def questions(episode):
        large = Large()
        places = judge.endpoint_labels([episode], large, 1000, 0, "endpoint")
        verdicts = dict(zip([t for _, t in places], large.calls[0]))
        turns = range(len(episode.turns))
        return verdicts, {t: judge.transcript(episode, t, judge.THINK_AHEAD) for t in turns}

    full = questions(scripted(chat))
    for t in range(1, len(SCRIPT)):
        for tail in ([], [("dance", NOOP)] * 3, SCRIPT[:2]):
            other = questions(scripted(chat, SCRIPT[:t] + tail, won=False))
            assert all(other[which][i] == full[which][i] for which in (0, 1) for i in range(t))


def test_a_thought_is_requested_without_the_turns_future(chat):
    for t, (command, answer, *_) in enumerate(SCRIPT):
        question = judge.transcript(scripted(chat), t, judge.THINK_AHEAD)
        assert f"> {command}\n\nWrite the thought with which the agent came to its last command" in question
        assert question.count("\n> ") == t + 1
        assert answer in [line[1] for line in SCRIPT[:t]] or answer not in question


# Prompts and verdicts

def test_the_judge_prompt_is_this_text(chat):
    episode = scripted(chat)
    assert chat.tokenizer.decode(judge.question_ids(chat, episode.turns[1])) == (
        f"<|user|>{INTRO}<|assistant|>go to cabinet 1<|im_end|>"
        f"<|user|>{CABINET}<|assistant|>open cabinet 1<|im_end|>"
        "<|user|>Was that a good action? good or bad<|assistant|>")


def test_a_response_that_was_cut_is_closed_before_the_question(chat):
    turn = scripted(chat).turns[1]
    cut = replace(turn, response_ids=turn.response_ids[:-1], truncated=True)
    assert judge.question_ids(chat, cut) == judge.question_ids(chat, turn)


def test_the_think_style_asks_for_a_tagged_verdict(tokenizer):
    chat = Chat(tokenizer, "think")
    text = tokenizer.decode(judge.question_ids(chat, scripted(chat).turns[0]))
    assert text.startswith(f"<|user|>{INTRO}<|assistant|>go to cabinet 1<|im_end|>"
                           "<|user|>Before the game answers:")
    assert text.endswith("<judge>good</judge> or <judge>bad</judge>.<|assistant|>")


def test_no_judge_prompt_changes_when_the_future_does(chat):
    full = scripted(chat)
    for t in range(len(SCRIPT)):
        command = SCRIPT[t][0]
        other = scripted(chat, [*SCRIPT[:t], (command, "You won! Reward 1."), ("dance", NOOP)], won=False)
        assert judge.question_ids(chat, full.turns[t]) == judge.question_ids(chat, other.turns[t])


@pytest.mark.parametrize("style, text, verdict", [
    ("plain", "good", "good"), ("plain", " bad\n", "bad"), ("plain", "", None), ("plain", "Good", None),
    ("plain", "good bad", None), ("plain", "goodbad", None), ("plain", "not bad", None),
    ("plain", "good<|user|>", None), ("think", "<judge>good</judge>", "good"),
    ("think", "<judge> bad </judge>\n", "bad"), ("think", "It was in vain. <judge>bad</judge>", "bad"),
    ("think", "<think>a < b\n</think>\n<judge>good</judge>", "good"), ("think", "good", None),
    ("think", "<judge>good", None), ("think", "<judge></judge>", None), ("think", "", None),
    ("think", "<judge>good</judge><judge>bad</judge>", None), ("think", "<judge>good or bad</judge>", None),
    ("think", "<think>a</think> <judge>good</judge><think>b</think><judge>bad</judge>", None),
    ("think", "<judge>good</judge> it was", None), ("think", "<think>so <judge>bad</judge>", None)])
def test_answers_to_verdicts(style, text, verdict):
    assert judge.parse_verdict(text, style) == verdict


def test_verdict_rewards(chat):
    for label, rewards in (("good", [1.0, 0.0, -0.1]), ("bad", [0.0, 1.0, -0.1])):
        assert answered(chat, ["good", "bad", "jump"], label=label).rewards == rewards


@pytest.mark.parametrize("style, question_style", [("plain", "plain"), ("think", "think"), ("tags", "plain")])
def test_a_demonstrated_answer_parses_to_its_label(tokenizer, style, question_style):
    """A small model answers in one word, whether or not it plays with tags."""
    chat = Chat(tokenizer, style)
    assert judge.question_style(chat) == question_style
    question = chat.message(judge.QUESTION[question_style])
    assert judge.question_ids(chat, scripted(chat).turns[0])[-len(question):] == question
    for label in ("good", "bad"):
        ids = judge.verdict_ids(chat, label)
        assert ids[-1] in chat.stop_ids
        assert judge.parse_verdict(chat.decode(ids), question_style) == label


# Which turns are judged

def test_candidates_are_the_labelled_turns_that_fit(chat):
    episodes = [scripted(chat, index=40), scripted(chat, won=False, index=41)]
    places = judge.candidates(episodes, "rule", 10_000, ENVIRONMENT)
    assert places == [(40 + e, t, label) for e, episode in enumerate(episodes)
                      for t, label in enumerate(turn_labels.rule_labels(episode)) if label]
    turn = episodes[0].turns[5]
    length = len(turn.prompt_ids) + len(turn.response_ids)
    assert {t for _, t, _ in judge.candidates(episodes, "rule", length + 1, ENVIRONMENT)} == {1, 2, 5}
    assert {t for _, t, _ in judge.candidates(episodes, "rule", length, ENVIRONMENT)} == {1, 2}


def places_of(n_good, n_bad, seed=0):
    labels = ["good"] * n_good + ["bad"] * n_bad
    random.Random(seed).shuffle(labels)
    return [(i // 7, i % 7, label) for i, label in enumerate(labels)]


@pytest.mark.parametrize("n_good, n_bad, each", [
    (50, 300, 16), (5, 300, 5), (300, 3, 3), (16, 16, 16), (0, 9, 0), (9, 0, 0)])
def test_good_and_bad_are_balanced_and_alternate(n_good, n_bad, each):
    places = places_of(n_good, n_bad)
    chosen = judge.choose(places, "dense", 16, seed=3)
    assert [label for _, _, label in chosen] == ["good", "bad"] * each
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(places)
    assert chosen == judge.choose(places, "dense", 16, seed=3)


def test_the_choice_is_random_and_covers_every_turn():
    places = places_of(20, 20)
    often = Counter(place for seed in range(400) for place in judge.choose(places, "rule", 5, seed))
    assert len(often) == 40                      # each is drawn with probability 1/4: 100 +- 8.7
    assert all(abs(n - 100) < 4.5 * 8.7 for n in often.values())


def test_shuffled_labels_are_a_fair_coin_independent_of_the_true_label():
    places = places_of(1500, 1500)
    true = {place[:2]: place[2] for place in places}
    chosen = judge.choose(places, "shuffled", 1000, seed=11)
    assert len(chosen) == 2000 and Counter(true[c[:2]] for c in chosen) == {"good": 1000, "bad": 1000}
    bound = 4 * math.sqrt(2000 / 4)
    assert abs(sum(label == "good" for _, _, label in chosen) - 1000) < bound
    assert abs(sum(label == true[e, t] for e, t, label in chosen) - 1000) < bound
    assert [c[:2] for c in chosen] == [c[:2] for c in judge.choose(places, "dense", 1000, seed=11)]


def test_questions_are_about_this_ranks_episodes(chat):
    judged, (won, lost) = questions_of_two_episodes(chat)
    assert [(j.index, j.t, j.label, j.turn.oracle) for j in judged] == [
        (0, 10, "good", "good"), (1, 5, "bad", "bad"), (3, 1, "bad", "good")]
    assert all(j.episode is episode for j, episode in zip(judged, (won, lost, won), strict=True))
    assert all(j.turn is j.episode.turns[j.t] for j in judged)
    assert [j.prompt_ids for j in judged] == [judge.question_ids(chat, j.turn) for j in judged]


def questions_of_two_episodes(chat):
    """(questions about episodes 8, won, and 9; the two episodes). One chosen turn is of another rank."""
    episodes = [scripted(chat, index=8), scripted(chat, won=False, index=9)]
    chosen = [(8, 10, "good"), (9, 5, "bad"), (12, 0, "good"), (8, 1, "bad")]
    return judge.questions(chat, episodes, chosen, ENVIRONMENT), episodes


# Answers and samples

def questions_by(chat, n=6):
    episode = scripted(chat)
    return [Question(i, episode, i, ("good", "bad")[i % 2], judge.question_ids(chat, episode.turns[i]))
            for i in range(n)]


def test_answers_do_not_depend_on_the_slots_or_on_other_questions(model, chat):
    """So two ranks answer as one does: an answer's stream follows from its question's index alone.

    In double precision, so that no CPU's rounding changes a sampled token."""
    runs, model = [], model.double()
    for n_slots, kept in ((64, range(6)), (4, range(6)), (64, (1, 4))):
        judged = [j for j in questions_by(chat) if j.index in kept]
        sampling = Sampling(max_response_tokens=3)
        judge.answer_questions(model, chat, judged, 4, sampling, seed=5, n_slots=n_slots)
        runs.append({j.index: ([a.ids for a in j.answers], j.turn.verdicts, j.rewards) for j in judged})
    assert runs[0] == runs[1] and runs[2] == {i: runs[0][i] for i in (1, 4)}
    ids = [tuple(a) for answers, _, _ in runs[0].values() for a in answers]
    assert len(ids) == 24 and len(set(ids)) > 4
    verdicts = [verdict for _, answers, _ in runs[0].values() for verdict in answers]
    assert None in verdicts and {"good", "bad"} & set(verdicts)
    twins = [replace(questions_by(chat, 1)[0], index=index) for index in (0, 1)]
    judge.answer_questions(model, chat, twins, 4, sampling, seed=5, n_slots=64)
    one, other = ([answer.ids for answer in question.answers] for question in twins)
    assert one != other


def test_verdicts_and_rewards_are_read_from_the_answers(model, chat, monkeypatch):
    good, bad, junk, cut = ([*chat.encode(text), *chat.tokenizer.encode(stop)] for text, stop in (
        ("good", "<|im_end|>"), ("bad", "<|endoftext|>"), ("jump", "<|im_end|>"), ("good", "")))
    answers = [Response(ids, [-1.0] * len(ids), ids is cut) for ids in (good, bad, junk, cut)]
    monkeypatch.setattr(judge, "answer", lambda *arguments: [answers])
    one, = judged = questions_by(chat, 1)
    judge.answer_questions(model, chat, judged, 4, Sampling(), seed=0, n_slots=8)
    # the last is truncated, so it is unreadable
    assert one.turn.verdicts == ["good", "bad", None, None] and one.rewards == [1.0, 0.0, -0.1, -0.1]
    assert one.turn.label == one.label == "good" and one.turn.judge_reward == pytest.approx(0.8 / 4)


def answered(chat, texts, index=0, label="good"):
    """A judged turn, the first of a scripted episode, with these answers to its question."""
    question = Question(index, scripted(chat), 0, label, [5, 6, 7])
    question.answers = [Response(chat.encode(text) + chat.end_ids, [-0.5, -0.25], False)
                        for text in texts]
    judge.write_verdicts(question, [judge.parse_verdict(text, "plain") for text in texts])
    return question


def test_samples_by_hand(chat):
    """Rewards 1, 0, 1, -0.1: mean 0.475. Two equal answers are one sample of count 2."""
    made = judge.samples([answered(chat, ["good", "bad", "good", "jump"], index=7)])
    end = chat.end_ids
    assert [s.ids for s in made] == [[5, 6, 7] + chat.encode(t) + end for t in ("good", "bad", "jump")]
    assert [s.count for s in made] == [2, 1, 1]
    assert [s.advantage[-1] for s in made] == pytest.approx([0.525, -0.475, -0.575])
    for s in made:
        assert s.sampled == [False] * 3 + [True] * 2
        assert s.advantage[:3] == [0.0] * 3 and s.advantage[3] == s.advantage[4]
        assert s.logprob_old == [0.0] * 3 + [-0.5, -0.25] and s.kind == "judge"
    assert sum(s.count * s.advantage[-1] for s in made) == pytest.approx(0.0)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("texts", [["good"] * 8, ["bad"] * 8, ["jump"] * 7, ["jump", "left", "look"]])
def test_equal_rewards_have_exactly_zero_advantage(chat, texts, normalize_std):
    """The floating-point mean of seven times -0.1 is not -0.1."""
    assert all(not any(s.advantage) for s in judge.samples([answered(chat, texts)], normalize_std))


def test_each_question_has_its_own_std(chat):
    judged = [answered(chat, ["good", "bad"]), answered(chat, ["good"] * 3 + ["bad"], index=1)]
    made = judge.samples(judged, normalize_std=True)
    assert [s.advantage[-1] for s in made] == pytest.approx([1, -1, 3**-0.5, -(3**0.5)], abs=1e-5)
    assert [s.advantage[-1] for s in judge.samples(judged)] == [0.5, -0.5, 0.25, -0.75]


def test_answers_share_the_tokens_of_their_episode(chat):
    judged = questions_by(chat)
    for question in judged:
        question.answers = [Response(chat.encode(text), [-0.5], False) for text in ("good", "bad")]
        judge.write_verdicts(question, ["good", "bad"])
    made, episode = judge.samples(judged), judged[0].episode
    policy, = batching.samples_of(episode)
    assert {sample.episode for sample in made} == {episode.index}
    tree = batching.PrefixTree([policy, *made])
    for sample, columns in zip(made, tree.columns[1:], strict=True):
        n_shared = len(sample.turns[0].prompt_ids) + len(sample.turns[0].response_ids)
        assert columns[:n_shared] == tree.columns[0][:n_shared]
        assert columns[-1] not in tree.columns[0]
    n_question = len(chat.message(judge.QUESTION["plain"]))
    assert len(tree.ids) <= len(policy.ids) + (n_question + 2) * len(judged)


def test_merged_answers_have_the_gradient_of_unmerged_ones(model, chat):
    judged = questions_by(chat)
    judge.answer_questions(model, chat, judged, 8, Sampling(max_response_tokens=2), seed=1, n_slots=64)
    apart = []
    for one in judged:
        mean = sum(one.rewards) / 8
        apart += [batching.sample_of(one.prompt_ids, a.ids, r - mean, 0, a.logprob, kind="judge")
                  for a, r in zip(one.answers, one.rewards)]
    merged = judge.samples(judged)
    assert len(merged) < len(apart) == 48 == sum(s.count for s in merged)
    gradients, metrics = [], []
    for samples in (merged, apart):
        recorder = Recorder(model)
        metrics.append(update.update(model, recorder, samples, update.Objective(max_grad_norm=0.0), lr=0.0))
        gradients.append(recorder.gradient)
    assert_same(*gradients)
    assert metrics[0]["judge/tokens"] == metrics[1]["judge/tokens"]
    assert metrics[0]["judge/loss"] == pytest.approx(metrics[1]["judge/loss"], abs=1e-6)
    assert metrics[0]["judge/logprob_gap_max_nats"] < 1e-4        # the sampled tokens are the trained ones


def test_demonstrations_are_the_correct_answers(chat):
    judged = questions_by(chat, 3)
    for one, sample in zip(judged, judge.demonstrations(chat, judged)[0], strict=True):
        answer = chat.encode(one.label) + chat.end_ids
        assert sample.ids == one.prompt_ids + answer
        assert sample.advantage == [0.0] * len(one.prompt_ids) + [1.0] * len(answer)
        assert sample.logprob_old is None and sample.kind == "judge" and any(sample.advantage)


def test_a_large_models_text_is_the_answer_if_its_verdict_is_correct(tokenizer):
    """With its reasoning; if it is wrong, too long or contains a stop token, the bare verdict is imitated."""
    chat = Chat(tokenizer, "think")
    episode, labels = scripted(chat), ("good", "bad", "bad", "good", "good")
    judged = [Question(i, episode, i, label, [7, 8]) for i, label in enumerate(labels)]
    written = [" It was near. <judge>good</judge>\n", "<judge>good</judge>",
               "<think>Hm.</think> No. <judge>bad</judge>", "<think><|im_end|></think><judge>good</judge>",
               None]
    samples, n_written = judge.demonstrations(chat, judged, written, 60)
    texts = [tokenizer.decode(s.ids[2:]) for s in samples]
    assert n_written == 2
    assert texts == ["It was near. <judge>good</judge><|im_end|>", "<judge>bad</judge><|im_end|>",
                     "<think>Hm.</think> No. <judge>bad</judge><|im_end|>",
                     *["<judge>good</judge><|im_end|>"] * 2]
    short, _ = judge.demonstrations(chat, judged, written, 12)
    assert tokenizer.decode(short[0].ids[2:]) == "<judge>good</judge><|im_end|>"


@pytest.mark.slow
def test_labels_of_episodes_that_the_model_played(model, chat):
    episodes = rollout.play(model, chat, [Corridor() for _ in range(8)], make_specs(8, 6),
                            Sampling(max_response_tokens=3), 6, 400, on_truncation="invalid")
    for index, episode in enumerate(episodes):
        episode.index = index
    places = judge.candidates(episodes, "dense", 400, envs.Environment())
    labels = Counter(label for _, _, label in places)
    assert labels["good"] and labels["bad"]
    for e, t, label in places:
        assert label == "good" or episodes[e].turns[t].anchor in turn_labels.anchors(episodes[e])[t + 1:]
        assert label == "bad" or (episodes[e].won and episodes[e].turns[t].valid)


# A value head instead of generated verdicts

def test_value_samples_end_with_the_judged_response(chat):
    judged, (won, lost) = questions_of_two_episodes(chat)
    made, turns = judge.value_samples(judged), [won.turns[10], lost.turns[5], won.turns[1]]
    assert [s.ids for s in made] == [turn.prompt_ids + turn.response_ids for turn in turns]
    assert [(s.label, s.episode) for s in made] == [(1.0, 0), (0.0, 0), (0.0, 1)]
    for s in made:
        assert not any(s.sampled) and not any(s.advantage)
        assert len(s.sampled) == len(s.advantage) == len(s.ids)
        assert (s.kind, s.count, s.logprob_old) == ("judge", 1, None)


def test_value_samples_are_in_the_order_of_the_judged_turns(chat):
    """So that each probability is logged with its own turn."""
    judged = judge.questions(chat, [scripted(chat)], [(0, t, "bad") for t in (3, 0, 7, 1)], ENVIRONMENT)
    made = judge.value_samples(judged)
    assert [j.prompt_ids[:len(s.ids)] for j, s in zip(judged, made, strict=True)] == [s.ids for s in made]


def test_a_value_heads_probabilities_are_logged_like_verdicts(chat):
    """label, oracle, probability: good good .9, good good .4, bad good .6, bad bad .1."""
    chosen = [(0, t, label) for t, label in ((7, "good"), (4, "good"), (0, "bad"), (5, "bad"))]
    judged = judge.questions(chat, [scripted(chat)], chosen, ENVIRONMENT)
    judge.write_value_verdicts(judged, [0.9, 0.4, 0.6, 0.1])
    rows = judge.verdict_records(judged)
    assert [(r.verb, r.share_good, r.verdicts) for r in rows] == [
        ("take", 0.9, ("good",)), ("go", 0.4, ("bad",)), ("go", 0.6, ("good",)), ("go", 0.1, ("bad",))]
    assert [r.oracle for r in rows] == ["good", "good", "good", "bad"]
    assert [j.rewards for j in judged] == [[1.0], [0.0], [0.0], [1.0]]
    assert [j.turn.verdicts for j in judged] == [["good"], ["bad"], ["good"], ["bad"]]
    got = judge.metrics(rows)
    assert (got["judge/accuracy_good"], got["judge/accuracy_bad"], got["judge/reward"]) == (0.5, 0.5, 0.5)
    assert got["judge/auc"] == pytest.approx(pairs_auc([(0.9, 1), (0.4, 1), (0.6, 0), (0.1, 0)]))
    assert got["judge/auc_oracle"] == got["judge/auc_oracle_within_verbs"] == 1.0
    assert got["judge/unreadable_frac"] == 0.0 and "judge/variance_frac" not in got


# Metrics

def row(label, oracle, verb, verdicts):
    rewards = tuple(-0.1 if verdict is None else float(verdict == label) for verdict in verdicts)
    return VerdictRecord(label, oracle, verb, tuple(verdicts), rewards)


ROWS = [row("good", "good", "move", ["good", "good", "good", "good"]),       # share_good 1
        row("good", None, "go", ["good", "bad", "bad", None]),               # 1/3
        row("bad", "good", "go", ["bad", "bad", "good", "good"]),            # 1/2
        row("bad", "bad", "go", ["bad", "bad", "bad", "bad"]),               # 0
        row("bad", "bad", "go", [None, None, None, None]),                   # 1/2: none readable
        row("good", "bad", "move", ["good", "good", "bad", "bad"])]          # 1/2


def pairs_auc(pairs):
    """Share of (positive, negative) pairs in order, ties half."""
    wins = [1.0 if p > n else 0.5 if p == n else 0.0
            for p, n in itertools.product([s for s, y in pairs if y], [s for s, y in pairs if not y])]
    return sum(wins) / len(wins)


def test_metrics_by_hand():
    got = judge.metrics(ROWS)
    assert [r.share_good for r in ROWS] == pytest.approx([1, 1 / 3, 1 / 2, 0, 1 / 2, 1 / 2])
    assert got["judge/turns"] == 6
    assert got["judge/accuracy_good"] == pytest.approx((4 + 1 + 2) / 12)
    assert got["judge/accuracy_bad"] == pytest.approx((2 + 4 + 0) / 12)
    assert got["judge/balanced_accuracy"] == pytest.approx((7 / 12 + 6 / 12) / 2)
    labels = [(1, 1), (1 / 3, 1), (1 / 2, 0), (0, 0), (1 / 2, 0), (1 / 2, 1)]
    assert got["judge/auc"] == pytest.approx(pairs_auc(labels))
    oracle = [(1, 1), (1 / 2, 1), (0, 0), (1 / 2, 0), (1 / 2, 0)]
    assert got["judge/auc_oracle"] == pytest.approx(pairs_auc(oracle))
    assert got["judge/accuracy_good_oracle"] == pytest.approx((4 + 2) / 8)
    assert got["judge/accuracy_bad_oracle"] == pytest.approx((4 + 0 + 2) / 12)
    assert got["judge/unreadable_frac"] == pytest.approx(5 / 24)
    assert got["judge/variance_frac"] == pytest.approx(3 / 6)
    assert got["judge/reward"] == pytest.approx((4 + (1 - 0.1) + 2 + 4 - 0.4 + 2) / 24)


def test_auc_within_verbs_by_hand():
    """move: one pair, 1 > 1/2. go: two pairs, 1/2 > 0 and the tie 1/2 = 1/2, so 1.5 of 2."""
    oracle = [r.oracle for r in ROWS]
    assert judge.auc(ROWS, oracle, within_verbs=True) == pytest.approx((1 + 1.5) / 3)


def test_a_judge_that_only_knows_the_verb_has_auc_one_half_within_verbs():
    """It calls every move good and every go bad: AUC 0.9 over all turns."""
    rows = [row("good", o, "move", ["good"] * 4) for o in ["good"] * 9 + ["bad"]]
    rows += [row("bad", o, "go", ["bad"] * 4) for o in ["bad"] * 9 + ["good"]]
    got = judge.metrics(rows)
    assert got["judge/auc_oracle"] == pytest.approx(0.9) and got["judge/auc_oracle_within_verbs"] == 0.5


def test_metrics_without_turns_or_without_a_class():
    assert judge.metrics([]) == {"judge/turns": 0}
    one_class = judge.metrics([replace(r, oracle=None) for r in ROWS if r.label == "bad"])
    for key in ("accuracy_good", "balanced_accuracy", "auc", "auc_oracle", "auc_oracle_within_verbs"):
        assert math.isnan(one_class[f"judge/{key}"])
    assert one_class["judge/accuracy_bad"] == pytest.approx(0.5)


def test_verdict_records_name_the_verb(chat):
    episode = scripted(chat, [("take mug 1 from countertop 1", "x"), (None, NOOP)], won=False)
    judged = judge.questions(chat, [episode], [(0, 0, "good"), (0, 1, "good")], ENVIRONMENT)
    for question in judged:
        question.turn.oracle = "bad"
        judge.write_verdicts(question, ["good", None])
    rows = judge.verdict_records(judged)
    assert rows == [VerdictRecord("good", "bad", verb, ("good", None), (1.0, -0.1)) for verb in ("take", "")]
    assert torch.tensor([r.share_good for r in rows]).tolist() == [1.0, 1.0]


LONG = 200_000
WRITTEN = {"letters": "a" * LONG, "spaces": " " * LONG, "opened": "<think>" * (LONG // 7),
           "closed": "</think>" * 9999, "thoughts": "<think></think> " * 9999, "tags": "<action>" * 9999,
           "judge": "<judge>" + " " * LONG,
           "angles": "<" * LONG, "lines": "a\n" * LONG, "words": "a 1 " * LONG, "stops": "." * LONG,
           "planned": "<planning>" + " " * LONG + "<action>", "almost": "x" * LONG + "</judge>"}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_no_text_takes_long_to_parse(chat, tokenizer, text):
    """A regular expression that backtracks would take hours for these; each of ours takes milliseconds."""
    started = time.monotonic()
    for style in ("plain", "think"):
        for part in (text, text[:judge.LONGEST_ANSWER]):         # longer ones reach no pattern
            assert judge.parse_verdict(part, style) is None
    for style in ("plain", "tags"):
        Chat(tokenizer, style).parse(text)
    assert len(correction.plain_text(text)) <= judge.LONGEST_ANSWER
    for pattern in (chat_module.THOUGHT_ACTION, chat_module.TAG_ACTION, chat_module.SMALL_TAG_ACTION):
        pattern.fullmatch(text)
    ENVIRONMENT.oracle([INTRO, NOOP, NOOP], [text, text])
    assert time.monotonic() - started < 5


def test_a_verdict_after_several_thoughts_is_parsed():
    text = "so <think>a < b</think> then <think>c</think> <judge> good\n</judge> "
    assert judge.parse_verdict(text, "think") == "good"
    assert judge.parse_verdict("<judge>bad</judge>", "think") == "bad"
    assert judge.parse_verdict("<think>x</think><judge>bad</judge> or <judge>good</judge>", "think") is None
    assert judge.parse_verdict("good" + " " * judge.LONGEST_ANSWER, "plain") is None


def test_a_written_answer_is_imitated_up_to_the_longest_length(tokenizer):
    chat, text = Chat(tokenizer, "think"), "It was near. <judge>good</judge>"
    judged, n = [Question(0, scripted(chat), 0, "good", [7, 8])], len(chat.encode(text) + chat.end_ids)
    assert [judge.demonstrations(chat, judged, [text], longest)[1] for longest in (n, n - 1)] == [1, 0]
