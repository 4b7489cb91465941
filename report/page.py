"""Runs and their summary -> report.html as one text that needs no other file and no network.

Chooses the episodes that fit, and hands everything to page.html. Autoescape is on, and the episodes' data is
escaped for <script>: no text of an episode can become markup. Left out: any markup.
"""

import json
from collections import Counter
from pathlib import Path

import jinja2
from jinja2.utils import htmlsafe_json_dumps

from report import charts, tables
from run.files import finite

EPISODE_BYTES = 2_300_000           # of the page's 3 MB
COMPACT = {"separators": (",", ":"), "allow_nan": False}


def environment():
    """Where the templates are found, and how they escape."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.policies["json.dumps_kwargs"] = COMPACT
    return found


def choose_episodes(runs, budget):
    """Stored episodes for the page, at most `budget` characters of JSON, and how many there were.

    Every place (a method's split or iteration) gives one episode before any gives a second; evaluation goes
    first, and iterations go in golden-ratio order, so that whatever fits is spread evenly over training.
    """
    places, seen, queue = {}, Counter(), []
    for method, episode in [(run.name, episode) for run in runs for episode in run.episodes]:
        place = (method, *map(episode.get, ("phase", "iteration", "split")))
        spread = places.setdefault(place, len(places)) * 0.6180339887 % 1
        rank = (seen[place], episode.get("phase") == "rl", spread)
        queue.append((*rank, len(queue), finite({"method": method} | episode)))
        seen[place] += 1
    chosen = []
    for *_, order, episode in sorted(queue, key=lambda entry: entry[:4]):
        size = len(htmlsafe_json_dumps(episode, json.dumps, **COMPACT)) + 1
        if size <= budget:
            chosen.append((order, episode))
            budget -= size
    return [episode for _, episode in sorted(chosen, key=lambda entry: entry[0])], len(queue)


def facts(runs, summary):
    """{name: words}, the head of the page: what ran, with what, for how long."""
    counts = {run.name: len(run.iterations) for run in runs}
    methods = [f"{name} ({count} iterations)" if count else name for name, count in counts.items()]
    headers = [run.header for run in runs]
    versions = [", ".join(f"{name} {version}" for name, version in header.get("versions", {}).items())
                for header in headers]
    minutes = sum(summary["seconds"].get(run.name) or 0 for run in runs) / 60
    found = {"Methods": methods, "Games": [run.evaluation.get("games") for run in runs],
             "Started": [header.get("started") for header in headers][:1],
             "Time": [f"{minutes:.1f} min"] if minutes else [], "Versions": versions,
             "Commit": [header.get("commit") for header in headers]}
    joined = {name: ", ".join(dict.fromkeys(word for word in words if word)) for name, words in found.items()}
    return {name: words for name, words in joined.items() if words}


def page(runs, summary, seeds):
    """The whole report. `seeds` is what several seeds gave, or None."""
    episodes, stored = choose_episodes(runs, EPISODE_BYTES)
    heads, rows = tables.headline_rows(summary, seeds)
    return environment().get_template("page.html").render(
        facts=facts(runs, summary),
        warnings=tables.distinct(runs, "warning") + [note for run in runs for note in run.notes],
        notes=tables.distinct(runs, "note"), seeds=seeds,
        split_charts=charts.split_charts(runs, summary, seeds), headline_heads=heads, headline_rows=rows,
        detail_rows=tables.detail_rows(runs), tones=charts.tones(runs),
        curves=charts.panel_charts(charts.PANELS, runs), times=charts.time_charts(runs),
        rest=charts.panel_charts(charts.rest_panels(runs), runs), size=charts,
        episodes=episodes, stored=stored, difference_rows=tables.difference_rows(runs),
        commands={run.name: tables.command(run) for run in runs})
