"""How a scaled score changes before the softmax."""

from saccade.scores.library import KINDS, ScoreMod, Softcap, from_records, softcap

__all__ = ["KINDS", "ScoreMod", "Softcap", "from_records", "softcap"]
