"""Proves which of the expert's episodes the cold start imitates, and with which weights, tags and steps.

    python -m pytest tests/core/test_cold_start.py

That a model learns from it: tests/core/test_train.py.
"""

import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cold_start
import config
import correction
import judge
import rollout
from batching import Sample
from correction import IRRELEVANT, KINDS
from envs import Demonstration, EpisodeLost, Reply, Task, household
from envs.alfred import expert, rooms
from envs.alfred.game import Game
from infra import plugins
from infra.streams import DEMONSTRATIONS, stream
from lm import model as decoder
from lm.chat import TAGS, Chat
from lm.engine import Response
from rollout import EpisodeSpec

NOOP, SEARCHES = household.Environment.noop_message, household.Environment.search_verbs
START, CABINET, DRAWER = "A room.", "You arrive at cabinet 1.", "You arrive at drawer 1."
POSSIBLE = ["go to cabinet 1", "go to drawer 1", "look", "open cabinet 1", "take mug 1 from drawer 1"]
# command, its reply, whether it is an injected mistake, and its tag by rule
SCRIPT = [("go to cabinet 1", CABINET, False, "planning"),
          ("open cabinet 1", "It is open.", False, "explore"),
          ("dance", NOOP, True, "monitor"),
          ("go to drawer 1", DRAWER, False, "reflection"),           # a new search, but after a refused turn
          ("go to cabinet 1", CABINET, True, "monitor"),             # an earlier search again
          ("dance", NOOP, False, "monitor"),
          ("dance", NOOP, False, "reflection"),
          ("look", "You are facing the cabinet 1.", False, "reflection"),
          ("go to drawer 1", DRAWER, False, "monitor"),
          ("take mug 1 from drawer 1", "You pick it up.", False, "monitor")]


def scripted(lines=SCRIPT, won=True, start=START):
    replies = [Reply(start, POSSIBLE, False, False)]
    replies += [Reply(answer, POSSIBLE, won and line == len(lines) - 1, won and line == len(lines) - 1)
                for line, (_, answer, *_) in enumerate(lines)]
    return Demonstration(replies, [line[0] for line in lines], [line[2] for line in lines])


def never():
    """A `stop` of a run that is not asked to stop."""


def make_spec(instruction=""):
    return EpisodeSpec(Task("room", "train", "walk", None), 0, 0, 0, instruction)


def replay(chat, demonstration, spec=None, history=0, thoughts=None):
    return cold_start.replay(chat, spec or make_spec(), demonstration, history, SEARCHES, thoughts)


@pytest.fixture(scope="module")
def demonstrations():
    """[(task, demonstration)] of an expert that errs often, on one generated task of each type."""
    tasks = [rooms.task("train", i, (kind,)) for i, kind in enumerate(rooms.ALL_TYPES)]
    prior = expert.learn_prior([rooms.task("train", i, rooms.ALL_TYPES) for i in range(100, 200)])
    return [(task, expert.demonstrate(Game(), task, prior, seed, 0.3)) for seed, task in enumerate(tasks)]


@pytest.fixture(params=["plain", "tags"])
def styled(request, tokenizer):
    return Chat(tokenizer, request.param)


# Replays

@pytest.mark.parametrize("history", [0, 2])
def test_a_replay_equals_the_live_episode(styled, demonstrations, history):
    valid = set()
    for task, demonstration in demonstrations:
        spec = EpisodeSpec(task, 3, 0)
        replayed = replay(styled, demonstration, spec, history)
        live = rollout.Conversation(spec, Game(), styled, history).start()
        for command, turn in zip(demonstration.commands, replayed.turns, strict=True):
            ids = styled.respond(command, turn.tag or "monitor")
            live.act(Response(ids, [], False), len(demonstration.commands), 10**6)
        assert replayed == live.episode                           # prompts, responses, valid flags, outcome
        valid |= {turn.valid for turn in replayed.turns}
    assert valid == {True, False}                                 # both were compared


def test_a_replay_is_the_demonstration_as_a_transcript(chat, demonstrations):
    for task, demonstration in demonstrations:
        episode = replay(chat, demonstration, EpisodeSpec(task, 3, 0, 7))
        text = f"<|user|>{demonstration.replies[0].observation}<|assistant|>"
        for t, (turn, command) in enumerate(zip(episode.turns, demonstration.commands, strict=True)):
            before, after = demonstration.replies[t:t + 2]
            assert chat.tokenizer.decode(turn.prompt_ids) == text
            text += f"{command}<|im_end|>"
            assert chat.tokenizer.decode(turn.prompt_ids + turn.response_ids) == text
            text += f"<|user|>{after.observation}<|assistant|>"
            assert (turn.observation, turn.action) == (before.observation, command)
            assert turn.valid == (command in before.admissible)
        assert episode.won == demonstration.won and not episode.truncated and not episode.overflowed
        assert (episode.group, episode.index, episode.task) == (3, 7, task)
        assert episode.final_observation == demonstration.replies[-1].observation


def test_valid_is_taken_from_an_engine_that_reports_it(chat):
    """ScienceWorld lists templates, which contain no literal command."""
    replies = [Reply("A room.", ["open OBJ"], False, False, ("door",)),
               Reply("The door is open.", ["open OBJ"], False, False, ("door",), 40.0, True),
               Reply("No known action.", ["open OBJ"], True, True, ("door",), 100.0, False)]
    episode = replay(chat, Demonstration(replies, ["open door", "open sky"], [False, False]))
    assert [turn.valid for turn in episode.turns] == [True, False]
    assert episode.won and episode.score_100 == 100.0


def test_a_demonstrated_command_has_to_be_read_as_it_was_given(tokenizer):
    """Else the game's replies, of which a response without a command takes none, would come a turn late."""
    chat = Chat(tokenizer, "think", environment=household.Environment())
    chat.small = chat.bare = False
    replies = [Reply(text, [], text == "d", text == "d") for text in "abcd"]
    with pytest.raises(ValueError, match="the response that demonstrates 'say <b>' is read as None"):
        replay(chat, Demonstration(replies, ["say x", "say <b>", "say y"], [False] * 3))


# Tags by rule

def test_tags_of_the_script(tokenizer):
    episode = replay(Chat(tokenizer, "tags"), scripted())
    assert [turn.tag for turn in episode.turns] == [line[3] for line in SCRIPT]


def test_the_environments_search_verbs_decide_the_tag(tokenizer):
    spec, demonstration = make_spec(), scripted()
    for searches, tag in ((("open",), "explore"), ((), "monitor")):
        episode = cold_start.replay(Chat(tokenizer, "tags"), spec, demonstration, 0, searches)
        assert [turn.tag for turn in episode.turns] == ["planning", tag, *(line[3] for line in SCRIPT[2:])]


def test_tagged_demonstrations_parse_back_to_their_tags(tokenizer, demonstrations):
    chat, found = Chat(tokenizer, "tags"), set()
    for task, demonstration in demonstrations:
        episode = replay(chat, demonstration, EpisodeSpec(task, 0, 0))
        for turn, command in zip(episode.turns, demonstration.commands, strict=True):
            assert turn.response.startswith(f"<{turn.tag}>") and turn.action == command
        found |= {turn.tag for turn in episode.turns}
    assert found == set(TAGS)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["think", "tags"])
def test_a_large_models_demonstrations_parse_back(qwen_tokenizer, style):
    chat = Chat(qwen_tokenizer, style)
    thoughts = [f"Thought {t}." for t in range(len(SCRIPT) - 1)] + [None]
    episode = replay(chat, scripted(), thoughts=thoughts)
    assert [turn.action for turn in episode.turns] == [line[0] for line in SCRIPT]
    assert [turn.tag for turn in episode.turns] == [line[3] if style == "tags" else None for line in SCRIPT]
    for turn, (command, _, _, tag), thought in zip(episode.turns, SCRIPT, thoughts):
        mark = tag if style == "tags" else "think"
        thought = thought or f"The next thing to do for the task is: {command}."
        assert turn.response == f"<{mark}>{thought}</{mark}><action>{command}</action>"


# Weights of the turns

def weights_of(episode):
    return [turn.advantage for turn in episode.turns]


@pytest.mark.parametrize("instruction, left_out", [
    ("", []), (KINDS["refused"], [2]), (KINDS["revisited"], [4]), (KINDS["repeated"], []),
    (f"{KINDS['revisited']} {KINDS['refused']}", [2, 4]),
    (f"{IRRELEVANT['refused']} {IRRELEVANT['revisited']}", [])])
def test_with_an_instruction_only_the_mistakes_that_it_names_have_weight_0(chat, instruction, left_out):
    """Turns 5, 6 and 8 are inadmissible or revisits too, but the expert chose them."""
    episode = replay(chat, scripted(), make_spec(instruction))
    cold_start.write_imitation_weights(episode, scripted().mistakes, instruction)
    weights = weights_of(episode)
    assert [t for t, weight in enumerate(weights) if weight == 0] == left_out and set(weights) <= {0.0, 1.0}


# Which demonstrations are kept

def make_run(chat, *flags, ranks=1, rank=0, script=(), endpoint=None, **changes):
    """A stand-in for a Run, as far as the cold start uses one; it records optimizer steps and log rows.

    script: the expert's demonstrations, one after the other (default: the real expert's). changes: settings
    without a flag.
    """
    flags = ("--max-turns", 30, "--context", 4096, "--max-response-tokens", 64, "--cold-start-batch", 2,
             *flags)
    settings = replace(config.parse_or_exit([str(flag) for flag in flags]), **changes)
    model, rows = decoder.Model(decoder.ModelConfig(9, 8, 8, 1, 1, 1, 8)), []
    model.steps = []
    if script:
        settings.environment.expert = lambda games: Scripted(script)

    return SimpleNamespace(
        model=model, config=settings, environment=settings.environment,
        chat=chat, ranks=SimpleNamespace(rank=rank, world_size=ranks),
        games=[Game()], endpoint=endpoint, optimizer=None, log=rows.append, steps=model.steps, rows=rows,
        should_stop=False, stop_if_asked=lambda state: None, save=lambda state: None, cold_progress={},
        log_endpoint=lambda: None, warn_once=lambda kind, message: rows.append({"warning": message}),
        endpoint_labels=lambda episodes, n, seed, max_tokens: None)


@pytest.fixture(autouse=True)
def recorded_steps(monkeypatch):
    """For a model with a list `steps`, append (samples, learning rate) to it instead of taking the step."""
    def step(model, optimizer, samples, objective, lr, **options):
        if not hasattr(model, "steps"):
            return update(model, optimizer, samples, objective, lr, **options)
        model.steps.append((samples, lr))
        return {"policy/nll_nats": 1.0, "judge/nll_nats": 2.0, "policy/grad_norm": 3.0}

    update = cold_start.update.update
    monkeypatch.setattr(cold_start.update, "update", step)


class Scripted:
    """A stand-in for the expert; EpisodeLost in its script is an engine that dies and is restarted."""

    def __init__(self, script):
        self.script, self.restarts = iter(script), 2

    def show(self, task, seed, mistake_rate, max_turns):
        demonstration = next(self.script)
        if isinstance(demonstration, EpisodeLost):
            self.restarts += 1
            raise demonstration
        return demonstration


def starts(episodes):
    return [episode.turns[0].observation for episode in episodes]


def test_lost_demonstrations_are_not_kept(chat):
    script = [scripted(won=won, start=f"Room {i}.") for i, won in enumerate([True, False, True, False])]
    episodes = cold_start.demonstrate(make_run(chat, script=script), 0, 4, 0.05)
    assert starts(episodes) == ["Room 0.", "Room 2."] and all(episode.won for episode in episodes)
    assert [weights_of(e) for e in episodes] == [[0.0 if line[2] else 1.0 for line in SCRIPT]] * 2
    assert [episode.index for episode in episodes] == [0, 1]         # consecutive


def tokens(turn):
    return len(turn.prompt_ids) + len(turn.response_ids)


@pytest.mark.parametrize("spare, kept", [(0, ["short", "long"]), (-1, ["short"])])
def test_demonstrations_that_do_not_fit_the_context_are_not_kept(chat, spare, kept):
    script = [scripted(SCRIPT[-1:], start="short"), scripted(start="long")]
    longest = tokens(replay(chat, script[1]).turns[-1])
    run = make_run(chat, "--context", longest + spare, script=script)
    assert starts(cold_start.demonstrate(run, 0, 2, 0.05)) == kept


def test_with_a_history_window_every_turn_must_fit_not_only_the_last(chat):
    """In a re-rendered conversation the longest prompt may be in the middle."""
    middle = [("look", "a long text " * 20, False, ""), *[("look", "short", False, "")] * 4]
    demonstration = scripted(middle)
    lengths = [tokens(turn) for turn in replay(chat, demonstration, history=1).turns]
    assert max(lengths) > lengths[-1] + 100
    run = make_run(chat, "--context", max(lengths), "--history", 1, script=[demonstration])
    assert len(cold_start.demonstrate(run, 0, 1, 0.05)) == 1
    run = make_run(chat, "--context", max(lengths) - 1, "--history", 1, script=[demonstration])
    message = f"--demonstrations=1: .* --context={max(lengths) - 1} .*'too long': 1"
    with pytest.raises(ValueError, match=message):
        cold_start.demonstrate(run, 0, 1, 0.05)


def test_without_a_demonstration_for_the_judge_no_question_is_shown(chat):
    """The policy's are needed, these are not: the policy is trained by then."""
    run = make_run(chat, "--judge-demonstrations", 2, script=[scripted(won=False)] * 2)
    assert cold_start.judge_samples(run, never) == []
    assert run.rows[0]["kept"] == 0
    assert run.rows[1]["warning"].startswith("--judge-demonstrations=2: none was won in --max-turns=30")


def test_the_outcomes_of_the_demonstrations_are_logged(chat):
    """Kept, not won, lost: an engine that dies costs one demonstration and no more."""
    run = make_run(chat, script=[scripted(start="a"), scripted(won=False), EpisodeLost("gone"),
                                 replace(scripted(start="b"), tries=2)])
    assert starts(cold_start.demonstrate(run, 0, 4, 0.05)) == ["a", "b"]
    assert run.rows == [{"phase": "demonstrations", "asked": 4, "kept": 2, "tries 1": 2, "not won": 1,
                         "lost": 1, "tries 2": 1, "restarts": 1}]


def test_few_kept_demonstrations_are_a_warning(chat):
    """Fewer than half: it says why, which task types have none, and which flags may help."""
    tasks = config.parse_or_exit([]).environment.train_tasks("all", 0, 7)
    long = scripted([("look", "a long text " * 400, False, "")] * 20)
    script = [scripted(won=False)] * 2 + [scripted(), EpisodeLost("gone"), long, scripted(won=False)]
    run = make_run(chat, "--context", 2048, script=[*script, scripted()])
    assert len(cold_start.demonstrate(run, 0, 7, 0.05)) == 2
    missing = {task.task_type for task in tasks} - {tasks[i].task_type for i in (2, 6)}
    assert len(missing) > 1
    (warning,) = (row["warning"] for row in run.rows if "warning" in row)
    assert warning == ("--demonstrations=7: only 2 kept; 3 not won, 1 too long, 1 lost; none of "
                       f"{', '.join(sorted(missing))}; a larger --max-turns (now 30) or --context (now "
                       "2048) may help")


def test_a_demonstrated_response_that_the_model_cannot_give_is_a_warning(chat):
    """Once, with the longest of those that are kept: not of the episode that is lost here."""
    longer = scripted([("look" * n, "A room.", False, "") for n in (9, 30)])
    lost = scripted([("look" * 50, "A room.", False, "")], won=False)
    longest = len(chat.respond("look" * 30))
    assert longest > len(chat.respond("look" * 9)) and longest > max(
        len(chat.respond(line[0])) for line in SCRIPT)
    for limit, warns in ((longest, False), (longest - 1, True)):
        run = make_run(chat, "--max-response-tokens", limit, script=[scripted(), longer, lost])
        cold_start.demonstrate(run, 0, 3, 0.05)
        assert [row["warning"] for row in run.rows if "warning" in row] == warns * [
            f"--max-response-tokens={limit}: a demonstration has a response of {longest} tokens; such a "
            "response cannot be given by the model"]


@pytest.mark.parametrize(("script", "required", "expected"), [
    ([scripted(), scripted(), scripted(won=False)], True, ""),
    ([scripted(), scripted(won=False)], True, ""),                             # half
    ([scripted(), *[EpisodeLost("gone")] * 2], True, "--demonstrations=3: only 1 kept; 2 lost"),
    ([scripted(), *[scripted(won=False)] * 2], False, "--judge-demonstrations=3: only 1 kept; 2 not won"),
])
def test_the_warning_names_the_flag_and_what_applies(chat, script, required, expected):
    run = make_run(chat, script=script)
    cold_start.demonstrate(run, 0, len(script), 0.05, required)
    warnings = [row["warning"] for row in run.rows if "warning" in row]
    assert len(warnings) == bool(expected) and all(text.startswith(expected) for text in warnings)
    assert all(("--max-turns" in text) == ("not won" in text) and "--context" not in text
               for text in warnings)


@pytest.mark.slow
def test_the_experts_demonstrations_are_fixed_by_seed_and_index(chat):
    """A task's demonstration does not depend on which others are made; other indices have other ones."""
    run = make_run(chat)
    five, last_two = cold_start.demonstrate(run, 100, 5, 0.3), cold_start.demonstrate(run, 103, 2, 0.3)
    assert [e.turns for e in five[3:]] == [e.turns for e in last_two]           # with their weights
    assert len(five) == 5 == len(set(starts(five)))
    assert {0.0, 1.0} == {weight for episode in five for weight in weights_of(episode)}
    careful = cold_start.demonstrate(run, 100, 3, 0.0)
    assert {1.0} == {weight for episode in careful for weight in weights_of(episode)}
    assert all(episode.won for episode in careful)


@pytest.mark.slow
def test_demonstrations_are_of_the_requested_types(chat):
    for kind, allowed in (("part", rooms.TRAINED_TYPES), ("all", rooms.ALL_TYPES)):
        episodes = cold_start.demonstrate(make_run(chat, cold_start_types=kind), 0, 30, 0.0)
        types = {episode.task.task_type for episode in episodes}
        assert types <= set(allowed) and (types <= set(rooms.TRAINED_TYPES)) == (kind == "part")


@pytest.mark.slow
def test_instructions_do_not_depend_on_what_an_expert_draws_from_its_seed(chat, monkeypatch):
    """Else those with an instruction would have no first mistake."""
    drawn, run = [], make_run(chat, "--instructions")
    monkeypatch.setattr(correction, "random_instruction", lambda rng: drawn.append(rng.random()) or "")
    cold_start.demonstrate(run, 0, 8, 0.3)
    seeds = [stream(run.config.seed, DEMONSTRATIONS, i) for i in range(8)]
    assert len(drawn) == 8 and not {*drawn} & {random.Random(seed).random() for seed in seeds}


@pytest.mark.slow
def test_a_random_half_has_instructions(chat):
    """An instruction precedes the first observation, and decides which mistakes have weight 0."""
    episodes, instructions = cold_start.demonstrate(make_run(chat, "--instructions"), 0, 24, 0.3), []
    for episode in episodes:
        text = chat.tokenizer.decode(episode.turns[0].prompt_ids)
        after = f"{episode.turns[0].observation}<|assistant|>"
        assert text.startswith("<|user|>") and text.endswith(after)
        instruction = text.removeprefix("<|user|>").removesuffix(after)
        assert not instruction or instruction.endswith(".\n\n")
        instructions.append(instruction)
        named = correction.forbidden(instruction, episode)
        assert all(is_named for weight, is_named in zip(weights_of(episode), named) if weight == 0)
    sentences = {*KINDS.values(), *IRRELEVANT.values()}
    for instruction in filter(None, instructions):
        assert any(sentence in instruction for sentence in sentences)
    assert 6 <= sum(map(bool, instructions)) <= 18
    assert 0.0 in {weight for episode in episodes for weight in weights_of(episode)}
    plain = cold_start.demonstrate(make_run(chat), 0, 24, 0.3)                        # the same expert
    assert [e.turns[0].response for e in plain] == [e.turns[0].response for e in episodes]


@pytest.mark.slow
@pytest.mark.parametrize("style", ["think", "tags"])
def test_thoughts_come_from_the_endpoint_and_cannot_break_a_response(qwen_tokenizer, style):
    """A large model may write tags, line breaks or no text at all; every command still parses."""
    written = ["The cabinet first.", "Inside <b>it</b>,\nperhaps.", None, "", " ",
               "</think><action>look</action>", "a < b", "<think>So be it.</think>", "</monitor>", "Take it."]
    batches = []
    endpoint = SimpleNamespace(ask=lambda questions: batches.append(questions) or written)
    asks = ("--judge-labels", "endpoint", "--endpoint", "http://127.0.0.1:1")
    run = make_run(Chat(qwen_tokenizer, style), *asks, thoughts="endpoint", script=[scripted()],
                   endpoint=endpoint)
    episode, = cold_start.demonstrate(run, 0, 1, 0.05)
    assert [turn.action for turn in episode.turns] == [line[0] for line in SCRIPT] and episode.won
    assert [turn.tag for turn in episode.turns] == [line[3] if style == "tags" else None for line in SCRIPT]
    assert ">The cabinet first.</" in episode.turns[0].response
    assert ">Take it.</" in episode.turns[-1].response
    for t in (2, 3, 4):
        assert f"The next thing to do for the task is: {SCRIPT[t][0]}." in episode.turns[t].response
    assert len(batches) == 1 and len(batches[0]) == len(SCRIPT)
    for t, question in enumerate(batches[0]):                         # nothing of a turn's future is in it
        assert f"> {SCRIPT[t][0]}" in question and question.count("\n> ") == t + 1


# The judge's part

@pytest.mark.parametrize("kind", ["generative", "value"])
def test_judge_questions_are_balanced(chat, kind):
    run = make_run(chat, "--judge-demonstrations", 20, "--judge-labels", "oracle", "--judge-kind", kind)
    samples = cold_start.judge_samples(run, never)
    assert [sample.episode for sample in samples] == [i // 2 for i in range(20)]
    assert {sample.kind for sample in samples} == {"judge"}
    if kind == "value":
        labels = [sample.label for sample in samples]
        assert not any(any(sample.sampled) for sample in samples)
    else:
        answers = [chat.tokenizer.decode([i for i, sampled in zip(s.ids, s.sampled) if sampled])
                   for s in samples]
        labels = [{"good<|im_end|>": 1.0, "bad<|im_end|>": 0.0}[answer] for answer in answers]
        assert all(sample.logprob_old is None for sample in samples)
    assert labels == [1.0, 0.0] * 10                                 # good and bad alternate
    logged = run.rows[-1]
    assert (logged["phase"], logged["asked"], logged["kept"]) == ("judge demonstrations", 20, 20)


def test_without_a_turn_of_each_label_the_cold_start_says_that_it_asks_nothing(chat, monkeypatch):
    monkeypatch.setattr(judge, "label_turns", lambda episode, *more: ["good"] * len(episode.turns))
    run = make_run(chat, "--judge-demonstrations", 4)
    assert cold_start.judge_samples(run, never) == []
    (warning,) = (row["warning"] for row in run.rows if "warning" in row)
    assert warning.startswith("--judge-demonstrations=4: no question is shown: of the turns with room")
    assert " and 0 bad" in warning and warning.endswith(", or --judge-demonstrations 0")


@pytest.mark.slow
def test_a_model_that_writes_imitates_the_endpoints_critiques(tokenizer):
    """Reasoning and verdict; the endpoint's question is about the turn whose answer it becomes."""
    batches, chat = [], Chat(tokenizer, "think")
    endpoint = SimpleNamespace(ask=lambda questions: batches.append(questions) or [
        f"Reason {number}. <judge>{('good', 'bad')[number % 2]}</judge>" for number in range(len(questions))])
    run = make_run(chat, "--judge-demonstrations", 20, "--judge-labels", "rule+endpoint", "--context", 99_999,
                   "--endpoint", "http://127.0.0.1:1", endpoint=endpoint, judge_response_tokens=60)
    samples = cold_start.judge_samples(run, never)
    assert samples and len(batches) == 1 and run.rows[-1]["written"] == len(samples) == len(batches[0])
    for number, (sample, question) in enumerate(zip(samples, batches[0])):
        text = tokenizer.decode(sample.ids)
        assert text.endswith(f"Reason {number}. <judge>{('good', 'bad')[number % 2]}</judge><|im_end|>")
        commands = re.findall(r"</think><action>([^<]*)</action><\|im_end\|>", text)
        assert re.findall(r"^> (.*)$", question, re.MULTILINE) == commands


@pytest.mark.parametrize("asks", ["labels", "critiques"])
def test_a_stop_while_the_endpoint_is_asked_leaves_its_missing_answers_unused(tokenizer, monkeypatch, asks):
    class Stopped(Exception):
        pass

    def stop():
        if run.should_stop:
            raise Stopped

    def interrupted(*_):
        run.should_stop = True

    run = make_run(Chat(tokenizer, "think"), "--judge-demonstrations", 4, "--judge-labels", "rule+endpoint",
                   "--context", 99_999, "--endpoint", "http://127.0.0.1:1",
                   endpoint=SimpleNamespace(ask=interrupted), judge_response_tokens=60)
    if asks == "labels":
        run.endpoint_labels = interrupted
    monkeypatch.setattr(judge, "candidates" if asks == "labels" else "demonstrations", None)    # not called
    with pytest.raises(Stopped):
        cold_start.judge_samples(run, stop)


def test_no_judge_demonstrations_no_questions(chat):
    assert cold_start.judge_samples(make_run(chat, "--judge-demonstrations", 0), never) == []


# Steps

ALONE = SimpleNamespace(rank=0, world_size=1)


def make_samples(episodes, pairs, rng):
    """One to three samples per policy episode, and two per judged pair."""
    def sample(episode, k, kind):
        return Sample([episode, k], [False, True], [0.0, 1.0], None, episode, kind)

    samples = [sample(e, k, "policy") for e in range(episodes) for k in range(rng.randint(1, 3))]
    return samples + [sample(p, k, "judge") for p in range(pairs) for k in range(2)]


@pytest.mark.parametrize("episodes, pairs, n", [(12, 4, 4), (11, 7, 3), (5, 0, 2), (3, 9, 1)])
def test_batches_do_not_split_episodes_or_pairs(episodes, pairs, n):
    samples = make_samples(episodes, pairs, random.Random(0))
    batches = cold_start.shuffled_batches(samples, n, torch.Generator().manual_seed(1), ALONE)
    assert len(batches) == n
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    for kind, members in (("policy", episodes), ("judge", pairs)):
        groups = [{s.episode for s in batch if s.kind == kind} for batch in batches]
        assert sum(map(len, groups)) == members                     # no episode is in two
        assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_batches_are_drawn_from_the_generator():
    samples = make_samples(20, 6, random.Random(0))
    first, same, other = ([[s.ids for s in batch] for batch in cold_start.shuffled_batches(
        samples, 5, torch.Generator().manual_seed(seed), ALONE)] for seed in (1, 1, 2))
    assert first == same != other
    assert sum(first, []) != [s.ids for s in samples]


def test_imitation_uses_each_sample_once_an_epoch_and_decays_the_learning_rate(chat):
    run, stops = make_run(chat, "--cold-start-lr", 0.01), []
    samples = make_samples(9, 4, random.Random(1))
    batches = cold_start.batches_of(run, samples, 9, 3)
    cold_start.imitate(run, run.optimizer, batches, len(batches), "stage", 100, 0, stops.append)
    assert len(run.steps) == 12                                                # 9 // 2 steps an epoch
    assert all({s.kind for s in batch} == {"policy", "judge"} for batch, _ in run.steps)
    for epoch in range(3):
        of_epoch = [s for batch, _ in run.steps[4 * epoch:4 * epoch + 4] for s in batch]
        assert sorted(map(id, of_epoch)) == sorted(map(id, samples))
    assert [rate for _, rate in run.steps] == pytest.approx([0.01 * (12 - step) / 12 for step in range(12)])
    orders = [[id(s) for batch, _ in steps for s in batch] for steps in (run.steps[:4], run.steps[4:8])]
    assert orders[0] != orders[1]
    assert [row["step"] for row in run.rows] == [100, 111] and {row["stage"] for row in run.rows} == {"stage"}
    assert stops == [*range(101, 113)]


def test_ranks_split_a_step():
    samples = make_samples(9, 4, random.Random(2))
    alone, *ranks = runs = [make_run(None), make_run(None, ranks=2, rank=0), make_run(None, ranks=2, rank=1)]
    for run in runs:
        batches = cold_start.batches_of(run, samples, 9, 2)
        cold_start.imitate(run, run.optimizer, batches, 8, "stage", 0, 0, lambda step: None)
    for (full, rate), *parts in zip(alone.steps, *[run.steps for run in ranks], strict=True):
        assert sorted(map(id, full)) == sorted(id(s) for batch, _ in parts for s in batch)
        assert [part_rate for _, part_rate in parts] == [rate, rate]
        for kind in ("policy", "judge"):                          # as many episodes and pairs for each rank
            shares = [len({s.episode for s in batch if s.kind == kind}) for batch, _ in parts]
            assert abs(shares[0] - shares[1]) <= 1


@pytest.mark.slow
def test_the_first_stage_trains_the_policy_and_the_second_both(chat):
    run = make_run(chat, "--demonstrations", 8, "--judge-demonstrations", 6, "--judge-labels", "oracle",
                   "--cold-start-epochs", 2, "--judge-epochs", 1)
    cold_start.cold_start(run)
    kinds = [{sample.kind for sample in batch} for batch, _ in run.steps]
    steps = len(kinds) // 3
    assert kinds[:2 * steps] == [{"policy"}] * 2 * steps
    assert set().union(*kinds[2 * steps:]) == {"policy", "judge"}
    assert all(sample.logprob_old is None for batch, _ in run.steps for sample in batch)
    assert [row["step"] for row in run.rows if "step" in row] == [0, 2 * steps - 1, 2 * steps, 3 * steps - 1]
    policy = [s for batch, _ in run.steps[:steps] for s in batch]
    weights = {a for s in policy for a, sampled in zip(s.advantage, s.sampled) if sampled}
    assert weights <= {0.0, 1.0} and 1.0 in weights


@pytest.mark.slow
def test_without_a_judge_only_the_policy_is_trained(chat):
    run = make_run(chat, "--demonstrations", 4, "--judge-demonstrations", 0, "--judge-epochs", 0)
    cold_start.cold_start(run)
    assert {sample.kind for batch, _ in run.steps for sample in batch} == {"policy"}
    assert {row["stage"] for row in run.rows if "stage" in row} == {"cold start: policy"}


@pytest.mark.parametrize("small, saved", [(True, []), (False, [2, 4, 6, 8])])
def test_the_cold_start_of_a_large_model_is_saved_regularly(chat, monkeypatch, small, saved):
    """Its steps take long; a small one's whole cold start takes a minute."""
    run = make_run(chat, "--demonstrations", 8, "--judge-demonstrations", 0, "--checkpoint-every", 2)
    monkeypatch.setattr(chat, "small", small)
    states = []
    run.save = lambda state: states.append(state["cold"]["steps"])
    cold_start.cold_start(run)
    assert states == saved


# DAgger

@pytest.fixture
def dagger_run(chat, monkeypatch):
    """make(*flags): a run in generated rooms with rounds of 4 episodes; its learner always gives "look"."""
    copied = []
    monkeypatch.setattr(cold_start, "DAGGER_ROUND", 4)

    def play(specs, sampling, name, overrides):
        episodes = []
        for spec in specs:
            conversation, ended = rollout.Conversation(spec, Game(), chat, 0).start(), False
            while not ended:
                ids = overrides[spec.index](conversation) or chat.respond("look")
                ended = conversation.act(Response(ids, [], False), 20, math.inf)
            episodes.append(conversation.episode)
        return episodes

    def make(*flags, **changes):
        run = make_run(chat, "--demonstrations", 4, *flags, **changes)
        run.sampler, run.sampling, run.play = "copy", lambda: None, play
        run.copied, run.update_sampler = copied, lambda: copied.append(run.model)
        return run
    return make


def dagger(run, judged=()):
    """The batches of DAgger, and {(first observation, episode's index): its sample}."""
    batches = list(cold_start.dagger(run, list(judged), None, 0))
    policy = [s for batch in batches for s in batch if s.kind == "policy"]
    return batches, {(s.turns[0].observation, s.episode): s for s in policy}


def test_an_episode_that_starts_again_has_a_new_expert(chat):
    made = []
    environment = SimpleNamespace(search_verbs=(), online_expert=lambda task, seed: made.append(seed) or (
        SimpleNamespace(observe=lambda *seen: None, command=lambda: "look")))
    spec = EpisodeSpec(Task("train/1", "train", "look", 0), 0, 7)
    player = cold_start.DaggerPlayer(spec, SimpleNamespace(environment=environment, chat=chat))
    turns = []
    conversation = SimpleNamespace(
        reply=SimpleNamespace(observation="here"), episode=SimpleNamespace(turns=turns, anchors=[]))
    for played in (0, 1, 0, 1):
        turns[:] = [SimpleNamespace(action="look", observation="here", anchor="here", valid=True)] * played
        player.override(conversation)
    assert made == [7, 7] and len(player.expert_labels) == 2
    assert player.share != random.Random(7).random()               # not what an expert of this seed draws


def test_an_online_experts_command_that_is_read_otherwise_is_refused(chat):
    """Else no turn would equal it, and all would have weight 0."""
    class Spaced(household.Environment):
        def online_expert(self, task, seed):
            return SimpleNamespace(observe=lambda *seen: None, command=lambda: "look ")

    environment = Spaced()
    spec = EpisodeSpec(Task("train/1", "train", "look", 0), 0, 7)
    player = cold_start.DaggerPlayer(spec, SimpleNamespace(environment=environment, chat=chat))
    conversation = SimpleNamespace(
        reply=SimpleNamespace(observation="here"), episode=SimpleNamespace(turns=[], anchors=[]))
    with pytest.raises(plugins.PluginError, match="its response, 'look ', is read as 'look'"):
        player.override(conversation)


@pytest.mark.slow
def test_dagger_imitates_the_experts_commands_and_no_others(dagger_run):
    run = dagger_run("--dagger", 40)
    batches, samples = dagger(run)
    assert len(samples) == 40 and len(run.copied) == 10 == len(run.rows)
    shares = []
    for i in range(10):
        tasks = run.environment.train_tasks("all", cold_start.FIRST_DEMONSTRATION + 2004 + 4 * i, 4)
        for j, task in enumerate(tasks):
            sample = samples[Game().reset(task).observation, j]
            teacher = run.environment.online_expert(task, stream(0, cold_start.DAGGER, 4 * i + j))
            teacher.observe(sample.turns[0].observation)
            for turn, after in zip(sample.turns, [*sample.turns[1:], None]):
                assert turn.advantage == float(turn.action == teacher.command())
                if after:
                    teacher.observe(after.observation, turn.action)
            shares.append(sum(turn.advantage for turn in sample.turns) / len(sample.turns))
            weights = [a for a, sampled in zip(sample.advantage, sample.sampled) if sampled]
            assert set(weights) <= {0.0, 1.0} and sample.logprob_old is None
    assert min(shares) < 0.3 and max(shares) == 1.0               # each has its own share
    assert len(batches) == sum(cold_start.steps_of(run, n) for _, n in cold_start.rounds_of(run.config)) == 20


def test_the_last_round_may_be_shorter_and_each_question_is_used_once(dagger_run):
    run, judged = dagger_run("--dagger", 10), make_samples(0, 6, random.Random(3))
    batches, samples = dagger(run, judged)
    assert [n for _, n in cold_start.rounds_of(run.config)] == [4, 4, 2] and len(batches) == 2 + 2 + 1
    questions = [s for batch in batches for s in batch if s.kind == "judge"]
    assert sorted(map(id, questions)) == sorted(map(id, judged))
    for batch in batches:                                                    # good and bad stay pairs
        numbers = [s.episode for s in batch if s.kind == "judge"]
        assert sorted(numbers) == sorted(2 * [*dict.fromkeys(numbers)])


@pytest.mark.slow
def test_ranks_split_a_round(dagger_run):
    """Three ranks, each with fewer episodes than a round has steps, take the steps that one rank takes."""
    judged = make_samples(0, 5, random.Random(4))
    flags = ("--dagger", 14, "--cold-start-batch", 1)
    alone, *ranks = (dagger(dagger_run(*flags, ranks=n, rank=rank), judged)[0]
                     for n, rank in ((1, 0), (3, 0), (3, 1), (3, 2)))
    for batch, *parts in zip(alone, *ranks, strict=True):
        full = {(s.episode, *s.ids) for s in batch if s.kind == "policy"}
        theirs = [{(s.episode, *s.ids) for s in part if s.kind == "policy"} for part in parts]
        assert full == set.union(*theirs) and len(full) == sum(map(len, theirs)) == 1
        questions = [id(s) for part in parts for s in part if s.kind == "judge"]
        assert sorted(id(s) for s in batch if s.kind == "judge") == sorted(questions)


def test_dagger_replaces_the_second_stages_demonstrations(dagger_run):
    run = dagger_run("--dagger", 8, "--judge-demonstrations", 4, "--judge-labels", "oracle")
    cold_start.cold_start(run)
    assert len(run.steps) == 2 + 4
    assert [rate for _, rate in run.steps[2:]] == pytest.approx(
        [run.config.cold_start_lr * (1 - step / 4) for step in range(4)])
    n_questions = len(cold_start.judge_samples(run, never))
    assert sum(s.kind == "judge" for batch, _ in run.steps for s in batch) == n_questions > 0


def test_dagger_gives_a_right_command_under_another_tag_no_weight(tokenizer):
    chat, by_learner = Chat(tokenizer, "tags"), []
    run = make_run(chat, "--demonstrations", 4, "--dagger", 4)

    def play(specs, sampling, name, overrides):
        for spec in specs:
            conversation, ended = rollout.Conversation(spec, Game(), chat, 0).start(), False
            while not ended:
                if not (ids := overrides[spec.index](conversation)):
                    command, tag = overrides[spec.index].__self__.expert_labels[-1]
                    by_learner.append((spec.index, len(conversation.episode.turns)))
                    ids = chat.respond(command, "explore" if tag != "explore" else "monitor")
                ended = conversation.act(Response(ids, [], False), 20, math.inf)
            played.append(conversation.episode)
        return played

    played, run.sampler, run.sampling, run.play = [], "copy", lambda: None, play
    run.update_sampler = lambda: None
    list(cold_start.dagger(run, [], None, 0))
    assert by_learner
    for e, episode in enumerate(played):
        for t, turn in enumerate(episode.turns):
            assert turn.advantage == float((e, t) not in by_learner)
