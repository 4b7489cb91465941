"""Tests of lab/studies/flaws.py and flaw_measures.py.

Hand-made episodes with numbers computed by hand, exact probabilities against an explicit softmax and against
sampling, and the study at a tiny size, interrupted and resumed.

    python -m pytest tests/lab/test_flaws.py        # half a minute
"""

import json
import math
import random
import shutil
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import NOOP_MESSAGE, Corridor, make_specs, rounding
from hand_made import make_episode

import rollout
from lab.studies import flaw_measures as measures
from lab.studies import flaws, runs
from lm.engine import Sampling, answer


def environment_of(labels):
    """An environment whose oracle gives these labels to an episode's turns."""
    return SimpleNamespace(oracle=lambda observations, commands: labels, empty=NOOP_MESSAGE)


# Figure 1

def test_repeat_states_are_turns_whose_state_was_acted_on_before():
    episode = make_episode([("a", NOOP_MESSAGE, None, 1), ("a", "room", None, 1),
                            ("b", "start of 0", None, 1), (None, NOOP_MESSAGE, None, 1),
                            ("c", "room", None, 1), ("c", "end", None, 1)])
    found = measures.repeat_states([episode])
    assert [state.given for state in found] == [{"a": False}, {"a": True}, {"a": True}, {"b": True}]
    assert [state.prompt_ids for state in found] == [episode.turns[t].prompt_ids for t in (1, 3, 4, 5)]
    assert measures.repeat_states([make_episode([("a", "room", None, 1), ("a", "end", None, 1)])]) == []


def test_chosen_repeats_are_the_turns_that_repeat_with_their_own_command():
    """Against a double loop over turns and earlier turns, and rollout's count of repeated turns."""
    rng = random.Random(0)
    episodes = [make_episode([(rng.choice("abc"), rng.choice([NOOP_MESSAGE, "room", "hall"]), None, 1)
                              for _ in range(12)]) for _ in range(5)]
    wanted = []
    for episode in episodes:
        for t, turn in enumerate(episode.turns):
            before = [other for other in episode.turns[:t]
                      if other.anchor == turn.anchor and other.action == turn.action]
            if before:
                wanted.append((turn.prompt_ids, {turn.action: before[-1].valid}))
    found = measures.chosen_repeats(measures.repeat_states(episodes))
    assert [(state.prompt_ids, state.given) for state in found] == wanted
    assert len(found) == sum(map(rollout.repeated_turns, episodes)) > 10
    assert {accepted for state in found for accepted in state.given.values()} == {True, False}
    silent = make_episode([("a", NOOP_MESSAGE, None, 1), (None, NOOP_MESSAGE, None, 1),
                           ("b", "end", None, 1)])
    assert measures.chosen_repeats(measures.repeat_states([silent])) == []


@pytest.mark.slow
def test_confidence_in_chosen_repeats_is_the_softmax_and_what_sampling_gives(model, chat):
    specs = make_specs(6, 4)
    episodes = rollout.play(model, chat, [Corridor() for _ in range(4)], specs, Sampling(1.0, 6), 8, 400)
    found, wanted = measures.chosen_repeats(measures.repeat_states(episodes)), []
    for episode in episodes:
        for t, turn in enumerate(episode.turns):
            if turn.action is not None and any((other.anchor, other.action) == (turn.anchor, turn.action)
                                               for other in episode.turns[:t]):
                wanted.append(explicit(model, turn.prompt_ids, chat.respond(turn.action), 0.4))
    actor = SimpleNamespace(model=model, chat=chat, config=SimpleNamespace(max_response_tokens=6, slots=64))
    result = measures.repeats(actor, found, 0.4, 0)
    assert result["places"] == len(wanted) > 5
    assert result["confidence"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-3)
    error = math.sqrt(sum(p * (1 - p) for p in wanted) / measures.TRIALS) / len(wanted)
    assert abs(result["trials"] - result["confidence"]) <= 5 * error + 1e-3
    assert measures.repeats(actor, [], 0.4, 0)["places"] == 0


def test_repeat_numbers_by_hand():
    found = [measures.RepeatState([1], {"a": True, "b": False}), measures.RepeatState([2], {"b": False})]
    trials = [["a"] * 5 + ["b"] * 2 + ["c"] * 3, ["b"] * 4 + [None] * 6]
    result = measures.repeat_numbers(found, trials, [{"a": 0.3, "b": 0.2}, {"b": 0.4}])
    assert result == pytest.approx({"places": 2, "trials": 0.55, "alike": 0.5, "confidence": 0.45,
                                    "accepted": 0.3, "refused": 0.3})
    empty = measures.repeat_numbers([], [], [])
    assert empty.pop("places") == 0 and set(empty.values()) == {None}
    assert measures.repeat_numbers(found[1:], trials[1:], [{"b": 0.4}])["accepted"] is None


def test_a_subsample_depends_on_the_seed_and_keeps_the_order():
    first, second, other = (measures.subsample(list(range(100)), 10, seed) for seed in (0, 0, 1))
    assert first == second == sorted(first) != other and len(set(first)) == 10
    assert measures.subsample([1, 2], 10, 0) == [1, 2]


# Exact probabilities

def explicit(model, prompt, response, temperature):
    """The product of the entries of a full softmax, token by token."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + response]))[0].double() / temperature
    probability = 1.0
    for k, token in enumerate(response):
        weights = logits_TV[len(prompt) + k - 1].exp()
        probability *= float(weights[token] / weights.sum())
    return probability


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_commands_probability_agrees_with_the_softmax_and_with_sampling(model, chat, temperature):
    prompt = chat.message("Walk to 3. You are at 1.", first=True)
    commands = ("left", "right", "look", "jump")
    pieces = [(prompt, chat.respond(command)) for command in commands]
    exact = measures.response_probabilities(model, pieces, temperature)
    for command, p in zip(commands, exact):
        probability = explicit(model, prompt, chat.respond(command), temperature)
        assert math.log(p) == pytest.approx(math.log(probability), abs=rounding([30.0]))
    n = 2000
    draws = answer(model, [prompt], [list(range(n))], chat.stop_ids, Sampling(temperature, 4), n)[0]
    counts = Counter(tuple(response.ids) for response in draws)
    for command, p in zip(commands, exact):
        share = counts[tuple(chat.respond(command))] / n
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1 / n
    assert max(exact) > 0.05


@pytest.mark.slow
def test_played_turns_have_the_probability_with_which_they_were_sampled(model, chat):
    specs = make_specs(3, 2)
    episodes = rollout.play(model, chat, [Corridor() for _ in range(4)], specs, Sampling(1.0, 6), 5, 400)
    turns = [turn for episode in episodes for turn in episode.turns]
    found = measures.turn_probabilities(model, episodes, 1.0)
    assert [math.log(p) for p in found] == pytest.approx([sum(t.logprob_old) for t in turns], abs=1e-4)
    colder = measures.turn_probabilities(model, episodes, 0.4)
    pieces = [(turn.prompt_ids, turn.response_ids) for turn in turns]
    expected = measures.response_probabilities(model, pieces, 0.4)
    assert colder == pytest.approx(expected, rel=1e-4) and colder != found


# Figure 2

def test_an_episodes_turns_are_counted_by_kind():
    lines = [("a", NOOP_MESSAGE, None, 1), ("a", NOOP_MESSAGE, None, 1), ("b", "room", None, 1),
             ("c", "hall", None, 1), (None, NOOP_MESSAGE, None, 1)]
    labels = ["bad", "bad", "bad", "good", None]
    assert measures.turn_shares(make_episode(lines, group=7, won=True), environment_of(labels)) == {
        "task": 7, "won": True, "flawed": 1 / 5, "refused": 3 / 5, "repeated": 1 / 5, "early": True}
    late = [("a", f"room {i}", None, 1) for i in range(6)]
    counts = measures.turn_shares(make_episode(late), environment_of([None] * 5 + ["bad"]))
    assert counts["flawed"] == 1 / 6 and not counts["early"]                # EARLY is 5


def counted(task, won, early=False, flawed=0.0):
    return {"task": task, "won": won, "early": early, "flawed": flawed}


def test_lost_minus_won_by_hand():
    counts = [counted(0, True, flawed=0.1), counted(0, False, flawed=0.5), counted(1, True, flawed=0.3),
              counted(1, False, flawed=0.4), counted(1, False, flawed=0.6)]
    found = measures.in_won_and_lost(counts, "flawed")
    assert (found["won"], found["lost"]) == (pytest.approx(0.2), pytest.approx(0.5))
    assert found["difference"]["value"] == pytest.approx(0.3) and found["difference"]["half"] > 0
    won = measures.in_won_and_lost([row for row in counts if row["won"]], "flawed")
    assert won["lost"] is None and won["difference"] is None and won["won"] == pytest.approx(0.2)


def test_the_failure_slope_is_within_tasks():
    """Task 0 adds .5 and .5 to the two sums, task 1 adds 0 and 1, task 2, always flawed, adds 0: 1/3."""
    counts = [counted(0, False, True), counted(0, True), counted(1, False, True), counted(1, True, True),
              counted(1, True), counted(1, False), counted(2, False, True), counted(2, False, True)]
    assert measures.failure_slope(counts)["value"] == pytest.approx(1 / 3)
    assert measures.failure_slope([row for row in counts if row["task"] == 2]) is None


def test_the_bootstrap_interval_of_a_mean_is_the_known_one():
    values = np.random.default_rng(0).normal(2.0, 3.0, 400)
    found = measures.bootstrap([[value, 1] for value in values], lambda sums: sums[..., 0] / sums[..., 1])
    assert found["value"] == pytest.approx(values.mean())
    assert found["half"] == pytest.approx(1.96 * values.std() / math.sqrt(400), rel=0.15)
    assert measures.bootstrap([[0, 0]], lambda sums: sums[..., 0] / sums[..., 1]) is None


# Figure 5

def test_classes_probabilities_and_rises_by_hand():
    lines = [(action, answer, None, 1) for action, answer in (
        ("a", "room"), ("b", "hall"), ("c", NOOP_MESSAGE), (None, NOOP_MESSAGE), ("d", "yard"),
        ("e", "door"))]
    labels = ["good", "bad", "bad", "bad", None, "bad"]
    of_turn = measures.turn_classes([make_episode(lines)], environment_of(labels))
    assert of_turn == ["good", "flawed", "refused", None, None, "flawed"]
    probabilities = [[0.5, 0.2, 0.6, 0.9, 0.9, 0.3], [0.8, 0.4, 0.5, 0.9, 0.9, 0.35],
                     [0.9, 0.1, 0.2, 0.9, 0.9, 0.3]]
    found = measures.mean_probabilities(of_turn, probabilities[0])
    assert found["flawed"] == {"mean": pytest.approx(0.25), "turns": 2}
    assert found["good"] == {"mean": 0.5, "turns": 1}
    assert measures.rise_and_fall(of_turn, probabilities) == {"good": {"risen": 1.0, "fallen": 0.0},
                                              "flawed": {"risen": 0.5, "fallen": 1.0},
                                              "refused": {"risen": 0.0, "fallen": None}}
    empty = measures.rise_and_fall([None], [[0.5]])
    assert empty["flawed"] == {"risen": None, "fallen": None}
    assert measures.mean_probabilities([None], [0.5])["flawed"] == {"mean": None, "turns": 0}


# Over seeds, and the verdicts

def test_results_are_averaged_over_seeds():
    parts = [{"a": 1.0, "b": {"value": 1.0, "half": 0.3}, "c": [{"d": None}], "wins": [1], "e": None},
             {"a": 2.0, "b": {"value": 2.0, "half": 0.4}, "c": [{"d": 4.0}], "wins": [2], "e": None}]
    half = 12.7062 * 0.5                                  # t of one degree of freedom, standard error .5
    assert flaws.over_seeds(parts) == {
        "a": 1.5, "b": {"value": 1.5, "half": pytest.approx(half, rel=1e-4)}, "c": [{"d": 4.0}], "e": None}
    assert flaws.over_seeds(parts[:1])["b"] == {"value": 1.0, "half": 0.3}


def test_shares_of_risen_and_fallen_turns_are_of_all_seeds_turns():
    """Of 4 and 20 turns 1 and 10 rise; the one falls again, of the ten two do: 3 of 11, not (1 + .2) / 2."""
    def ran_with(turns, risen, fallen):
        return {"ways": {"1.0": {"flawed": {"risen": risen, "fallen": fallen}}},
                "models": [{"1.0": {"confidence": {"flawed": {"turns": turns}}}}]}

    parts = [ran_with(4, 0.25, 1.0), ran_with(20, 0.5, 0.2), ran_with(0, None, None), ran_with(6, 0.0, None)]
    found = flaws.pooled_ways(parts)["1.0"]["flawed"]
    assert found == {"n": [30, 11, 3], "risen": 11 / 30, "fallen": 3 / 11}
    assert [flaws.way_text(found, what) for what in ("risen", "fallen")] == ["36.7% (11/30)", "27.3% (3/11)"]
    none = flaws.pooled_ways(parts[2:3])["1.0"]["flawed"]
    assert none == {"n": [0, 0, 0], "risen": None, "fallen": None}
    assert flaws.way_text(none, "fallen") == "not measurable"


def test_a_number_of_some_seeds_has_their_count():
    results = [{"a": {"b": 1}}, {"a": {"b": None}}, {"a": None}]
    assert flaws.known_in(results, "a", "b") == " (1/3)" and flaws.known_in(results[:1], "a", "b") == ""
    assert flaws.known_in(results[1:], "a", "b") == ""                  # "not measurable" says it


def test_final_models_are_compared_by_seed():
    def final(success, repeats):
        return {"models": [{}, {"1.0": {"own": {"success": success, "shares": {"flawed": 0.5}}, "repeats": {
            "confidence": repeats}, "confidence": {"flawed": {"mean": 0.25}}}}]}

    found = flaws.less_first({"grpo": [final(0.5, None), final(0.75, 0.5)],
                              "grpo+gcd": [final(0.75, 0.5), final(0.75, 0.25)]}, [3, 4])["grpo+gcd"]
    assert found["success"]["seeds"] == {3: 0.25, 4: 0}
    assert found["probability to repeat"]["seeds"] == {4: -0.25}
    text = flaws.by_seed({"grpo+gcd": found}, "grpo")
    assert "* GRPO+GCD minus GRPO, success: +0.125 ± 1.588; by seed +0.250, +0.000\n" in text + "\n"
    assert flaws.by_seed(flaws.less_first({"grpo": []}, []), "grpo") == "One arm: nothing to compare."


def ended(wins):
    return {"models": [{"1.0": {"own": {"wins": wins}}}]}


def test_the_gain_of_twice_the_iterations_is_paired_by_seed():
    """With 4 episodes per task: gains 1, 0 in one seed, .5, .75 in the other."""
    found = flaws.more([ended([0, 2]), ended([1, 1])], [ended([4, 2]), ended([3, 4])], "1.0")
    assert found["value"] == 0.5625 and found["seeds"] == [0.5, 0.625]
    assert found["half"] == pytest.approx(12.7062 * 0.0625, rel=1e-4)
    assert flaws.more([ended([0])], [ended([4])], "1.0") == {"value": 1.0, "half": None, "seeds": [1.0]}


def ran(confidence=(1.0, 1.0), consistent=(1.0, 1.0), good=(0.5, 0.6), risen=0.2, fallen=0.5,
        differences=(1.0, 1.0, 1.0), raised=1.0):
    """The part of a run's result that the verdicts use."""
    of_kind = {kind: {"difference": None if value is None else {"value": value, "half": 0.5}}
             for kind, value in zip(measures.KINDS, differences)}
    models = [{"1.0": {"chosen": {"own": {"confidence": c, "alike": a}}, "confidence": {"good": {"mean": g}},
                       "own": {"won or lost": of_kind, "raised": {"value": raised, "half": 0.5}}}}
              for c, a, g in zip(confidence, consistent, good)]
    return {"models": models, "ways": {"1.0": {"flawed": {"risen": risen, "fallen": fallen}}}}


some_gain = partial(flaws.no_gain, iterations=flaws.CONVERGED)


@pytest.mark.parametrize("verdict, run, expected", [
    (flaws.repeats_survive, ran((0.2, 0.19)), "yes"), (flaws.repeats_survive, ran((0.2, 0.1)), "partly"),
    (flaws.repeats_survive, ran((0.2, 0.05)), "no"),
    (flaws.repeats_survive, ran((0.2, 0.3), (0.1, 0.05)), "partly"),
    (flaws.repeats_survive, ran((0.2, 0.3), (0.1, 0.04)), "no"),
    (flaws.repeats_survive, ran((0.2, None), (0.1, None)), "no"),          # no repeat is left
    (flaws.repeats_survive, ran((None, None)), "not measurable"),
    (flaws.repeats_survive, ran((0.2, 0.2), (0.0, 0.0)), "not measurable"),
    (flaws.flaws_lose, ran(), "yes"), (flaws.flaws_lose, ran(differences=(1, 0.1, None)), "partly"),
    (flaws.flaws_lose, ran(raised=0.1), "partly"),       # more frequent, but not where the task is the same
    (flaws.flaws_lose, ran(differences=(0, 0, 0), raised=0), "no"),
    (flaws.some_rise, ran(), "yes"), (flaws.some_rise, ran(fallen=0.4), "partly"),
    (flaws.some_rise, ran(risen=0.05), "no"), (flaws.some_rise, ran(good=(0.5, 0.4)), "no"),
    (flaws.some_rise, ran(risen=None, fallen=None), "not measurable"),
    (some_gain, {"value": 0.1, "half": 0.05}, "no"),
    (some_gain, {"value": 0.01, "half": 0.03}, "yes"),
    (some_gain, {"value": 0.04, "half": 0.05}, "partly"),
    (some_gain, None, "not measurable")])
def test_verdicts(verdict, run, expected):
    assert verdict(run) == expected


def test_runs_shorter_than_the_papers_do_not_test_that_those_have_converged():
    assert flaws.no_gain({"value": 0.1, "half": 0.05}, 40) == "not measurable"


# The full study

@pytest.fixture
def tiny(tmp_path, tmp_path_factory, monkeypatch):
    """A function that runs the study on tiny runs made in this process."""
    cold = tiny_runs.cold_started(tmp_path_factory)

    def make(found, processes):
        for run in found.values():
            if run.cold and not run.folder.exists():
                shutil.copytree(cold, run.folder / "checkpoint")
            elif not run.cold and not (run.folder / "stages.json").exists():
                assert tiny_runs.train(run.folder, *run.arguments) == 0

    monkeypatch.setattr(runs, "make", make)
    monkeypatch.setattr(runs, "EVERY", 1)
    monkeypatch.setitem(runs.ENVIRONMENTS, "household", tuple(tiny_runs.TINY))

    def study(*more):
        small = "--seeds 0 --iterations 2 --every 1 --tasks 3 --places 6 --jobs 1".split()
        return flaws.main([*small, "--runs", str(study.runs), "--out", str(study.out), *more])

    study.out, study.runs = tmp_path / "out", tmp_path / "runs"
    return study


@pytest.mark.slow
def test_the_study_is_interrupted_resumed_and_reproducible(tiny, monkeypatch, capsys):
    real, calls = flaws.measured, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(flaws, "measured", once)
    with pytest.raises(KeyboardInterrupt):
        tiny()
    assert len((tiny.out / "flaws.jsonl").read_text().splitlines()) == 1
    assert tiny() == 0 and len(calls) == 4                      # three cells, one of them started twice
    written = {path.name: path.read_text() for path in tiny.out.iterdir()}
    assert tiny() == 0 and len(calls) == 4
    assert written == {path.name: path.read_text() for path in tiny.out.iterdir()}
    found = json.loads(written["flaws.json"])
    assert {figure["picture"] for figure in found["figures"]} == {n for n in written if n.endswith(".svg")}
    assert [(run["arm"], run["twice"]) for run in found["arms"]] == [("grpo", False), ("grpo+gcd", False),
                                                                     ("grpo", True)]
    done = [[model["done"] for model in run["models"]] for run in found["arms"]]
    assert done == [[0, 1, 2], [0, 1, 2], [0, 2, 4]]
    first = [run["models"][0] for run in found["arms"]]
    assert first[0] == first[1] == first[2]                     # the same start and states
    chosen = [model["1.0"]["chosen"] for model in found["arms"][0]["models"]]
    assert chosen[0]["own"] == chosen[0]["initial"]             # the start model's own are the fixed ones
    assert all(of["initial"]["places"] == chosen[0]["initial"]["places"] for of in chosen)
    assert "nan" not in written["flaws.json"].lower() and "not measurable" in capsys.readouterr().out


@pytest.mark.slow
def test_a_missing_model_is_named(tiny, capsys):
    runs.make(flaws.requested_runs(["grpo"], [], [0], 2, tiny.runs), 1)
    shutil.rmtree(tiny.runs / "household" / "seed0" / "grpo" / "kept" / "00001")
    with pytest.raises(SystemExit) as stopped:
        tiny("--arms", "grpo", "--twice", "")
    assert stopped.value.code == 1 and "no model of iteration 1" in capsys.readouterr().err


@pytest.mark.parametrize("flags, expected", [
    (["--arms", "grpo,ppo"], "--arms=ppo"), (["--arms", "", "--twice", ""], "--arms="),
    (["--twice", "gigpo"], "--twice=gigpo"), (["--seeds", "0,x"], "--seeds"),
    (["--every", "7"], "--every=7"), (["--tasks", "0"], "--tasks=0"),
    (["--iterations", "0"], "--iterations=0")])
def test_an_invalid_flag_is_one_line(flags, expected, capsys):
    with pytest.raises(SystemExit):
        flaws.main(flags)
    assert expected in capsys.readouterr().err
