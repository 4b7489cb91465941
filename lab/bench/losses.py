"""Success per iteration with each loss, from one cold start: GRPO, GSPO, CISPO, Dr. GRPO; one seed, no judge.

    python -m lab.bench.losses               # a quarter of an hour on an idle core; lab/results/losses.json
                                             # and the picture of the curves beside it

One seed shows whether a loss trains, not which is better: docs/results.md says how far seeds and machines
alone differ. What is in runs/losses already is not run again.
"""

import argparse
import json
import statistics
import subprocess
import sys

from infra import files
from lab.bench.study import ROOT, parse_clean
from lab.studies import common

OUT, RUNS = ROOT / "lab" / "results" / "losses.json", ROOT / "runs" / "losses"
LOSSES = {"grpo": (), "gspo": (), "cispo": (), "dr_grpo": (), "gspo, per turn": ("--sequence", "turn")}
EVALUATED = ("--evaluate", "L0", "--protocol", "sampled")
LATE = 10                                    # iterations at the end over which a mean is taken


def run(folder, *flags):
    """Do a run of gcd.py, unless the folder holds it; return its command."""
    command = ["gcd.py", *flags, "--out", folder.relative_to(ROOT).as_posix()]
    if not (folder / files.STAGES).exists():
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


def row(loss, flags, start, seed, iterations):
    """Train with a loss. Returns the curves, the mean of the last, and the evaluation at temperature 1."""
    folder = RUNS / f"seed{seed}_{iterations}" / loss.replace(", ", "_").replace(" ", "_")
    command = run(folder, "--model", f"{start.relative_to(ROOT)}/checkpoint", "--demonstrations", "0",
                  "--no-gcd", "--algo", loss.partition(",")[0], *flags, *EVALUATED, "--seed", str(seed),
                  "--iterations", str(iterations))
    success, head = curve(folder, "rollout/success"), files.read_lines(folder / files.METRICS)[0][0]
    return {"loss": loss, "command": command, "commit": head["commit"], "success": success,
            "late": round(statistics.fmean(success[-LATE:]), 4),
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=80, help="gcd.py's default is 80")
    options = parse_clean(parser, argv)
    seed, iterations = options.seed, options.iterations
    start = RUNS / f"seed{seed}" / "cold_start"
    cold = run(start, "--iterations", "0", *EVALUATED, "--seed", str(seed))
    rows = [row(loss, flags, start, seed, iterations) for loss, flags in LOSSES.items()]
    header = files.read_lines(start / files.METRICS)[0][0]
    result = {"command": f"python -m lab.bench.losses --seed {seed} --iterations {iterations}",
              "seed": seed, "commit": header["commit"], "versions": header["versions"],
              "cold_start": {"command": cold, "evaluated": evaluated(start)}, "rows": rows}
    files.write_text(OUT, json.dumps(result) + "\n")
    draw(rows, OUT.with_suffix(".svg"))
    for found in rows:
        shares = {split: modes["success"] for split, modes in found["evaluated"].items()}
        print(found["loss"], found["late"], shares)


if __name__ == "__main__":
    main()
