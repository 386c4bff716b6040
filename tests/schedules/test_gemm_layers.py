"""Layers of the tensor-core kernels, each alone in a small kernel that the emulator executes."""

import functools
from types import SimpleNamespace

import emulate
import numpy as np
import pytest
from instructions import lowered
from tvm.script import tirx as T  # noqa: N812
from tvm.tirx.script.builder import ir
from tvmconv.builtin.conv.tensor_cores.gemm.atoms import (
    Major,
    ThreadPosition,
    WgmmaAtom,
    wgmma_commit_group,
    wgmma_fence,
    wgmma_wait_group,
)
from tvmconv.builtin.conv.tensor_cores.gemm.channel_arguments import ChannelArguments
from tvmconv.builtin.conv.tensor_cores.gemm.cp_async import CopyThreads, ImageGather
from tvmconv.builtin.conv.tensor_cores.gemm.cta import allocate_smem
from tvmconv.builtin.conv.tensor_cores.gemm.epilogue_ops import EpilogueOps
from tvmconv.builtin.conv.tensor_cores.gemm.pipelines import PipelineState, TmaPipeline, fence_barrier_init
from tvmconv.builtin.conv.tensor_cores.gemm.residue_classes import ResidueAxis
from tvmconv.builtin.conv.tensor_cores.gemm.smem_layout import MatrixDescriptor, SmemLayout
from tvmconv.builtin.conv.tensor_cores.gemm.tile_scheduler import Cluster, KRange, TileScheduler
from tvmconv.builtin.conv.tensor_cores.gemm.tma import TmaCopy
from tvmconv.builtin.conv.tensor_cores.gemm.tma_loaders import FilterMatrix, Im2colImage, TapIterator
from tvmconv.builtin.conv.tensor_cores.gemm.workspace_reduction import OutputVector, WorkspaceReduction
from tvmconv.builtin.tir_builder import (
    allocate,
    build_schedule,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    if_,
    serial_loop,
    thread_axis,
    to_uint32,
)

import tvmconv as tc
from tvmconv.arithmetic import ceil_div
from tvmconv.workloads.dtypes import get_numpy_dtype


def emulated(arguments, emit, inputs=()):
    """The last of the arguments {name: (shape, dtype)} after the kernel that a function emits."""
    names, shapes, dtypes = zip(*((name, *rest) for name, rest in arguments.items()), strict=True)
    signature = SimpleNamespace(argument_names=names, argument_shapes=shapes, argument_dtypes=dtypes)
    return emulate.run(lowered(build_schedule(signature, emit).mod["main"]), inputs)


def store_at(buffer, indices, value):
    ir.buffer_store(buffer, value, list(indices))


def aligned_smem(nbytes):
    return allocate_smem(nbytes + 1024, 1024)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_pipeline_state_flips_its_phase_at_each_wrap(stages):
    def emit(arguments):
        with thread_axis(1, "blockIdx.x"), thread_axis(1, "threadIdx.x"):
            state = PipelineState("state", stages)
            with serial_loop(7, "i") as i:
                for column, value in enumerate((state.index, state.phase, state.previous_index)):
                    store_at(arguments["Y"], (i, column), value)
                state.advance()

    steps = range(7)
    expected = [(i % stages, i // stages % 2, (i - 1) % stages) for i in steps]
    assert emulated({"Y": ((7, 3), "int32")}, emit).tolist() == [list(row) for row in expected]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_pipeline_state_skips_what_another_warpgroup_reads(count):
    def emit(arguments):
        with thread_axis(1, "blockIdx.x"), thread_axis(1, "threadIdx.x"):
            state = PipelineState("state", 3)
            with serial_loop(7, "i") as i:
                store_at(arguments["Y"], (i, 0), state.index)
                store_at(arguments["Y"], (i, 1), state.phase)
                state.skip(count)

    steps = [i * count for i in range(7)]
    assert emulated({"Y": ((7, 2), "int32")}, emit).tolist() == [[step % 3, step // 3 % 2] for step in steps]


@pytest.mark.parametrize("raster_order", ["n", "m"])
@pytest.mark.parametrize(("extents", "ctas"), [((100, 40), 5), ((100, 40), 35), ((96, 40), 3)])
def test_two_roles_take_tiles_in_turn(extents, ctas, raster_order):
    tiles_m, tiles_n = ceil_div(extents[0], 16), extents[1] // 8

    def emit(arguments):
        with thread_axis(ctas, "blockIdx.x") as cta, thread_axis(2, "threadIdx.x") as role:
            scheduler = TileScheduler.of_product(extents, (16, 8), 1, ctas, raster_order=raster_order)
            with scheduler.work_tiles(cta, role, 2) as work:
                store_at(arguments["Y"], (work.m // 16, work.n // 8), cta * 2 + role)

    found = emulated({"Y": ((tiles_m, tiles_n), "int32")}, emit)
    order = np.arange(tiles_m * tiles_n)
    expected = order % ctas * 2 + order // ctas % 2
    ordered = found.T if raster_order == "m" else found
    assert ordered.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("extents", "tile", "groups", "ctas", "cluster"),
    [((100, 40), (16, 8), 2, 5, (1, 1)), ((100, 40), (16, 8), 1, 12, (2, 2)), ((64, 8), (64, 8), 1, 1, (1, 1))],
)
def test_every_tile_is_computed_by_one_cta(extents, tile, groups, ctas, cluster):
    tiles_m, tiles_n = (ceil_div(e, t * c) * c for e, t, c in zip(extents, tile, cluster, strict=True))

    def emit(arguments):
        with thread_axis(ctas, "blockIdx.x") as cta, thread_axis(1, "threadIdx.x"):
            shape = Cluster(*cluster, cta % (cluster[0] * cluster[1]))
            scheduler = TileScheduler.of_product(extents, tile, groups, ctas, shape)
            assert scheduler.num_tiles == groups * tiles_m * tiles_n
            with scheduler.work_tiles(cta) as work:
                store_at(arguments["Y"], (work.group, work.m // tile[0], work.n // tile[1]), cta + 1)

    computed_by = emulated({"Y": ((groups, tiles_m, tiles_n), "int32")}, emit)
    counts = np.bincount(computed_by.ravel(), minlength=ctas + 1)
    assert counts[0] == 0
    assert counts.max() - counts[1:].min() <= 1


def test_parts_of_a_reduction_cover_all_k_tiles():
    def emit(arguments):
        with thread_axis(3, "blockIdx.z") as split, thread_axis(1, "threadIdx.x"):
            k_range = KRange(split, 3, 8)
            store_at(arguments["Y"], (split, 0), k_range.first)
            store_at(arguments["Y"], (split, 1), k_range.count)

    assert emulated({"Y": ((3, 2), "int32")}, emit).tolist() == [[0, 3], [3, 3], [6, 2]]


@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256])
def test_swizzle_permutes_the_chunks_of_a_row_and_serves_eight_rows_at_once(row_bytes):
    layout, rows = SmemLayout(16, row_bytes), 16

    def emit(arguments):
        with thread_axis(1, "blockIdx.x"), thread_axis(rows, "threadIdx.x") as row:
            for chunk in range(row_bytes // 16):
                store_at(arguments["Y"], (row, chunk), T.Cast("int32", layout.swizzled_offset(row, chunk)))

    offsets = emulated({"Y": ((rows, row_bytes // 16), "int32")}, emit)
    assert (offsets // row_bytes == np.arange(rows)[:, None]).all()
    assert sorted(offsets.ravel()) == list(range(0, rows * row_bytes, 16))
    assert len(set(offsets[:8, 0] // 16 % 8)) == 8  # 128 bytes: all banks


MAJORS = [(Major.K, Major.K), (Major.MN, Major.K), (Major.K, Major.MN), (Major.MN, Major.MN)]


@pytest.mark.parametrize(
    ("dtype", "row_bytes", "majors"),
    [
        *(("float16", 128, majors) for majors in MAJORS),
        ("float16", 64, MAJORS[3]),
        ("bfloat16", 64, MAJORS[0]),
        ("float16", 32, MAJORS[0]),
        ("tf32", 128, MAJORS[0]),
    ],
)
def test_wgmma_multiplies_tiles_that_tma_loads(dtype, row_bytes, majors):
    """A tile of A, 64 × k, and one of B, n × k, from boxes that are as wide as a swizzle."""
    storage = "float32" if dtype == "tf32" else dtype
    atom = WgmmaAtom(64, dtype, dtype, *majors)
    k = 2 * row_bytes // atom.itemsize if Major.K in majors else 64
    shapes = [(mn, k) if major is Major.K else (k, mn) for mn, major in zip((64, atom.n), majors, strict=True)]
    layouts = [
        SmemLayout(s[0], row_bytes, s[1] * atom.itemsize // row_bytes, m) for s, m in zip(shapes, majors, strict=True)
    ]

    def emit(arguments):
        loaders = [FilterMatrix(storage, rows, (1,), columns) for rows, columns in shapes]
        box = row_bytes // atom.itemsize
        tensor_maps = [
            declare_tensor_map(f"{name}_map", arguments[name], loader.tensor_map(layout.rows, box, row_bytes))
            for name, loader, layout in zip("XK", loaders, layouts, strict=True)
        ]
        with thread_axis(1, "blockIdx.x"), thread_axis(128, "threadIdx.x") as index:
            thread, nbytes = ThreadPosition(index), sum(layout.nbytes for layout in layouts)
            smem = aligned_smem(nbytes + 16)
            pipeline = TmaPipeline(smem, nbytes, smem + to_uint32(nbytes), 1, nbytes, 1)
            with if_(index == 0):
                pipeline.init_barriers()
                fence_barrier_init()
            emit_call(T.cuda.cta_sync())
            with if_(index == 0):
                pipeline.producer_acquire(0, 0)
                for operand, (loader, layout) in enumerate(zip(loaders, layouts, strict=True)):
                    for i in range(layout.boxes):
                        to = smem + to_uint32(operand * layouts[0].nbytes + i * layout.box_bytes)
                        loader.load(to, TmaCopy(tensor_maps[operand], pipeline.full_barrier(0)), (0,), (i * box, 0))
            pipeline.consumer_wait(0, 0)
            descriptors = [MatrixDescriptor(name, layout) for name, layout in zip("ab", layouts, strict=True)]
            descriptors[0].set_address(smem)
            descriptors[1].set_address(smem + to_uint32(layouts[0].nbytes))
            sums = allocate("sums", atom.num_accumulators, "float32")
            wgmma_fence()
            for step in range(0, k, atom.k):
                a, b = (
                    d.encode_operand(layout.operand_offset(0, step, atom.itemsize))
                    for d, layout in zip(descriptors, layouts, strict=True)
                )
                atom.emit([sums[e] for e in range(atom.num_accumulators)], a, b, step > 0)
            wgmma_commit_group()
            wgmma_wait_group(0)
            for e in range(atom.num_accumulators):
                row = thread.warp * 16 + thread.lane // 4 + e // 2 % 2 * 8
                store_at(arguments["Y"], (row, e // 4 * 8 + thread.lane % 4 * 2 + e % 2), sums[e])

    random = np.random.default_rng(0)
    a, b = (random.integers(-4, 5, shape).astype(get_numpy_dtype(storage)) for shape in shapes)
    arguments = {"X": (shapes[0], storage), "K": (shapes[1], storage), "Y": ((64, atom.n), "float32")}
    found = emulated(arguments, emit, (a, b))
    a, b = (
        x.astype(np.float64) if m is Major.K else x.T.astype(np.float64) for x, m in zip((a, b), majors, strict=True)
    )
    assert (found == a @ b.T).all()


def patches(w, x):
    """The pixels below each tap: filter positions × (taps, channels)."""
    rows = np.zeros((w.N * w.P * w.Q, w.R, w.S, w.C), x.dtype)
    for row, (n, p, q) in enumerate(np.ndindex(w.N, w.P, w.Q)):
        for r, s in np.ndindex(w.R, w.S):
            h, v = (
                p * w.stride[0] - w.pad_low[0] + r * w.dilation[0],
                q * w.stride[1] - w.pad_low[1] + s * w.dilation[1],
            )
            if 0 <= h < w.H and 0 <= v < w.W:
                rows[row, r, s] = x[n, h, v]
    return rows


IMAGES = ["conv2d:2x8x5x6,1x8x3x2,s1,p1,f16,nhwc", "conv2d:2x8x9x7,1x8x3x3,s2,p1x0x1x2,d1x2,f16,nhwc"]


@pytest.mark.parametrize("text", IMAGES)
def test_im2col_loader_copies_the_pixels_below_each_tap(text):
    w = tc.parse(text)
    rows, taps = w.N * w.P * w.Q, w.R * w.S
    box_rows = 16

    def emit(arguments):
        loader = Im2colImage(w)
        tensor_map = declare_tensor_map("X_map", arguments["X"], loader.tensor_map(box_rows, w.C, 0))
        with thread_axis(ceil_div(rows, box_rows), "blockIdx.x") as cta, thread_axis(32, "threadIdx.x") as thread:
            smem, nbytes = aligned_smem(box_rows * 16 + 16), box_rows * 16
            pipeline = TmaPipeline(smem, nbytes, smem + to_uint32(nbytes), 1, nbytes, 1)
            with if_(thread == 0):
                pipeline.init_barriers()
                fence_barrier_init()
            emit_call(T.cuda.cta_sync())
            k, state = TapIterator(w.kernel, 1, w.C), PipelineState("state", 1)
            position = loader.locate(cta * box_rows, "row")
            k.seek(0)
            with serial_loop(taps, "tap") as tap:
                with if_(thread == 0):
                    pipeline.producer_acquire(state.index, state.phase)
                    loader.load(smem, TmaCopy(tensor_map, pipeline.full_barrier(0)), position, (k.channel, *k.taps))
                pipeline.consumer_wait(state.index, state.phase)
                words = allocate("words", 4, "uint32")
                with if_(T.And(thread < box_rows, cta * box_rows + thread < rows)):
                    emit_ptx("ld.shared.v4.b32", *(words[e] for e in range(4)), smem + to_uint32(thread * 16))
                    to = arguments["Y"].access_ptr("w", offset=((cta * box_rows + thread) * taps + tap) * w.C)
                    emit_ptx("st.global.v4.b32", to, *(words[e] for e in range(4)))
                emit_call(T.cuda.cta_sync())
                with if_(thread == 0):
                    pipeline.consumer_arrive(state.index)
                state.advance()
                k.advance()

    x, _ = w.inputs(seed=0)
    found = emulated({"X": (x.shape, "float16"), "Y": ((rows, w.R, w.S, w.C), "float16")}, emit, (x,))
    assert (found == patches(w, x.astype(np.float16))).all()


@pytest.mark.parametrize("text", [*IMAGES, "conv2d:1x3x6x5,1x3x3x3,s1,p1,f16,nhwc"])
def test_gather_loader_copies_the_pixels_below_each_tap(text):
    """Pieces of 16 bytes, or single elements of three channels; the last K tile overhangs."""
    w = tc.parse(text)
    rows, block_k, extent = w.N * w.P * w.Q, 32, w.R * w.S * w.C
    k_tiles, layout = ceil_div(extent, 32), SmemLayout(w.N * w.P * w.Q, 64)

    def emit(arguments):
        with thread_axis(k_tiles, "blockIdx.x") as k_tile, thread_axis(64, "threadIdx.x") as thread:
            smem = aligned_smem(layout.nbytes)
            loader = ImageGather(w, arguments["X"], block_k, extent, CopyThreads(layout, 64, thread))
            loader.locate(0, 0)
            loader.load(smem, 0, k_tile * block_k)
            emit_call(T.ptx.cp.async_.commit_group())
            emit_call(T.ptx.cp.async_.wait_group(0))
            emit_call(T.cuda.cta_sync())
            words = allocate("words", 4, "uint32")
            with serial_loop(rows, "row") as row, if_(thread < 4):
                emit_ptx("ld.shared.v4.b32", *(words[e] for e in range(4)), smem + layout.swizzled_offset(row, thread))
                to = arguments["Y"].access_ptr("w", offset=(row * k_tiles + k_tile) * block_k + thread * 8)
                emit_ptx("st.global.v4.b32", to, *(words[e] for e in range(4)))

    x, _ = w.inputs(seed=0)
    arguments = {"X": (x.shape, "float16"), "Y": ((rows, k_tiles * block_k), "float16")}
    found = emulated(arguments, emit, (x,))
    assert (found[:, :extent] == patches(w, x.astype(np.float16)).reshape(rows, extent)).all()
    assert (found[:, extent:] == 0).all()


@pytest.mark.parametrize("channels", [16, 18, 21])
def test_channel_arguments_arrive_for_all_threads_of_a_warpgroup(channels):
    """Two warpgroups copy the arguments of tiles of 16 channels, of which the last ones may not exist."""
    tiles = TileScheduler.of_product((1, channels), (1, 16), 1, 1)

    def emit(arguments):
        with thread_axis(1, "blockIdx.x") as cta, thread_axis(256, "threadIdx.x") as index:
            thread, smem = ThreadPosition(index), allocate_smem(2 * 2 * 16 * 4)
            names = ["bias", "scale"]
            per_channel = ChannelArguments(names, arguments, 16, channels, channels == 16, smem, thread.warpgroup)
            with tiles.work_tiles(cta) as tile:
                per_channel.prefetch(tile, thread)
                per_channel.wait(thread)
                with if_(thread.warpgroup_thread < 8):
                    pairs = per_channel.load(thread.warpgroup_thread * 2)
                    for e in range(2):
                        channel = tile.n + thread.warpgroup_thread * 2 + e
                        total = pairs["bias"][e] + pairs["scale"][e]
                        store_at(arguments["Y"], (thread.warpgroup, channel), total)

    bias, scale = np.arange(1, channels + 1, dtype="float32"), np.full(channels, 100, "float32")
    arguments = {name: ((channels,), "float32") for name in ("bias", "scale")}
    found = emulated(arguments | {"Y": ((2, ceil_div(channels, 16) * 16), "float32")}, emit, (bias, scale))
    assert (found[:, :channels] == bias + scale).all()
    assert (found[:, channels:] == 0).all()


@pytest.mark.parametrize(("parts", "chains"), [(3, 1), (9, 2), (16, 4)])
def test_partial_sums_are_added_in_order_and_only_inside_the_output(parts, chains):
    rows, channels = 5, 12

    def locate(item):
        row, channel = item // 4, item % 4 * 4  # a fourth vector of each row lies outside
        return OutputVector(
            channel,
            row * channels + channel,
            lambda part: (part * rows + row) * channels + channel,
            channel < channels,
        )

    def emit(arguments):
        reduction = WorkspaceReduction(rows * 4, 4, parts, locate, num_threads=32)
        reduction.emit(arguments["X"], EpilogueOps((), "float32"), arguments, "Y")

    x = np.random.default_rng(0).standard_normal((parts, rows, channels)).astype("float32")
    found = emulated({"X": (x.shape, "float32"), "Y": ((rows, channels), "float32")}, emit, (x,))
    sums = [functools.reduce(np.add, x[chain::chains]) for chain in range(chains)]
    assert (found == functools.reduce(np.add, sums)).all()


@pytest.mark.parametrize(
    "sizes", [(9, 3, 2, 1, 1), (8, 2, 4, 1, 0), (11, 5, 4, 2, 3), (13, 4, 6, 4, 5), (7, 3, 1, 2, 0)]
)
def test_residue_classes_have_all_products_of_a_strided_dgrad(sizes):
    axis = ResidueAxis(*sizes)
    _, taps, stride, dilation, pad_low = sizes
    found = []
    for residue in range(stride):
        assert 0 <= axis.first_offset(residue) <= axis.max_offset or not axis.num_taps(residue)
        for position in range(axis.positions):
            for i in range(axis.num_taps(residue)):
                tap, offset = axis.first_tap(residue) + i * axis.tap_step, i * axis.offset_step
                element = position + axis.lower_corner + axis.first_offset(residue) - offset
                assert axis.first_offset(residue) >= offset
                found.append((axis.pixel(residue, position), tap, element))
    expected = [
        (pixel, tap, (pixel + pad_low - tap * dilation) // stride)
        for pixel in range(axis.positions * stride)
        for tap in range(taps)
        if (pixel + pad_low - tap * dilation) % stride == 0
    ]
    assert sorted(found) == expected
