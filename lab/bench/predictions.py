"""Predicted and came out: lab/predictions.md, made of lab/predictions.json and the stored results.

The numbers of claims are also in lab/results/predictions.json, for the gallery (report/gallery.py).

The JSON file is a list of groups, one per study, each with its predictions in the wording in which they were
written before the runs:

    {"study": title, "written": [commits], "results": page, "before": text, "after": text, "predictions": [
        {"id": "hour-5", "text": "...", "claims": [
            {"claim": "GRPO gains", "query": ["table", "table1_x_result.json", "grpo - cold", "L2", "1"],
             "in": [null, 5]}]}]}

A claim is decided by its query and a bound: "in", [lowest, highest], null for none, or "is", a value. Of an
interval the mean is compared, of a list every value. A query is a path or a call, both lists:

    ["studies/twins.json", "rows", {"cold": "coins", "arm": "GRPO"}, "final"]     # a file below lab/results
    ["over", QUERY, QUERY]                                                      # a function of CALLS
    ["given", QUERY, QUERY]                                       # the second's value, once the first has one

A step of a path is a key, an index, [start, end] (a slice), "*" (each element), or {field: value} (the one
element of a list that has these fields). Numbers and texts among a call's arguments are constants; those of
"cells" are a path. Functions of numbers apply to each element of a list.

A claim that no number decides has {"undecided": reason} in place of query and bound. A claim whose runs are
to come has a query, a bound and {"pending": reason}; "pending" is an error as soon as the query has a value.
So no claim is without an outcome: the script fails, and writes nothing, if one is. Left out: reading the
texts; whether the claims cover them is for the reader to judge.

    python -m lab.bench.predictions    # tests/lab/test_predictions.py fails if the page is out of date
"""

import argparse
import functools
import re
import sys

from infra import files
from lab.bench.intervals import interval, markdown, sign_of
from lab.bench.study import RESULTS, ROOT, below_root

SOURCE, PAGE = ROOT / "lab" / "predictions.json", ROOT / "lab" / "predictions.md"
COUNTS = RESULTS / "predictions.json"
GROUP = {"study", "written", "results", "before", "after", "predictions"}
PREDICTION = {"id", "text", "claims"}
DECIDED, UNDECIDED = {"claim", "query"}, {"claim", "undecided"}
HELD, FAILED, OPEN, PENDING = "held", "**failed**", "not decided", "not run yet"
LEAST = 3                                # seeds from which a row of a table decides a claim
SHOWN = 8                                # values of a list that are shown; of a longer one the ends


class Missing(ValueError):
    """A query has no value."""


# Queries

def value_of(query):
    """The value of a query: a number, a text, a truth value, an interval, or a list of these.

    Missing if the results lack it; ValueError for a query that is none.
    """
    if not isinstance(query, list):
        return query
    if not query or not isinstance(query[0], str):
        raise ValueError(f"query {query}: expected a file or a function first")
    if query[0].endswith((".json", ".jsonl")):
        return read(query[0], query[1:])
    if query[0] not in CALLS:
        raise ValueError(f"query {query[0]!r}: expected a file or one of {', '.join(CALLS)}")
    steps = query[0] == "cells"                              # its arguments are a path, not queries
    return CALLS[query[0]](*(query[1:] if steps else map(value_of, query[1:])))


def read(name, steps):
    """The value at a path in a file below lab/results."""
    path = RESULTS / name
    if not path.exists():
        raise Missing(f"{below_root(path)}: no such file")
    return walk(parsed(path, path.stat().st_mtime_ns), steps, name)


@functools.cache
def parsed(path, changed):
    """The content of a file, read once for as long as its time stamp `changed` is the same."""
    return files.read_lines(path)[0] if path.suffix == ".jsonl" else files.read_json(path)


def walk(found, steps, place):
    """Follow the steps of a path from a value."""
    for i, step in enumerate(steps):
        place = f"{place} / {step}"
        if step == "*":
            return [walk(each, steps[i + 1:], place)
                    for each in (found.values() if isinstance(found, dict) else found)]
        if isinstance(step, dict):
            chosen = [each for each in found if all(each.get(key) == step[key] for key in step)]
            if len(chosen) > 1:
                raise ValueError(f"{place}: {len(chosen)} elements, expected one")
            step, found = 0, chosen
        try:
            found = found[slice(*step)] if isinstance(step, list) else found[step]
        except (KeyError, IndexError, TypeError):
            raise Missing(f"{place}: not there") from None
    return found


def known(value):
    """The value; Missing if it, or an element or mean of it, is None."""
    values = value if isinstance(value, list) else [value]
    if not values or any(one is None or is_interval(one) and mean_of(one) is None for one in values):
        raise Missing("has no value")
    return value


def cells(name, prefix, *steps):
    """The values at a path in each cell PREFIX and a seed of a study's .jsonl file, in the order of seeds."""
    found = {}
    for record in read(name, []):
        if re.fullmatch(re.escape(prefix) + r"\d+", record.get("cell", "")):
            found[int(record["cell"].removeprefix(prefix))] = walk(record, steps, f"{name}, {prefix}")
    if not found:
        raise Missing(f"{name}: no cell {prefix}0")
    return [found[seed] for seed in sorted(found)]


def is_interval(value):
    """Whether a value is a mean over seeds, or a value over tasks, with half its interval."""
    return isinstance(value, dict) and "half" in value and ("mean" in value or "value" in value)


def mean_of(value):
    """The mean of an interval; any other value itself."""
    return value.get("mean", value.get("value")) if is_interval(value) else value


def table(name, row, splits, temperatures):
    """Intervals of a row or difference of lab.bench.table1, in per cent or points. splits: "L0 L1".

    Missing with fewer than LEAST seeds.
    """
    found = []
    for split in splits.split():
        for temperature in temperatures.split():
            key = "differences" if " - " in row else "rows"
            part = known(read(name, [key, row, split, *(["t0.4"] if temperature == "0.4" else [])]))
            if len(part["seeds"]) < LEAST:
                raise Missing(f"{name}, {row}: {len(part['seeds'])} seeds")
            found.append(times(part, 100))
    return found if len(found) > 1 else found[0]


def times(value, factor):
    """A number, an interval, or each of a list, times a constant."""
    if isinstance(value, list):
        return [times(one, factor) for one in value]
    if not is_interval(value):
        return value * factor
    half = None if value["half"] is None else value["half"] * abs(factor)
    mean = round(mean_of(known(value)) * factor, 9) + 0.0           # -4e-15, a sum of differences, is 0
    return {"mean": mean, "half": half, "seeds": value.get("seeds", {})}


def each(function):
    """The function applied to numbers or element by element to lists; of an interval its mean is taken."""
    def applied(*values):
        n = max((len(value) for value in values if isinstance(value, list)), default=None)
        if n is None:
            return function(*map(mean_of, map(known, values)))
        columns = [value if isinstance(value, list) else [value] * n for value in values]
        return [applied(*row) for row in zip(*columns, strict=True)]
    return applied


def of_interval(function):
    """The function of mean and half width of one interval or of each in a list; Missing without a width."""
    def applied(value):
        if isinstance(value, list):
            return [applied(one) for one in value]
        if value is None:
            raise Missing("no interval yet")
        if value["half"] is None:
            raise Missing("no interval, as of one seed")
        return function(mean_of(value), value["half"])
    return applied


def side_of_zero(mean, half):
    """Whether an interval includes 0 or lies above or below it."""
    return {0: "includes 0", 1: "above 0", -1: "below 0"}[sign_of({"mean": mean, "half": half})]


def by_seed(found):
    """The values of an interval's seeds, in the order of seeds."""
    return [found["seeds"][seed] for seed in sorted(found["seeds"], key=int)]


def average(values):
    """The mean of a list of numbers; of a list of lists, that of each."""
    return [*map(average, values)] if isinstance(values[0], list) else sum(values) / len(values)


CALLS = {
    "table": table, "cells": cells,
    "minus": each(lambda a, b: a - b), "over": each(lambda a, b: a / b), "times": times,
    "size": each(abs), "list": lambda *values: [*values],
    "low": of_interval(lambda mean, half: mean - half), "high": of_interval(lambda mean, half: mean + half),
    "half": of_interval(lambda mean, half: half), "zero": of_interval(side_of_zero),
    "seeds": by_seed, "joined": lambda a, b: a + b, "n": len, "given": lambda condition, value: value,
    "average": average, "interval": lambda of_seeds: interval(dict(enumerate(of_seeds))),
    "largest": max,
    "above": lambda values, limit: sum(value > limit for value in values),
    "below": lambda values, limit: sum(value < limit for value in values),
    "equal": lambda a, b: sum(x == y for x, y in zip(a, b, strict=True)),
}


# Outcomes

def outcome(claim):
    """(bound as text, what came out as text, verdict) of a claim. ValueError if it has no outcome."""
    if "undecided" in claim:
        if claim.keys() != UNDECIDED or not claim["undecided"]:
            raise ValueError("expected claim and a reason under undecided")
        return "–", claim["undecided"], OPEN
    bounds = [key for key in ("in", "is") if key in claim]
    if claim.keys() - {"pending"} != DECIDED | {*bounds} or len(bounds) != 1:
        raise ValueError("expected a query and one bound, in or is, or else a reason under undecided")
    try:
        value = value_of(claim["query"])
        if value is not None or claim.get("is", 0) is not None:             # "is": null expects no value
            value = known(value)
    except Missing:
        if claim.get("pending"):
            return bound_text(claim), claim["pending"], PENDING
        raise
    except (TypeError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"the query cannot be computed: {type(error).__name__}: {error}") from None
    if "pending" in claim:
        raise ValueError(f"came out as {text_of(value)}: remove pending")
    return bound_text(claim), text_of(value), HELD if holds(value, claim) else FAILED


def holds(value, claim):
    """Whether a value, or each of a list, is within the claim's bound."""
    if "is" in claim and value == claim["is"]:
        return True
    if isinstance(value, list):
        return bool(value) and all(holds(one, claim) for one in value)
    if "is" in claim:
        return False
    low, high = claim["in"]
    number = mean_of(value)
    return (low is None or number >= low) and (high is None or number <= high)


def bound_text(claim):
    """A claim's bound in words."""
    if "is" in claim:
        return text_of(claim["is"])
    low, high = claim["in"]
    if low is None or high is None:
        return f"at most {high:g}" if low is None else f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def text_of(value):
    """A value as text; an interval with its half width and number of seeds."""
    if isinstance(value, list):
        texts = [*map(text_of, value)]
        if len(texts) <= SHOWN or isinstance(value[0], (str, dict)):
            return "; ".join(texts) if texts else "none"
        return f"{text_of(min(value))} to {text_of(max(value))}"
    if isinstance(value, dict):
        n = f" ({len(value['seeds'])} seeds)" if value.get("seeds") else ""
        half = "" if value["half"] is None else f" ± {value['half']:.3g}"
        return f"{mean_of(value):.3g}{half}{n}"
    if value is None:
        return "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# The page

def outcomes(groups):
    """{id: [(claim, bound, came out, verdict)]} of every prediction.

    ValueError, with the prediction and the claim, for one without an outcome, and for a malformed entry.
    """
    found = {}
    for group in groups:
        if group.keys() != GROUP or not group["predictions"]:
            raise ValueError(f"{group.get('study', 'a group')}: expected {', '.join(sorted(GROUP))}")
        for prediction in group["predictions"]:
            name = prediction.get("id", f"a prediction of {group['study']}")
            if prediction.keys() != PREDICTION or not prediction["claims"] or not prediction["text"]:
                raise ValueError(f"{name}: expected an id, a text and at least one claim")
            if name in found:
                raise ValueError(f"{name}: two predictions have this id")
            found[name] = []
            for claim in prediction["claims"]:
                try:
                    found[name].append((claim.get("claim", ""), *outcome(claim)))
                except ValueError as error:
                    raise ValueError(f"{name}, {claim.get('claim', 'a claim')}: {error}") from None
    return found


def page(groups, found):
    """The page's text. found: of `outcomes`."""
    lines = ["# Predicted, and came out", "",
             "Every prediction that was committed before the runs that it is about (except where a section "
             "says which runs were known), in the wording of that time; only paths follow the files. What "
             "came out is read from the stored results below lab/results, claim by claim; numbers are means "
             "over seeds with half their 95 % intervals, and success is in per cent or points. A claim about "
             "several numbers holds if each of them does. A mean is in a range or not, whatever its "
             "interval; that an interval includes 0 holds the more easily the fewer the seeds. Where the "
             "rule of a verdict was mended afterwards, the claim or its section says so. This page is made "
             "from lab/predictions.json by `python -m lab.bench.predictions`, which fails on a claim without "
             "an outcome.", "",
             markdown(["study", "claims", "held", "**failed**", "not decided", "not run yet"],
                      [counts(group["study"], found, [group]) for group in groups]
                      + [counts("all", found, groups)])]
    for group in groups:
        lines += [f"## {group['study']}", "",
                  f"Committed in {', '.join(group['written'])}. Results: {group['results']}.", ""]
        lines += [group["before"], ""] if group["before"] else []
        for prediction in group["predictions"]:
            lines += [f"**{prediction['id']}.** {prediction['text']}", "",
                      markdown(["claim", "predicted", "came out", ""], found[prediction["id"]])]
        lines += [group["after"], ""] if group["after"] else []
    return "\n".join(lines)


def counts(name, found, groups):
    """A row of the first table: the number of claims by verdict."""
    verdicts = [verdict for group in groups for prediction in group["predictions"]
                for *_, verdict in found[prediction["id"]]]
    return [name, *map(str, (len(verdicts), *(verdicts.count(one) for one in (HELD, FAILED, OPEN, PENDING))))]


def by_study(groups, found):
    """{NAME: [claims, held, failed]} of the groups whose results are on the page studies/NAME.md; without
    claims whose runs are to come.
    """
    named = {}
    for group in groups:
        for name in re.findall(r"studies/(\w+)\.md", group["results"]):
            named.setdefault(name, []).append(group)
    numbers = {name: [*map(int, counts(name, found, of_study)[1:])] for name, of_study in named.items()}
    return {name: [claims - to_come, right, wrong]
            for name, (claims, right, wrong, _, to_come) in numbers.items()}


def main(argv=None):
    argparse.ArgumentParser(prog="python -m lab.bench.predictions", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    try:
        groups = files.read_json(SOURCE)
        found = outcomes(groups)
        text, numbers = page(groups, found), by_study(groups, found)
    except ValueError as error:
        print(f"lab.bench.predictions: error: {below_root(SOURCE)}: {error}", file=sys.stderr)
        return 1
    files.write_text(PAGE, text)
    files.write_json(COUNTS, numbers)
    print(f"{below_root(PAGE)}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
