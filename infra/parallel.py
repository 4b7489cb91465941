"""Data parallelism: sharded weights (FSDP2), collectives, gradients.

All of the project's torch.distributed code is here, in infra/job.py and in infra/checkpoint.py. A single
process runs the same code without a process group. Left out: tensor, pipeline and context parallelism.

    torchrun --nproc-per-node 8 gcd.py               # `python gcd.py` is one process
    python -m pytest tests/infra/test_parallel.py    # one and two processes give the same numbers
"""

import math
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

# Python objects are exchanged on CPUs over gloo, weights and gradients on GPUs over nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def is_distributed():
    """Whether this process belongs to a group of more than one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_rank0():
    """Whether this is rank 0, the rank that prints and writes files."""
    return rank_and_size()[0] == 0


def rank_and_size():
    """(this rank's number, the number of ranks)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


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
    mesh = mesh_of(dist.group.WORLD, ranks.device.type, tuple(sizes.items()))
    # inputs keep their dtype: positions and masks must not become bf16
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if ranks.world_size > 1:                          # one rank would divide a copy of its gradients by 1
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)    # gloo has no scaled sum
    model.compute_dtype = compute_dtype
    return with_memory(model, ranks.device) if empty else model


@lru_cache(1)
def mesh_of(group, device_type, sizes):
    """The mesh of a group's ranks with these (name, size) dimensions: one for all models, since each of two
    dimensions makes process groups, whose buffers stay on a GPU.
    """
    names, lengths = zip(*sizes)
    return init_device_mesh(device_type, lengths, mesh_dim_names=names)


def with_memory(model, device):
    """Move a model from the meta device to another, with undefined weights; tied ones stay tied."""
    model.to_empty(device=device).tie_weights()
    return model


def unsharded_copy(model, make, dtype):
    """Return an unsharded copy of a sharded model, for generation; an unsharded model is returned itself.

    The copy is make(), a model of the same parameters, in `dtype` on every rank, without FSDP's hooks and at
    fixed addresses. Its weights are undefined until `copy_weights`.
    """
    if not isinstance(model, FSDPModule):
        return model
    with torch.device("meta"):
        copy = make()
    return with_memory(copy.to(dtype), next(model.parameters()).device).requires_grad_(False)


def reshard(model):
    """Shard a model's own parameters again after a forward without a backward, which leaves them gathered in
    the compute dtype: what reads weights by name would read these, and the optimizer's would have no name.
    """
    if isinstance(model, FSDPModule):
        model.reshard()


@torch.no_grad()
def copy_weights(model, copy):
    """Copy a model's current weights into its `unsharded_copy`. All ranks call it.

    Adapters are copied as they are: merged in bf16, most of a small update would be rounded away. Ranks may
    then call the copy's forward different numbers of times. Costs one all-gather per parameter.
    """
    if copy is not model:
        reshard(model)
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            target.copy_(full_tensor(source))


def offload(model, optimizer=None):
    """Move a model and its optimizer's state to CPU memory, to free its device; see `onloaded`."""
    _move(model, optimizer, torch.device("cpu"))


@contextmanager
def onloaded(used, model, optimizer=None):
    """Move an offloaded model and its optimizer's state to the device of `used` for this block.

    used: a model that is in use. Afterwards the first model is offloaded again, but not after an error, which
    ends the run: FSDP cannot move what a broken forward left gathered. On a CPU nothing moves.
    """
    _move(model, optimizer, next(used.parameters()).device)
    yield model
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


def is_sharded(tensor):
    """Whether a tensor is distributed over ranks, as a sharded model's parameters are."""
    return isinstance(tensor, DTensor)


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
    if isinstance(source, DTensor):
        source, rows = source.to_local(), slice(None)
    if part.numel():
        part.copy_(source[rows] if part.dim() else source)


def writers(model):
    """Return (this rank's number, their number) of the ranks that share the writing of a model's weights: all
    that of a sharded one; an unsharded one is written by whoever has it.
    """
    return rank_and_size() if isinstance(model, FSDPModule) else (0, 1)


def all_gather(value):
    """Return the list of all ranks' values (any picklable objects), in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank0(value):
    """Return rank 0's value, any picklable object, on every rank; the others' is not read."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values, src=0)
    return values[0]


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
    """Call `action()` on every rank and return its value; if it fails on any rank, raise on all of them, so
    that callers go the same way: ValueError if the first failure is one, else OSError or a rank's own error.
    """
    failure = value = None
    try:
        value = action()
    except Exception as error:
        failure = error
    kind = ValueError if isinstance(failure, ValueError) else OSError
    for rank, found in enumerate(all_gather(failure and (kind, f"{type(failure).__name__}: {failure}"))):
        if found:
            raise failure if failure and kind is found[0] else of_rank(rank, *found)
    return value


def of_rank(rank, kind, text):
    """The error of another rank, as this one raises it."""
    error = kind(f"rank {rank} failed: {text}")
    error.rank = rank
    return error


def on_rank0(action):
    """Call `action()` on rank 0 while the others wait; return its value, or raise its error, on all ranks."""
    return from_rank0(collective(lambda: action() if is_rank0() else None))


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


