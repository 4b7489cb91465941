"""Whether a run continues its checkpoint, starts over, or must refuse; and what identifies a run.

A run continues only with its own metrics, model, settings, plug-ins and games. What may differ and yet change
its numbers is printed. Left out: reading and writing files (infra/files.py, infra/checkpoint.py).
"""

import os
import secrets
import sys
from dataclasses import fields
from pathlib import Path

from config import ROUNDING, changed
from infra import checkpoint, files, parallel, plugins
from infra.flags import flag_of
from lm import model as decoder


def starting_point(config, out, ranks):
    """The folder of the model to start from (None: a fresh one), and the resumed checkpoint's state or None.

    With --resume and --overwrite, a run that cannot be resumed starts over. ValueError if --resume fails, if
    OUT holds a run and neither flag is given, or if it cannot be set aside.
    """
    found = checkpoint.find_checkpoint(out / files.CHECKPOINT)
    if config.resume:
        try:
            if found is None:
                raise ValueError(f"--resume: {out / files.CHECKPOINT} holds no checkpoint")
            checkpoint.check_whole(found)
            state = as_rank0(lambda: checkpoint.read_trainer(found)["state"])
            check_state(found / checkpoint.TRAINER_FILE, state)
            first = parallel.on_rank0(lambda: first_record(out))
            parallel.collective(lambda: check_resumed(config, state, first))
            if foreign := parallel.on_rank0(lambda: not_its_own(config, out, state, first)):
                raise ValueError(f"--resume: {foreign}")                   # on every rank
            if config.kl != "none" and not config.lora and state["iteration"] and trains_on(config, state):
                # Opened here, before the logs are truncated: with --overwrite the run can still start over.
                as_rank0(lambda: decoder.open_pretrained(out / files.REFERENCE))
            parallel.on_rank0(lambda: print_changes(config, out, state, first, ranks))
            return found, state
        except ValueError as cannot:
            if not config.overwrite:
                raise
            if found:
                parallel.print0(f"{cannot}; so it starts over", file=sys.stderr)
    if parallel.on_rank0(lambda: files.holds_run(out)):
        if not config.overwrite:
            raise ValueError(f"--out={out}: holds a run; --resume continues it, --overwrite sets it aside "
                             "and starts over")
        check_apart(config, out)
        parallel.on_rank0(lambda: files.check_can_be_set_aside(out))
    return Path(config.model) if config.model else None, None


def check_apart(config, out):
    """ValueError if what the run reads is OUT or lies in it, so that --overwrite would set it aside."""
    given = config.settings()
    cache = ("endpoint_cache",) if config.endpoint else ()
    for name in ("model", "env", "algo", *config.environment.sources, *cache):
        there, own = Path(given[name]).resolve(), out.resolve()
        is_out = there == own and name not in ("env", "algo")      # which may be built in, and not files
        if given[name] and (is_out or own in there.parents) and there.exists():
            raise ValueError(f"{flag_of(name)}={given[name]}: lies in --out={out}, which --overwrite would "
                             "set aside")


def as_rank0(read):
    """`read()` on every rank, of a file that rank 0 sees. ValueError on all if rank 0 raises one; if only
    another rank does, its machine's file system is to blame, and it is an OSError: no run starts over for it.
    """
    def call():
        try:
            return read()
        except ValueError as error:
            if parallel.is_rank0():
                raise
            raise OSError(f"{error} (rank 0 can read it)") from error

    return parallel.collective(call)


def begin(config, out, state, previous, resources):
    """Prepare OUT on rank 0: truncate a resumed run's logs, or set another run aside. Returns the identity.

    The identity is stored in checkpoint and metrics: a random name, the hash of the first model's weights,
    the task types of the cold start behind it (None: none, or unknown), and hashes of plug-ins outside the
    tree. previous: the state of the run that trained the model.
    """
    if state:
        if not trains_on(config, state) and evaluates_otherwise(config, out, state):
            aside = files.set_aside(out / files.EVALUATION)
            print(f"--resume: the evaluation that {out} held is now {aside}", file=sys.stderr)
        files.truncate_logs(out, state["iteration"] or 0, state.get("cold"), trains_on(config, state))
        return {key: state.get(key) for key in ("run", "start", "cold_start_types", "plugins")}
    start = decoder.weights_hash(config.model) if config.model else None
    if files.holds_run(out):
        files.start_over(out, resources)
    types = config.cold_start_types if config.demonstrations else previous.get("cold_start_types")
    return {"run": secrets.token_hex(8), "start": start, "cold_start_types": types,
            "plugins": plugin_hashes(config)}


def evaluates_otherwise(config, out, state):
    """Whether the run will evaluate, and OUT holds an evaluation of other splits or games, by another
    protocol, or under an instruction where this one has none (or the reverse).
    """
    stored = files.read_json(out / files.EVALUATION)
    if not (stored and config.splits):
        return False
    then = stored if isinstance(stored, dict) else {}                            # another file, if any
    now = {"protocol": config.protocol, "evaluate_tasks": config.evaluate_tasks}
    games = {split: config.environment.tasks_hash(config.environment.split_tasks(split))
             for split in config.splits}
    instructed = bool(config.correction_at_evaluation and state.get("instruction"))
    return bool(sorted(dict_in(then, "splits")) != sorted(config.splits) or differing(then, now)
                or differing(dict_in(then, "games_hash"), games)
                or bool(then.get("instruction")) != instructed)


def plugin_hashes(config):
    """{flag: hash} of algorithm and environment if they are files outside the tree; else the commit tells."""
    given = {"algo": config.algo, "env": config.env}
    hashes = {flag: plugins.content_hash(value) for flag, value in given.items()}
    return {flag: digest for flag, digest in hashes.items() if digest}


def first_record(out):
    """The first record of OUT/metrics.jsonl: what the run began with; {} if there is none."""
    return next((line for line in files.read_lines(out / files.METRICS)[0] if isinstance(line, dict)), {})


def dict_in(record, name):
    """An entry of a record that is a dict; {} if it is absent or none."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def not_its_own(config, out, state, first):
    """Say what belongs to another run than the checkpoint: metrics, --model, a plug-in or the games of its
    training; "" if nothing does. first: see `first_record`.
    """
    if (logged := first.get("run")) != (saved := state.get("run")):
        return f"{out / files.METRICS} is of run {logged}, the checkpoint of run {saved}"
    if config.model and not state.get("start", True):
        return f"{out} began with a fresh model, not with --model={config.model}"
    there = state.get("start") and config.model and Path(config.model).is_dir()
    if there and state["start"] != decoder.weights_hash(config.model):
        return f"{out} began with other weights than --model={config.model} holds"
    for flag, now in plugin_hashes(config).items():
        if (then := (state.get("plugins") or {}).get(flag)) not in (None, now):
            return (f"--{flag}={getattr(config, flag)}: the file has changed since the run began (hash "
                    f"{then}, now {now}); to go on from its model: --model {out / files.CHECKPOINT} "
                    "--demonstrations 0, and another --out")
    return other_games(config, out, state, first)


def other_games(config, out, state, first):
    """Say whether games that the run still trains on have changed since it began; "" if they have not."""
    if not (began := hashed_games(config, state, first)):
        return ""
    then, iterations = began
    if (now := files.train_hash(config, iterations)) == then:
        return ""
    given, sources = config.settings(), config.environment.sources
    named = [f"{flag_of(name)}={given[name]}" for name in sources if given[name]] or [f"--env={config.env}"]
    return f"{named[0]}: other games than {out} has trained on (hash {then}, now {now})"


def hashed_games(config, state, first):
    """(hash of the games that the run began to train on, iterations that it covers), by which `other_games`
    compares; None if they are unknown, or if the run trains no more.
    """
    then, iterations = dict_in(first, "games_hash").get("train"), dict_in(first, "config").get("iterations")
    known = then and isinstance(iterations, int) and trains_on(config, state)
    return (then, iterations) if known else None


def trains_on(config, state):
    """Whether a run that continues this checkpoint has anything left to train."""
    return state["iteration"] is None or state["iteration"] < config.iterations


def print_changes(config, out, state, first, ranks):
    """Print what may differ in a resumed run and yet changes its numbers: what its rounding depends on, in a
    line; the versions of the code and of what it runs on, in another.
    """
    settings = state["settings"]
    then = {name: settings[name] for name in ROUNDING if name in settings} | state.get("place", {})
    now = {name: getattr(config, name) for name in ROUNDING} | place_of(ranks)
    if other := differing(then, now):
        changes = "; ".join(f"{name} was {then[name]}, is {now[name]}" for name in other)
        print(f"--resume: {changes}: sums are rounded differently from here on, so the run may differ from "
              "an undisturbed one", file=sys.stderr)
    print_versions(out, first, config.environment)


def print_versions(out, origin, environment):
    """Print which versions, of the code and of what it runs on, are others now than in a record's origin."""
    then = {name: origin[name] for name in ("commit",) if name in origin} | dict_in(origin, "versions")
    now = {"commit": files.commit()} | files.versions_of(environment)
    if other := differing(then, now):
        was, now = (", ".join(f"{name} {of[name] or 'unknown'}" for name in other) for of in (then, now))
        print(f"--resume: {out} was begun with {was}; it continues with {now}", file=sys.stderr)


def differing(then, now):
    """The names in both dicts whose values differ."""
    return [name for name in now if name in then and then[name] != now[name]]


def place_of(ranks):
    """What of a run's place its rounding depends on, apart from its settings."""
    place = {"ranks": ranks.world_size, "device": ranks.device.type}
    if ranks.device.type == "cpu":                           # measured, so it may change on one machine
        place["arithmetic of bf16"] = "fp32" if decoder.slow_bf16() else "bf16"
    return place


def check_state(path, state):
    """ValueError unless a checkpoint's state has the entries and types that a run writes."""
    kinds = {"iteration": int | None, "settings": dict, "seconds": dict, "instruction": str | None}
    later = {"plugins": dict | None, "place": dict, "unmerged": dict, "style": str,   # older ones lack these
             "algorithm": dict, "cold_start_types": str | None}
    for name, kind in (kinds | {name: kind for name, kind in later.items() if name in state}).items():
        if name not in state or not isinstance(state[name], kind):
            raise ValueError(f"{path}: not a run's: its {name} is {state.get(name)!r:.60}")
    if not all(isinstance(spent, int | float) for spent in state["seconds"].values()):
        raise ValueError(f"{path}: not a run's: its seconds are {state['seconds']!r:.60}")
    cold = state.get("cold")
    if cold and not (isinstance(cold, dict) and "muon" in cold and
                     all(isinstance(cold.get(name), int) for name in ("rounds", "steps"))):
        raise ValueError(f"{path}: not a run's: its cold is {cold!r:.60}")


def check_resumed(config, state, first):
    """ValueError unless the run can be resumed with these settings. How it is evaluated may differ, and its
    games, if it trains no more or they are compared by content. first: see `first_record`.

    The number of iterations may differ if none is done yet, if no learning rate decays over them, or if all
    are done and no more are asked for. A run that was cut would otherwise read as finished.
    """
    done = state["iteration"]
    if done is None and not state.get("cold"):
        raise ValueError(f"--resume: {config.out} stopped in its cold start, and its checkpoint, an older "
                         "version's, does not say where; --overwrite starts it over")
    done = done or 0
    if 0 < config.iterations < done:
        raise ValueError(f"--iterations={config.iterations}: --resume finds {done} done in {config.out}")
    defaults = {field.name: field.default for field in fields(config)}       # of settings newer than the run
    then = defaults | state["settings"]
    ignored = ["protocol", "correction_at_evaluation", "evaluate_tasks", *config.environment.free_settings]
    if done == 0 or (not config.lr_decay if config.iterations else done == then.get("iterations")):
        ignored.append("iterations")
    if hashed_games(config, state, first) or not trains_on(config, state):
        ignored += config.environment.sources
    if other := changed(then, config, ignored):
        differences = "; ".join(f"{name} was {then}, is {now}" for name, (then, now) in other.items())
        raise ValueError(f"--resume: {config.out} was made with other settings: {differences}")


def state_beside(source):
    """The state of the run whose checkpoint, or kept model, the folder is; {} if it is none."""
    if not source or not os.path.isdir(source):                                # False for an endless name
        return {}
    if os.path.isfile(source / checkpoint.TRAINER_FILE):
        return checkpoint.read_trainer(source)["state"]
    state = files.read_json(source / files.STATE)
    return state if isinstance(state, dict) else {}


def prompting_of(folder, env):
    """The flags by which a model folder's run prompted it and, in the environment `env` alone, limited its
    commands, {name: value}; {} if no run is known.
    """
    if folder.parent.name == files.KEPT and not (folder / files.STATE).is_file():       # of an older run
        folder = folder.parent.parent / files.CHECKPOINT
    state = state_beside(folder)
    then = dict_in(state, "settings")
    if "style" in state:
        then = then | {"prompt": state["style"]}                  # "auto" goes by the algorithm, too
    names = ("prompt", "show_admissible", "history", *(("admissible_only",) if is_of(then, env) else ()))
    return {name: then[name] for name in names if name in then}


def is_of(settings, env):
    """Whether a run with these settings was in the environment that --env gives as `env`."""
    return plugins.name_of(settings.get("env", "")) == plugins.name_of(env).partition(":")[0]


def played_instruction(folder, state, env):
    """The text of the instruction under which the run that trained a model evaluated it; "" if there is none,
    or if that run was not in the environment `env`.

    folder, state: the model's, and that of `state_beside` it.
    """
    plays = dict_in(state, "settings").get("correction_at_evaluation", True)
    return instruction_of(folder, state, env) if plays else ""


def instruction_of(source, state, env):
    """The last instruction of the run that trained a model; "" if there is none, or if that run was not in
    the environment `env`.
    """
    if not isinstance(text := state.get("instruction") or "", str):
        raise ValueError(f"{source}: not an instruction: {text!r:.60}")
    return text if is_of(dict_in(state, "settings"), env) else ""
