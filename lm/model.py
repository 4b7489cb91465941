"""The decoder of Qwen2, Qwen3 (dense) and Llama in plain PyTorch, used for both sampling and training.

Parameter names, config.json and safetensors files follow Hugging Face, so either library loads the other's
folders. Which keys a query attends to is decided by an attention layout (lm/attention.py).
Left out: dropout, sliding windows, RoPE scaling other than Llama 3's.
Shapes: B rows, T positions of a chunk, V vocabulary, H query heads, K key/value heads, D head size, F = D / 2
frequencies of RoPE, C hidden size, N selected positions.
"""

import hashlib
import json
import math
import shutil
import time
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from infra import files, parallel
from lm.attention import Rows

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# Llama 3's RoPE scaling, by config.json's names in the order of ModelConfig.rope_scaling
SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
VALUE_HEAD = "value_head.weight", "value_head.bias"
INDEX = "model.safetensors.index.json"                       # which file holds which tensor, if several do
LARGEST = 1e9                                                # the largest number that config.json may contain
LARGEST_THETA = 1e12                                         # but for rope_theta: of long contexts over 1e10
MANY_ROWS = 256         # of a matrix product: fewer do not pay for the conversion of the weights, see Linear
MARGIN = 1.2            # how much slower bf16 has to be: what is nearly as fast is not decided by chance
TYPE_NAMES = {int: "an integer", float: "a number"}          # in error messages


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2, Qwen3 or Llama model, with Hugging Face's field names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None              # not used, only saved again
    eos_token_id: int | list | None = None       # the same, with generation_config.json's: for lm.chat
    value_head: bool = False    # not in Hugging Face, which ignores it; True: a second head with one output
    rope: bool = True           # not in Hugging Face; False: no position encoding, saved as rope_type "none"
    rope_scaling: tuple | None = None      # the values of SCALING, for rope_type "llama3"
    model_type: str = "qwen2"   # one of ARCHITECTURES; what differs between them is in Attention

    @classmethod
    def load(cls, folder):
        """Read `folder`/config.json. ValueError names the file and the missing or unsupported field."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(files.not_found(path))
        raw, ends = json_object(path), declared_ends(folder)
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}    # in transformers 4 and 5
        if not isinstance(rope, dict) or not isinstance(raw.get("layer_types") or [], list):
            raise ValueError(f"{path}: rope_parameters={rope!r}, layer_types={raw.get('layer_types')!r}: "
                             "expected an object and a list")
        implemented = {
            "model_type": raw.get("model_type") in [*ARCHITECTURES],
            "attention_bias": raw.get("model_type") == "qwen2" or not raw.get("attention_bias"),
            "mlp_bias": not raw.get("mlp_bias"),
            "hidden_act": raw.get("hidden_act", "silu") == "silu",
            "quantization_config": not raw.get("quantization_config"),
            "use_sliding_window": not raw.get("use_sliding_window"),
            "layer_types": all(kind == "full_attention" for kind in raw.get("layer_types") or ()),
            "RoPE scaling": (kind := rope.get("rope_type", rope.get("type", "default"))) in
                            ("default", "none", "llama3") and            # and the same one in all layers
                            not any(isinstance(value, dict) for value in rope.values()),
        }
        if unsupported := [name for name, supported in implemented.items() if not supported]:
            found = (raw | {"RoPE scaling": rope}).get(unsupported[0])
            known = f"; implemented: {', '.join(sorted(ARCHITECTURES))}" * (unsupported[0] == "model_type")
            raise ValueError(f"{path}: {unsupported[0]}={found!r:.200} is not implemented{known}")
        values = {field.name: raw[field.name] for field in fields(cls) if raw.get(field.name) is not None}
        values["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        values["rope"], values["rope_scaling"] = kind != "none", None
        if kind == "llama3":
            values["rope_scaling"] = tuple(rope.get(name) for name in SCALING)
        if rope.get("rope_theta") is not None:               # transformers 5 prefers it to the field outside
            values["rope_theta"] = rope["rope_theta"]
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if values["model_type"] == "qwen3":
            values.setdefault("head_dim", 128)     # transformers' default at any width
        elif type(width) is type(heads) is int and heads > 0:
            values.setdefault("head_dim", width // heads)
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"{path}: no value for {', '.join(missing)}")
        config = cls(**values)
        if error := config.validation_error():
            raise ValueError(f"{path}: {error}")
        kinds = raw.get("layer_types")
        if isinstance(kinds, list) and len(kinds) != config.num_hidden_layers:
            raise ValueError(f"{path}: num_hidden_layers={config.num_hidden_layers}, but layer_types lists "
                             f"{len(kinds)}")
        return config

    def validation_error(self):
        """The first invalid field, as a message with its name and value; "" if all are valid."""
        for field in fields(self):
            value, is_number = getattr(self, field.name), field.type in (int, float)
            largest = LARGEST_THETA if field.name == "rope_theta" else LARGEST
            if is_number and not (type(value) in (int, field.type) and 0 < value <= largest):
                expected = f"{TYPE_NAMES[field.type]} above 0 and up to {largest:g}"
                return f"{field.name}={value!r}: expected {expected}"
            if field.type is bool and type(value) is not bool:
                return f"{field.name}={value!r}: expected true or false"
        for name, value in zip(SCALING, self.rope_scaling or ()):
            if type(value) not in (int, float) or not 0 < value <= LARGEST:
                return f"RoPE scaling's {name}={value!r}: expected a number above 0 and up to {LARGEST:g}"
        if self.rope_scaling and not self.rope_scaling[1] < self.rope_scaling[2]:
            return (f"RoPE scaling's low_freq_factor={self.rope_scaling[1]}: not below "
                    f"high_freq_factor={self.rope_scaling[2]}")
        if self.num_attention_heads % self.num_key_value_heads:
            return (f"num_attention_heads={self.num_attention_heads}: not a multiple of "
                    f"num_key_value_heads={self.num_key_value_heads}")
        if self.num_hidden_layers > 1000:
            return f"num_hidden_layers={self.num_hidden_layers}: expected at most 1000"
        if self.head_dim % 2:
            return f"head_dim={self.head_dim}: RoPE needs an even number"
        return ""

    def save(self, folder, dtype=torch.float32):
        """Write `folder`/config.json in a form that both transformers 4 and 5 read."""
        rope = {"rope_theta": self.rope_theta, "rope_type": "default" if self.rope else "none"}
        if self.rope_scaling:
            rope |= {"rope_type": "llama3"} | dict(zip(SCALING, self.rope_scaling))
        raw = {"architectures": [ARCHITECTURES[self.model_type]], "model_type": self.model_type,
               "hidden_act": "silu", **asdict(self), "rope_parameters": rope, "use_sliding_window": False,
               "torch_dtype": str(dtype).removeprefix("torch.")}
        raw["rope_scaling"] = rope if self.rope_scaling else None             # where transformers 4 looks
        if not raw.pop("rope"):
            raw["rope_scaling"] = {"rope_type": "none"}       # so that transformers 4 refuses the folder, too
        (Path(folder) / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def json_object(path):
    """The JSON object in a file, {} if it is absent. ValueError names the file."""
    raw = files.read_json(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def declared_ends(folder):
    """The ids of eos_token_id in a folder's config.json and generation_config.json, where these files exist.

    ValueError names the file with something else in its place.
    """
    found = []
    for path in (Path(folder) / "config.json", Path(folder) / "generation_config.json"):
        value = json_object(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise ValueError(f"{path}: eos_token_id={value!r}: expected an id or a list of ids")
        found += ids
    return [*dict.fromkeys(found)]


def rope_tables(position_BT, head_dim, theta, dtype, scaling=None):
    """[cos, cos] and [-sin, sin] of the angles position * theta^(-2i / D), [B, T, 1, D] each; RoFormer,
    arXiv:2104.09864 §3.2.2.

    scaling: ModelConfig.rope_scaling, of Llama 3.1 and later (arXiv:2407.21783 stretches 8,192 positions; the
    formula is that of Meta's and Hugging Face's code). A frequency f, which makes n = original f / (2 pi)
    rotations within the original length, is divided by `factor` where n < low_freq_factor and kept where
    n > high_freq_factor; between the two the result is interpolated linearly in n.
    Computed in fp32 in each forward: a stored table would be lost when a model is moved from the meta device
    and rounded when it is cast to bf16.
    """
    even_F = torch.arange(0, head_dim, 2, device=position_BT.device).float()
    frequency_F = 1.0 / theta ** (even_F / head_dim)
    if scaling:
        factor, low, high, original = scaling
        kept_F = ((original * frequency_F / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        frequency_F = frequency_F * (kept_F + (1 - kept_F) / factor)
    angle_BT1F = position_BT[:, :, None, None] * frequency_F
    cos, sin = angle_BT1F.cos().to(dtype), angle_BT1F.sin().to(dtype)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


class Linear(nn.Linear):
    """A linear layer that multiplies bf16 matrices in fp32 on a CPU that is faster that way.

    bf16 numbers have the same product in fp32, and both ways add up in fp32 before they round to bf16: they
    differ by the order of the sum.
    """

    def forward(self, x):
        return linear(x, self.weight, self.bias)


def linear(x, weight, bias):
    """`Linear.forward` with these weights."""
    on_cpu = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    if on_cpu and x.numel() >= MANY_ROWS * x.shape[-1] and slow_bf16():
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, weight, bias)


@torch.no_grad()
def adjacent(layers):
    """Lay the weights of linear layers of the same input one after the other in memory, and their biases.

    Returns (weight, bias) of one layer that computes all of them; each layer's own are views of these.
    """
    found = []
    for name in ("weight", "bias"):
        parts = [part for layer in layers if (part := getattr(layer, name)) is not None]
        found.append(torch.cat(parts) if parts else None)
        for part, view in zip(parts, found[-1].split([*map(len, parts)]) if parts else ()):
            part.data = view
    return found


@contextmanager
def one_thread():
    """A block in which torch computes on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def slow_bf16():
    """Whether one thread of this CPU multiplies bf16 matrices more slowly than their conversions to fp32.

    Measured, since no list of instructions tells: with AVX-512's, an AMD is twice as fast as in fp32 and an
    Intel half as fast; without any, bf16 takes two to a hundred times fp32's time. On one thread, since a
    resumed run, which measures before its model sets their number, must find what the run found.
    """
    x, weight = torch.ones(MANY_ROWS, 512, dtype=torch.bfloat16), torch.ones(1024, 512, dtype=torch.bfloat16)

    def seconds(product):
        times = [time.process_time()]                        # which other processes do not lengthen
        for _ in range(5):
            product()
            times.append(time.process_time())
        return min(b - a for a, b in zip(times, times[1:]))

    with torch.no_grad(), one_thread():
        return seconds(lambda: F.linear(x, weight)) > MARGIN * seconds(
            lambda: F.linear(x.float(), weight.float()).bfloat16())


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads (grouped-query attention).

    The only difference between the three families is here: Qwen2 has biases on q, k and v; Llama has none;
    nor has Qwen3, which applies an RMSNorm over the head size to each query and key before RoPE.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        biased, self.normed = config.model_type == "qwen2", config.model_type == "qwen3"
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim, bias=biased)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=biased)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=biased)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if self.normed:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.fused = None               # (weight, bias) of q, k and v: see Model.fuse

    def forward(self, x_BTC, cos, sin, layout):
        B, T, _ = x_BTC.shape
        if self.fused:
            qkv = linear(x_BTC, *self.fused).view(B, T, -1, self.head_dim)
            qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        else:
            qk = torch.cat([self.q_proj(x_BTC), self.k_proj(x_BTC)], dim=-1).view(B, T, -1, self.head_dim)
            v = self.v_proj(x_BTC).view(B, T, self.kv_heads, self.head_dim)
        if self.normed:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        a, b = qk.chunk(2, dim=-1)    # RoPE rotates pairs (i, i + D / 2), as Hugging Face does
        rotated = torch.addcmul(qk * cos, torch.cat([b, a], dim=-1), sin)
        q, k = rotated.split([self.heads, self.kv_heads], dim=2)
        return self.o_proj(layout.attend(self.layer, q, k, v))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.fused = None               # (weight, bias) of gate and up: see Model.fuse

    def forward(self, x_BTC):
        if self.fused:
            gate, up = linear(x_BTC, *self.fused).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x_BTC), self.up_proj(x_BTC)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One decoder layer: attention, then an MLP, each with a pre-RMSNorm and a residual connection."""

    recompute = False    # True: store only the layer's input for backward, which recomputes the rest

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BTC, cos, sin, layout):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.layer, x_BTC, cos, sin, layout, use_reentrant=False,
                              preserve_rng_state=False)
        return self.layer(x_BTC, cos, sin, layout)

    def layer(self, x_BTC, cos, sin, layout):
        """The layer's computation, without checkpointing."""
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos, sin, layout)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))


class Model(nn.Module):
    """A decoder with a language-model head and, optionally, a value head.

    Its weights are torch's defaults until `init_weights` or `load_pretrained` sets them.
    """

    compute_dtype = torch.float32      # of a training forward; `parallel.shard` may change it

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()    # Hugging Face's name for all but the heads
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.value_head:
            self.value_head = nn.Linear(config.hidden_size, 1)
        self.tie_weights()

    def tie_weights(self):
        """Share the embedding with lm_head if the config ties them; needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def fuse(self):
        """Compute q, k and v of a layer as one product, and gate and up, for which their weights are moved in
        memory: faster for few tokens, and the parameters are the same. Layers with adapters are left out. Not
        for a model that is trained, or that is moved or copied afterwards.
        """
        assert not any(parameter.requires_grad for parameter in self.parameters()), "it is trained"
        for block in self.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for part, layers in ((attention, [attention.q_proj, attention.k_proj, attention.v_proj]),
                                 (mlp, [mlp.gate_proj, mlp.up_proj])):
                if all(type(layer) is Linear for layer in layers):
                    part.fused = adjacent(layers)

    def recompute_layers(self, enabled):
        """Turn activation checkpointing of every layer on or off (arXiv:1604.06174).

        When on, backward recomputes each layer from its input, so that one layer's activations are in memory
        at a time.
        """
        for block in self.model.layers:
            block.recompute = enabled

    def forward(self, ids_BT, layout=None, column_N=None, head="lm"):
        """Logits [B, T, V], or [N, V] at the positions column_N of the first row, the only one then.

        layout: an attention layout of lm.attention; None: `Rows`, each row causal from position 0.
        head: what to compute from the final hidden states:
            "lm"      logits
            "value"   the value head's output in fp32, [B, T] or [N]
            "hidden"  the hidden states themselves, [B, T, C] or [N, C]
            function  head(hidden, lm_head), called inside the forward, where FSDP has gathered lm_head
        """
        x_BTC, layout = self.model.embed_tokens(ids_BT), layout or Rows(ids_BT.shape[1], ids_BT.device)
        position_BT = layout.position_BT
        if not self.config.rope:
            position_BT = torch.zeros_like(position_BT)         # a rotation by 0 changes nothing
        cos, sin = rope_tables(position_BT, self.config.head_dim, self.config.rope_theta, x_BTC.dtype,
                               self.config.rope_scaling)
        for block in self.model.layers:
            x_BTC = block(x_BTC, cos, sin, layout)
        hidden = self.model.norm(x_BTC if column_N is None else x_BTC[0, column_N])
        if head == "value":    # in fp32: bf16 has three digits, and returns differ in the third
            return hidden.float() @ self.value_head.weight[0].float() + self.value_head.bias.float()
        if callable(head):
            return head(hidden, self.lm_head)
        assert head in ("lm", "hidden"), f"no head {head!r}"
        return self.lm_head(hidden) if head == "lm" else hidden


def count_parameters(config):
    """Number of parameters of a model with this config."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(config).parameters())


@torch.no_grad()
def init_weights(model, seed):
    """Initialize all weights: normal with std 1 / sqrt(hidden size), biases and value head 0, norms 1.

    The same seed gives the same weights on any device; a value head changes no other weight. At Qwen2's
    widths this std is close to Qwen2's own, 0.02; at widths 64 to 96, 0.02 makes learning to copy slow.
    """
    generator, std = torch.Generator().manual_seed(seed), model.config.hidden_size ** -0.5
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif name.endswith("bias") or name.startswith("value_head"):
            parameter.zero_()
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


@torch.no_grad()
def save_pretrained(model, folder, weights=None):
    """Write config.json and the weights into an existing folder.

    weights: (name, tensor) pairs to write in place of the model's parameters; a tied lm_head is not one. The
    weights of a model that several ranks share are gathered one by one, and each rank writes a file of about
    as many bytes: model-00001-of-00008.safetensors, listed in an index, as Hugging Face's libraries do. All
    of these ranks call it, with a folder that all see.
    """
    (rank, ranks), own, writer_of = parallel.writers(model), {}, {}
    written, total = 0, sum(parameter.nbytes for parameter in model.parameters())
    for name, tensor in weights or model.named_parameters():
        full = parallel.full_tensor(tensor).detach()
        writer_of[name] = min(written * ranks // total, ranks - 1)
        written += full.nbytes
        if writer_of[name] == rank:
            own[name] = full.cpu().contiguous()
    names = {writer: f"model-{k:05d}-of-{len({*writer_of.values()}):05d}.safetensors"
             for k, writer in enumerate(sorted({*writer_of.values()}), start=1)}
    names = names if len(names) > 1 else dict.fromkeys(names, "model.safetensors")

    def describe():
        model.config.save(folder, dtype=full.dtype)
        if len(names) > 1:
            index = {"metadata": {"total_size": written},
                     "weight_map": {name: names[writer] for name, writer in writer_of.items()}}
            (Path(folder) / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write():
        path = Path(folder) / names[rank]
        try:
            save_file(own, path, metadata={"format": "pt"})
        except (SafetensorError, OSError) as error:                     # neither error names the file
            raise OSError(f"{path}: {error}") from None
        shutil.copymode(path.with_name("config.json"), path)    # safetensors makes it its owner's alone

    if ranks == 1:
        describe()
        write()
    else:
        parallel.on_rank0(describe)
        parallel.collective(lambda: write() if own else None)


def load_pretrained(folder, dtype=torch.float32, device="cpu", value_head=None):
    """Load the model of a Hugging Face folder; see `open_pretrained` and `load_weights`."""
    model = open_pretrained(folder, value_head).to(dtype)
    model.compute_dtype = dtype
    load_weights(parallel.with_memory(model, device), folder)
    return model


def open_pretrained(folder, value_head=None):
    """The model of a Hugging Face folder on the meta device, without weights.

    value_head: whether the model has a value head; None: if the folder has one. ValueError names the file or
    tensor that is not as expected.
    """
    config = ModelConfig.load(folder)
    with torch.device("meta"):
        model = Model(config)
        check_tensors(folder, model)
        if config.tie_word_embeddings:
            check_tied(folder)
        if value_head in (None, config.value_head):
            return model
        return Model(replace(config, value_head=value_head))


def load_weights(model, folder):
    """Read a folder's weights into a model of `open_pretrained` that has memory, of a sharded one only this
    rank's part.

    A value head that the folder lacks becomes zeros. ValueError for numbers that are not finite.
    """
    targets = dict(model.named_parameters())
    missing = {*targets} & {*VALUE_HEAD}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name not in targets:    # a tied lm_head (the embedding is used), an unwanted value head
                    continue
                missing.discard(name)
                parallel.copy_part(targets[name], file.get_slice(name))
                if not parallel.own_rows(targets[name])[0].isfinite().all():
                    raise ValueError(f"{path}: {name} contains numbers that are not finite")
    for name in missing:
        parallel.own_rows(targets[name])[0].zero_()


def check_tensors(folder, model):
    """ValueError unless a folder's files hold exactly the model's tensors; a tied lm_head is optional."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing = set(shapes) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name.endswith("rotary_emb.inv_freq"):            # in old Llama folders: not a weight
                        continue
                    if name not in shapes:
                        raise ValueError(f"{path}: unexpected tensor {name}")
                    found, expected = file.get_slice(name), shapes[name]
                    if (shape := tuple(found.get_shape())) != expected:
                        raise ValueError(f"{path}: {name} has shape {shape}, config.json implies {expected}")
                    if not found.get_dtype().startswith(("F", "BF")):
                        raise ValueError(f"{path}: {name} contains {found.get_dtype()}, not floats")
                    missing.discard(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from None
    if missing:
        raise ValueError(f"{folder}: missing tensor {min(missing)} ({len(missing)} missing in all)")


def check_tied(folder):
    """ValueError if a tied lm_head is stored and is not the embedding, as after merging an adapter on it."""
    names, paths = ("model.embed_tokens.weight", "lm_head.weight"), {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            paths |= {name: path for name in names if name in file.keys()}
    if len(paths) < 2:
        return
    with torch.device("cpu"), ExitStack() as opened:
        tensors = [opened.enter_context(safe_open(paths[name], framework="pt")).get_tensor(name)
                   for name in names]
        if not torch.equal(*tensors):
            raise ValueError(f"{paths[names[1]]}: lm_head.weight is not the embedding; set "
                             "tie_word_embeddings to false in config.json")


def weights_hash(folder):
    """The first 16 hex digits of a SHA-256 over a folder's safetensors files."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def weight_files(folder):
    """Paths of a folder's safetensors files: a single one, or the shards listed in its index."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder}: no {single.name} and no {index.name}" + (
            "; pytorch_model.bin is not read: load the folder in transformers and save_pretrained it"
            if any(Path(folder).glob("pytorch_model*.bin")) else ""))
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        paths = [Path(folder) / name for name in sorted(set(names))]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: not an index of safetensors files: {error!r}") from None
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"{missing[0]}: listed in {index.name}, not found")
    return paths


def load_tokenizer(folder):
    """Load a folder's tokenizer with AutoTokenizer, with the folder's `declared_ends` as an attribute.

    Texts are split as tokenizer.json says, if it does: for some classes, such as GPT2Tokenizer, transformers
    5 puts another rule in its place, and SmolLM2's digits would be other tokens than those it was trained on.
    ValueError if there is no tokenizer, or one that loses text.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer  # takes seconds to import; only this function needs it

    if not (path := Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{path}: not found")
    sample = "You see a drawer 1, and\n  a caf\u00e9's mug 12.\n\n> go to drawer 1"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if (rule := Tokenizer.from_file(str(path)).pre_tokenizer) is not None:
            tokenizer.backend_tokenizer.pre_tokenizer = rule
        back = tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False))
        max(tokenizer.get_vocab().values()), tokenizer.all_special_ids    # raise here if they will later
    except Exception as error:              # the libraries raise a dozen types of errors for a broken file
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder}: tokenizer.json or tokenizer_config.json: {reason}") from None
    if back != sample:
        raise ValueError(f"{folder}: the tokenizer loses text: {sample!r} comes back as {back!r}")
    tokenizer.declared_ends = declared_ends(folder)           # for the chat, which has no other of its files
    return tokenizer
