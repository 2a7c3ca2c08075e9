"""`python -m saccade.testing.selfcheck`: is saccade right on this machine, how fast, and which peers are here?

It needs torch alone, and takes a minute. Right means what every test means by it: the error of results and gradients
against the oracle in float64, over the tolerance of `saccade.testing.accuracy`; up to 1 passes. Times are of calls in
turns, saccade's and PyTorch's own attention on the same tensors; compare them within one run. The exit code is 1 if a
result is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade
from saccade import Unsupported, causal
from saccade.ops import dispatch
from saccade.testing import accuracy
from saccade.testing.cases import NAMED, Case
from saccade.testing.timing import Clock, described, device_name, medians
from saccade.util import hardware

# The commonest calls first: time may be over before the last.
CASES = [
    "causal", "plain", "group7", "packed", "ragged", "window", "softcap", "sink", "documents-causal", "d256", "mqa",
    "few-queries", "alibi", "dropout", "relative-bias", "bshd", "intervals", "prefix", "d72", "t5-bias",
    "packed-cross", "packed-used", "bias-sink", "d192-128", "everything", "composed", "packed-alibi", "one-query",
    "documents-or-window", "d512", "no-keys-sink", "packed-one-token", "packed-d256", "longest-rows",
]  # fmt: skip
PAGED = Case("paged", b=4, h_q=8, h_k=2, s_q=1, s_k=200, mask="causal", order="paged")
PEERS = {
    "flash_attn_3": "FlashAttention-3",
    "flash_attn.cute": "FlashAttention-4",
    "flash_attn": "flash-attn 2",
    "xformers": "xformers",
    "transformer_engine": "TransformerEngine",
    "cudnn": "cuDNN's frontend",
}
"""Modules of other libraries, and their names."""
CLOCK = Clock(rounds=7, sample=50e-3)


@dataclass(frozen=True)
class Outcome:
    """Of one case."""

    case: str
    device: str
    dtype: str
    backend: str = ""
    error: float | None = None
    """Over the tolerance; None where nothing ran."""
    passed: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Speed:
    """Median milliseconds of one call."""

    call: str
    device: str
    ms: float
    sdpa_ms: float


def right(device: torch.device, dtype: str, backend: str, until: float) -> Iterator[Outcome]:
    """The first case, and others until the clock says `until`: nothing checked is nothing right."""
    for i, case in enumerate((*(NAMED[name] for name in CASES), PAGED)):
        if i and time.monotonic() > until:
            return
        at: dict[str, Any] = {"case": case.name, "device": str(device), "dtype": dtype}
        inputs = case.replace(dtype=dtype).inputs(device)
        gradients = {} if case.order == "paged" else {"dout": inputs.dout, "dlse": inputs.dlse}
        try:
            report = accuracy.check(inputs.q, inputs.k, inputs.v, backend=backend, **gradients, **inputs.keywords)
        except Unsupported as refused:
            yield Outcome(**at, reason=str(refused).splitlines()[1].strip())
            continue
        except Exception as problem:  # a compiler's or a driver's
            yield Outcome(**at, reason=described(problem))
            continue
        yield Outcome(**at, backend=report.backend, error=round(report.ratio, 3), passed=report.ratio <= 1)


def speeds(device: torch.device, backend: str) -> Iterator[Speed]:
    """A causal layer, beside `F.scaled_dot_product_attention`."""
    b, h_q, h_k, s, d = (1, 32, 8, 8192, 128) if device.type == "cuda" else (1, 8, 2, 1024, 64)
    q, k, v = (accuracy.random((b, h, s, d), torch.bfloat16, device, i) for i, h in enumerate((h_q, h_k, h_k)))
    dout = torch.ones_like(q)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return saccade.attention(q, k, v, mask=causal(), backend=backend)

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def whole(function: Callable[..., Tensor]) -> Callable[[], Any]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(function(*leaves), leaves, dout)

    def both(*calls: Callable[[], Any]) -> Iterable[float]:
        return medians(dict(zip(("ours", "theirs"), calls, strict=True)), device, CLOCK).values()

    shape = f"bf16, {h_q}:{h_k} heads, {s} tokens, d {d}, causal"
    with torch.no_grad():
        yield Speed(f"forward: {shape}", str(device), *both(lambda: ours(q, k, v), lambda: theirs(q, k, v)))
    yield Speed(f"forward and backward: {shape}", str(device), *both(whole(ours), whole(theirs)))


def peers() -> dict[str, str | None]:
    """The version of each peer, or None where it is not installed."""
    found: dict[str, str | None] = {"PyTorch's SDPA, varlen_attn and FlexAttention": str(torch.__version__)}
    for module, name in PEERS.items():
        try:
            here = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of a package that is not there
            here = False
        found[name] = _version(module) if here else None
    return found


def _version(module: str) -> str:
    packages = metadata.packages_distributions().get(module.partition(".")[0], [])
    return metadata.version(packages[0]) if packages else "a version unknown"


def _positive(word: str) -> float:
    number = float(word)
    if not number > 0:  # NaN neither
        raise argparse.ArgumentTypeError(f"{word} is not a positive number")
    return number


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m saccade.testing.selfcheck", description="Is saccade right on this machine, and how fast?"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1 or cpu")
    parser.add_argument("--backend", default="auto", help="auto, or the name of one; default: auto")
    parser.add_argument("--seconds", type=_positive, default=45, help="for the cases after the first; default: 45")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args(arguments)
    if given.backend not in ("auto", *dispatch.NAMES):
        parser.error(f"--backend {given.backend!r} is not one of auto, {', '.join(dispatch.NAMES)}")
    try:
        device = torch.device(given.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as problem:
        parser.error(f"--device {given.device!r}: {str(problem).partition(chr(10))[0]}")
    sys.exit(_report(device, given.backend, given.seconds, given.json))


def _report(device: torch.device, backend: str, seconds: float, as_json: bool) -> int:
    tell = (lambda text: None) if as_json else print
    triton = hardware.triton_version() or "not installed"
    tell(f"saccade {saccade.__version__}, torch {torch.__version__}, triton {triton}")
    word = "" if device.type == "cpu" else f", {hardware.name(device)}"
    tell(f"{device}: {device_name(device)}{word}\n\nRight: error over tolerance, forward and backward; up to 1 passes")
    outcomes: list[Outcome] = []
    dtypes = ("bf16", "fp32") if device.type == "cpu" else ("bf16", "fp16")
    for i, dtype in enumerate(dtypes):
        until = time.monotonic() + seconds * (0.7, 0.3)[i]
        for outcome in right(device, dtype, backend, until):
            outcomes.append(outcome)
            error = "  -  " if outcome.error is None else f"{outcome.error:5.2f}"
            word = "ok" if outcome.passed else outcome.reason or "WRONG"
            tell(f"  {outcome.case:20} {dtype:5} {outcome.backend:7} {error}  {word}")
    wrong = sum(not outcome.passed for outcome in outcomes)
    omitted = len(dtypes) * (len(CASES) + 1) - len(outcomes)
    tell(f"  {len(outcomes) - wrong} of {len(outcomes)} right" + (f"; no time for {omitted} more" if omitted else ""))
    measured: list[Speed] = []
    if wrong:
        tell("\nWrong results have no speed.")
    else:
        tell("\nFast: median ms of a call, beside PyTorch's scaled_dot_product_attention")
        for speed in speeds(device, backend):
            measured.append(speed)
            ratio = speed.sdpa_ms / speed.ms
            tell(f"  {speed.call}: {speed.ms:.2f}, SDPA {speed.sdpa_ms:.2f}: {ratio:.2f} times as fast")
    tell("\nPeers")
    for name, version in peers().items():
        tell(f"  {name}: {version or 'not installed'}")
    if as_json:
        found = {"outcomes": [*map(asdict, outcomes)], "speeds": [*map(asdict, measured)], "peers": peers()}
        print(json.dumps({"saccade": saccade.__version__, "torch": torch.__version__, "device": str(device)} | found))
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
