"""Plug-ins: an algorithm or an environment is a class in one file, given by the file's stem or path.

`--algo grpo` is class Method of algorithms/grpo.py, `--env path/to/guess.py` class Environment of that file.
The class is checked: it may define no public name that its base class does not declare, because nothing would
read it. What its code raises or returns against its contract is a PluginError.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import FunctionType

ORIGINS = {}           # {name of a plug-in's module: its flag and value}


class PluginError(ValueError):
    """A plug-in's mistake, as one line: which plug-in, where, what came and what was expected."""


@contextmanager
def blamed(*passing):
    """In this block, what a plug-in's code raises becomes a PluginError that names plug-in, line, function.

    What is no Exception, too, such as SystemExit or asyncio's CancelledError. Errors of the types `passing`,
    KeyboardInterrupt and lack of memory stay as they are. So does a ValueError or OSError that is meant for
    the user: of a plug-in of the tree, or with a message that begins with a flag.
    """
    try:
        yield
    except (PluginError, MemoryError, KeyboardInterrupt, *passing):
        raise
    except BaseException as error:
        origin, line, function, outside = last_call(error)
        if not origin or type(error).__name__ == "OutOfMemoryError":
            raise
        for_user = not outside or str(error).startswith("--")
        if isinstance(error, (ValueError, OSError)) and for_user:
            raise
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise PluginError(f"{origin}line {line}, in {function}: {what}{notes}") from error


def last_call(error):
    """Where an error's traceback was last in a plug-in's code: ("FLAG=VALUE: ", to which a file that the
    plug-in imports from its folder adds its name, line, function, whether it is outside the tree); all false
    if it was nowhere.
    """
    folders = {Path(sys.modules[module].__file__).parent: origin for module, origin in ORIGINS.items()
               if module.startswith("plugin_") and module in sys.modules}
    folders.pop(Path(__file__).resolve().parents[1], None)         # whose other files are the project's own
    found = "", 0, "", False
    for frame, line in traceback.walk_tb(error.__traceback__):
        module, file = frame.f_globals.get("__name__", ""), Path(frame.f_code.co_filename)
        if module in ORIGINS:
            found = f"{ORIGINS[module]}: ", line, frame.f_code.co_name, module.startswith("plugin_")
            if file.parent in folders:                             # of two plug-ins there the one that called
                folders[file.parent] = ORIGINS[module]
        elif file.parent in folders:
            found = f"{folders[file.parent]}: {file.name}, ", line, frame.f_code.co_name, True
    return found


def refuse(wrong, source, where):
    """Raise PluginError if `wrong`, the description of a mistake, is not "".

    source: an object or a method of the plug-in, for its name. where: what returned the mistake.
    """
    if wrong:
        raise PluginError(f"{origin_of(source)}: {where}: {wrong}")


def origin_of(source):
    """Where a class, an object or a method is from: its plug-in's flag and value, else its file or module."""
    module = source.__module__
    return ORIGINS.get(module) or getattr(sys.modules.get(module), "__file__", module)


def names(package, base):
    """Return the sorted stems of the package's files with a subclass named as `base`; import nothing."""
    files = sorted(Path(package.__file__).parent.glob("[!_]*.py"))
    return [file.stem for file in files
            if f"\nclass {base.__name__}(" in file.read_text("utf-8", errors="replace")]


def find(package, base, flag, value):
    """Return the class named as `base` in the file `value`, or `value`.py of the package if it is no path.

    ValueError, naming the flag and the value, if there is no such file or class, or the class is not valid.
    """
    folder = Path(package.__file__).resolve().parent
    if not value.endswith(".py"):
        if not is_public(folder, value):
            known = ", ".join(names(package, base))
            raise ValueError(f"{flag}={value}: expected one of {known}, or a file's path that ends in .py")
        file = f"{package.__name__}/{value}.py"
    else:
        file, path = value, Path(value)
        if not os.path.isfile(path):                   # False too if its path is too long, or not readable
            raise ValueError(f"{flag}={value}: {'is a folder' if os.path.isdir(path) else 'no such file'}")
        if path.resolve().parent == folder:
            return find(package, base, flag, path.stem)
        if path.stem in names(package, base):
            own = f"{package.__name__}/{path.name}"
            raise ValueError(f"{flag}={value}: {own} has the same name; rename the file")
    try:
        module = (load_file(path) if value.endswith(".py")
                  else importlib.import_module(f"{package.__name__}.{value}"))
    except (Exception, SystemExit) as error:           # a user's file may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{flag}={value}: cannot import {file}{line_in(error, file)}: {reason}") from error
    ORIGINS[module.__name__] = f"{flag}={value}"
    found = getattr(module, base.__name__, None)
    if not (isinstance(found, type) and issubclass(found, base) and found is not base):
        raise ValueError(f"{flag}={value}: {file} has no class "
                         f"{base.__name__}({base.__module__}.{base.__name__})")
    if wrong := wrong_attribute(found, base):
        raise ValueError(f"{flag}={value}: class {base.__name__}: {wrong}")
    if unknown := undeclared(found, base):
        raise ValueError(f"{flag}={value}: class {base.__name__} defines {', '.join(unknown)}, which "
                         f"{base.__module__}.{base.__name__} does not declare, so nothing reads it; a "
                         "helper's name begins with an underscore")
    if wrong := wrong_method(found, base):           # after the names: a mistyped one is lacking, too
        raise ValueError(f"{flag}={value}: class {base.__name__}: {wrong}")
    return found


def is_public(folder, name):
    """Whether the folder has a file `name`.py whose name does not begin with an underscore."""
    return name.isidentifier() and not name.startswith("_") and os.path.isfile(folder / f"{name}.py")


def load_file(path):
    """Import a file outside the packages and return the module: once, and again if the file has changed. It
    may import files of its folder.
    """
    path = path.resolve()
    source = path.read_bytes()
    name = f"plugin_{hashlib.sha256(str(path).encode() + source).hexdigest()[:8]}_{path.stem}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:                 # not exec_module, to which a file edited within a second is the old one
            exec(spec.loader.source_to_code(source, path), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def line_in(error, file):
    """Return where in a file an error arose: ", line 12"; "" if its traceback does not pass through it."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == Path(file).name:
        return f", line {error.lineno}"
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
             if Path(frame.f_code.co_filename).name == Path(file).name]
    return f", line {lines[-1]}" if lines else ""


def wrong_attribute(found, base):
    """Return which attribute of a plug-in's class is of another kind than the base class's; "" if none is."""
    settings = getattr(found, "Settings", None)
    if settings and not (isinstance(settings, type) and is_dataclass(settings)):
        return f"Settings is {settings!r:.60}; expected a dataclass"
    if settings and "__dataclass_fields__" not in vars(settings) and inspect.get_annotations(settings):
        return "Settings declares fields; expected @dataclass(frozen=True) above it, too"
    declared = fields(settings) if settings else ()
    if texts := [f.name for f in declared if isinstance(f.type, str)]:
        return f"the type of Settings.{texts[0]} is a text; leave out `from __future__ import annotations`"
    if without := [f.name for f in declared if f.default is MISSING]:
        return f"Settings.{without[0]} has no default; expected a value, and no default_factory"
    if wrong := next(filter(None, map(wrong_field, declared)), ""):
        return wrong
    inherited = fields(base.Settings) if settings else ()
    if lacking := {f.name for f in inherited} - {f.name for f in declared}:
        return (f"Settings lacks {sorted(lacking)[0]}; expected a subclass of "
                f"{base.Settings.__module__}.Settings")
    for name, value in vars(base).items():
        kinds = (tuple, list) if isinstance(value, tuple) else type(value)
        if isinstance(value, (bool, str, tuple, dict)) and not isinstance(getattr(found, name), kinds):
            if not name.startswith("_"):
                return f"{name} is {getattr(found, name)!r:.60}; expected a {type(value).__name__}"
    return ""


def wrong_field(f):
    """What of a setting cannot be a flag; "" if all can."""
    meta, name = f.metadata, f"Settings.{f.name}"
    bounds = [meta[end] for end in ("low", "high") if end in meta]
    if f.type not in (bool, int, float, str):
        return f"the type of {name} is {f.type!r:.60}; expected bool, int, float or str"
    if f.name == "help":
        return f"{name}: --help lists all flags; rename it"
    if not isinstance(meta.get("help", ""), str):
        return f"the help of {name} is {meta['help']!r:.60}; expected a text"
    return "" if all(isinstance(bound, (int, float)) for bound in bounds) else (
        f"the bounds of {name} are {bounds!r:.60}; expected numbers")


def wrong_method(found, base):
    """Return which method a plug-in's class lacks, or has with other parameters than it is called with; "" if
    all are right.

    `_required` names what has to be defined; `_hooks` of the base class has the parameters of the functions
    that are None there.
    """
    for name in getattr(found, "_required", ()):
        if getattr(found, name) is getattr(base, name):
            return f"lacks {name}{inspect.signature(getattr(base, name))}, which it has to define"
    for name, value in vars(base).items():
        own, hook = inspect.getattr_static(found, name), getattr(base, "_hooks", {}).get(name)
        if own is value or isinstance(own, property) or not (hook or isinstance(value, FunctionType)):
            continue
        method = getattr(found, name)
        if not callable(method):
            return f"{name} is {method!r:.60}; expected a function"
        expected = ["self", *hook] if hook else [*inspect.signature(value).parameters]
        expected = expected if isinstance(own, FunctionType) else expected[1:]
        if wrong := wrong_calls(found, {name: expected}):
            return wrong
    return ""


def wrong_calls(source, calls):
    """Return which function of an object cannot be called with its parameters in `calls`; "" if all can."""
    for name, expected in calls.items():
        try:
            has = inspect.signature(getattr(source, name))
        except (TypeError, ValueError):                      # of code that is not Python
            continue
        try:
            has.bind(*expected)
        except TypeError:
            return f"{name}{has}; expected {name}({', '.join(expected)})"
    return ""


def undeclared(found, base):
    """Return public names that a plug-in's classes, from `found` up to `base`, define and `base` does not."""
    def defined(classes):
        return {name for cls in classes for name in (*vars(cls), *getattr(cls, "__annotations__", ()))}

    own = found.__mro__[:found.__mro__.index(base)]
    return sorted(name for name in defined(own) - defined(base.__mro__) if not name.startswith("_"))


def name_of(value):
    """Return the name of a plug-in given as a name or a path: "twins" for "lab/envs/twins.py"."""
    return Path(value).stem if isinstance(value, str) and value.endswith(".py") else value


def content_hash(value):
    """Return 16 hex digits of a plug-in file's SHA-256; None for a name: the commit identifies it."""
    return hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16] if value.endswith(".py") else None
