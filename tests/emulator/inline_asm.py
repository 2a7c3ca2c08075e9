"""What the PTX in the kernels does: a function for each text. A text that is not here raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from tests.emulator import barriers, hopper
from tests.emulator.scheduler import machine, this_partition
from tests.emulator.values import Array, Tensor, decoded, encoded, rounded, tensor


def _nothing(text: str) -> Any:
    return np.int32(0)


def _pair(kind: Any) -> Callable[..., Array]:
    def pack(low: Array, high: Array) -> Array:
        halves = [encoded(rounded(x, kind), kind).astype(np.uint32) for x in (low, high)]
        return (halves[0] | halves[1] << 16).view(np.int32)

    return pack


def _quad(a: Array, b: Array, c: Array, d: Array) -> Array:
    kind = tl.float8e4nv
    found = [encoded(rounded(x, kind), kind).astype(np.uint32) for x in (a, b, c, d)]
    return (found[0] | found[1] << 8 | found[2] << 16 | found[3] << 24).view(np.int32)


def _halves(x: Array) -> tuple[Array, Array]:
    return (x & 0xFFFF).astype(np.uint16).view(np.int16), (x >> 16 & 0xFFFF).astype(np.uint16).view(np.int16)


def _parts(x: Array) -> tuple[Array, Array]:
    """A number as a sum of two of bfloat16."""
    high = rounded(x, tl.bfloat16)
    return tuple(_pair(tl.bfloat16)(part, part) for part in (high, x - high))


def _widened(x: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Numbers of e4m3 times factors that are sums of two: rounded as the instructions round."""
    bits, kind = x.view(np.uint32), tl.bfloat16
    factors = [decoded((part & 0xFFFF).astype(np.uint16), kind).astype(np.float64) for part in (high, low)]

    def product(i: int) -> Array:
        number = decoded((bits >> (8 * i) & 0xFF).astype(np.uint8), tl.float8e4nv).astype(np.float64)
        rest = rounded((number * factors[1]).astype(np.float32), kind)
        return (number * factors[0] + rest).astype(np.float32)

    return tuple(_pair(kind)(product(i), product(i + 1)) for i in (0, 2))


def _add(address: Array, number: int) -> Array:
    """Adds a number, whatever its order: what programs write is there for all at once."""
    machine().switch()
    pointer = Tensor(address, tl.pointer_type(tl.int32))
    old = machine().memory.update(pointer, np.asarray(np.int32(number)), None, np.add).data
    machine().switch()
    return old


def _count(address: Array) -> Array:
    if this_partition().warps != 1:
        raise NotImplementedError("a count by several warps, which have other results")
    return _add(address, 1)


def _add_one(address: Array) -> Array:
    _add(address, this_partition().warps)
    return np.int32(0)


def _until(address: Array, number: Array) -> Array:
    pointer, memory = Tensor(address, tl.pointer_type(tl.int32)), machine().memory
    machine().wait(
        lambda: int(memory.load(pointer, None, None).data) >= int(number),
        lambda: f"a count of {int(number)} in global memory, which is {int(memory.load(pointer, None, None).data)}",
    )
    return memory.load(pointer, None, None).data


def _until_copied(address: Array, number: Array) -> Array:
    """What copy engines bring comes when somebody waits for it."""
    machine().switch()
    engine.bring(int(number))
    return _until(address, number)


class Engine:
    """Copy engines, of a test."""

    bring: Callable[[int], None] = staticmethod(lambda number: None)
    """Makes the copies of so many steps, and says so."""


engine = Engine()


def _named(text: str) -> Callable[[Array], Array]:
    kind, threads = re.findall(r"bar\.(\w+) \$1, (\d+)", text)[0]
    meet = barriers.named_sync if kind == "sync" else barriers.named_arrive

    def enter(number: Array) -> Array:
        meet(int(number), int(threads))
        return np.int32(0)

    return enter


def _written(text: str) -> Callable[[Array], Array]:
    but = int(re.findall(r"wait_group (\d+)", text)[0])

    def wait(_: Array) -> Array:
        hopper.wait_until_written(but)
        return np.int32(0)

    return wait


def _always(f: Callable[..., Any]) -> Callable[[str], Callable[..., Any]]:
    return lambda text: f


COUNT = (
    r"\{ \.reg \.pred chosen; bar\.warp\.sync 0xffffffff; elect\.sync _\|chosen, 0xffffffff; mov\.b32 \$0, 0; "
    r"@chosen atom\.global\.(relaxed|acq_rel|acquire|release)\.gpu\.add\.u32 \$0, \[\$1\], 1; "
)


def _wait(scope: str, looks: str, late: str) -> str:
    return re.escape(
        f"{{ .reg .pred early; .reg .u32 left; mov.u32 left, {looks}; "
        f"again: ld.global.acquire.{scope}.s32 $0, [$1]; setp.lt.s32 early, $0, $2; sub.u32 left, left, 1; "
        "setp.ne.and.u32 early, left, 0, early; @early bra again; "
        f"setp.eq.u32 early, left, 0; @early {late}; fence.proxy.async; }}"
    )


TEXTS: tuple[tuple[str, Callable[[str], Callable[..., Any]]], ...] = (
    (r"bar\.(sync|arrive) \$1, \d+; mov\.u32 \$0, 0;", _named),
    (r"cvt\.rn\.bf16x2\.f32 \$0, \$2, \$1;", _always(_pair(tl.bfloat16))),
    (r"cvt\.rn\.f16x2\.f32 \$0, \$2, \$1;", _always(_pair(tl.float16))),
    (r"mov\.b32 \{\$0, \$1\}, \$2;", _always(_halves)),
    (
        (
            r"\{ \.reg \.b16 low, high; cvt\.rn\.satfinite\.e4m3x2\.f32 low, \$2, \$1; "
            r"cvt\.rn\.satfinite\.e4m3x2\.f32 high, \$4, \$3; mov\.b32 \$0, \{low, high\}; \}"
        ),
        _always(_quad),
    ),
    (r"\{ \.reg \.f32 high, low; cvt\.rn\.bf16x2\.f32 \$0, .*\}", _always(_parts)),
    (r"\{ \.reg \.b32 high, low, a, b, c, d; shr\.u32 .*\}", _always(_widened)),
    (r"lg2\.approx\.f32 \$0, \$1;", _always(np.log2)),
    (r"tanh\.approx\.f32 \$0, \$1;", _always(np.tanh)),
    (r"mov\.b32 \$0, \$1;", _always(lambda x: x)),
    (r"shfl\.sync\.idx\.b32 \$0, \$1, 0, 31, 0xffffffff;", _always(lambda x: x)),
    (
        COUNT + r"redux\.sync\.or\.b32 \$0, \$0, 0xffffffff; \}",
        _always(_count),
    ),
    (
        (
            r"\{ \.reg \.pred chosen; bar\.warp\.sync 0xffffffff; elect\.sync _\|chosen, 0xffffffff; "
            r"@chosen red\.global\.relaxed\.gpu\.add\.u32 \[\$1\], 1; mov\.b32 \$0, 0; \}"
        ),
        _always(_add_one),
    ),
    (_wait("gpu", "0x400000", "st.global.s32 [$1], 0x3fffffff"), _always(_until)),
    (_wait("sys", "0x8000000", "trap"), _always(_until_copied)),
    (r"cp\.async\.bulk\.wait_group \d+; mov\.u32 \$0, 0;", _written),
    (r"prefetch\.global\.L2 \[\$1\]; mov\.u32 \$0, 0;", _always(_nothing)),
    (r"fence\.acq_rel\.gpu; mov\.u32 \$0, 0;", _always(_nothing)),
)


def elementwise(text: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """gl.inline_asm_elementwise."""
    for pattern, make in TEXTS:
        if re.fullmatch(pattern, text):
            made = make(text)(*np.broadcast_arrays(*(tensor(x).data for x in args)))
            break
    else:
        raise NotImplementedError(f"the emulator does not know the PTX {text!r}")
    if isinstance(dtype, tuple):
        return tuple(Tensor(x, kind) for x, kind in zip(made, dtype, strict=True))
    return Tensor(np.asarray(made), dtype)
