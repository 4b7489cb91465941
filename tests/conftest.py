"""Shared test fixtures: a tiny random model, a small tokenizer, a corridor game, a gradient recorder.

The model is random, but three commands and the two stop tokens are made likely: within a few turns it gives
valid, invalid, malformed and overlong responses, all of which the engine has to handle.
"""

import gc
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from waiting import wait_for

import envs
import rollout
from envs import Reply, Task, scienceworld
from envs.alfred import games, rooms
from infra import files
from lm import model as decoder
from lm import small
from lm.chat import Chat

# Tests and their processes meet none of what a shell may set: run.sh's folder and seed, a window's width,
# proxies for servers of this machine, a hook's git folder, ignored signals
for variable in "OUT SEED ALL_PROXY all_proxy GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE".split():
    os.environ.pop(variable, None)
os.environ |= {"COLUMNS": "80", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
for signum, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(signum) == signal.SIG_IGN:
        signal.signal(signum, handler)
torch.set_num_threads(1)          # as in runs of gcd.py: more threads are slower on models of this size
os.fsync = lambda descriptor: None      # no test cuts the power, and fsync takes a tenth of the test time
QWEN_TOKENIZER = Path(os.environ.get("QWEN_TOKENIZER") or
                      Path(__file__).parents[2] / "shared" / "data" / "qwen2.5-tokenizer")
WITHOUT_QWEN = ("needs Qwen2.5's tokenizer: name the folder of any Qwen2.5 model from the hub in "
                "$QWEN_TOKENIZER (or ../shared/data/qwen2.5-tokenizer)")
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full, a full disk")
needs_qwen = pytest.mark.skipif(not (QWEN_TOKENIZER / "tokenizer.json").is_file(), reason=WITHOUT_QWEN)
QWEN3_TOKENS = ("<tool_response>", "</tool_response>", "<think>", "</think>")    # 151665 to 151668
# Qwen3's template without its tools: a system message only if given, thoughts only after the last question
QWEN3_TEMPLATE = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"      # start of Qwen3's responses with thinking off
COMMANDS = ("left", "right", "look")
STOPS = ("<|im_end|>", "<|endoftext|>")
NOOP_MESSAGE = "Nothing happens."
SHORT_LIVED = "-XX:TieredStopAtLevel=1"        # a JVM starts in half of the time, and slows down later
PHRASES = [*COMMANDS, "jump", "good", "bad", "You are at ", "go to ", "open ", " cabinet 1", " drawer 1",
           " countertop 1"]


def pytest_configure():
    """Drop torchrun's variables, which some clusters set. Ranks of tests, which import this, keep theirs."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                     "TORCHELASTIC_RUN_ID"):
        os.environ.pop(variable, None)


def pytest_collectstart():
    """Collect no garbage until all tests are known, which took a quarter longer with it."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as fast what is not marked slow."""
    for item in items:
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.fast)


def pytest_collection_finish():
    """Collect garbage from here on, without what is there now, modules and tests."""
    gc.freeze()
    gc.enable()


class Corridor:
    """A game: five places in a row; a task's problem is (start, goal). A refused command has no effect."""

    def reset(self, task, seed=0):
        self.place, self.goal = task.problem
        return self.reply(f"Walk to {self.goal}. You are at {self.place}.")

    def step(self, command):
        if command not in self.admissible():
            return self.reply(NOOP_MESSAGE)
        self.place += {"left": -1, "right": 1, "look": 0}[command]
        return self.reply(f"You are at {self.place}." + " Nothing new." * (command == "look"))

    def admissible(self):
        wall = {0: "left", 4: "right"}.get(self.place)
        return [command for command in sorted(COMMANDS) if command != wall]

    def reply(self, observation):
        won = self.place == self.goal
        return Reply(observation, self.admissible(), won, won)

    def close(self):
        pass


def make_specs(groups, size, first_stream=1000):
    """`size` EpisodeSpecs for each of `groups` corridor tasks, every one with its own stream and index."""
    tasks = [Task(f"corridor/{g}", "train", "walk", (g % 3 + 1, (g % 3 + 3) % 5)) for g in range(groups)]
    return [rollout.EpisodeSpec(tasks[i // size], i // size, first_stream + 7919 * i, index=i)
            for i in range(groups * size)]


class Recorder:
    """A stand-in for the optimizer: `step` records the gradient and changes no weight."""

    def __init__(self, model):
        self.model, self.param_groups, self.gradient = model, [{"lr": None}], None
        self.state = {}

    def step(self):
        parameters = self.model.parameters()
        self.gradient = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)

    def zero_grad(self, set_to_none):
        for parameter in self.model.parameters():
            parameter.grad = None


def with_value_head(model, bias=0.0):
    """A copy of the tiny model with a random value head."""
    headed = decoder.Model(replace(model.config, value_head=True))
    headed.load_state_dict(model.state_dict(), strict=False)
    torch.nn.init.normal_(headed.value_head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        headed.value_head.weight[:, 0] = 0.0     # the constant hidden dimension
        headed.value_head.bias.fill_(bias)
    return headed


def is_alive(pid):
    """Whether a process runs. A zombie (ended, its exit status not yet read by its parent) does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def state_in(stat):
    """A thread's state, a letter, from its stat file in /proc."""
    return stat.read_text().rpartition(")")[2].split()[0]


def suspend(pid):
    """Stop a process, and wait until each of its threads has stopped: on a busy machine one may still answer
    after the signal."""
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: all(state_in(stat) == "T" for stat in Path(f"/proc/{pid}/task").glob("*/stat")))


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def assert_same(got, want, tolerance=2e-5):
    """Assert that two gradients differ by at most `tolerance` of the norm, which must not be 0."""
    assert want.norm() > 1e-3
    if not (difference := (got - want).norm()) <= tolerance * want.norm():           # NaN fails, too
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=0)
        pytest.fail(f"norm of the difference {difference:.3g}, of what was expected {want.norm():.3g}; norms "
                    f"as {got.norm() / want.norm():.4g} to 1, cosine {cosine:.4f} (1: a factor is wrong)")


def rounding(values, times=64):
    """Tolerance for two float32 computations of the same numbers: `times` roundings of the largest.

    The order of a sum differs between CPUs. On models of this size, any two kernels differed by at most 12
    roundings; a wrong position, mask or weight shows in the first digits.
    """
    values = torch.as_tensor(values).detach()
    return times * torch.finfo(torch.float32).eps * float(values.abs().max() if values.numel() else 0)


@pytest.fixture(scope="session", autouse=True)
def clean_tree():
    """Let tests write results while this tree is being worked on; tests/lab/test_provenance.py does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "clean_commit", lambda dirty=False: 40 * "c")
        yield


@pytest.fixture(scope="session", autouse=True)
def made_once():
    """Generated rooms, and the games of a file, are made once a process: a search expert looks at 400 rooms,
    and the file of real games takes two seconds to read. JVMs compile for a short life.
    """
    read = games.games_in_rows
    kept = lru_cache(8)(lambda file, split, changed: read(file, split))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "task", lru_cache(8192)(rooms.task))
        patch.setattr(games, "games_in_rows",
                      lambda file, split: [*kept(file, split, os.stat(file).st_mtime_ns)])
        patch.setattr(scienceworld, "JAVA_OPTIONS", (*scienceworld.JAVA_OPTIONS, SHORT_LIVED))
        yield


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small_tokenizer")
    vocabulary = len(small.save_small_tokenizer(PHRASES, folder))
    config(vocabulary).save(folder)              # AutoTokenizer reads the model's type from config.json
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    return decoder.load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="session")
def chat(tokenizer):
    return Chat(tokenizer, "plain")


@pytest.fixture(scope="session")
def qwen_tokenizer_folder():
    """The folder of Qwen2.5's tokenizer; without it the test is skipped."""
    if not (QWEN_TOKENIZER / "tokenizer.json").is_file():
        pytest.skip(WITHOUT_QWEN)
    return QWEN_TOKENIZER


@pytest.fixture(scope="session")
def qwen_tokenizer(qwen_tokenizer_folder):
    """Qwen2.5's, which takes a second to load; no test changes it."""
    return decoder.load_tokenizer(qwen_tokenizer_folder)


@pytest.fixture(scope="session")
def qwen3_tokenizer_folder(qwen_tokenizer_folder, tmp_path_factory):
    """Qwen3's tokenizer, made from Qwen2.5's: four more tokens and another template."""
    folder = tmp_path_factory.mktemp("qwen3_tokenizer")
    tokenizer = Tokenizer.from_file(str(QWEN_TOKENIZER / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN3_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((QWEN_TOKENIZER / "tokenizer_config.json").read_text())
    kept = {key: settings[key] for key in ("tokenizer_class", "eos_token", "pad_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept | {"chat_template": QWEN3_TEMPLATE}))
    config(151936, model_type="qwen3").save(folder)
    return folder


def cut_tokenizer(source, folder, merges=4000):
    """Write a tokenizer cut to its bytes, its first merges and its special tokens.

    A random model's runs take a sixth of the time with it: nearly all goes into 152,000 logits a token, and
    into reading the tokenizer. A text is more tokens, and comes back the same.
    """
    full = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    model = full["model"]
    model["merges"] = model["merges"][:merges]
    joined = ["".join(pair if isinstance(pair, list) else pair.split(" ")) for pair in model["merges"]]
    letters = sorted((word for word in model["vocab"] if len(word) == 1), key=model["vocab"].get)
    model["vocab"] = {word: i for i, word in enumerate(dict.fromkeys([*letters, *joined]))}
    for i, token in enumerate(full["added_tokens"], len(model["vocab"])):
        token["id"] = i
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    if "added_tokens_decoder" in settings:
        settings["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in full["added_tokens"]}
    (folder / "tokenizer.json").write_text(json.dumps(full), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def short_qwen(qwen_tokenizer_folder, tmp_path_factory):
    """A folder with Qwen2.5's tokenizer, cut."""
    return cut_tokenizer(qwen_tokenizer_folder, tmp_path_factory.mktemp("short_qwen"))


@pytest.fixture(scope="session")
def short_qwen3(qwen3_tokenizer_folder, tmp_path_factory):
    """A folder with Qwen3's tokenizer, cut."""
    return cut_tokenizer(qwen3_tokenizer_folder, tmp_path_factory.mktemp("short_qwen3"))


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_tokenizer_folder):
    return decoder.load_tokenizer(qwen3_tokenizer_folder)


def config(vocabulary, **changes):
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, max_position_embeddings=1024)
    return decoder.ModelConfig(vocabulary, **sizes | changes)


@pytest.fixture
def model(tokenizer):
    return tiny_model(tokenizer)


def tiny_model(tokenizer, **changes):
    """A fresh tiny model, always with the same weights. changes: settings of its ModelConfig."""
    model = decoder.Model(config(len(tokenizer), **changes))
    generator = torch.Generator().manual_seed(0)
    phrases = tokenizer.convert_tokens_to_ids([*COMMANDS, "jump", "good", "bad"])
    stops = tokenizer.convert_tokens_to_ids(list(STOPS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:               # large enough for the context to matter
                parameter.normal_(0.0, 0.24, generator=generator)
        # hidden dimension 0 is constant, 1 is on after a phrase: their columns of lm_head act as biases
        model.model.embed_tokens.weight[:, :2] = torch.tensor([10.0, 0.0])
        model.model.embed_tokens.weight[phrases, 1] = 10.0
        model.lm_head.weight[:, :2] = 0.0
        model.lm_head.weight[phrases, 0] = 2.1
        model.lm_head.weight[stops, 0] = 1.2
        model.lm_head.weight[stops, 1] = 1.7
    return model


@pytest.fixture
def write_environment(tmp_path, monkeypatch):
    """write_environment(name, text): write a file into a folder that replaces envs/."""
    monkeypatch.setattr(envs, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(envs, "__path__", [str(tmp_path)])
    written = []

    def write(name, text):
        written.append(name)
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in written:
        sys.modules.pop(f"envs.{name}", None)
        vars(envs).pop(name, None)


# Tiny runs

@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """The checkpoint of a small cold start: see tiny_runs.cold_started."""
    from tiny_runs import cold_started  # loads gcd.py, which most files do not need
    return cold_started(tmp_path_factory)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A table's benchmark with a stand-in for gcd.py: see stand_in.toy_bench."""
    from stand_in import toy_bench
    yield from toy_bench(tmp_path, monkeypatch)


@pytest.fixture(scope="session")
def trained(start, tmp_path_factory):
    """The folder of two iterations of GCD from `start`; tests read and copy it."""
    from tiny_runs import start_from, train
    out = tmp_path_factory.mktemp("trained")
    assert train(out, *start_from(start)) == 0
    return out
