"""Tests of infra/endpoint.py against a real HTTP server on loopback, which answers well, badly or never.

    python -m pytest tests/infra/test_endpoint.py             # seconds; skipped without the openai package
"""

import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import PATIENCE_S

pytest.importorskip("openai", reason="needs the openai package: pip install -r requirements-endpoint.txt")
from infra import endpoint as module  # noqa: E402
from infra.endpoint import Cache, Endpoint  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECRET = "sk-THISisTHEkey0123456789"
quiet = pytest.mark.filterwarnings("ignore:--endpoint")


def completion(text, **more):
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    return json.dumps({"id": "1", "object": "chat.completion", "created": 0, "model": "large",
                       "choices": [choice], "usage": usage} | more)


def good(question, nth):
    return 200, completion(f"A: {question}")


class Server:
    """A server that sends what `reply(question, nth)` returns.

    A reply is (status, body), (status, body, headers), or a function of the request handler that writes the
    response and finds the conversation in its `messages`. nth: how often this question came before. `seen`:
    all questions in order of arrival. `now` and `most`: the number of requests being answered at present, and
    its maximum.
    """

    def __init__(self, reply=good, port=0):
        self.reply, self.lock, self.released = reply, threading.Lock(), threading.Event()
        self.seen, self.requests, self.keys, self.now, self.most = [], [], set(), 0, 0
        self.http = ThreadingHTTPServer(("127.0.0.1", port), self.handler())
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.shown_url = f"http://127.0.0.1:{self.port}/..."                 # in messages
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def handler(server):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments):
                pass

            def do_GET(self):                  # what becomes of a POST that a 302 redirects
                server.seen.append("GET")
                server.keys.add(self.headers["Authorization"])
                self.send(server.reply("GET", 0))

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.messages, question = request["messages"], request["messages"][-1]["content"]
                with server.lock:
                    nth = server.seen.count(question)
                    server.seen.append(question)
                    server.requests.append((self.path, request))
                    server.keys.add(self.headers["Authorization"])
                    server.now += 1
                    server.most = max(server.most, server.now)
                try:
                    reply = server.reply(question, nth)
                finally:  # before it is sent: a client that has its answer may ask again at once
                    with server.lock:
                        server.now -= 1
                try:
                    self.send(reply)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def send(self, reply):
                if callable(reply):
                    return reply(self)
                status, body, headers = (*reply, {})[:3]
                body = body if isinstance(body, bytes) else body.encode()
                self.send_response(status)
                headers = {"Content-Type": "application/json", "Content-Length": len(body)} | headers
                for name, value in headers.items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(body)

        return Handler


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Set a key."""
    monkeypatch.setenv("LARGE_KEY", SECRET)


@pytest.fixture
def serve():
    servers = []

    def serving(reply=good, port=0):
        servers.append(Server(reply, port))
        return servers[-1]

    yield serving
    for server in servers:
        server.close()


@pytest.fixture
def connect(tmp_path):
    """A function that makes an Endpoint for a server, with a cache in the test's folder and short waits."""
    endpoints = []

    def connecting(server, **settings):
        quick = {"cache": tmp_path / "cache.jsonl", "first_wait_s": 0.001, "timeout_s": 5.0, "retries": 3}
        url, model = getattr(server, "url", server), settings.pop("model", "large")
        endpoints.append(Endpoint(url, model, "LARGE_KEY", **quick | settings))
        return endpoints[-1]

    yield connecting
    for endpoint in endpoints:
        endpoint.close()


def counts(sent=0, **nonzero):
    return {"cached": 0, "failed": 0, "limited": 0, "asked": sent, "retried": 0, "redirected": 0} | nonzero


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# A good server

@pytest.mark.slow
def test_answers_are_in_the_questions_order_if_asked_concurrently(serve, connect):
    def slower_if_earlier(question, nth):
        time.sleep(0.02 * (5 - int(question) % 5))
        return good(question, nth)

    server = serve(slower_if_earlier)
    questions = [str(i) for i in range(20)]
    endpoint = connect(server, concurrency=5)
    assert endpoint.ask(questions) == [f"A: {q}" for q in questions]
    assert 2 <= server.most <= 5
    assert endpoint.counts == counts(sent=20)


def test_equal_questions_are_asked_once(serve, connect):
    server = serve()
    endpoint = connect(server)
    assert endpoint.ask(["a", "b", "a", "a"]) == ["A: a", "A: b", "A: a", "A: a"]
    assert sorted(server.seen) == ["a", "b"]
    assert endpoint.counts == counts(sent=2)
    assert endpoint.ask([]) == []


def test_the_request_follows_the_protocol(serve, connect):
    server = serve()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    assert connect(server, temperature=0.5, max_tokens=9).ask([messages]) == ["A: Why?"]
    ((path, sent),) = server.requests
    assert path == "/v1/chat/completions"
    assert sent == {"model": "large", "messages": messages, "temperature": 0.5, "max_tokens": 9}
    assert server.keys == {f"Bearer {SECRET}"}


@pytest.mark.slow
def test_extra_keys_are_merged_into_the_request_and_null_removes_one(serve, connect):
    """Answers to other requests are cached apart; those of older caches, without extra keys, stay."""
    server, question = serve(), [{"role": "user", "content": "Why?"}]
    extra = '{"max_tokens": null, "max_completion_tokens": 9, "temperature": 1, "kwargs": {"thinking": null}}'
    endpoint = connect(server, extra=extra)
    assert endpoint.ask(["Why?"]) == ["A: Why?"]
    ((_, sent),) = server.requests
    assert sent == {"model": "large", "messages": question, "temperature": 1, "max_completion_tokens": 9,
                    "kwargs": {"thinking": None}}
    plain = connect(server)
    assert plain.ask(["Why?"]) == ["A: Why?"] and len(server.requests) == 2
    assert plain.cache_key(question).startswith("5cae74a8aeeca21d")
    assert connect(server, extra="{}").cache_key(question) == plain.cache_key(question)


@pytest.mark.parametrize("extra, expected", [
    ("{", "expected a JSON object"), ("[1]", "expected a JSON object"), ("null", "expected a JSON object"),
    ('{"a": NaN}', "expected a JSON object"), (r'{"a": "\ud83d"}', "expected a JSON object"),
    ('{"stream": true, "model": null}', "cannot replace model, stream"),
    ('{"messages": []}', "cannot replace messages")])
def test_extra_keys_that_cannot_be_sent_are_named(connect, extra, expected):
    with pytest.raises(ValueError, match=re.escape(f"--endpoint-extra={extra}: {expected}")):
        connect("http://127.0.0.1:9/v1", extra=extra)


def test_unpaired_surrogates_are_replaced_before_sending_and_caching(serve, connect, tmp_path):
    endpoint = connect(serve(lambda question, nth: (200, completion("half \ud83d, naïve 🙂"))))
    assert endpoint.ask(["half \udc00 and \0"]) == ["half ?, naïve 🙂"]
    assert rows(tmp_path / "cache.jsonl")[0]["question"] == [{"role": "user", "content": "half ? and \0"}]


# The cache

@pytest.mark.slow
def test_a_cached_answer_costs_nothing(serve, connect, tmp_path):
    server = serve()
    connect(server).ask(["a", "b"])
    other = serve(lambda question, nth: pytest.fail("paid twice"))
    again = connect(other, limit=0)              # the same model at another address
    assert again.ask(["b", "a", "b"]) == ["A: b", "A: a", "A: b"]
    assert again.counts == counts(cached=2) and other.seen == []
    first, second = rows(tmp_path / "cache.jsonl")
    assert {first["answer"], second["answer"]} == {"A: a", "A: b"}
    assert first["usage"] == {"prompt_tokens": 7, "completion_tokens": 2}
    assert len(first["key"]) == 64 and first["key"] != second["key"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"model": "larger"}, {"temperature": 1.0}, {"max_tokens": 5}])
def test_the_cache_distinguishes_models_and_sampling_settings(serve, connect, change):
    server = serve()
    connect(server).ask(["a"])
    connect(server, **change).ask(["a"])
    assert server.seen == ["a", "a"]


@pytest.mark.slow
def test_an_incomplete_line_is_skipped_completed_and_reported_once(serve, connect, tmp_path):
    server, path = serve(), tmp_path / "cache.jsonl"
    connect(server).ask(["a", "b"])
    lines = path.read_bytes().splitlines(keepends=True)
    broken = b"[" * 100_000 + b"\n" + b'{"key": 1, "answer": "x"}\n\xff\n'
    path.write_bytes(lines[0] + broken + lines[1][:-20])
    with pytest.warns(UserWarning, match="3 so far") as reported:
        endpoint = connect(server)
        question = json.loads(lines[1])["question"][0]["content"]
        assert endpoint.ask([question]) == [f"A: {question}"]     # whose line is incomplete
        assert endpoint.ask(["a", "b", "c"]) == ["A: a", "A: b", "A: c"]
    assert len(reported) == 1
    assert endpoint.counts == counts(sent=2, cached=2)
    assert endpoint.cache.bad_lines == 4                   # the incomplete line was completed meanwhile
    assert path.read_bytes().count(b"\n") == 7 and path.read_bytes().startswith(lines[0])


def test_a_last_line_without_newline_is_read(serve, connect, tmp_path):
    server, path = serve(), tmp_path / "cache.jsonl"
    connect(server).ask(["a"])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    endpoint = connect(server)
    assert endpoint.ask(["a", "b"]) == ["A: a", "A: b"]
    assert server.seen == ["a", "b"]
    assert [row["answer"] for row in rows(path)] == ["A: a", "A: b"]
    assert endpoint.cache.bad_lines == 0


@pytest.mark.slow
def test_a_full_disk_is_named_and_loses_no_other_answer(serve, connect, tmp_path):
    server, path = serve(), tmp_path / "cache.jsonl"
    endpoint = connect(server)
    endpoint.ask(["a"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, hard))
    try:
        with pytest.raises(OSError, match="cache.jsonl"):
            endpoint.ask(["b"])
        with pytest.raises(OSError, match="cache.jsonl"):
            endpoint.ask(["b"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.warns(UserWarning, match="without an answer"):
        assert endpoint.ask(["b"]) == ["A: b"]
        assert connect(server, limit=0).ask(["a", "b"]) == ["A: a", "A: b"]


# Two processes

ASKER = """
import json, sys, time
from pathlib import Path
from infra.endpoint import Endpoint
url, cache, order = sys.argv[1:]
endpoint = Endpoint(url, "large", "LARGE_KEY", cache, concurrency=4)
questions = [str(i) for i in range(24)][::int(order)]
print("ready", flush=True)
sys.stdin.readline()
answers = endpoint.ask(questions)
print(json.dumps([dict(zip(questions, answers)), endpoint.counts]))
"""


def start(server, cache, order=1):
    return subprocess.Popen([sys.executable, "-c", ASKER, server.url, str(cache), str(order)], cwd=ROOT,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process):
    out, _ = process.communicate("\n", timeout=PATIENCE_S)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("orders, concurrent", [((1, 1), 4), ((1, -1), 8)], ids=["same order", "reversed"])
def test_two_processes_with_one_cache_pay_for_each_question_once(serve, tmp_path, orders, concurrent):
    """The server answers once `concurrent` questions have arrived: in the reversed case, of both processes.

    A third process, started afterwards, finds everything in the cache.
    """
    enough = threading.Event()

    def slow(question, nth):
        if len(server.seen) >= concurrent:
            enough.set()
        enough.wait(PATIENCE_S)
        time.sleep(0.03)
        return good(question, nth)

    server, path = serve(slow), tmp_path / "cache.jsonl"
    both = [start(server, path, order) for order in orders]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [finish(process) for process in both]
    for got, count in answers:
        assert got == {str(i): f"A: {i}" for i in range(24)}
        assert count["asked"] + count["cached"] == 24
    if concurrent == 8:
        assert all(count["asked"] >= 4 for _, count in answers)
    assert Counter(server.seen) == {str(i): 1 for i in range(24)}
    assert sorted(row["answer"] for row in rows(path)) == sorted(f"A: {i}" for i in range(24))
    assert finish(start(server, path))[1] == counts(cached=24)


@pytest.mark.slow
def test_a_killed_process_leaves_no_question_locked(serve, connect, tmp_path):
    arrived = threading.Event()

    def first_hangs(question, nth):
        if len(server.seen) == 4:                  # all four threads of the process are waiting
            arrived.set()
        if nth == 0:
            server.released.wait(PATIENCE_S)
        return good(question, nth)

    server = serve(first_hangs)
    process = start(server, tmp_path / "cache.jsonl")
    process.stdin.write("\n")
    process.stdin.flush()
    assert arrived.wait(PATIENCE_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    start_s = time.monotonic()
    assert connect(server).ask(["0", "1", "2", "3"]) == ["A: 0", "A: 1", "A: 2", "A: 3"]
    assert time.monotonic() - start_s < PATIENCE_S


LOCKER = """
import fcntl, os, sys
claims, byte, cache = sys.argv[1:]
file = open(claims, "ab")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(byte))
print("locked", flush=True)
line = sys.stdin.readline()
if line.strip():
    with open(cache, "a") as answers:
        answers.write(line)
"""


@pytest.fixture
def lock(tmp_path):
    """A function that starts a process which has locked a key.

    The process unlocks it when it gets a line on stdin, which it appends to the cache unless it is empty.
    """
    processes = []

    def locking(key):
        path = tmp_path / "cache.jsonl"
        command = [sys.executable, "-c", LOCKER, f"{path}.lock", str(int(key[:15], 16)), str(path)]
        processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "locked\n"
        return processes[-1]

    yield locking
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("answered", [True, False])
def test_a_question_of_a_second_process_is_waited_for(serve, connect, lock, answered):
    server = serve()
    endpoint = connect(server)
    key = endpoint.cache_key(endpoint.messages("a"))
    process = lock(key)
    line = json.dumps({"key": key, "answer": "theirs"}) if answered else ""
    threading.Timer(0.3, lambda: process.communicate(line + "\n")).start()
    assert endpoint.ask(["b", "a"]) == ["A: b", "theirs" if answered else "A: a"]
    assert server.seen == (["b"] if answered else ["b", "a"])
    assert endpoint.counts == (counts(sent=1, cached=1) if answered else counts(sent=2))


@pytest.mark.slow
@quiet
def test_a_question_at_which_a_second_process_just_failed_is_asked_once(serve, connect, lock, monkeypatch):
    """The second process fails while this one waits: at its first look."""
    server = serve(lambda question, nth: (500, ""))
    endpoint = connect(server)
    process, wait = lock(endpoint.cache_key(endpoint.messages("a"))), endpoint.stop.wait
    monkeypatch.setattr(endpoint.stop, "wait", lambda seconds: (
        process.poll() is None and process.communicate("\n")) and wait(seconds))
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.counts == counts(sent=1, failed=1)


def test_a_game_may_change_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache("cache.jsonl")
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    cache.refresh()
    cache.close()
    assert not any((tmp_path / "there").iterdir())


@pytest.mark.slow
def test_the_wait_for_a_frozen_process_ends(tmp_path, lock):
    cache, key = Cache(tmp_path / "cache.jsonl"), "f" * 64
    lock(key)
    start_s = time.monotonic()
    with cache.claim(key, 0.2, threading.Event()) as waited:
        assert waited and 0.2 <= time.monotonic() - start_s < PATIENCE_S
    cache.close()


# Failures that are retried

@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 500, 502, 503, 408, 409])
def test_a_server_that_fails_twice_is_asked_three_times(serve, connect, status):
    server = serve(lambda q, nth: good(q, nth) if nth == 2 else (status, '{"error": {"message": "busy"}}'))
    endpoint = connect(server)
    assert endpoint.ask(["a", "b"]) == ["A: a", "A: b"]
    assert endpoint.counts == counts(sent=2, retried=4)
    assert Counter(server.seen) == {"a": 3, "b": 3}


@pytest.mark.slow
@pytest.mark.parametrize("value, waited_s", [
    ("0.4", 0.4), ("3600", 0.5), ("Tue, 01 Jan 2999 00:00:00 GMT", 0.5), ("-3", 0.0), ("nan", 0.0),
    ("soon", 0.5)])
def test_retry_after_is_obeyed_up_to_a_maximum(serve, connect, monkeypatch, value, waited_s):
    """Another text than a number or a date is ignored: the endpoint's own wait would be the maximum."""
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.5)
    times = []

    def busy_once(question, nth):
        times.append(time.monotonic())
        return good(question, nth) if nth else (429, "{}", {"Retry-After": value})

    endpoint = connect(serve(busy_once), first_wait_s=60.0)
    assert endpoint.wait_s(0, module.retry_after_s({"retry-after": value})) == waited_s
    assert endpoint.ask(["a"]) == ["A: a"]
    assert waited_s <= times[1] - times[0] < waited_s + PATIENCE_S


def test_a_date_to_retry_after_is_read_as_the_seconds_until_then():
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    assert 0 < module.retry_after_s({"retry-after": in_a_minute}) <= 60


def test_waits_double_up_to_a_maximum_and_are_random(connect):
    endpoint = connect("http://127.0.0.1:9/v1", first_wait_s=1.0)
    for retry in range(5):
        waits = [endpoint.wait_s(retry, None) for _ in range(200)]
        assert 0.5 * 2 ** retry <= min(waits) and max(waits) <= 1.5 * 2 ** retry and len(set(waits)) > 100
        assert max(waits) - min(waits) > 0.5 * 2 ** retry
    assert endpoint.wait_s(50, None) == module.MAX_WAIT_S == 60


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("drips", [False, True], ids=["silent", "dripping"])
def test_a_hang_ends(serve, connect, drips):
    """Dripping: empty lines from time to time, as from DeepSeek, so that no single read times out."""
    def hang(handler):
        if drips:
            handler.send((200, "", {"Content-Length": 10_000}))
        while not server.released.wait(0.05):
            if drips:
                handler.wfile.write(b"\n")

    server = serve(lambda question, nth: hang)
    endpoint = connect(server, timeout_s=0.2, retries=1)
    start_s = time.monotonic()
    assert endpoint.ask(["a", "b"]) == [None, None]
    assert 0.4 <= time.monotonic() - start_s < PATIENCE_S
    assert endpoint.counts == counts(sent=2, retried=2, failed=2)


def drip_headers(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for k in range(200):
        handler.wfile.write(b"X-%d: y\r\n" % k)
        time.sleep(0.05)


def promise_more(handler):
    for _ in range(200):
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        time.sleep(0.05)


def drip_a_body_of_unknown_length(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    for _ in range(200):
        handler.wfile.write(b"\n")
        time.sleep(0.05)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("drips", [drip_headers, promise_more, drip_a_body_of_unknown_length])
def test_the_time_limit_includes_headers_and_body(serve, connect, drips):
    endpoint = connect(serve(lambda question, nth: drips), timeout_s=0.3, retries=0)
    started = time.monotonic()
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.last_reason == "TimeoutError: no complete answer in 0.3 s"
    assert time.monotonic() - started < 5                        # the server sends for ten seconds


@pytest.mark.slow
@quiet
def test_the_time_limit_includes_the_look_up_of_the_name(serve, connect, monkeypatch):
    """It passes before there is a connection that could be shut down."""
    look_up = socket.getaddrinfo

    def slow(*arguments, **named):
        time.sleep(0.3)
        return look_up(*arguments, **named)

    endpoint = connect(serve(lambda question, nth: drip_headers), timeout_s=0.2, retries=0)
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    started = time.monotonic()
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.last_reason == "TimeoutError: no complete answer in 0.2 s"
    assert time.monotonic() - started < 5                        # the server sends for ten seconds


@pytest.mark.parametrize("name, value", [("SSL_CERT_FILE", "/nowhere.pem"), ("HTTPS_PROXY", "foo://a:b@c")])
def test_what_the_environment_says_of_connections_is_named(connect, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"environment variables .*{name}"):
        connect("https://localhost:1")


@pytest.mark.parametrize("proxy", ["connection", "socks"])
def test_the_socket_is_known_also_behind_a_proxy(connect, proxy):
    """By the client's events: a SOCKS proxy has its own, and would need the package socksio here."""
    endpoint, (ours, theirs) = connect("http://127.0.0.1:9/v1"), socket.socketpair()
    endpoint.local.kind, endpoint.local.statuses = "asked", []
    request = SimpleNamespace(extensions={})
    with ours, theirs, pytest.raises(TimeoutError), endpoint.time_limit():
        endpoint.before_request(request)
        stream = SimpleNamespace(get_extra_info=lambda name: ours)
        request.extensions["trace"](f"{proxy}.connect_tcp.complete", {"return_value": stream})
        endpoint.abort()
        assert theirs.recv(1) == b""                           # else it would wait


@quiet
def test_an_endless_answer_is_cut_off(serve, connect, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100_000)

    def flood(handler):
        handler.send((200, "", {"Content-Length": 10**12}))
        while True:
            handler.wfile.write(b" " * 65536)

    endpoint = connect(serve(lambda question, nth: flood), retries=0)
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.last_reason == "ValueError: an answer of more than 100000 bytes"


def test_a_cache_that_is_a_pipe_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"--endpoint-cache={tmp_path}/pipe: not a file"):
        module.Cache(tmp_path / "pipe")


def test_empty_lines_before_an_answer_do_not_matter(serve, connect):
    assert connect(serve(lambda question, nth: (200, "\n\n\n" + completion("yes")))).ask(["a"]) == ["yes"]


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("body", [
    "{not json", "", "[]", '"text"', "null", "{}", '{"choices": []}', '{"choices": null}',
    '{"choices": [{}]}', '{"choices": [{"message": null}]}', '{"choices": [{"message": {"content": 5}}]}',
    '{"choices": {"0": 1}}',
    '{"choices": [{"message": {"content": ["a"]}}]}', '{"error": {"message": "overloaded"}}',
    b"\xff\xfe\x00garbage", "[" * 100_000, "<html>busy</html>"], ids=lambda body: str(body)[:30])
@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_malformed_answer_is_retried_then_failed(serve, connect, tmp_path, body, kind):
    server = serve(lambda question, nth: (200, body, {"Content-Type": kind}))
    endpoint = connect(server, retries=1)
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.counts == counts(sent=1, retried=1, failed=1)
    assert (tmp_path / "cache.jsonl").read_bytes() == b""


@quiet
@pytest.mark.parametrize("body, reason", [
    ('{"error": {"message": "model is loading"}}', '{"error": {"message": "model is loading"}}'),
    ('{"choices": null}', '{"choices": null}'), ("[]", r"\[\]"), ('{"choices": [{}]}', '{"choices": '),
    (json.dumps({"error": SECRET + "x" * 9999}), r'{"error": "\[key\]x*')])
def test_an_answer_without_a_choice_is_shown_in_the_reason(serve, connect, body, reason):
    """As an error that a server sends with status 200."""
    endpoint = connect(serve(lambda question, nth: (200, body)), retries=0)
    assert endpoint.ask(["a"]) == [None]
    assert re.match(f"ValueError: no answer in {reason}", endpoint.last_reason)
    assert len(endpoint.last_reason) < 400


@pytest.mark.parametrize("headers", [{"Content-Length": 9999}, {"Content-Encoding": "gzip"},
                                     {"Content-Length": "x"}], ids=["cut", "not gzip", "bad header"])
def test_a_broken_transfer_is_retried(serve, connect, headers):
    server = serve(lambda question, nth: (200, completion("yes"), {} if nth else headers))
    endpoint = connect(server)
    assert endpoint.ask(["a"]) == ["yes"]
    assert endpoint.counts == counts(sent=1, retried=1)


@pytest.mark.parametrize("usage", [None, [], "much", {"prompt_tokens": 3, "note": "x", "details": {"a": 1}}])
def test_usage_of_any_form_is_accepted(serve, connect, tmp_path, usage):
    assert connect(serve(lambda question, nth: (200, completion("yes", usage=usage)))).ask(["a"]) == ["yes"]
    kept = {"prompt_tokens": 3} if isinstance(usage, dict) else {}
    assert rows(tmp_path / "cache.jsonl")[0]["usage"] == kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_that_a_model_reasoned_is_noted(serve, connect, name):
    """By either name that servers have for it."""
    choices = [{"message": {"role": "assistant", "content": "yes", name: "It is."}}]
    for given, reasoned in (({"choices": choices}, True), ({}, False)):
        endpoint = connect(serve(lambda question, nth, given=given: (200, completion("yes", **given))))
        assert endpoint.answer(endpoint.messages("a"), 0)["reasoned"] == reasoned


# The end of a run

@pytest.fixture
def hanging(serve):
    """A server that does not answer while the test runs, and `arrived`, set by the first question."""
    def hang(question, nth):
        arrived.set()
        server.released.wait(PATIENCE_S)
        return good(question, nth)

    server, arrived = serve(hang), threading.Event()
    return server, arrived


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_an_answer(hanging, connect):
    """Even one that does not wake the main thread: it went to another thread, or came as the wait began."""
    server, arrived = hanging

    def interrupt():
        arrived.wait(PATIENCE_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    endpoint, started = connect(server, timeout_s=PATIENCE_S), time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            endpoint.ask(["a", "b"])
    finally:
        signal.signal(signal.SIGINT, before)
    for thread in threading.enumerate():
        if thread.name.startswith("endpoint"):           # one that was being started: the pool does not wait
            thread.join(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S


def test_close_ends_a_request_and_none_is_sent_later(hanging, connect):
    """At exit Python waits for the threads that wait for an answer."""
    server, arrived = hanging
    endpoint, outcomes = connect(server, timeout_s=PATIENCE_S, cache=""), []
    messages, started = endpoint.messages("a"), time.monotonic()
    thread = threading.Thread(target=lambda: outcomes.append(endpoint.answer(messages, retries=3)))
    thread.start()
    assert arrived.wait(PATIENCE_S)
    endpoint.close()
    thread.join(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S and isinstance(outcomes[0], module.Failure)
    ended = connect(server)
    ended.abort()
    assert ended.request(messages, "asked") is module.STOPPED and server.seen == ["a"]


# Redirects

def redirect(status, location):
    return status, "", {"Location": location}


@pytest.mark.parametrize("status", [307, 308])
@pytest.mark.parametrize("absolute", [False, True])
def test_redirects_within_the_server_are_followed_and_counted(serve, connect, status, absolute):
    def further(question, nth):
        base = server.url if absolute else "/v1"
        return redirect(status, f"{base}/at/{nth}") if nth < module.MAX_REDIRECTS else good(question, nth)

    server = serve(further)
    endpoint = connect(server)
    assert endpoint.ask(["a"]) == ["A: a"]
    assert [path for path, _ in server.requests] == [
        "/v1/chat/completions", "/v1/at/0", "/v1/at/1", "/v1/at/2"]
    assert all(sent == server.requests[0][1] for _, sent in server.requests)
    assert server.keys == {f"Bearer {SECRET}"}
    assert endpoint.counts == counts(sent=1, redirected=3)


@quiet
def test_a_redirect_loop_is_cut_and_every_request_of_it_is_counted(serve, connect):
    server = serve(lambda question, nth: redirect(307, "/v1/chat/completions"))
    endpoint = connect(server)
    assert endpoint.ask(["a"]) == [None]
    assert server.seen == ["a"] * 4 and endpoint.last_reason == "more than 3 redirects"
    assert endpoint.counts == counts(sent=1, redirected=3, failed=1)


@quiet
def test_the_limit_counts_redirects(serve, connect):
    server = serve(lambda question, nth: redirect(307, "/v1/chat/completions"))
    endpoint = connect(server, limit=3)
    assert endpoint.ask(["a", "a"]) == [None, None]
    assert server.seen == ["a"] * 3
    assert endpoint.counts == counts(sent=1, redirected=2, limited=1)


@pytest.mark.parametrize("status", [301, 302, 303])
def test_a_redirect_that_drops_the_question_is_not_followed(serve, connect, status):
    """The client would make a GET of it, without a body."""
    server = serve(lambda question, nth: redirect(status, "/v1/chat/completions"))
    endpoint = connect(server)
    message = f"a redirect with status {status} to http://127.0.0.1:{server.port} is not followed"
    with pytest.raises(ValueError, match=f"--endpoint={server.shown_url}: {message}"):
        endpoint.ask(["a"])
    assert server.seen == ["a"] and endpoint.counts == counts(sent=1)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("hops", [0, 1])
def test_nothing_is_sent_to_another_server(serve, connect, status, hops):
    """Another port is another server. hops: redirects within the first server before."""
    other = serve()
    server = serve(lambda question, nth: redirect(307, "/v1/more") if nth < hops
                   else redirect(status, f"{other.url}/chat/completions"))
    message = (f"--endpoint={server.shown_url}: a redirect with status {status} to "
               f"http://127.0.0.1:{other.port} is not followed")
    with pytest.raises(ValueError, match=message) as raised:
        connect(server).ask(["a"])
    assert (other.seen, other.keys) == ([], set()) and len(server.seen) == 1 + hops
    assert SECRET not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("location", [
    "https://127.0.0.1:{port}/v1", "http://localhost:{port}/v1", "ftp://127.0.0.1/", "//elsewhere/v1",
    "http://key:word@elsewhere/", "http://" + "x" * 900])
def test_another_scheme_or_name_is_another_server(serve, connect, location):
    server = serve(lambda question, nth: redirect(307, location.format(port=server.port)))
    with pytest.raises(ValueError, match="a redirect with status 307 to .* is not followed") as raised:
        connect(server).ask(["a"])
    assert server.seen == ["a"] and len(str(raised.value)) < 600 and "word" not in str(raised.value)


@quiet
@pytest.mark.parametrize("location", [
    "http://[", "http://a:b/", "http://h:99999999/", "http://\xff\xfe/", "http:///",
    "http://[fe80::1%25eth0]/", "http://xn--/", "\x7f", "http://\x01/", "mailto:me"], ids=repr)
def test_a_malformed_redirect_is_a_failure(serve, connect, location):
    """Or an address of another server, which is not asked, as the client's library reads it."""
    endpoint = connect(serve(lambda question, nth: redirect(307, location)), retries=1)
    try:
        assert endpoint.ask(["a"]) == [None]
    except ValueError as error:
        assert "a redirect with status 307 to " in str(error) and "is not followed" in str(error)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("status", [307, 400, 500])
def test_an_endless_body_of_an_error_or_redirect_is_cut(serve, connect, status):
    def flood(handler):
        handler.send((status, "", {"Content-Length": 10**12, "Location": "/v1/chat/completions"}))
        while True:
            handler.wfile.write(b" " * 65536)

    endpoint = connect(serve(lambda question, nth: flood), retries=0, timeout_s=PATIENCE_S)
    assert endpoint.ask(["a"]) == [None]
    assert endpoint.last_reason.startswith({307: "more than 3 redirects", 400: "BadRequestError",
                                            500: "InternalServerError"}[status])


# Failures that are final

@pytest.mark.parametrize("text", ["", " \n", None])
def test_an_empty_answer_is_a_failure_and_is_not_cached(serve, connect, tmp_path, text):
    server = serve(lambda question, nth: (200, completion(text)))
    endpoint = connect(server)
    with pytest.warns(UserWarning, match="1 of 1 questions failed, the last one with an empty answer"):
        assert endpoint.ask(["a"]) == [None]
    assert server.seen == ["a"] and (tmp_path / "cache.jsonl").read_bytes() == b""
    server.reply = good
    assert endpoint.ask(["a"]) == ["A: a"]


def test_a_refused_question_fails_at_once_and_the_others_are_answered(serve, connect):
    refused = 400, '{"error": {"message": "too long"}}'
    server = serve(lambda q, nth: refused if q == "long" else good(q, nth))
    endpoint = connect(server)
    failed = "1 of 3 questions failed, the last one with BadRequestError.*too long"
    with pytest.warns(UserWarning, match=failed):
        assert endpoint.ask(["a", "long", "b"]) == ["A: a", None, "A: b"]
    assert endpoint.counts == counts(sent=3, failed=1)


@pytest.mark.parametrize("status", [400, 413, 422, 429, 500])
def test_a_request_that_was_read_and_will_never_be_answered_is_told_from_others(serve, connect, status):
    endpoint = connect(serve(lambda question, nth: (status, "{}")))
    assert endpoint.answer(endpoint.messages("a"), 0).refused == (status in (400, 413, 422))


@pytest.mark.slow
@pytest.mark.parametrize("status, flag, known", [
    (401, "--endpoint-key-variable=LARGE_KEY", "abc"), (403, "--endpoint-key-variable=LARGE_KEY", "abc"),
    (404, "--endpoint-model=large", "")])
def test_a_wrong_key_or_model_stops_at_once(serve, connect, status, flag, known):
    refused = status, '{"error": {"message": "no such"}}'
    server = serve(lambda q, nth: good(q, nth) if q in known else refused)
    endpoint = connect(server, concurrency=1)
    with pytest.raises(ValueError, match=flag) as raised:
        endpoint.ask([*known, *map(str, range(50))])
    assert server.shown_url in str(raised.value) and "no such" in str(raised.value)
    assert server.seen == [*known, "0"]
    assert connect(server, limit=0).ask([*known]) == [f"A: {q}" for q in known]               # all cached


def test_a_stop_sends_no_other_question_and_counts_none_as_failed(serve, connect):
    """Of one question the answer is there, though: what needs it need not stop."""
    sent = []
    server = serve(lambda question, nth: sent.append(question) or good(question, nth))
    endpoint = connect(server, concurrency=2, should_stop=sent)               # true from the first one on
    answers = endpoint.ask([*map(str, range(50))])
    assert answers[0] == "A: 0" and 1 <= len(sent) <= 4 and answers.count(None) == 50 - len(sent)
    assert endpoint.counts["failed"] == 0 and endpoint.ask(["more"]) == ["A: more"]


@pytest.mark.slow
@quiet
def test_a_question_that_is_refused_by_moderation_fails_alone(serve, connect):
    """OpenRouter's form, which may be the answer to the first question of a process."""
    flagged = {"error": {"code": 403, "message": "flagged", "metadata": {"reasons": ["violence"]}}}
    server = serve(lambda q, nth: (403, json.dumps(flagged)) if q == "axe" else good(q, nth))
    endpoint = connect(server, concurrency=1)
    assert endpoint.ask(["axe", "a", "b"]) == [None, "A: a", "A: b"]
    assert server.seen == ["axe", "a", "b"] and endpoint.counts["failed"] == 1
    fresh = connect(server)
    assert fresh.answer(fresh.messages("axe"), 3).refused


def test_a_404_after_an_answer_is_tried_again(serve, connect):
    """A gateway's, while the server behind it starts again."""
    server = serve(lambda q, nth: good(q, nth) if q == "a" or nth else (404, "{}"))
    assert connect(server, concurrency=1).ask(["a", "b"]) == ["A: a", "A: b"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [
    {"finish_reason": "insufficient_system_resource"}, {"finish_reason": "abort"},
    {"finish_reason": "error", "error": {"code": 502, "message": "upstream"}}])
def test_an_answer_that_the_server_broke_off_is_none(serve, connect, broken):
    """It is asked again, and not kept."""
    part = {"choices": [{"message": {"role": "assistant", "content": "<thi"}} | broken]}
    server = serve(lambda q, nth: good(q, nth) if nth else (200, json.dumps(part)))
    assert connect(server).ask(["a"]) == ["A: a"] and server.seen == ["a", "a"]
    assert connect(server, limit=0).ask(["a"]) == ["A: a"]


@pytest.mark.slow
def test_an_endpoint_that_dies_midway_and_works_again(serve, connect, tmp_path):
    def die(handler):
        handler.connection.close()

    server = serve(lambda q, nth: die if int(q) >= 10 else good(q, nth))
    endpoint, questions = connect(server, concurrency=2, retries=2), [str(i) for i in range(200)]
    failed = "190 of 200 questions failed, the last one with APIConnectionError"
    with pytest.warns(UserWarning, match=failed):
        answers = endpoint.ask(questions)
    assert answers == [f"A: {q}" if i < 10 else None for i, q in enumerate(questions)]
    # a late good answer, of the other thread, may come after all but one failure, and their row begins again
    most = 10 + (module.FAILURES_IN_A_ROW - 1) + module.FAILURES_IN_A_ROW + 1
    assert endpoint.counts["failed"] == 190 and endpoint.counts["asked"] <= most
    assert sorted(row["answer"] for row in rows(tmp_path / "cache.jsonl")) == sorted(answers[:10])

    before = len(server.seen)
    with pytest.warns(UserWarning, match="190 of 200 questions failed"):
        assert endpoint.ask(questions) == answers
    assert server.seen[before:] == ["10"]                     # one request shows that it is still dead
    server.reply = good
    assert endpoint.ask(questions) == [f"A: {q}" for q in questions]
    assert Counter(server.seen[before + 1:]) == {q: 1 for q in questions[10:]}


@pytest.mark.slow
@quiet
def test_an_address_without_a_server(connect):
    server = Server()
    server.close()
    endpoint = connect(server, retries=1)
    assert endpoint.ask([str(i) for i in range(50)]) == [None] * 50
    assert endpoint.counts["failed"] == 50 and endpoint.counts["asked"] < 50


@quiet
def test_the_limit_counts_requests(serve, connect):
    server = serve(lambda question, nth: good(question, nth) if nth else (500, ""))
    endpoint = connect(server, limit=5, concurrency=1)
    with pytest.warns(UserWarning, match="--endpoint-limit=5: reached, so from here on questions"):
        assert endpoint.ask(["a", "b", "c", "d"]) == ["A: a", "A: b", None, None]      # c is not retried
    assert len(server.seen) == 5
    assert endpoint.counts == counts(sent=3, retried=2, limited=2)
    assert endpoint.ask(["a", "e"]) == ["A: a", None]
    assert endpoint.counts == counts(sent=3, retried=2, limited=3, cached=1)


@pytest.mark.slow
@quiet
def test_the_limit_applies_to_concurrent_requests(serve, connect):
    server = serve()
    endpoint = connect(server, limit=7)
    answers = endpoint.ask([str(i) for i in range(40)])
    assert len(server.seen) == 7 == 40 - answers.count(None)
    assert endpoint.counts == counts(sent=7, limited=33)


# The key

@pytest.mark.parametrize("status", [200, 400, 401, 404, 500])
def test_the_key_appears_only_in_the_header(serve, connect, tmp_path, caplog, capfd, status):
    """The server repeats it in its answers, and the question contains it."""
    body = json.dumps({"error": {"message": SECRET * 40}})   # so often that every cut falls in it
    if status == 200:
        body = completion(f"yes, {SECRET}", usage={SECRET: 1})
    server = serve(lambda question, nth: (status, body))
    endpoint = connect(server, retries=1, cache=tmp_path / "here" / "cache.jsonl")
    outputs = [repr(endpoint), str(endpoint), str(endpoint.counts), str(vars(endpoint))]
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG):
        warnings.simplefilter("always")
        try:
            outputs.append(str(endpoint.ask([f"is {SECRET} good?"])))
        except ValueError as error:
            assert error.__context__ is None and error.__cause__ is None
            outputs += [*traceback.format_exception(error), repr(error.__dict__)]
    outputs += [str(one.message) for one in warned] + [caplog.text, *capfd.readouterr(), endpoint.last_reason]
    files = [path for path in (tmp_path / "here").rglob("*") if path.is_file()]
    assert len(files) == 2
    outputs += [path.read_text() for path in files]
    assert SECRET not in "\n".join(outputs) and SECRET[:4] not in "\n".join(outputs)
    assert server.keys == {f"Bearer {SECRET}"} and server.seen[0] == "is [key] good?"
    assert "[key]" in "\n".join(outputs)


@pytest.mark.parametrize("key, sent", [("EMPTY", "EMPTY"), ("sevenis", "sevenis"), ("eightare", "[key]")])
def test_a_key_below_eight_characters_is_a_placeholder_and_is_not_masked(
        serve, connect, monkeypatch, key, sent):
    monkeypatch.setenv("LARGE_KEY", f"{key}\n")
    server = serve()
    assert connect(server).ask([f"is {key} a word?"]) == [f"A: is {sent} a word?"]
    assert server.keys == {f"Bearer {key}"}


# Mistakes before the first request

@pytest.mark.parametrize("value", [None, "", "  \n"])
def test_a_key_that_is_not_set_is_named(monkeypatch, tmp_path, value):
    monkeypatch.delenv("LARGE_KEY")
    if value is not None:
        monkeypatch.setenv("LARGE_KEY", value)
    with pytest.raises(ValueError, match="--endpoint-key-variable=LARGE_KEY: .* not set"):
        Endpoint("http://127.0.0.1:9/v1", "large", "LARGE_KEY", tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["sk-naïve-12345", "sk-two words", "sk-line\nline"])
def test_a_key_with_invalid_characters_is_not_repeated(monkeypatch, tmp_path, value):
    monkeypatch.setenv("LARGE_KEY", value)
    with pytest.raises(ValueError, match="--endpoint-key-variable=LARGE_KEY: .* characters") as raised:
        Endpoint("http://127.0.0.1:9/v1", "large", "LARGE_KEY", tmp_path / "c")
    assert value[3:] not in str(raised.value)


@pytest.mark.parametrize("url", ["", "api.deepseek.com/v1", "ftp://host/v1", "http://", "http://host:port/v1",
                                 "http://[::1/v1", "http://host:99999/v1", "http://host\\x/v1",
                                 "http://host/v1\x7f", "http://h%2fost/v1", "sk-1234567890"])
def test_an_invalid_address_is_refused_and_not_repeated(tmp_path, url):
    """It may be the key itself, given in the wrong place."""
    with pytest.raises(ValueError, match="--endpoint: expected a base URL like ") as raised:
        Endpoint(url, "large", "LARGE_KEY", tmp_path / "c")
    assert not url or url not in str(raised.value).replace("https://api.deepseek.com/v1", "")


@pytest.mark.parametrize("url", ["https://me:hunter2hunter2@host/v1", "https://hunter2hunter2@host/v1",
                                 "https://host/v1?api-key=hunter2hunter2", "https://host/v1#hunter2hunter2"])
def test_a_key_in_the_address_is_refused_and_not_repeated(tmp_path, url):
    with pytest.raises(ValueError, match="--endpoint: .*--endpoint-key-variable") as raised:
        Endpoint(url, "large", "LARGE_KEY", tmp_path / "c")
    assert "hunter2" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("repeated", ["/v1/hunter2 hunter2/v1/chat/completions", "hunter2%20hunter2"])
def test_a_key_in_the_path_of_the_address_is_used_but_not_printed(serve, connect, repeated):
    """Servers repeat the path in their errors."""
    path = "/v1/hunter2%20hunter2/v1/chat/completions"
    body = json.dumps({"error": {"message": f"no {repeated}"}})
    server = serve(lambda question, nth: (404 if question == "b" else 400, body))
    endpoint = connect(f"{server.url}/hunter2%20hunter2/v1")
    with pytest.warns(UserWarning, match="1 of 1 questions failed") as warned:
        assert endpoint.ask(["a"]) == [None]
    with pytest.raises(ValueError, match=f"--endpoint={server.shown_url}") as raised:
        endpoint.ask(["b"])
    assert {requested for requested, _ in server.requests} == {path}
    assert "hunter2" not in f"{raised.value} {warned[0].message}" and "[path]" in str(raised.value)


@pytest.mark.parametrize("url, expected", [
    ("https://host", "https://host"), ("https://host/", "https://host/"), ("", ""), (None, None),
    ("https://[::1]:80/v1", "https://[::1]:80/..."), ("http://h:/a/b\nc", "http://h:/..."),
    ("https://host/...", "https://host/..."), ("https://host//key", "https://host/...")])
def test_only_the_server_of_an_address_is_printed(url, expected):
    assert module.without_path(url) == expected


def test_ctrl_c_ends_the_wait_for_requests_that_were_sent(serve, connect, monkeypatch):
    """Injected where the pool ends, after the run was asked to stop; its threads' own join might miss it."""
    endpoint, shut = connect(serve()), []

    def shut_down():
        shut.append(endpoint.aborted)
        endpoint.running.discard(shut_down)

    def interrupted(seconds):
        raise KeyboardInterrupt

    endpoint.running.add(shut_down)
    monkeypatch.setattr(module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt), endpoint.pool("hanging"):
        pass
    assert shut == [True]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "cache.jsonl"):
        with pytest.raises(ValueError, match=f"--endpoint-cache={path}: "):
            Endpoint("http://127.0.0.1:9/v1", "large", "LARGE_KEY", path)


def test_a_missing_package_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match="--endpoint: .*pip install -r requirements-endpoint.txt"):
        Endpoint("http://127.0.0.1:9/v1", "large", "LARGE_KEY", tmp_path / "c")


@pytest.mark.slow
def test_importing_the_file_does_not_import_the_package():
    source = "import infra.endpoint, sys; print('openai' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, text=True, capture_output=True,
                          check=True, timeout=PATIENCE_S)
    assert done.stdout == "False\n"
