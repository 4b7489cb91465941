"""Proves that --admissible-only samples and trains the model's distribution, renormalized to the allowed ids.

    python -m pytest tests/lm/test_restrict.py           # about a minute on one core
    python -m pytest tests/lm/test_restrict.py -m fast   # without complete runs

The oracle has no trie and no mask: at every token it searches all admissible commands for those that start
like the response, and divides the full softmax's probabilities by their sum.
"""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import (
    Corridor,
    Recorder,
    assert_same,
    flat,
    make_specs,
    rounding,
)
from test_engine import assert_frequencies, splitmix64
from tiny_runs import assert_one_error, random_qwen, rows, start_from, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import batching
import rollout
import update
from algorithms.nthr import hidden_and_error
from envs.household import Environment
from infra import files, streams
from lm import engine
from lm.chat import TAGS, Chat
from lm.engine import Sampling, Slots, generate
from lm.logprobs import entropy
from lm.restrict import MASKED_LOGIT, Restriction, restricted, trie_of

LIMIT = 8                                        # max_response_tokens: longer than the longest command
# commands -> the corridor's; one is a prefix of another, one has many tokens
NAMES = {"left": "left", "leftlook": "right", "look": "look", "right, bad": "look"}


class RenamedCorridor(Corridor):
    """The corridor with the commands of NAMES."""

    def step(self, command):
        return super().step(NAMES.get(command, "dance"))

    def reply(self, observation):
        reply = super().reply(observation)
        return reply._replace(admissible=[new for new, old in NAMES.items() if old in reply.admissible])


# The slow oracle

def responses_to_give(chat, commands):
    """The token ids of every response that gives one of the commands."""
    tags = TAGS if chat.style == "tags" else ("",)
    return [chat.respond(command, tag) for command in commands for tag in tags]


def may_follow(ids, responses):
    """The tokens that follow `ids` in any of the responses."""
    return sorted({response[len(ids)] for response in responses if response[:len(ids)] == ids})


@torch.no_grad()
def slow_probabilities(model, prompt, ids, responses, temperature):
    """{token: probability} after prompt and ids: the full softmax, renormalized to the allowed tokens."""
    probability = (model(torch.tensor([prompt + ids]))[0, -1].double() / (temperature or 1.0)).softmax(-1)
    allowed = may_follow(ids, responses)
    total = sum(probability[token].item() for token in allowed)
    return {token: probability[token].item() / total for token in allowed}


def slow_response(model, prompt, stream, responses, temperature):
    """Ids, logprobs and allowed ids of one sampled response."""
    ids, logprobs, allowed = [], [], []
    while ids not in responses:
        p = slow_probabilities(model, prompt, ids, responses, temperature)
        u = ((splitmix64(stream, len(ids)) >> 12) + 0.5) / 2**52
        cumulative = zip(p, itertools.accumulate(p.values()))
        drawn = next(token for token, c in cumulative if c >= u * sum(p.values()))
        ids = [*ids, drawn if temperature else max(p, key=p.get)]
        logprobs.append(math.log(p[ids[-1]]))
        allowed.append(sorted(p))
    return ids, logprobs, allowed


def slow_play(model, chat, spec, temperature, history=0):
    """(prompt ids, response ids, logprobs, allowed) of each turn."""
    game, turns, exchanges = RenamedCorridor(), [], []
    reply = game.reset(spec.task)
    head = chat.message(reply.observation, first=True)
    while len(turns) < 6 and not reply.done:
        prompt = head + [i for exchange in exchanges[-history:] for i in exchange]
        stream = streams.stream(spec.stream, len(turns))
        responses = responses_to_give(chat, reply.admissible)
        ids, *rest = slow_response(model, prompt, stream, responses, temperature)
        turns.append((prompt, ids, *rest))
        reply = game.step(chat.parse(chat.decode(ids))[0])
        exchanges.append(ids + chat.message(reply.observation))
    return turns


def fast_play(model, chat, specs, sampling=None, slots=4, **options):
    sampling = sampling or Sampling(max_response_tokens=LIMIT)
    return rollout.play(model, chat, [RenamedCorridor() for _ in range(slots)], specs, sampling, 6, 400,
                        admissible_only=True, **options)


# Sampling

@pytest.mark.slow
@pytest.mark.parametrize("style", ["plain", "tags"])
@pytest.mark.parametrize("temperature, history", [(1.0, 0), (0.6, 2), (0.0, 0)])
def test_played_tokens_and_logprobs_equal_the_oracles(model, tokenizer, temperature, history, style):
    model, chat, specs = model.double(), Chat(tokenizer, style), make_specs(1 if style == "tags" else 3, 3)
    limit = LIMIT + (10 if style == "tags" else 0)           # a tag is several tokens of this tokenizer
    episodes = fast_play(model, chat, specs, Sampling(temperature, limit), history=history)
    lengths = set()
    for spec, episode in zip(specs, episodes, strict=True):
        slow = slow_play(model, chat, spec, temperature, history)
        assert [(turn.prompt_ids, turn.response_ids) for turn in episode.turns] == [s[:2] for s in slow]
        for turn, (_, ids, logprobs, allowed) in zip(episode.turns, slow):
            assert turn.logprob_old == pytest.approx(logprobs, abs=1e-5)
            assert [sorted(options) for options in turn.allowed] == allowed
            forced = [p for p, options in zip(turn.logprob_old, turn.allowed) if len(options) == 1]
            assert forced == [0.0] * len(forced)
            assert turn.valid and turn.action in NAMES and not turn.truncated
            lengths.add(len(ids))
    assert len(lengths) > (temperature > 0)                  # short and long commands


@pytest.mark.slow
def test_a_responses_probability_is_the_product_of_the_renormalized_ones(model, chat):
    """By brute force for every command. The probabilities sum to 1 and equal the frequencies of samples."""
    model, responses = model.double(), responses_to_give(chat, NAMES)
    prompt = chat.message("You are at 2.", first=True)
    probability = {tuple(r): math.prod(slow_probabilities(model, prompt, r[:t], responses, 1.0)[r[t]]
                                       for t in range(len(r))) for r in responses}
    assert sum(probability.values()) == pytest.approx(1.0, abs=1e-9) and min(probability.values()) > 1e-3
    n, counts = 4000, dict.fromkeys(probability, 0)
    for a in range(0, n, 500):
        restrictions = [chat.restriction(NAMES) for _ in range(500)]
        slots = Slots(model, 500, 64, chat.stop_ids, Sampling(1.0, LIMIT))
        drawn = generate(slots, [prompt] * 500, range(a, a + 500), restrictions=restrictions)
        for response in drawn:
            counts[tuple(response.ids)] += 1                 # KeyError if no command was sampled
            expected = math.log(probability[tuple(response.ids)])
            assert sum(response.logprob) == pytest.approx(expected, abs=1e-5)
    frequency = torch.tensor([count / n for count in counts.values()], dtype=torch.double)
    assert_frequencies(frequency, torch.tensor([*probability.values()], dtype=torch.double), n)


@pytest.mark.slow
def test_any_number_of_slots_plays_the_same_episodes(model, chat):
    model, specs = model.double(), make_specs(3, 4)
    alone = [fast_play(model, chat, [spec], slots=1)[0] for spec in specs]
    for slots in (2, 5, 12):
        for one, other in zip(alone, fast_play(model, chat, specs, slots=slots), strict=True):
            assert [t.response_ids for t in one.turns] == [t.response_ids for t in other.turns]
            assert [t.allowed for t in one.turns] == [t.allowed for t in other.turns]


def test_a_token_that_is_not_allowed_means_logprobs_that_are_not_finite():
    """The sampler draws token 0 then; gcd.py ends with one line."""
    restriction = Restriction(trie_of([[3, 4], [3, 5]]))
    restriction.take(3)
    with pytest.raises(FloatingPointError, match="logprobs are not finite"):
        restriction.take(0)


def test_free_tokens_precede_restricted_ones(model, chat):
    """As when a model first writes a thought; here it is any two tokens."""
    model, responses, streams = model.double(), responses_to_give(chat, NAMES), range(160)
    prompt, sampling = chat.message("You are at 2.", first=True), Sampling(1.0, LIMIT + 2)
    free = engine.answer(model, [prompt], [streams], chat.stop_ids, sampling, 160)[0]
    restrictions = [Restriction(trie_of(responses), lambda ids: len(ids) == 2) for _ in streams]
    slots = Slots(model, 160, 64, chat.stop_ids, sampling)
    drawn = generate(slots, [prompt] * 160, streams, restrictions=restrictions)
    pairs = [(one, other) for one, other in zip(drawn, free) if not set(one.ids[:2]) & set(chat.stop_ids)]
    assert len(pairs) > 10
    for response, unrestricted in pairs:
        assert response.ids[:2] == unrestricted.ids[:2] and response.logprob[:2] == unrestricted.logprob[:2]
        assert response.allowed[:2] == [None, None] and response.ids[2:] in responses
        assert [sorted(options) for options in response.allowed[2:]] == [
            may_follow(response.ids[2:t], responses) for t in range(2, len(response.ids))]
    assert all(options is None for response in drawn for options in response.allowed[:2])


def test_a_command_longer_than_max_response_tokens_is_truncated(model, chat):
    episodes = fast_play(model, chat, make_specs(3, 4), Sampling(1.0, 2))
    turns = [turn for episode in episodes for turn in episode.turns]
    assert all(turn.valid != turn.truncated for turn in turns) and len({t.valid for t in turns}) == 2
    assert all(len(turn.allowed) == len(turn.response_ids) == 2 for turn in turns)


def test_masked_ids_have_probability_0_and_do_not_contribute_to_the_entropy():
    logits = torch.tensor([[1.0, 300.0, -2.0], [0.5, 0.0, 2.0], [-5.0, 1.0, 2.0]], requires_grad=True)
    got = restricted(logits, [(0, 2), None, (1,)])
    probability = got.detach().softmax(-1)
    assert probability[0, 1] == 0 and probability[0, 0] == pytest.approx(1 / (1 + math.exp(-3)))
    assert probability[2].tolist() == [0, 1, 0] and torch.equal(got[1], logits[1])
    p, entropies = 1 / (1 + math.exp(-3)), entropy(got.detach().log_softmax(-1))
    assert entropies[0].item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)
    assert entropies[2] == 0
    (got.log_softmax(-1)[[0, 2], [0, 1]]).sum().backward()
    assert logits.grad[0, 1] == 0 and logits.grad[2].tolist() == [0, 0, 0]
    assert logits.grad[0, 0].item() == pytest.approx(1 - p, rel=1e-5)
    assert (restricted(logits, None) is restricted(logits, [None] * 3) is logits) and MASKED_LOGIT < -1e20


# Training

def explicit_logprobs(model, sample, temperature):
    """{t: logprob of token t} by logsumexp over the allowed ids, and the entropies."""
    logits = model(torch.tensor([sample.ids]))[0] / temperature
    logprobs, entropies = {}, []
    for t in (t for t, sampled in enumerate(sample.sampled) if sampled):
        allowed = list(sample.allowed[t])
        kept = logits[t - 1, allowed]
        logprobs[t] = logits[t - 1, sample.ids[t]] - kept.logsumexp(0)
        p = kept.softmax(0)
        entropies.append(-(p * p.log()).sum())
    return logprobs, entropies


@pytest.fixture
def samples(model, chat):
    """Samples of restricted episodes; random advantages, old and reference logprobs near the model's."""
    episodes = fast_play(model, chat, make_specs(3, 3))
    rng = random.Random(0)
    for episode in episodes:
        for turn in episode.turns:
            turn.advantage = rng.uniform(-1, 1)
    made = [sample for episode in episodes for sample in batching.samples_of(episode)]
    for sample in made:
        near = [[p + rng.uniform(-0.3, 0.3) * s for p, s in zip(sample.logprob_old, sample.sampled)]
                for _ in range(2)]
        sample.logprob_old, sample.logprob_ref = near
    return made


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_gradient_is_that_of_the_renormalized_softmax(model, samples, temperature):
    objective = update.Objective(max_grad_norm=0.0, temperature=temperature, kl_coef=0.1, entropy_coef=0.2)
    total, n, entropies = 0.0, 0, []
    for sample in samples:
        logprobs, of_sample = explicit_logprobs(model, sample, temperature)
        total = total - objective.entropy_coef * sum(of_sample)
        entropies += of_sample
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
    assert metrics["policy/entropy_nats"] == pytest.approx(sum(entropies).item() / n, abs=1e-5)


def test_the_trainers_logprobs_equal_the_samplers_and_the_renormalized_ones(model, chat):
    episodes = fast_play(model, chat, make_specs(3, 3), history=2)        # a sample per turn, or merged
    objective = update.Objective()
    made = [sample for episode in episodes for sample in batching.samples_of(episode)]
    assert len(made) > len(episodes)
    for sample, scores in zip(made, update.logprobs(model, made, objective)):
        want, _ = explicit_logprobs(model, sample, 1.0)
        for t, logprob in want.items():
            assert scores[t] == pytest.approx(logprob.item(), abs=rounding(10.0))
            assert scores[t] == pytest.approx(sample.logprob_old[t], abs=1e-5)


def test_free_and_restricted_samples_share_a_microbatch(model, samples):
    """A sample without `allowed`, like every judge answer, is scored over the full vocabulary."""
    free = [replace(sample, allowed={}) for sample in samples]
    objective = update.Objective()
    mixed = update.logprobs(model, samples[:3] + free[3:], objective)
    separate = update.logprobs(model, samples[:3], objective) + update.logprobs(model, free[3:], objective)
    for one, other in zip(mixed, separate, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(mixed[0], update.logprobs(model, free[:1], objective)[0])) > 0.1


def test_nthr_uses_the_restricted_distribution(model, samples):
    columns = sorted({sample.ids[t] for sample in samples for t, s in enumerate(sample.sampled) if s})
    for sample, (_, error_NV) in zip(samples, hidden_and_error(model, samples, columns, update.Objective())):
        logits = model(torch.tensor([sample.ids]))[0].detach()
        positions = [t for t, sampled in enumerate(sample.sampled) if sampled]
        for t, error in zip(positions, error_NV):
            allowed = list(sample.allowed[t])
            p = dict(zip(allowed, logits[t - 1, allowed].softmax(0).tolist()))
            want = [float(sample.ids[t] == c) - p.get(c, 0.0) for c in columns]
            assert error.tolist() == pytest.approx(want, abs=1e-5)


# Texts

def random_response(restriction, rng, free=()):
    """A response: the free ids, then random allowed ids."""
    for token in free:
        assert restriction.next is None
        restriction.take(token)
    while restriction.next:
        restriction.take(rng.choice(restriction.next))
    return restriction.ids


def assert_restricts(chat, heads, others):
    """Assert that a command follows each head, encoded as by `respond`, and that the others stay free."""
    rng, commands = random.Random(0), ("go to cabinet 1", "go to cabinet 10", "look", "put 1 in/on 2", "x: y")
    for head in heads:
        ids = chat.encode(head)
        responses = [random_response(chat.restriction(commands), rng, ids) for _ in range(60)]
        assert {chat.parse(chat.decode(response))[0] for response in responses} == {*commands}
    for command in commands:
        response, (encoding,) = chat.respond(command, "explore"), chat.encodings(command)
        n = len(response) - len(encoding)
        assert response[n:] == encoding and chat.command_starts(response[:n])
    for text in others:
        ids = chat.encode(text)
        assert not any(chat.command_starts(ids[:n]) for n in range(len(ids) + 1)), text


HEADS = {"think": ("<think>It is there.</think><action", " <think>a\n<action b</think>\n\n<action",
                   "<think></think><action"),
         "tags": ("<planning>First a.</planning><action", "<explore>\nb</explore> <action")}
OTHERS = ("<action", "look<action", "<think>a<action", "<think>a</think>look", "<planning>a</explore><action",
          "<monitor> </monitor><action", "<think>a</think><act")


@pytest.mark.parametrize("style", HEADS)
def test_an_admissible_command_follows_the_thought(tokenizer, style):
    chat = Chat(tokenizer, style)
    chat.small = chat.bare = False               # the format of Hugging Face models
    assert_restricts(chat, HEADS[style], OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("style", HEADS)
def test_an_admissible_command_follows_the_thought_in_qwens_tokens(style, qwen_tokenizer, qwen3_tokenizer):
    """Of Qwen2.5, and of Qwen3, whose <think> and </think> are single tokens."""
    for tokenizer in (qwen_tokenizer, qwen3_tokenizer):
        assert_restricts(Chat(tokenizer, style), HEADS[style], OTHERS)


@pytest.mark.parametrize("style", HEADS)
def test_commands_of_a_tokenizer_that_begins_each_text_with_a_space(style):
    """Some of SentencePiece's do: the end of a response alone would begin with one."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    alphabet = trainers.BpeTrainer(initial_alphabet=["\n", "▁", *map(chr, range(33, 127))], vocab_size=300)
    bpe.train_from_iterator(["go to cabinet 1"], alphabet)
    template = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
                "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="</s>", chat_template=template,
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"])
    chat, rng = Chat(tokenizer, style), random.Random(0)
    for head in HEADS[style]:
        responses = [random_response(chat.restriction(("go to cabinet 1", "look")), rng, chat.encode(head))
                     for _ in range(20)]
        assert {chat.parse(chat.decode(ids))[0] for ids in responses} == {"go to cabinet 1", "look"}


def test_a_small_models_response_is_a_tag_and_a_command(tokenizer):
    chat, rng = Chat(tokenizer, "tags"), random.Random(0)
    responses = [random_response(chat.restriction(("look", "left")), rng) for _ in range(200)]
    parsed = {chat.parse(chat.decode(response)) for response in responses}
    assert parsed == set(itertools.product(("look", "left"), TAGS))


@pytest.mark.parametrize("style, command", [("plain", " look"), ("plain", ""), ("think", "a <b>")])
def test_an_error_names_a_command_that_no_response_can_give(tokenizer, style, command):
    with pytest.raises(ValueError, match=f"--admissible-only: no response can give the command {command!r}"):
        Chat(tokenizer, style).restriction(["look", command])


def test_an_error_names_the_task_that_lists_no_command(model, chat, monkeypatch):
    reply = RenamedCorridor.reply
    monkeypatch.setattr(RenamedCorridor, "reply", lambda self, observation: (
        reply(self, observation)._replace(admissible=[])))
    with pytest.raises(ValueError, match="--admissible-only: task corridor/0 lists no command before turn 1"):
        fast_play(model, chat, make_specs(1, 2))


# Complete runs

@pytest.fixture
def half_won(monkeypatch):
    """Mark every other episode as won, so that there is a gradient: so small a model wins none."""
    play = rollout.play

    def played(*arguments, **options):
        episodes = play(*arguments, **options)
        for i, episode in enumerate(episodes):
            episode.won = i % 2 == 0
        return episodes

    monkeypatch.setattr(rollout, "play", played)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "", "--kl loss --kl-coef 1", "--kl reward --kl-coef 1", "--history 2", "--algo nthr --no-gcd",
    "--algo ppo", "--temperature 0.5 --judge-kind value", "--dtype bfloat16"])
def test_all_commands_are_valid_and_sampler_and_trainer_agree(start, half_won, tmp_path, flags):
    """Sampler and trainer have equal logprobs; scored over the full vocabulary, they would differ by nats."""
    assert train(tmp_path, *start_from(start), "--admissible-only", *flags.split()) == 0
    limit = 0.2 if "bfloat16" in flags else 1e-4
    for row in rows(tmp_path):
        assert row["rollout/invalid_frac"] == row["rollout/truncated_frac"] == 0
        assert 0 <= row["policy/logprob_gap_max_nats"] < limit
        assert row["policy/steps"] == 2 and row["policy/grad_norm"] > 0
        assert 0 < row["policy/entropy_nats"] < 3


@pytest.mark.slow
def test_a_trainer_without_the_mask_fails_with_an_error(start, half_won, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lm.logprobs.restricted", lambda logits, allowed: logits)
    assert train(tmp_path, *start_from(start), "--admissible-only") == 1
    assert_one_error(capsys, "sampler and trainer differ by")


@pytest.mark.slow
def test_evaluation_is_restricted_too(start, tmp_path, monkeypatch):
    """Greedy evaluation, too; on six games of L0."""
    split_tasks = Environment.split_tasks
    monkeypatch.setattr(Environment, "split_tasks", lambda self, name: split_tasks(self, name)[:6])
    monkeypatch.setattr(Environment, "unseen_splits", lambda self: ["L0"])
    flags = ["--iterations", 0, "--evaluate", "L0", "--protocol", "full", "--admissible-only"]
    assert train(tmp_path, *start_from(start), *flags) == 0
    modes = files.read_json(tmp_path / "evaluation.json")["splits"]["L0"]
    assert set(modes) == {"sampled", "greedy", "t0.4"}
    assert all(mode["invalid_frac"] == mode["truncated_frac"] == 0 for mode in modes.values())


@pytest.mark.slow
def test_tags_before_restricted_commands_are_trained(half_won, tmp_path):
    flags = ["--demonstrations", 8, "--judge-demonstrations", 8, "--algo", "rlvmr", "--admissible-only"]
    assert train(tmp_path, *flags, "--iterations", 1, "--tasks", 2) == 0
    assert all(row["rollout/invalid_frac"] == 0 and row["policy/logprob_gap_max_nats"] < 1e-4
               for row in rows(tmp_path))


@pytest.mark.slow
def test_a_hugging_face_models_commands_are_restricted(short_qwen, tmp_path, monkeypatch):
    """A random model never reaches a command by itself, so here each command starts after one token (and is
    malformed, without a thought). --kl, which the paper's preset sets, gives steps with a logprob gap."""
    monkeypatch.setattr(Chat, "restriction", lambda self, commands: Restriction(
        trie_of(ids for command in commands for ids in self.encodings(command)), lambda ids: len(ids) == 1))
    submitted, submit = [], rollout.Conversation.submit
    monkeypatch.setattr(rollout.Conversation, "submit", lambda self, response, *more: (
        submitted.append((self.reply.admissible, self.chat.decode(response.ids), response)),
        submit(self, response, *more))[1])
    model = random_qwen(tmp_path / "qwen", short_qwen)
    flags = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 2 --max-response-tokens 24 "
             "--judge-response-tokens 16 --context 4096 --dtype float32 --lr 6e-4 --admissible-only").split()
    assert train(tmp_path / "run", "--model", model, *flags) == 0
    assert all(0 <= row["policy/logprob_gap_max_nats"] < 1e-4 for row in rows(tmp_path / "run"))
    assert len(submitted) == 16
    for admissible, text, response in submitted:
        endings = tuple(f">{command}</action>" for command in admissible)
        assert text.endswith(endings) and not response.truncated
        assert response.allowed[0] is None and None not in response.allowed[1:]


@pytest.mark.slow
def test_a_command_that_cannot_be_given_ends_the_run_with_one_line(start, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Chat, "restriction", lambda self, commands: (_ for _ in ()).throw(
        ValueError("--admissible-only: no response can give the command ''")))
    assert train(tmp_path, *start_from(start), "--admissible-only") == 1
    assert_one_error(capsys, "--admissible-only: no response can give")
