"""How often the loops of machine code run: from what the text of the kernel says that a warp does.

A branch back does not tell how often it is taken. But the lowered TIR tells how many multiplications a thread does, how
many barriers it meets, and how many bytes it loads and stores; in the code these are instructions with loops around
them. Where an instruction runs as often as the loops around it together run more than once, plus one, each of these
numbers is a linear equation for the loops; they are solved by least squares, no loop running less than once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tvmconv.analysis.machine_code.operations import Code, Loop, Operation, instructions

MULTIPLICATIONS, BARRIERS, LOADED, STAGED, STORED = "multiplications", "barriers", "loaded", "staged", "stored"

# How much an equation counts: multiplications and barriers survive the compiler as they are, while it may merge
# accesses, and threads outside of a condition load less than others.
_WEIGHTS = {MULTIPLICATIONS: 3.0, BARRIERS: 1.0, LOADED: 0.5, STAGED: 0.5, STORED: 0.5}
_MOVED = {"LDG": LOADED, "LDGSTS": LOADED, "STS": STAGED, "STG": STORED}
_MMA = {"16816": 64, "1688": 32, "1684": 16}  # multiplications of each thread of a warp, by shape


def find_trips(code: Code, done: Mapping[str, float]) -> None:
    """Set the trips of all loops of a function.

    Args:
        code: the function.
        done: by a thread, by the names above: multiplications, barriers, and bytes.
    """
    loops: dict[int, Loop] = {}
    once: defaultdict[str, float] = defaultdict(float)
    more: defaultdict[tuple[str, int], float] = defaultdict(float)
    for instruction, around in instructions(code):
        loops |= {id(loop): loop for loop in around}
        name, amount = _does(instruction)
        once[name] += amount
        for loop in around:
            more[name, id(loop)] += amount
    known = [name for name in _WEIGHTS if done.get(name) and once[name]]
    if not loops or not known:
        return
    factors = np.array([_WEIGHTS[name] / done[name] for name in known])
    rows = np.array([[more[name, loop] for loop in loops] for name in known])
    values = np.array([done[name] - once[name] for name in known])
    extra = nonnegative(rows * factors[:, None], values * factors).tolist()
    runs = dict(zip(loops, extra, strict=True))
    _assign(code, 1.0, runs)


def nonnegative(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x of no negative number for which |rows x - values| is least.

    C. Lawson, R. Hanson, "Solving Least Squares Problems", 1974, chapter 23; SciPy has it too, but takes a second to
    be imported.
    """
    x = np.zeros(rows.shape[1])
    free = np.zeros(len(x), bool)
    for _ in range(3 * len(x)):
        slope = np.where(free, 0.0, rows.T @ (values - rows @ x))
        if slope.max(initial=0.0) <= 1e-10 * (1 + np.abs(values).sum()):
            break
        free[slope.argmax()] = True
        while free.any():
            found = np.zeros(len(x))
            found[free] = np.linalg.lstsq(rows[:, free], values, rcond=None)[0]
            below = free & (found <= 0)
            if not below.any():
                x = found
                break
            x += np.min(x[below] / (x[below] - found[below])) * (found - x)
            free &= x > 1e-12
    return x


def _assign(code: Code, times: float, extra: Mapping[int, float]) -> None:
    for part in code:
        if isinstance(part, Loop):
            part.trips = 1 + extra[id(part)] / times if id(part) in extra else 1.0
            _assign(part.body, times * part.trips, extra)


def _does(instruction: Operation) -> tuple[str, float]:
    match instruction.name:
        case "FFMA" | "FMUL":
            return MULTIPLICATIONS, 1
        case "HFMA2" if "MMA" not in instruction.modifiers:  # that one moves constants
            return MULTIPLICATIONS, 2
        case "HMMA":
            return MULTIPLICATIONS, _MMA.get(instruction.modifiers[0], 64)
        case "BAR":
            return BARRIERS, 1
        case name if name in _MOVED:
            return _MOVED[name], 4 * instruction.words
    return "", 0
