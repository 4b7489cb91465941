"""Waiting for other processes, and a port for one. The standard library alone: workers import it, of games
and of studies.
"""

import socket
import time
from pathlib import Path

PATIENCE_S = 120          # the limit on a busy machine; on an idle one a wait takes about a second


def wait_for(condition, process=None, limit_s=PATIENCE_S):
    """Wait until condition() is true. AssertionError once the time is up, or the process has ended."""
    end = time.monotonic() + limit_s
    while not condition():
        assert process is None or process.poll() is None, f"the process ended with {process.poll()}"
        assert time.monotonic() < end, f"not true within {limit_s} s"
        time.sleep(0.02)


def wait(name, settings):
    """A study's cell that says that it runs, by a file in settings["folder"], and takes ten minutes."""
    (Path(settings["folder"]) / name).touch()
    time.sleep(600)


def free_port():
    """A port of this machine that nobody uses."""
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]
