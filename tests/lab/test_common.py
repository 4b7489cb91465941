"""Tests of what all studies have in common.

    python -m pytest tests/lab/test_common.py
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import psutil
import pytest
from conftest import is_alive
from tiny_runs import ENVIRONMENT, ROOT
from waiting import wait, wait_for

import config
from infra import files
from infra.signals import Stop
from lab.studies import common


def fail_once_others_run(name, settings):
    """Cell "a" fails once the others run."""
    if name != "a":
        wait(name, settings)
    wait_for((Path(settings["folder"]) / "b").exists)
    raise ArithmeticError(name)


@pytest.mark.slow
def test_a_study_that_is_killed_leaves_no_worker(tmp_path):
    program = ("from lab.studies import common\nimport waiting\n"
               f"cells = {{name: {{'folder': {str(tmp_path)!r}}} for name in 'abc'}}\n"
               "print(*common.results_of(cells, waiting.wait, 2))")
    study = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))})
    wait_for(lambda: len([*tmp_path.iterdir()]) == 2, study)
    workers = [child.pid for child in psutil.Process(study.pid).children(recursive=True)]
    study.terminate()
    assert study.wait(60) != 0
    wait_for(lambda: not any(map(is_alive, workers)))
    assert len([*tmp_path.iterdir()]) == 2


def name_of(name, settings):
    """A short cell."""
    return name


@pytest.fixture
def forked_workers(monkeypatch):
    """A study's workers are forked from a process that has loaded torch."""
    forks = forked.context()
    monkeypatch.setattr(common.multiprocessing, "get_context", lambda method: forks)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_study_hears_sigterm_but_no_sighup_that_nohup_ignores():
    with Stop.restored():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        found = common.results_of({"a": {}, "b": {}}, name_of, 2)
        first = next(found)
        assert signal.getsignal(signal.SIGTERM) == signal.default_int_handler
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert {first, *found} == {("a", "a"), ("b", "b")}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_cell_that_fails_ends_the_others(tmp_path):
    cells = {name: {"folder": str(tmp_path)} for name in "ab"}
    began = time.monotonic()
    with pytest.raises(ArithmeticError, match="a"):
        list(common.results_of(cells, fail_once_others_run, 2))
    assert time.monotonic() - began < 300


def test_a_cold_start_is_made_once_and_again_with_other_settings(tmp_path, monkeypatch):
    made, flags, out = [], ["--env", "lab/envs/twins.py", "--seed", 3, "--overwrite"], tmp_path / "cold"
    monkeypatch.setattr(common, "train", lambda given, folder: made.append(given))
    common.make(flags, out)                                                     # there is no run yet
    record = {"phase": "settings", "config": config.parse([*map(str, flags)]).settings()}
    out.mkdir()
    files.append(out / files.METRICS, record)
    common.make(flags, out)                                                     # it has not ended
    (out / files.STAGES).write_text("{}", encoding="utf-8")
    common.make([*flags, "--out", out], out)                                    # the run, wherever it is
    assert made == [flags, flags]
    common.make([*flags, "--demonstrations", 5], out)
    assert len(made) == 3
