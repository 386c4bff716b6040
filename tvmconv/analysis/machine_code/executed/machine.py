"""Executing the machine code of blocks as far as addresses and branches need it.

Threads of several blocks are executed together, an instruction at a time for all that are at it. Threads of a warp that
have parted meet again where the compiler says (`BSSY`, `BSYNC`); of several places the one that is first in the text
goes on. Blocks and warps do not wait for one another: what they ask of memory does not depend on what is in it, and
where it does, that is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.emulation.blocks import Block
from tvmconv.analysis.machine_code.executed.decoding import REFUSED, Decoded, decode
from tvmconv.analysis.machine_code.executed.operands import LOCAL, PREDICATES, Constants, Values
from tvmconv.analysis.machine_code.executed.operations import Array
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler.listing import Listing
from tvmconv.compiler.program import Launch
from tvmconv.errors import AnalysisError
from tvmconv.gpu import WARP

MOST_STEPS = 4_000_000  # instructions that are executed of some blocks
_STACK_WORDS = 4096


@dataclass(frozen=True)
class Asked:
    """What some warps ask of memory by one instruction, once.

    Attributes:
        place: of the instruction, in the listing.
        addresses: in bytes, of shape (warps, 32).
        active: whether a thread takes part, same shape.
        nbytes: that a thread accesses.
        sources: of a copy from global to shared memory, where it reads, same shape.
        reads: of a copy, whether it does; where not, it stores zeros.
    """

    place: int
    addresses: NDArray[np.int64]
    active: NDArray[np.bool_]
    nbytes: int
    sources: NDArray[np.int64] | None = None
    reads: NDArray[np.bool_] | None = None


Told = Callable[[Asked], None]


@dataclass(frozen=True)
class Run:
    """Some blocks that were executed.

    Attributes:
        times: of each instruction, how often a warp of theirs ran it.
        back: of each branch, how often one took it back to an instruction before it.
        steps: how many instructions were executed, each for all threads that were at it.
    """

    times: list[int]
    back: list[int]
    steps: int


class Machine:
    """The machine code of a kernel, to be executed.

    Args:
        listing: its instructions.
        launch: its grid and blocks.
        constants: the words of constant banks that are known, the arguments among them.
    """

    def __init__(self, listing: Listing, launch: Launch, constants: Constants) -> None:
        self._launch = launch
        self._warps = ceil_div(launch.threads, WARP)
        self._special: dict[str, Array] = {}
        self._steps = decode(listing, constants, self._special)
        meets = {step.target for step in self._steps}  # where threads may come from elsewhere
        meets |= {place + 1 for place, step in enumerate(self._steps) if step.instruction.opcode == "BSYNC"}
        self._next: list[int] = [len(listing)] * (len(listing) + 1)  # from each place on, the next that does something
        for place in reversed(range(len(listing))):
            matters = place in meets or self._steps[place].matters
            self._next[place] = place if matters else self._next[place + 1]

    def execute(self, blocks: Sequence[Block], told: Told, most: int | None = None) -> Run:
        """Execute some blocks.

        Args:
            blocks: of the grid, as (x, y, z).
            told: is told of each access of global and shared memory.
            most: instructions that are executed; by default `MOST_STEPS`.

        Raises:
            AnalysisError: an address or a branch depends on what is not known, it calls functions or branches by a
                register, or it takes too long.
        """
        self._special.clear()
        self._special.update(self._registers(blocks))
        return _Execution(self._steps, self._next, self._there(len(blocks)), told, most or MOST_STEPS).run()

    def _there(self, blocks: int) -> NDArray[np.bool_]:
        return np.tile(np.arange(self._warps * WARP) < self._launch.threads, blocks)

    def _registers(self, blocks: Sequence[Block]) -> dict[str, Array]:
        x, y, _ = self._launch.block
        thread = np.tile(np.arange(self._warps * WARP), len(blocks))
        found = {
            "SR_TID.X": thread % x,
            "SR_TID.Y": thread // x % y,
            "SR_TID.Z": thread // (x * y),
            "SR_LANEID": thread % WARP,
            "SRZ": np.zeros(1),
        }
        of_block = np.repeat(np.array(blocks, np.int64), self._warps * WARP, axis=0)
        for axis, name in enumerate("XYZ"):
            same = len({block[axis] for block in blocks}) == 1
            found[f"SR_CTAID.{name}"] = of_block[:1, axis] if same else of_block[:, axis]
        wide, high, deep = self._launch.cluster
        rank = of_block % (wide, high, deep) @ (1, wide, wide * high)
        found["SR_CgaCtaId"] = rank if wide * high * deep > 1 else np.zeros(1)
        return {name: value.astype(np.uint32) for name, value in found.items()}


class _Execution:
    """Some blocks that are executed."""

    def __init__(
        self, steps: Sequence[Decoded], nexts: Sequence[int], there: NDArray[np.bool_], told: Told, most: int
    ) -> None:
        self._steps, self._nexts, self._told, self._most = steps, nexts, told, most
        self._there = there
        self._values: Values = [None] * (LOCAL + _STACK_WORDS)
        self._values[:PREDICATES] = [np.zeros(1, np.uint32)] * PREDICATES
        self._values[PREDICATES:LOCAL] = [np.zeros(1, bool)] * (LOCAL - PREDICATES)
        self._at: dict[int, NDArray[np.bool_]] = {0: there}
        self._meeting: dict[str, NDArray[np.bool_]] = {}  # by barrier register, who is to meet
        self._waiting: dict[tuple[str, int], NDArray[np.bool_]] = {}  # who waits for that, and where it goes on
        self._ended = ~there
        self._began: Counter[int] = Counter()  # warps that entered a stretch of code here, and that left it there
        self._left: Counter[int] = Counter()
        self._back: Counter[int] = Counter()
        self._count = 0

    def run(self) -> Run:
        """Execute all."""
        while self._at:
            place = min(self._at)
            self._stretch(place, self._at.pop(place))
            if not self._at and self._waiting:
                self._release(force=True)
        entered, found = 0, []
        for place in range(len(self._steps)):
            entered += self._began[place]
            found.append(entered)
            entered -= self._left[place]
        return Run(found, [self._back[place] for place in range(len(self._steps))], self._count)

    def _stretch(self, place: int, mask: NDArray[np.bool_]) -> None:
        """Execute from one place on until the threads part, meet others, wait or end."""
        whole = self._is_whole(mask)
        warps = self._warps(mask)
        self._began[place] += warps
        steps, nexts = self._steps, self._nexts
        while True:
            skipped = nexts[place]
            if skipped >= len(steps):
                self._left[len(steps) - 1] += warps
                return
            place = skipped
            if self._at and place in self._at:  # others are here
                self._left[place - 1] += warps
                self._at[place] = self._at[place] | mask
                return
            self._count += 1
            if self._count > self._most:
                raise AnalysisError(f"its machine code takes more than {self._most:,} steps to execute")
            step = steps[place]
            if step.addresses:
                self._access(place, step, mask)
            if step.decides:
                self._compute(step, None if whole else mask)
            if step.branches:
                going = self._branch(place, step, mask)
                if going is None:
                    self._left[place] += warps
                    return
                if going is not mask:
                    self._left[place] += warps
                    mask, whole, warps = going, self._is_whole(going), self._warps(going)
                    self._began[place + 1] += warps
            place += 1

    def _is_whole(self, mask: NDArray[np.bool_]) -> bool:
        return mask is self._there or bool((mask == self._there).all())

    def _warps(self, mask: NDArray[np.bool_]) -> int:
        return int(mask.reshape(-1, WARP).any(axis=1).sum())

    def _guarded(self, step: Decoded, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if step.guard is None:
            return mask
        value = step.guard.get(self._values)
        if value is None:
            raise AnalysisError(f"whether {step.instruction.text} is executed depends on what is not known")
        return mask & value

    def _compute(self, step: Decoded, mask: NDArray[np.bool_] | None) -> None:
        does = step.does
        assert does is not None
        values = self._values
        results: Sequence[Array | None] = [None] * len(does.writes)
        if does.function:
            given = [source.get(values) for source in does.sources]
            if all(value is not None for value in given):
                results = does.function(*given)
        if step.guard is not None:
            held = step.guard.get(values)
            if held is None:
                results, mask = [None] * len(does.writes), None
            else:
                mask = held if mask is None else mask & held
                if len(mask) == 1:
                    if not mask[0]:
                        return
                    mask = None
        for number, value in zip(does.writes, results, strict=True):
            if number is None:
                continue
            old = values[number]
            if mask is None or value is None or (old is None and bool(mask.all())):
                values[number] = value
            else:
                values[number] = np.where(mask, value, np.zeros(1, value.dtype) if old is None else old)

    def _access(self, place: int, step: Decoded, mask: NDArray[np.bool_]) -> None:
        mask = self._guarded(step, mask)
        if not mask.any():
            return
        found = [source.get(self._values) for source in step.addresses]
        known = [_of_warps(each.astype(np.int64), mask) for each in found if each is not None]
        if len(known) < len(found):
            raise AnalysisError(f"where {step.instruction.text} accesses memory depends on what is not known")
        reads: NDArray[np.bool_] | None = None
        if len(known) > 1:
            reads = mask
            if step.filled:
                value = step.filled.get(self._values)
                if value is None:
                    raise AnalysisError(f"whether {step.instruction.text} stores zeros depends on what is not known")
                reads = mask & value
            reads = _of_warps(reads, mask)
        sources = known[1] if len(known) > 1 else None
        self._told(Asked(place, known[0], _of_warps(mask, mask), step.nbytes, sources, reads))

    def _branch(self, place: int, step: Decoded, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """The threads that go on behind an instruction: `mask` itself where all do, None where none does."""
        opcode = step.instruction.opcode
        register = step.instruction.operands.split(",")[0].strip()
        if opcode == "BSSY":
            self._meeting[register] = self._merged(self._meeting.get(register), mask)
            return mask
        if opcode == "BREAK":
            leaving = self._guarded(step, mask)
            if register in self._meeting:
                self._meeting[register] = self._meeting[register] & ~leaving
            return mask
        if opcode == "BSYNC":
            return self._meet(place, register, mask)
        taken = self._guarded(step, mask)
        if not taken.any():
            return mask
        rest = mask & ~taken
        if opcode in REFUSED:
            raise AnalysisError(f"its machine code has {step.instruction.name}, an instruction that is not understood")
        if opcode == "EXIT":
            self._ended = self._ended | taken
            self._release()
        elif step.target is not None and step.target != place:
            others = self._at.get(step.target)
            together = taken if others is None else others | taken
            self._at[step.target] = together
            if step.target < place:  # with a warp that is there already it goes on as one
                self._back[place] += self._warps(together) - (0 if others is None else self._warps(others))
        else:
            raise AnalysisError("the machine code branches to itself, which ends never")
        return rest if rest.any() else None

    def _merged(self, old: NDArray[np.bool_] | None, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Who is to meet, where the warps of some threads begin anew."""
        if old is None:
            return mask
        anew = np.repeat(mask.reshape(-1, WARP).any(axis=1), WARP)
        return np.where(anew, mask, old)

    def _meet(self, place: int, register: str, mask: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        expected = self._meeting.get(register)
        if expected is None:
            return mask
        of_warps = np.repeat(mask.reshape(-1, WARP).any(axis=1), WARP)
        missing = expected & of_warps & ~mask & ~self._ended
        if not missing.any():
            return mask
        key = register, place
        waiting = self._waiting.get(key)
        self._waiting[key] = mask if waiting is None else waiting | mask
        self._release()
        return None

    def _release(self, *, force: bool = False) -> None:
        """Let go on whose warps are complete."""
        for (register, place), waiting in list(self._waiting.items()):
            missing = self._meeting[register] & ~waiting & ~self._ended
            incomplete = np.repeat(missing.reshape(-1, WARP).any(axis=1), WARP) & (not force)
            free = waiting & ~incomplete
            if not free.any():
                continue
            rest = waiting & incomplete
            if rest.any():
                self._waiting[register, place] = rest
            else:
                del self._waiting[register, place]
            others = self._at.get(place + 1)
            self._at[place + 1] = free if others is None else others | free


def _of_warps(value: Array, like: Array) -> Array:
    """A value of each thread, of shape (warps, 32)."""
    whole: Array = value if value.shape == like.shape else np.broadcast_to(value, like.shape)
    return whole.reshape(-1, WARP)
