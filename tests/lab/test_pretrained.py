"""Tests of lab/studies/pretrained.py: its measures against double loops over autograd's gradients, and the
study on tiny models.

    python -m pytest tests/lab/test_pretrained.py

The last test runs the full study on tiny runs: some twenty seconds on an idle core.
"""

import json
import statistics

import pytest
import torch
from test_coupling import in_this_process, make_turns

import batching
import config
from lab.studies import common, influence, pretrained, runs
from lm import smollm2

TINY = ("--hidden-size 32 --layers 2 --demonstrations 40 --judge-demonstrations 20 --tasks 2 --group-size 4 "
        "--minibatches 1 --judge-turns 4 --judge-group-size 2 --max-turns 16 --cold-start-lr 3e-3")


def labeled(n, seed=3):
    """n turns of random tokens, by threes of one task; of three commands, two of one verb; a quarter bad."""
    turns = make_turns(n, seed)
    for i, turn in enumerate(turns):
        turn.task, turn.action = str(i // 3), ("go a", "go b", "take a")[i % 5 % 3]
        turn.label = ("good", "good", "bad", "refused")[i % 4]
        turn.kinds = ["verb", *["object"] * (len(turn.kinds) - 1)]
    return turns


def read(model, turns):
    """(coupling_SS, hidden_Sd) of turns, as the study computes them."""
    pairs = influence.hidden_and_error(model, turns)
    coupling_SS = influence.sums_by_turn(influence.token_couplings(pairs), turns)
    return coupling_SS, torch.stack([hidden_Nd.mean(0) for hidden_Nd, _ in pairs])


def slowly(model, turns):
    """[(gradient of the response's log-probability by the output layer, mean hidden state)] by autograd."""
    found = []
    for turn in turns:
        ids_1M, _, column_N, target_N, *_ = batching.collate([turn.sample], model)
        head_Vd = model.lm_head.weight.detach().double().requires_grad_()
        hidden_Nd = model(ids_1M, column_N=column_N, head="hidden").detach().double()
        logprob_N = (hidden_Nd @ head_Vd.T).log_softmax(-1).gather(1, target_N[:, None])
        found.append((torch.autograd.grad(logprob_N.sum(), head_Vd)[0].flatten(), hidden_Nd.mean(0)))
    return found


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def test_pairs_are_those_of_different_tasks(model):
    turns = labeled(12)
    slow, of = slowly(model, turns), {}
    for i, a in enumerate(turns):
        for j, b in enumerate(turns[:i]):
            if a.task != b.task:
                verb = a.action.split()[0] == b.action.split()[0]
                kind = "same command" if a.action == b.action else "same verb" if verb else "other verbs"
                gradient, hidden = (cosine(slow[i][k], slow[j][k]) for k in (0, 1))
                of.setdefault(kind, []).append(gradient)
                of.setdefault("hidden", []).append(hidden)
                of.setdefault("all", []).append(gradient)
    found = pretrained.pair_numbers(turns, *read(model, turns))
    assert len(of["all"]) == 54
    for kind in ("same command", "same verb", "other verbs", "hidden"):
        assert found[kind] == pytest.approx(statistics.fmean(of[kind]), abs=1e-4), kind
    assert found["rms"] == pytest.approx(statistics.fmean(x * x for x in of["all"]) ** 0.5, abs=1e-4)


def test_the_leak_goes_from_good_turns_to_flawed_ones_of_one_command(model):
    turns = labeled(24)
    slow, of, rise, own = slowly(model, turns), {}, {}, {}
    for i, a in enumerate(turns):
        for j, b in enumerate(turns):
            if a.label == "good" and b.label != "refused" and a.task != b.task:
                kind = (b.label, a.action == b.action)
                of.setdefault(kind, []).append(cosine(slow[i][0], slow[j][0]))
                rise[kind] = rise.get(kind, 0) + float(slow[i][0] @ slow[j][0])
                own[kind] = own.get(kind, 0) + float(slow[i][0] @ slow[i][0])
    found = pretrained.leak(turns, read(model, turns)[0])
    assert (found["good"], found["flawed"], found["pairs"]) == (12, 6, len(of["bad", True]))
    for key, kind in (("leak", ("bad", True)), ("kept", ("good", True))):
        assert found[key] == pytest.approx(statistics.fmean(of[kind]), abs=1e-4), key
    assert found["share"] == pytest.approx(rise["bad", True] / own["bad", True], abs=1e-4)
    for turn in turns:
        turn.label = "good"
    none = pretrained.leak(turns, read(model, turns)[0])
    assert none["leak"] is none["share"] is None


def test_the_few_turns_are_two_good_and_a_flawed_one_of_three_tasks(model):
    turns = labeled(60)
    few = pretrained.few_turns(turns, 0)
    assert [turn.label for turn in few] == ["good", "good", "bad"] * 3
    for k in range(3):
        assert len({turn.task for turn in few[3 * k:3 * k + 3]}) == 3
        assert len({turn.action for turn in few[3 * k:3 * k + 3]}) == 1
    assert pretrained.few_turns([turn for turn in turns if turn.label == "good"], 0) == []
    assert pretrained.whole_model(model, [], torch.zeros(0, 0)) is None


@pytest.mark.slow
def test_the_whole_models_map_is_the_cosine_of_its_gradients(model):
    """Up to the step's nonlinearity; against autograd over every parameter, in double precision."""
    turns = pretrained.few_turns(labeled(60), 0)
    found = pretrained.whole_model(model, turns, read(model, turns)[0])
    exact = model.double()
    grads = [torch.cat([g.flatten() for g in influence.gradient(exact, turn.sample)]) for turn in turns]
    slow = [[cosine(a, b) for b in grads] for a in grads]
    largest = 0.0
    for i in range(9):
        for j in range(9):
            largest = max(largest, abs(found["matrix"][i][j] - slow[i][j]))
    assert largest < 5 * found["nonlinear"] + 1e-3 < 0.2
    leak = [found["matrix"][i][j] for i in range(9) for j in range(9) if i // 3 == j // 3
            and turns[i].label == "good" and turns[j].label == "bad"]
    assert len(leak) == 6
    assert found["leak"] == pytest.approx(statistics.fmean(leak), abs=1e-6)
    coupling_SS = torch.tensor(found["matrix"])
    again = pretrained.whole_model(model.float(), turns, coupling_SS)
    assert again["agreement"] == pytest.approx(1, abs=1e-3)              # of the map with itself


def test_nats_are_those_of_good_turns(model):
    turns = labeled(8)
    with torch.no_grad():
        want = [float(influence.response_logprobs(model, [turn.sample])[0])
                for turn in turns if turn.label == "good"]
    assert pretrained.good_nats(turns, influence.hidden_and_error(model, turns)) == pytest.approx(
        statistics.fmean(want), rel=1e-4)
    assert pretrained.good_nats([], []) is None


def test_rows_are_intervals_over_the_seeds_that_have_a_value():
    def cell(value):
        return {"nats": value, "pairs": dict.fromkeys(
            ("hidden", "rms", "same command", "same verb", "other verbs"), value),
            "gaps": None, "leak": dict.fromkeys(("leak", "kept", "share"), value), "whole": None}

    cells = {f"{model}, {pretrained.JUDGED}, seed {seed}": cell(base + 0.01 * seed)
             for model, base in (("SmolLM2", 0.9), ("small", 0.5)) for seed in range(3)}
    rows = pretrained.rows_of(cells)
    assert rows[f"small, {pretrained.JUDGED}"]["hidden"]["mean"] == pytest.approx(0.51)
    assert rows[f"small, {pretrained.JUDGED}"]["gap"] == {"mean": None, "half": None, "seeds": {}}
    less = pretrained.differences(rows)
    assert less["rms"]["mean"] == pytest.approx(0.4) and less["whole same"]["mean"] is None
    assert {one["paper"]: one["agrees"] for one in pretrained.figures_of(rows)} == {
        "Figure 3a (a pretrained model)": "yes", "Figure 3b (a pretrained model)": "not measurable",
        "Section 3.2 (the leak, a pretrained model)": "yes"}
    one_seed = pretrained.rows_of({name: value for name, value in cells.items() if name.endswith("0")})
    assert pretrained.figures_of(one_seed)[0]["agrees"] == "not measurable"
    assert pretrained.differences(pretrained.rows_of({})) == {}


# The study

@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """The study on tiny models: "SmolLM2" is a second small one. Returns (exit status, its JSON, stderr)."""
    monkeypatch.setattr(runs, "make", in_this_process)
    monkeypatch.setattr(runs, "EVERY", 1)
    monkeypatch.setattr(pretrained, "TASKS", 12)
    monkeypatch.setattr(pretrained, "FLAGS", {
        "SmolLM2": ("--positions", "none", "--judge-labels", "taken"), "small": ("--judge-labels", "taken")})
    stages = ("untrained", "96 demonstrations", pretrained.JUDGED)
    monkeypatch.setattr(pretrained, "STAGES", {
        "SmolLM2": {name: pretrained.STAGES["small"][name] for name in stages},
        "small": {name: pretrained.STAGES["small"][name] for name in stages[::2]}})

    def run(*flags):
        status = pretrained.main(["--iterations", "1", "--flags", TINY, "--runs", str(tmp_path / "runs"),
                                  "--out", str(tmp_path / "out"), *flags])
        path = tmp_path / "out" / "pretrained.json"
        return status, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr().err

    run.folder = tmp_path
    return run


@pytest.mark.slow
def test_a_tiny_study_is_interrupted_and_resumed(study, monkeypatch):
    measure, count = pretrained.measure, []

    def stopped(actor, seed):
        count.append(seed)
        if len(count) == 3:
            raise KeyboardInterrupt
        return measure(actor, seed)

    monkeypatch.setattr(pretrained, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        study("--arms", "grpo+gcd")
    lines = study.folder / "out" / "pretrained.jsonl"
    assert [json.loads(line)["cell"] for line in lines.read_text().splitlines()] == [
        "SmolLM2, untrained, seed 0", "SmolLM2, 96 demonstrations, seed 0"]
    assert not [*study.folder.glob("runs/*/*/household/seed0/grpo+gcd")]           # cold starts come first
    monkeypatch.setattr(pretrained, "measure", measure)
    status, found, _ = study("--arms", "grpo+gcd")
    cells = {record["cell"]: record["result"] for record in map(json.loads, lines.read_text().splitlines())}
    assert status == 0 and {*cells} == {
        "SmolLM2, untrained, seed 0", "SmolLM2, 96 demonstrations, seed 0",
        "SmolLM2, with judge questions, seed 0", "small, untrained, seed 0",
        "small, with judge questions, seed 0", "SmolLM2, grpo+gcd 1, seed 0", "small, grpo+gcd 1, seed 0"}
    assert len({cell["texts"] for cell in cells.values()}) == 1
    assert len({cell["turns"] for cell in cells.values()}) == 1 and len(count) == 3
    assert found["rows"]["small, untrained"].keys() == pretrained.NUMBERS.keys()
    for cell in cells.values():
        assert len(cell["whole"]["actions"]) == 9 and -1 <= cell["whole"]["agreement"] <= 1
        assert all(value is not None for value in pretrained.numbers(cell).values())
    out = study.folder / "out"
    assert all((out / figure["picture"]).read_text().count("<svg") == 1 for figure in found["figures"])
    text = (out / "pretrained.md").read_text()
    assert "{" not in text and "nan" not in text.lower()
    monkeypatch.setattr(runs, "make", lambda made, jobs: made and pytest.fail("a run was started"))
    assert study("--arms", "grpo+gcd", "--jobs", "0")[1]["rows"] == found["rows"]


@pytest.mark.slow
def test_the_untrained_model_is_that_before_any_step(study, tmp_path):
    """Its cold start at learning rate 0 changes no weight: against a cold start without any epoch."""
    settings = {"model": "small", "stage": "untrained", "arm": runs.COLD, "seed": 0, "iterations": 0,
                "flags": TINY.partition(" --cold-start-lr")[0]}
    weights = []
    for flags in ("", " --cold-start-epochs 0"):
        run = pretrained.run_of(settings | {"flags": settings["flags"] + flags}, tmp_path / f"runs{flags}")
        runs.make({run: run}, 1)
        weights.append(common.load_actor(run.models[0], run.flags).model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.slow
def test_every_run_of_the_study_has_flags_that_gcd_accepts(monkeypatch, tmp_path):
    """And RL begins from the cold start with judge questions, whose run is the one that is measured."""
    monkeypatch.setattr(smollm2, "named", lambda model: model)             # without its package
    cold, along = pretrained.requested_cells(pretrained.options_of([]), 3)
    made = {name: pretrained.run_of(settings, tmp_path) for name, settings in (cold | along).items()}
    assert len(cold) == 9 and len(along) == 8
    for name, run in made.items():
        given = config.parse_or_exit([*run.flags, "--seed", str(run.seed)])
        model, stage = name.split(", ")[:2]
        assert given.model == ("smollm2" if model == "SmolLM2" else "") and given.seed == 3
        assert given.iterations == (0 if name in cold else 10)
        assert run.start == (None if name in cold else made[f"{model}, {pretrained.JUDGED}, seed 3"])
        if name in cold:
            assert given.demonstrations == int({"untrained": "4", pretrained.JUDGED: {
                "SmolLM2": "300", "small": "3000"}[model]}.get(stage, stage.split()[0]))
    rl = config.parse_or_exit(made["SmolLM2, grpo+gcd 10, seed 3"].flags)
    assert (rl.tasks * rl.group_size, rl.kl, rl.gcd, rl.prompt) == (32, "loss", True, "plain")


def test_the_arguments_are_the_models_own_and_wrong_ones_are_one_line(study, capsys):
    for flags, message in (("--models gpt", "--models=gpt: expected some of SmolLM2,small"),
                           ("--arms ppo", "--arms=ppo: expected some of grpo"),
                           ("--seeds a", "--seeds=a: expected numbers"),
                           ("--iterations 0", "--iterations=0: expected 1")):
        with pytest.raises(SystemExit):
            pretrained.main(flags.split())
        assert message in capsys.readouterr().err
    status, _, error = study("--jobs", "0")
    assert status == 1 and "has no cell" in error and error.count("\n") == 1
