"""What goes over the network to a worker and back: JSON and machine code, nothing that could run by being read."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from tvmconv import jsonfile
from tvmconv.compiler.program import ArrayType, Launch, Program, Step
from tvmconv.errors import DeviceError
from tvmconv.jsonfile import Value
from tvmconv.measuring.outcome import Outcome
from tvmconv.tensor_map import TensorMap

OPEN = "tvmconv.open"  # the worker's functions
MEASURE = "tvmconv.measure"
LEAST_TIMEOUT, MOST_TIMEOUT = 1e-3, 1e6  # seconds
MAX_GRID = (1 << 31) - 1  # blocks along an axis; a block and a cluster have far fewer
MAX_SHARED_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 40
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ARRAY_DTYPES = ("float64", "float32", "float16", "bfloat16", *_INTEGERS, "bool")


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
        """Read the order that `encode` wrote.

        Raises:
            DeviceError: the text is none, or a number in it is out of range.
        """
        with jsonfile.refused("the order is none of tvmconv's", DeviceError):
            data = jsonfile.parse(text)
            order: Order = data.decode(cls)
            data["seed"].integer(0)
            data["timeout"].number(LEAST_TIMEOUT, MOST_TIMEOUT)
            data["memory_limit"].integer(1)
            return order


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
    """Read the program and the best time that `encode_program` wrote.

    Raises:
        CompileError: TMA cannot take a tensor map.
        DeviceError: the header is malformed, a number in it is out of range, a tensor map is of no parameter, or there
            is not as much code as the header says.
    """
    with jsonfile.refused("the program is none of tvmconv's", DeviceError):
        return _program(jsonfile.parse(header), code)


def _program(header: Value, code: bytes) -> tuple[Program, float | None]:
    sizes = [size.integer(0, len(code)) for size in header["codes"].elements()]
    if len(code) != sum(sizes):
        raise DeviceError(f"{len(code)} bytes of code: expected {sum(sizes)}")
    codes = [code[end - size : end] for end, size in zip(accumulate(sizes), sizes, strict=True)]
    arrays, scratch = _array_types(header["arrays"]), _array_types(header["scratch"])
    header["arrays"].check(bool(arrays), "at least one array")
    steps = tuple(_step(step, codes, len(arrays), len(arrays) + len(scratch)) for step in header["steps"].elements())
    header["steps"].check(bool(steps), "at least one step")
    prepared, final, best = (header.get(name) for name in ("prepared", "final", "best"))
    program = Program(steps, arrays, scratch, prepared.integer(0, len(steps)) if prepared else 0)
    if final and final.decode(bool):
        return program, None
    return program, math.inf if best is None or best.value is None else best.number(0)


def _step(data: Value, codes: Sequence[bytes], num_arrays: int, num_buffers: int) -> Step:
    """Read a step.

    Args:
        data: what `_plain` wrote.
        codes: one of which is the step's.
        num_arrays: how many arguments the program has.
        num_buffers: how many arguments and scratch arrays it has.
    """
    name = data["name"].decode(str)
    arguments = tuple(place.integer(0, num_buffers - 1) for place in data["arguments"].elements())
    tensor_maps = []
    for position, told in (_pair(pair) for pair in data["tensor_maps"].elements()):
        tensor_map = TensorMap.of(told.value)
        if not 0 <= position.integer() < len(arguments):
            raise DeviceError(f"{tensor_map}, is no parameter of {name}: there is none at place {position.value}")
        tensor_maps.append((position.integer(), tensor_map))
    constants = (_pair(pair) for pair in data["constants"].elements())
    return Step(
        code=codes[data["code"].integer(0, len(codes) - 1)],
        name=name,
        launch=Launch(_extents(data["grid"]), _extents(data["block"]), _extents(data["cluster"])),
        arguments=arguments,
        shared_bytes=data["shared_bytes"].integer(0, MAX_SHARED_BYTES),
        dynamic_shared_bytes=data["dynamic_shared_bytes"].integer(0, MAX_SHARED_BYTES),
        constants=tuple((array.integer(0, num_arrays - 1), symbol.decode(str)) for array, symbol in constants),
        textures=tuple(place.integer(0, num_arrays - 1) for place in data["textures"].elements()),
        tensor_maps=tuple(tensor_maps),
        overlaps=data["overlaps"].decode(bool),
    )


def _pair(data: Value) -> tuple[Value, Value]:
    elements = data.elements()
    data.check(len(elements) == 2, "a list of 2")
    return elements[0], elements[1]


def _extents(data: Value) -> tuple[int, int, int]:
    """Read x, y and z of a grid, a block or a cluster."""
    data.check(len(data.elements()) == 3, "a list of 3")
    x, y, z = (extent.integer(1, MAX_GRID) for extent in data.elements())
    return x, y, z


def _array_types(data: Value) -> tuple[ArrayType, ...]:
    return tuple(_array_type(each) for each in data.elements())


def _array_type(data: Value) -> ArrayType:
    shape, dtype = _pair(data)
    extents = tuple(extent.integer(1, MAX_ARRAY_ELEMENTS) for extent in shape.elements())
    shape.check(math.prod(extents) <= MAX_ARRAY_ELEMENTS, f"at most {MAX_ARRAY_ELEMENTS} elements")
    dtype.check(dtype.decode(str) in ARRAY_DTYPES, f"one of {', '.join(ARRAY_DTYPES)}")
    return ArrayType(extents, dtype.value)


def encode_outcome(outcome: Outcome) -> str:
    """An outcome as JSON; a deviation that is not finite becomes none."""
    told: dict[str, Any] = asdict(outcome)
    if outcome.deviation is not None and not math.isfinite(outcome.deviation):
        told["deviation"] = None
    return json.dumps(told, allow_nan=False)


def decode_outcome(text: str) -> Outcome:
    """Read the outcome that `encode_outcome` wrote.

    Raises:
        DeviceError: the text is none, or no kernel takes such times.
    """
    with jsonfile.refused("the worker's answer is none of tvmconv's", DeviceError):
        data = jsonfile.parse(text)
        outcome: Outcome = data.decode(Outcome)
        for name, value in (("deviation", outcome.deviation), ("seconds", outcome.seconds)):
            if value is not None:
                data[name].check(value >= 0, "a number of at least 0")
        sound = all(seconds > 0 for seconds in outcome.times)
        data["times"].check(sound and bool(outcome.times or outcome.error), "times that a kernel can take")
    return outcome
