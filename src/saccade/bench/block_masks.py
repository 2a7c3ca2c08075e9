"""What making a block mask takes: time and memory beside torch's `create_block_mask`, one JSON object a line.

    python -m saccade.bench.block_masks [length ...]

Causal documents of about 1300 tokens. Torch's holds the whole mask several times, and is left out where that is more
than the GPU has.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from saccade import block_mask, mask_mod

LENGTHS = 8192, 32768, 131072
REPEATS = 10


def documents(s: int, device: str) -> Callable[..., Any]:
    """The function of a causal document mask."""
    made = torch.Generator().manual_seed(0)
    ids = (torch.rand(s, generator=made) * 1300 < 1).cumsum(0).to(device)
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Median milliseconds of a call, after one that is not counted, and the memory that it takes at its most."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return {"ms": statistics.median(times), "mb": (torch.cuda.max_memory_allocated() - before) / 2**20}


def rows(lengths: tuple[int, ...] = LENGTHS, device: str = "cuda") -> Iterator[dict[str, Any]]:
    from torch.nn.attention.flex_attention import create_block_mask

    gpu = torch.cuda.get_device_name()
    for s in lengths:
        fn = documents(s, device)
        ways = {
            "saccade": lambda fn=fn, s=s: block_mask(mask_mod(fn), 1, 1, s, s),
            "flex": lambda fn=fn, s=s: create_block_mask(fn, None, None, s, s, device=device),
        }
        for provider, call in ways.items():
            row = {"what": "block mask", "s": s, "provider": provider, "gpu": gpu, "torch": torch.__version__}
            try:
                yield row | measured(call)
            except torch.OutOfMemoryError as error:
                yield row | {"error": str(error).splitlines()[0]}


def main() -> None:
    if wrong := [word for word in sys.argv[1:] if not word.isdecimal() or not int(word)]:
        sys.exit(f"python -m saccade.bench.block_masks: lengths are integers from 1 on, got {' '.join(wrong)}")
    if not torch.cuda.is_available():
        sys.exit("python -m saccade.bench.block_masks: needs a GPU, and torch sees none")
    for row in rows(tuple(map(int, sys.argv[1:])) or LENGTHS):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
