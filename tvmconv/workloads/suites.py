"""Suites: lists of workloads with names, built in (`networks`) or from a file, as they are or in another variant."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tvmconv import jsonfile
from tvmconv.errors import WorkloadError
from tvmconv.jsonfile import JsonError
from tvmconv.workloads import dtypes
from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv import Conv
from tvmconv.workloads.networks import SUITES
from tvmconv.workloads.operators.conv2d import Conv2d
from tvmconv.workloads.registry import parse
from tvmconv.workloads.text import quote

FILE_EXAMPLE = '[{"name": "conv1", "text": "conv2d:1x3x224x224,64x3x7x7,s2,p3", "count": 1}]'
MAX_NAME_LENGTH = 100
MAX_COUNT = 10**6  # layers of a network that compute the same
FILTER_OPTIONS = {"N": 1, "dtype": dtypes.FLOAT32.name, "epilogue": ()}


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


@dataclass(frozen=True)
class SuiteVariant:
    """What all convolutions of a suite shall have instead of their own; None for what they have.

    Attributes:
        batch: images at a time, N.
        dtype: one of `dtypes.DTYPES`.
        layout: one of `layout.LAYOUTS`.
        epilogue: operations, in order.
    """

    batch: int | None = None
    dtype: str | None = None
    layout: str | None = None
    epilogue: tuple[str, ...] | None = None

    def apply_to(self, w: Workload) -> Workload:
        """A workload with what this says; raises WorkloadError for a filter, which has nothing of it."""
        options = {option_field.name: getattr(self, option_field.name) for option_field in fields(self)}
        changed: dict[str, Any] = {
            ("N" if name == "batch" else name): value for name, value in options.items() if value is not None
        }
        if isinstance(w, Conv):
            convolution: Any = w  # of an operator's dataclass
            return replace(convolution, **changed)
        if unsupported := {name: value for name, value in changed.items() if value != FILTER_OPTIONS.get(name)}:
            name, value = next(iter(unsupported.items()))
            raise WorkloadError(f"{name}={quote(value)} is for convolutions alone, not for {w.operator}")
        return w

    def format_suffix(self, layers: Iterable[Layer]) -> str:
        """What tells the variant of these layers from the layers themselves: `f16-nhwc-b32-bias-relu`; "" for nothing.

        A filter is what it is in any variant.
        """
        convolutions = [layer.workload for layer in layers if isinstance(layer.workload, Conv)]
        words = []
        if self.dtype is not None and any(w.dtype != self.dtype for w in convolutions):
            words.append(dtypes.validate_dtype(self.dtype).text)
        if self.layout is not None and any(w.layout != self.layout for w in convolutions):
            words.append(self.layout)
        if self.batch is not None and any(self.batch != w.N for w in convolutions):
            words.append(f"b{self.batch}")
        if self.epilogue is not None and any(w.epilogue != self.epilogue for w in convolutions):
            words += self.epilogue or ("bare",)
        return "-".join(words)


def suite(
    name: str,
    batch: int | None = None,
    *,
    dtype: str | None = None,
    layout: str | None = None,
    epilogue: tuple[str, ...] | None = None,
) -> tuple[Layer, ...]:
    """The distinct layers of a suite, in the network's order.

    Args:
        name: one of `SUITES`, or the path of a file, as for `read_suite`.
        batch: images at a time, N of every convolution; by default 1, or as in the file.
        dtype: of every convolution, one of `dtypes.DTYPES`; by default as they are: float32, unless a file says so.
        layout: of every convolution, `nchw` or `nhwc`; by default as they are: `nchw`, unless a file says so.
        epilogue: of every convolution, operations in order; by default as they are: none, unless a file says so.

    Raises:
        WorkloadError: there is no such suite, the batch is not a positive integer that TVM can index, the suite has no
            such variant, or the file is malformed.
        OSError: the file cannot be read.
    """
    if not isinstance(name, str):
        raise WorkloadError(f"expected the name of a suite or of a file NAME.json, not {quote(name)}")
    return merge_equal_layers(iterate_layers(name, SuiteVariant(batch, dtype, layout, epilogue)))


def iterate_layers(name: str, variant: SuiteVariant | None = None) -> tuple[Layer, ...]:
    """All layers of a suite, in the network's order, equal ones as well; of a file, its own with their counts.

    Args:
        name: one of `SUITES`, or the path of a file, as for `read_suite`.
        variant: what the layers shall have instead of their own.

    Raises:
        WorkloadError: as for `suite`.
        OSError: the file cannot be read.
    """
    suite_variant = variant or SuiteVariant()
    if name in SUITES:
        layers = [
            Layer(layer, workload, 1)
            for layer, workload in SUITES[name](1 if suite_variant.batch is None else suite_variant.batch)
        ]
    elif is_suite_file(name):
        layers = list(read_suite(Path(name)))
    else:
        raise WorkloadError(f"unknown suite {quote(name)}: expected one of {', '.join(SUITES)}, or a file NAME.json")
    return apply_variant(layers, suite_variant)


def apply_variant(layers: Iterable[Layer], variant: SuiteVariant) -> tuple[Layer, ...]:
    """Layers with what a variant says; raises WorkloadError where a workload has no such variant."""
    return tuple(replace(layer, workload=variant.apply_to(layer.workload)) for layer in layers)


def is_suite_file(name: str) -> bool:
    """Whether a suite's name is the path of a file."""
    return name not in SUITES and (name.endswith(".json") or Path(name).is_file())


def read_suite(file: Path) -> tuple[Layer, ...]:
    """The layers in a file, such as `FILE_EXAMPLE`: a name, a workload's text, and how often it is there (1 if unsaid).

    Whatever else a layer has is of no account.

    Raises:
        WorkloadError: the file is malformed, or a layer of it.
        OSError: it cannot be read.
    """
    try:
        data = jsonfile.read_json(file).value
    except JsonError as error:
        raise WorkloadError(f"{file} is no suite, expected JSON such as {FILE_EXAMPLE}: {error}") from error
    if not isinstance(data, list) or not data:
        raise WorkloadError(f"{file} is no suite: expected a list of layers, as in {FILE_EXAMPLE}")
    layers = []
    for number, entry in enumerate(data, 1):
        try:
            layers.append(_parse_layer(entry))
        except WorkloadError as error:
            raise WorkloadError(f"{file}, layer {number}: {error}") from error
    name, num_duplicates = Counter(layer.name for layer in layers).most_common(1)[0]
    if num_duplicates > 1:
        raise WorkloadError(
            f"{file}: {num_duplicates} layers are named {quote(name)}, expected a name of its own for each"
        )
    return tuple(layers)


def write_suite(layers: Iterable[Layer], file: Path) -> None:
    """Write layers to a file as `read_suite` reads it, one a line; raises OSError."""
    entries = ({"name": layer.name, "text": layer.workload.text, "count": layer.count} for layer in layers)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _parse_layer(data: Any) -> Layer:
    """A layer as a file has it."""
    if not isinstance(data, dict):
        raise WorkloadError(f"{quote(data)}: expected an object, as in {FILE_EXAMPLE}")
    name, text, count = data.get("name"), data.get("text"), data.get("count", 1)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable() or "|" in name:
        raise WorkloadError(f"name={quote(name)}: expected up to {MAX_NAME_LENGTH} printable characters without |")
    if not isinstance(text, str):
        raise WorkloadError(f"text={quote(text)}: expected the text of a workload, as in {Conv2d.EXAMPLE}")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise WorkloadError(f"count={quote(count)}: expected an integer that is at least 1")
    if count > MAX_COUNT:
        raise WorkloadError(f"count={quote(count)}: expected at most {MAX_COUNT:,}")
    return Layer(name, parse(text), count)


def merge_equal_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Each workload once, under the name of the first layer that has it."""
    layer_by_workload: dict[Workload, Layer] = {}
    for layer in layers:
        first = layer_by_workload.get(layer.workload)
        layer_by_workload[layer.workload] = replace(first, count=first.count + layer.count) if first else layer
    return tuple(layer_by_workload.values())
