"""Context parallelism: one sequence, or documents end to end, over the ranks of torch.distributed.

Each rank has some of the rows of q, k and v, which a `plan` chooses; `attention(q, k, v, …, context=plan)` is what one
process would compute for them.
"""

from saccade.distributed.context_plan import ContextPlan
from saccade.distributed.make import plan
from saccade.distributed.sharding import Piece

__all__ = ["ContextPlan", "Piece", "plan"]
