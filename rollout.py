"""Episodes from a model and environments: the KV-cached slot engine, the chat that it speaks, and `play`.

Read from the top: what is recorded (`Turn`, `Episode`), how text becomes tokens (`Chat`), how tokens are
sampled (`generate` over `Slots`), how episodes are played (`play`), what they add up to (`summary`,
`success_rate`).

Every token is computed once. An episode keeps its slot, and of each new prompt only what the slot does not
hold yet is run: with an append-only conversation that is the last observation. The members of a group start
from one prefill. Token in, token out: what was sampled is what is trained on, no response is tokenised again.
Left out on purpose: paged caches, and batching of rows that sit at different points of a response.

Shapes: B slots in use, T tokens of a chunk, V vocabulary.
"""

import re
from collections import deque
from dataclasses import dataclass, field

import torch

from algorithms import wilson
from envs import NOTHING, EpisodeLost, Task
from model import KVCache
from parallel import stream

# What is recorded

@dataclass(slots=True)
class Turn:
    """One prompt, the response to it, and what the environment was asked to do."""

    observation: str              # what the environment had said before
    prompt_ids: list[int]
    response_ids: list[int]       # as sampled, stop token included
    logprob_old: list[float]      # nats, one per response token, at the sampling temperature
    response: str
    action: str | None            # the command parsed out of the response; None = malformed
    valid: bool                   # the command was admissible
    anchor: str                   # the state as far as it was seen: the last observation that is not NOTHING
    truncated: bool = False       # the response had no stop token within its length
    tag: str | None = None        # RLVMR's meta-reasoning tag; None = malformed, or a prompt without tags


@dataclass(slots=True)
class Episode:
    """One task played from start to end."""

    task: Task
    group: int
    turns: list[Turn] = field(default_factory=list)
    won: bool = False
    truncated: bool = False       # a response was cut at its length, which ended the episode as failed
    overflowed: bool = False      # the next prompt would not have fitted the context: likewise
    final_observation: str = ""
    final_anchor: str = ""        # the state as far as it was seen at the end
    score_100: float | None = None       # the game's own score at the end, where it has one
    restarts: int = 0             # how often the engine died under it and it began again


@dataclass(frozen=True, slots=True)
class Seat:
    """An episode to be played. Its stream fixes every random draw, whatever slot, batch or rank plays it."""

    task: Task
    group: int
    stream: int
    instruction: str = ""         # put before the first observation (prompt-based correction)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. top_p and top_k are for evaluation: training scores the full distribution."""

    temperature: float = 1.0      # 0 = greedy
    max_response_tokens: int = 16
    top_p: float = 1.0
    top_k: int = 0


@dataclass(slots=True)
class Response:
    ids: list[int]
    logprob: list[float]
    truncated: bool               # no stop token within max_response_tokens


# How text becomes tokens, and back

@dataclass(frozen=True, slots=True)
class Template:
    """A chat template as five strings, rendered by hand because only so is it certain to be append-only."""

    start: str
    user: str
    user_end: str
    assistant: str
    between: str                  # what follows the assistant's stop token, before the next user message


SMALL = Template("", "<|user|>", "", "<|assistant|>", "")
CHATML = Template("<|im_start|>system\n"
                  "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
                  "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "\n")

RULES = """You play a text game. Each turn you give one command and the game answers with what you see.

{observation}

{ask}"""
POSSIBLE = """Commands that are possible now:
{admissible}

"""
OBJECTS = """OBJ stands for one of: {objects}

"""
ASK = {
    "think": "First reason about the next command inside <think> </think>, then give exactly one command, word for word "
             "from the list, inside <action> </action>.",
    "tags": "First write one short sentence inside exactly one of these tags: <planning> a numbered plan, at the start or "
            "when the plan changes; <explore> where else to look, when something is missing; <reflection> what went wrong "
            "and what to do instead, after a command that failed; <monitor> how far the plan has come, otherwise. Close "
            "the tag, then give exactly one command inside <action> </action>.",
}
ASK_HIDDEN = ASK | {"think": ASK["think"].replace(", word for word from the list,", "")}
TAGS = ("planning", "explore", "reflection", "monitor")      # RLVMR, arXiv:2507.22844
THOUGHT_ACTION = re.compile(r"\s*<think>.*</think>\s*<action>([^<>]*)</action>\s*", re.DOTALL)
TAG_ACTION = re.compile(rf"\s*<({'|'.join(TAGS)})>\s*[^<>\s][^<>]*</\1>\s*<action>([^<>]*)</action>\s*", re.DOTALL)
SMALL_TAG_ACTION = re.compile(rf"<({'|'.join(TAGS)})>([^<>]*)", re.DOTALL)
THOUGHT = "The next thing to do for the task is: {command}."


class Chat:
    """Text to tokens and back, in one of three styles.

    plain: the observation in, the command out                                  (the small model)
    think: rules and admissible commands in, <think> and <action> out           (Hugging Face models)
    tags:  the same with one of RLVMR's tags for <think>; the small model gives the bare tag and the command

    admissible: whether prompts list what is possible (never in the small model's own template).
    """

    def __init__(self, tokenizer, style, admissible=True):
        assert style in ("plain", "think", "tags"), style
        self.tokenizer, self.style, self.small = tokenizer, style, is_small(tokenizer)
        assert self.small or style != "plain", "plain is the small model's style"
        self.template = SMALL if self.small else CHATML
        self.stop_ids = stop_ids(tokenizer)
        self.bare = style == "plain" or self.small and style == "tags"     # rules and lists are wasted on a small model
        self.admissible, self.memo = admissible and not self.bare, {}

    @property
    def writes(self):
        """Whether the model is one that can write sentences: thoughts, critiques."""
        return self.style != "plain" and not self.small

    def encode(self, text):
        """Token ids, remembered: observations repeat by the thousand."""
        if text not in self.memo:
            if len(self.memo) > 100_000:
                self.memo.clear()
            self.memo[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.memo[text]

    def decode(self, ids):
        """Text of a response without its stop token; other special tokens stay, so that they can be seen."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def message(self, content, first=False):
        """Ids of a user message, up to where the assistant begins to speak."""
        t = self.template
        return self.encode((t.start if first else t.between) + t.user + content + t.user_end + t.assistant)

    def observe(self, reply, first=False, instruction=""):
        """Ids of an environment's reply as the next user message."""
        content = reply.observation
        if not self.bare:
            ask = self.ask(reply)
            content = RULES.format(observation=content, ask=ask) if first else f"{content}\n\n{ask}"
        return self.message(f"{instruction}\n\n{content}" if instruction else content, first)

    def ask(self, reply):
        """What is possible now, where that is shown, and how to answer."""
        if not self.admissible:
            return ASK_HIDDEN[self.style]
        shown = POSSIBLE.format(admissible="\n".join(c for c in reply.admissible if c != "help"))
        if reply.objects:
            shown += OBJECTS.format(objects=", ".join(reply.objects))
        return shown + ASK[self.style]

    def respond(self, command, tag="monitor", thought=None):
        """Ids of the response that a demonstration gives: the command, with its thought (a set one, if None)."""
        text, thought = command, thought or THOUGHT.format(command=command)
        if self.style == "think":
            text = f"<think>{thought}</think><action>{command}</action>"
        elif self.style == "tags":
            text = f"<{tag}>{command}" if self.small else f"<{tag}>{thought}</{tag}><action>{command}</action>"
        return self.encode(text) + self.encode("<|im_end|>")

    def parse(self, text):
        """(command, tag) of a response; (None, None) where it is malformed, tag None in styles without tags."""
        if self.style == "plain":
            return text.strip() or None, None
        if self.style == "think":
            match = THOUGHT_ACTION.fullmatch(text)
            return (match[1].strip() or None) if match else None, None
        match = (SMALL_TAG_ACTION if self.small else TAG_ACTION).fullmatch(text)
        command = match[2].strip() if match else ""
        return (command, match[1]) if command else (None, None)


def is_small(tokenizer):
    """Whether this is the small default model's tokenizer, which has its own, shorter template."""
    return "<|user|>" in tokenizer.get_added_vocab()


def stop_ids(tokenizer):
    """Ids that end a response: Qwen2.5 stops on <|im_end|> and on <|endoftext|>, and both are trained."""
    ids = {tokenizer.eos_token_id}
    ids |= {tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    return tuple(sorted(i for i in ids if i is not None))


# How tokens are sampled

def uniform(stream_B, position):
    """One number in (0, 1) per row, from a counter: splitmix64 of (stream, position), 52 bits, in int64.

    A row's draw depends on its own stream and position only, so an episode draws the same numbers in any
    slot, beside any other, on any rank.
    """
    step = (position + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1)
    x = stream_B + (step - 2**64 if step >= 2**63 else step)
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) / 2**52   # with 53 bits the half may round up to 1


def sample_tokens(logits_BV, uniform_B, temperature=1.0, top_p=1.0, top_k=0):
    """One token per row by inverse transform: the first whose cumulative probability reaches uniform_B.

    Stays on the device (no host sync). Returns token_B and its logprob_B under
    log_softmax(logits / temperature), the full distribution; greedy (temperature 0) reports the logprob at
    temperature 1.
    """
    logprob_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        token_B = logprob_BV.argmax(-1)
    else:
        probs_BV = keep_top(logprob_BV.exp(), top_p, top_k)
        cumulative_BV = probs_BV.double().cumsum(-1)
        below_BV = cumulative_BV < uniform_B[:, None] * cumulative_BV[:, -1:]
        token_B = below_BV.sum(-1).clamp_(max=logits_BV.shape[1] - 1)
    return token_B, logprob_BV.gather(1, token_B[:, None])[:, 0]


def keep_top(probs_BV, top_p, top_k):
    """Zero what is outside the top_k largest or the smallest set of mass >= top_p; not renormalised."""
    if top_p >= 1 and top_k <= 0:
        return probs_BV
    sorted_BV, order_BV = probs_BV.sort(-1, descending=True)
    mass_before_BV = sorted_BV.cumsum(-1) - sorted_BV
    keep_BV = mass_before_BV < top_p
    if top_k > 0:
        keep_BV[:, top_k:] = False
    return torch.zeros_like(probs_BV).scatter(1, order_BV, sorted_BV * keep_BV)


class Slots:
    """The rows of a KV cache and the token ids that each of them holds; live rows are kept at the front."""

    def __init__(self, model, n, context):
        weight = next(model.parameters())
        self.cache = KVCache(model.config, n, context, weight.dtype, weight.device)
        self.context = context
        self.held = [[] for _ in range(n)]
        self.first_prompts = {}          # prompt -> (K/V, logits_V): what a group's later members start from

    def move(self, source, target):
        """Let `target` hold what `source` holds: an ended episode's hole is filled from the back."""
        self.cache.copy_row(source, target, len(self.held[source]))
        self.held[target] = self.held[source]


def bucket(n, size=64):
    """n rounded up to a multiple of `size`: few distinct shapes, so kernels and allocations are reused."""
    return -(-n // size) * size


def common_prefix(held, prompt):
    """How many tokens of the prompt a slot already holds; at least one is left to run, for its logits."""
    n = min(len(held), len(prompt) - 1)
    if held[:n] == prompt[:n]:
        return n
    return next(i for i in range(n) if held[i] != prompt[i])


def run_chunks(model, cache, chunks, starts, context, max_tokens=16384):
    """Append chunks[i] to row i at position starts[i], at most max_tokens (padding included) in one forward.

    Returns logits_BV after each chunk's last token; of a row with an empty chunk they mean nothing.
    """
    device = next(model.parameters()).device
    width = bucket(max(map(len, chunks)), 16)
    ids_BT = torch.tensor([c + [0] * (width - len(c)) for c in chunks])
    start_B, n_B = torch.tensor(starts), torch.tensor([len(c) for c in chunks])
    block = max(1, max_tokens // width)
    logits = []
    for a in range(0, len(chunks), block):
        b = min(a + block, len(chunks))
        last_B = (n_B[a:b] - 1).clamp(min=0).to(device)
        logits.append(model(ids_BT[a:b].to(device), cache=cache.rows(b, start=a),
                            start_B=start_B[a:b].to(device), n_valid_B=n_B[a:b].to(device),
                            context=min(context, cache.length),
                            select=(torch.arange(b - a, device=device), last_B)))
    return torch.cat(logits)


def prefill(model, slots, prompts, share):
    """Bring slot i to hold prompts[i] and return logits_BV after it, running only what is not there yet.

    Prompts that start from nothing are run once each and copied (a group's members begin alike); with `share`
    they are kept for members that start later.
    """
    keep = [common_prefix(held, prompt) for held, prompt in zip(slots.held, prompts)]
    chunks = [prompt[k:] if k else [] for prompt, k in zip(prompts, keep)]
    logits_BV = None
    if any(chunks):
        context = bucket(max(map(len, prompts)) + 16)
        logits_BV = run_chunks(model, slots.cache.rows(len(prompts)), chunks, keep, context)
    fresh = [i for i, k in enumerate(keep) if k == 0]
    if not fresh:
        return logits_BV
    known = slots.first_prompts if share else {}
    new = list(dict.fromkeys(tuple(prompts[i]) for i in fresh if tuple(prompts[i]) not in known))
    if new:
        width = bucket(max(map(len, new)), 16)
        weight = next(model.parameters())
        scratch = KVCache(model.config, len(new), width, weight.dtype, weight.device)
        new_logits = run_chunks(model, scratch, [list(p) for p in new], [0] * len(new), width)
        known.update((p, (scratch.export_row(j, len(p)), new_logits[j])) for j, p in enumerate(new))
    if logits_BV is None:
        logits_BV = next(iter(known.values()))[1].new_empty(len(prompts), model.config.vocab_size)
    for i in fresh:
        kv, logits_BV[i] = known[tuple(prompts[i])]
        slots.cache.import_row(i, kv)
    return logits_BV


@torch.no_grad()
def generate(model, slots, prompts, streams, stops, sampling, share=False):
    """Sample one response to each prompt: prompts[i] in slot i, from streams[i]. Returns list[Response].

    A row that has sampled a stop id waits for the others. Whether all have is looked up every 16 tokens,
    since that makes the host wait for the device (on the CPU, where it costs nothing, at every token).
    """
    device = next(model.parameters()).device
    n, longest = len(prompts), max(map(len, prompts))
    assert longest + sampling.max_response_tokens <= slots.context, (longest, slots.context)
    logits_BV = prefill(model, slots, prompts, share)
    cache, rows_B = slots.cache.rows(n), torch.arange(n, device=device)
    stream_B, stop = torch.tensor(streams, device=device), torch.tensor(stops, device=device)
    length_B = torch.tensor([len(p) for p in prompts], device=device)
    live_B = torch.ones(n, dtype=torch.bool, device=device)
    check = 1 if device.type == "cpu" else 16
    tokens, logprobs = [], []
    for t in range(sampling.max_response_tokens):
        token_B, logprob_B = sample_tokens(logits_BV, uniform(stream_B, t), sampling.temperature,
                                           sampling.top_p, sampling.top_k)
        tokens.append(token_B)
        logprobs.append(logprob_B)
        live_B = live_B & ~torch.isin(token_B, stop)
        if t + 1 == sampling.max_response_tokens or (t % check == check - 1 and not live_B.any()):
            break
        logits_BV = model(token_B[:, None], cache=cache, start_B=length_B, n_valid_B=live_B.long(),
                          context=min(bucket(longest + t + 1), slots.context),
                          select=(rows_B, torch.zeros_like(rows_B)))
        length_B = length_B + live_B
    ids, logprob = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
    responses = [cut(i, p, stops) for i, p in zip(ids, logprob)]
    for i, response in enumerate(responses):     # the last token was sampled, not run: it is not in the cache
        slots.held[i] = prompts[i] + response.ids[:-1]
    return responses


def cut(ids, logprob, stops):
    """The response within a row of samples: up to the first stop token, that token included."""
    end = next((i + 1 for i, token in enumerate(ids) if token in stops), None)
    return Response(ids[:end], logprob[:end], truncated=end is None)


# How episodes are played

RESTART = 1 << 40                 # beside the turns' numbers in an episode's random stream


class Local:
    """An environment of this process, with the two verbs of one in another: send, then receive (which plays)."""

    def __init__(self, env):
        self.env = env

    def send(self, verb, *arguments):
        self.asked = verb, arguments

    def receive(self):
        verb, arguments = self.asked
        return getattr(self.env, verb)(*arguments)


class Conversation:
    """An episode in progress: its environment, its first message, and one piece of prompt per exchange.

    A prompt is the first message and the last `history` exchanges (0: all of them, so it is append-only).
    Made, it has asked its environment for a reset; `begin` waits for the answer. Then come `say` and `hear`, or
    `act` for both: many conversations say before one is heard, so that environments in other processes work at
    once. `begin` and `hear` may raise EpisodeLost.
    """

    def __init__(self, seat, env, chat, history):
        self.seat, self.chat, self.history, self.stream = seat, chat, history, seat.stream
        self.env = env if hasattr(env, "send") else Local(env)
        self.episode = Episode(seat.task, seat.group)
        self.env.send("reset", seat.task, 0)

    def begin(self):
        """Receive the first observation and make the first prompt; returns self."""
        self.reply = self.env.receive()
        self.head, self.exchanges = self.chat.observe(self.reply, True, self.seat.instruction), []
        self.anchor = self.episode.final_anchor = self.reply.observation
        self.episode.score_100 = self.reply.score_100
        self.prompt = list(self.head)
        return self

    def next_stream(self):
        return stream(self.stream, len(self.episode.turns))

    def act(self, response, max_turns, room, on_truncation="fail"):
        """`say` the response and `hear` the answer; True at the episode's end."""
        self.say(response, on_truncation)
        return self.hear(max_turns, room)

    def say(self, response, on_truncation="fail"):
        """Record the response as a turn and send its command.

        A response cut at its length has no action: it ends the episode as failed (on_truncation "fail") or is
        one invalid turn ("invalid").
        """
        episode, before = self.episode, self.reply
        text = self.chat.decode(response.ids)
        action, tag = (None, None) if response.truncated else self.chat.parse(text)
        valid = action in before.admissible
        episode.turns.append(Turn(before.observation, self.prompt, response.ids, response.logprob, text,
                                  action, valid, self.anchor, response.truncated, tag))
        if response.truncated and on_truncation == "fail":
            episode.truncated, episode.final_observation = True, before.observation
        elif action is not None:
            self.env.send("step", action)

    def hear(self, max_turns, room):
        """Receive the answer to what was said and make the next prompt; True at the episode's end.

        room: the most tokens that a prompt may have.
        """
        episode = self.episode
        turn = episode.turns[-1]
        if episode.truncated:
            return True
        self.reply = self.reply._replace(observation=NOTHING) if turn.action is None else self.env.receive()
        if turn.action is not None and self.reply.taken is not None:
            turn.valid = self.reply.taken
        episode.won, episode.score_100 = self.reply.won, self.reply.score_100
        episode.final_observation = self.reply.observation
        if self.reply.observation != NOTHING and self.reply.taken is not False:
            self.anchor = episode.final_anchor = self.reply.observation
        self.exchanges.append(turn.response_ids + self.chat.observe(self.reply))
        kept = self.exchanges[-self.history:] if self.history else self.exchanges[-1:]
        base = self.head if self.history else self.prompt
        self.prompt = base + [i for piece in kept for i in piece]
        ended = self.reply.done or len(episode.turns) >= max_turns
        episode.overflowed = not ended and len(self.prompt) > room
        return ended or episode.overflowed


def check_room(task, prompt, max_response_tokens, context):
    """ValueError where a first prompt leaves no room for a response."""
    if len(prompt) + max_response_tokens > context:
        raise ValueError(f"--context={context}: the first prompt of task {task.id} has {len(prompt)} tokens, and a "
                         f"response may need {max_response_tokens}")


def play(model, chat, envs, seats, sampling, max_turns, context, history=0, on_truncation="fail",
         on_end=None):
    """Play every seat once and return its Episode, in the order of the seats.

    One slot per environment; a slot whose episode has ended takes the next seat, and when none waits the last
    live slot moves into the hole. `history` and `on_truncation` are explained at `Conversation`;
    `on_end(episode)` is called as each one ends (a progress bar).
    Raises ValueError where a first prompt leaves no room for a response within `context` tokens.
    """
    slots = Slots(model, min(len(envs), len(seats)), context)
    room = context - sampling.max_response_tokens
    share = len({seat.group for seat in seats}) < len(seats)
    waiting, ended, first_prompt = deque(range(len(seats))), {}, {}

    def begin(i, talk):
        """The talk of seat i once its environment has answered, anew where that died; checked against its group."""
        talk = hold_on(talk, Conversation.begin)
        check_room(seats[i].task, talk.prompt, sampling.max_response_tokens, context)
        start = (seats[i].task.id, talk.prompt)
        first = first_prompt.setdefault(seats[i].group, start)
        assert first == start, f"group {seats[i].group} does not start alike: {first[0]}, {start[0]}"
        return i, talk

    sent = [(i, Conversation(seats[i], env, chat, history))
            for env, i in zip(envs[:len(slots.held)], [waiting.popleft() for _ in slots.held])]
    live = [begin(i, talk) for i, talk in sent]
    while live:
        prompts = [talk.prompt for _, talk in live]
        streams = [talk.next_stream() for _, talk in live]
        responses = generate(model, slots, prompts, streams, chat.stop_ids, sampling, share)
        for (_, talk), response in zip(live, responses):
            talk.say(response, on_truncation)
        over = []
        for row, (i, talk) in enumerate(live):
            try:
                if talk.hear(max_turns, room):
                    over.append(row)
            except EpisodeLost as loss:
                live[row], slots.held[row] = begin(i, again(talk, loss)), []
        for row in reversed(over):
            i, talk = live[row]
            ended[i] = talk.episode
            if on_end:
                on_end(talk.episode)
            if waiting:
                i = waiting.popleft()
                live[row], slots.held[row] = begin(i, Conversation(seats[i], talk.env, chat, history)), []
                continue
            last = len(live) - 1
            if row != last:
                slots.move(last, row)
                live[row] = live[last]
            slots.held[last] = []
            live.pop()
    return [ended[i] for i in range(len(seats))]


def again(talk, loss, most=5):
    """A conversation lost with its engine, begun anew, on other random draws: the same commands might kill it again.

    EpisodeLost naming the task where that goes on and on.
    """
    episode, restarts = talk.episode, talk.episode.restarts + 1
    if restarts > most:
        raise EpisodeLost(f"task {episode.task.id}: lost {restarts} times: {loss}") from loss
    anew = Conversation(talk.seat, talk.env, talk.chat, talk.history)
    anew.episode.restarts, anew.stream = restarts, stream(talk.seat.stream, RESTART, restarts)
    return anew


def hold_on(talk, verb):
    """verb(talk), on a new conversation of the same seat wherever it is lost."""
    while True:
        try:
            return verb(talk)
        except EpisodeLost as loss:
            talk = again(talk, loss)


def answer(model, chat, prompts, streams, sampling, n_slots):
    """Several answers to each prompt: streams[i] holds one stream per answer to prompts[i].

    A prompt is prefilled once and copied to the slots of its answers. Returns a list of Responses per prompt.
    """
    each = len(streams[0]) if streams else 1
    per_batch = max(1, n_slots // each)
    answers = []
    for a in range(0, len(prompts), per_batch):
        batch = [p for p in prompts[a:a + per_batch] for _ in range(each)]
        slots = Slots(model, len(batch), bucket(max(map(len, batch)) + sampling.max_response_tokens))
        flat = [s for row in streams[a:a + per_batch] for s in row]
        responses = generate(model, slots, batch, flat, chat.stop_ids, sampling)
        answers += [responses[i:i + each] for i in range(0, len(responses), each)]
    return answers


# What episodes add up to

def repeated_turns(episode):
    """How many turns gave a command already given in the same state (anchor): meaningless repeats."""
    pairs = [(turn.anchor, turn.action) for turn in episode.turns]
    return len(pairs) - len(set(pairs))


def summary(episodes):
    """Counts over episodes, to be summed over ranks before they are divided."""
    turns = [turn for episode in episodes for turn in episode.turns]
    return {
        "episodes": len(episodes),
        "won": sum(e.won for e in episodes),
        "truncated": sum(e.truncated or e.overflowed or any(t.truncated for t in e.turns) for e in episodes),
        "turns": len(turns),
        "invalid": sum(not t.valid for t in turns),
        "repeated": sum(repeated_turns(e) for e in episodes),
        "response_tokens": sum(len(t.response_ids) for t in turns),
        "restarts": sum(e.restarts for e in episodes),
        "scored": sum(e.score_100 is not None for e in episodes),
        "score_100": sum(e.score_100 or 0.0 for e in episodes),
    }


def success_rate(counts):
    """What `summary` counted, as shares: success with its 95 % Wilson interval, truncated episodes, invalid
    and repeated turns. Also n, the number of episodes, and turns per episode; the mean game score, where the game
    has one; and how often an engine died under an episode."""
    low, high = wilson(counts["won"], counts["episodes"])
    n, turns = max(counts["episodes"], 1), max(counts["turns"], 1)
    return {"success": counts["won"] / n, "n": counts["episodes"], "low": low, "high": high,
            "turns": counts["turns"] / n, "invalid_frac": counts["invalid"] / turns,
            "repeated_frac": counts["repeated"] / turns, "truncated_frac": counts["truncated"] / n,
            "restarts": counts["restarts"]} | (
                {"score_100": counts["score_100"] / counts["scored"]} if counts["scored"] else {})
