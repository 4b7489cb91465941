"""Downloads ALFWorld's games, which this package does not hold, without textworld and without a compiler.

    python -m envs.household download                # into $ALFWORLD_DATA, by default ~/.cache/alfworld
    python -m envs.household download --mirror https://example.org/alfworld

The archives are two of those that alfworld 0.4.2's `alfworld-download` fetches, from the same addresses: the
games (game.tw-pddl) and their labels (traj_data.json), all that a text game needs. A download that was cut
continues where it stopped. An archive is checked by its length and by the CRC of each file in it; each file
appears under its name when it is complete. Left out: what the game in 3D needs (a detector, initial states,
pretrained agents), and a published hash, which these archives do not have.
"""

import argparse
import http.client
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from .._terminal import printed
from .games import expand_variables

try:
    from tqdm import tqdm
except ImportError:                    # not a dependency: without it a line is printed now and then
    tqdm = None

RELEASES = "https://github.com/alfworld/alfworld/releases/download/"
ARCHIVES = ("0.2.2/json_2.1.1_json.zip", "0.4.0/json_2.1.2_tw-pddl.zip")    # labels, games
SPLITS = ("train", "valid_seen", "valid_unseen")
CHUNK = 1 << 18
TRIES = 5               # in a row without a new byte
WAIT_S = 2              # before the second try, longer by as much after each
TIMEOUT_S = 60          # without an answer


class DownloadError(OSError):
    """A download that cannot go on: what failed, and what to do."""


def main(argv=None, program="household download"):
    """Download what is missing and print where the games are."""
    parser = argparse.ArgumentParser(program, description="Download ALFWorld's games.", allow_abbrev=False)
    parser.add_argument("--to", default=expand_variables("$ALFWORLD_DATA"), metavar="DIR",
                        help="folder of json_2.1.1 (default: $ALFWORLD_DATA, else ~/.cache/alfworld)")
    parser.add_argument("--mirror", metavar="URL",
                        help="take the archives, by their names, from this address instead of GitHub's")
    parser.add_argument("--force", action="store_true", help="download and unpack again what is there")
    options = parser.parse_args(argv)
    if not options.to:
        parser.error("--to: no folder, and $ALFWORLD_DATA is empty")
    if options.mirror is not None and not is_address(options.mirror):
        parser.error(f"--mirror={options.mirror}: expected an address, http://... or https://...")
    with printed(program):
        try:
            download(Path(options.to).expanduser(), options.mirror, options.force)
        except KeyboardInterrupt:
            parser.exit(130, "\nstopped; the same command continues\n")
        except DownloadError as error:
            parser.error(str(error))
        except OSError as error:
            parser.error(f"{error.filename or options.to}: {error.strerror}; what has arrived is kept, and "
                         "the same command continues")


def is_address(text):
    """Whether a text is an address from which urllib can read."""
    try:
        parts = urllib.parse.urlsplit(text)
        parts.port                                                           # ValueError if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(re.fullmatch("[!-~]+", text))


def download(folder, mirror=None, force=False):
    """Bring the games to folder/json_2.1.1. DownloadError, or OSError of the disk, if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in ARCHIVES:
        path = folder / archive.rpartition("/")[2]
        done = path.with_name(path.name + ".done")     # there once all its files are
        if force:
            done.unlink(missing_ok=True)
        if done.exists():
            print(f"{path.name}: unpacked already (--force repeats it)")
            continue
        if not path.exists():                           # also put there by hand
            fetch(f"{mirror.rstrip('/')}/{path.name}" if mirror else RELEASES + archive, path)
        unpack(path, folder, force)
        done.touch()
        path.unlink()
    games = {split: sum(1 for _ in (folder / "json_2.1.1" / split).rglob("game.tw-pddl")) for split in SPLITS}
    if not all(games.values()):
        raise DownloadError(f"{folder}/json_2.1.1: no game.tw-pddl under "
                            f"{', '.join(s for s in SPLITS if not games[s])}: archives of another "
                            "kind, or removed since (--force gets them again)?")
    print(f"games in {folder}/json_2.1.1: " + ", ".join(f"{split} {n}" for split, n in games.items()))


# From the network

def fetch(url, path):
    """Download to `path`, which appears when it is complete; until then its bytes are in `path`.part.

    A connection that was cut is tried again from the last byte. DownloadError for an address that refuses,
    and after TRIES tries in a row without a new byte.
    """
    part, failed = path.with_name(path.name + ".part"), 0
    while True:
        have, total, reason = size_of(part), None, "the connection was cut"
        try:
            total = fetch_rest(url, part, have)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                raise DownloadError(f"{url}: {reason}; --mirror takes another address") from error
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = " ".join(str(getattr(error, "reason", error)).split())      # a server's own words
        now = size_of(part)
        if total is not None and now >= total:
            if now > total:                            # of another archive; the CRCs find one that is shorter
                part.unlink()
                raise DownloadError(f"{url}: {total} bytes, but {now} had arrived; removed them: run the "
                                    "same command again")
            part.replace(path)
            return
        failed = 0 if now > have else failed + 1
        if failed == TRIES:
            raise DownloadError(f"{url}: {reason}; {now} bytes are kept. Without a network: get {path.name} "
                                f"elsewhere, put it into {path.parent} and run the same command again; "
                                "--mirror takes another address")
        if failed:
            print(f"{url}: {reason}; trying again in {WAIT_S * failed} s", flush=True)
            time.sleep(WAIT_S * failed)


def size_of(path):
    """Bytes in a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def fetch_rest(url, part, have):
    """Append the bytes from number `have` on to a file; returns how many the whole archive has.

    The file begins anew if the server does not continue it.
    """
    request = urllib.request.Request(url, headers={
        "Range": f"bytes={have}-", "Accept-Encoding": "identity", "User-Agent": "household"})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        length = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
        if error.code == 416 and length:                # no byte is left to send
            return int(length[1])
        raise
    with answer:
        span, length = (answer.headers.get(name, "") for name in ("Content-Range", "Content-Length"))
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", span)
        if answer.status == 206 and not (found and int(found[1]) == have):
            raise http.client.HTTPException(f"asked for the bytes from {have} on, got {span!r:.60}")
        total = int(found[2]) if found else int(length) if length.isdigit() else None
        with (part.open("ab" if found else "wb") as file,
              progress(part.stem, total, have if found else 0, "B") as advance):
            for chunk in chunks(answer):
                file.write(chunk)
                advance(len(chunk))
    return size_of(part) if total is None else total   # None: sent in pieces, whose last one is marked


def chunks(answer):
    """The bytes of an answer in pieces. HTTPException, unlike the disk's errors, if the connection fails."""
    try:
        while chunk := answer.read(CHUNK):
            yield chunk
    except OSError as error:
        raise http.client.HTTPException(error) from error


# On the disk

def unpack(path, folder, force):
    """Unpack an archive, each file under another name until it is complete; files that are there stay.

    DownloadError, and the archive is removed, if it is damaged or `check_names` refuses a name in it.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [member for member in archive.infolist() if not member.filename.endswith("/")]
            check_names([member.filename for member in members])
            with progress(f"unpacking {path.name}", len(members), 0, "files") as advance:
                for member in members:
                    unpack_file(archive, member, folder, force)
                    advance(1)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError) as error:
        path.unlink()
        raise DownloadError(f"{path}: not the archive it should be: {error}; removed it: run the same "
                            "command again, or --mirror takes another address") from error


def check_names(names):
    """ValueError for a file's name that is outside the folder, or is the name of a folder as well."""
    folders = {folder for name in names for folder in PurePosixPath(name).parents}
    for name in names:
        path = PurePosixPath(name)
        if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
            raise ValueError(f"it has a file {name!r:.60}, outside its folder")
        if path in folders:
            raise ValueError(f"it has a file {name!r:.60} that is a folder as well")


def unpack_file(archive, member, folder, force):
    """Unpack one file of an archive; one that is there in its full size stays, unless `force`."""
    target = folder / member.filename
    if not force and target.is_file() and target.stat().st_size == member.file_size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(target.name + ".part")
    with archive.open(member) as source, unfinished.open("wb") as file:
        shutil.copyfileobj(source, file)               # raises BadZipFile if its CRC is wrong
    unfinished.replace(target)


@contextmanager
def progress(what, total, done, unit):
    """Context of long work: its function takes the number of new units. A bar, or lines without tqdm.

    total: None if it is not known. done: how many there are at the start.
    """
    def advance(n):
        nonlocal done
        before, done = done, done + n
        if total and 10 * before // total < 10 * done // total:
            print(f"{what}: {done} of {total} {unit}", flush=True)

    if tqdm is None:
        yield advance
        return
    live = getattr(sys.stderr, "stream", sys.stderr)       # past `printed`, which escapes what redraws a bar
    with tqdm(desc=what, total=total, initial=done, unit=unit, unit_scale=unit == "B", file=live) as bar:
        yield bar.update
