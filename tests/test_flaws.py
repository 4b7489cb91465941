"""Proves what studies/flaws.py measures: hand-made episodes with numbers worked by hand, exact probabilities
against an explicit softmax and against draws, and the whole study at a tiny size, interrupted and gone on.

    python -m pytest tests/test_flaws.py        # half a minute
"""

import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_runs
import torch
from conftest import NOTHING, Corridor, make_seats, rounding
from hand_made import make_episode

import rollout
from lm.engine import Sampling, answer
from studies import flaw_measures as measures
from studies import flaws, runs

fast = pytest.mark.fast


def world_of(labels):
    """A world whose oracle says these labels of an episode's turns."""
    return SimpleNamespace(oracle=lambda observations, commands: labels, nothing=NOTHING)


# Figure 1

@fast
def test_places_are_turns_whose_state_was_acted_on_before():
    episode = make_episode([("a", NOTHING, None, 1), ("a", "room", None, 1), ("b", "start of 0", None, 1),
                            (None, NOTHING, None, 1), ("c", "room", None, 1), ("c", "end", None, 1)])
    found = measures.places([episode])
    assert [place.given for place in found] == [{"a": False}, {"a": True}, {"a": True}, {"b": True}]
    assert [place.prompt_ids for place in found] == [episode.turns[t].prompt_ids for t in (1, 3, 4, 5)]
    assert measures.places([make_episode([("a", "room", None, 1), ("a", "end", None, 1)])]) == []


@fast
def test_repeats_by_hand():
    found = [measures.Place([1], {"a": True, "b": False}), measures.Place([2], {"b": False})]
    trials = [["a"] * 5 + ["b"] * 2 + ["c"] * 3, ["b"] * 4 + [None] * 6]
    result = measures.repeats(found, trials, [{"a": 0.3, "b": 0.2}, {"b": 0.4}])
    assert result == pytest.approx({"places": 2, "trials": 0.55, "alike": 0.5, "confidence": 0.45,
                                    "accepted": 0.3, "refused": 0.3})
    nothing = measures.repeats([], [], [])
    assert nothing.pop("places") == 0 and set(nothing.values()) == {None}
    assert measures.repeats(found[1:], trials[1:], [{"b": 0.4}])["accepted"] is None


@fast
def test_a_draw_of_places_is_the_seeds_and_in_order():
    once, again, other = (measures.drawn(list(range(100)), 10, seed) for seed in (0, 0, 1))
    assert once == again == sorted(once) != other and len(set(once)) == 10
    assert measures.drawn([1, 2], 10, 0) == [1, 2]


# Exact probabilities

def explicit(model, prompt, response, temperature):
    """The product of a full softmax's entries, token by token."""
    with torch.no_grad():
        logits_TV = model(torch.tensor([prompt + response]))[0].double() / temperature
    probability = 1.0
    for k, token in enumerate(response):
        weights = logits_TV[len(prompt) + k - 1].exp()
        probability *= float(weights[token] / weights.sum())
    return probability


@fast
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_a_commands_probability_is_that_of_the_softmax_and_of_draws(model, chat, temperature):
    prompt = chat.message("Walk to 3. You are at 1.", first=True)
    commands = ("left", "right", "look", "jump")
    exact = measures.chances(model, [(prompt, chat.respond(command)) for command in commands], temperature)
    for command, p in zip(commands, exact):
        wanted = explicit(model, prompt, chat.respond(command), temperature)
        assert math.log(p) == pytest.approx(math.log(wanted), abs=rounding([30.0]))
    n = 2000
    draws = answer(model, [prompt], [list(range(n))], chat.stop_ids, Sampling(temperature, 4), n)[0]
    counts = Counter(tuple(response.ids) for response in draws)
    for command, p in zip(commands, exact):
        share = counts[tuple(chat.respond(command))] / n
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1 / n
    assert max(exact) > 0.05


@fast
def test_turns_of_played_episodes_have_the_probability_that_they_were_drawn_with(model, chat):
    seats = make_seats(3, 2)
    episodes = rollout.play(model, chat, [Corridor() for _ in range(4)], seats, Sampling(1.0, 6), 5, 400)
    turns = [turn for episode in episodes for turn in episode.turns]
    found = measures.turn_chances(model, episodes, 1.0)
    assert [math.log(p) for p in found] == pytest.approx([sum(t.logprob_old) for t in turns], abs=1e-4)
    colder = measures.turn_chances(model, episodes, 0.4)
    pieces = [(turn.prompt_ids, turn.response_ids) for turn in turns]
    assert colder == pytest.approx(measures.chances(model, pieces, 0.4), rel=1e-4) and colder != found


# Figure 2

@fast
def test_an_episodes_turns_are_counted_by_kind():
    lines = [("a", NOTHING, None, 1), ("a", NOTHING, None, 1), ("b", "room", None, 1), ("c", "hall", None, 1),
             (None, NOTHING, None, 1)]
    labels = ["bad", "bad", "bad", "good", None]
    assert measures.count(make_episode(lines, group=7, won=True), world_of(labels)) == {
        "task": 7, "won": True, "flawed": 1 / 5, "refused": 3 / 5, "repeated": 1 / 5, "early": True}
    late = [("a", f"room {i}", None, 1) for i in range(6)]
    counts = measures.count(make_episode(late), world_of([None] * 5 + ["bad"]))
    assert counts["flawed"] == 1 / 6 and not counts["early"]                # EARLY is 5


def counted(task, won, early=False, flawed=0.0):
    return {"task": task, "won": won, "early": early, "flawed": flawed}


@fast
def test_lost_less_won_by_hand():
    counts = [counted(0, True, flawed=0.1), counted(0, False, flawed=0.5), counted(1, True, flawed=0.3),
              counted(1, False, flawed=0.4), counted(1, False, flawed=0.6)]
    found = measures.in_won_and_lost(counts, "flawed")
    assert (found["won"], found["lost"]) == (pytest.approx(0.2), pytest.approx(0.5))
    assert found["difference"]["value"] == pytest.approx(0.3) and found["difference"]["half"] > 0
    won = measures.in_won_and_lost([count for count in counts if count["won"]], "flawed")
    assert won["lost"] is None and won["difference"] is None and won["won"] == pytest.approx(0.2)


@fast
def test_a_flaws_cost_is_compared_within_tasks():
    """Task 0 gives .5 and .5 to the two sums, task 1 gives 0 and 1, task 2, always flawed, nothing: 1/3."""
    counts = [counted(0, False, True), counted(0, True), counted(1, False, True), counted(1, True, True),
              counted(1, True), counted(1, False), counted(2, False, True), counted(2, False, True)]
    assert measures.raised(counts)["value"] == pytest.approx(1 / 3)
    assert measures.raised([count for count in counts if count["task"] == 2]) is None


@fast
def test_the_bootstraps_interval_is_the_known_one_of_a_mean():
    values = np.random.default_rng(0).normal(2.0, 3.0, 400)
    found = measures.bootstrap([[value, 1] for value in values], lambda sums: sums[..., 0] / sums[..., 1])
    assert found["value"] == pytest.approx(values.mean())
    assert found["half"] == pytest.approx(1.96 * values.std() / math.sqrt(400), rel=0.15)
    assert measures.bootstrap([[0, 0]], lambda sums: sums[..., 0] / sums[..., 1]) is None


# Figure 5

@fast
def test_classes_confidence_and_ways_by_hand():
    lines = [(action, answer, None, 1) for action, answer in (
        ("a", "room"), ("b", "hall"), ("c", NOTHING), (None, NOTHING), ("d", "yard"), ("e", "door"))]
    labels = ["good", "bad", "bad", "bad", None, "bad"]
    of_turn = measures.classes([make_episode(lines)], world_of(labels))
    assert of_turn == ["good", "flawed", "refused", None, None, "flawed"]
    chance = [[0.5, 0.2, 0.6, 0.9, 0.9, 0.3], [0.8, 0.4, 0.5, 0.9, 0.9, 0.35], [0.9, 0.1, 0.2, 0.9, 0.9, 0.3]]
    found = measures.confidence(of_turn, chance[0])
    assert found["flawed"] == {"mean": pytest.approx(0.25), "turns": 2}
    assert found["good"] == {"mean": 0.5, "turns": 1}
    assert measures.ways(of_turn, chance) == {"good": {"risen": 1.0, "fallen": 0.0},
                                              "flawed": {"risen": 0.5, "fallen": 1.0},
                                              "refused": {"risen": 0.0, "fallen": None}}
    nothing = measures.ways([None], [[0.5]])
    assert nothing["flawed"] == {"risen": None, "fallen": None}
    assert measures.confidence([None], [0.5])["flawed"] == {"mean": None, "turns": 0}


# Over seeds, and the verdicts

@fast
def test_seeds_become_one():
    parts = [{"a": 1.0, "b": {"value": 1.0, "half": 0.3}, "c": [{"d": None}], "wins": [1], "e": None},
             {"a": 2.0, "b": {"value": 2.0, "half": 0.4}, "c": [{"d": 4.0}], "wins": [2], "e": None}]
    assert flaws.over_seeds(parts) == {
        "a": 1.5, "b": {"value": 1.5, "half": pytest.approx(0.25)}, "c": [{"d": 4.0}], "e": None}


def ended(wins):
    return {"models": [{"1.0": {"own": {"wins": wins}}}]}


@fast
def test_what_twice_the_iterations_bring_is_paired_by_task():
    """Of 4 episodes a task: gains 1, 0 in one seed, .5, .5 in the other."""
    found = flaws.more([ended([0, 2]), ended([1, 2])], [ended([4, 2]), ended([3, 4])], "1.0")
    assert found["value"] == 0.5 and found["seeds"] == [0.5, 0.5]
    assert found["half"] == pytest.approx(1.96 * math.sqrt(0.5 / 3) / 2)


def ran(confidence=(1.0, 1.0), good=(0.5, 0.6), risen=0.2, fallen=0.5, differences=(1.0, 1.0, 1.0)):
    """A run's result as far as the verdicts look at it."""
    apart = {kind: {"difference": None if value is None else {"value": value, "half": 0.5}}
             for kind, value in zip(measures.KINDS, differences)}
    models = [{"1.0": {"repeats": {"confidence": c}, "confidence": {"good": {"mean": g}},
                       "own": {"won or lost": apart}}} for c, g in zip(confidence, good)]
    return {"models": models, "ways": {"1.0": {"flawed": {"risen": risen, "fallen": fallen}}}}


@fast
@pytest.mark.parametrize("verdict, run, said", [
    (flaws.repeats_survive, ran((0.2, 0.19)), "yes"), (flaws.repeats_survive, ran((0.2, 0.1)), "partly"),
    (flaws.repeats_survive, ran((0.2, 0.05)), "no"),
    (flaws.repeats_survive, ran((None, None)), "not measurable"),
    (flaws.flaws_lose, ran(), "yes"), (flaws.flaws_lose, ran(differences=(1, 0.1, None)), "partly"),
    (flaws.flaws_lose, ran(differences=(0, 0, 0)), "no"),
    (flaws.flaws_lose, ran(differences=(None,) * 3), "not measurable"),
    (flaws.some_rise, ran(), "yes"), (flaws.some_rise, ran(fallen=0.4), "partly"),
    (flaws.some_rise, ran(risen=0.05), "no"), (flaws.some_rise, ran(good=(0.5, 0.4)), "no"),
    (flaws.some_rise, ran(risen=None, fallen=None), "not measurable"),
    (flaws.nothing_more, {"value": 0.1, "half": 0.05}, "no"),
    (flaws.nothing_more, {"value": 0.01, "half": 0.03}, "yes"),
    (flaws.nothing_more, {"value": 0.04, "half": 0.05}, "partly"),
    (flaws.nothing_more, None, "not measurable")])
def test_verdicts(verdict, run, said):
    assert verdict(run) == said


# The whole study

@pytest.fixture
def tiny(tmp_path, tmp_path_factory, monkeypatch):
    """Calls the study on tiny runs, made in this process; gives back its folder."""
    cold = tiny_runs.cold_started(tmp_path_factory)

    def make(found, processes):
        for run in found.values():
            if run.cold and not run.folder.exists():
                shutil.copytree(cold, run.folder / "checkpoint")
            elif not run.cold and not (run.folder / "stages.json").exists():
                assert tiny_runs.train(run.folder, *run.arguments) == 0

    monkeypatch.setattr(runs, "make", make)
    monkeypatch.setattr(runs, "EVERY", 1)
    monkeypatch.setitem(runs.WORLDS, "household", tuple(tiny_runs.TINY))

    def study(*more):
        small = "--seeds 0 --iterations 2 --every 1 --tasks 3 --places 6 --jobs 1".split()
        return flaws.main([*small, "--runs", str(study.runs), "--out", str(study.out), *more])

    study.out, study.runs = tmp_path / "out", tmp_path / "runs"
    return study


def test_the_study_is_interrupted_goes_on_and_repeats(tiny, monkeypatch, capsys):
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
    assert tiny() == 0 and len(calls) == 4                      # three cells, one of them begun twice
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
    assert first[0] == first[1] == first[2]                     # all begin alike, and are asked the same
    assert "nan" not in written["flaws.json"].lower() and "not measurable" in capsys.readouterr().out


def test_a_model_that_is_gone_is_named(tiny, capsys):
    runs.make(flaws.wanted_runs(["grpo"], [], [0], 2, tiny.runs), 1)
    shutil.rmtree(tiny.runs / "household" / "seed0" / "grpo" / "kept" / "00001")
    with pytest.raises(SystemExit) as stopped:
        tiny("--arms", "grpo", "--twice", "")
    assert stopped.value.code == 1 and "no model of iteration 1" in capsys.readouterr().err


@fast
@pytest.mark.parametrize("flags, said", [
    (["--arms", "grpo,ppo"], "--arms=ppo"), (["--twice", "gigpo"], "--twice=gigpo"),
    (["--seeds", "0,x"], "--seeds"), (["--every", "7"], "--every=7"), (["--tasks", "0"], "--tasks=0"),
    (["--iterations", "0"], "--iterations=0")])
def test_mistakes_are_one_line(flags, said, capsys):
    with pytest.raises(SystemExit):
        flaws.main(flags)
    assert said in capsys.readouterr().err
