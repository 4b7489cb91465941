"""Proves that PPO credits turns by GAE (or, as verl-agent's code does, tokens by A = R - V), and its critic's
step.

    python -m pytest tests/test_ppo.py

The oracles (`gae_by_loops`, `plain_value_loss`, ...) take one turn or one token at a time: plain Python,
autograd.
"""

import copy
import itertools
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean, pstdev, pvariance

import pytest
import torch
from conftest import Corridor, Recorder, assert_same, flat, make_seats, rounding, with_value_head
from hand_made import (
    CODE,
    PLAIN,
    TENFOLD,
    column,
    credited,
    each_with_the_sum,
    flat_turns,
    gradient_of,
    make_episode,
    make_sample,
    method_of,
    near,
    ragged,
    random_episodes,
    shape_of,
    turn_reward,
    turn_row_reward,
    white,
)

import rollout
import update
from algorithms import ppo, rewards
from lm.engine import Sampling
from run import parallel
from update import Objective

pytestmark = pytest.mark.fast
VARIANTS = ["paper", "code"]


# The equations

def test_gae_by_hand():
    """Two turns, gamma 0.5, lambda 0.5: delta = 1 + 0.5 * 4 - 2 and 3 - 4; then an episode of one turn."""
    advantage, returns = ppo.gae(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2.0, 4.0, 0.5]),
                                 torch.tensor([2, 1]), gamma=0.5, lam=0.5)
    assert advantage.tolist() == [1 - 0.25, -1.0, 1.5]
    assert returns.tolist() == [2.75, 3.0, 2.0]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.0), (0.95, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_double_loop(seed, gamma, lam):
    """Episodes without turns are among them."""
    episodes = ragged(seed)
    won, _, turns = shape_of(episodes)
    valid, value = column(episodes, "valid", torch.bool), column(episodes, "value")
    reward = rewards.turn_rewards(won, valid, turns, rewards.Settings(**TENFOLD)).double()
    got, returns = ppo.gae(reward, value, turns, gamma, lam)
    want = []
    for r, v in zip(reward.split(turns.tolist()), value.split(turns.tolist())):
        after = [*v.tolist(), 0.0]
        delta = [float(r[t]) + gamma * after[t + 1] - after[t] for t in range(len(v))]
        want += [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(v))) for t in range(len(v))]
    assert got.tolist() == pytest.approx(want)
    assert torch.allclose(returns, got + value)
    if gamma == lam == 1.0:                           # Monte Carlo: what was still earned, minus the value
        assert torch.allclose(got, rewards.discounted_returns(reward, turns, 1.0) - value)


def test_gae_of_nothing_is_nothing_and_inputs_stay():
    none = torch.zeros(0)
    assert [len(x) for x in ppo.gae(none, none, none.long())] == [0, 0]
    episodes = ragged(5)
    value, turns = column(episodes, "value"), shape_of(episodes)[2]
    before = value.clone(), turns.clone()
    ppo.gae(value, value, turns)
    assert torch.equal(value, before[0]) and torch.equal(turns, before[1])


@pytest.mark.parametrize("value, old, target, clip, loss, gradient", [
    (1.0, 0.0, 3.0, 0.5, 0.5 * 2.5 ** 2, 0.0),        # towards the target, further than allowed: clipped
    (1.0, 0.0, 0.0, 0.5, 0.5 * 1.0, 1.0),             # away from it: the free term is the worse
    (0.3, 0.0, 3.0, 0.5, 0.5 * 2.7 ** 2, -2.7),       # within the range
    (1.0, 0.0, 3.0, 0.0, 0.5 * 2.0 ** 2, -2.0)])      # no clipping
def test_value_loss_by_hand(value, old, target, clip, loss, gradient):
    value = torch.tensor([value], requires_grad=True)
    got, clipped = ppo.clipped_value_loss(value, torch.tensor([old]), torch.tensor([target]), clip)
    got.sum().backward()
    assert got.item() == pytest.approx(loss) and value.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_explained_variance_by_hand():
    target = torch.tensor([0.0, 2.0, 4.0])
    assert ppo.explained_variance(target, target) == 1.0
    assert ppo.explained_variance(torch.full((3,), 7.0), target) == pytest.approx(0.0, abs=1e-6)
    assert ppo.explained_variance(torch.tensor([0.0, 1.0, 2.0]), target) == pytest.approx(0.75)
    assert math.isnan(ppo.explained_variance(target, torch.full((3,), 0.7)))
    assert math.isnan(ppo.explained_variance(torch.zeros(0), torch.zeros(0)))


# Whole episodes, with a critic that knows a value for each token

class Stand:
    """Stands where the critic is: it says a random value for each response token, by its id, and keeps what
    it
    should have learned."""

    def __init__(self):
        self.rng, self.known, self.parts = random.Random(9), {}, []

    def values(self, critic, samples, objective):
        assert critic == "a critic" and objective == "an objective"
        return [[self.known.setdefault(i, self.rng.uniform(-1, 1))
                 for turn in sample.turns for i in turn.response_ids] for sample in samples]

    def update_critic(self, critic, optimizer, samples, objective, value_clip, lr):
        assert (critic, optimizer, objective) == ("a critic", "its optimizer", "an objective")
        self.parts.append((samples, value_clip, lr))
        return {"critic/loss": float(len(self.parts))}

    @property
    def samples(self):
        return [sample for samples, _, _ in self.parts for sample in samples]


@pytest.fixture
def stand(monkeypatch):
    stand = Stand()
    monkeypatch.setattr(ppo, "values", stand.values)
    monkeypatch.setattr(ppo, "update_critic", stand.update_critic)
    monkeypatch.setattr(parallel, "beside", lambda *given: nullcontext())
    return stand


def ppo_of(minibatches=1, **settings):
    """PPO with the stand-in for its critic."""
    method = method_of("ppo", **{"gae_lambda": 0.8, **settings})
    method.model, method.objective, method.minibatches = "a policy", "an objective", minibatches
    method.critic = "a critic", "its optimizer"
    return method


def gae_by_loops(episode, values, settings):
    """(A, return) per turn, gamma 1; values: one per turn, and after the last one 0."""
    turns, lam, found = len(episode.turns), settings.gae_lambda, []
    values = [*values, 0.0]
    for t in range(turns):
        advantage = sum(lam ** (k - t) * (turn_reward(episode, k, settings) + values[k + 1] - values[k])
                        for k in range(t, turns))
        found.append((advantage, advantage + values[t]))
    return found


def by_token(samples, numbers):
    """{token id: number} of the sampled tokens, of what `numbers` gives: one for each of them."""
    found = {}
    for sample in samples:
        ids = [i for i, sampled in zip(sample.ids, sample.sampled) if sampled]
        for i, number in zip(ids, numbers(sample), strict=True):
            assert i not in found, f"token {i} twice"
            found[i] = number
    return found


def written(episodes):
    """{token id: advantage}, as the update will read it."""
    samples = [sample for e in episodes for sample in update.samples_of(e)]
    assert not any(a for s in samples for a, sampled in zip(s.advantage, s.sampled) if not sampled)
    return by_token(samples, lambda s: [a for a, sampled in zip(s.advantage, s.sampled) if sampled])


@pytest.mark.parametrize("changes", [{}, {"gae_lambda": 0.0}, {"gae_lambda": 1.0, **TENFOLD}])
@pytest.mark.parametrize("history", [0, 2])
def test_ppo_over_turns_is_its_equations_written_out(stand, changes, history):
    method, episodes = ppo_of(**changes), random_episodes(10, history=history)
    got, metrics = credited(method, episodes)
    value, turns = stand.known, [e.turns[t] for e, t in flat_turns(episodes)]
    advantages, returns = zip(*[pair for e in episodes for pair in gae_by_loops(
        e, [value[turn.response_ids[0]] for turn in e.turns], method.settings)])
    assert got == pytest.approx(white(advantages), abs=1e-4)
    want = {i: a for turn, a in zip(turns, white(advantages)) for i in turn.response_ids}
    assert written(episodes) == pytest.approx(want, abs=1e-4)
    targets = {turn.response_ids[0]: r for turn, r in zip(turns, returns)}
    learned = {i: r for i, r in by_token(stand.samples, lambda s: s.target).items() if not math.isnan(r)}
    assert learned == pytest.approx(targets, abs=1e-4)                 # a turn's first token, and no other
    assert by_token(stand.samples, lambda s: s.value) == value
    errors = [r - value[i] for i, r in targets.items()]
    fit = 1 - pvariance(errors) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4), "critic/loss": 1.0}


@pytest.mark.parametrize("changes", [{"variant": "code"}, CODE])
@pytest.mark.parametrize("history", [0, 2])
def test_verl_agents_ppo_takes_each_token_against_the_return(stand, changes, history):
    method, episodes = ppo_of(**changes), random_episodes(11, history=history)
    got, metrics = credited(method, episodes)
    value, targets = stand.known, {i: turn_row_reward(e, t, method.settings)
                                   for e, t in flat_turns(episodes) for i in e.turns[t].response_ids}
    want = dict(zip(targets, white([target - value[i] for i, target in targets.items()])))
    assert written(episodes) == pytest.approx(want, abs=1e-4)
    learned = by_token(stand.samples, lambda s: s.target)
    assert learned == pytest.approx(targets, abs=1e-5)                 # every sampled token
    firsts = [want[e.turns[t].response_ids[0]] for e, t in flat_turns(episodes)]
    assert got == pytest.approx(firsts, abs=1e-4)
    fit = 1 - pvariance([target - value[i] for i, target in targets.items()]) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4), "critic/loss": 1.0}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("history", [0, 1])
def test_a_target_is_where_the_variant_has_one(stand, variant, history):
    """At each turn's first token, or at every sampled one."""
    credited(ppo_of(variant=variant), random_episodes(12, history=history))
    for sample in stand.samples:
        firsts = set(itertools.accumulate((len(turn.response_ids) for turn in sample.turns), initial=0))
        assert [not math.isnan(r) for r in sample.target] == [
            variant == "code" or place in firsts for place in range(sum(sample.sampled))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_sample_per_turn_is_one_sample_per_episode(stand, variant):
    method, found = ppo_of(variant=variant), []
    for history in (0, 1):
        stand.parts.clear()
        episodes = random_episodes(13, history=history)
        got, metrics = credited(method, episodes)
        found.append((got, metrics["critic/explained_variance"], written(episodes),
                      by_token(stand.samples, lambda s: s.value), by_token(stand.samples, lambda s: s.target),
                      len(stand.samples)))
    append_only, one_back = found
    assert append_only[-1] < one_back[-1] and append_only[0] == one_back[0]
    for a, b in zip(append_only[1:-1], one_back[1:-1]):
        assert a == pytest.approx(b, nan_ok=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("history", [0, 2])
def test_the_advantages_are_white(stand, variant, history):
    """Over turns where a turn is the unit, over tokens where that is."""
    episodes = random_episodes(14, history=history)
    turns, _ = credited(ppo_of(variant=variant), episodes)
    tokens = list(written(episodes).values())
    unit, other = (turns, tokens) if variant == "paper" else (tokens, turns)
    assert fmean(unit) == pytest.approx(0, abs=1e-4) and pstdev(unit) == pytest.approx(1, abs=1e-4)
    assert abs(pstdev(other) - 1) > 1e-3                               # else the two could not be told apart


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_iterations_critic_steps_hold_whole_episodes_at_the_decayed_rate(stand, variant):
    """Every sample is in one of them; their number is that of the policy's steps, and their losses are
    averaged."""
    method = ppo_of(minibatches=3, variant=variant, critic_lr=0.5, value_clip=0.25)
    episodes = random_episodes(15, history=1, first=640)
    rewards.write_rewards(episodes, method.settings)
    metrics = method.assign(episodes, decay=0.1)
    assert [(clip, pytest.approx(rate)) for _, clip, rate in stand.parts] == [(0.25, 0.05)] * 3
    assert len(stand.samples) > len(episodes) and metrics["critic/loss"] == 2.0
    numbers = [{sample.episode for sample in samples} for samples, _, _ in stand.parts]
    assert sorted(number for part in numbers for number in part) == list(range(640, 660))


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_any_news_there_is_no_advantage(stand, monkeypatch, variant):
    """A fresh critic says 0 and no episode is won or refused: exactly 0, and no variance to explain."""
    monkeypatch.setattr(ppo, "values", lambda critic, samples, _: [[0.0] * sum(s.sampled) for s in samples])
    episodes = [make_episode([("a", "hall", None, 2)] * n, group, first_id=100 * n)
                for group, n in enumerate((1, 3, 2))]
    got, metrics = credited(ppo_of(variant=variant), episodes)
    assert got == [0.0] * 6 and not any(written(episodes).values())
    assert math.isnan(metrics["critic/explained_variance"])


@pytest.mark.parametrize("first, second", [VARIANTS, VARIANTS[::-1]])
def test_a_second_assignment_forgets_the_first(stand, first, second):
    episodes = random_episodes(12)
    credited(ppo_of(variant=second), episodes)
    want = written(episodes)
    for variant in (first, second):
        credited(ppo_of(variant=variant), episodes)
    assert written(episodes) == want


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cut", [15, 20])
def test_two_ranks_give_the_credit_of_one(stand, monkeypatch, variant, cut):
    """A rank with three groups and one with one, or with none: advantages are whitened over both."""
    method, episodes = ppo_of(variant=variant), random_episodes(16)
    credited(method, episodes)
    want = written(episodes)
    monkeypatch.setattr(parallel, "any_rank", lambda flag: True)

    def call(part):
        credited(method, part)
        return written(part)

    first, second = each_with_the_sum(monkeypatch, call, (episodes[:cut], episodes[cut:]))
    assert first | second == pytest.approx(want, abs=1e-4)


# The critic

@pytest.fixture
def headed(model):
    return with_value_head(model, bias=0.2)


@pytest.fixture
def valued(model, headed):
    """Nine samples; targets at the first token of each sampled span (the last sample has none), old values up
    to
    0.4 off the critic's."""
    rng = random.Random(7)
    samples = near(model, [make_sample(rng, episode=i % 5, make=ppo.Valued) for i in range(9)], rng)
    for sample, values in zip(samples, ppo.values(headed, samples, PLAIN)):
        sample.value = [v + rng.uniform(-0.4, 0.4) for v in values]
        sample.target = [math.nan if sample.sampled[t - 1] else rng.uniform(-1, 1) for t in places(sample)]
    samples[-1].target = [math.nan] * len(samples[-1].target)
    return samples


def places(sample):
    """The places of the sampled tokens."""
    return [t for t, sampled in enumerate(sample.sampled) if sampled]


def plain_value_loss(critic, samples, clip):
    """One target at a time; also the share of targets whose value moved too far to learn, and the mean
    value."""
    losses, clipped, seen = [], 0, []
    for sample in samples:
        value = critic(torch.tensor([sample.ids]), head="value")[0]
        for t, target, old in zip(places(sample), sample.target, sample.value, strict=True):
            if not math.isnan(target):
                v = value[t - 1]
                bound = old + torch.clamp(v - old, -clip, clip) if clip else v
                losses.append(0.5 * torch.maximum((v - target) ** 2, (bound - target) ** 2))
                clipped += bool((bound - target) ** 2 > (v - target) ** 2)
                seen.append(v.item())
    return sum(losses) / len(losses), clipped / len(losses), sum(seen) / len(seen)


def critic_gradient(critic, samples, objective=PLAIN, clip=0.5):
    """The gradient that update_critic() steps on, and its metrics."""
    recorder = Recorder(critic)
    metrics = ppo.update_critic(critic, recorder, samples, objective, clip, lr=0.5)
    assert recorder.param_groups == [{"lr": 0.5}]
    return recorder.gradient, metrics


def test_values_are_read_where_the_sampled_token_is_predicted(headed, valued):
    found = ppo.values(headed, valued, replace(PLAIN, microbatch_tokens=100))
    for sample, values in zip(valued, found, strict=True):
        with torch.no_grad():
            value = headed(torch.tensor([sample.ids]), head="value")[0].tolist()
        want = [value[t - 1] for t in places(sample)]
        assert values == pytest.approx(want, abs=rounding(want))


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("max_tokens", [1, 100, 16384])
def test_the_critics_gradient_is_that_of_the_value_loss_written_out(headed, valued, clip, max_tokens):
    loss, clip_frac, mean = plain_value_loss(headed, valued, clip)
    got, metrics = critic_gradient(headed, valued, replace(PLAIN, microbatch_tokens=max_tokens), clip)
    want = gradient_of(headed, loss)
    assert_same(got, want)
    expected = {"critic/loss": loss.item(), "critic/clip_frac": clip_frac, "critic/value_mean": mean,
                "critic/grad_norm": want.norm().item()}
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert (clip == 0.1) == (clip_frac > 0.1)


def test_a_target_at_every_sampled_token_is_learned(headed, valued):
    """verl-agent's form; ten steps of AdamW bring the values to the returns; lm_head stays."""
    for sample, values in zip(valued, ppo.values(headed, valued, PLAIN)):
        sample.value, sample.target = values, [0.7] * len(values)
    head, optimizer = headed.lm_head.weight.detach().clone(), update.adam(headed)
    losses = [ppo.update_critic(headed, optimizer, valued, PLAIN, 0.0, 1e-2)["critic/loss"]
              for _ in range(10)]
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(headed.lm_head.weight, head)


def test_the_critics_gradient_is_clipped_to_its_norm(headed, valued):
    free, metrics = critic_gradient(headed, valued)
    limit = metrics["critic/grad_norm"] / 4
    got, same = critic_gradient(headed, valued, replace(PLAIN, max_grad_norm=limit))
    assert_same(4 * got, free)
    assert same == metrics


def test_the_critics_inputs_are_not_changed(headed, valued):
    before = repr(valued)                        # nan is not equal to itself
    critic_gradient(headed, valued)
    assert repr(valued) == before


def test_a_return_that_is_not_finite_stops_the_critic(headed, valued):
    valued[2].target[0] = math.inf
    before = flat(headed.parameters())
    with pytest.raises(update.NonFinite, match="critic loss inf"):
        ppo.update_critic(headed, torch.optim.AdamW(headed.parameters()), valued, PLAIN, 0.5, lr=1.0)
    assert torch.equal(flat(headed.parameters()), before)


def test_as_many_targets_as_sampled_tokens_or_it_is_refused(headed, valued):
    valued[0].target.append(1.0)
    with pytest.raises(ValueError):
        critic_gradient(headed, valued)


def test_the_explained_variance_is_over_targets_only(valued):
    pairs = [(r, v) for s in valued for r, v in zip(s.target, s.value) if not math.isnan(r)]
    mean = sum(r for r, _ in pairs) / len(pairs)
    mean_error = sum(r - v for r, v in pairs) / len(pairs)
    unexplained = sum((r - v - mean_error) ** 2 for r, v in pairs) / sum((r - mean) ** 2 for r, _ in pairs)
    assert ppo.value_fit(valued) == pytest.approx({"critic/explained_variance": 1 - unexplained})


# With a model

def test_a_new_critic_is_the_policy_and_says_0(model):
    """Whether or not the policy has a judge's head of its own; the policy stays as it is."""
    for policy in (model, with_value_head(copy.deepcopy(model), bias=0.7)):
        before = flat(policy.parameters())
        method = method_of("ppo")
        method.begin(policy, PLAIN, 2, lambda model: model)
        critic, optimizer = method.critic
        ids_BT = torch.arange(1, 20)[None]
        with torch.no_grad():
            assert torch.equal(critic(ids_BT, head="hidden"), policy(ids_BT, head="hidden"))
            assert not critic(ids_BT, head="value").any()
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(critic.parameters()))
        assert torch.equal(flat(policy.parameters()), before)
        assert not {p.data_ptr() for p in critic.parameters()} & {p.data_ptr() for p in policy.parameters()}


@torch.no_grad()
def plain_values(critic, turn):
    """V before each token of a response, by one forward over the turn's own prompt and response."""
    ids_BT = torch.tensor([turn.prompt_ids + turn.response_ids])
    return critic(ids_BT, head="value")[0, len(turn.prompt_ids) - 1:-1].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("history", [0, 2])
def test_a_real_critic_values_the_text_before_each_response(model, chat, variant, history, monkeypatch):
    """Played episodes, and V of each turn's own prompt by a forward of its own; its step can be taken."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_seats(3, 2),
                            Sampling(max_response_tokens=4), 4, 400, history)
    method, critic, steps = method_of("ppo", variant=variant, gae_lambda=0.8), with_value_head(model), []
    method.model, method.objective, method.minibatches = model, Objective(microbatch_tokens=200), 1
    method.critic, taken = (critic, Recorder(critic)), ppo.update_critic
    monkeypatch.setattr(ppo, "update_critic", lambda *given: steps.append(given[2]) or taken(*given))
    _, metrics = credited(method, episodes)
    token_values, unit = [], []
    for e in episodes:
        values = [plain_values(critic, turn) for turn in e.turns]
        token_values += sum(values, [])
        if variant == "paper":
            unit += [a for a, _ in gae_by_loops(e, [of_turn[0] for of_turn in values], method.settings)]
        else:
            unit += [turn_row_reward(e, t, method.settings) - v
                     for t, of_turn in enumerate(values) for v in of_turn]
    old = [v for sample in steps[0] for v in sample.value]
    assert old == pytest.approx(token_values, abs=1e-4) and max(old) - min(old) > 0.1
    got = [turn.advantage for e in episodes for turn in e.turns]
    if variant == "code":
        got = [a for e in episodes for turn in e.turns for a in turn.token_advantage]
    assert got == pytest.approx(white(unit), abs=1e-3)
    assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/clip_frac"] == 0
