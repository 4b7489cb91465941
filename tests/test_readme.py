"""Proves that README.md's tables say what results/ and the files say today.

    python -m pytest tests/test_readme.py
"""

import re

import pytest

from bench import readme
from bench.table1 import ROOT

pytestmark = pytest.mark.fast
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_todays_numbers():
    assert TEXT == readme.filled(TEXT), "run: python -m bench.readme"


def test_a_number_that_is_not_todays_is_put_right():
    """Each table is found, and each of its numbers is this module's."""
    tables = readme.TABLE.findall(TEXT)
    assert {name for name, _ in tables} >= {"household", "files"} and all(len(rows.splitlines()) > 3 for _, rows in tables)
    row = re.compile(r"^(\| [^|]+ \| )([\d+-][^|]+)", re.MULTILINE)
    for name, table in tables:
        wrong = row.sub(lambda found: found[1] + re.sub(r"\d", "7", found[2]), table)
        assert wrong != table and readme.filled(TEXT.replace(table, wrong)) == TEXT, name


def test_the_core_counts_the_bold_files():
    files = re.findall(r"^\| \*\*(.+?)\*\* \| (\d+) \|", TEXT, re.MULTILINE)
    assert len(files) == 7 and f"a core of {sum(int(n) for _, n in files):,} lines" in TEXT
    assert all(int(n) == (ROOT / name).read_text().count("\n") for name, n in files)
