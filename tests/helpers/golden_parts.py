"""Parts of golden kernels: their inputs and outputs, values, and one block of threads."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np
from tvm.script import tirx as T  # noqa: N812

from tvmconv import devices
from tvmconv.arithmetic import ceil_div
from tvmconv.builtin import tir_builder as p
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.lowered_module import LoweredModule
from tvmconv.tensor_map import TensorMap

LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global{}.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"


@dataclass(frozen=True)
class GoldenKernel:
    """A kernel and its inputs."""

    inputs: tuple[np.ndarray, ...]  # values of the arguments but the output
    lower: Callable[[], LoweredModule]
    # absolute difference that the order and precision of sums or approximate functions explain, relative to the largest
    # output; 0 where the emulator has to agree bit by bit
    tolerance: float = 0


def lower_arrays(arrays: dict[str, tuple[tuple[int, ...], str]], emit: Callable[[dict[str, Any]], None]):
    """Lower a kernel of arrays, (shape, dtype) by name, that a function emits from the buffers by name."""
    signature = SimpleNamespace(
        argument_names=list(arrays),
        argument_shapes=[shape for shape, _ in arrays.values()],
        argument_dtypes=[dtype for _, dtype in arrays.values()],
    )
    return lower_module(p.build_schedule(signature, emit).mod, devices.find_device("sm_90a").make_target())


def emitted(
    inputs: tuple[np.ndarray, ...],
    output: tuple[tuple[int, ...], str],
    emit: Callable[[dict[str, Any]], None],
    tolerance: float = 0,
) -> GoldenKernel:
    """A kernel of the values of X, and of W if they are given, to Y of a shape and dtype, that a function emits."""
    arrays = {name: (values.shape, values.dtype.name) for name, values in zip("XW", inputs, strict=False)}
    arrays["Y"] = output
    return GoldenKernel(inputs, lambda: lower_arrays(arrays, emit), tolerance)


KERNELS: dict[str, GoldenKernel] = {}


# --- values: reproducible without a random generator, whose stream may change with NumPy's version ---


def hash_words(count: int, seed: int = 1) -> np.ndarray:
    """Words without a pattern."""
    words = np.arange(count, dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed * 40503 + 1)
    for shift, factor in ((15, 2246822519), (13, 3266489917), (16, 668265263)):
        words = (words ^ words >> np.uint32(shift)) * np.uint32(factor)
    return words ^ words >> np.uint32(16)


def small_integers(shape: tuple[int, ...], dtype: str, seed: int = 1, limit: int = 2) -> np.ndarray:
    """Integers from -limit to limit, whose products and sums are exact in any order."""
    words = hash_words(int(np.prod(shape)), seed) % np.uint32(2 * limit + 1)
    return (words.astype(np.float32) - limit).astype(dtype).reshape(shape)


def fractions(shape: tuple[int, ...], dtype: str, seed: int = 1) -> np.ndarray:
    """Numbers between -1 and 1 with all bits of the mantissa."""
    values = hash_words(int(np.prod(shape)), seed).astype(np.float64) / 2**31 - 1
    return values.astype(np.float32).astype(dtype).reshape(shape)


# --- parts of kernels ---


class Block:
    """A block's shared memory, of which `address` gives the address of a byte."""

    def __init__(self, nbytes: int) -> None:
        self.smem = p.allocate("smem", nbytes // 4, "uint32", "shared.dyn")
        self.base = p.allocate("base", 1, "uint32")
        p.store(self.base, 0, T.cuda.cvta_generic_to_shared(self.smem.access_ptr("rw")))

    def address(self, at: Any) -> Any:
        return self.base[0] + p.to_uint32(at)


def one_block(nbytes: int, num_threads: int, emit: Callable[..., None], **tensor_maps: TensorMap):
    """Return an emitter of a kernel of one block; `emit` receives buffers, the block, the thread and tensor maps."""

    def emit_kernel(buffers: dict[str, Any]) -> None:
        maps = [p.declare_tensor_map(f"{name}_map", buffers[name], each) for name, each in tensor_maps.items()]
        with p.thread_axis(1, "blockIdx.x"), p.thread_axis(num_threads, "threadIdx.x") as thread:
            emit(buffers, Block(nbytes), thread, *maps)

    return emit_kernel


def init_mbarriers(*barriers: tuple[Any, int]) -> None:
    """Initialize mbarriers of (address, count); the calling thread has to be the only one."""
    for address, count in barriers:
        p.emit_ptx("mbarrier.init.shared.b64", address, T.uint32(count))
    p.emit_ptx("fence.mbarrier_init.release.cluster")


def load_word(block: Block, at: Any, space: str = "shared") -> Any:
    word = p.allocate("word", 1, "uint32")
    p.emit_ptx(f"ld.{space}.b32", word[0], at if space != "shared" else block.address(at))
    return word[0]


def copy_out(buffers: dict[str, Any], block: Block, thread: Any, num_words: int, num_threads: int) -> None:
    """Copy the first words of shared memory to Y."""
    with p.serial_loop(ceil_div(num_words, num_threads), "i") as i:
        at = i * num_threads + thread
        with p.if_(at < num_words):
            p.store(buffers["Y"], at, load_word(block, at * 4))
