"""The report of runs and their summary, as one HTML text that needs no other file and no network.

Chooses the episodes that fit on the page, and renders page.html. Autoescape is on, and the episodes' data is
escaped for <script>: no text of a run can become markup. Left out: any markup.
"""

import json
from collections import Counter
from pathlib import Path

import jinja2
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from envs._terminal import printable
from infra.files import is_number
from report import charts, tables

EPISODE_BYTES = 2_300_000           # of the page, which has the charts besides
COMPACT = {"separators": (",", ":"), "allow_nan": False}


def legible(value):
    """What a template shows for a value: of text, escapes for what HTML does not carry or what would reorder
    the text around it, see `printable`; the episodes' data, which is JSON, is exact.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return printable(value).encode("utf-8", "backslashreplace").decode()


def templates():
    """The jinja2 environment of this folder's templates, with autoescape."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=legible,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = COMPACT
    return environment


def choose_episodes(runs, budget):
    """Stored episodes for the page, of at most `budget` characters as JSON, and the number that is stored.

    Every source (a method's split or iteration) gives one episode before any gives a second. Evaluation comes
    first. Iterations are in golden-ratio order: any first part of them is spread evenly over training.
    """
    sources, queued_of, queue = {}, Counter(), []
    for method, episode in [(run.name, episode) for run in runs for episode in run.episodes]:
        source = (method, *map(episode.get, ("phase", "iteration", "split")))
        spread = sources.setdefault(source, len(sources)) * 0.6180339887 % 1
        rank = (queued_of[source], episode.get("phase") == "rl", spread)
        queue.append((*rank, len(queue), episode | {"method": method}))
        queued_of[source] += 1
    chosen = []
    for *_, order, episode in sorted(queue, key=lambda entry: entry[:4]):
        size = len(htmlsafe_json_dumps(episode, json.dumps, **COMPACT)) + 1
        if size <= budget:
            chosen.append((order, episode))
            budget -= size
    return [episode for _, episode in sorted(chosen, key=lambda entry: entry[0])], len(queue)


def facts(runs, summary):
    """{name: text} for the head of the page: methods, games, start, time, versions, commit."""
    methods = []
    for run in runs:
        done, total = len(run.iterations), run.header.get("config", {}).get("iterations")
        part = f"{done} of {total}" if is_number(total) and done < total else str(done)
        methods.append(f"{run.name} ({part} iterations)" if done else run.name)
    headers = [run.header for run in runs]
    versions = [", ".join(f"{name} {version}" for name, version in header.get("versions", {}).items())
                for header in headers]
    minutes = sum(summary["seconds"].get(run.name) or 0 for run in runs) / 60
    found = {"Methods": methods, "Games": [run.evaluation.get("games") for run in runs],
             "Started": [header.get("started") for header in headers][:1],
             "Time, runs added up": [f"{minutes:.1f} min"] if minutes else [], "Versions": versions,
             "Commit": [commit for header in headers for commit in (header.get("commit") or "").split(", ")]}
    joined = {name: ", ".join(dict.fromkeys(part for part in parts if part)) for name, parts in found.items()}
    return {name: text for name, text in joined.items() if text}


def page(runs, summary, seeds):
    """The report as HTML. seeds: read.Seeds, or None."""
    episodes, stored = choose_episodes(runs, EPISODE_BYTES)
    heads, rows = tables.headline_rows(summary, seeds)
    return templates().get_template("page.html").render(
        facts=facts(runs, summary),
        warnings=tables.distinct(runs, "warning") + [note for run in runs for note in run.notes],
        notes=[*filter(None, [tables.protocol_caption(runs)]), *tables.distinct(runs, "note")], seeds=seeds,
        temperatures=" or ".join(sorted({f"{run.evaluation.get('temperature') or 1:g}" for run in runs
                                         if run.evaluation})),
        split_charts=charts.split_charts(runs, summary, seeds), headline_heads=heads, headline_rows=rows,
        detail_rows=tables.detail_rows(runs), tones=charts.tones(runs),
        curves=charts.panel_charts(charts.PANELS, runs), times=charts.time_charts(runs),
        others=charts.panel_charts(charts.other_panels(runs), runs), size=charts,
        episodes=episodes, stored=stored, difference_rows=tables.difference_rows(runs),
        commands={run.name: tables.command(run) for run in runs})
