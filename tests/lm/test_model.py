"""Proves that lm/model.py is the decoder of Qwen2, Qwen3 and Llama: its logits and files equal transformers'.

    python -m pytest tests/lm/test_model.py
"""

import copy
import json

import pytest
import torch
from conftest import rounding
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from lm import attention
from lm import model as m
from lm.small import save_small_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def make_reference(family="qwen2", tied=False, heads=4, kv_heads=2, seed=0, rope={"rope_type": "default"}):
    """transformers' model with random weights, including biases and norms, which its init sets to 0 and 1.

    Qwen3's head size differs from hidden size / heads, as in Qwen3 0.6B, 4B and 32B.
    """
    torch.manual_seed(seed)
    make, shape, more = {"qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
                         "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
                         "llama": (LlamaForCausalLM, LlamaConfig, {})}[family]
    reference = make(shape(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_theta": 5e4} | rope, **more)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return reference


def load_both(folder, **kind):
    reference = make_reference(**kind)
    reference.save_pretrained(folder)
    return reference, m.load_pretrained(folder)


def small_config(**changes):
    sizes = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    return m.ModelConfig(**(sizes | changes))


def random_ids(rows, length, vocabulary=31):
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def make_model(seed=0, **changes):
    model = m.Model(small_config(**changes))
    m.init_weights(model, seed)
    return model


def append(model, cache, chunks, start):
    """Append a list of ids to each row, or none. Returns each row's logits, [T, V]."""
    rows, lengths = [b for b, chunk in enumerate(chunks) if chunk], [*map(len, chunks)]
    with torch.no_grad():
        layout = cache.append(rows, [start[b] for b in rows], [lengths[b] for b in rows])
        return model(torch.tensor([sum(chunks, [])]), layout)[0].split(lengths)


def assert_close(got, want):
    """Equal up to the order of floating-point sums."""
    torch.testing.assert_close(got, want, atol=rounding(want), rtol=0)


FAMILIES = ["qwen2", "qwen3", "llama"]
KINDS = [dict(tied=False), dict(tied=True), dict(heads=4, kv_heads=4), dict(heads=4, kv_heads=1),
         dict(family="qwen3"), dict(family="qwen3", tied=True), dict(family="qwen3", heads=4, kv_heads=1),
         dict(family="llama"), dict(family="llama", tied=True, heads=4, kv_heads=1),
         dict(family="llama", rope=LLAMA3)]
RAGGED, SINGLE = [[7, 3, 12], [5, 9, 1], [8, 0, 7]], [[1] * 20] * 3


# Against transformers


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_full_forward_equals_transformers(tmp_path, kind):
    reference, model = load_both(tmp_path, **kind)
    ids = random_ids(3, 40, vocabulary=97)
    with torch.no_grad():
        assert_close(model(ids), reference(ids).logits)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_fused_layers_compute_the_same_with_the_parameters_of_now(tmp_path, kind):
    reference, model = load_both(tmp_path, **kind)
    ids, parameters = random_ids(3, 40, vocabulary=97), dict(model.named_parameters())
    with pytest.raises(AssertionError, match="trained"):
        model.fuse()
    model.requires_grad_(False).fuse()
    assert dict(model.named_parameters()).items() == parameters.items()
    with torch.no_grad():
        for changed in (reference, model):
            for parameter in changed.parameters():
                parameter.mul_(1.1)
        assert_close(model(ids), reference(ids).logits)
    block = model.model.layers[0]
    assert block.self_attn.fused[0].data_ptr() == block.self_attn.q_proj.weight.data_ptr()
    assert block.mlp.fused[0].nbytes == 2 * block.mlp.up_proj.weight.nbytes and block.mlp.fused[1] is None


def assert_appends_equal(model, ids, pieces, expected):
    """Append pieces[b] ids to row b in turn, and compare the logits with `expected` each time."""
    cache, start = attention.Rectangle(model.config, 5, 24, torch.float32, "cpu"), [0, 0, 0]
    for turn in zip(*pieces, strict=True):
        chunks = [ids[b, start[b]:start[b] + n].tolist() for b, n in enumerate(turn)]
        logits = append(model, cache, chunks, start)
        for b, n in enumerate(turn):
            assert_close(logits[b], expected[b, start[b]:start[b] + n])
            start[b] += n


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("pieces", [RAGGED, SINGLE], ids=["ragged", "single"])
def test_appends_to_the_cache_equal_transformers(tmp_path, kind, pieces):
    """The appended chunks are ragged, one of them empty, or single tokens."""
    reference, model = load_both(tmp_path, **kind)
    ids = random_ids(3, 40, vocabulary=97)
    with torch.no_grad():
        expected = reference(ids).logits
    assert_appends_equal(model, ids, pieces, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_transformers(tmp_path, family):
    reference, model = load_both(tmp_path, family=family, tied=True)
    ids = random_ids(2, 15, vocabulary=97)
    model(ids).logsumexp(-1).sum().backward()
    reference(ids).logits.logsumexp(-1).sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_llama_3s_scaling_changes_far_positions_and_survives_saving(tmp_path):
    """At positions beyond the original length, every frequency: kept, between, divided."""
    reference, model = load_both(tmp_path, family="llama", rope=LLAMA3)
    position = torch.tensor([[0, 1, 63, 64, 500, 4000]])
    scaling = model.config.rope_scaling
    ours = m.rope_tables(position, 64, 5e4, torch.float32, scaling)
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters={"rope_theta": 5e4} | LLAMA3)
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), position)
    theirs[1][..., :32] *= -1                                          # ours: the sign with which they add
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:, :, 0], other, atol=4000 * rounding(1.0, 2), rtol=0)
    plain = m.rope_tables(position, 64, 5e4, torch.float32)
    assert (ours[0] - plain[0])[0, -1].abs().max() > 0.5 and torch.equal(ours[0][..., 0], plain[0][..., 0])
    model.config.save(tmp_path)
    assert m.ModelConfig.load(tmp_path) == model.config
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).config
    assert theirs.rope_parameters == reference.config.rope_parameters


def test_qwen3_without_a_head_size_gets_transformers_default(tmp_path):
    small_config(model_type="qwen3").save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "head_dim"}))
    assert m.ModelConfig.load(tmp_path).head_dim == Qwen3Config.from_pretrained(tmp_path).head_dim == 128


# The cache


def test_an_exported_row_is_a_copy():
    cache = attention.Rectangle(small_config(), 2, 8, torch.float32, "cpu")
    first, second = cache.export_row(0, 0, 3)
    cache.kv[0].fill_(1.0)
    assert first.shape == second.shape == (2, 2, 3, 4) and not first.any()


def test_a_cached_forward_refuses_gradients_and_a_length_beyond_the_cache():
    cache = attention.Rectangle(small_config(), 1, 8, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="no_grad"):
        cache.append([0], [0], [1])
    with torch.no_grad(), pytest.raises(AssertionError, match="9 tokens in rows with room for 8"):
        cache.append_one(slice(0, 1), torch.tensor([0]), torch.tensor([True]), 9)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_cache_decodes_close_to_float32(family):
    model = make_model(model_type=family)
    cache = attention.Rectangle(model.config, 1, 8, torch.bfloat16, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():    # to Qwen2's std 0.02, at which the bound below was measured
            if parameter.dim() == 2:
                parameter.mul_(0.02 * model.config.hidden_size ** 0.5)
        expected = model(torch.tensor([[1, 2, 3, 4]]))[0]
    for start, ids in ((0, [1, 2, 3]), (3, [4])):
        logits, = append(model.to(torch.bfloat16), cache, [ids], [start])
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits.float(), expected[start:start + len(ids)], atol=0.01, rtol=0)


# bf16 on a CPU

@pytest.mark.parametrize("bias", [False, True])
def test_bf16_products_in_fp32_equal_the_cpus_own_but_for_rounding(monkeypatch, bias):
    """Output and gradients, each against the exact product of the same bf16 numbers."""
    generator = torch.Generator().manual_seed(0)
    layer = m.Linear(40, 24, bias=bias).to(torch.bfloat16)
    x = torch.randn(m.MANY_ROWS, 40, generator=generator).bfloat16()
    up = torch.randn(m.MANY_ROWS, 24, generator=generator).bfloat16()

    def numbers(layer, x, up):
        x = x.detach().requires_grad_()
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], up)

    kinds, product = [], m.F.linear
    monkeypatch.setattr(m.F, "linear", lambda x, *more: (kinds.append(x.dtype), product(x, *more))[1])
    found = {}
    for slow in (False, True):
        monkeypatch.setattr(m, "slow_bf16", lambda slow=slow: slow)
        found[slow] = numbers(layer, x, up)
        layer(x[1:])                             # too few rows to convert weights
    assert kinds == [torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16]
    exact = numbers(copy.deepcopy(layer).double(), x.double(), up.double())
    for values in found.values():
        for value, want in zip(values, exact, strict=True):
            assert value.dtype == torch.bfloat16
            assert ((value - want).abs() <= 2**-8 * want.abs() + 2**-12).all()


def test_whether_bf16_is_slow_is_measured(monkeypatch):
    """A clock that runs faster while one kind of product is computed."""
    product = m.F.linear
    for slow in (torch.bfloat16, torch.float32):
        now = [0.0]

        def timed(x, weight, slow=slow, now=now):
            now[0] += 2.0 if x.dtype == slow else 1.0
            return product(x, weight)

        monkeypatch.setattr(m.F, "linear", timed)
        monkeypatch.setattr(m.time, "process_time", lambda now=now: now[0])
        assert m.slow_bf16.__wrapped__() == (slow == torch.bfloat16)


def test_whether_bf16_is_slow_is_measured_on_one_thread(monkeypatch):
    """On two a borderline CPU answers otherwise, and a resumed run measures before it sets their number."""
    product, threads = m.F.linear, set()
    monkeypatch.setattr(m.F, "linear", lambda *of: (threads.add(torch.get_num_threads()), product(*of))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        m.slow_bf16.__wrapped__()
        assert threads == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# Without positions


@pytest.mark.parametrize("layers, rope, same", [(1, False, True), (1, True, False), (2, False, False)])
def test_one_layer_without_positions_ignores_the_order_of_its_context(layers, rope, same):
    """A second layer does not ignore it: its inputs each depend on a prefix (arXiv:2203.16634)."""
    model, ids = make_model(num_hidden_layers=layers, rope=rope), random_ids(2, 12)
    order = torch.tensor([5, 2, 9, 0, 7, 10, 1, 4, 3, 8, 6, 11])               # the last token stays
    with torch.no_grad():
        before, after = model(ids)[:, -1], model(ids[:, order])[:, -1]
    difference = float((after - before).abs().max())
    assert difference <= rounding(before) if same else difference > 0.01


@pytest.mark.parametrize("pieces", [RAGGED, SINGLE], ids=["ragged", "single"])
def test_a_model_without_positions_computes_the_same_with_a_cache(pieces):
    model, ids = make_model(rope=False), random_ids(3, 40)
    with torch.no_grad():
        expected = model(ids)
        assert (expected - make_model()(ids)).abs().max() > 0.01           # same weights, with positions
    assert_appends_equal(model, ids, pieces, expected)


def test_a_model_without_positions_loads_here_and_transformers_refuses_it(tmp_path):
    """transformers 5 has no such model and fails on rope_type (transformers 4 would read rope_scaling)."""
    model, ids = make_model(rope=False, rope_theta=777.0), random_ids(2, 11)
    m.save_pretrained(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["rope_parameters"]["rope_type"] == "none" and "rope" not in raw
    again = m.load_pretrained(tmp_path)
    assert again.config == model.config and not again.config.rope
    assert not m.load_pretrained(tmp_path, value_head=True).config.rope
    with torch.no_grad():
        assert torch.equal(again(ids), model(ids))
    with pytest.raises(KeyError, match="none"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# Weights and files


def test_init_weights_are_determined_by_the_seed():
    one, same, other = make_model(seed=1), make_model(seed=1), make_model(seed=2)
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert ("norm" in name or "bias" in name) == torch.equal(a, c), name
    assert abs(one.model.embed_tokens.weight.std() - one.config.hidden_size ** -0.5) < 0.02
    assert (one.model.norm.weight == 1).all() and not one.model.layers[0].self_attn.q_proj.bias.any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_in_transformers_and_here(tmp_path, tied, family):
    model = make_model(tie_word_embeddings=tied, rope_theta=777.0, head_dim=6, eos_token_id=3,
                       model_type=family)
    with torch.no_grad():
        for parameter in model.parameters():     # including biases and norms, initialized to 0 and 1
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    m.save_pretrained(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    ids = random_ids(2, 11)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    again = m.load_pretrained(tmp_path)
    assert type(reference).__name__ == reference.config.architectures[0] == m.ARCHITECTURES[family]
    assert reference.config.eos_token_id == 3 and again.config == model.config
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert_close(model(ids), reference(ids).logits)
        assert torch.equal(model(ids), again(ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_files_are_read(tmp_path, family):
    reference = make_reference(family)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = m.load_pretrained(tmp_path).state_dict()
    assert loaded.keys() == reference.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in reference.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_dtype_is_converted_on_load_and_preserved_on_save(tmp_path, family):
    m.save_pretrained(make_model(model_type=family), tmp_path)
    half = m.load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    m.save_pretrained(half, tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


def test_save_pretrained_writes_the_given_weights(tmp_path):
    model = make_model()
    m.save_pretrained(model, tmp_path, ((name, t + 1) for name, t in model.named_parameters()))
    assert (m.load_pretrained(tmp_path).model.norm.weight == 2).all()


def test_a_tied_folder_may_contain_lm_head(tmp_path):
    model = make_model(tie_word_embeddings=True)
    m.save_pretrained(model, tmp_path)
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    ids = torch.arange(5)[None]
    assert torch.equal(m.load_pretrained(tmp_path)(ids), model(ids))


def test_a_tied_folder_with_another_lm_head_is_refused(tmp_path):
    """transformers does not tie it then."""
    model = make_model(tie_word_embeddings=True)
    m.save_pretrained(model, tmp_path)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["lm_head.weight"][3, 1] += 1e-3
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight is not the embedding; set tie_word_embeddings to"):
        m.load_pretrained(tmp_path)


def test_rope_theta_may_be_that_of_a_million_positions(tmp_path):
    small_config(rope_theta=3580165449.0, model_type="llama").save(tmp_path)      # Llama-3-8B-1048k's
    assert m.ModelConfig.load(tmp_path).rope_theta == 3580165449.0


def test_stop_tokens_are_those_of_both_files(tmp_path):
    """config.json's and generation_config.json's, which a saved folder lacks."""
    small_config(eos_token_id=5).save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    config = m.ModelConfig.load(tmp_path)
    assert config.eos_token_id == [5, 3]
    (tmp_path / "saved").mkdir()
    config.save(tmp_path / "saved")
    assert m.ModelConfig.load(tmp_path / "saved") == config
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "two"}')
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id='two': expected an id"):
        m.ModelConfig.load(tmp_path)


def test_rope_theta_is_read_from_either_field(tmp_path):
    small_config(rope_theta=5.0).save(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    for dropped in ("rope_theta", "rope_parameters"):
        path.write_text(json.dumps({k: v for k, v in raw.items() if k != dropped}))
        assert m.ModelConfig.load(tmp_path).rope_theta == 5.0


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gemma"}, "model_type='gemma' is not implemented; implemented: llama, qwen2, qwen3$"),
    ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
    ({"model_type": ["qwen3"]}, r"model_type=\['qwen3'\]"), ({"model_type": None}, "model_type=None"),
    ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True is not implemented"),
    ({"model_type": "llama", "attention_bias": True}, "attention_bias=True is not implemented"),
    ({"model_type": "llama", "mlp_bias": True}, "mlp_bias=True is not implemented"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
    ({"layer_types": ["full_attention"] * 5}, "num_hidden_layers=2, but layer_types lists 5"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config={'quant_method': 'awq'} is not"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"eos_token_id": "two"}, "eos_token_id='two'"), ({"eos_token_id": [1, "two"]}, "eos_token_id=.1, 'two'"),
    ({"rope_scaling": LLAMA3 | {"factor": None}}, "RoPE scaling's factor=None: expected a number above 0"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor=4.0: not below high_freq_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE scaling.*yarn"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "RoPE scaling.*linear"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}, "RoPE scaling.*yarn"),
    ({"hidden_size": None}, "hidden_size"),
    ({"vocab_size": None}, "vocab_size"),
    ({"hidden_size": "16"}, "hidden_size='16': expected an integer above 0"),
    ({"hidden_size": 0}, "hidden_size=0: expected an integer above 0"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"), ({"num_hidden_layers": 10**6}, "at most 1000"),
    ({"vocab_size": 10**12}, "vocab_size=1000000000000: expected an integer above 0 and up to 1e"),
    ({"num_attention_heads": [4]}, r"num_attention_heads=\[4\]"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"head_dim": 5}, "head_dim=5: RoPE needs an even number"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta=0: expected a number"),
    ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0: expected a number"),
    ({"rope_theta": float("nan"), "rope_parameters": None}, "rope_theta=nan"),
    ({"rope_parameters": {"rope_theta": 1e16}}, "rope_theta=1e.16: expected .* up to 1e.12"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': expected true or false"),
    ({"rope_scaling": "yarn"}, "rope_parameters='yarn'"), ({"layer_types": 3}, "layer_types=3"),
])
def test_unsupported_and_invalid_configs_are_refused(tmp_path, change, message):
    small_config().save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        m.ModelConfig.load(tmp_path)


@pytest.mark.parametrize("saved, declared, message", [
    ("qwen2", "qwen3", "unexpected tensor model.layers.0.self_attn.[kqv]_proj.bias"),
    ("qwen2", "llama", "unexpected tensor model.layers.0.self_attn.[kqv]_proj.bias"),
    ("qwen3", "qwen2", "unexpected tensor model.layers.0.self_attn.[kq]_norm.weight")])
def test_weights_of_the_other_family_are_refused(tmp_path, saved, declared, message):
    m.save_pretrained(make_model(model_type=saved), tmp_path)
    small_config(model_type=declared).save(tmp_path)
    with pytest.raises(ValueError, match=f"model.safetensors: {message}"):
        m.load_pretrained(tmp_path)


def break_tensors(change):
    def apply(folder):
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
    return apply


def write_index(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)


def test_an_old_llama_folders_rotary_frequencies_are_no_weights(tmp_path):
    model = make_model(model_type="llama")
    m.save_pretrained(model, tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    break_tensors(lambda state: state.update({name: torch.ones(2)}))(tmp_path)
    loaded = m.load_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_rope_parameters_come_before_a_rope_theta_outside(tmp_path):
    """As in transformers 5."""
    m.save_pretrained(make_model(), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    inside = "rope_parameters" if "rope_parameters" in raw else "rope_scaling"
    raw |= {"rope_theta": 5e5, inside: {"rope_type": "default", "rope_theta": 2e4}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert m.ModelConfig.load(tmp_path).rope_theta == 2e4
    raw[inside] = {"rope_type": "default"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert m.ModelConfig.load(tmp_path).rope_theta == 5e5


@pytest.mark.parametrize("damage, message", [
    (lambda f: (f / "config.json").unlink(), "config.json: not found"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: not JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json: expected a JSON object, found list"),
    (lambda f: (f / "model.safetensors").unlink(), "no model.safetensors and no .*index.json$"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model-00001-of-00002.bin"),
     "index.json; pytorch_model.bin is not read: load the folder in transformers and save_pretrained it"),
    (lambda f: (f / "config.json").rename(f / "adapter_config.json"),
     "config.json: not found; the folder is a PEFT adapter, to be merged into its base model first"),
    (lambda f: (f / "model.safetensors").write_bytes(b"hello"), "model.safetensors: not a safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-40]),
     "model.safetensors: not a safetensors file"),
    (break_tensors(lambda state: state.pop("model.norm.weight")), "missing tensor model.norm.weight"),
    (break_tensors(lambda state: state.update(extra=torch.zeros(1))),
     "model.safetensors: unexpected tensor extra"),
    (break_tensors(lambda state: state.update({"model.norm.weight": torch.zeros(3)})),
     r"model.safetensors: model.norm.weight has shape \(3,\), config.json implies \(16,\)"),
    (break_tensors(lambda state: state["model.norm.weight"].fill_(float("nan"))),
     "model.safetensors: model.norm.weight contains numbers that are not finite"),
    (break_tensors(lambda state: state["lm_head.weight"][3, 2:3].fill_(-float("inf"))), "lm_head.weight "),
    (break_tensors(lambda state: state.update({"model.norm.weight": torch.ones(16, dtype=torch.int32)})),
     "model.safetensors: model.norm.weight contains I32, not floats"),
    (lambda f: write_index(f, "{}"), "index.json: not an index"),
    (lambda f: write_index(f, "[" * 10**5), "index.json: not an index"),
    (lambda f: write_index(f, '{"weight_map": {"model.norm.weight": "part-1.safetensors"}}'),
     "part-1.safetensors: listed in model.safetensors.index.json, not found"),
])
def test_an_error_about_a_damaged_folder_names_the_file(tmp_path, damage, message):
    m.save_pretrained(make_model(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        m.load_pretrained(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_the_weights_file_has_the_permissions_of_config_json(tmp_path):
    m.save_pretrained(make_model(), tmp_path)
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    make_model().config.save(tmp_path)
    (tmp_path / "model.safetensors").mkdir()               # cannot be written either
    with pytest.raises(OSError, match=f"{tmp_path}/model.safetensors: "):
        m.save_pretrained(make_model(), tmp_path)


def test_an_error_about_a_missing_folder_names_it(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        m.load_pretrained(tmp_path / "nowhere")


# The value head


def model_with_value_head(**changes):
    model = make_model(value_head=True, **changes)
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(3))
    torch.nn.init.constant_(model.value_head.bias, 0.5)
    return model


def test_a_value_head_starts_at_zero_and_changes_no_other_weight():
    plain, headed = make_model(seed=4).state_dict(), make_model(seed=4, value_head=True).state_dict()
    assert headed.keys() - plain.keys() == {"value_head.weight", "value_head.bias"}
    assert all(torch.equal(headed[name], tensor) for name, tensor in plain.items())
    assert not headed["value_head.weight"].any() and not headed["value_head.bias"].any()


def test_every_head_reads_the_same_hidden_states():
    model, ids = model_with_value_head(), random_ids(3, 9)
    columns = torch.tensor([8, 4, 4])
    with torch.no_grad():
        hidden, logits = model(ids, head="hidden"), model(ids)
        value = hidden @ model.value_head.weight[0] + 0.5
        assert_close(hidden @ model.lm_head.weight.T, logits)
        assert_close(model(ids, head="value"), value)
        assert value.shape == (3, 9) and value.std() > 0.1
        assert_close(model(ids[:1], column_N=columns, head="value"), value[0, columns])
        assert_close(model(ids[:1], column_N=columns, head="hidden"), hidden[0, columns])
        both = model(ids[:1], column_N=columns, head=lambda hidden, lm_head: (hidden, lm_head(hidden)))
    for got, want in zip(both, (hidden, logits), strict=True):
        assert_close(got, want[0, columns])
    with pytest.raises(AssertionError, match="no head 'logits'"):
        model(ids, head="logits")


def test_a_value_is_fp32_in_a_bf16_model():
    """A product in bf16 would have a relative error of up to 2^-9."""
    model, ids = model_with_value_head().to(torch.bfloat16), random_ids(2, 9)
    with torch.no_grad():
        value, hidden = model(ids, head="value"), model(ids, head="hidden")
    assert (value.dtype, hidden.dtype) == (torch.float32, torch.bfloat16)
    assert_close(value, hidden.float() @ model.value_head.weight[0].float() + 0.5)


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_with_a_value_head_loads_here_and_in_transformers(tmp_path, tied):
    model, ids = model_with_value_head(tie_word_embeddings=tied), random_ids(2, 11)
    m.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["value_head"] is True
    again, reference = m.load_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config == model.config
    with torch.no_grad():
        assert torch.equal(again(ids, head="value"), model(ids, head="value"))
        assert_close(reference(ids).logits, model(ids))
    kept = m.load_pretrained(tmp_path, value_head=True)           # not replaced by zeros
    assert torch.equal(kept.value_head.weight, model.value_head.weight)


def test_a_value_head_of_zeros_is_added_on_request(tmp_path):
    model, ids = make_model(tie_word_embeddings=True), random_ids(2, 11)
    m.save_pretrained(model, tmp_path)
    assert not hasattr(m.load_pretrained(tmp_path), "value_head")
    headed = m.load_pretrained(tmp_path, value_head=True)
    assert headed.config.value_head and torch.equal(headed(ids), model(ids))
    assert not headed(ids, head="value").any()


def test_an_error_about_a_missing_value_head_names_its_tensor(tmp_path):
    m.save_pretrained(make_model(), tmp_path)
    small_config(value_head=True).save(tmp_path)
    with pytest.raises(ValueError, match="missing tensor value_head.bias"):
        m.load_pretrained(tmp_path, value_head=True)


# Tokenizers


def test_a_tokenizer_that_loses_text_is_refused(tmp_path):
    """From a word-level tokenizer and a qwen2 config, AutoTokenizer makes one that encodes any text to []."""
    word_level = Tokenizer(models.WordLevel({"drawer": 0, "go": 1}, unk_token="go"))
    word_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    small_config().save(tmp_path)
    with pytest.raises(ValueError, match="loses text"):
        m.load_tokenizer(tmp_path)


def test_text_is_split_as_tokenizer_json_says(tmp_path):
    """transformers' GPT2Tokenizer has no rule for digits of its own."""
    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    byte_level.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level.train_from_iterator(["mug 12.\n\n1.  22"] * 9, trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False))
    byte_level.save(str(tmp_path / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<end>")
    settings = json.dumps({"tokenizer_class": "GPT2Tokenizer"} | named)
    (tmp_path / "tokenizer_config.json").write_text(settings)
    small_config().save(tmp_path)
    for text in ("mug 12.\n\n1.  22", "You see a drawer 1, and\n\n2 mugs."):
        ids = m.load_tokenizer(tmp_path).encode(text, add_special_tokens=False)
        assert ids == byte_level.encode(text, add_special_tokens=False).ids
    assert "\u010a\u010a" in byte_level.encode("mug 12.\n\n1.").tokens


def test_a_special_token_without_an_id_is_an_error_of_the_tokenizer(tmp_path):
    """transformers looks an unknown unk_token up as the unk_token, without end."""
    save_small_model(tmp_path, ["go"], 16, 1, 64, True, True, 0)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": ""}))
    with pytest.raises(ValueError, match="tokenizer_config.json: RecursionError"):
        m.load_tokenizer(tmp_path)


def test_an_error_about_a_missing_tokenizer_names_its_file(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: not found"):
        m.load_tokenizer(tmp_path)
