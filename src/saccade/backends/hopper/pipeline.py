"""What warps hand to one another through shared memory, and the barriers for it; `backward/pipeline.py` has more.

A stage is full when its bulk copies have landed, which an mbarrier counts. It is empty when all of its readers have
arrived at a named barrier. An arrival at an mbarrier would need a barrier over the whole warpgroup (4 % of the forward
at d = 128; notes/gluon.md). Triton itself uses the named barriers 0 to 5.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.hopper.ptx import barrier_arrive, barrier_sync
from saccade.backends.hopper.shim import Value, aggregate

TURN = gl.constexpr(6)
"""6 to 8: whose turn it is to issue products."""
ASKED = gl.constexpr(9)
"""The forward's producer asks for an item."""
KEYS_EMPTY = gl.constexpr(10)
VALUES_EMPTY = gl.constexpr(13)
"""10 to 12 and 13 to 15: one for each stage."""
MAX_STAGES = 3


@gluon.jit
def new_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers that complete a phase after COUNT arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(made.index(i), count=COUNT)
    return made


@gluon.jit
def new_ring(tiles, EMPTY: gl.constexpr, STAGES: gl.constexpr, THREADS: gl.constexpr):
    """A Ring whose readers and producer are THREADS together; EMPTY is the first of its named barriers."""
    return Ring(tiles, new_barriers(STAGES + 1, 1), EMPTY, STAGES, THREADS)


@aggregate
class Ring:
    """Stages of tiles that one warp fills and every consumer reads, each counting the tiles that passed: n.

    One barrier more than stages is for copies that the producer itself waits for. It is not an allocation of its own:
    a kernel without a use for it would have that place again for other things, while the barrier is still being made.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    EMPTY: gl.constexpr
    STAGES: gl.constexpr
    THREADS: gl.constexpr

    @gluon.jit
    def claim(self, n):
        """For the producer: waits until tile n has a stage. Returns it."""
        if n >= self.STAGES:
            barrier_sync(self.EMPTY + n % self.STAGES, self.THREADS)
        return n % self.STAGES

    @gluon.jit
    def announce(self, stage, BYTES: gl.constexpr):
        """For the producer: the barrier that counts BYTES of bulk copies, and is full with the last of them."""
        full = self.full.index(stage)
        mbarrier.expect(full, BYTES)
        return full

    @gluon.jit
    def target(self, stage, whole):
        """For the producer: the barrier of copies to a stage; of a tile that is not whole, the one it waits for."""
        return self.full.index(gl.where(whole, stage, self.full.shape[0] - 1))

    @gluon.jit
    def first_of(self, stage):
        """The first of the tiles of a stage."""
        return stage * (self.tiles.shape[0] // self.STAGES)

    @gluon.jit
    def landing(self):
        """For the producer: the barrier of copies that it waits for."""
        return self.full.index(self.full.shape[0] - 1)

    @gluon.jit
    def fill(self, stage):
        """For a producer that filled a stage itself."""
        mbarrier.arrive(self.full.index(stage), count=1)

    @gluon.jit
    def wait(self, n, pred=True):
        """For a consumer: waits until tile n is there. Returns its stage."""
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1, pred=pred)
        return n % self.STAGES

    @gluon.jit
    def release(self, n):
        """For a consumer: it reads tile n no more."""
        barrier_arrive(self.EMPTY + n % self.STAGES, self.THREADS)

    @gluon.jit
    def skip(self, n):
        """Hands tile n back unread. Its copy has to land first: an earlier arrival would count for the tile before."""
        self.wait(n)
        self.release(n)


@aggregate
class Slots:
    """Tiles that work items keep, in slots, and a record of numbers for each item.

    There is one record more than slots, as the next one is written while all slots are in use. There are two more where
    a slot is released before its record is read for the last time. `full` may have one barrier more, for copies that
    the producer itself waits for.
    """

    tiles: gl.shared_memory_descriptor
    records: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    NUMBERS: gl.constexpr
    CHUNKS: gl.constexpr

    @gluon.jit
    def claim(self, n):
        """For the warp that fills slots: waits until item n has a slot. Returns the slot."""
        slot = n % self.SLOTS
        mbarrier.wait(self.empty.index(slot), ((n // self.SLOTS) & 1) ^ 1)
        return slot

    target = Ring.target
    landing = Ring.landing
    fill = Ring.fill

    @gluon.jit
    def wait(self, n):
        """For a consumer: waits until item n is there. Returns its slot."""
        mbarrier.wait(self.full.index(n % self.SLOTS), (n // self.SLOTS) & 1)
        return n % self.SLOTS

    @gluon.jit
    def release(self, n):
        """For a consumer: it needs the slot of item n no more."""
        mbarrier.arrive(self.empty.index(n % self.SLOTS), count=1)

    @gluon.jit
    def record_of(self, n):
        """Where the numbers of item n are."""
        return n % (self.records.shape[0] // self.NUMBERS) * self.NUMBERS

    @gluon.jit
    def put(self, at, i, value):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        self.records.index(at + i).store(gl.full([1], value, gl.int32, layout))

    @gluon.jit
    def get(self, at, i):
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        return gl.max(self.records.index(at + i).load(layout), 0)


@aggregate
class Plans:
    """What the forward's scheduler and its producer tell each other: that the record of item n is written, and that one
    more item is wanted."""

    made: gl.shared_memory_descriptor
    """one barrier for each record"""

    @gluon.jit
    def tell(self, n):
        """For the scheduler: the record of item n is written."""
        mbarrier.arrive(self.made.index(n % self.made.shape[0]), count=1)

    @gluon.jit
    def wait(self, n):
        """For the producer: waits until the record of item n is written."""
        mbarrier.wait(self.made.index(n % self.made.shape[0]), (n // self.made.shape[0]) & 1)

    @gluon.jit
    def ask(self):
        """For the producer: asks for one more item."""
        barrier_arrive(ASKED, 64)

    @gluon.jit
    def wait_for_request(self):
        """For the scheduler: waits until the producer asks. Until the item is told, it does not ask again."""
        barrier_sync(ASKED, 64)


@aggregate
class Turns:
    """A fixed rotation in which the consumers issue their products; off, it costs nothing."""

    ON: gl.constexpr
    CONSUMERS: gl.constexpr

    @gluon.jit
    def open(self, c: gl.constexpr):
        """The last consumer lets the first begin."""
        if self.ON and c == self.CONSUMERS - 1:
            barrier_arrive(TURN, 256)

    @gluon.jit
    def take(self, c: gl.constexpr):
        if self.ON:
            barrier_sync(TURN + c, 256)

    @gluon.jit
    def give(self, c: gl.constexpr):
        if self.ON:
            barrier_arrive(TURN + (c + 1) % self.CONSUMERS, 256)


@aggregate
class Pipeline:
    """All that the forward's warps share."""

    slots: Slots
    plans: Plans
    keys: Ring
    values: Ring
    turns: Turns
    raw: Value
    """Slots of values as they lie, where `transposer` turns them; else None"""
    captured: Value
    """of each stage of keys for each consumer a tile of what the score function captures; or None"""
    out: Value
    """for each consumer the place from which its out leaves, some columns after the other; None: that of its q"""
    shape: Value
