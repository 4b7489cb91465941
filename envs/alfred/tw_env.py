"""ALFWorld's `AlfredTWEnv` in pure Python: same interface, same results, hundreds of times as fast.

    from envs.alfred.tw_env import AlfredTWEnv      # in place of alfworld.agents.environment's
    env = AlfredTWEnv(config, train_eval="train").init_env(batch_size=8)
    observations, infos = env.reset()
    observations, scores, dones, infos = env.step([commands[0] for commands in infos["admissible_commands"]])

Config (alfworld's YAML, as a dictionary), games and their order, step limit, texts, admissible commands,
scores and types are those of alfworld 0.4.2 on textworld 1.7.0. Neither package is needed, only numpy and the
games, which `python -m envs.household download` puts into $ALFWORLD_DATA. Left out, with an error that names
the setting: the expert's plans (`dagger` in training) and domain randomization. Also left out: printed
messages, `render`, and the creation of games (`collect_game_files`, `get_game_logic`, `is_solvable`).
"""

import os
import warnings
from numbers import Integral, Real
from pathlib import Path

import numpy as np

from .game import Game, check_commands
from .games import GOALS, PROGRAM, entry, expand_variables, load_game, read_json
from .splits import check_positive

TASK_TYPES = dict(enumerate(GOALS, 1))
SETTINGS = {      # {train_eval: (setting of the games' folder, setting of their number; 0 or less: all)}
    "train": ("dataset.data_path", "dataset.num_train_games"),
    "eval_in_distribution": ("dataset.eval_id_data_path", "dataset.num_eval_games"),
    "eval_out_of_distribution": ("dataset.eval_ood_data_path", "dataset.num_eval_games")}
LIMITS = {        # {general.training_method: setting of the step limit}
    "dqn": "rl.training.max_nb_steps_per_episode", "dagger": "dagger.training.max_nb_steps_per_episode"}
MOVE_TEMPLATE = 'template :: "move {o} to {r}"'      # in every game since alfworld 0.4; before it was "put"


class AlfredTWEnv:
    """The games of a config and a value of `train_eval`; `init_env` returns a Batch that plays them."""

    def __init__(self, config, train_eval="train"):
        """config: alfworld's, a dictionary of dictionaries.

        ValueError for a missing key, an unsupported setting, one of a wrong type, a folder without games, or
        games of a release before 0.4.
        """
        self.config, self.train_eval = config, train_eval
        step_limit(config, train_eval)
        self.game_files = find_games(config, train_eval)
        self.num_games = len(self.game_files)

    def init_env(self, batch_size):
        """A Batch that plays `batch_size` games at the same time."""
        return Batch(self.game_files, batch_size, step_limit(self.config, self.train_eval))


class Batch:
    """A batch of games: `step` takes one command for each.

    A game that is won or at the step limit ignores commands and repeats its last answer until `reset`.
    """

    def __init__(self, gamefiles, batch_size, max_turns):
        check_positive("batch_size", batch_size)
        self.gamefiles, self.batch_size, self.max_turns = gamefiles, batch_size, max_turns
        self.replies = None                # the last Reply of each game; None before the first reset
        self.seed(1234)

    def seed(self, seed=None):
        """Restart the order of games, shuffled by RandomState(seed); games in progress are not affected.

        ValueError for what is no seed; the order then stays.
        """
        try:
            random = np.random.RandomState(seed)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"seed={seed!r:.60}: expected None or an integer from 0 to 2**32 - 1") from error
        files = list(self.gamefiles)
        random.shuffle(files)
        self.order = endless_order(files, random)
        return [seed]

    def skip(self, nb_games=1):
        """Skip the next games of the order; none if `nb_games` is below 1. ValueError if it is no integer."""
        if not isinstance(nb_games, Integral):
            raise ValueError(f"skip: nb_games={nb_games!r:.60}: expected an integer")
        for _ in range(nb_games):
            next(self.order)

    def reset(self):
        """Start the next `batch_size` games of the order: (observations, infos).

        ValueError for a damaged file; the games in progress then continue.
        """
        files = [next(self.order) for _ in range(self.batch_size)]
        games = [Game() for _ in files]
        self.replies = [game.reset(load_game(path)) for game, path in zip(games, files)]
        self.games, self.dones, self.turns = games, [False] * self.batch_size, 0
        return self._observations(), self._infos(files)

    def step(self, commands):
        """Carry out one command per game: (observations, scores, dones, infos). A won game scores 1.

        As in ALFWorld, only `reset` names the games: after a step every extra.gamefile is None. ValueError,
        before any game moves, for another number of commands and for a command that is not text, except in a
        game that ignores it.
        """
        if self.replies is None:
            raise ValueError("step: call reset first")
        check_commands(commands, self.dones)
        self.turns += 1
        over = bool(self.max_turns) and self.turns >= self.max_turns      # 0, None: no limit
        for i, command in enumerate(commands):
            if not self.dones[i]:
                self.replies[i] = self.games[i].step(command)
                self.dones[i] = self.replies[i].won or over
        scores = tuple(int(reply.won) for reply in self.replies)
        return self._observations(), scores, tuple(self.dones), self._infos([None] * self.batch_size)

    def close(self):
        """End the games; `reset` starts new ones."""
        self.replies = None

    def _observations(self):
        return tuple(reply.observation for reply in self.replies)

    def _infos(self, files):
        return {"won": [reply.won for reply in self.replies],
                "admissible_commands": [reply.admissible for reply in self.replies],
                "extra.gamefile": files}


def endless_order(files, random):
    """Yield the files in their order, then repeatedly in new orders: the list is shuffled after each pass."""
    while True:
        yield from files
        random.shuffle(files)


# The config

def setting(config, name, kinds=object, expected=""):
    """The value under a dotted name, "env.task_types". ValueError if it is missing or not of these types.

    expected: the types in words.
    """
    found = config
    for key in name.split("."):
        try:
            found = found[key]
        except (LookupError, TypeError) as error:
            raise ValueError(f"config: {name} is missing") from error
    if not isinstance(found, kinds):
        raise ValueError(f"config: {name}={found!r:.60}: expected {expected}")
    return found


def step_limit(config, train_eval):
    """Maximum number of commands in a game; 0 or None: no limit. ValueError for unsupported settings.

    As in ALFWorld, domain randomization concerns training only; evaluation ignores the setting.
    """
    if not isinstance(train_eval, str) or train_eval not in SETTINGS:
        raise ValueError(f"train_eval={train_eval!s:.60}: expected one of {', '.join(SETTINGS)}")
    training = train_eval == "train"
    if (randomization := setting(config, "env.domain_randomization")) and training:
        raise ValueError(f"config: env.domain_randomization={randomization!r:.60}: not supported; "
                         "set it to False")
    method = setting(config, "general.training_method", str, f"one of {', '.join(LIMITS)}")
    if method not in LIMITS:
        raise ValueError(f"config: general.training_method={method}: expected one of {', '.join(LIMITS)}")
    if method == "dagger" and training:
        raise ValueError("config: general.training_method=dagger with train_eval=train asks for "
                         "extra.expert_plan, which is not supported; set it to dqn, whose step limit is "
                         + LIMITS["dqn"])
    return setting(config, LIMITS[method], (Real, type(None)), "a number")


def find_games(config, train_eval):
    """The paths of the games to play, in the order of os.walk, bottom up.

    ValueError if there are none, and for a game of a release before 0.4, whose commands differ.
    """
    name = "env.goal_desc_human_anns_prob"
    if "goal_desc_human_anns_prob" in config["env"] and setting(config, name, Real, "a number") > 0:
        warnings.warn("config: env.goal_desc_human_anns_prob is not used: games keep the text of their files")
    folder_name, limit_name = SETTINGS[train_eval]
    folder = expand_variables(os.fspath(setting(config, folder_name, (str, os.PathLike), "a path")))
    limit = setting(config, limit_name, Integral, "an integer")
    numbers = setting(config, "env.task_types")
    try:
        types = {TASK_TYPES[number] for number in numbers if number in TASK_TYPES}
    except TypeError:                  # not a list, or a list of lists
        types = ()
    if not types:
        raise ValueError(f"config: env.task_types={numbers!r:.60}: expected some of 1 to {len(TASK_TYPES)}")
    walk = os.walk(folder, topdown=False) if os.path.isdir(folder) else ()     # False for a NUL in it, too
    files = [os.path.join(trial, "game.tw-pddl") for trial, _, names in walk
             if "traj_data.json" in names and is_playable(trial, types)]
    if not files:
        raise ValueError(f"config: {folder_name}={folder}: no solvable games of the task types {numbers}; "
                         f"alfworld-download, or {PROGRAM} download, puts games into $ALFWORLD_DATA")
    return files[:limit] if limit > 0 else files


def is_playable(trial, types):
    """Whether a trial's folder has a solvable game of one of these types, with nothing movable or sliced.

    As in ALFWorld, "movable" and "Sliced" exclude a folder if they occur anywhere in its full path.
    """
    path = Path(trial, "game.tw-pddl")
    if "movable" in trial or "Sliced" in trial:
        return False
    labels = path.with_name("traj_data.json")
    if entry(read_json(labels), "task_type", labels) not in types or not path.exists():
        return False
    game = read_json(path)
    if game.get("solvable") and MOVE_TEMPLATE not in entry(game, "grammar", path):
        raise ValueError(f"{path}: of a release before alfworld 0.4; {PROGRAM} download gets current ones")
    return bool(game.get("solvable"))
