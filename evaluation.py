"""Evaluation of every game of the splits, or of 128 drawn games, by --protocol.

`evaluation` is stage 3 of a run. As a command this file is the referee: it evaluates any player under the
same protocols: a model folder, a model behind an OpenAI-compatible server, the environment's expert (where it
has an `online_expert`) or, where it lists commands and not templates of them, a random player or one that
always gives the first admissible command. Stage and referee keep the outcome of each game, so that two
evaluations can be compared game by game (`python -m report compare`). Left out: who plays, and how
(players.py).

    python evaluation.py --player DIR --games DIR --evaluate L0,L1,L2 --protocol eight --out runs/mine
    python evaluation.py --player https://api.deepseek.com/v1 --endpoint-model deepseek-chat --out runs/theirs
    python evaluation.py --player expert --out runs/expert         # or random, or first: a minute
    python evaluation.py --help
"""

import os
import shlex
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import resume
from config import PAPER, PLAYS_ONLY, PROTOCOLS, Config, arguments, environment_in, find_environment
from config import parse as parse_run
from envs import EpisodeLost
from envs._terminal import printed
from infra import files, job, parallel, plugins
from infra.endpoint import Endpoint, checked_extra, checked_url, without_path
from infra.errors import EXPECTED, one_line
from infra.flags import Parser, flag_of, make_settings, parse_known, setting
from infra.progress import progress
from infra.signals import Stop
from infra.streams import EVALUATION, stream
from labels import flaw_labels
from lm import model as decoder
from models import check_vocabulary, context_warning, open_chat, threads_for
from players import (
    ANSWER_S,
    SCRIPTS,
    MessageChat,
    ModelPlayer,
    ScriptPlayer,
    ServerPlayer,
    known_sum,
    prompt_of,
)
from rollout import EpisodeSpec, OnlineExpert, counts_of, shares_of
from session import drawn_tasks, make_games, most_evaluated, split_tasks

# Stage 3 of a run

def evaluation(run):
    """Evaluate each split in each mode. Writes evaluation.json, and some episodes to episodes.jsonl.

    Returns {split: {mode: `scores`}}. All ranks call this, and share the games.
    """
    config, started = run.config, time.perf_counter()
    protocol = PROTOCOLS[config.protocol]
    modes, plays = protocol.temperatures, protocol.plays
    instruction = run.instruction if config.correction_at_evaluation else ""
    splits, outcomes = {}, {}
    run.update_sampler()
    if run.ranks.rank == 0:                                # drop those of an earlier evaluation of this run
        files.filter_lines(run.out / files.EPISODES, lambda record: record.get("phase") != "evaluation")
    for name in config.splits:
        tasks, splits[name], ended = drawn_tasks(config, name), {}, []
        for m, (mode, temperature) in enumerate(modes.items()):
            specs = episode_specs(config, tasks, m, plays, instruction)
            specs = specs[run.ranks.rank::run.ranks.world_size]                # this rank's
            sampling = run.sampling(temperature=temperature)
            episodes = run.play(specs, sampling, f"{name} {mode}", config.evaluation_turns) if specs else []
            run.stop_if_asked(None)
            of_mode = sum(parallel.all_gather([
                Ending(mode, e.index, e.task.id, e.task.task_type, e.won) for e in episodes]), [])
            counts = counts_of(episodes) | flawed(episodes, run.environment)
            splits[name][mode] = scores(parallel.all_sum(counts), plays, of_mode)
            ended += of_mode
            if mode == "sampled":
                run.store(examples(episodes[:len(episodes) // plays]), {"phase": "evaluation", "split": name})
        outcomes[name] = outcomes_of(ended)
    if run.ranks.rank == 0:
        files.write_json(run.out / files.EVALUATION, {
            **run.origin, "games_hash": {split: run.origin["games_hash"][split] for split in splits},
            "splits": splits, "seed": config.seed, "protocol": config.protocol, "instruction": instruction,
            "evaluate_tasks": config.evaluate_tasks, **conditions_of(config, run.identity["plugins"]),
            "temperature": modes["sampled"], "seconds": time.perf_counter() - started, "outcomes": outcomes})
    return splits


def conditions_of(config, hashes):
    """What else of the settings changes how a player plays, or what it plays: {name: value}. hashes: of
    `resume.plugin_hashes`.
    """
    return {"max_turns": config.evaluation_turns, "plugins": hashes,
            "settings": {name: value for name, value in asdict(config.environment.settings).items()
                         if name not in (*config.environment.sources,          # these have a hash
                                         *config.environment.free_settings)},
            **{name: getattr(config, name) for name in (
                "max_response_tokens", "history", "admissible_only", "context", "dtype", "on_truncation")}}


def episode_specs(config, tasks, m, plays, instruction=""):
    """The EpisodeSpecs of decoding mode number m. Play k of task g has the index k * len(tasks) + g."""
    return [EpisodeSpec(task, g, stream(config.seed, EVALUATION, m, g, *([k] if k else [])),
                        k * len(tasks) + g, instruction)
            for k in range(plays) for g, task in enumerate(tasks)]


def flawed(episodes, environment):
    """{"flawed": number of turns that the game took and the oracle calls bad}; {} without an oracle."""
    if not environment.oracle:
        return {}
    labels = (label for episode in episodes for label in flaw_labels(episode, environment))
    return {"flawed": sum(label == "bad" for label in labels)}


def examples(episodes):
    """Pick up to 12 episodes to store, spread over the split, with a win and a loss if there are both."""
    n = min(12, len(episodes))
    picked = [episodes[i * len(episodes) // n] for i in range(n)]
    for won in (True, False):
        if picked and all(episode.won != won for episode in picked):
            picked[-1:] = [episode for episode in episodes if episode.won == won][:1] or picked[-1:]
    return picked


# Outcomes: games are the units, their plays are not

class Ending(NamedTuple):
    """How an episode ended: its mode and index, the game's id and type, whether it was won."""

    mode: str
    index: int
    game: str
    type: str
    won: bool


def outcomes_of(ended):
    """Each game's outcomes, from `Ending`s: [{"game": id, "type": its type, mode: "1101"}, ...].

    A mode's text has a digit for each play, 1 if it was won; games that are drawn often have long ones.
    """
    games = {}
    for end in sorted(ended, key=lambda end: end.index):
        found = games.setdefault(end.game, {"game": end.game, "type": end.type})
        found[end.mode] = found.get(end.mode, "") + str(int(end.won))
    return list(games.values())


def design_effect(numbers):
    """Kish's design effect (1965), sum m^2 / sum m over games with m plays: n plays are worth n over this
    many independent ones if all plays of a game agree, the worst case. It is m if each is played m times.
    """
    return sum(n * n for n in numbers) / (sum(numbers) or 1) or 1


def scores(counts, plays, ended):
    """rollout.shares_of(counts), with the 95 % interval over games, from their `Ending`s.

    "games": how many different ones; "plays": how often each was played or, where games are drawn, 1.
    """
    numbers = Counter(end.game for end in ended).values()
    return shares_of(counts, design_effect(numbers)) | {"games": len(numbers), "plays": plays}


def by_type(outcomes, mode):
    """{task type: success and its interval over games, for the games of this type}."""
    found = {}
    for name in sorted({entry["type"] for entry in outcomes}):
        digits = [entry[mode] for entry in outcomes if entry["type"] == name and entry.get(mode)]
        won, numbers = sum(text.count("1") for text in digits), [len(text) for text in digits]
        rate = shares_of(Counter(won=won, episodes=sum(numbers)), design_effect(numbers))
        found[name] = {key: rate[key] for key in ("success", "n", "low", "high")} | {"games": len(digits)}
    return found


# The referee

@dataclass(frozen=True)
class Settings:
    """The referee's own flags."""

    player: str = setting("", "who plays: a model folder, the URL of an OpenAI-compatible server, expert "
                          "(of an environment with an online_expert), or, where commands are listed and not "
                          "templates of them, random or first (admissible command)", section="player")
    name: str = setting("", "its name in tables; empty: a run's, folder's or script's, or --endpoint-model")
    seen: str = setting("", "what it was trained on, for tables: demonstrations, an expert, task types")
    endpoint_extra: str = setting("", "JSON object merged into the body of each request to a server; null "
                                  "removes a key", rare=True)


# Flags of a run that the referee reads, and those of them that are only for one kind of player
SHARED = ("out", "resume", "overwrite", "seed", "device", "dtype", "env", "max_turns", "context", "prompt",
          "show_admissible", "history", "slots", "max_response_tokens", "admissible_only", "endpoint_model",
          "endpoint_key_variable", "endpoint_limit", "evaluate", "evaluate_tasks",
          "protocol")
HELP = {"evaluate": "splits, such as L0,L1; auto: all but dev",     # where a run's does not fit
        "seed": "fixes all sampling, and the games that are drawn",
        "resume": "continue the evaluation in --out",
        "max_turns": "turns in an episode, if --protocol does not tell",
        "dtype": "dtype of a model's weights and of computation",
        "endpoint_limit": "most requests, retries and redirects included"}
OF_MODELS = ("device", "dtype", "context", "admissible_only")
OF_WRITERS = ("prompt", "show_admissible", "history", "max_response_tokens")
OF_SERVERS = ("endpoint_model", "endpoint_key_variable", "endpoint_limit", "endpoint_extra")
Flags = make_dataclass("Flags", [
    (f.name, f.type, field(default=f.default, metadata=f.metadata | {
        "needs": None, "help": HELP.get(f.name, f.metadata["help"])}))
    for f in fields(Config) if f.name in SHARED], bases=(Settings,), frozen=True)
TEXT_SLOTS = 8       # games, and so requests, at once, for a player that is no model of this process
# What a record in episodes.jsonl has, beside its numbers; one that lacks some of it is played again
RECORD = {"split": str, "mode": str, "index": int, "task_id": str, "task_type": str, "won": bool,
          "counts": dict}
# What has to be equal to continue an evaluation
IDENTITY = ("player", "prompt", "world", "games_hash", "evaluate_tasks", "protocol", "seed", "max_turns",
            "temperatures", "max_response_tokens", "history", "admissible_only", "context", "dtype",
            "on_truncation", "instruction", "commit", "settings", "plugins")


def parse(argv):
    """The command line as (Settings, Config, {setting: value} as given). ValueError for a wrong one."""
    program = "evaluation.py"
    argv = list(sys.argv[1:] if argv is None else argv)
    named = parse_known(program, argv, Flags)[0].get("env", Config.env)
    name, given = environment_in(named)
    argv += arguments(given)
    environment = find_environment(name)
    if twice := {f.name for f in fields(Flags)} & {f.name for f in fields(environment.Settings)}:
        raise ValueError(f"--env={name}: has settings that the referee has, too: {', '.join(sorted(twice))}")
    given, unknown = parse_known(program, argv, Flags, environment.Settings)
    if given.pop("help", False):
        parser = Parser(program, description="Evaluate any player; its games and protocol as in gcd.py.")
        for section, known in {"run": Flags, f"--env {name}": environment.Settings}.items():
            parser.add(known, section)
        parser.print_help()
        raise SystemExit(0)
    if unknown:
        raise ValueError(f"{unknown[0].partition('=')[0]}: no flag of the referee")
    own = make_settings(Settings, {f.name: given.get(f.name, f.default) for f in fields(Settings)})
    kind = kind_of(own.player)
    unread = {"model": OF_SERVERS, "server": OF_MODELS, "script": (*OF_MODELS, *OF_WRITERS, *OF_SERVERS)}
    if wrong := [flag for flag in given if flag in unread[kind]]:
        raise ValueError(f"{flag_of(wrong[0])}: not read if the player is a {kind}")
    chosen = environment.defaults | given
    protocol = chosen.get("protocol", "full")
    known = PROTOCOLS.get(protocol)                     # an unknown one is refused below
    if "max_turns" in given and known and (turns := known.turns):
        raise ValueError(f"--max-turns={given['max_turns']}: --protocol {protocol} has {turns} turns")
    of_run = {name: value for name, value in given.items() if name not in vars(own)}
    of_run |= PLAYS_ONLY
    if kind == "model":
        of_run = resume.prompting_of(Path(own.player), name) | of_run | {"model": own.player}
    else:
        of_run = {"preset": "paper", "slots": environment.defaults.get("slots", TEXT_SLOTS)} | of_run
        most = 1 + min(given.get("max_response_tokens", 0), 10**6 - 1)
        of_run["context"] = max(PAPER["context"], most)                                     # not read
    if kind == "server":
        of_run["endpoint"] = checked_url(own.player, "--player")
        if "temperature" in checked_extra(own.endpoint_extra) and protocol != "sampled":
            raise ValueError(f"--endpoint-extra={own.endpoint_extra}: with a temperature of its own only "
                             "--protocol sampled is what it says")
        of_run.pop("show_admissible", None)         # a model's there; `open_player` reads what was given
    if chosen.get("evaluate", "auto") == "auto":
        of_run["evaluate"] = ",".join(name for name in environment.splits if name != "dev")
        if not of_run["evaluate"]:
            raise ValueError(f"--env={named}: has no split but {', '.join(environment.splits)}; give it by "
                             "--evaluate")
    with naming_player():
        config = parse_run(arguments(of_run))
    if not config.splits:
        raise ValueError(f"--evaluate={config.evaluate}: no split to evaluate")
    if kind == "script":
        ScriptPlayer(own.player, config.environment)          # ValueError if it cannot play there
    return own, config, given


@contextmanager
def naming_player():
    """A block in which a ValueError about a run's --model or --endpoint names --player, which gives both."""
    try:
        yield
    except ValueError as error:
        if (message := of_player(f"{error}")) == f"{error}":
            raise
        raise ValueError(message) from None


def of_player(message):
    """The message with --player in place of a run's flags."""
    return message.replace("--model=", "--player=").replace("--endpoint=", "--player=")


def kind_of(player):
    """The kind of a --player: "script", "server" or "model". ValueError if none is given."""
    if not player:
        raise ValueError(f"--player: expected a model folder, a URL, or one of {', '.join(SCRIPTS)}")
    return "script" if player in SCRIPTS else "server" if "://" in player else "model"


def open_player(own, config, given, resources):
    """The player, and the facts about it that the evaluation's file holds. ValueError if it cannot play."""
    facts = {"kind": (kind := kind_of(own.player)), "name": own.name or own.player}
    if kind == "script":
        if own.player == "expert":
            first = split_tasks(config.environment, config.splits[0])[0]
            OnlineExpert(config.environment, EpisodeSpec(first, 0, 0)).begin()
        return ScriptPlayer(own.player, config.environment), facts
    if kind == "server":
        if config.environment.tools():
            raise ValueError(f"--env={config.env}: has tools, which a server's player is not given")
        endpoint = Endpoint(own.player, config.endpoint_model, config.endpoint_key_variable, "",
                            config.endpoint_limit, config.slots, ANSWER_S,
                            max_tokens=config.max_response_tokens, extra=own.endpoint_extra)
        resources.callback(endpoint.close)
        style = "think" if config.prompt == "auto" else config.prompt
        chat = MessageChat(style, given.get("show_admissible", config.show_admissible), config.environment)
        return ServerPlayer(endpoint, chat, config.history), facts | {
            "name": own.name or config.endpoint_model, "model": config.endpoint_model,
            **({"extra": endpoint.extra} if endpoint.extra else {})}
    folder, ranks = Path(config.model), job.setup(config.device)
    chat = open_chat(config, folder, ranks, plays=True)
    check_vocabulary(config, folder, resume.state_beside(folder), chat.tokenizer)
    resources.enter_context(threads_for(chat))
    model = decoder.load_pretrained(folder, getattr(torch, config.dtype), ranks.device)
    if warning := context_warning(config, chat, model.config.max_position_embeddings):
        print(warning, file=sys.stderr)
    if config.dtype != "float32":                    # as a run's sampler: the same products, and faster
        model.requires_grad_(False).fuse()
    return ModelPlayer(model, chat, config), facts | {
        "name": own.name or name_of(folder.resolve()), "parameters": decoder.count_parameters(model.config),
        "weights": decoder.weights_hash(folder)}


def name_of(folder):
    """A model's name in tables: its folder's, of a run's checkpoint the run's."""
    return folder.parent.name if folder.name == files.CHECKPOINT else folder.name


def head_of(own, config, given, player, facts):
    """What is known of an evaluation before it begins."""
    modes = PROTOCOLS[config.protocol].temperatures
    if facts["kind"] == "script":                             # it knows no temperature
        modes = {"sampled": None}
    folder = config.model and Path(config.model)
    instruction = resume.played_instruction(folder, resume.state_beside(folder), config.env) if folder else ""
    prompt = {} if facts["kind"] == "script" else prompt_of(player.chat)
    return {"complete": False, "player": facts, "seen": own.seen, "prompt": prompt, **files.origin_of(config),
            "evaluate_tasks": config.evaluate_tasks, "protocol": config.protocol, "seed": config.seed,
            **conditions_of(config, resume.plugin_hashes(config)), "temperature": modes["sampled"],
            "temperatures": modes, "instruction": instruction, "command": command_of(given)}


def command_of(given):
    """The command that repeats an evaluation, without the folder that it writes to, and of an address without
    the path, which can hold a key.
    """
    repeated = {name: without_path(value) for name, value in given.items()
                if name not in ("out", "resume", "overwrite")}
    return shlex.join(["python", "evaluation.py", *arguments(repeated)])


def referee(own, config, given, resources):
    """Play what the folder --out does not hold yet, and write its evaluation.json. Returns an exit status.

    Each episode is in episodes.jsonl as soon as it has ended. Status 1 if some games could not be played.
    """
    out, should_stop = Path(config.out).absolute(), Stop()          # a game may change the working directory
    resources.enter_context(files.locked(out))
    unplayed = is_unplayed(out)
    holds = files.holds_run(out) and not unplayed
    if holds and not config.resume:
        if not config.overwrite:
            raise ValueError(f"--out={out}: holds a run; --resume continues an evaluation, --overwrite sets "
                             "any run aside")
        check_aside(config, out)
    config.environment.versions()                             # ValueError if a package is missing
    for split in config.splits:                               # before a model is loaded
        split_tasks(config.environment, split)
    with naming_player():
        player, facts = open_player(own, config, given, resources)
    head = head_of(own, config, given, player, facts)
    if not unplayed and continues(config, head, out):
        files.filter_lines(out / files.EPISODES, first_of_each_play(config, head))
    elif holds:
        check_aside(config, out)
        files.start_over(out, resources)
    games = make_games(config.environment, min(config.slots, most_evaluated(config)), resources)
    files.write_json(out / files.EVALUATION, head | result_of(config, head, out))     # so a kill loses none
    with naming_player():
        due = play_missing(config, head, player, games, out, should_stop)
    result = head | result_of(config, head, out)
    files.write_json(out / files.EVALUATION, result)
    print_result(result)
    if warning := getattr(player, "warning", ""):
        print(warning, file=sys.stderr)
    kept = f"{out / files.EPISODES} keeps what was played; --resume continues"
    if should_stop:
        print(f"stopped; {kept}", file=sys.stderr)
        return 130
    if due:
        print(f"evaluation.py: error: {due} plays without an answer, the last one because of "
              f"{of_player(getattr(player, 'reason', ''))}; {kept}", file=sys.stderr)
    return 1 if due else 0


def first_of_each_play(config, head):
    """A predicate of the records that --resume keeps: the first one of each play of this evaluation."""
    plays = PROTOCOLS[config.protocol].plays
    due = {(split, mode, spec.index): spec.task.id for split in config.splits
           for m, mode in enumerate(head["temperatures"])
           for spec in episode_specs(config, drawn_tasks(config, split), m, plays)}

    def keep(record):
        if not is_record(record):
            return False
        key = record["split"], record["mode"], record["index"]
        return due.get(key) == record["task_id"] and due.pop(key) is not None

    return keep


def is_record(record):
    """Whether a record of episodes.jsonl has what the referee writes."""
    return (all(type(record.get(name)) is kind for name, kind in RECORD.items())
            and all(map(files.is_number, (record.get("seconds"), *record["counts"].values())))
            and all(record.get(name, "") is None or files.is_number(record.get(name))
                    for name in ("prompt_tokens", "response_tokens")))


def is_unplayed(out):
    """Whether OUT holds nothing but a referee's evaluation without an episode, as a wrong key leaves it."""
    try:
        stored = files.read_json(out / files.EVALUATION)
    except ValueError:
        return False
    if not (isinstance(stored, dict) and stored.get("player")):          # a run of gcd.py, or none
        return False
    others = {*files.OF_RUNS, files.CHECKPOINT} - {files.EPISODES, files.EVALUATION}
    return (not any(path.name.startswith((*others,)) for path in out.iterdir())
            and files.read_lines(out / files.EPISODES) == ([], [])
            and all(isinstance(table := stored.get(key), dict) and not any(table.values())
                    for key in ("splits", "outcomes")))


def check_aside(config, out):
    """ValueError if OUT cannot be set aside, also because the player or its games lie there."""
    with naming_player():
        resume.check_apart(config, out)
    files.check_can_be_set_aside(out)


def continues(config, head, out):
    """Whether --resume continues what OUT holds. ValueError if it cannot be continued, unless --overwrite."""
    if config.resume:
        try:
            stored = files.read_json(out / files.EVALUATION)
            check_same(stored, head, out)
            resume.print_versions(out, stored, config.environment)
            return True
        except ValueError:
            if not config.overwrite:
                raise
    return False


def check_same(stored, head, out):
    """ValueError unless a stored evaluation is of the same player and games, by the same protocol."""
    if not (isinstance(stored, dict) and stored.get("player")):
        raise ValueError(f"--resume: {out} holds no evaluation by the referee")
    head = files.nan_to_null(head)
    for name in IDENTITY:
        if stored.get(name) != head[name]:
            raise ValueError(f"--resume: {out}: {name} was {str(stored.get(name))[:200]}, is "
                             f"{str(head[name])[:200]}")


def play_missing(config, head, player, games, out, should_stop):
    """Play every episode that episodes.jsonl does not hold. Returns how many it does not hold in the end."""
    stored, _ = files.read_lines(out / files.EPISODES)
    done = {(record["split"], record["mode"], record["index"]) for record in stored}
    plays, missing, clock = PROTOCOLS[config.protocol].plays, 0, time.perf_counter()
    for split in config.splits:
        tasks = drawn_tasks(config, split)
        for m, (mode, temperature) in enumerate(head["temperatures"].items()):
            specs = episode_specs(config, tasks, m, plays, head["instruction"])
            due = [spec for spec in specs if (split, mode, spec.index) not in done]
            with progress(total=len(specs), initial=len(specs) - len(due), desc=f"{split} {mode}",
                          unit="game", leave=False) as bar:

                def ended(episode, prompt_tokens, response_tokens):
                    nonlocal clock, missing
                    before, clock = clock, time.perf_counter()
                    files.append(out / files.EPISODES, {
                        "phase": "evaluation", "split": split, "mode": mode, "index": episode.index,
                        "counts": all_counts(episode, config.environment), "prompt_tokens": prompt_tokens,
                        "response_tokens": response_tokens, "seconds": clock - before,
                        **files.episode_record(episode, credited=False)})
                    missing -= 1
                    bar.update()

                missing += len(due)
                if due and not should_stop:
                    player.play(due, games, temperature, head["max_turns"], ended, should_stop)
    return missing


def all_counts(episode, environment):
    """rollout.counts_of of an episode, its flawed turns, and those without a command."""
    return counts_of([episode]) | flawed([episode], environment) | {
        "malformed": sum(turn.action is None for turn in episode.turns)}


def result_of(config, head, out):
    """Scores and outcomes of the episodes in episodes.jsonl."""
    splits, outcomes, types, seconds = {}, {}, {}, 0.0
    records, _ = files.read_lines(out / files.EPISODES)
    plays, expected = PROTOCOLS[config.protocol].plays, 0
    for split in config.splits:
        n = plays * len(drawn_tasks(config, split))
        ended = [Ending(record["mode"], record["index"], record["task_id"], record["task_type"],
                        record["won"]) for record in records if record["split"] == split]
        outcomes[split], splits[split] = outcomes_of(ended), {}
        for mode in head["temperatures"]:
            expected += n
            here = [record for record in records if (record["split"], record["mode"]) == (split, mode)]
            if not here:
                continue
            counts = Counter()
            for record in here:
                counts.update(record["counts"])               # "+" would drop negative scores
            turns, spent = counts["turns"] or 1, sum(record["seconds"] for record in here)
            tokens = {key: known_sum([record[key] for record in here])
                      for key in ("prompt_tokens", "response_tokens")}
            splits[split][mode] = scores(counts, plays, [end for end in ended if end.mode == mode]) | {
                "malformed_frac": counts["malformed"] / turns, **tokens}
            seconds += spent
            types.setdefault(split, {})[mode] = by_type(outcomes[split], mode)
    refused = [str(record.get("lost")) for record in records
               if head["player"]["kind"] == "server" and record.get("ended") == "context full"]
    return {"complete": len(records) == expected, "splits": splits, "by_type": types, "seconds": seconds,
            "refusals": {"plays": len(refused), "last": (refused or [""])[-1]}, "outcomes": outcomes}


def print_result(result):
    """Print a line for each split and mode, then one for each type; last, what the server refused."""
    for split, modes in result["splits"].items():
        for mode, rate in modes.items():
            flaws = f", flawed {rate['flawed_frac']:.1%}" if "flawed_frac" in rate else ""
            score = f"score {rate['score_100']:.1f}, " if "score_100" in rate else ""
            print(f"{split} {mode}: success {rate['success']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}], "
                  f"{score}{rate['games']} games, {rate['n']} plays; of turns: invalid "
                  f"{rate['invalid_frac']:.1%}, repeated {rate['repeated_frac']:.1%}{flaws}")
            for name, part in result["by_type"][split][mode].items():
                print(f"    {name}: {part['success']:.1%} [{part['low']:.1%}, {part['high']:.1%}], "
                      f"{part['games']} games")
    if (refusals := result["refusals"])["plays"]:
        print(f"{refusals['plays']} plays ended by the server's refusal, so not won, the last one because of "
              f"{' '.join(refusals['last'].split())}")


def main(argv=None):
    """The command. Exit status 0; 1 if it failed after the start, 2 for a wrong flag, 130 if interrupted."""
    with printed("evaluation.py"):
        try:
            parsed = parse(argv)
        except KeyboardInterrupt:
            return 130
        except (ValueError, OSError) as error:
            print(f"evaluation.py: error: {error}; see --help".replace("\n", "\\n"), file=sys.stderr)
            return 2
        if os.environ.get("WORLD_SIZE", "") not in ("", "1"):
            print("evaluation.py: error: it plays in one process; run it without torchrun", file=sys.stderr)
            return 2
        out = Path(parsed[1].out).absolute()                  # a game may change the working directory
        try:
            with ExitStack() as resources, Stop.restored(), plugins.blamed(EpisodeLost):
                return referee(*parsed, resources)
        except KeyboardInterrupt:
            print("stopped at once; what was played before is kept", file=sys.stderr)
            return 130
        except EXPECTED as error:
            why = one_line(error, out, known=EpisodeLost)
            print(f"evaluation.py: error: {why}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
