"""The small model that is trained from scratch: its shape, initial weights and tokenizer.

A Qwen2 of some hundred thousand parameters. Its tokenizer has one token per phrase of the environment, so
that it learns a text game in minutes on a CPU. `save_small_model` writes it as a Hugging Face folder.
"""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lm.model import Model, ModelConfig, init_weights, save_pretrained

SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|im_end|>")
QUERY_KEY_SIMILARITY = 0.7        # a in `copying_heads`
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<|assistant|>{{ message.content }}<|im_end|>"
    "{% else %}{{ raise_exception('this chat has user and assistant, not ' + message.role) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_small_model(folder, phrases, hidden_size, layers, context, rope, tied, seed):
    """Write a newly initialized small model and its tokenizer into `folder`, which is created if missing.

    phrases: texts that become one token each. context: maximum number of positions, raised to 1024 if
    smaller. rope: False for a model without position encoding. tied: whether the output layer is the
    embedding; otherwise it starts as its copy, so that both begin as the same function.
    """
    folder.mkdir(exist_ok=True)
    vocabulary = save_small_tokenizer(phrases, folder)
    model = Model(ModelConfig(
        vocab_size=len(vocabulary), hidden_size=hidden_size, intermediate_size=3 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, head_dim=hidden_size // 2,
        max_position_embeddings=max(context, 1024), tie_word_embeddings=tied, rope=rope))
    init_weights(model, seed)
    share_name_embeddings(model, vocabulary)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    copying_heads(model)
    save_pretrained(model, folder)


@torch.no_grad()
def share_name_embeddings(model, vocabulary):
    """Initialize the embedding of each numbered name from its kind's and its number's embeddings.

        e(kind n) = (e(kind) + e(n)) / sqrt(2)                                      ours

    It applies to " drawer 12" if " drawer" and " 12" are tokens, too: what the model learns about one drawer
    then transfers to the others. vocabulary: {token: id}.
    """
    embedding_VC = model.model.embed_tokens.weight
    for name, i in vocabulary.items():
        kind, space, number = name.rpartition(" ")
        if kind in vocabulary and number.isdecimal() and space + number in vocabulary:
            embedding_VC[i] = embedding_VC[[vocabulary[kind], vocabulary[space + number]]].sum(0) / 2**0.5


@torch.no_grad()
def copying_heads(model):
    """Initialize each attention head to attend to tokens similar to the query's and to copy them.

        W_Q = a W_K + sqrt(1 - a^2) W_Q',    W_O = W_V^T,    a = QUERY_KEY_SIMILARITY

    for each query head and its key/value head; W_K, W_V and W_Q' are `init_weights`'. This is mimetic
    initialization (arXiv:2305.09828), with the sign of W_V W_O that copies. The small model has to repeat
    names from its prompt; without this it learns to copy them late (lab/results/tries_alfworld.md).
    """
    config = model.config
    shape = config.num_key_value_heads, -1, config.head_dim, config.hidden_size
    for layer in model.model.layers:
        attention = layer.self_attn
        query, key, value = (one.weight.view(shape) for one in (
            attention.q_proj, attention.k_proj, attention.v_proj))
        query.mul_((1 - QUERY_KEY_SIMILARITY**2) ** 0.5).add_(QUERY_KEY_SIMILARITY * key)
        attention.o_proj.weight.copy_(value.expand_as(query).flatten(0, 2).T)


def small_tokenizer(phrases):
    """A byte-level tokenizer in which each phrase is one token; the leftmost, then the longest match wins.

    Token ids: the 256 bytes, the special tokens, the phrases in order. A phrase includes its leading space,
    as in " drawer". decode(encode(text)) == text for any text in Unicode normal form NFC, to which
    AutoTokenizer normalizes Qwen2's input. ValueError for a phrase that is empty, not ASCII or a special
    token.
    """
    for phrase in phrases:
        if not phrase or not phrase.isascii() or phrase in SPECIAL_TOKENS:    # "é" would decode as byte 0xE9
            raise ValueError(f"phrase {phrase!r}: expected nonempty ASCII text that is not a special token")
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
    """Write `small_tokenizer(phrases)` and its chat template into a folder.

    Returns the vocabulary, {token: id}. In a folder whose config.json has model_type qwen2, AutoTokenizer
    ignores the tokenizer class named here: it builds a Qwen2Tokenizer with this vocabulary and Qwen2's own
    normalizer and pre-tokenizer. Bytes and added tokens get the same ids in both; a word-level vocabulary
    would be lost without an error.
    """
    tokenizer = small_tokenizer(phrases)
    try:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
    except Exception as error:              # tokenizers raises a plain Exception if the disk is full
        raise OSError(f"{folder}/tokenizer.json: {error}") from None
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return tokenizer.get_vocab()
