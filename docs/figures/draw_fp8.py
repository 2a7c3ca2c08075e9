"""What 8 bits lose, on a CPU in float64: docs/fp8-light.svg and docs/fp8-dark.svg, from rows.

python docs/figures/draw_fp8.py
python docs/figures/draw_fp8.py measure  # makes benchmarks/tables/cpu/fp8-errors.jsonl anew before, and prints a table
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from themes import STYLES, save, styled
from torch import Tensor

from saccade import attention, quantize
from saccade.call.descale import factors

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "tables" / "cpu" / "fp8-errors.jsonl"
H, S, D = 2, 4096, 128
MADE = {
    "plain": {},
    "rotated": {"rotate": True},
    "smoothed": {"smooth_k": True},
    "both": {"rotate": True, "smooth_k": True},
}


def normal() -> list[Tensor]:
    return [torch.randn(1, H, S, D) for _ in range(3)]


def outliers() -> list[Tensor]:
    """N(0, 1) + N(0, 100) for one number of a thousand."""
    return [x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001) for x in normal()]


def outlier_keys() -> list[Tensor]:
    """The same, and every channel of k has a mean of its own, N(0, 36)."""
    q, k, v = outliers()
    return [q, k + 6 * torch.randn(1, H, 1, D), v]


DATA = {"normal": normal, "outliers": outliers, "outliers, keys with means": outlier_keys}


def errors() -> Iterator[dict[str, object]]:
    """Root mean square of the errors of out over that of out, against float64 of the unquantized operands. Products and
    probabilities are float64, so that the operands' bytes alone lose."""
    for name, make in DATA.items():
        torch.manual_seed(0)
        q, k, v = make()
        exact = attention(q.double(), k.double(), v.double(), return_lse=True)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            for per in ("tensor", "head", "block"):
                for made, options in MADE.items():
                    found = quantize(q, k, v, per=per, dtype=dtype, **options)
                    shape = 1, H, S, S
                    known = factors(found.descale, q.device, True, shape)
                    values = [known.values(x, y, torch.float64) for x, y in zip("qkv", found[:3], strict=True)]
                    out, lse = attention(*values, return_lse=True)
                    lse = lse if found.shift is None else lse + found.shift / D**0.5
                    yield {
                        "data": name, "dtype": str(dtype).removeprefix("torch."), "per": per, "made": made,
                        "out": rms(out - exact.out) / rms(exact.out), "lse": rms(lse - exact.lse),
                        "h": H, "s": S, "d": D, "torch": torch.__version__,
                    }  # fmt: skip


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def draw(rows: list[dict[str, object]], theme: str) -> None:
    styled(theme)
    figure, axes = plt.subplots(1, len(DATA), figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, name in zip(axes, DATA, strict=True):
        for i, made in enumerate(MADE):
            own = [r for r in rows if (r["data"], r["dtype"], r["made"]) == (name, "float8_e4m3fn", made)]
            axis.bar([x + 0.2 * (i - 1.5) for x in range(3)], [r["out"] for r in own], 0.2, label=made)
        axis.set_xticks(range(3), ["tensor", "head", "block"])
        axis.set_title(name)
    axes[0].set_ylabel("error of out, relative")
    axes[0].legend(fontsize=8)
    save(figure, "fp8", theme)


def measure() -> None:
    rows = list(errors())
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for data in DATA:
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            for per in ("tensor", "head", "block"):
                own = [r for r in rows if (r["data"], r["dtype"], r["per"]) == (data, dtype, per)]
                print(f"| {data} | {dtype} | {per} | " + " | ".join(f"{r['out']:.4f}" for r in own) + " |")
        own = [r for r in rows if (r["data"], r["dtype"], r["per"]) == (data, "float8_e4m3fn", "block")]
        print("lse, block:", [f"{r['lse']:.4f}" for r in own])


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    for theme in STYLES:
        draw([json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()], theme)
