"""The README of an exported kernel: what it computes, and how to call it, with examples that run as they are."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.export.examples import examples
from tvmconv.knobs import format_value

if TYPE_CHECKING:
    from tvmconv.workloads import Workload

FILES = {
    "kernel.cu": "the device function, CUDA C++",
    "kernel.cubin": "its machine code, as the CUDA driver loads it",
    "kernel.so": "the machine code, and host code that checks arguments and launches, for TVM's runtime",
    "kernel.cl": "the device function, OpenCL C",
    "kernel.json": "all that this page says, for programs",
    "README.md": "this page",
}
_READ = {"global": "read", "constant": "read, from constant memory", "texture": "read, through a texture object"}


def readme(workload: Workload, facts: Mapping[str, Any], files: Sequence[str]) -> str:
    """The page as Markdown.

    Args:
        workload: what the kernel computes.
        facts: as `kernel.json` has them.
        files: names of the files beside the page, without `kernel.json`.
    """
    target = facts["target"]
    place = f"CUDA, {target['arch']}" if target["kind"] == "cuda" else "OpenCL"
    sections = [
        f"# {workload.text}",
        f"Schedule `{facts['schedule']}` of tvmconv {facts['versions']['tvmconv']}, compiled for {place}.",
        _meaning(workload),
        "## Arguments",
        _arguments(facts),
        "## Launch",
        _launch(facts),
        "## Measured",
        _measured(facts),
        "## Files",
        "\n".join(f"* `{name}`: {FILES[name]}" for name in (*files, "kernel.json")),
        "## Call",
        "Each example is complete and runs in this folder.",
    ]
    return "\n\n".join([*sections, *examples(facts, files)]) + "\n"


def _meaning(workload: Workload) -> str:
    """The workload's own words on what it computes: its docstring up to the attributes."""
    return (inspect.getdoc(type(workload)) or "").partition("\nAttributes:")[0].strip()


def _arguments(facts: Mapping[str, Any]) -> str:
    rows = ["| argument | dtype | shape | |", "| --- | --- | --- | --- |"]
    notes = ["All are C-contiguous, without gaps, on the device."]
    output = facts["arguments"][-1]
    for argument in facts["arguments"]:
        name, shape = argument["name"], " × ".join(map(str, argument["shape"]))
        role = "written, every element" if argument is output else _READ[argument["space"]]
        rows.append(f"| {name} | {argument['dtype']} | {shape} | {role} |")
        if argument["symbol"]:
            notes.append(f"{name} is no parameter: it is copied to the symbol `{argument['symbol']}` before a launch.")
        if argument["space"] == "texture":
            notes.append(
                f"The texture object over {name} is two-dimensional, as high as its first axis and as wide as all "
                "behind it, of single elements (no filter, coordinates not normalised), with a border of zeros."
            )
    return "\n".join(rows) + "\n\n" + " ".join(notes)


def _launch(facts: Mapping[str, Any]) -> str:
    grid, block = ("·".join(map(str, facts[name])) for name in ("grid", "block"))
    registers = "" if facts["registers"] is None else f", {facts['registers']} registers a thread"
    knobs = ", ".join(f"`{name}={format_value(value)}`" for name, value in facts["config"].items())
    textures = [argument["name"] for argument in facts["arguments"] if argument["space"] == "texture"]
    parameters = (f"{name}'s {'texture object' if name in textures else 'address'}" for name in facts["parameters"])
    return (
        f"Grid {grid}, block {block}; {facts['shared_bytes']:,} bytes of static shared memory a block{registers}; no "
        f"dynamic shared memory. The device function is `{facts['function']}`; its parameters are, in this order, "
        f"{', '.join(parameters)}." + (f" Knobs: {knobs}." if knobs else "")
    )


def _measured(facts: Mapping[str, Any]) -> str:
    measured, verified = facts["measured"], facts["verified"]
    said = ["The time of this kernel was not measured."]
    if measured:
        said = [
            f"{measured['seconds'] * 1e6:,.4g} µs ({measured['gflops']:,.4g} GFLOP/s), the median on "
            f"{measured['device']}, {_date(measured['timestamp'])}: from the tuning log that chose this kernel."
        ]
        if measured["relative_error"] is not None:
            said.append(f"Its relative L2 error then, against a float64 reference: {measured['relative_error']:.2g}.")
    if verified:
        error = f"{verified['relative_error']:.2g}"
        said.append(f"Run and compared with a float64 reference on {verified['device']}: relative L2 error {error}.")
    else:
        said.append("These files were compiled without being run.")
    return " ".join(said)


def _date(timestamp: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc).date().isoformat()
    except (OverflowError, OSError, ValueError):  # somebody else's log
        return "at an unknown date"
