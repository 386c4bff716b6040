"""A kernel as a folder: source, binary, library, a description for programs and one for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.compiler import nvrtc
from tvmconv.errors import CompileError, Error
from tvmconv.export.formats import formats
from tvmconv.export.formats.base import Format
from tvmconv.export.usage import JSON, README, readme
from tvmconv.version import VERSION

if TYPE_CHECKING:
    from tvmconv.compiler.program import Step
    from tvmconv.kernel import Kernel
    from tvmconv.verify import Verification

LIBRARY = "kernel.so"


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: in the order in which they were written.
        no_library: why there is no shared library among them; None if there is one.
    """

    files: tuple[Path, ...]
    no_library: str | None


def export(kernel: Kernel, folder: Path, *, verification: Verification | None = None) -> Exported:
    """Write a kernel to a folder.

    The files are `kernel.cu` and `kernel.cubin`, or `kernel.cl`; `kernel.so` for CUDA, where a C++ compiler can link
    it and every argument lies in global memory (TVM's wheel has no OpenCL runtime that could run one); `kernel.json`,
    and a `README.md` of the call whose examples run. Files of these names that an earlier export wrote are replaced.

    Args:
        kernel: what to export.
        folder: where to; made if it is not there.
        verification: of this very kernel.

    Raises:
        CompileError: NVRTC rejects the kernel.
        Error: the folder has a README of something else, or a kernel for another kind of device.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / README).exists() and not (folder / JSON).exists():
        raise Error(f"{folder / README} is of something else than a kernel: name another folder")
    if (kind := _exported_kind(folder)) not in (None, kernel.device.kind):
        raise Error(
            f"{folder} holds a kernel for {kind}, not for {kernel.device.kind}: name another folder, or empty it"
        )
    for name in (*(each.name for each in formats()), README, JSON):
        (folder / name).unlink(missing_ok=True)  # of an earlier export
    written: list[Format] = []
    missing: dict[str, str] = {}
    for each in formats():
        if kernel.device.kind in each.kinds:
            try:
                each.write(kernel, folder / each.name)
                written.append(each)
            except CompileError as error:
                if not each.optional:
                    raise
                missing[each.name] = str(error)
    facts = describe(kernel, verification)
    (folder / JSON).write_text(_one_line_a_key(facts), encoding="utf-8")
    (folder / README).write_text(readme(kernel.workload, facts, written), encoding="utf-8")
    names = (*(each.name for each in written), JSON, README)
    return Exported(tuple(folder / name for name in names), missing.get(LIBRARY))


def _exported_kind(folder: Path) -> str | None:
    """Return the kind of device that the kernel in a folder is for; None where no export is there."""
    try:
        return str(json.loads((folder / JSON).read_text(encoding="utf-8"))["target"]["kind"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def describe(kernel: Kernel, verification: Verification | None) -> dict[str, Any]:
    """What `kernel.json` says: all that it takes to call the kernel, and what is known of it.

    `arguments` are those of the library's `main`, in their order, each with the space that it lies in (`global`,
    `constant` or `texture`) and, in CUDA's constant memory, the symbol to fill. `steps` are the device functions in the
    order of their launches; `parameters` names those arguments and `scratch` memory that one takes the address or the
    texture object of, in its order; for those at the places that `tensor_maps` tells it takes a tensor map
    (`tvmconv.tensor_map`). The first `prepared` of them read nothing but the weight: who calls again with the same one
    may leave them out. What a single step has is beside `steps`, too. Times are in seconds. `code` is the architecture
    that `kernel.cu` has to be compiled for, where it is not `arch`.
    """
    from importlib import metadata

    workload, record, program = kernel.workload, kernel.record, kernel.program
    symbols = {i: symbol for step in program.steps for i, symbol in step.constants}
    names = [*workload.argument_names, *(f"scratch{i}" for i in range(len(program.scratch)))]
    steps = [_step(step, names) for step in program.steps]
    code = kernel.device.arch and nvrtc.specific(kernel.source, kernel.device.arch)
    return {
        "workload": workload.text,
        "schedule": kernel.schedule.name,
        "config": kernel.config,
        "target": {"kind": kernel.device.kind, "arch": kernel.device.arch, "code": code},
        "arguments": [
            {
                "name": name,
                "dtype": array.dtype,
                "shape": array.shape,
                "space": kernel.spaces[name],
                "symbol": symbols.get(i),
            }
            for i, (name, array) in enumerate(zip(workload.argument_names, program.arrays, strict=True))
        ],
        "scratch": [
            {"name": name, "bytes": array.nbytes}
            for name, array in zip(names[len(program.arrays) :], program.scratch, strict=True)
        ],
        "steps": steps,
        "prepared": program.prepared,
        **(steps[0] if len(steps) == 1 else {}),
        "measured": record
        and {
            "device": record.device,
            "seconds": record.cost,
            "gflops": record.gflops,
            "relative_error": record.deviation,
            "timestamp": record.timestamp,
        },
        "verified": verification and {"device": kernel.device.name, "relative_error": verification.error},
        "versions": {"tvmconv": VERSION, "apache-tvm": metadata.version("apache-tvm")},
    }


def _step(step: Step, names: Sequence[str]) -> dict[str, Any]:
    return {
        "function": step.name,
        "parameters": [names[i] for i in step.arguments],
        "grid": step.launch.grid,
        "block": step.launch.block,
        "cluster": step.launch.cluster,
        "shared_bytes": step.shared_bytes,
        "dynamic_shared_bytes": step.dynamic_shared_bytes,
        "tensor_maps": [{"parameter": position, **told.plain()} for position, told in step.tensor_maps],
        "registers": step.resources.registers if step.resources else None,
        "spills": step.resources.spills if step.resources else None,
    }


def _one_line_a_key(facts: dict[str, Any]) -> str:
    lines = (f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
