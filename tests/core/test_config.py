"""Proves which flags a run has, what their defaults are, and that a wrong flag gives one line.

    python -m pytest tests/core/test_config.py           # some seconds
"""

import json
import re
import shlex
from dataclasses import MISSING, fields
from unittest.mock import Mock

import pytest
from tiny_runs import ROOT

import algorithms
import config
import envs
from infra import plugins
from infra.flags import flag_of


def parse(*flags):
    return config.parse_or_exit([str(flag) for flag in flags])


def mistake(capsys, *flags):
    """The error message for these flags. Asserts exit status 2, one line on stderr, and an empty stdout."""
    with pytest.raises(SystemExit) as stopped:
        parse(*flags)
    printed, error = capsys.readouterr()
    assert stopped.value.code == 2 and printed == "" and error.count("\n") == 1, error
    assert error.startswith("gcd.py: error: ") and error.endswith("; see --help\n"), error
    return error.removeprefix("gcd.py: error: ").removesuffix("; see --help\n")


def help_of(capsys, *flags, which=()):
    """({heading: its flags}, the full text) as printed by --help with these flags."""
    with pytest.raises(SystemExit) as stopped:
        parse("--help", *which, *flags)
    printed, error = capsys.readouterr()
    assert (stopped.value.code, error) == (0, "")
    sections = re.split(r"(?m)^(\S.*):\n(?=  --)", printed)[1:]
    found = {heading: re.findall(r"(?m)^  (--[a-z-]+)", text) for heading, text in zip(*[iter(sections)] * 2)}
    return found, printed


@pytest.fixture
def hub_folder(tmp_path):
    """A folder whose tokenizer.json is not the small model's: flags are checked by that file alone."""
    tokenizer = {"added_tokens": [{"content": "<|im_start|>"}, {"content": "<|im_end|>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


# Flags and settings

def test_help_lists_at_most_55_flags_under_headings(capsys):
    """Those of the default run; a flag that only some other setting needs is listed with that setting."""
    sections, printed = help_of(capsys)
    listed = [flag for flags in sections.values() for flag in flags]
    assert len(listed) == len(set(listed)) <= 55, "a flag that is rarely given has rare=True"
    assert list(sections) == ["run", "environment", "model", "cold start", "rollout", "RL", "GCD",
                              "correction and large models", "evaluation", "--algo grpo", "--env household"]
    assert {"--out", "--env", "--model", "--algo", "--gcd", "--evaluate", "--games"} <= set(listed)
    assert {"--clip-low", "--clip-high", "--max-grad-norm", "--warmup", "--success-reward"} <= set(listed)
    assert not {"--kl-coef", "--endpoint-model", "--gae-lambda", "--task-ids"} & set(listed)
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_help_all_lists_every_flag_and_when_it_is_read(capsys):
    """Every setting with a help text; --help lists a part of them, in the same order, and says that."""
    sections, printed = help_of(capsys, which=["all"])
    listed = [flag for flags in sections.values() for flag in flags]
    own = config.find_algorithm("grpo").Settings, config.find_environment("household").Settings
    assert listed == [flag_of(f.name) for source in (config.Config, *own) for f in fields(source)
                      if f.metadata.get("help")]
    assert re.search(r"(?s)--kl-coef float.*?only with --kl\s+loss or\s+reward", printed)
    short, text = help_of(capsys)
    assert {*sum(short.values(), [])} < {*listed}
    assert "--help all lists all" in text and "--help all lists all" not in printed


@pytest.mark.parametrize("chosen, more", [
    ("--kl loss", "--kl-coef"), ("--correction critiques", "--correction-every"),
    ("--endpoint http://127.0.0.1:1/v1", "--endpoint-key-variable"), ("--algo ppo", "--gae-lambda"),
    ("--algo nthr", "--nthr-beta"), ("--env scienceworld", "--task-ids")])
def test_help_lists_the_flags_that_another_flag_brings(capsys, chosen, more):
    assert more not in sum(help_of(capsys)[0].values(), [])
    sections, _ = help_of(capsys, *chosen.split())
    assert more in sum(sections.values(), [])
    if chosen.startswith(("--algo", "--env")):
        assert more in sections[chosen]


def test_help_shows_the_defaults_of_the_given_run(capsys):
    _, printed = help_of(capsys, "--preset", "paper", "--algo", "ppo", "--variant", "code", which=["all"])
    for flag, default in (("--tasks", "128"), ("--lr", "1e-06"), ("--invalid", "format"),
                          ("--demonstrations", "300")):
        text = re.search(rf"(?ms)^  {flag}\b.*?\(default:\s+(\S+)\)", printed)
        assert text[1] == default, flag


@pytest.mark.parametrize("algo", plugins.names(algorithms, algorithms.Method))
def test_every_algorithms_flags_are_valid_and_no_two_owners_share_one(algo):
    """Settings are one flat dict in a run's files: with a name of two owners, one would be lost."""
    method, common = config.find_algorithm(algo), {f.name for f in fields(config.Config)}
    for name in plugins.names(envs, envs.Environment):
        brought = [f.name for owner in (method.Settings, config.find_environment(name).Settings)
                   for f in fields(owner)]
        assert len(set(brought)) == len(brought) and not common & set(brought)
    for f in fields(method.Settings):
        assert f.type in (str, int, float, bool) and f.default is not MISSING
        assert f.metadata["help"] or f.name in config.PAPER          # no help: set by a preset
    settings = {f.name: f.default for f in fields(method.Settings)}
    known = common | settings.keys()
    assert method.defaults.keys() | method.code_defaults.keys() <= known
    assert "variant" not in settings or settings["variant"] == "paper"


def test_settings_are_all_settings_of_a_run():
    flags = "--algo ppo --env scienceworld --task-ids 5,6 --gae-lambda 0.5 --lr 1e-3 --history 0"
    found = parse(*flags.split()).settings()
    assert (found["algo"], found["env"], found["task_ids"], found["gae_lambda"], found["lr"]) == (
        "ppo", "scienceworld", "5,6", 0.5, 1e-3)
    assert found["on_truncation"] == "fail" and found["preset"] == "small" and found["history"] == 0
    assert not {"algorithm", "environment", "step_weight"} & found.keys()
    assert json.loads(json.dumps(found)) == found


def test_changed_ignores_settings_of_place_and_speed():
    then = parse("--lr", 1e-3, "--slots", 8, "--out", "there").settings()
    assert config.changed(then, parse("--lr", 1e-3)) == {}
    now = parse("--lr", 2e-3, "--invalid-penalty", 0.5, "--seed", 3)
    assert config.changed(then, now, ignored=("seed",)) == {"lr": (1e-3, 2e-3), "invalid_penalty": (0.1, 0.5)}
    assert config.changed(then | {"a_flag_of_old": 1}, parse("--lr", 1e-3)) == {}


def test_an_endpoint_is_stored_and_compared_without_its_path():
    """Settings of older runs have it. That there is one, and its server, is compared."""
    url = "https://host:80/api/v1"
    asking = ("--judge-labels", "endpoint", "--endpoint")
    stored = parse(*asking, url).settings()
    assert stored["endpoint"] == "https://host:80/..." and parse(*asking, url).endpoint == url
    assert parse().settings()["endpoint"] == ""
    for then in (stored, stored | {"endpoint": url}):
        assert config.changed(then, parse(*asking, "https://host:80/v2")) == {}
        assert config.changed(then, parse(*asking, "https://other/v1")) == {
            "endpoint": ("https://host:80/...", "https://other/...")}
        assert config.changed(then, parse(), ["judge_labels"]) == {"endpoint": ("https://host:80/...", "")}


# Defaults: the preset's, the algorithm's, the environment's; the command line overrides them

@pytest.mark.parametrize("algo", plugins.names(algorithms, algorithms.Method))
def test_the_papers_preset_works_with_every_algorithm(algo):
    """PPO's and REINFORCE++'s 128 tasks x 1 override the preset's, and so do a loss's own bounds."""
    found = parse("--preset", "paper", "--algo", algo, "--lr", "2e-6").settings()
    assert (found["lr"], found["demonstrations"], found["success_reward"]) == (2e-6, 300, 10.0)
    assert (found["tasks"], found["group_size"]) == ((128, 1) if algo in ("ppo", "reinforce") else (16, 8))
    bounds = {"cispo": (4.0, 0.0), "dapo": (0.28, 0.0), "dr_grpo": (0.2, 0.0), "gspo": (4e-4, 0.0)}
    assert (found["clip_high"], found["dual_clip"], found["history"]) == (*bounds.get(algo, (0.2, 3.0)), 0)
    assert found.get("normalize_std", True) != (algo == "dr_grpo") and found.get("critic_lr", 1e-5) == 1e-5
    assert found["entropy_coef"] == (0.0 if algo in ("cispo", "dapo", "dr_grpo", "gspo") else 0.001)
    assert algo != "rlvmr" or found["step_weight"] == 0.5
    assert algo != "gigpo" or found["step_weight"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("flags, labels, types", [
    ("", "rule+oracle", "part"), ("--train-types all", "rule+oracle", "all"),
    ("--env scienceworld", "rule", "part"),
    ("--env scienceworld --endpoint http://127.0.0.1:1/v1", "rule+endpoint", "part"),
    ("--endpoint http://127.0.0.1:1/v1 --judge-labels endpoint --history 0", "endpoint", "part")])
def test_the_papers_preset_follows_the_environment_and_the_endpoint(flags, labels, types):
    settings = parse("--preset", "paper", *flags.split())
    assert (settings.judge_labels, settings.cold_start_types, settings.history) == (labels, types, 0)


def test_a_hugging_face_folder_gets_the_papers_settings(hub_folder):
    implied, explicit = parse("--model", hub_folder), parse("--model", hub_folder, "--preset", "paper")
    assert implied.preset == "paper" and implied.settings() == explicit.settings()
    assert (implied.demonstrations, implied.lr, implied.dtype) == (300, 1e-6, "bfloat16")
    assert (implied.kl, implied.on_truncation, implied.dynamic_sampling) == ("loss", "invalid", "keep")
    assert implied.device == "auto"
    small = parse("--model", hub_folder, "--preset", "small")
    assert (small.preset, small.lr, small.dtype) == ("small", 6e-4, "float32")


@pytest.mark.parametrize("preset, most", [("paper", 16384), ("small", 1024)])
def test_no_default_context_is_beyond_the_models_positions(hub_folder, preset, most):
    flags = "--model", hub_folder, "--preset", preset
    for text, expected in (("", most), ("{", most), ("[]", most), ('{"max_position_embeddings": "8k"}', most),
                           ('{"max_position_embeddings": 800}', 800),
                           ('{"max_position_embeddings": 32768}', most)):
        (hub_folder / "config.json").write_text(text)
        assert parse(*flags).context == expected
    (hub_folder / "config.json").write_text('{"max_position_embeddings": 800}')
    assert parse(*flags, "--context", 900).context == 900                 # which is refused with the model


def test_a_small_checkpoint_gets_the_small_models_settings(tokenizer_folder):
    loaded, fresh = parse("--model", tokenizer_folder).settings(), parse().settings()
    assert loaded | {"model": ""} == fresh and (fresh["preset"], fresh["device"]) == ("small", "cpu")


@pytest.mark.parametrize("algo", ["gigpo", "grpo", "nthr", "ppo", "rlvmr"])
def test_the_released_code_brings_its_defaults(algo):
    """They override the preset's; flags override them."""
    brought = config.find_algorithm(algo).code_defaults
    for preset in ("small", "paper"):
        found = parse("--algo", algo, "--variant", "code", "--preset", preset).settings()
        assert {name: found[name] for name in brought} == brought
    assert brought["success_reward"] == 10.0 and brought["invalid"] == "format"
    assert parse("--algo", algo).settings()["success_reward"] == 1.0
    found = parse("--algo", algo, "--variant", "code", "--invalid-penalty", 3).settings()
    assert found == parse("--algo", algo, "--variant", "code").settings() | {"invalid_penalty": 3.0}


def test_an_environment_brings_its_defaults():
    assert parse("--env", "scienceworld").slots == 16 != parse().slots
    assert parse("--env", "scienceworld", "--slots", 3).slots == 3


# Mistakes

def test_an_unknown_environment_or_algorithm_lists_the_known_ones(capsys):
    environments = plugins.names(envs, envs.Environment)
    methods = plugins.names(algorithms, algorithms.Method)
    for flag, names in (("--env", environments), ("--algo", methods)):
        assert mistake(capsys, flag, "foo") == (
            f"{flag}=foo: expected one of {', '.join(names)}, or a file's path that ends in .py")
    assert {"household", "alfworld", "scienceworld"} <= set(environments)
    assert {"grpo", "gigpo", "rlvmr", "ppo", "nthr", "rloo", "reinforce"} <= set(methods)
    assert not {"losses", "rewards", "alfred"} & {*environments, *methods}


@pytest.mark.slow
@pytest.mark.parametrize("algo", plugins.names(algorithms, algorithms.Method))
def test_a_flag_of_another_algorithm_is_refused_and_its_owner_named(capsys, algo):
    """Every flag, so that none is silently ignored."""
    flags_of = {name: {flag_of(f.name): f for f in fields(config.find_algorithm(name).Settings)}
                for name in plugins.names(algorithms, algorithms.Method)}
    for flag, f in {flag: f for flags in flags_of.values() for flag, f in flags.items()}.items():
        if flag in flags_of[algo]:
            continue
        owners = " or ".join(f"--algo {name}" for name, flags in flags_of.items() if flag in flags)
        given = [flag] if f.type is bool else [flag, f.default]
        assert mistake(capsys, "--algo", algo, *given) == f"{flag}: not read here, but with {owners}"


@pytest.mark.parametrize("flags, message", [
    ("--task-ids 5", "--task-ids: not read here, but with --env scienceworld"),
    ("--no-normalize-std --algo rlvmr",
     "--no-normalize-std: not read here, but with --algo cispo or --algo dapo"),
    ("--frobnicate=1", "--frobnicate: no such flag"),
    (f"--env '{ROOT}/examples/guess.py' --higest 9", "--higest: no such flag; did you mean --highest?"),
    ("--iteration 3", "--iteration: no such flag; did you mean --iterations?"),
    ("--group 3", "--group: no such flag"),
    ("--dual-clip 3", "--dual-clip: a setting, but no flag: --preset and --variant set it"),
    ("--sampler-cap 3", "--sampler-cap: only with --dtype bfloat16"),
    ("--help everything", "argument -h/--help: invalid choice: 'everything' (choose from"),
    ("here", "here: no such flag"),
    # flags that would have no effect
    ("--kl-coef 1", "--kl-coef: only with --kl loss or reward"),
    ("--no-show-admissible", "--show-admissible: for a model that writes (--model)"),
    ("--thoughts endpoint", "--thoughts: for a model that writes (--model)"),
    ("--correction-every 3", "--correction-every: only with --correction"),
    ("--endpoint http://127.0.0.1:1/v1", "--endpoint: nothing asks it; expected --judge-labels endpoint"),
    ("--endpoint http://127.0.0.1:1/v1 --judge-labels endpoint --no-gcd --judge-demonstrations 0",
     "--endpoint: nothing asks it"),
    (f"--judge-kind value --model '{ROOT}/lab/results/alfworld_model' --judge-response-tokens 9",
     "--judge-response-tokens: only with --judge-kind generative, for a model that writes (--model)"),
    ("--endpoint http://127.0.0.1:1/v1 --judge-labels endpoint --endpoint-cache=",
     "--endpoint-cache=: expected a file"),
    ("--rearranged", "--rearranged: only with --games"),
    ("--judge-kind value --judge-normalize-std",
     "--judge-normalize-std: only with --judge-kind generative"),
    # values
    ("--seed x", "argument --seed: invalid int value: 'x'"), ("--seed 100", "--seed=100: expected 0 to 99"),
    ("--lr", "argument --lr: expected one argument"),
    ("--mistake-rate 2", "--mistake-rate=2.0: expected 0 to 0.5"),
    ("--lr nan", "--lr=nan"), ("--lr inf", "--lr=inf"), ("--tasks 0", "--tasks=0: expected 1"),
    ("--preset papr", "--preset=papr: expected one of auto, small, paper"),
    ("--protocol foo", "--protocol=foo"),
    ("--positions sine", "--positions=sine: expected one of rotary, none"),
    ("--variant codes", "--variant=codes: expected one of paper, code"),
    ("--judge-labels foo", "--judge-labels=foo"),
    ("--algo rlvmr --step-weight 1.5", "--step-weight=1.5"),
    ("--evaluate L9", "--evaluate=L9: no split 'L9' (dev,"),
    # contradictions
    ("--tasks 4 --group-size 4 --minibatches 17", "--minibatches=17: more than 16 episodes"),
    ("--max-response-tokens 1024", "--max-response-tokens=1024: not below --context=1024"),
    ("--context 64", "--judge-response-tokens=4: leaves no room"), ("--hidden-size 33", "--hidden-size=33"),
    ("--cold-start-types four", "--cold-start-types=four: expected one of part, all"),
    ("--tasks 1e9", "--tasks"), ("--clip-low -0.1", "--clip-low=-0.1: expected 0"),
    ("--warmup 80", "--warmup=80: not below --iterations=80"),
    ("--algo gspo --history 2", "--history=2: --algo gspo has one ratio for an episode"),
    (f"--env '{ROOT}/lab/envs/twins.py' --dagger 8", "has no online_expert"),
    ("--demonstrations 0 --dagger 8", "--dagger=8: needs --demonstrations"),
    ("--cold-start-epochs 0 --dagger 8", "--dagger=8: needs --demonstrations"),
    ("--judge-epochs 2 --dagger 8", "--judge-epochs: only without --dagger"),
    ("--judge-labels endpoint --judge-redraw --endpoint http://127.0.0.1:9/v1", "--judge-redraw: --judge"),
    ("--instructions --dagger 8", "--dagger=8: not with --instructions"),
    ("--lr 1e300", "--lr=1e+300"), ("--invalid-penalty nan", "--invalid-penalty=nan"),
    ("--algo gigpo --group-size 1", "--group-size=1: --algo gigpo compares"),
    ("--algo ppo --dynamic-sampling drop", "--dynamic-sampling=drop: --algo ppo compares no groups"),
    ("--algo reinforce --dynamic-sampling refill", "--dynamic-sampling=refill: --algo reinforce compares no"),
    ("--algo gigpo --dynamic-sampling refill", "--dynamic-sampling=refill"),
    ("--kl loss --dynamic-sampling refill", "--dynamic-sampling=refill"),
    ("--algo ppo --kl reward", "--kl=reward: not with --algo ppo"),
    ("--algo dapo --kl loss", "--dynamic-sampling=refill: "),
    ("--algo nthr --kl reward", "--kl=reward"),
    ("--lora 16 --train-layers 4", "--lora=16: not with --train-layers=4"),
    ("--lora 16 --judge-kind value", "--lora=16: not with --judge-kind=value"),
    ("--lora 16 --algo ppo", "--lora=16: not with --algo ppo, which trains a second network"),
    ("--lora -1", "--lora=-1: expected 0 to 4096"), ("--train-layers -1", "--train-layers=-1: expected 0"),
    ("--save-adapter", "--save-adapter: only with --lora, of a --model"),
    ("--save-adapter --lora 4", "--save-adapter: only with --lora, of a --model"),
    ("--algo rlvmr --prompt think", "--prompt=think: --algo rlvmr needs tags"),
    ("--correction critiques --no-gcd", "--correction=critiques: "),
    ("--correction critiques --judge-kind value", "--correction=critiques: "),
    ("--correction critiques", "--correction=critiques: needs --instructions"),
    ("--correction critiques --instructions --demonstrations 0", "--correction=critiques: needs --instr"),
    ("--kl loss --kl-coef 0", "--kl-coef=0: expected a number above 0; or --kl none"),
    ("--judge-turns 31", "--judge-turns=31: expected an even number"),
    ("--judge-demonstrations 1", "--judge-demonstrations=1: expected 0, or at least 2"),
    ("--judge-labels rule+endpoint", "--judge-labels=rule+endpoint: needs --endpoint"),
    # of the environment
    ("--env scienceworld --judge-labels oracle", "--judge-labels=oracle: scienceworld has no oracle"),
    ("--env scienceworld --judge-labels flaws", "--judge-labels=flaws: scienceworld has no oracle"),
    ("--env scienceworld --no-gcd --judge-labels oracle", "--judge-labels=oracle: scienceworld has no "),
    ("--env scienceworld --admissible-only", "--admissible-only: scienceworld lists templates of commands"),
    ("--env scienceworld --task-ids x", "--task-ids=x"), ("--env alfworld", "--env=alfworld: needs --games"),
    ("--model NOWHERE", "--model=NOWHERE")])
def test_a_wrong_flag_gives_one_line_that_names_it(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    assert message in mistake(capsys, *shlex.split(flags))


def test_thoughts_of_a_model_that_writes_need_an_endpoint(capsys, hub_folder):
    writes = ["--model", hub_folder, "--thoughts", "endpoint"]
    assert mistake(capsys, *writes) == "--thoughts=endpoint: needs --endpoint"
    assert parse(*writes, "--endpoint", "http://127.0.0.1:1/v1").thoughts == "endpoint"
    assert not parse("--model", hub_folder, "--no-show-admissible").show_admissible


@pytest.mark.parametrize("flags", ["", "--endpoint http://127.0.0.1:1/v1"])
def test_a_value_that_may_be_a_key_is_not_printed(capsys, flags):
    line = mistake(capsys, *flags.split(), "--endpoint-key-variable", "sk-1234567890abcdef")
    assert line.startswith("--endpoint-key-variable: ") and "sk-1" not in line


@pytest.mark.parametrize("text, reason", [("{", "tokenizer.json is not a tokenizer"),
                                          ("[]", "is not a tokenizer"),
                                          ('{"added_tokens": [3]}', "is not a tokenizer")])
def test_a_broken_tokenizer_gives_one_line(capsys, tmp_path, text, reason):
    (tmp_path / "tokenizer.json").write_text(text)
    line = mistake(capsys, "--model", tmp_path)
    assert line.startswith(f"--model={tmp_path}: ") and reason in line


@pytest.mark.parametrize("where", [config, config.smollm2])
def test_a_model_that_may_not_be_read_gives_one_line(capsys, monkeypatch, where):
    def denied(*_):
        raise PermissionError(13, "Permission denied", "private/tokenizer.json")

    name = "a" * 300                                             # longer than a file's name may be
    if where is config.smollm2:
        monkeypatch.setattr(where, "named", denied)
    line = mistake(capsys, "--model", name)
    assert line.startswith(f"--model={name}: ") and ("Permission denied" in line or "too long" in line)


def test_a_split_that_is_given_twice_is_evaluated_once():
    assert parse("--evaluate", "L0,L2,L0").splits == ["L0", "L2"]


def test_an_error_says_if_its_value_was_not_given(capsys):
    few, ours = ("--tasks", "1", "--group-size", "2"), "(--minibatches was not given)"
    assert mistake(capsys, *few) == f"--minibatches=4: more than 2 episodes {ours}"
    assert mistake(capsys, *few, "--preset", "paper") == f"--minibatches=8: more than 2 episodes {ours}"
    assert mistake(capsys, *few, "--minibatches", "3") == "--minibatches=3: more than 2 episodes"


@pytest.mark.parametrize("flag, value, kind, message", [
    ("env", '{"max_turns": "20"}', "Environment", "--max-turns='20': expected int"),
    ("env", '{"lr": 1e9}', "Environment", "--lr=1000000000.0: expected 0 to"),
    ("algo", '{"reduction": "words"}', "Method", "--reduction=words: expected one of token")])
def test_a_wrong_default_of_a_plugin_names_it(capsys, tmp_path, flag, value, kind, message):
    """Unless a flag gives the value."""
    package, path = {"env": "envs", "algo": "algorithms"}[flag], tmp_path / "mine.py"
    methods = {"env": "def make(self, n): pass\n    def split_tasks(self, name): pass\n"
               "    def train_tasks(self, types, start, n): pass\n",
               "algo": "def assign(self, episodes): pass\n"}[flag]
    path.write_text(f"import {package}\nclass {kind}({package}.{kind}):\n    defaults = {value}\n"
                    f"    {methods}")
    found = mistake(capsys, f"--{flag}", path)
    assert found.startswith(message) and found.endswith(f" (a default of --{flag}={path})"), found
    name, *_ = message.partition("=")
    assert mistake(capsys, f"--{flag}", path, name, "-9").startswith((f"{name}=-9", f"argument {name}"))


def test_a_shape_that_is_not_the_models_is_refused(capsys):
    given = "--model", ROOT / "lab" / "results" / "alfworld_model"
    assert mistake(capsys, *given, "--layers", 5) == f"--layers=5: --model={given[1]} has 3"
    assert mistake(capsys, *given, "--hidden-size", 64) == f"--hidden-size=64: --model={given[1]} has 96"
    for name, value, there in (("positions", "none", "rotary"), ("untied", True, False)):
        flags = [f"--{name}", value] if value == "none" else [f"--{name}"]
        assert mistake(capsys, *given, *flags) == f"--{name}={value}: --model={given[1]} has {there}"
    assert parse(*given, "--hidden-size", 96, "--layers", 3, "--positions", "rotary").hidden_size == 96


def test_ctrl_c_while_flags_are_read_prints_no_traceback(monkeypatch, capsys):
    monkeypatch.setattr(config, "parse", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as ended:
        config.parse_or_exit([])
    assert (ended.value.code, *capsys.readouterr()) == (130, "", "")
