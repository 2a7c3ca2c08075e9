"""Ways around slow imports: a dispatch mode without PyTorch's compiler, and hooks for modules imported later."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from torch.utils._python_dispatch import TorchDispatchMode

# A dispatch mode that lets PyTorch's compiler be.


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose use imports no part of `torch.compile`, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Since 2.13 torch hides modes from its compiler, which it imports to do so. It never meets these."""
        return False


# What is done once another module is imported, by whomever, and not before.


def after_import(name: str, action: Callable[[], None]) -> None:
    """Does it now if the module is imported, else right after its import."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    """Finds nothing itself: adds an action to the loader of the module that others find."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        loader = spec and spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        loader.exec_module = exec_module
        return spec
