"""The application, with the list of its commands."""

from __future__ import annotations

import typer

from saccade.bench.cli import bench
from saccade.cli.check import check
from saccade.cli.explain import explain
from saccade.cli.info import info
from saccade.cli.tune import tune

app = typer.Typer(
    name="saccade",
    help="Fused attention for PyTorch, in pure Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (info, check, explain, bench, tune):
    app.command()(command)
