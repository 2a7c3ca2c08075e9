"""`saccade warm`: compiles the kernels of calls into a folder that can be shipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from saccade.backends import configs
from saccade.call.spec import Spec


def warm(
    specs: Annotated[list[str], typer.Argument(help='Such as "bf16 d128 dense causal sm90"; see `saccade explain`.')],
    out: Annotated[Path, typer.Option(help="The folder, to which TRITON_CACHE_DIR is set later.")] = Path(
        "saccade-kernels"
    ),
    at: Annotated[str, typer.Option(help="Where the folder will be, if not where it is made.")] = "",
    gpu: Annotated[str, typer.Option(help="The GPU, as tile tables name it; default for sm90: h200.")] = "",
    shape: Annotated[str, typer.Option(help="b, s_q and s_k of the calls; see the documentation.")] = "2,1024,1024",
    inference: Annotated[bool, typer.Option("--inference", help="Omit what calls with gradients need.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0: one per core.")] = 0,
) -> None:
    """Compiles the kernels of these specs, forward and backward, so that first calls compile nothing.

    No GPU is needed, but the Triton and the Python that will run the kernels. Then set TRITON_CACHE_DIR to the folder.
    """
    from saccade.testing import warm as warming
    from saccade.testing.offline import Died, in_processes

    parsed = [_parsed(text) for text in specs]
    lengths = _lengths(shape)
    _known_gpu(gpu, parsed)
    _writable(out)
    folder, console = str(out.resolve()), Console(stderr=True)
    for broken in warming.drop_broken(out):
        console.print(f"not whole, so that it does not count as known: {broken}", markup=False, soft_wrap=True)
    tasks = []
    for spec in parsed:
        parts = warming.PARTS[:1] if inference else warming.parts_of(spec)
        tasks += [warming.Task(spec, part, lengths, folder, gpu) for part in parts]
    table, failed = Table("spec", "part", "backend", "compiled", "known"), []
    # A fresh process for each: what stands in for a GPU cannot be undone, and Triton compiles in one thread.
    processes = min(jobs or os.cpu_count() or 1, len(tasks))
    with Progress(console=console) as progress:
        shown = progress.add_task("compile", total=len(tasks))
        for task, found in in_processes(warming.compile_task, tasks, processes, fresh=True):
            progress.advance(shown)
            made = warming.Made("none", [], [], str(found)) if isinstance(found, Died) else found
            table.add_row(str(task.spec), task.part, made.backend, *map(_counted, (made.kernels, made.known)))
            failed += [] if made.reason is None else [f"{task.spec}, {task.part}: {made.reason}"]
    if at:
        warming.move(out, at.rstrip("/"))
    Console().print(table)
    for line in failed:
        console.print(line, markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)
    console.print(f"set TRITON_CACHE_DIR={at or folder}", markup=False, soft_wrap=True)


def _parsed(text: str) -> Spec:
    from saccade.testing.offline import capability_of
    from saccade.testing.warm import TaskShape, case_of

    try:
        spec = Spec.parse(f"{text} aligned" if "aligned" not in text.split() else text)
        capability_of(spec.device)
        case_of(spec, TaskShape())
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    return spec


def _known_gpu(gpu: str, specs: Sequence[Spec]) -> None:
    """A GPU that has no table takes the formulas' tiles, as a device's own word does."""
    devices = sorted({spec.device for spec in specs})
    tables = configs.names()
    if gpu and gpu not in (*tables, *devices):
        raise typer.BadParameter(
            f"--gpu {gpu}: no tile table has this name; there are {', '.join(tables)}, and {', '.join(devices)} for a "
            "GPU that has none"
        )


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as wrong:
        reason = "a file is there" if isinstance(wrong, FileExistsError) else wrong.strerror
        raise typer.BadParameter(f"--out {out} cannot be a folder of kernels: {reason}") from None


def _lengths(text: str) -> Any:
    from saccade.testing.warm import TaskShape

    words = text.split(",")
    if len(words) != 3 or not all(word.strip().isdigit() and int(word) for word in words):
        raise typer.BadParameter(f"a shape is b,s_q,s_k, such as 2,1024,1024, got {text!r}")
    return TaskShape(*map(int, words))


def _counted(names: list[str]) -> str:
    return f"{len(names)}: {', '.join(dict.fromkeys(names))}" if names else "0"
