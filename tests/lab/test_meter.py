"""Tests that lab/bench/memory.py counts allocated bytes, and that a run that does not fit is rejected early.

    python -m pytest tests/lab/test_meter.py
"""

import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import needs_qwen

import batching
import config
from infra import job
from infra.memory import check_memory, state_bytes
from lab.bench import lengths, memory, memory_check, simulation
from lm import attention, lora
from lm import model as decoder
from lm.optim import adamw, trained
from models import open_chat

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20
MEMORY_CHECK = [sys.executable, "-m", "lab.bench.memory_check"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tensor_counts_while_it_is_referenced_and_its_views_never_count(device):
    before = torch.zeros(MB, device=device)
    with memory.Meter() as meter:
        view = before[1:].t()                                        # of an earlier tensor
        assert meter.now == 0
        a = before + 1
        kept = a.view(2, -1)[0]
        assert meter.now == meter.peak == 4 * MB
        b = a * 2
        del a                                                        # `kept` is a view of it
        assert meter.now == 8 * MB
        del b, kept
        assert meter.now == 0 and meter.peak == 8 * MB
    assert len(view) == MB - 1


def test_backward_is_counted_too():
    weight = torch.zeros(256, 256, device="meta", requires_grad=True)
    with memory.Meter() as meter:
        x = torch.zeros(1024, 256, device="meta")
        loss = (x @ weight).exp().sum()                              # exp saves its output, mm its input
        assert meter.now == 2 * MB + 4
        loss.backward()
        assert meter.now == 2 * MB + 4 - MB + MB // 4               # output freed, gradient allocated


@pytest.mark.slow
@needs_qwen
@pytest.mark.skipif(not (ROOT / lengths.GAMES).exists(), reason=f"needs ALFWorld's games, {lengths.GAMES}")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_real_run_takes_the_predicted_steps_and_bytes():
    """Within 15 %. Of the tokens of all messages, the games of the run and those of envs/lengths.json are two
    samples: 20 games' mean has an error of 9 %.
    """
    ran = subprocess.run([*MEMORY_CHECK, "--dry"], cwd=ROOT, text=True, capture_output=True, check=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"} | memory_check.ALLOCATOR)
    found = {key: float(ratio) for key, ratio in re.findall(r"(.*): predicted .* ratio (.*)", ran.stdout)}
    assert [*found] == ["decode steps", "rollout bytes", "update bytes", "message tokens"]
    assert found.pop("message tokens") == pytest.approx(1, abs=0.3), ran.stdout
    assert all(ratio == pytest.approx(1, abs=0.15) for ratio in found.values()), ran.stdout
    stored = json.loads(memory_check.OUT.read_text())["found"]
    assert all(stored[key]["ratio"] == pytest.approx(1, abs=0.15) for key in found)


@pytest.mark.parametrize("present", [0, 1, 2])
def test_the_check_starts_itself_again_unless_its_allocator_gives_memory_back(monkeypatch, present):
    """With so many of the allocator's variables; os.execve does not return."""
    def execve(*given):
        raise RuntimeError(*given)

    for name, value in memory_check.ALLOCATOR.items():
        monkeypatch.delenv(name, raising=False)
    for name, value in [*memory_check.ALLOCATOR.items()][:present]:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["memory_check.py", "--dry"])
    monkeypatch.setattr(memory_check, "compared", dict)
    assert len(memory_check.ALLOCATOR) == 2
    if present == 2:
        memory_check.main()
        return
    with pytest.raises(RuntimeError) as started:
        memory_check.main()
    environment = os.environ | memory_check.ALLOCATOR
    assert started.value.args == (sys.executable, [*MEMORY_CHECK, "--dry"], environment)


@pytest.fixture
def loads(monkeypatch):
    """{what a load depends on: Load}, each made once. It is made without the setting --lora, so rows that
    differ in that alone have equal ones.
    """
    load_of, made = memory.load_of, {}

    def once(model, ranks, settings, work):
        without = {name: value for name, value in settings.settings().items() if name != "lora"}
        if (key := repr((model.config, ranks, without, work))) not in made:
            made[key] = load_of(model, ranks, SimpleNamespace(**without), work)
        return made[key]

    monkeypatch.setattr(memory, "load_of", once)
    return made


@pytest.mark.slow
def test_the_stored_table_is_current_and_fits(loads):
    """The bytes of two rows; the seconds of all; and each row but one fits its GPUs."""
    if not attention.varlen(torch.device("meta"), torch.bfloat16, 128):
        pytest.skip("this torch has no variable-length attention to count with")
    stored = json.loads(memory.OUT.read_text())
    rows = {row["row"]: row["loads"] for row in stored["rows"]}
    for row in memory.table("", [memory.ROWS[0], next(row for row in memory.ROWS if row.flags)])["rows"]:
        for load, found in row["loads"].items():
            for key in ("bytes", "counts", "tokens"):
                assert rows[row["row"]][load][key] == pytest.approx(found[key], rel=0.02), (
                    f"{row['row']}: run python -m lab.bench.memory")
    assert len(loads) == len(memory.LOADS)                               # the two rows' are the same
    assert len(rows) == len(memory.ROWS)
    for row in memory.ROWS:
        model = memory.meta_model(memory.shape(row.name), torch.bfloat16)
        for found in rows[str(row)].values():
            given = model, row.settings, found["counts"], memory.MACHINES[row.memory]
            slow, fast = (memory.seconds(*given, end) for end in (0, 1))
            assert found["seconds"] == {stage: pytest.approx([slow[stage], fast[stage]]) for stage in slow}
        if not row.turns:
            assert max(size for found in rows[str(row)].values() for stage, size in found["bytes"].items()
                       if "," not in stage) < 1e9 * int(row.memory.split()[0]), row


# The simulated rollout

SETTINGS = SimpleNamespace(tasks=3, group_size=2, slots=4, context=4096, max_response_tokens=64, max_turns=6,
                           minibatches=2, microbatch_tokens=3000)


@pytest.fixture
def small_model(monkeypatch):
    return memory.meta_model(decoder.ModelConfig(100, 16, 32, 2, 2, 1, 8), torch.float32)


@pytest.mark.slow
def test_a_simulated_rollout_is_a_loop_over_rows(small_model, monkeypatch):
    """Steps, keys read and prefilled tokens, against one row after the other, where all rows go at once."""
    monkeypatch.setattr(simulation.Work, "response_tokens", lambda self, rng, longest: 20)
    settings = SimpleNamespace(**vars(SETTINGS) | {"slots": 6})
    work = simulation.Work(turns=4)
    episodes, slots = simulation.play(small_model, settings, 1, work)
    turns = [(len(t.prompt_ids), len(t.response_ids)) for e in episodes for t in e.turns]
    assert [len(e.turns) for e in episodes] == [4] * 6 and {n for _, n in turns} == {20}
    # of 20 tokens the first is drawn by the prefill; 19 steps are two ticks of 16
    assert slots.steps == 4 * 2 * 16
    assert slots.read == sum(prompt + drawn for prompt, n in turns for drawn in range(1, n))
    new, first = 0, {}
    for episode in episodes:
        prompts = [len(turn.prompt_ids) for turn in episode.turns]
        assert first.setdefault(episode.group, prompts[0]) == prompts[0]
        new += sum(b - a - 19 for a, b in zip(prompts, prompts[1:]))      # the last token is not in the cache
    assert slots.prefilled == new + sum(first.values())
    last = sum(max(len(turn.prompt_ids) for turn in episode.turns) for episode in episodes)
    assert slots.usage[0] == last                       # of all rows, when the last turns begin


def test_rows_are_refilled_and_episodes_have_recorded_lengths(small_model):
    episodes, slots = simulation.play(small_model, SETTINGS, 1, simulation.Work(response=30.0), seed=1)
    recorded = simulation.Messages(simulation.Work()).recorded.episodes
    counts = {len(observations) for observations, _ in recorded}
    assert len(episodes) == 6 and all(len(e.turns) in counts | {6} for e in episodes)
    assert not any(e.overflowed or e.truncated for e in episodes)
    samples = simulation.samples_of(episodes, simulation.Work(judged=4, answers=2), random.Random(0), 64)
    kinds = [sample.kind for sample in samples]
    assert kinds.count("policy") == 6 and kinds.count("judge") == 8
    assert len(memory.questions_of(samples)) == 4


def test_simulated_episodes_have_only_their_groups_prompts_in_common(small_model):
    """Although all their responses may be as long."""
    work = simulation.Work(response=9.0, spread=0.0, turns=4)
    episodes, _ = simulation.play(small_model, SETTINGS, 1, work)
    samples = simulation.samples_of(episodes, simulation.Work(judged=0), random.Random(0), 64)
    prompts = [len(episode.turns[0].prompt_ids) for episode in episodes]
    shared = sum(prompts) - sum(dict(zip((episode.group for episode in episodes), prompts)).values())
    assert len(batching.PrefixTree(samples).ids) == sum(len(sample.ids) for sample in samples) - shared
    assert len(samples) == 6 and shared > 100


@pytest.mark.slow
def test_response_lengths_have_the_mean_that_is_asked_for():
    rng = random.Random(0)
    for mean, spread in ((150.0, 0.5), (32.0, 0.5), (12.0, 0.0), (150.0, None)):
        work = simulation.Work(response=mean, spread=spread)
        drawn = [work.response_tokens(rng, 10**6) for _ in range(20_000)]
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)
    assert {simulation.Work().response_tokens(rng, 3) for _ in range(50)} <= {1, 2}


def test_the_largest_microbatch_is_the_one_with_most_tokens():
    samples = [batching.Sample([i] * n, [False] + [True] * (n - 1), [0.0] * n, [0.0] * n, i)
               for i, n in enumerate((500, 2500, 700, 2000, 900))]
    batch, tokens = memory.largest_microbatch(samples, SETTINGS)
    assert [len(sample.ids) for sample in batch] == [2500]
    one, other = 500 + 700 + 900, 2500 + 2000                    # by episode, in turn
    assert tokens == [one, other]


@pytest.mark.slow
def test_seconds_are_a_roofline():
    """Of counts so chosen that one term is left at a time."""
    model = memory.meta_model(memory.shape("1.5B"), torch.bfloat16)
    P, head = memory.numbers(model.parameters()), 151936 * 1536         # tied: lm_head's is the embedding
    layers, machine = P - head, memory.Machine(1e12, 1e15, (0.5, 1.0), (0.1, 0.2), 0, 0)
    none = dict.fromkeys(("decode steps", "keys read", "prefilled", "prefills", "policy tokens", "pairs",
                          "scored tokens", "trained tokens", "questions", "judge steps",
                          "judge keys read"), 0)
    none["policy tokens"] = 1
    settings = SimpleNamespace(kl="none", lora=0, minibatches=4, checkpoint_activations="auto")

    def seconds(end, **counts):
        return memory.seconds(model, settings, none | {k.replace("_", " "): v for k, v in counts.items()},
                              machine, end)

    assert seconds(0, decode_steps=10)["rollout"] == pytest.approx(10 * 2 * P / 0.5e12)
    assert seconds(1, keys_read=1000)["rollout"] == pytest.approx(1000 * 28_672 / 1e12)
    assert seconds(1, prefilled=7)["rollout"] == pytest.approx(7 * 2 * layers / 0.2e15)
    assert seconds(0, policy_tokens=5, trained_tokens=10)["update"] == pytest.approx(4 * 20 * layers / 0.1e15)
    assert seconds(0, policy_tokens=5, trained_tokens=8)["score"] == pytest.approx(6 * 2 * layers / 0.1e15)
    scored = seconds(0, policy_tokens=5, trained_tokens=10, scored_tokens=3)["update"]
    assert scored == pytest.approx(4 * (20 * layers + 2 * 3 * head) / 0.1e15)
    judged = seconds(1, judge_steps=3, judge_keys_read=7, questions=1000)["judge"]
    assert judged == pytest.approx((3 * 2 * P + 7 * 28_672) / 1e12 + 2 * layers * 1000 / 0.2e15)
    machine = memory.Machine(math.inf, math.inf, (1, 1), (1, 1), 2e-6, 3e-4)
    timed = seconds(0, decode_steps=100, prefills=7, judge_steps=50)
    assert timed["rollout"] == pytest.approx(28 * (100 * 2e-6 + 7 * 3e-4))
    assert timed["judge"] == pytest.approx(28 * 50 * 2e-6) and timed["update"] == 0
    machine = memory.Machine(1e12, 1e15, (0.5, 1.0), (0.1, 0.2))
    pairs = seconds(0, policy_tokens=5, trained_tokens=5, pairs=100)["update"]
    assert pairs == pytest.approx(4 * (5 * 2 * layers + 100 * 4 * 28 * 1536) / 0.1e15)
    settings.checkpoint_activations = "off"                     # which leaves out the forward's repetition
    assert seconds(0, policy_tokens=5, trained_tokens=5, pairs=100)["update"] == pytest.approx(0.75 * pairs)


@pytest.mark.parametrize("name, of_layers, of_head", [("1.5B", 1_310_340_608, 233_373_696),
                                                      ("7B", 6_525_621_760, 544_997_376)])
def test_an_embedding_is_looked_up_and_lm_head_multiplied(name, of_layers, of_head):
    """Of 1.54 billion parameters, whose embedding is lm_head, and of 7.62, whose embedding is not."""
    model = memory.meta_model(memory.shape(name), torch.bfloat16)
    assert memory.multiplied_weights(model) == (of_layers, of_head)


def test_what_a_judge_reads_is_counted_by_batch_and_by_length():
    """Three questions, of two answers each; as many are sampled at once as `slots` allow."""
    samples = [batching.Sample([1] * 4, [False, True] * 2, [0.0] * 4, [0.0] * 4, 0)]
    for length, answers in ((10, (3, 20)), (11, (1, 5)), (12, (2, 2))):
        for n in answers:
            sampled = [False] * length + [True] * n
            samples.append(batching.Sample([length] * len(sampled), sampled, [0.0] * len(sampled), None, 0,
                                           "judge"))
    slots = SimpleNamespace(steps=0, read=0, prefilled=0, prefills=0)
    work = simulation.Work(answers=2)
    for of_slots, batches in ((64, 1), (2, 2)):
        settings = SimpleNamespace(**vars(SETTINGS) | {"slots": of_slots, "judge_response_tokens": 512})
        counts = memory.counts_of(samples, slots, work, settings)
        assert counts["judge steps"] == (32 if batches == 1 else 32 + 16) and counts["questions"] == 33
        shared = 32 * 33 if batches == 1 else 32 * (10 + 11) + 16 * 12
        assert counts["judge keys read"] == shared + (3 + 190 + 0 + 10 + 1 + 1)
    settings.judge_response_tokens = 20                                  # `begin` draws the first of them
    assert memory.counts_of(samples, slots, work, settings)["judge steps"] == 19 + 16


@pytest.mark.slow
def test_the_judges_peak_holds_its_own_keys(monkeypatch):
    model, settings = memory.meta_model(memory.shape("0.5B"), torch.bfloat16), SimpleNamespace(
        slots=16, judge_response_tokens=512)
    keys = 32 * 512 * 24 * 2 * 2 * 64                        # layers, keys and values, heads, size
    by_length = memory.judge_bytes(model, settings, [[1] * 300] * 4, 8)
    monkeypatch.setattr(attention, "varlen", lambda *_: None)
    assert 2 * keys < memory.judge_bytes(model, settings, [[1] * 300] * 4, 8) < 3 * keys
    assert 2 * keys < by_length < 3 * keys


def test_state_bytes_are_those_of_a_model_and_its_optimizer():
    model = torch.nn.Linear(300, 300)
    optimizer, n = torch.optim.AdamW(model.parameters()), sum(p.numel() for p in model.parameters())
    model(torch.zeros(1, 300)).sum().backward()
    optimizer.step()
    moments = sum(t.numel() for s in optimizer.state.values() for t in s.values() if t.dim())
    state = state_bytes(n, 1, torch.float32)
    assert state == {"master weights": 4 * n, "Adam's moments": 4 * moments, "gradients": 2 * 4 * n,
                     "sampler": 0}
    assert state_bytes(n, 1, torch.float32, trained=300) == {
        "master weights": 4 * n, "Adam's moments": 8 * 300, "gradients": 8 * 300, "sampler": 0}
    assert state_bytes(n, 1, torch.float32, trained=300, adapters=True) == {
        "master weights": 4 * (n + 300), "Adam's moments": 8 * 300, "gradients": 8 * 300, "sampler": 0}
    assert state_bytes(n, 1, torch.bfloat16, trained=300, adapters=True)["sampler"] == 2 * (n + 300)
    assert state_bytes(n, 1, torch.float32, copies=2)["sampler"] == 4 * n     # wrapped, so it needs a copy
    assert state_bytes(n, 1, torch.float32, compared=False)["gradients"] == 4 * n
    halves = state_bytes(n, 2, torch.bfloat16)
    assert halves == {"master weights": 2 * n, "Adam's moments": 2 * moments, "gradients": 4 * n,
                      "sampler": 2 * n}


def test_adapters_are_counted_as_an_update_with_them_allocates_them():
    """Moments and gradients of the adapters alone; nothing is allocated for the frozen weights."""
    model = decoder.Model(decoder.ModelConfig(50, 64, 128, 2, 4, 2, 16))
    before = memory.numbers(model.parameters())
    lora.add(model, 4, torch.Generator())
    adapters = memory.numbers(model.parameters()) - before
    assert adapters == 4 * 2 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128))
    optimizer = adamw(model)
    model(torch.arange(9)[None]).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    state = state_bytes(before, 1, torch.float32, memory.numbers(trained(model)), adapters=True)
    assert state["Adam's moments"] == 4 * memory.numbers(moments) == 8 * adapters
    assert state["gradients"] == 2 * 4 * memory.numbers(gradients)
    assert state["master weights"] == 4 * memory.numbers(model.parameters())


def test_a_model_that_does_not_fit_is_rejected_with_its_size(monkeypatch):
    card = SimpleNamespace(total_memory=24e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    def check(parameters, ranks, dtype, device=torch.device("cuda"), **more):
        state = state_bytes(int(parameters), ranks, dtype, **more)
        check_memory(state, int(parameters), ranks, dtype, device)

    with pytest.raises(ValueError, match=r"--dtype=float32: .* 1\.5 billion parameters take 30 GB on each of "
                                         r"1 ranks, which has 24; --dtype bfloat16, or more ranks, or --lora "
                                         "without a critic"):
        check(1.5e9, 1, torch.float32)
    check(1.5e9, 1, torch.float32, torch.device("cpu"))
    check(1.5e9, 2, torch.float32)
    check(1e9, 1, torch.bfloat16)
    check(1.5e9, 1, torch.float32, trained=int(2e7), adapters=True)
    with pytest.raises(ValueError, match="7.0 billion parameters take 28 GB .* bfloat16, or more ranks$"):
        check(7e9, 1, torch.float32, trained=int(2e7), adapters=True)


@pytest.mark.parametrize("flags, plays, times", [
    ("", False, 20), ("--dtype bfloat16", False, 22), ("--no-gcd", False, 16),
    ("--judge-weight 0", False, 16), ("--iterations 0", False, 16),
    ("--demonstrations 0 --iterations 0", False, 4),
    ("--demonstrations 0 --iterations 0 --dtype bfloat16", False, 6), ("--dtype bfloat16", True, 2)])
def test_what_is_not_trained_needs_no_memory_to_train(monkeypatch, flags, plays, times):
    """Bytes per parameter; the referee's model only plays. The others have fp32 weights, too."""
    folder = ROOT / "lab" / "results" / "alfworld_model"
    settings = config.parse(["--model", str(folder), "--max-turns", "30", *flags.split()])
    size = times * decoder.count_parameters(decoder.ModelConfig.load(folder))
    ranks = job.Ranks(0, 1, torch.device("cuda"))
    for memory_size, fits in ((size, True), (size - 1, False)):
        card = SimpleNamespace(total_memory=memory_size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
        with nullcontext() if fits else pytest.raises(ValueError, match="billion parameters take"):
            open_chat(settings, folder, ranks, plays)
