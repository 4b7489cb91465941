"""Repeats and flaws in the models of a run: the measures of lab/studies/flaws.py.

All models of a seed play the same tasks with the same random draws. Figure 1 is measured on the repeats
that a model chose in its own episodes, as in the paper; everything else on states and turns that are the
same for all models, those of the initial model's episodes at temperature 1. Probabilities are exact, from
the logits of a command's tokens. A flaw is an admissible command that the environment's oracle calls bad.
Left out: other tokenizations of a command; runs, means over seeds and figures (lab/studies/flaws.py).
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

import batching
import rollout
import update
from infra.streams import generator, stream
from lab.bench.intervals import mean_known
from labels import oracle_labels
from lm.engine import Sampling, answer

MEMBERS = 4                   # episodes of each task
TEMPERATURES = (1.0, 0.4)
TRIALS, CONSISTENT = 10, 5         # responses per state; equal ones that make it consistent (paper)
EARLY = 5                     # turns at the start of an episode in which a flaw is early
MOVED = 0.1                   # change that counts as a rise or a fall of a probability
KINDS = ("flawed", "refused", "repeated")             # of turns; a repeated one may also be flawed or refused
CLASSES = ("good", "flawed", "refused")               # of commands
EPISODES, STATES, ANSWERS = 11, 12, 13                # purposes of random streams: second numbers of names


# Figure 1: repeats

@dataclass(frozen=True, slots=True)
class RepeatState:
    """A state in which commands were given before, so they can be repeated."""

    prompt_ids: list[int]
    given: dict[str, bool]        # {command: whether the game accepted it the last time}
    chosen: str | None = None     # the command of the turn


def repeat_states(episodes):
    """Every turn whose state had been acted on earlier in its episode, as a RepeatState.

    The state is the turn's anchor, the last new observation (as in rollout.repeated_turns), so a refused
    command does not change it. Turns without a command cannot be repeated.
    """
    found = []
    for episode in episodes:
        given = {}
        for turn in episode.turns:
            here = given.setdefault(turn.anchor, {})
            if here:
                found.append(RepeatState(turn.prompt_ids, dict(here), turn.action))
            if turn.action is not None:
                here[turn.action] = turn.valid
    return found


def chosen_repeats(found):
    """Of `repeat_states`, those whose turn repeated a command, each with this command only.

    These are the paper's: "we choose those repeated actions and observe the confidence". A state is among
    them with the probability to repeat there, so the mean of the command's probability p over them is
    E[p^2] / E[p] of all pairs of a state and a command given there, which is at least E[p].
    """
    return [RepeatState(state.prompt_ids, {state.chosen: state.given[state.chosen]}, state.chosen)
            for state in found if state.chosen in state.given]


def subsample(found, n, seed):
    """At most n items of a list, drawn at random, in their original order."""
    picked = torch.randperm(len(found), generator=generator(seed, STATES))[:n]
    return [found[i] for i in sorted(picked.tolist())]


def response_probabilities(model, pieces, temperature):
    """The exact probability of each response given its prompt, including the stop token.

        P = exp(sum_k log softmax(z_k / T)[y_k])

    pieces: pairs (prompt ids, response ids). Returns a list of floats.
    """
    samples = [batching.sample_of(*piece) for piece in pieces]
    objective = update.Objective(temperature=temperature, microbatch_tokens=2048)
    scores = update.logprobs(model, samples, objective)
    return [math.exp(math.fsum(score)) for score in scores]


def repeat_probabilities(actor, found, temperature):
    """For each state, {command given before: its exact probability}."""
    pieces = [(state.prompt_ids, actor.chat.respond(command)) for state in found for command in state.given]
    known = iter(response_probabilities(actor.model, pieces, temperature))
    return [{command: next(known) for command in state.given} for state in found]


def sampled_commands(actor, found, temperature, seed):
    """TRIALS sampled commands for each state; None for a response without a command."""
    streams = [[stream(seed, ANSWERS, i, k) for k in range(TRIALS)] for i in range(len(found))]
    sampling = Sampling(temperature, actor.config.max_response_tokens)
    prompts, chat = [state.prompt_ids for state in found], actor.chat
    answers = answer(actor.model, prompts, streams, chat.stop_ids, sampling, actor.config.slots)
    return [[None if response.truncated else chat.parse(chat.decode(response.ids))[0]
             for response in of_state] for of_state in answers]


def repeats(actor, found, temperature, seed):
    """`repeat_numbers` of a model in the states of a list, which may be empty."""
    if not found:
        return repeat_numbers([], [], [])
    return repeat_numbers(found, sampled_commands(actor, found, temperature, seed),
                          repeat_probabilities(actor, found, temperature))


def repeat_numbers(found, trials, probability):
    """Figure 1's numbers; None for those without a state.

    trials: sampled commands of each state; probability: `repeat_probabilities`. Returns "places": number of
    states; "trials": share of trials that repeat a command; "alike": share of states in which at least
    CONSISTENT trials repeat the same command; "confidence": mean over states of the probability to repeat any
    command; "accepted", "refused": to repeat a command that the game had accepted or refused, over states
    with such a command.
    """
    def mean_probability(outcomes):
        sums = [[p for command, p in of_state.items() if state.given[command] in outcomes]
                for state, of_state in zip(found, probability, strict=True)]
        return mean_known([sum(of_state) for of_state in sums if of_state])

    repeated = [[command for command in of_state if command in state.given]
             for state, of_state in zip(found, trials, strict=True)]
    most = [max(Counter(commands).values(), default=0) for commands in repeated]
    return {"places": len(found), "trials": mean_known([len(commands) / TRIALS for commands in repeated]),
            "alike": mean_known([float(n >= CONSISTENT) for n in most]),
            "confidence": mean_probability((True, False)),
            "accepted": mean_probability((True,)), "refused": mean_probability((False,))}


# Figure 2: flaws in won and in lost episodes

def turn_shares(episode, environment):
    """An episode's shares of turns by kind, its task and outcome, and whether an early turn is flawed.

    flawed: bad by the oracle and accepted by the game; refused: refused by the game, or without a command;
    repeated: as in rollout.repeated_turns.
    """
    labels = oracle_labels(episode, environment)
    flawed = [turn.valid and label == "bad" for turn, label in zip(episode.turns, labels, strict=True)]
    n = len(episode.turns)
    return {"task": episode.group, "won": episode.won, "flawed": sum(flawed) / n,
            "refused": sum(not turn.valid for turn in episode.turns) / n,
            "repeated": rollout.repeated_turns(episode) / n, "early": any(flawed[:EARLY])}


def bootstrap(columns_GK, statistic, draws=1000):
    """A statistic of sums over tasks with half its 95 % interval, {"value", "half"}; None if not finite.

    columns_GK: K numbers of each of G tasks. statistic(sums of shape [..., K]) returns shape [...]. The
    interval is 1.96 standard deviations over `draws` resamples of tasks; episodes of a task are not
    independent.
    """
    columns_GK = np.asarray(columns_GK, dtype=float)
    n = len(columns_GK)
    times_RG = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, values_R = statistic(columns_GK.sum(0)), statistic(times_RG @ columns_GK)
    if not np.isfinite(value):
        return None
    return {"value": float(value), "half": 1.96 * float(np.std(values_R[np.isfinite(values_R)]))}


def by_task(rows):
    """The episodes' `turn_shares`, grouped by task."""
    return [[row for row in rows if row["task"] == task]
            for task in sorted({row["task"] for row in rows})]


def in_won_and_lost(rows, kind):
    """The mean share of a kind of turns in won and in lost episodes, and the difference lost - won.

    The difference has its interval; None without such episodes.
    """
    def shares(rows, won):
        return [row[kind] for row in rows if row["won"] == won]

    def difference(sums_4):
        return sums_4[..., 2] / sums_4[..., 3] - sums_4[..., 0] / sums_4[..., 1]

    columns_G4 = [[f(shares(task, won)) for won in (True, False) for f in (sum, len)]
                  for task in by_task(rows)]
    return {"won": mean_known(shares(rows, True)), "lost": mean_known(shares(rows, False)),
            "difference": bootstrap(columns_G4, difference)}


def failure_slope(rows):
    """An estimate of Lemma 3.1's r: how much an early flaw raises the probability of failure within a task.

        r = sum (x - mean_task x)(y - mean_task y) / sum (x - mean_task x)^2

    the least-squares slope, within tasks, of y (lost) on x (one of the first EARLY turns is flawed), with its
    interval; None if no task has episodes with both values of x. A slope across tasks would mix in their
    difficulty. Within a task it is still an association, not the effect of the flaw.
    """
    def sums(task):
        x_E = np.array([float(row["early"]) for row in task])
        y_E = np.array([float(not row["won"]) for row in task])
        x_E -= x_E.mean()
        return [x_E @ y_E, x_E @ x_E]

    return bootstrap([sums(task) for task in by_task(rows)], lambda sums_2: sums_2[..., 0] / sums_2[..., 1])


def own_play(episodes, environment):
    """Numbers of a model's own episodes: success, wins per task, shares of turns by kind, Figure 2's."""
    rows = [turn_shares(episode, environment) for episode in episodes]
    return {"success": mean_known([float(row["won"]) for row in rows]),
            "wins": [sum(row["won"] for row in task) for task in by_task(rows)],
            "shares": {kind: mean_known([row[kind] for row in rows]) for kind in KINDS},
            "won or lost": {kind: in_won_and_lost(rows, kind) for kind in KINDS},
            "raised": failure_slope(rows)}


# Figure 5: confidence in good and in flawed actions

def turn_classes(episodes, environment):
    """The class of every turn in order, one of CLASSES; None: not labeled, or no command.

    A command that the game accepted is "good" or "flawed" by the oracle.
    """
    def of(turn, label):
        if turn.action is None:
            return None
        return {"good": "good", "bad": "flawed"}.get(label) if turn.valid else "refused"

    return [of(turn, label) for episode in episodes
            for turn, label in zip(episode.turns, oracle_labels(episode, environment), strict=True)]


def turn_probabilities(model, episodes, temperature):
    """`response_probabilities` of every turn in order, with one forward pass per episode."""
    samples = [sample for episode in episodes for sample in batching.samples_of(episode)]
    objective, found = update.Objective(temperature=temperature, microbatch_tokens=2048), []
    for sample, scores in zip(samples, update.logprobs(model, samples, objective)):
        sampled_scores = iter([score for score, sampled in zip(scores, sample.sampled) if sampled])
        found += [math.exp(math.fsum(next(sampled_scores) for _ in turn.response_ids))
                  for turn in sample.turns]
    return found


def mean_probabilities(of_turn, probability):
    """The mean probability of each class's turns (None if it has none), and their number."""
    members = {name: [p for turn, p in zip(of_turn, probability, strict=True) if turn == name]
               for name in CLASSES}
    return {name: {"mean": mean_known(p), "turns": len(p)} for name, p in members.items()}


def rise_and_fall(of_turn, probability_by_model):
    """How the probability of single turns changes over the models, by class; None without such turns.

    "risen": share of turns that rise by MOVED or more above the first model's value; "fallen": of these, the
    share whose last value is MOVED or more below their maximum.
    """
    result = {}
    for name in CLASSES:
        paths = [path for turn, path in zip(of_turn, zip(*probability_by_model, strict=True)) if turn == name]
        risen = [path for path in paths if max(path) >= path[0] + MOVED]
        result[name] = {"risen": mean_known([float(max(path) >= path[0] + MOVED) for path in paths]),
                        "fallen": mean_known([float(path[-1] <= max(path) - MOVED) for path in risen])}
    return result


# All measures of a run

def specs(tasks, seed):
    """MEMBERS specs of each task; their random draws are the same for every model."""
    return [rollout.EpisodeSpec(task, g, stream(seed, EPISODES, g, member), g * MEMBERS + member)
            for g, task in enumerate(tasks) for member in range(MEMBERS)]


def measured(actors, tasks, n_states, seed):
    """All numbers of a run. actors: pairs (iterations, Actor), the initial model first.

    "repeats" and "confidence" are of the initial model's episodes at temperature 1, the same for all models.
    "chosen" is Figure 1: "own", of the model's own episodes at this temperature; "initial", of the initial
    model's, so that only the model changes and not the states.
    """
    models, by_model, fixed = [], {temperature: [] for temperature in TEMPERATURES}, None
    for done, actor in actors:
        environment, of_model = actor.config.environment, {"done": done}
        for temperature in TEMPERATURES:
            played = actor.play(specs(tasks, seed), temperature)
            own = repeat_states(played)
            chosen = subsample(chosen_repeats(own), n_states, seed)
            if fixed is None:                                        # the first of TEMPERATURES is 1
                fixed, found, initial = played, subsample(own, n_states, seed), chosen
                of_turn = turn_classes(fixed, environment)
            probability = turn_probabilities(actor.model, fixed, temperature)
            by_model[temperature].append(probability)
            of_model[str(temperature)] = {
                "own": own_play(played, environment), "confidence": mean_probabilities(of_turn, probability),
                "repeats": repeats(actor, found, temperature, seed),
                "chosen": {"own": repeats(actor, chosen, temperature, seed),
                           "initial": repeats(actor, initial, temperature, seed)}}
        models.append(of_model)
    return {"models": models, "ways": {str(temperature): rise_and_fall(of_turn, probability)
                                       for temperature, probability in by_model.items()}}
