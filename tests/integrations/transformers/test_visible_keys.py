"""Masks of transformers as intervals: what they show is what its functions say, for functions of its names always, and
for its own where it is installed."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from saccade import attention
from saccade.integrations.transformers import StructuredMask, attention_mask_of
from saccade.testing import check


@pytest.fixture(params=["installed" if find_spec("transformers") else "stub"])
def utils(request, monkeypatch):
    """transformers.masking_utils, or what stands for it."""
    name = "transformers.masking_utils"
    if request.param == "installed":
        return import_module(name)
    module = ModuleType(name)
    path = Path(__file__).parent / "masking_utils.py"
    exec(compile(path.read_text(), path, "exec"), vars(module))
    for each, stub in (("transformers", ModuleType("transformers")), (name, module)):
        monkeypatch.setitem(sys.modules, each, stub)  # torch.compile looks there for the globals of its functions
    return module


def blocks(ids):
    """A function of another module."""

    def function(b, h, q_idx, kv_idx):
        return (ids[b, q_idx] == ids[b, kv_idx]) & (ids[b, q_idx] >= 0)

    return function


PADDING = {
    "none": None,
    "all": [[1] * 9, [1] * 9],
    "left": [[1] * 9, [0] * 4 + [1] * 5],
    "right": [[1] * 6 + [0] * 3, [1] * 9],
    "both": [[0, 1, 1, 1, 1, 1, 1, 0, 0], [0] * 9],
    "holes": [[1, 1, 0, 1, 1, 0, 1, 1, 1], [1] * 9],
    "short": [[1] * 5, [0] * 2 + [1] * 3],
}
PLACES = {
    "square": (9, 9, 0, 0),
    "decoding": (1, 9, 8, 0),
    "chunk of a prompt": (4, 9, 5, 0),
    "static cache": (4, 9, 2, 0),
    "window of a cache": (3, 6, 6, 3),
    "ahead": (2, 9, 9, 0),
}
FUNCTIONS = {
    "causal": lambda utils: utils.causal_mask_function,
    "all": lambda utils: getattr(utils, "bidirectional_mask_function", lambda b, h, q_idx, kv_idx: q_idx >= 0),
    "window": lambda utils: utils.sliding_window_causal_mask_function(4),
    "window of 1": lambda utils: utils.sliding_window_causal_mask_function(1),
    "chunks": lambda utils: utils.chunked_causal_mask_function(3, torch.tensor([0, 4])),
    "another": lambda utils: lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + b) % 3 != 0,
    "union": lambda utils: utils.or_masks(
        utils.sliding_window_overlay(2), lambda b, h, q_idx, kv_idx: kv_idx < 2 + 0 * q_idx
    ),
    "blocks": lambda utils: utils.or_masks(
        utils.causal_mask_function, blocks(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1]] * 2))
    ),
}


def expected(function, padding, region, b=2):
    """Every pair, by the function itself."""
    s_q, s_k, q_offset, kv_offset = region
    rows, keys = torch.arange(s_q) + q_offset, torch.arange(s_k) + kv_offset
    batch, head = torch.arange(b)[:, None, None, None], torch.zeros(1, 1, 1, 1, dtype=torch.long)
    seen = function(batch, head, rows[None, None, :, None], keys[None, None, None, :]).expand(b, 1, s_q, s_k)
    if padding is not None:
        mask = torch.tensor(padding, dtype=torch.bool)
        mask = torch.nn.functional.pad(mask, (0, max(0, s_k + kv_offset - mask.shape[1])))
        seen = seen & mask[:, None, None, kv_offset : kv_offset + s_k]
    return seen[:, 0]


def shown(made, b=2):
    _, _, s_q, s_k = made.shape
    return torch.ones(b, s_q, s_k, dtype=torch.bool) if made.mask is None else made.mask.visible(s_q, s_k, b)


@pytest.mark.sample
@pytest.mark.parametrize("known_by", ["host", "device", "rows"])
@pytest.mark.parametrize("region", PLACES)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_pair(utils, name, padding, region, known_by):
    function, tokens = FUNCTIONS[name](utils), PADDING[padding]
    s_q, s_k, q_offset, kv_offset = PLACES[region]
    where = {
        "host": {"q_length": s_q, "q_offset": q_offset, "kv_offset": kv_offset},
        "device": {"q_length": s_q, "q_offset": torch.tensor(q_offset), "kv_offset": torch.tensor(kv_offset)},
        "rows": {"cache_position": torch.arange(s_q) + q_offset, "kv_offset": kv_offset},
    }[known_by]
    tokens = None if tokens is None else torch.tensor(tokens, dtype=torch.bool)
    made = attention_mask_of(
        batch_size=2, kv_length=s_k, mask_function=function, attention_mask=tokens, dtype=None, config=None, **where
    )
    assert made.shape == (2, 1, s_q, s_k)
    assert torch.equal(shown(made), expected(function, PADDING[padding], PLACES[region]))


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "another", "union"])
@pytest.mark.parametrize("remapped", [False, True], ids=["indices", "positions"])
def test_packed_sequences(utils, name, remapped):
    """Two batch rows of several sequences, and one of one alone, whose positions begin anywhere."""
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [5, 6, 0, 1, 2, 3, 4, 5, 6]])
    ids = (torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)
    for at in ([0, 1], [0], [1]):
        positions, numbers = position_ids[at], ids[at]
        inner = FUNCTIONS[name](utils)
        if remapped:
            if not hasattr(utils, "remap_positions_for_packed_sequence"):
                pytest.skip("transformers 5")
            inner = utils.remap_positions_for_packed_sequence(inner, positions)
        function = utils.and_masks(utils.packed_sequence_mask_function(numbers), inner)
        made = attention_mask_of(len(at), 9, 9, mask_function=function)
        wanted = expected(function, None, (9, 9, 0, 0), len(at))
        assert torch.equal(shown(made, len(at)), wanted)
    positions = torch.arange(3, 12)[None].expand(2, -1)
    function = utils.and_masks(utils.packed_sequence_mask_function(torch.zeros_like(positions)), inner)
    assert "documents" not in repr(attention_mask_of(2, 9, 9, mask_function=function).mask)


def test_positions_without_their_sequences(utils):
    """Not known, so tested for each pair."""
    if not hasattr(utils, "remap_positions_for_packed_sequence"):
        pytest.skip("transformers 5")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    function = utils.remap_positions_for_packed_sequence(utils.causal_mask_function, positions)
    for whole in (function, utils.and_masks(function, utils.sliding_window_overlay(3))):
        made = attention_mask_of(1, 9, 9, mask_function=whole)
        assert torch.equal(shown(made, 1), expected(whole, None, (9, 9, 0, 0), 1))


@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 9, 9), (2, 1, 1, 9, 9)], ids=str)
def test_masks_of_other_shapes(utils, shape):
    with pytest.raises(ValueError, match=rf"attention_mask must be \(2, tokens\).* got {re.escape(str(shape))}"):
        attention_mask_of(2, 9, 9, mask_function=utils.causal_mask_function, attention_mask=torch.ones(shape))


def test_a_capture_reads_no_values(utils, monkeypatch):
    """A graph's capture may not wait for the device; meta tensors have nothing to read."""
    monkeypatch.setattr("saccade.integrations.transformers.mask.capturing", lambda: True)
    tokens, documents = (
        torch.ones(2, 8, dtype=torch.bool, device="meta"),
        torch.zeros(2, 8, dtype=torch.int64, device="meta"),
    )
    packed = utils.packed_sequence_mask_function(documents)
    made = attention_mask_of(2, 8, 8, mask_function=packed, attention_mask=tokens)
    assert made.padded
    assert made.mask is not None


def test_known_masks_need_no_predicate(utils):
    """Nothing is tested for each pair, and what the host knows is in no tensor."""
    left = torch.tensor(PADDING["left"], dtype=torch.bool)
    for name in ("causal", "window", "chunks"):
        mask = attention_mask_of(2, 9, 9, mask_function=FUNCTIONS[name](utils), attention_mask=left).mask
        assert mask is not None
        assert not mask.block_sparse
        assert sum(x.numel() for x in mask.tensors) <= 4 * 9
    plain = [attention_mask_of(2, 9, 9, mask_function=FUNCTIONS[name](utils)).mask for name in ("causal", "window")]
    assert [repr(mask) for mask in plain] == ["causal", "window(3,0)"]
    if hasattr(utils, "bidirectional_mask_function"):  # transformers 5
        assert attention_mask_of(2, 9, 9, mask_function=FUNCTIONS["all"](utils)).mask is None


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "another"])
def test_attention_takes_them(utils, name, device):
    left = torch.tensor(PADDING["left"], dtype=torch.bool, device=device)
    if name == "chunks":
        function = utils.chunked_causal_mask_function(3, torch.tensor([0, 4], device=device))
    else:
        function = FUNCTIONS[name](utils)
    offset = torch.tensor(4, device=device)
    made = attention_mask_of(2, 5, 9, offset, mask_function=function, attention_mask=left, device=device)
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k = (torch.randn(2, 2, s, 8, device=device, dtype=dtype) for s in (5, 9))
    check(q, k, torch.randn_like(k), mask=made.mask).assert_ok()


def test_what_transformers_does_with_a_mask(utils):
    function = FUNCTIONS["window"](utils)
    made = attention_mask_of(2, 9, 9, torch.tensor(0), mask_function=function)
    assert len(made.shape) == made.ndim == made.dim() == 4
    assert made.contiguous() is made
    assert made.to("cpu") is made
    assert made.to(torch.float16) is made
    assert attention_mask_of(2, 9, 9, mask_function=function).to("meta").mask.tensors == ()
    moved = made.to("meta")
    assert isinstance(moved, StructuredMask)
    assert {x.device.type for x in moved.mask.tensors} == {"meta"}
    assert "StructuredMask(interval" in repr(made)
    with pytest.raises(NotImplementedError, match="works on its mask by itself"):
        made[:, :, :, :3]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "another", "union"])
def test_compiled(utils, name):
    """In a compiled region too, where what a function captures cannot be read."""

    torch._dynamo.reset()

    def masked(q, k, v, tokens):
        function = FUNCTIONS[name](utils)
        made = attention_mask_of(2, 9, 9, mask_function=function, attention_mask=tokens)
        return attention(q, k, v, mask=made.mask)

    q, k, v = (torch.randn(2, 2, 9, 8) for _ in range(3))
    tokens = torch.tensor(PADDING["left"], dtype=torch.bool)
    wanted = masked(q, k, v, tokens)
    torch.testing.assert_close(torch.compile(masked, fullgraph=True, backend="aot_eager")(q, k, v, tokens), wanted)


def test_a_mask_is_an_argument_of_compiled_code(utils):
    """As generation with a static cache passes it: other values compile nothing."""
    layer = torch.compile(lambda q, k, v, made: attention(q, k, v, mask=made.mask), fullgraph=True, backend="aot_eager")
    k, v, q = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 1, 8)
    tokens = torch.tensor(PADDING["left"], dtype=torch.bool)
    with torch.compiler.set_stance("default"):
        for offset in range(5, 9):
            made = attention_mask_of(
                2, 1, 9, torch.tensor(offset), mask_function=FUNCTIONS["window"](utils), attention_mask=tokens
            )
            if offset > 5:
                with torch.compiler.set_stance("fail_on_recompile"):
                    found = layer(q, k, v, made)
            else:
                found = layer(q, k, v, made)
            torch.testing.assert_close(found, attention(q, k, v, mask=made.mask))
