"""Proves that lm/small.py initializes weights as documented, and that its tokenizer preserves text.

    python -m pytest tests/lm/test_small.py
"""

import pytest
import torch
from test_model import make_model, small_config

from lm import model as m
from lm import small

PHRASES = [" drawer", " drawer 1", " drawer 12", " go to", "go to", "You arrive at", " the", " a", ". On the",
           "\n> ", " mug"]


# Initial weights

def test_a_numbered_names_embedding_is_the_sum_of_its_kinds_and_its_numbers():
    phrases = [" drawer", " 1", " drawer 1", " drawer 12", " mug", " mug 1", "go to 1"]
    vocabulary = small.small_tokenizer(phrases).get_vocab()
    model, untouched = (make_model(seed=1, vocab_size=len(vocabulary)) for _ in range(2))
    small.share_name_embeddings(model, vocabulary)
    new, old = model.model.embed_tokens.weight, untouched.model.embed_tokens.weight
    for kind in (" drawer", " mug"):
        want = (old[vocabulary[kind]] + old[vocabulary[" 1"]]) / 2**0.5
        torch.testing.assert_close(new[vocabulary[f"{kind} 1"]], want)
    others = [i for token, i in vocabulary.items() if token not in (" drawer 1", " mug 1")]
    assert torch.equal(new[others], old[others])


@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (3, 3)])
def test_copying_heads_attend_to_similar_tokens_and_copy_them(heads):
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads"), heads), hidden_size=24, head_dim=6)
    model, plain = make_model(**sizes), make_model(**sizes)
    small.copying_heads(model)
    for layer, plain_layer in zip(model.model.layers, plain.model.layers, strict=True):
        new, old = layer.self_attn, plain_layer.self_attn
        assert torch.equal(new.k_proj.weight, old.k_proj.weight)
        assert torch.equal(new.v_proj.weight, old.v_proj.weight)
        for head in range(heads[0]):
            kv_head = head * heads[1] // heads[0]
            queries, keys = slice(6 * head, 6 * head + 6), slice(6 * kv_head, 6 * kv_head + 6)
            expected = 0.7 * old.k_proj.weight[keys] + 0.51**0.5 * old.q_proj.weight[queries]
            torch.testing.assert_close(new.q_proj.weight[queries], expected)
            assert torch.equal(new.o_proj.weight[:, queries], old.v_proj.weight[keys].T)
    others = [name for name, p in model.named_parameters() if "q_proj" not in name and "o_proj" not in name]
    new, old = dict(model.named_parameters()), dict(plain.named_parameters())
    assert all(torch.equal(new[name], old[name]) for name in others)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_has_the_documented_shape_and_initial_weights(tmp_path, tied):
    small.save_small_model(tmp_path, [" drawer", " 1", " drawer 1"], 16, 1, context=32, rope=True, tied=tied,
                           seed=0)
    model, vocabulary = m.load_pretrained(tmp_path), m.load_tokenizer(tmp_path).get_vocab()
    shape = model.config
    assert (shape.intermediate_size, shape.head_dim, shape.max_position_embeddings) == (48, 8, 1024)
    assert shape.num_attention_heads == shape.num_key_value_heads == 4 and shape.tie_word_embeddings == tied
    embedding, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    kind, number, name = (embedding[vocabulary[phrase]] for phrase in (" drawer", " 1", " drawer 1"))
    torch.testing.assert_close(name, (kind + number) / 2**0.5)
    assert torch.equal(attention.o_proj.weight, attention.v_proj.weight.T)
    assert torch.equal(model.lm_head.weight, embedding)


# The tokenizer

@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    small_config(vocab_size=len(small.save_small_tokenizer(PHRASES, folder))).save(folder)
    return m.load_tokenizer(folder)


@pytest.mark.parametrize("text", [
    "You arrive at drawer 1. On the drawer 1, you see a mug 3.", "  two  spaces ", "\n\n\ttabs\r\n",
    "!?.,;:'\"()[]{}<>|", "it's we'll 1234",
    "café naïve 日本語 🙂", "\x00\x7f", "<|user|>go<|im_end|>", " drawer 13", ""])
def test_decode_inverts_encode(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.backend_tokenizer.encode(text).ids == tokenizer.encode(text)


def test_the_longest_phrase_wins(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("You arrive at drawer 12. On the drawer 13"))
    assert tokens == ["You arrive at", " drawer 12", ". On the", " drawer 1", "3"]


def test_autotokenizer_gives_the_same_ids_as_the_tokenizer_built(tokenizer):
    built = small.small_tokenizer(PHRASES)
    assert len(tokenizer) == built.get_vocab_size() == 256 + 4 + len(PHRASES)
    text = "go to the drawer 1\n> café"
    assert tokenizer.encode(text) == built.encode(text).ids
    assert [built.token_to_id(token) for token in small.SPECIAL_TOKENS] == [256, 257, 258, 259]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_skip_special_tokens_does_not_skip_phrases(tokenizer):
    ids = tokenizer.encode("<|assistant|>go to the drawer 1<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "go to the drawer 1"


def test_the_chat_template(tokenizer):
    chat = [{"role": "user", "content": "You see a mug."}, {"role": "assistant", "content": "go to drawer 1"},
            {"role": "user", "content": "Nothing."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>You see a mug.<|assistant|>go to drawer 1<|im_end|><|user|>Nothing.<|assistant|>"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text.removesuffix("<|assistant|>")
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(text)
    with pytest.raises(Exception, match="not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("phrase", ["", "café", "<|im_end|>"])
def test_phrases_that_cannot_round_trip_are_refused(phrase):
    with pytest.raises(ValueError, match="phrase"):
        small.small_tokenizer([" a", phrase])
