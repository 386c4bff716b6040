"""Files of metrics that were measured of kernels on a GPU: JSON with one row per kernel, and a Markdown page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tvmconv import compat, jsonfile

RowT = TypeVar("RowT")  # a dataclass of JSON values


@dataclass(frozen=True)
class KernelMetricsFile(Generic[RowT]):
    """The metrics of kernels."""

    name: str  # of the files, without a suffix
    provenance: str  # device, versions, date and command of the measurement
    kernels: list[RowT]  # one row per kernel
    totals: dict[str, list[float]] = field(default_factory=dict)  # measured for all kernels together, by name

    def write(self, folder: Path, page: str) -> None:
        """Write NAME.json, with one kernel per line, and the text of `page` as NAME.md; the folder is created."""
        folder.mkdir(parents=True, exist_ok=True)
        header = {"name": self.name, "provenance": self.provenance} | ({"totals": self.totals} if self.totals else {})
        rows: list[Any] = self.kernels
        text = format_json_lines(header, "kernels", [asdict(row) for row in rows])
        (folder / f"{self.name}.json").write_text(text, encoding="utf-8")
        (folder / f"{self.name}.md").write_text(f"{page}\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path, row: type[RowT]) -> KernelMetricsFile[RowT]:
        """Read a file that `write` wrote, plain or compressed; the annotations of the dataclass `row` are its schema.

        Raises:
            Error: The file has another format.
        """
        with jsonfile.translate_json_errors(f"{file}: no such readings"):
            data = jsonfile.read_json(file)
            totals = data.get("totals")
            return cls(
                data["name"].decode(str),
                data["provenance"].decode(str),
                [*map(_rename_knobs, data["kernels"].decode(list[row]))],  # type: ignore[valid-type]
                totals.decode(dict[str, list[float]]) if totals else {},
            )


def format_json_lines(header: Mapping[str, Any], key: str, items: Iterable[Any]) -> str:
    """Return a JSON object with the fields of a header, and a list with one item per line."""
    first_line = json.dumps(header, ensure_ascii=False).removesuffix("}")
    lines = ",\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    return f'{first_line}, "{key}": [\n{lines}\n]}}\n'


def _rename_knobs(row: Any) -> Any:
    """Return a row with the current names of the knobs of its config, if it has one."""
    schedule, config = getattr(row, "schedule", None), getattr(row, "config", None)
    if not isinstance(schedule, str) or not isinstance(config, dict):
        return row
    return replace(row, config=compat.rename_config(schedule, config))
