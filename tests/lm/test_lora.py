"""Tests of adapters and of training the last layers: what is computed, what is trained, what is saved.

    python -m pytest tests/lm/test_lora.py

Oracles: the package peft, autograd on the whole model, the frozen weights bit for bit. Two ranks are in
tests/infra/test_parallel.py, whole runs in tests/core/test_lora_runs.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, config, flat, rounding, with_value_head
from hand_made import PLAIN, unscored_samples

import update
from infra import parallel
from lm import lora
from lm import model as decoder
from lm.optim import Muon, adamw, train_last, trained

RANK, VOCABULARY = 3, 67
MATRICES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def new_model(family="qwen2"):
    """A random model of two layers, with biases that are not 0."""
    model = decoder.Model(config(VOCABULARY, model_type=family, tie_word_embeddings=True))
    decoder.init_weights(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=generator(1))
    return model


def adapted(model):
    """The model with adapters that change it."""
    lora.add(model, RANK, generator())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05, generator=generator(2))
    return model


@pytest.fixture
def ids_BT():
    return torch.randint(VOCABULARY, (4, 12), generator=generator())


@pytest.fixture
def samples():
    return unscored_samples()


def nll(logits_BTV, ids_BT):
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


# Against peft

@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="needs peft (requirements-test.txt)")


def theirs(peft, folder):
    """The folder's model in transformers, under peft, with new adapters."""
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=[*MATRICES], task_type="CAUSAL_LM")
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), settings)


def their_names(names):
    """{our name of an adapter: its name in a peft model}."""
    return {name: f"base_model.model.{name}.default.weight" for name in names if "lora_" in name}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_logits_and_gradients_are_pefts(peft, ids_BT, tmp_path, family):
    model = new_model(family)
    decoder.save_pretrained(model, tmp_path)
    adapted(model)
    peer = theirs(peft, tmp_path)
    own, other = dict(model.named_parameters()), dict(peer.named_parameters())
    names = their_names(own)
    assert {name for name, parameter in other.items() if parameter.requires_grad} == {*names.values()}
    assert len(names) == 2 * 2 * len(MATRICES)
    with torch.no_grad():
        for name, named in names.items():
            other[named].copy_(own[name])
    logits, expected = model(ids_BT), peer(ids_BT).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=rounding(expected))
    nll(logits, ids_BT).backward()
    nll(expected, ids_BT).backward()
    for name, named in names.items():
        assert_same(own[name].grad.flatten(), other[named].grad.flatten())
    assert all(own[name].grad is None for name in own.keys() - names.keys())


def test_peft_loads_what_is_saved_and_computes_the_same(peft, ids_BT, tmp_path):
    from transformers import AutoModelForCausalLM
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    model = new_model()
    decoder.save_pretrained(model, base)
    adapted(model)
    lora.save(parallel.full_weights(model), adapter, base)
    found = peft.PeftConfig.from_pretrained(adapter)
    assert (found.base_model_name_or_path, found.r, found.lora_alpha) == (str(base), RANK, 32)
    assert (found.lora_dropout, found.bias, {*found.target_modules}) == (0.0, "none", {*MATRICES})
    peer = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        expected = model(ids_BT)
        torch.testing.assert_close(peer(ids_BT).logits, expected, rtol=0, atol=rounding(expected))
        theirs, ours = peer.merge_and_unload().state_dict(), dict(lora.merged(weights_of(model)))
        assert len(ours) == 2 * 12 + 2
        for name, weight in ours.items():
            torch.testing.assert_close(theirs[name], weight, rtol=0, atol=rounding(weight))


def test_new_adapters_have_pefts_distribution(peft, tmp_path):
    """A is uniform with the same bound, and B is 0."""
    model = new_model()
    decoder.save_pretrained(model, tmp_path)
    lora.add(model, RANK, generator())
    own, other = dict(model.named_parameters()), dict(theirs(peft, tmp_path).named_parameters())
    for ours, named in their_names(own).items():
        for weight in (own[ours].detach(), other[named].detach()):
            if "lora_B" in ours:
                assert not weight.any()
            else:
                bound = weight.shape[1] ** -0.5
                assert 0.9 * bound < weight.abs().max() <= bound
                assert float(weight.std()) == pytest.approx(bound / 3 ** 0.5, rel=0.25)


# Merging

def test_new_adapters_and_disabled_ones_change_nothing(ids_BT):
    """Bit for bit; and after an error they are on again."""
    model, plain = new_model(), new_model()
    expected = plain(ids_BT)
    lora.add(model, RANK, generator())
    assert torch.equal(model(ids_BT), expected)
    changed = adapted(new_model())
    logits = changed(ids_BT)
    with pytest.raises(ZeroDivisionError), lora.disabled(changed) as same:
        assert same is changed and torch.equal(changed(ids_BT), expected)
        raise ZeroDivisionError
    assert torch.equal(changed(ids_BT), logits)


def test_merging_starts_new_adapters_and_moves_the_old_ones_into_the_weights(ids_BT):
    """Without its new adapters the model is the merged one, bit for bit; its parameters are the same."""
    model, plain = adapted(new_model()), new_model()
    logits, parameters, old = model(ids_BT), [*map(id, model.parameters())], weights_of(model)
    plain.load_state_dict(dict(lora.merged(model.state_dict())))
    lora.merge(model, generator(5))
    assert [*map(id, model.parameters())] == parameters
    torch.testing.assert_close(model(ids_BT), logits, rtol=0, atol=rounding(logits))
    for name, weight in model.named_parameters():
        assert "lora_B" not in name or not weight.any()
        assert "lora_A" not in name or not torch.equal(weight, old[name])
    with lora.disabled(model):
        assert torch.equal(model(ids_BT), plain(ids_BT))


def test_a_bf16_copy_has_a_small_update_where_a_merged_one_loses_it(ids_BT):
    """Weights on bf16's grid, as folders store them, and an update below half of its step: what a sampler's
    logits move is the trained model's move if the adapters stay apart.
    """
    model = new_model()
    model.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    before = model(ids_BT)
    lora.add(model, 4, generator(0))
    for layer in lora.adapted(model):
        torch.nn.init.normal_(layer.lora_B, std=1e-6, generator=generator(1))
    moved = model(ids_BT) - before
    merged, apart = new_model(), copy.deepcopy(model)
    merged.load_state_dict({name: weight.bfloat16() for name, weight in lora.merged(model.state_dict())})
    apart.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    assert moved.abs().max() > 0

    def share(sampler):
        return ((sampler(ids_BT) - before) * moved).sum() / (moved * moved).sum()

    assert share(merged) < 0.5 and abs(share(apart) - 1) < 0.1


def test_layers_with_adapters_are_not_fused(ids_BT):
    model = adapted(new_model())
    logits = model(ids_BT)
    model.requires_grad_(False).fuse()
    assert torch.equal(model(ids_BT), logits)
    assert all(block.self_attn.fused is block.mlp.fused is None for block in model.model.layers)


# Training

def full_gradients(model, samples):
    """{name: gradient} of the whole model in one update."""
    copied, found = copy.deepcopy(model).requires_grad_(True), {}
    optimizer = adamw(copied)
    optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in copied.named_parameters()
                                           if p.grad is not None})
    update.update(copied, optimizer, samples, PLAIN, lr=1e-3)
    return found


@pytest.mark.parametrize("make", [adamw, Muon])
@pytest.mark.parametrize("kind", ["lora", "last"])
def test_only_what_is_chosen_is_trained(model, samples, make, kind):
    """Gradients are those of the whole model; everything else keeps its bits, and no optimizer has a state of
    it."""
    if kind == "lora":
        lora.add(model, RANK, generator())
        chosen = {name for name, _ in model.named_parameters() if "lora_" in name}
    else:
        train_last(model, 1)
        chosen = {name for name, _ in model.named_parameters()
                  if name.startswith(("model.layers.1.", "model.norm."))}
    before, optimizer, seen = weights_of(model), make(model), []
    gradients, named, step = full_gradients(model, samples), dict(model.named_parameters()), optimizer.step
    optimizer.step = lambda: seen.append({name: p.grad.clone() for name, p in named.items()
                                          if p.grad is not None}) or step()
    for _ in range(2):                             # in the first step B is 0, and with it the gradient of A
        update.update(model, optimizer, copy.deepcopy(samples), PLAIN, lr=1e-2)
    assert seen[0].keys() == seen[1].keys() == chosen
    for name in chosen:
        torch.testing.assert_close(seen[0][name], gradients[name], rtol=1e-4, atol=1e-6)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == chosen == {name for name, p in named.items() if p.requires_grad}
    assert {id(p) for p in trained(model)} == {id(named[name]) for name in chosen}
    states = [state for part in getattr(optimizer, "parts", [optimizer]) for state in part.state.values()]
    assert len(states) == len(chosen)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_last_layers_norm_and_value_head_are_trained_and_no_embedding(model):
    headed = with_value_head(model)
    train_last(headed, 2)
    frozen = {name for name, p in headed.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight", "lm_head.weight"}
    tied = new_model()
    train_last(tied, 1)
    assert not tied.lm_head.weight.requires_grad
    with pytest.raises(ValueError, match="--train-layers=3: the model has 2 layers"):
        train_last(new_model(), 3)


def test_recomputed_layers_have_the_same_gradients(samples):
    """Also where the input of a recomputed layer needs no gradient."""
    for prepare in (lambda model: lora.add(model, RANK, generator()), lambda model: train_last(model, 1)):
        found = []
        for recompute in (False, True):
            model = new_model()
            prepare(model)
            model.recompute_layers(recompute)
            ids_BT = torch.randint(VOCABULARY, (2, 9), generator=generator(4))
            nll(model(ids_BT), ids_BT).backward()
            found.append(flat(p.grad for p in trained(model)))
        assert torch.equal(*found) and found[0].any()
