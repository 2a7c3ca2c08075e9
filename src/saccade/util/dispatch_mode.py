"""A dispatch mode that lets PyTorch's compiler be."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` whose use imports no part of `torch.compile`, which takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Since 2.13 torch hides modes from its compiler, which it imports to do so. It never meets these."""
        return False
