"""Settings as flags: each field of a frozen dataclass is a flag, with its meaning and unit on its line.

A field without help is no flag: presets set it. Left out: nested settings, and files of settings.
"""

import argparse
import sys
from dataclasses import field, fields

LIMIT = 1e6          # of numbers without one of their own: what is larger is a mistake, hangs or overflows


def opt(default, help="", choices=None, low=-LIMIT, high=LIMIT, read=None, section="", needs=None):
    """One setting: its default, its meaning and unit, and what is allowed.

    read: how its text is read where the type alone does not say. section: the heading in --help that begins
    here. needs: (function of all settings, what to say where it is False, for then nothing reads the flag).
    """
    return field(default=default, metadata=dict(
        help=help, choices=choices, low=low, high=high, read=read, section=section, needs=needs))


def flag_of(name):
    """"max_turns" -> "--max-turns"."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake prints its one line and where help is, nothing else."""

    def __init__(self, program, **options):
        super().__init__(prog=program, usage=f"python {program} [--flag value ...]", allow_abbrev=False,
                         add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)

    def error(self, message):
        """One line, exit status 2."""
        print(f"{self.prog}: error: {message}; see --help", file=sys.stderr)
        sys.exit(2)

    def add(self, settings, section, values=None):
        """A flag for each field with help; with `values`, which become the defaults, for those they need."""
        group = self.add_argument_group(section)
        for f in fields(settings):
            meta = f.metadata
            if meta.get("section"):
                group = self.add_argument_group(meta["section"])
            if meta.get("help") and (not values or needed(meta, values)):
                kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {
                    "type": meta.get("read") or f.type,
                    "metavar": "|".join(meta.get("choices") or (f.type.__name__,))}
                group.add_argument(flag_of(f.name), help=meta["help"].replace("%", "%%"), **kind,
                                   default=values[f.name] if values else argparse.SUPPRESS)


def needed(meta, values):
    """Whether anything reads a field, by all settings."""
    return not meta.get("needs") or meta["needs"][0](values)


def given(program, argv, *shelves):
    """What a command line says of these dataclasses, {name: value}, and the words that none of them knows."""
    parser = Parser(program)
    for settings in shelves:
        parser.add(settings, "")
    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS)
    values, unknown = parser.parse_known_args(argv)
    return vars(values), unknown


def made_of(settings, values):
    """A dataclass from the values of its names. ValueError for one not among its choices or out of bounds."""
    for f in fields(settings):
        value, meta = values[f.name], f.metadata
        if meta.get("choices") and value not in meta["choices"]:
            raise ValueError(f"{flag_of(f.name)}={value}: expected one of {', '.join(meta['choices'])}")
        low, high = (meta.get(end, limit) for end, limit in (("low", -LIMIT), ("high", LIMIT)))
        if f.type in (int, float) and not low <= value <= high:                        # nor is NaN
            raise ValueError(f"{flag_of(f.name)}={value}: expected {low:g} to {high:g}")
    return settings(**{f.name: values[f.name] for f in fields(settings)})
