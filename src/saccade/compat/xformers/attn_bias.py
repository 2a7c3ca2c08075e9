"""xformers' attention biases: which keys a query sees, for one tensor or for several sequences in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor


@dataclass
class SequenceInfo:
    """Sequences end to end: `seqstart = [0, n_0, n_0 + n_1, …]`, on a device and as numbers."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> SequenceInfo:
        lengths = list(seqlens)
        starts = [0, *accumulate(lengths)]
        return SequenceInfo(_vector(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)

    def to(self, device: Any) -> Self:
        moved = {x.name: getattr(self, x.name) for x in fields(self)}
        moved = {name: x.to(device, non_blocking=True) for name, x in moved.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """The rows of each sequence."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """x (1, t, …) as one (batch_size, s, …) for each entry of batch_sizes, whose sequences have one length. Raises
        ValueError for another t."""
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(
                f"a tensor of these sequences must be (1, {self.seqstart_py[-1]}, …), got {tuple(x.shape)}"
            )
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[n] for n in (0, *accumulate(sizes))]
        parts = x.split([b - a for a, b in pairwise(ends)], dim=1)
        return [part.reshape(n, part.shape[1] // n, *x.shape[2:]) for n, part in zip(sizes, parts, strict=True)]


@dataclass
class UsedSequenceInfo(SequenceInfo):
    """Sequences of which `seqlen[i]` rows are in use."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length


@dataclass
class PaddedSequenceInfo(UsedSequenceInfo):
    """Blocks of `padding` rows, of which the first `seqlen[i]` are in use."""

    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Any = None) -> PaddedSequenceInfo:
        """Raises ValueError for a length beyond the padding."""
        lengths = list(seqlens)
        if any(n > padding for n in lengths):
            raise ValueError(f"lengths must be at most the padding {padding}, got {lengths}")
        starts = [i * padding for i in range(len(lengths) + 1)]
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        used = _vector(lengths, device)
        return PaddedSequenceInfo(_vector(starts, device), longest, shortest, starts, used, lengths, padding)


@dataclass
class GappySequenceInfo(UsedSequenceInfo):
    """`seqlen[i]` rows from `seqstart[i]` on, anywhere; the last start is the dimension's length. Of pages, each
    sequence has its own: `seqstart[i]` is its first row in use, and `seqlen[i]` the one after its last."""

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Any = None
    ) -> GappySequenceInfo:
        """Raises ValueError unless there is one start for each length, and, without pages, the dimension's length."""
        starts, lengths = list(seqstarts), list(seqlens)
        if len(starts) != len(lengths) + (not paged):
            last = "" if paged else " and the length of the keys' dimension at the end"
            raise ValueError(f"there must be a start for each length{last}, got starts {starts}, lengths {lengths}")
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        if paged:
            lengths = [start + n for start, n in zip(starts, lengths, strict=True)]
            starts.append(-1)
        return GappySequenceInfo(_vector(starts, device), longest, shortest, starts, _vector(lengths, device), lengths)


def usual_device(device: Any) -> Any:
    """The device, or for None the default of xformers: a GPU if there is one."""
    return device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"


def _vector(numbers: list[int], device: Any) -> Tensor:
    vector, device = torch.tensor(numbers, dtype=torch.int32, device="cpu"), torch.device(usual_device(device))
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector.to(device)


class AttentionBias:
    """What `memory_efficient_attention` takes as attn_bias, besides tensors."""

    def to(self, device: Any) -> Self:
        """The same with its tensors on a device."""
        if not is_dataclass(self):
            return self
        held = {x.name: getattr(self, x.name) for x in fields(self)}
        moved = {id(x): x.to(device) for x in held.values() if isinstance(x, (Tensor, SequenceInfo))}
        return replace(self, **{name: moved.get(id(x), x) for name, x in held.items()})


class LowerTriangularMask(AttentionBias):
    """Row i sees keys `j <= i`: causal, aligned at the top left."""

    def __init__(self, device: Any = None) -> None:
        """`device` is not read."""

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask`, and a tensor (b, h, s_q, s_k) that is added to the scores and gets a gradient."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Any) -> LowerTriangularMaskWithTensorBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Row i sees keys `j <= i + s_k - s_q`: causal, aligned at the bottom right."""

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """The last `window_size` keys of those, the row's own included."""

    _window_size: int

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Row i sees keys `i - window_left <= j - (s_k - s_q) <= i + window_right`."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError(f"window bounds must not be negative, got {self.window_left} and {self.window_right}")


@dataclass
class BlockDiagonalMask(AttentionBias):
    """Sequences end to end: query (1, t_q, h, d), key and value (1, t_k, h, d), and each row sees its own sequence."""

    q_seqinfo: SequenceInfo
    k_seqinfo: SequenceInfo
    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Self:
        """Sequences of these lengths; kv_seqlen gives the keys other lengths. On a GPU, if there is one."""
        q = SequenceInfo.from_seqlens(q_seqlen, device=device)
        if kv_seqlen is None or list(kv_seqlen) == list(q_seqlen):
            return cls(q, q)
        _check_counts(q_seqlen, kv_seqlen)
        return cls(q, SequenceInfo.from_seqlens(kv_seqlen, device=device))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Self, Tensor]:
        """Tensors (b_i, s_i, …) end to end, (1, sum of b_i s_i, …), with their bias."""
        bias = cls.from_seqlens(_lengths(tensors), device=tensors[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors]
        return bias, _end_to_end(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[Self, Tensor, Tensor, Tensor | None]:
        """The same for queries, keys and values: the bias, q, k and v (None without values)."""
        bias = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k), device=tensors_q[0].device)
        bias._batch_sizes = [x.shape[0] for x in tensors_q]
        values = None if tensors_v is None else _end_to_end(tensors_v)
        return bias, _end_to_end(tensors_q), _end_to_end(tensors_k), values

    def split_queries(self, tensor: Tensor) -> Sequence[Tensor]:
        """A tensor of the queries' rows, as the tensors that were put end to end."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> Sequence[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """Raises ValueError for keys of other lengths than the queries: say split_queries or split_kv."""
        if self.q_seqinfo is not self.k_seqinfo:
            raise ValueError("queries and keys have different lengths: call split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Row i of a sequence sees its keys `j <= i`: aligned at the top left."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Row i of a sequence sees its keys `j <= i + off`, off keys less rows, which must not be negative."""

    def __post_init__(self) -> None:
        pairs = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for i, ((q_start, q_end), (k_start, k_end)) in enumerate(pairs):
            if k_end - k_start < q_end - q_start:
                raise ValueError(
                    f"each sequence needs as many keys as rows, got {k_end - k_start} keys and {q_end - q_start} rows "
                    f"in sequence {i}"
                )


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """Row i of a sequence sees its keys `i - window_size < j <= i`."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        _check_window(self._window_size)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """Row i of a sequence sees its keys `i - window_size < j - off <= i`."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_window(self._window_size)


@dataclass
class BlockDiagonalPaddedKeysMask(AttentionBias):
    """Keys in blocks of one length, (1, b padding, h, d), of which each sequence uses the first `kv_seqlen`."""

    q_seqinfo: SequenceInfo
    k_seqinfo: PaddedSequenceInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], causal_diagonal: Any = None, *,
        device: Any = None,
    ) -> Self:  # fmt: skip
        """Blocks of kv_padding keys, with kv_seqlen in use. `causal_diagonal` is not read."""
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, device))

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: Any) -> Any:
        """The same keys in the pages of a cache: a `paged_type`."""
        k = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, k, block_tables, page_size)

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Row i of a sequence sees its keys `j <= i + off`, off keys in use less rows."""

    causal_diagonal: Any = None


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Row i of a sequence sees its keys `i - window_left <= j - off <= i + window_right`."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_left: int, window_right: int
    ) -> Self:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Row i of a sequence sees its keys `i - window_size < j - off <= i`."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> Self:
        return cls(*_padded(q_seqlen, kv_padding, kv_seqlen, None), window_size)


@dataclass
class BlockDiagonalGappyKeysMask(AttentionBias):
    """Each sequence sees `kv_seqlen[i]` keys from row `kv_seqstarts[i]` of the keys on; they may overlap."""

    q_seqinfo: SequenceInfo
    k_seqinfo: GappySequenceInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Any = None
    ) -> Self:
        """kv_seqstarts has the length of the keys' dimension at its end."""
        _check_counts(q_seqlen, kv_seqlen)
        q = SequenceInfo.from_seqlens(q_seqlen, device=device)
        return cls(q, GappySequenceInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device))

    def make_paged(self, block_tables: Tensor, page_size: int, notional_padding: int, paged_type: Any) -> Any:
        """Keys in blocks of notional_padding, now in the pages of a cache: a `paged_type`.

        Raises:
            ValueError: a block that is not a number of pages, or keys that begin outside their block.
        """
        info, b = self.k_seqinfo, len(self.k_seqinfo.seqlen_py)
        if notional_padding % page_size:
            raise ValueError(f"notional_padding must be a multiple of page_size, got {notional_padding}, {page_size}")
        starts = [start - i * notional_padding for i, start in enumerate(info.seqstart_py[:-1])]
        if any(not 0 <= start < block_tables.shape[1] * page_size for start in starts):
            raise ValueError(
                f"the keys of sequence i must begin in block i of {notional_padding}, got {info.seqstart_py[:-1]}"
            )
        first = info.seqstart - notional_padding * torch.arange(b + 1, device=info.seqstart.device, dtype=torch.int32)
        k = replace(
            info,
            seqstart=first,
            seqstart_py=[*starts, -1],
            seqlen=first[:-1] + info.seqlen,
            seqlen_py=[start + n for start, n in zip(starts, info.seqlen_py, strict=True)],
        )
        return paged_type(self.q_seqinfo, k, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Row i of a sequence sees its keys `j <= i + off`, off keys less rows."""


@dataclass
class PagedBlockDiagonalPaddedKeysMask(AttentionBias):
    """Keys in the pages of a cache, (1, pages page_size, h, d): without gradients."""

    q_seqinfo: SequenceInfo
    k_seqinfo: PaddedSequenceInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int], block_tables: Tensor, page_size: int, *,
        device: Any = None,
    ) -> Self:  # fmt: skip
        """block_tables (b, width): the pages of each sequence."""
        room = block_tables.shape[1] * page_size
        return cls(*_padded(q_seqlen, room, kv_seqlen, device), block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Row i of a sequence sees its keys `j <= i + off`, off keys in use less rows."""


@dataclass
class PagedBlockDiagonalGappyKeysMask(AttentionBias):
    """Keys in the pages of a cache. Sequence i sees `kv_seqlen[i]` of them, starting at its own `kv_seqstarts[i]`."""

    q_seqinfo: SequenceInfo
    k_seqinfo: GappySequenceInfo
    block_tables: Tensor
    page_size: int

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], block_tables: Tensor,
        page_size: int, *, device: Any = None,
    ) -> Self:  # fmt: skip
        _check_counts(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        q = SequenceInfo.from_seqlens(q_seqlen, device=device)
        k = GappySequenceInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device)
        return cls(q, k, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Row i of a sequence sees its keys `j <= i + off`, off the place after its last key less rows."""


def _check_window(size: int) -> None:
    if size <= 0:
        raise ValueError(f"window_size must be at least 1, got {size}")


def _check_counts(q: Sequence[int], k: Sequence[int]) -> None:
    if len(q) != len(k):
        raise ValueError(
            f"queries and keys must have the same number of sequences, got lengths {list(q)} and {list(k)}"
        )


def _padded(q: Sequence[int], padding: int, k: Sequence[int], device: Any) -> tuple[SequenceInfo, PaddedSequenceInfo]:
    _check_counts(q, k)
    return SequenceInfo.from_seqlens(q, device=device), PaddedSequenceInfo.from_seqlens_padded(
        k, padding, device=device
    )


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(x.shape[0])]


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], 1)
