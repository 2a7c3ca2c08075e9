"""What a function's bytecode reads, by name."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator


class Unproven(Exception):
    """Something that may change without notice."""


_QUIET = frozenset((
    "RESUME", "NOP", "CACHE", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "CALL_KW", "LOAD_CONST", "LOAD_SMALL_INT",
    "LOAD_CONST_IMMORTAL", "COPY_FREE_VARS", "MAKE_CELL", "BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "COMPARE_OP",
    "UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_NOT", "RETURN_VALUE", "RETURN_CONST", "BUILD_TUPLE", "BUILD_SLICE",
    "POP_TOP", "COPY", "SWAP", "JUMP_FORWARD", "JUMP_BACKWARD", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "EXTENDED_ARG", "UNPACK_SEQUENCE", "FOR_ITER",
    "GET_ITER", "END_FOR", "POP_ITER", "TO_BOOL", "IS_OP", "STORE_FAST", "LOAD_FAST", "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST",
    "STORE_FAST_STORE_FAST", "NOT_TAKEN",
))  # fmt: skip
"""Operations that name nothing and write to locals alone."""


@functools.lru_cache(maxsize=1024)
def chains(code: types.CodeType) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """What code reads: ("global", name, attributes that follow), ("free", name, …), ("self", "read" or "written", …) of
    its first argument, and ("value", "", …) of what it computes.

    Raises:
        Unproven: the code does something else.
    """
    return tuple(dict.fromkeys(_read(code)))


def _read(code: types.CodeType) -> Iterator[tuple[str, str, tuple[str, ...]]]:  # noqa: C901 (a table of operations)
    root: tuple[str, str] | None = None
    path: list[str] = []
    first = code.co_varnames[0] if code.co_argcount else ""
    for step in dis.get_instructions(code):
        name, operand = step.opname, step.argval
        if name in ("CACHE", "EXTENDED_ARG", "NOP"):
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            root = root or ("value", "")
            path.append(str(operand))
            continue
        if root is not None:
            yield root[0], root[1], tuple(path)
        root, path = None, []
        locals_ = operand if isinstance(operand, tuple) else (operand,)
        if name == "LOAD_GLOBAL":
            root = "global", str(operand)
        elif name == "LOAD_DEREF" and operand in code.co_freevars:
            root = "free", str(operand)
        elif name not in _QUIET:
            raise Unproven
        elif "STORE_FAST" in name and first in locals_:
            yield "self", "written", ()
        elif name.startswith("LOAD_FAST") and first in locals_:
            if locals_[-1] == first:  # attributes are of the last
                root = "self", "read"
            if first in locals_[:-1]:
                yield "self", "read", ()
    if root is not None:
        yield root[0], root[1], tuple(path)
