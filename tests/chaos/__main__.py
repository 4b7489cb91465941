"""Fault injection: attacks on runs, and checks of what is left afterwards. Not part of the test suite.

    bash run.sh chaos                # everything, about 20 minutes on 2 cores; writes lab/results/chaos.json
    bash run.sh chaos --part         # a part of it, under five minutes, as CI runs it; writes nothing
    bash run.sh chaos --only kills   # one attack

Runs are real but tiny, and forked from one process that has imported everything (forked.py). An attack is a
function (stops.py, inputs.py) that yields (what was tried, what went wrong or ""). A try is survived if the
saved checkpoint is intact and resumes to the weights, optimizer and logs of an undisturbed run, bit for bit;
or, for bad input, if the run ends within ten seconds with one clear line and no traceback.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from inputs import dead_terminals, full_disks, hostile_http, mutations, not_numbers, soak  # noqa: E402
from stops import interrupts, kills, orphans, random_kills, ranks, reruns, two_writers  # noqa: E402

from infra import files  # noqa: E402

RESULT = ROOT / "lab" / "results" / "chaos.json"
ATTACKS = {"kills": kills, "random kills": random_kills, "interrupts": interrupts, "reruns": reruns,
           "two writers": two_writers, "orphans": orphans, "ranks": ranks, "full disks": full_disks,
           "mutations": mutations, "not numbers": not_numbers, "hostile HTTP": hostile_http,
           "dead terminals": dead_terminals, "soak": soak}


def main(argv=None):
    parser = argparse.ArgumentParser("bash run.sh chaos", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--part", action="store_true", help="a part that takes five minutes")
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        for name, attack in ATTACKS.items():
            if options.only not in (None, name):
                continue
            workdir, started = Path(folder) / name.replace(" ", "_"), time.monotonic()
            workdir.mkdir()
            outcomes = list(attack(workdir, options.part))
            failures = [f"{tried}: {problem}" for tried, problem in outcomes if problem]
            rows.append({"attack": name, "what": " ".join(attack.__doc__.split()), "tries": len(outcomes),
                         "survived": len(outcomes) - len(failures), "failures": failures,
                         "seconds": round(time.monotonic() - started, 1)})
            print(f"{name:15} {len(outcomes):5} tries {len(outcomes) - len(failures):5} survived "
                  f"{rows[-1]['seconds']:7.1f} s", flush=True)
            for failure in failures[:20]:
                print(f"    {failure}", flush=True)
    lost = sum(len(row["failures"]) for row in rows)
    print(f"{sum(row['tries'] for row in rows)} tries, {lost} not survived, {time.monotonic() - began:.0f} s")
    if not options.part and not options.only:
        files.write_json(RESULT, {
            "command": "bash run.sh chaos", "commit": files.commit(), "python": platform.python_version(),
            "torch": torch.__version__, "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "attacks": rows})
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
