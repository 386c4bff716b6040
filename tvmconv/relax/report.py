"""The report on an optimized module: what computes each convolution, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from html import escape

from tvmconv.reports.tables import EMPTY_CELL, Table, format_micros, format_speedup
from tvmconv.space import Config

TVM_NAME = "TVM"
TableFormatter = Callable[[Table], str]


@dataclass(frozen=True)
class ConvolutionReport:
    """The report on one convolution and its epilogue.

    Attributes:
        function: Name of the function in the module.
        name: Relax's name of the convolution's result.
        workload: Text of the workload, epilogue and layout included; "" if there is none.
        implementation: Schedule of the kernel, or `TVM_NAME`.
        config_source: Source of the kernel's config, such as "tuned" or "predicted".
        reason: Reason why TVM computes the convolution.
        seconds: Seconds of the kernel that the log says or the cost model predicts; None if neither does.
        tvm_seconds: Measured seconds of TVM's own code; None if it was not timed.
        config: Values of the kernel's knobs.
    """

    function: str
    name: str
    workload: str
    implementation: str
    config_source: str = ""
    reason: str = ""
    seconds: float | None = None
    tvm_seconds: float | None = None
    config: Config = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class ModuleReport:
    """The report on an optimized module.

    Attributes:
        lines: One report per convolution.
        note: Which convolutions a search did not compare with TVM's own code, and why; "" if it left none.
        phase_seconds: Seconds of each phase of the optimization by its name.

    Examples:
        >>> from tvmconv.relax import ModuleReport
        >>> ModuleReport(())
        <ModuleReport 0 of 0 convolutions by tvmconv>
    """

    lines: tuple[ConvolutionReport, ...]
    note: str = ""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_replaced(self) -> int:
        """Number of convolutions that a kernel of tvmconv computes."""
        return sum(line.implementation != TVM_NAME for line in self.lines)

    @property
    def table(self) -> Table:
        """Table with one row per convolution."""
        times = ("TVM [µs]", "tvmconv [µs]", "× TVM")
        headers = ("function", "convolution", "workload", "runs", *times, "config, or why")
        rows = [
            (
                line.function,
                line.name,
                line.workload or EMPTY_CELL,
                line.implementation,
                *(format_micros(seconds) for seconds in (line.tvm_seconds, line.seconds)),
                format_speedup(line.tvm_seconds, line.seconds),
                line.reason or line.config_source or EMPTY_CELL,
            )
            for line in self.lines
        ]
        return Table(headers, rows, left_aligned=frozenset(headers) - {*times})

    def __repr__(self) -> str:
        return f"<ModuleReport {self.num_replaced} of {len(self.lines)} convolutions by tvmconv>"

    def __str__(self) -> str:
        return self.format_text()

    def _repr_html_(self) -> str:
        return f"{self.table.format_html()}<p>{escape(self._summary)}</p>"

    @property
    def _summary(self) -> str:
        counts = f"{self.num_replaced} of {len(self.lines)} convolutions call functions of tvmconv."
        return f"{counts} {self.note}".rstrip()

    def format_text(self, formatter: TableFormatter = Table.format_text) -> str:
        """Return the table and the number of replaced convolutions.

        Args:
            formatter: Function that returns a table as text.

        Examples:
            >>> from tvmconv.relax import ModuleReport
            >>> ModuleReport(()).format_text().splitlines()[-1]
            '0 of 0 convolutions call functions of tvmconv.'
        """
        return f"{formatter(self.table)}\n{self._summary}"

    def to_json(self) -> str:
        """Return the report as JSON, with one object per convolution in `lines`.

        Examples:
            >>> from tvmconv.relax import ModuleReport
            >>> ModuleReport(()).to_json()
            '{"lines": [], "note": "", "phase_seconds": {}}'
        """
        return json.dumps(asdict(self))
