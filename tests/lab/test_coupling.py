"""Tests of lab/studies/coupling.py and influence.py: Equation 2, gradient steps, shares, and the tiny study.

    python -m pytest tests/lab/test_coupling.py

The last tests run the full study on tiny runs of twin states and household: half a minute on an idle core.
"""

import itertools
import json
import random
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from hand_made import make_sample
from safetensors.torch import load_file, save_file
from tiny_runs import ROOT

import batching
import gcd
import update
from infra import files
from lab.bench import jobs
from lab.studies import common, conflict, coupling, influence, runs
from lm import model as decoder

TINY = ("--hidden-size 32 --layers 2 --demonstrations 100 --judge-demonstrations 60 --cold-start-epochs 2 "
        "--cold-start-lr 8e-3 --tasks 4 --group-size 4 --minibatches 2 --judge-turns 8 "
        "--judge-group-size 4 --max-turns 12")


def make_turn(sample, task="a", action="look", label="good", kinds=None):
    """A turn for the measures."""
    return influence.MeasuredTurn(sample, task, action, label, kinds or ["verb"] * sum(sample.sampled))


def make_turns(n, seed=3):
    """n turns with random tokens, each of a different task."""
    rng = random.Random(seed)
    return [make_turn(make_sample(rng, n=rng.randint(4, 12)), task=str(i), action="ab"[i % 2],
                  label=("good", "bad")[i % 2]) for i in range(n)]


def tied(model):
    """The tiny model with tied embeddings."""
    config = decoder.ModelConfig(**{**vars(model.config), "tie_word_embeddings": True})
    other = decoder.Model(config)
    decoder.init_weights(other, 0)
    return other


# Equation 2

@pytest.mark.parametrize("make", [lambda model: model, tied])
def test_equation_2_is_the_inner_product_of_output_layer_gradients(model, make):
    """With tied weights: the gradient through the output projection only."""
    model, grads, turns = make(model), [], make_turns(6)
    for turn in turns:
        ids_1M, _, column_N, target_N, *_ = batching.collate([turn.sample], model)
        head_Vd = model.lm_head.weight.detach().double().requires_grad_()
        hidden_Nd = model(ids_1M, column_N=column_N, head="hidden").detach().double()
        logprob_N = (hidden_Nd @ head_Vd.T).log_softmax(-1).gather(1, target_N[:, None])
        grads.append(torch.autograd.grad(logprob_N.sum(), head_Vd)[0].flatten())
    want_SS = torch.stack(grads) @ torch.stack(grads).T
    pairs = influence.hidden_and_error(model, turns)
    got_SS = influence.couplings(pairs)
    largest = float(want_SS.abs().max())
    torch.testing.assert_close(got_SS.double(), want_SS, atol=1e-4 * largest, rtol=1e-3)
    turn_of_token = torch.tensor([i for i, turn in enumerate(turns) for _ in turn.kinds])
    member_SN = (turn_of_token == torch.arange(len(turns))[:, None]).float()
    summed_SS = member_SN @ influence.token_couplings(pairs) @ member_SN.T
    torch.testing.assert_close(summed_SS, got_SS, atol=1e-4 * largest, rtol=1e-3)
    torch.testing.assert_close(influence.sums_by_turn(influence.token_couplings(pairs), turns), summed_SS,
                               atol=1e-4 * largest, rtol=1e-3)


def test_equation_2_of_two_tokens_by_hand():
    """Turn a: g = (1/2, -1/2), h = (1, 2). Turn b: the same g, h = (3, 0), and g = (-1, 1), h = (0, 1)."""
    a = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5, -0.5]])
    b = torch.tensor([[3.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.5, -0.5], [-1.0, 1.0]])
    assert influence.token_couplings([a, b])[0].tolist() == [0.5 * 5, 0.5 * 3, -1.0 * 2]
    coupling_SS = influence.couplings([a, b])
    assert coupling_SS.tolist() == [[2.5, -0.5], [-0.5, 6.5]]
    assert float(influence.cosines(coupling_SS)[0, 1]) == pytest.approx(-0.5 / (2.5 * 6.5) ** 0.5)
    assert influence.cosines(torch.zeros(2, 2)).tolist() == [[0, 0], [0, 0]]


# A gradient step

@pytest.mark.slow
def test_a_small_step_moves_others_by_the_inner_product_of_gradients(model):
    samples = [turn.sample for turn in make_turns(5)]
    change_SS, nonlinearity = influence.step_effects(model, samples, step_nats=1e-5)
    exact = model.double()
    grad_SX = torch.stack([torch.cat([g.flatten() for g in influence.gradient(exact, s)]) for s in samples])
    product_SS = grad_SX @ grad_SX.T
    step = 1e-5 / product_SS.diagonal().mean()
    assert float(change_SS.diagonal().mean()) == pytest.approx(1e-5, rel=1e-2)
    torch.testing.assert_close(change_SS, step * product_SS, atol=1e-7, rtol=1e-2)
    assert nonlinearity < 1e-2
    larger, smaller = (influence.step_effects(model, samples, step_nats=nats)[1] for nats in (0.02, 0.01))
    assert larger / smaller == pytest.approx(2, rel=0.1)              # the remainder is of second order


def test_the_model_is_restored(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    influence.step_effects(model, [turn.sample for turn in make_turns(3)])
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32
               for name, p in model.named_parameters())


@pytest.mark.slow
def test_the_heat_map_compares_commands_over_tasks(model):
    turns = make_turns(12)
    found = influence.heat(model, turns, 0)
    assert found["actions"] == ["a"] * 6 + ["b"] * 6 and found["nonlinear"] < 0.1
    matrix = torch.tensor(found["matrix"])
    assert matrix.diagonal().tolist() == pytest.approx([1.0] * 12)
    same = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).bool() & ~torch.eye(12, dtype=torch.bool)
    assert found["same"] == pytest.approx(float(matrix[same].mean()), abs=1e-3)
    different = ~same & ~torch.eye(12, dtype=torch.bool)
    assert found["different"] == pytest.approx(float(matrix[different].mean()), abs=1e-3)
    for turn in turns:
        turn.task = "the only task"
    assert influence.heat(model, turns, 0) is None and influence.heat(model, [], 0) is None
    refused = [make_turn(turn.sample, str(i), turn.action, "refused") for i, turn in enumerate(turns)]
    assert influence.heat(model, refused, 0) is None


# Shares and classes

def test_kinds_of_tokens(chat):
    def kinds(text):
        return influence.token_kinds(chat, chat.tokenizer.encode(text), {"cabinet", "countertop"})

    assert kinds("look cabinet 1<|im_end|>") == ["verb", "receptacle", "stop"]
    assert kinds("look drawer 1") == ["verb", "object"] and kinds("look") == ["verb"]

    class ListTokenizer:                                     # a tokenizer whose ids are positions in a list
        tokens = ("<monitor>", "take", " apple", " 3", " from", " cabinet 2", "<|im_end|>")

        def decode(self, ids):
            return self.tokens[ids[0]]

    chat = type("Chat", (), {"tokenizer": ListTokenizer(), "stop_ids": (6,)})
    assert influence.token_kinds(chat, range(7), {"cabinet"}) == [
        "tag", "verb", "object", "number", "link", "receptacle", "stop"]
    ListTokenizer.tokens = ("ex", "amine", " c", "abinet", " ", "1", "2", " in", "<|im_end|>")     # parts
    chat.stop_ids = (8,)
    assert influence.token_kinds(chat, range(9), {"cabinet"}) == [
        "verb", "verb", "receptacle", "receptacle", "number", "number", "number", "link", "stop"]


def test_turns_that_share_a_prefix_in_a_forward_pass_are_read_as_if_alone(model):
    """Three turns of one episode in one forward pass, and each in its own."""
    ids = make_sample(random.Random(4), n=40).ids
    of = [batching.Sample(ids[:n], [False] * (n - 4) + [True] * 4, [0.0] * n, None, 0) for n in (14, 25, 40)]
    alone = [influence.hidden_and_error(model, [make_turn(sample)])[0] for sample in of]
    shared = influence.hidden_and_error(model, [make_turn(sample) for sample in of])
    assert len(batching.PrefixTree(of).ids) == 40
    for (hidden_Nd, error_NV), (other_Nd, other_NV) in zip(alone, shared, strict=True):
        torch.testing.assert_close(hidden_Nd, other_Nd, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(error_NV, other_NV, atol=2e-5, rtol=1e-4)


def test_shares_of_tokens_sum_to_one_and_exclude_the_same_task(model):
    turns = make_turns(8)
    for turn in turns:
        turn.kinds = ["verb", *["stop"] * (len(turn.kinds) - 1)]
    found = influence.influence_by_kind(model, turns, 64, 0)
    for key in ("influence", "tokens"):
        assert sum(share[key] for share in found.values()) == pytest.approx(1, abs=1e-5)
    assert influence.influence_by_kind(model, [turns[0], turns[0]], 64, 0) is None


def test_classes_are_balanced_and_refusals_are_a_class_of_their_own():
    turns = make_turns(20)
    for turn in turns[:12]:
        turn.label = "refused"
    turns[13].label = None
    found = influence.by_class(turns, 5, 0)
    assert {label: len(members) for label, members in found.items()} == {"good": 3, "bad": 3, "refused": 5}
    assert all(turn.label == label for label, members in found.items() for turn in members)


def test_the_gap_by_hand(model, monkeypatch):
    """One token per turn, all g = 1: influence is <h, h'>. Good (1, 0), (2, 0), bad (0, 1), (1, 1)."""
    hidden = {"good": [(1.0, 0.0), (2.0, 0.0)], "bad": [(0.0, 1.0), (1.0, 1.0)]}
    sample = make_sample(random.Random(0), n=2)
    turns = {label: [make_turn(sample, f"{label}{i}", label=label) for i in (0, 1)] for label in hidden}
    monkeypatch.setattr(influence, "hidden_and_error", lambda model, turns: [
        (torch.tensor([h]), torch.ones(1, 1)) for label in hidden for h in hidden[label]])
    found = influence.influence_gaps(model, turns)
    assert found["same"] == pytest.approx((2 + 1) / 2)
    assert found["cross"] == pytest.approx((0 + 1 + 0 + 2) / 4) and found["gap"] == pytest.approx(0.75)
    assert found["gap of cosines"] == pytest.approx((1 + 0.5**0.5) / 2 - (0 + 0.5**0.5) / 2)


def test_an_empty_class_is_not_measurable(model):
    turns = make_turns(4)
    classes = influence.by_class([turn for turn in turns if turn.label == "good"], 5, 0)
    assert influence.influence_gaps(model, classes) is None
    assert influence.similarity(model, turns[:1], 0) is None
    assert coupling.verdict([]) == "not measurable"


def test_verdicts():
    assert [coupling.verdict(tests) for tests in ([True], [True, False], [False])] == ["yes", "partly", "no"]
    assert coupling.with_half({"mean": 0.25, "half": None}, "+.2g") == "+0.25"
    assert coupling.with_half({"mean": 0.25, "half": 0.1}, "+.2g") == "+0.25 ± 0.1"
    assert coupling.spread([1.0, 3.0]) == (2.0, 1.0) and coupling.spread([1.0])[1] == float("inf")


# Figure 10b: policy and judge

def judged_batch(seed=5):
    """Samples of a policy and a judge in 12 episodes."""
    rng, samples = random.Random(seed), []
    for episode in range(12):
        for kind in ("policy", "judge"):
            sample = make_sample(rng, n=rng.randint(4, 12))
            sample.kind, sample.episode = kind, episode
            sample.advantage = [rng.uniform(-1, 1) * sampled for sampled in sample.sampled]
            samples.append(sample)
    return samples


OBJECTIVE = update.Objective(microbatch_tokens=64)


def test_gradients_are_those_of_an_update_before_weight_and_clipping(model):
    """Against the comparison of the two gradients in a step of the run. No parameter changes."""
    samples, before = judged_batch(), [p.clone() for p in model.parameters()]
    found = conflict.gradients(model, samples, OBJECTIVE)
    metrics = update.update(model, torch.optim.SGD(model.parameters(), lr=0.0), samples, OBJECTIVE, 0.0, True)
    policy_X, judge_X = found["policy"], found["judge"]
    assert slow_cosine(policy_X, judge_X) == pytest.approx(metrics["judge/grad_cosine"], abs=1e-4)
    assert float(judge_X.norm() / policy_X.norm()) == pytest.approx(metrics["judge/grad_ratio"], rel=1e-4)
    assert float((policy_X + 0.1 * judge_X).norm()) == pytest.approx(metrics["policy/grad_norm"], rel=1e-4)
    assert all(p.grad is None and torch.equal(p, old) for p, old in zip(model.parameters(), before))
    alone = conflict.gradients(model, [s for s in samples if s.kind == "policy"], OBJECTIVE)
    assert torch.equal(alone["policy"], policy_X) and not alone["judge"].any()


def test_a_value_heads_own_parameters_are_left_out(model):
    """Against autograd on each turn alone."""
    torch.manual_seed(0)
    model = decoder.Model(decoder.ModelConfig(**{**vars(model.config), "value_head": True}))
    decoder.init_weights(model, 0)
    torch.nn.init.normal_(model.value_head.weight)
    samples = [sample for sample in judged_batch() if sample.kind == "judge"]
    for i, sample in enumerate(samples):
        sample.label, sample.sampled = float(i % 4 > 1), [False] * len(sample.ids)
        sample.advantage = sample.logprob_old = [0.0] * len(sample.ids)
    found = conflict.gradients(model, samples, replace(OBJECTIVE, value_judge=True))
    shared = [p for name, p in model.named_parameters() if not name.startswith("value_head")]
    slow_X = torch.zeros_like(found["judge"])
    for sample in samples:
        logit = model(torch.tensor([sample.ids]), head="value")[:, -1]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logit, torch.tensor([sample.label]))
        grads = torch.autograd.grad(loss, shared, materialize_grads=True)
        slow_X += torch.cat([g.flatten() for g in grads]) / len(samples)
    assert len(slow_X) == sum(p.numel() for p in model.parameters()) - model.config.hidden_size - 1
    torch.testing.assert_close(found["judge"], slow_X, rtol=1e-3, atol=1e-5)
    assert not found["policy"].any()


def slow_cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))


def test_products_are_means_over_pairs_of_batches():
    """Against a loop over the pairs."""
    torch.manual_seed(0)
    policy_BX, judge_BX = torch.randn(4, 6) + 1, torch.randn(4, 6) - 0.5
    found, pairs = conflict.products(policy_BX, judge_BX), [*itertools.permutations(range(4), 2)]
    squares = [sum(float(row @ row) for row in rows) / 4 for rows in (policy_BX, judge_BX)]
    for name, left, right, square in (("policy", policy_BX, policy_BX, squares[0]),
                                      ("judge", judge_BX, judge_BX, squares[1]),
                                      ("between", policy_BX, judge_BX, (squares[0] * squares[1]) ** 0.5)):
        slow = sum(float(left[b] @ right[c]) for b, c in pairs) / len(pairs) / square
        assert found[name] == pytest.approx(slow, rel=1e-5)
    same = sum(float(p @ j) for p, j in zip(policy_BX, judge_BX)) / 4 / (squares[0] * squares[1]) ** 0.5
    assert found["same"] == pytest.approx(same, rel=1e-5)
    assert found["ratio"] == pytest.approx((squares[1] / squares[0]) ** 0.5, rel=1e-5)
    empty = conflict.products(policy_BX, torch.zeros(4, 6))
    assert (empty["judge"], empty["between"], empty["same"], empty["ratio"]) == (None, None, None, 0)
    assert empty["policy"] == found["policy"]


def test_a_kept_model_is_loaded_whatever_its_training_began_with(tmp_path):
    first = ROOT / "lab" / "results" / "alfworld_model"
    folder = shutil.copytree(first, tmp_path / "kept")
    weights = load_file(folder / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    actor = common.load_actor(folder, ["--preset", "small", "--model", first])
    name = next(name for name in actor.model.state_dict() if name in weights)
    assert torch.equal(actor.model.state_dict()[name], 2 * weights[name].float())


@pytest.mark.parametrize("alignment", [1, 0, -1])
def test_the_cosine_of_expected_gradients_is_found_in_noise(alignment):
    """Of gradients of which a batch has nine parts noise: equal ones in expectation, orthogonal, opposite.
    What a batch's policy and judge have in common by chance does not count.
    """
    rng = torch.Generator().manual_seed(0)
    signal_X, other_X = (torch.nn.functional.normalize(torch.randn(400, generator=rng), dim=0) for _ in "ab")
    other_X = alignment * signal_X if alignment else other_X - (other_X @ signal_X) * signal_X
    points = {}
    for seed in range(4):
        noise_BX, common_BX = (torch.randn(64, 400, generator=rng) * 3 / 400 ** 0.5 for _ in range(2))
        found = conflict.products(signal_X + noise_BX + common_BX, other_X + common_BX)
        assert found["policy"] < 0.1 and found["same"] > 0.5
        points[seed] = [found, {"policy": -0.001, "judge": 0.2, "between": 0.0}]   # a stage that is noise
    cosine = conflict.cosine(points)
    assert cosine["mean"] == pytest.approx(alignment, abs=0.15) and 0 < cosine["half"] < 0.4
    one = conflict.cosine({0: points[0]})
    assert one["half"] is None and one["mean"] == pytest.approx(alignment, abs=0.3)
    assert conflict.cosine({0: [{"policy": -0.1, "judge": 0.1, "between": 0.1}]}) is None
    assert conflict.cosine({0: [{"policy": 0.1, "judge": None, "between": None}]}) is None


def test_equal_expected_gradients_have_a_cosine_of_1_however_noise_differs_between_stages():
    points = {seed: [{"policy": policy, "judge": judge, "between": (policy * judge) ** 0.5}
                     for policy, judge in ((0.04, 0.6), (0.02, 0.1), (0.015, 0.001))] for seed in range(3)}
    found = conflict.cosine(points)
    assert found["mean"] == pytest.approx(1) and found["half"] == pytest.approx(0, abs=1e-9)
    points[0][0]["between"] = 0.0
    n, values = 3, []                                # the jackknife by hand, from sums
    most = sum((p * j) ** 0.5 for p, j in ((0.04, 0.6), (0.02, 0.1), (0.015, 0.001)))
    first = (0.04 * 0.6) ** 0.5
    all_seeds = (most - first / 3) / most
    for without in ((most - 0) / most, (most - first / 2) / most, (most - first / 2) / most):
        values.append(n * all_seeds - (n - 1) * without)
    assert conflict.cosine(points)["seeds"] == pytest.approx(dict(enumerate(values)))


@pytest.mark.parametrize("cosine, other, spread, agrees", [
    (-0.3, 0.1, 0.02, "yes"), (-0.3, -0.3, 0.02, "partly"), (0.2, 0.1, 0.02, "no"), (-0.01, 0.1, 0.02, "no"),
    (-0.1, 0.1, 0.3, "not measurable"), (-0.3, 0.1, -1, "not measurable")])
def test_a_conflict_is_a_cosine_below_0_beyond_its_interval(cosine, other, spread, agrees):
    """`spread`: of the cosine over seeds; -1: the judge's gradients are noise."""
    def cell(cosine, seed):
        between = 0.1 * (cosine + (abs(spread) * (seed - 1) if spread > 0 else 0))
        return [{"iteration": i, "policy": 0.1, "judge": -0.1 if spread < 0 else 0.1, "ratio": 2.0,
                 "between": between, "same": cosine} for i in range(3)]

    cells = {}
    for seed in (0, 1, 2):
        for arm, value in (("grpo+gcd", other), ("grpo+value", cosine)):
            cells[f"{arm}, seed {seed}"] = {"judge": [{"iteration": 5, "cosine": 0.1, "ratio": 2.0}]}
            cells[f"gradients, {arm}, seed {seed}"] = cell(value, seed * (arm == "grpo+value"))
    assert coupling.figure_10b(coupling.Results(cells, [0, 1, 2]))["agrees"] == agrees
    assert coupling.figure_10b(coupling.Results(cells, [0]))["agrees"] == "not measurable"
    for seed in (0, 1, 2):
        del cells[f"grpo+value, seed {seed}"]
    assert coupling.figure_10b(coupling.Results(cells, [0, 1, 2]))["agrees"] == "not measurable"


def test_an_estimate_is_over_seeds_or_over_one_seeds_values():
    assert coupling.estimate({0: [1.0, 3.0, None]}) == {"mean": 2.0, "half": 2.0, "seeds": {0: 2.0}}
    assert coupling.estimate({0: [1.0, 3.0], 1: [4.0], 2: [None]}) == coupling.interval({0: 2.0, 1: 4.0})
    assert coupling.estimate({0: [], 1: [None]}) is None


@pytest.mark.parametrize("strings, seeds, agrees", [
    (0.1, 3, "partly"), (0.3, 3, "no"), (0.1, 1, "not measurable")])
def test_strings_can_show_figure_3a_in_part_only(strings, seeds, agrees):
    def cell(value):
        return {"similarity": {"rms": value, "hidden": value, "same action": 0.0}}

    cells = {f"{name}, seed {seed}": cell(value + 0.001 * seed) for seed in range(seeds)
             for name, value in (("household", 0.2), ("strings", strings + 0.001 * (seed == 1)))}
    found = coupling.figure_3a(coupling.Results(cells, [*range(seeds)]))
    assert found["agrees"] == agrees and "not GSM8K" in found["found"]
    del cells["strings, seed 0"]
    assert coupling.figure_3a(coupling.Results(cells, [*range(seeds)]))["agrees"] == "not measurable"


def test_figure_8_needs_an_interval_over_seeds():
    """Late is the last third: the last two of six kept models."""
    def cell(late):
        gaps = [9.0] * 4 + [late, late]
        return {"path": [{"iteration": i, "fixed": {"gap": gap, "gap of cosines": gap}}
                         for i, gap in enumerate(gaps)]}

    cells = {f"{arm}, seed {seed}": cell(base + 0.1 * seed) for seed in range(3)
             for arm, base in (("grpo", 1.0), ("grpo+gcd", 2.0))}
    assert coupling.figure_8(coupling.Results(cells, [0, 1, 2]))["agrees"] == "yes"
    assert "minus grpo: +1" in coupling.figure_8(coupling.Results(cells, [0, 1, 2]))["found"]
    assert coupling.Results(cells, [0, 1, 2]).less_grpo("gap")["grpo+gcd"]["mean"] == pytest.approx(1)
    assert coupling.figure_8(coupling.Results(cells, [0]))["agrees"] == "not measurable"
    cells["grpo+gcd, seed 2"] = cell(0.0)
    assert coupling.figure_8(coupling.Results(cells, [0, 1, 2]))["agrees"] == "not measurable"
    cells |= {f"grpo+gcd, seed {seed}": cell(0.1 * seed) for seed in range(3)}
    assert coupling.figure_8(coupling.Results(cells, [0, 1, 2]))["agrees"] == "no"


# Runs, and the full study

def make_small(monkeypatch):
    """Make runs in this process, keeping each iteration's model, with few turns and a small heat map."""
    monkeypatch.setattr(runs, "make", in_this_process)
    monkeypatch.setattr(runs, "EVERY", 1)
    for name, number in (("TASKS", 16), ("ACTIONS", 3), ("CONTEXTS", 2)):
        monkeypatch.setattr(influence, name, number)
    monkeypatch.setattr(conflict, "BATCHES", 3)


def in_this_process(made, processes=1):
    """`runs.make` without the seconds that a process takes to start."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for run in made.values():
            if not jobs.finished(run):
                assert gcd.main([*run.arguments, "--overwrite"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def study(tmp_path, monkeypatch, capsys):
    """The study at a tiny size; returns (exit status, its JSON or None, stderr)."""
    make_small(monkeypatch)

    def run(*flags):
        status = coupling.main(["--iterations", "1", "--turns", "6", "--jobs", "1", "--flags", TINY, "--runs",
                                str(tmp_path / "runs"), "--out", str(tmp_path / "out"), *flags])
        path = tmp_path / "out" / "coupling.json"
        return status, json.loads(path.read_text()) if path.exists() else None, capsys.readouterr().err

    run.folder = tmp_path
    return run


def interrupt(run, settings):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_tiny_study_is_interrupted_and_resumed(study, monkeypatch):
    """With real games that are missing; and asked again when all is stored."""
    flags = ("--environments", "household,twins,alfworld", "--games", "nowhere.gz", "--arms",
             "grpo,grpo+gcd,grpo+value")
    monkeypatch.setattr(coupling, "trajectory", interrupt)
    with pytest.raises(KeyboardInterrupt):
        study(*flags)
    lines = study.folder / "out" / "coupling.jsonl"
    finished = [json.loads(line)["cell"] for line in lines.read_text().splitlines()]
    assert finished == ["twin states, seed 0", "household, seed 0", "household after GRPO, seed 0"]
    monkeypatch.undo()
    make_small(monkeypatch)
    status, found, error = study(*flags)
    assert status == 0 and len(lines.read_text().splitlines()) == 8
    assert "nowhere.gz does not exist" in error and "nowhere.gz" in found["without"]
    assert [figure["paper"].split()[1] for figure in found["figures"]] == ["3a", "3b", "8", "9", "10b"]
    assert found["figures"][2]["agrees"] == "not measurable"                  # one seed has no interval
    cells = cells_of(study)
    path = cells["grpo+gcd, seed 0"]["path"]
    assert [point["iteration"] for point in path] == [0, 1]
    assert "gradients, grpo, seed 0" not in cells
    for arm in ("grpo+gcd", "grpo+value"):
        points = cells[f"gradients, {arm}, seed 0"]
        assert [point["iteration"] for point in points] == [0, 1]
        assert all(point["policy"] is None or abs(point["policy"]) <= 1 for point in points)
    start = cells["grpo, seed 0"]["path"][0]
    assert start == path[0]                                      # the same start and turns
    out = study.folder / "out"
    assert all((out / figure["picture"]).read_text().count("<svg") == 1 for figure in found["figures"])
    text = (out / "coupling.md").read_text()
    assert "{" not in text and "nan" not in text.lower().replace("nance", "")
    again = {name.replace("seed 0", "seed 1"): cell for name, cell in cells.items()}
    results = coupling.Results(cells | again, [0, 1])
    coupling.draw(results, study.folder / "several")
    assert len([*(study.folder / "several").glob("*.svg")]) == 5
    page = coupling.page(results, [coupling.figure_8(results), coupling.figure_10b(results)], "", "")
    gaps = [line for line in page.split("\n") if line.startswith("| grpo")]
    assert all(row.count("± 0.000") + row.count("–") == 6 for row in gaps)      # two equal seeds
    assert any("± 0.000" in row for row in gaps)
    shutil.rmtree(study.folder / "runs")
    monkeypatch.setattr(coupling, "draw", lambda *_: None)
    assert study(*flags)[0] == 0 and not (study.folder / "runs").exists()     # everything is in the cells


def cells_of(study):
    """{name: result} of the cells that a study has stored."""
    return {record["cell"]: record["result"]
            for record in files.read_lines(study.folder / "out" / "coupling.jsonl")[0]}


@pytest.mark.slow
def test_strings_are_measured_for_similarity_only(study):
    small = "--hidden-size 32 --layers 2 --demonstrations 100"
    status, found, _ = study("--environments", "strings", "--flags", small)
    (cell,) = cells_of(study).values()
    assert status == 0 and cell["heat"] is cell["tokens"] is None
    assert 0 < cell["similarity"]["rms"] <= 1 and 2 < cell["similarity"]["turns"] <= 16
    assert {figure["paper"]: figure["agrees"] for figure in found["figures"]}["Figure 3a"] == "not measurable"


def test_invalid_flags_are_reported(capsys):
    for flags, message in (("--environments mars", "--environments=mars: expected some of household"),
                           ("--seeds a", "--seeds=a: expected numbers"), ("--turns 1", "--turns=1: expected"),
                           ("--arms ppo", "--arms=ppo: expected some of grpo")):
        with pytest.raises(SystemExit):
            coupling.main(flags.split())
        assert message in capsys.readouterr().err


def test_runs_share_their_cold_start_and_name_a_missing_model(tmp_path):
    found = runs.runs_of("household", ["grpo", "grpo+value"], [1], iterations=10, root=tmp_path)
    assert [*found] == [("cold_start", 1), ("cold_start_value", 1), ("grpo", 1), ("grpo+value", 1)]
    assert found["grpo", 1].start is found["cold_start", 1]
    assert found["grpo+value", 1].start is found["cold_start_value", 1]
    grpo = found["grpo", 1]
    assert grpo.folder == tmp_path / "household" / "seed1" / "grpo"
    with pytest.raises(ValueError, match="no models; run gcd.py with --keep-checkpoints"):
        _ = grpo.models
    for kept in ("00000", "00010"):
        (grpo.folder / "kept" / kept).mkdir(parents=True)
    with pytest.raises(ValueError, match="no model of iteration 5; remove"):
        _ = grpo.models
    for environment, arms in (("mars", ["grpo"]), ("twins", ["unknown"])):
        with pytest.raises(ValueError, match="expected one of"):
            runs.runs_of(environment, arms, [0])


@pytest.mark.slow
def test_runs_are_made_once_and_store_no_evaluation(tmp_path):
    flags = [*TINY.split(), "--demonstrations", "20", "--judge-demonstrations", "0"]
    made = runs.runs_of("twins", ["cold_start"], [0], flags, root=tmp_path)
    runs.make(made, 1)
    run = made["cold_start", 0]
    stamp = (run.folder / "stages.json").stat().st_mtime_ns
    runs.make(made, 1)
    assert (run.folder / "stages.json").stat().st_mtime_ns == stamp and not run.result.exists()
    assert isinstance(run.actor(0), common.Actor)
