"""cuDNN's score callbacks without cuDNN: the graph's operations, and callbacks as score modifications.

    from saccade.compat.cudnn import data_type, score_callback

A callback written for `graph.sdpa(score_mod=…)` runs as it is: data types may be cuDNN's own or those of here.
"""

from __future__ import annotations

from saccade.scores import Graph, callback_clear, callback_info, callback_key, data_type, score_callback

__all__ = ["Graph", "cache_clear", "cache_info", "callback_key", "data_type", "score_callback"]

cache_info, cache_clear = callback_info, callback_clear
