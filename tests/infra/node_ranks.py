"""What the ranks of tests/infra/test_nodes.py run: thirty start, so each kind imports only what it needs.

    python tests/infra/node_ranks.py KIND FOLDER [ARGUMENT ...]        # by torchrun, or by tests/forked.py
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from infra import job


def main(kind, out, *arguments):
    """What each rank runs. kind: "train", "resume", "run", "blind", "restarted", "wait" or "leave"."""
    torch.set_num_threads(1)
    job.BEAT_S = 1                                                                # half of the product's
    if kind in ("run", "blind", "restarted"):
        return run(kind, out, *arguments)
    ranks = job.setup("cpu", timeout_s=240, within="all" if kind == "resume" else "node")
    if kind in ("train", "resume"):
        import test_parallel as single
        if kind == "train":
            single.train_and_save(ranks, out)
            single.train_adapters(ranks, out)
            read_parts(ranks, out)
        single.resume(ranks, Path(*arguments or [out]), out)
    if kind == "wait":                         # for a rank that is never there, as a collective on GPUs may
        job.BEAT_S, job.PATIENCE_S = 0.5, 2        # a quarter of the product's, and a tenth
        (out / f"rank{ranks.rank}").touch()
        time.sleep(600)
    if kind == "leave":                        # rank 1 is done long before rank 0, which closes its games
        job.BEAT_S, job.PATIENCE_S = 0.1, 0.2
        if ranks.rank == 0:
            outlast(1)
    return job.shutdown()


def run(kind, out, *flags):
    """A tiny run of gcd.py, with what the kind breaks. kind, and further arguments: as `main`'s."""
    from tiny_runs import TINY

    import gcd
    if kind == "blind":
        hide_trainer_file()
    if kind == "restarted":
        job.BEAT_S = 0.5
        lost, *flags = flags
        die_in_iteration_1(lost)
    return gcd.main([*TINY, "--out", str(out), *flags])


def hide_trainer_file():
    """Rank 1 does not see it, as on a machine whose network file system is behind."""
    from infra import checkpoint
    is_file, hidden = Path.is_file, checkpoint.TRAINER_FILE if os.environ["RANK"] == "1" else ""
    Path.is_file = lambda path: path.name != hidden and is_file(path)


def die_in_iteration_1(lost):
    """In iteration 1 of the first attempt, node 1 (lost: "node") or its rank is killed."""
    import gcd
    optimize = gcd.optimize

    def dies(run, i, *arguments):
        if (os.environ["NODE"], os.environ["TORCHELASTIC_RESTART_COUNT"], i) == ("1", "0", 1):
            if lost == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return optimize(run, i, *arguments)

    gcd.optimize = dies


def outlast(other):
    """Wait until another rank has left, and then for 30 beats: one that is called lost is so after 14, and
    this process then counts no further and ends.
    """
    watch = job.Watch.current

    def beats():
        return int(watch.store.get(f"beat/{watch.rank}"))

    while watch.store.get(f"beat/{other}") != job.LEFT:
        time.sleep(job.BEAT_S)
    last = beats() + 30
    while beats() < last:
        time.sleep(job.BEAT_S)


class Watched:
    """A tensor of a file that notes how many bytes are read of it."""

    def __init__(self, tensor, read):
        self.tensor, self.read = tensor, read

    def __getitem__(self, rows):
        found = self.tensor[rows]
        self.read.append(found.nbytes)
        return found


def read_parts(ranks, out):
    """Load a model and note the bytes that this rank reads, and has."""
    import test_parallel as single

    from infra import parallel
    from lm import model as decoder
    from lm.optim import adamw
    read, copy_part = [], parallel.copy_part
    parallel.copy_part = lambda target, source: copy_part(target, Watched(source, read))
    model = parallel.shard(decoder.open_pretrained(out / "three"), ranks)
    decoder.load_weights(model, out / "three")
    parallel.copy_part = copy_part
    kept = sum(parallel.own_rows(parameter)[0].nbytes for parameter in model.parameters())
    (out / f"read{ranks.rank}.json").write_text(json.dumps([sum(read), kept]))
    full = parallel.full_weights(model)
    parallel.on_rank0(lambda: torch.save(full, out / "read.pt"))
    for step in range(2):
        single.save(out / "fresh", model, adamw(model), {"step": step})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
