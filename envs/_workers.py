"""Games in worker processes: for engines that are slow, take much memory, or may die.

The main process holds a `WorkerGame` per game, a worker one engine per game: an object whose `reset` and
`step` take one argument and return a Reply; at the end it is closed, if it has `close`. All games can work
before any is waited for. A worker that dies or hangs loses its episodes (EpisodeLost) and is replaced at the
next reset.
"""

import importlib
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from . import EpisodeLost, Reply, SentGame

CLOSE_S = 3              # for a worker's engines to close, and what they may still be doing then


def worker_games(n, workers, factory, timeout_s, problem_of, settings=None):
    """n games on so many worker processes; neighbours, such as a group's, share a worker.

    The workers end when the last game is closed, and with this process, however it ends.

    factory: "module:function" of a function(settings) that a worker calls once; it returns a function that
    makes an engine. timeout_s: a worker without an answer for so long hangs. problem_of(task): what the
    engine's `reset` gets, and settings: what the factory gets; both are pickled, so their classes are of
    modules that can be imported by name: not of the file that --env names.
    """
    pool = Pool(n, workers, (factory, settings, timeout_s))
    return [WorkerGame(pool, i, problem_of) for i in range(n)]


class WorkerGame(SentGame):
    """A Game played by a worker, which has no use for a seed. If the worker died, `reset` uses a new one."""

    def __init__(self, pool, number, problem_of):
        self.pool, self.number, self.problem_of = pool, number, problem_of
        self.worker = None
        self.sent = 0

    def send(self, method, argument, seed=0):
        """Send "reset" and a task, or "step" and a command; `receive` waits for the reply."""
        if method == "reset":
            problem = self.problem_of(argument)
            self.worker, argument = self.pool.worker_of(self.number), problem
        self.sent += 1
        self.worker.ask((self.number, self.sent, method, argument))

    def receive(self) -> Reply:
        """The reply to the last `send`.

        Raises ValueError if the engine does, and EpisodeLost if it raises anything else, or if the worker
        died since the reset, or does not answer in time.
        """
        error, answer = self.worker.answer(self.number, self.sent)
        if error:
            raise error(answer)
        return answer

    def close(self) -> None:
        """Close the game; the last one to close ends the workers."""
        self.pool.leave(self.number)


class Pool:
    """The workers of n games. Each worker plays a contiguous part of them, of equal size."""

    def __init__(self, n, workers, how):
        self.n, self.how = n, how                       # how: the arguments of Worker
        self.open = set(range(n))
        self.workers = [Worker(*how) for _ in range(workers)]

    def worker_of(self, number):
        """The worker of a game; a new one if it died."""
        index = number * len(self.workers) // self.n
        if self.workers[index].lost:
            self.workers[index] = Worker(*self.how)
        return self.workers[index]

    def leave(self, number):
        """Close a game; with the last one, the workers end."""
        self.open.discard(number)
        if not self.open:
            for worker in self.workers:                # so that all of them close at the same time
                worker.pipe.close()
            for worker in self.workers:
                worker.stop(timeout_s=10)


class Worker:
    """A process that plays games, and the pipe to it. It answers requests in their order.

    It is a new process and not a fork, because this process may use a GPU and has imported more than a worker
    needs. It ends when the pipe closes, so also when this process is killed. It has its own session, so that
    a Ctrl-C does not reach it, and so its own process group, of what its engines start.
    """

    def __init__(self, factory, settings, timeout_s):
        ours, theirs = socket.socketpair()
        self.timeout_s = timeout_s
        set_timeout(ours, timeout_s)
        root = str(Path(__file__).resolve().parents[__name__.count(".")])
        here = [path or os.getcwd() for path in sys.path]            # what this process finds, a worker does
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"), *here)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True)
        self.pipe = Connection(ours.detach())
        self.answers = {}          # game -> (request number, content) of its last answer that was received
        self.lost = None           # why no answer will come; None while the worker lives
        self.ask((factory, settings))

    def ask(self, request):
        """Send a request; an error is raised by the `answer` calls that wait for it."""
        if not self.lost:
            try:
                self.pipe.send(request)
            except OSError as error:
                self.fail(error)

    def answer(self, game, number):
        """The answer to a game's request of that number; raises EpisodeLost if none will come."""
        while self.answers.get(game, (0, None))[0] != number:
            if self.lost:
                raise EpisodeLost(self.lost)
            try:
                game_, number_, answer = self.pipe.recv()
                self.answers[game_] = number_, answer
            except (EOFError, OSError) as error:
                self.fail(error)
        return self.answers.pop(game)[1]

    def fail(self, error):
        """Stop the worker after an error of its pipe, and record the reason in `lost`."""
        hangs = isinstance(error, BlockingIOError)
        self.stop(timeout_s=0 if hangs else 1)
        self.lost = f"its worker gave no answer for {self.timeout_s:g} s" if hangs else (
            f"its worker died with exit code {self.process.returncode}")

    def stop(self, timeout_s):
        """Close the pipe, which ends the worker.

        After `timeout_s` at most, its process group is killed.
        """
        if self.lost:                                  # it was stopped before; others may have its number now
            return
        self.lost = "its worker was closed"
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        with suppress(ProcessLookupError):                     # it may have died, and left what it started
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def set_timeout(end, timeout_s):
    """Let reads and writes on this end of a pipe raise BlockingIOError after timeout_s."""
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        end.setsockopt(socket.SOL_SOCKET, option, limit)


# In a worker process

def serve(descriptor):
    """The main loop of a worker: answer requests, with one engine per game, until the pipe closes.

    An answer is (None, Reply) or, of an engine that raises, (class of the error in the main process, text):
    ValueError and EpisodeLost stay what they are, any other is EpisodeLost, with a new engine for the game.
    """
    pipe, requests = Connection(descriptor), queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(pipe, requests), daemon=True).start()
    if (first := requests.get()) is None:
        return
    make, engines = engine_maker(*first), {}
    for game, number, method, argument in iter(requests.get, None):
        try:
            if game not in engines:
                engines[game] = make()
            pipe.send((game, number, (None, getattr(engines[game], method)(argument))))
            continue
        except (ValueError, EpisodeLost) as error:
            answer = ValueError if isinstance(error, ValueError) else EpisodeLost, str(error)
        except Exception as error:         # also if a reply cannot be pickled: nothing of it was sent
            traceback.print_exc()
            close(engines.pop(game, None))
            answer = EpisodeLost, f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        with suppress(OSError):                                # the pipe may be closed
            pipe.send((game, number, answer))
    for engine in engines.values():
        close(engine)
    os.killpg(0, signal.SIGKILL)                               # also what an engine has started


def engine_maker(factory, settings):
    """The function that the factory returns or, if it cannot be imported or raises, one that says why."""
    module, _, function = factory.partition(":")
    try:
        return getattr(importlib.import_module(module), function)(settings)
    except Exception as error:
        traceback.print_exc()
        why = str(error) if isinstance(error, ValueError) else f"{factory}: {type(error).__name__}: {error}"

    def make():
        raise ValueError(why)

    return make


def close(engine):
    """Close an engine that can be closed; it may be broken."""
    with suppress(Exception):
        engine.close()


def read_requests(pipe, requests):
    """Move requests from the pipe to a queue, and None when it closes. After CLOSE_S more the process is
    killed with all that it started, even if an engine runs.

    Without the queue, the main process could block on a send while the worker blocks on an answer.
    """
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        requests.put(None)
        time.sleep(CLOSE_S)
        os.killpg(0, signal.SIGKILL)
    except Exception:                  # such as of a class that cannot be imported here: the worker has died
        traceback.print_exc()
        os._exit(1)
