"""What pretraining buys: success against demonstrations, SmolLM2-135M beside the small model from scratch.

The cells are runs of gcd.py (lab/results/table1_pretraining.json): a cold start of one pass over 24, 96 or
300 demonstrations of four task types, and 48 tasks of each split (L0 and L1 of these types, L2 of two that
nothing showed). lab.bench.table1 runs them and computes means and paired differences; this study plots them.
Left out: running the cells.

    python -m lab.bench.table1 --config lab/results/table1_pretraining.json --jobs 1    # 3 core-hours
    python -m lab.studies.pretraining                                                   # seconds

A finished run of SmolLM2 leaves 1.6 GB in runs/table1/pretraining, which may go once its cell is stored.
"""

import argparse
import re
import sys
from pathlib import Path

from lab.bench.intervals import interval, percent, sign_of
from lab.studies import common

CONFIG = common.ROOT / "lab" / "results" / "table1_pretraining.json"
MODELS = {"smollm2": ("SmolLM2", "tab:blue"), "small": ("small model, from scratch", "tab:orange")}
COUNTS = (24, 96, 300)
TEN_PASSES = "small_300_ten_passes"                        # a row that is no point of the small model's line
AT = {"1": "-", "0.4": "--"}                               # temperatures and their lines


def at(row, split, temperature):
    """A row's interval of success on a split at a temperature; without values if it has none."""
    found = row[split]
    return (found if temperature == "1" else found["t0.4"]) or interval({})


def points(result, model, split, temperature):
    """{number of demonstrations: interval of success} of a model's rows of one pass that have a value."""
    found = {}
    for name, row in result["rows"].items():
        match, of_row = re.fullmatch(rf"{model}_(\d+)", name), at(row, split, temperature)
        if match and of_row["mean"] is not None:
            found[int(match[1])] = of_row
    return dict(sorted(found.items()))


def draw(result, path):
    """Plot success against demonstrations, a panel per split, a line per model and temperature."""
    pyplot = common.pyplot("pretraining")
    figure, panels = pyplot.subplots(1, len(result["splits"]), figsize=(4 * len(result["splits"]), 3.6),
                                     sharey=True, layout="constrained", squeeze=False)
    for axes, split in zip(panels[0], result["splits"]):
        for model, (label, color) in MODELS.items():
            for temperature, line in AT.items():
                known = points(result, model, split, temperature)
                axes.errorbar([*known], [100 * found["mean"] for found in known.values()],
                              [100 * (found["half"] or 0) for found in known.values()], fmt=f"o{line}",
                              color=color, capsize=2, markersize=4, label=f"{label}, at {temperature}")
        passes = result["rows"].get(TEN_PASSES)
        if passes and (found := at(passes, split, "1"))["mean"] is not None:
            axes.errorbar([300], [100 * found["mean"]], [100 * (found["half"] or 0)], fmt="x",
                          color=MODELS["small"][1], capsize=2, label="the same in ten passes, at 1")
        axes.set(title=split, xlabel="demonstrations", xscale="log", ylim=(0, 100))
    panels[0][0].set_ylabel("success, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=5)
    common.save(figure, path)


def figures_of(result):
    """What was found, for the gallery: SmolLM2 less the small model after equally many demonstrations.

    Agrees by the differences on each split after the most of them, 300: see `common.agreement`.
    """
    texts, most = [], result["differences"].get(f"smollm2_{COUNTS[-1]} - small_{COUNTS[-1]}", {})
    for n in COUNTS:
        name = f"smollm2_{n} - small_{n}"
        less = result["differences"].get(name, {})
        texts.append(f"{n}: " + " / ".join(percent(less.get(split), len(result["seeds"]), "+")
                                           for split in result["splits"]))
    unseen = "; ".join(f"{name} {percent(row['L2'], len(result['seeds']))}" for name, row in
                       result["rows"].items() if "L2" in row)
    return [{"paper": "What pretraining buys", "picture": "pretraining.svg",
             "claim": "The paper's models are pretrained: 300 demonstrations make a start for RL.",
             "found": f"SmolLM2 less the small model, points of success at temperature 1 on "
                      f"{' / '.join(result['splits'])}, by demonstrations: {'; '.join(texts)}. On L2, whose "
                      f"types no demonstration showed, in per cent: {unseen}.",
             "agrees": common.agreement([(sign_of(most.get(split)), 1) for split in result["splits"]])}]


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.pretraining",
                                     description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="the table whose result is read")
    parser.add_argument("--out", type=Path, default=common.OUT, help="output folder")
    options = parser.parse_args(argv)
    result = common.result_of_table(parser, options.config)
    draw(result, options.out / "pretraining.svg")
    common.publish_of_table(options, "pretraining", "What pretraining buys", result, figures_of(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
