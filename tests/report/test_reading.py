"""Tests that a report can be made at any moment of a run's writing, and several at once.

    python -m pytest tests/report/test_reading.py     # half a minute
"""

import json
import os
import subprocess
import sys

import pytest
from test_report import rl_lines, write_method
from tiny_runs import ENVIRONMENT, ROOT, cold_started, rows, start_from, train

from infra import files
from report import read
from report.__main__ import main


class Reader:
    """Makes a report whenever told to, and compares what it read with what was completely written."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.written, self.looks, self.looking = {files.METRICS: [], files.EPISODES: []}, 0, False

    def look(self, cut=""):
        """Make a report. cut: the file whose last line is incomplete."""
        self.looking = True
        status, self.looks = main([str(self.folder)]), self.looks + 1
        error = self.capsys.readouterr().err.partition("report: ")[2]
        if not self.written[files.METRICS] and not cut:
            assert status == 2 and "no metrics in it" in error
        else:
            assert (status, error) == (0, "")
            run, = read.read_runs(self.folder)
            assert [run.header, *run.lines] == (self.written[files.METRICS] or [{}])
            assert run.episodes == self.written[files.EPISODES]
            assert len(run.notes) == bool(cut) and all(f"{cut}: line " in note for note in run.notes)
            assert (self.folder / "report.html").read_text(encoding="utf-8").endswith("</html>")
        self.looking = False

    def append(self, path, record):
        """Like files.append, in three pieces with a look after each."""
        text = json.dumps(files.nan_to_null(record)) + "\n"
        middle = (1, len(text) // 2, len(text) - 2)[self.looks % 3]
        with open(path, "a", encoding="utf-8") as file:
            for piece in (text[:middle], text[middle:-1], "\n"):
                print(piece, end="", file=file, flush=True)
                if piece == text[middle:-1]:
                    self.written[path.name].append(json.loads(text))
                self.look(cut=path.name if piece == text[:middle] else "")


@pytest.mark.slow
def test_a_run_is_read_at_every_point_of_its_writing(tmp_path, tmp_path_factory, capsys, monkeypatch):
    start = cold_started(tmp_path_factory)
    reader, replace = Reader(tmp_path, capsys), os.replace

    def watched_replace(source, target):
        if not reader.looking:
            reader.look()
        replace(source, target)
        if not reader.looking:
            reader.look()

    monkeypatch.setattr(files, "append", reader.append)
    monkeypatch.setattr(os, "replace", watched_replace)
    assert train(tmp_path / "grpo", *start_from(start), "--evaluate", "dev", "--protocol", "sampled") == 0
    assert reader.looks > 60 and len(rows(tmp_path / "grpo")) == 2
    run, = read.read_runs(tmp_path)
    assert run.evaluation["splits"].keys() == {"dev"} and run.stages.keys() == {"rl", "evaluation"}


def test_linked_runs_have_the_names_of_their_links(tmp_path):
    """Two seeds of one method, collected in a folder."""
    (tmp_path / "both").mkdir()
    for seed in ("0", "1"):
        write_method(tmp_path / seed, "grpo", rl_lines(3))
        (tmp_path / "both" / f"seed{seed}").symlink_to(tmp_path / seed / "grpo")
    assert [run.name for run in read.read_runs(tmp_path / "both")] == ["seed0", "seed1"]
    assert [run.name for run in read.read_runs(tmp_path / "0" / "grpo" / ".." / "grpo")] == ["grpo"]


def test_a_run_that_is_set_aside_at_this_moment_is_left_out(tmp_path, monkeypatch):
    for name in ("grpo", "ppo"):
        write_method(tmp_path, name, rl_lines(3))
    read_lines, read_text = files.read_lines, read.Path.read_text

    def before(function):
        """The function of a path, where the run is set aside just before it reads grpo's metrics."""
        def changed(path, *options, **more):
            if path == tmp_path / "grpo" / files.METRICS:
                files.set_aside(path.parent)
            return function(path, *options, **more)
        return changed

    for owner, name, function in ((files, "read_lines", read_lines), (read.Path, "read_text", read_text)):
        with monkeypatch.context() as patch:                 # the second: it was there a moment ago
            patch.setattr(owner, name, before(function))
            assert [run.name for run in read.read_runs(tmp_path)] == ["ppo"]
        write_method(tmp_path, "grpo", rl_lines(3))
    assert [run.name for run in read.read_runs(tmp_path)] == ["grpo", "ppo"]


@pytest.mark.slow
def test_two_reports_at_once_are_both_whole(tmp_path, capsys, monkeypatch):
    """One process writes the page between another's writing and renaming."""
    write_method(tmp_path, "grpo", rl_lines(3), success={"L0": 0.5})
    replace = os.replace

    def slow_replace(source, target):
        monkeypatch.setattr(os, "replace", replace)
        subprocess.run([sys.executable, "-m", "report", tmp_path], cwd=ROOT, env=ENVIRONMENT, check=True,
                       capture_output=True, timeout=300)
        replace(source, target)

    monkeypatch.setattr(os, "replace", slow_replace)
    assert main([str(tmp_path)]) == 0, capsys.readouterr().err
    assert (tmp_path / "report.html").read_text(encoding="utf-8").endswith("</html>")
    assert {path.name for path in tmp_path.iterdir()} == {"grpo", "report.html", "summary.json"}
