"""Named lists of workloads: the layers of well-known networks at ImageNet's 224×224, the d2l-tvm sweep, and filters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tvmconv.errors import WorkloadError
from tvmconv.workloads.base import Workload
from tvmconv.workloads.operators.conv2d import Conv2d
from tvmconv.workloads.operators.filter1d import Filter1d
from tvmconv.workloads.operators.filter2d import Filter2d
from tvmconv.workloads.text import quote

IMAGE = 224


@dataclass(frozen=True)
class Layer:
    """A distinct workload of a suite, such as a convolution of a network.

    Attributes:
        name: name of the first layer with this workload.
        workload: what it computes.
        count: how many layers of the network have this workload.
    """

    name: str
    workload: Workload
    count: int


def suite(name: str, batch: int = 1) -> tuple[Layer, ...]:
    """The distinct layers of a suite, in the network's order.

    Args:
        name: one of `SUITES`.
        batch: images at a time, N of every convolution.

    Raises:
        WorkloadError: there is no such suite, the batch is not a positive integer that TVM can index, or the suite has
            no batch.
    """
    if name not in SUITES:
        raise WorkloadError(f"unknown suite {quote(name)}: expected one of {', '.join(SUITES)}")
    walked = list(SUITES[name](batch))
    counts = Counter(workload for _, workload in walked)
    first_names = {workload: layer for layer, workload in reversed(walked)}
    return tuple(Layer(first_names[workload], workload, count) for workload, count in counts.items())


def d2l(batch: int) -> Iterator[tuple[str, Conv2d]]:
    """The sweep over channels of d2l-tvm.

    Source: Zhang et al., "Dive into Deep Learning Compiler", chapter "Convolution" of "Operator Optimizations on GPUs".
    """
    for channels in (16, 32, 64, 128, 256):
        yield f"{channels}_channels", _square(batch, channels, 64, channels, kernel=3)


def resnet50(batch: int) -> Iterator[tuple[str, Conv2d]]:
    """ResNet-50 v1.5: the first block of a stage strides in its 3×3 convolution, as torchvision's does.

    Source: He et al., "Deep Residual Learning for Image Recognition", 2015, Table 1.
    """
    yield "conv1.7x7", _square(batch, 3, IMAGE, 64, kernel=7, stride=2)
    channels, size = 64, 56  # after conv1 and the 3×3 max pooling
    for stage, blocks in enumerate((3, 4, 6, 3), start=2):
        width = 64 << (stage - 2)
        for block in range(1, blocks + 1):
            name = f"conv{stage}_{block}"
            stride = 2 if block == 1 and stage > 2 else 1
            yield f"{name}.1x1_reduce", _square(batch, channels, size, width, kernel=1)
            yield f"{name}.3x3", _square(batch, width, size, width, kernel=3, stride=stride)
            yield f"{name}.1x1_expand", _square(batch, width, size // stride, 4 * width, kernel=1)
            if block == 1:
                yield f"{name}.1x1_shortcut", _square(batch, channels, size, 4 * width, kernel=1, stride=stride)
            channels, size = 4 * width, size // stride


def vgg16(batch: int) -> Iterator[tuple[str, Conv2d]]:
    """VGG-16: stages of 3×3 convolutions, halved by pooling in between.

    Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2014, Table 1, D.
    """
    channels, size = 3, IMAGE
    for stage, (layers, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), start=1):
        for layer in range(1, layers + 1):
            yield f"conv{stage}_{layer}.3x3", _square(batch, channels, size, width, kernel=3)
            channels = width
        size //= 2


def mobilenet(batch: int) -> Iterator[tuple[str, Conv2d]]:
    """MobileNet v1, width 1.0: a depthwise 3×3 and a pointwise 1×1 convolution thirteen times.

    The last depthwise layer has stride 1, as in all implementations; the paper's table says 2, which contradicts the
    7×7 that follows.

    Source: Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications", 2017,
    Table 1.
    """
    yield "conv1.3x3", _square(batch, 3, IMAGE, 32, kernel=3, stride=2)
    channels, size = 32, IMAGE // 2
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    for block, (width, stride) in enumerate(blocks, start=2):
        depthwise = _square(batch, channels, size, channels, kernel=3, stride=stride, groups=channels)
        channels, size = width, size // stride
        yield f"conv{block}.depthwise", depthwise
        yield f"conv{block}.pointwise", _square(batch, depthwise.O, size, width, kernel=1)


def filter1d(batch: int) -> Iterator[tuple[str, Filter1d]]:
    """Signals of a megabyte up to a gigabyte, with masks up to the widest of the literature's examples."""
    _refuse_batch("filter1d", batch)
    for exponent, taps in ((18, 5), (24, 5), (24, 31), (28, 5)):
        yield f"2^{exponent}.k{taps}", Filter1d(1 << exponent, taps)


def filter2d(batch: int) -> Iterator[tuple[str, Filter2d]]:
    """Square images of a megabyte up to a gigabyte, of one or three channels, with masks from 3×3 to 17×17."""
    _refuse_batch("filter2d", batch)
    for size, channels, taps in (
        (512, 1, 5), (4096, 1, 9), (4096, 1, 17), (4096, 3, 5), (8192, 1, 5), (16384, 1, 3), (16384, 1, 5)
    ):  # fmt: skip
        yield f"{size}x{channels}.{taps}x{taps}", Filter2d(size, size, channels, taps, taps)


def _refuse_batch(name: str, batch: int) -> None:
    if batch != 1:
        raise WorkloadError(f"batch={quote(batch)}: suite {name} is of single signals, expected 1")


def _square(
    batch: int, channels: int, size: int, filters: int, kernel: int, stride: int = 1, groups: int = 1
) -> Conv2d:
    """A convolution of square images, padded by half the kernel so that the stride alone sets the output's size."""
    return Conv2d(
        *(batch, channels, size, size, filters, kernel, kernel),
        stride=(stride, stride),
        padding=(kernel // 2,) * 4,
        groups=groups,
    )


SUITES: dict[str, Callable[[int], Iterable[tuple[str, Workload]]]] = {
    walk.__name__: walk for walk in (d2l, resnet50, vgg16, mobilenet, filter1d, filter2d)
}
