"""Loads, stores, asynchronous copies (cp.async), shuffles within a warp, and conversions between floating-point types.

Source: PTX ISA, "Data Movement and Conversion Instructions", "elect.sync" and "shfl.sync".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvmconv.emulator.errors import ExecutionError
from tvmconv.emulator.instructions.operands import Instruction, executes
from tvmconv.emulator.memory.arrays import GlobalArray
from tvmconv.emulator.memory.shared_memory import MemoryAddress, SharedMemory
from tvmconv.emulator.state import EmulatorState, ExpressionCode, Mask, TirTranslator
from tvmconv.emulator.threads import CLUSTER_WINDOW_BYTES, Lanes
from tvmconv.target import WARP_SIZE
from tvmconv.workloads.dtypes import get_numpy_dtype
from tvmconv.workloads.quantization import LIMITS


@executes("ld", "ld_vec")
def _load(op: Instruction, mask: Mask) -> None:
    """Load: ld d..., address."""
    count, itemsize = op.call.vector_width
    nbytes, state, lanes = count * itemsize, op.state, op.state.find_lanes(mask)
    location = op.address(count, mask)
    element_bytes = location.memory.dtype.itemsize if isinstance(location.memory, GlobalArray) else itemsize

    def note_lanes(mask: Mask) -> None:
        selection = slice(None) if mask is None else mask[lanes]
        selected = MemoryAddress(location.memory, location.byte_offsets[selection], location.name)
        state.note_access(selected, "load", nbytes, lanes[selection], element_bytes)

    if not state.is_checked and isinstance(location.memory, SharedMemory) and location.target_blocks is None:
        return op.mark_written(count, mask, state.defer_access(note_lanes))
    loaded = state.load_bytes(location, nbytes, lanes, element_bytes)
    if state.is_checked:
        op.write(mask, loaded.view(f"u{itemsize}"))
    else:
        op.mark_written(count, mask)


@executes("st", "st_vec")
def _store(op: Instruction, mask: Mask) -> None:
    """Store: st address, a..."""
    count, itemsize = op.call.vector_width
    state, lanes, location = op.state, op.state.find_lanes(mask), op.address(0, mask)
    element_bytes = location.memory.dtype.itemsize if isinstance(location.memory, GlobalArray) else itemsize
    if not state.is_checked:
        op.evaluate(1, count, mask)
        return state.note_access(location, "store", count * itemsize, lanes, element_bytes)
    stored_bytes = np.ascontiguousarray(op.read(1, count, mask, itemsize).T).view(np.uint8)
    state.store_bytes(location, stored_bytes, lanes, element_bytes)


@executes("red")
def _add_to_global(op: Instruction, mask: Mask) -> None:
    """Add float32 numbers to global memory, each of them atomically: red.global.add.f32 address, a."""
    state, lanes, location = op.state, op.state.find_lanes(mask), op.address(0, mask, "global")
    array = location.memory
    if not isinstance(array, GlobalArray) or array.dtype != np.float32:
        raise ExecutionError(f"{op}: only sums of float32 in global memory are emulated")
    array.check_access(location.byte_offsets, array.dtype.itemsize)
    if state.is_checked:
        np.add.at(array.values, location.byte_offsets // array.dtype.itemsize, op.values(1, mask).astype(np.float32))
    state.note_access(location, "store", array.dtype.itemsize, lanes, array.dtype.itemsize)


@executes("mapa_u32")
def _map_address(op: Instruction, mask: Mask) -> None:
    """Map a shared address to the same location in another block of the cluster: mapa d, a, rank."""
    own_addresses, cta_ranks = (op.values(index, mask).astype(np.int64) for index in (1, 2))
    cluster_size = op.state.threads.cluster_size
    if cta_ranks.size and not 0 <= int(cta_ranks.min()) <= int(cta_ranks.max()) < cluster_size:
        raise ExecutionError(f"{op}: rank {int(cta_ranks.max())} is outside the cluster of {cluster_size} blocks")
    peer_addresses = own_addresses % CLUSTER_WINDOW_BYTES + (cta_ranks + 1) * CLUSTER_WINDOW_BYTES
    op.write(mask, peer_addresses.astype(np.uint32)[:, None], depends_on_memory=False)


def start_async_copy(
    state: EmulatorState,
    target: MemoryAddress,
    source: MemoryAddress,
    nbytes: int,
    source_bytes: NDArray[np.int64],
    lanes: Lanes,
) -> None:
    """Start asynchronous copies of `source_bytes` bytes per lane, padded with zeros to `nbytes` bytes."""
    if not isinstance(target.memory, SharedMemory) or not isinstance(source.memory, GlobalArray):
        raise ExecutionError(
            f"an asynchronous copy is from {source.name} to {target.name}, not from global to shared memory"
        )
    array = source.memory
    if ((source_bytes < 0) | (source_bytes > nbytes)).any():
        raise ExecutionError(f"an asynchronous copy of {nbytes} bytes must read 0 to {nbytes} bytes of its source")
    unit_indices = target.memory.find_units(target.byte_offsets, lanes, nbytes)
    if state.is_checked:
        data = _read_sources(array, source.byte_offsets, nbytes, source_bytes)
        target.memory.start_copy(unit_indices, lanes, data.view(f"u{target.memory.unit_bytes}"))
    has_source = source_bytes > 0
    itemsize = array.dtype.itemsize
    sources = np.where(has_source, source.byte_offsets, -1)
    state.notify("shared", "store", target.name, lanes, target.byte_offsets, nbytes, itemsize, sources)
    state.notify("global", "load", source.name, lanes[has_source], source.byte_offsets[has_source], nbytes, itemsize)


def _read_sources(
    array: GlobalArray, byte_offsets: NDArray[np.int64], nbytes: int, source_bytes: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """Return the data of copies of `nbytes` bytes, of which only the first `source_bytes` are read."""
    data = np.zeros((len(byte_offsets), nbytes), np.uint8)
    is_full = source_bytes == nbytes
    if is_full.any():
        data[is_full] = array.read(byte_offsets[is_full], nbytes)
    for row in np.flatnonzero(~is_full & (source_bytes > 0)):
        first, length = int(byte_offsets[row]), int(source_bytes[row])
        if first < 0 or first + length > array.nbytes:
            raise ExecutionError(f"out of bounds: {length} bytes at byte {first} of {array.name}")
        data[row, :length] = array.raw_bytes[first : first + length]
    return data


@executes(*(f"cp_async_{cop}{tail}" for cop in ("ca", "cg") for tail in ("", "_src_size", "_ignore_src")))
def _copy(op: Instruction, mask: Mask) -> None:
    """cp.async target, source, bytes{, bytes to read | condition to read none}{, cache policy}."""
    lanes, nbytes = op.state.find_lanes(mask), op.constant(2)
    source_bytes = np.full(len(lanes), nbytes)
    if op.num_operands - ("L2::cache_hint" in op.modifiers) > 3:
        source_bytes = op.values(3, mask).astype(np.int64)
        if op.call.name.endswith("ignore_src"):
            source_bytes = np.where(source_bytes != 0, 0, nbytes)
    start_async_copy(
        op.state, op.address(0, mask, "shared"), op.address(1, mask, "global"), nbytes, source_bytes, lanes
    )


@executes("cp_async_commit_group")
def _commit_group(op: Instruction, mask: Mask) -> None:
    op.state.shared.commit_group(op.state.find_lanes(mask))


@executes("cp_async_wait_group")
def _wait_group(op: Instruction, mask: Mask) -> None:
    op.state.shared.wait_group(op.state.find_lanes(mask), op.constant(0))


@executes("cp_async_wait_all")
def _wait_all(op: Instruction, mask: Mask) -> None:
    lanes = op.state.find_lanes(mask)
    op.state.shared.commit_group(lanes)
    op.state.shared.wait_group(lanes, 0)


def elect_lanes(state: EmulatorState, mask: Mask) -> NDArray[np.int64]:
    """Return 1 for the first active lane of each warp, and 0 for the others."""
    active = state.thread_mask if mask is None else mask
    first_lanes = active.reshape(-1, WARP_SIZE).argmax(axis=1) + np.arange(0, len(active), WARP_SIZE)
    is_elected = np.zeros(len(active), np.int64)
    is_elected[first_lanes] = 1
    return is_elected * active


@executes("elect_sync")
def _elect(op: Instruction, mask: Mask) -> None:
    """elect.sync lane|elected, mask: the mask is assumed to be that of the active lanes."""
    lanes, is_elected = op.state.find_lanes(mask), elect_lanes(op.state, mask)
    leader_lanes = np.repeat(is_elected.reshape(-1, WARP_SIZE).argmax(axis=1), WARP_SIZE)
    columns = np.stack([leader_lanes[lanes], is_elected[lanes]], axis=1).astype(np.uint8)
    op.write(mask, columns, depends_on_memory=False)


def translate_shuffle(node: Any, translator: TirTranslator) -> ExpressionCode:
    """Translate `__shfl_sync`, `__shfl_up_sync`, `__shfl_down_sync` and `__shfl_xor_sync`."""
    mode = str(node.op.name).removeprefix("tirx.cuda.__shfl").removesuffix("sync").removesuffix("_")
    value_code, lane_operand = map(translator.translate_expression, node.args[1:3])
    width = int(node.args[3]) if len(node.args) > 3 else WARP_SIZE
    state, itemsize = translator.state, node.ty.dtype.itemsize

    def shuffle(mask: Mask) -> NDArray[Any]:
        if state.observer is not None:
            state.observer.on_operation("shuffle", state.find_lanes(mask), 1, itemsize)
        return _exchange_values(state, value_code(mask), mode, lane_operand(mask), width, mask)

    return shuffle


def _exchange_values(
    state: EmulatorState, value: Any, mode: str, lane_operand: Any, width: int, mask: Mask
) -> NDArray[Any]:
    """Return the value that each lane receives; from an inactive lane it is NaN."""
    all_lanes = state.all_lanes
    values = np.broadcast_to(np.asarray(value), all_lanes.shape)
    lane_operand = np.broadcast_to(np.asarray(lane_operand), all_lanes.shape).astype(np.int64)
    lane = all_lanes % WARP_SIZE
    segment_start = lane // width * width
    target_lanes = {
        "": segment_start + lane_operand % width,
        "_up": lane - lane_operand,
        "_down": lane + lane_operand,
        "_xor": lane ^ lane_operand,
    }[mode]
    is_outside = (target_lanes < segment_start) | (target_lanes >= segment_start + width)
    source_lanes = all_lanes - lane + np.where(is_outside, lane, target_lanes)
    active = state.thread_mask if mask is None else mask
    received = values[source_lanes].copy()
    is_missing = ~active[source_lanes] & active
    if is_missing.any():
        if received.dtype.kind in "iub":
            raise ExecutionError("a shuffle reads an integer from an inactive lane")
        received[is_missing] = np.nan
    return received


def _convert_bits(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the bits of values in a type; hardware sets those of NaN to ones, unless it only appends to a bfloat16."""
    bits = values.astype(dtype).view(f"u{dtype.itemsize}")
    if values.dtype != get_numpy_dtype("bfloat16"):
        bits[np.isnan(values)] = (1 << 8 * dtype.itemsize - 1) - 1
    return bits


_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


@executes("cvt")
def _convert(op: Instruction, mask: Mask) -> None:
    """cvt{.rn}.D.S d, a: converts one floating-point element with rounding to the nearest."""
    names = [modifier for modifier in op.modifiers if modifier != "rn"]
    if len(names) != 2 or not set(names) <= set(_DTYPES):
        raise op.unsupported()
    target_dtype, source_dtype = (get_numpy_dtype(_DTYPES[name]) for name in names)
    (bits,) = op.read(1, 1, mask, source_dtype.itemsize)
    op.write(mask, _convert_bits(bits.view(source_dtype), target_dtype)[:, None])


@executes("cvt_f16x2_f32", "cvt_bf16x2_f32")
def _convert_pair(op: Instruction, mask: Mask) -> None:
    """cvt.rn{.relu}.{f16x2,bf16x2}.f32 d, a, b: a goes to the upper half of d, b to the lower."""
    if set(op.modifiers) - {"rn", "relu", "f16x2", "bf16x2", "f32"}:
        raise op.unsupported()
    if not op.state.is_checked:
        op.evaluate(1, 2, mask)
        return op.mark_written(1, mask)
    values = op.read(1, 2, mask, 4).view(np.float32)
    values = np.maximum(values, 0) if "relu" in op.modifiers else values
    dtype = get_numpy_dtype("float16" if "f16x2" in op.modifiers else "bfloat16")
    upper, lower = _convert_bits(values, dtype).astype(np.uint32)
    op.write(mask, (upper << np.uint32(16) | lower)[:, None])


@executes("cvt_f8x2_f32")
def _convert_pair_to_8_bits(op: Instruction, mask: Mask) -> None:
    """cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.f32 d, a, b: as above, to 16 bits; large numbers saturate, NaN stays."""
    if not op.state.is_checked:
        op.evaluate(1, 2, mask)
        return op.mark_written(1, mask)
    values = op.read(1, 2, mask, 4).view(np.float32)
    values = np.maximum(values, 0) if "relu" in op.modifiers else values
    name = "float8_e4m3fn" if "e4m3x2" in op.modifiers else "float8_e5m2"
    upper, lower = np.clip(values, *LIMITS[name]).astype(get_numpy_dtype(name)).view(np.uint8).astype(np.uint16)
    op.write(mask, (upper << np.uint16(8) | lower)[:, None])


def round_to_tf32(bits: NDArray[np.uint32], rounding: str) -> NDArray[np.uint32]:
    """Round float32 bits to TF32: `rna` to nearest with ties away from zero, `rn` ties to even, `rz` toward zero."""
    kept_bits, infinity = np.uint32(0xFFFFE000), np.uint32(0x7F800000)
    increments = {"rna": np.uint32(0x1000), "rn": np.uint32(0x0FFF) + (bits >> np.uint32(13) & np.uint32(1))}
    rounded = (bits + increments.get(rounding, np.uint32(0))) & kept_bits
    is_nan = bits & np.uint32(0x7FFFFFFF) > infinity
    special = bits if rounding == "rna" else np.where(is_nan, np.uint32(0x7FFFE000), bits)
    return np.where(bits & infinity == infinity, special, rounded)


@executes("cvt_f16x2_f8x2")
def _widen_pair_of_8_bits(op: Instruction, mask: Mask) -> None:
    """cvt.rn.f16x2.{e4m3x2,e5m2x2} d, a: converts both elements of a."""
    dtype = get_numpy_dtype("float8_e4m3fn" if "e4m3x2" in op.modifiers else "float8_e5m2")
    if "relu" in op.modifiers:
        raise op.unsupported()
    (bits,) = op.read(1, 1, mask, 2)
    pairs = np.ascontiguousarray(bits).view(dtype).astype(np.float32)
    op.write(mask, _convert_bits(pairs, np.dtype(np.float16)).view(np.uint32)[:, None])


@executes("prmt")
def _permute_bytes(op: Instruction, mask: Mask) -> None:
    """prmt.b32 d, a, b, c: byte i of d is the one of the eight bytes of a and b that the i-th four bits of c name."""
    sources = np.ascontiguousarray(op.read(1, 2, mask, 4).T).view(np.uint8)
    (selectors,) = op.read(3, 1, mask, 4)
    indices = selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & np.uint32(15)
    if list(op.modifiers) != ["b32"] or (indices > 7).any():
        raise op.unsupported()
    op.write(mask, np.take_along_axis(sources, indices.astype(np.int64), 1).view(np.uint32))


@executes("cvt_pack_c")
def _pack_pair_of_integers(op: Instruction, mask: Mask) -> None:
    """cvt.pack.sat.s8.s32.b32 d, a, b, c: d has the lower half of c above the saturated a and b."""
    if list(op.modifiers) != ["sat", "s8", "s32", "b32"]:
        raise op.unsupported()
    integers, (upper,) = op.read(1, 2, mask, 4).view(np.int32), op.read(3, 1, mask, 4)
    a, b = np.clip(integers, -128, 127).astype(np.uint32) & np.uint32(0xFF)
    op.write(mask, (upper << np.uint32(16) | a << np.uint32(8) | b)[:, None])


@executes("fma")
def _multiply_and_add(op: Instruction, mask: Mask) -> None:
    """fma.rn{.sat}.f32 d, a, b, c: rounds a × b + c once; with .sat limits it to [0, 1], where NaN becomes 0."""
    if {"rn", "f32"} - {*op.modifiers} or {*op.modifiers} - {"rn", "sat", "f32"}:
        raise op.unsupported()
    a, b, c = op.read(1, 3, mask, 4).view(np.float32).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        value = _add_to_odd(a * b, c).astype(np.float32)
    if "sat" in op.modifiers:
        value = np.nan_to_num(np.clip(value, 0, 1), nan=0)
    op.write(mask, value.astype(np.float32).view(np.uint32)[:, None])


def _add_to_odd(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sums in float64 that round to float32 as exact sums do: inexact ones are rounded to an odd last bit.

    Source: Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums: Proved Algorithms Using Rounding to
    Odd", 2008.
    """
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    is_even = total.view(np.int64) & 1 == 0
    return np.where((error != 0) & is_even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


@executes("cvt_tf32_f32")
def _convert_to_tf32(op: Instruction, mask: Mask) -> None:
    rounding, *remaining_modifiers = op.modifiers
    if remaining_modifiers != ["tf32", "f32"]:
        raise op.unsupported()
    op.write(mask, round_to_tf32(op.read(1, 1, mask, 4), rounding).T)
