"""Lists of keys in every kernel: gathered, or as tables of bits and the tiles that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade import Dense, Packed, alibi, causal, mask_mod, selected, selected_blocks, softcap, window
from saccade.testing.accuracy import check
from tests.masks.test_selected import lists
from tests.support.devices import CPU, EMULATOR, GLUON, INTERPRETER, TRITON, Device, on


def sized(device: Device) -> Device:
    """Two batch rows, and more rows than share a list; on a GPU several tiles of them."""
    if device.type == "cuda":
        return replace(device, b=2, h_q=8, h_k=2, s_q=500, s_k=700)
    return replace(device, b=2, s_q=max(device.s_q, 66), s_k=max(device.s_k, 70))


def lengths(x, n, *shape):
    return torch.randint(0, n + 1, shape, device=x.type, dtype=torch.int32)


def keys(x, *shape, heads=None, dtype=torch.int32, rows=1):
    """Lists of half of the keys."""
    shape = shape or (x.b, heads or x.h_k, -(-x.s_q // rows))
    return lists(*shape, x.s_k // 2, blocks=x.s_k, device=x.type, dtype=dtype)


def blocks(x, size, *, heads=None, rows=1):
    """Lists of half of the blocks of keys."""
    n = -(-x.s_k // size)
    return lists(x.b, heads or x.h_k, -(-x.s_q // rows), n // 2 + 1, blocks=n, device=x.type, dtype=torch.int32)


def tiles(x, size=64, rows=64):
    return selected_blocks(blocks(x, size, heads=x.h_q, rows=rows), size, rows=rows)


def wide_tiles(x):
    entries = blocks(x, 128, heads=x.h_q, rows=128)
    return selected_blocks(entries, 128, lengths(x, entries.shape[-1], *entries.shape[:-1]), rows=128)


MASKS = {
    "keys": lambda x: selected(keys(x)),
    "keys of query heads": lambda x: selected(
        keys(x, 1, x.h_q, x.s_q, dtype=torch.int64), lengths(x, x.s_k // 2, 1, x.h_q, x.s_q)
    ),
    "by batch row": lambda x: selected(keys(x, 1, 1, x.s_q), lengths(x, x.s_k // 2, x.b)),
    "rows": lambda x: selected(keys(x, rows=22), rows=22),
    "blocks": lambda x: selected_blocks(blocks(x, 64)),
    "short blocks": lambda x: selected_blocks(blocks(x, 12), 12),
    "tiles": tiles,
    "wide tiles": wide_tiles,
    "uneven tiles": lambda x: tiles(x, 100, 96),
    "causal": lambda x: selected(keys(x)) & causal(),
    "tiles and causal": lambda x: tiles(x) & causal(),
    "tiles and window": lambda x: tiles(x) & window(30, 9),
    "window": lambda x: selected_blocks(blocks(x, 64)) & window(300, 9),
    "local part": lambda x: (selected_blocks(blocks(x, 16), 16) | window(63, 0)) & causal(),
    "predicate": lambda x: selected(keys(x)) & mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "two": lambda x: selected(keys(x)) & tiles(x),
    "complement": lambda x: ~selected(keys(x)) & causal(),
    "none": lambda x: selected(torch.empty(1, 1, x.s_q, 0, dtype=torch.int32, device=x.type)),
    "strides": lambda x: selected(keys(x, x.b, x.s_q, x.h_k).transpose(1, 2)[..., ::2]),
    "shared": lambda x: selected(keys(x, 1, 1, 1).expand(x.b, x.h_q, x.s_q, -1)),
}


@on(CPU, INTERPRETER, *(replace(x, d=d) for x in (EMULATOR, GLUON, TRITON) for d in (64, 128)))
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name):
    x = sized(device)
    dlse, sink = (torch.randn(shape, device=x.type) for shape in ((x.b, x.h_q, x.s_q), (x.h_q,)))
    check(*x.operands(), mask=MASKS[name](x), dlse=dlse, sink=sink, backend=x.backend).assert_ok()


@pytest.mark.parametrize("name", ["keys", "blocks", "tiles", "tiles and causal"])
def test_deterministic(device, name):
    x = sized(device)
    check(*x.operands(), mask=MASKS[name](x), deterministic=True, backend=x.backend).assert_ok()


@pytest.mark.parametrize("name", ["keys", "tiles", "tiles and causal"])
def test_dropout(device, name):
    x = sized(device)
    check(*x.operands(), mask=MASKS[name](x), dropout_p=0.3, backend=x.backend).assert_ok()


@pytest.mark.parametrize("name", ["keys", "tiles"])
@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_scores(device, score, name):
    x = sized(device)
    score_mod = alibi(torch.rand(x.h_q, device=x.type).requires_grad_()) if score == "alibi" else softcap(9.0)
    check(*x.operands(), mask=MASKS[name](x), score_mod=score_mod, backend=x.backend).assert_ok()


@pytest.mark.parametrize("name", ["keys", "tiles", "tiles and causal"])
@pytest.mark.parametrize("form", ["padded", "offsets"])
def test_padded_and_with_offsets(device, form, name):
    x = sized(device)
    used = torch.tensor([x.s_q, 17], device=x.type), torch.tensor([x.s_k // 2, x.s_k], device=x.type)
    offsets = {"q_offset": torch.tensor([30, x.s_k + 9], device=x.type), "k_offset": 5}
    layout = Dense("bhsd", *used) if form == "padded" else Dense(**offsets)
    check(*x.operands(), mask=MASKS[name](x), layout=layout, backend=x.backend).assert_ok()


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_packed(device, rows):
    x = sized(device)
    q_lengths, k_lengths = (x.s_q // 2, 0, x.s_q, 1, 9), (20, 9, x.s_k, 0, 35)
    layout = Packed.from_lengths(q_lengths, k_lengths, device=x.type)
    t_q, t_k, b = sum(q_lengths), sum(k_lengths), len(q_lengths)
    q, k, v = (x.randn(t, h, x.d) for t, h in ((t_q, x.h_q), (t_k, x.h_k), (t_k, x.h_k)))
    shape = (x.h_k, t_q) if rows == 1 else (b, x.h_k, -(-x.s_q // rows))
    mask = selected(keys(x, *shape), lengths(x, x.s_k // 2, *shape), rows=rows)
    check(q, k, v, mask=mask & causal(), layout=layout, backend=x.backend).assert_ok()
    entries = lists(b, x.h_q, -(-x.s_q // 64), 2, blocks=-(-x.s_k // 64), device=x.type)
    mask = selected_blocks(entries, lengths=lengths(x, 2, b), rows=64)
    check(q, k, v, mask=mask, layout=layout, backend=x.backend).assert_ok()
