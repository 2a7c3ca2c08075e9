"""Words that come from a terminal, and tables that go there."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def split_names(names: str) -> list[str]:
    """
    >>> listed("host, decode,")
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
