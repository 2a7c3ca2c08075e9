"""What the attention layers of serving engines mean, and whether an engine is one that the code was written for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from logging import Logger
from typing import Any

from torch import Tensor

from saccade.compat.flash_attn.call import alibi
from saccade.masks import Mask, causal, window
from saccade.scores import compose, softcap


def visible(left: int | None, is_causal: bool) -> Mask | None:
    """What a row sees: keys up to its own, or all; of those, with `left`, the last `left` before its own, and where it
    sees later ones as many after it."""
    if left is None:
        return causal() if is_causal else None
    return window(left, 0 if is_causal else left)


def score_mod(cap: float | None, slopes: Tensor | None, is_causal: bool) -> Callable[..., Tensor] | None:
    """`cap tanh(score / cap) - slopes[h] |i - j|`, i and j positions; what is None, and a cap of 0, is left out."""
    parts = [softcap(cap)] if cap else []
    parts += [] if slopes is None else [alibi(slopes, causal=is_causal)]
    return compose(*parts) if len(parts) > 1 else next(iter(parts), None)


def release(package: str) -> str:
    """The installed version, or "of an unknown version"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of an unknown version"


@contextmanager
def registering(package: str, name: str, tested: tuple[str, ...], log: Logger) -> Iterator[None]:
    """Around what enters a backend in the engine's registry. A release that the tests did not run with is noted. Raises
    ImportError without the engine, or for one without such a registry."""
    tested_with, found = ", ".join(tested), release(package)
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"saccade's backend is written for {name} {tested_with}, and {name} {found} has no such registry: {error}"
        ) from error
    if found not in tested:
        log.warning(f"saccade was tested with {name} {tested_with}, and this is {name} {found}: check what it computes")


def differences(own: type, base: type) -> Iterator[str]:
    """Methods of a derived class that cannot take what an engine gives to its base's, and those that it lacks."""
    yield from (f"{base.__name__}.{name} is not known here" for name in sorted(getattr(own, "__abstractmethods__", ())))
    for name, mine in vars(own).items():
        theirs = getattr(base, name, None)
        if theirs is None or not callable(getattr(own, name)) or isinstance(mine, type):
            continue
        if any(x.kind == x.VAR_KEYWORD for x in inspect.signature(getattr(own, name)).parameters.values()):
            continue  # it passes on what it is given
        known, given = _parameters(getattr(own, name)), _parameters(theirs)
        if strange := [word for word in given if word not in known]:
            yield f"{base.__name__}.{name} has {', '.join(strange)}"


def refuse_differences(package: str, name: str, tested: tuple[str, ...], found: list[str]) -> None:
    """Raises ImportError if there are any: another release of the engine calls the backend in another way."""
    if found:
        raise ImportError(
            f"saccade's backend is written for {name} {', '.join(tested)}, and {name} {release(package)} differs: "
            f"{'; '.join(found)}; choose another attention backend"
        )


def _parameters(function: Any) -> list[str]:
    """The names of what a function takes, but `*args` and `**kwargs`."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [word for word, x in inspect.signature(function).parameters.items() if x.kind not in kinds]
