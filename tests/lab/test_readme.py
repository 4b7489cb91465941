"""Tests that the tables and code blocks of README.md and docs/*.md are those of lab/results and the sources.

    python -m pytest tests/lab/test_readme.py
"""

import importlib
import json
import re
import shlex

import pytest

import config
from lab.bench import readme
from lab.bench.study import ROOT

PAGES = readme.PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_current_numbers(page):
    text = page.read_text(encoding="utf-8")
    assert text == readme.filled(text), "run: python -m lab.bench.readme"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if readme.TABLE.search(page.read_text("utf-8"))],
                         ids=lambda page: page.name)
def test_a_wrong_number_is_corrected(page):
    """In every table that is filled from lab/results."""
    text = page.read_text(encoding="utf-8")
    cells = re.compile(r"(?<=[^\n]\| )[\d+−-][^|]*")                      # numbers, but for the first cell
    for name, table in readme.TABLE.findall(text):
        wrong = cells.sub(lambda found: re.sub(r"\d", "7", found[0]), table)
        assert wrong != table and readme.filled(text.replace(table, wrong)) == text, name


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*?)\s*$", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "lab" / "predictions.md"],
                         ids=lambda page: page.name)
def test_a_page_has_links_that_lead_somewhere_and_whole_code_blocks(page):
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^ *```.*$|```$", text, re.MULTILINE)
    assert all(re.fullmatch(r" *```\w*", fence) for fence in fences) and len(fences) % 2 == 0
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), link


# A hand-made result with two splits

def value(mean, half=None, seeds=2, at_04=None, **more):
    return {"mean": mean, "half": half, "seeds": dict.fromkeys(range(seeds)), "t0.4": at_04} | more


RESULT = {
    "seeds": [0, 1],
    "rows": {"grpo": {"L0": value(0.5, 0.1, at_04=value(0.75, 0.05), invalid_frac=0.25, paper=86.7),
                      "L1": value(0.4, seeds=1, invalid_frac=None, paper=63.4, inferred=True)}},
    "differences": {"grpo - cold": {"L0": value(0.125, 0.1, at_04=value(-0.05, 0.2)),
                                    "L1": value(-0.1, 0.2)}}}
PAGE = """Text before.

<!-- toy -->
| three words | L0 | at 0.4 | L1 | at 0.4 | invalid | paper (ours) |
|---|---|---|---|---|---|---|
| grpo | ? |
| grpo - cold | 99.9 | | | | | |

<!-- another comment -->
| grpo | 1 |
"""


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    (tmp_path / "table1_toy_result.json").write_text(json.dumps(RESULT))
    return PAGE


def test_heads_choose_the_columns(page):
    lines = readme.filled(page).splitlines()
    assert lines[5] == "| grpo | 50.0 ± 10.0 | 75.0 ± 5.0 | 40.0 (1/2) | – | 25/– | 86.7 / 63.4† |"
    assert lines[6] == "| grpo - cold | +12.5 ± 10.0 | -5.0 ± 20.0 | -10.0 ± 20.0 | – |  |  |"
    assert lines[:5] + lines[7:] == page.splitlines()[:5] + page.splitlines()[7:]
    assert readme.filled(readme.filled(page)) == readme.filled(page)


def test_an_unknown_head_or_row_is_an_error(page):
    known = "L0, L1, at 0.4, invalid, flawed, repeated or paper"
    with pytest.raises(ValueError, match=f"column 'L3': expected {known}"):
        readme.filled(page.replace("| L1 |", "| L3 |"))
    with pytest.raises(KeyError, match="gigpo"):
        readme.filled(page.replace("| grpo | ?", "| gigpo | ?"))


def test_a_row_may_have_a_label_and_a_column_may_read_a_different_row(page, tmp_path):
    longer = {"rows": RESULT["rows"] | {"grpo_part": {"L1": value(0.01)}}}
    (tmp_path / "table1_toy_result.json").write_text(json.dumps(RESULT | longer))
    page = ("<!-- toy -->\n| start | L0 | L1 never shown (`_part`) | L0 never shown (`_part`) |\n"
            "|---|---|---|---|\n| RL, 3 minutes `grpo` | ? |\n")
    assert readme.filled(page).splitlines()[3] == "| RL, 3 minutes `grpo` | 50.0 ± 10.0 | 1.0 | – |"


def test_code_is_quoted_verbatim():
    page = ("<!-- lab/bench/readme.py source_of -->\n```python\nold\n```\n\n"
            "<!-- lab/bench/gone.py -->\nno block\n")
    quoted = readme.filled(page)
    assert quoted.startswith("<!-- lab/bench/readme.py source_of -->\n"
                             "```python\ndef source_of(path, name):\n")
    assert quoted.endswith("== name)\n```\n\n<!-- lab/bench/gone.py -->\nno block\n") and "old" not in quoted
    with pytest.raises(StopIteration):
        readme.filled(page.replace("source_of", "no_such_name"))
    entire = readme.filled("<!-- lab/bench/readme.py -->\n```python\n```\n")
    assert (readme.ROOT / "lab" / "bench" / "readme.py").read_text() in entire


def test_a_table_whose_name_is_misspelt_is_an_error():
    with pytest.raises(KeyError):
        readme.filled("<!-- misspelt -->\n| | L0 |\n|---|---|\n| a | 1 |\n")


def test_the_command_fills_the_pages(page, tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    path.write_text(page)
    monkeypatch.setattr(readme, "PAGES", [path])
    readme.main()
    assert capsys.readouterr().out == "README.md: toy\n" and path.read_text() == readme.filled(page)


def test_differences_of_a_method_with_gcd_are_counted_by_sign(tmp_path, monkeypatch):
    """The same method without it is BASE or, where there is such a row, BASE+grpo; coin tosses are no GCD."""
    good, bad, none = (value(mean, 0.1, at_04=value(mean / 10, 0.1)) for mean in (0.2, -0.2, 0.0))
    same, one = value(0.0, 0.0), value(0.5)
    differences = {"a+gcd - a": {"L0": good, "L1": bad}, "a_std+oracle_.5_std - a_std": {"L0": bad},
                   "half+gcd - half+grpo": {"L0": none}, "half+gcd - half": {"L0": good},
                   "a+shuffled - a": {"L0": good}, "a+gcd - a+shuffled": {"L0": good}, "b - a": {"L0": good},
                   "b+taken - b": {"L0": one, "L2": same}, "a+gcd@75 - a": {"L0": good}}
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    for name, part in (("table1_x", [*differences][:1]), ("table3_y", [*differences][1:])):
        result = {"rows": {"half+grpo": {}}, "differences": {key: differences[key] for key in part}}
        (tmp_path / f"{name}_result.json").write_text(json.dumps(result))
    page = "<!-- gcd -->\n| | n |\n|---|---|\n| L0 |\n| L1 |\n| L2 |\n| all |\n"
    assert readme.filled(page).splitlines()[3:] == [
        "| L0 | 6 | 2 | 2 | 1 | 1 |", "| L1 | 2 | 0 | 2 | 0 | 1 |", "| L2 | 0 | 0 | 0 | 0 | 0 |",
        "| all | 8 | 2 | 4 | 1 | 2 |"]


# docs/exercises.md

EXERCISES = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")


def test_the_exercises_functions_and_their_tests_exist():
    """That the tests fail without the function was seen once, of each."""
    rows = re.findall(r"^\|[^|]*\| (`.*`) \| `(\S+)` \|$", EXERCISES, re.MULTILINE)
    assert len(rows) == 17
    for names, tests in rows:
        for module, name in re.findall(r"`(\S+)\.(\w+)`", names):
            assert callable(getattr(importlib.import_module(module), name)) and (ROOT / tests).is_file()


def test_the_exercises_commands_have_flags_that_exist_and_folders_of_their_own():
    commands = re.findall(r"^ *python gcd.py ((?:.*\\\n)*.*)$", EXERCISES, re.MULTILINE)
    model = str(ROOT / "lab/results/alfworld_model")
    lines = [command.replace("\\\n", " ").replace("runs/main/cold_start/checkpoint", model)
             for command in commands]
    assert len({config.parse(shlex.split(line)).out for line in lines}) == len(lines) == 8
