"""An error as the one line that the command prints, with advice where memory ran out."""

import sys
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from infra import files
from infra.plugins import PluginError

# Errors that end a run with one line: mistakes found late, a full disk, engines that die, torch's own errors
EXPECTED = ValueError, OSError, ArithmeticError, MemoryError, RuntimeError
# Advice when memory runs out: (activity, flags to turn), by the first of these files or functions in the
# traceback; for an error that passed through none, playing's and training's.
PLAYING = "playing", "--slots or --context down"
TRAINING = ("training", "--microbatch-tokens down, then --checkpoint-activations on, then "
            "--max-response-tokens down")
LOADING = "loading a model", "more ranks"
ADVICE = {
    "judge.py:answer_questions": ("judging", "--slots down"),
    "rollout.py": PLAYING,
    "engine.py": PLAYING,
    "parallel.py:onloaded": ("bringing the KL reference or PPO's critic to the device",
                             "more ranks or, without a critic, --lora"),
    "update.py:step": ("stepping the optimizer", "--train-layers, more ranks or, without a critic, --lora"),
    "update.py": TRAINING,
    "lora.py:merge": ("merging adapters", "more ranks"),
    "parallel.py:copy_weights": ("copying the weights to the sampler", "more ranks or --slots down"),
    "checkpoint.py:save_checkpoint": ("saving a checkpoint", "more ranks"),
    "checkpoint.py:load_trainer": ("loading a checkpoint", "more ranks"),
    "models.py:load_model": LOADING,
    "session.py:kl_reference": LOADING,
    "parallel.py:unsharded_copy": LOADING}


def one_line(error, out, known=()):
    """Format an error as one line. A plug-in's, and a RuntimeError not `known`, leaves OUT/traceback.txt."""
    cause = error
    while cause and not is_out_of_memory(cause):
        cause = cause.__cause__                     # of a file's or a plug-in's error, which names that
    if cause:
        frames = [*traceback.walk_tb(error.__traceback__), *traceback.walk_tb(cause.__traceback__)]
        codes = [frame.f_code for frame, _ in frames]
        passed = {place for code in codes for file in [Path(code.co_filename).name]
                  for place in (file, f"{file}:{code.co_name}")}
        advice = [ADVICE[place] for place in ADVICE if place in passed][:1] or [PLAYING, TRAINING]
        hints = "; ".join(f"while {activity}, {flags}" for activity, flags in advice)
        return f"out of memory ({' '.join(str(cause).split())[:200]}): {hints}"
    text = " ".join([*str(error).split(), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    unknown = isinstance(error, RuntimeError) and not isinstance(error, known)
    if unknown or isinstance(error, PluginError):
        with suppress(OSError):
            files.write_text(Path(out) / "traceback.txt", "".join(traceback.format_exception(error)))
            text = f"{text[:500]} (traceback in {out}/traceback.txt)"
    return f"{type(error).__name__}: {text}" if unknown else text


def reported(function, what):
    """`function`, whose failure at the end of a run is printed in one line, and changes nothing else."""
    def call():
        try:
            function()
        except Exception as error:                  # a game's or a service's own: what is saved is complete
            print(f"{what} failed: {type(error).__name__}: {error}".replace("\n", " "), file=sys.stderr)

    return call


def is_out_of_memory(error):
    """Whether memory ran out: by the error's type or, for libraries under torch, by its text."""
    kind = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    phrases = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return kind or isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)
