"""Small kernels of what Hopper has: TMA, mbarriers, wgmma; written in the words of programs, each fault on request."""

import numpy as np
from golden_parts import LOAD, STORE, Block, lower_arrays
from tvm.script import tirx as T  # noqa: N812
from tvmconv.builtin.conv.tensor_cores.gemm.tma import bulk_load, bulk_store

from tvmconv.builtin import tir_builder as p
from tvmconv.tensor_map import make_tiled_map

OPERANDS = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}


def product(
    dtype="float16",
    *,
    n=16,
    swizzle=128,
    steps=5,
    stages=2,
    groups=1,
    expect=0,
    init_fence=True,
    init_barrier=True,
    waits=True,
    fence=True,
    pending=1,
    released="behind",
    covered=True,
):
    """A kernel that multiplies X, (64 groups) × k, by the transpose of K, n × k, in steps through a ring.

    A warp copies, and warpgroups multiply 64 rows each.

    Args:
        dtype: of X and K.
        n: rows of K.
        swizzle: bytes of a row of a step.
        steps: of the sum.
        stages: of the ring.
        groups: warpgroups that multiply.
        expect: bytes that are expected beyond those that come.
        init_fence: behind the making of the mbarriers.
        init_barrier: behind that.
        waits: for the copies.
        fence: before a multiplication.
        pending: groups that are not waited for before a stage is released.
        released: a stage, "behind" that wait, "before" it, or "never".
        covered: whether the last multiplications are waited for.
    """
    itemsize = np.dtype(dtype).itemsize if dtype != "bfloat16" else 2
    k, m = swizzle // itemsize, 64 * groups
    a_bytes, stage = m * swizzle, (m + n) * swizzle
    maps = [make_tiled_map(dtype, itemsize, (k * steps, rows), (k * steps,), (k, rows), swizzle) for rows in (m, n)]
    kind = OPERANDS[dtype]
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // itemsize}.f32.{kind}.{kind}"
    tail = (1, 1) if itemsize == 4 else (1, 1, 0, 0)
    high = (8 * swizzle >> 4) | ({128: 1, 64: 2, 32: 3}[swizzle] << 30)
    load = LOAD.format(2, "")

    def body(buffers):
        x_map, k_map = (
            p.declare_tensor_map(f"{name}_map", buffers[name], told) for name, told in zip("XK", maps, strict=True)
        )
        with p.thread_axis(1, "blockIdx.x"), p.thread_axis(128 * groups + 32, "threadIdx.x") as thread:
            block = Block(stages * stage + 1024)
            acc, low = p.allocate("acc", n // 2, "float32"), p.allocate("low", 2, "uint32")

            def full(s):
                return block.address(stages * stage + s * 16)

            def empty(s):
                return block.address(stages * stage + s * 16 + 8)

            def descriptor(i):
                return T.bitwise_or(
                    T.Cast("uint64", low[i]), T.shift_left(T.Cast("uint64", T.uint32(high)), T.uint64(32))
                )

            def release(s):
                with p.if_(thread % 128 == 0):
                    p.emit_ptx("mbarrier.arrive.shared.b64", empty(s), T.uint32(1))

            with p.if_(thread == 0):
                for s in range(stages):
                    p.emit_ptx("mbarrier.init.shared.b64", full(s), T.uint32(1))
                    p.emit_ptx("mbarrier.init.shared.b64", empty(s), T.uint32(groups))
                if init_fence:
                    p.emit_ptx("fence.mbarrier_init.release.cluster")
            if init_barrier:
                p.emit_call(T.cuda.cta_sync())
            with p.ir.If(thread // 128 == groups):
                with p.ir.Then():
                    p.emit_ptx("setmaxnreg.dec.sync.aligned.u32", 40)
                    with p.if_(thread % 32 == 0), p.serial_loop(steps, "step") as step:
                        s = step % stages
                        p.emit_call(T.cuda.mbarrier_wait(empty(s), step // stages % 2 ^ 1))
                        p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", full(s), T.uint32(stage + expect))
                        p.emit_ptx(load, block.address(s * stage), x_map, step * k, 0, full(s))
                        p.emit_ptx(load, block.address(s * stage + a_bytes), k_map, step * k, 0, full(s))
                with p.ir.Else():
                    with p.serial_loop(steps, "step") as step:
                        s = step % stages
                        if waits:
                            p.emit_call(T.cuda.mbarrier_wait(full(s), step // stages % 2))
                        if fence:
                            p.emit_ptx("wgmma.fence.sync.aligned")
                        for kk in range(swizzle // 32):
                            for i, at in enumerate((thread // 128 * (64 * swizzle), a_bytes)):
                                start = T.shift_right(block.address(s * stage + at), T.uint32(4))
                                p.store(low, i, start + T.uint32(kk * 2) + T.uint32(1 << 16))
                            sums = [acc[e] for e in range(n // 2)]
                            p.emit_ptx(op, *sums, descriptor(0), descriptor(1), p.T.Or(step > 0, kk > 0), *tail)
                        p.emit_ptx("wgmma.commit_group.sync.aligned")
                        if released == "before":
                            release(s)
                        with p.if_(step > 0):
                            p.emit_ptx("wgmma.wait_group.sync.aligned", pending)
                            if released == "behind":
                                release((step - 1) % stages)
                    if covered:
                        p.emit_ptx("wgmma.wait_group.sync.aligned", 0)
                    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
                    for i in range(n // 2):
                        at = (row + i // 2 % 2 * 8) * n + i // 4 * 8 + column + i % 2
                        p.store(buffers["Y"], at, acc[i])

    arrays = {"X": ((m, k * steps), dtype), "K": ((n, k * steps), dtype), "Y": ((m * n,), "float32")}
    return lower_arrays(arrays, body)


def stored(*, fence=True, barrier=True, waited="read", again=True, left=False):
    """A kernel that copies the rows of X, 64 × 32 float32, to Y, 50 × 32, through shared memory, which TMA stores.

    Args:
        fence: between the stores of threads and TMA's reads.
        barrier: likewise.
        waited: what is waited for before the shared memory is written again, "read" or nothing.
        again: whether it is.
        left: whether the kernel ends without waiting for the last.
    """
    told = make_tiled_map("float32", 4, (32, 50), (32,), (32, 32), 128)

    def body(buffers):
        y_map = p.declare_tensor_map("Y_map", buffers["Y"], told)
        with p.thread_axis(1, "blockIdx.x"), p.thread_axis(256, "threadIdx.x") as thread:
            block = Block(4096)
            row, chunk = thread // 8, thread % 8
            for i in range(2 if again else 1):
                if i and waited:
                    with p.if_(thread == 0):
                        p.emit_ptx("cp.async.bulk.wait_group.read", 0)
                    p.emit_call(T.cuda.cta_sync())
                values = [buffers["X"][i * 32 + row, chunk * 4 + e] for e in range(4)]
                p.emit_ptx("st.shared.v4.b32", block.address(row * 128 + T.bitwise_xor(chunk, row % 8) * 16), *values)
                if fence:
                    p.emit_ptx("fence.proxy.async.shared::cta")
                if barrier:
                    p.emit_call(T.cuda.cta_sync())
                with p.if_(thread == 0):
                    p.emit_ptx(STORE.format(2), y_map, 0, i * 32, block.address(0))
                    p.emit_ptx("cp.async.bulk.commit_group")
            if not left:
                with p.if_(thread == 0):
                    p.emit_ptx("cp.async.bulk.wait_group", 0)

    return lower_arrays({"X": ((64, 32), "float32"), "Y": ((50, 32), "float32")}, body)


def copied(*, first=0, nbytes=512, expect=0, waits=True):
    """A kernel that copies contiguous bytes of X, 256 float32, to the start of Y through shared memory.

    Args:
        first: element of X at which they begin.
        nbytes: number of bytes.
        expect: bytes that are expected beyond those that come.
        waits: whether the copy to shared memory is waited for.
    """

    def body(buffers):
        with p.thread_axis(1, "blockIdx.x"), p.thread_axis(32, "threadIdx.x") as thread:
            block = Block(2048)
            barrier = block.address(1024)
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.init.shared.b64", barrier, T.uint32(1))
                p.emit_ptx("fence.mbarrier_init.release.cluster")
                p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", barrier, T.uint32(nbytes + expect))
                bulk_load(block.address(0), buffers["X"].access_ptr("r", offset=first), nbytes, barrier)
                if waits:
                    p.emit_call(T.cuda.mbarrier_wait(barrier, 0))
                bulk_store(buffers["Y"].access_ptr("w", offset=0), block.address(0), nbytes)
                p.emit_ptx("cp.async.bulk.wait_group", 0)

    return lower_arrays({"X": ((256,), "float32"), "Y": ((256,), "float32")}, body)
