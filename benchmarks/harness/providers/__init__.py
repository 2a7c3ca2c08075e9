"""An adapter for each implementation, under its name in rows."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch

from torch.nn.attention import SDPBackend

from benchmarks.harness.providers.base import PeerInputs, Prepared, Provider, prepared
from benchmarks.harness.providers.block_masks import BlockMasks, CopyOfBytes, FlexBlockMasks, Quantize
from benchmarks.harness.providers.ceilings import Copy, Matmul
from benchmarks.harness.providers.eight_bits import CudnnFp8, WiderValues
from benchmarks.harness.providers.flash import FlashAttention3, FlashAttention4, FlashAttnFace
from benchmarks.harness.providers.flex import Flex
from benchmarks.harness.providers.saccade import FORMS, CausalInterval, LeftPadded, Naive, Saccade, SharedPrefix
from benchmarks.harness.providers.sdpa import Sdpa, SdpaPadded, TorchVarlen
from benchmarks.harness.providers.transformers import Transformers
from saccade.ops import dispatch

__all__ = ["CEILINGS", "PROVIDERS", "PeerInputs", "Prepared", "Provider", "matching", "prepared"]

_ALL: list[Provider] = [
    *(Saccade(backend) for backend in dispatch.NAMES if backend != "reference"),
    Saccade("auto"),
    *(Saccade(backend, f"max-scores-{backend}", return_max_scores=True) for backend in ("gluon", "triton")),
    SharedPrefix("auto", "shared-prefix"),
    *(CausalInterval(form) for form in FORMS),
    LeftPadded("gluon", "left-padded"),
    *(WiderValues(backend, f"saccade-{backend}-bf16") for backend in ("gluon", "triton")),
    CudnnFp8(),
    FlashAttention3(),
    FlashAttention4(),
    FlashAttnFace(),
    Transformers(),
    Sdpa(),
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION),
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION),
    SdpaPadded(),
    TorchVarlen(),
    Flex(),
    Naive("reference", "naive"),
    BlockMasks(),
    FlexBlockMasks(),
    Quantize(),
    CopyOfBytes(),
]

PROVIDERS = {provider.name: provider for provider in _ALL}
CEILINGS: tuple[Provider, ...] = (Matmul(), Copy())


def matching(patterns: Iterable[str]) -> list[Provider]:
    """The providers of these names; `saccade-*` matches all that start so.

    Raises:
        ValueError: a pattern matches no name.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in PROVIDERS):
            raise ValueError(f"{pattern!r} matches no provider; the providers are {', '.join(PROVIDERS)}")
    return [provider for name, provider in PROVIDERS.items() if any(fnmatch(name, pattern) for pattern in patterns)]
