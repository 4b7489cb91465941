"""Progress bars, live on a terminal, a line from time to time in a log; and how long a block took."""

import io
import sys
import time
from contextlib import contextmanager, suppress

from tqdm import tqdm

LOG_INTERVAL_S = 30          # between two lines of a bar in a log


@contextmanager
def timed(seconds, name):
    """Add the seconds that this block takes to seconds[name], unless it raises."""
    began = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began


def progress(*args, **options):
    """Return tqdm's bar; if stderr is not a terminal, one that prints a line every LOG_INTERVAL_S seconds.

    The bar is drawn on the terminal itself: a wrapper of stderr may escape the characters that redraw it.
    """
    with suppress(AttributeError, ValueError):              # stderr is None, or closed
        if sys.stderr.isatty():
            return tqdm(*args, **options | {"file": getattr(sys.stderr, "stream", sys.stderr)})
    return LogBar(*args, **options | {"file": io.StringIO(), "ascii": True, "ncols": 100})


class LogBar(tqdm):
    """A bar that prints lines to stderr instead of redrawing itself; it ends without a line."""

    def __init__(self, *args, **options):
        self.printed_s = time.monotonic()
        super().__init__(*args, **options)

    def display(self, msg=None, pos=None):
        """Print the bar as a line, unless the last one is less than LOG_INTERVAL_S seconds old."""
        if msg is None and time.monotonic() - self.printed_s >= LOG_INTERVAL_S:
            self.printed_s = time.monotonic()
            print(self, file=sys.stderr, flush=True)
