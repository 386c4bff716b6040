"""Second kernel of `mma_sync`, which adds up the partial sums of a split reduction."""

from __future__ import annotations

import math

from tvmconv.arithmetic import ceil_div
from tvmconv.workloads import Conv

from ....tir_builder import (
    Buffer,
    allocate,
    fill_zeros,
    if_,
    load_global,
    store,
    store_global,
    thread_axis,
    unpack,
    unrolled_loop,
)
from ..gemm.epilogue_ops import EpilogueOps, apply_to_vector
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape

REDUCTION_THREADS = 256  # threads per block


def emit_split_k_reduction(w: Conv, num_parts: int, arguments: dict[str, Buffer], workspace: Buffer) -> None:
    """Emit the kernel that adds up partial sums in the workspace and applies the epilogue.

    Args:
        w: The workload.
        num_parts: Number of partial sums per output.
        arguments: Argument buffers by name.
        workspace: The partial sums (parts, pixels, channels) in float32.
    """
    gemm = ImplicitGemmShape.from_workload(w)
    vector_elements = math.gcd(w.O, VECTOR_BYTES // gemm.itemsize)
    num_pixels, vectors_per_pixel = gemm.m, w.O // vector_elements
    totals, registers = allocate("total", 8, "float32"), allocate("read", 8, "uint32")
    with (
        thread_axis(ceil_div(num_pixels * vectors_per_pixel, REDUCTION_THREADS), "blockIdx.x") as block_idx,
        thread_axis(REDUCTION_THREADS, "threadIdx.x") as thread_idx,
    ):
        index = block_idx * REDUCTION_THREADS + thread_idx
        pixel, output_channel = index // vectors_per_pixel, index % vectors_per_pixel * vector_elements
        with if_(
            True if num_pixels * vectors_per_pixel % REDUCTION_THREADS == 0 else index < num_pixels * vectors_per_pixel
        ):
            fill_zeros(totals, vector_elements)
            with unrolled_loop(num_parts, "g") as part_idx:
                load_global(
                    registers, workspace, (part_idx * num_pixels + pixel) * w.O + output_channel, vector_elements
                )
                for e, partial_value in enumerate(unpack(registers, vector_elements, "float32")):
                    store(totals, e, totals[e] + partial_value)
            ops, output_index = EpilogueOps.from_workload(w), pixel * w.O + output_channel
            apply_to_vector(ops, arguments, output_channel, output_index, vector_elements, totals, registers)
            store_global(arguments["Y"], output_index, registers, vector_elements)
