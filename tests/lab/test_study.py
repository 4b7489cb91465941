"""Tests how a config becomes cells, and that a mistake in it is an error of one line before anything runs.

    python -m pytest tests/lab/test_study.py
"""

from pathlib import Path

import pytest
from stand_in import CONFIG

from lab.bench import cells, study
from lab.bench.study import ROOT
from lm import smollm2

SMALL = ("--preset", "small")


@pytest.mark.slow
def test_a_benchmark_with_two_runs_has_two_cells_per_row_each_with_its_cold_start(bench):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    bench.write(CONFIG | {"runs": runs})
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("cold-part", 1), ("grpo", 1), ("grpo-part", 1)]
    second = bench.argv(3)
    assert second[second.index("--train-types") + 1] == "part"
    assert second[second.index("--evaluate") + 1] == "L2"
    assert second[second.index("--model") + 1].endswith("seed1/cold-part/checkpoint")
    assert bench.result()["rows"]["grpo"]["L0"]["seeds"] == {"1": 0.6}
    assert bench.result()["rows"]["grpo"]["L2"]["seeds"] == {"1": 0.25}     # grpo-part is a separate run


@pytest.mark.slow
def test_a_row_may_be_limited_to_some_splits(bench):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    rows = CONFIG["rows"] | {"grpo": CONFIG["rows"]["grpo"] | {"splits": ["L2"]}}
    bench.write(CONFIG | {"runs": runs, "rows": rows, "one_cold_start": True})
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo-part", 1)]


@pytest.mark.slow
def test_two_runs_may_begin_from_one_cold_start(bench):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    bench.write(CONFIG | {"runs": runs, "one_cold_start": True})
    assert bench.main("--rows", "grpo", "--seeds", "1") == 0
    assert bench.calls() == [("cold", 1), ("grpo", 1), ("grpo-part", 1)]
    cold, *rest = (bench.argv(i) for i in range(3))
    assert cold[cold.index("--evaluate") + 1] == "L0,L2"
    assert all(argv[argv.index("--model") + 1].endswith("seed1/cold/checkpoint") for argv in rest)


@pytest.mark.slow
def test_splits_choose_the_runs_and_a_study_has_its_own_folder(bench, capsys):
    runs = [{"train_types": "all", "splits": ["L0"]}, {"train_types": "part", "splits": ["L2"]}]
    bench.write(CONFIG | {"runs": runs, "study": "toys"})
    assert bench.main("--rows", "grpo", "--seeds", "1", "--splits", "L2") == 0
    assert bench.calls() == [("cold-part", 1), ("grpo-part", 1)]
    assert (bench.folder / "lab/results/cells/toys/grpo/seed1-part.json").exists()
    assert (bench.folder / "runs/toys/seed1").is_dir()
    bench.write(CONFIG | {"processes": 8})
    assert bench.main("--jobs", "2") == 2
    assert "--jobs=2: each run of this config uses 8 processes" in capsys.readouterr().err
    bench.write(CONFIG)
    assert bench.main("--splits", "L1") == 2
    assert "--splits=L1: the config has L0, L2" in capsys.readouterr().err


def test_several_processes_run_under_torchrun():
    one, eight = (study.cells_of(CONFIG | more)[0] for more in ({}, {"processes": 8}))
    assert one.command[1] == "gcd.py" and one.command[2:] == one.arguments
    assert Path(eight.command[0]).exists() and eight.command[1:4] == ["--standalone", "--nproc-per-node", "8"]
    assert eight.command[4:] == one.command[1:]


@pytest.mark.parametrize("change, message", [
    ({"seeds": 5}, "seeds: 5: expected list of int"), ({"rows": []}, "rows: []: expected dict of dict"),
    ({"rows": {"a": CONFIG["rows"]["grpo"] | {"flags": "--no-gcd"}}}, 'row a: flags: "--no-gcd": expected '),
    ({"differences": ["grpo, gone"]}, "differences: "), ({"seeds": [0, 1, 0]}, "expected each once"),
    ({"differences": [["grpo"]]}, 'differences: ["grpo"]: expected two names'),
    ({"differences": [["grpo", 3]]}, 'differences: ["grpo", 3]: expected list of str'),
    ({"paper_of_cold_starts": "x"}, 'paper_of_cold_starts: "x": expected dict of str'),
    ({"rows": {"a": CONFIG["rows"]["grpo"] | {"note": ["a"]}}}, 'row a: note: ["a"]: expected str'),
    ({"benchmark": "chess"}, "'chess'"),
    ({"extra": 1}, "extra"),
    ({"differences": [["grpo", "gone"]]}, "gone"), ({"rows": {"a": {"start": None}}}, "row a"),
    ({"rows": {"a": {"start": "b", "flags": [], "paper": None}}}, "b, grpo"),
    ({"runs": 2 * CONFIG["runs"]}, "runs evaluate ['L0', 'L2', 'L0', 'L2']: expected splits, each once"),
    ({"runs": []}, "runs evaluate []: expected splits, each once"),
    ({"runs": [{"train_types": "all", "splits": "L0"}]}, 'runs: splits: "L0": expected list of str'),
    ({"runs": [{"train_types": "all", "splits": [1]}]}, "runs: splits: [1]: expected list of str"),
    ({"processes": "8"}, 'processes: "8": expected int'),
    ({"paper_model": "Qwen3"}, "paper_model 'Qwen3'"),
    ({"runs": [{"splits": ["L0", "L2"]}]}, "a run has splits"),
    ({"runs": [{"train_types": "all", "splits": ["L0", "L2"], "flagz": []}]}, "flagz"),
    ({"common": [*SMALL, "--no-such-flag"]}, "--no-such-flag"), ({"common": [*SMALL, "--lr", "-1"]}, "--lr"),
    ({"common": []}, "name the --preset"), ({"rows": {"a": CONFIG["rows"]["grpo"] | {"not": 1}}}, "row a")])
def test_mistakes_in_the_config_are_one_line_before_anything_runs(bench, capsys, change, message):
    bench.write(CONFIG | change)
    assert bench.main() == 2
    assert message in capsys.readouterr().err and bench.calls() == []


def test_a_config_that_is_not_json_is_named(bench, capsys):
    bench.config_file.write_text("{")
    assert bench.main() == 2 and "study.json: not JSON" in capsys.readouterr().err


def test_unknown_rows_and_seeds_are_errors(bench, capsys):
    assert bench.main("--rows", "grpo,ppo") == 2 and "--rows=ppo" in capsys.readouterr().err
    assert bench.main("--seeds", "7") == 2 and "--seeds=7" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in sorted((ROOT / "lab/results").glob("table1_*.json"))
                                  if not path.stem.endswith("_result")], ids=lambda p: p.name)
def test_committed_configs_have_flags_that_gcd_accepts(path, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "none")              # not converted
    config = study.read_config(path)
    for cell in study.cells_of(config):
        if cell.seed == config["seeds"][0] and not cell.rerun:
            assert cells.config_of(cell).evaluate == ",".join(cell.splits)


def test_a_missing_config_is_named(bench, capsys):
    bench.config_file.unlink()
    assert bench.main() == 2 and "study.json: no such file" in capsys.readouterr().err
