"""Episodes from a model and environments: what is recorded, how they are played, what they add up to.

Read from the top: `Turn` and `Episode`, which carry all facts of an episode to who needs them (algorithms
write advantages there); `Conversation`, an episode in progress; `play`, many at once. How text becomes tokens
is lm/chat.py's, how tokens are sampled lm/engine.py's.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from time import perf_counter

from envs import EpisodeLost, Task
from lm.engine import Response, Slots
from run.parallel import stream

# What is recorded

@dataclass(slots=True)
class Turn:
    """One prompt, the response to it, what the environment was asked to do, and what was made of that."""

    observation: str              # what the environment had said before
    prompt_ids: list[int]
    response_ids: list[int]       # as sampled, stop token included
    logprob_old: list[float]      # nats, one per response token, at the sampling temperature
    response: str
    action: str | None            # the command parsed out of the response; None = malformed
    valid: bool                   # the command was admissible
    anchor: str                   # the state as far as it was seen: the last observation with news
    truncated: bool = False       # the response had no stop token within its length
    tag: str | None = None        # RLVMR's meta-reasoning tag; None = malformed, or a prompt without tags
    kl: list[float] | None = None                 # per response token, taken off the reward (--kl reward)
    advantage: float = 0.0                        # written by the algorithm; in a demonstration, its weight
    token_advantage: list[float] | None = None    # where the tokens of the turn differ: one each
    label: str | None = None                      # good or bad, for the judge: a fact about the turn
    oracle: str | None = None                     # what the world's oracle says of it
    verdicts: list[str | None] = field(default_factory=list)      # the actor's own; None = unreadable
    judge_reward: float | None = None             # mean over the verdicts
    allowed: list = field(default_factory=list)   # per response token the ids it was drawn from (None: all);
                                                  # empty: not restricted


@dataclass(slots=True)
class Episode:
    """One task played from start to end."""

    task: Task
    group: int
    index: int = 0                # its number among the episodes of an iteration, over all ranks
    turns: list[Turn] = field(default_factory=list)
    won: bool = False
    reward: float = 0.0           # what it earned, penalties included; written once it is played
    truncated: bool = False       # a response was cut at its length, which ended the episode as failed
    overflowed: bool = False      # the next prompt would not have fitted the context: likewise
    final_observation: str = ""
    final_anchor: str = ""        # the same at its end; while it is played, so far
    score_100: float | None = None       # the game's own score at the end, where it has one
    restarts: int = 0             # how often the engine died under it and it began again


@dataclass(frozen=True, slots=True)
class Seat:
    """An episode to be played. Its stream fixes every random draw, whatever slot, batch or rank plays it."""

    task: Task
    group: int
    stream: int
    index: int = 0
    instruction: str = ""         # put before the first observation (prompt-based correction)


class Local:
    """An environment of this process, with the verbs of one in another: send, then receive (which plays)."""

    def __init__(self, env):
        self.env = env

    def send(self, verb, *arguments):
        self.receive = partial(getattr(self.env, verb), *arguments)


class Conversation:
    """An episode in progress: its environment, its first message, and one piece of prompt per exchange.

    A prompt is the first message and the last `history` exchanges (0: all of them, so it is append-only).
    Made, it has asked for a reset; `begin` waits for the answer. Then `say` and `hear`, or `act` for both:
    many say before one is heard, so that environments in other processes work at once. `begin`, `hear` may
    raise EpisodeLost. on_truncation: a response cut at its length "fail"s the episode, or is "invalid".
    number: its place among the seats.
    """

    def __init__(self, seat, env, chat, history, number=0):
        self.seat, self.chat, self.history, self.stream = seat, chat, history, seat.stream
        self.number, self.begun = number, False
        self.env = env if hasattr(env, "send") else Local(env)
        self.episode = Episode(seat.task, seat.group, seat.index)
        self.env.send("reset", seat.task, 0)

    def begin(self):
        """Receive the first observation and make the first prompt; returns self."""
        self.reply = self.env.receive()
        self.head = self.prompt = list(self.chat.observe(self.reply, True, self.seat.instruction))
        self.exchanges, self.episode.score_100, self.begun = [], self.reply.score_100, True
        self.episode.final_anchor = self.reply.observation
        return self

    def next_stream(self):
        return stream(self.stream, len(self.episode.turns))

    def restriction(self):
        """What the next response may be, if only commands that are possible now. ValueError where the world
        lists none: nothing would be left to sample."""
        if not self.reply.admissible:
            raise ValueError(f"--admissible-only: task {self.seat.task.id} lists no command before turn "
                             f"{len(self.episode.turns) + 1}")
        return self.chat.restriction(self.reply.admissible)

    def act(self, response, max_turns, room, on_truncation="fail"):
        """`say` the response and `hear` the answer; True at the episode's end."""
        self.say(response, on_truncation)
        return self.hear(max_turns, room)

    def say(self, response, on_truncation="fail"):
        """Record the response as a turn and send its command, if any: one cut at its length has none."""
        episode, before = self.episode, self.reply
        text = self.chat.decode(response.ids)
        action, tag = (None, None) if response.truncated else self.chat.parse(text)
        episode.turns.append(Turn(
            before.observation, self.prompt, response.ids, response.logprob, text, action,
            action in before.admissible, episode.final_anchor, response.truncated, tag,
            allowed=response.allowed))
        if response.truncated and on_truncation == "fail":
            episode.truncated, episode.final_observation = True, before.observation
        elif action is not None:
            self.env.send("step", action)

    def hear(self, max_turns, room):
        """Receive the answer, make the next prompt (at most `room` tokens); True at the episode's end."""
        episode, turn = self.episode, self.episode.turns[-1]
        if episode.truncated:
            return True
        if turn.action is None:
            self.reply = self.reply._replace(observation=self.chat.nothing)
        else:
            self.reply = self.env.receive()
            turn.valid = turn.valid if self.reply.taken is None else self.reply.taken
        episode.won, episode.score_100 = self.reply.won, self.reply.score_100
        episode.final_observation = self.reply.observation
        if self.reply.observation != self.chat.nothing and self.reply.taken is not False:
            episode.final_anchor = self.reply.observation
        self.exchanges.append(turn.response_ids + self.chat.observe(self.reply))
        self.prompt = list(chain(self.head, *self.exchanges[-self.history:]))      # -0 is 0: all of them
        ended = self.reply.done or len(episode.turns) >= max_turns
        episode.overflowed = not ended and len(self.prompt) > room
        return ended or episode.overflowed


def check_room(task, prompt, max_response_tokens, context):
    """ValueError where a first prompt leaves no room for a response."""
    if len(prompt) + max_response_tokens > context:
        raise ValueError(f"--context={context}: the first prompt of task {task.id} has {len(prompt)} tokens, "
                         f"and a response may need {max_response_tokens}")


def play(model, chat, envs, seats, sampling, max_turns, context, history=0, on_truncation="fail",
         on_end=lambda episode: None, asked_to_stop=False, admissible_only=False, waits=None, coaches=None):
    """Play every seat once and return its Episode, in the order of the seats.

    One slot per environment; a slot whose episode has ended takes the next seat, and when none waits the last
    live slot moves into the hole. No slot waits for another: environments answer those whose response has
    ended while the device draws the others'. history, on_truncation: see `Conversation`. on_end(episode) is
    called as each one ends. Whoever asks to stop (true from one tick to the next) gets those that ended so
    far; they are not to be used. admissible_only: responses give possible commands only, see
    `Chat.restriction`; one longer than max_response_tokens is cut as ever. waits: a dict to which the seconds
    are added that "environments" and "device" were waited for. coaches: {a seat's index: a function of its
    Conversation that gives the ids of a response in the model's place, or None}. ValueError where a first
    prompt leaves no room for a response within `context` tokens.
    """
    slots = Slots(model, min(len(envs), len(seats)), context, chat.stop_ids, sampling)
    room, share = context - sampling.max_response_tokens, len({seat.group for seat in seats}) < len(seats)
    waiting, ended, first_prompt = iter(range(len(slots.held), len(seats))), {}, {}

    def hear(conversation):
        """Receive what its environment says; True at the episode's end. A first prompt is checked."""
        if conversation.begun:
            return conversation.hear(max_turns, room)
        conversation.begin()
        seat = conversation.seat
        check_room(seat.task, conversation.prompt, sampling.max_response_tokens, context)
        start = (seat.task.id, conversation.prompt)
        first = first_prompt.setdefault(seat.group, start)
        assert first == start, f"group {seat.group} does not start alike: {first[0]}, {start[0]}"

    def seat_at(row, conversation):
        """Let a new conversation have a row, of which nothing is held any more; returns it."""
        conversation.row, slots.held[row] = row, []
        live[row:row + 1] = [conversation]
        return conversation

    live, pairs = [], enumerate(zip(seats, envs))
    asked = [seat_at(row, Conversation(*pair, chat, history, row)) for row, pair in pairs]
    while live and not asked_to_stop:
        clock, ready, over, lost = [perf_counter()], [], [], []
        slots.tick()                                             # the device begins to draw,
        clock.append(perf_counter())
        for conversation in asked:                               # while those environments answer
            try:
                (over if hear(conversation) else ready).append(conversation)
            except EpisodeLost as loss:
                lost.append((conversation.row, again(conversation, loss)))
        clock.append(perf_counter())
        landed = slots.land()
        clock.append(perf_counter())
        asked = [seat_at(*place) for place in lost]
        for row, response in landed:
            live[row].say(response, on_truncation)
            asked.append(live[row])
        for conversation in over:
            ended[conversation.number], row = conversation.episode, conversation.row
            on_end(conversation.episode)
            if (new := next(waiting, None)) is not None:
                asked.append(seat_at(row, Conversation(seats[new], conversation.env, chat, history, new)))
            else:
                live[row], live[-1].row = live[-1], row
                live.pop()
                slots.move(len(live), row)
        for conversation in list(ready) if coaches else ():
            if ids := coaches[conversation.seat.index](conversation):
                conversation.say(Response(ids, [], False))
                ready.remove(conversation)
                asked.append(conversation)
        clock.append(perf_counter())
        if ready:
            ready.sort(key=lambda conversation: conversation.row)
            slots.begin([conversation.row for conversation in ready],
                        [conversation.prompt for conversation in ready],
                        [conversation.next_stream() for conversation in ready], share,
                        [conversation.restriction() for conversation in ready] if admissible_only else None)
        clock.append(perf_counter())
        if waits is not None:
            drew, heard, landing, _, began = (b - a for a, b in pairwise(clock))
            waits |= {"environments": waits.get("environments", 0.0) + heard,
                      "device": waits.get("device", 0.0) + drew + landing + began}
    return [ended[number] for number in sorted(ended)]


def again(conversation, loss, most=5):
    """A lost conversation anew, on other draws (the same might kill it too). EpisodeLost after `most`."""
    seat, restarts = conversation.seat, conversation.episode.restarts + 1
    if restarts > most:
        raise EpisodeLost(f"task {seat.task.id}: lost {restarts} times: {loss}") from loss
    anew = Conversation(seat, conversation.env, conversation.chat, conversation.history, conversation.number)
    anew.episode.restarts = restarts
    anew.stream = stream(seat.stream, 1 << 40, restarts)         # 1 << 40: no turn has this number
    return anew


def repeated_turns(episode):
    """How many turns gave a command already given in the same state (anchor): meaningless repeats."""
    pairs = [(turn.anchor, turn.action) for turn in episode.turns]
    return len(pairs) - len(set(pairs))


def summary(episodes):
    """Counts over episodes, to be summed over ranks before they are divided."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "episodes": len(episodes), "won": sum(e.won for e in episodes),
        "truncated": sum(e.truncated or e.overflowed or any(t.truncated for t in e.turns) for e in episodes),
        "turns": len(turns), "invalid": sum(not t.valid for t in turns),
        "repeated": sum(repeated_turns(e) for e in episodes),
        "response_tokens": sum(len(t.response_ids) for t in turns),
        "restarts": sum(e.restarts for e in episodes),
        "scored": sum(e.score_100 is not None for e in episodes),
        "score_100": sum(e.score_100 or 0.0 for e in episodes)}


def success_rate(counts, plays=1):
    """What `summary` counted, as shares of episodes or turns; success with its 95 % Wilson interval. Several
    plays of a game count as one in that: a game that is won once is likely to be won again."""
    n, turns = max(counts["episodes"], 1), max(counts["turns"], 1)
    low, high = wilson(counts["won"] / plays, counts["episodes"] / plays)
    score = {"score_100": counts["score_100"] / counts["scored"]} if counts["scored"] else {}
    return {"success": counts["won"] / n, "n": counts["episodes"], "plays": plays, "low": low, "high": high,
            "turns": counts["turns"] / n, "invalid_frac": counts["invalid"] / turns,
            "repeated_frac": counts["repeated"] / turns, "truncated_frac": counts["truncated"] / n,
            "restarts": counts["restarts"]} | score


def wilson(successes, n, z=1.96):
    """The Wilson score interval of a share: (low, high), 95 % by default. n = 0 gives (0, 1).

        (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)        Wilson 1927
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
