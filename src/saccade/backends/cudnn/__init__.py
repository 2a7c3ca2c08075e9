"""cuDNN's attention, by its graphs: an engine that is there to be named, and to be measured against.

Scores are modified inside of its kernels, by the pointwise operations that its graphs have.
"""

from __future__ import annotations

import torch

from saccade.backends import ANY_SCORE, Gradients, Outputs, Saved, Support
from saccade.backends.cudnn.frontend import installed
from saccade.masks import Window
from saccade.problem import Problem
from saccade.spec import Spec

SUPPORT = Support(
    devices=("sm80+",),
    dtypes=("fp16", "bf16"),
    layouts=("dense", "padded"),
    masks=("causal", "window"),
    scores=(ANY_SCORE, "of cuDNN's operations, without padding"),
    flags=("sink", "deterministic", "aligned"),
    max_d=256,
    multiple_of=8,
    needs=("aligned",),
    # cuDNN: "Attention score mod enabled and hence other subgraphs are disabled." Windows are a part of the score then.
    apart=(("score", "padded"),),
)
GRADIENT = SUPPORT
OPERATIONS = 220
"""cuDNN 9.19 takes graphs of 256 nodes, of which attention itself is about 25."""


def obstacle() -> str | None:
    if not installed():
        return "nvidia-cudnn-frontend is not installed: pip install 'saccade[cudnn]'"
    if torch.version.hip or not torch.cuda.is_available():
        return "needs a GPU of NVIDIA's, and torch sees none"
    return None


def refusals(problem: Problem, gradient: bool) -> list[str]:
    """What no Spec says: operations of the score, lengths."""
    from saccade.backends.cudnn.modification import NoOperation, modification
    from saccade.backends.cudnn.wrong import wrong

    found = []
    if problem.mask is not None and not isinstance(problem.mask, Window):
        found.append(f"has one window of keys for each row, not {problem.mask.kind}")
    if problem.score is not None:
        try:
            mod = modification(problem.score, gradient)
            if mod.operations > OPERATIONS:
                found.append(f"has graphs of up to {OPERATIONS} operations on scores, not {mod.operations}")
            if words := wrong(problem, mod, gradient):
                which = "backward" if gradient else "forward"
                found.append(f"came out wrong {which} on an H200 with {', '.join(words)}")
        except NoOperation as reason:
            found.append(f"cannot run {problem.score.kind}: {reason}")
    if gradient and problem.q.shape[2] == problem.k.shape[2] == 1:
        found.append("has no backward of one query and one key")
    spec = problem.spec()
    if gradient and spec.device != "sm90" and max(spec.d, spec.d_v) > 128:
        found.append(f"has a backward of head dims up to 128 on {spec.device}, not of {max(spec.d, spec.d_v)}")
    return found


def workspace(spec: Spec) -> str:
    copies = ", and copies of q, k, v, out and dout without what is not in use" if spec.layout == "padded" else ""
    return f"what cuDNN asks for: little forward, dq in float32 and a number per row backward{copies}"


def forward(problem: Problem, lse: bool) -> Outputs:
    from saccade.backends.cudnn import launch

    return *launch.forward(problem, lse), None


def backward(problem: Problem, saved: Saved) -> Gradients:
    from saccade.backends.cudnn import launch

    return launch.backward(problem, saved)
