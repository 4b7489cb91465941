"""A run folder -> Runs, checked: what is not as a run writes it is named by its file and place.

A run folder holds one folder per method; each has `metrics.jsonl`, and may have `evaluation.json`,
`stages.json` and `episodes.jsonl`. Also reads what several seeds gave, from the committed results.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from run import files

RESULTS = Path(__file__).resolve().parent.parent / "results"
WORDS = {dict: "an object", list: "a list", str: "text", float: "a number"}
LARGEST = 1e300      # a number beyond is drawn as little as infinity: 100 times it still has a place


@dataclass(frozen=True, slots=True)
class Run:
    """What one method's folder holds."""

    name: str
    header: dict        # first line of metrics.jsonl: config, versions, commit, started
    lines: list         # the others: one dict per iteration or cold-start step
    evaluation: dict
    stages: dict        # seconds of each stage
    episodes: list
    notes: list         # what could not be read

    def fact(self, key):
        """What the run says of itself, in its evaluation or else at the head of its metrics."""
        return self.evaluation.get(key) or self.header.get(key)

    @property
    def iterations(self):
        """The numbers of the RL iterations that it logged; none for a cold start."""
        return {line["iteration"] for line in self.lines if is_number(line.get("iteration"))}


@dataclass(frozen=True, slots=True)
class Seeds:
    """What several seeds of the same methods gave, from one file of results."""

    file: str           # as it is named in the repository
    count: int
    scores: dict        # {method: {split: {"mean": success, "half": of its 95 % interval}}}


def is_number(value):
    """Whether a JSON value is a number that can be drawn: not null, NaN, true or out of all bounds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


# What is expected

def expect(value, kind, place):
    """The value, if it is of the kind (a number and text may be null). Raises ValueError naming the place."""
    if kind in (float, str) and value is None:
        return value
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
        found = json.dumps(value)
        found = found if len(found) <= 60 else found[:57] + "..."
        raise ValueError(f"{place}: expected {WORDS[kind]}, found {found}")
    return value


def expect_fields(record, kind, names, place):
    """Those of the named fields that a record has are of the kind."""
    for name in names:
        if name in record:
            expect(record[name], kind, f"{place}, {name}")


def check_about(record, place):
    """What a run says of itself, in evaluation.json and at the head of metrics.jsonl."""
    expect_fields(record, dict, ("config", "versions", "captions"), place)
    expect_fields(record, str, ("games", "note", "warning", "started", "commit"), place)
    expect_fields(record, float, ("parameters", "seconds"), place)
    captions = record.get("captions", {})
    expect_fields(captions, str, captions, f"{place}, captions")


def check_metrics(record, place):
    """A line of metrics.jsonl: numbers under "group/name", iteration and step."""
    expect(record, dict, place)
    check_about(record, place)
    expect_fields(record, float, ("iteration", "step", *(name for name in record if "/" in name)), place)


def check_episode(record, place):
    """A line of episodes.jsonl: its place in training, and a list of turns."""
    expect(record, dict, place)
    expect_fields(record, float, ("iteration", "return"), place)
    expect_fields(record, str, ("phase", "split"), place)
    for number, turn in enumerate(expect(record.get("turns", []), list, f"{place}, turns"), start=1):
        expect(turn, dict, f"{place}, turn {number}")
        expect_fields(turn, float, ("advantage", "judge_reward"), f"{place}, turn {number}")
        expect_fields(turn, list, ("verdicts",), f"{place}, turn {number}")


def check_evaluation(record, place):
    """evaluation.json: "splits" is {split: {way of decoding: {"success": ...}}}."""
    expect(record, dict, place)
    check_about(record, place)
    for split, ways in expect(record.get("splits", {}), dict, f"{place}, splits").items():
        for way, scores in expect(ways, dict, f"{place}, {split}").items():
            here = f"{place}, {split}, {way}"
            names = ("success", "n", "plays", "low", "high", "turns", "invalid_frac", "repeated_frac")
            expect_fields(expect(scores, dict, here), float, names, here)


# Reading

def checked_lines(path, check):
    """The checked objects of a .jsonl file, and notes on the lines that a killed run cut short."""
    records, broken = files.read_lines(path)
    for number, record in enumerate(records, start=1):
        check(record, f"{path}, entry {number}")
    where = f"{path.parent.name}/{path.name}"
    return records, [f"{where}: line {number} is cut short (killed run?) and left out" for number in broken]


def read_run(folder):
    """One method's folder -> Run. Raises ValueError for what a run does not write."""
    records, notes = checked_lines(folder / files.METRICS, check_metrics)
    episodes, more_notes = checked_lines(folder / files.EPISODES, check_episode)
    evaluation, stages = files.read_json(folder / files.EVALUATION), files.read_json(folder / files.STAGES)
    check_evaluation(evaluation, folder / files.EVALUATION)
    expect_fields(expect(stages, dict, folder / files.STAGES), float, stages, folder / files.STAGES)
    if "seconds" in evaluation:
        stages = {"evaluation": evaluation["seconds"]} | stages
    header = next((record for record in records if "config" in record), {})
    lines = [record for record in records if "config" not in record]
    return Run(folder.name, header, lines, evaluation, stages, episodes, notes + more_notes)


def read_runs(folder):
    """Every method in a run folder by name, what has no RL iterations (a cold start) first.

    Runs that were set aside, NAME.old-1, are left out. Raises ValueError if there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = sorted(path.parent for path in folder.glob(f"*/{files.METRICS}") if path.stat().st_size
                   and ".old-" not in path.parent.name)
    if not found:
        raise ValueError(f"{folder}: no metrics in it (expected {folder}/<method>/{files.METRICS})")
    return sorted(map(read_run, found), key=lambda run: (bool(run.iterations), run.name))


def seed_scores(result, place, names):
    """{method: {split: {"mean", "half"}}} of the named methods that a file of results has rows of."""
    found = {}
    for method, splits in expect(result.get("rows", {}), dict, f"{place}, rows").items():
        for split, score in expect(splits, dict, f"{place}, {method}").items():
            here = f"{place}, {method}, {split}"
            expect_fields(expect(score, dict, here), float, ("mean", "half"), here)
            if method in names and is_number(score.get("mean")) and is_number(score.get("half")):
                found.setdefault(method, {})[split] = {"mean": score["mean"], "half": score["half"]}
    return found


def read_seeds(runs, folder=RESULTS):
    """What several seeds of these methods gave on these games with as many parameters -> Seeds, or None.

    The first of results/table1_*_result.json that fits counts. A run that was not evaluated fits none.
    """
    games = {run.evaluation["games"] for run in runs if run.evaluation.get("games")}
    sizes = {run.header["parameters"] for run in runs if run.header.get("parameters")}
    for path in sorted(folder.glob("table1_*_result.json")) if games else ():
        result = expect(files.read_json(path), dict, path)
        ran = expect(result.get("ran", {}), dict, f"{path}, ran")
        expect_fields(ran, list, ("games", "parameters"), f"{path}, ran")
        fits = all(name in ran.get("games", []) for name in games) and all(
            size in ran.get("parameters", sizes) for size in sizes)
        scores = seed_scores(result, path, {run.name for run in runs})
        if fits and scores:
            count = len(expect(result.get("seeds", []), list, f"{path}, seeds"))
            return Seeds(f"{folder.name}/{path.name}", count, scores)
    return None
