"""TransformerEngine's `DotProductAttention` by saccade, on every backend.

    from saccade.compat.transformer_engine import DotProductAttention

Constructor and forward take the names of TransformerEngine 2.20, in its order; masks, padding, biases, softmax types
and outputs are as there. More than there: CPUs, float32 and float64, and everything together with everything,
`score_mod` among it. `InferenceParams` is a cache of keys and values, with pages or without. Not there yet, and refused
by name: FP8, and over a cp_group all but self-attention without biases.

Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from saccade.compat.transformer_engine.call import CallArguments
from saccade.compat.transformer_engine.inference import InferenceParams
from saccade.compat.transformer_engine.module import DotProductAttention, get_attention_backend

__all__ = ["CallArguments", "DotProductAttention", "InferenceParams", "get_attention_backend"]
