"""The examples run."""

from __future__ import annotations

import importlib.util
import json
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("prefix", "pages"), [(0, 10), (37, 13)])
def test_serve_decode(monkeypatch, capsys, device, prefix, pages):
    """Requests that wait for slots and for pages; what they say is what a plain loop says: the example asserts it."""
    given = ["serve_decode.py", "--requests", "7", "--slots", "3", "--pages", str(pages), "--device", device]
    monkeypatch.setattr(sys, "argv", [*given, "--prefix", str(prefix)])
    runpy.run_path(str(EXAMPLES / "serve_decode.py"), run_name="__main__")
    told = capsys.readouterr().out
    assert "7 requests" in told
    assert " 0 evictions" not in told
    assert "tokens are those of a plain loop" in told


def test_what_is_said_depends_on_nobody_else(device):
    """Requests say the same one by one and in batches, with and without a shared prefix, drafts and evictions."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, prefix = example["Model"]().to(device), list(range(50))
    said = []
    for slots, pages, shared, drafts in (
        (1, 20, prefix, False),
        (5, 60, prefix, True),
        (3, 60, [], True),
        (5, 14, prefix, True),
    ):
        requests = example["drawn_requests"](5, prefix)
        _, evictions, _ = example["serve"](requests, slots, pages, shared, model, drafts)
        said.append([request.said for request in requests])
    assert evictions
    assert said[0] == said[1] == said[2] == said[3]
    assert said[0] == [example["plain_loop"](model, request) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 16, 32, 40])
def test_prompts_share_what_they_begin_with(device, length):
    """Prompts that are the prefix, go on after it, end inside of it, leave it, or have nothing of it, side by side."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, dice = example["Model"]().to(device), random.Random(length)
    prefix = [dice.randrange(256) for _ in range(length)]
    for slots, pages in ((1, 10), (3, 14), (8, 64)):
        prompts = [prefix, prefix[:16], prefix[:17], prefix[: length // 2], [*prefix[:-1], 255 - sum(prefix[-1:])]]
        prompts += [prefix + [dice.randrange(256) for _ in range(dice.choice([1, 2, 40]))] for _ in range(3)]
        prompts += [[dice.randrange(256) for _ in range(dice.randint(1, 60))] for _ in range(2)]
        requests = [
            example["Request"](
                prompt, dice.randint(1, 5), dice.choice([0.0, 1.0]), dice.choice([1.0, 0.5]), dice.randrange(1 << 63)
            )
            for prompt in dice.sample(prompts, len(prompts))
            if prompt
        ]
        example["serve"](requests, slots, pages, prefix, model)
        assert [x.said for x in requests] == [example["plain_loop"](model, x) for x in requests]
        for x in requests:
            ends = [16 * i for i in range(length // 16 + 1) if 16 * i < len(x.prompt)]
            assert 16 * x.shared == max(end for end in ends if x.prompt[:end] == prefix[:end])


def test_a_prefix_that_is_not_that_of_the_prompt_changes_tokens(device):
    """Sharing by number instead of by tokens is noticed."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, server = example["Model"]().to(device), example["Server"]
    request = example["Request"]([1] * 40, 8)
    server._shares = lambda self, request: 2
    example["serve"]([request], 1, 64, [2] * 32, model)
    assert request.said != example["plain_loop"](model, request)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([], 3), "a prompt needs a token"),
        (([1], 0), "wanted must be an integer of at least 1, got 0"),
        (([1], -1), "wanted must be .* got -1"),
        (([1] * 250, 7), "may have 256 tokens, got a prompt of 250 and wanted=7"),
        (([3, 256], 2), r"tokens must be integers in \[0, 256\), got 256 at 1 of the prompt"),
        (([-1], 2), "tokens must be .* got -1 at 0"),
        (([1.5], 2), "tokens must be .* got 1.5 at 0"),
        (([1], 2, -1.0), "temperature must be at least 0, got -1.0"),
        (([1], 2, float("nan")), "temperature must be at least 0, got nan"),
        (([1], 2, None), "temperature must be at least 0, got None"),
        (([1], 2, 1.0, 0.0), "top_p must be from 1e-06 to 1, got 0.0"),
        (([1], 2, 1.0, 1e-46), "top_p must be from 1e-06 to 1, got 1e-46"),
        (([1], 2, 1.0, 1.0, 1 << 63), "seed must be an integer of 64 bits"),
        (([1], 2, 1.0, 1.0, 1.5), "seed must be an integer of 64 bits, got 1.5"),
        (((1, 2), 2), "the prompt must be a list of tokens, got tuple"),
    ],
)
def test_requests_that_no_server_could_answer(given, message):
    with pytest.raises(ValueError, match=message):
        runpy.run_path(str(EXAMPLES / "serve_decode.py"))["Request"](*given)


def test_requests_that_a_server_refuses(device):
    """Before the first step; what just fits is served."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    model, request = example["Model"]().to(device), example["Request"]
    served, longest = request([2] * 33, 3), request([1] * 250, 6)
    example["serve"]([served, longest], 2, 19, [2] * 32, model)
    assert (len(served.said), len(longest.said)) == (3, 6)
    twice, other = request([1], 2), request([1], 2)
    for requests, slots, pages, prefix, message in (
        ([other], 0, 64, [], "slots=0"),
        ([other], 1, 0, [], "got a prefix of 0 tokens and pages=0"),
        ([other], 1, 2, [2] * 32, "got a prefix of 32 tokens and pages=2"),
        ([other], 1, 64, [2] * 257, "got a prefix of 257 tokens and pages=64"),
        ([other], 1, 64, [2, 999], "got 999 at 1 of the prefix"),
        ([other, request([1] * 40, 9)], 1, 5, [2] * 32, "needs 4 pages of its own, and the server has 3: 5 less 2"),
        ([other, twice, twice], 3, 64, [], "this one was given before"),
        ([other, served], 3, 64, [], "this one was given before"),
    ):
        with pytest.raises(ValueError, match=message):
            example["serve"](requests, slots, pages, prefix, model)
    assert not other.said
    example["serve"]([other], 1, 4, [], model)
    assert len(other.said) == 2


def test_a_request_is_of_one_server(device):
    """Two servers with the same request would each give it pages, of which one gets none back."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    model, request = example["Model"]().to(device), example["Request"]([1, 2], 9)
    with torch.no_grad():
        first, second = (example["Server"](model, 2, 8, [], torch.device(device)) for _ in range(2))
        first.submit(request)
        for moment in ("waits", "runs", "has left"):
            with pytest.raises(ValueError, match="this one was given before"):
                second.submit(request)
            while moment == "runs" and (first.waiting or first.running):
                first.step()
            first.step()
    assert (len(first.free), len(second.free), len(request.said)) == (8, 8, 9)


def test_batches_of_a_size_come_back(device):
    """Two requests decode, a third comes and goes, and the two go on in the batch that they had before."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, request = example["Model"]().to(device), example["Request"]
    requests = [request([1, 2, 3], 30), request([4, 5], 30, temperature=2.0, seed=7), request([7, 8, 9], 3)]
    with torch.no_grad():
        server = example["Server"](model, 4, 60, [], torch.device(device))
        for request in requests[:2]:
            server.submit(request)
        for _ in range(5):
            server.step()
        server.submit(requests[2])
        while server.waiting or server.running:
            server.step()
    assert [x.said for x in requests] == [example["plain_loop"](model, x) for x in requests]
    assert all(len({*x.said}) > len(x.said) / 2 for x in requests), "a model that repeats itself tests nothing"


def test_drafts_that_are_right_save_steps(device):
    """A request that repeats itself says four tokens a step; what it says is what it says without drafts."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model = example["Model"]().to(device)
    steps, said = [], []
    for drafts in (True, False):
        requests = [example["Request"]([5, 9, i], 80) for i in range(3)]
        steps.append(example["serve"](requests, 3, 64, [], model, drafts)[0])
        said.append([x.said for x in requests])
    assert said[0] == said[1]
    assert steps[0] < 0.7 * steps[1]


@pytest.mark.parametrize("wrong", [False, True])
def test_any_part_of_a_tree_is_accepted(device, wrong):
    """Guesses that are right for a while, in either branch; with `wrong` no keys are moved, which is noticed."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, dice = example["Model"]().to(device), random.Random(1)
    requests = [example["Request"]([7, i, 3], 40, temperature=4.0, seed=i) for i in range(4)]
    plain = [x.prompt + example["plain_loop"](model, x) for x in requests]
    names = example["guesses"].__globals__

    def guesses(tokens, last):
        found = torch.randint(256, (len(tokens), 2, 3))
        for row, at in enumerate(last.tolist()):
            right = plain[row][at + 1 : at + 1 + dice.randint(0, 3)]
            found[row, dice.randint(0, 1), : len(right)] = torch.tensor(right, dtype=torch.int64)
        return found.to(tokens.device)

    names["guesses"] = guesses
    if wrong:
        append = names["append_kv"]
        names["append_kv"] = lambda *given, **more: append(*given, **more) if "q" in more else None
    steps, _, _ = example["serve"](requests, 4, 64, [], model)
    assert ([x.prompt + x.said for x in requests] == plain) != wrong
    assert wrong or steps < 30


def test_a_row_without_a_request_writes_nothing(device):
    """Three requests in a batch of four: the prefix that all share stays as it is."""
    example = runpy.run_path(str(EXAMPLES / "serve_decode.py"))
    torch.manual_seed(0)
    model, prefix = example["Model"]().to(device), list(range(50))
    requests = [example["Request"]([*prefix, i], 9) for i in range(3)]
    with torch.no_grad():
        server = example["Server"](model, 4, 60, prefix, torch.device(device))
        before = server.caches[:, :, server.prefix].clone()
        for request in requests:
            server.submit(request)
        while server.waiting or server.running:
            server.step()
    assert torch.equal(server.caches[:, :, server.prefix], before)
    assert [x.said for x in requests] == [example["plain_loop"](model, x) for x in requests]


def test_steps_are_drawn(tmp_path):
    """Four launches ahead of four steps, whose third kernels come late."""
    pytest.importorskip("matplotlib")
    launches = [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 5.0 * i, "dur": 4.0} for i in range(4)]
    kernels = [{"cat": "kernel", "name": name, "ts": 50.0 + 10 * i + at, "dur": 3.0}
               for i in range(4) for name, at in (("nvjet", 0), ("paged_kernel", 3), ("elementwise", 7))]  # fmt: skip
    given = tmp_path / "trace.json"
    given.write_text(json.dumps({"traceEvents": [{"ph": "X", **event} for event in (*kernels, *launches)]}))
    drawing = runpy.run_path(str(EXAMPLES.parent / "docs" / "figures" / "draw_steps.py"))
    steps = drawing["Steps"].of(json.loads(given.read_text()))
    assert (len(steps.launches), len(steps.kernels), steps.gaps()) == (4, 12, [1.0] * 4)
    assert steps.busy() == pytest.approx(0.9)
    assert steps.leads() == [56, 61]
    assert [span.kind for span in steps.under_way(3).kernels[:3]] == ["products", "attention", "others"]
    drawing["draw"](steps, tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").read_text().count("<path") > 12


def test_a_profile_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve_decode.py", "--device", "cpu", "--profile", "trace.json"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / "serve_decode.py"), run_name="__main__")
    assert "--profile is about what a GPU waits for" in capsys.readouterr().err


@pytest.mark.rare
def test_train_bytes(monkeypatch, capsys, tmp_path):
    """One step of each model, the comparison with the oracle, and a picture, or how to get one."""
    picture, drawn = tmp_path / "picture.png", importlib.util.find_spec("matplotlib") is not None
    monkeypatch.setattr(sys, "argv", ["train_bytes.py", "--seconds", "0", "--device", "cpu", "--out", str(picture)])
    main = runpy.run_path(str(EXAMPLES / "train_bytes.py"))["main"]
    main.__globals__["LENGTH"] = 1024  # `make demo` runs the example as it is
    with pytest.raises(SystemExit) as end:
        main()
    told = capsys.readouterr().out
    assert end.value.code == 0, told
    assert picture.exists() == drawn
    assert ("The picture is" if drawn else "pip install matplotlib") in told


def test_no_picture_without_matplotlib(monkeypatch, capsys, tmp_path):
    """The end of what the example does: without it all else is as it was."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    runpy.run_path(str(EXAMPLES / "train_bytes.py"))["draw"]([], [], torch.zeros(0), tmp_path / "picture.png")
    assert "pip install matplotlib" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


ENDING = """
import runpy, sys
from pathlib import Path
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
left = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in left), left
"""


@pytest.mark.rare
def test_train_long(tmp_path):
    """Two processes and one have the same losses: the example asserts it. No thread of its group outlives the group, to
    go on while the process ends."""
    (tmp_path / "ending.py").write_text(ENDING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(tmp_path / "ending.py"), str(EXAMPLES / "train_long.py"), "--steps", "2", "--rows", "700"]
    done = subprocess.run([*command, *example], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "700 rows over 2 ranks" in done.stdout
    assert "2 steps in" in done.stdout


def test_a_selection_of_blocks_learns_what_a_window_cannot_see():
    example = runpy.run_path(str(EXAMPLES / "train_selected.py"))
    selected, window = (example["train"](name, seed=0, steps=40)[-1] for name in ("selected", "window"))
    assert selected < 0.6 * window
