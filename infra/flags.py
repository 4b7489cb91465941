"""Settings as flags: each field of a frozen dataclass is a flag, and its help text is in its definition.

A field without a help text has no flag; presets set it. Left out: nested settings, and settings files.
"""

import argparse
from dataclasses import field, fields

LIMIT = 1e6          # bound on a number's magnitude by default; a larger number is a mistake or overflows


def setting(default, help="", choices=None, low=-LIMIT, high=LIMIT, section="", needs=None, rare=False):
    """Return a dataclass field for one setting: its default, its meaning and unit, its allowed values.

    section: heading that begins here in --help. needs: (predicate of all settings, message): where the
    predicate is False, the setting's value changes nothing that one could want, and giving its flag is a
    ValueError with the message. rare: only --help all lists it.
    """
    return field(default=default, metadata=dict(
        help=help, choices=choices, low=low, high=high, section=section, needs=needs, rare=rare))


def flag_of(name):
    """Return a setting's flag: "max_turns" becomes "--max-turns"."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse's parser, which raises ValueError for a mistake."""

    def __init__(self, program, **options):
        super().__init__(prog=program, usage=f"python {program} [--flag value ...]", allow_abbrev=False,
                         add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options)

    def error(self, message):
        """Raise ValueError."""
        raise ValueError(message)

    def add(self, settings, section, values=None, rare=True):
        """Add a flag for each field of the dataclass `settings` that has a help text.

        values: all settings; if given, they are the defaults. rare: also flags that are rarely given, or that
        would not be used.
        """
        group = self.add_argument_group(section)
        for f in fields(settings):
            meta = f.metadata
            if f.type is bool and f.name.startswith("no_"):
                raise ValueError(f"{flag_of(f.name)}: a setting that is True or False and begins with no_; "
                                 f"{flag_of(f.name[3:])} has {flag_of(f.name)} already")
            if meta.get("section"):
                group = self.add_argument_group(meta["section"])
            if meta.get("help") and (rare or is_used(meta, values) and not meta.get("rare")):
                kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {
                    "type": f.type, "metavar": "|".join(map(str, meta.get("choices") or (f.type.__name__,)))}
                unused = "" if not values or is_used(meta, values) else f"; {meta['needs'][1]}"
                group.add_argument(flag_of(f.name), help=(meta["help"] + unused).replace("%", "%%"), **kind,
                                   default=values[f.name] if values else argparse.SUPPRESS)


def is_used(meta, values):
    """Whether a field with this metadata is used, given the values of all settings."""
    return not meta.get("needs") or meta["needs"][0](values)


def parse_known(program, argv, *dataclasses):
    """Parse the flags of these dataclasses. Returns {name: value} of those given, and unknown arguments."""
    parser = Parser(program)
    for settings in dataclasses:
        parser.add(settings, "")
    parser.add_argument("-h", "--help", nargs="?", const="common", choices=("common", "all"),
                        default=argparse.SUPPRESS)
    values, unknown = parser.parse_known_args(argv)
    return vars(values), unknown


def make_settings(dataclass, values):
    """Make a dataclass of settings from `values`, {name: value}, which may hold other names too.

    ValueError for a value that is not among its choices, out of bounds, or NaN.
    """
    for f in fields(dataclass):
        value, meta = values[f.name], f.metadata
        if meta.get("choices") and value not in meta["choices"]:
            raise ValueError(f"{flag_of(f.name)}={value}: expected one of "
                             + ", ".join(map(str, meta["choices"])))
        kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(f.type)
        if kinds and type(value) not in kinds:
            raise ValueError(f"{flag_of(f.name)}={value!r}: expected {f.type.__name__}")
        low, high = (meta.get(end, limit) for end, limit in (("low", -LIMIT), ("high", LIMIT)))
        if f.type in (int, float) and not low <= value <= high:                        # also refuses NaN
            raise ValueError(f"{flag_of(f.name)}={value}: expected {low:g} to {high:g}")
    return dataclass(**{f.name: values[f.name] for f in fields(dataclass)})
