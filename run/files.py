"""What a run writes and reads: metrics.jsonl, episodes.jsonl, evaluation.json, stages.json; their one owner.

A line of a .jsonl file is on the disk before anything else happens; a .json file is written beside and
renamed: a reader sees the old one or the new. NaN is null. One process at a time writes into a folder: it
holds `lock` there. Left out: checkpoints (run/parallel.py).
"""

import fcntl
import json
import math
import os
import platform
import shlex
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

METRICS, EPISODES, EVALUATION, STAGES = "metrics.jsonl", "episodes.jsonl", "evaluation.json", "stages.json"
LOCK, CHECKPOINT, KEPT = "lock", "checkpoint", "kept"
MOST_HASHED = 4000         # training tasks; generated ones are endless, and of real games there are 3,553


@contextmanager
def held(folder):
    """Hold a run's folder (made where it lacks) against other processes. ValueError says who has it.

    The lock ends with its process, however that ends; what it starts does not have it (closed at exec).
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out={folder}: {holder(folder)} is writing there") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()} ({shlex.join(sys.argv)[:200]})")
        file.flush()
        yield


def holder(folder):
    """Which process holds a folder; "" where none does."""
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
    """Whether a folder holds anything of a run: whatever a new one would write over."""
    return any(path.name.startswith(CHECKPOINT) or path.name in (METRICS, EPISODES, EVALUATION, STAGES)
               for path in (folder.iterdir() if folder.is_dir() else ()))


def set_aside(folder):
    """Rename a run's folder to the first free FOLDER.old-1, -2, ...; returns that name."""
    folder, n = folder.resolve(), 1
    while (aside := folder.with_name(f"{folder.name}.old-{n}")).exists():
        n += 1
    folder.rename(aside)
    return aside


def finite(value):
    """The same JSON value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append(path, record):
    """One JSON object, one line, flushed to the disk. OSError names the file."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            print(json.dumps(finite(record), allow_nan=False), file=file, flush=True)
            os.fsync(file.fileno())
    except OSError as error:                                 # a full disk does not say which file it was
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_bytes(path, content):
    """Written beside and renamed; folders that lack are made. OSError names the file."""
    path = Path(path)
    beside = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_text(path, text):
    """A text file in UTF-8, see `write_bytes`; halves of characters become "?"."""
    write_bytes(path, text.encode("utf-8", "replace"))


def write_json(path, value, indent=1):
    """A JSON file, see `write_text`."""
    write_text(path, json.dumps(finite(value), indent=indent, allow_nan=False) + "\n")


def go_on(folder, done, step=math.inf):
    """A run goes on from iteration `done`, or from a step of its cold start: what it logged of that and later
    ones is dropped, for it comes again; stages.json, which says that it has ended, becomes stages.json.old.
    """
    if (folder / STAGES).exists():
        os.replace(folder / STAGES, folder / f"{STAGES}.old")
    for log in (METRICS, EPISODES):
        keep(folder / log, lambda line: line.get("iteration", -1) < done and line.get("step", -1) < step)


def keep(path, wanted):
    """Leave of a .jsonl file what is wanted of its records. Lines that a kill or a full disk cut short go."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = [line for line in lines if isinstance(record := read_line(line), dict) and wanted(record)]
    content = b"".join(line + b"\n" for line in kept)
    if lines and content != path.read_bytes():
        write_bytes(path, content)


def read_line(line):
    """The value in a line of a .jsonl file; None in one that is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_lines(path):
    """The objects of a .jsonl file (none if it is absent), and the numbers of lines that a kill cut short."""
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).is_file() else ""
    lines = [(number, line, read_line(line)) for number, line in enumerate(text.split("\n"), start=1)]
    return ([record for _, _, record in lines if record is not None],
            [number for number, line, record in lines if record is None and line.strip()])


def read_json(path):
    """The value in a JSON file, {} if it is absent. ValueError names a broken file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")) if Path(path).is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None


def settings_in(records):
    """The settings of a run: the "config" of the first line of its metrics.jsonl."""
    if not records or "config" not in records[0]:
        raise ValueError("metrics.jsonl does not begin with settings")
    return records[0]["config"]


def iterations_in(records):
    """The RL iterations of a run's metrics in order; of one that was run twice the later."""
    by_number = {record["iteration"]: record for record in records if record.get("phase") == "rl"}
    return [by_number[number] for number in sorted(by_number)]


def commit():
    """The commit of the code, "+" if changed since; empty outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def origin_of(config, cold_start_types=None):
    """What a run was made with: versions of what computes and plays, commit, games, and the world's words.

    cold_start_types: those that the cold start behind the run's model saw; None: there is nothing to say.
    games_hash: of each split that the run evaluates and, as "train", of the first MOST_HASHED that RL plays.
    """
    import torch
    import transformers
    world = config.world
    hashes = {split: world.tasks_hash(world.split(split)) for split in config.splits}
    if played := config.iterations * config.tasks * (4 if config.dynamic_sampling == "refill" else 1):
        hashes["train"] = world.tasks_hash(world.train(config.train_types, 0, min(played, MOST_HASHED)))
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores"} | world.versions()
    return {"versions": versions, "commit": commit(), "world": config.env, "games": world.games(),
            "games_hash": hashes, "captions": dict(world.captions),
            "note": world.note(config.settings() | {"cold_start_types": cold_start_types}),
            "warning": world.warning()}


def episode_record(episode, credited):
    """An episode for episodes.jsonl, turn by turn; not `credited`, in evaluation, it has no advantages."""
    of_turn = ("observation", "response", "action", "valid", "label", "tag", "advantage", "oracle",
               "verdicts", "judge_reward")
    of_episode = ("group", "won", "score_100", "restarts", "final_observation")
    hidden = {} if credited else {"advantage": None}
    turns = [{name: getattr(turn, name) for name in of_turn} | hidden for turn in episode.turns]
    return {"task_id": episode.task.id, "task_type": episode.task.task_type, "turns": turns} | {
        name: getattr(episode, name) for name in of_episode}
