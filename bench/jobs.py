"""Cells run as processes of gcd.py: several at once, stopped and started at will.

A cell whose result is kept is not run again; one whose folder holds the finished run is only read; an
interrupted one resumes within its RL stage, or its practice. A failed cell stops only those that begin from
it. Left out: which cells there are (bench/study.py).
"""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from bench.cells import differences_of, result_of
from bench.study import ROOT, below_root
from run import files

PATIENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}     # s until torchrun kills what Ctrl-C has not ended


class Failed(Exception):
    """A cell that did not end well; its message names it."""


class Children:
    """The runs of gcd.py under way. Asked to stop, each saves a checkpoint and ends."""

    def __init__(self):
        self.running, self.lock, self.stopping = set(), threading.Lock(), False

    def run(self, command, log):
        """Run to the end; Ctrl-C reaches it once, through `stop`. Returns the exit status."""
        with self.lock:
            if self.stopping:
                raise Failed("stopped")
            child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
                                     env=PATIENT | os.environ)
            self.running.add(child)
        status = child.wait()
        with self.lock:
            self.running.discard(child)
        return status

    def stop(self):
        """Ask all of them, and start no more."""
        with self.lock:
            self.stopping = True
            for child in self.running:
                child.send_signal(signal.SIGINT)


# What is to be run

def to_run(cells):
    """Cells without a result, and the cold starts that these need and whose checkpoint is gone.

    Rows that are not to be run again are left out.
    """
    missing = [cell for cell in cells if not cell.result.exists() and not cell.rerun]
    gone = {cell.start for cell in missing if cell.start and not finished(cell.start)}
    return [cell for cell in cells if cell in missing or cell in gone]


def finished(cell):
    """Whether a cell's folder holds its finished run, of these settings; a cold start's a checkpoint."""
    there = (cell.folder / files.STAGES).exists() and same_settings(cell)
    return there and (not cell.cold or (cell.folder / "checkpoint").is_dir())


def same_settings(cell):
    """Whether the run in a cell's folder was made with the settings that the cell asks for now."""
    log = cell.folder / files.METRICS
    return not log.exists() or not differences_of(files.settings_in(files.read_lines(log)[0]), cell)


# Running

def run_cell(cell, jobs, children):
    """Run a cell to its end, unless its folder holds the finished run, and save the result of one that
    evaluates; what else a run leaves is its folder's."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    if who := files.holder(cell.folder):             # else gcd.py would say so, in its log
        raise Failed(f"{below_root(cell.folder)}: {who} is writing there")
    if not finished(cell):
        with open(f"{cell.folder}.log", "a", encoding="utf-8") as log:
            status = children.run([*cell.command, "--resume", "--overwrite"], log)
        if status or not finished(cell):
            raise Failed(f"{below_root(cell.folder)}: gcd.py ended with {status}; see "
                         f"{below_root(Path(log.name))}")
    if cell.splits:
        files.write_json(cell.result, result_of(cell, cell.folder) | {"jobs": jobs})


def run_all(cells, jobs, report):
    """Run cells in order, `jobs` at once; a failed one is reported and stops only those that begin from it.

    report(failure or None) is called as each ends. Interrupted, all are asked to stop and waited for.
    """
    children, futures = Children(), {}

    def work(cell):
        if cell.start in futures and futures[cell.start].exception():
            raise Failed(f"{below_root(cell.folder)}: not run, because {cell.start.row} failed")
        try:
            run_cell(cell, jobs, children)
        except (ValueError, OSError) as error:               # an earlier run's files, not what they should be
            raise Failed(f"{below_root(cell.folder)}: {type(error).__name__}: {error}") from error

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for cell in cells:                            # in order: who waits for a cold start came after it
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


def run_due(due, jobs):
    """Run cells behind a progress bar. Returns the failures, each printed as it happens."""
    failures = []
    with tqdm(total=len(due), unit="cell") as bar:
        def report(failure):
            bar.update()
            if failure:
                failures.append(failure)
                bar.write(str(failure), file=sys.stderr)
        run_all(due, jobs, report)
    return failures
