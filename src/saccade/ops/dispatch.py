"""Which backend runs a Spec, and one line of reason for every one that does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from saccade.backends import Backend, Launches, backend_module
from saccade.call import Call
from saccade.call.spec import Spec
from saccade.ops.score_windows import move_to_mask
from saccade.util import hardware
from saccade.util.arguments import Unsupported
from saccade.util.caches import BoundedCache

# "auto" takes the first that can and is not `slower_than_next`; cuDNN and the reference run only when they are named.
BACKENDS = ("gluon", "triton", "cpu")
NAMES = (*BACKENDS, "cudnn", "reference")


@dataclass(frozen=True)
class Plan:
    """A Spec and the backend that runs it. Owns no tensors."""

    spec: Spec
    backend: str
    launches: Launches = field(default_factory=dict, compare=False, repr=False)

    @property
    def module(self) -> Backend:
        return backend_module(self.backend)


@lru_cache(maxsize=1024)
def plan(spec: Spec, backend: str = "auto", gradient: bool = False) -> Plan:
    """The Plan for a Spec: the named backend, or the first that runs it.

    With `gradient` the Plan is for the backward, which another backend may run than the forward: they share what is
    saved. Where the named one has none for this Spec, the first that has does.

    Raises:
        Unsupported: with one line of reason per backend.
        ValueError: a backend that does not exist.
    """
    if backend not in ("auto", *NAMES):
        raise ValueError(f"unknown backend {backend!r}; it is one of auto, {', '.join(NAMES)}")
    return Plan(spec, _first(spec, spec, backend, gradient))


def _first(call: Spec | Call, spec: Spec, backend: str, gradient: bool) -> str:
    """The backend that runs the call."""
    tried = BACKENDS if backend == "auto" else (backend, *BACKENDS) if gradient else (backend,)
    reasons = {name: reasons_against(name, call, gradient) for name in tried}
    able = [name for name, against in reasons.items() if not against]
    if not able:
        raise Unsupported(refusal(spec, reasons))
    if backend == "auto" and isinstance(call, Call):
        return next((name for name in able if slower_than_next(name, call, gradient) is None), able[0])
    return able[0]


def planned(call: Call, backend: str, gradient: bool = False) -> tuple[Plan, Call]:
    """`plan(call.spec, …)`, by way of the Call's key, which costs less to make than a Spec; and the Call as
    the backend takes it, with what its score masks in its mask."""
    if call.score is not None:
        call = move_to_mask(call, backend)
    key = call.key, backend, gradient
    chosen = _plans.get(key)
    if chosen is None:
        chosen = _plans.put(key, replace(_plan_of(call, backend, gradient), launches={}))
    return chosen, call


def _plan_of(call: Call, backend: str, gradient: bool) -> Plan:
    spec = call.spec
    chosen = plan(spec, backend, gradient)
    passed_over = backend == "auto" and slower_than_next(chosen.backend, call, gradient) is not None
    if not passed_over and not _obstacles(chosen.backend, call, gradient):  # it has no reason against the Spec
        return chosen
    return Plan(spec, _first(call, spec, backend, gradient))


def plan_of(call: Spec | Call, backend: str = "auto", gradient: bool = False) -> Plan:
    """The Plan alone, of a Call or of any with this Spec."""
    return plan(call, backend, gradient) if isinstance(call, Spec) else planned(call, backend, gradient)[0]


_plans: BoundedCache[Any, Plan] = BoundedCache(4096)


def forget() -> None:
    """Drops the plans of Calls, and all that backends keep in them."""
    _plans.clear()


def reasons_against(backend: str, call: Spec | Call, gradient: bool = False) -> list[str]:
    """Why this backend does not run this call, or its backward; empty when it does. A Spec does not hold all that a
    Call does, such as lengths. Of a device that this machine does not have, what backends declare is all there is to
    know."""
    module = backend_module(backend)
    support = module.GRADIENT if gradient else module.SUPPORT
    if support is None:
        return ["has no backward"]
    spec = call if isinstance(call, Spec) else call.spec
    return support.reasons(spec) or _obstacles(backend, call, gradient)


def _obstacles(backend: str, call: Spec | Call, gradient: bool) -> list[str]:
    """What else than its support is against it."""
    module, spec = backend_module(backend), call if isinstance(call, Spec) else call.spec
    if hardware.present(spec.device) and (obstacle := module.obstacle()) is not None:
        return [obstacle]
    return module.refusals(call, gradient) if call is not spec and hasattr(module, "refusals") else []


def slower_than_next(backend: str, call: Call, gradient: bool = False) -> str | None:
    """Why "auto" leaves a forward, or backward, that this backend runs to the next one that does, or None."""
    module = backend_module(backend)
    return module.slower_than_next(call, gradient) if hasattr(module, "slower_than_next") else None


def refusal(spec: Spec, reasons: Mapping[str, Sequence[str]]) -> str:
    lines = [f"no backend runs {spec}", *(f"  {name}: {'; '.join(against)}" for name, against in reasons.items())]
    if "reference" not in reasons and not reasons_against("reference", spec):
        lines.append('  backend="reference" runs it, slowly, in memory for the whole score matrix')
    return "\n".join(lines)
