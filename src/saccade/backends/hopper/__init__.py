"""The backend `gluon`: warp-specialised kernels for Hopper that load by TMA, forward and backward."""

from __future__ import annotations

from dataclasses import replace

from saccade.backends import ANY_SCORE, Gradients, Launches, Outputs, Saved, Support, device, score_workspace
from saccade.backends.hopper.forward import config
from saccade.backends.hopper.latent import limits
from saccade.backends.key_lists import gathers, tokens_of_rows
from saccade.backends.key_lists import refusals as refused_lists
from saccade.call import Call
from saccade.call.call import Arrivals
from saccade.call.spec import EIGHT_BIT_WORDS, RECORDS, Spec
from saccade.masks import KINDS as MASKS
from saccade.scores import Traced
from saccade.util import hardware

obstacle, recorder = hardware.triton_obstacle, device.recorder
SUPPORT = Support(
    devices=("sm90",), dtypes=("fp16", "bf16", "fp8_e4m3", "fp8_e5m2"),
    layouts=("dense", "padded", "packed", "ranges", "paged"), masks=MASKS, scores=(ANY_SCORE,),
    flags=("sink", "dropout", "max_scores", "deterministic", "offsets", "block_scales", "latent", "aligned"), max_d=256,
    kv=(RECORDS,), wider=(("latent", *limits.DIMS),), multiple_of=8, needs=("aligned",),
)  # fmt: skip
GRADIENT = replace(SUPPORT, dtypes=("fp16", "bf16"), kv=(), layouts=("dense", "padded", "packed"))

WAITS_FOR_KEYS = True
"""Whether the forward takes `arrivals`."""

# Which paged calls the forward takes.
MIN_PAGE_ROWS = 8
"""The fewest rows of a page that TMA can load: the rows that are swizzled together in shared memory."""
LEAST_ROWS, LEAST_EIGHT_BIT_ROWS = 17, 64
"""The fewest query rows of a sequence and a key head, in the mean. With fewer memory bandwidth decides, and `triton` is
as fast or faster."""
LEAST_ITEMS = 64
"""The fewest work items, or parts of their keys. With fewer half of an H200 is idle (notes/triton.md)."""


def refusals(call: Call, gradient: bool) -> list[str]:
    """Reasons against a call whose Spec is supported."""
    layout = call.layout
    if limits.applies(call):
        reasons = [f"has no gradients of latent attention with head dims {call.q.shape[3]}/{call.v.shape[3]}"]
        return reasons if gradient else limits.refusals(call)
    if reasons := refused_lists(call):
        return reasons
    if gradient and call.positions is not None and call.dropout is not None:
        return ["has too little shared memory for positions together with dropout"]
    if gradient or not layout.has_pages:
        return []
    size = call.k.shape[2]
    reasons = []
    if size % MIN_PAGE_ROWS:
        reasons.append(f"takes page sizes that are multiples of {MIN_PAGE_ROWS}, not {size}")
    if layout.num_splits is not None:
        reasons.append(f"splits the keys by itself: not with num_splits={layout.num_splits}")
    rows = -(-call.q.shape[0] * call.q.shape[2] * call.group // max(layout.sequences, 1))
    items = config.work_items(call) * config.most_splits(call)
    least = LEAST_ROWS if call.descale is None else LEAST_EIGHT_BIT_ROWS
    if layout.sequences and (rows < least or items < LEAST_ITEMS):
        reasons.append(
            f"takes pages if each sequence and key head has at least {least} query rows, not {rows}, and blocks of "
            f"{config.ITEM_ROWS} rows times parts of {config.LEAST_KEYS} keys are at least {LEAST_ITEMS}, not {items}"
        )
    return reasons


def slower_than_next(call: Call, gradient: bool) -> str | None:
    """Why "auto" leaves the call, or its backward, to the next backend, or None: lists of keys for few rows, and a bias
    that TMA cannot load, at d up to 64 (notes/scores.md)."""
    if gathers(call, gradient) or (gradient and tokens_of_rows(call, gradient)):
        return "triton gathers listed keys for few rows, where a tile of rows would visit many more"
    if gradient:
        return None
    score, d = call.score, max(call.q.shape[3], call.v.shape[3])
    if d > 64 or not isinstance(score, Traced) or not score.program.own_elements:
        return None
    from saccade.backends.hopper.forward.launch import captured_rows

    if captured_rows(call) is not None:
        return None
    return (
        "triton is faster for a bias of every score at head dims up to 64, unless the bias has 16 bits and aligned rows"
    )


def workspace(spec: Spec) -> str:
    rows = 12 if spec.sink else 8
    stored = spec.layout == "dense" and spec.mask in ("none", "causal") and max(spec.d, spec.d_v) <= 128
    few = " (none for up to 128 keys)" if stored else ""
    sums = f"4 bytes for every element of q, d in whole multiples of 64{few}, and {rows} for every query row and head"
    shares = ", and where few heads of keys leave the GPU idle, dk and dv for each share of their query heads"
    turns = ", and 4 for every pair of a block of keys and one of rows" if spec.deterministic else ""
    turns += score_workspace(spec)
    if spec.latent and spec.d > SUPPORT.max_d:
        return "forward: 34 MB, and of lists of keys 4 bytes for every entry"
    if spec.dtype in EIGHT_BIT_WORDS:
        return "forward: 8 bytes for every stream, and v once more"
    if spec.layout == "paged":
        return "forward: 8 bytes for every stream, and where keys are split 4 bytes for each element of out and split"
    return f"forward: 8 bytes for every stream; backward: {sums}{turns}{shares if spec.group > 1 else ''}"


def run_forward(call: Call, launches: Launches, lse: bool, arrivals: Arrivals | None = None) -> Outputs:
    from saccade.backends.device.key_lists import tabulated

    if limits.applies(call):
        from saccade.backends.hopper.latent import launch as latent_launch

        return latent_launch.forward(call, launches, lse)
    from saccade.backends.hopper.forward import launch

    return launch.forward(tabulated(call, launches), launches, lse, arrivals=arrivals)


def run_backward(call: Call, launches: Launches, saved: Saved) -> Gradients:
    from saccade.backends.device import captured_gradients, merge_kernel
    from saccade.backends.device.key_lists import tabulated
    from saccade.backends.hopper.backward import launch as backward_launch

    call = tabulated(call, launches)
    saved = merge_kernel.divide_gradients(call, launches, saved, fast=True)
    biases = backward_launch.bias_sums_of(call, saved)
    captured = backward_launch.captured_of(call, saved)
    gradients = backward_launch.backward(call, launches, saved, biases, captured)
    made = {} if captured is None else captured.made
    return *gradients, captured_gradients.gradients(call, launches, saved, fast=True, biases=biases, made=made)
