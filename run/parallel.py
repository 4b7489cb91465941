"""Being one process of several: ranks, sharded weights, sums, gradients, random streams, checkpoints.

Every `torch.distributed` word of the project is here. One process takes the path of eight, with nothing to
shard and no process group. Left out: tensor, pipeline and context parallelism.

    torchrun --nproc-per-node 8 gcd.py         # `python gcd.py` is one process
    python -m pytest tests/test_parallel.py    # one and two processes give the same numbers
"""

import math
import operator
import os
import shutil
import sys
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

MASK64 = (1 << 64) - 1
TRAINER_FILE = "trainer.pt"
# counts and names travel as CPU objects over gloo, weights and gradients on GPUs over nccl
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
FAILED = "gcd/failed"            # in the processes' common store: the rank that failed first
PATIENCE_S = 20                  # for the others to find that out for themselves
FULL_ON_CPU = states.StateDictOptions(full_state_dict=True, cpu_offload=True)    # on rank 0; empty elsewhere
FROM_FULL = states.StateDictOptions(full_state_dict=True, strict=False)  # each rank has it all, takes a part


@dataclass(frozen=True)
class Ranks:
    """Which process this is, of how many, and where its tensors live."""

    rank: int
    world: int
    device: torch.device


def setup(device="auto", timeout_s=2 * 3600):
    """Join the processes that torchrun started (one, without torchrun) and return this one's Ranks.

    device: "auto" is CUDA where there is any. timeout_s: how long a rank waits for the others; hours, because
    rank 0 alone makes the demonstrations and asks large models.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device={device}: expected auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device=cuda: torch sees no CUDA device")
    numbers = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    if not all(number.isdecimal() for number in numbers.values()):
        raise ValueError(f"RANK={numbers['RANK']} WORLD_SIZE={numbers['WORLD_SIZE']}: expected numbers")
    rank, world = map(int, numbers.values())
    lacking = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world > 1 and lacking:                                                  # it would wait for ever
        raise ValueError(f"WORLD_SIZE={world}: set without {', '.join(lacking)}; torchrun sets them all")
    place = torch.device("cpu")
    if device != "cpu" and torch.cuda.is_available():
        if (local := int(os.environ.get("LOCAL_RANK", 0))) >= torch.cuda.device_count():
            raise ValueError(f"--nproc-per-node: no GPU {local}, there are {torch.cuda.device_count()}")
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    if world > 1:
        dist.init_process_group(BACKENDS[place.type], timeout=timedelta(seconds=timeout_s))
        threading.Thread(target=end_with_others, daemon=True).start()
    return Ranks(rank, world, place)


def shutdown():
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        time.sleep(0.2)    # a gloo thread that frees its last tensor while Python exits aborts the process
        dist.destroy_process_group()


def several():
    """Whether other processes may wait for this one."""
    return dist.is_initialized() and dist.get_world_size() > 1


def fail(status):
    """The exit status, where this process is alone; else end it with that, at once: it has said why.

    Others may wait in a collective for what never comes, and to leave their group would be to wait for them.
    They end by the connection that breaks, or by `end_with_others`.
    """
    if not several():
        return status
    if failed_rank() is None:
        with suppress(RuntimeError):
            store().set(FAILED, str(dist.get_rank()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave(kind, error, trace):
    """The last exit callback of a run: `shutdown`, or `fail` after an error that nobody has caught."""
    if error is not None and several():
        traceback.print_exception(error)
        fail(1)
    shutdown()


def store():
    """What all processes can read and write without waiting for each other."""
    return dist.distributed_c10d._get_default_store()


def failed_rank():
    """The rank that failed before this one, if any did."""
    with suppress(RuntimeError):                                # the store may have gone with torchrun
        if several() and store().check([FAILED]):
            return int(store().get(FAILED))
    return None


def end_with_others():
    """A thread: end this process a while after another one has failed. On GPUs a collective may never learn
    that its peer is gone; the main thread is in it, and hears no signal either."""
    with suppress(RuntimeError, ValueError):                    # the store, or the group, is there no more
        while several():
            if store().check([FAILED]):
                time.sleep(PATIENCE_S)
                print(f"rank {failed_rank()} failed, so this one ends", file=sys.stderr, flush=True)
                os._exit(1)
            time.sleep(1)


def is_main():
    """Whether this is rank 0, the one that prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def print0(*values, file=None):
    """Print on rank 0, at once."""
    if is_main():
        print(*values, file=file, flush=True)


def shard(model, ranks, compute_dtype=torch.float32, frozen=False):
    """Spread fp32 master weights over the ranks: FSDP2, a unit per layer of `model.model.layers`, one root.
    frozen: weights that are not trained, in compute_dtype.

    Every rank gets rank 0's weights; the model passes through its memory whole, once. compute_dtype: that of
    forward and backward. Gradients are summed in fp32, not averaged: divide the loss by a count over all
    ranks. From then on ranks make equal numbers of forwards and backwards (but see `plain_copy`). Make the
    optimizer afterwards. One process is left unwrapped in fp32, to save time; bf16 needs FSDP's fp32 masters.
    """
    model.to(device=ranks.device, dtype=compute_dtype if frozen else torch.float32).requires_grad_(not frozen)
    if ranks.world == 1 and compute_dtype == torch.float32:
        return model
    if not dist.is_initialized():    # one process: FSDP asks for a group, this one needs no network
        dist.init_process_group(BACKENDS[ranks.device.type], store=dist.HashStore(), rank=0, world_size=1)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    # inputs keep their dtype: positions and masks are no bf16
    policy = MixedPrecisionPolicy(compute_dtype, torch.float32, cast_forward_inputs=False)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)    # gloo has no scaled sum
    model.compute_dtype = compute_dtype
    return model


def plain_copy(model, make, dtype):
    """What generates for a model: make(), another of its shape, which `copy_weights` gives its weights, whole
    and in this dtype on every rank, without hooks, at addresses that stay; an unwrapped model does itself."""
    if not isinstance(model, FSDPModule):
        return model
    with torch.device("meta"):
        copy = make()
    copy.to(dtype).to_empty(device=next(model.parameters()).device)
    copy.tie_weights()
    return copy.requires_grad_(False)


@torch.no_grad()
def copy_weights(model, copy):
    """Bring a plain copy to the weights that a model has now, so that ranks may call its forward different
    numbers of times. All ranks call it: one all-gather a parameter."""
    if copy is not model:
        model.reshard()           # after a forward without a backward the root still has its weights whole
        for mine, its in zip(copy.parameters(), model.parameters(), strict=True):
            mine.copy_(its.full_tensor())


def put_away(model, optimizer=None):
    """Move a model that is needed now and then to CPU memory, and its optimizer's state; see `beside`."""
    _move(model, optimizer, torch.device("cpu"))


@contextmanager
def beside(used, model, optimizer=None):
    """Within, a model that is needed now and then is on the device of one in use, and so is its optimizer's
    state; afterwards in CPU memory, and their room is for others. On a CPU nothing moves."""
    _move(model, optimizer, next(used.parameters()).device)
    try:
        yield model
    finally:
        put_away(model, optimizer)


def _move(model, optimizer, device):
    model.to(device)                   # FSDP's moves its shards; a parameter stays the optimizer's key
    for state in optimizer.state.values() if optimizer else ():
        state |= {key: tensor.to(device) for key, tensor in state.items()}


def full_weights(model):
    """The whole fp32 weights by name, on the CPU of rank 0; empty on the others. All ranks call it.

    A sharded model has no deepcopy: load these into a new one on rank 0; `shard` gives each rank its part.
    """
    return states.get_model_state_dict(model, options=FULL_ON_CPU)


def whole(tensor):
    """A parameter or gradient as it is without shards, on every rank."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def laid_out_as(parameter, tensor):
    """A tensor of a parameter's whole shape, equal on all ranks, as that lies: on its device, over the ranks.
    One of another shape, a count say, stays."""
    if tensor.shape != parameter.shape:
        return tensor
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    there = DTensor.from_local(tensor, parameter.device_mesh, [Replicate()], run_check=False)
    return there.redistribute(placements=parameter.placements)


@torch.no_grad()
def put_whole(parameter, tensor):
    """Give a parameter the values of a tensor of its whole shape, which is equal on all ranks."""
    if isinstance(parameter, DTensor):
        parameter.copy_(laid_out_as(parameter, tensor))


def gather(value):
    """Every rank's value (any picklable object), in the order of ranks, on every rank."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_sum(x):
    """The sum over ranks of a number, of a tensor of one shape, or of a dict of numbers; no key counts as 0.

    Numbers are added in rank order: all get equal bits.
    """
    if isinstance(x, torch.Tensor):
        total = x.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total
    values = gather(x)
    if not isinstance(x, dict):
        return sum(values)
    return {key: sum(value.get(key, 0) for value in values) for key in dict.fromkeys(chain(*values))}


def all_max(x):
    """The largest of the ranks' numbers."""
    return max(gather(x))


def any_rank(flag):
    """Whether the flag is true on any rank: what one rank must stop for, all stop for."""
    return any(gather(bool(flag)))


def together(action):
    """action() on every rank; if it fails on any, all raise: none is left waiting for the others."""
    failure = value = None
    try:
        value = action()
    except Exception as error:
        failure = error
    for rank, text in enumerate(gather(failure and f"{type(failure).__name__}: {failure}")):
        if text:
            raise failure or OSError(f"rank {rank} failed: {text}")
    return value


def on_main(action):
    """Call `action()` on rank 0 while the others wait; return its value, or raise its failure, on all."""
    return gather(together(lambda: action() if is_main() else None))[0]


def take_grads(model):
    """Take the gradient off the model: a list of tensors or None, in the order of model.parameters()."""
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def dot(grads_a, grads_b):
    """The inner product of two gradients over all parameters and ranks, summed in fp64; None counts as 0."""
    sharded = any(isinstance(grad, DTensor) for grad in (*grads_a, *grads_b))
    pairs = [(a.to_local(), b.to_local()) if sharded else (a, b)
             for a, b in zip(grads_a, grads_b, strict=True) if a is not None and b is not None]
    products = [(a * b).sum(dtype=torch.float64) for a, b in pairs]
    total = float(torch.stack(products).sum()) if products else 0.0
    return all_sum(total) if sharded else total


def norm(grads):
    """The global L2 norm of a gradient."""
    return math.sqrt(dot(grads, grads))


def put_grads(model, scaled):
    """Make the sum of scale * grads over `scaled` = [(scale, grads), ...] the gradient; None adds nothing.

    The lists are used up: scaled and added in place, then None, so that no further set is held meanwhile.
    """
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = None
        for scale, grads in scaled:
            if grads[index] is not None:
                term = grads[index].mul_(scale)
                parameter.grad = term if parameter.grad is None else parameter.grad.add_(term)
                grads[index] = None


def mix64(x):
    """splitmix64's output function: a bijection of 64-bit integers, each input bit spread over all."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def stream(seed, *path):
    """The 63-bit name of a random stream, e.g. stream(seed, iteration, rank); equal on every machine."""
    state = 0
    for number in (seed, *path):
        state = mix64(state ^ (operator.index(number) & MASK64))
    return state >> 1


def generator(seed, *path, device="cpu"):
    """A torch.Generator for the stream of that name; on the CPU torch uses the name's low 32 bits only."""
    return torch.Generator(device).manual_seed(stream(seed, *path))


def save_checkpoint(folder, model, optimizer, state, save_model, extra_files=None, critic=None):
    """Replace the checkpoint in `folder`, a Hugging Face folder with trainer.pt in it; all ranks call it.

    state: rank 0's plain values and tensors, which `load_trainer` returns. save_model(model, folder,
    state=weights) writes the full weights, extra_files(folder) a tokenizer, say. critic: a second (model,
    optimizer), kept whole in trainer.pt. All is gathered in rank 0's CPU memory, written and synced beside
    the old checkpoint, then takes its name: a failure at any moment leaves the old or the new. OSError, on
    every rank, names the folder.
    """
    folder = Path(folder).resolve()
    on_main(lambda: repair(folder) or refuse_other_folder(folder))
    weights = full_weights(model)
    trainer = {"optimizer": optimizer_state(model, optimizer), "state": state}
    if critic is not None:
        with beside(model, *critic):
            trainer["critic"] = {"weights": full_weights(critic[0]), "optimizer": optimizer_state(*critic)}

    def fill(written):
        save_model(model, written, state=weights)
        save_trainer(trainer, written / TRAINER_FILE)
        if extra_files is not None:
            extra_files(written)

    on_main(lambda: replace(folder, fill))


def replace(folder, fill):
    """Replace a folder by what fill(path) writes into one beside it. OSError names the folder."""
    written, _ = siblings(folder)
    try:
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)
        fill(written)
        sync(*written.rglob("*"), written)
        swap(folder)
    except Exception as error:    # a tokenizer's own error for a full disk is a bare Exception
        if folder.exists():    # else it failed between the renames, and `repair` needs what is written
            shutil.rmtree(written, ignore_errors=True)
        raise OSError(f"checkpoint {folder} not saved: {error}") from error


def save_trainer(trainer, path):
    """torch.save, whose own error at a full disk is no OSError and names no file."""
    try:
        torch.save(trainer, path)
    except (RuntimeError, OSError) as error:
        raise OSError(f"{path}: {' '.join(str(error).split())[:200]} (no space left?)") from None


def optimizer_state(model, optimizer):
    """The whole optimizer state by parameter name, on the CPU of rank 0; empty on the others."""
    stepped = bool(optimizer.state)
    saved = states.get_optimizer_state_dict(model, optimizer, options=FULL_ON_CPU)
    if not stepped:    # torch stepped it on zeros, and would correct its first real step as a second one
        optimizer.state.clear()
        saved.get("state", {}).clear()
    return saved


def read_trainer(folder):
    """What a checkpoint holds beside the model: optimizer, state, critic or None. ValueError if broken."""
    path = Path(folder) / TRAINER_FILE
    if not path.is_file():
        raise ValueError(f"{path}: not found; is {folder} a checkpoint?")
    try:
        trainer = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = {name: trainer[name] for name in ("optimizer", "state")} | {"critic": trainer.get("critic")}
        check_optimizer(found["optimizer"])
        if not isinstance(found["state"], dict):
            raise TypeError(f"its state is {type(found['state']).__name__}")
        if found["critic"] is not None:
            check_optimizer(found["critic"]["optimizer"])
            if not all(isinstance(tensor, torch.Tensor) for tensor in found["critic"]["weights"].values()):
                raise TypeError("the critic's weights are not tensors")
        return found
    except Exception as error:    # torch names a broken file in half a dozen ways
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: not a trainer state: {type(error).__name__}: {reason}") from error


def check_optimizer(saved):
    """An error of any kind unless this is what `optimizer_state` gave."""
    if not all(isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        raise TypeError("a parameter's name is no text")
    for state in saved["state"].values():
        if not all(isinstance(state[key], torch.Tensor) for key in ("step", "exp_avg", "exp_avg_sq")):
            raise TypeError("an optimizer's state is no tensors")


def load_trainer(folder, model, optimizer, critic=None):
    """Restore the optimizer from a checkpoint made at any number of ranks, and return its `state`.

    All ranks call it, with a model loaded from the same folder (see `find_checkpoint`) before `shard`.
    Learning rate and the like become the saved ones, but not how AdamW is computed here. critic: a second
    (model, optimizer), restored whole.
    """
    path, trainer = Path(folder) / TRAINER_FILE, read_trainer(folder)
    load_optimizer(path, model, optimizer, trainer["optimizer"])
    if critic is not None:
        if (saved := trainer["critic"]) is None:
            raise ValueError(f"{path}: no critic: saved by a run without one")
        here, there = ({(name, tensor.shape) for name, tensor in weights.items()}
                       for weights in (critic[0].state_dict(), saved["weights"]))
        if here != there:
            raise ValueError(f"{path}: the critic's {min(here ^ there)[0]} differs: saved from another model")
        with beside(model, *critic):
            states.set_model_state_dict(critic[0], saved["weights"], options=FROM_FULL)
            load_optimizer(path, *critic, saved["optimizer"])
    return trainer["state"]


def load_optimizer(path, model, optimizer, saved):
    """Restore an optimizer; `path` is for messages only."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := names - {name for group in saved["param_groups"] for name in group["params"]}:
        raise ValueError(f"{path}: no optimizer state for {min(missing)}: saved from another model")
    known = saved["state"]                # torch 2.9 wants one of each parameter, gradient or not
    like = next(iter(known.values()), {})
    new = {name: {key: torch.zeros(value.shape and parameter.shape) for key, value in like.items()}
           for name, parameter in model.named_parameters() if like and name not in known}
    groups = [group | {"fused": optimizer.defaults["fused"]} for group in saved["param_groups"]]
    optimizer.state.clear()
    try:
        states.set_optimizer_state_dict(model, optimizer, {"state": known | new, "param_groups": groups},
                                        options=FROM_FULL)
    except Exception as error:                              # torch's, of any kind, for shapes that do not fit
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: no state of this optimizer: {type(error).__name__}: {reason}") from error
    for name, parameter in model.named_parameters():
        if name not in known:             # it starts as it did: without a state
            optimizer.state.pop(parameter, None)


def find_checkpoint(folder):
    """The folder as a Path if it holds a checkpoint (after `repair`), else None. All ranks call it."""
    folder = Path(folder).resolve()
    return folder if on_main(lambda: repair(folder)) else None


def siblings(folder):
    """Where the next checkpoint is written, and where the last one waits while the names change."""
    return folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")


def swap(folder):
    """Give the written checkpoint its name. `repair` finishes what a crash between the two renames leaves."""
    written, old = siblings(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    written.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair(folder):
    """Undo a crash between the renames of `swap`; return whether `folder` holds a checkpoint."""
    written, old = siblings(folder)
    if old.exists() and not folder.exists():
        (written if written.exists() else old).rename(folder)    # the old moves only once the new is whole
    return (folder / TRAINER_FILE).is_file()


def refuse_other_folder(folder):
    """A checkpoint replaces the whole folder: ValueError if one that is no checkpoint would be lost."""
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds something that is not a checkpoint; saving would delete it")


def sync(*paths):
    """Have files, and the names in folders, on the disk and not only in its cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
