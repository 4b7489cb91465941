"""Imports that wait until they are needed: `--help` and wrong flags are answered without loading torch."""

import builtins
import sys
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace


class Deferred(ModuleType):
    """Stands for a module, which is imported when one of its attributes is first read, and then has its place
    among `names`, the global names of the importing file.
    """

    def __init__(self, name, names):
        super().__init__(name)
        self.names = names

    def __getattr__(self, name):
        module = import_module(self.__name__)
        self.names |= {own: module for own, value in self.names.items() if value is self}
        return getattr(module, name)


@contextmanager
def deferred(*names):
    """A block in which `import NAME` and `from PACKAGE import NAME` of these modules (by full name) give a
    Deferred, unless they are loaded. Other imports are Python's own.
    """
    python_import = builtins.__import__

    def deferring(name, globals=None, locals=None, fromlist=(), level=0):
        waiting = {*names} - sys.modules.keys()
        if name in waiting and not fromlist and "." not in name:
            return Deferred(name, globals)
        late = {part: Deferred(f"{name}.{part}", globals) for part in fromlist or ()
                if f"{name}.{part}" in waiting}
        others = tuple(part for part in fromlist or () if part not in late)
        module = python_import(name, globals, locals, others, level)
        return SimpleNamespace(**late, **{part: getattr(module, part) for part in others}) if late else module

    builtins.__import__ = deferring
    try:
        yield
    finally:
        builtins.__import__ = python_import
