"""The page's charts as data: coordinates, SVG path data, and the values under the pointer.

charts.html draws them as SVG. A tone is a color's class or classes in style.css. Left out: any markup.
"""

import math
from dataclasses import dataclass

from infra.files import is_number
from report.tables import captions, interval, mean_and_half, split_names

TONES, ROUNDS = 7, 7                       # numbers of classes in style.css: tone-0 to -6, round-1 to -6
POINTS = 500                               # of a curve at most; of more, means are drawn
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 200, 52, 10, 8, 30     # of a chart, in SVG units


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the training curves."""

    title: str
    unit: str           # "%" also multiplies by 100
    help: str           # how to read it, in one sentence
    curves: tuple       # (metric key, name in the legend)
    reference: float | None = None   # drawn as a horizontal line, such as the value of a random judge


STAGES = "time/rollout_s", "time/judge_s", "time/update_s"
PANELS = (
    Panel("Success in training", "%", "Sampled episodes that were won; the tasks change every iteration.",
          (("rollout/success", "success"),)),
    Panel("Turns per episode", "turns", "A better policy needs fewer turns.", (("rollout/turns", "turns"),)),
    Panel("Invalid and repeated actions", "%",
          "No command, or one that the game refused; one given before in the same state.",
          (("rollout/invalid_frac", "invalid"), ("rollout/repeated_frac", "repeated"))),
    Panel("Groups without variance", "%", "Episodes in groups of equal rewards: GRPO gets no gradient.",
          (("rollout/zero_variance_frac", "zero variance"),)),
    Panel("Truncated", "%", "Episodes with a cut response or a full context. Should stay near 0.",
          (("rollout/truncated_frac", "truncated"),)),
    Panel("Entropy", "nats", "Of the policy, per trained token. At 0 it no longer explores.",
          (("policy/entropy_nats", "entropy"),)),
    Panel("Gradient norm", "", "Before clipping. Spikes are an early sign of instability.",
          (("policy/grad_norm", "norm"),)),
    Panel("Clip fraction", "%", "Tokens at a bound on the ratio; all losses but CISPO's drop their gradient.",
          (("policy/clip_frac", "clipped"),)),
    Panel("Logprob gap", "nats", "Sampler against trainer on the same tokens. Should be about 0.",
          (("policy/logprob_gap_nats", "gap"),)),
    Panel("Judge: balanced accuracy", "%", "Share of correct verdicts, mean over both classes. Chance is 50.",
          (("judge/balanced_accuracy", "against labels"),
           ("judge/balanced_accuracy_oracle", "against oracle")), reference=50),
    Panel("Judge: AUC", "", "How often a good turn gets more good verdicts than a bad one. Chance is 0.5.",
          (("judge/auc", "against labels"), ("judge/auc_oracle", "against oracle")), reference=0.5),
    Panel("Judge: groups with variance", "%", "Questions whose verdicts differ; only these have a gradient.",
          (("judge/variance_frac", "with variance"),)),
    Panel("Judge: gradient norm", "", "Relative to the policy's gradient; large where that one is small.",
          (("judge/grad_ratio", "ratio"),)),
    Panel("Judge: gradient cosine", "", "With the policy's gradient. At 0 they do not touch each other.",
          (("judge/grad_cosine", "cosine"),), reference=0),
    Panel("Cold start: loss", "nats", "Cross-entropy per response token, mistakes and DAgger's learner too.",
          (("cold_start/loss", "loss"),)),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One path of a chart. kind: its class in style.css: "dots", "line", "area", "mark" (the reference)."""

    kind: str
    path: str           # SVG path data
    tone: str = ""
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of one chart for charts.html."""

    title: str
    unit: str
    help: str
    keys: list          # (class, text): the legend of dashes or of stages; empty for a single curve
    axes: "Axes"
    x_name: str
    shapes: list
    hover: dict         # see `hover`


# Numbers

def x_name(key):
    """Name of a metric's x axis: "step" in a cold start, else "iteration"."""
    return "step" if key.startswith("cold_start/") else "iteration"


def curve(run, key):
    """{x: value} of one metric over its iterations or steps.

    A value that is no number is None. If a resumed run logged an x twice, the later value is used.
    """
    name = x_name(key)
    return {line[name]: line[key] if is_number(line[key]) else None
            for line in run.lines if key in line and is_number(line.get(name))}


def stretch_of(curves):
    """The length in x, a power of 2, of stretches of which no curve {x: value} of a chart has more than
    POINTS; 0 if none has more points. One length for a chart: its curves then have points at the same x.
    """
    if all(len(points) <= POINTS for points in curves):
        return 0
    length = 1
    while any(len({x // length for x in points}) > POINTS for points in curves):
        length *= 2
    return length


def averaged(points, length):
    """The means of a curve {x: value} over stretches of x of a length, in order of x, each where its stretch
    begins; the points themselves for 0. None is in no mean; the mean of nothing is None.
    """
    points, stretches = dict(sorted(points.items())), {}
    if not length:
        return points
    for x, value in points.items():
        stretches.setdefault(x // length * length, []).append(value)
    known = {x: [value for value in values if value is not None] for x, values in stretches.items()}
    return {x: sum(values) / len(values) if values else None for x, values in known.items()}


def smooth(values):
    """Centered moving mean over about a 25th of the values. None stays None and is in no mean."""
    half = max(1, round(len(values) / 50))
    means = []
    for i, value in enumerate(values):
        window = [v for v in values[max(0, i - half):i + half + 1] if v is not None]
        means.append(None if value is None else sum(window) / len(window))
    return means


def ticks(low, high):
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that enclose low..high, in about four steps."""
    raw = max(abs(high - low) or abs(high) or 1.0, 1e-100) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    lowest, highest = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(lowest, max(highest, lowest + 1) + 1)]


def tones(runs):
    """{method: classes of its color}: grey if it alone has no RL iterations, else one color after the other.
    Where the colors come again, "round-1" follows: wider and paler.
    """
    untrained = [run.name for run in runs if not run.iterations]
    colored = [run.name for run in runs if run.iterations] + (untrained if len(untrained) > 1 else [])
    marks = ["", *(f" round-{i}" for i in range(1, ROUNDS))]
    return dict.fromkeys(untrained, "tone-0") | {
        name: f"tone-{1 + i % (TONES - 1)}{marks[i // (TONES - 1) % ROUNDS]}"
        for i, name in enumerate(colored)}


# Coordinates and paths

@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a chart, which convert values to SVG units."""

    x_low: float
    x_high: float
    y_ticks: list

    def x(self, value):
        return LEFT + (value - self.x_low) / ((self.x_high - self.x_low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    @property
    def rows(self):
        """(y, label) of each grid line."""
        return [(round(self.y(tick), 1), f"{tick:g}") for tick in self.y_ticks]

    @property
    def columns(self):
        """(x, label) of the integer ticks below the chart."""
        inside = [tick for tick in ticks(self.x_low, self.x_high) if self.x_low <= tick <= self.x_high]
        return [(round(self.x(tick), 1), f"{tick:g}") for tick in inside if tick == round(tick)]


def line_path(axes, xs, ys):
    """A path through the points, interrupted at None."""
    parts, pen = [], "M"
    for x, y in zip(xs, ys):
        if y is not None:
            parts.append(f"{pen}{axes.x(x):.1f} {axes.y(y):.1f}")
        pen = "M" if y is None else "L"
    return "".join(parts)


def dots_path(axes, xs, ys):
    """A path with a zero-length stroke at each point, which round line caps draw as a dot."""
    return "".join(f"M{axes.x(x):.1f} {axes.y(y):.1f}h0" for x, y in zip(xs, ys) if y is not None)


def area_path(axes, xs, floor, roof):
    """The outline of the area between two lines."""
    back = line_path(axes, xs[::-1], floor[::-1]).replace("M", "L")
    return f"{line_path(axes, xs, roof)}{back}Z"


def level_path(axes, value):
    """A horizontal line over the full width."""
    return f"M{LEFT} {axes.y(value):.1f}H{WIDTH - RIGHT}"


def hover(axes, name, unit, series):
    """The data from which script.js shows values under the pointer. series: [(name, tone, {x: y})]."""
    xs = sorted({x for _, _, points in series for x in points})
    return {"x_name": name, "unit": unit, "xs": xs, "positions": [round(axes.x(x), 1) for x in xs],
            "series": [{"name": label, "tone": tone, "ys": [points.get(x) for x in xs]}
                       for label, tone, points in series]}


# Charts

def short(value, scale=1):
    """scale * value, rounded to four digits; None stays None."""
    return None if value is None else float(f"{scale * value:.4g}")


def panel_series(panel, runs):
    """[(name, tone, dash, {x: y})] of the curves with any number, scaled to the panel's unit."""
    scale, series, tone = 100 if panel.unit == "%" else 1, [], tones(runs)
    curves = [(i, label, run, curve(run, key)) for i, (key, label) in enumerate(panel.curves) for run in runs]
    length = stretch_of([points for *_, points in curves])
    for i, label, run, raw in curves:
        points = {x: short(y, scale) for x, y in averaged(raw, length).items()}
        name = run.name if len(panel.curves) == 1 else f"{run.name}, {label}"
        if any(y is not None for y in points.values()):
            series.append((name, tone[run.name], f"dash-{i}", points))
    return series


def panel_chart(panel, runs):
    """A panel's Chart: raw points, and a smoothed line over them. None if no run logged its metrics."""
    series = panel_series(panel, runs)
    if not series:
        return None
    xs = [x for *_, points in series for x in points]
    ys = [y for *_, points in series for y in points.values() if y is not None]
    ys += [0] if panel.reference is None else [0, panel.reference]
    axes = Axes(min(xs), max(xs), ticks(min(ys), max(ys)))
    shapes = [] if panel.reference is None else [Shape("mark", level_path(axes, panel.reference))]
    shapes += [Shape("dots", dots_path(axes, points, points.values()), tone) for _, tone, _, points in series]
    shapes += [Shape("line", line_path(axes, points, smooth(list(points.values()))), tone, dash)
               for _, tone, dash, points in series]
    keys = [(f"dash-{i}", label) for i, (_, label) in enumerate(panel.curves)]
    hovered, name = [(name, tone, points) for name, tone, _, points in series], x_name(panel.curves[0][0])
    return Chart(title=panel.title, unit=panel.unit, help=panel.help, keys=keys if len(keys) > 1 else [],
                 axes=axes, x_name=name, shapes=shapes, hover=hover(axes, name, panel.unit, hovered))


def panel_charts(panels, runs):
    """The charts of the panels that any run logged."""
    return [chart for panel in panels if (chart := panel_chart(panel, runs))]


def other_panels(runs):
    """A panel for every logged metric that PANELS leaves out, except the stages' times."""
    drawn = {key for panel in PANELS for key, _ in panel.curves} | {*STAGES}
    keys = {key for run in runs for line in run.lines for key in line if "/" in key}
    return [Panel(key, "", "", ((key, key),)) for key in sorted(keys - drawn)]


def stage_seconds(run):
    """[(stage, {iteration: seconds})] of the parts that make up an iteration; a missing value is 0 s."""
    keys = {key for line in run.lines if "iteration" in line for key in line}
    ordered = [key for key in STAGES if key in keys]
    found = {key: curve(run, key) for key in ordered}
    xs = {x for points in found.values() for x in points}
    length = stretch_of([xs])
    return [(key.removeprefix("time/").removesuffix("_s"),
             averaged({x: found[key].get(x) or 0.0 for x in xs}, length)) for key in ordered] if xs else []


def stages_chart(run, stages, top_s):
    """Seconds per iteration, stacked by stage. top_s: top of the y axis, the same for all methods."""
    xs = list(stages[0][1])
    axes = Axes(min(xs), max(xs), ticks(0, max(top_s, 0)))
    floor, shapes, keys, series = [0.0] * len(xs), [], [], []
    for i, (stage, points) in enumerate(stages):
        tone = f"stage-{i}"
        roof = [low + points[x] for low, x in zip(floor, xs)]
        shapes.append(Shape("area", area_path(axes, xs, floor, roof), tone))
        keys.append((tone, stage))
        series.append((stage, tone, {x: short(points[x]) for x in xs}))
        floor = roof
    return Chart(title=run.name, unit="s", help="Seconds per iteration, stacked by stage.", keys=keys,
                 axes=axes, x_name="iteration", shapes=shapes, hover=hover(axes, "iteration", "s", series))


def time_charts(runs):
    """One stacked chart per method that logged times, of two iterations at least: an area has a width."""
    found = [(run, stages) for run in runs if (stages := stage_seconds(run)) and len(stages[0][1]) > 1]
    tops = [sum(points[x] for _, points in stages) for _, stages in found for x in stages[0][1]]
    return [stages_chart(run, stages, max(tops)) for run, stages in found]


def split_charts(runs, summary, seeds):
    """Per split, its caption and each method's success as shares between 0 and 1, for charts.html."""
    tone, caption_of = tones(runs), captions(runs, summary)
    return [{"split": split, "caption": caption_of.get(split, ""), "scores": [
        {"name": name, "tone": tone[name], "text": interval(scores[split]), "score": bounded(scores[split]),
         "seeds": over_seeds(seeds, name, split)}
        for name, scores in summary["methods"].items() if is_number(scores.get(split, {}).get("success"))
    ]} for split in split_names(summary)]


def bounded(score):
    """The score with its interval clipped to 0 and 1; without an interval, low and high are the score."""
    success = score["success"]
    low, high = (score[key] if is_number(score[key]) else success for key in ("low", "high"))
    return {"success": success, "low": max(low, 0), "high": min(high, 1)}


def over_seeds(seeds, name, split):
    """A method's score on a split over several seeds, drawn like a score; None if unknown."""
    score = seeds.scores.get(name, {}).get(split) if seeds else None
    if score is None:
        return None
    mean, half = score["mean"], score["half"]
    bounds = bounded({"success": mean, "low": mean - half, "high": mean + half})
    return {"text": mean_and_half(score)} | bounds
