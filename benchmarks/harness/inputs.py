"""The tensors of a Case as benchmarks need them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.call.spec import TORCH_DTYPES
from saccade.layouts import Paged
from saccade.testing import paged
from saccade.testing.cases import Case, Inputs

SHORTEST = 100
"""Keys of the shortest sequence where the lengths of a paged cache are mixed."""


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """The Case's tensors; its sink rounded to bfloat16, since some peers take nothing finer."""
    if case.order == "paged":
        return paged_inputs(case, device)
    inputs = case.inputs(device)
    if case.order == "bshd" and case.used == "all":
        inputs = projected(inputs)
    if "sink" not in inputs.keywords:
        return inputs
    sink = inputs.keywords["sink"].detach()
    return replace(inputs, keywords=inputs.keywords | {"sink": sink.bfloat16().to(sink.dtype)})


def projected(inputs: Inputs) -> Inputs:
    """q, k and v (b, s, h, d) as views of what one projection makes of a row, as models have them: of a text's keys
    their own, as its rows are others."""
    names = ("q", "k", "v") if inputs.q.shape[1] == inputs.k.shape[1] else ("k", "v")
    given = {name: getattr(inputs, name) for name in names}
    widths = [x.shape[2] * x.shape[3] for x in given.values()]
    rows = torch.cat([x.flatten(2) for x in given.values()], 2).split(widths, 2)
    made = zip(given.items(), rows, strict=True)
    return replace(inputs, **{name: x.unflatten(2, old.shape[2:]) for (name, old), x in made})


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
