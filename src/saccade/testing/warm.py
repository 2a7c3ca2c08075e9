"""The kernels of a Spec, compiled into a folder of Triton's form before any call needs them."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from saccade import scores
from saccade.backends import Saved, backend_module
from saccade.call import Call, check_call
from saccade.call.descale import EIGHT_BITS, Descale
from saccade.call.spec import RECORDS, TORCH_DTYPES, Spec
from saccade.ops import dispatch
from saccade.testing.cases import Case
from saccade.testing.offline import stand_in
from saccade.util.arguments import Unsupported

PARTS = "inference", "training", "backward"
"""A forward without an LSE, a forward with one, as a backward needs it, and the backward."""
_MASKS = {"window": "window(255,0)", "prefix": "prefix(64)"}
_SCORES = {"softcap": "softcap(50)", "relative_bias": "relative_bias(128)"}
_NOT_A_SPECS = "interval", "mask_mod", "selected", "selected_blocks", "slots"
_LEARNED = "relative_bias", "t5_bias", "bias", "temperature"


@dataclass(frozen=True)
class TaskShape:
    """The shape of the call that stands for a Spec. Others run the same kernels, but for short queries with groups of
    heads, of which a tile holds several."""

    b: int = 2
    s_q: int = 1024
    s_k: int = 1024


class Task(NamedTuple):
    """What one process compiles."""

    spec: Spec
    part: str
    shape: TaskShape
    folder: str
    gpu: str
    """Its name in the tables of tile configs, or nothing."""


class Made(NamedTuple):
    """What came of it."""

    backend: str
    kernels: list[str]
    """Compiled now."""
    known: list[str]
    """In the folder before."""
    reason: str | None
    """Why there are none."""


def case_of(spec: Spec, shape: TaskShape) -> Case:
    """A Case of this Spec. Raises ValueError if its kernels depend on more than the Spec says."""
    own = "" if spec.score == "none" or set(spec.score.split("+")) <= {*scores.KINDS} else spec.score
    unknown = [word for word in _NOT_A_SPECS if word in re.findall(r"\w+", spec.mask)]
    unknown += [own] if own else []
    unknown += [word for word in ("offsets", "latent", "block_scales") if getattr(spec, word)]
    unknown += [word for word in (spec.layout, spec.kv) if word in ("paged", RECORDS)]
    if unknown or not spec.aligned:
        names = ", ".join(unknown or ["rows that are not aligned"])
        raise ValueError(
            f"kernels of {names} depend on more than a spec says: run the call itself once, with TRITON_CACHE_DIR set "
            "to the folder"
        )
    mask = re.sub(r"\w+", lambda word: _MASKS.get(word[0], word[0]), spec.mask)
    score = "+".join(_SCORES.get(word, word) for word in spec.score.split("+"))
    return Case(
        str(spec), dtype=spec.dtype, b=shape.b, h_q=2 * spec.group, h_k=2, s_q=shape.s_q, s_k=shape.s_k,
        d=spec.d, d_v=spec.d_v, mask=mask, score=score, sink=spec.sink, dropout_p=0.5 if spec.dropout else 0.0,
        order="thd" if spec.layout in ("packed", "ranges") else "bhsd", ranges=spec.layout == "ranges",
        used="qk" if spec.layout == "padded" else "all",
    )  # fmt: skip


def call_of(spec: Spec, shape: TaskShape) -> Call:
    """A Call of this Spec, on the CPU."""
    drawn = case_of(spec, shape).inputs("cpu")
    q, k, v = drawn.q, drawn.k, drawn.v
    if spec.kv:
        k, v = (x.to(TORCH_DTYPES[spec.kv]) for x in (k, v))
    given: dict[str, Any] = {"mask": None, "score_mod": None, "sink": None, "dropout_p": 0.0} | drawn.keywords
    descale = None
    if k.dtype in EIGHT_BITS:
        descale = Descale(q=1.0 if q.dtype in EIGHT_BITS else None, k=1.0, v=1.0)
    return check_call(
        q, k, v, return_max_scores=spec.max_scores, deterministic=spec.deterministic, descale=descale, **given
    )  # fmt: skip


def compile_task(task: Task) -> Made:
    """Compiles the kernels of a part of a Spec's calls. For a process that does nothing else."""
    os.environ["TRITON_CACHE_DIR"] = task.folder
    os.environ.pop("TRITON_INTERPRET", None)
    stand_in(task.spec.device, task.gpu)
    return compiled(task)


def compiled(task: Task) -> Made:
    """The same, in a process that stands in for the device already."""
    from triton import knobs

    made, known, backend = [], [], "none"

    def listen(**what: Any) -> None:
        (known if what["cache_hit"] else made).append(str(what["src"].name))

    before, knobs.compilation.listener = knobs.compilation.listener, listen
    try:
        b, rows, keys = task.shape.b, task.shape.s_q, task.shape.s_k
        gradient = task.part == "backward"
        # Where no mask says so, a last tile of keys that is not whole takes another kernel, and so do gradients of few
        # keys.
        few = [(1, 1), (1, 128)] if gradient and task.spec.mask in ("none", "causal") else []
        for s_q, s_k in [(rows, keys), (rows + 1, keys + 1), *few]:
            call = call_of(task.spec, TaskShape(b, s_q, s_k))
            plan, call = dispatch.planned(call, "auto", gradient=gradient)
            backend = plan.backend
            if gradient:
                plan.module.run_backward(call, plan.launches, _saved(call))
            else:
                plan.module.run_forward(call, plan.launches, task.part == "training")
    except Unsupported as refused:
        return Made(backend, made, known, str(refused))  # a line for each backend
    except Exception as reason:  # whatever keeps one Spec from compiling, the others still count
        return Made(backend, made, known, f"{type(reason).__name__}: {reason}".splitlines()[0])
    finally:
        knobs.compilation.listener = before
    return Made(backend, made, known, None)


def _saved(call: Call) -> Saved:
    """What a backward gets, of a forward that did not run."""
    score, q, v = call.score, call.q, call.v
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=call.out_dtype)
    learned = score is not None and any(word in score.kind.split("+") for word in _LEARNED)
    wanted = () if score is None else tuple(learned and x.is_floating_point() for x in score.tensors)
    return Saved(torch.zeros_like(out), None, out, torch.zeros(q.shape[:3]), wanted)


def parts_of(spec: Spec) -> list[str]:
    """Those that calls of a Spec may have."""
    if spec.max_scores:
        spec = replace(spec, max_scores=False)
    backends = (backend_module(name) for name in ("gluon", "triton"))
    trains = any(x.GRADIENT is not None and not x.GRADIENT.reasons(spec) for x in backends)
    return [*PARTS] if trains else [PARTS[0]]


def move(folder: Path, folder_name: str) -> None:
    """Makes a folder's lists of files name another place, where it will be. Triton writes absolute paths."""
    for file in folder.glob("*/__grp__*.json"):
        group = json.loads(file.read_text())
        paths = group["child_paths"]
        group["child_paths"] = {
            name: f"{folder_name}/{file.parent.name}/{Path(path).name}" for name, path in paths.items()
        }
        file.write_text(json.dumps(group))


# Whether what a folder of kernels holds is whole: Triton itself asks only whether the files are there


_MAGIC = b"\x7fELF\x02\x01"
"""64 bits, low bytes first."""
_SECTION = struct.Struct("<IIQQQQIIQQ")
_EMPTY_SECTION = 8
"""SHT_NOBITS: takes no bytes of the file."""


def drop_broken(folder: Path) -> list[str]:
    """Removes what makes Triton take a kernel or a launcher that is not whole for compiled; names the files."""
    at_fault = []
    for group in sorted(folder.glob("*/__grp__*.json")):
        if (broken := _broken_of(group)) is not None:
            group.unlink()
            at_fault.append(str(broken.relative_to(folder)))
    for library in sorted(folder.glob("*/*.so")):
        if not whole_elf(library.read_bytes()):
            library.unlink()
            at_fault.append(str(library.relative_to(folder)))
    return at_fault


def _broken_of(group: Path) -> Path | None:
    """The first file of a kernel's that is not whole, if any: in the group's own folder, as its list may name the place
    where that will be."""
    names_of_files = _json(group)
    paths = names_of_files.get("child_paths") if isinstance(names_of_files, dict) else None
    if not isinstance(paths, dict) or not any(name.endswith(".json") for name in paths):
        return group
    files = (group.parent / name for name in paths)
    return next((file for file in files if not _whole(file)), None)


def _whole(file: Path) -> bool:
    if not file.is_file() or not file.stat().st_size:
        return False
    if file.suffix == ".json":
        found = _json(file)
        return isinstance(found, dict) and "target" in found
    return file.suffix != ".cubin" or whole_elf(file.read_bytes())


def _json(file: Path) -> Any:
    """None of a file that holds none."""
    try:
        return json.loads(file.read_bytes())
    except ValueError:
        return None


def whole_elf(data: bytes) -> bool:
    """Whether an ELF file of 64 bits has all that its headers name.

    >>> whole_elf(b"")
    False
    """
    if not data.startswith(_MAGIC) or len(data) < 64:
        return False
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    tables_end = max(programs + program_size * program_count, sections + section_size * section_count)
    if tables_end > len(data) or section_size != _SECTION.size:
        return False
    return all(end <= len(data) for end in _ends(data, sections, section_count))


def _ends(data: bytes, folder_name: int, count: int) -> Iterator[int]:
    """Where each section ends."""
    for index in range(count):
        _, kind, _, _, offset, size, *_ = _SECTION.unpack_from(data, folder_name + index * _SECTION.size)
        yield 0 if kind == _EMPTY_SECTION else offset + size
