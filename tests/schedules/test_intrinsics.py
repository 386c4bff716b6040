"""Each intrinsic does what its description says: TVM takes the description for granted, so it is executed here."""

import emulate
import numpy as np
import pytest
from tvm import te
from tvm.s_tir import Schedule
from tvm.tirx import IndexMap
from tvmconv.builtin.conv.tensor_cores.tensor_intrinsics import (
    SHARED_SCOPE,
    TILE_SIZE,
    WARP_SCOPE,
    accumulator_layout,
    register_intrinsics,
)

from tvmconv.compiler.device_lowering import lower_module
from tvmconv.devices import find_device
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import TF32, get_numpy_dtype

DTYPES = ("float16", "bfloat16", "float32")
BLOCKS = 2


def values(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(get_numpy_dtype(dtype))


def in_lanes(layout, width):
    """The map from matrices to what the lanes of a warp hold of their tiles."""
    return IndexMap.from_func(
        lambda n, i, j: [n, j // width, *layout(i, j % width)] if width else [n, *layout(i, j)],
        ndim=3,
        index_dtype="int32",
    )


def shared_by_lanes(s, copy, block):
    s.compute_at(copy, block)
    _, lane = s.split(s.fuse(*s.get_loops(copy)[-2:]), [None, WARP_SIZE])
    s.bind(lane, "threadIdx.x")


def run(s, *inputs):
    return emulate.run(lower_module(s.mod, find_device("sm_80").make_target()), inputs)


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tile_is_loaded_to_the_registers_that_the_layout_says(dtype, side):
    tensor = register_intrinsics(dtype)
    layout = in_lanes(getattr(tensor, f"{side}_layout"), 0)
    X = te.placeholder((BLOCKS, TILE_SIZE, tensor.mma_k), dtype, name="X")
    s = Schedule(te.create_prim_func([X, te.compute(X.shape, lambda *at: X(*at), name="Y")]))
    result = s.get_sblock("Y")
    load = s.cache_read(result, 0, WARP_SCOPE)
    copy = s.cache_read(load, 0, SHARED_SCOPE)
    s.transform_layout(load, ("write", 0), layout)
    s.transform_block_layout(result, layout)  # each lane stores what it holds
    block, lane, _ = s.get_loops(result)
    s.bind(block, "blockIdx.x")
    s.bind(lane, "threadIdx.x")
    s.compute_at(load, block)
    shared_by_lanes(s, copy, block)
    s.tensorize(s.get_loops(load)[-2], getattr(tensor, side))
    x = values((BLOCKS, TILE_SIZE, tensor.mma_k), dtype)
    assert np.array_equal(run(s, x), x)


@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_are_cleared_multiplied_and_stored(dtype, columns_first):
    tensor = register_intrinsics(dtype)
    shape = (BLOCKS, TILE_SIZE, 2 * tensor.mma_k)
    A, B = (te.placeholder(shape, dtype, name=name) for name in "AB")
    k = te.reduce_axis((0, shape[-1]), "k")

    def product(n, i, j):
        row, column = A[n, i, k].astype("float32"), B[n, j, k].astype("float32")
        return te.sum(column * row if columns_first else row * column, axis=k)

    s = Schedule(te.create_prim_func([A, B, te.compute((BLOCKS, TILE_SIZE, TILE_SIZE), product, name="Y")]))
    multiply = s.get_sblock("Y")
    sides = ["columns", "rows"] if columns_first else ["rows", "columns"]
    copies = [s.cache_read(multiply, operand, SHARED_SCOPE) for operand in (0, 1)]
    block, i, j, k = s.get_loops(multiply)
    step, k = s.split(k, [None, tensor.mma_k])
    s.reorder(block, step, i, j, k)
    multiply = s.blockize(i)
    s.bind(block, "blockIdx.x")
    store = s.cache_write(multiply, 0, SHARED_SCOPE)
    sums = s.cache_write(multiply, 0, WARP_SCOPE)
    for each in (sums, store):
        s.reverse_compute_at(each, block)
    loads = [s.cache_read(multiply, operand, WARP_SCOPE) for operand in (0, 1)]
    for load, side in zip(loads, sides, strict=True):
        s.compute_at(load, step)
        s.transform_layout(load, ("write", 0), in_lanes(getattr(tensor, f"{side}_layout"), tensor.mma_k))
        s.tensorize(s.get_loops(load)[-2], getattr(tensor, side))
    for copy in copies:
        shared_by_lanes(s, copy, block)
    _, lane = s.split(s.fuse(*s.get_loops(store)[-2:]), [None, WARP_SIZE])
    s.bind(lane, "threadIdx.x")
    s.transform_layout(sums, ("read", 0), in_lanes(accumulator_layout, 0))
    s.tensorize(s.get_loops(sums)[-2], tensor.store)
    (clear,) = s.get_child_blocks(s.decompose_reduction(multiply, step))
    s.tensorize(s.get_loops(clear)[-2], tensor.clear)
    (inner,) = s.get_child_blocks(multiply)
    s.tensorize(s.get_loops(inner)[-3], tensor.multiply_columns if columns_first else tensor.multiply)

    a, b = (values(shape, dtype, seed) for seed in (1, 2))
    expected = np.einsum("nik,njk->nij", a.astype(np.float64), b.astype(np.float64))
    tolerance = TF32.tolerance if dtype == "float32" else 1e-6
    assert np.linalg.norm(run(s, a, b) - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fragment_has_every_element_of_a_tile_once(dtype):
    tensor = register_intrinsics(dtype)
    layouts = [
        (tensor.rows_layout, tensor.mma_k),
        (tensor.columns_layout, tensor.mma_k),
        (accumulator_layout, TILE_SIZE),
    ]
    for layout, width in layouts:
        places = {layout(i, j) for i in range(TILE_SIZE) for j in range(width)}
        assert places == {
            (lane, register) for lane in range(WARP_SIZE) for register in range(TILE_SIZE * width // WARP_SIZE)
        }


def test_they_are_registered_once():
    assert register_intrinsics("float16") is register_intrinsics("float16")
