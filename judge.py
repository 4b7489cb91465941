"""GCD: the actor judges its own actions. Turns → labels → judge prompts → answers → samples for the update.

A judged turn becomes a prompt that holds the episode up to and including the judged response (not the
observation that followed, nothing of the outcome) and a question. The actor answers it several times; right
answers are rewarded; an answer's advantage is its reward minus the mean over that turn's answers.
arXiv:2509.23870 §4.1, Eq. 3.
Beside that: labels from a large model, the value-head classifier that the paper compares with, and what is logged.
The paper publishes neither its prompts nor its weight nor how many turns are judged: those here are ours.
Left out: thoughts before the verdict in the small model (one word is the whole answer), and how a large model is
reached: any object with `ask(questions) -> answers` will do.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import torch

import rollout
from algorithms import auc
from envs import experts
from parallel import generator, stream
from update import Sample

LABELS = ("rule", "dense", "oracle", "rule+oracle", "shuffled", "endpoint", "rule+endpoint")
AGREEMENTS = ("add-good", "both", "endpoint-wins")
ALFWORLD = "Welcome to TextWorld, ALFRED"      # in the first observation of each of its games
QUESTION = {
    "plain": "Was that a good action? good or bad",
    "think": "Before the game answers: given the task and all that has been seen, was your last command "
             "a good step? Think briefly, then answer <judge>good</judge> or <judge>bad</judge>.",
}
ANSWERS = ("good", "bad")
VERDICT = {
    "plain": re.compile(r"\s*(good|bad)\s*"),
    "think": re.compile(r"[^<]*(?:<think>.*</think>)?[^<]*<judge>\s*(good|bad)\s*</judge>\s*", re.DOTALL),
}


@dataclass(slots=True)
class Judged:
    """One judged turn and what came of it."""

    index: int                    # place among all turns judged in this iteration, on all ranks
    episode: int                  # position in this rank's list of episodes
    turn: int
    label: str                    # "good" or "bad": what was rewarded
    oracle: str | None            # what the oracle says, for the log
    prompt_ids: list[int]
    answers: list[rollout.Response] = field(default_factory=list)
    verdicts: list[str | None] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


# Labels: facts about a turn, never the sign of an advantage

def observations(episode):
    """The anchor before each turn and after the last: what was last seen that is not "Nothing happens."."""
    return [turn.anchor for turn in episode.turns] + [episode.final_anchor]


def rule_labels(episode):
    """The paper's rule (§4.1), one of "good", "bad", None per turn.

        bad:  the observation that the turn acted on occurs again later in the episode: the turn led nowhere
        good: the last turn of a won episode
    """
    seen = observations(episode)
    labels = ["bad" if seen[t] in seen[t + 1:] else None for t in range(len(episode.turns))]
    if episode.won:
        labels[-1] = "good"
    return labels


def dense_labels(episode):
    """The rule with more good turns, without an oracle. Ours: the paper's own labels have hardly any.

        bad:  as in the rule
        good: in a won episode, the last turn and every valid one whose resulting observation occurs once
    """
    seen, labels = observations(episode), rule_labels(episode)
    count = Counter(seen)
    if episode.won:
        for t, turn in enumerate(episode.turns):
            if labels[t] is None and turn.valid and count[seen[t + 1]] == 1:
                labels[t] = "good"
    return labels


def oracle_labels(episode):
    """What the prefix lets one know (envs/experts.py): "good", "bad" or None per turn.

    The turn of a response cut at its length counts as refused. Of games other than ALFWorld's nothing is known.
    """
    if ALFWORLD not in episode.turns[0].observation:
        return [None] * len(episode.turns)
    last = rollout.NOTHING if episode.truncated else episode.final_observation
    replies = [turn.observation for turn in episode.turns] + [last]
    return experts.oracle_labels(replies, [turn.action or "" for turn in episode.turns])


def rule_and_oracle_labels(episode):
    """The rule's labels, and "good" for turns that it leaves open and the oracle calls good.

    Turns where the two contradict each other are dropped. (The paper adds turns that a large model judges
    good; it does not say how the two must agree.)
    """
    labels = []
    for rule, oracle in zip(rule_labels(episode), oracle_labels(episode)):
        agreed = rule if oracle in (rule, None) else None
        labels.append("good" if rule is None and oracle == "good" else agreed)
    return labels


def agreed(rule, large, agreement):
    """One turn's label from the rule's and the large model's; None: no label, or not asked.

        add-good:       the rule's, and "good" where the rule is silent and the large model says so (the paper's)
        both:           the two must agree where the rule speaks; elsewhere the large model's
        endpoint-wins:  the large model's where there is one, else the rule's
    """
    if agreement == "endpoint-wins":
        return large or rule
    if agreement == "both":
        return large if rule in (large, None) else None
    return rule or ("good" if large == "good" else None)


def labels_of(episode, kind, asked=None, agreement="add-good"):
    """One label per turn. "shuffled" picks the turns that "dense" labels; `choose` then tosses its coin.

    asked: {t: label}, what the large model said of this episode's turns.
    """
    large = [(asked or {}).get(t) for t in range(len(episode.turns))]
    if kind == "endpoint":
        return large
    if kind == "rule+endpoint":
        return [agreed(rule, said, agreement) for rule, said in zip(rule_labels(episode), large)]
    return {"rule": rule_labels, "dense": dense_labels, "shuffled": dense_labels, "oracle": oracle_labels,
            "rule+oracle": rule_and_oracle_labels}[kind](episode)


# Questions to a large model: the episode as text

SITUATION = """An agent plays a text game. This is what it has seen, and after each ">" the command that it gave:

{told}

"""
JUDGE_TURN = SITUATION + (
    "The game has not yet answered the last command. Given the task and all that has been seen, was that command a "
    "good step? Think briefly, then end with <judge>good</judge> or <judge>bad</judge>.")
THINK_AHEAD = SITUATION + (
    "Write the thought with which the agent came to its last command: one or two sentences, in the first person, on "
    "what it has seen so far and not on what that command will bring. Give the thought alone.")


def told(episode, t):
    """An episode as text up to and including turn t's command (its response, where none could be read)."""
    return "\n\n".join(f"{turn.observation}\n\n> {turn.action or turn.response}" for turn in episode.turns[:t + 1])


def thought_questions(episode):
    """Per turn, the question for a thought that leads to its command, from the prefix alone."""
    return [THINK_AHEAD.format(told=told(episode, t)) for t in range(len(episode.turns))]


def endpoint_labels(episodes, endpoint, n, seed, kind="rule+endpoint", agreement="add-good"):
    """What the large model says of at most n turns, drawn at random: {(e, t): "good", "bad", or None}.

    Drawn from the turns that the rule leaves open, or from all where the large model's word on the others counts.
    None: not answered, or unreadable; as many as there are is how often the large model was no help.
    """
    all_count = kind == "endpoint" or agreement != "add-good"
    places = [(e, t) for e, episode in enumerate(episodes) for t, label in enumerate(rule_labels(episode))
              if all_count or label is None]
    drawn = [places[i] for i in torch.randperm(len(places), generator=generator(seed))[:n].tolist()]
    answers = endpoint.ask([JUDGE_TURN.format(told=told(episodes[e], t)) for e, t in drawn])
    return {place: parse_verdict(answer or "", "think") for place, answer in zip(drawn, answers, strict=True)}


def written_answers(episodes, judged, endpoint):
    """What the large model answers on judged turns, reasons and verdict; paid for only where it was not asked before."""
    return endpoint.ask([JUDGE_TURN.format(told=told(episodes[one.episode], one.turn)) for one in judged])


def asked_counts(asked):
    """What came of `endpoint_labels`, to be summed over ranks."""
    said = list(asked.values())
    return {"judge/asked": len(said), "judge/asked_good": said.count("good"),
            "judge/asked_unreadable": said.count(None)}


# Questions to the actor, and its verdicts

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
    match = VERDICT[style].fullmatch(text)
    return match[1] if match else None


def verdict_reward(verdict, label):
    """1 right, 0 wrong, -0.1 unreadable (ours: the paper gives no magnitudes)."""
    return -0.1 if verdict is None else float(verdict == label)


# From episodes to samples

def candidates(episodes, kind, room, first=0, asked=None, agreement="add-good"):
    """Every labelled turn as (episode, turn, label), episodes numbered from `first` on.

    room: a turn whose prompt and response take this many tokens or more cannot be judged.
    asked: what `endpoint_labels` gave for these episodes, by place in this list.
    """
    large = defaultdict(dict)
    for (e, t), label in (asked or {}).items():
        large[e][t] = label
    return [(first + e, t, label) for e, episode in enumerate(episodes)
            for t, label in enumerate(labels_of(episode, kind, large[e], agreement))
            if label and len(episode.turns[t].prompt_ids) + len(episode.turns[t].response_ids) < room]


def choose(places, kind, per_class, seed):
    """As many good as bad turns, at most per_class of each, drawn at random; none where a class is missing.

    places: the candidates of all ranks; every rank makes the same choice. Good and bad alternate in the list,
    so that any cut of it by pairs stays balanced. "shuffled" then replaces each label by a fair coin's.
    """
    rng = generator(seed, 0)
    by_class = [[place for place in places if place[2] == label] for label in ANSWERS]
    n = min(per_class, *map(len, by_class))
    picked = [[own[i] for i in torch.randperm(len(own), generator=rng)[:n].tolist()] for own in by_class]
    chosen = [place for pair in zip(*picked) for place in pair]
    if kind != "shuffled":
        return chosen
    coins = torch.randint(2, (len(chosen),), generator=rng).tolist()
    return [(e, t, ANSWERS[coin]) for (e, t, _), coin in zip(chosen, coins)]


def questions(chat, episodes, chosen, first=0):
    """The chosen turns that lie in these episodes (numbered from `first` on), as judge prompts."""
    oracle, result = {}, []
    for index, (e, t, label) in enumerate(chosen):
        if first <= e < first + len(episodes):
            episode = episodes[e - first]
            oracle[e] = oracle.get(e) or oracle_labels(episode)
            prompt = prompt_ids(chat, episode.turns[t])
            result.append(Judged(index, e - first, t, label, oracle[e][t], prompt))
    return result


def judge(model, chat, judged, group_size, sampling, seed, n_slots):
    """Let the actor answer each question group_size times; fills in answers, verdicts and rewards."""
    streams = [[stream(seed, 1, one.index, i) for i in range(group_size)] for one in judged]
    answers = rollout.answer(model, chat, [j.prompt_ids for j in judged], streams, sampling, n_slots)
    for one, own in zip(judged, answers):
        one.answers = own
        one.verdicts = [None if a.truncated else parse_verdict(chat.decode(a.ids), wording(chat)) for a in own]
        one.rewards = [verdict_reward(verdict, one.label) for verdict in one.verdicts]


def samples(judged):
    """Judged turns as samples: A = reward - mean over the turn's answers, no std. Only answers are trained.

    Equal answers to one question have equal tokens, rewards and gradients: they are one sample with a count.
    A good turn and the bad one beside it share an "episode" number, so they meet in one minibatch.
    """
    result = []
    for one in judged:
        mean = sum(one.rewards) / len(one.rewards)
        if all(reward == one.rewards[0] for reward in one.rewards):
            mean = one.rewards[0]          # exactly 0 below, whatever the mean's rounding
        draws = defaultdict(list)
        for answer, reward in zip(one.answers, one.rewards):
            draws[tuple(answer.ids)].append((answer, reward))
        for ids, equal in draws.items():
            answer, reward = equal[0]
            result.append(sample(one.prompt_ids, list(ids), reward - mean, answer.logprob, one.index // 2,
                                 len(equal)))
    return result


def sample(prompt, answer, advantage, logprob_old, index, count=1):
    """One answer to one judge prompt as a Sample; no old logprob where it is to be imitated."""
    n, m = len(prompt), len(answer)
    sampled, advantages = [False] * n + [True] * m, [0.0] * n + [advantage] * m
    old = None if logprob_old is None else [0.0] * n + logprob_old
    return Sample(prompt + answer, sampled, advantages, old, index, "judge", count)


def demonstrations(chat, judged, written=None, longest=math.inf):
    """The same turns as questions with their right answers, to be imitated in the cold start.

    written: what `written_answers` gave for them. Such a text is the answer where it comes to the turn's label in at
    most `longest` tokens, its reasons included; the bare verdict is it elsewhere. Returns samples, and how many of
    them are written.
    """
    result, n_written = [], 0
    for one, text in zip(judged, written or [None] * len(judged), strict=True):
        text = (text or "").strip()
        said = chat.encode(text) + chat.encode("<|im_end|>")
        fits = parse_verdict(text, "think") == one.label and "<|" not in text and len(said) <= longest
        n_written += fits
        result.append(sample(one.prompt_ids, said if fits else answer_ids(chat, one.label), 1.0, None, one.index // 2))
    return result, n_written


# A value head in place of the generated verdict

def value_samples(chat, episodes, chosen, first=0):
    """The turns that `questions` would ask, for the classifier: prompt and response, label 1 good or 0 bad.

    Nothing in them is sampled: the loss is the cross-entropy of the value head at the last token.
    """
    result = []
    for one in questions(chat, episodes, chosen, first):
        turn = episodes[one.episode].turns[one.turn]
        ids = turn.prompt_ids + turn.response_ids
        result.append(Sample(ids, [False] * len(ids), [0.0] * len(ids), None, one.index // 2, "judge",
                             label=float(one.label == "good")))
    return result


def value_verdicts(judged, episodes, probabilities):
    """The classifier's probabilities of good as rows for the log; fills in verdicts and rewards, as `judge` does."""
    for one, probability in zip(judged, probabilities, strict=True):
        one.verdicts = ["good" if probability >= 0.5 else "bad"]
        one.rewards = [verdict_reward(one.verdicts[0], one.label)]
    rows = verdicts_of(judged, episodes)
    return [replace(row, probability=probability) for row, probability in zip(rows, probabilities)]


# What is logged

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
        """The value head's probability, or the share of readable answers that say good: one half where none is."""
        if self.probability is not None:
            return self.probability
        readable = [verdict for verdict in self.verdicts if verdict]
        return readable.count("good") / len(readable) if readable else 0.5


def verdicts_of(judged, episodes):
    """The judged turns of this rank, stripped to what is logged."""
    def verb(one):
        return (episodes[one.episode].turns[one.turn].action or " ").split(" ")[0]
    return [Verdicts(one.label, one.oracle, verb(one), tuple(one.verdicts), tuple(one.rewards))
            for one in judged]


def agreement(rows, truth):
    """Share of right answers per class, their mean (balanced accuracy), and the AUC of share_good.

    truth: "good", "bad" or None per row; an unreadable answer is wrong. nan where a class is missing.
    """
    right = {label: [v == label for row, t in zip(rows, truth) if t == label for v in row.verdicts]
             for label in ANSWERS}
    frac = {label: sum(own) / len(own) if own else math.nan for label, own in right.items()}
    known = [(row.share_good, t == "good") for row, t in zip(rows, truth) if t]
    scores, positive = torch.tensor(known, dtype=torch.double).reshape(-1, 2).unbind(1)
    return {"accuracy_good": frac["good"], "accuracy_bad": frac["bad"],
            "balanced_accuracy": (frac["good"] + frac["bad"]) / 2, "auc": auc(scores, positive > 0)}


def auc_within_verbs(rows):
    """AUC against the oracle among turns of the same verb, weighted by their pairs of a good and a bad turn.

    Rule-good turns are mostly "move X to Y": without this, knowing the verb would look like judgement.
    """
    by_verb = defaultdict(list)
    for row in rows:
        if row.oracle:
            by_verb[row.verb].append((row.share_good, row.oracle == "good"))
    total = pairs = 0.0
    for known in by_verb.values():
        scores, positive = torch.tensor(known, dtype=torch.double).unbind(1)
        weight = float((positive > 0).sum() * (positive == 0).sum())
        if weight:
            total, pairs = total + weight * auc(scores, positive > 0), pairs + weight
    return total / pairs if pairs else math.nan


def metrics(rows):
    """What one iteration's judging came to, over all ranks; only the count where nothing was judged."""
    result = {"judge/turns": len(rows)}
    if not rows:
        return result
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    with_label = agreement(rows, [row.label for row in rows])
    with_oracle = agreement(rows, [row.oracle for row in rows])
    result |= {f"judge/{key}": value for key, value in with_label.items()}
    result |= {f"judge/{key}_oracle": value for key, value in with_oracle.items()}
    return result | {
        "judge/auc_oracle_within_verbs": auc_within_verbs(rows),
        "judge/unreadable_frac": verdicts.count(None) / len(verdicts),
        "judge/variance_frac": sum(len(set(row.rewards)) > 1 for row in rows) / len(rows),
        "judge/reward": sum(sum(row.rewards) for row in rows) / len(verdicts),
    }
