"""Tests of `python -m report compare`: arithmetic, evaluations that differ, texts that are hostile.

    python -m pytest tests/report/test_compare.py
"""

import json
import math

import pytest
from test_report import Page

import envs.household
import evaluation
from envs.alfred import rooms
from report import compare
from report.__main__ import main


def write(path, games, episodes=(), **changes):
    """An evaluation.json of split L1: games is {game: {mode: digits}}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"game": game, "type": "pick"} | modes for game, modes in games.items()]
    facts = {"world": "household", "protocol": "sampled", "max_turns": 30, "seed": 0,
             "games_hash": {"L1": "abc"}, "player": {"name": path.parent.name}, "splits": {},
             "outcomes": {"L1": entries}}
    path.write_text(json.dumps(facts | changes))
    if episodes:
        records = [{"phase": "evaluation", "split": "L1"} | record for record in episodes]
        path.with_name("episodes.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(game, won, text="You see a bed 1.", action="look"):
    turn = {"observation": text, "response": action, "action": action, "valid": action != "fly"}
    return {"task_id": game, "won": won, "turns": [turn], "final_observation": f"The end of {game}."}


def run(capsys, *arguments):
    capsys.readouterr()
    status = main(["compare", *map(str, arguments)])
    output = capsys.readouterr()
    return status, output.out, output.err


# Statistics

@pytest.mark.slow
@pytest.mark.parametrize("b, c", [(0, 0), (1, 0), (3, 5), (5, 3), (4, 4), (0, 12), (30, 60)])
def test_mcnemar_is_the_sum_over_all_equally_likely_flips(b, c):
    n = b + c
    if n <= 12:                                     # every sequence of flips, one by one
        heads = [flips.bit_count() for flips in range(2 ** n)]
        extreme = [k for k in heads if abs(k - n / 2) >= abs(b - n / 2)]
        assert compare.mcnemar(b, c) == pytest.approx(len(extreme) / 2 ** n)
    stats = pytest.importorskip("scipy.stats", reason="needs scipy: pip install -r requirements-bench.txt")
    expected = stats.binomtest(b, n).pvalue if n else 1.0
    assert compare.mcnemar(b, c) == pytest.approx(expected)


def test_the_t_quantile_is_scipys():
    stats = pytest.importorskip("scipy.stats", reason="needs scipy: pip install -r requirements-bench.txt")
    for degrees in [*range(1, 40), 133, 139, 1000]:
        assert compare.t_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3), degrees


def test_the_paired_interval_by_hand():
    mean, half = compare.paired([1.0, 0.0, 0.5], [0.5, 0.0, 1.0])
    assert mean == 0.0 and half == pytest.approx(4.302653 * 0.5 / math.sqrt(3))
    assert compare.paired([1.0], [0.0]) == (-1.0, None)
    assert compare.paired([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]) == (-1.0, None)       # not ± 0


# One play a game

def test_one_play_a_game_is_mcnemars(tmp_path, capsys):
    a = write(tmp_path / "a" / "evaluation.json", {g: {"sampled": d} for g, d in zip("abcdef", "110000")})
    b = write(tmp_path / "b" / "evaluation.json", {g: {"sampled": d} for g, d in zip("fedcba", "111101")})
    status, out, _ = run(capsys, a, b)
    assert status == 0
    (change,) = compare.compare(compare.load(a), compare.load(b))
    assert (change.games, change.only, change.p) == (6, (1, 4), compare.mcnemar(1, 4))
    assert change.success == (2 / 6, 5 / 6) and change.mean == pytest.approx(0.5)
    assert [game for game, _, _ in change.flipped] == ["b", "c", "d", "e", "f"]
    assert "only A won 1, only B 4" in out and "b: won -> not won" in out and "f: not won -> won" in out


def test_the_games_own_scores_stand_beside_the_success(tmp_path, capsys):
    """Where both are known, and are of the games that are compared."""
    def one(name, games, score):
        return write(tmp_path / f"{name}.json", {game: {"sampled": "1"} for game in games},
                     splits={"L1": {"sampled": {"success": 1.0} | score}})

    a, b = one("a", "xy", {"score_100": 52.66}), one("b", "xy", {"score_100": 7})
    assert "over 2 games, scores 52.7 and 7.0; only A won 0" in run(capsys, a, b)[1]
    for other in (one("c", "xy", {}), one("d", "xyz", {"score_100": 7}), one("e", "xy", {"score_100": None})):
        status, out, _ = run(capsys, a, other, "--common")
        assert status == 0 and "over 2 games; only A won 0" in out and ", scores " not in out


def test_a_run_and_itself_do_not_differ(tmp_path, capsys):
    a = write(tmp_path / "a" / "evaluation.json", {g: {"sampled": "1", "t0.4": "0"} for g in "abc"})
    status, out, _ = run(capsys, a, a.parent)                             # a file, and its folder
    assert status == 0 and "nothing differs" in out and "->" not in out
    assert all(change.mean == 0 and change.p == 1.0 and change.flipped == []
               for change in compare.compare(compare.load(a), compare.load(a)))


@pytest.mark.slow
def test_two_seeds_of_a_player_end_to_end(tmp_path, capsys, monkeypatch):
    """Written by the referee; the numbers of the comparison are those of both files."""
    monkeypatch.setattr(envs.household.Environment, "split_tasks", lambda self, name: rooms.tasks(name)[:4])
    for seed in (0, 1):
        assert evaluation.main(["--player", "random", "--evaluate", "L0,L1", "--protocol", "eight", "--seed",
                                str(seed), "--max-turns", "30", "--out", str(tmp_path / str(seed))]) == 0
    status, out, _ = run(capsys, tmp_path / "0", tmp_path / "1")
    assert status == 0 and "seed: 0 and 1" in out and "A: random (" in out
    a, b = (compare.load(tmp_path / seed) for seed in "01")
    for change in compare.compare(a, b):
        rates = [one.facts["splits"][change.split]["sampled"]["success"] for one in (a, b)]
        assert change.success == pytest.approx(rates) and change.plays == (32, 32) and change.only is None
        assert change.mean == pytest.approx(rates[1] - rates[0])


# Several plays

def test_several_plays_are_shares_of_games(tmp_path):
    a = compare.load(write(tmp_path / "a.json", {"a": {"t": "1111"}, "b": {"t": "1100"}, "c": {"t": "10"}}))
    b = compare.load(write(tmp_path / "b.json", {"a": {"t": "11"}, "b": {"t": "0100"}, "c": {"t": "1"}}))
    (change,) = compare.compare(a, b)
    assert change.mean == pytest.approx((0 - 0.25 + 0.5) / 3) and change.p is None
    assert change.half == pytest.approx(compare.paired([1, 0.5, 0.5], [1, 0.25, 1])[1])
    assert change.flipped == [("c", (1, 2), (1, 1)), ("b", (2, 4), (1, 4))]       # the larger one first
    once = compare.load(write(tmp_path / "c.json", {game: {"t": "1"} for game in "abc"}))
    for change in (*compare.compare(once, a), *compare.compare(a, once)):
        assert change.only is None and change.p is None


# Evaluations that differ

@pytest.mark.parametrize("games, changes, named", [
    ("ab", {"protocol": "eight"}, "protocol: sampled and eight"),
    ("ab", {"max_turns": 50}, "max_turns: 30 and 50"),
    ("ab", {"games_hash": {"L1": "other"}}, "games of L1: abc and other"),
    ("bc", {}, "games played in L1 sampled: 2 and 2, 1 of them in both"),
    ("ab", {"world": "alfworld"}, "world: household and alfworld"),
])
def test_what_differs_is_named_and_refused_or_left_out(tmp_path, capsys, games, changes, named):
    a = write(tmp_path / "a.json", {"a": {"sampled": "1"}, "b": {"sampled": "0"}})
    b = write(tmp_path / "b.json", {game: {"sampled": "1"} for game in games}, **changes)
    status, out, error = run(capsys, a, b)
    assert (status, out) == (2, "") and named in error and "--common" in error and error.count("\n") == 1
    status, out, _ = run(capsys, a, b, "--common")
    assert status == 0 and f"compared although they differ in: {named}" in out
    assert f"over {len({*'ab'} & {*games})} games" in out and "b: not won -> won" in out


def test_what_else_differs_is_named(tmp_path, capsys):
    """If both say it; older files do not."""
    a = write(tmp_path / "a.json", {"a": {"sampled": "1"}}, admissible_only=True, history=0, dtype="float32",
              settings={"games": 5}, player={"name": "x", "extra": {"top_p": 0.9}})
    b = write(tmp_path / "b.json", {"a": {"sampled": "0"}}, admissible_only=False, history=0,
              settings={"games": 6}, player={"name": "x"})
    status, out, _ = run(capsys, a, b)
    assert status == 0 and "admissible_only: True and False\n" in out and "history" not in out
    assert "settings: {'games': 5} and {'games': 6}\n" in out and "dtype" not in out
    assert "--endpoint-extra: {'top_p': 0.9} and None\n" in out


def test_splits_and_modes_in_common(tmp_path, capsys):
    a = write(tmp_path / "a.json", {"a": {"sampled": "1", "greedy": "1"}})
    b = write(tmp_path / "b.json", {"a": {"sampled": "1", "t0.4": "1"}})
    status, _, error = run(capsys, a, b)
    assert status == 2 and "modes of L1: greedy, sampled and sampled, t0.4" in error
    status, out, _ = run(capsys, a, b, "--common")
    assert status == 0 and out.count("over 1 games") == 1
    other = write(tmp_path / "c.json", {}, outcomes={"L0": [{"game": "a", "type": "x", "sampled": "1"}]})
    assert "splits: L1 and L0" in run(capsys, a, other)[2]
    assert "have no game in common" in run(capsys, a, other, "--common")[2]


def test_missing_games_are_noted(tmp_path, capsys):
    """A run's evaluation.json does not say whether it is complete: it is."""
    a = write(tmp_path / "a.json", {"a": {"sampled": "1"}})
    b = write(tmp_path / "b.json", {"a": {"sampled": "1"}}, complete=False)
    out = run(capsys, a, b)[1]
    assert f"{b}: some games are missing" in out and f"{a}: some" not in out


@pytest.mark.parametrize("content, named", [
    (None, "no such file"), ("{", "not JSON"), ('{"splits": {}}', "keeps no outcomes of games"),
    ('{"outcomes": []}', "outcomes: expected an object"),
    ('{"outcomes": {"L1": [{"game": "a", "sampled": "2"}]}}', "expected a game's id, and digits 0 and 1"),
    ('{"outcomes": {"L1": [{"sampled": "1"}]}}', "expected a game's id, and digits 0 and 1"),
    ('{"outcomes": {"L1": [{"game": "a", "sampled": 1}]}}', "game 1, sampled: expected text, found 1"),
    ('{"outcomes": {"L1": [3]}}', "game 1: expected an object"),
    ('{"outcomes": {"L1": []}, "player": "x"}', "player: expected an object"),
    ('{"outcomes": {"L1": []}, "games_hash": 3}', "games_hash: expected an object"),
    ('{"outcomes": {"L1": []}, "prompt": []}', "prompt: expected an object"),
])
def test_a_file_that_cannot_be_compared_is_one_line(tmp_path, capsys, content, named):
    good, bad = write(tmp_path / "a.json", {"a": {"sampled": "1"}}), tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    status, out, error = run(capsys, good, bad)
    assert (status, out) == (2, "") and named in error and "bad.json" in error and error.count("\n") == 1


# Transcripts

def test_transcripts_of_flipped_games_are_side_by_side(tmp_path, capsys):
    a = write(tmp_path / "a" / "evaluation.json", {"a": {"sampled": "1"}, "b": {"sampled": "1"}},
              [record("a", True), record("b", True, "A kitchen.", "open fridge 1")])
    b = write(tmp_path / "b" / "evaluation.json", {"a": {"sampled": "1"}, "b": {"sampled": "0"}},
              [record("b", False, "A kitchen.", "fly")])
    out = run(capsys, a, b)[1]
    assert "L1 sampled, b: A on the left, B on the right" in out
    (line,) = (line for line in out.splitlines() if "[1] >" in line)
    assert line.split("|")[0].strip() == "[1] > open fridge 1"
    assert line.split("|")[1].strip() == "[1] > fly   (refused)"
    assert "[1]" not in run(capsys, a, b, "--transcripts", 0)[1]
    assert "no transcript is stored" in compare.side_by_side(["x"], [], 48)


def test_of_several_plays_a_win_of_the_better_side_and_a_loss_of_the_other_are_shown(tmp_path, capsys):
    """Or else what is stored."""
    a = write(tmp_path / "a" / "evaluation.json", {"b": {"sampled": "01"}},
              [record("b", False, action="wait"), record("b", True, action="open fridge 1")])
    b = write(tmp_path / "b" / "evaluation.json", {"b": {"sampled": "1000"}},
              [record("b", True, action="go to bed 1"), record("b", False, action="fly")])
    c = write(tmp_path / "c" / "evaluation.json", {"b": {"sampled": "110"}}, [record("b", False)])
    for left, right, given in ((a, b, "open fridge 1 fly"), (b, a, "fly open fridge 1"), (a, c, "wait look")):
        (line,) = (line for line in run(capsys, left, right)[1].splitlines() if "[1] >" in line)
        assert line.replace("[1] >", "").replace("|", "").replace("(refused)", "").split() == given.split()


def test_the_transcripts_limit_counts_games_that_have_one(tmp_path, capsys):
    """A run stores twelve episodes a split, all sampled, seldom those of the first flipped games."""
    flipped = {game: [{"greedy": digit, "sampled": digit} for digit in "10"] for game in "abc"}
    a, b = (write(tmp_path / name / "evaluation.json", {game: both[k] for game, both in flipped.items()},
                  [record("c", not k)]) for k, name in enumerate("ab"))
    assert "L1 sampled, c: A on the left" in run(capsys, a, b, "--transcripts", 1)[1]


def test_a_full_page_says_what_it_leaves_out(tmp_path, capsys, monkeypatch):
    games = {"a": "1", "b": "1"}
    one = write(tmp_path / "a" / "evaluation.json", {game: {"sampled": "1"} for game in games},
                [record(game, True, "A kitchen. " * 9) for game in games])
    two = write(tmp_path / "b" / "evaluation.json", {game: {"sampled": "0"} for game in games},
                [record("a", False, "A kitchen. " * 9)])
    texts = []
    for room in (10 ** 6, 300):
        monkeypatch.setattr(compare.page, "EPISODE_BYTES", room)
        run(capsys, one, two, "--html", tmp_path / "page.html")
        texts.append((tmp_path / "page.html").read_text(encoding="utf-8"))
    reasons = "no transcript is stored", "left out: the page is full"
    found = [[text.count(reason) for reason in reasons] for text in texts]
    assert found == [[1, 0], [0, 2]]                 # of b's second game nothing is stored


def test_no_text_becomes_markup_or_a_terminals_command(tmp_path, capsys):
    hostile = "<script>alert(1)</script>\x1b[2J{{ 7919 * 7919 }}"
    for name, digit in (("a", "1"), ("b", "0")):
        write(tmp_path / name / "evaluation.json", {hostile: {"sampled": digit}},
              [record(hostile, digit == "1", hostile, hostile)], player={"name": hostile})
    page = tmp_path / "compare.html"
    status, out, _ = run(capsys, tmp_path / "a", tmp_path / "b", "--html", page)
    assert status == 0 and "\x1b" not in out and f"wrote {page}" in out
    built = Page(page.read_text(encoding="utf-8"))
    assert "script" not in built.tags and built.links == []
    text = "".join(built.texts)
    assert text.count("<script>alert(1)</script>\\u001b[2J{{ 7919 * 7919 }}") >= 6 and "62710561" not in text
