"""Proves that one update is the gradient of the objective in update.py's docstring, however it is cut into pieces.

    python -m pytest tests/test_update.py

The oracles (`plain_loss`, `plain_value_loss`, `nthr_by_loops`, ...) take one sample at a time, a Python loop per
token, autograd; no microbatch, no padding.
"""

import copy
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import Corridor, Recorder, assert_same, flat, make_seats, with_value_head

import rollout
import update
from envs import Task
from rollout import Episode, Turn
from update import Objective, Sample

pytestmark = pytest.mark.fast
PLAIN = Objective(max_grad_norm=0.0)


def gradient(model, samples, objective=PLAIN):
    """The gradient that update() steps on, and its metrics."""
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, objective, lr=0.25)
    assert recorder.param_groups == [{"lr": 0.25}]
    return recorder.gradient, metrics


def make_sample(rng, episode=0, kind="policy", n=None, old=0.1):
    """Random ids with one to three sampled spans; old logprobs are `old` off a plausible value."""
    n = n or rng.randint(4, 40)
    sampled = [False] + [rng.random() < 0.4 for _ in range(n - 2)] + [True]
    return Sample([rng.randrange(256) for _ in range(n)], sampled, [rng.gauss(0, 1) * s for s in sampled],
                  [(-5.0 + rng.uniform(-old, old)) * s for s in sampled], episode, kind)


@pytest.fixture
def samples(model):
    """Nine policy samples of five episodes, old logprobs up to 0.4 nats off the model's own: some are clipped."""
    rng = random.Random(0)
    return near(model, [make_sample(rng, episode=i % 5) for i in range(9)], rng)


@pytest.fixture
def judgements(model):
    rng = random.Random(1)
    return near(model, [make_sample(rng, episode=i // 2, kind="judge", n=12) for i in range(6)], rng)


def near(model, samples, rng):
    for sample, own in zip(samples, update.score(model, samples, PLAIN)):
        sample.logprob_old = [(p + rng.uniform(-0.4, 0.4)) * s for p, s in zip(own, sample.sampled)]
    return samples


def plain_loss(model, samples, objective=PLAIN):
    """L of one kind of samples, written out: sum over units of (weighted) token losses, divided by the units."""
    total, episodes, tokens = 0.0, {sample.episode for sample in samples}, 0
    own = dict.fromkeys(episodes, 0)
    for sample in samples:
        own[sample.episode] += sample.count * sum(sample.sampled)
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
            weight = {"token": 1.0, "episode": 1 / own[sample.episode], "constant": 1 / objective.longest}[reduction]
            total, tokens = total + sample.count * weight * loss, tokens + sample.count
    judges = samples[0].kind == "judge"
    return total / (tokens if judges or objective.reduction == "token" else len(episodes))


def plain_gradient(model, samples, objective=PLAIN):
    return flat(torch.autograd.grad(plain_loss(model, samples, objective), list(model.parameters())))


# The loss

OBJECTIVES = [PLAIN, replace(PLAIN, reduction="episode"), replace(PLAIN, reduction="constant", longest=20),
              replace(PLAIN, clip_low=0.05, clip_high=0.3), replace(PLAIN, temperature=0.7), replace(PLAIN, dual_clip=1.2)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.reduction}-{o.clip_low}-{o.temperature}-{o.dual_clip}")
def test_the_gradient_is_that_of_the_loss_written_out(model, samples, objective):
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
        sample.logprob_ref = [(x + rng.uniform(-1, 1)) * s for x, s in zip(sample.logprob_old, sample.sampled)]
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
    want = flat(torch.autograd.grad(F.cross_entropy(torch.cat(logits), torch.tensor(target)), list(model.parameters())))
    got, metrics = gradient(model, shown)
    assert_same(got, want)
    assert metrics["policy/logprob_gap_nats"] == 0 and metrics["policy/clip_frac"] == 0


def test_demonstrations_are_the_same_samples_without_old_logprobs(samples):
    shown = update.demonstration(samples)
    assert [replace(s, logprob_old=None) for s in samples] == shown and samples[0].logprob_old is not None


def test_clipped_tokens_have_no_gradient(model):
    rng = random.Random(2)
    sample = near(model, [make_sample(rng)], rng)[0]
    own = update.score(model, [sample], PLAIN)[0]
    sample.advantage = [1.0 * s for s in sample.sampled]
    sample.logprob_old = [(p - 0.5) * s for p, s in zip(own, sample.sampled)]            # ratio e^0.5 > 1.28
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
    assert len(update.microbatches(samples, max_tokens)) > len(update.microbatches(samples, PLAIN.microbatch_tokens)) == 1
    parts, same = gradient(model, both, replace(PLAIN, microbatch_tokens=max_tokens))
    assert_same(parts, whole)
    assert same == pytest.approx(metrics, abs=1e-5)


def test_microbatches_hold_every_sample_once_within_the_budget(samples):
    batches = update.microbatches(samples, 64)
    assert sorted(id(s) for batch in batches for s in batch) == sorted(map(id, samples))
    assert all(len(batch) == 1 or len(batch) * max(len(s.ids) for s in batch) <= 64 for batch in batches)


@pytest.mark.parametrize("reduction", ["token", "episode", "constant"])
def test_one_sample_per_turn_is_one_sample_per_episode(model, chat, reduction):
    """Real episodes: the merged conversation and its turns, each with its own whole prompt, have one gradient."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_seats(2, 3),
                            rollout.Sampling(max_response_tokens=4), 4, 400, on_truncation="invalid")
    rng = random.Random(0)
    merged, by_turn = [], []
    for i, episode in enumerate(episodes):
        advantages = [rng.gauss(0, 1) for _ in episode.turns]
        merged += update.samples_of(episode, advantages, i)
        for turn, advantage in zip(episode.turns, advantages):
            n, m = len(turn.prompt_ids), len(turn.response_ids)
            by_turn.append(Sample(turn.prompt_ids + turn.response_ids, [False] * n + [True] * m,
                                  [0.0] * n + [advantage] * m, [0.0] * n + turn.logprob_old, i))
    assert len(merged) == len(episodes) < len(by_turn)
    objective = replace(PLAIN, reduction=reduction, longest=20)
    got, metrics = gradient(model, merged, objective)
    assert_same(got, gradient(model, by_turn, objective)[0])
    assert metrics["policy/logprob_gap_max_nats"] < 1e-5          # sampler and trainer agree


def test_padding_content_does_not_matter(model, samples, monkeypatch):
    whole, _ = gradient(model, samples)
    collate = update.collate

    def other_padding(batch, weights, device):
        ids_BT, *rest = collate(batch, weights, device)
        for row, sample in enumerate(batch):
            assert (ids_BT[row, len(sample.ids):] == 0).all() and ids_BT[row, :len(sample.ids)].tolist() == sample.ids
            ids_BT[row, len(sample.ids):] = 77
        return ids_BT, *rest

    monkeypatch.setattr(update, "collate", other_padding)
    assert torch.equal(gradient(model, samples)[0], whole)


def test_token_ids_do_not_make_the_mask(model):
    """A sampled token that equals the padding id 0, and a stop token at the end, are trained like any other."""
    sample = Sample([5, 0, 0, 259], [False, True, True, True], [0.0, 1.0, 1.0, 1.0], None, 0)
    got, metrics = gradient(model, [sample])
    assert metrics["policy/tokens"] == 3
    assert_same(got, plain_gradient(model, [sample]))


def test_inputs_are_not_changed(model, samples, judgements):
    before, weights = copy.deepcopy(samples + judgements), flat(model.parameters())
    gradient(model, samples + judgements)
    assert samples + judgements == before
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

@pytest.mark.parametrize("weight, cap", [(0.1, 0.0), (1.0, 0.0), (1.0, 0.3), (1.0, 1000.0), (0.0, 0.5)])
def test_policy_and_judge_add_up_by_the_stated_formula(model, samples, judgements, weight, cap):
    """g = g_policy + weight * min(1, cap |g_policy| / (weight |g_judge|)) * g_judge."""
    policy, judge = plain_gradient(model, samples), plain_gradient(model, judgements)
    limit = cap * policy.norm() / (weight * judge.norm()) if cap and weight else math.inf
    want = policy + weight * min(1.0, limit) * judge
    got, metrics = gradient(model, samples + judgements, replace(PLAIN, judge_weight=weight, judge_grad_cap=cap))
    assert_same(got, want)
    assert metrics["policy/grad_norm"] == pytest.approx(want.norm().item(), rel=1e-4)
    assert metrics["judge/grad_ratio"] == pytest.approx((judge.norm() / policy.norm()).item(), rel=1e-4)
    assert metrics["judge/grad_cosine"] == pytest.approx(F.cosine_similarity(judge, policy, dim=0).item(), abs=1e-4)
    assert metrics["judge/weight"] == pytest.approx(weight * min(1.0, float(limit)), rel=1e-4)
    if cap == 0.3:
        assert limit < 1                         # else the cap was not tested


def test_the_judge_alone_is_weighted_too(model, judgements):
    got, metrics = gradient(model, judgements, replace(PLAIN, judge_weight=0.25))
    assert_same(got, 0.25 * plain_gradient(model, judgements))
    assert metrics["policy/grad_norm"] == pytest.approx(got.norm().item(), rel=1e-4)


def test_judge_weight_0_leaves_the_policys_gradient_bit_for_bit(model, samples, judgements):
    with_it, _ = gradient(model, samples + judgements, replace(PLAIN, judge_weight=0.0))
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
    loose, _ = gradient(model, samples + judgements, replace(PLAIN, max_grad_norm=3 * metrics["policy/grad_norm"]))
    assert torch.equal(loose, free)


def test_a_step_makes_what_was_rewarded_likelier(model, samples):
    """AdamW itself, ten steps: the advantage-weighted logprob rises, no gradient stays behind."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)

    def objective_value():
        scores = update.score(model, samples, PLAIN)
        return sum(a * p for s, own in zip(samples, scores) for a, p in zip(s.advantage, own))

    before = objective_value()
    for _ in range(10):
        update.update(model, optimizer, update.demonstration(samples), PLAIN, lr=1e-3)
    assert objective_value() > before + 1
    assert all(parameter.grad is None for parameter in model.parameters())


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
        assert scores == pytest.approx(want, abs=1e-5)


def test_rescore_replaces_the_old_logprobs_and_tells_how_far_off_they_were(model, samples):
    true = update.score(model, samples, PLAIN)
    gaps = [abs(a - b) for s, own in zip(samples, true) for a, b, x in zip(s.logprob_old, own, s.sampled) if x]
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
        update.update(model, Recorder(model), samples[:1] + update.demonstration(samples[1:]), PLAIN, lr=0.0)


# The judge as a classifier

@pytest.fixture
def headed(model):
    return with_value_head(model, bias=0.2)


@pytest.fixture
def turns():
    """Seven judged turns: four good, three bad, the first of them counting twice."""
    rng = random.Random(3)
    ids = [[rng.randrange(256) for _ in range(rng.randint(3, 40))] for _ in range(7)]
    return [Sample(own, [False] * len(own), [0.0] * len(own), None, i, "judge", count=2 if i == 0 else 1,
                   label=float(i % 2 == 0)) for i, own in enumerate(ids)]


def plain_cross_entropy(model, turns):
    """Mean over the turns of -log of the label's probability, one turn at a time."""
    total = 0.0
    for turn in turns:
        hidden = model(torch.tensor([turn.ids]), head="hidden")[0, -1]
        good = torch.sigmoid(hidden @ model.value_head.weight[0] + model.value_head.bias[0])
        total = total - turn.count * torch.log(good if turn.label else 1 - good)
    return total / sum(turn.count for turn in turns)


def gradient_of(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return flat(torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters()))


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
        assert good == pytest.approx(1 / (1 + math.exp(-value)), abs=1e-6)
    assert max(judged) - min(judged) > 0.05


@pytest.mark.parametrize("cap", [0.0, 0.1])
def test_policy_and_classifier_add_up_by_the_same_formula(headed, samples, turns, cap):
    policy = gradient_of(headed, plain_loss(headed, samples))
    judge = gradient_of(headed, plain_cross_entropy(headed, turns))
    weight = 2.0 * min(1.0, cap * policy.norm() / (2.0 * judge.norm()) if cap else 1.0)
    got, metrics = gradient(headed, samples + turns, replace(PLAIN, judge_weight=2.0, judge_grad_cap=cap))
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
    with pytest.raises(AssertionError, match="with and without a label"):
        update.update(headed, Recorder(headed), turns + judgements, PLAIN, lr=0.0)


def test_a_label_that_is_not_finite_stops_the_step(headed, turns):
    turns[2].label = math.nan
    with pytest.raises(update.NonFinite, match="judge loss nan"):
        update.update(headed, Recorder(headed), turns, PLAIN, lr=1.0)


# The critic

def first_of_turns(sample, rng):
    """A return at the first token of each sampled span, nan elsewhere."""
    before = [False] + sample.sampled[:-1]
    return [rng.uniform(-1, 1) if now and not last else math.nan for now, last in zip(sample.sampled, before)]


@pytest.fixture
def critic_batch(headed, samples):
    """Samples, returns (the last sample has none) and old values up to 0.4 off the critic's own."""
    rng = random.Random(7)
    returns = [first_of_turns(sample, rng) for sample in samples[:-1]] + [[math.nan] * len(samples[-1].ids)]
    values = update.values(headed, samples, PLAIN)
    old = [[(v + rng.uniform(-0.4, 0.4)) * s for v, s in zip(own, sample.sampled)]
           for own, sample in zip(values, samples)]
    return samples, returns, old


def plain_value_loss(critic, samples, returns, values_old, clip):
    """One target at a time; also the share of targets whose value moved too far to learn."""
    losses, clipped, seen = [], 0, []
    for sample, own, old in zip(samples, returns, values_old):
        value = critic(torch.tensor([sample.ids]), head="value")[0]
        for t, target in enumerate(own):
            if not math.isnan(target):
                v = value[t - 1]
                near = old[t] + torch.clamp(v - old[t], -clip, clip) if clip else v
                losses.append(0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2))
                clipped += bool((near - target) ** 2 > (v - target) ** 2)
                seen.append(v.item())
    return sum(losses) / len(losses), clipped / len(losses), sum(seen) / len(seen)


def critic_gradient(critic, batch, objective):
    recorder = Recorder(critic)
    metrics = update.update_critic(critic, recorder, *batch, objective, lr=0.5)
    assert recorder.param_groups == [{"lr": 0.5}]
    return recorder.gradient, metrics


def test_values_are_read_where_the_sampled_token_is_predicted(headed, samples):
    found = update.values(headed, samples, replace(PLAIN, microbatch_tokens=100))
    for sample, values in zip(samples, found, strict=True):
        with torch.no_grad():
            value = headed(torch.tensor([sample.ids]), head="value")[0].tolist()
        want = [value[t - 1] if sampled else 0.0 for t, sampled in enumerate(sample.sampled)]
        assert values == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("max_tokens", [1, 100, 16384])
def test_the_critics_gradient_is_that_of_the_value_loss_written_out(headed, critic_batch, clip, max_tokens):
    loss, clip_frac, mean = plain_value_loss(headed, *critic_batch, clip)
    got, metrics = critic_gradient(headed, critic_batch, replace(PLAIN, value_clip=clip, microbatch_tokens=max_tokens))
    want = gradient_of(headed, loss)
    assert_same(got, want)
    assert metrics == pytest.approx({"critic/loss": loss.item(), "critic/clip_frac": clip_frac,
                                     "critic/grad_norm": want.norm().item(), "critic/value_mean": mean}, rel=1e-4)
    assert (clip == 0.1) == (clip_frac > 0.1)


def test_a_target_at_every_sampled_token_is_learned(headed, samples):
    """verl-agent's form; ten steps of AdamW bring the values to the returns; lm_head stays."""
    returns = [[0.7 if sampled else math.nan for sampled in sample.sampled] for sample in samples]
    head = headed.lm_head.weight.detach().clone()
    optimizer, old = torch.optim.AdamW(headed.parameters(), weight_decay=0.0), update.values(headed, samples, PLAIN)
    losses = [update.update_critic(headed, optimizer, samples, returns, old, replace(PLAIN, value_clip=0.0), 1e-2)
              ["critic/loss"] for _ in range(10)]
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(headed.lm_head.weight, head)


def test_the_critics_gradient_is_clipped_to_its_norm(headed, critic_batch):
    free, metrics = critic_gradient(headed, critic_batch, PLAIN)
    limit = metrics["critic/grad_norm"] / 4
    got, same = critic_gradient(headed, critic_batch, replace(PLAIN, max_grad_norm=limit))
    assert_same(4 * got, free)
    assert same == metrics


def test_the_critics_inputs_are_not_changed(headed, critic_batch):
    before = repr(critic_batch)                  # nan is not equal to itself
    critic_gradient(headed, critic_batch, PLAIN)
    assert repr(critic_batch) == before


def test_a_return_that_is_not_finite_stops_the_critic(headed, critic_batch):
    samples, returns, old = critic_batch
    returns[2][samples[2].sampled.index(True)] = math.inf
    before = flat(headed.parameters())
    with pytest.raises(update.NonFinite, match="critic loss inf"):
        update.update_critic(headed, torch.optim.AdamW(headed.parameters()), *critic_batch, PLAIN, lr=1.0)
    assert torch.equal(flat(headed.parameters()), before)


def test_a_target_where_nothing_was_sampled_is_refused(headed, critic_batch):
    critic_batch[1][0][0] = 1.0
    with pytest.raises(AssertionError, match="nothing was sampled"):
        critic_gradient(headed, critic_batch, PLAIN)


def test_the_explained_variance_is_over_targets_only(critic_batch):
    _, returns, old = critic_batch
    pairs = [(r, v) for own, values in zip(returns, old) for r, v in zip(own, values) if not math.isnan(r)]
    mean = sum(r for r, _ in pairs) / len(pairs)
    mean_error = sum(r - v for r, v in pairs) / len(pairs)
    unexplained = sum((r - v - mean_error) ** 2 for r, v in pairs) / sum((r - mean) ** 2 for r, _ in pairs)
    assert update.value_fit(returns, old) == pytest.approx({"critic/explained_variance": 1 - unexplained})


# NTHR

def token_terms(model, sample, columns, temperature):
    """(hidden state, prediction error over `columns`) of each sampled token, from a whole forward."""
    with torch.no_grad():
        hidden, logits = model(torch.tensor([sample.ids]), head="hidden")[0], model(torch.tensor([sample.ids]))[0]
    terms = []
    for t in (t for t, sampled in enumerate(sample.sampled) if sampled):
        probability = (logits[t - 1] / temperature).softmax(-1)
        error = [(column == sample.ids[t]) - probability[column].item() for column in columns]
        terms.append((hidden[t - 1].double(), torch.tensor(error, dtype=torch.double)))
    return terms


def nthr_by_loops(model, samples, won, group, beta, temperature):
    """The advantages, pair of tokens by pair of tokens, as methods of arXiv:2505.18830 are written."""
    advantages = [list(sample.advantage) for sample in samples]
    for g in set(group.values()):
        own = [i for i, sample in enumerate(samples) if group[sample.episode] == g]
        episodes = {samples[i].episode for i in own}
        good = {episode for episode in episodes if won[episode]}
        if not 0 < len(good) < len(episodes):
            continue
        columns = sorted({id for i in own for id, sampled in zip(samples[i].ids, samples[i].sampled) if sampled})
        terms = {i: token_terms(model, samples[i], columns, temperature) for i in own}
        praised = [term for i in own if samples[i].episode in good for term in terms[i]]
        score = {i: [sum(float(e @ e2) * float(h @ h2) for h2, e2 in praised) for h, e in terms[i]] for i in own}
        means = []
        for episode in good:
            tokens = [s for i in own if samples[i].episode == episode for s in score[i]]
            means.append(sum(tokens) / len(tokens))
        eta = 2 * abs(0.5 - len(good) / len(episodes))
        for i in (i for i in own if samples[i].episode not in good):
            places = [t for t, sampled in enumerate(samples[i].sampled) if sampled]
            for t, s in zip(places, score[i], strict=True):
                if s > beta * min(means):
                    advantages[i][t] *= eta
    return advantages


@pytest.fixture
def groups():
    """Nine samples of seven episodes in three groups: one won in three, one in two, and none in two."""
    rng = random.Random(11)
    samples = [make_sample(rng, episode, n=rng.randint(6, 14)) for episode in (10, 10, 11, 11, 12, 20, 21, 30, 31)]
    for sample in samples:
        sample.ids = [1 + id % 9 for id in sample.ids]           # few tokens: they resemble each other
    won = {10: True, 11: False, 12: False, 20: False, 21: True, 30: False, 31: False}
    return samples, won, {episode: episode // 10 for episode in won}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_hidden_states_and_errors_are_those_of_whole_forwards(model, groups, temperature):
    samples, columns = groups[0], list(range(272))
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=40)
    read = update.hidden_and_error(model, samples, columns, objective)
    for sample, (hidden, error) in zip(samples, read, strict=True):
        want = token_terms(model, sample, columns, temperature)
        torch.testing.assert_close(hidden.double(), torch.stack([h for h, _ in want]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(error.double(), torch.stack([e for _, e in want]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("beta, temperature", [(1.0, 1.0), (0.3, 0.7), (0.6, 1.0)])
@pytest.mark.parametrize("max_tokens", [1, 16384])
def test_nthr_is_the_double_loop_over_tokens(model, groups, beta, temperature, max_tokens):
    samples, won, group = groups
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=max_tokens)
    got, metrics = update.nthr(model, samples, won, group, objective, beta)
    want = nthr_by_loops(model, samples, won, group, beta, temperature)
    for sample, advantage in zip(got, want, strict=True):
        assert sample.advantage == pytest.approx(advantage, rel=1e-5)
    lost = [i for i, s in enumerate(samples) if not won[s.episode] and group[s.episode] != 3]
    changed = sum(a != b for i in lost for a, b in zip(want[i], samples[i].advantage))
    assert metrics == pytest.approx({"nthr/mixed_frac": 2 / 3,
                                     "nthr/weakened_frac": changed / sum(sum(samples[i].sampled) for i in lost)})
    assert 0 < metrics["nthr/weakened_frac"] < 1


def test_nthr_returns_new_samples(model, groups):
    before = copy.deepcopy(groups[0])
    got, _ = update.nthr(model, *groups, PLAIN)
    assert groups[0] == before
    assert [replace(new, advantage=old.advantage) for new, old in zip(got, before)] == before
    assert got[-2:] == before[-2:] and got != before              # the group that never won is left alone


def test_without_a_mixed_group_nthr_runs_nothing(groups):
    samples, won, group = groups
    got, metrics = update.nthr(None, samples, dict.fromkeys(won, True), group, PLAIN)
    assert got == samples and metrics == {"nthr/mixed_frac": 0, "nthr/weakened_frac": 0}


# Episodes to samples

def make_turn(prompt, response):
    return Turn("", prompt, response, [-float(i) for i in response], "", None, False, "")


def make_episode(*turns):
    return Episode(Task("a", "train", "walk", None), 0, [make_turn(*turn) for turn in turns])


def test_turns_that_extend_each_other_become_one_sample():
    episode = make_episode(([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 2, 3, 4, 5, 6], [7, 8]))
    sample, = update.samples_of(episode, [0.5, -1.0, 2.0], index=4)
    assert sample.ids == [1, 2, 3, 4, 5, 6, 7, 8] and sample.episode == 4
    assert sample.sampled == [False, False, True, True, False, True, True, True]
    assert sample.advantage == [0, 0, 0.5, 0.5, 0, -1.0, 2.0, 2.0]
    assert sample.logprob_old == [0, 0, -3.0, -4.0, 0, -6.0, -7.0, -8.0]
    assert (sample.kind, sample.count, sample.logprob_ref) == ("policy", 1, None)


@pytest.mark.parametrize("prompt", [[1, 2, 9, 4, 5], [1, 2, 3], [1, 2, 4, 3, 5]])
def test_a_re_rendered_turn_starts_a_sample(prompt):
    """The window moved: not a token of what was sampled before is trained under another prefix."""
    episode = make_episode(([1, 2], [3, 4]), (prompt, [6]), (prompt + [6, 7], [8]))
    first, second = update.samples_of(episode, [1.0, 2.0, 3.0], 0)
    assert first.ids == [1, 2, 3, 4] and second.ids == prompt + [6, 7, 8]
    assert second.advantage == [0] * len(prompt) + [2.0, 0, 3.0]


def test_each_turn_needs_its_advantage():
    with pytest.raises(ValueError):
        update.samples_of(make_episode(([1], [2])), [1.0, 2.0], 0)


def test_minibatches_keep_episodes_whole_and_deal_out_groups():
    samples = [Sample([1], [False], [0.0], None, episode) for episode in range(12) for _ in range(3)]
    parts = update.minibatches(samples, 4)
    assert sorted(id(sample) for part in parts for sample in part) == sorted(map(id, samples))
    episodes = [{sample.episode for sample in part} for part in parts]
    assert sum(map(len, episodes)) == 12                                       # no episode in two of them
    for group in ({0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}):
        assert all(group & own for own in episodes)
