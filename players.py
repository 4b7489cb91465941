"""Players that an evaluation measures: a model of this process, one behind a server, and scripts.

Each has `chat` and `play`, which plays EpisodeSpecs and reports every episode as it ends. Scripts are the
environment's expert, a random player, and one that always gives the first admissible command. Left out: which
games are played, and what is counted (evaluation.py).
"""

import math
import random
import re
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager

import rollout
from envs import EpisodeLost, Reply
from infra.endpoint import FAILURES_IN_A_ROW, LIMITED, STOPPED, Failure
from lm.chat import ACTION_START, COMMAND, Chat
from lm.engine import Response, Sampling, Slots
from rollout import Conversation

SCRIPTS = ("expert", "random", "first")
ANSWER_S = 300.0          # for a server's complete answer; models that reason take minutes
POLL_S = 0.2              # between two looks at whether the run was asked to stop
EMPTY = "(no answer)"     # for an empty answer in later prompts: servers refuse a message without text
THOUGHT = re.compile(r"(?s)\A.*?</think>|<think>.*")         # the first, or one that did not end
ACTION = re.compile(ACTION_START + COMMAND)


class ModelPlayer:
    """A model of this process, sampled as in training."""

    def __init__(self, model, chat, config):
        self.model, self.chat, self.config = model, chat, config
        self.slots = None                     # kept from one split and temperature to the next, as in a run

    def play(self, specs, games, temperature, max_turns, on_end, should_stop):
        """Play every spec once; see rollout.play. on_end(episode, prompt tokens, response tokens)."""
        def ended(episode):
            on_end(episode, sum(len(turn.prompt_ids) for turn in episode.turns),
                   sum(len(turn.response_ids) for turn in episode.turns))

        config, sampling = self.config, Sampling(temperature, self.config.max_response_tokens)
        self.slots = self.slots or Slots(self.model, len(games), config.context, self.chat.stop_ids, sampling)
        rollout.play(self.model, self.chat, games, specs, sampling, max_turns, config.context, config.history,
                     config.on_truncation, ended, should_stop, config.admissible_only, slots=self.slots)


class MessageChat(Chat):
    """A chat whose items are messages in place of token ids, because the template is the server's.

    A conversation is a list of messages {"role", "content"}, and a response is a list of one. The thought
    before a command may be missing, since servers may cut it off, but there must be exactly one command.
    """

    def __init__(self, style, show_admissible=True, environment=None):
        self.style, self.small, self.bare, self.tools = style, False, style == "plain", []
        self.stop_ids, self.end_ids = (), []                      # a message is complete
        self.show_admissible = show_admissible and not self.bare
        self.set_formats(environment)

    def message(self, content, first=False):
        """A user message, as a list of one."""
        return [{"role": "user", "content": content}]

    def closed(self, ids):
        """A response as later prompts hold it."""
        return [message if message["content"].strip() else message | {"content": EMPTY} for message in ids]

    def decode(self, ids):
        """Text of a response, or of any messages."""
        return "".join(message["content"] for message in ids)

    def parse(self, text):
        """(command, None) of a response's text; (None, None) if malformed: without a command, or with two."""
        answer = THOUGHT.sub("", text, count=1)
        if self.own_parse:
            return self.parse_own(text if self.style == "think" else answer.lstrip())
        if self.style == "plain" and "<think>" in answer:
            return None, None
        commands = [answer] if self.style == "plain" else ACTION.findall(answer)
        command = commands[0].strip() if len(commands) == 1 else ""
        return command or None, None


class TextPlayer:
    """A player that answers texts, some conversations at a time. Base of ServerPlayer and ScriptPlayer.

    ready(temperature) is a block in which it plays. begin(conversation) asks for its next response;
    finished() returns (conversation, Response) pairs, or a Failure in place of the Response, and waits for
    one of those in `waiting` if there is none.
    """

    history = 0

    def play(self, specs, games, temperature, max_turns, on_end, should_stop):
        """Play every spec once, one in each game at a time. Games are called in this thread only.

        on_end(episode, prompt tokens, response tokens): called as each one ends; tokens are None if unknown.
        An episode that got no answer is not reported, since nothing is known of it.
        """
        if self.is_dead():
            return
        specs = iter(specs)
        with self.ready(temperature):
            pending = [Conversation(spec, game, self.chat, self.history) for game, spec in zip(games, specs)]
            while (pending or self.waiting) and not should_stop:
                conversations, pending, free = pending, [], []
                for conversation in conversations:
                    try:
                        over = conversation.receive(max_turns, math.inf)
                    except EpisodeLost as loss:
                        pending.append(rollout.restarted(conversation, loss))
                        continue
                    if over:
                        on_end(conversation.episode, *self.tokens(conversation))
                        free.append(conversation)
                    else:
                        self.begin(conversation)
                for conversation, response in self.finished():
                    if isinstance(response, Failure) and self.is_refusal(conversation, response):
                        episode = conversation.episode
                        episode.overflowed, episode.lost = True, response.reason
                        episode.fail("context full")
                        on_end(episode, *self.tokens(conversation))
                    if isinstance(response, Failure):
                        free.append(conversation)
                    else:
                        conversation.submit(response, "invalid")
                        pending.append(conversation)
                if not self.is_dead():
                    pending += [Conversation(spec, ended.source, self.chat, self.history)
                                for ended, spec in zip(free, specs)]

    def tokens(self, conversation):
        """(prompt tokens, response tokens) of a conversation so far; (None, None) if unknown."""
        return None, None

    def is_refusal(self, conversation, failure):
        """Whether a failure is an answer to this conversation: that it is too long, for instance."""
        return False

    def is_dead(self):
        """Whether there is no point in beginning further episodes."""
        return False


class ServerPlayer(TextPlayer):
    """A model on an OpenAI-compatible server; see infra.endpoint.Endpoint for retries, redirects and keys.

    A request whose failure may pass is retried, then its episode is left out; after FAILURES_IN_A_ROW of
    these, or at the limit of requests, no further episode begins. A request that is refused for good although
    the server accepted an earlier one of the same episode has become too long for it, or fails its
    moderation: the episode ends there, not won, as one that overflows its context, and `lost` has the
    server's reason.
    """

    def __init__(self, endpoint, chat, history):
        self.endpoint, self.chat, self.history = endpoint, chat, history
        self.failures_in_a_row, self.reason, self.counts = 0, "", Counter()

    @contextmanager
    def ready(self, temperature):
        """A block with the pool of requests, see Endpoint.pool."""
        self.endpoint.temperature, self.waiting, self.used = temperature, {}, {}
        with self.endpoint.pool("player") as self.pool:
            yield

    def begin(self, conversation):
        """Send the conversation, as soon as one of `concurrency` requests is free."""
        if not conversation.episode.turns:                     # what a lost try used is not the episode's
            self.used.pop(conversation.spec.index, None)
        messages = self.endpoint.messages(conversation.prompt)
        self.waiting[self.pool.submit(self.endpoint.answer, messages, self.endpoint.retries)] = conversation

    def finished(self):
        """The answers that have come, after POLL_S seconds maybe none. ValueError: a wrong key or model."""
        done, _ = wait(self.waiting, POLL_S, FIRST_COMPLETED)
        return [(conversation := self.waiting.pop(future), self.response(conversation, future.result()))
                for future in done]

    def response(self, conversation, answer):
        """The Response in an answer, whose tokens are added to the episode's, or its Failure."""
        if isinstance(answer, Failure):
            if answer is not STOPPED and not self.is_refusal(conversation, answer):
                self.reason = answer.reason
                self.failures_in_a_row += FAILURES_IN_A_ROW if answer is LIMITED else 1
            if self.is_dead():
                self.endpoint.stop.set()                       # the others need not retry
            return answer
        if not self.is_dead():                             # else this answer was already on its way
            self.failures_in_a_row = 0
        self.used.setdefault(conversation.spec.index, []).append(answer["usage"])
        empty = not answer["answer"].strip()
        self.counts.update(answers=1, empty=empty, reasoned=empty and answer["reasoned"])
        return Response([{"role": "assistant", "content": answer["answer"]}], [], answer["cut"])

    def tokens(self, conversation):
        """Tokens as the server counted them."""
        used = self.used.pop(conversation.spec.index, [])
        counts = [[usage.get(name) for usage in used] for name in ("prompt_tokens", "completion_tokens")]
        return tuple(map(known_sum, counts))

    @property
    def warning(self):
        """What may be wrong if at least half of its answers so far had no content; else ""."""
        answers, empty, reasoned = (self.counts[name] for name in ("answers", "empty", "reasoned"))
        if not empty or 2 * empty < answers:
            return ""
        return (f"{empty} of {answers} answers had no content, {reasoned} of them reasoning alone: raise "
                "--max-response-tokens, or let the server return reasoning in the content")

    def is_refusal(self, conversation, failure):
        """Whether a request was refused for good, although one of the same episode was answered."""
        return failure.refused and bool(conversation.episode.turns)

    def is_dead(self):
        """Whether the last FAILURES_IN_A_ROW requests failed, or the limit is reached."""
        return self.failures_in_a_row >= FAILURES_IN_A_ROW


class ScriptPlayer(TextPlayer):
    """A player without a model. script: "expert", "random" or "first".

    expert: the environment's, which follows the play and knows what its texts have shown. random: each
    admissible command is as likely as any other. first: the first of them, in the game's order. ValueError if
    the environment has no such expert, or lists templates of commands instead of commands.
    """

    def __init__(self, script, environment):
        if script == "expert" and environment.online_expert is None:
            raise ValueError("--player=expert: this environment has no online_expert, which follows a player")
        if script != "expert" and environment.templates:
            raise ValueError(f"--player={script}: this environment lists templates of commands, not commands")
        self.script, self.environment, self.experts = script, environment, {}
        self.chat = MessageChat("plain")                                 # its commands need no parse
        self.chat.noop_message = environment.noop_message

    @contextmanager
    def ready(self, temperature):
        """A block in which no expert follows an episode yet."""
        self.experts, self.waiting = {}, []
        yield

    def begin(self, conversation):
        """Choose the next command."""
        message = {"role": "assistant", "content": self.command(conversation)}
        self.waiting.append((conversation, Response([message], [], False)))

    def finished(self):
        """The chosen commands."""
        chosen, self.waiting = self.waiting, []
        return chosen

    def command(self, conversation):
        """The next command. ValueError if a command has to be chosen and the game lists none."""
        admissible, spec = conversation.reply.admissible, conversation.spec
        if self.script == "expert":
            new = rollout.OnlineExpert(self.environment, spec)
            return self.experts.setdefault(spec.index, new).command(conversation)
        if not admissible:
            raise ValueError(f"--player={self.script}: task {spec.task.id} lists no command before turn "
                             f"{len(conversation.episode.turns) + 1}")
        if self.script == "random":
            return random.Random(conversation.next_stream()).choice(admissible)
        return admissible[0]


def known_sum(numbers):
    """Their sum; None if one is None, or if there is none."""
    return sum(numbers) if numbers and None not in numbers else None


def prompt_of(chat):
    """A chat's style and its templates as text: the first user message, and a later one. A server's chat
    template is its own.
    """
    example = Reply("{observation}", ["{command}"], False, False)
    first, later = (chat.decode(chat.observe(example, first)) for first in (True, False))
    return {"style": chat.style, "admissible": chat.show_admissible, "first": first, "later": later}
