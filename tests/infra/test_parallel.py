"""Tests that one process and two compute the same numbers, and that no failed save loses a checkpoint.

    python -m pytest tests/infra/test_parallel.py

Two ranks are this file run over gloo (`main` below; tests/forked.py); one rank is a plain call of the same
functions. Oracles: torch's autograd and `clip_grad_norm_` on an unsharded model.
"""

import copy
import errno
import json
import os
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import algorithms
import batching
import update
from algorithms import nthr, ppo, rewards
from batching import Sample
from envs import Task
from infra import checkpoint, job, parallel, streams
from lm import lora
from lm import model as decoder
from lm.optim import Muon, adamw
from rollout import Episode, Turn
from update import Objective

ROOT = Path(__file__).resolve().parents[2]
SHAPE = decoder.ModelConfig(vocab_size=67, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                            tie_word_embeddings=True)
SINGLE = job.Ranks(0, 1, torch.device("cpu"))
JUDGE_SCALE = 0.25
MATRIX = "model.layers.1.mlp.down_proj.weight"
ADAPTER = MATRIX.replace("weight", "lora_A")


def new_model(seed=0, shape=SHAPE):
    model = decoder.Model(shape)
    decoder.init_weights(model, seed)
    return model


def sequences(name):
    """Eight sequences of 12 ids."""
    return torch.randint(SHAPE.vocab_size, (8, 12), generator=torch.Generator().manual_seed(name))


def nll_sum(model, ids_BT):
    logits_BTV = model(ids_BT[:, :-1]).float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum")


def loss_and_grads(model, ranks, name):
    """The mean loss over all ranks' tokens, and its gradient; this rank's sequences go two at a time."""
    own_BT = sequences(name)[ranks.rank::ranks.world_size]
    tokens = parallel.all_sum(own_BT[:, 1:].numel())
    total = 0.0
    for ids_BT in own_BT.split(2):
        loss = nll_sum(model, ids_BT) / tokens
        loss.backward()
        total += loss.item()
    return parallel.all_sum(total), parallel.pop_grads(model)


def train_step(model, optimizer, ranks, name):
    """One optimizer step on the sum of two gradients; returns metrics as a run would log them."""
    loss, policy = loss_and_grads(model, ranks, name)
    _, judge = loss_and_grads(model, ranks, name + 1000)
    norm, product = parallel.norm(policy), parallel.dot(policy, judge)
    parallel.set_grads(model, [(1.0, policy), (JUDGE_SCALE, judge)])
    total = parallel.norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "norm": norm, "dot": product, "total_norm": total}


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def save(folder, model, optimizer, state):
    checkpoint.save_checkpoint(folder, model, optimizer, state, decoder.save_pretrained)


def sampler_of(model, dtype=torch.float32):
    return parallel.unsharded_copy(model, lambda: decoder.Model(model.config), dtype)


def train_and_save(ranks, out):
    """Two steps with an uneven rollout between them, a checkpoint, a third step and a second checkpoint."""
    model = parallel.shard(new_model(seed=ranks.rank), ranks)    # all ranks must get rank 0's weights
    optimizer = new_optimizer(model)
    logged = [train_step(model, optimizer, ranks, name=1)]
    sampler = sampler_of(model)
    parallel.copy_weights(model, sampler)
    for _ in range(3 - 3 * ranks.rank):        # not once on rank 1
        logits = sampler(sequences(5)).detach()
    parallel.on_rank0(lambda: torch.save(logits, out / "logits.pt"))
    logged.append(train_step(model, optimizer, ranks, name=2))
    save(out / "two", model, optimizer, {"step": 2, "rng": torch.arange(3)})
    logged.append(train_step(model, optimizer, ranks, name=3))
    save(out / "three", model, optimizer, {"step": 3})
    parallel.on_rank0(lambda: (out / "logged.json").write_text(json.dumps(logged)))


def resume(ranks, source, out):
    """Load a checkpoint of any number of ranks, save it again unchanged, then take the third step."""
    folder = checkpoint.find_checkpoint(source / "two")
    model = parallel.shard(decoder.open_pretrained(folder), ranks)
    decoder.load_weights(model, folder)
    optimizer = new_optimizer(model)
    state = checkpoint.load_trainer(source / "two", model, optimizer)
    assert state["step"] == 2 and state["rng"].tolist() == [0, 1, 2], state
    save(out / "two_again", model, optimizer, state)
    train_step(model, optimizer, ranks, name=3)
    save(out / "three_resumed", model, optimizer, {"step": 3})


def step_by_muon(ranks, out):
    """Take two steps of Muon on a sharded model, and save the resulting full weights."""
    model = parallel.shard(new_model(), ranks)
    optimizer = Muon(model)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for name in (1, 2):
        train_step(model, optimizer, ranks, name)
    weights = parallel.full_weights(model)
    parallel.on_rank0(lambda: torch.save(weights, out / "muon.pt"))


def train_adapters(ranks, out):
    """A step with AdamW and one with Muon on adapters of a sharded model, which are merged in between.

    Saves the full weights at each moment, and the sampler's (of several ranks, in bf16): before and after the
    merge, and at the end.
    """
    model = new_model()
    lora.add(model, 4, torch.Generator().manual_seed(ranks.rank))          # all ranks must get rank 0's
    model = parallel.shard(model, ranks)
    found = []

    def with_adapters():
        copied = decoder.Model(SHAPE)
        lora.add(copied, 4, torch.Generator())
        return copied

    sampler = parallel.unsharded_copy(model, with_adapters, torch.bfloat16)

    def record():
        parallel.copy_weights(model, sampler)
        found.append((parallel.full_weights(model), {**sampler.state_dict()}))
        found[-1] = copy.deepcopy(found[-1])

    for name, make in ((1, adamw), (2, Muon)):
        optimizer = make(model)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2
        train_step(model, optimizer, ranks, name)
        train_step(model, optimizer, ranks, name)
        record()
        if make is adamw:
            with lora.disabled(model), torch.no_grad():
                model(sequences(3))                    # as the KL reference does; the root stays gathered
            lora.merge(model, torch.Generator().manual_seed(7))
            record()
    parallel.on_rank0(lambda: torch.save(found, out / "adapters.pt"))


def full_disk(model, folder):
    """Fails on all ranks; none goes on, and clears the folder, before all have written."""
    def write():
        (folder / "model.safetensors").write_bytes(b"half a fi")
        raise OSError(errno.ENOSPC, "No space left on device")

    parallel.collective(write)


def reductions_and_failure(ranks, out):
    """Call every reduction, and let actions and a save fail; each rank writes its results to a file."""
    own = {"both": 1.5 + ranks.rank, f"only{ranks.rank}": 1}
    saw = {"sum": parallel.all_sum(10**17 + ranks.rank), "dict": parallel.all_sum(own),
           "tensor": parallel.all_sum(torch.tensor([1.0, ranks.rank])).tolist(),
           "max": parallel.all_max(ranks.rank - 5),
           "any": parallel.any_rank(ranks.rank == 1), "none": parallel.any_rank(False),
           "path": parallel.on_rank0(lambda: f"rank {ranks.rank}"),
           "stream": streams.stream(7, ranks.rank)}

    def fails_on_rank1():
        if ranks.rank == 1:
            raise OSError(errno.ENOSPC, "the cache is full")

    def refused_by_rank1():
        if ranks.rank == 1:
            raise UnicodeError("not a name")                      # a ValueError

    for name, action, kind in (("collective", fails_on_rank1, OSError),
                               ("refused", refused_by_rank1, ValueError)):
        try:
            parallel.collective(action)
        except kind as error:
            saw[name] = str(error)
    model = parallel.shard(new_model(), ranks)
    try:
        checkpoint.save_checkpoint(out / "two", model, new_optimizer(model), {}, full_disk)
    except OSError as error:
        saw["error"] = str(error)
    (out / f"saw{ranks.rank}.json").write_text(json.dumps(saw))


# With a value head: the judge as a classifier, PPO's critic, NTHR. What they compute is tested with their own
# files; here, that ranks agree, even if one of them has hardly any samples.

HEADED = replace(SHAPE, tie_word_embeddings=False, value_head=True)    # the critic's lm_head has no gradient
OBJECTIVE = Objective(microbatch_tokens=40, judge_weight=0.5)
WON = {index: index in (0, 2, 3) for index in range(8)}
GROUP = {index: index // 3 for index in WON}          # two of three won, one of three, none of two


def with_optimizer(model, ranks):
    model = parallel.shard(model, ranks)
    return model, new_optimizer(model)


def random_episodes(rng):
    """Episodes of one or two conversations, each of a few turns, over a vocabulary of 9 tokens."""
    def tokens(low, high):
        return [rng.randrange(9) for _ in range(rng.randint(low, high))]

    episodes = []
    for index, won in WON.items():
        turns = []
        for _ in range(1 + index % 2):
            text = []
            for _ in range(rng.randint(1, 3)):
                prompt, response = text + tokens(2, 4), tokens(1, 4)
                valid, logprob = rng.random() < 0.6, [0.0] * len(response)
                turns.append(Turn("", prompt, response, logprob, "", "look", valid, anchor=""))
                text = prompt + response
        episodes.append(Episode(Task("", "", "", None), GROUP[index], index, turns, won))
    return episodes


def labelled_turns(rng):
    return [Sample([rng.randrange(9) for _ in range(n)], [False] * n, [0.0] * n, None, n, "judge",
                   label=float(n % 2)) for n in range(4, 14)]


def headed_step(actor, critic, ranks, name):
    """One step of actor and critic. Rank 1 of two has only the group in which all episodes failed.

    Judged turns: none in step 1, all on rank 0 in step 2, one on rank 1 in step 3.
    """
    rng = random.Random(name)
    episodes, turns = random_episodes(rng), labelled_turns(rng)
    if ranks.world_size == 2:
        episodes = [e for e in episodes if (e.group == 2) == (ranks.rank == 1)]
    on_1 = {1: 0, 2: 0, 3: 1}[name] if ranks.world_size == 2 else 0
    turns = [] if name == 1 else turns[:on_1] if ranks.rank == 1 else turns[on_1:]
    metrics = critics_step(critic, copy.deepcopy(episodes), ranks)
    weakened = nthr.Method(nthr.Settings(nthr_beta=0.5))
    weakened.begin(actor[0], OBJECTIVE, 1, None)
    rewards.write_rewards(episodes, weakened.settings)
    metrics |= weakened.assign(episodes)
    samples = [sample for episode in episodes for sample in batching.samples_of(episode)]
    metrics |= {"good": parallel.all_sum(sum(update.value_head_probabilities(actor[0], turns, OBJECTIVE)))}
    update.rescore(actor[0], samples, OBJECTIVE)
    stepped = update.update(*actor, samples + turns, replace(OBJECTIVE, value_judge=True), lr=1e-3)
    return metrics | {key: value for key, value in stepped.items() if "logprob_gap" not in key}    # rounding


def critics_step(critic, episodes, ranks):
    """PPO's advantages from its critic, whitened over all ranks, and a step of the critic."""
    method = ppo.Method(ppo.Settings(variant="code", critic_lr=1e-3))
    method.begin(critic[0], OBJECTIVE, 1, lambda model: parallel.shard(model, ranks))   # makes a new critic
    method.critic = critic
    metrics = method.assign(episodes)
    squares = [a * a for e in episodes for turn in e.turns for a in turn.token_advantage]
    return metrics | {"squares": parallel.all_sum(sum(squares)) / parallel.all_sum(len(squares))}


def save_headed(folder, actor, critic):
    checkpoint.save_checkpoint(folder, *actor, {"step": 1}, decoder.save_pretrained, critic=critic)


def train_with_value_heads(ranks, out):
    """One step, a checkpoint, two more steps; then these two again from the checkpoint."""
    actor = with_optimizer(new_model(1, HEADED), ranks)
    critic = ppo.new_critic(actor[0], lambda model: parallel.shard(model, ranks))
    logged = [headed_step(actor, critic, ranks, name=1)]
    save_headed(out / "headed_one", actor, critic)
    logged += [headed_step(actor, critic, ranks, name) for name in (2, 3)]
    save_headed(out / "headed_three", actor, critic)
    actor = with_optimizer(decoder.load_pretrained(out / "headed_one"), ranks)
    critic = with_optimizer(new_model(3, HEADED), ranks)    # must get the saved weights
    assert checkpoint.load_trainer(out / "headed_one", *actor, critic=critic) == {"step": 1}
    logged += [headed_step(actor, critic, ranks, name) for name in (2, 3)]
    save_headed(out / "headed_three_resumed", actor, critic)
    parallel.on_rank0(lambda: (out / "headed.json").write_text(json.dumps(logged)))


def main(out, source):
    """What torchrun runs on each of two ranks."""
    torch.set_num_threads(1)
    ranks = job.setup("cpu", timeout_s=120)
    train_and_save(ranks, out)
    step_by_muon(ranks, out)
    train_adapters(ranks, out)
    resume(ranks, source, out)
    train_with_value_heads(ranks, out)
    reductions_and_failure(ranks, out)
    parallel.print0("done")
    job.shutdown()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run on one rank."""
    out = tmp_path_factory.mktemp("one")
    train_and_save(SINGLE, out)
    step_by_muon(SINGLE, out)
    train_adapters(SINGLE, out)
    train_with_value_heads(SINGLE, out)
    return out


@pytest.fixture(scope="module")
def two(one, tmp_path_factory):
    """The folder of the same run on two ranks, which also resumed `one`. Fails if a rank hangs."""
    out = tmp_path_factory.mktemp("two")
    done = forked.run([__file__, out, one], os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                      out, ranks=2)
    assert done.returncode == 0, done.text[-4000:]
    assert done.text.count("done") == 1, done.text
    return out


def whole_trainer(folder):
    """The content of trainer.pt, with what each rank wrote put together by torch's own converter."""
    trainer, parts = torch.load(folder / checkpoint.TRAINER_FILE, weights_only=True), {}
    if (folder / checkpoint.PARTS).exists():
        dcp_to_torch_save(folder / checkpoint.PARTS, folder / "whole.pt")
        parts = torch.load(folder / "whole.pt", weights_only=True)

    def filled(tree, path):
        if isinstance(tree, dict):
            return {key: filled(value, f"{path}/{key}".strip("/")) for key, value in tree.items()}
        is_part = isinstance(tree, torch.Tensor) and tree.is_meta
        assert not is_part or parts[path].shape == tree.shape, path
        return parts[path] if is_part else tree

    return filled(trainer, "")


def trainer_of(folder):
    """Moments and step counts by parameter name, and the settings of the only parameter group."""
    optimizer = whole_trainer(folder)["optimizer"]
    return optimizer["state"], json.dumps(optimizer["param_groups"])    # betas are loaded as a list


def weights_of(folder):
    return {name: tensor.detach() for name, tensor in decoder.load_pretrained(folder).named_parameters()}


def assert_same_checkpoint(a, b, **tolerance):
    """Weights and optimizer state are equal, bit for bit unless a tolerance is given."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(weights_of(a), weights_of(b), **tolerance)
    (state_a, groups_a), (state_b, groups_b) = trainer_of(a), trainer_of(b)
    assert len(state_a) == len(weights_of(a)) and groups_a == groups_b
    torch.testing.assert_close(state_a, state_b, **tolerance)


@pytest.mark.slow
def test_one_rank_is_plain_autograd(one):
    model = new_model()
    nll_sum(model, sequences(1001)).div(88).backward()
    judge = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = nll_sum(model, sequences(1)) / 88
    loss.backward()
    product = sum((p.grad * g).sum() for p, g in zip(model.parameters(), judge, strict=True)).item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    for parameter, grad in zip(model.parameters(), judge, strict=True):
        parameter.grad += JUDGE_SCALE * grad
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()
    logged = json.loads((one / "logged.json").read_text())[0]
    expected = {"loss": loss.item(), "norm": norm, "dot": product, "total_norm": total}
    assert logged == pytest.approx(expected, rel=1e-5, abs=1e-7)    # the product is near 0


@pytest.mark.slow
def test_two_ranks_log_what_one_does(one, two):
    for a, b in zip(*(json.loads((out / "logged.json").read_text()) for out in (one, two)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)    # the gradients become almost orthogonal


@pytest.mark.slow
def test_two_ranks_reach_the_weights_and_moments_of_one(one, two):
    # Adam divides by the root of the second moment: it amplifies the rounding of tiny gradients
    assert_same_checkpoint(one / "three", two / "three", rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_muon_takes_the_same_steps_on_two_ranks(one, two):
    """Muon computes in bf16: a step is at most 1e-3 * .2 * sqrt(96), and each rounding 2^-8 of it."""
    weights = [torch.load(out / "muon.pt") for out in (one, two)]
    torch.testing.assert_close(*weights, rtol=0, atol=2 * 4 * 2**-8 * 2e-3)
    assert max((new_model().state_dict()[name] - w).abs().max() for name, w in weights[1].items()) > 1e-3


@pytest.mark.slow
def test_adapters_are_trained_and_merged_on_two_ranks_as_on_one(one, two):
    """Muon's tolerance is that of the test above, of the adapters alone: a product of two has another. Frozen
    weights are the same bits everywhere.
    """
    plain, (ours, theirs) = new_model().state_dict(), (torch.load(out / "adapters.pt") for out in (one, two))
    for moments in (ours, theirs):
        (after_adam, sampled), (merged, sampled_again), (after_muon, sampled_last) = moments
        assert all(torch.equal(after_adam[name], weight) for name, weight in plain.items())
        as_one = dict(lora.merged(after_adam))
        assert as_one.keys() == plain.keys() and not torch.equal(as_one[MATRIX], plain[MATRIX])
        for name, weight in as_one.items():
            assert torch.equal(weight, merged[name]) and torch.equal(weight, after_muon[name])
        for weights, played in ((after_adam, sampled), (merged, sampled_again), (after_muon, sampled_last)):
            dtype = played[MATRIX].dtype
            assert weights.keys() == played.keys() and ADAPTER in played     # not merged, each rounded alone
            assert all(torch.equal(weight.to(dtype), played[name]) for name, weight in weights.items())
    assert theirs[0][1][MATRIX].dtype == torch.bfloat16
    for i, tolerance in ((0, 2e-4), (1, 2e-4), (2, 2 * 4 * 2**-8 * 2e-2)):
        torch.testing.assert_close(ours[i][0], theirs[i][0], rtol=1e-4, atol=tolerance)
    assert (ours[2][0][ADAPTER] - ours[1][0][ADAPTER]).abs().max() > 1e-2


@pytest.mark.slow
def test_unequal_numbers_of_forwards_of_an_unsharded_copy_have_the_same_weights(one, two):
    """If they hung, `two` would fail by its time limit."""
    logits = [torch.load(out / "logits.pt") for out in (one, two)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_rank_loads_on_two(one, two):
    assert_same_checkpoint(one / "two", two / "two_again")
    assert_same_checkpoint(one / "three", two / "three_resumed", rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_loads_on_one(two, tmp_path):
    resume(SINGLE, two, tmp_path)
    assert_same_checkpoint(two / "two", tmp_path / "two_again")
    assert_same_checkpoint(two / "three", tmp_path / "three_resumed", rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_reductions_and_errors_over_two_ranks(two):
    saw = [json.loads((two / f"saw{rank}.json").read_text()) for rank in (0, 1)]
    assert [s.pop("stream") for s in saw] == [streams.stream(7, 0), streams.stream(7, 1)]
    for s in saw:
        assert "two" in s["error"] and "No space left on device" in s.pop("error")
        assert "the cache is full" in s.pop("collective") and "not a name" in s.pop("refused")
    assert saw[0] == saw[1] == {"sum": 2 * 10**17 + 1, "dict": {"both": 4.0, "only0": 1, "only1": 1},
                                "tensor": [2.0, 1.0], "max": -4, "any": True, "none": False, "path": "rank 0"}


@pytest.mark.slow
def test_resuming_at_the_same_number_of_ranks_is_exact(one, tmp_path):
    resume(SINGLE, one, tmp_path)
    assert_same_checkpoint(one / "two", tmp_path / "two_again")
    assert_same_checkpoint(one / "three", tmp_path / "three_resumed")


def critic_of(folder):
    """A checkpoint's critic: its weights, and the optimizer's moments by parameter name."""
    critic = whole_trainer(folder)["critic"]
    return dict(critic["weights"]), critic["optimizer"]["state"]


@pytest.mark.slow
def test_two_ranks_with_value_heads_log_what_one_does(one, two):
    """Classifier, critic, NTHR; rank 1 has at most one judged turn, and no group with unequal rewards."""
    single, double = (json.loads((out / "headed.json").read_text()) for out in (one, two))
    for a, b in zip(single, double, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True)
    assert 0 < single[0]["nthr/weakened_frac"] < 1
    assert [row["squares"] for row in single] == pytest.approx([1.0] * 5, rel=1e-4)    # whitened
    assert [row["judge/tokens"] for row in single] == [0, 10, 10, 10, 10]


@pytest.mark.slow
def test_two_ranks_reach_the_critic_of_one(one, two):
    done = [out / "headed_three" for out in (one, two)]
    torch.testing.assert_close(*map(critic_of, done), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(*map(weights_of, done), rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("out", ["one", "two"])
def test_resuming_with_a_critic_is_exact(out, request):
    """Bit for bit. A value head before its first judged turn and the critic's lm_head have no moments."""
    out = request.getfixturevalue(out)
    logged = json.loads((out / "headed.json").read_text())
    for straight, resumed in zip(logged[1:3], logged[3:], strict=True):
        assert straight == pytest.approx(resumed, rel=0, abs=0, nan_ok=True)
    done, resumed = out / "headed_three", out / "headed_three_resumed"
    torch.testing.assert_close(critic_of(done), critic_of(resumed), rtol=0, atol=0)
    torch.testing.assert_close(weights_of(done), weights_of(resumed), rtol=0, atol=0)
    torch.testing.assert_close(trainer_of(done)[0], trainer_of(resumed)[0], rtol=0, atol=0)
    assert "value_head.weight" not in trainer_of(out / "headed_one")[0]
    assert "value_head.weight" in trainer_of(done)[0] and "lm_head.weight" not in critic_of(done)[1]


@pytest.mark.slow
def test_a_missing_or_different_critic_is_named(one):
    plain, headed = (with_optimizer(new_model(0, shape), SINGLE) for shape in (SHAPE, HEADED))
    with pytest.raises(ValueError, match="trainer.pt: no critic: saved by a run without one"):
        checkpoint.load_trainer(one / "two", *plain, critic=headed)
    with pytest.raises(ValueError, match="the critic's lm_head.weight differs: saved from another model"):
        checkpoint.load_trainer(one / "headed_one", *headed, critic=plain)
    assert checkpoint.load_trainer(one / "headed_one", *headed) == {"step": 1}    # not loading it is allowed


@pytest.mark.slow
def test_saving_before_the_first_step_does_not_count_as_one(tmp_path):
    """torch's own saving takes a step on zeros, and then AdamW's first real step is only 0.74 as large."""
    straight, saved, loaded = (with_optimizer(new_model(), SINGLE) for _ in range(3))
    save(tmp_path / "fresh", *saved, {})
    checkpoint.load_trainer(tmp_path / "fresh", *loaded)
    for pair in (straight, saved, loaded):
        train_step(*pair, SINGLE, name=1)
    weights = [model.state_dict() for model, _ in (straight, saved, loaded)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]) and torch.equal(weight, weights[2][name]), name


def test_damaged_weights_of_one_rank_are_named(tmp_path):
    """They would load as other weights."""
    folder = tmp_path / "saved"
    save(folder, *with_optimizer(new_model(), SINGLE), {})
    checkpoint.check_whole(folder)
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-8:] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: not the file that this checkpoint was saved with"):
        checkpoint.check_whole(folder)


def test_a_fingerprint_tells_files_of_other_lengths_and_of_other_last_blocks_apart(tmp_path, monkeypatch):
    """Also of a file that is larger than what is read of it."""
    monkeypatch.setattr(checkpoint, "BLOCKS", 4)
    monkeypatch.setattr(checkpoint, "BLOCK", 8)

    def fingerprint(content):
        (tmp_path / "file").write_bytes(content)
        return checkpoint.fingerprint(tmp_path / "file")

    contents = bytes(64), bytes(65), bytes(48) + b"x" + bytes(15)
    assert len({fingerprint(content) for content in contents}) == len(contents)


@pytest.mark.parametrize("missing", ["model.safetensors", checkpoint.TRAINER_FILE])
def test_a_broken_checkpoint_takes_the_place_of_an_earlier_broken_one(tmp_path, missing):
    """And a new one whose save was cut short goes, which could be taken for complete."""
    folder, pair = tmp_path / "checkpoint", with_optimizer(new_model(), SINGLE)
    for name in ("checkpoint", "checkpoint.old", "checkpoint.broken", "checkpoint.writing"):
        save(tmp_path / name, *pair, {"saved as": name})
    (folder / missing).unlink()
    assert checkpoint.find_checkpoint(folder) == folder
    checkpoint.check_whole(folder)
    states = {path.name: checkpoint.read_trainer(path)["state"]["saved as"]
              for path in tmp_path.iterdir() if (path / checkpoint.TRAINER_FILE).exists()}
    broken = {} if missing == checkpoint.TRAINER_FILE else {"checkpoint.broken": "checkpoint"}
    assert states == {"checkpoint": "checkpoint.old"} | broken and (tmp_path / "checkpoint.broken").is_dir()
    assert not (tmp_path / "checkpoint.writing").exists()


@pytest.mark.slow
def test_an_optimizer_of_another_model_is_named(one):
    with pytest.raises(ValueError, match="no optimizer state for lm_head.weight: saved from another model"):
        checkpoint.load_trainer(one / "two", *with_optimizer(new_model(0, HEADED), SINGLE))


@pytest.mark.slow
def test_bf16_keeps_fp32_masters_on_one_rank():
    """A step of 1e-4 is lost in bf16 weights of size 1, not in fp32 ones."""
    try:
        model = parallel.shard(new_model(), SINGLE, torch.bfloat16)
        sampler = sampler_of(model, torch.bfloat16)
        with torch.no_grad():
            model(sequences(1))                      # no backward follows, so FSDP's root stays gathered
        parallel.copy_weights(model, sampler)
        assert next(sampler.parameters()).dtype == sampler(sequences(1)).dtype == torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        loss, grads = loss_and_grads(model, SINGLE, 1)
        plain_loss, plain_grads = loss_and_grads(new_model(), SINGLE, 1)
        assert loss == pytest.approx(plain_loss, rel=2**-8)                # one rounding of bf16
        assert parallel.norm(grads) == pytest.approx(parallel.norm(plain_grads), rel=2e-2)
        parallel.set_grads(model, [(1.0, grads)])
        torch.optim.SGD(model.parameters(), lr=1e-4).step()
        moved = parallel.full_weights(model)["model.norm.weight"] - 1
        torch.testing.assert_close(moved, -1e-4 * plain_grads[-1], rtol=0.1, atol=1e-6)
        state = {"average": [p.detach().clone() for p in model.parameters()]}
        assert "state['average'][0] is this rank's part of a tensor" in algorithms.wrong_state(state)
        assert not algorithms.wrong_state({"average": [*map(parallel.full_tensor, state["average"])]})
    finally:
        job.shutdown()


def test_onloaded_moves_a_model_and_all_of_its_optimizer_state():
    """To the meta device, which stores no values, so moving back raises an error."""
    model, used = new_model(), new_model().to("meta")
    optimizer, n = adamw(model), len([*model.parameters()])
    nudge(model, optimizer)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        with parallel.onloaded(used, model, optimizer):
            pass
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(moments) == 3 * n
    assert {tensor.device.type for tensor in (*moments, *model.parameters())} == {"meta"}


@pytest.mark.slow
def test_an_error_in_a_block_of_onloaded_is_the_one_that_is_raised():
    """FSDP cannot move a model whose forward broke off with gathered weights."""
    try:
        model = parallel.shard(new_model(), SINGLE, torch.bfloat16)
        model.model.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError, match="full"), parallel.onloaded(new_model(), model):
            model(torch.zeros(1, 3, dtype=torch.long))
    finally:
        job.shutdown()


@pytest.mark.slow
def test_a_sharded_model_can_be_trained_after_it_was_moved():
    """By a change of dtype and back, which FSDP handles like a change of device."""
    try:
        model = parallel.shard(new_model(), SINGLE, torch.bfloat16)
        optimizer, parameters = adamw(model), [*model.parameters()]
        nudge(model, optimizer)
        before = parallel.full_weights(model)
        model.to(torch.float64)
        assert {p.dtype for p in parameters} == {torch.float64}          # the same parameter objects
        model.to(torch.float32)
        parallel.offload(model, optimizer)
        torch.testing.assert_close(parallel.full_weights(model), before, rtol=0, atol=0)
        nudge(model, optimizer)
        after = parallel.full_weights(model)
        assert all(not torch.equal(weight, after[name]) for name, weight in before.items())
    finally:
        job.shutdown()


def nudge(model, optimizer):
    """Take an optimizer step on some loss."""
    model(torch.arange(8)[None]).float().square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["save_model", "extra_files", "rename"])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, failing):
    model = new_model()
    optimizer = new_optimizer(model)
    train_step(model, optimizer, SINGLE, name=1)
    folder = tmp_path / "checkpoint"
    save(folder, model, optimizer, {"step": 1})
    before = weights_of(folder)
    train_step(model, optimizer, SINGLE, name=2)

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "rename":
        monkeypatch.setattr(checkpoint, "swap", fail)
    with pytest.raises(OSError, match="checkpoint .* not saved.*No space left"):
        checkpoint.save_checkpoint(folder, model, optimizer, {"step": 2},
                                   full_disk if failing == "save_model" else decoder.save_pretrained,
                                   fail if failing == "extra_files" else None)
    assert checkpoint.find_checkpoint(folder) == folder
    assert checkpoint.load_trainer(folder, model, optimizer) == {"step": 1}
    torch.testing.assert_close(weights_of(folder), before, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]    # no leftovers


def test_a_failed_first_save_leaves_nothing_on_the_full_disk(tmp_path):
    with pytest.raises(OSError, match="first not saved.*No space left"):
        checkpoint.replace(tmp_path / "first", lambda new: full_disk(None, new))
    assert not [*tmp_path.iterdir()]


def test_an_error_of_torchs_distributed_checkpoint_is_an_os_error_of_the_first_rank(tmp_path):
    with pytest.raises(OSError, match=r"parts: rank 1: OSError: .*No space left"):
        with checkpoint.one_error(tmp_path / "parts"):
            error = OSError(errno.ENOSPC, "No space left on device")
            raise dcp.CheckpointException("save", {3: (ValueError("other"), None), 1: (error, None)})


@pytest.mark.parametrize("renames, error", [
    (0, KeyboardInterrupt), (1, KeyboardInterrupt), (2, KeyboardInterrupt), (1, OSError)])
def test_a_crash_between_the_renames_loses_nothing(tmp_path, monkeypatch, renames, error):
    """KeyboardInterrupt at the next rename stands in for a kill, which runs no `except Exception` either."""
    model = new_model()
    optimizer = new_optimizer(model)
    folder = tmp_path / "checkpoint"
    save(folder, model, optimizer, {"step": 1})
    renamed, rename = [], Path.rename

    def rename_or_die(path, target):
        if len(renamed) == renames:
            raise error
        renamed.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(Path, "rename", rename_or_die)
        save(folder, model, optimizer, {"step": 2})
        raise error
    assert checkpoint.find_checkpoint(folder) == folder
    assert checkpoint.load_trainer(folder, model, optimizer)["step"] == (1 if renames == 0 else 2)
    save(folder, model, optimizer, {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_save_that_was_cut_short_does_not_take_the_place_of_the_old_checkpoint(tmp_path):
    for name, file in (("checkpoint.old", checkpoint.TRAINER_FILE), ("checkpoint.writing", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(name)
    folder = checkpoint.find_checkpoint(tmp_path / "checkpoint")
    assert (folder / checkpoint.TRAINER_FILE).read_text() == "checkpoint.old"


def test_all_that_was_written_is_synced_before_its_folder_is_renamed(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint, "sync", lambda *paths: synced.append({path.name for path in paths}))

    def write(new):
        (new / "trainer").mkdir()
        (new / "trainer" / "part").write_text("")

    checkpoint.replace(tmp_path / "checkpoint", write)
    assert synced == [{"part", "trainer", "checkpoint.writing"}, {tmp_path.name}]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_prevent_a_save(tmp_path, monkeypatch):
    """NFS keeps a file in it that another process has open."""
    folder, remove = tmp_path / "checkpoint", shutil.rmtree
    for name, text in (("checkpoint", "two"), ("checkpoint.old", "one")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: (
        path.name == "checkpoint.old" or remove(path, **more)))
    checkpoint.replace(folder, lambda new: (new / "file").write_text("three"))
    assert (folder / "file").read_text() == "three"
    assert sorted(path.read_text() for path in tmp_path.glob("checkpoint.old*/file")) == ["one", "two"]


def test_saving_never_deletes_what_is_not_a_checkpoint(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    model = new_model()
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ValueError, match="not a checkpoint"):
            save(path, model, new_optimizer(model), {})
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_loading_a_folder_that_is_not_a_checkpoint_names_it(tmp_path):
    model = new_model()
    assert checkpoint.find_checkpoint(tmp_path / "absent") is None
    with pytest.raises(ValueError, match="trainer.pt: not found"):
        checkpoint.load_trainer(tmp_path, model, new_optimizer(model))
    (tmp_path / checkpoint.TRAINER_FILE).write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match="trainer.pt: not a trainer state"):
        checkpoint.load_trainer(tmp_path, model, new_optimizer(model))
    torch.save({"optimizer": {"state": {}, "param_groups": []}, "state": {"where": tmp_path}},
               tmp_path / checkpoint.TRAINER_FILE)                # an object of any class could run any code
    with pytest.raises(ValueError, match="trainer.pt: not a trainer state: UnpicklingError"):
        checkpoint.load_trainer(tmp_path, model, new_optimizer(model))
    empty = {"optimizer": {"state": {}, "param_groups": []}, "state": {}}
    for files, error in (({}, ""), ([], "AttributeError"), ({"config.json": torch.zeros(3)}, "TypeError")):
        torch.save(empty | {"files": files}, tmp_path / checkpoint.TRAINER_FILE)
        assert (f"not a trainer state: {error}" if error else "") in checkpoint.what_is_wrong(tmp_path)
        assert bool(error) == bool(checkpoint.what_is_wrong(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name, value", [("weight_decay", None), ("betas", None), ("betas", (0.9,)),
                                         ("betas", (0.9, "x")), ("lr", "x"), ("lr", [1.0]), ("eps", {})])
def test_a_setting_of_an_optimizer_that_no_run_saved_is_named(tmp_path, name, value):
    """Otherwise it would fail in the first step, after an iteration was played."""
    model = new_model()
    optimizer = new_optimizer(model)
    train_step(model, optimizer, SINGLE, name=1)
    optimizer.param_groups[0][name] = value
    save(tmp_path / "checkpoint", model, optimizer, {"step": 1})
    with pytest.raises(ValueError, match=rf"no state of this optimizer: ValueError: its {name} is"):
        checkpoint.load_trainer(tmp_path / "checkpoint", model, new_optimizer(model))


def test_a_parameter_without_gradient_counts_as_zero():
    model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(1), torch.zeros(1)])
    a, b = [torch.tensor([3.0, 4.0]), None, None], [torch.tensor([1.0, 2.0]), torch.tensor([5.0]), None]
    assert (parallel.dot(a, b), parallel.norm(a), parallel.norm([None])) == (11.0, 5.0, 0.0)
    parallel.set_grads(model, [(2.0, a), (-1.0, b)])
    assert [p.grad if p.grad is None else p.grad.tolist() for p in model] == [[5.0, 6.0], [-5.0], None]
    assert a == b == [None, None, None]                  # overwritten: no third set of gradients
    assert parallel.pop_grads(model)[1].tolist() == [-5.0]
    assert all(p.grad is None for p in model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
