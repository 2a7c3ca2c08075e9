"""Words that come from a terminal, and tables that go there."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from saccade.ops import dispatch


def split_names(names: str) -> list[str]:
    """
    >>> split_names("host, decode,")
    ['host', 'decode']
    """
    return [name.strip() for name in names.split(",") if name.strip()]


def some_name(names: str | None) -> str | None:
    """An option's words, which name something where they are given."""
    if names is not None and not split_names(names):
        raise typer.BadParameter(f"{names!r} names nothing; without the option a default is taken")
    return names


def print_whole(console: Console, table: Table) -> None:
    """Prints a table as wide as its words are: a narrow terminal wraps the lines, and no word is cut."""
    console.width = max(
        console.width, Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    )
    console.print(table, markup=False, soft_wrap=True)


# Options that commands share.


def _known(name: str) -> str:
    if name not in ("auto", *dispatch.NAMES):
        raise typer.BadParameter(f"{name!r} is not one of auto, {', '.join(dispatch.NAMES)}")
    return name


Backend = Annotated[
    str, typer.Option(help="auto, or the name of a backend, which then runs the call or refuses it.", callback=_known)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
