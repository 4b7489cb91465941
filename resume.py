"""Whether a run continues its checkpoint, starts over, or must refuse; and what identifies a run.

A run continues only with its own metrics, model, settings and plug-ins. Left out: reading and writing files
(infra/files.py, infra/checkpoint.py).
"""

import math
import secrets
import sys
from pathlib import Path

import correction
from config import changed
from infra import checkpoint, files, parallel, plugins
from lm import model as qwen


def starting_point(config, out):
    """The folder of the model to start from (None: a fresh one), and the state of the resumed checkpoint or
    None.

    With --resume and --overwrite, a run that cannot be resumed starts over. ValueError if --resume fails, or
    if OUT holds a run and neither flag is given.
    """
    found = checkpoint.find_checkpoint(out / files.CHECKPOINT)
    if config.resume:
        try:
            if found is None:
                raise ValueError(f"--resume: {out / files.CHECKPOINT} holds no checkpoint")
            state = checkpoint.read_trainer(found)["state"]
            check_state(found / checkpoint.TRAINER_FILE, state)
            if foreign := parallel.on_rank0(lambda: not_its_own(config, out, state)):
                raise ValueError(f"--resume: {foreign}")                   # on every rank
            check_resumed(config, state)
            return found, state
        except ValueError as cannot:
            if not config.overwrite:
                raise
            if found:
                parallel.print0(f"{cannot}; so it starts over", file=sys.stderr)
    if not config.overwrite and parallel.on_rank0(lambda: files.holds_run(out)):
        raise ValueError(f"--out={out}: holds a run; --resume continues it, --overwrite sets it aside and "
                         "starts over")
    return Path(config.model) if config.model else None, None


def begin(config, out, state, previous, resources):
    """Prepare OUT on rank 0: truncate the logs of a resumed run, or set a previous run aside. Returns the
    identity.

    The identity is stored in checkpoint and metrics: a random name, the hash of the first model's weights,
    the task types of the cold start behind it (None: none, or unknown), and hashes of plug-ins outside the
    tree. previous: the state of the run that trained the model.
    """
    if state:
        files.truncate_logs(out, state["iteration"] or 0, (state.get("cold") or {}).get("steps", math.inf))
        return {key: state.get(key) for key in ("run", "start", "cold_start_types", "plugins")}
    start = qwen.weights_hash(config.model) if config.model else None
    if files.holds_run(out):
        aside = files.set_aside(out)
        print(f"the run that {out} held is now {aside}", file=sys.stderr)
        resources.enter_context(files.locked(out))
    types = config.cold_start_types if config.demonstrations else previous.get("cold_start_types")
    return {"run": secrets.token_hex(8), "start": start, "cold_start_types": types,
            "plugins": plugin_hashes(config)}


def plugin_hashes(config):
    """{flag: hash} of algorithm and environment, if given as a file outside the tree; else the commit
    tells.
    """
    given = {"algo": config.algo, "env": config.env}
    hashes = {flag: plugins.content_hash(value) for flag, value in given.items()}
    return {flag: digest for flag, digest in hashes.items() if digest}


def not_its_own(config, out, state):
    """Say what belongs to another run than the checkpoint: metrics, --model or a plug-in; "" if nothing
    does.
    """
    first = next((line for line in files.read_lines(out / files.METRICS)[0] if isinstance(line, dict)), {})
    if (logged := first.get("run")) != (saved := state.get("run")):
        return f"{out / files.METRICS} is of run {logged}, the checkpoint of run {saved}"
    there = state.get("start") and config.model and Path(config.model).is_dir()
    if there and state["start"] != qwen.weights_hash(config.model):
        return f"{out} began with other weights than --model={config.model} holds"
    for flag, now in plugin_hashes(config).items():
        if (then := (state.get("plugins") or {}).get(flag)) not in (None, now):
            return (f"--{flag}={getattr(config, flag)}: the file has changed since the run began (hash "
                    f"{then}, now {now})")
    return ""


def check_state(path, state):
    """ValueError unless a checkpoint's state has the entries and types that a run writes."""
    kinds = {"iteration": int | None, "settings": dict, "seconds": dict, "instruction": dict | None}
    later = {"plugins": dict | None} if "plugins" in state else {}            # older checkpoints have none
    for name, kind in (kinds | later).items():
        if name not in state or not isinstance(state[name], kind):
            raise ValueError(f"{path}: not a run's: its {name} is {state.get(name)!r:.60}")
    cold = state.get("cold")
    if cold and not (isinstance(cold, dict) and "muon" in cold and
                     all(isinstance(cold.get(name), int) for name in ("rounds", "steps"))):
        raise ValueError(f"{path}: not a run's: its cold is {cold!r:.60}")


def check_resumed(config, state):
    """ValueError unless the run can be resumed with these settings. How it is evaluated may differ."""
    done = state["iteration"]
    if done is None and not state.get("cold"):
        raise ValueError(f"--resume: {config.out} stopped in its cold start, before a DAgger checkpoint; "
                         "--overwrite starts it over")
    done = done or 0
    if 0 < config.iterations < done:
        raise ValueError(f"--iterations={config.iterations}: --resume finds {done} done in {config.out}")
    ignored = ["protocol", "correction_at_evaluation"]
    if not (config.lr_decay and 0 < done < config.iterations):  # lr decay depends on the total
        ignored.append("iterations")
    if other := changed(state.get("settings", {}), config, ignored):
        differences = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in other.items())
        raise ValueError(f"--resume: {config.out} was made with other settings: {differences}")


def state_beside(source):
    """The state of the run whose checkpoint the folder is; {} if it is none."""
    here = source and (source / checkpoint.TRAINER_FILE).is_file()
    return checkpoint.read_trainer(source)["state"] if here else {}


def instruction_of(source, state):
    """The last instruction of the run that trained a model, if it was trained with correction."""
    try:
        return correction.Instruction(**state["instruction"]) if state.get("instruction") else None
    except TypeError as error:
        raise ValueError(f"{source / checkpoint.TRAINER_FILE}: not an instruction: {error}") from None
