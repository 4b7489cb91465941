"""Proves report/: checks of a run's files, the numbers in tables and charts, a page that no text can break.

    python -m pytest tests/report/test_report.py
"""

import json
import re
import shlex
import webbrowser
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
from evaluation import examples
from lab.bench.study import RESULTS, cells_of, read_config
from report import charts, page, read, tables
from report.__main__ import main, write

VOID = {"meta", "link", "br", "img", "input", "hr"}


def episode(won=True, text="You see a bed 1.", **keys):
    turn = {"observation": text, "response": text, "action": "look", "advantage": 0.5, "label": "good",
            "oracle": None, "verdicts": ["good", "bad"], "judge_reward": 0.5, "valid": True}
    return {"phase": "rl", "iteration": 0, "split": "train", "task_id": "train/0", "task_type": "pick",
            "group": 0, "won": won, "turns": [turn], "final_observation": text} | keys


def write_method(run, name, lines=(), success=None, stages=None, episodes=(), config=None, tail="",
                 about=None, parameters=184_768):
    folder = run / name
    folder.mkdir(parents=True)
    header = {"config": config or {}, "versions": {"python": "3.12", "torch": "2.13"}, "commit": "abc123",
              "parameters": parameters}
    text = "".join(json.dumps(row) + "\n" for row in [header, *lines])
    (folder / "metrics.jsonl").write_text(text + tail)
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    if success:
        splits = {split: {"sampled": {"success": p, "n": 256, "low": p - 0.1, "high": p + 0.1, "turns": 9.5},
                          "greedy": {"success": p}} for split, p in success.items()}
        evaluation = {"splits": splits, "games": "generated rooms"} | (about or {})
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
    if stages:
        (folder / "stages.json").write_text(json.dumps(stages))


class Page(HTMLParser):
    """Parses a page and collects its parts for the tests; fails on unbalanced tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.links, self.texts, self.tags, self.charts = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value[0] != "#"]
        self.charts += [json.loads(value) for name, value in attrs if name == "data-hover"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)


def build(run):
    """The report of a run folder: its summary, its parsed page, and the data for the page's script."""
    summary, _ = write(run, results=run / "no results")
    built = Page((run / "report.html").read_text(encoding="utf-8"))
    return summary, built, {"charts": built.charts, "episodes": json.loads(built.scripts[0])}


def rl_lines(n=12):
    return [{"phase": "rl", "iteration": i, "rollout/success": i / 20, "time/rollout_s": 2.0,
             "time/update_s": 1.0} for i in range(n)]


def test_summary_has_the_stored_numbers(tmp_path):
    write_method(tmp_path, "grpo", success={"L0": 0.5, "L2": 0.25}, stages={"rl": 10.0, "evaluation": 2.5},
                 about={"seconds": 1.5})                 # stages.json has those of all sessions
    write_method(tmp_path, "cold_start", success={"L0": 0.25}, stages={"cold_start": 4.0})
    build(tmp_path)

    def score(p):
        return {"success": p, "n": 256, "plays": 1, "low": p - 0.1, "high": p + 0.1}

    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "methods": {"cold_start": {"L0": score(0.25)}, "grpo": {"L0": score(0.5), "L2": score(0.25)}},
        "seconds": {"cold_start": 4.0, "cold_start/cold_start": 4.0,
                    "grpo": 12.5, "grpo/rl": 10.0, "grpo/evaluation": 2.5},
        "versions": {"python": "3.12", "torch": "2.13"}}


def test_the_cold_start_comes_first_and_the_others_by_name(tmp_path):
    for name in ("zeta", "grpo+gcd", "alpha", "grpo"):
        write_method(tmp_path, name, rl_lines(), success={"L0": 0.5})
    write_method(tmp_path, "cold_start", success={"L0": 0.5})
    (tmp_path / "notes").mkdir()                       # without metrics: not a method
    summary, page, _ = build(tmp_path)
    assert list(summary["methods"]) == ["cold_start", "alpha", "grpo", "grpo+gcd", "zeta"]
    text = " ".join(page.texts)
    assert all(name in text for name in summary["methods"])


def test_a_method_has_a_color_and_each_further_round_of_colors_a_mark(tmp_path):
    write_method(tmp_path, "start")
    for i in range(42):
        write_method(tmp_path, f"method{i:02}", rl_lines(2))
    tones = charts.tones(read.read_runs(tmp_path))
    assert tones["start"] == "tone-0" and len(set(tones.values())) == 43
    assert [tones[f"method{i:02}"] for i in (0, 5, 6, 11, 12, 41)] == [
        "tone-1", "tone-6", "tone-1 round-1", "tone-6 round-1", "tone-1 round-2", "tone-6 round-6"]
    write_method(tmp_path, "start, again")
    assert "tone-0" not in charts.tones(read.read_runs(tmp_path)).values()
    two = [run for run in read.read_runs(tmp_path) if not run.iterations]
    assert [*charts.tones(two).values()] == ["tone-1", "tone-2"]
    style = page.templates().get_template("style.css").render()
    names = [f"tone-{i}" for i in range(charts.TONES)] + [f"stage-{i}" for i in range(len(charts.STAGES))]
    assert all(f".{name} {{ --tone:" in style for name in names)
    marks = [re.search(rf"\.round-{i} {{ --solid: (\S+) }}", style)[1] for i in range(1, charts.ROUNDS)]
    assert len({*marks}) == charts.ROUNDS - 1 and f"round-{charts.ROUNDS}" not in style


def test_a_rounds_mark_is_on_its_dots_its_line_and_its_name(tmp_path):
    for i in range(7):
        write_method(tmp_path, f"method{i}", rl_lines(2))
    build(tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert '<i class="tone-1 round-1"></i>method6' in html and '<i class="tone-1"></i>method0' in html
    assert html.count('class="dots tone-1 round-1') == html.count('class="line tone-1 round-1') == 1


def test_page_needs_no_network(tmp_path):
    write_method(tmp_path, "grpo", rl_lines(), success={"L0": 0.5}, episodes=[episode()])
    _, page, _ = build(tmp_path)
    assert page.links == []
    assert "http" not in (tmp_path / "report.html").read_text()
    assert {"link", "img", "iframe"}.isdisjoint(page.tags)


def test_missing_keys_and_numbers_that_are_none(tmp_path):
    nan, inf = float("nan"), float("inf")
    lines = [{"phase": "rl", "iteration": 0, "rollout/success": nan, "policy/grad_norm": inf},
             {"phase": "rl", "iteration": 1, "rollout/success": 0.5, "judge/auc": None},
             {"phase": "rl", "iteration": 2}, {"rollout/success": 0.9}]
    write_method(tmp_path, "grpo", lines, episodes=[episode(iteration=nan), {"phase": "rl"}])
    summary, _, data = build(tmp_path)
    assert summary["methods"] == {"grpo": {}} and summary["seconds"] == {}
    assert [chart["series"] for chart in data["charts"]] == [
        [{"name": "grpo", "tone": "tone-1", "ys": [None, 50]}]]    # the others have no number
    assert data["episodes"][0]["iteration"] is None
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_the_games_own_score_is_a_column_where_any_is_known(tmp_path):
    for name, score in (("a", {}), ("b", {"score_100": 52.66})):
        scores = {"success": 0.5, "n": 4, "turns": 9.5, "invalid_frac": 0.25, "repeated_frac": 0} | score
        write_method(tmp_path, name, success={"L0": 0.5}, about={"splits": {"L0": {"sampled": scores}}})
        rows = tables.detail_rows(read.read_runs(tmp_path))
        assert ("score" in rows[0]) == bool(score)
    assert rows == [["method", "split", "sampled %", "invalid %", "repeated %", "turns", "score"],
                    ["a", "L0", "50.0", "25.0", "0.0", "9.5", "–"],
                    ["b", "L0", "50.0", "25.0", "0.0", "9.5", "52.7"]]
    assert "52.7" in build(tmp_path)[1].texts
    scores["score_100"] = "high"
    write_method(tmp_path, "c", success={"L0": 0.5}, about={"splits": {"L0": {"sampled": scores}}})
    with pytest.raises(ValueError, match="L0, sampled, score_100: expected a number"):
        read.read_runs(tmp_path)


def test_nan_in_the_evaluation_is_a_dash(tmp_path):
    write_method(tmp_path, "grpo", success={"L0": float("nan"), "L1": 0.5})
    summary, _, _ = build(tmp_path)
    assert summary["methods"]["grpo"]["L0"]["success"] is None
    assert "– [–, –]" in tables.table(summary)


def test_a_line_cut_short_is_left_out_with_a_note(tmp_path):
    write_method(tmp_path, "grpo", rl_lines(3), tail='{"iteration": 3, "roll')
    _, page, data = build(tmp_path)
    assert data["charts"][0]["xs"] == [0, 1, 2]
    assert "grpo/metrics.jsonl: line 5 is cut short" in " ".join(page.texts)


@pytest.mark.slow
def test_a_long_run_is_drawn_by_means(tmp_path):
    """A page of 10,000 iterations is as large as one of 500, of which 30 kB are the template's."""
    sizes = {}
    for n in (500, 10_000):
        lines = [{"iteration": i, "rollout/success": i / n, "policy/clip_frac": 1 if i % 32 == 5 else None,
                  "time/rollout_s": i / 100, "time/judge_s": 6.4 if i % 4 == 0 else None} for i in range(n)]
        write_method(tmp_path / str(n), "grpo", lines)
        _, built, data = build(tmp_path / str(n))
        sizes[n] = len((tmp_path / str(n) / "report.html").read_text()) - 30_000
    assert 0 < sizes[10_000] < 1.2 * sizes[500]
    assert "In a chart with a curve of more than 500 points a dot is the mean" in " ".join(built.texts)
    success, clipped, seconds = data["charts"]
    assert success["xs"] == [*range(0, 10_000, 32)] == seconds["xs"]                  # the last has 16
    assert success["series"][0]["ys"][:312] == pytest.approx([(x + 15.5) / 100 for x in range(0, 9984, 32)],
                                                             rel=1e-3)
    assert success["series"][0]["ys"][312] == pytest.approx((9984 + 7.5) / 100, rel=1e-3)
    assert {*clipped["series"][0]["ys"]} == {100}                                     # None is in no mean
    rollout, judge = (series["ys"] for series in seconds["series"])
    assert judge == [1.6] * 313 and rollout[1] == pytest.approx((32 + 15.5) / 100)    # of seconds it is 0


def test_means_of_a_curve():
    short = {0.5: 1.0, 0.25: None}                                       # as it is, in order
    assert charts.stretch_of([short]) == 0
    assert [*charts.averaged(short, 0).items()] == [(0.25, None), (0.5, 1.0)]
    points = {20 * i: i for i in range(600)}                             # steps of a cold start, 20 apart
    assert charts.stretch_of([short, points]) == 32
    found = charts.averaged(points, 32)
    assert 250 <= len(found) <= 500 and [*found] == sorted(found)
    assert [*found.items()][:3] == [(0, 0.5), (32, 2.5), (64, 4.0)]       # of 0, 20; 40, 60; 80
    assert set(charts.averaged(dict.fromkeys(range(900)), 2).values()) == {None}


@pytest.mark.slow
def test_a_short_and_a_long_run_have_values_at_the_same_iterations(tmp_path):
    for name, n in (("grpo", 400), ("ppo", 600)):
        write_method(tmp_path, name, [{"iteration": i, "rollout/success": 0.5} for i in range(n)])
    chart, = build(tmp_path)[2]["charts"]
    assert chart["xs"] == [*range(0, 600, 2)]
    assert [sum(y is not None for y in series["ys"]) for series in chart["series"]] == [200, 300]


def test_every_logged_number_has_a_chart(tmp_path):
    keys = [key for panel in charts.PANELS for key, _ in panel.curves if not key.startswith("cold_start/")]
    lines = [{"iteration": i, **dict.fromkeys(keys, 0.1), "policy/new_thing": 7.0} for i in range(3)]
    write_method(tmp_path, "grpo", lines)
    cold = [{"phase": "cold_start", "step": step, "cold_start/loss": 2.0} for step in (0, 10)]
    write_method(tmp_path, "cold_start", cold)
    _, page, data = build(tmp_path)
    assert len(data["charts"]) == len(charts.PANELS) + 1
    assert "policy/new_thing" in page.texts
    loss = next(chart for chart in data["charts"] if chart["x_name"] == "step")
    assert loss["xs"] == [0, 10] and loss["series"][0]["ys"] == [2, 2]


def test_stages_are_stacked(tmp_path):
    last = {"iteration": 2, "time/rollout_s": 3.0, "time/judge_s": 1.0, "time/iteration_s": 9.0,
            "time/rollout_device_s": 2.5, "time/game_ms": 120.0}     # parts of a stage, and no seconds
    write_method(tmp_path, "grpo", [*rl_lines(2), last])
    stages = charts.stage_seconds(read.read_runs(tmp_path)[0])
    assert stages == [("rollout", {0: 2.0, 1: 2.0, 2: 3.0}), ("judge", {0: 0.0, 1: 0.0, 2: 1.0}),
                      ("update", {0: 1.0, 1: 1.0, 2: 0.0})]
    build(tmp_path)
    html = (tmp_path / "report.html").read_text()
    areas = re.findall(r'class="area [^>]* d="([^"]*)"', html)
    heights = [[float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", area)] for area in areas]
    y = charts.Axes(0, 2, [0, 1, 2, 3, 4]).y
    assert heights[2][:3] == pytest.approx([y(3), y(3), y(4)], abs=0.06)   # the top line is the total
    assert heights[2][3:] == heights[1][:3][::-1] == pytest.approx([y(4), y(2), y(2)], abs=0.06)


@pytest.mark.slow
def test_episodes_fit_the_page_and_are_spread(tmp_path):
    episodes = [episode(iteration=i, text="x" * 20_000) for i in range(100) for _ in range(3)]
    episodes += [episode(phase="evaluation", split=split, text="x" * 20_000) for split in ("L0", "L1")]
    write_method(tmp_path, "grpo", episodes=episodes)
    _, page, data = build(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    assert {e["split"] for e in data["episodes"]} == {"train", "L0", "L1"}
    iterations = [e["iteration"] for e in data["episodes"] if e["phase"] == "rl"]
    assert iterations == sorted(iterations) and len(set(iterations)) == len(iterations) > 20
    assert max(b - a for a, b in zip([0, *iterations], [*iterations, 99])) <= 8
    assert f"{len(data['episodes'])} of 302 stored" in " ".join(page.texts)


def test_a_later_line_replaces_the_same_iteration(tmp_path):
    write_method(tmp_path, "grpo", [{"iteration": 0, "rollout/success": p} for p in (0.1, 0.2)])
    assert charts.curve(read.read_runs(tmp_path)[0], "rollout/success") == {0: 0.2}


def test_table_is_aligned(tmp_path):
    write_method(tmp_path, "grpo+gcd", success={"L0": 0.5, "L1": 1.0}, stages={"rl": 99.6})
    write_method(tmp_path, "grpo", success={"L0": 0.25})
    summary, _, _ = build(tmp_path)
    assert tables.table(summary).split("\n") == [
        "success %  L0 (n=256)         L1 (n=256)           seconds",
        "grpo       25.0 [15.0, 35.0]  –                    –",
        "grpo+gcd   50.0 [40.0, 60.0]  100.0 [90.0, 110.0]  100"]


def test_n_is_games_times_plays(tmp_path):
    """The interval is over games, so its n is the number of games."""
    for name, splits in (("grpo", {"L0": {"n": 1120, "plays": 8}, "L1": {"n": 256, "plays": 1}}),
                         ("older", {"L0": {"n": 134}})):
        about = {"splits": {split: {"sampled": scores} for split, scores in splits.items()}}
        write_method(tmp_path, name, success={"L0": 0.5}, about=about)
    summary = tables.summarize(read.read_runs(tmp_path))
    assert tables.split_heads(summary) == {"L0": "L0 (n=134/140 × 8)", "L1": "L1 (n=256)"}


def test_flags_that_differ_are_listed_and_no_others(tmp_path):
    write_method(tmp_path, "a", config={"algo": "grpo", "tasks": 4})
    write_method(tmp_path, "b", config={"algo": "ppo", "tasks": 4, "kl_coef": 0.1})
    assert tables.difference_rows(read.read_runs(tmp_path)) == [
        ["flag", "a", "b"], ["--algo", "grpo", "ppo"], ["--kl-coef", "–", "0.1"]]


def test_command_repeats_every_flag(tmp_path):
    config = {"group_size": 8, "gcd": False, "resume": True, "overwrite": True, "model": "a b", "out": None}
    write_method(tmp_path, "grpo", config=config)
    assert tables.command(read.read_runs(tmp_path)[0]) == (
        "python gcd.py --group-size=8 --no-gcd '--model=a b'")


@pytest.mark.parametrize("flags", ["", "--no-gcd --iterations 0 --dagger 64", "--algo ppo --kl loss",
                                   "--algo rlvmr --judge-kind value",
                                   "--env lab/envs/twins.py --max-turns 1"])
def test_the_command_is_accepted_and_repeats_the_run(tmp_path, flags):
    settings = config.parse(flags.split())
    write_method(tmp_path, "grpo", config=settings.settings())
    argv = shlex.split(tables.command(read.read_runs(tmp_path)[0]))
    assert argv[:2] == ["python", "gcd.py"]
    assert config.parse(argv[2:]).settings() == settings.settings()


def test_a_run_of_an_old_version_has_its_command(tmp_path):
    write_method(tmp_path, "grpo", config={"algo": "gone", "env": "none", "long_gone": 3, "a;b": 1})
    assert tables.command(read.read_runs(tmp_path)[0]) == (
        "python gcd.py --algo=gone --env=none --long-gone=3 '--a;b=1'")


@pytest.mark.parametrize("lost", [[], [5], [0, 100], range(140), range(1, 140)])
def test_twelve_episodes_of_a_split_are_stored_with_a_win_and_a_loss(lost):
    episodes = [SimpleNamespace(won=k not in lost, k=k) for k in range(140)]
    stored = examples(episodes)
    assert [episode.k for episode in stored[:-1]] == [k * 140 // 12 for k in range(11)] and len(stored) == 12
    assert {episode.won for episode in stored} == {episode.won for episode in episodes}
    assert examples(episodes[:1]) == episodes[:1] and examples([]) == []


def test_stored_episodes_are_spread_over_any_number():
    episodes = [SimpleNamespace(won=k < 5, k=k) for k in range(23)]
    assert [episode.k for episode in examples(episodes)] == [0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21]


@pytest.mark.parametrize("low, high, expected", [
    (0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 97, [0, 25, 50, 75, 100]), (0.0, 4.0, [0, 1, 2, 3, 4]),
    (3, 3, [3, 4]), (-0.1, 0.3, [-0.1, 0, 0.1, 0.2, 0.3]), (0, 0, [0, 0.25]),
    (0, 3e-7, [0, 1e-7, 2e-7, 3e-7]), (-0.14, -0.12, [-0.14, -0.135, -0.13, -0.125, -0.12])])
def test_ticks(low, high, expected):
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_smooth():
    assert charts.smooth([0, 3, 6, None, 2]) == [1.5, 3, 4.5, None, 2]
    assert charts.smooth([]) == []
    assert charts.smooth([5.0] * 300) == pytest.approx([5.0] * 300)
    assert charts.smooth([0] * 50 + [1] + [0] * 50) == pytest.approx([0] * 48 + [1 / 5] * 5 + [0] * 48)


def test_charts_have_room_for_every_run_and_for_zero(tmp_path):
    """Those of seconds have one scale."""
    for name, first, seconds in (("a", 3, 1), ("b", 0, 40)):
        write_method(tmp_path, name, [{"iteration": i, "policy/grad_norm": 99.0, "time/update_s": seconds}
                                      for i in range(first, first + 3)])
    runs = read.read_runs(tmp_path)
    (axes,) = (chart.axes for chart in charts.panel_charts(charts.PANELS, runs))
    assert (axes.x_low, axes.x_high, axes.y_ticks) == (0, 5, [0, 25, 50, 75, 100])
    assert [chart.axes.y_ticks[-1] for chart in charts.time_charts(runs)] == [40, 40]
    write_method(tmp_path, "c", [{"iteration": 0, "time/update_s": 50}])       # an area without a width
    assert len(charts.time_charts(read.read_runs(tmp_path))) == 2


def test_ticks_below_a_chart_are_integers_within_it():
    assert [label for _, label in charts.Axes(0, 9, [0, 1]).columns] == ["0", "5"]      # of 0, 2.5, ..., 10


def test_a_line_is_interrupted_where_a_number_is_missing():
    path = charts.line_path(charts.Axes(0, 3, [0, 1]), [0, 1, 2, 3], [0, None, 1, 0])
    assert re.findall("[A-Z]", path) == ["M", "M", "L"]


def test_an_interval_ends_at_0_and_1():
    score = {"success": 0.5, "low": -0.1, "high": 1.1}
    assert charts.bounded(score) == {"success": 0.5, "low": 0, "high": 1}


CAPTIONS = {"captions": {"L0": "rooms it knows", "L2": "<i>new</i> rooms", "dev": "not evaluated"},
            "note": "The cold start sees all.", "warning": "These are no scores."}


def test_captions_are_those_of_the_run(tmp_path):
    for name in ("grpo", "grpo+gcd"):
        write_method(tmp_path, name, rl_lines(), success={"L0": 0.5, "L2": 0.25}, about=CAPTIONS)
    _, caption = write(tmp_path, results=tmp_path / "no results")
    assert caption == ["L0: rooms it knows. L2: <i>new</i> rooms.", "The cold start sees all.",
                       "These are no scores."]
    built = Page((tmp_path / "report.html").read_text())
    text = " ".join(built.texts)
    assert built.texts.count("These are no scores.") == 1
    assert "rooms it knows" in text and "<i>new</i> rooms" in text and "The cold start sees all." in text
    assert "not evaluated" not in text


def test_captions_that_differ_have_the_names_of_their_runs(tmp_path):
    for name, text in (("grpo", "rooms"), ("ppo", "games"), ("rloo", "rooms"), ("cispo", "")):
        about = {"captions": {"L0": text, "L1": "unseen"}}
        write_method(tmp_path, name, rl_lines(), success={"L0": 0.5}, about=about)
    assert write(tmp_path, results=tmp_path)[1] == ["L0: rooms (grpo, rloo); games (ppo)."]


def test_runs_that_were_evaluated_differently_say_how(tmp_path):
    for name, protocol, turns in (("grpo", "eight", 30), ("ppo", "verl-agent", 50), ("old", None, None)):
        write_method(tmp_path, name, rl_lines(), success={"L0": 0.5},
                     about={"protocol": protocol, "max_turns": turns})
    sentence = ("Evaluation differs: grpo by eight at temperature 1.0 in 30 turns, old by an unknown "
                "protocol in unknown turns, ppo by verl-agent at temperature 0.4 in 50 turns.")
    assert write(tmp_path, results=tmp_path)[1] == [sentence]
    assert sentence in " ".join(Page((tmp_path / "report.html").read_text()).texts)


def test_an_iteration_that_was_not_completed_does_not_count(tmp_path):
    labels = {"phase": "labels", "iteration": len(rl_lines()), "judge/asked": 3}
    write_method(tmp_path, "grpo", [*rl_lines(), labels], config={"iterations": 99})
    (run,) = read.read_runs(tmp_path)
    assert run.iterations == {line["iteration"] for line in rl_lines()}


def test_captions_at_the_head_of_the_metrics_are_used_too(tmp_path):
    write_method(tmp_path, "grpo", success={"L0": 0.5})
    path = tmp_path / "grpo" / "metrics.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | CAPTIONS) + "\n")
    assert write(tmp_path, results=tmp_path)[1] == [
        "L0: rooms it knows.", "The cold start sees all.", "These are no scores."]


def test_a_metric_that_is_not_logged_is_not_drawn(tmp_path):
    write_method(tmp_path, "ppo", rl_lines())
    _, built, _ = build(tmp_path)
    text = " ".join(built.texts)
    assert "Success in training" in text and "Groups without variance" not in text


# Over several seeds

def write_table(folder, name="table1_x", games="generated rooms", scores=None, seeds=5, common=(),
                rows=("grpo", "ppo"), parameters=185_024, **about):
    """A table of lab/results and its results."""
    folder.mkdir(parents=True, exist_ok=True)
    score = {"mean": 0.593, "half": 0.058, "n": [256], "seeds": dict.fromkeys(map(str, range(seeds)), 0.593)}
    flags = {"grpo": ["--no-gcd"], "ppo": ["--algo", "ppo"], "grpo+gcd": []}
    table = {"benchmark": "household", "games": "", "common": [*common], "cold_starts": {"cold_start": []},
             "runs": [{"train_types": "part", "splits": ["L0", "L1"]}],
             "rows": {row: {"start": "cold_start", "flags": flags[row]} for row in rows}}
    result = {"seeds": [*range(seeds)], "ran": {"games": [games], "parameters": {"grpo": [parameters]}},
              "rows": {row: {"L0": score | (scores or {}), "L1": score} for row in ("cold_start", *rows)}}
    (folder / f"{name}.json").write_text(json.dumps(table | about))
    (folder / f"{name}_result.json").write_text(json.dumps(result))


def write_run(folder, name, *flags, start="", success=("L0",), **about):
    """A run with the settings that gcd.py has by these flags, evaluated on the splits `success`. start: the
    cold start that it begins from.
    """
    started = ["--demonstrations", "0"] if start else ["--iterations", "0"]
    settings = config.parse([*started, *flags, "--seed", "10", "--out", f"runs/here/{name}"]).settings()
    settings |= {"model": f"runs/here/{start}/checkpoint"} if start else {}
    write_method(folder, name, rl_lines() if start else (), dict.fromkeys(success, 0.5), config=settings,
                 about=about)


def seeds_of(folder, results):
    """The results over several seeds of a run folder."""
    return read.read_seeds(read.read_runs(folder), results)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["default", "alfworld_hour"])
def test_results_over_seeds_of_run_sh_are_of_the_table_that_it_repeats(tmp_path, table):
    """Of any seed; settings as lab.bench derives them from the table, which are run.sh's (test_run_sh.py)."""
    expected = json.loads((RESULTS / f"table1_{table}_result.json").read_text())["rows"]
    cells = [cell for cell in cells_of(read_config(RESULTS / f"table1_{table}.json"))
             if cell.seed == 0 and cell.row in ("cold_start", "grpo", "grpo+gcd")]
    scores = {}
    for cell in cells:
        settings = config.parse(cell.arguments).settings() | {"seed": 10}
        n = {split: expected[cell.row][split]["n"][0] for split in cell.splits}
        plays = 8 if settings["protocol"] == "eight" else 1
        about = {"protocol": settings["protocol"], "games": "real ALFWorld games, household engine",
                 "splits": {split: {"sampled": {"success": 0.5, "n": n[split], "plays": plays}}
                            for split in cell.splits}} | ({} if plays == 8 else {"games": "generated rooms"})
        write_method(tmp_path, cell.folder.name, () if cell.cold else rl_lines(), {"L0": 0.5},
                     config=settings, about=about, parameters=246_976 if plays == 1 else 553_920)
        scores[cell.folder.name] = {split: {key: expected[cell.row][split][key] for key in ("mean", "half")}
                                    | {"seeds": 5} for split in cell.splits}
    seeds = seeds_of(tmp_path, RESULTS)
    assert (seeds.file, seeds.count) == (f"lab/results/table1_{table}_result.json", "5")
    assert seeds.scores == scores and len(scores) == (3 if table == "default" else 5)


@pytest.mark.slow
def test_results_over_several_seeds_are_given_next_to_one(tmp_path):
    write_table(tmp_path / "lab" / "results")
    write_run(tmp_path / "run", "cold_start", success=("L0", "L2"))
    write_run(tmp_path / "run", "grpo", "--no-gcd", start="cold_start", success=("L0", "L2"))
    write_run(tmp_path / "run", "grpo+gcd", start="cold_start")
    _, caption = write(tmp_path / "run", results=tmp_path / "lab" / "results")
    assert caption == ["One seed, in which the order of the methods means little. Mean of 5 seeds at the "
                       "settings of lab/results/table1_x_result.json on L0 (± half the 95 % CI): "
                       "cold_start 59.3 ± 5.8, grpo 59.3 ± 5.8."]
    text = " ".join(Page((tmp_path / "run" / "report.html").read_text()).texts)
    assert "5 seeds: 59.3 ± 5.8" in text and "lab/results/table1_x_result.json" in text


@pytest.mark.slow
@pytest.mark.parametrize("table", [
    {"games": "real games"}, {"parameters": 246_976}, {"name": "table4_x"}, {"rows": ("ppo",)},
    {"common": ["--lr", "1e-3"]}, {"common": ["--no-such-flag"]}, {"scores": {"mean": None}},
    {"scores": {"n": [48]}},
    {"runs": [{"train_types": "part", "splits": ["L2"]}]},
    {"runs": [{"train_types": "all", "splits": ["L0"]}]}, {"cold_starts": {"cold_start": ["--dagger", "9"]}},
    {"cold_starts": {"cold_start": ["--model", "smollm2"]}}])
def test_results_of_other_games_or_settings_are_not_given(tmp_path, table):
    write_table(tmp_path / "lab" / "results", **table)
    write_run(tmp_path / "run", "cold_start")
    write_run(tmp_path / "run", "grpo", "--no-gcd", start="cold_start")
    seeds = seeds_of(tmp_path / "run", tmp_path / "lab" / "results")
    assert seeds is None or "grpo" not in seeds.scores
    assert "grpo 5" not in " ".join(write(tmp_path / "run", results=tmp_path / "lab" / "results")[1])


@pytest.mark.parametrize("flags, start, there", [
    ([], "cold_start", ["cold_start", "grpo"]), (["--lr", "1e-3"], "cold_start", ["cold_start"]),
    (["--hidden-size", "96"], "cold_start", ["cold_start"]), ([], "another", ["cold_start"]),
    (["--slots", "8", "--evaluate", "L0"], "cold_start", ["cold_start", "grpo"])])
def test_results_over_seeds_are_of_runs_with_a_rows_settings_and_cold_start(tmp_path, flags, start, there):
    write_table(tmp_path / "lab" / "results")
    write_run(tmp_path / "run", "cold_start")
    write_run(tmp_path / "run", "another", "--demonstrations", "9")
    write_run(tmp_path / "run", "grpo", "--no-gcd", *flags, start=start)
    assert [*seeds_of(tmp_path / "run", tmp_path / "lab" / "results").scores] == there


@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": 3}])
def test_a_run_whose_beginning_is_not_known_has_no_results_over_seeds(tmp_path, model):
    write_table(tmp_path / "lab" / "results")
    settings = config.parse(["--no-gcd", "--demonstrations", "0"]).settings()
    del settings["model"]
    write_method(tmp_path / "run", "grpo", rl_lines(), {"L0": 0.5}, config=settings | model)
    assert seeds_of(tmp_path / "run", tmp_path / "lab" / "results") is None


@pytest.mark.parametrize("start, there", [("cold_start", True), ("another", False), ("", False)])
def test_a_cold_start_that_is_not_in_the_report_counts_by_its_name(tmp_path, start, there):
    write_table(tmp_path / "lab" / "results")
    write_run(tmp_path / "run", "grpo", "--no-gcd", start=start)
    found = seeds_of(tmp_path / "run", tmp_path / "lab" / "results")
    assert (found is not None) == there


def test_results_over_seeds_are_of_the_table_with_most_of_the_runs_and_then_most_seeds(tmp_path):
    results = tmp_path / "lab" / "results"
    for name, seeds, rows in (("a", 9, ()), ("b", 3, ("grpo",)), ("c", 4, ("grpo",)), ("d", 4, ("grpo",)),
                              ("e", 9, ("grpo+gcd",))):
        write_table(results, f"table1_{name}", seeds=seeds, rows=rows)
    write_run(tmp_path / "run", "cold_start")
    assert seeds_of(tmp_path / "run", results).file.endswith("table1_a_result.json")
    write_run(tmp_path / "run", "grpo", "--no-gcd", start="cold_start")
    assert seeds_of(tmp_path / "run", results).file.endswith("table1_c_result.json")


@pytest.mark.parametrize("protocol, plays, n, there", [
    ("eight", 8, [256], True), ("sampled", 1, [256, 2048], True), ("sampled", 1, [512], False),
    ("rlvmr", 1, [256], False)])
def test_results_over_seeds_are_of_every_game_once_at_least(tmp_path, protocol, plays, n, there):
    write_table(tmp_path / "lab" / "results", scores={"n": n})
    scores = {"success": 0.5, "n": 256 * plays, "plays": plays}
    write_run(tmp_path / "run", "cold_start", "--protocol", protocol, protocol=protocol,
              splits={"L0": {"sampled": scores}})
    assert (seeds_of(tmp_path / "run", tmp_path / "lab" / "results") is not None) == there


def test_a_run_that_was_not_evaluated_has_no_results_over_seeds(tmp_path):
    write_table(tmp_path / "lab" / "results")
    write_run(tmp_path / "run", "cold_start", success=())
    write_run(tmp_path / "run", "grpo", "--no-gcd", start="cold_start", success=())
    assert write(tmp_path / "run", results=tmp_path / "lab" / "results")[1] == []


@pytest.mark.slow
def test_a_run_that_was_set_aside_is_read_if_it_is_named(tmp_path):
    for name in ("grpo", "grpo.old-1"):
        write_method(tmp_path / "runs", name, rl_lines(), {"L0": 0.5})
    write_method(tmp_path / "runs", "grpo.old-prompt", rl_lines(), {"L0": 0.5})
    assert [*write(tmp_path / "runs")[0]["methods"]] == ["grpo", "grpo.old-prompt"]
    assert [*write(tmp_path / "runs" / "grpo.old-1")[0]["methods"]] == ["grpo.old-1"]


@pytest.mark.slow
def test_a_methods_own_folder_is_read_alone(tmp_path, monkeypatch):
    for name in ("grpo", "ppo"):
        write_method(tmp_path / "runs", name, rl_lines(), {"L0": 0.5})
    assert [*write(tmp_path / "runs" / "ppo")[0]["methods"]] == ["ppo"]
    assert (tmp_path / "runs" / "ppo" / "report.html").is_file()
    monkeypatch.chdir(tmp_path / "runs" / "ppo")
    assert [*write(Path("."))[0]["methods"]] == ["ppo"]


def test_a_resumed_run_has_its_last_settings(tmp_path):
    write_method(tmp_path / "runs", "grpo", rl_lines())
    path = tmp_path / "runs" / "grpo" / "metrics.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        for torch in ("2.14", "2.14", "2.13"):
            file.write(json.dumps(first | {"config": first["config"] | {"iterations": 77}, "commit": "def456",
                                           "versions": first["versions"] | {"torch": torch}}) + "\n")
    run, = read.read_runs(tmp_path / "runs")
    assert run.header["config"]["iterations"] == 77 and run.header.keys() == first.keys()
    summary, _ = write(tmp_path / "runs")
    text = (tmp_path / "runs" / "report.html").read_text(encoding="utf-8")
    assert "of 77 iterations)" in text and "abc123, def456" in text
    assert "python 3.12, torch 2.13 / 2.14<" in text
    assert summary["versions"] == {"python": "3.12", "torch": "2.13 / 2.14"}


def test_user_errors_name_the_folder(tmp_path, capsys):
    with pytest.raises(ValueError, match="missing: no such folder"):
        write(tmp_path / "missing")
    (tmp_path / "empty" / "grpo").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty: no metrics in it"):
        write(tmp_path / "empty")
    assert main([str(tmp_path / "missing")]) == 2
    assert capsys.readouterr().err == f"report: {tmp_path / 'missing'}: no such folder\n"
    write_method(tmp_path / "broken", "grpo")
    (tmp_path / "broken" / "grpo" / "evaluation.json").write_text('{"splits": ')
    with pytest.raises(ValueError, match="evaluation.json: not JSON"):
        write(tmp_path / "broken")


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path, capsys):
    write_method(tmp_path, "grpo", success={"L0": 0.5})
    (tmp_path / "report.html").mkdir()
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r"report: .*report\.html.*: .*directory\n", capsys.readouterr().err)


@pytest.mark.parametrize("low, high", [(2e-323, 2e-323), (0.0, 0.0), (0.0, 1e-323), (-5.0, -5.0), (0, 1e99)])
def test_ticks_enclose_the_smallest_and_the_largest_numbers(low, high):
    found = charts.ticks(low, high)
    assert found[0] <= low <= high <= found[-1] * (1 + 1e-9) and len(found) < 9


@pytest.mark.parametrize("file, content, message", [
    ("evaluation.json", [], "evaluation.json: expected an object, found []"),
    ("evaluation.json", {"splits": []}, "evaluation.json, splits: expected an object, found []"),
    ("evaluation.json", {"splits": {"L0": 1}}, "evaluation.json, L0: expected an object, found 1"),
    ("evaluation.json", {"splits": {"L0": {"sampled": None}}},
     "evaluation.json, L0, sampled: expected an object, found null"),
    ("evaluation.json", {"splits": {"L0": {"sampled": {"success": "0.5"}}}},
     'evaluation.json, L0, sampled, success: expected a number, found "0.5"'),
    ("evaluation.json", {"captions": "L0"}, 'evaluation.json, captions: expected an object, found "L0"'),
    ("evaluation.json", {"captions": {"L0": 3}}, "evaluation.json, captions, L0: expected text, found 3"),
    ("evaluation.json", {"games": ["rooms"]}, 'evaluation.json, games: expected text, found ["rooms"]'),
    ("evaluation.json", {"protocol": ["full"]}, 'evaluation.json, protocol: expected text, found ["full"]'),
    ("evaluation.json", {"max_turns": [20]}, "evaluation.json, max_turns: expected a number, found [20]"),
    ("evaluation.json", {"temperature": 10**400},
     f"evaluation.json, temperature: expected a number, found 1{'0' * 56}..."),
    ("stages.json", {"rl": "10"}, 'stages.json, rl: expected a number, found "10"'),
    ("metrics.jsonl", [1], "metrics.jsonl, entry 1: expected an object, found [1]"),
    ("metrics.jsonl", {"config": []}, "metrics.jsonl, entry 1, config: expected an object, found []"),
    ("metrics.jsonl", {"iteration": 1, "policy/loss": "0.5"},
     'metrics.jsonl, entry 1, policy/loss: expected a number, found "0.5"'),
    ("metrics.jsonl", {"iteration": True},
     "metrics.jsonl, entry 1, iteration: expected a number, found true"),
    ("episodes.jsonl", {"turns": {}}, "episodes.jsonl, entry 1, turns: expected a list, found {}"),
    ("episodes.jsonl", {"turns": ["look"]},
     'episodes.jsonl, entry 1, turn 1: expected an object, found "look"'),
    ("episodes.jsonl", {"turns": [{"advantage": "1"}]},
     'episodes.jsonl, entry 1, turn 1, advantage: expected a number, found "1"'),
    ("episodes.jsonl", {"turns": [{"reward": []}]},
     "episodes.jsonl, entry 1, turn 1, reward: expected a number, found []"),
    ("episodes.jsonl", {"reward": "1"}, 'episodes.jsonl, entry 1, reward: expected a number, found "1"'),
    ("episodes.jsonl", {"phase": ["rl"]}, 'episodes.jsonl, entry 1, phase: expected text, found ["rl"]')])
def test_a_malformed_file_is_an_error_of_one_line(tmp_path, capsys, file, content, message):
    write_method(tmp_path, "grpo", rl_lines())
    (tmp_path / "grpo" / file).write_text(json.dumps(content) + "\n")
    assert main([str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"report: {tmp_path / 'grpo'}/{message}\n")
    assert not (tmp_path / "report.html").exists()


def test_huge_numbers_are_not_drawn(tmp_path):
    values = (1e308, 10**400, -1e308, 1.0, 1.234)
    lines = [{"iteration": i, "policy/grad_norm": value} for i, value in enumerate(values)]
    write_method(tmp_path, "grpo", lines)
    assert build(tmp_path)[2]["charts"][0]["series"][0]["ys"] == [None, None, None, 1.0, 1.234]


@pytest.mark.slow
def test_open_opens_the_page(tmp_path, capsys, monkeypatch):
    write_method(tmp_path, "grpo", rl_lines())
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    main([str(tmp_path)])
    assert opened == []
    assert main([str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "report.html").as_uri()] and capsys.readouterr().err == ""
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert main([str(tmp_path), "--open"]) == 0
    assert f"open {tmp_path / 'report.html'} yourself" in capsys.readouterr().err


def test_the_default_folder_is_runs_main(tmp_path, monkeypatch):
    write_method(tmp_path / "runs" / "main", "grpo", rl_lines())
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0 and (tmp_path / "runs" / "main" / "report.html").exists()
