"""From a model to the layers of a suite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvmconv.errors import ModelError
from tvmconv.extras import how_to_install
from tvmconv.models import fuse
from tvmconv.models.graph import Graph
from tvmconv.models.inputs import Input
from tvmconv.workloads.suites import LONGEST_NAME, Layer

_CALLABLE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Derived:
    """The convolutions of a model.

    Attributes:
        layers: one for each, in the order in which they are executed, equal ones as well; each with a name of its own.
        left_out: those that are no workloads, a line each, with the reason.
    """

    layers: tuple[Layer, ...]
    left_out: tuple[str, ...]


def derive(source: str, inputs: Sequence[Input] = ()) -> Derived:
    """Find the convolutions of a model, each with the epilogue that follows it.

    Args:
        source: the path of an ONNX file, which is read as data; or `package.module:callable`, which is imported and
            run: a PyTorch module, or what gives one when it is called without arguments.
        inputs: the shapes of the model's inputs. An ONNX file needs them where it does not say them itself.

    Raises:
        ModelError: the model cannot be read, or does not run on these inputs; or what that needs is not installed.
        OSError: the file cannot be read.
    """
    is_callable = _CALLABLE.fullmatch(source) and not Path(source).exists()
    graph = _torch_graph(source, inputs) if is_callable else _onnx_graph(Path(source), inputs)
    return Derived(tuple(named(fuse.layers(graph))), tuple(map(one_line, graph.left_out)))


def _onnx_graph(file: Path, inputs: Sequence[Input]) -> Graph:
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{file}: ONNX files need onnx: {how_to_install('onnx')} ({error})") from error
    from tvmconv.models import onnx_graph

    return onnx_graph.read(file, inputs)


def _torch_graph(source: str, inputs: Sequence[Input]) -> Graph:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ModelError(f"{source}: PyTorch modules need torch: {how_to_install('torch')} ({error})") from error
    from tvmconv.models import torch_module

    return torch_module.trace(source, inputs)


def named(layers: Iterable[Layer]) -> list[Layer]:
    """Layers under names that a suite's file may have: printable, not too long, each there once."""
    there: set[str] = set()
    renamed = []
    for layer in layers:
        base = _printable(layer.name) or "conv"
        name, number = _last(base, LONGEST_NAME), 1
        while name in there:
            number += 1
            name = _last(base, LONGEST_NAME - len(f"#{number}")) + f"#{number}"
        there.add(name)
        renamed.append(replace(layer, name=name))
    return renamed


def _last(name: str, length: int) -> str:
    """A name, or the end of one that is too long: what tells layers apart is there."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _printable(name: str) -> str:
    return "".join(letter if letter.isprintable() and letter != "|" else "_" for letter in name)


def one_line(text: str) -> str:
    """A text whose line breaks and control characters are spaces and underscores."""
    return _printable(" ".join(text.split()))
