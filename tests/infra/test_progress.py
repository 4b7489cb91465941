"""Tests of progress bars, live on a terminal, a line from time to time in a log, and of a block's seconds.

    python -m pytest tests/infra/test_progress.py
"""

import io
import sys
from contextlib import suppress

import pytest

from envs._terminal import printed
from infra import progress as module
from infra.progress import progress


class Clock:
    """A stand-in for the time module whose clock the test sets."""

    def __init__(self):
        self.seconds = 100.0

    def monotonic(self):
        return self.seconds


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The bar's clock, with an interval of 10 s between two lines."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(module, "LOG_INTERVAL_S", 10)
    return clock


def steps(clock, bar, n, seconds):
    """Update a bar n times, `seconds` apart, each time with new metrics as in RL."""
    for i in range(n):
        clock.seconds += seconds
        bar.set_postfix(success=f"{i / n:.2f}")
        bar.update()


@pytest.mark.parametrize("leave", [True, False])
def test_a_log_gets_one_line_per_interval_and_no_carriage_return(clock, capsys, leave):
    with progress(total=100, desc="RL", unit="iteration", mininterval=0, leave=leave) as bar:
        steps(clock, bar, 100, seconds=1)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 10 and output.out == ""
    assert all(line.startswith("RL: ") and "/100 [" in line and "success=0." in line for line in lines)
    assert not {"\r", "\x1b", "\b"} & {*output.err} and "\n\n" not in output.err


def test_a_bar_within_a_bar_prints_no_control_characters(clock, capsys):
    """As the rollout's bar within RL's: tqdm moves the cursor to draw the second one below the first."""
    with progress(total=4, desc="RL", mininterval=0) as outer:
        for _ in range(4):
            with progress(total=5, desc="rollout", leave=False, mininterval=0) as inner:
                steps(clock, inner, 5, seconds=3)
            outer.update()
    text = capsys.readouterr().err
    assert {line.split(":")[0] for line in text.splitlines()} == {"RL", "rollout"}
    assert len(text.splitlines()) == 4 + 4           # an update of RL every 15 s; a rollout takes 15 s
    assert not {"\r", "\x1b"} & {*text}


def test_a_short_job_prints_nothing_in_a_log(clock, capsys):
    assert list(progress(range(5), desc="demonstrations")) == [0, 1, 2, 3, 4]
    with progress(total=5, disable=True) as bar:
        steps(clock, bar, 5, seconds=60)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_live_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress(range(3), desc="RL", mininterval=0)) == [0, 1, 2]
    assert terminal.getvalue().count("\r") > 2


def test_a_live_bar_is_drawn_on_the_terminal_itself(monkeypatch):
    """`printed` escapes what redraws it."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with printed("program"):
        assert list(progress(range(3), desc="L0", mininterval=0)) == [0, 1, 2]
    assert terminal.getvalue().count("\r") > 2 and "u000d" not in terminal.getvalue()


@pytest.mark.parametrize("stream", ["none", "closed"])
def test_without_stderr_the_work_is_done_nevertheless(clock, monkeypatch, stream):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stream == "none" else closed)
    assert list(progress(range(3))) == [0, 1, 2]


def test_a_blocks_seconds_are_added_unless_it_raises(monkeypatch):
    clock, seconds = iter([1.0, 3.0, 10.0, 10.5, 20.0]), {}
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        with module.timed(seconds, "play"):
            pass
    with suppress(KeyError), module.timed(seconds, "play"):
        raise KeyError
    assert seconds == {"play": 2.5}
