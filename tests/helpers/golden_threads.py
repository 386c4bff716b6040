"""Golden kernels of instructions of a thread or a warp: copies, loads, stores, conversions, arithmetic, exchanges."""

from collections.abc import Callable
from typing import Any

import numpy as np
from golden_parts import KERNELS, GoldenKernel, emitted, fractions, hash_words, load_word, one_block
from tvm.script import tirx as T  # noqa: N812

from tvmconv.builtin import tir_builder as p

# --- copies of threads, loads and stores ---


def cp_async(nbytes: int, cache: str, form: str) -> GoldenKernel:
    """Copies of 32 threads to permuted places, in two groups that are awaited one after the other."""

    def emit(buffers, block, thread):
        for e in range(nbytes // 2):  # what is not copied is known: 64 places of `nbytes`
            p.emit_ptx("st.shared.b32", block.address((e * 32 + thread) * 4), T.uint32(0x01020304))
        p.emit_call(T.cuda.cta_sync())
        for group in range(2):
            place = block.address(((thread * 7 + 3) % 32 * 2 + group) * nbytes)
            source = buffers["X"].access_ptr("r", offset=(group * 32 + thread) * (nbytes // 4))
            mnemonic = f"cp.async.{cache}.shared.global"
            if form == "plain":
                p.emit_ptx(mnemonic, place, source, nbytes)
            elif form == "src_size":
                p.emit_ptx(mnemonic, place, source, nbytes, p.to_uint32(thread % (nbytes + 1)))
            else:
                p.emit_ptx(mnemonic, place, source, nbytes, T.ptx.pred(T.Cast("uint32", thread % 3 == 0)))
            p.emit_ptx("cp.async.commit_group")
        for group in range(2):
            p.emit_ptx("cp.async.wait_group", 1 - group)
            p.emit_call(T.cuda.cta_sync())
            for e in range(nbytes // 4):
                at = (thread * 2 + group) * nbytes + e * 4
                p.store(buffers["Y"], (group * 32 + thread) * (nbytes // 4) + e, load_word(block, at))

    num_words = 16 * nbytes
    return emitted((hash_words(num_words),), ((num_words,), "uint32"), one_block(64 * nbytes, 32, emit))


for nbytes, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
    for form in ("plain", "src_size", "ignore_src"):
        KERNELS[f"cp_async_{cache}_{nbytes}_{form}"] = cp_async(nbytes, cache, form)


def vectors(suffix: str, num_words: int) -> GoldenKernel:
    """Words that pass through global and shared memory in accesses of `num_words`."""

    def emit(buffers, block, thread):
        r = p.allocate("r", num_words, "uint32")
        registers = [r[e] for e in range(num_words)]
        p.emit_ptx(f"ld.global.nc.{suffix}", *registers, buffers["X"].access_ptr("r", offset=(31 - thread) * num_words))
        p.emit_ptx(f"st.shared.{suffix}", block.address((thread * 5 % 32) * num_words * 4), *registers)
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx(f"ld.shared.{suffix}", *registers, block.address(thread * num_words * 4))
        p.emit_ptx(f"st.global.{suffix}", buffers["Y"].access_ptr("w", offset=thread * num_words), *registers)

    return emitted((hash_words(32 * num_words),), ((32 * num_words,), "uint32"), one_block(128 * num_words, 32, emit))


def halves() -> GoldenKernel:
    """Accesses of 16 bits."""

    def emit(buffers, block, thread):
        half = p.allocate("half", 1, "uint16")
        p.emit_ptx("ld.global.b16", half[0], buffers["X"].access_ptr("r", offset=31 - thread))
        p.emit_ptx("st.shared.b16", block.address(thread * 5 % 32 * 2), half[0])
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx("ld.shared.b16", half[0], block.address(thread * 2))
        p.emit_ptx("st.global.b16", buffers["Y"].access_ptr("w", offset=thread), half[0])

    x = hash_words(32).astype(np.uint16)
    return emitted((x,), ((32,), "uint16"), one_block(64, 32, emit))


def misaligned(load: str) -> GoldenKernel:
    """A load of 16 bytes or of rows of 16 bytes, of shared memory that is not aligned to 16 bytes."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 4, "uint32")
        for e in range(5):
            p.emit_ptx("st.shared.b32", block.address((e * 32 + thread) * 4), buffers["X"][thread])
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx(load, *[r[e] for e in range(4)], block.address(thread * 16 + 4))
        for e in range(4):
            p.store(buffers["Y"], thread * 4 + e, r[e])

    return emitted((hash_words(32),), ((128,), "uint32"), one_block(1024, 32, emit))


KERNELS |= {
    "ld_misaligned": misaligned("ld.shared.v4.b32"),
    "ldmatrix_misaligned": misaligned("ldmatrix.sync.aligned.m8n8.x4.shared.b16"),
    "ld_st_b16": halves(),
    "ld_st_b32": vectors("b32", 1),
    "ld_st_v2": vectors("v2.b32", 2),
    "ld_st_v4": vectors("v4.b32", 4),
}


# --- conversions and arithmetic ---

SPECIAL_BITS = np.array(
    [
        *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001, 0x807FFFFF, 0x00800000),
        *(0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0x3F801FFF, 0xBF801000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x477FE000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x33000000, 0x33000001, 0x33800000, 0x387FC000),
        *(0x3F808000, 0x3F818000, 0x3F807FFF, 0x7F7F8000, 0x387FE000, 0xB8000001, 0xC0490FDB, 0x42F6E979),
    ],
    np.uint32,
)  # zeros, infinities, NaN, subnormal numbers, ties and overflows of TF32, float16 and bfloat16


def converted(mnemonic: str, num_sources: int = 1) -> GoldenKernel:
    """A conversion of float32 to a 32-bit register."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 1, "uint32")
        sources = [T.reinterpret("float32", buffers["X"][(thread + i * 7) % 64]) for i in range(num_sources)]
        p.emit_ptx(mnemonic, r[0], *sources)
        p.store(buffers["Y"], thread, r[0])

    x = np.concatenate([SPECIAL_BITS, fractions((32,), "float32").view(np.uint32)])
    return emitted((x,), ((64,), "uint32"), one_block(16, 64, emit))


def converted_scalar(mnemonic: str, dtype: str, source: str, target: str) -> GoldenKernel:
    """A conversion of numbers of a dtype, in registers of the type `source`, to registers of the type `target`."""

    def emit(buffers, block, thread):
        r = p.allocate("r", 1, target)
        p.emit_ptx(mnemonic, r[0], buffers["X"][thread])
        p.store(buffers["Y"], thread, r[0])

    bits = np.concatenate([SPECIAL_BITS, fractions((32,), "float32").view(np.uint32)])
    with np.errstate(over="ignore"):
        x = bits.view(np.float32).astype(dtype)
    return emitted((x.view(source),), ((64,), target), one_block(16, 64, emit))


KERNELS |= {
    **{f"cvt_tf32_{rounding}": converted(f"cvt.{rounding}.tf32.f32") for rounding in ("rna", "rn", "rz")},
    **{
        f"cvt_{kind}{relu.replace('.', '_')}": converted(f"cvt.rn{relu}.{kind}.f32", 2)
        for kind in ("f16x2", "bf16x2")
        for relu in ("", ".relu")
    },
    "cvt_f32_to_f16": converted_scalar("cvt.rn.f16.f32", "float32", "float32", "float16"),
    "cvt_f16_to_f32": converted_scalar("cvt.f32.f16", "float16", "float16", "float32"),
    "cvt_f32_to_bf16": converted_scalar("cvt.rn.bf16.f32", "float32", "float32", "uint16"),
    "cvt_bf16_to_f32": converted_scalar("cvt.f32.bf16", "bfloat16", "uint16", "float32"),
}


def arithmetic(functions: list[Callable[[Any, Any], Any]], dtype: str, tolerance: float = 0) -> GoldenKernel:
    """Functions of two elements; Y has a row for each."""

    def emit(buffers, block, thread):
        for row, function in enumerate(functions):
            value = function(buffers["X"][thread], buffers["W"][thread])
            p.store(buffers["Y"], row * 64 + thread, T.Cast(dtype, value))

    words = [hash_words(64, seed) for seed in (1, 2)]
    if dtype == "float32":
        inputs = tuple(fractions((64,), dtype, seed) * 4 for seed in (1, 2))
    elif dtype == "int32":
        inputs = (words[0].view(np.int32) >> 3, (words[1].view(np.int32) >> 24) | 1)
    else:
        inputs = (words[0], words[1] | 1)
    return emitted(inputs, ((len(functions) * 64,), dtype), one_block(16, 64, emit), tolerance)


KERNELS |= {
    "arithmetic_int32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, T.truncdiv, T.truncmod, T.min, T.max),
            *(lambda a, b: T.floordiv(a, 7), lambda a, b: T.floormod(a, 7)),
            *(T.bitwise_and, T.bitwise_or, T.bitwise_xor, lambda a, b: T.shift_right(a, 5)),
            lambda a, b: T.Select(a > b, a, b),
        ],
        "int32",
    ),
    "arithmetic_uint32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, T.min, T.max),
            *(lambda a, b: T.shift_left(a, T.uint32(7)), lambda a, b: T.shift_right(a, T.uint32(7))),
        ],
        "uint32",
    ),
    "arithmetic_float32": arithmetic(
        [
            *(lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, T.min, T.max, lambda a, b: T.floor(a)),
            *(lambda a, b: T.ceil(a), lambda a, b: T.trunc(a), lambda a, b: T.fabs(a)),
        ],
        "float32",
    ),
    "arithmetic_float32_approximate": arithmetic(
        [
            *(lambda a, b: a / b, lambda a, b: T.exp(a), lambda a, b: T.tanh(a), lambda a, b: T.erf(a)),
            *(lambda a, b: T.sigmoid(a), lambda a, b: T.sqrt(T.fabs(a)), lambda a, b: T.log(T.fabs(b))),
        ],
        "float32",
        1e-6,
    ),
}


# --- exchanges within a warp ---


def shuffles(mode: str, dtype: str) -> GoldenKernel:
    """Shuffles of several widths and distances."""
    cases = [(width, distance) for width in (32, 16, 8) for distance in (1, 3, 7)]

    def emit(buffers, block, thread):
        for row, (width, distance) in enumerate(cases):
            operand = (thread * 3 + distance) % 32 if mode == "" else distance
            name = f"tirx.cuda.__shfl{'_' + mode if mode else ''}_sync"
            received = T.call_intrin(dtype, name, T.uint32(0xFFFFFFFF), buffers["X"][thread], operand, width)
            p.store(buffers["Y"], row * 64 + thread, received)

    x = np.arange(64).astype(dtype)
    return emitted((x,), ((len(cases) * 64,), dtype), one_block(16, 64, emit))


def election() -> GoldenKernel:
    """The lane that is elected of a warp, as an expression."""

    def emit(buffers, block, thread):
        p.store(buffers["Y"], thread, T.uint32(0))
        with p.if_(T.cuda.elect_sync()):
            p.store(buffers["Y"], thread, buffers["X"][thread])

    return emitted((hash_words(96),), ((96,), "uint32"), one_block(16, 96, emit))


KERNELS |= {
    f"shfl{mode}_{dtype}": shuffles(mode, dtype) for mode in ("", "up", "down", "xor") for dtype in ("float32",)
}
KERNELS["shflxor_int32"] = shuffles("xor", "int32")
KERNELS["elect_sync"] = election()
