"""Where tests run, and what they poison."""

from __future__ import annotations

import datetime
import gc
import hashlib
import json
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
import torch

from saccade.backends.cpu import tiled
from saccade.util import hardware
from tests.support.devices import DEVICES, EMULATES, INTERPRETED, Device, on

if INTERPRETED:
    from tests.support.interpreter import (  # noqa: F401
        addresses_are_inside,
        interpreter_spares_work,
        triton_takes_cpu_tensors,
    )

# What needs the emulator, and folders that run no kernels under their own names.
TESTS = Path(__file__).parent
EMULATED = ("emulator", *(f"backends/{x}.py" for x in ("device/test_recorded_calls", "hopper/test_arrivals",
            "hopper/test_kernels")))  # fmt: skip
NOT_INTERPRETED = ("benchmarks", "cli", "compat", "distributed", "gate", "integrations", "project", "random_calls",
                   "testing", "upstream", "util")  # fmt: skip
TAKES_DEVICE = re.compile(r"\bdef \w+\([^)]*\bdevice\b")
collect_ignore = [*(() if EMULATES else EMULATED), *(NOT_INTERPRETED if INTERPRETED else ())]

# These tensors are too small to share out, and where processes compete, threads that wait for one another cost most.
torch.set_num_threads(1)

# A fixed seed in CI, a new one elsewhere: what a run elsewhere finds, hypothesis' own database keeps.
hypothesis.settings.register_profile("local", deadline=None, max_examples=40)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A test module that does not import is an error: --doctest-ignore-import-errors makes a skip of it."""
    report = yield
    if report.skipped and "unable to import module" in str(report.longrepr):
        report.outcome = "failed"
        try:
            runpy.run_path(str(collector.path))
        except ImportError as error:
            report.longrepr = f"{collector.path}: {error}"
    return report


PROCESSORS = ("amx", "avx512_bf16", "none")
"""What `hardware.cpu_bf16()` may answer: each is another path of the cpu backend, and all of them run on any CPU."""


class Place(NamedTuple):
    """A backend, the device it runs on, and one of the dtypes it takes."""

    backend: str
    device: str
    dtype: str
    processor: str = ""
    """Whose path the cpu backend takes; this machine's if empty."""
    threads: int = 0
    """By how many threads it works, on the smallest tile too; if 0, as the machine and the size say."""

    def __str__(self) -> str:
        threads = f"{self.threads}threads" if self.threads else ""
        return "-".join(filter(None, (*self[:4], threads)))


PLACES = [
    *(Place("cpu", "cpu", dtype) for dtype in ("fp16", "fp32", "fp64")),
    *(Place("cpu", "cpu", "bf16", processor) for processor in PROCESSORS),
    *(Place("cpu", "cpu", dtype, "avx512_bf16", threads=3) for dtype in ("bf16", "fp32")),
    Place("reference", "cpu", "fp32"),
    *(pytest.param(Place("auto", "cuda", dtype), marks=pytest.mark.gpu) for dtype in ("fp16", "bf16")),
    *(pytest.param(Place("triton", "cuda", dtype), marks=pytest.mark.gpu) for dtype in ("fp16", "bf16", "fp32")),
]


@pytest.fixture(params=PLACES, ids=str)
def place(request, monkeypatch):
    """Every backend on its device in every dtype, on a CPU on every path; on a GPU with `-m gpu`."""
    if request.param.processor:
        monkeypatch.setattr(hardware, "cpu_bf16", lambda: request.param.processor)
    if request.param.threads:
        monkeypatch.setattr(tiled, "threads", lambda: request.param.threads)
        monkeypatch.setattr(tiled, "ALONE", 0)
    return request.param


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    """The paths that bfloat16 takes on any CPU, for tests that choose their dtypes themselves."""
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: request.param)
    return request.param


@pytest.fixture(params=on(*DEVICES).args[1])
def device(request):
    """A `Device`: the CPU, Triton's interpreter where TRITON_INTERPRET=1, the emulator, and with `-m gpu` a GPU."""
    with request.param.running():
        yield request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_device(request):
    """PyTorch's word for it, for tests that leave the backend to the dispatch."""
    return request.param


@pytest.fixture(params=["gluon", "triton"])
def backend(request):
    """The GPU backends with kernels of their own."""
    if request.param == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU (sm_90)")
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers_alone_and_in_company():
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats three stacks where there is no GPU
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture
def company():
    """Another process has work for the GPU all the time, products and copies: it takes turns with this one, and
    interrupts launches."""
    work = (
        "import torch; x = torch.randn(4096, 4096, device='cuda'); y = torch.empty(1 << 29, device='cuda')\n"
        "while True: torch.mm(x, x).sum().item(); y[: 1 << 28].copy_(y[1 << 28 :])"
    )
    other = subprocess.Popen([sys.executable, "-c", work])
    yield
    other.kill()
    other.wait()


@pytest.fixture
def captured():
    """Captures what a function does in a CUDA graph and gives the graph with the results, whose memory each replay
    writes. It runs before, once to compile, and once more, where nothing may wait for the host."""

    def capture(step):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph, found

    return capture


@pytest.fixture
def poison(monkeypatch):
    """Fresh memory is NaN, or the largest integer: what is read before it is written shows."""

    def filled(made):
        if made.is_floating_point():
            return made.fill_(torch.nan)
        return made.fill_(True if made.dtype == torch.bool else torch.iinfo(made.dtype).max)

    def poisoned(function):
        return lambda *args, **kwargs: filled(function(*args, **kwargs))

    import_module("torch._dynamo")  # which lists torch's functions once
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))


@pytest.fixture
def surrounded():
    """Copies a (b, h, s, d) tensor into NaN: behind every row, behind the last row and before the first."""

    def copied(x):
        b, h, s, d = x.shape
        memory = torch.full((b, h, s + 40, d + 16), torch.nan, device=x.device, dtype=x.dtype)
        memory[:, :, 16 : s + 16, 8 : d + 8] = x
        return memory[:, :, 16 : s + 16, 8 : d + 8]

    return copied


FORKS = """
import json, os, signal, sys, torch
for line in sys.stdin:
    code, *files = json.loads(line)
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(240)
for number, file in enumerate(files, 1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
exec(code, {"__name__": "__main__"})
"""
"""A process that has imported torch, which takes seconds, and nothing else of weight: for each line, a list of code and
of files for what it prints, a fork of it runs the code, and a line tells its exit code."""


@pytest.fixture(scope="session")
def forks():
    with subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as x:
        yield x
        x.stdin.close()


@pytest.fixture
def fresh_process(forks, tmp_path):
    """Runs Python code in a process of its own, which has imported torch alone, and returns what it prints."""

    def run(code: str) -> str:
        out, err = tmp_path / "out", tmp_path / "err"
        print(json.dumps([code, str(out), str(err)]), file=forks.stdin, flush=True)
        status = forks.stdout.readline().strip()
        assert status == "0", f"exit code {status}: {err.read_text()}"
        return out.read_text()

    return run


FORWARD_KERNELS = {"gluon": "hopper.forward.kernel", "triton": "triton.forward_kernel"}


@pytest.fixture
def forward_kernel():
    """A function that gives a backend's forward kernel."""
    return lambda backend: import_module(f"saccade.backends.{FORWARD_KERNELS[backend]}").forward_kernel


def pytest_collection_finish():
    """What is there by now stays: collections of garbage need not look at it."""
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="all cases, but of matrices a sample")
    parser.addoption("--everything", action="store_true", help="all cases")
    parser.addoption("--tenth", metavar="SEED", help="a tenth of the files, drawn by this seed")


def pytest_ignore_collect(collection_path, config):
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    if INTERPRETED and "triton" not in collection_path.parts and not TAKES_DEVICE.search(collection_path.read_text()):
        return True
    if seed := config.getoption("--tenth"):
        name = f"{seed} {collection_path.relative_to(config.rootpath)}"
        return _hash(name)[0] % 10 > 0 or None
    return None


SHARE, SLOW_SHARE, DAYS = 8, 40, 4


@pytest.hookimpl(tryfirst=True)  # others sort the items
def pytest_collection_modifyitems(config, items):
    """Of each test one case in eight, the same ones in each run, and each value of each parameter but of a `seed`; of a
    test marked `slow` one case in eight, others each day; of the tests marked `rare` a quarter, others each day; of
    each test in the interpreter and in the emulator one case in forty. With --all such samples are of matrices alone,
    which are the tests marked `sample`, and in the interpreter and in the emulator those with a `device`: all of their
    cases run on the CPU with --everything. On a GPU, and of a test that is named, all run. Where TRITON_INTERPRET=1,
    what the interpreter runs."""
    left_out = {item for item in items if (_device(item) == "interpreter") != INTERPRETED}
    if not any("::" in arg for arg in config.args):
        level = "everything" if config.getoption("--everything") else "all" if config.getoption("--all") else ""
        left_out |= _left_out_of_samples(items, level)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _left_out_of_samples(items, level):
    tests, left_out = defaultdict(list), set()
    for item in items:
        device = _device(item)
        slow = device in ("interpreter", "emulator")
        matrix = slow and "device" in item.fixturenames
        matrix |= level != "everything" and (not level or item.get_closest_marker("sample") is not None)
        if matrix and device != "cuda" and hasattr(item, "callspec"):
            tests[item.path, item.originalname, device, slow and not level].append(item)
    for (*_, few), cases in tests.items():
        seen, kept, share = set(), 0, SLOW_SHARE if few else SHARE
        for item in sorted(cases, key=_drawn):
            values = set() if few or (not level and item.get_closest_marker("slow")) else _values(item)
            if kept * share >= len(cases) and values <= seen:
                left_out.add(item)
            else:
                seen |= values
                kept += 1
    rare = defaultdict(set)
    for item in items:
        if not level and item.get_closest_marker("rare") and _device(item) != "cuda":
            rare[item.path, item.originalname].add(item)
    today = sorted(rare, key=lambda test: _hash(f"{os.environ['SEED']}{test[1]}"))[: (len(rare) + DAYS - 1) // DAYS]
    return left_out.union(*(rare[test] for test in rare if test not in today))


def pytest_configure(config):
    os.environ.setdefault("SEED", str(datetime.date.today()))  # and so in the processes that this one starts


def pytest_report_header(config):
    return f"slow and rare tests are drawn by SEED={os.environ['SEED']}"


def _drawn(item):
    return _hash(f"{os.environ['SEED'] if item.get_closest_marker('slow') else ''}{item.name}")


def _hash(text):
    return hashlib.sha256(text.encode()).digest()


def _values(item):
    values = list(enumerate(item.callspec._idlist))
    seeds = [x for x in values if x[1] == str(item.callspec.params.get("seed"))]
    return {*values} - {*(seeds if len(seeds) == 1 else ())}


def _device(item):
    """The name of a test's `device`, and where what only one backend has runs."""
    if item.get_closest_marker("gpu"):
        return "cuda"
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if isinstance(params.get("device"), Device):
        return params["device"].name
    return _device_of_file(item.path)


@cache
def _device_of_file(path):
    if "triton" in path.parts:
        return "interpreter"
    return "emulator" if any(path.is_relative_to(TESTS / x) for x in EMULATED) else "cpu"
