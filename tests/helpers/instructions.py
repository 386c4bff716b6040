"""Small kernels of GPU instructions written in TVMScript: a tile that a warp multiplies, copied, read and stored."""

import tvm
from tvm.script import tirx as T  # noqa: N812

from tvmconv import devices
from tvmconv.builtin import tvm_script
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.workloads.dtypes import get_numpy_dtype

M, N = 16, 8  # of an mma instruction
MMA = {
    "float16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
    "float32": "m16n8k8.row.col.f32.tf32.tf32.f32",
}


def lowered(function, arch="sm_90"):
    return lower_module(tvm.IRModule({"main": function}), devices.find_device(arch).make_target())


def product(dtype="float16", *, warps=1, wait=True, barrier=True, copied=M, slack=0, overwriting=0, shift=0):
    """A kernel that multiplies X, 16 × k, by the transpose of K, 8 × k, in each of its warps.

    Args:
        dtype: of X and K.
        warps: of the block.
        wait: for the asynchronous copies.
        barrier: between these and ldmatrix.
        copied: rows of X that are copied.
        slack: elements behind its place at which X is read.
        overwriting: threads that overwrite the tile behind ldmatrix.
        shift: bytes by which ldmatrix reads beside a row.
    """
    size = get_numpy_dtype(dtype).itemsize
    k = 32 // size
    op = f"mma.sync.aligned.{MMA[dtype]}"

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((M, k), dtype), K: T.Buffer((N, k), dtype), Y: T.Buffer((warps, M, N), "float32")):
        for _ in T.thread_binding(1, thread="blockIdx.x"):
            for thread in T.thread_binding(32 * warps, thread="threadIdx.x"):
                shared = T.sblock_alloc_buffer((256,), "uint32", scope="shared.dyn")
                at = T.sblock_alloc_buffer((1,), "uint32", scope="local")
                a = T.sblock_alloc_buffer((4,), "uint32", scope="local")
                b = T.sblock_alloc_buffer((2,), "uint32", scope="local")
                d = T.sblock_alloc_buffer((4,), "float32", scope="local")
                lane = T.meta_var(thread % 32)
                at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw"))
                if thread < copied * 2:
                    T.ptx["cp.async.cg.shared.global"](
                        at[0] + T.uint32(thread * 16), X.access_ptr("r", offset=thread * (16 // size) + slack), 16
                    )
                if thread < N * 2:
                    T.ptx["cp.async.cg.shared.global"](
                        at[0] + T.uint32(512 + thread * 16), K.access_ptr("r", offset=thread * (16 // size)), 16
                    )
                T.ptx["cp.async.commit_group"]()
                if wait:
                    T.ptx["cp.async.wait_group"](0)
                if barrier:
                    T.cuda.cta_sync()
                for e in T.unroll(4):
                    d[e] = T.float32(0)
                T.ptx["ldmatrix.sync.aligned.m8n8.x4.shared.b16"](
                    a[0], a[1], a[2], a[3], at[0] + T.uint32(lane % 16 * 32 + lane // 16 * 16 + shift)
                )
                T.ptx["ldmatrix.sync.aligned.m8n8.x2.shared.b16"](
                    b[0], b[1], at[0] + T.uint32(512 + lane % 8 * 32 + lane // 8 % 2 * 16)
                )
                if thread < overwriting:
                    T.ptx["st.shared.b32"](at[0] + T.uint32(thread * 4), T.uint32(0))
                T.ptx[op](d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b[0], b[1], d[0], d[1], d[2], d[3])
                for h in T.unroll(2):
                    T.ptx["st.global.v2.b32"](
                        Y.access_ptr("w", offset=thread // 32 * (M * N) + (lane // 4 + h * 8) * N + lane % 4 * 2),
                        d[h * 2],
                        d[h * 2 + 1],
                    )

    return main


def rows(*, swizzled, branches=False):
    """A kernel of a warp that copies 32 rows of 128 bytes, in steps through a ring of two stages, and sums up columns.

    Args:
        swizzled: the c-th 16 bytes of row r lie at c XOR r (modulo 8).
        branches: whether it reads no more where a sum is zero: what it does depends on the data.
    """
    steps, stage = 3, 32 * 128

    @tvm_script.prim_func(s_tir=True)
    def main(X: T.Buffer((steps * stage // 4,), "float32"), Y: T.Buffer((32,), "float32")):
        for lane in T.thread_binding(32, thread="threadIdx.x"):
            shared = T.sblock_alloc_buffer((2 * stage // 4,), "uint32", scope="shared.dyn")
            slot = T.sblock_alloc_buffer((1,), "int32", scope="local")
            words = T.sblock_alloc_buffer((4,), "float32", scope="local")
            total = T.sblock_alloc_buffer((1,), "float32", scope="local")
            at = T.sblock_alloc_buffer((1,), "uint32", scope="local")
            at[0] = T.cuda.cvta_generic_to_shared(shared.access_ptr("rw"))
            slot[0] = 0
            total[0] = T.float32(0)
            for step in T.serial(steps):
                for i in T.unroll(8):
                    row = T.meta_var(i * 4 + lane // 8)
                    place = T.meta_var(lane % 8 ^ (row % 8 if swizzled else 0))
                    T.ptx["cp.async.ca.shared.global"](
                        at[0] + T.uint32(slot[0] * stage + row * 128 + place * 16),
                        X.access_ptr("r", offset=step * (stage // 4) + row * 32 + lane % 8 * 4),
                        16,
                    )
                T.ptx["cp.async.wait_all"]()
                T.cuda.cta_sync()
                chunk = T.meta_var(step ^ (lane % 8 if swizzled else 0))
                T.ptx["ld.shared.v4.b32"](
                    words[0],
                    words[1],
                    words[2],
                    words[3],
                    at[0] + T.uint32(slot[0] * stage + lane * 128 + chunk * 16),
                )
                for e in T.unroll(4):
                    total[0] = total[0] + words[e]
                slot[0] = T.Select(slot[0] == 1, 0, slot[0] + 1)
                if branches:  # noqa: SIM102  a condition of Python, and one of the kernel
                    if total[0] > T.float32(0):
                        Y[lane] = T.float32(1)
            Y[lane] = total[0]

    return main
