"""How a scaled score changes before the softmax."""

from saccade.scores.bind import bind, from_records, is_kind, predicate, program_of
from saccade.scores.callback import callback_clear, callback_info, score_callback
from saccade.scores.callback_key import callback_key
from saccade.scores.fit import Sizes, complaint, short
from saccade.scores.function import CacheInfo, Score, ScoreMod, Traced, cache_clear, cache_info, name_of
from saccade.scores.graph import Graph, data_type
from saccade.scores.library import (
    KINDS,
    Softcap,
    alibi,
    bias,
    compose,
    relative_bias,
    softcap,
    t5_bias,
    t5_buckets,
    temperature,
)
from saccade.scores.ranges import LONGEST
from saccade.scores.survey import survey
from saccade.scores.trace import Refused

__all__ = [
    "KINDS", "LONGEST", "CacheInfo", "Graph", "Refused", "Score", "ScoreMod", "Sizes", "Softcap", "Traced", "alibi",
    "bias", "bind", "cache_clear", "cache_info", "callback_clear", "callback_info", "callback_key", "complaint",
    "compose", "data_type", "from_records", "is_kind", "name_of", "predicate", "program_of", "relative_bias",
    "score_callback", "short", "softcap", "survey", "t5_bias", "t5_buckets", "temperature",
]  # fmt: skip
