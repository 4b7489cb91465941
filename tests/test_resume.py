"""Proves that a run that stopped, by Ctrl-C or by a crash, goes on as if it had not, and only as what it was.

    python -m pytest tests/test_resume.py           # about 30 s on one core
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import (
    ENVIRONMENT,
    ROOT,
    TINY,
    assert_one_error,
    begin,
    cold_started,
    find_every_turn_bad,
    rows,
    same,
    train,
    untimed,
    weights,
)

import cold_start
import gcd


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_started(tmp_path_factory)


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """The folder of two iterations from `start`."""
    out = tmp_path_factory.mktemp("trained")
    assert train(out, *begin(start)) == 0
    return out


def interrupting(function, argument):
    """The function, with Ctrl-C pressed when it is called with that argument."""
    def pressed(*arguments):
        if argument in arguments:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)
    return pressed


def train_in_two(monkeypatch, out, flags, stop_at):
    """A run interrupted in the iteration stop_at, and gone on with."""
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", interrupting(gcd.iteration, stop_at))
        assert train(out, *flags) == 130
    assert len(rows(out)) == stop_at + 1
    assert train(out, *flags, "--resume") == 0


# As if it had not stopped

@pytest.mark.fast
@pytest.mark.parametrize("flags", [[], ["--kl", "loss", "--kl-coef", 1]], ids=["plain", "kl"])
def test_a_stopped_run_goes_on_as_if_it_had_not(start, tmp_path, monkeypatch, flags):
    whole, parts, flags = tmp_path / "whole", tmp_path / "parts", [*begin(start), *flags]
    assert train(whole, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 0)
    assert same(weights(whole), weights(parts))
    assert [untimed(row) for row in rows(whole)] == [untimed(row) for row in rows(parts)]
    played = sum(row[key] for row in rows(parts) for key in row if key.startswith("time/"))
    assert json.loads((parts / "stages.json").read_text())["rl"] > played                # of both sessions


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crashed_run_goes_on_from_its_last_checkpoint(start, tmp_path, monkeypatch, crash_at):
    """At 0 that is the cold start's: its Adam moments must not leak into RL, nor do they without a crash."""
    flags = ["--model", start, "--demonstrations", 40, "--cold-start-epochs", 1, "--judge-demonstrations", 0,
             "--judge-epochs", 0, "--checkpoint-every", 1]
    assert train(tmp_path / "whole", *flags) == 0
    iteration = gcd.iteration

    def crash(run, i, reference):
        if i == crash_at:
            raise OSError("the power went")
        return iteration(run, i, reference)

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", crash)
        assert train(tmp_path / "parts", *flags) == 1
    assert train(tmp_path / "parts", *flags, "--resume") == 0
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_ppo_goes_on_with_its_critic_as_if_it_had_not_stopped(start, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [*begin(start), "--algo", "ppo", "--tasks", 16, "--group-size", 1, "--iterations", 3]
    assert train(whole, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 0)
    assert same(weights(whole), weights(parts))
    critics = [torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["critic"]["weights"]
               for out in (whole, parts)]
    assert same(*critics)


def test_a_run_with_correction_goes_on_with_its_instruction(tmp_path, tmp_path_factory, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    find_every_turn_bad(monkeypatch)
    flags = [*begin(cold_started(tmp_path_factory, "--instructions")), "--correction", "critiques",
             "--correction-every", 2, "--judge-turns", 40, "--iterations", 4]
    assert train(whole, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 2)
    assert len(rows(whole, "correction")) == 2 and same(weights(whole), weights(parts))


def test_ctrl_c_saves_and_leaves(start, tmp_path):
    command = [sys.executable, ROOT / "gcd.py", *TINY, "--out", tmp_path, *begin(start),
               "--iterations", 500, "--checkpoint-every", 500]
    with open(tmp_path / "stderr", "w") as stderr:
        run = subprocess.Popen([str(part) for part in command], stderr=stderr, env=ENVIRONMENT)
    try:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(rows(tmp_path)) >= 2, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=300) == 130
    finally:
        run.kill()
        run.wait()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    state = torch.load(tmp_path / "checkpoint" / "trainer.pt", weights_only=True)["state"]
    assert (state["iteration"], state["instruction"]) == (len(rows(tmp_path)), None)
    assert state["seconds"]["rl"] > 0
    assert not same(weights(tmp_path), load_file(start / "model.safetensors"))


def wait_for(condition, run, limit_s=300):
    end = time.monotonic() + limit_s
    while not condition():
        assert run.poll() is None and time.monotonic() < end, f"exit code {run.poll()}"
        time.sleep(0.1)


# Only as what it was

@pytest.mark.fast
@pytest.mark.parametrize("flags, message", [
    (["--algo", "gigpo"], "algo was grpo, is gigpo; normalize_std was False, is True"),
    (["--seed", 1], "seed was 0, is 1"), (["--success-reward", 2], "success_reward was 1.0, is 2.0"),
    (["--iterations", 1], "--iterations=1: --resume finds 2 done"),
    (["--iterations", 9], "iterations was 2, is 9")])
def test_a_run_goes_on_with_its_own_settings_only(start, trained, tmp_path, capsys, flags, message):
    """Also where another run left its checkpoint in the folder; where and how fast may change."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    before = weights(tmp_path)
    assert train(tmp_path, *begin(start), "--resume", *flags) == 1
    assert_one_error(capsys, message)
    assert same(before, weights(tmp_path))
    faster = ["--slots", 3, "--checkpoint-every", 1, "--microbatch-tokens", 512]
    assert train(tmp_path, "--demonstrations", 0, "--resume", *faster) == 0
    assert train(tmp_path, "--demonstrations", 0, "--resume", "--iterations", 0) == 0


@pytest.mark.fast
@pytest.mark.parametrize("iterations", [0, 2])
def test_half_a_cold_start_is_not_taken_for_a_whole_one(tmp_path, monkeypatch, capsys, iterations):
    flags = ["--demonstrations", 8, "--judge-epochs", 0, "--iterations", iterations]
    with monkeypatch.context() as patch:
        patch.setattr(cold_start, "imitate", interrupting(cold_start.imitate, "cold start: policy"))
        assert train(tmp_path, *flags) == 130
    assert train(tmp_path, *flags, "--resume") == 1
    assert_one_error(capsys, "--resume: ")
