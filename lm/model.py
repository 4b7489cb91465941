"""The decoder of Qwen2 and Qwen3 (dense) in plain PyTorch, for sampling and training alike, and the small
model's tokenizer.

Parameter names, config.json and safetensors files are Hugging Face's, so folders load both ways. Left out:
dropout, sliding windows, RoPE scaling. What a token sees is lm/attention.py's. B rows, T positions of a
chunk, V vocabulary, H query heads, K key/value heads, D head size, C hidden size, N selected positions.
"""

import hashlib
import json
import shutil
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import nn
from torch.utils.checkpoint import checkpoint

from lm.attention import Rows

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|im_end|>")
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LARGEST, WORDS = 1e9, {int: "a whole number", float: "a number"}      # of what config.json may say
ALIKE = 0.7                  # of a head's queries that begin as its keys
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|im_end|>"
    "{% else %}{{ raise_exception('this chat has user and assistant, not ' + message.role) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2 or Qwen3 model, in Hugging Face's words."""

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
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    value_head: bool = False    # ours: a second head with one output; transformers ignores it and its tensors
    rope: bool = True           # False, ours: no position encoding; written as a rope_type nobody else knows
    model_type: str = "qwen2"   # or "qwen3": norms of queries and keys in place of biases on q, k and v

    @classmethod
    def load(cls, folder):
        """Read `folder`/config.json. ValueError names the file and what is missing or not implemented."""
        path = Path(folder) / "config.json"
        if not path.parent.is_dir():
            raise ValueError(f"{folder}: no such folder")
        if not path.is_file():
            raise ValueError(f"{path}: not found")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"{path}: expected a JSON object, found {type(raw).__name__}")
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}    # transformers 4's name, and 5's
        if not isinstance(rope, dict) or not isinstance(raw.get("layer_types") or [], list):
            raise ValueError(f"{path}: rope_parameters={rope!r}, layer_types={raw.get('layer_types')!r}: "
                             "expected an object and a list")
        implemented = {
            "model_type": raw.get("model_type") in [*ARCHITECTURES],
            "attention_bias": raw.get("model_type") == "qwen2" or not raw.get("attention_bias"),
            "hidden_act": raw.get("hidden_act", "silu") == "silu",
            "use_sliding_window": not raw.get("use_sliding_window"),
            "layer_types": all(kind == "full_attention" for kind in raw.get("layer_types") or ()),
            "eos_token_id": isinstance(raw.get("eos_token_id"), int | None),
            "RoPE scaling": rope.get("rope_type", rope.get("type", "default")) in ("default", "none"),
        }
        if refused := [name for name, fine in implemented.items() if not fine]:
            found = (raw | {"RoPE scaling": rope}).get(refused[0])
            raise ValueError(f"{path}: {refused[0]}={found!r} is not implemented")
        values = {field.name: raw[field.name] for field in fields(cls) if raw.get(field.name) is not None}
        values["rope"] = rope.get("rope_type") != "none"
        values.setdefault("rope_theta", rope.get("rope_theta", cls.rope_theta))
        values.setdefault("num_key_value_heads", values.get("num_attention_heads"))
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if values["model_type"] == "qwen3":
            values.setdefault("head_dim", 128)     # transformers' default, whatever the width
        elif type(width) is type(heads) is int and heads > 0:
            values.setdefault("head_dim", width // heads)
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ValueError(f"{path}: no value for {', '.join(missing)}")
        config = cls(**values)
        if wrong := config.impossible():
            raise ValueError(f"{path}: {wrong}")
        return config

    def impossible(self):
        """What no model can have: a sentence with the name and the value, or ""."""
        for field in fields(self):
            value, number = getattr(self, field.name), field.type in (int, float)
            if number and not (type(value) in (int, field.type) and 0 < value <= LARGEST):
                return f"{field.name}={value!r}: expected {WORDS[field.type]} above 0 and up to {LARGEST:g}"
            if field.type is bool and type(value) is not bool:
                return f"{field.name}={value!r}: expected true or false"
        if self.num_attention_heads % self.num_key_value_heads:
            return (f"num_attention_heads={self.num_attention_heads}: not a multiple of "
                    f"num_key_value_heads={self.num_key_value_heads}")
        if self.num_hidden_layers > 1000:
            return f"num_hidden_layers={self.num_hidden_layers}: expected at most 1000"
        if self.head_dim % 2:
            return f"head_dim={self.head_dim}: RoPE needs an even one"
        return ""

    def save(self, folder, dtype=torch.float32):
        """Write `folder`/config.json in a form that transformers 4 and 5 read alike."""
        rope = {"rope_theta": self.rope_theta, "rope_type": "default" if self.rope else "none"}
        raw = {"architectures": [ARCHITECTURES[self.model_type]], "model_type": self.model_type,
               "hidden_act": "silu", **asdict(self), "rope_parameters": rope, "use_sliding_window": False,
               "torch_dtype": str(dtype).removeprefix("torch.")}
        if not raw.pop("rope"):
            raw["rope_scaling"] = {"rope_type": "none"}       # where transformers 4 looks: it refuses, too
        (Path(folder) / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


def rope_tables(position_BT, head_dim, theta, dtype):
    """cos and sin of position * theta^(-2i / D), [B, T, 1, D / 2] each; RoFormer, arXiv:2104.09864 §3.2.2.

    Computed in fp32 at each forward: a table would be lost on the meta device, and rounded by a cast to bf16.
    """
    even_D = torch.arange(0, head_dim, 2, device=position_BT.device).float()
    angle_BT1D = position_BT[:, :, None, None] * (1.0 / theta ** (even_D / head_dim))
    return angle_BT1D.cos().to(dtype), angle_BT1D.sin().to(dtype)


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads, the two models' one difference: Qwen2 has biases on
    q, k and v; Qwen3 has none, and an RMSNorm over the head size of each query and key, before RoPE."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.normed = config.model_type == "qwen3"
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=not self.normed)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=not self.normed)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=not self.normed)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        if self.normed:
            self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_BTC, cos, sin, place):
        B, T, _ = x_BTC.shape
        qk = torch.cat([self.q_proj(x_BTC), self.k_proj(x_BTC)], dim=-1).view(B, T, -1, self.head_dim)
        if self.normed:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        a, b = qk.chunk(2, dim=-1)    # RoPE's pairs are the two halves of D, as in Hugging Face's weights
        rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        q, k = rotated.split([self.heads, self.kv_heads], dim=2)
        v = self.v_proj(x_BTC).view(B, T, self.kv_heads, self.head_dim)
        return self.o_proj(place.attend(self.layer, q, k, v))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC):
        return self.down_proj(F.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))


class Block(nn.Module):
    """One decoder layer: attention, then MLP, each after its RMSNorm and added to what came in."""

    recompute = False    # keep nothing but the layer's input for backward, and compute it again there

    def __init__(self, config, layer):
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_BTC, cos, sin, place):
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.layer, x_BTC, cos, sin, place, use_reentrant=False,
                              preserve_rng_state=False)
        return self.layer(x_BTC, cos, sin, place)

    def layer(self, x_BTC, cos, sin, place):
        """The layer itself."""
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos, sin, place)
        return x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))


class Model(nn.Module):
    """A language model. Weights are torch's defaults until `init_weights` or `load_pretrained`."""

    compute_dtype = torch.float32      # of a forward that trains; `parallel.shard` may set another

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.Module()    # Hugging Face's name for all but the heads
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.value_head:
            self.value_head = nn.Linear(config.hidden_size, 1)
        self.tie_weights()

    def tie_weights(self):
        """Make the head share the embedding where the config says so; needed again after `to_empty`."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def recompute_layers(self, yes):
        """Whether backward computes each layer again, from its input, and holds the activations of one layer
        instead of all (arXiv:1604.06174)."""
        for block in self.model.layers:
            block.recompute = yes

    def forward(self, ids_BT, place=None, select=None, head="lm"):
        """Logits [B, T, V], or [N, V] at the positions that `select` = (row_N, column_N) names.

        head: "value" gives what the value head says instead, fp32 [B, T] or [N]; "hidden" what both heads
        read, [.., C]; a function what it makes of these and lm_head, inside the forward: there FSDP has the
        weights whole. place: of lm.attention; None: `Rows`, each causal from position 0.
        """
        x_BTC, place = self.model.embed_tokens(ids_BT), place or Rows(ids_BT.shape[1], ids_BT.device)
        position_BT = place.position_BT
        turned_BT = position_BT if self.config.rope else torch.zeros_like(position_BT)       # by no angle
        cos, sin = rope_tables(turned_BT, self.config.head_dim, self.config.rope_theta, x_BTC.dtype)
        for block in self.model.layers:
            x_BTC = block(x_BTC, cos, sin, place)
        hidden = self.model.norm(x_BTC if select is None else x_BTC[select])
        if head == "value":    # in fp32: bf16 has three digits, and returns differ in the third
            return hidden.float() @ self.value_head.weight[0].float() + self.value_head.bias.float()
        if callable(head):
            return head(hidden, self.lm_head)
        assert head in ("lm", "hidden"), f"no head {head!r}"
        return self.lm_head(hidden) if head == "lm" else hidden


def count_parameters(config):
    """The parameters of a model of this shape."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Model(config).parameters())


@torch.no_grad()
def init_weights(model, seed):
    """Fresh weights: normal with std 1 / sqrt(hidden size), biases and value head 0, norms 1.

    The seed fixes them on any device; a value head changes no other weight. At Qwen2's widths that is about
    its 0.02, which is too small to learn to copy in good time at width 64 to 96.
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
def relate_names(model, vocabulary):
    """Begin the embedding of a numbered name, " drawer 12", as that of its kind and that of its number, where
    all three are in the vocabulary, {token: id}: what is learned of one drawer then holds for the others.

        e(kind n) = (e(kind) + e(n)) / sqrt(2)                                      ours
    """
    embedding_VC = model.model.embed_tokens.weight
    for name, i in vocabulary.items():
        kind, space, number = name.rpartition(" ")
        if kind in vocabulary and number.isdecimal() and space + number in vocabulary:
            embedding_VC[i] = embedding_VC[[vocabulary[kind], vocabulary[space + number]]].sum(0) / 2**0.5


@torch.no_grad()
def begin_to_copy(model):
    """Begin each head as one that looks for tokens like its own and copies what it finds: a small model has
    no other way to a name that it has to repeat, and finds it late (results/tries_alfworld.md).

        W_Q = a W_K + sqrt(1 - a^2) W_Q',    W_O = W_V^T

    for each query head and its key/value head; W_K, W_V and W_Q' as `init_weights` has them, a = ALIKE. This
    is mimetic initialization (arXiv:2305.09828), with the sign for W_V W_O that copies.
    """
    config = model.config
    shape = config.num_key_value_heads, -1, config.head_dim, config.hidden_size
    for layer in model.model.layers:
        attention = layer.self_attn
        query, key, value = (one.weight.view(shape) for one in (
            attention.q_proj, attention.k_proj, attention.v_proj))
        query.mul_((1 - ALIKE**2) ** 0.5).add_(ALIKE * key)
        attention.o_proj.weight.copy_(value.expand_as(query).flatten(0, 2).T)


def save_pretrained(model, folder, state=None):
    """Write config.json and model.safetensors into an existing folder.

    state: the full tensors by name, where the model's own are sharded. A tied lm_head is not written.
    """
    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: tensor.detach().cpu().contiguous()
             for name, tensor in (state or model.state_dict()).items() if name not in left_out}
    model.config.save(folder, dtype=next(iter(state.values())).dtype)
    path = Path(folder) / "model.safetensors"
    try:
        save_file(state, path, metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:                     # neither names the file
        raise OSError(f"{path}: {error}") from None
    shutil.copymode(path.with_name("config.json"), path)            # safetensors leaves it to its owner alone


def load_pretrained(folder, dtype=torch.float32, device="cpu", value_head=None):
    """The model in a Hugging Face folder. ValueError names the file or tensor that is not as expected.

    value_head: True adds one of zeros where the folder has none; else there is one where the folder has one.
    """
    config = ModelConfig.load(folder)
    new_head = value_head and not config.value_head
    with torch.device("meta"):
        model = Model(replace(config, value_head=True) if new_head else config)
    files, fresh = weight_files(folder), {"value_head.weight", "value_head.bias"} if new_head else set()
    check_tensors(folder, files, {name: tuple(t.shape) for name, t in model.state_dict().items()
                                  if name not in fresh}, config.tie_word_embeddings)
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    state = model.state_dict()
    for name in fresh:
        state[name].zero_()
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue               # some folders have it; the embedding is what counts
                state[name].copy_(file.get_tensor(name))
                if not state[name].isfinite().all():
                    raise ValueError(f"{path}: {name} holds numbers that are not finite")
    return model


def check_tensors(folder, files, shapes, tied):
    """ValueError unless the files hold exactly the tensors of these shapes (a tied lm_head may lack)."""
    missing = set(shapes) - ({"lm_head.weight"} if tied else set())
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    if name not in shapes:
                        raise ValueError(f"{path}: unexpected tensor {name}")
                    there, wanted = file.get_slice(name), shapes[name]
                    if (shape := tuple(there.get_shape())) != wanted:
                        raise ValueError(f"{path}: {name} has shape {shape}, config.json means {wanted}")
                    if not there.get_dtype().startswith(("F", "BF")):
                        raise ValueError(f"{path}: {name} holds {there.get_dtype()}, no floats")
                    missing.discard(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not a safetensors file: {error}") from None
    if missing:
        raise ValueError(f"{folder}: missing tensor {min(missing)} ({len(missing)} missing in all)")


def weights_hash(folder):
    """The first 16 hex digits of a SHA-256 over a folder's safetensors files."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def weight_files(folder):
    """The safetensors files of a folder: one, or the shards that its index lists."""
    single, index = Path(folder) / "model.safetensors", Path(folder) / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(f"{folder}: no {single.name} and no {index.name}")
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        paths = [Path(folder) / name for name in sorted(set(names))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index}: not an index of safetensors files: {error!r}") from None
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"{missing[0]}: listed in {index.name}, not found")
    return paths


def small_tokenizer(phrases):
    """A byte-level tokenizer in which each phrase is one token; matches are leftmost, then longest.

    ids: 256 bytes, the special tokens, the phrases in order. A phrase brings its leading space, " drawer".
    Any text comes back from decode(encode(text)), up to Unicode's NFC, which AutoTokenizer adds to Qwen2.
    """
    for phrase in phrases:
        if not phrase or not phrase.isascii() or phrase in SPECIAL_TOKENS:    # "é" would decode as byte 0xE9
            raise ValueError(f"phrase {phrase!r}: expected ASCII text that is no special token")
    byte_ids = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=byte_ids, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def save_small_tokenizer(phrases, folder):
    """Write `small_tokenizer(phrases)` and its chat template into a folder; returns the vocabulary,
    {token: id}.

    Beside a config.json of model_type qwen2, AutoTokenizer ignores the class and makes a Qwen2Tokenizer:
    vocabulary, merges and added tokens stay, its own normaliser and pre-tokeniser come around them. Bytes and
    added tokens mean the same under both; a vocabulary of whole words would be lost silently.
    """
    tokenizer = small_tokenizer(phrases)
    try:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
    except Exception as error:              # a bare one, for a full disk
        raise OSError(f"{folder}/tokenizer.json: {error}") from None
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab()


def load_tokenizer(folder):
    """The folder's tokenizer, through AutoTokenizer. ValueError if it has none, or one that loses text."""
    from transformers import AutoTokenizer  # seconds to import, and only this function needs it

    if not (path := Path(folder) / "tokenizer.json").is_file():
        raise ValueError(f"{path}: not found")
    sample = "You see a drawer 1, and\n  a caf\u00e9's mug 12.\n\n> go to drawer 1"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        back = tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False))
        max(tokenizer.get_vocab().values())
    except Exception as error:              # the libraries below have a dozen names for a broken file
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"{folder}: tokenizer.json or tokenizer_config.json: {reason}") from None
    if back != sample:
        raise ValueError(f"{folder}: the tokenizer loses text: {sample!r} comes back as {back!r}")
    return tokenizer
