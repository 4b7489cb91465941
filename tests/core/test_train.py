"""Proves gcd.py from end to end: the files of a run, that it is deterministic and learns, and how it fails.

    python -m pytest tests/core/test_train.py            # about 90 s on one core

Runs are `gcd.main` in this process where possible (tiny_runs.py); two ranks need their own processes. Left
out: resuming (tests/core/test_resume.py), every method in every environment
(tests/algorithms/test_methods.py), flags (tests/core/test_config.py).
"""

import errno
import gzip
import json
import math
import os
import shutil
import statistics
import tempfile
from collections import Counter
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import forked
import pytest
import torch
import transformers
from conftest import needs_full, rounding
from hand_made import GAME
from safetensors.torch import load_file
from tiny_runs import (
    ENVIRONMENT,
    ROOT,
    TINY,
    assert_loads_in_transformers,
    assert_one_error,
    rows,
    same,
    start_from,
    train,
    weights,
    without_times,
)

import config
import gcd
import judge
import models
import rollout
import session
import update
from algorithms import rewards
from envs import alfworld, scienceworld
from envs.alfred import rooms
from envs.household import Environment
from infra import files, job, parallel, plugins
from lm import engine
from lm import model as decoder
from lm.small import save_small_tokenizer


def prepared(out, *flags):
    """A tiny Run that is set up, and has done no work."""
    settings = config.parse_or_exit([*TINY, "--out", str(out), *map(str, flags)])
    return session.prepare(settings, job.setup("cpu"), False, ExitStack())


@pytest.mark.slow
@pytest.mark.parametrize("flags, n", [
    ("--slots 3", 3), ("", 16), ("--tasks 1 --evaluate L1 --evaluate-tasks 5 --protocol eight", 40),
    ("--evaluate L0,L1", 128), ("--evaluate L1 --protocol rlvmr --slots 200", 128),
    ("--dagger 30 --slots 50", 30), ("--dagger 999 --slots 50", 50)])
def test_there_are_as_many_games_as_are_played_at_once(tmp_path, flags, n):
    run = prepared(tmp_path / "out", "--demonstrations", 1, *flags.split())
    assert len(run.games) == run.slots.n == n


@pytest.mark.slow
def test_the_recorded_task_types_of_the_cold_start_are_those_of_the_weights(tmp_path):
    """Through RL and through --resume; None without a cold start."""
    few = ["--demonstrations", 4, "--judge-demonstrations", 0, "--cold-start-types"]
    run = prepared(tmp_path / "cold", *few, "part")
    assert run.identity["cold_start_types"] == "part"
    run.save({"iteration": 0})
    after = prepared(tmp_path / "rl", "--model", tmp_path / "cold" / "checkpoint", "--demonstrations", 0)
    assert after.identity["cold_start_types"] == "part"               # though the flag's default is "all"
    again = prepared(tmp_path / "again", "--model", tmp_path / "cold" / "checkpoint", *few, "all")
    assert again.identity["cold_start_types"] == "all"
    after.log(after.identity)
    after.save({"iteration": 1})
    resumed = prepared(tmp_path / "rl", "--model", tmp_path / "cold" / "checkpoint", "--demonstrations", 0,
                       "--resume")
    assert resumed.identity == after.identity
    assert prepared(tmp_path / "none", "--demonstrations", 0).identity["cold_start_types"] is None
    inside = ["--model", tmp_path / "cold" / "checkpoint", "--demonstrations", 0, "--overwrite"]
    (tmp_path / "cold" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="checkpoint: lies in --out=.*cold, which --overwrite would set"):
        prepared(tmp_path / "cold", *inside)
    assert (tmp_path / "cold" / "checkpoint").exists()


# The files of a run

@pytest.mark.slow
def test_every_line_of_the_metrics_is_complete(trained):
    first, *lines = files.read_lines(trained / "metrics.jsonl")[0]
    assert first["config"]["judge_labels"] == "oracle" and first["versions"]["torch"] == torch.__version__
    assert first["config"]["success_reward"] == 1.0 and first["config"]["games"] == ""
    assert {"commit", "started", "captions", "note", "warning"} <= first.keys()
    assert (first["world"], first["games"]) == ("household", "generated rooms")
    environment = config.parse_or_exit(TINY).environment
    train_hash = environment.tasks_hash(environment.train_tasks("part", 0, 8))    # 2 iterations of 4 tasks
    assert first["games_hash"] == {"train": train_hash}
    splits = {split: environment.tasks_hash(environment.split_tasks(split)) for split in ("L0", "L2")}
    evaluated = config.parse([*TINY, "--iterations", "0", "--demonstrations", "0", "--evaluate", "L0,L2"])
    assert files.origin_of(evaluated)["games_hash"] == splits
    assert files.origin_of(evaluated)["note"] == "" and "four" in files.origin_of(evaluated, "part")["note"]
    assert [line["iteration"] for line in lines] == [0, 1]
    for line in lines:
        for key in ("rollout/truncated_frac", "rollout/invalid_frac", "rollout/zero_variance_frac",
                    "policy/clip_frac"):
            assert 0 <= line[key] <= 1, key
        for key in ("policy/entropy_nats", "policy/grad_norm", "time/rollout_s", "time/judge_s",
                    "time/update_s", "time/rollout_environments_s", "time/rollout_device_s", "judge/turns",
                    "judge/loss", "judge/tokens"):
            assert math.isfinite(line[key]) and (line[key] > 0 or key == "judge/loss"), key
        # below, a test adds a gap: then it must be measured
        assert 0 <= line["policy/logprob_gap_max_nats"] < 1e-4
        assert 0 <= line["judge/logprob_gap_max_nats"] < 1e-4     # of the first of two steps: equal weights
        assert line["rollout/episodes"] == 16 and line["policy/steps"] == 2
        assert 0 < line["memory/cache_used_frac"] <= 1
        assert line["memory/cache_tokens"] >= line["rollout/response_tokens"]      # 16 slots: all are held
    assert [line["policy/lr"] for line in lines] == [6e-4, 3e-4]


@pytest.mark.parametrize("warmup, decay, want", [
    (0, True, [1, 0.75, 0.5, 0.25]), (0, False, [1, 1, 1, 1]), (3, False, [0.25, 0.5, 0.75, 1]),
    (1, True, [0.5, 0.75, 0.5, 0.25])])
def test_the_learning_rate_rises_and_decays_linearly(warmup, decay, want):
    settings = SimpleNamespace(iterations=4, warmup=warmup, lr_decay=decay)
    assert [gcd.lr_factor(settings, i) for i in range(4)] == want


@pytest.mark.slow
def test_stages_and_episodes(trained):
    assert files.read_json(trained / "stages.json")["rl"] > 0
    episodes, _ = files.read_lines(trained / "episodes.jsonl")
    assert {e["iteration"] for e in episodes} == {0, 1} and len(episodes) == 8        # a group of each
    turns = [turn for e in episodes for turn in e["turns"]]
    assert any(turn["advantage"] for turn in turns)
    assert {turn["oracle"] for turn in turns} <= {"good", "bad", None}
    judged = [turn for turn in turns if turn["verdicts"]]
    assert judged and all(len(turn["verdicts"]) == 4 and turn["label"] for turn in judged)


@pytest.mark.slow
def test_the_checkpoint_loads_in_transformers(trained):
    assert_loads_in_transformers(trained / "checkpoint", "go to cabinet 1")


@pytest.mark.slow
def test_the_evaluation_counts_every_task_of_a_split_in_three_modes(start, tmp_path, capsys):
    flags = [*start_from(start), "--iterations", 0, "--evaluate", "dev", "--max-turns", 2]
    assert train(tmp_path, *flags) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["splits"].keys() == {"dev"}
    assert found["splits"]["dev"].keys() == {"sampled", "greedy", "t0.4"}
    for mode in found["splits"]["dev"].values():
        assert mode["n"] == len(rooms.tasks("dev")) and mode["low"] <= mode["success"] <= mode["high"]
        assert 1 <= mode["turns"] <= 2
    games = found["outcomes"]["dev"]
    assert [game["game"] for game in games] == [task.id for task in rooms.tasks("dev")]
    for name, mode in found["splits"]["dev"].items():
        assert [game[name] for game in games].count("1") == mode["success"] * mode["n"]
    assert capsys.readouterr().out.startswith("dev: success ")
    assert train(tmp_path / "one", *flags, "--protocol", "sampled") == 0
    sampled = json.loads((tmp_path / "one" / "evaluation.json").read_text())
    assert sampled["splits"] == {"dev": {"sampled": found["splits"]["dev"]["sampled"]}}


@pytest.mark.slow
def test_protocol_eight_plays_every_task_eight_times_with_different_streams(start, tmp_path, monkeypatch):
    specs, play = [], rollout.play
    monkeypatch.setattr(rollout, "play", lambda *given, **more: (
        specs.append(given[3]) or play(*given, **more)))
    monkeypatch.setattr(Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:5])
    flags = ["--iterations", 0, "--evaluate", "dev", "--max-turns", 2, "--protocol", "eight"]
    assert train(tmp_path, *start_from(start), *flags) == 0
    found = json.loads((tmp_path / "evaluation.json").read_text())
    modes = found["splits"]["dev"]
    assert [{len(game[name]) for game in found["outcomes"]["dev"]} for name in modes] == [{8}, {8}]
    assert {name: mode["n"] for name, mode in modes.items()} == {"sampled": 40, "t0.4": 40}
    assert len({spec.stream for played in specs for spec in played}) == 80
    every = {task.id: 8 for task in rooms.tasks("dev")[:5]}
    assert [Counter(spec.task.id for spec in played) for played in specs] == [every, every]


# Results

@pytest.mark.slow
def test_at_weight_0_the_judge_is_logged_and_the_policy_is_plain_grpo(start, trained, tmp_path):
    assert train(tmp_path / "zero", *start_from(start), "--judge-weight", 0) == 0
    assert train(tmp_path / "off", *start_from(start), "--no-gcd") == 0
    assert same(weights(tmp_path / "zero"), weights(tmp_path / "off"))
    assert not same(weights(trained), weights(tmp_path / "off"))
    assert all(row["judge/turns"] > 0 for row in rows(tmp_path / "zero"))
    assert not any("judge/turns" in row for row in rows(tmp_path / "off"))


@pytest.mark.slow
def test_a_seed_fixes_the_run(start, trained, tmp_path):
    for name, seed in (("again", 0), ("other", 1)):
        assert train(tmp_path / name, *start_from(start), "--seed", seed) == 0
    assert same(weights(trained), weights(tmp_path / "again"))
    assert not same(weights(trained), weights(tmp_path / "other"))
    first, second = ([without_times(row) for row in rows(out)] for out in (trained, tmp_path / "again"))
    assert first == second


@pytest.fixture(scope="module")
def once(start, tmp_path_factory):
    """The folder of one iteration of GCD from `start`."""
    out = tmp_path_factory.mktemp("once")
    assert train(out, *start_from(start), "--iterations", 1) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "--kl loss --kl-coef 1", "--kl reward --kl-coef 1", "--history 2", "--normalize-std", "--variant code",
    "--reduction episode", "--reduction constant", "--invalid format",
    "--judge-labels dense", "--judge-weight 0.2", "--judge-labels rule+oracle",
    "--judge-normalize-std",
    "--temperature 0.7", "--preset paper --context 1024 --max-turns 8 --max-response-tokens 16 "
    "--judge-response-tokens 4 --lr 1e-4"])
def test_a_flag_changes_the_result(start, trained, once, tmp_path, flags):
    iterations = 2 if "--kl reward" in flags else 1       # in the first the policy is the KL's reference
    assert train(tmp_path, *start_from(start), *flags.split(), "--iterations", iterations) == 0
    assert len(rows(tmp_path)) == iterations
    assert all(row["policy/steps"] == 2 and math.isfinite(row["policy/grad_norm"]) for row in rows(tmp_path))
    assert not same(weights(once if iterations == 1 else trained), weights(tmp_path))
    if "--kl loss" in flags:
        assert all(row["policy/kl_nats"] > 0 for row in rows(tmp_path))


@pytest.mark.slow
def test_the_kl_penalty_is_the_reverse_kl_centered_in_its_group(start, tmp_path):
    """coef * sum over sampled tokens of log pi_old - log pi_ref, by an uncached forward per turn."""
    run = prepared(tmp_path, *start_from(start), "--kl", "reward", "--kl-coef", 0.5)
    episodes, _ = gcd.collect(run, 0)
    other = decoder.Model(run.model.config)
    decoder.init_weights(other, 5)
    slow = torch.tensor([sum(turn_kl(other, turn) for turn in episode.turns) for episode in episodes])
    groups = torch.tensor([episode.group for episode in episodes])
    centered = torch.tensor([value - slow[groups == group].mean() for value, group in zip(slow, groups)])
    assert centered.abs().max() > 0.1
    largest = max(sum(sum(map(abs, turn.logprob_old)) for turn in e.turns)
                  for e in episodes) + slow.abs().max()
    penalty = kl_penalty(run, other, episodes)
    torch.testing.assert_close(penalty, 0.5 * centered, atol=rounding(largest), rtol=0)
    assert kl_penalty(run, run.model, episodes).abs().max() < rounding(largest)         # 0 against itself


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--kl loss", "--kl reward", "--algo ppo --group-size 1 --no-gcd"])
def test_reference_and_critic_are_offloaded_except_during_their_forwards(start, tmp_path, monkeypatch, flags):
    """From their creation on; and while one of them is on the device, the policy is in use with it."""
    offloaded, used, onloaded, collect = set(), [], parallel.onloaded, gcd.collect

    def offload(model, optimizer=None):
        offloaded.add(model)

    @contextmanager
    def recorded(policy, model, optimizer=None):
        assert model in offloaded and policy not in offloaded
        offloaded.remove(model)
        with onloaded(policy, model, optimizer):
            yield model
        used.append(model)

    def checked(run, i):
        assert len(offloaded) == 1 and run.model not in offloaded
        return collect(run, i)

    def forward(self, *args, **kwargs):
        assert self not in offloaded
        return plain(self, *args, **kwargs)

    plain = decoder.Model.forward
    monkeypatch.setattr(parallel, "offload", offload)
    monkeypatch.setattr(parallel, "onloaded", recorded)
    monkeypatch.setattr(gcd, "collect", checked)
    monkeypatch.setattr(decoder.Model, "forward", forward)
    assert train(tmp_path, *start_from(start), *flags.split()) == 0
    assert len(used) >= 2 and {*used} == offloaded


def kl_penalty(run, reference, episodes):
    """Tensor [episodes]: what --kl reward subtracts from the advantages of each episode's turns."""
    algorithm = run.config.algorithm
    algorithm.assign(episodes)
    before = [[turn.advantage for turn in episode.turns] for episode in episodes]
    update.write_kl(run.model, reference, episodes, run.objective, run.config.kl_coef, False)
    algorithm.subtract_kl(episodes)
    penalties = [[b - turn.advantage for b, turn in zip(old, e.turns)] for old, e in zip(before, episodes)]
    assert all(max(turns) - min(turns) < 1e-6 for turns in penalties)
    return torch.tensor([turns[0] for turns in penalties])


@torch.no_grad()
def turn_kl(reference, turn):
    """Sum over a turn's response tokens of log pi_old - log pi_ref, by an uncached forward."""
    ids, n = turn.prompt_ids + turn.response_ids, len(turn.response_ids)
    logprob = reference(torch.tensor([ids]))[0, -n - 1:-1].log_softmax(-1)[range(n), turn.response_ids]
    return sum(turn.logprob_old) - float(logprob.sum())


@pytest.mark.slow
def test_a_truncated_response_fails_the_episode_or_is_an_invalid_turn(start, tmp_path):
    for how in ("fail", "invalid"):
        flags = [*start_from(start), "--max-response-tokens", 2, "--iterations", 1]
        assert train(tmp_path / how, *flags, on_truncation=how) == 0
    fail, invalid = (rows(tmp_path / how)[0] for how in ("fail", "invalid"))
    assert fail["rollout/truncated_frac"] > 0.5 and fail["rollout/turns"] < 8
    assert invalid["rollout/truncated_frac"] > 0.5 and invalid["rollout/turns"] == 8


@pytest.mark.slow
def test_groups_of_equal_rewards_are_kept_dropped_or_refilled(start, tmp_path):
    """No episode is won and invalid turns have no penalty: all groups are equal; refill plays 4 rounds."""
    flags = [*start_from(start), "--invalid-penalty", 0, "--max-turns", 2, "--no-gcd", "--iterations", 1]
    steps = {}
    for how in ("keep", "drop", "refill"):
        assert train(tmp_path / how, *flags, "--dynamic-sampling", how) == 0
        assert all(row["rollout/zero_variance_frac"] == 1 for row in rows(tmp_path / how))
        steps[how] = [row["policy/steps"] for row in rows(tmp_path / how)]
    assert steps == {"keep": [2], "drop": [0], "refill": [0]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["oracle", "shuffled"])
def test_redrawing_asks_about_other_turns_until_enough_have_a_gradient(start, tmp_path, monkeypatch, kind):
    """Of each round's questions only those with unequal rewards are trained; no turn is asked about twice.
    Without the flag there is one round, of the same first questions, and all of them count."""
    rounds_of_turns, numbers_of, answer = [], [], gcd.judge.answer_questions

    def answers(model, chat, judged, *arguments):
        answer(model, chat, judged, *arguments)
        numbers_of.extend(question.index for question in judged)
        for question in judged:
            spread = question.index % 4 == 1
            question.rewards = [float(spread and k == 0) for k in range(len(question.rewards))]
        rounds_of_turns.append([(question.episode.index, question.t) for question in judged])

    monkeypatch.setattr(gcd.judge, "answer_questions", answers)
    find = gcd.judge.candidates                # the oracle's: so weak a model gives dense labels no good turn
    monkeypatch.setattr(gcd.judge, "candidates", lambda played, kind, *rest: find(played, "oracle", *rest))
    rounds = {}
    for flags in ((), ("--judge-redraw",)):
        run = prepared(tmp_path, *start_from(start), "--judge-labels", kind, "--judge-turns", 8, *flags)
        episodes, _ = gcd.collect(run, 0)
        judged, samples, _ = gcd.judge_turns(run, 0, episodes)
        assert all(any(sample.advantage) for sample in samples) == bool(flags)
        rounds[flags], rounds_of_turns[:] = list(rounds_of_turns), []
        assert len({*numbers_of}) == len(numbers_of)               # which name their answers' random streams
        numbers_of.clear()
    (first,), several = rounds[()], rounds["--judge-redraw",]
    assert several[0] == first and [len(turns) for turns in several] == [8, 6, 4, 2]
    places = sum(several, [])
    assert len(set(places)) == len(places) == len(judged)
    assert len({tuple(sample.turns[0].prompt_ids + sample.turns[0].response_ids) for sample in samples}) <= 6


@pytest.mark.slow
def test_an_untied_small_model_starts_as_the_tied_one_and_trains_apart(tmp_path):
    folders = {}
    for name, flags in (("tied", ()), ("untied", ("--untied",))):
        run = prepared(tmp_path / name, *flags)
        ids = torch.tensor([[5, 300, 7, 301]])
        folders[name] = run.model(ids).detach()
        shared = run.model.lm_head.weight is run.model.model.embed_tokens.weight
        assert shared == (name == "tied")
    assert torch.equal(folders["tied"], folders["untied"])
    assert train(tmp_path / "run", "--untied", "--demonstrations", 20, "--judge-demonstrations", 8,
                 "--iterations", 0) == 0
    found = weights(tmp_path / "run")
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


@pytest.mark.slow
def test_refilling_replaces_groups_of_equal_rewards(start, tmp_path):
    """In groups of two episodes of one turn, often both are valid or both are not."""
    flags = [*start_from(start), "--max-turns", 1, "--group-size", 2, "--tasks", 16, "--no-gcd",
             "--iterations", 1]
    for how in ("drop", "refill"):
        assert train(tmp_path / how, *flags, "--dynamic-sampling", how) == 0
    drop, refill = (rows(tmp_path / how)[0] for how in ("drop", "refill"))
    assert 0 < drop["rollout/zero_variance_frac"] < 1 and drop["rollout/episodes"] == 32
    assert refill["rollout/episodes"] in (64, 96, 128)         # every played episode is counted
    assert refill["rollout/zero_variance_frac"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("unequal, rounds, groups", [
    ("1111", 1, [0, 1, 2, 3]), ("1000", 2, [0, 4, 5, 6]), ("0001", 2, [3, 4, 5, 6]),
    ("0000", 4, [0, 1, 2, 3])])
def test_refilling_keeps_complete_groups_of_unequal_rewards(start, tmp_path, monkeypatch, unequal, rounds,
                                                         groups):
    """Four groups are needed. In round 1 those marked 1 are unequal; if any is, all later ones are."""
    run, rounds_played = prepared(tmp_path, *start_from(start), "--dynamic-sampling", "refill"), []

    def play(run, specs, sampling, name):
        marks = "1111" if rounds_played and "1" in unequal else unequal
        rounds_played.append(specs)
        turn = rollout.Turn("", [1], [2], [0.0], "look", "look", True, "")
        return [rollout.Episode(spec.task, spec.group, turns=[turn],
                                won=marks[spec.group % 4] == "1" and k % 4 > 0)
                for k, spec in enumerate(specs)]

    monkeypatch.setattr(session.Run, "play", play)
    episodes, played = gcd.collect(run, 0)
    assert [episode.group for episode in episodes] == [group for group in groups for _ in range(4)]
    assert [episode.index for episode in episodes] == list(range(16))
    assert len(rounds_played) == rounds and len(played) == 16 * rounds
    tasks = {spec.task.id for specs in rounds_played for spec in specs}
    assert len(tasks) == 4 * rounds                            # new tasks in each round
    later = {spec.task.id for spec in gcd.episode_specs(run, 1)}                 # the first round's go on
    assert {name.split("/")[1] for name in later} == set("4567") and not later & tasks


@pytest.mark.slow
def test_episodes_have_their_index_group_and_reward(start, tmp_path):
    run = prepared(tmp_path, *start_from(start))
    episodes, played = gcd.collect(run, 0)
    assert [id(e) for e in episodes] == [id(e) for e in played]
    assert [episode.index for episode in episodes] == list(range(16))
    assert [episode.group for episode in episodes] == [g for g in range(4) for _ in range(4)]
    gcd.assign_credit(run, 0, episodes, None)
    for episode in episodes:
        invalid = sum(not turn.valid for turn in episode.turns)
        assert episode.reward == pytest.approx(episode.won - 0.1 * invalid / len(episode.turns))
    assert set(rewards.groups_of(episodes)) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("history", [0, 1])
def test_saved_rollouts_are_all_that_was_played_and_have_the_models_logprobs(start, tmp_path, history,
                                                                             restricted):
    """Of iteration 0, recomputed by transformers from the stored prompts and the starting weights, and from
    the ids that were allowed."""
    folder = start_from(start)[1]
    assert train(tmp_path, *start_from(start), "--save-rollouts", "--history", history, "--temperature", 0.8,
                 "--evaluate", "none", *["--admissible-only"] * restricted) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row in rows(tmp_path):
        episodes, _ = files.read_lines(tmp_path / files.ROLLOUTS / f"{row['iteration']:05d}.jsonl")
        assert [episode["index"] for episode in episodes] == [*range(16)]
        assert statistics.fmean(e["reward"] for e in episodes) == pytest.approx(row["rollout/reward"])
        turns = [turn for episode in episodes for turn in episode["turns"]]
        assert sum(len(turn["response_ids"]) for turn in turns) == row["rollout/response_tokens"]
    episodes, _ = files.read_lines(tmp_path / files.ROLLOUTS / "00000.jsonl")
    for episode in episodes[:4]:
        ids = []
        for turn in episode["turns"]:
            prompt = ids[:turn["prompt_shared"]] + turn["new_prompt_ids"]
            ids = prompt + turn["response_ids"]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, len(prompt) - 1:-1] / 0.8
            assert ("allowed" in turn) == restricted
            for place, allowed in enumerate(turn.get("allowed", ())):
                logits[place, [i for i in range(logits.shape[1]) if i not in allowed]] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, torch.tensor(turn["response_ids"])[:, None])[:, 0]
            assert turn["logprob"] == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_unmeasured_metrics_are_logged_as_null_not_zero(start, tmp_path):
    """Every group's rewards are equal, so the steps train the judge alone."""
    assert train(tmp_path, *start_from(start), "--iterations", 1, "--invalid-penalty", 0,
                 "--max-turns", 2) == 0
    (row,) = rows(tmp_path)
    assert row["policy/tokens"] == 0 and row["policy/steps"] > 0 and row["judge/entropy_nats"] > 0
    unknown = [row[f"policy/{key}"] for key in ("entropy_nats", "clip_frac", "logprob_gap_max_nats")]
    assert unknown == [None] * 3


# Several ranks

def nearest_draws(monkeypatch):
    """A list to which each draw appends the distance of its random number from the nearest token boundary."""
    sample_tokens, distances = engine.sample_tokens, []

    def watched(logits_BV, uniform_B, *settings):
        cumulative_BV = logits_BV.softmax(-1).double().cumsum(-1)
        distances.append(float((cumulative_BV - uniform_B[:, None]).abs().min()))
        return sample_tokens(logits_BV, uniform_B, *settings)

    monkeypatch.setattr(engine, "sample_tokens", watched)
    return distances


@pytest.mark.slow
@pytest.mark.parametrize("method", ["--algo ppo --tasks 16", "--algo nthr", "--lora 4 --kl loss"])
def test_two_ranks_log_the_same_as_one(start, tmp_path, monkeypatch, method):
    """The cold start's learning rate is 0, so that both start RL with the same bits. They sample the same
    episodes: the seed is the first for which every draw is further from a token boundary than rounding (1e-6)
    can move it."""
    cold = "--demonstrations 24 --cold-start-lr 0 --judge-demonstrations 40 --slots 3"
    flags = [*start_from(start)[:2], *cold.split(),
             *"--iterations 1 --microbatch-tokens 600 --max-response-tokens 4".split(), *method.split(),
             *"--evaluate dev --evaluate-tasks 6 --protocol sampled --save-rollouts".split(),
             "--group-size", 4 if "--tasks" not in method else 1, "--seed"]
    distances = nearest_draws(monkeypatch)
    for seed in range(30):
        distances.clear()
        assert train(tmp_path / "one", *flags, seed) == 0
        if min(distances) > 3e-6:
            break
        shutil.rmtree(tmp_path / "one")
    assert rows(tmp_path / "one")[0]["rollout/truncated_frac"] > 0             # some end early
    command = [ROOT / "gcd.py", *TINY, "--out", tmp_path / "two", *flags, seed]
    done = forked.run(command, ENVIRONMENT, tmp_path, ranks=2, timeout=240)
    assert done.returncode == 0, done.text[-4000:]
    one, two = (numbers(tmp_path / name, "cold_start") for name in ("one", "two"))
    assert len(one) == len(two) > 2 and one == [pytest.approx(row, rel=1e-5) for row in two]
    assert any(row.get("cold_start/judge_loss") for row in one)                # in the second stage only
    (one,), (two,) = (numbers(tmp_path / name) for name in ("one", "two"))
    assert one["judge/tokens"] and one["policy/tokens"] and one["policy/clip_frac"] is not None
    assert one == pytest.approx(two, rel=1e-5, abs=1e-5)
    torch.testing.assert_close(weights(tmp_path / "one"), weights(tmp_path / "two"), rtol=1e-4, atol=2e-5)
    one, two = (files.read_json(tmp_path / name / "evaluation.json") for name in ("one", "two"))
    assert one["splits"] == two["splits"] and one["outcomes"] == two["outcomes"]
    assert two["splits"]["dev"]["sampled"]["n"] == len(two["outcomes"]["dev"]) == 6
    one, two = (files.read_lines(tmp_path / name / files.ROLLOUTS / "00000.jsonl")[0]
                for name in ("one", "two"))
    one, two = ([(episode["index"], [turn["response_ids"] for turn in episode["turns"]])
                 for episode in episodes] for episodes in (one, two))
    assert one == two and len(two) == 16


def numbers(out, phase="rl"):
    """The numeric metrics that do not depend on rounding or time."""
    return [{key: value for key, value in without_times(row).items()
             if "gap" not in key and type(value) in (int, float)} for row in rows(out, phase)]


# Learning

@pytest.mark.slow
def test_a_cold_start_learns_to_win(tmp_path):
    """After 400 demonstrations many of 128 games are won; before, no command is valid.

    At temperature 0.4, in 30 turns, two seeds won 72 and 66 of them.
    """
    flags = ["--hidden-size", 64, "--layers", 3, "--max-turns", 20, "--judge-demonstrations", 0,
             "--judge-epochs", 0, "--cold-start-epochs", 6, "--cold-start-batch", 4, "--cold-start-lr", 6e-3,
             "--no-gcd"]
    assert train(tmp_path / "fresh", *flags, "--demonstrations", 0, "--tasks", 2, "--group-size", 8,
                 "--iterations", 1, "--temperature", 0.4, "--lr", 0) == 0
    assert train(tmp_path / "taught", *flags, "--demonstrations", 400, "--iterations", 0,
                 "--evaluate", "dev", "--protocol", "rlvmr") == 0
    (fresh,), found = rows(tmp_path / "fresh"), files.read_json(tmp_path / "taught" / "evaluation.json")
    taught = found["splits"]["dev"]["sampled"]
    first, *_, last = (row["cold_start/loss"] for row in rows(tmp_path / "taught", "cold_start"))
    assert first > 6 and last < 0.8                                     # two seeds: over 6.0, below 0.34
    assert fresh["rollout/invalid_frac"] > 0.99 and taught["invalid_frac"] < 0.8         # 1, below 0.54
    assert fresh["rollout/success"] == 0 and taught["success"] > 0.2                     # over 0.51


@pytest.mark.slow
def test_rl_unlearns_invalid_turns(start, tmp_path):
    """24 iterations with a penalty for invalid turns. In three seeds their share fell by 0.26 or more, from
    0.63.
    """
    flags = ["--iterations", 24, "--tasks", 8, "--group-size", 8, "--invalid-penalty", 1, "--lr", 2e-3,
             "--seed", 2]
    assert train(tmp_path, *start_from(start), *flags, lr_decay=False) == 0
    invalid = [row["rollout/invalid_frac"] for row in rows(tmp_path)]
    assert sum(invalid[-5:]) / 5 < invalid[0] - 0.15, invalid


# Errors after the flags are read

@pytest.mark.slow
@pytest.mark.parametrize("flags, message", [
    ("--preset small --model OUT/nowhere", "nowhere: no such folder"), ("--resume", "holds no checkpoint"),
    ("--out OUT/file", "file"), ("--context 34 --no-gcd", "--context=34: the first prompt of task train/"),
    ("--context 5000", "--context=5000"),
    ("--correction critiques --correction-every 1", "had no --instructions"),
    ("--algo rlvmr", "--algo=rlvmr: this model's cold start had no tags"),
    ("--device cuda", "--device=cuda")])
def test_an_impossible_run_fails_before_any_work(start, tmp_path, capsys, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (tmp_path / "file").write_text("")
    flags = [flag.replace("OUT", str(tmp_path)) for flag in flags.split()]
    assert train(tmp_path / "out", *start_from(start), *flags) == 1
    assert_one_error(capsys, message)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def untouched(*arguments):
    raise AssertionError("touched before what is quicker to check")


def copied(folder, path, change=lambda folder: None):
    """A copy of a model folder, changed by a function of it."""
    shutil.copytree(folder, path)
    change(path)
    return path


def rewrite(folder, name, **entries):
    """Change entries of a JSON file."""
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | entries))


def with_state(folder, **entries):
    """Change entries of the state in trainer.pt."""
    trainer = torch.load(folder / "trainer.pt")
    torch.save(trainer | {"state": trainer["state"] | entries}, folder / "trainer.pt")


@pytest.mark.slow
@pytest.mark.parametrize("change, flags, message", [
    (None, "--context 5000", "--context=5000"), (None, "--prompt tags", "cold start had no tags"),
    (None, "--correction critiques --correction-every 1", "had no --instructions"),
    (None, "--prompt think", "no words to think in"), (None, "--resume", "holds no checkpoint"),
    (None, "--judge-labels endpoint --endpoint http://127.0.0.1:9/v1 --endpoint-key-variable NOT_SET",
     "NOT_SET"),
    (lambda folder: rewrite(folder, "config.json", vocab_size=300), "", "has a token "),
    (lambda folder: rewrite(folder, "config.json", model_type="gpt"), "", "model_type='gpt' is not"),
    (lambda folder: rewrite(folder, "tokenizer.json", model=None), "", "tokenizer.json"),
    (lambda folder: with_state(folder, instruction={"x": 1}), "--iterations 0 --evaluate L0",
     "not an instruction"),
    (lambda folder: (folder / "trainer.pt").write_bytes(b"x"), "", "not a trainer state")])
def test_flags_and_small_files_are_checked_before_games_and_weights_are_read(
        start, tmp_path, capsys, monkeypatch, change, flags, message):
    """Games may be thousands of files, weights gigabytes."""
    if "--endpoint" in flags:
        pytest.importorskip("openai", reason="needs the openai package")
    for name in ("train_tasks", "split_tasks", "vocabulary", "make"):
        monkeypatch.setattr(Environment, name, untouched)
    monkeypatch.setattr(decoder, "load_weights", untouched)
    model = copied(start, tmp_path / "model", change) if change else start
    assert train(tmp_path / "out", *start_from(model), *flags.split()) == 1
    assert_one_error(capsys, message)


@pytest.mark.slow
@pytest.mark.parametrize("change, message", [
    (lambda folder: with_state(folder, settings={"env": "twins"}), "vocabulary of another environment"),
    (lambda folder: os.truncate(folder / "model.safetensors", 5000), "not a safetensors file")])
def test_the_model_is_checked_before_a_games_engine_is_started(
        start, tmp_path, capsys, monkeypatch, change, message):
    monkeypatch.setattr(Environment, "make", untouched)
    monkeypatch.setattr(Environment, "vocabulary", lambda self: [" a word", " of another world"])
    assert train(tmp_path / "out", *start_from(copied(start, tmp_path / "model", change))) == 1
    assert_one_error(capsys, message)


def test_games_are_checked_before_a_fresh_models_vocabulary_which_may_be_played_for(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Environment, "vocabulary", untouched)
    assert train(tmp_path / "out", "--games", tmp_path / "missing") == 1
    assert_one_error(capsys, "missing: no such file or folder")


@pytest.mark.slow
def test_a_model_for_scienceworld_is_checked_without_playing(start, tmp_path, monkeypatch):
    """By phrases that its every vocabulary holds: playing for all of them takes more than a minute."""
    monkeypatch.setattr(scienceworld, "gold_phrases", untouched)
    settings = config.parse(["--env", "scienceworld", "--judge-labels", "dense"])
    with pytest.raises(ValueError, match="' art studio', of --env scienceworld, is none of its tokens"):
        models.check_vocabulary(settings, start, {}, decoder.load_tokenizer(start))
    save_small_tokenizer(scienceworld.Environment.known_phrases, tmp_path)
    decoder.ModelConfig.load(start).save(tmp_path)
    models.check_vocabulary(settings, tmp_path, {}, decoder.load_tokenizer(tmp_path))


@pytest.mark.slow
def test_another_file_of_the_same_name_is_another_environment(start, tmp_path):
    """By its hash, if the state of the run that trained the model has one; then its vocabulary decides."""
    (tmp_path / "guess.py").write_text((ROOT / "examples" / "guess.py").read_text() + "# changed")
    settings = config.parse(["--env", str(tmp_path / "guess.py"), "--model", str(start)])
    tokenizer, previous = decoder.load_tokenizer(start), {"settings": {"env": "elsewhere/guess.py"}}
    for own in ({}, {"plugins": {"env": plugins.content_hash(settings.env)}}):
        models.check_vocabulary(settings, start, previous | own, tokenizer)
    with pytest.raises(ValueError, match="has the vocabulary of another environment: 'I think of a number"):
        models.check_vocabulary(settings, start, previous | {"plugins": {"env": "0" * 16}}, tokenizer)


@pytest.mark.slow
def test_a_missing_package_is_named_before_the_model_is_read(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(alfworld, "find_spec", lambda name: None)
    monkeypatch.setattr(decoder, "load_tokenizer", untouched)
    (tmp_path / "games.jsonl.gz").write_bytes(gzip.compress(b""))
    flags = ["--env", "alfworld", "--games", tmp_path / "games.jsonl.gz"]
    assert train(tmp_path / "out", *start_from(start), *flags) == 1
    assert_one_error(capsys, "--env=alfworld: not installed; pip install -r requirements-alfworld.txt")


@pytest.mark.slow
@pytest.mark.parametrize("name, message", [
    ("missing", "missing: no such file or folder"), ("empty", "empty: no game.tw-pddl"),
    ("text.jsonl.gz", "text.jsonl.gz: expected a folder of games"),
    ("pddl.jsonl.gz", "pddl.jsonl.gz: train/a/b: bad PDDL"), ("pipe", "pipe: no such file or folder")])
def test_games_that_cannot_be_read_are_named(start, tmp_path, capsys, name, message):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.jsonl.gz").write_text("not gzip")
    game = {"split": "train", "solvable": True, "rel": "train/a/b", "task_type": "look_at_obj_in_light",
            "task_desc": "x", "pddl_problem": "(define (:init"}
    with gzip.open(tmp_path / "pddl.jsonl.gz", "wt") as file:
        file.write(json.dumps(game))
    assert train(tmp_path / "out", *start_from(start), "--games", tmp_path / name) == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert_one_error(capsys, message)


@pytest.mark.slow
@pytest.mark.parametrize("change, message", [
    ({"pddl_problem": "(define (:init"}, "train/a/2: bad PDDL"),
    ({"pddl_problem": "(" * 5000 + ")" * 5000}, "train/a/2: bad PDDL: nested more than 100 deep"),
    ({"task_desc": "bring me a mug"}, "train/a/2: task 'bring me a mug': not one of ALFWorld's"),
    ({"task_desc": "put a \ud800 in fridge"}, "a lone surrogate in the text under the key task_desc")])
def test_one_broken_game_among_many_is_found_before_any_work(start, tmp_path, capsys, change, message):
    """Any of the games that the run would play; others do not matter."""
    rows_ = [GAME | {"rel": f"train/a/{k}"} | (change if k == 2 else {}) for k in range(9)]
    with gzip.open(tmp_path / "games.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows_)))
    flags = [*start_from(start), "--games", tmp_path / "games.jsonl.gz", "--iterations", 3]
    assert train(tmp_path / "out", *flags) == 1
    assert_one_error(capsys, message)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_tokenizer_larger_than_the_models_vocabulary_is_named(start, tmp_path, capsys):
    shutil.copytree(start, tmp_path / "grown")
    path = tmp_path / "grown" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 99999, "content": "extra"})
    path.write_text(json.dumps(tokenizer))
    assert train(tmp_path / "out", *start_from(tmp_path / "grown")) == 1
    assert_one_error(capsys, "grown/tokenizer.json: has a token ")


@pytest.mark.slow
def test_a_model_whose_logits_are_not_finite_is_not_evaluated_to_zero(start, tmp_path, capsys, monkeypatch):
    """Finite weights, but logits of nan: the sampler raises before anything is reported."""
    rope_tables = decoder.rope_tables
    monkeypatch.setattr(decoder, "rope_tables", lambda *arguments: [
        torch.full_like(table, math.nan) for table in rope_tables(*arguments)])
    assert train(tmp_path, *start_from(start), "--iterations", 0, "--evaluate", "L2") == 1
    assert_one_error(capsys, "the model's logprobs are not finite")
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.slow
def test_an_error_of_torch_is_one_line_with_its_traceback_in_a_file(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gcd, "judge_turns", lambda *arguments: torch.zeros(2) @ torch.zeros(3))
    assert train(tmp_path, *start_from(start)) == 1
    assert_one_error(capsys, f"(traceback in {tmp_path}/traceback.txt)")
    assert "judge_turns" in (tmp_path / "traceback.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory"),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: 12 bytes")])
def test_out_of_memory_names_the_flags_to_lower(start, tmp_path, capsys, monkeypatch, error):
    def full(*arguments):
        raise error

    monkeypatch.setattr(gcd, "judge_turns", full)
    assert train(tmp_path, *start_from(start)) == 1
    assert_one_error(capsys, "--slots or --context down; while training, --microbatch-tokens")


@pytest.mark.slow
def test_dagger_is_logged(tmp_path):
    assert train(tmp_path, "--demonstrations", 8, "--judge-demonstrations", 4, "--dagger", 6,
                 "--iterations", 0) == 0
    lines = files.read_lines(tmp_path / "metrics.jsonl")[0]
    round_, = (line for line in lines if line.get("phase") == "dagger")
    assert 0 <= round_["success"] <= 1 and 0 < round_["invalid_frac"] < 1
    assert {line["stage"] for line in lines if line.get("phase") == "cold_start"} == {
        "cold start: policy", "cold start: policy and judge"}


@pytest.mark.slow
def test_no_folder_outside_out_is_written_to(start, tmp_path, monkeypatch):
    """A regression test: critic and reference, gigabytes, were once written to the temporary directory."""
    def refuse(*arguments, **options):
        raise AssertionError("a temporary file")

    for name in ("mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile"):
        monkeypatch.setattr(tempfile, name, refuse)
    flags = ["--algo", "ppo", "--kl", "loss", "--iterations", 1]
    assert train(tmp_path / "ppo", *start_from(start), *flags) == 0
    assert train(tmp_path / "cold", "--demonstrations", 8, "--judge-demonstrations", 0, "--judge-epochs", 0,
                 "--iterations", 0) == 0
    assert not [path for path in tmp_path.rglob("fresh*")]


@pytest.mark.slow
@needs_full
def test_a_run_outlives_its_terminal(start, tmp_path):
    command = [ROOT / "gcd.py", *TINY, "--out", tmp_path / "out", *start_from(start),
               "--evaluate", "L2", "--protocol", "sampled", "--evaluate-tasks", 12]
    (tmp_path / "rank0.txt").symlink_to("/dev/full")                                 # where its output goes
    processes, _ = forked.start(command, ENVIRONMENT, tmp_path, ranks=1)
    assert forked.join(processes, []).returncode == 0
    assert len(rows(tmp_path / "out")) == 2 and (tmp_path / "out" / "stages.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variables, message", [
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: set without RANK, MASTER_ADDR, MASTER_PORT"),
    ({"RANK": "first"}, "RANK=first WORLD_SIZE=1: expected numbers"),
    ({"RANK": "1"}, "RANK=1 WORLD_SIZE=1: expected a rank below the number of ranks"),
    ({"WORLD_SIZE": "0"}, "RANK=0 WORLD_SIZE=0: expected a rank below the number of ranks"),
    ({"WORLD_SIZE": "", "RANK": "1"}, "RANK=1 WORLD_SIZE=1: expected a rank below the number of ranks")])
def test_incomplete_torchrun_variables_are_named(start, tmp_path, capsys, monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert train(tmp_path, *start_from(start)) == 1
    assert_one_error(capsys, message)


def test_on_gpus_a_rank_needs_its_number_on_its_machine(monkeypatch):
    """Else all ranks of a machine would take its first GPU."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="WORLD_SIZE=2: set without LOCAL_RANK; torchrun sets them all"):
        job.setup("cuda")


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(start, tmp_path, capsys, monkeypatch):
    assert train(tmp_path, *start_from(start), "--iterations", 1) == 0
    before = weights(tmp_path)

    def full(model, folder, weights):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(decoder, "save_pretrained", full)
    assert train(tmp_path, *start_from(start), "--iterations", 1, "--resume") == 1
    assert_one_error(capsys, "No space left on device")
    assert same(before, weights(tmp_path))
    decoder.load_pretrained(tmp_path / "checkpoint")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_and_keeps_the_batch(start, tmp_path, capsys):
    """The first step, with a huge learning rate, breaks the weights; the second raises."""
    assert train(tmp_path, *start_from(start), lr=1e30) == 1
    assert_one_error(capsys, "gradient norm nan")
    batch = torch.load(tmp_path / "nonfinite_batch_rank0.pt", weights_only=True)
    assert {"ids", "sampled", "advantage", "logprob_old", "kind"} <= batch[0].keys()
    assert not (tmp_path / "checkpoint").exists()


def offset_sampler(monkeypatch, nats):
    """Add a gap between sampler and trainer; without it, theirs depends on the CPU's rounding."""
    sample_tokens = engine.sample_tokens

    def off(*arguments):
        token_B, logprob_B = sample_tokens(*arguments)
        return token_B, logprob_B + nats

    monkeypatch.setattr(engine, "sample_tokens", off)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["policy", "judge"])
def test_a_sampler_that_disagrees_with_the_trainer_stops_the_run(start, tmp_path, capsys, monkeypatch, kind):
    """Either: commands and the judge's answers are sampled by different code."""
    module, name = (gcd, "collect") if kind == "policy" else (judge, "answer")
    sample = getattr(module, name)

    def off(*arguments):
        with monkeypatch.context() as patch:
            offset_sampler(patch, 0.5)
            return sample(*arguments)

    monkeypatch.setattr(module, name, off)
    assert train(tmp_path, *start_from(start)) == 1
    assert_one_error(capsys, f"{kind}: sampler and trainer differ by 5.00e-01 nats")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.slow
def test_in_bf16_the_samplers_logprobs_are_kept_and_weigh_the_loss(start, tmp_path, monkeypatch):
    """By default; this sampler says that every token was 0.5 nats likelier than it was."""
    offset_sampler(monkeypatch, 0.5)
    step, known = update.update, []

    def recorded(model, optimizer, samples, objective, *more):
        trained = update.with_gradient(samples, objective)
        known.append([{getattr(sample, name) is not None for sample in trained}
                      for name in ("logprob_old", "logprob_sampler")])
        return step(model, optimizer, samples, objective, *more)

    monkeypatch.setattr(update, "update", recorded)
    flags = [*start_from(start), "--dtype", "bfloat16", "--iterations", 1, "--judge-turns", 32]
    for name, cap in (("on", 2), ("off", 0)):
        assert train(tmp_path / name, *flags, "--sampler-cap", cap) == 0
    (on,), (off,) = rows(tmp_path / "on"), rows(tmp_path / "off")
    for kind in ("policy", "judge"):
        assert on[f"{kind}/sampler_weight"] == pytest.approx(math.exp(-0.5), rel=0.05)
        assert on[f"{kind}/sampler_cut_frac"] == 0 and f"{kind}/sampler_weight" not in off
        gap = f"{kind}/logprob_gap_nats"                       # of the first of two steps
        assert on[gap] == off[gap] == pytest.approx(0.5, abs=0.05)
    # the first of two steps has its own logprobs as the old ones, the second the trainer's from before it
    assert known == [[{False}, {True}], [{True}, {True}]] * 2
    assert not same(weights(tmp_path / "on"), weights(tmp_path / "off"))


@pytest.mark.slow
def test_a_step_without_a_gradient_is_saved_in_full_precision(tmp_path):
    """All rewards are equal: the forwards of --kl reward have no backward, and FSDP's weights stay gathered,
    in bf16.
    """
    flags = ("--dtype bfloat16 --demonstrations 0 --judge-demonstrations 0 --admissible-only --no-gcd "
             "--invalid-penalty 0 --tasks 2 --group-size 2 --minibatches 1 --max-turns 4 --kl reward "
             "--iterations 1 --keep-checkpoints 1").split()
    assert train(tmp_path, *flags) == 0
    (row,) = rows(tmp_path)
    assert row["rollout/success"] == 0 and row["policy/nll_nats"] is None
    kept = load_file(tmp_path / "kept" / "00001" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32} and same(kept, weights(tmp_path))


@pytest.mark.slow
def test_a_small_disagreement_is_logged(start, tmp_path, monkeypatch):
    """Larger than float32's own gap (below 1e-4 at the maximum), and below the limit."""
    offset_sampler(monkeypatch, 6e-5)
    assert train(tmp_path, *start_from(start), "--iterations", 1, "--no-gcd") == 0
    (row,) = rows(tmp_path)
    assert row["policy/logprob_gap_nats"] == pytest.approx(6e-5, abs=2e-5)
    assert row["policy/logprob_gap_nats"] <= row["policy/logprob_gap_max_nats"] < 1e-4
