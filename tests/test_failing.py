"""Proves that a rank which fails says why, and that all processes have ended within a minute.

    python -m pytest tests/test_failing.py          # a minute and a half

The two ranks are this file run by torchrun: `main` below breaks one place of gcd.py on one of them. torchrun
is told to wait an hour for what does not end by itself, as the README says.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import ENVIRONMENT, ROOT, TINY, begin, cold_started

import gcd
import update
from lm import engine
from run import ending, parallel

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_started(tmp_path_factory)


def failing(out, error):
    """What fails on rank 1, at a time that is written down."""
    def fail(*arguments, **options):
        (out / "when").write_text(str(time.time()))
        raise error
    return fail


def stuck(*arguments, **options):
    """As a collective whose peer is gone: no signal and no error reaches it."""
    while True:
        time.sleep(600)


def main(kind, out, *flags):
    rank = int(os.environ["RANK"])
    if kind == "playing" and rank == 1:
        engine.sample_tokens = failing(out, FULL)
    if kind == "training":
        update.batch_loss = failing(out, FULL) if rank == 1 else stuck
    if kind == "ours" and rank == 1:
        gcd.give_credit = failing(out, AssertionError("a turn without a reward"))
    return gcd.main([*TINY, "--out", str(out / "run"), *flags])


@pytest.mark.parametrize("kind, said, by", [
    ("playing", "gcd.py: error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.): "
     "while playing, --slots or --context down\n", "gcd.py: error: rank 1 failed, so this one ends\n"),
    ("training", "gcd.py: error: out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.): "
     "while training, --microbatch-tokens down", "\nrank 1 failed, so this one ends\n"),
    ("ours", "AssertionError: a turn without a reward", "gcd.py: error: rank 1 failed, so this one ends\n")],
    ids=["playing", "training while the other is stuck", "an error of ours"])
def test_a_rank_that_fails_says_why_and_ends_all(start, tmp_path, kind, said, by):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               __file__, kind, tmp_path, *begin(start)]
    done = subprocess.run([str(part) for part in command], timeout=240, check=False, capture_output=True,
                          text=True, env=ENVIRONMENT | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"})
    took = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode == 1 and took < 60, (took, done.stderr[-3000:])
    assert done.stderr.count(said) == 1 and by in done.stderr, done.stderr[-3000:]
    assert ('gcd.py", line' in done.stderr) == (kind == "ours")    # a traceback, beside torchrun's own
    assert not (tmp_path / "run" / "traceback.txt").exists()       # rank 0's would hide whose fault it was


def through(place, error):
    """The error, as it comes through a function of a file."""
    with pytest.raises(type(error)) as caught:
        exec(compile("def run():\n    raise error\nrun()", place, "exec"), {"error": error})
    return caught.value


@pytest.mark.fast
@pytest.mark.parametrize("error", [
    FULL, MemoryError("no more"), RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")])
def test_out_of_memory_names_the_knob_of_what_was_under_way(tmp_path, error):
    playing, training = "--slots or --context down", "--microbatch-tokens down"
    for place, told, untold in ((ROOT / "rollout.py", playing, training),
                                (ROOT / "lm" / "engine.py", playing, training),
                                (ROOT / "update.py", training, playing)):
        line = ending.one_line(through(str(place), error.with_traceback(None)), tmp_path)
        assert line.startswith("out of memory (") and told in line and untold not in line
    both = ending.one_line(through("elsewhere.py", error.with_traceback(None)), tmp_path)
    assert playing in both and training in both and not list(tmp_path.iterdir())


@pytest.mark.fast
def test_another_error_is_not_taken_for_memory(tmp_path):
    line = ending.one_line(through(str(ROOT / "update.py"), RuntimeError("shapes do not fit")), tmp_path)
    assert line.startswith("RuntimeError: shapes do not fit (traceback in")
    assert ending.one_line(ValueError("--out=out of memory: no"), tmp_path) == "--out=out of memory: no"


@pytest.mark.fast
def test_one_process_alone_ends_as_any_program():
    assert parallel.fail(130) == 130 and parallel.failed_rank() is None and not parallel.several()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
