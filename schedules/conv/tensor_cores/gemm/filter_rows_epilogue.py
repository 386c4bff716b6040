"""Epilogue of a Hopper kernel with filters as rows and pixels as columns, whose output is channels last.

The accumulators of a thread belong to neighbouring pixels of a filter, while neighbouring filters of a pixel are
contiguous in the output. `stmatrix` transposes the 8 × 8 matrices of a subtile on the way to shared memory, where a row
has 64 filters of one pixel, and TMA stores it as it is. Residuals are read by `ldmatrix` in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from tvmconv import tensor_map as maps
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_itemsize

from ....tir_builder import Buffer, Expr, allocate, if_, store
from .atoms import ThreadPosition, ldmatrix_x4, stmatrix_x4, sync_warp
from .epilogue_ops import EpilogueOps, apply_to_columns
from .epilogue_tile import EpilogueTile
from .pipelines import TmaPipeline
from .smem_layout import SmemLayout
from .tile_scheduler import WorkTile
from .tma_epilogue import TmaEpilogue

ROWS_PER_THREAD = 2  # rows of an instruction of which a thread has accumulators


@dataclass(frozen=True)
class FilterRowsEpilogueTile(EpilogueTile):
    """Division of a warpgroup's accumulators into subtiles of 64 filters × some pixels."""

    @property
    def layout(self) -> SmemLayout:
        """Layout of a subtile in shared memory, whose rows are pixels."""
        return SmemLayout(self.n, self.atom.m * get_itemsize(self.dtype))

    def coordinates(self, tile: WorkTile, column: Expr, row: Expr) -> tuple[Expr, ...]:
        """Return the coordinates of a subtile of a work tile along the axes of the tensor map."""
        return row, column, tile.group

    def tensor_map(self, m: int, n: int, groups: int) -> maps.TensorMap:
        """Return the tensor map of the output, or of a residual: filters, pixels, groups."""
        itemsize = get_itemsize(self.dtype)
        extents, strides, box = (m, n, groups), (m * groups, m), (self.atom.m, self.n, 1)
        return maps.make_tiled_map(self.dtype, itemsize, extents, strides, box, self.layout.row_bytes)


class FilterArguments:
    """The per-channel arguments of a thread's rows, which are in registers from before the mainloop on.

    Args:
        names: Names of the arguments.
        arguments: Argument buffers by name.
        tile: Division into subtiles.
        num_filters: Number of filters, beyond which no row is valid.
        is_exact: Whether work tiles have no rows beyond the filters.
        warpgroup: Index of this warpgroup among those that share a work tile.
    """

    def __init__(
        self,
        names: Sequence[str],
        arguments: Mapping[str, Buffer],
        tile: EpilogueTile,
        num_filters: int,
        is_exact: bool,
        warpgroup: Expr,
    ) -> None:
        self._arguments, self._tile, self._warpgroup = arguments, tile, warpgroup
        self._num_filters, self._is_exact = num_filters, is_exact
        count = tile.m_atoms * ROWS_PER_THREAD
        self._values = {name: allocate(f"{name}_values", count, "float32") for name in names}

    def prefetch(self, tile: WorkTile, thread: ThreadPosition) -> None:
        """Load the arguments of a work tile."""
        for name, values in self._values.items():
            for m_atom in range(self._tile.m_atoms):
                for half in range(ROWS_PER_THREAD):
                    index = m_atom * ROWS_PER_THREAD + half
                    warp_row = thread.warpgroup_thread // WARP_SIZE * 16 + half * 8 + thread.lane // 4
                    row = self._tile.row(tile, self._warpgroup, m_atom) + warp_row
                    if not self._is_exact:
                        store(values, index, T.float32(0))
                    with if_(True if self._is_exact else row < self._num_filters):
                        store(values, index, self._arguments[name][row])

    def wait(self, thread: ThreadPosition) -> None:
        """Do nothing, as the arguments are in registers."""

    def load(self, m_atom: int, half: int) -> dict[str, list[Expr]]:
        """Return the arguments of a row, once for each of two neighbouring columns."""
        index = m_atom * ROWS_PER_THREAD + half
        return {name: [values[index], values[index]] for name, values in self._values.items()}


class FilterRowsEpilogue(TmaEpilogue):
    """Applies the epilogue to a warpgroup's accumulators and stores them by TMA, transposed.

    Args:
        tile: Division into subtiles.
        ops: The epilogue, with one residual at most.
        channels: Per-channel arguments.
        pipeline: Stages of all warpgroups. Its barriers are used only with a residual.
        tensor_maps: Tensor maps of the output and, if there is one, of the residual.
    """

    channels: FilterArguments  # type: ignore[assignment]

    def __init__(
        self,
        tile: FilterRowsEpilogueTile,
        ops: EpilogueOps,
        channels: FilterArguments,
        pipeline: TmaPipeline,
        tensor_maps: Sequence[Expr],
    ) -> None:
        super().__init__(tile, ops, channels, pipeline, tensor_maps)  # type: ignore[arg-type]

    def _copy_to_smem(
        self, accumulators: Sequence[Expr], m_atom: int, n_idx: int, buffer: Expr, thread: ThreadPosition
    ) -> None:
        """Apply the epilogue to a subtile and copy the results to shared memory, transposed."""
        values, _ = self._tile.select_fragment(accumulators, m_atom, n_idx, thread)
        addresses = [self._matrix_address(columns, buffer, thread) for columns in range(self._tile.n // 16)]
        if self._residual is not None:
            for columns, address in enumerate(addresses):
                ldmatrix_x4([self._residual[columns * 4 + e] for e in range(4)], address, transposed=True)
            sync_warp()
        for columns, address in enumerate(addresses):
            for pair in range(4):
                first, residuals = columns * 8 + pair * 2, {}
                if self._residual is not None:
                    residuals = {name: [self._residual[columns * 4 + pair]] for name in self._ops.residuals}
                arguments, sums = self.channels.load(m_atom, pair % ROWS_PER_THREAD), values[first : first + 2]
                apply_to_columns(self._ops, sums, arguments, residuals, self._values, self._packed, pair)
            stmatrix_x4(address, [self._packed[e] for e in range(4)], transposed=True)

    def _matrix_address(self, columns: int, buffer: Expr, thread: ThreadPosition) -> Expr:
        """Return the address that a lane passes for 16 filters × 16 pixels of its warp, in four 8 × 8 matrices.

        In the order of the accumulators, the matrices of a pair have the same pixels, and the second one the filters
        behind.
        """
        pixel = columns * 16 + thread.lane // 16 * 8 + thread.lane % 8
        chunk = thread.warpgroup_thread // WARP_SIZE * 2 + thread.lane // 8 % 2
        return buffer + self._tile.layout.swizzled_offset(pixel, chunk)
