"""Success per iteration with each loss, from one cold start: GRPO, GSPO, CISPO, Dr. GRPO; one seed, no judge.

    python -m lab.bench.losses               # a quarter of an hour on an idle core; lab/results/losses.json
                                             # and the picture of the curves beside it

One seed shows whether a loss trains, not which is better: docs/results-rooms.md says how far seeds and
machines alone differ. What is in runs/losses already is not run again.
"""

import argparse
import statistics
import subprocess
import sys

from infra import files
from lab.bench.study import ROOT, parse_clean
from lab.studies import common

OUT, RUNS = ROOT / "lab" / "results" / "losses.json", ROOT / "runs" / "losses"
LOSSES = {"grpo": (), "gspo": (), "cispo": (), "dr_grpo": (), "gspo, per turn": ("--sequence", "turn")}
EVALUATED = ("--evaluate", "L0", "--protocol", "sampled")
SEED, ITERATIONS = 0, 80                     # gcd.py's default is 80
LATE = 10                                    # iterations at the end over which a mean is taken


def run(folder, *flags):
    """Do a run of gcd.py, unless the folder holds it; return its command."""
    command = ["gcd.py", *flags, "--out", folder.relative_to(ROOT).as_posix()]
    if not common.is_made(folder, flags):
        subprocess.run([sys.executable, *command, "--overwrite"], cwd=ROOT, check=True)
    return " ".join(["python", *command])


def curve(folder, name):
    """A metric of each iteration, to four digits; None where it was not measured."""
    found = [row.get(name) for row in files.iterations_in(files.read_lines(folder / files.METRICS)[0])]
    return [None if value is None else round(value, 4) for value in found]


def evaluated(folder):
    """{split: its success at temperature 1, with an interval}."""
    splits = files.read_json(folder / files.EVALUATION)["splits"]
    return {split: modes["sampled"] for split, modes in splits.items()}


def row(loss, flags, start):
    """Train with a loss. Returns the curves, and the evaluation at temperature 1."""
    folder = RUNS / f"seed{SEED}_{ITERATIONS}" / loss.replace(", ", "_").replace(" ", "_")
    command = run(folder, "--model", f"{start.relative_to(ROOT)}/checkpoint", "--demonstrations", "0",
                  "--no-gcd", "--algo", loss.partition(",")[0], *flags, *EVALUATED, "--seed", str(SEED),
                  "--iterations", str(ITERATIONS))
    success, head = curve(folder, "rollout/success"), files.read_lines(folder / files.METRICS)[0][0]
    return {"loss": loss, "command": command, "commit": head["commit"], "success": success,
            "clip_frac": curve(folder, "policy/clip_frac"), "evaluated": evaluated(folder)}


def draw(rows, path):
    """Plot success in training of every loss, a mean over LATE iterations."""
    pyplot = common.pyplot("losses")
    figure, axis = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for found in rows:
        success = found["success"]
        smooth = [sum(success[k - LATE:k]) / LATE for k in range(LATE, len(success) + 1)]
        axis.plot(range(LATE, len(success) + 1), smooth, label=found["loss"])
    axis.set(xlabel="RL iteration", ylabel=f"success in training, mean over {LATE} iterations")
    axis.legend(fontsize=8)
    common.save(figure, path)


def main(argv=None):
    """Run what is missing, and write the file."""
    parser = argparse.ArgumentParser("python -m lab.bench.losses", description=__doc__.splitlines()[0])
    parse_clean(parser, argv)
    start = RUNS / f"seed{SEED}" / "cold_start"
    cold = run(start, "--iterations", "0", *EVALUATED, "--seed", str(SEED))
    rows = [row(loss, flags, start) for loss, flags in LOSSES.items()]
    header = files.read_lines(start / files.METRICS)[0][0]
    result = {"command": "python -m lab.bench.losses", "seed": SEED, "commit": header["commit"],
              "versions": header["versions"],
              "cold_start": {"command": cold, "evaluated": evaluated(start)}, "rows": rows}
    files.write_json(OUT, result, indent=None)
    draw(rows, OUT.with_suffix(".svg"))
    for found in rows:
        shares = {split: modes["success"] for split, modes in found["evaluated"].items()}
        print(found["loss"], f"{statistics.fmean(found['success'][-LATE:]):.3f}", shares)


if __name__ == "__main__":
    main()
