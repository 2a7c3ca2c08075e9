"""`plan`: from lengths and a group to a ContextPlan."""

from __future__ import annotations

import marshal
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.distributed import pull
from saccade.distributed.context_plan import ContextPlan
from saccade.distributed.estimates import divided_bytes, exchange_seconds, gathered_bytes
from saccade.distributed.exchanges import heads_error
from saccade.distributed.groups import Ranks, check_order, ranks_of
from saccade.distributed.sharding import PairSharding, Reach, Sharding, reach_of
from saccade.layouts.validate import check_offsets, shortened
from saccade.masks import Mask
from saccade.util import arguments
from saccade.util.caches import BoundedCache

METHODS = "auto", "gather", "pull", "ulysses"
ROWS = "balanced", "equal", "pairs"
LONGEST = 1e9
"""Seconds, 30 years: what clocks of all libraries hold."""
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}

# The key is the value of every argument, as bytes or numbers: nothing is known by where it is or by which object holds
# it. Lengths and the offsets of the same lengths have a key each, of one plan.
_plans: BoundedCache[Any, ContextPlan] = BoundedCache(128)


def plan(
    documents: list[int] | Tensor | tuple[int, int],
    group: Any = None,
    *,
    heads: tuple[int, int] | int | None = None,
    head_dim: int | None = None,
    mask: Mask | None = None,
    method: str = "auto",
    rows: str | int = "balanced",
    rank: int | None = None,
    timeout: float | None = None,
    debug: bool = False,
) -> ContextPlan:
    """The plan of which rank has which rows: equal rows and equal scores for each rank, and few documents cut.

    Formula: each of R ranks has `T / R` of the T rows, up to one row, and computes `A / R` of the A scores, up to those
    of one row. Nothing is communicated. The plan depends on the arguments alone, which must be equal on all ranks.

    Args:
        documents: a list of lengths, or an integer tensor (b + 1,) of offsets `cu_seqlens`, of documents end to end,
            (t, h, d); any lengths. Or a tuple (b, s) for a dense batch, whose rows are all sharded alike along s. Each
            call reads the numbers of a tensor. On a GPU it then waits for the device. With a list it does not wait.
        group: a ProcessGroup; a DeviceMesh of one dimension, or of two, whose last divides heads; None for all ranks;
            or a number of ranks, to look at a plan without processes.
        heads: (h_q, h_k), or one number for both. `auto` and `explain` estimate bytes from heads and head_dim.
        head_dim: d.
        mask: the widest mask of the calls: `causal()`, `window(…)` and what `&` makes of them decide who sees what.
            Any other, and None, counts as if every row saw its whole document. Calls may have narrower masks.
        method: "gather": keys and values go to the ranks whose rows see them, by a collective. "pull": ranks read them
            out of each other's memory, on GPUs of one host. "ulysses": each rank computes all rows of some heads.
            "auto": "pull" if the ranks are GPUs of one host according to torchrun's LOCAL_WORLD_SIZE, else "gather".
            With heads and head_dim it takes "ulysses" where the bytes say that this is faster.
        rows: "balanced". Or "equal": all ranks have `ceil(T / R)` rows, of which one may be padding. Or a number: each
            rank has so many rows, so that shapes do not change from batch to batch. Rows of padding are the last ones.
            They belong to no document and see nothing. Their results and gradients are zero. Or "pairs", as loaders for
            TransformerEngine and Megatron: each document is cut into 2 R chunks, and rank r has chunks r and
            2 R - 1 - r. Lengths must be multiples of 2 R.
        rank: which of a number of ranks this is.
        timeout: seconds after which an exchange on CPUs raises an error that names the rank and the stage. With "pull"
            a device that waits stops after this time. None is the group's own timeout, which NCCL's collectives
            always have.
        debug: True compares the ranks' plans, stages and shapes before each exchange on GPUs too, instead of before the
            first of its kind. CPUs always compare them.

    Raises:
        ValueError: lengths that are negative or no integers, offsets that decrease, a process that is not in the group,
            a method that does not exist or that the heads do not allow.
        TypeError: arguments of other types.

    Source: balanced by cutting a line of documents in the order of their scores per row; any part of a causal document
    is taken from both of its ends, as in Brandon et al., Striped Attention (arXiv 2311.09431), and zigzag rings.
    "ulysses" is Jacobs et al., DeepSpeed-Ulysses (arXiv 2309.14509).

    >>> from saccade import causal, distributed
    >>> made = distributed.plan([7, 12, 3, 40], 2, rank=0, mask=causal())
    >>> made.rows, made.pieces[-1]
    (31, Piece(document=3, start=31, stop=40))
    >>> print(made.draw(20))
    ContextPlan(4 documents, 62 rows over 2 ranks, gather); a sign is 2 rows
         0 1111 7
         1 000000 12
         2 11 3
         3 00000111111111110000 40
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; it is one of {', '.join(METHODS)}")
    if rows not in ROWS:
        _check_rows(rows)
    counted = _heads(heads)
    if head_dim is not None:
        arguments.integer("head_dim", head_dim, least=1)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask such as causal(), or None, got {arguments.describe(mask)}")
    if timeout is not None:
        timeout = _seconds(timeout)
    ranks, reach = ranks_of(group, rank, method == "ulysses"), reach_of(mask)
    key = _written(documents), ranks, counted, head_dim, reach, method, rows, timeout, debug
    found = None if key[0] is None else _plans.get(key)
    if found is None:
        arguments.flags(debug=debug)
        check_order(group)
        asked = Request(*_lengths(documents), *key[1:])
        found = _plans.get(asked)
        if found is None:
            found = _plans.put(asked, _made(asked))
        if key[0] is not None:
            _plans.put(key, found)
    return found


class Request(NamedTuple):
    """What a plan is made of."""

    lengths: tuple[int, ...]
    batch: int | None
    ranks: Ranks
    heads: tuple[int, int] | None
    head_dim: int | None
    reach: Reach
    method: str
    rows: str | int
    timeout: float | None
    debug: bool


def _made(asked: Request) -> ContextPlan:
    lengths, batch, ranks, heads, head_dim, reach, method, rows, timeout, debug = asked
    pairs = rows == "pairs"
    shared = Sharding(lengths, ranks.parts, 1, reach)
    chosen, word, why = _method(asked._replace(method="gather") if pairs and method == "auto" else asked, shared)
    if pairs:
        _check_pairs(lengths, chosen)
    sharding = (PairSharding if pairs else Sharding)(lengths, chosen.parts, chosen.heads, reach)
    if sharding == shared:  # which has the pieces, if `auto` compared methods
        sharding = shared
    each = None if pairs or rows == "balanced" else _rows_of_each(asked, sharding)
    made = ContextPlan(sharding, chosen, word, why, batch, heads, head_dim, timeout, debug, each)
    if ranks.rows_group or ranks.heads_group:
        if method == "pull" and not pull.reachable(ranks.device):
            raise ValueError(
                "method='pull' needs GPUs that reach each other's memory, and a group of NCCL, got ranks on "
                f"{ranks.device}: 'gather' runs everywhere"
            )
        made.prepare()
    return made


def _rows_of_each(asked: Request, sharding: Sharding) -> int:
    """How many rows every rank has, padding included."""
    most = max(sharding.rows)
    if isinstance(asked.rows, str):
        return most
    if asked.rows < most:
        raise ValueError(
            f"rows={asked.rows} is too few: {sum(asked.lengths)} rows over {asked.ranks.size} ranks need {most}"
        )
    return int(asked.rows)


def _check_rows(rows: Any) -> None:
    if isinstance(rows, str):
        raise ValueError(f"unknown rows {rows!r}; it is one of {', '.join(ROWS)}, or a number of rows for each rank")
    arguments.integer("rows", rows, least=0)


def _check_pairs(lengths: tuple[int, ...], ranks: Ranks) -> None:
    if ranks.heads > 1:
        raise ValueError("rows='pairs' works with method='gather' or 'pull', and not with a mesh of two dimensions")
    if any(n % (2 * ranks.size) for n in lengths):
        raise ValueError(
            f"rows='pairs' over {ranks.size} ranks needs lengths that are multiples of {2 * ranks.size}, got "
            f"{shortened(list(lengths))}: rows='balanced' takes any"
        )


def _written(documents: Any) -> bytes | None:
    """The numbers of documents as one value that is quickly compared; None for what `_lengths` has to look at first."""
    if isinstance(documents, Tensor):
        return _offsets(documents)
    try:
        return marshal.dumps(documents, 2)  # with their types: neither True nor 1.0 is 1
    except ValueError:  # integers of other libraries, or no numbers
        return None


def _offsets(documents: Tensor) -> bytes:
    """cu_seqlens as 64-bit integers: read, whatever has written them."""
    if documents.dim() != 1 or not len(documents) or documents.dtype not in INTEGERS:
        raise ValueError(
            f"a tensor of documents holds offsets cu_seqlens, integers (b + 1,), got {arguments.describe(documents)}"
        )
    memory = bytearray(8 * len(documents))
    torch.frombuffer(memory, dtype=torch.int64).copy_(documents)
    return bytes(memory)


def _lengths(documents: Any) -> tuple[tuple[int, ...], int | None]:
    """Of each document; and the batch rows of a dense batch."""
    if isinstance(documents, Tensor):
        offsets = memoryview(_offsets(documents)).cast("q").tolist()
        return tuple(check_offsets("cu_seqlens", offsets, offsets[-1])), None
    if isinstance(documents, tuple):
        if len(documents) != 2:
            raise TypeError(f"a tuple is the shape (b, s) of a batch; lengths are a list, got {len(documents)} numbers")
        b, s = (int(arguments.integer("b and s", x)) for x in documents)
        return (s,), b
    if not isinstance(documents, list):
        raise TypeError(
            "documents must be a list of lengths, a tensor of offsets cu_seqlens or a tuple (b, s), got "
            f"{arguments.describe(documents)}"
        )
    if set(map(type, documents)) - {int} or (documents and min(documents) < 0):
        documents = [int(arguments.integer("a length", x)) for x in documents]
    return tuple(documents), None


def _seconds(timeout: Any) -> float:
    if isinstance(timeout, (bool, Tensor)):
        raise TypeError(f"timeout must be a number of seconds, got {arguments.describe(timeout)}")
    if not 0 < (seconds := arguments.number("timeout", timeout)) <= LONGEST:
        raise ValueError(f"timeout must be a positive number of seconds, up to {LONGEST:.0e}, got {timeout}")
    return seconds


def _heads(heads: Any) -> tuple[int, int] | None:
    if heads is None:
        return None
    pair: tuple[Any, ...] = tuple(heads) if isinstance(heads, (tuple, list)) else (heads, heads)
    if len(pair) != 2:
        raise TypeError(f"heads must be (h_q, h_k) or one number, got {len(pair)} numbers")
    h_q, h_k = pair
    for name, x in (("h_q", h_q), ("h_k", h_k)):
        arguments.integer(name, x, least=1)
    if h_q % h_k:
        raise ValueError(f"h_q must be a multiple of h_k, got heads {(h_q, h_k)}")
    return h_q, h_k


def _method(asked: Request, shared: Sharding) -> tuple[Ranks, str, str]:
    """The ranks as the method groups them, its name, and why. shared: the rows where no rank divides heads."""
    lengths, batch, ranks, heads, head_dim, _, method, *_ = asked
    if heads is not None and ranks.heads > 1 and (error := heads_error(ranks.heads, *heads)):
        raise ValueError(f"{error}: use method='gather', or a smaller last dimension of the mesh")
    if ranks.heads > 1 and ranks.parts > 1:
        sharing = method if method != "auto" else _sharing(ranks)[0]
        return ranks, f"ulysses×{sharing}", "the last dimension of the mesh divides heads"
    if method != "auto":
        return ranks, method, "as asked for"
    if ranks.heads > 1:
        return ranks, "ulysses", "the last dimension of the mesh divides heads"
    if ranks.size == 1:
        return ranks, "gather", "one rank has everything"
    sharing, why = _sharing(ranks)
    if heads is None or head_dim is None:
        return ranks, sharing, f"without heads and head_dim the number of bytes is unknown; {why}"
    if error := heads_error(ranks.size, *heads):
        return ranks, sharing, f"{error}; {why}"
    if heads[0] // ranks.size & (heads[0] // ranks.size - 1):
        many = f"dropout needs a power of two of heads for each rank, not {heads[0] // ranks.size}"
        return ranks, sharing, f"{many}; {why}"
    pieces = sharing == "pull" and batch is None
    gathered = (batch or 1) * gathered_bytes(shared, heads, head_dim, pieces)
    divided = (batch or 1) * divided_bytes(sum(lengths), ranks.size, heads, head_dim)
    times = exchange_seconds(sharing, ranks.size, gathered), exchange_seconds("ulysses", ranks.size, divided)
    reason = (
        f"{gathered / 1e6:.1f} MB of keys for a rank ({1e3 * times[0]:.2f} ms by {sharing}) beside "
        f"{divided / 1e6:.1f} MB of rows for heads ({1e3 * times[1]:.2f} ms); {why}"
    )
    if times[1] >= times[0]:
        return ranks, sharing, reason
    # The same ranks as one part that divides heads.
    return ranks._replace(heads=ranks.size, rows_group="", heads_group=ranks.rows_group), "ulysses", reason


def _sharing(ranks: Ranks) -> tuple[str, str]:
    """How ranks share keys, and why."""
    if (obstacle := pull.obstacle(ranks.rows_group, ranks.device)) is not None:
        return "gather", f"no pull: {obstacle}"
    return "pull", "GPUs of one host reach each other's memory"
