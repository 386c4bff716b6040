"""Section 4: how the search went: the best so far, what was tried, which knob mattered, and what failed."""

from __future__ import annotations

from collections.abc import Sequence

from tvmconv.logs.record import Record
from tvmconv.reports.history import History, HistoryInfo, history_info, result_text, traces
from tvmconv.reports.page import svg
from tvmconv.reports.page.markup import Markup, element, joined, paragraph, table
from tvmconv.reports.page.parallel import parallel
from tvmconv.reports.tables import Table
from tvmconv.reports.trials import FEW, failures, mattered
from tvmconv.workloads import Workload

WIDTH, HEIGHT = 600, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 28, 44
TRIALS = "trials"
THINNED = "The log has few records of it: it may keep no more than the best of a search, as those do that are shipped."


def search(source: str, workload: Workload, records: Sequence[Record]) -> Markup:
    """A search, schedule by schedule.

    Args:
        source: the log's name.
        workload: what was tuned.
        records: of it, on one device, in the order in which they came in.
    """
    trials = [record for record in records if not record.final] or list(records)
    if not trials:
        return paragraph(f"{source[:1].upper()}{source[1:]}: no record of {workload}.")
    info = history_info(workload, traces(source, records))
    parts = [element("h3", info.title), *([paragraph(THINNED, "soft")] if len(trials) < FEW else []), _histories(info)]
    for schedule in dict.fromkeys(record.schedule for record in trials):
        own = [record for record in trials if record.schedule == schedule]
        timed = [record for record in own if record.ok]
        if len(timed) > 1 and timed[0].config:
            parts += [element("h3", f"{schedule}: what was tried"), parallel(timed), _mattered(timed)]
    parts.append(_failures(trials))
    return joined(parts)


def _histories(info: HistoryInfo) -> Markup:
    long = [history for history in info.histories if len(history.best) > 1 and history.best[-1]]
    legend = svg.legend(
        {
            f"{history.summary}{_result(history)}": svg.mark(place, 8, 8, history.name)
            for place, history in enumerate(info.histories)
        }
    )
    if not long:
        return legend
    charts = [_history(info, TRIALS, [[float(i + 1) for i in range(len(h.best))] for h in info.histories])]
    if all(history.elapsed for history in info.histories):
        charts.append(_history(info, "seconds of tuning", [list(h.elapsed) for h in info.histories]))
    return joined([legend, element("div", *charts, class_="grids")])


def _result(history: History) -> str:
    return f": {result_text(history.result)}" if history.result else ""


def _history(info: HistoryInfo, unit: str, places: Sequence[Sequence[float]]) -> Markup:
    """The best rate so far over trials, or over time; a step where it rises."""
    end = max(max(each) for each in places)
    first = min(min(each) for each in places)
    highest = max(history.best[-1] for history in info.histories)
    x = svg.Scale(min(first, 1.0), end, LEFT, WIDTH - RIGHT, whole=unit == TRIALS)
    y = svg.Scale(0, highest * 1.08, HEIGHT - BOTTOM, TOP)
    parts = [svg.axes(x, y, unit, "GFLOP/s of the best trial so far")]
    for place, (history, at) in enumerate(zip(info.histories, places, strict=True)):
        points: list[tuple[float, float]] = []
        for position, rate in zip(at, history.best, strict=True):
            if rate and (not points or y(rate) != points[-1][1]):
                if points:
                    points.append((x(position), points[-1][1]))
                points.append((x(position), y(rate)))
        if points:
            points.append((x(at[-1]), points[-1][1]))
            parts += [svg.path(points, f"s{place % svg.MARKS}", history.summary), svg.mark(place, *points[-1], "", 3.5)]
    return svg.chart(f"The best rate so far over {unit}", WIDTH, HEIGHT, *parts)


def _mattered(timed: Sequence[Record]) -> Markup:
    """Which knob explains most of the differences, as bars."""
    found = mattered(timed)
    if not found:
        return paragraph(f"Which knob mattered takes {FEW} trials with times, and several of each value.", "soft")
    lines = [
        element(
            "tr",
            element(
                "th", joined([each.knob, " ", element("span", f"{each.values} values", class_="soft")]), scope="row"
            ),
            element("td", f"{each.share:.0%}"),
            element("td", svg.bar(0, each.share, "s2", f"{each.knob}: {each.share:.0%}"), class_="bar-cell"),
        )
        for each in found
    ]
    return joined(
        [
            paragraph(
                "What each knob explains by itself of the differences in time (variance of the logarithms, less what "
                "as many values would explain by chance). A search tries good values more often: it is a hint.",
                "soft",
            ),
            element("table", element("tbody", joined(lines)), class_="bars"),
        ]
    )


def _failures(trials: Sequence[Record]) -> Markup:
    found = failures(trials)
    if not found:
        return paragraph(f"None of {len(trials):,} trials failed.")
    rows = [(each.kind, f"{each.count:,}", each.message) for each in found]
    headers = ("failed", "trials", "the first one's message")
    return table(Table(headers, rows, frozenset({headers[0], headers[2]})), "What failed, by kind")
