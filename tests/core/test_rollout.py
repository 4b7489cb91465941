"""Proves that `play` samples the tokens that a full forward per token would, and records the episodes.

    python -m pytest tests/core/test_rollout.py

The oracle is `slow_play`: one episode at a time, no cache, a full forward for every token.
"""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from conftest import COMMANDS, NOOP_MESSAGE, Corridor, make_specs
from test_engine import slow_response

import envs
import rollout
from envs import EpisodeLost, Reply, Task
from envs.alfred import rooms
from envs.alfred.game import Game
from infra import streams
from infra.plugins import PluginError
from lm import engine
from lm.chat import Chat
from lm.engine import Response, Sampling
from rollout import Episode, Turn

LIMIT = 3                                        # max_response_tokens: short enough to cut some responses


@pytest.fixture
def model(model):
    """In double precision, so that no CPU's rounding changes a sampled token."""
    return model.double()


# The slow oracle

def slow_play(model, tokenizer, spec, sampling, max_turns, history=0, on_truncation="fail", given=()):
    """(prompt ids, response ids, logprobs) of each turn; every prompt is built from scratch.

    given: {turn: text of the response that replaces the model's}.
    """
    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    stops = encode("<|im_end|><|endoftext|>")
    env, turns, exchanges = Corridor(), [], []
    reply = env.reset(spec.task)
    head = encode(f"<|user|>{reply.observation}<|assistant|>")
    while len(turns) < max_turns and not reply.done:
        prompt = head + [i for exchange in exchanges[-history:] for i in exchange]      # -0 is 0: all of them
        if len(turns) in given:
            ids, logprobs = encode(given[len(turns)]), []
        else:
            ids, logprobs = slow_response(model, prompt, streams.stream(spec.stream, len(turns)), stops,
                                          sampling.temperature, sampling.max_response_tokens)
        turns.append((prompt, ids, logprobs))
        cut = ids[-1] not in stops
        if cut and on_truncation == "fail":
            break
        action = "" if cut else tokenizer.decode(ids[:-1]).strip()
        reply = env.step(action) if action else Reply(NOOP_MESSAGE, env.admissible(), False, False)
        exchanges.append(ids + encode("<|im_end|>" * cut + f"<|user|>{reply.observation}<|assistant|>"))
    return turns


def fast_play(model, chat, specs, sampling=None, slots=4, max_turns=6, **options):
    sampling = sampling or Sampling(max_response_tokens=LIMIT)
    corridors = [Corridor() for _ in range(slots)]
    return rollout.play(model, chat, corridors, specs, sampling, max_turns, 400, **options)


def tokens_of(episodes):
    return [[(turn.prompt_ids, turn.response_ids) for turn in episode.turns] for episode in episodes]


# `play` against it

@pytest.mark.parametrize("temperature, history, cut", [
    (1.0, 0, "fail"), (1.0, 0, "invalid"), (1.0, 2, "invalid"), (0.6, 0, "invalid"), (1.7, 1, "invalid"),
    (0.0, 0, "fail")])
def test_played_tokens_and_logprobs_equal_the_oracles(model, chat, tokenizer, temperature, history, cut):
    specs, sampling = make_specs(3, 3), Sampling(temperature, LIMIT)
    options = {"history": history, "on_truncation": cut}
    episodes = fast_play(model, chat, specs, sampling, **options)
    for spec, episode in zip(specs, episodes):
        slow = slow_play(model, tokenizer, spec, sampling, 6, **options)
        assert tokens_of([episode]) == [[(prompt, ids) for prompt, ids, _ in slow]]
        for turn, (_, _, logprobs) in zip(episode.turns, slow):
            assert turn.logprob_old == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_an_override_may_replace_the_models_response(model, chat, tokenizer, slots):
    specs = make_specs(4, 2)
    given = {i: {t: f"{COMMANDS[(i + t) % 3]}<|im_end|>" for t in range(i % 3, 9, 2)} for i in range(8)}

    def override(conversation):
        text = given[conversation.spec.index].get(len(conversation.episode.turns))
        return text and tokenizer.encode(text, add_special_tokens=False)

    overrides = {spec.index: override for spec in specs}
    episodes = fast_play(model, chat, specs, slots=slots, on_truncation="invalid", overrides=overrides)
    for spec, episode in zip(specs, episodes, strict=True):
        slow = slow_play(model, tokenizer, spec, Sampling(max_response_tokens=LIMIT), 6, 0, "invalid",
                         given[spec.index])
        assert tokens_of([episode]) == [[(prompt, ids) for prompt, ids, _ in slow]]
        for turn, (_, _, logprobs) in zip(episode.turns, slow, strict=True):
            assert turn.logprob_old == pytest.approx(logprobs, abs=1e-5)
    assert {bool(turn.logprob_old) for episode in episodes for turn in episode.turns} == {True, False}


def test_the_fixture_covers_every_case(model, chat):
    """Without this, the tests above could pass on trivial episodes."""
    episodes = fast_play(model, chat, make_specs(6, 4), on_truncation="invalid")
    turns = [turn for episode in episodes for turn in episode.turns]
    assert any(episode.won for episode in episodes) and not all(episode.won for episode in episodes)
    assert any(turn.valid for turn in turns) and any(turn.action and not turn.valid for turn in turns)
    assert any(turn.action is None for turn in turns)
    assert {turn.response_ids[-1] for turn in turns} > set(chat.stop_ids)   # both stops; truncated ones


@pytest.mark.slow
@pytest.mark.parametrize("history", [0, 2])
@pytest.mark.parametrize("slots", [2, 5, 40])
def test_any_number_of_slots_plays_the_same_episodes(model, chat, slots, history):
    """One at a time, refilled slots, gaps filled from the back: the results are equal."""
    specs = make_specs(4, 3)
    options = {"history": history, "on_truncation": "invalid"}
    alone = [fast_play(model, chat, [spec], slots=1, **options)[0] for spec in specs]
    batched = fast_play(model, chat, specs, slots=slots, **options)
    assert tokens_of(batched) == tokens_of(alone)
    assert [e.won for e in batched] == [e.won for e in alone]
    assert [(e.task, e.group, e.index) for e in batched] == [(s.task, s.group, s.index) for s in specs]


@pytest.mark.slow
@pytest.mark.parametrize("history", [0, 2])
def test_the_length_of_a_tick_does_not_change_the_episodes(model, chat, monkeypatch, history):
    """With a tick of one token, rows that end early start their next turn while others still generate."""
    specs, options = make_specs(3, 3), {"history": history, "on_truncation": "invalid"}
    alone = [fast_play(model, chat, [spec], slots=1, **options)[0] for spec in specs]
    started, begin = [], engine.Slots.begin
    monkeypatch.setattr(engine, "TICK", 1)
    monkeypatch.setattr(engine.Slots, "begin", lambda slots, rows, *more: (
        started.append((len(rows), len(slots.running))), begin(slots, rows, *more)))
    batched = fast_play(model, chat, specs, slots=4, **options)
    assert tokens_of(batched) == tokens_of(alone) and [e.won for e in batched] == [e.won for e in alone]
    assert any(new and running for new, running in started)      # some start while others are running


def test_streams_determine_the_episodes(model, chat):
    one, same = (tokens_of(fast_play(model, chat, make_specs(2, 4))) for _ in range(2))
    other = tokens_of(fast_play(model, chat, make_specs(2, 4, first_stream=5)))
    assert one == same != other
    assert len({json.dumps(episode) for episode in one}) > 4                     # members of a group differ


@pytest.mark.slow
@pytest.mark.parametrize("slots, groups, size", [(2, 1, 4), (3, 2, 3), (8, 2, 4)])
def test_every_token_is_computed_once_and_equal_prompts_once(model, chat, monkeypatch, slots, groups, size):
    """Those of a group's first turn whenever they start, later ones if they start in the same tick."""
    computed, later, prefill = [], [], engine.Slots.prefill

    def prefilled(slots, rows, prompts, share):
        for i, (row, prompt) in enumerate(zip(rows, prompts)):
            cached = slots.cached[row]
            if cached and prompt in prompts[:i]:
                assert prompt[:len(cached)] == cached
                later.append(len(prompt) - len(cached))
        return prefill(slots, rows, prompts, share)

    def count(module, args):
        computed.append(int((args[1].row_N < args[1].cache.n_rows).sum()))
    model.register_forward_pre_hook(count)
    monkeypatch.setattr(engine.Slots, "prefill", prefilled)
    episodes = fast_play(model, chat, make_specs(groups, size), slots=slots, on_truncation="invalid")
    first = {e.group: len(e.turns[0].prompt_ids) for e in episodes}
    ends = [e.turns[-1] for e in episodes]
    last = [len(turn.prompt_ids) + len(turn.response_ids) - 1 for turn in ends]   # the last token is not run
    each = sum(first.values()) + sum(n - first[e.group] for e, n in zip(episodes, last))
    assert sum(computed) == each - sum(later)


# Prompts

def test_prompts_contain_only_what_was_observed(chat):
    """In two rooms that differ in a place that is never visited, the prompts are equal token for token: the
    intro with the task, and each command with its reply."""
    task = rooms.task("train", 0)
    (looked, *_, unseen), (thing, *things) = task.problem.receptacles, task.problem.things
    things, texts = [replace(other, receptacle=looked.name) for other in things], []
    for all_things in (things, [replace(thing, receptacle=unseen.name), *things]):
        problem = replace(task.problem, things=tuple(all_things))
        spec = rollout.EpisodeSpec(replace(task, problem=problem), 0, 0)
        conversation = rollout.Conversation(spec, Game(), chat, 0).start()
        messages = [conversation.reply.observation]
        for command in (f"go to {looked.name}", "fly", f"open {looked.name}", "inventory", "look"):
            conversation.act(Response(chat.respond(command), [], False), 20, 10**6)
            messages += [command, conversation.reply.observation]
        exchanges = zip(messages[1::2], messages[2::2])
        text = "<|user|>" + messages[0] + "".join(f"<|assistant|>{command}<|im_end|><|user|>{answer}"
                                                  for command, answer in exchanges)
        assert chat.tokenizer.decode(conversation.prompt) == text + "<|assistant|>"
        texts.append(text)
    assert texts[0] == texts[1]


# The record of a turn

def corridor_conversation(chat, problem=(2, 4), env=None):
    spec = rollout.EpisodeSpec(Task("c", "train", "walk", problem), 0, 1)
    return rollout.Conversation(spec, env or Corridor(), chat, 0).start()


def response_of(chat, text, stop="<|im_end|>"):
    ids = chat.encode(text) + chat.tokenizer.encode(stop) if stop else chat.encode(text)
    return Response(ids, [-0.5] * len(ids), truncated=not stop)


def test_turns_record_observation_response_and_action(chat):
    conversation = corridor_conversation(chat)
    texts = ["right", "jump", "", "right"]
    ended = [conversation.act(response_of(chat, text), max_turns=9, max_prompt=400) for text in texts]
    assert ended == [False, False, False, True]
    episode = conversation.episode
    assert (episode.won, episode.truncated, episode.overflowed, episode.final_observation) == (
        True, False, False, "You are at 4.")
    start = "Walk to 4. You are at 2."
    assert [t.observation for t in episode.turns] == [start, "You are at 3.", NOOP_MESSAGE, NOOP_MESSAGE]
    assert [t.anchor for t in episode.turns] == [start] + ["You are at 3."] * 3
    assert [t.action for t in episode.turns] == ["right", "jump", None, "right"]
    assert [t.valid for t in episode.turns] == [True, False, False, True]
    assert [t.response for t in episode.turns] == texts
    assert all(len(t.logprob_old) == len(t.response_ids) for t in episode.turns)


def test_a_truncated_response_ends_the_episode_as_failed(chat):
    class Scored(Corridor):
        def reply(self, observation):
            return super().reply(observation)._replace(score_100=25.0 * self.place)

    conversation = corridor_conversation(chat, (3, 4), Scored())
    assert conversation.act(response_of(chat, "right", stop=""), 9, 400, "fail")
    episode = conversation.episode
    assert episode.truncated and not episode.won and episode.turns[0].action is None
    assert episode.score_100 == 75.0                           # that of its start
    assert conversation.game.game.place == 3                   # although its text was the winning command
    assert episode.final_observation == episode.turns[0].observation


@pytest.mark.parametrize("end", ["response too long", "context full", "turn limit"])
def test_what_fails_after_a_success_that_did_not_end_the_game_is_not_won(chat, end):
    """As of a Gymnasium game whose success may be true before its end."""
    class Early(Corridor):
        def reply(self, observation):
            return super().reply(observation)._replace(won=True, done=False)

    conversation = corridor_conversation(chat, (3, 4), Early())
    assert not conversation.act(response_of(chat, "right"), 9, 400)
    assert conversation.episode.won
    limits = {"response too long": (9, 400), "context full": (9, 1), "turn limit": (2, 400)}[end]
    cut = end == "response too long"
    assert conversation.act(response_of(chat, "left", stop="" if cut else "<|im_end|>"), *limits)
    episode = conversation.episode
    assert (episode.ended, episode.won) == (end, end == "turn limit")


def test_a_truncated_response_may_be_an_invalid_turn_instead(chat):
    conversation = corridor_conversation(chat, (3, 4))
    assert not conversation.act(response_of(chat, "right", stop=""), 9, 400, "invalid")
    assert conversation.game.game.place == 3 and conversation.reply.observation == NOOP_MESSAGE
    assert not conversation.episode.truncated
    assert conversation.act(response_of(chat, "right"), 9, 400, "invalid") and conversation.episode.won


def test_an_environment_may_have_its_own_noop_message(tokenizer):
    """It answers a response without a command, and leaves the anchor unchanged."""
    class Polite(Corridor):
        def step(self, command):
            reply = super().step(command)
            return reply._replace(observation="Pardon?") if reply.observation == NOOP_MESSAGE else reply

    own = type("Own", (envs.Environment,), {"noop_message": "Pardon?"})
    chat = Chat(tokenizer, "plain", environment=own())
    conversation = corridor_conversation(chat, env=Polite())
    for text in ("right", "", "jump"):
        conversation.act(response_of(conversation.chat, text), 9, 400)
    episode = conversation.episode
    assert conversation.reply.observation == "Pardon?" and episode.last_anchor == "You are at 3."
    assert episode.turns[2].observation == "Pardon?" and episode.turns[2].anchor == "You are at 3."


def test_a_refusal_in_the_games_own_words_leaves_the_anchor_unchanged(chat):
    """As of a tool, which says with `taken` what it refused."""
    class Strict(Corridor):
        def step(self, command):
            reply = super().step(command)
            no = f"No {command}."
            return reply._replace(observation=no, taken=False, answers=(no,)) if command == "jump" else reply

    conversation = corridor_conversation(chat, env=Strict())
    for text in ("right", "jump"):
        conversation.act(response_of(chat, text), 9, 400)
    episode = conversation.episode
    assert conversation.reply.observation == "No jump." and episode.last_anchor == "You are at 3."
    assert not episode.turns[1].valid
    conversation.act(response_of(chat, ""), 9, 400)            # what the tool said is not said again
    assert (conversation.reply.observation, conversation.reply.answers) == (NOOP_MESSAGE, ())


def test_an_empty_observation_leaves_the_anchor_unchanged(chat):
    """It is no state: turns that follow one in different places would otherwise be compared."""
    class Silent(Corridor):
        def step(self, command):
            return super().step(command)._replace(observation=" \n" if command == "left" else "Seen.")

    conversation = corridor_conversation(chat, env=Silent())
    for text in ("left", "right", "left"):
        conversation.act(response_of(chat, text), 9, 400)
    start, *others = [turn.anchor for turn in conversation.episode.turns]
    assert others == [start, "Seen."] and conversation.episode.last_anchor == "Seen."


def test_the_turn_limit_ends_an_episode(chat):
    conversation = corridor_conversation(chat)
    assert [conversation.act(response_of(chat, "look"), 3, 400) for _ in range(3)] == [False, False, True]
    assert not conversation.episode.won and not conversation.episode.overflowed


class InAnotherProcess(Corridor):
    """A corridor with the interface of a game in its own process: `send`, then `receive`."""

    def send(self, verb, *arguments):
        self.request = verb, arguments

    def receive(self):
        verb, arguments = self.request
        return getattr(self, verb)(*arguments)


class Fragile(Corridor):
    """A corridor whose engine dies at the calls numbered in `deaths`; `calls` counts over all instances."""

    calls, deaths = 0, ()

    def reset(self, task, seed=0):
        self.count()
        return super().reset(task, seed)

    def step(self, command):
        self.count()
        return super().step(command)

    def count(self):
        Fragile.calls += 1
        if Fragile.calls in Fragile.deaths:
            raise EpisodeLost("the engine died")


class FragileProcess(Fragile, InAnotherProcess):
    """The same as a game in its own process."""


class FragileSend(FragileProcess):
    """Such a game whose engine dies when it is sent a request."""

    def send(self, verb, *arguments):
        super().send(verb, *arguments)
        self.count()

    def receive(self):
        verb, arguments = self.request
        return getattr(Corridor, verb)(self, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Fragile, FragileProcess, FragileSend])
@pytest.mark.parametrize("deaths", [(1,), (5,), (7, 8, 9), (12,)])
def test_a_lost_episode_restarts(model, chat, monkeypatch, deaths, kind):
    """Whether the reset or a turn is lost. The restarted episode samples from new streams, the same in every
    run; an episode that was not restarted is not affected. The wait for a lost reply is counted."""
    def played(kind, specs):
        Fragile.calls = 0
        games = [kind() for _ in range(2)]
        return rollout.play(model, chat, games, specs, Sampling(max_response_tokens=4), 6, 400)

    Fragile.deaths, specs = deaths, make_specs(2, 2)
    monkeypatch.setattr(rollout, "perf_counter", itertools.count().__next__)     # each reply takes a second
    lost, again = played(kind, specs), played(kind, specs)
    assert sum(episode.game_s for episode in again) == Fragile.calls
    assert sum(e.restarts for e in lost) == len(deaths) == rollout.counts_of(lost)["restarts"]
    new = [replace(spec, stream=streams.stream(spec.stream, 1 << 40, e.restarts)) if e.restarts else spec
           for spec, e in zip(specs, lost)]
    for episodes in zip(lost, again, played(Corridor, new), strict=True):
        ids, *others = [[t.response_ids for t in episode.turns] for episode in episodes]
        assert ids and others == [ids, ids]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Corridor, InAnotherProcess])
def test_a_game_of_this_process_answers_in_the_tick_in_which_it_was_asked(model, chat, monkeypatch, kind):
    """A game of another process has a tick more, in which the device samples other rows; the first loop only
    resets the games. The tokens are the same. Each game plays two episodes, one after the other.
    """
    ticks, tick = [], engine.Slots.tick
    monkeypatch.setattr(engine, "TICK", 2)
    monkeypatch.setattr(engine.Slots, "tick", lambda slots: (ticks.append(slots), tick(slots)))
    specs = make_specs(4, 2)
    for pair in zip(specs[::2], specs[1::2], strict=True):
        ticks.clear()
        sampling, options = Sampling(max_response_tokens=5), {"on_truncation": "invalid"}
        episodes = rollout.play(model, chat, [kind()], pair, sampling, 6, 400, **options)
        turns = [turn for episode in episodes for turn in episode.turns]
        sampled = sum(max(1, -(-(len(turn.response_ids) - 1) // 2)) for turn in turns)
        calls = sum(turn.action is not None for turn in turns) + len(pair)       # and the resets
        assert len(ticks) == 1 + sampled + (calls if kind is InAnotherProcess else 0)
        assert tokens_of(episodes) == tokens_of(fast_play(model, chat, pair, sampling, **options))


def test_an_engine_that_keeps_dying_is_an_error(model, chat):
    Fragile.calls, Fragile.deaths = 0, range(3, 99)
    with pytest.raises(EpisodeLost, match="task corridor/0, (reset|turn \\d): lost 6 times"):
        rollout.play(model, chat, [Fragile()], make_specs(1, 1), Sampling(max_response_tokens=4), 6, 400)


@pytest.mark.slow
@pytest.mark.parametrize("spare", [0, -1, 7])
def test_a_prompt_that_outgrows_the_context_ends_its_episode_only(model, chat, spare):
    """At spare 0 the middle episode's last prompt fits to the last token; at -1 it does not."""
    specs = make_specs(3, 3)
    unlimited = fast_play(model, chat, specs, max_turns=8, on_truncation="invalid")
    context = sorted(len(episode.turns[-1].prompt_ids) for episode in unlimited)[4] + LIMIT + spare
    corridors = [Corridor() for _ in range(4)]
    tight = rollout.play(model, chat, corridors, specs, Sampling(max_response_tokens=LIMIT), 8, context,
                         on_truncation="invalid")
    assert any(e.overflowed for e in tight) and not all(e.overflowed for e in tight)
    for a, b in zip(unlimited, tight):
        fitting = [t for t in a.turns if len(t.prompt_ids) + LIMIT <= context]
        assert tokens_of([b])[0] == [(t.prompt_ids, t.response_ids) for t in fitting]
        assert b.overflowed == (len(fitting) < len(a.turns)) and b.won == (a.won and not b.overflowed)


def test_a_first_prompt_that_is_too_long_names_the_flag(model, chat):
    with pytest.raises(ValueError, match=r"--context=8: the first prompt of task corridor/0 has \d+ tokens"):
        rollout.play(model, chat, [Corridor()], make_specs(1, 1), Sampling(max_response_tokens=2), 3, 8)


@pytest.mark.parametrize("slots", [1, 2])
def test_group_members_that_start_differently_are_refused(model, chat, slots):
    class Moody(Corridor):
        starts = itertools.count()

        def reset(self, task, seed=0):
            return super().reset(task)._replace(observation=f"Start {next(self.starts)}.")

    with pytest.raises(PluginError, match="task corridor/0, reset: another first observation than before"):
        rollout.play(model, chat, [Moody() for _ in range(slots)], make_specs(1, 2), Sampling(), 2, 400)


def test_every_ended_episode_is_reported_once_and_no_specs_give_no_episodes(model, chat):
    ended = []
    episodes = fast_play(model, chat, make_specs(2, 3), slots=2, on_end=ended.append)
    assert Counter(map(id, ended)) == Counter(map(id, episodes))
    assert fast_play(model, chat, []) == []


# Summaries

def turn(anchor, action, valid=True, tokens=2):
    return Turn(anchor, [1], [2] * tokens, [0.0] * tokens, action or "", action, valid, anchor)


def test_counts_and_shares_by_hand():
    task = Task("a", "train", "walk", None)
    turns = [turn("x", "look"), turn("x", "look"), turn("y", "look"), turn("x", "look"),
             turn("x", None, valid=False), turn("x", None, valid=False, tokens=5)]
    assert rollout.repeated_turns(Episode(task, 0, turns=turns)) == 2          # a malformed turn repeats none
    episodes = [Episode(task, 0, turns=turns, won=True),
                Episode(task, 0, turns=[turn("x", "left", tokens=1)], truncated=True, score_100=-100.0),
                Episode(task, 1, turns=[turn("x", "left")], overflowed=True, score_100=50.0),
                Episode(task, 1, turns=[turn("x", "left")])]
    counts = rollout.counts_of(episodes)
    assert counts == {"episodes": 4, "won": 1, "truncated": 2, "turns": 9, "invalid": 2, "repeated": 2,
                      "response_tokens": 5 * 2 + 5 + 1 + 2 * 2, "restarts": 0, "game_s": 0.0, "scored": 2,
                      "score_100": -50.0}
    shares = rollout.shares_of(counts)
    assert (shares["success"], shares["n"], shares["turns"], shares["truncated_frac"]) == (0.25, 4, 2.25, 0.5)
    assert (shares["invalid_frac"], shares["repeated_frac"], shares["score_100"]) == (2 / 9, 2 / 9, -25.0)
    assert (shares["low"], shares["high"]) == pytest.approx((0.0456, 0.6994), abs=1e-4)  # Wilson's, of 1 in 4
    again = rollout.shares_of({name: 8 * count for name, count in counts.items()}, plays=8)
    assert again == shares | {"n": 32}            # eight plays of a game count as one game


def test_no_episodes_have_success_0_without_a_division_by_0():
    shares = rollout.shares_of(rollout.counts_of([]))
    assert shares["success"] == 0 and (shares["low"], shares["high"]) == (0.0, 1.0)


def test_wilson_by_hand():
    """Newcombe 1998, Table I: 81/263 gives 0.2553 to 0.3662; 0/20 gives 0 to 0.1611."""
    assert rollout.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert rollout.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert rollout.wilson(0, 20)[0] == 0 and rollout.wilson(19, 19)[1] == 1            # also if rounded
    assert rollout.wilson(0, 0) == (0.0, 1.0)
