"""saccade: fused attention for PyTorch, in pure Python.

>>> import torch, saccade
>>> q, k, v = torch.randn(1, 8, 256, 64), torch.randn(1, 2, 256, 64), torch.randn(1, 2, 256, 64)
>>> saccade.attention(q, k, v, mask=saccade.causal()).shape
torch.Size([1, 8, 256, 64])
"""

from saccade.api import Explanation, attention, explain, plan
from saccade.dispatch import Plan, Unsupported
from saccade.layouts import Dense
from saccade.masks import Mask, causal, documents, prefix, window
from saccade.partial import Partial, merge
from saccade.scores import ScoreMod, softcap
from saccade.spec import Spec

__version__ = "0.1.0"

__all__ = [
    "Dense",
    "Explanation",
    "Mask",
    "Partial",
    "Plan",
    "ScoreMod",
    "Spec",
    "Unsupported",
    "attention",
    "causal",
    "documents",
    "explain",
    "merge",
    "plan",
    "prefix",
    "softcap",
    "window",
]
