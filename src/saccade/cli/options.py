"""Options that commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from saccade.ops import dispatch


def _known(name: str) -> str:
    if name not in ("auto", *dispatch.NAMES):
        raise typer.BadParameter(f"{name!r} is not one of auto, {', '.join(dispatch.NAMES)}")
    return name


Backend = Annotated[
    str, typer.Option(help="auto, or the name of a backend, which then runs the call or refuses it.", callback=_known)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
