"""The tensors of a Case as benchmarks need them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.call.spec import TORCH_DTYPES
from saccade.layouts import Dense, Paged
from saccade.testing import paged
from saccade.testing.cases import Case, Inputs

SHORTEST = 100
"""Keys of the shortest sequence where the lengths of a paged cache are mixed."""


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """The Case's tensors; its sink rounded to bfloat16, since some peers take nothing finer."""
    if case.order == "paged":
        return paged_inputs(case, device)
    inputs = projected(case, device) if case.order == "bshd" and case.used == "all" else case.inputs(device)
    if "sink" not in inputs.keywords:
        return inputs
    sink = inputs.keywords["sink"].detach()
    return replace(inputs, keywords=inputs.keywords | {"sink": sink.bfloat16().to(sink.dtype)})


def projected(case: Case, device: torch.device) -> Inputs:
    """q, k and v (b, s, h, d) as views of what one projection makes of a row, as models have them: of a text's keys
    their own, as its rows are others. Drawn on the device."""
    generator, on_device = torch.Generator().manual_seed(0), torch.Generator(device).manual_seed(0)

    def rows(s: int, *operands: tuple[int, int]) -> list[Tensor]:
        """So many heads of so many columns each."""
        widths = [h * d for h, d in operands]
        x = torch.empty(case.b, s, sum(widths), device=device, dtype=TORCH_DTYPES[case.dtype])
        parts = x.normal_(generator=on_device).split(widths, 2)
        return [part.unflatten(2, operand) for part, operand in zip(parts, operands, strict=True)]

    q, k, v = (case.h_q, case.d), (case.h_k, case.d), (case.h_k, case.d_v)
    given = rows(case.s_q, q, k, v) if case.s_q == case.s_k else [*rows(case.s_q, q), *rows(case.s_k, k, v)]
    (dout,) = rows(case.s_q, (case.h_q, case.d_v))
    sink = torch.randn(case.h_q, generator=generator)
    return Inputs(
        given[0], given[1], given[2], dout, dout.new_empty(0), case.keywords(generator, device, Dense(case.order), sink)
    )


def shared_pages(case: Case) -> int:
    """How many pages all sequences begin with: `used="shared8192"` has 8192 keys in common."""
    return int(case.used.removeprefix("shared")) // case.page_size if case.used.startswith("shared") else 0


def paged_inputs(case: Case, device: torch.device) -> Inputs:
    """A cache as large as a server's, drawn on the device: every page is in use, in any order."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(min(SHORTEST, case.s_k), case.s_k + 1, (case.b,), generator=generator)
    lengths = mixed if "k" in case.used else torch.full((case.b,), case.s_k)
    pages = -(-lengths // case.page_size)
    mapped = torch.arange(int(pages.max())) < pages[:, None]
    table = torch.zeros(mapped.shape, dtype=torch.int32)
    table[mapped] = torch.randperm(int(pages.sum()), generator=generator, dtype=torch.int32)
    table[:, : shared_pages(case)] = table[:1, : shared_pages(case)]

    def normal(x: Tensor) -> Tensor:
        return (
            x.copy_(torch.randn(x.shape, device=device, dtype=torch.bfloat16)) if x.element_size() == 1 else x.normal_()
        )

    q = normal(torch.empty(case.b, case.s_q, case.h_q, case.d, device=device, dtype=TORCH_DTYPES[case.dtype]))
    rows = int(pages.sum()), case.page_size, case.h_k
    k, v = (normal(x) for x in paged.empty(case.cache, rows, case.d, case.d_v, q))
    layout = Paged(table.to(device), lengths.int().to(device))
    gradients = q.new_empty(0)  # a cache has none
    return Inputs(q, k, v, gradients, gradients, case.keywords(generator, device, layout))
