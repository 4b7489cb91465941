"""Reads a run folder into Runs, and checks it: an error names the file and the place in it.

A run folder has one folder per method; each has `metrics.jsonl`, and may have `evaluation.json`,
`stages.json` and `episodes.jsonl`. Also reads results over several seeds from the committed results. Left
out: repair of broken files, except lines that are cut short: of a killed run, or of one that is writing.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from config import PROTOCOLS, WHERE, parse
from infra import files
from infra.files import LARGEST, is_number

RESULTS = Path(__file__).resolve().parent.parent / "lab" / "results"
KIND_NAMES = {dict: "an object", list: "a list", str: "text", float: "a number"}
# Settings in which a run may differ from a table's rows; the evaluation tells which games were played
FREE = {*WHERE, "seed", "games", "protocol", "evaluate_tasks"}


@dataclass(frozen=True, slots=True)
class Run:
    """The content of one method's folder."""

    name: str
    header: dict        # first line of metrics.jsonl: config, versions, commit, started
    lines: list         # other lines: one dict per iteration or cold-start step
    evaluation: dict
    stages: dict        # seconds of each stage
    episodes: list
    notes: list         # on lines that could not be read

    def fact(self, key):
        """The run's value under a key, from evaluation.json or else from the head of metrics.jsonl."""
        return self.evaluation.get(key) or self.header.get(key)

    @property
    def iterations(self):
        """Indices of the RL iterations that it completed; empty for a cold start. Other lines of an
        iteration, such as of the endpoint's labels, come before its own.
        """
        return {line["iteration"] for line in self.lines if is_number(line.get("iteration"))
                and line.get("phase", "rl") == "rl"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table in lab/results: what a run must be to be another seed of it."""

    name: str
    splits: list        # that a run's evaluation gives the row; others are another run's
    start: str          # name of the cold start that it begins from; "": none
    flags: list         # of gcd.py


@dataclass(frozen=True, slots=True)
class Seeds:
    """Results of the same methods over several seeds, from one file of results."""

    file: str           # its path, such as lab/results/table1_household_result.json
    scores: dict        # {run: {split: {"mean": success, "half": half its 95 % CI, "seeds": number}}}

    @property
    def count(self):
        """The number of seeds as text: "5", or "3 to 5" if scores differ in it."""
        counts = {score["seeds"] for splits in self.scores.values() for score in splits.values()}
        return " to ".join(dict.fromkeys([str(min(counts)), str(max(counts))]))


# Checks

def expect(value, kind, place, largest=None):
    """Return the value if it is of this kind (a number or text may be null) and, if it is a number, at most
    `largest`; else raise ValueError.
    """
    if kind in (float, str) and value is None:
        return value
    wrong = not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool)
    if wrong or largest is not None and abs(value) > largest:
        found = json.dumps(value)
        found = found if len(found) <= 60 else found[:57] + "..."
        raise ValueError(f"{place}: expected {KIND_NAMES[kind]}, found {found}")
    return value


def expect_fields(record, kind, names, place, largest=None):
    """`expect` for each of the named fields that the record has."""
    for name in names:
        if name in record:
            expect(record[name], kind, f"{place}, {name}", largest)


def check_about(record, place):
    """Check the types of the fields that describe a run, in evaluation.json or a line of metrics.jsonl.

    place: for the error message.
    """
    expect_fields(record, dict, ("config", "versions", "captions"), place)
    expect_fields(record, str, ("games", "note", "warning", "started", "commit"), place)
    expect_fields(record, float, ("parameters", "seconds"), place)
    captions = record.get("captions", {})
    expect_fields(captions, str, captions, f"{place}, captions")


def check_metrics(record, place):
    """Check a line of metrics.jsonl: numbers under "group/name", iteration and step."""
    expect(record, dict, place)
    check_about(record, place)
    expect_fields(record, float, ("iteration", "step", *(name for name in record if "/" in name)), place)


def check_episode(record, place):
    """Check a line of episodes.jsonl: phase, split, iteration, reward, and a list of turns."""
    expect(record, dict, place)
    expect_fields(record, float, ("iteration", "reward"), place)
    expect_fields(record, str, ("phase", "split"), place)
    for number, turn in enumerate(expect(record.get("turns", []), list, f"{place}, turns"), start=1):
        expect(turn, dict, f"{place}, turn {number}")
        expect_fields(turn, float, ("advantage", "reward", "judge_reward"), f"{place}, turn {number}")
        expect_fields(turn, list, ("verdicts",), f"{place}, turn {number}")


def check_evaluation(record, place):
    """Check evaluation.json: "splits" is {split: {decoding mode: {"success": ...}}}, and "outcomes", which
    older files lack, {split: [{"game": id, "type": task type, decoding mode: "1101"}]}.
    """
    expect(record, dict, place)
    check_about(record, place)
    expect_fields(record, dict, ("player", "games_hash", "prompt"), place)
    expect_fields(record, str, ("protocol", "world"), place)
    expect_fields(record, float, ("temperature", "max_turns"), place, LARGEST)
    for split, games in expect(record.get("outcomes", {}), dict, f"{place}, outcomes").items():
        for number, entry in enumerate(expect(games, list, f"{place}, outcomes of {split}"), start=1):
            check_outcome(entry, f"{place}, outcomes of {split}, game {number}")
    for split, modes in expect(record.get("splits", {}), dict, f"{place}, splits").items():
        for mode, scores in expect(modes, dict, f"{place}, {split}").items():
            here = f"{place}, {split}, {mode}"
            names = ("success", "n", "plays", "low", "high", "turns", "invalid_frac", "repeated_frac",
                     "score_100")
            expect_fields(expect(scores, dict, here), float, names, here, LARGEST)


def check_outcome(entry, place):
    """Check a game's outcomes: its id, and digits for each mode."""
    expect_fields(expect(entry, dict, place), str, entry, place)
    digits = [entry[mode] for mode in entry if mode not in ("game", "type")]
    if not entry.get("game") or not all(text and not text.strip("01") for text in digits):
        raise ValueError(f"{place}: expected a game's id, and digits 0 and 1 for each mode, found "
                         f"{json.dumps(entry)[:200]}")


def check_stages(record, place):
    """Check stages.json: {stage: seconds}."""
    expect_fields(expect(record, dict, place), float, record, place)


# Reading

def checked(value, check, place):
    """The value with null for NaN and infinities, checked. ValueError if it is nested too deeply to write."""
    try:
        value = files.nan_to_null(value)
    except RecursionError:
        raise ValueError(f"{place}: nested too deeply") from None
    check(value, place)
    return value


def checked_lines(path, check):
    """The checked records of a .jsonl file, and notes on lines that are cut short."""
    records, broken = files.read_lines(path)
    records = [checked(record, check, f"{path}, entry {n}") for n, record in enumerate(records, start=1)]
    where = f"{path.parent.name}/{path.name}"
    return records, [f"{where}: line {number} is cut short (killed run, or still writing?) and left out"
                     for number in broken]


def read_run(folder):
    """Read one method's folder into a Run. ValueError if its files are not as a run writes them."""
    records, notes = checked_lines(folder / files.METRICS, check_metrics)
    episodes, more_notes = checked_lines(folder / files.EPISODES, check_episode)
    evaluation, stages = (checked(files.read_json(folder / name), check, folder / name) for name, check in
                          ((files.EVALUATION, check_evaluation), (files.STAGES, check_stages)))
    if "seconds" in evaluation:
        stages = {"evaluation": evaluation["seconds"]} | stages
    headers = [record for record in records if "config" in record]          # a resumed run has several
    commits = dict.fromkeys(header["commit"] for header in headers if header.get("commit"))
    header = headers[0] | {"config": files.settings_in(headers), "commit": ", ".join(commits),
                           "versions": distinct_versions(headers)} if headers else {}
    lines = [record for record in records if "config" not in record]
    name = Path(os.path.abspath(folder)).name                    # of a link its own, which differ where
    return Run(name, header, lines, evaluation, stages, episodes, notes + more_notes)


def distinct_versions(headers):
    """{name: version} in the headers of a run; of one that was resumed with another, "2.13 / 2.14"."""
    found = {}
    for name, version in (item for header in headers for item in header.get("versions", {}).items()):
        found.setdefault(name, {})[str(version)] = True
    return {name: " / ".join(versions) for name, versions in found.items()}


def read_runs(folder):
    """All Runs of a run folder, sorted by name; those without RL iterations (a cold start) come first. Of a
    method's own folder, that one.

    They may be written meanwhile. Runs that were set aside, NAME.old-1, are left out, and those without a
    line in their metrics. ValueError if there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = []
    alone = folder / files.METRICS
    within = [path for path in folder.glob(f"*/{files.METRICS}")
              if not re.search(r"\.old-\d+$", path.parent.name)]
    for path in [alone] if alone.is_file() else within:
        with suppress(FileNotFoundError):                        # set aside at this moment
            found.append(read_run(path.parent))
    runs = [run for run in found if run.header or run.lines or run.notes]
    if not runs:
        raise ValueError(f"{folder}: no metrics in it (expected {files.METRICS}, in it or in folders of it)")
    return sorted(runs, key=lambda run: (bool(run.iterations), run.name))


# Results over several seeds

def rows_of(table):
    """{name of a run: Row} of a table, the content of lab/results/table1_X.json.

    A second training run, on other task types, has them in its name: "grpo-part".
    """
    rows, trainings = {}, table.get("runs", ())
    splits = [split for training in trainings for split in training["splits"]]
    for number, training in enumerate(trainings):
        types = training["train_types"]
        suffix = f"-{types}" if number else ""
        games = ["--games", table["games"]] if table["games"] else []
        environment = ["--env", table.get("env", table["benchmark"]), *games]
        flags = [*environment, "--train-types", types, *table["common"]]
        if not number:                                       # all training runs begin from these
            rows |= {name: Row(name, splits, "", [*flags, *own, "--iterations", "0"])
                     for name, own in table["cold_starts"].items()}
        for name, row in table["rows"].items():
            started = ["--demonstrations", "0"] if row["start"] else []
            rows[name + suffix] = Row(name, training["splits"], row["start"] or "",
                                      [*flags, *row["flags"], *started])
    return rows


def has_settings(config, flags):
    """Whether a run has the settings that gcd.py has by these flags, but for FREE. False for flags that it
    refuses.
    """
    with suppress(ValueError):
        return all(config.get(name) == value for name, value in parse(flags).settings().items()
                   if name not in FREE)
    return False


def seed_scores(table, result, runs):
    """The scores over seeds, as in `Seeds`, of the runs that are other seeds of a table's rows: with a row's
    name, settings and size, from scratch or from the checkpoint of a cold start for which the same holds.

    A cold start that is not among the runs counts by its name. result: the content of the table's file of
    results. Rows of pretrained models have none.
    """
    rows, checkpoints, found = rows_of(table), {"": ""}, {}
    names, sizes = {"", *(run.name for run in runs)}, {*chain(*result["ran"]["parameters"].values())}
    for run in runs:                                         # a cold start comes before what begins with it
        row, config = rows.get(run.name), run.header.get("config", {})
        if not row or "--model" in row.flags or not has_settings(config, row.flags):
            continue
        model = config.get("model")
        starts = (checkpoints.get(row.start) == model if row.start in names
                  else Path(str(model)).parent.name == row.start)      # an old run may not have it
        if starts and has_size(run.header.get("parameters"), sizes):
            checkpoints[run.name] = f"{config.get('out')}/{files.CHECKPOINT}"
            of_row = result["rows"].get(row.name, {})
            found[run.name] = {
                split: {"mean": score["mean"], "half": score["half"], "seeds": len(score["seeds"])}
                for split in row.splits if fits(score := of_row.get(split, {}), run, split)}
    return {name: scores for name, scores in found.items() if scores}


def has_size(parameters, sizes):
    """Whether a model is about as large as one of a table's: a vocabulary differs with the seed's games, by
    less than 1 %, and an older version of the small model by more. True if a number is not known.
    """
    return not (parameters and sizes) or any(abs(parameters / size - 1) < 0.01 for size in sizes)


def fits(score, run, split):
    """Whether a row's score on a split is known, and of as many games as the run has played."""
    sampled = run.evaluation.get("splits", {}).get(split, {}).get("sampled", {})
    games = (sampled.get("n") or 0) // (sampled.get("plays") or 1)
    played = {games * protocol.plays for protocol in PROTOCOLS.values()}
    known = is_number(score.get("mean")) and is_number(score.get("half"))
    return known and games > 0 and {*score.get("n", ())} <= played


def read_seeds(runs, folder=RESULTS):
    """Results over several seeds of the runs that are other seeds of rows of a table, on as many of the same
    games: Seeds, or None.

    Of several tables in lab/results the one with most of the runs, and of these the one with most seeds.
    """
    games = {run.evaluation["games"] for run in runs if run.evaluation.get("games")}
    protocols = [PROTOCOLS.get(run.evaluation.get("protocol", "full")) for run in runs]
    if any(protocol is None or protocol.draws for protocol in protocols):
        return None                                          # other games and turns than a table's
    found = []
    for path in sorted(folder.glob("table1_*_result.json")) if games else ():
        result, table = files.read_json(path), files.read_json(str(path).replace("_result.json", ".json"))
        if games <= {*result["ran"]["games"]} and (scores := seed_scores(table, result, runs)):
            found.append((len(scores), len(result["seeds"]), Seeds("/".join(path.parts[-3:]), scores)))
    return max(found, key=lambda entry: entry[:2], default=(None,))[-1]
