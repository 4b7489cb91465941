"""Proves the study runner: what runs when, what is kept, and the table's numbers against hand arithmetic.

A stand-in for gcd.py writes a run's files in milliseconds; nothing is trained.

    python -m pytest tests/test_table1.py
"""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bench import table1, table4

pytestmark = pytest.mark.fast
ROOT = Path(__file__).resolve().parent.parent
PAPER_TEXT = ROOT.parent / "shared/papers/gcd-2509.23870.txt"
PAPER = json.loads((ROOT / "results/paper.json").read_text())

# Plays gcd.py: notes its call, fails or waits where told to, and writes what a run leaves. Success is a function of
# row and seed: grpo 0.5 + seed / 10, others 0.25.
STAND_IN = '''
import json, os, pathlib, signal, sys, time
argv = sys.argv[1:]
flag = lambda name, default="": ([default] + [argv[i + 1] for i, a in enumerate(argv) if a == name])[-1]
out, seed = pathlib.Path(flag("--out")), int(flag("--seed"))
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"row": out.name, "seed": seed, "argv": argv}) + "\\n")
(out / "checkpoint").mkdir(parents=True, exist_ok=True)
model = pathlib.Path(flag("--model", "."))
assert model.is_dir(), model
if (here / "fail").exists() and out.name in (here / "fail").read_text().split():
    sys.exit(1)
rate = 0.5 + seed / 10 if out.name == "grpo" else 0.25
rows = [{"config": {"lr": float(flag("--lr", "6e-4"))}, "versions": {"python": "3", "machine": "a toy"}, "commit": "abc",
         "parameters": 1234, "started": "now"}]
iterations = int(flag("--iterations", "0"))
judge_s = 1.0 if "--gcd" in argv else 0.0
slow = 10.0 if "seconds" in out.name else 0.0          # of a run for bench.table4 the first iteration does not count
for i in range(iterations):
    rows.append({"phase": "rl", "iteration": i, "rollout/success": i / 100,
                 "judge/auc": i / 10 if "--gcd" in argv else None,
                 "time/rollout_s": 2.0 + slow * (i == 0), "time/judge_s": judge_s, "time/update_s": 1.0})
with open(out / "metrics.jsonl", "a" if "--resume" in argv else "w") as log:
    log.writelines(json.dumps(row) + "\\n" for row in rows)
if (here / "wait").exists():
    (out / "checkpoint" / "trainer.pt").touch()
    def stop(*_):
        with open(here / "asked", "a") as asked:
            asked.write("once")
        time.sleep(0.2)
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    (here / "waiting").touch()
    time.sleep(60)
modes = lambda x: {m: {"success": x, "n": 20, "turns": 3.0, "invalid_frac": 0.1, "repeated_frac": 0.0} for m in
                   ("sampled", "greedy", "t0.4")}
splits = {s: modes(rate) for s in flag("--evaluate").split(",")}
if flag("--evaluate") == "none":
    sys.exit()
(out / "evaluation.json").write_text(json.dumps({"splits": splits, "games": "toy games"}))
(out / "stages.json").write_text(json.dumps({"rl": 1.0}))
'''
CONFIG = {
    "what": "a test", "benchmark": "household", "model": "", "games": "", "splits": ["L0", "L2"], "seeds": [0, 1],
    "paper_model": "Qwen2.5-1.5B", "common": ["--lr", "6e-4", "--iterations", "12"],
    "cold_starts": {"cold_plain": ["--demonstrations", "5"], "cold": ["--demonstrations", "7"]},
    "rows": {"vanilla": {"start": None, "flags": ["--demonstrations", "0", "--iterations", "0"], "paper": "Vanilla"},
             "grpo": {"start": "cold", "flags": ["--no-gcd"], "paper": "GRPO"},
             "grpo+gcd": {"start": "cold", "flags": ["--gcd"], "paper": "GRPO with GCD"},
             "grpo+gcd@75": {"start": "cold", "flags": ["--gcd", "--iterations", "9"], "paper": None}},
    "differences": [["grpo", "grpo+gcd"]]}


class Bench:
    """The stand-in, a config file, and where both write, in one folder."""

    def __init__(self, folder):
        self.folder, self.config_file = folder, folder / "study.json"
        (folder / "stand_in.py").write_text(STAND_IN)
        self.write(CONFIG)

    def write(self, config):
        self.config_file.write_text(json.dumps(config))

    def main(self, *flags):
        return table1.main(["--config", str(self.config_file), "--jobs", "1", *flags])

    def calls(self):
        """(row, seed) of each call of gcd.py so far, in order."""
        log = self.folder / "calls.jsonl"
        return [(c["row"], c["seed"]) for c in map(json.loads, log.read_text().splitlines())] if log.exists() else []

    def argv(self, k):
        return json.loads((self.folder / "calls.jsonl").read_text().splitlines()[k])["argv"]

    def result(self):
        return json.loads((self.folder / "study_result.json").read_text())


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(table1, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(table1, "GCD", (sys.executable, str(tmp_path / "stand_in.py")))
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield Bench(tmp_path)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def both(row):
    return [(row, 0), (row, 1)]


EVERY = [*both("vanilla"), *both("cold"), *both("grpo"), *both("grpo+gcd"), *both("grpo+gcd@75"), *both("cold_plain")]


# What runs when

def test_a_cold_start_comes_before_what_needs_it_and_a_row_is_complete_before_the_next(bench):
    assert bench.main() == 0
    assert bench.calls() == EVERY
    cold = str(bench.folder / "runs/household/seed1/cold/checkpoint")
    grpo = bench.argv(5)
    assert (grpo[grpo.index("--model") + 1], grpo[grpo.index("--evaluate") + 1]) == (cold, "L0,L2")
    assert grpo[grpo.index("--demonstrations") + 1] == "0" and "--model" not in bench.argv(2)
    start = bench.argv(2)
    assert [start[i + 1] for i, a in enumerate(start) if a == "--iterations"] == ["12", "0"]      # common's, its own


def test_a_finished_cell_is_not_run_again_even_without_its_run_folder(bench):
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1)]
    (bench.folder / "runs").rename(bench.folder / "gone")
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1)]


@pytest.mark.parametrize("lost", ["runs", "runs/household/seed0/cold/checkpoint"])
def test_a_cold_start_whose_checkpoint_is_gone_is_run_again_for_a_row_that_needs_it(bench, lost):
    bench.main("--rows", "grpo", "--seeds", "0")
    (bench.folder / lost).rename(bench.folder / "gone")
    bench.main("--rows", "grpo+gcd", "--seeds", "0")
    assert bench.calls() == [("cold", 0), ("grpo", 0), ("cold", 0), ("grpo+gcd", 0)]


def test_a_run_that_ended_before_its_result_was_saved_is_only_read(bench):
    bench.main("--rows", "grpo", "--seeds", "0")
    saved = bench.folder / "results/cells/household/grpo/seed0.json"
    before = saved.read_text()
    saved.unlink()
    bench.main("--rows", "grpo", "--seeds", "0")
    assert saved.read_text() == before and len(bench.calls()) == 2


def test_a_failed_cell_is_named_stops_only_what_begins_from_it_and_is_run_again(bench, capsys):
    (bench.folder / "fail").write_text("cold grpo_x")
    assert bench.main("--seeds", "0") == 1
    said = capsys.readouterr().err
    assert "runs/household/seed0/cold: gcd.py ended with 1" in said
    assert "runs/household/seed0/grpo: not run, because cold failed" in said
    assert bench.calls() == [("vanilla", 0), ("cold", 0), ("cold_plain", 0)]
    (bench.folder / "fail").unlink()
    assert bench.main("--seeds", "0") == 0
    assert bench.calls()[3:] == [("cold", 0), ("grpo", 0), ("grpo+gcd", 0), ("grpo+gcd@75", 0)]


def test_two_jobs_run_the_same_cells(bench):
    assert bench.main("--jobs", "2") == 0
    assert sorted(bench.calls()) == sorted(EVERY)
    assert all(bench.calls().index(("cold", seed)) < bench.calls().index(("grpo", seed)) for seed in (0, 1))


def test_interrupted_cells_are_asked_to_stop_once_and_resume(bench):
    """Ctrl-C asks the run to save and end; the next start passes --resume, with the log read as one run."""
    (bench.folder / "wait").touch()

    def press_when_waiting():
        deadline = time.monotonic() + 30
        while not (bench.folder / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    config = CONFIG | {"rows": {"grpo": CONFIG["rows"]["grpo"] | {"start": None}}, "cold_starts": {}, "differences": []}
    bench.write(config)
    presser = threading.Thread(target=press_when_waiting)
    presser.start()
    started = time.monotonic()
    assert bench.main("--seeds", "0") == 130
    assert time.monotonic() - started < 30 and not (bench.folder / "results").exists()
    assert (bench.folder / "asked").read_text() == "once"
    presser.join()
    (bench.folder / "wait").unlink()
    assert bench.main("--seeds", "0") == 0
    assert "--resume" not in bench.argv(0) and bench.argv(1) == [*bench.argv(0), "--resume"]
    cell = json.loads((bench.folder / "results/cells/household/grpo/seed0.json").read_text())
    assert (cell["resumed"], cell["iterations"]) == (1, 12)


def test_what_was_begun_with_other_settings_is_not_resumed(bench):
    config = CONFIG | {"common": ["--lr", "1e-3"], "cold_starts": {}, "differences": [],
                       "rows": {"grpo": CONFIG["rows"]["grpo"] | {"start": None}}}
    bench.write(config)
    folder = bench.folder / "runs/household/seed0/grpo"
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint/trainer.pt").touch()
    (folder / "metrics.jsonl").write_text('{"config": {"lr": 0.5}}\n{"phase": "rl", "iteration": 0}\n')
    assert bench.main("--seeds", "0") == 0
    assert "--resume" not in bench.argv(0) and not (folder / "checkpoint/trainer.pt").exists()


def test_half_a_line_is_left_out_and_a_broken_log_stops_its_cell_only(bench, capsys):
    config = CONFIG | {"common": [], "cold_starts": {}, "differences": [],
                       "rows": {row: {"start": None, "flags": ["--lr", "6e-4"], "paper": None} for row in ("grpo", "gigpo")}}
    bench.write(config)
    torn = ('{"config": {"lr": 0.0006}, "commit": "a", "versions": {}}\n'
            '{"phase": "rl", "iteration": 0, "rollout/success": 0.5}\n{"phase": "r\n')
    for row, log in (("grpo", torn), ("gigpo", "[]\n")):
        folder = bench.folder / "runs/household/seed0" / row
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "checkpoint/trainer.pt").touch()
        (folder / "metrics.jsonl").write_text(log)
    assert bench.main("--seeds", "0") == 1
    assert bench.calls() == [("grpo", 0)] and bench.argv(0)[-1] == "--resume"
    said = capsys.readouterr().err
    assert "runs/household/seed0/gigpo: ValueError: metrics.jsonl does not begin with settings" in said


def test_a_cell_that_another_process_runs_is_left_to_it(bench, capsys):
    """The run holds the lock of its log itself, so also one whose bench.table1 was killed."""
    log, held = bench.folder / "runs/household/seed0/cold.log", bench.folder / "held"
    log.parent.mkdir(parents=True)
    waits = f"import pathlib, time; file = pathlib.Path({str(held)!r}); file.touch()\nwhile file.exists(): time.sleep(0.02)"
    with open(log, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        run = threading.Thread(target=table1.Children().run, args=([sys.executable, "-c", waits], file))
        run.start()
        while not held.exists():
            time.sleep(0.02)
    assert bench.main("--rows", "grpo", "--seeds", "0") == 1
    said = capsys.readouterr().err
    assert "seed0/cold: another process is running it" in said and bench.calls() == []
    held.unlink()
    run.join()
    assert bench.main("--rows", "grpo", "--seeds", "0") == 0


def test_results_on_other_games_are_refused(bench, capsys):
    """The folder of the games may be another, the games may not."""
    bench.main("--rows", "grpo")
    for seed, path in ((0, "here"), (1, "there")):
        file = bench.folder / f"results/cells/household/grpo/seed{seed}.json"
        cell = json.loads(file.read_text())
        cell["config"]["games"] = path
        file.write_text(json.dumps(cell | {"games_hash": {"L0": "same", "L2": "same", "train": path}}))
    assert bench.main("--jobs", "0") == 0
    file.write_text(file.read_text().replace('"L2": "same"', '"L2": "other"'))
    assert bench.main("--jobs", "0") == 2
    assert "seed1.json: played other games of L2 than" in capsys.readouterr().err


def test_a_result_from_before_a_flag_is_of_what_was_done_then():
    config = CONFIG | {"rows": {"rlvmr": {"start": None, "flags": ["--algo", "rlvmr"], "paper": None}}, "cold_starts": {}}
    cell = table1.cells_of(config)[0]
    assert table1.differences_of({"algo": "rlvmr"}, cell) == {"tag_rewards": ["code", "paper"]}
    assert table1.differences_of({"algo": "rlvmr", "tag_rewards": "paper"}, cell) == {}


def test_results_of_other_settings_are_refused(bench, capsys):
    bench.main("--rows", "grpo", "--seeds", "0")
    bench.write(CONFIG | {"common": ["--lr", "1e-3", "--iterations", "12"]})
    assert bench.main() == 2
    assert "seed0.json: made with other settings: lr was 0.0006, is 0.001" in capsys.readouterr().err
    cell = table1.cells_of(CONFIG)[0]
    assert table1.differences_of({"lr": 6e-4, "microbatch_tokens": 1, "out": "elsewhere"}, cell) == {}      # nothing that counts
    assert len(bench.calls()) == 2


def test_a_benchmark_of_two_runs_has_two_cells_a_row_each_with_its_cold_start(bench):
    runs = [{"train_types": "all", "splits": ["L0"]},
            {"train_types": "part", "splits": ["L2"], "flags": ["--cold-start-types", "part"]}]
    bench.write(CONFIG | {"runs": runs})
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("cold-part", 1), ("grpo", 1), ("grpo-part", 1)]
    second = bench.argv(3)
    assert second[second.index("--train-types") + 1] == "part" and second[second.index("--evaluate") + 1] == "L2"
    assert second[second.index("--model") + 1].endswith("seed1/cold-part/checkpoint")
    assert second[second.index("--cold-start-types") + 1] == "part" and "--cold-start-types" not in bench.argv(2)
    assert bench.result()["rows"]["grpo"]["L0"]["seeds"] == {"1": 0.6}
    assert bench.result()["rows"]["grpo"]["L2"]["seeds"] == {"1": 0.25}     # the stand-in's grpo-part is not its grpo


def test_two_runs_may_begin_from_one_cold_start(bench):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    bench.write(CONFIG | {"runs": runs, "one_cold_start": True})
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1), ("grpo-part", 1)]
    first, *rest = (bench.argv(i) for i in range(3))
    assert first[first.index("--evaluate") + 1] == "L0,L2"
    assert all(own[own.index("--model") + 1].endswith("seed1/cold/checkpoint") for own in rest)


def test_splits_choose_the_runs_and_a_study_has_its_own_folder(bench, capsys):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    bench.write(CONFIG | {"runs": runs, "study": "toys"})
    assert bench.main("--rows", "grpo", "--seeds", "1", "--splits", "L2") == 0
    assert bench.calls() == [("cold-part", 1), ("grpo-part", 1)]
    assert (bench.folder / "results/cells/toys/grpo/seed1-part.json").exists() and (bench.folder / "runs/toys/seed1").is_dir()
    bench.write(CONFIG | {"processes": 8})
    assert bench.main("--jobs", "2") == 2 and "--jobs=2: each run of this config is 8 processes" in capsys.readouterr().err
    bench.write(CONFIG)
    assert bench.main("--splits", "L1") == 2 and "--splits=L1: the config has L0, L2" in capsys.readouterr().err


def test_several_processes_run_under_torchrun():
    one, eight = (table1.cells_of(CONFIG | more)[0] for more in ({}, {"processes": 8}))
    assert one.command[1] == "gcd.py" and one.command[2:] == one.arguments
    assert Path(eight.command[0]).exists() and eight.command[1:4] == ["--standalone", "--nproc-per-node", "8"]
    assert eight.command[4:] == one.command[1:]


@pytest.mark.parametrize("change, said", [
    ({"benchmark": "chess"}, "'chess'"), ({"extra": 1}, "extra"), ({"seeds": list(range(12))}, "12 seeds"),
    ({"differences": [["grpo", "gone"]]}, "gone"), ({"rows": {"a": {"start": None}}}, "row a"),
    ({"rows": {"a": {"start": "b", "flags": [], "paper": None}}}, "b, grpo"),
    ({"runs": [{"train_types": "all", "splits": ["L0"]}]}, "splits"), ({"paper_model": "Qwen3"}, "paper_model 'Qwen3'"),
    ({"runs": [{"splits": ["L0", "L2"]}]}, "a run has splits"),
    ({"runs": [{"train_types": "all", "splits": ["L0", "L2"], "flagz": []}]}, "flagz"),
    ({"common": ["--no-such-flag"]}, "--no-such-flag"), ({"common": ["--lr", "-1"]}, "--lr")])
def test_mistakes_in_the_config_are_one_line_before_anything_runs(bench, capsys, change, said):
    bench.write(CONFIG | change)
    assert bench.main() == 2
    assert said in capsys.readouterr().err and bench.calls() == []


def test_a_config_that_is_not_json_is_named(bench, capsys):
    bench.config_file.write_text("{")
    assert bench.main() == 2 and "study.json: not JSON" in capsys.readouterr().err


def test_unknown_rows_and_seeds_are_errors(bench, capsys):
    assert bench.main("--rows", "grpo,ppo") == 2 and "--rows=ppo" in capsys.readouterr().err
    assert bench.main("--seeds", "7") == 2 and "--seeds=7" in capsys.readouterr().err


# What is kept

def test_a_cell_keeps_what_matters_and_no_path(bench):
    bench.main("--rows", "grpo+gcd", "--seeds", "0")
    saved = (bench.folder / "results/cells/household/grpo+gcd/seed0.json").read_text()
    cell = json.loads(saved)
    assert cell["commits"] == ["abc"] and cell["parameters"] == 1234 and cell["start"] == "cold"
    assert cell["judge"] == {"auc": pytest.approx(sum(range(2, 12)) / 100)}             # iterations 2 to 11 of 12
    assert cell["training"] == [[0, 0.0], [10, 0.1], [11, 0.11]]
    assert set(cell["evaluation"]) == {"L0", "L2"} and set(cell["evaluation"]["L0"]) == {"sampled", "greedy", "t0.4"}


def test_an_iteration_logged_twice_counts_once_as_it_was_the_second_time(tmp_path):
    head = {"config": {"out": "/somewhere", "lr": 1.0}, "versions": {}, "commit": "a"}
    rl = {"phase": "rl"}
    lines = [head, rl | {"iteration": 0, "rollout/success": 0.1}, rl | {"iteration": 1, "rollout/success": 0.2},
             head | {"commit": "b"}, rl | {"iteration": 1, "rollout/success": 0.3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evaluation.json").write_text('{"splits": {"L0": {}}, "games": "toy"}')
    (tmp_path / "stages.json").write_text("{}")
    cell = table1.Cell("household", "grpo", 0, "", ("L0",), (), "", None, False)
    result = table1.result_of(cell, tmp_path)
    assert result["training"] == [[0, 0.1], [1, 0.3]] and result["iterations"] == 2
    assert result["commits"] == ["a", "b"] and result["resumed"] == 1
    assert result["config"] == {"lr": 1.0}


def test_adopted_cells_are_results_and_starts(bench, capsys):
    """An earlier study's folder, seedK/ROW: its finished cells count, and new rows begin from its cold start."""
    study = bench.folder / "earlier"
    for row in ("cold", "grpo"):
        flags = ["--out", study / "seed0" / row, "--seed", "0", "--evaluate", "L0,L2", "--lr", "0.5"]
        subprocess.run([*table1.GCD, *flags], check=True, cwd=ROOT)
    (study / "seed0/cold/checkpoint/weights").write_text("its own")
    (study / "seed1/grpo").mkdir(parents=True)                                          # begun, not finished
    done = len(bench.calls())
    assert bench.main("--adopt", str(study), "--rows", "grpo,grpo+gcd", "--seeds", "0") == 0
    assert "adopted 2 cells" in capsys.readouterr().out
    assert bench.calls()[done:] == [("grpo+gcd", 0)]
    assert (bench.folder / "runs/household/seed0/cold/checkpoint/weights").read_text() == "its own"
    cell = json.loads((bench.folder / "results/cells/household/grpo/seed0.json").read_text())
    assert (cell["adopted"], cell["differs"], cell["command"]) == ("earlier", {"lr": [0.5, 0.0006]}, None)
    assert bench.result()["rows"]["grpo"]["L0"]["seeds"] == {"0": 0.5}
    assert "lr 0.5 (here 0.0006)" in (bench.folder / "study.md").read_text()


# The numbers

@pytest.mark.parametrize("df", range(1, 10))
def test_the_t_quantiles_hold_95_percent_of_the_density(df):
    """Simpson's rule on Student's density between the quantiles."""
    top, n = table1.T_95[df - 1], 20_000
    scale = math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    density = [scale * (1 + (top * k / n) ** 2 / df) ** (-(df + 1) / 2) for k in range(n + 1)]
    area = 2 * top / n / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
    assert area == pytest.approx(0.95, abs=3e-5)


def test_the_interval_by_hand():
    own = table1.interval({0: 0.5, 1: 0.6, 4: 0.7})
    assert own["mean"] == pytest.approx(0.6)
    assert own["half"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert table1.interval({2: 0.5}) == {"mean": 0.5, "half": None, "seeds": {2: 0.5}}


def test_the_table_by_hand(bench, capsys):
    """grpo has 0.5 and 0.6, grpo+gcd 0.25 twice: mean 55, half width 12.706 * 7.07 / sqrt(2) = 63.5 points."""
    bench.main()
    printed = capsys.readouterr().out
    assert printed.strip() == (bench.folder / "study.md").read_text().strip()
    assert "| grpo | 55.0 ± 63.5 | 55.0 ± 63.5 | 20/20 | 86.7 / 69.7 |" in printed
    assert "| grpo+gcd | 25.0 ± 0.0 | 25.0 ± 0.0 | 20/20 | 89.8 / 81.5 |" in printed
    assert "| grpo - grpo+gcd | +30.0 ± 63.5 | +30.0 ± 63.5 |" in printed
    assert "1,234 parameters; toy games; commit abc" in printed


def test_what_is_missing_is_a_dash_with_the_number_of_seeds(bench, capsys):
    bench.main("--rows", "grpo", "--seeds", "1")
    capsys.readouterr()
    assert bench.main("--jobs", "0") == 0
    printed = capsys.readouterr().out
    assert "| grpo | 60.0 (1/2) | 60.0 (1/2) | 20/20 |" in printed
    assert "| vanilla | – (0/2) | – (0/2) | –/– | 11.3 / 10.2 |" in printed
    assert "| grpo - grpo+gcd | – (0/2) | – (0/2) |" in printed
    assert len(bench.calls()) == 2


def test_differences_are_paired_on_the_seeds_that_both_have():
    table = {"a": {"L0": {"seeds": {0: 0.5, 1: 0.7, 2: 0.9}}}, "b": {"L0": {"seeds": {1: 0.4, 2: 0.8, 3: 0.1}}}}
    own = table1.difference(table, "a", "b", ["L0"])["L0"]
    assert own["seeds"] == {1: pytest.approx(0.3), 2: pytest.approx(0.1)} and own["mean"] == pytest.approx(0.2)


# Table 4

def table4_of(bench, *flags):
    return table4.main(["--config", str(bench.config_file), "--rows", "grpo", "--iterations", "4", *flags])


def test_table_4_by_hand(bench, capsys):
    """2 + 0 + 1 seconds against 2 + 1 + 1; nine iterations against twelve: 36 seconds against 36."""
    pairs = [["grpo+gcd", "grpo"], ["grpo+gcd@75", "grpo"]]
    bench.write(CONFIG | {"differences": pairs})
    bench.main()
    ran = len(bench.calls())
    assert table4_of(bench, "--repeats", "2") == 0
    assert bench.calls()[ran:] == 2 * [("seconds_grpo", 0), ("seconds_grpo+gcd", 0)]             # in turns
    printed = capsys.readouterr().out
    assert printed.endswith((bench.folder / "table4_household.md").read_text())
    assert "| grpo | 2.00 | 0.00 | 1.00 | 3.00 |  |  |" in printed
    assert "| grpo+gcd | 2.00 | 1.00 | 1.00 | 4.00 | 1.33 (1.33–1.33) | 1.29 |" in printed
    assert "| grpo+gcd − grpo | 100% | 1.33 | -30.0 ± 63.5 | -30.0 ± 63.5 | 1.29 | – |" in printed
    assert "| grpo+gcd − grpo | 75% | 1.00 | -30.0 ± 63.5 | -30.0 ± 63.5 | 0.97 | +2.8 |" in printed
    assert "--evaluate" in bench.argv(-1) and bench.argv(-1)[-6:-2] == ["--iterations", "4", "--evaluate", "none"]
    taken = json.loads((bench.folder / "table4_household.json").read_text())["taken"]
    assert taken["grpo"]["iterations"] == 4 and taken["grpo"]["seconds"][0] == {"rollout": 2.0, "judge": 0.0, "update": 1.0}
    assert table4_of(bench, "--repeats", "0") == 0 and capsys.readouterr().out == printed[printed.index("Seconds"):]


def test_table_4_of_the_papers_preset():
    """Its iterations are the preset's, its study not the small model's, and none has been measured: no line, no error."""
    config = table1.read_config(ROOT / "results/table1_alfworld_qwen.json")
    taken = {row: {"seconds": [dict.fromkeys(table4.STAGES, 1.0)]} for row in ("grpo", "grpo+gcd")}
    row, = table4.table(config, taken, {"differences": {}}, PAPER)
    assert row["share_of_iterations"] == 0.75 and row["ratios"] == [1.0] and row["later"] is None


def test_table_4_needs_a_row_with_and_without_gcd_its_start_and_table_1(bench, capsys):
    for flags, message in ((["--rows", "ppo"], "--rows=ppo"), ([], "run bench.table1 --rows cold --seeds 0 first"),
                           (["--repeats", "0"], "nothing was measured yet")):
        assert table4_of(bench, *flags) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        table4_of(bench, "--iterations", "1")
    assert "--iterations=1" in capsys.readouterr().err and not bench.calls()


# The paper's numbers

def test_the_papers_means_are_those_of_its_columns():
    for model in ("Qwen2.5-1.5B", "Qwen2.5-7B"):
        for row, values in PAPER["table1"][model].items():
            for first in (0, 4):
                mean = sum(values[first:first + 3]) / 3
                assert abs(mean - values[first + 3]) < 0.06, f"{model} {row}"


@pytest.mark.skipif(not PAPER_TEXT.exists(), reason="needs ../shared/papers/gcd-2509.23870.txt")
def test_every_number_is_the_printed_one():
    """The numbers of each table row of the paper's text, in the order printed."""
    printed = [[float(cell) for cell in re.findall(r"\| (\d+\.\d+) (?=\|)", line)]
               for line in PAPER_TEXT.read_text().splitlines() if re.search(r"\| \d+\.\d", line)]
    table1_rows = [v for m in ("Qwen2.5-1.5B", "Qwen2.5-7B") for v in PAPER["table1"][m].values()]
    table4 = [PAPER["table4"]["time"][k] + PAPER["table4"]["performance"][k] for k in ("vanilla", "GCD")]
    ours = [*table1_rows, *PAPER["table2"]["Qwen2.5-7B"].values(), PAPER["table3"]["Qwen2.5-1.5B"],
            PAPER["table3"]["Qwen2.5-7B"], *table4]
    assert ours == printed


def test_the_papers_numbers_beside_a_row():
    config = {"benchmark": "scienceworld", "paper_model": "Qwen2.5-7B", "paper_of_cold_starts": {"cold": "value SFT"},
              "rows": {"a": {"paper": "GiGPO with GCD"}, "b": {"paper": "GRPO_nthr"}, "c": {"paper": None}}}
    assert table1.paper_number(PAPER, config, "a", "L0") == 74.2
    assert table1.paper_number(PAPER, config, "b", "L1") is None                        # Table 3 is ALFWorld's
    config["benchmark"] = "household"
    assert [table1.paper_number(PAPER, config, "b", s) for s in ("L0", "L1", "L2")] == [None, 89.4, None]
    assert table1.paper_number(PAPER, config, "cold", "L1") == 63.7
    assert table1.paper_number(PAPER, config, "c", "L1") is None


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("table1_*.json")), ids=lambda path: path.name)
def test_committed_configs_are_ones_that_gcd_takes(path):
    if path.stem.endswith("_result"):
        return
    config = table1.read_config(path)
    for cell in table1.cells_of(config):
        if cell.seed == config["seeds"][0]:
            assert table1.wanted(cell).evaluate == ",".join(cell.splits)
