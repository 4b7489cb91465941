"""Play a game on the terminal with a model: each turn shows its next command and its judge's opinion.

    python -m report.play --model lab/results/alfworld_model --game L0/3        # a generated room: at once
    python -m report.play --model lab/results/alfworld_model --max-turns 30 --games DIR    # ALFWorld's games
    python -m report.play --model runs/main/grpo+gcd/checkpoint

An empty line takes the model's command; any other line is a command of yours, which is judged as well, before
the game has answered. The judge's AUC, as measured in training, tells how much its opinion is worth. The
model is prompted as in its training, and limited to admissible commands if it was there; other flags are
gcd.py's. Left out: taking back a command.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

import agent
import config
from envs._terminal import terminal_session
from lm.engine import Response
from models import check_vocabulary
from resume import prompting_of
from rollout import Conversation, EpisodeSpec, check_first_prompt

KEYS = "Enter: the model's command; any other line is yours; Ctrl-D ends."


def opinion(player, prompt_ids, response_ids):
    """The judge's P(good) of a response, as text; says so if there is no verdict that can be read."""
    try:
        return f"its judge: {player.probability_good(prompt_ids, response_ids):.0%} good"
    except ValueError:
        return "its judge gives no verdict on this"


def reliability(player):
    """How good the player's judge was in training, as a sentence; "" if nothing is known."""
    auc = player.judge_auc()
    against = {"oracle": "against the oracle", "labels": "against its training labels"}
    parts = [f"{auc[key]:.2f} {text}" for key, text in against.items() if key in auc]
    return f"The judge's AUC in training: {', '.join(parts)} (0.5 is chance)." if parts else ""


def play(player, task, game, commands):
    """Play a task with a line of `commands` per turn, until episode or lines end. Returns whether won."""
    settings, chat = player.config, player.chat
    spec = EpisodeSpec(task, 0, settings.seed, instruction=player.instruction_in(settings.env))
    conversation = Conversation(spec, game, chat, settings.history).start()
    check_first_prompt(task, conversation.prompt, settings.max_response_tokens, settings.context)
    print(conversation.reply.observation)
    if line := reliability(player):
        print(f"\n{line}")
    print(f"\n{KEYS}")
    max_prompt, over = settings.context - settings.max_response_tokens, False
    while not over:
        turn, prompt = len(conversation.episode.turns) + 1, conversation.prompt
        response = player.respond(conversation)
        text = chat.decode(response.ids)
        command = None if response.truncated else chat.parse(text)[0]
        move = f"(no command{', cut off' * response.truncated}) {text}" if command is None else command
        print(f"\n[{turn}] the model: {move}   ({opinion(player, prompt, response.ids)})")
        print("> ", end="", flush=True)
        if (line := next(commands, None)) is None:
            print()
            return False
        if line := line.strip():
            response = Response(chat.respond(line), [], False)
            print(f"    of yours: {opinion(player, prompt, response.ids)}")
        over = conversation.act(response, settings.max_turns, max_prompt, settings.on_truncation)
        print(conversation.reply.observation)
    episode = conversation.episode
    why = "" if episode.ended == "over" else f" ({episode.ended})"
    print("You have won." if episode.won else f"Over after {len(episode.turns)} turns, not won{why}.")
    return episode.won


def main(argv=None):
    """Play one game with a model."""
    parser = argparse.ArgumentParser("python -m report.play", allow_abbrev=False,
                                     description="Play a game with a model, on the CPU in fp32. "
                                     f"{KEYS} Other flags are gcd.py's, as far as they concern the game and "
                                     "the prompt.")
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument("--game", default="L0/0", help="SPLIT/NUMBER, or a task's id")
    with terminal_session(parser, undecodable="replace"):        # a tokenizer takes no lone surrogate
        options, flags = parser.parse_known_args(argv)
        env = config.parse_known("report.play", flags, config.Config)[0].get("env", config.Config.env)
        prompting = config.arguments(prompting_of(Path(options.model), env))
        given = config.parse(["--model", options.model, *prompting, *flags, "--dtype", "float32",
                              *config.arguments(config.PLAYS_ONLY)])
        player = agent.agent_of(given)
        check_vocabulary(given, given.model, player.state, player.chat.tokenizer)
        task = agent.task_named(given.environment, options.game)
        (game,) = given.environment.make(1)
        with closing(game):
            play(player, task, game, iter(sys.stdin))


if __name__ == "__main__":
    main()
