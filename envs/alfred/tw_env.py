"""ALFWorld's `AlfredTWEnv` without its engine: the same calls, the same answers, hundreds of times as fast.

    from envs.household import AlfredTWEnv      # in place of alfworld.agents.environment's
    env = AlfredTWEnv(config, train_eval="train").init_env(batch_size=8)
    observations, infos = env.reset()
    observations, scores, dones, infos = env.step([commands[0] for commands in infos["admissible_commands"]])

Config (alfworld's YAML, read), games, their order, step limit, texts, admissible commands, scores and types
are those of alfworld 0.4.2 on textworld 1.7.0. Neither is needed: the standard library and numpy are
enough, and the games, which alfworld-download puts into $ALFWORLD_DATA. Left out, and refused with the
setting's name: the expert's plans (`dagger` in training) and domain randomization. Left out besides: what it
prints, `render`, and the making of games (`collect_game_files`, `get_game_logic`, `is_solvable`).
"""

import os
import warnings
from pathlib import Path

import numpy as np

from envs.alfred.game import Game
from envs.alfred.games import entry, load_game, read_json

TASK_TYPES = {
    1: "pick_and_place_simple", 2: "look_at_obj_in_light", 3: "pick_clean_then_place_in_recep",
    4: "pick_heat_then_place_in_recep", 5: "pick_cool_then_place_in_recep", 6: "pick_two_obj_and_place"}
SETTINGS = {      # train_eval: where its games are; how many of them are played, 0 or less for all
    "train": ("dataset.data_path", "dataset.num_train_games"),
    "eval_in_distribution": ("dataset.eval_id_data_path", "dataset.num_eval_games"),
    "eval_out_of_distribution": ("dataset.eval_ood_data_path", "dataset.num_eval_games")}
LIMITS = {        # general.training_method: the step limit
    "dqn": "rl.training.max_nb_steps_per_episode", "dagger": "dagger.training.max_nb_steps_per_episode"}
SPOKEN = 'template :: "move {o} to {r}"'      # in every game's grammar since alfworld 0.4; "put" before


class AlfredTWEnv:
    """The games of one config and one value of `train_eval`; `init_env` makes a batch of them to play."""

    def __init__(self, config, train_eval="train"):
        """config: alfworld's, a dictionary of dictionaries.

        Raises ValueError for what is wrong with it: a key that is missing, a setting that this engine has
        not, a folder without games, games of an old release.
        """
        self.config, self.train_eval = config, train_eval
        step_limit(config, train_eval)
        self.game_files = find_games(config, train_eval)
        self.num_games = len(self.game_files)

    def init_env(self, batch_size):
        """The games, `batch_size` of them at a time."""
        return Batch(self.game_files, batch_size, step_limit(self.config, self.train_eval))


class Batch:
    """What `init_env` returns: games played side by side, one command for each at every step.

    A game that is won or at its step limit repeats its last answer, whatever its command, until the reset.
    """

    def __init__(self, gamefiles, batch_size, max_turns):
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: expected 1 or more")
        self.gamefiles, self.batch_size, self.max_turns = gamefiles, batch_size, max_turns
        self.games = [Game() for _ in range(batch_size)]
        self.replies = None                # the last of each game; None before the first reset
        self.seed(1234)

    def seed(self, seed=None):
        """Start the order of games anew, as RandomState(seed) shuffles it; games that are played go on."""
        random = np.random.RandomState(seed)
        files = list(self.gamefiles)
        random.shuffle(files)
        self.order = endless(files, random)
        return [seed]

    def skip(self, nb_games=1):
        """Pass over the next games of the order."""
        for _ in range(nb_games):
            next(self.order)

    def reset(self):
        """Start the next `batch_size` games of the order: (observations, infos)."""
        files = [next(self.order) for _ in range(self.batch_size)]
        self.replies = [game.reset(load_game(path)) for game, path in zip(self.games, files)]
        self.dones, self.turns = [False] * self.batch_size, 0
        return self._observations(), self._infos(files)

    def step(self, commands):
        """A command for each game: (observations, scores, dones, infos). A game that is won scores 1.

        As in ALFWorld, only a reset names the games: a step's extra.gamefile is None for each.
        """
        if self.replies is None:
            raise ValueError("step: call reset first")
        if not isinstance(commands, (list, tuple)) or len(commands) != self.batch_size:
            raise ValueError(f"step: expected a list of {self.batch_size} commands, got {repr(commands):.60}")
        self.turns += 1
        over = bool(self.max_turns) and self.turns >= self.max_turns      # a limit of 0 is none
        for i, command in enumerate(commands):
            if not self.dones[i]:
                self.replies[i] = self.games[i].step(command)
                self.dones[i] = self.replies[i].won or over
        scores = tuple(int(reply.won) for reply in self.replies)
        return self._observations(), scores, tuple(self.dones), self._infos([None] * self.batch_size)

    def close(self):
        """End the games; a reset starts new ones."""
        self.replies = None

    def _observations(self):
        return tuple(reply.observation for reply in self.replies)

    def _infos(self, files):
        return {"won": [reply.won for reply in self.replies],
                "admissible_commands": [reply.admissible for reply in self.replies],
                "extra.gamefile": files}


def endless(files, random):
    """The files in their order, then shuffled again after each time through."""
    files = list(files)
    while True:
        yield from files
        random.shuffle(files)


# The config

def setting(config, name, kind=object):
    """The value under a dotted name, "env.task_types". Raises ValueError where it is missing or no `kind`."""
    found = config
    for key in name.split("."):
        try:
            found = found[key]
        except (KeyError, TypeError) as error:
            raise ValueError(f"config: {name} is missing") from error
    if not isinstance(found, kind):
        raise ValueError(f"config: {name}={found}: expected {kind.__name__}")
    return found


def step_limit(config, train_eval):
    """Commands until a game ends; 0: no limit. Raises ValueError for a config that asks for what is left out.

    As in ALFWorld, domain randomization is a thing of training: evaluation takes no notice of it.
    """
    if train_eval not in SETTINGS:
        raise ValueError(f"train_eval={train_eval}: expected one of {', '.join(SETTINGS)}")
    training = train_eval == "train"
    if setting(config, "env.domain_randomization") and training:
        raise ValueError("config: env.domain_randomization=True: this engine has none; set it to False")
    method = setting(config, "general.training_method")
    if method not in LIMITS:
        raise ValueError(f"config: general.training_method={method}: expected one of {', '.join(LIMITS)}")
    if method == "dagger" and training:
        raise ValueError("config: general.training_method=dagger with train_eval=train asks for "
                         "extra.expert_plan, which this engine has not; set it to dqn, whose step limit is "
                         + LIMITS["dqn"])
    return setting(config, LIMITS[method], int)


def find_games(config, train_eval):
    """The paths of the games to play, in the order in which os.walk meets them, inner folders first.

    Raises ValueError where there is none and for a game of a release before 0.4, which speaks other words.
    """
    if config["env"].get("goal_desc_human_anns_prob", 0) > 0:
        warnings.warn("config: env.goal_desc_human_anns_prob is not used: games keep the text of their files")
    folder_name, most_name = SETTINGS[train_eval]
    folder, most = with_variables(setting(config, folder_name, str)), setting(config, most_name, int)
    numbers = setting(config, "env.task_types")
    types = {task_type for number, task_type in TASK_TYPES.items() if number in numbers}
    if not types:
        raise ValueError(f"config: env.task_types={numbers}: expected some of 1 to {len(TASK_TYPES)}")
    files = [os.path.join(trial, "game.tw-pddl") for trial, _, beside in os.walk(folder, topdown=False)
             if "traj_data.json" in beside and is_played(trial, types)]
    if not files:
        raise ValueError(f"config: {folder_name}={folder}: no solvable games of the task types {numbers}; "
                         "alfworld-download puts games into $ALFWORLD_DATA")
    return files[:most] if most > 0 else files


def is_played(trial, types):
    """Whether a trial's folder has a game to play: of a wanted type, solvable, nothing movable or sliced.

    As in ALFWorld, the last two words are looked for in the whole path.
    """
    path = Path(trial, "game.tw-pddl")
    if "movable" in trial or "Sliced" in trial:
        return False
    beside = path.with_name("traj_data.json")
    if entry(read_json(beside), "task_type", beside) not in types or not path.exists():
        return False
    game = read_json(path)
    if game.get("solvable") and SPOKEN not in entry(game, "grammar", path):
        raise ValueError(f"{path}: of a release before alfworld 0.4; alfworld-download gets today's games")
    return bool(game.get("solvable"))


def with_variables(path):
    """A path with its environment variables filled in; $ALFWORLD_DATA has alfworld's own default."""
    if "ALFWORLD_DATA" not in os.environ:
        default = os.path.expanduser("~/.cache/alfworld")
        path = path.replace("$ALFWORLD_DATA", default).replace("${ALFWORLD_DATA}", default)
    return os.path.expandvars(path)
