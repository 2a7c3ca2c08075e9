"""PTX that Gluon has no names for."""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _run(text: gl.constexpr, number):
    """Runs PTX that makes an int32 of an int32, wherever it stands."""
    return gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _run_at(text: gl.constexpr, pointers):
    """The same of addresses in global memory."""
    address = pointers.to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(text, "=&r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_sync(number, THREADS: gl.constexpr):
    """Waits at a named barrier for all of its THREADS."""
    text: gl.constexpr = f"bar.sync $1, {THREADS}; mov.u32 $0, 0;"
    _run(text, number)


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Counts this group in at a named barrier, without a wait."""
    text: gl.constexpr = f"bar.arrive $1, {THREADS}; mov.u32 $0, 0;"
    _run(text, number)


@gluon.constexpr_function
def _pack_text(dtype):
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@gluon.jit
def pack_pairs(x, DTYPE: gl.constexpr):
    """float32 [M, N] as int32 [M, N / 2], two 16-bit numbers in each: what stays in a register over loops."""
    text: gl.constexpr = _pack_text(DTYPE)
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack_pairs(x, DTYPE: gl.constexpr):
    """The inverse of pack_pairs: [M, N] in DTYPE."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([x.shape[0], x.shape[1] * 2]).to(DTYPE, bitcast=True)


@gluon.jit
def pack_quads(x):
    """float32 [M, N] as int32 [M, N / 4], four numbers in e4m3 in each, so that an accumulator has them where the left
    operand of the next product wants them: of each 16 columns, 8 h + 2 q + e comes to place 4 q + 2 h + e."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    # [M, N / 4, h, e]
    x = x.reshape([M, N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, N // 4, 2, 2])
    even, odd = gl.split(x)
    even_0, even_1 = gl.split(even)
    odd_0, odd_1 = gl.split(odd)
    text: gl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high}; }"
    )
    numbers = [even_0, odd_0, even_1, odd_1]
    return gl.inline_asm_elementwise(text, "=r,f,f,f,f", numbers, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack_quads(x):
    """What pack_quads made as e4m3 [M, N]."""
    even = gl.join(x.to(gl.int8), (x >> 16).to(gl.int8))
    odd = gl.join((x >> 8).to(gl.int8), (x >> 24).to(gl.int8))
    return gl.join(even, odd).reshape([x.shape[0], x.shape[1] * 4]).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def bf16_parts(x):
    """float32 as a sum of two bfloat16, each twice in an int32."""
    text: gl.constexpr = (
        "{ .reg .f32 high, low; cvt.rn.bf16x2.f32 $0, $2, $2; shl.b32 high, $0, 16; sub.f32 low, $2, high; "
        "cvt.rn.bf16x2.f32 $1, low, low; }"
    )
    return gl.inline_asm_elementwise(text, "=&r,=r,f", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def widened(x, high, low):
    """Numbers of e4m3, four in each int32 [M, N], times their row's factor [M] in `bf16_parts`: as bfloat16, two in
    each int32 [M, 2 N].

    e4m3 has the form of the upper bits of a bfloat16, but for its exponent, which counts from 120 less. Of its NaN that
    makes 480, which 9/8 * 2^119 makes infinite, and 0 NaN then; of all else 0.
    """
    text: gl.constexpr = (
        "{ .reg .b32 high, low, a, b, c, d; shr.u32 high, $2, 4; and.b32 high, high, 0x07070707; "
        "lop3.b32 high, $2, 0x80808080, high, 0xea; shl.b32 low, $2, 4; and.b32 low, low, 0xf0f0f0f0; "
        "prmt.b32 a, low, high, 0x5140; prmt.b32 b, low, high, 0x7362; "
        "mov.b32 c, 0x7b807b80; mul.rn.bf16x2 a, a, c; mul.rn.bf16x2 b, b, c; "
        "mov.b32 high, 0x7b107b10; mov.b32 low, 0; mul.rn.bf16x2 c, a, high; mul.rn.bf16x2 d, b, high; "
        "mul.rn.bf16x2 c, c, low; mul.rn.bf16x2 d, d, low; fma.rn.bf16x2 c, a, $4, c; fma.rn.bf16x2 d, b, $4, d; "
        "fma.rn.bf16x2 $0, a, $3, c; fma.rn.bf16x2 $1, b, $3, d; }"
    )
    given = [x, high[:, None], low[:, None]]
    even, odd = gl.inline_asm_elementwise(text, "=&r,=r,r,r,r", given, dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    return gl.join(even, odd).reshape([x.shape[0], 2 * x.shape[1]])


@gluon.jit
def fast_log2(x):
    """To 22 bits, in one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(number):
    """An int32 of which the compiler knows nothing: of one that grows with a loop it keeps every sum with a constant,
    each in a register of its own."""
    return _run("mov.b32 $0, $1;", number)


@gluon.jit
def uniform(number):
    """An int32 that all threads have, as one that ptxas knows to be the same in a warp: of what gl.min and gl.max make
    in Triton 3.9 it knows nothing, and a loop that such a number bounds has no uniform registers."""
    return _run("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", number)


@gluon.jit
def count_up(counter, ORDER: gl.constexpr):
    """Adds 1 to an int32 in global memory and returns what it was, to all of one warp.

    gl.atomic_add hands its result round by way of shared memory, in a place that something else may have had
    (notes/gluon.md).
    """
    text: gl.constexpr = (
        "{ .reg .pred chosen; bar.warp.sync 0xffffffff; elect.sync _|chosen, 0xffffffff; mov.b32 $0, 0; "
        f"@chosen atom.global.{ORDER}.gpu.add.u32 $0, [$1], 1; redux.sync.or.b32 $0, $0, 0xffffffff; }}"
    )
    return _run_at(text, counter)


@gluon.constexpr_function
def _wait_text(scope, looks, late):
    return (
        f"{{ .reg .pred early; .reg .u32 left; mov.u32 left, {looks}; "
        f"again: ld.global.acquire.{scope}.s32 $0, [$1]; setp.lt.s32 early, $0, $2; sub.u32 left, left, 1; "
        "setp.ne.and.u32 early, left, 0, early; @early bra again; "
        f"setp.eq.u32 early, left, 0; @early {late}; fence.proxy.async; }}"
    )


@gluon.jit
def _wait(counter, number, SCOPE: gl.constexpr, LOOKS: gl.constexpr, LATE: gl.constexpr):
    """Until an int32 in global memory is `number` or more, or after so many looks LATE happens; what was written before
    it is seen after it, by bulk copies too."""
    text: gl.constexpr = _wait_text(SCOPE, LOOKS, LATE)
    address = counter.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(text, "=&r,l,r", [address, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until(counter, number):
    """Waits until an int32 in global memory is `number` or more; all that was written before the count is seen after
    it, by bulk copies too.

    Sequences that overlap, by offsets that are broken, may wait for who never comes: so after 2^22 looks, some seconds,
    the count is taken for reached, by all.
    """
    _wait(counter, number, "gpu", "0x400000", "st.global.s32 [$1], 0x3fffffff")


@gluon.jit
def wait_for_copies(done, number):
    """Waits until an int32 in global memory, which the stream of copy engines writes behind its copies, is `number` or
    more; what they brought is seen after it, by bulk copies too. Copies wait for no kernel, so that they come: after
    2^27 looks, a minute or more, the kernel ends with an error."""
    _wait(done, number, "sys", "0x8000000", "trap")


@gluon.jit
def wait_until_written(BUT: gl.constexpr):
    """Waits until this warp's bulk copies to global memory are there, all but the last BUT; tma.store_wait stops at
    their reads."""
    text: gl.constexpr = f"cp.async.bulk.wait_group {BUT}; mov.u32 $0, 0;"
    _run(text, 0)


@gluon.jit
def add_one(counter):
    """Adds 1 to an int32 in global memory, once for a warp, and waits for nothing."""
    _run_at(
        "{ .reg .pred chosen; bar.warp.sync 0xffffffff; elect.sync _|chosen, 0xffffffff; "
        "@chosen red.global.relaxed.gpu.add.u32 [$1], 1; mov.b32 $0, 0; }",
        counter,
    )


@gluon.jit
def to_l2(pointers):
    """Begins to bring lines of global memory to the L2 cache."""
    _run_at("prefetch.global.L2 [$1]; mov.u32 $0, 0;", pointers)


@gluon.jit
def fence_memory():
    """What this thread has written to global memory is there for all before anything that it does next."""
    _run("fence.acq_rel.gpu; mov.u32 $0, 0;", 0)
