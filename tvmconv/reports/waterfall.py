"""The knob waterfall as a table: what each knob buys on the way from the default config to the best one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tvmconv.analysis.waterfall import Fall
from tvmconv.kernel import Kernel
from tvmconv.knobs import Config, format_value
from tvmconv.logs.record import Record
from tvmconv.reports.tables import NOTHING, Table, significant

LEGEND = (
    "Each line has the knobs of all lines above it. Estimate: the time of the unit that takes the longest, by the "
    "code; × of the line above. Measured: where the log has that very config. Wavefronts and sectors are of the whole "
    "kernel."
)


def known_times(records: Iterable[Record], schedule: str) -> Callable[[Config], float | None]:
    """How long the configs of a schedule take that records have: the fastest of each.

    Args:
        records: of one workload on one device.
        schedule: the schedule's name.
    """
    known: dict[tuple[tuple[str, object], ...], float] = {}
    for record in records:
        if record.ok and record.schedule == schedule:
            key = _key(record.config)
            known[key] = min(record.cost, known.get(key, record.cost))
    return lambda config: known.get(_key(config))


def _key(config: Config) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(config.items(), key=lambda item: item[0]))


def changed(fall: Fall) -> str:
    """What changed at a line: "tile_f=-1,1,8,2"; at the first, that nothing did."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in fall.knobs) or "the default config"


def waterfall_text(best: Kernel, way: Sequence[Fall]) -> str:
    """The table with a heading and a legend, for a terminal."""
    heading = f"{best.workload} by {best.schedule.name} on {best.device.text}, one knob at a time"
    return "\n".join([heading, "", waterfall_table(way).text(), "", LEGEND])


def waterfall_table(way: Sequence[Fall]) -> Table:
    """A line a config, from the default to the best."""
    headers = [
        "knob",
        "estimate [µs]",
        "×",
        "bound by",
        "measured [µs]",
        "occupancy",
        "registers",
        "wavefronts",
        "sectors",
    ]
    rows = []
    for before, fall in zip([None, *way], way, strict=False):
        rows.append(
            (
                changed(fall),
                significant(fall.seconds * 1e6),
                significant(fall.seconds / before.seconds) if before else "",
                fall.unit,
                significant(fall.measured * 1e6) if fall.measured else NOTHING,
                f"{fall.occupancy:.0%}",
                str(fall.registers),
                f"{fall.wavefronts:,}",
                f"{fall.sectors:,}",
            )
        )
    return Table(headers, rows, frozenset({"knob", "bound by"}))
