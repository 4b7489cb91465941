"""What a trained token costs on this CPU: the whole model, adapters, or the last layers, in fp32 and bf16.

A random model of SmolLM2-135M's shape takes optimizer steps (update.update) on random sequences of about the
length of an episode in a small room. All tokens of a sequence are trained, so each passes lm_head; where
prompts are only read, as in a run, all ways are cheaper. Seconds are CPU seconds of one thread, which
other processes lengthen less than a clock's; the ways take turns, and a first step of each is not measured.
Left out: playing, in which adapters cost some products more, and bf16 a copy.

    python -m lab.bench.trained_tokens       # writes lab/results/trained_tokens.json, in some ten minutes
"""

import argparse
import itertools
import time

import torch

import config
import update
from batching import Sample
from infra import files, job, parallel
from infra.progress import progress
from lab.bench.intervals import interval, markdown, with_half
from lab.bench.machine import this_cpu
from lab.bench.study import ROOT, parse_clean
from lm import model as decoder
from lm.optim import adamw, trained
from models import choose_trained

OUT = ROOT / "lab" / "results" / "trained_tokens.json"
WAYS = tuple(" ".join(filter(None, pair)) for pair in itertools.product(        # "": the whole model
    ("", "--lora 16", "--train-layers 4"), ("", "--dtype bfloat16")))
SHAPE = decoder.ModelConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                            num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                            tie_word_embeddings=True)
SEQUENCES, TOKENS, REPEATS = 4, 400, 3               # in a step, as in the cold start; in a sequence; steps


def random_samples(vocabulary, sequences, tokens):
    """Sequences of random tokens, of which all but the first are imitated."""
    ids_BT = torch.randint(vocabulary, (sequences, tokens), generator=torch.Generator().manual_seed(0))
    sampled, ones = [False] + [True] * (tokens - 1), [1.0] * tokens
    return [Sample(ids, sampled, ones, None, episode) for episode, ids in enumerate(ids_BT.tolist())]


class Way:
    """One way of training: a model, its optimizer, and the CPU seconds of its steps so far."""

    def __init__(self, flags, shape):
        self.flags, self.seconds, model = flags, [], decoder.Model(shape)
        decoder.init_weights(model, 0)
        settings = config.parse([*flags.split(), "--evaluate", "none"])
        self.model = parallel.shard(choose_trained(model, settings), job.Ranks(0, 1, torch.device("cpu")),
                                    getattr(torch, settings.dtype))
        self.optimizer = adamw(self.model)

    def step(self, samples):
        """Take an optimizer step, and note its CPU seconds."""
        began = time.process_time()
        update.update(self.model, self.optimizer, samples, update.Objective(microbatch_tokens=2048), lr=1e-4)
        self.seconds.append(time.process_time() - began)


def measure(commit, shape=SHAPE, sequences=SEQUENCES, tokens=TOKENS, repeats=REPEATS):
    """The content of OUT: for each way its trained tokens a CPU second, and how many times the whole model's
    they are.
    """
    torch.set_num_threads(1)
    ways, samples = [Way(flags, shape) for flags in WAYS], random_samples(shape.vocab_size, sequences, tokens)
    for way in progress(ways * (1 + repeats), desc="steps", unit="step"):
        way.step(samples)
    n, full = sequences * (tokens - 1), ways[0].seconds[1:]
    rows = [{"way": way.flags, "trained_parameters": sum(p.numel() for p in trained(way.model)),
             "tokens_per_cpu_s": interval({k: n / s for k, s in enumerate(way.seconds[1:])}),
             "times_full": interval({k: a / b for k, (a, b) in enumerate(zip(full, way.seconds[1:]))})}
            for way in ways]
    job.shutdown()
    return {"what": "optimizer steps on this CPU, one thread; CPU seconds",
            "command": "python -m lab.bench.trained_tokens", "commit": commit,
            "torch": torch.__version__, "repeats": repeats, "sequences": sequences, "tokens": tokens,
            "parameters": decoder.count_parameters(shape),
            "cpu": this_cpu(),
            "rows": rows}


def table(found):
    """The result as Markdown."""
    head = ["trained", "parameters", "tokens a CPU second", "ms a token", "times the whole model's rate"]
    return markdown(head, [
        [row["way"] or "the whole model", f"{row['trained_parameters'] / 1e6:.1f} million",
         with_half(row["tokens_per_cpu_s"], ".1f"), f"{1000 / row['tokens_per_cpu_s']['mean']:.1f}",
         with_half(row["times_full"])] for row in found["rows"]])


def main(argv=None):
    parser = argparse.ArgumentParser("python -m lab.bench.trained_tokens",
                                     description=__doc__.splitlines()[0])
    found = measure(parse_clean(parser, argv).commit)
    files.write_json(OUT, found)
    print("{name} ({capability}, one thread), torch {torch}".format(torch=found["torch"], **found["cpu"]))
    print(table(found))


if __name__ == "__main__":
    main()
