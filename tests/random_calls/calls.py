"""Random calls: a layout, operands, a mask, a score function and options, as a Program."""

from __future__ import annotations

from typing import Any

from saccade.testing.cases import Case
from saccade.testing.paged import CACHES
from tests.random_calls import masks, modes, scores
from tests.random_calls.dice import Dice
from tests.random_calls.program import Program, Sizes

DENSE = ("bhsd", "bshd", "sbhd")
PAGED = ("decode", "prompts", "drafts", "latent", "8-bit pages")
LAYOUTS = (*DENSE, "padded", "packed", "ranges", *PAGED[:4], "8 bits", PAGED[4])
OPERANDS = ("last dim strided", "rows apart", "transposed", "expanded")
FEATURES = (
    *masks.KINDS, *scores.KINDS,
    "q_offset", "k_offset", "sink", "dropout", "GQA", "d_v != d", "odd head dims", "length 0", "length 1", *OPERANDS,
    "out=", "max_scores", "num_splits", "shared_pages", "deterministic", "scale", "float16", "bfloat16", "float32",
    "8-bit q", "Descale", "gradient", "gradient of the LSE", "gradient of a captured tensor", "gradient of a sink",
)  # fmt: skip
GRADIENTS = tuple(name for name in FEATURES if name.startswith("gradient"))


def impossible(layout: str, feature: str) -> bool:
    """Whether docs say that the two do not go together."""
    paged, eight = layout in PAGED, layout.startswith("8")
    sequences = paged or layout in ("packed", "ranges")
    return (
        (feature in GRADIENTS and (paged or eight))
        or (feature in ("num_splits", "shared_pages") and not paged)
        or (feature in ("8-bit q", "Descale") and not eight)
        or (feature == "documents" and sequences)
        or (feature == "dropout" and paged)
        or (feature in ("block_mask", "BlockMask") and (sequences or layout == "padded"))
        or (feature == "d_v != d" and layout == "latent")
        or (feature in ("last dim strided", "odd head dims") and layout == "latent")
    )


WAVE, TIMES = 204, 2
"""So many calls are drawn, and then again with other numbers: most of a call's time is that of compilers."""


def draw(seed: int, number: int, device: str, backend: str = "auto", by_modes: bool = False) -> Program:
    """The call of this number; calls whose numbers follow one another have every feature equally often."""
    turn, place = divmod(number // (WAVE * TIMES) * WAVE + number % WAVE, len(LAYOUTS))
    layout = LAYOUTS[place]
    dice = Dice(seed, layout, turn)
    program = Program(f"call {number} of seed {seed}: {layout}", layout, number)
    program.add(f'device, _ = "{device}", torch.manual_seed({number})')
    use = dice.balanced("use", [*["gradient"] * 5, "out", "out", *["plain"] * 3])
    if impossible(layout, "gradient"):
        use = dice.balanced("use without gradients", ["out", "plain"])
    elif use == "gradient":
        program.features.add("gradient")
    kinds = masks.choose(dice, [kind for kind in masks.LEAVES if not impossible(layout, kind)])
    counted = bool({*kinds} & {*masks.COUNTED})
    places = () if counted else dice.balanced("offsets", [(), (), (), ("q",), ("k",), ("q", "k")])
    case = _case(layout, dice, program, kinds)
    _operands(layout, dice, program, case)
    _offsets(places, case, dice, program)
    room = _room(case)
    # Rows of a cache may stand before its first key: an index below 0 counts from the end.
    of_bias = (1, 1) if places else (room + case.s_q, room) if case.order == "paged" else (case.s_q, case.s_k)
    sizes = Sizes(case.b, case.h_q, case.s_q, room, of_bias, _bounds(case), use == "gradient")
    mask = masks.draw(dice, program, sizes, kinds)
    score = scores.draw(dice, program, sizes)
    _count(case, program, use)
    mode = dice.balanced("mode", modes.suiting(program.features, device)) if by_modes else None
    _call(mask, score, use, backend, mode, dice, program, case)
    return program


def _case(layout: str, dice: Dice, program: Program, kinds: list[str]) -> Case:
    """The Case of a layout, with sizes, a sink and dropout."""
    group, h_k = dice.balanced("group", [1, 1, 2, 3, 4, 7]), dice.among(1, 1, 2, 3)
    paged = layout in PAGED
    odd = dice.chance("odd", 0.25) and layout != "latent"
    dims = [1, 3, 20, 33, 50, 75, 111, 130] if odd else [8, 16, 32, 64, 64, 72, 96, 128, 128, 192, 256]
    d = dice.balanced("odd d" if odd else "d", dims)
    d_v = dice.among(*dims) if dice.chance("d_v", 0.3) else d
    dtype = dice.balanced("dtype", ["fp16", "fp16", "bf16", "bf16", "fp32"])
    program.features.add({"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[dtype])
    lengths = [1, dice.number(2, 40), dice.number(2, 70), dice.number(65, 150), dice.number(100, 300)]
    s_q = dice.balanced("s_q", [0, 1, 1, 1, *lengths[1:], *lengths[1:]])
    s_k = dice.balanced("s_k", [s_q, s_q, s_q, s_q, s_q, s_q, 0, 0, 1, 600 if group < 4 else 400, *lengths[1:]])
    made: dict[str, Any] = {"b": dice.among(1, 2, 3, 3), "order": layout}
    if layout == "padded":
        made |= {"order": dice.among(*DENSE), "used": dice.among("q", "k", "qk")}
    elif layout == "8 bits":
        whole = {"documents", "block_mask", "BlockMask"} & {*kinds}
        order, used = dice.balanced("of 8 bits", [("bhsd", "all"), ("bshd", "qk"), ("sbhd", "all"), ("thd", "all")])
        made |= {"order": dice.among(*DENSE), "used": "all"} if whole else {"order": order, "used": used}
    if layout in ("packed", "ranges") or made["order"] == "thd":
        made |= {"b": dice.among(1, 3, 5, 9), "order": "thd", "tail": dice.among(0, 0, 1, 70)}
        made |= {"used": "all", "ranges": True} if layout == "ranges" else {"used": dice.among("all", "all", "q", "qk")}
    if paged:
        made |= _pages(layout, dice, h_k)
        s_q, s_k = made.pop("s_q"), dice.balanced("keys", [0, 1, *[dice.number(2, 600) for _ in range(14)]])
        if layout == "latent":
            d, d_v = dice.among((576, 512), (576, 512), (96, 64), (304, 264), (64, 40))
            made |= {"cache": "latent"}
            group, h_k = dice.among(1, 4, 16, 20, 64), dice.among(1, 1, 1, 2) if d < 576 else 1
            s_k = min(s_k, 250)
    if layout == "8-bit pages" and made["cache"] == "pages":  # a tensor of NaN: 8 bits of these have no new_full
        made["cache"] = "apart"
    if "documents" in kinds:
        s_k = s_q
    if "BlockMask" in kinds:  # torch makes no empty ones of functions
        s_q, s_k = max(s_q, 1), max(s_k, 1)
    return Case(
        program.title, dtype=dtype, h_q=group * h_k, h_k=h_k, s_q=s_q, s_k=s_k, d=d, d_v=d_v,
        sink=dice.chance("sink", 0.35), dropout_p=0.0 if paged else dice.balanced("dropout", [0.0, 0.0, 0.0, 0.3]),
        **made,
    )  # fmt: skip


def _pages(layout: str, dice: Dice, h_k: int) -> dict[str, Any]:
    """How a cache lies, and which rows there are."""
    kind = dice.among("decode", "prompts", "drafts") if layout in ("latent", "8-bit pages") else layout
    caches = [name for name in CACHES if name != "latent" and (name != "one-head" or h_k == 1)]
    made: dict[str, Any] = {
        "b": dice.among(1, 2, 4, 9), "order": "paged", "page_size": dice.balanced("page", [1, 8, 16, 16, 48, 64, 128]),
        "splits": dice.balanced("splits", [0, 0, 1, 3]), "cache": dice.among(*caches),
    }  # fmt: skip
    made["s_q"] = {"decode": 1, "prompts": dice.number(10, 150), "drafts": dice.number(2, 8)}[kind]
    if dice.chance("end to end", 0.5):
        made |= {"lengths": tuple(dice.among(0, 1, made["s_q"]) for _ in range(made["b"])), "tail": dice.among(0, 5)}
    return made


def _room(case: Case) -> int:
    """Keys that a mask's or a bias's tensor has a column for."""
    if case.order != "paged":
        return case.s_k
    return (-(-case.s_k // case.page_size) + 2) * case.page_size


def _rows(case: Case) -> str | None:
    """The number of rows of queries end to end, as text; None in a batch."""
    return "len(q)" if case.order == "thd" or (case.order == "paged" and (case.lengths or case.tail)) else None


def _bounds(case: Case) -> tuple[str, ...]:
    if rows := _rows(case):
        return (f"({rows},)", f"({case.b}, 1)", "(1, 1)")
    return f"({case.b}, {case.s_q})", f"(1, {case.s_q})", f"({case.b}, 1)", "(1, 1)"


def _operands(layout: str, dice: Dice, program: Program, case: Case) -> None:
    """Lines that draw q, k and v, and lay them out."""
    program.add(f"i = {case.replace(name='drawn').describe()}.inputs(device, seed={program.number})")
    program.add("q, k, v, dlse, given = i.q, i.k, i.v, i.dlse, i.keywords")
    if layout == "8-bit pages" or (layout in PAGED and case.d % 8 + case.d_v % 8 and layout != "latent"):
        cast = ".to(torch.float8_e4m3fn)" if layout == "8-bit pages" else ""
        program.add(f"k, v = spaced(k{cast}), spaced(v{cast})")
    if layout == "8 bits":
        program.add(f"k, v = k.to({(eight := dice.among('torch.float8_e4m3fn', 'torch.float8_e5m2'))}), v.to({eight})")
    if layout.startswith("8"):
        _descale(dice, program, case, eight if layout == "8 bits" else "torch.float8_e4m3fn")
    form = dice.balanced("form", ["", "", "", *OPERANDS])
    if form == "last dim strided" and layout == "latent":
        form = "rows apart"
    names = ["q"] if layout in PAGED else [dice.among("q", "k", "v"), *dice.among([], ["q"])]
    for name in dict.fromkeys(names):
        _form(form, name, program, case)


def _descale(dice: Dice, program: Program, case: Case, eight: str) -> None:
    names = ["k", "v"]
    if dice.chance("8-bit q", 0.5):
        program.features.add("8-bit q")
        program.add(f"q = q.to({eight})")
        names.append("q")
    if dice.chance("Descale", 0.7):
        program.features.add("Descale")
        shapes = ["()", f"({case.h_k},)", f"({case.b}, {case.h_k})"]
        factors = [
            f"{name}={dice.among(0.5, *[f'torch.rand({shape}, device=device) + 0.3' for shape in shapes])}"
            for name in names
            if dice.number(0, 3)
        ]
        program.add(f"given['descale'] = Descale({', '.join(factors)})")


def _form(form: str, name: str, program: Program, case: Case) -> None:
    """A line that changes how an operand lies, or of which heads it is."""
    if form:
        program.features.add(form)
    heads = case.order.find("h") if case.order in DENSE else -2
    match form:
        case "last dim strided":
            program.add(f"{name} = torch.stack([{name}, {name}], -1)[..., 0]")
        case "rows apart":
            program.add(f"{name} = torch.cat([{name}, {name}, {name}], -1)[..., : {name}.shape[-1]]")
        case "transposed":
            program.add(f"{name} = {name}.transpose(0, {heads}).contiguous().transpose(0, {heads})")
        case "expanded":
            program.add(f"{name} = {name}.narrow({heads}, 0, 1).expand_as({name})")


def _offsets(places: tuple[str, ...], case: Case, dice: Dice, program: Program) -> None:
    """A line that gives rows and keys positions."""
    if not places:
        return
    if case.order == "paged" and "q" not in places:
        places = ("q", *places)
    rows, words = _rows(case), []
    for name in places:
        program.features.add(f"{name}_offset")
        far = dice.among(0, 5, 200)
        shapes = [f"({case.b}, 1)" if rows else f"({case.b},)"]
        if name == "q":
            shapes += [f"(1, {rows})" if rows else f"({case.b}, {case.s_q})"]
        if name == "k":
            shapes = [f"({case.b},)"]
        drawn = [f"torch.randint({-far}, {far + 9}, {shape}, device=device)" for shape in shapes]
        words.append(f"{name}_offset={dice.among(far, -far, *drawn, *drawn)}")
    program.add(f"given['layout'] = replace(given['layout'], {', '.join(words)})")


def _count(case: Case, program: Program, use: str) -> None:
    """What sizes and options say of a call."""
    sequences, last = case.order in ("thd", "paged"), case.lengths or (case.s_q,)
    found = {
        "GQA": case.h_q > case.h_k,
        "d_v != d": case.d_v != case.d and case.cache != "latent",
        "odd head dims": case.d % 8 != 0 or case.d_v % 8 != 0,
        "length 0": 0 in (*last, case.s_k) or (sequences and case.b > 2),
        "length 1": 1 in (*last, case.s_k),
        "sink": case.sink,
        "gradient of a sink": case.sink and use == "gradient",
        "dropout": case.dropout_p > 0,
        "num_splits": case.splits > 0,
        "out=": use == "out",
    }
    program.features |= {name for name, holds in found.items() if holds}


def _call(
    mask: str | None, score: str | None, use: str, backend: str, mode: str | None,
    dice: Dice, program: Program, case: Case,
) -> None:  # fmt: skip
    """The lines of the call itself."""
    words: dict[str, str] = {}
    options = {"return_max_scores": "True", "deterministic": "True", "scale": str(dice.among(0.2, 1.0, 0.05))}
    for word, value in options.items():
        if dice.chance(word, 0.25):
            program.features.add(word.removeprefix("return_"))
            words[word] = value
    if case.order == "paged" and dice.chance("shared_pages", 0.25):
        program.features.add("shared_pages")
        program.add("pages = int(given['layout'].seqused_k.min()) // k.shape[1]")
        program.add("given['layout'].block_table[:, :pages] = given['layout'].block_table[0, :pages].clone()")
        program.add("given['layout'] = replace(given['layout'], shared_pages=pages)")
    if use == "out":
        dtype = "torch.float16" if dice.among(True, False) else "torch.bfloat16"
        wide = "q.dtype" if "8-bit q" not in program.features else dtype
        words["out"] = f"torch.zeros(*q.shape[:-1], {case.d_v}, dtype={wide}, device=device)"
    for name, text in {"mask": mask, "score_mod": score}.items():
        if text:
            program.add(f"given[{name!r}] = {text}")
    if words:
        program.add(f"given |= {{{', '.join(f'{name!r}: {text}' for name, text in words.items())}}}")
    arguments = "q, k, v"
    if use == "gradient" and dice.chance("dlse", 0.5):
        program.features.add("gradient of the LSE")
        arguments += ", dlse=dlse"
    if use != "gradient":
        arguments += ", backward=False"
    if mode is not None:
        program.features.add(mode)
        arguments += f", function=modes.{mode}"
    if backend != "auto":
        arguments += f", backend={backend!r}"
    program.add(f"(report := check({arguments}, **given)).assert_ok()")
