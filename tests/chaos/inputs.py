"""Attacks by a run's surroundings: full disks, broken files, weights that are not numbers, hostile servers,
dead terminals, and a very long run."""

import gzip
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
from forked import (
    ALL,
    PART,
    child,
    contents,
    difference,
    exit_problem,
    in_two_processes,
    resume_problem,
    run,
    sampled,
    undisturbed,
)
from hand_made import GAME
from safetensors.torch import load_file, save_file

import gcd
from infra.endpoint import Endpoint
from report import __main__ as report

LIMIT_S = 10


# Disks

def full_disks(workdir, size):
    """A disk, also of temporary files, that is full after a fraction of what a run writes; 40 fractions."""
    expected, start = undisturbed(workdir)
    need = sum(map(len, contents(expected).values())) * 3
    disk, flags = workdir / "disk", [*ALL, "--model", start, "--demonstrations", 0, "--resume", "--overwrite"]
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk],
                                      capture_output=True).returncode:
        print("    (no small disk can be mounted here: the size of each file is limited instead)")
        disk = None
    sizes = sampled([int(need * k / 40) + 4096 for k in range(40)], size, 5, 24)
    try:
        for n in sizes:
            yield f"{n} bytes", one_full_disk(workdir, disk, n, flags, expected)
    finally:
        if disk:
            subprocess.run(["umount", disk], check=True)


def one_full_disk(workdir, disk, size, flags, expected):
    """Run on a disk of `size` bytes, to success or one clear line; then resume with enough space."""
    out = (disk or workdir / f"limited{size}") / "run"

    def resized(n):
        if disk:
            subprocess.run(["mount", "-o", f"remount,size={n}", disk], check=True)

    def limited():
        if disk:
            tempfile.tempdir = str(disk)
            os.environ["TMPDIR"] = str(disk)
        else:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, size // 8))
        return run(out, *flags)()

    resized(size)
    if problem := exit_problem(child(limited, workdir / "output"), workdir / "output", (0, 1)):
        return problem
    text = (workdir / "output").read_text(errors="replace")
    resized(10**9)
    problem = resume_problem(out, flags, expected, workdir / "output")
    for folder in out.parent.glob("run*"):
        shutil.rmtree(folder)
    return problem or ("" if "error" not in text or str(out) in text else f"names no file: {text[-200:]}")


# Broken input

def numbers(rng):
    """A value that is not expected anywhere."""
    return rng.choice([0, -1, 1.5, 10**12, 1e300, float("nan"), float("inf"), "", "x", "64", None, True, [],
                       [[]], {}, {"a": 1}, "\ud800", "é" * 50])


def mutated_json(text, rng):
    """A JSON text that is cut, or has one character or value replaced, or an entry removed."""
    kind = rng.randrange(4)
    if kind == 0:
        return text[:rng.randrange(len(text))]
    if kind == 1:
        k = rng.randrange(len(text))
        return text[:k] + rng.choice("{}[],:\"0x\n\0") + text[k + 1:]
    value = json.loads(text)
    container, key = value, rng.choice(list(value))
    while isinstance(container[key], (dict, list)) and container[key] and rng.random() < 0.7:
        container = container[key]
        key = (rng.choice(list(container)) if isinstance(container, dict)
               else rng.randrange(min(len(container), 50)))
    if kind == 2 and isinstance(container, dict):
        del container[key]
    else:
        container[key] = numbers(rng)
    return json.dumps(value)


def mutated_bytes(content, rng):
    """File contents cut, or with bytes replaced or inserted."""
    content = bytearray(content)
    kind, k = rng.randrange(3), rng.randrange(len(content))
    if kind == 0:
        return bytes(content[:k])
    for _ in range(rng.choice([1, 8, 64])):
        k = rng.randrange(min(len(content), rng.choice([64, 4096, len(content)])))
        content[k:k + kind] = rng.randbytes(kind)
    return bytes(content)


def mutated_trainer(path, rng):
    """Replace a value in trainer.pt by one of a different type, or remove it."""
    value = torch.load(path, weights_only=True)
    container, key = value, rng.choice(list(value))
    while isinstance(container[key], dict | list) and container[key] and rng.random() < 0.8:
        container = container[key]
        key = rng.choice(list(container)) if isinstance(container, dict) else rng.randrange(len(container))
    if rng.random() < 0.3 and isinstance(container, dict):
        del container[key]
    else:
        container[key] = rng.choice([numbers(rng), torch.zeros(3), torch.zeros(0), [], {}])
    torch.save(value, path)


def mutated_pddl(rng):
    """A game's PDDL with tokens removed, inserted, replaced, nested deeply, or repeated."""
    tokens = GAME["pddl_problem"].replace("(", " ( ").replace(")", " ) ").split()
    for _ in range(rng.choice([1, 3])):
        k, kind = rng.randrange(len(tokens)), rng.randrange(5)
        if kind == 0:
            del tokens[k]
        elif kind == 1:
            tokens.insert(k, rng.choice(["(", ")", "x", "define", ":init", "Apple_bar_3", "é", "\0"]))
        elif kind == 2:
            tokens[k] = rng.choice(tokens)
        elif kind == 3:
            tokens[k:k] = ["("] * 5000 + [")"] * 5000
        else:
            tokens[k] *= 1000
    return " ".join(tokens)


def unnamed(status, output):
    """What is wrong with the end of a run that was given a broken file in the output's folder; "" if it went
    on, or says where the file is."""
    problem, text = exit_problem(status, output), output.read_text(errors="replace")
    return problem or (f"names no file: {text[-150:]}" if status and str(output.parent) not in text else "")


def mutations(workdir, size):
    """A random fault in a config.json, tokenizer, trainer.pt, safetensors file, log or game."""
    expected, start = undisturbed(workdir)
    kinds = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "trainer.pt",
             "trainer.pt bytes", "games.jsonl", "PDDL", "metrics.jsonl", "evaluation.json", "episodes.jsonl")

    def attack(item, folder):
        kind, seed = item
        rng, output = random.Random(f"{kind} {seed}"), folder / "output"
        if kind in ("games.jsonl", "PDDL"):
            row = json.dumps(GAME | {"pddl_problem": mutated_pddl(rng)} if kind == "PDDL" else GAME)
            row = row if kind == "PDDL" else mutated_json(row, rng)
            lines = [row] + [json.dumps(GAME | {"rel": f"train/a/{k}"}) for k in range(3)]
            with gzip.open(folder / "games.jsonl.gz", "wt", errors="surrogatepass") as file:
                file.write("\n".join(lines))
            flags = ["--games", folder / "games.jsonl.gz", "--model", start, "--demonstrations", 0,
                     "--preset", "small", "--iterations", 1]
            return unnamed(child(run(folder / "out", *flags), output, LIMIT_S), output)
        if kind in ("metrics.jsonl", "evaluation.json", "episodes.jsonl"):
            method = shutil.copytree(expected, folder / "runs" / "grpo")
            if kind == "evaluation.json":
                scores = {"success": 0.5, "n": 4, "low": 0.1, "high": 0.9}
                (method / kind).write_text(json.dumps({"splits": {"L0": {"sampled": scores}}, "seconds": 3,
                                                       "games": "generated rooms"}))
            lines = (method / kind).read_text().splitlines()
            k = rng.randrange(len(lines))
            lines[k] = mutated_json(lines[k], rng)
            (method / kind).write_text("\n".join(lines), errors="replace")
            problem = unnamed(child(lambda: report.main([str(folder / "runs")]), output, LIMIT_S), output)
            resume = run(method, *ALL, "--resume", "--demonstrations", 0)
            return problem or unnamed(child(resume, output, LIMIT_S), output)
        out = shutil.copytree(expected, folder / "run")
        path = out / "checkpoint" / kind.split()[0]
        if kind == "trainer.pt":
            mutated_trainer(path, rng)
        elif kind in ("model.safetensors", "trainer.pt bytes"):
            path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        else:
            path.write_text(mutated_json(path.read_text(), rng), errors="surrogatepass")
        flags = [*ALL, "--resume", "--demonstrations", 0]
        if "trainer" not in kind and rng.random() < 0.5:
            flags = ["--preset", "small", "--model", out / "checkpoint", "--demonstrations", 0]
            out = folder / "out"
        return unnamed(child(run(out, *flags), output, LIMIT_S), output)

    items = sampled([(kind, seed) for seed in range(28) for kind in kinds], size, 24, 160)
    for (kind, seed), problem in in_two_processes(items, attack, workdir):
        yield f"{kind} {seed}", problem


def not_numbers(workdir, size):
    """NaN or infinity in each weight, and a config.json (RoPE's theta 0) that leads to NaN."""
    _, start = undisturbed(workdir)
    tensors = load_file(start / "model.safetensors")
    broken = sampled([(name, value) for name in sorted(tensors) for value in (float("nan"), float("inf"))],
                     size, 6, 40) + [("rope_theta", 0)]
    for k, (name, value) in enumerate(broken):
        folder = shutil.copytree(start, workdir / f"model{k}")
        if name in tensors:
            other = {key: tensor.clone() for key, tensor in tensors.items()}
            other[name].view(-1)[-1] = value
            save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
        else:
            config = json.loads((folder / "config.json").read_text())
            config["rope_parameters"][name] = value            # comes before the field outside
            (folder / "config.json").write_text(json.dumps(config))
        flags = ["--preset", "small", "--model", folder, "--demonstrations", 0, "--evaluate", "L0"]
        status = child(run(workdir / f"out{k}", *flags), workdir / "output", LIMIT_S)
        text = (workdir / "output").read_text()
        yield f"{value} in {name}", "" if status == 1 and name in text and "Traceback" not in text else (
            f"status {status}: {text[-150:]}")


# Servers, terminals, time

def hostile_http(workdir, size):
    """A large model's server that is slow, endless, wrong or gone: the question fails in time."""
    warnings.simplefilter("ignore")                # every failed question warns
    os.environ |= {"CHAOS_KEY": "sk-chaos-0123456789", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

    def drip(send):
        send(b"HTTP/1.1 200 OK\r\n")
        for k in range(1000):
            send(b"X-%d: y\r\n" % k)
            time.sleep(0.3)

    def flood(send):
        send(head + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            send(b"10000\r\n" + b" " * 65536 + b"\r\n")

    def slow_body(send):
        send(head + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(1000):
            send(b" ")
            time.sleep(0.3)

    def continues(send):
        while True:
            send(b"HTTP/1.1 100 Continue\r\n\r\n")

    servers = {
        "headers dripped": drip, "endless body": flood, "a body dripped": slow_body,
        "endless 100 Continue": continues,
        "endless header": lambda send: [send(b"X: " + b"y" * 65536) for _ in iter(int, 1)],
        "nothing": lambda send: time.sleep(60), "closed at once": lambda send: None,
        "no HTTP": lambda send: send(b"\0\xff" * 1000),
        "a length that lies": lambda send: send(head + b"Content-Length: 99\r\n\r\n{}"),
        "nested JSON": lambda send: send(head + b"Content-Length: 100000\r\n\r\n" + b"[" * 100000),
        "redirects to itself": lambda send: send(
            b"HTTP/1.1 307 X\r\nLocation: /v1\r\nContent-Length: 0\r\n\r\n"),
        "an answer of 3 MB": lambda send: send(head + b"Connection: close\r\n\r\n" + json.dumps(
            {"choices": [{"message": {"content": "x" * 3_000_000}}]}).encode())}
    for name, serve in servers.items():
        with socket.create_server(("127.0.0.1", 0)) as server:
            stop = threading.Event()

            def accept(serve=serve, server=server, stop=stop):
                server.settimeout(0.2)
                while not stop.is_set():
                    try:
                        connection, _ = server.accept()
                    except OSError:
                        continue
                    threading.Thread(target=answer, args=(connection, serve), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            endpoint = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}/v1", "m", "CHAOS_KEY",
                                workdir / f"{name}.jsonl", timeout_s=1.5, retries=1, first_wait_s=0.01)
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
            try:
                answers = endpoint.ask(["was that good?"])
                good = answers[0] is None or len(answers[0]) == 3_000_000
                problem = "" if good else f"answered {answers[0]:.50}"
            except ValueError as error:
                problem = "" if str(error).startswith("--endpoint") else str(error)
            seconds = time.monotonic() - began
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            endpoint.close()
            stop.set()
        yield name, problem or (f"took {seconds:.1f} s" if seconds > 6 else "") or (
            f"took {grown:.0f} MB" if grown > 200 else "")


def answer(connection, serve):
    """Serve one connection of a hostile server."""
    with connection:
        try:
            connection.recv(65536)
            serve(connection.sendall)
        except OSError:
            pass


def dead_terminals(workdir, size):
    """An output pipe that is broken, a full disk of the log, and closed streams: the run completes."""
    expected, start = undisturbed(workdir)
    flags = [*ALL, "--model", start, "--demonstrations", 0]

    def piped():
        reader, writer = os.pipe()
        os.close(reader)
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)
        return run(workdir / "piped", *flags)()

    def full():
        for descriptor in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
        return run(workdir / "full", *flags)()

    def closed():
        os.close(1)
        os.close(2)
        return run(workdir / "closed", *flags)()

    for name, action in {"piped": piped, "full": full, "closed": closed}.items():
        status = child(action, workdir / "output")
        yield f"its output is {name}", f"status {status}" if status else difference(workdir / name, expected)


def soak(workdir, size):
    """1,000 iterations: memory and the number of open files do not grow."""
    _, start = undisturbed(workdir)
    iterations, watched = (200 if size == PART else 1000), workdir / "watched"

    def watching():
        iteration = gcd.iteration

        def counted(run, i, reference):
            if i % 50 == 0:
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                with open(watched, "a") as file:
                    megabytes = pages * resource.getpagesize() / 2**20
                    print(i, megabytes, len(os.listdir("/proc/self/fd")), file=file)
            return iteration(run, i, reference)

        gcd.iteration = counted
        return run(workdir / "run", "--model", start, "--demonstrations", 0, "--max-turns", 2, "--tasks", 1,
                   "--group-size", 2, "--minibatches", 1, "--judge-turns", 2, "--iterations", iterations,
                   "--checkpoint-every", 100)()

    status = child(watching, workdir / "output", limit_s=600)
    rows = [tuple(map(float, line.split())) for line in watched.read_text().splitlines()]
    settled, last = rows[len(rows) // 4], rows[-1]
    yield f"{iterations} iterations, {settled[1]:.0f} to {last[1]:.0f} MB", (
        f"status {status}" if status else f"grew from {settled[1]:.0f} to {last[1]:.0f} MB"
        if last[1] > settled[1] * 1.1 + 5 else f"{settled[2]:.0f} files, then {last[2]:.0f}"
        if last[2] > settled[2] else "")
