"""The table of docs/distributed.md: what plans of packed documents keep of one GPU's speed, by the model of
`saccade.distributed.estimates`.

    python docs/figures/simulate_ranks.py             # 8, 64 and 512 ranks: a minute
    python docs/figures/simulate_ranks.py --seeds 1   # of one batch each

Lengths are drawn as MagiAttention's benchmark draws them (https://github.com/SandAI-org/MagiAttention, exps/dist_attn):
a table of intervals with their weights, no document longer than a quarter of the batch. Causal, 64 query and 8 key
heads, d = 128. Each figure is a geometric mean over the seeds.
"""

from __future__ import annotations

import argparse
import random
from statistics import geometric_mean

from saccade.distributed.estimates import BACKWARD, COPIES, FORWARD, INFINIBAND, estimate
from saccade.distributed.sharding import Reach, Sharding

TABLE = {
    (1, 10): 0.22, (11, 50): 2.91, (51, 100): 5.2, (101, 200): 10.23, (201, 500): 28.19, (501, 1024): 24.64,
    (1025, 2048): 15.65, (2049, 4096): 7.34, (4097, 8192): 3.05, (8193, 16384): 1.29, (16385, 32768): 0.85,
    (32769, 65536): 0.14, (65537, 131072): 0.17, (131073, 196608): 0.14,
}  # fmt: skip
"""Lengths of documents, and how many of a hundred have them."""
HEADS, HEAD_DIM, HOST = (64, 8), 128, 8


def drawn(rows: int, seed: int) -> tuple[int, ...]:
    dice, lengths, left = random.Random(seed), [], rows
    while left:
        ((least, most),) = dice.choices(list(TABLE), list(TABLE.values()))
        lengths.append(min(dice.randint(least, most), rows // 4, left))
        left -= lengths[-1]
    dice.shuffle(lengths)
    return tuple(lengths)


def row_of(ranks: int, each: int, seeds: int) -> str:
    plans = [Sharding(drawn(ranks * each, 42 + i), ranks, 1, Reach(None, 0)) for i in range(seeds)]
    pulled = geometric_mean(max(plan.pulled) * 4 * HEADS[1] * HEAD_DIM / 1e6 for plan in plans)
    area = max(max(plan.areas) * ranks / sum(plan.areas) for plan in plans)
    cells = [f"{ranks}, {each // 1024}k", f"{area:.3f}", f"{pulled:.0f} MB"]
    for pace in (FORWARD, BACKWARD):
        for way, host in ((COPIES, None), (COPIES, HOST), (INFINIBAND, None)):
            if host is not None and ranks <= host:
                cells.append("")
                continue
            found = [estimate(plan, HEADS, HEAD_DIM, pace, way, host).efficiency for plan in plans]
            low, high = (geometric_mean(x) for x in zip(*found, strict=True))
            cells.append(f"{low:.2f}–{high:.2f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate plans of packed documents.")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 512])
    args = parser.parse_args()
    places = "NVLink", "hosts of 8", "InfiniBand"
    names = [f"{name}, {place}" for name in ("forward", "backward") for place in places]
    print(f"| ranks, rows of each | scores, most / mean | a rank pulls | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|")
    for each in (8192, 32768):
        for ranks in args.ranks:
            print(row_of(ranks, each, args.seeds), flush=True)


if __name__ == "__main__":
    main()
