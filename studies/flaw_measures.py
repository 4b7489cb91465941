"""What the models of a run do with repeats and flaws: the numbers behind studies/flaws.py, and their maths.

All models of a seed are asked about the same states and turns: those of the start model's own episodes, at
temperature 1. The same tasks with the same draws are played by each model. Probabilities are exact, from the
logits of a command's tokens. A flaw is an admissible command that the world's oracle calls bad. Left out:
commands that are written with other tokens than the tokenizer's, and runs, means over seeds and pictures
(studies/flaws.py).
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

import judge
import rollout
import update
from bench.intervals import mean_known
from lm.engine import Sampling, answer
from run.parallel import generator, stream

MEMBERS = 4                   # episodes of each task
TEMPERATURES = (1.0, 0.4)
TRIALS, ALIKE = 10, 5         # answers in a state, and how many alike make it one of high consistency (paper)
EARLY = 5                     # turns at an episode's start in which a flaw counts as early
MOVED = 0.1                   # what a probability has to move by to have risen, or fallen again
KINDS = ("flawed", "refused", "repeated")             # of turns; a repeated one may be either of the others
CLASSES = ("good", "flawed", "refused")               # of commands
EPISODES, STATES, ANSWERS = 11, 12, 13                # what a random stream is for: the second of its name


# Figure 1: repeats

@dataclass(frozen=True, slots=True)
class Place:
    """A state in which commands were given before, so that one can be repeated."""

    prompt_ids: list[int]
    given: dict[str, bool]        # {command: whether the game took it when it was last given there}


def places(episodes):
    """Every turn whose state (anchor) had been acted on earlier in its episode, as a Place.

    The state is rollout.repeated_turns': what was last seen that was news, so a refused command leaves one
    where one was. Turns without a command give nothing that could be repeated.
    """
    found = []
    for episode in episodes:
        given = {}
        for turn in episode.turns:
            here = given.setdefault(turn.anchor, {})
            if here:
                found.append(Place(turn.prompt_ids, dict(here)))
            if turn.action is not None:
                here[turn.action] = turn.valid
    return found


def drawn(found, n, seed):
    """At most n of a list, drawn at random, in their order."""
    picked = torch.randperm(len(found), generator=generator(seed, STATES))[:n]
    return [found[i] for i in sorted(picked.tolist())]


def chances(model, pieces, temperature):
    """The exact probability of each response after its prompt, stop token included, at this temperature.

        P = exp(sum_k log softmax(z_k / T)[y_k])

    pieces: (prompt ids, response ids) pairs. Returns a float each.
    """
    samples = [update.Sample(prompt + response, [False] * len(prompt) + [True] * len(response),
                             [0.0] * (len(prompt) + len(response)), None, 0) for prompt, response in pieces]
    scores = update.score(model, samples, update.Objective(temperature=temperature, microbatch_tokens=2048))
    return [math.exp(math.fsum(score)) for score in scores]


def repeat_chances(actor, found, temperature):
    """Of each place {command: the probability that it is given again}, exact."""
    pieces = [(place.prompt_ids, actor.chat.respond(command)) for place in found for command in place.given]
    known = iter(chances(actor.model, pieces, temperature))
    return [{command: next(known) for command in place.given} for place in found]


def tried(actor, found, temperature, seed):
    """TRIALS commands in each place, as the model draws them; None for a response that holds none."""
    streams = [[stream(seed, ANSWERS, i, k) for k in range(TRIALS)] for i in range(len(found))]
    sampling = Sampling(temperature, actor.config.max_response_tokens)
    prompts, chat = [place.prompt_ids for place in found], actor.chat
    answers = answer(actor.model, prompts, streams, chat.stop_ids, sampling, actor.config.slots)
    return [[None if response.truncated else chat.parse(chat.decode(response.ids))[0]
             for response in of_place] for of_place in answers]


def repeats(found, trials, chance):
    """How much is repeated in these places: Figure 1's numbers, each None where there is no place for it.

    trials: share of the trials that repeat a command; alike: share of places where at least ALIKE trials
    give the same repeated one; confidence: mean over places of the exact probability to repeat any; accepted,
    refused: to repeat one that the game took, or refused, in places that have such.
    """
    def confidence(took):
        sums = [[p for command, p in of_place.items() if place.given[command] in took]
                for place, of_place in zip(found, chance, strict=True)]
        return mean_known([sum(of_place) for of_place in sums if of_place])

    again = [[command for command in of_place if command in place.given]
             for place, of_place in zip(found, trials, strict=True)]
    most = [max(Counter(commands).values(), default=0) for commands in again]
    return {"places": len(found), "trials": mean_known([len(commands) / TRIALS for commands in again]),
            "alike": mean_known([float(n >= ALIKE) for n in most]), "confidence": confidence((True, False)),
            "accepted": confidence((True,)), "refused": confidence((False,))}


# Figure 2: flaws in won and in lost episodes

def count(episode, world):
    """What Figure 2 needs of an episode: shares of its turns by kind, and whether an early one is flawed.

    flawed: the oracle calls it bad, and the game takes it; refused: the game does not, or it held no command;
    repeated: rollout.repeated_turns.
    """
    labels = judge.oracle_labels(episode, world)
    flawed = [turn.valid and label == "bad" for turn, label in zip(episode.turns, labels, strict=True)]
    n = len(episode.turns)
    return {"task": episode.group, "won": episode.won, "flawed": sum(flawed) / n,
            "refused": sum(not turn.valid for turn in episode.turns) / n,
            "repeated": rollout.repeated_turns(episode) / n, "early": any(flawed[:EARLY])}


def bootstrap(columns_GK, statistic, draws=1000):
    """A statistic of sums over tasks, with half its 95 % interval: 1.96 standard deviations over `draws`
    resamples of whole tasks, whose episodes are not independent. None where a class is empty.

    columns_GK: K numbers of each task; statistic: of their sums [.., K], element by element.
    """
    columns_GK = np.asarray(columns_GK, dtype=float)
    n = len(columns_GK)
    times_RG = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, values_R = statistic(columns_GK.sum(0)), statistic(times_RG @ columns_GK)
    if not np.isfinite(value):
        return None
    return {"value": float(value), "half": 1.96 * float(np.std(values_R[np.isfinite(values_R)]))}


def by_task(counts):
    """The counts of each task's episodes."""
    return [[count for count in counts if count["task"] == task]
            for task in sorted({count["task"] for count in counts})]


def in_won_and_lost(counts, kind):
    """The mean share of a kind of turns in won and in lost episodes (None without such), and the difference
    lost - won with its interval."""
    def shares(counts, won):
        return [count[kind] for count in counts if count["won"] == won]

    def difference(sums_4):
        return sums_4[..., 2] / sums_4[..., 3] - sums_4[..., 0] / sums_4[..., 1]

    columns_G4 = [[f(shares(task, won)) for won in (True, False) for f in (sum, len)]
                  for task in by_task(counts)]
    return {"won": mean_known(shares(counts, True)), "lost": mean_known(shares(counts, False)),
            "difference": bootstrap(columns_G4, difference)}


def raised(counts):
    """Lemma 3.1's r, as far as play tells it: how much likelier a loss is where one of the first EARLY turns
    was flawed, among episodes of the same task: the least-squares slope of lost on flawed within tasks

        r = sum (x - mean_task x)(y - mean_task y) / sum (x - mean_task x)^2

    with its interval; None where no task was played both ways. Tasks differ in difficulty, so a slope across
    them would not be the action's doing; within a task it still is what went with the flaw, not its effect.
    """
    def sums(task):
        x_E = np.array([float(count["early"]) for count in task])
        y_E = np.array([float(not count["won"]) for count in task])
        x_E -= x_E.mean()
        return [x_E @ y_E, x_E @ x_E]

    return bootstrap([sums(task) for task in by_task(counts)], lambda sums_2: sums_2[..., 0] / sums_2[..., 1])


def own(episodes, world):
    """A model's own episodes: success, wins of each task, shares of turns by kind, Figure 2's numbers."""
    counts = [count(episode, world) for episode in episodes]
    return {"success": mean_known([float(count["won"]) for count in counts]),
            "wins": [sum(count["won"] for count in task) for task in by_task(counts)],
            "shares": {kind: mean_known([count[kind] for count in counts]) for kind in KINDS},
            "won or lost": {kind: in_won_and_lost(counts, kind) for kind in KINDS}, "raised": raised(counts)}


# Figure 5: confidence in good and in flawed actions

def classes(episodes, world):
    """The class of every turn in order: "good" or "flawed" by the oracle of commands that the game took,
    "refused", or None: not labelled, or no command."""
    def of(turn, label):
        if turn.action is None:
            return None
        return {"good": "good", "bad": "flawed"}.get(label) if turn.valid else "refused"

    return [of(turn, label) for episode in episodes
            for turn, label in zip(episode.turns, judge.oracle_labels(episode, world), strict=True)]


def turn_chances(model, episodes, temperature):
    """The exact probability of every turn's response, in order: `chances`, an episode in one forward."""
    samples = [sample for episode in episodes for sample in update.samples_of(episode)]
    objective, found = update.Objective(temperature=temperature, microbatch_tokens=2048), []
    for sample, scores in zip(samples, update.score(model, samples, objective)):
        spoken = iter([score for score, sampled in zip(scores, sample.sampled) if sampled])
        found += [math.exp(math.fsum(next(spoken) for _ in turn.response_ids)) for turn in sample.turns]
    return found


def confidence(of_turn, chance):
    """The mean probability of each class's turns, and how many there are; None of an empty one."""
    members = {name: [p for turn, p in zip(of_turn, chance, strict=True) if turn == name]
               for name in CLASSES}
    return {name: {"mean": mean_known(p), "turns": len(p)} for name, p in members.items()}


def ways(of_turn, chance_by_model):
    """What the probability of single turns does along the models, by class: the share that rises, to MOVED
    above its first or more, and of those the share that has fallen again, by MOVED below its highest or more,
    at the last. None where there is no such turn."""
    result = {}
    for name in CLASSES:
        paths = [path for turn, path in zip(of_turn, zip(*chance_by_model, strict=True)) if turn == name]
        risen = [path for path in paths if max(path) >= path[0] + MOVED]
        result[name] = {"risen": mean_known([float(max(path) >= path[0] + MOVED) for path in paths]),
                        "fallen": mean_known([float(path[-1] <= max(path) - MOVED) for path in risen])}
    return result


# All of a run

def seats(tasks, seed):
    """MEMBERS episodes of each task; a seat's draws are the same for every model."""
    return [rollout.Seat(task, g, stream(seed, EPISODES, g, member), g * MEMBERS + member)
            for g, task in enumerate(tasks) for member in range(MEMBERS)]


def measured(actors, tasks, n_places, seed):
    """Every number of a run. actors: (iterations, Actor) pairs, the start model first: its episodes at
    temperature 1 hold the states and the turns about which all are asked."""
    models, by_model, fixed = [], {temperature: [] for temperature in TEMPERATURES}, None
    for done, actor in actors:
        world, of_model = actor.config.world, {"done": done}
        for temperature in TEMPERATURES:
            played = actor.play(seats(tasks, seed), temperature)
            if fixed is None:                                        # TEMPERATURES begin with 1
                fixed, found = played, drawn(places(played), n_places, seed)
                of_turn = classes(fixed, world)
            chance = turn_chances(actor.model, fixed, temperature)
            by_model[temperature].append(chance)
            of_model[str(temperature)] = {
                "own": own(played, world), "confidence": confidence(of_turn, chance),
                "repeats": repeats(found, tried(actor, found, temperature, seed),
                                   repeat_chances(actor, found, temperature))}
        models.append(of_model)
    return {"models": models, "ways": {str(temperature): ways(of_turn, chance)
                                       for temperature, chance in by_model.items()}}
