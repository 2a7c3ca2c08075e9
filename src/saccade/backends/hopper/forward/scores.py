"""From products to weights in the forward: score functions, masks, softmax, dropout."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.descale import factor_at
from saccade.backends.device.dropout import opened
from saccade.backends.device.pointwise import index_float
from saccade.backends.device.records import LOG2E
from saccade.backends.device.tiles import visible
from saccade.backends.hopper.dropout import apply_dropout
from saccade.backends.hopper.ptx import opaque
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import add_columns, between, row_maxima, subtract_rows

# A row's maximum starts here: finite, so that no difference of two is NaN.
LOWEST = gl.constexpr(-1e30)
# The lowest number, which score functions take to mask keys; no factor comes before the difference there.
LOWEST_FINITE = gl.constexpr(-3.4028234e38)


@aggregate
class ScoreRule:
    """The score function, mask, dropout and scale of a call.

    Scores keep the units of the products, or of the modification's core, up to the exponential, where a factor costs
    nothing.
    """

    mask: Value
    score: Value
    dropout: Value
    scale: Value
    inside: Value
    """what the core takes products by"""
    natural: Value
    """the natural value of one unit"""
    factor: Value
    """the same for log2"""


@gluon.jit
def score_rule(mask, score, dropout, scale):
    inside, outside = score.parts(score.data)
    inside *= scale
    natural = inside if score.identity or score.linear else outside
    if dropout is not None:
        dropout = opened(dropout)
    return ScoreRule(mask, score, dropout, scale, inside, natural, natural * LOG2E)


@gluon.jit
def linear_terms(rule, b, h, q_idx, rows, keys):
    """For a score that is linear in the key's index: [64] the pitch, in units of the products, a key, and what is added
    to every product, natural, if keys are counted from that one. Else nothing that is used."""
    if rule.score.linear:
        key = gl.minimum(gl.maximum(q_idx + keys - rows, 0), gl.maximum(keys - 1, 0))  # as `q_block.linear_terms`
        zero = q_idx.to(gl.float32) * 0
        pitch = zero + rule.score.pitch(rule.score.data, b, h, q_idx, key)
        bias = zero + rule.score.bias(rule.score.data, b, h, q_idx, key)
        return pitch / rule.scale, key, bias
    else:
        return 0, 0, 0


@gluon.jit
def bounds_of_rows(mask, b, q_idx, rows, keys):
    """The first key that each row [64] sees, and the one after the last, where that is the whole mask."""
    if mask.exact:
        lo, hi, _, _ = mask.keys_of(mask.data, b, q_idx, keys - rows)
        return lo, gl.minimum(hi, keys)
    else:
        return ()


# Of 8-bit operands: weights come times 2^8, so that small ones are normal numbers of e4m3; the largest has 448.
EXTRA = gl.constexpr(8.0)
# A factor of 0 counts as this one, which makes as much of any product: 0 times a masked score would be NaN.
LEAST_FACTOR = gl.constexpr(1e-20)


@aggregate
class RowFactors:
    """The factors of a work item's bytes."""

    descale: Value
    b: Value
    h_k: Value
    products: Value
    """a factor of all products, of q and, where it does not go by blocks, of k"""


@gluon.jit
def factors_of_rows(descale, b, h_k, row):
    """The RowFactors of rows from `row` on, which are in one block, as a tuple, which is empty for 16-bit operands."""
    if descale is None:
        return ()
    else:
        products = gl.to_tensor(1.0) * factor_at(descale.q, b, h_k, row)
        if not descale.k.blocked:
            products = products * factor_at(descale.k, b, h_k, row)
        return (RowFactors(descale, b, h_k, positive(products)),)


@gluon.jit
def positive(factor):
    """A factor that is not 0, and NaN instead of one below: the largest product is to be the largest score."""
    return gl.where(factor >= 0, gl.maximum(factor, LEAST_FACTOR), float("nan"))


@gluon.jit
def heads_of_rows(item, group, i, ROWS: gl.constexpr):
    """The query head of rows i of an item that begins with head `item.in_group` of its key head. Rows of no head of
    that group read what its last one does, as there may be nothing behind; see `in_group`."""
    h = item.h_k * group + item.in_group + i // ROWS
    if ROWS < 64:
        h = gl.minimum(h, item.h_k * group + group - 1)
    return h


@gluon.jit
def in_group(item, group, like, ROWS: gl.constexpr):
    """Whether the heads of rows, in the layout of `like` [64], are heads of the group."""
    return item.in_group + gl.arange(0, 64, like.type.layout) // ROWS < group


@aggregate
class ScoreRows:
    """64 query rows, and what becomes of the products [64, BLOCK_K] of them and a tile of keys."""

    rule: ScoreRule
    terms: Value
    """see `linear_terms`"""
    b: Value
    h: Value
    q_idx: Value
    rows: Value
    keys: Value
    bounds: Value
    """[64] each: the first key and the one after the last, where that is the whole mask"""
    factors: Value
    """RowFactors of 8-bit operands, as a tuple"""
    bias: Value
    """in tiles beyond the reach of the score's tables what is added to every score, as a tuple"""

    @gluon.jit
    def beyond_reach(self, bias):
        """The same rows, for tiles beyond the reach, with their bias."""
        return ScoreRows(
            self.rule, self.terms, self.b, self.h, self.q_idx, self.rows, self.keys, self.bounds, self.factors, (bias,)
        )

    @gluon.jit
    def key_factor(self, tile, BLOCK_K: gl.constexpr):
        """The descale of a tile's keys, as a tuple, where it goes by blocks."""
        if len(self.factors) == 0:
            return ()
        elif self.factors[0].descale.k.blocked:
            factors = self.factors[0]
            return (positive(factor_at(factors.descale.k, factors.b, factors.h_k, tile * BLOCK_K)),)
        else:
            return ()

    @gluon.jit
    def value_factor(self, tile, BLOCK_K: gl.constexpr):
        """The descale of a tile's values, as a tuple, if it goes by blocks."""
        if len(self.factors) == 0:
            return ()
        elif self.factors[0].descale.v.blocked:
            factors = self.factors[0]
            return (factor_at(factors.descale.v, factors.b, factors.h_k, tile * BLOCK_K),)
        else:
            return ()

    @gluon.jit
    def apply_score(self, s, tile, unit, captured):
        """The core of the score modification; what nothing modifies stays as it is, and keeps its `unit`, which is what
        `key_factor` says. Of a linear score's core a number for each row is missing, see `add_row_terms`, and one for
        each thread of a row, see `tiles.add_columns`. captured: the tile that it captures, as a tuple, or ()."""
        rule = self.rule
        if len(unit) == 1 and not rule.score.identity:
            s = s * unit[0]
        if rule.score.identity or len(self.bias) == 1:
            return s
        elif rule.score.linear:
            return add_columns(s, self.terms[0])
        else:
            kv_idx = tile * s.shape[1] + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
            s = s * rule.inside
            h, q_idx = self.h[:, None], self.q_idx[:, None]
            return rule.score.core(rule.score.data + captured, s, self.b, h, q_idx, kv_idx)

    @gluon.jit
    def apply_mask(self, s, tile, LOWER: gl.constexpr):
        """The scores after the mask, whose lower bound counts only if LOWER."""
        rule = self.rule
        start = tile * s.shape[1]
        off = self.keys - self.rows
        if rule.mask.exact:
            return between(s, self.bounds[0] - start, self.bounds[1] - start, LOWER, True)
        else:
            if rule.mask.all_tiles:
                start = opaque(start)
            kv_idx = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))[None, :]
            seen = visible(rule.mask, self.b, self.h[:, None], self.q_idx[:, None], kv_idx, self.rows, self.keys, off)
            return gl.where(seen, s, float("-inf"))

    @gluon.jit
    def add_row_terms(self, row, tile, SIGN: gl.constexpr, BLOCK_K: gl.constexpr):
        """row [64] plus or minus what `apply_score` omits from each score of a tile, but for what all of the row
        share."""
        if self.rule.score.linear:
            return row + SIGN * (self.terms[0] * index_float(tile * BLOCK_K - self.terms[1]))
        else:
            return row

    @gluon.jit
    def softmax_weights(self, s, tile, old_max, unit):
        """exp(s - new_max) of scores as `apply_score` leaves them, by what earlier sums shrink, and new_max [64]; times
        2^EXTRA of 8-bit operands."""
        factor = self.rule.factor
        pitch = (self.terms[0],) if self.rule.score.linear else ()
        row_max = row_maxima(s, pitch)
        inner = factor
        BEYOND: gl.constexpr = len(self.bias) == 1
        if BEYOND:  # s are products still
            inner = self.rule.inside * factor
            row_max = row_max * self.rule.inside + self.bias[0]
        if len(unit) == 1 and self.rule.score.identity:
            row_max = row_max * unit[0]
            inner = factor * unit[0]
        new_max = gl.maximum(old_max, self.add_row_terms(row_max, tile, 1, s.shape[1]))
        # The difference first: of two equal maxima as low as LOWEST a multiply-add would leave 2^70, and 0 inf is NaN.
        alpha = gl.exp2((old_max - new_max) * factor)
        if self.rule.score.large_scores and not BEYOND:  # the difference first: see `tiles.power`
            exponents = (s - new_max[:, None]) * factor
            if len(self.factors) == 1:
                exponents = exponents + EXTRA
        else:
            shift = self.add_row_terms(new_max, tile, -1, s.shape[1])
            if BEYOND:
                shift = shift - self.bias[0]
            shift = shift * factor
            if len(self.factors) == 1:
                shift = shift - EXTRA
            if self.rule.score.linear:
                exponents = subtract_rows(s, inner, shift, pitch[0])
            else:
                exponents = s * inner - shift[:, None]
        return gl.exp2(exponents), alpha, new_max

    @gluon.jit
    def apply_dropout(self, weights, tile):
        """The weights that dropout keeps, and zeros."""
        if self.rule.dropout is None:
            return weights
        else:
            return apply_dropout(weights, self.rule.dropout, self.b, self.h, self.q_idx, tile * weights.shape[1], False)
