"""Fault injection: attacks on runs, and checks of what is left afterwards. Not part of the test suite.

    bash run.sh chaos                # about 20 minutes on 2 cores
    bash run.sh chaos --all          # every try; of the slow attacks the first runs a seeded sample
    bash run.sh chaos --part         # a part of it, under five minutes, as CI runs it
    bash run.sh chaos --only kills   # one attack

Except with --part, each attack's result replaces its own in lab/results/chaos.json as it ends.

Runs are real but tiny, and forked from one process that has imported everything (forked.py). An attack is a
function (stops.py, inputs.py, strangers.py) that yields (what was tried, what went wrong or ""). A try is
survived if the saved checkpoint is intact and resumes to the weights, optimizer and logs of an undisturbed
run, bit for bit; or, for bad input, if the run ends within ten seconds with one clear line and no traceback.
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
from forked import ALL_TRIES, PART, USUAL  # noqa: E402
from inputs import dead_terminals, full_disks, hostile_http, mutations, not_numbers, soak  # noqa: E402
from stops import interrupts, kills, orphans, random_kills, ranks, reruns, two_writers  # noqa: E402
from strangers import (  # noqa: E402
    changed_resumes,
    copies,
    folders,
    hanging_games,
    hostile_games,
    pages,
    pipes,
    plug_ins,
    readers,
    secrets,
    slow_refusals,
    wrong_steps,
)

from infra import files  # noqa: E402

RESULT = ROOT / "lab" / "results" / "chaos.json"
# {attack: (its function, the promise that it tests)}
ATTACKS = {
    "kills": (kills, "a checkpoint is the old one or the new one, and goes on bit for bit"),
    "random kills": (random_kills, "the same, whatever it was doing"),
    "interrupts": (interrupts, "Ctrl-C saves, says what, and the run goes on bit for bit"),
    "reruns": (reruns, "an earlier run is never overwritten"),
    "two writers": (two_writers, "one process at a time writes into a folder"),
    "orphans": (orphans, "runs end when run.sh or torchrun is gone"),
    "ranks": (ranks, "a failing rank ends all ranks; any number of ranks continues"),
    "full disks": (full_disks, "a full disk is one line, and loses nothing that was saved"),
    "mutations": (mutations, "a broken file is named, without a traceback"),
    "not numbers": (not_numbers, "weights that are no numbers are refused"),
    "hostile HTTP": (hostile_http, "a server can neither hang nor flood a run"),
    "dead terminals": (dead_terminals, "a run needs no terminal"),
    "plug-ins": (plug_ins, "a plug-in's mistake is one line: plug-in, place, what came, what was expected"),
    "hostile games": (hostile_games, "no text of a game speaks for the agent or breaks the report"),
    "hanging games": (hanging_games, "a game that asks for a time limit has one; Ctrl-C ends any"),
    "folders": (folders, "any folder's name works; a link is renamed, never what it points to"),
    "copies": (copies, "a run's folder is all that it needs to go on, anywhere and at any time"),
    "changed resumes": (changed_resumes, "what --resume changes is printed; a cut run never seems finished"),
    "keys": (secrets, "no key in an address is stored or printed"),
    "readers": (readers, "a run can be read while it is written"),
    "pages": (pages, "no text runs as a script"),
    "pipes": (pipes, "a closed pipe is quiet, a full disk one line"),
    "slow refusals": (slow_refusals, "what files tell is refused within ten seconds"),
    "wrong steps": (wrong_steps, "a refused call leaves all games where they were"),
    "soak": (soak, "memory and open files do not grow")}


def main(argv=None):
    parser = argparse.ArgumentParser("bash run.sh chaos", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--part", action="store_true", help="a part that takes five minutes")
    parser.add_argument("--all", action="store_true", help="every try, not a sample: about 40 minutes")
    parser.add_argument("--only", choices=ATTACKS, help="one attack")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, began, size = [], time.monotonic(), PART if options.part else ALL_TRIES if options.all else USUAL
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        for name, (attack, promise) in ATTACKS.items():
            if options.only not in (None, name):
                continue
            workdir, started = Path(folder) / name.replace(" ", "_"), time.monotonic()
            workdir.mkdir()
            outcomes = list(attack(workdir, size))
            failures = [f"{tried}: {problem}" for tried, problem in outcomes if problem]
            rows.append({"attack": name, "promise": promise, "what": " ".join(attack.__doc__.split()),
                         "tries": len(outcomes), "survived": len(outcomes) - len(failures),
                         "failures": failures, "seconds": round(time.monotonic() - started, 1)})
            if size != PART and outcomes:
                store(rows[-1], options.all)
            print(f"{name:15} {len(outcomes):5} tries {len(outcomes) - len(failures):5} survived "
                  f"{rows[-1]['seconds']:7.1f} s" + "   not tried here" * (not outcomes), flush=True)
            for failure in failures[:20]:
                print(f"    {failure}", flush=True)
    lost = sum(len(row["failures"]) for row in rows)
    print(f"{sum(row['tries'] for row in rows)} tries, {lost} not survived, {time.monotonic() - began:.0f} s")
    return int(lost > 0)


def store(row, every):
    """Put an attack's row into RESULT, in the order of ATTACKS. every: whether each of its tries was made."""
    row |= {"command": "bash run.sh chaos" + " --all" * every, "commit": files.commit(),
            "python": platform.python_version(), "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    rows = {old["attack"]: old for old in files.read_json(RESULT).get("attacks", [])} | {row["attack"]: row}
    files.write_json(RESULT, {"attacks": [rows[name] for name in ATTACKS if name in rows]})


if __name__ == "__main__":
    sys.exit(main())
