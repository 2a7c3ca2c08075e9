"""Train a small transformer on long documents over several processes, and the same model in one: the losses are equal.

    torchrun --nproc-per-node 2 examples/train_long.py                  # two processes on CPUs, less than a minute
    torchrun --nproc-per-node 8 examples/train_long.py --rows 262144    # with GPUs: one for each process

Documents are definitions of the standard library of Python, as bytes, end to end, not padded. `plan` says which rows
each rank has. Everything of the model but attention sees rows alone; attention(…, context=plan) sees the documents.
Gradients of weights are summed over the ranks, as in data parallelism.
"""

from __future__ import annotations

import argparse
import os
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import Packed, attention, causal
from saccade.distributed import ContextPlan, plan

DIM, LAYERS, HEADS, KEY_HEADS = 64, 2, 4, 2
IGNORED = -100  # the label of a document's last byte


# ---- The text: a batch is documents end to end.


def definitions() -> list[bytes]:
    """What two blank lines separate in its modules: some short, some long."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [text for path in sorted(root.glob("*.py")) for text in path.read_bytes().split(b"\n\n\n") if text.strip()]
    random.Random(0).shuffle(texts)
    return texts


def batch(texts: list[bytes], step: int, rows: int) -> tuple[Tensor, list[int]]:
    """(rows,) bytes, and the lengths of documents; the last one is cut."""
    at, chosen, left = step * 50, [], rows
    while left:
        text = texts[at % len(texts)][:left]
        chosen.append(text)
        at, left = at + 1, left - len(text)
    return torch.frombuffer(bytearray(b"".join(chosen)), dtype=torch.uint8).long(), [len(text) for text in chosen]


# ---- The model. `where` is a plan, or the layout of one process.


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.split(half, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = DIM // HEADS
        self.norm_in, self.norm_mid = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KEY_HEADS) * self.d, bias=False)
        self.out, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, positions: Tensor, where: ContextPlan | Packed) -> Tensor:
        heads = self.qkv(self.norm_in(x)).unflatten(-1, (-1, self.d))  # (rows, h, d)
        q, k, v = heads.split((HEADS, KEY_HEADS, KEY_HEADS), dim=1)
        q, k = rotated(q, positions), rotated(k, positions)
        if x.device.type == "cuda":
            q, k, v = (y.bfloat16() for y in (q, k, v))
        if isinstance(where, ContextPlan):
            seen = attention(q, k, v, mask=causal(), context=where)
        else:
            seen = attention(q, k, v, mask=causal(), layout=where)
        x = x + self.out(seen.flatten(1).to(x.dtype))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, DIM), nn.Linear(DIM, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor, positions: Tensor, where: ContextPlan | Packed) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions, where)
        return self.head(x)


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, positions: Tensor, where: ContextPlan | Packed) -> Tensor:
    """The sum over these rows."""
    logits = model(tokens, positions, where)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


# ---- Training, over ranks and in one process.


def new_model(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ByteModel().to(device, torch.float32 if "cuda" in device else torch.float64)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def over_ranks(
    model: nn.Module, optimizer: torch.optim.Optimizer, texts: list[bytes], steps: int, rows: int, device: str
) -> list[float]:
    """The losses of all rows, on each rank."""
    losses = []
    for step in range(steps):
        tokens, lengths = batch(texts, step, rows)
        shared = plan(lengths, mask=causal(), heads=(HEADS, KEY_HEADS), head_dim=DIM // HEADS)
        if step == 0 and dist.get_rank() == 0:
            print(shared.explain(), shared.draw(), sep="\n", flush=True)
        mine = shared.shard(tokens.to(device))
        labels = shared.roll(mine, -1, fill=IGNORED)
        loss = loss_of(model, mine, labels, shared.position_ids, shared) / rows
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def in_one_process(texts: list[bytes], steps: int, rows: int, device: str) -> list[float]:
    model, optimizer = new_model(device)
    losses = []
    for step in range(steps):
        tokens, lengths = batch(texts, step, rows)
        layout = Packed.from_lengths(lengths, device=device)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
        labels = tokens.roll(-1)
        labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORED
        loss = loss_of(model, tokens.to(device), labels.to(device), positions, layout) / rows
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on long documents over ranks, and in one process.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4096, help="bytes of a batch, over all ranks")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun: torchrun --nproc-per-node 2 examples/train_long.py")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local}" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device != "cpu":
        torch.cuda.set_device(local)
    # The model before the group: what torch imports for an optimizer keeps a group that is there, whose threads would
    # then go on while the process ends.
    model, optimizer = new_model(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")

    texts = definitions()
    start = time.perf_counter()
    losses = over_ranks(model, optimizer, texts, args.steps, args.rows, device)
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        alone = in_one_process(texts, args.steps, args.rows, device)
        for step, (a, b) in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step:3}: loss {a:.6f} over {dist.get_world_size()} ranks, {b:.6f} in one process")
        worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        allowed = 1e-9 if device == "cpu" else 2e-2  # float64; on GPUs attention is in bfloat16
        print(f"{args.steps} steps in {seconds:.1f} s; the losses differ by {worst:.1e}")
        if not worst <= allowed:
            raise SystemExit(f"the losses of ranks are not those of one process: {worst:.1e} > {allowed}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
