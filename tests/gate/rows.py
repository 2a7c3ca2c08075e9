"""What the words of a row mean: a Call of stand-in tensors."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from saccade import scores
from saccade.backends.device import block_lists, masks, positions, visits
from saccade.backends.device.key_lists import Tabulated
from saccade.backends.device.launch import Launch
from saccade.backends.device.records import runtime_int
from saccade.backends.hopper.tma_launch import TMALaunch
from saccade.backends.key_lists import TableShape
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS, Factors
from saccade.call.dropout import Dropout
from saccade.layouts import Dense, Packed, Paged
from saccade.masks import Mask, causal, interval, mask_mod, selected, selected_blocks, window

GPU = "h200"
SCORED = [(128, "full", "alibi"), (64, "masked", "relative_bias")]
DROPPED = [(64, "full dropout"), (256, "masked dropout")]
"""Head dims and words of the rows with a score function, and with dropout."""
DTYPES = {"8bit": torch.float8_e4m3fn, "16bit": torch.bfloat16, "32bit": torch.float32}


class GateRow(NamedTuple):
    """`backend kernel size d/d_v edges features`."""

    kernel: str
    dtype: torch.dtype
    d: int
    d_v: int
    words: list[str]
    """edges, then features"""

    @staticmethod
    def of(row: str) -> GateRow:
        _, kernel, size, dims, *words = row.split()
        d, d_v = map(int, dims.removeprefix("d").split("/"))
        return GateRow(kernel, DTYPES[size], d, d_v, words)

    def call(self) -> Call:
        """The Call of the row: two heads of 512 rows and keys; `grouped`: of queries eight; `text`: 77 of both."""
        heads = 8 if "grouped" in self.words else 2, 2, 2
        s = 77 if "text" in self.words else 512
        sizes = zip(heads, (s, s, s), (self.d, self.d, self.d_v), strict=True)
        q, k, v = (torch.empty(1, h, s, n, dtype=self.dtype) for h, s, n in sizes)
        packed = "packed" in self.words
        layout: Any = PACKED if packed else RANGES if "ranges" in self.words else Dense()
        if "padded" in self.words:
            used = torch.zeros(1, dtype=torch.int32)
            layout = Dense("bhsd", used, used.clone())
        if "paged" in self.words:  # pages of 16 rows; two sequences, whose queries are packed, or one
            k, v = (x.view(32, 2, 16, x.shape[3]) for x in (k, v))
            starts, b = (torch.zeros(3, dtype=torch.int32), 2) if packed else (None, 1)
            layout = Paged(torch.zeros(b, 32, dtype=torch.int32), torch.zeros(b, dtype=torch.int32), starts)
        dropout = Dropout(torch.zeros(2, dtype=torch.int64), 0.5) if "dropout" in self.words else None
        mask, score = _mask(self.words[0]), _score(self.words)
        score = None if score is None else scores.bind(score, q)
        if "wide" in self.words:  # 16-bit queries of 8-bit keys and values
            q = q.to(torch.bfloat16)
        queued = "queued" in self.words
        options: dict[str, Any] = {"deterministic": queued, "dropout": dropout, "descale": self.descale()}
        sink = torch.empty(heads[0]) if "sinks" in self.words else None
        return Call.of_views(q, k, v, layout, mask=mask, score=score, sink=sink, **options)

    def descale(self) -> Factors | None:
        """Of 8-bit operands: a factor for each, of each sequence's heads, or by `blocks`."""
        if self.dtype not in EIGHT_BITS:
            return None
        b = 2 if "packed" in self.words else 1
        q, k, v = torch.ones(3, b, 2, 4 if "blocks" in self.words else 1)
        return Factors(q, k, v)


PACKED = Packed(*torch.zeros(2, 3, dtype=torch.int32), 512, 512)
RANGES = Packed(PACKED.cu_seqlens_q, starts_k=PACKED.cu_seqlens_q[1:], seqused_k=PACKED.cu_seqlens_q[1:])


def _mask(edges: str) -> Mask | None:
    """`full`, `causal`, `listed`, `selected` blocks for many rows or for `few`, `keys`, or a window for whatever else
    tests intervals."""
    match edges:
        case "full":
            return None
        case "causal":
            return causal()
        case "interval":
            return interval(*torch.zeros(2, 1, 512, dtype=torch.int32))
        case "listed":
            return causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0)
        case "selected":
            shape, lists = TableShape(1, 2, 8, 8), torch.zeros(1, 2, 8, 4, dtype=torch.int32)
            return Tabulated(lists, None, 64, 64, (shape, torch.zeros(16, 1, dtype=torch.int32))) & causal()
        case "keys":
            return selected(torch.zeros(1, 2, 512, 40, dtype=torch.int32)) & causal()
        case "few":
            return selected_blocks(torch.zeros(1, 2, 512, 4, dtype=torch.int32)) & causal()
        case _:
            return window(300, 0)


def _score(words: list[str]) -> Any:
    """A score function of two heads, from stand-in tensors."""
    if "alibi" in words:
        return scores.alibi(torch.ones(2))
    if "bias" in words:
        return scores.bias(torch.ones(1, 2, 512, 512, dtype=torch.bfloat16))
    if "temperatures" in words:  # one more captured tensor than stays beside the backward's tiles with all their places
        return scores.compose(*(scores.temperature(torch.ones(2)) for _ in range(12)))
    reach = {"relative_bias": 128, "one_distance": 0}
    tables = (scores.relative_bias(torch.ones(2, 2 * n + 1)) for word, n in reach.items() if word in words)
    return next(tables, None)


def device_mask(call: Call, by_keys: bool = False) -> masks.DeviceMask:
    """The device form of the Call's mask, with stand-ins for its block lists, or for its table of visits."""
    mask = masks.device_args(call)
    if call.mask is None or not call.mask.block_sparse:
        return _with_visits(call, mask) if by_keys and call.bounds_per_row else mask
    empty = torch.empty(16, dtype=torch.int32)
    return block_lists.with_lists(mask, block_lists.BlockLists(empty, empty, *map(runtime_int, (1, 1, 1))))


def _with_visits(call: Call, mask: masks.DeviceMask) -> masks.DeviceMask:
    empty, (_, keys) = torch.empty(1, 1, 4, dtype=torch.int32), positions.spans(call)
    return visits._with_table(mask, empty, empty, keys is not None and keys.packed.value, empty, empty)


def warmed(launch: Launch | TMALaunch, *given: Any) -> Any:
    """The compiled kernel of a launch that is `given` this besides the device, not run."""
    if isinstance(launch, TMALaunch):
        options = {**launch.constants, **launch.options, "grid": (1,)}
        return launch.kernel.warmup(*launch._arguments(*given), **options)
    (arguments,) = given
    return launch.kernel.warmup(*arguments, *launch.constants, **launch._options(launch.stages), grid=(1,))
