"""Tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_whole(console: Console, table: Table) -> None:
    """Prints a table as wide as its words are: a narrow terminal wraps the lines, and no word is cut."""
    console.width = max(
        console.width, Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    )
    console.print(table, markup=False, soft_wrap=True)
