"""Programs in processes of their own that are forked from one which has loaded torch and transformers.

A start takes a second of CPU time in place of five, and ranks that torchrun would start three in place of
thirteen. The project's modules are imported afresh in each. Left out: what torchrun does besides (restarts,
watching), which has tests of its own in infra/test_nodes.py and infra/test_failing.py.
"""

import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from waiting import free_port

LIBRARIES = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp",
             "safetensors.torch", "transformers.models.auto.tokenization_auto", "pytest", "psutil")


def program(arguments, environment, output):
    """Run a Python file as __main__, with these arguments and environment, and its output in a file."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = arguments
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [str(Path(arguments[0]).parent), *paths]
    runpy.run_path(arguments[0], run_name="__main__")


def context():
    """multiprocessing's context in which processes are forked from one that has loaded LIBRARIES."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload([*LIBRARIES])
    return found


def start(arguments, environment, folder, ranks, nodes=1):
    """Start a Python file on some ranks, as torchrun does; returns their processes and output files.

    folder: of the files. nodes: how many machines the ranks believe to be on, equally many on each.
    """
    port, outputs = str(free_port()), [folder / f"rank{rank}.txt" for rank in range(ranks)]
    forks = context()
    processes = [forks.Process(target=program, args=(
        [*map(str, arguments)], {**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks),
                                 "LOCAL_RANK": str(rank % (ranks // nodes)),
                                 "LOCAL_WORLD_SIZE": str(ranks // nodes),
                                 "MASTER_ADDR": "localhost", "MASTER_PORT": port}, output))
        for rank, output in enumerate(outputs)]
    for process in processes:
        process.start()
    return processes, outputs


def join(processes, outputs, timeout=300):
    """Wait for processes that `start` returned. Returns a namespace: returncode, the first that is not 0, and
    text, all they printed. After `timeout` seconds they are killed; returncode is then that of the signal.
    """
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(1, end - time.monotonic()))
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes if process.exitcode]
    return SimpleNamespace(returncode=codes[0] if codes else 0,
                           text="".join(output.read_text() for output in outputs if output.exists()))


def run(arguments, environment, folder, ranks, nodes=1, timeout=300):
    """`start`, then `join`."""
    return join(*start(arguments, environment, folder, ranks, nodes), timeout)
