"""The paper's Table 3 and Figure 7 beside ours: which part of the method brings what, from a study's cells.

The cells are runs of gcd.py (results/table3_household.json), made by bench.table1, which writes their means
and paired differences; here they are drawn and put beside the claims. Left out: running them.

    python -m bench.table1 --config results/table3_household.json     # some eight core-hours, resumable
    python -m studies.ablation                                        # seconds
"""

import argparse
import sys
from pathlib import Path

from bench.intervals import percent
from bench.study import below_root
from run import files
from studies import common

CONFIG = common.ROOT / "results" / "table3_household.json"
# What the figure shows, from the left: rows of the config, and their names
SHOWN = {"plain": "cold start\nplain", "judge": "cold start\n+ judge", "plain+grpo": "GRPO\nplain",
         "plain+gcd": "GCD\nplain", "judge+grpo": "GRPO\n+ judge", "judge+gcd": "GCD\n+ judge",
         "value_head": "value\nhead", "correction": "GCD +\ncorrection"}
CLAIMS = [
    ("Table 3 (judge data in the cold start)", "Imitating judgements too makes a better cold start than "
     "imitating actions alone; a value head makes a worse one.",
     [("judge", "plain", 1), ("value", "plain", -1)]),
    ("Figure 7 (GCD in RL)", "GCD in RL adds to GRPO, whatever the cold start.",
     [("judge+gcd", "judge+grpo", 1), ("plain+gcd", "plain+grpo", 1)]),
    ("Figure 7 (prompt-based correction)", "An instruction from the model's own critiques adds to GCD.",
     [("correction", "nothing", 1), ("correction", "control", 1)]),
]


def says(difference):
    """The sign of a paired difference beyond its 95 % interval, 0 where that holds 0, None without one."""
    if difference is None or difference["half"] is None:
        return None
    mean, half = difference["mean"], difference["half"]
    return 0 if abs(mean) <= half else 1 if mean > 0 else -1


def entry(paper, claim, comparisons, result, split):
    """One of the gallery's entries: yes where every difference has the claimed sign beyond its interval, no
    where one has the other; an interval with 0 in it decides nothing."""
    differences = [(f"{a} - {b}", sign, result["differences"].get(f"{a} - {b}", {}).get(split))
                   for a, b, sign in comparisons]
    said = [says(difference) for _, _, difference in differences]
    wanted = [sign for _, sign, _ in differences]
    agrees = ("not measurable" if None in said else "yes" if said == wanted
              else "no" if any(sign and sign != claimed for sign, claimed in zip(said, wanted))
              else "partly" if any(said) else "not measurable")
    found = "; ".join(f"{name}: {percent(difference, len(result['seeds']), '+')}"
                      for name, _, difference in differences)
    return {"paper": paper, "claim": claim, "agrees": agrees, "picture": "ablation.svg",
            "found": f"On {split}, in points of success: {found}."}


def draw(result, path):
    """Success on every split, a bar a row with its interval over seeds."""
    pyplot = common.pyplot("ablation")
    figure, axis = pyplot.subplots(figsize=(9, 3.8), layout="constrained")
    width = 0.8 / len(result["splits"])
    for k, split in enumerate(result["splits"]):
        rows = [(i, result["rows"][row][split]) for i, row in enumerate(SHOWN) if row in result["rows"]]
        known = [(i, row) for i, row in rows if row["mean"] is not None]
        axis.bar([i + (k - 1) * width for i, _ in known], [100 * row["mean"] for _, row in known], width,
                 yerr=[100 * (row["half"] or 0) for _, row in known], capsize=2, label=split)
    axis.set(xticks=range(len(SHOWN)), xticklabels=SHOWN.values(), ylabel="success, %", ylim=(0, 100))
    axis.legend()
    common.save(figure, path)


def main(argv=None):
    parser = argparse.ArgumentParser("python -m studies.ablation", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="the study whose result is read")
    parser.add_argument("--split", default="L1", help="of the comparisons; the paper's is taken for L1")
    parser.add_argument("--out", type=Path, default=common.OUT, help="folder of what comes out")
    options = parser.parse_args(argv)
    path = options.config.with_name(f"{options.config.stem}_result.json")
    result = files.read_json(path)
    if not result:
        parser.error(f"{path}: not there; run python -m bench.table1 --config {options.config}")
    if options.split not in result["splits"]:
        parser.error(f"--split={options.split}: {path} has {', '.join(result['splits'])}")
    figures = [entry(*claim, result, options.split) for claim in CLAIMS]
    draw(result, options.out / "ablation.svg")
    lines = [f"**{figure['paper']}.** {figure['claim']} {figure['found']} Agrees: {figure['agrees']}."
             for figure in figures]
    head = (f"Read from {path.name}, which names its cells, versions and seeds. Predictions: "
            "studies/predictions.md.")
    page = "\n\n".join(["# Which part brings what (Table 3, Figure 7)", head, "![Success](ablation.svg)",
                        *lines]) + "\n"
    command = ["python", "-m", "studies.ablation", "--config", below_root(options.config)]
    common.publish(options.out, "ablation", command, result["seeds"], {}, figures, page)
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
