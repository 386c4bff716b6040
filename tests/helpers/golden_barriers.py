"""Golden kernels of barriers and clusters."""

from golden_parts import (
    KERNELS,
    LOAD,
    Block,
    GoldenKernel,
    emitted,
    hash_words,
    init_mbarriers,
    load_word,
    one_block,
    small_integers,
)
from tvm.script import tirx as T  # noqa: N812

from tvmconv.builtin import tir_builder as p
from tvmconv.tensor_map import make_tiled_map

# --- barriers ---


def mbarrier_phases(wait: str, arrival: str) -> GoldenKernel:
    """A warp hands words to another through a ring of two stages, whose mbarriers go through several phases."""
    steps, stages = 5, 2

    def emit(buffers, block, thread):
        done, word = p.allocate("done", 1, "uint32"), p.allocate("word", 1, "uint32")

        def barrier(stage, number):
            return block.address(512 + stage * 16 + number * 8)

        def await_phase(address, parity):
            if wait == "helper":
                p.emit_call(T.cuda.mbarrier_wait(address, parity))
                return
            p.store(done, 0, T.uint32(0))
            with p.ir.While(done[0] == T.uint32(0)):
                p.emit_ptx("mbarrier.try_wait.parity.shared.b64", done[0], address, T.Cast("uint32", parity))

        def arrive(address):
            if arrival == "each":
                p.emit_ptx("mbarrier.arrive.shared.b64", address)
                return
            p.emit_call(T.cuda.warp_sync())
            with p.if_(thread % 32 == 0):
                p.emit_ptx("mbarrier.arrive.shared.b64", address, T.uint32(32))

        with p.if_(thread == 0):
            init_mbarriers(*((barrier(stage, number), 32) for stage in range(stages) for number in range(2)))
        p.emit_call(T.cuda.cta_sync())
        with p.serial_loop(steps, "step") as step:
            slot = step % stages
            with p.ir.If(thread < 32):
                with p.ir.Then():
                    await_phase(barrier(slot, 1), step // stages % 2 ^ 1)
                    value = buffers["X"][step * 32 + thread]
                    p.emit_ptx("st.shared.b32", block.address(slot * 128 + thread * 4), value)
                    arrive(barrier(slot, 0))
                with p.ir.Else():
                    await_phase(barrier(slot, 0), step // stages % 2)
                    p.emit_ptx("ld.shared.b32", word[0], block.address(slot * 128 + (63 - thread) * 4))
                    arrive(barrier(slot, 1))
                    p.store(buffers["Y"], step * 32 + thread - 32, word[0])

    return emitted((hash_words(steps * 32),), ((steps * 32,), "uint32"), one_block(1024, 64, emit))


def mbarrier_bytes() -> GoldenKernel:
    """A phase of two copies and two arrivals, of which one expects the bytes; the mbarrier is then made anew."""
    tiles = make_tiled_map("float32", 4, (32, 8), (32,), (32, 1), 0)

    def emit(buffers, block, thread, x_map):
        bar = block.address(1024)
        for phase in range(2):
            with p.if_(thread == 0):
                init_mbarriers((bar, 2))
            p.emit_call(T.cuda.cta_sync())
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.expect_tx.relaxed.cta.shared::cta.b64", bar, T.uint32(128))
                for tile in range(2):
                    p.emit_ptx(LOAD.format(2, ""), block.address(tile * 128), x_map, 0, phase * 3 + tile, bar)
                p.emit_ptx("mbarrier.arrive.shared.b64", bar, T.uint32(1))
            with p.if_(thread == 32):
                p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", bar, T.uint32(128))
            p.emit_call(T.cuda.mbarrier_wait(bar, 0))
            p.store(buffers["Y"], phase * 64 + thread, load_word(block, thread * 4))
            p.emit_call(T.cuda.cta_sync())
            with p.if_(thread == 0):
                p.emit_ptx("mbarrier.inval.shared.b64", bar)

    x = small_integers((256,), "float32", limit=100)
    return emitted((x,), ((128,), "uint32"), one_block(2048, 64, emit, X=tiles))


def named_barriers() -> GoldenKernel:
    """Two warpgroups that take turns: each arrives at the barrier for which the other waits."""

    def emit(buffers, block, thread):
        half = thread // 128
        word = p.allocate("word", 1, "uint32")
        p.store(word, 0, T.uint32(0))
        with p.if_(half == 0):
            p.emit_ptx("st.shared.b32", block.address(thread * 4), buffers["X"][thread])
        with p.if_(half == 1):
            p.emit_ptx("bar.arrive", T.uint32(1), 256)
        with p.serial_loop(3, "step"):
            p.emit_ptx("bar.sync", p.to_uint32(1 + half), 256)
            p.emit_ptx("ld.shared.b32", word[0], block.address((127 - thread % 128) * 4))
            p.emit_ptx("bar.sync", p.to_uint32(3 + half), 128)
            p.emit_ptx("st.shared.b32", block.address(thread % 128 * 4), word[0] + T.uint32(1))
            p.emit_ptx("bar.arrive", p.to_uint32(2 - half), 256)
        p.store(buffers["Y"], thread, word[0])

    return emitted((hash_words(128),), ((256,), "uint32"), one_block(512, 256, emit))


KERNELS |= {
    "mbarrier_helper_each": mbarrier_phases("helper", "each"),
    "mbarrier_helper_count": mbarrier_phases("helper", "count"),
    "mbarrier_try_wait_each": mbarrier_phases("try_wait", "each"),
    "mbarrier_bytes": mbarrier_bytes(),
    "named_barriers": named_barriers(),
}


# --- clusters ---


def cluster_exchange(size: int, direction: str, *, before: bool = True, behind: bool = True) -> GoldenKernel:
    """Blocks that read from, or store to, the shared memory of the next block of their cluster.

    Without a barrier of the cluster `before` or `behind` the access, the kernel is wrong.
    """
    blocks = 2 * size

    def emit(buffers):
        axes = (p.thread_axis(blocks, "blockIdx.x"), p.thread_axis(size, "clusterCtaIdx.x"))
        with axes[0] as block_index, axes[1] as rank, p.thread_axis(32, "threadIdx.x") as thread:
            block, peer, word = Block(256), p.allocate("peer", 1, "uint32"), p.allocate("word", 1, "uint32")
            own, given = block.address(thread * 4), buffers["X"][block_index * 32 + thread]
            p.emit_ptx("st.shared.b32", own, given if direction == "load" else T.uint32(0))
            p.emit_ptx("barrier.cluster.arrive")
            if before:
                p.emit_ptx("barrier.cluster.wait")
            p.emit_ptx("mapa.shared::cluster.u32", peer[0], own, T.Cast("uint32", (rank + 1) % size))
            if direction == "load":
                p.emit_ptx("ld.shared::cluster.b32", word[0], peer[0])
            else:
                p.emit_ptx("st.shared::cluster.b32", peer[0], given)
                if behind:
                    p.emit_call(T.cuda.cluster_sync())
                p.emit_ptx("ld.shared.b32", word[0], own)
            p.store(buffers["Y"], block_index * 32 + thread, word[0])
            if behind:
                p.emit_call(T.cuda.cluster_sync())

    return emitted((hash_words(blocks * 32),), ((blocks * 32,), "uint32"), emit)


def multicast(size: int, mask: int, *, synchronized=True, released=True, end=True, receiving=None) -> GoldenKernel:
    """Blocks that each copy a part of a row to the blocks of a mask, twice, with arrivals at mbarriers of all.

    The kernel is wrong unless the blocks are `synchronized` after the initialization, all stages are `released`, and
    the blocks end together. By default, the blocks of the mask are those that receive the copies.
    """
    steps, part = 2, 32
    words = part * size
    tiles = make_tiled_map("float32", 4, (words, steps * 2), (words,), (part, 1), 0)
    receiving = mask if receiving is None else receiving
    num_receiving = receiving.bit_count()

    def emit(buffers):
        x_map = p.declare_tensor_map("X_map", buffers["X"], tiles)
        axes = (p.thread_axis(2 * size, "blockIdx.x"), p.thread_axis(size, "clusterCtaIdx.x"))
        with axes[0] as block_index, axes[1] as rank, p.thread_axis(64, "threadIdx.x") as thread:
            block, peer = Block(2048), p.allocate("peer", 1, "uint32")
            full, empty = block.address(1024), block.address(1032)
            with p.if_(thread == 0):
                init_mbarriers((full, 1), (empty, num_receiving))
            p.emit_call(T.cuda.cluster_sync() if synchronized else T.cuda.cta_sync())
            is_receiving = T.shift_right(T.int32(receiving), rank) % 2 == 1
            with p.ir.If(thread < 32):
                with p.ir.Then(), p.if_(thread == 0), p.serial_loop(steps, "step") as step:
                    p.emit_call(T.cuda.mbarrier_wait(empty, step % 2 ^ 1))
                    with p.if_(is_receiving):
                        p.emit_ptx("mbarrier.arrive.expect_tx.shared.b64", full, T.uint32(words * 4))
                    place, row = block.address(rank * part * 4), block_index // size * steps + step
                    load = LOAD.format(2, "") + ".multicast::cluster"
                    p.emit_ptx(load, place, x_map, rank * part, row, full, T.uint16(mask))
                with p.ir.Else(), p.if_(is_receiving), p.serial_loop(steps, "step") as step:
                    p.emit_call(T.cuda.mbarrier_wait(full, step % 2))
                    for e in range(size):
                        at = e * 32 + thread - 32
                        p.store(buffers["Y"], (block_index * steps + step) * words + at, load_word(block, at * 4))
                    p.emit_call(T.cuda.warp_sync())
                    with p.if_(thread - 32 < (size if released else 1)):
                        p.emit_ptx("mapa.shared::cluster.u32", peer[0], empty, T.Cast("uint32", thread - 32))
                        p.emit_ptx("mbarrier.arrive.shared::cluster.b64", peer[0])
            if end:
                p.emit_call(T.cuda.cluster_sync())

    x = small_integers((2 * steps * words,), "float32", limit=100)
    return emitted((x,), ((2 * size * steps * words,), "uint32"), emit)


KERNELS |= {
    **{f"cluster_{size}_{way}": cluster_exchange(size, way) for size in (2, 4) for way in ("load", "store")},
    "cluster_2_multicast": multicast(2, 3),
    "cluster_4_multicast": multicast(4, 15),
    "cluster_4_multicast_to_some": multicast(4, 0b1010),
}
