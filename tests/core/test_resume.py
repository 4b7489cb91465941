"""Proves that an interrupted or crashed run resumes exactly, and only with its own settings and files.

    python -m pytest tests/core/test_resume.py           # about 30 s on one core

The oracle is an undisturbed run, bit for bit.
"""

import errno
import gzip
import itertools
import json
import os
import shutil
import signal
from contextlib import nullcontext
from unittest.mock import Mock

import forked
import pytest
import torch
from hand_made import GAME
from safetensors.torch import load_file
from tiny_runs import (
    ENVIRONMENT,
    ROOT,
    TINY,
    assert_one_error,
    cold_started,
    find_every_turn_bad,
    rows,
    same,
    start_from,
    train,
    weights,
    without_times,
)
from waiting import wait_for

import cold_start
import config
import evaluation
import gcd
import resume
import rollout
import session
from infra import checkpoint, files, job, parallel


def interrupting(function, argument):
    """The function, which interrupts the run (SIGINT) when it is called with that argument."""
    def pressed(*arguments):
        if argument in arguments:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)
    return pressed


def train_in_two(monkeypatch, out, flags, stop_at):
    """A run that is interrupted in the update of iteration stop_at, then resumed."""
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "optimize", interrupting(gcd.optimize, stop_at))
        assert train(out, *flags) == 130
    assert len(rows(out)) == stop_at + 1
    assert train(out, *flags, "--resume") == 0


@pytest.fixture(scope="module")
def undisturbed(start, trained, tmp_path_factory):
    """undisturbed(*flags): the folder of a run with these flags, which is done once; tests read it."""
    done = {(*map(str, start_from(start)),): trained}

    def run(*flags):
        key = (*map(str, flags),)
        if key not in done:
            out = tmp_path_factory.mktemp("full")
            assert train(out, *flags) == 0
            done[key] = out
        return done[key]

    return run


# Resuming is exact

@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--kl", "loss", "--kl-coef", 1], ["--admissible-only"]],
                         ids=["plain", "kl", "restricted"])
def test_an_interrupted_run_resumes_exactly(start, undisturbed, tmp_path, monkeypatch, flags):
    parts, flags = tmp_path / "parts", [*start_from(start), *flags]
    full = undisturbed(*flags)
    train_in_two(monkeypatch, parts, flags, 0)
    assert same(weights(full), weights(parts))
    assert [without_times(row) for row in rows(full)] == [without_times(row) for row in rows(parts)]
    seconds = sum(row[f"time/{stage}_s"] for row in rows(parts) for stage in ("rollout", "judge", "update"))
    assert json.loads((parts / "stages.json").read_text())["rl"] > seconds               # of both parts


@pytest.mark.slow
def test_kept_checkpoints_are_the_models_of_their_iterations(start, tmp_path, monkeypatch):
    """Also in a run that was resumed."""
    full, parts, flags = tmp_path / "full", tmp_path / "parts", [*start_from(start), "--keep-checkpoints", 1]
    assert train(full, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 1)
    kept = {out: {path.name: load_file(path / "model.safetensors") for path in (out / "kept").iterdir()}
            for out in (full, parts)}
    assert sorted(kept[full]) == sorted(kept[parts]) == ["00000", "00001", "00002"]
    assert all(same(kept[full][name], kept[parts][name]) for name in kept[full])
    assert same(kept[full]["00000"], load_file(start / "model.safetensors"))
    assert same(kept[full]["00002"], weights(full)) and not same(kept[full]["00001"], weights(full))
    state = checkpoint.read_trainer(full / files.CHECKPOINT)["state"]
    for out in (full, parts):
        found = resume.state_beside(out / files.KEPT / "00001")
        assert found["settings"]["seed"] == state["settings"]["seed"] and found["style"] == state["style"]
        assert found["instruction"] == state["instruction"]


@pytest.mark.slow
@pytest.mark.parametrize("crash_at, method", [(0, ""), (0, "--algo ppo --group-size 1"), (1, "")])
def test_a_crashed_run_resumes_from_its_last_checkpoint(start, undisturbed, tmp_path, monkeypatch, crash_at,
                                                        method):
    """At 0 that is the cold start's, which has no critic yet."""
    flags = ["--model", start, "--demonstrations", 40, "--cold-start-epochs", 1, "--judge-demonstrations", 0,
             "--judge-epochs", 0, "--checkpoint-every", 1, *method.split()]
    full, iteration = undisturbed(*flags), gcd.iteration

    def crash(run, i, reference):
        if i == crash_at:
            raise OSError("the power went")
        return iteration(run, i, reference)

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", crash)
        assert train(tmp_path, *flags) == 1
    assert train(tmp_path, *flags, "--resume") == 0
    assert same(weights(full), weights(tmp_path))


@pytest.mark.slow
def test_the_moments_of_the_cold_start_do_not_leak_into_rl(start, tmp_path, monkeypatch):
    """A larger model's, which is trained by RL's own optimizer; here they are made up."""
    cold_start_of, iteration, left = gcd.cold_start, gcd.iteration, []

    def with_moments(run):
        cold_start_of(run)
        run.optimizer.state[next(iter(run.model.parameters()))] = {"step": torch.ones(())}

    monkeypatch.setattr(gcd, "cold_start", with_moments)
    monkeypatch.setattr(gcd, "iteration", lambda run, *rest: left.append(len(run.optimizer.state)) or
                        iteration(run, *rest))
    assert train(tmp_path, "--model", start, "--demonstrations", 4, "--judge-demonstrations", 0,
                 "--iterations", 1) == 0
    assert left == [0]


def assert_same_run(full, parts):
    """Two runs have the same weights and the same metrics but for times, line by line."""
    assert same(weights(full), weights(parts))
    for phase in ("demonstrations", "judge demonstrations", "cold_start", "dagger", "rl"):
        uninterrupted, resumed = ([without_times(row) for row in rows(out, phase)] for out in (full, parts))
        assert uninterrupted == resumed


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "crashed"])
def test_dagger_resumes_exactly_between_rounds(undisturbed, tmp_path, monkeypatch, capsys, how):
    """Saved every second round, ended in round 3, resumed from 2; Muon's moments are restored."""
    monkeypatch.setattr(cold_start, "DAGGER_ROUND", 6)
    parts, play = tmp_path / "parts", session.Run.play
    flags = ["--demonstrations", 12, "--dagger", 28, "--judge-demonstrations", 8, "--cold-start-batch", 2,
             "--checkpoint-every", 2]
    full = undisturbed(*flags)

    def ending(run, specs, sampling, name, **others):
        if name == "DAgger round 3":
            if how == "crashed":
                raise OSError("the power went")
            os.kill(os.getpid(), signal.SIGINT)
        return play(run, specs, sampling, name, **others)

    with monkeypatch.context() as patch:
        patch.setattr(session.Run, "play", ending)
        assert train(parts, *flags) == (1 if how == "crashed" else 130)
    if how == "stopped":
        assert "holds the model after 11 steps of its cold start; --resume" in capsys.readouterr().err
    before = len(rows(parts, "dagger"))
    assert train(parts, *flags, "--resume") == 0
    assert before == 3
    assert_same_run(full, parts)


@pytest.mark.slow
def test_ppo_resumes_exactly_with_its_critic(start, tmp_path, monkeypatch):
    full, parts = tmp_path / "full", tmp_path / "parts"
    flags = [*start_from(start), "--algo", "ppo", "--tasks", 16, "--group-size", 1, "--iterations", 3]
    assert train(full, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 0)
    assert same(weights(full), weights(parts))
    critics = [torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["critic"]["weights"]
               for out in (full, parts)]
    assert same(*critics)


NORMED = """
import torch
from examples import replay

class Method(replay.Method):
    trains_critic = True

    def begin(self, *arguments):
        super().begin(*arguments)
        critic = torch.nn.BatchNorm1d(1)
        self.critic = critic, torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)

    def assign(self, episodes):
        critic, optimizer = self.critic
        critic(torch.tensor([[episode.reward] for episode in episodes])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return super().assign(episodes) | {"own/mean": float(critic.running_mean)}
"""


@pytest.mark.slow
def test_an_algorithm_resumes_exactly_with_its_memory_random_numbers_and_critic_of_any_kind(
        tmp_path, monkeypatch):
    """The critic has buffers, of which one is a plain number, and its optimizer is not Adam. Episodes that
    were replayed are not among those that are counted and stored.
    """
    full, parts = tmp_path / "full", tmp_path / "parts"
    (tmp_path / "normed.py").write_text(NORMED)
    flags = ["--algo", tmp_path / "normed.py", "--env", ROOT / "examples/lamps.py", "--group-size", 8,
             "--gcd", "--judge-labels", "rule", "--replays", 8, "--iterations", 4, "--save-rollouts"]
    assert train(full, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 2)
    assert [without_times(row) for row in rows(full)] == [without_times(row) for row in rows(parts)]
    saved = [torch.load(out / "checkpoint" / "trainer.pt", weights_only=True) for out in (full, parts)]
    assert same(weights(full), weights(parts)) and same(*(of["critic"]["weights"] for of in saved))
    state = [of["state"]["algorithm"] for of in saved]
    assert state[0] == state[1] and len(state[0]["won"]) == sum(
        round(row["rollout/success"] * 32) for row in rows(full))
    assert int(saved[1]["critic"]["weights"]["num_batches_tracked"]) == 4
    assert [row["replay/episodes"] for row in rows(full)] == [0, 8, 8, 8]
    assert {row["rollout/episodes"] for row in rows(full)} == {32}
    assert all(len(files.read_lines(path)[0]) == 32 for path in (full / "rollouts").iterdir())


@pytest.mark.slow
def test_a_run_with_correction_resumes_with_its_instruction(tmp_path, tmp_path_factory, monkeypatch, capsys):
    """So does a run that begins from its model, and may then be too short to make one of its own."""
    full, parts = tmp_path / "full", tmp_path / "parts"
    find_every_turn_bad(monkeypatch)
    cold = cold_started(tmp_path_factory, "--instructions")
    flags = [*start_from(cold), "--correction", "critiques", "--correction-every", 2, "--judge-turns", 40,
             "--iterations", 4]
    assert train(full, *flags) == 0
    train_in_two(monkeypatch, parts, flags, 2)
    assert len(rows(full, "correction")) == 2 and same(weights(full), weights(parts))
    short = ["--correction", "critiques", "--iterations", 1]
    assert train(tmp_path / "more", *start_from(full / "checkpoint"), *short) == 0
    assert train(tmp_path / "none", *start_from(cold), *short) == 1
    assert_one_error(capsys, "--correction-every=10: above --iterations=1, so no instruction is made")


@pytest.mark.slow
def test_ctrl_c_in_the_rollout_discards_the_iteration_and_resume_repeats_it(start, undisturbed, tmp_path,
                                                                             monkeypatch, capsys):
    """No turn is played after those of the same tick; the saved weights are those before the iteration."""
    parts, flags = tmp_path / "parts", [*start_from(start), "--kl", "loss", "--kl-coef", 1]
    full = undisturbed(*flags)
    submit, after = rollout.Conversation.submit, []

    def pressed_in_the_second_iteration(conversation, *arguments):
        if len(rows(parts)) == 1:
            if not after:
                os.kill(os.getpid(), signal.SIGINT)
            after.append(conversation)
        return submit(conversation, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(rollout.Conversation, "submit", pressed_in_the_second_iteration)
        assert train(parts, *flags) == 130
    assert len(rows(parts)) == 1
    assert len({*map(id, after)}) == len(after)         # no conversation goes on after that tick's responses
    assert "checkpoint holds the model after 1 of 2 iterations; --resume continues" in capsys.readouterr().err
    assert train(parts, *flags, "--resume") == 0
    assert same(weights(full), weights(parts))
    assert [without_times(row) for row in rows(full)] == [without_times(row) for row in rows(parts)]


@pytest.mark.slow
@pytest.mark.parametrize("module, name", [(cold_start, "demonstrate"), (files, "origin_of")])
def test_a_signal_stops_demonstrations_and_the_hashing_of_games(tmp_path, monkeypatch, capsys, module, name):
    function = getattr(module, name)

    def pressed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)

    monkeypatch.setattr(module, name, pressed)
    monkeypatch.setattr(cold_start, "imitate", None)              # must not be called
    assert train(tmp_path, "--demonstrations", 500) == 130
    assert capsys.readouterr().err.rstrip().endswith("stopped; nothing to save yet")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_without_a_traceback(start, tmp_path, monkeypatch, capsys):
    def pressed(*arguments):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(gcd, "judge_turns", pressed)
    assert train(tmp_path, *start_from(start)) == 130
    error = capsys.readouterr().err
    assert "stopped at once" in error and "Traceback" not in error


def test_a_ctrl_c_while_games_are_closed_ends_without_a_traceback(tmp_path, monkeypatch, capsys):
    def failed(config, resources):
        resources.callback(os.kill, os.getpid(), signal.SIGINT)
        return 1

    monkeypatch.setattr(gcd, "attempt", failed)
    try:
        assert train(tmp_path) == 130
    except KeyboardInterrupt:                                                # which would end pytest
        pytest.fail("interrupted")
    assert capsys.readouterr().err == "stopped at once; what was saved before is there\n"


@pytest.mark.slow
def test_a_terminal_that_closes_saves_and_exits(start, tmp_path):
    out = tmp_path / "out"
    command = [ROOT / "gcd.py", *TINY, "--out", out, *start_from(start), "--iterations", 500,
               "--checkpoint-every", 500]
    (run,), outputs = forked.start(command, ENVIRONMENT, tmp_path, ranks=1)
    try:
        wait_for(lambda: not run.is_alive() or (out / "metrics.jsonl").exists() and len(rows(out)) >= 2,
                 limit_s=300)
        os.kill(run.pid, signal.SIGHUP)
    finally:
        done = forked.join([run], outputs)
    assert done.returncode == 130 and "Traceback" not in done.text, done.text[-4000:]
    state = torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["state"]
    assert (state["iteration"], state["instruction"]) == (len(rows(out)), "")
    assert state["seconds"]["rl"] > 0
    assert not same(weights(out), load_file(start / "model.safetensors"))


# Resuming needs the same run

@pytest.mark.slow
@pytest.mark.parametrize("flags, message", [
    (["--algo", "gigpo"], "algo was grpo, is gigpo; normalize_std was False, is True"),
    (["--seed", 1], "seed was 0, is 1"), (["--invalid-penalty", 2], "invalid_penalty was 0.1, is 2.0"),
    (["--iterations", 1], "--iterations=1: --resume finds 2 done"),
    (["--iterations", 9], "iterations was 2, is 9")])
def test_a_run_resumes_with_its_own_settings_only(start, trained, tmp_path, capsys, flags, message):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    before = weights(tmp_path)
    assert train(tmp_path, *start_from(start), "--resume", *flags) == 1
    assert_one_error(capsys, message)
    assert same(before, weights(tmp_path))


@pytest.mark.slow
def test_settings_of_place_and_speed_may_change(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    faster = ["--slots", 3, "--checkpoint-every", 1, "--microbatch-tokens", 512]
    assert train(tmp_path, "--demonstrations", 0, "--resume", *faster) == 0
    assert train(tmp_path, "--demonstrations", 0, "--resume", "--iterations", 0) == 0


def remarks(capsys):
    """What --resume has printed about what differs, a line each."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("--resume: ")]


@pytest.mark.slow
def test_resume_prints_what_changes_the_rounding(start, finished, capsys):
    """And nothing if nothing does. Of an older checkpoint, ranks and device are unknown."""
    flags = [*start_from(start), "--resume"]
    assert train(finished, *flags, "--checkpoint-every", 1, "--checkpoint-activations", "on") == 0
    assert remarks(capsys) == []
    assert train(finished, *flags, "--slots", 3, "--microbatch-tokens", 512) == 0
    (line,) = remarks(capsys)
    assert line.startswith("--resume: slots was 128, is 3; microbatch_tokens was 2048, is 512: sums are ")
    now = config.parse([*TINY, "--slots", "3", "--microbatch-tokens", "512"])      # as in the checkpoint
    first, state = resume.first_record(finished), checkpoint.read_trainer(finished / "checkpoint")["state"]
    two = job.Ranks(0, 2, torch.device("cpu"))
    resume.print_changes(now, finished, state, first, two)
    (line,) = remarks(capsys)
    assert line.startswith("--resume: ranks was 1, is 2: sums are rounded ")
    del state["place"]
    resume.print_changes(now, finished, state, first, two)
    assert remarks(capsys) == []


@pytest.mark.slow
def test_resume_prints_another_commit_and_other_versions(start, finished, monkeypatch, capsys):
    was = resume.first_record(finished)["commit"]
    monkeypatch.setattr(files, "commit", lambda: "abc1234")
    monkeypatch.setattr(files.platform, "python_version", lambda: "9.9")
    assert train(finished, *start_from(start), "--resume") == 0
    (line,) = remarks(capsys)
    assert line.startswith(f"--resume: {finished} was begun with commit {was or 'unknown'}, python 3.")
    assert line.endswith("; it continues with commit abc1234, python 9.9")


@pytest.mark.slow
def test_a_run_that_was_cut_does_not_end_where_it_was_cut(start, tmp_path, monkeypatch, capsys):
    """It would read as finished, with a part of its learning rate's decay. Its own total continues it."""
    full, parts, flags = tmp_path / "full", tmp_path / "parts", [*start_from(start), "--iterations", 3]
    assert train(full, *flags) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "optimize", interrupting(gcd.optimize, 0))
        assert train(parts, *flags) == 130
    before = contents(parts)
    for total in (1, 0):
        assert train(parts, *flags, "--iterations", total, "--resume") == 1
        assert_one_error(capsys, f"was made with other settings: iterations was 3, is {total}")
        assert contents(parts) == before
    assert train(parts, *flags, "--resume", "--evaluate-tasks", 5) == 0       # how it is evaluated may differ
    assert same(weights(full), weights(parts))


@pytest.mark.slow
def test_without_decay_a_run_may_end_where_it_was_cut(start, tmp_path, monkeypatch):
    """It is then the run of that many iterations, and says so."""
    full, parts, flags = tmp_path / "full", tmp_path / "parts", [*start_from(start), "--iterations", 3]
    assert train(full, *flags, "--iterations", 1, lr_decay=False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "optimize", interrupting(gcd.optimize, 0))
        assert train(parts, *flags, lr_decay=False) == 130
    assert train(parts, *flags, "--iterations", 0, "--resume", lr_decay=False) == 1
    assert train(parts, *flags, "--iterations", 1, "--resume", lr_decay=False) == 0
    assert same(weights(full), weights(parts)) and (parts / "stages.json").exists()
    state = checkpoint.read_trainer(parts / "checkpoint")["state"]
    assert (state["iteration"], state["settings"]["iterations"]) == (1, 1)


@pytest.mark.slow
def test_an_evaluation_of_the_weights_before_is_set_aside_by_a_run_that_trains_on(tmp_path, capsys):
    """Its file and its episodes: else the report would show it as the trained model's. So is
    one of other splits or by another protocol."""
    out, flags = tmp_path / "run", ["--demonstrations", 8, "--judge-demonstrations", 0, "--evaluate", "L0",
                                    "--protocol", "sampled", "--evaluate-tasks", 12]
    assert train(out, *flags, "--iterations", 0) == 0
    assert train(out, *flags, "--iterations", 0, "--resume") == 0            # evaluates the same again
    assert not (out / "evaluation.json.old").exists()
    first = (out / "evaluation.json").read_bytes()
    other = ["--evaluate", "L1", "--evaluate-tasks", 3, "--iterations", 0, "--resume"]
    assert train(out, *flags, *other) == 0
    assert (out / "evaluation.json.old-1").read_bytes() == first
    assert f"is now {out}/evaluation.json.old-1" in capsys.readouterr().err
    first = (out / "evaluation.json").read_bytes()
    assert train(out, *flags, *other, "--evaluate", "none") == 0
    assert (out / "evaluation.json").read_bytes() == first
    assert train(out, *flags, "--iterations", 1, "--resume", "--evaluate", "none") == 0
    assert not (out / "evaluation.json").exists() and (out / "evaluation.json.old").read_bytes() == first
    episodes, _ = files.read_lines(out / "episodes.jsonl")
    assert episodes and not [line for line in episodes if line["phase"] == "evaluation"]
    assert files.settings_in(files.read_lines(out / "metrics.jsonl")[0])["iterations"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags, other", [
    ([], False), (["--evaluate", "L1,L0"], False), (["--evaluate", "L0"], True),
    (["--evaluate", "none"], False), (["--protocol", "eight"], True), (["--evaluate-tasks", "5"], True)])
def test_an_evaluation_by_another_protocol_is_another(tmp_path, flags, other):
    settings = config.parse(["--evaluate", "L0,L1", "--protocol", "sampled", *flags])
    assert resume.evaluates_otherwise(settings, tmp_path, {}) is False                     # it holds none yet
    stored = {"splits": {"L0": {}, "L1": {}}, "protocol": "sampled", "evaluate_tasks": 0}
    files.write_json(tmp_path / files.EVALUATION, stored)
    assert resume.evaluates_otherwise(settings, tmp_path, {}) is other
    tasks = settings.environment.split_tasks("L0")
    for games, otherwise in ((tasks, other), (tasks[1:], bool(settings.splits))):
        games_hash = {"L0": settings.environment.tasks_hash(games)}
        files.write_json(tmp_path / files.EVALUATION, stored | {"games_hash": games_hash})
        assert resume.evaluates_otherwise(settings, tmp_path, {}) is otherwise
    for broken in ({"splits": 3}, [1]):
        files.write_json(tmp_path / files.EVALUATION, broken)
        assert resume.evaluates_otherwise(settings, tmp_path, {}) is bool(settings.splits)
    instructed = {"instruction": "Look first."}
    files.write_json(tmp_path / files.EVALUATION, stored | instructed)
    assert resume.evaluates_otherwise(settings, tmp_path, instructed) is other
    without = config.parse(["--evaluate", "L0,L1", "--protocol", "sampled", "--no-correction-at-evaluation"])
    assert resume.evaluates_otherwise(without, tmp_path, instructed)


def test_an_instruction_stays_in_its_environment(tmp_path):
    state = {"instruction": "Look first.", "settings": {"env": "household"}}
    assert resume.instruction_of(tmp_path, state, "household") == "Look first."
    assert resume.instruction_of(tmp_path, state, "lamps.py") == ""
    assert resume.instruction_of(tmp_path, {}, "household") == ""


@pytest.mark.parametrize("began", [{"games_hash": {"train": "h"}, "config": {"iterations": 9}}, {}])
def test_games_elsewhere_are_refused_where_their_content_is_unknown(began):
    settings = config.parse(["--iterations", "9", "--games", "here"])
    state = {"iteration": 1, "settings": settings.settings() | {"games": "there"}}
    refused = pytest.raises(ValueError, match="made with other settings: games was there, is here")
    with nullcontext() if began else refused:
        resume.check_resumed(settings, state, began)
    resume.check_resumed(settings, state | {"iteration": 9}, began)             # it trains no more


def test_settings_that_change_no_game_may_differ(monkeypatch):
    """On --resume, and in an evaluation that is continued."""
    then, now = (config.parse(["--games", games]) for games in ("there", "here"))
    state = {"iteration": 1, "settings": then.settings()}
    for free in ((), ("games",)):
        monkeypatch.setattr(type(now.environment), "sources", ())
        monkeypatch.setattr(type(now.environment), "free_settings", free)
        refused = pytest.raises(ValueError, match="made with other settings: games was there, is here")
        with nullcontext() if free else refused:
            resume.check_resumed(now, state, {})
        assert (evaluation.conditions_of(then, {}) == evaluation.conditions_of(now, {})) is bool(free)


def test_a_setting_that_is_newer_than_the_run_had_its_default():
    """It may have no flag, and another value by a preset."""
    settings = config.parse(["--preset", "paper"])
    then = {name: value for name, value in settings.settings().items() if name != "entropy_coef"}
    with pytest.raises(ValueError, match=f"entropy_coef was 0.0, is {settings.entropy_coef}$"):
        resume.check_resumed(settings, {"iteration": 1, "settings": then}, {})
    other = config.parse([])
    then = {name: value for name, value in other.settings().items() if name != "entropy_coef"}
    resume.check_resumed(other, {"iteration": 1, "settings": then}, {})


@pytest.mark.slow
def test_resume_compares_the_games_by_content(start, tmp_path, monkeypatch, capsys):
    """As long as the run trains, wherever they lie then."""
    out, path = tmp_path / "out", tmp_path / "games.jsonl.gz"

    def write(**changes):
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(GAME | {"rel": f"train/a/{k}"} | changes) + "\n" for k in range(4))

    flags = [*start_from(start), "--games", path]
    write()
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "optimize", interrupting(gcd.optimize, 0))
        assert train(out, *flags) == 130
    before = contents(out)
    write(task_desc="put some apple in fridge")
    assert train(out, *flags, "--resume") == 1
    assert_one_error(capsys, f"--resume: --games={path}: other games than {out} has trained on (hash ")
    assert contents(out) == before
    write()
    monkeypatch.chdir(path.rename(tmp_path / "moved.jsonl.gz").parent)
    flags[-1] = "moved.jsonl.gz"
    assert train(out, *flags, "--resume") == 0
    path = tmp_path / "moved.jsonl.gz"
    write(task_desc="put some apple in fridge")
    assert train(out, *flags, "--resume") == 0, "it trains no more"


FEW = ["--demonstrations", 8, "--judge-demonstrations", 4, "--cold-start-batch", 2]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_stopped_cold_start_resumes_exactly(undisturbed, tmp_path, monkeypatch, capsys, step):
    """In its first stage of 4 steps, between the two, in the second; Muon's moments are restored."""
    parts, update, steps = tmp_path / "parts", cold_start.update.update, itertools.count(1)
    full = undisturbed(*FEW)

    def stopping(*arguments, **options):
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return update(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(cold_start.update, "update", stopping)
        assert train(parts, *FEW) == 130
    assert f"holds the model after {step} steps of its cold start; --resume" in capsys.readouterr().err
    assert train(parts, *FEW, "--resume") == 0
    assert_same_run(full, parts)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [FEW, [*FEW, "--dagger", 4]], ids=["plain", "dagger"])
def test_a_stop_in_the_judges_demonstrations_keeps_the_first_stage(undisturbed, tmp_path, monkeypatch, capsys,
                                                                   flags):
    parts, demonstrate = tmp_path / "parts", cold_start.demonstrate
    full = undisturbed(*flags)
    steps = rows(full, "demonstrations")[0]["kept"] // 2

    def stopping(run, first, *more):
        if first > cold_start.FIRST_DEMONSTRATION:
            os.kill(os.getpid(), signal.SIGINT)
        return demonstrate(run, first, *more)

    with monkeypatch.context() as patch:
        patch.setattr(cold_start, "demonstrate", stopping)
        assert train(parts, *flags) == 130
        assert f"holds the model after {steps} steps of its cold start; --resume" in capsys.readouterr().err
        assert train(parts, *flags, "--resume") == 130                      # once more in the same place
    assert train(parts, *flags, "--resume") == 0
    assert_same_run(full, parts)


@pytest.mark.parametrize("cold", [5, {"rounds": 2}, {"rounds": "2", "steps": 3, "muon": None}])
def test_a_malformed_cold_start_in_a_checkpoint_is_named(cold):
    state = {"iteration": None, "settings": {}, "seconds": {}, "instruction": None}
    resume.check_state("trainer.pt", state | {"cold": {"rounds": 2, "steps": 3, "muon": None}})
    with pytest.raises(ValueError, match="trainer.pt: not a run's: its cold is"):
        resume.check_state("trainer.pt", state | {"cold": cold})


@pytest.mark.parametrize("name, value", [("seconds", {"rl": None}), ("seconds", {"rl": torch.zeros(3)}),
                                         ("cold_start_types", torch.zeros(0)), ("algorithm", None)])
def test_a_malformed_entry_of_a_checkpoints_state_is_named(name, value):
    state = {"iteration": None, "settings": {}, "seconds": {"rl": 1}, "instruction": None,
             "cold_start_types": None, "algorithm": {}}
    resume.check_state("trainer.pt", state)
    with pytest.raises(ValueError, match=f"trainer.pt: not a run's: its {name} "):
        resume.check_state("trainer.pt", state | {name: value})


@pytest.mark.slow
def test_a_stop_that_one_rank_hears_stops_and_saves_on_all(start, tmp_path):
    """Saving is a collective: a rank that went on would wait in another one."""
    out = tmp_path / "run"
    flags = [*TINY, *map(str, start_from(start)), "--iterations", "400"]
    processes, outputs = forked.start([ROOT / "gcd.py", *flags, "--out", out], ENVIRONMENT, tmp_path, ranks=2)
    wait_for(lambda: (out / files.METRICS).exists() and rows(out), limit_s=120)
    os.kill(processes[1].pid, signal.SIGTERM)
    done = forked.join(processes, outputs, timeout=120)
    assert [process.exitcode for process in processes] == [130, 130], done.text[-4000:]
    assert checkpoint.read_trainer(out / "checkpoint")["state"]["iteration"] == len(rows(out)) < 400


@pytest.mark.slow
def test_damaged_weights_are_refused_or_replaced_by_the_checkpoint_before(trained, tmp_path, capsys):
    """They would load as other weights."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    earlier, path = out / "checkpoint.old", out / "checkpoint" / "model.safetensors"
    shutil.copytree(out / "checkpoint", earlier)
    content = path.read_bytes()
    path.write_bytes(content[:-8] + bytes(8))
    resumed = ["--demonstrations", 0, "--model", "", "--resume"]
    earlier.rename(tmp_path / "kept")
    assert train(out, *resumed) == 1
    assert_one_error(capsys, "not the file that this checkpoint was saved with")
    (tmp_path / "kept").rename(earlier)
    assert train(out, *resumed) == 0 and path.read_bytes() == content


@pytest.mark.slow
def test_a_checkpoint_whose_state_is_malformed_is_not_resumed(trained, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    path = out / "checkpoint" / checkpoint.TRAINER_FILE
    content = torch.load(path, weights_only=True)
    content["state"]["seconds"] = 3
    torch.save(content, path)
    assert train(out, "--demonstrations", 0, "--model", "", "--resume") == 1
    assert_one_error(capsys, "trainer.pt: not a run's: its seconds is 3")


# One run in a folder

@pytest.fixture
def finished(trained, tmp_path):
    """A folder with a run of two iterations."""
    shutil.copytree(trained, tmp_path / "out")
    return tmp_path / "out"


def contents(folder):
    """{path: content} of a folder's files, without the lock."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != files.LOCK}


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused(start, finished, capsys):
    before = contents(finished)
    assert train(finished, *start_from(start)) == 1
    assert_one_error(capsys, f"--out={finished}: holds a run; --resume continues it, --overwrite sets")
    assert contents(finished) == before
    shutil.rmtree(finished / "checkpoint")                   # the other files are a run's too
    assert train(finished, *start_from(start)) == 1


@pytest.mark.slow
def test_overwrite_sets_the_old_run_aside_even_if_stopped_early(start, finished, monkeypatch):
    """A regression test: a Ctrl-C in the new run once replaced a trained checkpoint."""
    before = contents(finished)
    for n in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(gcd, "optimize", interrupting(gcd.optimize, 0))
            assert train(finished, *start_from(start), "--overwrite", "--seed", n) == 130
    assert contents(finished.with_name("out.old-1")) == before
    assert len(rows(finished.with_name("out.old-2"))) == len(rows(finished)) == 1


@pytest.mark.slow
def test_overwrite_of_a_link_renames_the_link(start, finished):
    """What it points to stays where it is, and further commands work."""
    before, link = contents(finished), finished.with_name("link")
    link.symlink_to(finished.name)
    link.with_name("link.old-1").symlink_to("nowhere")                    # taken, too
    assert train(link, *start_from(start), "--overwrite", "--seed", 1) == 0
    assert contents(finished) == before and not finished.with_name("out.old-1").exists()
    aside = link.with_name("link.old-2")
    assert aside.is_symlink() and aside.resolve() == finished.resolve()
    assert link.is_dir() and not link.is_symlink() and len(rows(link)) == 2
    assert train(link, *start_from(start), "--resume", "--seed", 1) == 0
    assert train(link, *start_from(start), "--resume", "--overwrite", "--seed", 2) == 0
    assert link.with_name("link.old-3").is_dir() and len(rows(link)) == 2


@pytest.mark.slow
def test_a_link_as_checkpoint_is_followed(start, finished, tmp_path):
    """Saved through when resumed; set aside as a link when overwritten."""
    elsewhere, link = tmp_path / "elsewhere", finished / "checkpoint"
    link.rename(elsewhere)
    link.symlink_to(elsewhere)
    flags, saved = start_from(start), (elsewhere / "trainer.pt").stat().st_ino
    assert train(finished, *flags, "--resume") == 0
    assert link.is_symlink() and (elsewhere / "trainer.pt").stat().st_ino != saved
    before = contents(elsewhere)
    assert train(finished, *flags, "--overwrite", "--seed", 1) == 0
    assert contents(elsewhere) == before and not link.is_symlink()
    assert weights(finished.with_name("out.old-1")).keys() == weights(finished).keys()


@pytest.mark.slow
@pytest.mark.parametrize("here, out", [(".", "."), ("checkpoint", ".."), ("checkpoint", "OUT"),
                                       (".", "checkpoint/..")])
def test_overwrite_does_not_rename_the_working_directory(start, finished, monkeypatch, capsys, here, out):
    before, out = contents(finished), str(finished) if out == "OUT" else out
    monkeypatch.chdir(finished / here)
    for flags in (["--overwrite"], ["--resume", "--overwrite", "--seed", 1]):
        assert train(out, *start_from(start), *flags) == 1
        assert_one_error(capsys, f"--out={out}: --overwrite would rename the folder that this command works")
    assert contents(finished) == before and not finished.with_name("out.old-1").exists()
    assert train(out, *start_from(start), "--resume", "--overwrite") == 0


def test_overwrite_takes_no_setting_of_a_plugin_for_a_path(tmp_path):
    """Household's --games is one; another environment's may be a number."""
    text = (ROOT / "examples" / "guess.py").read_text(encoding="utf-8")
    field, more = "        highest: int = ", "        games: int = field(default=5, metadata={'help': 'x'})\n"
    (tmp_path / "mine.py").write_text(text.replace(field, more + field), encoding="utf-8")
    out = tmp_path / "out"
    out.mkdir()
    (out / files.METRICS).write_text("{}\n", encoding="utf-8")
    settings = config.parse(["--env", str(tmp_path / "mine.py"), "--overwrite", "--out", str(out)])
    assert resume.starting_point(settings, out, job.Ranks(0, 1, torch.device("cpu"))) == (None, None)


@pytest.mark.slow
def test_overwrite_does_not_set_aside_what_the_run_needs(start, finished, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    for flag, name in (("--env", "mine.py"), ("--games", "games.jsonl.gz"), ("--model", "checkpoint"),
                       ("--endpoint-cache", "answers.jsonl")):
        needed = finished / name
        if name == "mine.py":
            shutil.copy(ROOT / "examples" / "guess.py", needed)
        flags = {"--model": start, "--demonstrations": 0, flag: needed}
        needed.touch()
        if name == "answers.jsonl":
            flags |= {"--endpoint": "http://127.0.0.1:1/v1", "--judge-labels": "endpoint"}
        assert train(finished, *(part for pair in flags.items() for part in pair), "--overwrite") == 1
        assert_one_error(capsys, f"{flag}={needed}: lies in --out={finished}, which --overwrite would set")
    assert not finished.with_name("out.old-1").exists()


def test_a_folder_may_be_called_as_what_is_built_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("household", "grpo"):
        (tmp_path / name).mkdir()
        resume.check_apart(config.parse(["--env", "household", "--algo", "grpo"]), tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reference", "adapter", "kept"])
def test_a_folder_of_a_runs_models_is_refused(start, tmp_path, capsys, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    assert train(tmp_path / "out", *start_from(start)) == 1
    assert_one_error(capsys, f"--out={tmp_path / 'out'}: holds a run; --resume continues it")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "link to a file", "link to nothing", "link to itself", "in a file"])
def test_an_out_that_is_no_folder_is_named(start, tmp_path, capsys, kind):
    (tmp_path / "file").write_text("mine")
    target = {"link to a file": "file", "link to nothing": "nowhere", "link to itself": "link"}.get(kind)
    out = tmp_path / {"file": "file", "in a file": "file/out"}.get(kind, "link")
    if target:
        out.symlink_to(target)
    for flags in ([], ["--overwrite"], ["--resume", "--overwrite"]):
        assert train(out, *start_from(start), *flags) == 1
        why = "neither a folder nor a link to one" if out.parent == tmp_path else "Not a directory"
        assert_one_error(capsys, f"--out={out}: {why}")
    assert (tmp_path / "file").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"file", *(["link"] if target else [])}


@pytest.mark.slow
def test_resume_with_overwrite_continues_if_possible_and_starts_over_if_not(start, finished, capsys):
    before, aside = weights(finished), finished.with_name("out.old-1")
    both = [*start_from(start), "--resume", "--overwrite"]
    assert train(finished, *both) == 0
    assert same(before, weights(finished)) and not aside.exists()
    assert train(finished, *both, "--seed", 1) == 0
    assert "seed was 0, is 1; so it starts over" in capsys.readouterr().err
    assert same(before, weights(aside)) and not same(before, weights(finished)) and len(rows(finished)) == 2
    assert train(finished.with_name("new"), *both, "--iterations", 0) == 0


@pytest.mark.slow
def test_without_the_kls_reference_a_run_starts_over_if_it_may(start, tmp_path, capsys):
    out, flags = tmp_path / "out", [*start_from(start), "--kl", "loss", "--no-lr-decay"]
    assert train(out, *flags, "--iterations", 1) == 0
    (out / "reference" / "config.json").write_text("{")
    before, more = contents(out), [*flags, "--iterations", 2, "--resume"]
    assert train(out, *more) == 1
    assert_one_error(capsys, "reference/config.json: not JSON")
    assert contents(out) == before
    assert train(out, *more, "--overwrite") == 0
    assert "so it starts over" in capsys.readouterr().err and len(rows(out)) == 2


@pytest.mark.slow
def test_a_finished_run_with_a_kl_is_evaluated_again_without_its_reference(start, tmp_path):
    out, flags = tmp_path / "out", [*start_from(start), "--kl", "loss", "--iterations", 1]
    flags += ["--evaluate-tasks", 3]
    assert train(out, *flags) == 0
    shutil.rmtree(out / "reference")
    assert train(out, *flags, "--resume", "--evaluate", "L1", "--protocol", "sampled") == 0
    assert [*files.read_json(out / "evaluation.json")["splits"]] == ["L1"]


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_today_is_neither_broken_nor_started_over(start, finished, capsys,
                                                                                  monkeypatch):
    """As by a stale handle of a network file system; the next --resume continues."""
    before = contents(finished)
    for error in (OSError(errno.ESTALE, "Stale file handle"), MemoryError()):
        with monkeypatch.context() as patched:
            patched.setattr(torch, "load", Mock(side_effect=error))
            assert train(finished, *start_from(start), "--resume", "--overwrite") == 1
        assert contents(finished) == before and "starts over" not in capsys.readouterr().err


@pytest.mark.slow
def test_all_ranks_hear_that_a_run_may_not_continue(start, finished, monkeypatch):
    """--games may differ between machines, so that one rank alone refuses."""
    collective, depth, checked = parallel.collective, [], []

    def recorded(action):
        depth.append(action)
        try:
            return collective(action)
        finally:
            depth.pop()

    monkeypatch.setattr(parallel, "collective", recorded)
    monkeypatch.setattr(resume, "check_resumed", lambda *arguments: checked.append(len(depth)))
    assert train(finished, *start_from(start), "--resume") == 0
    assert checked == [1]


@pytest.mark.slow
def test_resume_refuses_the_metrics_or_weights_of_a_different_run(start, finished, tmp_path, capsys):
    assert train(tmp_path / "other", *start_from(start), "--seed", 1) == 0
    shutil.copy(tmp_path / "other" / "metrics.jsonl", finished)
    assert train(finished, *start_from(start), "--resume") == 1
    assert_one_error(capsys, "metrics.jsonl is of run ")
    assert train(tmp_path / "other", *start_from(finished / "checkpoint"), "--seed", 1, "--resume") == 1
    assert_one_error(capsys, f"began with other weights than --model={finished / 'checkpoint'} holds")


@pytest.mark.slow
def test_resume_refuses_a_model_for_a_run_that_began_without_one(tmp_path, start, capsys):
    fresh = ["--demonstrations", 8, "--judge-demonstrations", 0, "--iterations", 0]
    assert train(tmp_path, *fresh) == 0 and train(tmp_path, *fresh, "--resume") == 0
    capsys.readouterr()
    assert train(tmp_path, *fresh, "--resume", "--model", start) == 1
    assert_one_error(capsys, f"{tmp_path} began with a fresh model, not with --model={start}")


@pytest.mark.slow
def test_one_process_writes_at_a_time_and_the_error_names_it(start, finished, capsys):
    before = contents(finished)
    with files.locked(finished):
        for flags in ((), ("--resume",), ("--overwrite",)):
            assert train(finished, *start_from(start), *flags) == 1
            assert_one_error(capsys, f"--out={finished}: process {os.getpid()} of ")
    assert contents(finished) == before and files.lock_holder(finished) == ""
    assert train(finished, *start_from(start), "--resume") == 0


@pytest.mark.slow
def test_lines_logged_after_the_last_checkpoint_are_not_duplicated(start, tmp_path, monkeypatch):
    """episodes.jsonl and metrics.jsonl, evaluation included, equal those of an undisturbed run."""
    flags = [*start_from(start), "--iterations", 3, "--evaluate", "L2", "--protocol", "sampled",
             "--evaluate-tasks", 12]
    full, parts = tmp_path / "full", tmp_path / "parts"
    assert train(full, *flags) == 0

    def dies(*arguments):
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "lr_factor", lambda config, i: dies() if i == 2 else 1 - i / config.iterations)
        assert train(parts, *flags, "--checkpoint-every", 1) == 1
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "run_or_stop", dies)
        patch.setattr(checkpoint, "save_checkpoint", dies)
        assert train(parts, *flags, "--resume") == 1
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", dies)
        assert train(parts, *flags, "--resume") == 1
    assert train(parts, *flags, "--resume") == 0
    assert [without_times(row) for row in rows(full)] == [without_times(row) for row in rows(parts)]
    assert (full / "episodes.jsonl").read_text() == (parts / "episodes.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("written", [True, False])
def test_resume_repairs_a_kill_between_the_two_renames(start, finished, written):
    checkpoint = finished / "checkpoint"
    checkpoint.rename(finished / "checkpoint.old")
    if written:
        shutil.copytree(finished / "checkpoint.old", finished / "checkpoint.writing")
    assert train(finished, *start_from(start), "--resume", "--overwrite") == 0
    assert not finished.with_name("out.old-1").exists() and checkpoint.is_dir()
