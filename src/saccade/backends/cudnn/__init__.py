"""cuDNN's attention, through cuDNN's graph API. `backend="auto"` never chooses it; it runs if it is named.

Score callbacks run inside of its kernels, by the pointwise operations that its graphs have.
"""

from __future__ import annotations

import torch

from saccade.backends import CALLBACKS, Gradients, Launches, Outputs, Saved, Support
from saccade.backends.cudnn.graphs import installed
from saccade.call import Call
from saccade.call.spec import Spec
from saccade.masks import Window

SUPPORT = Support(
    devices=("sm80+",),
    dtypes=("fp16", "bf16"),
    layouts=("dense", "padded"),
    masks=("causal", "window"),
    scores=(CALLBACKS, "without masks and padding"),
    flags=("sink", "deterministic", "aligned"),
    max_d=256,
    multiple_of=8,
    needs=("aligned",),
    # cuDNN: "Attention score mod enabled and hence other subgraphs are disabled."
    apart=(("score", "padded"), ("score", "causal"), ("score", "window")),
)
GRADIENT = SUPPORT


def obstacle() -> str | None:
    if not installed():
        return "nvidia-cudnn-frontend is not installed: pip install 'saccade[cudnn]'"
    if torch.version.hip or not torch.cuda.is_available():
        return "needs an NVIDIA GPU, and torch sees none"
    return None


def refusals(call: Call, gradient: bool) -> list[str]:
    """The reasons against a call that its Spec does not show: lengths, and the operations of a callback."""
    from saccade.backends.cudnn.graphs import NoCallback, callback_limits, score_graph

    reasons = []
    if call.mask is not None and not isinstance(call.mask, Window):
        reasons.append(f"takes causal masks and windows, not {call.mask.kind}")
    if call.score is not None:
        try:
            reasons += callback_limits(call.score, score_graph(call.score, gradient), gradient)
        except NoCallback as reason:
            reasons.append(str(reason))
    if gradient and call.q.shape[2] == call.k.shape[2] == 1:
        reasons.append("has no backward for one query and one key")
    spec = call.spec
    if gradient and spec.device != "sm90" and max(spec.d, spec.d_v) > 128:
        reasons.append(f"supports head dims up to 128 in the backward on {spec.device}, not {max(spec.d, spec.d_v)}")
    return reasons


def workspace(spec: Spec) -> str:
    copies = ", and copies of q, k, v, out and dout without unused rows" if spec.layout == "padded" else ""
    return f"what cuDNN needs: little in the forward; dq in float32 and one number per row in the backward{copies}"


def run_forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    from saccade.backends.cudnn import launch

    return *launch.forward(call, launches, lse), None


def run_backward(call: Call, launches: Launches, saved: Saved) -> Gradients:
    from saccade.backends.cudnn import launch

    return launch.backward(call, launches, saved)
