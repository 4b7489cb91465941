"""What a run writes and reads: metrics.jsonl, episodes.jsonl, evaluation.json, stages.json; their one owner.

A line of a .jsonl file is on the disk before anything else happens; a .json file is written beside and
renamed: a reader sees the old one or the new. NaN is null. Left out: checkpoints (run/parallel.py).
"""

import json
import math
import os
import platform
import subprocess
from pathlib import Path

METRICS, EPISODES, EVALUATION, STAGES = "metrics.jsonl", "episodes.jsonl", "evaluation.json", "stages.json"


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


def write_text(path, text):
    """Written beside and renamed; folders that lack are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="replace")
    os.replace(beside, path)


def write_json(path, value, indent=1):
    """A JSON file, see `write_text`."""
    write_text(path, json.dumps(finite(value), indent=indent, allow_nan=False) + "\n")


def begin(folder, resume):
    """Keep an earlier run's files as NAME.old; one that goes on keeps its logs, a cut last line ended."""
    for name in [STAGES] if resume else [STAGES, EVALUATION, METRICS, EPISODES]:
        if (folder / name).exists():
            os.replace(folder / name, folder / f"{name}.old")
    for log in (folder / METRICS, folder / EPISODES):
        if log.exists() and not log.read_bytes().endswith(b"\n"):
            with open(log, "a") as file:
                file.write("\n")


def read_lines(path):
    """The objects of a .jsonl file (none if it is absent), and the numbers of lines that a kill cut short."""
    text = Path(path).read_text(encoding="utf-8", errors="replace") if Path(path).exists() else ""
    records, broken = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError:
            broken.append(number)
    return records, broken


def read_json(path):
    """The value in a JSON file, {} if it is absent. ValueError names a broken file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8")) if Path(path).exists() else {}
    except ValueError as error:
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


def origin_of(config):
    """What a run was made with: versions of what computes and plays, commit, games, and the world's words.

    games_hash: of each split that the run evaluates and, as "train", of all that RL may play.
    """
    import torch
    import transformers
    world = config.world
    hashes = {split: world.tasks_hash(world.split(split)) for split in config.splits}
    if played := config.iterations * config.tasks * (4 if config.dynamic_sampling == "refill" else 1):
        hashes["train"] = world.tasks_hash(world.train(config.train_types, 0, played))
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores"} | world.versions()
    return {"versions": versions, "commit": commit(), "world": config.env, "games": world.games(),
            "games_hash": hashes, "captions": dict(world.captions),
            "note": world.note(config.settings()), "warning": world.warning()}


def episode_record(episode, credited):
    """An episode for episodes.jsonl, turn by turn; not `credited`, in evaluation, it has no advantages."""
    of_turn = ("observation", "response", "action", "valid", "label", "tag", "advantage", "oracle",
               "verdicts", "judge_reward")
    of_episode = ("group", "won", "score_100", "restarts", "final_observation")
    hidden = {} if credited else {"advantage": None}
    turns = [{name: getattr(turn, name) for name in of_turn} | hidden for turn in episode.turns]
    return {"task_id": episode.task.id, "task_type": episode.task.task_type, "turns": turns} | {
        name: getattr(episode, name) for name in of_episode}
