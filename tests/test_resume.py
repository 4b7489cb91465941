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
import rollout
from run import files, parallel, setup


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
    """A run interrupted in the update of iteration stop_at, and gone on with."""
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "train", interrupting(gcd.train, stop_at))
        assert train(out, *flags) == 130
    assert len(rows(out)) == stop_at + 1
    assert train(out, *flags, "--resume") == 0


# As if it had not stopped

@pytest.mark.fast
@pytest.mark.parametrize("flags", [[], ["--kl", "loss", "--kl-coef", 1], ["--admissible-only"]],
                         ids=["plain", "kl", "restricted"])
def test_a_stopped_run_goes_on_as_if_it_had_not(start, tmp_path, monkeypatch, flags):
    whole, parts, flags = tmp_path / "whole", tmp_path / "parts", [*begin(start), *flags]
    assert train(whole, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 0)
    assert same(weights(whole), weights(parts))
    assert [untimed(row) for row in rows(whole)] == [untimed(row) for row in rows(parts)]
    played = sum(row[f"time/{stage}_s"] for row in rows(parts) for stage in ("rollout", "judge", "update"))
    assert json.loads((parts / "stages.json").read_text())["rl"] > played                # of both sessions


@pytest.mark.fast
def test_models_kept_along_a_run_are_those_it_had(start, tmp_path, monkeypatch):
    """Those of a run in two parts too."""
    whole, parts, flags = tmp_path / "whole", tmp_path / "parts", [*begin(start), "--keep-checkpoints", 1]
    assert train(whole, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 1)
    kept = {out: {path.name: load_file(path / "model.safetensors") for path in (out / "kept").iterdir()}
            for out in (whole, parts)}
    assert sorted(kept[whole]) == sorted(kept[parts]) == ["00000", "00001", "00002"]
    assert all(same(kept[whole][name], kept[parts][name]) for name in kept[whole])
    assert same(kept[whole]["00000"], load_file(start / "model.safetensors"))
    assert same(kept[whole]["00002"], weights(whole)) and not same(kept[whole]["00001"], weights(whole))


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


@pytest.mark.parametrize("how", ["stopped", "crashed"])
def test_practice_goes_on_between_its_rounds_as_if_it_had_not_stopped(tmp_path, monkeypatch, capsys, how):
    """Saved every second round, ended in the one with number 3, resumed from 2; Muon's moments come back."""
    monkeypatch.setattr(cold_start, "ROUND", 6)
    whole, parts, play = tmp_path / "whole", tmp_path / "parts", setup.Run.play
    flags = ["--demonstrations", 12, "--dagger", 28, "--judge-demonstrations", 8, "--cold-start-batch", 2,
             "--checkpoint-every", 2]
    assert train(whole, *flags) == 0

    def ending(run, seats, sampling, name, **others):
        if name == "practice 3":
            if how == "crashed":
                raise OSError("the power went")
            os.kill(os.getpid(), signal.SIGINT)
        return play(run, seats, sampling, name, **others)

    with monkeypatch.context() as patch:
        patch.setattr(setup.Run, "play", ending)
        assert train(parts, *flags) == (1 if how == "crashed" else 130)
    if how == "stopped":
        assert "checkpoint holds the model after 2 rounds of practice; --resume" in capsys.readouterr().err
    before = len(rows(parts, "practice"))
    assert train(parts, *flags, "--resume") == 0
    assert same(weights(whole), weights(parts)) and before == 3
    for phase in ("cold_start", "practice", "rl"):
        assert [untimed(row) for row in rows(whole, phase)] == [untimed(row) for row in rows(parts, phase)]


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


@pytest.mark.fast
def test_ctrl_c_in_the_rollout_gives_the_iteration_up_and_it_is_begun_again(start, tmp_path, monkeypatch,
                                                                             capsys):
    """Not a turn more is played; the weights are those that the iteration began with."""
    whole, parts, flags = tmp_path / "whole", tmp_path / "parts", [*begin(start), "--kl", "loss"]
    assert train(whole, *flags) == 0
    say, said = rollout.Conversation.say, []

    def pressed_in_the_second_iteration(conversation, *arguments):
        said.append(conversation)
        if len(rows(parts)) == 1:
            os.kill(os.getpid(), signal.SIGINT)
            patch.setattr(rollout.Conversation, "say", say)
        return say(conversation, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rollout.Conversation, "say", pressed_in_the_second_iteration)
        assert train(parts, *flags) == 130
    assert len(rows(parts)) == 1
    assert "checkpoint holds the model after 1 of 2 iterations; --resume goes on" in capsys.readouterr().err
    assert train(parts, *flags, "--resume") == 0
    assert same(weights(whole), weights(parts))
    assert [untimed(row) for row in rows(whole)] == [untimed(row) for row in rows(parts)]


@pytest.mark.fast
@pytest.mark.parametrize("where, argument", [(cold_start, "demonstrate"), (files, "origin_of")])
def test_ctrl_c_is_heeded_while_demonstrations_are_made_and_games_are_hashed(tmp_path, monkeypatch, capsys,
                                                                            where, argument):
    function = getattr(where, argument)

    def pressed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    monkeypatch.setattr(where, argument, pressed)
    monkeypatch.setattr(cold_start, "imitate", None)              # nothing is imitated after it
    assert train(tmp_path, "--demonstrations", 500) == 130
    assert capsys.readouterr().err.rstrip().endswith("stopped; nothing to save yet")


@pytest.mark.fast
def test_a_second_ctrl_c_ends_at_once_without_a_traceback(start, tmp_path, monkeypatch, capsys):
    def pressed(*arguments):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("goes on")

    monkeypatch.setattr(gcd, "judge_turns", pressed)
    assert train(tmp_path, *begin(start)) == 130
    said = capsys.readouterr().err
    assert "stopped at once" in said and "Traceback" not in said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_saves_and_leaves(start, tmp_path, signum):
    command = [sys.executable, ROOT / "gcd.py", *TINY, "--out", tmp_path, *begin(start),
               "--iterations", 500, "--checkpoint-every", 500]
    with open(tmp_path / "stderr", "w") as stderr:
        run = subprocess.Popen([str(part) for part in command], stderr=stderr, env=ENVIRONMENT)
    try:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(rows(tmp_path)) >= 2, run)
        run.send_signal(signum)
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
    (["--seed", 1], "seed was 0, is 1"), (["--invalid-penalty", 2], "invalid_penalty was 0.1, is 2.0"),
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


@pytest.mark.fast
@pytest.mark.parametrize("cold", [5, {"rounds": 2}, {"rounds": "2", "steps": 3, "muon": None}])
def test_a_cold_start_in_a_checkpoint_that_is_none_is_named(cold):
    state = {"iteration": None, "settings": {}, "seconds": {}, "instruction": None}
    setup.check_state("trainer.pt", state | {"cold": {"rounds": 2, "steps": 3, "muon": None}})
    with pytest.raises(ValueError, match="trainer.pt: not a run's: its cold is"):
        setup.check_state("trainer.pt", state | {"cold": cold})


# One run in a folder

@pytest.fixture
def held(trained, tmp_path):
    """A folder with a run of two iterations."""
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def everything(folder):
    """{path: content} of a folder's files, without the lock."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != files.LOCK}


@pytest.mark.fast
def test_a_folder_that_holds_a_run_is_refused(start, held, capsys):
    before = everything(held)
    assert train(held, *begin(start)) == 1
    assert_one_error(capsys, f"--out={held}: holds a run; --resume goes on with it, --overwrite sets")
    assert everything(held) == before
    shutil.rmtree(held / "checkpoint")                   # the rest is a run's too
    assert train(held, *begin(start)) == 1


@pytest.mark.fast
def test_overwriting_sets_the_whole_run_aside_and_stopped_early_loses_nothing(start, held, monkeypatch):
    """The old hole: a Ctrl-C in the new run replaced a trained checkpoint."""
    before = everything(held)
    for n in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(gcd, "train", interrupting(gcd.train, 0))
            assert train(held, *begin(start), "--overwrite", "--seed", n) == 130
    assert everything(held.with_name("out.old-1")) == before
    assert len(rows(held.with_name("out.old-2"))) == len(rows(held)) == 1


@pytest.mark.fast
def test_resume_and_overwrite_go_on_where_they_can_and_begin_anew_where_not(start, held, capsys):
    before, aside = weights(held), held.with_name("out.old-1")
    both = [*begin(start), "--resume", "--overwrite"]
    assert train(held, *both) == 0
    assert same(before, weights(held)) and not aside.exists()
    assert train(held, *both, "--seed", 1) == 0
    assert "seed was 0, is 1; so it begins anew" in capsys.readouterr().err
    assert same(before, weights(aside)) and not same(before, weights(held)) and len(rows(held)) == 2
    assert train(held.with_name("new"), *both, "--iterations", 0) == 0


@pytest.mark.fast
def test_metrics_and_weights_of_other_runs_are_not_gone_on_with(start, held, tmp_path, capsys):
    assert train(tmp_path / "other", *begin(start), "--seed", 1) == 0
    shutil.copy(tmp_path / "other" / "metrics.jsonl", held)
    assert train(held, *begin(start), "--resume") == 1
    assert_one_error(capsys, "metrics.jsonl is of run ")
    assert train(tmp_path / "other", *begin(held / "checkpoint"), "--seed", 1, "--resume") == 1
    assert_one_error(capsys, f"began with other weights than --model={held / 'checkpoint'} holds")


@pytest.mark.fast
def test_one_process_writes_at_a_time_and_the_other_is_told_who(start, held, capsys):
    before = everything(held)
    with files.held(held):
        for flags in ((), ("--resume",), ("--overwrite",)):
            assert train(held, *begin(start), *flags) == 1
            assert_one_error(capsys, f"--out={held}: process {os.getpid()} of ")
    assert everything(held) == before and files.holder(held) == ""
    assert train(held, *begin(start), "--resume") == 0


def test_what_a_killed_run_logged_beyond_its_checkpoint_is_there_once(start, tmp_path, monkeypatch):
    """episodes.jsonl and metrics.jsonl, evaluation included, as if the run had not been killed."""
    flags = [*begin(start), "--iterations", 3, "--evaluate", "L2", "--protocol", "sampled"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, *flags) == 0

    def dies(*arguments):
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "decay", lambda config, i: dies() if i == 2 else 1 - i / config.iterations)
        assert train(parts, *flags, "--checkpoint-every", 1) == 1
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "finish", dies)
        patch.setattr(parallel, "save_checkpoint", dies)
        assert train(parts, *flags, "--resume") == 1
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", dies)
        assert train(parts, *flags, "--resume") == 1
    assert train(parts, *flags, "--resume") == 0
    assert [untimed(row) for row in rows(whole)] == [untimed(row) for row in rows(parts)]
    assert (whole / "episodes.jsonl").read_text() == (parts / "episodes.jsonl").read_text()


@pytest.mark.parametrize("written", [True, False])
def test_a_kill_between_the_two_renames_is_repaired_by_whoever_goes_on(start, held, written):
    checkpoint = held / "checkpoint"
    checkpoint.rename(held / "checkpoint.old")
    if written:
        shutil.copytree(held / "checkpoint.old", held / "checkpoint.writing")
    assert train(held, *begin(start), "--resume", "--overwrite") == 0
    assert not held.with_name("out.old-1").exists() and checkpoint.is_dir()
