"""Tests of several machines, each a torchrun of its own on this one: 2 x 4 ranks over gloo.

    python -m pytest tests/infra/test_nodes.py

The ranks are this file, run by `torchrun --nnodes 2 --nproc-per-node 4` (`main` below). Oracles: the same
functions on one process, as in test_parallel.py.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import test_parallel as single
import torch
from test_parallel import ROOT

import config
import session
from infra import parallel


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def start_nodes(*command, nodes=2, ranks=4, more=(), **environment):
    """Start a torchrun for each node; returns the processes, which are leaders of their process groups."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", ranks,
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "test",
                "--local-addr", "localhost", *more, *command]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests:{ROOT}/tests/infra", "OMP_NUM_THREADS": "1",
                              "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"} | environment
    return [subprocess.Popen([str(part) for part in torchrun], env=variables, start_new_session=True,
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(nodes)]


def finished(nodes, timeout_s=300):
    """The exit statuses of the nodes, and all of their output."""
    texts = [node.communicate(timeout=timeout_s)[0] for node in nodes]
    return [node.returncode for node in nodes], "".join(texts)


def main(out):
    """What torchrun runs on each of eight ranks."""
    torch.set_num_threads(1)
    ranks = parallel.setup("cpu", timeout_s=120, within="node")
    assert (ranks.copies, ranks.shards) == (2, 4), ranks
    single.train_and_save(ranks, out)
    single.train_adapters(ranks, out)
    parallel.shutdown()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run on one rank."""
    out = tmp_path_factory.mktemp("one")
    single.train_and_save(single.SINGLE, out)
    single.train_adapters(single.SINGLE, out)
    return out


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The folder of the same run on two nodes of four ranks, with the weights sharded within a node."""
    out = tmp_path_factory.mktemp("eight")
    statuses, text = finished(start_nodes(__file__, out))
    assert statuses == [0, 0], text[-4000:]
    return out


def test_two_nodes_of_four_ranks_reach_what_one_process_does(one, eight):
    """Losses, norms and products are rounding apart, and weights and adapters what Adam makes of that."""
    for a, b in zip(*(json.loads((out / "logged.json").read_text()) for out in (one, eight)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)
    single.assert_same_checkpoint(one / "three", eight / "three", rtol=1e-4, atol=2e-5)
    ours, theirs = (torch.load(out / "adapters.pt") for out in (one, eight))
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-4, atol=2e-4)


@pytest.mark.fast
@pytest.mark.parametrize("tasks, ranks, message", [
    (16, 32, "--tasks=16: fewer than the 32 ranks, each of which plays whole groups: --tasks 32 --group-size "
     "4, for as many episodes; or start 16 ranks (torchrun --nnodes times --nproc-per-node)"),
    (16, 12, "--tasks=16: not a multiple of the 12 ranks, each of which plays whole groups: --tasks 24; or "
     "start 8 ranks (torchrun --nnodes times --nproc-per-node)")])
def test_tasks_that_cannot_be_shared_are_refused_with_what_to_set(tasks, ranks, message):
    settings = config.parsed([f"--tasks={tasks}", "--group-size=8"])
    with pytest.raises(ValueError) as refused:
        session.check_tasks(settings, ranks)
    assert str(refused.value) == message
    session.check_tasks(settings, 8)
    session.check_tasks(config.parsed([f"--tasks={tasks}", "--iterations=0"]), ranks)


@pytest.mark.fast
@pytest.mark.parametrize("sizes, ranks, message", [
    ([4, 4, 2, 2], [0, 1, 0, 1], "LOCAL_WORLD_SIZE is"), ([2, 2, 2, 2], [0, 0, 1, 1], "RANK does not count")])
def test_machines_that_differ_or_are_not_in_order_are_refused(monkeypatch, sizes, ranks, message):
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: 1)
    answers = iter([sizes, [rank == k % sizes[0] for k, rank in enumerate(ranks)]])
    monkeypatch.setattr(parallel, "all_gather", lambda value: next(answers))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes[1]))
    with pytest.raises(ValueError, match=f"--shard-within=node: {message}"):
        parallel.machines()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
