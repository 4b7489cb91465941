"""Tests of several machines, all of them this one: 2 x 4 ranks over gloo, fewer where one is lost.

    python -m pytest tests/infra/test_nodes.py

The ranks are node_ranks.py, forked as those of two nodes or, where a node falls silent or torchrun restarts
the job, run by one torchrun a node. Oracles: the same on one process; torch's converter of distributed
checkpoints.
"""

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import psutil
import pytest
import test_parallel as single
import torch
from conftest import is_alive
from test_parallel import SINGLE, assert_same_checkpoint
from test_train import nearest_draws, numbers
from tiny_runs import ENVIRONMENT, ROOT, assert_one_error, rows, start_from, train
from waiting import free_port, wait_for

import config
import models
import session
from infra import checkpoint, files, job, parallel

HOST = socket.gethostname()
# A file of the distributed checkpoint, and one of the weights
PARTS = "trainer/__5_0.distcp", "model-00002-of-00008.safetensors"
RANKS = Path(__file__).with_name("node_ranks.py")
VARIABLES = ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}


def start_nodes(*command, more=lambda node: (), **environment):
    """Start a torchrun of one rank for each of two nodes, node 0 with the job's store; their output is one
    stream each. more: further flags of a node's torchrun.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1,
                "--master-addr", "localhost", "--master-port", free_port()]
    variables = VARIABLES | environment
    return [subprocess.Popen([str(part) for part in (*torchrun, *more(node), "--node-rank", node, *command)],
                             text=True, env=variables | {"NODE": str(node)}, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for node in range(2)]


def finished(nodes, timeout_s=400):
    """The exit statuses of the nodes, and all of their output."""
    texts = [node.communicate(timeout=timeout_s)[0] for node in nodes]
    return [node.returncode for node in nodes], "".join(texts)


def workers(node):
    """The process ids of a node's ranks."""
    return [child.pid for child in psutil.Process(node.pid).children()]


def signal_node(node, signum):
    """Send a signal to a node's torchrun and to its ranks, as if the machine was lost."""
    for pid in (node.pid, *workers(node)):
        os.kill(pid, signum)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run on one rank."""
    out = tmp_path_factory.mktemp("one")
    single.train_and_save(SINGLE, out)
    single.train_adapters(SINGLE, out)
    return out


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """The folder of the same run on two nodes of four ranks, with the weights sharded within a node; it also
    resumed itself.
    """
    out = tmp_path_factory.mktemp("eight")
    done = forked.run([RANKS, "train", out], VARIABLES, tmp_path_factory.mktemp("log"), 8, nodes=2)
    assert done.returncode == 0, done.text[-4000:]
    return out


@pytest.mark.slow
def test_two_nodes_of_four_ranks_reach_what_one_process_does(one, eight):
    """Losses, norms and products are rounding apart, and weights and adapters what Adam makes of that."""
    for a, b in zip(*(json.loads((out / "logged.json").read_text()) for out in (one, eight)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)
    assert_same_checkpoint(one / "three", eight / "three", rtol=1e-4, atol=2e-5)
    ours, theirs = (torch.load(out / "adapters.pt") for out in (one, eight))
    for i in range(2):                         # the sampler's are these, on several ranks rounded to bf16
        torch.testing.assert_close(ours[i][0], theirs[i][0], rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_resuming_on_the_same_eight_ranks_is_exact(eight):
    assert_same_checkpoint(eight / "two", eight / "two_again")
    assert_same_checkpoint(eight / "three", eight / "three_resumed")


@pytest.mark.slow
def test_a_checkpoint_of_eight_ranks_loads_on_two_and_on_one(eight, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    single.resume(SINGLE, eight, tmp_path / "one")
    done = forked.run([RANKS, "resume", tmp_path / "two", eight], VARIABLES, tmp_path, ranks=2)
    assert done.returncode == 0, done.text[-4000:]
    for resumed in (tmp_path / "one", tmp_path / "two"):
        assert_same_checkpoint(eight / "two", resumed / "two_again")
        assert_same_checkpoint(eight / "three", resumed / "three_resumed", rtol=1e-4, atol=2e-5)
    assert (tmp_path / "one" / "two_again" / "model.safetensors").is_file()       # as every single process


@pytest.mark.slow
def test_each_rank_writes_and_reads_its_own_part_of_one_copy(eight):
    """No rank reads more of the weights than it keeps, and no tensor is written twice."""
    full = torch.load(eight / "read.pt")
    for name, weight in single.weights_of(eight / "three").items():
        assert torch.equal(full[name], weight), name
    total = sum(weight.nbytes for name, weight in full.items() if name != "lm_head.weight")     # it is tied
    for node in (range(4), range(4, 8)):
        counts = [json.loads((eight / f"read{rank}.json").read_text()) for rank in node]
        assert all(read == kept < total / 3 for read, kept in counts) and sum(h for _, h in counts) == total
    written = [path.stat().st_size for path in (eight / "three").glob("model-*-of-00008.safetensors")]
    assert len(written) == 8 and total < sum(written) < total + 8 * 4096 and max(written) < total / 3
    places = torch.distributed.checkpoint.FileSystemReader(eight / "three" / "trainer").read_metadata()
    assert len({place.relative_path for place in places.storage_data.values()}) == 8
    elements = sum(chunk.sizes.numel() for entry in places.state_dict_metadata.values()
                   for chunk in entry.chunks)
    assert elements == 2 * total // 4                                                     # Adam's two moments


@pytest.mark.slow
@pytest.mark.parametrize("part, fault", [
    *itertools.product(PARTS, ["missing", "not the file that this checkpoint was saved with"]),
    ("config.json", "missing"), ("model.safetensors.index.json", "missing")])
def test_a_part_that_is_missing_or_of_another_run_is_named_and_the_checkpoint_before_is_used(
        eight, tmp_path, capsys, part, fault):
    folder = shutil.copytree(eight / "three", tmp_path / "checkpoint")
    shutil.copytree(eight / "two", tmp_path / "checkpoint.old")
    checkpoint.check_whole(folder)
    if fault == "missing":
        (folder / part).unlink()
    else:
        shutil.copy(eight / "two" / part, folder / part)
    checkpoint.check_whole(folder)
    broken = tmp_path / "checkpoint.broken"
    assert capsys.readouterr().err == (f"{folder / part}: {fault}; so the checkpoint before is used, and "
                                       f"this one is now {broken}\n")
    assert_same_checkpoint(folder, eight / "two")
    (folder / part).unlink()                                              # now there is none to go back to
    with pytest.raises(ValueError, match=f"{part}: missing$"):
        checkpoint.check_whole(folder)
    assert broken.is_dir() and folder.is_dir()
    before = shutil.copytree(folder, tmp_path / "checkpoint.old")
    with pytest.raises(ValueError, match=f"missing; of the checkpoint before, {before / part}: missing$"):
        checkpoint.check_whole(folder)


@pytest.mark.slow
def test_a_checkpoint_without_moments_is_checked_and_kept_too(eight, tmp_path, capsys):
    """As at the end of a small model's cold start: each rank has a file of weights, and nothing else."""
    for name in ("fresh", "fresh.old"):
        shutil.copytree(eight / name, tmp_path / name)
    assert not (tmp_path / "fresh" / "trainer").exists()
    checkpoint.check_whole(tmp_path / "fresh")
    damaged = tmp_path / "fresh" / PARTS[1]
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-40] + bytes(40))
    checkpoint.check_whole(tmp_path / "fresh")
    assert f"{damaged}: not the file that this checkpoint was saved with" in capsys.readouterr().err
    assert (tmp_path / "fresh" / PARTS[1]).read_bytes() == content


@pytest.mark.slow
def test_a_part_that_another_machine_keeps_to_itself_fails_the_save(eight, tmp_path):
    folder = shutil.copytree(eight / "three", tmp_path / "checkpoint")
    for part in PARTS:
        (folder / part).rename(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=f"{part}: not there on rank 0; all machines must share"):
            checkpoint.files_saved(folder)
        (tmp_path / "elsewhere").rename(folder / part)
    assert {*PARTS} < {*checkpoint.files_saved(folder)}


@pytest.mark.slow
def test_a_lost_node_ends_the_job_and_the_run_goes_on_with_fewer(start, tmp_path, monkeypatch):
    """Until then it logs what one process does, for a seed as in test_train.py."""
    flags = [*start_from(start), *"--tasks 8 --group-size 2 --checkpoint-every 1 --iterations 6".split()]
    distances = nearest_draws(monkeypatch)
    for seed in range(30):
        distances.clear()
        assert train(tmp_path / "one", *flags, "--iterations", 1, "--seed", seed) == 0
        if min(distances) > 3e-6:
            break
        shutil.rmtree(tmp_path / "one")
    out = tmp_path / "run"
    command = [RANKS, "run", out, *flags, "--seed", seed]
    ranks, outputs = forked.start([*command, "--shard-within", "node"], VARIABLES, tmp_path, 4, nodes=2)
    wait_for(lambda: not all(rank.is_alive() for rank in ranks) or
             (out / "metrics.jsonl").exists() and len(rows(out)) >= 3)
    for rank in ranks[2:]:
        rank.kill()
    began = time.monotonic()
    left = forked.join(ranks[:2], outputs[:2])
    assert [rank.exitcode for rank in ranks[:2]] == [1, 1], left.text[-4000:]
    assert time.monotonic() - began < 60, left.text[-4000:]
    assert re.search(rf"rank [23] on {HOST} is lost \(.*\), so this one ends", left.text), left.text[-4000:]
    before, (expected,), (found, *_) = rows(out), numbers(tmp_path / "one"), numbers(out)
    expected, found = ({key: value for key, value in row.items() if key != "policy/lr"}
                       for row in (expected, found))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    state = checkpoint.read_trainer(out / "checkpoint")["state"]
    assert state["iteration"] >= 2 and state["place"]["ranks"] == 4
    shutil.copytree(out, tmp_path / "alone")
    assert train(tmp_path / "alone", *flags, "--seed", seed, "--resume") == 0
    done = forked.run([*command, "--resume"], VARIABLES, tmp_path, ranks=2)
    assert done.returncode == 0 and "ranks was 4, is 2" in done.text, done.text[-4000:]
    for folder in (out, tmp_path / "alone"):
        assert [row["iteration"] for row in rows(folder)] == [*range(6)]
        assert (folder / "stages.json").is_file()
        assert rows(folder)[:state["iteration"]] == before[:state["iteration"]]


@pytest.mark.slow
def test_a_node_that_answers_no_more_is_lost_within_a_minute(tmp_path):
    """Its connections stay open, as those of a machine without power do: here it is stopped. It is node 1,
    then node 0, which holds the job's store, both at once in two jobs. The ranks' beats are shorter than the
    product's, with which the longest wait is 49 s.
    """
    def falls_silent(silent, other, message):
        out = tmp_path / str(silent)
        out.mkdir()
        nodes = start_nodes(RANKS, "wait", out)
        wait_for(lambda: len([*out.iterdir()]) == 2, limit_s=240)
        stopped = [nodes[silent].pid, *workers(nodes[silent])]
        signal_node(nodes[silent], signal.SIGSTOP)
        began = time.monotonic()
        watching = workers(nodes[other])
        wait_for(lambda: not any(map(is_alive, watching)), limit_s=60)
        longest_s = job.BEAT_S * job.LOST_BEATS + job.PATIENCE_S + 5
        assert longest_s < 60 and time.monotonic() - began < longest_s
        for pid in (*stopped, nodes[other].pid):
            os.kill(pid, signal.SIGKILL)
        assert message in nodes[other].communicate()[0]

    cases = (1, 0, f"rank 1 on {HOST} is lost"), (0, 1, "localhost, which holds the job's store, is lost")
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(falls_silent, *case) for case in cases]:
            done.result()


@pytest.mark.slow
def test_no_run_starts_over_for_a_checkpoint_that_one_rank_alone_cannot_see(start, tmp_path):
    out, flags = tmp_path / "run", [str(flag) for flag in start_from(start)]
    assert train(out, *flags) == 0
    command = [RANKS, "blind", out, *flags, "--resume", "--overwrite"]
    done = forked.run(command, VARIABLES, tmp_path, ranks=2)
    assert done.returncode == 1 and "trainer.pt: not found" in done.text, done.text[-4000:]
    assert "rank 0 can read it" in done.text and "starts over" not in done.text
    assert not (tmp_path / "run.old-1").exists() and len(rows(out)) == 2


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_lost(tmp_path):
    done = forked.run([RANKS, "leave", tmp_path], VARIABLES, tmp_path, ranks=2)
    assert (done.returncode, done.text) == (0, "")


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_goes_on_from_its_checkpoint(start, tmp_path):
    """Of two nodes that meet as docs/gpus.md has it, one loses its rank, or is lost for good: two jobs, both
    at once.
    """
    flags = [*start_from(start), *"--checkpoint-every 1 --iterations 3 --resume --overwrite".split()]

    def goes_on(lost, expected):
        out, port = tmp_path / lost, free_port()
        nodes = start_nodes(
            RANKS, "restarted", out, lost, *flags,
            more=lambda node: (
                "--nnodes", "1:2", "--max-restarts", 1, "--rdzv-id", "job", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"localhost:{port}",
                "--rdzv-conf", f"is_host={node == 0},last_call_timeout=3,keep_alive_interval=2"),
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        statuses, text = finished(nodes)
        assert sorted(statuses) == expected, text[-4000:]
        assert [row["iteration"] for row in rows(out)] == [*range(3)]
        assert (out / "stages.json").is_file() and not out.with_name(f"{lost}.old-1").exists()
        assert re.search(rf"rank [01] on {re.escape(HOST)} is lost", text)

    cases = ("rank", [0, 0]), ("node", [-signal.SIGKILL, 0])
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(goes_on, *case) for case in cases]:
            done.result()


@pytest.mark.slow
def test_each_start_of_a_job_has_a_name_of_its_own_in_the_same_store():
    """Ranks of the second start read a peer's address of the first, and could not connect."""
    store, names = torch.distributed.HashStore(), []
    for order in ((0, 1, 2), (2, 1, 0)):
        with ThreadPoolExecutor(3) as pool:
            names.append([*pool.map(lambda rank: job.agreed_name(store, rank, 3), order)])
    assert [len({*of_start}) for of_start in names] == [1, 1] and names[0] != names[1]


@pytest.mark.slow
def test_ranks_that_do_not_connect_end_in_time_and_name_what_to_check():
    """Rank 1 of two never comes."""
    code = ("from infra import job; job.CONNECT_S = 1; job.setup('cpu')")
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()),
             "NCCL_SOCKET_IFNAME": "eth7"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT | alone, text=True,
                          capture_output=True, timeout=110, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: rank 0 on {HOST}: the 2 ranks did not connect within 1 s" in done.stderr
    assert "NCCL_SOCKET_IFNAME=eth7" in done.stderr and "MASTER_ADDR=localhost" in done.stderr


@pytest.mark.slow
def test_a_folder_that_is_not_shared_is_named(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    with files.locked(tmp_path / "ours"):
        text = files.lock_text(tmp_path / "ours")
        files.check_shared(tmp_path / "ours", text)
        with pytest.raises(ValueError, match=f"/theirs: on {HOST} not the folder that rank 0 writes to"):
            files.check_shared(tmp_path / "theirs", text, patience_s=1)


@pytest.mark.slow
def test_copies_that_differ_between_machines_are_refused(start, tmp_path, monkeypatch):
    """Each rank reads its own rows of the weights: of different copies it would train a mixture."""
    shutil.copytree(start, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    given, seen = config.parse(["--model", str(start)]), []
    monkeypatch.setattr(parallel, "is_distributed", lambda: True)
    monkeypatch.setattr(parallel, "all_gather", lambda mine: seen.append(("abc"[len(seen)], mine[1])) or seen)
    for _ in range(2):
        session.check_copies(given, start, [])
    with pytest.raises(ValueError, match=f"--model={start}: not the same for c as for a; every rank"):
        session.check_copies(given, tmp_path / "copy", [])
    seen.clear()
    session.check_copies(given, start, given.environment.split_tasks("dev")[:1])
    with pytest.raises(ValueError, match="--env=household: its games: not the same for b as for a"):
        session.check_copies(given, start, given.environment.split_tasks("dev")[1:2])


@pytest.mark.parametrize("flags, message", [
    ([], ""), (["--out", "elsewhere"], ""),
    (["--seed", "2"], "--seed: 0 for a, 2 for b; every rank needs the same command"),
    (["--resume"], "--resume: False for a, True for b"), (["--no-gcd"], "--gcd: True for a, False for b"),
    (["--algo", "gigpo"], "--algo: grpo for a, gigpo for b")])
def test_commands_that_differ_between_ranks_are_refused(flags, message, monkeypatch):
    seen = []
    monkeypatch.setattr(parallel, "all_gather", lambda mine: seen.append(("ab"[len(seen)], mine[1])) or seen)
    session.check_command(config.parse([]))
    other = config.parse(flags)
    if not message:
        session.check_command(other)
        return
    with pytest.raises(ValueError, match=message):
        session.check_command(other)


@pytest.mark.slow
def test_a_run_compares_copies_before_it_loads_anything(start, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(session, "check_copies", lambda config, source, tasks: refuse(source, tasks))
    monkeypatch.setattr(models, "load_model", None)

    def refuse(source, tasks):
        assert source == start and [task.split for task in tasks] == ["train", "L0", "L1"]
        raise ValueError("copies")

    assert train(tmp_path, *start_from(start), "--evaluate", "L0,L1") == 1
    assert_one_error(capsys, "copies")


@pytest.mark.slow
@pytest.mark.parametrize("module, name", [(session, "check_command"), (session, "check_tasks"),
                                          (files, "check_shared")])
def test_a_run_is_checked_before_it_loads_anything(start, tmp_path, monkeypatch, capsys, module, name):
    """Else ranks might train under different flags, leave tasks out, or write into other folders."""
    def refuse(*given):
        raise ValueError(name)

    monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(models, "load_model", None)
    assert train(tmp_path, *start_from(start)) == 1
    assert_one_error(capsys, name)


@pytest.mark.parametrize("tasks, ranks, message", [
    (16, 32, "--tasks=16: fewer than the 32 ranks, each of which plays whole groups: --tasks 32 --group-size "
     "4, for as many episodes; or start 16 ranks (torchrun --nnodes times --nproc-per-node)"),
    (16, 12, "--tasks=16: not a multiple of the 12 ranks, each of which plays whole groups: --tasks 24; or "
     "start 8 ranks (torchrun --nnodes times --nproc-per-node)")])
def test_tasks_that_cannot_be_shared_are_refused_with_what_to_set(tasks, ranks, message):
    settings = config.parse([f"--tasks={tasks}", "--group-size=8"])
    with pytest.raises(ValueError) as refused:
        session.check_tasks(settings, ranks)
    assert str(refused.value) == message
    session.check_tasks(settings, 8)
    session.check_tasks(config.parse([f"--tasks={tasks}", "--iterations=0"]), ranks)


@pytest.mark.parametrize("sizes, ranks, message", [
    ([4, 4, 2, 2], [0, 1, 0, 1], "LOCAL_WORLD_SIZE is"), ([2, 2, 2, 2], [0, 0, 1, 1], "RANK does not count")])
def test_machines_that_differ_or_are_not_in_order_are_refused(monkeypatch, sizes, ranks, message):
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: 1)
    answers = iter([sizes, [rank == k % sizes[0] for k, rank in enumerate(ranks)]])
    monkeypatch.setattr(parallel, "all_gather", lambda value: next(answers))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(sizes[1]))
    with pytest.raises(ValueError, match=f"--shard-within=node: {message}"):
        job.machines()
