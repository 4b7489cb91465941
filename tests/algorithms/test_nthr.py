"""Tests of NTHR's scores, weights and token advantages, against double loops over tokens and autograd.

    python -m pytest tests/algorithms/test_nthr.py

The oracles (`nthr_by_loops`, ...) process one turn at a time, with a Python loop over pairs of tokens.
"""

import copy
import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from hand_made import PLAIN, advantages_of, make_sample, method_of, on_two_ranks

import batching
import update
from algorithms import nthr
from envs import Task
from infra import parallel
from rollout import Episode, Turn

# The equations

def token_group(seed, vocabulary=11, d=6):
    """One task group of four episodes, 0 and 2 won: 1 to 5 tokens each, with a random untied output layer."""
    torch.manual_seed(seed)
    tokens = [random.Random(seed + e).randint(1, 5) for e in range(4)]
    episode = torch.arange(4).repeat_interleave(torch.tensor(tokens))
    hidden = torch.randn(len(episode), d, dtype=torch.double)
    head = torch.randn(vocabulary, d, dtype=torch.double, requires_grad=True)
    target, won = torch.randint(vocabulary, (len(episode),)), torch.tensor([True, False, True, False])
    return hidden, head, target, episode, won


def test_prediction_error_by_hand():
    logits = torch.tensor([[0.0, 0.0, math.log(2.0)]])
    got = nthr.prediction_error(logits, torch.tensor([2]), torch.tensor([0, 2]))
    assert got[0].tolist() == pytest.approx([-0.25, 0.5])                # not renormalized: 1/4 and 1 - 1/2
    with pytest.raises(AssertionError, match="targets .2. not among"):
        nthr.prediction_error(logits, torch.tensor([2]), torch.tensor([0, 1]))


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_nthr_is_the_double_loop_over_token_pairs(seed, restricted):
    hidden, head, target, episode, won = token_group(seed)
    columns = target.unique() if restricted else torch.arange(11)
    error = nthr.prediction_error(hidden @ head.detach().T, target, columns).double()
    got, threshold = nthr.nthr_scores(hidden, error, episode, won, beta=0.8)
    probs = (hidden @ head.detach().T).softmax(-1).tolist()
    h, y = hidden.tolist(), target.tolist()
    want = []
    for a in range(len(y)):
        want.append(0.0)
        for b in range(len(y)):
            if won[episode[b]]:
                alpha = sum(((y[a] == v) - probs[a][v]) * ((y[b] == v) - probs[b][v])
                            for v in columns.tolist())
                want[a] += alpha * sum(p * q for p, q in zip(h[a], h[b]))
    assert got.tolist() == pytest.approx(want, rel=1e-5, abs=1e-5)
    means = [statistics.fmean(s for s, e in zip(want, episode.tolist()) if e == i) for i in (0, 2)]
    assert threshold == pytest.approx(0.8 * min(means), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_nthr_score_is_the_inner_product_of_output_layer_gradients(seed):
    hidden, head, target, episode, won = token_group(seed)
    logprob = (hidden @ head.T).log_softmax(-1)[torch.arange(len(target)), target]
    error = nthr.prediction_error(hidden @ head.detach().T, target, torch.arange(11)).double()
    got, _ = nthr.nthr_scores(hidden, error, episode, won)
    pull, = torch.autograd.grad(logprob[won[episode]].sum(), head, retain_graph=True)
    for k in range(len(target)):
        gradient, = torch.autograd.grad(logprob[k], head, retain_graph=True)
        assert float(got[k]) == pytest.approx(float((gradient * pull).sum()), rel=1e-5, abs=1e-5)


def test_nthr_weights_by_hand():
    """The won episode has one token with h = g = (1, 0): M = g h^T, s = g_0 h_0, tau = 1; p = 1/3."""
    hidden = torch.tensor([[1.0, 0.0], [3.0, 5.0], [1.0, 0.0], [-3.0, 0.0], [9.0, 9.0]])
    error = torch.tensor([[1.0, 0.0], [0.5, 7.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    episode, won = torch.tensor([0, 1, 1, 2, 2]), torch.tensor([True, False, False])
    score, threshold = nthr.nthr_scores(hidden, error, episode, won)
    assert score.tolist() == [1.0, 1.5, 1.0, -3.0, 0.0] and threshold == 1.0
    assert nthr.nthr_weights(hidden, error, episode, won).tolist() == pytest.approx([1, 1 / 3, 1, 1, 1])
    assert nthr.nthr_weights(hidden, error, episode, won, beta=2.0).tolist() == [1.0] * 5
    half = nthr.nthr_weights(hidden, error, episode, won, beta=0.5)
    assert half.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1, 1])


def test_nthr_drops_tokens_if_half_are_won_and_keeps_uniform_groups():
    hidden, error, episode = torch.tensor([[1.0], [5.0]]), torch.ones(2, 1), torch.tensor([0, 1])
    assert nthr.nthr_weights(hidden, error, episode, torch.tensor([True, False])).tolist() == [1.0, 0.0]
    for won in (True, False):
        assert nthr.nthr_weights(hidden, error, episode, torch.tensor([won, won])).tolist() == [1.0, 1.0]


def test_nthr_ignores_won_episodes_without_tokens():
    """The lost token scores 1, the won one 4: a mean of 0 for the empty episode would set tau below both."""
    hidden, error = torch.tensor([[2.0], [0.5]]), torch.ones(2, 1)
    weight = nthr.nthr_weights(hidden, error, torch.tensor([1, 2]), torch.tensor([True, True, False]))
    assert weight.tolist() == [1.0, 1.0]
    no_won_token = nthr.nthr_weights(hidden[1:], error[1:], torch.tensor([1]), torch.tensor([True, False]))
    assert no_won_token.tolist() == [1.0]


# Full episodes, with a model

@pytest.fixture
def episodes():
    """Seven episodes in three groups: 1 of 3 won, 1 of 2, and 0 of 2.

    The few different token ids make them resemble each other. Some prompts extend the turn before, some do
    not.
    """
    rng = random.Random(11)

    def ids(n):
        return [1 + rng.randrange(256) % 9 for _ in range(n)]

    made = []
    for index in (10, 11, 12, 20, 21, 30, 31):
        turns, prompt = [], ids(4)
        for t in range(rng.randint(1, 3)):
            response = ids(rng.randint(1, 4))
            turns.append(Turn("", prompt, response, [-2.0] * len(response), "", "a", rng.random() < 0.7, ""))
            prompt = (prompt + response if t else []) + ids(3)
        task, won = Task("a", "train", "walk", None), index in (10, 21)
        made.append(Episode(task, index // 10, index, turns, won))
    return made


def nthr_of(model, objective=PLAIN, beta=1.0, **settings):
    """NTHR, set up with the model."""
    method = method_of("nthr", nthr_beta=beta, **settings)
    method.begin(model, objective, 1, lambda model: model)
    return method


def token_terms(model, ids, sampled, columns, temperature):
    """(hidden state, prediction error over `columns`) of each sampled token, from a forward of one sample."""
    with torch.no_grad():
        hidden, logits = model(torch.tensor([ids]), head="hidden")[0], model(torch.tensor([ids]))[0]
    terms = []
    for t in (t for t, sampled in enumerate(sampled) if sampled):
        probability = (logits[t - 1] / temperature).softmax(-1)
        error = [(column == ids[t]) - probability[column].item() for column in columns]
        terms.append((hidden[t - 1].double(), torch.tensor(error, dtype=torch.double)))
    return terms


def nthr_by_loops(model, episodes, advantage, beta, temperature):
    """{turn's id: its tokens' advantages}, by loops over pairs of tokens, as in arXiv:2505.18830.

    advantage: {turn's id: GRPO's advantage}.
    """
    found = {id(turn): [advantage[id(turn)]] * len(turn.response_ids) for e in episodes for turn in e.turns}
    for group in ([e for e in episodes if e.group == g] for g in {e.group for e in episodes}):
        won = [e for e in group if e.won]
        if not 0 < len(won) < len(group):
            continue
        columns = sorted({i for e in group for turn in e.turns for i in turn.response_ids})
        terms = {id(turn): token_terms(model, turn.prompt_ids + turn.response_ids,
                                       [False] * len(turn.prompt_ids) + [True] * len(turn.response_ids),
                                       columns, temperature) for e in group for turn in e.turns}
        of_won = [term for e in won for turn in e.turns for term in terms[id(turn)]]
        score = {turn_id: [sum(float(error @ error2) * float(h @ h2) for h2, error2 in of_won)
                           for h, error in pairs] for turn_id, pairs in terms.items()}
        means = [statistics.fmean(s for turn in e.turns for s in score[id(turn)]) for e in won]
        eta = 2 * abs(0.5 - len(won) / len(group))
        for turn in (turn for e in group if not e.won for turn in e.turns):
            for k, s in enumerate(score[id(turn)]):
                if s > beta * min(means):
                    found[id(turn)][k] *= eta
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_hidden_states_and_errors_are_those_of_separate_forwards(model, temperature):
    rng, columns = random.Random(11), list(range(272))
    samples = [make_sample(rng, n=rng.randint(6, 14)) for _ in range(9)]
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=40)
    read = nthr.hidden_and_error(model, samples, columns, objective)
    for sample, (hidden, error) in zip(samples, read, strict=True):
        want = token_terms(model, sample.ids, sample.sampled, columns, temperature)
        torch.testing.assert_close(hidden.double(), torch.stack([h for h, _ in want]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(error.double(), torch.stack([e for _, e in want]), atol=1e-5, rtol=1e-4)


def test_errors_of_tokens_that_were_not_possible_are_zero(model):
    """They are of the distribution that the token was drawn from, as the loss is."""
    sample = make_sample(random.Random(3), n=8)
    sampled = [t for t, drawn in enumerate(sample.sampled) if drawn]
    possible = sorted({sample.ids[sampled[0]], 5, 9})
    restricted = replace(sample, allowed={sampled[0]: possible})
    ((_, error_NV),), ((_, free_NV),) = (nthr.hidden_and_error(model, [one], list(range(272)), PLAIN)
                                         for one in (restricted, sample))
    assert set(error_NV[0].nonzero()[:, 0].tolist()) == {*possible}
    assert abs(error_NV[0].sum()) < 1e-6 and torch.equal(error_NV[1:], free_NV[1:])


@pytest.mark.parametrize("beta, temperature", [(1.0, 1.0), (0.3, 0.7), (0.6, 1.0)])
@pytest.mark.parametrize("max_tokens", [1, 16384])
def test_nthr_is_the_double_loop_over_tokens(model, episodes, beta, temperature, max_tokens):
    advantages_of(method_of("grpo"), episodes)
    turns = [turn for e in episodes for turn in e.turns]
    grpo = {id(turn): turn.advantage for turn in turns}
    objective = replace(PLAIN, temperature=temperature, microbatch_tokens=max_tokens)
    got, metrics = advantages_of(nthr_of(model, objective, beta), episodes)
    assert got == list(grpo.values())                             # per turn it is GRPO's
    want = nthr_by_loops(model, episodes, grpo, beta, temperature)
    for turn in turns:
        tokens = turn.token_advantage or [turn.advantage] * len(turn.response_ids)
        assert tokens == pytest.approx(want[id(turn)], rel=1e-5)
    lost = [turn for e in episodes if not e.won and e.group != 3 for turn in e.turns]
    changed = sum(a != turn.advantage for turn in lost for a in want[id(turn)])
    assert metrics == pytest.approx({"nthr/mixed_frac": 2 / 3, "nthr/weakened_frac":
                                     changed / sum(len(turn.response_ids) for turn in lost)})
    assert 0 < metrics["nthr/weakened_frac"] < 1


def test_a_group_without_a_won_episode_keeps_grpos_advantages(model, episodes):
    before = copy.deepcopy(episodes)
    advantages_of(nthr_of(model), episodes)
    assert all(turn.token_advantage is None for e in episodes[-2:] for turn in e.turns)
    advantages_of(method_of("grpo"), before)
    assert episodes[-2:] == before[-2:] and episodes != before
    samples = [sample for e in episodes for sample in batching.samples_of(e)]
    assert {a for s in samples for a, sampled in zip(s.advantage, s.sampled) if not sampled} == {0.0}


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_a_second_assignment_replaces_the_first(model, episodes, variant):
    """Also if a group that was mixed no longer is."""
    method = nthr_of(model, variant=variant)
    advantages_of(method, episodes)
    assert any(turn.token_advantage for e in episodes for turn in e.turns)
    for e in episodes:
        e.won = True
    got, _ = advantages_of(method, episodes)
    assert got == advantages_of(method_of("grpo", variant=variant), episodes)[0]
    assert all(turn.token_advantage is None for e in episodes for turn in e.turns)


def test_without_a_mixed_group_nthr_makes_no_forward(episodes):
    for e in episodes:
        e.won = True
    got, metrics = advantages_of(nthr_of(None), episodes)
    assert got == advantages_of(method_of("grpo"), episodes)[0]
    assert metrics == {"nthr/mixed_frac": 0, "nthr/weakened_frac": 0}


@pytest.mark.parametrize("cut", [5, 7])
def test_two_ranks_give_the_credit_of_one_and_make_equally_many_forwards(model, episodes, monkeypatch, cut):
    """The first has two mixed groups; the second none, or no episodes: it makes empty forwards."""
    method, empty_loss, empty = nthr_of(model), update.empty_loss, []
    single_rank, metrics = advantages_of(method, episodes)
    tokens = [turn.token_advantage for e in episodes for turn in e.turns]
    monkeypatch.setattr(update, "empty_loss", lambda model: empty.append(model) or empty_loss(model))

    def call(part):
        empty.clear()
        longest = iter([2, 1, 1])               # maxima over ranks: mixed groups, microbatches of each
        monkeypatch.setattr(parallel, "all_max", lambda x: next(longest))
        got, found = advantages_of(method, part)
        return got, found, [turn.token_advantage for e in part for turn in e.turns], len(empty)

    first, second = on_two_ranks(monkeypatch, call, (episodes[:cut], episodes[cut:]))
    assert first[0] + second[0] == pytest.approx(single_rank) and first[2] + second[2] == tokens
    assert first[1] == second[1] == pytest.approx(metrics)
    assert (first[3], second[3]) == (0, 2)
