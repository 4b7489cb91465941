"""Tests what is stored of a run, and that results of other settings or games are detected, however old.

    python -m pytest tests/lab/test_cells.py
"""

import itertools
import json

import pytest
from stand_in import CONFIG

from lab.bench import cells, study
from lm import smollm2

# Stored and current settings

def cell_of(*flags):
    row = {"start": None, "flags": list(flags), "paper": None}
    return study.cells_of(CONFIG | {"rows": {"a": row}, "cold_starts": {}, "differences": []})[0]


# Settings of runs of an older gcd.py, current flags, and the differences
THEN = [
    ({"algo": "grpo", "baseline": "episode", "anchor": "state", "ppo_form": "turn"}, ["--algo", "grpo"], {}),
    ({"algo": "rlvmr", "tag_rewards": "paper"}, ["--algo", "rlvmr"], {}),
    ({"algo": "grpo", "nthr": True, "nthr_beta": 1.0}, ["--algo", "nthr"], {}),
    ({"algo": "grpo", "nthr": True}, ["--algo", "grpo"], {"algo": ["nthr", "grpo"]}),
    ({"algo": "grpo", "nthr": False}, ["--algo", "nthr"], {"algo": ["grpo", "nthr"]}),
    ({"algo": "grpo"}, ["--algo", "grpo", "--invalid", "format"], {"invalid": ["admissible", "format"]}),
    ({"algo": "rlvmr", "variant": "code"}, ["--algo", "rlvmr"], {"variant": ["code", "paper"]})]


@pytest.mark.parametrize("then, flags, differ", THEN)
def test_settings_of_an_older_run_are_translated_to_current_flags(then, flags, differ):
    assert cells.differences_of(then, cell_of(*flags)) == differ


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(study.RESULTS.glob("table1_*_result.json")), ids=lambda p: p.name)
def test_every_committed_cell_matches_its_config(path, monkeypatch, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")                # a language model's; without its package
    monkeypatch.setattr(smollm2, "named", lambda model: str(tmp_path) if model == smollm2.NAME else model)
    config = study.read_config(path.with_name(path.name.replace("_result", "")))
    cells.check_results(study.cells_of(config))


@pytest.mark.slow
def test_results_of_other_settings_are_refused(bench, capsys):
    bench.main("--rows", "grpo", "--seeds", "0")
    bench.write(CONFIG | {"common": ["--preset", "small", "--lr", "1e-3", "--iterations", "12"]})
    assert bench.main() == 2
    assert "seed0.json: made with other settings: lr was 0.0006, is 0.001" in capsys.readouterr().err
    cell = study.cells_of(CONFIG)[0]
    ignored = {"microbatch_tokens": 1, "out": "elsewhere"}                               # change no results
    assert cells.differences_of({"lr": 6e-4} | ignored, cell) == {}
    assert len(bench.calls()) == 2


@pytest.mark.slow
def test_results_on_other_games_are_refused(bench, capsys):
    """The path of the games may differ, the games may not."""
    bench.main("--rows", "grpo")
    for seed, path in ((0, "here"), (1, "there")):
        file = bench.folder / f"lab/results/cells/household/grpo/seed{seed}.json"
        cell = json.loads(file.read_text())
        cell["config"]["games"] = path
        file.write_text(json.dumps(cell | {"games_hash": {"L0": "same", "L2": "same", "train": path}}))
    assert bench.main("--jobs", "0") == 0
    file.write_text(file.read_text().replace('"L2": "same"', '"L2": "other"'))
    assert bench.main("--jobs", "0") == 2
    assert "seed1.json: its games of L2 differ from those of" in capsys.readouterr().err


@pytest.mark.slow
def test_results_from_other_cold_starts_are_refused(bench, capsys):
    """Each seed has its own."""
    bench.main()
    for row, seed in itertools.product(("grpo", "grpo+gcd"), (0, 1)):
        file = bench.folder / f"lab/results/cells/household/{row}/seed{seed}.json"
        stored = json.loads(file.read_text()) | {"start_weights": f"of seed {seed}"}
        file.write_text(json.dumps(stored))
    assert bench.main("--jobs", "0") == 0
    for change, message in (({"start_weights": "c"}, "seed1.json: began from another cold than "),
                            ({"start": "warm"}, "seed1.json: began from warm, is to begin from cold")):
        file.write_text(json.dumps(stored | change))
        assert bench.main("--jobs", "0") == 2 and message in capsys.readouterr().err


# Stored results

@pytest.mark.slow
def test_a_result_holds_settings_and_measurements_but_no_path(bench):
    bench.main("--rows", "grpo+gcd", "--seeds", "0")
    saved = (bench.folder / "lab/results/cells/household/grpo+gcd/seed0.json").read_text()
    cell = json.loads(saved)
    assert cell["commits"] == ["abc"] and cell["parameters"] == 1234 and cell["start"] == "cold"
    assert cell["judge"] == {"auc": pytest.approx(sum(range(2, 12)) / 100)}     # iterations 2 to 11 of 12
    assert cell["training"] == [[0, 0.0], [10, 0.1], [11, 0.11]]
    assert set(cell["evaluation"]) == {"L0", "L2"}
    assert set(cell["evaluation"]["L0"]) == {"sampled", "greedy", "t0.4"}


def test_an_iteration_logged_twice_counts_once_with_its_second_record(tmp_path):
    head = {"config": {"out": "/somewhere", "lr": 1.0}, "versions": {}, "commit": "a"}
    rl = {"phase": "rl"}
    lines = [head, rl | {"iteration": 0, "rollout/success": 0.1},
             rl | {"iteration": 1, "rollout/success": 0.2},
             head | {"commit": "b"}, rl | {"iteration": 1, "rollout/success": 0.3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "evaluation.json").write_text('{"splits": {"L0": {}}, "games": "toy"}')
    (tmp_path / "stages.json").write_text("{}")
    cell = study.Cell("household", "grpo", 0, "", ("L0",), (), "", None, False)
    result = cells.result_of(cell, tmp_path)
    assert result["training"] == [[0, 0.1], [1, 0.3]] and result["iterations"] == 2
    assert result["commits"] == ["a", "b"] and result["resumed"] == 1
    assert result["config"] == {"lr": 1.0}
