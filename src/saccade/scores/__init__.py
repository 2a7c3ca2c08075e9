"""How a scaled score changes before the softmax."""

from saccade.scores.bind import (
    Sizes,
    TracedValues,
    bind,
    captured,
    complaint,
    evaluated,
    from_tensors,
    guarded,
    is_kind,
    of_values,
    predicate,
    short,
    traced_predicate,
)  # fmt: skip
from saccade.scores.callbacks.graph import Graph, data_type
from saccade.scores.callbacks.score_callback import callback_clear, callback_info, callback_key, score_callback
from saccade.scores.codegen.program import (
    CacheInfo,
    cache_clear,
    cache_info,
    program_of,
    read_programs,
    written_programs,
)
from saccade.scores.codegen.ranges import LONGEST
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
from saccade.scores.score_mod import Score, ScoreMod, Traced, name_of
from saccade.scores.tracing.tape import Refused

__all__ = [
    "KINDS", "LONGEST", "CacheInfo", "Graph", "Refused", "Score", "ScoreMod", "Sizes", "Softcap", "Traced",
    "TracedValues", "alibi", "bias", "bind", "cache_clear", "cache_info", "callback_clear", "callback_info",
    "callback_key", "captured", "complaint", "compose", "data_type", "evaluated", "from_tensors", "guarded",
    "is_kind", "name_of", "of_values", "predicate", "program_of", "read_programs", "relative_bias", "score_callback",
    "short", "softcap", "t5_bias", "t5_buckets", "temperature", "traced_predicate", "written_programs",
]  # fmt: skip
