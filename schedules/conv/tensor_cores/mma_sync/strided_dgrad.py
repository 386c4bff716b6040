"""Strided gradients of inputs, and strided transposed convolutions, by mma.sync: all residue classes in one launch.

Which taps reach a pixel of dX depends on its position modulo the stride. The pixels of a residue class are a
convolution of dY of stride 1 with some of the taps (`..gemm.residue_classes`). A CTA computes a tile of pixels of one
class, and its reduction runs over the taps of this class. CTAs of the classes with most taps come first in the grid.
No product has a zero that a stride inserts. A class without taps has one K tile of zeros.

A small launch transposes the weight, as for a stride of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, cast

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv.space import Columns, Knobs
from tvmconv.space.search_space import ResourceUsage
from tvmconv.workloads import Conv
from tvmconv.workloads.conv_gradient import InputGradient

from ....tir_builder import Buffer, Expr, Register, allocate, logical_and, store, unrolled_loop
from ...tile_config import add_rules, declare_choices
from ..gemm.cp_async import CopyThreads, ImageGather, TransposedFilterGather
from ..gemm.cta import allocate_smem, open_cta
from ..gemm.mma_sync_mainloop import MmaSyncMainloop, WarpTiling
from ..gemm.residue_classes import ResidueClasses
from ..gemm.staged_epilogue import StagedEpilogue
from ..gemm.tile_scheduler import KRange, TileScheduler, WorkTile
from ..implicit_gemm_shape import VECTOR_BYTES, ImplicitGemmShape
from ..residue_product import ResidueProduct
from .epilogue_split import compute_smem_bytes
from .kernel import make_epilogue, make_mainloop, make_tiling
from .knobs import compute_product_usage, list_prunings, list_requirements
from .latency import select_default_config
from .tile_config import MMA_N, MmaSyncTileConfig, list_options

# CTAs do not split reductions, and each computes one tile.
FIXED_KNOBS: dict[str, Any] = {"split_k": 1, "split_k_reduction": "workspace", "tiles_per_block": 1}


def is_promising(w: InputGradient) -> bool:
    """Return whether there is one group, or each group fills 16-byte chunks and half an mma."""
    shape = ResidueProduct.from_workload(w).shape
    return shape.groups == 1 or (shape.channels_per_group * shape.itemsize % VECTOR_BYTES == 0 and shape.n >= MMA_N)


def make_mean_shape(product: ResidueProduct) -> ImplicitGemmShape:
    """Return the extents of the products with the mean number of taps of all classes, for estimates."""
    shape, residues = product.shape, product.residues
    return shape._replace(k=max(1, shape.channels_per_group * residues.total_taps // residues.count))


def make_config(columns: Columns) -> MmaSyncTileConfig:
    """Return the config of the knobs' values, or the configs of many."""
    return MmaSyncTileConfig.from_columns({**columns, **FIXED_KNOBS})


def compute_strided_usage(w: InputGradient, columns: Columns) -> ResourceUsage:
    """Return the resources that configs use; the work is the mean of all residue classes."""
    product, config = ResidueProduct.from_workload(w), make_config(columns)
    smem_bytes = compute_smem_bytes(cast("Conv", product), config)
    return compute_product_usage(config, make_mean_shape(product), smem_bytes)


def declare_strided_knobs(w: InputGradient, k: Knobs) -> MmaSyncTileConfig:
    """Declare the knobs, with defaults that suit the workload, and return their values."""
    product = ResidueProduct.from_workload(w)
    shape, default = make_mean_shape(product), select_default_config(cast("Conv", product), splits_reduction=False)
    options = {name: values for name, values in list_options(shape.itemsize).items() if name not in FIXED_KNOBS}
    declare_choices(k, options, default)
    add_rules(k, make_config, list_requirements(shape), list_prunings(shape))
    return make_config(k.values)


def emit_strided_dgrad(w: InputGradient, config: MmaSyncTileConfig, arguments: dict[str, Buffer]) -> None:
    """Emit the kernel; arguments have the names of a forward convolution of dY, and the weight is transposed."""
    product = ResidueProduct.from_workload(w)
    shape, residues, viewed = product.shape, product.residues, cast("Conv", product)
    num_tiles = int(config.num_tiles(shape))
    extents, block = (shape.m, shape.n), (config.block_m, config.block_n)
    tiles = TileScheduler.of_product(extents, block, shape.groups, num_tiles, residues=residues.count)
    with open_cta(num_tiles, int(config.num_threads), 1, splits_in_cluster=False) as position:
        smem = allocate_smem(int(compute_smem_bytes(viewed, config)))
        tiling = make_tiling((viewed.dtype, viewed.dtype), config, position.thread)
        accumulators = allocate("accumulators", tiling.num_accumulators, "float32")
        with tiles.work_tiles(position.index) as tile:
            taps = ClassTaps(residues, tile.residue)
            mainloop = make_residue_mainloop(product, config, tiling, arguments, taps, smem)
            epilogue = make_epilogue(
                *(viewed, config, tiling, arguments, 0, smem),
                has_workspace=False,
                epilogue_type=ResidueStagedEpilogue,
                residues=residues,
            )
            mainloop.locate(tile)
            mainloop.fill()
            epilogue.prefetch_channel_args(tile)
            epilogue.init_accumulators(accumulators, tile)
            mainloop.start()
            mainloop.compute(accumulators)
            epilogue.apply(accumulators, tile)


class ClassTaps:
    """The taps of a residue class in registers, numbered along its axes, those of the last axis fastest."""

    def __init__(self, residues: ResidueClasses, residue: Expr) -> None:
        self.residues, parts = residues, residues.split(residue)
        self.num_along_axis = [
            Register(f"num_taps_{i}", value=axis.num_taps(part)).value
            for i, (axis, part) in enumerate(zip(residues.axes, parts, strict=True))
        ]
        self.first_taps = [
            Register(f"first_tap_{i}", value=axis.first_tap(part)).value
            for i, (axis, part) in enumerate(zip(residues.axes, parts, strict=True))
        ]
        self.first_elements = [
            Register(f"first_element_{i}", value=axis.first_offset(part) + axis.lower_corner).value
            for i, (axis, part) in enumerate(zip(residues.axes, parts, strict=True))
        ]
        self.count = Register("num_taps", value=math.prod(self.num_along_axis)).value

    def split(self, tap: Expr) -> list[Expr]:
        """Return the number of a tap along each axis; a tap that does not exist has any valid one."""
        numbers: list[Expr] = []
        for count in reversed(self.num_along_axis):
            divisor = T.max(count, 1)
            numbers.append(T.truncmod(tap, divisor))
            tap = T.truncdiv(tap, divisor)
        return numbers[::-1]


class ResidueGather(ImageGather):
    """Operand of positions × (tap of the class, filter): the elements of dY under the taps."""

    def __init__(self, w: Conv, taps: ClassTaps, source: Buffer, block_k: int, copy: CopyThreads) -> None:
        super().__init__(view_gradient_as_image(w), source, block_k, None, copy)
        self._taps = taps
        self._k_end = Register("k_end", value=taps.count * self._channels).value

    def locate(self, first_row: Expr, group: Expr) -> None:
        """Compute the elements under the first tap of the rows of a work tile; rows past the end repeat the last."""
        copy, residues = self._copy, self._taps.residues
        with unrolled_loop(copy.passes, "i") as i:
            row = T.min(first_row + copy.row + i * copy.rows_per_pass, residues.rows - 1)
            image, *positions = residues.split_row(row)
            offset = image * self._strides[0] + group * self._channels
            for axis, (coordinates, position) in enumerate(zip(self._coordinates, positions, strict=True)):
                store(coordinates, i, position + self._taps.first_elements[axis])
                offset = offset + coordinates[i] * self._strides[1 + axis]
            store(self._offset, i, offset)

    def _is_valid_k(self, k: Expr) -> Expr:
        return k < self._k_end

    def _has_border(self, axis: int) -> bool:
        return True

    def _steps_of_tap(self, tap: Expr) -> list[Expr]:
        axes = self._taps.residues.axes
        return [-number * axis.offset_step for axis, number in zip(axes, self._taps.split(tap), strict=True)]


class ResidueFilterGather(TransposedFilterGather):
    """The filters of a class from a transposed weight (taps, channels of a group, filters of all groups)."""

    def __init__(
        self, product: ResidueProduct, taps: ClassTaps, source: Buffer, block_k: int, copy: CopyThreads
    ) -> None:
        super().__init__(product.shape, product.storage, source, block_k, None, copy)
        self._taps, self._kernel = taps, product.forward.kernel
        self._k_end = Register("filter_k_end", value=taps.count * self._channels).value

    def _is_valid_k(self, k: Expr) -> Expr:
        return k < self._k_end

    def _k_offset(self, k: Expr) -> Expr:
        tap: Expr = 0
        numbers = self._taps.split(k // self._channels)
        for size, axis, first, number in zip(
            self._kernel, self._taps.residues.axes, self._taps.first_taps, numbers, strict=True
        ):
            along_axis = T.min(first + number * axis.tap_step, size - 1)  # a class may have no taps
            tap = tap * size + along_axis
        return tap * (self._shape.n * self._shape.groups * self._channels) + k % self._channels


@dataclass(frozen=True)
class ResidueStagedEpilogue(StagedEpilogue):
    """The epilogue of a CTA whose rows are pixels of a residue class."""

    residues: ResidueClasses

    def _locate(self, vector_idx: Expr, num_vectors: int, tile: WorkTile) -> tuple[Expr, Expr, Expr, Expr]:
        is_inside, offset, channel, _ = super()._locate(vector_idx, num_vectors, tile)
        row = tile.m + vector_idx // (self.tiling.block_n // self.vector)
        pixel, exists = self.residues.locate_pixel(tile.residue, row)
        return logical_and(is_inside, exists), offset, channel, self._output_index(pixel, channel)


def view_gradient_as_image(w: Conv) -> Conv:
    """Return a convolution of one tap whose image is dY: (images, output positions, filters)."""
    sizes: dict[str, Any] = dict(zip(w.SPACE, w.output_size, strict=True)) | dict.fromkeys(w.KERNEL, 1)
    ones = (1,) * w.spatial_ndim
    return replace(cast("Any", w), C=w.O, stride=ones, padding=(0,) * w.spatial_ndim, dilation=ones, **sizes)


def make_residue_mainloop(
    product: ResidueProduct,
    config: MmaSyncTileConfig,
    tiling: WarpTiling,
    arguments: dict[str, Buffer],
    taps: ClassTaps,
    smem: Expr,
) -> MmaSyncMainloop:
    """Return the mainloop of dY and the filters under the taps of a class."""
    shape, block_k = product.shape, config.block_k
    num_k_tiles = T.max((taps.count * shape.channels_per_group + (block_k - 1)) // block_k, 1)
    count = Register("num_k_tiles", value=num_k_tiles).value
    make_loaders = (
        lambda copy: ResidueGather(product.forward, taps, arguments["X"], block_k, copy),
        lambda copy: ResidueFilterGather(product, taps, arguments["K"], block_k, copy),
    )
    return make_mainloop(config, tiling, make_loaders, KRange(0, count, count), smem)
