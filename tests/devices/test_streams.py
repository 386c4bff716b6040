"""Many launches on two streams at once: kernels with clusters, partial sums and barriers return the same bits."""

import pytest

import tvmconv as tc
from tvmconv.errors import ScheduleError

MMA_SYNC_CONFIG = {"block_m": 32, "block_n": 32, "block_k": 64, "warps_m": 2, "warps_n": 2, "warps_k": 1, "split_k": 2}
# Each with a config that shares state between CTAs: workspaces, clusters, persistent CTAs, barriers in shared memory.
KERNELS = [
    ("conv2d:1x256x14x14,256x256x3x3,s1,p1,f16,nhwc", "hopper", {"split_k": 4}),
    ("conv2d:1x256x14x14,256x256x3x3,s1,p1,f16,nhwc", "hopper", {"split_k": 1, "cluster_m": 2}),
    ("conv2d:32x64x56x56,64x64x3x3,s1,p1,f16,nhwc,bias,relu", "hopper", {"kernel_schedule": "pingpong"}),
    ("conv2d:1x128x14x14,128x128x3x3,s1,p1,f16,nhwc", "mma_sync", MMA_SYNC_CONFIG),
    ("conv2d_wgrad:4x64x14x14,64x64x3x3,s1,p1,f16,nhwc", "hopper", {}),
    ("conv2d_wgrad:4x32x14x14,32x1x3x3,s1,p1,g32,f16,nhwc", "depthwise_nhwc", {"threads_pixels": 4, "parts": 4}),
]
NUM_LAUNCHES = 5000  # of each kernel on each of two streams


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "schedule", "knobs"), KERNELS)
def test_launches_on_two_streams_return_the_same_bits(text, schedule, knobs, gpu):
    torch = pytest.importorskip("torch")
    w = tc.parse(text)
    try:
        kernel = tc.build(w, schedule, device=gpu, config=knobs)
    except ScheduleError as error:
        pytest.skip(str(error))
    inputs = [torch.from_numpy(x).to(gpu.text) for x in w.inputs(seed=0)]
    expected = kernel(*inputs)
    assert kernel.verify().ok
    streams = [torch.cuda.Stream(gpu.index) for _ in range(2)]
    num_different = torch.zeros(2, dtype=torch.int64, device=gpu.text)
    torch.cuda.synchronize(gpu.index)
    for _ in range(NUM_LAUNCHES):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                num_different[i] += (kernel(*inputs) != expected).any()
    torch.cuda.synchronize(gpu.index)
    assert num_different.tolist() == [0, 0]
