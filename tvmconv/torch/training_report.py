"""The report of the convolutions of a training step: what runs for each product, and how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from tvmconv.reports.tables import (
    EMPTY_CELL,
    Table,
    TableFormatter,
    format_micros,
    format_speedup,
    make_table,
)
from tvmconv.torch.report import PYTORCH_NAME

WHOLE_STEP = "the whole step"


@dataclass(frozen=True)
class ProductReport:
    """The report of one product of a convolution.

    Attributes:
        path: Path of the convolution's module in the model; "" for a call of a function.
        product: "forward", "forward with bias", "forward with statistics", "dgrad" or "wgrad". The times of the third
            one include both passes of the batch normalization that takes the statistics, or only its statistics if
            these are no faster by the kernel.
        workload: Text of the workload; "" if there is none.
        implementation: Schedule of the kernel that runs, or "PyTorch".
        reason: Reason why PyTorch runs the product.
        pytorch_seconds: Seconds with PyTorch; None if it was not timed.
        tvmconv_seconds: Seconds with tvmconv's kernel; None if it was not timed.
        config_source: Source of the kernel's config: "tuned", "predicted" or "default".
    """

    path: str
    product: str
    workload: str
    implementation: str = PYTORCH_NAME
    reason: str = ""
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    config_source: str = ""


@dataclass(frozen=True, repr=False)
class TrainingReport:
    """The report of the convolutions of a training step.

    Attributes:
        lines: One report for each product of each convolution.
        pytorch_seconds: Seconds of the forward and backward pass with PyTorch; None if it was not timed.
        tvmconv_seconds: Seconds of the same with tvmconv's kernels; None if it was not timed.
        notes: Further remarks, one sentence each.

    Examples:
        >>> from tvmconv.torch import TrainingReport
        >>> TrainingReport(())
        <TrainingReport 0 of 0 products by tvmconv>
    """

    lines: tuple[ProductReport, ...]
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> Table:
        """Table with one row per product and the whole step in the last row."""
        whole = ProductReport(WHOLE_STEP, "", "", EMPTY_CELL, "", self.pytorch_seconds, self.tvmconv_seconds)
        columns: dict[str, Callable[[ProductReport], str]] = {
            "layer": lambda line: line.path or EMPTY_CELL,
            "product": lambda line: line.product or EMPTY_CELL,
            "workload": lambda line: line.workload or EMPTY_CELL,
            "runs": lambda line: line.implementation,
            "PyTorch [µs]": lambda line: format_micros(line.pytorch_seconds),
            "tvmconv [µs]": lambda line: format_micros(line.tvmconv_seconds),
            "× PyTorch": lambda line: format_speedup(line.pytorch_seconds, line.tvmconv_seconds),
            "config, or why": lambda line: line.reason or line.config_source or EMPTY_CELL,
        }
        lines = [*self.lines, *([] if self.pytorch_seconds is None else [whole])]
        return make_table(lines, columns, ["layer", "product", "workload", "runs", "config, or why"])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary of numbers, texts and lists, for JSON.

        Returns:
            The attributes of the report by name; lines are dictionaries of their attributes.

        Examples:
            >>> from tvmconv.torch import TrainingReport
            >>> TrainingReport(()).to_dict()["lines"]
            []
        """
        return {**asdict(self), "lines": [asdict(line) for line in self.lines], "notes": list(self.notes)}

    def to_json(self) -> str:
        """Return the report as JSON.

        Returns:
            The text of the dictionary that `to_dict` returns.

        Examples:
            >>> from tvmconv.torch import TrainingReport
            >>> TrainingReport((), notes=("No layer is faster.",)).to_json()[-33:]
            '"notes": ["No layer is faster."]}'
        """
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def format_text(self, formatter: TableFormatter = Table.format_text) -> str:
        """Return the table and the notes.

        Args:
            formatter: Function that returns a table as text.

        Returns:
            The lines of the text.

        Examples:
            >>> from tvmconv.torch import TrainingReport
            >>> TrainingReport((), notes=("No layer is faster.",)).format_text().splitlines()[-1]
            'No layer is faster.'
        """
        return "\n".join([formatter(self.table), *self.notes])

    def __repr__(self) -> str:
        times = self.pytorch_seconds, self.tvmconv_seconds
        speedup = f": {times[0] / times[1]:.3g} × PyTorch" if times[0] and times[1] else ""
        num_replaced = sum(line.implementation != PYTORCH_NAME for line in self.lines)
        return f"<TrainingReport {num_replaced} of {len(self.lines)} products by tvmconv{speedup}>"

    def __str__(self) -> str:
        return self.format_text()

    def _repr_html_(self) -> str:
        return self.table.format_html() + "".join(f"<p>{escape(note)}</p>" for note in self.notes)
