"""Tests of the referee: scripts, a committed model, and servers on loopback that answer well, badly or never.

    python -m pytest tests/core/test_evaluation.py      # about a minute; servers need the openai package
"""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from conftest import tiny_model
from test_household import GAMES, needs_games
from tiny_runs import ENVIRONMENT, ROOT, random_qwen
from waiting import wait_for

import config
import envs.household
import evaluation
import players
from envs import Task
from envs.alfred import rooms
from envs.alfred.game import Game
from infra import files
from infra.endpoint import Endpoint
from infra.signals import Stop
from infra.streams import EVALUATION, stream
from lm.chat import ASK, RULES

COMMITTED = ROOT / "lab" / "results" / "alfworld_model"
REFEREE = ROOT / "lab" / "results" / "referee"
CELL = ROOT / "lab" / "results" / "cells" / "alfworld_hour" / "grpo+gcd" / "seed0.json"
SECRET = "sk-THISisTHEkey0123456789"
HANG_S, OWN_WAIT_S = 60, Endpoint.wait_s
# The referee in another process, on the first 12 games of each split
SHORT = """
import sys
import envs.household, evaluation
from envs.alfred import rooms
envs.household.Environment.split_tasks = lambda self, name: rooms.tasks(name)[:12]
sys.exit(evaluation.main(sys.argv[1:]))
"""


@pytest.fixture
def short(monkeypatch):
    """Splits of 12 generated rooms."""
    monkeypatch.setattr(envs.household.Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:12])


@pytest.fixture
def referee(tmp_path, capsys):
    """referee(*flags): run the command in this process with --out OUT. Returns status, file, and stderr."""
    def run(*flags, out="out"):
        capsys.readouterr()
        status = evaluation.main(["--out", str(tmp_path / out), "--evaluate", "L1", "--protocol", "sampled",
                                  *map(str, flags)])
        return status, files.read_json(tmp_path / out / "evaluation.json"), capsys.readouterr().err

    return run


def without_seconds(result):
    return {key: value for key, value in result.items() if key not in ("seconds", "commit")}


def digits(result, split="L1", mode="sampled"):
    return [entry[mode] for entry in result["outcomes"][split]]


# Scripts

@pytest.mark.slow
def test_the_expert_wins_and_every_game_has_its_outcome(short, referee, tmp_path):
    status, result, _ = referee("--player", "expert")
    tasks = rooms.tasks("L1")[:12]
    assert status == 0 and result["complete"]
    assert [(entry["game"], entry["type"]) for entry in result["outcomes"]["L1"]] == [
        (task.id, task.task_type) for task in tasks]
    rate = result["splits"]["L1"]["sampled"]
    assert digits(result).count("1") == 12 * rate["success"] >= 11
    assert (rate["games"], rate["n"], rate["plays"]) == (12, 12, 1)
    records, _ = files.read_lines(tmp_path / "out" / "episodes.jsonl")
    assert [record["won"] for record in sorted(records, key=lambda record: record["index"])] == [
        digit == "1" for digit in digits(result)]
    turns = [turn for record in records for turn in record["turns"]]
    assert rate["turns"] == len(turns) / 12
    flawed = [turn for turn in turns if turn["oracle"] == "bad" and turn["valid"]]
    assert rate["flawed_frac"] == len(flawed) / len(turns)
    assert sum(part["games"] for part in result["by_type"]["L1"]["sampled"].values()) == 12
    assert result["player"] == {"kind": "script", "name": "expert"} and result["prompt"] == {}


@pytest.mark.slow
def test_random_commands_are_admissible_and_drawn_evenly(short, referee, tmp_path):
    status, result, _ = referee("--player", "random", "--protocol", "eight")
    assert status == 0 and result["splits"]["L1"]["sampled"]["invalid_frac"] == 0
    assert [len(text) for text in digits(result)] == [8] * 12
    records, _ = files.read_lines(tmp_path / "out" / "episodes.jsonl")
    of_game = [record for record in records if record["task_id"] == result["outcomes"]["L1"][0]["game"]]
    assert len({tuple(turn["action"] for turn in record["turns"]) for record in of_game}) == 8
    tasks, game = rooms.tasks("L1"), envs.household.Environment().make(1)[0]
    admissible = game.reset(tasks[0]).admissible
    assert {record["turns"][0]["action"] for record in of_game} <= {*admissible}
    player = players.ScriptPlayer("random", envs.household.Environment())
    drawn = Counter(player.command(SimpleNamespace(
        reply=SimpleNamespace(admissible=admissible), episode=SimpleNamespace(turns=[]),
        spec=SimpleNamespace(index=0), next_stream=lambda seed=seed: seed)) for seed in range(2000))
    mean = 2000 / len(admissible)
    assert {*drawn} == {*admissible} and all(abs(n - mean) < 5 * mean ** 0.5 for n in drawn.values())
    assert without_seconds(result) == without_seconds(referee("--player", "random", "--protocol", "eight",
                                                              out="again")[1])


@pytest.mark.slow
def test_first_gives_the_first_admissible_command(short, referee, tmp_path, monkeypatch):
    """And no more games are made, nor rows of a model's cache, than are played."""
    made, make_games = [], evaluation.make_games
    monkeypatch.setattr(evaluation, "make_games", lambda *args: made.append(args[1]) or make_games(*args))
    referee("--player", "first", "--max-turns", 4, "--slots", 20)
    assert made == [12]
    record = files.read_lines(tmp_path / "out" / "episodes.jsonl")[0][0]
    task = next(task for task in rooms.tasks("L1") if task.id == record["task_id"])
    game = envs.household.Environment().make(1)[0]
    reply = game.reset(task)
    for turn in record["turns"]:
        assert turn["action"] == reply.admissible[0]
        reply = game.step(turn["action"])


@pytest.mark.slow
def test_without_a_given_split_all_but_dev_are_played(short, tmp_path):
    assert evaluation.main(["--player", "first", "--max-turns", "1", "--out", str(tmp_path)]) == 0
    assert files.read_json(tmp_path / "evaluation.json")["splits"].keys() == {"L0", "L1", "L2"}


def test_another_try_of_a_lost_episode_has_an_expert_of_its_own():
    player, task = players.ScriptPlayer("expert", EXPERT), rooms.task("train", 0)
    spec = SimpleNamespace(task=task, stream=0, index=0)
    start = SimpleNamespace(spec=spec, reply=Game().reset(task), episode=SimpleNamespace(turns=[]))
    player.command(start)
    first = player.experts[0].expert
    player.command(start)
    assert player.experts[0].expert is not first


# Games are the units

def test_outcomes_and_intervals_of_drawn_games():
    """Three draws of game a, one of b: 4 plays are worth 16/10 independent ones if those of a game agree."""
    ended = [evaluation.Ending("sampled", *rest) for rest in (
        (3, "a", "x", False), (0, "a", "x", True), (2, "a", "x", True), (1, "b", "y", False))]
    assert evaluation.outcomes_of(ended) == [{"game": "a", "type": "x", "sampled": "110"},
                                             {"game": "b", "type": "y", "sampled": "0"}]
    assert evaluation.design_effect([3, 1]) == 10 / 4
    assert evaluation.design_effect([8] * 140) == 8
    counts = Counter(episodes=4, won=2)
    rate = evaluation.scores(counts, 1, ended)
    assert (rate["success"], rate["games"], rate["n"]) == (0.5, 2, 4)
    half = evaluation.scores(counts, 1, [evaluation.Ending("sampled", i, str(i), "x", i < 2)
                                         for i in range(4)])
    assert rate["low"] < half["low"] < half["high"] < rate["high"]
    twice = [{"game": "a", "type": "x", "t": "10"}, {"game": "b", "type": "x", "t": "11"}]
    assert evaluation.by_type(twice, "t")["x"]["success"] == 0.75


@pytest.mark.slow
def test_a_published_protocol_draws_128_games_in_its_own_turns(referee, monkeypatch):
    monkeypatch.setattr(envs.household.Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:40])
    status, result, _ = referee("--player", "first", "--protocol", "rlvmr")
    rate = result["splits"]["L1"]["sampled"]
    assert status == 0 and rate["n"] == 128 > rate["games"] and result["max_turns"] == 30
    assert sum(map(len, digits(result))) == 128
    assert rate["turns"] == 30


# A model folder

@pytest.mark.slow
@needs_games
def test_the_committed_model_plays_as_when_it_was_evaluated(monkeypatch, referee):
    """Games of L1 that it wins in some of eight plays; sampled tokens may differ by rounding elsewhere."""
    committed = files.read_json(REFEREE / "alfworld_model.json")
    played = {i: entry["sampled"] for i, entry in enumerate(committed["outcomes"]["L1"])
              if len({*entry["sampled"]}) == 2}
    specs_of = evaluation.episode_specs
    monkeypatch.setattr(evaluation, "episode_specs", lambda *given: [
        spec for spec in specs_of(*given) if spec.group in played])           # with their places' own streams
    monkeypatch.setitem(config.PROTOCOLS, "eight", config.Protocol({"sampled": 1.0}, plays=8))
    status, result, _ = referee("--player", COMMITTED, "--games", GAMES, "--protocol", "eight",
                                "--max-turns", 30)
    assert status == 0 and result["player"]["weights"] == committed["player"]["weights"]
    ours, theirs = "".join(entry["sampled"] for entry in result["outcomes"]["L1"]), "".join(played.values())
    assert len(ours) == 160 and sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 4
    assert theirs.count("0") > 30                              # of other draws dozens would differ
    assert 0 < result["splits"]["L1"]["sampled"]["prompt_tokens"]


@pytest.mark.parametrize("player", ["out/checkpoint", "out"])
def test_the_evaluated_model_is_not_set_aside(tmp_path, referee, player, monkeypatch):
    """--out and a run's --out have the same default."""
    monkeypatch.chdir(tmp_path)
    for folder in ("out/checkpoint", player):
        shutil.copytree(COMMITTED, folder, dirs_exist_ok=True)
    files.write_text(tmp_path / "out" / "metrics.jsonl", "{}")
    status, result, error = referee("--player", player, "--overwrite")
    assert status == 1 and not result and not (tmp_path / "out.old-1").exists()
    assert f"--player={player}: lies in --out=" in error and "which --overwrite would set aside" in error


@pytest.mark.slow
def test_any_folder_that_loads_is_evaluated(short_qwen, tmp_path, referee, monkeypatch):
    monkeypatch.setattr(envs.household.Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:3])
    folder = random_qwen(tmp_path / "model", short_qwen)
    status, result, error = referee("--player", folder, "--prompt", "plain", "--max-turns", 2, "--device",
                                    "cpu", "--max-response-tokens", 8, "--context", 4000,
                                    "--evaluate-tasks", 2)
    assert status == 0, error
    assert result["prompt"]["style"] == "plain" and "Answer with exactly one" in result["prompt"]["first"]
    assert result["prompt"]["first"].startswith("<|im_start|>system")
    rate = result["splits"]["L1"]["sampled"]
    for dtype, fused in (("float32", False), ("bfloat16", True)):          # as a run's sampler is
        own, config, given = evaluation.parse(["--player", str(folder), "--prompt", "plain", "--dtype", dtype,
                                               "--device", "cpu"])
        with ExitStack() as resources:
            player, _ = evaluation.open_player(own, config, given, resources)
        assert all((block.mlp.fused is not None) == fused for block in player.model.model.layers)
    assert rate["n"] == 2 and rate["response_tokens"] <= 2 * 2 * 8 < rate["prompt_tokens"]


def test_the_games_own_score_is_printed_where_it_is_known(capsys):
    ended = [evaluation.Ending("sampled", i, f"a/{i}", "a", i == 0) for i in range(4)]
    for known in (True, False):
        counts = Counter(episodes=4, won=1, turns=8, scored=4 * known, score_100=150.0 * known)
        rate = evaluation.scores(counts, 1, ended)
        evaluation.print_result({"splits": {"L1": {"sampled": rate}}, "refusals": {"plays": 0},
                                 "by_type": {"L1": {"sampled": {}}}})
        assert (", score 37.5, 4 games" in (out := capsys.readouterr().out)) == ("score" in out) == known


def test_the_committed_models_row_is_its_cell():
    """lab/results/referee holds what the training run's own evaluation gave, number by number."""
    committed, cell = files.read_json(REFEREE / "alfworld_model.json"), files.read_json(CELL)
    for split, modes in cell["evaluation"].items():
        for mode, rate in modes.items():
            assert {key: committed["splits"][split][mode][key] for key in rate} == rate
        assert committed["games_hash"][split] == cell["games_hash"][split]


def test_a_folder_without_a_chat_template_is_refused(tmp_path, referee):
    folder = shutil.copytree(COMMITTED, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    status, result, error = referee("--player", folder)
    assert status == 1 and "no chat template" in error and str(folder) in error and result == {}


# Mistakes

@pytest.mark.parametrize("flags, expected", [
    ([], "--player: expected a model folder, a URL, or one of expert, random, first"),
    (["--player", "expert", "--evaluate", "L7"], "no split 'L7'"),
    (["--player", "expert", "--evaluate", "none"], "--evaluate=none: no split to evaluate"),
    (["--player", "first", "--env", "examples/lamps.py"], "--env=examples/lamps.py: has no split but dev"),
    (["--player", "http://a/v1", "--endpoint-model", "m", "--max-response-tokens", "99999999999"],
     "--max-response-tokens=99999999999: expected 1 to"),
    (["--player", "expert", "--prompt", "plain"], "--prompt: not read if the player is a script"),
    (["--player", "expert", "--endpoint-model", "x"], "--endpoint-model: not read if the player is a script"),
    (["--player", "http://a/v1", "--dtype", "float32"], "--dtype: not read if the player is a server"),
    (["--player", "expert", "--endpoint-extra", "{}"], "--endpoint-extra: not read if the player is a scrip"),
    (["--player", "http://a/v1", "--endpoint-extra", "[1]"], "--endpoint-extra=[1]: expected a JSON object"),
    (["--player", "http://a/v1", "--endpoint-extra", '{"temperature": 1}'],
     '--endpoint-extra={"temperature": 1}: with a temperature of its own only --protocol sampled'),
    (["--player", "expert", "--lr", "1"], "--lr: no flag of the referee"),
    (["--player", "http://a:b@c/v1"], "--player: expected a base URL"),
    (["--player", "nowhere"], "--player=nowhere: nowhere: no such folder"),
    (["--player", "expert", "--protocol", "gigpo"], "--protocol=gigpo: expected one of full"),
    (["--player", "random", "--env", "scienceworld"], "--player=random: this environment lists templates of"),
    (["--player", "first", "--env", "scienceworld"], "--player=first: this environment lists templates of c"),
    (["--player", "expert", "--env", "scienceworld"], "--player=expert: this environment has no online_expe"),
])
def test_a_wrong_flag_is_one_line_before_any_work(flags, expected, tmp_path, capsys):
    assert evaluation.main(["--out", str(tmp_path / "out"), *flags]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("player, flags", [
    (COMMITTED, ["--context", "64"]), ("http://a/v1", ["--max-response-tokens", "20000"]),
    ("first", ["--env", "lab/envs/twins.py"])])                       # whose context is 128
def test_no_flag_is_refused_for_the_sake_of_a_judge_or_of_a_context_that_is_not_read(player, flags):
    _, config, _ = evaluation.parse(["--player", str(player), *flags])
    assert not config.gcd and config.max_response_tokens < config.context


def test_a_model_of_another_environment_is_named_by_the_referees_flag(tmp_path, capsys):
    flags = ["--env", "examples/lamps.py", "--evaluate", "dev", "--out", str(tmp_path / "out")]
    assert evaluation.main(["--player", "lab/results/alfworld_model", *flags]) == 1
    assert "--player=lab/results/alfworld_model: has the vocabulary of another" in capsys.readouterr().err


def test_missing_games_and_a_missing_folder_are_one_line(tmp_path, referee):
    status, result, error = referee("--player", "expert", "--games", tmp_path / "none")
    assert status == 1 and str(tmp_path / "none") in error and result == {}
    status, _, error = referee("--player", tmp_path / "model")
    assert status != 0 and "model" in error and error.count("\n") == 1


def test_the_first_setting_of_an_environment_may_follow_its_name(referee, tmp_path):
    """--env NAME:VALUE, as in gcd.py: household's first setting is --games."""
    status, _, error = referee("--player", "first", "--env", f"household:{tmp_path / 'none'}")
    assert status == 1 and str(tmp_path / "none") in error and error.count("\n") == 1


def test_turns_that_the_protocol_tells_are_not_asked_for(referee):
    status, _, error = referee("--player", "first", "--max-turns", "9", "--protocol", "rlvmr")
    assert status == 2 and "--max-turns=9: --protocol rlvmr has 30 turns" in error


@pytest.mark.slow
def test_a_script_that_has_to_choose_needs_a_list_of_commands(tmp_path, capsys):
    flags = ["--env", str(ROOT / "examples" / "shop.py"), "--evaluate", "dev", "--protocol", "sampled"]
    for script in ("random", "first"):
        assert evaluation.main(["--player", script, "--out", str(tmp_path / script), *flags]) == 1
        error = capsys.readouterr().err
        assert f"--player={script}: task" in error and "lists no command before turn 1" in error


@pytest.mark.parametrize("ranks", ["0", "2"])
def test_the_referee_plays_in_one_process(monkeypatch, tmp_path, capsys, ranks):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert evaluation.main(["--player", "first", "--out", str(tmp_path / "out")]) == 2
    assert "without torchrun" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("style, text", [
    ("think", "<think>It is 7?</think> {'guess': 7}"), ("plain", "<think>It is 7?</think> {'guess': 7}"),
    ("plain", "{'guess': 7}"), ("tags", "<think>Hm.</think> <monitor>half of them</monitor> {'guess': 7}")])
def test_a_servers_thought_may_precede_an_environments_own_format(style, text):
    seen = []

    class Own(envs.Environment):
        def parse(self, text):
            seen.append(text.strip())
            return "guess 7"

    assert players.MessageChat(style, environment=Own()).parse(text)[0] == "guess 7"
    assert seen == ["{'guess': 7}"]


def server_player(turns=0):
    """(a ServerPlayer without a server, a conversation of so many turns)."""
    player = players.ServerPlayer(SimpleNamespace(stop=threading.Event()), players.MessageChat("plain"), 0)
    player.used, spec = {}, SimpleNamespace(index=0)
    return player, SimpleNamespace(spec=spec, episode=SimpleNamespace(turns=[None] * turns))


@pytest.mark.parametrize("turns, answer, counted", [
    (1, players.Failure("gone"), 1), (0, players.Failure("gone", refused=True), 1),
    (1, players.Failure("too long", refused=True), 0), (1, players.STOPPED, 0),
    (1, players.LIMITED, players.FAILURES_IN_A_ROW)])
def test_what_counts_as_a_failure_of_the_server(turns, answer, counted):
    """Not that a conversation became too long for it, nor that it was no longer asked."""
    player, conversation = server_player(turns)
    player.response(conversation, answer)
    assert (player.failures_in_a_row, player.reason) == (counted, answer.reason if counted else "")


def test_a_late_answer_does_not_revive_a_server_that_was_given_up():
    player, conversation = server_player()
    good = {"answer": "look", "cut": False, "usage": {}}
    for _ in range(players.FAILURES_IN_A_ROW):
        player.response(conversation, good)                        # which sets the count to 0
        player.response(conversation, players.Failure("gone"))
    assert not player.is_dead()
    for _ in range(players.FAILURES_IN_A_ROW - 1):
        player.response(conversation, players.Failure("gone"))
    assert player.is_dead() and player.endpoint.stop.is_set()
    player.response(conversation, good)
    assert player.is_dead()


@pytest.mark.slow
def test_another_player_or_protocol_does_not_continue(short, referee, tmp_path, monkeypatch):
    assert referee("--player", "first", "--max-turns", 2)[0] == 0
    status, result, error = referee("--player", "first", "--max-turns", 2)
    assert status == 1 and "holds a run; --resume continues an evaluation, --overwrite sets any" in error
    for flags, named in ((["--player", "random", "--max-turns", 2], "player was"),
                         (["--player", "first", "--max-turns", 3], "max_turns was 2, is 3"),
                         (["--player", "first", "--max-turns", 2, "--seed", 1], "seed was 0, is 1")):
        status, _, error = referee(*flags, "--resume")
        assert status == 1 and named in error
    for more in ([], ["--overwrite"]):                # which a run that can be continued does not need
        again = referee("--player", "first", "--max-turns", 2, "--resume", *more)[1]
        assert without_seconds(again) == without_seconds(result)
    status, other, error = referee("--player", "first", "--max-turns", 3, "--resume", "--overwrite")
    assert status == 0 and other["max_turns"] == 3 and "the run that" in error and "is now" in error
    monkeypatch.chdir(tmp_path / "out")
    status, kept, error = referee("--player", "first", "--max-turns", 4, "--resume", "--overwrite")
    assert status == 1 and kept == other and "is now" not in error


def test_other_versions_are_said_when_an_evaluation_goes_on(short, referee, monkeypatch):
    """They may have changed the games."""
    assert "begun with" not in referee("--player", "first", "--max-turns", 2)[2]
    monkeypatch.setattr(files, "versions_of", lambda environment: {"torch": "99"})
    assert "was begun with torch " in (error := referee("--player", "first", "--max-turns", 2, "--resume")[2])
    assert "it continues with torch 99" in error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hints", "games"])                # as household names where its games are
def test_an_environment_with_other_settings_or_another_file_does_not_continue(tmp_path, capsys, name):
    path = tmp_path / "mine.py"
    text, field = (ROOT / "examples" / "guess.py").read_text(), "        highest: int = field("
    more = f"        {name}: int = field(default=0, metadata={{'help': 'x'}})\n"
    path.write_text(text.replace(field, more + field), encoding="utf-8")
    flags = ["--player", "first", "--env", str(path), "--evaluate", "dev", "--protocol", "sampled",
             "--max-turns", "2", "--out", str(tmp_path / "out")]
    assert evaluation.main(flags) == 0
    assert evaluation.main([*flags, "--resume"]) == 0
    assert evaluation.main([*flags, f"--{name}", "1", "--resume"]) == 1
    assert f"settings was {{'{name}': 0" in capsys.readouterr().err
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n# another version\n")
    assert evaluation.main([*flags, "--resume"]) == 1
    assert "plugins was {'env': " in capsys.readouterr().err


def test_an_environments_defaults_for_training_do_not_matter_to_the_referee(tmp_path, capsys):
    text = (ROOT / "examples" / "guess.py").read_text(encoding="utf-8")
    path, defaults, field = tmp_path / "mine.py", '{"max_turns": 8}', "        highest: int = field("
    assert text.count(defaults) == text.count(field) == 1
    training = {"tasks": 2, "group_size": 2, "dagger": 9, "slots": 3, "dynamic_sampling": "refill",
                "kl": "reward", "correction": "critiques", "instructions": True}
    path.write_text(text.replace(defaults, repr(training)))
    flags = ["--env", str(path), "--evaluate", "dev", "--protocol"]
    _, settings, _ = evaluation.parse(["--player", "first", *flags, "sampled"])
    assert settings.slots == 3
    assert evaluation.main(["--player", "first", *flags, "foo", "--max-turns", "3"]) == 2
    assert "--protocol=foo: expected one of" in capsys.readouterr().err
    playing = {"protocol": "rlvmr", "evaluate": "dev", "show_admissible": False}
    path.write_text(text.replace(defaults, repr(playing)))
    with pytest.raises(ValueError, match="--max-turns=9: --protocol rlvmr has 30 turns"):
        evaluation.parse(["--player", "first", *flags[:2], "--max-turns", "9"])
    _, settings, _ = evaluation.parse(["--player", "http://localhost:1/v1", *flags[:2]])
    assert (settings.protocol, settings.evaluate, settings.show_admissible) == ("rlvmr", "dev", False)
    path.write_text(text.replace(field, f"        name: str = ''\n{field}"))
    assert evaluation.main(["--player", "first", *flags, "sampled"]) == 2
    assert "has settings that the referee has, too: name" in capsys.readouterr().err


FOLLOWER = """
class _Follower:
    def __init__(self, says):
        self.says = says

    def observe(self, observation, command=None):
        pass

    def command(self):
        return self.says


"""


@pytest.mark.parametrize("body, expected", [
    ("return None", "online_expert: it returned an expert of class NoneType, which has no method observe"),
    ("return _Follower(7)", "online_expert, task dev/1, turn 1: command() returned 7; expected text"),
    ("return _Follower(None)", "turn 1: command() returned None; expected text"),
    ("raise ValueError('--highest=9: too low')", "--highest=9: too low")])
def test_an_online_expert_that_is_none_or_says_no_text_is_one_line(tmp_path, capsys, body, expected):
    text = (ROOT / "examples" / "guess.py").read_text(encoding="utf-8")
    hook = f"    def online_expert(self, task, seed):\n        {body}\n\n    def oracle("
    path, start = tmp_path / "mine.py", "class Environment("
    path.write_text(text.replace(start, FOLLOWER + start).replace("    def oracle(", hook), encoding="utf-8")
    flags = ["--env", str(path), "--evaluate", "dev", "--protocol", "sampled", "--out", str(tmp_path / "out")]
    assert evaluation.main(["--player", "expert", *flags]) == 1
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


@pytest.mark.slow
def test_broken_records_are_played_again_and_no_split_is_played_twice(short, referee, tmp_path, monkeypatch):
    flags = ["--player", "expert", "--evaluate", "L1,L1"]
    status, result, _ = referee(*flags)
    assert status == 0 and result["splits"]["L1"]["sampled"]["n"] == 12 and result["complete"]
    episodes = tmp_path / "out" / "episodes.jsonl"
    lines = episodes.read_text().splitlines()
    foreign = [{"index": [1]}, {"seconds": None}, {"counts": 5}, {"counts": {"turns": "3"}}, {"won": "yes"},
               {"task_type": 5}]
    broken = [json.dumps(json.loads(line) | wrong) for line, wrong in zip(lines[1:], foreign)]
    strange = [json.loads(lines[-1]) | changed for changed in ({}, {"index": 99}, {"split": "L9"},
                                                                {"index": 1, "task_id": "another"})]
    episodes.write_text("\n".join(['{"mode": "sampled"}', *broken, *lines[1 + len(broken):],
                                   *map(json.dumps, strange)]) + "\n")
    status, resumed, _ = referee(*flags, "--resume")
    assert status == 0 and without_seconds(resumed) == without_seconds(result)
    episodes.write_text("\n".join(lines[:-1]) + "\n")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "play_missing", killed)
        assert referee(*flags, "--resume")[0] == 130
    stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert stored["splits"]["L1"]["sampled"]["n"] == 11 and not stored["complete"]
    (tmp_path / "out" / "evaluation.json").write_text("[]")
    status, kept, error = referee(*flags, "--resume")
    assert status == 1 and kept == [] and "holds no evaluation by the referee" in error


@pytest.mark.parametrize("name, text", [
    ("episodes.jsonl", '{"split": "L1"}\n'), ("episodes.jsonl", '{"spl'), ("metrics.jsonl", ""),
    ("stages.json.old", ""), ("checkpoint", None), ("kept", None), ("evaluation.json", "{"),
    ("evaluation.json", '{"splits": {}, "outcomes": {}}'),                    # as gcd.py's, of no player
    ("evaluation.json", '{"player": {"kind": "script"}, "splits": {}, "outcomes": {"L1": [1]}}')])
def test_a_folder_that_holds_anything_of_a_run_is_not_used_again(short, tmp_path, capsys, name, text):
    (out := tmp_path / "out").mkdir()
    files.write_json(out / "evaluation.json", {"player": {"kind": "script"}, "splits": {"L1": {}},
                                               "outcomes": {"L1": []}})
    assert evaluation.is_unplayed(out)
    if text is None:
        (out / name).mkdir()
    else:
        (out / name).write_text(text)
    before = {path: path.is_file() and path.read_bytes() for path in out.iterdir()}
    assert evaluation.main(["--player", "first", "--out", str(out)]) == 1
    assert "holds a run; --resume continues an evaluation" in capsys.readouterr().err
    (out / "lock").unlink()
    assert {path: path.is_file() and path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.slow
def test_what_was_played_before_the_disk_was_full_is_kept(short, referee, tmp_path):
    undisturbed = referee("--player", "expert", out="undisturbed")[1]
    size = (tmp_path / "undisturbed" / "episodes.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, hard))
    try:
        status, result, error = referee("--player", "expert")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert status == 1 and "episodes.jsonl" in error and error.count("\n") == 1
    assert result["complete"] is False
    kept = len(files.read_lines(tmp_path / "out" / "episodes.jsonl")[0])
    assert 3 <= kept < 12
    status, resumed, _ = referee("--player", "expert", "--resume")
    assert status == 0 and without_seconds(resumed) == without_seconds(undisturbed)


# Servers

@pytest.fixture
def serve(monkeypatch):
    """serve(reply): a test_endpoint.Server, whose key is in LARGE_KEY; waits before retries are short."""
    pytest.importorskip("openai", reason="needs the openai package: pip install -r requirements-endpoint.txt")
    from test_endpoint import Server
    monkeypatch.setenv("LARGE_KEY", SECRET)
    monkeypatch.setattr(Endpoint, "wait_s", lambda self, retry, after: 0.001)
    servers = []

    def serving(reply):
        servers.append(Server(reply))
        return servers[-1]

    yield serving
    for server in servers:
        server.close()


def flags_of(server, *flags):
    return ["--player", server.url, "--endpoint-model", "large", "--endpoint-key-variable", "LARGE_KEY",
            "--prompt", "plain", *flags]


def completion(text, finish="stop", usage=True):
    body = {"choices": [{"finish_reason": finish, "message": {"role": "assistant", "content": text}}]}
    return json.dumps(body | ({"usage": {"prompt_tokens": 7, "completion_tokens": 2}} if usage else {}))


def command_of(messages):
    """The expert's command in a conversation, from nothing but its messages."""
    head = RULES + "\n\n" + ASK["plain"].replace(", word for word from the list,", "") + "\n\n"
    texts = [message["content"] for message in messages]
    assert [text.startswith(head) for text in texts[::2]] == [True] + [False] * (len(texts) // 2)
    observations = [text.removeprefix(head) for text in texts[::2]]
    expert = EXPERT.online_expert(rooms.tasks("L1")[0], 0)
    expert.observe(observations[0])
    for command, observation in zip(texts[1::2], observations[1:], strict=True):
        expert.observe(observation, command)
    return expert.command()


EXPERT = envs.household.Environment()


def playing_expert(question, nth):
    return lambda handler: handler.send((200, completion(command_of(handler.messages))))


@pytest.mark.slow
def test_a_server_that_plays_the_expert_killed_and_resumed(serve, short, referee, tmp_path):
    """It wins what the expert wins, and the file after a kill is that of an undisturbed run."""
    pause_s = [0.0]

    def answer(question, nth):
        time.sleep(*pause_s)
        return playing_expert(question, nth)

    server, out = serve(answer), tmp_path / "killed"
    status, undisturbed, error = referee(*flags_of(server), out="undisturbed")
    assert status == 0, error
    expert = referee("--player", "expert", out="expert")[1]
    assert digits(undisturbed) == digits(expert) and digits(expert).count("1") >= 11
    rate = undisturbed["splits"]["L1"]["sampled"]
    assert rate["prompt_tokens"] == 7 * len(server.seen) and rate["response_tokens"] == 2 * len(server.seen)
    assert undisturbed["prompt"]["style"] == "plain" and "{observation}" in undisturbed["prompt"]["first"]

    pause_s[:] = [0.05]
    command = [sys.executable, "-c", SHORT, "--out", str(out), "--evaluate", "L1", "--protocol", "sampled",
               "--slots", "2", *flags_of(server)]
    environment = ENVIRONMENT | dict(os.environ)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(files.read_lines(out / "episodes.jsonl")[0]) >= 5, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept, _ = files.read_lines(out / "episodes.jsonl")
    assert 5 <= len(kept) < 12 and files.read_json(out / "evaluation.json")["complete"] is False
    assert server.most >= 2
    status, resumed, _ = referee(*flags_of(server), "--resume", out="killed")
    assert status == 0
    assert json.dumps(without_seconds(resumed)) == json.dumps(without_seconds(undisturbed))
    assert files.read_lines(out / "episodes.jsonl")[0][:len(kept)] == kept


@pytest.mark.slow
@pytest.mark.parametrize("text, finish, malformed, refused, cut", [
    ("open the pod bay doors", "stop", 0.0, 1.0, 0.0),              # wrong
    ("я иду к шкафу", "stop", 0.0, 1.0, 0.0),                       # in another language
    ("go to", "length", 1.0, 1.0, 1.0),                             # cut
    ("", "stop", 1.0, 1.0, 0.0),                                    # empty
    (None, "stop", 1.0, 1.0, 0.0),
])
def test_a_bad_answer_counts_as_what_it_is(serve, short, referee, text, finish, malformed, refused, cut):
    server = serve(lambda question, nth: (200, completion(text, finish)))
    status, result, error = referee(*flags_of(server, "--max-turns", "3"))
    assert status == 0, error
    rate = result["splits"]["L1"]["sampled"]
    assert (rate["success"], rate["malformed_frac"], rate["invalid_frac"], rate["truncated_frac"]) == (
        0.0, malformed, refused, cut)
    assert rate["turns"] == 3 and rate["n"] == 12 and rate["response_tokens"] == 2 * 36


@pytest.mark.parametrize("text, command", [
    ("<think>Where?</think><action>look</action>", "look"), ("<action> look </action>", "look"),
    ("<think>not <action>open</action></think>\n<action>look</action>", "look"), ("Action: look", None),
    ("<action>look</action> or <action>inventory</action>", None), ("<action></action>", None), ("", None),
    ("<think>a</think><action>look</action><think>b</think><action>inventory</action>", None),
    ("<think>maybe <action>look</action>", None), ("<action>click[< Prev]</action>", "click[< Prev]"),
])
def test_a_thought_may_be_missing_but_not_the_command(text, command):
    assert players.MessageChat("think").parse(text) == (command, None)


@pytest.mark.slow
def test_admissible_commands_are_shown_unless_they_are_not_to_be(serve, short, referee):
    for flag, listed in (([], True), (["--no-show-admissible"], False)):
        server = serve(lambda question, nth: (200, completion("<action>look</action>", usage=False)))
        flags = [flag for flag in flags_of(server, "--max-turns", "1") if flag != "--no-show-admissible"]
        status, result, error = referee(*flags, "--prompt", "think", *flag, out=f"listed {listed}")
        assert status == 0, error
        assert all(("Commands that are possible now:" in text) is listed for text in server.seen)
        assert result["prompt"]["admissible"] is listed
        assert result["splits"]["L1"]["sampled"]["prompt_tokens"] is None          # the server counts none


@pytest.mark.slow
def test_a_server_that_is_busy_is_asked_again_when_it_says(serve, short, referee, monkeypatch):
    monkeypatch.setattr(envs.household.Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:1])
    monkeypatch.setattr(Endpoint, "wait_s", OWN_WAIT_S)
    times = []

    def busy(question, nth):
        times.append(time.monotonic())
        return (429, "{}", {"Retry-After": "0.7"}) if len(times) == 1 else (200, completion("look"))

    status, result, error = referee(*flags_of(serve(busy), "--max-turns", "2"))
    assert status == 0, error
    assert len(times) == 3 and times[1] - times[0] >= 0.7 and result["splits"]["L1"]["sampled"]["n"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("broken", [(500, "{}"), (200, completion("look")[:40]), (200, b"\xff\xfe"),
                                    (200, "")], ids=["500", "half a line", "no text", "no body"])
def test_a_server_that_recovers_loses_no_game(serve, short, referee, broken):
    server = serve(lambda question, nth: broken if nth == 0 else (200, completion("look")))
    status, result, error = referee(*flags_of(server, "--max-turns", "1"))
    assert status == 0 and result["complete"], error
    assert result["splits"]["L1"]["sampled"]["n"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("case", ["500", "too slow", "half a line", "refused at once"])
def test_a_server_that_never_answers_leaves_games_unplayed(serve, short, referee, case, monkeypatch):
    """They count neither as lost nor as won, the run ends, and --resume plays them."""
    def dead(question, nth):
        if case == "too slow":
            server.released.wait(5)
        return {"500": (500, "{}"), "half a line": (200, completion("look")[:40]),
                "refused at once": (400, "{}")}.get(case, (200, completion("look")))

    server = serve(dead)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "ANSWER_S", 0.15 if case == "too slow" else evaluation.ANSWER_S)
        status, result, error = referee(*flags_of(server, "--max-turns", "1"))
    server.released.set()
    assert status == 1 and "12 plays without an answer" in error and "--resume continues" in error
    assert result["complete"] is False and result["splits"]["L1"] == {}
    good = serve(lambda question, nth: (200, completion("look")))
    status, result, error = referee(*flags_of(good, "--max-turns", "1"), "--resume")
    assert status == 0 and result["complete"] and len(digits(result)) == 12, error


@pytest.mark.slow
def test_ctrl_c_stops_it_and_resume_continues(serve, short, referee, tmp_path):
    def interrupting(question, nth):
        if len(server.seen) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return 200, completion("look")

    server = serve(interrupting)
    flags = [*flags_of(server), "--max-turns", "1", "--slots", "2"]
    status, result, error = referee(*flags)
    assert status == 130 and "--resume continues" in error and result["complete"] is False
    kept = len(files.read_lines(tmp_path / "out" / "episodes.jsonl")[0])
    assert 3 <= kept == len(digits(result)) < 12
    status, result, _ = referee(*flags, "--resume")
    assert status == 0 and result["complete"] and len(server.seen) <= 12 + 2


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_server_that_hangs(serve, short, referee, monkeypatch):
    """Neither does Python at its exit, which waits for the threads that wait for answers."""
    noted, note = threading.Event(), Stop.note

    def noting(self, *arguments):
        noted.set()
        note(self, *arguments)

    def interrupting(question, nth):
        if question == server.seen[0] and nth == 0:
            os.kill(os.getpid(), signal.SIGINT)
            noted.wait(HANG_S)                                     # two at the same time would be one
            os.kill(os.getpid(), signal.SIGINT)
        server.released.wait(HANG_S)
        return 200, completion("look")

    monkeypatch.setattr(Stop, "note", noting)
    server, started = serve(interrupting), time.monotonic()
    status, _, error = referee(*flags_of(server), "--max-turns", "1")
    assert status == 130 and "stopped at once" in error
    wait_for(lambda: not any(thread.name.startswith("player") for thread in threading.enumerate()))
    assert time.monotonic() - started < HANG_S


def test_the_referees_plays_share_a_cache(monkeypatch, chat):
    """Else each split and temperature would allocate it, and capture CUDA graphs, again."""
    slots = []
    monkeypatch.setattr(players.rollout, "play", lambda *_, **named: slots.append(named["slots"]))
    settings = SimpleNamespace(max_response_tokens=4, context=90, history=0, on_truncation="fail",
                               admissible_only=False)
    player = players.ModelPlayer(tiny_model(chat.tokenizer), chat, settings)
    for temperature in (1.0, 0.4):
        player.play([], ["a game"] * 3, temperature, 7, None, False)
    assert slots[0] is slots[1] and slots[0].n == 3


@pytest.mark.slow
def test_ctrl_c_during_a_game_does_not_wait_for_a_server_that_hangs(serve, short, referee, monkeypatch):
    def hang(question, nth):
        server.released.wait(HANG_S)
        return 200, completion("look")

    def interrupted(player):
        if server.seen:
            raise KeyboardInterrupt
        return finished(player)

    server, finished, started = serve(hang), players.ServerPlayer.finished, time.monotonic()
    monkeypatch.setattr(players.ServerPlayer, "finished", interrupted)
    status, _, error = referee(*flags_of(server))
    assert status == 130 and "stopped at once" in error and time.monotonic() - started < HANG_S


@pytest.mark.slow
def test_an_empty_answer_is_a_turn_also_where_empty_messages_are_refused(serve, short, referee, tmp_path):
    def strict(question, nth):
        return lambda handler: handler.send(
            (200, completion("" if len(handler.messages) < 3 else "look"))
            if all(message["content"].strip() for message in handler.messages)
            else (400, '{"error": {"message": "content must not be empty"}}'))

    status, result, error = referee(*flags_of(serve(strict), "--max-turns", "2"))
    assert status == 0, error
    records, _ = files.read_lines(tmp_path / "out" / "episodes.jsonl")
    assert {record["ended"] for record in records} == {"turn limit"}
    assert [turn["action"] for turn in records[0]["turns"]] == [None, "look"]
    assert records[0]["turns"][0]["response"] == ""


@pytest.mark.slow
def test_a_lost_try_adds_no_tokens_to_its_episode(serve, short, referee, monkeypatch):
    """As with a model of this process."""
    step, calls = Game.step, itertools.count()

    def fragile(self, command):
        if next(calls) == 1:
            raise envs.EpisodeLost("gone")
        return step(self, command)

    monkeypatch.setattr(Game, "step", fragile)
    server = serve(lambda question, nth: (200, completion("look")))
    status, result, error = referee(*flags_of(server, "--max-turns", "2"))
    assert status == 0, error
    rate = result["splits"]["L1"]["sampled"]
    assert rate["restarts"] == 1 and len(server.seen) > 24
    assert (rate["prompt_tokens"], rate["response_tokens"]) == (7 * 24, 2 * 24)


@pytest.mark.slow
def test_a_conversation_that_became_too_long_is_not_won(serve, short, referee, tmp_path, monkeypatch):
    """Not even if its game already called it won, and went on."""
    receive = players.Conversation.receive

    def won_at_once(self, *limits):
        over = receive(self, *limits)
        self.episode.won = True
        return over

    monkeypatch.setattr(players.Conversation, "receive", won_at_once)

    def short_context(question, nth):
        too_long = 400, '{"error": {"message": "at most 99 tokens"}}'
        return lambda handler: handler.send(too_long if len(handler.messages) > 3
                                            else (200, completion("look")))

    status, result, error = referee(*flags_of(serve(short_context)))
    assert status == 0, error
    rate = result["splits"]["L1"]["sampled"]
    assert (rate["n"], rate["turns"], rate["truncated_frac"], rate["success"]) == (12, 2, 1.0, 0.0)
    records, _ = files.read_lines(tmp_path / "out" / "episodes.jsonl")
    assert {record["ended"] for record in records} == {"context full"}
    assert all("at most 99 tokens" in record["lost"] for record in records)


@pytest.mark.slow
def test_a_refused_key_ends_it_and_is_written_nowhere(serve, short, referee, tmp_path):
    server = serve(lambda question, nth: (401, json.dumps(SECRET)))
    status, result, error = referee(*flags_of(SimpleNamespace(url=f"{server.url}/{SECRET}")))
    assert status == 1 and "--endpoint-key-variable=LARGE_KEY" in error and "refuses the key" in error
    assert error.count("\n") == 1 and result["complete"] is False
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").iterdir())
    assert SECRET.encode() not in written and SECRET not in error


@pytest.mark.slow
def test_a_folder_in_which_no_game_was_played_is_used_again(serve, short, referee, tmp_path):
    """The same command plays after a wrong key; nothing is set aside."""
    server = serve(lambda question, nth: (401, "{}"))
    flags = flags_of(server, "--max-turns", "1")
    assert referee(*flags)[0] == 1
    (tmp_path / "out" / "log.txt").write_text("mine")
    server.reply = lambda question, nth: (200, completion("look"))
    status, result, error = referee(*flags, "--endpoint-extra", '{"a": 1}')
    assert status == 0 and result["complete"] and result["player"]["extra"] == {"a": 1}, error
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "log.txt").read_text() == "mine"
    status, _, error = referee(*flags)
    assert status == 1 and "holds a run" in error


@pytest.mark.slow
@pytest.mark.parametrize("message, turns, expected", [
    ({"content": None, "reasoning_content": "<action>look</action>"}, 2, "12 of 24 answers had no content"),
    ({"content": " ", "reasoning": "I look"}, 1, "12 of 12 answers had no content, 12 of them"),
    ({"content": ""}, 1, "12 of 12 answers had no content, 0 of them reasoning alone: raise --max-response"),
    ({"content": None, "reasoning_content": "Hm."}, 3, ""),                # a third of the answers
    ({"content": "look", "reasoning_content": "Hm."}, 1, "")])
def test_answers_without_content_are_told_if_they_are_half(serve, short, referee, message, turns, expected):
    def reasoning(handler):
        body = json.loads(completion("look"))
        if len(handler.messages) == 1:
            body["choices"][0]["message"] = {"role": "assistant", **message}
        handler.send((200, json.dumps(body)))

    status, _, error = referee(*flags_of(serve(lambda question, nth: reasoning), "--max-turns", turns))
    assert status == 0 and expected in error and ("had no content" in error) is bool(expected)


@pytest.mark.slow
def test_games_that_the_server_ended_are_counted_in_a_printed_line(serve, short, tmp_path, capsys):
    """Those of a first call as well."""
    def some(handler):
        too_long = len(handler.messages) > 1 and len(handler.messages[0]["content"]) % 2
        handler.send((400, '{"error": {"message": "at most 99 tokens"}}') if too_long
                     else (200, completion("look")))

    server = serve(lambda question, nth: some)
    command = ["--out", str(tmp_path), "--evaluate", "L1", "--protocol", "sampled",
               *flags_of(server, "--max-turns", "2")]
    for more in ([], ["--resume"]):
        assert evaluation.main([*command, *more]) == 0
        records = files.read_lines(tmp_path / "episodes.jsonl")[0]
        ended = sum(record["ended"] == "context full" for record in records)
        line = capsys.readouterr().out.splitlines()[-1]
        assert 0 < ended < 12 and "at most 99 tokens" in line
        assert line.startswith(f"{ended} plays ended by the server's refusal, so not won, the last one beca")
    assert evaluation.main(["--out", str(tmp_path / "first"), *command[2:6], "--player", "first"]) == 0
    assert "refusal" not in capsys.readouterr().out


@pytest.mark.slow
def test_extra_keys_are_sent_printed_and_the_same_when_it_is_continued(serve, short, referee):
    """To a server that refuses max_tokens."""
    def modern(question, nth):
        body = server.requests[-1][1]
        return (400, "{}") if "max_tokens" in body else (200, completion("look"))

    server, extra = serve(modern), '{"max_tokens": null, "max_completion_tokens": 512}'
    flags = flags_of(server, "--max-turns", "1", "--slots", "1")
    assert referee(*flags)[0] == 1
    status, result, error = referee(*flags, "--endpoint-extra", extra, "--resume")     # of no game so far
    assert status == 0 and result["player"]["extra"] == json.loads(extra), error
    sent = server.requests[-1][1]
    assert (sent["max_completion_tokens"], sent["temperature"]) == (512, 1.0)          # that of the mode
    assert f"'--endpoint-extra={extra}'" in result["command"]
    status, _, error = referee(*flags, "--endpoint-extra", extra.replace("512", "9"), "--resume")
    assert status == 1 and "player was" in error
    assert referee(*flags, "--endpoint-extra", f" {extra}", "--resume")[0] == 0


@pytest.mark.slow
def test_the_limit_of_requests_ends_it(serve, short, referee):
    server = serve(lambda question, nth: (200, completion("look")))
    status, result, error = referee(*flags_of(server, "--max-turns", "1", "--endpoint-limit", "5"))
    assert status == 1 and "7 plays without an answer, the last one because of --endpoint-limit" in error
    assert len(server.seen) == 5 and len(digits(result)) == 5


def test_streams_are_named_by_split_place_and_play():
    specs = evaluation.episode_specs(SimpleNamespace(seed=4), rooms.tasks("L1")[:3], 1, 2)
    assert [spec.index for spec in specs] == [*range(6)] and [spec.group for spec in specs] == [0, 1, 2] * 2
    assert [spec.stream for spec in specs] == [stream(4, EVALUATION, 1, g, *([k] if k else []))
                                               for k in range(2) for g in range(3)]


def test_a_player_whose_name_is_too_long_for_a_file_gives_one_line(capsys):
    assert evaluation.main(["--player", "a" * 300]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evaluation.py: error: ") and error.count("\n") == 1 and "a" * 300 in error


def test_an_episode_is_played_again_at_another_temperature(tmp_path, monkeypatch):
    """Each mode has episodes of the same numbers."""
    tasks, plays = [Task(f"L0/{g}", "L0", "look", None) for g in range(3)], []
    monkeypatch.setattr(evaluation, "drawn_tasks", lambda config, split: tasks)
    for index in range(3):
        files.append(tmp_path / files.EPISODES, {"split": "L0", "mode": "sampled", "index": index})
    player = SimpleNamespace(
        play=lambda specs, games, temperature, *_: plays.append((temperature, len(specs))))
    settings = SimpleNamespace(protocol="full", splits=["L0"], seed=0)
    head = {"temperatures": {"sampled": 1.0, "greedy": 0.0}, "instruction": "", "max_turns": 3}
    assert evaluation.play_missing(settings, head, player, [], tmp_path, False) == 3
    assert plays == [(0.0, 3)]


@pytest.mark.parametrize("kind, refusals", [("model", 0), ("server", 1)])
def test_only_a_servers_full_context_is_its_refusal(tmp_path, kind, refusals):
    files.append(tmp_path / files.EPISODES,
                 {"split": "L9", "mode": "sampled", "ended": "context full", "lost": ""})
    head = {"player": {"kind": kind}, "temperatures": {"sampled": 1.0}}
    found = evaluation.result_of(SimpleNamespace(protocol="sampled", splits=[]), head, tmp_path)
    assert found["refusals"]["plays"] == refusals
