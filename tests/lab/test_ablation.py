"""Tests of lab/studies/ablation.py: claims tested on a table's differences.

    python -m pytest tests/lab/test_ablation.py           # seconds
"""

import json

import pytest

from lab.bench.intervals import interval, sign_of
from lab.bench.study import cells_of, read_config
from lab.studies import ablation, common


def result_of(rows, differences):
    """A table's result on L1 alone. rows, differences: {name: one value per seed}."""
    seeds = list(range(3))
    return {"seeds": seeds, "splits": ["L1"],
            "rows": {name: {"L1": interval(dict(zip(seeds, values)))} for name, values in rows.items()},
            "differences": {name: {"L1": interval(dict(zip(seeds, values)))}
                            for name, values in differences.items()}}


@pytest.mark.parametrize("values, sign", [((0.05, 0.06, 0.07), 1), ((-0.05, -0.06, -0.07), -1),
                                          ((-0.1, 0.1, 0.05), 0), ((0.1,), None), ((), None)])
def test_a_difference_has_a_sign_only_if_its_interval_excludes_0(values, sign):
    assert sign_of(interval(dict(enumerate(values)))) == sign
    assert sign_of(None) is None


@pytest.mark.parametrize("first, second, agrees", [
    ((0.05, 0.06, 0.07), (0.05, 0.06, 0.07), "yes"), ((0.05, 0.06, 0.07), (-0.1, 0.1, 0), "partly"),
    ((-0.1, 0.1, 0), (-0.05, -0.06, -0.07), "no"), ((-0.1, 0.1, 0), (-0.1, 0.1, 0), "not measurable"),
    ((0.05, 0.06, 0.07), (), "not measurable")])
def test_agreement_needs_every_sign(first, second, agrees):
    result = result_of({}, {"a - b": first, "c - b": second})
    found = ablation.entry("Figure 7", "both beat b", [("a", "b", 1), ("c", "b", 1)], result, "L1")
    assert found["agrees"] == agrees and found["agrees"] in common.AGREES
    missing = ablation.entry("Figure 7", "", [("a", "b", 1), ("d", "b", 1)], result, "L1")
    assert missing["agrees"] == "not measurable" and "d - b: –" in missing["found"]


def test_the_full_method_is_compared_with_plain_grpo():
    package, plain = "judge+gcd - plain+grpo", "plain+gcd - plain+grpo"
    result = result_of({}, {package: (-0.05, -0.06, -0.07), plain: (0, 0, 0)})
    text = ablation.package(result)
    assert "(judge+gcd - plain+grpo): -6.0 ± 2.5 on L1. It is worse on every split." in text
    assert "GCD is GRPO, with equal results in every seed" in text
    undecided = ablation.package(result_of({}, {package: (-0.1, 0.1, 0), plain: (0, 0.1, 0)}))
    assert "worse" not in undecided and "GCD is GRPO" not in undecided
    assert ablation.package(result_of({}, {})) == ""


def test_every_comparison_and_every_bar_is_in_the_config():
    config = read_config(ablation.CONFIG)
    compared = {f"{a} - {b}" for _, _, pairs in ablation.CLAIMS for a, b, _ in pairs}
    assert compared <= {f"{a} - {b}" for a, b in config["differences"]}
    assert set(ablation.BARS) <= {*config["cold_starts"], *config["rows"]}
    assert len(cells_of(config)) == 10 * (5 + 10)
    admissible = read_config(ablation.CONFIG.with_name("table3_admissible.json"))
    assert len(cells_of(admissible)) == 5 * 4 and "--admissible-only" in admissible["common"]


@pytest.mark.slow
def test_the_study_plots_existing_rows_and_names_missing_files(tmp_path, capsys):
    config = tmp_path / "table.json"
    flags = ["--config", str(config), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        ablation.main(flags)
    assert f"{tmp_path / 'table_result.json'}: no such file" in capsys.readouterr().err
    result = result_of({"judge": (0.5, 0.6, 0.7), "plain": ()}, {"judge - plain": (0.05, 0.06, 0.07)})
    (tmp_path / "table_result.json").write_text(json.dumps(result))
    assert ablation.main(flags) == 0
    found = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [figure["agrees"] for figure in found["figures"]] == ["not measurable"] * 3
    assert "judge - plain: +6.0 ± 2.5" in found["figures"][0]["found"]
    assert "<svg" in (tmp_path / "out" / "ablation.svg").read_text()
