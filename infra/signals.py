"""Stopping a run early: signals, a parent process that is gone; a call's time limit.

Left out: what is saved then (session.Run.save), and the run folder's lock (infra/files.py).
"""

import math
import os
import queue
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

SIGNAL_S = 1                       # a signal is heard within
AGAIN_S = 10                       # a time limit strikes again


class Interrupted(Exception):
    """Raised where a run that was asked to stop can stop; holds the state to save."""

    @property
    def state(self):
        """The argument for `Run.save`; None if there is nothing to save."""
        return self.args[0]


def speaks_for_machine():
    """Whether this process prints what every rank of its machine would: the first of these does."""
    return os.environ.get("LOCAL_RANK", "0") == "0" or os.environ.get("WORLD_SIZE", "1") == "1"


def signals_here():
    """The signals that stop a run: without SIGHUP where nohup ignores it; none outside the main thread, which
    alone may handle them.
    """
    if threading.current_thread() is not threading.main_thread():
        return ()
    heard = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGINT, signal.SIGTERM, *heard


class Stop:
    """True once this process was asked to stop, by a signal or because its parent process is gone.

    The first SIGINT (Ctrl-C), SIGTERM or SIGHUP sets it, the second raises KeyboardInterrupt, the third ends
    the process. The parent counts if it supervises the run: torchrun, or run.sh, which sets $GCD_PARENT. Such
    a parent passes its signals on, so that one that a scheduler sends to all processes comes twice: two
    within REPEAT_S count once. Under torchrun so do the first two if they are the same, however late the copy
    is handled (not before a long call in C++ has ended): of a second Ctrl-C in a terminal it makes a SIGTERM.
    """

    REPEAT_S = 2

    def __init__(self):
        self.by_torchrun = {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= {*os.environ}
        supervised = self.by_torchrun or os.environ.get("GCD_PARENT") == str(os.getppid())
        self.came, self.signals = [], 0                       # those that came, and how many of them count
        self.parent = os.getppid() if supervised else None
        self.last, self.pid = -math.inf, os.getpid()          # when the last signal came; whom it stops
        for signum in signals_here():
            signal.signal(signum, self.note)

    @classmethod
    @contextmanager
    def restored(cls):
        """A block after which the signals have their previous handlers."""
        handlers = {signum: signal.getsignal(signum) for signum in signals_here()}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def __bool__(self):
        return self.signals > 0 or self.parent not in (None, os.getppid())

    def note(self, signum, frame):
        """The signal handler. A process that was forked from this one has it, too, and ends at once."""
        if os.getpid() != self.pid:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        now, before = time.monotonic(), self.last
        self.last, self.came = now, [*self.came, signum]
        if self.parent is not None and (now - before < self.REPEAT_S
                                        or self.by_torchrun and self.came == [signum, signum]):
            return
        self.signals += 1
        if self.signals > 2:
            os._exit(130)
        if self.signals == 2:
            raise KeyboardInterrupt
        if speaks_for_machine():
            with suppress(OSError, RuntimeError):       # in the middle of a write to stderr there is no other
                print("\nstopping as soon as this can be saved (again: at once)", file=sys.stderr)


def as_completed(futures):
    """Yield futures as they end, as concurrent.futures does, but hear a signal within SIGNAL_S in any case.

    One that arrives just before the main thread begins to wait does not end that wait: CPython looks for
    signals before it, and the system call has not begun.
    """
    done = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(done.put)
    pending = len(futures)
    while pending:
        try:
            future = done.get(timeout=SIGNAL_S)
        except queue.Empty:
            continue
        pending -= 1
        yield future


@contextmanager
def time_limit(seconds, error):
    """Raise `error` in this block after `seconds`, and every AGAIN_S from then on, should it be swallowed:
    time enough to close what was interrupted.

    It interrupts Python code and waits, not a library's long computation. Only in the main thread: no other
    one can be interrupted, so there is no limit in it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    inside = True

    def expired(signum, frame):
        if inside:
            raise error

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        try:
            yield
        finally:
            inside = False                # an alarm just before this raises here, and the outer block disarms
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
