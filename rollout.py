"""Playing episodes: what is recorded of them, and many conversations at once in one batch.

`Turn` and `Episode` hold all facts about an episode; algorithms write advantages there, labels.py labels
and judge.py verdicts. `Conversation` is an episode in progress; `play` plays many. Left out: text to tokens
(lm/chat.py), sampling of tokens (lm/engine.py).
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import perf_counter

from envs import ONLINE_EXPERT, EpisodeLost, Task
from envs._checks import wrong_online_expert, wrong_reply
from infra.plugins import refuse, wrong_calls
from infra.progress import timed
from infra.signals import time_limit
from infra.streams import stream
from lm.engine import Response, Slots

RESTARTS = 5              # of an episode whose game was lost, at most

# What is recorded

@dataclass(slots=True)
class Turn:
    """One prompt and response, the command in it, and what was later computed for the turn."""

    observation: str              # the environment's last text before the response
    prompt_ids: list[int]
    response_ids: list[int]       # as sampled, stop token included
    logprob_old: list[float]      # nats, one per response token, at the sampling temperature; empty where the
                                  # expert gave the response
    response: str
    action: str | None            # the command parsed from the response; None: malformed
    valid: bool                   # whether the command was admissible or, if the game tells, accepted
    anchor: str                   # the last observation before it that is neither a refusal nor empty: the
                                  # state as far as the model saw it
    truncated: bool = False       # the response had no stop token within its length
    tag: str | None = None        # RLVMR's meta-reasoning tag; None: malformed, or no tags in the prompt
    reward: float = 0.0           # the environment's for this turn, added to the outcome's
    kl: list[float] | None = None                 # kl_coef * k1 per response token (--kl reward)
    advantage: float = 0.0                        # by the algorithm; in a demonstration, the turn's weight
    token_advantage: list[float] | None = None    # one per response token, if they differ
    label: str | None = None                      # "good" or "bad", for the judge (shuffled: a judged turn's
                                                  # is the coin's)
    oracle: str | None = None                     # the environment's oracle label
    verdicts: list[str | None] = field(default_factory=list)      # the model's own; None: unreadable
    judge_reward: float | None = None             # mean over the verdicts
    allowed: list = field(default_factory=list)   # per response token, the ids it was sampled from (None:
                                                  # all); empty: unrestricted

    @property
    def tokens(self):
        """Number of tokens of the conversation up to and including this turn."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(slots=True)
class Episode:
    """One task played from start to end. `print(episode)` shows its transcript."""

    task: Task
    group: int
    index: int = 0                # number among the iteration's episodes, over all ranks
    turns: list[Turn] = field(default_factory=list)
    won: bool = False
    reward: float = 0.0           # of the episode, penalties included; see rewards.write_rewards
    truncated: bool = False       # a response reached its maximum length, which failed the episode
    overflowed: bool = False      # the context had no room for the next prompt and a response: it failed
    final_observation: str = ""
    last_anchor: str = ""         # the last observation so far that is neither a refusal nor empty
    score_100: float | None = None       # the game's own score at the end, if it has one
    restarts: int = 0             # how often its engine died, and it started again
    lost: str = ""                # why, the last time; or why a server refused the next prompt
    ended: str = ""               # why it ended: the game's reason, or see Conversation.receive
    game_s: float = field(default=0.0, compare=False)            # seconds that it waited for its game

    def fail(self, ended):
        """End the episode as not won, whatever its game said before. ended: why."""
        self.won, self.ended = False, ended

    def __str__(self):
        """The transcript: observations, commands, labels, and the outcome."""
        lines = [f"task {self.task.id}", ""]
        for number, turn in enumerate(self.turns, 1):
            refused = not turn.valid and turn.action is not None
            notes = ["refused" if refused else "", f"label {turn.label}" if turn.label else "",
                     f"advantage {turn.advantage:+.2f}" if turn.advantage else ""]
            command = turn.action if turn.action is not None else f"(no command) {turn.response}"
            note = ", ".join(filter(None, notes))
            lines += [turn.observation, "", f"[{number}] > {command}" + (f"   ({note})" if note else "")]
        score = "" if self.score_100 is None else f", score {self.score_100:g} of 100"
        outcome = "won" if self.won else "not won"
        why = f" ({self.ended})" if self.ended not in ("", "won") else ""
        end = [self.final_observation, "", f"{outcome} after {len(self.turns)} turns{score}{why}"]
        return "\n".join(lines + end)


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """An episode to be played. Its stream determines every random draw, in any slot, batch or rank."""

    task: Task
    group: int
    stream: int                   # of infra.streams.stream
    index: int = 0
    instruction: str = ""         # precedes the first observation (prompt-based correction)


class Conversation:
    """An episode in progress: its game, its first message, and the token ids of each exchange.

    The prompt is the first message and the last `history` exchanges (0: all of them, so that it is
    append-only). The constructor sends a reset, `start` waits for the reply. Then, for each turn, `submit`
    and `receive`, or `act` for both: many conversations submit before one receives, so that games in other
    processes work at the same time. `start` and `receive` may raise EpisodeLost. number: index among the
    specs that are played. due: whether a reply is to be received next. in_flight: whether a game of another
    process is at work on it.
    """

    def __init__(self, spec, game, chat, history, number=0):
        self.spec, self.chat, self.history, self.stream = spec, chat, history, spec.stream
        self.number, self.started = number, False
        self.source, self.remote = game, is_remote(game)           # remote: it works in another process
        self.game = game if self.remote else LocalGame(game)
        self.episode = Episode(spec.task, spec.group, spec.index)
        self.call("reset", spec.task, 0)

    def call(self, method, *arguments):
        """Call a method of the game, whose reply, or loss, `checked_reply` receives."""
        self.lost = None
        try:
            self.game.send(method, *arguments)
        except EpisodeLost as lost:
            self.lost = lost
        self.due, self.in_flight = True, self.remote and not self.lost

    def start(self):
        """Receive the first observation and build the first prompt; returns self."""
        self.reply = self.checked_reply()
        self.head = self.prompt = list(self.chat.observe(self.reply, True, self.spec.instruction))
        self.exchanges, self.episode.score_100, self.started, self.due = [], self.reply.score_100, True, False
        self.episode.last_anchor = self.reply.observation
        return self

    @property
    def last_call(self):
        """The last call of its game, for errors: its task, and its turn or reset."""
        return f"task {self.spec.task.id}, " + (f"turn {n}" if (n := len(self.episode.turns)) else "reset")

    def checked_reply(self):
        """The game's Reply. PluginError if it is none; any other error gets a note of the task and turn."""
        last_call = self.last_call
        began, self.in_flight = perf_counter(), False
        try:
            if self.lost:
                raise self.lost
            reply = self.game.receive()
        except BaseException as error:
            error.add_note(last_call)
            raise
        finally:
            self.episode.game_s += perf_counter() - began
        refuse(wrong_reply(reply, first=not self.started), self.source, last_call)
        return reply

    def next_stream(self):
        """The random stream of the next response."""
        return stream(self.stream, len(self.episode.turns))

    def restriction(self):
        """The restriction of the next response to admissible commands. ValueError if the game lists none, or
        one that no response can give.
        """
        n = len(self.episode.turns) + 1
        if not self.reply.admissible:
            raise ValueError(f"--admissible-only: task {self.spec.task.id} lists no command before turn {n}")
        try:
            return self.chat.restriction(self.reply.admissible)
        except ValueError as error:
            if not str(error).startswith("--"):                        # a plug-in's own, of `parse`
                raise
            raise ValueError(f"{error} (task {self.spec.task.id}, before turn {n})") from None

    def act(self, response, max_turns, max_prompt, on_truncation="fail"):
        """`submit` the response and `receive` the reply; True if the episode has ended."""
        self.submit(response, on_truncation)
        return self.receive(max_turns, max_prompt)

    def submit(self, response, on_truncation="fail"):
        """Record the response as a turn and send its command, if any.

        A truncated response has no command, and ends the episode if on_truncation is "fail", not "invalid".
        """
        episode, before, self.due = self.episode, self.reply, True
        text = self.chat.decode(response.ids)
        action, tag = (None, None) if response.truncated else self.chat.parse(text)
        listed = before.admissible and not before.objects               # commands, not templates of them
        episode.turns.append(Turn(
            observation=before.observation, prompt_ids=self.prompt, response_ids=response.ids,
            logprob_old=response.logprob, response=text, action=action,
            valid=action is not None and (not listed or action in before.admissible),
            anchor=episode.last_anchor, truncated=response.truncated, tag=tag, allowed=response.allowed))
        if response.truncated and on_truncation == "fail":
            episode.truncated, episode.final_observation = True, before.observation
            episode.fail("response too long")
        elif action is not None:
            self.call("step", action)

    def receive(self, max_turns, max_prompt):
        """Receive the reply, the first of which starts the episode, and build the next prompt; True at the
        end. More than max_prompt tokens end the episode.

        episode.ended is then the game's own reason, or "won", "over" (the game's end without a reason), "turn
        limit", "context full" or "response too long".
        """
        if not self.started:
            self.start()
            return False
        episode, turn, self.due = self.episode, self.episode.turns[-1], False
        if episode.truncated:
            return True
        if turn.action is None:
            self.reply = self.reply._replace(observation=self.chat.noop_message, answers=())
        else:
            self.reply = self.checked_reply()
            turn.valid = turn.valid if self.reply.taken is None else self.reply.taken
            turn.reward = float(self.reply.reward)
        episode.won, episode.score_100 = self.reply.won, self.reply.score_100
        episode.final_observation = self.reply.observation
        informs = self.reply.observation.strip() not in ("", self.chat.noop_message.strip())
        if informs and self.reply.taken is not False:
            episode.last_anchor = self.reply.observation
        self.exchanges.append(self.chat.closed(turn.response_ids) + self.chat.observe(self.reply))
        self.prompt = list(chain(self.head, *self.exchanges[-self.history:]))      # -0 is 0: all of them
        limit = len(episode.turns) >= max_turns
        episode.overflowed = not self.reply.done and not limit and len(self.prompt) > max_prompt
        if self.reply.done:
            episode.ended = self.reply.ended or ("won" if self.reply.won else "over")
        elif limit:
            episode.ended = "turn limit"
        elif episode.overflowed:
            episode.fail("context full")
        return bool(episode.ended)


def check_first_prompt(task, prompt, max_response_tokens, context):
    """ValueError if a first prompt leaves no room for a response in the context."""
    if len(prompt) + max_response_tokens > context:
        raise ValueError(f"--context={context}: the first prompt of task {task.id} has {len(prompt)} tokens, "
                         f"and a response may need {max_response_tokens} (--context is by default at most "
                         "the positions of the model)")


def play(model, chat, games, specs, sampling, max_turns, context, history=0, on_truncation="fail",
         on_end=lambda episode: None, should_stop=False, admissible_only=False, waits=None, overrides=None,
         slots=None):
    """Play every spec once. Returns the Episodes, in the order of the specs.

    One slot (a row of the model's cache) per game. Until no episode is left,

        tick      the device samples up to engine.TICK tokens of each running response
        receive   meanwhile, games of other processes answer the commands of the tick before (`pending`)
        submit    finished responses go to their games, which owe a reply then (`due`)
        receive   games of this process answer (`outcomes`)
        follow    a reply becomes the next prompt (`ready`), or its episode has ended and the slot takes the
                  next spec; if none is left, the last live slot moves into its place
        begin     the ready prompts are prefilled

    So all slots go on tick by tick, and the slowest game of a tick is waited for. ValueError if a first
    prompt leaves no room for a response within `context` tokens.

    history, on_truncation: see `Conversation` and its `submit`. on_end(episode) is called as each one ends.
    should_stop: may turn true between ticks; `play` then returns the episodes that have ended, which the
    caller must discard. admissible_only: sample admissible commands only (`Chat.restriction`). waits: a dict
    to which the seconds spent on "environments" and "device" are added. overrides: {spec.index: function of
    its Conversation that returns a response's token ids, which replace the model's response, or None}. slots:
    Slots of this model, one per game, that keep their memory and CUDA graphs from one call to the next; None:
    new ones.
    """
    n, waits = min(len(games), len(specs)), {} if waits is None else waits
    if slots:
        slots.restart(context, sampling)
    else:
        slots = Slots(model, n, context, chat.stop_ids, sampling)
    max_prompt = context - sampling.max_response_tokens
    share = len({spec.group for spec in specs}) < len(specs)       # a group's first prompt is prefilled once
    waiting, ended, first_prompt = iter(range(n, len(specs))), {}, {}

    def receive(conversation):
        """(conversation, whether the episode has ended, or the EpisodeLost), by the game's reply."""
        started = conversation.started
        try:
            over = conversation.receive(max_turns, max_prompt)
        except EpisodeLost as loss:
            return conversation, loss
        if started:
            return conversation, over
        spec = conversation.spec
        check_first_prompt(spec.task, conversation.prompt, sampling.max_response_tokens, context)
        start = (spec.task.id, conversation.prompt)
        first = first_prompt.setdefault(spec.group, start)
        refuse("" if first == start else "another first observation than before; expected the same for the "
               "same task and seed", conversation.source, f"task {spec.task.id}, reset")
        return conversation, False

    def place(row, conversation):
        """Put a new conversation into a row, whose cached tokens are dropped; returns it."""
        conversation.row, slots.cached[row] = row, []
        live[row:row + 1] = [conversation]                   # in place of the row's old one, or appended
        return conversation

    def follow(conversation, outcome):
        """The conversation that goes on in this row; None: the row is free."""
        row = conversation.row
        if isinstance(outcome, EpisodeLost):
            return place(row, restarted(conversation, outcome))
        if outcome:
            ended[conversation.number] = conversation.episode
            on_end(conversation.episode)
            if (new := next(waiting, None)) is not None:
                return place(row, Conversation(specs[new], conversation.source, chat, history, new))
            live[row], live[-1].row = live[-1], row
            live.pop()
            slots.move(len(live), row)
            return None
        if overrides and (ids := overrides[conversation.spec.index](conversation)):
            conversation.submit(Response(ids, [], False))
        return conversation

    live, pairs = [], enumerate(zip(specs, games))                  # live[row]: the conversation in this row
    due, pending = [place(row, Conversation(*pair, chat, history, row)) for row, pair in pairs], []
    while live and not should_stop:
        with timed(waits, "device"):
            slots.tick()                                         # the device starts to sample,
        with timed(waits, "environments"):
            # while games of other processes answer (no map: a game's StopIteration would end it)
            outcomes = [receive(conversation) for conversation in pending]
        with timed(waits, "device"):
            for row, response in slots.pop_finished():
                live[row].submit(response, on_truncation)
                due.append(live[row])
        pending, ready = [], []
        with timed(waits, "environments"):
            while (outcomes or due) and not should_stop:     # what follows a reply may call a game at once:
                                                             # a reset, an override
                pending += [conversation for conversation in due if conversation.in_flight]
                outcomes += [receive(conversation) for conversation in due if not conversation.in_flight]
                followed = [kept for pair in outcomes if (kept := follow(*pair)) is not None]
                outcomes = []
                due = [conversation for conversation in followed if conversation.due]
                ready += [conversation for conversation in followed if not conversation.due]
        with timed(waits, "device"):
            if ready:
                ready.sort(key=lambda conversation: conversation.row)
                slots.begin(
                    [conversation.row for conversation in ready],
                    [conversation.prompt for conversation in ready],
                    [conversation.next_stream() for conversation in ready], share,
                    [conversation.restriction() for conversation in ready] if admissible_only else None)
    slots.first_prompts = {}                        # no longer needed, unlike the rest of the slots' memory
    return [ended[number] for number in sorted(ended)]


def restarted(conversation, loss):
    """A lost conversation started again with other random draws, which may not kill the engine again.

    EpisodeLost if it was restarted RESTARTS times already.
    """
    spec, restarts = conversation.spec, conversation.episode.restarts + 1
    if restarts > RESTARTS:
        raise EpisodeLost(f"{conversation.last_call}: lost {restarts} times: {loss}") from loss
    new = Conversation(spec, conversation.source, conversation.chat, conversation.history,
                       conversation.number)
    new.episode.restarts, new.episode.lost = restarts, str(loss)
    new.episode.game_s = conversation.episode.game_s
    new.stream = stream(spec.stream, 1 << 40, restarts)         # no turn has the number 1 << 40
    return new


def repeated_turns(episode):
    """Number of turns whose command was given before at the same anchor; one without a command repeats none.
    """
    pairs = [(turn.anchor, turn.action) for turn in episode.turns if turn.action is not None]
    return len(pairs) - len(set(pairs))


def counts_of(episodes):
    """Counts over episodes, to be summed over ranks before `shares_of` divides them."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "episodes": len(episodes), "won": sum(e.won for e in episodes),
        "truncated": sum(e.truncated or e.overflowed or any(t.truncated for t in e.turns) for e in episodes),
        "turns": len(turns), "invalid": sum(not t.valid for t in turns),
        "repeated": sum(repeated_turns(e) for e in episodes),
        "response_tokens": sum(len(t.response_ids) for t in turns),
        "restarts": sum(e.restarts for e in episodes), "game_s": sum(e.game_s for e in episodes),
        "scored": sum(e.score_100 is not None for e in episodes),
        "score_100": sum(e.score_100 or 0.0 for e in episodes)}


def shares_of(counts, plays=1):
    """Shares of episodes or turns from `counts_of`'s counts; success with its 95 % Wilson interval.

    plays: how often each game was played. The interval counts games, episodes / plays, as plays of one game
    are not independent; the entry "n" counts episodes. A count "flawed", of turns that the game took and an
    oracle calls bad, gives "flawed_frac", a share of all turns.
    """
    n, turns = max(counts["episodes"], 1), max(counts["turns"], 1)
    low, high = wilson(counts["won"] / plays, counts["episodes"] / plays)
    score = {"score_100": counts["score_100"] / counts["scored"]} if counts["scored"] else {}
    return {"success": counts["won"] / n, "n": counts["episodes"], "low": low, "high": high,
            "turns": counts["turns"] / n, "invalid_frac": counts["invalid"] / turns,
            "repeated_frac": counts["repeated"] / turns, "truncated_frac": counts["truncated"] / n,
            "restarts": counts["restarts"]} | score | (
                {"flawed_frac": counts["flawed"] / turns} if "flawed" in counts else {})


def wilson(successes, n):
    """Wilson's 95 % score interval of a share, clipped to [0, 1]: (low, high); (0, 1) for n = 0.

        (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)        Wilson 1927
    """
    if n == 0:
        return 0.0, 1.0
    p, z = successes / n, 1.96
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


# Adapters of games and experts

class Limited:
    """A game of this process, whose calls raise EpisodeLost if they take longer than its `time_limit_s`."""

    def __init__(self, game):
        self.game = game

    def __getattr__(self, name):
        if name == "game" or name.startswith("__"):          # of a copy that has no attributes yet
            raise AttributeError(name)
        attribute = getattr(self.game, name)
        return partial(self.within_limit, attribute) if name in ("reset", "step") else attribute

    def within_limit(self, method, *arguments, **named):
        """Call a method of the game."""
        seconds = self.game.time_limit_s
        with time_limit(seconds, EpisodeLost(f"no answer within {seconds:g} s")):
            return method(*arguments, **named)


def limited(game):
    """The game, as Limited if it has a time limit and is of this process."""
    limits = getattr(game, "time_limit_s", None) is not None and not is_remote(game)
    return Limited(game) if limits else game


def is_remote(game):
    """Whether a game works elsewhere between `send` and `receive`."""
    return hasattr(game, "send") and hasattr(game, "receive")


class LocalGame:
    """Adapter that gives a game of this process the send/receive interface; `receive` makes the call."""

    def __init__(self, game):
        self.game = limited(game)

    def send(self, method, *arguments):
        """Note the call of game.method for `receive`."""
        self.call = partial(getattr(self.game, method), *arguments)

    def receive(self):
        """Call the method."""
        return self.call()


class OnlineExpert:
    """The environment's online_expert, which follows the episode of a spec, also if it starts again."""

    def __init__(self, environment, spec):
        self.environment, self.spec = environment, spec

    def begin(self):
        """Make the expert. PluginError if it is none."""
        self.expert = self.environment.online_expert(self.spec.task, self.spec.stream)
        wrong = wrong_online_expert(self.expert) or wrong_calls(self.expert, ONLINE_EXPERT)
        refuse(wrong, self.environment, "online_expert")

    def command(self, conversation):
        """What it would do now in its episode's Conversation. PluginError unless it is text."""
        turns = conversation.episode.turns
        if not turns:
            self.begin()
        self.expert.observe(conversation.reply.observation, (turns[-1].action or "") if turns else None)
        command = self.expert.command()
        wrong = "" if isinstance(command, str) else f"command() returned {command!r:.60}; expected text"
        where = f"online_expert, task {self.spec.task.id}, turn {len(turns) + 1}"
        refuse(wrong, self.environment, where)
        return command
