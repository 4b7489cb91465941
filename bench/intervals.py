"""Means over seeds with their 95 % t intervals, and how a table prints them.

Needs scipy (`pip install -r requirements-bench.txt`). Left out: the interval of a single run (Wilson's, which
gcd.py logs itself).
"""

import math
import statistics

try:
    from scipy import stats
except ModuleNotFoundError:                               # hours of runs may come before the first interval
    raise SystemExit("scipy is missing: pip install -r requirements-bench.txt") from None


def interval(values):
    """Mean over seeds and half its 95 % t interval (None below two seeds). values: {seed: value}."""
    n, known = len(values), list(values.values())
    half = None
    if n > 1:
        half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(known) / math.sqrt(n)
    return {"mean": statistics.fmean(known) if known else None, "half": half, "seeds": values}


def paired(minuend, subtrahend):
    """The interval of the differences, seed by seed, over the seeds that both have. Both: {seed: value}."""
    return interval({seed: minuend[seed] - subtrahend[seed] for seed in minuend if seed in subtrahend})


def mean_known(values):
    """The mean of the values that are numbers; None without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def percent(result, seeds, sign=""):
    """An interval in per cent, and of how many seeds where not all `seeds` are there. None is a dash."""
    if result is None:
        return "–"
    there = len(result["seeds"])
    count = "" if there == seeds else f" ({there}/{seeds})"
    if result["mean"] is None:
        return f"–{count}"
    half = "" if result["half"] is None else f" ± {100 * result['half']:.1f}"
    return f"{100 * result['mean']:{sign}.1f}{half}{count}"


def with_half(result, form=".2f"):
    """A mean, and half its interval where there is one, as text; the form's sign is the mean's alone."""
    half = "" if result["half"] is None else f" ± {result['half']:{form.lstrip('+')}}"
    return f"{result['mean']:{form}}{half}"


def number(value, form=".1f"):
    """A number as text; None is a dash."""
    return "–" if value is None else f"{value:{form}}"


def markdown(head, rows):
    """The lines of a table, an empty one after it; head and rows are lists of texts."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]
