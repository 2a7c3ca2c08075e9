"""The sources of a Program's Triton functions."""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from torch import fx

from saccade.scores.codegen.assembly import Read
from saccade.scores.codegen.emitter import EmitOptions, Emitter
from saccade.scores.codegen.program import Program, by_distance
from saccade.scores.tracing.lowering import K, Q, outputs_of

PARAMETERS = "data, score, b, h, q_idx, kv_idx"


def value_source(program: Program, options: EmitOptions) -> str:
    """`apply` and `slope`."""
    apply = _returning(Emitter(program, options), "apply", program.value_decomposed, False)
    return f"{apply}\n\n{_returning(Emitter(program, options), 'slope', program.slope, True)}"


def sees_source(program: Program, options: EmitOptions) -> str:
    """`sees`, of a predicate: a bool that broadcasts to the tile."""
    emitter = Emitter(program, options)
    (out,) = outputs_of(program.value_decomposed.graph)
    if not isinstance(out, fx.Node):
        text = "q_idx >= 0" if out else "q_idx < 0"
    else:
        value = emitter.value(out)
        text = emitter.bool(value) if value.shape else f"(q_idx >= 0) & {emitter.bool(value)}"
    return emitter.function("sees", "data, b, h, q_idx, kv_idx, off", f"return {text}")


def table_source(program: Program, options: EmitOptions, read: Read) -> str:
    """`value(data, score, …)`: what one read by distance reads; and `offset`: where, in a contiguous tensor."""
    emitter = Emitter(program, options)
    offset = emitter.offset(read.tensor, read.at) or "kv_idx * 0"
    emitter.used["tensor"] = f"data[{emitter.start(read.tensor)}]"
    value = emitter.function("value", PARAMETERS, f"return tl.load(tensor + {offset}).to(tl.float32)")
    return f"{value}\n\n{_offset_source(program, options, read, 'offset')}"


def bias_scatter_source(program: Program, options: EmitOptions, wanted: Sequence[bool]) -> str:
    """`scatter(ADD, sums, data, ds, b, h, distance)`: the same as `scatter`, of scores that are sums of reads by
    distance, for values ds that belong to one distance each."""
    module, reads = program.locals(wanted)
    emitter = Emitter(program, options)
    order = [i for i, want in enumerate(wanted) if want]
    functions = []
    for n, (read, (local, at)) in enumerate(zip(reads, outputs_of(module.graph), strict=True)):
        functions.append(_offset_source(program, options, replace(read, at=at), f"offset{n}"))
        offset = f"offset{n}(data, ds, b, h, distance * 0, distance)"
        value = emitter.float(emitter.value(local))
        emitter.lines.append(f"ADD(sums[{order.index(read.tensor)}], {offset}, ds * {value})")
    scatter = emitter.function("scatter", "ADD: tl.constexpr, sums, data, ds, b, h, distance", "pass")
    return "\n\n".join([*functions, scatter])


def _offset_source(program: Program, options: EmitOptions, read: Read, name: str) -> str:
    """`offset(data, score, …)`: where a read by distance reads, in a contiguous tensor, for each of kv_idx."""
    emitter = Emitter(program, options)
    text = emitter.offset(read.tensor, read.at, contiguous=True) or "0"
    each = "" if emitter.offset_shape(read.at) == (Q, K) else " + kv_idx * 0"
    return emitter.function(name, PARAMETERS, f"return {text}{each}")


def reads_tiles(program: Program) -> bool:
    """Whether some captured tensor is read for every score."""
    return any(tuple(read.meta["val"].shape) == (Q, K) for read in program.reads)


def unit_slope(program: Program) -> bool:
    """Whether the slope is 1 everywhere."""
    return outputs_of(program.slope.graph)[0] in (1, 1.0)


def _returning(emitter: Emitter, name: str, module: fx.GraphModule, scalar: bool) -> str:
    (out,) = outputs_of(module.graph)
    value = emitter.value(out)
    text = emitter.float(value)
    if value.shape != (Q, K) and not (scalar and value.shape == ()):  # the same for some scores, but one for each
        text = f"tl.where(score == score, {text}, {text})"
    return emitter.function(name, PARAMETERS, f"return {text}")


def scatter_source(program: Program, options: EmitOptions, wanted: Sequence[bool], alone: Container[int] = ()) -> str:
    """`scatter(ADD, sums, data, ds, score, …)`: adds ds · d modified / d tensor to the sums of tensors, each
    contiguous, by `ADD(sum, offset, value)`. Rows of a tile are queries, columns keys; ds is 0 where nothing is
    visible. alone: tensors of which every score has an element of its own, which is stored."""
    module, reads = program.locals(wanted)
    emitter = Emitter(program, options)
    order = [i for i, want in enumerate(wanted) if want]
    functions = []
    for n, (read, (local, at)) in enumerate(zip(reads, outputs_of(module.graph), strict=True)):
        target = f"sums[{order.index(read.tensor)}]"
        value = emitter.float(emitter.value(local))
        emitter.lines.append(f"g{n} = tl.where(ds == 0, 0.0, ds * {value})")
        if read.tensor in alone:
            offset = f"{target} + ({emitter.offset(read.tensor, at, contiguous=True, alone=True)})"
            inside = emitter.inside(read.tensor, at, "q_idx", "kv_idx")
            emitter.lines.append(f"tl.store({offset}, g{n}.to({target}.dtype.element_ty), mask={inside})")
            continue
        shape = emitter.offset_shape(at)
        if shape == (Q, K) and options.indices != "rows" and by_distance(at):
            functions.append(_offset_source(program, options, replace(read, at=at), f"offset{n}"))
            emitter.lines.append("near, far = distances(q_idx, kv_idx)")
            ways = (f"offset{n}(data, score, b, h, {part} * 0, {part})" for part in ("near", "far"))
            emitter.lines.append(f"add_diagonals(ADD, {target}, {', '.join(ways)}, g{n})")
            continue
        text = emitter.offset(read.tensor, at, contiguous=True) or "0"
        total = {
            (Q, K): f"g{n}",
            (Q, 1): f"tl.sum(g{n}, 1, keep_dims=True)",
            (1, K): f"tl.sum(g{n}, 0, keep_dims=True)",
            (1, 1): f"tl.sum(g{n})",
        }[shape]
        emitter.lines.append(f"ADD({target}, {text}, {total})")
    parameters = PARAMETERS.replace("data, ", "data, ds, ")
    scatter = emitter.function("scatter", f"ADD: tl.constexpr, sums, {parameters}", "pass")
    return "\n\n".join([*functions, scatter])
