"""A chart of networks: for each layer the share of the physical limit that kernels and a library reach."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvmconv.experiments.results import TUNED, Result
from tvmconv.reports.charts import create_figure, save_figure
from tvmconv.reports.suite import FASTER_COLOR, NUM_PALETTE_COLORS, SLOWER_COLOR, SMALL_FONT_POINTS
from tvmconv.reports.tables import format_mean
from tvmconv.workloads import Layer, Workload

PANELS_PER_LINE, PANEL_WIDTH, PANEL_HEIGHT, MARGIN_HEIGHT = 5, 2.3, 1.55, 0.6  # inches
SERIES = ((TUNED, "o", FASTER_COLOR), ("cudnn", "x", SLOWER_COLOR))  # with their markers and colors


@dataclass(frozen=True)
class NetworkShares:
    """The measured layers of a network, the one with the largest share of a tuned kernel last."""

    network: str
    shares: Mapping[str, tuple[float | None, ...]]  # of the limit, by row


def split_network(name: str) -> str:
    """Return the network of a layer that is named NETWORK.NUMBER or NETWORK.NUMBER.GRADIENT.

    Examples:
        >>> split_network("resnet50-b8.12")
        'resnet50-b8'
    """
    return re.sub(r"\.\d+(\.[a-z]+)?$", "", name)


def compute_network_shares(results: Mapping[Workload, Result], layers: Sequence[Layer]) -> list[NetworkShares]:
    """Return the shares of all networks of which a layer was measured."""
    networks: dict[str, dict[Workload, Result]] = {}
    for layer in layers:
        if layer.workload in results:
            networks.setdefault(split_network(layer.name), {})[layer.workload] = results[layer.workload]
    shares = []
    for network, measured in networks.items():
        ordered = sorted(measured.values(), key=lambda result: result.compute_limit_share(TUNED) or 0.0)
        rows = {name: tuple(result.compute_limit_share(name) for result in ordered) for name, _, _ in SERIES}
        shares.append(NetworkShares(network, rows))
    return shares


def draw_network_limits(networks: Sequence[NetworkShares], title: str, path: Path) -> None:
    """Draw a panel for each network, with its layers from left to right."""
    lines = math.ceil(len(networks) / PANELS_PER_LINE)
    figure = create_figure(PANELS_PER_LINE * PANEL_WIDTH, lines * PANEL_HEIGHT + MARGIN_HEIGHT)
    panels = figure.subplots(lines, PANELS_PER_LINE, sharey=True, squeeze=False).ravel()
    for axes, network in zip(panels, networks, strict=False):
        for name, marker, color in SERIES:
            values = network.shares[name]
            points = [(index, value) for index, value in enumerate(values, 1) if value]
            x, y = zip(*points, strict=True) if points else ((), ())
            axes.plot(x, y, marker, color=color, markersize=2.8, label=f"{name} {format_mean(values)}")
        axes.axhline(1, color="black", linewidth=1)
        axes.set_title(f"{network.network}, {len(network.shares[TUNED])} layers", fontsize=SMALL_FONT_POINTS)
        axes.set_ylim(0, 1.65)
        axes.set_xticks([])
        axes.grid(alpha=0.4)
        axes.legend(loc="upper left", fontsize=SMALL_FONT_POINTS - 1, ncols=2, columnspacing=0.5, handletextpad=0.0)
    for axes in panels[len(networks) :]:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, colors=NUM_PALETTE_COLORS)
