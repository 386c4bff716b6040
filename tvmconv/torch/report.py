"""The report of an optimized model: what runs for each layer, and how long it takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape

from tvmconv.compat import former_attribute
from tvmconv.reports.tables import EMPTY_CELL, Table, TableFormatter, format_micros, format_speedup

PYTORCH_NAME = "PyTorch"
NO_KERNEL = "no kernel computes it"  # reason why an operation is not fused
WHOLE_MODEL = "the whole model"


@dataclass(frozen=True)
class LayerReport:
    """The report of one convolution or normalization, and the operations that follow it.

    Attributes:
        path: Path of the module in the model.
        workload: Text of the workload, epilogue included; "" if there is no such workload, or for a normalization.
        implementation: Schedule of the kernel that runs, or `PYTORCH_NAME`.
        reason: Reason why PyTorch runs the layer.
        pytorch_seconds: Seconds with PyTorch; None if it was not timed.
        tvmconv_seconds: Seconds with tvmconv's kernel; None if it was not timed.
        config_source: Source of the kernel's config: "tuned", "predicted" or "default".
        followed_by: PyTorch's name of an activation, normalization or sum that follows and is not fused.
        missed_reason: Reason why it is not.
        former: Operations of the model that the layer stands for, such as "Conv2d + BatchNorm2d + ReLU".
        quantization: Relative error of a layer with 8-bit operands, or the reason why a layer of a quantized model
            keeps the model's precision.
    """

    path: str
    workload: str
    implementation: str
    reason: str = ""
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    config_source: str = ""
    followed_by: str = ""
    missed_reason: str = NO_KERNEL
    former: str = ""
    quantization: str = ""

    runs = former_attribute("implementation")
    before = former_attribute("pytorch_seconds")
    after = former_attribute("tvmconv_seconds")
    origin = former_attribute("config_source")

    @property
    def explanation(self) -> str:
        """Source of the kernel's config or the reason why PyTorch runs, and the operation that is left to PyTorch."""
        unfused_note = ""
        if self.followed_by:
            is_unknown = self.missed_reason == NO_KERNEL
            detail = "which no kernel does" if is_unknown else f"which is not fused: {self.missed_reason}"
            unfused_note = f"followed by {self.followed_by}, {detail}"
        # One reason, such as that no time was left, may be that of the kernels in both precisions.
        quantization = "" if self.quantization == f"not quantized: {self.reason}" else self.quantization
        return "; ".join(filter(None, (self.reason or self.config_source, unfused_note, quantization)))


@dataclass(frozen=True, repr=False)
class Report:
    """The report of an optimized model.

    Attributes:
        lines: One report per convolution, and per group or instance normalization that was compared.
        pytorch_seconds: Seconds of the whole model with PyTorch; None if it was not timed.
        tvmconv_seconds: Seconds of the optimized model; None if it was not timed.
        difference: Largest relative L2 difference of the outputs for the example from PyTorch's; None if no output is a
            tensor.
        notes: Further remarks, one sentence each.

    Examples:
        >>> import tvmconv.torch
        >>> print(tvmconv.torch.Report((), difference=2e-7))  # doctest: +SKIP
    """

    lines: tuple[LayerReport, ...]
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    difference: float | None = None
    notes: tuple[str, ...] = ()

    before = former_attribute("pytorch_seconds")
    after = former_attribute("tvmconv_seconds")

    @property
    def table(self) -> Table:
        """Table with one row per layer and the whole model in the last row."""
        headers = ("layer", "before", "workload", "runs", "PyTorch [µs]", "tvmconv [µs]", "× PyTorch", "config, or why")
        whole = LayerReport(WHOLE_MODEL, "", EMPTY_CELL, "", self.pytorch_seconds, self.tvmconv_seconds)
        rows = [
            (
                line.path,
                line.former or EMPTY_CELL,
                line.workload or EMPTY_CELL,
                line.implementation,
                *(format_micros(seconds) for seconds in (line.pytorch_seconds, line.tvmconv_seconds)),
                format_speedup(line.pytorch_seconds, line.tvmconv_seconds),
                line.explanation or EMPTY_CELL,
            )
            for line in (*self.lines, *([] if self.pytorch_seconds is None else [whole]))
        ]
        return Table(headers, rows, left_aligned=frozenset({"layer", "before", "workload", "runs", "config, or why"}))

    def __repr__(self) -> str:
        times = (self.pytorch_seconds, self.tvmconv_seconds)
        speedup = f": {times[0] / times[1]:.3g} × PyTorch" if times[0] and times[1] else ""
        num_replaced = sum(line.implementation != PYTORCH_NAME for line in self.lines)
        return f"<Report {num_replaced} of {len(self.lines)} layers by tvmconv{speedup}>"

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return self.table.format_html() + notes

    def to_json(self) -> str:
        """Return the report as JSON: the attributes of the report, with `lines` as a list of objects.

        Returns:
            The text. Times are in seconds, and null where there are none.

        Examples:
            >>> from tvmconv.torch import Report
            >>> Report((), difference=0.5).to_json()
            '{"lines": [], "pytorch_seconds": null, "tvmconv_seconds": null, "difference": 0.5, "notes": []}'
        """
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        return self.format_text()

    def format_text(self, formatter: TableFormatter = Table.format_text) -> str:
        """Return the table with the difference and the notes.

        Args:
            formatter: Function that returns a table as text.

        Examples:
            >>> from tvmconv.torch import Report
            >>> Report((), notes=("No layer is faster than PyTorch's.",)).format_text().splitlines()[-1]
            "No layer is faster than PyTorch's."
        """
        text_lines = []
        if self.difference is not None:
            text_lines = [f"For the example, outputs differ from PyTorch's own by {self.difference:.1e} (relative L2)."]
        return "\n".join([formatter(self.table), *text_lines, *self.notes])
