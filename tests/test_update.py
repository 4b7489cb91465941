"""Proves that one update is the gradient of the objective in update.py's docstring, however it is cut into
pieces.

    python -m pytest tests/test_update.py

The oracles (`plain_loss`, `plain_cross_entropy`, ...) take one sample at a time, a Python loop per token,
autograd;
no microbatch, no padding.
"""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import Corridor, Recorder, assert_same, flat, make_seats, rounding, with_value_head
from hand_made import PLAIN, gradient_of, make_sample, near

import rollout
import update
from envs import Task
from lm.engine import Sampling
from rollout import Episode, Turn
from update import Sample

pytestmark = pytest.mark.fast


def imitated(samples):
    """The same samples without old logprobs, as the cold start has them."""
    return [replace(sample, logprob_old=None) for sample in samples]


def gradient(model, samples, objective=PLAIN, compare=False):
    """The gradient that update() steps on, and its metrics."""
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, objective, lr=0.25, compare=compare)
    assert recorder.param_groups == [{"lr": 0.25}]
    return recorder.gradient, metrics


@pytest.fixture
def samples(model):
    """Nine policy samples of five episodes, old logprobs up to 0.4 nats off the model's own: some are
    clipped."""
    rng = random.Random(0)
    return near(model, [make_sample(rng, episode=i % 5) for i in range(9)], rng)


@pytest.fixture
def judgements(model):
    rng = random.Random(1)
    return near(model, [make_sample(rng, episode=i // 2, kind="judge", n=12) for i in range(6)], rng)


def plain_loss(model, samples, objective=PLAIN):
    """L of one kind of samples, written out: sum over units of (weighted) token losses, divided by the
    units."""
    total, episodes, tokens = 0.0, {sample.episode for sample in samples}, 0
    length = dict.fromkeys(episodes, 0)
    for sample in samples:
        length[sample.episode] += sample.count * sum(sample.sampled)
    for sample in samples:
        logprob = (model(torch.tensor([sample.ids]))[0] / objective.temperature).log_softmax(-1)
        for t in (t for t, sampled in enumerate(sample.sampled) if sampled):
            now = logprob[t - 1, sample.ids[t]]
            ratio = (now - (now.detach() if sample.logprob_old is None else sample.logprob_old[t])).exp()
            bounded = torch.clamp(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
            loss = -torch.minimum(ratio * sample.advantage[t], bounded * sample.advantage[t])
            if objective.dual_clip and sample.advantage[t] < 0:
                loss = torch.clamp(loss, max=-objective.dual_clip * sample.advantage[t])
            if objective.kl_coef and sample.kind == "policy":
                d = sample.logprob_ref[t] - now
                loss = loss + objective.kl_coef * (d.exp() - d - 1)
            reduction = objective.reduction if sample.kind == "policy" else "token"
            weight = {"token": 1.0, "episode": 1 / length[sample.episode],
                      "constant": 1 / objective.longest}[reduction]
            total, tokens = total + sample.count * weight * loss, tokens + sample.count
    judges = samples[0].kind == "judge"
    return total / (tokens if judges or objective.reduction == "token" else len(episodes))


def plain_gradient(model, samples, objective=PLAIN):
    return flat(torch.autograd.grad(plain_loss(model, samples, objective), list(model.parameters())))


# The loss

@pytest.mark.parametrize("changes", [{}, {"reduction": "episode"}, {"reduction": "constant", "longest": 20},
                                     {"clip_low": 0.05, "clip_high": 0.3}, {"temperature": 0.7},
                                     {"dual_clip": 1.2}], ids=str)
def test_the_gradient_is_that_of_the_loss_written_out(model, samples, changes):
    objective = replace(PLAIN, **changes)
    got, metrics = gradient(model, samples, objective)
    assert_same(got, plain_gradient(model, samples, objective))
    assert metrics["policy/loss"] == pytest.approx(plain_loss(model, samples, objective).item(), abs=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(got.norm().item(), rel=1e-4)
    assert metrics["policy/tokens"] == sum(sum(sample.sampled) for sample in samples)
    assert 0 < metrics["policy/clip_frac"] < 1


def test_k3_joins_the_loss(model, samples):
    objective = replace(PLAIN, kl_coef=0.5)
    rng = random.Random(5)
    samples[0].advantage = [0.0] * len(samples[0].ids)            # silent, but for its KL
    for sample in samples:
        sample.logprob_ref = [(p + rng.uniform(-1, 1)) * s
                              for p, s in zip(sample.logprob_old, sample.sampled)]
    got, metrics = gradient(model, samples, objective)
    assert_same(got, plain_gradient(model, samples, objective))
    assert metrics["policy/kl_nats"] > 0.05
    assert (got - gradient(model, samples)[0]).norm() > 0.1 * got.norm()


def test_advantage_1_without_old_logprobs_is_cross_entropy(model, samples):
    shown = [replace(s, advantage=[float(x) for x in s.sampled], logprob_old=None) for s in samples]
    logits, target = [], []
    for sample in shown:
        logits.append(model(torch.tensor([sample.ids]))[0, :-1])
        target += [token if sampled else -100 for token, sampled in zip(sample.ids[1:], sample.sampled[1:])]
    want = gradient_of(model, F.cross_entropy(torch.cat(logits), torch.tensor(target)))
    got, metrics = gradient(model, shown)
    assert_same(got, want)
    assert metrics["policy/logprob_gap_nats"] == 0 and metrics["policy/clip_frac"] == 0


def test_demonstrations_are_the_same_samples_without_old_logprobs(samples):
    shown = imitated(samples)
    assert [replace(s, logprob_old=None) for s in samples] == shown and samples[0].logprob_old is not None


def test_clipped_tokens_have_no_gradient(model):
    rng = random.Random(2)
    sample = near(model, [make_sample(rng)], rng)[0]
    scores = update.score(model, [sample], PLAIN)[0]
    sample.advantage = [1.0 * s for s in sample.sampled]
    sample.logprob_old = [(p - 0.5) * s for p, s in zip(scores, sample.sampled)]         # ratio e^0.5 > 1.28
    got, metrics = gradient(model, [sample])
    assert got.abs().max() == 0 and metrics["policy/clip_frac"] == 1
    sample.advantage = [-a for a in sample.advantage]
    got, metrics = gradient(model, [sample])
    assert got.norm() > 0 and metrics["policy/clip_frac"] == 0


# However it is cut

@pytest.mark.parametrize("max_tokens", [1, 64, 200])
def test_small_microbatches_are_one_big_one(model, samples, judgements, max_tokens):
    both = samples + judgements
    whole, metrics = gradient(model, both)
    assert len(update.microbatches(samples, max_tokens)) > 1
    assert len(update.microbatches(samples, PLAIN.microbatch_tokens)) == 1
    parts, same = gradient(model, both, replace(PLAIN, microbatch_tokens=max_tokens))
    assert_same(parts, whole)
    assert same == pytest.approx(metrics, abs=1e-5)


def test_microbatches_hold_every_sample_once_within_the_budget(samples):
    batches = update.microbatches(samples, 64)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    assert all(len(batch) == 1 or len(batch) * max(len(s.ids) for s in batch) <= 64 for batch in batches)


@pytest.mark.parametrize("reduction", ["token", "episode", "constant"])
def test_one_sample_per_turn_is_one_sample_per_episode(model, chat, reduction):
    """Real episodes: the merged conversation and its turns, each with its own whole prompt, have one
    gradient."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_seats(2, 3),
                            Sampling(max_response_tokens=4), 4, 400, on_truncation="invalid")
    rng = random.Random(0)
    merged, by_turn = [], []
    for episode in episodes:
        for k, turn in enumerate(episode.turns):
            n, m = len(turn.prompt_ids), len(turn.response_ids)
            turn.advantage = rng.gauss(0, 1)
            turn.token_advantage = [rng.gauss(0, 1) for _ in range(m)] if k == 1 else None
            by_turn.append(Sample(turn.prompt_ids + turn.response_ids, [False] * n + [True] * m,
                                  [0.0] * n + (turn.token_advantage or [turn.advantage] * m),
                                  [0.0] * n + turn.logprob_old, episode.index))
        merged += update.samples_of(episode)
    assert len(merged) == len(episodes) < len(by_turn)
    objective = replace(PLAIN, reduction=reduction, longest=20)
    got, metrics = gradient(model, merged, objective)
    assert_same(got, gradient(model, by_turn, objective)[0])
    assert metrics["policy/logprob_gap_max_nats"] < 1e-4           # they agree, as far as a run demands


def test_padding_content_does_not_matter(model, samples, monkeypatch):
    whole, _ = gradient(model, samples)
    collate = update.collate

    def other_padding(batch, model):
        ids_BT, *rest = collate(batch, model)
        for row, sample in enumerate(batch):
            assert ids_BT[row, :len(sample.ids)].tolist() == sample.ids
            assert not ids_BT[row, len(sample.ids):].any()
            ids_BT[row, len(sample.ids):] = 77
        return ids_BT, *rest

    monkeypatch.setattr(update, "collate", other_padding)
    assert torch.equal(gradient(model, samples)[0], whole)


def test_token_ids_do_not_make_the_mask(model):
    """A sampled token that equals the padding id 0, and a stop token at the end, are trained like any
    other."""
    sample = Sample([5, 0, 0, 259], [False, True, True, True], [0.0, 1.0, 1.0, 1.0], None, 0)
    got, metrics = gradient(model, [sample])
    assert metrics["policy/tokens"] == 3
    assert_same(got, plain_gradient(model, [sample]))


def test_inputs_are_not_changed(model, samples, judgements):
    """But for the weight in the loss, which each step writes anew."""
    before, weights = copy.deepcopy(samples + judgements), flat(model.parameters())
    first, _ = gradient(model, samples + judgements)
    assert [replace(sample, weight=1.0) for sample in samples + judgements] == before
    assert torch.equal(gradient(model, samples + judgements)[0], first)
    assert torch.equal(flat(model.parameters()), weights)         # the Recorder steps nowhere


@pytest.mark.parametrize("reduction, grown", [("token", None), ("episode", 6 / 5)])
def test_a_silent_sample_counts_in_the_denominator_only(model, samples, reduction, grown):
    objective, rng = replace(PLAIN, reduction=reduction), random.Random(9)
    silent = replace(make_sample(rng, episode=99), advantage=[0.0] * 40)
    tokens = sum(sum(sample.sampled) for sample in samples)
    grown = grown or (tokens + sum(silent.sampled)) / tokens
    with_it, metrics = gradient(model, samples + [silent], objective)
    assert_same(with_it * grown, gradient(model, samples, objective)[0])
    assert metrics["policy/tokens"] == tokens + sum(silent.sampled)


def test_only_silent_samples_step_nowhere(model, samples):
    silent = [replace(s, advantage=[0.0] * len(s.ids)) for s in samples]
    got, metrics = gradient(model, silent)
    assert got.abs().max() == 0 and metrics["policy/loss"] == metrics["policy/grad_norm"] == 0


def test_a_count_of_three_is_three_equal_samples(model, judgements):
    counted = [replace(judgements[0], count=3)] + judgements[1:]
    got, metrics = gradient(model, counted)
    want, same = gradient(model, [judgements[0]] * 2 + judgements)
    assert_same(got, want)
    assert metrics["judge/tokens"] == same["judge/tokens"]
    assert metrics["judge/loss"] == pytest.approx(same["judge/loss"], abs=1e-6)


# Policy and judge

@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("weight, cap", [(0.1, 0.0), (1.0, 0.0), (1.0, 0.3), (1.0, 1000.0), (0.0, 0.5)])
def test_policy_and_judge_add_up_by_the_stated_formula(model, samples, judgements, weight, cap, compare):
    """g = g_policy + weight * min(1, cap |g_policy| / (weight |g_judge|)) * g_judge."""
    policy, judge = plain_gradient(model, samples), plain_gradient(model, judgements)
    limit = cap * policy.norm() / (weight * judge.norm()) if cap and weight else math.inf
    want = policy + weight * min(1.0, limit) * judge
    objective = replace(PLAIN, judge_weight=weight, judge_grad_cap=cap)
    got, metrics = gradient(model, samples + judgements, objective, compare)
    assert_same(got, want)
    assert metrics["policy/grad_norm"] == pytest.approx(want.norm().item(), rel=1e-4)
    assert ("judge/grad_ratio" in metrics) == ("judge/grad_cosine" in metrics) == bool(compare or cap)
    if compare or cap:
        assert metrics["judge/grad_ratio"] == pytest.approx((judge.norm() / policy.norm()).item(), rel=1e-4)
        cosine = F.cosine_similarity(judge, policy, dim=0).item()
        assert metrics["judge/grad_cosine"] == pytest.approx(cosine, abs=1e-4)
    assert metrics["judge/weight"] == pytest.approx(weight * min(1.0, float(limit)), rel=1e-4)
    if cap == 0.3:
        assert limit < 1                         # else the cap was not tested


def test_the_judge_alone_is_weighted_too(model, judgements):
    got, metrics = gradient(model, judgements, replace(PLAIN, judge_weight=0.25))
    assert_same(got, 0.25 * plain_gradient(model, judgements))
    assert metrics["policy/grad_norm"] == pytest.approx(got.norm().item(), rel=1e-4)


def test_each_kinds_metrics_are_its_own_however_they_are_backpropagated(model, samples, judgements):
    _, both = gradient(model, samples + judgements)
    _, compared = gradient(model, samples + judgements, compare=True)
    assert both == pytest.approx({key: compared[key] for key in both}, rel=1e-5, abs=1e-6, nan_ok=True)
    for kind, members in (("policy", samples), ("judge", judgements)):
        own = {key: value for key, value in gradient(model, members)[1].items() if key.startswith(f"{kind}/")}
        own.pop("policy/grad_norm", None)
        assert own == pytest.approx({key: both[key] for key in own}, rel=1e-5, abs=1e-6, nan_ok=True)


def test_the_judge_has_no_kl(model, samples, judgements):
    """Reference logprobs of the policy's samples only, in one backward with the judge's."""
    rng, objective = random.Random(4), replace(PLAIN, kl_coef=0.3, judge_weight=1.0)
    for sample in samples:
        pairs = zip(sample.logprob_old, sample.sampled)
        sample.logprob_ref = [p + sampled * rng.uniform(-0.4, 0.4) for p, sampled in pairs]
    got, metrics = gradient(model, samples + judgements, objective)
    assert_same(got, plain_gradient(model, samples, objective) + plain_gradient(model, judgements))
    assert metrics["policy/kl_nats"] > 0 == metrics["judge/kl_nats"]
    samples[0].logprob_ref = None
    with pytest.raises(update.NonFinite):
        gradient(model, samples + judgements, objective)


def test_judge_weight_0_leaves_the_policys_gradient_bit_for_bit(model, samples, judgements):
    with_it, _ = gradient(model, samples + judgements, replace(PLAIN, judge_weight=0.0), compare=True)
    assert torch.equal(with_it, gradient(model, samples)[0])


def test_reductions_are_the_policys_the_judge_counts_tokens(model, samples, judgements):
    objective = replace(PLAIN, reduction="constant", longest=7, judge_weight=1.0)
    got, _ = gradient(model, samples + judgements, objective)
    assert_same(got, plain_gradient(model, samples, objective) + plain_gradient(model, judgements))


# The step

def test_the_gradient_is_clipped_to_its_norm_and_reported_before(model, samples, judgements):
    free, metrics = gradient(model, samples + judgements)
    limit = metrics["policy/grad_norm"] / 3
    clipped, same = gradient(model, samples + judgements, replace(PLAIN, max_grad_norm=limit))
    assert clipped.norm().item() == pytest.approx(limit, rel=1e-4)
    assert_same(clipped * 3, free)
    assert same["policy/grad_norm"] == metrics["policy/grad_norm"]
    loose, _ = gradient(model, samples + judgements, replace(PLAIN, max_grad_norm=9 * limit))
    assert torch.equal(loose, free)


def test_a_step_makes_what_was_rewarded_likelier(model, samples):
    """AdamW itself, ten steps: the advantage-weighted logprob rises, no gradient stays behind."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def objective_value():
        scores = update.score(model, samples, PLAIN)
        return sum(a * p for s, of_sample in zip(samples, scores) for a, p in zip(s.advantage, of_sample))

    before = objective_value()
    for _ in range(10):
        update.update(model, optimizer, imitated(samples), PLAIN, lr=1e-3)
    assert objective_value() > before + 1
    assert all(parameter.grad is None for parameter in model.parameters())


def test_muon_moves_a_layers_matrix_alike_in_all_directions_of_its_gradient(model, samples):
    """The first step. With the gradient's singular vectors U and V, by an SVD, U' step V is diagonal, its
    entries between .5 and 1.5 of lr * .2 * sqrt(longer side), where the gradient's own differ by far more.
    What is no matrix of a layer moves by lr against the gradient's sign, as AdamW does."""
    optimizer, lr = update.Muon(model), 1e-3
    before, gradient = [p.detach().clone() for p in model.parameters()], {}
    step, named = optimizer.step, dict(model.named_parameters())
    optimizer.step = lambda: gradient.update({name: p.grad.clone() for name, p in named.items()}) or step()
    update.update(model, optimizer, imitated(samples), PLAIN, lr=lr)
    spread = []
    for (name, parameter), was in zip(model.named_parameters(), before, strict=True):
        moved = parameter.detach() - was
        if ".layers." in name and moved.dim() == 2:
            u, values, vh = torch.linalg.svd(gradient[name], full_matrices=False)
            clear = values > 0.05 * values[0]                         # small ones are not brought to 1
            along = u[:, clear].T @ (-moved / (lr * 0.2 * max(moved.shape)**0.5)) @ vh[clear].T
            assert along.diagonal().min() > 0.5 and along.diagonal().max() < 1.5
            assert (along - along.diagonal().diag()).abs().max() < 0.1                   # bf16
            spread.append(values[0] / values[clear][-1])
        else:
            sure = gradient[name].abs() > 1e-6                                           # eps is 1e-8
            torch.testing.assert_close(moved[sure], -lr * gradient[name][sure].sign(), rtol=0.02, atol=1e-7)
    assert max(spread) > 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_muon_counts_its_steps_where_adamw_looks_for_them(model, samples, fused):
    """Fused AdamW, which CUDA's is, reads the count on the parameter's device; the other on the CPU. The
    device is "meta" here, so that any machine tells them apart."""
    optimizer = update.Muon(model)
    update.update(model, optimizer, imitated(samples), PLAIN, lr=1e-3)
    saved = optimizer.saved()
    assert {tensor.device.type for state in saved for tensor in state.values()} == {"cpu"}
    elsewhere = update.Muon(copy.deepcopy(model).to("meta"))
    elsewhere.parts[1].defaults["fused"] = fused
    elsewhere.load(saved)
    for parameter, state in elsewhere.parts[1].state.items():
        assert state["exp_avg"].device == parameter.device
        assert state["step"].device.type == ("meta" if fused else "cpu")


@pytest.mark.parametrize("broken", ["advantage", "logprob_old", "weights"])
def test_what_is_not_finite_is_raised_before_the_weights_change(model, samples, broken):
    if broken == "weights":
        with torch.no_grad():
            model.model.norm.weight[0] = math.inf
    else:
        t = samples[3].sampled.index(True)
        getattr(samples[3], broken)[t] = math.nan
    before = flat(model.parameters())
    with pytest.raises(update.NonFinite, match="loss"):
        update.update(model, torch.optim.AdamW(model.parameters(), lr=1.0), samples, PLAIN, lr=1.0)
    assert torch.equal(flat(model.parameters()), before)


def test_a_judge_that_is_not_finite_stops_the_policy_too(model, samples, judgements):
    judgements[0].advantage[-1] = math.inf
    with pytest.raises(update.NonFinite, match="judge loss"):
        update.update(model, Recorder(model), samples + judgements, PLAIN, lr=1.0)


# Scoring

@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_score_is_the_full_forward_of_each_sample(model, samples, temperature):
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=100)
    for sample, scores in zip(samples, update.score(model, samples, objective), strict=True):
        with torch.no_grad():
            logprob = (model(torch.tensor([sample.ids]))[0] / temperature).log_softmax(-1)
        want = [logprob[t - 1, token].item() if sampled else 0.0
                for t, (token, sampled) in enumerate(zip(sample.ids, sample.sampled))]
        assert scores == pytest.approx(want, abs=rounding(want))


def test_rescore_replaces_the_old_logprobs_and_tells_how_far_off_they_were(model, samples):
    true = update.score(model, samples, PLAIN)
    gaps = [abs(a - b) for s, new in zip(samples, true)
            for a, b, sampled in zip(s.logprob_old, new, s.sampled) if sampled]
    metrics = update.rescore(model, samples, PLAIN)
    assert [sample.logprob_old for sample in samples] == true
    assert metrics == pytest.approx({"policy/logprob_gap_nats": sum(gaps) / len(gaps),
                                     "policy/logprob_gap_max_nats": max(gaps)})


def test_a_first_token_that_was_sampled_is_refused(model):
    sample = Sample([1, 2], [True, True], [1.0, 1.0], None, 0)
    with pytest.raises(AssertionError, match="first token"):
        update.update(model, Recorder(model), [sample], PLAIN, lr=0.0)


def test_old_logprobs_of_some_samples_only_are_refused(model, samples):
    with pytest.raises(AssertionError, match="logprob_old is known for some"):
        update.update(model, Recorder(model), samples[:1] + imitated(samples[1:]), PLAIN, lr=0.0)


# The judge as a classifier

@pytest.fixture
def headed(model):
    return with_value_head(model, bias=0.2)


@pytest.fixture
def turns():
    """Seven judged turns: four good, three bad, the first of them counting twice."""
    rng = random.Random(3)
    ids = [[rng.randrange(256) for _ in range(rng.randint(3, 40))] for _ in range(7)]
    return [Sample(of_turn, [False] * len(of_turn), [0.0] * len(of_turn), None, i, "judge",
                   count=2 if i == 0 else 1, label=float(i % 2 == 0)) for i, of_turn in enumerate(ids)]


def plain_cross_entropy(model, turns):
    """Mean over the turns of -log of the label's probability, one turn at a time."""
    total = 0.0
    for turn in turns:
        hidden = model(torch.tensor([turn.ids]), head="hidden")[0, -1]
        good = torch.sigmoid(hidden @ model.value_head.weight[0] + model.value_head.bias[0])
        total = total - turn.count * torch.log(good if turn.label else 1 - good)
    return total / sum(turn.count for turn in turns)


@pytest.mark.parametrize("max_tokens", [1, 100, 16384])
def test_labels_train_the_value_head_by_cross_entropy(headed, turns, max_tokens):
    objective = replace(PLAIN, judge_weight=0.5, microbatch_tokens=max_tokens)
    got, metrics = gradient(headed, turns, objective)
    loss = plain_cross_entropy(headed, turns)
    assert_same(got, 0.5 * gradient_of(headed, loss))
    assert metrics["judge/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["judge/tokens"] == 8 and metrics["policy/tokens"] == 0
    good = torch.tensor(update.judgements(headed, turns, PLAIN), dtype=torch.double)
    label = torch.tensor([turn.label for turn in turns], dtype=torch.double)
    assert metrics["judge/nll_nats"] == pytest.approx(F.binary_cross_entropy(good, label).item(), rel=1e-5)
    entropy = -(good * good.log() + (1 - good) * (1 - good).log()).mean()
    assert metrics["judge/entropy_nats"] == pytest.approx(entropy.item(), rel=1e-5)


def test_judgements_are_probabilities_at_the_last_token(headed, turns):
    judged = update.judgements(headed, turns, replace(PLAIN, microbatch_tokens=100))
    for turn, good in zip(turns, judged, strict=True):
        with torch.no_grad():
            value = headed(torch.tensor([turn.ids]), head="value")[0, -1].item()
        assert good == pytest.approx(1 / (1 + math.exp(-value)), abs=rounding(value))
    assert max(judged) - min(judged) > 0.05


@pytest.mark.parametrize("cap", [0.0, 0.1])
def test_policy_and_classifier_add_up_by_the_same_formula(headed, samples, turns, cap):
    policy = gradient_of(headed, plain_loss(headed, samples))
    judge = gradient_of(headed, plain_cross_entropy(headed, turns))
    weight = 2.0 * min(1.0, cap * policy.norm() / (2.0 * judge.norm()) if cap else 1.0)
    objective = replace(PLAIN, judge_weight=2.0, judge_grad_cap=cap)
    assert_same(gradient(headed, samples + turns, objective)[0], policy + weight * judge)
    got, metrics = gradient(headed, samples + turns, objective, compare=True)
    assert_same(got, policy + weight * judge)
    assert metrics["judge/grad_ratio"] == pytest.approx((judge.norm() / policy.norm()).item(), rel=1e-4)
    assert metrics["judge/weight"] == pytest.approx(float(weight), rel=1e-4)
    assert cap == 0 or weight < 2


def test_a_value_head_that_nobody_asks_leaves_the_policys_gradient_bit_for_bit(model, headed, samples):
    got, metrics = gradient(headed, samples)
    want, same = gradient(model, samples)
    assert torch.equal(got[:len(want)], want) and not got[len(want):].any()
    assert metrics == pytest.approx(same, rel=0, abs=0, nan_ok=True)


def test_labelled_turns_are_not_scored(model, samples, turns):
    """gcd.py scores all samples at once, for a reference."""
    scores = update.score(model, samples[:2] + turns + samples[2:], PLAIN)
    assert scores[:2] + scores[9:] == update.score(model, samples, PLAIN)
    assert not any(sum(scores[2:9], []))


def test_answers_and_labels_do_not_mix(headed, turns, judgements):
    with pytest.raises(AssertionError, match="some labelled, some not"):
        update.update(headed, Recorder(headed), turns + judgements, PLAIN, lr=0.0)


def test_a_label_that_is_not_finite_stops_the_step(headed, turns):
    turns[2].label = math.nan
    with pytest.raises(update.NonFinite, match="judge loss nan"):
        update.update(headed, Recorder(headed), turns, PLAIN, lr=1.0)


# Episodes to samples

def make_turn(prompt, response, advantage=0.0, token_advantage=None):
    return Turn("", prompt, response, [-float(i) for i in response], "", None, False, "", advantage=advantage,
                token_advantage=token_advantage)


def make_episode(*turns, index=0):
    return Episode(Task("a", "train", "walk", None), 0, index, [make_turn(*turn) for turn in turns])


def test_turns_that_extend_each_other_become_one_sample():
    episode = make_episode(([1, 2], [3, 4], 0.5), ([1, 2, 3, 4, 5], [6], -1.0),
                           ([1, 2, 3, 4, 5, 6], [7, 8], 2.0), index=4)
    sample, = update.samples_of(episode)
    assert sample.ids == [1, 2, 3, 4, 5, 6, 7, 8] and sample.episode == 4
    assert sample.sampled == [False, False, True, True, False, True, True, True]
    assert sample.advantage == [0, 0, 0.5, 0.5, 0, -1.0, 2.0, 2.0]
    assert sample.logprob_old == [0, 0, -3.0, -4.0, 0, -6.0, -7.0, -8.0]
    assert (sample.kind, sample.count, sample.logprob_ref) == ("policy", 1, None)
    assert sample.turns == episode.turns


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4, 5], [1, 2, 3], [1, 2, 4, 3, 5]])
def test_a_re_rendered_turn_starts_a_sample(prompt):
    """The window moved: not a token of what was sampled before is trained under another prefix."""
    episode = make_episode(([1, 2], [3, 4], 1.0), (prompt, [6], 2.0), (prompt + [6, 7], [8], 3.0))
    first, second = update.samples_of(episode)
    assert first.ids == [1, 2, 3, 4] and second.ids == prompt + [6, 7, 8]
    assert second.advantage == [0] * len(prompt) + [2.0, 0, 3.0]
    assert first.turns == episode.turns[:1] and second.turns == episode.turns[1:]


def test_tokens_with_advantages_of_their_own_keep_them():
    """Zeros too, where all tokens of a turn were dropped."""
    episode = make_episode(([1, 2], [3, 4], 9.0, [0.5, -0.5]), ([1, 2, 3, 4, 5], [6], 7.0, [0.0]),
                           ([1, 2, 3, 4, 5, 6], [8], 2.0))
    sample, = update.samples_of(episode)
    assert sample.advantage == [0, 0, 0.5, -0.5, 0, 0.0, 2.0] and not sample.silent


def test_samples_of_another_class_are_made_of_the_same_turns():
    class Marked(Sample):
        pass

    episode = make_episode(([1, 2], [3, 4], 0.5), ([9], [6], -1.0))
    marked = update.samples_of(episode, make=Marked)
    assert [type(sample) for sample in marked] == [Marked] * 2
    assert [sample.ids for sample in marked] == [sample.ids for sample in update.samples_of(episode)]


def test_minibatches_keep_episodes_whole_and_deal_out_groups():
    samples = [Sample([1], [False], [0.0], None, episode) for episode in range(12) for _ in range(3)]
    parts = update.minibatches(samples, 4)
    assert sorted(id(sample) for part in parts for sample in part) == sorted(map(id, samples))
    episodes = [{sample.episode for sample in part} for part in parts]
    assert sum(map(len, episodes)) == 12                                       # no episode in two of them
    for group in ({0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}):
        assert all(group & of_part for of_part in episodes)


# What is measured

@pytest.mark.parametrize("history", [0, 1])
@pytest.mark.parametrize("rescored", [False, True])
def test_a_tokens_penalty_is_how_much_likelier_it_was_than_for_the_reference(model, chat, rescored, history):
    """Turn by turn, by whole forwards of both models; by the sampler's logprobs or by the trainer's."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(4)], make_seats(2, 2),
                            Sampling(max_response_tokens=4), 3, 400, history)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.8)
    turns = [turn for episode in episodes for turn in episode.turns]
    for turn in turns:                             # a sampler that is off: only rescoring does not see it
        turn.logprob_old = [p + 0.5 for p in turn.logprob_old]
    update.write_kl(model, reference, episodes, PLAIN, 0.5, rescored)
    for turn in turns:
        with torch.no_grad():
            now, ref = (of_model(torch.tensor([turn.prompt_ids + turn.response_ids]))[0].log_softmax(-1)
                        for of_model in (model, reference))
        places = list(enumerate(turn.response_ids, len(turn.prompt_ids) - 1))
        want = [0.5 * (now[t, i] - ref[t, i]).item() + (0 if rescored else 0.25) for t, i in places]
        assert turn.kl == pytest.approx(want, abs=1e-4)
    assert max(abs(x) for turn in turns for x in turn.kl) > 0.05


def test_the_mean_of_steps_leaves_out_what_was_not_measured():
    steps = [{"a": 1.0, "b": math.nan}, {"a": 2.0, "b": 5.0, "c": math.nan}]
    assert update.mean_of(steps) == pytest.approx({"a": 1.5, "b": 5.0, "c": math.nan}, nan_ok=True)
