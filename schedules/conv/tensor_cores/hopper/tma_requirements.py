"""What `hopper` asks of a workload: what TMA can copy and store, and which taps can share a copy."""

from __future__ import annotations

from tvmconv import tensor_map as maps
from tvmconv.gpu_specs import WARP_SIZE
from tvmconv.workloads import Conv, epilogue
from tvmconv.workloads.layout import CHANNELS_LAST

from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape

WARPGROUP_THREADS = 4 * WARP_SIZE  # threads that a wgmma is of
WGMMA_M = 64  # pixels of a wgmma
WGMMA_K_BYTES = 32  # of the reduction, of a wgmma


def can_load_by_tma(w: Conv) -> bool:
    """Whether TMA can copy the operands: rows of whole chunks, filters that its corners and offsets have room for."""
    gemm = ImplicitGemmShape.from_workload(w)
    tensor_ndim = w.spatial_ndim + 2
    max_corner, max_offset = maps.CORNER_LIMITS[tensor_ndim], maps.OFFSET_LIMITS[tensor_ndim]
    last_pixel_coords = [
        (o - 1) * s - pad - (n - 1)
        for o, s, pad, n in zip(w.output_size, w.stride, w.pad_low, w.input_size, strict=True)
    ]
    return (
        w.layout == CHANNELS_LAST
        and gemm.channels_per_group * gemm.itemsize % VECTOR_BYTES == 0
        and (gemm.groups == 1 or gemm.channels_per_group * gemm.itemsize % WGMMA_K_BYTES == 0)
        and max(w.stride) <= maps.MAX_ELEMENT_STRIDE
        and max(dilation * (r - 1) for dilation, r in zip(w.dilation, w.kernel, strict=True)) < max_offset
        and max(w.pad_low) <= max_corner
        and all(-max_corner <= last_pixel_coord < max_corner for last_pixel_coord in last_pixel_coords)
    )


def is_promising(w: Conv) -> bool:
    """Whether the channels of a group fill wgmmas to some extent."""
    gemm = ImplicitGemmShape.from_workload(w)
    return can_load_by_tma(w) and gemm.channels_per_group * gemm.itemsize >= WGMMA_K_BYTES and gemm.n >= 16


def can_share_taps(w: Conv) -> bool:
    """Whether the taps of a line read neighbouring pixels, and the pixels of a wgmma lie in one line of the output."""
    has_aligned_rows = w.output_size[-1] % WGMMA_M == 0 and w.stride[-1] == 1
    return has_aligned_rows and w.kernel[-1] > 1 and WGMMA_M + compute_halo_width(w) <= maps.MAX_BOX_ELEMENTS


def list_taps_per_copy(w: Conv) -> tuple[int, ...]:
    """How many taps of a line may share a copy of the pixels."""
    return (1, w.kernel[-1]) if can_share_taps(w) else (1,)


def compute_halo_width(w: Conv) -> int:
    """Pixels by which the last tap of a filter's line is further on than the first."""
    return w.dilation[-1] * (w.kernel[-1] - 1)


def can_store_by_tma(w: Conv) -> bool:
    """Whether the output's rows are whole chunks, for each group, and at most one tensor like it is read."""
    gemm = ImplicitGemmShape.from_workload(w)
    residual_ops = [operation for operation in epilogue.get_ops(w.epilogue) if operation.argument_kind == "output"]
    return gemm.n * gemm.itemsize % VECTOR_BYTES == 0 and len(residual_ops) <= 1


def find_residual(w: Conv) -> str | None:
    """The operation that reads a tensor like the output; None if none does, or several do."""
    residual_names = [
        operation.name for operation in epilogue.get_ops(w.epilogue) if operation.argument_kind == "output"
    ]
    return residual_names[0] if len(residual_names) == 1 else None
