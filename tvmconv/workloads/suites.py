"""Suites: named lists of workloads, built in (`networks`) or read from a file, unchanged or in another variant."""

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
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.layer import Layer
from tvmconv.workloads.networks import SUITES
from tvmconv.workloads.operators.convolutions import Conv2d
from tvmconv.workloads.registry import parse
from tvmconv.workloads.text import quote
from tvmconv.workloads.training import is_gradient, list_training_layers

FILE_EXAMPLE = '[{"name": "conv1", "text": "conv2d:1x3x224x224,64x3x7x7,s2,p3", "count": 1}]'
MAX_NAME_LENGTH = 100
MAX_COUNT = 10**6  # limit of `Layer.count`
FILTER_OPTIONS = {"N": 1, "dtype": dtypes.FLOAT32.name, "epilogue": ()}


@dataclass(frozen=True)
class SuiteVariant:
    """Options that replace those of all convolutions of a suite; None keeps what each convolution has."""

    batch: int | None = None
    dtype: str | None = None
    layout: str | None = None
    epilogue: tuple[str, ...] | None = None

    def apply_to(self, w: Workload) -> Workload:
        """Return a workload with the options of this variant; raise WorkloadError for a filter that lacks an option."""
        options = {option_field.name: getattr(self, option_field.name) for option_field in fields(self)}
        changed: dict[str, Any] = {
            ("N" if name == "batch" else name): value for name, value in options.items() if value is not None
        }
        if isinstance(w, ConvOperator):
            convolution: Any = w  # a dataclass, which `ConvOperator` itself is not
            return replace(convolution, **changed)
        if unsupported := {name: value for name, value in changed.items() if value != FILTER_OPTIONS.get(name)}:
            name, value = next(iter(unsupported.items()))
            raise WorkloadError(f"{name}={quote(value)} applies to convolutions only, not to {w.operator}")
        return w

    def format_suffix(self, layers: Iterable[Layer]) -> str:
        """Return the options in which this variant differs from the layers, such as `f16-nhwc-b32-bias-relu`. Filters
        have no variants and are ignored; the result is empty if nothing differs.
        """
        convolutions = [layer.workload for layer in layers if isinstance(layer.workload, ConvOperator)]
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
    training: bool = False,
) -> tuple[Layer, ...]:
    """Return the distinct layers of a suite, in the network's order.

    Args:
        name: One of `SUITES`, or the path of a JSON file as `read_suite` reads it.
        batch: Batch size N of every convolution; by default 1, or as in the file.
        dtype: Type of every convolution, one of `dtypes.DTYPES`; by default float32, or as in the file.
        layout: Layout of every convolution, one of `layout.LAYOUTS`; by default `nchw`, or as in the file.
        epilogue: Operations of every forward convolution, in order; by default none, or as in the file.
        training: Whether each layer is followed by the gradients of its input and its weight. The first layer reads the
            network's input, which needs no gradient.

    Returns:
        One `Layer` per distinct workload, with the number of layers that share it.

    Raises:
        WorkloadError: The suite or the variant does not exist, the batch is not a positive integer that TVM can index,
            or the file is malformed.
        OSError: The file cannot be read.

    Examples:
        >>> import tvmconv
        >>> [layer.name for layer in tvmconv.suite("resnet50")][:2]
        ['conv1.7x7', 'conv2_1.1x1_reduce']
        >>> [layer.name for layer in tvmconv.suite("resnet50", training=True)][:3]
        ['conv1.7x7', 'conv1.7x7 wgrad', 'conv2_1.1x1_reduce']
    """
    if not isinstance(name, str):
        raise WorkloadError(f"expected the name of a suite or of a file NAME.json, not {quote(name)}")
    layers = iterate_layers(name, SuiteVariant(batch, dtype, layout, epilogue))
    return merge_equal_layers(list_training_layers(layers) if training else layers)


def iterate_layers(name: str, variant: SuiteVariant | None = None) -> tuple[Layer, ...]:
    """Return all layers of a suite in the network's order, repeated ones included; layers of a file keep their counts.
    The name and the errors are those of `suite`.
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
    """Return layers with the options of a variant; gradients keep their epilogues. Raise WorkloadError for a workload
    without such a variant.
    """
    without_epilogue = replace(variant, epilogue=None)
    return tuple(
        replace(layer, workload=(without_epilogue if is_gradient(layer.workload) else variant).apply_to(layer.workload))
        for layer in layers
    )


def is_suite_file(name: str) -> bool:
    """Return whether a suite's name is the path of a file."""
    return name not in SUITES and (name.endswith(".json") or Path(name).is_file())


def read_suite(file: Path) -> tuple[Layer, ...]:
    """Read the layers in a JSON file such as `FILE_EXAMPLE`. Each layer has a name, a workload's text and a count (by
    default 1); other keys are ignored. Raises WorkloadError if the file or one of its layers is malformed, and OSError
    if it cannot be read.
    """
    try:
        data = jsonfile.read_json(file).value
    except JsonError as error:
        raise WorkloadError(f"{file} is not a suite, expected JSON such as {FILE_EXAMPLE}: {error}") from error
    if not isinstance(data, list) or not data:
        raise WorkloadError(f"{file} is not a suite: expected a list of layers, as in {FILE_EXAMPLE}")
    layers = []
    for number, entry in enumerate(data, 1):
        try:
            layers.append(_parse_layer(entry))
        except WorkloadError as error:
            raise WorkloadError(f"{file}, layer {number}: {error}") from error
    name, num_duplicates = Counter(layer.name for layer in layers).most_common(1)[0]
    if num_duplicates > 1:
        raise WorkloadError(f"{file}: {num_duplicates} layers are named {quote(name)}, expected unique names")
    return tuple(layers)


def write_suite(layers: Iterable[Layer], file: Path) -> None:
    """Write layers to a file as `read_suite` reads it, one per line; raise OSError if that fails."""
    entries = ({"name": layer.name, "text": layer.workload.text, "count": layer.count} for layer in layers)
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    file.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _parse_layer(data: Any) -> Layer:
    """Return the layer that one entry of a file describes."""
    if not isinstance(data, dict):
        raise WorkloadError(f"{quote(data)}: expected an object, as in {FILE_EXAMPLE}")
    name, text, count = data.get("name"), data.get("text"), data.get("count", 1)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable() or "|" in name:
        raise WorkloadError(f"name={quote(name)}: expected up to {MAX_NAME_LENGTH} printable characters without |")
    if not isinstance(text, str):
        raise WorkloadError(f"text={quote(text)}: expected the text of a workload, as in {Conv2d.EXAMPLE}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
        raise WorkloadError(f"count={quote(count)}: expected an integer from 1 to {MAX_COUNT:,}")
    return Layer(name, parse(text), count)


def merge_equal_layers(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return each workload once, under the name of the first layer that has it, with the counts added up."""
    layer_by_workload: dict[Workload, Layer] = {}
    for layer in layers:
        first = layer_by_workload.get(layer.workload)
        layer_by_workload[layer.workload] = replace(first, count=first.count + layer.count) if first else layer
    return tuple(layer_by_workload.values())
