"""Verification by a sample: right kernels pass with real rounding, wrong tiles, borders and channels are seen."""

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.errors import WorkloadError
from tvmconv.verification import is_sampled
from tvmconv.workloads import dtypes, epilogue, layout

IMAGES = "conv2d:1x16x64x72,24x16x3x3,s1,p1"
WORKLOADS = {
    "images": IMAGES,
    "channels last": f"{IMAGES},nhwc",
    "float16": f"{IMAGES},f16,nhwc",
    "bfloat16": f"{IMAGES},bf16",
    "tf32": f"{IMAGES},tf32",
    "signals": "conv1d:2x16x2050,20x16x9,s1,p4",
    "volumes": "conv3d:1x8x10x24x36,12x8x3x3x3,s1,p1,f16",
    "groups": "conv2d:2x16x40x70,24x4x3x3,s1,p1,g4",
    "depthwise": "conv2d:1x24x64x70,24x1x5x5,s1,p2,g24,nhwc",
    "stride": "conv2d:2x8x77x131,24x8x3x3,s2,p1",
    "dilation": "conv2d:1x8x50x66,24x8x3x3,s1,p2,d2,bf16,nhwc",
    "residual": f"{IMAGES},bf16,nhwc,bias,add,relu",
    "gelu": f"{IMAGES},bias,gelu",
    "sigmoid": f"{IMAGES},f16,sigmoid",
    "clamp": f"{IMAGES},bf16,clamp",
}


def problem_of(text):
    return tc.Problem(tc.parse(text), 3, mode="sample", cell=64)


def right_output(problem):
    """What a right kernel stores: float32 sums of float32 products, added tap by tap, an epilogue in float32."""
    w = problem.workload
    x, k, *others = problem.inputs
    x, k = (layout.move_channels_second(w.input_layout, array.astype(np.float32)) for array in (x, k))
    x = np.pad(x, [(0, 0), (0, 0), *zip(w.pad_low, w.pad_high, strict=True)])
    x = x.reshape(w.N, w.groups, -1, *x.shape[2:])
    k = k.reshape(w.groups, w.O // w.groups, *k.shape[1:])
    sums = np.zeros((w.N, w.groups, w.O // w.groups, *w.output_size), np.float32)
    for tap in np.ndindex(*w.kernel):
        starts = [t * d for t, d in zip(tap, w.dilation, strict=True)]
        part = x[
            (..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, w.output_size, w.stride, strict=True)))
        ]
        sums += np.einsum("ngc...,goc->ngo...", part, k[(..., *tap)])
    sums = sums.reshape(w.N, w.O, *w.output_size)
    read = {}
    for operation, array in zip(w.argument_ops, others, strict=True):
        array = array.astype(np.float32)
        channel = operation.argument_kind == "channel"
        shape = (-1, *(1,) * w.spatial_ndim)
        read[operation.name] = array.reshape(shape) if channel else layout.move_channels_second(w.output_layout, array)
    y = epilogue.apply_to_array(w.epilogue, sums, read).astype(np.float32)
    return layout.to_storage_layout(w.output_layout, y).astype(dtypes.get_numpy_dtype(w.storage))


@pytest.fixture(scope="module", params=WORKLOADS.values(), ids=WORKLOADS)
def verified(request):
    """A problem and what a right kernel stores of it."""
    problem = problem_of(request.param)
    return problem, right_output(problem)


def test_a_right_kernel_passes_a_sample(verified):
    problem, output = verified
    found = problem.check(output)
    assert found.ok
    assert found.worst < 0.5
    assert 0 < found.sampled < output.size


def wrong_tile(pixels):
    """64 consecutive pixels of four channels are those of other channels."""
    pixels[:, 8:12, 1024:1088] = pixels[:, 0:4, 1024:1088]


def wrong_border(pixels, out):
    """The last index along the last axis, of one image."""
    columns = pixels[-1].reshape(pixels.shape[1], *out)
    columns[..., -1] = columns[..., -2].copy()


def wrong_first_border(pixels, out):
    """The first index along the first axis of space, of one image."""
    lines = pixels[0].reshape(pixels.shape[1], *out)
    lines[:, 0] = lines[:, 1].copy()


def wrong_channel(pixels):
    """The last channel is the one before it."""
    pixels[:, -1] = pixels[:, -2]


def swapped_channels(pixels):
    """Two channels of a tile in each other's place."""
    pixels[:, [0, 1], 512:1024] = pixels[:, [1, 0], 512:1024]


def wrong_remainder(pixels):
    """The last pixels, behind the last whole tile of 16, are those of the tile before."""
    rest = pixels.shape[2] % 16 or 16
    pixels[:, :, -rest:] = pixels[:, :, -2 * rest : -rest]


FAULTS = [wrong_tile, wrong_border, wrong_first_border, wrong_channel, swapped_channels, wrong_remainder]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_seen_in_a_sample(verified, fault):
    problem, output = verified
    w = problem.workload
    pixels = np.array(layout.move_channels_second(w.output_layout, output)).reshape(w.N, w.O, -1)
    fault(pixels, w.output_size) if "border" in fault.__name__ else fault(pixels)
    spoilt = layout.to_storage_layout(w.output_layout, pixels.reshape(w.N, w.O, *w.output_size))
    found = problem.check(np.ascontiguousarray(spoilt))
    assert not found.ok
    assert found.fault


@pytest.mark.parametrize("position", [0, 12345, -1])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_one_element_that_is_not_finite_is_seen_anywhere(verified, position, number):
    problem, output = verified
    spoilt = output.copy()
    spoilt.reshape(-1)[position] = number
    assert not np.isfinite(problem.check(spoilt).error)


@pytest.mark.parametrize("rows", [(0, 8), (32, 40), (56, 64)])
@pytest.mark.parametrize("columns", [(0, 8), (40, 48), (64, 72)])
def test_a_wrong_tile_is_seen_at_any_place(rows, columns):
    problem = problem_of(IMAGES)
    output = right_output(problem)
    output[0, 3, slice(*rows), slice(*columns)] *= 1.01
    assert not problem.check(output).ok


def test_a_few_wrong_outputs_of_many_are_seen_in_bfloat16():
    problem = tc.Problem(tc.parse("conv2d:1x3x1024x1024,2x3x1x1,s1,p0,bf16"), 1)
    output = problem.expected_output.full_output.astype(dtypes.get_numpy_dtype("bfloat16"))
    assert problem.check(output).ok
    output[0, 0, 512:520, 512:520] = output[0, 1, 512:520, 512:520]
    found = problem.check(output)
    assert found.sampled is None
    assert found.error < found.tolerance
    assert not found.ok


def test_problems_above_20_gflop_are_sampled():
    small, large, filter_ = map(
        tc.parse, ("conv2d:1x64x56x56,64x64x3x3", "conv2d:32x256x56x56,256x256x3x3,p1", "filter2d:4096x4096x3,5x5")
    )
    assert [is_sampled(w) for w in (small, large, filter_)] == [False, True, False]
    assert [is_sampled(w, "sample") for w in (small, large, filter_)] == [True, True, False]
    assert tc.Problem(small, mode="sample").num_sampled_outputs >= 4096
    assert not is_sampled(tc.parse("conv2d:1x64x14x14,64x64x3x3"), "sample")  # of whose outputs 4,096 are no sample
    assert not is_sampled(large, "full")
    with pytest.raises(WorkloadError, match="verification 'half': expected one of auto, sample, full"):
        tc.Problem(small, mode="half")


def test_a_sample_needs_less_memory_than_the_whole(monkeypatch):
    w = tc.parse("conv2d:1x64x1024x1024,64x64x3x3,s1,p1")
    sampled, full = tc.Problem(w), tc.Problem(w, mode="full")
    assert sampled.nbytes < 0.6 * full.nbytes
    monkeypatch.setattr("os.sysconf", lambda name: 40_000)  # a machine of 1.6 GB
    tc.Problem(w)
    with pytest.raises(WorkloadError, match=r"this machine has 1\.6 GB"):
        tc.Problem(w, mode="full")


def test_a_kernel_is_verified_on_a_sample_or_in_full(opencl):
    w = tc.parse("conv2d:1x4x64x64,8x4x3x3,p1")
    kernel = tc.build(w, "tiling", device=opencl)
    sampled, full = kernel.verify(tc.Problem(w, mode="sample")), kernel.verify(full=True)
    assert sampled.ok
    assert sampled.sampled >= 4096
    assert full.ok
    assert full.sampled is None
