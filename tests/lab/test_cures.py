"""Tests of lab/studies/cures.py: its arms, the changes that it makes to a run, its measures and its page.

    python -m pytest tests/lab/test_cures.py           # about a minute on one core
"""

import contextlib
import json
import math
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file

import gcd
import judge
from infra import files
from lab.envs import twins as states
from lab.studies import common, cures, twin_measures
from rollout import Episode, Turn


def result(*q_N, auc=(), probe=(0.5, 1.0)):
    """A cell's result with these probabilities at iterations 0, 10, ..."""
    path = [{"iteration": 10 * k, "q_P": 0.9, "q_N": q, "cosine": 0.5, "leak": 4.0, "probe": probe[k > 0]}
            for k, q in enumerate(q_N)]
    return {"path": path, "auc": list(auc)}


def test_the_arms_are_those_of_the_design():
    """GRPO after five kinds of questions, two more arms after coins, and the recipe, each with and without a
    KL, tied and untied; nine of the last seeds, 22 of the decisive ones and 22 of the latest alone; six
    of timing, and four that are asked before the command."""
    names = [cures.name_of(arm) for arm in cures.arms()]
    assert len(set(names)) == len(names) == 4 * (5 + 2 + 1) + 9 + 22 + 22 + 6 + 4
    assert "+GCD after coins, no KL, untied" in names and "+GCD after coins, KL 0.01, tied, held" in names
    assert len(cures.OWN) == 12 and set(cures.OWN) < set(names)
    few, more = cures.cells_of(range(3), 24), cures.cells_of(range(5), 24, {names[0]})
    assert len(few) == 3 * (len(names) - 9 - 22 - 22) and len(more) == len(few) + 2
    new = cures.cells_of(range(cures.NEW, cures.NEW + 2), 24, {names[0]})
    assert len(new) == 2 * len(cures.NEW_ARMS) == 16
    assert set(cures.CONFIRMING) < set(cures.NEW_ARMS) < set(names)
    last = cures.cells_of(range(cures.OWN_LUCK, cures.OWN_LUCK + 2), 24)
    assert len(last) == 2 * len(cures.LAST_ARMS) == 42
    decisive = cures.cells_of(range(cures.DECISIVE, cures.DECISIVE + 2), 24)
    assert len(decisive) == 2 * len(cures.DECISIVE_ARMS) == 68 and set(cures.DECISIVE_ARMS) < set(names)
    latest = cures.cells_of(range(cures.LATEST - 1, cures.LATEST + 1), 24)
    assert len(latest) == 2 * len(cures.DECISIVE_ARMS) + len(cures.LATEST_ARMS) == 90
    weights = {arm: cures.flags_of(arm) for arm in cures.ARMS}
    assert "--judge-weight" not in weights["GRPO"] and weights["+GCD, weight .1"][-1] == "0.1"
    assert all(flags.count("--judge-weight") == (not arm.startswith("GRPO"))
               for arm, flags in weights.items())
    thrice = {arm: flags[-2:] for arm, flags in weights.items() if "thrice the KL" in arm}
    assert len(thrice) == 4 and {*thrice.values()} == {("--kl-coef", "0.03")}
    lightened = [arm for arm in cures.ARMS if "then once" in arm]
    heavier = {"GRPO, ten times the KL": "0.1", "GRPO, thirty times the KL": "0.3"} | dict.fromkeys(
        lightened, "0.1")
    assert len(lightened) == 3 and all(cures.CHANGES[arm] is cures.kl_lightened for arm in lightened)
    assert thrice | {arm: ("--kl-coef", of) for arm, of in heavier.items()} == {
        arm: flags[-2:] for arm, flags in weights.items() if "--kl-coef" in flags}
    assert all(cures.QUESTIONS[arm["questions"]] and cures.ARMS[arm["arm"]] for arm in cures.arms())


@pytest.mark.parametrize("kind, expected", [("signs", ["good", "good", "bad", "bad"]),
                                            ("parity", ["good", "bad", "good", "bad"])])
def test_questions_on_the_sign_and_its_parity_do_not_depend_on_the_command(kind, expected):
    for command in states.COMMANDS:
        found = []
        for sign in ("sun", "star", "pit", "cave"):
            turn = Turn(f"You see oak {sign} elm.", [], [], [], command, command, True, "")
            found += states.Environment.labels[kind](Episode(None, 0, turns=[turn]))
        assert found == expected


def test_the_numbers_of_an_arm_by_hand():
    aucs = [0.5] * 10 + [1.0] * 12
    row = cures.arm_row({0: result(0.2, 0.95, 0.4, auc=aucs), 1: result(0.2, 0.3, 0.92, auc=[0.5] * 22)})
    assert (row["removed"], row["n"], row["probe_start"], row["probe"]) == (1, 2, 0.5, 1.0)
    assert row["leak"] == pytest.approx((0.4 / 0.6 + 0.4 / 0.08) / 2)         # 4 times .1 over 1 - q_N
    assert row["right"] == [19, None] and row["away"] == [10, 20]           # (1 * 0.5 + 9 * 1) / 10 > 0.9
    assert row["lag"] == [20 - 20]                     # of the run that kept it; never right
    assert cures.times(row["right"]) == "19–19, never 1"
    assert cures.removed_by_leak({"a": {0: result(0.2, 0.1)}}) == {"below": [1, 1], "above": [0, 0]}
    assert cures.last_quarter([1, 2, 3, 4, 5, 6, 7, 8]) == [7, 8]


def test_runs_are_foretold_within_their_arm_and_where_the_flaw_is_alive(monkeypatch):
    """The cosine is the same in all here, and the leak .4 / (1 - q_N): larger where the flaw is likelier."""
    monkeypatch.setattr(cures, "ALIVE", (10, 20, 50))
    table = {"a": {0: result(0.2, 0.6, 0.1), 1: result(0.2, 0.7, 0.9), 2: result(0.2, 0.8, 0.3)},
             "b": {0: result(0.2, 0.1, 0.1)}, "c": {0: result(0.2, 0.65, 0.3)}}
    found = cures.foretold(table)
    # in a .6 and .8 are removed at 10 and .7 is kept: one of two pairs in order; at 20 only .9 is alive
    assert [(found[i]["removed"], found[i]["n"]) for i in (10, 20, 50)] == [(3, 4), (0, 1), (0, 0)]
    assert found[10]["q_N"] == found[10]["leak"] == [0.5, 0.0, 1.0] and found[10]["cosine"] == [0.5] * 3
    assert found[20]["q_N"] is None


def test_the_interval_of_an_auc_is_over_seeds():
    """Ten seeds that win against one more; of one of them this is not so, whether drawn once or often."""
    pairs = [(seed, 10, -1.0 if seed else 1.0) for seed in range(10)]
    share, low, high = cures.auc_of(pairs)
    assert share == 0.9 and 0.6 < low < 0.8 and high == 1.0
    assert cures.auc_of(pairs * 100) == pytest.approx([share, low, high])   # nothing new


def test_runs_in_common_are_those_that_both_arms_have():
    names = [cures.name_of(cures.settings_of(kind, "GRPO", 0.0, "tied")) for kind in ("sign", "judge")]
    table = dict(zip(names, ({0: result(0.2, 0.1), 1: result(0.2, 0.9), 2: result(0.2, 0.1)},
                             {0: result(0.2, 0.9), 1: result(0.2, 0.9)})))
    assert cures.in_common(table, ("sign", "GRPO"), ("judge", "GRPO")) == [1, 0, 2]
    assert cures.in_common({}, ("sign", "GRPO"), ("judge", "GRPO")) == [0, 0, 0]


def test_lags_and_held_runs_are_compared_like_for_like():
    right, never = [0.5] * 10 + [1.0] * 12, [0.5] * 22            # right from 19 on
    gcd_runs = {0: result(0.2, 0.95, 0.4, auc=right), 1: result(0.2, 0.95, 0.9, auc=right),
                2: result(0.2, 0.95, 0.9, auc=never), 3: result(0.2, 0.3, 0.3, auc=right)}
    found = cures.lags({f"{arm} after coins, no KL, untied": gcd_runs for arm in ("+GCD", "GRPO")})
    assert found == {"removed": [[9], 0], "kept": [[9], 1]}       # seed 3 never ran away
    table = {"+GCD after coins, no KL, tied, held": {0: result(0.1), 1: result(0.9)},
             "+GCD after coins, no KL, tied, constant rate": {seed: result(0.1) for seed in range(3)}}
    assert cures.waiting(table, 0.0) == [1, 2, 2] and cures.waiting(table, 0.01) == [0, 0, 0]


def test_arms_are_unsettled_if_their_first_seeds_do_not_agree():
    table = {"a": {0: result(0.9, 0.1), 1: result(0.9, 0.9), 2: result(0.9, 0.9)},
             "b": {0: result(0.9, 0.1), 1: result(0.9, 0.1), 2: result(0.9, 0.1), 3: result(0.9, 0.9)}}
    assert cures.unsettled(table) == ["a"]


@pytest.mark.parametrize("gcd_ends, coins_ends, without, expected", [
    ((0.1, 0.12, 0.1), (0.9, 0.91, 0.9), True, "yes"), ((0.1, 0.12, 0.1), (0.9, 0.91, 0.9), False, "partly"),
    ((0.9, 0.92, 0.9), (0.9, 0.91, 0.9), True, "no"), ((0.1, 0.12, 0.1), (0.1, 0.11, 0.1), True, "no"),
    ((0.1,), (0.9,), True, "not measurable")])
def test_the_verdict_needs_a_difference_from_grpo_and_from_coins(gcd_ends, coins_ends, without, expected):
    """With a KL in the decisive seeds, and without in the first, where GCD does as with one if `without`."""
    def table_of(kl, ends):
        return {cures.name_of(cures.settings_of("coins", arm, kl, embeddings)): {
            seed: result(0.3, end + (seed == 1) * 0.01) for seed, end in enumerate(of_arm)}
            for embeddings in cures.EMBEDDINGS for arm, of_arm in ends.items()}

    ends = {"GRPO": (0.9, 0.93, 0.9), "+GCD": gcd_ends, "+GCD, coins": coins_ends}
    found = cures.decided({}, table_of(0.01, ends))
    assert cures.verdict(table_of(0.0, ends if without else ends | {"+GCD": coins_ends}), found) == expected


def test_a_run_whose_policy_was_held_to_the_end_is_left_out():
    arm = cures.settings_of("coins", "+GCD", 0.01, "tied", "held")
    everything = cures.cells_of(range(2), 24)
    results = {f"{cures.name_of(arm)}, seed {seed}": result(0.3, 0.25, auc=[auc] * 24)
               for seed, auc in enumerate((0.95, 0.5))}
    assert [*cures.table_of(everything, results)[cures.name_of(arm)]] == [0]


def test_a_pooled_difference_is_of_each_seeds_mean_over_the_settings():
    """Two seeds of four settings, and a third that one setting lacks."""
    table, settings = {}, [(kl, embeddings) for kl in cures.COEFFICIENTS for embeddings in cures.EMBEDDINGS]
    for k, setting in enumerate(settings):
        for arm, ends in (("+GCD", (0.1 * k, 0.2)), ("GRPO", (0.9, 0.6))):
            name = cures.name_of(cures.settings_of("coins", arm, *setting))
            table[name] = {seed: result(0.3, end) for seed, end in enumerate([*ends, *[0.0] * (k > 0)])}
    found = cures.pooled(table, "+GCD", "GRPO")
    assert found["seeds"] == {0: pytest.approx(0.15 - 0.9), 1: pytest.approx(0.2 - 0.6)}
    assert found["removed"] == [8, 0] and found["n"] == 8
    assert cures.pooled({}, "+GCD", "GRPO") is None
    with_kl = cures.pooled(table, "+GCD", "GRPO", (0.01,))         # two settings, and both have two seeds
    assert with_kl["seeds"] == {0: pytest.approx(0.05 - 0.9), 1: pytest.approx(0.2 - 0.6)}
    further = [{name: {seed: result(0.3, 0.5)} for name in cures.LAST_ARMS} for seed in (2, 3)]
    found = cures.again(table, *further)
    assert found["GRPO"]["new"] is found["GRPO"]["own"] is None
    assert [*found["GRPO"]["first"]["seeds"]] == [0, 1]
    own = {name: {seed: result(0.3, 0.1 * seed + 0.2 * name.startswith("GRPO")) for seed in (2, 3)}
           for name in cures.LAST_ARMS}
    found = cures.elsewhere({}, own)
    judged, constant = found["after judge questions"], found["after random answers, constant rate, tied"]
    assert judged["own"]["mean"] == constant["first and own"]["mean"] == pytest.approx(-0.2)
    assert judged["first"] is None
    less = found["after random answers, constant rate, tied, GCD less coin tosses"]["own"]
    assert less["mean"] == 0 and less["n"] == 2
    assert (judged["own"]["n"], constant["own"]["n"], constant["own"]["removed"]) == (4, 2, [2, 1])
    decisive = {name: {seed: result(0.3, 0.6 - 0.4 * (name.startswith("+GCD after"))) for seed in (30, 31)}
                for name in cures.DECISIVE_ARMS}
    found = cures.decided(own, decisive)
    lead = found["+GCD less GRPO"]
    assert lead["decisive"]["mean"] == pytest.approx(-0.4) and lead["decisive"]["removed"] == [4, 0]
    assert [*lead["all with outcomes of their own"]["seeds"]] == [2, 3, 30, 31]
    sign = found["+sign less GRPO"]["decisive"]
    assert (sign["n"], sign["mean"]) == (4, 0)
    assert found["+GCD less GRPO, constant rate, tied"]["decisive"]["n"] == 2
    counts = cures.of_decisive(decisive)
    assert counts["+GCD after coins"] == {"removed": 4, "lowered": 4, "n": 4, "q_N": pytest.approx(0.2),
                                          "q_P": pytest.approx(0.9),
                                          # 12 of 16 tasks are P: .9 wins with .9, .1 with .4; in N .2 with .2
                                          "wins": pytest.approx(0.75 * 0.85 + 0.25 * 0.44),
                                          # sharpened to .4 by hand: 1 / (1 + 5 (.02 / .9)^2.5), and
                                          # 1 / (1 + 5 (.16 / .2)^2.5)
                                          "sharp wins": pytest.approx(
                                              0.75 * (0.4 + 0.5 / (1 + 5 * (0.02 / 0.9) ** 2.5))
                                              + 0.25 * (0.5 - 0.3 / (1 + 5 * 0.8 ** 2.5)))}
    assert lead["decisive"]["wins"]["mean"] == pytest.approx(0.25 * 0.4 * 0.3)
    assert counts["GRPO after coins"]["lowered"] == 0
    assert counts["GRPO after judge"]["removed"] == 0 and "GRPO after none" not in counts
    both = cures.decided({}, {name: {seed: result(0.3, 0.1 if "judge" in name else 0.8) for seed in (30, 31)}
                              for name in cures.DECISIVE_ARMS})
    assert both["both halves, +GCD, weight .1, less neither"]["decisive"]["mean"] == pytest.approx(-0.7)
    assert both["+GCD less GRPO, after judge questions"]["decisive"]["mean"] == 0


@pytest.mark.parametrize("with_kl, without, expected", [
    (0.1, 0.9, "partly"), (0.9, 0.9, "yes"), (0.1, 0.1, "no")])
def test_a_flaw_runs_away_if_three_of_four_runs_keep_it(with_kl, without, expected):
    table = {cures.name_of(cures.settings_of("none", "GRPO", kl, embeddings)): {0: result(0.3, end)}
             for kl, end in zip(cures.COEFFICIENTS, (with_kl, without)) for embeddings in cures.EMBEDDINGS}
    assert cures.runs_away(table) == expected


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The folder of a finished study of a few arms and of minimal size."""
    out = tmp_path_factory.mktemp("cures")
    chosen = [cures.settings_of("coins", "GRPO", 0.01, "tied"),
              cures.settings_of("coins", "+GCD", 0.0, "untied"),
              cures.settings_of("coins, before", "+sign, before", 0.01, "tied")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cures, "arms", lambda: chosen)
        patch.setattr(cures, "DEMONSTRATIONS", 200)
        patch.setattr(cures, "POINTS", 4)
        assert cures.main(["--seeds", "1", "--iterations", "4", "--jobs", "1", "--out", str(out / "out"),
                           "--runs", str(out / "runs")]) == 0
    return out


@pytest.mark.slow
def test_the_study_writes_numbers_figure_and_page(study):
    found = json.loads((study / "out" / "cures.json").read_text())
    assert [row["n"] for row in found["rows"]] == [1, 1, 1]
    assert all(0 < row["final"]["mean"] < 1 and 0.5 <= row["probe"] <= 1 for row in found["rows"])
    assert [row["auc"] is None for row in found["rows"]] == [True, False, False]
    assert [figure["agrees"] for figure in found["figures"]][:2] == ["not measurable"] * 2
    assert "not run" in found["figures"][0]["found"]
    assert {path.suffix for path in (study / "out").iterdir()} == {".json", ".jsonl", ".svg", ".md"}
    assert "nan" not in (study / "out" / "cures.md").read_text()


@pytest.mark.slow
def test_a_linear_probe_finds_a_direction_and_nothing_where_there_is_none(study):
    """Against hidden states of which one column tells the kind, or none does."""
    settings = cures.settings_of("coins", "GRPO", 0.01, "tied") | {"seed": 0}
    folder = cures.cold_folder(settings, study / "runs") / files.CHECKPOINT
    actor = common.load_actor(folder, list(cures.COMMON))
    noise = torch.randn(4 * twin_measures.PROBES, 32, generator=torch.Generator().manual_seed(0))
    for strength, low, high in ((4.0, 0.97, 1.0), (0.0, 0.35, 0.65)):
        hidden = noise.clone()
        hidden[:, 5] += strength * torch.tensor([1.0, -1.0]).repeat(2 * twin_measures.PROBES)
        actor.model = lambda *arguments, hidden=hidden[:, None], **settings: hidden
        assert low <= twin_measures.linear_probe(actor) <= high


@pytest.mark.slow
def test_the_measures_of_a_model_against_direct_computation(study, monkeypatch):
    """Against states one at a time, and against a difference quotient.

    A small step along P's gradient changes the mean log-probability in N by the step times the inner product
    of the two gradients.
    """
    monkeypatch.setattr(twin_measures, "PROBES", 4)
    settings = cures.settings_of("coins", "GRPO", 0.01, "tied") | {"seed": 0}
    folder = cures.cold_folder(settings, study / "runs") / files.CHECKPOINT
    actor = common.load_actor(folder, list(cures.COMMON))
    actor.model.double()
    R, game = actor.chat.encode(states.PULL)[0], states.Game(0.0, Counter())

    def logits(kind):
        tasks = [states.task(f"probe/{i}", "probe", kind) for i in range(4)]
        rows = [torch.tensor([actor.chat.observe(game.reset(task), True)]) for task in tasks]
        return [actor.model(row)[0, -1] for row in rows]

    def mean_logprob(kind):
        return sum(logit_V.log_softmax(-1)[R] for logit_V in logits(kind)) / 4

    found = twin_measures.probe(actor)
    with torch.no_grad():
        ids = [actor.chat.encode(command)[0] for command in states.COMMANDS]
        for prefix, name, temperature in (("", "q_N", 1.0), ("sharp_", "sharp_N", 0.4)):
            sharp = sum((logit_V / temperature).softmax(-1) for logit_V in logits("N")) / 4
            assert found[name] == pytest.approx(float(sharp[R]), rel=1e-5)
            assert found[f"{prefix}commands_N"] == pytest.approx(float(sharp[ids].sum()), rel=1e-5)
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
    assert change / (1e-6 * size["P"]) == pytest.approx(found["leak"], abs=1e-3)


def test_the_probability_at_another_temperature_is_computed_and_beside_one_that_was_measured():
    other = twin_measures.sharpened(0.5)              # the five others have .1 each: (1/5)^2.5 times R's
    assert other == pytest.approx(1 / (1 + 5 * 0.2 ** 2.5))
    assert (twin_measures.sharpened(0.0), twin_measures.sharpened(1.0)) == (0.0, 1.0)
    ended = result(0.3, 0.5)
    assert cures.sharp_errors({"a": {0: ended}}) is None                 # stored without
    measured = result(0.3, 0.5)
    measured["path"][-1] |= {"sharp_P": twin_measures.sharpened(0.9) - 0.01, "sharp_N": other - 0.02,
                             "sharp_commands_P": 1.0, "sharp_commands_N": 0.9}
    less = -0.75 * 0.01 * 0.5 + 0.25 * (0.02 * 0.3 - 0.1 * 0.5)          # what is no command wins nothing
    assert cures.sharp_errors({"a": {0: ended, 1: measured}}) == [pytest.approx(less)] * 2
    one, other = (cures.name_of(cures.settings_of("coins", arm, cures.COEFFICIENTS[0], "tied"))
                  for arm in ("GRPO", "+GCD"))
    for known in (ended, measured):                   # a difference has no measured and no computed side
        table = {one: {0: known, 1: measured}, other: {0: measured, 1: measured}}
        found = cures.pooled(table, "GRPO", "+GCD", cures.COEFFICIENTS[:1], embeddings=["tied"])
        assert found["sharp wins"]["mean"] == 0


@pytest.mark.slow
def test_gcd_changes_nothing_without_readable_verdicts(tmp_path):
    """After a cold start without questions, all answers are unreadable and get the same reward."""
    common.train([*cures.COMMON, "--seed", 0, "--demonstrations", 200, *cures.QUESTIONS["none"],
                  "--iterations", 0], tmp_path / "cold")
    flags = [*cures.COMMON, "--seed", 0, "--model", tmp_path / "cold" / files.CHECKPOINT,
             "--demonstrations", 0, "--iterations", 2]
    for arm in ("GRPO", "+GCD"):
        common.train([*flags, *cures.ARMS[arm]], tmp_path / arm)
    lines = files.iterations_in(files.read_lines(tmp_path / "+GCD" / files.METRICS)[0])
    assert all(line["judge/unreadable_frac"] == 1 for line in lines)
    grpo, judged = (load_file(tmp_path / arm / files.CHECKPOINT / "model.safetensors")
                    for arm in ("GRPO", "+GCD"))
    assert all(torch.equal(grpo[name], judged[name]) for name in grpo)


@pytest.mark.slow
def test_an_entropy_bonus_and_a_kl_that_becomes_lighter_reach_the_loss(study, tmp_path, monkeypatch):
    """The weights of both in each step's objective, over four iterations; of the arms whose KL becomes
    lighter, which are changed alike, for one.
    """
    settings = cures.settings_of("coins", "GRPO", 0.01, "tied") | {"seed": 0}
    cold = cures.cold_folder(settings, study / "runs") / files.CHECKPOINT
    update, seen = gcd.update.update, []

    def noted(model, optimizer, samples, objective, *arguments):
        seen.append((objective.kl_coef, objective.entropy_coef))
        return update(model, optimizer, samples, objective, *arguments)

    monkeypatch.setattr(gcd.update, "update", noted)
    bonuses = "GRPO, entropy bonus", "GRPO, half the entropy bonus"
    for arm in (*bonuses, "GRPO, ten times the KL, then once", "GRPO"):
        flags = [*cures.COMMON, "--seed", 0, "--kl", "loss", "--kl-coef", 0.01, *cures.flags_of(arm),
                 "--model", cold, "--demonstrations", 0, "--iterations", 4, "--minibatches", 1]
        with cures.CHANGES[arm]() if arm in cures.CHANGES else contextlib.nullcontext():
            common.train(flags, tmp_path / arm)
    lightened = [(0.1, 0)] * 2 + [(0.01, 0)] * 2
    assert seen == [(0.01, 0.1)] * 4 + [(0.01, 0.05)] * 4 + lightened + [(0.01, 0)] * 4


@pytest.mark.slow
def test_while_the_policy_is_held_only_the_judge_learns(study, tmp_path, monkeypatch):
    """With a judge that is never right enough the flawed action's probability stays, the judge's loss falls;
    with one that is right at once the run is that at a constant rate from then on."""
    settings = cures.settings_of("coins", "+GCD", 0.01, "tied") | {"seed": 0}
    cold = cures.cold_folder(settings, study / "runs") / files.CHECKPOINT
    flags = [*cures.COMMON, "--seed", 0, "--model", cold, "--demonstrations", 0, "--iterations", 4,
             "--judge-labels", "oracle", "--judge-weight", 1]
    monkeypatch.setattr(cures, "LAST", 2)
    found = {}
    for name, right in (("never", 2.0), ("at once", -1.0)):
        monkeypatch.setattr(cures, "RIGHT", right)
        with cures.constant_rate(), cures.policy_held():
            common.train(flags, tmp_path / name)
        found[name] = files.iterations_in(files.read_lines(tmp_path / name / files.METRICS)[0])
    assert all(line["policy/tokens"] == 0 for line in found["never"])
    assert [line["policy/tokens"] > 0 for line in found["at once"]] == [False, True, True, True]
    assert len({line["policy/lr"] for line in found["never"] + found["at once"]}) == 1
    start, judge_alone = (load_file(folder / "model.safetensors")
                   for folder in (cold, tmp_path / "never" / files.CHECKPOINT))
    assert any(not torch.equal(start[name], judge_alone[name]) for name in start)


@pytest.mark.slow
def test_a_question_before_the_command_has_no_command_in_it(study):
    settings = cures.settings_of("coins, before", "GRPO", 0.01, "tied") | {"seed": 0}
    folder = cures.cold_folder(settings, study / "runs") / files.CHECKPOINT
    chat = common.load_actor(folder, list(cures.COMMON)).chat
    prompt = chat.message("You see oak sun elm.", first=True)
    turn = Turn("You see oak sun elm.", prompt, chat.respond("pull"), [], "pull", "pull", True, "")
    usual, question_ids = chat.decode(judge.question_ids(chat, turn)), judge.question_ids
    with cures.asked_before():
        before = chat.decode(judge.question_ids(chat, turn))
    assert "pull" in usual and "pull" not in before
    assert before.startswith("<|user|>You see oak sun elm.<|user|>Was that") and usual.endswith(before[-12:])
    assert judge.question_ids is question_ids


@pytest.mark.parametrize("flags, message", [
    (["--iterations", "13"], "--iterations=13: expected a multiple of 24"),
    (["--seeds", "0"], "--seeds=0: expected 1 to 70"), (["--jobs", "-1"], "--jobs=-1: expected 0 to 256"),
    (["--jobs", "0"], "cures.jsonl has no cell")])
def test_errors_are_reported_before_anything_runs(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        cures.main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err and not any(path.stat().st_size for path in tmp_path.iterdir())
