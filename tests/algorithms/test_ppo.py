"""Tests of PPO: GAE over turns, verl-agent's A = R - V at tokens, and the critic's optimizer step.

    python -m pytest tests/algorithms/test_ppo.py

The oracles (`gae_by_loops`, `plain_value_loss`, ...) process one turn or one token at a time, in plain Python
and with autograd.
"""

import copy
import math
import random
from contextlib import nullcontext
from dataclasses import replace
from statistics import pvariance

import pytest
import torch
from conftest import Corridor, Recorder, assert_same, flat, make_specs, with_value_head
from hand_made import (
    CODE,
    PLAIN,
    SUCCESS_10,
    advantages_of,
    flat_turns,
    gradient_of,
    make_episode,
    make_sample,
    method_of,
    on_two_ranks,
    random_episodes,
    sampled_positions,
    turn_reward,
    turn_row_reward,
    whitened,
    with_old_logprobs,
)

import batching
import rollout
import update
from algorithms import ppo, rewards
from infra import parallel
from lm.engine import Sampling
from lm.optim import adamw
from update import Objective

VARIANTS = ["paper", "code"]


# The equations

def test_gae_by_hand():
    """Two turns, lambda 0.5: delta = 1 + 4 - 2 and 3 - 4; then an episode of one turn."""
    advantage, returns = ppo.gae(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([2.0, 4.0, 0.5]),
                                 torch.tensor([2, 1]), lam=0.5)
    assert advantage.tolist() == [3 - 0.5, -1.0, 1.5]
    assert returns.tolist() == [4.5, 3.0, 2.0]


@pytest.mark.parametrize("lam", [0.95, 0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_gae_is_the_double_loop(seed, lam):
    """The episodes include some without turns."""
    torch.manual_seed(seed)
    turns, (reward, value) = torch.tensor([0, 3, 1, 0, 6, 4, 2]), torch.randn(2, 16, dtype=torch.double)
    got, returns = ppo.gae(reward, value, turns, lam)
    want = []
    for r, v in zip(reward.split(turns.tolist()), value.split(turns.tolist())):
        after = [*v.tolist(), 0.0]
        delta = [float(r[t]) + after[t + 1] - after[t] for t in range(len(v))]
        want += [sum(lam ** (k - t) * delta[k] for k in range(t, len(v))) for t in range(len(v))]
    assert got.tolist() == pytest.approx(want)
    assert torch.allclose(returns, got + value)
    if lam == 1.0:                           # Monte Carlo: the return minus the value
        assert torch.allclose(got, rewards.discounted_returns(reward, turns, 1.0) - value)


@pytest.mark.parametrize("value, old, target, clip, loss, gradient", [
    (1.0, 0.0, 3.0, 0.5, 0.5 * 2.5 ** 2, 0.0),        # towards the target, beyond the range: clipped
    (1.0, 0.0, 0.0, 0.5, 0.5 * 1.0, 1.0),             # away from it: the unclipped term is larger
    (0.3, 0.0, 3.0, 0.5, 0.5 * 2.7 ** 2, -2.7),       # within the range
    (1.0, 0.0, 3.0, 0.0, 0.5 * 2.0 ** 2, -2.0)])      # no clipping
def test_value_loss_by_hand(value, old, target, clip, loss, gradient):
    value = torch.tensor([value], requires_grad=True)
    got, clipped = ppo.clipped_value_loss(value, torch.tensor([old]), torch.tensor([target]), clip)
    got.sum().backward()
    assert got.item() == pytest.approx(loss) and value.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert clipped.item() == (gradient == 0.0)


def test_a_value_within_the_clip_is_never_clipped():
    """However V_old + (V - V_old) rounds: V and its old value on both sides of 0, far from the target."""
    torch.manual_seed(0)
    value, old, target = torch.rand(2000) / 5, -torch.rand(2000) / 5, torch.randn(2000)
    assert not ppo.clipped_value_loss(value, old, target, 0.5)[1].any()
    assert ppo.clipped_value_loss(value + 1, old, target + 5, 0.5)[1].all()


def test_explained_variance_by_hand():
    target = torch.tensor([0.0, 2.0, 4.0])
    assert ppo.explained_variance(target, target) == 1.0
    assert ppo.explained_variance(torch.full((3,), 7.0), target) == pytest.approx(0.0, abs=1e-6)
    assert ppo.explained_variance(torch.tensor([0.0, 1.0, 2.0]), target) == pytest.approx(0.75)
    assert math.isnan(ppo.explained_variance(target, torch.full((3,), 0.7)))
    assert math.isnan(ppo.explained_variance(torch.zeros(0), torch.zeros(0)))


# Full episodes, with a stub of the critic

class StubCritic:
    """A stub of the critic: random values of response tokens, by token id; it records its updates."""

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
def stub(monkeypatch):
    stub = StubCritic()
    monkeypatch.setattr(ppo, "values", stub.values)
    monkeypatch.setattr(ppo, "update_critic", stub.update_critic)
    monkeypatch.setattr(parallel, "onloaded", lambda *given: nullcontext())
    return stub


def ppo_of(minibatches=1, **settings):
    """PPO with names in place of policy, objective and critic, for `stub`."""
    method = method_of("ppo", **{"gae_lambda": 0.8, **settings})
    method.model, method.objective, method.minibatches = "a policy", "an objective", minibatches
    method.critic = "a critic", "its optimizer"
    return method


def gae_by_loops(episode, values, settings):
    """(A, return) per turn with gamma 1. values: V before each turn; after the last it is 0."""
    turns, lam, found = len(episode.turns), settings.gae_lambda, []
    values = [*values, 0.0]
    for t in range(turns):
        advantage = sum(lam ** (k - t) * (turn_reward(episode, k, settings) + values[k + 1] - values[k])
                        for k in range(t, turns))
        found.append((advantage, advantage + values[t]))
    return found


def by_token(samples, numbers):
    """{token id: number} of the sampled tokens. numbers(sample): one for each of them."""
    found = {}
    for sample in samples:
        ids = [i for i, sampled in zip(sample.ids, sample.sampled) if sampled]
        for i, number in zip(ids, numbers(sample), strict=True):
            assert i not in found, f"token {i} twice"
            found[i] = number
    return found


def written(episodes):
    """{token id: advantage}, as the update reads them."""
    samples = [sample for e in episodes for sample in batching.samples_of(e)]
    assert not any(a for s in samples for a, sampled in zip(s.advantage, s.sampled) if not sampled)
    return by_token(samples, lambda s: [a for a, sampled in zip(s.advantage, s.sampled) if sampled])


@pytest.mark.parametrize("changes", [{}, {"gae_lambda": 0.0}, {"gae_lambda": 1.0, **SUCCESS_10}])
@pytest.mark.parametrize("history", [0, 2])
def test_ppo_over_turns_is_its_equations_written_out(stub, changes, history):
    method, episodes = ppo_of(**changes), random_episodes(10, history=history, pays=True)
    got, metrics = advantages_of(method, episodes)
    value, turns = stub.known, [e.turns[t] for e, t in flat_turns(episodes)]
    advantages, returns = zip(*[pair for e in episodes for pair in gae_by_loops(
        e, [value[turn.response_ids[0]] for turn in e.turns], method.settings)])
    assert got == pytest.approx(whitened(advantages), abs=1e-4)
    want = {i: a for turn, a in zip(turns, whitened(advantages)) for i in turn.response_ids}
    assert written(episodes) == pytest.approx(want, abs=1e-4)
    targets = {turn.response_ids[0]: r for turn, r in zip(turns, returns)}
    learned = {i: r for i, r in by_token(stub.samples, lambda s: s.target).items() if not math.isnan(r)}
    assert learned == pytest.approx(targets, abs=1e-4)                 # each turn's first token only
    assert by_token(stub.samples, lambda s: s.value) == value
    errors = [r - value[i] for i, r in targets.items()]
    fit = 1 - pvariance(errors) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4), "critic/loss": 1.0}


@pytest.mark.parametrize("changes", [{"variant": "code"}, CODE])
@pytest.mark.parametrize("history", [0, 2])
def test_verl_agents_ppo_compares_each_token_with_the_return(stub, changes, history):
    method, episodes = ppo_of(**changes), random_episodes(11, history=history, pays=True)
    got, metrics = advantages_of(method, episodes)
    value, targets = stub.known, {i: turn_row_reward(e, t, method.settings)
                                   for e, t in flat_turns(episodes) for i in e.turns[t].response_ids}
    want = dict(zip(targets, whitened([target - value[i] for i, target in targets.items()])))
    assert written(episodes) == pytest.approx(want, abs=1e-4)
    learned = by_token(stub.samples, lambda s: s.target)
    assert learned == pytest.approx(targets, abs=1e-5)                 # every sampled token
    firsts = [want[e.turns[t].response_ids[0]] for e, t in flat_turns(episodes)]
    assert got == pytest.approx(firsts, abs=1e-4)
    fit = 1 - pvariance([target - value[i] for i, target in targets.items()]) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4), "critic/loss": 1.0}


@pytest.mark.parametrize("variant", VARIANTS)
def test_critic_steps_have_full_episodes_and_the_decayed_learning_rate(stub, variant):
    """There are as many as policy steps; every sample is in one of them; the losses are averaged."""
    method = ppo_of(minibatches=3, variant=variant, critic_lr=0.5, value_clip=0.25)
    episodes = random_episodes(15, history=1, first=640)
    rewards.write_rewards(episodes, method.settings)
    method.lr_factor = 0.1
    metrics = method.assign(episodes)
    assert [(clip, pytest.approx(rate)) for _, clip, rate in stub.parts] == [(0.25, 0.05)] * 3
    assert len(stub.samples) > len(episodes) and metrics["critic/loss"] == 2.0
    numbers = [{sample.episode for sample in samples} for samples, _, _ in stub.parts]
    assert sorted(number for part in numbers for number in part) == list(range(640, 660))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_rewards_and_values_of_0_give_no_advantage(stub, monkeypatch, variant):
    """A new critic's values are 0, no episode is won, no turn invalid: exactly 0, no variance to explain."""
    monkeypatch.setattr(ppo, "values", lambda critic, samples, _: [[0.0] * sum(s.sampled) for s in samples])
    episodes = [make_episode([("a", "hall", None, 2)] * n, group, first_id=100 * n)
                for group, n in enumerate((1, 3, 2))]
    got, metrics = advantages_of(ppo_of(variant=variant), episodes)
    assert got == [0.0] * 6 and not any(written(episodes).values())
    assert math.isnan(metrics["critic/explained_variance"])


@pytest.mark.parametrize("first, second", [VARIANTS, VARIANTS[::-1]])
def test_a_second_assignment_replaces_the_first(stub, first, second):
    episodes = random_episodes(12)
    advantages_of(ppo_of(variant=second), episodes)
    want = written(episodes)
    for variant in (first, second):
        advantages_of(ppo_of(variant=variant), episodes)
    assert written(episodes) == want


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cut", [15, 20])
def test_two_ranks_give_the_credit_of_one(stub, monkeypatch, variant, cut):
    """The second rank has one of the four groups, or none; advantages are whitened over both ranks, and both
    take every step of the critic, which is a collective."""
    method, episodes, steps = ppo_of(minibatches=2, variant=variant), random_episodes(16), []
    advantages_of(method, episodes)
    want = written(episodes)
    monkeypatch.setattr(parallel, "any_rank", lambda flag: True)

    def call(part):
        stub.parts.clear()
        advantages_of(method, part)
        steps.append(len(stub.parts))
        return written(part)

    first, second = on_two_ranks(monkeypatch, call, (episodes[:cut], episodes[cut:]))
    assert first | second == pytest.approx(want, abs=1e-4) and {*steps} == {2}


# The critic

@pytest.fixture
def critic(model):
    return with_value_head(model, bias=0.2)


@pytest.fixture
def value_samples(model, critic):
    """Nine ValueSamples: old values within 0.4 of the critic's, targets at the first token of each sampled
    span; the last sample has no target."""
    rng = random.Random(7)
    samples = [make_sample(rng, episode=i % 5, make=ppo.ValueSample) for i in range(9)]
    samples = with_old_logprobs(model, samples, rng)
    for sample, values in zip(samples, ppo.values(critic, samples, PLAIN)):
        sample.value = [v + rng.uniform(-0.4, 0.4) for v in values]
        sample.target = [math.nan if sample.sampled[t - 1] else rng.uniform(-1, 1)
                         for t in sampled_positions(sample)]
    samples[-1].target = [math.nan] * len(samples[-1].target)
    return samples


def plain_value_loss(critic, samples, clip):
    """The value loss, one target at a time; also the share of clipped targets, and the mean value."""
    losses, clipped, seen = [], 0, []
    for sample in samples:
        value = critic(torch.tensor([sample.ids]), head="value")[0]
        for t, target, old in zip(sampled_positions(sample), sample.target, sample.value, strict=True):
            if not math.isnan(target):
                v = value[t - 1]
                bound = old + torch.clamp(v - old, -clip, clip) if clip else v
                losses.append(0.5 * torch.maximum((v - target) ** 2, (bound - target) ** 2))
                clipped += bool((bound - target) ** 2 > (v - target) ** 2)
                seen.append(v.item())
    return sum(losses) / len(losses), clipped / len(losses), sum(seen) / len(seen)


def critic_gradient(critic, samples, objective=PLAIN, clip=0.5):
    """The gradient of update_critic's step, and its metrics."""
    recorder = Recorder(critic)
    metrics = ppo.update_critic(critic, recorder, samples, objective, clip, lr=0.5)
    assert recorder.param_groups == [{"lr": 0.5}]
    return recorder.gradient, metrics


@pytest.mark.parametrize("clip", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("max_tokens", [1, 100, 16384])
def test_the_critics_gradient_is_that_of_the_value_loss_written_out(critic, value_samples, clip, max_tokens):
    loss, clip_frac, mean = plain_value_loss(critic, value_samples, clip)
    got, metrics = critic_gradient(critic, value_samples, replace(PLAIN, microbatch_tokens=max_tokens), clip)
    want = gradient_of(critic, loss)
    assert_same(got, want)
    expected = {"critic/loss": loss.item(), "critic/clip_frac": clip_frac, "critic/value_mean": mean,
                "critic/grad_norm": want.norm().item()}
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert (clip == 0.1) == (clip_frac > 0.1)


def test_targets_at_every_sampled_token_are_learned(critic, value_samples):
    """verl-agent's variant: ten steps of AdamW reduce the loss; lm_head is not changed."""
    for sample, values in zip(value_samples, ppo.values(critic, value_samples, PLAIN)):
        sample.value, sample.target = values, [0.7] * len(values)
    head, optimizer = critic.lm_head.weight.detach().clone(), adamw(critic)
    losses = [ppo.update_critic(critic, optimizer, value_samples, PLAIN, 0.0, 1e-2)["critic/loss"]
              for _ in range(10)]
    assert losses[-1] < 0.2 * losses[0]
    assert torch.equal(critic.lm_head.weight, head)


def test_the_critics_gradient_is_clipped_to_its_norm(critic, value_samples):
    free, metrics = critic_gradient(critic, value_samples)
    limit = metrics["critic/grad_norm"] / 4
    got, same = critic_gradient(critic, value_samples, replace(PLAIN, max_grad_norm=limit))
    assert_same(4 * got, free)
    assert same == metrics


def test_the_critics_inputs_are_not_changed(critic, value_samples):
    before = repr(value_samples)                        # nan is not equal to itself
    critic_gradient(critic, value_samples)
    assert repr(value_samples) == before


def test_a_return_that_is_not_finite_raises_before_the_step(critic, value_samples):
    value_samples[2].target[0] = math.inf
    before = flat(critic.parameters())
    with pytest.raises(update.NonFinite, match="critic loss inf"):
        ppo.update_critic(critic, torch.optim.AdamW(critic.parameters()), value_samples, PLAIN, 0.5, lr=1.0)
    assert torch.equal(flat(critic.parameters()), before)


def test_a_wrong_number_of_targets_is_refused(critic, value_samples):
    value_samples[0].target.append(1.0)
    with pytest.raises(ValueError):
        critic_gradient(critic, value_samples)


# With a model

def test_a_new_critic_is_a_copy_of_the_policy_with_values_of_0(model):
    """Also if the policy has a judge's value head; the policy is not changed."""
    for policy in (model, with_value_head(copy.deepcopy(model), bias=0.7)):
        before = flat(policy.parameters())
        method = method_of("ppo")
        method.begin(policy, PLAIN, 2, lambda model: parallel.with_memory(model, "cpu"))
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
    """V before each token of a response, by a forward over the turn's prompt and response."""
    ids_BT = torch.tensor([turn.prompt_ids + turn.response_ids])
    return critic(ids_BT, head="value")[0, len(turn.prompt_ids) - 1:-1].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("history", [0, 2])
def test_a_real_critic_values_the_text_before_each_response(model, chat, variant, history, monkeypatch):
    """Played episodes: values and advantages against a separate forward per turn; the critic's step runs."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_specs(3, 2),
                            Sampling(max_response_tokens=4), 4, 400, history)
    method, critic, steps = method_of("ppo", variant=variant, gae_lambda=0.8), with_value_head(model), []
    method.model, method.objective, method.minibatches = model, Objective(microbatch_tokens=200), 1
    method.critic, taken = (critic, Recorder(critic)), ppo.update_critic
    monkeypatch.setattr(ppo, "update_critic", lambda *given: steps.append(given[2]) or taken(*given))
    _, metrics = advantages_of(method, episodes)
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
    assert got == pytest.approx(whitened(unit), abs=1e-3)
    assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/clip_frac"] == 0
