"""Tests the tables' numbers against arithmetic by hand and against the paper's text. No model is trained.

    python -m pytest tests/lab/test_table1.py
"""

import json
import math
import re
import statistics
from unittest.mock import Mock

import pytest
from stand_in import CONFIG

from infra import files
from lab.bench import intervals, study, table1, table4
from lab.bench.study import ROOT

PAPER_TEXT = ROOT.parent / "shared/papers/gcd-2509.23870.txt"
PAPER = json.loads((ROOT / "lab/results/paper.json").read_text())


# The numbers

@pytest.mark.parametrize("df", [1, 2, 4, 9, 30])
def test_the_interval_holds_95_percent_of_students_density(df):
    """Simpson's rule on the density between the bounds of an interval of df + 1 values, 1 apart."""
    values = {seed: float(seed) for seed in range(df + 1)}
    top = intervals.interval(values)["half"] * math.sqrt(df + 1) / statistics.stdev(values.values())
    n, scale = 20_000, math.gamma((df + 1) / 2) / (math.sqrt(df * math.pi) * math.gamma(df / 2))
    density = [scale * (1 + (top * k / n) ** 2 / df) ** (-(df + 1) / 2) for k in range(n + 1)]
    area = 2 * top / n / 3 * (density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2]))
    assert area == pytest.approx(0.95, abs=1e-6)


def test_the_interval_by_hand():
    found = intervals.interval({0: 0.5, 1: 0.6, 4: 0.7})
    assert found["mean"] == pytest.approx(0.6)
    assert found["half"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert intervals.interval({2: 0.5}) == {"mean": 0.5, "half": None, "seeds": {2: 0.5}}
    assert intervals.interval({}) == {"mean": None, "half": None, "seeds": {}}


def test_a_difference_has_a_sign_if_its_interval_excludes_0():
    signs = [intervals.sign_of({"mean": mean, "half": half}) for mean, half in (
        (0.3, 0.2), (-0.3, 0.2), (-0.1, 0.2), (0.0, 0.0), (0.3, None))]
    assert signs == [1, -1, 0, 0, None]


def test_a_range_and_an_interval_as_text():
    assert [intervals.range_of(values) for values in ([31, 20, 25], [20.4, 20.1])] == ["20–31", "20"]
    assert [table1.count(n) for n in ([3, 4, 9], [3], [])] == ["3–9", "3", "–"]
    assert intervals.with_half({"mean": 0.5, "half": 0.25}, "+.2f") == "+0.50 ± 0.25"


@pytest.mark.slow
def test_the_table_by_hand(bench, capsys):
    """grpo has 0.5 and 0.6, grpo+gcd 0.25 twice: mean 55, half width 12.706 * 7.07 / sqrt(2) = 63.5."""
    bench.main()
    printed = capsys.readouterr().out
    assert printed.strip() == (bench.folder / "study.md").read_text().strip()
    twice = " | ".join(2 * ["55.0 ± 63.5 | 57.0 ± 63.5"])
    assert f"| grpo | {twice} | 10/10 | 20/20 | 86.7 / 69.7 |" in printed
    twice = " | ".join(2 * ["25.0 ± 0.0 | 27.0 ± 0.0"])
    assert f"| grpo+gcd | {twice} | 10/10 | 20/20 | 89.8 / 81.5 |" in printed
    assert "| grpo - grpo+gcd | +30.0 ± 63.5 | +30.0 ± 63.5 | +30.0 ± 63.5 | +30.0 ± 63.5 |" in printed
    assert "1,234 parameters; toy games; commit abc" in printed


@pytest.mark.slow
def test_missing_cells_are_a_dash_with_the_number_of_seeds(bench, capsys):
    bench.main("--rows", "grpo", "--seeds", "1")
    capsys.readouterr()
    bench.write(CONFIG | {"processes": 8})                        # which is too many for two runs at a time
    assert bench.main("--jobs", "0") == 0
    printed = capsys.readouterr().out
    assert "| grpo | 60.0 (1/2) | 62.0 (1/2) | 60.0 (1/2) | 62.0 (1/2) | 10/10 (1/2) | 20/20 |" in printed
    assert "| vanilla | – (0/2) | – | – (0/2) | – | –/– | –/– | 11.3 / 10.2 |" in printed
    assert "| grpo - grpo+gcd | – (0/2) | – | – (0/2) | – |" in printed
    assert len(bench.calls()) == 2


def test_differences_are_paired_on_the_seeds_that_both_have():
    at_04 = {"seeds": {1: 0.9, 2: 1.0}}
    minuend = {"L0": {"seeds": {0: 0.5, 1: 0.7, 2: 0.9}, "t0.4": at_04},
               "L1": {"seeds": {0: 1.0}, "t0.4": at_04}}
    subtrahend = {"L0": {"seeds": {1: 0.4, 2: 0.8, 3: 0.1}, "t0.4": {"seeds": {2: 0.5}}},
                  "L1": {"seeds": {1: 1.0}, "t0.4": None}}
    found = table1.difference(minuend, subtrahend)
    assert found["L0"]["seeds"] == {1: pytest.approx(0.3), 2: pytest.approx(0.1)}
    assert found["L0"]["mean"] == pytest.approx(0.2) and found["L0"]["t0.4"]["seeds"] == {2: 0.5}
    assert found["L1"] == {"mean": None, "half": None, "seeds": {}, "t0.4": None}


def test_a_temperature_that_was_not_evaluated_is_a_dash():
    """ScienceWorld's RL rows were evaluated at temperature 1 only, its cold start at three temperatures."""
    sampled = {"success": 0.5, "n": 4, "invalid_frac": 0.25}
    stored = [{"seed": seed, "evaluation": {"L0": {"sampled": sampled}}} for seed in (0, 1)]
    found = table1.summary(stored, "L0")
    assert (found["mean"], found["t0.4"]) == (0.5, None)
    assert table1.successes({"L0": found}, 2) == ["50.0 ± 0.0", "–"]
    assert table1.shares_text({"L0": found}, "invalid") == "25"
    assert table1.shares_text({"L0": found, "L1": found | {"of": 5}}, "invalid") == "25/25 (2/5)"
    assert table1.shares_text({"L0": found, "L1": {"of": 5, "seeds": {}}}, "invalid") == "25/–"
    fewer = found | {"of": 5, "seeds": {0: 0.5}}
    assert table1.shares_text({"L0": found | {"of": 5}, "L1": fewer}, "invalid") == "25/25 (1/5)"


def test_a_judges_metric_of_fewer_seeds_has_their_number():
    config = {"seeds": [0, 1, 2], "runs": [{"train_types": "all", "splits": ["L0"]}]}
    stored = [{"row": "a", "splits": ["L0"], "judge": {"auc": 0.5, "grad_ratio": ratio}}
              for ratio in (None, 2.0, 4.0)]
    found = table1.judges(config, ["a"], stored)
    assert found["a"]["of"] == {"grad_ratio": [2, 3]} and found["a"]["grad_ratio"] == 3
    assert "| a | – | 0.50 | – | – | – | – | 3.00 (2/3) | – |" in "".join(table1.judge_text({"judge": found}))


@pytest.mark.parametrize("path", sorted(study.RESULTS.glob("table1_*_result.json")), ids=lambda p: p.name)
def test_committed_tables_are_those_of_the_cells(path):
    """If this fails, run python -m lab.bench.table1 --config lab/results/... --jobs 0."""
    file = path.with_name(path.name.replace("_result", ""))
    config = study.read_config(file)
    text = table1.text(table1.collect(config, study.cells_of(config)))
    assert file.with_suffix(".md").read_text(encoding="utf-8") == text + "\n"
    assert table1.text(json.loads(path.read_text(encoding="utf-8"))) == text


# Table 4

def table4_of(bench, *flags):
    return table4.main(["--config", str(bench.config_file), "--rows", "grpo", "--iterations", "4", *flags])


@pytest.mark.slow
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
    assert bench.argv(-1)[-6:-2] == ["--iterations", "4", "--evaluate", "none"]
    taken = json.loads((bench.folder / "table4_household.json").read_text())["taken"]
    assert taken["grpo"]["iterations"] == 4
    assert taken["grpo"]["seconds"][0] == {"rollout": 2.0, "judge": 0.0, "update": 1.0}
    assert table4_of(bench, "--repeats", "0") == 0
    assert capsys.readouterr().out == printed[printed.index("Seconds"):]


def test_table_4_of_the_papers_preset():
    """Its iterations are the preset's. Success has not been measured: no line, and no error."""
    config = study.read_config(ROOT / "lab/results/table1_alfworld_qwen.json")
    taken = {row: {"seconds": [dict.fromkeys(table4.STAGES, 1.0)]} for row in ("grpo", "grpo+gcd")}
    row, = table4.table(config, taken, {"differences": {}}, PAPER)
    assert row["share_of_iterations"] == 0.75 and row["ratios"] == [1.0] and row["later"] is None


def test_table_4_needs_a_row_with_and_without_gcd_its_start_table_1_and_a_commit(bench, capsys, monkeypatch):
    for flags, message in ((["--rows", "ppo"], "--rows=ppo"),
                           ([], "run lab.bench.table1 --rows cold --seeds 0 first"),
                           (["--repeats", "0"], "no measurements yet")):
        assert table4_of(bench, *flags) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(files, "clean_commit", Mock(side_effect=ValueError("1 file has local changes")))
    assert table4_of(bench) == 2 and "1 file has local changes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        table4_of(bench, "--iterations", "1")
    assert "--iterations=1" in capsys.readouterr().err and not bench.calls()


@pytest.mark.slow
def test_table_4_measures_no_row_with_rerun(bench, capsys):
    """It prints the stored measurements, and reads the iterations from the row's cells."""
    bench.write(CONFIG | {"differences": [["grpo+gcd@75", "grpo"]]})
    bench.main("--rows", "grpo,grpo+gcd@75", "--seeds", "0")
    assert table4_of(bench, "--repeats", "1") == 0
    gone = {"rerun": "no flag does this", "flags": ["--gone"]}
    rows = {name: row | (gone if name != "vanilla" else {}) for name, row in CONFIG["rows"].items()}
    bench.write(CONFIG | {"rows": rows, "differences": [["grpo+gcd@75", "grpo"]]})
    capsys.readouterr()
    assert table4_of(bench) == 2
    assert "--rows=grpo: grpo must not be run again: no flag does this" in capsys.readouterr().err
    assert table4_of(bench, "--repeats", "0") == 0
    assert "| grpo+gcd − grpo | 75% | 1.00 |" in capsys.readouterr().out


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


def test_the_papers_numbers_of_a_row():
    """Numbers whose split the paper names, inferred ones, and missing ones."""
    rows = {name: {"paper": name} for name in ("GiGPO with GCD", "GRPO_nthr", "GRPO with GCD, no cold start")}
    config = {"benchmark": "scienceworld", "paper_model": "Qwen2.5-7B",
              "paper_of_cold_starts": {"cold": "value SFT"}, "rows": rows | {"none": {"paper": None}}}

    def numbers(row):
        found = [table1.paper_number(PAPER, config, row, split) for split in ("L0", "L1", "L2")]
        return table1.paper_text(dict(enumerate(found)))

    assert numbers("GiGPO with GCD") == "74.2 / 67.9 / 51.3"
    assert numbers("GRPO_nthr") == "– / – / –"                    # Table 3 is ALFWorld's
    assert numbers("GRPO with GCD, no cold start") == "– / – / 31.2†"
    config["benchmark"] = "household"
    assert numbers("GRPO_nthr") == "– / 89.4† / –" and numbers("cold") == "– / 63.7† / –"
    assert numbers("none") == "– / – / –"
    config["paper_model"] = "Qwen2.5-1.5B"
    assert numbers("GRPO with GCD, no cold start") == "– / – / –"     # Table 2 is 7B's
