"""Means over seeds with their 95 % t intervals, and their formatting in tables.

Needs scipy (`pip install -r requirements-bench.txt`). Left out: the interval of a single run (Wilson's, which
gcd.py logs itself).
"""

import math
import statistics

try:
    from scipy.special import stdtrit  # t.ppf of scipy.stats, which takes a second to import
except ModuleNotFoundError:                               # hours of runs may come before the first interval
    raise SystemExit("scipy is missing: pip install -r requirements-bench.txt") from None


def interval(values):
    """Mean over seeds and half the width of its 95 % t interval (None below two seeds).

    values: {seed: value}. Returns {"mean", "half", "seeds": values}.
    """
    n, known = len(values), list(values.values())
    half = None
    if n > 1:
        half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(known) / math.sqrt(n)
    return {"mean": statistics.fmean(known) if known else None, "half": half, "seeds": values}


def paired(minuend, subtrahend):
    """`interval` of the differences minuend - subtrahend over the seeds that both, {seed: value}, contain."""
    return interval({seed: minuend[seed] - subtrahend[seed] for seed in minuend if seed in subtrahend})


def sign_of(difference):
    """1 or -1 if a difference's interval excludes 0, 0 if not; None without an interval."""
    if difference is None or difference["half"] is None:
        return None
    mean, half = difference["mean"], difference["half"]
    return 0 if abs(mean) <= half else 1 if mean > 0 else -1


def mean_known(values):
    """Mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def percent(result, seeds, sign=""):
    """Format an interval in per cent, with the number of seeds if fewer than `seeds`; None is a dash.

    sign: "+" writes the sign of positive means too.
    """
    if result is None:
        return "–"
    n = len(result["seeds"])
    count = "" if n == seeds else f" ({n}/{seeds})"
    if result["mean"] is None:
        return f"–{count}"
    half = "" if result["half"] is None else f" ± {100 * result['half']:.1f}"
    return f"{100 * result['mean']:{sign}.1f}{half}{count}"


def with_half(result, form=".2f"):
    """Format a mean ± half its interval, if known; None, or an interval without values, is a dash. form: of
    both numbers; a "+" applies to the mean only.
    """
    if result is None or result["mean"] is None:
        return "–"
    half = "" if result["half"] is None else f" ± {result['half']:{form.lstrip('+')}}"
    return f"{result['mean']:{form}}{half}"


def number(value, form=".1f"):
    """Format a number; None is a dash."""
    return "–" if value is None else f"{value:{form}}"


def markdown(head, rows):
    """A Markdown table as text, with a line end. head: list of texts; rows: lists of texts."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:], ""])


def range_of(values, form="{:.0f}"):
    """The smallest and the largest of some numbers as "20–31", or once where they read the same."""
    low, high = (form.format(value) for value in (min(values), max(values)))
    return low if low == high else f"{low}–{high}"
