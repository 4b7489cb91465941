"""Tests that lab/bench/gpu.py runs all its checks on any device, and continues after one that fails.

    python -m pytest tests/lab/test_gpu.py
"""

import json
from dataclasses import replace

import pytest
import torch
from test_attention import by_loop, shared_by_loop

from lab.bench import gpu, memory
from lab.bench import varlen as paths
from lm import attention

pytestmark = pytest.mark.fast


def lines_of(capsys):
    """{check: the line it printed}."""
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in printed}


def test_every_check_runs_and_the_faults_are_detected(capsys):
    assert gpu.main(["--tiny"]) == 0
    found = lines_of(capsys)
    assert [*found] == [check.__name__ for check in gpu.CHECKS] == [*gpu.TARGETS]
    assert not [line for line in found.values() if "error" in line]
    slow = {"floor", "update_16k", "update_32k"}                      # their targets are those of a GPU
    assert all(line["ok"] for name, line in found.items() if name not in slow)
    assert found["grpo_gcd"]["time/judge_s"] > found["grpo"]["time/judge_s"]


def test_every_path_of_variable_length_attention_is_compared(capsys, monkeypatch):
    """With a stand-in that is exact, and with one that reads a key too many, of what lies between rows."""
    def one_key_more(*arguments):
        *others, longest_k, keys_B = arguments
        return by_loop(*others, longest_k + 1, keys_B + 1)

    right = attention.Varlen(by_loop, by_loop, shared_by_loop)
    options = torch.device("cpu"), torch.float32, 60
    config = replace(memory.shape("1.5B"), num_attention_heads=4, head_dim=8)
    exact = paths.errors(right, config, *options)
    assert [*exact] == ["decode", "decode_few", "prefill", "shared", "shared_sums", "packed",
                        "packed_backward", "branched", "branched_backward"]
    assert max(exact.values()) < 1e-5
    wrong = paths.errors(right._replace(cached=one_key_more), config, *options)
    assert [path for path in exact if wrong[path] > 0.1] == ["decode", "decode_few", "prefill"]


def test_a_check_that_fails_is_a_line_and_the_next_one_runs(capsys, monkeypatch):
    def broken(bench):
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(gpu, "CHECKS", (broken, gpu.limits))
    monkeypatch.setitem(gpu.TARGETS, "broken", "none")
    assert gpu.main(["--tiny"]) == 0
    found = lines_of(capsys)
    assert found["broken"]["error"] == "RuntimeError: no such kernel" and found["limits"]["ok"]


def test_without_a_gpu_it_ends_with_an_error(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2 and "no CUDA device" in capsys.readouterr().err
