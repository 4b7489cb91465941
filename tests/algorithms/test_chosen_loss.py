"""Proves that an algorithm's loss and its ratio reach the gradient: GSPO, CISPO, DAPO, Dr. GRPO, a user's.

    python -m pytest tests/algorithms/test_chosen_loss.py            # half a minute
    python -m pytest tests/algorithms/test_chosen_loss.py -m fast

The oracles take one sample at a time, one token after another, with the equations as the papers write them,
and autograd.
"""

import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import Recorder, assert_same, flat
from hand_made import advantages_of, make_sample, method_of, random_episodes, with_old_logprobs
from tiny_runs import ROOT, cold_started, rows, same, start_from, train, weights, without_times

import algorithms
import batching
import config
import session
import update
from algorithms import cispo, gigpo, gspo, rlvmr
from infra.plugins import PluginError
from infra.signals import Stop

COMBINED = ROOT / "examples" / "gigpo_cispo.py"
WIDE = ["--clip-low", 0.06, "--clip-high", 0.09]          # GSPO's own would cut every sequence of these tests


def method_and_objective(*flags):
    """The algorithm of a command line, begun, and the objective of its run, without the clip of gradients."""
    settings = config.parse([str(flag) for flag in (*flags, "--max-grad-norm", 0)])
    objective, method = session.objective_of(settings), settings.algorithm
    method.begin(None, objective, 1, None)
    return method, objective


def gradient(model, samples, objective):
    """(the gradient that the optimizer gets, the metrics)."""
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, objective, lr=0.0)
    return recorder.gradient, metrics


@pytest.fixture
def samples(model):
    """Nine policy samples, an episode each, and six judge answers; every token's old logprob is off."""
    rng = random.Random(0)
    made = [make_sample(rng, episode=i) for i in range(9)]
    made += [make_sample(rng, episode=i, kind="judge", n=12) for i in range(6)]
    return with_old_logprobs(model, made, rng)


def runs_of(sample):
    """The positions of each turn of a sample: unbroken runs of sampled tokens."""
    runs, before = [], False
    for t, sampled in enumerate(sample.sampled):
        if sampled:
            runs = [*runs, []] if not before else runs
            runs[-1].append(t)
        before = sampled
    return runs


def sequences_of(sample, unit):
    """The positions of each sequence of a sample."""
    runs = runs_of(sample)
    return runs if unit == "turn" else [sum(runs, [])]


def scored(model, sample):
    """{position: log pi, with a gradient} of the sampled tokens."""
    logprob = model(torch.tensor([sample.ids]))[0].log_softmax(-1)
    return {t: logprob[t - 1, sample.ids[t]] for t, sampled in enumerate(sample.sampled) if sampled}


def total(model, samples, loss_of, weight=0.1):
    """The policy's and the judge's loss, each from loss_of(samples of a kind), added as GCD adds them."""
    policy, judge = ([s for s in samples if s.kind == kind] for kind in ("policy", "judge"))
    loss = loss_of(policy) + weight * loss_of(judge)
    return flat(torch.autograd.grad(loss, list(model.parameters())))


def surrogate(ratio, advantage, low, high):
    """PPO's clipped surrogate of one number."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


# GSPO

def gspo_loss(model, samples, unit, low, high):
    """Eq. 5 to 7 with the full gradient of each sequence's ratio. The policy's sequences have the weight of
    their share of the episode's tokens, in a mean over episodes; the judge's, in a mean over tokens.
    """
    loss, tokens = 0.0, sum(sum(sample.sampled) for sample in samples)
    for sample in samples:
        now = scored(model, sample)
        for sequence in sequences_of(sample, unit):
            log_ratio = sum(now[t] - sample.logprob_old[t] for t in sequence) / len(sequence)
            one = surrogate(log_ratio.exp(), sample.advantage[sequence[0]], low, high)
            share = len(sequence) / len(now) / len(samples)
            loss = loss + one * (share if sample.kind == "policy" else len(sequence) / tokens)
    return loss


def gspo_token_loss(model, samples, unit, low, high):
    """The same, where each token's ratio has its sequence's value and its own gradient (Eq. 13 and 14)."""
    loss, tokens = 0.0, sum(sum(sample.sampled) for sample in samples)
    for sample in samples:
        now = scored(model, sample)
        for sequence in sequences_of(sample, unit):
            mean = sum(now[t].item() - sample.logprob_old[t] for t in sequence) / len(sequence)
            for t in sequence:
                ratio = math.exp(mean) * (now[t] - now[t].detach()).exp()
                one = surrogate(ratio, sample.advantage[t], low, high)
                loss = loss + one / (len(now) * len(samples) if sample.kind == "policy" else tokens)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["episode", "turn"])
@pytest.mark.parametrize("microbatch", [1, 2048])
def test_gspo_is_the_papers_where_a_sequence_has_one_advantage(model, samples, unit, microbatch):
    method, objective = method_and_objective("--algo", "gspo", "--sequence", unit, *WIDE,
                                             "--microbatch-tokens", max(microbatch, 16))
    assert (method.ratio, objective.reduction, method.loss) == (unit, "episode", None)
    for sample in samples:
        for sequence in sequences_of(sample, unit):
            for t in sequence:
                sample.advantage[t] = sample.advantage[sequence[0]]
    got, metrics = gradient(model, samples, objective)
    assert_same(got, total(model, samples, lambda part: gspo_loss(model, part, unit, 0.06, 0.09)))
    assert 0 < metrics["policy/clip_frac"] < 1 and 0 < metrics["judge/clip_frac"] < 1
    other, _ = gradient(model, samples, replace(objective, ratio="token"))
    assert (got - other).norm() > 0.1 * got.norm()


@pytest.mark.slow
def test_turns_of_an_episode_with_one_ratio_keep_their_own_advantages(model, samples):
    """The ratio's value is the episode's and its gradient the token's (Eq. 14). Eq. 7's own gradient would
    give every token the mean of the episode's advantages, and GiGPO's turns would be lost.
    """
    _, objective = method_and_objective("--algo", "gspo", *WIDE)
    got, _ = gradient(model, samples, objective)
    assert_same(got, total(model, samples, lambda part: gspo_token_loss(model, part, "episode", 0.06, 0.09)))
    averaged = total(model, samples, lambda part: sum(
        gspo_loss(model, [replace(s, advantage=[sum(s.advantage) / sum(s.sampled)] * len(s.ids))], "episode",
                  0.06, 0.09) / len(part) for s in part))
    assert (got - averaged).norm() > 0.1 * got.norm()


def test_gspos_defaults_are_the_papers_and_flags_override_them():
    settings = config.parse(["--algo", "gspo"]).settings()
    assert (settings["clip_low"], settings["clip_high"], settings["sequence"]) == (3e-4, 4e-4, "episode")
    assert settings["normalize_std"] and settings["kl"] == "none"
    settings = config.parse(["--algo", "gspo", "--clip-high", "0.1", "--preset", "paper"]).settings()
    assert (settings["clip_low"], settings["clip_high"], settings["lr"]) == (3e-4, 0.1, 1e-6)


def test_a_ratio_per_turn_does_not_depend_on_whether_turns_share_a_sample(model):
    """With --history every turn is a sample of its own; the weights of --reduction episode stay."""
    _, objective = method_and_objective("--algo", "gspo", "--sequence", "turn", "--history", 2, *WIDE)
    rng, merged, apart = random.Random(4), [], []
    for episode in range(4):
        ids = [rng.randrange(256) for _ in range(30)]
        cuts = [(3, 8), (12, 14), (20, 30)]
        sampled = [any(a <= t < b for a, b in cuts) for t in range(30)]
        advantage = [next((0.5 * k - 0.4 for k, (a, b) in enumerate(cuts) if a <= t < b), 0.0)
                     for t in range(30)]
        merged.append(batching.Sample(ids, sampled, advantage, [0.0] * 30, episode))
    with_old_logprobs(model, merged, rng)
    for sample in merged:
        for a, b in cuts:
            own = [a <= t for t in range(b)]
            apart.append(replace(sample, ids=sample.ids[:b], sampled=own, advantage=[
                x * keep for x, keep in zip(sample.advantage, own)], logprob_old=[
                x * keep for x, keep in zip(sample.logprob_old, own)]))
    assert_same(gradient(model, apart, objective)[0], gradient(model, merged, objective)[0])
    with pytest.raises(AssertionError, match="several samples"):
        gradient(model, apart, replace(objective, ratio="episode"))


# CISPO

def cispo_loss(model, samples, high):
    """-sg(min(ratio, high)) A log pi, mean over tokens."""
    loss, tokens = 0.0, 0
    for sample in samples:
        for t, now in scored(model, sample).items():
            weight = min(math.exp(now.item() - sample.logprob_old[t]), high)
            loss, tokens = loss - weight * sample.advantage[t] * now, tokens + 1
    return loss / tokens


@pytest.mark.parametrize("clip_high", [0.1, 4.0])
def test_cispo_is_the_papers(model, samples, clip_high):
    """There is no lower bound by default, and every token keeps a gradient."""
    method, objective = method_and_objective("--algo", "cispo", "--clip-high", clip_high)
    got, metrics = gradient(model, samples, objective)
    assert_same(got, total(model, samples, lambda part: cispo_loss(model, part, 1 + clip_high)))
    assert (metrics["policy/clip_frac"] > 0) == (clip_high < 1)        # no ratio of these tests is above 5
    assert method.loss(torch.zeros(1), torch.ones(1))[0].isfinite()    # of a ratio that underflowed
    ratio = torch.tensor([1e-3, 0.5, 1.0, 3.0, 7.0], requires_grad=True)
    loss, clipped = method.loss(ratio, torch.ones(5))
    slope, = torch.autograd.grad(loss.sum(), ratio)
    assert torch.allclose(-slope * ratio, ratio.detach().clamp(0.0, 1 + clip_high))    # by log ratio
    assert clipped.tolist() == [r > 1 + clip_high for r in ratio.tolist()]


# DAPO and Dr. GRPO: settings

def ppo_loss(model, samples, high, unit):
    """The clipped surrogate, summed and divided by `unit` (the judge's: by its tokens)."""
    parts = [surrogate((now - sample.logprob_old[t]).exp(), sample.advantage[t], 0.2, high)
             for sample in samples for t, now in scored(model, sample).items()]
    return sum(parts) / (unit if samples[0].kind == "policy" else len(parts))


@pytest.mark.slow
@pytest.mark.parametrize("algo, high, preset", [("dapo", 0.28, "small"), ("dapo", 0.28, "paper"),
                                                ("dr_grpo", 0.2, "small"), ("dr_grpo", 0.2, "paper")])
def test_dapo_and_dr_grpo_are_as_published(model, samples, algo, high, preset):
    """DAPO: a mean over all tokens, 0.2 and 0.28. Dr. GRPO: a sum, divided by episodes times a constant. No
    bound for negative advantages, also where the preset has one.
    """
    flags = ["--max-turns", 3, "--max-response-tokens", 5, "--temperature", 1]
    _, objective = method_and_objective("--algo", algo, "--preset", preset, *flags)
    for sample in samples[:3]:
        sample.logprob_old = [p - 2.0 * s for p, s in zip(sample.logprob_old, sample.sampled)]    # ratio e^2
    tokens = sum(sum(sample.sampled) for sample in samples if sample.kind == "policy")
    unit = tokens if algo == "dapo" else 9 * 3 * 5
    got, _ = gradient(model, samples, objective)
    assert_same(got, total(model, samples, lambda part: ppo_loss(model, part, high, unit)))


@pytest.mark.parametrize("algo, sampling", [("dapo", "refill"), ("dr_grpo", "keep")])
def test_their_advantages_and_sampling(algo, sampling):
    """DAPO divides by the std, Dr. GRPO does not; neither has a KL."""
    settings = config.parse(["--algo", algo, "--variant", "code"])
    assert settings.algorithm.settings.normalize_std == (algo == "dapo")
    settings = config.parse(["--algo", algo])
    assert (settings.dynamic_sampling, settings.kl) == (sampling, "none")
    got, _ = advantages_of(settings.algorithm, random_episodes(3))
    want, _ = advantages_of(method_of("grpo", normalize_std=algo == "dapo"), random_episodes(3))
    assert got == want and any(got)


# One algorithm's advantages with another's loss

class GigpoGspo(gspo.Loss, gigpo.Method):
    ratio = "turn"


class RlvmrGspo(gspo.Loss, rlvmr.Method):
    pass


class RlvmrCispo(cispo.Loss, rlvmr.Method):
    pass


class GigpoCispo(cispo.Loss, gigpo.Method):
    pass


@pytest.mark.parametrize("method, base, ratio", [
    (GigpoGspo, gigpo.Method, "turn"), (GigpoCispo, gigpo.Method, "token"),
    (RlvmrGspo, rlvmr.Method, "episode"), (RlvmrCispo, rlvmr.Method, "token")])
def test_a_loss_is_combined_with_any_advantages(model, method, base, ratio):
    """Advantages and flags are the base's, the loss and the ratio the other's."""
    combined, plain = method(method.Settings()), base(base.Settings())
    assert combined.ratio == ratio and combined.tags == plain.tags and method.Settings is base.Settings
    episodes = random_episodes(5, groups=2, size=3)
    got, metrics = advantages_of(combined, episodes)
    assert (got, metrics) == advantages_of(plain, random_episodes(5, groups=2, size=3))
    made = [sample for episode in episodes for sample in batching.samples_of(episode)]
    for sample in made:
        sample.ids = [token % 256 for token in sample.ids]
    with_old_logprobs(model, made, random.Random(1))
    low, reduction = (1.0, "token") if combined.loss else (0.06, "episode")
    objective = update.Objective(combined.loss, combined.ratio, clip_low=low, clip_high=0.09,
                                 reduction=reduction, max_grad_norm=0.0)
    combined.begin(None, objective, 1, None)
    loss = (cispo_loss(model, made, 1.09) if combined.loss else
            gspo_token_loss(model, made, ratio, low, 0.09))
    want = flat(torch.autograd.grad(loss, list(model.parameters())))
    assert_same(gradient(model, made, objective)[0], want)


def test_defaults_of_base_classes_add_up(tmp_path):
    path = tmp_path / "both.py"
    path.write_text('"""Both."""\nfrom algorithms import cispo, reinforce\n\n\n'
                    "class Method(cispo.Loss, reinforce.Method):\n    defaults = dict(tasks=64)\n")
    settings = config.parse(["--algo", str(path)])
    found = (settings.clip_low, settings.clip_high, settings.group_size, settings.tasks)
    assert found == (1.0, 4.0, 1, 64) and settings.dynamic_sampling == "keep"


# Through the command

@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return start_from(cold_started(tmp_path_factory))


OWN_GSPO = '''
"""GSPO in one file, with its loss spelled out."""
import torch

from algorithms import grpo


class Method(grpo.Method):
    """GRPO's advantages, one ratio for an episode."""

    ratio = "episode"
    defaults = dict(clip_low=3e-4, clip_high=4e-4, reduction="episode", dual_clip=0.0, normalize_std=True)

    def loss(self, ratio_N, advantage_N):
        """min(s A, clip(s) A)."""
        clipped_N = ratio_N.clamp(1 - self.objective.clip_low, 1 + self.objective.clip_high)
        free_N, bound_N = ratio_N * advantage_N, clipped_N * advantage_N
        return -torch.minimum(free_N, bound_N), bound_N < free_N
'''


@pytest.mark.slow
def test_gspo_is_one_file_outside_the_checkout(start, tmp_path):
    """It trains bit for bit as --algo gspo does, judge included, and not as GRPO does."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_GSPO.lstrip())
    for name, algo in (("own", path), ("ours", "gspo"), ("grpo", "grpo")):
        more = ["--normalize-std", "--reduction", "episode"] if algo == "grpo" else []
        assert train(tmp_path / name, *start, "--algo", algo, "--warmup", 1, *more) == 0
    own, ours, grpo = ([without_times(row) for row in rows(tmp_path / name)]
                       for name in ("own", "ours", "grpo"))
    assert own == ours and same(weights(tmp_path / "own"), weights(tmp_path / "ours"))
    assert not same(weights(tmp_path / "own"), weights(tmp_path / "grpo"))
    assert own[0]["policy/clip_frac"] > grpo[0]["policy/clip_frac"] and own[0]["judge/turns"] > 0
    assert [row["policy/lr"] for row in own] == [6e-4 / 2, 6e-4 / 2]        # warm-up 1/2, then decay 1/2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--algo", COMBINED), ("--algo", "cispo"), ("--algo", "dr_grpo"),
                                   ("--algo", "gspo", "--sequence", "turn", "--history", 2)])
def test_gcd_trains_with_each(start, tmp_path, flags):
    assert train(tmp_path / "out", *start, *flags, "--iterations", 1) == 0
    row, = rows(tmp_path / "out")
    assert row["judge/turns"] > 0 and row["policy/grad_norm"] > 0 and math.isfinite(row["judge/loss"])
    assert ("gigpo/anchor_1_frac" in row) == (flags[1] == COMBINED)


# What is refused

@pytest.mark.parametrize("body, expected", [
    ("los = 1", "class Method defines los, which"),
    ("def los(self, ratio_N, advantage_N): pass", "class Method defines los, which"),
    ("ratios = 'turn'", "class Method defines ratios, which"),
    ("ratio = 3", "ratio is 3; expected a str"),
    ("ratio = 'turns'", "ratio is 'turns'; expected one of token, turn, episode"),
    ("loss = 0.5", "loss is 0.5; expected a function of ratio_N and advantage_N"),
    ("def loss(self, ratio_N): pass", "expected a function of ratio_N and advantage_N")])
def test_a_wrong_hook_is_refused_before_a_run(tmp_path, body, expected):
    path = tmp_path / "mine.py"
    path.write_text(f'"""Mine."""\nfrom algorithms import grpo\n\n\nclass Method(grpo.Method):\n    {body}\n')
    with pytest.raises(ValueError, match="^--algo") as refused:
        config.parse(["--algo", str(path)])
    assert expected in str(refused.value) and str(path) in str(refused.value)


WRONG_LOSSES = [
    ("None", "it returned None; expected two tensors"), ("ratio_N", "it returned tensor"),
    ("(ratio_N, 1)", "expected two tensors"), ("(ratio_N.sum(), advantage_N)", "it returned shapes () and"),
    ("(ratio_N, advantage_N[1:])", "expected that of the ratio, ("),
    ("(ratio_N.detach(), advantage_N > 0)", "its loss has no gradient"),
    ("(ratio_N * float('nan'), advantage_N > 0)", "its loss is nan; expected finite numbers"),
    ("(ratio_N / 0, advantage_N > 0)", "its loss is inf; expected finite numbers")]


@pytest.mark.parametrize("result, expected", WRONG_LOSSES)
def test_a_wrong_loss_is_refused_before_the_step(model, samples, result, expected):
    class Method(algorithms.Method):
        loss = staticmethod(eval(f"lambda ratio_N, advantage_N: {result}"))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    before = flat(model.parameters())
    with pytest.raises(PluginError) as refused:
        update.update(model, optimizer, samples, update.Objective(Method(None).loss), lr=1.0)
    assert str(refused.value).startswith(f"{__file__}: loss: ") and expected in str(refused.value)
    assert torch.equal(flat(model.parameters()), before)


def test_numbers_that_were_wrong_before_are_not_blamed_on_the_loss(model, samples):
    samples[2].logprob_old[samples[2].sampled.index(True)] = math.nan
    _, objective = method_and_objective("--algo", "cispo")
    with pytest.raises(update.NonFinite):
        update.update(model, Recorder(model), samples, objective, lr=0.0)


@pytest.mark.slow
def test_a_wrong_loss_is_one_line_that_names_the_file(start, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(OWN_GSPO.lstrip().replace("return -torch", "return 0 * ratio_N.log() / 0 - torch"))
    with Stop.restored():
        assert train(tmp_path / "out", *start, "--algo", path) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"gcd.py: error: --algo={path}: loss: its loss is nan"), error
    assert not rows(tmp_path / "out")
