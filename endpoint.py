"""Questions to a large model behind an OpenAI-compatible server, answered once, kept on disk.

Callers write the questions: is this turn good, what thought came before this command, what do these critiques have in
common. Here they are sent, several at a time; what fails is sent again, and what has no answer is None and counted.
Left out: streaming, tools, several answers to a question, and the newest OpenAI models that refuse `max_tokens`.

    DEEPSEEK_KEY=... python gcd.py --judge-labels rule+endpoint \\
        --endpoint https://api.deepseek.com/v1 --endpoint-model deepseek-chat --endpoint-key-variable DEEPSEEK_KEY
    python -m pytest tests/test_endpoint.py

What is promised: an answer is in the cache file before `ask` returns it, and what is there is never paid again. While a
process asks a question, others on the same cache file wait for its answer instead of asking too. So an answer is paid
once, but for these: a request whose answer is lost (a time-out, a crash) may have been paid, an empty answer is not
kept, and nobody waits longer than `patience_s`. The promise is between processes, not between threads or Endpoints of
one process, and holds where the locks of the cache's file system reach all of them.
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

LONGEST_WAIT_S = 60.0          # between two requests for a question, whatever Retry-After says
FAILURES_IN_A_ROW = 5          # questions without an answer, after which the endpoint is taken for dead
POLL_S = 0.05                  # how often a question that another process asks is looked at
SHORTEST_SECRET = 8            # shorter keys are what local servers take, like EMPTY: no secret, maybe a word of a text
GARBAGE = (ValueError, LookupError, TypeError, RecursionError)      # what reading JSON of the wrong form raises


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    usage: dict[str, int]      # tokens, as the server counts them


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    again: bool                # may the same request do better?
    after_s: float | None = None       # when, if the server says so
    mistake: str = ""          # the user's, that no other question will survive


class Endpoint:
    """A model on an OpenAI-compatible server, as something that answers questions.

    limit: requests in this process at most, retries among them.  timeout_s: for a whole answer.  first_wait_s: before
    the first retry; doubled for each further one.  counts: each distinct question of a call is `cached` (on disk, or
    put there by another process meanwhile), `limited` (the limit was reached), `failed`, or answered; `asked` questions
    and `retried` requests add up to the requests sent.

    An endpoint that fails FAILURES_IN_A_ROW questions is dead: the rest of the call is failed without a request, and
    each later call begins with a single request that shows whether it is back.
    Raises ValueError for what is missing or misspelt: the package, the key, the address, the cache's folder.
    """

    def __init__(self, base_url, model, key_variable="OPENAI_API_KEY", cache="runs/endpoint.jsonl", limit=10000,
                 concurrency=8, timeout_s=60.0, retries=5, max_tokens=1024, temperature=0.0, first_wait_s=1.0):
        self.base_url, self.model, self.key_variable = checked_address(base_url), model, key_variable
        self.limit, self.concurrency, self.timeout_s, self.retries = limit, concurrency, timeout_s, retries
        self.max_tokens, self.temperature, self.first_wait_s = max_tokens, float(temperature), first_wait_s
        self.openai, self.http = packages()
        secret = secret_in(key_variable)
        self.clean = lambda text: without(secret, text)        # the key is nowhere else but in the client
        self.client = self.openai.OpenAI(api_key=secret, base_url=base_url, max_retries=0, timeout=timeout_s)
        self.cache = Cache(cache)
        self.counts = dict.fromkeys(("cached", "asked", "failed", "limited", "retried"), 0)
        self.in_a_row, self.last_reason = 0, ""
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.jitter = random.Random()                          # on purpose unseeded: processes must not wait alike

    def __repr__(self):
        return f"Endpoint({self.base_url!r}, {self.model!r})"

    def close(self):
        self.client.close()
        self.cache.close()

    def ask(self, questions):
        """Answers in the order of the questions; None where there is none.

        questions: texts, or lists of messages {"role": ..., "content": ...}. Equal ones are asked once.
        Raises ValueError if the server refuses the key or the model: no other question would do better.
        """
        asked = [self.messages(question) for question in questions]
        keys = [self.key(messages) for messages in asked]
        self.cache.refresh()
        todo = {key: messages for key, messages in zip(keys, asked) if key not in self.cache.answers}
        self.counts["cached"] += len(set(keys)) - len(todo)
        before = self.counts["failed"]
        self.ask_while_alive(list(todo.items()))
        if failed := self.counts["failed"] - before:
            warnings.warn(f"--endpoint={self.base_url}: {failed} of {len(set(keys))} questions failed, "
                          f"the last one by {self.last_reason}", stacklevel=2)
        return [self.cache.answers.get(key) for key in keys]

    def messages(self, question):
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        return [{name: self.clean(text) for name, text in message.items()} for message in question]

    def key(self, messages):
        """What a question is known by. The address is not part of it: the same model may stand elsewhere tomorrow."""
        known_by = json.dumps([self.model, messages, self.temperature, self.max_tokens], sort_keys=True)
        return hashlib.sha256(known_by.encode()).hexdigest()

    # Many questions: what happens in the caller's thread

    def is_dead(self):
        return self.in_a_row >= FAILURES_IN_A_ROW

    def ask_while_alive(self, todo):
        """Ask them all, or if the endpoint was dead the first one first."""
        if self.is_dead() and todo:
            self.ask_at_once(todo[:1], retries=0)
            todo = todo[1:]
            if self.is_dead():
                self.counts["failed"] += len(todo)
                return
        self.ask_at_once(todo, self.retries)

    def ask_at_once(self, todo, retries):
        self.stop.clear()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="endpoint")
        try:
            asked = [pool.submit(self.settle, key, messages, retries) for key, messages in todo]
            for one in tqdm(as_completed(asked), desc="endpoint", total=len(asked), leave=False, delay=2):
                self.count(one.result())
        finally:
            self.stop.set()        # an exception, Ctrl-C among them, waits for the requests under way and no others
            pool.shutdown(cancel_futures=True)

    def count(self, outcome):
        if outcome == "answered":
            self.in_a_row = 0
            return
        self.counts[outcome] += 1
        if outcome == "failed":
            self.in_a_row += 1
            if self.is_dead():
                self.stop.set()

    # One question: what happens in a thread of its own

    def settle(self, key, messages, retries):
        """Have the answer in the cache, or say why not: answered, cached, limited or failed."""
        if self.stop.is_set():
            return "failed"
        patience_s = (1 + self.retries) * (self.timeout_s + LONGEST_WAIT_S)
        with self.cache.claim(key, patience_s, self.stop) as waited:
            self.cache.refresh()
            if key in self.cache.answers:
                return "cached"
            # another process has just failed at it, and so maybe will we: not all of its retries again
            return self.insist(key, messages, 0 if waited else retries)

    def insist(self, key, messages, retries):
        for retry in range(1 + retries):
            if self.stop.is_set():
                return "failed"
            if not self.spend("retried" if retry else "asked"):
                return "limited"
            got = self.request(messages)
            if isinstance(got, Answer):
                self.cache.add(key, messages, got)
                return "answered"
            if got.mistake:
                raise ValueError(got.mistake)
            self.last_reason = got.reason
            if not got.again:
                return "failed"
            if retry < retries:
                self.stop.wait(self.wait_s(retry, got.after_s))
        return "failed"

    def spend(self, on):
        """One request of those that the limit allows, if there is one left."""
        with self.lock:
            left = self.counts["asked"] + self.counts["retried"] < self.limit
            self.counts[on] += left
        return left

    def wait_s(self, retry, after_s):
        if after_s is None:
            after_s = self.first_wait_s * 2 ** retry * self.jitter.uniform(0.5, 1.5)
        return min(LONGEST_WAIT_S, max(0.0, after_s))

    def request(self, messages):
        """One request: an Answer or a Failure."""
        try:
            with self.client.chat.completions.with_streaming_response.create(
                    model=self.model, messages=messages, temperature=self.temperature,
                    max_tokens=self.max_tokens) as response:
                return self.answer_in(self.body_of(response))
        except (self.openai.OpenAIError, self.http.HTTPError, TimeoutError, *GARBAGE) as error:
            return self.failure(error)

    def body_of(self, response):
        """The whole body. A busy DeepSeek sends empty lines to keep a client waiting: no read times out, so we look."""
        deadline, parts = time.monotonic() + self.timeout_s, []
        for part in response.iter_bytes():
            parts.append(part)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no whole answer in {self.timeout_s} s")
        return b"".join(parts)

    def answer_in(self, body):
        data = json.loads(body)
        text, usage = data["choices"][0]["message"]["content"], data.get("usage")
        if text is None or isinstance(text, str) and not text.strip():
            return Failure("an empty answer", again=False)
        if not isinstance(text, str):
            raise TypeError("content is not a text")
        counted = usage.items() if isinstance(usage, dict) else ()
        return Answer(self.clean(text), {self.clean(name): n for name, n in counted if type(n) is int})

    def failure(self, error):
        """What an exception means; it is not kept, for the request it holds has the key in its headers."""
        status = getattr(error, "status_code", None)
        reason = f"{type(error).__name__}: {self.clean(str(error))[:300]}"
        if status in (401, 403):
            return Failure(reason, False, mistake=f"--endpoint-key-variable={self.key_variable}: --endpoint="
                                                  f"{self.base_url} refuses the key in it ({reason})")
        if status == 404:
            return Failure(reason, False, mistake=f"--endpoint-model={self.model}: unknown to --endpoint="
                                                  f"{self.base_url}, or nothing is at that address ({reason})")
        if status is None or status in (408, 409, 429) or status >= 500:
            return Failure(reason, True, asked_to_wait_s(error.response.headers) if status else None)
        return Failure(reason, again=False)


# Before the first request

def packages():
    """The modules openai and the HTTP client that it uses: an extra, so not imported with this file."""
    try:
        import httpx2
        import openai
    except ImportError:
        raise ValueError("--endpoint: needs the openai package; pip install -r requirements-endpoint.txt") from None
    return openai, httpx2


def checked_address(url):
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        good = False
    if "@" in url or "?" in url:       # flags are logged, so here is no place for a key: the value is not repeated
        raise ValueError("--endpoint: expected a base URL without password or query; the key goes into "
                         "the variable that --endpoint-key-variable names")
    if not good:
        raise ValueError(f"--endpoint={url}: expected a base URL like https://api.deepseek.com/v1")
    return url


def secret_in(variable):
    """The key, which no message may repeat."""
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ValueError(f"--endpoint-key-variable={variable}: this environment variable is not set "
                         "(a server that needs no key takes any)")
    if not (secret.isascii() and secret.isprintable()) or " " in secret:
        raise ValueError(f"--endpoint-key-variable={variable}: its value holds characters that no key has")
    return secret


def without(secret, text):
    """A text that can be sent and stored: without the key, and without halves of characters."""
    if len(secret) >= SHORTEST_SECRET:
        text = text.replace(secret, "[key]")
    return text.encode("utf-8", "replace").decode("utf-8")


def asked_to_wait_s(headers):
    """Retry-After, which is in seconds or a date; None without, or if it is neither."""
    value = headers.get("retry-after", "")
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return (parsedate_to_datetime(value).astimezone(timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None


# On disk

class Cache:
    """Answers in a file of JSON lines, which any number of processes append to and none rewrites.

    A line that is no answer, such as the first half of one whose writer was killed, is skipped, counted in `bad_lines`
    and reported once. Claims are locks on bytes of an empty file beside it; the system drops them with their process.
    """

    def __init__(self, path):
        self.path, self.answers, self.read_to, self.bad_lines = Path(path), {}, 0, 0
        self.lock, self.reported = threading.Lock(), False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.claims = open(f"{self.path}.lock", "ab")
            self.refresh()
        except OSError as error:
            raise ValueError(f"--endpoint-cache={path}: {error.strerror}") from None

    def close(self):
        self.claims.close()

    def refresh(self):
        """Take in what was appended since the last time, by this process or another."""
        with self.lock, locked(self.path, os.O_RDONLY | os.O_CREAT, fcntl.LOCK_SH) as descriptor:
            with open(descriptor, "rb", closefd=False) as file:
                file.seek(self.read_to)
                for line in file:
                    self.take(line)
        if self.bad_lines and not self.reported:
            self.reported = True
            warnings.warn(f"{self.path}: lines that hold no answer are skipped ({self.bad_lines} so far)", stacklevel=2)

    def take(self, line):
        """An answer, or a bad line. One without its end is not done with: `add` may end it, and it is read again."""
        ended = line.endswith(b"\n")
        self.read_to += len(line) * ended
        try:
            row = json.loads(line)
            if not (isinstance(row["key"], str) and isinstance(row["answer"], str)):
                raise TypeError
        except GARBAGE:
            self.bad_lines += ended
            return
        self.answers[row["key"]] = row["answer"]

    def add(self, key, question, answer):
        """Append an answer with one write. A line that was left without its end gets one first."""
        row = {"key": key, "question": question, "answer": answer.text, "usage": answer.usage}
        line = json.dumps(row).encode() + b"\n"
        with locked(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, fcntl.LOCK_EX) as descriptor:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            write(descriptor, line, self.path)
        self.answers[key] = answer.text

    @contextmanager
    def claim(self, key, patience_s, stop):
        """Hold a question against other processes; yields whether another held it until now.

        Waits for at most patience_s, and no longer once `stop` is set.
        """
        place, waited, deadline = int(key[:15], 16), False, time.monotonic() + patience_s
        # not one call that waits: the system would see two processes whose threads wait for each other as a deadlock
        while not self.try_lock(place) and time.monotonic() < deadline and not stop.wait(POLL_S):
            waited = True
        try:
            yield waited
        finally:
            fcntl.lockf(self.claims, fcntl.LOCK_UN, 1, place)

    def try_lock(self, place):
        try:
            fcntl.lockf(self.claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except (BlockingIOError, PermissionError):
            return False
        return True


def write(descriptor, line, path):
    """All of it, or an OSError that says which file it was; a half line is ended by the next writer."""
    try:
        written = os.write(descriptor, line)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if written < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextmanager
def locked(path, flags, how):
    descriptor = os.open(path, flags, 0o644)
    try:
        fcntl.flock(descriptor, how)           # ends with the descriptor
        yield descriptor
    finally:
        os.close(descriptor)
