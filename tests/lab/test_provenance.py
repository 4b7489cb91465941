"""Tests that results name code that can be had: the commits of stored ones, the refusal to write others.

    python -m pytest tests/lab/test_provenance.py
"""

import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from stand_in import toy_bench

from infra import files
from lab.bench import engine_share, iteration, lengths, losses, memory, memory_check, trained_tokens
from lab.bench.study import ROOT
from lab.studies import common, cures, label_kinds, natural_twins

RESULTS, PREDICTIONS = ROOT / "lab" / "results", ROOT / "lab" / "predictions.json"
EXCEPTIONS = RESULTS / "provenance.json"          # {commit as named: reason}
KEYS = ("commit", "commits", "commits of the cells", "written")
BENCHMARKS = engine_share, iteration, lengths, losses, memory, memory_check, trained_tokens
CLEAN = SimpleNamespace(jobs=1, dirty=False)
real_clean_commit = files.clean_commit            # at import, before the fixture that lets tests write


# Stored results

def git(*arguments, folder=ROOT):
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True,
                          check=True).stdout.strip()


def named_in(value):
    """The commits that a JSON value names, by its keys."""
    if isinstance(value, list):
        return {commit for each in value for commit in named_in(each)}
    if not isinstance(value, dict):
        return set()
    found = set().union(*map(named_in, value.values()))
    for key in KEYS:
        texts = value.get(key)
        found |= {text for text in (texts if isinstance(texts, list) else [texts]) if isinstance(text, str)}
    return found


def named():
    """{commit: files that name it}."""
    found = {}
    for path in (*sorted(RESULTS.rglob("*")), PREDICTIONS):
        if path.suffix == ".json" and path != EXCEPTIONS:
            commits = named_in(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            commits = named_in([json.loads(line) for line in path.read_text().splitlines()])
        elif path.suffix == ".md":
            commits = set(re.findall(r"\bcommit ([0-9a-f]{7,40}\+?)", path.read_text()))
        else:
            continue
        for commit in commits:
            found.setdefault(commit, []).append(str(path.relative_to(ROOT)))
    return found


@pytest.fixture(scope="module")
def history():
    """All ancestors of HEAD."""
    try:
        if git("rev-parse", "--is-shallow-repository") == "true":
            pytest.skip("a shallow clone does not hold the commits that results name")
        return git("rev-list", "HEAD").split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git checkout")


def is_ancestor(commit, history):
    return re.fullmatch(r"[0-9a-f]{7,40}", commit) and any(full.startswith(commit) for full in history)


@pytest.mark.slow
def test_each_commit_that_a_result_names_is_an_ancestor_or_listed_with_a_reason(history):
    found, listed = named(), json.loads(EXCEPTIONS.read_text())
    assert len(found) > 30                                  # the walk finds them
    unknown = {commit: paths for commit, paths in found.items()
               if commit not in listed and not is_ancestor(commit, history)}
    assert not unknown, "run these again from a clean tree, or list them in lab/results/provenance.json"
    assert all(reason.strip() for reason in listed.values())
    assert not set(listed) - set(found), "no result names these any more"
    assert not [commit for commit in listed if is_ancestor(commit, history)], "these need no reason"


def test_the_walk_finds_what_names_no_ancestor(history):
    assert is_ancestor(history[-1], history) and is_ancestor(history[3][:7], history)
    for commit in ("0" * 40, history[0] + "+", history[0][:6], ""):
        assert not is_ancestor(commit, history)
    assert named_in({"a": [{"commit": "x"}, {"commits": ["y", "z"]}], "commit": 3, "b": {"written": ["w"]}}
                    ) == {"x", "y", "z", "w"}


# New results

@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A git checkout in which the code is taken to be, and the real check."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "infra").mkdir()
    (tmp_path / "lab" / "results").mkdir(parents=True)
    for name in ("code.py", "infra/files.py", "lab/results/cells.jsonl", "lab/code.py"):
        (tmp_path / name).write_text("1\n")
    git("init", "-q", folder=tmp_path)
    git("add", ".", folder=tmp_path)
    git("-c", "user.name=a", "-c", "user.email=b", "-c", "commit.gpgsign=false", "-c",
        "core.hooksPath=/dev/null", "commit", "-qm", "c", folder=tmp_path)
    monkeypatch.setattr(files, "__file__", str(tmp_path / "infra" / "files.py"))
    monkeypatch.setattr(files, "clean_commit", real_clean_commit)
    return tmp_path


def test_a_commit_is_the_full_one_and_marked_if_code_differs(tree):
    head = git("rev-parse", "HEAD", folder=tree)
    assert files.commit() == files.clean_commit() == head and len(head) == 40
    (tree / "new.py").write_text("2\n")                      # untracked
    (tree / "lab/results/cells.jsonl").write_text("2\n")     # written by a run
    assert files.clean_commit() == head
    (tree / "lab" / "code.py").write_text("2\n")
    assert files.commit() == head + "+" == files.clean_commit(dirty=True)
    with pytest.raises(ValueError, match="uncommitted changes.*--dirty"):
        files.clean_commit()
    git("add", "lab/code.py", folder=tree)                   # staged is not committed
    assert files.commit() == head + "+"


def test_outside_git_a_result_needs_the_flag(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "infra" / "files.py"))
    assert files.commit() == real_clean_commit(dirty=True) == ""
    with pytest.raises(ValueError, match="no git checkout"):
        real_clean_commit()


def test_a_copy_in_a_checkout_of_other_code_is_no_checkout(tree, monkeypatch):
    (tree / "unpacked" / "infra").mkdir(parents=True)
    (tree / "unpacked" / "infra" / "files.py").write_text("1\n")
    monkeypatch.setattr(files, "__file__", str(tree / "unpacked" / "infra" / "files.py"))
    assert files.commit() == ""


def test_a_checkout_of_another_user_is_one(tree, monkeypatch):
    """As in a container, where root runs what a user has cloned."""
    head = git("rev-parse", "HEAD", folder=tree)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert files.commit() == head


def test_a_study_refuses_or_marks_cells_of_a_changed_tree(tree, tmp_path):
    path, head = tmp_path / "s.jsonl", git("rev-parse", "HEAD", folder=tree)
    assert common.run_cells(path, {"a": {"x": 1}}, lambda *_: {"y": 2}, CLEAN) == {"a": {"y": 2}}
    (tree / "code.py").write_text("2\n")
    with pytest.raises(ValueError, match="uncommitted changes"):
        common.run_cells(path, {"a": {"x": 1}, "b": {}}, lambda *_: pytest.fail("was run"), CLEAN)
    for requested in ({"a": {"x": 1}}, {"a": {"x": 1}, "b": {}}):      # --jobs 0: none is missing
        options = SimpleNamespace(jobs=2 - len(requested), dirty=False)
        found = common.run_cells(path, requested, lambda *_: pytest.fail("was run"), options)
        assert found == {"a": {"y": 2}}
    with pytest.raises(ValueError, match="--jobs=0: .*s.jsonl has no cell b"):
        common.all_cells(path, requested, lambda *_: pytest.fail("was run"), options)
    common.run_cells(path, {"b": {}}, lambda *_: {}, SimpleNamespace(jobs=1, dirty=True))
    assert [line["commit"] for line in files.read_lines(path)[0]] == [head, head + "+"]


def test_a_cell_names_the_commit_that_its_run_began_from(tree, tmp_path):
    head = git("rev-parse", "HEAD", folder=tree)

    def work(name, settings):
        (tree / "code.py").write_text("edited meanwhile\n")
        return {}

    common.run_cells(tmp_path / "s.jsonl", {"a": {}}, work, CLEAN)
    assert files.read_lines(tmp_path / "s.jsonl")[0][0]["commit"] == head


@pytest.fixture
def bench(tmp_path, monkeypatch):
    (tmp_path / "bench").mkdir()
    yield from toy_bench(tmp_path / "bench", monkeypatch)


@pytest.mark.slow
def test_table1_refuses_a_changed_tree_before_anything_runs(tree, bench, capsys):
    (tree / "code.py").write_text("2\n")
    assert bench.main("--rows", "grpo", "--seeds", "0") == 2 and bench.calls() == []
    assert "uncommitted changes" in capsys.readouterr().err
    assert bench.main("--rows", "grpo", "--seeds", "0", "--dirty") == 0 and len(bench.calls()) == 2


@pytest.mark.slow
def test_table1_stores_no_run_that_names_a_changed_tree(bench, capsys):
    script = bench.folder / "stand_in.py"
    script.write_text(script.read_text().replace('"commit": "abc"', '"commit": "abc+"'))
    assert bench.main("--rows", "grpo", "--seeds", "0") == 1
    error = capsys.readouterr().err
    assert "['abc+']" in error and "--dirty" in error
    cell = bench.folder / "lab/results/cells/household/grpo/seed0.json"
    assert not cell.exists()
    assert bench.main("--rows", "grpo", "--seeds", "0", "--dirty") == 0
    assert json.loads(cell.read_text())["commits"] == ["abc+"]


@pytest.mark.parametrize("command", [cures, label_kinds, natural_twins, *BENCHMARKS])
def test_every_command_refuses_a_changed_tree_in_one_line(command, capsys, monkeypatch, tmp_path):
    def changed(*_):
        raise ValueError("1 file has local changes")

    monkeypatch.setattr(files, "clean_commit", changed)
    with pytest.raises(SystemExit):
        command.main(["--out", str(tmp_path)] if command in (cures, label_kinds, natural_twins) else [])
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: 1 file has local changes")
