"""Proves that what saves memory changes nothing: logprobs in chunks, layers computed again, gradients used
up, passes left out.

    python -m pytest tests/test_memory.py           # about a minute

The oracle is always the same update made whole. Two ranks are this file run by torchrun (`main` below). How
much is saved on a GPU is not measured here; that there are never more logits than a chunk's is.
"""

import copy
import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Recorder, assert_same, config, flat, with_value_head
from hand_made import PLAIN, make_sample, near
from tiny_runs import begin, cold_started, rows, same, train, untimed, weights
from torch.utils._python_dispatch import TorchDispatchMode

import update
from algorithms import nthr
from lm import model as qwen
from run import parallel, setup

ROOT = Path(__file__).resolve().parents[1]
ALONE = parallel.Ranks(0, 1, torch.device("cpu"))
V = 300
WHOLE, ONE, SEVEN = 2**26, V, 7 * V + 5      # logits at most: all, of one position, of seven


def new_model(tied=False, head=False):
    model = qwen.Model(replace(config(V), tie_word_embeddings=tied))
    qwen.init_weights(model, 0)
    return with_value_head(model) if head else model


def some_samples(model, allowed=False):
    """Policy and judge, each of another length, with some tokens drawn from a few; references and old
    logprobs near the model's."""
    rng = random.Random(0)
    samples = [make_sample(rng, episode=i % 5, kind="judge" if i % 3 == 2 else "policy") for i in range(9)]
    for sample in samples if allowed else ():
        places = [t for t, sampled in enumerate(sample.sampled) if sampled]
        sample.allowed = {t: tuple({sample.ids[t], 5, 9, 200}) for t in places[::2]}
    for sample in near(model, samples, rng):
        if sample.kind == "policy":
            sample.logprob_ref = [p - 0.1 * s for p, s in zip(sample.logprob_old, sample.sampled)]
    return samples


OBJECTIVE = replace(PLAIN, kl_coef=0.3, judge_weight=0.5, temperature=0.8, microbatch_tokens=200)


def gradient(model, samples, ranks=ALONE):
    """The gradient that an update steps on, of this rank's part of the samples, and what it logs."""
    own = copy.deepcopy(samples[ranks.rank::ranks.world])
    recorder = Recorder(model)
    if ranks.world > 1:
        recorder = Whole(model)
    metrics = update.update(model, recorder, own, OBJECTIVE, lr=0.25)
    return recorder.gradient, metrics


class Whole(Recorder):
    """A Recorder of sharded gradients."""

    def step(self):
        self.gradient = flat(p.grad.full_tensor() for p in self.model.parameters())


class Logits(TorchDispatchMode):
    """The most rows of logits in a tensor that is made while this is open; [32, V] is a weight."""

    rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[1:] == (V,) and len(tensor) != 32:
                self.rows = max(self.rows, len(tensor))
        return made


# Chunks

@pytest.mark.fast
@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("tied, head", [(False, False), (True, True)])
@pytest.mark.parametrize("logits", [1, ONE, SEVEN])
def test_logprobs_in_chunks_have_the_gradient_of_the_whole(monkeypatch, logits, tied, head, allowed):
    model = new_model(tied, head)
    samples = some_samples(model, allowed)
    want, whole = gradient(model, samples)
    monkeypatch.setattr(update, "CHUNK_LOGITS", logits)
    got, chunked = gradient(model, samples)
    assert_same(got, want, tolerance=2e-6)
    assert chunked == pytest.approx(whole, rel=1e-5, abs=1e-6, nan_ok=True)
    assert chunked["policy/entropy_nats"] > 0.1 and chunked["policy/kl_nats"] > 0


@pytest.mark.fast
def test_scores_and_nthr_in_chunks_are_those_of_the_whole(monkeypatch):
    model = new_model()
    samples = some_samples(model, allowed=True)

    def read():
        parts = nthr.hidden_and_error(model, samples, list(range(V)), OBJECTIVE)
        return update.score(model, samples, OBJECTIVE), [torch.cat(part) for part in zip(*parts)]

    want, (hidden, error) = read()
    monkeypatch.setattr(update, "CHUNK_LOGITS", SEVEN)
    got, (same_hidden, same_error) = read()
    assert all(a == pytest.approx(b, abs=1e-5) for a, b in zip(got, want, strict=True))
    assert torch.equal(same_hidden, hidden)
    torch.testing.assert_close(same_error, error, rtol=0, atol=1e-6)


@pytest.mark.fast
def test_no_more_than_a_chunk_of_logits_is_ever_made(monkeypatch):
    model = new_model()
    samples, most = some_samples(model), []
    for logits in (WHOLE, SEVEN):
        monkeypatch.setattr(update, "CHUNK_LOGITS", logits)
        with Logits() as found:
            gradient(model, samples)
        most.append(found.rows)
    of_kind = [[s for s in samples if s.kind == kind] for kind in ("policy", "judge")]
    positions = max(sum(sum(s.sampled) for s in batch) for members in of_kind
                    for batch in update.microbatches(members, 200))
    assert most == [positions, 7] and positions > 35


@pytest.mark.fast
def test_few_logits_are_not_cut(monkeypatch):
    """The small model's path: no checkpoint, not a bit of another."""
    def refuse(*arguments, **options):
        raise AssertionError("a chunk")

    model = new_model()
    samples = some_samples(model)
    monkeypatch.setattr(update, "checkpoint", refuse)
    gradient(model, samples)
    monkeypatch.setattr(update, "CHUNK_LOGITS", SEVEN)
    with pytest.raises(AssertionError, match="a chunk"):
        gradient(model, samples)


# Layers computed again

@pytest.mark.fast
@pytest.mark.parametrize("logits", [WHOLE, SEVEN])
def test_layers_computed_again_have_the_same_gradient_bit_for_bit(monkeypatch, logits):
    monkeypatch.setattr(update, "CHUNK_LOGITS", logits)
    model, calls = new_model(), []
    samples = some_samples(model)
    for block in model.model.layers:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    want, whole = gradient(model, samples)
    once = len(calls)
    model.recompute_layers(True)
    got, metrics = gradient(model, samples)
    assert torch.equal(got, want) and metrics == pytest.approx(whole, rel=0, abs=0, nan_ok=True)
    assert len(calls) == 3 * once                              # and twice more, the second time
    update.score(model, samples, OBJECTIVE)
    assert not calls[-1]                                       # without a gradient nothing is kept anyway


@pytest.mark.fast
@pytest.mark.parametrize("device, small, flag, again", [
    ("cpu", False, "auto", False), ("cuda", False, "auto", True), ("cuda", True, "auto", False),
    ("cpu", True, "on", True), ("cuda", False, "off", False)])
def test_layers_are_computed_again_where_the_flag_says_so(monkeypatch, device, small, flag, again):
    monkeypatch.setattr(parallel, "shard", lambda model, *_: model)
    told = type("Told", (), {"checkpoint_activations": flag, "dtype": "float32"})
    model = setup.sharded(new_model(), told, parallel.Ranks(0, 1, torch.device(device)), small)
    assert [block.recompute for block in model.model.layers] == [again] * 2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_started(tmp_path_factory)


@pytest.mark.fast
@pytest.mark.parametrize("flags", ["", "--algo ppo --tasks 16 --group-size 1"])
def test_a_run_that_computes_layers_again_is_the_same_run(start, tmp_path, flags):
    for name in ("off", "on"):
        assert train(tmp_path / name, *begin(start), *flags.split(), "--checkpoint-activations", name) == 0
    assert same(weights(tmp_path / "off"), weights(tmp_path / "on"))
    off, on = ([untimed(row) for row in rows(tmp_path / name)] for name in ("off", "on"))
    assert off == on


# Two ranks: FSDP, the head sharded, tied and not

def on_ranks(ranks):
    """Gradients and metrics, whole, in chunks and with layers computed again, of each kind of head."""
    found = []
    for tied in (True, False):
        samples = some_samples(new_model(tied))
        for logits, again in ((WHOLE, False), (SEVEN, False), (SEVEN, True)):
            update.CHUNK_LOGITS = logits
            model = parallel.shard(new_model(tied), ranks)
            model.recompute_layers(again)
            found.append(gradient(model, samples, ranks))
    update.CHUNK_LOGITS = WHOLE
    return found


def main(out):
    torch.set_num_threads(1)
    ranks = parallel.setup("cpu", timeout_s=120)
    found = on_ranks(ranks)
    parallel.on_main(lambda: torch.save([g for g, _ in found], out / "gradients.pt"))
    parallel.on_main(lambda: (out / "metrics.json").write_text(json.dumps([m for _, m in found])))
    parallel.shutdown()


def test_two_ranks_have_the_gradients_of_one(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*torchrun, __file__, tmp_path], timeout=200, check=False, capture_output=True,
                         text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                                                      "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-4000:]
    gradients, metrics = (torch.load(tmp_path / "gradients.pt"),
                          json.loads((tmp_path / "metrics.json").read_text()))
    for (want, logged), got, told in zip(on_ranks(ALONE), gradients, metrics, strict=True):
        assert_same(got, want, tolerance=5e-6)
        assert told == pytest.approx(logged, rel=1e-4, abs=1e-5, nan_ok=True)
    for whole, chunked, again in zip(*[iter(gradients)] * 3):
        assert_same(chunked, whole, tolerance=2e-6)
        assert torch.equal(again, chunked)


# The optimizer

@pytest.mark.fast
def test_a_checkpoint_does_not_say_how_the_optimizer_is_computed(tmp_path):
    """Fused on a GPU, not on a CPU: saved there, loaded here; the moments are the same."""
    there, here = new_model(), new_model()
    fused = torch.optim.AdamW(there.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
    samples = some_samples(there)
    update.update(there, fused, samples, OBJECTIVE, lr=1e-3)
    parallel.save_checkpoint(tmp_path / "saved", there, fused, {}, qwen.save_pretrained)
    plain = update.adam(here)
    parallel.load_trainer(tmp_path / "saved", here, plain)
    assert [group["fused"] for group in plain.param_groups] == [None]
    here.load_state_dict(there.state_dict())
    for model, optimizer in ((there, fused), (here, plain)):
        update.update(model, optimizer, copy.deepcopy(samples), OBJECTIVE, lr=1e-3)
    torch.testing.assert_close(flat(here.parameters()), flat(there.parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.fast
def test_gradients_are_added_without_a_further_set():
    """Bit for bit scale * a + scale * b, in a's memory; b's is let go on the way."""
    model = torch.nn.ParameterList([torch.zeros(50) for _ in range(3)])
    a, b = ([torch.randn(50) for _ in range(3)] for _ in range(2))
    want, places = [0.3 * x + 0.7 * y for x, y in zip(a, b)], [x.data_ptr() for x in a]
    parallel.put_grads(model, [(0.3, a), (0.7, b)])
    assert all(torch.equal(p.grad, x) for p, x in zip(model, want, strict=True))
    assert [p.grad.data_ptr() for p in model] == places and a == b == [None] * 3


# Passes that nobody reads

@pytest.mark.fast
@pytest.mark.parametrize("flags", ["--kl loss --kl-coef 1", "--dtype bfloat16", "--dtype bfloat16 --kl loss"])
def test_what_is_not_scored_is_not_read(start, tmp_path, monkeypatch, flags):
    """The judge for the reference, silent samples in bf16: with nan in their place the run is the same."""
    flags = [*begin(start), *flags.split(), "--dynamic-sampling", "keep"]
    assert train(tmp_path / "plain", *flags) == 0
    score, step, scored, left_out = update.score, setup.Run.step, {}, []

    def recording(model, samples, objective):
        scored.setdefault(id(model), []).extend(samples)
        return score(model, samples, objective)

    def spoiled(run, samples, objective, rate, compare):
        mine = {id(s) for s in scored.get(id(run.model), ())}
        refs = {id(s) for model, found in scored.items() if model != id(run.model) for s in found}
        for sample in samples:
            unknown = [math.nan] * len(sample.ids)
            if objective.kl_coef and id(sample) not in refs:
                assert sample.kind == "judge"
                sample.logprob_ref = unknown
                left_out.append("reference")
            if run.config.dtype != "float32" and id(sample) not in mine:
                assert sample.silent
                sample.logprob_old = unknown
                left_out.append("silent")
        return step(run, samples, objective, rate, compare)

    monkeypatch.setattr(update, "score", recording)
    monkeypatch.setattr(setup.Run, "step", spoiled)
    assert train(tmp_path / "spoiled", *flags) == 0
    assert set(left_out) == {word for word, flag in (("reference", "--kl"), ("silent", "bfloat16"))
                             if flag in flags}
    assert same(weights(tmp_path / "plain"), weights(tmp_path / "spoiled"))
    assert [untimed(row) for row in rows(tmp_path / "plain")] == [
        untimed(row) for row in rows(tmp_path / "spoiled")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
