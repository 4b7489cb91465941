"""Tests of what reaches the terminal: text that it would obey, readers that leave, full disks.

    python -m pytest tests/report/test_terminal.py     # ten seconds
"""

import argparse
import io
import json
import os
import subprocess
import sys
import unicodedata

import pytest
from conftest import needs_full
from test_play import COMMITTED, typed
from test_report import rl_lines, write_method
from tiny_runs import ROOT

import config
import gcd
from envs import Reply, _terminal
from envs._terminal import Printed, StdoutError, printable, printed
from report import __main__ as report
from report import play

# Title and color of a terminal, a line written over, a bell, C1's CSI, text shown backwards
OBEYED = "\x1b]0;owned\x07 \x1b[31m red \r over \x08 \x7f \x9b2J \u202egnp.exe \u2066 nul \x00 "
SHOWN = (r"\u001b]0;owned\u0007 \u001b[31m red \u000d over \u0008 \u007f \u009b2J \u202egnp.exe \u2066 nul "
         r"\u0000 ")


FULL = "standard output: No space left on device"


def is_safe(text):
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs") and c not in "\u202e\u2066"
               for c in text)


def test_what_a_terminal_obeys_is_escaped_and_other_text_stays():
    ordinary = "A line.\n\tTab – é, 漢字, مرحبا, 👩\u200d🔬, \xa0, \\u001b, \u2028"
    assert printable(ordinary) == ordinary
    assert printable(OBEYED) == SHOWN == printable(SHOWN) and not is_safe(OBEYED) and is_safe(SHOWN)
    assert json.loads(f'"{printable(OBEYED)}"') == OBEYED
    everything = "".join(map(chr, range(0x3000)))
    kept = "".join(c for c in everything if printable(c) == c)
    controls = {c for c in everything if unicodedata.category(c) == "Cc"} - {"\n", "\t"}
    embeddings = {c for c in everything if unicodedata.bidirectional(c) in
                  ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")}
    assert {*everything} - {*kept} == controls | embeddings


# What is printed is printable

def test_the_reports_table_captions_and_errors_are_printable(tmp_path, capsys):
    name, split = "m\x1b[31m\u202e", "L0\x07\nforged  99.0"
    about = {"captions": {split: OBEYED}, "note": "\ud800 note", "warning": OBEYED}
    write_method(tmp_path, name, rl_lines(), success={split: 0.5}, about=about)
    assert report.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert is_safe(text) and text.count(SHOWN) == 2 and r"\ud800 note" in text
    assert text.splitlines()[0] == r"success %          L0\u0007\nforged  99.0 (n=256)  seconds"
    assert text.splitlines()[1].startswith(r"m\u001b[31m\u202e  50.0 [40.0, 60.0] ")
    (tmp_path / name / "stages.json").write_text("[]")
    assert report.main([str(tmp_path)]) == 2 and report.main([f"no\n{OBEYED}"[:-7]]) == 2
    error = capsys.readouterr().err
    assert is_safe(error) and error.count("\n") == 2 and f"report: no\\n{SHOWN[:20]}" in error
    with pytest.raises(SystemExit):
        report.main(["--\x1b[31m"])
    assert is_safe(capsys.readouterr().err)


class Talkative:
    """A game whose every text is one that a terminal obeys."""

    def reset(self, task):
        return self.step("reset")

    def step(self, command):
        return Reply(OBEYED + command, [OBEYED], False, False)

    def close(self):
        pass


@pytest.mark.parametrize("as_json", [False, True])
def test_a_games_texts_are_printable_and_json_is_exact(as_json, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(b"\x1b[2J\n\xff\n"))
    argv = ["--json"] if as_json else []
    _terminal.play_in_terminal(argparse.ArgumentParser("game"), argv, lambda options: None,
                               lambda n: [Talkative()])
    text = capsys.readouterr().out
    assert is_safe(text)
    if as_json:
        replies = [Reply(**json.loads(line)).observation for line in text.splitlines()]
        assert replies == [OBEYED + command for command in ("reset", "\x1b[2J", "\udcff")]
    else:
        assert text == f"{SHOWN}reset\n> {SHOWN}\\u001b[2J\n> {SHOWN}\\udcff\n> \n"


@pytest.mark.slow
def test_what_a_model_says_is_printable(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", typed(""))
    monkeypatch.setattr(play, "play", lambda *_: print(OBEYED))
    play.main(["--model", str(COMMITTED)])
    assert capsys.readouterr().out == SHOWN + "\n"
    with pytest.raises(SystemExit):
        play.main(["--model", "\x1b[31m"])
    assert r"\u001b[31m" in (error := capsys.readouterr().err) and is_safe(error)


def test_an_error_of_a_run_is_printable(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ValueError(f"file {OBEYED}")

    with pytest.raises(SystemExit):
        config.parse_or_exit(["--mo\x1b[31m\nforged"])
    assert capsys.readouterr().err == "gcd.py: error: --mo\\u001b[31m\\nforged: no such flag; see --help\n"
    monkeypatch.setattr(gcd, "prepare", fail)
    monkeypatch.setattr(gcd, "Stop", lambda: None)
    assert gcd.main(["--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert is_safe(error) and r"file \u001b]0;owned\u0007 \u001b[31m red" in error


def test_text_that_the_stream_cannot_encode_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    with printed("test"):
        print("50.0 ± 5 – \ud800")
    assert stream.buffer.getvalue() == b"50.0 \\xb1 5 \\u2013 \\ud800\n"
    monkeypatch.setattr("sys.stdout", None)                 # closed by the shell: >&-
    with printed("test"):
        print("nobody reads this")


# Readers that leave, full disks

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder whose report is 20 kB of text on the terminal."""
    path = tmp_path_factory.mktemp("run")
    write_method(path, "grpo", rl_lines(), success={"L0": 0.5}, about={"note": "note " * 4000})
    return path


def outcome(command, stdout, unbuffered, stdin=""):
    """(exit status, stderr) of a command whose stdout is a pipe without a reader, or a full disk."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    if stdout == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=environment, stdout=writer,
                          stderr=subprocess.PIPE, input=stdin, text=True, check=False, timeout=300)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.slow
@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command, program", [
    (["-m", "report", "--help"], "report"), (["gcd.py", "--help"], "gcd.py"),
    (["-m", "envs.household", "--help"], "python -m envs.household"),
    (["-m", "envs.household"], "python -m envs.household")])
def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_one_line(command, program, unbuffered):
    assert outcome(command, "pipe", unbuffered, stdin="look\n" * 3) == (0, "")
    assert outcome(command, "full", unbuffered) == (2, f"{program}: error: {FULL}\n")


@pytest.mark.slow
@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_report_is_written_and_says_so(folder, unbuffered):
    page, summary = folder / "report.html", folder / "summary.json"
    for stdout, expected in (("pipe", (0, "")),
                             ("full", (2, f"report: {FULL}; wrote {page} and {summary}\n"))):
        assert outcome(["-m", "report", folder], stdout, unbuffered) == expected
        assert page.read_text(encoding="utf-8").endswith("</html>") and json.loads(summary.read_text())
        page.unlink()
        summary.unlink()


@needs_full
def test_an_error_of_stdout_is_not_one_of_a_file(monkeypatch):
    """So that no handler of OSError takes it for a file's."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        with printed("test"):
            with pytest.raises(StdoutError, match=FULL):
                print("text", flush=True)
            print("dropped")


@needs_full
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_runs_log_goes_on_once_the_disk_has_room(tmp_path, buffering):
    """And what could not be written is gone, so that closing the stream is no error."""
    with open("/dev/full", "w", buffering) as stream:
        log = Printed(stream)
        print("lost", file=log)
        print("lost too", file=log, flush=True)
        disk = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(disk, stream.fileno())
        print("kept", file=log)
        assert (tmp_path / "log").read_text() == "kept\n"
        os.close(disk)


def test_a_run_without_stdout_or_with_a_closed_one_goes_on():
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        print("text", file=Printed(stream), flush=True)
