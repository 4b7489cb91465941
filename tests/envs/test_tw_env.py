"""Tests that AlfredTWEnv in pure Python equals alfworld's, call by call, and refuses wrong input.

    python -m pytest tests/envs/test_tw_env.py      # a minute with alfworld installed, seconds without
"""

import gzip
import json
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from test_household import GAMES, WIN, goal_of, kitchen, next_command, translator

from envs.alfred.games import load_games
from envs.alfred.tw_env import TASK_TYPES, AlfredTWEnv
from lab.bench import envs as bench

ROOT = Path(__file__).resolve().parents[2]
needs_engine = pytest.mark.skipif(not all(map(find_spec, ("alfworld", "textworld", "fast_downward"))),
                                  reason="needs the engine: pip install -r requirements-alfworld.txt")
SPLITS = {"train": "train", "eval_in_distribution": "valid_seen", "eval_out_of_distribution": "valid_unseen"}
BATCHES = [("train", 1), ("eval_in_distribution", 4), ("eval_out_of_distribution", 1)]
RECORDED = [2, 1, 5, 0, 4, 3, 2, 4, 0, 5, 3, 1, 4, 2, 5, 0, 1, 3, 5, 0]    # by textworld 1.7.0, six games
GRAMMAR = ('grammar :: """{"task": [{"rhs": "Your task is to: UNKNOWN GOAL."}]}""";\n'
           'action PutObject { template :: "move {o} to {r}"; }')


def settings(folder, limit=7, method="dqn", types=(1, 2, 3, 4, 5, 6), most=-1, **env):
    """A config like alfworld's YAML, with only the keys that the installed environment needs."""
    return {"env": {"domain_randomization": False, "goal_desc_human_anns_prob": 0.0,
                    "expert_type": "handcoded", "task_types": list(types)} | env,
            "general": {"training_method": method},
            "dataset": {"data_path": f"{folder}/train", "eval_id_data_path": f"{folder}/valid_seen",
                        "eval_ood_data_path": f"{folder}/valid_unseen", "num_train_games": most,
                        "num_eval_games": most},
            "rl": {"training": {"max_nb_steps_per_episode": limit}},
            "dagger": {"training": {"max_nb_steps_per_episode": limit}}}


def without(config, name):
    """The config without one dotted name."""
    *sections, key = name.split(".")
    inner = config
    for section in sections:
        inner = inner[section]
    del inner[key]
    return config


def write_game(folder, task_type="pick_and_place_simple", desc="put apple in fridge", pddl=None, **changes):
    """Write a trial's game.tw-pddl, without the keys that `changes` sets to None, and traj_data.json."""
    folder.mkdir(parents=True)
    domain, grammar = logic()
    game = {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", desc), "solvable": True,
            "walkthrough": None, "pddl_problem": pddl or kitchen(goal_of(task_type))} | changes
    kept = {key: value for key, value in game.items() if key == "walkthrough" or value is not None}
    (folder / "game.tw-pddl").write_text(json.dumps(kept), encoding="utf-8")
    (folder / "traj_data.json").write_text(json.dumps({"task_type": task_type}), encoding="utf-8")


def logic():
    """ALFWorld's domain and grammar or, if it is not installed, the parts of them that are read."""
    if not find_spec("alfworld"):
        return "", GRAMMAR
    data = Path(find_spec("alfworld").origin).parent / "data"
    return tuple((data / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2"))


@pytest.fixture(scope="module")
def kitchens(tmp_path_factory):
    """Three splits of six kitchens, one per task type, and games that must be skipped."""
    folder = tmp_path_factory.mktemp("kitchens")
    for split in SPLITS.values():
        for k, task_type in TASK_TYPES.items():
            write_game(folder / split / f"{task_type}-{k}" / f"trial_{k}", task_type,
                       f"do {task_type} in {split}", kitchen(goal_of(task_type), f"l{k % 6}"))
        write_game(folder / split / "pick_and_place_simple-movable_recep" / "trial_1")
        write_game(folder / split / "pick_and_place_simple-AppleSliced" / "trial_1")
        write_game(folder / split / "unsolvable" / "trial_1", solvable=False)
        write_game(folder / split / "unknown" / "trial_1", solvable=None)
        write_game(folder / split / "gone" / "trial_1")
        (folder / split / "gone" / "trial_1" / "game.tw-pddl").unlink()
    return folder


@pytest.fixture
def stock(monkeypatch, tmp_path):
    """The installed class. Its translator overwrites sys.argv, and its import needs a data folder."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr("fast_downward.pddl2sas", translator())
    monkeypatch.setenv("ALFWORLD_DATA", os.environ.get("ALFWORLD_DATA", str(tmp_path)))
    from alfworld.agents.environment import get_environment
    return get_environment("AlfredTWEnv")


def play_both(theirs, ours, resets, turns):
    """Play both with the same commands and compare every answer, types included.

    Return the values of `dones` and of "won" that occurred.
    """
    rng, seen, dones, won = random.Random(3), {"look"}, set(), set()
    for _ in range(resets):
        answer = ours.reset()
        assert difference(answer, theirs.reset()) is None
        files = answer[-1]["extra.gamefile"]
        for turn in range(turns):
            seen.update(*answer[-1]["admissible_commands"])
            commands = [WIN[turn] if "pick_and_place" in file and turn < len(WIN)
                        else next_command(admissible, seen, rng)
                        for file, admissible in zip(files, answer[-1]["admissible_commands"])]
            answer = ours.step(commands)
            assert difference(answer, theirs.step(commands)) is None, commands
            dones.update(answer[2])
            won.update(answer[3]["won"])
    return dones, won


def difference(ours, theirs):
    """The first pair of parts in which two answers differ, in value or type, or None; infos in any order."""
    assert ours[-1].keys() == theirs[-1].keys() and len(ours) == len(theirs)
    pairs = [*zip(ours[:-1], theirs[:-1]), *((ours[-1][key], theirs[-1][key]) for key in ours[-1])]
    return next((pair for pair in pairs if repr(pair[0]) != repr(pair[1])), None)


# Against the installed environment

@pytest.mark.slow
@needs_engine
@pytest.mark.filterwarnings("ignore")           # raised when its processes end
@pytest.mark.parametrize(("train_eval", "batch_size"), BATCHES)
def test_kitchens_are_played_as_the_installed_environment_plays_them(stock, kitchens, train_eval, batch_size):
    """Several epochs, with games won and games at the limit, and further commands after both."""
    config = settings(kitchens, limit=6, types=(1, 4, 6))
    theirs, ours = stock(config, train_eval), AlfredTWEnv(config, train_eval)
    assert ours.game_files == theirs.game_files and ours.num_games == theirs.num_games == 3
    theirs, ours = theirs.init_env(batch_size), ours.init_env(batch_size)
    assert play_both(theirs, ours, resets=8 // batch_size, turns=8) == ({False, True}, {False, True})
    assert theirs.seed(5) == ours.seed(5)
    theirs.skip(2), ours.skip(2)
    play_both(theirs, ours, resets=1, turns=2)
    theirs.close(), ours.close()


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize(("changes", "train_eval"), [
    ({"types": (4, 2, 9)}, "train"), ({"most": 4}, "train"), ({"most": 2}, "eval_in_distribution"),
    ({"most": 0}, "eval_out_of_distribution"), ({"method": "dagger", "domain_randomization": True},
                                                "eval_in_distribution")], ids=str)
def test_the_config_selects_the_same_games(stock, kitchens, changes, train_eval):
    config = settings(kitchens, **changes)
    assert AlfredTWEnv(config, train_eval).game_files == stock(config, train_eval).game_files


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("changes", [
    {"task_types": {1, 2}}, {"task_types": {1: "a", 99: "b"}}, {"task_types": np.array([2, 3])},
    {"types": (1.0, True, None, "2")}, {"goal_desc_human_anns_prob": float("nan")}, {"most": np.int64(2)},
    {"most": True}, {"most": -3}, {"limit": None}, {"limit": np.int64(2)}, {"limit": 1.5}, {"limit": -1}],
    ids=str)
def test_a_setting_of_another_type_has_the_same_effect(stock, kitchens, changes):
    config = settings(kitchens, **changes)
    config["dataset"]["data_path"] = kitchens / "train"
    theirs, ours = stock(config), AlfredTWEnv(config)
    assert ours.game_files == theirs.game_files and ours.game_files
    play_both(theirs.init_env(1), ours.init_env(1), resets=1, turns=3)


class Text(str):
    """A subclass of str."""


@pytest.mark.slow
@needs_engine
def test_any_text_is_answered_as_the_installed_environment_answers_it(stock, kitchens):
    texts = ["", " ", "  look ", "look\n", "lo\nok", "look\nlook", "\0look", "look\x1c", "\xa0look\u3000",
             "\ud800", "look " * 2_000_000, " " * 10**7 + "look", np.str_("look"), Text("look"), b"look",
             bytearray(b"look")]
    config = settings(kitchens, limit=len(texts), types=(1,))
    theirs, ours = stock(config).init_env(1), AlfredTWEnv(config).init_env(1)
    assert difference(ours.reset(), theirs.reset()) is None
    for text in [*texts, None, 3]:                     # the last two after the end, where they are ignored
        answer = ours.step([text])
        assert difference(answer, theirs.step([text])) is None, text[:30]
    assert answer[2] == (True,)
    for commands in (None, "look", [], ["look"] * 2, {"look": 1}, {"look"}, np.array(["look"]), iter("l")):
        with pytest.raises(AssertionError, match="Expected"):
            theirs.step(commands)
        with pytest.raises(ValueError, match="step: expected a list of 1 commands"):
            ours.step(commands)


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_step_limit_is_the_same_and_that_of_dagger_in_evaluation(stock, kitchens, limit):
    config = settings(kitchens, limit, "dagger", types=(2,))
    config["rl"]["training"]["max_nb_steps_per_episode"] = 50
    theirs, ours = (env(config, "eval_in_distribution").init_env(1) for env in (stock, AlfredTWEnv))
    assert True in play_both(theirs, ours, resets=1, turns=5)[0] or limit == 0


@pytest.mark.slow
@needs_engine
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train_eval, batch_size", [*zip(SPLITS, (1, 8, 8))])
def test_real_games_are_played_as_the_installed_one_plays_them(stock, real_games, train_eval, batch_size):
    """The first eight games of each split, in the environments' order."""
    config = settings(real_games, most=8)
    theirs, ours = stock(config, train_eval), AlfredTWEnv(config, train_eval)
    assert ours.game_files == theirs.game_files and len(ours.game_files) == 8
    theirs, ours = theirs.init_env(batch_size), ours.init_env(batch_size)
    play_both(theirs, ours, resets=8 // batch_size, turns=6)


@pytest.fixture(scope="module")
def real_games(tmp_path_factory):
    """A json_2.1.1 folder: the installed one, or a few games of ../shared written to files."""
    folder = tmp_path_factory.mktemp("real_games")
    installed = Path(os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser() / "json_2.1.1"
    if (installed / "valid_unseen").is_dir():
        return installed
    if not GAMES.exists():
        pytest.skip("needs ALFWorld's games, `python -m envs.household download`, in $ALFWORLD_DATA "
                    "(or ../shared/data/alfworld/games.jsonl.gz)")
    found = {split: [] for split in SPLITS.values()}
    with gzip.open(GAMES, "rt", encoding="utf-8") as lines:
        for game in map(json.loads, lines):
            if game["solvable"] and len(found.get(game["split"], range(8))) < 8:
                found[game["split"]].append(game)
    for game in sum(found.values(), []):
        write_game(folder / game["rel"], game["task_type"], game["task_desc"], game["pddl_problem"])
    return folder


# By hand

def test_a_won_game_repeats_its_last_answer_while_the_others_continue(kitchens):
    env = AlfredTWEnv(settings(kitchens, limit=7, types=(1,)), "train").init_env(2)
    observations, infos = env.reset()
    assert observations[0].endswith("\n\nYour task is to: do pick_and_place_simple in train.")
    assert infos["won"] == [False, False] and infos["extra.gamefile"] == [
        str(kitchens / "train/pick_and_place_simple-1/trial_1/game.tw-pddl")] * 2
    for command in WIN:
        observations, scores, dones, infos = env.step([command, "look"])
    assert infos["extra.gamefile"] == [None, None]                # like the installed one after a step
    assert (scores, dones, infos["won"]) == ((1, 0), (True, False), [True, False])
    moved = "You move the apple 1 to the fridge 1."
    assert observations[0] == moved
    for _ in range(3):
        observations, scores, dones, infos = env.step(["go to desk 1", "inventory"])
    assert observations == (moved, "You are not carrying anything.")
    assert (scores, dones, infos["won"]) == ((1, 0), (True, True), [True, False])
    env.step(["look", "go to desk 1"])
    assert env.step(("look", "go to desk 1"))[0][1] == "You are not carrying anything."      # at its limit


def test_the_order_of_games_is_numpys_shuffle_again_for_each_epoch(kitchens):
    env = AlfredTWEnv(settings(kitchens), "train")
    number = {file: k for k, file in enumerate(sorted(env.game_files))}
    env.game_files.sort()
    batch = env.init_env(4)
    played = [number[file] for _ in range(5) for file in batch.reset()[1]["extra.gamefile"]]
    assert played == RECORDED
    batch.seed(1234)
    batch.skip(3)
    assert [number[file] for file in batch.reset()[1]["extra.gamefile"]] == RECORDED[3:7]


def test_it_can_be_pickled(kitchens):
    env = AlfredTWEnv(settings(kitchens), "train")
    assert pickle.loads(pickle.dumps(env)).init_env(1).reset() == env.init_env(1).reset()


def test_human_descriptions_are_ignored_with_a_warning(kitchens):
    with pytest.warns(UserWarning, match="goal_desc_human_anns_prob is not used"):
        AlfredTWEnv(settings(kitchens, goal_desc_human_anns_prob=0.5))


@pytest.mark.parametrize("written_as", ["$ALFWORLD_DATA", "${ALFWORLD_DATA}"])
def test_alfworld_data_has_the_default_that_alfworld_gives_it(kitchens, tmp_path, monkeypatch, written_as):
    shutil.copytree(kitchens / "valid_seen", tmp_path / ".cache/alfworld/valid_seen")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    (file, *_) = AlfredTWEnv(settings(written_as), "eval_in_distribution").game_files
    assert file.startswith(str(tmp_path / ".cache/alfworld/valid_seen"))
    monkeypatch.setenv("ALFWORLD_DATA", "~/.cache/alfworld")                    # by no shell
    assert AlfredTWEnv(settings(written_as), "eval_in_distribution").game_files[0] == file
    monkeypatch.setenv("ALFWORLD_DATA", str(kitchens))
    (file, *_) = AlfredTWEnv(settings(written_as), "eval_in_distribution").game_files
    assert file.startswith(str(kitchens / "valid_seen"))


@pytest.mark.slow
def test_a_copy_of_the_folder_alone_needs_only_numpy(kitchens, tmp_path):
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    script = (f"import json, sys\nfrom envs.household import AlfredTWEnv\nconfig = {settings(kitchens)!r}\n"
              "env = AlfredTWEnv(config, train_eval='train').init_env(batch_size=2)\n"
              "print(*env.reset()[1]['won'])\n"
              "names = {name.partition('.')[0] for name, module in sys.modules.items()"
              " if 'site-packages' in (getattr(module, '__file__', None) or '')}\n"
              "print(*sorted(names - {'_distutils_hack', 'sitecustomize'}))")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, text=True, capture_output=True,
                          env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    assert done.stdout == "False False\nnumpy\n", done.stderr


# Errors

@pytest.mark.parametrize("name", [
    "env", "env.domain_randomization", "env.task_types", "general.training_method", "dataset.data_path",
    "dataset.num_train_games", "rl.training.max_nb_steps_per_episode"])
def test_a_missing_key_is_named(kitchens, name):
    with pytest.raises(ValueError, match=f"^config: {name}.* is missing$"):
        AlfredTWEnv(without(settings(kitchens), name))


@pytest.mark.parametrize(("changes", "train_eval", "message"), [
    ({"method": "dagger"}, "train", "general.training_method=dagger with .* asks for extra.expert_plan"),
    ({"method": "vision_dagger"}, "train", "general.training_method=vision_dagger: expected one of dqn, dag"),
    ({"method": []}, "train", r"general.training_method=\[\]: expected one of dqn, dagger"),
    ({"domain_randomization": True}, "train", "env.domain_randomization=True"),
    ({"domain_randomization": "False"}, "train", "env.domain_randomization='False'"),
    ({}, "dev", "train_eval=dev: expected one of train, eval_in_distribution, eval_out_of_distribution"),
    ({}, ["train"], r"train_eval=\['train'\]: expected one of train, "),
    ({}, {}, "train_eval={}: expected one of train, "),
    ({}, None, "train_eval=None: expected one of train, "),
    ({"task_types": None}, "train", "env.task_types=None: expected some of 1 to 6"),
    ({"task_types": "12"}, "train", "env.task_types='12': expected some of 1 to 6"),
    ({"task_types": 3}, "train", "env.task_types=3: expected some of 1 to 6"),
    ({"types": ([1],)}, "train", r"env.task_types=\[\[1\]\]: expected some of 1 to 6"),
    ({"task_types": np.array([[1, 2]])}, "train", "env.task_types=array.*: expected some of 1 to 6"),
    ({"goal_desc_human_anns_prob": None}, "train", "env.goal_desc_human_anns_prob=None: expected a number"),
    ({"goal_desc_human_anns_prob": "0"}, "train", "env.goal_desc_human_anns_prob='0': expected a number"),
    ({"goal_desc_human_anns_prob": [0]}, "train", r"goal_desc_human_anns_prob=\[0\]: expected a number"),
    ({"types": ()}, "train", r"env.task_types=\[\]: expected some of 1 to 6"),
    ({"types": (7,)}, "train", r"env.task_types=\[7\]: expected some of 1 to 6"),
    ({"limit": "50"}, "train", "rl.training.max_nb_steps_per_episode='50': expected a number"),
    ({"limit": []}, "train", r"rl.training.max_nb_steps_per_episode=\[\]: expected a number"),
    ({"most": None}, "train", "dataset.num_train_games=None: expected an integer"),
    ({"most": 1.5}, "eval_in_distribution", "dataset.num_eval_games=1.5: expected an integer")], ids=str)
def test_an_invalid_setting_is_named(kitchens, changes, train_eval, message):
    with pytest.raises(ValueError, match=message) as caught:
        AlfredTWEnv(settings(kitchens, **changes), train_eval)
    assert "\n" not in str(caught.value)


def test_the_error_for_a_folder_without_games_names_it_and_the_download(tmp_path):
    for folder in (tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match=f"config: dataset.data_path={folder}/train: no solvable games"
                                             ".*alfworld-download, or python -m envs.household download,"):
            AlfredTWEnv(settings(folder))
    write_game(tmp_path / "train/pick_heat/trial", "pick_heat_then_place_in_recep")
    with pytest.raises(ValueError, match=r"no solvable games of the task types \[1\]"):
        AlfredTWEnv(settings(tmp_path, types=(1,)))


@pytest.mark.parametrize(("changes", "message"), [
    ({"grammar": GRAMMAR.replace("move {o} to", "put {o} in/on")},
     "before alfworld 0.4; python -m envs.household download gets"),
    ({"grammar": 3}, "no text under the key grammar")])
def test_a_game_with_other_command_templates_is_refused_with_its_path(tmp_path, changes, message):
    write_game(tmp_path / "train/pick/trial", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        AlfredTWEnv(settings(tmp_path))
    assert str(tmp_path / "train/pick/trial/game.tw-pddl") in str(caught.value)


def test_files_with_invalid_json_are_refused_with_their_path(tmp_path):
    write_game(tmp_path / "train/pick/trial")
    for name in ("game.tw-pddl", "traj_data.json"):
        path = tmp_path / "train/pick/trial" / name
        path.write_text("{", encoding="utf-8")
        with pytest.raises(ValueError, match=f"{path}: bad JSON"):
            AlfredTWEnv(settings(tmp_path))


def test_invalid_calls_are_refused(kitchens):
    env = AlfredTWEnv(settings(kitchens))
    for size in (0, -1, "4", None, 1.5, [1]):
        with pytest.raises(ValueError, match=re.escape(f"batch_size={size!r}: expected 1 or more")):
            env.init_env(size)
    batch = env.init_env(2)
    with pytest.raises(ValueError, match="call reset first"):
        batch.step(["look", "look"])
    batch.reset()
    for commands in (["look"], "look", None, ["look"] * 3):
        with pytest.raises(ValueError, match="expected a list of 2 commands"):
            batch.step(commands)
    batch.close()
    with pytest.raises(ValueError, match="call reset first"):
        batch.step(["look", "look"])
    assert batch.reset()


@pytest.mark.parametrize("wrong", [None, 3, 1.5, True, ["look"], ("look",), {}, np.array("look"), object()],
                         ids=lambda wrong: type(wrong).__name__)
def test_a_refused_step_changes_nothing(kitchens, wrong):
    """At each place of the batch, among games that could move; to the last turn of the limit."""
    def play(env, disturb):
        answers = [env.reset()]
        for turn in range(7):
            commands = [WIN[turn] if turn < len(WIN) else "look", "inventory", "look"]
            if disturb:
                i = turn % 3 if turn < len(WIN) else 1 + turn % 2                # the first is won by then
                message = re.escape(f"step: commands[{i}]={wrong!r:.60}: expected text")
                with pytest.raises(ValueError, match=f"^{message}$"):
                    env.step([*commands[:i], wrong, *commands[i + 1:]])
            answers.append(env.step(commands))
        return answers

    env = AlfredTWEnv(settings(kitchens, limit=7, types=(1,)))
    answers = play(env.init_env(3), disturb=True)
    assert answers == play(env.init_env(3), disturb=False)
    assert answers[-1][1:3] == ((1, 0, 0), (True, True, True))


def test_a_game_that_is_over_ignores_what_is_not_text_too(kitchens):
    env = AlfredTWEnv(settings(kitchens, limit=1)).init_env(2)
    env.reset()
    answer = env.step(["look", "look"])
    assert env.step([None, 3]) == answer


def test_a_refused_seed_or_skip_keeps_the_order(kitchens):
    def order(env):
        return [env.reset()[1]["extra.gamefile"] for _ in range(8)]

    env = AlfredTWEnv(settings(kitchens))
    batch = env.init_env(1)
    for seed in (-1, 2**32, 1.5, "5", [], {}, [-1]):
        with pytest.raises(ValueError, match=re.escape(f"seed={seed!r}: expected None or an integer from 0")):
            batch.seed(seed)
    for n in (None, 1.5, "5", [1]):
        with pytest.raises(ValueError, match=re.escape(f"skip: nb_games={n!r}: expected an integer")):
            batch.skip(n)
    batch.skip(-1)
    assert order(batch) == order(env.init_env(np.int64(1)))
    assert batch.seed(np.int64(7)) == [7] and batch.seed([1, 2]) == [[1, 2]]


def test_games_in_progress_continue_after_a_reset_that_fails(tmp_path):
    for k in range(2):
        write_game(tmp_path / f"train/pick{k}/trial")
    env, same = (AlfredTWEnv(settings(tmp_path)).init_env(2) for _ in range(2))
    for batch in (env, same):
        batch.reset()
        batch.step(["go to fridge 1"] * 2)
    expected = same.step(["open fridge 1"] * 2)
    last = Path(same.reset()[1]["extra.gamefile"][-1])         # the one before it is read without an error
    last.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=str(last)):
        env.reset()
    assert env.step(["open fridge 1"] * 2) == expected


# lab/bench/envs.py

def test_the_bench_without_games_prints_one_line_that_names_the_download(capsys, monkeypatch):
    monkeypatch.setattr(bench, "PLACES", ("/nothere",))
    assert bench.main([]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    for name in ("envs.household download", "$ALFWORLD_DATA", "--games"):
        assert name in output.err
    assert bench.main(["--games", "nothere"]) == 2
    assert capsys.readouterr().err == "lab.bench.envs: nothere: no such file or folder\n"


def test_the_bench_measures_the_drop_in_if_alfworld_is_not_installed(kitchens, monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda package: None)
    line = bench.tw_env(load_games(kitchens, "train"), 2, 200, 20)
    assert line.keys() == {"batch", "turns_per_s", "start_s"} and line["turns_per_s"] > 0


@pytest.mark.slow
@needs_engine
def test_the_bench_compares_the_installed_environment_with_the_drop_in(kitchens, monkeypatch):
    for name, value in (("argv", list(sys.argv)), ("unraisablehook", sys.unraisablehook)):
        monkeypatch.setattr(sys, name, value)
    line = bench.tw_env(load_games(kitchens, "train"), 1, 200, 20)
    speeds = line["turns_per_s"], line["stock_turns_per_s"]
    assert line["ratio"] == pytest.approx(speeds[0] / speeds[1], 0.05) and line["ratio"] > 1
