"""cuDNN's score callbacks without cuDNN: the graph's operations, and callbacks as score modifications.

    from saccade.compat.cudnn import data_type, score_callback

A callback written for `graph.sdpa(score_mod=…)` runs unchanged. Its data types may be cuDNN's own or those of this
module. With `backend="cudnn"` it runs in cuDNN's own kernels.
"""

from __future__ import annotations

from saccade.backends.cudnn.graphs import graph_cache as _graphs
from saccade.scores import CacheInfo, Graph, callback_key, data_type, score_callback
from saccade.scores import callback_clear as cache_clear
from saccade.scores import callback_info as cache_info

__all__ = [
    "Graph", "cache_clear", "cache_info", "callback_key", "data_type", "graph_clear", "graph_info", "score_callback",
]  # fmt: skip


def graph_info() -> CacheInfo:
    """How often a call of `backend="cudnn"` found its graph built, and how many graphs are kept.

    >>> graph_info().hits >= 0
    True
    """
    return _graphs.info()


def graph_clear() -> None:
    """Forgets cuDNN's built graphs, so that the next calls of `backend="cudnn"` build theirs."""
    _graphs.clear()
