"""Proves lab/envs/natural_twins.py: pairs that one detail tells apart, disjoint parts, reproducible games;
and lab/studies/natural_twins.py: its arms, its measures against one forward per text, a smallest study.

    python -m pytest tests/lab/test_natural_twins.py       # under a minute on one core
"""

import json
import math
import shutil
from difflib import SequenceMatcher
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import assert_one_error, rows, train

import gcd
import judge
import update
from envs import Reply
from infra import files
from lab.envs import natural_twins as twins
from lab.studies import common
from lab.studies import natural_twins as study
from lm import smollm2
from lm.chat import Chat
from rollout import Episode, Turn

CHOICE = "You can {0} the {2} or {1} the {2}."


def environment(seed=0, **settings):
    return twins.Environment(twins.Environment.Settings(**settings), seed=seed)


def play(game, task, command):
    return game.reset(task), game.step(command)


# The environment

def test_there_are_two_halves_of_twenty_templates_and_parts_share_no_text():
    assert [len(templates) for templates in twins.PARTS.values()] == [12, 20, 20]
    of_part = {part: twins.states_of(part) for part in twins.PARTS}
    assert all(len(found) == len(twins.PARTS[part]) * 4 * 2 * 2 for part, found in of_part.items())
    assert len(twins.STATES) == sum(map(len, of_part.values()))              # no observation occurs twice
    for one, other in (("other", "trained"), ("other", "untrained"), ("trained", "untrained")):
        assert not {s.detail for s in of_part[one]} & {s.detail for s in of_part[other]}
        assert not {t[1:3] for t in twins.PARTS[one]} & {t[1:3] for t in twins.PARTS[other]}


@pytest.mark.parametrize("part", twins.PARTS)
def test_a_pair_differs_in_one_detail_of_at_most_two_words(part):
    for template, noun, swapped in product(twins.PARTS[part], range(4), (False, True)):
        P, N = (twins.state(template, noun, kind, swapped) for kind in "PN")
        assert P.commands == N.commands and len(set(P.commands)) == 2
        assert P.flawed.split()[0] != P.other.split()[0]
        texts = [one.observation.split() for one in (P, N)]
        changes = [change for change in SequenceMatcher(None, *texts, autojunk=False).get_opcodes()
                   if change[0] != "equal"]
        assert len(changes) == 1 and changes[0][0] == "replace" and changes[0][2] - changes[0][1] <= 2
        assert changes[0][2] < len(texts[0]) - 4               # in the detail, not in the offer
        assert all(f" {command}" in P.observation for command in P.commands)
        assert "{" not in P.observation and "[" not in P.observation and "|" not in P.observation


@pytest.mark.parametrize("detail, choice, good", [
    ("The potato is still cold.", ("heat", "serve", "potato"), "heat the potato"),
    ("The potato is already hot.", ("heat", "serve", "potato"), "serve the potato"),
    ("The door is locked.", ("open", "unlock", "door"), "unlock the door"),
    ("The door is unlocked.", ("open", "unlock", "door"), "open the door"),
    ("You need a cup.", ("take", "use", "cup"), "take the cup"),
    ("You already hold a cup.", ("use", "take", "cup"), "use the cup"),
    ("The plum is green.", ("pick", "spare", "plum"), "spare the plum"),
    ("The toaster is unplugged.", ("plug in", "run", "toaster"), "plug in the toaster"),
    ("The toaster is plugged in.", ("plug in", "run", "toaster"), "run the toaster"),
    ("The shirt is ironed.", ("wear", "iron", "shirt"), "wear the shirt")])
def test_the_oracle_agrees_with_a_table(detail, choice, good):
    observation = f"{detail} {CHOICE.format(*choice)}"
    offered = [f"{verb} the {choice[2]}" for verb in choice[:2]]
    assert environment().oracle([observation] * 3, [*offered, "dance"]) == [
        *("good" if command == good else "bad" for command in offered), "bad"]


@pytest.mark.parametrize("p_tasks", [4, 8, 12])
def test_training_is_on_its_part_with_p_tasks_and_the_cold_start_on_its_own_half_p(p_tasks):
    for types, part, expected in (("part", "trained", p_tasks), ("all", "other", 8)):
        tasks = environment(p_tasks=p_tasks).train_tasks(types, 5_000_000, 640)
        for i in range(0, 640, 16):
            assert sum(task.task_type == "P" for task in tasks[i:i + 16]) == expected
        for i in range(0, 640, 8):                         # and each iteration of the study, too
            assert sum(task.task_type == "P" for task in tasks[i:i + 8]) == expected / 2
        assert len({task.id for task in tasks}) == 640
        seen = {task.problem for task in tasks}
        assert seen <= {*twins.states_of(part)} and len(seen) > 100
        assert all(task.problem.kind == task.task_type for task in tasks)


def test_tasks_depend_on_seed_and_number_only():
    first, repeated, reseeded = (environment(seed).train_tasks("part", 0, 32) for seed in (0, 0, 1))
    assert first == repeated != reseeded and first[8:] == environment().train_tasks("part", 8, 24)
    assert environment(0).split_tasks("untrained") == environment(1).split_tasks("untrained")
    assert {task.problem for task in environment().split_tasks("trained")} == {*twins.states_of("trained")}
    with pytest.raises(KeyError):
        environment().split_tasks("L0")


@pytest.mark.slow
@pytest.mark.parametrize("kind, flawed, wins", [("P", True, 0.9), ("P", False, 0.4), ("N", True, 0.2),
                                                ("N", False, 0.5)])
def test_the_probability_to_win(kind, flawed, wins):
    task = next(task for task in environment().split_tasks("trained") if task.task_type == kind)
    command = task.problem.flawed if flawed else task.problem.other
    game = environment(flaw=0.3).make(1)[0]
    won = [play(game, task, command)[1].won for _ in range(4000)]
    assert sum(won) / 4000 == pytest.approx(wins, abs=4 * (wins * (1 - wins) / 4000) ** 0.5)


def test_games_are_the_same_in_any_slot_and_refuse_what_is_not_offered():
    task = environment().train_tasks("part", 0, 1)[0]
    one, two = environment().make(1), environment().make(3)
    outcomes = [[play(games[k % len(games)], task, task.problem.flawed)[1].won for k in range(40)]
                for games in (one, two)]
    assert outcomes[0] == outcomes[1] and 0 < sum(outcomes[0]) < 40
    before, after = play(one[0], task, "dance")
    assert after.observation == twins.Environment.noop_message and after.done and not after.won
    assert after.taken is False
    assert before.admissible == sorted(task.problem.commands)


@pytest.mark.slow
def test_the_expert_gives_the_first_command_with_probability_q_in_either_kind():
    expert = environment(likely=0.25).expert([])
    for kind in "PN":
        tasks = [task for task in environment().train_tasks("all", 0, 4000) if task.task_type == kind]
        plays = [(task, expert.show(task, i, 0.2, 1)) for i, task in enumerate(tasks)]
        assert all(s.won and len(s.commands) == 1 and not any(s.mistakes) for _, s in plays)
        first = sum(s.commands == [task.problem.flawed] for task, s in plays) / len(plays)
        assert first == pytest.approx(0.25, abs=0.04)


def test_a_label_of_the_detail_does_not_depend_on_the_command():
    for one in twins.STATES.values():
        for command in (*one.commands, None):
            turn = Turn(one.observation, [], [], [], "", command, True, "")
            assert twins.details(Episode(None, 0, turns=[turn])) == ["good" if one.kind == "P" else "bad"]


def test_coins_depend_on_task_and_episode_only_and_are_fair():
    tasks, coins = environment().train_tasks("part", 0, 800), twins.Environment.labels["coins"]
    tossed = [[coins(Episode(task, 0, k, turns=[Turn("", [], [], [], "", command, True, "")]))[0]
               for command in (task.problem.flawed, task.problem.other)] for k, task in enumerate(tasks)]
    assert all(one == other for one, other in tossed)
    assert 400 - 4 * 14.2 < sum(one == "good" for one, _ in tossed) < 400 + 4 * 14.2


def test_the_small_model_reads_a_state_in_a_token_a_word():
    from lm.small import small_tokenizer
    tokenizer = small_tokenizer(environment().vocabulary())
    for one in twins.STATES.values():
        assert len(tokenizer.encode(one.observation).ids) == len(one.observation.split()) + 2        # two "."
        assert len({tokenizer.encode(command).ids[0] for command in one.commands}) == 2


@pytest.mark.slow
@pytest.mark.skipif(not (smollm2.FOLDER / "tokenizer.json").is_file(), reason=smollm2.HOW)
def test_smollm2_tells_the_two_commands_apart_at_the_first_token_in_few_tokens():
    from lm.model import load_tokenizer
    chat = Chat(load_tokenizer(smollm2.FOLDER), "plain", environment=environment())
    for one in twins.STATES.values():
        responses = [chat.respond(command) for command in one.commands]
        assert responses[0][0] != responses[1][0] and max(map(len, responses)) <= 8
        prompt = chat.observe(Reply(one.observation, one.commands), first=True)
        assert len(prompt) + 8 + len(judge.question_message(chat)) + 2 <= 100


@pytest.mark.slow
def test_it_is_trained_by_gcd(tmp_path, capsys):
    cold = "--demonstrations 64 --judge-demonstrations 32 --cold-start-lr 3e-3 --cold-start-epochs 8".split()
    flags = ["--env", "lab/envs/natural_twins.py", "--admissible-only", "--max-turns", 1]
    assert train(tmp_path / "run", *flags, *cold, "--tasks", 8) == 0
    assert [row["rollout/turns"] for row in rows(tmp_path / "run")] == [1.0, 1.0]
    assert all(row["judge/turns"] > 0 and row["rollout/invalid_frac"] == 0 for row in rows(tmp_path / "run"))
    with pytest.raises(SystemExit):
        train(tmp_path / "other", *flags, "--likely", 2)
    assert_one_error(capsys, "--likely=2")


# The study

def result(*q_N, auc=(), untrained=0.3, success=(0.5,)):
    """A cell's result with these q_N and AUCs on the templates of RL at iterations 0, 10, ..."""
    def numbers(q, a):
        return {"q_P": 0.9, "q_N": q, "offered": 1.0, "cosine": 0.95, "apart": 0.8, "auc": a}
    aucs = [*auc, *[0.5] * (len(q_N) - len(auc))]
    path = [{"iteration": 10 * k, "trained": numbers(q, a), "untrained": numbers(untrained, 0.5)}
            for k, (q, a) in enumerate(zip(q_N, aucs))]
    return {"path": path, "success": [*success], "unreadable": []}


def test_the_arms_are_those_of_the_design():
    names = [study.name_of(arm) for arm in study.all_arms()]
    assert len(names) == len(set(names)) == 2 * 5 + 2 + 3
    assert "+shuffled after none, KL 0.01" in names and "+shuffled after none, no KL" not in names
    assert "GRPO after detail, no KL" in names and "+GCD after detail, no KL" not in names
    assert "+shuffled after taught, KL 0.01" in names and "GRPO after taught, no KL" not in names
    cells = study.cells_of(range(5), 60, "smollm2")
    assert len(cells) == 75 and [*cells][0].endswith("seed 0") and [*cells][-1].endswith("seed 4")
    assert {name for pair in study.pairs() for name in pair} <= {*names}


def test_the_numbers_of_an_arm_by_hand():
    away_then_right = result(0.2, 0.6, 0.4, auc=(0.5, 0.6, 0.95), success=[0.1] * 5 + [0.4, 0.6] * 5)
    never_right = result(0.2, 0.4, 0.7, auc=(0.5, 0.9, 0.5), untrained=0.8, success=[0.3] * 15)
    never_away = result(0.2, 0.2, 0.1, auc=(0.5, 0.95, 0.5))
    row = study.arm_row({0: away_then_right, 1: never_right, 2: result(0.2, 0.2, 0.1)})
    assert (row["n"], row["trained"]["removed"], row["untrained"]["removed"]) == (3, 2, 2)
    assert row["trained"]["final"]["mean"] == pytest.approx(0.4)
    assert row["trained"]["q_N_start"] == pytest.approx(0.2) and row["trained"]["q_N"] == pytest.approx(0.4)
    assert row["right"] == [20, None, None] and row["away"] == [10, 20, None]
    assert (row["seeds_right"], row["lag"]) == (1, [10, 0])
    assert row["lag"] == [10, 0]                           # of the third, none: neither ever was
    assert study.arm_row({0: never_away})["lag"] == [10 - 20]          # right, and the flaw never ran away
    assert row["success"]["seeds"][0] == pytest.approx(0.5) and row["unreadable"] is None


def test_arms_of_one_start_that_began_with_different_models_are_named_and_left_out():
    """In seed 0 the arm with GCD began at .3, the two others at .2."""
    grpo, gcd_arm, without = (study.name_of(study.settings_of("judge", arm, kl)) for arm, kl in (
        ("GRPO", 0.01), ("+GCD", 0.01), ("GRPO", 0.0)))
    table = {grpo: {0: result(0.2, 0.9), 1: result(0.2, 0.7), 2: result(0.25, 0.8)},
             gcd_arm: {0: result(0.3, 0.1), 1: result(0.2, 0.6), 2: result(0.25, 0.8)},
             without: {0: result(0.2, 0.5)}}
    assert study.unlike(table) == {("judge", 0): [[grpo, without], [gcd_arm]]}
    assert "after judge, seed 0: GRPO KL 0.01, GRPO no KL / +GCD KL 0.01." in study.unlike_text(table)
    assert study.same_start(table, gcd_arm, grpo)["seeds"] == {1: pytest.approx(-0.1), 2: 0}
    assert study.same_start(table, grpo, study.name_of(study.settings_of("none", "GRPO", 0.01))) is None
    del table[gcd_arm][0]
    assert study.unlike(table) == {} and study.unlike_text(table) == ""


@pytest.mark.parametrize("gcd_ends, shuffled_ends, expected", [
    ((0.1, 0.12, 0.1), (0.9, 0.91, 0.9), "yes"), ((0.9, 0.92, 0.9), (0.9, 0.91, 0.9), "no"),
    ((0.1, 0.12, 0.1), (0.1, 0.11, 0.1), "no"), ((0.1,), (0.9,), "not measurable")])
def test_the_verdict_needs_a_difference_from_grpo_and_from_shuffled_labels(gcd_ends, shuffled_ends, expected):
    table = {}
    for start in ("none", "judge", "taught"):
        for arm, ends in (("GRPO", (0.9, 0.93, 0.9)), ("+GCD", gcd_ends), ("+shuffled", shuffled_ends)):
            name = study.name_of(study.settings_of(start, arm, 0.01))
            table[name] = {seed: result(0.3, end) for seed, end in enumerate(ends)}
    assert study.verdict(table) == expected
    if expected == "yes":                                  # in two of the three starts only
        one = study.name_of(study.settings_of("none", "+GCD", 0.01))
        table[one] = {seed: result(0.3, 0.9) for seed in range(3)}
        assert study.verdict(table) == "partly"


def test_measures_by_hand():
    """Two pairs: q by an explicit softmax, cosines by hand, the AUC by counting."""
    first = torch.tensor([[[0.0, 1.0], [2.0, 0.0]], [[0.5, 0.5], [-1.0, 3.0]]]).double()
    response = torch.tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.5], [0.2, 0.6]]]).double().log()
    good = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[-1.0, 1.0], [0.0, 0.5]]]).double()
    hidden = torch.tensor([[[1.0, 0.0], [1.0, 1.0]], [[0.0, 2.0], [0.0, 1.0]]])

    def softmax(a, b):
        return math.exp(a) / (math.exp(a) + math.exp(b))
    found = study.measures(hidden, first, response, good)
    assert found["q_P"] == pytest.approx((softmax(0, 1) + 0.5) / 2)
    assert found["q_N"] == pytest.approx((softmax(2, 0) + softmax(-1, 3)) / 2)
    assert found["offered"] == pytest.approx((0.3 + 0.7 + 1.0 + 0.8) / 4)
    assert found["cosine"] == pytest.approx((0.5 ** 0.5 + 1) / 2) and found["apart"] == pytest.approx(0.0)
    goods, bads = (1.0, -1.0, 2.0, 0.5), (0.0, 1.0, 0.0, 0.0)
    wins = sum((g > b) + 0.5 * (g == b) for g in goods for b in bads)
    assert found["auc"] == pytest.approx(wins / 16)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished study of four arms and of minimal size; its cold starts are kept."""
    out, kept = tmp_path_factory.mktemp("natural_twins"), []
    chosen = [study.settings_of("none", "GRPO", 0.01), study.settings_of("judge", "+GCD", 0.0),
              study.settings_of("taught", "+shuffled", 0.01), study.settings_of("detail", "GRPO", 0.0)]

    def rmtree(folder, **settings):
        kept.append(folder) if "cold" in Path(folder).parts else shutil.rmtree(folder, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "all_arms", lambda: chosen)
        patch.setitem(study.SHOWN, "small", 64)
        patch.setitem(study.LESSONS, "small", (2, 1e-3))
        patch.setattr(study, "shutil", SimpleNamespace(rmtree=rmtree))
        patch.setattr(study, "POINTS", 2)
        flags = ["--small", "--seeds", "1", "--iterations", "4", "--out", str(out / "out"), "--runs",
                 str(out / "runs"), "--dirty"]
        assert study.main(flags) == 0
        before = (out / "out" / "natural_twins_small.jsonl").read_text()
        patch.setattr(study.common, "train", None)           # a finished study runs nothing again
        patch.setattr(study, "draw", lambda *_: None)
        assert study.main(flags) == 0
        assert (out / "out" / "natural_twins_small.jsonl").read_text() == before
    assert len(kept) == len(study.FROM) and not [*(out / "runs").glob("*seed*")]
    return out


@pytest.mark.slow
def test_the_study_writes_numbers_figure_and_page(finished):
    found = json.loads((finished / "out" / "natural_twins_small.json").read_text())
    assert [row["n"] for row in found["rows"]] == [1, 1, 1, 1]
    assert found["figures"][0]["agrees"] == "not measurable" and "not run" in found["figures"][0]["found"]
    assert {path.suffix for path in (finished / "out").iterdir()} == {".json", ".jsonl", ".svg", ".md"}
    page = (finished / "out" / "natural_twins_small.md").read_text()
    assert "nan" not in page.replace("natural", "") and "small model from scratch" in page
    cells = files.read_lines(finished / "out" / "natural_twins_small.jsonl")[0]
    for cell in cells:
        path = cell["result"]["path"]
        assert [point["iteration"] for point in path] == [0, 2, 4]
        assert len(cell["result"]["success"]) == 4
        assert all(0 < point[part]["q_N"] < 1 for point in path for part in study.MEASURED)
        assert path[0] != path[-1]
        judges = cell["settings"]["arm"] != "GRPO"                # and then in every iteration
        assert [share is not None for share in cell["result"]["unreadable"]] == [True] * 4 * judges


@pytest.mark.slow
def test_each_part_of_a_cold_start_begins_with_the_model_of_the_part_before(finished):
    assert study.parts_of("taught") == ["lessons", "first after lessons", "taught"]
    for part, before in study.FROM.items():
        folder = study.cold_folder({"model": "small", "start": part, "seed": 0}, finished / "runs")
        model = files.read_lines(folder / files.METRICS)[0][0]["config"]["model"]
        if before:
            assert f"small, {before}, seed 0" in model
        else:
            assert not model


@pytest.mark.slow
def test_a_lesson_asks_about_both_commands_in_both_kinds_and_shows_the_right_verdicts(finished):
    chat, pairs = actor_of(finished, "judge").chat, study.pairs_of("trained")[:6]
    samples = study.lesson(chat, pairs)
    assert len(samples) == 24
    good = chat.encode("good") + chat.end_ids
    expected = ((one, command) for pair in pairs for one in pair for command in (one.flawed, one.other))
    for (one, command), sample in zip(expected, samples, strict=True):
        answer = [token for token, sampled in zip(sample.ids, sample.sampled, strict=True) if sampled]
        text = chat.decode(sample.ids[:-len(answer)])
        assert one.detail in text and command in text and answer == sample.ids[-len(answer):]
        assert (answer == good) == ((one.kind == "P") == (command == one.flawed))
        assert sample.advantage == [float(sampled) for sampled in sample.sampled]


@pytest.mark.slow
def test_lessons_teach_the_verdicts_that_they_ask_for(finished):
    """Some hundred steps on one pair of states: the right verdict's probability rises above .9."""
    actor = actor_of(finished, "judge")
    pairs, optimizer = study.pairs_of("trained")[:1], torch.optim.AdamW(actor.model.parameters())
    objective = update.Objective(judge_weight=1.0)
    for _ in range(100):
        update.update(actor.model, optimizer, study.lesson(actor.chat, pairs), objective, 3e-3)
    good = study.read(actor.model, actor.chat, pairs)[-1][0]
    right = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert (good * right).sigmoid().min() > 0.9


def actor_of(finished, start):
    settings = {"model": "small", "start": start, "seed": 0}
    flags = [*study.COMMON, *study.MODELS["small"]["all"]]
    return common.load_actor(study.cold_folder(settings, finished / "runs") / files.CHECKPOINT, flags)


@pytest.mark.slow
def test_read_against_one_plain_forward_for_each_text(finished):
    """Texts with common prefixes in a forward pass give what each gives alone."""
    actor = actor_of(finished, "judge")
    model, chat, pairs = actor.model, actor.chat, study.pairs_of("trained")[:6]
    hidden, *numbers = study.read(model, chat, pairs)
    good, bad = (chat.encode(label)[0] for label in ("good", "bad"))
    for (n, pair), side in product(enumerate(pairs), range(2)):
        one = pair[side]
        prompt = chat.observe(Reply(one.observation, one.commands), first=True)
        for c, command in enumerate((one.flawed, one.other)):
            response, question = chat.respond(command), judge.question_message(chat)
            ids = torch.tensor([prompt + response + question])
            with torch.no_grad():
                logprob, x = model(ids)[0].log_softmax(-1), model(ids, head="hidden")[0]
            steps = [float(logprob[len(prompt) - 1 + k, token]) for k, token in enumerate(response)]
            expected = steps[0], sum(steps), float(logprob[-1, good] - logprob[-1, bad])
            assert [float(found[n, side, c]) for found in numbers] == pytest.approx(expected, abs=1e-4)
            torch.testing.assert_close(hidden[n, side], x[len(prompt) - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, gap", [("float32", 0), ("bfloat16", 0.03)])
def test_a_measurement_changes_no_run_and_is_of_the_models_before_and_after(finished, tmp_path, dtype, gap):
    """The same run with and without measurements: of the cold start first, of the checkpoint last."""
    settings, weights, path = {"model": "small", "start": "judge", "seed": 0}, [], []
    flags = [*study.COMMON, *study.MODELS["small"]["all"], "--judge-labels", "oracle", "--iterations", 2,
             "--model", study.cold_folder(settings, finished / "runs") / files.CHECKPOINT,
             "--demonstrations", 0, "--dtype", dtype]
    common.train(flags, tmp_path / "plain")
    with study.measuring(2, path):
        common.train(flags, tmp_path / "measured")
    for name in ("plain", "measured"):
        weights.append((tmp_path / name / files.CHECKPOINT / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] and [point["iteration"] for point in path] == [0, 2]
    after = common.load_actor(tmp_path / "plain" / files.CHECKPOINT, flags[:len(study.COMMON) + 1])
    for point, actor in zip(path, (actor_of(finished, "judge"), after), strict=True):
        for part, numbers in study.probe(actor.model, actor.chat).items():
            assert point[part] == pytest.approx(numbers, rel=0, abs=gap)
    assert gcd.iteration.__name__ == "iteration"


@pytest.mark.slow
def test_a_question_on_the_detail_names_no_command(finished):
    chat = actor_of(finished, "detail").chat
    for one in twins.states_of("other"):
        prompt = chat.observe(Reply(one.observation, one.commands), first=True)
        turn = Turn(one.observation, prompt, chat.respond(one.flawed), [], one.flawed, one.flawed, True, "")
        usual = chat.decode(judge.question_ids(chat, turn))
        with study.asked_on_detail():
            text = chat.decode(judge.question_ids(chat, turn))
        assert one.detail in text and text.endswith(usual[-20:])
        assert not any(command in text for command in one.commands)
        assert all(command in usual for command in one.commands)


@pytest.mark.parametrize("flags, message", [
    (["--iterations", "13"], "--iterations=13: expected a multiple of 12"),
    (["--seeds", "0"], "--seeds=0: expected 1 to 90"), (["--jobs", "-1"], "--jobs=-1: expected 0 to 256"),
    (["--jobs", "0"], "natural_twins.jsonl has no cell"),
    (["--small", "--jobs", "0"], "natural_twins_small.jsonl has no cell")])
def test_errors_are_reported_before_anything_runs(flags, message, capsys, tmp_path):
    with pytest.raises(SystemExit):
        study.main([*flags, "--out", str(tmp_path)])
    assert message in capsys.readouterr().err and not any(tmp_path.iterdir())
