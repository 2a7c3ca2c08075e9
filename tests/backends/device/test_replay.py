"""Launches that are packed once: what CUDA's driver gets, of a driver that only writes it down."""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from saccade.backends.device import launch as launches
from saccade.backends.device import replay
from saccade.backends.device.launch import Launch
from saccade.backends.device.replay import Encoding, PackedLaunch, packed

FORMATS = "<Q", "<i", "<f", "<Q", "<q", "<Q", "<Q"
"""Of the kernel's parameters, after the tensor map and its numbers: `SIGNATURE`, and Triton's two pieces of scratch."""
SIGNATURE = {
    "desc": "tensordesc<bf16[64,64]>", "x": "*fp32", "shape": "constexpr", "record": ("i32", ("fp32", "constexpr")),
    "nothing": "*fp32", "wide": "i64",
}  # fmt: skip


class Driver:
    """What the launches were started with."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.errors: list[int] = []

    def cuTensorMapReplaceAddress(self, place: int, address: int) -> int:
        assert place % 128 == 0
        ctypes.memmove(place, struct.pack("<Q", address), 8)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if self.errors:
            return self.errors.pop(0)
        at = struct.unpack("<18Q", ctypes.string_at(parameters.value, 8 * 18)) if self.long else ()
        told = struct.unpack("<7I4xQQI", ctypes.string_at(config.value, 52))
        attribute = struct.unpack("<iii", ctypes.string_at(told[8], 12))[::2] if told[9] else ()
        numbers = [read(f, place) for f, place in zip(("<i", "<i", "<q", "<q"), at[1:5], strict=True)]
        rest = [read(f, place) for f, place in zip(FORMATS, at[5:], strict=False)]
        self.seen.append((told[:7], told[7], attribute, function.value, ctypes.string_at(at[0], 128), *numbers, *rest))
        return 0

    long = True

    def cuDeviceGet(self, number: Any, device: int) -> int:
        self.entered = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        return 0

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"illegal address"
        return 0


def read(form: str, place: int) -> Any:
    return struct.unpack(form, ctypes.string_at(place, struct.calcsize(form)))[0]


def encode(address: int, word: str) -> bytes:
    """A tensor map: an address, and what else it says."""
    return struct.pack("<Q", address) + word.encode().ljust(120, b".")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(replay, "driver", lambda: driver)
    monkeypatch.setattr(replay, "_idle", {})
    monkeypatch.setattr(replay, "_bytes_of", lambda x: x)
    return driver


class CudaLauncher(SimpleNamespace):
    """Triton's launcher, by its name."""


def compiled(**changes: Any) -> Any:
    run = CudaLauncher(global_scratch_size=0, profile_scratch_size=0)
    metadata = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=changes.pop("launch_pdl", False))
    vars(run).update(changes)
    found = SimpleNamespace(src=SimpleNamespace(signature=SIGNATURE), run=run, metadata=metadata, name="kernel")
    found.packed_metadata, found.function = (4, 1, 4096), 77
    return found


def launch_of(x: Tensor, y: Tensor, kernel: Any, number: float = 0.25) -> PackedLaunch | None:
    arguments = SimpleNamespace(base=x), y, "constant", (5, (number, True)), None, -(1 << 40)
    encodings = [Encoding(encode, ("map",), (64, 32), (32, 1))]
    places = {id(x): (0, 0), id(y): (2, 16)}
    return packed(kernel, (3, 2, 1), arguments, encodings, lambda tensor: places.get(id(tensor)))


def test_what_the_driver_gets(driver: Driver) -> None:
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    launch = launch_of(x, y, compiled(launch_pdl=True))
    assert launch is not None
    for stream, addresses in ((7, [1 << 12, 0, 1 << 13]), (9, [1 << 14, 5, 1 << 15]), (7, [1 << 12, 0, 1 << 13])):
        launch(0, stream, addresses)
        numbers = 64, 32, 32, 1, addresses[2] + 16, 5, 0.25, 0, -(1 << 40), 0, 0
        told = (3, 2, 1, 128, 1, 1, 4096), stream, (6, 1), 77, encode(addresses[0], "map"), *numbers
        assert driver.seen[-1] == told


def test_floats_beyond_float32_are_infinite_as_by_triton(driver: Driver) -> None:
    launch = launch_of(torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4), compiled(), -1e40)
    assert launch is not None
    launch(0, 0, [1 << 12, 0, 1 << 13])
    assert driver.seen[-1][11] == -math.inf


def test_threads_have_memory_of_their_own(driver: Driver) -> None:
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    launch = launch_of(x, y, compiled())
    assert launch is not None

    def work(n: int) -> None:
        for i in range(100):
            launch(0, n, [(n << 20) + i, 0, (n << 30) + i])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.seen) == 400
    for told in driver.seen:
        stream, first, second = told[1], struct.unpack("<Q", told[4][:8])[0], told[9] - 16
        assert first >> 20 == second >> 30 == stream
        assert first & 0xFFFFF == second & 0xFFFFF


def test_launches_whose_parameters_lie_alike_share_memory(driver: Driver) -> None:
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    one, two = launch_of(x, y, compiled(launch_pdl=True)), launch_of(x, y, compiled(), 0.5)
    assert one is not None
    assert two is not None
    two.compiled.function, two.sizes = 78, (9, 1, 1, 64, 1, 1, 0)
    addresses = [1 << 12, 0, 1 << 13]
    started = []
    for launch in (one, two, one, one, two):
        launch(0, 7, addresses)
        started.append(driver.seen[-1])
    assert len(one.idle) == 1
    assert one.idle is two.idle
    assert started[0] == started[2] == started[3] != started[1] == started[4]
    assert [(x[0][0], x[2], x[3], x[11]) for x in started[:2]] == [(3, (6, 1), 77, 0.25), (9, (), 78, 0.5)]


def test_errors_of_the_driver(driver: Driver) -> None:
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    launch = launch_of(x, y, compiled())
    assert launch is not None
    driver.errors = [201]  # no context: it is entered, and the launch goes on
    launch(3, 0, [0, 0, 0])
    assert driver.entered == 3
    driver.errors = [700]
    with pytest.raises(RuntimeError, match=r"kernel: illegal address \(700\)"):
        launch(0, 0, [0, 0, 0])


@pytest.mark.parametrize(
    "change", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"gsan_enabled": True}], ids=str
)
def test_what_triton_has_to_launch(change: dict[str, Any], driver: Driver) -> None:
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    assert launch_of(x, y, compiled(**change)) is None
    kernel = compiled()
    kernel.packed_metadata = 4, 2, 4096  # a cluster
    assert launch_of(x, y, kernel) is None
    kernel = compiled()
    kernel.run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)  # of another maker
    assert launch_of(x, y, kernel) is None
    assert launch_of(x, torch.zeros(4), compiled()) is not None
    assert (
        packed(compiled(), (1, 1, 1), (SimpleNamespace(base=x), y, 0, (5, (0.25, True)), None, 1), [], lambda _: None)
        is None
    )


def test_maps_whose_addresses_cannot_be_replaced(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a driver or Triton writes more than the address in it, Triton encodes each map."""
    monkeypatch.setattr(replay, "_bytes_of", lambda x: x[:8] + x[:8] + x[16:])
    x, y = torch.zeros(64, 32, dtype=torch.bfloat16), torch.zeros(4)
    assert launch_of(x, y, compiled()) is None


# Recorders


class Kernel:
    """What a Launch runs."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        found = compiled()
        found.src.signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "space": "*fp32", "n": "i32"}
        found.run = type("CudaLauncher", (), {"__call__": lambda *_: None})()
        return found

    def __getitem__(self, _: Any) -> Kernel:
        return self


def recorded(work: Any, *operands: Tensor) -> Any:
    with replay.LaunchRecorder() as watching:
        results = work(*operands)
    return watching.replay(operands, results)


@pytest.fixture
def launch(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    driver.long = False
    launch = Launch(Kernel(), (1, 1, 1), ())
    launch.compiled = Kernel()()
    return launch


def started(driver: Driver, monkeypatch: pytest.MonkeyPatch, repeat: Any, *operands: Tensor) -> Any:
    """The addresses that the kernel gets, and what the repeat returns."""
    seen: list[list[int]] = []

    def start(config: Any, function: Any, parameters: Any, extra: None) -> int:
        at = struct.unpack("<5Q", ctypes.string_at(parameters.value, 40))
        seen.append([read("<Q", place) for place in at[:4]])
        return 0

    monkeypatch.setattr(driver, "cuLaunchKernelEx", start, raising=False)
    return repeat([x.data_ptr() for x in operands]), seen


def test_allocations_views_and_launches_are_recorded(
    launch: Launch, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(x: Tensor, y: Tensor) -> list[Tensor | None]:
        out = torch.empty(4, 2, 3).permute(1, 0, 2)
        space = torch.empty(100), torch.empty(50)
        launch(None, (x, y[:, 2:], out, space[1][10:], 3))
        return [out, None]

    given = torch.zeros(8, 8), torch.zeros(8, 8)
    repeat = recorded(work, *given)
    assert repeat.ready()
    others = torch.zeros(8, 8), torch.zeros(8, 8)
    (out, nothing), seen = started(driver, monkeypatch, repeat, *others)
    assert nothing is None
    assert (out.shape, out.stride()) == ((2, 4, 3), (3, 6, 1))
    x, y, result, space = seen[0]
    assert (x, y, result) == (others[0].data_ptr(), others[1].data_ptr() + 8, out.data_ptr())
    assert space not in (0, x, y, result)


def test_results_are_allocated_behind_launches_that_need_none(
    launch: Launch, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(x: Tensor, y: Tensor) -> list[Tensor]:
        out, space = torch.empty(4), torch.empty(50)
        for third in (space, out, space):
            launch(None, (x, y, third, space, 3))
        return [out]

    repeat = recorded(work, torch.zeros(8), torch.zeros(8))
    (out,), seen = started(driver, monkeypatch, repeat, torch.zeros(8), torch.zeros(8))
    assert [third == out.data_ptr() for _, _, third, _ in seen] == [False, True, False]
    done, empty = list[str](), replay.empty
    monkeypatch.setattr(replay, "empty", lambda *given: done.append("allocated") or empty(*given))
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *given: done.append("started") or 0)
    repeat([out.data_ptr()] * 2)
    assert done == ["allocated", "started", "allocated", "started", "started"]


@pytest.mark.parametrize("device", [SimpleNamespace(index=0), torch.device("cpu")], ids=str)
def test_results_past_the_dispatcher(device: Any, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the current device the mode does not see them, and the recorder is told."""

    def on_cuda(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with torch._C._DisableTorchDispatch():
            return torch.empty_strided(shape, strides, dtype=dtype)

    def work(x: Tensor, y: Tensor) -> list[Tensor]:
        out = replay.empty_strided((2, 3), (1, 2), dtype=torch.float32, device=device)
        launch(None, (x, y, out, out, 3))
        return [out]

    monkeypatch.setattr(replay, "_on_cuda", on_cuda)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    repeat = recorded(work, torch.zeros(8), torch.zeros(8))
    (result,) = repeat.results
    assert (result.shape, result.strides) == ((2, 3), (1, 2))


def test_whatever_else_a_call_does_is_not_repeated(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(x: Tensor, y: Tensor, out: Tensor | None = None) -> list[Tensor]:
        out = torch.empty(8, 8) if out is None else out
        launch(None, (x, y, out, out, 3))
        return [out]

    kept = torch.zeros(8, 8)
    works = {
        "an operation": lambda x, y: launched(x + 1, y),
        "a copy": lambda x, y: launched(x.mT.contiguous(), y),
        "wide numbers": lambda x, y: launched(x, y, torch.full((8, 8), 3, dtype=torch.int64)),
        "a part that is filled": lambda x, y: [launched(x, y)[0][:, :4].zero_()],
        "another tensor": lambda x, y: launched(x, kept),
        "part of a result": lambda x, y: [launched(x, y)[0][1:]],
        "a part of an operand": lambda x, y: [launched(x, y) and x[1:]],
        "no launch": lambda x, y: [torch.empty(8, 8)],
    }
    given = torch.zeros(8, 8), torch.zeros(8, 8)
    assert recorded(launched, *given) is not None
    for what, work in works.items():
        assert recorded(work, *given) is None, what
    one = torch.zeros(2, 8, 8)  # operands of one piece of memory: an argument belongs to that whose element it is
    assert recorded(lambda x, y: launched(x[1:], y), one[0], one[1]) is not None
    assert recorded(lambda x, y: launched(x, y[2:]), one[0], one[0]) is not None  # a key says that they are one
    assert recorded(lambda x, y: launched(x, y[2:]), one[0], one[0, 2:]) is None  # or which of two
    launch.compiled = None
    monkeypatch.setattr(launches, "triton_backend", lambda: None)
    assert recorded(launched, *given) is None


def test_fills_are_done_again(launch: Launch, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that a call allocates, returns or is given, with any pattern of at most four bytes."""

    def work(x: Tensor, y: Tensor) -> list[Tensor | None]:
        out, halves = torch.full((4, 2), -torch.inf), torch.empty(6, dtype=torch.bfloat16).fill_(1)
        launch(None, (x, y.zero_(), out, torch.zeros(3, dtype=torch.int64), 3))
        launch(None, (x, y, halves, torch.zeros(0), 3))
        return [out, y]

    filled: list[tuple[int, int, int, int]] = []
    for width in (1, 2, 4):

        def fill(place: Any, pattern: int, many: Any, stream: Any, width: int = width) -> int:
            filled.append((width, pattern, many.value, place.value))
            return 0

        monkeypatch.setattr(driver, f"cuMemsetD{8 * width}Async", fill, raising=False)
    repeat = recorded(work, torch.zeros(8, 8), torch.ones(8, 8))
    others = torch.zeros(8, 8), torch.zeros(8, 8)
    (out, same), seen = started(driver, monkeypatch, repeat, *others)
    assert same is None  # the operand itself
    assert [x[:3] for x in filled] == [(4, 0xFF800000, 8), (2, 0x3F80, 6), (1, 0, 256), (1, 0, 24)]
    assert [x[3] for x in filled] == [out.data_ptr(), seen[1][2], others[1].data_ptr(), seen[0][3]]


def test_what_lives_on_is_read_on_its_stream(launch: Launch, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = torch.zeros(8)

    def work(x: Tensor, y: Tensor) -> list[Tensor]:
        replay.note_kept(lists)
        out = torch.empty(8, 8)
        launch(None, (x, y, out, lists[2:], 3))
        return [out]

    repeat = recorded(work, torch.zeros(8, 8), torch.zeros(8, 8))
    assert repeat.ready()
    _, seen = started(driver, monkeypatch, repeat, torch.zeros(8, 8), torch.zeros(8, 8))
    assert seen[0][3] == lists.data_ptr() + 8
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 8, raising=False)
    assert not repeat.ready()


def test_hooks_end_repeats(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(x: Tensor, y: Tensor) -> list[Tensor]:
        out = torch.empty(8, 8)
        launch(None, (x, y, out, None, 3))
        return [out]

    repeat = recorded(work, torch.zeros(8, 8), torch.zeros(8, 8))
    assert repeat.ready()
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert not repeat.ready()
    monkeypatch.undo()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert not repeat.ready()


WATCHED = """
import sys, torch
from saccade.backends.device.replay import LaunchRecorder

with LaunchRecorder() as watched:
    torch.empty(4).view(2, 2)
assert len(watched.allocated) == 1 and not watched.obstacle
print(*sorted({"sympy", "torch._dynamo", "torch._inductor"} & {*sys.modules}))
"""


def test_a_call_that_is_watched_imports_no_compiler(fresh_process):
    assert not fresh_process(WATCHED).strip()
