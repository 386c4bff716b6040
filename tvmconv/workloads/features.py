"""Properties of workloads that a schedule supports only if it is registered with them."""

from __future__ import annotations

LARGE_TENSORS = "large_tensors"  # a tensor has more than 2^31 - 1 elements, and offsets of 64 bits
CACHED_FRAMES = "cached_frames"  # the first frames of the input are in a tensor of their own
UPSAMPLING = "upsampling"  # windows read an upsampled input, which is not in memory

DESCRIPTIONS = {
    LARGE_TENSORS: "tensors of more than 2^31 - 1 elements",
    CACHED_FRAMES: "cached frames (option c)",
    UPSAMPLING: "an upsampled input (option up)",
}
INPUT_FEATURES = (CACHED_FRAMES, UPSAMPLING)  # those of a schedule that follows the declaration of the input
ALL_FEATURES = (LARGE_TENSORS, *INPUT_FEATURES)
