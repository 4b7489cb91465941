"""Tests of lab/studies/origin.py and origin_cells.py: cells, measures, rules, and resuming.

    python -m pytest tests/lab/test_origin.py           # about a minute on one core
"""

import json
import math

import pytest
import torch

from infra import files
from lab.envs import strings
from lab.envs.strings import AXES
from lab.studies import common, origin, tilting
from lab.studies import origin_cells as cells
from lm.engine import Response
from rollout import EpisodeSpec

ENVIRONMENT = (*cells.ENVIRONMENT, "--problems", 6, "--hidden-size", 16, "--layers", 1)
TINY = {"ENVIRONMENT": ENVIRONMENT, "ALONG": (2,),
        "PRETRAINING": ("--demonstrations", 60, "--cold-start-batch", 10),
        "RL": ("--iterations", 2, "--tasks", 2, "--group-size", 2, "--minibatches", 1, "--lr", 1e-3),
        "TOY": ("--letters", 2, "--length", 2, "--k", 1, "--problems", 6, *ENVIRONMENT[-4:]),
        "TOY_PRETRAINING": ("--demonstrations", 20,),
        "TOY_RL": ("--admissible-only", "--tasks", 2, "--group-size", 2, "--minibatches", 1,
                   "--iterations", 2),
        "KINDS": {kind: flags and (*flags, "--iterations", 2) for kind, flags in cells.KINDS.items()},
        "RHOS": (0.01,), "FEW": range(1), "EACH": 16, "OMITTING_AT": (0.01,),
        "KS": [1, 4, 16], "agent": lambda seed, root: {"base": [0, 3], "GRPO": [64, 2]}}


@pytest.fixture
def tiny(monkeypatch):
    for name, value in TINY.items():
        for module in (cells, origin):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


def test_the_cells_are_those_of_the_design():
    """For five seeds: at each rho a base with positions and four axes, one without and its length axis; at
    two of them also composition without a pair.

    At rho .01 also five checkpoints of pretraining, five kinds of toy, three of these also longer, and for
    three seeds three alternatives and the agent. Of RL's methods a cell for each of two axes and each seed.
    """
    requested, alone = cells.cells_of(True, range(5)), cells.method_cells(range(5))
    assert len(requested) == 5 * (4 * (1 + 4 + 1 + 1) + 2) + 5 * (5 + 8) + 3 * (3 * 4 + 1) + len(alone)
    assert len(alone) == 5 * 2 and {s["what"] for s in alone.values()} == {"methods"}
    assert alone.items() <= requested.items()
    default = cells.cells_of(False, range(1))
    assert len(default) == 1 + 4 + 5 + 8 and {s.get("rho", 0.01) for s in default.values()} == {0.01}
    names = list(requested)
    for name, settings in requested.items():
        if settings["what"] in cells.INSTEAD:                # the GRPO cell comes before its alternatives
            assert names.index(cells.name_of(settings | {"what": "GRPO"})) < names.index(name)


def test_the_steps_of_pretraining_are_those_of_the_page():
    demonstrations, batch = (cells.PRETRAINING[cells.PRETRAINING.index(flag) + 1]
                             for flag in ("--demonstrations", "--cold-start-batch"))
    assert 2 * (demonstrations // batch) == cells.STEPS        # the cold start has two stages


@pytest.mark.slow
def test_the_full_study_at_minimal_size(tiny, tmp_path, capsys):
    """Every kind of cell, the page and the figures; after the loss of a cell, a second call runs only that
    cell, with the same result."""
    command = ["--all", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "out"), "--runs",
               str(tmp_path / "runs")]
    assert origin.main(command) == 0
    path = tmp_path / "out" / "origin.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == len(cells.cells_of(True, range(1))) == 7 + 1 + (2 + 12) + 8 + 1 + 2
    page = (tmp_path / "out" / "origin.md").read_text()
    assert "nan" not in page.lower() and all(axis in page for axis in AXES) and "Not run." not in page
    published = json.loads((tmp_path / "out" / "origin.json").read_text())
    for figure in published["figures"]:
        assert (tmp_path / "out" / figure["picture"]).read_text().startswith("<?xml")
    results = {record["cell"]: record["result"] for record in files.read_lines(path)[0]}
    lost = next(name for name in results if name.startswith("GRPO, axis depth, rho 0.01"))
    path.write_text("".join(line + "\n" for line in lines if json.loads(line)["cell"] != lost))
    assert origin.main(command) == 0
    assert {record["cell"]: record["result"] for record in files.read_lines(path)[0]} == results
    of_methods = next(result for name, result in results.items() if name.startswith("methods"))
    assert [*of_methods["right"]] == [*map(cells.base_at, cells.TEMPERATURES), *cells.METHODS]
    assert all(len(right) == 6 and max(right) <= 16 for right in of_methods["right"].values())
    sft = f"{cells.SFT}, axis depth, rho 0.01, positions rotary, seed 0"
    settings = cells.cells_of(True, range(1))[sft]
    actor = cells.load(cells.base_of(settings, tmp_path / "runs") / files.CHECKPOINT, settings)
    tokens = cells.grpo_tokens(settings, path)
    in_solutions = sum(sum(sample.sampled) for sample in cells.solutions(actor, tokens))
    assert 0 <= in_solutions - tokens <= 42                # of a depth at most one more solution
    capsys.readouterr()


@pytest.mark.slow
def test_without_cells_there_is_no_page(tmp_path, capsys):
    with pytest.raises(SystemExit):
        origin.main(["--jobs", "0", "--out", str(tmp_path)])
    assert "has no run of GRPO" in capsys.readouterr().err


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """The toy's base with little training, as an actor."""
    folder = tmp_path_factory.mktemp("toys") / "base"
    flags = [*cells.ENVIRONMENT, "--seed", 0, *cells.TOY]
    cold = ("--demonstrations", 50, "--iterations", 0, "--hidden-size", 16, "--layers", 1)
    common.train([*flags, *cold], folder)
    return common.load_actor(folder / files.CHECKPOINT, [*flags, "--admissible-only"])


@pytest.mark.slow
def test_the_listed_probabilities_agree_with_sampling(toys):
    """They add up to 1, and agree with the shares of 2,000 samples within five standard errors."""
    problem = cells.toy_problems()[5]
    logprobs = cells.response_logprobs(toys, problem)
    assert sum(map(math.exp, logprobs)) == pytest.approx(1, abs=1e-5)
    task = next(task for task in toys.config.environment.train_tasks("part", 0, 500) if task.problem.part > 1)
    episodes = toys.play([EpisodeSpec(task, 0, stream) for stream in range(2000)])
    counts = {text: sum(e.turns[0].action == text for e in episodes) for text in task.problem.responses()}
    for text, logprob in zip(task.problem.responses(), cells.response_logprobs(toys, task.problem)):
        p = math.exp(logprob)
        assert counts[text] / 2000 == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 2000) + 1e-3)


@pytest.mark.slow
def test_rare_responses_are_counted_by_the_bases_probabilities(toys):
    """Against the product of the softmax, token by token."""
    task = toys.config.environment.split_tasks("id")[0]
    prompt = list(toys.chat.observe(cells.Game().reset(task), True))
    answers = [toys.chat.respond(text) for text in task.problem.responses()[:3]]
    logprobs = []
    for ids in answers:
        logit_TV = toys.model(torch.tensor([prompt + ids]))[0].detach().log_softmax(-1)
        logprobs.append(sum(float(logit_TV[len(prompt) + t - 1, token]) for t, token in enumerate(ids)))
    least, middle, most = sorted(logprobs)
    drawn = math.exp(-(least + middle) / 2)                  # only the least likely response is rare
    counts = [3 if logprob == least else 1 for logprob in logprobs]
    correct = [[ids for ids, n in zip(answers, counts) for _ in range(n)]] + [[]] * 5
    found = cells.rare(toys, "id", correct, drawn)
    assert found == {"right": 5, "below": 3}


@pytest.mark.slow
def test_a_response_is_correct_if_the_game_accepts_it(toys):
    task = toys.config.environment.split_tasks("id")[0]
    for text in (task.problem.response, "zz", ""):
        response = Response(toys.chat.respond(text), [], False)
        assert cells.is_correct(toys, task, response) == (text == task.problem.response)
    assert not cells.is_correct(toys, task, Response(toys.chat.respond(task.problem.response), [], True))


@pytest.mark.slow
def test_the_agent_plays_each_task_with_both_models(toys, monkeypatch):
    pending = []

    class Kept:
        def actor(self, done):
            pending.append(done)
            return toys

    def runs_of(environment, arms, seeds, iterations, root):
        assert (environment, arms, seeds, root) == ("strings", ["grpo"], [3], "there")
        return {("cold_start", 3): Kept(), ("grpo", 3): Kept()}

    monkeypatch.setattr(cells, "AGENT", ("strings", "id", 80, 4))
    monkeypatch.setattr(cells.studied, "runs_of", runs_of)
    monkeypatch.setattr(cells.studied, "make", lambda found, processes: None)
    result, tasks = cells.agent(3, "there"), toys.config.environment.split_tasks("id")
    played = toys.play([EpisodeSpec(task, i, cells.stream(3, i, j))
                        for i, task in enumerate(tasks) for j in range(4)])
    assert pending == [0, 80] and result["base"] == result["GRPO"] == [
        sum(e.won for e in played if e.task == task) for task in tasks]
    assert 0 < sum(result["base"]) < 24 == len(played)


def row(axis, base, gain, base_256=0.5, rare=0.0, half=None):
    """A row of the axes' table with the numbers that the rules use."""
    curve = {1: {"base": {"mean": base}, "gain": {"mean": gain, "half": half, "seeds": {}}},
             origin.EACH: {"base": {"mean": base_256}}}
    return {"axis": axis, "rho": 0.1, "positions": "rotary", "curve": curve, "rare": rare, "unsolved": 3,
            "newly_solved": 1, "lost": 0, "by_second_half": 0.5}


@pytest.mark.parametrize("rows, agrees", [
    ([row("depth", 0.0, 0.0, 0.0), row("length", 0.5, 0.1)], "yes"),
    ([row("depth", 0.0, 0.1, 0.0), row("length", 0.5, 0.1)], "partly"),
    ([row("depth", 0.0, 0.1, 0.0), row("length", 0.5, 0.1, half=0.2)], "no"),
    ([row("length", 0.5, 0.1)], "not measurable")])
def test_the_rule_for_out_of_distribution(rows, agrees):
    assert origin.alignment_verdict(rows)[0] == agrees


@pytest.mark.parametrize("rows, agrees", [
    ([row("depth", 0, 0, rare=0.05), row("length", 0, 0, rare=0.0)], "yes"),
    ([row("depth", 0, 0, rare=0.5), row("length", 0, 0), row("composition", 0, 0)], "partly"),
    ([row("depth", 0, 0, rare=0.5), row("length", 0, 0, rare=0.2)], "no"),
    ([row("depth", 0, 0, base_256=0.05)], "not measurable")])
def test_the_rule_for_novel_solutions(rows, agrees):
    assert origin.discovery_verdict(rows)[0] == agrees


def test_problems_that_the_base_never_solves_are_listed_by_axis():
    """Two axes of two problems each: by the base's right responses of 256, 0 and 128, and 0 and 256."""
    def run(axis, before, after):
        return {0: ({"right": {axis: before, "id": [0]}}, {"right": {axis: after, "id": [256]}})}

    found = origin.gains({("depth", 0, "rotary"): run("depth", [0, 128], [64, 192]),
                          ("length", 0.1, "none"): run("length", [0, 256], [0, 256])})
    assert found["problems"] == 4 and found["fitted"] == 1 and found["bins"][0]["gain"] == 0.125
    assert [(row["n"], row["gain"]) for row in found["unsolved"]] == [(1, 0.25), (1, 0)]
    assert origin.unsolved_table(found["unsolved"]).splitlines()[2:4] == ["| depth | +25.0 (1) | – |",
                                                             "| length, no positions | – | +0.0 (1) |"]


def test_a_base_passes_grpo_where_the_interval_of_the_gain_is_below_0():
    """pass@k at k of 1 and 256; only in the second case do the seeds agree."""
    def row(*after):
        return origin.axis_row("depth", 0, "rotary", {
            seed: ({"right": {"depth": [64, 64], "id": [8]}, "rare": {"depth": {"right": 0, "below": 0}}},
                   {"right": {"depth": right, "id": [8]}, "rare": {"right": 0, "below": 0}})
            for seed, right in enumerate(after)})

    one = row([0, 0], [64, 64])
    assert one["crossing"] == 1 and one["passed"] is None
    assert row([48, 48], [47, 47])["passed"] == 1


def test_problems_whose_last_operation_changes_nothing_are_known():
    """All of mirror, reverse: mirror's result is a palindrome."""
    places = origin.composing()
    problems = [str(task.problem) for task in strings.Environment().split_tasks("composition")]
    idle = [problem for i, problem in enumerate(problems) if i not in places]
    assert {problem for problem in problems if problem.endswith("mirror reverse")} < {*idle}
    assert {"iiijii double rotate", "bbcgkj rotate swap"} < {*idle} and len(idle) == 12


def test_new_solutions_are_counted_by_what_the_base_solves_of_their_pair():
    """Twelve problems of six pairs: the base solves one of pair 0, none of pair 1 and both of the others."""
    base, after = [[5, 0] + [9] * 4 + [0, 0] + [9] * 4, [5, 0] + [9] * 4 + [1, 3] + [9] * 4]
    runs = [tuple({"right": {"composition": right}} for right in (base, after))]
    some, none = origin.new_by_pair(runs, range(12)).values()
    assert (some, none) == ([1, 1], [1, 2])
    assert [*origin.new_by_pair(runs, [1, 2, 6]).values()] == [[0, 0], [1, 2]]


def test_a_gain_on_the_omitted_pair_is_apart_from_that_on_the_others():
    """Twelve problems, two of each pair; seed 1 omits pair 1, seed 8 pair 2."""
    def result(omitted, other, pair):
        return {"right": {"composition": [omitted if i % 6 == pair else other for i in range(12)]}}

    trained = {seed: (result(64, 0, pair), result(256, 192, pair)) for seed, pair in ((1, 1), (8, 2), (9, 3))}
    five = {seed: result(128, 256, pair) for seed, pair in ((1, 1), (8, 2))}
    omitted, others = (row["curve"][1] for row in origin.omitted_rows(0, five, trained))
    means = [[row[which]["mean"] for which in row] for row in (omitted, others)]
    assert means == [[0.25, 0.25, 0.75, -0.5], [0, 1, 0.75, 0.25]]
    assert omitted["five"]["seeds"] == {1: 0.25, 8: 0.25}
    one, _ = (row["curve"][1] for row in origin.omitted_rows(0, five, trained, [0, 1, 3, 7]))
    assert one["five"]["seeds"] == {1: 0.25}                     # no problem of seed 8's pair is counted


def test_methods_are_compared_with_their_own_base_and_grpo():
    """Two problems, pass@1 and pass@256 by hand: a base with 64 and 0 of 256 right, and so on."""
    def result(base, cold, trained):
        right = {cells.base_at(t): base if t == 1 else cold for t in cells.TEMPERATURES}
        return {"right": right | {how: trained for how in cells.METHODS}}

    of_seed = {0: result([64, 0], [128, 0], [256, 0]), 1: result([64, 64], [128, 0], [192, 0])}
    found = {row["how"]: row for row in origin.method_rows("depth", 0.1, of_seed)}
    assert [*found] == [*map(cells.base_at, cells.TEMPERATURES), *cells.METHODS]
    assert found[cells.base_at(0.4)]["curve"][1]["seeds"] == {0: 0.25, 1: 0.25}
    assert found[cells.base_at(1)]["curve"][256]["seeds"] == {0: 0.5, 1: 1.0}
    assert found["PPO"]["gain"][1]["seeds"] == {0: 0.375, 1: 0.125}
    assert found[cells.base_at(0.4)]["less_GRPO"][1]["seeds"] == {0: -0.25, 1: -0.125}
    assert found["GRPO"]["less_GRPO"][256]["mean"] == 0
    assert origin.method_rows("depth", 0.1, {}) == []


@pytest.mark.slow
def test_colder_sampling_is_the_sampling_of_a_sharper_model(toys):
    """At temperature .4 the shares of responses are those of probabilities to the power 2.5, renormalized
    token by token, here from a softmax of the logits over .4."""
    task = toys.config.environment.split_tasks("id")[0]
    prompt, n = cells.prompt_of(toys, task), 2000
    found = cells.respond(toys, [task], n, temperature=0.4)[0]
    for text in task.problem.responses():
        ids, p = toys.chat.respond(text), 1.0
        logit_TV = toys.model(torch.tensor([prompt + ids]))[0].detach() / 0.4
        for t, token in enumerate(ids):
            p *= float(logit_TV[len(prompt) + t - 1].softmax(-1)[token])
        share = sum(list(response.ids) == list(ids) for response in found) / n
        assert share == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / n) + 1e-3)


def sampled(less, half=0.02, gains=(0.2, 0.2)):
    """The rows of the methods' table that the rule uses, by axis. less: the base at .4 minus GRPO, the others
    are lower; gains: GRPO's."""
    def part(x):
        return {k: {"mean": x, "half": half, "seeds": {0: x, 1: x}} for k in (1, origin.EACH)}

    return [{"axis": axis, "rho": rho, "how": how, "gain": part(gain), "curve": part(0.5 - (how != best)),
             "less_GRPO": part(x - (how != best))}
            for (axis, rho), x, gain in zip(cells.METHODS_AT, less, gains) for best in (cells.base_at(0.4),)
            for how in (*map(cells.base_at, cells.TEMPERATURES), "GRPO")]


@pytest.mark.parametrize("rows, agrees", [
    (sampled((-0.01, 0.1)), "yes"), (sampled((-0.01, -0.1)), "partly"), (sampled((-0.1, -0.1)), "no"),
    (sampled((-0.1, 0.1), gains=(0.2, 0.01)), "no"), (sampled((0.1, 0.1), gains=(0, 0)), "not measurable"),
    (sampled((0.1, 0.1), None), "not measurable"), (sampled((0.1,)), "not measurable"),
    # half an interval above half of a gain: it tells only if GRPO is above
    (sampled((0.0, 0.0), 0.15), "not measurable"), (sampled((-0.2, 0.0), 0.15), "no"),
    (sampled((0.0, 0.0), 0.15, (0.2, 0.4)), "yes")])
def test_the_rule_for_sharpening(rows, agrees):
    assert origin.sharpening_verdict(rows)[0] == agrees


@pytest.mark.parametrize("early, late, agrees", [(0.2, 0.01, "yes"), (0.05, 0.01, "partly"),
                                                 (0.05, 0.1, "no")])
def test_the_rule_for_saturation(early, late, agrees):
    rows = [{"steps": steps, "base": origin.interval({0: base}), "gain": origin.interval({0: gain})}
            for steps, base, gain in ((400, 0.5, early), (None, 0.97, late))]
    assert origin.saturation_verdict(rows)[0] == agrees
    assert origin.saturation_verdict(rows[1:])[0] == "not measurable"


def test_the_toys_row_compares_runs_with_their_closed_form():
    def result(p):
        before, after = [0.3, 0.2, 0.5], [p, (1 - p) * 2 / 7, (1 - p) * 5 / 7]
        return {"problems": [{"right": 0, "before": [math.log(x) for x in before],
                              "after": [math.log(x) for x in after]}]}

    exact = origin.toy_row("k1 in the reward", [result(tilting.tilted(0.3, origin.BETA))] * 2)
    assert exact["distance"] == pytest.approx(0, abs=1e-9) and exact["shift"]["mean"] == pytest.approx(2)
    assert origin.tilt_verdict({"k1 in the reward": exact})[0] == "yes"
    off = origin.toy_row("k1 in the reward", [result(0.9)])
    assert off["distance"] == pytest.approx(0.9 - tilting.tilted(0.3, origin.BETA))
    assert off["grown_most_nats"] == pytest.approx(math.log(3))
    assert origin.tilt_verdict({"k1 in the reward": off})[0] == "no"
    longer = {origin.K1: off, origin.K1 + origin.LONGER: exact}
    assert origin.longest(longer) == {origin.K1: exact}
    agrees, text = origin.tilt_verdict(longer)
    assert agrees == "yes" and "after 1,200 iterations (after 300 " in text
    of_longer = origin.toy_row(origin.K1 + origin.LONGER, [result(tilting.tilted(0.3, origin.BETA))])
    assert of_longer["distance"] == pytest.approx(0, abs=1e-9)
    assert origin.tilt_verdict({})[0] == "not measurable"


def test_the_two_centerings_are_told_apart_by_the_distance():
    def toy(mean, half=0.1):
        return {"shift": {"mean": mean, "half": half, "seeds": {}}}

    groups = origin.group_rows()
    text = origin.group_text({"groups": groups, "toy": {origin.K1: toy(1.95), origin.K1_PAIRS: toy(2.02)}})
    assert "by 2.020 ± 0.100 in groups of 2: 0.020 from the first and 1.020 from the second." in text
    assert "by 1.950 ± 0.100 in groups of 16: 0.050 from the first and 0.075 from the second." in text
    alone = origin.group_text({"groups": groups, "toy": {origin.K1: toy(1.95)}})
    assert "In groups of 2 the toy was not run" in alone


def test_k3s_row_is_compared_token_by_token():
    """Eight responses of three letters: the tokens' probabilities are conditional ones, by hand."""
    before_Y = [0.02, 0.08, 0.1, 0.2, 0.05, 0.15, 0.1, 0.3]
    logprob_Y = [math.log(p) for p in before_Y]
    assert origin.token_probabilities(logprob_Y, 5) == pytest.approx([0.6, 0.2 / 0.6, 0.15 / 0.2])
    assert origin.token_probabilities(logprob_Y, 0) == pytest.approx([0.4, 0.1 / 0.4, 0.02 / 0.1])
    for right in range(8):
        assert math.prod(origin.token_probabilities(logprob_Y, right)) == pytest.approx(before_Y[right])
    p = tilting.k3_tokens([0.4, 0.25, 0.2], origin.BETA, origin.TOY_GROUP)
    after_Y = [p, *(x * (1 - p) / 0.98 for x in before_Y[1:])]
    problem = {"right": 0, "before": logprob_Y, "after": [math.log(x) for x in after_Y]}
    found = origin.toy_row(origin.K3, [{"problems": [problem]}])
    assert found["forms"] == pytest.approx([p]) and found["distance"] == pytest.approx(0, abs=1e-12)
    assert found["rare_less_form"] == pytest.approx(p - tilting.k3_mass(0.02, origin.BETA))
    assert found["distance_of_whole_responses"] == pytest.approx(-found["rare_less_form"])


@pytest.mark.slow
def test_problems_that_the_second_half_solves_by_hand(monkeypatch):
    """Of 4 tries one right one is in the second half with 1/2, two both with 1/6, three never."""
    monkeypatch.setattr(origin, "EACH", 4)
    assert origin.by_second_half([0, 1, 2, 3, 4]) == pytest.approx(1 / 2 + 1 / 6)
