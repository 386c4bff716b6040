"""TMA, mbarriers and wgmma are executed as the PTX ISA has them, and what kernels must not do with them is found."""

import bulk
import emulate
import golden_barriers
import golden_matrices
import numpy as np
import pytest

from tvmconv.emulator.errors import ExecutionError, RaceError
from tvmconv.emulator.instructions import dispatch
from tvmconv.workloads.dtypes import get_numpy_dtype


def random(shape, dtype="float16"):
    return np.random.default_rng(0).standard_normal(shape).astype(get_numpy_dtype(dtype))


def product(x, k, **options):
    return emulate.run(bulk.product(**options), [x, k]).reshape(len(x), len(k))


def products(x, k):
    return x.astype(np.float64) @ k.astype(np.float64).T


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


def test_contiguous_bytes_are_copied():
    x = random((256,), "float32")
    np.testing.assert_array_equal(emulate.run(bulk.copied(first=12), [x])[:128], x[12:140])


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(expect=16), r"deadlock: .* at the mbarrier .* lacks 16 bytes"),
        (dict(waits=False), "to which an asynchronous copy is pending"),
        (dict(first=2), "misaligned: .* global memory"),
        (dict(nbytes=200), "misaligned: .* bytes"),
        (dict(first=192), "out of bounds"),
    ],
)
def test_what_a_copy_of_bytes_lacks_is_found(faults, message):
    with pytest.raises(ExecutionError, match=message):
        emulate.run(bulk.copied(**faults), [random((256,), "float32")])


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


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (dict(synchronized=False), "no barrier after its mbarrier.init|not initialized"),
        (dict(mask=1, receiving=3), "deadlock: .*lacks .* bytes"),
        (dict(mask=7, receiving=3), "rank 2 exceeds the cluster of 2 blocks"),
        (dict(released=False), "deadlock: .*thread 0 of block .* lacks [12] of 2 arrivals"),
        (dict(end=False), r"block \(.* may exit"),
    ],
)
def test_what_a_cluster_lacks_is_found(faults, message):
    kernel = golden_barriers.multicast(2, **({"mask": 3} | faults))
    with pytest.raises(ExecutionError, match=message):
        emulate.run(kernel.lower(), kernel.inputs)


def test_wgmma_needs_a_fence_behind_stores_of_threads():
    kernel = golden_matrices.wgmma("f16", 24, 32, fence=False)
    with pytest.raises(RaceError, match=r"no fence.proxy.async after it"):
        emulate.run(kernel.lower(), kernel.inputs)


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
