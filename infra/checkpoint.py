"""Checkpoints of a run: replaced atomically, and loaded at any number of ranks.

A checkpoint is a Hugging Face folder with an additional file, trainer.pt: the optimizer's state, the run's
state and, for PPO, the critic. Left out: the other files of a run (infra/files.py).
"""

import os
import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint import state_dict as states

from infra import parallel
from infra.parallel import FROM_FULL, FULL_ON_CPU, full_weights, on_rank0

TRAINER_FILE = "trainer.pt"


def save_checkpoint(folder, model, optimizer, state, save_model, extra_files=None, critic=None):
    """Replace the checkpoint in `folder`. All ranks call it.

    state: rank 0's plain values and tensors, which `load_trainer` returns. save_model(model, folder,
    state=weights) writes the full weights; extra_files(folder) writes other files, such as the tokenizer's.
    critic: a second (model, optimizer), stored in trainer.pt.

    Everything is gathered in rank 0's CPU memory, written and synced under a temporary name, then renamed: a
    failure at any moment leaves the old checkpoint or the new one. OSError, on every rank, names the folder.
    """
    folder = Path(folder).resolve()
    on_rank0(lambda: repair(folder) or check_replaceable(folder))
    weights = full_weights(model)
    trainer = {"optimizer": optimizer_state(model, optimizer), "state": state}
    if critic is not None:
        with parallel.onloaded(model, *critic):
            trainer["critic"] = {"weights": full_weights(critic[0]), "optimizer": optimizer_state(*critic)}

    def write(new):
        save_model(model, new, state=weights)
        save_trainer(trainer, new / TRAINER_FILE)
        if extra_files is not None:
            extra_files(new)

    on_rank0(lambda: replace(folder, write))


def replace(folder, write):
    """Replace a folder atomically by a new one that write(path) fills. OSError names the folder."""
    new, _ = siblings(folder)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        write(new)
        sync(*new.rglob("*"), new)
        swap(folder)
    except Exception as error:    # for a full disk a tokenizer raises a bare Exception
        if folder.exists():    # else it failed between the renames, and `repair` needs the new folder
            shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"checkpoint {folder} not saved: {error}") from error


def save_trainer(trainer, path):
    """torch.save, with an OSError that names the file if it fails, for example on a full disk."""
    try:
        torch.save(trainer, path)
    except (RuntimeError, OSError) as error:
        raise OSError(f"{path}: {' '.join(str(error).split())[:200]} (no space left?)") from None


def optimizer_state(model, optimizer):
    """Return the full optimizer state by parameter name, on rank 0's CPU; empty on the other ranks."""
    stepped = bool(optimizer.state)
    saved = states.get_optimizer_state_dict(model, optimizer, options=FULL_ON_CPU)
    if not stepped:    # torch took a step on zeros; Adam's bias correction would count it as the first step
        optimizer.state.clear()
        saved.get("state", {}).clear()
    return saved


def read_trainer(folder):
    """Return the content of trainer.pt: {"optimizer", "state", "critic" (or None)}. ValueError if broken."""
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
    except Exception as error:    # for a broken file torch raises errors of many types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: not a trainer state: {type(error).__name__}: {reason}") from error


def check_optimizer(saved):
    """Raise an error of any type unless `saved` has the form that `optimizer_state` returns."""
    if not all(isinstance(name, str) for group in saved["param_groups"] for name in group["params"]):
        raise TypeError("a parameter's name is not a string")
    for state in saved["state"].values():
        if not all(isinstance(state[key], torch.Tensor) for key in ("step", "exp_avg", "exp_avg_sq")):
            raise TypeError("an optimizer's state is not tensors")


def load_trainer(folder, model, optimizer, critic=None):
    """Restore the optimizer from a checkpoint saved at any number of ranks, and return its `state`.

    All ranks call it, with a model that was loaded from the same folder (see `find_checkpoint`) before
    `shard`. Hyperparameters such as the learning rate are restored too, except AdamW's `fused`. critic: a
    second (model, optimizer), restored with its weights. ValueError if model and checkpoint do not fit.
    """
    path, trainer = Path(folder) / TRAINER_FILE, read_trainer(folder)
    load_optimizer(path, model, optimizer, trainer["optimizer"])
    if critic is not None:
        if (saved := trainer["critic"]) is None:
            raise ValueError(f"{path}: no critic: saved by a run without one")
        own, stored = ({(name, tensor.shape) for name, tensor in weights.items()}
                       for weights in (critic[0].state_dict(), saved["weights"]))
        if own != stored:
            raise ValueError(f"{path}: the critic's {min(own ^ stored)[0]} differs: saved from another model")
        with parallel.onloaded(model, *critic):
            states.set_model_state_dict(critic[0], saved["weights"], options=FROM_FULL)
            load_optimizer(path, *critic, saved["optimizer"])
    return trainer["state"]


def load_optimizer(path, model, optimizer, saved):
    """Restore an optimizer from what `optimizer_state` returned; `path` is for error messages only."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing := names - {name for group in saved["param_groups"] for name in group["params"]}:
        raise ValueError(f"{path}: no optimizer state for {min(missing)}: saved from another model")
    known = saved["state"]                # torch 2.9 needs a state of every parameter, even without gradient
    like = next(iter(known.values()), {})
    new = {name: {key: torch.zeros(value.shape and parameter.shape) for key, value in like.items()}
           for name, parameter in model.named_parameters() if like and name in names - known.keys()}
    groups = [group | {"fused": optimizer.defaults["fused"]} for group in saved["param_groups"]]
    optimizer.state.clear()
    try:
        states.set_optimizer_state_dict(model, optimizer, {"state": known | new, "param_groups": groups},
                                        options=FROM_FULL)
    except Exception as error:            # torch raises errors of any type for shapes that do not fit
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: no state of this optimizer: {type(error).__name__}: {reason}") from error
    for name, parameter in model.named_parameters():
        if name not in known:             # as when it was saved: without a state
            optimizer.state.pop(parameter, None)


def find_checkpoint(folder):
    """Return the folder as a Path if it holds a checkpoint (after `repair`), else None. All ranks call it."""
    folder = Path(folder).resolve()
    return folder if on_rank0(lambda: repair(folder)) else None


def siblings(folder):
    """Return two temporary paths: of the new checkpoint being written, and of the old one during `swap`."""
    return folder.with_name(folder.name + ".writing"), folder.with_name(folder.name + ".old")


def swap(folder):
    """Rename the new checkpoint to its final name; `repair` finishes after a crash between the renames."""
    new, old = siblings(folder)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair(folder):
    """Finish a `swap` that crashed between its renames; return whether `folder` holds a checkpoint."""
    new, old = siblings(folder)
    if old.exists() and not folder.exists():
        (new if new.exists() else old).rename(folder)    # the old one moves only once the new one is complete
    return (folder / TRAINER_FILE).is_file()


def check_replaceable(folder):
    """ValueError if `folder` has contents other than a checkpoint, which saving would delete."""
    if folder.is_file() or folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder}: holds something that is not a checkpoint; saving would delete it")


def sync(*paths):
    """Sync files, and the entries of folders, to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
