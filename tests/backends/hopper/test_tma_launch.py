"""A second launch hands Triton's launcher what Triton's own wrapper would have."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia  # noqa: E402

from saccade.backends.hopper.tma_launch import TMALaunch, shape_of  # noqa: E402

SIGNATURE = {
    0: "tensordesc<bf16[64,64]>",
    1: "tensordesc<bf16[128,64]>",
    2: "*fp32",
    3: "i32",
    4: "i32",
    5: "constexpr",
}
METADATA = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False},
    {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False},
]


class Launcher:
    """What CudaLauncher is for a kernel with descriptors: `launch` goes through Triton's wrapper."""

    def __init__(self, seen):
        def raw(*arguments):
            seen.append(arguments)

        self.launch = nvidia.wrap_handle_tensordesc(raw, SIGNATURE, METADATA)

    def __call__(self, *arguments):
        if triton.__version__.startswith("3.6"):
            self.launch(*arguments[:5], False, False, None, None, *arguments[5:])
        else:
            self.launch(*arguments[:9], arguments[9:])


@pytest.fixture(autouse=True)
def _driver(monkeypatch):
    def encode(*arguments):
        return ("encoded", *map(str, arguments))

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)


def test_strides_that_no_address_depends_on():
    """A dimension of one element has any stride; a bulk copy takes multiples of 16 bytes."""
    x = torch.zeros(96, 64, dtype=torch.bfloat16)
    views = x.as_strided((1, 1, 96, 64), (7, 3, 64, 1)), x.as_strided((96, 1, 1, 64), (64, 24, 1, 1))
    assert [shape_of(view, (1, 1, 32, 64))["strides"] for view in views] == [[0, 0, 64, 1], [64, 24, 0, 1]]


def test_second_launch_passes_what_the_wrapper_would():
    seen: list[tuple] = []
    compiled = SimpleNamespace(run=Launcher(seen), function=1, packed_metadata=(4, 1))
    operands = torch.zeros(2, 96, 64, dtype=torch.bfloat16), torch.zeros(3, 256, 64, dtype=torch.bfloat16)
    shapes = [shape_of(x, (1, n, 64)) for x, n in zip(operands, (64, 128), strict=True)]
    rest = torch.zeros(3), 5
    launch = TMALaunch(None, (2, 1, 1), shapes, (6,), {"FOLD": True}, {})
    launch.keep(compiled)
    assert launch.encoded is not None
    launch(0, operands, rest)
    launch.encoded = None
    launch(0, operands, rest)
    ours, theirs = seen
    assert len(ours) == len(theirs) > 9
    flat = [list(x[:9]) + list(x[9:] if triton.__version__.startswith("3.6") else x[9]) for x in seen]
    assert list(map(str, flat[0])) == list(map(str, flat[1]))


def test_a_launcher_of_another_make_gets_descriptors():
    seen: list[tuple] = []
    compiled = SimpleNamespace(run=lambda *arguments: seen.append(arguments), function=1, packed_metadata=(4, 1))
    x = torch.zeros(2, 96, 64, dtype=torch.bfloat16)
    launch = TMALaunch(None, (2, 1, 1), [shape_of(x, (1, 64, 64))], (), {}, {})
    launch.keep(compiled)
    assert launch.encoded is None
    launch(0, (x,), (5,))
    assert seen[0][9].base is x
    assert seen[0][10] == 5
