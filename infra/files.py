"""The files of a run other than checkpoints: metrics.jsonl, episodes.jsonl, evaluation.json, stages.json.

Each line appended to a .jsonl file is synced to the disk. A .json file is written under a temporary name and
then renamed, so a reader sees the old file or the new one. NaN is written as null. A lock file lets only one
process at a time write into a run's folder. Left out: checkpoints (infra/checkpoint.py).
"""

import fcntl
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from infra import plugins

METRICS, EPISODES, EVALUATION, STAGES = "metrics.jsonl", "episodes.jsonl", "evaluation.json", "stages.json"
RESULTS = "lab/results"    # what benchmarks and studies write, from the repository's root
LOCK, CHECKPOINT, KEPT, REFERENCE, ADAPTER = "lock", "checkpoint", "kept", "reference", "adapter"
STATE = "state.json"                             # beside a model in KEPT; a checkpoint's is in its trainer.pt
OF_RUNS = METRICS, EPISODES, EVALUATION, STAGES, REFERENCE, ADAPTER, KEPT       # and names from CHECKPOINT on
FRESH = "fresh-"           # and eight hexadecimal digits: a folder with a fresh model, while it is loaded
ROLLOUTS = "rollouts"
LARGEST = 1e300            # larger numbers are not drawn, like infinity; 100 times this one is still finite
MAX_HASHED = 4000          # training tasks in games_hash: all 3,553 real games; generated ones have no end


@contextmanager
def locked(folder):
    """Lock a run's folder, created if missing, for this block.

    ValueError names the process that locked it, or says why it cannot be a folder. The lock ends with its
    process, however that ends; child processes do not inherit it (closed at exec). The file does not hold the
    command line, in which there may be a key.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--out={folder}: neither a folder nor a link to one") from None
    except OSError as error:
        raise ValueError(f"--out={folder}: {error.strerror}") from None
    with open(folder / LOCK, "ab", buffering=0) as file:         # else closing writes, and fails, once more
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out={folder}: {lock_holder(folder)} is writing there") from None
        except OSError as error:
            raise ValueError(f"--out={folder}: cannot be locked: {error.strerror}") from None
        try:
            file.truncate(0)
            file.write(f"process {os.getpid()} of {socket.gethostname()}".encode())
        except OSError as error:                             # the error of a full disk names no file
            raise ValueError(f"--out={folder}: {error.strerror}") from None
        yield


def lock_text(folder):
    """What the process that has locked a folder has written there."""
    return (folder / LOCK).read_text(encoding="utf-8") if (folder / LOCK).is_file() else ""


def remove_leftovers(folder):
    """Remove what killed processes left in a folder that this one has locked: unfinished copies of a run's
    files, and fresh models, which nothing had trained.
    """
    for path in (*folder.glob("*.new"), *(folder / ROLLOUTS).glob("*.new")):
        name, _, pid = path.stem.rpartition(".")
        iteration = path.parent != folder and name.endswith(".jsonl")
        if (iteration or name in (METRICS, EPISODES, EVALUATION, STAGES)) and pid.isdecimal():
            path.unlink()
    for path in folder.glob(f"{FRESH}*"):
        if re.fullmatch("[0-9a-f]{8}", path.name.removeprefix(FRESH)) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def check_shared(folder, text, patience_s=30):
    """ValueError unless the folder is the one in which another rank has `lock_text`. A network's file system
    may take seconds to show it.
    """
    for _ in range(2 * patience_s):
        if lock_text(folder) == text:
            return
        time.sleep(0.5)
    raise ValueError(f"--out={folder}: on {socket.gethostname()} not the folder that rank 0 writes to; all "
                     "machines must share it")


def lock_holder(folder):
    """Describe the process that has a folder locked; "" if it is not locked."""
    try:
        with open(folder / LOCK, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return ""
            except BlockingIOError:
                return file.read().strip() or "another process"
    except FileNotFoundError:
        return ""


def holds_run(folder):
    """Whether a folder contains any file of a run, which a new run would overwrite."""
    return any(path.name.startswith(CHECKPOINT) or path.name in OF_RUNS
               for path in (folder.iterdir() if folder.is_dir() else ()))


def check_can_be_set_aside(folder):
    """ValueError for a folder that contains the working directory, which would move with it."""
    if not folder.is_symlink() and Path.cwd().is_relative_to(folder.resolve()):
        raise ValueError(f"--out={folder}: --overwrite would rename the folder that this command works in; "
                         "start it elsewhere")


def set_aside(folder):
    """Rename a run's folder or a file to the first free name among NAME.old-1, -2, ...; return that path.

    Of a link the link itself is renamed: what it points to stays where it is.
    """
    folder, n = folder if folder.is_symlink() else folder.resolve(), 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.old-{n}")):
        n += 1
    folder.rename(aside)
    return aside


def start_over(out, resources):
    """Set the run in OUT aside, say so, and lock the new OUT until the ExitStack `resources` ends."""
    print(f"the run that {out} held is now {set_aside(out)}", file=sys.stderr)
    resources.enter_context(locked(out))


def nan_to_null(value):
    """Return a JSON value with NaN and infinities replaced by None (null): JSON has neither."""
    if isinstance(value, dict):
        return {key: nan_to_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [nan_to_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def not_found(path):
    """Say that a model's file is missing and, of the folder of a run, where its model is; or how to get the
    folder; or that it is an adapter's.
    """
    path = Path(path)
    if not (folder := path.parent).is_dir():
        hub = re.fullmatch(r"(?:([\w.-]+)/)?([\w.-]+)", str(folder))
        if not hub or hub[1] and folder.parent.exists():
            return f"{folder}: no such folder"
        owner, name = hub[1] or "OWNER", hub[2]
        return (f"{folder}: no such folder; if it is the hub's: hf download {owner}/{name} "
                f"--local-dir {name}, then give {name}")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return (f"{path}: not found; the folder is a PEFT adapter, to be merged into its base model first "
                "(in peft: merge_and_unload, save_pretrained)")
    there = folder / CHECKPOINT
    return f"{path}: not found" + f"; the run's model is in {there}" * (there / path.name).is_file()


def append(path, record):
    """Append an object to a .jsonl file as one line, synced to the disk. OSError names the file."""
    with naming(path), open(path, "a", encoding="utf-8") as file:
        print(json.dumps(nan_to_null(record), allow_nan=False), file=file, flush=True)
        os.fsync(file.fileno())


@contextmanager
def naming(path):
    """A block whose OSErrors name this file or folder: that of a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:                     # one of ours, which names a file
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_bytes(path, content):
    """Replace a file atomically, by a temporary file, synced to the disk, and a rename. Missing folders are
    created.

    OSError names the file.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")      # two processes may make reports at once
    with naming(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())                     # else a power cut may leave an empty file
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_text(path, text):
    """Write a text file in UTF-8, as `write_bytes` does; unpaired surrogates become "?"."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path, value, indent=1):
    """Write a JSON file, as `write_text` does; see `nan_to_null`."""
    write_text(path, json.dumps(nan_to_null(value), indent=indent, allow_nan=False) + "\n")


def write_lines(path, records):
    """Replace a .jsonl file by these records, as `write_bytes`."""
    write_text(path, "".join(json.dumps(nan_to_null(record)) + "\n" for record in records))


def truncate_logs(folder, done, cold=None, trains=True):
    """Truncate the logs to iteration `done`, or to where a cold start stopped; resuming rewrites the rest.

    cold: its {"steps", "rounds"}. Its demonstrations are made again, and their lines, which have no step, go;
    after a DAgger round the first demonstrations are not, and their line stays. stages.json, which marks a
    finished run, becomes stages.json.old; so does evaluation.json if the run `trains` on, and the episodes of
    that evaluation go, as do rollouts of iterations that are repeated; models kept of these are set aside.
    """
    for name in (STAGES, *((EVALUATION,) if trains else ())):
        if (folder / name).exists():
            os.replace(folder / name, folder / f"{name}.old")
    steps, seen = cold["steps"] if cold else math.inf, []

    def stays(line):
        if trains and line.get("phase") == "evaluation":
            return False
        iteration, step = line.get("iteration", -1), line.get("step", -1)
        if not type(iteration) is type(step) is int:                        # no run wrote this
            return False
        if not cold or line.keys() & {"run", "iteration", "step"}:
            return iteration < done and step < steps
        seen.append(line.get("phase"))
        return bool(cold["rounds"]) and seen == ["demonstrations"]
    for log in (METRICS, EPISODES):
        filter_lines(folder / log, stays)
    for path in (folder / ROLLOUTS).glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) >= done:
            path.unlink()
    for path in (folder / KEPT).glob("*") if trains else ():
        if path.name.isdecimal() and int(path.name) > done:
            set_aside(path)


def filter_lines(path, predicate):
    """Keep only the records of a .jsonl file for which predicate(record) is true; drop incomplete lines."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = [line for line in lines if isinstance(record := parse_line(line), dict) and predicate(record)]
    content = b"".join(line + b"\n" for line in kept)
    if lines and content != path.read_bytes():
        write_bytes(path, content)


def parse_line(line):
    """Return the value in a line of a .jsonl file; None if the line is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_lines(path):
    """Return the records of a .jsonl file ([] if it is absent), and the numbers of its incomplete lines."""
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    lines = [(number, line, parse_line(line)) for number, line in enumerate(text.split("\n"), start=1)]
    return ([record for _, _, record in lines if record is not None],
            [number for number, line, record in lines if record is None and line.strip()])


def is_number(value):
    """Whether a JSON value is a number that can be used: not null, a bool, NaN or beyond LARGEST."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def read_json(path):
    """Return the value in a JSON file, {} if it is absent. ValueError names a broken file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")) if Path(path).is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def settings_in(records):
    """Return the settings of a run: "config" in the last record of its metrics.jsonl that has it, since a
    resumed run may have more iterations. One that was resumed with none keeps those it had.
    """
    if not records or "config" not in records[0]:
        raise ValueError("metrics.jsonl does not begin with settings")
    configs = [record["config"] for record in records if "config" in record]
    had = [config["iterations"] for config in configs if config.get("iterations")]
    return configs[-1] | ({"iterations": had[-1]} if had else {})


def iterations_in(records):
    """Return the records of RL iterations in order; the later one if an iteration was run twice."""
    by_number = {record["iteration"]: record for record in records
                 if isinstance(record, dict) and record.get("phase") == "rl"
                 and type(record.get("iteration")) is int}
    return [by_number[number] for number in sorted(by_number)]


def commit():
    """Return the full commit of the code, with "+" if it has local changes; "" outside a git checkout, or in
    one that does not track this file.

    Files that git does not track do not count as changes, and neither does what runs write below RESULTS:
    else the first result of several would mark all later ones.
    """
    file = Path(__file__).resolve()
    git = ["git", "--no-optional-locks", "-c", f"safe.directory={file.parent.parent}", "-C", str(file.parent)]
    try:
        head, changes = (
            subprocess.check_output([*git, *command], text=True, stderr=subprocess.DEVNULL)
            for command in (("rev-parse", "HEAD", f"HEAD:./{file.name}"),        # fails without this file
                            ("status", "--porcelain", "-uno", "--", ":/", f":(top,exclude){RESULTS}")))
        return head.split()[0] + "+" * bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return ""


def clean_commit(dirty=False):
    """Return `commit` for a result to name. ValueError if it names no code: local changes, or no checkout.

    dirty: accept both; the commit's "+", or its absence, marks the result.
    """
    found = commit()
    if dirty or found and not found.endswith("+"):
        return found
    raise ValueError(f"{'the tree has uncommitted changes' if found else 'the tree is no git checkout'}: a "
                     "result would name no code that can be had again; commit first, or mark it by --dirty")


def versions_of(environment):
    """Return {name: version} of Python, the libraries and the environment's packages, and the machine."""
    import torch
    return {"python": platform.python_version(), "torch": torch.__version__,
            "transformers": version("transformers"),          # without the seconds that importing it takes
            "machine": f"{platform.machine()}, {os.cpu_count()} cores"} | environment.versions()


def train_hash(config, iterations):
    """Return a hash of the first tasks of so many RL iterations, at most MAX_HASHED; None if there are none.

    Without RL it is of as many training tasks as there are demonstrations.
    """
    played = iterations * config.tasks
    types, n = (config.train_types, played) if played else (config.cold_start_types, config.demonstrations)
    tasks = config.environment.train_tasks(types, 0, min(n, MAX_HASHED)) if n else []
    return config.environment.tasks_hash(tasks) if tasks else None


def origin_of(config, cold_start_types=None):
    """Return a run's provenance: library versions, commit, games, and the environment's texts for reports.

    cold_start_types: the task types in the cold start of the run's model; None: none, or unknown. Key
    "games_hash" maps each evaluated split, and "train" (see `train_hash`), to a hash of its tasks.
    """
    environment = config.environment
    hashes = {split: environment.tasks_hash(environment.split_tasks(split)) for split in config.splits}
    if trained := train_hash(config, config.iterations):
        hashes["train"] = trained
    return {"versions": versions_of(environment), "commit": commit(), "world": plugins.name_of(config.env),
            "games": environment.description(), "games_hash": hashes, "captions": dict(environment.captions),
            "note": environment.note(config.settings() | {"cold_start_types": cold_start_types}),
            "warning": environment.warning()}


def rollout_record(episode):
    """Return a training episode as a record of rollouts/: that of episodes.jsonl, the episode's index, and of
    each turn the token ids and the sampler's logprobs.

    A turn's prompt is the first `prompt_shared` ids of the turn before, prompt and response, and then
    `new_prompt_ids`. `allowed`, only of a turn that was sampled under a restriction: see rollout.Turn.
    """
    record, before = episode_record(episode, True) | {"index": episode.index}, []
    for turn, row in zip(episode.turns, record["turns"]):
        shared = len(os.path.commonprefix([before, turn.prompt_ids]))
        row |= {"prompt_shared": shared, "new_prompt_ids": turn.prompt_ids[shared:],
                "response_ids": turn.response_ids, "logprob": turn.logprob_old,
                "token_advantage": turn.token_advantage} | ({"allowed": turn.allowed} if turn.allowed else {})
        before = turn.prompt_ids + turn.response_ids
    return record


def episode_record(episode, credited):
    """Return an episode as a record of episodes.jsonl. credited: with its reward and its turns' advantages,
    which only training writes.
    """
    of_turn = ("observation", "response", "action", "valid", "reward", "label", "tag", "advantage", "oracle",
               "verdicts", "judge_reward")
    of_episode = ("group", "won", "ended", "score_100", "restarts", "lost", "final_observation")
    hidden = {} if credited else {"advantage": None}
    turns = [{name: getattr(turn, name) for name in of_turn} | hidden for turn in episode.turns]
    return {"task_id": episode.task.id, "task_type": episode.task.task_type, "turns": turns,
            "reward": episode.reward if credited else None} | {
        name: getattr(episode, name) for name in of_episode}
