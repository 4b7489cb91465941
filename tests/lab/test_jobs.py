"""Tests which cells run and when: order, resuming, failures, interruption, locks. No model is trained.

    python -m pytest tests/lab/test_jobs.py
"""

import json
import os
import signal
import sys
import threading
import time

import pytest
from stand_in import CONFIG
from waiting import wait_for

from infra import files
from lab.bench.jobs import Children


def both(row):
    return [(row, 0), (row, 1)]


EVERY = [*both("vanilla"), *both("cold"), *both("grpo"), *both("grpo+gcd"), *both("grpo+gcd@75"),
         *both("cold_plain")]


@pytest.mark.slow
def test_a_cold_start_runs_before_its_rows_and_a_row_is_complete_before_the_next(bench):
    assert bench.main() == 0
    assert bench.calls() == EVERY
    cold = str(bench.folder / "runs/household/seed1/cold/checkpoint")
    grpo = bench.argv(5)
    assert (grpo[grpo.index("--model") + 1], grpo[grpo.index("--evaluate") + 1]) == (cold, "L0,L2")
    assert grpo[grpo.index("--demonstrations") + 1] == "0" and "--model" not in bench.argv(2)
    start = bench.argv(2)
    assert [start[i + 1] for i, a in enumerate(start) if a == "--iterations"] == ["12", "0"]


@pytest.mark.slow
def test_a_finished_cell_is_not_run_again_even_without_its_run_folder(bench):
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1)]
    (bench.folder / "runs").rename(bench.folder / "gone")
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["runs", "runs/household/seed0/cold/checkpoint"])
def test_a_cold_start_whose_checkpoint_is_gone_is_run_again_for_a_row_that_needs_it(bench, lost):
    bench.main("--rows", "grpo", "--seeds", "0")
    (bench.folder / lost).rename(bench.folder / "gone")
    bench.main("--rows", "grpo+gcd", "--seeds", "0")
    assert bench.calls() == [("cold", 0), ("grpo", 0), ("cold", 0), ("grpo+gcd", 0)]


@pytest.mark.slow
def test_a_run_that_ended_before_its_result_was_saved_is_only_read(bench):
    bench.main("--rows", "grpo", "--seeds", "0")
    saved = bench.folder / "lab/results/cells/household/grpo/seed0.json"
    before = saved.read_text()
    saved.unlink()
    bench.main("--rows", "grpo", "--seeds", "0")
    assert saved.read_text() == before and len(bench.calls()) == 2


@pytest.mark.slow
def test_a_failed_cell_is_named_stops_only_its_dependants_and_is_run_again(bench, capsys):
    (bench.folder / "fail").write_text("cold grpo_x")
    assert bench.main("--seeds", "0") == 1
    errors = capsys.readouterr().err
    assert "runs/household/seed0/cold: gcd.py ended with 1" in errors
    assert "runs/household/seed0/grpo: not run, because cold failed" in errors
    assert bench.calls() == [("vanilla", 0), ("cold", 0), ("cold_plain", 0)]
    (bench.folder / "fail").unlink()
    assert bench.main("--seeds", "0") == 0
    assert bench.calls()[3:] == [("cold", 0), ("grpo", 0), ("grpo+gcd", 0), ("grpo+gcd@75", 0)]


@pytest.mark.slow
def test_two_jobs_run_the_same_cells(bench):
    assert bench.main("--jobs", "2") == 0
    assert sorted(bench.calls()) == sorted(EVERY)
    assert all(bench.calls().index(("cold", seed)) < bench.calls().index(("grpo", seed)) for seed in (0, 1))


@pytest.mark.slow
def test_interrupted_cells_are_stopped_once_and_resume(bench):
    """Ctrl-C makes the run save and end; the next start resumes it, and its log is read as one run."""
    (bench.folder / "wait").touch()

    def press_when_waiting():
        wait_for(lambda: ended.is_set() or (bench.folder / "waiting").exists())
        if not ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    config = CONFIG | {"cold_starts": {}, "differences": [],
                       "rows": {"grpo": CONFIG["rows"]["grpo"] | {"start": None}}}
    bench.write(config)
    ended, presser = threading.Event(), threading.Thread(target=press_when_waiting)
    presser.start()
    started = time.monotonic()
    try:
        assert bench.main("--seeds", "0") == 130
    finally:
        ended.set()
        presser.join()
    assert time.monotonic() - started < 30 and not (bench.folder / "lab/results/cells").exists()
    assert (bench.folder / "asked").read_text() == "once"
    (bench.folder / "wait").unlink()
    assert bench.main("--seeds", "0") == 0
    assert bench.argv(0) == bench.argv(1) and bench.argv(1)[-2:] == ["--resume", "--overwrite"]
    cell = json.loads((bench.folder / "lab/results/cells/household/grpo/seed0.json").read_text())
    assert (cell["resumed"], cell["iterations"]) == (1, 12)


def test_a_run_stops_if_the_process_that_started_it_is_killed(tmp_path):
    """It has the variable by which gcd.py knows that this process supervises it (infra/signals.py)."""
    with open(tmp_path / "log", "w+") as log:
        program = "import os; print(os.environ['GCD_PARENT'] == str(os.getppid()))"
        assert Children().run([sys.executable, "-c", program], log) == 0
        log.seek(0)
        assert log.read() == "True\n"


@pytest.mark.parametrize("jobs, given, got", [
    (2, None, str(max(1, os.cpu_count() // 2))), (10_000, None, "1"), (2, "5", "5"), (1, None, "None")])
def test_runs_side_by_side_share_the_cores(tmp_path, monkeypatch, jobs, given, got):
    """By a number of threads, unless one is given."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    with open(tmp_path / "log", "w") as log:
        program = "import os; print(os.environ.get('OMP_NUM_THREADS'))"
        assert Children(jobs).run([sys.executable, "-c", program], log) == 0
    assert (tmp_path / "log").read_text().strip() == got


def test_a_torn_line_is_skipped_and_an_invalid_log_stops_its_cell_only(bench, capsys):
    plain = {"start": None, "flags": ["--lr", "6e-4"], "paper": None}
    config = CONFIG | {"common": ["--iterations", "0"], "cold_starts": {}, "differences": [],
                       "rows": dict.fromkeys(("grpo", "gigpo"), plain)}
    bench.write(config)
    torn = ('{"config": {"lr": 0.0006}, "commit": "a", "versions": {}}\n'
            '{"phase": "rl", "iteration": 0, "rollout/success": 0.5}\n{"phase": "r\n')
    for row, log in (("grpo", torn), ("gigpo", "[]\n")):
        folder = bench.folder / "runs/household/seed0" / row
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint/trainer.pt").touch()
        (folder / "metrics.jsonl").write_text(log)
    (folder / "stages.json").write_text("{}")
    assert bench.main("--seeds", "0") == 1
    assert bench.calls() == [("grpo", 0)]
    errors = capsys.readouterr().err
    assert "runs/household/seed0/gigpo: ValueError: metrics.jsonl does not begin with settings" in errors


@pytest.mark.slow
def test_a_cell_that_runs_in_a_different_process_is_not_started(bench, capsys):
    """The run itself locks its folder, so this also holds if its lab.bench.table1 was killed."""
    with files.locked(bench.folder / "runs/household/seed0/cold"):
        assert bench.main("--rows", "grpo", "--seeds", "0") == 1
    errors = capsys.readouterr().err
    assert f"seed0/cold: process {os.getpid()} of " in errors and " is writing there" in errors
    assert bench.calls() == []
    assert bench.main("--rows", "grpo", "--seeds", "0") == 0


@pytest.mark.slow
def test_a_row_with_rerun_is_read_and_never_run(bench, capsys):
    """gcd.py may reject its flags; its missing cells are reported in one line."""
    bench.main("--rows", "grpo", "--seeds", "0")
    marks = {"rerun": "no flag does this", "flags": ["--gone", "--lr", "0.5"], "note": "a note"}
    row = CONFIG["rows"]["grpo"] | marks
    bench.write(CONFIG | {"rows": CONFIG["rows"] | {"grpo": row}})
    (bench.folder / "runs").rename(bench.folder / "gone")
    before = bench.calls()
    capsys.readouterr()
    assert bench.main("--rows", "grpo") == 0
    printed = capsys.readouterr()
    assert printed.err == "1 missing cells of grpo are not run: no flag does this\n"
    assert bench.calls() == before
    assert "- grpo: a note" in printed.out
    assert "- grpo: not to be run again: no flag does this" in printed.out
    assert bench.result()["rows"]["grpo"]["L0"]["seeds"] == {"0": 0.5}
