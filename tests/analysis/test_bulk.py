"""TMA, mbarriers and wgmma are executed as the PTX ISA has them, and what kernels must not do with them is found."""

import bulk
import emulate
import numpy as np
import pytest

from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.instructions import dispatch
from tvmconv.tensor_map import TensorMap, make_im2col_map, make_tiled_map
from tvmconv.workloads.dtypes import get_numpy_dtype


def random(shape, dtype="float16"):
    return np.random.default_rng(0).standard_normal(shape).astype(get_numpy_dtype(dtype))


def unswizzled(found, rows, swizzle, dtype):
    """Rows as they were before their chunks were permuted, which is what the PTX ISA draws for 128-byte rows."""
    nbytes = found.nbytes // rows
    chunks = found.view(np.uint8).reshape(-1, 16)
    number = np.arange(len(chunks))
    line, chunk = number // 8, number % 8
    there = line * 8 + {0: chunk, 32: chunk ^ line % 2, 64: chunk ^ line % 4, 128: chunk ^ line % 8}[swizzle]
    return chunks[there].reshape(rows, nbytes).view(get_numpy_dtype(dtype))


@pytest.mark.parametrize(("swizzle", "columns"), [(0, 24), (32, 16), (64, 32), (128, 64)])
@pytest.mark.parametrize("at", [(16, 3, 1), (-8, -1, -1)])
def test_a_tile_is_copied_row_by_row_with_zeros_outside(swizzle, columns, at):
    x = random((5, 7, 72))
    told = make_tiled_map("float16", 2, (72, 7, 5), (72, 7 * 72), (columns, 4, 2), swizzle)
    found = unswizzled(emulate.run(bulk.copied(told, at), [x]), 8, swizzle, "float16")
    padded = np.pad(x, 80)
    z, y, c = (80 + each for each in reversed(at))
    np.testing.assert_array_equal(found.reshape(2, 4, columns), padded[z : z + 2, y : y + 4, c : c + columns])


def test_a_tile_of_steps_takes_every_other_row():
    x = random((9, 32))
    told = TensorMap("float16", (32, 9), (64,), (32, 8), (1, 2), 64)
    found = emulate.run(bulk.copied(told, (0, 1)), [x])
    np.testing.assert_array_equal(unswizzled(found[: 4 * 16], 4, 64, "float16"), x[1:9:2])


def columns(x, told, at, offsets, stride, out):
    """Rows of an im2col matrix, from a place of the filter on, one after the other."""
    n, h, w, _ = x.shape
    first, *taps = at[0], *offsets
    lines = [
        (image, told.lower_corner[1] + i * stride, told.lower_corner[0] + j * stride)
        for image in range(n + 9)
        for i in range(out[1])
        for j in range(out[0])
    ]
    begin = lines.index((at[3], at[2], at[1]))
    rows = np.zeros((told.box[1], told.box[0]), x.dtype)
    for row, (image, y, z) in zip(rows, lines[begin:], strict=False):
        y, z = y + taps[1], z + taps[0]
        if image < n and 0 <= y < h and 0 <= z < w:
            taken = x[image, y, z, first : first + told.box[0]]
            row[: len(taken)] = taken
    return rows


@pytest.mark.parametrize("offsets", [(0, 0), (1, 2)])
@pytest.mark.parametrize("begin", [(64, 1, 2, 0), (0, 3, 1, 1), (0, 0, 0, 2)])
@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 1, 0)])
def test_im2col_goes_over_pixels_lines_and_images(offsets, begin, stride, dilation, padding):
    x = random((2, 9, 11, 72))
    out = tuple((extent + 2 * padding - 2 * dilation - 1) // stride + 1 for extent in (11, 9))
    told = make_im2col_map("float16", 2, (72, 11, 9, 2), (64, 48), (stride, stride), (-padding, -padding), out, 128)
    at = (begin[0], *(begin[1 + i] * stride - padding for i in range(2)), begin[3])
    offsets = tuple(each * dilation for each in offsets)
    found = emulate.run(bulk.copied(told, at, offsets), [x])
    expected = columns(x, told, at, offsets, stride, out)
    np.testing.assert_array_equal(unswizzled(found, 48, 128, "float16"), expected)


def test_tiles_are_aligned_in_shared_memory():
    told = make_tiled_map("float16", 2, (64, 8), (64,), (64, 8), 128)
    with pytest.raises(ExecutionError, match="misaligned"):
        emulate.run(bulk.copied(told, (0, 0), cut=16), [random((8, 64))])


def product(x, k, **options):
    return emulate.run(bulk.product(**options), [x, k]).reshape(len(x), len(k))


def products(x, k):
    return x.astype(np.float64) @ k.astype(np.float64).T


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-6), ("bfloat16", 1e-6), ("float32", 2e-3)])
@pytest.mark.parametrize(("n", "swizzle"), [(8, 128), (80, 64), (16, 32)])
def test_what_wgmma_computes_is_the_product_of_matrices(dtype, tolerance, n, swizzle):
    k = swizzle // np.dtype(get_numpy_dtype(dtype)).itemsize * 3
    x, w = random((64, k), dtype), np.ascontiguousarray(random((n, k), dtype)[::-1])
    found = product(x, w, dtype=dtype, n=n, swizzle=swizzle, steps=3)
    np.testing.assert_allclose(found, products(x, w), atol=tolerance * np.abs(products(x, w)).max())


@pytest.mark.parametrize("options", [{}, dict(stages=3), dict(steps=1), dict(groups=2), dict(steps=8, stages=4)])
def test_a_ring_of_stages_is_filled_and_released(options):
    k, m = 64 * options.get("steps", 5), 64 * options.get("groups", 1)
    x, w = random((m, k)), random((16, k))
    np.testing.assert_allclose(product(x, w, **options), products(x, w), atol=1e-4)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(expect=16), r"deadlock: .* at the mbarrier .* lacks 16 bytes"),
        (dict(expect=-2048), "expects too few bytes"),
        (
            dict(released="never"),
            r"deadlock: .*thread 128 of block \(0, 0, 0\) at the mbarrier .* lacks 1 of 1 arrivals",
        ),
        (dict(released="before"), "which a wgmma may still read: no thread has waited"),
        (dict(pending=2), "which a wgmma may still read: no thread has waited"),
        (dict(waits=False), "race"),
        (dict(fence=False), "no wgmma.fence"),
        (dict(covered=False), "acc is accessed while wgmma writes it"),
        (dict(init_fence=False), "no fence.mbarrier_init after"),
        (dict(init_barrier=False), "no barrier after its mbarrier.init|not initialized"),
    ],
)
def test_what_a_ring_lacks_is_found(faults, message):
    with pytest.raises(ExecutionError, match=message):
        emulate.run(bulk.product(**faults), [random((64, 320)), random((16, 320))])


def test_tma_stores_what_lies_in_the_array():
    x = random((64, 32), "float32")
    np.testing.assert_array_equal(emulate.run(bulk.stored(), [x]), x[:50])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(fence=False), "no fence.proxy.async after it"),
        (dict(barrier=False), "has written with no barrier between"),
        (dict(waited=None), "a bulk copy may still read: no thread has waited"),
        (dict(again=False, left=True), "may exit while a bulk copy still reads"),
    ],
)
def test_what_a_bulk_store_lacks_is_found(faults, message):
    with pytest.raises(RaceError, match=message):
        emulate.run(bulk.stored(**faults), [random((64, 32), "float32")])


def test_the_blocks_of_a_cluster_copy_for_each_other():
    x = random((6, 64), "float32")
    found = emulate.run(bulk.multicast(), [x]).reshape(4, 64)
    sums = x[:3][0] + x[1] + x[2], x[3] + x[4] + x[5]
    np.testing.assert_array_equal(found, [sums[0], sums[0], sums[1], sums[1]])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(synchronised=False), "no barrier after its mbarrier.init|not initialized"),
        (dict(mask=1), "deadlock: .*lacks .* bytes"),
        (dict(mask=7), "rank 2 exceeds the cluster of 2 blocks"),
        (dict(released=False), "deadlock: .*thread 64 of block .* lacks 2 of 2 arrivals"),
        (dict(end=False), r"block \(.* may exit"),
    ],
)
def test_what_a_cluster_lacks_is_found(faults, message):
    with pytest.raises(ExecutionError, match=message):
        emulate.run(bulk.multicast(**faults), [random((6, 64), "float32")])


FORMATS = {"float16": "m64n24k16.f32.f16.f16", "float8_e4m3fn": "m64n24k32.f32.e4m3.e4m3"}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("swizzle", [0, 32])
def test_wgmma_reads_what_threads_have_stored(dtype, swizzle):
    import ml_dtypes  # noqa: F401  lets NumPy know types of 8 bits by their names

    k = 32 // np.dtype(dtype).itemsize
    x, w = (random((rows, k), "float32").astype(dtype) for rows in (64, 24))
    words = [each.view(np.uint32).reshape(-1) for each in (x, w)]
    kernel = bulk.staged_product(f"wgmma.mma_async.sync.aligned.{FORMATS[dtype]}", 24, swizzle)
    np.testing.assert_allclose(emulate.run(kernel, words).reshape(64, 24), products(x, w), rtol=1e-4, atol=1e-4)


def test_wgmma_needs_a_fence_behind_stores_of_threads():
    kernel = bulk.staged_product(f"wgmma.mma_async.sync.aligned.{FORMATS['float16']}", 24, 32, fence=False)
    with pytest.raises(RaceError, match=r"no fence.proxy.async after it"):
        emulate.run(kernel, [np.zeros(512, np.uint32), np.zeros(192, np.uint32)])


ORDERING = ("fence", "wait", "sync", "arrive", "commit", "mbarrier_init")


@pytest.mark.parametrize(
    ("kernel", "shapes", "dtype"),
    [(bulk.product, [(64, 320), (16, 320)], "float16"), (bulk.stored, [(64, 32)], "float32")],
)
def test_whatever_orders_and_is_left_out_is_missed(kernel, shapes, dtype, monkeypatch):
    whole, lowered, inputs = dispatch.translate_statement, kernel(), [random(shape, dtype) for shape in shapes]
    seen, count = 0, 0

    def without(left_out):
        nonlocal seen
        seen = 0

        def statement(node, compiler):
            nonlocal seen
            name = str(node.op.name)
            if any(word in name for word in ORDERING) and "tensor" not in name:
                seen += 1
                if left_out and (seen - left_out) % count == 0:  # a kernel that does not end is compiled again
                    return lambda mask: None
            return whole(node, compiler)

        monkeypatch.setattr(dispatch, "translate_statement", statement)
        return emulate.run(lowered, inputs)

    without(None)
    count = seen
    assert count >= 7
    for i in range(1, count + 1):
        with pytest.raises(ExecutionError):
            without(i)
