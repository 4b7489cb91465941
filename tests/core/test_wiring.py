"""Tests of what the stages hand to their parts: seeds, factors, task numbers, weights; with stand-ins.

    python -m pytest tests/core/test_wiring.py

Each found a line that could be changed with no test failing.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hand_made import GAME

import cold_start
import config as flags
import evaluation
import gcd
import judge
import rollout
import session
import update
from envs import Reply, Task, household
from infra import files, parallel
from lm.engine import Response
from rollout import Conversation, Episode, Turn

RANKS = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"))
GAME_TASK = Task("t", "train", "look", None)


@pytest.fixture
def given(monkeypatch):
    """What `judge_turns` gives to parts of the judge, by name, in the order of the calls.

    Of each round's two turns one has answers of unequal reward.
    """
    calls, places = {"candidates": [], "choose": [], "answer_questions": []}, [(0, 0, "good"), (0, 1, "bad")]

    def record(name, result):
        monkeypatch.setattr(judge, name, lambda *arguments: calls[name].append(arguments) or result)
    record("candidates", places)
    record("choose", places)
    record("answer_questions", None)
    monkeypatch.setattr(judge, "questions", lambda *_: [SimpleNamespace(has_gradient=True),
                                                        SimpleNamespace(has_gradient=False)])
    for name in ("samples", "verdict_records"):
        monkeypatch.setattr(judge, name, lambda *_: [])
    return calls


def seeds_of(calls):
    """The last argument of each."""
    return [arguments[-1] for arguments in calls]


def judging_run(**settings):
    """A run as far as `judge_turns` reads it."""
    config = dict(seed=7, judge_labels="dense", judge_turns=4, judge_redraw=False, judge_kind="generative",
                  judge_response_tokens=4, judge_group_size=2, judge_normalize_std=False, question_room=99,
                  slots=4) | settings
    return SimpleNamespace(config=SimpleNamespace(**config), ranks=RANKS, environment=None, chat=None,
                           sampler=None, sampling=lambda **changes: changes)


def test_each_iteration_and_each_redraw_chooses_turns_by_a_seed_of_its_own(given):
    for seed, i in ((7, 0), (7, 1), (7, 0), (8, 0)):
        gcd.judge_turns(judging_run(seed=seed), i, [])
    for seeds in (seeds_of(given["choose"]), [arguments[5] for arguments in given["answer_questions"]]):
        assert seeds[0] == seeds[2] and len({*seeds}) == 3
    given["choose"].clear()
    gcd.judge_turns(judging_run(judge_redraw=True, judge_turns=40), 0, [])
    assert len(given["choose"]) == len({*seeds_of(given["choose"])}) == gcd.MOST_ROUNDS
    first, *later = [labelled for labelled, *_ in given["choose"]]
    assert len(first) == 2 and not any(later)                            # both were asked about in the first


def test_questions_and_answers_get_the_room_that_the_flags_leave_them(given):
    gcd.judge_turns(judging_run(), 0, [])
    (_, _, room, *_), = given["candidates"]
    (*_, group_size, sampling, _, at_once), = given["answer_questions"]
    assert (room, group_size, sampling, at_once) == (
        99, 2, {"max_response_tokens": 4}, judge.ANSWERS_PER_SLOT * 4)


def test_ranks_stop_redrawing_when_all_of_them_together_have_enough(given, monkeypatch):
    """Else they would leave the loop in different rounds, and wait for each other for ever."""
    monkeypatch.setattr(parallel, "all_sum", lambda n: n + 5)                     # what other ranks found
    gcd.judge_turns(judging_run(judge_redraw=True, judge_turns=8), 0, [])
    assert [pairs for _, _, pairs, _ in given["choose"]] == [4, 1]


def test_the_algorithm_gets_the_iterations_factor_on_learning_rates_and_random_numbers(monkeypatch):
    """These are the same in each run of a seed, on each rank."""
    seen = []
    algorithm = SimpleNamespace(settings=None, assign_checked=lambda episodes: seen.append(
        (algorithm.lr_factor, algorithm.rng.random())) or {})
    monkeypatch.setattr(gcd.rewards, "write_rewards", lambda *_: None)
    config = SimpleNamespace(algorithm=algorithm, kl="none", iterations=4, warmup=0, lr_decay=True)
    for config.seed in (7, 7, 8):
        for i in range(4):
            gcd.assign_credit(SimpleNamespace(config=config), i, [], None)
    assert [factor for factor, _ in seen[:4]] == [1, 0.75, 0.5, 0.25] and seen[:4] == seen[4:8]
    assert len({number for _, number in seen}) == 8


def episode_with(group, advantage, of_token=None):
    """An episode of one turn with these advantages."""
    turn = Turn("o", [1], [2], [0.0], "t", "a", True, "o", advantage=advantage, token_advantage=of_token)
    return Episode(SimpleNamespace(id="a"), group, turns=[turn])


@pytest.mark.parametrize("sampling, settings, kept", [
    ("drop", {}, [1, 1, 2]), ("drop", {"kl": "loss"}, [0, 1, 1, 2]), ("drop", {"kl": "reward"}, [0, 1, 1, 2]),
    ("drop", {"entropy_coef": 0.01}, [0, 1, 1, 2]), ("keep", {}, [0, 1, 1, 2])])
def test_groups_without_any_advantage_are_dropped_unless_something_needs_them(sampling, settings, kept):
    episodes = [episode_with(0, 0.0), episode_with(1, 0.0), episode_with(1, 0.5), episode_with(2, 0.0, [0.1])]
    run = SimpleNamespace(config=replace(flags.parse([]), dynamic_sampling=sampling, **settings))
    assert [episode.group for episode in gcd.drop_zero_advantage_groups(run, episodes)] == kept
    assert [gcd.any_advantage([episode]) for episode in episodes] == [False, False, True, True]


def test_the_group_with_the_largest_advantages_of_either_sign_is_stored():
    stored, config = [], SimpleNamespace(save_rollouts=False, iterations=1)
    run = SimpleNamespace(config=config, store=lambda episodes, head, credited: stored.extend(episodes))
    episodes = [episode_with(0, 1.0), episode_with(0, 0.5), episode_with(1, -2.0), episode_with(1, 0.0)]
    gcd.store(run, 0, episodes)
    assert stored == episodes[2:]


def test_metrics_of_the_cache_and_of_the_games():
    episode = episode_with(0, 0.0)
    episode.turns, episode.game_s = episode.turns * 4, 1.0
    run = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(groups=False)),
                          slots=SimpleNamespace(usage=(3, 12)))
    metrics = gcd.rollout_metrics(run, [episode])
    assert (metrics["memory/cache_used_frac"], metrics["time/game_ms"]) == (0.25, 250)       # of each turn


@pytest.mark.parametrize("done, moments, critic", [
    (None, {}, []), (0, {}, []), (3, {"p": 1}, ["its critic"])])
def test_rl_begins_without_the_cold_starts_moments_and_goes_on_with_its_own(monkeypatch, done, moments,
                                                                            critic):
    """So does its algorithm."""
    loaded, state = [], {"seen": 5} if done else {}
    monkeypatch.setattr(gcd.checkpoint, "load_trainer",
                        lambda *arguments: loaded.append(arguments[-1]) or {"algorithm": state})
    algorithm = SimpleNamespace(begin_checked=lambda *_: None, critic="its critic", state={"first": 1})
    config = SimpleNamespace(algorithm=algorithm, minibatches=1, lora=0, kl="none", keep_checkpoints=0,
                             iterations=0)
    run = SimpleNamespace(config=config, model=None, objective=None, shard=None, done=done, out=Path("out"),
                          optimizer=SimpleNamespace(state={"p": 1}), ranks=RANKS)
    gcd.reinforcement(run)
    assert run.optimizer.state == moments and loaded == critic
    assert algorithm.state == {"first": 1} | state


def test_judge_demonstrations_are_of_tasks_that_the_policys_are_not(monkeypatch):
    asked_for = []
    monkeypatch.setattr(cold_start, "demonstrate_on_rank0",
                        lambda run, first, n, *more, **options: asked_for.append((first, n)) or [])
    config = SimpleNamespace(demonstrations=300, judge_demonstrations=100, judge_epochs=1, max_turns=3,
                             context=9)
    run = SimpleNamespace(config=config, warn_once=lambda *_: None)
    assert cold_start.judge_samples(run, None) == []
    assert asked_for == [(cold_start.FIRST_DEMONSTRATION + 300, 100)]


def test_imitation_steps_by_the_cold_starts_weight_and_the_runs_bounds(monkeypatch):
    given, metrics = [], {"policy/nll_nats": 0.0, "judge/nll_nats": 0.0, "policy/grad_norm": 0.0}
    monkeypatch.setattr(update, "update", lambda model, optimizer, samples, objective, rate: (
        given.append((objective.judge_weight, objective.max_grad_norm, objective.microbatch_tokens, rate))
        or metrics))
    config = SimpleNamespace(judge_cold_start_weight=0.7, judge_weight=0.1, judge_kind="generative",
                             max_grad_norm=0.5, microbatch_tokens=64, cold_start_lr=1.0)
    run = SimpleNamespace(config=config, ranks=RANKS, model=None, optimizer=None, log=lambda row: None)
    cold_start.imitate(run, run.optimizer, [[], []], 2, "stage", 0, 0, lambda step: None)
    assert given == [(0.7, 0.5, 64, 1.0), (0.7, 0.5, 64, 0.5)]


def dagger_batches(monkeypatch, play, rounds, labels=()):
    """(batches, specs, random numbers of each round's order) of cold_start.dagger; `play` makes the episodes
    of a round's specs, and each player's expert gives these labels.
    """
    specs, orders, shuffled = [], [], cold_start.shuffled_batches

    def shuffle(samples, n, rng, ranks):
        orders.append(rng.get_state().tolist())
        return shuffled(samples, n, rng, ranks)

    monkeypatch.setattr(cold_start, "train_tasks", lambda environment, types, start, n: [GAME] * n)
    monkeypatch.setattr(cold_start, "DaggerPlayer", lambda spec, run: specs.append(spec) or SimpleNamespace(
        spec=spec, override=None, expert_labels=[*labels]))
    monkeypatch.setattr(cold_start, "shuffled_batches", shuffle)
    monkeypatch.setattr(cold_start, "rounds_of", lambda config: rounds)
    monkeypatch.setattr(cold_start, "save", lambda *_: None)
    config = SimpleNamespace(seed=3, demonstrations=1, judge_demonstrations=1, cold_start_types="all",
                             checkpoint_every=9, cold_start_batch=2)
    run = SimpleNamespace(
        config=config, ranks=RANKS, cold_progress={}, environment=None, log=lambda row: None,
        update_sampler=lambda: None, sampling=lambda: None, stop_if_asked=lambda state: None,
        play=lambda given, *_, **options: [play(spec) for spec in given])
    monkeypatch.setattr(cold_start.rollout, "counts_of", lambda episodes: {})
    monkeypatch.setattr(cold_start.rollout, "shares_of", lambda counts: {"success": 0, "invalid_frac": 0})
    return list(cold_start.dagger(run, [], None, 0)), specs, orders


def test_dagger_episodes_of_different_rounds_have_different_draws(monkeypatch):
    """Of the learner and of the expert's turns, and of the order in which they are imitated."""
    batches, specs, orders = dagger_batches(
        monkeypatch, lambda spec: Episode(GAME, 0, index=spec.index), [(0, 2), (2, 2)])
    assert len({spec.stream for spec in specs}) == len(specs) == 4 and orders[0] != orders[1]
    assert batches == [[], []]


def test_dagger_imitates_the_turns_that_agree_with_the_expert_in_a_drawn_order(monkeypatch):
    """In command and tag; the episodes of a round are not imitated in the order of their tasks."""
    def play(spec):
        turns = [Turn("o", [1], [2], [0.0], "t", "look", True, "o", tag="planning") for _ in range(3)]
        return Episode(GAME, 0, index=spec.index, turns=turns)

    labels = [("look", "planning"), ("look", "explore"), ("go", "planning")]
    batches, _, _ = dagger_batches(monkeypatch, play, [(0, 8)], labels)
    assert [turn.advantage for batch in batches for sample in batch for turn in sample.turns] == [1, 0, 0] * 8
    imitated = [{sample.episode for sample in batch} for batch in batches]
    assert sum(map(sorted, imitated), []) != [*range(8)] and imitated != [{k, k + 4} for k in range(4)]
    assert {*chain(*imitated)} == {*range(8)} and [*map(len, imitated)] == [2] * 4


def test_what_is_imitated_competes_with_all_tokens():
    episode = episode_with(0, 1.0)
    episode.turns[0].allowed = [(2, 3)]
    (sample,) = cold_start.imitation_samples([episode])
    assert (sample.allowed, sample.logprob_old) == ({}, None)
    assert gcd.batching.samples_of(episode)[0].allowed != {}


def test_a_large_model_is_asked_about_twice_as_many_turns_as_are_shown(monkeypatch):
    """Good ones and bad ones are then half of them each, if they are equally frequent."""
    requests, room = [], []
    monkeypatch.setattr(cold_start, "demonstrate_on_rank0", lambda *_, **options: ["an episode"])
    monkeypatch.setattr(judge, "candidates", lambda *given: room.append(given[2]) or [])
    monkeypatch.setattr(judge, "choose", lambda *_: [])
    monkeypatch.setattr(judge, "questions", lambda *_: [])
    monkeypatch.setattr(judge, "why_none", lambda *_: "")
    monkeypatch.setattr(judge, "verdict_ids", lambda chat, label: [1] * 2)
    for labels, length in (("rule+endpoint", 5), ("rule", 5), ("rule", 65)):
        monkeypatch.setattr(judge, "question_message", lambda chat, length=length: [1] * length)
        config = SimpleNamespace(judge_demonstrations=40, demonstrations=3, seed=0, judge_labels=labels,
                                 judge_kind="generative", judge_epochs=1, judge_response_tokens=50,
                                 question_room=86, context=200)
        run = SimpleNamespace(config=config, warn_once=lambda *_: None, log=lambda row: None,
                              environment=None, chat=SimpleNamespace(bare=True), should_stop=False,
                              endpoint_labels=lambda *of: requests.append(of[:2] + of[3:]) or {})
        cold_start.judge_samples(run, None)
    assert requests == [(["an episode"], 80, 136)]
    assert room == [136, 136, 133]          # a bare verdict leaves the question more room, within the context


def test_ranks_ask_a_large_model_about_their_shares(given):
    requests, stops = [], []
    for rank in range(3):
        run = judging_run(judge_labels="rule+endpoint", judge_turns=32)
        run.ranks = SimpleNamespace(rank=rank, world_size=3)
        run.endpoint_labels = lambda episodes, n, seed, room: requests.append((n, seed)) or {}
        run.stop_if_asked = stops.append
        gcd.judge_turns(run, 0, [])
    assert [n for n, _ in requests] == [11, 11, 10] and len({seed for _, seed in requests}) == 3
    assert stops == 3 * [{"iteration": 0}]             # answers may be missing, so the iteration is repeated


def test_a_large_models_labels_are_counted(monkeypatch):
    given, rows = dict(enumerate(["good", None, "bad", "good", "good", None])), []
    monkeypatch.setattr(judge, "endpoint_labels", lambda *_: given)
    run = SimpleNamespace(config=SimpleNamespace(judge_labels="endpoint"), endpoint=None, log=rows.append,
                          log_endpoint=lambda: None)
    assert session.Run.endpoint_labels(run, [], 9, 0, 99) == given
    assert rows == [{"phase": "labels", "judge/asked": 6, "judge/asked_good": 3,
                     "judge/asked_unreadable": 2}]


def test_ranks_play_their_own_tasks_of_the_types_that_rl_trains_on(monkeypatch):
    """Each episode of each iteration, round and seed has draws of its own; all have the instruction."""
    requests, specs = [], []
    monkeypatch.setattr(gcd, "train_tasks", lambda environment, types, start, n: requests.append(
        (types, start, n)) or [GAME_TASK] * n)
    config = SimpleNamespace(tasks=4, group_size=2, train_types="part", cold_start_types="all")
    for config.seed, i, refill_round, rank in product((3, 4), (5, 6), (0, 1), (0, 1)):
        ranks = SimpleNamespace(rank=rank, world_size=2)
        run = SimpleNamespace(config=config, ranks=ranks, instruction="Look first.", environment=None)
        specs += gcd.episode_specs(run, i, refill_round)
    assert requests[:2] == [("part", 20, 2), ("part", 22, 2)]
    assert len({spec.stream for spec in specs}) == len(specs) == 64
    assert {spec.instruction for spec in specs} == {"Look first."}


def test_a_ranks_episodes_are_numbered_behind_those_of_the_ranks_before(monkeypatch):
    monkeypatch.setattr(gcd, "episode_specs", lambda run, i: ["a spec"] * 4)
    config = SimpleNamespace(dynamic_sampling="drop", tasks=6, group_size=2)
    run = SimpleNamespace(
        config=config, ranks=SimpleNamespace(rank=2, world_size=3), update_sampler=lambda: None,
        waits={"games": 1.0}, slots=SimpleNamespace(most_tokens=9), should_stop=False, sampling=lambda: None,
        stop_if_asked=lambda state: None, play=lambda specs, *_: [Episode(GAME, 0) for _ in specs])
    episodes, played = gcd.collect(run, 0)
    assert [episode.index for episode in episodes] == [8, 9, 10, 11] and played == episodes
    assert (run.slots.most_tokens, run.waits) == (0, {})


@pytest.mark.parametrize("weight, seen", [(0.2, ["of a turn", "an answer"]), (0.0, ["of a turn"])])
def test_answers_are_trained_on_if_they_have_a_weight(monkeypatch, weight, seen):
    """Without one they would change how episodes are spread over the optimizer's steps. A policy that moves
    far in an iteration is mentioned.
    """
    given, episode = [], episode_with(0, 1.0)
    for name, value in (("collect", ([episode], [episode])), ("judge_turns", ([], ["an answer"], {})),
                        ("assign_credit", {}), ("drop_zero_advantage_groups", [episode]),
                        ("rollout_metrics", {"rollout/success": 1.0, "rollout/truncated_frac": 0.0,
                                             "rollout/restarts": 0}), ("store", None)):
        monkeypatch.setattr(gcd, name, lambda *_, value=value: value)
    monkeypatch.setattr(gcd.batching, "samples_of", lambda episode: ["of a turn"])
    monkeypatch.setattr(gcd, "optimize", lambda run, i, samples, reference: given.extend(samples) or {
        "policy/approx_kl_nats": weight})
    config = SimpleNamespace(gcd=True, judge_weight=weight, kl="none", warmup=0, correction="off")
    warned = []
    run = SimpleNamespace(config=config, waits={}, ranks=RANKS,
                          warn_once=lambda kind, message: warned.append(message))
    gcd.iteration(run, 0, None)
    assert given == seen
    assert [message.partition(". ")[0] for message in warned] == [
        "RL: the steps of iteration 0 began 0.20 nats a token from its policy, in the mean"] * (weight == 0.2)


@pytest.mark.parametrize("cut, expert, limited, hints", [
    (0.9, None, True, ": more --max-response-tokens or --context (most were cut) may help"),
    (0.1, print, False, ": more --demonstrations or --admissible-only may help"), (0.0, None, True, "")])
def test_a_run_that_learns_nothing_gets_advice_that_applies(cut, expert, limited, hints):
    warned = []
    run = SimpleNamespace(config=SimpleNamespace(kl="none", entropy_coef=0.0, admissible_only=limited),
                          environment=SimpleNamespace(expert=expert, templates=False),
                          warn_once=lambda kind, message: warned.append(message))
    metrics = {"rollout/success": 0.0, "rollout/truncated_frac": cut, "policy/approx_kl_nats": float("nan"),
               "rollout/restarts": 0}
    gcd.advise(run, 3, [episode_with(0, 0.0)], metrics)
    assert warned == ["RL: in iteration 3 nothing was won and no turn has an advantage, so the policy learns "
                      f"nothing{hints}"]


@pytest.mark.parametrize("equal, advantage, warns", [(0.5, 0.0, True), (1.0, 0.0, False), (0.5, 0.1, False)])
def test_an_algorithm_that_writes_no_advantage_is_named(equal, advantage, warns):
    """Where rewards differ; where none do there is nothing to write."""
    warned = []
    run = SimpleNamespace(config=SimpleNamespace(kl="none", entropy_coef=0.0, algo="mine.py"),
                          warn_once=lambda kind, message: warned.append(message))
    gcd.advise(run, 3, [episode_with(0, advantage)], {
        "rollout/success": 0.5, "rollout/truncated_frac": 0.0, "rollout/zero_variance_frac": equal,
        "rollout/restarts": 0, "policy/approx_kl_nats": 0.0})
    assert len(warned) == warns and all("does --algo=mine.py write each turn.adv" in line for line in warned)


@pytest.mark.parametrize("changes, warning", [
    ({}, None), ({"rollout/truncated_frac": 0.6}, "RL: in iteration 3 most episodes had a response"),
    ({"judge/unreadable_frac": 0.9}, None),
    ({"judge/unreadable_frac": 1.0}, "GCD: in iteration 3 no verdict can be read"),
    ({"rollout/restarts": 2}, "RL: in iteration 3 games were lost, and begun again, 2 times: it died")])
def test_a_run_that_wins_is_warned_of_what_it_loses(changes, warning):
    warned, episode = [], episode_with(0, 1.0)
    episode.lost = "it died"
    run = SimpleNamespace(config=SimpleNamespace(kl="none"),
                          warn_once=lambda kind, message: warned.append(message))
    gcd.advise(run, 3, [episode], {"rollout/success": 1.0, "rollout/truncated_frac": 0.5,
                                   "rollout/restarts": 0, "policy/approx_kl_nats": 0.0} | changes)
    assert len(warned) == (warning is not None) and all(line.startswith(warning) for line in warned)


def test_rl_saves_regularly_and_leaves_the_last_save_to_the_stage(monkeypatch):
    saved, kept = [], []
    monkeypatch.setattr(gcd, "iteration", lambda *_: {"rollout/success": 0.0, "rollout/turns": 1.0})
    config = SimpleNamespace(algorithm=SimpleNamespace(begin_checked=lambda *_: None), minibatches=1, lora=0,
                             kl="none", keep_checkpoints=3, iterations=6, checkpoint_every=2)
    run = SimpleNamespace(config=config, model=None, objective=None, shard=None, done=None, ranks=RANKS,
                          optimizer=SimpleNamespace(state={}), iteration=None, log=lambda row: None,
                          keep=kept.append, stop_if_asked=lambda state: None,
                          save=lambda state: saved.append(state["iteration"]))
    gcd.reinforcement(run)
    assert (saved, kept) == ([2, 4], [0, 3, 6])


def test_a_first_prompt_and_a_response_may_fill_the_context():
    rollout.check_first_prompt(GAME_TASK, [1] * 90, 10, 100)
    with pytest.raises(ValueError, match="^--context=99: the first prompt of task t has 90 tokens.*"
                                         "by default at most the positions of the model"):
        rollout.check_first_prompt(GAME_TASK, [1] * 90, 10, 99)


@pytest.mark.parametrize("longest, n_written", [(4, 1), (3, 0)])
def test_a_large_models_answer_is_imitated_up_to_the_longest_length(monkeypatch, longest, n_written):
    monkeypatch.setattr(judge, "parse_verdict", lambda text, style: "good")
    chat = SimpleNamespace(encode=lambda text: [7, 8, 9], end_ids=[0], style="think")
    monkeypatch.setattr(judge, "verdict_ids", lambda chat, label: [5])
    question = judge.Question(0, episode_with(0, 0.0), 0, "good", [1], "go")
    (sample,), n = judge.demonstrations(chat, [question], ["It is good."], longest)
    assert n == n_written and sample.ids == [1, *([7, 8, 9, 0] if n_written else [5])]


@pytest.mark.parametrize("probability, verdict", [(0.49, "bad"), (0.5, "good"), (0.51, "good")])
def test_a_value_head_says_good_from_one_half_on(probability, verdict):
    episode = episode_with(0, 0.0)
    question = judge.Question(0, episode, 0, "good", [1], "go")
    judge.write_value_verdicts([question], [probability])
    assert question.turn.verdicts == [verdict] and parallel.is_rank0()


@pytest.mark.parametrize("i, compared", [
    (0, [True, False, False]), (1, [False] * 3), (5, [True, False, False])])
def test_an_iterations_steps_by_their_flags(monkeypatch, i, compared):
    """In bf16 the trainer's logprobs replace the sampler's of all minibatches but the first, whose forward
    has them; the two gradients are compared in the first step of every fifth iteration.
    """
    parts = [[SimpleNamespace(logprob_old=k, logprob_sampler=None)] for k in range(3)]
    rescored, steps, gaps = [], [], {f"{kind}/logprob_gap_max_nats": 0.1 for kind in update.KINDS}
    monkeypatch.setattr(gcd.batching, "minibatches", lambda samples, n: parts)
    monkeypatch.setattr(update, "with_gradient", lambda samples, objective: list(samples))
    monkeypatch.setattr(update, "rescore", lambda model, samples, objective: rescored.extend(samples))
    monkeypatch.setattr(update, "update", lambda model, optimizer, part, objective, rate, compare: (
        steps.append((part, rate, compare)) or dict(gaps)))
    config = SimpleNamespace(minibatches=3, kl="none", dtype="bfloat16", lr=2.0, iterations=10, warmup=0,
                             lr_decay=True)
    gcd.optimize(SimpleNamespace(config=config, objective=None, model=None, optimizer=None), i, [], None)
    assert rescored == [*parts[1], *parts[2]]
    assert (parts[0][0].logprob_old, parts[0][0].logprob_sampler) == (None, 0)
    assert steps == [(part, 2.0 * (1 - i / 10), compare) for part, compare in zip(parts, compared)]


def test_a_gap_that_rounding_cannot_explain_ends_a_float32_run():
    def gaps(policy, judges=float("nan")):
        return {"policy/logprob_gap_max_nats": policy, "judge/logprob_gap_max_nats": judges}

    small = gaps(1.9e-3)
    assert gcd.checked_gap(small | {"policy/loss": 1.0}, "float32") == pytest.approx(small, nan_ok=True)
    gcd.checked_gap(gaps(0.5, 0.5), "bfloat16")
    for wrong, kind in ((gaps(2.1e-3), "policy"), (gaps(0.0, 2.1e-3), "judge")):
        with pytest.raises(ValueError, match=f"^{kind}: sampler and trainer differ by 2.10e-03 nats"):
            gcd.checked_gap(wrong, "float32")


@pytest.mark.parametrize("dtype, rescored", [("float32", False), ("bfloat16", True)])
def test_a_kl_in_the_reward_is_of_the_trainers_logprobs_in_bf16(monkeypatch, dtype, rescored):
    seen = []
    monkeypatch.setattr(gcd.rewards, "write_rewards", lambda *_: None)
    monkeypatch.setattr(update, "write_kl", lambda *given: seen.append(given[-2:]))
    algorithm = SimpleNamespace(settings=None, assign_checked=lambda *_: {},
                                subtract_kl=lambda episodes: seen.append("subtracted"))
    config = SimpleNamespace(algorithm=algorithm, kl="reward", kl_coef=0.1, dtype=dtype, iterations=1, seed=0,
                             warmup=0, lr_decay=False)
    gcd.assign_credit(SimpleNamespace(config=config, model=None, objective=None), 0, [], None)
    assert seen == [(0.1, rescored), "subtracted"]


@pytest.mark.parametrize("admissible, command, valid", [
    ([], "go", True), ([], None, False), (["go"], "go", True), (["look"], "go", False)])
def test_any_command_is_valid_where_a_game_lists_none(admissible, command, valid):
    episode = Episode(GAME, 0)
    conversation = SimpleNamespace(
        episode=episode, reply=Reply("o", admissible), prompt=[1],
        chat=SimpleNamespace(decode=lambda ids: "text", parse=lambda text: (command, None)),
        call=lambda *given: None)
    Conversation.submit(conversation, Response([2], [0.0], False))
    assert [turn.valid for turn in episode.turns] == [valid]


def evaluation_run(tmp_path, rank, world_size, corrected, plays):
    """A run as far as `evaluation` reads it. Appends to `plays` what it is asked to play."""
    def play(specs, sampling, name, max_turns):
        plays.append((specs, sampling, max_turns))
        turn = Turn("o", [1], [2], [0.0], "t", "a", True, "o")
        return [Episode(spec.task, spec.group, index=spec.index, turns=[turn]) for spec in specs]

    config = SimpleNamespace(protocol="eight", correction_at_evaluation=corrected, splits=["L0"], seed=0,
                             evaluation_turns=7, evaluate_tasks=0, algo="grpo", env="household",
                             environment=household.Environment(), max_response_tokens=8, history=0,
                             admissible_only=False, context=64, dtype="float32", on_truncation="fail")
    return SimpleNamespace(config=config, ranks=SimpleNamespace(rank=rank, world_size=world_size), play=play,
                           instruction="Look first.", update_sampler=lambda: None,
                           sampling=lambda temperature: temperature, stop_if_asked=lambda state: None,
                           environment=SimpleNamespace(oracle=None), out=tmp_path,
                           store=lambda episodes, head: plays.append([e.index for e in episodes]))


@pytest.mark.parametrize("corrected", [True, False])
def test_ranks_share_an_evaluation_and_play_it_by_its_flags(monkeypatch, tmp_path, corrected):
    tasks, plays = [Task(f"L0/{g}", "L0", "look", None) for g in range(3)], []
    monkeypatch.setattr(evaluation, "drawn_tasks", lambda config, split: tasks)
    for rank in (1, 2):
        run = evaluation_run(tmp_path, rank, 3, corrected, plays)
        run.update_sampler = partial(plays.append, "weights of now")
        evaluation.evaluation(run)
    assert plays.pop(4) == plays.pop(0) == "weights of now"                 # before each rank's first play
    (first, hot, turns), stored, (_, cold, _) = plays[:3]
    assert (hot, cold, turns) == (1.0, 0.4, 7)
    assert [spec.index for spec in first] == [*range(1, 24, 3)]       # of 3 games, each eight times
    assert {spec.instruction for spec in first} == {"Look first." if corrected else ""}
    assert stored == [1] and len(plays) == 6                                     # of the first play of a game


def test_a_second_evaluation_replaces_the_stored_episodes_of_the_first_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "drawn_tasks", lambda config, split: [Task("L0/0", "L0", "look", None)])
    lines = [{"phase": "rl"}, {"phase": "evaluation"}]
    for line in lines:
        files.append(tmp_path / files.EPISODES, line)
    run = evaluation_run(tmp_path, 0, 1, True, [])
    run.origin, run.identity = {"games_hash": {"L0": "h", "train": "t"}}, {"plugins": {"env": "p"}}
    evaluation.evaluation(run)
    assert files.read_lines(tmp_path / files.EPISODES)[0] == lines[:1]
    stored = files.read_json(tmp_path / files.EVALUATION)
    assert (stored["games_hash"], stored["plugins"]) == ({"L0": "h"}, {"env": "p"})


def test_stored_examples_are_spread_and_have_a_win_and_a_loss():
    episodes = [SimpleNamespace(index=i, won=i == 7) for i in range(36)]
    assert [e.index for e in evaluation.examples(episodes)] == [*range(0, 33, 3), 7]


@pytest.mark.slow
def test_an_evaluation_goes_on_only_if_all_that_it_says_of_itself_is_equal(tmp_path):
    """But its command, what is for readers, and the versions of what it runs on."""
    own, config, given = evaluation.parse(["--player", "expert", "--out", str(tmp_path)])
    with ExitStack() as resources:
        player, facts = evaluation.open_player(own, config, given, resources)
    head = evaluation.head_of(own, config, given, player, facts)
    assert head.keys() - {*evaluation.IDENTITY} == {
        "complete", "seen", "temperature", "command", "versions", "games", "captions", "note", "warning"}


def test_tasks_of_a_part_of_a_split_are_drawn(monkeypatch):
    monkeypatch.setattr(session, "split_tasks", lambda environment, split: [*range(100)])

    def drawn(**settings):
        config = dict(environment=None, evaluate_tasks=0, protocol="full", seed=0) | settings
        return session.drawn_tasks(SimpleNamespace(**config), "L0")
    assert drawn() == drawn(evaluate_tasks=100) == [*range(100)]
    few = drawn(evaluate_tasks=10)
    assert len({*few}) == 10 and few != [*range(10)]
    assert few == drawn(evaluate_tasks=10, seed=1)                 # seeds are compared on the same tasks
    assert len(drawn(protocol="rlvmr")) == 128 and drawn(protocol="rlvmr") != drawn(protocol="rlvmr", seed=1)


@pytest.mark.parametrize("i, warmup, expected", [(4, 0, True), (5, 0, False), (4, 3, False)])
def test_a_warm_up_is_advised_in_the_first_iterations_of_a_run_without_one(i, warmup, expected):
    warned = []
    run = SimpleNamespace(config=SimpleNamespace(kl="loss", warmup=warmup),
                          warn_once=lambda kind, message: warned.append(message))
    gcd.advise(run, i, [], {"rollout/success": 1.0, "rollout/truncated_frac": 0.0, "rollout/restarts": 0,
                            "policy/approx_kl_nats": 0.2})
    assert ["--warmup 5" in message for message in warned] == [expected]
