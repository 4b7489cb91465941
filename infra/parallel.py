"""Data parallelism: ranks, sharded weights (FSDP2), collectives, gradients.

All of the project's torch.distributed code is here and in infra/checkpoint.py. A single process runs the same
code without a process group. Left out: tensor, pipeline and context parallelism.

    torchrun --nproc-per-node 8 gcd.py               # `python gcd.py` is one process
    python -m pytest tests/infra/test_parallel.py    # one and two processes give the same numbers
"""

import math
import os
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
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

# Python objects are exchanged on CPUs over gloo, weights and gradients on GPUs over nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
FAILED = "gcd/failed"            # key in the group's store: the rank that failed first
PATIENCE_S = 20                  # seconds for the other ranks to end by themselves
FULL_ON_CPU = states.StateDictOptions(full_state_dict=True, cpu_offload=True)    # on rank 0; empty elsewhere
FROM_FULL = states.StateDictOptions(full_state_dict=True, strict=False)   # each rank takes its part


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
        dist.init_process_group(BACKENDS[own_device.type], timeout=timedelta(seconds=timeout_s))
        threading.Thread(target=failure_watchdog, daemon=True).start()
    return Ranks(rank, world_size, own_device, machines() if within == "node" else 1)


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
    if dist.is_initialized():
        time.sleep(0.2)    # a gloo thread that frees its last tensor while Python exits aborts the process
        dist.destroy_process_group()


def is_distributed():
    """Whether this process belongs to a group of more than one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def abort(status):
    """End this process at once with an exit status, if it is one of several; else return the status.

    The caller has already printed the error. Other ranks may be waiting in a collective that will never
    complete, so leaving the process group would hang. They end when the connection breaks, or by
    `failure_watchdog`.
    """
    if not is_distributed():
        return status
    if failed_rank() is None:
        with suppress(RuntimeError):
            store().set(FAILED, str(dist.get_rank()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def on_exit(kind, error, trace):
    """Exit callback of a run, for ExitStack.push: `shutdown`, or `abort` after an uncaught error."""
    if error is not None and is_distributed():
        traceback.print_exception(error)
        abort(1)
    shutdown()


def store():
    """Return the process group's key-value store, which ranks read and write without waiting for others."""
    return dist.distributed_c10d._get_default_store()


def failed_rank():
    """Return the rank that failed first, or None."""
    with suppress(RuntimeError):                                # the store may have ended with torchrun
        if is_distributed() and store().check([FAILED]):
            return int(store().get(FAILED))
    return None


def failure_watchdog():
    """Thread that ends this process PATIENCE_S after another rank has failed.

    On GPUs a collective may never notice that a peer is gone, and a main thread that is blocked in it runs no
    signal handler.
    """
    with suppress(RuntimeError, ValueError):                    # the store or the group has ended
        while is_distributed():
            if store().check([FAILED]):
                time.sleep(PATIENCE_S)
                print(f"rank {failed_rank()} failed, so this one ends", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(1)


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

    Every rank gets rank 0's weights, and holds the full model once while it is sharded. compute_dtype: dtype
    of forward and backward. frozen: the weights are not trained, and are stored in compute_dtype; otherwise
    those that require a gradient are trained.

    Gradients are summed in fp32, not averaged: divide the loss by a count over all ranks. Afterwards, ranks
    must call forward and backward equally often (but see `unsharded_copy`). Create the optimizer afterwards.
    A single process in fp32 is not wrapped, to save time; bf16 needs FSDP for its fp32 master weights.
    """
    model.to(device=ranks.device, dtype=compute_dtype if frozen else torch.float32)
    if frozen:
        model.requires_grad_(False)
    if ranks.world_size == 1 and compute_dtype == torch.float32:
        return model
    if not dist.is_initialized():    # one process: FSDP needs a group; this one uses no network
        dist.init_process_group(BACKENDS[ranks.device.type], store=dist.HashStore(), rank=0, world_size=1)
    for tensor in (*model.parameters(), *model.buffers()):
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
    copy.to(dtype).to_empty(device=next(model.parameters()).device)
    copy.tie_weights()
    return copy.requires_grad_(False)


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


def full_weights(model):
    """Return the full fp32 weights by name, on rank 0's CPU; an empty dict on other ranks. All ranks call it.

    To copy a sharded model, which has no deepcopy: load these into a new model on rank 0, then `shard` it.
    """
    return states.get_model_state_dict(model, options=FULL_ON_CPU)


def full_tensor(tensor):
    """Return the full tensor of a sharded parameter or gradient, on every rank; an unsharded one itself."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


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


