"""Training steps of released trainers' own models: by saccade, by their own attention, and by unfused float32.

    python -m benchmarks.engines.training megatron [--steps 20] [--out rows.jsonl]
    python -m benchmarks.engines.training torchtitan

Small models of random weights, in one process, on a GPU if there is one; each run starts from the same weights and
sees the same tokens. Rows: the largest relative distance of a step's loss from that in float32, `apart`; its `ratio` to
the package's own attention's; the median of a step in milliseconds, without the first. On a CPU torchtitan has no
attention of its own that trains.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.machine import Run
from saccade.compat import torch_varlen
from saccade.integrations.megatron import CoreAttention
from saccade.integrations.torch import activate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, ROWS, LENGTH = 512, 2, 256
Loss = Callable[[nn.Module, Tensor], Tensor]
"""Of a model and tokens (b, s + 1)."""
Made = tuple[str, nn.Module, Loss]
"""`float32`, `own` or `saccade`; what trains; its loss."""


def _module(name: str) -> Any:
    """Of a package that is not there when this is imported."""
    return import_module(name)


def megatron() -> Iterator[Made]:
    """GPTModel of Megatron-core by its local layers, whose attention is unfused: in float32, and in bfloat16."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    if DEVICE == "cpu":  # which Megatron asks of CUDA, and keeps random numbers of dropout for
        torch.cuda.current_device = lambda: "cpu"
    parallel_state, random, gpt, specs, transformer = (
        _module(f"megatron.core.{x}")
        for x in (
            "parallel_state", "tensor_parallel.random", "models.gpt", "models.gpt.gpt_layer_specs",
            "transformer.transformer_config",
        )
    )  # fmt: skip
    torch.distributed.init_process_group("gloo" if DEVICE == "cpu" else "nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cpu":
        random.get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    else:
        random.model_parallel_cuda_manual_seed(0)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril().logical_not()
    positions = torch.arange(LENGTH, device=DEVICE).expand(ROWS, -1)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:]).float().mean()

    for name, core, dtype in (
        ("float32", None, torch.float32),
        ("own", None, torch.bfloat16),
        ("saccade", CoreAttention, torch.bfloat16),
    ):
        torch.manual_seed(0)
        config = transformer.TransformerConfig(
            num_layers=4, hidden_size=512, num_attention_heads=8, num_query_groups=2, params_dtype=dtype,
            bf16=dtype == torch.bfloat16, use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,
            bias_activation_fusion=False,
        )  # fmt: skip
        spec = specs.get_gpt_layer_local_spec()
        if core is not None:
            spec.submodules.self_attention.submodules.core_attention = core
        model = gpt.GPTModel(config, spec, WORDS, LENGTH, position_embedding_type="learned_absolute")
        yield name, model.to(DEVICE, dtype), loss


def torchtitan() -> Iterator[Made]:
    """Llama 3's debugging model over packed documents, by its VarlenAttention: q, k and v in bfloat16, all else not."""
    layers, llama3 = (_module(f"torchtitan.models.{x}") for x in ("common.attention", "llama3"))
    # Its layers would activate FlashAttention-3, which is not on every machine; PyTorch has FlashAttention-2.
    _module("torchtitan.tools.utils").get_cuda_flash_attention_impl = lambda: None
    positions = torch.arange(LENGTH, device=DEVICE).remainder(96).expand(ROWS, -1)
    documents = (positions == 0).cumsum(1)
    seen = (documents[:, None, :, None] == documents[:, None, None]) & torch.ones(
        LENGTH, LENGTH, dtype=torch.bool, device=DEVICE
    ).tril()
    masks = layers.create_varlen_metadata_for_document(positions)

    def unfused(_: Any, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, **__: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        scores = model(tokens[:, :-1], positions, masks)
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten())

    own = layers.VarlenAttention.forward
    for name in ("float32", "own", "saccade") if DEVICE == "cuda" else ("float32", "saccade"):
        torch.manual_seed(0)
        model = llama3.llama3_configs["debugmodel"](attn_backend="varlen").build()
        model.init_states()
        layers.VarlenAttention.forward = unfused if name == "float32" else own
        if name == "saccade" and DEVICE == "cuda":
            activate()
        elif name == "saccade":
            layers.varlen_attn = torch_varlen.varlen_attn
        yield name, model.to(DEVICE), loss


TRAINERS: dict[str, tuple[str, Callable[[], Iterator[Made]]]] = {
    "megatron": ("megatron-core", megatron),
    "torchtitan": ("torchtitan", torchtitan),
}


def trained(model: nn.Module, loss: Loss, steps: int) -> tuple[list[float], float]:
    """The losses, and the median of a step in milliseconds."""
    optimizer, g = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        tokens = torch.randint(0, WORDS // 8, (ROWS, LENGTH + 1), generator=g).to(DEVICE)
        start = time.perf_counter()
        optimizer.zero_grad()
        found = loss(model, tokens)
        found.backward()
        optimizer.step()
        losses.append(found.item())  # which waits
        seconds.append(time.perf_counter() - start)
    return losses, 1e3 * statistics.median(seconds[1:])


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("trainer", choices=TRAINERS)
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--out", type=Path)
    words.add_argument("--commit")
    given = words.parse_args()
    package, make = TRAINERS[given.trainer]
    run = Run.now(torch.device(DEVICE), given.commit)
    right: list[float] = []
    of_own = None
    for name, model, loss in make():
        losses, ms = trained(model, loss, given.steps)
        right = right or losses
        apart = max(abs(x - y) / abs(y) for x, y in zip(losses, right, strict=True))
        of_own = apart if name == "own" else of_own
        row = {"step": given.trainer, "release": metadata.version(package), "provider": name, "ms": round(ms, 3)}
        row |= {"first": losses[0], "last": losses[-1], "apart": apart}
        if name == "saccade" and of_own:
            row |= {"ratio": round(apart / of_own, 3)}
        print(row, flush=True)
        run.append(given.out, row)


if __name__ == "__main__":
    main()
