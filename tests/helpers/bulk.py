"""Small kernels of what Hopper has: TMA, mbarriers, wgmma; written in the words of programs, each fault on request."""

from types import SimpleNamespace

import numpy as np
from tvm.script import tirx as T  # noqa: N812

from tvmconv import devices
from tvmconv.builtin import tir_builder as p
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.tensor_map import make_tiled_map

LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global{}.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"
OPERANDS = {"float16": "f16", "bfloat16": "bf16", "float32": "tf32"}


def lowered(arrays, body):
    """A kernel of arrays, (shape, dtype) by name."""
    told = SimpleNamespace(
        argument_names=list(arrays),
        argument_shapes=[shape for shape, _ in arrays.values()],
        argument_dtypes=[dtype for _, dtype in arrays.values()],
    )
    return lower_module(p.build_schedule(told, body).mod, devices.find_device("sm_90a").make_target())


def shared(nbytes):
    """Shared memory, and an array whose element 0 is its address, to be set in the kernel."""
    return p.allocate("smem", nbytes // 4, "uint32", "shared.dyn"), p.allocate("base", 1, "uint32")


def begin(smem, base):
    p.store(base, 0, T.cuda.cvta_generic_to_shared(smem.access_ptr("rw")))


def address(base, at):
    return base[0] + p.to_uint32(at)


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
            smem, base = shared(stages * stage + 1024)
            acc, low = p.allocate("acc", n // 2, "float32"), p.allocate("low", 2, "uint32")
            begin(smem, base)

            def full(s):
                return address(base, stages * stage + s * 16)

            def empty(s):
                return address(base, stages * stage + s * 16 + 8)

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
                        p.emit_ptx(load, address(base, s * stage), x_map, step * k, 0, full(s))
                        p.emit_ptx(load, address(base, s * stage + a_bytes), k_map, step * k, 0, full(s))
                with p.ir.Else():
                    with p.serial_loop(steps, "step") as step:
                        s = step % stages
                        if waits:
                            p.emit_call(T.cuda.mbarrier_wait(full(s), step // stages % 2))
                        if fence:
                            p.emit_ptx("wgmma.fence.sync.aligned")
                        for kk in range(swizzle // 32):
                            for i, at in enumerate((thread // 128 * (64 * swizzle), a_bytes)):
                                start = T.shift_right(address(base, s * stage + at), T.uint32(4))
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
    return lowered(arrays, body)


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
            smem, base = shared(4096)
            begin(smem, base)
            row, chunk = thread // 8, thread % 8
            for i in range(2 if again else 1):
                if i and waited:
                    with p.if_(thread == 0):
                        p.emit_ptx("cp.async.bulk.wait_group.read", 0)
                    p.emit_call(T.cuda.cta_sync())
                values = [buffers["X"][i * 32 + row, chunk * 4 + e] for e in range(4)]
                p.emit_ptx("st.shared.v4.b32", address(base, row * 128 + T.bitwise_xor(chunk, row % 8) * 16), *values)
                if fence:
                    p.emit_ptx("fence.proxy.async.shared::cta")
                if barrier:
                    p.emit_call(T.cuda.cta_sync())
                with p.if_(thread == 0):
                    p.emit_ptx(STORE.format(2), y_map, 0, i * 32, base[0])
                    p.emit_ptx("cp.async.bulk.commit_group")
            if not left:
                with p.if_(thread == 0):
                    p.emit_ptx("cp.async.bulk.wait_group", 0)

    return lowered({"X": ((64, 32), "float32"), "Y": ((50, 32), "float32")}, body)


def multicast(*, synchronised=True, mask=3, released=True, end=True):
    """A kernel of clusters of two blocks, that each copy half of a row of X to both, three times, and add them up.

    Args:
        synchronised: whether they wait for each other's mbarriers to be made.
        mask: blocks that a copy goes to.
        released: whether a block tells the other that it has read.
        end: whether they end together.
    """
    steps, words = 3, 64
    told = make_tiled_map("float32", 4, (words, steps * 2), (words,), (words // 2, 1), 0)

    def body(buffers):
        x_map = p.declare_tensor_map("X_map", buffers["X"], told)
        axes = (p.thread_axis(4, "blockIdx.x"), p.thread_axis(2, "clusterCtaIdx.x"), p.thread_axis(96, "threadIdx.x"))
        with axes[0] as block, axes[1] as rank, axes[2] as thread:
            smem, base = shared(1024)
            begin(smem, base)
            word, peer = p.allocate("word", 2, "float32"), p.allocate("peer", 1, "uint32")
            full, empty = address(base, 512), address(base, 520)
            p.store(word, 1, T.float32(0))
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.init.shared.b64", full, T.uint32(1))
                p.emit_ptx("mbarrier.init.shared.b64", empty, T.uint32(2))
                p.emit_ptx("fence.mbarrier_init.release.cluster")
            if synchronised:
                p.emit_call(T.cuda.cluster_sync())
            else:
                p.emit_call(T.cuda.cta_sync())
            with p.ir.If(thread >= 64):
                with p.ir.Then(), p.if_(thread == 64), p.serial_loop(steps, "step") as step:
                    p.emit_call(T.cuda.mbarrier_wait(empty, step % 2 ^ 1))
                    p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(words * 4))
                    p.emit_ptx(
                        LOAD.format(2, "") + ".multicast::cluster",
                        *(address(base, rank * (words * 2)), x_map, rank * (words // 2), block // 2 * steps + step),
                        *(full, T.uint16(mask)),
                    )
                with p.ir.Else():
                    with p.serial_loop(steps, "step") as step:
                        p.emit_call(T.cuda.mbarrier_wait(full, step % 2))
                        p.emit_ptx("ld.shared.b32", word[0], address(base, thread * 4))
                        p.store(word, 1, word[1] + word[0])
                        p.emit_ptx("bar.sync", T.uint32(1), 64)
                        with p.if_(thread < (2 if released else 1)):
                            p.emit_ptx("mapa.shared::cluster.u32", peer[0], empty, T.Cast("uint32", thread))
                            p.emit_ptx("mbarrier.arrive.shared::cluster.b64", peer[0])
                    p.store(buffers["Y"], block * words + thread, word[1])
            if end:
                p.emit_call(T.cuda.cluster_sync())

    return lowered({"X": ((2 * steps, words), "float32"), "Y": ((4 * words,), "float32")}, body)
