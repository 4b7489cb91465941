"""Proves that memory savings do not change results: chunked logprobs, recomputed layers, gradients added in
place, skipped forward passes.

    python -m pytest tests/core/test_memory.py           # about a minute

The oracle is the same update without the saving. The test with two ranks runs this file with torchrun (`main`
below). Memory on a GPU is not measured; the number of logits in memory at once is.
"""

import copy
import json
import math
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import Recorder, assert_same, config, flat, with_value_head
from hand_made import PLAIN, make_sample, with_old_logprobs
from tiny_runs import rows, same, start_from, train, weights, without_times
from torch.utils._python_dispatch import TorchDispatchMode

import batching
import models
import update
from algorithms import nthr, rewards
from infra import checkpoint, job, parallel
from lm import logprobs
from lm import model as decoder
from lm.optim import adamw

ROOT = Path(__file__).resolve().parents[2]
ALONE = job.Ranks(0, 1, torch.device("cpu"))
V = 300
UNCHUNKED, SEVEN = 2**26, 7 * V + 5      # values of CHUNK_LOGITS: all positions, seven


def new_model(tied=False, head=False):
    model = decoder.Model(replace(config(V), tie_word_embeddings=tied))
    decoder.init_weights(model, 0)
    return with_value_head(model) if head else model


def some_samples(model, allowed=False):
    """Policy and judge samples of different lengths; old and reference logprobs are near the model's.

    allowed: whether some tokens were sampled from a restricted set of ids.
    """
    rng = random.Random(0)
    samples = [make_sample(rng, episode=i % 5, kind="judge" if i % 3 == 2 else "policy") for i in range(9)]
    for sample in samples if allowed else ():
        positions = [t for t, sampled in enumerate(sample.sampled) if sampled]
        sample.allowed = {t: tuple({sample.ids[t], 5, 9, 200}) for t in positions[::2]}
    for sample in with_old_logprobs(model, samples, rng):
        if sample.kind == "policy":
            sample.logprob_ref = [p - 0.1 * s for p, s in zip(sample.logprob_old, sample.sampled)]
    return samples


OBJECTIVE = replace(PLAIN, kl_coef=0.3, judge_weight=0.5, temperature=0.8, microbatch_tokens=200)


def gradient(model, samples, ranks=ALONE):
    """The gradient of an update on this rank's share of the samples, and its metrics."""
    own = copy.deepcopy(samples[ranks.rank::ranks.world_size])
    recorder = Recorder(model)
    if ranks.world_size > 1:
        recorder = ShardedRecorder(model)
    metrics = update.update(model, recorder, own, OBJECTIVE, lr=0.25)
    return recorder.gradient, metrics


class ShardedRecorder(Recorder):
    """A Recorder of sharded gradients, which it gathers."""

    def step(self):
        self.gradient = flat(p.grad.full_tensor() for p in self.model.parameters())


class Logits(TorchDispatchMode):
    """Records the largest number of rows in any logits tensor that is created; [32, V] is a weight."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (V,) and len(tensor) != 32:
                self.rows = max(self.rows, len(tensor))
        return out


# Chunks

@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("tied, head", [(False, False), (True, True)])
@pytest.mark.parametrize("logits", [1, SEVEN])
def test_chunked_logprobs_have_the_same_gradient(monkeypatch, logits, tied, head, allowed):
    model = new_model(tied, head)
    samples = some_samples(model, allowed)
    want, unchunked = gradient(model, samples)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", logits)
    got, chunked = gradient(model, samples)
    assert_same(got, want, tolerance=2e-6)
    assert chunked == pytest.approx(unchunked, rel=1e-5, abs=1e-6, nan_ok=True)
    assert chunked["policy/entropy_nats"] > 0.1 and chunked["policy/kl_nats"] > 0


def test_chunked_logprobs_and_nthr_equal_the_unchunked(monkeypatch):
    model = new_model()
    samples = some_samples(model, allowed=True)

    def compute():
        parts = nthr.hidden_and_error(model, samples, list(range(V)), OBJECTIVE)
        return update.logprobs(model, samples, OBJECTIVE), [torch.cat(part) for part in zip(*parts)]

    want, (hidden, error) = compute()
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", SEVEN)
    got, (same_hidden, same_error) = compute()
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(got, want, strict=True))
    assert torch.equal(same_hidden, hidden)
    torch.testing.assert_close(same_error, error, rtol=0, atol=1e-6)


def test_no_tensor_has_more_logits_than_a_chunk(monkeypatch):
    model = new_model()
    samples, most = some_samples(model), []
    for logits in (UNCHUNKED, SEVEN):
        monkeypatch.setattr(logprobs, "CHUNK_LOGITS", logits)
        with Logits() as recorded:
            gradient(model, samples)
        most.append(recorded.rows)
    positions = max(sum(sum(s.sampled) for s in batch) for batch in batching.microbatches(samples, 200))
    assert most == [positions, 7] and positions > 35


def test_few_logits_are_not_chunked(monkeypatch):
    """The small model's case: no activation checkpointing."""
    def refuse(*arguments, **options):
        raise AssertionError("a chunk")

    model = new_model()
    samples = some_samples(model)
    monkeypatch.setattr(logprobs, "checkpoint", refuse)
    gradient(model, samples)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", SEVEN)
    with pytest.raises(AssertionError, match="a chunk"):
        gradient(model, samples)


# Recomputed layers

@pytest.mark.parametrize("logits", [UNCHUNKED, SEVEN])
def test_recomputed_layers_have_the_same_gradient_bit_for_bit(monkeypatch, logits):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", logits)
    model, calls = new_model(), []
    samples = some_samples(model)
    for block in model.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    want, stored = gradient(model, samples)
    once = len(calls)
    model.recompute_layers(True)
    got, metrics = gradient(model, samples)
    assert torch.equal(got, want) and metrics == pytest.approx(stored, rel=0, abs=0, nan_ok=True)
    assert len(calls) == 3 * once                              # twice with recomputation
    update.logprobs(model, samples, OBJECTIVE)
    assert not calls[-1]                                       # no recomputation without gradients


@pytest.mark.parametrize("device, small, flag, recompute", [
    ("cpu", False, "auto", False), ("cuda", False, "auto", True), ("cuda", True, "auto", False),
    ("cpu", True, "on", True), ("cuda", False, "off", False)])
def test_checkpoint_activations_decides_whether_layers_are_recomputed(monkeypatch, device, small, flag,
                                                                      recompute):
    monkeypatch.setattr(parallel, "shard", lambda model, *_: model)
    settings = SimpleNamespace(checkpoint_activations=flag, dtype="float32")
    model = models.sharded(new_model(), settings, job.Ranks(0, 1, torch.device(device)), small)
    assert [block.recompute for block in model.model.layers] == [recompute] * 2


@pytest.mark.slow
def test_a_run_with_recomputed_layers_has_the_same_weights_and_metrics(start, tmp_path):
    for name in ("off", "on"):
        switch = ["--checkpoint-activations", name]
        assert train(tmp_path / name, *start_from(start), "--algo", "ppo", "--tasks", 16,
                     "--group-size", 1, *switch) == 0
    assert same(weights(tmp_path / "off"), weights(tmp_path / "on"))
    off, on = ([without_times(row) for row in rows(tmp_path / name)] for name in ("off", "on"))
    assert off == on


# Two ranks: FSDP with a sharded head, tied and untied

def on_ranks(ranks):
    """Gradients and metrics of tied and untied heads: unchunked, chunked, chunked with recomputed layers."""
    results = []
    for tied in (True, False):
        samples = some_samples(new_model(tied))
        for logits, recompute in ((UNCHUNKED, False), (SEVEN, False), (SEVEN, True)):
            logprobs.CHUNK_LOGITS = logits
            model = parallel.shard(new_model(tied), ranks)
            model.recompute_layers(recompute)
            results.append(gradient(model, samples, ranks))
    logprobs.CHUNK_LOGITS = UNCHUNKED
    return results


def main(out):
    """What each rank of the two runs."""
    torch.set_num_threads(1)
    ranks = job.setup("cpu", timeout_s=120)
    results = on_ranks(ranks)
    parallel.on_rank0(lambda: torch.save([g for g, _ in results], out / "gradients.pt"))
    parallel.on_rank0(lambda: (out / "metrics.json").write_text(json.dumps([m for _, m in results])))
    job.shutdown()


@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(tmp_path):
    run = forked.run([__file__, tmp_path], os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}, tmp_path, ranks=2, timeout=200)
    assert run.returncode == 0, run.text[-4000:]
    gradients, metrics = (torch.load(tmp_path / "gradients.pt"),
                          json.loads((tmp_path / "metrics.json").read_text()))
    for (want, expected), got, logged in zip(on_ranks(ALONE), gradients, metrics, strict=True):
        assert_same(got, want, tolerance=5e-6)
        assert logged == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
    for unchunked, chunked, recomputed in zip(*[iter(gradients)] * 3):
        assert_same(chunked, unchunked, tolerance=2e-6)
        assert torch.equal(recomputed, chunked)


# The optimizer

def test_a_checkpoint_of_a_fused_optimizer_loads_into_an_unfused_one(tmp_path):
    """As when a run moves from a GPU to a CPU: the moments are the same."""
    saved, loaded = new_model(), new_model()
    fused = torch.optim.AdamW(saved.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    samples = some_samples(saved)
    update.update(saved, fused, samples, OBJECTIVE, lr=1e-3)
    checkpoint.save_checkpoint(tmp_path / "saved", saved, fused, {}, decoder.save_pretrained)
    plain = adamw(loaded)
    checkpoint.load_trainer(tmp_path / "saved", loaded, plain)
    assert [group["fused"] for group in plain.param_groups] == [None]
    loaded.load_state_dict(saved.state_dict())
    for model, optimizer in ((saved, fused), (loaded, plain)):
        update.update(model, optimizer, copy.deepcopy(samples), OBJECTIVE, lr=1e-3)
    torch.testing.assert_close(flat(loaded.parameters()), flat(saved.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_optimizer_has_its_step_count_on_the_device_that_it_reads(tmp_path, monkeypatch, fused):
    """Fused AdamW, as on CUDA, reads it on the parameter's device, here "meta", unfused AdamW on the CPU."""
    saved = new_model()
    optimizer = adamw(saved)
    update.update(saved, optimizer, some_samples(saved), OBJECTIVE, lr=1e-3)
    checkpoint.save_checkpoint(tmp_path / "saved", saved, optimizer, {}, decoder.save_pretrained)
    loaded = new_model().to("meta")
    empty = adamw(loaded)
    empty.defaults["fused"] = fused
    monkeypatch.setattr(checkpoint, "fill", lambda *given: None)
    checkpoint.load_trainer(tmp_path / "saved", loaded, empty)
    assert {state["step"].device.type for state in empty.state.values()} == {"meta" if fused else "cpu"}


def test_gradients_are_added_in_place():
    """Bit for bit 0.3 * a + 0.7 * b, in the memory of a; both lists are emptied, which frees b's."""
    model = torch.nn.ParameterList([torch.zeros(50) for _ in range(3)])
    a, b = ([torch.randn(50) for _ in range(3)] for _ in range(2))
    want, addresses = [0.3 * x + 0.7 * y for x, y in zip(a, b)], [x.data_ptr() for x in a]
    parallel.set_grads(model, [(0.3, a), (0.7, b)])
    assert all(torch.equal(p.grad, x) for p, x in zip(model, want, strict=True))
    assert [p.grad.data_ptr() for p in model] == addresses and a == b == [None] * 3


# Skipped forward passes

@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--dtype bfloat16", "--dtype bfloat16 --kl loss"])
def test_skipped_logprobs_are_never_read(start, tmp_path, monkeypatch, flags):
    """Reference logprobs of judge samples, and in bf16 the trainer's old logprobs of samples without an
    advantage, or of the first step, are not computed: with nan in their place the run is the same."""
    bf16, flags = "bfloat16" in flags, [*start_from(start), *flags.split(), "--dynamic-sampling", "keep"]
    write = rewards.write_rewards

    def of_one_group_equal(episodes, settings):
        write(episodes, settings)
        for episode in episodes:
            episode.reward = float(episode.group > 0 and episode.index % 4 > 1)

    monkeypatch.setattr(rewards, "write_rewards", of_one_group_equal)
    assert train(tmp_path / "plain", *flags) == 0
    compute, step, computed, skipped = update.logprobs, update.update, {}, []

    def recording(model, samples, objective):
        computed.setdefault(id(model), []).extend(samples)
        return compute(model, samples, objective)

    def with_nan(model, optimizer, samples, objective, lr, compare):
        own = {id(s) for s in computed.get(id(model), ())}
        referenced = {id(s) for key, of_model in computed.items() if key != id(model) for s in of_model}
        for sample in samples:
            unknown = [math.nan] * len(sample.ids)
            if objective.kl_coef and id(sample) not in referenced:
                assert sample.kind == "judge"
                sample.logprob_ref = unknown
                skipped.append("reference")
            if bf16 and sample.logprob_old and id(sample) not in own:         # none: of the first step
                assert not any(sample.advantage)
                sample.logprob_old = unknown
                skipped.append("zero advantage")
        return step(model, optimizer, samples, objective, lr, compare)

    monkeypatch.setattr(update, "logprobs", recording)
    monkeypatch.setattr(update, "update", with_nan)
    assert train(tmp_path / "with nan", *flags) == 0
    assert set(skipped) == {kind for kind, flag in (("reference", "--kl"), ("zero advantage", "bfloat16"))
                            if flag in flags}
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "with nan"))
    assert [without_times(row) for row in rows(tmp_path / "plain")] == [
        without_times(row) for row in rows(tmp_path / "with nan")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
