"""Proves that --admissible-only samples and trains the model's distribution, renormalised to what is allowed.

    python -m pytest tests/test_restrict.py           # about a minute on one core
    python -m pytest tests/test_restrict.py -m fast   # without whole runs

The oracle has no trie and no mask: at every token it looks through all commands that are possible for those
which begin as the response does, and divides the whole softmax's probabilities by their sum.
"""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import (
    QWEN_TOKENIZER,
    Corridor,
    Recorder,
    assert_same,
    flat,
    make_seats,
    needs_qwen,
    rounding,
)
from test_engine import assert_frequencies, splitmix64
from tiny_runs import assert_one_error, begin, cold_started, random_qwen, rows, train

import rollout
import update
from algorithms.losses import entropy
from algorithms.nthr import hidden_and_error
from envs.household import World
from lm import engine
from lm import model as qwen
from lm.chat import TAGS, Chat
from lm.engine import Sampling, Slots, generate
from lm.restrict import BARRED, Restriction, restricted, trie_of
from run import parallel

LIMIT = 8                                        # max_response_tokens: longer than the longest command
# commands of the corridor: one begins another, one is of many tokens
NAMES = {"left": "left", "leftlook": "right", "look": "look", "right, bad": "look"}


class Long(Corridor):
    """The corridor under other names."""

    def step(self, command):
        return super().step(NAMES.get(command, "dance"))

    def reply(self, observation):
        reply = super().reply(observation)
        return reply._replace(admissible=[new for new, old in NAMES.items() if old in reply.admissible])


# The slow oracle

def sayings_of(chat, commands):
    """Every way of giving each command, whole, as token ids."""
    tags = TAGS if chat.style == "tags" else ("",)
    return [chat.respond(command, tag) for command in commands for tag in tags]


def may_follow(ids, sayings):
    """Which tokens follow these in any of the sayings."""
    return sorted({saying[len(ids)] for saying in sayings if saying[:len(ids)] == ids})


@torch.no_grad()
def slow_chances(model, prompt, ids, sayings, temperature):
    """{token: probability} after the prompt and these ids: the full softmax, renormalised."""
    probability = (model(torch.tensor([prompt + ids]))[0, -1].double() / (temperature or 1.0)).softmax(-1)
    allowed = may_follow(ids, sayings)
    total = sum(probability[token].item() for token in allowed)
    return {token: probability[token].item() / total for token in allowed}


def slow_response(model, prompt, stream, sayings, temperature):
    """Ids, logprobs and the allowed ids of one response."""
    ids, logprobs, allowed = [], [], []
    while ids not in sayings:
        chances = slow_chances(model, prompt, ids, sayings, temperature)
        u = ((splitmix64(stream, len(ids)) >> 12) + 0.5) / 2**52
        reached = zip(chances, itertools.accumulate(chances.values()))
        drawn = next(token for token, cumulative in reached if cumulative >= u * sum(chances.values()))
        ids = [*ids, drawn if temperature else max(chances, key=chances.get)]
        logprobs.append(math.log(chances[ids[-1]]))
        allowed.append(sorted(chances))
    return ids, logprobs, allowed


def slow_play(model, chat, seat, temperature, history=0):
    """(prompt ids, response ids, logprobs, allowed) of each turn."""
    env, turns, exchanges = Long(), [], []
    reply = env.reset(seat.task)
    head = chat.message(reply.observation, first=True)
    while len(turns) < 6 and not reply.done:
        prompt = head + [i for exchange in exchanges[-history:] for i in exchange]
        stream = parallel.stream(seat.stream, len(turns))
        ids, *rest = slow_response(model, prompt, stream, sayings_of(chat, reply.admissible), temperature)
        turns.append((prompt, ids, *rest))
        reply = env.step(chat.parse(chat.decode(ids))[0])
        exchanges.append(ids + chat.message(reply.observation))
    return turns


def fast_play(model, chat, seats, sampling=None, slots=4, **options):
    sampling = sampling or Sampling(max_response_tokens=LIMIT)
    return rollout.play(model, chat, [Long() for _ in range(slots)], seats, sampling, 6, 400,
                        admissible_only=True, **options)


# Sampling

@pytest.mark.fast
@pytest.mark.parametrize("style", ["plain", "tags"])
@pytest.mark.parametrize("temperature, history", [(1.0, 0), (0.6, 2), (0.0, 0)])
def test_played_tokens_and_logprobs_are_the_slow_ones(model, tokenizer, temperature, history, style):
    model, chat, seats = model.double(), Chat(tokenizer, style), make_seats(1 if style == "tags" else 3, 3)
    limit = LIMIT + (10 if style == "tags" else 0)           # this tokenizer has no token for a tag
    episodes = fast_play(model, chat, seats, Sampling(temperature, limit), history=history)
    lengths = set()
    for seat, episode in zip(seats, episodes, strict=True):
        slow = slow_play(model, chat, seat, temperature, history)
        assert [(turn.prompt_ids, turn.response_ids) for turn in episode.turns] == [s[:2] for s in slow]
        for turn, (_, ids, logprobs, allowed) in zip(episode.turns, slow):
            assert turn.logprob_old == pytest.approx(logprobs, abs=1e-5)
            assert [sorted(some) for some in turn.allowed] == allowed
            forced = [p for p, some in zip(turn.logprob_old, turn.allowed) if len(some) == 1]
            assert forced == [0.0] * len(forced)
            assert turn.valid and turn.action in NAMES and not turn.truncated
            lengths.add(len(ids))
    assert len(lengths) > (temperature > 0)                  # short commands and long ones


@pytest.mark.fast
def test_a_responses_probability_is_the_chain_of_the_renormalised_ones(model, chat):
    """Brute force: every possible command's, and they add up to 1."""
    model, sayings = model.double(), sayings_of(chat, NAMES)
    prompt = chat.message("You are at 2.", first=True)
    chance = {tuple(s): math.prod(slow_chances(model, prompt, s[:t], sayings, 1.0)[s[t]]
                                  for t in range(len(s))) for s in sayings}
    assert sum(chance.values()) == pytest.approx(1.0, abs=1e-9) and min(chance.values()) > 1e-3
    n, counts = 4000, dict.fromkeys(chance, 0)
    for a in range(0, n, 500):
        restrictions = [chat.restriction(NAMES) for _ in range(500)]
        slots = Slots(model, 500, 64, chat.stop_ids, Sampling(1.0, LIMIT))
        drawn = generate(slots, [prompt] * 500, range(a, a + 500), restrictions=restrictions)
        for response in drawn:
            counts[tuple(response.ids)] += 1                 # KeyError: something else was sampled
            assert sum(response.logprob) == pytest.approx(math.log(chance[tuple(response.ids)]), abs=1e-5)
    frequency = torch.tensor([count / n for count in counts.values()], dtype=torch.double)
    assert_frequencies(frequency, torch.tensor([*chance.values()], dtype=torch.double), n)


@pytest.mark.fast
@pytest.mark.parametrize("slots", [1, 2, 5, 12])
def test_any_number_of_slots_plays_the_same_episodes(model, chat, slots):
    model, seats = model.double(), make_seats(3, 4)
    alone = [fast_play(model, chat, [seat], slots=1)[0] for seat in seats]
    together = fast_play(model, chat, seats, slots=slots)
    for one, other in zip(alone, together, strict=True):
        assert [t.response_ids for t in one.turns] == [t.response_ids for t in other.turns]
        assert [t.allowed for t in one.turns] == [t.allowed for t in other.turns]


@pytest.mark.fast
def test_free_tokens_come_before_restricted_ones(model, chat):
    """As where a model writes a thought first; here two tokens of anything."""
    model, sayings, streams = model.double(), sayings_of(chat, NAMES), range(160)
    prompt, sampling = chat.message("You are at 2.", first=True), Sampling(1.0, LIMIT + 2)
    free = engine.answer(model, [prompt], [streams], chat.stop_ids, sampling, 160)[0]
    restrictions = [Restriction(trie_of(sayings), lambda ids: len(ids) == 2) for _ in streams]
    slots = Slots(model, 160, 64, chat.stop_ids, sampling)
    drawn = generate(slots, [prompt] * 160, streams, restrictions=restrictions)
    begun = [(one, other) for one, other in zip(drawn, free) if not set(one.ids[:2]) & set(chat.stop_ids)]
    assert len(begun) > 10
    for response, unrestricted in begun:
        assert response.ids[:2] == unrestricted.ids[:2] and response.logprob[:2] == unrestricted.logprob[:2]
        assert response.allowed[:2] == [None, None] and response.ids[2:] in sayings
        assert [sorted(some) for some in response.allowed[2:]] == [
            may_follow(response.ids[2:t], sayings) for t in range(2, len(response.ids))]
    assert all(some is None for response in drawn for some in response.allowed[:2])


@pytest.mark.fast
def test_a_command_longer_than_a_response_may_be_is_cut(model, chat):
    episodes = fast_play(model, chat, make_seats(3, 4), Sampling(1.0, 2))
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(turn.valid != turn.truncated for turn in turns) and len({t.valid for t in turns}) == 2
    assert all(len(turn.allowed) == len(turn.response_ids) == 2 for turn in turns)


@pytest.mark.fast
def test_what_is_barred_has_probability_0_and_no_part_in_the_entropy():
    logits = torch.tensor([[1.0, 300.0, -2.0], [0.5, 0.0, 2.0], [-5.0, 1.0, 2.0]], requires_grad=True)
    got = restricted(logits, [(0, 2), None, (1,)])
    probability = got.detach().softmax(-1)
    assert probability[0, 1] == 0 and probability[0, 0] == pytest.approx(1 / (1 + math.exp(-3)))
    assert probability[2].tolist() == [0, 1, 0] and torch.equal(got[1], logits[1])
    p, entropies = 1 / (1 + math.exp(-3)), entropy(got.detach())
    assert entropies[0].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)
    assert entropies[2] == 0
    (got.log_softmax(-1)[[0, 2], [0, 1]]).sum().backward()
    assert logits.grad[0, 1] == 0 and logits.grad[2].tolist() == [0, 0, 0]
    assert logits.grad[0, 0].item() == pytest.approx(1 - p, rel=1e-5)
    assert (restricted(logits, None) is restricted(logits, [None] * 3) is logits) and BARRED < -1e20


# Training

def explicit_logprobs(model, sample, temperature):
    """{t: logprob of the token there} by logsumexp over what was allowed, and the entropies."""
    logits = model(torch.tensor([sample.ids]))[0] / temperature
    found, entropies = {}, []
    for t in (t for t, sampled in enumerate(sample.sampled) if sampled):
        allowed = list(sample.allowed[t])
        kept = logits[t - 1, allowed]
        found[t] = logits[t - 1, sample.ids[t]] - kept.logsumexp(0)
        p = kept.detach().softmax(0)
        entropies.append(-(p * p.log()).sum().item())
    return found, entropies


@pytest.fixture
def samples(model, chat):
    """Restricted episodes with advantages of all sizes, old and reference logprobs a little off."""
    episodes = fast_play(model, chat, make_seats(3, 3))
    rng = random.Random(0)
    for episode in episodes:
        for turn in episode.turns:
            turn.advantage = rng.uniform(-1, 1)
    made = [sample for episode in episodes for sample in update.samples_of(episode)]
    for sample in made:
        near = [[p + rng.uniform(-0.3, 0.3) * s for p, s in zip(sample.logprob_old, sample.sampled)]
                for _ in range(2)]
        sample.logprob_old, sample.logprob_ref = near
    return made


@pytest.mark.fast
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_renormalised_softmax(model, samples, temperature):
    objective = update.Objective(max_grad_norm=0.0, temperature=temperature, kl_coef=0.1)
    total, n, entropies = 0.0, 0, []
    for sample in samples:
        logprobs, some = explicit_logprobs(model, sample, temperature)
        entropies += some
        for t, now in logprobs.items():
            ratio = (now - sample.logprob_old[t]).exp()
            bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
            d = sample.logprob_ref[t] - now
            total = total - torch.minimum(ratio * sample.advantage[t], bounded * sample.advantage[t])
            total, n = total + objective.kl_coef * (d.exp() - d - 1), n + 1
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, objective, lr=0.0)
    assert_same(recorder.gradient, flat(torch.autograd.grad(total / n, list(model.parameters()))))
    assert metrics["policy/loss"] == pytest.approx((total / n).item(), abs=1e-5)
    assert metrics["policy/entropy_nats"] == pytest.approx(sum(entropies) / n, abs=1e-5)


@pytest.mark.fast
def test_scores_are_the_samplers_logprobs_and_the_renormalised_ones(model, chat):
    episodes = fast_play(model, chat, make_seats(3, 3), history=2)        # a sample per turn, and merged ones
    objective = update.Objective()
    made = [sample for episode in episodes for sample in update.samples_of(episode)]
    assert len(made) > len(episodes)
    for sample, scores in zip(made, update.score(model, made, objective)):
        want, _ = explicit_logprobs(model, sample, 1.0)
        for t, logprob in want.items():
            assert scores[t] == pytest.approx(logprob.item(), abs=rounding(10.0))
            assert scores[t] == pytest.approx(sample.logprob_old[t], abs=1e-5)
    gap = update.rescore(model, made, objective)
    assert 0 <= gap["policy/logprob_gap_max_nats"] < 1e-5


@pytest.mark.fast
def test_a_response_whose_tokens_were_all_forced_has_no_gradient(model, samples):
    for sample in samples:
        sample.allowed = {t: (token,) for t, token in enumerate(sample.ids)}
        sample.logprob_old = [0.0] * len(sample.ids)
    recorder = Recorder(model)
    metrics = update.update(model, recorder, samples, update.Objective(max_grad_norm=0.0), lr=0.0)
    assert recorder.gradient.abs().max() == 0 and metrics["policy/entropy_nats"] == 0


@pytest.mark.fast
def test_free_and_restricted_samples_share_a_microbatch(model, samples):
    """Judge answers are never restricted; a sample without `allowed` is scored over all tokens."""
    free = [replace(sample, allowed={}) for sample in samples]
    objective = update.Objective()
    mixed = update.score(model, samples[:3] + free[3:], objective)
    apart = update.score(model, samples[:3], objective) + update.score(model, free[3:], objective)
    for one, other in zip(mixed, apart, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(mixed[0], update.score(model, free[:1], objective)[0])) > 0.1


@pytest.mark.fast
def test_nthr_reads_the_restricted_distribution(model, samples):
    columns = sorted({sample.ids[t] for sample in samples for t, s in enumerate(sample.sampled) if s})
    for sample, (_, error_NV) in zip(samples, hidden_and_error(model, samples, columns, update.Objective())):
        logits = model(torch.tensor([sample.ids]))[0].detach()
        places = [t for t, sampled in enumerate(sample.sampled) if sampled]
        for t, error in zip(places, error_NV):
            allowed = list(sample.allowed[t])
            p = dict(zip(allowed, logits[t - 1, allowed].softmax(0).tolist()))
            want = [float(sample.ids[t] == c) - p.get(c, 0.0) for c in columns]
            assert error.tolist() == pytest.approx(want, abs=1e-5)


# Texts

def walk(restriction, rng, free=()):
    """A response: the free ids, then any of what may come."""
    for token in free:
        assert restriction.next is None
        restriction.take(token)
    while restriction.next:
        restriction.take(rng.choice(restriction.next))
    return restriction.ids


def assert_writes(chat, heads, others):
    """After each head one of the commands comes, in the tokens of `respond`; the others stay free."""
    rng, commands = random.Random(0), ("go to cabinet 1", "go to cabinet 10", "look", "put 1 in/on 2", "x: y")
    for head in heads:
        ids = chat.encode(head)
        given = {chat.parse(chat.decode(walk(chat.restriction(commands), rng, ids)))[0] for _ in range(60)}
        assert given == {*commands}
    for command in commands:
        whole, (saying,) = chat.respond(command, "explore"), chat.sayings(command)
        assert whole[-len(saying):] == saying and chat.command_begins(whole[:-len(saying)])
    for text in others:
        ids = chat.encode(text)
        assert not any(chat.command_begins(ids[:n]) for n in range(len(ids) + 1)), text


HEADS = {"think": ("<think>It is there.</think><action", " <think>a\n<action b</think>\n\n<action",
                   "<think></think><action"),
         "tags": ("<planning>First a.</planning><action", "<explore>\nb</explore> <action")}
OTHERS = ("<action", "look<action", "<think>a<action", "<think>a</think>look", "<planning>a</explore><action",
          "<monitor> </monitor><action", "<think>a</think><act")


@pytest.mark.fast
@pytest.mark.parametrize("style", HEADS)
def test_after_its_thought_a_command_is_one_of_the_possible(tokenizer, style):
    chat = Chat(tokenizer, style)
    chat.small = chat.bare = False               # the form that Hugging Face models are asked for
    assert_writes(chat, HEADS[style], OTHERS)


@needs_qwen
@pytest.mark.parametrize("style", HEADS)
def test_qwens_tokens_are_those_of_a_demonstration(style, qwen3_tokenizer):
    """Of Qwen2.5, and of Qwen3, whose thoughts begin and end with one token each."""
    for tokenizer in (qwen.load_tokenizer(QWEN_TOKENIZER), qwen3_tokenizer):
        assert_writes(Chat(tokenizer, style), HEADS[style], OTHERS)


@pytest.mark.fast
def test_a_small_model_gives_a_tag_and_a_command(tokenizer):
    chat, rng = Chat(tokenizer, "tags"), random.Random(0)
    given = {chat.parse(chat.decode(walk(chat.restriction(("look", "left")), rng))) for _ in range(200)}
    assert given == set(itertools.product(("look", "left"), TAGS))


@pytest.mark.fast
@pytest.mark.parametrize("style, command", [("plain", " look"), ("plain", ""), ("think", "a <b>")])
def test_a_command_that_no_response_can_give_is_named(tokenizer, style, command):
    with pytest.raises(ValueError, match=f"--admissible-only: no response can give the command {command!r}"):
        Chat(tokenizer, style).restriction(["look", command])


@pytest.mark.fast
@pytest.mark.parametrize("nothing", [[], None])
def test_a_world_that_lists_no_command_is_named(model, chat, monkeypatch, nothing):
    reply = Long.reply
    monkeypatch.setattr(Long, "reply", lambda self, seen: reply(self, seen)._replace(admissible=nothing))
    with pytest.raises(ValueError, match="--admissible-only: task corridor/0 lists no command before turn 1"):
        fast_play(model, chat, make_seats(1, 2))


# Whole runs

@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_started(tmp_path_factory)


@pytest.fixture
def half_won(monkeypatch):
    """Every other episode counts as won, so that there is something to learn: so small a model wins none."""
    play = rollout.play

    def played(*arguments, **options):
        episodes = play(*arguments, **options)
        for i, episode in enumerate(episodes):
            episode.won = i % 2 == 0
        return episodes

    monkeypatch.setattr(rollout, "play", played)


@pytest.mark.parametrize("flags", [
    "", "--kl loss --kl-coef 1", "--kl reward --kl-coef 1", "--history 2", "--algo nthr --no-gcd",
    "--algo ppo", "--temperature 0.5 --judge-kind value", "--dtype bfloat16"])
def test_nothing_is_refused_and_sampler_and_trainer_agree(start, half_won, tmp_path, flags):
    """`train` itself ends a run in float32 whose sampler and trainer are 1e-4 apart; of the same episodes,
    scored over the whole vocabulary, they would be whole nats apart."""
    assert train(tmp_path, *begin(start), "--admissible-only", *flags.split()) == 0
    limit = 0.2 if "bfloat16" in flags else 1e-4
    for row in rows(tmp_path):
        assert row["rollout/invalid_frac"] == row["rollout/truncated_frac"] == 0
        assert 0 <= row["policy/logprob_gap_max_nats"] < limit
        assert row["policy/steps"] == 2 and row["policy/grad_norm"] > 0
        assert 0 < row["policy/entropy_nats"] < 3


def test_a_trainer_without_the_mask_is_found_out(start, half_won, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(update, "restricted", lambda logits, allowed: logits)
    assert train(tmp_path, *begin(start), "--admissible-only") == 1
    assert_one_error(capsys, "sampler and trainer differ by")


def test_evaluation_is_restricted_too(start, tmp_path, monkeypatch):
    """Greedily as well; of L0's games a few are enough."""
    split = World.split
    monkeypatch.setattr(World, "split", lambda self, name: split(self, name)[:6])
    monkeypatch.setattr(World, "unseen", lambda self: ["L0"])
    flags = ["--iterations", 0, "--evaluate", "L0", "--protocol", "full", "--admissible-only"]
    assert train(tmp_path, *begin(start), *flags) == 0
    from run import files
    modes = files.read_json(tmp_path / "evaluation.json")["splits"]["L0"]
    assert set(modes) == {"sampled", "greedy", "t0.4"}
    assert all(mode["invalid_frac"] == mode["truncated_frac"] == 0 for mode in modes.values())


def test_tags_before_commands_are_trained(half_won, tmp_path):
    flags = ["--demonstrations", 8, "--judge-demonstrations", 8, "--algo", "rlvmr", "--admissible-only"]
    assert train(tmp_path, *flags, "--iterations", 1, "--tasks", 2) == 0
    assert all(row["rollout/invalid_frac"] == 0 and row["policy/logprob_gap_max_nats"] < 1e-4
               for row in rows(tmp_path))


@needs_qwen
def test_a_hugging_face_models_commands_are_restricted(tmp_path, monkeypatch):
    """A random model never comes to a command by itself, so here each begins after one token (and is
    malformed, for want of a thought). --kl, of the paper's preset, makes steps that have a gap."""
    monkeypatch.setattr(Chat, "command_begins", lambda self, ids: len(ids) == 1)
    taken, say = [], rollout.Conversation.say
    monkeypatch.setattr(rollout.Conversation, "say", lambda self, response, cut: (
        taken.append((self.reply.admissible, self.chat.decode(response.ids), response)),
        say(self, response, cut))[1])
    model = random_qwen(tmp_path / "qwen", QWEN_TOKENIZER)
    flags = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 2 --max-response-tokens 24 "
             "--judge-response-tokens 8 --context 4096 --dtype float32 --lr 6e-4 --admissible-only").split()
    assert train(tmp_path / "run", "--model", model, *flags) == 0
    assert all(0 <= row["policy/logprob_gap_max_nats"] < 1e-4 for row in rows(tmp_path / "run"))
    assert len(taken) == 16
    for admissible, text, response in taken:
        whole = [f">{command}</action>" for command in admissible]
        assert text.endswith(tuple(whole)) and not response.truncated
        assert response.allowed[0] is None and None not in response.allowed[1:]


def test_a_list_that_runs_out_ends_the_run_with_one_line(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Chat, "restriction", lambda self, commands: (_ for _ in ()).throw(
        ValueError("--admissible-only: no response can give the command ''")))
    assert train(tmp_path, *begin(start), "--admissible-only") == 1
    assert_one_error(capsys, "--admissible-only: no response can give")
