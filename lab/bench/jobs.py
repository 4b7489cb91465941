"""Running cells as processes of gcd.py, several in parallel; they can be interrupted and resumed.

A cell with a stored result is not run again. If its folder holds the finished run, its result is read from
there; an interrupted run resumes in its RL stage or between DAgger rounds. A failed cell stops only the cells
that begin from it. Left out: the list of cells (lab/bench/study.py).
"""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from infra import files
from infra.signals import as_completed
from lab.bench.cells import differences_of, result_of
from lab.bench.study import ROOT, below_root

SHUTDOWN_TIMEOUT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}     # s from Ctrl-C until torchrun kills


class Failed(Exception):
    """A cell failed; the message names it."""


class Children:
    """The running processes of gcd.py, `jobs` at a time. `stop` makes each save a checkpoint and end.

    Each computes with its share of the cores: if each has all, their threads wait for each other's, and a run
    of SmolLM2 takes several times as long.
    """

    def __init__(self, jobs=1):
        self.threads = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // jobs))} if jobs > 1 else {}
        self.running, self.lock, self.stopping = set(), threading.Lock(), False

    def run(self, command, log):
        """Run a command and wait for its end; returns the exit status.

        The process is in a session of its own, so that Ctrl-C reaches it once, through `stop`. If this
        process is killed, it saves and ends.
        """
        with self.lock:
            if self.stopping:
                raise Failed("stopped")
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                                     env=SHUTDOWN_TIMEOUT | self.threads | os.environ | {
                                         "GCD_PARENT": str(os.getpid())})
            self.running.add(child)
        status = child.wait()
        with self.lock:
            self.running.discard(child)
        return status

    def stop(self):
        """Send SIGINT to all running processes; `run` then starts no new ones."""
        with self.lock:
            self.stopping = True
            for child in self.running:
                child.send_signal(signal.SIGINT)


# Which cells to run

def to_run(cells):
    """The cells without a result, and the cold starts they need whose checkpoint is missing.

    Rows that must not be run again are left out.
    """
    missing = [cell for cell in cells if not cell.result.exists() and not cell.rerun]
    gone = {cell.start for cell in missing if cell.start and not finished(cell.start)}
    return [cell for cell in cells if cell in missing or cell in gone]


def finished(cell):
    """True if a cell's folder holds its finished run with its settings (a cold start's: and a checkpoint)."""
    ended = (cell.folder / files.STAGES).exists() and same_settings(cell)
    return ended and (not cell.cold or (cell.folder / "checkpoint").is_dir())


def same_settings(cell):
    """True unless the run in a cell's folder was made with other settings than the cell's."""
    log = cell.folder / files.METRICS
    return not log.exists() or not differences_of(files.settings_in(files.read_lines(log)[0]), cell)


# Running

def run_cell(cell, jobs, children, dirty=False):
    """Run a cell unless its folder holds the finished run; store its result if it evaluates a split and none
    is stored, as of a cold start that was made again.

    jobs: number of cells run in parallel, stored with the result. dirty: as in `cells.result_of`.
    """
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    if writer := files.lock_holder(cell.folder):          # gcd.py would report it too, but only in its log
        raise Failed(f"{below_root(cell.folder)}: {writer} is writing there")
    if not finished(cell):
        with open(f"{cell.folder}.log", "a", encoding="utf-8") as log:
            status = children.run([*cell.command, "--resume", "--overwrite"], log)
        if status or not finished(cell):
            raise Failed(f"{below_root(cell.folder)}: gcd.py ended with {status}; see "
                         f"{below_root(Path(log.name))}")
    if cell.splits and not cell.result.exists():
        files.write_json(cell.result, result_of(cell, cell.folder, dirty) | {"jobs": jobs})


def run_all(cells, jobs, report, dirty=False):
    """Run cells in order, `jobs` in parallel; a failed cell stops only the cells that begin from it.

    report(failure or None) is called when a cell ends. On an interrupt, all processes are stopped and waited
    for.
    """
    children, futures = Children(jobs), {}

    def work(cell):
        if cell.start in futures and futures[cell.start].exception():
            raise Failed(f"{below_root(cell.folder)}: not run, because {cell.start.row} failed")
        try:
            run_cell(cell, jobs, children, dirty)
        except (ValueError, OSError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # an earlier run's files are invalid, in whatever way
            raise Failed(f"{below_root(cell.folder)}: {type(error).__name__}: {error}") from error

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for cell in cells:                            # in order: a cold start precedes its dependants
                futures[cell] = pool.submit(work, cell)
            for done in as_completed(futures.values()):
                failure = done.exception()
                if failure and not isinstance(failure, Failed):
                    raise failure
                report(failure)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            children.stop()
            raise


def run_due(due, jobs, dirty=False):
    """Run cells with a progress bar. Prints each failure when it happens; returns the failures.

    ValueError, before anything runs, for a tree with uncommitted changes, unless `dirty`.
    """
    files.clean_commit(dirty)
    failures = []
    with tqdm(total=len(due), unit="cell") as bar:
        def report(failure):
            bar.update()
            if failure:
                failures.append(failure)
                bar.write(str(failure), file=sys.stderr)
        run_all(due, jobs, report, dirty)
    return failures
