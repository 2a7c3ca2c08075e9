"""Calls that repeat an earlier one in all but the numbers in tensors, and where these lie.

Small calls are bound by what the host does in front of a launch, and most of it comes out the same in each step of a
loop. A backend with kernels notes what a call allocated and launched (`backends/device/recorder.py`), and later calls
of the same key do that. The rule: **a key holds all that the host reads but addresses, and a call of which no key does
is computed as if it were the first.**

`key_of` makes a key of a Call. Calls of three tensors are found by shorter ones (`shortcuts.py`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from saccade.alignment import ALIGNMENT
from saccade.backends import Saved
from saccade.bounded_cache import BoundedCache
from saccade.call import Call
from saccade.layouts import Dense
from saccade.scores import Traced

PLAIN = {Tensor, torch.nn.Parameter}
_HALF = torch.float16, torch.bfloat16
"""The dtypes whose kernels depend on no setting of torch."""
on_host = attrgetter("is_cpu")
_SEEN: Any = object()
_NEVER: Any = object()
_repeats: BoundedCache[Any, Any] = BoundedCache(2048)
"""Repeats by `key_of`; _SEEN: once; _NEVER: the call does more than to allocate and launch."""


def forget() -> None:
    """Drops what is kept."""
    _repeats.clear()


def watched() -> bool:
    """Whether a compiler, mode or transform may look at what a call does, or change what operations do."""
    return bool(
        torch.compiler.is_compiling()  # first, as torch.compile follows this code
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or getattr(forward_ad, "_current_level", 0) >= 0
        or torch._C._get_tracing_state() is not None
    )


def key_of(call: Call, *more: Hashable) -> Hashable | None:
    """What Calls share that allocate and launch the same; None of those that are not kept."""
    layout, mask, score, dropout = call.layout, call.mask, call.score, call.dropout
    if call.q.dtype not in _HALF or call.out is not None or call.descale is not None or on_host(call.q):
        return None
    if type(layout) is not Dense or not layout.plain or call.first_b:
        return None
    ints: list[int] = []
    floats = [call.scale]
    if mask is not None:
        if mask.listed or mask.tensors:
            return None
        ints += mask.ints
        floats += mask.floats
    shapes: list[Any] = []
    if score is not None:
        ints += score.ints
        floats += score.floats
        shapes = [(x.shape, x.stride(), x.device) for x in score.tensors]
        if isinstance(score, Traced):
            shapes.append(tuple(map(type, score.numbers)))
    if dropout is not None:
        floats.append(dropout.p)
    # By their bits: -0.0 and 0.0 are equal, and a function may divide by them.
    return call.key, struct.pack(f"{len(floats)}d", *floats), *ints, *shapes, *more


def gradient_key_of(call: Call, saved: Saved, *more: Hashable) -> Hashable | None:
    """The same of a backward."""
    given = saved.dout, saved.dlse, saved.out, saved.lse
    return key_of(call, "backward", saved.wanted, *map(lies, given), *more)


def lies(x: Tensor | None) -> Hashable:
    """How a tensor lies, but for its address."""
    if x is None:
        return None
    address = x.data_ptr()
    return x.shape, x.stride(), x.dtype, x.device, address % ALIGNMENT, address == 0, x.is_neg()


def operands_of(call: Call) -> list[Tensor]:
    """The tensors that a Call without others in its mask and layout has."""
    given = [call.q, call.k, call.v]
    if call.sink is not None:
        given.append(call.sink)
    if call.score is not None:
        given += call.score.tensors
    if call.dropout is not None:
        given.append(call.dropout.state)
    return given


def gradient_operands_of(call: Call, saved: Saved) -> list[Tensor]:
    """Those of a backward, what is saved first."""
    dlse = [] if saved.dlse is None else [saved.dlse]
    return [saved.dout, *dlse, saved.out, saved.lse, *operands_of(call)]


def find(key: Hashable) -> Any:
    """The Repeat of a key, where it may run."""
    found = kept(key)
    return found if found and found.ready() else None


def kept(key: Hashable | None) -> Any:
    """The Repeat of a key; None: not yet; False: never."""
    found = _NEVER if key is None else _repeats.get(key)
    return False if found is _NEVER else None if found is _SEEN else found


def run(
    key: Hashable | None, module: Any, operands: Sequence[Tensor], call: Callable[[], Sequence[Tensor | None]]
) -> Sequence[Tensor | None]:
    """The results of a call that is done in full: the second time it is noted for later calls."""
    if key is None or not hasattr(module, "recorder"):
        return call()
    if (found := _repeats.get(key)) is not _SEEN or not _distinct(operands):
        if found is None:
            _repeats.put(key, _SEEN)
        return call()
    recorder = module.recorder()
    if recorder is None:
        return call()
    with recorder:
        results = call()
    _repeats.put(key, recorder.repeat(operands, results) or _NEVER)
    return results


def _distinct(operands: Sequence[Tensor]) -> bool:
    """Whether each operand is another object, so that a kernel's argument tells which one it is."""
    return len({*map(id, operands)}) == len(operands) and all(type(x) in PLAIN for x in operands) and not watched()
