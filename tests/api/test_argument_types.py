"""Arguments of other types than they should have, at every door: refused by name."""

from __future__ import annotations

import math
import re

import pytest
import torch

from saccade import (
    Packed,
    Paged,
    Partial,
    append_kv,
    attention,
    block_mask,
    causal,
    distributed,
    explain,
    mask_mod,
    merge,
    softcap,
    temperature,
)
from saccade.compat import flex
from saccade.compat.torch_varlen import varlen_attn
from saccade.compat.transformer_engine import DotProductAttention, InferenceParams
from saccade.nn import Attention

Q, K, V = torch.randn(2, 4, 6, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
PAGES = Paged(torch.tensor([[0], [1]]), torch.tensor([0, 0]))
OFFSETS = torch.tensor([0, 4, 6], dtype=torch.int32)
PART = Partial(Q, Q[..., 0])
# Of each door one argument of every kind, and what the error says of it.
WRONG_TYPES = {
    "return_lse": (
        TypeError,
        lambda: attention(Q, K, V, return_lse=Q),
        "return_lse must be True or False, got torch.float32",
    ),
    "deterministic": (
        TypeError,
        lambda: attention(Q, K, V, deterministic="yes"),
        "deterministic must be True or False, got 'yes'",
    ),
    "return_lse of 1": (TypeError, lambda: attention(Q, Q, Q, return_lse=1), "return_lse must be True or False, got 1"),
    "return_max_scores of 0": (TypeError, lambda: attention(Q, Q, Q, return_max_scores=0), "or False, got 0"),
    "deterministic of 1": (TypeError, lambda: attention(Q, Q, Q, deterministic=1), "must be True or False, got 1"),
    "validate of 1": (TypeError, lambda: Packed(OFFSETS, validate=1), "validate must be True or False, got 1"),
    "shared_pages of False": (
        TypeError,
        lambda: Paged(PAGES.block_table, PAGES.seqused_k, shared_pages=False),
        "shared_pages must be an integer from 0 to the columns of block_table (2, 1), got False",
    ),
    "sink of 1": (TypeError, lambda: Attention(64, 4, sink=1), "sink must be True or False, got 1"),
    "debug of 2": (TypeError, lambda: distributed.plan([3], 2, rank=0, debug=2), "debug must be True or False, got 2"),
    "scale of True": (TypeError, lambda: attention(Q, Q, Q, scale=True), "scale must be a number, got True"),
    "scale of a bool": (
        TypeError,
        lambda: attention(Q, Q, Q, scale=torch.tensor(True)),
        "scale must be a number, got t",
    ),
    "dropout_p of True": (
        TypeError,
        lambda: attention(Q, Q, Q, dropout_p=True),
        "dropout_p must be a number, got True",
    ),
    "cap of True": (TypeError, lambda: softcap(True), "cap must be a number, got True"),
    "cap of 0": (
        ValueError,
        lambda: softcap(torch.tensor(0.0)),
        "a positive, finite cap, from 2^-126 to float32's",
    ),
    "temperature of 0": (
        ValueError,
        lambda: temperature(torch.tensor([1.0, 0.0])),
        "positive, finite temperatures, from 2^-126 to float32's largest number, got [1.0, 0.0]",
    ),
    "scale of NaN": (
        ValueError,
        lambda: attention(Q, Q, Q, scale=math.nan),
        "scale must be a number, or None for 1/sqrt(d), got nan",
    ),
    **{
        f"scale of {x}": (
            ValueError,
            lambda x=x: attention(Q, Q, Q, scale=x),
            f"scale must be a number, or None for 1/sqrt(d), got {x}: kernels take it as a finite float32, at most 3.4",
        )
        for x in (1e40, -1e40, math.inf, -math.inf)
    },
    **{
        f"cap of {x}": (ValueError, lambda x=x: softcap(x), f"2^-126 to float32's largest number, got {x}")
        for x in (1e40, 1e-40)
    },
    "temperature beyond float32": (
        ValueError,
        lambda: temperature(torch.tensor([1e40], dtype=torch.float64)),
        "temperature needs positive, finite temperatures, from 2^-126 to float32's largest number, got [1e+40]",
    ),
    **{
        f"score function of {x}": (
            ValueError,
            lambda x=x, backend=backend: attention(Q, Q, Q, score_mod=lambda s, b, h, i, j: s + x, backend=backend),
            f"numbers that a function computes with are float32, up to 3.403e+38, or infinite, got {x}",
        )
        for x in (1e40, -1e40)
        for backend in ("auto", "reference")
    },
    **{
        f"mask function of {name}": (ValueError, lambda fn=fn: mask_mod(fn), f"mask function returns bools, {words}")
        for name, fn, words in (
            ("integers", lambda b, h, i, j: i & 1, "True where a query sees a key, such as x != 0; got torch.int64"),
            ("bytes", lambda b, h, i, j: (i > j).to(torch.uint8), "True where"),
            ("floats", lambda b, h, i, j: (i - j) * 0.5, "True where"),
        )
    },
    "mask function of 1e40": (ValueError, lambda: mask_mod(lambda b, h, i, j: i < 1e40), "write -math.inf where"),
    "scale of NaN in a tensor": (ValueError, lambda: attention(Q, Q, Q, scale=torch.tensor(math.nan)), "got nan"),
    "flex's flags": (TypeError, lambda: flex.flex_attention(Q, Q, Q, return_lse=1), "return_lse must be True or False"),
    "dropout_p": (TypeError, lambda: attention(Q, Q, Q, dropout_p="0.1"), "dropout_p must be a number, got '0.1'"),
    "scale beyond floats": (
        ValueError,
        lambda: attention(Q, Q, Q, scale=10**400),
        "scale must be a number that a float",
    ),
    "sparse": (
        ValueError,
        lambda: attention(Q.to_sparse(), Q, Q),
        "must be dense tensors, such as x.to_dense(), or all three jagged ones, got torch.sparse_coo (2, 4, 6, 8)",
    ),
    "out with a gradient": (
        ValueError,
        lambda: attention(Q, Q, Q, out=torch.empty(2, 4, 6, 8, requires_grad=True)),
        "out (2, 4, 6, 8) is written to, and must not require a gradient",
    ),
    "dropout of each head": (ValueError, lambda: attention(Q, Q, Q, dropout_p=torch.zeros(4)), "must be one number"),
    "operands of explain": (TypeError, lambda: explain(Q, K), "or a Spec's text: missing a required argument: 'v'"),
    "merge": (
        TypeError,
        lambda: merge(PART, Q),
        "merge takes Partials, (out, lse) of two tensors, got torch.float32 (2,",
    ),
    "merge's layout": (
        TypeError,
        lambda: merge(PART, PART, layout="bshd"),
        "layout must be a Dense record, got 'bshd'",
    ),
    "merge's devices": (ValueError, lambda: merge(PART, Partial(Q.to("meta"), PART.lse)), "one device, got cpu, meta"),
    "merge's dtypes": (
        ValueError,
        lambda: merge(Partial(Q, torch.zeros(2, 4, 6).long())),
        "float32 or float64, got torch.int64",
    ),
    "merge's dimensions": (ValueError, lambda: merge(Partial(Q[0], Q[0, ..., 0])), "four dimensions, got (4, 6, 8)"),
    "block_mask's sizes": (
        ValueError,
        lambda: block_mask(causal(), 1, 1, 8, -1),
        "s_k must be an integer from 0 on, got -1",
    ),
    "block_mask's types": (TypeError, lambda: block_mask(causal(), 1, 1, 8.0, 8), "s_q must be an integer, got 8.0"),
    "block_mask's device": (
        ValueError,
        lambda: block_mask(causal(), 1, 1, 8, 8, "gpu"),
        "one of torch's, such as 'cpu', got",
    ),
    "flex's block_mask": (
        TypeError,
        lambda: flex.flex_attention(Q, Q, Q, block_mask=causal()),
        "must be a BlockMask, got Window",
    ),
    "flex's query": (TypeError, lambda: flex.flex_attention(None, Q, Q), "query must be a tensor, got NoneType"),
    "flex's aux": (TypeError, lambda: flex.flex_attention(Q, Q, Q, return_aux=True), "must be an AuxRequest, got True"),
    "create_block_mask's block": (
        ValueError,
        lambda: flex.create_block_mask(lambda b, h, i, j: i > j, 1, 1, 8, 8, "cpu", BLOCK_SIZE=0),
        "BLOCK_SIZE must be an integer from 1 on, got 0",
    ),
    "varlen's key": (
        TypeError,
        lambda: varlen_attn(Q[0], 3, Q[0], OFFSETS, OFFSETS, 4, 4),
        "key must be a tensor, got 3",
    ),
    "varlen's window": (
        TypeError,
        lambda: varlen_attn(Q[0], Q[0], Q[0], OFFSETS, OFFSETS, 4, 4, window_size=3),
        "window_size is (left, right), got 3",
    ),
    "rotary": (
        TypeError,
        lambda: append_kv(K, V, PAGES, K.clone(), V.clone(), rotary=Q),
        "two tensors, (cos, sin), got torch",
    ),
    "TransformerEngine's mask type": (
        ValueError,
        lambda: DotProductAttention(4, 8, attn_mask_type=3),
        "must be a string, got 3",
    ),
    "TransformerEngine's heads": (TypeError, lambda: DotProductAttention(4.0, 8), "must be an integer, got 4.0"),
    "TransformerEngine's offsets": (
        ValueError,
        lambda: DotProductAttention(4, 8, qkv_format="thd")(
            *(Q[0].transpose(0, 1),) * 3, attn_mask_type="padding", cu_seqlens_q=OFFSETS, cu_seqlens_kv=OFFSETS[1:]
        ),
        "cu_seqlens must all have b + 1 elements, got 3, 2",
    ),
    "a step": (
        TypeError,
        lambda: InferenceParams(2, 8, 2, 8, torch.float32, device="cpu").pre_step([3]),
        "a dict, got list",
    ),
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_wrong_types_are_named(name):
    kind, call, words = WRONG_TYPES[name]
    with pytest.raises(kind, match=re.escape(words)):
        call()
