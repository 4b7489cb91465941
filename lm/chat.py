"""Chat formats: text to tokens and back, by the tokenizer's chat template and in three prompt styles.

Of the template only what surrounds a user message is rendered, once, so that a longer conversation always
extends the shorter one token for token. The result differs from Qwen3's in one point: Qwen3's template drops
the thoughts of earlier turns, and the empty thought of a turn with thinking off. Here both stay, as sampled,
so that an episode is one sequence, which is computed once and trained on with the context that the model had.
It differs from Llama 3's in one, too: that template trims messages, which here keep the space around them.
Special tokens come from the template alone: "<|im_end|>" in a game's text stays text, so that no game can
speak for the agent. (Of the tokens that the tokenizer calls special; Qwen3's "<think>" is none of them.)
An environment may bring its own rules, response format and tools. With tools, the head of a conversation is
rendered by the tokenizer's own template; of what follows a response, only the difference is, once and without
that response, and so tokens that were sampled are never rendered again.
Left out: tool calls in another form than Qwen2.5's and Qwen3's, JSON in <tool_call>. A template without this
tag (Llama 3's) is refused; calls with something else in it (Qwen3.5's XML) are malformed. Tokenizers that
put a space before the first word of a text, but not after a special token (Llama 2's), are refused.
"""

import re
from functools import lru_cache, partial

from infra.plugins import refuse
from lm.restrict import Restriction, trie_of

NOOP_MESSAGE = "Nothing happens."      # where there is no environment
OPEN_THOUGHT = "<think>\n"             # some templates start a response with it; here the model does

RULES = "You play a text game. Each turn you give one command and the game answers with what you see."
POSSIBLE = "Commands that are possible now:\n{admissible}\n\n"
OBJECTS = "OBJ stands for one of: {objects}\n\n"
OWN_FORMAT = "Close the tag, then give exactly one command inside <action> </action>."      # of tags
ASK = {
    "plain": "Answer with exactly one command, word for word from the list, and nothing else.",
    "think": "First reason about the next command inside <think> </think>, then give exactly one command, "
             "word for word from the list, inside <action> </action>.",
    "tags": "First write one short sentence inside exactly one of these tags: <planning> a numbered plan, at "
            "the start or when the plan changes; <explore> where else to look, when something is missing; "
            "<reflection> what went wrong and what to do instead, after a command that failed; <monitor> how "
            "far the plan has come, otherwise. " + OWN_FORMAT,
}
# RLVMR, arXiv:2507.22844. Also in ASK above, rlvmr.TAG_GROUPS, and cold_start.rule_tag, which shows them
TAGS = ("planning", "explore", "reflection", "monitor")
TAG = f"<({'|'.join(TAGS)})>"
DATE = "26 Jul 2024"                    # in Llama's system message, which would be the day's: on all days
MARK = "\ue000{}\ue001"                 # stands for a text in a rendered template
HOLE = MARK.format(0)                   # for the message
ACTION_START = "<action"                # no token of Qwen's spans its end and the ">" that follows
UNTAGGED = r"((?s:(?!</?\w+>).)*)"              # a command: no tags in it; "<" and ">" alone, as in "< Prev"
COMMAND = ">" + UNTAGGED + r"</action>\s*"
TAGGED = r"\s*" + TAG + r"\s*[^<>\s][^<>]*</\1>\s*"
ONE_THOUGHT = r"(?s)\s*<think>(?:(?!</think>).)*</think>\s*"
PREFIX = {"think": ONE_THOUGHT + ACTION_START, "tags": TAGGED + ACTION_START}
THOUGHT_ACTION, TAG_ACTION = (re.compile(start + COMMAND) for start in PREFIX.values())
SMALL_TAG_ACTION = re.compile(TAG + UNTAGGED)
THOUGHT = "The next thing to do for the task is: {command}."
OWN_THOUGHT = "The next thing to do for the task is the following."


class Chat:
    """Prompts and responses as token ids, in one of three styles.

    style:  prompt                                     response
    plain   the observation; first the rules           the command
    plain   the observation (small model)              the command
    think   the observation, rules, commands           <think>...</think><action>command</action>
    tags    the same                                   <explore>...</explore><action>command</action>, or one
                                                       of the other TAGS (RLVMR)
    tags    the observation (small model)              <explore>command

    A model whose template can switch its own thinking off thinks in style think alone.

    An environment's `ask` and `parse` replace the command's format in the last column, its `rules` what opens
    the first prompt; a style's thought or tag comes before. A small model's prompts stay the observation.

    show_admissible: whether prompts list the admissible commands (bare ones never do).
    environment: an envs.Environment, for its rules, ask, parse, tools, and noop_message, which also answers a
    malformed response. ValueError for a tokenizer without a chat template or whose tokens of a text depend on
    what precedes it, for a template without turns of an assistant, or without the environment's tools, its
    rules or the tools' answers.
    Attributes: small, whether the tokenizer is the small model's; bare, whether prompts after the first are
    the observation alone; end_ids, the ids that end a demonstrated response; stop_ids, each of which ends a
    sampled one.
    """

    def __init__(self, tokenizer, style, show_admissible=True, environment=None):
        assert style in ("plain", "think", "tags"), style
        self.tokenizer, self.style, self.small = tokenizer, style, is_small(tokenizer)
        self.bare = style == "plain" or self.small and style == "tags"
        can_be_silent = "enable_thinking" in (tokenizer.chat_template or "")
        self.switches = {"enable_thinking": False} if can_be_silent and style != "think" else {}
        control = partial(tokenizer.encode, add_special_tokens=False)
        self.special = special_tokens(tokenizer)
        *self.templates, end = templates_of(tokenizer, self.switches)
        self.end_ids = control(end)
        if control(end + "a") != self.end_ids + control("a"):
            raise ValueError(f"{tokenizer.name_or_path}: its tokenizer gives a text other tokens alone than "
                             "after a special token, as SentencePiece's may, which is not implemented")
        # A response ends with the template's end, eos, pad (Qwen2.5 was trained to end with it) or unk unless
        # these are words, or an end that config.json declares (LlamaConfig's default, 2, may be a word's)
        others = {tokenizer.pad_token_id, tokenizer.unk_token_id} - {None}
        ends = {tokenizer.eos_token_id, *(i for i in others if not is_word(tokenizer, i))}
        declared = {*getattr(tokenizer, "declared_ends", ())} & {*self.special.values()}
        self.stop_ids = tuple(sorted({*self.end_ids, *ends, *declared} - {None}))
        self.show_admissible = show_admissible and not self.bare
        self.set_formats(environment)
        self.tools = environment.tools() if environment and not self.small else []
        self.answer_templates = {}
        # cached, since the same observations occur thousands of times; a long one takes 10 kB and more
        self.encode = lru_cache(100_000 if self.small else 4_000)(self._encode)
        self.encodings = lru_cache(100_000)(self._encodings)
        self.pieces = lru_cache(64)(self._pieces)
        if self.tools and not self.shows_tools():
            raise ValueError(f"{tokenizer.name_or_path}: its chat template shows no tools, or none in "
                             "<tool_call>, which this --env has")
        if self.tools:                                          # ValueError now rather than in a game
            self.head("."), self.answers([".", "."])

    def set_formats(self, environment):
        """Set an environment's own noop_message, rules, ask and parse; None: there is none."""
        self.environment, self.noop_message = environment, getattr(environment, "noop_message", NOOP_MESSAGE)
        self.rules, self.own_ask, self.own_parse = (getattr(environment, name, None)
                                                    for name in ("rules", "ask", "parse"))

    def _encode(self, text):
        """Ids of a text: special tokens in it are text, and unpaired surrogates are "?"."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids):
        """Text of a response without its stop token; other special tokens stay visible."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def closed(self, ids):
        """A response's ids as later prompts have them: a truncated one gets the end token that it lacks."""
        return ids if ids[-1] in self.stop_ids else ids + self.end_ids

    def message(self, content, first=False):
        """Ids of a user message, up to where the response starts. first: the first of a conversation."""
        return self.filled(self.templates[0 if first else 1], [content])

    def observe(self, reply, first=False, instruction=""):
        """Ids of the environment's reply as the next user message. instruction: text to put before it."""
        if self.tools and reply.answers:
            return self.answers(reply.answers)
        content = self.content(reply, first, instruction)
        return self.head(content) if self.tools and first else self.message(content, first)

    def content(self, reply, first=False, instruction=""):
        """Text of that message."""
        opens = first and not (self.small and self.bare)
        rules = (self.rules or RULES) if opens and not self.tools else ""
        ask = self.ask(reply) if opens or not self.bare else ""
        parts = (rules, ask, reply.observation) if self.bare else (rules, reply.observation, ask)
        return "\n\n".join(filter(None, (instruction, *parts)))

    def shows_tools(self):
        """Whether the tokenizer's own template shows the tools, and how to call them as `parse` reads it."""
        text = self.rendered([{"role": "user", "content": ""}])
        return self.tools[0]["function"]["name"] in text and "<tool_call>" in text

    def head(self, content):
        """Ids of the first prompt by the tokenizer's own template: rules, tools, first user message."""
        system = [{"role": "system", "content": MARK.format(0)}] if self.rules else []
        rendered = self.rendered([*system, {"role": "user", "content": MARK.format(1)}])
        return self.filled(rendered, [self.rules, content])

    def answers(self, texts):
        """Ids of the tools' answers by the tokenizer's own template, from the response's stop token on."""
        if len(texts) not in self.answer_templates:
            marks = [MARK.format(k) for k in range(len(texts) + 2)]
            rendered = self.rendered([
                {"role": "user", "content": marks[-1]}, {"role": "assistant", "content": marks[-2]},
                *({"role": "tool", "content": mark} for mark in marks[:-2])])
            after = rendered.partition(marks[-2])[2]
            self.answer_templates[len(texts)] = after.partition(self.tokenizer.decode(self.end_ids))[2]
        return self.filled(self.answer_templates[len(texts)], texts)

    def rendered(self, messages):
        """The text of messages by the tokenizer's own template, with the tools, where a response starts."""
        return render(self.tokenizer, messages, tools=self.tools, **self.switches).removesuffix(OPEN_THOUGHT)

    def filled(self, rendered, texts):
        """Ids of a rendered template in which each MARK stands for a text.

        Tokenizers encode what is between special tokens separately: so the ids are those of the whole, but
        special tokens in the texts are text. ValueError if a text's MARK is missing.
        """
        if not all(MARK.format(k) in rendered for k, text in enumerate(texts) if text):
            raise ValueError(f"{self.tokenizer.name_or_path}: its chat template leaves out the rules, the "
                             "first message or the tools' answers, which this --env has")
        ids = []
        for piece in self.pieces(rendered):
            ids += [piece] if isinstance(piece, int) else self.encode(
                re.sub(MARK.format(r"(\d+)"), lambda mark: texts[int(mark[1])], piece))
        return ids

    def _pieces(self, rendered):
        """A rendered template cut at its special tokens: their ids, and the texts between them."""
        cut = re.split(f"({'|'.join(map(re.escape, self.special))})", rendered)
        return [self.special.get(piece, piece) for piece in cut if piece]

    def ask(self, reply):
        """The end of a prompt: the admissible commands, if shown, and the response format."""
        ask, own = ASK[self.style], self.own_ask or ""
        if own or self.own_parse:
            ask = ask.replace(OWN_FORMAT, f"Close the tag. {own}".strip()) if self.style == "tags" else own
        listed = self.listed(reply)
        if not listed or reply.objects:                        # of templates no command is word for word
            ask = ask.replace(", word for word from the list,", "")
        return listed + ask

    def listed(self, reply):
        """The admissible commands, as prompts show them; "" if they do not, or if there are none."""
        return possible(reply) if self.show_admissible and reply.admissible else ""

    def frame_tokens(self, reply, first=False):
        """Number of a message's tokens beyond its observation and its list of commands, if any."""
        texts = len(self.encode(reply.observation)) + len(self.encode(self.listed(reply)))
        return len(self.observe(reply, first)) - texts

    def respond(self, command, tag="monitor", thought=None):
        """Ids of a demonstration's response: the command, with a thought if the style has one.

        tag: of style tags. thought: None for a fixed sentence that names the command.
        """
        if self.style == "plain":
            text = command
        elif self.style == "tags" and self.small:
            text = f"<{tag}>{command}"
        else:
            tag = "think" if self.style == "think" else tag
            text = (f"<{tag}>\n{thought or OWN_THOUGHT}\n</{tag}>\n\n{command}" if self.own_parse else
                    f"<{tag}>{thought or THOUGHT.format(command=command)}</{tag}><action>{command}</action>")
        return self.encode(text) + self.end_ids

    def restriction(self, commands):
        """A Restriction of one response to these commands.

        A thought before the command is free. Once the response has reached "<action" in the form that `parse`
        accepts, one of the commands must follow, then </action> and the stop token. ValueError for an
        environment's own format.
        """
        if self.own_parse and not self.bare:
            raise ValueError("--admissible-only: not with this --env, whose response format is its own")
        trie = trie_of(ids for command in commands for ids in self.encodings(command))
        return Restriction(trie, None if self.bare else self.command_starts)

    def _encodings(self, command):
        """All token sequences that give a command, from where the restriction starts to the stop token.

        ValueError if `parse` does not read the command back from each of them.
        """
        responses = [self.respond(command, tag) for tag in (TAGS if self.style == "tags" else ("",))]
        if any(self.parse(self.decode(ids))[0] != command for ids in responses):
            raise ValueError(f"--admissible-only: no response can give the command {command!r}")
        if self.bare:
            return responses
        ids = responses[0]             # its end alone might be encoded otherwise, as by SentencePiece's
        start = next((n for n in range(1, len(ids)) if self.command_starts(ids[:n])), None)
        if start is None:
            raise ValueError(f"--admissible-only: a token spans the start of the command {command!r}")
        return [ids[start:]]

    def command_starts(self, ids):
        """Whether a response that consists of `ids` continues with its command."""
        end = self.tokenizer.decode(ids[-len(ACTION_START):])        # a token is at least one byte
        return end.endswith(ACTION_START) and bool(re.fullmatch(PREFIX[self.style], self.decode(ids)))

    def parse(self, text):
        """(command, tag) of a response's text; (None, None) if malformed. Only style "tags" has tags.

        An environment's own `parse` gets the text after the thought or the tag; a thought that does not end,
        or a second one, is malformed. PluginError if it returns anything but a text or None.
        """
        if self.own_parse:
            return self.parse_own(text)
        if self.style == "plain":
            return text.strip() or None, None
        if self.style == "think":
            match = THOUGHT_ACTION.fullmatch(text)
            return (match[1].strip() or None) if match else None, None
        match = (SMALL_TAG_ACTION if self.small else TAG_ACTION).fullmatch(text)
        command = match[2].strip() if match else ""
        return (command, match[1]) if command else (None, None)

    def parse_own(self, text):
        """`parse`, for an environment with its own."""
        tag = None
        if self.style == "tags":
            match = re.match(TAG if self.small else TAGGED, text)
            if not match:
                return None, None
            tag, text = match[1], text[match.end():]
        elif self.style == "think":
            text = text.split("</think>", 1)[-1].lstrip()
            if "<think>" in text:                                # which did not end, or is another one
                return None, None
        command = self.own_parse(text)
        refuse("" if command is None or isinstance(command, str) else
               f"it returned {command!r:.60}; expected text or None", self.environment, "parse")
        return (command, tag) if command else (None, None)


def possible(reply):
    """The text that lists a reply's admissible commands."""
    commands = POSSIBLE.format(admissible="\n".join(c for c in reply.admissible if c != "help"))
    return commands + (OBJECTS.format(objects=", ".join(reply.objects)) if reply.objects else "")


def templates_of(tokenizer, switches):
    """What surrounds user messages, by the tokenizer's own template: (first, later, end of a response).

    The first two are texts with HOLE for the message: the first message of a conversation, with the
    template's own system message if it has one, and one after a response's end. Both end where the next
    response starts.
    switches: the template's own, such as enable_thinking. ValueError for a tokenizer without a chat template,
    or whose template shows no response or no token that ends it.
    """
    name, marks = tokenizer.name_or_path, [MARK.format(k) for k in range(3)]
    if not tokenizer.chat_template:
        raise ValueError(f"{name}: no chat template (chat_template.jinja, or chat_template in "
                         "tokenizer_config.json): a model that was never taught to chat")
    user, response, later = marks
    messages = [{"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks)]
    first = render(tokenizer, messages[:1], **switches)
    after = render(tokenizer, messages, **switches).partition(response)[2]
    end = next((token for token in special_tokens(tokenizer) if after.lstrip().startswith(token)), None)
    if user not in first or later not in after or end is None:
        raise ValueError(f"{name}: its chat template has no turn of an assistant that a token ends")
    after = after.partition(end)[2]
    return (*(text.replace(mark, HOLE).removesuffix(OPEN_THOUGHT)
              for text, mark in ((first, user), (after, later))), end)


def render(tokenizer, messages, **switches):
    """The text of messages by the tokenizer's own template, up to where a response starts. ValueError
    names the folder of a template that cannot render them.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False,
                                             date_string=DATE, **switches)
    except Exception as error:                    # of the template's own, such as "only user and assistant"
        raise ValueError(f"{tokenizer.name_or_path}: its chat template refuses "
                         f"{', '.join(message['role'] for message in messages)}: {error}") from None


def special_tokens(tokenizer):
    """{text: id} of the tokenizer's special tokens."""
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def is_word(tokenizer, i):
    """Whether texts have this token: transformers makes any pad_token an added one, a word such as "!", too,
    and saves it as one.
    """
    token, text = tokenizer.convert_ids_to_tokens(i), tokenizer.decode([i])
    return (tokenizer.backend_tokenizer.model.token_to_id(token) == i
            and tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True) == [i])


def is_small(tokenizer):
    """Whether this is the tokenizer of the small model (lm/small.py), which has a shorter template."""
    return {"<|user|>", "<|im_end|>"} <= tokenizer.get_added_vocab().keys()
