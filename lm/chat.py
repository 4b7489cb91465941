"""How text becomes tokens, and back: three chat templates, three styles of prompt, and what a response means.

Templates are rendered by hand, because only so is it certain that a longer conversation begins with the
shorter one, token for token (tests hold them against the tokenizers' own). That is why they differ from
Qwen3's in one point: its own drops what was thought in earlier turns, and the empty thought before a turn
that was to have none. Here both stay, as sampled: an episode is one sequence, computed once, and trained on
what the model had before it. Left out: tools, and system messages but Qwen2.5's own.
"""

import re
from functools import lru_cache, partial

from lm.restrict import Restriction, trie_of

# User messages, up to where the assistant begins to speak: the first, and one after an assistant's stop token
SMALL = ("<|user|>{}<|assistant|>", "<|user|>{}<|assistant|>")
HEAD = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHATML = (HEAD + USER, "\n" + USER)
THOUGHTLESS = "<think>\n\n</think>\n\n"       # how Qwen3's template has the assistant begin, thinking off

RULES = ("You play a text game. Each turn you give one command and the game answers with what you see.\n\n"
         "{observation}\n\n{ask}")
POSSIBLE = "Commands that are possible now:\n{admissible}\n\n"
OBJECTS = "OBJ stands for one of: {objects}\n\n"
ASK = {
    "think": "First reason about the next command inside <think> </think>, then give exactly one command, "
             "word for word from the list, inside <action> </action>.",
    "tags": "First write one short sentence inside exactly one of these tags: <planning> a numbered plan, at "
            "the start or when the plan changes; <explore> where else to look, when something is missing; "
            "<reflection> what went wrong and what to do instead, after a command that failed; <monitor> how "
            "far the plan has come, otherwise. Close the tag, then give exactly one command inside <action> "
            "</action>.",
}
TAGS = ("planning", "explore", "reflection", "monitor")      # RLVMR, arXiv:2507.22844
TAG = f"<({'|'.join(TAGS)})>"
BEGINS, COMMAND = "<action", r">([^<>]*)</action>\s*"         # in Qwen's tokens nothing joins the two
BEFORE = {"think": r"(?s)\s*<think>.*</think>\s*" + BEGINS,
          "tags": r"\s*" + TAG + r"\s*[^<>\s][^<>]*</\1>\s*" + BEGINS}
THOUGHT_ACTION, TAG_ACTION = (re.compile(before + COMMAND) for before in BEFORE.values())
SMALL_TAG_ACTION = re.compile(TAG + r"([^<>]*)", re.DOTALL)
THOUGHT = "The next thing to do for the task is: {command}."


class Chat:
    """Text to tokens and back, in one of three styles.

    plain: the observation in, the command out                                  (the small model)
    think: rules and admissible commands in, <think> and <action> out           (Hugging Face models)
    tags:  the same with one of RLVMR's tags for <think>; the small model gives the bare tag and the command

    Qwen3, told by its tokenizer, thinks in style think, and not in style tags.

    admissible: whether prompts list what is possible (never in the small model's own template).
    nothing: what a response without a command is answered with, and any other that changes nothing.
    """

    def __init__(self, tokenizer, style, admissible=True, nothing="Nothing happens."):
        assert style in ("plain", "think", "tags"), style
        self.tokenizer, self.style, self.small = tokenizer, style, is_small(tokenizer)
        assert self.small or style != "plain", "plain is the small model's style"
        self.templates = templates_of(tokenizer, style)
        ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])   # Qwen2.5 trains both
        self.stop_ids = tuple(sorted({tokenizer.eos_token_id, *ends} - {None}))
        self.bare = style == "plain" or self.small and style == "tags"     # rules are wasted on a small model
        self.admissible, self.nothing = admissible and not self.bare, nothing
        # token ids of a text, remembered: observations repeat by the thousand
        self.encode = lru_cache(100_000)(partial(tokenizer.encode, add_special_tokens=False))
        self.sayings = lru_cache(100_000)(self._sayings)

    @property
    def writes(self):
        """Whether the model is one that can write sentences: thoughts, critiques."""
        return not self.small

    def decode(self, ids):
        """Text of a response without its stop token; other special tokens stay, so that they can be seen."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def message(self, content, first=False):
        """Ids of a user message, up to where the assistant begins to speak."""
        return self.encode(self.templates[0 if first else 1].format(content))

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
            return ASK[self.style].replace(", word for word from the list,", "")
        shown = POSSIBLE.format(admissible="\n".join(c for c in reply.admissible if c != "help"))
        if reply.objects:
            shown += OBJECTS.format(objects=", ".join(reply.objects))
        return shown + ASK[self.style]

    def respond(self, command, tag="monitor", thought=None):
        """Ids of the response that a demonstration gives: the command, with its thought (None: a set one)."""
        if self.style == "plain":
            text = command
        elif self.style == "tags" and self.small:
            text = f"<{tag}>{command}"
        else:
            tag = "think" if self.style == "think" else tag
            text = f"<{tag}>{thought or THOUGHT.format(command=command)}</{tag}><action>{command}</action>"
        return self.encode(text) + self.encode("<|im_end|>")

    def restriction(self, commands):
        """What a response may be where only these commands are possible.

        Of a response with a thought, that and all else before its command are free. Once it has come, in the
        form that `parse` reads, to "<action", one of the commands follows, then </action> and the stop token.
        """
        trie = trie_of(ids for command in commands for ids in self.sayings(command))
        return Restriction(trie, None if self.bare else self.command_begins)

    def _sayings(self, command):
        """The ids of a command where it begins, in each way of giving it, as `respond` has them."""
        ways = [self.respond(command, tag) for tag in (TAGS if self.style == "tags" else ("",))]
        if any(self.parse(self.decode(ids))[0] != command for ids in ways):
            raise ValueError(f"--admissible-only: no response can give the command {command!r}")
        return ways if self.bare else [self.encode(f">{command}</action>") + self.encode("<|im_end|>")]

    def command_begins(self, ids):
        """Whether a response, free so far, has come to where its command begins."""
        last = self.tokenizer.decode(ids[-len(BEGINS):])             # a token has a byte or more
        return last.endswith(BEGINS) and bool(re.fullmatch(BEFORE[self.style], self.decode(ids)))

    def parse(self, text):
        """(command, tag) of a response; (None, None) where it is malformed. Only style "tags" has tags."""
        if self.style == "plain":
            return text.strip() or None, None
        if self.style == "think":
            match = THOUGHT_ACTION.fullmatch(text)
            return (match[1].strip() or None) if match else None, None
        match = (SMALL_TAG_ACTION if self.small else TAG_ACTION).fullmatch(text)
        command = match[2].strip() if match else ""
        return (command, match[1]) if command else (None, None)


def templates_of(tokenizer, style):
    """The templates of the model that the tokenizer is of: the small one, Qwen3, or Qwen2 and 2.5.

    Qwen3's has <think> as a token and no default system message. Where its own template can switch thinking
    off, style "tags" does. Those of its 2507 models cannot: Instruct never thinks, and what Thinking's
    template begins with, "<think>", is here the model's to write.
    """
    if is_small(tokenizer):
        return SMALL
    if "<think>" not in tokenizer.get_added_vocab():
        return CHATML
    switched_off = style == "tags" and "enable_thinking" in (tokenizer.chat_template or "")
    user = USER + THOUGHTLESS if switched_off else USER
    return user, "\n" + user


def is_small(tokenizer):
    """Whether this is the small default model's tokenizer, which has its own, shorter template."""
    return "<|user|>" in tokenizer.get_added_vocab()
