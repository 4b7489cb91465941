"""What a reader follows from reward to loss: files, returns and frames, counted by a profiler in a tiny run.

    python -m lab.bench.trips            # half a minute on a CPU

The path begins where `write_rewards` is called and ends at `backward`, in one iteration of GRPO without a
judge. An entry is a call from one project file into another; a call site counts once, however often a loop
runs it. A return is an entry into a file that was entered before. Frames are the functions from
`gcd.iteration` to the clipped loss, both included. The model's own forward pass (lm/) and imports that wait
(infra/lazy.py) are left out of files and returns.
"""

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path

import gcd

ROOT = Path(gcd.__file__).resolve().parent
FIRST, LAST, LOSS = "write_rewards", "backward", "clipped_surrogate"
MODEL = ROOT / "lab" / "results" / "alfworld_model"          # plays well enough for groups of unequal rewards
LEFT_OUT = ("lm/", "infra/lazy.py")
TINY = [*("--demonstrations 0 --evaluate none --iterations 1 --tasks 4 --group-size 8 --max-turns 8 --no-gcd "
          "--model").split(), str(MODEL)]


class Trip:
    """A profiler (for sys.setprofile) of the path. entries: [(file, entered before)]. frames: to the loss."""

    def __init__(self):
        self.files, self.sites, self.entries, self.frames, self.on = [], set(), [], [], False

    def __call__(self, frame, event, argument):
        if event != "call":
            return
        name, file = frame.f_code.co_name, file_of(frame)
        if name == FIRST and file and not self.frames:
            self.on, self.files, self.entries = True, ["gcd.py", file], [("gcd.py", False), (file, False)]
            return
        if name == LOSS and self.on and not self.frames:
            self.frames = functions_from_iteration(frame)
        if name == LAST and self.frames and file is None:
            self.on = False
        if self.on and file and not file.startswith(LEFT_OUT):
            self.enter(frame, file)

    def enter(self, frame, file):
        """Note a call from another project file, at a call site that is new."""
        caller = frame.f_back
        while caller and (file_of(caller) or "lm/").startswith(LEFT_OUT):
            caller = caller.f_back
        site = caller and (file_of(caller), caller.f_lineno, file)
        if site and site[0] != file and site not in self.sites:
            self.sites.add(site)
            self.entries.append((file, file in self.files))
            self.files.append(file)


def file_of(frame):
    """The project file of a frame, relative to the root; None for any other."""
    return project_file(frame.f_code.co_filename)


@functools.cache
def project_file(name):
    """A path relative to the root, if it is a file of the project."""
    path = Path(name)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0].startswith("."):      # .venv
        return None
    return path.relative_to(ROOT).as_posix()


def functions_from_iteration(frame):
    """["gcd.iteration", ..., the loss]: the project's functions on the stack."""
    names = []
    while frame:
        if file_of(frame):
            names.append(f"{Path(file_of(frame)).stem}.{frame.f_code.co_name}")
        if frame.f_code.co_name == "iteration":
            return names[::-1]
        frame = frame.f_back
    return []


def counted():
    """Run the tiny run under the profiler. Returns what it counted."""
    trip = Trip()
    with tempfile.TemporaryDirectory() as folder:
        sys.setprofile(trip)
        try:
            status = gcd.main([*TINY, "--out", f"{folder}/run"])
        finally:
            sys.setprofile(None)
    if status or not trip.frames:
        raise RuntimeError(f"the run ended with status {status} after {len(trip.entries)} entries")
    entries = [file for file, _ in trip.entries]
    return {"files": sorted({*entries}), "entries": entries, "frames": trip.frames,
            "returns": sum(again for _, again in trip.entries)}


def main(argv=None):
    """Count and print."""
    argparse.ArgumentParser("python -m lab.bench.trips", description=__doc__.splitlines()[0]).parse_args(argv)
    trip = counted()
    print(json.dumps(trip, indent=1))
    print(f"{len(trip['files'])} files, {trip['returns']} returns, {len(trip['frames'])} frames")


if __name__ == "__main__":
    main()
