"""Prompt-based correction: mistakes that the model finds in its own turns become an instruction to it.

A mistake is a turn that most of the model's own verdicts call bad. A model that writes gives its reasons,
which are merged into an instruction; a small model's mistakes are counted by kind, and the most frequent
kinds have a sentence each. The instruction precedes the first observation of later episodes; the control is
an irrelevant text of equal length. arXiv:2509.23870 §4.2, which has its prompts as pictures, which were not
read, and says neither how often a new instruction is made nor whether it is kept at evaluation: those are
flags. Left out: instructions for one task type. Start reading at `correct`.
"""

import itertools
import re
import textwrap
from collections import Counter

from infra import parallel
from infra.streams import CORRECTION, stream
from judge import LONGEST_ANSWER
from labels import anchors
from lm.engine import answer

KINDS = {"refused": "Give only commands that are possible here.",
         "repeated": "Do not give the same command twice in the same place.",
         "revisited": "Do not go back to where nothing is new.",
         "undone": "Do not do what you will have to undo."}
IRRELEVANT = {"refused": "Sing only songs that are popular there.",    # as many words and Qwen tokens
              "repeated": "Do not wear the same hat twice in the same week.",
              "revisited": "Do not sail out to where nothing is green.",
              "undone": "Do not say what you will have to sing."}
FILLER = ("The rivers of the north freeze in winter and melt again in April when the ships come back to the "
          "old towns on the coast with letters and wool for people who have waited since the first snow")
MERGE = ("An agent that plays text games said this of its own mistakes:\n\n{critiques}\n\n"
         "Merge what they have in common into one coherent instruction to the agent, of at most 60 words, "
         "that helps in other games too. Give the instruction alone.")
MOST_CRITIQUES = 16           # merged at most
MOST_CHARACTERS = 500         # of a critique, and of an instruction that ignores the 60 words
MARKUP = re.compile(r"<[^<>]*>|[<>]")


def kind_of(episode, t):
    """The kind of mistake that turn t is if it is one: the first that fits.

        refused:    no command, or an inadmissible one
        repeated:   the same command was given before at the same anchor
        revisited:  the resulting observation was seen before
        undone:     the turn's anchor is seen again later (the rule's "bad")
        other:      none of these
    """
    turn, seen = episode.turns[t], anchors(episode)
    if not turn.valid:
        return "refused"
    if any((turn.anchor, turn.action) == (old.anchor, old.action) for old in episode.turns[:t]):
        return "repeated"
    if seen[t + 1] in seen[:t + 1]:
        return "revisited"
    return "undone" if seen[t] in seen[t + 1:] else "other"


def found_bad(questions):
    """The judged turns that most of the model's verdicts call bad, whatever their label."""
    return [question for question in questions
            if question.turn.verdicts.count("bad") * 2 > len(question.turn.verdicts)]


def counted_instruction(counts):
    """The sentences of the two most frequent kinds in {kind: count}; "" if none has a sentence."""
    named = sorted((kind for kind in KINDS if counts.get(kind)), key=lambda kind: -counts[kind])
    return " ".join(KINDS[kind] for kind in named[:2])


def without_markup(text):
    """Text as one line without tags and angle brackets: safe in a prompt or a response."""
    return " ".join(MARKUP.sub(" ", text).split())


def plain_text(text):
    """`without_markup`, and without the reasoning between think tags."""
    *thought, rest = text[:LONGEST_ANSWER].split("</think>")
    return without_markup(" ".join([part.partition("<think>")[0] for part in thought] + [rest]))


def critique(chat, question):
    """The reasoning of the first "bad" verdict that gives one, thoughts included, as one line; or ""."""
    texts = [chat.decode(given.ids).rpartition("<judge>")[0]
             for given, verdict in zip(question.answers, question.turn.verdicts) if verdict == "bad"]
    reason = next(filter(None, map(without_markup, texts)), "")
    return textwrap.shorten(reason, MOST_CHARACTERS, placeholder="")


def irrelevant(instruction, chat):
    """An irrelevant text as long as the instruction: sentence for sentence, or in tokens if a model wrote it.

    Of FILLER's words and a full stop, which may be one token together with the empty line after it.
    """
    other = dict(zip(KINDS.values(), IRRELEVANT.values()))
    sentences = [sentence.strip() for sentence in re.findall(r"[^.]+\.", instruction)]
    if sentences and other.keys() >= set(sentences):
        return " ".join(other[sentence] for sentence in sentences)
    filler, n = itertools.cycle(FILLER.split()), len(chat.encode(instruction + "\n\n"))
    text = f"{next(filler)}.\n\n"
    for word in itertools.islice(filler, 20 * n + 200):
        longer = text.replace(".", f" {word}.")
        if len(chat.encode(text)) < n >= len(chat.encode(longer)):           # a word may be too long
            text = longer
    assert len(chat.encode(text)) >= n, f"no text of {n} tokens"
    return text.strip()


def merged(run, critiques, seed):
    """Let the large model or, without one, the model merge critiques into an instruction. For rank 0 alone.

    Returns "" without critiques, or without a usable answer.
    """
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


def correct(run, i, questions):
    """Every --correction-every iterations, make a new instruction from the turns that the model calls bad.

    It precedes the first observation of later episodes. From critiques or, if the judge's answers hold no
    reasons (a small model's, or --prompt plain), from counts by kind. Only this iteration's judged turns
    count (ours; the paper gives no interval). All ranks call this and get the same.
    """
    config = run.config
    if (i + 1) % config.correction_every:
        return
    bad = [(question.index, kind_of(question.episode, question.t), critique(run.chat, question))
           for question in found_bad(questions)]
    bad, seed = sorted(sum(parallel.all_gather(bad), [])), stream(config.seed, CORRECTION, i)
    if run.chat.bare:
        made_from = dict(Counter(kind for _, kind, _ in bad).most_common())
        text = counted_instruction(made_from)
    else:
        made_from = [why for _, _, why in bad if why][:MOST_CRITIQUES]
        text = parallel.on_rank0(lambda: merged(run, made_from, seed))
    if text:
        control = config.correction == "irrelevant"
        run.instruction = irrelevant(text, run.chat) if control else text
        run.log({"phase": "correction", "text": run.instruction, "made_from": made_from, "control": control})
        run.log_endpoint()
    else:
        reasons = sum(bool(why) for *_, why in bad)
        run.warn_once("no instruction", f"--correction={config.correction}: iteration {i} made no "
                      f"instruction: {len(bad)} judged turns were found bad, {reasons} with a reason")


def instruction_phrases():
    """All sentences of counted instructions and their controls: each is one token of the small model."""
    return [*KINDS.values(), *IRRELEVANT.values()]


def random_instruction(rng):
    """For the cold start: "" in half of the cases, else one or two sentences, useful or irrelevant."""
    return "" if rng.random() < 0.5 else " ".join(rng.sample(instruction_phrases(), rng.choice((1, 2))))


def forbidden(instruction, episode):
    """For each turn, whether it looks like a mistake of a kind that the instruction names.

    It may be none: an expert that goes back for what it needs also sees nothing new.
    """
    named = {kind for kind, sentence in KINDS.items() if sentence in instruction}
    return [kind_of(episode, t) in named for t in range(len(episode.turns))]
