"""Imports that wait until they are needed: `--help` and wrong flags are answered without loading torch."""

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class DeferredModule(ModuleType):
    """A module whose code runs when one of its own attributes is first read."""

    def __getattr__(self, name):
        self.__class__ = ModuleType
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class DeferringLoader:
    """A loader that leaves a DeferredModule, which later loads itself with the original loader."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        """Python's default."""

    def exec_module(self, module):
        """Run nothing yet."""
        module.__loader__ = module.__spec__.loader = self.loader
        module.__class__ = DeferredModule


class DeferringFinder:
    """A finder for sys.meta_path that defers modules of the given full names."""

    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        """The module's spec with a DeferringLoader; None for other modules."""
        if name not in self.names or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        spec.loader = DeferringLoader(spec.loader)
        return spec


class LoadedLoader:
    """A loader that returns a module which is loaded already."""

    def __init__(self, module):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec):
        """The module itself."""
        return self.module

    def exec_module(self, module):
        """Run nothing; the module keeps its own spec."""
        module.__spec__ = self.spec


class SubmoduleFinder:
    """A finder that loads a deferred package before one of its submodules, which that may load as well."""

    @staticmethod
    def find_spec(name, path, target=None):
        """The spec of a submodule that its package has just loaded; None otherwise."""
        package = sys.modules.get(name.partition(".")[0])
        if not isinstance(package, DeferredModule):
            return None
        DeferredModule.__getattr__(package, "__name__")
        # taken out of sys.modules, or importlib would execute it again by its own spec; the loader
        # puts it back
        loaded = sys.modules.pop(name, None)
        return None if loaded is None else ModuleSpec(name, LoadedLoader(loaded))


@contextmanager
def deferred(*names):
    """A block in which imports of these modules (by full name) are deferred to the module's first use."""
    if SubmoduleFinder not in sys.meta_path:
        sys.meta_path.insert(0, SubmoduleFinder)
    finder = DeferringFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
