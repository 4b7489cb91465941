"""A game on the terminal beside a model: at each turn its next command, and what its judge makes of that.

    python -m report.play --model results/alfworld_model --game L0/3        # a generated room: at once
    python -m report.play --model results/alfworld_model --max-turns 30 --games "$ALFWORLD_DATA"/json_2.1.1
    python -m report.play --model runs/main/grpo+gcd/checkpoint

An empty line takes the model's command; any other line is a command of yours, which is judged too, before the
game has answered. Other flags are gcd.py's: give those that the model was trained with. The judge is asked
eight times, at temperature 1. Left out: taking back a command.
"""

import argparse
import sys
from contextlib import closing
from dataclasses import dataclass
from types import SimpleNamespace

import config
import judge
from envs._terminal import at_terminal
from lm import model as qwen
from lm.chat import Chat
from lm.engine import Response, Sampling, Slots, answer, generate
from rollout import Conversation, Seat
from run.parallel import stream
from run.setup import chat_of

TEMPERATURE, ASKED = 0.4, 8


@dataclass(frozen=True, slots=True)
class Player:
    """A model that plays along, under the settings that it was trained with."""

    model: qwen.Model
    chat: Chat
    settings: config.Config

    def respond(self, conversation):
        """The Response that it would give now."""
        sampling = Sampling(TEMPERATURE, self.settings.max_response_tokens)
        room = len(conversation.prompt) + sampling.max_response_tokens
        slots = Slots(self.model, 1, room, self.chat.stop_ids, sampling)
        only = [conversation.restriction()] if self.settings.admissible_only else None
        return generate(slots, [conversation.prompt], [conversation.next_stream()], restrictions=only)[0]

    def judged(self, prompt_ids, response_ids, seed):
        """What it says of a response of its own or of another, counted: "good 7, bad 1"."""
        turn = SimpleNamespace(prompt_ids=prompt_ids, response_ids=response_ids)
        streams = [stream(seed, i) for i in range(ASKED)]
        sampling = Sampling(1.0, self.settings.judge_response_tokens)
        (given,) = answer(self.model, [judge.prompt_ids(self.chat, turn)], [streams], self.chat.stop_ids,
                          sampling, ASKED)
        style = judge.wording(self.chat)
        said = [judge.parse_verdict(self.chat.decode(a.ids), style) or "unreadable" for a in given]
        words = ("good", "bad", "unreadable")
        return ", ".join(f"{word} {said.count(word)}" for word in words if word in said)


def task_named(world, name):
    """The task "SPLIT/NUMBER". ValueError where there is none."""
    split, _, number = name.rpartition("/")
    if split not in world.splits or not number.isdecimal():
        raise ValueError(f"--game={name}: expected SPLIT/NUMBER, the split one of {', '.join(world.splits)}")
    if int(number) >= len(tasks := world.split(split)):
        raise ValueError(f"--game={name}: {split} has games 0 to {len(tasks) - 1}")
    return tasks[int(number)]


def play(player, task, env, commands):
    """Play a task in an environment with a line of `commands` a turn, until it or they end; whether won."""
    settings, chat = player.settings, player.chat
    conversation = Conversation(Seat(task, 0, settings.seed), env, chat, settings.history).begin()
    print(conversation.reply.observation)
    room, over = settings.context - settings.max_response_tokens, False
    while not over:
        turn, prompt = len(conversation.episode.turns) + 1, conversation.prompt
        own = player.respond(conversation)
        text = chat.decode(own.ids)
        print(f"\n[{turn}] the model: {chat.parse(text)[0] or text}   "
              f"({player.judged(prompt, own.ids, conversation.next_stream())})\n> ", end="", flush=True)
        if (line := next(commands, None)) is None:
            print()
            return False
        if line := line.strip():
            own = Response(chat.respond(line), [], False)
            print(f"    of yours it says: {player.judged(prompt, own.ids, conversation.next_stream())}")
        over = conversation.act(own, settings.max_turns, room, settings.on_truncation)
        print(conversation.reply.observation)
    won = conversation.episode.won
    print("You have won." if won else f"Over after {len(conversation.episode.turns)} turns, not won.")
    return won


def main(argv=None):
    """Play one game beside a model."""
    parser = argparse.ArgumentParser("python -m report.play", allow_abbrev=False,
                                     description="Play a game beside a model; other flags are gcd.py's.")
    parser.add_argument("--model", required=True, help="its folder")
    parser.add_argument("--game", default="L0/0", help="SPLIT/NUMBER")
    options, flags = parser.parse_known_args(argv)
    with at_terminal(parser, undecodable="replace"):             # a tokenizer takes no lone surrogate
        settings = config.parsed(["--model", options.model, *flags, "--demonstrations", "0", "--dagger", "0"])
        if settings.judge_kind == "value":
            raise ValueError("--judge-kind=value: this judge is asked in words, a value head gives none")
        task, model = task_named(settings.world, options.game), qwen.load_pretrained(options.model)
        player = Player(model, chat_of(settings, qwen.load_tokenizer(options.model)), settings)
        (env,) = settings.world.make(1)
        with closing(env):
            play(player, task, env, iter(sys.stdin))


if __name__ == "__main__":
    main()
