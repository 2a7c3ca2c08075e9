"""What the warps of the latent kernel hand to one another: every barrier and every phase is here.

There are two stages. Tile n of keys, counted over all parts, is in stage n % 2, and the consumer of that number owns
it: it computes the tile's scores and weights. The first 512 columns are the values too, of which each consumer sums
256, so a stage is given back in two halves. The last 64 columns of a tile are keys alone, and their place takes the
weights, as many bytes, once the scores are there.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from saccade.backends.hopper.pipeline import Slots
from saccade.backends.hopper.ptx import barrier_arrive, barrier_sync, opaque
from saccade.backends.hopper.shim import Value, aggregate, view

READY = gl.constexpr(6)
"""6 and 7: the weights of each stage's tile are there."""
SUMS = gl.constexpr(8)
"""Both consumers' sums of a part are there."""
EMPTY = gl.constexpr(10)
"""10 to 13: halves of the stages."""
HALF = gl.constexpr(4)
"""Chunks of 64 columns of one half of the values."""


@aggregate
class Seesaw:
    """All that the warps of the latent kernel share."""

    queries: Slots
    """one slot of chunks [64, 64] of q"""
    latent: gl.shared_memory_descriptor
    """chunks [64, 64] of the first 512 columns, 8 for each stage"""
    rest: gl.shared_memory_descriptor
    """the last 64 columns, and then the weights, of each stage"""
    full: gl.shared_memory_descriptor
    """a barrier for each half of each stage, and of bulk copies one for those that the producer waits for"""
    maxima: gl.shared_memory_descriptor
    """[64] for each stage: rows' maxima after its tile"""
    decays: gl.shared_memory_descriptor
    """[64] for each stage: by what sums shrink with its tile"""
    sums: gl.shared_memory_descriptor
    """[64] for each consumer, of this part and of the one before"""
    GATHERS: gl.constexpr
    """whether four warps load, row by row"""
    THREADS: gl.constexpr
    """of the producer and one consumer"""
    shape: Value

    @gluon.jit
    def claim(self, n, stage, half):
        """For the producer: waits until a half of tile n's stage is free."""
        if n >= 2:
            barrier_sync(EMPTY + 2 * stage + half, self.THREADS)

    @gluon.jit
    def wait(self, n, stage: gl.constexpr, half: gl.constexpr):
        """For a consumer: waits until half of tile n is there."""
        mbarrier.wait(self.full.index(2 * stage + half), (n // 2) & 1)
        if self.GATHERS:  # products read what bulk copies write; what threads write they see behind a fence
            fence_async_shared()

    @gluon.jit
    def release(self, stage: gl.constexpr, half: gl.constexpr):
        """For consumer `half`: it reads its half of a stage no more; of the other's stage nor the weights."""
        barrier_arrive(EMPTY + 2 * stage + half, self.THREADS)

    @gluon.jit
    def values(self, stage, half):
        """[64, 256]: a half of a stage's values."""
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], self.latent.dtype)
        return view(self.latent, [4, 64, 256], LAYOUT).index(opaque(2 * stage + half))

    @gluon.jit
    def half_of_queries(self, half: gl.constexpr):
        """[64, 256]: the columns of q that belong to a half of the values."""
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], self.latent.dtype)
        return view(self.queries.tiles, [2, 64, 256], LAYOUT).index(opaque(half))

    @gluon.jit
    def weights(self, stage: gl.constexpr):
        """[64, 64]: of a stage's tile."""
        return self.rest.index(opaque(stage)).reshape([64, 64])

    @gluon.jit
    def hand_over(self, c: gl.constexpr, p, row_max, alpha):
        """For consumer c: the weights of its tile are p [64, 64]."""
        self.weights(c).store(p)
        self.maxima.index(c).store(row_max)
        self.decays.index(c).store(alpha)
        fence_async_shared()
        barrier_arrive(READY + c, 256)

    @gluon.jit
    def take_over(self, c: gl.constexpr):
        """For consumer c: waits until the other one has handed over."""
        barrier_sync(READY + 1 - c, 256)

    @gluon.jit
    def total(self, c: gl.constexpr, done, own):
        """The sums [64] of both consumers, of part `done`."""
        at = done % 2 * 2
        self.sums.index(at + c).store(own)
        barrier_sync(SUMS, 256)
        return own + self.sums.index(at + 1 - c).load(own.type.layout)
