"""`saccade explain`: the backend of a call, and the reasons against the others."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import saccade
from saccade.cli.console import Backend, Json


def explain(
    spec: Annotated[list[str], typer.Argument(help="The words of a Spec: bf16 group4 d128 causal cpu")],
    backend: Backend = "auto",
    as_json: Json = False,
) -> None:
    """Prints which backend runs a call, and one line for each that does not, with the reason.

    The words, in any order: a dtype, groupN (query heads per key head), dN or dN/M (head dims), a layout, a mask, a
    score, flags, a device. All but the dtype and the head dim have defaults. The device may be another machine's:
    "bf16 d128 causal aligned sm90". The exit code is 1 if no backend runs it.
    """
    try:
        explanation = saccade.explain(" ".join(spec), backend=backend)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    typer.echo(json.dumps(explanation.as_dict()) if as_json else str(explanation))
    raise typer.Exit(0 if explanation.backend else 1)
