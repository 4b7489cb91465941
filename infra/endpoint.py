"""A client of an OpenAI-compatible server: asks each question once and caches the answers on disk.

Failed requests are retried; a question without an answer yields None and is counted. Left out: streaming,
tools, several answers to a question and, of gcd.py, models that refuse `max_tokens` (see --endpoint-extra).

    DEEPSEEK_KEY=... python gcd.py --judge-labels rule+endpoint --endpoint https://api.deepseek.com/v1 \\
        --endpoint-model deepseek-chat --endpoint-key-variable DEEPSEEK_KEY
"""

import errno
import fcntl
import hashlib
import json
import os
import random
import re
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.progress import progress
from infra.signals import as_completed

MAX_WAIT_S = 60.0              # between two requests for a question, whatever Retry-After is
FAILURES_IN_A_ROW = 5          # unanswered questions after which the endpoint is considered dead
MAX_BYTES = 4_000_000          # of an answer; a longer one is a failure
MAX_ERROR_BYTES = 65_536       # read of the body of an error or a redirect
MAX_REDIRECTS = 3              # followed for a request
POLL_S = 0.05                  # between two checks: of another process's question; of requests that end
MIN_SECRET_LENGTH = 8          # shorter keys are local servers' placeholders, like EMPTY, and are not masked
# A base URL without the parts that hold keys: user and password, query, fragment
URL = re.compile(r"(?ai)https?://([\w.-]+|\[[0-9a-f:.]+\])(:\d*)?(/[\w.,:;~%!$&'()*+=/-]*)?")
# Why a server broke an answer off, with status 200: DeepSeek's, OpenRouter's, vLLM's
BROKEN_OFF = ("insufficient_system_resource", "error", "abort")
MALFORMED = (ValueError, LookupError, TypeError, RecursionError)    # errors of reading JSON of a wrong form


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that got no answer."""

    reason: str
    retry: bool = False                # whether the same request may succeed later
    retry_after_s: float | None = None         # when, if the server sends it
    user_error: str = ""               # message of a mistake that makes all other questions fail too
    refused: bool = False              # whether the server read this request and will never answer it


LIMITED, STOPPED = Failure("--endpoint-limit"), Failure("asked to stop")
REQUESTS = ("asked", "retried", "redirected")              # counts whose sum is the number of requests sent


class NotSent(Exception):
    """Raised in place of sending a request; its argument is the Failure."""


class Endpoint:
    """A model on an OpenAI-compatible server that answers questions; see `ask`.

    An answer is in the cache file before `ask` returns it, and while one process asks a question, others with
    the same cache file wait for its answer. So each question is paid for once, with these exceptions: an
    answer that was lost (a time-out, a crash) may have been paid, an empty answer is not cached, no process
    waits longer than `patience_s`, and all of this holds between processes (if the cache's file system
    supports locks), not between threads of one.

    cache: its file; "" for none, where only `answer` may be called: each call is a new sample of the model.
    limit: maximum number of requests in this process, including retries and redirects. timeout_s: for a
    complete answer. first_wait_s: before the first retry; doubled for each further retry. extra: what is
    merged into each request's body, see `checked_extra`. should_stop: may turn true, see `ask`. counts: each
    distinct question of a call is `cached` (also if cached by another process meanwhile), `limited`, `failed`
    or answered; `asked` + `retried` + `redirected` is the number of requests sent.

    Redirects are followed only within the server (the address's scheme, host and port) and only if they keep
    the question (status 307 or 308), at most MAX_REDIRECTS per request. Nothing is sent to another server.

    After FAILURES_IN_A_ROW failed questions the endpoint is dead: the rest of the call fails without a
    request, and each later call begins with a single request to test whether it works again. ValueError for a
    missing package, key or cache folder, or an invalid address.
    """

    def __init__(self, base_url, model, key_variable="OPENAI_API_KEY", cache="runs/endpoint.jsonl",
                 limit=10000, concurrency=8, timeout_s=60.0, retries=5, max_tokens=1024, temperature=0.0,
                 first_wait_s=1.0, extra="", should_stop=False):
        try:                           # optional packages, so not imported at the top
            import httpx2
            import openai
        except ImportError:
            raise ValueError("--endpoint: needs openai; pip install -r requirements-endpoint.txt") from None
        self.shown_url = without_path(checked_url(base_url))       # in messages
        self.model, self.key_variable = model, key_variable
        self.limit, self.concurrency, self.timeout_s, self.retries = limit, concurrency, timeout_s, retries
        self.max_tokens, self.temperature, self.first_wait_s = max_tokens, float(temperature), first_wait_s
        self.extra = checked_extra(extra)
        secret, flag = os.environ.get(key_variable, "").strip(), f"--endpoint-key-variable={key_variable}"
        if not secret:
            raise ValueError(f"{flag}: this environment variable is not set "
                             "(for a server that needs no key EMPTY will do)")
        if not all("!" <= character <= "~" for character in secret):    # the message must not repeat it
            raise ValueError(f"{flag}: its value has characters that no key has")

        def clean(text):
            """Return a text that can be sent and stored: the key masked, unpaired surrogates replaced."""
            if len(secret) >= MIN_SECRET_LENGTH:
                for written in (secret, json.dumps(secret, ensure_ascii=False)[1:-1]):       # as in JSON
                    text = text.replace(written, "[key]")
            return text.encode("utf-8", "replace").decode("utf-8")

        path = urlsplit(base_url).path
        self.path_parts = [part for part in {*path.split("/"), *unquote(path).split("/")}
                           if len(part) >= MIN_SECRET_LENGTH]
        self.clean = clean             # a closure, so that only it and the client have the key
        # max_retries=0: the client's own retries would not count towards the limit, and cannot be interrupted
        # no keep-alive: each request has a connection of its own, which `time_limit` can close
        hooks = {"request": [self.before_request], "response": [self.after_response]}
        try:
            http = openai.DefaultHttpxClient(event_hooks=hooks, timeout=timeout_s,
                                             limits=httpx2.Limits(max_keepalive_connections=0))
        except (ImportError, ValueError, OSError) as error:      # a SOCKS proxy needs a package more
            raise ValueError("the proxy or certificates of the environment variables ALL_PROXY, HTTP_PROXY, "
                             f"HTTPS_PROXY, SSL_CERT_FILE, SSL_CERT_DIR: {error}") from None
        self.client = openai.OpenAI(api_key=secret, base_url=base_url, max_retries=0, timeout=timeout_s,
                                    http_client=http)
        self.origin = httpx2.URL(base_url).origin
        # of this thread's request: .kind, "asked" or "retried"; .statuses of the redirects so far;
        # .connection, its socket; .expired, whether its time is over
        self.local = threading.local()
        self.running, self.aborted = set(), False              # what shuts down each request that is sent
        self.errors = (openai.OpenAIError, httpx2.HTTPError, TimeoutError, *MALFORMED)
        self.cache = Cache(cache) if cache else None
        self.counts = dict.fromkeys(("cached", "failed", "limited", *REQUESTS), 0)
        self.failures_in_a_row, self.last_reason, self.has_answered = 0, "", False
        self.lock, self.stop, self.should_stop = threading.Lock(), threading.Event(), should_stop

    def abort(self):
        """Shut down every request at once, and let no other be sent: the client cannot wake one that waits.

        A request that is still looking up a name or connecting ends as soon as it is connected.
        """
        self.stop.set()
        self.aborted = True                # before the copy: a later request is not in it, and sees this
        for shut_down in [*self.running]:
            shut_down()

    def close(self):
        """End all requests, and close the client's connections and the cache's lock file."""
        self.abort()
        self.client.close()
        if self.cache:
            self.cache.close()

    def ask(self, questions):
        """Return the answers in the order of the questions; None for a question without an answer.

        Once `should_stop` is true no other question is sent; of several, answers may then be missing.
        questions: texts, or lists of messages {"role": ..., "content": ...}. Equal questions are asked once.
        ValueError if the server refuses the key or, before its first answer, the model, or redirects to
        another server, because every other question would fail too.
        """
        conversations = [self.messages(question) for question in questions]
        keys = [self.cache_key(messages) for messages in conversations]
        self.cache.refresh()
        distinct, before = dict(zip(keys, conversations)), dict(self.counts)
        todo = [(key, messages) for key, messages in distinct.items() if key not in self.cache.answers]
        self.counts["cached"] += len(distinct) - len(todo)
        if self.is_dead():
            self.ask_concurrently(todo[:1], retries=0)
            todo = todo[1:]
        if self.is_dead():
            self.counts["failed"] += len(todo)
        else:
            self.ask_concurrently(todo, self.retries)
        if self.counts["limited"] > before["limited"] and self.limit:
            warnings.warn(f"--endpoint-limit={self.limit}: reached, so from here on questions that are not "
                          "in the cache have no answer", stacklevel=2)
        if failed := self.counts["failed"] - before["failed"]:
            warnings.warn(f"--endpoint={self.shown_url}: {failed} of {len(distinct)} questions failed, "
                          f"the last one with {self.last_reason}", stacklevel=2)
        return [self.cache.answers.get(key) for key in keys]

    def messages(self, question):
        """Return a question as a list of messages that can be sent and stored."""
        if isinstance(question, str):
            question = [{"role": "user", "content": question}]
        return [{name: self.clean(text) for name, text in message.items()} for message in question]

    def cache_key(self, messages):
        """Return a question's key in the cache. The address is not part of it: the same model may move."""
        identity = [self.model, messages, self.temperature, self.max_tokens]
        identity = json.dumps(identity + [self.extra] * bool(self.extra), sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    def is_dead(self):
        """Whether the last FAILURES_IN_A_ROW questions failed."""
        return self.failures_in_a_row >= FAILURES_IN_A_ROW

    @contextmanager
    def pool(self, name):
        """A block with a pool of `concurrency` threads, whose end waits for requests that were sent.

        After Ctrl-C it does not: they are shut down.
        """
        self.stop.clear()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix=name)
        try:
            yield pool
        except KeyboardInterrupt:
            self.abort()
            raise
        finally:
            self.end(pool)

    def end(self, pool):
        """Wait for a pool's requests that were sent, and shut them down after Ctrl-C.

        Not in the pool's own wait, which a signal that arrives just before it would not end: see
        signals.as_completed.
        """
        try:
            self.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while self.running:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.abort()
            raise
        finally:
            pool.shutdown()

    def ask_concurrently(self, todo, retries):
        """Ask the (key, messages) of `todo`, `concurrency` at a time, and count the outcomes."""
        with self.pool("endpoint") as pool:
            futures = [pool.submit(self.ask_counted, key, messages, retries) for key, messages in todo]
            for future in progress(as_completed(futures), desc="endpoint", total=len(todo), leave=False,
                                   delay=2):
                future.result()
                if self.should_stop:
                    break

    def ask_counted(self, key, messages, retries):
        """`ask_one`, whose outcome is counted at once, here: the main thread may come late to stop others."""
        outcome = self.ask_one(key, messages, retries)
        with self.lock:
            if outcome == "answered":
                self.failures_in_a_row = 0
                return
            if outcome == "failed" and self.should_stop:             # it was not sent any more
                return
            self.counts[outcome] += 1
            self.failures_in_a_row += outcome == "failed"
            if self.is_dead():
                self.stop.set()

    def ask_one(self, key, messages, retries):
        """Ask one question, in a worker thread. Returns "answered", "cached", "limited" or "failed"."""
        patience_s = (1 + self.retries) * (self.timeout_s + MAX_WAIT_S)
        with self.cache.claim(key, patience_s, self.stop) as waited:
            self.cache.refresh()
            if key in self.cache.answers:
                return "cached"
            # after waiting, without retries: another process has just failed at this question
            answer = self.answer(messages, 0 if waited else retries)
            if answer is LIMITED:
                return "limited"
            if isinstance(answer, Failure):
                return "failed"
            if not answer["answer"].strip():
                self.last_reason = "an empty answer"
                return "failed"
            self.cache.add({"key": key, "question": messages} | answer)
            return "answered"

    def answer(self, messages, retries):
        """`request` the answer to one conversation, and retry failures that may pass, until `stop` is set.

        Returns what `request` returned last. ValueError for a mistake that makes every other question fail.
        """
        answer, wait_s = STOPPED, 0
        for retry in range(1 + retries):
            if self.stop.wait(wait_s):
                break
            answer = self.request(messages, "retried" if retry else "asked")
            if answer is LIMITED or not isinstance(answer, Failure):
                break
            if answer.user_error:
                self.stop.set()        # here, at once: else this thread might ask another question
                raise ValueError(answer.user_error)
            self.last_reason = answer.reason
            if not answer.retry:
                break
            wait_s = self.wait_s(retry, answer.retry_after_s)
        return answer

    def wait_s(self, retry, retry_after_s):
        """Return the seconds to wait after retry number `retry`: the server's, else exponential backoff."""
        if retry_after_s is None:      # unseeded on purpose: processes must not retry in step
            retry_after_s = self.first_wait_s * 2 ** retry * random.SystemRandom().uniform(0.5, 1.5)
        return min(MAX_WAIT_S, max(0.0, retry_after_s))

    def before_request(self, request):
        """Hook of the client before each request, redirects too: check it, count it, note its socket.

        NotSent if the request must not be sent. The socket is noted once it is connected, also under TLS.
        """
        local = self.local.__dict__
        if self.aborted:
            raise NotSent(STOPPED)
        if local["statuses"]:
            self.check_redirect(request, local["statuses"])
        with self.lock:
            if sum(self.counts[name] for name in REQUESTS) >= self.limit:
                raise NotSent(LIMITED)
            self.counts["redirected" if local["statuses"] else local["kind"]] += 1

        def trace(event, info):
            if event.endswith(".connect_tcp.complete"):    # "connection" or, through such a proxy, "socks"
                if local["connection"]:                    # of the request that was redirected
                    local["connection"].close()
                local["connection"] = info["return_value"].get_extra_info("socket").dup()
                if local["expired"].is_set():              # while there was nothing to shut down
                    with suppress(OSError):
                        local["connection"].shutdown(socket.SHUT_RDWR)
        request.extensions["trace"] = trace

    def check_redirect(self, request, statuses):
        """NotSent unless the request, built by the client after responses of these statuses, may be sent."""
        if request.url.origin != self.origin or request.method != "POST":
            where = self.clean("{0.scheme}://{0.host}:{0.port}".format(request.url.origin))[:300]
            reason = f"a redirect with status {statuses[-1]} to {where}"
            raise NotSent(Failure(reason, user_error=(
                f"--endpoint={self.shown_url}: {reason} is not followed, only 307 and 308 within the server "
                "are; expected the address of a server that answers")))
        if len(statuses) > MAX_REDIRECTS:
            raise NotSent(Failure(f"more than {MAX_REDIRECTS} redirects"))

    def after_response(self, response):
        """Hook of the client after each response's headers: note a redirect; cut the body unless it answers.

        The client reads such a body to its end, and a server may never end it.
        """
        if response.has_redirect_location:
            self.local.statuses.append(response.status_code)
        if not response.is_success:
            from httpx2 import ByteStream
            body, stream = bytearray(), response.stream
            for part in stream:
                body += part
                if len(body) >= MAX_ERROR_BYTES:
                    break
            stream.close()
            response.stream = ByteStream(bytes(body[:MAX_ERROR_BYTES]))

    @contextmanager
    def time_limit(self):
        """Shut down this thread's connection after timeout_s; the block then raises TimeoutError.

        The client's own time-out is for a single read, and servers may send a little from time to time, such
        as DeepSeek's empty lines when it is busy.
        """
        local, expired = self.local.__dict__, threading.Event()
        local |= {"connection": None, "expired": expired}

        def shut_down():
            expired.set()
            with suppress(OSError, AttributeError):
                local["connection"].shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout_s, shut_down)
        timer.daemon = True
        timer.start()
        self.running.add(shut_down)
        try:
            yield
        except self.errors:
            if not expired.is_set():
                raise
        finally:
            self.running.remove(shut_down)
            timer.cancel()
            if local["connection"]:
                local["connection"].close()
        if expired.is_set():               # also without an error: a body of unknown length just ends early
            raise TimeoutError(f"no complete answer in {self.timeout_s} s")

    def request(self, messages, kind):
        """Send one request, counted as `kind`, and follow its redirects.

        Returns {"answer": text, maybe empty, "cut": whether at max_tokens, "usage": the server's token
        counts, "reasoned": whether reasoning came beside the text}, or a Failure; LIMITED at the limit.
        """
        self.local.kind, self.local.statuses = kind, []
        more = {"temperature": self.temperature, "max_tokens": self.max_tokens} | self.extra
        more = {name: value for name, value in more.items() if value is not None}
        try:
            with self.time_limit(), self.client.chat.completions.with_streaming_response.create(
                    model=self.model, messages=messages, extra_body=more) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    body += part
                    if len(body) > MAX_BYTES:
                        raise ValueError(f"an answer of more than {MAX_BYTES} bytes")
            data = json.loads(body)
            try:
                choice, usage = data["choices"][0], data.get("usage")
                text = choice["message"]["content"]
            except MALFORMED:          # an error of the server, for instance, with status 200
                raise ValueError(f"no answer in {json.dumps(data, ensure_ascii=False)}") from None
            if not isinstance(text, str | None):
                raise TypeError("content is not a string")
            items = usage.items() if isinstance(usage, dict) else ()
            counts = {self.clean(name): count for name, count in items if type(count) is int}
            reason = choice.get("finish_reason")
            if choice.get("error") or reason in BROKEN_OFF:
                raise ValueError(f"an answer that the server broke off: {choice.get('error') or reason}")
            cut = reason == "length"
            reasoned = any(choice["message"].get(name) for name in ("reasoning_content", "reasoning"))
            self.has_answered = True
            return {"answer": self.clean(text or ""), "cut": cut, "usage": counts, "reasoned": reasoned}
        except NotSent as stopped:
            return stopped.args[0]
        except self.errors as error:
            return self.failure(error)

    def failure(self, error):
        """Return the Failure for an exception, which is not kept: its request's headers contain the key."""
        status = getattr(error, "status_code", None)
        text = self.clean(str(error))
        for part in self.path_parts:
            text = text.replace(part, "[path]")
        reason = f"{type(error).__name__}: {text[:300]}"
        body = getattr(error, "body", None)
        moderated = isinstance(body, dict) and isinstance(body.get("metadata"), dict) and bool(
            body["metadata"].get("reasons"))                  # OpenRouter's 403 for this one question
        if status == 401 or status == 403 and not moderated:
            return Failure(reason, user_error=f"--endpoint-key-variable={self.key_variable}: --endpoint="
                                              f"{self.shown_url} refuses the key in it ({reason})")
        if status == 404 and not self.has_answered:       # later it is a gateway's, whose server restarts
            return Failure(reason, user_error=f"--endpoint-model={self.model}: unknown to --endpoint="
                                              f"{self.shown_url}, or no server is at that address ({reason})")
        retry = status is None or status in (404, 408, 409, 429) or status >= 500
        return Failure(reason, retry, retry_after_s(error.response.headers) if status else None,
                       refused=status in (400, 403, 413, 422))


def checked_url(url, flag="--endpoint"):
    """Return the base URL of an endpoint, which `flag` gives.

    ValueError for any other text, which may be a key and is not repeated. See also `without_path`.
    """
    with suppress(ValueError):
        parts = urlsplit(url)
        if URL.fullmatch(url) and parts.hostname and parts.port != 0:
            return url
    raise ValueError(f"{flag}: expected a base URL like https://api.deepseek.com/v1, without password, "
                     "query or fragment; what was given is not repeated: it may hold the key, which goes in "
                     "the variable that --endpoint-key-variable names")


def checked_extra(text):
    """Return the object in --endpoint-extra, merged into each request's body, where null removes a key; {} if
    none is given.

    ValueError if it is no JSON object, or has a key that cannot be replaced.
    """
    try:
        extra = json.loads(text or "{}")
        json.dumps(extra, ensure_ascii=False, allow_nan=False).encode()              # as it will be sent
    except MALFORMED:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f"--endpoint-extra={text}: expected a JSON object, such as "
                         '{"max_tokens": null, "max_completion_tokens": 512}')
    if fixed := sorted({"messages", "model", "stream"} & extra.keys()):
        raise ValueError(f"--endpoint-extra={text}: cannot replace {', '.join(fixed)}")
    return extra


def without_path(url):
    """Return a URL with "/..." for its path: what is printed and stored, because a path can hold a key."""
    return re.sub(r"(://[^/]*/).+", r"\1...", url, flags=re.DOTALL) if isinstance(url, str) else url


def retry_after_s(headers):
    """Return the seconds in a Retry-After header, a number or a date; None if absent or malformed."""
    value = headers.get("retry-after", "")
    with suppress(ValueError):
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        return parsedate_to_datetime(value).timestamp() - time.time()
    return None


class Cache:
    """A cache of answers in a .jsonl file, to which any number of processes append.

    A line that is not a record (for example, because its writer was killed) is skipped, counted in
    `bad_lines` and reported once. Claims are locks on single bytes of a second, empty file, which end with
    their process.
    """

    def __init__(self, path):
        self.path, self.lock = Path(path).absolute(), threading.Lock()      # a game may change the folder
        self.answers, self.offset, self.bad_lines = {}, 0, 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():           # reading a pipe would block
                raise OSError(errno.EINVAL, "not a file")
            self.claims = open(f"{self.path}.lock", "ab")
            self.refresh()
        except OSError as error:
            raise ValueError(f"--endpoint-cache={path}: {error.strerror}") from None

    def close(self):
        """Close the file of claims."""
        self.claims.close()

    def refresh(self):
        """Read the lines appended since the last call, by this process or another."""
        with self.lock, open(self.path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_SH)               # until the file is closed
            file.seek(self.offset)
            bad_before = self.bad_lines
            for line in file:
                complete = line.endswith(b"\n")            # else it is read again, after `add` has ended it
                self.offset += len(line) * complete
                try:
                    record = json.loads(line)
                    if not all(isinstance(record[name], str) for name in ("key", "answer")):
                        raise TypeError
                    self.answers[record["key"]] = record["answer"]
                except MALFORMED:
                    self.bad_lines += complete
            if self.bad_lines and not bad_before:
                warnings.warn(f"{self.path}: lines without an answer are skipped ({self.bad_lines} so far)")

    def add(self, record):
        """Append a record, after completing an unfinished last line. OSError names the file."""
        line = json.dumps(record).encode() + b"\n"
        try:
            with open(self.path, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    line = line if file.read() == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:                           # the error of a full disk names no file
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.answers[record["key"]] = record["answer"]

    @contextmanager
    def claim(self, key, patience_s, stop):
        """Lock a question against other processes for this block; yields whether it had to wait for one.

        Polls every POLL_S, for at most patience_s and until `stop` is set, because blocking locks could
        deadlock two processes.
        """
        byte, waited, deadline = int(key[:15], 16), False, time.monotonic() + patience_s
        while True:
            try:
                fcntl.lockf(self.claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline or stop.wait(POLL_S):
                    break
                waited = True
        try:
            yield waited
        finally:
            fcntl.lockf(self.claims, fcntl.LOCK_UN, 1, byte)
