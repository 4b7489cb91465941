"""Proves the library: gcd.load, agent.play, print(episode), agent.judge, gcd.train, and examples/tour.py.

    python -m pytest tests/core/test_agent.py          # about 40 s on one core

P(good) itself, by hand and by sampling, is in tests/report/test_play.py.
"""

import doctest
import json
import os
import runpy
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import ROOT, TINY, rows, same, start_from, train, weights, without_times

import agent
import config
import correction
import evaluation
import gcd
import judge
import resume
import rollout
import session
from envs import Task
from infra import files, parallel
from infra.signals import Stop
from lm import model as decoder
from report import __main__ as report

COMMITTED = ROOT / "lab" / "results" / "alfworld_model"


@pytest.fixture(scope="module")
def player():
    return gcd.load(COMMITTED)


@pytest.mark.slow
def test_it_plays_where_it_is_told_to(monkeypatch):
    """On the CPU by default, and never silently there if it was to be a GPU."""
    devices, load = [], decoder.load_pretrained
    monkeypatch.setattr(decoder, "load_pretrained", lambda folder, dtype, device: [
        devices.append(device.type), load(folder, dtype)][1])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device=cuda: torch sees no CUDA device"):
            gcd.load(COMMITTED, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1e9))
    for settings in ({}, {"device": "cpu"}, {"device": "cuda"}):
        gcd.load(COMMITTED, **settings)
    assert devices == ["cpu", "cpu", "cuda"]


def options(flags):
    """A list of flags and values, as arguments of gcd.train."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}


# Examples

@pytest.mark.slow
@pytest.mark.parametrize("module, examples", [(agent, 4), (gcd, 1)])
def test_the_docstrings_examples(module, examples, player, monkeypatch):
    """The names `agent` and `episode` are those of the docstring of agent.py."""
    monkeypatch.chdir(ROOT)
    names = {"gcd": gcd, "agent": player, "episode": player.play("household", "L0/3")}
    runner, found = doctest.DocTestRunner(), 0
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        found += bool(test.examples)
        assert runner.run(test).failed == 0, test.name
    assert found == examples


@pytest.mark.slow
def test_the_tour_writes_a_report(tmp_path, monkeypatch, capsys):
    """With fewer demonstrations and games, from a folder in which Python would not find the project."""
    learn, few = gcd.train, {"demonstrations": 60, "judge_demonstrations": 20, "evaluate_tasks": 12}
    monkeypatch.setattr(gcd, "train", lambda **given: learn(**given | few))
    monkeypatch.setattr(sys, "argv", ["tour.py", str(tmp_path)])
    elsewhere = [path for path in sys.path if Path(path).resolve() != ROOT]
    monkeypatch.setattr(sys, "path", elsewhere)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "tour.py"), run_name="__main__")
    assert str(ROOT) in sys.path
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert len(rows(tmp_path / "grpo+gcd")) == 2
    printed = capsys.readouterr().out
    assert printed.count("task L0/3/") == 2 and "P(good) = " in printed
    assert "AUC in training: {'labels': 0.87" in printed


# Playing

@pytest.mark.slow
def test_play_is_the_episode_that_a_run_would_play(player):
    """rollout.play with the same model, flags and stream."""
    settings = config.parse(["--model", str(COMMITTED), "--demonstrations", "0"])
    spec = rollout.EpisodeSpec(settings.environment.split_tasks("L0")[3], 0, agent.stream(5))
    want, = rollout.play(player.model, player.chat, settings.environment.make(1), [spec],
                         agent.Sampling(0.7, settings.max_response_tokens), 4, settings.context)
    episode = player.play("household", "L0/3", seed=5, temperature=0.7, max_turns=4)
    assert episode == want and 1 <= len(episode.turns) <= 4
    others = [player.play("household", "L0/3", seed, temperature=4.0, max_turns=4) for seed in range(3)]
    assert len({json.dumps([turn.response_ids for turn in other.turns]) for other in others}) > 1


@pytest.mark.slow
def test_play_uses_the_settings_of_load_unless_it_is_given_others():
    briefly = gcd.load(COMMITTED, max_turns=2, env=ROOT / "envs" / "household.py")
    assert len(briefly.play("household", "L0/3").turns) == 2
    assert len(briefly.play("household", "L0/3", max_turns=3).turns) == 3


@pytest.mark.slow
def test_an_agent_needs_not_the_folder_that_the_program_was_in(monkeypatch, tmp_path):
    """As in a notebook, after os.chdir."""
    monkeypatch.chdir(COMMITTED.parent)
    moved = gcd.load(COMMITTED.name)
    monkeypatch.chdir(tmp_path)
    assert moved.judge_auc() and moved.play("household", "L0/3", max_turns=1).turns


@pytest.mark.slow
def test_a_small_model_plays_and_judges_on_one_thread_and_leaves_the_number_as_it_was(player, monkeypatch):
    used, forward = [], decoder.Model.forward
    monkeypatch.setattr(decoder.Model, "forward", lambda model, *given, **more: used.append(
        torch.get_num_threads()) or forward(model, *given, **more))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        episode = player.play("household", "L0/3", max_turns=2)
        player.judge(episode, 0)
        assert {*used} == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_thread_trains_without_signals():
    """Only the main thread may handle them."""
    found = []
    thread = threading.Thread(target=lambda: found.append(bool(Stop())))
    thread.start()
    thread.join()
    assert found == [False]


@pytest.mark.slow
def test_an_episode_prints_as_a_transcript(player):
    episode = player.play("household", "L0/3", max_turns=3)
    first, *_, last = str(episode).splitlines()
    assert first == f"task {episode.task.id}"
    assert last in ("won after 3 turns", "not won after 3 turns (turn limit)")
    commands = [f"[{number}] > {turn.action}" for number, turn in enumerate(episode.turns, 1)]
    positions = [str(episode).index(command) for command in commands]
    assert positions == sorted(positions)
    assert all(turn.observation in str(episode) for turn in episode.turns)


def test_judge_is_p_good_of_that_turn(player):
    episode = player.play("household", "L0/3", max_turns=3)
    for number, turn in enumerate(episode.turns):
        assert player.judge(episode, number) == player.probability_good(turn.prompt_ids, turn.response_ids)


@pytest.mark.slow
def test_a_value_heads_p_good_is_its_sigmoid(start, tmp_path):
    """Exact, by an uncached forward."""
    assert train(tmp_path, *start_from(start), "--judge-kind", "value", "--iterations", 1) == 0
    player = gcd.load(tmp_path / "checkpoint")
    turn = player.play("household", "L0/0", max_turns=1).turns[0]
    with torch.no_grad():
        logit = player.model(torch.tensor([turn.prompt_ids + turn.response_ids]), head="value")[0, -1]
    p_good = player.probability_good(turn.prompt_ids, turn.response_ids)
    assert p_good == pytest.approx(float(logit.sigmoid()))
    (row,) = rows(tmp_path)
    assert row["judge/turns"] and "judge/variance_frac" not in row
    assert all(row[f"judge/{key}"] is None for key in (                    # nan: nothing was sampled
        "clip_frac", "logprob_gap_nats", "logprob_gap_max_nats"))


@pytest.mark.slow
def test_a_value_head_that_is_trained_no_more_is_dropped(start, tmp_path):
    """Else `judge` would read it, and not the verdicts that were trained meanwhile."""
    headed = shutil.copytree(start, tmp_path / "headed")
    decoder.save_pretrained(decoder.load_pretrained(start, value_head=True), headed)
    assert gcd.load(headed).model.config.value_head
    assert train(tmp_path / "run", *start_from(headed), "--iterations", 1) == 0
    assert not gcd.load(tmp_path / "run" / "checkpoint").model.config.value_head


@pytest.mark.slow
def test_play_has_the_instruction_under_which_the_run_evaluates(start, tmp_path):
    folder = shutil.copytree(start, tmp_path / "model")
    trainer = torch.load(folder / "trainer.pt", weights_only=True)
    text = correction.instruction_phrases()[0]
    trainer["state"]["instruction"] = text
    played = []
    for given in (False, True):
        trainer["state"]["settings"]["correction_at_evaluation"] = given
        torch.save(trainer, folder / "trainer.pt")
        player = gcd.load(folder)
        assert player.instruction_in("household") == (text if given else "")
        assert player.instruction_in("alfworld") == ""
        played.append(player.play("household", "L0/0", max_turns=1).turns[0].prompt_ids)
    tokenizer = player.chat.tokenizer
    assert len(played[1]) > len(played[0]) and text not in tokenizer.decode(played[0])
    trainer["state"]["settings"]["env"] = "elsewhere"             # it is of the run's environment
    torch.save(trainer, folder / "trainer.pt")
    assert gcd.load(folder).play("household", "L0/0", max_turns=1).turns[0].prompt_ids == played[0]


@pytest.mark.slow
def test_what_only_rl_needs_is_not_checked_of_a_player():
    for settings in ({"context": 64, "max_response_tokens": 16}, {"tasks": 2, "group_size": 1},
                     {"iterations": 5, "warmup": 5}, {"correction": "critiques"}):
        assert gcd.load(COMMITTED, **settings).config.iterations == 0


@pytest.mark.slow
def test_a_folder_is_prompted_as_its_run_did_unless_told_otherwise(start, tmp_path):
    folder = shutil.copytree(start, tmp_path / "model")
    trainer = torch.load(folder / "trainer.pt", weights_only=True)
    trainer["state"]["settings"] |= {"history": 2, "show_admissible": False, "prompt": "auto",
                                     "admissible_only": True}
    trainer["state"]["style"] = "tags"
    torch.save(trainer, folder / "trainer.pt")
    expected = {"prompt": "tags", "history": 2, "show_admissible": False, "admissible_only": True}
    assert resume.prompting_of(folder, "household") == expected
    assert not resume.prompting_of(COMMITTED, "household")
    limited = resume.prompting_of(folder, "scienceworld").pop("admissible_only", None)
    assert limited is None                                            # it may list none there
    kept = shutil.copytree(COMMITTED, tmp_path / files.KEPT / "00002")
    files.write_json(kept / files.STATE, trainer["state"] | {"instruction": "Look first."})
    assert resume.prompting_of(kept, "household") == expected
    assert gcd.load(kept, prompt="plain").instruction_in("household") == "Look first."
    player = gcd.load(folder, prompt="plain", history=0)
    assert (player.config.history, player.config.show_admissible) == (0, False)
    _, config, _ = evaluation.parse(["--player", str(folder), "--history", "1"])
    assert (config.prompt, config.history, config.show_admissible) == ("tags", 1, False)
    assert config.admissible_only                          # whatever the last flag is
    del trainer["state"]["style"]                                     # as in older ones
    torch.save(trainer, folder / "trainer.pt")
    assert resume.prompting_of(folder, "household")["prompt"] == "auto"


@pytest.mark.slow
def test_a_folder_runs_no_code_that_its_run_names(start, tmp_path):
    """As weights_only=True is to make sure."""
    folder, evil = shutil.copytree(start, tmp_path / "run" / "checkpoint"), tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    trainer = torch.load(folder / "trainer.pt", weights_only=True)
    trainer["state"]["settings"] |= {"algo": str(evil), "env": str(evil), "prompt": "auto"}
    torch.save(trainer, folder / "trainer.pt")
    (folder.parent / "metrics.jsonl").write_text(json.dumps({"config": trainer["state"]["settings"]}) + "\n")
    gcd.load(folder)
    report.write(folder.parent)
    assert (folder.parent / "report.html").exists() and not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_value_after_an_environments_name_is_its_first_setting_in_play_too():
    player = gcd.load(COMMITTED, env="household:nowhere")
    with pytest.raises(ValueError, match="--games=nowhere"):
        player.play("household", "L0/0")
    player.play("household", "L0/0", games="", max_turns=1)


@pytest.mark.slow
def test_weights_are_fp32_unless_a_dtype_is_given():
    for settings, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        assert {p.dtype for p in gcd.load(COMMITTED, **settings).model.parameters()} == {dtype}


# The judge's AUC

def test_judge_auc_is_the_mean_of_the_last_ten_iterations(player, tmp_path):
    """Of the run's metrics, if any, else of judge.json; unmeasured iterations are left out."""
    shutil.copytree(COMMITTED, tmp_path / "checkpoint")
    loaded = gcd.load(tmp_path / "checkpoint")
    assert loaded.judge_auc() == player.judge_auc() != {}
    lines = [{"phase": "rl", "iteration": i, "judge/auc": i / 20,
              "judge/auc_oracle": None if i < 11 else 0.75} for i in range(12)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert loaded.judge_auc() == pytest.approx({"labels": sum(range(2, 12)) / 200, "oracle": 0.75})
    foreign = ['5', '{"phase": "rl"}', '{"phase": "rl", "iteration": 1, "judge/auc": "x"}']
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in foreign))
    (tmp_path / "checkpoint" / "judge.json").write_text('{"labels": "x", "oracle": 0.5}')
    assert loaded.judge_auc() == {"oracle": 0.5}
    (tmp_path / "checkpoint" / "judge.json").write_text('["labels"]')
    with pytest.raises(ValueError, match=r"judge.json: expected an object with labels and oracle"):
        loaded.judge_auc()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "checkpoint" / "judge.json").unlink()
    assert loaded.judge_auc() == {}


# Bad input

def test_load_refuses_a_folder_without_a_model(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder"):
        gcd.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="config.json: not found$"):
        gcd.load(tmp_path)
    shutil.copytree(COMMITTED, tmp_path / "run" / "checkpoint")
    with pytest.raises(ValueError, match="config.json: not found; the run's model is in .*run/checkpoint$"):
        gcd.load(tmp_path / "run")
    with pytest.raises(ValueError, match="^--model=.*not found; the run's model is in .*run/checkpoint$"):
        config.parse(["--model", str(tmp_path / "run")])
    shutil.copytree(COMMITTED, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        gcd.load(tmp_path / "model")


@pytest.mark.slow
def test_load_never_plays_beyond_a_models_positions(tmp_path):
    shutil.copytree(COMMITTED, tmp_path / "model")
    settings = json.loads((COMMITTED / "config.json").read_text()) | {"max_position_embeddings": 600}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    player = gcd.load(tmp_path / "model")
    assert player.config.context == 600
    assert player.play("household", "L0/3", max_turns=2).turns
    for call in (lambda: gcd.load(tmp_path / "model", context=700),
                 lambda: player.play("household", "L0/3", context=700)):
        with pytest.raises(ValueError, match="--context=700: .*config.json allows 600"):
            call()
    for setting in ({"device": "cpu"}, {"dtype": "bfloat16"}, {"model": "smollm2"}):
        with pytest.raises(ValueError, match=f"--{min(setting)}: give it to load"):
            player.play("household", "L0/3", **setting)
    with pytest.raises(ValueError, match="--temperature: give it to play"):
        gcd.load(tmp_path / "model", temperature=1.0)


@pytest.mark.parametrize("settings, message", [
    ({"max_turns": 0}, "--max-turns=0: expected 1"), ({"frobnicate": 1}, "--frobnicate"),
    ({"prompt": "think", "algo": "rlvmr"}, "--prompt=think"),
    ({"prompt": "think"}, "--prompt=think: a small model has no"), ({"env": "nowhere"}, "--env=nowhere")])
def test_load_refuses_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        gcd.load(COMMITTED, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("env, task, settings, message", [
    ("nowhere", "L0/3", {}, "--env=nowhere: expected one of "), ("envs/nowhere.py", "L0/3", {}, "nowhere.py"),
    ("household", "L9/3", {}, "task 'L9/3': expected SPLIT/NUMBER, the split one of "),
    ("household", "L0", {}, "task 'L0': expected SPLIT/NUMBER"),
    ("household", "train/0", {}, "task 'train/0': .*, or the id of a task of these splits$"),
    ("household", "L0/-1", {}, "task 'L0/-1': expected SPLIT/NUMBER"),
    ("household", "L0/99999", {}, "task 'L0/99999': L0 has tasks 0 to "),
    ("household", "L0/3", {"max_turns": 0}, "--max-turns=0"), ("household", "L0/3", {"turns": 3}, "--turns"),
    ("household", "L0/3", {"games": "nowhere"}, "nowhere"),
    ("household", "L0/3", {"temperature": -1}, "temperature=-1: expected 0"),
    ("examples/guess.py", "test/0", {},
     "has the vocabulary of another environment: 'I think of .*; give the --env that it was trained in$")])
def test_play_refuses_what_does_not_exist(player, env, task, settings, message):
    with pytest.raises(ValueError, match=message):
        player.play(env, task, **settings)


def test_a_task_is_found_by_its_id_before_its_number():
    """As episodes.jsonl has it; the numbers in an environment's ids may be others than those of its tasks."""
    tasks = [Task(name, "test", "t", None) for name in ("test/1", "test/0", "elsewhere/a")]

    def split_tasks(name):
        config.refuse(name != "test", "a missing split")
        return tasks

    environment = SimpleNamespace(splits=("missing", "test"), split_tasks=split_tasks)
    found = [agent.task_named(environment, name) for name in ("test/0", "test/1", "test/2", "elsewhere/a")]
    assert found == [tasks[1], tasks[0], tasks[2], tasks[2]]
    with pytest.raises(ValueError, match="^task 'elsewhere/b': expected SPLIT/NUMBER"):
        agent.task_named(environment, "elsewhere/b")


def test_judge_refuses_a_turn_that_does_not_exist(player):
    episode = player.play("household", "L0/3", max_turns=2)
    for turn in (-1, 2):
        with pytest.raises(ValueError, match=f"turn {turn}: the episode has turns 0 to 1"):
            player.judge(episode, turn)


# Training

def handlers():
    return {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


@pytest.mark.slow
def test_train_equals_the_command(start, tmp_path):
    """The same weights and metrics; signal handlers are restored, and no process group is left."""
    before = handlers()
    trained = gcd.train(**options(TINY), model=start, demonstrations=0, out=tmp_path / "library",
                        temperature=1.0)
    assert handlers() == before and not parallel.is_distributed()
    assert train(tmp_path / "command", *start_from(start)) == 0
    library, command = tmp_path / "library", tmp_path / "command"
    assert same(weights(library), weights(command))
    assert [*map(without_times, rows(library))] == [*map(without_times, rows(command))]
    state = {name: tensor for name, tensor in trained.model.state_dict().items() if name in weights(library)}
    assert same(state, weights(library)) and trained.config.model == str(library / "checkpoint")


@pytest.mark.slow
def test_train_returns_the_runs_model_under_flags_that_playing_refuses_and_where_nothing_is_left(
        start, tmp_path, monkeypatch):
    """Flags of training that need others, and a resumed run that only evaluates its own checkpoint."""
    monkeypatch.setattr(gcd, "run_all", lambda config, resources: 0)
    chosen = {"model": start, "demonstrations": 0, "iterations": 1, "out": tmp_path, "judge_labels": "oracle"}
    for needs in ({"kl": "loss", "kl_coef": 0.1}, {"dtype": "bfloat16", "sampler_cap": 2},
                  {"correction": "critiques", "correction_every": 5}):
        played = gcd.train(**chosen | needs).config
        assert played.model == str(start) and played.dtype == needs.get("dtype", "float32")
    shutil.copytree(start, tmp_path / "checkpoint")
    again = chosen | {"iterations": 0, "resume": True}
    assert gcd.train(**again).config.model == str(tmp_path / "checkpoint")
    del again["model"]
    assert gcd.train(**again).config.model == str(tmp_path / "checkpoint")


@pytest.mark.parametrize("settings, message", [
    ({"lr": "nan"}, "--lr=nan"), ({"frobnicate": 1}, "--frobnicate: no such flag"),
    ({"iterations": True}, "--iterations"), ({"env": "nowhere"}, "--env=nowhere"),
    ({"out": ""}, "--out=: expected a folder"),
    ({"gcd": False, "correction": "critiques"}, "--correction=critiques: "),
    ({"demonstrations": 0, "iterations": 0}, "--iterations=0: expected a --model to evaluate")])
def test_train_refuses_wrong_settings_before_any_work(tmp_path, settings, message):
    before = handlers()
    with pytest.raises(ValueError, match=message):
        gcd.train(**{"out": tmp_path / "out"} | settings)
    assert not (tmp_path / "out").exists() and handlers() == before and not parallel.is_distributed()


@pytest.mark.slow
def test_an_error_found_later_restores_the_signals_too_and_frees_the_folder(start, tmp_path, monkeypatch):
    before = handlers()
    settings = options(TINY) | {"model": start, "demonstrations": 0, "out": tmp_path / "out"}
    with pytest.raises(ValueError, match="--context=34: the first prompt of task"):
        gcd.train(**settings, context=34, gcd=False)
    with monkeypatch.context() as patch:
        patch.setattr(gcd, "iteration", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gcd.train(**settings)
    assert handlers() == before and not parallel.is_distributed()
    gcd.train(**settings, overwrite=True)                # the folder's lock is free


@pytest.mark.slow
def test_ctrl_c_saves_and_raises_keyboard_interrupt(start, tmp_path, monkeypatch):
    """Once to stop and save, as on the command line; then --resume continues."""
    settings = options(TINY) | {"model": start, "demonstrations": 0, "out": tmp_path / "out"}
    optimize, before = gcd.optimize, handlers()

    def pressed(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return optimize(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(gcd, "optimize", pressed)
        with pytest.raises(KeyboardInterrupt):
            gcd.train(**settings)
    assert len(rows(tmp_path / "out")) == 1 and handlers() == before
    gcd.train(**settings, resume=True)
    assert len(rows(tmp_path / "out")) == 2


# A run without judged turns

@pytest.mark.slow
def test_an_iteration_without_judged_turns_is_reported_once(start, tmp_path, capsys):
    """Dense labels need wins or revisits; one turn of a weak model gives neither."""
    flags = ["--judge-labels", "dense", "--max-turns", 1]
    assert train(tmp_path, *start_from(start), *flags) == 0
    error = capsys.readouterr().err
    assert error.count("no turn was judged") == 1
    assert "--judge-labels dense labels 0 good" in error and "a larger --context, or --no-gcd" in error
    assert [row["judge/turns"] for row in rows(tmp_path)] == [0, 0]


def test_why_none_counts_the_labels_of_each_class():
    places = [(0, 0, "bad"), (0, 1, "bad"), (1, 0, "bad")]
    assert judge.choose(places, "dense", 4, 0) == []
    assert judge.why_none(places, "dense") == (
        "GCD: no turn was judged: of the turns with room for a question in --context, --judge-labels dense "
        "labels 0 good and 3 bad, and both are needed; try another kind, a larger --context, or --no-gcd")


def test_each_kind_of_warning_is_printed_once(capsys):
    run = SimpleNamespace(warned=set())
    for kind, message in (("a", "first"), ("a", "second"), ("b", "third")):
        session.Run.warn_once(run, kind, message)
    assert capsys.readouterr().err == "first\nthird\n"


def test_the_task_after_the_last_is_none():
    environment = SimpleNamespace(splits=("dev",), split_tasks=lambda name: [Task("x", "dev", "look", None)])
    with pytest.raises(ValueError, match="dev has tasks 0 to 0"):
        agent.task_named(environment, "dev/1")
