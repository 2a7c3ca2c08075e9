"""Calls of tensors on one device, where another one is torch's default."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import (
    Dense,
    Packed,
    Paged,
    alibi,
    append_kv,
    attention,
    bias,
    causal,
    documents,
    interval,
    mask_mod,
    merge,
    prefix,
    quantize,
    relative_bias,
    softcap,
    t5_bias,
    window,
)

PACKAGE = Path(saccade.__file__).parent
MAKERS = {
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
}
S, H, D = 32, 4, 16
TABLES = {
    "slopes": (H,), "bias": (H, S, S), "t5": (32, H), "relative": (H, 2 * S - 1),
    "cache": (5, 16, H, D), "new": (2, 3, H, D),
}  # fmt: skip


@pytest.fixture
def given() -> Any:
    """Tensors on the CPU, made before the default is another device, whose tensors hold nothing."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in TABLES.items()}
    tensors |= {name: torch.randn(1, H, S, D) for name in "qkv"}
    tensors["offsets"], tensors["ids"] = torch.tensor([0, 10, S]), torch.arange(S)[None] // 5
    tensors["used"], tensors["table"] = torch.tensor([20, 9]), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    yield tensors
    torch.set_default_device(None)


def calls(x: dict[str, Tensor], backend: str) -> list[Any]:
    """Results of every kind of mask, score and layout."""
    q, k, v = (x[name].requires_grad_() for name in "qkv")
    keywords: list[dict[str, Any]] = [
        {},
        {"mask": causal(), "return_lse": True},
        {"mask": window(3, 2)},
        {"mask": prefix(5)},
        {"mask": documents(x["ids"])},
        {"mask": interval(2, 9)},
        {"mask": mask_mod(lambda b, h, i, j: (i + j) % 3 != 0)},
        {"mask": x["bias"][0] > 0},
        {"score_mod": softcap(3.0)},
        {"score_mod": alibi(x["slopes"])},
        {"score_mod": bias(x["bias"])},
        {"score_mod": t5_bias(x["t5"])},
        {"score_mod": relative_bias(x["relative"])},
        {"score_mod": lambda s, b, h, i, j: s + x["slopes"][h] * (i - j)},
        {"sink": x["slopes"]},
        {"layout": Dense("bhsd", x["used"][:1], x["used"][:1])},
    ]
    found: list[Any] = []
    for more in keywords:
        for dtype in (torch.float32, torch.bfloat16):
            out = attention(q.to(dtype), k.to(dtype), v.to(dtype), backend=backend, **more)
            out = out if isinstance(out, Tensor) else out.out
            found += [out.detach(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]
    ragged = [y.detach()[0].transpose(0, 1).contiguous() for y in (q, k, v)]
    found.append(attention(*ragged, layout=Packed(x["offsets"]), mask=causal(), backend=backend))
    paged = Paged(x["table"], x["used"])
    cache, rows = x["cache"].clone(), x["new"]
    found.append(attention(rows, cache, cache, layout=paged, mask=causal(), backend=backend))
    append_kv(cache, cache.clone(), paged, x["new"], x["new"])
    found.append(cache)
    parts = [attention(q, y, z, return_lse=True) for y, z in ((k[:, :, :9], v[:, :, :9]), (k[:, :, 9:], v[:, :, 9:]))]
    found.append(merge(*parts).out.detach())
    found += [y for y in quantize(*(y.detach() for y in (q, k, v)))[:3] if y is not None]
    return found


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_calls(given: dict[str, Tensor], backend: str) -> None:
    exact = calls({name: x.clone() for name, x in given.items()}, backend)
    torch.set_default_device("meta")
    found = calls(given, backend)
    assert all(x.device.type == "cpu" for x in found)
    assert len(found) == len(exact)
    for x, y in zip(found, exact, strict=True):
        assert torch.equal(x.float().nan_to_num(), y.float().nan_to_num())


def test_dropout(given: dict[str, Tensor]) -> None:
    q, k, v = (given[name].requires_grad_() for name in "qkv")

    def dropped() -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        out = attention(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    exact = dropped()
    torch.set_default_device("meta")
    assert all(torch.equal(x, y) for x, y in zip(dropped(), exact, strict=True))


def test_compiled(given: dict[str, Tensor]) -> None:
    torch.set_default_device("meta")
    q, k, v = (given[name] for name in "qkv")
    slopes = given["slopes"]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=window(5, 0), score_mod=alibi(slopes))

    torch.testing.assert_close(call(q, k, v), attention(q, k, v, mask=window(5, 0), score_mod=alibi(slopes)))


def without_device(tree: ast.AST) -> list[int]:
    """Lines of calls that make a tensor wherever torch's default is."""
    found = [line for child in ast.iter_child_nodes(tree) for line in without_device(child)]
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and isinstance(tree.func.value, ast.Name):
        made = tree.func.value.id == "torch" and tree.func.attr in MAKERS
        if made and not {"device", None} & {x.arg for x in tree.keywords}:
            found.append(tree.lineno)
    return found


def test_tensors_that_are_made_name_their_device() -> None:
    files = [x for x in PACKAGE.rglob("*.py") if x.relative_to(PACKAGE).parts[0] not in ("cli", "testing")]
    assert len(files) > 200
    assert without_device(ast.parse("torch.zeros(3)\ntorch.zeros(3, device=x)\ntorch.zeros(3, **more)")) == [1]
    found = {str(x.relative_to(PACKAGE)): without_device(ast.parse(x.read_text(encoding="utf-8"))) for x in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
