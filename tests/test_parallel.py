"""Proves that one process and two give the same numbers, and that no failed save loses a checkpoint.

    python -m pytest tests/test_parallel.py

Two ranks are this same file run by torchrun over gloo (`main` below); one rank is a plain call of the same
functions. Oracles: torch's autograd and `clip_grad_norm_` on a plain model, splitmix64's published output.
"""

import copy
import errno
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import update
from algorithms import nthr, ppo, rewards
from envs import Task
from lm import model as qwen
from rollout import Episode, Turn
from run import parallel
from update import Objective, Sample

ROOT = Path(__file__).resolve().parents[1]
SHAPE = qwen.ModelConfig(vocab_size=67, hidden_size=32, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
ALONE = parallel.Ranks(0, 1, torch.device("cpu"))
JUDGE_SCALE = 0.25


def new_model(seed=0, shape=SHAPE):
    model = qwen.Model(shape)
    qwen.init_weights(model, seed)
    return model


def sequences(name):
    """Eight sequences of 12 ids."""
    return torch.randint(SHAPE.vocab_size, (8, 12), generator=torch.Generator().manual_seed(name))


def nll_sum(model, ids_BT):
    logits_BTV = model(ids_BT[:, :-1]).float()
    return F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="sum")


def loss_and_grads(model, ranks, name):
    """The mean loss over all ranks' tokens, and its gradient, by this rank's sequences, two at a time."""
    own_BT = sequences(name)[ranks.rank::ranks.world]
    tokens = parallel.all_sum(own_BT[:, 1:].numel())
    total = 0.0
    for ids_BT in own_BT.split(2):
        loss = nll_sum(model, ids_BT) / tokens
        loss.backward()
        total += loss.item()
    return parallel.all_sum(total), parallel.take_grads(model)


def train_step(model, optimizer, ranks, name):
    """One optimizer step on two summed gradients; returns what a run would log."""
    loss, policy = loss_and_grads(model, ranks, name)
    _, judge = loss_and_grads(model, ranks, name + 1000)
    norm, product = parallel.norm(policy), parallel.dot(policy, judge)
    parallel.put_grads(model, [(1.0, policy), (JUDGE_SCALE, judge)])
    total = parallel.norm([parameter.grad for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"loss": loss, "norm": norm, "dot": product, "total_norm": total}


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def save(folder, model, optimizer, state):
    parallel.save_checkpoint(folder, model, optimizer, state, qwen.save_pretrained)


def sampler_of(model, dtype=torch.float32):
    return parallel.plain_copy(model, lambda: qwen.Model(model.config), dtype)


def train_and_save(ranks, out):
    """Two steps with a ragged rollout between them, a checkpoint, a third step and another checkpoint."""
    model = parallel.shard(new_model(seed=ranks.rank), ranks)    # rank 0's weights must win
    optimizer = new_optimizer(model)
    logged = [train_step(model, optimizer, ranks, name=1)]
    sampler = sampler_of(model)
    parallel.copy_weights(model, sampler)
    for _ in range(3 - 3 * ranks.rank):        # none at all on rank 1
        logits = sampler(sequences(5)).detach()
    parallel.on_main(lambda: torch.save(logits, out / "logits.pt"))
    logged.append(train_step(model, optimizer, ranks, name=2))
    save(out / "two", model, optimizer, {"step": 2, "rng": torch.arange(3)})
    logged.append(train_step(model, optimizer, ranks, name=3))
    save(out / "three", model, optimizer, {"step": 3})
    parallel.on_main(lambda: (out / "logged.json").write_text(json.dumps(logged)))


def resume(ranks, source, out):
    """Load a checkpoint of any number of ranks, save it again untouched, then take the third step."""
    model = parallel.shard(qwen.load_pretrained(parallel.find_checkpoint(source / "two")), ranks)
    optimizer = new_optimizer(model)
    state = parallel.load_trainer(source / "two", model, optimizer)
    assert state["step"] == 2 and state["rng"].tolist() == [0, 1, 2], state
    save(out / "two_again", model, optimizer, state)
    train_step(model, optimizer, ranks, name=3)
    save(out / "three_resumed", model, optimizer, {"step": 3})


def step_by_muon(ranks, out):
    """Two steps of Muon on what the ranks share out, and the weights after them."""
    model = parallel.shard(new_model(), ranks)
    optimizer = update.Muon(model)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for name in (1, 2):
        train_step(model, optimizer, ranks, name)
    weights = parallel.full_weights(model)
    parallel.on_main(lambda: torch.save(weights, out / "muon.pt"))


def full_disk(model, folder, state):
    (folder / "model.safetensors").write_bytes(b"half a fi")
    raise OSError(errno.ENOSPC, "No space left on device")


def reductions_and_failure(ranks, out):
    """What needs no model: each rank writes what it saw."""
    own = {"both": 1.5 + ranks.rank, f"only{ranks.rank}": 1}
    saw = {"sum": parallel.all_sum(10**17 + ranks.rank), "dict": parallel.all_sum(own),
           "tensor": parallel.all_sum(torch.tensor([1.0, ranks.rank])).tolist(),
           "max": parallel.all_max(ranks.rank - 5),
           "any": parallel.any_rank(ranks.rank == 1), "none": parallel.any_rank(False),
           "path": parallel.on_main(lambda: f"rank {ranks.rank}"),
           "stream": parallel.stream(7, ranks.rank)}
    def alone():
        if ranks.rank == 1:
            raise OSError(errno.ENOSPC, "the cache is full")

    try:
        parallel.together(alone)
    except (ValueError, OSError) as error:
        saw["together"] = str(error)
    model = parallel.shard(new_model(), ranks)
    try:
        parallel.save_checkpoint(out / "two", model, new_optimizer(model), {}, full_disk)
    except OSError as error:
        saw["error"] = str(error)
    (out / f"saw{ranks.rank}.json").write_text(json.dumps(saw))


# With a value head: the judge as a classifier, PPO's critic, NTHR. What they compute is tested where they
# live; here it is that ranks agree, also where one of them holds next to nothing.

HEADED = replace(SHAPE, tie_word_embeddings=False, value_head=True)    # the critic's lm_head has no gradient
OBJECTIVE = Objective(microbatch_tokens=40, judge_weight=0.5)
WON = {index: index in (0, 2, 3) for index in range(8)}
GROUP = {index: index // 3 for index in WON}          # two of three won, one of three, none of two


def with_optimizer(model, ranks):
    model = parallel.shard(model, ranks)
    return model, new_optimizer(model)


def random_episodes(rng):
    """A conversation or two per episode, each of a few turns, all in a few words."""
    def words(low, high):
        return [rng.randrange(9) for _ in range(rng.randint(low, high))]

    episodes = []
    for index, won in WON.items():
        turns = []
        for _ in range(1 + index % 2):
            text = []
            for _ in range(rng.randint(1, 3)):
                prompt, response = text + words(2, 4), words(1, 4)
                valid, logprob = rng.random() < 0.6, [0.0] * len(response)
                turns.append(Turn("", prompt, response, logprob, "", "look", valid, anchor=""))
                text = prompt + response
        episodes.append(Episode(Task("", "", "", None), GROUP[index], index, turns, won))
    return episodes


def labelled_turns(rng):
    return [Sample([rng.randrange(9) for _ in range(n)], [False] * n, [0.0] * n, None, n, "judge",
                   label=float(n % 2)) for n in range(4, 14)]


def headed_step(actor, critic, ranks, name):
    """One step of each. Rank 1 of two holds only the group without a winner.

    Judged turns: in step 1 none, in step 2 all on rank 0, in step 3 one on rank 1.
    """
    rng = random.Random(name)
    episodes, turns = random_episodes(rng), labelled_turns(rng)
    if ranks.world == 2:
        episodes = [e for e in episodes if (e.group == 2) == (ranks.rank == 1)]
    on_1 = {1: 0, 2: 0, 3: 1}[name] if ranks.world == 2 else 0
    turns = [] if name == 1 else turns[:on_1] if ranks.rank == 1 else turns[on_1:]
    metrics = critics_step(critic, copy.deepcopy(episodes))
    weakened = nthr.Method(nthr.Settings(nthr_beta=0.5))
    weakened.begin(actor[0], OBJECTIVE, 1, None)
    rewards.write_rewards(episodes, weakened.settings)
    metrics |= weakened.assign(episodes)
    samples = [sample for episode in episodes for sample in update.samples_of(episode)]
    metrics |= {"good": parallel.all_sum(sum(update.judgements(actor[0], turns, OBJECTIVE)))}
    metrics |= {f"before/{key}": gap for key, gap in update.rescore(actor[0], samples, OBJECTIVE).items()}
    stepped = update.update(*actor, samples + turns, OBJECTIVE, lr=1e-3)
    return metrics | {key: value for key, value in stepped.items() if "logprob_gap" not in key}    # rounding


def critics_step(critic, episodes):
    """PPO's advantages by its critic, whitened over all ranks, and the critic's own step."""
    method = ppo.Method(ppo.Settings(variant="code", critic_lr=1e-3))
    method.begin(critic[0], OBJECTIVE, 1, lambda model: model)         # and makes a critic of its own
    method.critic = critic
    metrics = method.assign(episodes)
    squares = [a * a for e in episodes for turn in e.turns for a in turn.token_advantage]
    return metrics | {"squares": parallel.all_sum(sum(squares)) / parallel.all_sum(len(squares))}


def save_headed(folder, actor, critic):
    parallel.save_checkpoint(folder, *actor, {"step": 1}, qwen.save_pretrained, critic=critic)


def train_with_value_heads(ranks, out):
    """A step, a checkpoint, two more steps; these again from the checkpoint."""
    actor = with_optimizer(new_model(1, HEADED), ranks)
    critic = ppo.new_critic(actor[0], lambda model: parallel.shard(model, ranks))
    logged = [headed_step(actor, critic, ranks, name=1)]
    save_headed(out / "headed_one", actor, critic)
    logged += [headed_step(actor, critic, ranks, name) for name in (2, 3)]
    save_headed(out / "headed_three", actor, critic)
    actor = with_optimizer(qwen.load_pretrained(out / "headed_one"), ranks)
    critic = with_optimizer(new_model(3, HEADED), ranks)    # the saved weights must win
    assert parallel.load_trainer(out / "headed_one", *actor, critic=critic) == {"step": 1}
    logged += [headed_step(actor, critic, ranks, name) for name in (2, 3)]
    save_headed(out / "headed_three_resumed", actor, critic)
    parallel.on_main(lambda: (out / "headed.json").write_text(json.dumps(logged)))


def main(out, source):
    """What torchrun runs on each of two ranks, and the most of it on each of four."""
    torch.set_num_threads(1)
    ranks = parallel.setup("cpu", timeout_s=120)
    train_and_save(ranks, out)
    step_by_muon(ranks, out)
    resume(ranks, source, out)
    if ranks.world == 2:
        train_with_value_heads(ranks, out)
        reductions_and_failure(ranks, out)
    parallel.print0("done")
    parallel.shutdown()


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run on one rank."""
    out = tmp_path_factory.mktemp("one")
    train_and_save(ALONE, out)
    step_by_muon(ALONE, out)
    train_with_value_heads(ALONE, out)
    return out


@pytest.fixture(scope="module")
def two(one, tmp_path_factory):
    """The folder of the same run on two ranks, which also resumed `one`. Fails if a rank hangs."""
    return torchrun(2, tmp_path_factory.mktemp("two"), one)


@pytest.fixture(scope="module")
def four(two, tmp_path_factory):
    """The same on four ranks, which also resumed `two`."""
    return torchrun(4, tmp_path_factory.mktemp("four"), two)


def torchrun(n, out, source):
    """Run `main` on n ranks; returns its folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    run = subprocess.run([*command, __file__, out, source], timeout=300, check=False,
                         capture_output=True, text=True, cwd=ROOT,
                         env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("done") == 1, run.stdout
    return out


def trainer_of(folder):
    """Moments and step counts by parameter name, and the settings of the one parameter group."""
    optimizer = torch.load(folder / parallel.TRAINER_FILE, weights_only=True)["optimizer"]
    return optimizer["state"], json.dumps(optimizer["param_groups"])    # a loaded tuple of betas is a list


def weights_of(folder):
    return {name: tensor.detach() for name, tensor in qwen.load_pretrained(folder).named_parameters()}


def assert_same_checkpoint(a, b, **tolerance):
    """Weights and optimizer state; equal to the bit unless a tolerance is given."""
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(weights_of(a), weights_of(b), **tolerance)
    (state_a, groups_a), (state_b, groups_b) = trainer_of(a), trainer_of(b)
    assert len(state_a) == len(weights_of(a)) and groups_a == groups_b
    torch.testing.assert_close(state_a, state_b, **tolerance)


@pytest.mark.fast
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
    assert logged == pytest.approx(expected, rel=1e-5, abs=1e-7)    # the product nearly cancels


def test_two_ranks_log_what_one_does(one, two):
    for a, b in zip(*(json.loads((out / "logged.json").read_text()) for out in (one, two)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)    # the gradients are near orthogonal in the end


def test_two_ranks_reach_the_weights_and_moments_of_one(one, two):
    # Adam divides by the root of the second moment: after steps of 1e-3, rounding in tiny gradients shows
    assert_same_checkpoint(one / "three", two / "three", rtol=1e-4, atol=2e-5)


def test_two_ranks_step_by_muon_as_one_does(one, two):
    """It rounds to bf16: in a step of 1e-3 * .2 * sqrt(96) at most, by 2^-8 of it a few times over."""
    weights = [torch.load(out / "muon.pt") for out in (one, two)]
    torch.testing.assert_close(*weights, rtol=0, atol=2 * 4 * 2**-8 * 2e-3)
    assert max((new_model().state_dict()[name] - w).abs().max() for name, w in weights[1].items()) > 1e-3


def test_ragged_forwards_of_a_plain_copy_see_the_same_weights(one, two):
    """That they do not hang is the time limit of `two`."""
    logits = [torch.load(out / "logits.pt") for out in (one, two)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)


def test_a_checkpoint_of_one_rank_loads_on_two(one, two):
    assert_same_checkpoint(one / "two", two / "two_again")
    assert_same_checkpoint(one / "three", two / "three_resumed", rtol=1e-4, atol=2e-5)


def test_four_ranks_do_what_two_do_and_go_on_from_their_checkpoint(two, four):
    for a, b in zip(*(json.loads((out / "logged.json").read_text()) for out in (two, four)), strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-7)
    assert_same_checkpoint(two / "two", four / "two_again")
    for name in ("three", "three_resumed"):
        assert_same_checkpoint(two / "three", four / name, rtol=1e-4, atol=2e-5)


def test_a_checkpoint_of_two_ranks_loads_on_one(two, tmp_path):
    resume(ALONE, two, tmp_path)
    assert_same_checkpoint(two / "two", tmp_path / "two_again")
    assert_same_checkpoint(two / "three", tmp_path / "three_resumed", rtol=1e-4, atol=2e-5)


def test_numbers_over_two_ranks(two):
    saw = [json.loads((two / f"saw{rank}.json").read_text()) for rank in (0, 1)]
    assert [s.pop("stream") for s in saw] == [parallel.stream(7, 0), parallel.stream(7, 1)]
    for s in saw:
        assert "two" in s["error"] and "No space left on device" in s.pop("error")
        assert "the cache is full" in s.pop("together")
    assert saw[0] == saw[1] == {"sum": 2 * 10**17 + 1, "dict": {"both": 4.0, "only0": 1, "only1": 1},
                                "tensor": [2.0, 1.0], "max": -4, "any": True, "none": False, "path": "rank 0"}


@pytest.mark.fast
def test_resuming_at_the_same_number_of_ranks_is_exact(one, tmp_path):
    resume(ALONE, one, tmp_path)
    assert_same_checkpoint(one / "two", tmp_path / "two_again")
    assert_same_checkpoint(one / "three", tmp_path / "three_resumed")


def critic_of(folder):
    """A checkpoint's critic: its weights, and the optimizer's moments by parameter name."""
    critic = torch.load(folder / parallel.TRAINER_FILE, weights_only=True)["critic"]
    return dict(critic["weights"]), critic["optimizer"]["state"]


def test_two_ranks_with_value_heads_log_what_one_does(one, two):
    """Classifier, critic, NTHR, where rank 1 has no or one judged turn and no mixed group."""
    single, double = (json.loads((out / "headed.json").read_text()) for out in (one, two))
    for a, b in zip(single, double, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-6, nan_ok=True)
    assert 0 < single[0]["nthr/weakened_frac"] < 1
    assert [row["squares"] for row in single] == pytest.approx([1.0] * 5, rel=1e-4)      # of white advantages
    assert [row["judge/tokens"] for row in single] == [0, 10, 10, 10, 10]


def test_two_ranks_reach_the_critic_of_one(one, two):
    done = [out / "headed_three" for out in (one, two)]
    torch.testing.assert_close(*map(critic_of, done), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(*map(weights_of, done), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("out", ["one", "two"])
def test_resuming_with_a_critic_is_exact(out, request):
    """To the bit; the value head before its first judged turn and the critic's lm_head have no moments."""
    out = request.getfixturevalue(out)
    logged = json.loads((out / "headed.json").read_text())
    for straight, resumed in zip(logged[1:3], logged[3:], strict=True):
        assert straight == pytest.approx(resumed, rel=0, abs=0, nan_ok=True)
    done, again = out / "headed_three", out / "headed_three_resumed"
    torch.testing.assert_close(critic_of(done), critic_of(again), rtol=0, atol=0)
    torch.testing.assert_close(weights_of(done), weights_of(again), rtol=0, atol=0)
    torch.testing.assert_close(trainer_of(done)[0], trainer_of(again)[0], rtol=0, atol=0)
    assert "value_head.weight" not in trainer_of(out / "headed_one")[0]
    assert "value_head.weight" in trainer_of(done)[0] and "lm_head.weight" not in critic_of(done)[1]


@pytest.mark.fast
def test_a_checkpoint_without_the_critic_asked_for_is_named(one):
    plain, headed = (with_optimizer(new_model(0, shape), ALONE) for shape in (SHAPE, HEADED))
    with pytest.raises(ValueError, match="trainer.pt: no critic: saved by a run without one"):
        parallel.load_trainer(one / "two", *plain, critic=headed)
    with pytest.raises(ValueError, match="the critic's value_head.bias differs: saved from another model"):
        parallel.load_trainer(one / "headed_one", *headed, critic=plain)
    assert parallel.load_trainer(one / "headed_one", *headed) == {"step": 1}    # the critic may stay there


@pytest.mark.fast
def test_saving_before_the_first_step_does_not_count_as_one(tmp_path):
    """AdamW's second step is 0.74 of its first on the same gradient: torch's own saving made it that."""
    straight, saved, loaded = (with_optimizer(new_model(), ALONE) for _ in range(3))
    save(tmp_path / "fresh", *saved, {})
    parallel.load_trainer(tmp_path / "fresh", *loaded)
    for pair in (straight, saved, loaded):
        train_step(*pair, ALONE, name=1)
    weights = [model.state_dict() for model, _ in (straight, saved, loaded)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]) and torch.equal(weight, weights[2][name]), name


@pytest.mark.fast
def test_an_optimizer_of_another_model_is_named(one):
    with pytest.raises(ValueError, match="no optimizer state for lm_head.weight: saved from another model"):
        parallel.load_trainer(one / "two", *with_optimizer(new_model(0, HEADED), ALONE))


@pytest.mark.fast
def test_bf16_keeps_fp32_masters_on_one_rank():
    """A step of 1e-4 is lost in bf16 weights of size 1, not in fp32 ones."""
    try:
        model = parallel.shard(new_model(), ALONE, torch.bfloat16)
        sampler = sampler_of(model, torch.bfloat16)
        with torch.no_grad():
            model(sequences(1))                      # no backward follows, which leaves FSDP's root whole
        parallel.copy_weights(model, sampler)
        assert next(sampler.parameters()).dtype == sampler(sequences(1)).dtype == torch.bfloat16
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        loss, grads = loss_and_grads(model, ALONE, 1)
        plain_loss, plain_grads = loss_and_grads(new_model(), ALONE, 1)
        assert loss == pytest.approx(plain_loss, rel=2**-8)                # one rounding of bf16
        assert parallel.norm(grads) == pytest.approx(parallel.norm(plain_grads), rel=2e-2)
        parallel.put_grads(model, [(1.0, grads)])
        torch.optim.SGD(model.parameters(), lr=1e-4).step()
        moved = parallel.full_weights(model)["model.norm.weight"] - 1
        torch.testing.assert_close(moved, -1e-4 * plain_grads[-1], rtol=0.1, atol=1e-6)
    finally:
        parallel.shutdown()


@pytest.mark.fast
def test_all_of_a_model_and_its_optimizer_is_beside_the_one_in_use():
    """On a device that holds no values, so nothing could come back from it."""
    model, used = new_model(), new_model().to("meta")
    optimizer, n = update.adam(model), len([*model.parameters()])
    nudge(model, optimizer)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        with parallel.beside(used, model, optimizer):
            pass
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(moments) == 3 * n
    assert {tensor.device.type for tensor in (*moments, *model.parameters())} == {"meta"}


@pytest.mark.fast
def test_a_sharded_model_trains_on_after_it_was_moved():
    """By a change of dtype and back, for which FSDP does what it does for one of device."""
    try:
        model = parallel.shard(new_model(), ALONE, torch.bfloat16)
        optimizer, parameters = update.adam(model), [*model.parameters()]
        nudge(model, optimizer)
        before = parallel.full_weights(model)
        model.to(torch.float64)
        assert {p.dtype for p in parameters} == {torch.float64}          # the very ones that it had
        model.to(torch.float32)
        parallel.put_away(model, optimizer)
        torch.testing.assert_close(parallel.full_weights(model), before, rtol=0, atol=0)
        nudge(model, optimizer)
        assert all(not torch.equal(was, parallel.full_weights(model)[name]) for name, was in before.items())
    finally:
        parallel.shutdown()


def nudge(model, optimizer):
    """A step of any kind."""
    model(torch.arange(8)[None]).float().square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.fast
@pytest.mark.parametrize("failing", ["save_model", "extra_files", "rename"])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch, failing):
    model = new_model()
    optimizer = new_optimizer(model)
    train_step(model, optimizer, ALONE, name=1)
    folder = tmp_path / "checkpoint"
    save(folder, model, optimizer, {"step": 1})
    before = weights_of(folder)
    train_step(model, optimizer, ALONE, name=2)

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failing == "rename":
        monkeypatch.setattr(parallel, "swap", fail)
    with pytest.raises(OSError, match="checkpoint .* not saved.*No space left"):
        parallel.save_checkpoint(folder, model, optimizer, {"step": 2},
                                 full_disk if failing == "save_model" else qwen.save_pretrained,
                                 fail if failing == "extra_files" else None)
    assert parallel.find_checkpoint(folder) == folder
    assert parallel.load_trainer(folder, model, optimizer) == {"step": 1}
    torch.testing.assert_close(weights_of(folder), before, rtol=0, atol=0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]    # the rest takes no space


@pytest.mark.fast
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_between_the_renames_loses_nothing(tmp_path, monkeypatch, renames):
    """A killed process runs no `except`: KeyboardInterrupt stands for it, raised at the next rename."""
    model = new_model()
    optimizer = new_optimizer(model)
    folder = tmp_path / "checkpoint"
    save(folder, model, optimizer, {"step": 1})
    done, rename = [], Path.rename

    def killed(path, target):
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        save(folder, model, optimizer, {"step": 2})
        raise KeyboardInterrupt
    assert parallel.find_checkpoint(folder) == folder
    assert parallel.load_trainer(folder, model, optimizer)["step"] == (1 if renames == 0 else 2)
    save(folder, model, optimizer, {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.fast
def test_saving_never_deletes_what_is_no_checkpoint(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    model = new_model()
    with pytest.raises(ValueError, match="not a checkpoint"):
        save(tmp_path, model, new_optimizer(model), {})
    assert (tmp_path / "thesis.tex").read_text() == "years"


@pytest.mark.fast
def test_a_folder_that_is_no_checkpoint_is_named(tmp_path):
    model = new_model()
    assert parallel.find_checkpoint(tmp_path / "absent") is None
    with pytest.raises(ValueError, match="trainer.pt: not found"):
        parallel.load_trainer(tmp_path, model, new_optimizer(model))
    (tmp_path / parallel.TRAINER_FILE).write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match="trainer.pt: not a trainer state"):
        parallel.load_trainer(tmp_path, model, new_optimizer(model))


@pytest.mark.fast
def test_a_parameter_without_gradient_counts_as_zero():
    model = torch.nn.ParameterList([torch.zeros(2), torch.zeros(1), torch.zeros(1)])
    a, b = [torch.tensor([3.0, 4.0]), None, None], [torch.tensor([1.0, 2.0]), torch.tensor([5.0]), None]
    assert (parallel.dot(a, b), parallel.norm(a), parallel.norm([None])) == (11.0, 5.0, 0.0)
    parallel.put_grads(model, [(2.0, a), (-1.0, b)])
    assert [p.grad if p.grad is None else p.grad.tolist() for p in model] == [[5.0, 6.0], [-5.0], None]
    assert a == b == [None, None, None]                  # used up: no third set is held
    assert parallel.take_grads(model)[1].tolist() == [-5.0]
    assert all(p.grad is None for p in model)


@pytest.mark.fast
def test_streams_are_splitmix64_and_do_not_collide():
    assert parallel.stream(0) == 0xE220A8397B1DCDAF >> 1    # the published first output of seed 0
    names = {parallel.stream(seed, i, j) for seed in range(10) for i in range(100) for j in range(100)}
    names |= {parallel.stream(seed) for seed in range(10)} | {parallel.stream(0, i) for i in range(100)}
    assert len(names) == 100_110 and max(names) < 2**63
    assert parallel.stream(1, 2) != parallel.stream(2, 1)
    with pytest.raises(TypeError):
        parallel.stream(0, "train")


@pytest.mark.fast
def test_a_generator_repeats_its_stream():
    paths = ((1,), (1,), (1, 0), (2,))
    draws = [torch.rand(4, generator=parallel.generator(3, *path)).tolist() for path in paths]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) == 3


@pytest.mark.fast
def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="--device=tpu"):
        parallel.setup("tpu")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
