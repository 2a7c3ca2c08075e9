"""Other libraries' names for the faces of them here: code that imports those names runs by saccade, unchanged."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FACES = {
    "flash_attn": {
        "flash_attn": "saccade.compat.flash_attn",
        "flash_attn.flash_attn_interface": "saccade.compat.flash_attn.flash_attn_interface",
        "flash_attn.bert_padding": "saccade.compat.flash_attn.bert_padding",
    },
    "flash_attn.cute": {
        "flash_attn.cute": "saccade.compat.flash_attn_cute",
        "flash_attn.cute.interface": "saccade.compat.flash_attn_cute",
    },
    "flash_attn_interface": {"flash_attn_interface": "saccade.compat.flash_attn_interface"},
}
"""What `install` takes: names and the modules that they become."""


def install(name: str) -> ModuleType:
    """Puts modules with saccade's functions into `sys.modules`, under another library's names.

    "flash_attn" stands for `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding`,
    "flash_attn.cute" for `flash_attn.cute` and `flash_attn.cute.interface`. Other submodules are those of an installed
    library; without one, importing them raises ModuleNotFoundError, so that fallbacks work. Modules that imported
    functions before keep them: call this first.

    Args:
        name: "flash_attn" (2.8), "flash_attn_interface" (3), or "flash_attn.cute" (4).

    Returns:
        The module of that name. A second call changes nothing.

    Raises:
        ValueError: another name.

    >>> from saccade.compat import install
    >>> install("flash_attn")  # doctest: +SKIP
    >>> from flash_attn import flash_attn_func  # doctest: +SKIP
    """
    if name not in FACES:
        raise ValueError(f"install takes one of {', '.join(map(repr, FACES))}, got {name!r}")
    for alias, source in FACES[name].items():
        if getattr(sys.modules.get(alias), "__saccade__", None) != source:
            _put(alias, importlib.import_module(source))
    return sys.modules[name]


def _put(alias: str, source: ModuleType) -> None:
    parent, _, child = alias.rpartition(".")
    if parent and parent not in sys.modules:
        try:
            importlib.import_module(parent)
        except ImportError:
            sys.modules[parent] = _module(parent, None)
    sys.modules[alias] = _module(alias, source)
    if parent:
        setattr(sys.modules[parent], child, sys.modules[alias])


def _module(alias: str, source: ModuleType | None) -> ModuleType:
    """A module of its own, so that who patches it changes nothing here; an empty one without a source."""
    is_package = any(other.startswith(f"{alias}.") for face in FACES.values() for other in face)
    spec = ModuleSpec(alias, None, origin="saccade" if source is None else source.__name__, is_package=is_package)
    module = ModuleType(alias, None if source is None else source.__doc__)
    if source is not None:
        names = [*source.__all__, *(name for name in ("__all__", "__version__") if hasattr(source, name))]
        vars(module).update({name: getattr(source, name) for name in names})
    vars(module).update(__spec__=spec, __saccade__=spec.origin)
    if is_package:
        spec.submodule_search_locations = module.__path__ = _installed_at(alias)
        for inner in [x for x in sys.modules if x.rpartition(".")[0] == alias]:  # of an installed library
            setattr(module, inner.rpartition(".")[2], sys.modules[inner])
    return module


def _installed_at(name: str) -> list[str]:
    """The folders of an installed package, all of them where several libraries share its name."""
    parent = name.rpartition(".")[0]
    found = PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
    return list(pkgutil.extend_path(list(found.submodule_search_locations or []) if found else [], name))
