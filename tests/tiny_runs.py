"""Tiny complete runs of gcd.py for tests: functions that start them, and functions that read their files.

All start from one small cold start (`cold_started`). Labels come from the oracle, because so small a model
wins no episode, and the rule needs wins.
"""

import fcntl
import importlib.util
import json
import os
import shutil
from collections import ChainMap
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file

import config
import correction
import gcd
from infra.signals import Stop
from lm import model as decoder

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--device cpu --hidden-size 32 --layers 2 --max-turns 8 --tasks 4 --group-size 4 --iterations 2 "
        "--minibatches 2 --judge-labels oracle --judge-turns 8 --judge-group-size 4 --evaluate none").split()
COLD = ("--demonstrations 200 --cold-start-batch 4 --cold-start-epochs 3 --cold-start-lr 8e-3 "
        "--judge-demonstrations 200 --judge-epochs 1 --max-turns 12").split()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def module_of(path):
    """The module of a file of the checkout."""
    specification = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def copy_code(folder):
    """Copy run.sh, the requirements and the code, without tests and results, to a new folder.

    Nothing of what a user keeps in the checkout.
    """
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".sh", ".txt", ".toml"):
            shutil.copy(path, folder)
        elif path.name.isidentifier() and path.name != "tests" and any(path.glob("*.py")):
            without = shutil.ignore_patterns("results", "__pycache__")
            shutil.copytree(path, folder / path.name, ignore=without)


def start_from(checkpoint):
    """Flags that start RL from a checkpoint."""
    return ["--model", checkpoint, "--demonstrations", 0]


def train(out, *flags, **changes):
    """Do a tiny run; returns its exit status. changes: settings without a flag."""
    def parse(argv):
        return replace(config.parse_or_exit(argv), **changes)

    with mock.patch.object(gcd, "parse_or_exit", parse), Stop.restored():        # `main` handles Ctrl-C
        return gcd.main([*TINY, "--out", str(out), *map(str, flags)])


def cold_started(factory, *flags):
    """The checkpoint of a small cold start, trained once a test session for each set of flags.

    It answers mostly with commands, and answers the judge's question. factory: pytest's tmp_path_factory.
    """
    shared = factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared        # all workers' folder
    out = shared / "-".join(["cold", *(flag.strip("-") for flag in flags)])
    with open(f"{out}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (out / "stages.json").exists():
            assert train(out, *COLD, *flags, "--iterations", 0) == 0
    return out / "checkpoint"


def find_every_turn_bad(monkeypatch):
    """Make the judge find every judged turn bad: the verdicts of so small a judge depend on seed and CPU."""
    monkeypatch.setattr(correction, "found_bad", list)


# A run's files

def rows(out, phase="rl"):
    """The records of metrics.jsonl of one phase."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("phase") == phase]


def weights(out):
    """The tensors of the checkpoint."""
    return dict(ChainMap(*map(load_file, decoder.weight_files(out / "checkpoint"))))


def same(a, b):
    """Whether two dicts of tensors are bitwise equal."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_times(row):
    """A record of the metrics without timings and memory, which depend on the machine and the ranks."""
    return {key: value for key, value in row.items() if not key.startswith(("time/", "memory/"))}


def assert_one_error(capsys, message):
    """Assert that stderr ends with this error in one line, without a traceback."""
    error = capsys.readouterr().err
    last = error.strip().splitlines()[-1]
    assert last.startswith("gcd.py: error: ") and message in last and "Traceback" not in error, error


def random_qwen(folder, tokenizer, family="Qwen2", **changes):
    """Write a random Qwen, with the real vocabulary 5 million parameters, nearly all in its embedding.

    tokenizer: a folder with the hub's tokenizer files, or cut ones (conftest.cut_tokenizer); only these are
    copied. family: "Qwen2", "Qwen3" or "Llama".
    """
    import transformers
    torch.manual_seed(0)
    tokens = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    last = max(token["id"] for token in tokens)
    vocabulary = 151936 if last > 151000 else last + 1             # Qwen's has some more rows than tokens
    shape = getattr(transformers, f"{family}Config")(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        **changes)
    getattr(transformers, f"{family}ForCausalLM")(shape).save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    return folder


def assert_loads_in_transformers(folder, text):
    """Assert that transformers computes the same logits from the folder as this project."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids_BT = torch.tensor([tokenizer.encode(text)])
    assert tokenizer.decode(ids_BT[0]) == text
    with torch.no_grad():
        torch.testing.assert_close(decoder.load_pretrained(folder)(ids_BT), theirs(ids_BT).logits,
                                   rtol=1e-4, atol=1e-5)
