"""Tests that lab/bench/gpu.py runs all its checks on any device, and continues after one that fails.

    python -m pytest tests/lab/test_gpu.py
"""

import json

import pytest

from lab.bench import gpu

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
