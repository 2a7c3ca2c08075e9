"""Training steps of released trainers' own models: by saccade, by their own attention, and by unfused float32.

    python -m benchmarks.engines.training megatron [--steps 20] [--out rows.jsonl]
    python -m benchmarks.engines.training torchtitan | flash_attn | xformers | transformer_engine

Small models of random weights, in one process, on a GPU if there is one; each run starts from the same weights and
sees the same tokens. Rows: the largest relative distance of a step's loss from that in float32, `apart`; its `ratio` to
the package's own attention's; the median of a step in milliseconds, without the first. On a CPU torchtitan has no
attention of its own that trains.

Of packages that are compiled for CUDA the Python suffices, which their wheels and archives contain: then their own
attention is the unfused one of flash-attn and TransformerEngine, and xformers' runs PyTorch's kernels on a GPU, and its
reference on a CPU. Their attention is in the layers of `Decoder`. The Python of flash-attn:

    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps flash-attn einops
"""

from __future__ import annotations

import argparse
import enum
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.harness.machine import Run
from saccade.compat import install, torch_varlen
from saccade.compat.transformer_engine import DotProductAttention
from saccade.compat.xformers import memory_efficient_attention
from saccade.integrations.megatron import CoreAttention
from saccade.integrations.torch import activate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, ROWS, LENGTH = 512, 2, 256
HEADS, D = 8, 64
WIDTH = HEADS * D
Loss = Callable[[nn.Module, Tensor], Tensor]
"""Of a model and tokens (b, s + 1)."""
Made = tuple[str, nn.Module, Loss]
"""`float32`, `own` or `saccade`; what trains; its loss."""


def _module(name: str) -> Any:
    """Of a package that is not there when this is imported."""
    return import_module(name)


def _devices() -> None:
    """Megatron and TransformerEngine ask CUDA where they are."""
    if DEVICE == "cpu":
        torch.cuda.current_device = lambda: "cpu"


def megatron() -> Iterator[Made]:
    """GPTModel of Megatron-core by its local layers, whose attention is unfused: in float32, and in bfloat16."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    _devices()
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


class Decoder(nn.Module):
    """Layers of `mix`, a module of (b, s, c), between learned positions and a head."""

    def __init__(self, mix: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.mixers = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), mix()) for _ in range(4))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for mix, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + mix(x)
            x = x + mlp(x)
        return self.head(x)


class Mixer(nn.Module):
    """Projections around a function of q (b, s, h_q, d), and of k and v (b, s, h_k, d)."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], key_heads: int) -> None:
        super().__init__()
        self.attend, self.heads = attend, (HEADS, key_heads, key_heads)
        self.qkv, self.out = nn.Linear(WIDTH, D * sum(self.heads)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).split(self.heads, 2)
        return self.out(self.attend(q, k, v).reshape(x.shape))


def decoders(mixers: dict[str, Callable[[], nn.Module]]) -> Iterator[Made]:
    """float32's weights become the others'."""

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    for name, mix in mixers.items():
        torch.manual_seed(0)
        yield name, Decoder(mix).to(DEVICE, torch.float32 if name == "float32" else torch.bfloat16), loss


def flash_attn() -> Iterator[Made]:
    """MHA of flash-attn 2: unfused, which is what it does by default, and by its functions, of which saccade's are
    imported under their names. On a CPU, where its class takes no tensors, this has the call that the class makes."""
    install("flash_attn")
    mha = _module("flash_attn.modules.mha")
    if DEVICE == "cpu":
        mha.FlashCrossAttention.forward = lambda self, q, kv, **_: mha.flash_attn_kvpacked_func(
            q, kv, 0.0, causal=self.causal, softmax_scale=self.softmax_scale, window_size=self.window_size
        )
    made = partial(mha.MHA, WIDTH, HEADS, num_heads_kv=2, causal=True)
    yield from decoders({"float32": made, "own": made, "saccade": partial(made, use_flash_attn=True)})


def xformers() -> Iterator[Made]:
    """memory_efficient_attention over packed documents, by xformers' own masks."""
    ops, biases, reference = (_module(f"xformers.{x}") for x in ("ops", "ops.fmha.attn_bias", "attn_bias_utils"))
    _module("xformers.ops.fmha.common")._built_with_cuda = True  # which PyTorch's kernels, that it calls, do not need
    lengths = [96, 96, LENGTH - 192] * ROWS
    bias = biases.BlockDiagonalCausalMask.from_seqlens(lengths, device=torch.device(DEVICE))

    def packed(function: Callable[..., Tensor], *qkv: Tensor) -> Tensor:
        return function(*(x.flatten(0, 1)[None] for x in qkv), attn_bias=bias).to(qkv[0].dtype)

    unfused = partial(packed, reference.ref_attention)
    own = partial(packed, ops.memory_efficient_attention) if DEVICE == "cuda" else unfused
    functions = {"float32": unfused, "own": own, "saccade": partial(packed, memory_efficient_attention)}
    yield from decoders({name: partial(Mixer, x, HEADS) for name, x in functions.items()})


class _Here(TorchFunctionMode):
    """Tensors that code makes on "cuda" are where the model is."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = kwargs or {}
        return function(*args, **words | ({"device": DEVICE} if words.get("device") == "cuda" else {}))


def transformer_engine() -> Iterator[Made]:
    """DotProductAttention beside TransformerEngine's UnfusedDotProductAttention, whose code calls nothing compiled."""
    _devices()
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_MASKED_SOFTMAX_FUSION": "0"}
    compiled = MagicMock(__spec__=None)
    for name, members in {
        "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
        "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
    }.items():
        setattr(compiled, name, enum.IntEnum(name, members))
    absent = "transformer_engine.pytorch.onnx_extensions"  # which needs ONNX
    sys.modules |= {"transformer_engine_torch": compiled, absent: MagicMock()}
    _module("transformer_engine.common").load_framework_extension = lambda *_: None
    backends = _module("transformer_engine.pytorch.attention.dot_product_attention.backends")

    def unfused() -> nn.Module:
        core = backends.UnfusedDotProductAttention(D**-0.5)

        def attend(*qkv: Tensor) -> Tensor:
            with _Here():
                return core({}, *qkv, qkv_layout="bshd_bshd_bshd")

        return Mixer(attend, 2)

    def ours() -> nn.Module:
        return Mixer(DotProductAttention(HEADS, D, 2, 0.0, qkv_format="bshd"), 2)

    yield from decoders({"float32": unfused, "own": unfused, "saccade": ours})


TRAINERS: dict[str, tuple[str, Callable[[], Iterator[Made]]]] = {
    "megatron": ("megatron-core", megatron),
    "torchtitan": ("torchtitan", torchtitan),
    "flash_attn": ("flash-attn", flash_attn),
    "xformers": ("xformers", xformers),
    "transformer_engine": ("transformer-engine", transformer_engine),
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
