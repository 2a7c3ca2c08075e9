"""The application, with the list of its commands."""

from __future__ import annotations

from typing import Annotated

import typer

import saccade
from saccade.cli.bench import add_bench
from saccade.cli.check import check
from saccade.cli.completion import completion
from saccade.cli.doctor import doctor, info
from saccade.cli.explain import explain
from saccade.cli.tune import tune
from saccade.cli.warm import warm

EXIT_CODES = "Exit codes: 0, done; 1, the answer is no, or something went wrong; 2, wrong words."

app = typer.Typer(
    name="saccade",
    help="Fused attention for PyTorch, in pure Python.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,  # a TAB would import torch: `saccade completion` prints a script that does not
    pretty_exceptions_enable=False,
)
for command in (doctor, info, explain, check, tune, warm, completion):
    app.command()(command)
add_bench(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"saccade {saccade.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Fused attention for PyTorch, in pure Python."""
