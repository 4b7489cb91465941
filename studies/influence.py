"""How turns of an agent share gradients: Equation 2 on hidden states, and Figures 3, 8 and 9 by it.

arXiv:2509.23870 sections 3.2 and 4; the formula is NTHR's (arXiv:2505.18830), and so is the code that reads
hidden states. Turns are those that a model played, with what the oracle says of them. Left out: where models
come from (studies/runs.py), and what is said of the numbers (studies/coupling.py).

Shapes: S turns, N tokens, P pairs of turns, V vocabulary, d hidden size, X = V d.
"""

import copy
import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass

import torch

import judge
import update
from algorithms import nthr
from rollout import Seat
from run.parallel import generator, stream

PLAY, DRAW = 20, 21                      # what a random stream is for: the second number of its name
TASKS = 96                               # of split "dev", each played once: where turns come from
ACTIONS, CONTEXTS = 6, 6                 # of the heat map: commands, and turns of different tasks for each
OWN = 0.01                               # nats that its step lifts a turn by, on the average
CLASSES = ("good", "bad", "refused")
FORM = ("stop", "tag", "link")           # kinds of tokens that say nothing of what is done; see kinds_of
BINS = 40                                # of a cosine, from -1 to 1
NAME, LINKS = re.compile(r"(?<![a-z])[a-z]+ \d+"), ("to", "from", "with", "in", "on")


# Turns

@dataclass(slots=True)
class Shown:
    """A turn that is measured: the tokens, and what is known of them."""

    sample: update.Sample
    task: str
    action: str
    label: str | None             # of CLASSES; None: the oracle says neither
    kinds: list                   # of each response token, see `kind_of`


def shown_by(actor, seed):
    """The turns with a command of one episode on each of the first TASKS of split "dev", as the actor plays.

    A refused command is "refused", whatever the oracle says; what takes it (admissible) is good or bad.
    """
    world = actor.config.world
    seats = [Seat(task, g, stream(seed, PLAY, g), g) for g, task in enumerate(world.split("dev")[:TASKS])]
    episodes, found = actor.play(seats), []
    places = {name.split()[0] for episode in episodes
              for name in NAME.findall(episode.turns[0].observation.partition("Your task is to")[0])}
    for episode in episodes:
        labels = judge.oracle_labels(episode, world)
        for turn, label in zip(episode.turns, labels):
            if turn.action is not None:
                n, m = len(turn.prompt_ids), len(turn.response_ids)
                sample = update.Sample(turn.prompt_ids + turn.response_ids, [False] * n + [True] * m,
                                       [0.0] * (n + m), None, episode.index)
                found.append(Shown(sample, episode.task.id, turn.action, label if turn.valid else "refused",
                                   kinds_of(actor.chat, turn.response_ids, places)))
    return found


def kinds_of(chat, ids, places):
    """The kind of each response token: stop, tag, verb (the first that is neither), link, receptacle (a name
    of `places`, as first observations have them, its number in the same token), number, or object."""
    kinds = []
    for token in ids:
        text = chat.tokenizer.decode([token]).strip()
        if token in chat.stop_ids:
            kinds.append("stop")
        elif re.fullmatch(r"</?\w+>", text):
            kinds.append("tag")
        elif not {"verb"} & {*kinds}:
            kinds.append("verb")
        elif text in LINKS:
            kinds.append("link")
        elif text.isdigit():
            kinds.append("number")
        else:
            kinds.append("receptacle" if text.split(" ")[0] in places else "object")
    return kinds


def drawn(shown, n, *seed):
    """At most n of them, at random."""
    order = torch.randperm(len(shown), generator=generator(*seed)).tolist()
    return [shown[i] for i in order[:n]]


def classes_of(shown, n, seed):
    """{class: at most n of its turns}, good and bad as many of each."""
    of = {label: [turn for turn in shown if turn.label == label] for label in CLASSES}
    fewest = min(n, len(of["good"]), len(of["bad"]))
    return {label: drawn(of[label], n if label == "refused" else fewest, seed, DRAW, k)
            for k, label in enumerate(CLASSES)}


# Equation 2

def read(model, shown):
    """(hidden_Nd, error_NV) of each turn's response tokens; error = e_y - pi over the whole vocabulary."""
    columns, objective = range(model.config.vocab_size), update.Objective(microbatch_tokens=4096)
    return nthr.hidden_and_error(model, [turn.sample for turn in shown], columns, objective)


def couplings(pairs):
    """Equation 2 for every two turns, coupling_SS, from (hidden_Nd, error_NV) of each:

        sum_k sum_k' <g_k, g'_k'> <h_k, h'_k'>  =  <M, M'>,   M = sum_k g_k h_k^T

    M is the gradient of the response's log-probability by the output layer, were it not tied.
    """
    pull_SX = torch.stack([(error_NV.T @ hidden_Nd).flatten() for hidden_Nd, error_NV in pairs])
    return pull_SX @ pull_SX.T


def token_couplings(pairs):
    """The terms of Equation 2: coupling_NN of every two tokens, of all turns one after the other."""
    hidden_Nd, error_NV = (torch.cat(part) for part in zip(*pairs))
    return (error_NV @ error_NV.T) * (hidden_Nd @ hidden_Nd.T)


def cosines(product_SS):
    """Inner products as cosines; of a zero vector 0."""
    norm_S = product_SS.diagonal().clamp(min=0).sqrt()
    return product_SS / (norm_S[:, None] * norm_S).clamp(min=1e-30)


def mean_of(values):
    """Of a tensor; None of an empty one."""
    return float(values.mean()) if values.numel() else None


def unlike(names):
    """Whether two turns' names differ, differ_SS."""
    number_of = {name: i for i, name in enumerate(names)}
    number_S = torch.tensor([number_of[name] for name in names])
    return number_S[:, None] != number_S


# Figure 3a: how alike turns are

def similarity(model, shown, seed):
    """Cosines between turns, one of each task: of the output layer's gradients and of mean hidden states.

    Turns that the model itself sampled: the mean over pairs is 0 in expectation whatever the coupling (the
    score has mean 0 at each prompt), so the root mean square tells worlds apart. None without two turns.
    """
    one = {turn.task: turn for turn in drawn(shown, len(shown), seed, DRAW, 3)}
    if len(turns := [*one.values()]) < 2:
        return None
    pairs = read(model, turns)
    cosine_SS = cosines(couplings(pairs))
    hidden_Sd = torch.stack([hidden_Nd.mean(0) for hidden_Nd, _ in pairs])
    above_SS = torch.ones(len(turns), len(turns), dtype=torch.bool).triu(1)
    other_SS = unlike([turn.action for turn in turns])
    gradient_P = cosine_SS[above_SS]
    counts = torch.histc(gradient_P, BINS, -1, 1) / len(gradient_P)
    return {"turns": len(turns), "same action": mean_of((~other_SS[above_SS]).float()),
            "mean": mean_of(gradient_P), "rms": float(gradient_P.square().mean().sqrt()),
            "mean of same action": mean_of(cosine_SS[above_SS & ~other_SS]),
            "mean of different": mean_of(cosine_SS[above_SS & other_SS]),
            "hidden": mean_of(cosines(hidden_Sd @ hidden_Sd.T)[above_SS]), "histogram": counts.tolist()}


# Figure 3b: a gradient step on one turn, felt by another

def logprobs(model, samples):
    """Log-probability of each whole response, nats, in the model's own precision and with its gradient."""
    ids_BT, place, select, target_N, *_ = update.collate(samples, model)
    token_N = model(ids_BT, place, select).log_softmax(-1).gather(1, target_N[:, None])[:, 0]
    return torch.stack([part.sum() for part in token_N.split([sum(sample.sampled) for sample in samples])])


def gradient(model, sample):
    """Of a response's log-probability, by every parameter."""
    return torch.autograd.grad(logprobs(model, [sample])[0], [*model.parameters()], allow_unused=True)


@torch.no_grad()
def after_step(model, samples, grads, step):
    """The responses' log-probabilities after parameters + step * grads; the model is left as it was."""
    before = [p.clone() for p in model.parameters()]
    for p, g in zip(model.parameters(), grads):
        p.add_(g if g is not None else torch.zeros_like(p), alpha=step)
    moved_S = logprobs(model, samples)
    for p, old in zip(model.parameters(), before):
        p.copy_(old)
    return moved_S


def responses(model, samples, own=OWN):
    """change_SS: what an SGD step on turn i adds to the log-probability of turn j, in double precision.

    One step size for all, such that a turn lifts its own by `own` on the average. Beside it the largest
    difference between twice the change of half a step and that of the whole, over the largest change: how
    far the response is from linear, for every sixth turn.
    """
    model = copy.deepcopy(model).double()
    grads = [gradient(model, sample) for sample in samples]
    square = statistics.fmean(sum(float(g.square().sum()) for g in of if g is not None) for of in grads)
    with torch.no_grad():
        before_S = logprobs(model, samples)
    step, rows, apart = own / max(square, 1e-30), [], 0.0
    for i, of in enumerate(grads):
        rows.append(after_step(model, samples, of, step) - before_S)
        if i % CONTEXTS == 0:
            half_S = after_step(model, samples, of, step / 2) - before_S
            apart = max(apart, float((2 * half_S - rows[-1]).abs().max()))
    change_SS = torch.stack(rows)
    return change_SS, apart / max(float(change_SS.abs().max()), 1e-30)


def same_actions(shown, seed):
    """Turns of the commands that most tasks have, of different tasks, command by command; none refused."""
    of = {}
    for turn in drawn(shown, len(shown), seed, DRAW, 4):
        if turn.label != "refused":
            of.setdefault(turn.action, {}).setdefault(turn.task, turn)
    most = sorted(of, key=lambda action: (-len(of[action]), action))[:ACTIONS]
    return [turn for action in sorted(most) for turn in [*of[action].values()][:CONTEXTS]
            if len(of[action]) > 1]


def heat(model, shown, seed):
    """Figure 3b's map and what it says; None unless one command was given in two tasks, and another in one.

    The map is change_ij / sqrt(change_ii change_jj), for turns differ in how much there is to move; means
    over pairs of different tasks: of that, and of the change itself over a turn's mean change of its own.
    "above": how often a same-action pair exceeds a different-action one (ties half).
    """
    turns = same_actions(shown, seed)
    other_SS = unlike([turn.action for turn in turns]) if turns else torch.zeros(0, 0, dtype=torch.bool)
    if not other_SS.any():
        return None
    change_SS, apart = responses(model, [turn.sample for turn in turns])
    apart_SS = unlike([turn.task for turn in turns])
    scaled_SS = cosines(change_SS)
    same_P, different_P = (scaled_SS[apart_SS & which] for which in (~other_SS, other_SS))
    if not same_P.numel() or not different_P.numel():
        return None
    above = (same_P[:, None] > different_P).double() + 0.5 * (same_P[:, None] == different_P)
    own = max(float(change_SS.diagonal().mean()), 1e-30)
    return {"actions": [turn.action for turn in turns],
            "matrix": [[round(x, 3) for x in row] for row in scaled_SS.tolist()],
            "same": mean_of(same_P), "different": mean_of(different_P), "above": mean_of(above),
            "change same": float(change_SS[apart_SS & ~other_SS].mean()) / own,
            "change different": float(change_SS[apart_SS & other_SS].mean()) / own, "nonlinear": apart}


# Figure 9: which tokens carry it

def carriers(model, shown, n, seed):
    """{kind of token: its share of the absolute influence between turns of different tasks, and of the
    tokens}; None without two tasks. Influence of a pair counts half for each of its two tokens."""
    turns = drawn(shown, n, seed, DRAW, 5)
    if len({turn.task for turn in turns}) < 2:
        return None
    kinds = [kind for turn in turns for kind in turn.kinds]
    task_N = [turn.task for turn in turns for _ in turn.kinds]
    weight_N = (token_couplings(read(model, turns)).abs() * unlike(task_N)).sum(1)
    total = float(weight_N.sum())
    shares = Counter()
    for kind, weight in zip(kinds, weight_N.tolist()):
        shares[kind] += weight / total if total else math.nan
    return {kind: {"influence": shares[kind], "tokens": count / len(kinds)}
            for kind, count in Counter(kinds).most_common()}


# Figure 8: the gap between influence within a class and across

def gap(model, of_classes, pair=("good", "bad")):
    """Same-class minus cross-class influence between turns of different tasks, per pair of tokens; the same
    of cosines, whose scale training does not change. None where a class has no two tasks: not measurable."""
    turns = [turn for label in pair for turn in of_classes[label]]
    if any(len({turn.task for turn in of_classes[label]}) < 2 for label in pair):
        return None
    coupling_SS = couplings(read(model, turns))
    tokens_S = torch.tensor([len(turn.kinds) for turn in turns])
    apart_SS, cross_SS = unlike([turn.task for turn in turns]), unlike([turn.label for turn in turns])
    found = {label: len(of_classes[label]) for label in pair}
    per_token_SS = coupling_SS / (tokens_S[:, None] * tokens_S)
    for name, of_SS in (("", per_token_SS), (" of cosines", cosines(coupling_SS))):
        same, cross = (mean_of(of_SS[apart_SS & which]) for which in (~cross_SS, cross_SS))
        found |= {f"same{name}": same, f"cross{name}": cross, f"gap{name}": same - cross}
    return found
