"""How many tokens the messages of real episodes have, under a Hugging Face tokenizer.

The expert plays real ALFWorld games and ScienceWorld tasks, with a quarter of its commands mistaken so that
refusals and detours occur, in each prompt style of a model that writes. Counted are the first message of an
episode, rules and template included, and every later one; responses are the model's, so not counted. Stored
are the sorted lengths, thinned to QUANTILES of them, from which `draw` takes random ones. Left out: the
lengths of a trained model's own episodes.

    python -m lab.bench.lengths --games $ALFWORLD_DATA/json_2.1.1 --tokenizer FOLDER    # minutes
"""

import argparse
from pathlib import Path

from infra import files
from infra.progress import progress
from lab.bench.study import ROOT
from lm.chat import Chat
from lm.model import load_tokenizer

OUT = ROOT / "lab" / "results" / "lengths.json"
GAMES = "../shared/data/alfworld/games.jsonl.gz"
TOKENIZER = "../shared/data/qwen2.5-tokenizer"
# {name: (environment, prompt style, whether commands are listed)}
FORMS = {"alfworld": ("household", "think", True), "alfworld, plain": ("household", "plain", False),
         "alfworld, commands not listed": ("household", "think", False),
         "scienceworld": ("scienceworld", "think", True)}
MISTAKES, MOST_TURNS, QUANTILES = 0.25, 30, 101


def replies(environment, tasks):
    """The replies of each task's episode, played by the expert with mistakes; of all tasks, won or not."""
    expert = environment.expert(environment.make(1))
    return [expert.show(task, seed, MISTAKES, MOST_TURNS).replies
            for seed, task in enumerate(progress(tasks, desc="episodes", leave=False))]


def lengths(chat, episodes):
    """Tokens of first messages and of later ones, each sorted: {"first": [...], "later": [...]}."""
    def tokens(reply, first=False):
        return len(chat.observe(reply, first))

    return {"first": sorted(tokens(of_episode[0], True) for of_episode in episodes),
            "later": sorted(tokens(reply) for of_episode in episodes for reply in of_episode[1:-1])}


def thinned(values, n=QUANTILES):
    """n evenly spaced ones of sorted values, the smallest and the largest included."""
    return [values[round(i * (len(values) - 1) / (n - 1))] for i in range(n)]


def draw(quantiles, rng):
    """One random length from `thinned` ones, interpolated between neighbours. rng: random.Random."""
    at = rng.random() * (len(quantiles) - 1)
    low = int(at)
    return round(quantiles[low] + (at - low) * (quantiles[low + 1] - quantiles[low]))


def main(argv=None):
    """Measure, print and store the lengths."""
    parser = argparse.ArgumentParser("python -m lab.bench.lengths", description=__doc__.splitlines()[0])
    parser.add_argument("--games", default=GAMES, help="ALFWorld's json_2.1.1, or a games.jsonl.gz")
    parser.add_argument("--tokenizer", default=TOKENIZER, help="folder of a Hugging Face tokenizer")
    parser.add_argument("--episodes", type=int, default=200, help="of each environment")
    parser.add_argument("--dirty", action="store_true", help="measure with local changes, for a try")
    options = parser.parse_args(argv)
    commit, tokenizer = files.clean_commit(options.dirty), load_tokenizer(Path(options.tokenizer))
    played, table = {}, {}
    for name, (kind, style, listed) in FORMS.items():
        environment = environment_of(kind, options.games)
        if kind not in played:
            played[kind] = replies(environment, environment.train_tasks("all", 0, options.episodes))
        chat = Chat(tokenizer, style, listed, environment.noop_message, environment)
        found = lengths(chat, played[kind])
        table[name] = {"n": {key: len(values) for key, values in found.items()},
                       "turns": sum(len(of_episode) - 1 for of_episode in played[kind]) / len(played[kind])
                       } | {key: thinned(values) for key, values in found.items()}
        print(f"{name}: " + ", ".join(f"{key} {values[len(values) // 2]} (largest {values[-1]})"
                                      for key, values in found.items()))
    files.write_json(OUT, {"what": "tokens of the environment's messages, quantiles from 0 to 1",
                           "commit": commit, "command": "python -m lab.bench.lengths",
                           "episodes": options.episodes, "vocabulary": len(tokenizer), "forms": table},
                     indent=None)


def environment_of(kind, games):
    """The environment `kind` with its default flags; household plays the real `games`."""
    import config
    flags = ["--env", kind, *(["--games", games] if kind == "household" else [])]
    return config.parsed(flags).environment


if __name__ == "__main__":
    main()
