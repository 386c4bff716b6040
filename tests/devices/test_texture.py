"""An image behind a texture is read as it is inside and as zero outside, whatever its rows are long."""

import math

import numpy as np
import pytest
from placed import lower_shift

import tvmconv as tc

pytestmark = pytest.mark.gpu

MISALIGNED = [(1, 1, 1), (1, 7, 3), (5, 7, 1), (5, 7, 3), (3, 33, 1), (2, 8, 3), (33, 1, 1)]
ALIGNED = [(1, 8, 1), (5, 8, 1), (4, 32, 3), (3, 128, 1)]
WAYS = [(0, 0), (1, 2), (-1, -2), (100, 0), (0, 100)]


def shifted(x, down, right):
    """The image moved, with zeros where nothing is."""
    rows = x.reshape(len(x), -1)
    y = np.zeros_like(rows)
    for i, j in np.ndindex(rows.shape):
        if 0 <= i - down < rows.shape[0] and 0 <= j - right < rows.shape[1]:
            y[i, j] = rows[i - down, j - right]
    return y.reshape(x.shape)


def image(shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("shape", [*MISALIGNED, *ALIGNED])
@pytest.mark.parametrize(("down", "right"), WAYS)
def test_fetches_are_the_image_inside_and_zero_outside(gpu, shape, down, right):
    x = image(shape)
    y = gpu.load(lower_shift(gpu, shape, down, right).executable).run([x])
    np.testing.assert_array_equal(y, shifted(x, down, right))


@pytest.mark.parametrize("shape", [(5, 8, 1), (5, 7, 3)])
def test_an_array_may_begin_where_no_texture_can(gpu, shape):
    torch = pytest.importorskip("torch")
    x = image(shape)
    buffer = torch.zeros(x.size + 16, device=f"cuda:{gpu.index}")
    inside = buffer[16:].reshape(shape)  # 64 bytes behind an allocation's begin: the least alignment of DLPack
    inside.copy_(torch.from_numpy(x))
    y = gpu.load(lower_shift(gpu, shape, 1, 1).executable).call_dlpack([inside])
    np.testing.assert_array_equal(y.cpu().numpy(), shifted(x, 1, 1))


@pytest.mark.parametrize("shape", [(5, 8, 1), (5, 7, 3)])
def test_launches_through_a_texture_are_benched_and_timed(gpu, shape):
    x = image(shape)
    loaded = gpu.load(lower_shift(gpu, shape, 1, 1).executable)
    bench = gpu.create_benchmark([x], shifted(x, 1, 1).astype(np.float64))
    assert bench.compare(loaded).relative_error == 0
    assert min(bench.time(loaded, math.inf)) > 0
    bench.close()
    assert 0 < loaded.time([x], cold=True, seconds=0.02).median < 1e-3


@pytest.mark.parametrize("shape", [(2, 200_000, 1), (100_000, 8, 1)])
def test_an_image_past_the_limits_of_a_texture_is_refused(gpu, shape):
    loaded = gpu.load(lower_shift(gpu, shape, 1, 1).executable)
    with pytest.raises(tc.DeviceError, match=r"a texture is at most \d+ × \d+ elements wide and high, not"):
        loaded.run([image(shape)])
