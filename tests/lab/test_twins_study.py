"""Tests of lab/studies/twins.py: its measures, its cells and its page.

    python -m pytest tests/lab/test_twins_study.py           # about half a minute on one core
"""

import json
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import gcd
from infra import files
from lab.studies import common, twins

SMALL = ["--seeds", "1", "--iterations", "12", "--jobs", "1"]


def result(*q_N, cosine=(1.0, 0.5), auc=None):
    """A cell's result with these probabilities at iterations 0, 10, ..."""
    path = [{"iteration": 10 * k, "q_P": 0.9, "q_N": q, "cosine": cosine[min(k, len(cosine) - 1)]}
            for k, q in enumerate(q_N)]
    return {"path": path, "auc": auc}


@pytest.mark.fast
def test_the_cells_are_those_of_the_design():
    """Three cold starts x four arms x 20 seeds, four fast arms, and six changed settings.

    The latter have five seeds and two cold starts (lambda has no GRPO).
    """
    requested = twins.cells_of(True, range(20), 240)
    assert len(requested) == 3 * 4 * 20 + 4 * 20 + 2 * 5 * (2 * 5 + 1)
    assert len(twins.cells_of(False, range(5), 240)) == 5 * 5
    assert requested["+GCD, from coins, likely 0.6, seed 4"]["likely"] == 0.6
    assert {settings["seed"] for settings in requested.values() if settings["flaw"] == 0.1} == set(range(5))


@pytest.mark.fast
def test_the_numbers_of_a_run_by_hand():
    one = result(0.2, 1.0, 0.4)
    assert twins.final(one) == 0.4
    assert twins.area(one) == pytest.approx((0.6 + 0.7) / 2)                  # two trapezoids of equal width
    assert twins.cosine_drop(one) == 0.5
    assert twins.cosine_drop(result(0.2, 0.4, cosine=(1.0, None))) is None


@pytest.mark.fast
def test_the_numbers_of_an_arm():
    row = twins.arm_row({0: result(0.2, 0.1, auc=1.0), 1: result(0.2, 0.9, cosine=(1.0, None))})
    assert row["final"]["mean"] == 0.5 and row["final"]["half"] == pytest.approx(12.706 * 0.4, rel=1e-3)
    assert (row["removed"], row["n"], row["auc"], row["cosine"]) == (1, 2, 1.0, 0.5)


@pytest.mark.fast
@pytest.mark.parametrize("ends, expected", [((0.1, 0.2, 0.1), "less"), ((0.9, 0.95, 0.97), "more"),
                                        ((0.1, 0.9, 0.5), "no difference shown")])
def test_a_verdict_follows_from_the_interval(ends, expected):
    reference = {seed: result(0.2, 0.5 + seed / 100) for seed in range(3)}
    found = twins.against({seed: result(0.2, end) for seed, end in enumerate(ends)}, reference)
    assert found["verdict"] == expected
    assert twins.against({0: result(0.1)}, {0: result(0.2)})["verdict"] == "not measurable"        # one seed


@pytest.mark.fast
@pytest.mark.parametrize("at_first, in_rl, coins, trunk, cure, controls", [
    ((-0.7, 0.2), (-0.5, 0.2), (0.0, 0.1), (0.0, 0.0), "yes", "yes"),
    ((-0.7, 0.2), (-0.1, 0.2), (-0.6, 0.1), (0.0, 0.0), "partly", "no"),        # random labels do as well
    ((0.7, 0.2), (-0.1, 0.2), (0.0, 0.1), (0.0, 0.1), "no", "no"),
    ((-0.7, 0.2), (-0.5, 0.2), (0.0, 0.1), None, "yes", "not measurable"),
    ((-0.7, None), (-0.5, 0.2), (0.0, 0.1), (0.0, 0.0), "not measurable", "not measurable")])
def test_agreement_with_the_paper_is_a_fixed_rule(at_first, in_rl, coins, trunk, cure, controls):
    verdicts = {"GRPO from judge against GRPO from coins": at_first,
                "+GCD against GRPO, from coins": in_rl,
                "+GCD, coins for labels against GRPO, from coins": coins,
                f"{twins.OWN_TRUNK} against GRPO, from coins": trunk}
    found = {name: {"mean": pair[0], "half": pair[1], "verdict": "not measurable" if pair[1] is None else
                    "less" if sum(pair) < 0 else "more" if pair[0] > pair[1] else "no difference shown"}
             for name, pair in verdicts.items() if pair}
    assert twins.agreement(found) == {"cure": cure, "controls": controls}


@pytest.mark.fast
def test_mediation_is_a_rank_correlation_over_the_runs_of_the_main_grid():
    def ending(q_N, cosine):
        return result(0.9, q_N, cosine=(1.0, cosine))

    table = {("coins", "GRPO", ()): {0: ending(0.9, 0.9), 1: ending(0.5, 0.5)},
             ("coins", "+GCD", ()): {0: ending(0.1, 0.1), 1: ending(0.1, None)},
             ("coins", "+GCD", (("flaw", 0.1),)): {0: ending(0.9, 0.0)}}
    table["coins", twins.OWN_TRUNK, ()] = {0: ending(0.9, 0.0)}                # GRPO's policy again
    found = twins.mediation(table)
    assert len(found["points"]) == 3 and found["spearman"] == pytest.approx(1)
    assert found["within"] == {"coins: GRPO": None, "coins: +GCD": None}                  # two runs and one
    assert twins.mediation({})["spearman"] is None


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a finished study of minimal size."""
    out = tmp_path_factory.mktemp("twins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "COLD_START", ("--demonstrations", "600"))
        assert twins.main([*SMALL, "--out", str(out / "out"), "--runs", str(out / "runs")]) == 0
    return out


def test_the_study_writes_numbers_figures_and_page(study):
    found = json.loads((study / "out" / "twins.json").read_text())
    assert {(row["cold"], row["arm"]) for row in found["rows"]} == set(twins.FIRST)
    assert all(0 < row["final"]["mean"] < 1 for row in found["rows"])
    assert [figure["agrees"] for figure in found["figures"]][1:] == ["not measurable"] * 2         # one seed
    only = [*SMALL, "--all", "--jobs", "0", "--out", str(study / "out"), "--runs", str(study / "runs")]
    assert twins.main(only) == 0                                     # only these cells are stored
    assert json.loads((study / "out" / "twins.json").read_text())["rows"] == found["rows"]
    assert {path.suffix for path in (study / "out").iterdir()} == {".json", ".jsonl", ".svg", ".md"}
    assert "nan" not in (study / "out" / "twins.md").read_text()


def test_every_arm_starts_where_its_cold_start_ended(study):
    """And no two arms end at the same point."""
    cells = common.finished_cells(study / "out" / "twins.jsonl", twins.cells_of(False, range(1), 12)).values()
    paths = [(cell["settings"]["cold"], cell["result"]["path"]) for cell in cells]
    assert len(paths) == 5 and len({path[-1]["q_N"] for _, path in paths}) == 5
    assert len({(cold, path[0]["q_N"]) for cold, path in paths}) == 3


def test_the_measures_of_a_model_against_direct_computation(study, monkeypatch):
    """Against states one at a time, and against a difference quotient.

    A small step along P's gradient changes the mean log-probability in N by the step times the inner product
    of the two gradients.
    """
    monkeypatch.setattr(twins, "PROBES", 4)
    settings = twins.settings_of("coins", "GRPO", 0)
    cold = twins.cold_folder(settings, study / "runs") / files.CHECKPOINT
    actor = common.load_actor(cold, twins.environment(settings))
    actor.model.double()
    R, game = actor.chat.encode(twins.twins.PULL)[0], twins.twins.Game(0.0, Counter())

    def mean_logprob(kind):
        tasks = [twins.twins.task(f"probe/{i}", "probe", kind) for i in range(4)]
        rows = [torch.tensor([actor.chat.observe(game.reset(task), True)]) for task in tasks]
        return sum(actor.model(row)[0, -1].log_softmax(-1)[R] for row in rows) / 4

    found = twins.probe(actor)
    with torch.no_grad():
        assert math.log(found["q_N"]) >= float(mean_logprob("N")) > math.log(found["q_N"]) - 0.5     # Jensen
    parameters = list(actor.model.parameters())
    grads = {kind: torch.autograd.grad(mean_logprob(kind), parameters) for kind in "PN"}
    size = {kind: math.sqrt(sum(float((grad**2).sum()) for grad in grads[kind])) for kind in "PN"}
    with torch.no_grad():
        before, eta = float(mean_logprob("N")), 1e-6 / size["P"]
        for parameter, grad in zip(parameters, grads["P"]):
            parameter += eta * grad
        change = float(mean_logprob("N")) - before
    assert change / (1e-6 * size["N"]) == pytest.approx(found["cosine"], abs=1e-3)


def test_a_finished_cell_is_not_repeated_unless_its_settings_changed(study, monkeypatch):
    monkeypatch.setattr(gcd, "main", lambda argv: pytest.fail("a run was started"))
    flags = ["--out", str(study / "out"), "--runs", str(study / "runs")]
    before = json.loads((study / "out" / "twins.json").read_text())
    assert twins.main([*SMALL, *flags]) == 0
    after = json.loads((study / "out" / "twins.json").read_text())
    assert after | {"command": ""} == before | {"command": ""}
    with pytest.raises(pytest.fail.Exception, match="a run was started"):
        twins.main([*SMALL, *flags, "--iterations", "24"])


def test_with_its_own_trunk_the_judge_leaves_grpos_policy_unchanged(study, tmp_path):
    """The weights equal GRPO's bit for bit, while the judge on the other trunk is trained and logged."""
    settings = twins.settings_of("coins", "GRPO", 0, iterations=3)
    cold = twins.cold_folder(settings, study / "runs") / files.CHECKPOINT
    flags = [*twins.environment(settings), *twins.RL, "--model", cold, "--demonstrations", 0,
             "--iterations", 3]
    common.train([*flags, *twins.ARMS["GRPO"]], tmp_path / "grpo")
    with twins.own_trunk():
        common.train([*flags, *twins.ARMS[twins.OWN_TRUNK], "--judge-weight", 1], tmp_path / "own")
    common.train([*flags, *twins.ARMS["+GCD"], "--judge-weight", 1], tmp_path / "gcd")
    grpo, own, shared = (load_file(tmp_path / name / files.CHECKPOINT / "model.safetensors")
                         for name in ("grpo", "own", "gcd"))
    assert all(torch.equal(grpo[name], own[name]) for name in grpo)
    assert any(not torch.equal(grpo[name], shared[name]) for name in grpo)
    lines = files.iterations_in(files.read_lines(tmp_path / "own" / files.METRICS)[0])
    assert all(line["judge/turns"] > 0 for line in lines)
    shared_lines = files.iterations_in(files.read_lines(tmp_path / "gcd" / files.METRICS)[0])
    assert lines[0]["judge/reward"] == shared_lines[0]["judge/reward"]    # same answers


def test_gcd_changes_nothing_without_readable_verdicts(study, tmp_path):
    """After a cold start without questions, all answers are unreadable and get the same reward."""
    settings = twins.settings_of("plain", "GRPO", 0)
    cold = twins.cold_folder(settings, study / "runs") / files.CHECKPOINT
    flags = [*twins.environment(settings), *twins.RL, "--model", cold, "--demonstrations", 0,
             "--iterations", 3]
    for arm in ("GRPO", "+GCD"):
        common.train([*flags, *twins.ARMS[arm]], tmp_path / arm)
    lines = files.iterations_in(files.read_lines(tmp_path / "+GCD" / files.METRICS)[0])
    assert all(line["judge/unreadable_frac"] == 1 for line in lines)
    grpo, judged = (load_file(tmp_path / arm / files.CHECKPOINT / "model.safetensors")
                    for arm in ("GRPO", "+GCD"))
    assert all(torch.equal(grpo[name], judged[name]) for name in grpo)


@pytest.mark.fast
@pytest.mark.parametrize("flags, message", [
    (["--iterations", "13"], "--iterations=13: expected a multiple of 12"),
    (["--seeds", "0"], "--seeds=0: expected 1 to 90"), (["--jobs", "-1"], "--jobs=-1: expected 0 to 256"),
    (["--jobs", "0"], "twins.jsonl has no cell of GRPO from a plain cold start")])
def test_errors_are_reported_before_anything_runs(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        twins.main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err and not any(path.stat().st_size for path in tmp_path.iterdir())
