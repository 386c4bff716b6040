"""What goes over the network to a worker and back: JSON and machine code, nothing that could run by being read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from tvmconv.compiler.program import ArrayType, Launch, Program
from tvmconv.measuring.outcome import ErrorKind, Outcome

OPEN = "tvmconv.open"  # the worker's functions
MEASURE = "tvmconv.measure"


@dataclass(frozen=True)
class Order:
    """What a session measures programs for.

    Attributes:
        workload: its text.
        seed: of the inputs; the worker draws them and computes the reference by itself.
        timeout: seconds for one program.
        memory_limit: bytes of host memory that the worker's device process may hold.
    """

    workload: str
    seed: int
    timeout: float
    memory_limit: int

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Order:
        """The order that `encode` wrote."""
        return cls(**json.loads(text))


def encode_program(program: Program, best: float) -> str:
    """A program without its code, and the best time so far (seconds, or `math.inf`), as JSON."""
    launch = program.launch
    return json.dumps(
        {
            "name": program.name,
            "grid": launch.grid,
            "block": launch.block,
            "arrays": [(array.shape, array.dtype) for array in program.arrays],
            "arguments": program.arguments,
            "shared_bytes": program.shared_bytes,
            "constants": program.constants,
            "textures": program.textures,
            "best": best if math.isfinite(best) else None,
        }
    )


def decode_program(text: str, code: bytes) -> tuple[Program, float]:
    """The program and the best time that `encode_program` wrote."""
    told = json.loads(text)
    program = Program(
        code=code,
        name=told["name"],
        launch=Launch(tuple(told["grid"]), tuple(told["block"])),
        arrays=tuple(ArrayType(tuple(shape), dtype) for shape, dtype in told["arrays"]),
        arguments=tuple(told["arguments"]),
        shared_bytes=told["shared_bytes"],
        constants=tuple((int(array), str(symbol)) for array, symbol in told["constants"]),
        textures=tuple(told["textures"]),
    )
    return program, math.inf if told["best"] is None else told["best"]


def encode_outcome(outcome: Outcome) -> str:
    """An outcome as JSON; a deviation that is not finite becomes none."""
    told: dict[str, Any] = asdict(outcome)
    if outcome.deviation is not None and not math.isfinite(outcome.deviation):
        told["deviation"] = None
    return json.dumps(told, allow_nan=False)


def decode_outcome(text: str) -> Outcome:
    """The outcome that `encode_outcome` wrote."""
    told = json.loads(text)
    return Outcome(**{**told, "times": tuple(told["times"]), "error": ErrorKind(told["error"])})
