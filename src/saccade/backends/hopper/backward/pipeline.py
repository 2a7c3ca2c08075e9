"""What the backward's warps hand to one another through shared memory, besides the rings of `hopper/pipeline.py`."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from saccade.backends.hopper.backward.dq import to_register_order
from saccade.backends.hopper.ptx import barrier_arrive, barrier_sync
from saccade.backends.hopper.shim import aggregate, thread_barrier, view

THREADS = gl.constexpr(288)
"""Two consumers and the warp that loads."""
CONSUMER_REGISTERS = gl.constexpr(240)
OTHER_REGISTERS = gl.constexpr(24)

# Named barriers; those up to d = 128 and those above share numbers.
DQ = gl.constexpr(6)
"""6 and 7, from a consumer to its reduce warp."""
DS = gl.constexpr(8)
"""8 to 11: ds of consumer 0 and 1 is there, by the parity of the tile."""
Q_EMPTY = gl.constexpr(12)
DOUT_EMPTY = gl.constexpr(14)
"""12 and 13, 14 and 15, one for each stage."""


@aggregate
class DSExchange:
    """Two tiles of each of two consumers, which both read: written in turn, so that they may drift half a step apart.

    Consumer c puts tile n only after it took the other's tile n - 1, and the other gives that after it read all of
    tile n - 2: no tile is overwritten that is still read, and no barrier counts two arrivals of one consumer.
    """

    tiles: gl.shared_memory_descriptor
    """[2, BLOCK_K, BLOCK_Q]; or, if BY_ROWS, [2, BLOCK_Q, BLOCK_K], as ds lies in global memory"""
    BY_ROWS: gl.constexpr

    @gluon.jit
    def tile(self, c: gl.constexpr, n):
        """Consumer c's [64, BLOCK_Q]."""
        if self.BY_ROWS:
            return self.tiles.index(n & 1).slice(c * 64, 64, 1).permute((1, 0))
        else:
            return self.tiles.index(n & 1).slice(c * 64, 64, 0)

    @gluon.jit
    def part(self, c: gl.constexpr, n):
        """The same if BY_ROWS, as bulk copies take it: [1, 1, BLOCK_Q, 64]."""
        BLOCK_Q: gl.constexpr = self.tiles.shape[1]
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, BLOCK_Q, 64], self.tiles.dtype)
        return view(self.tiles, [4, 1, 1, BLOCK_Q, 64], LAYOUT).index((n & 1) * 2 + c)

    @gluon.jit
    def give(self, c: gl.constexpr, n):
        """Consumer c has put its tile n."""
        barrier_arrive(DS + 2 * c + (n & 1), 256)

    @gluon.jit
    def take(self, c: gl.constexpr, n):
        """Consumer c waits for the other's tile n."""
        barrier_sync(DS + 2 - 2 * c + (n & 1), 256)


@aggregate
class Outbox:
    """A tile of each consumer on its way out of shared memory, which a warp of its own sends."""

    tiles: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FOLLOWS: gl.constexpr
    """A tile leaves behind what its consumer writes next, with that one's fence: 2 to 5 % at d = 128, where a step has
    64 rows, and a loss below (notes/gluon_backward.md)."""
    DIRECT: gl.constexpr
    """A tile is dq itself, 64 rows and columns; else a part of its sums."""

    @gluon.jit
    def claim(self, c: gl.constexpr, n):
        """For consumer c: waits until tile n - 1 has left."""
        mbarrier.wait(self.empty.index(c), (n & 1) ^ 1)

    @gluon.jit
    def send(self, c: gl.constexpr, dq, scale):
        """For consumer c: hands over its tile of dq [64, N], times `scale` if DIRECT; else in the order of registers,
        and what is behind them in the tile does not leave."""
        if self.DIRECT:
            self.tiles.index(c).reshape([64, 64]).slice(0, dq.shape[1], 1).store((dq * scale).to(self.tiles.dtype))
        else:
            x = to_register_order(dq)
            WIDTH: gl.constexpr = self.tiles.shape[2]
            ROWS: gl.constexpr = x.shape[0] // WIDTH
            self.tiles.index(c).slice(0, ROWS, 0).store(x.reshape([ROWS, WIDTH]))
        if not self.FOLLOWS:
            fence_async_shared()
            barrier_arrive(DQ + c, 160)

    @gluon.jit
    def follow(self, c: gl.constexpr, there):
        """For consumer c, behind a fence: its tile leaves now if it FOLLOWS, and is there."""
        if self.FOLLOWS and there:
            barrier_arrive(DQ + c, 160)

    @gluon.jit
    def receive(self, c: gl.constexpr):
        """For the warp that sends: waits for the next tile."""
        barrier_sync(DQ + c, 160)

    @gluon.jit
    def clear(self, c: gl.constexpr):
        mbarrier.arrive(self.empty.index(c), count=1)


DS_THERE = gl.constexpr(8)
P_THERE = gl.constexpr(9)
"""Above d = 128: between the two consumers."""


@aggregate
class PDSExchange:
    """p from one consumer for ds from the other: one p, in the order of registers, and two ds, which both read.

    The first gives p(n) after it took ds(n - 1) and its products with ds(n - 2) are done, and the second gives ds(n)
    after it read p(n): no tile is overwritten that is still read, and no barrier counts two arrivals of one consumer.
    """

    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor

    @gluon.jit
    def give_p(self, x):
        """For the first: p(n), [N]."""
        self.p.store(x)
        barrier_arrive(P_THERE, 256)

    @gluon.jit
    def take_p(self, layout: gl.constexpr):
        """For the second: p(n), [N]."""
        barrier_sync(P_THERE, 256)
        return self.p.load(layout)

    @gluon.jit
    def give_ds(self, n, x):
        """For the second, all of whose warps may then read ds(n) too. It begins with a ds(-1)."""
        self.ds.index(n & 1).store(x)
        fence_async_shared()
        thread_barrier()
        barrier_arrive(DS_THERE, 256)

    @gluon.jit
    def take_ds(self):
        """For the first: waits for the next ds."""
        barrier_sync(DS_THERE, 256)
