"""Prompt-based correction: mistakes that the actor finds in its own turns become an instruction for later episodes.

arXiv:2509.23870 §4.2. Every few iterations the turns that most of the actor's own verdicts call bad (judge.py) are put
together: a model that can write says what was wrong, and its critiques are merged by a large model or by itself; of a
small one the mistakes are counted by kind, and the instruction has the sentences of the most frequent kinds. The control
is an irrelevant instruction of equal length. The instruction stands before the first observation of later episodes.
The paper publishes neither the prompts nor how often, nor whether it stays on at evaluation: flags of gcd.py.
Left out: instructions for one task type only.

Read `new_instruction`; the last section is for the cold start, without which the words would mean nothing to a model
that learnt to read from demonstrations.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass

import parallel
import rollout
from judge import observations
from parallel import stream

KINDS = {
    "refused": "Give only commands that are possible here.",
    "repeated": "Do not give the same command twice in the same place.",
    "revisited": "Do not go back to where nothing is new.",
    "undone": "Do not do what you will have to undo.",
}
IRRELEVANT = {                # word for word as long, in words and in Qwen's tokens, and of no use in any game
    "refused": "Sing only songs that are popular there.",
    "repeated": "Do not wear the same hat twice in the same week.",
    "revisited": "Do not sail out to where nothing is green.",
    "undone": "Do not say what you will have to sing.",
}
FILLER = ("The rivers of the north freeze in winter and melt again in April when the ships come back to the old "
          "towns on the coast with letters and wool for people who have waited since the first snow").split()
CRITIQUE = ("Your last command was not a good step. In one sentence, without naming any place or thing, say what kind "
            "of mistake it is and what to do instead.")
MERGE = """An agent that plays text games said this of its own mistakes:

{critiques}

Merge what they have in common into one coherent instruction to the agent, of at most 60 words, that helps in other \
games too. Give the instruction alone."""
MOST_CRITIQUES = 16           # that are merged
MOST_CHARACTERS = 500         # of an instruction, should the 60 words not be kept
MARKUP = re.compile(r"<think>.*?</think>|<[^<>]*>|[<>]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Instruction:
    """What is put before the first observation of later episodes, and where it comes from."""

    text: str
    made_from: dict | list        # mistakes by kind, or the critiques that were merged
    iteration: int
    control: bool                 # an irrelevant one of the length of the one that was made


def kind_of(episode, t):
    """The kind of mistake that turn t would be, if it is one, by what was recorded; the first that fits.

        refused:    no command, or one that was not possible
        repeated:   given before in the same state (anchor)
        revisited:  what it led to had been seen before
        undone:     the state that it acted on is seen again later (the rule's "bad")
        other:      none of these
    """
    turn, seen = episode.turns[t], observations(episode)
    if not turn.valid:
        return "refused"
    if any((turn.anchor, turn.action) == (old.anchor, old.action) for old in episode.turns[:t]):
        return "repeated"
    if seen[t + 1] in seen[:t + 1]:
        return "revisited"
    return "undone" if seen[t] in seen[t + 1:] else "other"


def found_bad(judged, episodes):
    """Turns that most of the actor's own answers call bad, whatever their label: (index, episode, turn)."""
    return [(one.index, episodes[one.episode], one.turn) for one in judged
            if one.verdicts.count("bad") * 2 > len(one.verdicts)]


def counted_instruction(counts, n=2):
    """The sentences of the n most frequent kinds, {kind: count}; "" where no mistake is of a kind that has one."""
    named = sorted((kind for kind in KINDS if counts.get(kind)), key=lambda kind: -counts[kind])
    return " ".join(KINDS[kind] for kind in named[:n])


def plain_text(text):
    """Written text as one line without thoughts, tags and angle brackets: safe inside a prompt or a response."""
    return " ".join(MARKUP.sub(" ", text).split())


def critiques(model, chat, bad, sampling, seed, n_slots):
    """What the actor writes of its bad turns: (index, text). Answers that are cut or empty are left out."""
    prompts = [episode.turns[t].prompt_ids + episode.turns[t].response_ids + chat.message(CRITIQUE)
               for _, episode, t in bad]
    streams = [[stream(seed, 1, index)] for index, _, _ in bad]
    answers = rollout.answer(model, chat, prompts, streams, sampling, n_slots)
    written = [(index, plain_text(chat.decode(answer.ids)))
               for (index, _, _), (answer,) in zip(bad, answers) if not answer.truncated]
    return [(index, text) for index, text in written if text]


def merge_question(texts):
    """The question that makes critiques one instruction."""
    return MERGE.format(critiques="\n".join(f"- {text}" for text in texts))


def written_instruction(texts, ask_actor, endpoint=None):
    """The critiques merged by the large model, where there is one, else by the actor; "" without an answer."""
    question = merge_question(texts)
    answer = endpoint.ask([question])[0] if endpoint else ask_actor(question)
    text = textwrap.shorten(plain_text(answer or ""), MOST_CHARACTERS, placeholder="")
    return text if re.search(r"\w", text) else ""


def irrelevant(instruction, chat):
    """An instruction of no use and of equal length: sentence for sentence, or in tokens where it was written."""
    other = {KINDS[kind]: IRRELEVANT[kind] for kind in KINDS}
    sentences = re.findall(r"[^.]+\.", instruction)
    if sentences and all(sentence.strip() in other for sentence in sentences):
        return " ".join(other[sentence.strip()] for sentence in sentences)
    return filler(n_tokens(instruction, chat), chat)


def n_tokens(instruction, chat):
    """How many tokens an instruction adds to a prompt: a full stop and the empty line after it may be one."""
    return len(chat.encode(instruction + "\n\n"))


def filler(n, chat):
    """A text of n tokens, counted as in `n_tokens`: words of FILLER, again and again, and a full stop."""
    words, tried = FILLER[:1], 1
    while n_tokens(" ".join(words) + ".", chat) < n:
        longer = [*words, FILLER[tried % len(FILLER)]]
        words = longer if n_tokens(" ".join(longer) + ".", chat) <= n else words      # one word may be too long
        tried += 1
        assert tried < 20 * n + 200, f"no text of {n} tokens"
    return " ".join(words) + "."


def new_instruction(model, chat, bad, iteration, control, endpoint, sampling, seed, n_slots, counted=False):
    """An Instruction from the turns that the actor found bad (`found_bad`), the same on all ranks, or None.

    A model that can write says what was wrong, and its critiques are merged; of one that cannot, or if `counted`,
    mistakes are counted by kind. All ranks call this, inside `gathered`.
    """
    if counted or not chat.writes:
        kinds = sum(parallel.gather([kind_of(episode, t) for _, episode, t in bad]), [])
        made_from = dict(Counter(kinds).most_common())
        text = counted_instruction(made_from)
    else:
        first = sorted(sum(parallel.gather([index for index, _, _ in bad]), []))[:MOST_CRITIQUES]
        own = critiques(model, chat, [one for one in bad if one[0] in first], sampling, seed, n_slots)
        made_from = [critique for _, critique in sorted(sum(parallel.gather(own), []))]

        def ask_actor(question):
            prompt = chat.message(question, first=True)
            answer = rollout.answer(model, chat, [prompt], [[stream(seed, 2)]], sampling, n_slots)[0][0]
            return None if answer.truncated else chat.decode(answer.ids)

        text = parallel.on_main(lambda: written_instruction(made_from, ask_actor, endpoint)) if made_from else ""
    if not text:
        return None
    return Instruction(irrelevant(text, chat) if control else text, made_from, iteration, control)


# A cold start that gives the words of instructions their meaning

def instruction_phrases():
    """Every sentence of a counted instruction or its control: one token each in the small model's vocabulary."""
    return [*KINDS.values(), *IRRELEVANT.values()]


def random_instruction(rng):
    """"" in one of two cases, else one or two sentences, drawn from the useful and the irrelevant alike."""
    if rng.random() < 0.5:
        return ""
    return " ".join(rng.sample(instruction_phrases(), rng.choice((1, 2))))


def forbidden(instruction, episode):
    """Per turn, whether it would be a mistake of a kind that the instruction names.

    Whether it is a mistake is not looked at: an expert that goes back for what it needs also sees nothing new.
    """
    named = {kind for kind, sentence in KINDS.items() if sentence in instruction}
    return [kind_of(episode, t) in named for t in range(len(episode.turns))]
