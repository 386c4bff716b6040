"""What a model's convolutions are: found in its graphs, and in a run on the example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tvmconv.errors import ModelError, WorkloadError
from tvmconv.models.graph import convolution
from tvmconv.torch.form import MEMORY_FORMATS
from tvmconv.torch.layer import CONVOLUTIONS, Key, key_of
from tvmconv.torch.model import Optimized
from tvmconv.torch.sites import Site, find_sites, hooked, rewrite
from tvmconv.torch.split import Part
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TF32 = "tf32"
ITSELF = "(itself)"  # the path of a model that is a convolution


@dataclass(frozen=True)
class Seen:
    """What a node of a graph gave when the model was run.

    Attributes:
        shape: of the tensor.
        stride: of it.
        dtype: of it.
        key: what a kernel has to be for, that takes it as the input.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    key: Key

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Seen:
        """What there is to see of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, key_of(tensor))

    def like(self) -> torch.Tensor:
        """Another tensor of this kind, of random numbers; of one that was expanded, they are as often the same."""
        length = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        numbers = torch.randn(length, dtype=torch.float32, device=self.key[2])
        return numbers.to(self.dtype).as_strided(self.shape, self.stride)

    @property
    def layout(self) -> str | None:
        """How it lies; None if it lies as in either layout, or in neither."""
        last = MEMORY_FORMATS.get(len(self.shape) - 2)
        if last is None:
            return CHANNELS_FIRST
        meta = torch.empty_strided(self.shape, self.stride, device="meta")
        first_too, last_too = meta.is_contiguous(), meta.is_contiguous(memory_format=last)
        if first_too == last_too:
            return None
        return CHANNELS_LAST if last_too else CHANNELS_FIRST


@dataclass
class Found:
    """A convolution of a model.

    Attributes:
        path: of its module in the model.
        text: of its workload, with what follows; "" if our kernels cannot compute it.
        reason: why not.
        module: what computes it in the optimised model; None if PyTorch does.
        x: its input.
        add: the residual, if there is one.
        site: where it was in the graph.
    """

    path: str
    text: str = ""
    reason: str = ""
    module: Any = None
    x: Seen | None = None
    add: Seen | None = None
    site: Site | None = None


class _Watching(fx.Interpreter):
    """Runs a graph and keeps what the nodes gave."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.seen: dict[fx.Node, Seen] = {}
        self._named: dict[str, Any] = {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph on arguments in order and by name."""
        self._named = kwargs
        return self.run(*args)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An argument."""
        return self._named[target] if target in self._named else super().placeholder(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.seen[n] = Seen.of(result)
        return result


def look(model: Optimized, parts: Sequence[Part], arguments: Sequence[Any]) -> list[Found]:
    """The convolutions of a model, after a run on the example; those of which there is a workload are replaced."""
    watching = []
    for part in parts:
        watching.append(_Watching(part.module.graph))
        part.module.run_by(watching[-1].call)
    with torch.no_grad():
        model(*arguments)
    found: list[Found] = []
    for part, watched in zip(parts, watching, strict=True):
        part.module.run_by(None)
        found += _replaced(part, watched.seen)
    seen = {one.path for one in found}
    for path, module in model.named_modules():
        if isinstance(module, tuple(CONVOLUTIONS)) and (path or ITSELF) not in seen:
            found.append(
                Found(path, reason="it did not run on the example, or in a module with hooks or of its own kind")
            )
    return found


def _replaced(part: Part, seen: dict[fx.Node, Seen]) -> list[Found]:
    """The convolutions of a part; those that are workloads are computed by modules of ours from now on."""
    sites = list(
        find_sites(part.module.graph, {node: (each.layout, each.shape, each.dtype) for node, each in seen.items()})
    )
    layouts = [each.layout for site in sites if (each := seen.get(site.nodes[0])) and each.layout]
    usual = max(layouts, key=layouts.count, default=CHANNELS_FIRST)
    found, ours = [], []
    for site in sites:
        one = Found(f"{part.path}.{site.path}".strip(".") or ITSELF)
        try:
            one.text = _workload(site, seen, usual).text
        except (WorkloadError, ModelError) as error:
            one.reason = str(error)
        else:
            ours.append((one, site))
            one.x = seen[site.nodes[0].args[0]]
            one.add = None if site.residual is None else seen[site.residual]
        found.append(one)
    rewrite(part.module.graph, [site for _, site in ours])
    for one, site in ours:
        one.module, one.site = site.module, site
    return found


def _workload(site: Site, seen: dict[fx.Node, Seen], usual: str) -> Conv:
    """The workload of a site.

    Raises:
        ModelError: our kernels cannot compute it, as the message tells.
        WorkloadError: it is no workload.
    """
    conv, nodes = site.conv, site.nodes
    given = nodes[0].args[0]
    x = seen.get(given) if isinstance(given, fx.Node) else None
    y = seen.get(nodes[0])
    if x is None or y is None:
        raise ModelError("it did not run on the example")
    reason = _reason(conv, x, y)
    if reason:
        raise ModelError(reason)
    padding = conv.padding
    if padding == "same":
        total = [dilation * (size - 1) for dilation, size in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = (*(each // 2 for each in total), *(each - each // 2 for each in total))
    elif padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    workload: Any = convolution(
        x.shape,
        tuple(conv.weight.shape),
        stride=tuple(conv.stride),
        padding=tuple(padding),
        dilation=tuple(conv.dilation),
        groups=conv.groups,
        dtype=TF32 if x.key[3] and y.dtype is torch.float32 else DTYPES[y.dtype],
        bias=conv.bias is not None or site.norm is not None,
    )
    return replace(workload, layout=y.layout or usual, epilogue=(*workload.epilogue, *site.names))


def _reason(conv: Any, x: Seen, y: Seen) -> str:
    """Why our kernels cannot compute a convolution of an input to an output; "" if they can."""
    if hooked(conv):
        return "it has hooks"
    if "weight" not in conv._parameters:
        return "its weight is computed"
    if conv.padding_mode != "zeros":
        return f"it pads by {conv.padding_mode}"
    weight = conv.weight
    if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is {type(weight).__name__} of {str(weight.layout).removeprefix('torch.')}"
    if weight.is_inference():
        return "its weight is an inference tensor, whose changes nobody sees"
    if y.dtype not in DTYPES:
        return f"it is of {str(y.dtype).removeprefix('torch.')}"
    if len(x.shape) != CONVOLUTIONS[type(conv)] + 2:
        return "its input has no axis for a batch"
    return ""
