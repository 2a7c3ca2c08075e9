"""Score modifications on the device: a record of two functions and the values they capture."""

# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade import scores
from saccade.backends.device import positions
from saccade.backends.device.pointwise import NAMES, fast_tanh, tanh
from saccade.backends.device.records import FAR, FLAGS, LOG2E, NARROW_LIMIT, constants, far_parts, runtime_int
from saccade.call import Call
from saccade.scores import LONGEST
from saccade.scores.codegen import source
from saccade.scores.codegen.emitter import EmitOptions
from saccade.scores.codegen.linear import has_plateaus, linear_source, plateau_source

LEAST_SCALE, LARGEST_SCALE = 1e-6, 1e6
"""Below, numbers that are divided by the scale may leave float32; above, those that it or a cap multiplies."""


class DeviceScore(NamedTuple):
    apply: Any
    """(data, score, b, h, q_idx, kv_idx) -> modified score; natural units, float32"""
    slope: Any
    """(data, score, b, h, q_idx, kv_idx) -> d modified / d score"""
    identity: Any
    """constexpr: there is nothing to do"""
    parts: Any
    """(data) -> inside, outside: numbers with apply(score) = outside core(inside score); outside > 0"""
    core: Any
    """(data, score, b, h, q_idx, kv_idx) -> score; what is left of apply when the scale takes in what is linear"""
    large_scores: Any
    """constexpr: the core's values may be so large that their products are off by whole numbers, as where it masks keys
    by -1e9"""
    unit_slope: Any
    """constexpr: the slope is 1 everywhere"""
    linear: Any
    """constexpr: modified = score + pitch kv_idx + what belongs to the row"""
    pitch: Any
    """(data, b, h, q_idx, kv_idx) -> pitch; kv_idx is not used"""
    bias: Any
    """(data, b, h, q_idx, kv_idx) -> modified score of 0"""
    constant_beyond: Any
    """constexpr: modified = score + bias, one number beyond the reach of its tables; it is not linear then, and bias
    takes one row and one key"""
    reach: Any
    """(data, b, h) -> low and high: the distances kv_idx - q_idx beyond which that is so, both inclusive"""
    data: tuple
    placed: Any = tl.constexpr(False)
    """constexpr: `data` is the plain DeviceScore, which takes positions for indices, and the positions"""


@triton.jit
def _none(data, b, h, q_idx, kv_idx):
    return 0.0


@triton.jit
def _same(data, score, b, h, q_idx, kv_idx):
    return score


@triton.jit
def _no_parts(data):
    return 1.0, 1.0


@triton.jit
def _one(data, score, b, h, q_idx, kv_idx):
    return score * 0 + 1


@triton.jit
def _softcap(data, score, b, h, q_idx, kv_idx):
    return data[0] * tanh(score / data[0])


@triton.jit
def _softcap_parts(data):
    return 1 / data[0], data[0]


@triton.jit
def _softcap_core(data, score, b, h, q_idx, kv_idx):
    return fast_tanh(score)


@triton.jit
def _softcap_slope(data, score, b, h, q_idx, kv_idx):
    t = tanh(score / data[0])
    return 1 - t * t


@triton.jit
def _fast_softcap(data, score, b, h, q_idx, kv_idx):
    return data[0] * fast_tanh(score * (1 / data[0]))


@triton.jit
def _fast_softcap_slope(data, score, b, h, q_idx, kv_idx):
    t = fast_tanh(score * (1 / data[0]))
    return 1 - t * t


@triton.jit
def _no_reach(data, b, h):
    return -FAR, FAR


_NEVER_BEYOND = constants(False, _no_reach)
_NOT_LINEAR = *constants(False, _none, _none), *_NEVER_BEYOND
_SAME = DeviceScore(*constants(_same, _one, True, _no_parts, _same, False, True), *_NOT_LINEAR, ())
_CORE = False, _softcap_parts, _softcap_core, False, False
_SOFTCAP = {
    False: (*constants(_softcap, _softcap_slope, *_CORE), *_NOT_LINEAR),
    True: (*constants(_fast_softcap, _fast_softcap_slope, *_CORE), *_NOT_LINEAR),
}


@triton.jit
def _placed_apply(data, score, b, h, q_idx, kv_idx):
    p, r = positions.function_positions(data[1], b, q_idx, kv_idx)
    return data[0].apply(data[0].data, score, b, h, p, r)


@triton.jit
def _placed_slope(data, score, b, h, q_idx, kv_idx):
    p, r = positions.function_positions(data[1], b, q_idx, kv_idx)
    return data[0].slope(data[0].data, score, b, h, p, r)


_PLACED = constants(_placed_apply, _placed_slope, False, _no_parts, _placed_apply, True)


def device_args(call: Call, fast: bool = False, tables: Sequence[Any] = (), tma_tile: int | None = None) -> DeviceScore:
    """The device form of a Call's score modification. All kernels of a call are to have the same tanh: `fast`, or to
    float32's accuracy, as the backward takes exp(score - lse). tables: see `distance_tables`. tma_tile: a captured
    tensor of which `core` and `slope` take a tile behind all other data."""
    score = call.score
    device_positions = positions.device_args(call) if isinstance(score, scores.Traced) else None
    plain = unplaced(score, fast, positions.kind(call), tables, positions.reached(call), tma_tile)
    if device_positions is None:
        return plain
    return DeviceScore(*_PLACED, plain.unit_slope, *_NOT_LINEAR, (plain, device_positions), FLAGS[True])


def unplaced(
    score: scores.Score | None, fast: bool = False, indices: str = "numbers", tables: Sequence[Any] = (),
    reached: bool = False, tma_tile: int | None = None,
) -> DeviceScore:  # fmt: skip
    """The device form of a score modification that takes its indices as they come; None is the identity."""
    match score:
        case None:
            return _SAME
        case scores.Softcap():
            return DeviceScore(*_SOFTCAP[fast], (score.cap,))
        case scores.Traced():
            options = form(score, fast, indices, reached)._replace(tables=bool(tables), tma_tile=tma_tile)
            return DeviceScore(*_emitted(score, options), (*data(score), *tables))
    raise TypeError(f"no GPU code for {score!r}")


def ordinary(call: Call) -> bool:
    """Whether kernels may divide by the scale, and multiply by it and by a cap before they compare."""
    cap = call.score.cap if isinstance(call.score, scores.Softcap) else 1.0
    return LEAST_SCALE < call.scale < LARGEST_SCALE and cap < LARGEST_SCALE


def without_shortcuts(score: DeviceScore) -> DeviceScore:
    """The same for kernels that would take short cuts with it: that a row's largest product is its largest score, that
    a score is linear, or that a factor comes last."""
    no, yes = FLAGS[False], FLAGS[True]
    return score._replace(
        identity=no, parts=_SAME.parts, core=score.apply, large_scores=yes, linear=no, constant_beyond=no
    )


def unit(score: scores.Score | None) -> float:
    """How many units of `tiles.logits` a natural one has."""
    return LOG2E.value if score is None else 1.0


def weight(call: Call, score: DeviceScore) -> str:
    """What the Call's score function costs a kernel in this form: nothing that is not measured with it; "linear",
    one multiply-add; "traced", some arithmetic; "table", one load for every score too; "beyond", the same in few
    tiles."""
    if not isinstance(call.score, scores.Traced):
        return ""
    if source.reads_tiles(call.score.program):
        inside = call.mask is not None and (call.mask.has_lower_bound or call.mask.block_sparse)
        return "beyond" if score.constant_beyond.value and not inside else "table"
    return "linear" if score.linear.value else "traced"


def data(score: scores.Traced) -> tuple[Any, ...]:
    """What emitted functions take first: see `saccade.scores.codegen.emitter`. They read some element of each tensor
    for tiles of which no row sees anything, so an empty one, whose memory is nowhere, is one element at all indices."""
    values: list[Any] = []
    for x in score.tensors:
        strides = x.stride() if x.numel() else [0] * x.dim()
        values.append(x if x.numel() else x.new_empty(1))
        for n, stride in zip(x.shape, strides, strict=True):
            values += [runtime_int(stride), runtime_int(n)]
    for number, integral in zip(score.numbers, score.program.integral, strict=True):
        if integral and abs(number) > LONGEST:
            values.append(far_parts(number))
            continue
        # Moved, as -1 would become a 1, of which Triton makes a constant.
        values.append(runtime_int(int(number) + LONGEST) if integral else float(number))
    return tuple(values)


def form(score: scores.Traced, fast: bool = False, indices: str = "numbers", reached: bool = False) -> EmitOptions:
    """Tensors are wide that are so large that places in them, or in a contiguous one of their shape, need 64 bits; and
    integers are far that are too large for arithmetic on indices. reached: see `positions.reached`."""
    wide = (
        max(sum((n - 1) * abs(m) for n, m in zip(x.shape, x.stride(), strict=True)), x.numel()) >= NARROW_LIMIT
        for x in score.tensors
    )
    numbers = enumerate(zip(score.numbers, score.program.integral, strict=True))
    wide_integers = frozenset(i for i, (x, integral) in numbers if integral and abs(x) > LONGEST)
    units = score.units if reached else ()
    return EmitOptions(tuple(wide), fast, wide_integers, indices, units=units)


def _emitted(score: scores.Traced, key: EmitOptions) -> tuple[Any, ...]:
    """The first fields of a DeviceScore, emitted once for each program."""
    emitted = score.program.emitted
    if key not in emitted:
        values = jit(source.value_source(score.program, key))
        apply, unit_slope = values["apply"], source.unit_slope(score.program)
        linear = _NOT_LINEAR
        if text := linear_source(score.program, key):
            lines = jit(text)
            linear = *constants(True, lines["pitch"], lines["bias"]), *_NEVER_BEYOND
        elif key.tables and has_plateaus(score.program):
            lines = jit(plateau_source(score.program, key))
            linear = *constants(False, _none, lines["bias"]), *constants(True, lines["reach"])
        large_scores = not linear[0].value
        emitted[key] = *constants(apply, values["slope"], False, _no_parts, apply, large_scores, unit_slope), *linear
    return emitted[key]


def scatter(call: Call, wanted: Sequence[bool], alone: frozenset[int] = frozenset(), fast: bool = False) -> Any:
    """constexpr: what adds to gradients of captured tensors, or stores them, emitted once for each choice."""
    score: Any = call.score
    options = form(score, fast, positions.kind(call), positions.reached(call))
    key = "scatter", options, tuple(wanted), alone
    if key not in score.program.emitted:
        text = source.scatter_source(score.program, options, wanted, alone)
        score.program.emitted[key] = tl.constexpr(jit(text)["scatter"])
    return score.program.emitted[key]


def bias_scatter(score: scores.Traced, wanted: Sequence[bool], fast: bool = False) -> Any:
    """constexpr: what adds sums of ds that belong to one distance each."""
    options = form(score, fast, "positions")
    key = "biases", options, tuple(wanted)
    if key not in score.program.emitted:
        text = source.bias_scatter_source(score.program, options, wanted)
        score.program.emitted[key] = tl.constexpr(jit(text)["scatter"])
    return score.program.emitted[key]


def table_functions(score: scores.Traced, read: int, fast: bool = False) -> tuple[Any, ...]:
    """constexprs: what one of `Program.distance_reads` reads, and where, in a contiguous tensor."""
    options = form(score, fast, "positions")
    key = "table", options, read
    if key not in score.program.emitted:
        functions = jit(source.table_source(score.program, options, score.program.distance_reads[read]))
        score.program.emitted[key] = constants(functions["value"], functions["offset"])
    return score.program.emitted[key]


def jit(text: str) -> dict[str, Any]:
    """The functions of a source text. It lies in `linecache`, where Triton finds it, under a name made from its hash:
    equal sources share what is compiled, in this process and on the disk, and different ones do not."""
    name = f"saccade_score_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if name not in _sources:
        file = f"<{name}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        names = {**NAMES, "__name__": name}
        exec(compile(text, file, "exec"), names)
        _sources.setdefault(name, names)  # other threads find all of its functions, and the same ones
    return _sources[name]


_sources: dict[str, dict[str, Any]] = {}
