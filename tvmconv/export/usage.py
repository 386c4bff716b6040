"""The README of an exported kernel: what it computes, and how to call it, with examples that run as they are."""

from __future__ import annotations

import datetime
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvmconv.export.formats.base import Format
from tvmconv.knobs import format_value

if TYPE_CHECKING:
    from tvmconv.workloads import Workload

JSON, README = "kernel.json", "README.md"
_READ = {"global": "read", "constant": "read, from constant memory", "texture": "read, through a texture object"}


def readme(workload: Workload, facts: Mapping[str, Any], files: Sequence[Format]) -> str:
    """The page as Markdown.

    Args:
        workload: what the kernel computes.
        facts: as `kernel.json` has them.
        files: the files beside the page, without `kernel.json`.
    """
    target = facts["target"]
    place = f"CUDA, {target['code']}" if target["kind"] == "cuda" else "OpenCL"
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
        "\n".join(
            [
                *(f"* `{each.name}`: {each.about}" for each in files),
                f"* `{JSON}`: all that this page says, for programs",
            ]
        ),
        "## Call",
        "Each example is complete and runs in this folder.",
    ]
    examples = [paragraph for each in reversed(files) if each.example for paragraph in each.example(facts)]
    return "\n\n".join([*sections, *examples]) + "\n"


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
    textures = [argument["name"] for argument in facts["arguments"] if argument["space"] == "texture"]
    said = [_step(step, textures) for step in facts["steps"]]
    if len(said) > 1:
        said = [f"{number}. {step}" for number, step in enumerate(said, 1)]
        scratch = [f"{scratch['name']} ({scratch['bytes']:,} bytes)" for scratch in facts["scratch"]]
        between = f"; memory on the device that one leaves for the next: {', '.join(scratch)}" if scratch else ""
        said.insert(0, f"{len(said)} device functions, one after another{between}.\n")
    knobs = ", ".join(f"`{name}={format_value(value)}`" for name, value in facts["config"].items())
    return "\n".join(said) + (f"\n\nKnobs: {knobs}." if knobs else "")


def _step(step: Mapping[str, Any], textures: Sequence[str]) -> str:
    grid, block = ("·".join(map(str, step[name])) for name in ("grid", "block"))
    clusters = ""
    if max(step["cluster"]) > 1:
        clusters = f" in clusters of {'·'.join(map(str, step['cluster']))} blocks, which a launch need not tell"
    registers = "" if step["registers"] is None else f", {step['registers']} registers a thread"
    dynamic = f"{step['dynamic_shared_bytes']:,} bytes of" if step["dynamic_shared_bytes"] else "no"
    kinds = ["texture object" if name in textures else "address" for name in step["parameters"]]
    for told in step["tensor_maps"]:
        kinds[told["parameter"]] = "tensor map"
    parameters = (f"{name}'s {kind}" for name, kind in zip(step["parameters"], kinds, strict=True))
    return (
        f"Grid {grid}{clusters}, block {block}; {step['shared_bytes']:,} bytes of static shared memory a block"
        f"{registers}; {dynamic} dynamic shared memory. The device function is `{step['function']}`; its parameters "
        f"are, in this order, {', '.join(parameters)}."
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
