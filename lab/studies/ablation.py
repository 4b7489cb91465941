"""Ablations: what each part of the method contributes, compared with the paper's Table 3 and Figure 7.

The cells are runs of gcd.py (lab/results/table3_household.json). lab.bench.table1 runs them and computes
means and paired differences; this study plots them and tests the paper's claims. Left out: running the cells.

    python -m lab.bench.table1 --config lab/results/table3_household.json   # about 8 core-hours, resumable
    python -m lab.studies.ablation                                          # seconds
"""

import argparse
import sys
from pathlib import Path

from lab.bench.intervals import percent, sign_of
from lab.studies import common

CONFIG = common.ROOT / "lab" / "results" / "table3_household.json"
SPLIT = "L1"                  # the paper's is taken to be this one
# The figure's bars, from the left: {row of the config: label}
BARS = {"plain": "cold start\nplain", "judge": "cold start\n+ judge", "plain+grpo": "GRPO\nplain",
         "judge+grpo": "GRPO\n+ judge", "judge+gcd": "GCD\n+ judge",
         "value_head": "value\nhead", "correction": "GCD +\ncorrection"}
CLAIMS = [
    ("Table 3 (judge data in the cold start)", "Judge questions in the demonstrations make a better cold "
     "start than actions alone; a value head makes a worse one.",
     [("judge", "plain", 1), ("value", "plain", -1)]),
    ("Figure 7 (GCD in RL)", "Training the actor as a classifier in RL improves on GRPO.",
     [("judge+gcd", "judge+grpo", 1)]),
    ("Figure 7 (prompt-based correction)", "An instruction from the model's own critiques improves on GCD.",
     [("correction", "nothing", 1), ("correction", "control", 1)]),
]


def entry(paper, claim, comparisons, result, split, note=""):
    """An entry of the gallery. comparisons: (row, row, claimed sign of their difference); note: appended.

    Agrees: see `common.agreement`.
    """
    differences = [(f"{a} - {b}", sign, result["differences"].get(f"{a} - {b}", {}).get(split))
                   for a, b, sign in comparisons]
    agrees = common.agreement([(sign_of(difference), sign) for _, sign, difference in differences])
    found = "; ".join(f"{name}: {percent(difference, len(result['seeds']), '+')}"
                      for name, _, difference in differences)
    return {"paper": paper, "claim": claim, "agrees": agrees, "picture": "ablation.svg",
            "found": f"On {split}, in points of success: {found}.{note}"}


def package(result):
    """The full method against plain GRPO, and what GCD does from the plain cold start, as sentences.

    "" for what is not in the result.
    """
    differences, text = result["differences"], ""
    if full := differences.get("judge+gcd - plain+grpo"):
        values = " / ".join(percent(full[split], len(result["seeds"]), "+") for split in result["splits"])
        text = (" The full method, judge questions in the cold start and GCD in RL, minus GRPO from the "
                f"plain cold start (judge+gcd - plain+grpo): {values} on {' / '.join(result['splits'])}.")
        if all(sign_of(full[split]) == -1 for split in result["splits"]):
            text += " It is worse on every split."
    plain = differences.get("plain+gcd - plain+grpo")
    if plain and not any(any(plain[split]["seeds"].values()) for split in result["splits"]):
        text += (" From the plain cold start GCD is GRPO, with equal results in every seed: that model never "
                 "gives a readable verdict, so all its answers to the judge's questions get the same reward. "
                 "This difference of 0 says nothing about GCD, and is not counted.")
    return text


def draw(result, path):
    """Plot the success on every split, a bar per row with its interval over seeds."""
    pyplot = common.pyplot("ablation")
    figure, axis = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    width = 0.8 / len(result["splits"])
    for k, split in enumerate(result["splits"]):
        rows = [(i, result["rows"][row][split]) for i, row in enumerate(BARS) if row in result["rows"]]
        known = [(i, row) for i, row in rows if row["mean"] is not None]
        axis.bar([i + (k - 1) * width for i, _ in known], [100 * row["mean"] for _, row in known], width,
                 yerr=[100 * (row["half"] or 0) for _, row in known], capsize=2, label=split)
    axis.set(xticks=range(len(BARS)), xticklabels=BARS.values(), ylabel="success, %", ylim=(0, 100))
    axis.legend()
    common.save(figure, path)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.ablation", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="the study whose result is read")
    parser.add_argument("--out", type=Path, default=common.OUT, help="output folder")
    options = parser.parse_args(argv)
    result = common.result_of_table(parser, options.config)
    figures = [entry(*claim, result, SPLIT, package(result) if "GCD in RL" in claim[0] else "")
               for claim in CLAIMS]
    draw(result, options.out / "ablation.svg")
    common.publish_of_table(options, "ablation", "What each part contributes (Table 3, Figure 7)", result,
                            figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
