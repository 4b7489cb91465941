"""Proves that an update's gradient is that of update.py's objective, however it is split into microbatches.

    python -m pytest tests/core/test_update.py

The oracles (`plain_loss`, `plain_cross_entropy`, ...) take one sample at a time, with a Python loop per token
and autograd; no microbatch, no padding.
"""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import Corridor, Recorder, assert_same, flat, make_specs, rounding, with_value_head
from hand_made import PLAIN, gradient_of, make_sample, with_old_logprobs

import batching
import config
import rollout
import session
import update
from batching import Sample
from envs import Task
from lm import logprobs
from lm.engine import Sampling
from rollout import Episode, Turn


def imitated(samples):
    """The same samples without old logprobs, as the cold start has them."""
    return [replace(sample, logprob_old=None) for sample in samples]


def gradient(model, samples, objective=PLAIN, compare=False):
    """(the gradient that update() passes to the optimizer, its metrics)."""
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, objective, lr=0.25, compare=compare)
    assert recorder.param_groups == [{"lr": 0.25}]
    return recorder.gradient, metrics


@pytest.fixture
def samples(model):
    """Nine policy samples of five episodes; old logprobs up to 0.4 nats off the model's: some are clipped."""
    rng = random.Random(0)
    return with_old_logprobs(model, [make_sample(rng, episode=i % 5) for i in range(9)], rng)


@pytest.fixture
def judgements(model):
    rng = random.Random(1)
    made = [make_sample(rng, episode=i // 2, kind="judge", n=12) for i in range(6)]
    return with_old_logprobs(model, made, rng)


def plain_loss(model, samples, objective=PLAIN):
    """L of one kind of samples: the sum of (weighted) token losses, divided by the number of units."""
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
            if sample.kind == "policy":
                spread = logprob[t - 1]
                loss = loss + objective.entropy_coef * (spread.exp() * spread).sum()
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
                                     {"dual_clip": 1.2}, {"entropy_coef": 0.3}], ids=str)
def test_the_gradient_equals_that_of_the_plain_loss(model, samples, changes):
    objective = replace(PLAIN, **changes)
    got, metrics = gradient(model, samples, objective)
    assert_same(got, plain_gradient(model, samples, objective))
    assert metrics["policy/loss"] == pytest.approx(plain_loss(model, samples, objective).item(), abs=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(got.norm().item(), rel=1e-4)
    assert metrics["policy/tokens"] == sum(sum(sample.sampled) for sample in samples)
    assert 0 < metrics["policy/clip_frac"] < 1


def test_k3_is_added_to_the_loss(model, samples):
    objective = replace(PLAIN, kl_coef=0.5)
    rng = random.Random(5)
    samples[0].advantage = [0.0] * len(samples[0].ids)            # only its KL has a gradient
    for sample in samples:
        sample.logprob_ref = [(p + rng.uniform(-1, 1)) * s
                              for p, s in zip(sample.logprob_old, sample.sampled)]
    got, metrics = gradient(model, samples, objective)
    assert_same(got, plain_gradient(model, samples, objective))
    assert metrics["policy/kl_nats"] > 0.05
    assert (got - gradient(model, samples)[0]).norm() > 0.1 * got.norm()


def test_advantage_1_without_old_logprobs_is_cross_entropy(model, samples):
    imitation = [replace(s, advantage=[float(x) for x in s.sampled], logprob_old=None) for s in samples]
    logits, target = [], []
    for sample in imitation:
        logits.append(model(torch.tensor([sample.ids]))[0, :-1])
        target += [token if sampled else -100 for token, sampled in zip(sample.ids[1:], sample.sampled[1:])]
    want = gradient_of(model, F.cross_entropy(torch.cat(logits), torch.tensor(target)))
    got, metrics = gradient(model, imitation)
    assert_same(got, want)
    assert metrics["policy/logprob_gap_nats"] == metrics["policy/clip_frac"] == 0
    assert metrics["policy/approx_kl_nats"] == 0


def test_clipped_tokens_have_no_gradient(model):
    rng = random.Random(2)
    sample = with_old_logprobs(model, [make_sample(rng)], rng)[0]
    scores = update.logprobs(model, [sample], PLAIN)[0]
    sample.advantage = [1.0 * s for s in sample.sampled]
    sample.logprob_old = [(p - 0.5) * s for p, s in zip(scores, sample.sampled)]         # ratio e^0.5 > 1.28
    got, metrics = gradient(model, [sample])
    assert got.abs().max() == 0 and metrics["policy/clip_frac"] == 1
    assert metrics["policy/approx_kl_nats"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-4)
    sample.advantage = [-a for a in sample.advantage]
    got, metrics = gradient(model, [sample])
    assert got.norm() > 0 and metrics["policy/clip_frac"] == 0


# Microbatches

@pytest.mark.parametrize("max_tokens", [1, 64, 100])
def test_small_microbatches_give_the_same_gradient_as_one(model, samples, judgements, max_tokens):
    both = samples + judgements
    full, metrics = gradient(model, both)
    assert len(batching.microbatches(samples, max_tokens)) > 1
    assert len(batching.microbatches(samples, PLAIN.microbatch_tokens)) == 1
    parts, same = gradient(model, both, replace(PLAIN, microbatch_tokens=max_tokens))
    assert_same(parts, full)
    assert same == pytest.approx(metrics, abs=1e-5)


@pytest.mark.parametrize("reduction", ["token", "episode", "constant"])
def test_samples_per_turn_and_per_episode_have_the_same_gradient(model, chat, reduction):
    """Of played episodes: the merged conversation, and its turns with a full prompt each."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_specs(2, 3),
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
        merged += batching.samples_of(episode)
    assert len(merged) == len(episodes) < len(by_turn)
    objective = replace(PLAIN, reduction=reduction, longest=20)
    got, metrics = gradient(model, merged, objective)
    assert_same(got, gradient(model, by_turn, objective)[0])
    assert metrics["policy/logprob_gap_max_nats"] < 1e-4           # the limit of a run


def test_the_mask_does_not_depend_on_token_ids(model):
    """A sampled token with id 0, and a stop token at the end, are trained like any other."""
    sample = Sample([5, 0, 0, 259], [False, True, True, True], [0.0, 1.0, 1.0, 1.0], None, 0)
    got, metrics = gradient(model, [sample])
    assert metrics["policy/tokens"] == 3
    assert_same(got, plain_gradient(model, [sample]))


def test_inputs_are_not_changed(model, samples, judgements):
    """Except the weight in the loss, which each step writes."""
    before, weights = copy.deepcopy(samples + judgements), flat(model.parameters())
    first, _ = gradient(model, samples + judgements)
    assert [replace(sample, weight=1.0) for sample in samples + judgements] == before
    assert torch.equal(gradient(model, samples + judgements)[0], first)
    assert torch.equal(flat(model.parameters()), weights)         # the Recorder changes no weight


def test_the_papers_preset_has_the_entropy_in_its_objective():
    assert session.objective_of(config.parse(["--preset", "paper"])).entropy_coef == 0.001
    assert session.objective_of(config.parse([])).entropy_coef == 0
    flags = {"microbatch_tokens": 512, "max_grad_norm": 0.5}
    objective = session.objective_of(config.parse(config.arguments(flags)))
    assert {name: getattr(objective, name) for name in flags} == flags


def test_the_weight_of_a_kl_in_the_loss_is_its_flags():
    for kl, weight in (("loss", 0.3), ("reward", 0.0)):
        assert session.objective_of(config.parse(["--kl", kl, "--kl-coef", "0.3"])).kl_coef == weight


def test_the_entropy_is_the_policys_alone_in_any_chunks(model, samples, judgements, monkeypatch):
    """Subtracted from its loss, also of samples without an advantage; the judge's answers keep their
    gradient."""
    objective = replace(PLAIN, entropy_coef=0.3, judge_weight=1.0)
    samples[0].advantage = [0.0] * len(samples[0].ids)
    want = plain_gradient(model, samples, objective) + plain_gradient(model, judgements)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 5 * model.config.vocab_size)
    got, metrics = gradient(model, samples + judgements, objective)
    assert_same(got, want)
    assert metrics["policy/entropy_nats"] > 0


@pytest.mark.parametrize("reduction, grown", [("token", None), ("episode", 6 / 5)])
def test_a_sample_without_advantage_counts_in_the_denominator_only(model, samples, reduction, grown):
    objective, rng = replace(PLAIN, reduction=reduction), random.Random(9)
    zero = replace(make_sample(rng, episode=99), advantage=[0.0] * 40)
    tokens = sum(sum(sample.sampled) for sample in samples)
    grown = grown or (tokens + sum(zero.sampled)) / tokens
    with_it, metrics = gradient(model, samples + [zero], objective)
    assert_same(with_it * grown, gradient(model, samples, objective)[0])
    assert metrics["policy/tokens"] == tokens + sum(zero.sampled)


def test_samples_without_advantage_have_no_gradient(model, samples):
    zero = [replace(s, advantage=[0.0] * len(s.ids)) for s in samples]
    got, metrics = gradient(model, zero)
    assert got.abs().max() == 0 and metrics["policy/loss"] == metrics["policy/grad_norm"] == 0


# Policy and judge

@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_policy_and_judge_add_up_by_the_stated_formula(model, samples, judgements, weight, compare):
    """g = g_policy + weight * g_judge."""
    policy, judge = plain_gradient(model, samples), plain_gradient(model, judgements)
    want = policy + weight * judge
    objective = replace(PLAIN, judge_weight=weight)
    got, metrics = gradient(model, samples + judgements, objective, compare)
    assert_same(got, want)
    assert metrics["policy/grad_norm"] == pytest.approx(want.norm().item(), rel=1e-4)
    assert ("judge/grad_ratio" in metrics) == ("judge/grad_cosine" in metrics) == compare
    if compare:
        assert metrics["judge/grad_ratio"] == pytest.approx((judge.norm() / policy.norm()).item(), rel=1e-4)
        cosine = F.cosine_similarity(judge, policy, dim=0).item()
        assert metrics["judge/grad_cosine"] == pytest.approx(cosine, abs=1e-4)


@pytest.mark.parametrize("compare", [False, True])
def test_the_judge_alone_is_weighted_too(model, judgements, compare):
    got, metrics = gradient(model, judgements, replace(PLAIN, judge_weight=0.25), compare)
    assert_same(got, 0.25 * plain_gradient(model, judgements))
    assert metrics["policy/grad_norm"] == pytest.approx(got.norm().item(), rel=1e-4)


def test_each_kinds_metrics_do_not_depend_on_the_other_kind_or_on_compare(model, samples, judgements):
    _, both = gradient(model, samples + judgements)
    _, compared = gradient(model, samples + judgements, compare=True)
    assert both == pytest.approx({key: compared[key] for key in both}, rel=1e-5, abs=1e-6, nan_ok=True)
    for kind, members in (("policy", samples), ("judge", judgements)):
        own = {key: value for key, value in gradient(model, members)[1].items() if key.startswith(f"{kind}/")}
        own.pop("policy/grad_norm", None)
        assert own == pytest.approx({key: both[key] for key in own}, rel=1e-5, abs=1e-6, nan_ok=True)


def test_equal_answers_are_counted_as_often_as_they_were_given(model, judgements):
    """Stored once with their number, or each by itself."""
    first = replace(judgements[0], count=3)
    once = update_metrics(model, [first, *judgements[1:]])
    each = update_metrics(model, [*[replace(first, count=1)] * 3, *judgements[1:]])
    assert once == pytest.approx(each, rel=1e-5, nan_ok=True) and once["judge/nll_nats"] > 0


def update_metrics(model, samples):
    """The metrics of a step on copies of these samples."""
    return gradient(model, [replace(sample) for sample in samples])[1]


def test_the_judge_has_no_kl(model, samples, judgements):
    """Reference logprobs of the policy's samples only, in one backward with the judge's."""
    rng, objective = random.Random(4), replace(PLAIN, kl_coef=0.3, judge_weight=1.0)
    for sample in samples:
        pairs = zip(sample.logprob_old, sample.sampled)
        sample.logprob_ref = [p + sampled * rng.uniform(-0.4, 0.4) for p, sampled in pairs]
    got, metrics = gradient(model, samples + judgements, objective)
    assert_same(got, plain_gradient(model, samples, objective) + plain_gradient(model, judgements))
    assert metrics["policy/kl_nats"] > 0 and "judge/kl_nats" not in metrics
    samples[0].logprob_ref = None
    with pytest.raises(update.NonFinite):
        gradient(model, samples + judgements, objective)


def test_judge_weight_0_leaves_the_policys_gradient_bit_for_bit(model, samples, judgements):
    with_it, _ = gradient(model, samples + judgements, replace(PLAIN, judge_weight=0.0), compare=True)
    assert torch.equal(with_it, gradient(model, samples)[0])


def test_reductions_apply_to_the_policy_and_the_judge_counts_tokens(model, samples, judgements):
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


def test_steps_raise_the_probability_of_rewarded_tokens(model, samples):
    """Ten steps of AdamW: the advantage-weighted logprob rises, and gradients are freed."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def objective_value():
        scores = update.logprobs(model, samples, PLAIN)
        return sum(a * p for s, of_sample in zip(samples, scores) for a, p in zip(s.advantage, of_sample))

    before = objective_value()
    for _ in range(10):
        update.update(model, optimizer, imitated(samples), PLAIN, lr=1e-3)
    assert objective_value() > before + 1
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("broken", ["advantage", "logprob_old", "weights"])
def test_a_loss_that_is_not_finite_raises_before_the_weights_change(model, samples, broken):
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


# Logprobs

@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward_of_each_sample(model, samples, temperature):
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=100)
    for sample, scores in zip(samples, update.logprobs(model, samples, objective), strict=True):
        with torch.no_grad():
            logprob = (model(torch.tensor([sample.ids]))[0] / temperature).log_softmax(-1)
        want = [logprob[t - 1, token].item() if sampled else 0.0
                for t, (token, sampled) in enumerate(zip(sample.ids, sample.sampled))]
        assert scores == pytest.approx(want, abs=rounding(want))


def test_rescore_replaces_the_old_logprobs_and_keeps_the_samplers(model, samples):
    true, sampler = update.logprobs(model, samples, PLAIN), [sample.logprob_old for sample in samples]
    update.rescore(model, samples, PLAIN)
    assert [sample.logprob_old for sample in samples] == true
    assert [sample.logprob_sampler for sample in samples] == sampler


def test_a_steps_own_logprobs_serve_as_the_old_ones(model, samples):
    """As if rescored before the step: its gradient, its weights of a sampler that is off, and the gap."""
    got = []
    for rescored in (True, False):
        made = [replace(sample) for sample in samples]
        if rescored:
            update.rescore(model, made, PLAIN)
        else:
            for sample in made:
                sample.logprob_sampler, sample.logprob_old = sample.logprob_old, None
        got.append(gradient(model, made, PLAIN))
    (want, measured), (grads, metrics) = got
    assert_same(grads, want)
    assert metrics == pytest.approx(measured, abs=1e-6, nan_ok=True)
    pairs = [(a, b) for sample, new in zip(samples, update.logprobs(model, samples, PLAIN)) for a, b, sampled
             in zip(sample.logprob_old, new, sample.sampled) if sampled]
    gaps = [abs(a - b) for a, b in pairs]
    assert metrics["policy/logprob_gap_nats"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-6)
    assert metrics["policy/logprob_gap_max_nats"] == pytest.approx(max(gaps), abs=1e-6) and max(gaps) > 0.01
    assert metrics["policy/sampler_weight"] == pytest.approx(
        sum(min(2.0, math.exp(b - a)) for a, b in pairs) / len(pairs), abs=1e-6)


# A sampler that is not the old policy

def expectation(model, noise, cap):
    """The gradient's expectation if a sampler draws the next token of a prompt, by `update`, with its
    metrics; by autograd, the expectation under the old policy, the one without weights and that of cut
    weights; and of each token its weight, and its probability to be drawn.

    The vocabulary is gone through token by token: a sample for each, as often as the sampler draws it. Its
    logits are off by Gaussian noise.
    """
    rng, prompt = random.Random(7), [5, 17, 3]
    old_V = model(torch.tensor([prompt]))[0, -1].log_softmax(-1).detach()
    noise_V = torch.tensor([rng.gauss(0, noise) for _ in old_V])
    sampler_V = (old_V + noise_V).log_softmax(-1)
    advantage = [rng.gauss(0, 1) for _ in old_V]
    made = [Sample([*prompt, v], [False] * 3 + [True], [0.0] * 3 + [advantage[v]], [0.0] * 3 + [logprob], v,
                   count=math.exp(logprob)) for v, logprob in enumerate(sampler_V.tolist())]
    update.rescore(model, made, PLAIN)
    got, metrics = gradient(model, made, replace(PLAIN, sampler_cap=cap))

    def under(probability_V):
        logprob_V = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)
        return gradient_of(model, -(probability_V * torch.tensor(advantage) * logprob_V).sum())

    share_V = torch.minimum(old_V.exp(), cap * sampler_V.exp())
    return (got, metrics, under(old_V.exp()), under(sampler_V.exp()), under(share_V),
            (old_V - sampler_V).exp(), sampler_V.exp())


def test_below_the_cap_the_weighted_gradients_expectation_is_that_under_the_old_policy(model):
    got, metrics, true, unweighted, _, weight_V, _ = expectation(model, 0.2, 2.0)
    assert weight_V.max() < 2
    assert_same(got, true)
    assert (got - unweighted).norm() > 0.02 * got.norm()
    assert metrics["policy/sampler_cut_frac"] == 0
    assert metrics["policy/sampler_weight"] == pytest.approx(1, rel=1e-5)


def test_above_the_cap_the_expectation_has_the_stated_bias(model):
    got, metrics, true, unweighted, cut, weight_V, drawn_V = expectation(model, 0.8, 2.0)
    assert_same(got, cut)
    assert min((got - other).norm() for other in (true, unweighted)) > 0.02 * got.norm()
    cut_frac, weight = (drawn_V * (weight_V > 2)).sum(), (drawn_V * weight_V.clamp(max=2)).sum()
    assert metrics["policy/sampler_cut_frac"] == pytest.approx(cut_frac.item(), rel=1e-5) != 0
    assert metrics["policy/sampler_weight"] == pytest.approx(weight.item(), rel=1e-5)


def test_without_weights_the_expectation_is_neither(model):
    got, metrics, true, unweighted, cut, *_ = expectation(model, 0.8, 0.0)
    assert_same(got, unweighted)
    assert min((got - other).norm() for other in (true, cut)) > 0.02 * got.norm()
    assert "policy/sampler_weight" not in metrics


@pytest.mark.parametrize("compare", [False, True])
def test_the_samplers_weight_is_on_policy_and_judge_and_not_on_the_kl(model, samples, judgements, compare):
    """Against a loop; on equal logprobs every weight is 1, and nothing changes."""
    rng, objective = random.Random(6), replace(PLAIN, kl_coef=0.3, judge_weight=0.5, sampler_cap=1.2)
    for sample in samples:
        sample.logprob_ref = [(p + rng.uniform(-1, 1)) * s
                              for p, s in zip(sample.logprob_old, sample.sampled)]
    both = samples + judgements
    plain, _ = gradient(model, both, objective, compare)
    equal = [replace(sample, logprob_sampler=sample.logprob_old) for sample in both]
    same, metrics = gradient(model, equal, objective, compare)
    assert torch.equal(same, plain) and metrics["judge/sampler_weight"] == 1
    for sample in both:
        sample.logprob_sampler = [(p + rng.uniform(-0.5, 0.5)) * s
                                  for p, s in zip(sample.logprob_old, sample.sampled)]
    weighted = [replace(sample, advantage=[a * min(math.exp(old - sampler), 1.2) for a, old, sampler in zip(
        sample.advantage, sample.logprob_old, sample.logprob_sampler)]) for sample in both]
    got, metrics = gradient(model, both, objective, compare)
    policy, judge = plain_gradient(model, weighted[:9], objective), plain_gradient(model, weighted[9:])
    assert_same(got, policy + 0.5 * judge)
    assert (got - plain).norm() > 0.01 * got.norm() and 0 < metrics["judge/sampler_cut_frac"] < 1


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


BY_HEAD = replace(PLAIN, value_judge=True)


@pytest.fixture
def turns():
    """Seven judged turns: four good, three bad; the first has count 2."""
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
    objective = replace(BY_HEAD, judge_weight=0.5, microbatch_tokens=max_tokens)
    got, metrics = gradient(headed, turns, objective)
    loss = plain_cross_entropy(headed, turns)
    assert_same(got, 0.5 * gradient_of(headed, loss))
    assert metrics["judge/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["judge/tokens"] == 8 and metrics["policy/tokens"] == 0
    good = torch.tensor(update.value_head_probabilities(headed, turns, PLAIN), dtype=torch.double)
    count = torch.tensor([turn.count for turn in turns], dtype=torch.double)
    assert metrics["judge/nll_nats"] == pytest.approx(loss.item(), rel=1e-5)
    entropy = -(count * (good * good.log() + (1 - good) * (1 - good).log())).sum() / count.sum()
    assert metrics["judge/entropy_nats"] == pytest.approx(entropy.item(), rel=1e-5)


def test_value_head_probabilities_are_those_at_the_last_token(headed, turns):
    judged = update.value_head_probabilities(headed, turns, replace(PLAIN, microbatch_tokens=100))
    for turn, good in zip(turns, judged, strict=True):
        with torch.no_grad():
            value = headed(torch.tensor([turn.ids]), head="value")[0, -1].item()
        assert good == pytest.approx(1 / (1 + math.exp(-value)), abs=rounding(value))
    assert max(judged) - min(judged) > 0.05


def test_policy_and_classifier_add_up_by_the_same_formula(headed, samples, turns):
    policy = gradient_of(headed, plain_loss(headed, samples))
    judge = gradient_of(headed, plain_cross_entropy(headed, turns))
    objective = replace(BY_HEAD, judge_weight=2.0)
    assert_same(gradient(headed, samples + turns, objective)[0], policy + 2.0 * judge)
    got, metrics = gradient(headed, samples + turns, objective, compare=True)
    assert_same(got, policy + 2.0 * judge)
    assert metrics["judge/grad_ratio"] == pytest.approx((judge.norm() / policy.norm()).item(), rel=1e-4)


def test_an_unused_value_head_leaves_the_policys_gradient_bit_for_bit(model, headed, samples):
    got, metrics = gradient(headed, samples)
    want, same = gradient(model, samples)
    assert torch.equal(got[:len(want)], want) and not got[len(want):].any()
    assert metrics == pytest.approx(same, rel=0, abs=0, nan_ok=True)


def test_answers_and_labels_do_not_mix(headed, turns, judgements):
    """Nor does a label mean anything without a value head's judge."""
    for samples, objective in ((turns + judgements, BY_HEAD), (turns + judgements, PLAIN),
                               (judgements, BY_HEAD), (turns, PLAIN)):
        with pytest.raises(AssertionError, match="labels where, and only where, a value head judges"):
            update.update(headed, Recorder(headed), samples, objective, lr=0.0)


def test_a_label_that_is_not_finite_stops_the_step(headed, turns):
    turns[2].label = math.nan
    with pytest.raises(update.NonFinite, match="judge loss nan"):
        update.update(headed, Recorder(headed), turns, BY_HEAD, lr=1.0)


# Episodes to samples

def make_turn(prompt, response, advantage=0.0, token_advantage=None):
    return Turn("", prompt, response, [-float(i) for i in response], "", None, False, "", advantage=advantage,
                token_advantage=token_advantage)


def make_episode(*turns, index=0):
    return Episode(Task("a", "train", "walk", None), 0, index, [make_turn(*turn) for turn in turns])


def test_turns_that_extend_each_other_become_one_sample():
    episode = make_episode(([1, 2], [3, 4], 0.5), ([1, 2, 3, 4, 5], [6], -1.0),
                           ([1, 2, 3, 4, 5, 6], [7, 8], 2.0), index=4)
    sample, = batching.samples_of(episode)
    assert sample.ids == [1, 2, 3, 4, 5, 6, 7, 8] and sample.episode == 4
    assert sample.sampled == [False, False, True, True, False, True, True, True]
    assert sample.advantage == [0, 0, 0.5, 0.5, 0, -1.0, 2.0, 2.0]
    assert sample.logprob_old == [0, 0, -3.0, -4.0, 0, -6.0, -7.0, -8.0]
    assert (sample.kind, sample.count, sample.logprob_ref) == ("policy", 1, None)
    assert sample.turns == episode.turns


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4, 5], [1, 2, 3], [1, 2, 4, 3, 5]])
def test_a_re_rendered_turn_starts_a_sample(prompt):
    """The history window moved: no sampled token is trained with a prefix other than its own."""
    episode = make_episode(([1, 2], [3, 4], 1.0), (prompt, [6], 2.0), (prompt + [6, 7], [8], 3.0))
    first, second = batching.samples_of(episode)
    assert first.ids == [1, 2, 3, 4] and second.ids == prompt + [6, 7, 8]
    assert second.advantage == [0] * len(prompt) + [2.0, 0, 3.0]
    assert first.turns == episode.turns[:1] and second.turns == episode.turns[1:]


def test_token_advantages_are_kept():
    """Also zeros, of a turn whose tokens were all dropped."""
    episode = make_episode(([1, 2], [3, 4], 9.0, [0.5, -0.5]), ([1, 2, 3, 4, 5], [6], 7.0, [0.0]),
                           ([1, 2, 3, 4, 5, 6], [8], 2.0))
    sample, = batching.samples_of(episode)
    assert sample.advantage == [0, 0, 0.5, -0.5, 0, 0.0, 2.0] and any(sample.advantage)


def test_samples_of_a_subclass_have_the_same_turns():
    class Marked(Sample):
        pass

    episode = make_episode(([1, 2], [3, 4], 0.5), ([9], [6], -1.0))
    marked = batching.samples_of(episode, make=Marked)
    assert [type(sample) for sample in marked] == [Marked] * 2
    assert [sample.ids for sample in marked] == [sample.ids for sample in batching.samples_of(episode)]


def test_minibatches_do_not_split_episodes_and_spread_groups():
    samples = [Sample([1], [False], [0.0], None, episode) for episode in range(12) for _ in range(3)]
    parts = batching.minibatches(samples, 4)
    assert sorted(id(sample) for part in parts for sample in part) == sorted(map(id, samples))
    episodes = [{sample.episode for sample in part} for part in parts]
    assert sum(map(len, episodes)) == 12                                       # no episode in two of them
    for group in ({0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}):
        assert all(group & of_part for of_part in episodes)


# Metrics

@pytest.mark.parametrize("history", [0, 1])
@pytest.mark.parametrize("rescored", [False, True])
def test_a_tokens_kl_is_the_log_ratio_to_the_reference(model, chat, rescored, history):
    """Turn by turn, by full forwards of both models; with the sampler's logprobs or the trainer's."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(4)], make_specs(2, 2),
                            Sampling(max_response_tokens=4), 3, 400, history)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        reference.lm_head.weight.mul_(0.8)
    turns = [turn for episode in episodes for turn in episode.turns]
    for turn in turns:                             # a wrong sampler, which only rescoring corrects
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


def test_a_sample_whose_advantages_cancel_has_a_gradient():
    sample = Sample([1, 2, 3], [False, True, True], [0.0, 1.0, -1.0], None, 0)
    assert update.with_gradient([sample], PLAIN) == [sample]
