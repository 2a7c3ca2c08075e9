"""The backward of 8-bit operands' values: by the oracle of these values, which gives k and v gradients as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Descale, Packed, Partial, attention, causal, explain, softcap, window
from saccade.testing import check

E4M3 = torch.float8_e4m3fn
B, H_Q, H_K, D = 2, 4, 2, 16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def powers(*shape: int, seed: int = 0) -> Tensor:
    """Factors of which values of 16 bits are products without rounding."""
    return torch.randint(-3, 3, shape, generator=torch.Generator().manual_seed(seed)).float().exp2()


def bytes_of(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).to(E4M3)


def right(q: Tensor, k: Tensor, v: Tensor, factors: list[Tensor], values: list[Tensor], **keywords: Any) -> None:
    """Queries of more bits over bytes k and v, whose `values` are those of the same factors by hand."""
    descale = Descale(None, *factors, backward="dequantized")

    def both(q: Tensor, k_value: Tensor, v_value: Tensor, *, sink: Tensor | None = None, **options: Any) -> Any:
        """The call, and for the gradients of k and v alone that of the values."""
        found = attention(q, k, v, descale=descale, sink=sink, **options)
        sink = None if sink is None else sink.detach()
        other = attention(q.detach(), k_value, v_value, sink=sink, **options)
        if isinstance(found, Tensor):
            return found
        return Partial(*(x + (y - y.detach()).nan_to_num() for x, y in zip(found, other, strict=True)))

    check(q, *values, function=both, dlse=keywords.pop("dlse", None), **keywords).assert_ok()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [False, True], ids=["heads", "blocks"])
def test_dense_and_padded(blocks: bool, dtype: torch.dtype):
    s = 200
    q, k, v = random(B, H_Q, s, D).to(dtype), bytes_of(B, H_K, s, D, seed=1), bytes_of(B, H_K, s, D, seed=2)
    factors = [powers(B, H_K, 2, seed=i) if blocks else powers(B, H_K, seed=i) for i in (3, 4)]
    rows = torch.arange(s) // 128
    of_rows = [x[:, :, rows, None] if blocks else x[:, :, None, None] for x in factors]
    values = [(x.float() * y).to(dtype) for x, y in zip((k, v), of_rows, strict=True)]
    right(q, k, v, factors, values, mask=causal(), dlse=random(B, H_Q, s, seed=5))
    right(q, k, v, factors, values, mask=window(30, 5), score_mod=softcap(3.0), sink=random(H_Q, seed=6))
    layout = Dense(seqused_q=torch.tensor([7, 200]), seqused_k=torch.tensor([150, 0]))
    for x in (k, v):
        x.view(torch.uint8)[0, :, 150:] = 0x7F  # NaN
    right(q, k, v, factors, values, layout=layout)


@pytest.mark.parametrize("blocks", [False, True], ids=["heads", "blocks"])
def test_packed(blocks: bool):
    lengths = [150, 0, 1, 130]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    t, b = int(ends[-1]) + 9, len(lengths)
    q, k, v = random(t, H_Q, D), bytes_of(t, H_K, D, seed=1), bytes_of(t, H_K, D, seed=2)
    factors = [powers(b, H_K, 2, seed=i) if blocks else powers(b, H_K, seed=i) for i in (3, 4)]
    values = [x.float() for x in (k, v)]
    for x, factor in zip(values, factors, strict=True):
        for i, n in enumerate(lengths):
            for j in range(n):
                x[int(ends[i]) + j] *= factor[i, :, j // 128, None] if blocks else factor[i, :, None]
    right(q, k, v, factors, values, layout=Packed(ends, max_seqlen_q=150), mask=causal())
    if not blocks:
        shared = [powers(H_K, seed=i) for i in (5, 6)]
        starts, used = torch.tensor([0, 20, 100, 3]), torch.tensor([150, 10, 40, 0])
        layout = Packed(ends, starts_k=starts, seqused_k=used)
        values = [x.float() * y[None, :, None] for x, y in zip((k, v), shared, strict=True)]
        right(q, k, v, shared, values, layout=layout)


def test_sink_and_captures_of_8_bit_queries():
    """Which have no gradient themselves."""
    q, k, v = (bytes_of(B, h, 50, D, seed=h + i) for i, h in enumerate((H_Q, H_K, H_K)))
    sink, factor = random(H_Q).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    leaves = sink, factor

    def gradients(*operands: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"sink": sink, "score_mod": lambda score, b, h, i, j: score * factor}
        out = attention(*operands, mask=causal(), **options, **keywords)
        return torch.autograd.grad(out.float().sum(), leaves)

    found = gradients(q, k, v, descale=Descale(0.5, 2.0, 0.25, backward="dequantized"))
    wanted = gradients(q.float() * 0.5, k.float() * 2, v.float() / 4)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).norm() <= 2**-6 * y.norm()


def test_compiled_and_mapped():
    q, k, v = random(B, H_Q, 40, D), bytes_of(B, H_K, 40, D, seed=1), bytes_of(B, H_K, 40, D, seed=2)
    descale = Descale(k=powers(B, H_K), backward="dequantized")

    def loss(q: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, descale=descale, mask=causal()).square().sum()

    wanted = torch.func.grad(loss)(q, v)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf = q.clone().requires_grad_()
    compiled(leaf, v).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, wanted)
    several = torch.stack([q, 2 * q])
    mapped = torch.func.vmap(torch.func.grad(loss), (0, None))(several, v)
    torch.testing.assert_close(mapped, torch.stack([torch.func.grad(loss)(x, v) for x in several]))


@pytest.mark.parametrize("changed", ["k", "v", "factors of k", "factors of v"])
def test_what_changes_before_the_backward(changed: str):
    """A backward that reads it again refuses; the reference has kept the values."""
    q = random(B, H_Q, 40, D).requires_grad_()
    k, v = bytes_of(B, H_K, 40, D, seed=1), bytes_of(B, H_K, 40, D, seed=2)
    factors = [powers(B, H_K, 1, seed=i) for i in (3, 4)]
    given = {"k": k, "v": v, "factors of k": factors[0], "factors of v": factors[1]}[changed]

    def loss(backend: str) -> Tensor:
        descale = Descale(None, *factors, backward="dequantized")
        return attention(q, k, v, descale=descale, mask=causal(), backend=backend).square().sum()

    early, late, kept, wanted = (loss(backend) for backend in ("cpu", "cpu", "reference", "reference"))
    early.backward()
    (wanted,) = torch.autograd.grad(wanted, q)
    (given.view(torch.uint8) if given.dtype == E4M3 else given).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward()
    assert torch.equal(torch.autograd.grad(kept, q)[0], wanted)


def test_explained():
    q, k, v = random(B, H_Q, 40, D), bytes_of(B, H_K, 40, D), bytes_of(B, H_K, 40, D)
    assert "cpu: chosen, without a backward" in str(explain(q, k, v))
    assert explain(q, k, v, descale=Descale(backward="dequantized")).gradient == "cpu"
