"""Tests that docs/alfworld.md is what its script makes of the committed files, and what becomes a row.

    python -m pytest tests/lab/test_leaderboard.py
"""

import json
import re

import pytest

from infra import files
from lab.bench import leaderboard

EVALUATIONS = leaderboard.evaluations()


def test_the_page_is_current():
    text = leaderboard.PAGE.read_text(encoding="utf-8")
    assert text == leaderboard.current(text), "run: python -m lab.bench.leaderboard"


def test_a_wrong_number_and_a_missing_row_are_corrected():
    text = leaderboard.PAGE.read_text(encoding="utf-8")
    wrong = leaderboard.BLOCK.sub(lambda found: found[1] + "| 77.7 |\n" + found[3], text)
    assert wrong.count("77.7") == len(leaderboard.BLOCK.findall(text)) == 5
    assert leaderboard.current(wrong) == text


def test_every_row_has_its_numbers_and_command():
    table = leaderboard.rows(EVALUATIONS)
    for result in EVALUATIONS.values():
        for split in result["splits"]:
            for rate in result["splits"][split].values():
                assert f"{100 * rate['success']:.1f} [{100 * rate['low']:.1f}," in table
    assert {"expert", "random", "first", "alfworld_model"} <= EVALUATIONS.keys()
    block = leaderboard.commands(EVALUATIONS)
    assert block.count("python evaluation.py --player") == len(EVALUATIONS)
    assert block.count(f"--games={leaderboard.GAMES} ") == len(EVALUATIONS) and "shared" not in block


def test_the_scripts_rows_hold_each_game_of_each_split():
    for name in ("expert", "random", "first"):
        outcomes = EVALUATIONS[name]["outcomes"]
        assert {split: len(games) for split, games in outcomes.items()} == {"L0": 140, "L1": 134, "L2": 38}
        for split, games in outcomes.items():
            won = sum(entry["sampled"] == "1" for entry in games)
            assert EVALUATIONS[name]["splits"][split]["sampled"]["success"] == won / len(games)


@pytest.mark.parametrize("changes, named", [
    ({"complete": False}, "mine.json: not a complete evaluation"), ({"player": {}}, "not a complete"),
    ({"games_hash": {"L1": "other"}}, "its games of L1 (other) are not those of the other rows"),
    ({"evaluate_tasks": 5}, "mine.json: --evaluate-tasks=5 left games out"),
    ({"commit": None}, "mine.json: commit is None"), ({"protocol": "x"}, "mine.json: protocol 'x': expected"),
    ({"splits": {"L0": 5}}, "mine.json, L0: expected an object, found 5"),
    ({"outcomes": EVALUATIONS["expert"]["outcomes"] | {"L1": EVALUATIONS["expert"]["outcomes"]["L1"][:9]}},
     "mine.json: 9 games of L1, another row has 134")])
def test_a_row_of_other_games_or_an_unfinished_one_is_refused(tmp_path, changes, named):
    stored = EVALUATIONS["expert"]
    files.write_json(tmp_path / "expert.json", stored)
    files.write_json(tmp_path / "mine.json", stored | changes)
    with pytest.raises(ValueError, match=re.escape(named)):
        leaderboard.evaluations(tmp_path)


def test_the_row_with_games_missing_is_named_though_it_comes_first(tmp_path):
    stored = EVALUATIONS["expert"]
    files.write_json(tmp_path / "a.json", stored | {"outcomes": {"L1": stored["outcomes"]["L1"][:9]}})
    files.write_json(tmp_path / "b.json", stored)
    with pytest.raises(ValueError, match="a.json: 9 games of L1, another row has 134"):
        leaderboard.evaluations(tmp_path)


def test_the_games_are_those_of_all_rows_and_drawn_ones_are_not_counted(tmp_path):
    """A row of one split, whose name came first, hid the other splits."""
    stored = EVALUATIONS["expert"]
    of = {split: {key: {split: stored[key][split]} for key in ("games_hash", "outcomes", "splits")}
          for split in leaderboard.SPLITS}
    drawn = {"protocol": "rlvmr", "outcomes": {"L0": stored["outcomes"]["L0"][:88]}}
    files.write_json(tmp_path / "a.json", stored | of["L0"] | drawn)
    files.write_json(tmp_path / "b.json", stored | of["L2"] | {"protocol": "eight"})
    found = leaderboard.evaluations(tmp_path)
    assert leaderboard.hashes(found) == "L0 `74d433dde27dbad5`, L2 `b34382daf0744198` (38 games).\n"
    files.write_json(tmp_path / "c.json", stored)
    found = leaderboard.evaluations(tmp_path)
    assert leaderboard.hashes(found) == leaderboard.hashes(EVALUATIONS)


def test_a_strangers_text_stays_text():
    result = json.loads(json.dumps(EVALUATIONS["expert"])) | {"seen": "a | b\n<img src=x> [x](http://y) `c`"}
    (line,) = [line for line in leaderboard.rows({"x": result}).splitlines() if "img" in line]
    assert len(re.findall(r"(?<!\\)\|", line)) == 10
    assert "a \\| b &#60;img src=x&#62; \\[x\\](http://y) \\`c\\` |" in line


def test_published_numbers_are_as_printed_with_what_128_draws_leave_open():
    assert leaderboard.number({"L0": 90.8, "half": {"L0": 1.3}}, "L0") == "90.8 ± 1.3 (5.0)"
    assert leaderboard.number({"L0": 90.8}, "L1") == "–"
    stored, paper = files.read_json(leaderboard.PUBLISHED), files.read_json(leaderboard.PAPER)
    table = leaderboard.published(stored, paper).splitlines()
    cells = "Qwen2.5-1.5B | arXiv:2509.23870, Table 1 | 89.8 (5.2) | 88.2 (5.6) | 81.5 (6.7) |"
    assert f"| GRPO with GCD | {cells}" in table
    assert len(table) == 2 + len(stored["rows"]) + 16
    for source in stored["sources"].values():
        assert source["unknown"] and source["protocol"] and "arXiv" in source["source"]
