"""Questions to a large model behind an OpenAI-compatible server, answered once, kept on disk.

What fails is sent again; what has no answer is None and counted. Left out: streaming, tools, several answers
to a question, and the newest OpenAI models that refuse `max_tokens`.

    DEEPSEEK_KEY=... python gcd.py --judge-labels rule+endpoint --endpoint https://api.deepseek.com/v1 \\
        --endpoint-model deepseek-chat --endpoint-key-variable DEEPSEEK_KEY
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

LONGEST_WAIT_S = 60.0          # between two requests for a question, whatever Retry-After says
FAILURES_IN_A_ROW = 5          # questions without an answer, after which the endpoint is taken for dead
MOST_BYTES = 4_000_000         # of an answer; a longer one is none
POLL_S = 0.05                  # how often a question that another process asks is looked at
SHORTEST_SECRET = 8            # shorter keys are what local servers take, like EMPTY: maybe a word of a text
GARBAGE = (ValueError, LookupError, TypeError, RecursionError)    # what reading JSON of the wrong form raises


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    again: bool = False        # may the same request do better?
    after_s: float | None = None       # when, if the server says so
    mistake: str = ""          # the user's, that no other question will survive


class Endpoint:
    """A model on an OpenAI-compatible server, as something that answers questions.

    An answer is in the cache file before `ask` returns it, and while a process asks a question, others on the
    same file wait for its answer. So each is paid once, except that a lost answer (a time-out, a crash) may
    have been paid, an empty one is not kept, and nobody waits longer than `patience_s`. This holds between
    processes that the locks of the cache's file system reach, not within one.

    limit: requests in this process at most, retries among them. timeout_s: for a whole answer. first_wait_s:
    before the first retry; doubled for each further one. counts: each distinct question of a call is `cached`
    (maybe by now only), `limited`, `failed` or answered; `asked` + `retried` = the requests sent. An endpoint
    that fails FAILURES_IN_A_ROW questions is dead: the rest of the call fails without a request, and each
    later call begins with a single one that shows whether it is back. ValueError names what is missing or
    misspelt: the package, the key, the address, the cache's folder.
    """

    def __init__(self, base_url, model, key_variable="OPENAI_API_KEY", cache="runs/endpoint.jsonl",
                 limit=10000, concurrency=8, timeout_s=60.0, retries=5, max_tokens=1024, temperature=0.0,
                 first_wait_s=1.0):
        try:                           # an extra, so not imported with this file
            import httpx2
            import openai
        except ImportError:
            raise ValueError("--endpoint: needs openai; pip install -r requirements-endpoint.txt") from None
        self.base_url, self.model, self.key_variable = checked_address(base_url), model, key_variable
        self.limit, self.concurrency, self.timeout_s, self.retries = limit, concurrency, timeout_s, retries
        self.max_tokens, self.temperature, self.first_wait_s = max_tokens, float(temperature), first_wait_s
        secret, flag = os.environ.get(key_variable, "").strip(), f"--endpoint-key-variable={key_variable}"
        if not secret:
            raise ValueError(f"{flag}: this environment variable is not set "
                             "(a server that needs no key takes any)")
        if not all("!" <= character <= "~" for character in secret):    # and no message may repeat it
            raise ValueError(f"{flag}: its value holds characters that no key has")

        def clean(text):
            """A text that can be sent and stored: without the key, and without halves of characters."""
            text = text.replace(secret, "[key]") if len(secret) >= SHORTEST_SECRET else text
            return text.encode("utf-8", "replace").decode("utf-8")

        self.clean = clean             # a closure: the key is nowhere else but in the client
        # max_retries: those of the client would escape the limit, and its waits cannot be cut short
        # each request has a connection of its own, so that `limited` finds it
        http = openai.DefaultHttpxClient(event_hooks={"request": [self.watch]}, timeout=timeout_s,
                                         limits=httpx2.Limits(max_keepalive_connections=0))
        self.client, self.here = openai.OpenAI(api_key=secret, base_url=base_url, max_retries=0,
                                               timeout=timeout_s, http_client=http), threading.local()
        self.errors = (openai.OpenAIError, httpx2.HTTPError, TimeoutError, *GARBAGE)
        self.cache = Cache(cache)
        self.counts = dict.fromkeys(("cached", "asked", "failed", "limited", "retried"), 0)
        self.in_a_row, self.last_reason = 0, ""
        self.lock, self.stop = threading.Lock(), threading.Event()

    def close(self):
        self.client.close()
        self.cache.close()

    def ask(self, questions):
        """Answers in the order of the questions; None where there is none.

        questions: texts, or lists of messages {"role": ..., "content": ...}. Equal ones are asked once.
        Raises ValueError if the server refuses the key or the model: no other question would do better.
        """
        conversations = [self.messages(question) for question in questions]
        keys = [self.key(messages) for messages in conversations]
        self.cache.refresh()
        distinct, failed_before = dict(zip(keys, conversations)), self.counts["failed"]
        todo = [(key, messages) for key, messages in distinct.items() if key not in self.cache.answers]
        self.counts["cached"] += len(distinct) - len(todo)
        if self.is_dead():
            self.ask_at_once(todo[:1], retries=0)
            todo = todo[1:]
        if self.is_dead():
            self.counts["failed"] += len(todo)
        else:
            self.ask_at_once(todo, self.retries)
        if failed := self.counts["failed"] - failed_before:
            warnings.warn(f"--endpoint={self.base_url}: {failed} of {len(distinct)} questions failed, "
                          f"the last one by {self.last_reason}", stacklevel=2)
        return [self.cache.answers.get(key) for key in keys]

    def messages(self, question):
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        return [{name: self.clean(text) for name, text in message.items()} for message in question]

    def key(self, messages):
        """What a question is known by. Not by the address: the same model may stand elsewhere tomorrow."""
        known_by = json.dumps([self.model, messages, self.temperature, self.max_tokens], sort_keys=True)
        return hashlib.sha256(known_by.encode()).hexdigest()

    def is_dead(self):
        return self.in_a_row >= FAILURES_IN_A_ROW

    def ask_at_once(self, todo, retries):
        """Ask several at a time and count what came of them."""
        self.stop.clear()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="endpoint")
        try:
            futures = [pool.submit(self.settle, key, messages, retries) for key, messages in todo]
            for future in tqdm(as_completed(futures), desc="endpoint", total=len(todo), leave=False, delay=2):
                if (outcome := future.result()) == "answered":
                    self.in_a_row = 0
                    continue
                self.counts[outcome] += 1
                self.in_a_row += outcome == "failed"
                if self.is_dead():
                    self.stop.set()
        finally:
            self.stop.set()            # an exception, Ctrl-C too, waits for the requests under way, no others
            pool.shutdown(cancel_futures=True)

    def settle(self, key, messages, retries):
        """One question, in its own thread: "answered" (into the cache), "cached", "limited" or "failed"."""
        patience_s = (1 + self.retries) * (self.timeout_s + LONGEST_WAIT_S)
        with self.cache.claim(key, patience_s, self.stop) as waited:
            self.cache.refresh()
            if key in self.cache.answers:
                return "cached"
            wait_s = 0
            # after waiting: another process has failed at it, and so maybe will we; not all its retries again
            for retry in range(1 if waited else 1 + retries):
                if self.stop.wait(wait_s):
                    break
                with self.lock:
                    left = self.counts["asked"] + self.counts["retried"] < self.limit
                    self.counts["retried" if retry else "asked"] += left
                if not left:
                    return "limited"
                answer = self.request(messages)
                if not isinstance(answer, Failure):
                    self.cache.add({"key": key, "question": messages} | answer)
                    return "answered"
                if answer.mistake:
                    self.stop.set()    # here: the caller's thread would let this one begin another question
                    raise ValueError(answer.mistake)
                self.last_reason = answer.reason
                if not answer.again:
                    break
                wait_s = self.wait_s(retry, answer.after_s)
        return "failed"

    def wait_s(self, retry, after_s):
        if after_s is None:            # on purpose unseeded: processes must not wait alike
            after_s = self.first_wait_s * 2 ** retry * random.SystemRandom().uniform(0.5, 1.5)
        return min(LONGEST_WAIT_S, max(0.0, after_s))

    def watch(self, request):
        """The client's hook before a request: note its connection once there is one, under TLS too."""
        def trace(event, info):
            if event == "connection.connect_tcp.complete":
                self.here.line = info["return_value"].get_extra_info("socket").dup()
        request.extensions["trace"] = trace

    @contextmanager
    def limited(self):
        """Cut this thread's request off when its time is up. The client's time-outs are for one read: a busy
        DeepSeek sends empty lines to keep one waiting, others drip headers."""
        here, over, self.here.line = self.here.__dict__, threading.Event(), None

        def cut():
            over.set()
            with suppress(OSError, AttributeError):
                here["line"].shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout_s, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        except self.errors:
            if over.is_set():
                raise TimeoutError(f"no whole answer in {self.timeout_s} s") from None
            raise
        finally:
            timer.cancel()
            if here["line"]:
                here["line"].close()

    def request(self, messages):
        """One request: {"answer": text, "usage": tokens as the server counts them}, or a Failure."""
        try:
            with self.limited(), self.client.chat.completions.with_streaming_response.create(
                    model=self.model, messages=messages, temperature=self.temperature,
                    max_tokens=self.max_tokens) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise ValueError(f"an answer of more than {MOST_BYTES} bytes")
            data = json.loads(body)
            text, usage = data["choices"][0]["message"]["content"], data.get("usage")
            if not isinstance(text, str | None):
                raise TypeError("content is not a text")
            if not text or not text.strip():
                return Failure("an empty answer")
            counted = usage.items() if isinstance(usage, dict) else ()
            counts = {self.clean(name): count for name, count in counted if type(count) is int}
            return {"answer": self.clean(text), "usage": counts}
        except self.errors as error:
            return self.failure(error)

    def failure(self, error):
        """What an exception means; it is not kept, for the request it holds has the key in its headers."""
        status = getattr(error, "status_code", None)
        reason = f"{type(error).__name__}: {self.clean(str(error))[:300]}"
        if status in (401, 403):
            return Failure(reason, mistake=f"--endpoint-key-variable={self.key_variable}: --endpoint="
                                           f"{self.base_url} refuses the key in it ({reason})")
        if status == 404:
            return Failure(reason, mistake=f"--endpoint-model={self.model}: unknown to --endpoint="
                                           f"{self.base_url}, or nothing is at that address ({reason})")
        again = status is None or status in (408, 409, 429) or status >= 500
        return Failure(reason, again, asked_to_wait_s(error.response.headers) if status else None)


def checked_address(url):
    """The base URL. Flags are logged: one that may hold a key is refused, and not repeated."""
    if "@" in url or "?" in url:
        raise ValueError("--endpoint: expected a base URL without password or query; the key goes into "
                         "the variable that --endpoint-key-variable names")
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    raise ValueError(f"--endpoint={url}: expected a base URL like https://api.deepseek.com/v1")


def asked_to_wait_s(headers):
    """Retry-After, which is in seconds or a date; None without, or if it is neither."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(value).timestamp() - time.time()
    return None


class Cache:
    """Answers in a file of JSON lines, which any number of processes append to and none rewrites.

    A line that is no answer (its writer was killed, say) is skipped, counted in `bad_lines` and reported
    once. Claims are locks on bytes of an empty file beside it, which end with their process.
    """

    def __init__(self, path):
        self.path, self.lock = Path(path), threading.Lock()
        self.answers, self.read_to, self.bad_lines = {}, 0, 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():           # a pipe, say, would wait for ever
                raise OSError(errno.EINVAL, "not a file")
            self.claims = open(f"{self.path}.lock", "ab")
            self.refresh()
        except OSError as error:
            raise ValueError(f"--endpoint-cache={path}: {error.strerror}") from None

    def close(self):
        self.claims.close()

    def refresh(self):
        """Take in what was appended since the last time, by this process or another."""
        with self.lock, open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)               # ends when the file is closed
            file.seek(self.read_to)
            bad_before = self.bad_lines
            for line in file:
                ended = line.endswith(b"\n")               # else it is read again: `add` may end it
                self.read_to += len(line) * ended
                try:
                    record = json.loads(line)
                    if not all(isinstance(record[name], str) for name in ("key", "answer")):
                        raise TypeError
                    self.answers[record["key"]] = record["answer"]
                except GARBAGE:
                    self.bad_lines += ended
            if self.bad_lines and not bad_before:
                warnings.warn(f"{self.path}: lines that hold no answer are skipped ({self.bad_lines} so far)")

    def add(self, record):
        """Append an answer; a line that was left without its end gets one first. OSError names the file."""
        line = json.dumps(record).encode() + b"\n"
        try:
            with open(self.path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    line = line if file.read() == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:                           # a full disk does not say which file it was
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.answers[record["key"]] = record["answer"]

    @contextmanager
    def claim(self, key, patience_s, stop):
        """Hold a question against other processes; yields whether another held it until now.

        Looks every POLL_S, at most for patience_s and until `stop` is set: calls that wait could deadlock two
        processes.
        """
        place, waited, deadline = int(key[:15], 16), False, time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self.claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline or stop.wait(POLL_S):
                    break
                waited = True
        try:
            yield waited
        finally:
            fcntl.lockf(self.claims, fcntl.LOCK_UN, 1, place)
