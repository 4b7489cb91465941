"""Tests that a rank which fails prints why, and that all processes end within a minute.

    python -m pytest tests/infra/test_failing.py          # a minute and a half

The two ranks are this file run by torchrun: `main` below breaks one function of gcd.py on one of them.
torchrun is configured to wait an hour for processes that do not end by themselves, as docs/gpus.md advises.
"""

import io
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import ENVIRONMENT, ROOT, TINY, start_from

import gcd
import session
import update
from infra import errors, job, parallel, signals
from infra.plugins import PluginError
from lm import engine

SECOND = f"rank 1 on {socket.gethostname()}"
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def failing(out, error):
    """A function that raises the error, and writes the time to a file."""
    def fail(*arguments, **options):
        (out / "when").write_text(str(time.time()))
        raise error
    return fail


def stuck(*arguments, **options):
    """Stand-in for a collective whose peer is gone: it never returns, and no signal or error reaches it."""
    while True:
        time.sleep(600)


def main(kind, out, *flags):
    rank = int(os.environ["RANK"])
    if kind == "playing" and rank == 1:
        engine.sample_tokens = failing(out, FULL)
    if kind == "training":
        job.PATIENCE_S = 2               # the other rank is waited for so long
        update.token_loss = failing(out, FULL) if rank == 1 else stuck
    if kind == "bug" and rank == 1:
        gcd.assign_credit = failing(out, AssertionError("a turn without a reward"))
        session.reported = lambda close, what: lambda: time.sleep(90)              # games that close slowly
    return gcd.main([*TINY, "--out", str(out / "run"), *flags])


@pytest.mark.slow
@pytest.mark.parametrize("kind, message, consequence", [
    ("playing", "gcd.py: error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.): "
     "while playing, --slots or --context down\n", ""),
    ("training", "gcd.py: error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.): "
     "while training, --microbatch-tokens down", f"\n{SECOND} failed, so this one ends\n"),
    ("bug", "AssertionError: a turn without a reward",
     f"gcd.py: error: {SECOND} failed, so this one ends\n")],
    ids=["playing", "training while the other is stuck", "a bug"])
def test_a_rank_that_fails_prints_why_and_ends_all_ranks(start, tmp_path, kind, message, consequence):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               __file__, kind, tmp_path, *start_from(start)]
    environment = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests",
                                 "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}
    done = subprocess.run([str(part) for part in command], timeout=240, check=False, capture_output=True,
                          text=True, env=environment)
    took = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode == 1 and took < 60, (took, done.stderr[-3000:])
    assert done.stderr.count(message) == 1 and consequence in done.stderr, done.stderr[-3000:]
    assert done.stderr.count("so this one ends") == bool(consequence)      # not beside a line that says why
    assert ('gcd.py", line' in done.stderr) == (kind == "bug")     # a traceback other than torchrun's own
    assert not (tmp_path / "run" / "traceback.txt").exists()       # rank 0's would hide that rank 1 failed


def test_a_machine_prints_an_error_of_all_its_ranks_once(monkeypatch):
    store, host = torch.distributed.HashStore(), ["a"]
    monkeypatch.setattr(job.socket, "gethostname", lambda: host[0])

    def is_news(rank, text, follows=False):
        monkeypatch.setattr(job.Watch, "current", SimpleNamespace(store=store, rank=rank))
        return job.is_news(text, follows)

    assert is_news(1, "no such task") and not is_news(0, "no such task")
    assert is_news(2, "disk full") and not is_news(3, "rank 1 failed", follows=True)
    host[0] = "b"
    assert is_news(5, "rank 1 failed", follows=True) and not is_news(4, "rank 1 failed", follows=True)
    assert is_news(6, "no such task")
    monkeypatch.setattr(job.Watch, "current", None)
    assert job.is_news("no such task", True)


def through(place, error):
    """The error with a traceback through a function of a file: "file" or "file:function"."""
    file, _, name = place.partition(":")
    with pytest.raises(type(error)) as caught:
        code = f"def {name or 'run'}():\n    raise error\n{name or 'run'}()"
        exec(compile(code, file, "exec"), {"error": error.with_traceback(None)})
    return caught.value


@pytest.mark.parametrize("error", [
    FULL, MemoryError("no more"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")])
def test_out_of_memory_names_the_flags_of_the_activity(tmp_path, error):
    playing, training = "while playing, --slots or --context down", "while training, --microbatch-tokens down"
    for place, expected in (("rollout.py", playing), ("lm/engine.py", playing), ("update.py", training),
                            ("judge.py:answer_questions", "while judging, --slots down"),
                            ("update.py:step", "while stepping the optimizer, --train-layers"),
                            ("infra/parallel.py:onloaded", "while bringing the KL reference"),
                            ("lm/lora.py:merge", "while merging adapters, more ranks"),
                            ("infra/parallel.py:copy_weights", "while copying the weights to the sampler"),
                            ("infra/checkpoint.py:save_checkpoint", "while saving a checkpoint, more ranks"),
                            ("infra/checkpoint.py:load_trainer", "while loading a checkpoint, more ranks"),
                            ("models.py:load_model", "while loading a model, more ranks"),
                            ("session.py:kl_reference", "while loading a model, more ranks"),
                            ("infra/parallel.py:unsharded_copy", "while loading a model, more ranks")):
        file, _, function = place.partition(":")
        assert f"\ndef {function}" in (ROOT / file).read_text()
        line = errors.one_line(through(f"{ROOT}/{place}", error), tmp_path)
        assert line.startswith("out of memory (") and expected in line and line.count("while ") == 1, line
    both = errors.one_line(through("elsewhere.py", error), tmp_path)
    assert playing in both and training in both and not list(tmp_path.iterdir())


def test_out_of_memory_within_a_calls_callees_names_the_stage(tmp_path):
    """The judge samples by the engine, and a step's update is in the same file as the forward."""
    def nested(outer, inner):
        with pytest.raises(MemoryError) as caught:
            exec(compile(f"def {outer[1]}(call):\n    call()", outer[0], "exec"), names := {})
            exec(compile(f"def {inner[1]}():\n    raise MemoryError('full')", inner[0], "exec"), names)
            names[outer[1]](names[inner[1]])
        return errors.one_line(caught.value, tmp_path)

    assert "while judging" in nested(("judge.py", "answer_questions"), ("engine.py", "answer"))
    assert "while stepping the optimizer" in nested(("update.py", "step"), ("optim.py", "muon"))
    assert "while training" in nested(("update.py", "update"), ("batching.py", "collate"))


@pytest.mark.parametrize("kind", [OSError, ValueError, PluginError])
def test_out_of_memory_is_found_below_the_error_of_a_file_or_plug_in(tmp_path, kind):
    """The flags are those of the activity, wherever of the two tracebacks it is."""
    for outer, inner in (("models.py:load_model", "elsewhere.py"), ("elsewhere.py", "models.py:load_model")):
        error = kind("trainer.pt: no state of this optimizer: CUDA out of memory")
        error.__cause__ = through(f"{ROOT}/{inner}", RuntimeError("CUDA error: out of memory"))
        line = errors.one_line(through(f"{ROOT}/{outer}", error), tmp_path)
        assert line == "out of memory (CUDA error: out of memory): while loading a model, more ranks"
    assert not list(tmp_path.iterdir())


def test_errors_of_other_kinds_do_not_count_as_out_of_memory(tmp_path):
    line = errors.one_line(through(str(ROOT / "update.py"), RuntimeError("shapes do not fit")), tmp_path)
    assert line.startswith("RuntimeError: shapes do not fit (traceback in")
    assert errors.one_line(ValueError("--out=out of memory: no"), tmp_path) == "--out=out of memory: no"


@pytest.mark.parametrize("parent", ["", "torchrun", "run.sh"])
def test_a_signal_that_comes_twice_at_once_counts_once_under_a_parent_that_passes_it_on(monkeypatch, parent):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("GCD_PARENT", raising=False)
    if parent:
        names = {"torchrun": {"TORCHELASTIC_RUN_ID": "job", "RANK": "0", "WORLD_SIZE": "1"},
                 "run.sh": {"GCD_PARENT": str(os.getppid())}}[parent]
        for name, value in names.items():
            monkeypatch.setenv(name, value)
    with signals.Stop.restored():
        stop = signals.Stop()
        assert not stop
        stop.note(signal.SIGTERM, None)
        with nullcontext() if parent else pytest.raises(KeyboardInterrupt):
            stop.note(signal.SIGTERM, None)
        assert stop
        if parent:                                                                # one that comes later
            stop.last -= stop.REPEAT_S
            with pytest.raises(KeyboardInterrupt):
                stop.note(signal.SIGTERM, None)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_sighup_that_nohup_ignores_stays_ignored(ignored):
    with signals.Stop.restored():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        stop = signals.Stop()
        assert signal.getsignal(signal.SIGTERM) == stop.note
        assert signal.getsignal(signal.SIGHUP) == (signal.SIG_IGN if ignored else stop.note)


def test_what_torchrun_left_in_a_shell_makes_no_parent_of_it(monkeypatch):
    """Its end would stop a run that nohup began there."""
    for name in ("RANK", "GCD_PARENT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with signals.Stop.restored():
        stop = signals.Stop()
        assert stop.parent is None and not stop.by_torchrun


def test_a_signal_during_a_write_to_stderr_does_not_break_it(monkeypatch):
    """The handler runs inside a buffered writer's own write, where another one raises RuntimeError."""
    class Raw(io.RawIOBase):
        def writable(self):
            return True

        def write(self, content):
            os.kill(os.getpid(), signal.SIGTERM)
            return len(content)

    text = io.TextIOWrapper(io.BufferedWriter(Raw()), write_through=True)
    monkeypatch.delenv("GCD_PARENT", raising=False)
    with signals.Stop.restored(), monkeypatch.context() as patched:
        stop = signals.Stop()
        patched.setattr(sys, "stderr", text)
        text.write("x")
        text.buffer.flush()
        assert stop.signals == 1
        patched.setattr(stop, "signals", 0)                # what the detached stream flushes at its end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        text.detach()


def test_the_first_rank_of_a_machine_speaks_for_all_of_it(monkeypatch, capsys):
    """A process alone speaks for itself, whatever its shell has left in the variables."""
    for local_rank, ranks, lines in (("0", "2", 1), ("1", "2", 0), ("1", "1", 1)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setenv("WORLD_SIZE", ranks)
        with signals.Stop.restored():
            signals.Stop().note(signal.SIGTERM, None)
        assert capsys.readouterr().err.count("stopping as soon as this can be saved") == lines
        with pytest.raises(SystemExit):
            gcd.main(["--tasks", "0"])
        assert capsys.readouterr().err.count("gcd.py: error: --tasks=0: expected 1") == lines


@pytest.mark.parametrize("came", [(signal.SIGTERM,) * 3, (signal.SIGINT, signal.SIGTERM)],
                         ids=["a copy that is handled late", "a second Ctrl-C, of which it makes SIGTERM"])
def test_of_two_signals_under_torchrun_only_an_equal_one_is_a_copy(monkeypatch, came):
    """No handler runs before a call in C++ has ended; in a terminal only torchrun gets a Ctrl-C."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    *before, last = came
    with signals.Stop.restored():
        stop = signals.Stop()
        for signum in before:
            stop.note(signum, None)
            stop.last -= 10
        with pytest.raises(KeyboardInterrupt):
            stop.note(last, None)


def test_a_signal_ends_a_forked_process_at_once():
    """Else a run whose environment forked waits for it when it ends, for ever."""
    wait, ready = os.pipe()
    with signals.Stop.restored():
        stop = signals.Stop()
        with warnings.catch_warnings(action="ignore"):           # of a fork while torch has threads
            child = os.fork()
        if not child:
            os.write(ready, b"x")                                # Python drops signals that come before
            time.sleep(60)
            os._exit(0)
        assert os.read(wait, 1) == b"x"
        os.close(wait)
        os.close(ready)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not stop


def test_a_single_process_returns_its_exit_status():
    assert job.abort(130) == 130 and job.failure() == "" and not parallel.is_distributed()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
