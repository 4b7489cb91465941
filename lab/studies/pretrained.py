"""Coupling in a pretrained language model: do its turns share more gradient than a small model's do?

arXiv:2509.23870, sections 3.2 and 4, on SmolLM2-135M (lm/smollm2.py) and the small model from scratch, by
the measures of lab/studies/influence.py on *the same turns*: the expert plays TASKS generated rooms with a
mistake at a quarter of its turns, and each model reads these texts through its own tokenizer and plain
prompt. So no turn is sampled by a model that is measured. Measured are the models before training, after cold
starts with and without judge questions, and along RL: Equation 2 and hidden states over pairs of turns
(Figure 3a), by kind of token; gradient steps on the whole model for a few turns (Figure 3b); and what a step
on a good turn does to a flawed one with the same command in another room, the leak.

    python -m lab.studies.pretrained --arms ""              # without RL: two hours of a core a seed
    python -m lab.studies.pretrained                        # and some three and a half more for each seed
    python -m lab.studies.pretrained --seeds 0,1,2

Costs are SmolLM2's on a core of an Intel without bf16 tiles (lm/model.py, Linear). Measured were its cold
start with judge questions, 37 minutes, and a cell, 8 minutes and 6 GB of memory; from these the other cold
starts are some 15 and 35 minutes, an arm of ten iterations an hour and a half. Runs keep 12 GB a seed in
runs/studies/pretrained, which may go once the cells are stored. Left out: success (lab.bench.table1 with
lab/results/table1_pretraining.json).
Shapes: S turns, N response tokens, P pairs of turns, d hidden size.
"""

import argparse
import hashlib
import itertools
import shlex
import sys
from functools import partial
from pathlib import Path

import torch

import cold_start
from infra.streams import DEMONSTRATIONS, stream
from lab.bench import jobs
from lab.bench.intervals import interval, markdown, paired, sign_of, with_half
from lab.studies import common, coupling, influence, runs
from rollout import EpisodeSpec

PAGE = Path(__file__).with_name("pretrained.page.md")
TASKS, MISTAKES = 36, 0.25               # rooms, and the share of mistakes: 329 turns with seed 0
TURNS, COMMANDS = 110, 3                 # turns of the pairs; commands of the whole-model gradients
COLORS = {"SmolLM2": "tab:blue", "small": "tab:orange"}
MODELS = tuple(COLORS)
ARMS = ("grpo", "grpo+gcd")
ITERATIONS = 10
JUDGED = "with judge questions"          # the cold start from which RL begins
MAPPED = ("untrained", "300 demonstrations", JUDGED)      # what the maps of the whole model show, by model
POLICY = ("--judge-demonstrations", "0", "--judge-epochs", "0")               # one pass, the policy alone
# {model: flags of all its runs}
FLAGS = {
    "SmolLM2": ("--model", "smollm2", "--prompt", "plain", "--dtype", "bfloat16", "--cold-start-lr", "1e-4",
                "--checkpoint-every", "8", "--judge-labels", "taken", "--tasks", "4", "--minibatches", "2",
                "--judge-turns", "16", "--lr", "1e-5", "--kl", "loss", "--kl-coef", "0.01"),
    "small": ("--judge-labels", "taken"),
}
# {model: {cold start: its flags}}. One at learning rate 0 is the model as it begins. A pretrained model
# learns policy and judge together, as in the paper; the small one's last is its usual cold start
STAGES = {
    "SmolLM2": {"untrained": ("--demonstrations", "4", *POLICY, "--cold-start-lr", "0"),
                "96 demonstrations": ("--demonstrations", "96", *POLICY),
                "300 demonstrations": ("--demonstrations", "300", *POLICY),
                JUDGED: ("--demonstrations", "300", "--judge-demonstrations", "100", "--cold-start-epochs",
                         "0")},
    "small": {"untrained": ("--demonstrations", "4", *POLICY, "--cold-start-lr", "0"),
              "96 demonstrations": ("--demonstrations", "96", *POLICY),
              "300 demonstrations": ("--demonstrations", "300", *POLICY),
              "3000 demonstrations": ("--demonstrations", "3000", *POLICY),
              JUDGED: ("--demonstrations", "3000")},
}
# Numbers of a cell that the table shows and that are compared: {name: text}
NUMBERS = {"nats": "nats of a good command", "hidden": "hidden states' cosine",
           "rms": "gradients' cosine, root mean square", "same command": "one command",
           "same verb": "one verb", "other verbs": "other verbs", "gap": "within good or bad, less across",
           "leak": "good to flawed, one command", "kept": "good to good, one command",
           "share": "flawed one's share of the good one's rise", "whole same": "whole model, one command",
           "whole different": "whole model, other commands", "whole leak": "whole model, good to flawed"}


# Turns

def shared_turns(actor, seed):
    """The expert's turns, with MISTAKES, in the first TASKS training rooms, through a model's own chat.

    Also returns a hash of their texts, which is the same for all models.
    """
    environment, episodes = actor.config.environment, []
    expert = environment.expert([])
    for i, task in enumerate(environment.train_tasks("part", 0, TASKS)):
        demonstration = expert.show(task, stream(seed, DEMONSTRATIONS, i), MISTAKES,
                                    actor.config.max_turns)
        episodes.append(cold_start.replay(actor.chat, EpisodeSpec(task, i, 0, i), demonstration,
                                          actor.config.history, environment.search_verbs))
    texts = [(episode.task.id, turn.observation, turn.action) for episode in episodes
             for turn in episode.turns]
    return (influence.turns_of(episodes, actor.chat, environment),
            hashlib.sha256(repr(texts).encode()).hexdigest())


# Measures

def pair_numbers(turns, coupling_SS, hidden_Sd):
    """Figure 3a over all pairs of turns of different tasks: cosines of the output layer's gradients
    (Equation 2) and of mean hidden states.

    "same verb": pairs of different commands whose first word is the same. None where there is no pair.
    """
    pair_SS = influence.differ([turn.task for turn in turns]).triu(1)
    other_SS = influence.differ([turn.action for turn in turns])
    verb_SS = influence.differ([turn.action.split()[0] for turn in turns])
    cosine_SS = influence.cosines(coupling_SS)
    hidden_SS = influence.cosines(hidden_Sd @ hidden_Sd.T)
    return {"hidden": influence.mean_of(hidden_SS[pair_SS]),
            "rms": float(cosine_SS[pair_SS].square().mean().sqrt()),
            "same command": influence.mean_of(cosine_SS[pair_SS & ~other_SS]),
            "same verb": influence.mean_of(cosine_SS[pair_SS & other_SS & ~verb_SS]),
            "other verbs": influence.mean_of(cosine_SS[pair_SS & verb_SS])}


def leak(turns, coupling_SS):
    """What a step on a good turn does to flawed and to other good turns of the same command in other tasks.

    The output layer's part, to first order, over ordered pairs (good i, other j):

        share = sum of c_ij over pairs / sum of c_ii over pairs,    c: Equation 2

    is the rise of j's log-probability for each nat of i's own rise. "leak" and "kept" are mean cosines, to
    flawed and to good turns. None where there is no pair.
    """
    tasks_SS = influence.differ([turn.task for turn in turns])
    same_SS = ~influence.differ([turn.action for turn in turns]) & tasks_SS
    good_S, flawed_S = (torch.tensor([turn.label == label for turn in turns]) for label in ("good", "bad"))
    cosine_SS = influence.cosines(coupling_SS)
    own_SS = coupling_SS.diagonal()[:, None].expand_as(coupling_SS)
    flawed_SS, good_SS = good_S[:, None] & flawed_S, good_S[:, None] & good_S

    leak_SS = flawed_SS & same_SS
    own = float(own_SS[leak_SS].sum())
    return {"good": int(good_S.sum()), "flawed": int(flawed_S.sum()),
            "pairs": int(leak_SS.sum()), "leak": influence.mean_of(cosine_SS[leak_SS]),
            "kept": influence.mean_of(cosine_SS[good_SS & same_SS]),
            "share": float(coupling_SS[leak_SS].sum()) / own if own else None}


def few_turns(turns, seed):
    """Two good turns and a flawed one, each of another task, of the COMMANDS most frequent commands that have
    them, sorted by command.
    """
    order, of = influence.subsample(turns, len(turns), seed, influence.DRAW, 7), {}
    for turn in order:
        if turn.label in ("good", "bad"):
            of.setdefault(turn.action, []).append(turn)
    found = {}
    for action in sorted(of, key=lambda action: (-len(of[action]), action)):
        flawed = next((turn for turn in of[action] if turn.label == "bad"), None)
        good = {turn.task: turn for turn in of[action] if turn.label == "good"}
        chosen = [turn for task, turn in good.items() if flawed and task != flawed.task][:2]
        if len(chosen) == 2 and len(found) < COMMANDS:
            found[action] = [*chosen, flawed]
    return [turn for action in sorted(found) for turn in found[action]]


def whole_model(model, turns, coupling_SS):
    """Figure 3b on the few turns, by steps on all parameters, with the leak in it, and how far Equation 2
    tells it.

    coupling_SS: of the same turns. The map's entries are cosines of whole-model gradients up to "nonlinear".
    "leak": mean over one command's turns of different tasks, from good to flawed;
    "agreement": Pearson's correlation of map and output layer over pairs of different tasks. None without
    two commands.
    """
    found = influence.heat_of(model, turns)
    if found is None:
        return None
    matrix_SS = torch.tensor(found["matrix"])
    pair_SS = influence.differ([turn.task for turn in turns])
    same_SS = pair_SS & ~influence.differ([turn.action for turn in turns])
    good_S = torch.tensor([turn.label == "good" for turn in turns])
    both = torch.stack([matrix_SS[pair_SS], influence.cosines(coupling_SS)[pair_SS].float()])
    return found | {"labels": [turn.label for turn in turns], "agreement": float(torch.corrcoef(both)[0, 1]),
                    "leak": influence.mean_of(matrix_SS[same_SS & good_S[:, None] & ~good_S])}


def good_nats(turns, pairs):
    """Mean log-probability in nats of a good turn's response, from the error 1 - pi of its own tokens.

    pi is a difference of float32 numbers, so a token's has a floor of 1e-7 (-16 nats).
    """
    of_turns = []
    for turn, (_, error_NV) in zip(turns, pairs):
        if turn.label == "good":
            ids_N = torch.tensor([*itertools.compress(turn.sample.ids, turn.sample.sampled)])
            of_turns.append((1 - error_NV.gather(1, ids_N[:, None])).clamp(min=1e-7).log().sum())
    return influence.mean_of(torch.stack(of_turns)) if of_turns else None


def measure(actor, seed):
    """All numbers of a model: hidden states and errors of all turns are computed once."""
    turns, texts = shared_turns(actor, seed)
    pairs = influence.hidden_and_error(actor.model, turns)
    token_NN = influence.token_couplings(pairs)
    coupling_SS = influence.sums_by_turn(token_NN, turns)
    hidden_Sd = torch.stack([hidden_Nd.mean(0) for hidden_Nd, _ in pairs])
    place = {id(turn): i for i, turn in enumerate(turns)}

    def of(chosen):
        """Equation 2 of some of the turns."""
        at = [place[id(turn)] for turn in chosen]
        return coupling_SS[at][:, at]

    some = influence.subsample(turns, TURNS, seed, influence.DRAW, 6)
    classes = influence.by_class(turns, TURNS, seed)
    classed, few = [*classes["good"], *classes["bad"]], few_turns(turns, seed)
    has_pairs = all(len({turn.task for turn in classes[label]}) > 1 for label in ("good", "bad"))
    found = {"texts": texts, "turns": len(turns), "nats": good_nats(turns, pairs),
             "pairs": pair_numbers(some, of(some), hidden_Sd[[place[id(turn)] for turn in some]]),
             "gaps": influence.gaps_of(classed, of(classed)) if has_pairs else None,
             "leak": leak(turns, coupling_SS), "tokens": influence.kind_shares(turns, token_NN)}
    of_few = of(few)
    del pairs                                       # a large vocabulary's errors: room for the whole model
    return found | {"whole": whole_model(actor.model, few, of_few)}


# Cells

def run_of(settings, root):
    """The run that a cell measures; its `start` is the one that it begins from, or None."""
    model, stage, arm, seed = (settings[key] for key in ("model", "stage", "arm", "seed"))
    flags = [*FLAGS[model], *STAGES[model][stage], *shlex.split(settings["flags"])]
    folder = root / model.lower() / stage.replace(" ", "_")
    return runs.runs_of("household", [arm], [seed], flags, settings["iterations"], folder)[arm, seed]


def requested_cells(options, seed):
    """({cell: settings} of a seed's cold starts, those along RL)."""
    cold, along = {}, {}
    for model in options.models:
        shared = {"model": model, "seed": seed, "iterations": options.iterations, "flags": options.flags,
                  "tasks": TASKS, "turns": TURNS}
        for stage in STAGES[model]:
            cold[f"{model}, {stage}, seed {seed}"] = shared | {
                "stage": stage, "arm": runs.COLD, "iteration": 0, "iterations": 0}
        for arm in options.arms:
            for iteration in range(runs.EVERY, options.iterations + 1, runs.EVERY):
                along[f"{model}, {arm} {iteration}, seed {seed}"] = shared | {
                    "stage": JUDGED, "arm": arm, "iteration": iteration}
    return cold, along


def work(root, name, settings):
    """Measure one cell."""
    return measure(run_of(settings, root).actor(settings["iteration"]), settings["seed"])


def measured(options):
    """{cell: its result}; the runs of missing cells are made first, cold starts before any RL."""
    path, root, found = options.out / "pretrained.jsonl", options.runs.resolve(), {}
    for cells in (cells for seed in options.seeds for cells in requested_cells(options, seed) if cells):
        missing = common.missing_cells(path, cells, options)
        needed = [run_of(settings, root) for settings in missing.values()]
        needed = dict.fromkeys(run for one in needed for run in (one.start, one) if run)
        runs.make({run: run for run in needed}, options.jobs)
        found |= common.run_cells(path, cells, partial(work, root), options)
    return found


# Analysis

def numbers(result):
    """{name of NUMBERS: value} of a cell; None where a cell has none."""
    steps = result["whole"] or {}
    return {"nats": result["nats"], **{key: result["pairs"][key] for key in (
        "hidden", "rms", "same command", "same verb", "other verbs")},
        "gap": result["gaps"] and result["gaps"]["gap of cosines"],
        **{key: result["leak"][key] for key in ("leak", "kept", "share")},
        "whole same": steps.get("same"), "whole different": steps.get("different"),
        "whole leak": steps.get("leak")}


def rows_of(cells):
    """{"model, stage": {name of NUMBERS: interval over the seeds that have it}}."""
    found = {}
    for cell, result in cells.items():
        row, _, seed = cell.rpartition(", seed ")
        for key, value in numbers(result).items():
            of_seed = found.setdefault(row, {}).setdefault(key, {})
            if value is not None:
                of_seed[seed] = value
    return {row: {key: interval(of_seed) for key, of_seed in keys.items()} for row, keys in found.items()}


def differences(rows):
    """{name of NUMBERS: SmolLM2 minus the small model, paired}, both with judge questions; {} without one."""
    pair = [rows.get(f"{model}, {JUDGED}") for model in MODELS]
    return {key: paired(*(row[key]["seeds"] for row in pair)) for key in NUMBERS} if all(pair) else {}


def figures_of(rows):
    """What was found on the paper's figures, for the gallery."""
    less, trained = differences(rows), {
        row: found for row, found in rows.items() if not row.endswith("untrained")}
    ours = {row: found for row, found in trained.items() if row.startswith("SmolLM2")}

    def texts(key, of=rows):
        return "; ".join(f"{row} {with_half(found[key])}" for row, found in of.items())

    def tests(first, second, factor=1.0):
        return [found[first]["mean"] > factor * abs(found[second]["mean"]) for found in ours.values()
                if found[first]["half"] is not None and found[second]["half"] is not None]

    alone = "" if any(found["half"] is not None for row in rows.values() for found in row.values()
                      ) else " One seed, so there is no verdict."
    similar = [sign_of(less[key]) == 1 for key in ("hidden", "rms") if less
             and less[key]["half"] is not None]
    shares = [sign_of(found["share"]) == 1 for found in ours.values()
              if found["share"]["half"] is not None]
    return [
        {"paper": "Figure 3a (a pretrained model)", "picture": "pretrained.svg",
         "claim": "Samples whose inputs are similar have correlated hidden states, and so coupled gradients "
                  "(asked here: more so in a pretrained model?).",
         "found": f"On the same turns, pairs of different tasks. Hidden states' cosine: {texts('hidden')}. "
                  f"Root mean square cosine of the output layer's gradients: {texts('rms')}. With judge "
                  f"questions, SmolLM2 less the small model: hidden {with_half(less.get('hidden'))}, "
                  f"gradients {with_half(less.get('rms'))}.{alone}", "agrees": coupling.verdict(similar)},
        {"paper": "Figure 3b (a pretrained model)", "picture": "pretrained.heat.svg",
         "claim": "A gradient step on a sample raises those with the same action on other inputs most.",
         "found": f"Steps on the whole model, turns of one command: {texts('whole same', ours)}; of other "
                  f"commands: {texts('whole different', ours)}.{alone}",
         "agrees": coupling.verdict(tests("whole same", "whole different", 2))},
        {"paper": "Section 3.2 (the leak, a pretrained model)", "picture": "pretrained.svg",
         "claim": "A good turn's gradient also raises flawed turns with the same command.",
         "found": f"Share of the good turn's own rise: {texts('share')}. Cosine to flawed turns of one "
                  f"command: {texts('leak')}; to good ones: {texts('kept')}.{alone}",
         "agrees": coupling.verdict(shares)}]


# Figures

def draw(cells, rows, out):
    """Draw numbers by stage for both models, shares of kinds of tokens, and the maps of the whole model."""
    plotted = common.pyplot("pretrained")
    figure, panels = plotted.subplots(1, 5, figsize=(19, 4.4), layout="constrained")
    drawn = (("hidden states", ("hidden",)),
             ("gradients, output layer", ("rms", "same command", "same verb")),
             ("from a good turn, one command", ("leak", "kept")), ("flawed turn's share", ("share",)))
    known = [row.partition(", ")[2] for row in rows]
    names = [name for name in dict.fromkeys([*STAGES["small"], *known]) if name in known]
    for axes, (title, keys) in zip(panels, drawn):
        for model, color in COLORS.items():
            for key, style in zip(keys, ("o-", "s--", "^:")):
                at = {i: found[key] for i, name in enumerate(names)
                      if (found := rows.get(f"{model}, {name}")) and found[key]["mean"] is not None}
                axes.errorbar([*at], [found["mean"] for found in at.values()],
                              [found["half"] or 0 for found in at.values()], fmt=style, color=color,
                              markersize=4, label=f"{model}: {NUMBERS[key]}")
        axes.set_xticks(range(len(names)), names, rotation=50, ha="right", fontsize=8)
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.set_title(title)
        axes.set_ylim(top=1 + 0.16 * len(keys))                      # room for the legend
        axes.legend(fontsize=7, loc="upper right")
    last = {model: cells[cell] for cell in cells for model in MODELS
            if cell.startswith(f"{model}, {JUDGED}, ")}
    kinds = [*dict.fromkeys(kind for result in last.values() for kind in result["tokens"])]
    for i, (model, result) in enumerate(last.items()):
        panels[4].barh([k + 0.4 * i for k in range(len(kinds))],
                       [result["tokens"].get(kind, {"influence": 0})["influence"] for kind in kinds], 0.38,
                       label=model, color=COLORS[model])
    panels[4].set_yticks(range(len(kinds)), kinds)
    panels[4].set_title(f"share of the influence,\n{JUDGED}")
    if last:
        panels[4].legend(fontsize=7)
    common.save(figure, out / "pretrained.svg")
    maps = {cell: result["whole"] for cell, result in cells.items() if result["whole"]}
    chosen = [cell for cell in maps if cell.split(", ")[1] in MAPPED][:6]
    figure, panels = plotted.subplots(1, max(1, len(chosen)), figsize=(3.4 * max(1, len(chosen)), 3.4),
                                      layout="constrained", squeeze=False)
    for axes, cell in zip(panels[0], chosen):
        found = maps[cell]
        image = axes.imshow(found["matrix"], cmap="RdBu_r", vmin=-1, vmax=1)
        names = [f"{action}{' (flawed)' * (label == 'bad')}"
                 for action, label in zip(found["actions"], found["labels"])]
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.set_xticks([])
        axes.set_title(cell, fontsize=8)
    if chosen:
        figure.colorbar(image, ax=panels[0], shrink=0.8, label="change / mean of own changes")
    else:
        coupling.add_legend(panels[0][0])                        # says "not measurable"
    common.save(figure, out / "pretrained.heat.svg")


# The study

def page(cells, rows, figures, command):
    """The page's text, from its template in this folder."""
    table = markdown(["", *NUMBERS.values()],
                     [[row, *(with_half(found[key]) for key in NUMBERS)] for row, found in rows.items()])
    kinds = dict.fromkeys(kind for result in cells.values() for kind in result["tokens"])
    tokens = markdown(["", *kinds], [[cell, *(
        "{influence:.1%} of {tokens:.1%}".format(**shares[kind]) if kind in shares else "–"
        for shares in [result["tokens"]] for kind in kinds)] for cell, result in cells.items()])
    steps = markdown(["", "turns", "above other commands", "agreement with the output layer", "nonlinear"],
                     [[cell, str(len(found["actions"])), f"{found['above']:.0%}", f"{found['agreement']:.2f}",
                       f"{found['nonlinear']:.1%}"] for cell, result in cells.items()
                      if (found := result["whole"])])
    counts = "; ".join(dict.fromkeys(
        f"seed {cell.rpartition(' ')[2]}: {result['turns']} turns, {result['leak']['good']} good, "
        f"{result['leak']['flawed']} flawed, {result['leak']['pairs']} pairs of a good and a flawed one with "
        "one command" for cell, result in cells.items()))
    return PAGE.read_text(encoding="utf-8").format(
        command=command, table=table, tokens=tokens, steps=steps,
        counts=counts, claims=common.claims_text(figures), tasks=TASKS, pairs=TURNS)


def options_of(argv):
    """Parse and check the command line."""
    parser = argparse.ArgumentParser("python -m lab.studies.pretrained", description=__doc__.splitlines()[0],
                                     allow_abbrev=False)
    parser.add_argument("--seeds", default="0", help="seeds, separated by commas")
    parser.add_argument("--models", default=",".join(MODELS), help="models to measure")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms of RL; empty: cold starts alone")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="RL iterations of each arm")
    parser.add_argument("--flags", default="", help="further flags of gcd.py for all runs")
    common.add_cells(parser, 1, runs.RUNS / "pretrained")
    options = parser.parse_args(argv)
    command = common.command_of(parser, options)
    common.split_lists(parser, options, models=MODELS, arms=ARMS)
    common.check_ranges(parser, ("iterations", options.iterations, runs.EVERY, 10**4),
                        ("jobs", options.jobs, 0, 256))
    options.command = command
    return options


def main(argv=None):
    options = options_of(argv)
    try:
        cells = measured(options)
        if not cells:
            raise ValueError(f"--jobs={options.jobs}: {options.out / 'pretrained.jsonl'} has no cell")
    except (ValueError, jobs.Failed) as error:
        print(f"studies.pretrained: error: {error}", file=sys.stderr)
        return 1
    rows, out = rows_of(cells), options.out
    figures = figures_of(rows)
    draw(cells, rows, out)
    text = page(cells, rows, figures, shlex.join(options.command))
    common.publish(out, "pretrained", options.command, options.seeds, {
        "rows": rows, "SmolLM2 minus small": differences(rows)}, figures, text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
