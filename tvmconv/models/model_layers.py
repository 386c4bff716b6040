"""The layers of a suite that are derived from a model."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvmconv.errors import ModelError
from tvmconv.models import epilogue_fusion
from tvmconv.models.input_spec import InputSpec
from tvmconv.models.model_graph import ModelGraph
from tvmconv.optional_packages import format_install_command
from tvmconv.workloads.suites import MAX_NAME_LENGTH, Layer
from tvmconv.workloads.training import derive_layer_gradients

_CALLABLE_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class ModelLayers:
    """The convolutions of a model in the order of execution, repeated ones included."""

    layers: tuple[Layer, ...]  # with unique names
    skipped_layers: tuple[str, ...]  # one line per convolution that is not a workload, with the reason


def derive_layers(source: str, inputs: Sequence[InputSpec] = (), *, training: bool = False) -> ModelLayers:
    """Find the convolutions of a model, each with its epilogue; with `training`, those of a training step.

    The source is the path of an ONNX file, which is read as data, or `package.module:callable`, which is imported and
    run: a PyTorch module, or a function without arguments that returns one. An ONNX file needs the shapes of its inputs
    only for dynamic dimensions.

    Layers of a training step have no epilogue but their own bias, because a batch normalization needs statistics of the
    convolution's output. Each is followed by its dgrad if its input depends on a parameter, and by its wgrad if its
    weight does.

    Raises ModelError if the model cannot be read or does not run, or a package is missing.
    """
    is_callable = _CALLABLE_PATTERN.fullmatch(source) and not Path(source).exists()
    package, kind = ("torch", "PyTorch modules") if is_callable else ("onnx", "ONNX files")
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise ModelError(f"{source}: {kind} need {package}: {format_install_command(package)} ({error})") from error
    if is_callable:
        from tvmconv.models import torch_module

        graph = torch_module.trace_module(source, inputs)
    else:
        from tvmconv.models import onnx_graph

        graph = onnx_graph.read_graph(Path(source), inputs)
    layers = list_training_layers(graph) if training else epilogue_fusion.fuse_epilogues(graph)
    return ModelLayers(tuple(rename_layers(layers)), tuple(map(to_one_line, graph.skipped_layers)))


def list_training_layers(graph: ModelGraph) -> list[Layer]:
    """Return the convolutions of a graph, each followed by the gradients that training computes, under unique names."""
    differentiated = set(graph.parameters)  # tensors whose gradient training computes
    layers = [Layer(op.name, op.workload, 1) for op in graph.ops if op.workload]
    names = iter([layer.name for layer in rename_layers(layers)])
    training_layers: list[Layer] = []
    for op in graph.ops:
        if op.workload:
            x, weight = op.reads[:2]
            layer = Layer(next(names), op.workload, 1)
            training_layers += derive_layer_gradients(
                layer, num_dgrads=int(x in differentiated), has_wgrad=weight in differentiated
            )
        if not differentiated.isdisjoint(op.reads):
            differentiated.update(op.writes)
    return training_layers


def rename_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Return layers under names that a suite's file accepts: printable, not too long, and unique."""
    used_names: set[str] = set()
    renamed_layers = []
    for layer in layers:
        base_name = _replace_unprintable(layer.name) or "conv"
        name, number = _shorten_name(base_name, MAX_NAME_LENGTH), 1
        while name in used_names:
            number += 1
            name = _shorten_name(base_name, MAX_NAME_LENGTH - len(f"#{number}")) + f"#{number}"
        used_names.add(name)
        renamed_layers.append(replace(layer, name=name))
    return renamed_layers


def _shorten_name(name: str, length: int) -> str:
    """Return a name, or the end of one that is too long, because ends of names distinguish layers."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _replace_unprintable(name: str) -> str:
    return "".join(letter if letter.isprintable() and letter != "|" else "_" for letter in name)


def to_one_line(text: str) -> str:
    """Return a text with line breaks replaced by spaces and control characters by underscores."""
    return _replace_unprintable(" ".join(text.split()))
