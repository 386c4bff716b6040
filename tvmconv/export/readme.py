"""README of an exported kernel, with complete examples of calls."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.export.formats.base import ExportFormat
from tvmconv.space import format_value

if TYPE_CHECKING:
    from tvmconv.workloads import Workload

JSON_NAME, README_NAME = "kernel.json", "README.md"
_ROLE_BY_SCOPE = {
    "global": "read",
    "constant": "read, from constant memory",
    "texture": "read, through a texture object",
}


def format_readme(workload: Workload, description: Mapping[str, Any], files: Sequence[ExportFormat]) -> str:
    """Return the README as Markdown."""
    target = description["target"]
    target_text = f"CUDA, {target['code']}" if target["kind"] == "cuda" else "OpenCL"
    sections = [
        f"# {workload.text}",
        f"Schedule `{description['schedule']}` of tvmconv {description['versions']['tvmconv']}, "
        f"compiled for {target_text}.",
        (inspect.getdoc(type(workload)) or "").partition("\nAttributes:")[0].strip(),
        "## Arguments",
        _format_arguments(description),
        "## Launch",
        _format_launch(description),
        "## Measured",
        _format_measurement(description),
        "## Files",
        "\n".join(
            [
                *(f"* `{file_format.name}`: {file_format.description}" for file_format in files),
                f"* `{JSON_NAME}`: the content of this page for programs",
            ]
        ),
        "## Call",
        "Each example is complete and runs in this folder.",
    ]
    examples = [text for file in reversed(files) if file.example for text in file.example(description)]
    return "\n\n".join([*sections, *examples]) + "\n"


def _format_arguments(description: Mapping[str, Any]) -> str:
    table_lines = ["| argument | dtype | shape | |", "| --- | --- | --- | --- |"]
    notes = ["All are C-contiguous, without gaps, on the device."]
    output = description["arguments"][-1]
    for argument in description["arguments"]:
        name, shape = argument["name"], " × ".join(map(str, argument["shape"]))
        role = "written, every element" if argument is output else _ROLE_BY_SCOPE[argument["space"]]
        table_lines.append(f"| {name} | {argument['dtype']} | {shape} | {role} |")
        if argument["symbol"]:
            notes.append(
                f"{name} is not a parameter: it is copied to the symbol `{argument['symbol']}` before a launch."
            )
        if argument["space"] == "texture":
            notes.append(
                f"The texture object over {name} is two-dimensional, with its first axis as height and all others as "
                "width. It returns single elements (no filtering, unnormalized coordinates), and zero outside."
            )
    return "\n".join(table_lines) + "\n\n" + " ".join(notes)


def _format_launch(description: Mapping[str, Any]) -> str:
    textures = [argument["name"] for argument in description["arguments"] if argument["space"] == "texture"]
    lines = [_format_kernel(kernel, textures) for kernel in description["kernels"]]
    if len(lines) > 1:
        lines = [f"{number}. {kernel}" for number, kernel in enumerate(lines, 1)]
        buffer = [f"{buffer['name']} ({buffer['bytes']:,} bytes)" for buffer in description["workspace"]]
        workspace_note = f" They share device memory: {', '.join(buffer)}." if buffer else ""
        lines.insert(0, f"{len(lines)} device functions are launched one after another.{workspace_note}\n")
    knobs = ", ".join(f"`{name}={format_value(value)}`" for name, value in description["config"].items())
    return "\n".join(lines) + (f"\n\nKnobs: {knobs}." if knobs else "")


def _format_kernel(kernel: Mapping[str, Any], textures: Sequence[str]) -> str:
    grid, block = ("·".join(map(str, kernel[name])) for name in ("grid", "block"))
    clusters = ""
    if max(kernel["cluster"]) > 1:
        clusters = f" in clusters of {'·'.join(map(str, kernel['cluster']))} blocks, which the code fixes"
    registers = "" if kernel["registers"] is None else f", {kernel['registers']} registers a thread"
    dynamic = f"{kernel['dynamic_shared_bytes']:,} bytes of" if kernel["dynamic_shared_bytes"] else "no"
    parameter_kinds = ["texture object" if name in textures else "address" for name in kernel["parameters"]]
    for tensor_map in kernel["tensor_maps"]:
        parameter_kinds[tensor_map["parameter"]] = "tensor map"
    parameters = (f"{name}'s {kind}" for name, kind in zip(kernel["parameters"], parameter_kinds, strict=True))
    return (
        f"Grid {grid}{clusters}, block {block}; {kernel['shared_bytes']:,} bytes of static shared memory a block"
        f"{registers}; {dynamic} dynamic shared memory. The device function is `{kernel['function']}`; its parameters "
        f"are, in this order, {', '.join(parameters)}."
    )


def _format_measurement(description: Mapping[str, Any]) -> str:
    measured, verified = description["measured"], description["verified"]
    sentences = ["The time of this kernel was not measured."]
    if measured:
        sentences = [
            f"{_format_number(measured['seconds'] * 1e6)} µs ({_format_number(measured['gflops'])} GFLOP/s), the "
            f"median on {measured['device']}, {_format_date(measured['timestamp'])}: from the tuning log that chose "
            "this kernel."
        ]
        if measured["relative_error"] is not None:
            error = f"{measured['relative_error']:.2g}"
            sentences.append(f"The relative L2 error against a float64 reference was {error}.")
    if verified:
        error = f"{verified['relative_error']:.2g}"
        reference = f"a float64 reference on {verified['device']}"
        sentences.append(f"These files were run and compared with {reference}: relative L2 error {error}.")
    else:
        sentences.append("These files were compiled without being run.")
    return " ".join(sentences)


def _format_number(value: float) -> str:
    """Return a number with four significant digits, and all integer digits: 5.881, 17,858."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _format_date(timestamp: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp, datetime.timezone.utc).date().isoformat()
    except (OverflowError, OSError, ValueError):  # an untrusted log may contain any timestamp
        return "at an unknown date"
