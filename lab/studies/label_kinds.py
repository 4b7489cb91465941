"""How often is a judge's label right? Every kind of labels against the environment's oracle.

Models of several strengths play training tasks, eight episodes each; every turn is labelled by every kind of
labels.py, and by the paper's rule on raw observations (arXiv:2509.23870 §4.1, "literal"). For each
kind this counts the turns that it calls good and bad, what the oracle says of them, and how many of the bad
ones the game refused: a judge that knows those knows the game's grammar, not which action is flawed.

The oracle (envs/alfred/expert.py) has limits of its own: it calls a turn good if the goal needs it or if it
searches, given what was seen; bad if it was refused, undoes progress, or shows nothing new; and says nothing
of the rest, whose share is in the table. It does not call a search in an unlikely place bad.

    python -m lab.studies.label_kinds --games ../shared/data/alfworld/games.jsonl.gz

Left out: environments without an oracle (ScienceWorld), and labels of a large model.
"""

import argparse
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import labels
from infra import files
from infra.streams import stream
from lab.bench.intervals import markdown
from lab.studies import common
from rollout import EpisodeSpec

PAGE = Path(__file__).with_name("label_kinds.page.md")
RUNS = common.ROOT / "runs" / "studies" / "label_kinds"
COMMITTED = common.ROOT / "lab" / "results" / "alfworld_model"
SEED, TASKS, MEMBERS, PLAY = 0, 96, 8, 21       # PLAY: purpose of the random streams
ROOMS = ("--env", "household", "--device", "cpu", "--evaluate", "none")
REAL = (*ROOMS, "--train-types", "all", "--max-turns", "30")
# {name: (demonstrations of its cold start; 0: the committed model on real games, sampling temperature)}
MODELS = {"generated rooms, 800 demonstrations": (800, 1.0),
          "generated rooms, 1,500 demonstrations": (1500, 1.0),
          "generated rooms, 3,000 demonstrations": (3000, 1.0),
          "real games, committed model at temperature 2": (0, 2.0),
          "real games, committed model": (0, 1.0)}
KINDS = ("literal", "rule", "dense", "taken", "rule+oracle", "oracle", "flaws")


# Labels and counts

def literal_labels(episode):
    """The paper's rule on observations as they are, "Nothing happens." included.

    "bad": a turn whose observation occurs again later; "good": the last turn of a won episode.
    """
    seen = [turn.observation for turn in episode.turns] + [episode.final_observation]
    found = ["bad" if seen[t] in seen[t + 1:] else None for t in range(len(episode.turns))]
    if episode.won:
        found[-1] = "good"
    return found


def counted(episodes, environment):
    """{kind: counts} of all turns: {"label/oracle/taken or refused/won or lost": number of turns}."""
    truth = [labels.oracle_labels(episode, environment) for episode in episodes]
    result = {}
    for kind in KINDS:
        counts = Counter()
        for episode, of_oracle in zip(episodes, truth, strict=True):
            given = (literal_labels(episode) if kind == "literal"
                     else labels.label_turns(episode, kind, environment))
            for turn, label, oracle in zip(episode.turns, given, of_oracle, strict=True):
                counts["/".join([label or "none", oracle or "none", "taken" if turn.valid else "refused",
                                 "won" if episode.won else "lost"])] += 1
        result[kind] = dict(sorted(counts.items()))
    return result


def share(counts, part, among):
    """The share of `part` in `among`, both (label, oracle, taken, won) with None for any; None if empty."""
    def total(wanted):
        return sum(n for name, n in counts.items()
                   if all(want in (None, is_) for want, is_ in zip(wanted, name.split("/"), strict=True)))

    return total(part) / total(among) if total(among) else None


def numbers(counts):
    """The table's numbers of one kind and model: precision, recall, shares."""
    bad = sum(n for name, n in counts.items() if name.startswith("bad/"))
    good = sum(n for name, n in counts.items() if name.startswith("good/"))
    return {"good": good, "bad": bad,
            "good precision": share(counts, ("good", "good", None, None), ("good", None, None, None)),
            "good, oracle bad": share(counts, ("good", "bad", None, None), ("good", None, None, None)),
            "good in won": share(counts, ("good", None, None, "won"), ("good", None, None, None)),
            "good recall": share(counts, ("good", "good", "taken", None), (None, "good", "taken", None)),
            "bad refused": share(counts, ("bad", None, "refused", None), ("bad", None, None, None)),
            "bad precision": share(counts, ("bad", "bad", "taken", None), ("bad", None, "taken", None)),
            "bad, oracle good": share(counts, ("bad", "good", "taken", None), ("bad", None, "taken", None)),
            "bad in lost": share(counts, ("bad", None, "taken", "lost"), ("bad", None, "taken", None)),
            "flaw recall": share(counts, ("bad", "bad", "taken", None), (None, "bad", "taken", None))}


# Models

def cold_folder(demonstrations, runs):
    """The folder of the cold start with so many demonstrations."""
    return runs / f"cold_start_{demonstrations}"


def cold_start(name, settings):
    """Run a cold start of --preset small in the folder `name`."""
    common.make([*ROOMS, "--seed", SEED, "--demonstrations", settings["demonstrations"], "--iterations", 0,
                 "--overwrite"], Path(name))


def cell(name, settings, games, runs):
    """Play one model; returns its success, what the oracle says, and `counted`."""
    n = settings["demonstrations"]
    actor = (common.load_actor(cold_folder(n, runs) / files.CHECKPOINT, ROOMS) if n
             else common.load_actor(COMMITTED, (*REAL, "--games", games)))
    environment = actor.config.environment
    tasks = environment.train_tasks(actor.config.train_types, 0, settings["tasks"])
    specs = [EpisodeSpec(task, g, stream(SEED, PLAY, g, member), g * MEMBERS + member)
             for g, task in enumerate(tasks) for member in range(MEMBERS)]
    episodes = actor.play(specs, settings["temperature"])
    return {"success": sum(episode.won for episode in episodes) / len(episodes), "episodes": len(episodes),
            "counts": counted(episodes, environment)}


# Page

def percent(value):
    """A share in per cent as text."""
    return "–" if value is None else f"{100 * value:.0f}"


def about(name, result):
    """A model's row: success, turns, refusals, flaws, and the share that the oracle says nothing of."""
    counts = result["counts"]["oracle"]
    everything = (None, None, None, None)
    turns = sum(counts.values())
    return [name, percent(result["success"]), f"{turns:,}",
            percent(share(counts, (None, None, "refused", None), everything)),
            percent(share(counts, (None, "bad", "taken", None), everything)),
            percent(share(counts, (None, "none", None, None), everything))]


def tables(results):
    """The page's two tables as text: the models, and every kind on every model."""
    models = markdown(["model", "success", "turns", "refused", "flaws", "oracle says nothing"],
                      [about(name, result) for name, result in results.items()])
    rows = []
    for name, result in results.items():
        for kind in KINDS:
            found = numbers(result["counts"][kind])
            rows.append([name, kind, f"{found['good']:,}", *(percent(found[key]) for key in (
                "good precision", "good in won", "good recall")), f"{found['bad']:,}",
                *(percent(found[key]) for key in (
                    "bad refused", "bad precision", "bad, oracle good", "bad in lost", "flaw recall"))])
    head = ["model", "kind", "good", "right", "in won episodes", "found of good turns taken", "bad",
            "refusals", "of taken: right", "of taken: good", "of taken: in lost episodes", "found of flaws"]
    return models, markdown(head, rows)


def draw(results, path):
    """Plot what the oracle says of the bad turns that the game took, by kind and model."""
    pyplot = common.pyplot("label_kinds")
    kinds = KINDS[:4]
    figure, axes = pyplot.subplots(1, len(results), figsize=(3 * len(results), 3), sharey=True,
                                   layout="constrained", squeeze=False)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        found = [numbers(result["counts"][kind]) for kind in kinds]
        right, wrong = ([of_kind[key] or 0 for of_kind in found]
                        for key in ("bad precision", "bad, oracle good"))
        neither = [1 - r - w for r, w in zip(right, wrong)]
        axis.bar(kinds, right, color="tab:red", label="bad by the oracle")
        axis.bar(kinds, neither, bottom=right, color="lightgray", label="neither")
        axis.bar(kinds, wrong, bottom=[1 - w for w in wrong], color="tab:green", label="good by the oracle")
        axis.set_title(name.replace(", ", "\n"), fontsize=8)
    axes[0][0].set_ylabel("of the turns called bad\nthat the game took")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    common.save(figure, path)


def span(results, kind, key):
    """The smallest and the largest of a kind's numbers over the models, as text."""
    known = [found for result in results.values()
             if (found := numbers(result["counts"][kind])[key]) is not None]
    if not known:
        return "not measurable"
    low, high = (f"{100 * end:.0f}" for end in (min(known), max(known)))
    return f"{low} %" if low == high else f"{low} to {high} %"


def figures_of(results):
    """What was found on the paper's rule, on observations as they are, for the gallery."""
    precise = [numbers(result["counts"]["literal"])["bad precision"] or 0 for result in results.values()]
    return [{"paper": "Section 4.1 (labels)", "picture": "label_kinds.svg",
             "claim": "An observation that occurs again later shows that the step may have been useless.",
             "found": f"Of the turns that the rule calls bad {span(results, 'literal', 'bad refused')} were "
                      f"refused; of the others {span(results, 'literal', 'bad precision')} are bad by the "
                      f"oracle and {span(results, 'literal', 'bad, oracle good')} good: the model came back "
                      "because it had to. On the last informative observations (kind rule) "
                      f"{span(results, 'rule', 'bad precision')} are bad, and of those on a loop that showed "
                      "nothing new (kind taken) "
                      f"{span(results, 'taken', 'bad precision')} are bad.",
             "agrees": "yes" if min(precise) >= 0.8 else "partly" if min(precise) >= 0.5 else "no"}]


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.studies.label_kinds", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--games", default="",
                        help="real ALFWorld games, folder or .jsonl.gz; empty: none of them")
    parser.add_argument("--tasks", type=int, default=TASKS, help="training tasks, 8 episodes each")
    common.add_cells(parser, 2, RUNS, "cold starts")
    options = parser.parse_args(argv)
    common.check_ranges(parser, ("tasks", options.tasks, 1, 10**4), ("jobs", options.jobs, 0, 256))
    everything = {name: {"demonstrations": n, "temperature": temperature, "tasks": options.tasks}
                  for name, (n, temperature) in MODELS.items()}
    requested = {name: settings for name, settings in everything.items()
                 if settings["demonstrations"] or options.games}
    path = options.out / "label_kinds.jsonl"
    try:
        missing = common.missing_cells(path, requested, options)
    except ValueError as error:
        parser.error(str(error))
    colds = {str(cold_folder(settings["demonstrations"], options.runs)): settings
             for settings in missing.values() if settings["demonstrations"]}
    common.make_runs(colds, cold_start, options.jobs, "cold starts")
    common.run_cells(path, requested, partial(cell, games=options.games, runs=options.runs), options)
    if not (results := common.stored_cells(path, everything)):
        parser.error(f"--jobs=0: {path} has no cell")
    draw(results, options.out / "label_kinds.svg")
    real = any(not everything[name]["demonstrations"] for name in results)          # models of real games
    given = ["--games", options.games or "GAMES"] if real else []
    given += ["--tasks", str(options.tasks)] if options.tasks != TASKS else []
    command = ["python", "-m", "lab.studies.label_kinds", *given]
    models, kinds = tables(results)
    spans = {"rule_right": ("rule", "bad precision"), "rule_refused": ("rule", "bad refused"),
             "dense_won": ("dense", "good in won"), "taken_right": ("taken", "bad precision"),
             "taken_found": ("taken", "flaw recall"), "taken_won": ("taken", "good in won"),
             "taken_good": ("taken", "good precision")}
    text = PAGE.read_text(encoding="utf-8").format(
        command=" ".join(command), tasks=options.tasks, models=models, kinds=kinds,
        **{field: span(results, *of) for field, of in spans.items()})
    common.publish(options.out, "label_kinds", command, [SEED],
                   {"rows": {name: {kind: numbers(counts) for kind, counts in result["counts"].items()}
                             for name, result in results.items()}}, figures_of(results), text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
