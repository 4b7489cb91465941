"""Stopping a run early: signals, a parent process that is gone, a terminal that is gone.

Left out: what is saved then (session.Run.save), and the run folder's lock (infra/files.py).
"""

import os
import signal
import sys
from contextlib import contextmanager, suppress


class Interrupted(Exception):
    """Raised where a run that was asked to stop can stop; holds the state to save."""

    @property
    def state(self):
        """The argument for `Run.save`; None if there is nothing to save."""
        return self.args[0]


class Stop:
    """True once this process was asked to stop, by a signal or because its parent process is gone.

    The first SIGINT (Ctrl-C), SIGTERM or SIGHUP sets it, the second raises KeyboardInterrupt, the third ends
    the process. The parent counts if it supervises the run: torchrun, or run.sh, which sets $GCD_PARENT.
    """

    SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

    def __init__(self):
        supervised = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("GCD_PARENT") == str(os.getppid())
        self.signals, self.parent = 0, os.getppid() if supervised else None
        for signum in self.SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:       # nohup ignores it
                signal.signal(signum, self.note)

    @classmethod
    @contextmanager
    def restored(cls):
        """A block after which the signals have their previous handlers."""
        handlers = {signum: signal.getsignal(signum) for signum in cls.SIGNALS}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def __bool__(self):
        return self.signals > 0 or self.parent not in (None, os.getppid())

    def note(self, signum, frame):
        """The signal handler."""
        self.signals += 1
        if self.signals > 2:
            os._exit(130)
        if self.signals == 2:
            raise KeyboardInterrupt
        print("\nstopping as soon as this can be saved (again: at once)", file=sys.stderr)


class Unbreakable:
    """A wrapper of an output stream whose terminal, pipe or log file may vanish without ending the run."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """Write to the stream; do nothing if it is gone."""
        with suppress(OSError, ValueError, AttributeError):        # the latter two: it is closed, or None
            self.stream.write(text)
        return len(text)

    def flush(self):
        """Flush the stream; do nothing if it is gone."""
        with suppress(OSError, ValueError, AttributeError):
            self.stream.flush()
