"""A kernel whose tiles TMA brings and wgmma multiplies: sums to scratch memory, which a second step rounds."""

from tvm.script import tirx as T  # noqa: N812
from tvmconv.builtin.tir_builder import (
    allocate,
    build_schedule,
    declare_tensor_map,
    emit_call,
    emit_ptx,
    fill_zeros,
    if_,
    store,
    thread_axis,
    to_uint32,
)

from tvmconv import registry
from tvmconv.tensor_map import make_im2col_map, make_tiled_map
from tvmconv.workloads import parse

WORKLOAD = parse("conv2d:1x64x8x8,64x64x3x3,s1,p1,f16,nhwc")
PIXELS = CHANNELS = DEPTH = 64  # of the only tile: outputs × output channels × input channels, a tap at a time
TAPS, TILE_BYTES, SUMS = 9, 64 * 64 * 2, 32  # the sums of a thread
IMAGE = make_im2col_map("float16", 2, (64, 8, 8, 1), (DEPTH, PIXELS), (1, 1), (-1, -1), (8, 8), 128)
WEIGHT = make_tiled_map("float16", 2, (64, TAPS, 64), (64, TAPS * 64), (DEPTH, 1, CHANNELS), 128)
LOAD_IMAGE = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
LOAD_WEIGHT = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
MULTIPLY = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"


def program(arguments, image=IMAGE, weight=WEIGHT):
    """The two kernels, with these maps."""
    sums = allocate("sums", PIXELS * CHANNELS, "float32", "global")
    x = declare_tensor_map("X_map", arguments["X"], image)
    k = declare_tensor_map("K_map", arguments["K"], weight)
    with thread_axis(1, "blockIdx.x"), thread_axis(128, "threadIdx.x") as thread:
        _multiply(x, k, sums, thread)
    with thread_axis(PIXELS, "blockIdx.x") as pixel, thread_axis(CHANNELS, "threadIdx.x") as channel:
        emit_ptx("griddepcontrol.wait")
        at = pixel * CHANNELS + channel
        total = allocate("total", 1, "float32")
        emit_ptx(
            "ld.global.f32", total[0], sums.access_ptr("r", offset=at)
        )  # behind the wait, where a load by name stays
        value = T.reinterpret("uint16", T.Cast("float16", total[0]))
        emit_ptx("st.global.b16", arguments["Y"].access_ptr("w", offset=at), value)


def _multiply(x, k, sums, thread):
    shared = allocate("shared", (2 * TILE_BYTES + 2048) // 4, "uint32", "shared.dyn")
    base, mine = allocate("base", 1, "uint32"), allocate("mine", SUMS, "float32")
    address = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw"))
    store(
        base, 0, (address + to_uint32(1023)) & T.uint32(0xFFFFFC00)
    )  # where the pattern of a swizzle of 128 bytes begins
    barrier = base[0] + to_uint32(2 * TILE_BYTES)
    fill_zeros(mine, SUMS)
    with if_(thread == 0):
        emit_ptx("mbarrier.init.shared.b64", barrier, to_uint32(1))
        emit_ptx("fence.mbarrier_init.release.cluster")
    emit_call(T.cuda.cta_sync())
    for tap in range(TAPS):
        row, column = divmod(tap, 3)
        with if_(thread == 0):
            emit_ptx("mbarrier.arrive.expect_tx.shared.b64", barrier, to_uint32(2 * TILE_BYTES))
            emit_ptx(LOAD_IMAGE, base[0], x, 0, -1, -1, 0, barrier, T.uint16(column), T.uint16(row))
            emit_ptx(LOAD_WEIGHT, base[0] + to_uint32(TILE_BYTES), k, 0, tap, 0, barrier)
        emit_call(T.cuda.mbarrier_wait(barrier, tap % 2))
        emit_ptx("wgmma.fence.sync.aligned")
        for begin in range(0, DEPTH * 2, 32):
            tiles = (_matrix(base[0] + to_uint32(begin)), _matrix(base[0] + to_uint32(TILE_BYTES + begin)))
            emit_ptx(MULTIPLY, *(mine[e] for e in range(SUMS)), *tiles, True, 1, 1, 0, 0)
        emit_ptx("wgmma.commit_group.sync.aligned")
        emit_ptx("wgmma.wait_group.sync.aligned", 0)
        emit_call(T.cuda.cta_sync())
    emit_ptx("griddepcontrol.launch_dependents")
    for e in range(SUMS):
        pixel = thread // 32 * 16 + thread % 32 // 4 + e // 2 % 2 * 8
        store(sums, pixel * CHANNELS + e // 4 * 8 + thread % 4 * 2 + e % 2, mine[e])


def _matrix(address):
    """wgmma's descriptor of a tile with rows of 128 bytes. Source: PTX ISA, "Matrix Descriptor"."""
    upper = T.shift_left(T.uint64(1 << 30 | 8 * 128 >> 4), T.uint64(32))
    return T.Cast("uint64", (address >> to_uint32(4)) | to_uint32(1 << 16)) | upper


def mapped(s, w, k):
    """The program as a schedule without knobs."""
    return build_schedule(w, program)


SCHEDULE = registry.Schedule("mapped", "conv2d", mapped, ("float16",), 0, device_kinds=("cuda",), exact_arch=90)
