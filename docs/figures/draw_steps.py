"""Draws what a GPU does in decoding steps, from a trace of `examples/serve_decode.py`:

    python examples/serve_decode.py --slots 64 --layers 8 --profile trace.json
    python docs/figures/draw_steps.py trace.json

The picture is `steps.svg` in docs/: the host's launches of graphs, and below them every kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

SHOWN = 3
"""Steps in the picture."""
KINDS = {
    "attention": ("paged_kernel", "merge_kernel"),
    "append_kv": ("append",),
    "products": ("gemm", "gemv", "cutlass", "nvjet", "cublas"),
    "copies": ("memcpy", "memset"),
}
"""Parts of the names of kernels."""
COLORS = {
    "attention": "#d95f02",
    "append_kv": "#7570b3",
    "products": "#1b9e77",
    "copies": "#666666",
    "others": "#a6cee3",
}


class Span(NamedTuple):
    name: str
    start: float
    """microseconds"""
    stop: float

    @property
    def kind(self) -> str:
        name = self.name.lower()
        return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "others")


class Steps(NamedTuple):
    """Launches of graphs by the host, and what the device does; both in the order of time."""

    launches: list[Span]
    kernels: list[Span]

    @staticmethod
    def of(trace: Any) -> Steps:
        """From Chrome's format, as torch.profiler writes it."""
        spans: tuple[list[Span], list[Span]] = [], []
        for event in trace["traceEvents"]:
            name, kind = str(event.get("name")), event.get("cat")
            launch = kind == "cuda_runtime" and name.startswith("cudaGraphLaunch")
            if event.get("ph") == "X" and (launch or kind in ("kernel", "gpu_memcpy", "gpu_memset")):
                spans[not launch].append(Span(name, event["ts"], event["ts"] + event["dur"]))
        return Steps(*(sorted(each, key=lambda span: span.start) for each in spans))

    def gaps(self) -> list[float]:
        """Microseconds in which the device has nothing to do, between the first and the last kernel; sorted."""
        found, end = [], self.kernels[0].stop
        for span in self.kernels[1:]:
            if span.start > end:
                found.append(span.start - end)
            end = max(end, span.stop)
        return sorted(found)

    def busy(self) -> float:
        """The part of the time in which a kernel runs."""
        whole = max(span.stop for span in self.kernels) - self.kernels[0].start
        return 1 - sum(self.gaps()) / whole

    def leads(self) -> list[float]:
        """For each launch from the third on: microseconds from its end to that of the step before it. Positive, the
        device has not waited for the host, whatever else runs there."""
        per_step = len(self.kernels) // len(self.launches)
        return [self.kernels[i * per_step - 1].stop - span.stop for i, span in enumerate(self.launches)][2:]

    def under_way(self, n: int | None = None) -> Steps:
        """Kernels after the third launch, by which time the host is ahead; as many as n steps have, and launches so
        far. A trace begins with an idle device."""
        begun = [span for span in self.kernels if span.start > self.launches[2].stop]
        kernels = begun[: None if n is None else len(self.kernels) // len(self.launches) * n]
        first = min(kernels[0].start, self.launches[-1].start)
        return Steps([span for span in self.launches if first <= span.start < kernels[-1].stop], kernels)


def draw(steps: Steps, path: Path) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    mpl.rcParams["svg.hashsalt"] = "saccade"  # the same bytes every time
    shown, per_step = steps.under_way(SHOWN), len(steps.kernels) // len(steps.launches)
    zero = min(shown.kernels[0].start, shown.launches[0].start)
    figure, ax = plt.subplots(figsize=(12, 2.6), layout="constrained")
    for row, spans in ((1, shown.launches), (0, shown.kernels)):
        for span in spans:
            color = "0.3" if row else COLORS[span.kind]
            ax.broken_barh(
                [(span.start - zero, span.stop - span.start)], (row + 0.1, 0.8), facecolors=color, linewidth=0
            )
    told = f"the GPU is busy {shown.busy():.0%} of the time, and its longest pause is {shown.gaps()[-1]:.1f} µs"
    title = f"{SHOWN} steps of {per_step} kernels: {told}"
    ax.set(yticks=(0.5, 1.5), yticklabels=("GPU", "host launches"), xlabel="microseconds", title=title)
    ax.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()],
        ncols=5,
        loc="upper right",
        fontsize=8,
    )
    ax.set_ylim(0, 2.7)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    given, *target = map(Path, sys.argv[1:])
    steps = Steps.of(json.loads(given.read_text()))
    path = target[0] if target else Path(__file__).parents[1] / "steps.svg"
    draw(steps, path)
    print(f"{len(steps.kernels)} kernels in {len(steps.launches)} steps, busy {steps.busy():.1%}, gaps of up to "
          f"{steps.under_way().gaps()[-1]:.1f} us under way: {path}")  # fmt: skip


if __name__ == "__main__":
    main()
