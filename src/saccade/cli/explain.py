"""`saccade explain`: why this backend, why not the others."""

from __future__ import annotations

from typing import Annotated

import typer

import saccade
from saccade.cli.options import Backend


def explain(
    spec: Annotated[list[str], typer.Argument(help="A Spec's text: bf16 group4 d128 causal cpu")],
    backend: Backend = "auto",
) -> None:
    """Which backend runs a call, and one line of reason for each that does not.

    The words, in any order: a dtype, groupN (query heads per key head), dN or dN/M (head dims), a layout, a mask, a
    score, flags, a device. All but the dtype and the head dim have defaults. Exit code 1 when no backend runs it.
    """
    try:
        found = saccade.explain(" ".join(spec), backend=backend)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    typer.echo(str(found))
    raise typer.Exit(0 if found.backend else 1)
