"""Hand-made and random episodes and samples, with oracle rewards, for tests of algorithms/ and update.py.

The oracles (`reward_of`, `turn_reward`, `relative_advantage`, `episode_level`) are plain Python in double
precision over the records: they use no tensors and import nothing from algorithms/.
"""

import random
from dataclasses import replace
from statistics import fmean, pstdev, stdev

import torch
from conftest import NOOP_MESSAGE, flat

import batching
import config
import update
from algorithms import rewards
from envs import Task
from envs.alfred.games import GOALS
from infra import parallel
from rollout import Episode, Turn

SUCCESS_10 = dict(success_reward=10.0, invalid_unit="turn")
CODE = dict(variant="code", success_reward=10.0, invalid="format")
TAGS = ("planning", "explore", "reflection", "monitor")
HEAD, ANSWER = [1, 2, 3], [4, 5]         # token ids of a first message and of an observation
PLAIN = update.Objective(max_grad_norm=0.0)


# Episodes

def make_episode(lines, group=0, won=False, history=0, first_id=100, index=0):
    """An episode of lines (action, its observation, tag, number of response tokens).

    A command is refused if its observation is NOOP_MESSAGE. Response tokens have distinct ids, counted from
    first_id, so that a stand-in critic can tell them apart.
    """
    episode, pieces = Episode(Task("room", "train", "walk", None), group, index, won=won), []
    observation = anchor = f"start of {group}"
    for action, answer, tag, tokens in lines:
        kept = pieces[-history:] if history else pieces
        response = list(range(first_id, first_id := first_id + tokens))
        episode.turns.append(Turn(observation, HEAD + sum(kept, []), response, [-0.5] * tokens, action or "",
                                  action, action is not None and answer != NOOP_MESSAGE, anchor, tag=tag))
        pieces.append(response + ANSWER)
        observation, anchor = answer, anchor if answer == NOOP_MESSAGE else answer
    episode.final_observation = observation
    return episode


def random_episodes(seed, groups=4, size=5, history=0, first=0, pays=False):
    """Ragged episodes with refused and malformed turns, repeated states and all tags, numbered from `first`.

    The episodes of the last group are lost and differ only in length. pays: whether turns of the other groups
    have rewards of the environment's own.
    """
    rng, episodes = random.Random(seed), []
    for g in range(groups):
        for _ in range(size):
            lines = []
            for _ in range(rng.randint(1, 9)):
                action = rng.choice(["a", "b", "c", "d", None])
                answer = NOOP_MESSAGE if action is None or rng.random() < 0.3 else f"room {rng.randrange(4)}"
                lines.append((action, answer, rng.choice(TAGS) if action else None, rng.randint(1, 3)))
            won = rng.random() < 0.5
            if g == groups - 1:
                lines, won = [("a", "room 0", "monitor", 2)] * rng.randint(1, 4), False
            k = len(episodes)
            episodes.append(make_episode(lines, g, won, history, 1000 * (k + 1), first + k))
            for turn in episodes[-1].turns if pays and g < groups - 1 else ():
                turn.reward = rng.choice([0.0, 0.5, -0.25])
    return episodes


def flat_turns(episodes):
    """(episode, index of the turn) of every turn, in order."""
    return [(e, t) for e in episodes for t in range(len(e.turns))]


def method_of(name, **settings):
    """The algorithm `name` with these settings."""
    method = config.find_algorithm(name)
    return method(method.Settings(**settings))


def advantages_of(method, episodes):
    """The advantage that an algorithm assigns to every turn, and its metrics."""
    rewards.write_rewards(episodes, method.settings)
    metrics = method.assign(episodes)
    return [turn.advantage for e in episodes for turn in e.turns], metrics


def on_two_ranks(monkeypatch, call, parts):
    """[call(part) for each of two ranks' parts], where parallel.all_sum returns the sum over both ranks."""
    def calls_of(part):
        inputs = []
        monkeypatch.setattr(parallel, "all_sum", lambda x: inputs.append(x) or x)
        call(part)
        return inputs

    def total(a, b):
        return {key: a[key] + b[key] for key in a} if isinstance(a, dict) else a + b

    totals = [total(a, b) for a, b in zip(*map(calls_of, parts), strict=True)]
    results = []
    for part in parts:
        of_all = iter(totals)
        monkeypatch.setattr(parallel, "all_sum", lambda x: next(of_all))
        results.append(call(part))
    return results


# Oracles of rewards and advantages

def penalized(turn, settings):
    """Whether a turn is penalized."""
    return not turn.valid if settings.invalid == "admissible" else turn.action is None


def reward_of(episode, settings):
    """The reward of an episode."""
    refused = sum(penalized(turn, settings) for turn in episode.turns)
    if settings.invalid_unit == "share":
        refused /= len(episode.turns)
    own = sum(turn.reward for turn in episode.turns)
    return settings.success_reward * episode.won - settings.invalid_penalty * refused + own


def turn_reward(episode, t, settings):
    """The reward of turn t; success counts in the last turn."""
    reward = settings.success_reward if episode.won and t == len(episode.turns) - 1 else 0.0
    if penalized(episode.turns[t], settings):
        reward -= settings.invalid_penalty / (len(episode.turns) if settings.invalid_unit == "share" else 1)
    return reward + episode.turns[t].reward


def turn_row_reward(episode, t, settings):
    """The reward of turn t in variant "code": the episode's success and own rewards, the turn's penalty."""
    penalty = settings.invalid_penalty * penalized(episode.turns[t], settings)
    return settings.success_reward * episode.won - penalty + sum(turn.reward for turn in episode.turns)


def relative_advantage(value, others, normalize, spread):
    """value - mean(others), divided by spread(others) if `normalize`; 0 if all are equal.

    others: the values of the group, including `value`.
    """
    if max(others) - min(others) < 1e-9:
        return 0.0
    return (value - fmean(others)) / (spread(others) + 1e-6 if normalize else 1.0)


def episode_level(episode, t, episodes, settings, normalize):
    """GRPO's advantage of turn t, relative to the group's episodes; in variant "code", to all their turns."""
    group = [e for e in episodes if e.group == episode.group]
    if settings.variant == "code":
        rows = [turn_row_reward(*turn, settings) for turn in flat_turns(group)]
        return relative_advantage(turn_row_reward(episode, t, settings), rows, normalize, stdev)
    rewards_of_group = [reward_of(e, settings) for e in group]
    return relative_advantage(reward_of(episode, settings), rewards_of_group, normalize, pstdev)


def whitened(numbers):
    """(x - mean) / (standard deviation + 1e-8) of each number."""
    return [(x - fmean(numbers)) / (pstdev(numbers) + 1e-8) for x in numbers]


# Samples

def make_sample(rng, episode=0, kind="policy", n=None, old=0.1, make=batching.Sample):
    """A sample of random ids, about 40 % of them sampled; old logprobs are -5 +- `old`."""
    n = n or rng.randint(4, 40)
    sampled = [False] + [rng.random() < 0.4 for _ in range(n - 2)] + [True]
    return make([rng.randrange(256) for _ in range(n)], sampled, [rng.gauss(0, 1) * s for s in sampled],
                [(-5.0 + rng.uniform(-old, old)) * s for s in sampled], episode, kind)


def unscored_samples():
    """Nine policy samples without old logprobs, as in the cold start."""
    rng = random.Random(0)
    return [replace(make_sample(rng, episode=i % 5), logprob_old=None) for i in range(9)]


def sampled_positions(sample):
    """The positions of the sampled tokens, those that are trained."""
    return [t for t, sampled in enumerate(sample.sampled) if sampled]


def with_old_logprobs(model, samples, rng):
    """Set the samples' old logprobs to the model's, moved by up to 0.4 nats; returns the samples."""
    for sample, scores in zip(samples, update.logprobs(model, samples, PLAIN)):
        sample.logprob_old = [(p + rng.uniform(-0.4, 0.4)) * s for p, s in zip(scores, sample.sampled)]
    return samples


def gradient_of(model, loss):
    """The gradient of a loss with respect to all weights, flat; 0 for weights that it does not depend on."""
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return flat(torch.zeros_like(p) if g is None else g for g, p in zip(grads, model.parameters()))


# An ALFWorld game: put the apple from the table into the fridge

PDDL = """(define (problem p) (:domain alfred) (:objects a - agent) (:init (atlocation a loc_0)
 (receptacletype Fridge_bar_1 FridgeType) (receptacleatlocation Fridge_bar_1 loc_1) (openable Fridge_bar_1)
 (receptacletype Table_bar_2 TableType) (receptacleatlocation Table_bar_2 loc_0)
 (cancontain FridgeType AppleType) (cancontain TableType AppleType) (objecttype Apple_bar_3 AppleType)
 (pickupable Apple_bar_3) (inreceptacle Apple_bar_3 Table_bar_2) (objectatlocation Apple_bar_3 loc_0))
 (:goal (and """ + GOALS["pick_and_place_simple"].replace("OBJECT", "AppleType").replace(
    "RECEPTACLE", "FridgeType") + ")))"
GAME = {"split": "train", "solvable": True, "rel": "train/a/b", "task_type": "pick_and_place_simple",
        "task_desc": "put a apple in fridge", "pddl_problem": PDDL}
