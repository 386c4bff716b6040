"""Golden kernels of wgmma, mma.sync, ldmatrix and stmatrix."""

import numpy as np
from golden_parts import KERNELS, GoldenKernel, copy_out, emitted, fractions, one_block, small_integers
from tvm.script import tirx as T  # noqa: N812

from tvmconv.arithmetic import ceil_div
from tvmconv.builtin import tir_builder as p

# --- wgmma ---

WGMMA_TYPES = {"f16": "float16", "bf16": "bfloat16", "tf32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def wgmma(
    a_type: str,
    n: int,
    swizzle: int,
    b_type: str | None = None,
    *,
    kind: str = "integers",
    signs=(1, 1),
    keeps=True,
    fence=True,
) -> GoldenKernel:
    """A product of X, 64 × k, and the transpose of W, n × k, that threads have stored as rows of `swizzle` bytes.

    Args:
        a_type: PTX type of X.
        n: Rows of W.
        swizzle: Bytes of a row, which are swizzled; 0 for core matrices of 8 rows × 16 bytes, with k of 64 bytes.
        b_type: PTX type of W, `a_type` by default.
        kind: Values: "integers" with exact sums, or "fractions".
        signs: Factors of X and W in the product.
        keeps: Whether all products but the first are added to the accumulators.
        fence: Whether a fence is between the stores and wgmma; without it, the kernel is wrong.
    """
    b_type = b_type or a_type
    itemsize = np.dtype(WGMMA_TYPES[a_type]).itemsize
    row_bytes = swizzle or 64
    k = row_bytes // itemsize
    make = small_integers if kind == "integers" else fractions
    x, w = make((64, k), WGMMA_TYPES[a_type]), make((n, k), WGMMA_TYPES[b_type], 2)
    mnemonic = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // itemsize}.f32.{a_type}.{b_type}"
    transposed = (0, 0) if itemsize == 2 else ()
    tiles = {"X": (64, 0), "W": (n, ceil_div(64 * row_bytes, 1024) * 1024)}
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]

    def emit(buffers, block, thread):
        acc = p.allocate("acc", n // 2, "float32")
        for name, (rows, first) in tiles.items():
            num_chunks = row_bytes // 16
            with p.serial_loop(ceil_div(rows * num_chunks, 128), "i") as i:
                row, chunk = (i * 128 + thread) // num_chunks, (i * 128 + thread) % num_chunks
                if swizzle:
                    swizzled = T.bitwise_xor(chunk, row // (128 // swizzle) % num_chunks)
                    place = first + row * row_bytes + swizzled * 16
                else:
                    place = first + chunk * (rows * 16) + row * 16
                with p.if_(row < rows):
                    words = [buffers[name][row * (row_bytes // 4) + chunk * 4 + e] for e in range(4)]
                    p.emit_ptx("st.shared.v4.b32", block.address(place), *words)
        if fence:
            p.emit_ptx("fence.proxy.async")
        p.emit_call(T.cuda.cta_sync())
        p.emit_ptx("wgmma.fence.sync.aligned")
        for step in range(row_bytes // 32):
            descriptors = []
            for rows, first in tiles.values():
                leading, stride = (16, 8 * swizzle) if swizzle else (rows * 16, 128)
                start = first + step * (32 if swizzle else 2 * rows * 16)
                low = T.shift_right(block.address(start), T.uint32(4)) | T.uint32(leading >> 4 << 16)
                high = T.Cast("uint64", T.uint32(stride >> 4 | mode << 30))
                descriptors.append(T.bitwise_or(T.Cast("uint64", low), T.shift_left(high, T.uint64(32))))
            sums = [acc[e] for e in range(n // 2)]
            p.emit_ptx(mnemonic, *sums, *descriptors, keeps and step > 0, *signs, *transposed)
        p.emit_ptx("wgmma.commit_group.sync.aligned")
        p.emit_ptx("wgmma.wait_group.sync.aligned", 0)
        for i in range(n // 2):
            row, column = thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2
            p.store(buffers["Y"], row * n + column, acc[i])

    words = tuple(values.reshape(-1).view(np.uint8).view(np.uint32) for values in (x, w))
    # Tensor cores truncate aligned products; those of 8 bits keep 13 bits of the fraction.
    tolerance = 0 if kind == "integers" else 1e-3 if itemsize == 1 else 5e-7
    return emitted(words, ((64 * n,), "float32"), one_block(tiles["W"][1] + n * row_bytes + 1024, 128, emit), tolerance)


for number, a_type in enumerate(WGMMA_TYPES):
    for swizzle in (0, 32, 64, 128):
        n = (8, 24, 16, 40)[(number + swizzle // 32) % 4]
        KERNELS[f"wgmma_{a_type}_n{n}_swizzle{swizzle}"] = wgmma(a_type, n, swizzle)
    KERNELS[f"wgmma_{a_type}_fractions"] = wgmma(a_type, 16, 128, kind="fractions")
for n in (8, 48, 72, 96, 128, 184, 256):
    KERNELS[f"wgmma_f16_n{n}"] = wgmma("f16", n, 32)
KERNELS |= {
    "wgmma_e4m3_e5m2": wgmma("e4m3", 8, 32, "e5m2"),
    "wgmma_e5m2_e4m3": wgmma("e5m2", 8, 32, "e4m3"),
    "wgmma_negated_a": wgmma("f16", 8, 64, signs=(-1, 1)),
    "wgmma_negated_both": wgmma("bf16", 8, 64, signs=(-1, -1)),
    "wgmma_overwriting": wgmma("f16", 8, 64, keeps=False),
}


# --- mma.sync, ldmatrix and stmatrix ---


def mma(size: str, kind: str, values: str) -> GoldenKernel:
    """A product of fragments, of which each lane loads and stores its own registers."""
    dtype = WGMMA_TYPES[kind]
    k, packed = int(size.rpartition("k")[2]), 4 // np.dtype(dtype).itemsize
    num_a, num_b = 16 * k // 32 // packed, 8 * k // 32 // packed
    make = small_integers if values == "integers" else fractions
    a, b, c = make((32 * num_a * packed,), dtype), make((32 * num_b * packed,), dtype, 2), make((128,), "float32", 3)
    x = np.concatenate([a.view(np.uint8), b.view(np.uint8)]).view(np.uint32)

    def emit(buffers, block, thread):
        a, b = p.allocate("a", num_a, "uint32"), p.allocate("b", num_b, "uint32")
        d = p.allocate("d", 4, "float32")
        for e in range(num_a):
            p.store(a, e, buffers["X"][thread * num_a + e])
        for e in range(num_b):
            p.store(b, e, buffers["X"][32 * num_a + thread * num_b + e])
        for e in range(4):
            p.store(d, e, buffers["W"][thread * 4 + e])
        registers = ([d[e] for e in range(4)], [a[e] for e in range(num_a)], [b[e] for e in range(num_b)])
        mnemonic = f"mma.sync.aligned.{size}.row.col.f32.{kind}.{kind}.f32"
        p.emit_ptx(mnemonic, *registers[0], *registers[1], *registers[2], *registers[0])
        for e in range(4):
            p.store(buffers["Y"], thread * 4 + e, d[e])

    tolerance = 0 if values == "integers" else 5e-7
    return emitted((x, c), ((128,), "float32"), one_block(16, 32, emit), tolerance)


for size, kind in (
    *(("m16n8k16", "f16"), ("m16n8k8", "f16"), ("m16n8k16", "bf16")),
    *(("m16n8k8", "bf16"), ("m16n8k8", "tf32"), ("m16n8k4", "tf32")),
):
    for values in ("integers", "fractions"):
        KERNELS[f"mma_{size}_{kind}_{values}"] = mma(size, kind, values)


def matrices(count: int, instruction: str, *, is_transposed: bool) -> GoldenKernel:
    """Matrices that a warp loads or stores at rows in a permuted order, of which each lane has a register."""
    shape = f"sync.aligned.m8n8.x{count}{'.trans' if is_transposed else ''}.shared.b16"

    def emit(buffers, block, thread):
        r = p.allocate("r", 4, "uint32")
        registers = [r[e] for e in range(count)]
        row_address = block.address(thread * 5 % 32 * 16)
        if instruction == "ldmatrix":
            for e in range(4):
                p.emit_ptx("st.shared.b32", block.address(thread * 16 + e * 4), buffers["X"][thread * 4 + e])
            p.emit_call(T.cuda.warp_sync())
            p.emit_ptx(f"ldmatrix.{shape}", *registers, row_address)
            for e in range(count):
                p.store(buffers["Y"], thread * count + e, r[e])
        else:
            for e in range(4):
                p.emit_ptx("st.shared.b32", block.address(thread * 16 + e * 4), T.uint32(0))
            for e in range(count):
                p.store(r, e, buffers["X"][thread * count + e])
            p.emit_call(T.cuda.warp_sync())
            p.emit_ptx(f"stmatrix.{shape}", row_address, *registers)
            p.emit_call(T.cuda.warp_sync())
            copy_out(buffers, block, thread, 128, 32)

    num_words = 32 * count if instruction == "ldmatrix" else 128
    x = np.arange(256, dtype=np.uint16).view(np.uint32)
    return emitted((x,), ((num_words,), "uint32"), one_block(512, 32, emit))


for instruction in ("ldmatrix", "stmatrix"):
    for count in (1, 2, 4):
        for is_transposed in (False, True):
            name = f"{instruction}_x{count}{'_trans' if is_transposed else ''}"
            KERNELS[name] = matrices(count, instruction, is_transposed=is_transposed)
