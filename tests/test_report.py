"""report.py: what it reads, the numbers it passes on, and a page that no episode text can break.

    python -m pytest tests/test_report.py
"""

import json
import re
from html.parser import HTMLParser

import pytest

import report

pytestmark = pytest.mark.fast

HOSTILE = '</script><script>alert(1)</script><!-- <b>&amp; "quotes" \u2028 \ud800 "'
VOID = {"meta", "link", "br", "img", "input", "hr"}


def episode(won=True, text="You see a bed 1.", **keys):
    turn = {"observation": text, "response": text, "action": "look", "advantage": 0.5, "label": "good",
            "oracle": None, "verdicts": ["good", "bad"], "judge_reward": 0.5, "valid": True}
    return {"phase": "rl", "iteration": 0, "split": "train", "task_id": "train/0", "task_type": "pick",
            "group": 0, "won": won, "turns": [turn], "final_observation": text, "return": 1.0} | keys


def write_method(run, name, lines=(), success=None, stages=None, episodes=(), config=None, tail=""):
    folder = run / name
    folder.mkdir(parents=True)
    header = {"config": config or {}, "versions": {"python": "3.12", "torch": "2.13"}, "commit": "abc123"}
    text = "".join(json.dumps(row) + "\n" for row in [header, *lines])
    (folder / "metrics.jsonl").write_text(text + tail)
    (folder / "episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in episodes))
    if success:
        splits = {split: {"sampled": {"success": p, "n": 256, "low": p - 0.1, "high": p + 0.1, "turns": 9.5},
                          "greedy": {"success": p}} for split, p in success.items()}
        (folder / "evaluation.json").write_text(json.dumps({"splits": splits, "games": "generated rooms"}))
    if stages:
        (folder / "stages.json").write_text(json.dumps(stages))


class Page(HTMLParser):
    """Collects what the tests ask of a page; fails on a tag that closes what is not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.scripts, self.links, self.words, self.tags = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)


def build(run):
    summary = report.report(run)
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    return summary, page, json.loads(page.scripts[0])


def rl_lines(n=12):
    return [{"phase": "rl", "iteration": i, "rollout/success": i / 20, "time/rollout_s": 2.0,
             "time/update_s": 1.0} for i in range(n)]


def test_summary_has_exactly_the_stored_numbers(tmp_path):
    write_method(tmp_path, "grpo", success={"L0": 0.5, "L2": 0.25}, stages={"rl": 10.0, "evaluation": 2.5})
    write_method(tmp_path, "cold_start", success={"L0": 0.25}, stages={"cold_start": 4.0})
    build(tmp_path)
    def score(p):
        return {"success": p, "n": 256, "low": p - 0.1, "high": p + 0.1}
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "methods": {"cold_start": {"L0": score(0.25)}, "grpo": {"L0": score(0.5), "L2": score(0.25)}},
        "seconds": {"cold_start": 4.0, "cold_start/cold_start": 4.0,
                    "grpo": 12.5, "grpo/rl": 10.0, "grpo/evaluation": 2.5},
        "versions": {"python": "3.12", "torch": "2.13"}}


def test_methods_come_in_their_order_and_others_after(tmp_path):
    for name in ("zeta", "grpo+gcd", "alpha", "grpo", "cold_start"):
        write_method(tmp_path, name, success={"L0": 0.5})
    (tmp_path / "notes").mkdir()                       # no metrics in it: not a method
    summary, page, _ = build(tmp_path)
    assert list(summary["methods"]) == ["cold_start", "grpo", "grpo+gcd", "alpha", "zeta"]
    words = " ".join(page.words)
    assert all(name in words for name in summary["methods"])
    assert "not ALFWorld scores" in words


def test_page_needs_no_network(tmp_path):
    write_method(tmp_path, "grpo", rl_lines(), success={"L0": 0.5}, episodes=[episode()])
    _, page, _ = build(tmp_path)
    assert page.links == []
    assert "http" not in (tmp_path / "report.html").read_text()
    assert {"link", "img", "iframe"}.isdisjoint(page.tags)


def test_hostile_text_stays_text(tmp_path):
    config = {"model": HOSTILE.replace("\ud800", ""), "cold_start_types": "<em>all</em>"}
    lines = [{"phase": "rl", "iteration": 0, "<b>/x": 1.0}]
    write_method(tmp_path, "grpo", lines, success={"<u>L0": 0.5}, config=config,
                 episodes=[episode(text=HOSTILE, task_id=HOSTILE)])
    write_method(tmp_path, "<s>", lines)
    _, page, data = build(tmp_path)
    assert page.tags.count("script") == 2
    assert {"em", "u", "s"}.isdisjoint(page.tags)
    assert data["episodes"][0]["turns"][0]["observation"] == HOSTILE
    assert data["episodes"][0]["task_id"] == HOSTILE


def test_missing_keys_and_numbers_that_are_none(tmp_path):
    nan, inf = float("nan"), float("inf")
    lines = [{"phase": "rl", "iteration": 0, "rollout/success": nan, "policy/grad_norm": inf},
             {"phase": "rl", "iteration": 1, "rollout/success": 0.5, "judge/auc": None},
             {"phase": "rl", "iteration": 2}, {"rollout/success": 0.9}]
    write_method(tmp_path, "grpo", lines, episodes=[episode(**{"return": nan}), {"phase": "rl"}])
    summary, _, data = build(tmp_path)
    assert summary["methods"] == {"grpo": {}} and summary["seconds"] == {}
    assert [chart["series"] for chart in data["charts"]] == [
        [{"name": "grpo", "colour": "#0072b2", "ys": [None, 50]}]]    # the others have no number
    assert data["episodes"][0]["return"] is None
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_nan_in_the_evaluation_is_a_dash(tmp_path):
    write_method(tmp_path, "grpo", success={"L0": float("nan"), "L1": 0.5})
    summary, _, _ = build(tmp_path)
    assert summary["methods"]["grpo"]["L0"]["success"] is None
    assert "– [–, –]" in report.table(summary)


def test_a_line_cut_short_is_left_out_and_said(tmp_path):
    write_method(tmp_path, "grpo", rl_lines(3), tail='{"iteration": 3, "roll')
    _, page, data = build(tmp_path)
    assert data["charts"][0]["xs"] == [0, 1, 2]
    assert "grpo/metrics.jsonl: line 5 is cut short" in " ".join(page.words)


def test_every_logged_number_has_a_chart(tmp_path):
    keys = [key for panel in report.PANELS for key, _ in panel.curves if not key.startswith("cold_start/")]
    lines = [{"iteration": i, **dict.fromkeys(keys, 0.1), "policy/new_thing": 7.0} for i in range(3)]
    write_method(tmp_path, "grpo", lines)
    cold = [{"phase": "cold_start", "step": step, "cold_start/loss": 2.0} for step in (0, 10)]
    write_method(tmp_path, "cold_start", cold)
    _, page, data = build(tmp_path)
    assert len(data["charts"]) == len(report.PANELS) + 1
    assert "policy/new_thing" in page.words
    loss = next(chart for chart in data["charts"] if chart["x_name"] == "step")
    assert loss["xs"] == [0, 10] and loss["series"][0]["ys"] == [2, 2]


def test_stages_are_stacked(tmp_path):
    last = {"iteration": 2, "time/rollout_s": 3.0, "time/judge_s": 1.0, "time/iteration_s": 9.0}
    write_method(tmp_path, "grpo", [*rl_lines(2), last])
    stages = report.stage_series(report.read_runs(tmp_path)[0])
    assert stages == [("rollout", {0: 2.0, 1: 2.0, 2: 3.0}), ("judge", {0: 0.0, 1: 0.0, 2: 1.0}),
                      ("update", {0: 1.0, 1: 1.0, 2: 0.0})]
    build(tmp_path)
    html = (tmp_path / "report.html").read_text()
    areas = re.findall(r'class="area"[^>]* d="([^"]*)"', html)
    heights = [[float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", area)] for area in areas]
    y = report.Axes(0, 2, [0, 1, 2, 3, 4]).y
    assert heights[2][:3] == pytest.approx([y(3), y(3), y(4)], abs=0.06)              # the roof is the total
    assert heights[2][3:] == heights[1][:3][::-1] == pytest.approx([y(4), y(2), y(2)], abs=0.06)


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
    assert f"{len(data['episodes'])} of 302 stored" in " ".join(page.words)


def test_a_later_line_replaces_the_same_iteration(tmp_path):
    write_method(tmp_path, "grpo", [{"iteration": 0, "rollout/success": p} for p in (0.1, 0.2)])
    assert report.curve(report.read_runs(tmp_path)[0], "rollout/success") == {0: 0.2}


def test_table_is_aligned(tmp_path):
    write_method(tmp_path, "grpo+gcd", success={"L0": 0.5, "L1": 1.0}, stages={"rl": 99.6})
    write_method(tmp_path, "grpo", success={"L0": 0.25})
    summary, _, _ = build(tmp_path)
    assert report.table(summary).split("\n") == [
        "success %  L0 (n=256)         L1 (n=256)           seconds",
        "grpo       25.0 [15.0, 35.0]  –                    –",
        "grpo+gcd   50.0 [40.0, 60.0]  100.0 [90.0, 110.0]  100"]


def test_command_repeats_every_flag(tmp_path):
    config = {"group_size": 8, "gcd": False, "resume": True, "model": "a b", "out": None}
    write_method(tmp_path, "grpo", config=config)
    assert report.command(report.read_runs(tmp_path)[0]) == (
        "python gcd.py --group-size=8 --no-gcd --resume --model='a b'")


@pytest.mark.parametrize("low, high, expected", [
    (0, 1, [0, 0.25, 0.5, 0.75, 1]), (0, 97, [0, 25, 50, 75, 100]), (0.0, 4.0, [0, 1, 2, 3, 4]),
    (3, 3, [3, 4]), (-0.1, 0.3, [-0.1, 0, 0.1, 0.2, 0.3]), (0, 0, [0, 0.25]), (0, 3e-7, [0, 1e-7, 2e-7, 3e-7])])
def test_ticks(low, high, expected):
    assert report.ticks(low, high) == pytest.approx(expected)


def test_smooth():
    assert report.smooth([0, 3, 6, None, 2]) == [1.5, 3, 4.5, None, 2]
    assert report.smooth([]) == []
    assert report.smooth([5.0] * 300) == pytest.approx([5.0] * 300)


def test_user_mistakes_name_the_folder(tmp_path, capsys):
    with pytest.raises(ValueError, match="missing: no such folder"):
        report.report(tmp_path / "missing")
    (tmp_path / "empty" / "grpo").mkdir(parents=True)
    with pytest.raises(ValueError, match="empty: no metrics in it"):
        report.report(tmp_path / "empty")
    with pytest.raises(SystemExit, match="report.py: .*missing: no such folder"):
        report.main([str(tmp_path / "missing")])
    write_method(tmp_path / "broken", "grpo")
    (tmp_path / "broken" / "grpo" / "evaluation.json").write_text('{"splits": ')
    with pytest.raises(ValueError, match="evaluation.json: not JSON"):
        report.report(tmp_path / "broken")


def test_main_prints_the_table(tmp_path, capsys):
    write_method(tmp_path, "grpo", rl_lines(), success={"L0": 0.5})
    report.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert "50.0 [40.0, 60.0]" in printed and str(tmp_path / "report.html") in printed
