"""An error as the one line that the command prints, with advice where memory ran out."""

import traceback
from contextlib import suppress
from pathlib import Path

import torch

from infra import files
from infra.plugins import PluginError

# Errors that end a run with one line: mistakes found late, a full disk, engines that die, torch's own errors
EXPECTED = ValueError, OSError, ArithmeticError, MemoryError, RuntimeError
# Advice when memory runs out, by the files in the traceback: (files, activity, flags to turn)
ADVICE = ((("rollout.py", "engine.py"), "playing", "--slots or --context down"),
          (("update.py",), "training", "--microbatch-tokens down, then --checkpoint-activations on, then "
           "--max-response-tokens down"))


def one_line(error, out, known=()):
    """Format an error as one line. A plug-in's, and a RuntimeError not `known`, leaves OUT/traceback.txt."""
    text = " ".join(str(error).split())
    if is_out_of_memory(error, text):
        passed = {Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_tb(error.__traceback__)}
        advice = [entry for entry in ADVICE if passed & {*entry[0]}] or ADVICE
        hints = "; ".join(f"while {activity}, {flags}" for _, activity, flags in advice)
        return f"out of memory ({text[:200]}): {hints}"
    text = " ".join([text, *(f"({note})" for note in getattr(error, "__notes__", ()))])
    unknown = isinstance(error, RuntimeError) and not isinstance(error, known)
    if unknown or isinstance(error, PluginError):
        with suppress(OSError):
            files.write_text(Path(out) / "traceback.txt", "".join(traceback.format_exception(error)))
            text = f"{text[:500]} (traceback in {out}/traceback.txt)"
    return f"{type(error).__name__}: {text}" if unknown else text


def is_out_of_memory(error, text):
    """Whether memory ran out: by the error's type or, for libraries under torch, by its text."""
    kind = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    phrases = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return kind or isinstance(error, RuntimeError) and any(phrase in text for phrase in phrases)
