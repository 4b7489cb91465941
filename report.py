"""A run folder -> figures: one self-contained page report.html, summary.json, and the table in the terminal.

A run folder holds one folder per method; each has `metrics.jsonl`, and may have `evaluation.json`,
`stages.json` and `episodes.jsonl`. What is missing is not drawn. The page shows the evaluation with its
intervals, the training curves, and the stored episodes turn by turn with each turn's advantage, label and
verdicts. The SVG is written here by hand. Left out: comparing several seeds, and recomputing anything; every
number is one that the run stored. The file ends with the page's style and script, as two texts.

    python report.py runs/main
"""

import argparse
import json
import math
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

METHODS = ("cold_start", "grpo", "grpo+gcd")                      # shown first, in this order; others follow
COLOURS = {"cold_start": "#6f6f6f", "grpo": "#0072b2", "grpo+gcd": "#d55e00"}
MORE_COLOURS = ("#009e73", "#cc79a7", "#b8860b", "#56b4e9")       # Okabe and Ito's colour-blind safe set
STAGE_COLOURS = ("#4477aa", "#ee9a55", "#88b98b", "#c8a2c8", "#d9c65b", "#9aa5b1")
DASHES = ("", "5 3", "1.5 3")                                     # first, second, third curve of a panel
EPISODE_BYTES = 2_300_000                                         # of the page's 3 MB
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 200, 44, 10, 8, 30    # of a chart, in SVG units


@dataclass(frozen=True, slots=True)
class Run:
    """What one method's folder holds."""

    name: str
    header: dict        # first line of metrics.jsonl: config, versions, commit, started
    lines: list         # the others: one dict per iteration or cold-start step
    evaluation: dict
    stages: dict        # seconds of each stage
    episodes: list
    notes: list         # what could not be read


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the training curves."""

    title: str
    unit: str           # "%" also multiplies by 100
    help: str           # what to look for, in one sentence
    curves: tuple       # (metric key, its words in the legend)
    mark: float | None = None    # a horizontal line: the value of a judge that guesses


PANELS = (
    Panel("Success in training", "%", "Episodes won while sampling; the rooms change every iteration.",
          (("rollout/success", "success"),)),
    Panel("Turns per episode", "turns", "A better policy needs fewer turns.", (("rollout/turns", "turns"),)),
    Panel("Invalid and repeated actions", "%", "The game refused the action, or it had been tried before.",
          (("rollout/invalid_frac", "invalid"), ("rollout/repeated_frac", "repeated"))),
    Panel("Groups without spread", "%", "All won or all lost: the advantage is 0, nothing is learned.",
          (("rollout/zero_variance_frac", "zero variance"),)),
    Panel("Truncated", "%", "Should stay near 0: what is cut off cannot be scored fairly.",
          (("rollout/truncated_frac", "truncated"),)),
    Panel("Entropy", "nats", "The policy's uncertainty per token. At 0 it explores nothing any more.",
          (("policy/entropy_nats", "entropy"),)),
    Panel("Gradient norm", "", "Before clipping. Spikes announce trouble.", (("policy/grad_norm", "norm"),)),
    Panel("Clip fraction", "%", "Tokens whose probability ratio left the trust region.",
          (("policy/clip_frac", "clipped"),)),
    Panel("Logprob gap", "nats", "Sampler against trainer on the same tokens. Should be about 0.",
          (("policy/logprob_gap_nats", "gap"),)),
    Panel("Judge: balanced accuracy", "%", "Right verdicts, mean over both classes. Guessing gives 50.",
          (("judge/balanced_accuracy", "against labels"),
           ("judge/balanced_accuracy_oracle", "against oracle")), mark=50),
    Panel("Judge: AUC", "", "Does a good turn get more good verdicts than a bad one? Guessing gives 0.5.",
          (("judge/auc", "against labels"), ("judge/auc_oracle", "against oracle")), mark=0.5),
    Panel("Judge: groups with spread", "%", "Judge prompts whose verdicts differ; only these teach.",
          (("judge/variance_frac", "with variance"),)),
    Panel("Judge: gradient", "", "Its size over the policy's, and the cosine between the two.",
          (("judge/grad_ratio", "ratio"), ("judge/grad_cosine", "cosine")), mark=0),
    Panel("Cold start: loss", "nats", "Cross-entropy of the demonstrations' tokens.",
          (("cold_start/loss", "loss"),)),
)


# Reading

def read_lines(path):
    """The JSON objects of a .jsonl file (none if it is absent), and notes on lines that are cut short.

    A killed run leaves a broken last line, or one in the middle if it was resumed: left out and said.
    """
    if not path.exists():
        return [], []
    rows, notes = [], []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError:
            where = f"{path.parent.name}/{path.name}"
            notes.append(f"{where}: line {number} is cut short (killed run?) and left out")
    return rows, notes


def read_json(path):
    """The object in a JSON file, {} if it is absent. Raises ValueError naming a broken file."""
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error


def read_run(folder):
    """One method's folder -> Run."""
    rows, notes = read_lines(folder / "metrics.jsonl")
    episodes, more_notes = read_lines(folder / "episodes.jsonl")
    header = next((row for row in rows if "config" in row), {})
    lines = [row for row in rows if "config" not in row]
    evaluation, stages = read_json(folder / "evaluation.json"), read_json(folder / "stages.json")
    if "seconds" in evaluation:
        stages = {"evaluation": evaluation["seconds"]} | stages
    return Run(folder.name, header, lines, evaluation, stages, episodes, notes + more_notes)


def read_runs(folder):
    """Every method in a run folder, in the order of the report. Raises ValueError if there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = {path.parent.name for path in folder.glob("*/metrics.jsonl") if path.stat().st_size}
    if not found:
        raise ValueError(f"{folder}: no metrics in it (expected {folder}/<method>/metrics.jsonl)")
    names = [name for name in METHODS if name in found] + sorted(found - set(METHODS))
    return [read_run(folder / name) for name in names]


# Numbers

def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def finite(value):
    """The same JSON value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summarize(runs):
    """Runs -> summary.json: the headline success (sampled at temperature 1), seconds by stage, versions."""
    methods, seconds, versions = {}, {}, {}
    for run in runs:
        splits = run.evaluation.get("splits", {})
        sampled = {split: scores["sampled"] for split, scores in splits.items() if "sampled" in scores}
        methods[run.name] = {split: {key: score.get(key) for key in ("success", "n", "low", "high")}
                             for split, score in sampled.items()}
        if run.stages:
            seconds[run.name] = sum(run.stages.values())
        seconds |= {f"{run.name}/{stage}": value for stage, value in run.stages.items()}
        versions = versions or run.header.get("versions", {})
    return finite({"methods": methods, "seconds": seconds, "versions": versions})


def split_names(summary):
    return sorted({split for splits in summary["methods"].values() for split in splits})


def percent(value):
    return f"{100 * value:.1f}" if is_number(value) else "–"


def interval(score):
    """{"success": .43, "low": .37, "high": .49} -> "43.0 [37.0, 49.0]"; a dash where nothing was measured."""
    if not score:
        return "–"
    return f"{percent(score['success'])} [{percent(score['low'])}, {percent(score['high'])}]"


def aligned(rows):
    """Rows of words -> lines of columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    padded = [[word.ljust(width) for word, width in zip(row, widths)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def table(summary):
    """The headline as plain text: one row per method, one column per split."""
    splits = split_names(summary)
    sizes = {s: {m[s]["n"] for m in summary["methods"].values() if s in m} for s in splits}
    heads = [f"{s} (n={'/'.join(map(str, sorted(sizes[s], key=str)))})" for s in splits]
    rows = [["success %", *heads, "seconds"]]
    for name, scores in summary["methods"].items():
        spent = summary["seconds"].get(name)
        seconds = f"{spent:.0f}" if is_number(spent) else "–"
        rows.append([name, *(interval(scores.get(s)) for s in splits), seconds])
    return aligned(rows)


def curve(run, key):
    """{x: value} of one metric; x is the iteration, or the step of a cold start.

    A value that is no number is None. A resumed run may have logged an x twice: the later one counts.
    """
    x_name = "step" if key.startswith("cold_start/") else "iteration"
    return {line[x_name]: line[key] if is_number(line[key]) else None
            for line in run.lines if key in line and is_number(line.get(x_name))}


def smooth(values):
    """Centred moving mean over about a 25th of the values; None stays None and counts in no mean."""
    half = max(1, round(len(values) / 50))
    means = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - half):i + half + 1] if v is not None]
        means.append(None if value is None else sum(near) / len(near))
    return means


def ticks(low, high, count=4):
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that enclose low..high, in about `count` steps."""
    raw = ((high - low) or abs(high) or 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


# Charts

def text(x, y, words, anchor="middle"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


@dataclass(frozen=True, slots=True)
class Axes:
    """The frame of a chart: where a value lies on it."""

    x_low: float
    x_high: float
    y_ticks: list

    def x(self, value):
        return LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, x_name):
        """Grid lines, tick labels and the name of the x axis."""
        parts = []
        for tick in self.y_ticks:
            parts.append(f'<path class="grid" d="M{LEFT} {self.y(tick):.1f}H{WIDTH - RIGHT}"/>')
            parts.append(text(LEFT - 6, self.y(tick) + 3.5, f"{tick:g}", anchor="end"))
        for tick in ticks(self.x_low, self.x_high):
            if self.x_low <= tick <= self.x_high and tick == round(tick):
                parts.append(text(self.x(tick), HEIGHT - 16, f"{tick:g}"))
        return "".join([*parts, text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 3, x_name)])


def line_path(axes, xs, ys):
    """A path through the points; a None breaks it."""
    parts, pen = [], "M"
    for x, y in zip(xs, ys):
        if y is not None:
            parts.append(f"{pen}{axes.x(x):.1f} {axes.y(y):.1f}")
        pen = "M" if y is None else "L"
    return "".join(parts)


def dots_path(axes, xs, ys):
    """One path with a zero-length stroke at each point: round line ends make them dots."""
    return "".join(f"M{axes.x(x):.1f} {axes.y(y):.1f}h0" for x, y in zip(xs, ys) if y is not None)


def card(title, unit, help_text, legend, svg, hover, charts):
    """One framed chart. Appends what its hover needs to `charts`, the page's list, and names it by index."""
    unit = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    charts.append(hover)
    return (f'<figure class="card"><h3>{escape(title)}{unit}</h3>'
            f'<p class="help">{escape(help_text)}</p>{legend}'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" data-chart="{len(charts) - 1}" role="img" '
            f'aria-label="{escape(title)}">{svg}<path class="rule" d=""/></svg></figure>')


def hover_data(axes, x_name, unit, series):
    """What the page's script needs to show values: series is [(name, colour, {x: y})]."""
    xs = sorted({x for _, _, points in series for x in points})
    return {"low": axes.x_low, "high": axes.x_high, "x_name": x_name, "unit": unit, "xs": xs,
            "series": [{"name": name, "colour": colour, "ys": [points.get(x) for x in xs]}
                       for name, colour, points in series]}


def panel_series(panel, runs, colours):
    """[(name, colour, dash, {x: y})] of the curves that have a number to draw, scaled to the panel's unit."""
    scale, series = 100 if panel.unit == "%" else 1, []
    for (key, words), dash in zip(panel.curves, DASHES):
        for run in runs:
            points = {x: None if y is None else float(f"{scale * y:.4g}")
                      for x, y in sorted(curve(run, key).items())}
            name = run.name if len(panel.curves) == 1 else f"{run.name}, {words}"
            if any(y is not None for y in points.values()):
                series.append((name, colours[run.name], dash, points))
    return series


def key_legend(panel):
    """What the dashes mean, where a panel has more than one curve."""
    if len(panel.curves) == 1:
        return ""
    keys = [f'<span><svg class="key" viewBox="0 0 24 6"><path class="line" stroke="#444" d="M0 3H24" '
            f'stroke-dasharray="{dash}"/></svg>{escape(words)}</span>'
            for (_, words), dash in zip(panel.curves, DASHES)]
    return f'<p class="keys">{"".join(keys)}</p>'


def panel_chart(panel, runs, colours, charts):
    """A panel as HTML: raw points, and a lightly smoothed line over them. Empty where nothing was logged."""
    series = panel_series(panel, runs, colours)
    if not series:
        return ""
    xs = [x for *_, points in series for x in points]
    ys = [y for *_, points in series for y in points.values() if y is not None]
    ys += [0] if panel.mark is None else [0, panel.mark]
    axes = Axes(min(xs), max(xs), ticks(min(ys), max(ys)))
    x_name = "step" if panel.curves[0][0].startswith("cold_start/") else "iteration"
    svg = [axes.svg(x_name)]
    if panel.mark is not None:
        svg.append(f'<path class="mark" d="M{LEFT} {axes.y(panel.mark):.1f}H{WIDTH - RIGHT}"/>')
    for _, colour, _, points in series:
        svg.append(f'<path class="dots" stroke="{colour}" d="{dots_path(axes, points, points.values())}"/>')
    for _, colour, dash, points in series:
        line = line_path(axes, points, smooth(list(points.values())))
        svg.append(f'<path class="line" stroke="{colour}" stroke-dasharray="{dash}" d="{line}"/>')
    shown = [(name, colour, points) for name, colour, _, points in series]
    hover = hover_data(axes, x_name, panel.unit, shown)
    return card(title=panel.title, unit=panel.unit, help_text=panel.help, legend=key_legend(panel),
                svg="".join(svg), hover=hover, charts=charts)


def stage_series(run):
    """[(stage, {x: seconds})] of an iteration's timed parts; a missing one took 0 s. Totals are left out."""
    keys = {key for line in run.lines if "iteration" in line for key in line if key.startswith("time/")}
    keys -= {"time/iteration_s", "time/total_s"}
    known = ["time/rollout_s", "time/judge_s", "time/update_s"]
    ordered = [key for key in known if key in keys] + sorted(keys - set(known))
    found = {key: curve(run, key) for key in ordered}
    xs = sorted({x for points in found.values() for x in points})
    return [(key.removeprefix("time/").removesuffix("_s"), {x: found[key].get(x) or 0.0 for x in xs})
            for key in ordered]


def stages_chart(run, stages, top_s, charts):
    """Seconds of each iteration, its stages stacked; `top_s` is one for all methods, so that they compare."""
    xs = list(stages[0][1])
    axes, floor, svg, legend, series = Axes(min(xs), max(xs), ticks(0, top_s)), [0.0] * len(xs), [], "", []
    for (stage, points), colour in zip(stages, STAGE_COLOURS * len(stages)):
        roof = [low + points[x] for low, x in zip(floor, xs)]
        outline = line_path(axes, xs, roof) + line_path(axes, xs[::-1], floor[::-1]).replace("M", "L")
        svg.append(f'<path class="area" fill="{colour}" stroke="{colour}" d="{outline}Z"/>')
        legend += f'<span><i style="background:{colour}"></i>{escape(stage)}</span>'
        series.append((stage, colour, {x: float(f"{points[x]:.4g}") for x in xs}))
        floor = roof
    return card(title=run.name, unit="s", help_text="Seconds of each iteration by stage, stacked.",
                legend=f'<p class="keys">{legend}</p>', svg="".join(svg) + axes.svg("iteration"),
                hover=hover_data(axes, "iteration", "s", series), charts=charts)


def time_charts(runs, charts):
    """One stacked chart per method that logged times."""
    found = [(run, stages) for run in runs if (stages := stage_series(run))]
    tops = [sum(points[x] for _, points in stages) for _, stages in found for x in stages[0][1]]
    return "".join(stages_chart(run, stages, max(tops), charts) for run, stages in found)


def rest_panels(runs):
    """A panel for every logged number that no other chart shows."""
    shown = {key for panel in PANELS for key, _ in panel.curves}
    keys = {key for run in runs for line in run.lines for key in line if "/" in key}
    return [Panel(key, "", "", ((key, key),)) for key in sorted(keys - shown) if not key.startswith("time/")]


def split_chart(split, summary, colours):
    """One split's success per method: a dot with its interval on a scale from 0 to 100 %."""
    scores = {name: splits.get(split, {}) for name, splits in summary["methods"].items()}
    scores = {name: score for name, score in scores.items() if is_number(score.get("success"))}
    height, at = 26 * len(scores) + 22, lambda success: 86 + 260 * success
    parts = []
    for quarter in range(5):
        parts.append(f'<path class="grid" d="M{at(quarter / 4):.1f} 2V{height - 20}"/>')
        parts.append(text(at(quarter / 4), height - 6, str(25 * quarter)))
    for i, (name, score) in enumerate(scores.items()):
        y, low, high = 16 + 26 * i, score["low"], score["high"]
        parts.append(text(78, y + 4, name, anchor="end"))
        if is_number(low) and is_number(high):
            span = f"M{at(low):.1f} {y}H{at(high):.1f}"
            parts.append(f'<path class="whisker" stroke="{colours[name]}" d="{span}"/>')
        parts.append(f'<circle cx="{at(score["success"]):.1f}" cy="{y}" r="4.5" fill="{colours[name]}">'
                     f'<title>{escape(name)}: {interval(score)} %</title></circle>')
    return (f'<figure class="card"><h3>{escape(split)} <span class="unit">success, %</span></h3>'
            f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg></figure>')


# The page

def html_table(rows):
    """Rows of words -> a table whose first row and first column are heads."""
    def cells(row, tag):
        return f"<th>{escape(row[0])}</th>" + "".join(f"<{tag}>{escape(word)}</{tag}>" for word in row[1:])
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows[1:])
    head = f"<thead><tr>{cells(rows[0], 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def headline_rows(summary):
    splits = split_names(summary)
    rows = [["method", *(word for split in splits for word in (f"{split} success %", "n"))]]
    for name, scores in summary["methods"].items():
        rows.append([name, *(word for split in splits for word in (
            interval(scores.get(split)), str(scores.get(split, {}).get("n") or "–")))])
    return rows


def detail_rows(runs):
    """Per method and split: success under each way of decoding, and how the sampled episodes behaved."""
    found = [(run, split, scores) for run in runs
             for split, scores in sorted(run.evaluation.get("splits", {}).items())]
    ways = list(dict.fromkeys(way for _, _, scores in found for way in ("sampled", *scores)))
    rows = [["method", "split", *(f"{way} %" for way in ways), "invalid %", "repeated %", "turns"]]
    for run, split, scores in found:
        sampled = scores.get("sampled", {})
        turns = f"{sampled['turns']:.1f}" if is_number(sampled.get("turns")) else "–"
        rows.append([run.name, split, *(percent(scores.get(way, {}).get("success")) for way in ways),
                     percent(sampled.get("invalid_frac")), percent(sampled.get("repeated_frac")), turns])
    return rows


def cold_start_caption(runs):
    """Says which task types the cold start saw: it decides what "never trained on" means."""
    flags = [run.header["config"]["cold_start_types"] for run in runs
             if "cold_start_types" in run.header.get("config", {})]
    if not flags:
        return ""
    types = ", ".join(flags[0]) if isinstance(flags[0], list) else str(flags[0])
    if types == "all":
        return "The cold start sees all six task types, the two of L2 that RL never trains on included."
    return f"The cold start sees the task types {types}. RL never trains on those of L2."


def command(run):
    """The command line that repeats this run: every flag with its value."""
    words = ["python", "gcd.py"]
    for name, value in run.header.get("config", {}).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag}={shlex.quote(str(value))}")
    return " ".join(words)


def difference_rows(runs):
    """The flags whose values differ between the methods."""
    configs = [run.header.get("config", {}) for run in runs]
    flags = dict.fromkeys(flag for config in configs for flag in config)
    rows = [["flag", *(run.name for run in runs)]]
    for flag in flags:
        values = [str(config.get(flag, "–")) for config in configs]
        if len(set(values)) > 1:
            rows.append(["--" + flag.replace("_", "-"), *values])
    return rows


def choose_episodes(runs, budget):
    """Stored episodes for the page as JSON texts, at most `budget` characters, and how many there were.

    Every place (a method's split or iteration) gives one episode before any gives a second; evaluation goes
    first, and iterations go in golden-ratio order, so that whatever fits is spread evenly over training.
    """
    places, seen, queue = {}, Counter(), []
    for method, episode in [(run.name, episode) for run in runs for episode in run.episodes]:
        place = (method, *map(episode.get, ("phase", "iteration", "split")))
        spread = places.setdefault(place, len(places)) * 0.6180339887 % 1
        rank = (seen[place], episode.get("phase") == "rl", spread)
        queue.append((*rank, len(queue), {"method": method} | episode))
        seen[place] += 1
    chosen = []
    for *_, order, episode in sorted(queue, key=lambda entry: entry[:4]):
        words = script_json(episode)
        if len(words) <= budget:
            chosen.append((order, words))
            budget -= len(words)
    return [words for _, words in sorted(chosen)], len(queue)


def script_json(value):
    """JSON that is safe inside <script>: ASCII, and no "<" that could close the element."""
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def facts(runs, summary):
    """The head of the page: what ran, with what, for how long."""
    counts = {run.name: len({line["iteration"] for line in run.lines if "iteration" in line}) for run in runs}
    methods = [f"{name} ({count} iterations)" if count else name for name, count in counts.items()]
    headers = [run.header for run in runs]
    versions = [" ".join(f"{k} {v}" for k, v in header.get("versions", {}).items()) for header in headers]
    minutes = sum(summary["seconds"].get(run.name) or 0 for run in runs) / 60
    rows = {"Methods": methods, "Games": [run.evaluation.get("games") for run in runs],
            "Started": [header.get("started") for header in headers][:1],
            "Time": [f"{minutes:.1f} min"] if minutes else [], "Versions": versions,
            "Commit": [header.get("commit") for header in headers]}
    said = {name: ", ".join(dict.fromkeys(str(w) for w in words if w)) for name, words in rows.items()}
    return "".join(f"<div><dt>{name}</dt><dd>{escape(words)}</dd></div>"
                   for name, words in said.items() if words)


def warnings(runs):
    """Sentences that a reader must not miss."""
    found = [note for run in runs for note in run.notes]
    if any("generated" in str(run.evaluation.get("games", "")) for run in runs):
        found.insert(0, "Numbers on generated rooms are not ALFWorld scores.")
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in found)


def evaluation_section(runs, summary, colours):
    splits = split_names(summary)
    if not splits:
        return "<section><h2>Evaluation</h2><p>No method has been evaluated yet.</p></section>"
    dots = "".join(split_chart(split, summary, colours) for split in splits)
    return f"""<section><h2>Evaluation</h2>
<p>Success when sampling at temperature 1, with its 95 % interval and the number of episodes n.
L0: training rooms, new tasks. L1: other rooms. L2: other rooms and task types that RL never trains on.
{escape(cold_start_caption(runs))}</p><div class="cards">{dots}</div>{html_table(headline_rows(summary))}
<h3>Decoding and behaviour</h3><p>Success by way of decoding; invalid and repeated actions and turns are those
of the sampled episodes.</p>{html_table(detail_rows(runs))}</section>"""


def curves_section(runs, colours, charts):
    legend = "".join(f'<span><i style="background:{colours[run.name]}"></i>{escape(run.name)}</span>'
                     for run in runs)
    main = "".join(panel_chart(panel, runs, colours, charts) for panel in PANELS)
    times = time_charts(runs, charts)
    times = times and f'<h2>Where the time goes</h2><div class="cards">{times}</div>'
    rest = "".join(panel_chart(panel, runs, colours, charts) for panel in rest_panels(runs))
    rest = rest and (f"<details><summary>Everything else that was logged</summary>"
                     f'<div class="cards">{rest}</div></details>')
    return f"""<section><h2>Training curves</h2><p class="legend">{legend}</p>
<p>Dots are iterations, lines a short moving mean. Point at a chart to read its values.</p>
<div class="cards">{main or "<p>Nothing was logged.</p>"}</div>{times}{rest}</section>"""


def viewer_section(shown, stored):
    if not shown:
        return "<section><h2>Episodes</h2><p>No episodes were stored.</p></section>"
    return f"""<section id="viewer"><h2>Episodes</h2>
<p>{shown} of {stored} stored episodes, turn by turn. The background is the turn's advantage:
<b class="plus">blue</b> makes its response likelier, <b class="minus">orange</b> less likely,
as strong as the colour. Keys ← and → move; the address names the episode.</p>
<noscript><p class="warning">The episodes need JavaScript.</p></noscript>
<div class="bar"><label>method <select id="method"></select></label>
<label>where <select id="where"></select></label><label>episode <select id="episode"></select></label>
<button id="previous" aria-label="previous episode">←</button>
<button id="next" aria-label="next episode">→</button><span id="position"></span></div>
<div id="strip"></div><div id="turns"></div></section>"""


def setup_section(runs):
    commands = "".join(f"<h3>{escape(run.name)}</h3><pre>{escape(command(run))}</pre>" for run in runs)
    rows = difference_rows(runs)
    differences = f"<h3>Flags that differ</h3>{html_table(rows)}" if len(rows) > 1 else ""
    return (f"<section><h2>Set-up</h2>{differences}<details><summary>Full commands</summary>"
            f"{commands}</details></section>")


def page(runs, summary):
    """The whole report as one HTML text that needs no other file and no network."""
    spare = iter(MORE_COLOURS * len(runs))
    colours = {run.name: COLOURS.get(run.name) or next(spare) for run in runs}
    charts = []
    episodes, stored = choose_episodes(runs, EPISODE_BYTES)
    body = (f"<header><h1>What the runs learned</h1><dl>{facts(runs, summary)}</dl>{warnings(runs)}</header>"
            + evaluation_section(runs, summary, colours) + curves_section(runs, colours, charts)
            + viewer_section(len(episodes), stored) + setup_section(runs))
    shape = script_json([WIDTH, LEFT, RIGHT, TOP, HEIGHT - BOTTOM])
    data = f'{{"shape":{shape},"charts":{script_json(charts)},"episodes":[{",".join(episodes)}]}}'
    return (f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>GCD report</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}</style></head>"
            f'<body>{body}<div id="tip"></div><script type="application/json" id="data">{data}</script>'
            f"<script>{SCRIPT}</script></body></html>\n")


STYLE = """
:root{--ink:#1d2329;--soft:#5c6670;--line:#e3e5e1;--blue:#0072b2;--orange:#d55e00}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:20px 20px 80px;background:#fafaf7;color:var(--ink);
 font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:28px;margin:8px 0 12px;letter-spacing:-.01em}
h2{font-size:20px;margin:40px 0 6px}
h3{font-size:14.5px;margin:20px 0 4px}
p{max-width:86ch;margin:4px 0 12px}
dl{display:flex;flex-wrap:wrap;gap:8px 32px;margin:0 0 12px}
dt{color:var(--soft);font-size:12px}
dd{margin:0;overflow-wrap:anywhere}
.warning{border-left:4px solid #e0a800;background:#fff7dc;padding:6px 12px}
.cards{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(310px,100%),1fr));
 margin:12px 0}
.card{margin:0;padding:12px 12px 8px;background:#fff;border:1px solid var(--line);border-radius:8px;
 display:flex;flex-direction:column}
.card h3{margin:0}
.card>svg{width:100%;display:block;margin-top:auto;touch-action:pan-y}
.unit{color:var(--soft);font-weight:400;font-size:13px}
.help{color:var(--soft);font-size:12.5px;line-height:1.35;margin:1px 0 6px}
.keys,.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 6px;font-size:12.5px}
.legend{position:sticky;top:0;z-index:2;background:#fafaf7;padding:8px 0;font-size:14px;max-width:none}
.keys i,.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;
 vertical-align:-1px}
.key{width:26px;height:6px;margin-right:6px;vertical-align:3px}
svg text{font-size:11px;fill:var(--soft)}
.grid{stroke:var(--line)}
.mark{stroke:#999;stroke-dasharray:2 3}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.dots{fill:none;stroke-width:3;stroke-linecap:round;opacity:.28}
.area{fill-opacity:.85;stroke-width:.5}
.whisker{stroke-width:2.5;opacity:.55}
.rule{stroke:#777;fill:none}
#tip{position:fixed;display:none;pointer-events:none;z-index:5;background:#fff;border:1px solid #bbb;
 border-radius:6px;padding:5px 9px;font-size:12.5px;line-height:1.45;
 box-shadow:0 2px 8px #0002;max-width:260px}
.wide{overflow-x:auto}
table{border-collapse:collapse;background:#fff;font-variant-numeric:tabular-nums;font-size:14px;margin:10px 0}
th,td{padding:5px 12px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left}
thead th{color:var(--soft);font-weight:500;font-size:12.5px}
summary{cursor:pointer;color:var(--blue)}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;
 font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
b.plus{color:var(--blue)}b.minus{color:#b34f00}
.bar{display:flex;flex-wrap:wrap;gap:8px 12px;align-items:center;font-size:13px;color:var(--soft)}
.bar label{max-width:100%}
select,button{font:inherit;color:var(--ink);background:#fff;border:1px solid #bfc4c8;border-radius:6px;
 padding:4px 8px;max-width:100%}
button{cursor:pointer;min-width:36px}
button:disabled{opacity:.35}
#strip{display:flex;flex-wrap:wrap;gap:3px;margin:12px 0}
#strip a{width:24px;height:24px;border:1px solid #c9cdd0;border-radius:4px;font-size:11px;line-height:22px;
 text-align:center;color:var(--ink);text-decoration:none}
.turn{border:1px solid var(--line);border-radius:8px;margin:8px 0;overflow:hidden;background:#fff}
.turn .head{display:flex;flex-wrap:wrap;gap:4px 10px;align-items:center;padding:6px 12px;font-size:13px}
.turn .texts{display:grid;grid-template-columns:1fr 1fr;gap:0 20px;padding:2px 12px 8px}
.texts small{color:var(--soft)}
.pill{border:1px solid currentColor;border-radius:10px;padding:0 8px;font-size:12px;background:#fff}
.good{color:var(--blue)}.bad{color:#b34f00}.none{color:#767d84}
.end{font-weight:600;padding:8px 12px}
@media(max-width:640px){body{padding:12px 12px 60px}.turn .texts{grid-template-columns:1fr}h1{font-size:23px}}
"""

SCRIPT = r"""
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
function element(tag, className, text) {         // textContent only: an episode's text is never read as HTML
  const node = document.createElement(tag);
  node.className = className || "";
  if (text !== undefined && text !== null) node.textContent = text;
  return node;
}

// Charts: a rule and the values at the nearest iteration
const [WIDTH, LEFT, RIGHT, TOP, FLOOR] = data.shape, tip = byId("tip");
function hover(svg, chart, event) {
  const box = svg.getBoundingClientRect(), inner = WIDTH - LEFT - RIGHT, span = chart.high - chart.low || 1;
  const at = chart.low + ((event.clientX - box.left) / box.width * WIDTH - LEFT) / inner * span;
  const i = chart.xs.reduce((best, x, j) => Math.abs(x - at) < Math.abs(chart.xs[best] - at) ? j : best, 0);
  const x = LEFT + (chart.xs[i] - chart.low) / span * inner;
  svg.querySelector(".rule").setAttribute("d", `M${x} ${TOP}V${FLOOR}`);
  tip.replaceChildren(element("div", "", `${chart.x_name} ${chart.xs[i]}`));
  for (const series of chart.series) {
    if (series.ys[i] === null) continue;
    const row = element("div", "", `${series.name}: `);
    row.style.color = series.colour;
    row.append(element("b", "", `${series.ys[i]} ${chart.unit}`));
    tip.append(row);
  }
  tip.style.display = "block";
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const chart = data.charts[svg.dataset.chart];
  svg.addEventListener("pointermove", event => hover(svg, chart, event));
  svg.addEventListener("pointerleave", () => {
    svg.querySelector(".rule").setAttribute("d", "");
    tip.style.display = "none";
  });
}

// Episodes: three menus, one list of turns
const episodes = data.episodes;
const place = e => e.phase === "rl" ? `training, iteration ${e.iteration}` : `${e.phase}, ${e.split}`;
const advantages = episodes.flatMap(e => e.turns || []).map(t => Math.abs(t.advantage || 0));
const strongest = advantages.reduce((a, b) => Math.max(a, b), 1e-9);
let current = -1;

function shade(advantage) {
  if (!advantage) return "";
  const strength = 0.06 + 0.44 * Math.abs(advantage) / strongest;
  return advantage > 0 ? `rgba(0,114,178,${strength})` : `rgba(213,94,0,${strength})`;
}
const signed = x => (x > 0 ? "+" : "") + x.toFixed(2);
const pill = (name, value) => element("span", `pill ${value || "none"}`, `${name}: ${value || "none"}`);

function turnHead(turn, number) {
  const head = element("div", "head");
  head.style.background = shade(turn.advantage);
  head.append(element("b", "", `Turn ${number}`));
  const say = words => head.append(element("span", "", words));
  if (typeof turn.advantage === "number") say(`advantage ${signed(turn.advantage)}`);
  if (turn.valid === false) head.append(element("span", "pill bad", "invalid"));
  if (turn.label) head.append(pill("label", turn.label));
  if (turn.oracle) head.append(pill("oracle", turn.oracle));
  const verdicts = turn.verdicts || [];
  if (verdicts.length) say("verdicts");
  for (const word of verdicts) head.append(element("span", `pill ${word || "none"}`, word || "unreadable"));
  if (typeof turn.judge_reward === "number") say(`judge reward ${turn.judge_reward.toFixed(2)}`);
  return head;
}
function block(title, text) {
  const node = element("div");
  node.append(element("small", "", title), element("pre", "", text));
  return node;
}
function turnCard(turn, number) {
  const card = element("article", "turn"), texts = element("div", "texts");
  const response = block("response", turn.response);
  response.append(element("small", "", `action: ${turn.action === null ? "none found" : turn.action}`));
  texts.append(block("observation", turn.observation), response);
  card.append(turnHead(turn, number), texts);
  return card;
}
function stripCell(turn, number, card) {
  const cell = element("a", "", number);
  cell.href = "#viewer";
  cell.title = turn.action || "no action";
  cell.style.background = shade(turn.advantage);
  cell.onclick = event => {
    event.preventDefault();
    card.scrollIntoView({behavior: "smooth", block: "center"});
  };
  return cell;
}
function fill(id, labels, chosen) {              // labels: Map from an episode's index to its option's words
  byId(id).replaceChildren(...[...labels].map(([index, words]) => {
    const option = element("option", "", words);
    option.value = index;
    option.selected = words === chosen || index === chosen;
    return option;
  }));
}
function firstOf(list, words) {                  // the first index of each distinct word
  const found = new Map();
  list.forEach(i => found.has(words(episodes[i])) || found.set(words(episodes[i]), i));
  return new Map([...found].map(([word, i]) => [i, word]));
}
const outcome = e => [e.won ? "won" : "lost", e.task_type, e.task_id, `group ${e.group}`,
                      `${(e.turns || []).length} turns`].join(" · ");
function show(index) {
  current = Math.max(0, Math.min(index, episodes.length - 1));
  const episode = episodes[current], all = [...episodes.keys()];
  const ofMethod = all.filter(i => episodes[i].method === episode.method);
  const here = ofMethod.filter(i => place(episodes[i]) === place(episode));
  fill("method", firstOf(all, e => e.method), episode.method);
  fill("where", firstOf(ofMethod, place), place(episode));
  fill("episode", new Map(here.map(i => [i, outcome(episodes[i])])), current);
  byId("position").textContent = `${current + 1} of ${episodes.length}`;
  byId("previous").disabled = current === 0;
  byId("next").disabled = current === episodes.length - 1;
  const turns = episode.turns || [], cards = turns.map((turn, i) => turnCard(turn, i + 1));
  byId("strip").replaceChildren(...turns.map((turn, i) => stripCell(turn, i + 1, cards[i])));
  const score = typeof episode.return === "number" ? `, return ${episode.return.toFixed(2)}` : "";
  const end = element("div", "turn");
  end.append(element("div", `end ${episode.won ? "good" : "bad"}`, (episode.won ? "Won" : "Lost") + score));
  const last = element("div", "texts");
  last.append(block("final observation", episode.final_observation));
  end.append(last);
  byId("turns").replaceChildren(...cards, end);
}
function go(index) {
  show(index);
  location.replace(`#episode=${current}`);
}
function fromAddress() {
  const match = /^#episode=(\d+)$/.exec(location.hash);
  if (!match || +match[1] === current) return;
  show(+match[1]);
  byId("viewer").scrollIntoView();
}
if (episodes.length) {
  for (const id of ["method", "where", "episode"])
    byId(id).addEventListener("change", event => go(+event.target.value));
  byId("previous").onclick = () => go(current - 1);
  byId("next").onclick = () => go(current + 1);
  addEventListener("keydown", event => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName === "SELECT") return;
    if (event.key === "ArrowLeft") go(current - 1);
    if (event.key === "ArrowRight") go(current + 1);
  });
  addEventListener("hashchange", fromAddress);
  fromAddress();
  if (current < 0) show(0);
}
"""


def report(folder):
    """Reads a run folder, writes report.html and summary.json into it, returns the summary."""
    runs = read_runs(folder)
    summary = summarize(runs)
    (folder / "report.html").write_text(page(runs, summary), encoding="utf-8", errors="replace")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return summary


def main(argv=None):
    parser = argparse.ArgumentParser(description="A run folder -> report.html, summary.json and a table.",
                                     allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="what holds one folder per method, e.g. runs/main")
    folder = parser.parse_args(argv).folder
    try:
        summary = report(folder)
    except ValueError as error:
        sys.exit(f"report.py: {error}")
    print(table(summary))
    print(cold_start_caption(read_runs(folder)))
    print(f"wrote {folder / 'report.html'} and {folder / 'summary.json'}")


if __name__ == "__main__":
    main()
