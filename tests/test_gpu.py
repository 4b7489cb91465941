"""Proves that bench/gpu.py runs all its checks on whatever device there is, and goes on after one that fails.

    python -m pytest tests/test_gpu.py
"""

import json

import pytest

from bench import gpu

pytestmark = pytest.mark.fast


def lines_of(capsys):
    """{check: what it printed}."""
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in printed}


def test_every_check_runs_and_the_faults_are_seen(capsys):
    assert gpu.main(["--tiny"]) == 0
    found = lines_of(capsys)
    assert [*found] == [check.__name__ for check in gpu.CHECKS] == [*gpu.TARGETS]
    assert not [line for line in found.values() if "error" in line]
    slow = {"floor", "update_16k", "update_32k"}                      # shares of a peak that is not there
    assert all(line["ok"] for name, line in found.items() if name not in slow)
    assert found["grpo_gcd"]["time/judge_s"] > found["grpo"]["time/judge_s"]


def test_a_check_that_fails_is_a_line_and_the_next_goes_on(capsys, monkeypatch):
    def broken(bench):
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(gpu, "CHECKS", (broken, gpu.limits))
    monkeypatch.setitem(gpu.TARGETS, "broken", "none")
    assert gpu.main(["--tiny"]) == 0
    found = lines_of(capsys)
    assert found["broken"]["error"] == "RuntimeError: no such kernel" and found["limits"]["ok"]


def test_without_a_gpu_it_says_so(capsys):
    if gpu.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as stopped:
        gpu.main([])
    assert stopped.value.code == 2 and "no CUDA device" in capsys.readouterr().err
