"""Serialization of messages to and from a worker, as JSON and machine code without pickled objects."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, TypedDict

from tvmconv import compat, jsonfile
from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable, LaunchConfig
from tvmconv.errors import DeviceError
from tvmconv.jsonfile import JsonValue
from tvmconv.measure.results import RunnerResult
from tvmconv.tensor_map import TensorMap
from tvmconv.workloads.dtypes import FLOAT8_DTYPES

OPEN_FUNCTION = "tvmconv.open"  # packed functions of the worker
MEASURE_FUNCTION = "tvmconv.measure"
MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS = 1e-3, 1e6
MAX_GRID_EXTENT = (1 << 31) - 1  # blocks along x; other extents are smaller
MAX_SHARED_BYTES = 1 << 24
MAX_ARRAY_ELEMENTS = 1 << 40
_INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
ARRAY_DTYPES = ("float64", "float32", "float16", "bfloat16", *FLOAT8_DTYPES, *_INTEGERS, "bool")


@dataclass(frozen=True)
class SessionRequest:
    """Request of a session with a worker."""

    workload: str
    seed: int  # seed from which the worker generates the inputs, and computes the reference
    timeout_seconds: float  # time limit of one executable in seconds
    memory_limit_bytes: int  # host memory that the worker's runner process may use, in bytes
    verification_mode: str = "auto"  # verification mode, one of `tvmconv.verification.VERIFICATION_MODES`

    def encode(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SessionRequest:
        """Parse the result of `encode`."""
        with jsonfile.translate_json_errors("the request is not a session request of tvmconv", DeviceError):
            data = jsonfile.parse_json(text)
            request: SessionRequest = data.decode(cls)
            data["seed"].decode_integer(0)
            data["timeout_seconds"].decode_number(MIN_TIMEOUT_SECONDS, MAX_TIMEOUT_SECONDS)
            data["memory_limit_bytes"].decode_integer(1)
            return request


class _KernelHeader(TypedDict):
    """A device function without its code and its resources, which devices do not need."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    arguments: tuple[int, ...]
    shared_bytes: int
    dynamic_shared_bytes: int
    constants: tuple[tuple[int, str], ...]
    textures: tuple[int, ...]
    tensor_maps: tuple[tuple[int, Any], ...]
    uses_pdl: bool
    code: int  # index of the code


# Fields of `CompiledKernel` that the header has unchanged.
_PLAIN_FIELDS = ("name", "arguments", "shared_bytes", "dynamic_shared_bytes", "constants", "textures", "uses_pdl")


def encode_executable(executable: Executable, best_seconds: float | None) -> tuple[str, bytes]:
    """Return a JSON header and the code of an executable; `best_seconds` is that of `Runner.submit`.

    Code that several device functions share is included once.
    """
    codes = list(dict.fromkeys(kernel.code for kernel in executable.kernels))
    kernels = [
        {
            **{name: getattr(kernel, name) for name in _PLAIN_FIELDS},
            **vars(kernel.launch),
            "tensor_maps": [(position, tensor_map.to_dict()) for position, tensor_map in kernel.tensor_maps],
            "code": codes.index(kernel.code),
        }
        for kernel in executable.kernels
    ]
    header = {
        "codes": [len(code) for code in codes],
        "kernels": kernels,
        "arrays": [(array.shape, array.dtype) for array in executable.arrays],
        "workspace": [(array.shape, array.dtype) for array in executable.workspace],
        "num_prepack_kernels": executable.num_prepack_kernels,
        "best": best_seconds if best_seconds is not None and math.isfinite(best_seconds) else None,
        "final": best_seconds is None,
    }
    return json.dumps(header), b"".join(codes)


def decode_executable(header: str, code: bytes) -> tuple[Executable, float | None]:
    """Parse the executable and the best time that `encode_executable` wrote.

    Raises `CompileError` if a tensor map is not supported, and `DeviceError` for any other fault of the data.
    """
    with jsonfile.translate_json_errors("the data are not an executable of tvmconv", DeviceError):
        return _parse_executable(jsonfile.parse_json(header).rename_members(compat.EXECUTABLE_KEYS), code)


def _parse_executable(header: JsonValue, code: bytes) -> tuple[Executable, float | None]:
    sizes = [size.decode_integer(0, len(code)) for size in header["codes"].elements()]
    if len(code) != sum(sizes):
        raise DeviceError(f"{len(code)} bytes of code: expected {sum(sizes)}")
    codes = [code[stop - size : stop] for stop, size in zip(accumulate(sizes), sizes, strict=True)]
    arrays, workspace = (
        tuple(_parse_array_type(value) for value in header[name].elements()) for name in ("arrays", "workspace")
    )
    header["arrays"].check(bool(arrays), "at least one array")
    kernels = tuple(
        _parse_kernel(value.rename_members(compat.KERNEL_KEYS), codes, len(arrays), len(arrays) + len(workspace))
        for value in header["kernels"].elements()
    )
    header["kernels"].check(bool(kernels), "at least one step")
    prepack_count, is_final, best_seconds = (header.get(name) for name in ("num_prepack_kernels", "final", "best"))
    num_prepack_kernels = prepack_count.decode_integer(0, len(kernels)) if prepack_count else 0
    executable = Executable(kernels, arrays, workspace, num_prepack_kernels)
    if is_final and is_final.decode(bool):
        return executable, None
    return executable, math.inf if best_seconds is None or best_seconds.value is None else best_seconds.decode_number(0)


def _parse_kernel(data: JsonValue, codes: Sequence[bytes], num_arrays: int, num_buffers: int) -> CompiledKernel:
    """Parse a device function of an executable with some arrays; `num_buffers` includes the workspace."""
    header: dict[str, Any] = data.decode(_KernelHeader)
    extents = [*header["grid"], *header["block"], *header["cluster"]]
    array_indices = [*header["textures"], *(index for index, _ in header["constants"])]
    for name, numbers, low, high in (
        ("a size in the launch", extents, 1, MAX_GRID_EXTENT),
        ("an argument", header["arguments"], 0, num_buffers - 1),
        ("an array", array_indices, 0, num_arrays - 1),
        ("shared memory", [header["shared_bytes"], header["dynamic_shared_bytes"]], 0, MAX_SHARED_BYTES),
        ("a code", [header["code"]], 0, len(codes) - 1),
    ):
        data.check(all(low <= number <= high for number in numbers), f"{name} from {low} to {high}")
    num_parameters, tensor_maps = len(header["arguments"]), []
    for position, map_data in header["tensor_maps"]:
        tensor_map = TensorMap.from_dict(map_data)
        if not 0 <= position < num_parameters:
            place = f"is at position {position}, but {header['name']} has {num_parameters} parameters"
            raise DeviceError(f"{tensor_map}, {place}")
        tensor_maps.append((position, tensor_map))
    fields = {name: header[name] for name in _PLAIN_FIELDS}
    launch = LaunchConfig(header["grid"], header["block"], header["cluster"])
    return CompiledKernel(code=codes[header["code"]], launch=launch, tensor_maps=tuple(tensor_maps), **fields)


def _parse_array_type(data: JsonValue) -> ArrayType:
    extents, dtype = data.decode(tuple[tuple[int, ...], str])
    is_size_valid = all(extent >= 1 for extent in extents) and math.prod(extents) <= MAX_ARRAY_ELEMENTS
    data.check(is_size_valid, f"a shape of 1 to {MAX_ARRAY_ELEMENTS} elements")
    data.check(dtype in ARRAY_DTYPES, f"one of {', '.join(ARRAY_DTYPES)}")
    return ArrayType(extents, dtype)


def encode_result(result: RunnerResult) -> str:
    """Return a result as JSON; a relative error that is not finite becomes null."""
    data: dict[str, Any] = asdict(result)
    if result.relative_error is not None and not math.isfinite(result.relative_error):
        data["relative_error"] = None
    return json.dumps(data, allow_nan=False)


def decode_result(text: str) -> RunnerResult:
    """Parse the result that `encode_result` wrote."""
    with jsonfile.translate_json_errors("the worker's answer is not a result of tvmconv", DeviceError):
        data = jsonfile.parse_json(text)
        result: RunnerResult = data.decode(RunnerResult)
        for name, value in (("relative_error", result.relative_error), ("seconds", result.seconds)):
            if value is not None:
                data[name].check(value >= 0, "a number of at least 0")
        is_plausible = all(seconds > 0 for seconds in result.times)
        data["times"].check(is_plausible and bool(result.times or result.error), "times that a kernel can take")
    return result
