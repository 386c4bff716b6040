"""Sweeps: schedules over the layers of a suite, as `scripts/sweep.py` and `scripts/tune_suite.py` measure them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmconv.devices import Device
from tvmconv.errors import Error
from tvmconv.experiment import Progress, Result, run_ladder
from tvmconv.provenance import provenance
from tvmconv.report import sweep_table
from tvmconv.workloads import Layer, suite

CHANNELS_SUITE = "d2l"  # its layers differ in nothing but their channels


@dataclass(frozen=True)
class Sweep:
    """The results of a suite.

    Attributes:
        name: the suite's name, and which of its layers.
        labels: what tells each workload from the others.
        results: one for each label.
        provenance: on what they were measured, with what, when.
    """

    name: str
    labels: list[str]
    results: list[Result]
    provenance: str

    @property
    def axis(self) -> str:
        """What the labels are."""
        return "channels" if all(label.isdigit() for label in self.labels) else "layer"

    @property
    def title(self) -> str:
        """What a chart of the sweep shows."""
        first = self.results[0]
        return f"Convolutions of suite {self.name}, {first.workload.dtype}, on {first.device_name}"

    def to_json(self) -> str:
        """The sweep as JSON, one layer a line."""
        layers = [
            json.dumps({"label": label, "result": result.to_json()}, ensure_ascii=False)
            for label, result in zip(self.labels, self.results, strict=True)
        ]
        head = json.dumps({"name": self.name, "provenance": self.provenance}, ensure_ascii=False)
        return head.removesuffix("}") + ', "layers": [\n' + ",\n".join(layers) + "\n]}\n"

    @classmethod
    def from_json(cls, data: Any) -> Sweep:
        """The sweep that `to_json` wrote."""
        layers = data["layers"]
        results = [Result.from_json(layer["result"]) for layer in layers]
        if not results:
            raise ValueError("no layers")
        return cls(data["name"], [layer["label"] for layer in layers], results, data["provenance"])

    @classmethod
    def read(cls, file: Path) -> Sweep:
        """The sweep in a file; raises `Error` for a file that holds none, `OSError` for one that cannot be read."""
        try:
            return cls.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise Error(f"{file}: not a file that scripts/sweep.py wrote with -o ({reason})") from error

    def markdown(self) -> str:
        """The table, and on what it was measured."""
        table = sweep_table(self.axis, self.labels, self.results)
        caption = "Median times; in parentheses the speed-up over `default`."
        return f"{table.markdown()}\n\n{caption} {self.provenance}\n"

    def write(self, folder: Path) -> None:
        """Write NAME.json, NAME.md and the chart NAME.png."""
        from tvmconv.plot import draw_sweep, sweep_info

        (folder / f"{self.name}.json").write_text(self.to_json(), encoding="utf-8")
        (folder / f"{self.name}.md").write_text(self.markdown(), encoding="utf-8")
        draw_sweep(sweep_info(self.title, self.axis, self.labels, self.results), folder / f"{self.name}.png")


def select_layers(name: str, batch: int, only: str | None) -> list[Layer]:
    """The layers of a suite whose names contain a text.

    Raises:
        WorkloadError: there is no such suite.
        Error: no layer is named like that.
    """
    layers = suite(name, batch)
    chosen = [layer for layer in layers if (only or "") in layer.name]
    if not chosen:
        raise Error(f"no layer of {name} is named like {only!r}; there are {', '.join(layer.name for layer in layers)}")
    return chosen


def measure_sweep(
    name: str,
    layers: Sequence[Layer],
    device: Device,
    command: str,
    *,
    progress: Callable[[str], AbstractContextManager[Progress]],
    done: Callable[[Result], None],
    **how: Any,
) -> Sweep:
    """Measure schedules on layers, one after another.

    Args:
        name: of the sweep.
        layers: of a suite.
        device: where.
        command: what was typed, for the provenance.
        progress: given a prefix, shows the steps that it is told.
        done: is told each result.
        how: arguments of `run_ladder`.
    """
    results = []
    for number, layer in enumerate(layers, 1):
        with progress(f"{device.text}: layer {number} of {len(layers)}, {layer.name}, ") as tell:
            results.append(run_ladder(layer.workload, device=device, progress=tell, **how))
        done(results[-1])
    library = next((row.library for row in results[0].rows if row.library), None)
    by_channels = name.startswith(CHANNELS_SUITE)
    labels = [str(layer.workload.C) if by_channels else layer.name for layer in layers]
    return Sweep(name, labels, results, provenance(device, command, library))
