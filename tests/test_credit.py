"""Proves that episodes are credited by the equations of GRPO, GiGPO, RLVMR and PPO, on random hand-made episodes.

    python -m pytest tests/test_credit.py

The oracles (`group_advantage`, `gigpo_by_loops`, `rlvmr_by_loops`, `gae_by_loops`, ...) are plain Python over the
records, in double precision: no tensor, and nothing of algorithms.py.
"""

import math
import random
from dataclasses import replace
from statistics import fmean, pstdev, pvariance, stdev

import pytest
import torch
from conftest import Corridor, Recorder, make_seats, with_value_head

import algorithms
import credit
import parallel
import rollout
import update
from credit import Critic, Estimator
from envs import Task
from rollout import NOTHING, Episode, Sampling, Turn

pytestmark = pytest.mark.fast

GRPO = Estimator(algo="grpo", success_reward=1.0, invalid="admissible", invalid_penalty=0.1, invalid_unit="share",
                 baseline="episode", normalize_std=False, step_gamma=0.9, tag_rewards="code", step_weight=0.7, anchor="state",
                 composition="paper", gae_lambda=0.8, ppo_form="turn")
GIGPO, RLVMR, PPO = replace(GRPO, algo="gigpo"), replace(GRPO, algo="rlvmr"), replace(GRPO, algo="ppo")
TENFOLD, OWN = (dict(success_reward=10.0, invalid_unit=unit) for unit in ("turn", "own"))
TAGS = ("planning", "explore", "reflection", "monitor")
HEAD, ANSWER = [1, 2, 3], [4, 5]         # token ids of a first message and of an answer of the environment


def make_episode(lines, group=0, won=False, history=0, first_id=100):
    """An episode of (action, the answer to it, tag, tokens); refused where the answer is NOTHING.

    Every response token has an id of its own, counted from first_id, so that a stand-in critic can know it.
    """
    episode, pieces = Episode(Task("room", "train", "walk", None), group, won=won), []
    observation = anchor = f"start of {group}"
    for action, answer, tag, tokens in lines:
        kept = pieces[-history:] if history else pieces
        response = list(range(first_id, first_id := first_id + tokens))
        episode.turns.append(Turn(observation, HEAD + sum(kept, []), response, [-0.5] * tokens, action or "", action,
                                  action is not None and answer != NOTHING, anchor, tag=tag))
        pieces.append(response + ANSWER)
        observation, anchor = answer, anchor if answer == NOTHING else answer
    episode.final_observation = observation
    return episode


def random_episodes(seed, groups=4, size=5, history=0):
    """Ragged episodes: refused and malformed turns, states met again, all tags; the last group is lost and alike."""
    rng, episodes = random.Random(seed), []
    for g in range(groups):
        for member in range(size):
            lines = []
            for _ in range(rng.randint(1, 9)):
                action = rng.choice(["a", "b", "c", "d", None])
                answer = NOTHING if action is None or rng.random() < 0.3 else f"room {rng.randrange(4)}"
                lines.append((action, answer, rng.choice(TAGS) if action else None, rng.randint(1, 3)))
            won = rng.random() < 0.5
            if g == groups - 1:
                lines, won = [("a", "room 0", "monitor", 2)] * rng.randint(1, 4), False
            episodes.append(make_episode(lines, g, won, history, 1000 * (len(episodes) + 1)))
    return episodes


def flat_turns(episodes):
    return [(e, t) for e in episodes for t in range(len(e.turns))]


def wrong(turn, estimator):
    return not turn.valid if estimator.invalid == "admissible" else turn.action is None


def reward_of(episode, estimator, row=None):
    """The episode's reward; with unit "own", that of its row-th turn."""
    if estimator.invalid_unit == "own":
        return estimator.success_reward * episode.won - estimator.invalid_penalty * wrong(episode.turns[row], estimator)
    refused = sum(wrong(turn, estimator) for turn in episode.turns)
    if estimator.invalid_unit == "share":
        refused /= len(episode.turns)
    return estimator.success_reward * episode.won - estimator.invalid_penalty * refused


def turn_reward(episode, t, estimator):
    """What turn t earned: success is the last one's."""
    reward = estimator.success_reward if episode.won and t == len(episode.turns) - 1 else 0.0
    if wrong(episode.turns[t], estimator):
        share = len(episode.turns) if estimator.invalid_unit == "share" else 1
        reward -= estimator.invalid_penalty / share
    return reward


def compared(value, others, normalize, spread):
    """A value against others (itself among them), divided by their spread where asked; 0 where all are equal."""
    if max(others) - min(others) < 1e-9:
        return 0.0
    return (value - fmean(others)) / (spread(others) + 1e-6 if normalize else 1.0)


def group_advantage(episode, t, episodes, estimator):
    own = [e for e in episodes if e.group == episode.group]
    if estimator.baseline == "turn":
        rewards = [reward_of(e, estimator, k) for e in own for k in range(len(e.turns))]
        return compared(reward_of(episode, estimator, t), rewards, estimator.normalize_std, stdev)
    rewards = [reward_of(e, estimator) for e in own]
    return compared(reward_of(episode, estimator), rewards, estimator.normalize_std, pstdev)


# GRPO

@pytest.mark.parametrize("changes", [{}, {"normalize_std": True}, {"baseline": "turn"}, TENFOLD,
                                     {"invalid": "format"}, {"baseline": "turn", "normalize_std": True, **TENFOLD},
                                     {"baseline": "turn", **OWN},
                                     {"baseline": "turn", "normalize_std": True, "invalid": "format", **OWN}])
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_gives_every_turn_its_episodes_advantage(changes, seed):
    estimator, episodes = replace(GRPO, **changes), random_episodes(seed)
    advantage_S, metrics = credit.advantages(episodes, estimator)
    want = [group_advantage(e, t, episodes, estimator) for e, t in flat_turns(episodes)]
    assert advantage_S.tolist() == pytest.approx(want, abs=1e-5)
    assert metrics == {} and max(want) > 0.1


def test_rewards_and_groups_that_earned_alike():
    episodes = random_episodes(2)
    reward_E, equal_E = credit.rewards(episodes, GRPO)
    want = [reward_of(e, GRPO) for e in episodes]
    assert reward_E.tolist() == pytest.approx(want, abs=1e-6)
    of_group = {e.group: {reward_of(other, GRPO) for other in episodes if other.group == e.group} for e in episodes}
    assert equal_E.tolist() == [len(of_group[e.group]) == 1 for e in episodes]
    assert any(equal_E) and not all(equal_E)


def test_groups_whose_rows_differ_did_not_earn_alike():
    """Lost alike, one invalid turn each: the sums are equal, the rows are not."""
    lines = [("a", "hall", None, 1), ("dance", NOTHING, None, 1)]
    episodes = [make_episode(lines), make_episode(lines), make_episode(lines[:1], 1), make_episode(lines[:1], 1)]
    assert credit.rewards(episodes, replace(GRPO, **TENFOLD))[1].tolist() == [True] * 4
    assert credit.rewards(episodes, replace(GRPO, baseline="turn", **OWN))[1].tolist() == [False, False, True, True]


# GiGPO

def step_returns(episode, estimator):
    def penalty(k):
        return turn_reward(replace(episode, won=False), k, estimator) if estimator.invalid_unit == "own" else 0.0

    return [penalty(t) + sum(estimator.step_gamma ** (k - t) * (turn_reward(episode, k, estimator) - penalty(k))
                             for k in range(t, len(episode.turns))) for t in range(len(episode.turns))]


def gigpo_by_loops(episodes, estimator):
    def state(e, t):
        return e.group, e.turns[t].observation if estimator.anchor == "raw" else e.turns[t].anchor

    turns = flat_turns(episodes)
    returns = {id(e): step_returns(e, estimator) for e in episodes}
    advantages = []
    for e, t in turns:
        met = [returns[id(other)][k] for other, k in turns if state(other, k) == state(e, t)]
        step = compared(returns[id(e)][t], met, estimator.normalize_std, stdev)
        advantages.append(group_advantage(e, t, episodes, estimator) + estimator.step_weight * step)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"normalize_std": True}, {"anchor": "raw"}, TENFOLD,
                                     {"baseline": "turn", **OWN}, {"invalid": "format"},
                                     {"baseline": "turn", "normalize_std": True, "invalid": "format", **OWN},
                                     {"baseline": "turn", "normalize_std": True, "anchor": "raw"}])
@pytest.mark.parametrize("seed", [3, 4])
def test_gigpo_is_its_equations_written_out(changes, seed):
    estimator, episodes = replace(GIGPO, **changes), random_episodes(seed)
    advantage_S, metrics = credit.advantages(episodes, estimator)
    assert advantage_S.tolist() == pytest.approx(gigpo_by_loops(episodes, estimator), abs=1e-4)
    assert sum(metrics.values()) == pytest.approx(1) and len(metrics) == 4


@pytest.mark.parametrize("baseline", ["episode", "turn"])
def test_gigpo_without_weight_is_grpo(baseline):
    episodes = random_episodes(5)
    alone, _ = credit.advantages(episodes, replace(GIGPO, step_weight=0.0, baseline=baseline))
    assert torch.equal(alone, credit.advantages(episodes, replace(GRPO, baseline=baseline))[0])


def test_refused_turns_are_in_the_room_where_they_were_taken():
    """The raw text would compare the two turns after "Nothing happens.", which were taken in different rooms."""
    kitchen = make_episode([("a", "kitchen", None, 1), ("dance", NOTHING, None, 1), ("b", "hall", None, 1)], won=True)
    cellar = make_episode([("b", "cellar", None, 1), ("dance", NOTHING, None, 1), ("a", "hall", None, 1)])
    other_game = make_episode([("a", "kitchen", None, 1)], group=1)
    episodes = [kitchen, cellar, other_game]
    for kind, rooms in (("state", ["start", "kitchen", "kitchen", "start", "cellar", "cellar", "other start"]),
                        ("raw", ["start", "kitchen", "nothing", "start", "cellar", "nothing", "other start"])):
        anchor_S = credit.anchors(episodes, kind).tolist()
        assert [[a == b for a in anchor_S] for b in anchor_S] == [[a == b for a in rooms] for b in rooms]
    episodes = episodes[:2]
    step = {kind: credit.advantages(episodes, replace(GIGPO, anchor=kind, step_weight=1.0, invalid_penalty=0.0))[0]
            - credit.advantages(episodes, replace(GRPO, invalid_penalty=0.0))[0] for kind in ("state", "raw")}
    assert step["raw"].tolist() == pytest.approx([0.405, 0.0, 0.5, -0.405, 0.0, -0.5], abs=1e-6)
    # within the kitchen: returns 0.9 and 1; within the cellar both are 0
    assert step["state"].tolist() == pytest.approx([0.405, -0.05, 0.05, -0.405, 0.0, 0.0], abs=1e-6)


def test_anchor_shares_count_turns():
    """A start that four share, a room that two meet, and three turns that stand alone: 9 turns."""
    lines = [[("a", "hall", None, 1), ("b", "end", None, 1)], [("a", "hall", None, 1), ("b", "end", None, 1)],
             [("a", "attic", None, 1), ("b", "end", None, 1)],
             [("a", "cellar", None, 1), ("a", "roof", None, 1), ("b", "end", None, 1)]]
    _, metrics = credit.advantages([make_episode(own) for own in lines], GIGPO)
    assert metrics == pytest.approx({"gigpo/anchor_1_frac": 3 / 9, "gigpo/anchor_2-4_frac": 6 / 9,
                                     "gigpo/anchor_5-16_frac": 0, "gigpo/anchor_17+_frac": 0})


# RLVMR

NAMED = {letter: {letter} for letter in "abcd"}


def tags_by_loops(episode, estimator):
    """(tag that the turn is compared by, its reward) per turn."""
    found, turns = [], episode.turns
    for t, turn in enumerate(turns):
        reward, last = 0.0, turns[t - 1] if t else None
        if turn.tag == "planning" and episode.won:
            reward = 1.0
        if turn.tag == "explore" and all(before.action != turn.action for before in turns[:t]):
            reward = 1.0
        if turn.tag == "reflection" and estimator.tag_rewards == "code" and (
                last is None or not last.valid and last.action != turn.action):
            reward = 1.0
        if turn.tag == "reflection" and estimator.tag_rewards == "paper" and last and not last.valid and turn.valid:
            reward = 1.0
        found.append((turn.tag if turn.tag != "monitor" else None, reward))
    return found


def rlvmr_by_loops(episodes, estimator):
    turns, tags = flat_turns(episodes), {id(e): tags_by_loops(e, estimator) for e in episodes}
    advantages = []
    for e, t in turns:
        tag, reward = tags[id(e)][t]
        same = [(other.group, tags[id(other)][k][1]) for other, k in turns if tags[id(other)][k][0] == tag]
        if estimator.composition == "paper":
            alpha, own = 1 - estimator.step_weight, [reward_of(o, estimator) for o in episodes if o.group == e.group]
            trajectory = compared(reward_of(e, estimator), own, True, pstdev)
            advantages.append(alpha * trajectory + (1 - alpha) * compared(reward, [r for _, r in same], True, pstdev))
            continue
        of_tag = [r for group, r in same if group == e.group]
        of_turns = [reward_of(other, estimator, k) for other, k in turns if other.group == e.group]
        step = reward if len(of_tag) == 1 else compared(reward, of_tag, estimator.normalize_std, stdev)
        episode = compared(reward_of(e, estimator, t), of_turns, estimator.normalize_std, stdev)
        advantages.append(episode + estimator.step_weight * step)
    return advantages


@pytest.mark.parametrize("changes", [{}, {"step_weight": 0.2}, TENFOLD, {"composition": "code", "normalize_std": True},
                                     {"composition": "code"}, {"composition": "code", "step_weight": 1.0, **TENFOLD},
                                     {"composition": "code", "normalize_std": True, "invalid": "format", **OWN},
                                     {"tag_rewards": "paper"}, {"tag_rewards": "paper", "composition": "code", **OWN}])
@pytest.mark.parametrize("seed", [6, 7])
def test_rlvmr_is_its_equations_written_out(changes, seed, monkeypatch):
    monkeypatch.setattr(algorithms, "names_in", NAMED.get)               # commands here are one letter
    estimator, episodes = replace(RLVMR, **changes), random_episodes(seed)
    advantage_S, metrics = credit.advantages(episodes, estimator)
    assert advantage_S.tolist() == pytest.approx(rlvmr_by_loops(episodes, estimator), abs=1e-4)
    found = [own for e in episodes for own in tags_by_loops(e, estimator)]
    want = {f"rlvmr/{name}_frac": sum(tag == (None if name == "none" else name) for tag, _ in found) / len(found)
            for name in ("none", "planning", "explore", "reflection")}
    assert metrics == pytest.approx(want | {"rlvmr/tag_reward": fmean(reward for _, reward in found)})
    assert all(share > 0 for share in metrics.values())


def test_a_malformed_turn_is_no_earlier_action_and_fails():
    """Two malformed turns are no repetition, and the reflection after one is earned although it had no action."""
    episode = make_episode([("a", "hall", "explore", 1), (None, NOTHING, None, 1), ("b", "attic", "reflection", 1),
                            ("a", "hall", "explore", 1), ("c", "roof", "reflection", 1)], won=True)
    other = make_episode([("a", "hall", "planning", 1)])
    advantage_S, metrics = credit.advantages([episode, other], replace(RLVMR, composition="code", step_weight=1.0))
    assert metrics["rlvmr/tag_reward"] == pytest.approx(2 / 6)           # explore 1, 0; reflection 1, 0; planning lost
    # rewards 1 - 0.1 / 5 and 0: over six turns the mean is 49 / 60; the one planning and the one malformed turn earn 0
    episode_part = 0.98 - 4.9 / 6
    assert advantage_S.tolist() == pytest.approx([episode_part + 0.5, episode_part, episode_part + 0.5,
                                                  episode_part - 0.5, episode_part - 0.5, -4.9 / 6], abs=1e-6)


# Which episodes teach nothing

def test_silent_episodes_are_those_of_groups_without_any_advantage():
    turns_and_groups = (2, 7), (1, 3), (3, 7), (2, 5), (1, 3)
    episodes = [make_episode([("a", "hall", None, 1)] * n, group) for n, group in turns_and_groups]
    advantage_S = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0])       # the third episode's last turn
    assert credit.silent(episodes, advantage_S).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("estimator", [GRPO, GIGPO])
def test_groups_that_earned_alike_are_silent_unless_their_turns_differ(estimator):
    """Won alike in one group, by ways of different length: GRPO learns nothing, GiGPO prefers the short one."""
    short, long = ([("a", "end", None, 1)], [("a", "start of 0", None, 1), ("b", "end", None, 1)])
    episodes = [make_episode(short, won=True), make_episode(long, won=True), make_episode(short, group=1),
                make_episode(long, group=1)]
    advantage_S, _ = credit.advantages(episodes, estimator)
    taught = estimator is GIGPO
    assert credit.silent(episodes, advantage_S).tolist() == [not taught] * 2 + [True] * 2
    assert (advantage_S[1] < 0) == taught


def test_by_episode_cuts_and_keeps():
    episodes = random_episodes(8)
    value_S = torch.arange(float(sum(len(e.turns) for e in episodes)))
    cut = credit.by_episode(episodes, value_S)
    assert [len(own) for own in cut] == [len(e.turns) for e in episodes]
    assert [value for own in cut for value in own] == value_S.tolist()


# PPO

@pytest.fixture
def oracle_critic(monkeypatch):
    """A critic that knows a random value for each response token, by its id."""
    rng, known = random.Random(9), {}

    def values(model, samples, objective):
        assert model == "a model" and objective == "an objective"
        return [[known.setdefault(i, rng.uniform(-1, 1)) if own else 0.0 for i, own in zip(s.ids, s.sampled)]
                for s in samples]

    monkeypatch.setattr(update, "values", values)
    return Critic("a model", None), known


def credited(critic, episodes, estimator, first=0):
    return credit.ppo_samples(critic, episodes, estimator, "an objective", first)


def gae_by_loops(episode, values, estimator):
    """(A, return) per turn, gamma 1; values: one per turn, and after the last one 0."""
    turns, lam, found = len(episode.turns), estimator.gae_lambda, []
    values = [*values, 0.0]
    for t in range(turns):
        advantage = sum(lam ** (k - t) * (turn_reward(episode, k, estimator) + values[k + 1] - values[k])
                        for k in range(t, turns))
        found.append((advantage, advantage + values[t]))
    return found


def white(numbers):
    return [(x - fmean(numbers)) / (pstdev(numbers) + 1e-8) for x in numbers]


def by_token(valued, what):
    """{token id: number} of the sampled tokens; elsewhere there has to be no number."""
    found = {}
    for v in valued:
        numbers = what(v)
        assert len(numbers) == len(v.sample.ids)
        for i, sampled, number in zip(v.sample.ids, v.sample.sampled, numbers):
            if sampled:
                assert i not in found, f"token {i} twice"
                found[i] = number
            else:
                assert number == 0 or math.isnan(number), f"{number} where nothing was sampled"
    return found


@pytest.mark.parametrize("changes", [{}, {"gae_lambda": 0.0}, {"gae_lambda": 1.0, **TENFOLD}])
@pytest.mark.parametrize("history", [0, 2])
def test_ppo_over_turns_is_its_equations_written_out(oracle_critic, changes, history):
    critic, value = oracle_critic
    estimator, episodes = replace(PPO, **changes), random_episodes(10, history=history)
    valued, advantage_S, metrics = credited(critic, episodes, estimator)
    turns = [e.turns[t] for e, t in flat_turns(episodes)]
    advantages, returns = zip(*[own for e in episodes for own in gae_by_loops(
        e, [value[turn.response_ids[0]] for turn in e.turns], estimator)])
    assert advantage_S.tolist() == pytest.approx(white(advantages), abs=1e-4)
    want = {i: a for turn, a in zip(turns, white(advantages)) for i in turn.response_ids}
    assert by_token(valued, lambda v: v.sample.advantage) == pytest.approx(want, abs=1e-4)
    targets = {turn.response_ids[0]: r for turn, r in zip(turns, returns)}
    learned = {i: r for i, r in by_token(valued, lambda v: v.target).items() if not math.isnan(r)}
    assert learned == pytest.approx(targets, abs=1e-5)                 # a turn's first token, and no other
    assert by_token(valued, lambda v: v.value_old) == value
    errors = [r - value[i] for i, r in targets.items()]
    fit = 1 - pvariance(errors) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4)}


@pytest.mark.parametrize("changes", [{}, TENFOLD])
@pytest.mark.parametrize("history", [0, 2])
def test_verl_agents_ppo_takes_each_token_against_the_return(oracle_critic, changes, history):
    critic, value = oracle_critic
    estimator, episodes = replace(PPO, ppo_form="verl-agent", **changes), random_episodes(11, history=history)
    valued, advantage_S, metrics = credited(critic, episodes, estimator)
    targets = {i: estimator.success_reward * e.won - estimator.invalid_penalty * (not turn.valid)
               for e in episodes for turn in e.turns for i in turn.response_ids}
    want = dict(zip(targets, white([target - value[i] for i, target in targets.items()])))
    assert by_token(valued, lambda v: v.sample.advantage) == pytest.approx(want, abs=1e-4)
    assert by_token(valued, lambda v: v.target) == pytest.approx(targets, abs=1e-6)         # every sampled token
    firsts = [want[e.turns[t].response_ids[0]] for e, t in flat_turns(episodes)]
    assert advantage_S.tolist() == pytest.approx(firsts, abs=1e-4)
    fit = 1 - pvariance([target - value[i] for i, target in targets.items()]) / pvariance(targets.values())
    assert metrics == {"critic/explained_variance": pytest.approx(fit, abs=1e-4)}


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
def test_nothing_is_learnt_where_nothing_was_sampled(oracle_critic, form):
    valued, _, _ = credited(oracle_critic[0], random_episodes(12), replace(PPO, ppo_form=form))
    for v in valued:
        before = [False] + v.sample.sampled[:-1]
        first = [now and not last for now, last in zip(v.sample.sampled, before)]
        assert [not math.isnan(r) for r in v.target] == (first if form == "turn" else v.sample.sampled)


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
def test_one_sample_per_turn_is_one_sample_per_episode(oracle_critic, form):
    estimator, critic = replace(PPO, ppo_form=form), oracle_critic[0]
    append_only, one_back = (credited(critic, random_episodes(13, history=k), estimator) for k in (0, 1))
    assert len(append_only[0]) < len(one_back[0])
    assert append_only[1].tolist() == one_back[1].tolist()
    assert append_only[2] == pytest.approx(one_back[2])
    for what in (lambda v: v.sample.advantage, lambda v: v.value_old, lambda v: v.target):
        assert by_token(append_only[0], what) == pytest.approx(by_token(one_back[0], what), nan_ok=True)


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
@pytest.mark.parametrize("history", [0, 2])
def test_the_advantages_are_white(oracle_critic, form, history):
    """Over turns where a turn is the unit, over tokens where that is."""
    episodes = random_episodes(14, history=history)
    valued, advantage_S, _ = credited(oracle_critic[0], episodes, replace(PPO, ppo_form=form))
    tokens = list(by_token(valued, lambda v: v.sample.advantage).values())
    unit = advantage_S.tolist() if form == "turn" else tokens
    assert fmean(unit) == pytest.approx(0, abs=1e-5) and pstdev(unit) == pytest.approx(1, abs=1e-4)
    other = tokens if form == "turn" else advantage_S.tolist()
    assert abs(pstdev(other) - 1) > 1e-3                               # else the two could not be told apart


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
def test_samples_carry_their_episodes_number(oracle_critic, form):
    critic, _ = oracle_critic
    episodes, estimator = random_episodes(15, history=1), replace(PPO, ppo_form=form)
    here, there = credited(critic, episodes, estimator), credited(critic, episodes, estimator, first=640)
    assert len(there[0]) > len(episodes)
    assert list(dict.fromkeys(v.sample.episode for v in there[0])) == [640 + k for k in range(len(episodes))]
    for a, b in zip(here[0], there[0], strict=True):
        assert replace(a.sample, episode=0) == replace(b.sample, episode=0)
        assert a.target == pytest.approx(b.target, nan_ok=True)


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
def test_without_any_news_there_is_no_advantage(monkeypatch, form):
    """A fresh critic says 0 and no episode is won or refused: exactly 0, and no variance to explain."""
    monkeypatch.setattr(update, "values", lambda model, samples, objective: [[0.0] * len(s.ids) for s in samples])
    episodes = [make_episode([("a", "hall", None, 2)] * n, group) for group, n in enumerate((1, 3, 2))]
    valued, advantage_S, metrics = credited(Critic(None, None), episodes, replace(PPO, ppo_form=form))
    assert advantage_S.tolist() == [0.0] * 6 and all(v.sample.silent for v in valued)
    assert math.isnan(metrics["critic/explained_variance"])


# Two ranks

def each_with_the_sum(monkeypatch, call, halves):
    """call(half) on either half, where parallel.all_sum gives both the sum of what the two of them put in."""
    given = []
    monkeypatch.setattr(parallel, "all_sum", lambda x: given.append(x) or x)
    for half in halves:
        call(half)
    a, b = given
    total = {key: a[key] + b[key] for key in a} if isinstance(a, dict) else a + b
    monkeypatch.setattr(parallel, "all_sum", lambda x: total)
    return [call(half) for half in halves]


@pytest.mark.parametrize("estimator", [GIGPO, RLVMR, PPO, replace(PPO, ppo_form="verl-agent")],
                         ids=lambda e: f"{e.algo}-{e.ppo_form}")
def test_two_ranks_give_the_credit_of_one(oracle_critic, monkeypatch, estimator):
    """A rank with three groups and one with one: what is compared over the batch is compared over both."""
    episodes = random_episodes(16)

    def call(own):
        if estimator.algo == "ppo":
            return credited(oracle_critic[0], own, estimator)[1:]
        return credit.advantages(own, estimator)

    whole_S, whole = call(episodes)
    (a_S, own_a), (b_S, own_b) = each_with_the_sum(monkeypatch, call, (episodes[:15], episodes[15:]))
    assert torch.cat([a_S, b_S]).tolist() == pytest.approx(whole_S.tolist(), abs=1e-5)
    if estimator.algo != "ppo":                          # its metric goes by parallel.gather
        assert own_a == own_b == pytest.approx(whole)


# With a model

@pytest.fixture
def tiny_critic(model):
    critic = with_value_head(model)
    return Critic(critic, Recorder(critic))


@torch.no_grad()
def plain_values(critic, turn):
    """V before each token of a response, by one forward over the turn's own prompt and response."""
    ids_BT = torch.tensor([turn.prompt_ids + turn.response_ids])
    return critic(ids_BT, head="value")[0, len(turn.prompt_ids) - 1:-1].tolist()


@pytest.mark.parametrize("form", ["turn", "verl-agent"])
@pytest.mark.parametrize("history", [0, 2])
def test_a_real_critic_values_the_text_before_each_response(model, chat, tiny_critic, form, history):
    """Played episodes, and V of each turn's own prompt by a forward of its own; what comes out can be trained on."""
    episodes = rollout.play(model, chat, [Corridor() for _ in range(6)], make_seats(3, 2),
                            Sampling(max_response_tokens=4), 4, 400, history)
    estimator, objective = replace(PPO, ppo_form=form), update.Objective(microbatch_tokens=200)
    valued, advantage_S, _ = credit.ppo_samples(tiny_critic, episodes, estimator, objective, 0)
    token_values, unit = [], []
    for e in episodes:
        own = [plain_values(tiny_critic.model, turn) for turn in e.turns]
        token_values += sum(own, [])
        if form == "turn":
            unit += [a for a, _ in gae_by_loops(e, [values[0] for values in own], estimator)]
        else:
            unit += [e.won - 0.1 * (not turn.valid) - v for turn, values in zip(e.turns, own) for v in values]
    old = [v for own in valued for v, sampled in zip(own.value_old, own.sample.sampled) if sampled]
    assert old == pytest.approx(token_values, abs=1e-4)
    got = advantage_S.tolist() if form == "turn" else [
        a for own in valued for a, sampled in zip(own.sample.advantage, own.sample.sampled) if sampled]
    assert got == pytest.approx(white(unit), abs=1e-3) and max(old) - min(old) > 0.1
    targets, values_old = [v.target for v in valued], [v.value_old for v in valued]
    metrics = update.update_critic(tiny_critic.model, tiny_critic.optimizer, [v.sample for v in valued], targets,
                                   values_old, objective, 1e-3)
    assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0 and metrics["critic/clip_frac"] == 0
