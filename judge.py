"""GCD: the model judges its own actions. Labelled turns become questions, answers, rewards and samples.

The prompt of a question is the episode up to and including the judged response, without what followed, and
the question whether that was a good action. The model answers several times; an answer's advantage is its
reward minus the mean over that question's answers. arXiv:2509.23870 §4.1, whose Eq. 3 and prompts are
pictures that were not read, and which gives neither lambda nor the number of judged turns: all are ours.
Left out: a small model's reasoning before its one-word verdict.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import torch

from batching import sample_of
from infra.streams import generator, stream
from labels import label_turns, oracle_labels, rule_labels
from lm.engine import Response, answer
from losses import group_relative_advantage
from rollout import Episode

QUESTION = {"plain": "Was that a good action? good or bad",
            "think": "Before the game answers: given the task and all that has been seen, was your last "
            "command a good step? Think briefly, then answer <judge>good</judge> or <judge>bad</judge>."}
ANSWERS = ("good", "bad")
VERDICT = {"plain": r"\s*+(good|bad)\s*+",          # possessive: nothing is read twice, however long it is
           "think": r"(?s)(?:[^<]*+<think>(?:(?!</think>).)*+</think>)*+"
                    r"[^<]*+<judge>\s*+(good|bad)\s*+</judge>\s*+"}
LONGEST_ANSWER = 100_000       # characters; a longer one is unreadable
ANSWERS_PER_SLOT = 2           # sampled at once for each episode played at once: their rows are shorter, and
                               # a GPU's decode step takes little longer


@dataclass(slots=True)
class Question:
    """A turn to be judged: the prompt that asks about it, and the model's answers."""

    index: int                    # its number in this iteration, over all ranks
    episode: Episode
    t: int                        # the turn's index in the episode
    label: str                    # the rewarded answer, "good" or "bad" ("shuffled": by coin toss)
    prompt_ids: list[int]
    verb: str = ""                # of its command: see `auc`
    answers: list[Response] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    probability: float | None = None                          # of "good", by the value head

    @property
    def turn(self):
        """The rollout.Turn, to which label, oracle label and verdicts are written."""
        return self.episode.turns[self.t]

    @property
    def has_gradient(self):
        """Whether its answers differ in reward."""
        return len(set(self.rewards)) > 1

    @property
    def pair(self):
        """The number of its pair of a good and a bad turn, by which samples are split."""
        return self.index // 2


def question_style(chat):
    """The key of QUESTION and VERDICT: "plain" for prompts that ask for a bare command, answered in one word,
    else "think".
    """
    return "plain" if chat.bare else "think"


def question_message(chat):
    """Token ids of the question, which follow the judged response."""
    return chat.message(QUESTION[question_style(chat)])


def question_ids(chat, turn):
    """Token ids of the judged turn's prompt, its response, and the question."""
    return turn.prompt_ids + chat.closed(turn.response_ids) + question_message(chat)


def verdict_ids(chat, label):
    """Token ids of the bare verdict, stop token included: the answer that a demonstration shows."""
    text = label if question_style(chat) == "plain" else f"<judge>{label}</judge>"
    return chat.encode(text) + chat.end_ids


def parse_verdict(text, style):
    """"good", "bad", or None if the answer is unreadable. style: see `question_style`."""
    match = re.fullmatch(VERDICT[style], text) if len(text) <= LONGEST_ANSWER else None
    return match[1] if match else None


def candidates(episodes, kind, max_tokens, environment, by_endpoint=None):
    """Label every turn, and return [(episode.index, t, label)] of the labelled ones with fewer than
    max_tokens tokens, prompt included.

    kind, by_endpoint: see labels.label_turns.
    """
    return [(episode.index, t, label) for episode in episodes for t, (turn, label) in enumerate(
                zip(episode.turns, label_turns(episode, kind, environment, by_endpoint), strict=True))
            if label and turn.tokens < max_tokens]


def choose(candidates, kind, per_class, seed):
    """Draw equally many good and bad turns at random, at most per_class of each; none if a class is empty.

    candidates: those of all ranks, from which every rank makes the same choice. Good and bad alternate in
    the result, good first, so that any cut between pairs stays balanced. For "shuffled", each label is then
    replaced by a fair coin toss.
    """
    rng = generator(seed, 0)
    by_class = [[one for one in candidates if one[2] == label] for label in ANSWERS]
    picked = [[members[i] for i in torch.randperm(len(members), generator=rng)[:per_class].tolist()]
              for members in by_class]
    chosen = [one for pair in zip(*picked) for one in pair]               # as many as the smaller class has
    coins = torch.randint(2, (len(chosen),), generator=rng).tolist()
    tossed = [(e, t, ANSWERS[coin]) for (e, t, _), coin in zip(chosen, coins)]
    return tossed if kind == "shuffled" else chosen


def why_none(candidates, kind, first="GCD: no turn was judged", instead="--no-gcd"):
    """A warning where no turn can be judged: which class is missing, and what to try.

    candidates: those of `candidates`, which leaves out turns without room for a question. first: how the
    warning begins. instead: the flag that does without.
    """
    counts = Counter(label for _, _, label in candidates)
    return (f"{first}: of the turns with room for a question in --context, --judge-labels {kind} labels "
            f"{counts['good']} good and {counts['bad']} bad, and both are needed; try another kind, a larger "
            f"--context, or {instead}")


def questions(chat, episodes, chosen, environment, first=0):
    """Questions about the chosen turns that belong to these episodes, numbered from `first`. Writes these
    episodes' oracle labels, too.
    """
    here = {episode.index: episode for episode in episodes}
    for e in here.keys() & {e for e, _, _ in chosen}:
        oracle_labels(here[e], environment)
    turns = [(index, here[e], t, label) for index, (e, t, label) in enumerate(chosen, first) if e in here]
    return [Question(index, episode, t, label, question_ids(chat, episode.turns[t]),
                       environment.verb(episode.turns[t].action or "")) for index, episode, t, label in turns]


def answer_questions(model, chat, questions, group_size, sampling, seed, n_slots):
    """Let the model answer each question group_size times; n_slots answers are sampled at once.

    Writes answers and rewards to the questions, and verdicts to their turns.
    """
    streams = [[stream(seed, 1, question.index, i) for i in range(group_size)] for question in questions]
    prompts = [question.prompt_ids for question in questions]
    answered = answer(model, prompts, streams, chat.stop_ids, sampling, n_slots)
    for question, answers in zip(questions, answered):
        question.answers = answers
        write_verdicts(question, read_verdicts(chat, answers))


def read_verdicts(chat, answers):
    """The verdict in each answer, an lm.engine.Response; None if it is unreadable or truncated."""
    style = question_style(chat)
    return [None if a.truncated else parse_verdict(chat.decode(a.ids), style) for a in answers]


def write_verdicts(question, verdicts):
    """Write the rewards of the verdicts to the question: 1 right, 0 wrong, -0.1 unreadable (ours); and to its
    turn the verdicts, the label they were compared with, and the mean reward.
    """
    question.rewards = [-0.1 if verdict is None else float(verdict == question.label) for verdict in verdicts]
    question.turn.label, question.turn.verdicts = question.label, verdicts
    question.turn.judge_reward = sum(question.rewards) / len(verdicts)


def advantages(rewards, normalize_std=False):
    """Advantage of each answer to one question; exactly 0 if all rewards are equal.

        A = reward - mean, or (reward - mean) / (std + eps): GRPO's, std over the population
    """
    reward_A = torch.tensor(rewards, dtype=torch.double)
    return group_relative_advantage(reward_A, torch.zeros(len(rewards), dtype=torch.long),
                                    normalize_std).tolist()


def samples(questions, normalize_std=False):
    """Samples of the answers, with `advantages` over each question's answers. Only answer tokens are trained.

    Equal answers to one question have equal tokens, rewards and gradients: they become one sample with a
    count. A sample belongs to its episode's minibatch, where their common prefix is computed once. Its
    `turns` are the judged one.
    """
    result = []
    for question in questions:
        distinct = {}
        for response, advantage in zip(question.answers, advantages(question.rewards, normalize_std)):
            if (ids := tuple(response.ids)) in distinct:
                distinct[ids].count += 1
            else:
                distinct[ids] = sample_of(question.prompt_ids, response.ids, advantage,
                                          question.episode.index, response.logprob, kind="judge",
                                          turns=[question.turn])
        result += distinct.values()
    return result


def demonstrations(chat, questions, written=None, longest=math.inf):
    """Samples that imitate the right answers, and how many of them a large model wrote.

    written: a large model's text on each turn, imitated with its reasoning if it ends in the label and has at
    most `longest` tokens; otherwise the bare verdict is imitated.
    """
    result, n_written = [], 0
    for question, text in zip(questions, written or [None] * len(questions), strict=True):
        text = (text or "").strip()
        ids = chat.encode(text) + chat.end_ids
        fits = parse_verdict(text, "think") == question.label and "<|" not in text and len(ids) <= longest
        n_written += fits
        ids = ids if fits else verdict_ids(chat, question.label)
        result.append(sample_of(question.prompt_ids, ids, 1.0, question.pair, kind="judge"))
    return result, n_written


def value_samples(questions):
    """Samples for the value head: prompt and response, with the label at the last token."""
    return [sample_of(question.turn.prompt_ids + question.turn.response_ids, [], 0.0, question.pair,
                      kind="judge", label=float(question.label == "good")) for question in questions]


def write_value_verdicts(questions, probabilities):
    """Write each question's probability of "good", from the value head, its verdict ("good" from 1/2 on) and
    its reward.
    """
    for question, probability in zip(questions, probabilities, strict=True):
        question.probability = probability
        write_verdicts(question, ["good" if probability >= 0.5 else "bad"])


# A large model: transcripts and labels

TRANSCRIPT_HEAD = ('An agent plays a text game. This is what it has seen, and after each ">" the command '
                   'that it gave:')
JUDGE_TURN = (
    "The game has not yet answered the last command. Given the task and all that has been seen, was that "
    "command a good step? Think briefly, then end with <judge>good</judge> or <judge>bad</judge>.")
THINK_AHEAD = (
    "Write the thought with which the agent came to its last command: one or two sentences, in the first "
    "person, on what it has seen so far and not on what that command will bring. Give the thought alone.")


def transcript(episode, t, question=JUDGE_TURN):
    """An episode up to and including turn t's command (its response, if it had none), then a question."""
    turns = [f"{turn.observation}\n\n> {turn.action or turn.response}" for turn in episode.turns[:t + 1]]
    return "\n\n".join([TRANSCRIPT_HEAD, *turns, question])


def endpoint_labels(episodes, endpoint, n, seed, kind="rule+endpoint", max_tokens=math.inf):
    """Ask the large model about at most n turns. Returns {(episode.index, t): label}.

    Turns are drawn at random from those with fewer than max_tokens tokens that the rule leaves unlabelled, or
    for kind "endpoint" from all of that length. A label is None if there is no answer or an unreadable one.
    endpoint: any object with `ask(questions) -> answers`.
    """
    wanted = [(episode, t) for episode in episodes for t, label in enumerate(rule_labels(episode))
              if (kind == "endpoint" or label is None) and episode.turns[t].tokens < max_tokens]
    drawn = [wanted[i] for i in torch.randperm(len(wanted), generator=generator(seed))[:n].tolist()]
    answers = endpoint.ask([transcript(*turn) for turn in drawn])
    return {(episode.index, t): parse_verdict(answer or "", "think")
            for (episode, t), answer in zip(drawn, answers, strict=True)}


# Metrics

@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """What the metrics need of one judged turn; small, because ranks exchange it."""

    label: str
    oracle: str | None
    verb: str
    verdicts: tuple[str | None, ...]
    rewards: tuple[float, ...]
    probability: float | None = None      # of "good", by the value head

    @property
    def share_good(self):
        """The value head's probability, or the share of "good" among readable answers (1/2 without any)."""
        if self.probability is not None:
            return self.probability
        readable = [verdict for verdict in self.verdicts if verdict]
        return readable.count("good") / len(readable) if readable else 0.5


def verdict_records(questions):
    """VerdictRecords of this rank's judged turns."""
    return [VerdictRecord(question.label, question.turn.oracle, question.verb,
                          tuple(question.turn.verdicts), tuple(question.rewards), question.probability)
            for question in questions]


def agreement(records, truth):
    """{"accuracy_good", "accuracy_bad": share of right answers by class, an unreadable one is wrong;
    "balanced_accuracy": their mean; "auc": of share_good}.

    truth: "good", "bad" or None for each VerdictRecord. nan where a class is missing.
    """
    right = {label: [v == label for record, t in zip(records, truth) if t == label for v in record.verdicts]
             for label in ANSWERS}
    good, bad = (sum(hits) / len(hits) if hits else math.nan for hits in right.values())
    return {"accuracy_good": good, "accuracy_bad": bad, "balanced_accuracy": (good + bad) / 2,
            "auc": auc(records, truth)}


def auc(records, truth, within_verbs=False):
    """Probability that a good turn's share_good exceeds a bad one's, ties half (Mann-Whitney); nan without
    pairs.

    within_verbs: only pairs of one verb. Good turns are mostly "move X to Y": to know that is no judgement.
    """
    good, bad = ([(record.verb, record.share_good) for record, t in zip(records, truth) if t == label]
                 for label in ANSWERS)
    wins = [(share > other) + 0.5 * (share == other) for verb, share in good for other_verb, other in bad
            if verb == other_verb or not within_verbs]
    return sum(wins) / len(wins) if wins else math.nan


def metrics(records):
    """Metrics of one iteration's judging over all ranks' records; only the count if nothing was judged."""
    if not records:
        return {"judge/turns": 0}
    verdicts = [verdict for record in records for verdict in record.verdicts]
    oracle = [record.oracle for record in records]
    result = {"turns": len(records), **agreement(records, [record.label for record in records]),
              **{f"{key}_oracle": value for key, value in agreement(records, oracle).items()},
              "auc_oracle_within_verbs": auc(records, oracle, within_verbs=True),
              "unreadable_frac": verdicts.count(None) / len(verdicts),
              "reward": sum(sum(record.rewards) for record in records) / len(verdicts)}
    if len(verdicts) > len(records):                                  # not a value head's: one verdict each
        result["variance_frac"] = sum(len(set(record.rewards)) > 1 for record in records) / len(records)
    return {f"judge/{key}": value for key, value in result.items()}
