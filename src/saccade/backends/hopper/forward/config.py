"""Schedules of the Hopper forward: a measured table per GPU, formulas where it is silent, and splits of the keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from saccade.backends import configs
from saccade.call import Call
from saccade.call.spec import EIGHT_BIT_WORDS, Spec
from saccade.layouts import Paged

SHARED_BYTES = 232_448
"""The shared memory of one program on sm_90."""


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward is cut: 64 query rows for each consumer, tiles of block_k keys."""

    consumers: int
    block_k: int
    stages: int
    """Tiles of keys, and of values, in shared memory."""
    slots: int
    """Work items whose queries are there; with two, the next one's are loaded before this one ends."""
    turns: int
    """1: the consumers issue their products in a fixed rotation."""
    registers: int
    """Registers of a consumer's thread."""
    loader_registers: int
    spill: int = 0
    """Bytes that ptxas may spill; its row in the table says why that is the fastest all the same."""
    overlap: int = 1
    """0: a consumer waits for the products with the values of a tile before it begins the scores of the next one. Of
    8-bit operands; others always overlap."""
    parts: int = 1
    """Of 8-bit operands: parts of out's columns, whose products are in registers of their own one after the other."""
    out_columns: int = 0
    """Of out that have a place of their own in shared memory, so that the next q may come while out leaves: a half of
    them, or 0: out leaves from where q was."""
    transposer_registers: int = 0
    """Of the warps that turn 8-bit values of pages and of ranges; 0 for any other call."""


def chunk(d: int) -> int:
    """Columns of q and k that one tile in shared memory has: all where that is a power of two, else 64."""
    return d if d in (64, 128, 256) else 64


def chunks(d: int) -> int:
    """Such tiles side by side."""
    return -(-d // chunk(d))


def last_chunk(d: int, size: int = 2) -> int:
    """Columns that the last one's product has: a power of two, and at least the 32 bytes of one instruction; of
    operands of `size` bytes."""
    return max(32 // size, 1 << ((d - 1) % chunk(d)).bit_length())


def block_dv(d_v: int) -> int:
    """Columns of a tile of v and of out: the next power of two."""
    return max(16, 1 << (d_v - 1).bit_length())


def parts_of_out(d_v: int, config: ForwardConfig, size: int = 2) -> tuple[int, int]:
    """How many parts of columns the products with the values have, and how many columns the last one has: of 16-bit
    operands the lower half of block_dv and what d_v needs of the upper one, where that saves products."""
    columns = block_dv(d_v)
    if size == 1:
        return config.parts, columns // config.parts
    last = 1 << (d_v - columns // 2 - 1).bit_length()
    # A product of 16 columns is too small: of d_v = 72 and 80 it cost 7 and 3 % (notes/gluon.md).
    return (2, last) if columns >= 128 and 32 <= last < columns // 2 else (1, columns)


def shared_bytes(d: int, d_v: int, config: ForwardConfig, size: int = 2) -> int:
    """Shared memory of operands of `size` bytes, without the barriers. out has two."""
    columns = chunks(d) * chunk(d)
    wider = max(chunk(d), 0 if config.out_columns else block_dv(d_v) * 2 // size)
    slot = -(-columns // wider) * wider * 64 * size
    stage = config.block_k * (columns + block_dv(d_v)) * size
    return config.consumers * (config.slots * slot + 128 * config.out_columns) + config.stages * stage


def size_of(spec: Spec) -> int:
    """Bytes of an element of q, k and v."""
    return 1 if spec.dtype in EIGHT_BIT_WORDS else 2


def key(spec: Spec, score: str = "") -> str:
    """A row of the table: what a schedule depends on; `score` is a word of `backends.device.scores.weight`."""
    edges = "full" if spec.mask == "none" else "masked"
    words = (edges, *filter(None, (score, "dropout" if spec.dropout else "")))
    return (
        f"gluon forward {8 * size_of(spec)}bit d{chunks(spec.d) * chunk(spec.d)}/{block_dv(spec.d_v)} {' '.join(words)}"
    )


@lru_cache(maxsize=1024)
def forward_config(spec: Spec, gpu: str, score: str = "") -> ForwardConfig:
    """The ForwardConfig for a Spec: from the table of that GPU, else by formula."""
    row = configs.table(gpu).get(key(spec, score))
    if size_of(spec) == 1:
        return eight_bit(spec, score, row)
    if row is None and spec.dropout:
        return dropping(forward_config(replace(spec, dropout=False), gpu, score), spec, score)
    if row is None and score:
        return scored(spec, gpu, score)
    config = ForwardConfig(**row) if row else formula(spec.d, spec.d_v)
    block_sparse = any(word in spec.mask for word in ("mask_mod", "~", "selected"))
    reads = "interval" in spec.mask or spec.layout != "dense"
    if reads and not block_sparse and config.registers == 232:
        # The producer reads bounds, lengths or pages. With fewer registers, spilled or not, ptxas moves p about in the
        # consumers' loops (notes/gluon.md).
        registers, loader = (208, 88) if spec.d <= 128 else (224, 56)
        config = replace(config, registers=registers, loader_registers=loader)
    if "selected" in spec.mask and config == formula(128, 128):
        return HALF_TILES  # blocks of 64 keys are whole tiles, and three consumers spill 1060 bytes
    if spec.layout in ("packed", "paged") and block_sparse and (config.consumers, config.block_k) == (3, 128):
        return TWO_CONSUMERS  # three spill 1300 bytes: neither they nor the producer have registers for both
    if spec.layout == "paged" and block_sparse and config == formula(128, 128):
        return HALF_TILES  # with 128 keys what a predicate reads of tensors, as trees do, spills 1032 bytes
    return config


TWO_CONSUMERS = ForwardConfig(2, 128, 3, 2, 0, 232, 40)
THREE_CONSUMERS = ForwardConfig(3, 64, 3, 2, 1, 160, 32)
HALF_TILES = ForwardConfig(2, 64, 3, 2, 0, 232, 40)


def scored(spec: Spec, gpu: str, score: str) -> ForwardConfig:
    """Score functions need registers: 64 of them for the values of a table alone, where a tile has 128 keys."""
    wide = max(chunks(spec.d) * chunk(spec.d), block_dv(spec.d_v))
    if score == "tile":  # of 128 keys where there is room for two (notes/scores.md)
        narrow = (128, 3, 2, 0, 232, 40) if wide <= 64 else (128, 2, 1, 0, 232, 40)
        shape = narrow if wide <= 128 else (64, 2, 1, 0, 240, 32)
        return ForwardConfig(CAPTURED_CONSUMERS, *shape, SCORE_SPILL)
    if score == "linear":
        config = forward_config(spec, gpu)
        return replace(config, spill=LINEAR_SPILL) if wide <= 64 else config
    if score == "beyond" and wide <= 64:  # most of its tiles are those of no score
        return forward_config(spec, gpu)
    if wide <= 64:
        shape = (2, 128, 3, 2, 0, 232, 40) if score in ("table", "beyond") else (3, 64, 3, 2, 1, 160, 32)
        return ForwardConfig(*shape, SCORE_SPILL)
    if wide <= 128 and score in ("table", "beyond"):
        return ForwardConfig(2, 64, 3, 2, 0, 232, 40)
    config = forward_config(spec, gpu)
    return replace(config, spill=SCORE_SPILL) if wide <= 128 else config


def dropping(config: ForwardConfig, spec: Spec, score: str) -> ForwardConfig:
    """Philox needs registers too: those of three consumers, or of the producer, which has some left; beside a score's
    those of half a tile."""
    wide = max(chunks(spec.d) * chunk(spec.d), block_dv(spec.d_v))
    if wide <= 64:
        return ForwardConfig(2, 128, 3, 2, 0, 232, 40, SCORE_SPILL)
    block_k = 64 if score and wide <= 128 else config.block_k
    return replace(config, block_k=block_k, registers=240, loader_registers=24, spill=SCORE_SPILL)


def eight_bit(spec: Spec, score: str, row: dict[str, int] | None) -> ForwardConfig:
    """Of 8-bit operands: products with the values have registers of their own, beside the sums. Three consumers in
    turns are faster than two that overlap their own products (notes/fp8.md), but have registers for plain calls
    alone."""
    wide = max(chunks(spec.d) * chunk(spec.d), block_dv(spec.d_v))
    if spec.layout in ("paged", "ranges"):
        if wide <= 128:
            return ForwardConfig(2, 128, 3, 2, 1, 192, 32, SCORE_SPILL, overlap=0, parts=2, transposer_registers=96)
        return ForwardConfig(2, 64, 2, 1, 0, 192, 32, SCORE_SPILL, overlap=0, parts=4, transposer_registers=96)
    plain = spec.mask in ("none", "causal") and not (score or spec.dropout or spec.block_scales)
    if wide <= 128 and not plain:
        return ForwardConfig(2, 128, 3, 2, 1, 232, 40, SCORE_SPILL, overlap=0, parts=2)
    if row:
        return ForwardConfig(**row)
    if wide <= 64 and spec.mask == "none":
        return ForwardConfig(3, 128, 3, 2, 0, 160, 32, 8)
    if wide <= 64:  # with masks overlapping spills 48 bytes
        return ForwardConfig(3, 128, 3, 2, 1, 160, 32, overlap=0)
    if wide <= 128:
        return ForwardConfig(3, 128, 3, 2, 1, 160, 32, 8, overlap=0, parts=2)
    return ForwardConfig(2, 128, 2, 1, int(spec.mask != "none"), 240, 24, 68, overlap=0, parts=2)


CAPTURED_CONSUMERS = 2
"""The number of consumers if the score function takes tiles of a captured tensor."""
LINEAR_SPILL = 24
"""Bytes of a work item's start in Triton 3.6, none of them in a loop."""
SCORE_SPILL = 160
"""Bytes that a score function's values, or dropout, may cost: 48 and 60 in Triton 3.6, more in others. Not timed
against shorter tiles."""


def formula(d: int, d_v: int) -> ForwardConfig:
    """The config with as many consumers, keys and slots as registers and shared memory hold."""
    wide = max(chunks(d) * chunk(d), block_dv(d_v))
    if wide <= 64:
        return ForwardConfig(3, 128, 3, 2, 1, 160, 32)
    # What the producer has too few of, it spills; with sums of 256 columns the consumers need them more.
    if block_dv(d_v) > 128:
        config = ForwardConfig(2, 64, 2, 1, 0, 240, 32, 16, out_columns=block_dv(d_v) // 2)
        if shared_bytes(d, d_v, config) <= SHARED_BYTES - 1024:
            return config
    registers = (232, 40) if block_dv(d_v) <= 128 else (240, 32)
    for block_k in (128, 64) if block_dv(d_v) <= 128 else (64,):
        for slots, own_out in ((2, 0), (1, block_dv(d_v) // 2), (1, 0)):
            config = ForwardConfig(2, block_k, 2, slots, 0, *registers, out_columns=own_out)
            if shared_bytes(d, d_v, config) <= SHARED_BYTES - 1024:
                return config
    raise AssertionError(f"no schedule for head dims {d} and {d_v}")


# In how many parts the keys of pages are cut, from shapes alone.


ITEM_ROWS = 128
"""Query rows that are worked on together."""
LEAST_KEYS = 512
"""Keys that a part has at least."""
MAX_SPLITS = 64
START, MERGE = 256, 6
"""The fixed cost of a part, in keys: its begin, its end and the merge."""


def work_items(call: Call) -> int:
    """Blocks of ITEM_ROWS rows of all sequences and key heads; of sequences end to end the mean length counts."""
    b = max(call.layout.sequences, 1)
    rows = -(-call.q.shape[0] * call.q.shape[2] * call.group // b)
    return max(b * call.k.shape[1] * -(-rows // ITEM_ROWS), 1)


def most_splits(call: Call) -> int:
    """How many parts there are keys for; one of 8-bit keys, and of whatever is not in pages."""
    layout = call.layout
    if not isinstance(layout, Paged) or layout.num_splits is not None or call.descale is not None:
        return 1
    return max(1, min(MAX_SPLITS, layout.capacity(call.k.shape[2]) // LEAST_KEYS))


def key_splits(call: Call, processors: int) -> int:
    """The number of parts with which all multiprocessors end soonest, if each has one part of one item at a time."""
    most = most_splits(call)
    if most == 1:  # as of all layouts that have no sequences
        return 1
    items = work_items(call)
    keys = call.layout.capacity(call.k.shape[2])

    def cost(n: int) -> float:
        return -(-items * n // processors) * (keys / n + START) + (MERGE * items * n if n > 1 else 0)

    return min(range(1, most + 1), key=cost)
