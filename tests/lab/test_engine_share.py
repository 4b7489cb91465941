"""Tests of lab/bench/engine_share.py: its rollout on batches is the one of trl_grpo.py on single games.

    python -m pytest tests/lab/test_engine_share.py
"""

from argparse import Namespace

from test_trl import Script
from test_tw_env import WIN, settings, write_game

from envs.alfred.game import Game
from envs.alfred.games import load_game
from envs.alfred.tw_env import AlfredTWEnv
from lab.bench import engine_share, trl_grpo


def test_a_rollout_on_batches_is_that_of_single_games(chat, tmp_path):
    """Two tasks of two episodes: one wins, one is cut, one plays to the limit, one is malformed."""
    for trial in "ab":
        write_game(tmp_path / "train" / "pick_and_place_simple" / trial)
    environment = AlfredTWEnv(settings(tmp_path, limit=0))
    scripts = [[chat.respond(command) for command in WIN], [chat.respond("look"), chat.encode("go to")],
               [chat.respond("inventory")] * 6, [chat.respond("")] * 6]
    options = Namespace(tasks=2, group_size=2, max_turns=6)
    rollout = engine_share.Rollout(environment, chat, options)
    given = rollout(["task 0", "task 0", "task 1", "task 1"], Script(scripts))
    tasks = [load_game(file) for file in environment.init_env(2).reset()[1]["extra.gamefile"]]
    assert len({task.id for task in tasks}) == 2
    for i, script in enumerate(scripts):
        alone = trl_grpo.Episode(Game(), tasks[i // 2], chat)
        for response in script:
            alone.submit(response, 6, 10_000)
        assert alone.ended
        assert given["prompt_ids"][i] == alone.prompt_ids and given["env_mask"][i] == alone.env_mask
        assert given["completion_ids"][i] == alone.completion_ids
        assert given["won"][i] == alone.reply.won == (i == 0)
        assert given["refused_share"][i] == alone.refused / alone.turns
    assert rollout.turns == [5 + 2 + 6 + 6] and 0 < rollout.engine_s[0] < 60
