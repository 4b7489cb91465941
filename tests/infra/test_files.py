"""Tests of a run's folder: what its lock says, and that no file in it holds a key of the command line.

    python -m pytest tests/infra/test_files.py
"""

import errno
import math
import os
import resource
import sys
from types import SimpleNamespace

import pytest
from tiny_runs import start_from, train

import config
import gcd
from envs import household
from infra import checkpoint, files
from report import __main__ as report
from rollout import Episode, Turn

SECRET = "hunter2hunter2"


def given(monkeypatch, flags):
    """The same flags, also as this process's command line, which a lock once stored."""
    monkeypatch.setattr(sys, "argv", ["gcd.py", *map(str, flags)])
    return flags


def holders(folder):
    """The files in a folder, and the links and folders, whose content or name has the secret."""
    return [path for path in folder.rglob("*")
            if SECRET in path.name or path.is_file() and SECRET.encode() in path.read_bytes()]


def test_what_is_written_is_synced_to_the_disk_before_it_replaces_anything(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, lambda *given, name=name, call=getattr(os, name): [
            done.append(name), call(*given)])
    files.write_text(tmp_path / "a", "text")
    assert done == ["fsync", "replace"]
    files.append(tmp_path / "a.jsonl", {})
    checkpoint.sync(tmp_path, tmp_path / "a")
    assert done[2:] == ["fsync"] * 3


def test_a_folder_that_cannot_be_synced_fails_no_save(tmp_path, monkeypatch):
    """As on some shared file systems; a file has to be synced."""
    def fails(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    number = errno.EINVAL
    checkpoint.sync(tmp_path)
    (tmp_path / "a").touch()
    with pytest.raises(OSError):
        checkpoint.sync(tmp_path, tmp_path / "a")
    number = errno.EIO
    with pytest.raises(OSError):
        checkpoint.sync(tmp_path)


@pytest.mark.parametrize("url", [f"https://me:{SECRET}@host/v1", f"https://{SECRET}@host/v1", SECRET,
                                 f"https://host/v1?key={SECRET}", f"https://host/v1#{SECRET}",
                                 f"ftp://host/{SECRET}/v1"])
@pytest.mark.parametrize("flag", ["--endpoint", "--endpont"])
def test_a_secret_in_the_endpoint_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys, flag,
                                                                        url):
    """Without repeating it; also if the flag is misspelt."""
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        train(out, *given(monkeypatch, [f"{flag}={url}"]))
    printed, error = capsys.readouterr()
    assert ended.value.code == 2 and printed == "" and error.count("\n") == 1
    assert error.startswith(f"gcd.py: error: {flag}: ") and SECRET not in error
    assert not (out).exists()


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["evaluated", "broken"])
def test_a_secret_in_the_endpoints_path_is_used_and_not_stored(start, tmp_path, monkeypatch, capsys, ending):
    """In no byte of a run's files or of its report, nor printed."""
    pytest.importorskip("openai")
    out = tmp_path / "runs" / "out"
    monkeypatch.setenv("LARGE_KEY", SECRET)
    two = household.Environment(household.Environment.Settings(), "part", 0).split_tasks("L2")[:2]
    monkeypatch.setattr(household.Environment, "split_tasks", lambda self, name: two)
    flags = given(monkeypatch, [
        *start_from(start), "--judge-labels", "rule+endpoint", "--endpoint-key-variable", "LARGE_KEY",
        "--endpoint", f"http://127.0.0.1:9/{SECRET}/v1", "--endpoint-cache", tmp_path / "cache.jsonl",
        "--endpoint-limit", 0, "--evaluate", "L2"])                  # nothing is sent
    if ending == "broken":
        def breaks(*arguments):
            raise RuntimeError("a bug")
        monkeypatch.setattr(gcd, "optimize", breaks)
    assert train(out, *flags) == (ending == "broken")
    expected = "traceback.txt" if ending == "broken" else "evaluation.json"
    assert {"lock", "metrics.jsonl", expected} <= {path.name for path in (out).iterdir()}
    if ending == "evaluated":
        assert train(out, *flags, "--resume") == 0
        assert report.main([str(out.parent)]) == 0
    (header, *_), _ = files.read_lines(out / "metrics.jsonl")
    assert header["config"]["endpoint"] == "http://127.0.0.1:9/..."
    printed, error = capsys.readouterr()
    assert holders(tmp_path) == [] and SECRET not in printed + error


@pytest.mark.parametrize("flags, iterations, types, n", [
    ("--iterations 3", 3, "part", 12), ("--iterations 3", 1, "part", 4),
    ("--iterations 3 --dynamic-sampling refill", 1, "part", 4), ("--iterations 90000", 90000, "part", 4000),
    ("--iterations 0 --demonstrations 7", 0, "all", 7), ("--iterations 0 --demonstrations 0", 0, "all", 0)])
def test_the_hash_of_training_is_of_the_tasks_that_it_plays(monkeypatch, flags, iterations, types, n):
    """Without RL, of as many as there are demonstrations."""
    given = config.parse(["--tasks", "4", *flags.split()])
    monkeypatch.setattr(household.Environment, "train_tasks", lambda self, *asking: [asking][:asking[2]])
    monkeypatch.setattr(household.Environment, "tasks_hash", lambda self, tasks: tasks)
    assert files.train_hash(given, iterations) == ([(types, 0, n)] if n else None)


def test_a_lock_names_the_process_alone(tmp_path, monkeypatch):
    given(monkeypatch, ["--endpoint", SECRET])
    with files.locked(tmp_path):
        assert files.lock_holder(tmp_path).startswith("process ")
    assert holders(tmp_path) == []


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=f"--out={tmp_path}: cannot be locked: No locks available"):
        with files.locked(tmp_path):
            pytest.fail("locked")


def test_a_disk_that_is_too_full_for_a_lock_is_named(tmp_path):
    """Here one that takes no byte, which a write that waits in a buffer would meet again at close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ValueError, match=f"--out={tmp_path}: File too large"):
            with files.locked(tmp_path):
                pytest.fail("locked")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_error_that_names_its_file_keeps_its_text():
    """OSErrors of ours have no number: the block's path and no reason would take their place."""
    for given, expected in ((OSError("model.safetensors: no space left"), "model.safetensors: no space left"),
                            (OSError(errno.ENOSPC, "full"), "[Errno 28] full: 'folder'")):
        with pytest.raises(OSError) as raised, files.naming("folder"):
            raise given
        assert str(raised.value) == expected


def test_a_run_that_was_resumed_with_no_iterations_keeps_those_it_had():
    headers = [{"config": {"iterations": n, "lr": n}} for n in (80, 40, 0)]
    assert files.settings_in([*headers, {"phase": "rl"}]) == {"iterations": 40, "lr": 0}
    assert files.settings_in(headers[2:]) == {"iterations": 0, "lr": 0}


@pytest.mark.parametrize("cold, trains, kept", [
    (None, True, ["head", "round 0", "first", "rl 0", "rl 1"]),
    (None, False, ["head", "round 0", "first", "rl 0", "rl 1", "evaluation"]),
    ({"steps": 3, "rounds": 0}, True, ["head", "first", "rl 0", "rl 1"]),
    ({"steps": 3, "rounds": 1}, True, ["head", "round 0", "first", "rl 0", "rl 1"])])
def test_logs_are_cut_where_a_run_goes_on(tmp_path, cold, trains, kept):
    """After two iterations, or three steps of a cold start; demonstrations stay only after a round."""
    lines = [{"name": "head", "run": "r"}, {"name": "round 0", "phase": "demonstrations"},
             {"name": "first", "step": 2}, *([{"name": "fourth", "step": 3}] if cold else []),
             *({"name": f"rl {i}", "phase": "rl", "iteration": i} for i in range(3)),
             {"name": "evaluation", "phase": "evaluation"}]
    if cold:
        lines.append({"name": "again", "phase": "demonstrations"})
    for line in lines:
        files.append(tmp_path / files.METRICS, line)
    for i in range(3):
        files.write_lines(tmp_path / files.ROLLOUTS / f"{i:05d}.jsonl", [{"index": i}])
    for name in ("00000", "00002", "00003", "notes"):
        (tmp_path / files.KEPT / name).mkdir(parents=True)
    files.truncate_logs(tmp_path, 2, cold, trains)
    left = {path.name for path in (tmp_path / files.KEPT).iterdir()}
    assert left == {"00000", "00002", "notes", "00003.old-1" if trains else "00003"}
    assert [path.stem for path in sorted((tmp_path / files.ROLLOUTS).iterdir())] == ["00000", "00001"]
    assert [line["name"] for line in files.read_lines(tmp_path / files.METRICS)[0]] == kept


@pytest.mark.parametrize("line", [{"iteration": "3"}, {"iteration": None}, {"iteration": [1]}, {"step": {}},
                                  {"iteration": 1, "step": 2.5}, {"iteration": True}])
def test_a_log_line_that_no_run_wrote_is_cut(tmp_path, line):
    for record in ({"name": "head", "run": "r"}, line, {"iteration": 1, "name": "kept"}):
        files.append(tmp_path / files.METRICS, record)
    files.truncate_logs(tmp_path, 2)
    assert [line.get("name") for line in files.read_lines(tmp_path / files.METRICS)[0]] == ["head", "kept"]


def test_what_killed_processes_left_is_removed_and_no_more(tmp_path):
    left = ["metrics.jsonl.12.new", "evaluation.json.7.new", "fresh-0123abcd/model.safetensors",
            "rollouts/00003.jsonl.12.new"]
    kept = ["metrics.jsonl.new", "report.html.12.new", "metrics.jsonl.x.new", "fresh-0123abcd.txt",
            "fresh-notes/a", "fresh-0123ABCD/a", "checkpoint.new/config.json", "metrics.jsonl",
            "00003.jsonl.12.new", "rollouts/00003.jsonl", "rollouts/notes.12.new"]
    for name in (*left, *kept):
        files.write_text(tmp_path / name, "")
    files.remove_leftovers(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == (
        sorted(kept))
    assert not (tmp_path / "fresh-0123abcd").exists()


def test_of_an_iteration_that_was_run_twice_the_later_record_counts():
    records = [{"phase": "rl", "iteration": i, "n": n} for n, i in enumerate((1, 0, 1))]
    foreign = [5, {"phase": "rl"}, {"phase": "rl", "iteration": "x"}, {"phase": "evaluation", "iteration": 5}]
    assert files.iterations_in([*records, *foreign]) == records[1:]


def test_numbers_that_json_has_not_are_null_and_only_training_has_rewards_and_advantages(tmp_path):
    files.append(tmp_path / "x", {"a": [math.nan, math.inf, -math.inf, 1.5, "nan"]})
    assert files.read_lines(tmp_path / "x")[0] == [{"a": [None, None, None, 1.5, "nan"]}]
    turn = Turn("o", [1], [2], [0.0], "t", "a", True, "o", advantage=2.0)
    episode = Episode(SimpleNamespace(id="a", task_type="look"), 0, turns=[turn], reward=-0.04)
    records = [files.episode_record(episode, credited) for credited in (True, False)]
    assert [(record["reward"], record["turns"][0]["advantage"]) for record in records] == [
        (-0.04, 2.0), (None, None)]


@pytest.mark.slow
def test_a_truth_value_is_no_number():
    assert [files.is_number(value) for value in (True, False, 1, 0.5, "1", None)] == [
        False, False, True, True, False, False]
