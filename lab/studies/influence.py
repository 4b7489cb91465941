"""How the turns of an agent share gradients: Equation 2 on hidden states, and the numbers of Figures 3, 8, 9.

arXiv:2509.23870, sections 3.2 and 4. The formula is NTHR's (arXiv:2505.18830); the hidden states are computed
by its code (algorithms/nthr.py). Turns are played by a model and labeled by the oracle. Left out: the runs
(lab/studies/runs.py) and the analysis (lab/studies/coupling.py).

Shapes: S turns, N tokens, P pairs of turns, V vocabulary, d hidden size, X = V d.
"""

import copy
import math
import re
import statistics
from collections import Counter
from dataclasses import dataclass

import torch

import batching
import update
from algorithms import nthr
from infra.streams import generator, stream
from labels import oracle_labels
from rollout import EpisodeSpec

PLAY, DRAW = 20, 21                      # purposes of random streams: the second number of their names
TASKS = 96                               # of a split, each played once
ACTIONS, CONTEXTS = 6, 6                 # of the heat map: commands, and turns per command
STEP_NATS = 0.01                               # mean rise of a turn's log-probability by its own step
CLASSES = ("good", "bad", "refused")
FORM = ("stop", "tag", "link")           # kinds of tokens without content (see token_kinds)
BINS = 40                                # of cosines, from -1 to 1
OBJECT_NAME, PREPOSITIONS = re.compile(r"(?<![a-z])[a-z]+ \d+"), ("to", "from", "with", "in", "on")


# Turns

@dataclass(slots=True)
class MeasuredTurn:
    """A turn with its tokens, task, command and label."""

    sample: batching.Sample
    task: str
    action: str
    label: str | None             # one of CLASSES; None: not labeled by the oracle
    kinds: list                   # of each response token, see `token_kinds`


def measured_turns(actor, seed, split="dev"):
    """Play one episode of each of the first TASKS of a split; returns its turns that have a command.

    A turn is labeled "refused" if the game refused the command, else "good" or "bad" by the oracle.
    """
    environment = actor.config.environment
    tasks = environment.split_tasks(split)[:TASKS]
    specs = [EpisodeSpec(task, g, stream(seed, PLAY, g), g) for g, task in enumerate(tasks)]
    return turns_of(actor.play(specs), actor.chat, environment)


def turns_of(episodes, chat, environment):
    """The turns of episodes that have a command, labeled."""
    found = []
    rooms = [episode.turns[0].observation.partition("Your task is to")[0] for episode in episodes]
    receptacles = {name.split()[0] for room in rooms for name in OBJECT_NAME.findall(room)}
    for episode in episodes:
        labels = oracle_labels(episode, environment)
        for turn, label in zip(episode.turns, labels):
            if turn.action is not None:
                sample = batching.sample_of(turn.prompt_ids, turn.response_ids, episode=episode.index)
                found.append(MeasuredTurn(sample, episode.task.id, turn.action,
                                          label if turn.valid else "refused",
                                          token_kinds(chat, turn.response_ids, receptacles)))
    return found


def token_kinds(chat, ids, receptacles):
    """The kind of each response token: stop, tag, verb, link, receptacle, number or object.

    Stop and tag are tokens of their own. Others have the kind of the word that they are a part of: a word
    begins with a token that begins with a space. The verb is the first word. receptacles: their names, as in
    the first observations; a receptacle's token may contain its number.
    """
    texts, pieces, kinds = [chat.tokenizer.decode([token]) for token in ids], [], []
    for token, text in zip(ids, texts):
        tag = re.fullmatch(r"</?\w+>", text.strip())
        alone = "stop" if token in chat.stop_ids else "tag" if tag else None
        if alone or not pieces or pieces[-1][0] or text.startswith(" "):
            pieces.append((alone, []))
        pieces[-1][1].append(text)
    for alone, parts in pieces:
        word = "".join(parts).strip()
        kind = alone or ("verb" if "verb" not in kinds else "link" if word in PREPOSITIONS
                         else "number" if word.isdigit()
                         else "receptacle" if word.split(" ")[0] in receptacles else "object")
        kinds += [kind] * len(parts)
    return kinds


def subsample(items, n, *seed):
    """At most n of the items, in random order."""
    order = torch.randperm(len(items), generator=generator(*seed)).tolist()
    return [items[i] for i in order[:n]]


def by_class(turns, n, seed):
    """{class: at most n of its turns}, with as many good as bad ones."""
    of = {label: [turn for turn in turns if turn.label == label] for label in CLASSES}
    fewest = min(n, len(of["good"]), len(of["bad"]))
    return {label: subsample(of[label], n if label == "refused" else fewest, seed, DRAW, k)
            for k, label in enumerate(CLASSES)}


# Equation 2

def hidden_and_error(model, turns):
    """(hidden_Nd, error_NV) of each turn's response tokens; error = e_y - pi over the full vocabulary."""
    columns, objective = range(model.config.vocab_size), update.Objective(microbatch_tokens=4096)
    return nthr.hidden_and_error(model, [turn.sample for turn in turns], columns, objective)


def couplings(pairs):
    """coupling_SS: Equation 2 for every pair of turns. pairs: (hidden_Nd, error_NV) of each turn.

        sum_k sum_k' <g_k, g'_k'> <h_k, h'_k'>  =  <M, M'>,   M = sum_k g_k h_k^T

    M is the gradient of the response's log-probability with respect to an untied output layer.
    """
    pull_SX = torch.stack([(error_NV.T @ hidden_Nd).flatten() for hidden_Nd, error_NV in pairs])
    return pull_SX @ pull_SX.T


def token_couplings(pairs):
    """coupling_NN: the terms of Equation 2 for every pair of tokens; the turns are concatenated."""
    hidden_Nd, error_NV = (torch.cat(part) for part in zip(*pairs))
    return (error_NV @ error_NV.T) * (hidden_Nd @ hidden_Nd.T)


def sums_by_turn(coupling_NN, turns):
    """coupling_SS: `couplings` as sums of `token_couplings`, for a vocabulary whose X numbers a turn are too
    many.
    """
    turn_N = torch.tensor([i for i, turn in enumerate(turns) for _ in turn.kinds])
    rows_SN = coupling_NN.new_zeros(len(turns), len(turn_N)).index_add_(0, turn_N, coupling_NN)
    return coupling_NN.new_zeros(len(turns), len(turns)).index_add_(1, turn_N, rows_SN)


def cosines(product_SS):
    """Cosines from inner products; 0 for zero vectors."""
    norm_S = product_SS.diagonal().clamp(min=0).sqrt()
    return product_SS / (norm_S[:, None] * norm_S).clamp(min=1e-30)


def mean_of(values):
    """The mean of a tensor as a float; None if it is empty."""
    return float(values.mean()) if values.numel() else None


def differ(names):
    """differ_SS: whether the names of two turns differ."""
    number_of = {name: i for i, name in enumerate(names)}
    number_S = torch.tensor([number_of[name] for name in names])
    return number_S[:, None] != number_S


# Figure 3a: similarity of turns

def similarity(model, candidates, seed):
    """Cosines between turns, one per task: of the output layer's gradients and of mean hidden states.

    For turns sampled by the model itself, the expected product of two scores is 0 for any coupling, since the
    score has mean 0 at each prompt, and their mean cosine nearly so (a likely answer's score is small); the
    root mean square is what differs between environments. None with fewer than two turns.
    """
    one = {turn.task: turn for turn in subsample(candidates, len(candidates), seed, DRAW, 3)}
    if len(turns := [*one.values()]) < 2:
        return None
    pairs = hidden_and_error(model, turns)
    cosine_SS = cosines(couplings(pairs))
    hidden_Sd = torch.stack([hidden_Nd.mean(0) for hidden_Nd, _ in pairs])
    above_SS = torch.ones(len(turns), len(turns), dtype=torch.bool).triu(1)
    other_SS = differ([turn.action for turn in turns])
    gradient_P = cosine_SS[above_SS]
    counts = torch.histc(gradient_P, BINS, -1, 1) / len(gradient_P)
    return {"turns": len(turns), "same action": mean_of((~other_SS[above_SS]).float()),
            "mean": mean_of(gradient_P), "rms": float(gradient_P.square().mean().sqrt()),
            "mean of same action": mean_of(cosine_SS[above_SS & ~other_SS]),
            "mean of different": mean_of(cosine_SS[above_SS & other_SS]),
            "hidden": mean_of(cosines(hidden_Sd @ hidden_Sd.T)[above_SS]), "histogram": counts.tolist()}


# Figure 3b: the effect of a gradient step on one turn on other turns

def response_logprobs(model, samples):
    """Log-probability of each response in nats, in the model's own precision, with gradient."""
    given = batching.collate(samples, model)
    logprob_NV = model(given.ids_1M, given.attention, given.column_N).log_softmax(-1)
    token_N = logprob_NV.gather(1, given.target_N[:, None])[:, 0]
    return torch.stack([part.sum() for part in token_N.split([sum(sample.sampled) for sample in samples])])


def gradient(model, sample):
    """The gradient of a response's log-probability with respect to every parameter."""
    logprob = response_logprobs(model, [sample])[0]
    return torch.autograd.grad(logprob, [*model.parameters()], allow_unused=True)


@torch.no_grad()
def logprobs_after_step(model, samples, grads, step):
    """The responses' log-probabilities with parameters + step * grads; the model is restored."""
    before = [p.clone() for p in model.parameters()]
    for p, g in zip(model.parameters(), grads):
        p.add_(g if g is not None else torch.zeros_like(p), alpha=step)
    moved_S = response_logprobs(model, samples)
    for p, old in zip(model.parameters(), before):
        p.copy_(old)
    return moved_S


def step_effects(model, samples, step_nats=STEP_NATS):
    """change_SS: the change of turn j's log-probability by an SGD step on turn i, in double precision.

    The step size is the same for all turns; a turn's own log-probability rises by `step_nats` on average.
    Also returns the nonlinearity: for every sixth turn, the largest difference between the change by a full
    step and twice the change by half a step, divided by the largest change.
    """
    model = copy.deepcopy(model).double()
    square = statistics.fmean(sum(float(g.square().sum()) for g in gradient(model, sample) if g is not None)
                              for sample in samples)
    with torch.no_grad():
        before_S = response_logprobs(model, samples)
    step, rows, nonlinearity = step_nats / max(square, 1e-30), [], 0.0
    for i, sample in enumerate(samples):
        of = gradient(model, sample)                # again: a large model's would not all fit in memory
        rows.append(logprobs_after_step(model, samples, of, step) - before_S)
        if i % CONTEXTS == 0:
            half_S = logprobs_after_step(model, samples, of, step / 2) - before_S
            nonlinearity = max(nonlinearity, float((2 * half_S - rows[-1]).abs().max()))
    change_SS = torch.stack(rows)
    return change_SS, nonlinearity / max(float(change_SS.abs().max()), 1e-30)


def same_action_turns(candidates, seed):
    """Turns of the commands that occur in most tasks, each from a different task, sorted by command.

    Refused commands are left out.
    """
    of = {}
    for turn in subsample(candidates, len(candidates), seed, DRAW, 4):
        if turn.label != "refused":
            of.setdefault(turn.action, {}).setdefault(turn.task, turn)
    most = sorted(of, key=lambda action: (-len(of[action]), action))[:ACTIONS]
    return [turn for action in sorted(most) for turn in [*of[action].values()][:CONTEXTS]
            if len(of[action]) > 1]


def heat(model, candidates, seed):
    """`heat_of` the turns of the most frequent commands."""
    return heat_of(model, same_action_turns(candidates, seed))


def heat_of(model, turns):
    """Figure 3b's map and its means; None unless one command was given in two tasks and a second one in one.

    The map is change_ij / sqrt(change_ii change_jj), since turns differ in how far they can move. The means
    are over pairs of different tasks: of the map, and of the change divided by the mean change of a turn by
    its own step. "above": how often a same-action pair exceeds a different-action pair (ties count half).
    """
    other_SS = differ([turn.action for turn in turns]) if turns else torch.zeros(0, 0, dtype=torch.bool)
    if not other_SS.any():
        return None
    change_SS, nonlinearity = step_effects(model, [turn.sample for turn in turns])
    tasks_differ_SS = differ([turn.task for turn in turns])
    scaled_SS = cosines(change_SS)
    same_P, different_P = (scaled_SS[tasks_differ_SS & which] for which in (~other_SS, other_SS))
    if not same_P.numel() or not different_P.numel():
        return None
    above = (same_P[:, None] > different_P).double() + 0.5 * (same_P[:, None] == different_P)
    own_change = max(float(change_SS.diagonal().mean()), 1e-30)
    return {"actions": [turn.action for turn in turns],
            "matrix": [[round(x, 3) for x in row] for row in scaled_SS.tolist()],
            "same": mean_of(same_P), "different": mean_of(different_P), "above": mean_of(above),
            "change same": float(change_SS[tasks_differ_SS & ~other_SS].mean()) / own_change,
            "change different": float(change_SS[tasks_differ_SS & other_SS].mean()) / own_change,
            "nonlinear": nonlinearity}


# Figure 9: the tokens that carry the influence

def influence_by_kind(model, candidates, n, seed):
    """{kind of token: {"influence": its share of the absolute influence, "tokens": its share of the tokens}}.

    Between turns of different tasks; the influence of a pair of tokens counts half for each. None with fewer
    than two tasks.
    """
    turns = subsample(candidates, n, seed, DRAW, 5)
    if len({turn.task for turn in turns}) < 2:
        return None
    return kind_shares(turns, token_couplings(hidden_and_error(model, turns)))


def kind_shares(turns, coupling_NN):
    """The shares of `influence_by_kind` from `token_couplings` of turns of at least two tasks."""
    kinds = [kind for turn in turns for kind in turn.kinds]
    task_N = [turn.task for turn in turns for _ in turn.kinds]
    weight_N = (coupling_NN.abs() * differ(task_N)).sum(1)
    total = float(weight_N.sum())
    shares = Counter()
    for kind, weight in zip(kinds, weight_N.tolist()):
        shares[kind] += weight / total if total else math.nan
    return {kind: {"influence": shares[kind], "tokens": count / len(kinds)}
            for kind, count in Counter(kinds).most_common()}


# Figure 8: influence within a class minus influence across classes

def influence_gaps(model, turns_of_class, pair=("good", "bad")):
    """Same-class minus cross-class influence between turns of different tasks, per pair of tokens.

    Also of cosines, whose scale does not change in training. None if a class has fewer than two tasks.
    """
    turns = [turn for label in pair for turn in turns_of_class[label]]
    if any(len({turn.task for turn in turns_of_class[label]}) < 2 for label in pair):
        return None
    return {label: len(turns_of_class[label]) for label in pair} | gaps_of(
        turns, couplings(hidden_and_error(model, turns)))


def gaps_of(turns, coupling_SS):
    """The gaps of `influence_gaps` from Equation 2 for every pair of turns of two classes."""
    tokens_S = torch.tensor([len(turn.kinds) for turn in turns])
    tasks_differ_SS, cross_SS = differ([turn.task for turn in turns]), differ([turn.label for turn in turns])
    found, per_token_SS = {}, coupling_SS / (tokens_S[:, None] * tokens_S)
    for name, of_SS in (("", per_token_SS), (" of cosines", cosines(coupling_SS))):
        same, cross = (mean_of(of_SS[tasks_differ_SS & which]) for which in (~cross_SS, cross_SS))
        found |= {f"same{name}": same, f"cross{name}": cross, f"gap{name}": same - cross}
    return found
