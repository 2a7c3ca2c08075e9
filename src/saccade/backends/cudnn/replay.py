"""Steps called on a cuDNN graph: the callbacks that `graph.sdpa` takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from saccade.backends.cudnn.modification import Modification, Steps
from saccade.scores.callbacks.graph import Step, data_type
from saccade.scores.callbacks.operations import OPERATIONS


class Replay:
    """The two callbacks of one graph: cuDNN calls `forward`, and in a backward `backward` after it.

    What both make of the score alone is one node, as in callbacks that keep values for their derivative.
    """

    def __init__(self, mod: Modification, held: Sequence[Any], data_types: Any) -> None:
        """
        Args:
            held: the graph's own tensors for `mod.tensors(…)`.
            data_types: what `data_type` is to the graph.
        """
        self.mod, self.data_types = mod, data_types
        tensors, numbers = len(mod.reads), len(mod.reads) + len(mod.numbers)
        self.held = {"tensor": held[:tensors], "runtime": held[tensors:numbers], "number": held[numbers:]}
        self.score: Any = None
        self.shared: dict[Any, Any] = {}

    def forward(self, graph: Any, score: Any) -> Any:
        self.score = score
        self.shared.clear()
        return self._called(graph, self.mod.forward, score)

    def backward(self, graph: Any, gradient: Any) -> Any:
        assert self.mod.backward is not None
        return self._called(graph, self.mod.backward, gradient)

    def forget(self) -> None:
        """Once a graph is built: its values would keep it for ever, as it keeps the callbacks."""
        self.score = None
        self.shared.clear()

    def _called(self, graph: Any, steps: Steps, given: Any) -> Any:
        """`given`: the score or the gradient, whose indices `gen_index` takes."""
        made: list[Any] = []
        keys: list[Any] = []
        """For what depends on the score and on no gradient: which value it is."""
        for step in steps:
            inputs = [keys[i] for i in step.inputs]
            key = None
            if step.name in ("score", *self.held):
                key = step
            elif "gradient" not in (step.name, *inputs) and step.name != "gen_index" and None not in inputs:
                key = (step._replace(inputs=()), *inputs)
            keys.append(key)
            known = self.shared.get(key)
            if known is None:
                known = self._made(graph, step, [made[i] for i in step.inputs], given)
                if key is not None:
                    self.shared[key] = known
            made.append(known)
        return made[-1]

    def _made(self, graph: Any, step: Step, inputs: list[Any], given: Any) -> Any:
        if step.name in self.held:
            return self.held[step.name][step.attributes[0]]
        if step.name in ("score", "gradient"):
            return self.score if step.name == "score" else given
        types = {} if step.computed == data_type.NOT_SET else {"compute_data_type": self._type(step.computed)}
        if step.name == "gen_index":
            node = graph.gen_index(input=given, axis=step.attributes[0], **types)
        else:
            operation = OPERATIONS[step.name]
            named = dict(zip(operation.arguments, inputs, strict=True))
            attributes = zip((name for name, _ in operation.attributes), step.attributes, strict=True)
            named |= {name: x for name, x in attributes if math.isfinite(x)}
            node = getattr(graph, step.name)(**named, **types)
        if step.made != data_type.NOT_SET:
            node.set_data_type(self._type(step.made))
        return node

    def _type(self, kind: data_type) -> Any:
        return getattr(self.data_types, kind.name)
