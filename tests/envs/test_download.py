"""Tests of the games' download against a server on loopback that answers well, badly, or not to the end.

    python -m pytest tests/envs/test_download.py
"""

import http.server
import io
import os
import random
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from test_household import write_game

from envs.alfred import download
from envs.alfred.games import load_games

ROOT = Path(__file__).resolve().parents[2]
LABELS, GAMES = (archive.rpartition("/")[2] for archive in download.ARCHIVES)


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """{name: bytes} of the two archives, with a game in each split and 300 kB of other content."""
    folder, found = tmp_path_factory.mktemp("games"), {}
    for split in download.SPLITS:
        write_game(folder / "json_2.1.1" / split / "pick" / "trial")
    for name, wanted in ((LABELS, "traj_data.json"), (GAMES, "game.tw-pddl")):
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path in sorted(folder.rglob(wanted)):
                archive.write(path, path.relative_to(folder))
            archive.writestr(f"json_2.1.1/{wanted}.more", random.Random(name).randbytes(300_000))
        found[name] = packed.getvalue()
    return found


class Mirror:
    """A server of files. `answer(handler, content, start)` replaces the answer of the requests in `odd`.

    requests: (name, first byte) of each request. odd: {number of the request: answer}; `always` replaces all.
    """

    def __init__(self, files):
        self.files, self.requests, self.odd, self.always = files, [], {}, None
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/games"
        threading.Thread(target=self.http.serve_forever, args=[0.01], daemon=True).start()

    def handler(mirror):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
                mirror.requests.append((name, start))
                answer = mirror.odd.get(len(mirror.requests) - 1) or mirror.always or part
                answer(self, mirror.files[name], start)

            def log_message(self, *_):
                pass
        return Handler


def send(handler, status, body, **headers):
    """An answer; underscores in the headers' names are hyphens. Content-Length is the body's by default."""
    handler.send_response(status)
    for key, value in ({"Content_Length": len(body)} | headers).items():
        if value is not None:
            handler.send_header(key.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def part(handler, content, start):
    """What a good server answers: the rest, or 416 if there is none."""
    if start >= len(content):
        send(handler, 416, b"", Content_Range=f"bytes */{len(content)}")
    else:
        send(handler, 206, content[start:],
             Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")


def all_of_it(handler, content, start):
    """A server that knows no ranges."""
    send(handler, 200, content)


def cut(after):
    """An answer whose connection ends after so many bytes."""
    def answer(handler, content, start):
        length = len(content) - start
        send(handler, 206, content[start:start + after], Content_Length=length,
             Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")
    return answer


def refused(status, **headers):
    """An answer without content."""
    return lambda handler, content, start: send(handler, status, b"", **headers)


def reset(connection):
    """Close a connection with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture
def mirror(archives, monkeypatch):
    """A Mirror of the archives; no test waits between tries."""
    monkeypatch.setattr(download, "WAIT_S", 0)
    server = Mirror(dict(archives))
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def get(mirror, tmp_path, capsys):
    """get(*flags) downloads to tmp_path: (exit status, stdout, stderr)."""
    def run(*flags):
        capsys.readouterr()
        try:
            download.main(["--to", str(tmp_path), "--mirror", mirror.url, *flags])
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()
    return run


def left(folder):
    """The names that lie in the folder, without the games and the marks of what is done."""
    return sorted(path.name for path in folder.iterdir()
                  if path.name != "json_2.1.1" and path.suffix != ".done")


def test_the_games_arrive_and_can_be_played(get, mirror, tmp_path):
    status, out, _ = get()
    assert status == 0 and out.splitlines()[-1] == (
        f"games in {tmp_path}/json_2.1.1: train 1, valid_seen 1, valid_unseen 1")
    assert mirror.requests == [(LABELS, 0), (GAMES, 0)] and left(tmp_path) == []
    for split in download.SPLITS:
        assert len(load_games(tmp_path / "json_2.1.1", split)) == 1
    assert not [*tmp_path.rglob("*.part")]


def test_what_is_there_is_not_asked_for_again_unless_forced(get, mirror, tmp_path):
    assert get()[0] == 0
    mirror.requests.clear()
    assert get()[0] == 0 and mirror.requests == []
    game = next(tmp_path.rglob("game.tw-pddl"))
    content = game.read_bytes()
    game.write_bytes(b"{}")
    assert get("--force")[0] == 0 and game.read_bytes() == content and len(mirror.requests) == 2


def test_a_cut_connection_continues_where_it_was_cut(get, mirror, tmp_path):
    mirror.odd = {0: cut(100_000), 1: cut(1), 2: cut(50_000)}
    assert get()[0] == 0
    assert mirror.requests == [(LABELS, 0), (LABELS, 100_000), (LABELS, 100_001), (LABELS, 150_001),
                               (GAMES, 0)]


def test_a_stopped_download_continues_in_the_next_run(get, mirror, tmp_path):
    mirror.odd = {0: cut(100_000)} | {i: refused(503) for i in range(1, 100)}
    status, _, err = get()
    assert status == 2 and "503" in err and "100000 bytes are kept" in err
    assert left(tmp_path) == [LABELS + ".part"]
    mirror.odd, before = {}, len(mirror.requests)
    assert get()[0] == 0 and mirror.requests[before:] == [(LABELS, 100_000), (GAMES, 0)]


def test_a_server_without_ranges_starts_again(get, mirror, tmp_path):
    mirror.odd, mirror.always = {0: cut(100_000)}, all_of_it
    assert get()[0] == 0 and left(tmp_path) == []


def test_a_length_that_is_too_large_is_found_out(get, mirror, archives, tmp_path):
    mirror.odd = {0: lambda handler, content, start: send(handler, 200, content,
                                                           Content_Length=len(content) + 7)}
    assert get()[0] == 0 and mirror.requests[1] == (LABELS, len(archives[LABELS]))


def test_a_length_that_is_too_small_is_a_damaged_archive(get, mirror, tmp_path):
    mirror.always = lambda handler, content, start: send(handler, 200, content, Content_Length=200_000)
    status, _, err = get()
    assert status == 2 and f"{tmp_path / LABELS}: not the archive it should be" in err
    assert left(tmp_path) == []                        # else the same command would fail for ever
    mirror.always = None
    assert get()[0] == 0


def test_an_answer_without_a_length_is_read_to_its_end(get, mirror, tmp_path):
    mirror.always = lambda handler, content, start: send(handler, 200, content, Content_Length=None)
    assert get()[0] == 0 and left(tmp_path) == []


@pytest.mark.parametrize(("answer", "message", "tries"), [
    (refused(404), "404 Not Found; --mirror takes another address", 1),
    (refused(403), "403 Forbidden; --mirror takes another address", 1),
    (refused(500), "500 Internal Server Error; 0 bytes are kept. Without a network: get ", 5),
    (refused(416), "416 Requested Range Not Satisfiable", 1),
    (refused(206, Content_Range="bytes 5-9/10"), "asked for the bytes from 0 on, got 'bytes 5-9/10'", 5),
    (lambda handler, content, start: handler.wfile.write(b"nonsense\r\n\r\n"), "nonsense", 5),
    (lambda handler, content, start: None, "without response", 5),
    (lambda handler, content, start: reset(handler.connection), "reset by peer", 5)])
def test_a_bad_answer_is_one_line_with_the_address(get, mirror, tmp_path, answer, message, tries):
    mirror.always = answer
    status, _, err = get()
    last = err.splitlines()[-1]
    assert status == 2 and f"{mirror.url}/{LABELS}: " in last and message in last
    assert len(mirror.requests) == tries and not [*tmp_path.rglob("*.zip")]


@pytest.mark.slow
def test_a_server_that_never_answers_is_asked_five_times(get, mirror, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    over = threading.Event()
    mirror.always = lambda handler, content, start: over.wait(60)
    status, _, err = get()
    over.set()
    assert status == 2 and len(mirror.requests) == 5 and f"{mirror.url}/{LABELS}: timed out; 0 bytes" in err


def test_bytes_of_another_archive_are_removed(get, mirror, archives, tmp_path):
    (tmp_path / (LABELS + ".part")).write_bytes(bytes(len(archives[LABELS]) + 5))
    status, _, err = get()
    assert status == 2 and "had arrived; removed them" in err and left(tmp_path) == []
    (tmp_path / (LABELS + ".part")).write_bytes(bytes(9))           # found by the archive's own checks
    status, _, err = get()
    assert status == 2 and "not the archive it should be" in err
    assert get()[0] == 0


def test_a_damaged_file_in_an_archive_never_appears(get, mirror, archives, tmp_path):
    damaged = bytearray(archives[GAMES])
    damaged[damaged.index(b"pddl_problem")] ^= 1                    # in the content of the first game
    mirror.files[GAMES] = bytes(damaged)
    status, _, err = get()
    assert status == 2 and "Bad CRC-32" in err and not [*tmp_path.rglob("game.tw-pddl")]
    mirror.files[GAMES] = archives[GAMES]
    assert get()[0] == 0


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "a\\..\\out", ".", "NUL"])
def test_an_archive_cannot_write_outside_its_folder(get, mirror, tmp_path, name):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, "x")
    mirror.files[LABELS] = packed.getvalue().replace(b"NUL", b"\0UL")       # zipfile reads an empty name
    status, _, err = get("--to", str(tmp_path / "a" / "b"))
    assert status == 2 and "outside its folder" in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a"), ("a", "a/b/c")])
def test_a_file_that_is_a_folder_as_well_is_no_error_of_the_disk(get, mirror, archives, tmp_path, names):
    """What could not be unpacked was kept, and failed again in each run."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in names:
            archive.writestr(name, "x")
    mirror.files[LABELS] = packed.getvalue()
    status, _, err = get()
    assert status == 2 and "not the archive it should be: it has a file 'a' that is a folder as well" in err
    assert [*tmp_path.iterdir()] == []
    mirror.files[LABELS] = archives[LABELS]
    assert get()[0] == 0


def test_a_file_in_the_way_of_a_folder_costs_no_archive(get, tmp_path):
    (tmp_path / "json_2.1.1").write_text("mine")
    status, _, err = get()
    assert status == 2 and f"{tmp_path / 'json_2.1.1'}" in err and "what has arrived is kept" in err
    assert left(tmp_path) == [LABELS] and (tmp_path / "json_2.1.1").read_text() == "mine"


def test_archives_of_other_things_are_named(get, mirror, tmp_path):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("readme.txt", "x")
    mirror.files = dict.fromkeys(mirror.files, packed.getvalue())
    status, _, err = get()
    assert status == 2 and "no game.tw-pddl under train, valid_seen, valid_unseen" in err


def test_without_a_network_it_says_what_to_do_and_takes_what_was_put_there(get, mirror, archives, tmp_path):
    status, _, err = get("--mirror", "http://127.0.0.1:1")
    assert status == 2 and "Connection refused" in err
    assert f"Without a network: get {LABELS} elsewhere, put it into {tmp_path} and run the same" in err
    for name, content in archives.items():
        (tmp_path / name).write_bytes(content)
    assert get("--mirror", "http://127.0.0.1:1")[0] == 0 and mirror.requests == []


def test_without_a_mirror_the_addresses_are_those_of_alfworlds_own_script(monkeypatch, tmp_path):
    requests = []
    monkeypatch.setattr(download, "fetch", lambda url, path: requests.append(url) or 1 / 0)
    for done in ((), (LABELS,)):
        for name in done:
            (tmp_path / (name + ".done")).touch()
        with pytest.raises(ZeroDivisionError):
            download.download(tmp_path)
    script = Path(sys.executable).with_name("alfworld-download")
    if not script.exists():
        pytest.skip("needs alfworld's own script: pip install -r requirements-alfworld.txt")
    theirs = re.findall('^(?:TW_PDDL|JSON)_FILES_URL = "(.*)"', script.read_text(encoding="utf-8"), re.M)
    assert requests == theirs and len(theirs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("limit", [50_000, 200_000])
def test_a_full_disk_keeps_what_has_arrived(mirror, archives, tmp_path, limit):
    """A limit of the file size stands in for the disk's end: the first write beyond it fails."""
    command = [sys.executable, "-m", "envs.household", "download", "--to", tmp_path, "--mirror", mirror.url]

    def run(**options):
        return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=60, **options)

    done = run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "File too large; what has arrived is kept" in done.stderr.splitlines()[-1]
    kept = (tmp_path / (LABELS + ".part")).stat().st_size
    assert 0 <= kept <= limit
    assert run().returncode == 0 and mirror.requests[1] == (LABELS, kept)


@pytest.mark.parametrize(("flags", "message"), [
    (["--mirror", "ftp://x"], "--mirror=ftp://x: expected an address, http://... or https://..."),
    (["--mirror", "http://h/\u00e4"], "--mirror=http://h/\u00e4: expected an address"),
    (["--mirror", "http://[::1"], "--mirror=http://[::1: "), (["--mirror", "http://h:x/"], "=http://h:x/: "),
    (["--mirror", "http://h h/"], "=http://h h/: expected"), (["--mirror", "http:///x"], "=http:///x: "),
    (["--mirror", ""], "--mirror=: expected an address"), (["--to", ""], "--to: no folder"),
    (["--to", "/dev/null/x"], "/dev/null/x: Not a directory"), (["--mirro", "x"], "unrecognized arguments")])
def test_invalid_flags_are_refused(get, mirror, flags, message):
    status, _, err = get(*flags)
    assert status == 2 and message in err and mirror.requests == []


@pytest.mark.parametrize("bar", [True, False])
def test_progress_is_shown_with_and_without_tqdm(get, mirror, monkeypatch, bar):
    if not bar:
        monkeypatch.setattr(download, "tqdm", None)
    _, out, err = get()
    if bar:
        assert "100%" in err and LABELS in err
    else:
        assert out.count(f"{LABELS}: ") in range(1, 11) and err == ""
        assert re.search(r"unpacking .*: 4 of 4 files", out)


@pytest.mark.slow
def test_it_runs_in_alfworlds_folder_by_default(archives, mirror, tmp_path):
    environment = os.environ | {"ALFWORLD_DATA": str(tmp_path / "data")}
    done = subprocess.run([sys.executable, "-m", "envs.household", "download", "--mirror", mirror.url],
                          cwd=ROOT, env=environment, text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and (tmp_path / "data" / "json_2.1.1" / "train").is_dir(), done.stderr
