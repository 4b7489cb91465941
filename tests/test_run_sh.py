"""Proves that run.sh runs its stages once, and leaves no run behind however it ends.

    python -m pytest tests/test_run_sh.py

.venv/bin/python is a stand-in: it notes its call, and does what the file of its stage's name says.
"""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import is_alive

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 90                   # with a busy machine; nothing here takes a second on an idle one
STAND_IN = """#!/usr/bin/env bash
out=$(printf '%s\\n' "$@" | grep -A1 -x -e --out | tail -1)
name=$(basename "${out:-report}")
echo "$name $*" >> calls
plan=$(cat "plan-$name" 2> /dev/null || true)
if [ "$plan" = wait ]; then
    told=0
    trap 'told=$((told + 1)); echo "$name" >> told' TERM
    echo $$ > "pid-$name"
    for _ in {1..2400}; do [ $told -ge "$(cat times)" ] && exit 130; sleep 0.05; done
    exit 1
fi
[ "$plan" != fail ] || { while [ -e plan-grpo ] && [ ! -e pid-grpo ]; do sleep 0.05; done; exit 1; }
[ -z "$out" ] || { mkdir -p "$out" && touch "$out/stages.json"; }
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with run.sh in which everything is installed."""
    for path in (ROOT / "run.sh", *ROOT.glob("requirements*.txt")):
        shutil.copy(path, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for path in (python, python.with_name("pip")):
        path.write_text(STAND_IN)
        path.chmod(0o755)
    shutil.copy(tmp_path / "requirements.txt", tmp_path / ".venv")
    (tmp_path / "times").write_text("1")              # how often a waiting stand-in must be told to end
    return tmp_path


def run_sh(folder, *arguments):
    """run.sh as a terminal would start it: a background job is deaf to Ctrl-C, one under nohup to SIGHUP."""
    def listen():
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)

    return subprocess.Popen(["bash", "run.sh", *arguments], cwd=folder, stderr=subprocess.PIPE, text=True,
                            preexec_fn=listen)


def with_both_waiting(folder):
    """run.sh, whose two methods run until they are told to end."""
    for name in ("grpo", "grpo+gcd"):
        (folder / f"plan-{name}").write_text("wait")
    process = run_sh(folder)
    for name in ("grpo", "grpo+gcd"):
        wait_for(folder / f"pid-{name}")
    return process


def stages(folder):
    return [line.split()[0] for line in (folder / "calls").read_text().splitlines()]


def is_running(folder, name):
    """Whether the stand-in of a stage, which waits for a signal, is still there."""
    return is_alive(int((folder / f"pid-{name}").read_text()))


def wait_for(path, lines=1):
    end = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text().count("\n") >= lines):
        assert time.monotonic() < end, path
        time.sleep(0.02)


def test_each_stage_runs_once_and_an_interrupted_one_goes_on(folder):
    assert run_sh(folder).wait(PATIENCE_S) == 0
    assert stages(folder)[0] == "cold_start" and sorted(stages(folder)[1:3]) == ["grpo", "grpo+gcd"]
    assert stages(folder)[3:] == ["report"]
    assert run_sh(folder).wait(PATIENCE_S) == 0
    assert stages(folder)[4:] == ["report"]
    (folder / "runs/main/grpo/stages.json").unlink()
    assert run_sh(folder).wait(PATIENCE_S) == 0
    last = (folder / "calls").read_text().splitlines()[5]
    assert last.startswith("grpo ") and "--resume --overwrite" in last and "--no-gcd" in last


def test_a_failed_method_leaves_the_other_none_to_run_on(folder):
    (folder / "plan-grpo").write_text("wait")
    (folder / "plan-grpo+gcd").write_text("fail")
    assert run_sh(folder).wait(PATIENCE_S) == 1
    assert (folder / "told").read_text() == "grpo\n" and not is_running(folder, "grpo")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_stopped_it_tells_both_once_and_waits_for_them(folder, signum):
    process = with_both_waiting(folder)
    process.send_signal(signum)
    assert process.wait(PATIENCE_S) == 130
    assert sorted((folder / "told").read_text().split()) == ["grpo", "grpo+gcd"]
    assert not is_running(folder, "grpo") and not is_running(folder, "grpo+gcd")


def test_told_again_it_tells_them_again(folder):
    """Then they end at once; it does not leave before them."""
    (folder / "times").write_text("2")
    process = with_both_waiting(folder)
    process.send_signal(signal.SIGINT)
    wait_for(folder / "told", lines=2)
    time.sleep(0.3)
    assert process.poll() is None and is_running(folder, "grpo")
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130
    assert sorted((folder / "told").read_text().split()) == ["grpo", "grpo", "grpo+gcd", "grpo+gcd"]


def test_stopped_within_the_cold_start_it_tells_that(folder):
    (folder / "plan-cold_start").write_text("wait")
    process = run_sh(folder)
    wait_for(folder / "pid-cold_start")
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130
    assert (folder / "told").read_text() == "cold_start\n" and stages(folder) == ["cold_start"]
    assert not is_running(folder, "cold_start")


def test_an_unknown_argument_is_named(folder):
    process = run_sh(folder, "tset")
    assert process.wait(PATIENCE_S) == 2 and "unknown argument tset" in process.stderr.read()
    assert not (folder / "calls").exists()
