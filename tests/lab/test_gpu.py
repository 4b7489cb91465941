"""Tests that lab/bench/gpu.py runs all its checks on any device, and continues after one that fails.

    python -m pytest tests/lab/test_gpu.py
"""

import json
import multiprocessing.forkserver
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import forked
import pytest
import torch
from conftest import is_alive
from test_attention import by_loop, shared_by_loop
from waiting import wait_for

import config
import judge
from envs import MessageLengths
from envs._checks import wrong_reply, wrong_tasks
from infra import files
from lab.bench import gpu, gpu_checks, gpu_runs, lengths, memory
from lab.bench import varlen as paths
from lab.bench.simulation import Work
from lab.bench.study import ROOT
from lab.envs import message_lengths
from lm import attention, smollm2
from lm.chat import Chat
from lm.model import load_tokenizer


@pytest.fixture(scope="module")
def started_server():
    """The process from which checks are forked has loaded what takes seconds, as gpu.main asks of a new one.
    Other tests' processes are not forked from it.
    """
    server = multiprocessing.forkserver._forkserver
    server._stop()
    server.set_forkserver_preload([*forked.LIBRARIES, gpu.ENGINE, gpu.RUNS])
    server.ensure_running()
    yield
    server._stop()


def lines_of(out):
    """{check: the line it printed}, and the other lines."""
    printed = out.splitlines()
    found = [json.loads(line) for line in printed if line.startswith("{")]
    return {line["check"]: line for line in found}, [line for line in printed if not line.startswith("{")]


@pytest.mark.slow
@pytest.mark.usefixtures("started_server")
def test_every_check_runs_and_the_faults_are_detected(capsys, monkeypatch):
    """But for update_32k, which with --tiny is update_16k."""
    monkeypatch.setattr(gpu, "CHECKS", [check for check in gpu.CHECKS if check.name != "update_32k"])
    status = gpu.main(["--tiny"])
    found, rest = lines_of(capsys.readouterr().out)
    names = [check.name for check in gpu.CHECKS]
    assert [*found] == names and [line.split()[0] for line in rest] == names
    assert not [line for line in found.values() if "error" in line]
    slow = {"floor", "splits", "update_16k"}                           # their targets are those of a GPU
    assert all(line["ok"] for name, line in found.items() if name not in slow)
    assert status == (0 if all(line["ok"] for line in found.values()) else 1)
    assert found["iteration"]["policy/steps"] == 2 and found["iteration"]["judge/tokens"] > 0
    stage, _, host = found["iteration"]["stages_reserved_gb_host_s"][-3]
    assert stage == "rollout" and {*host} == {*gpu_runs.HOST} and found["iteration"]["steps"][stage][0] > 0
    assert [*found["iteration"]["steps"]] == ["rollout", "judge"] and [*found["no_gcd"]["gb"]] == ["rollout",
                                                                                               "update"]
    assert found["ranks"]["losses"] >= 1 and found["ranks"]["largest_gap"] < 1e-4
    assert found["ranks"]["gradient_gap"] < 1e-3 and found["gradient"]["cosine"] > 0.999
    assert found["pretrained"]["killed_after"] >= 1 and found["pretrained"]["iterations"] == 3
    monkeypatch.setattr(gpu_checks, "update_at", lambda bench, tokens: tokens)
    assert (gpu_checks.update_16k(None), gpu_checks.update_32k(None)) == (2**14, 2**15)


def checks(*names, limit_s=60):
    return [gpu.Check(name, "faulty_checks", 10, limit_s, "a target") for name in names]


@pytest.mark.slow
@pytest.mark.usefixtures("started_server")
def test_a_check_that_fails_dies_or_hangs_is_a_line_and_the_next_one_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "CHECKS", [*checks("hangs", limit_s=12),
                                        *checks("broken", "dies", "short", "right")])
    out = tmp_path / "gpu.jsonl"
    assert gpu.main(["--tiny", "--out", str(out)]) == 1
    found, rest = lines_of(capsys.readouterr().out)
    assert all(f"in {name}\n" in found[name]["traceback"] for name in ("broken", "dies", "hangs"))
    assert found["broken"]["error"] == "RuntimeError: no such kernel"
    assert found["dies"]["error"] == "died with exit status -11"
    assert found["hangs"]["error"] == "did not end within 12 s" and found["hangs"]["check_s"] < 60
    assert found["hangs"]["share"] == 0.5 and not found["hangs"]["ok"]          # what it had reported
    assert found["short"]["share"] == 0.1235 and found["right"]["of"] == "a stand-in of 2000 tokens"
    assert [line.split()[1] for line in rest] == ["short"] * 4 + ["met"]
    assert [json.loads(line)["check"] for line in out.read_text().splitlines()] == [*found]


@pytest.mark.slow
def test_ctrl_c_ends_the_check_too():
    """Here it comes while the command waits for the check to report."""
    context, started = multiprocessing.get_context("fork"), []

    class Interrupted:
        """A pipe on which nothing comes but Ctrl-C."""
        def poll(self, seconds):
            while os.getpgid(pid := started[0].pid) != pid:
                time.sleep(0.01)
            raise KeyboardInterrupt

    def process(**given):
        started.append(context.Process(target=lambda: [os.setpgrp(), time.sleep(600)]))
        return started[0]

    ours = SimpleNamespace(close=lambda: None)
    stub = SimpleNamespace(Process=process, Pipe=lambda duplex: (Interrupted(), ours))
    with pytest.raises(KeyboardInterrupt):
        gpu.run(stub, *checks("right"), True, None)
    assert started[0].exitcode == -signal.SIGTERM


@pytest.mark.slow
def test_a_check_that_is_ended_leaves_no_rank_of_torchruns(tmp_path):
    """Here a shell, which ends what it started in a session of its own if it is asked to, after a while."""
    script = ("trap 'sleep 1; kill $rank' TERM; setsid sleep 600 & rank=$!; "
              f"echo $rank > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/rank; wait; wait")
    process = multiprocessing.get_context("fork").Process(
        target=lambda: [os.setpgrp(), subprocess.run(["bash", "-c", script])])
    process.start()
    wait_for((tmp_path / "rank").exists)
    gpu.end(process)
    assert not is_alive(int((tmp_path / "rank").read_text()))


@pytest.mark.slow
@pytest.mark.usefixtures("started_server")
def test_a_check_gets_the_time_that_is_left_if_that_is_enough(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "CHECKS", [*checks("hangs", limit_s=8), *checks("right", limit_s=60)])
    monkeypatch.setattr(gpu, "MOST_S", 7)
    assert gpu.main(["--tiny"]) == gpu.MORE_TO_RUN                # cut short, so it is no verdict
    found, rest = lines_of(capsys.readouterr().out)
    assert found["hangs"]["error"] in (f"did not end within {s} s" for s in (5, 6)) and [*found] == ["hangs"]
    assert rest[-1] == "2 left: the same command goes on"


@pytest.mark.slow
@pytest.mark.usefixtures("started_server")
def test_what_the_file_holds_is_not_run_again_but_errors_and_time_that_is_up_leaves_the_rest(
        capsys, monkeypatch, tmp_path):
    """Checks that ended by an error come last; what another GPU did, or had another target, or was no --tiny,
    is run, too.
    """
    out = tmp_path / "gpu.jsonl"
    files.append(out, {"check": "broken", "ok": False, "error": "it broke", "tiny": True})
    here = {"device": gpu_checks.device_name(), "torch": torch.__version__, "tiny": True}
    files.append(out, {"check": "short", "ok": True, "target": "a target", **here})
    for check in ("right", "short"):                        # of the latter an earlier line counts
        files.append(out, {"check": check, "ok": True, "target": "a target", **here, "device": "another"})
    files.append(out, {"check": "right", "ok": True, "target": "a target", **here, "tiny": False})
    monkeypatch.setattr(gpu, "CHECKS", [*checks("broken", "short", "right"), *checks("dies", limit_s=10**6)])
    monkeypatch.setattr(gpu, "MOST_S", 100)
    assert gpu.main(["--tiny", "--out", str(out)]) == 1
    found, rest = lines_of(capsys.readouterr().out)
    assert [*found] == ["right", "broken"] and len(out.read_text().splitlines()) == 7
    assert [line.split()[1] for line in rest[:4]] == ["short", "met", "met", "not"]
    assert rest[4] == "1 left: the same command goes on"
    monkeypatch.setattr(gpu, "CHECKS", [*checks("short", "right"), *checks("dies", limit_s=10**6)])
    assert gpu.main(["--tiny", "--out", str(out)]) == gpu.MORE_TO_RUN
    assert not lines_of(capsys.readouterr().out)[0]
    monkeypatch.setattr(gpu, "CHECKS", [replace(check, target="another") for check in checks("right")])
    assert gpu.main(["--tiny", "--out", str(out)]) == 0
    assert [*lines_of(capsys.readouterr().out)[0]] == ["right"]          # since what it checks has changed


def test_each_check_fits_a_command():
    for minutes in (10, 30):
        assert all(check.limit_s < gpu.MOST_S for check in gpu.CHECKS if check.minutes <= minutes)
    assert [check.minutes for check in gpu.CHECKS] == sorted(check.minutes for check in gpu.CHECKS)


@pytest.mark.slow
def test_every_path_of_variable_length_attention_is_compared(monkeypatch):
    """With a stand-in that is exact, and with one that reads a key too many, of what lies between rows."""
    def one_key_more(*arguments):
        *others, longest_k, keys_B = arguments
        return by_loop(*others, longest_k + 1, keys_B + 1)

    def one_key_more_of_all(*arguments):
        *others, longest_k, keys_B = arguments
        return shared_by_loop(*others, longest_k + 1, keys_B + (keys_B > 0))

    right = attention.Varlen(by_loop, by_loop, shared_by_loop)
    monkeypatch.setattr(attention, "SPLIT_KEYS", 16)
    options = torch.device("cpu"), torch.float32, 60
    config = replace(memory.shape("1.5B"), num_attention_heads=4, head_dim=8)
    exact = paths.errors(right, config, *options)
    assert [*exact] == ["decode", "decode_few", "prefill", "answers", "packed", "packed_backward", "prefixes",
                        "prefixes_backward"]
    assert max(exact.values()) < 1e-5
    wrong = paths.errors(right._replace(cached=one_key_more), config, *options)
    assert [path for path in exact if wrong[path] > 0.1] == ["decode", "decode_few", "prefill"]
    wrong = paths.errors(right._replace(shared=one_key_more_of_all), config, *options)
    assert [path for path in exact if wrong[path] > 0.1] == ["answers"]


@pytest.mark.parametrize("name, bandwidth", [
    ("NVIDIA H100 80GB HBM3", 3.35e12), ("NVIDIA H100 PCIe", 2.0e12), ("NVIDIA H100 NVL", 3.9e12),
    ("NVIDIA H200", 4.8e12), ("NVIDIA A100-SXM4-80GB", 2.04e12), ("NVIDIA A100-SXM4-40GB", 1.56e12),
    ("NVIDIA GeForce RTX 4090", 1.008e12), ("NVIDIA GH200 480GB", None), ("NVIDIA GB200", None),
    ("CPU", None)])
def test_a_gpus_data_sheet_is_that_of_its_whole_name(name, bandwidth):
    assert (gpu_checks.sheet_of(name) or [None])[0] == bandwidth


@pytest.mark.slow
@pytest.mark.usefixtures("started_server")
def test_without_a_gpu_it_ends_with_an_error(capsys, monkeypatch, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--out", str(tmp_path / "gpu.jsonl")])
    assert stopped.value.code == 2 and "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "gpu.jsonl").exists()


def test_an_iteration_stands_beside_its_estimate():
    """The slow end, update and scoring together; more than 15 % above it falls short."""
    estimate = {"bytes": {stage: 1.1 * gb * 1e9 + 2e9 for stage, gb in
                          (("rollout", 30), ("judge", 35), ("update", 40), ("step", 45))},
                "seconds": {"rollout": [40, 30], "judge": [10, 5], "update": [30, 20], "score": [10, 5]},
                "counts": {"decode steps": 5000, "judge steps": 500}}
    line = {"time/rollout_s": 44.0, "time/judge_s": 5.0, "time/update_s": 45.0}
    peaks = {"rollout": (31e9, 5100), "judge": (36e9, 512), "update": (46e9, 0)}
    found, right = gpu_runs.beside_estimate(SimpleNamespace(gcd=True), line, peaks, estimate)
    assert right and found["seconds"] == {"rollout": [44.0, 40], "judge": [5.0, 10], "update": [45.0, 40]}
    assert found["gb"] == {"rollout": [31, pytest.approx(30)], "judge": [36, pytest.approx(35)],
                           "update": [46, pytest.approx(45)]}
    assert found["steps"] == {"rollout": [5100, 5000], "judge": [512, 500]}
    slow = line | {"time/judge_s": 12.0}
    assert not gpu_runs.beside_estimate(SimpleNamespace(gcd=True), slow, peaks, estimate)[1]
    large = peaks | {"judge": (41e9, 512)}
    assert not gpu_runs.beside_estimate(SimpleNamespace(gcd=True), line, large, estimate)[1]
    del peaks["judge"]
    found, right = gpu_runs.beside_estimate(SimpleNamespace(gcd=False), line, peaks, estimate)
    assert right and [*found["gb"]] == ["rollout", "update"] and [*found["steps"]] == ["rollout"]


@pytest.mark.parametrize("there, reason", [(24e9, "needs 45 GB by lab.bench.memory, has 24"), (46e9, "")])
def test_a_gpu_without_room_for_an_iteration_skips_it(monkeypatch, there, reason):
    """As no failure: it says what is needed."""
    sizes = {"rollout": 30e9, "judge": 35e9, "update": 40e9, "step": 45e9, "rollout, equal rooms": 90e9}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=there))
    bench = SimpleNamespace(device=torch.device("cuda"), tiny=False)
    assert gpu_runs.too_small(bench, {"bytes": sizes}) == reason
    assert gpu_runs.too_small(bench, None) == ""


def test_the_flags_for_smollm2_are_known(monkeypatch):
    """Not checked by --tiny, which trains a fresh model."""
    monkeypatch.setattr(smollm2, "named", lambda model: model)
    settings = config.parse([*gpu_runs.SMOLLM2, "--algo", "grpo", "--evaluate", "none"])
    assert (settings.model, settings.prompt, settings.gcd) == ("smollm2", "plain", True)


# Prompts

def test_the_stand_in_tokenizer_counts_words_and_has_chatml(tmp_path):
    gpu_checks.save_stand_in(tmp_path, 2000)
    tokenizer = load_tokenizer(tmp_path)
    text = message_lengths.text_of(50, random.Random(0))
    chat = Chat(tokenizer, "think")
    assert len(tokenizer) == 2000 and not chat.small and len(chat.encode(text)) == 50
    assert tokenizer.decode(chat.encode(text)) == text
    assert tokenizer.decode(chat.message("hi")).endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_prompts_under_the_stand_in_are_about_as_long_as_under_qwens_tokenizer(tmp_path):
    """Else the load that lab.bench.gpu measures would not be the one that is computed."""
    gpu_checks.save_stand_in(tmp_path, 2000)
    environment = message_lengths.Environment()
    chat = Chat(load_tokenizer(tmp_path), "think", True, environment)
    frames = json.loads((ROOT / "envs" / "lengths.json").read_text())["frames"]["alfworld"]["think"]
    found = [chat.frame_tokens(lengths.EXAMPLE, first) for first in (True, False)]
    assert found == pytest.approx(frames, rel=0.2)
    assert len(judge.question_message(chat)) == pytest.approx(Work().question, rel=0.2)


@pytest.mark.slow
def test_the_words_are_one_token_each_under_qwens_tokenizer(qwen_tokenizer):
    encode = Chat(qwen_tokenizer, "think").encode
    assert all(len(encode(message_lengths.text_of(n, random.Random(n)))) == n for n in (1, 7, 300))


def test_episodes_have_recorded_lengths_and_repeat():
    environment = message_lengths.Environment()
    task, other = environment.train_tasks("all", 3, 2)
    assert not wrong_tasks([task, other], 2)

    def played(task, command):
        game, = environment.make(1)
        replies = [game.reset(task)]
        while not replies[-1].done:
            replies.append(game.step(command))
        return replies

    one, again, differently, elsewhere = (played(*pair) for pair in (
        (task, "a"), (task, "a"), (task, "b"), (other, "a")))
    assert one == again and one[0] == differently[0] and one[0] != elsewhere[0]
    assert [*map(wrong_reply, one)] == [""] * len(one)
    recorded = MessageLengths("alfworld").episodes
    totals = {tuple(a + b for a, b in zip(*episode)) for episode in recorded}
    lengths = [len(reply.observation.split()) for reply in one[:-1]]
    assert any(lengths[0] == messages[0] and {*lengths[1:]} <= {*messages[1:]} for messages in totals)
    won = [played(environment.train_tasks("all", i, 1)[0], "a") for i in range(40)]
    assert all(replies[-1].won == (len(replies) - 1 < message_lengths.MOST_TURNS) for replies in won)
