"""A kernel as a folder: source, binary, library, a description for programs and one for people."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmconv.compiler.lower import Lowered, lower
from tvmconv.errors import CompileError
from tvmconv.export.link import link
from tvmconv.export.usage import FILES, readme
from tvmconv.version import VERSION

if TYPE_CHECKING:
    from tvmconv.kernel import Kernel
    from tvmconv.verify import Verification


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
    and a `README.md` of the call whose examples run. Files of these names that are there already are replaced.

    Args:
        kernel: what to export.
        folder: where to; made if it is not there.
        verification: of this very kernel.

    Raises:
        CompileError: NVRTC rejects the kernel.
        OSError: the folder cannot be written.
    """
    lowered = lower(kernel.tir, kernel.device.target())
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)  # of an earlier export, perhaps for another target
    no_library = None
    if kernel.device.kind == "cuda":
        (folder / "kernel.cu").write_text(lowered.source, encoding="utf-8")
        (folder / "kernel.cubin").write_bytes(lowered.cubin.image)
        names = ["kernel.cu", "kernel.cubin"]
        try:
            link(lowered, folder / "kernel.so")
            names.append("kernel.so")
        except CompileError as error:
            no_library = str(error)
    else:
        (folder / "kernel.cl").write_text(lowered.source, encoding="utf-8")
        names = ["kernel.cl"]
        no_library = "TVM's wheel has no OpenCL runtime"
    facts = describe(kernel, lowered, verification)
    (folder / "kernel.json").write_text(_one_line_a_key(facts), encoding="utf-8")
    (folder / "README.md").write_text(readme(kernel.workload, facts, names), encoding="utf-8")
    return Exported(tuple(folder / name for name in (*names, "kernel.json", "README.md")), no_library)


def describe(kernel: Kernel, lowered: Lowered, verification: Verification | None) -> dict[str, Any]:
    """What `kernel.json` says: all that it takes to call the kernel, and what is known of it.

    `arguments` are those of the library's `main`, in their order, each with the space that it lies in (`global`,
    `constant` or `texture`) and, in CUDA's constant memory, the symbol to fill. `parameters` names those that the
    device function takes the address or the texture object of, in its order. Times are in seconds.
    """
    from importlib import metadata

    workload, record, program = kernel.workload, kernel.record, lowered.program
    resources = kernel.resources if kernel.device.arch else None
    return {
        "workload": workload.text,
        "schedule": kernel.schedule.name,
        "config": kernel.config,
        "target": {"kind": kernel.device.kind, "arch": kernel.device.arch},
        "function": lowered.name,
        "arguments": [
            {
                "name": name,
                "dtype": array.dtype,
                "shape": array.shape,
                "space": lowered.spaces[name],
                "symbol": dict(program.constants).get(i),
            }
            for i, (name, array) in enumerate(zip(workload.argument_names, program.arrays, strict=True))
        ],
        "parameters": [workload.argument_names[i] for i in program.arguments],
        "grid": lowered.launch.grid,
        "block": lowered.launch.block,
        "shared_bytes": lowered.shared_bytes,
        "registers": resources.registers if resources else None,
        "spills": resources.spills if resources else None,
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


def _one_line_a_key(facts: dict[str, Any]) -> str:
    lines = (f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in facts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
