"""Models of transformers on two GPUs: sharded weights, and sequences over ranks. Logits and gradients are as near to
float32 in one process as those of eager attention in bfloat16 there, by half more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from saccade import causal
from saccade.distributed import plan
from saccade.integrations.transformers import NAME
from tests.support.ranks import Pool

pytest.importorskip("transformers")
from tests.integrations.transformers import test_models_gpu as models
from tests.integrations.transformers.test_models_gpu import LENGTHS

pytestmark = pytest.mark.gpu
ROWS = 4, 142


@pytest.fixture(scope="module")
def gpus() -> Any:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with Pool(2, "nccl") as pool:
        yield pool


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in named.items()}


def alone(model: Any, packed: bool) -> dict[str, Tensor]:
    """By one process."""
    parts = models.tokens_of(1, sum(LENGTHS)).split(LENGTHS, 1) if packed else [models.tokens_of(*ROWS)]
    logits = torch.cat([model(x, use_cache=False).logits for x in parts], 1)
    logits.float().square().mean().backward()
    return {"logits": logits.detach()} | gradients(model)


def sharded(model: Any, group: Any) -> dict[str, Tensor]:
    """FSDP2 of layers that are compiled and computed again in the backward; each rank has rows of the batch."""
    mesh = DeviceMesh.from_group(group, models.DEVICE)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile()
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = models.tokens_of(*ROWS).chunk(group.size())[group.rank()]
    logits = model(mine, use_cache=False).logits
    logits.float().square().mean().backward()
    whole = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(whole, logits.detach(), group)
    return {"logits": torch.cat(whole)} | gradients(model)


def over_ranks(model: Any, group: Any) -> dict[str, Tensor]:
    """Each rank has some of the rows of packed sequences."""
    batch = plan(list(LENGTHS), group, mask=causal())
    mine = batch.shard(models.tokens_of(1, sum(LENGTHS))[0])[None]
    logits = model(mine, position_ids=batch.position_ids[None].to(mine.device), use_cache=False, context=batch).logits
    whole = batch.unshard(logits[0].detach())[None]
    (logits[:, : batch.used_rows].float().square().sum() / whole.numel()).backward()
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x, group=group)
    return {"logits": whole} | found


def worst(group: Any, name: str, how: str) -> tuple[float, str]:
    """The largest distance from float32 beside the one that is allowed."""
    packed = how == "over_ranks"
    exact = alone(models.model_of(name, "eager", torch.float32), packed)
    theirs = alone(models.model_of(name, "eager", torch.bfloat16), packed)
    model = models.model_of(name, NAME, torch.bfloat16)
    ours = (over_ranks if packed else sharded)(model, group)
    assert ours.keys() == theirs.keys() == exact.keys()

    def apart(found: dict[str, Tensor], key: str) -> float:
        return (found[key].float() - exact[key]).square().mean().sqrt().item()

    def ratio(key: str) -> float:
        rounding = torch.finfo(torch.bfloat16).eps / 2 * exact[key].square().mean().sqrt().item()
        return apart(ours, key) / (1.5 * (apart(theirs, key) + rounding))

    return max((ratio(key), key) for key in exact)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("how", ["sharded", "over_ranks"])
def test_as_near_to_float32_as_eager_attention(gpus: Pool, name: str, how: str) -> None:
    """On each rank."""
    for ratio, key in gpus.run((str(Path(__file__)), "worst"), 2, name, how, seconds=200):
        assert ratio <= 1, key
