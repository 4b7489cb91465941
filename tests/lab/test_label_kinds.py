"""Tests of lab/studies/label_kinds.py: its counts by hand, and its page.

    python -m pytest tests/lab/test_label_kinds.py
"""

import json

import pytest

import labels
from envs import Environment, Task
from lab.studies import label_kinds
from rollout import Episode, Turn

NOOP = Environment.noop_message


class Told(Environment):
    """An environment whose oracle says what the commands say: "good", "bad", or nothing."""

    def oracle(self, observations, commands):
        return [command if command in ("good", "bad") else None for command in commands]


def episode(lines, won):
    """An episode of (command, reply), from observation "hall"; a reply NOOP is a refusal."""
    made = Episode(Task("house", "train", "walk", None), 0, won=won)
    observation = anchor = "hall"
    for command, reply in lines:
        made.turns.append(Turn(observation, [], [], [], command, command, reply != NOOP, anchor))
        observation, anchor = reply, anchor if reply == NOOP else reply
    made.final_observation, made.last_anchor = observation, anchor
    return made


def test_the_literal_rule_marks_the_turn_after_a_refusal():
    made = episode([("bad", NOOP), ("good", "kitchen"), ("bad", NOOP), ("good", "garden")], won=True)
    assert label_kinds.literal_labels(made) == [None, "bad", None, "good"]
    assert labels.rule_labels(made) == ["bad", None, "bad", "good"]


def test_counts_and_numbers_by_hand():
    """Hall, kitchen, hall again: a loop without news is the way from the kitchen back to it, nothing else."""
    lines = [("good", "kitchen"), ("bad", "hall"), ("bad", "kitchen"), ("bad", NOOP), ("good", "garden")]
    made = episode(lines, won=False)
    counts = label_kinds.counted([made], Told())
    assert counts["taken"] == {"bad/bad/taken/lost": 2, "good/good/taken/lost": 2, "none/bad/refused/lost": 1}
    assert counts["rule"] == {"bad/bad/refused/lost": 1, "bad/bad/taken/lost": 1, "bad/good/taken/lost": 1,
                              "none/bad/taken/lost": 1, "none/good/taken/lost": 1}
    found = label_kinds.numbers(counts["rule"])
    assert (found["good"], found["bad"], found["good precision"]) == (0, 3, None)
    assert (found["bad refused"], found["bad precision"], found["flaw recall"]) == (1 / 3, 1 / 2, 1 / 2)
    assert label_kinds.numbers(counts["taken"])["flaw recall"] == 1.0
    assert sum(counts["oracle"].values()) == 5 and label_kinds.numbers(counts["flaws"])["bad refused"] == 0


@pytest.mark.slow
def test_the_study_writes_numbers_figure_and_page(tmp_path, monkeypatch):
    monkeypatch.setattr(label_kinds, "MODELS", {"tiny": (24, 1.0), "real": (0, 1.0)})
    monkeypatch.setattr(label_kinds, "ROOMS", (*label_kinds.ROOMS, "--max-turns", "6", "--hidden-size", "32"))
    flags = ["--tasks", "2", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    assert label_kinds.main([*flags, "--jobs", "1"]) == 0                     # without games: rooms alone
    found = json.loads((tmp_path / "out" / "label_kinds.json").read_text())
    assert [*found["rows"]] == ["tiny"] and [*found["rows"]["tiny"]] == [*label_kinds.KINDS]
    assert found["rows"]["tiny"]["oracle"]["bad precision"] in (1.0, None)
    monkeypatch.setattr(label_kinds, "cold_start", lambda name, settings: pytest.fail("a run was started"))
    monkeypatch.setattr(label_kinds, "draw", lambda *_: None)
    assert label_kinds.main([*flags, "--jobs", "1"]) == 0
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".jsonl", ".svg", ".md"}


def test_errors_are_reported_before_anything_runs(tmp_path, capsys):
    for flags, message in ((["--tasks", "0"], "--tasks=0: expected 1"), (["--jobs", "0"], "has no cell")):
        with pytest.raises(SystemExit):
            label_kinds.main([*flags, "--out", str(tmp_path)])
        assert message in capsys.readouterr().err
