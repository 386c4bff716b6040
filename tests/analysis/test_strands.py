"""Parts of a block that wait for each other are executed in turns, and a wait that never ends is found."""

import emulate
import numpy as np
import pytest
from golden_parts import Block, lower_arrays
from tvm.script import tirx as T  # noqa: N812

from tvmconv.builtin import tir_builder as p
from tvmconv.emulator.errors import DeadlockError, ExecutionError, RaceError
from tvmconv.emulator.synchronization import fibers

WORDS = 128


def run(kernel, x=None):
    """What a kernel makes of as many words as it has threads."""
    return emulate.run(kernel, [np.arange(WORDS, dtype=np.float32) if x is None else x])


def threads(body, grid=1):
    """A kernel of 128 threads, whose body is given X, Y, the thread and the address of shared memory."""

    def whole(buffers):
        with p.thread_axis(grid, "blockIdx.x"), p.thread_axis(WORDS, "threadIdx.x") as thread:
            body(buffers["X"], buffers["Y"], thread, Block(2048))

    return lower_arrays({"X": ((WORDS,), "float32"), "Y": ((WORDS,), "float32")}, whole)


def exchange(x, y, thread, block, meet, partner):
    """Each thread stores a word, and after they have met loads that of another."""
    word = p.allocate("word", 1, "float32")
    p.emit_ptx("st.shared.b32", block.address(thread * 4), x[thread])
    meet()
    p.emit_ptx("ld.shared.b32", word[0], block.address(partner * 4))
    p.store(y, thread, word[0])


@pytest.mark.parametrize("number", [lambda half: half + 1, lambda half: 1 - half + 1])
def test_parts_of_a_block_meet_at_barriers_of_their_own(number):
    def body(x, y, thread, block):
        def meet():
            p.emit_ptx("bar.sync", p.to_uint32(number(thread // 64)), 64)

        exchange(x, y, thread, block, meet, thread // 64 * 64 + 63 - thread % 64)

    np.testing.assert_array_equal(run(threads(body)), np.arange(WORDS).reshape(2, 64)[:, ::-1].reshape(-1))


def test_a_part_of_a_block_that_meets_does_not_order_the_other():
    def body(x, y, thread, block):
        def meet():
            p.emit_ptx("bar.sync", p.to_uint32(thread // 64 + 1), 64)

        exchange(x, y, thread, block, meet, WORDS - 1 - thread)

    with pytest.raises(RaceError, match="has written with no barrier between"):
        run(threads(body))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (WORDS, r"deadlock: threads 0 to \d+ of block \(0, 0, 0\) at the barrier 1 of 128 .* \(64 of 128\)"),
        (32, "at the barrier 1 of 32 threads: it expects 32 threads, and 64 have arrived"),
    ],
)
def test_a_barrier_of_another_number_of_threads_is_found(count, message):
    def body(x, y, thread, block):
        with p.if_(thread < 64):
            p.emit_ptx("bar.sync", p.to_uint32(1), count)
        p.store(y, thread, x[thread])

    with pytest.raises(ExecutionError, match=message):
        run(threads(body))


def in_turns(first):
    """A kernel whose two halves do their work one after the other, three times: a half waits until it is its turn."""

    def body(x, y, thread, block):
        word, half = p.allocate("word", 1, "float32"), thread // 64
        with p.if_(half == 0):
            p.emit_ptx("st.shared.b32", block.address(thread * 4), x[thread])
        if first:
            with p.if_(half == 1):
                p.emit_ptx("bar.arrive", p.to_uint32(1), WORDS)  # the other half may begin
        with p.serial_loop(3, "step"):
            p.emit_ptx("bar.sync", p.to_uint32(1 + half), WORDS)
            p.emit_ptx("ld.shared.b32", word[0], block.address(thread % 64 * 4))
            p.emit_ptx("st.shared.b32", block.address(thread % 64 * 4), word[0] + T.float32(1))
            p.emit_ptx("bar.arrive", p.to_uint32(2 - half), WORDS)
        p.store(y, thread, word[0])

    return threads(body)


def test_parts_that_cannot_be_in_lock_step_run_apart():
    np.testing.assert_array_equal(run(in_turns(True)), np.concatenate([np.arange(64) + 4, np.arange(64) + 5]))


def test_parts_that_wait_for_each_other_for_ever_are_found():
    with pytest.raises(DeadlockError, match=r"at the barrier 1 .*; .* at the barrier 2 "):
        run(in_turns(False))


def test_a_loop_that_does_not_end_is_found(monkeypatch):
    monkeypatch.setattr(fibers, "MAX_IDLE_ROUNDS", 100)

    def body(x, y, thread, block):
        flag = p.allocate("flag", 1, "int32")
        p.store(flag, 0, 0)
        with p.ir.While(flag[0] == 0):
            p.store(y, thread, x[thread])

    with pytest.raises(DeadlockError, match="a while loop does not end"):
        run(threads(body))
