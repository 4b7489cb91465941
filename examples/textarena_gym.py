"""TextArena's one-player games as Gymnasium environments.

    pip install -r requirements-textarena.txt
    PYTHONPATH=examples python gcd.py --env gymnasium:textarena_gym:TextArena/GuessTheNumber-v0 --no-gcd \
        --out runs/textarena

TextArena repeats the whole conversation in each observation; here each holds what is new. A game's reward, -1
to 1, comes with its end. Left out: games of several players, and games that need word lists from the net.
"""

import gymnasium
import textarena
from gymnasium.spaces import Text

GAMES = "GuessTheNumber-v0", "FrozenLake-v0", "TowerOfHanoi-v0"


class TextArena(gymnasium.Env):
    """One game of TextArena by its ID."""

    observation_space = action_space = Text(100_000)

    def __init__(self, game):
        self.name = game

    def reset(self, *, seed=None, options=None):
        """Start the game with this seed."""
        super().reset(seed=seed)
        self.game = textarena.make(self.name)          # a second reset of the same one keeps the old texts
        self.game.reset(num_players=1, seed=seed)
        self.seen = ""
        return self.new_text(), {}

    def step(self, action):
        """Give a move, such as "[7]" in a number game."""
        done, info = self.game.step(action)
        if not done:
            return self.new_text(), 0.0, False, False, {}
        rewards, infos = self.game.close()
        reward = float((rewards or {}).get(0, 0.0))
        return str(infos[0].get("reason", info)), reward, True, False, {"won": reward == 1.0}

    def new_text(self):
        """The part of the observation that was not there before."""
        _, text = self.game.get_observation()
        new, self.seen = text.removeprefix(self.seen), text
        return new.strip()


for name in GAMES:
    gymnasium.register(f"TextArena/{name}", entry_point=TextArena, kwargs={"game": name})
