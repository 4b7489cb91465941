"""Checkpoints of a run: replaced atomically, and loaded at any number of ranks.

A checkpoint is a Hugging Face folder with an additional file, trainer.pt: the optimizer's state, the run's
state and, for PPO, the critic. Several ranks each write a part of all that: a file of weights and, by
torch.distributed.checkpoint, one in the folder `trainer`. trainer.pt then holds the shapes of the tensors
that are there; the checkpoint before is kept, as `checkpoint.old`. It always holds a fingerprint of each
other file.
Left out: the other files of a run (infra/files.py).
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from infra import parallel

TRAINER_FILE, PARTS = "trainer.pt", "trainer"
BLOCKS, BLOCK = 256, 2**16         # of a file, which its fingerprint is made of


def save_checkpoint(folder, model, optimizer, state, save_model, extra_files=None, critic=None):
    """Replace the checkpoint in `folder`. All ranks call it.

    state: rank 0's plain values and tensors, which `load_trainer` returns; it may hold sharded tensors, in
    dicts. save_model(model, folder) writes the weights, called on all ranks; extra_files(folder) writes other
    files, such as the tokenizer's. critic: a second (model, optimizer), stored in trainer.pt.

    Everything is written and synced under a temporary name, then renamed: a failure at any moment leaves the
    old checkpoint or the new one. OSError, on every rank, names the folder.
    """
    folder, parts = Path(folder).resolve(), {}
    parallel.on_rank0(lambda: repair(folder) or check_replaceable(folder))
    trainer = {"optimizer": optimizer_state(model, optimizer), "state": state}
    if critic is not None:
        trainer["critic"] = {"weights": tensors_of(critic[0]),
                             "optimizer": optimizer_state(*critic)}
    trainer, shared = without_parts(trainer, parts), parallel.writers(model)[1] > 1

    def finish(new):
        if extra_files is not None:
            extra_files(new)
        files = {name: fingerprint(new / name) for name in files_saved(new)}
        save_trainer(trainer | {"files": files}, new / TRAINER_FILE)

    def write(new):
        save_model(model, new)
        if parts:
            with one_error(new / PARTS):
                dcp.save(parts, checkpoint_id=new / PARTS)
        parallel.on_rank0(lambda: finish(new))

    replace(folder, write, keep=shared)


def tensors_of(model):
    """{name: tensor} of a model's parameters, each once, and of the buffers that are part of its state."""
    stored = model.state_dict().keys()
    return dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in stored}


@contextmanager
def one_error(path):
    """A block of torch.distributed.checkpoint, whose errors are no Exceptions and have a traceback for each
    rank; raises an OSError that names the first rank's.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        raise OSError(f"{path}: rank {rank}: {type(first).__name__}: {first}") from error


def without_parts(tree, parts, path=""):
    """Copy nested dicts, with their tensors on the CPU and, of a tensor that several ranks share, the shape.

    Such a tensor moves to `parts`, {path: tensor}; on the meta device, which stores no values, its shape
    takes its place.
    """
    if isinstance(tree, dict):
        return {key: without_parts(value, parts, f"{path}/{key}" if path else str(key))
                for key, value in tree.items()}
    if isinstance(tree, DTensor) and parallel.is_distributed():
        parts[path] = tree.detach()
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, torch.Tensor):
        return parallel.own_rows(tree)[0].cpu()                    # all of it: one process has all rows
    return tree


def files_saved(folder):
    """The names of all files in a checkpoint: weights, the parts that ranks have written, and others.

    ValueError for weights or a part that is not there: its rank wrote it into a folder of another machine.
    """
    metadata = dcp.FileSystemReader(folder / PARTS).read_metadata() if (folder / PARTS).is_dir() else None
    index = folder / "model.safetensors.index.json"
    weights = json.loads(index.read_text())["weight_map"].values() if index.exists() else [
        "model.safetensors"]
    stored = {f"{PARTS}/.metadata", *(f"{PARTS}/{place.relative_path}" for place in
                                      metadata.storage_data.values())} if metadata else set()
    names = sorted({*weights, *stored})
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder / missing[0]}: not there on rank 0; all machines must share this folder")
    return sorted({*names, *(path.name for path in folder.iterdir() if path.is_file())})


def fingerprint(path):
    """16 hex digits of a SHA-256 over a file's size and blocks spread over it: all of it below 16 MB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for k in range(BLOCKS):
            file.seek(k * max(size // BLOCKS, BLOCK))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()[:16]


def check_whole(folder):
    """Check on rank 0 that a checkpoint holds its files as they were saved.

    Where one is missing or is another's, the checkpoint before takes the place of this one, which becomes
    `checkpoint.broken`; ValueError, on all ranks, if there is none.
    """
    def check():
        if not (wrong := what_is_wrong(folder)):
            return
        new, old = siblings(folder)
        if also := what_is_wrong(old):
            raise ValueError(wrong + f"; of the checkpoint before, {also}" * old.exists())
        broken = folder.with_name(folder.name + ".broken")
        print(f"{wrong}; so the checkpoint before is used, and this one is now {broken}", file=sys.stderr)
        shutil.rmtree(new, ignore_errors=True)                  # `repair` would take it for a complete one
        shutil.rmtree(broken, ignore_errors=True)
        folder.rename(broken)
        old.rename(folder)
        sync(folder.parent)

    parallel.on_rank0(check)


def what_is_wrong(folder):
    """Name trainer.pt if it is broken, or a file that is missing or not as saved; "" if all is well."""
    try:
        files = read_trainer(folder)["files"]
    except ValueError as error:
        return str(error)
    for name, expected in files.items():
        if not (path := folder / name).is_file():
            return f"{path}: missing"
        if fingerprint(path) != expected:
            return f"{path}: not the file that this checkpoint was saved with"
    return ""


def replace(folder, write, keep=False):
    """Replace a folder atomically by a new one that write(path) fills. OSError names the folder.

    All ranks call it, and `write`, which fails on all or on none. keep: the old folder remains, as
    FOLDER.old.
    """
    new, old = siblings(folder)

    def empty():
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)

    def finish():
        sync(*new.rglob("*"), new)
        swap(folder, keep)

    try:
        parallel.on_rank0(empty)
        write(new)
        parallel.on_rank0(finish)
    except Exception as error:    # for a full disk a tokenizer raises a bare Exception
        if parallel.is_rank0() and (folder.exists() or not old.exists()):
            shutil.rmtree(new, ignore_errors=True)    # else it failed between the renames: `repair` needs it
        raise OSError(f"checkpoint {folder} not saved: {error}") from error


def save_trainer(trainer, path):
    """torch.save, with an OSError that names the file if it fails, for example on a full disk."""
    try:
        torch.save(trainer, path)
    except (RuntimeError, OSError) as error:
        raise OSError(f"{path}: {' '.join(str(error).split())[:200]} (no space left?)") from None


def optimizer_state(model, optimizer):
    """Return an optimizer's state by parameter name, with tensors sharded as they are."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [group | {"params": [name_of[id(parameter)] for parameter in group["params"]]}
              for group in optimizer.param_groups]
    return {"state": {name_of[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()},
            "param_groups": groups}


def read_trainer(folder):
    """Return the content of trainer.pt: {"optimizer", "state", "critic" (or None), "files" (their hashes)}.

    ValueError if broken; of a file that cannot be read today the system's OSError, or MemoryError, is left.
    """
    path = Path(folder) / TRAINER_FILE
    if not path.is_file():
        raise ValueError(f"{path}: not found; is {folder} a checkpoint?")
    try:
        trainer = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = {name: trainer[name] for name in ("optimizer", "state")} | {
            "critic": trainer.get("critic"), "files": trainer.get("files", {})}
        check_optimizer(found["optimizer"])
        if not isinstance(found["state"], dict):
            raise TypeError(f"its state is {type(found['state']).__name__}")
        if not all(isinstance(text, str) for pair in found["files"].items() for text in pair):
            raise TypeError("the names and hashes of its files are not texts")
        if found["critic"] is not None:
            check_optimizer(found["critic"]["optimizer"])
            if not all(isinstance(tensor, torch.Tensor) for tensor in found["critic"]["weights"].values()):
                raise TypeError("the critic's weights are not tensors")
        return found
    except Exception as error:    # for a broken file torch raises errors of many types
        if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno:
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: not a trainer state: {type(error).__name__}: {reason}") from error


def check_optimizer(saved):
    """Raise an error of any type unless `saved` has the form that `optimizer_state` returns."""
    if not all(isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        raise TypeError("a parameter's name is not a string")
    for state in saved["state"].values():
        if not all(isinstance(value, torch.Tensor) for value in state.values()):
            raise TypeError("an optimizer's state is not tensors")


def load_trainer(folder, model, optimizer, critic=None):
    """Restore the optimizer from a checkpoint saved at any number of ranks, and return its `state`.

    All ranks call it, with a model that has the weights of the same folder (see `find_checkpoint`).
    Hyperparameters such as the learning rate are restored too, except AdamW's `fused`. critic: a second
    (model, optimizer), restored with its weights and buffers. ValueError if model and checkpoint do not fit.
    """
    path, trainer = Path(folder) / TRAINER_FILE, read_trainer(folder)
    load_optimizer(path, model, optimizer, trainer["optimizer"], "optimizer")
    if critic is not None:
        if (saved := trainer["critic"]) is None:
            raise ValueError(f"{path}: no critic: saved by a run without one")
        targets, weights = tensors_of(critic[0]), saved["weights"]
        own, stored = ({(name, tensor.shape) for name, tensor in found.items()}
                       for found in (targets, weights))
        if own != stored:
            raise ValueError(f"{path}: the critic's {min(own ^ stored)[0]} differs: saved from another model")
        fill(folder, targets, weights, "critic/weights")
        load_optimizer(path, *critic, saved["optimizer"], "critic/optimizer")
    return trainer["state"]


def load_optimizer(path, model, optimizer, saved, prefix):
    """Restore an optimizer from what `optimizer_state` returned.

    saved: that, from the file at `path`; prefix: where it stands there.
    """
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := names - {name for group in saved["param_groups"] for name in group["params"]}:
        raise ValueError(f"{path}: no optimizer state for {min(missing)}: saved from another model")
    try:
        optimizer.state.clear()
        for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            settings = {key: settings[key] for key in settings if key not in ("params", "fused")}
            if wrong := [key for key in settings if not is_like(settings[key], group.get(key))]:
                raise ValueError(f"its {wrong[0]} is {settings[wrong[0]]!r:.60}")
            group |= settings
        targets, tensors = {}, {}
        for name, parameter in model.named_parameters():
            for key, tensor in saved["state"].get(name, {}).items():
                if tensor.dim() == 0:                               # the number of steps
                    device = parameter.device if optimizer.defaults.get("fused") else "cpu"
                    optimizer.state[parameter][key] = tensor.to(device, copy=True)
                    continue
                if tensor.shape != parameter.shape:
                    raise ValueError(f"{name} has {key} of shape {(*tensor.shape,)}")
                optimizer.state[parameter][key] = torch.zeros_like(parameter, requires_grad=False)
                targets[f"{name}/{key}"], tensors[f"{name}/{key}"] = optimizer.state[parameter][key], tensor
    except Exception as error:            # broken values raise errors of any type
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: no state of this optimizer: {type(error).__name__}: {reason}") from error
    fill(path.parent, targets, tensors, f"{prefix}/state")


def is_like(value, ours):
    """Whether an optimizer's setting, read from a file, can take the place of ours."""
    if isinstance(ours, tuple):                                  # which may have become a list
        return isinstance(value, (list, tuple)) and len(value) == len(ours) and all(map(is_like, value, ours))
    return type(value) is type(ours)


def fill(folder, targets, tensors, prefix):
    """Copy a checkpoint's tensors into targets of the same names and shapes, sharded or not, on all ranks.

    tensors: as `read_trainer` returned them. prefix: of their names there, by which
    torch.distributed.checkpoint finds what is not in trainer.pt. ValueError names the folder if it cannot be
    read.
    """
    parts = {f"{prefix}/{name}": target.detach() for name, target in targets.items() if tensors[name].is_meta}
    try:
        for name, target in targets.items():
            if not tensors[name].is_meta:
                parallel.copy_part(target, tensors[name])
        if parts:
            with one_error(Path(folder) / PARTS), warnings.catch_warnings():
                warnings.simplefilter("ignore")                     # that one process is not distributed
                dcp.load(parts, checkpoint_id=Path(folder) / PARTS)
    except Exception as error:            # for a broken file torch raises errors of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: {prefix} not read: {type(error).__name__}: {reason}") from error


def find_checkpoint(folder):
    """Return the folder as a Path if it holds a checkpoint (after `repair`), or what is left of one that
    `check_whole` can replace by the one before; else None. All ranks call it.
    """
    folder = Path(folder).resolve()

    def is_there():
        return repair(folder) or folder.is_dir() and (siblings(folder)[1] / TRAINER_FILE).is_file()

    return folder if parallel.on_rank0(is_there) else None


def siblings(folder):
    """Return the paths of the new checkpoint being written, and of the old one that `swap` sets aside."""
    return folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")


def swap(folder, keep=False):
    """Rename the new checkpoint to its final name; `repair` finishes after a crash between the renames.

    keep: do not delete the old one.
    """
    new, old = siblings(folder)
    left_behind = f"{old.name}.left-"              # no name of a run that was set aside, as old-1 would be
    for left in (old, *folder.parent.glob(f"{left_behind}*")):
        shutil.rmtree(left, ignore_errors=True)
    if old.exists():                               # NFS keeps a file that another process has open
        old.rename(tempfile.mkdtemp(prefix=left_behind, dir=folder.parent))
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    if not keep:
        shutil.rmtree(old, ignore_errors=True)


def repair(folder):
    """Finish a `swap` that crashed between its renames; return whether `folder` holds a checkpoint."""
    new, old = siblings(folder)
    if old.exists() and not folder.exists():
        # the new one is complete once it has its last file; an old one may also be there for longer
        (new if (new / TRAINER_FILE).is_file() else old).rename(folder)
    return (folder / TRAINER_FILE).is_file()


def check_replaceable(folder):
    """ValueError if `folder` has contents other than a checkpoint, which saving would delete."""
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds something that is not a checkpoint; saving would delete it")


def sync(*paths):
    """Sync files and, where the file system can, the entries of folders to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:                   # some network and shared file systems sync no folder
            if not (os.path.isdir(path) and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF)):
                raise
        finally:
            os.close(descriptor)
