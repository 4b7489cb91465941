"""How a run ends before its end: asked to stop, by an error, with a terminal that has gone.

`gcd.main` puts these together. Left out: what is saved then (Run.save), and who may write (run/files.py).
"""

import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from envs import EpisodeLost
from run import files


class Interrupted(Exception):
    """The run was asked to stop, and is where it can: at the state that it holds, to be saved, or at None."""

    @property
    def state(self):
        """What `Run.save` takes; None where there is nothing to save."""
        return self.args[0]


class Stop:
    """True once this process was asked to stop: by a signal, or because who had started it is gone.

    The first Ctrl-C (or SIGTERM, SIGHUP) is noted, the second raises KeyboardInterrupt, the third ends the
    process. The parent counts where it minds the run: torchrun, or run.sh, which says so by $GCD_PARENT.
    """

    SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

    def __init__(self):
        minded = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("GCD_PARENT") == str(os.getppid())
        self.signals, self.parent = 0, os.getppid() if minded else None
        for signum in self.SIGNALS:
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:       # nohup ignores it
                signal.signal(signum, self.note)

    def __bool__(self):
        return self.signals > 0 or self.parent not in (None, os.getppid())

    def note(self, signum, frame):
        """The handler of all of them."""
        self.signals += 1
        if self.signals > 2:
            os._exit(130)
        if self.signals == 2:
            raise KeyboardInterrupt
        print("\nstopping as soon as this can be saved (again: at once)", file=sys.stderr)


# What ends a run in one line: mistakes found late, a full disk, engines that die, torch's own errors
MISTAKES = ValueError, OSError, ArithmeticError, MemoryError, RuntimeError


# What was under way when memory ran out, by the files that an error came through, and what needs less
KNOBS = ((("rollout.py", "engine.py"), "playing", "--slots or --context down"),
         (("update.py",), "training", "--microbatch-tokens down, then --checkpoint-activations on, then "
          "--max-response-tokens down"))


def one_line(error, out):
    """An error as one line, with what helps against it. Of torch's errors --out gets the traceback."""
    text = " ".join(str(error).split())
    if is_memory(error, text):
        came_through = {Path(frame.f_code.co_filename).name
                        for frame, _ in traceback.walk_tb(error.__traceback__)}
        knobs = [knob for knob in KNOBS if came_through & {*knob[0]}] or KNOBS
        helps = "; ".join(f"while {doing}, {knob}" for _, doing, knob in knobs)
        return f"out of memory ({text[:200]}): {helps}"
    if isinstance(error, RuntimeError) and not isinstance(error, EpisodeLost):
        with suppress(OSError):
            files.write_text(Path(out) / "traceback.txt", "".join(traceback.format_exception(error)))
            text = f"{text[:300]} (traceback in {out}/traceback.txt)"
        return f"{type(error).__name__}: {text}"
    return text


def is_memory(error, text):
    """Whether memory ran out: the allocators of torch have a type for it, its libraries have words."""
    kind = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    words = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return kind or isinstance(error, RuntimeError) and any(word in text for word in words)


class Unbreakable:
    """A stream to a terminal, pipe or log file that may go without taking the run along."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        """As the stream's, or nothing."""
        with suppress(OSError, ValueError, AttributeError):        # the latter two: it is closed, or None
            self.stream.write(text)
        return len(text)

    def flush(self):
        """As the stream's, or nothing."""
        with suppress(OSError, ValueError, AttributeError):
            self.stream.flush()
