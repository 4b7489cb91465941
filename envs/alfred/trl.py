"""The household game as TRL's environment class: the model plays it by calling the tool `act`.

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from envs.alfred.trl import Household, rows
    trainer = GRPOTrainer(model, args=GRPOConfig(max_tool_calling_iterations=30),
                          train_dataset=Dataset.from_list(rows(1000)), environment_factory=Household)

TRL has an instance for each episode of a batch, and uses it again in the next: it calls `reset` with a row of
the dataset, offers the public methods to the model as tools, and calls `get_reward` at the end (TRL 1.16,
docs/source/grpo_trainer.md). Nothing of TRL is imported here. Left out: the episode as token ids, which
lab/bench/trl_grpo.py has.
"""

from .game import Game
from .splits import check_positive, find_split

PROMPT = ("You play a text game in a household. Do its task by calling the tool act, with one command at a "
          "time.\n\n")
OVER = "The game is over."


def rows(n, start=0, split="train", **settings):
    """n rows of a dataset: the split's tasks from number `start`. settings: further arguments of `reset`.

    ValueError now, not in training, for a split without games.
    """
    find_split(split, settings.get("games") or "", settings.get("types") or "part")
    return [{"prompt": [{"role": "user", "content": PROMPT}], "split": split, "index": start + i, **settings}
            for i in range(n)]


class Household:
    """One episode at a time; its reward is 1 if the game is won, else 0."""

    def __init__(self):
        self._game, self._reply = Game(), None

    def reset(self, split="train", index=0, games="", types="part", max_turns=50, show_admissible=True,
              **row):
        """Start task `index` of the split: the first observation, which TRL appends to the prompt.

        split, games, types: see splits.find_split. show_admissible: whether the admissible commands follow
        each observation. None, which datasets give to rows without a column, is the default. row: the row's
        other columns, which are not used.
        """
        split, index, games, types = split or "train", index or 0, games or "", types or "part"
        max_turns, show_admissible = 50 if max_turns is None else max_turns, show_admissible in (None, True)
        check_positive("max_turns", max_turns)
        task = find_split(split, games, types)[index]
        self._reply, self._left, self._show = self._game.reset(task), max_turns, show_admissible
        return self._text()

    # What follows is shown to the model; transformers reads the schema of the tool from "Args:"
    def act(self, command: str) -> str:
        """
        Do one command in the household and get what happens.

        Args:
            command: The command, for example "go to fridge 1" or "take apple 1 from fridge 1".

        Returns:
            What happens.
        """
        if self._reply is None:
            raise ValueError("act: call reset first")
        if self._reply.won or not self._left:
            return OVER
        self._reply = self._game.step(command)
        self._left -= 1
        return self._text()

    def get_reward(self):
        """1.0 if the game is won, else 0.0."""
        return float(self._reply is not None and self._reply.won)

    def _text(self):
        if self._reply.won or not self._left:
            return f"{self._reply.observation}\n{OVER}"
        if not self._show:
            return self._reply.observation
        return f"{self._reply.observation}\nAdmissible commands: {', '.join(self._reply.admissible)}"
