"""How a scaled score changes before the softmax."""

from saccade.scores.bind import bind, captured, evaluated, from_records, is_kind, predicate
from saccade.scores.callback import callback_clear, callback_info, score_callback
from saccade.scores.callback_key import callback_key
from saccade.scores.function import Score, ScoreMod, Traced, name_of
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
from saccade.scores.programs import CacheInfo, cache_clear, cache_info, program_of
from saccade.scores.ranges import LONGEST
from saccade.scores.tape import Refused

__all__ = [
    "KINDS",
    "LONGEST",
    "CacheInfo",
    "Graph",
    "Refused",
    "Score",
    "ScoreMod",
    "Softcap",
    "Traced",
    "alibi",
    "bias",
    "bind",
    "cache_clear",
    "cache_info",
    "callback_clear",
    "callback_info",
    "callback_key",
    "captured",
    "compose",
    "data_type",
    "evaluated",
    "from_records",
    "is_kind",
    "name_of",
    "predicate",
    "program_of",
    "relative_bias",
    "score_callback",
    "softcap",
    "t5_bias",
    "t5_buckets",
    "temperature",
]  # fmt: skip
