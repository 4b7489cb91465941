"""GCD: the actor judges its own actions. Turns → labels → judge prompts → answers → samples for the update.

A judged turn becomes a prompt: the episode up to and including the judged response, nothing of what followed,
and a question. The actor answers it several times; an answer's advantage is its reward minus the mean over
that turn's answers. arXiv:2509.23870 §4.1, Eq. 3. The paper publishes neither prompts nor weight nor how many
turns are judged: those are ours. Left out: thoughts before a small model's one-word verdict.
"""

import math
import re
from dataclasses import dataclass, field, replace

import torch

from algorithms.rewards import group_relative_advantage
from lm.engine import Response, answer
from rollout import Episode
from run.parallel import generator, stream
from update import Sample

LABELS = ("rule", "dense", "oracle", "rule+oracle", "shuffled", "endpoint", "rule+endpoint")
AGREEMENTS = ("add-good", "both", "endpoint-wins")
QUESTION = {"plain": "Was that a good action? good or bad",
            "think": "Before the game answers: given the task and all that has been seen, was your last "
            "command a good step? Think briefly, then answer <judge>good</judge> or <judge>bad</judge>."}
ANSWERS = ("good", "bad")
VERDICT = {"plain": r"\s*+(good|bad)\s*+",          # possessive: nothing is read twice, however long it is
           "think": r"(?s)(?:[^<]*+<think>.*</think>)?[^<]*+<judge>\s*+(good|bad)\s*+</judge>\s*+"}
LONGEST_ANSWER = 100_000       # characters; a longer one is unreadable


@dataclass(slots=True)
class Judged:
    """One judged turn and the answers to the question about it."""

    index: int                    # place among all turns judged in this iteration, on all ranks
    episode: Episode
    t: int                        # which of its turns
    label: str                    # what is rewarded: "good" or "bad" ("shuffled": a coin's)
    prompt_ids: list[int]
    answers: list[Response] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def turn(self):
        """The turn itself, which knows its label, what the oracle says, and the verdicts."""
        return self.episode.turns[self.t]


def observations(episode):
    """The anchor before each turn and after the last: what was last seen that is not "Nothing happens."."""
    return [turn.anchor for turn in episode.turns] + [episode.final_anchor]


def rule_labels(episode):
    """The paper's rule (§4.1): "good", the last turn of a won episode; "bad", a turn that led nowhere: the
    observation that it acted on occurs again later in the episode; else None."""
    seen = observations(episode)
    labels = ["bad" if seen[t] in seen[t + 1:] else None for t in range(len(episode.turns))]
    if episode.won:
        labels[-1] = "good"
    return labels


def dense_labels(episode):
    """The rule, and "good" every valid turn of a won episode whose resulting observation occurs once. Ours:
    the paper's own labels have hardly any good turns."""
    seen = observations(episode)
    return [label or ("good" if episode.won and turn.valid and seen.count(after) == 1 else None)
            for label, turn, after in zip(rule_labels(episode), episode.turns, seen[1:])]


def oracle_labels(episode, world):
    """What the world's oracle, if any, says of each turn; written to it. A cut response counts as refused."""
    if world.oracle and all(turn.oracle is None for turn in episode.turns):
        last = world.nothing if episode.truncated else episode.final_observation
        replies = [turn.observation for turn in episode.turns] + [last]
        labels = world.oracle(replies, [turn.action or "" for turn in episode.turns])
        for turn, label in zip(episode.turns, labels, strict=True):
            turn.oracle = label
    return [turn.oracle for turn in episode.turns]


def agreed(rule, other, agreement):
    """One turn's label from the rule's and the large model's, or the oracle's; None: no label, or not asked.

        add-good:       the rule's, and "good" where only the other says so (the paper does not say how)
        both:           the two must agree where the rule speaks; elsewhere the other's
        endpoint-wins:  the other's where there is one, else the rule's
        undisputed:     as add-good, but none where the two contradict each other (rule+oracle)
    """
    if agreement == "endpoint-wins":
        return other or rule
    if agreement == "both":
        return other if rule in (other, None) else None
    disputed = agreement == "undisputed" and {rule, other} == {"good", "bad"}
    return None if disputed else rule or ("good" if other == "good" else None)


def labels_of(episode, kind, world, large=None, agreement="add-good"):
    """One label per turn; written to the turns. large: {t: label}, what the large model said of them.

    kind: of LABELS, or one of the world's own; for "shuffled" these are dense ones, `choose` tosses the coin.
    """
    others = [(large or {}).get(t) for t in range(len(episode.turns))]
    if kind in ("oracle", "rule+oracle"):
        others, agreement = oracle_labels(episode, world), "undisputed"
    if kind in ("oracle", "endpoint"):
        labels = others
    elif kind in ("rule+oracle", "rule+endpoint"):
        labels = [agreed(rule, other, agreement) for rule, other in zip(rule_labels(episode), others)]
    else:
        rules = {"rule": rule_labels, "dense": dense_labels, "shuffled": dense_labels}
        labels = (world.labels | rules)[kind](episode)
    for turn, label in zip(episode.turns, labels, strict=True):
        turn.label = label
    return labels


SEEN = 'An agent plays a text game. This is what it has seen, and after each ">" the command that it gave:'
JUDGE_TURN = (
    "The game has not yet answered the last command. Given the task and all that has been seen, was that "
    "command a good step? Think briefly, then end with <judge>good</judge> or <judge>bad</judge>.")
THINK_AHEAD = (
    "Write the thought with which the agent came to its last command: one or two sentences, in the first "
    "person, on what it has seen so far and not on what that command will bring. Give the thought alone.")


def told(episode, t, question=JUDGE_TURN):
    """A question after the episode up to and including turn t's command (or response, if it had none)."""
    turns = [f"{turn.observation}\n\n> {turn.action or turn.response}" for turn in episode.turns[:t + 1]]
    return "\n\n".join([SEEN, *turns, question])


def endpoint_labels(episodes, endpoint, n, seed, kind="rule+endpoint", agreement="add-good"):
    """What the large model says of at most n turns: {(place of its episode in the list, t): label}.

    Drawn at random from the turns that the rule leaves open, or from all where its word on the others counts.
    label: None where it did not answer, or unreadably. endpoint: any object with `ask(questions) -> answers`.
    """
    all_count = kind == "endpoint" or agreement != "add-good"
    places = [(e, t) for e, episode in enumerate(episodes) for t, label in enumerate(rule_labels(episode))
              if all_count or label is None]
    drawn = [places[i] for i in torch.randperm(len(places), generator=generator(seed))[:n].tolist()]
    answers = endpoint.ask([told(episodes[e], t) for e, t in drawn])
    return {place: parse_verdict(answer or "", "think") for place, answer in zip(drawn, answers, strict=True)}


def wording(chat):
    """Which QUESTION and VERDICT: a small model gives one word, in whatever style it plays."""
    return "plain" if chat.bare else "think"


def prompt_ids(chat, turn):
    """The episode up to and including the judged response, then the question: nothing of what came after."""
    return turn.prompt_ids + turn.response_ids + chat.message(QUESTION[wording(chat)])


def answer_ids(chat, label):
    """The answer that a demonstration gives: the bare verdict, stop token included."""
    text = label if wording(chat) == "plain" else f"<judge>{label}</judge>"
    return chat.encode(text) + chat.encode("<|im_end|>")


def parse_verdict(text, style):
    """"good", "bad", or None where the answer is unreadable. style: "plain" or "think", see `wording`."""
    match = re.fullmatch(VERDICT[style], text) if len(text) <= LONGEST_ANSWER else None
    return match[1] if match else None


def candidates(episodes, kind, room, world, asked=None, agreement="add-good"):
    """Every labelled turn whose prompt and response take less than `room` tokens: (episode.index, t, label).
    asked: what `endpoint_labels` gave for this list of episodes."""
    result = []
    for e, episode in enumerate(episodes):
        large = {t: label for (place, t), label in (asked or {}).items() if place == e}
        labels = labels_of(episode, kind, world, large, agreement)
        result += [(episode.index, t, label) for t, (turn, label) in enumerate(zip(episode.turns, labels))
                   if label and len(turn.prompt_ids) + len(turn.response_ids) < room]
    return result


def choose(places, kind, per_class, seed):
    """As many good as bad turns, at most per_class of each, drawn at random; none where a class is missing.

    places: the candidates of all ranks; every rank makes the same choice. Good and bad alternate in the list,
    so that any cut of it by pairs stays balanced. "shuffled" then replaces each label by a fair coin's.
    """
    rng = generator(seed, 0)
    by_class = [[place for place in places if place[2] == label] for label in ANSWERS]
    picked = [[members[i] for i in torch.randperm(len(members), generator=rng)[:per_class].tolist()]
              for members in by_class]
    chosen = [place for pair in zip(*picked) for place in pair]      # as many as the smaller class has
    coins = torch.randint(2, (len(chosen),), generator=rng).tolist()
    tossed = [(e, t, ANSWERS[coin]) for (e, t, _), coin in zip(chosen, coins)]
    return tossed if kind == "shuffled" else chosen


def questions(chat, episodes, chosen, world):
    """The chosen turns that lie in these episodes, as judge prompts."""
    here = {episode.index: episode for episode in episodes}
    for e in here.keys() & {e for e, _, _ in chosen}:
        oracle_labels(here[e], world)
    return [Judged(index, here[e], t, label, prompt_ids(chat, here[e].turns[t]))
            for index, (e, t, label) in enumerate(chosen) if e in here]


def judge(model, chat, judged, group_size, sampling, seed, n_slots):
    """Let the actor answer each question group_size times; writes answers, rewards and verdicts."""
    streams = [[stream(seed, 1, question.index, i) for i in range(group_size)] for question in judged]
    prompts, style = [question.prompt_ids for question in judged], wording(chat)
    for question, given in zip(judged, answer(model, prompts, streams, chat.stop_ids, sampling, n_slots)):
        question.answers = given
        record(question, [None if a.truncated else parse_verdict(chat.decode(a.ids), style) for a in given])


def record(question, verdicts):
    """Write a judged turn's verdicts and what each is worth: 1 right, 0 wrong, -0.1 unreadable (ours)."""
    question.rewards = [-0.1 if verdict is None else float(verdict == question.label) for verdict in verdicts]
    question.turn.label, question.turn.verdicts = question.label, verdicts
    question.turn.judge_reward = sum(question.rewards) / len(verdicts)


def advantages(rewards, normalize_std=False):
    """Of each answer to one question, against the others; exactly 0 where all rewards are equal.

        A = reward - mean, or (reward - mean) / (std + eps): GRPO's, std over the population
    """
    if normalize_std:
        return group_relative_advantage(torch.tensor(rewards), torch.zeros(len(rewards)), True).tolist()
    # of equal rewards not the mean, which is rounded: the advantage is exactly 0
    mean = sum(rewards) / len(rewards) if len(set(rewards)) > 1 else rewards[0]
    return [reward - mean for reward in rewards]


def samples(judged, normalize_std=False):
    """Judged turns as samples, with `advantages` over each turn's answers. Only answers are trained.

    Equal answers to one question have equal tokens, rewards and gradients: they are one sample with a count.
    They are in the minibatch of the episode that they are about, whose row they go on from.
    """
    result = []
    for question in judged:
        distinct = {}
        for given, advantage in zip(question.answers, advantages(question.rewards, normalize_std)):
            if (ids := tuple(given.ids)) in distinct:
                distinct[ids].count += 1
            else:
                answered = sample(question, question.prompt_ids, given.ids, advantage, given.logprob)
                distinct[ids] = replace(answered, episode=question.episode.index, turns=[question.turn])
        result += distinct.values()
    return result


def sample(question, prompt, answer, advantage, logprob_old=None, label=None):
    """One answer after one prompt as a Sample; no old logprob where it is to be imitated."""
    n, m = len(prompt), len(answer)
    old = None if logprob_old is None else [0.0] * n + logprob_old
    return Sample(prompt + answer, [False] * n + [True] * m, [0.0] * n + [advantage] * m, old,
                  question.index // 2, "judge", label=label)


def demonstrations(chat, judged, written=None, longest=math.inf):
    """The same turns with their right answers, to be imitated: samples, and how many of them are written.

    written: a large model's text on each, imitated with its reasons where it comes to the label in at most
    `longest` tokens; elsewhere the bare verdict is.
    """
    result, n_written = [], 0
    for question, text in zip(judged, written or [None] * len(judged), strict=True):
        text = (text or "").strip()
        ids = chat.encode(text) + chat.encode("<|im_end|>")
        fits = parse_verdict(text, "think") == question.label and "<|" not in text and len(ids) <= longest
        n_written += fits
        ids = ids if fits else answer_ids(chat, question.label)
        result.append(sample(question, question.prompt_ids, ids, 1.0))
    return result, n_written


def value_samples(judged):
    """The same turns, prompt and response, for the classifier's cross-entropy at their last token."""
    return [sample(question, question.turn.prompt_ids + question.turn.response_ids, [], 0.0,
                   label=float(question.label == "good")) for question in judged]


def value_verdicts(judged, probabilities):
    """The classifier's probabilities of good as records for the log; writes verdicts and rewards too."""
    for question, probability in zip(judged, probabilities, strict=True):
        record(question, ["good" if probability >= 0.5 else "bad"])
    return [replace(verdicts, probability=p) for verdicts, p in zip(verdicts_of(judged), probabilities)]


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What the log needs of one judged turn; small, so that ranks can exchange it."""

    label: str
    oracle: str | None
    verb: str
    verdicts: tuple[str | None, ...]
    rewards: tuple[float, ...]
    probability: float | None = None      # of good, where a value head said it

    @property
    def share_good(self):
        """The value head's probability, or the share of good among readable answers: 1/2 where none is."""
        if self.probability is not None:
            return self.probability
        readable = [verdict for verdict in self.verdicts if verdict]
        return readable.count("good") / len(readable) if readable else 0.5


def verdicts_of(judged):
    """The judged turns of this rank, stripped to what is logged."""
    return [Verdicts(question.label, question.turn.oracle, (question.turn.action or " ").split(" ")[0],
                     tuple(question.turn.verdicts), tuple(question.rewards)) for question in judged]


def agreement(records, truth):
    """Share of right answers per class, unreadable ones being wrong, their mean, and the AUC of share_good.
    truth: "good", "bad" or None for each of the records (Verdicts). nan where a class is missing."""
    right = {label: [v == label for record, t in zip(records, truth) if t == label for v in record.verdicts]
             for label in ANSWERS}
    good, bad = (sum(hits) / len(hits) if hits else math.nan for hits in right.values())
    return {"accuracy_good": good, "accuracy_bad": bad, "balanced_accuracy": (good + bad) / 2,
            "auc": auc(records, truth)}


def auc(records, truth, within_verbs=False):
    """Chance that a good turn's share_good is above a bad one's, ties half (Mann-Whitney); nan without pairs.

    within_verbs: pairs of one verb only. Good turns are mostly "move X to Y": knowing that is no judgement.
    """
    good, bad = ([(record.verb, record.share_good) for record, t in zip(records, truth) if t == label]
                 for label in ANSWERS)
    wins = [(share > other) + 0.5 * (share == other) for verb, share in good for other_verb, other in bad
            if verb == other_verb or not within_verbs]
    return sum(wins) / len(wins) if wins else math.nan


def metrics(records):
    """What one iteration's judging came to, over all ranks; only the count where nothing was judged."""
    if not records:
        return {"judge/turns": 0}
    verdicts = [verdict for record in records for verdict in record.verdicts]
    oracle = [record.oracle for record in records]
    result = {"turns": len(records), **agreement(records, [record.label for record in records]),
              **{f"{key}_oracle": value for key, value in agreement(records, oracle).items()},
              "auc_oracle_within_verbs": auc(records, oracle, within_verbs=True),
              "unreadable_frac": verdicts.count(None) / len(verdicts),
              "variance_frac": sum(len(set(record.rewards)) > 1 for record in records) / len(records),
              "reward": sum(sum(record.rewards) for record in records) / len(verdicts)}
    return {f"judge/{key}": value for key, value in result.items()}
