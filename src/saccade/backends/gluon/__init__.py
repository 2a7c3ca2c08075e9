"""Gluon kernels for Hopper, warp-specialised and fed by bulk copies: forward and backward."""

from __future__ import annotations

from dataclasses import replace

from saccade import hardware
from saccade.backends import ANY_SCORE, Gradients, Outputs, Saved, Support, score_workspace
from saccade.backends.gluon import pages
from saccade.layouts import Paged
from saccade.masks import KINDS as MASKS
from saccade.problem import Problem
from saccade.spec import Spec

obstacle = hardware.triton_obstacle
SUPPORT = Support(
    devices=("sm90",),
    dtypes=("fp16", "bf16"),
    layouts=("dense", "padded", "packed", "paged"),
    masks=MASKS,
    scores=(ANY_SCORE,),
    flags=("sink", "dropout", "max_scores", "deterministic", "aligned"),
    max_d=256,
    multiple_of=8,
    needs=("aligned",),
)
GRADIENT = replace(SUPPORT, layouts=("dense", "padded", "packed"))


def refusals(problem: Problem, gradient: bool) -> list[str]:
    return pages.refusals(problem) if isinstance(problem.layout, Paged) and not gradient else []


def workspace(spec: Spec) -> str:
    sums = "4 bytes for every element of q, d in whole multiples of 64, and 8 for every query row and head"
    shares = ", and where few heads of keys leave the GPU idle, dk and dv for each share of their query heads"
    turns = ", and 4 for every pair of a block of keys and one of rows" if spec.deterministic else ""
    turns += score_workspace(spec)
    return f"forward: 8 bytes for every stream; backward: {sums}{turns}{shares if spec.group > 1 else ''}"


def forward(problem: Problem, lse: bool) -> Outputs:
    from saccade.backends.gluon import launch

    return launch.forward(problem, lse)


def backward(problem: Problem, saved: Saved) -> Gradients:
    from saccade.backends.device import captures, totals
    from saccade.backends.gluon import backward_launch

    saved = totals.settled(problem, saved, fast=True)
    return *backward_launch.backward(problem, saved), captures.gradients(problem, saved, fast=True)
