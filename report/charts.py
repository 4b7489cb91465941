"""Runs -> what the page's charts show: places on the chart, path data and the values under the pointer.

charts.html draws it as SVG; a "tone" is a colour's class in style.css. Left out: any markup.
"""

import math
from dataclasses import dataclass

from report.read import is_number
from report.tables import captions, interval, seed_words, split_names

TONES, STAGE_TONES, DASHES = 7, 6, 3       # as many as style.css has; then they begin again
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 360, 200, 44, 10, 8, 30     # of a chart, in SVG units


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the training curves."""

    title: str
    unit: str           # "%" also multiplies by 100
    help: str           # what to look for, in one sentence
    curves: tuple       # (metric key, its words in the legend)
    mark: float | None = None    # a horizontal line: the value of a judge that guesses

    @property
    def x_name(self):
        return x_name(self.curves[0][0])


PANELS = (
    Panel("Success in training", "%", "Episodes won while sampling; the tasks change every iteration.",
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


@dataclass(frozen=True, slots=True)
class Shape:
    """One path of a chart; `kind` is how style.css draws it: dots, line, area or mark."""

    kind: str
    path: str           # SVG path data
    tone: str = ""
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """All that charts.html needs for one framed chart."""

    title: str
    unit: str
    help: str
    keys: list          # (class, words): the legend of dashes or of stages; empty where there is one curve
    axes: "Axes"
    x_name: str
    shapes: list
    hover: dict         # what the page's script shows under the pointer


# Numbers

def x_name(key):
    """What a metric is logged by: the step of a cold start, or the iteration."""
    return "step" if key.startswith("cold_start/") else "iteration"


def curve(run, key):
    """{x: value} of one metric over its iterations or steps.

    A value that is no number is None. A resumed run may have logged an x twice: the later one counts.
    """
    name = x_name(key)
    return {line[name]: line[key] if is_number(line[key]) else None
            for line in run.lines if key in line and is_number(line.get(name))}


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
    lowest, highest = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(lowest, max(highest, lowest + 1) + 1)]


def tones(runs):
    """{method: class of its colour}: what has no RL iterations is grey, the others go through the colours."""
    trained = [run.name for run in runs if run.iterations]
    return {run.name: "tone-0" for run in runs} | {
        name: f"tone-{1 + i % (TONES - 1)}" for i, name in enumerate(trained)}


# Places and paths

@dataclass(frozen=True, slots=True)
class Axes:
    """The frame of a chart: where a value lies on it, in SVG units."""

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
        """(x, label) of the whole numbers under the chart."""
        inside = [tick for tick in ticks(self.x_low, self.x_high) if self.x_low <= tick <= self.x_high]
        return [(round(self.x(tick), 1), f"{tick:g}") for tick in inside if tick == round(tick)]


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


def area_path(axes, xs, floor, roof):
    """The outline of what lies between two lines."""
    back = line_path(axes, xs[::-1], floor[::-1]).replace("M", "L")
    return f"{line_path(axes, xs, roof)}{back}Z"


def level_path(axes, value):
    """A horizontal line over the whole chart."""
    return f"M{LEFT} {axes.y(value):.1f}H{WIDTH - RIGHT}"


def hover(axes, name, unit, series):
    """What the page's script needs to show values: series is [(name, tone, {x: y})]."""
    xs = sorted({x for _, _, points in series for x in points})
    return {"x_name": name, "unit": unit, "xs": xs, "places": [round(axes.x(x), 1) for x in xs],
            "series": [{"name": words, "tone": tone, "ys": [points.get(x) for x in xs]}
                       for words, tone, points in series]}


# Charts

def short(value, scale=1):
    """A number of four digits, enough to draw and to read; None stays None."""
    return None if value is None else float(f"{scale * value:.4g}")


def panel_series(panel, runs):
    """[(name, tone, dash, {x: y})] of the curves that have a number to draw, scaled to the panel's unit."""
    scale, series, tone = 100 if panel.unit == "%" else 1, [], tones(runs)
    for i, (key, words) in enumerate(panel.curves):
        for run in runs:
            points = {x: short(y, scale) for x, y in sorted(curve(run, key).items())}
            name = run.name if len(panel.curves) == 1 else f"{run.name}, {words}"
            if any(y is not None for y in points.values()):
                series.append((name, tone[run.name], f"dash-{i % DASHES}", points))
    return series


def panel_chart(panel, runs):
    """A panel as raw points and a lightly smoothed line over them. None where no run logged it."""
    series = panel_series(panel, runs)
    if not series:
        return None
    xs = [x for *_, points in series for x in points]
    ys = [y for *_, points in series for y in points.values() if y is not None]
    ys += [0] if panel.mark is None else [0, panel.mark]
    axes = Axes(min(xs), max(xs), ticks(min(ys), max(ys)))
    shapes = [] if panel.mark is None else [Shape("mark", level_path(axes, panel.mark))]
    shapes += [Shape("dots", dots_path(axes, points, points.values()), tone) for _, tone, _, points in series]
    shapes += [Shape("line", line_path(axes, points, smooth(list(points.values()))), tone, dash)
               for _, tone, dash, points in series]
    keys = [(f"dash-{i % DASHES}", words) for i, (_, words) in enumerate(panel.curves)]
    shown = [(name, tone, points) for name, tone, _, points in series]
    return Chart(title=panel.title, unit=panel.unit, help=panel.help, keys=keys if len(keys) > 1 else [],
                 axes=axes, x_name=panel.x_name, shapes=shapes,
                 hover=hover(axes, panel.x_name, panel.unit, shown))


def panel_charts(panels, runs):
    """The charts of the panels that any run has numbers for."""
    return [chart for panel in panels if (chart := panel_chart(panel, runs))]


def rest_panels(runs):
    """A panel for every logged number that no other chart shows."""
    shown = {key for panel in PANELS for key, _ in panel.curves}
    keys = {key for run in runs for line in run.lines for key in line if "/" in key}
    return [Panel(key, "", "", ((key, key),)) for key in sorted(keys - shown) if not key.startswith("time/")]


def stage_series(run):
    """[(stage, {x: seconds})] of an iteration's timed parts; a missing one took 0 s. Totals are left out."""
    keys = {key for line in run.lines if "iteration" in line for key in line if key.startswith("time/")}
    keys -= {"time/iteration_s", "time/total_s"}
    known = ["time/rollout_s", "time/judge_s", "time/update_s"]
    ordered = [key for key in known if key in keys] + sorted(keys - set(known))
    found = {key: curve(run, key) for key in ordered}
    xs = sorted({x for points in found.values() for x in points})
    return [(key.removeprefix("time/").removesuffix("_s"), {x: found[key].get(x) or 0.0 for x in xs})
            for key in ordered] if xs else []


def stages_chart(run, stages, top_s):
    """Seconds of each iteration, its stages stacked; `top_s` is one for all methods, so that they compare."""
    xs = list(stages[0][1])
    axes, floor, shapes, keys, series = Axes(min(xs), max(xs), ticks(0, top_s)), [0.0] * len(xs), [], [], []
    for i, (stage, points) in enumerate(stages):
        tone = f"stage-{i % STAGE_TONES}"
        roof = [low + points[x] for low, x in zip(floor, xs)]
        shapes.append(Shape("area", area_path(axes, xs, floor, roof), tone))
        keys.append((tone, stage))
        series.append((stage, tone, {x: short(points[x]) for x in xs}))
        floor = roof
    return Chart(title=run.name, unit="s", help="Seconds of each iteration by stage, stacked.", keys=keys,
                 axes=axes, x_name="iteration", shapes=shapes, hover=hover(axes, "iteration", "s", series))


def time_charts(runs):
    """One stacked chart per method that logged times."""
    found = [(run, stages) for run in runs if (stages := stage_series(run))]
    tops = [sum(points[x] for _, points in stages) for _, stages in found for x in stages[0][1]]
    return [stages_chart(run, stages, max(tops)) for run, stages in found]


def split_charts(runs, summary, seeds):
    """Per split its caption and each method's success: values between 0 and 1, which charts.html places."""
    tone, worded = tones(runs), captions(runs, summary)
    return [{"split": split, "caption": worded.get(split, ""), "scores": [
        {"name": name, "tone": tone[name], "words": interval(scores[split]), "score": bounded(scores[split]),
         "seeds": several(seeds, name, split)}
        for name, scores in summary["methods"].items() if is_number(scores.get(split, {}).get("success"))
    ]} for split in split_names(summary)]


def bounded(score):
    """A score whose interval lies between 0 and 1; without one, it is the score itself."""
    success = score["success"]
    low, high = (score[key] if is_number(score[key]) else success for key in ("low", "high"))
    return {"success": success, "low": max(low, 0), "high": min(high, 1)}


def several(seeds, name, split):
    """What several seeds of a method gave on a split, drawn like a score; None where that is not known."""
    score = seeds.scores.get(name, {}).get(split) if seeds else None
    if score is None:
        return None
    mean, half = score["mean"], score["half"]
    return {"words": seed_words(score)} | bounded({"success": mean, "low": mean - half, "high": mean + half})
