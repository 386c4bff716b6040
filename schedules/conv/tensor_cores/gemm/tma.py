"""TMA copies between global and shared memory. Source: PTX ISA, "cp.async.bulk.tensor" and "Tensors"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T  # noqa: N812  (TVM's own name for it)

from ....tir_builder import Expr, emit_call, emit_ptx

# Source: CUTLASS, `include/cute/arch/copy_sm90_desc.hpp`, `TMA::CacheHintSm90::EVICT_FIRST`.
EVICT_FIRST_POLICY = 0x12F0000000000000


def prefetch_tensor_maps(tensor_maps: Sequence[Expr]) -> None:
    """Prefetch tensor maps, which the first copies would wait for."""
    for tensor_map in tensor_maps:
        emit_ptx("prefetch.tensormap", tensor_map)


def tma_load(
    destination: Expr,
    tensor_map: Expr,
    coordinates: Sequence[Expr],
    full_barrier: Expr,
    im2col_offsets: Sequence[Expr] = (),
    multicast_mask: Expr = None,
    *,
    evicts_first: bool = False,
) -> None:
    """Copy a box to shared memory, and complete its bytes at a barrier.

    Args:
        destination: Shared-memory address.
        tensor_map: Tensor map of the array, in im2col mode if `im2col_offsets` are given.
        coordinates: First element of the box, the innermost axis first.
        full_barrier: Address of the barrier.
        im2col_offsets: Offsets of the filter tap along the spatial axes.
        multicast_mask: CTAs of the cluster that receive the box; None for this CTA only.
        evicts_first: Whether the lines that it reads leave L2 before others.
    """
    mode = ".im2col" if im2col_offsets else ""
    multicast = ".multicast::cluster" if multicast_mask is not None else ""
    hint, policy = (".L2::cache_hint", (T.uint64(EVICT_FIRST_POLICY),)) if evicts_first else ("", ())
    space = f"{len(coordinates)}d.shared::cluster.global{mode}.mbarrier::complete_tx::bytes{multicast}{hint}"
    mask = () if multicast_mask is None else (multicast_mask,)
    operands = *coordinates, full_barrier, *im2col_offsets, *mask, *policy
    emit_ptx(f"cp.async.bulk.tensor.{space}", destination, tensor_map, *operands)


def bulk_load(
    destination: Expr, source: Expr, num_bytes: int, full_barrier: Expr, *, evicts_first: bool = False
) -> None:
    """Copy contiguous bytes to shared memory, and complete them at a barrier. Source: PTX ISA, "cp.async.bulk".

    Args:
        destination: Shared-memory address, a multiple of 16.
        source: Pointer to global memory, a multiple of 16.
        num_bytes: Number of bytes, a multiple of 16.
        full_barrier: Address of the barrier.
        evicts_first: Whether the lines that it reads leave L2 before others.
    """
    hint, policy = (".L2::cache_hint", (T.uint64(EVICT_FIRST_POLICY),)) if evicts_first else ("", ())
    space = f"shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
    emit_ptx(f"cp.async.bulk.{space}", destination, source, T.uint32(num_bytes), full_barrier, *policy)


@dataclass(frozen=True)
class TmaCopy:
    """The part of a TMA copy that is the same for all boxes of an operand's tile."""

    tensor_map: Expr  # tensor map of the array
    full_barrier: Expr  # address of the barrier at which the bytes complete
    multicast_mask: Expr = None  # CTAs of the cluster that receive the boxes; None for this CTA only
    cache_map: Expr = None  # tensor map of cached frames, if there are
    evicts_first: bool = False  # whether the lines that it reads leave L2 before others

    def issue(self, destination: Expr, coordinates: Sequence[Expr], im2col_offsets: Sequence[Expr] = ()) -> None:
        """Copy a box to shared memory; see `tma_load`."""
        operands = self.tensor_map, coordinates, self.full_barrier, im2col_offsets, self.multicast_mask
        tma_load(destination, *operands, evicts_first=self.evicts_first)


def tma_store(tensor_map: Expr, coordinates: Sequence[Expr], source: Expr, *, evicts_first: bool = False) -> None:
    """Copy a box from shared memory, as a bulk group of its own; `evicts_first`: to lines that leave L2 first."""
    space = f"{len(coordinates)}d.global.shared::cta.tile.bulk_group"
    hint, policy = (".L2::cache_hint", (T.uint64(EVICT_FIRST_POLICY),)) if evicts_first else ("", ())
    emit_ptx(f"cp.async.bulk.tensor.{space}{hint}", tensor_map, *coordinates, source, *policy)
    emit_call(T.ptx.cp.async_.bulk.commit_group())


def bulk_store(destination: Expr, source: Expr, num_bytes: int) -> None:
    """Copy contiguous bytes from shared to global memory, as a bulk group of its own; see `bulk_load`."""
    emit_ptx("cp.async.bulk.global.shared::cta.bulk_group", destination, source, T.uint32(num_bytes))
    emit_call(T.ptx.cp.async_.bulk.commit_group())


def tma_store_wait(pending: int) -> None:
    """Wait until at most `pending` bulk groups of this thread still have to read shared memory."""
    emit_ptx("cp.async.bulk.wait_group.read", pending)


def tma_store_fence() -> None:
    """Make this thread's writes to shared memory visible to TMA."""
    emit_call(T.ptx.fence.proxy.async_.shared__cta())
