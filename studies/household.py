"""Five seeds of cold start, GRPO, GRPO+GCD and its control on the generated rooms: results/household.json.

Each seed is a cold start of its own (and one without judge demonstrations), and the RL runs of a seed start
from the same one, so differences are paired. A cell is one run of gcd.py with the flags of
results/config.json; a finished cell is not run again, so this can be stopped and started at will. Two seeds
run at a time (--jobs), each one cell after the other on one CPU thread.

    python -m studies.household                    # run what is missing, then write and print the table
    python -m studies.household --jobs 0           # only the table, from what is there
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RUNS, RESULTS = ROOT / "runs" / "household", ROOT / "results"
SPLITS = ("L0", "L1", "L2")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}       # two-sided 95 % quantile of Student's t, by seeds
JUDGE = ("balanced_accuracy", "auc", "balanced_accuracy_oracle", "auc_oracle", "auc_oracle_within_verbs",
         "variance_frac", "grad_ratio", "grad_cosine")      # reported as means over the last ten iterations
DIFFERENCES = (("grpo", "cold_start"), ("grpo+gcd", "cold_start"), ("grpo+gcd", "grpo"),
               ("grpo+shuffled", "grpo"), ("grpo+gcd", "grpo+shuffled"), ("cold_start", "cold_start_plain"))


def command(config, method, seed):
    """The arguments of gcd.py for one cell."""
    flags = [*config["common"], *config["methods"][method]]
    flags += ["--seed", str(seed), "--out", str(cell(method, seed))]
    if method.startswith("grpo"):
        flags += ["--demonstrations", "0", "--model", str(cell("cold_start", seed) / "checkpoint")]
    return [sys.executable, "gcd.py", *flags]


def cell(method, seed):
    """The output folder of one run."""
    return RUNS / f"seed{seed}" / method


def run_cell(config, method, seed):
    """Run one cell unless it is finished; its output goes to a log beside it."""
    folder = cell(method, seed)
    if (folder / "stages.json").exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f"{method}.log", "w", encoding="utf-8") as log:
        done = subprocess.run(command(config, method, seed), cwd=ROOT, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise RuntimeError(f"{folder}: gcd.py ended with {done.returncode}; see {log.name}")


def run_seed(config, seed, advance):
    """A seed's cells in order: cold starts first, then what starts from them."""
    for method in sorted(config["methods"], key=lambda m: m.startswith("grpo")):
        run_cell(config, method, seed)
        advance()


def interval(values):
    """Mean over seeds and the half width of its 95 % t interval (nan for one seed)."""
    n = len(values)
    half = T_95[n] * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
    return {"mean": statistics.fmean(values), "low": statistics.fmean(values) - half,
            "high": statistics.fmean(values) + half, "seeds": values}


def collect(config):
    """Every finished seed's evaluations → means and paired differences; only seeds with all cells count."""
    seeds = [s for s in config["seeds"]
             if all((cell(m, s) / "stages.json").exists() for m in config["methods"])]
    success = {m: {split: [read(m, s)["splits"][split] for s in seeds] for split in SPLITS}
               for m in config["methods"]}
    headline = {m: {split: [e["sampled"]["success"] for e in success[m][split]] for split in SPLITS}
                for m in success}
    result = {"what": "success at temperature 1 on 256 tasks a split of generated rooms; "
                      "mean over seeds, 95 % t interval",
              "command": "python -m studies.household", "seeds": seeds,
              "games": "generated rooms, not ALFWorld's",
              "versions": log_of("cold_start", seeds[0])[0]["versions"] if seeds else {},
              "commits": sorted({log_of(m, s)[0]["commit"] for m in config["methods"] for s in seeds}),
              "methods": {}, "differences": {}, "judge": {}, "seconds": {}}
    for m in success if seeds else ():
        result["methods"][m] = {split: interval(headline[m][split]) | {
            "greedy": statistics.fmean(e["greedy"]["success"] for e in success[m][split]),
            "t0.4": statistics.fmean(e["t0.4"]["success"] for e in success[m][split]),
            "invalid_frac": statistics.fmean(e["sampled"]["invalid_frac"] for e in success[m][split]),
            "repeated_frac": statistics.fmean(e["sampled"]["repeated_frac"] for e in success[m][split]),
            "turns": statistics.fmean(e["sampled"]["turns"] for e in success[m][split])} for split in SPLITS}
        if judged := [row for s in seeds for row in log_of(m, s)[-10:] if "judge/auc" in row]:
            result["judge"][m] = {key: mean_known(row["judge/" + key] for row in judged) for key in JUDGE}
        stages = [json.loads((cell(m, s) / "stages.json").read_text()) for s in seeds]
        result["seconds"][m] = {k: statistics.fmean(s[k] for s in stages) for k in stages[0]}
    for a, b in DIFFERENCES if seeds else ():
        if a in headline and b in headline:
            result["differences"][f"{a} - {b}"] = {
                split: interval([x - y for x, y in zip(headline[a][split], headline[b][split])])
                for split in SPLITS}
    return result


def read(method, seed):
    return json.loads((cell(method, seed) / "evaluation.json").read_text())


def log_of(method, seed):
    """The objects of a run's metrics.jsonl: first its versions, commit and settings."""
    with open(cell(method, seed) / "metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def mean_known(values):
    """The mean of the values that are numbers; nan without any."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else math.nan


def table(result):
    """Markdown rows for the README: success in per cent, differences in points."""
    def show(x, sign=""):
        return f"{100 * x['mean']:{sign}.1f} [{100 * x['low']:{sign}.1f}, {100 * x['high']:{sign}.1f}]"
    lines = [f"| {len(result['seeds'])} seeds | L0 | L1 | L2 |", "|---|---|---|---|"]
    lines += [f"| {m} | " + " | ".join(show(own[s]) for s in SPLITS) + " |"
              for m, own in result["methods"].items()]
    lines += [f"| {d} | " + " | ".join(show(own[s], "+") for s in SPLITS) + " |"
              for d, own in result["differences"].items()]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="seeds run at a time; 0: only the table")
    jobs = parser.parse_args().jobs
    config = json.loads((RESULTS / "config.json").read_text())
    with tqdm(total=len(config["seeds"]) * len(config["methods"]), unit="cell", disable=not jobs) as bar:
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            for done in [pool.submit(run_seed, config, seed, bar.update) for seed in config["seeds"] if jobs]:
                done.result()
    result = collect(config)
    (RESULTS / "household.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
