"""Programs as text: what a graph carries into other processes."""

from __future__ import annotations

import base64
import json
import zlib

import pytest
import torch

from saccade import ScoreMod, alibi, bias, compose, relative_bias, scores, softcap, t5_bias
from saccade.scores.codegen import program as programs

T, TABLE = torch.rand(2), torch.rand(2, 9)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


FUNCTIONS = {
    "alibi": alibi(T),
    "bias": bias(torch.rand(9, 9)),
    "relative": relative_bias(TABLE),
    "t5": t5_bias(torch.rand(32, 2)),
    "composed": compose(softcap(2.0), alibi(T)),
    "infinite": lambda s, b, h, i, j: torch.where(i >= j, s.tanh() * T[h], float("-inf")),
    "integers": lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-4, 4) + 4] + (3 // (i + 1)) % 5,
    "dtypes": lambda s, b, h, i, j: torch.nn.functional.gelu(s).half() + (s > 0).float() + s.double(),
    "computed": lambda s, b, h, i, j: s + (T * 2).sum() + T.exp()[h] * torch.tensor(0.5),
    "rows": lambda s, b, h, i, j: s * TABLE[h].amax() + TABLE[h][3],
    "own": ScoreMod(lambda s, b, h, i, j, t: s * t[h], T, bprop=lambda g, s, b, h, i, j, t: g * t[h]),
    "autograd": lambda s, b, h, i, j: Clip.apply(s) * 1.5,
}


def text_of(described: object) -> str:
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(described).encode())).decode()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_read_again_it_is_the_same_program(name, monkeypatch):
    program = scores.bind(FUNCTIONS[name], torch.empty(1, 2, 9, 4)).program
    made = []
    monkeypatch.setattr(programs.cache, "adopt", lambda name, make: made.append((name, make())))
    text = scores.written_programs((program.identity, "none", "softcap"))
    assert not {*" ,[]"} & {*text}  # which separate the words of an operator's text
    programs.read_programs.__wrapped__(text)
    ((identity, again),) = made
    assert again is not program
    assert identity == program.identity == again.identity


def test_one_text_is_one_program():
    identity = "score(of_another_version)~0123456789ab"
    program = scores.bind(FUNCTIONS["dtypes"], torch.empty(1, 2, 9, 4)).program
    text = text_of({identity: programs._described(program)})
    for _ in range(2):
        programs.read_programs.__wrapped__(text)
        assert scores.program_of(identity) is program  # equal programs are one, whatever they are called


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("os.system.default", "os.system.default, which is no operation of torch"),
        ("aten.sum.default", "cannot reduce"),
        ("aten.rand_like.default", "random"),
    ],
)
def test_other_operations_are_refused(target, message):
    step = [target, [{"node": 0}], {"named": {}}]
    inputs = [["float32" if i == 0 else "int64", [61, 67] if i == 0 else [1, 1]] for i in range(5)]
    program = {"name": "own", "dtype": "float32", "inputs": inputs, "tensors": 0, "steps": [step]}
    text = text_of({f"own~{target}": program | {"outputs": [{"node": 5}]}})
    with pytest.raises(ValueError, match=message):
        scores.read_programs(text)
    assert scores.program_of(f"own~{target}") is None
