"""Tests that each fault of lab/studies/faults.py breaks one thing only, and that the study is reproducible.

    python -m pytest tests/lab/test_faults.py     # half a minute, most of it for the tiny study
"""

import json
import math
import random
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hand_made import ANSWER, HEAD, make_episode, sampled_positions
from tiny_runs import TINY, rows, same, start_from, train, weights, without_times

import batching
import envs
import gcd
import judge
import losses
import update
from algorithms import rewards
from lab.studies import faults
from lm import engine

LINES = [("a", "room 1", None, 2), ("b", "room 2", None, 3)]     # two turns of 2 and 3 tokens


@pytest.fixture
def sample():
    """A function that returns the sample of a two-turn episode: message, 2 tokens, answer, 3 tokens."""
    def made(cut=False):
        episode = make_episode(LINES)
        episode.turns[-1].truncated = cut
        for turn in episode.turns:
            turn.advantage = 0.5
        (only,) = batching.samples_of(episode)
        return only
    return made


def test_only_the_stop_token_is_left_out(sample):
    n = len(HEAD)
    full, after = sample(), n + 2 + len(ANSWER)
    assert sampled_positions(full) == [n, n + 1, after, after + 1, after + 2]
    with faults.stop_untrained():
        broken = sample()
        assert sampled_positions(broken) == [n, after, after + 1] and broken.ids == full.ids
        assert [broken.advantage[t] for t in (n, n + 1)] == [0.5, 0.0] and broken.logprob_old[n + 1] == 0.0
        assert sampled_positions(sample(cut=True)) == [n, after, after + 1, after + 2]       # cut: no stop
    assert sampled_positions(sample()) == sampled_positions(full)


def test_the_environments_tokens_get_the_advantage_of_the_preceding_response(sample):
    n = len(HEAD)
    with faults.environment_trained():
        broken = sample()
    assert sampled_positions(broken) == list(range(n, n + 2 + len(ANSWER) + 3))        # but the first message
    assert set(broken.advantage[n:]) == {0.5} and broken.logprob_old[n + 2] == 0.0


def test_reported_logprobs_have_the_wrong_temperature_and_draws_the_right_one():
    logits_BV = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 3.0]])
    uniform_B = torch.tensor([0.9, 0.5])
    token_B, logprob_B = engine.sample_tokens(logits_BV, uniform_B, 0.8)
    with faults.logprobs_at_wrong_temperature():
        broken_B, reported_B = engine.sample_tokens(logits_BV, uniform_B, 0.8)
    assert torch.equal(token_B, broken_B)
    expected = [row[token] / 1.2 - math.log(sum(math.exp(x / 1.2) for x in row))
                for row, token in zip(logits_BV.tolist(), token_B.tolist())]
    assert reported_B.tolist() == pytest.approx(expected, abs=1e-6)
    assert (reported_B - logprob_B).abs().max() > 0.01


def test_groups_of_equal_reward_get_advantages_as_large_as_other_groups():
    settings, episodes = rewards.Settings(invalid_penalty=0.0), [make_episode(LINES) for _ in range(4)]

    def advantages():
        rewards.write_rewards(episodes, settings)
        return losses.group_relative_advantage(rewards.stored_rewards(episodes), torch.zeros(4), True)

    assert advantages().tolist() == [0.0] * 4
    with faults.equal_groups_amplified():
        noisy = advantages()
        assert all(0 <= episode.reward <= faults.NOISE for episode in episodes)
        assert noisy.square().mean().sqrt() > 0.9 and not torch.equal(noisy, advantages())


def test_the_learning_rate_is_multiplied():
    config = SimpleNamespace(lr_decay=True, iterations=10, warmup=0)
    with faults.too_fast():
        assert gcd.lr_factor(config, 5) == pytest.approx(0.5 * faults.TOO_FAST)
    assert gcd.lr_factor(config, 5) == 0.5


def test_the_judges_question_comes_after_the_end_and_its_label_is_the_outcome():
    episode, question = make_episode(LINES), [7, 8]
    chat = SimpleNamespace(message=lambda text: question, closed=list, bare=True)
    environment = envs.Environment()

    def question_of():
        return judge.questions(chat, [episode], [(0, 0, "good")], environment)[0]

    first, last = episode.turns
    assert question_of().prompt_ids == first.prompt_ids + first.response_ids + question
    with faults.judge_knows_the_outcome():
        leaked = question_of()
    assert leaked.prompt_ids == last.prompt_ids + last.response_ids + question
    assert (leaked.t, leaked.label, question_of().label) == (0, "bad", "good")       # the episode was lost


def test_every_patch_is_undone():
    names = {(update, "samples_of"), (batching, "samples_of"), (engine, "sample_tokens"),
             (rewards, "write_rewards"), (gcd, "lr_factor"), (judge, "questions"), (gcd, "LOGPROB_GAP_LIMIT"),
             (gcd, "optimize")}
    before = {attribute: getattr(*attribute) for attribute in names}
    for fault in faults.FAULTS.values():
        with fault.patch(), fault.disabled_check() if fault.disabled_check else nullcontext():
            assert any(getattr(*attribute) is not before[attribute] for attribute in names)
        assert all(getattr(*attribute) is before[attribute] for attribute in names)


def curves_of(seed, **changes):
    """Random curves of a run, with these metrics set."""
    rng = random.Random(seed)
    healthy = {"trained_share": 1.0, "policy/logprob_gap_max_nats": 1e-6, "policy/clip_frac": 0.01,
               "rollout/zero_variance_frac": 0.25, "rollout/success": 0.6, "judge/auc": 0.8,
               "judge/auc_oracle": 0.75} | changes
    return {name: [healthy.get(name, rng.random())] * 12 for name in faults.CURVES}


@pytest.mark.parametrize("name, changes", [
    ("stop", {"trained_share": 0.7}), ("environment", {"trained_share": 1.7}),
    ("temperature", {"policy/logprob_gap_max_nats": 0.3}), ("noise", {"rollout/zero_variance_frac": 0.0}),
    ("rate", {"policy/clip_frac": 0.2, "rollout/success": 0.1}),
    ("leak", {"judge/auc": 0.95, "rollout/success": 0.5})])
def test_a_rule_fires_on_its_fault_only(name, changes):
    healthy, broken = curves_of(0), curves_of(1, **changes)
    for metric in ("policy/logprob_gap_max_nats", "policy/clip_frac"):
        broken[metric][1] = None                       # an iteration without an update
    assert [key for key, fault in faults.FAULTS.items() if fault.rule(broken, healthy)] == [name]
    assert not any(fault.rule(healthy, healthy) for fault in faults.FAULTS.values())
    unmeasured = dict.fromkeys(faults.CURVES, [None] * 12) | {"rollout/zero_variance_frac": [0.5] * 12}
    assert not any(fault.rule(unmeasured, healthy) for fault in faults.FAULTS.values())


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished tiny study: (flags, folder). gcd.py's signal handlers are removed."""
    folder = tmp_path_factory.mktemp("faults")
    tiny = [flag for flag in TINY if flag not in ("--device", "cpu", "--evaluate", "none")]
    tiny = tiny[:tiny.index("--iterations")] + tiny[tiny.index("--iterations") + 2:]
    flags = ["--iterations", "2", "--jobs", "1", "--runs", str(folder / "runs"), "--out", str(folder / "out"),
             "--cold", "--hidden-size 32 --layers 2 --demonstrations 200 --judge-demonstrations 40",
             "--flags", " ".join(tiny) + " --normalize-std --dynamic-sampling keep"]
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert faults.main(flags) == 0
    for number, handler in before.items():
        signal.signal(number, handler)
    return flags, folder


@pytest.mark.slow
def test_the_study_writes_every_fault_and_the_errors_of_gcd(study):
    _, folder = study
    found = json.loads((folder / "out" / "faults.json").read_text())
    assert [row["title"] for row in found["faults"]] == [fault.broken for fault in faults.FAULTS.values()]
    errors = {row["title"]: row["error"] for row in found["faults"] if row["error"]}
    assert set(errors) == {"logprobs of another temperature", "environment tokens trained"}
    assert all("sampler and trainer differ by" in error for error in errors.values())
    counted = {name: curves["trained_share"][0] for name, curves in found["curves"].items()}
    assert counted["healthy"] == 1.0 and counted["stop"] < 1.0 < counted["environment"]
    assert {"stop", "environment", "temperature"} <= {name for name, fired_rules in found["rules"].items()
                                                      if name in fired_rules}
    assert found["rules"]["healthy"] == [] and "NaN" not in (folder / "out" / "faults.json").read_text()
    for row in found["faults"]:
        assert (folder / "out" / row["picture"]).read_text().count("<svg") == 1
    assert "Every rule on every run" in (folder / "out" / "faults.md").read_text()


@pytest.mark.slow
def test_a_finished_study_repeats_no_run(study, monkeypatch):
    flags, folder = study
    before = (folder / "out" / "faults.json").read_text()
    monkeypatch.setattr(gcd, "main", lambda argv: pytest.fail("a run was started"))
    monkeypatch.setattr(faults, "draw", lambda *_: {name: f"faults.{name}.svg" for name in faults.FAULTS})
    assert faults.main(flags) == 0
    assert (folder / "out" / "faults.json").read_text() == before


@pytest.mark.slow
def test_the_healthy_run_equals_a_run_of_gcd_bit_for_bit(study, tmp_path):
    flags, folder = study
    (cold,) = (folder / "runs").glob("cold_*")
    given = flags[flags.index("--flags") + 1].split()
    flags = [*start_from(cold / "checkpoint"), *given, "--iterations", 2, "--seed", 0]
    assert train(tmp_path / "run", *flags) == 0
    assert same(weights(tmp_path / "run"), weights(folder / "runs" / "healthy"))
    assert [without_times(row) for row in rows(tmp_path / "run")] == [
        without_times(row) for row in rows(folder / "runs" / "healthy")]


@pytest.mark.parametrize("flag, value, expected", [
    ("--iterations", "0", "--iterations=0"), ("--jobs", "0", "--jobs=0"),
    ("--flags", "--no-such 1", "--no-such")])
def test_an_invalid_flag_is_an_error(tmp_path, capsys, flag, value, expected):
    with pytest.raises(SystemExit):
        faults.main(["--out", str(tmp_path), "--runs", str(tmp_path), flag, value])
    assert expected in capsys.readouterr().err and not (tmp_path / "faults.json").exists()
