"""Keys of compiled kernels that do not depend on what a process compiled before.

Until 3.8 or so Triton adds a callee's global numbers to a caller's key before it has looked for them: they are there if
another kernel has called the callee before. So the same kernel had several keys, and was compiled for each. Here the
callee's own key comes first, as in Triton 3.9, where this changes nothing.
"""

from __future__ import annotations

from typing import Any

from triton.runtime.jit import DependenciesFinder

_update_hash: Any = DependenciesFinder._update_hash


def _of_callee_first(self: Any, func: Any) -> None:
    func.cache_key  # noqa: B018 (it finds the callee's global numbers)
    _update_hash(self, func)


def install() -> None:
    """Once in a process."""
    DependenciesFinder._update_hash = _of_callee_first
