"""Tests of whole runs that train adapters or the last layers: what is merged, saved, resumed, and refused.

    python -m pytest tests/core/test_lora_runs.py

Oracles: an undisturbed run bit for bit, the frozen weights bit for bit, the package peft. Two ranks are in
tests/core/test_train.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import rounding
from safetensors.torch import load_file
from test_resume import train_in_two
from tiny_runs import assert_one_error, rows, same, start_from, train, weights, without_times

import cold_start
import gcd
import session
import update
from infra import parallel
from lm import lora
from lm import model as decoder

IMITATE = ["--demonstrations", 12, "--cold-start-batch", 2, "--judge-demonstrations", 8, "--lr", 3e-3]
LORA = ["--lora", 4]


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """The folder of a cold start and two iterations with adapters; the models of all iterations are kept."""
    out = tmp_path_factory.mktemp("lora") / "out"
    assert train(out, "--model", start, *IMITATE, *LORA, "--kl", "loss", "--save-adapter",
                 "--keep-checkpoints", 1) == 0
    return out


def unmerged(out):
    """The adapters and the frozen matrices in a checkpoint's trainer.pt."""
    return torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["state"]["unmerged"]


# What is merged and saved

@pytest.mark.slow
def test_the_cold_starts_adapters_are_merged_into_what_rl_begins_with(start, trained):
    """RL's first model is that without RL's adapters, and its weights keep their bits; the last is that with
    them merged."""
    first, base, found = (load_file(trained / name / "model.safetensors")
                          for name in ("kept/00000", "reference", "checkpoint"))
    given, own = load_file(start / "model.safetensors"), unmerged(trained)
    assert same(first, base)
    moved = {name for name in base if not torch.equal(base[name], given[name])}
    assert moved == {name for name in own if "lora_" not in name} and len(moved) == 2 * 7
    assert all(torch.equal(own[name], base[name]) for name in moved)
    assert same(dict(lora.merged(base | own)), found)
    assert {name for name in base if not torch.equal(base[name], found[name])} == moved
    assert all(own[name].any() for name in own)


@pytest.mark.slow
def test_the_adapter_belongs_to_the_reference_and_peft_loads_it(trained):
    peft = pytest.importorskip("peft", reason="needs peft (requirements-test.txt)")
    ids_BT = torch.arange(40).reshape(2, 20)
    config = peft.PeftConfig.from_pretrained(trained / "adapter")
    assert config.base_model_name_or_path == str((trained / "reference").resolve())
    peer = peft.AutoPeftModelForCausalLM.from_pretrained(trained / "adapter")
    with torch.no_grad():
        expected = decoder.load_pretrained(trained / "checkpoint")(ids_BT)
        torch.testing.assert_close(peer(ids_BT).logits, expected, rtol=0, atol=rounding(expected))
        without = decoder.load_pretrained(trained / "reference")(ids_BT)
    assert (without - expected).abs().max() > 100 * rounding(expected)


@pytest.mark.slow
def test_a_cold_starts_adapter_belongs_to_the_model_that_was_given(start, tmp_path):
    assert train(tmp_path, "--model", start, *IMITATE, *LORA, "--save-adapter", "--iterations", 0) == 0
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(start.resolve())
    assert not (tmp_path / "reference").exists()


@pytest.mark.slow
def test_the_kls_reference_is_rls_first_model(start, tmp_path, monkeypatch):
    """Its logprobs are those of a frozen copy, and at RL's first step the KL is 0 exactly."""
    write, seen = update.write_reference, []

    def checked(model, reference, samples, objective):
        assert reference is model
        write(model, reference, samples, objective)
        policy = [sample for sample in samples if sample.kind == "policy"]
        copy = decoder.load_pretrained(tmp_path / "reference")
        for sample, expected in zip(policy, update.logprobs(copy, policy, objective), strict=True):
            assert sample.logprob_ref == pytest.approx(expected, abs=1e-5)
        seen.append(any(sample.logprob_ref != sample.logprob_old for sample in policy))

    monkeypatch.setattr(update, "write_reference", checked)
    assert train(tmp_path, "--model", start, *IMITATE, *LORA, "--kl", "loss", "--save-adapter",
                 "--minibatches", 1, "--lr", 3e-2) == 0
    assert len(seen) == 2
    first, second = (row["policy/kl_nats"] for row in rows(tmp_path))
    assert first == 0 and second > 1e-4


@pytest.mark.slow
def test_the_number_of_trained_parameters_is_logged(trained):
    head = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    adapters = {name: tensor for name, tensor in unmerged(trained).items() if "lora_" in name}
    assert head["trained_parameters"] == sum(tensor.numel() for tensor in adapters.values())
    assert head["config"]["lora"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--judge-kind", "value"], ["--dtype", "bfloat16", "--kl", "loss"]])
def test_only_the_last_layer_is_trained(start, tmp_path, flags):
    """In cold start and RL, also where every layer is a unit of FSDP."""
    assert train(tmp_path, "--model", start, *IMITATE, "--train-layers", 1, *flags) == 0
    before, after = load_file(start / "model.safetensors"), weights(tmp_path)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith(("model.layers.1.", "model.norm."))}
    assert len([name for name in after.keys() - before.keys() if after[name].any()]) == 2 * ("value" in flags)


@pytest.mark.slow
def test_adapters_train_in_bf16(start, tmp_path):
    """With fp32 masters under FSDP; the sampler has weights and adapters in bf16."""
    assert train(tmp_path, *start_from(start), *LORA, "--dtype", "bfloat16", "--lr", 1e-2) == 0
    assert {tensor.dtype for tensor in unmerged(tmp_path).values()} == {torch.float32}
    assert all(row["policy/logprob_gap_max_nats"] < 0.2 for row in rows(tmp_path))
    assert all(tensor.any() for name, tensor in unmerged(tmp_path).items() if "lora_B" in name)


# Resuming

@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [0, 1])
def test_a_run_with_adapters_resumes_exactly(start, trained, tmp_path, monkeypatch, stop_at):
    flags = ["--model", start, *IMITATE, *LORA, "--kl", "loss", "--save-adapter", "--keep-checkpoints", 1]
    train_in_two(monkeypatch, tmp_path, flags, stop_at)
    assert same(weights(trained), weights(tmp_path)) and same(unmerged(trained), unmerged(tmp_path))
    assert same(*(load_file(out / "reference" / "model.safetensors") for out in (trained, tmp_path)))
    assert same(*(load_file(out / "adapter" / "adapter_model.safetensors") for out in (trained, tmp_path)))
    moments = [torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["optimizer"]["state"]
               for out in (trained, tmp_path)]
    assert moments[0].keys() == moments[1].keys() == {name for name in unmerged(trained) if "lora_" in name}
    assert all(same(moments[0][name], moments[1][name]) for name in moments[0])
    for phase in ("cold_start", "rl"):
        assert [without_times(row) for row in rows(trained, phase)] == [
            without_times(row) for row in rows(tmp_path, phase)]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc (Linux)")
def test_a_resumed_run_keeps_no_file_of_its_checkpoint_mapped(start, tmp_path, monkeypatch):
    """Else one that was replaced keeps its room on the disk, and cannot be removed from an NFS one."""
    mapped = []

    def iteration(*arguments):
        mapped.append([line for line in Path("/proc/self/maps").read_text().splitlines()
                       if str(tmp_path / "checkpoint") in line])
        return play_and_train(*arguments)

    play_and_train = gcd.iteration
    monkeypatch.setattr(gcd, "iteration", iteration)
    train_in_two(monkeypatch, tmp_path, ["--model", start, *IMITATE, *LORA], 0)
    assert len(mapped) == 2 and not any(mapped), mapped


@pytest.mark.slow
def test_a_crash_after_the_merge_merges_once(start, trained, tmp_path, monkeypatch):
    """The checkpoint of the cold start has its adapters apart; a resumed run merges them as the first did."""
    flags = ["--model", start, *IMITATE, *LORA, "--kl", "loss"]

    def crash(run, i, reference):
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", crash)
        assert train(tmp_path, *flags) == 1
    assert any(name.endswith("lora_B") and tensor.any() for name, tensor in unmerged(tmp_path).items())
    assert train(tmp_path, *flags, "--resume") == 0
    assert same(weights(trained), weights(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [LORA, ["--train-layers", 1]])
def test_dagger_resumes_exactly_between_rounds(start, tmp_path, monkeypatch, chosen):
    """With Muon, which has no state of what is frozen."""
    monkeypatch.setattr(cold_start, "DAGGER_ROUND", 6)
    full, parts, play = tmp_path / "full", tmp_path / "parts", session.Run.play
    flags = ["--model", start, *IMITATE, "--dagger", 18, "--checkpoint-every", 1, "--iterations", 1, *chosen]
    assert train(full, *flags) == 0

    def ending(run, specs, sampling, name, **others):
        if name == "DAgger round 2":
            raise OSError("the power went")
        return play(run, specs, sampling, name, **others)

    with monkeypatch.context() as patch:
        patch.setattr(session.Run, "play", ending)
        assert train(parts, *flags) == 1
    assert train(parts, *flags, "--resume") == 0
    assert same(weights(full), weights(parts)) and same(unmerged(full), unmerged(parts))


@pytest.mark.slow
def test_a_finished_run_is_evaluated_again_with_the_same_weights(trained, tmp_path, monkeypatch, start):
    """Resumed for its evaluation alone, the sampler has the checkpoint's weights once merged, bit for bit."""
    found, score = [], dict.fromkeys(("success", "low", "high", "games", "n"), 0)
    monkeypatch.setattr(gcd, "evaluation", lambda run: run.update_sampler() or found.append(
        dict(lora.merged(parallel.full_weights(run.sampler)))) or {"L0": {"sampled": score}})
    out, expected = shutil.copytree(trained, tmp_path / "out"), weights(trained)
    assert train(out, "--model", start, *IMITATE, *LORA, "--kl", "loss", "--keep-checkpoints", 1,
                 "--resume", "--evaluate", "L0") == 0
    assert len(found) == 1 and all(torch.equal(found[0][name], weight) for name, weight in expected.items())


# What is refused

@pytest.mark.slow
def test_adapters_of_another_rank_or_file_are_refused(trained, start, capsys):
    flags = ["--model", start, *IMITATE, "--kl", "loss", "--resume"]
    assert train(trained, *flags, "--lora", 8) == 1
    assert_one_error(capsys, "was made with other settings: lora was 4, is 8")
    path = trained / "checkpoint" / "trainer.pt"
    trainer = torch.load(path, weights_only=True)
    try:
        torch.save(trainer | {"state": trainer["state"] | {"unmerged": {}}}, path)
        assert train(trained, *flags, *LORA) == 1
        assert_one_error(capsys, "trainer.pt: its adapters are of another model or rank")
    finally:
        torch.save(trainer, path)


@pytest.mark.slow
@pytest.mark.parametrize("flags, message", [
    ("--train-layers 3", "--train-layers=3: the model has 2 layers"),
    ("--lora 2", "--lora=2: not with --model=")])
def test_what_does_not_fit_the_model_is_refused_before_any_work(start, tmp_path, capsys, flags, message):
    model = start
    if "lora" in flags:                                                  # a model with a value head
        headed = decoder.load_pretrained(start, value_head=True)
        (model := tmp_path / "headed").mkdir()
        decoder.save_pretrained(headed, model)
        for path in start.glob("*token*"):
            (model / path.name).write_bytes(path.read_bytes())
    assert train(tmp_path / "out", *start_from(model), *flags.split()) == 1
    assert_one_error(capsys, message)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
