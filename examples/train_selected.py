"""Trains a small byte-level model to recall: each row attends to the blocks of keys that it selects.

    python examples/train_selected.py --picture selected.png

A text is pairs of bytes, a name and its value; the second half asks for values of the first half. An indexer scores
blocks of eight keys by their means, each row sees the four best ones and its own, and learning to recall is learning to
select. Beside it are a window of as many keys, which never reaches the answer, and dense attention.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from saccade import Mask, attention, causal, selected_blocks, window

PAIRS, NAMES, VALUES = 64, 26, 10
"""Pairs of a text, half of which ask; different names and values."""
BLOCK, BLOCKS = 8, 4
"""Keys of a block, and blocks that a row selects besides its own."""
WIDTH, HEADS = 48, 2


def texts(n: int, generator: torch.Generator) -> Tensor:
    """(n, 2 PAIRS) bytes: each name of the first half has one value, which the second half gives again."""
    names = torch.rand(n, max(NAMES, PAIRS // 2), generator=generator).argsort(1)[:, : PAIRS // 2] % NAMES
    value_of = torch.randint(0, VALUES, (n, NAMES), generator=generator)
    asked = torch.randint(0, PAIRS // 2, (n, PAIRS // 2), generator=generator)
    names = torch.cat([names, names.gather(1, asked)], 1)
    return torch.stack([names + ord("a"), value_of.gather(1, names) + ord("0")], 2).flatten(1)


def selecting(q: Tensor, k: Tensor) -> Mask:
    """The blocks that each row selects: those whose mean of keys is most like its query, of whole blocks before it."""
    s = q.shape[2]
    means = k.detach().unflatten(2, (-1, BLOCK)).mean(3)
    score = q.detach() @ means.mT
    own, blocks = torch.arange(s)[:, None] // BLOCK, torch.arange(s // BLOCK)
    top = score.masked_fill(blocks >= own, -math.inf).topk(BLOCKS).indices
    top = torch.where(top < own, top, -1)  # the first rows have fewer
    return selected_blocks(torch.cat([top, own.expand(*top.shape[:3], 1)], -1), BLOCK) & causal()


MASKS: dict[str, Callable[[Tensor, Tensor], Mask]] = {
    "selected": selecting,
    "window": lambda q, k: window(BLOCK * (BLOCKS + 1) - 1, 0),
    "dense": lambda q, k: causal(),
}


class Model(nn.Module):
    """One layer. A key knows the byte before it, so that it can be found by a name."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Mask]) -> None:
        super().__init__()
        self.mask = mask
        self.embed = nn.Embedding(256, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.last = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        rows = self.q(x), self.k(before), self.v(x)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in rows)
        seen = attention(q, k, v, mask=self.mask(q, k))
        return self.last(x + self.out(seen.transpose(1, 2).flatten(2)))


def loss_of(model: Model, text: Tensor) -> Tensor:
    """Of the values that the second half asks for, in nats."""
    logits = model(text)[:, PAIRS::2]  # at the names of the second half
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, PAIRS + 1 :: 2].flatten())


def train(name: str, seed: int, steps: int) -> list[float]:
    """Held-out losses, every tenth of the way."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model, held_out = Model(MASKS[name]), texts(64, torch.Generator().manual_seed(1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, texts(16, generator)).backward()
        optimizer.step()
        if (step + 1) % max(1, steps // 10) == 0:
            with torch.no_grad():
                losses.append(float(loss_of(model, held_out)))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--picture", help="where to draw the losses, with matplotlib")
    given = parser.parse_args()
    torch.set_num_threads(1)  # products are so small that more threads wait for one another
    curves = {}
    for name in MASKS:
        start = time.perf_counter()
        runs = [train(name, seed, given.steps) for seed in range(given.seeds)]
        curves[name] = [sum(losses) / len(losses) for losses in zip(*runs, strict=True)]
        took = time.perf_counter() - start
        print(f"{name:9} held-out loss {curves[name][-1]:.3f} (mean of {given.seeds} seeds), {took:.0f} s", flush=True)
    print(f"guessing  {math.log(VALUES):.3f}")
    if given.picture:
        import matplotlib.pyplot as plt

        for name, losses in curves.items():
            at = [(i + 1) * given.steps / len(losses) for i in range(len(losses))]
            plt.plot(at, losses, label=name)
        plt.xlabel("step")
        plt.ylabel("held-out loss, nats")
        plt.legend()
        plt.savefig(given.picture)


if __name__ == "__main__":
    main()
