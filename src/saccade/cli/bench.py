"""`saccade bench` is the harness of a clone, which stands beside `src`; an installed package says how to get one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import saccade

CLONE = Path(saccade.__file__).parents[2]
"""The root of a clone, if this package lies in one."""
MISSING = (
    "saccade bench runs the harness of a clone of saccade's repository, and this package is not in one: clone the "
    "repository, run `pip install -e '.[bench,cli]'` in it, then this command"
)


def add_bench(app: typer.Typer) -> None:
    """The harness's command, or one that answers any words by where the harness is."""
    if _in_a_clone():
        app.command()(_harness("cli").bench)
    else:
        app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)


def grid_names() -> tuple[str, ...]:
    """What `--cases` takes, for completion."""
    return tuple(_harness("grids").GRIDS) if _in_a_clone() else ()


def bench() -> None:
    """Times attention beside other libraries, in a clone of the repository: an installed package has no harness."""
    typer.echo(MISSING, err=True)
    raise typer.Exit(2)


def _in_a_clone() -> bool:
    return (CLONE / "benchmarks" / "harness" / "cli.py").is_file()


def _harness(module: str) -> Any:
    if str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))
    return import_module(f"benchmarks.harness.{module}")
