"""Why a backend was chosen, and why not the others."""

from __future__ import annotations

from saccade.backends import key_lists
from saccade.call import Call
from saccade.call.spec import EIGHT_BIT_WORDS, Spec
from saccade.ops import dispatch, shared_pages
from saccade.ops.dispatch import Unsupported
from saccade.ops.score_windows import WHOLE_SCORES, move_to_mask, window_and_rest
from saccade.util import hardware


class Explanation:
    """Why a backend was chosen, and why not the others; prints as a small table.

    Attributes:
        spec: the call's Spec.
        backend: the chosen one's name, or None.
        gradient: the name of the backend whose backward its gradients take, or None.
        reasons: backend name -> the reasons against it; an empty list is one that runs.
        outrun: backend name -> why "auto" leaves the forward, which it runs, to a faster one.
        hidden: the part of the mask that the score function is, or None.
        lists: how lists of keys run, or None.
        shared: what is done about a layout's shared pages, or None.
        pays: what 8-bit operands were measured to gain on Hopper, where that is little or not known, or None.
        elsewhere: what is not known of a device that this machine does not have, or None.
    """

    def __init__(self, call: Spec | Call, backend: str = "auto") -> None:
        whole, self.hidden = call, None
        if isinstance(call, Call):
            split = window_and_rest(call, backend)
            self.hidden = split and split[0]
            call = move_to_mask(call, backend)
        self.spec = call if isinstance(call, Spec) else call.spec
        calls = {name: whole if name in WHOLE_SCORES else call for name in dispatch.NAMES}
        self.reasons = {name: dispatch.reasons_against(name, calls[name]) for name in dispatch.NAMES}
        self._asked = dispatch.BACKENDS if backend == "auto" else (backend,)
        self.outrun: dict[str, str] = {}
        if isinstance(call, Call):
            able = [name for name, against in self.reasons.items() if not against]
            self.outrun = {name: why for name in able if (why := dispatch.slower_than_next(name, call)) is not None}
        plan = self._plan = _plan_if_any(call, backend)
        self.shared = None
        if plan and isinstance(whole, Call) and whole.layout.shared_pages and plan.backend != "reference":
            self.shared = shared_pages.explanation(whole, backend)
        self.backend = plan.backend if plan else None
        self.lists = key_lists.explanation(call, plan.backend) if plan and isinstance(call, Call) else None
        self.workspace = plan.module.workspace(self.spec) if plan else None
        self.pays = _pays(self.spec, self.backend)
        self.elsewhere = None
        if not hardware.present(self.spec.device):
            self.elsewhere = _elsewhere(self.spec.device)
        self.gradient = self.backend
        if plan and plan.backend != "reference":  # which PyTorch differentiates itself
            gradient = _backward_if_any(call, backend)
            self.gradient = gradient.backend if gradient else None

    @property
    def plan(self) -> dispatch.Plan:
        """The Plan that `attention` would use: the Spec, and the backend that runs it.

        Raises:
            Unsupported: no backend runs the call, or not the one that was named.

        >>> explain("bf16 d128 cpu").plan.backend
        'cpu'
        """
        if self._plan is None:
            asked = {name: self.reasons[name] for name in self._asked}
            raise Unsupported(dispatch.refusal(self.spec, asked))
        return self._plan

    def __str__(self) -> str:
        lines = [str(self.spec)]
        for name, against in self.reasons.items():
            outrun = self.outrun.get(name)
            passed_over = "runs it, not chosen" if outrun is None else f"runs it, not chosen: {outrun}"
            verdict = "; ".join(against) or (self._chosen() if name == self.backend else passed_over)
            lines.append(f"  {name}: {verdict}")
        if self.hidden is not None:
            lines.append(f"  part of the score function masks keys: it runs as the mask {self.hidden!r}")
        if self.shared is not None:
            lines.append(f"  {self.shared}")
        lines += [f"  {note}" for note in (self.lists, self.pays, self.elsewhere) if note is not None]
        if self.workspace:
            lines.append(f"  memory besides the outputs: {self.workspace}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """The explanation as a dict of JSON's types.

        >>> found = explain("fp32 d64 causal cpu").as_dict()
        >>> found["backend"], found["gradient"], found["reasons"]["gluon"][0]
        ('cpu', 'cpu', 'runs on sm90, not on cpu')
        """
        notes = {name: getattr(self, name) for name in ("lists", "shared", "pays", "elsewhere")}
        return {
            "spec": str(self.spec),
            "backend": self.backend,
            "gradient": self.gradient,
            "reasons": self.reasons,
            "outrun": self.outrun,
            "hidden": None if self.hidden is None else repr(self.hidden),
            "memory": self.workspace,
            **notes,
        }

    def _chosen(self) -> str:
        if self.gradient == self.backend:
            return "chosen"
        return f"chosen, with the backward of {self.gradient}" if self.gradient else "chosen, without a backward"

    __repr__ = __str__


def _elsewhere(device: str) -> str:
    needs = "where it is, a GPU's backends need its PyTorch, which brings triton"
    if device.startswith("sm"):
        needs += ", and cudnn needs saccade[cudnn]"
    known = hardware.known(device)
    return f"{device} is not in this machine{'' if known else ', and no GPU that this version knows'}: {needs}"


def _backward_if_any(call: Spec | Call, backend: str) -> dispatch.Plan | None:
    """The Plan of the backward, of 8-bit operands that of their values if they have one."""
    if isinstance(call, Call) and call.descale is not None:
        if call.layout.gradient_error or not call.descale.backward:
            return None
        call = call.dequantized(call.out_dtype)
    return _plan_if_any(call, backend, gradient=True)


def _plan_if_any(call: Spec | Call, backend: str, gradient: bool = False) -> dispatch.Plan | None:
    try:
        return dispatch.plan_of(call, backend, gradient)
    except Unsupported:
        return None


def _pays(spec: Spec, backend: str | None) -> str | None:
    """A note for calls where 8-bit operands are not faster, with the measured row."""
    eight_bits = spec.dtype.startswith("fp8") or spec.kv in EIGHT_BIT_WORDS
    if spec.device != "sm90" or backend is None or not eight_bits:
        return None
    if spec.kv:
        return (
            "8-bit pages take half the time of 16-bit ones where reading is most of it, and 0.85 to 0.98 of it for 8k "
            "keys in all and fewer (benchmarks/tables/h200/decode-8bit-e3c735d.txt)"
            if spec.layout == "paged"
            else "8-bit keys and values beside 16-bit queries save memory; their time was measured over pages alone"
        )
    if backend != "gluon":
        return f"8-bit products of {backend} have not been timed; those of gluon are faster than 16-bit ones"
    if max(spec.d, spec.d_v) <= 64:
        return (
            "FP8 hardly pays at d 64: 1.04 to 1.14 times the speed of 16 bits from 2k to 16k, without quantize "
            "(benchmarks/results/h200/2026-11-22-fp8-20c2747.jsonl)"
        )
    return None
