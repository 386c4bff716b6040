"""What goes over the network to a worker and back: JSON and machine code, nothing that could run by being read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from tvmconv.compiler.program import ArrayType, Launch, Program, Step
from tvmconv.errors import DeviceError
from tvmconv.measuring.outcome import ErrorKind, Outcome
from tvmconv.tensor_map import TensorMap
from tvmconv.workloads.text import quote

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
        verify: whether all outputs are compared, or a sample; one of `tvmconv.verify.MODES`.
    """

    workload: str
    seed: int
    timeout: float
    memory_limit: int
    verify: str = "auto"

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Order:
        """The order that `encode` wrote."""
        return cls(**json.loads(text))


def encode_program(program: Program, best: float | None) -> tuple[str, bytes]:
    """A program and the best time so far (as for `Runner.submit`): a header in JSON, and the code of all steps.

    Code that several steps have in common is sent once.
    """
    codes = list(dict.fromkeys(step.code for step in program.steps))
    header = {
        "codes": [len(code) for code in codes],
        "steps": [{**_plain(step), "code": codes.index(step.code)} for step in program.steps],
        "arrays": [(array.shape, array.dtype) for array in program.arrays],
        "scratch": [(array.shape, array.dtype) for array in program.scratch],
        "prepared": program.prepared,
        "best": best if best is not None and math.isfinite(best) else None,
        "final": best is None,
    }
    return json.dumps(header), b"".join(codes)


def _plain(step: Step) -> dict[str, Any]:
    """A step without its code and its resources, which no device asks for."""
    return {
        "name": step.name,
        "grid": step.launch.grid,
        "block": step.launch.block,
        "cluster": step.launch.cluster,
        "arguments": step.arguments,
        "shared_bytes": step.shared_bytes,
        "dynamic_shared_bytes": step.dynamic_shared_bytes,
        "constants": step.constants,
        "textures": step.textures,
        "tensor_maps": [(position, told.plain()) for position, told in step.tensor_maps],
        "overlaps": step.overlaps,
    }


def decode_program(header: str, code: bytes) -> tuple[Program, float | None]:
    """The program and the best time that `encode_program` wrote.

    Raises:
        CompileError: TMA cannot take a tensor map.
        DeviceError: a tensor map is of no parameter, or there is not as much code as the header says.
    """
    told = json.loads(header)
    ends = list(accumulate(told["codes"]))
    if len(code) != sum(told["codes"]):
        raise DeviceError(f"{len(code)} bytes of code: expected {sum(told['codes'])}")
    codes = [code[end - size : end] for end, size in zip(ends, told["codes"], strict=True)]
    program = Program(
        steps=tuple(_step(step, codes) for step in told["steps"]),
        arrays=_array_types(told["arrays"]),
        scratch=_array_types(told["scratch"]),
        prepared=int(told.get("prepared", 0)),
    )
    if told.get("final"):
        return program, None
    return program, math.inf if told["best"] is None else told["best"]


def _step(told: dict[str, Any], codes: Sequence[bytes]) -> Step:
    tensor_maps = tuple((int(position), TensorMap.of(each)) for position, each in told["tensor_maps"])
    for position, each in tensor_maps:
        if not 0 <= position < len(told["arguments"]):
            raise DeviceError(f"{each}, is no parameter of {told['name']}: there is none at place {position}")
    return Step(
        code=codes[told["code"]],
        name=told["name"],
        launch=Launch(tuple(told["grid"]), tuple(told["block"]), tuple(told["cluster"])),
        arguments=tuple(told["arguments"]),
        shared_bytes=told["shared_bytes"],
        dynamic_shared_bytes=told["dynamic_shared_bytes"],
        constants=tuple((int(array), str(symbol)) for array, symbol in told["constants"]),
        textures=tuple(told["textures"]),
        tensor_maps=tensor_maps,
        overlaps=bool(told["overlaps"]),
    )


def _array_types(told: Sequence[tuple[Sequence[int], str]]) -> tuple[ArrayType, ...]:
    return tuple(ArrayType(tuple(shape), dtype) for shape, dtype in told)


def encode_outcome(outcome: Outcome) -> str:
    """An outcome as JSON; a deviation that is not finite becomes none."""
    told: dict[str, Any] = asdict(outcome)
    if outcome.deviation is not None and not math.isfinite(outcome.deviation):
        told["deviation"] = None
    return json.dumps(told, allow_nan=False)


def decode_outcome(text: str) -> Outcome:
    """The outcome that `encode_outcome` wrote.

    Raises:
        DeviceError: it is none, or no kernel takes such times.
    """
    try:
        told = json.loads(text)
        outcome = Outcome(**{**told, "times": tuple(told["times"]), "error": ErrorKind(told["error"])})
        sound = all(0 < seconds < math.inf for seconds in outcome.times)
    except (ValueError, LookupError, TypeError) as error:
        raise DeviceError(f"the worker's answer is none: {quote(text)}") from error
    if not sound or not (outcome.times or outcome.error):
        raise DeviceError(f"the worker's answer has times that no kernel takes: {quote(outcome.times)}")
    return outcome
