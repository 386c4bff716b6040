"""How long a warp would take alone on its multiprocessor: from its machine code.

A warp issues its instructions in order, one a clock, and each waits for what it reads (CUDA C++ Programming Guide,
"Hardware Multithreading"). So one warp's time is the time at which the last instruction issues when each register is
there a latency after it was asked for. That has in it how many operations are independent, how far ahead loads are
asked for, and what is waited for at barriers: what V. Volkov ("Understanding Latency Hiding on GPUs", 2016, chapter 4)
calls the latency-bound regime, and J.-C. Huang et al. ("GPUMech", 2014) find by the same walk over the instructions.

A loop's body is walked twice; what the second time took is what each further trip takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvmconv.analysis.machine_code.operations import Code, Operation, Register

# Clocks until a result is there. Arithmetic, and what moves numbers between register files: Z. Jia et al., "Dissecting
# the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, table 4.1. Memory: W. Luo et al., "Benchmarking and
# Dissecting the Nvidia Hopper GPU Architecture", 2024, arXiv 2402.13499, table of latencies, of H800: shared memory 29,
# L1 41, L2 263. What is loaded is taken to come from L2, where the arrays lie once they have been read.
ARITHMETIC_CLOCKS = 4
L2_CLOCKS = 263
CLOCKS = {
    **dict.fromkeys(("LDG", "LD", "LDGSTS", "ATOMG", "RED"), L2_CLOCKS),
    **{"LDS": 29, "LDSM": 33, "LDL": 41, "LDC": 29, "ULDC": 12, "S2R": 25, "S2UR": 25, "SHFL": 23},
    **{"HMMA": 33, "MUFU": 23, "R2UR": 12, "I2F": 14, "F2I": 14, "F2F": 14},
}
BARRIER_CLOCKS = 20  # of a barrier at which nobody is late
_TURNS = {"BRA": 4}  # clocks until the next instruction issues, where that is not 1


@dataclass
class Warp:
    """One warp, alone.

    Attributes:
        clocks: at which the next instruction can issue.
    """

    clocks: float = 0.0
    _there: dict[Register, float] = field(default_factory=dict)  # when each register is
    _group: float = 0.0  # when the copies since the last group are done
    _groups: list[float] = field(default_factory=list)

    def run(self, code: Code) -> None:
        """Walk over code."""
        for part in code:
            if isinstance(part, Operation):
                self._issue(part)
                continue
            self.run(part.body)
            if part.trips > 1:
                before = self.clocks
                self.run(part.body)
                self._later((part.trips - 2) * (self.clocks - before))

    def _issue(self, one: Operation) -> None:
        now = max([self.clocks, *(self._there.get(each, 0.0) for each in (*one.reads, *one.writes))])
        done = now + CLOCKS.get(one.name, ARITHMETIC_CLOCKS)
        match one.name:
            case "LDGSTS":
                self._group = max(self._group, done)
            case "LDGDEPBAR":
                self._groups.append(self._group)
            case "DEPBAR":
                while len(self._groups) > one.pending:
                    now = max(now, self._groups.pop(0))
            case "BAR":
                now += BARRIER_CLOCKS
        self._there |= dict.fromkeys(one.writes, done)
        self.clocks = now + _TURNS.get(one.name, 1)

    def _later(self, clocks: float) -> None:
        """All that is under way moves on with the clock."""
        self.clocks += clocks
        self._there = {register: time + clocks for register, time in self._there.items()}
        self._group += clocks
        self._groups = [time + clocks for time in self._groups]
