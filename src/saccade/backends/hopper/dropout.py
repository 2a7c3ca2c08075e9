"""Dropout of tiles in registers, with a mark in the last bit of the numbers that it keeps."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.dropout import keep

AT_ONCE = gl.constexpr(32)
"""Columns whose numbers are made together: four words of Philox for every four columns of a row stay in registers."""


@gluon.jit
def apply_dropout(p, numbers, b, h, q_idx, kv_idx, MARK: gl.constexpr):
    """p [64, N] where dropout keeps it, and zeros. If MARK all of p, with a mark in the last bit of those that it
    keeps: no other register, and one tile to hand on.

    q_idx and kv_idx as `keep` takes them; the one over columns, [1, N], is a start: a multiple of 16.
    """
    N: gl.constexpr = p.shape[1]
    if N > AT_ONCE:
        left, right = p.reshape([p.shape[0], 2, N // 2]).permute([0, 2, 1]).split()
        left = apply_dropout(left, numbers, b, h, q_idx, kv_idx, MARK)
        if len(q_idx.shape) == 0:
            right = apply_dropout(right, numbers, b, h, q_idx + N // 2, kv_idx, MARK)
        else:
            right = apply_dropout(right, numbers, b, h, q_idx, kv_idx + N // 2, MARK)
        both = gl.join(left, right).permute([0, 2, 1]).reshape([p.shape[0], N])
        return gl.convert_layout(both, p.type.layout, assert_trivial=True)
    else:
        layout: gl.constexpr = p.type.layout
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        columns = gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]
        if len(q_idx.shape) == 0:
            kv = gl.convert_layout(kv_idx, rows, assert_trivial=True)[:, None]
            kept = keep(numbers, p, b, h, q_idx + columns, kv)
        else:
            q = gl.convert_layout(q_idx, rows, assert_trivial=True)[:, None]
            heads = gl.convert_layout(h, rows, assert_trivial=True)[:, None]
            kept = keep(numbers, p, b, heads, q, kv_idx + columns)
        kept = gl.convert_layout(kept, layout, assert_trivial=True)
        if MARK:
            return ((p.to(gl.int32, bitcast=True) & -2) | kept.to(gl.int32)).to(gl.float32, bitcast=True)
        else:
            return gl.where(kept, p, 0.0)


@gluon.jit
def drop_marked(p):
    """Marked numbers, or zero where they are dropped."""
    return gl.where((p.to(gl.int32, bitcast=True) & 1) != 0, p, 0.0)


@gluon.jit
def apply_slope(p, slope, MARKED: gl.constexpr):
    """p slope, and zero where p is; of MARKED p marked too."""
    if MARKED:
        bits = p.to(gl.int32, bitcast=True)
        p = apply_slope((bits & -2).to(gl.float32, bitcast=True), slope, False)
        return ((p.to(gl.int32, bitcast=True) & -2) | (bits & 1)).to(gl.float32, bitcast=True)
    else:
        return gl.where(p == 0, 0.0, p * slope)


@gluon.jit
def score_gradient(p, dp, delta, rescale):
    """ds = p (keep dp / (1 - p_drop) + delta) for marked p; delta [1, N]."""
    bits = p.to(gl.int32, bitcast=True)
    dp = gl.where((bits & 1) != 0, dp, 0.0) * rescale + delta
    return (bits & -2).to(gl.float32, bitcast=True) * dp
