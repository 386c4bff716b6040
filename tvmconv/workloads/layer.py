"""A layer of a suite: a distinct workload with its name and its count."""

from __future__ import annotations

from dataclasses import dataclass

from tvmconv.workloads.base import Workload


@dataclass(frozen=True)
class Layer:
    """A distinct workload of a suite, such as a convolution of a network.

    Attributes:
        name: Name of the first layer with this workload.
        workload: The computation of the layer.
        count: Number of layers of the network with this workload.

    Examples:
        >>> import tvmconv as tc
        >>> layer = tc.suite("resnet50")[0]
        >>> layer.name, layer.count
        ('conv1.7x7', 1)
    """

    name: str
    workload: Workload
    count: int
