"""Proves that the tables of README.md and RESULTS.md say what results/ says today.

    python -m pytest tests/test_readme.py
"""

import json
import re

import pytest

from bench import readme

pytestmark = pytest.mark.fast
PAGES = [page for page in readme.PAGES if page.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_todays_numbers(page):
    text = page.read_text(encoding="utf-8")
    assert text == readme.filled(text), "run: python -m bench.readme"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_number_that_is_not_todays_is_put_right(page):
    """In every table that results/ stands behind."""
    text = page.read_text(encoding="utf-8")
    cells = re.compile(r"^(\| [^|]+ \| )([\d+-][^|]+)", re.MULTILINE)
    for name, table in readme.TABLE.findall(text):
        if readme.result_path(name).exists():
            wrong = cells.sub(lambda found: found[1] + re.sub(r"\d", "7", found[2]), table)
            assert readme.filled(text.replace(table, wrong)) == text, name


# A result of two splits, by hand

def value(mean, half=None, seeds=2, cooler=None, **more):
    return {"mean": mean, "half": half, "seeds": dict.fromkeys(range(seeds)), "t0.4": cooler} | more


RESULT = {
    "seeds": [0, 1],
    "rows": {"grpo": {"L0": value(0.5, 0.1, cooler=value(0.75, 0.05), invalid_frac=0.25, paper=86.7),
                      "L1": value(0.4, seeds=1, invalid_frac=None, paper=63.4, inferred=True)}},
    "differences": {"grpo - cold": {"L0": value(0.125, 0.1, cooler=value(-0.05, 0.2)),
                                    "L1": value(-0.1, 0.2)}}}
PAGE = """Text before.

<!-- toy -->
| three words | L0 | at 0.4 | L1 at 0.4 | L1 | refused | paper (ours) | |
|---|---|---|---|---|---|---|---|
| grpo | ? |
| grpo - cold | 99.9 | | | | | | |

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
    assert lines[5] == "| grpo | 50.0 ± 10.0 | 75.0 ± 5.0 | – | 40.0 (1/2) | 25/– | 86.7 / 63.4† |  |"
    assert lines[6] == "| grpo - cold | +12.5 ± 10.0 | -5.0 ± 20.0 | – | -10.0 ± 20.0 |  |  |  |"
    assert lines[:5] + lines[7:] == page.splitlines()[:5] + page.splitlines()[7:]
    assert readme.filled(readme.filled(page)) == readme.filled(page)


def test_a_head_or_a_row_that_there_is_not_is_an_error(page):
    with pytest.raises(ValueError, match="column 'L3': expected L0, L1, at 0.4, refused or paper"):
        readme.filled(page.replace("| L1 |", "| L3 |"))
    with pytest.raises(KeyError, match="gigpo"):
        readme.filled(page.replace("| grpo | ?", "| gigpo | ?"))


def test_code_is_quoted_as_it_is():
    page = "<!-- bench/readme.py source_of -->\n```python\nold\n```\n\n<!-- bench/gone.py -->\nno block\n"
    quoted = readme.filled(page)
    assert quoted.startswith("<!-- bench/readme.py source_of -->\n```python\ndef source_of(path, name):\n")
    assert quoted.endswith("== name)\n```\n\n<!-- bench/gone.py -->\nno block\n") and "old" not in quoted
    with pytest.raises(StopIteration):
        readme.filled(page.replace("source_of", "no_such_name"))
    whole = readme.filled("<!-- bench/readme.py -->\n```python\n```\n")
    assert (readme.ROOT / "bench" / "readme.py").read_text() in whole


def test_the_command_fills_the_pages_that_there_are(page, tmp_path, monkeypatch, capsys):
    pages = (tmp_path / "README.md", tmp_path / "gone.md")
    pages[0].write_text(page)
    monkeypatch.setattr(readme, "PAGES", pages)
    readme.main()
    assert capsys.readouterr().out == "README.md: toy\n" and pages[0].read_text() == readme.filled(page)
    assert not pages[1].exists()
