"""Hopper's kernels on a CPU, to test their arithmetic and how their warps work together.

Inside of `emulated(seed)` the backend `gluon` takes tensors of the CPU, goes through its own launches, and its kernels
run as Python functions over numpy's arrays. The programs of a grid and their partitions take turns at random, copies
and products happen at random times until they are waited for, and what no order allows raises an EmulatorError:

>>> import torch, saccade
>>> from tests.emulator import emulated
>>> q, k, v = torch.randn(3, 1, 1, 100, 64, dtype=torch.bfloat16).unbind()
>>> with emulated(seed=1):
...     out = saccade.attention(q, k, v, backend="gluon")

What it cannot see: registers and their layouts, order between threads of one partition, and the order in which global
memory is seen by other programs.
"""

from tests.emulator.launch import emulated
from tests.emulator.scheduler import Deadlock, EmulatorError, Race

__all__ = ["Deadlock", "EmulatorError", "Race", "emulated"]
