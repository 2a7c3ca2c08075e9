"""The application: the list of its commands, with `explain`, `bench` and `completion`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import saccade
from saccade import masks, scores
from saccade.call.spec import FLAGS, LAYOUTS, TORCH_DTYPES
from saccade.cli.check import check
from saccade.cli.console import Backend, Json
from saccade.cli.doctor import doctor, info
from saccade.cli.tune import TUNED, tune
from saccade.cli.warm import warm
from saccade.ops import dispatch
from saccade.testing.cases import MODELS


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


# `saccade bench` is the harness of a clone; an installed package says how to get one.


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


# `saccade completion` prints scripts that complete commands, options and values without starting Python.


SHELLS = ("bash", "zsh", "fish")
SPEC = (*TORCH_DTYPES, *LAYOUTS, *masks.KINDS, *scores.KINDS, *FLAGS, "d64", "d128", "d256", "group4", "cpu", "sm90")
"""Words of a Spec."""
VALUES = {
    ("check", "--cases"): tuple(map(str, MODELS)),
    ("bench", "--cases"): tuple(_harness("grids").GRIDS) if _in_a_clone() else (),
    ("bench", "--device"): ("cpu", "cuda"),
    ("tune", "--backend"): TUNED,
}


def completion(
    context: typer.Context, shell: Annotated[str, typer.Argument(help=f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}")]
) -> None:
    """Prints a script that completes commands, options and their values in a shell.

    bash: `source <(saccade completion bash)` in ~/.bashrc; zsh: the same with zsh, in ~/.zshrc, after compinit; fish:
    `saccade completion fish > ~/.config/fish/completions/saccade.fish`.
    """
    if shell not in SHELLS:
        raise typer.BadParameter(f"{shell!r} is not one of {', '.join(SHELLS)}")
    application: Any = context.find_root().command
    commands = {name: tuple(_options(command)) for name, command in sorted(application.commands.items())}
    typer.echo(_fish(commands) if shell == "fish" else _bash(commands, shell))


def _options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (word for word in (*parameter.opts, *parameter.secondary_opts) if word.startswith("--"))
    yield "--help"


def _arguments(command: str) -> tuple[str, ...]:
    return {"explain": SPEC, "warm": SPEC, "completion": SHELLS}.get(command, ())


def _values(command: str, option: str) -> tuple[str, ...]:
    any_backend = ("auto", *dispatch.NAMES) if option == "--backend" else ()
    return VALUES.get((command, option), any_backend)


def _bash(commands: dict[str, tuple[str, ...]], shell: str) -> str:
    """zsh runs functions made for bash after `bashcompinit`."""
    lines = ["autoload -Uz bashcompinit && bashcompinit"] if shell == "zsh" else []
    lines += ["_saccade() {", '  local words="" at="${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}"']
    lines += ['  if [ "$COMP_CWORD" -eq 1 ]; then', f'    words="{" ".join(commands)} --version --help"', "  else"]
    lines += ['    case "$at" in']
    for name, options in commands.items():
        for option in options:
            if values := _values(name, option):
                lines.append(f'      "{name} {option}") words="{" ".join(values)}" ;;')
    lines += [f'      "{name} "*) words="{" ".join((*o, *_arguments(name)))}" ;;' for name, o in commands.items()]
    lines += ["    esac", "  fi", '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))', "}"]
    return "\n".join([*lines, "complete -o default -F _saccade saccade"])


def _fish(commands: dict[str, tuple[str, ...]]) -> str:
    lines = ["complete -c saccade -f", f"complete -c saccade -n __fish_use_subcommand -a '{' '.join(commands)}'"]
    lines += ["complete -c saccade -n __fish_use_subcommand -l version"]
    for name, options in commands.items():
        here = f"complete -c saccade -n '__fish_seen_subcommand_from {name}'"
        if words := _arguments(name):
            lines.append(f"{here} -a '{' '.join(words)}'")
        for option in options:
            values = _values(name, option)
            lines.append(f"{here} -l {option[2:]}" + (f" -x -a '{' '.join(values)}'" if values else ""))
    return "\n".join(lines)


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
