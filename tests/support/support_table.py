"""The README's support table, from the backends' declarations: `python -m tests.support.support_table [README.md]`."""

from __future__ import annotations

import sys
from pathlib import Path

from saccade.backends import Support, backend_module
from saccade.ops import dispatch

START, STOP = "<!-- support -->", "<!-- /support -->"

# Where the tests of a backend have passed. A backend without a line here has only been compiled.
_HOPPER = "H200 (PyTorch 2.11): every GPU test on Triton 3.6, half of them on Triton 3.9"
RAN = {
    "gluon": _HOPPER,
    "triton": f"{_HOPPER}; the interpreter, in every CI run; other GPUs compiled only",
    "cpu": "CPU, in every CI run",
    "cudnn": "H200 (PyTorch 2.11, cuDNN 9.19)",
    "reference": "CPU, in every CI run; H200",
}


def table() -> str:
    """Markdown: a column for each backend, a row for each declared property."""
    columns = [_column(name) for name in dispatch.NAMES]
    lines = ["| | " + " | ".join(f"`{name}`" for name in dispatch.NAMES) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(column[row] for column in columns) + " |" for row in columns[0]]
    return "\n".join(lines)


def updated(readme: str) -> str:
    """The README's text with an up-to-date table between the markers.

    Raises:
        ValueError: the markers are missing, or not in order.
    """
    before, start, rest = readme.partition(START)
    _, stop, after = rest.partition(STOP)
    if not (start and stop):
        raise ValueError(f"no {START} followed by {STOP}")
    return f"{before}{START}\n{table()}\n{STOP}{after}"


def _column(name: str) -> dict[str, str]:
    module = backend_module(name)
    return {
        "chosen": "by `auto`" if name in dispatch.BACKENDS else "by name only",
        "ran on": RAN.get(name, "nothing: compiled only"),
        **_declared(module.SUPPORT),
        "backward": "PyTorch's own" if name == "reference" else _backward(module.SUPPORT, module.GRADIENT),
    }


def _backward(support: Support, gradient: Support | None) -> str:
    """For which of its forwards the backend has a backward."""
    if gradient is None:
        return "another backend's"
    whole, part = _declared(support), _declared(gradient)
    narrower = [f"{row}: {part[row]}" for row in part if part[row] != whole[row]]
    return f"yes; {'; '.join(narrower)}" if narrower else "yes"


def _declared(support: Support) -> dict[str, str]:
    def flag(word: str) -> str:
        return "yes" if word in support.flags else "no"

    return {
        "devices": _words(support.devices),
        "dtypes": _words(support.dtypes),
        "head dims": _head_dims(support),
        "alignment of rows": "16 bytes" if "aligned" in support.needs else "any",
        "layouts": _words(support.layouts),
        "masks, combined by `&` and `\\|`": _words(support.masks),
        "scores": _words(support.scores),
        "sink": flag("sink"),
        "dropout": flag("dropout"),
        "deterministic gradients": flag("deterministic"),
        "largest scores": flag("max_scores"),
    }


def _head_dims(support: Support) -> str:
    if support.max_d >= 1 << 20:
        return "any"
    step = support.multiple_of
    wider = "".join(f"; {word} to {d}/{d_v}" for word, d, d_v in support.wider)
    return f"{step} to {support.max_d}" + (f", multiples of {step}" if step > 1 else "") + wider


def _words(words: tuple[str, ...]) -> str:
    return ", ".join(words) or "none"


if __name__ == "__main__":
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    page.write_text(updated(page.read_text(encoding="utf-8")), encoding="utf-8")
