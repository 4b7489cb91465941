"""The job of several processes: how they connect, what each is, and how all of them end if one is lost.

`setup` first, `shutdown` last; in between, `Watch` looks after the other ranks. A single process has no group
and watches nobody. Left out: what the ranks exchange (infra/parallel.py).

    python -m pytest tests/infra/test_nodes.py       # two machines of up to four ranks; one is killed
"""

import math
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from infra import parallel

CONNECT_S = 110                  # seconds until all ranks are connected
LEFT = b"left"                   # the last count of a rank whose work is done
BEAT_S, LOST_BEATS = 2, 12       # a rank is lost that gives no sign of life for so many beats
PATIENCE_S = 20                  # seconds for the other ranks to end by themselves
ORPHAN_S = 1800                  # and for a run to save and end once torchrun is gone
# Environment variables that connections depend on
VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA",
             "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE")


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the number of processes, the device of its tensors, and how many copies of the
    weights there are: one, sharded over all ranks, or one on each machine, sharded over its ranks.
    """

    rank: int
    world_size: int
    device: torch.device
    copies: int = 1

    @property
    def shards(self):
        """The number of ranks that share a copy of the weights."""
        return self.world_size // self.copies


def setup(device="auto", timeout_s=24 * 3600, within="all"):
    """Join the process group that torchrun started and return this process's Ranks; alone without torchrun.

    device: "auto" is CUDA if available. timeout_s: how long a rank waits for the others; a day by default,
    because rank 0 alone generates the demonstrations and queries large models. within: the ranks that share a
    copy of the weights, "all" or those of a "node". ValueError for a device that is not there, or for
    inconsistent environment variables.
    """
    check_device(device)
    usual = {"RANK": "0", "WORLD_SIZE": "1"}
    numbers = {name: os.environ.get(name) or number for name, number in usual.items()}
    if not all(number.isdecimal() for number in numbers.values()):
        raise ValueError(f"RANK={numbers['RANK']} WORLD_SIZE={numbers['WORLD_SIZE']}: expected numbers")
    rank, world_size = map(int, numbers.values())
    if rank >= world_size:                            # a leftover of a shell: it would write and play nothing
        raise ValueError(f"RANK={rank} WORLD_SIZE={world_size}: expected a rank below the number of ranks")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT", *["LOCAL_RANK"] * on_gpu)
    missing = [name for name in needed if not os.environ.get(name)]
    if world_size > 1 and missing:                                                  # it would wait forever
        raise ValueError(f"WORLD_SIZE={world_size}: set without {', '.join(missing)}; torchrun sets them all")
    own_device = torch.device("cpu")
    if on_gpu:
        local = int(os.environ["LOCAL_RANK"]) if world_size > 1 else 0
        if local >= torch.cuda.device_count():
            raise ValueError(f"--nproc-per-node: no GPU {local}, there are {torch.cuda.device_count()}")
        own_device = torch.device("cuda", local)
        torch.cuda.set_device(own_device)
        torch.set_float32_matmul_precision("highest")        # an image's environment may ask for TF32
    if world_size > 1:
        connect(own_device, timeout_s)
    return Ranks(rank, world_size, own_device, machines() if within == "node" else 1)


def check_device(device):
    """ValueError for "cuda" where there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device")


def connect(device, timeout_s):
    """Join the process group, try each of its backends, and start to watch the other ranks.

    A backend that does not connect may wait for a day: after CONNECT_S this process ends.
    """
    backends = parallel.BACKENDS[device.type]

    def advice(what):
        values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
        return (f"{what} ({backends}); check that all machines reach each other, and the variables {values}; "
                "NCCL_DEBUG=INFO says more")

    def give_up():
        print(advice(f"gcd.py: error: rank {os.environ['RANK']} on {socket.gethostname()}: the "
                     f"{os.environ['WORLD_SIZE']} ranks did not connect within {CONNECT_S} s"),
              file=sys.stderr, flush=True)
        os._exit(1)

    limit = threading.Timer(CONNECT_S, give_up)
    limit.daemon = True
    limit.start()

    def store(seconds):
        return next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))

    try:
        own, rank, world_size = store(CONNECT_S + 10)
        job = agreed_name(own, rank, world_size)
        shared = dist.PrefixStore(job, store(timeout_s)[0])
        dist.init_process_group(backends, store=shared, rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=timeout_s))
        Watch.current = Watch(dist.PrefixStore(job, own), rank, world_size)
        parallel.all_sum(torch.zeros(1, device=device)).item()                  # waits for the device
    except RuntimeError as error:
        error.add_note(advice("the ranks did not connect"))
        raise
    finally:
        limit.cancel()


def agreed_name(store, rank, world_size):
    """Return a name for this start of the job, equal on all ranks, which no earlier start used in the store.

    torchrun's store outlives the ranks that it starts again, and holds the addresses of the former. Each rank
    asks rank 0 with a word of its own, and takes no other answer.
    """
    word, here = secrets.token_hex(8), "{}/here/{}".format
    if rank:
        store.set(f"asks/{rank}", word)
        store.wait([f"answer/{word}"], timedelta(seconds=CONNECT_S + 10))
        job = store.get(f"answer/{word}").decode()
        store.set(here(job, rank), "")
        return job
    while missing := [other for other in range(1, world_size) if not store.check([here(word, other)])]:
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", word)
        time.sleep(0.1)
    return word


class Watch:
    """This rank's sign of life, and its eye on the others: two threads that end the process if one of them
    fails or is lost.

    Each rank counts in the group's store every BEAT_S seconds, and watches the count of the next rank. On
    GPUs a collective may never notice that a peer is gone, and a main thread that is blocked in it runs no
    signal handler. A process that is suspended for less than LOST_BEATS is not lost, nor is a whole job that
    is suspended for longer: what counts is the watcher's own beats. (With --shard-within node the groups of
    ranks have torch's own limit, half an hour.)
    """

    current = None                 # of this process, if it is one of several

    def __init__(self, store, rank, world_size):
        """store: by a connection of its own, because the group's may be waiting for a key."""
        self.store, self.rank, self.world_size = store, rank, world_size
        self.ended, self.unanswered_s, self.parent = threading.Event(), 0, os.getppid()
        self.store.set(f"host/{self.rank}", socket.gethostname())
        self.store.set(f"beat/{self.rank}", "0")
        parallel.all_gather(None)                                               # all of these keys are there
        self.threads = [threading.Thread(target=thread, daemon=True) for thread in (self.beat, self.guard)]
        for thread in self.threads:
            thread.start()

    def name(self, rank):
        """"rank 3 on HOST"."""
        return f"rank {rank} on {self.store.get(f'host/{rank}').decode()}"

    def failure(self):
        """What ended the job, such as "rank 3 on HOST failed"; "" if nothing has."""
        return self.store.get("failed").decode() if self.store.check(["failed"]) else ""

    def fail(self, what):
        """Tell all ranks what ended the job, unless they know."""
        self.store.compare_set("failed", "", what)

    def silent(self):
        """The ranks that have given no sign of life for five beats; it takes that long."""
        def counts():
            return {rank: self.store.get(f"beat/{rank}") for rank in range(self.world_size)}

        before = counts()
        time.sleep(5 * BEAT_S)
        return [rank for rank, count in counts().items() if count == before[rank] != LEFT]

    def beat(self):
        """Thread: count, watch the next rank, and end this process PATIENCE_S after another one failed."""
        beats, seen, still = 0, b"", 0
        following = (self.rank + 1) % self.world_size
        try:
            while not self.ended.wait(BEAT_S):
                beats += 1
                self.store.set(f"beat/{self.rank}", str(beats))
                count = self.store.get(f"beat/{following}")
                seen, still = count, still + 1 if count == seen != LEFT else 0
                if still >= LOST_BEATS:
                    self.fail(f"{self.name(following)} is lost")
                if why := self.failure():
                    return self.end(why)
                self.unanswered_s = 0
            self.store.set(f"beat/{self.rank}", LEFT.decode())
        except RuntimeError:                                       # the connection is closed
            if os.getppid() == self.parent:
                self.end(self.store_lost())
            else:                           # infra/signals.py stops the run, unless it waits for a GPU
                self.end("torchrun is gone", ORPHAN_S)

    def store_lost(self):
        """What ended the job if the store does not answer."""
        return f"{os.environ.get('MASTER_ADDR')}, which holds the job's store, is lost"

    def end(self, why, patience_s=PATIENCE_S):
        """End this process if it does not end by itself within patience_s."""
        self.unanswered_s = -math.inf
        if not self.ended.wait(patience_s):
            self.exit(why)

    def exit(self, why):
        """End this process at once, whatever its main thread is waiting for."""
        print(f"{why}, so this one ends", file=sys.stderr, flush=True)
        os._exit(1)

    def guard(self):
        """Thread: end this process if the store's machine no longer answers, so that `beat` waits for it."""
        while not self.ended.wait(1):
            self.unanswered_s += 1
            if self.unanswered_s > BEAT_S * LOST_BEATS + PATIENCE_S:
                self.exit(self.store_lost())


def machines():
    """Return the number of machines in the group. ValueError unless all have equally many ranks, in order."""
    local, local_rank = (os.environ.get(name, default) for name, default in (
        ("LOCAL_WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        return 1
    world_size, rank = dist.get_world_size(), dist.get_rank()
    sizes = parallel.all_gather(int(local) if local.isdecimal() and int(local) else 0)
    if len({*sizes}) > 1 or not sizes[0] or world_size % sizes[0]:
        raise ValueError(f"--shard-within=node: LOCAL_WORLD_SIZE is {sizes} on the ranks; every machine "
                         "needs equally many (torchrun --nproc-per-node)")
    if not all(parallel.all_gather(str(rank % sizes[0]) == local_rank)):
        raise ValueError("--shard-within=node: RANK does not count through one machine after the other")
    return world_size // sizes[0]


def is_news(text, follows):
    """Whether this rank has to print the line with which it ends: not if it is printed on this machine, nor
    if it only follows from an error and any rank of this machine has printed one.
    """
    if not (watch := Watch.current):
        return True
    mine = f"{watch.rank} {text}"
    try:
        first = watch.store.compare_set(f"printed/{socket.gethostname()}", "", mine).decode()
    except RuntimeError:                                        # the store may have ended with torchrun
        return True
    return first == mine or not follows and first.partition(" ")[2] != text


def shutdown():
    """Leave the process group, if any."""
    if Watch.current:
        Watch.current.ended.set()
        Watch.current.threads[0].join(BEAT_S)          # it tells the others that this rank has left
        Watch.current = None
    parallel.mesh_of.cache_clear()                     # which refers to the group
    if dist.is_initialized():
        time.sleep(0.2)    # a gloo thread that frees its last tensor while Python exits aborts the process
        dist.destroy_process_group()


def abort(status):
    """End this process at once with an exit status, if it is one of several; else return the status.

    The caller has already printed the error. Other ranks may be waiting in a collective that will never
    complete, so leaving the process group would hang. They end when the connection breaks, or by `Watch`.
    """
    if not parallel.is_distributed():
        return status
    if watch := Watch.current:                                  # not yet, if the ranks are just connecting
        with suppress(RuntimeError):                            # the store may have ended with torchrun
            watch.fail(f"{watch.name(watch.rank)} failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_exit(kind, error, trace):
    """Exit callback of a run, for ExitStack.push: `shutdown`, or `abort` after an uncaught error."""
    if error is not None and parallel.is_distributed():
        traceback.print_exception(error)
        abort(1)
    shutdown()


def failure(error=None):
    """What ended the job before this rank's error, such as "rank 3 on HOST failed"; "" if nothing did.

    error: a rank that is lost tells nobody, but breaks the connections of the others; of an error that may
    come of that, it takes seconds to tell.
    """
    while error and type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        error = error.__cause__
    if not (watch := Watch.current):
        return ""
    try:
        if error and not watch.failure() and (lost := watch.silent()):
            why = re.sub(r"^\[\S+:\d+\] ", "", " ".join(str(error).split())).partition(". ")[0]     # gloo's
            watch.fail(f"{watch.name(lost[0])} is lost ({why[:200]})")
        return watch.failure()
    except RuntimeError:                                        # the store may have ended with torchrun
        return watch.store_lost() if error else ""
