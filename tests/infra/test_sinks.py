"""Proves that --log sends each iteration's metrics, and that a log which cannot be opened is one line.

    python -m pytest tests/infra/test_sinks.py          # some seconds

wandb and TensorBoard are stand-ins that note their calls; TensorBoard's own files are read where it is
installed.
"""

import json
import sys
import types

import pytest
import torch
from tiny_runs import assert_one_error, cold_started, rows, start_from, train

import config

WANDB = '''"""A stand-in for wandb, which notes its calls in a file."""
import json, os, sys

def note(*call):
    with open(os.environ["NOTES"], "a") as file:
        print(json.dumps(call), file=file)

def init(**options):
    if os.environ.get("NO_KEY"):
        raise RuntimeError("api_key not configured")
    note("init", {name: str(value) for name, value in options.items()} | {"argv": sys.argv[1:]})
    return Logged()

class Logged:
    def log(self, metrics, step):
        if os.environ.get("NO_NETWORK"):
            raise ConnectionError("no route\\nto the host")
        note("log", metrics, step)

    def finish(self):
        if os.environ.get("NO_NETWORK"):
            raise ConnectionError("no route")
        note("finish")
'''


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return [*start_from(cold_started(tmp_path_factory)), "--no-gcd"]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Install the stand-in; returns a function that reads and empties its notes."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))

    def notes():
        lines = (tmp_path / "notes").read_text().splitlines()
        (tmp_path / "notes").unlink()
        return [json.loads(line) for line in lines]

    yield notes
    sys.modules.pop("wandb", None)


def measured(row):
    """The metrics of a record of metrics.jsonl that are numbers."""
    return {name: value for name, value in row.items() if "/" in name and value is not None}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_log_that_is_not_installed_is_one_line_before_any_work(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda wanted: None)
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "out", "--log", name)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    assert error == f"gcd.py: error: --log={name}: not installed; pip install {name}; see --help\n"


@pytest.mark.slow
def test_wandb_gets_each_iterations_metrics_and_a_resumed_run_is_the_same_one(start, tmp_path, wandb):
    out = tmp_path / "out"
    assert train(out, *start, "--log", "wandb", "--iterations", 1, lr_decay=False) == 0
    (_, options), (_, metrics, step), finish = wandb()
    row, = rows(out)
    assert step == 0 and finish == ["finish"] and metrics == measured(row)
    assert metrics.keys() >= {"rollout/success", "policy/loss", "time/update_s"}
    assert options["project"] == "gcd" and "'iterations': 1" in options["config"]
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert options["id"] == first["run"] and options["resume"] == "allow" and options["argv"] == []
    assert train(out, *start, "--log", "wandb", "--iterations", 1, "--resume", lr_decay=False) == 0
    (_, again), finish = wandb()                    # no iteration was left to do
    assert again["id"] == options["id"] and finish == ["finish"]


@pytest.mark.slow
def test_a_log_that_cannot_be_opened_is_one_line(start, tmp_path, capsys, wandb, monkeypatch):
    monkeypatch.setenv("NO_KEY", "1")
    assert train(tmp_path / "out", *start, "--log", "wandb") == 1
    assert_one_error(capsys, "--log=wandb: RuntimeError: api_key not configured")


@pytest.mark.slow
def test_a_log_that_fails_later_is_one_line_and_the_run_goes_on(start, tmp_path, capsys, wandb, monkeypatch):
    monkeypatch.setenv("NO_NETWORK", "1")
    assert train(tmp_path / "out", *start, "--log", "wandb", "--iterations", 2) == 0
    printed = capsys.readouterr().err
    assert printed.count("--log=wandb: ConnectionError: no route to the host; ") == 1
    assert printed.count("--log=wandb: finish failed: ConnectionError: no route\n") == 1
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.slow
def test_tensorboard_gets_each_iterations_metrics(start, tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def close(self):
            calls.append("closed")

    fake = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(torch.utils, "tensorboard", fake, raising=False)
    monkeypatch.setattr(config.importlib.util, "find_spec", lambda wanted: wanted)
    assert train(tmp_path / "out", *start, "--log", "tensorboard") == 0
    (folder, purge), *scalars, closed = calls
    assert (folder, purge, closed) == (tmp_path / "out" / "tensorboard", None, "closed")
    want = [(name, value, row["iteration"]) for row in rows(tmp_path / "out")
            for name, value in measured(row).items()]
    assert scalars == want


@pytest.mark.slow
def test_tensorboards_files_hold_the_metrics(start, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    assert train(tmp_path / "out", *start, "--log", "tensorboard") == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    for row in rows(tmp_path / "out"):
        event = events.Scalars("rollout/success")[row["iteration"]]
        assert (event.step, event.value) == (row["iteration"], pytest.approx(row["rollout/success"]))
