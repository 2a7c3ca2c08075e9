"""Models of Hugging Face's transformers on saccade.

from saccade.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="saccade")
"""

from saccade.integrations.transformers.attention import FOR_BATCHES, NAME, attention_forward, register
from saccade.integrations.transformers.mask import StructuredMask, attention_mask_of

__all__ = ["FOR_BATCHES", "NAME", "StructuredMask", "attention_forward", "attention_mask_of", "register"]
