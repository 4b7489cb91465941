"""Data parallelism: ranks, sharded weights (FSDP2), collectives, gradients.

All of the project's torch.distributed code is here and in infra/checkpoint.py. A single process runs the same
code without a process group. Left out: tensor, pipeline and context parallelism.

    torchrun --nproc-per-node 8 gcd.py               # `python gcd.py` is one process
    python -m pytest tests/infra/test_parallel.py    # one and two processes give the same numbers
"""

import math
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

# Python objects are exchanged on CPUs over gloo, weights and gradients on GPUs over nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
CONNECT_S = 110                  # seconds until all ranks are connected
BEAT_S, LOST_BEATS = 2, 12       # a rank is lost that gives no sign of life for so many beats
PATIENCE_S = 20                  # seconds for the other ranks to end by themselves
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


def setup(device="auto", timeout_s=2 * 3600, within="all"):
    """Join the process group that torchrun started and return this process's Ranks; alone without torchrun.

    device: "auto" is CUDA if available. timeout_s: how long a rank waits for the others; hours by default,
    because rank 0 alone generates the demonstrations and queries large models. within: the ranks that share a
    copy of the weights, "all" or those of a "node". ValueError for a device that is not there, or for
    inconsistent environment variables.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device={device}: expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device")
    numbers = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    if not all(number.isdecimal() for number in numbers.values()):
        raise ValueError(f"RANK={numbers['RANK']} WORLD_SIZE={numbers['WORLD_SIZE']}: expected numbers")
    rank, world_size = map(int, numbers.values())
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:                                                  # it would wait forever
        raise ValueError(f"WORLD_SIZE={world_size}: set without {', '.join(missing)}; torchrun sets them all")
    own_device = torch.device("cpu")
    if device != "cpu" and torch.cuda.is_available():
        if (local := int(os.environ.get("LOCAL_RANK", 0))) >= torch.cuda.device_count():
            raise ValueError(f"--nproc-per-node: no GPU {local}, there are {torch.cuda.device_count()}")
        own_device = torch.device("cuda", local)
        torch.cuda.set_device(own_device)
    if world_size > 1:
        connect(own_device, timeout_s)
    return Ranks(rank, world_size, own_device, machines() if within == "node" else 1)


def connect(device, timeout_s):
    """Join the process group, try each of its backends, and start to watch the other ranks.

    A backend that does not connect may wait for hours: after CONNECT_S this process ends.
    """
    def advice(what):
        values = ", ".join(f"{name}={os.environ.get(name, '')}" for name in VARIABLES)
        return (f"{what} ({BACKENDS[device.type]}); check that all machines reach each other, and the "
                f"variables {values}; NCCL_DEBUG=INFO says more")

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
        dist.init_process_group(BACKENDS[device.type], store=shared, rank=rank, world_size=world_size,
                                timeout=timedelta(seconds=timeout_s))
        Watch.current = Watch(dist.PrefixStore(job, own), rank, world_size)
        all_sum(torch.zeros(1, device=device)).item()                  # waits for the device
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
    is suspended for longer: what counts is the watcher's own beats.
    """

    current = None                 # of this process, if it is one of several

    def __init__(self, store, rank, world_size):
        """store: by a connection of its own, because the group's may be waiting for a key."""
        self.store, self.rank, self.world_size = store, rank, world_size
        self.ended, self.unanswered_s, self.parent = threading.Event(), 0, os.getppid()
        self.store.set(f"host/{self.rank}", socket.gethostname())
        self.store.set(f"beat/{self.rank}", "0")
        all_gather(None)                                                        # all of these keys are there
        for thread in (self.beat, self.guard):
            threading.Thread(target=thread, daemon=True).start()

    def name(self, rank):
        """"rank 3 on HOST"."""
        return f"rank {rank} on {self.store.get(f'host/{rank}').decode()}"

    def failure(self):
        """What ended the job, such as "rank 3 on HOST failed"; "" if nothing has."""
        return self.store.get("failed").decode() if self.store.check(["failed"]) else ""

    def fail(self, what):
        """Tell all ranks what ended the job, unless they know."""
        self.store.compare_set("failed", "", what)

    def silent(self, beats=5):
        """The ranks that have given no sign of life for so many beats; it takes that long."""
        def counts():
            return {rank: self.store.get(f"beat/{rank}") for rank in range(self.world_size)}

        before = counts()
        time.sleep(beats * BEAT_S)
        return [rank for rank, count in counts().items() if count == before[rank]]

    def beat(self):
        """Thread: count, watch the next rank, and end this process PATIENCE_S after another one failed."""
        beats, seen, still = 0, b"", 0
        following = (self.rank + 1) % self.world_size
        try:
            while not self.ended.wait(BEAT_S):
                beats += 1
                self.store.set(f"beat/{self.rank}", str(beats))
                count = self.store.get(f"beat/{following}")
                seen, still = count, still + 1 if count == seen else 0
                if still >= LOST_BEATS:
                    self.fail(f"{self.name(following)} is lost")
                if why := self.failure():
                    return self.end(why)
                self.unanswered_s = 0
        except RuntimeError:                                       # the connection is closed
            self.unanswered_s = -math.inf
            if os.getppid() == self.parent:                # else torchrun is gone: see infra/signals.py
                self.end(self.store_lost())

    def store_lost(self):
        """What ended the job if the store does not answer."""
        return f"{os.environ.get('MASTER_ADDR')}, which holds the job's store, is lost"

    def end(self, why):
        """End this process if it does not end by itself within PATIENCE_S."""
        self.unanswered_s = -math.inf
        if not self.ended.wait(PATIENCE_S):
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
    sizes = all_gather(int(local) if local.isdecimal() and int(local) else 0)
    if len({*sizes}) > 1 or not sizes[0] or world_size % sizes[0]:
        raise ValueError(f"--shard-within=node: LOCAL_WORLD_SIZE is {sizes} on the ranks; every machine "
                         "needs equally many (torchrun --nproc-per-node)")
    if not all(all_gather(str(rank % sizes[0]) == local_rank)):
        raise ValueError("--shard-within=node: RANK does not count through one machine after the other")
    return world_size // sizes[0]


def shutdown():
    """Leave the process group, if any."""
    if Watch.current:
        Watch.current.ended.set()
        Watch.current = None
    if dist.is_initialized():
        time.sleep(0.2)    # a gloo thread that frees its last tensor while Python exits aborts the process
        dist.destroy_process_group()


def is_distributed():
    """Whether this process belongs to a group of more than one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def abort(status):
    """End this process at once with an exit status, if it is one of several; else return the status.

    The caller has already printed the error. Other ranks may be waiting in a collective that will never
    complete, so leaving the process group would hang. They end when the connection breaks, or by `Watch`.
    """
    if not is_distributed():
        return status
    with suppress(RuntimeError):                                # the store may have ended with torchrun
        watch = Watch.current
        watch.fail(f"{watch.name(watch.rank)} failed")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_exit(kind, error, trace):
    """Exit callback of a run, for ExitStack.push: `shutdown`, or `abort` after an uncaught error."""
    if error is not None and is_distributed():
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
            watch.fail(f"{watch.name(lost[0])} is lost ({' '.join(str(error).split())[:200]})")
        return watch.failure()
    except RuntimeError:                                        # the store may have ended with torchrun
        return watch.store_lost() if error else ""


def is_rank0():
    """Whether this is rank 0, the rank that prints and writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def print0(*values, file=None):
    """Print on rank 0, unbuffered."""
    if is_rank0():
        print(*values, file=file, flush=True)


def shard(model, ranks, compute_dtype=torch.float32, frozen=False):
    """Shard a model's fp32 master weights over the ranks that share them by FSDP2: one unit per layer, and
    the root.

    A model on the meta device gets memory for this rank's part alone, undefined until `copy_part` fills it.
    Of a model with weights every rank gets rank 0's, and holds all of them while it is sharded.
    compute_dtype: dtype of forward and backward. frozen: the weights are not trained, and are stored in
    compute_dtype; otherwise those that require a gradient are trained.

    Gradients are summed in fp32, not averaged: divide the loss by a count over all ranks. Afterwards, ranks
    must call forward and backward equally often (but see `unsharded_copy`). Create the optimizer afterwards.
    A single process in fp32 is not wrapped, to save time; bf16 needs FSDP for its fp32 master weights.
    """
    empty = next(model.parameters()).is_meta
    model.to(device=None if empty else ranks.device, dtype=compute_dtype if frozen else torch.float32)
    if frozen:
        model.requires_grad_(False)
    if ranks.world_size == 1 and compute_dtype == torch.float32:
        return with_memory(model, ranks.device) if empty else model
    if not dist.is_initialized():    # one process: FSDP needs a group; this one uses no network
        dist.init_process_group(BACKENDS[ranks.device.type], store=dist.HashStore(), rank=0, world_size=1)
    for tensor in () if empty else (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    # of two dimensions the first replicates, the last shards (hybrid sharding, arXiv:2304.11277 3.2.2)
    sizes = {"copies": ranks.copies, "shards": ranks.shards} if ranks.copies > 1 else {"shards": ranks.shards}
    mesh = init_device_mesh(ranks.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
    # inputs keep their dtype: positions and masks must not become bf16
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)    # gloo has no scaled sum
    model.compute_dtype = compute_dtype
    return with_memory(model, ranks.device) if empty else model


def with_memory(model, device):
    """Move a model from the meta device to another, with undefined weights; tied ones stay tied."""
    model.to_empty(device=device).tie_weights()
    return model


def unsharded_copy(model, make, dtype, always=False):
    """Return an unsharded copy of a sharded model, for generation; an unsharded model is returned itself,
    unless `always`.

    The copy is make(), a model of the same shape, in `dtype` on every rank, without FSDP's hooks and at fixed
    addresses. Its weights are undefined until `copy_weights`.
    """
    if not (always or isinstance(model, FSDPModule)):
        return model
    with torch.device("meta"):
        copy = make()
    return with_memory(copy.to(dtype), next(model.parameters()).device).requires_grad_(False)


@torch.no_grad()
def copy_weights(model, copy, merged=dict.items):
    """Copy a model's current weights into its `unsharded_copy`. All ranks call it.

    merged: yields (name, tensor) of the copy's parameters from the model's {name: parameter}, such as
    lora.merged. Ranks may then call the copy's forward different numbers of times. Costs one all-gather per
    parameter.
    """
    if copy is not model:
        if isinstance(model, FSDPModule):
            model.reshard()       # after a forward without a backward the root's weights are still gathered
        sources = merged(dict(model.named_parameters()))
        for target, (_, source) in zip(copy.parameters(), sources, strict=True):
            target.copy_(full_tensor(source))


def offload(model, optimizer=None):
    """Move a model and its optimizer's state to CPU memory, to free its device; see `onloaded`."""
    _move(model, optimizer, torch.device("cpu"))


@contextmanager
def onloaded(used, model, optimizer=None):
    """Move an offloaded model and its optimizer's state to the device of `used` for this block.

    used: a model that is in use. Afterwards the first model is offloaded again. On a CPU nothing moves.
    """
    _move(model, optimizer, next(used.parameters()).device)
    try:
        yield model
    finally:
        offload(model, optimizer)


def _move(model, optimizer, device):
    model.to(device)                   # FSDP moves its shards in place; the optimizer's parameters stay valid
    for state in optimizer.state.values() if optimizer else ():
        state |= {key: tensor.to(device) for key, tensor in state.items()}


def full_weights(model, part=""):
    """Return the full weights whose names contain `part`, {name: tensor}, on rank 0's CPU; an empty dict on
    other ranks. All ranks call it.
    """
    found = {}
    for name, weight in model.state_dict().items():
        if part in name:
            full = full_tensor(weight)
            if is_rank0():
                found[name] = full.detach().to("cpu", copy=True)
    return found


def full_tensor(tensor):
    """Return the full tensor of a sharded parameter or gradient, on every rank; an unsharded one itself."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor):
    """Return this rank's part of a sharded tensor, in the same memory, and the slice of the full tensor's
    rows that it is; of an unsharded one, all.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), slice(None)
    part, mesh = tensor.to_local().detach(), tensor.device_mesh
    longest = -(-len(tensor) // mesh.shape[-1])                      # FSDP cuts as torch.chunk does
    start = min(longest * mesh.get_coordinate()[-1], len(tensor))
    return part, slice(start, start + len(part))


def copy_part(target, source):
    """Copy into a parameter, sharded or not, this rank's part of `source`.

    source: a full tensor, anything of its shape that can be sliced by rows (a file's tensor is read only
    there), or a tensor sharded in the same way.
    """
    part, rows = own_rows(target)
    if part.numel():
        part.copy_(source.to_local() if isinstance(source, DTensor) else source[rows])


def writers(model):
    """Return (this rank's number, their number) of the ranks that share the writing of a model's weights: all
    that of a sharded one; an unsharded one is written by whoever has it.
    """
    shared = is_distributed() and isinstance(model, FSDPModule)
    return (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)


def shard_like(parameter, tensor):
    """Return a full tensor, equal on all ranks, on the device and with the sharding of a parameter.

    A tensor whose shape is not the parameter's, such as a step count, is returned unchanged.
    """
    if tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(placements=parameter.placements)


@torch.no_grad()
def copy_full_tensor(parameter, tensor):
    """Copy a full tensor, equal on all ranks, into a sharded parameter.

    Does nothing to an unsharded parameter, because its `full_tensor` shares its memory.
    """
    if isinstance(parameter, DTensor):
        parameter.copy_(shard_like(parameter, tensor))


def all_gather(value):
    """Return the list of all ranks' values (any picklable objects), in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_sum(x):
    """Sum over ranks a number, a tensor (of equal shape), or a dict of numbers (a missing key counts as 0).

    Numbers are added in rank order, so the result is the same on all ranks, bit for bit.
    """
    if isinstance(x, torch.Tensor):
        total = x.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total
    values = all_gather(x)
    if not isinstance(x, dict):
        return sum(values)
    return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(chain(*values))}


def all_max(x):
    """Return the largest of the ranks' numbers."""
    return max(all_gather(x))


def any_rank(flag):
    """Whether the flag is true on any rank."""
    return any(all_gather(bool(flag)))


def collective(action):
    """Call `action()` on every rank and return its value; if it fails on any rank, raise on all of them."""
    failure = value = None
    try:
        value = action()
    except Exception as error:
        failure = error
    for rank, text in enumerate(all_gather(failure and f"{type(failure).__name__}: {failure}")):
        if text:
            raise failure or OSError(f"rank {rank} failed: {text}")
    return value


def on_rank0(action):
    """Call `action()` on rank 0 while the others wait; return its value, or raise its error, on all ranks."""
    return all_gather(collective(lambda: action() if is_rank0() else None))[0]


def pop_grads(model):
    """Remove the gradient from a model and return it: a list, one tensor or None per parameter, in order."""
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def dot(grads_a, grads_b):
    """Return the inner product of two gradients over all parameters and ranks, in fp64; None counts as 0."""
    sharded = next((grad for grad in (*grads_a, *grads_b) if isinstance(grad, DTensor)), None)
    pairs = [(a, b) if sharded is None else (a.to_local(), b.to_local())
             for a, b in zip(grads_a, grads_b, strict=True) if a is not None and b is not None]
    products = [(a * b).sum(dtype=torch.float64) for a, b in pairs]
    total = float(torch.stack(products).sum()) if products else 0.0
    if sharded is None:
        return total
    return sum(all_gather(total)[:sharded.device_mesh.shape[-1]])        # of the first copy: all are equal


def norm(grads):
    """Return the global L2 norm of a gradient."""
    return math.sqrt(dot(grads, grads))


def set_grads(model, terms):
    """Set a model's gradient to the sum of scale * grads over `terms`, a list of (scale, grads).

    The gradients are scaled and added in place, and the lists are overwritten with None, so that no further
    set of gradients is allocated.
    """
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = None
        for scale, grads in terms:
            if grads[index] is not None:
                term = grads[index].mul_(scale)
                parameter.grad = term if parameter.grad is None else parameter.grad.add_(term)
                grads[index] = None


