"""`saccade completion`: scripts that complete commands, options and their values, without starting Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from saccade import masks, scores
from saccade.call.spec import FLAGS, LAYOUTS, TORCH_DTYPES
from saccade.cli.bench import grid_names
from saccade.cli.tune import TUNED
from saccade.ops import dispatch
from saccade.testing.cases import MODELS

SHELLS = ("bash", "zsh", "fish")
SPEC = (*TORCH_DTYPES, *LAYOUTS, *masks.KINDS, *scores.KINDS, *FLAGS, "d64", "d128", "d256", "group4", "cpu", "sm90")
"""Words of a Spec."""
VALUES = {
    ("check", "--cases"): tuple(map(str, MODELS)),
    ("bench", "--cases"): grid_names(),
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
