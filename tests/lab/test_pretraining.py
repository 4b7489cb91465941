"""Tests of lab/studies/pretraining.py: its config, and its points and verdict on a table made by hand.

    python -m pytest tests/lab/test_pretraining.py           # seconds
"""

import json
import re

import pytest

from lab.bench.cells import config_of
from lab.bench.intervals import interval
from lab.bench.study import cells_of, read_config
from lab.studies import pretraining
from lm import smollm2


def of(*values):
    """An interval of one value per seed."""
    return interval(dict(enumerate(values)))


def result_of(less):
    """A table's result on L1 and L2. less: {demonstrations: SmolLM2 less small on L2, a value per seed}."""
    rows = {f"{model}_{n}": {"L1": of(share, share) | {"t0.4": of(2 * share, 2 * share)},
                             "L2": of(share / 2, share / 2) | {"t0.4": None}}
            for model, share in (("smollm2", 0.4), ("small", 0.1)) for n in (300, 24, 96)}
    rows |= {"small_300_ten_passes": rows["small_24"], "small_3000": {"L1": of() | {"t0.4": None},
                                                                     "L2": of() | {"t0.4": None}}}
    return {"seeds": [0, 1], "splits": ["L1", "L2"], "rows": rows,
            "differences": {f"smollm2_{n} - small_{n}": {"L1": of(0.3, 0.3), "L2": of(*values)}
                            for n, values in less.items()}}


@pytest.mark.slow
def test_the_config_gives_both_models_the_same_demonstrations(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "none")              # not converted
    cells = cells_of(read_config(pretraining.CONFIG))
    assert len(cells) == 3 * 8 and all(cell.start is None for cell in cells)
    settings = {}
    for cell in cells:
        match = re.fullmatch(r"(small|smollm2)_(\d+)(_ten_passes)?", cell.row)
        found = config_of(cell)
        assert found.demonstrations == int(match[2]) and found.seed == cell.seed
        assert found.model == (str(tmp_path / "none") if match[1] == "smollm2" else "")
        if not match[3] and found.demonstrations in pretraining.COUNTS:
            of_pair = {name: value for name, value in found.settings().items()
                       if name not in ("out", "model", "cold_start_lr", "dtype")}
            assert settings.setdefault((cell.seed, match[2]), of_pair) == of_pair
    assert len(settings) == 9
    assert {(found["cold_start_types"], found["judge_demonstrations"], found["judge_epochs"],
             found["cold_start_epochs"], found["evaluate_tasks"], found["iterations"], found["protocol"])
            for found in settings.values()} == {("part", 0, 0, 1, 48, 0, "full")}


def test_points_are_rows_of_one_pass_with_a_value():
    result = result_of({})
    assert {n: found["mean"] for n, found in pretraining.points(result, "small", "L1", "1").items()} == {
        24: 0.1, 96: 0.1, 300: 0.1}
    assert [*pretraining.points(result, "smollm2", "L1", "0.4")] == [24, 96, 300]
    assert pretraining.points(result, "smollm2", "L1", "0.4")[96]["mean"] == 0.8
    assert pretraining.points(result, "smollm2", "L2", "0.4") == {}


@pytest.mark.parametrize("last, agrees", [((0.1, 0.1001), "yes"), ((-0.1, 0.1), "partly"),
                                          ((-0.1, -0.1001), "no"), ((0.1,), "not measurable"),
                                          ((), "not measurable")])
def test_the_verdict_is_that_after_the_most_demonstrations(last, agrees):
    found = pretraining.figures_of(result_of({24: (0.1, 0.1001), 96: (0.2, 0.2001), 300: last}))
    assert [one["agrees"] for one in found] == [agrees] and "24: +30.0 ± 0.0 / +10.0" in found[0]["found"]


@pytest.mark.slow
def test_the_study_plots_what_there_is_and_names_a_missing_file(tmp_path, capsys):
    config = tmp_path / "table.json"
    flags = ["--config", str(config), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        pretraining.main(flags)
    assert f"{tmp_path / 'table_result.json'}: no such file" in capsys.readouterr().err
    (tmp_path / "table_result.json").write_text(json.dumps(result_of({24: (0.1, 0.2)})))
    assert pretraining.main(flags) == 0
    found = json.loads((tmp_path / "out" / "pretraining.json").read_text())
    assert [figure["agrees"] for figure in found["figures"]] == ["not measurable"]
    assert (tmp_path / "out" / "pretraining.svg").read_text().count("<svg") == 1
    assert (tmp_path / "out" / "pretraining.md").read_text().startswith("# What pretraining buys")
