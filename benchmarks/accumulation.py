"""Hopper's 8-bit wgmma: what its own accumulator loses. D = A B^T with A = P in e4m3 or e5m2 and B = V, many keys in a
chain, promoted into float32 registers every so many keys, against float64.

    python -m benchmarks.accumulation     on an H200: about 20 s, a table
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def chain(a_ptr, b_ptr, out, keys, STEPS: gl.constexpr):
    """out (M, 64) = a (M, keys) b (64, keys)^T: chains of STEPS instructions of 32 keys, added up in float32 registers;
    STEPS = 0: one chain. Operands are (…, keys) bytes."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    SA: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], a_ptr.dtype.element_ty)
    SB: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], b_ptr.dtype.element_ty)
    a_tile = gl.allocate_shared_memory(a_ptr.dtype.element_ty, [64, 32], SA)
    b_tile = gl.allocate_shared_memory(b_ptr.dtype.element_ty, [64, 32], SB)
    row = gl.arange(0, 64, gl.SliceLayout(1, L))
    column = gl.arange(0, 32, gl.SliceLayout(0, L))
    at = row[:, None] * keys + column[None, :]
    a_ptr += gl.program_id(0) * 64 * keys
    total = gl.zeros([64, 64], gl.float32, ACC)
    if STEPS == 0:
        for start in range(0, keys, 32):
            a_tile.store(gl.load(a_ptr + at + start))
            b_tile.store(gl.load(b_ptr + at + start))
            gl.thread_barrier()
            fence_async_shared()
            total = warpgroup_mma(a_tile, b_tile.permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            gl.thread_barrier()
    else:
        for start in range(0, keys, 32 * STEPS):
            part = gl.zeros([64, 64], gl.float32, ACC)
            for i in range(STEPS):
                a_tile.store(gl.load(a_ptr + at + start + 32 * i))
                b_tile.store(gl.load(b_ptr + at + start + 32 * i))
                gl.thread_barrier()
                fence_async_shared()
                part = warpgroup_mma(a_tile, b_tile.permute((1, 0)), part, is_async=True)
                part = warpgroup_mma_wait(0, deps=[part])
                gl.thread_barrier()
            total += part
    rows = gl.arange(0, 64, gl.SliceLayout(1, ACC))[:, None] + gl.program_id(0) * 64
    gl.store(out + rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, ACC))[None, :], total)


def operands(kind, keys, a_type, b_type, v):
    g = torch.Generator("cuda").manual_seed(keys)
    p = torch.rand(128, keys, device="cuda", generator=g)
    if kind == "normal":  # softmax of scores N(0, 1), whose largest stays the largest
        p = torch.randn(128, keys, device="cuda", generator=g).sub_(4).exp_().clamp_(max=1)
    if kind == "one":
        p = torch.full_like(p, 1.0)
    if kind == "0.7":
        p = torch.full_like(p, 0.7)
    p = (p * 256).to(a_type)
    w = torch.ones(64, keys, device="cuda")
    if v == "1+noise":
        w += 0.25 * torch.randn(64, keys, device="cuda", generator=g)
    if v == "noise":
        w = torch.randn(64, keys, device="cuda", generator=g)
    return p, w.to(b_type)


def main():
    print(torch.cuda.get_device_name(), torch.__version__)
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    every = (0, 1, 2, 4, 8, 16)
    head = "".join(f"{'chain' if s == 0 else 32 * s:>20}" for s in every)
    print(
        "mean of the relative error (bias) / largest relative error (of the rms of exact), by keys between promotions"
    )
    print(f"{'A x B':>10} {'p':>8} {'v':>8} {'keys':>6}{head}")
    for a_type, b_type in ((e4, e4), (e4, e5), (e5, e5)):
        for kind, v in (
            ("uniform", "1"),
            ("normal", "1"),
            ("one", "1"),
            ("0.7", "1"),
            ("uniform", "1+noise"),
            ("normal", "noise"),
        ):
            if a_type == e5 and kind in ("0.7", "one"):
                continue
            for keys in (32, 64, 128, 256, 512, 2048, 8192, 65536) if (a_type, b_type) == (e4, e4) else (128, 8192):
                p, w = operands(kind, keys, a_type, b_type, v)
                exact = p.double() @ w.double().T
                size = exact.square().mean().sqrt()
                cells = []
                for steps in every:
                    if keys % max(32, 32 * steps):
                        cells.append("-")
                        continue
                    out = torch.empty(128, 64, device="cuda")
                    chain[(2,)](p, w, out, keys, steps, num_warps=4)
                    e = (out.double() - exact) / size
                    cells.append(f"{(e * exact.sign()).mean().item():+.2e}/{e.abs().max().item():.1e}")
                name = {e4: "e4m3", e5: "e5m2"}
                print(
                    f"{name[a_type]}x{name[b_type]} {kind:>8} {v:>8} {keys:>6}" + "".join(f"{c:>20}" for c in cells),
                    flush=True,
                )


if __name__ == "__main__":
    main()
