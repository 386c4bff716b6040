"""Files of metrics that were measured of kernels on a GPU: JSON with one row per kernel, and a Markdown page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tvmconv import compat, jsonfile

RowT = TypeVar("RowT")  # a dataclass of JSON values


@dataclass(frozen=True)
class KernelMetricsFile(Generic[RowT]):
    """The metrics of kernels.

    Attributes:
        name: Name of the files, without a suffix.
        provenance: Device, versions, date and command of the measurement.
        kernels: One row per kernel.
        totals: Numbers that were measured for all kernels together, by name.
    """

    name: str
    provenance: str
    kernels: list[RowT]
    totals: dict[str, list[float]] = field(default_factory=dict)

    def write(self, folder: Path, page: str) -> None:
        """Write NAME.json, with one kernel per line, and NAME.md.

        Args:
            folder: Folder to write to, which is created if necessary.
            page: Text of the Markdown page.
        """
        folder.mkdir(parents=True, exist_ok=True)
        header_fields = {"name": self.name, "provenance": self.provenance} | (
            {"totals": self.totals} if self.totals else {}
        )
        header = json.dumps(header_fields, ensure_ascii=False).removesuffix("}")
        rows: list[Any] = self.kernels
        body = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
        (folder / f"{self.name}.json").write_text(f'{header}, "kernels": [\n{body}\n]}}\n', encoding="utf-8")
        (folder / f"{self.name}.md").write_text(f"{page}\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path, row: type[RowT]) -> KernelMetricsFile[RowT]:
        """Read a file that `write` wrote.

        Args:
            file: JSON file, plain or compressed by gzip.
            row: Dataclass of a row, whose annotations describe the JSON.

        Raises:
            Error: The file has another format.
            OSError: The file cannot be read.
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


def _rename_knobs(row: Any) -> Any:
    """Return a row with the current names of the knobs of its config, if it has one."""
    schedule, config = getattr(row, "schedule", None), getattr(row, "config", None)
    if not isinstance(schedule, str) or not isinstance(config, dict):
        return row
    return replace(row, config=compat.rename_config(schedule, config))
