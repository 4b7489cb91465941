"""Tests the page "Predicted, and came out": queries by hand, and that no prediction is without an outcome.

    python -m pytest tests/lab/test_predictions.py
"""

import copy
import json

import pytest

from lab.bench import predictions

STORED = json.loads(predictions.SOURCE.read_text(encoding="utf-8"))
FOUND = predictions.outcomes(STORED)
RESULT = {
    "rows": [{"arm": "a", "n": 3, "lr": 1, "final": {"mean": 0.5, "half": 0.2, "seeds": {"10": 1, "2": 0.2}}},
             {"arm": "b", "n": 5, "lr": 1, "final": {"mean": 0.1, "half": None, "seeds": {"0": 0.1}}}],
    "share": 0.25, "none": None, "curve": [1, 2, 3, 4],
    "gain": {"value": 0.3, "half": 0.1}}
SEEDS = {"0": 1, "1": 1, "2": 1}
TABLE = {"rows": {"x": {"L0": {"mean": 0.5, "half": 0.1, "seeds": SEEDS, "t0.4": {"mean": 0.6, "half": 0.02,
                                                                              "seeds": SEEDS}}}},
         "differences": {"x - y": {"L0": {"mean": -0.1, "half": 0.05, "seeds": SEEDS, "t0.4": None},
                                   "L1": {"mean": 0.01, "half": 0.05, "seeds": SEEDS, "t0.4": None}}}}
CELLS = [{"cell": name, "result": {"q": q, "path": path}} for name, q, path in (
    ("a, seed 1", 2, [1, 2, 6]), ("a, seed 0", 0, []), ("a, lr 2, seed 0", 9, []),
    ("a, seed 0", 1, [9, 0, 1]))]


@pytest.fixture
def results(tmp_path, monkeypatch):
    (tmp_path / "r.json").write_text(json.dumps(RESULT))
    (tmp_path / "t.json").write_text(json.dumps(TABLE))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in CELLS))
    monkeypatch.setattr(predictions, "RESULTS", tmp_path)
    return tmp_path


def claim(query, **bound):
    return {"claim": "it is", "query": query} | bound


# The page

def test_the_page_is_up_to_date():
    assert predictions.PAGE.read_text(encoding="utf-8") == predictions.page(STORED, FOUND), (
        "run python -m lab.bench.predictions")
    assert json.loads(predictions.COUNTS.read_text(encoding="utf-8")) == predictions.by_study(STORED, FOUND)


def test_the_page_has_each_prediction_and_claim_once_with_its_verdict():
    page = predictions.page(STORED, FOUND)
    every = [prediction for group in STORED for prediction in group["predictions"]]
    assert len(every) > 50
    for prediction in every:
        assert page.count(f"**{prediction['id']}.** {prediction['text']}\n") == 1
    rows = [line for line in page.split("\n") if line.startswith("| ") and line.rstrip(" |").endswith(
        (predictions.HELD, predictions.FAILED, predictions.OPEN, predictions.PENDING))]
    n = sum(len(prediction["claims"]) for prediction in every)
    total = next(line for line in page.split("\n") if line.startswith("| all |")).split("|")[2:-1]
    assert len(rows) - 1 == n == int(total[0]) == sum(map(int, total[1:]))          # less the head
    failed = sum(line.endswith(f"| {predictions.FAILED} |") for line in rows[1:])
    assert failed == int(total[2]) > 40


# No prediction without an outcome

def without(groups):
    groups[0]["predictions"][0]["claims"] = []


def without_bound(groups):
    del groups[0]["predictions"][0]["claims"][0]["in"]


def without_reason(groups):
    groups[0]["predictions"][0]["claims"] = [{"claim": "it is", "undecided": ""}]


def of_no_result(groups):
    groups[0]["predictions"][0]["claims"][0]["query"] = ["studies/theory.json", "three", "no such"]


def of_no_file(groups):
    groups[0]["predictions"][0]["claims"][0]["query"] = ["studies/none.json", "three"]


def of_nothing(groups):
    groups[0]["predictions"][0]["claims"][0]["query"] = ["studies/theory.json", "coupled", 0, "peak"]


def with_another_key(groups):
    groups[0]["predictions"][0]["outcome"] = "held"


def twice(groups):
    groups[1]["predictions"][0]["id"] = "theory-1"


def pending_and_run(groups):
    groups[0]["predictions"][0]["claims"][0]["pending"] = "its runs are to come"


def of_a_call_that_is_none(groups):
    groups[0]["predictions"][0]["claims"][0]["query"] = ["median", ["studies/theory.json", "seeds"]]


def of_unlike_values(groups):
    groups[0]["predictions"][0]["claims"][0]["query"] = ["minus", ["studies/theory.json", "study"], 1]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [without, without_bound, without_reason, of_no_result, of_no_file,
                                    of_nothing, with_another_key, twice, pending_and_run,
                                    of_a_call_that_is_none, of_unlike_values])
def test_a_prediction_without_an_outcome_stops_the_script(broken, tmp_path, monkeypatch, capsys):
    groups = copy.deepcopy(STORED)
    broken(groups)
    source, page = tmp_path / "p.json", tmp_path / "p.md"
    source.write_text(json.dumps(groups))
    page.write_text("as it was")
    monkeypatch.setattr(predictions, "SOURCE", source)
    monkeypatch.setattr(predictions, "PAGE", page)
    assert predictions.main([]) == 1 and page.read_text() == "as it was"
    error = capsys.readouterr().err
    assert "theory-1" in error and error.count("\n") == 1
    source.write_text(json.dumps(STORED))
    assert predictions.main([]) == 0 and page.read_text() == predictions.page(STORED, FOUND)


def test_runs_to_come_are_said_until_there_is_a_value(results):
    entry = claim(["r.json", "later"], **{"in": [0, 1]}, pending="its runs are to come")
    assert predictions.outcome(entry) == ("0 to 1", "its runs are to come", predictions.PENDING)
    (results / "r.json").write_text(json.dumps(RESULT | {"later": 0.5}))
    with pytest.raises(ValueError, match="came out as 0.5: remove pending"):
        predictions.outcome(entry)
    del entry["pending"]
    assert predictions.outcome(entry) == ("0 to 1", "0.5", predictions.HELD)


def test_a_table_decides_from_three_seeds_on(results):
    few = copy.deepcopy(TABLE)
    few["rows"]["x"]["L0"]["seeds"] = {"0": 1, "1": 1}
    (results / "t.json").write_text(json.dumps(few))
    entry = claim(["given", ["table", "t.json", "x", "L0", "1"], ["r.json", "share"]], **{"in": [0, 1]})
    with pytest.raises(predictions.Missing, match="t.json, x: 2 seeds"):
        predictions.outcome(entry)
    assert predictions.outcome(entry | {"pending": "two of five"})[2] == predictions.PENDING
    (results / "t.json").write_text(json.dumps(TABLE | {"again": 0}))
    assert predictions.outcome(entry)[1:] == ("0.25", predictions.HELD)


# Queries and bounds

@pytest.mark.parametrize("query, value", [
    (["r.json", "share"], 0.25), (["r.json", "curve", -1], 4), (["r.json", "curve", [1, 3]], [2, 3]),
    (["r.json", "curve", [0, None, 2]], [1, 3]), (["r.json", "rows", {"arm": "b"}, "n"], 5),
    (["r.json", "rows", "*", "n"], [3, 5]), (["minus", ["r.json", "rows", "*", "n"], 1], [2, 4]),
    (["over", ["r.json", "curve", 0], ["r.json", "curve", 3]], 0.25), (["size", ["list", -1, 2]], [1, 2]),
    (["minus", ["r.json", "rows", 0, "final"], ["r.json", "gain"]], 0.2),
    (["low", ["r.json", "gain"]], 0.3 - 0.1), (["high", ["r.json", "rows", 0, "final"]], 0.7),
    (["zero", ["r.json", "gain"]], "above 0"), (["zero", ["table", "t.json", "x - y", "L0 L1", "1"]],
                                                ["below 0", "includes 0"]),
    (["half", ["table", "t.json", "x", "L0", "0.4"]], 2.0),
    (["seeds", ["r.json", "rows", 0, "final"]], [0.2, 1]), (["n", ["r.json", "rows"]], 2),
    (["above", ["r.json", "curve"], 2], 2), (["below", ["r.json", "curve"], 2], 1),
    (["average", ["r.json", "curve"]], 2.5), (["largest", ["r.json", "curve"]], 4),
    (["cells", "c.jsonl", "a, seed ", "result", "q"], [1, 2]),
    (["equal", ["list", 1, 2], ["cells", "c.jsonl", "a, seed ", "result", "q"]], 2),
    (["average", ["cells", "c.jsonl", "a, seed ", "result", "path", [1, None]]], [0.5, 4])])
def test_queries_by_hand(results, query, value):
    assert predictions.value_of(query) == (pytest.approx(value) if isinstance(value, float) else value)


def test_an_interval_over_the_seeds_of_cells(results):
    """1 and 2 in two seeds: half is t of one degree of freedom times a standard error of .5."""
    query = ["interval", ["cells", "c.jsonl", "a, seed ", "result", "q"]]
    assert predictions.value_of(query) == {"mean": 1.5, "half": pytest.approx(12.7062 / 2, rel=1e-4),
                                           "seeds": {0: 1, 1: 2}}
    assert predictions.outcome(claim(query, **{"in": [1, 2]})) == ("1 to 2", "1.5 ± 6.35 (2 seeds)",
                                                                  predictions.HELD)
    assert predictions.value_of(["zero", ["list", query, ["list", query]]]) == ["includes 0", ["includes 0"]]


def test_times_keeps_an_interval(results):
    assert predictions.value_of(["times", ["r.json", "gain"], -10]) == {"mean": -3, "half": 1, "seeds": {}}
    assert predictions.value_of(["table", "t.json", "x", "L0", "1 0.4"]) == [
        {"mean": 50, "half": 10, "seeds": SEEDS}, {"mean": 60, "half": 2, "seeds": SEEDS}]


@pytest.mark.parametrize("query", [
    ["r.json", "none"], ["r.json", "curve", 9], ["r.json", "rows", {"arm": "c"}], ["no.json"],
    ["low", ["r.json", "rows", 1, "final"]], ["minus", ["r.json", "none"], 1],
    ["table", "t.json", "x - y", "L0", "0.4"], ["cells", "c.jsonl", "b, seed ", "result"]])
def test_what_the_results_lack_is_no_outcome(results, query):
    with pytest.raises(predictions.Missing):
        predictions.outcome(claim(query, **{"in": [None, None]}))


def test_two_elements_with_the_same_fields_are_an_error(results):
    with pytest.raises(ValueError, match="2 elements, expected one"):
        predictions.value_of(["r.json", "rows", {"lr": 1}])


@pytest.mark.parametrize("query, bound, expected", [
    (["r.json", "share"], {"in": [0.25, 0.25]}, ("0.25", "0.25", True)),
    (["r.json", "share"], {"in": [None, 0.2]}, ("at most 0.2", "0.25", False)),
    (["r.json", "curve"], {"in": [1, None]}, ("at least 1", "1; 2; 3; 4", True)),
    (["r.json", "curve"], {"in": [2, 4]}, ("2 to 4", "1; 2; 3; 4", False)),          # each value counts
    (["r.json", "rows", 0, "final"], {"in": [0.4, 0.6]}, ("0.4 to 0.6", "0.5 ± 0.2 (2 seeds)", True)),
    (["r.json", "gain"], {"in": [0, 0.2]}, ("0 to 0.2", "0.3 ± 0.1", False)),
    (["zero", ["list", ["r.json", "gain"], ["r.json", "gain"]]], {"is": "above 0"},
     ("above 0", "above 0; above 0", True)),
    (["r.json", "curve"], {"is": [1, 2, 3, 4]}, ("1; 2; 3; 4", "1; 2; 3; 4", True)),
    (["r.json", "none"], {"is": None}, ("none", "none", True)),
    (["r.json", "share"], {"is": None}, ("none", "0.25", False)),
    (["minus", ["list", *range(20)], 5], {"in": [-5, 14]}, ("-5 to 14", "-5 to 14", True))])
def test_bounds_and_their_text(results, query, bound, expected):
    verdict = predictions.HELD if expected[2] else predictions.FAILED
    assert predictions.outcome(claim(query, **bound)) == (*expected[:2], verdict)
