"""What was read of some kernels on a GPU, one row each, as a file: JSON to read again, and a page for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tvmconv import compat, jsonfile

RowT = TypeVar("RowT")  # a dataclass of what JSON has


@dataclass(frozen=True)
class KernelMetricsFile(Generic[RowT]):
    """Rows of one kind.

    Attributes:
        name: of the files, without a suffix.
        provenance: on what they were measured, with what, when.
        kernels: one row a kernel.
        totals: what was read of all of them together, by name: numbers.
    """

    name: str
    provenance: str
    kernels: list[RowT]
    totals: dict[str, list[float]] = field(default_factory=dict)

    def write(self, folder: Path, page: str) -> None:
        """Write NAME.json, one kernel a line, and NAME.md; the folder is made if it is not there.

        Args:
            folder: where to.
            page: Markdown.
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
        """Read what `write` wrote.

        Args:
            file: the JSON, plain or compressed by gzip.
            row: the dataclass of a row, whose annotations say what the JSON may have.

        Raises:
            Error: the file holds something else.
            OSError: it cannot be read.
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
