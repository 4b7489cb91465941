"""Prompt-based correction: mistakes that the actor finds in its own turns become an instruction to it.

Where most of a model's own verdicts call a turn bad (judge.py) and it can write, what it says before such a
verdict is its critique, and critiques are merged; of a small one such mistakes are counted by kind, and the
most frequent kinds have a sentence each. This stands before the first observation of later episodes; the
control is an irrelevant text of equal length. arXiv:2509.23870 §4.2. The paper publishes neither prompts nor
how often, nor whether it is kept at evaluation: flags of gcd.py. Left out: instructions for one task type.
Read `correct`.
"""

import itertools
import re
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass

from judge import LONGEST_ANSWER, observations
from lm.engine import answer
from run import parallel
from run.parallel import stream

CORRECTION = 9                # what a random stream is for: the second number of its name
KINDS = {"refused": "Give only commands that are possible here.",
         "repeated": "Do not give the same command twice in the same place.",
         "revisited": "Do not go back to where nothing is new.",
         "undone": "Do not do what you will have to undo."}
IRRELEVANT = {"refused": "Sing only songs that are popular there.",    # as long in words and Qwen's tokens
              "repeated": "Do not wear the same hat twice in the same week.",
              "revisited": "Do not sail out to where nothing is green.",
              "undone": "Do not say what you will have to sing."}
FILLER = ("The rivers of the north freeze in winter and melt again in April when the ships come back to the "
          "old towns on the coast with letters and wool for people who have waited since the first snow")
MERGE = ("An agent that plays text games said this of its own mistakes:\n\n{critiques}\n\n"
         "Merge what they have in common into one coherent instruction to the agent, of at most 60 words, "
         "that helps in other games too. Give the instruction alone.")
MOST_CRITIQUES = 16           # that are merged
MOST_CHARACTERS = 500         # of a critique, and of an instruction should the 60 words not be kept
MARKUP = re.compile(r"<[^<>]*>|[<>]")


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


def found_bad(judged):
    """The judged turns that most of the actor's own answers call bad, whatever their label."""
    return [question for question in judged
            if question.turn.verdicts.count("bad") * 2 > len(question.turn.verdicts)]


def counted_instruction(counts, n=2):
    """The sentences of the n most frequent kinds, {kind: count}; "" where no kind has one."""
    named = sorted((kind for kind in KINDS if counts.get(kind)), key=lambda kind: -counts[kind])
    return " ".join(KINDS[kind] for kind in named[:n])


def one_line(text):
    """Written text as one line without tags and angle brackets: safe in a prompt or a response."""
    return " ".join(MARKUP.sub(" ", text).split())


def plain_text(text):
    """The same without what was thought."""
    *thought, rest = text[:LONGEST_ANSWER].split("</think>")
    return one_line(" ".join([part.partition("<think>")[0] for part in thought] + [rest]))


def critique(chat, question):
    """What the first of the actor's answers that call a turn bad, and say why, says before its verdict, its
    thoughts too: one line, "" where all are bare."""
    texts = [chat.decode(given.ids).rpartition("<judge>")[0]
             for given, verdict in zip(question.answers, question.turn.verdicts) if verdict == "bad"]
    why = next(filter(None, map(one_line, texts)), "")
    return textwrap.shorten(why, MOST_CHARACTERS, placeholder="")


def irrelevant(instruction, chat):
    """An instruction of no use and of equal length: sentence for sentence, or in tokens where it was written:
    words of FILLER and a full stop, which may be one token with the empty line after it."""
    other = dict(zip(KINDS.values(), IRRELEVANT.values()))
    sentences = [sentence.strip() for sentence in re.findall(r"[^.]+\.", instruction)]
    if sentences and other.keys() >= set(sentences):
        return " ".join(other[sentence] for sentence in sentences)
    words, n = itertools.cycle(FILLER.split()), len(chat.encode(instruction + "\n\n"))
    text = f"{next(words)}.\n\n"
    for word in itertools.islice(words, 20 * n + 200):
        longer = text.replace(".", f" {word}.")
        if len(chat.encode(text)) < n >= len(chat.encode(longer)):           # a word may be too long
            text = longer
    assert len(chat.encode(text)) >= n, f"no text of {n} tokens"
    return text.strip()


def merged(run, critiques, seed):
    """What the large model, or else the actor, merges critiques into; "" without any, or without an answer.
    For rank 0 alone."""
    if not critiques:
        return ""
    question = MERGE.format(critiques="\n".join(f"- {text}" for text in critiques))
    if run.endpoint:
        merged, = run.endpoint.ask([question])
    else:
        (given,), = answer(run.sampler, [run.chat.message(question, first=True)], [[stream(seed, 1)]],
                           run.chat.stop_ids, run.sampling(), run.config.slots)
        merged = "" if given.truncated else run.chat.decode(given.ids)
    text = textwrap.shorten(plain_text(merged or ""), MOST_CHARACTERS, placeholder="")
    return text if re.search(r"\w", text) else ""


def correct(run, i, judged):
    """Every few iterations, an instruction from the turns that the actor found bad, the same on all ranks.
    Critiques, or counts by kind where it cannot write. All ranks call this."""
    config = run.config
    if config.correction == "off" or (i + 1) % config.correction_every:
        return
    bad = [(question.index, kind_of(question.episode, question.t), critique(run.chat, question))
           for question in found_bad(judged)]
    bad, seed = sorted(sum(parallel.gather(bad), [])), stream(config.seed, CORRECTION, i)
    if config.correction_from == "counts" or not run.chat.writes:
        made_from = dict(Counter(kind for _, kind, _ in bad).most_common())
        text = counted_instruction(made_from)
    else:
        made_from = [why for _, _, why in bad if why][:MOST_CRITIQUES]
        text = parallel.on_main(lambda: merged(run, made_from, seed))
    if text:
        control = config.correction == "irrelevant"
        run.instruction = Instruction(irrelevant(text, run.chat) if control else text, made_from, i, control)
        run.log({"phase": "correction"} | asdict(run.instruction))
        run.log_endpoint()


def instruction_phrases():
    """Every sentence of a counted instruction or its control: each is one token of the small model."""
    return [*KINDS.values(), *IRRELEVANT.values()]


def random_instruction(rng):
    """For the cold start: "" in one of two cases, else one or two sentences, useful and irrelevant alike."""
    return "" if rng.random() < 0.5 else " ".join(rng.sample(instruction_phrases(), rng.choice((1, 2))))


def forbidden(instruction, episode):
    """Per turn, whether it would be a mistake of a kind that the instruction names. It may be none: an expert
    that goes back for what it needs also sees nothing new."""
    named = {kind for kind, sentence in KINDS.items() if sentence in instruction}
    return [kind_of(episode, t) in named for t in range(len(episode.turns))]
