"""Imports that wait until they are needed: `--help` and wrong flags are answered without loading torch."""

import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType


class DeferredModule(ModuleType):
    """A module whose code runs when one of its own attributes is first read."""

    def __getattr__(self, name):
        spec = self.__spec__
        self.__class__ = ModuleType
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations
        spec.loader.exec_module(self)
        return getattr(self, name)


class DeferringLoader:
    """A loader that leaves a DeferredModule, which later loads itself with the original loader."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        """Python's default."""

    def exec_module(self, module):
        """Run nothing; a submodule's import, which reads the package's __path__, loads the package."""
        module.__dict__.pop("__path__", None)
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


@contextmanager
def deferred(*names):
    """Within this block, defer the import of these modules (by full name) to the first use of each."""
    finder = DeferringFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
