"""The classes themselves: what they hold, split and become, beside those of an installed xformers."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch

from saccade.compat.xformers import attn_bias

_spec = importlib.util.spec_from_file_location("biases", Path(__file__).with_name("biases.py"))
biases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(biases)


def held(x):
    """Fields of a bias as plain data."""
    if isinstance(x, torch.Tensor):
        return x.tolist()
    if dataclasses.is_dataclass(x):
        return {field.name: held(getattr(x, field.name)) for field in dataclasses.fields(x)}
    return list(x) if isinstance(x, (list, tuple)) else x


@pytest.mark.parametrize("example", biases.EXAMPLES, ids=lambda example: example.name)
def test_fields_are_those_of_xformers(example):
    module = pytest.importorskip("xformers.ops.fmha.attn_bias")
    ours, theirs = (biases.made(m, example, "cpu") for m in (attn_bias, module))
    assert held(ours) == held(theirs) or not dataclasses.is_dataclass(theirs)
    assert list(inspect.signature(type(ours)).parameters) == list(inspect.signature(type(theirs)).parameters)
    for name in ("from_seqlens", "from_seqlens_local"):
        if hasattr(theirs, name):
            wanted = inspect.signature(getattr(theirs, name)).parameters
            assert list(inspect.signature(getattr(ours, name)).parameters) == list(wanted)


def test_tensors_end_to_end(module):
    """A list of tensors, some of several sequences, and back."""
    parts = [torch.randn(2, 3, 4), torch.randn(1, 5, 4)]
    bias, x = module.BlockDiagonalMask.from_tensor_list(parts)
    assert x.shape == (1, 11, 4)
    assert bias.q_seqinfo.seqstart.tolist() == [0, 3, 6, 11]
    for found, part in zip(bias.split(x), parts, strict=True):
        assert torch.equal(found, part)


def test_queries_and_keys_end_to_end(module):
    q, k = [torch.randn(1, 3, 4), torch.randn(1, 2, 4)], [torch.randn(1, 5, 4), torch.randn(1, 6, 4)]
    bias, all_q, all_k, all_v = module.BlockDiagonalMask.from_tensor_lists_qkv(q, k, k)
    assert torch.equal(all_k, all_v)
    assert torch.equal(bias.split_queries(all_q)[1], q[1])
    assert torch.equal(bias.split_kv(all_k)[1], k[1])
    with pytest.raises((ValueError, AssertionError)):
        bias.split(all_q)


def test_empty_sequences_split():
    bias, x = attn_bias.BlockDiagonalMask.from_tensor_list([torch.randn(1, 0, 4), torch.randn(1, 2, 4)])
    assert [part.shape for part in bias.split(x)] == [(1, 0, 4), (1, 2, 4)]


def test_pages_of_padded_keys(module):
    bias = module.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        [1, 2], 8, [4, 7], device=torch.device("cpu")
    )
    tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    paged = bias.make_paged(tables, 4, module.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    assert (paged.k_seqinfo.padding, paged.k_seqinfo.seqlen.tolist()) == (8, [4, 7])
    assert paged.block_tables is tables


def test_pages_of_gappy_keys(module):
    bias = module.BlockDiagonalGappyKeysMask.from_seqlens([1, 2], [1, 10, 16], [3, 6], device=torch.device("cpu"))
    tables = torch.tensor([[0, 1], [3, 2]], dtype=torch.int32)
    paged = bias.make_paged(tables, 4, 8, module.PagedBlockDiagonalGappyKeysMask)
    assert paged.k_seqinfo.seqstart[:2].tolist() == paged.k_seqinfo.seqstart_py[:2] == [1, 2]
    assert paged.k_seqinfo.seqlen.tolist() == paged.k_seqinfo.seqlen_py == [4, 8]


@pytest.mark.parametrize("name", ["PagedBlockDiagonalGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetGappyKeysMask"])
def test_gappy_pages_of_lengths(name):
    cls = getattr(attn_bias, name)
    found = cls.from_seqlens(biases.ROWS, biases.STARTS, biases.LENGTHS, biases.tables("cpu"), 4)
    wanted = held(biases.gappy_pages(attn_bias, cls, "cpu"))
    wanted["k_seqinfo"]["seqstart"][-1] = -1  # which no one reads
    assert held(found) == wanted


def test_one_record_for_queries_and_keys_stays_one():
    bias = attn_bias.BlockDiagonalMask.from_seqlens([3, 4], device="cpu").to(torch.device("meta"))
    assert bias.q_seqinfo is bias.k_seqinfo
    assert bias.q_seqinfo.seqstart.is_meta


def test_wrong_numbers():
    with pytest.raises(ValueError, match="at most the padding 4"):
        attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5], device="cpu")
    with pytest.raises(ValueError, match="length of the keys' dimension at the end"):
        attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [5], device="cpu")
    with pytest.raises(ValueError, match="the same number of sequences"):
        attn_bias.BlockDiagonalMask.from_seqlens([1], [2, 3], device="cpu")
    with pytest.raises(ValueError, match="at least 1"):
        attn_bias.LowerTriangularFromBottomRightMask().make_local_attention(0)
    with pytest.raises(ValueError, match="must not be negative"):
        attn_bias.LocalAttentionFromBottomRightMask(-1, 0)
