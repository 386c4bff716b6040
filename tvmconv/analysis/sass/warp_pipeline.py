"""Time that one warp takes alone on its multiprocessor, from its machine code.

A warp issues its instructions in order, one per clock, and each waits for its operands (CUDA C++ Programming Guide,
"Hardware Multithreading"). The time of a warp is the time at which its last instruction issues if each result is ready
a fixed latency after its instruction. The time reflects the number of independent operations, the distance of
prefetches, and the waits at barriers. V. Volkov ("Understanding Latency Hiding on GPUs", 2016, chapter 4) calls this
the latency-bound regime; J.-C. Huang et al. ("GPUMech", 2014) compute it by the same walk over the instructions.

A loop's body is walked twice, and each further iteration takes as long as the second one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvmconv.analysis.sass.sass_ops import Register, SassCode, SassOp

# Clocks until a result is ready. Arithmetic and moves between register files: Z. Jia et al., "Dissecting the NVIDIA
# Volta GPU Architecture via Microbenchmarking", 2018, table 4.1. Memory: W. Luo et al., "Benchmarking and Dissecting
# the Nvidia Hopper GPU Architecture", 2024, arXiv 2402.13499, latencies of H800: shared memory 29, L1 41, L2 263.
# Global loads are assumed to hit L2, which holds the arrays once they have been read.
ARITHMETIC_CLOCKS = 4
L2_CLOCKS = 263
CLOCKS = {
    **dict.fromkeys(("LDG", "LD", "LDGSTS", "ATOMG", "RED"), L2_CLOCKS),
    **{"LDS": 29, "LDSM": 33, "LDL": 41, "LDC": 29, "ULDC": 12, "S2R": 25, "S2UR": 25, "SHFL": 23},
    **{"HMMA": 33, "MUFU": 23, "R2UR": 12, "I2F": 14, "F2I": 14, "F2F": 14},
}
BARRIER_CLOCKS = 20  # clocks of a barrier at which all threads arrive at the same time
_ISSUE_CYCLES = {"BRA": 4}  # clocks until the next instruction issues, 1 by default


@dataclass
class WarpPipeline:
    """Pipeline of one warp that runs alone.

    Attributes:
        clocks: Clock at which the next instruction can issue.
    """

    clocks: float = 0.0
    _ready_cycle: dict[Register, float] = field(default_factory=dict)
    _group_done_cycle: float = 0.0  # clock at which the copies since the last commit are done
    _committed_groups: list[float] = field(default_factory=list)

    def execute(self, code: SassCode) -> None:
        """Advance the clock by the time of the code."""
        for node in code:
            if isinstance(node, SassOp):
                self._issue(node)
                continue
            self.execute(node.body)
            if node.trip_count > 1:
                clocks_before = self.clocks
                self.execute(node.body)
                self._advance((node.trip_count - 2) * (self.clocks - clocks_before))

    def _issue(self, op: SassOp) -> None:
        registers = (*op.read_registers, *op.written_registers)
        issue_cycle = max([self.clocks, *(self._ready_cycle.get(register, 0.0) for register in registers)])
        done_cycle = issue_cycle + CLOCKS.get(op.name, ARITHMETIC_CLOCKS)
        match op.name:
            case "LDGSTS":
                self._group_done_cycle = max(self._group_done_cycle, done_cycle)
            case "LDGDEPBAR":
                self._committed_groups.append(self._group_done_cycle)
            case "DEPBAR":
                while len(self._committed_groups) > op.max_pending_groups:
                    issue_cycle = max(issue_cycle, self._committed_groups.pop(0))
            case "BAR":
                issue_cycle += BARRIER_CLOCKS
        self._ready_cycle |= dict.fromkeys(op.written_registers, done_cycle)
        self.clocks = issue_cycle + _ISSUE_CYCLES.get(op.name, 1)

    def _advance(self, clocks: float) -> None:
        """Shift the clock and all pending results by `clocks`."""
        self.clocks += clocks
        self._ready_cycle = {register: ready + clocks for register, ready in self._ready_cycle.items()}
        self._group_done_cycle += clocks
        self._committed_groups = [ready + clocks for ready in self._committed_groups]
