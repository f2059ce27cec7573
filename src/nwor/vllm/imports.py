"""Run something when a module has been imported, without importing it.

The plugin is loaded in every vLLM process, also in those that never run a model. Importing the
runner there to patch it would cost seconds and, on some platforms, initialise a device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once module `name` is imported; now, if it is already."""
    if name in sys.modules:
        action()
        return
    _Finder.waiting.setdefault(name, []).append(action)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders do the work and wraps the loader of the modules waited for."""

    waiting: dict[str, list[Callable[[], None]]] = {}  # noqa: RUF012 - one list per process

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the interface
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        actions = self.waiting.pop(fullname)  # before the search, which comes back here
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, actions)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, actions: list[Callable[[], None]]) -> None:
        self._loader = loader
        self._actions = actions

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for action in self._actions:
            action()
