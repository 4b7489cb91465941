"""Tests that no text of a run or a study becomes code or markup on a page, and that it is shown as it is.

Two tests open the pages in Chromium, if it is installed; the others parse them.

    python -m pytest tests/report/test_hostile.py     # half a minute, with Chromium
"""

import json
import shutil
import subprocess
from urllib.parse import unquote

import pytest
from test_gallery import fault, figure
from test_gallery import write as write_study
from test_report import Page, episode, write_method

from report import gallery, page, read
from report.__main__ import main
from report.page import legible

TEXTS = (
    "</script><script>owned(1)</script><!-- <script>", "<img src=x onerror=owned(2)>", "javascript:owned(3)",
    "\" onmouseover=\"owned(4)\" autofocus onfocus=\"owned(5)\" x=\"", "' onload='owned(6)' '", "]]>", "<!--",
    "&quot;><svg onload=owned(7)>", "&lt;script&gt;owned(8)", "</style><style>body { display: none }</style>",
    "</title></textarea></template></select></svg></pre></noscript><script>owned(9)</script>",
    "{{ 7 * 7 }}{% include 'page.html' %}{# gone #}", "{{ episodes | tojson }}", "$& $` $' $1 ${owned(10)}",
    "\\u003c\\", "a\u2028b\u2029c", "\u202egnp.exe", "\u2066", "nul\0nul", "\x1b[31m\x07\x7f\x85\x9b",
    "\r \r\n \n \t \f", "\ud800 lone", "\ufeff \xa0 𝕏 é 漢字 مرحبا", "__proto__")
ALL = " | ".join(TEXTS)
LONG = "w" * 200_000
NAMES = [text.replace("/", "\u2215") for text in (TEXTS[0], " ".join(TEXTS[1:5]), TEXTS[-1])]


def hostile(field, long=False):
    """A text that tells which field it is of."""
    return f"{field}: {ALL}{LONG if long else ''}"


def hostile_run(run):
    """A run folder all of whose texts are hostile; some of the last method's are long as well."""
    for name in NAMES:
        long = name == NAMES[-1]
        metrics = {"rollout/success": 0.5, "judge/auc": 0.5, "time/rollout_s": 1.0, hostile("a/metric"): 1.0,
                   f"time/{hostile('stage')}": 2.0}
        config = {hostile("flag"): hostile(f"value of {name}", long), "__proto__": ALL}
        about = {"games": hostile("games"), "captions": {hostile("split"): hostile("caption", long)},
                 "note": hostile("note", long), "warning": hostile("warning", long)}
        turn = {key: hostile(key, long) for key in ("observation", "response", "action")}
        turn |= {key: hostile(key) for key in ("label", "oracle")} | {"verdicts": [hostile("verdict"), ""]}
        ends = {key: hostile(key) for key in ("task_id", "task_type", "group")}
        stored = [episode(hostile("won"), phase=phase, split=hostile("split"), turns=[turn], method="x",
                          final_observation=hostile("final_observation", long), **ends)
                  for phase in ("rl", hostile("phase"))]
        write_method(run, name, [{"iteration": i} | metrics for i in range(4)], {hostile("split"): 0.5},
                     {hostile("stage"): 1.0}, stored, config, '{"cut', about)
        path = run / name / "metrics.jsonl"
        first, *rest = path.read_text().splitlines(keepends=True)
        header = json.loads(first) | {"versions": {hostile("package"): hostile("version")},
                                      "commit": hostile("commit"), "started": hostile("started")}
        path.write_text("".join([json.dumps(header) + "\n", *rest]))
    return run


def hostile_studies(folder):
    """A folder of studies all of whose texts are hostile, and long; so is the picture."""
    texts = {key: hostile(key, long=True) for key in ("claim", "found")}
    for name in ("toy", TEXTS[1], TEXTS[2]):
        write_study(folder, name, [figure(hostile("paper"), **texts), figure("Figure 1", **texts)],
                    command=hostile("command", long=True))
    of_fault = {key: hostile(key) for key in ("title", "what", "tell", "found", "error")}
    write_study(folder, "faults", command=hostile("faults' command"), faults=[fault(**of_fault)])
    (folder / "one.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9" onload="parent.owned(11)">'
        '<path d="M0 0H9"/><script>parent.owned(12); top.document.title = "owned"</script></svg>')
    return folder


# Parsed

@pytest.mark.slow
def test_texts_of_a_run_stay_texts(tmp_path):
    assert main([str(hostile_run(tmp_path))]) == 0
    built = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert built.tags.count("script") == 2 and built.links == []
    assert {"img", "em", "u", "s", "iframe"}.isdisjoint(built.tags) and built.tags.count("style") == 1
    text = "".join(built.texts)
    for field in ("games", "package", "version", "commit", "started", "warning", "note", "split", "caption",
                  "a/metric", "stage"):
        assert legible(hostile(field)) in text, field
    assert all(legible(name) in text for name in NAMES) and "49" not in text
    stored = json.loads(built.scripts[0])
    assert {record["method"] for record in stored} == {*NAMES}
    turns = [turn for record in stored if record["method"] == NAMES[0] for turn in record["turns"]]
    assert len(turns) == 2
    assert all(turn[key] == hostile(key) for key in ("observation", "response", "action", "label", "oracle")
               for turn in turns)
    assert [series["name"] for series in built.charts[0]["series"]] == sorted(NAMES)


@pytest.mark.slow
def test_texts_of_a_study_stay_texts_and_the_page_needs_no_network(tmp_path):
    text = gallery.gallery(hostile_studies(tmp_path))
    built = Page(text)
    assert "script" not in built.tags and "link" not in built.tags and built.tags.count("style") == 1
    start, pictures = "data:image/svg+xml,", [link for link in built.links if link]
    assert all(link.startswith(start) and not {*'<>"#&\n'} & {*link} for link in pictures)
    assert (tmp_path / "one.svg").read_text() in [unquote(link.removeprefix(start)) for link in pictures]
    for link in pictures:
        text = text.replace(link, "")
    assert start not in text and "url(" not in text and "@import" not in text and "http" not in text
    visible = "".join(built.texts)
    for field in ("paper", "claim", "found", "command", "what", "tell", "error"):
        assert legible(hostile(field)) in visible, field


def test_html_shows_escapes_for_what_it_would_lose_or_obey():
    """NUL, carriage returns and unpaired surrogates get lost; U+202E would mirror the page's own words."""
    template = page.templates().from_string("<p>{{ text }} left out</p>{{ 5 }}{{ [1] | tojson }}")
    assert template.render(text="a\0b\r\u202ec\ud800 <é>\n") == (
        r"<p>a\u0000b\u000d\u202ec\ud800 &lt;é&gt;" "\n left out</p>5[1]")


@pytest.mark.parametrize("depth", [400, 700, 950, 100_000])
@pytest.mark.parametrize("file", ["metrics.jsonl", "episodes.jsonl", "evaluation.json", "stages.json"])
def test_nested_values_are_an_error_of_one_line_or_harmless(tmp_path, capsys, file, depth):
    write_method(tmp_path, "grpo", [{"iteration": 0}])
    nested = "[" * depth + "]" * depth
    (tmp_path / "grpo" / file).write_text(f'{{"config": {{}}, "phase": "rl", "x": {nested}}}\n')
    assert main([str(tmp_path)]) in (0, 2)
    error = capsys.readouterr().err
    assert error.count("\n") <= 1 and len(error) < 500


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link.svg", "sub/../../secret", ".."])
def test_a_picture_is_a_file_of_the_studies_folder(tmp_path, capsys, name):
    """A stranger's study may not show a reader's files."""
    (tmp_path / "secret").write_text("key")
    folder = write_study(tmp_path / "studies", figures=[figure("Figure 1", picture=name)])
    (folder / "link.svg").symlink_to(tmp_path / "secret")
    assert main(["--gallery", str(folder)]) == 2
    error = capsys.readouterr().err
    assert f"toy.json, figure 1: its picture {name!r}: expected a file in " in error
    assert error.count("\n") == 1


# In a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update "
         "--disable-background-networking --disable-sync --virtual-time-budget=10000 --dump-dom").split()
WATCH = """<script>
const problems = [], run = [];
addEventListener("error", event => problems.push(event.message));
const owned = number => run.push(number);
</script>"""
# Uses the page as a reader would, then replaces it by what was seen, in ASCII
USE = r"""<script>
setTimeout(() => {
  const all = query => [...document.querySelectorAll(query)], id = name => document.getElementById(name);
  const texts = query => all(query).map(node => node.textContent);
  const cut = [];                                // values under the pointer of which a part is not seen
  const charts = all("svg[data-hover]").map(svg => {
    const box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
    const tip = id("tip").getBoundingClientRect(), {clientWidth, clientHeight} = document.documentElement;
    for (const value of all("#tip b")) {
      const {left, right, top, bottom} = value.getBoundingClientRect();
      const seen = left >= tip.left && right <= tip.right && top >= tip.top && bottom <= tip.bottom;
      if (!seen || value.scrollWidth > value.clientWidth + 1) cut.push(value.parentNode.textContent);
    }
    if (tip.left < 0 || tip.top < 0 || tip.right > clientWidth || tip.bottom > clientHeight) cut.push("tip");
    return id("tip").textContent;
  });
  const episodes = [];
  while (id("turns")) {
    episodes.push({method: id("method").selectedOptions[0].textContent, menus: texts("option"),
                   strip: all("#strip button").map(button => button.title), pills: texts(".pill"),
                   observations: texts("#turns .observation"), responses: texts("#turns .response"),
                   actions: texts("#turns .action"), outcomes: texts("#turns .outcome"),
                   heads: texts("#turns .head span:not(.pill)")});
    const [at, , all_of_them] = id("position").textContent.split(" ");
    if (at === all_of_them) break;
    id("next").click();
  }
  for (const menu of all("select"))
    for (let i = 0; i < menu.length; i++) {
      menu.selectedIndex = i;
      menu.dispatchEvent(new Event("change"));
    }
  const handlers = all("*").filter(node => [...node.attributes].some(given => given.name.startsWith("on")));
  const drawn = all("figure > svg").map(svg => svg.querySelectorAll("path, circle").length);
  const pictures = all("img").map(image => image.naturalWidth), body = document.body.textContent;
  const links = all("a").map(link => link.getAttribute("href")), {scrollWidth, clientWidth} = document.body;
  setTimeout(() => {
    const seen = JSON.stringify({title: document.title, run, problems, charts, cut, episodes, drawn, pictures,
                                 links, body, handlers: handlers.length,
                                 overflow: scrollWidth - clientWidth});
    const ascii = seen.replace(/[^ -~]|[<>&]/g, c => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
    document.documentElement.innerHTML = `<title>SEEN${ascii}NEES</title>`;
  }, 500);
}, 500);
</script>"""


def seen(html, folder):
    """What a reader of a page would see in the browser; see USE. None if the browser does not start here."""
    cut, path = html.rindex("</body>"), folder / "watched.html"
    html = html[:cut] + USE + html[cut:]
    path.write_text(html.replace("<head>", "<head>" + WATCH, 1), encoding="utf-8", errors="replace")
    done = subprocess.run([BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", path.as_uri()],
                          env={"HOME": str(folder), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
                          encoding="utf-8", errors="replace", check=False, timeout=300)
    _, found, rest = done.stdout.partition("<title>SEEN")
    return json.loads(rest.partition("NEES</title>")[0]) if found else None


def require_browser(folder):
    """Skip the test if the browser does not start here."""
    if seen("<html><head></head><body></body></html>", folder) is None:
        pytest.skip(f"{BROWSER} does not start here")


needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the PATH")


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_what_an_episode_and_its_turns_earned(tmp_path):
    """Of a record before rewards were stored, and of an evaluation's, which has none, only the outcome."""
    require_browser(tmp_path)
    turns = [{"advantage": 0.5, "reward": 0.25}, {"advantage": -1.0, "reward": 0.0}, {"advantage": None}]
    stored = [episode(False, ended="turn limit", reward=-0.04, turns=turns),
              episode(ended="won", reward=1.0, turns=[]), episode(ended="won", turns=[]),
              episode(False, phase="evaluation", reward=None, ended="over", turns=[])]
    write_method(tmp_path / "run", "grpo", episodes=stored)
    assert main([str(tmp_path / "run")]) == 0
    found = seen((tmp_path / "run" / "report.html").read_text(encoding="utf-8"), tmp_path)
    assert found["problems"] == []
    assert [view["outcomes"] for view in found["episodes"]] == [
        ["Lost (turn limit), reward -0.04"], ["Won, reward 1"], ["Won"], ["Lost (over)"]]
    assert found["episodes"][0]["heads"] == ["advantage +0.50", "reward 0.25", "advantage -1.00"]


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_every_value_of_forty_methods_under_the_pointer(tmp_path):
    require_browser(tmp_path)
    names = [f"grpo+gcd, setting {i}" for i in range(40)]
    lines = [{"iteration": i, "rollout/success": 1 / 3, "judge/auc": 2 / 3, "judge/auc_oracle": 4 / 7}
             for i in range(3)]
    for name in names:
        write_method(tmp_path / "run", name, lines)
    assert main([str(tmp_path / "run")]) == 0
    found = seen((tmp_path / "run" / "report.html").read_text(encoding="utf-8"), tmp_path)
    assert found["problems"] == found["cut"] == []
    success, auc = found["charts"]
    assert all(f"{name}: 33.33 %" in success and f"{name}, against oracle: 0.5714" in auc for name in names)


@pytest.mark.slow
@needs_browser
def test_a_browser_runs_no_text_and_shows_all(tmp_path):
    require_browser(tmp_path)
    run, studies = hostile_run(tmp_path / "run"), hostile_studies(tmp_path / "studies")
    assert main([str(run)]) == main(["--gallery", str(studies)]) == 0
    report, drawn = (seen(path.read_text(encoding="utf-8"), tmp_path)
                     for path in (run / "report.html", studies / "gallery.html"))
    assert (report["title"], drawn["title"]) == ("GCD report", "GCD gallery")
    for found in (report, drawn):
        assert found["run"] == found["problems"] == found["cut"] == []
        assert found["handlers"] == found["overflow"] == 0
        assert all(link.startswith("#") for link in found["links"])
    # Drawn: charts with values under the pointer, pictures, one viewer
    methods = [stored.name for stored in read.read_runs(run)]
    assert len(report["charts"]) == 2 + 3 + 2 and min(report["drawn"]) >= 3
    assert all(name in tip for tip in report["charts"][:2] for name in NAMES)
    assert set(drawn["pictures"]) != {0} and min(drawn["pictures"]) > 0
    # Shown as given
    assert [view["method"] for view in report["episodes"]] == [name for name in methods for _ in (1, 2)]
    for view in report["episodes"]:
        long = view["method"] == NAMES[-1]
        assert view["observations"] == [hostile(key, long) for key in ("observation", "final_observation")]
        assert view["responses"] == [hostile("response", long)]
        assert view["actions"] == [f"action: {hostile('action', long)}"]
        assert view["strip"] == [hostile("action", long)]
        assert view["pills"] == [*(f"{key}: {hostile(key)}" for key in ("label", "oracle")),
                                  hostile("verdict"), "unreadable"]
        assert any(hostile("task_id") in text for text in view["menus"])
    assert all(legible(hostile(field, long)) in report["body"] for field, long in (
        ("warning", True), ("note", True), ("caption", True), ("a/metric", False), ("games", False)))
    assert all(legible(hostile(field, True)) in drawn["body"] for field in ("claim", "found", "command"))
