"""What becomes of a tile of products in the forward: score functions, masks, dropout."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.pointwise import index_float
from saccade.backends.device.tiles import visible
from saccade.backends.gluon.dropout import apply_dropout
from saccade.backends.gluon.ptx import opaque
from saccade.backends.gluon.tiles import between


@gluon.jit
def columns(s):
    """[1, BLOCK_K]: the number of each column as float32, an addition of a constant to what a thread has of its own."""
    N: gl.constexpr = s.shape[1]
    # [64, BLOCK_K / 8, 8]: the second index is a register's, the third and a half of it a thread's.
    parts: gl.constexpr = s.reshape([64, N // 8, 8]).type.layout
    eights = gl.arange(0, N // 8, gl.SliceLayout(0, gl.SliceLayout(2, parts))) * 8
    rest = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, parts)))
    # [1, BLOCK_K / 8, 8]
    made = eights.to(gl.float32)[None, :, None] + rest.to(gl.float32)[None, None, :]
    return gl.convert_layout(made.reshape([1, N]), s.type.layout, assert_trivial=True)


@gluon.jit
def row_terms(score, scale, b, h, q_idx, off):
    """Of a score that is linear in the key's index: [64] the pitch, in units of the products, a key, and what is added
    to every product, natural, if keys are counted from that one. Else nothing that is used."""
    if score.linear:
        key = q_idx + off
        zero = q_idx.to(gl.float32) * 0
        pitch = zero + score.pitch(score.data, b, h, q_idx, key)
        level = zero + score.level(score.data, b, h, q_idx, key)
        return pitch / scale, key, level
    else:
        return 0, 0, 0


@gluon.jit
def modified(s, tile, score, terms, inside, b, h, q_idx):
    """The core of the score modification, of a tile of products [64, BLOCK_K]; what nothing modifies stays as it is. Of
    a linear score's core a number for each row is missing: see `risen`."""
    if score.identity:
        return s
    elif score.linear:
        return gl.fma(gl.broadcast(terms[0][:, None], s)[0], gl.broadcast(columns(s), s)[0], s)
    else:
        kv_idx = tile * s.shape[1] + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
        return score.core(score.data, s * inside, b, h[:, None], q_idx[:, None], kv_idx)


@gluon.jit
def risen(row, tile, score, terms, SIGN: gl.constexpr, BLOCK_K: gl.constexpr):
    """row [64] plus or minus what `modified` leaves out of each score of a tile, but for what all of the row share."""
    if score.linear:
        return row + SIGN * (terms[0] * index_float(tile * BLOCK_K - terms[1]))
    else:
        return row


@gluon.jit
def weighed(s, row_max, tile, score, terms, factor):
    """exp(s - row_max), [64, BLOCK_K], of scores as `modified` leaves them; factor: their units, in those of log2."""
    if score.vast:  # the difference first: see `tiles.power`
        return gl.exp2((s - row_max[:, None]) * factor)
    else:
        return gl.exp2(s * factor - (risen(row_max, tile, score, terms, -1, s.shape[1]) * factor)[:, None])


@gluon.jit
def hidden(s, tile, LOWER: gl.constexpr, mask, b, h, q_idx, rows, keys):
    """The scores [64, BLOCK_K] of a tile of keys after the mask, whose lower bound counts only if LOWER."""
    start = tile * s.shape[1]
    if mask.exact:
        lo, hi, _, _ = mask.keys_of(mask.data, b, q_idx, keys - rows)
        return between(s, lo - start, gl.minimum(hi, keys) - start, LOWER, True)
    else:
        if mask.unlisted:
            start = opaque(start)
        kv_idx = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
        return gl.where(visible(mask, b, h[:, None], q_idx[:, None], kv_idx, rows, keys, keys - rows), s, float("-inf"))


@gluon.jit
def thinned(weights, tile, dropout, b, h, q_idx):
    """The weights [64, BLOCK_K] of a tile of keys that dropout keeps, and zeros."""
    if dropout is None:
        return weights
    else:
        return apply_dropout(weights, dropout, b, h, q_idx, tile * weights.shape[1], False)
