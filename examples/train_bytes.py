"""Train a small byte-level transformer on Python's own standard library, with saccade beside PyTorch's attention.

    make demo                              # or: python examples/train_bytes.py --seconds 150

Documents (top-level definitions) lie end to end in rows of 4096 bytes; a byte sees at most the 256 bytes before it, of
its own document. Two copies of one model, of the same seed, get the same batches and the same time:

- saccade:  attention(q, k, v, mask=window(256, 0), layout=Packed(...)): every document is a sequence, none is padded
- SDPA:     F.scaled_dot_product_attention(q, k, v, attn_mask=...), the same mask as a tensor of booleans

First one layer of each is timed alone, and saccade's is checked against its float64 oracle; after the training again,
on the model's own q, k, v. What packing saves is counted, the padding and the masked scores, and all of it is drawn.
"""

from __future__ import annotations

import argparse
import math
import random
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import saccade
from saccade import Packed, attention, window
from saccade.testing import check

LENGTH, WINDOW = 4096, 256
DIM, LAYERS, HEADS, KV_HEADS = 128, 3, 4, 2
WARMUP = 10  # steps

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (b, s, h_q, d), k and v (b, s, h_kv, d) -> (b, s, h_q, d)
Batch = tuple[Tensor, Tensor]  # (b, LENGTH + 1) bytes, and the number of the document that each belongs to
console = Console(soft_wrap=True)


# ---- The text.


def standard_library() -> list[bytes]:
    """The top-level definitions (what two blank lines separate) of the modules of the running Python, shuffled."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    found = [text + b"\n\n\n" for path in files for text in path.read_bytes().split(b"\n\n\n") if text.strip()]
    random.Random(0).shuffle(found)
    return found


def batches(texts: list[bytes], rows: int, device: str) -> Iterator[Batch]:
    """Documents end to end, cut into rows: packed, without padding."""
    lengths = torch.tensor([len(text) for text in texts])
    stream = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).to(device)
    ids = torch.arange(len(texts), dtype=torch.int32).repeat_interleave(lengths).to(device)
    offsets = (torch.arange(rows)[:, None] * LENGTH + torch.arange(LENGTH + 1)).to(device)
    while True:
        for start in range(0, len(stream) - rows * LENGTH, rows * LENGTH):
            yield stream[start + offsets].long(), ids[start + offsets]


# ---- The model: its attention is an argument of forward.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d = DIM // HEADS
        self.norm_in, self.norm_mid = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * self.d, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        b, s, _ = x.shape
        heads = self.qkv(self.norm_in(x)).view(b, s, -1, self.d)  # (b, s, h_q + 2 h_kv, d)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.proj(out.reshape(b, s, DIM))
        return x + self.down(F.gelu(self.up(self.norm_mid(x))))


class ByteModel(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False)
        d = DIM // HEADS
        angles = torch.arange(LENGTH)[:, None, None] * 1e4 ** (-torch.arange(d // 2) / (d // 2))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.zeros_(self.head.weight)  # every byte equally likely at first: the loss starts at ln 256 = 5.545

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, attend)
        return self.head(self.norm(x))


# ---- The two attentions: what to call for one batch of document ids (b, s).


def with_saccade(ids: Tensor) -> Attend:
    offsets = document_offsets(ids)
    layout = Packed(offsets, offsets, LENGTH, LENGTH)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))  # (b s, h, d): the documents end to end, and nothing else
        return attention(*rows, mask=window(WINDOW, 0), layout=layout).unflatten(0, q.shape[:2])

    return attend


def document_offsets(ids: Tensor) -> Tensor:
    """Where each document begins and the last one ends; rows are cut wherever they end, which begins a new one."""
    first = ids.diff(dim=1, prepend=ids[:, :1] - 1) != 0
    return F.pad(first.flatten().nonzero()[:, 0], (0, 1), value=ids.numel())


def with_sdpa(ids: Tensor) -> Attend:
    i = torch.arange(LENGTH, device=ids.device)
    behind = i[:, None] - i
    allowed = (behind >= 0) & (behind <= WINDOW) & (ids[:, :, None] == ids[:, None, :])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=allowed[:, None], enable_gqa=True).transpose(1, 2)

    return attend


# ---- Training: both get the same time, in turns, so that a busy machine slows both alike.


@dataclass
class Contender:
    """One copy of the model, the attention that it uses, its data, and what was measured."""

    name: str
    attention: Callable[[Tensor], Attend]
    model: ByteModel
    data: Iterator[Batch]
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.03, weight_decay=0.0),
            torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95)),
        ]
        # The rate depends on the step alone, so that both take the same path, one farther than the other.
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in self.optimizers]

    def step(self, device: str) -> None:
        tokens, ids = next(self.data)
        start = now(device)
        loss = training_loss(self.model, tokens, ids, self.attention(ids[:, :-1]))  # making the mask counts too
        self.model.zero_grad()
        loss.backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.losses.append(loss.item())
        self.seconds.append(now(device) - start)

    def loss_at(self, step: int) -> float:
        """The mean over the ten steps before; every batch is new to the model, so no other is held out."""
        recent = self.losses[max(step - 10, 0) : step]
        return sum(recent) / max(len(recent), 1)


def rate(step: int) -> float:
    return min(1.0, (step + 1) / WARMUP, math.sqrt(4 * WARMUP / (step + 1)))


def training_loss(model: ByteModel, tokens: Tensor, ids: Tensor, attend: Attend) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(tokens[:, :-1], attend)
    # Nobody can know the first byte of a document from the last one of another.
    target = tokens[:, 1:].masked_fill(ids[:, 1:] != ids[:, :-1], -100)
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def train(contenders: list[Contender], seconds: float, device: str) -> None:
    columns = (BarColumn(), TimeRemainingColumn(compact=True), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the first step", total=seconds)
        while (spent := sum(sum(c.seconds) for c in contenders)) < seconds or not all(c.losses for c in contenders):
            min(contenders, key=lambda c: sum(c.seconds)).step(device)
            text = "   ".join(
                f"{c.name}: step {len(c.losses)}, loss {c.loss_at(len(c.losses)):.3f}" for c in contenders
            )
            progress.update(task, completed=spent, description=text)
        progress.update(task, completed=seconds)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- What came out.


def trained_qkv(contender: Contender, tokens: Tensor, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The q, k, v of every layer for one batch."""
    seen = []
    attend = contender.attention(ids[:, :-1])

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return attend(q, k, v)

    with torch.no_grad():
        training_loss(contender.model, tokens, ids, spy)
    return seen


def attention_seconds(
    contenders: list[Contender], qkv: tuple[Tensor, Tensor, Tensor], ids: Tensor, repeats: int = 7
) -> list[float]:
    """Attention alone, forward and backward, one layer: the median of samples taken in turns, less the first."""
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    attends = [contender.attention(ids[:, :-1]) for contender in contenders]
    samples: list[list[float]] = [[] for _ in contenders]
    for _ in range(repeats):
        for attend, times in zip(attends, samples, strict=True):
            start = now(q.device.type)
            torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
            times.append(now(q.device.type) - start)
    return [median(times[1:]) for times in samples]


def agrees_with_oracle(layers: list[tuple[Tensor, Tensor, Tensor]], ids: Tensor) -> bool:
    """Forward and backward of each layer's first 1024 positions against float64, under the one tolerance."""
    offsets = document_offsets(ids[:1, :1024])
    layout = Packed(offsets, offsets, 1024, 1024)
    worst = max(check(*(x[0, :1024] for x in qkv), mask=window(WINDOW, 0), layout=layout).ratio for qkv in layers)
    verdict = "[green]right[/]" if worst <= 1 else "[red]wrong[/]"
    of = "every layer" if len(layers) > 1 else "a layer"
    console.print(
        f"Attention of {of}, forward and backward, against the oracle: {worst:.2f} of the tolerance, {verdict}."
    )
    return worst <= 1


def report_saving(batches: list[Tensor]) -> None:
    """What packing saves, counted: in every layer the padding to a batch's longest document, and in attention scores
    besides."""
    packed = padded = seen = dense = square = 0
    for ids in batches:
        lengths = document_offsets(ids).diff()
        longest, near = int(lengths.max()), lengths.clamp(max=WINDOW + 1)
        packed += ids.numel()
        padded += len(lengths) * longest
        # The first rows of a document see fewer keys than the window has.
        seen += int((near * (near + 1) // 2 + (lengths - near) * (WINDOW + 1)).sum())
        dense += ids.shape[1] * ids.numel()
        square += len(lengths) * longest**2
    console.print(
        f"Padded to the longest document of its batch, {1 - packed / padded:.0%} of all rows would be padding, in each "
        f"layer; packed, none is. A byte sees {seen / packed:,.0f} scores in a head; under a mask tensor "
        f"{dense / packed:,.0f} are computed, and of padded batches {square / packed:,.0f}."
    )


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds > 0.1 else 2}f} ms"


def report(contenders: list[Contender], attention_times: list[float], tokens: int) -> None:
    common = min(len(c.losses) for c in contenders)
    table = Table("", "steps", "loss", f"at step {common}", "tokens/s", "a step", "attention")
    for c, seconds in zip(contenders, attention_times, strict=True):
        losses = [f"{c.loss_at(step):.3f}" for step in (len(c.losses), common)]
        times = [f"{tokens / median(c.seconds):,.0f}", milliseconds(median(c.seconds)), milliseconds(seconds)]
        table.add_row(c.name, str(len(c.losses)), *losses, *times)
    console.print(table)


def first_result(contenders: list[Contender], tokens: Tensor, ids: Tensor) -> None:
    """One layer of the models as they are before training, seconds after the start."""
    layers = trained_qkv(contenders[0], tokens, ids)[:1]
    agrees_with_oracle(layers, ids)
    ours, theirs = attention_seconds(contenders, layers[0], ids, repeats=2)
    console.print(
        f"A layer's attention takes saccade {milliseconds(ours)}, and SDPA with a mask tensor {milliseconds(theirs)}: "
        f"[bold]{theirs / ours:.1f} times as fast[/]."
    )


def visible(ids: Tensor, cells: int = 512) -> Tensor:
    """Where scores of a row are computed, for every eighth byte: 0 is nowhere, documents are 1 and 2 in turns."""
    of = ids[:: len(ids) // cells]
    i = torch.arange(len(of)) * (len(ids) // cells)
    behind = i[:, None] - i
    seen = (behind >= 0) & (behind <= WINDOW) & (of[:, None] == of)
    return seen * (1 + of % 2)


def draw(contenders: list[Contender], attention_times: list[float], ids: Tensor, path: Path) -> None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        console.print(f"No picture: {path} needs matplotlib; pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    colors = ("#0b6e8f", "#e08a1e")
    figure, (square, curves, bars) = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=(5, 6, 5), layout="constrained")

    seen = visible(ids)
    square.imshow(seen.numpy(), cmap=ListedColormap(["#f3f4f6", colors[0], "#7cc3d8"]), vmin=0, vmax=2)
    square.set(xlabel="key", ylabel="query", xticks=[], yticks=[])
    documents = f"{len(document_offsets(ids[None])) - 1} documents in {LENGTH} bytes"
    square.set_title(f"{documents}:\n{(seen > 0).float().mean():.0%} of the scores are computed")

    for c, color in zip(contenders, colors, strict=True):
        steps = range(1, len(c.losses) + 1)
        smooth = [c.loss_at(step) for step in steps]
        times = list(accumulate(c.seconds))
        curves.plot(times, smooth, color=color, lw=2.5, label=f"{c.name}: {smooth[-1]:.2f} after {len(steps)} steps")
        curves.plot(times[-1], smooth[-1], "o", color=color, ms=9)
    curves.set(xlabel="seconds of training", ylabel="nats per byte, mean of 10 steps", title="Loss, in the same time")
    curves.set_xlim(0)
    curves.grid(alpha=0.25)
    curves.legend(frameon=False, loc="upper right")

    groups = {"training step": [median(c.seconds) for c in contenders], "attention alone,\none layer": attention_times}
    for i, c in enumerate(contenders):
        places = [group + 0.38 * i for group in range(len(groups))]
        drawn = bars.barh(places, [1e3 * times[i] for times in groups.values()], 0.34, color=colors[i], label=c.name)
        bars.bar_label(drawn, [milliseconds(times[i]) for times in groups.values()], padding=4)
    bars.set_yticks([group + 0.19 for group in range(len(groups))], list(groups))
    bars.invert_yaxis()
    bars.margins(x=0.3)
    bars.locator_params(axis="x", nbins=5)
    bars.set(xlabel="milliseconds (less is better)", title="Time, forward and backward")
    bars.tick_params(axis="y", length=0)
    bars.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    console.print(f"The picture is {path}.")


def pick_device(wanted: str | None) -> str:
    if wanted or not torch.cuda.is_available():
        return wanted or "cpu"
    ids = torch.zeros(1, 128, dtype=torch.int32, device="cuda")
    q = torch.zeros(1, 128, HEADS, DIM // HEADS, dtype=torch.bfloat16, device="cuda")
    try:
        with_saccade(ids)(q, q, q)
    except saccade.Unsupported as reasons:
        console.print(f"[yellow]There is a GPU, but not for this call yet, so this runs on the CPU:[/]\n{reasons}")
        return "cpu"
    return "cuda"


def main() -> None:
    parser = argparse.ArgumentParser(description="A byte-level transformer on saccade, beside the same on SDPA.")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time, for both models together")
    parser.add_argument("--out", type=Path, default=Path("train_bytes.png"), help="where the picture goes")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default the GPU, when there is one")
    args = parser.parse_args()
    device = pick_device(args.device)

    console.print(f"[bold]1. A first result[/], on {device}")
    texts = standard_library()
    contenders = []
    for name, attention_of in (("saccade", with_saccade), ("SDPA", with_sdpa)):
        torch.manual_seed(0)
        data = batches(texts, 1 if device == "cpu" else 16, device)
        contenders.append(Contender(name, attention_of, ByteModel().to(device), data))
    parameters = sum(p.numel() for p in contenders[0].model.parameters())
    first_result(contenders, *next(contenders[0].data))
    contenders[0].data = batches(texts, 1 if device == "cpu" else 16, device)
    console.print(f"[bold]2. {args.seconds:g} seconds of training[/], the two in turns, on the same bytes")
    console.print(
        f"{len(texts):,} definitions of Python's standard library, {sum(map(len, texts)) / 1e6:.1f} MB; "
        f"a model of {parameters / 1e6:.2f} million parameters"
    )
    train(contenders, args.seconds, device)

    console.print("[bold]3. What came out[/]")
    tokens, ids = next(contenders[0].data)
    layers = trained_qkv(contenders[0], tokens, ids)
    times = attention_seconds(contenders, layers[0], ids)
    report(contenders, times, ids[:, :-1].numel())
    rows = [next(contenders[0].data)[1][:, :-1] for _ in range(50)]
    report_saving(rows)
    right = agrees_with_oracle(layers, ids)
    fullest = max((row.cpu() for batch in rows for row in batch), key=lambda row: len(document_offsets(row[None])))
    draw(contenders, times, fullest, args.out)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
