"""How many tokens the messages of real episodes have, under a Hugging Face tokenizer.

The expert plays real ALFWorld games and ScienceWorld tasks, with a quarter of its commands mistaken so that
refusals and detours occur. Counted are the observation of each turn and the list of admissible commands
below it; responses are the model's, so not counted. What surrounds them in a prompt is counted for each
prompt style, with this tokenizer's template. Stored is every number, by episode, since rooms differ in size:
`envs.MessageLengths` draws from them. Left out: the lengths of a trained model's own episodes.

    python -m lab.bench.lengths --games $ALFWORLD_DATA/json_2.1.1 --tokenizer FOLDER    # minutes
"""

import argparse
import statistics
from pathlib import Path

from envs import Reply
from infra import files
from infra.progress import progress
from lab.bench.study import ROOT, parse_clean
from lm.chat import Chat, possible
from lm.model import load_tokenizer

OUT = ROOT / "envs" / "lengths.json"
GAMES = "../shared/data/alfworld/games.jsonl.gz"
TOKENIZER = "../shared/data/qwen2.5-tokenizer"
EPISODES = {"alfworld": ("household", 200), "scienceworld": ("scienceworld", 40)}       # the latter takes 4 s
STYLES = ("plain", "think", "tags")
MISTAKES, MOST_TURNS = 0.25, 30
EXAMPLE = Reply("You are in a room.", ["look"])


def episodes(environment, tasks):
    """The replies of each task's episode, won or not, without the last, which no response follows."""
    expert = environment.expert(environment.make(1))
    return [expert.show(task, seed, MISTAKES, MOST_TURNS).replies[:-1]
            for seed, task in enumerate(progress(tasks, desc="episodes", leave=False))]


def counted(encode, replies):
    """[tokens of each observation, tokens of each list of commands] of an episode. encode: text to ids."""
    return [[len(encode(reply.observation)) for reply in replies],
            [len(encode(possible(reply))) if reply.admissible else 0 for reply in replies]]


def frames(tokenizer, environment):
    """{prompt style, with "listed" where it lists commands: [tokens around a first message, a later one]}."""
    found = {}
    for style in STYLES:
        for listed in (True, False)[style == "plain":]:
            chat = Chat(tokenizer, style, listed, environment)
            found[style + " listed" * listed] = [chat.frame_tokens(EXAMPLE, first) for first in (True, False)]
    return found


def main(argv=None):
    """Measure, print and store the lengths."""
    parser = argparse.ArgumentParser("python -m lab.bench.lengths", description=__doc__.splitlines()[0])
    parser.add_argument("--games", default=GAMES, help="ALFWorld's json_2.1.1, or a games.jsonl.gz")
    parser.add_argument("--tokenizer", default=TOKENIZER, help="folder of a Hugging Face tokenizer")
    options = parse_clean(parser, argv)
    try:
        tokenizer = load_tokenizer(Path(options.tokenizer))
        environments = {kind: environment_of(kind, options.games) for kind, _ in EPISODES.values()}
    except ValueError as error:
        parser.error(str(error))
    found, around = {}, {}
    for name, (kind, n) in EPISODES.items():
        environment = environments[kind]
        around[name] = frames(tokenizer, environment)
        encode = Chat(tokenizer, "think", True, environment).encode
        found[name] = [counted(encode, replies)
                       for replies in episodes(environment, environment.train_tasks("all", 0, n))]
        later = [a + b for pair in found[name] for a, b in [*zip(*pair)][1:]]
        print(f"{name}: {n} episodes of {len(later) / n + 1:.1f} turns; observation and commands later in an "
              f"episode: median {statistics.median(later):.0f}, largest {max(later)}")
    files.write_json(OUT, {
        "what": "tokens of real episodes: of each, its observations and its lists of commands, by turn",
        "commit": options.commit, "command": options.command, "vocab_size": tokenizer.vocab_size,
        "mistakes": MISTAKES, "most_turns": MOST_TURNS, "frames": around, "episodes": found}, indent=None)


def environment_of(kind, games):
    """The environment `kind` with its default flags; household plays the real `games`."""
    import config
    flags = ["--env", kind, *(["--games", games] if kind == "household" else [])]
    return config.parse(flags).environment


if __name__ == "__main__":
    main()
