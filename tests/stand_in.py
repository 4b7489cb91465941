"""A stand-in for gcd.py that writes a run's files in milliseconds, and a small study that uses it."""

import json
import sys

from infra.signals import Stop
from lab.bench import study, table1

# Acts as gcd.py: logs its call, fails or waits if the file `fail` or `wait` asks for it, and writes a run's
# files. Success depends on row and seed: grpo 0.5 + seed / 10, others 0.25; 0.02 more at temperature 0.4.
STAND_IN = '''
import json, os, pathlib, signal, sys, time
argv = sys.argv[1:]
flag = lambda name, default="": ([default] + [argv[i + 1] for i, a in enumerate(argv) if a == name])[-1]
out, seed = pathlib.Path(flag("--out")), int(flag("--seed"))
here = pathlib.Path(__file__).parent
with open(here / "calls.jsonl", "a") as calls:
    calls.write(json.dumps({"row": out.name, "seed": seed, "argv": argv}) + "\\n")
(out / "checkpoint").mkdir(parents=True, exist_ok=True)
model = pathlib.Path(flag("--model", "."))
assert model.is_dir(), model
if (here / "fail").exists() and out.name in (here / "fail").read_text().split():
    sys.exit(1)
rate = 0.5 + seed / 10 if out.name == "grpo" else 0.25
iterations = int(flag("--iterations", "0"))
rows = [{"config": {"lr": float(flag("--lr", "6e-4")), "iterations": iterations}, "commit": "abc",
         "versions": {"python": "3", "machine": "a toy"}, "parameters": 1234, "started": "now"}]
judge_s = 1.0 if "--gcd" in argv else 0.0
slow = 10.0 if "seconds" in out.name else 0.0          # lab.bench.table4 does not count the first iteration
for i in range(iterations):
    rows.append({"phase": "rl", "iteration": i, "rollout/success": i / 100,
                 "judge/auc": i / 10 if "--gcd" in argv else None,
                 "time/rollout_s": 2.0 + slow * (i == 0), "time/judge_s": judge_s, "time/update_s": 1.0})
resumed = (out / "checkpoint" / "trainer.pt").exists()
with open(out / "metrics.jsonl", "a" if resumed else "w") as log:
    log.writelines(json.dumps(row) + "\\n" for row in rows)
if (here / "wait").exists():
    (out / "checkpoint" / "trainer.pt").touch()
    def stop(*_):
        with open(here / "asked", "a") as signals:
            signals.write("once")
        time.sleep(0.2)
        sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    (here / "waiting").touch()
    time.sleep(60)
modes = lambda x: {m: {"success": x + higher, "n": 20, "turns": 3.0, "invalid_frac": 0.1}
                   for m, higher in (("sampled", 0.0), ("greedy", 0.0), ("t0.4", 0.02))}
splits = {s: modes(rate) for s in flag("--evaluate").split(",")}
if flag("--evaluate") == "none":
    sys.exit()
(out / "evaluation.json").write_text(json.dumps({"splits": splits, "games": "toy games"}))
(out / "stages.json").write_text(json.dumps({"rl": 1.0}))
'''
CONFIG = {
    "what": "a test", "benchmark": "household", "model": "", "games": "",
    "runs": [{"train_types": "part", "splits": ["L0", "L2"]}], "seeds": [0, 1], "paper_model": "Qwen2.5-1.5B",
    "common": ["--preset", "small", "--lr", "6e-4", "--iterations", "12"],
    "cold_starts": {"cold_plain": ["--demonstrations", "5"], "cold": ["--demonstrations", "7"]},
    "rows": {"vanilla": {"start": None, "flags": ["--demonstrations", "0", "--iterations", "0"],
                         "paper": "Vanilla"},
             "grpo": {"start": "cold", "flags": ["--no-gcd"], "paper": "GRPO"},
             "grpo+gcd": {"start": "cold", "flags": ["--gcd"], "paper": "GRPO with GCD"},
             "grpo+gcd@75": {"start": "cold", "flags": ["--gcd", "--iterations", "9"], "paper": None}},
    "differences": [["grpo", "grpo+gcd"]]}


class Bench:
    """The stand-in, a study's config file and their output, all in one folder."""

    def __init__(self, folder):
        self.folder, self.config_file = folder, folder / "study.json"
        (folder / "stand_in.py").write_text(STAND_IN)
        self.write(CONFIG)

    def write(self, config):
        self.config_file.write_text(json.dumps(config))

    def main(self, *flags):
        return table1.main(["--config", str(self.config_file), "--jobs", "1", *flags])

    def calls(self):
        """(row, seed) of each call of gcd.py so far, in order."""
        log = self.folder / "calls.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [(call["row"], call["seed"]) for call in map(json.loads, lines)]

    def argv(self, k):
        return json.loads((self.folder / "calls.jsonl").read_text().splitlines()[k])["argv"]

    def result(self):
        return json.loads((self.folder / "study_result.json").read_text())


def toy_bench(folder, monkeypatch):
    """The fixture `bench`: a Bench whose runs and results are in `folder`. Restores the signal handlers."""
    monkeypatch.setattr(study, "RUNS", folder / "runs")
    monkeypatch.setattr(study, "RESULTS", folder / "lab" / "results")
    monkeypatch.setattr(study, "GCD", (sys.executable, str(folder / "stand_in.py")))
    with Stop.restored():
        yield Bench(folder)
