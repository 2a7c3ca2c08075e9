"""Portable Triton kernels, forward and backward: any GPU that Triton serves since sm_80, and AMD's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from saccade.backends import ANY_SCORE, Gradients, Launches, Outputs, Part, Saved, Support, device, score_workspace
from saccade.backends.key_lists import gathers, row_lists_obstacle, tokens_of_rows
from saccade.backends.key_lists import refusals as refused_lists
from saccade.backends.triton.config import WIDE
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS
from saccade.call.spec import Spec
from saccade.masks import KINDS as MASKS
from saccade.util import hardware

WIDE_GRADIENTS = 132 << 10
"""Bytes that float32 gradients of WIDE head dims need."""
MOST_SEQUENCES = 1 << 17
"""Whose offsets a program over pages reads at once."""
obstacle, recorder = hardware.triton_obstacle, device.recorder
SUPPORT = Support(
    devices=("sm80+", "gfx90a", "gfx942", "gfx950"), dtypes=("fp16", "bf16", "fp32", "fp8_e4m3", "fp8_e5m2"),
    kv=("fp8_e4m3", "fp8_e5m2"), layouts=("dense", "padded", "packed", "ranges", "paged"), masks=MASKS,
    scores=(ANY_SCORE,),
    flags=("sink", "dropout", "deterministic", "max_scores", "offsets", "block_scales", "latent", "aligned"), max_d=512,
    wider=(("paged", 576, 512), ("latent", 576, 512)), needs_with=(("paged", "aligned"),),
)  # fmt: skip
GRADIENT = replace(SUPPORT, layouts=("dense", "padded", "packed", "ranges"), dtypes=("fp16", "bf16", "fp32"), kv=())


def refusals(call: Call, gradient: bool) -> list[str]:
    """Why these kernels do not take a call whose Spec they support."""
    d, d_v = call.k.shape[3], call.v.shape[3]
    eight_bit_pages = call.layout.has_pages and call.k.dtype in EIGHT_BITS
    if eight_bit_pages and max(d, d_v) > SUPPORT.max_d:
        return [f"takes 8-bit pages of head dims up to {SUPPORT.max_d}, not {d} and {d_v}"]
    if gradient and max(d, d_v) > WIDE and call.q.dtype == torch.float32 and call.k.is_cuda:
        room = WIDE_GRADIENTS if torch.version.hip else hardware.shared_bytes(call.k.device)
        if room < WIDE_GRADIENTS:
            needed = f"needs {WIDE_GRADIENTS >> 10} KB of shared memory for float32 gradients of head dims above {WIDE}"
            return [f"{needed}, and a program has {room >> 10} KB here; 16-bit ones need 98"]
    if call.layout.has_pages and call.layout.sequences >= MOST_SEQUENCES:
        return [f"takes pages of fewer than {MOST_SEQUENCES} sequences, or rows of slots, not {call.layout.sequences}"]
    if gathers(call, gradient) or tokens_of_rows(call, gradient):
        return []
    if not call.layout.has_pages and max(d, d_v) > SUPPORT.max_d:
        return [f"takes head dims above {SUPPORT.max_d} without pages for {_lacking(call)}"]
    return refused_lists(call)


def _lacking(call: Call) -> str:
    """What a call over lists of latents lacks."""
    if (obstacle := row_lists_obstacle(call)) is not None:
        return obstacle
    if call.dropout is not None:
        return "lists of keys without dropout"
    if call.q.dtype.itemsize != 2:
        return f"16-bit operands, not {call.q.dtype}"
    return "gradients of q, k, v and sinks, not of tensors that a score function captures"


def workspace(spec: Spec) -> str:
    if spec.latent and spec.d > WIDE and spec.layout != "paged":
        return "forward: 4 bytes for every entry of a list; backward: up to 3 GB"
    if spec.layout == "paged":
        return "none, or where keys are split 4 bytes for each element of out and split"
    return f"forward: none; backward: 8 bytes for every query row and head{score_workspace(spec)}"


def run_forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    if gathers(call):
        from saccade.backends.triton import listed_launch

        return listed_launch.forward(call, launches, lse)
    if tokens_of_rows(call):
        from saccade.backends.triton import token_lists

        return token_lists.forward(call, launches, lse)
    from saccade.backends.device.key_lists import tabulated

    call = tabulated(call, launches)
    if call.layout.has_pages:
        from saccade.backends.device.slot_lists import as_pages
        from saccade.backends.triton import paged

        call = as_pages(call, launches)
        return paged.forward(call, [(call, launches)], lse)
    from saccade.backends.triton import launch

    return launch.forward(call, launches, lse)


def run_parts(call: Call, parts: Sequence[Part], lse: bool) -> Outputs:
    """The call over pages that is the sum of these over disjoint keys, and whose rows are theirs."""
    from saccade.backends.triton import paged

    return paged.forward(call, parts, lse)


def run_backward(call: Call, launches: Launches, saved: Saved) -> Gradients:
    from saccade.backends.device import captured_gradients, merge_kernel
    from saccade.backends.device.key_lists import tabulated
    from saccade.backends.triton import launch

    if gathers(call, gradient=True):
        from saccade.backends.triton import listed_launch

        return *listed_launch.backward(call, launches, saved), [None] * len(saved.wanted)
    if tokens_of_rows(call, gradient=True):
        from saccade.backends.triton import token_lists

        return *token_lists.backward(call, launches, saved), [None] * len(saved.wanted)
    call = tabulated(call, launches)
    saved = merge_kernel.divide_gradients(call, launches, saved)
    biases = launch.bias_sums_of(call, saved)
    gradients = launch.backward(call, launches, saved, biases=biases)
    return *gradients, captured_gradients.gradients(call, launches, saved, biases=biases)
