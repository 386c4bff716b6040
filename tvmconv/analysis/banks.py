"""Shared-memory bank conflicts, counted from the lowered TIR without running the kernel.

The model is the one of the CUDA C++ Programming Guide for compute capability 5.0 and up ("Shared Memory" under "Compute
Capability 5.x"): 32 banks of 4 bytes; the threads of a warp that touch different words of one bank are served one after
the other, those that touch the same word are served together. An access of a warp then takes as many wavefronts as the
busiest bank has words, and all but the first are conflicts.

Counted are the accesses that the TIR makes: two 16-bit elements share a word, and a vector of 8 or 16 bytes is served
by half and quarter warps, each of which counts as a request. The compiler may merge a thread's neighbouring loads into
such vectors: conflicts of strides of 2 or 4 words can vanish then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tvmconv.analysis.tir import SHARED, Scope, executions, parts, statements, warps
from tvmconv.errors import AnalysisError
from tvmconv.gpu import BANK_BYTES, BANKS, WARP

if TYPE_CHECKING:
    from tvm.tirx import PrimFunc

    from tvmconv.compiler.program import Launch
    from tvmconv.kernel import Kernel

FIRST_BLOCK = (0, 0, 0)
MAX_BYTES = 16  # of one access


@dataclass(frozen=True)
class SharedAccess:
    """One load or store of shared memory in the text of a kernel, over all times that it runs in one block.

    Attributes:
        kind: load or store.
        buffer: the shared buffer's name.
        requests: how often a warp executes it, with at least one thread taking part; of a vector of 8 or 16 bytes, how
            often a half or a quarter of one does.
        wavefronts: how many passes over the banks these take.
    """

    kind: Literal["load", "store"]
    buffer: str
    requests: int
    wavefronts: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the first of each request."""
        return self.wavefronts - self.requests


def shared_accesses(kernel: Kernel) -> list[SharedAccess]:
    """Every shared-memory access of a kernel's text, of all its steps, each counted over the first block.

    Args:
        kernel: a built kernel, for any target.

    Raises:
        AnalysisError: an access is of more than 16 bytes, or of elements that are no neighbours, or cannot be executed
            (`tvmconv.analysis.tir.executions`).
    """
    return [_count(access, step.launch) for step in kernel.steps for access in _accesses(step.function)]


def conflicts(kernel: Kernel, kind: Literal["load", "store"]) -> int:
    """Bank conflicts of all shared loads or stores of a kernel's first block."""
    return sum(access.conflicts for access in shared_accesses(kernel) if access.kind == kind)


@dataclass(frozen=True)
class _Access:
    kind: Literal["load", "store"]
    buffer: Any
    index: Any
    scope: Scope


def _accesses(function: PrimFunc) -> Iterator[_Access]:
    for statement, scope in statements(function):
        if type(statement).__name__ != "BufferStore":
            continue
        for part, inside in parts(statement.value, scope):
            if type(part).__name__ == "TensorLoad" and _is_shared(part.source):
                yield _Access("load", part.source, part.indices[0], inside)
        if _is_shared(statement.buffer):
            yield _Access("store", statement.buffer, statement.indices[0], scope)


def _is_shared(buffer: Any) -> bool:
    return str(buffer.scope()) in SHARED


def _count(access: _Access, launch: Launch) -> SharedAccess:
    itemsize = int(access.buffer.dtype.itemsize)  # of a vector, where all accesses are of one: TVM's StorageRewrite
    index, lanes = access.index, 1
    if type(index).__name__ == "Ramp":
        if int(index.stride) != 1:
            raise AnalysisError(f"a shared access of {index.lanes} elements at strides of {index.stride}")
        index, lanes = index.base, int(index.lanes)
    if lanes * itemsize > MAX_BYTES:
        raise AnalysisError(f"a shared access of {lanes * itemsize} bytes")
    requests = wavefronts = 0
    for executed in executions(access.scope, [index], launch, FIRST_BLOCK):
        (elements,) = executed.values
        found = _vector_wavefronts(
            elements * itemsize // BANK_BYTES, executed.active, max(1, lanes * itemsize // BANK_BYTES)
        )
        requests += executed.repeats * found[0]
        wavefronts += executed.repeats * found[1]
    return SharedAccess(access.kind, str(access.buffer.name), requests, wavefronts)


def _vector_wavefronts(words: np.ndarray, active: np.ndarray, width: int) -> tuple[int, int]:
    """Requests and wavefronts of accesses of so many words each, by as many threads at a time as banks can serve."""
    words = warps(words)[:, :, None] + np.arange(width)
    together = (-1, WARP)
    return bank_wavefronts(words.reshape(together), np.repeat(warps(active), width, axis=1).reshape(together))


def bank_wavefronts(words: np.ndarray, active: np.ndarray) -> tuple[int, int]:
    """Requests and wavefronts of shared accesses of at most a word.

    Args:
        words: the word index that each thread touches, shape (accesses, threads of the block).
        active: whether the thread takes part, same shape.

    Returns:
        How many warp-wide requests have an active thread, and how many wavefronts they take in all.
    """
    active = warps(active)
    words = np.sort(np.where(active, warps(words), -1), axis=1)
    first = (words >= 0) & (np.diff(words, axis=1, prepend=-1) != 0)  # of the threads that share a word
    warp = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    per_bank = np.zeros((len(words), BANKS), int)
    np.add.at(per_bank, (warp[first], words[first] % BANKS), 1)
    return int(active.any(axis=1).sum()), int(per_bank.max(axis=1, initial=0).sum())
