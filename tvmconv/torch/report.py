"""What runs in an optimised model, layer by layer, and what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvmconv.compat import former_attribute
from tvmconv.reports.tables import EMPTY_CELL, Table, format_significant

PYTORCH_NAME = "PyTorch"
WHOLE_MODEL = "the whole model"


@dataclass(frozen=True)
class LayerReport:
    """A convolution of a model, with what follows it.

    Attributes:
        path: of its module.
        workload: what it computes with what follows it; its text, or "" where it is none.
        implementation: the schedule of the kernel that runs, or `PYTORCH_NAME`.
        reason: why it is PyTorch's.
        pytorch_seconds: seconds by PyTorch; None where it was not timed.
        tvmconv_seconds: seconds by our kernel.
        config_source: where the kernel's config is from: "tuned", "predicted" or "default".
        followed_by: PyTorch's name of an activation or a normalisation that follows, and that no kernel does.
    """

    path: str
    workload: str
    implementation: str
    reason: str = ""
    pytorch_seconds: float | None = None
    tvmconv_seconds: float | None = None
    config_source: str = ""
    followed_by: str = ""

    runs = former_attribute("implementation")
    before = former_attribute("pytorch_seconds")
    after = former_attribute("tvmconv_seconds")
    origin = former_attribute("config_source")

    @property
    def explanation(self) -> str:
        """Where the kernel's config is from, or why PyTorch runs; and what the kernel leaves to PyTorch."""
        unfused_note = f"followed by {self.followed_by}, which no kernel does" if self.followed_by else ""
        return "; ".join(filter(None, (self.reason or self.config_source, unfused_note)))


@dataclass(frozen=True)
class Report:
    """What runs, and why.

    Attributes:
        lines: one for each convolution.
        pytorch_seconds: of the whole model by PyTorch; None where it was not timed.
        tvmconv_seconds: of the optimised one.
        difference: of its outputs for the example from PyTorch's own, the largest relative L2 difference; None where
            there are no tensors to compare.
        notes: what else is worth telling.
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
        """One line a convolution, and the whole model last."""
        headers = ("layer", "workload", "runs", "PyTorch [µs]", "tvmconv [µs]", "×", "config, or why")
        rows = [
            (
                line.path,
                line.workload or EMPTY_CELL,
                line.implementation,
                *_format_times(line.pytorch_seconds, line.tvmconv_seconds),
                line.explanation or EMPTY_CELL,
            )
            for line in self.lines
        ]
        if self.pytorch_seconds is not None:
            rows.append(
                (
                    WHOLE_MODEL,
                    EMPTY_CELL,
                    EMPTY_CELL,
                    *_format_times(self.pytorch_seconds, self.tvmconv_seconds),
                    EMPTY_CELL,
                )
            )
        return Table(headers, rows, left_aligned=frozenset({"layer", "workload", "runs", "config, or why"}))

    def __str__(self) -> str:
        text_lines = []
        if self.difference is not None:
            text_lines = [f"For the example, outputs differ from PyTorch's own by {self.difference:.1e} (relative L2)."]
        return "\n".join([self.table.format_text(), *text_lines, *self.notes])


def _format_times(pytorch_seconds: float | None, tvmconv_seconds: float | None) -> Sequence[str]:
    times = [
        EMPTY_CELL if seconds is None else format_significant(seconds * 1e6)
        for seconds in (pytorch_seconds, tvmconv_seconds)
    ]
    return *times, format_significant(
        pytorch_seconds / tvmconv_seconds
    ) if pytorch_seconds and tvmconv_seconds else EMPTY_CELL
