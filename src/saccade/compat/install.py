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
    "flash_attn_interface": {"flash_attn_interface": "saccade.compat.flash_attn_interface"},
}
"""What `install` takes: names and the modules that they become."""


def install(name: str) -> ModuleType:
    """Puts modules with saccade's functions into `sys.modules`, under another library's names.

    What comes with a name: "flash_attn" brings `flash_attn`, `flash_attn.flash_attn_interface` and
    `flash_attn.bert_padding`. Other submodules are those of an installed library, `flash_attn.cute` among them; without
    one, importing them raises ModuleNotFoundError, so that fallbacks work. Modules that imported functions before keep
    them: call this first.

    Args:
        name: "flash_attn" (2.8), or "flash_attn_interface" (3).

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
    """A module of its own, so that who patches it changes nothing here."""
    is_package = any(other.startswith(f"{alias}.") for face in FACES.values() for other in face)
    spec = ModuleSpec(alias, None, origin=source.__name__, is_package=is_package)
    if spec.submodule_search_locations is not None:
        spec.submodule_search_locations = _installed_at(alias)
    module = ModuleType(alias, source.__doc__)
    names = [*source.__all__, *(name for name in ("__all__", "__version__") if hasattr(source, name))]
    vars(module).update({name: getattr(source, name) for name in names})
    module.__spec__, module.__saccade__ = spec, source.__name__  # pyright: ignore[reportAttributeAccessIssue]
    if spec.submodule_search_locations is not None:
        module.__path__ = spec.submodule_search_locations
        for inner in [x for x in sys.modules if x.rpartition(".")[0] == alias]:  # of an installed library
            setattr(module, inner.rpartition(".")[2], sys.modules[inner])
    sys.modules[alias] = module
    parent, _, child = alias.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _installed_at(name: str) -> list[str]:
    """The folders of an installed package, all of them where several libraries share its name."""
    found = PathFinder.find_spec(name)
    return list(pkgutil.extend_path(list(found.submodule_search_locations or []) if found else [], name))
