"""The form in which a call passes through a registered operator, and the way back.

`flatten` makes nine arguments of a Call: the operands as the user has them, the tensors that may need gradients, all
other tensors, one text that says what they are, and the runtime numbers. `unflatten` is its inverse. The tensors are
those of layout, mask, descale, the floats where torch.compile computes them, and dropout's state: the last three leave
the list at its end, the others at its front. Integers and floats are those of layout, mask and score.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from saccade import layouts, masks, scores
from saccade.call.call import Call
from saccade.call.descale import EIGHT_BITS, Factors
from saccade.call.dropout import Dropout
from saccade.util import arguments
from saccade.util.caches import exports

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] captures, Tensor[] tensors, str header, SymInt[] ints, "
    "float[] floats"
)
"""These arguments in an operator's schema. captures: the tensors of the score function, which may need gradients.
floats: the scale, dropout's p, and those of mask and score."""
Flat = Sequence[Any]
Static = tuple[int, str, Sequence[int], Sequence[float]]


def flatten(call: Call, backend: str) -> Flat:
    """The arguments of an operator for this call; `out` is not one of them."""
    layout, mask, score, descale, dropout = call.layout, call.mask, call.score, call.descale, call.dropout
    tensors, ints, floats = [*layout.tensors], [*layout.ints], []
    mask_name = score_name = "none"
    compiling = torch.compiler.is_compiling()
    if mask is not None:
        mask_name = mask.identity
        if compiling:
            masks.pin(mask_name)
        tensors += mask.tensors
        ints += mask.ints
        floats += mask.floats
    if descale is not None:
        tensors += descale.tensors
    if score is not None:
        score_name = score.identity
        ints += score.ints
        floats += score.floats
    words = [layout.text, mask_name, score_name, backend, "-" if descale is None else descale.names]
    carried = compiling and exports()
    words.append(scores.written_programs((*masks.program_names(mask_name), score_name)) if carried else "-")
    if descale is not None and descale.backward:
        words.append("dequantized")
    if call.deterministic:
        words.append("deterministic")
    if call.max_scores:
        words.append("max_scores")
    if dropout is not None:
        words.append("dropout")
    if compiling and _is_any_symbolic(floats):
        # An operator's floats would be constants.
        one = torch.ones((), dtype=torch.float64, device="cpu")
        tensors, floats = [*tensors, torch.stack([one * x for x in floats])], []
        words.append("numbers")
    if dropout is not None:
        tensors.append(dropout.state)
        floats = [dropout.p, *floats]
    captures = () if score is None else score.tensors
    return *call.given[:3], call.sink, captures, tensors, " ".join(words), ints, [call.scale, *floats]


def unflatten(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, captures: Sequence[Tensor], tensors: Sequence[Tensor],
    header: str, ints: Sequence[int], floats: Sequence[float], out: Tensor | None = None,
) -> tuple[Call, str]:  # fmt: skip
    """The call of these arguments, and the name of its backend. out: where its result is to be, in the user's order."""
    layout_text, mask_name, score_name, backend, factors, flags = read_header(header)
    tensors, ints, (scale, *floats) = [*tensors], [*ints], floats
    dropout = Dropout(tensors.pop(), floats.pop(0)) if "dropout" in flags else None
    if "numbers" in flags:
        numbers = tensors.pop()
        # Whose values say nothing about shapes.
        floats = [0.0] * len(numbers) if arguments.of_torch("FakeTensor", numbers) else numbers.tolist()
    descale = None
    if k.dtype in EIGHT_BITS:
        descale = Factors.from_tensors(factors, tensors)._replace(backward="dequantized" in flags)
    layout = layouts.from_tensors(layout_text, tensors, ints, q.shape[0], k.shape[0])
    mask = masks.from_tensors(mask_name, ints, tensors, floats)
    score = scores.from_tensors(score_name, captures, ints, floats)
    call = Call(
        q, k, v, layout=layout, mask=mask, score=score, sink=sink, scale=scale, dropout=dropout, descale=descale,
        out=out, deterministic="deterministic" in flags, max_scores="max_scores" in flags,
    )  # fmt: skip
    return call, backend


def outline(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *others: Any) -> Call:
    """The call without mask, score and numbers, and with a layout for its views alone: what the shapes of results
    depend on. A Call of symbolic numbers would fix them."""
    layout, *_, flags = read_header(others[2])
    return Call(q, k, v, layout=layouts.view_layout(layout), sink=sink, max_scores="max_scores" in flags)


@lru_cache(maxsize=512)
def read_header(header: str) -> tuple[str, str, str, str, str, frozenset[str]]:
    """The layout's text, the identities of mask and score, the backend, the names of descale's factors, and flags."""
    layout, mask, score, backend, factors, carried, *flags = header.split(" ")
    scores.read_programs(carried)
    return layout, mask, score, backend, factors, frozenset(flags)


def operator(name: str, flat: Flat) -> Any:
    """The registered operator for a call of these arguments, which others may follow. A CUDA graph would replay the
    numbers that the host had when it was captured: the overload `numbers` is for calls that torch.compile leaves out
    of its graphs."""
    header, overloads = flat[6], getattr(torch.ops.saccade, name)
    return overloads.numbers if header.endswith(" numbers") else overloads.default


def programs(static: Static) -> list[Any]:
    """The objects besides tensors that a backward keeps alive."""
    _, header, *_ = static
    _, mask, score, *_ = read_header(header)
    own = [] if score == "none" else [scores.program_of(score)]
    return [*own, *masks.programs(mask)] if "[" in mask else own


def split(flat: Flat) -> tuple[list[Tensor | None], Static]:
    """All tensors of these arguments in one list, as autograd wants them, and the rest: for `joined`."""
    q, k, v, sink, captures, tensors, *static = flat
    return [q, k, v, sink, *captures, *tensors], (len(captures), *static)


def joined(tensors: Sequence[Tensor | None], static: Static) -> Flat:
    """The inverse of `split`."""
    captures, *rest = static
    return *tensors[:4], tensors[4 : 4 + captures], tensors[4 + captures :], *rest


def savable(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors beside q, k and v as autograd may save them for a backward. Of those made in inference mode, whose writes
    torch does not count, these are copies of what they hold at the call."""
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


def _is_any_symbolic(floats: Sequence[float]) -> bool:
    """Whether torch.compile computes one of them, rather than to know it."""
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports sympy

    return not all(has_static_value(x) for x in floats)
