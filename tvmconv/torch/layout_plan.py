"""The layouts of the images inside a traced model: what they cost, their choice, and the graph with conversions.

Tensor cores are fastest with channels last, and a model is often contiguous. Between the first and the last convolution
of a chain, images may have any layout that all nodes there follow. The borders cost a conversion, or are kernels that
read one layout and write the other. The choice is the cheapest one by measured times where there are some, and by
estimates elsewhere. Results have the strides that PyTorch gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from tvmconv.cost_model.conversions import estimate_conversion_seconds, estimate_copy_seconds
from tvmconv.devices import Device
from tvmconv.logs.ranking import RecordIndex
from tvmconv.target import UNKNOWN_TARGET
from tvmconv.torch.conv_site import ConvSite, TensorMetadata
from tvmconv.torch.layout_choice import CostTable, minimize_cost
from tvmconv.torch.layout_recorder import LayoutRecorder, NodeLayout
from tvmconv.torch.tensor_layout import compute_strides, find_layout, lay_out
from tvmconv.workloads import parse
from tvmconv.workloads.conv_operator import ConvOperator
from tvmconv.workloads.dtypes import FLOAT32
from tvmconv.workloads.layout import CHANNELS_FIRST, CHANNELS_LAST, UNIFORM_LAYOUTS, join_layouts

FORBIDDEN_SECONDS = 1e6  # of a conversion between tensors that share memory
KERNEL_ROOFLINE_RATIO = 2.0  # typical time of a kernel that was not measured, relative to the roofline
COPY_RATIO = 1.5  # time of PyTorch's conversions, relative to a copy
CHANNELS_LAST_RATIO = 1.25  # time of float32 kernels without tensor cores for each channels-last side, on a GPU
MIN_WIDE_CHANNELS = 16  # input channels of images that are not those of a first layer
NAMES = {CHANNELS_FIRST: "channels first", CHANNELS_LAST: "channels last"}


class LayoutCosts:
    """Seconds of kernels and conversions on a device, by layout.

    Args:
        device: tvmconv's device.
        record_index: Measured kernels.
        needs_channels_last: Whether images of many channels have to be channels last, as in 8 bits.
    """

    def __init__(
        self, device: Device, record_index: RecordIndex | None = None, *, needs_channels_last: bool = False
    ) -> None:
        self._device, self._record_index = device, record_index
        self._needs_channels_last = needs_channels_last
        self._target = device.target or UNKNOWN_TARGET
        self._kernel_seconds: dict[str, dict[str, float]] = {}

    def kernel_seconds(self, text: str) -> Mapping[str, float]:
        """Return the seconds of the kernels of a workload by layout, whatever layout its text has.

        A layout without a measurement on the device takes as long as the fastest measured one, or else a multiple of
        the roofline, without its conversions and with those of the layout.
        """
        if text in self._kernel_seconds:
            return self._kernel_seconds[text]
        workload: Any = parse(text)
        key = replace(workload, layout=CHANNELS_FIRST).text
        if key not in self._kernel_seconds:
            variants: dict[str, Any] = {layout: replace(workload, layout=layout) for layout in workload.LAYOUTS}
            base_seconds = KERNEL_ROOFLINE_RATIO * self._target.roofline_seconds(workload)
            added = {layout: self._estimate_added_seconds(w, base_seconds) for layout, w in variants.items()}
            measured = {layout: seconds for layout, w in variants.items() if (seconds := self._find_measured(w))}
            if measured:
                base_seconds = min(max(seconds - added[layout], 0.0) for layout, seconds in measured.items())
            self._kernel_seconds[key] = {
                layout: measured.get(layout, base_seconds + added[layout]) + self._penalize(w)
                for layout, w in variants.items()
            }
        self._kernel_seconds[text] = self._kernel_seconds[key]
        return self._kernel_seconds[text]

    def _penalize(self, workload: ConvOperator) -> float:
        """Return the seconds that forbid a layout, or 0."""
        is_input_wide = workload.C >= MIN_WIDE_CHANNELS and workload.input_layout == CHANNELS_FIRST
        is_forbidden = is_input_wide or workload.output_layout == CHANNELS_FIRST
        return FORBIDDEN_SECONDS if self._needs_channels_last and is_forbidden else 0.0

    def conversion_seconds(self, nbytes: int) -> float:
        """Return the seconds in which PyTorch converts images of this size."""
        return COPY_RATIO * estimate_copy_seconds(nbytes, self._target)

    def _estimate_added_seconds(self, workload: ConvOperator, base_seconds: float) -> float:
        """Return the seconds that a kernel needs in addition because of the layout of its arrays."""
        if self._device.kind != "cuda":  # schedules without tensor cores follow the layout
            return 0.0
        if workload.dtype == FLOAT32.name:
            num_last = (workload.input_layout, workload.output_layout).count(CHANNELS_LAST)
            return base_seconds * (CHANNELS_LAST_RATIO**num_last - 1)
        return estimate_conversion_seconds(workload, self._target)

    def _find_measured(self, workload: ConvOperator) -> float | None:
        """Return the fastest measurement of a workload on the device; None if there is none."""
        if self._record_index is None:
            return None
        record = next(self._record_index.iterate_on_device(workload, self._device), None)
        return None if record is None else record.cost


@dataclass
class LayoutPlanner:
    """The planner of the layouts of a model's graphs."""

    costs: LayoutCosts  # costs of kernels and conversions
    # Function that measures PyTorch's nodes; None to take each for equally fast in both layouts.
    time_call: Callable[[str, Callable[[], object]], float] | None = None
    has_time: Callable[[], bool] = lambda: True  # function that returns whether there is time for further measurements
    # Whether weights get the layout of their convolution, for layers that PyTorch computes.
    converts_weights: bool = True
    num_moved: int = 0  # convolutions of all graphs that read or write another layout than in PyTorch
    num_conversions: int = 0  # conversions between nodes
    num_mixed: int = 0  # convolutions that read one layout and write the other
    layout: str = ""  # layout that was chosen for the last of these convolutions
    # Convolutions whose weights were converted, with the layouts that these had.
    former_weights: list[tuple[ConvSite, str]] = field(default_factory=list)

    def make_recorder(self, graph: fx.GraphModule, image_ndims: Collection[int]) -> LayoutRecorder:
        """Return the interpreter with which a graph has to be run before `plan`."""
        return LayoutRecorder(graph, image_ndims)

    def plan(self, graph: fx.GraphModule, sites: Sequence[ConvSite], recorder: LayoutRecorder) -> None:
        """Choose the layouts of a graph, set those of its sites, and insert conversions between other nodes.

        `sites` are the convolutions that have workloads and whose nodes are still in the graph.
        """
        shared_conversions = _insert_shared_conversions(graph, recorder)
        graph_layouts = _GraphLayouts(graph, sites, recorder.layouts)
        if self.time_call:
            recorder.time_nodes(graph_layouts.free_nodes(), self.time_call, self.has_time)
        chosen = minimize_cost(graph_layouts.domains(), graph_layouts.list_tables(self.costs))
        num_moved = self.num_moved
        for site in sites:
            self._apply_to_site(site, graph_layouts, chosen)
        if self.num_moved > num_moved:
            self.num_conversions += graph_layouts.insert_conversions(chosen, recorder.metadata)
        for node in shared_conversions:
            source, own_layout = node.args
            if self.num_moved == num_moved or chosen[node] == own_layout:
                node.replace_all_uses_with(source)
                graph.graph.erase_node(node)
            else:
                node.update_arg(1, chosen[node])

    def _apply_to_site(self, site: ConvSite, graph_layouts: _GraphLayouts, chosen: Mapping[Hashable, str]) -> None:
        """Set the workload, the layout of the output, the metadata and the weight of a site."""
        own_layout = parse(site.workload_text).layout  # type: ignore[attr-defined]
        source, output_layout = graph_layouts.find_image(site.input_node), chosen[site.nodes[-1]]
        given_layout = chosen[source] if source else None
        input_layout = graph_layouts.choose_input_layout(site, given_layout, output_layout, self.costs)
        layout = join_layouts(input_layout, output_layout)
        site.workload_text = replace(parse(site.workload_text), layout=layout).text  # type: ignore[type-var]
        site.output_layout = output_layout
        site.input_metadata = _lay_out_metadata(site.input_metadata, given_layout)
        self.num_conversions += given_layout not in (None, input_layout)
        if site.residual is not None:
            residual = graph_layouts.find_image(site.residual)
            site.residual_metadata = _lay_out_metadata(site.residual_metadata, residual and chosen[residual])
            self.num_conversions += residual is not None and chosen[residual] != output_layout
        if layout == own_layout:
            return
        self.num_moved, self.num_mixed = self.num_moved + 1, self.num_mixed + (input_layout != output_layout)
        self.layout = output_layout if output_layout != own_layout else input_layout
        weight = site.conv.weight
        if not self.converts_weights or not isinstance(weight, torch.nn.Parameter):  # others are computed at each call
            return
        weight_layout = CHANNELS_LAST if CHANNELS_LAST in (input_layout, output_layout) else CHANNELS_FIRST
        former_layout = find_layout(weight.shape, weight.stride())
        if weight.dim() > 3 and former_layout not in (None, weight_layout):  # PyTorch would convert it in each call
            self.former_weights.append((site, former_layout))
            weight.data = lay_out(weight.data, weight_layout)

    def restore_weights(self, *, only_of_kernels: bool = False) -> None:
        """Give weights their former layout: all of them, or those of convolutions that kernels compute."""
        remaining = []
        for site, layout in self.former_weights:
            if only_of_kernels and not site.module.kernels:
                remaining.append((site, layout))
            else:
                site.conv.weight.data = lay_out(site.conv.weight.data, layout)
        self.former_weights = remaining

    def drop(self) -> None:
        """Undo the plan, except for the nodes in the graph and the attributes of sites."""
        self.restore_weights()
        self.num_moved = self.num_mixed = self.num_conversions = 0

    def describe(self) -> list[str]:
        """Return a sentence about the layouts that differ from PyTorch's, if there are any."""
        if not self.num_moved:
            return []
        counts = {"kernels": self.num_mixed, "conversions": self.num_conversions}
        borders = " and ".join(
            f"{count} {name[: None if count > 1 else -1]}" for name, count in counts.items() if count
        )
        convolutions = f"{self.num_moved} convolution{'s' if self.num_moved > 1 else ''}"
        return [
            f"Inside the model, images are {NAMES[self.layout]} at {convolutions}, which is faster by measured and "
            f"estimated times; {f'layouts change in {borders}' if borders else 'no layout changes inside'}."
        ]


class _GraphLayouts:
    """The nodes of a graph whose images may have either layout, and their costs.

    A fused convolution is represented by its last node.
    """

    def __init__(self, graph: fx.GraphModule, sites: Sequence[ConvSite], layouts: Mapping[fx.Node, NodeLayout]) -> None:
        self._graph, self._layouts = graph, layouts
        self._sites = {site.nodes[-1]: site for site in sites}
        inside = {node for site in sites for node in (*site.nodes, *site.list_private_pad_nodes())}
        self._nodes = [node for node in graph.graph.nodes if node not in inside and node.op != "output"]

    def free_nodes(self) -> list[fx.Node]:
        """Return the nodes besides convolutions that follow the layout of their inputs."""
        return [node for node in self._nodes if self._follows_inputs(node)]

    def domains(self) -> dict[Hashable, Sequence[str]]:
        """Return the layouts that the result of each node may have, PyTorch's first."""
        layouts: dict[Hashable, Sequence[str]] = {}
        for node in [*self._nodes, *self._sites]:
            own_layout = self.recorded_layout(node)
            is_free = node in self._sites or self._follows_inputs(node)
            layouts[node] = sorted(UNIFORM_LAYOUTS, key=own_layout.__ne__) if is_free else (own_layout,)
        return layouts

    def recorded_layout(self, node: Any) -> str:
        """Return the layout of a node in the run: that of its result, or else of its inputs."""
        layouts = [self._layouts[each].layout for each in (node, *node.all_input_nodes) if each in self._layouts]
        return next((layout for layout in layouts if layout), CHANNELS_FIRST)

    def find_image(self, value: Any) -> fx.Node | None:
        """Return the node of an argument if it is an image whose layout matters; None otherwise."""
        recorded = self._layouts.get(value) if isinstance(value, fx.Node) else None
        return value if recorded and recorded.layout else None

    def list_tables(self, costs: LayoutCosts) -> list[CostTable]:
        """Return the costs of all nodes."""
        tables = [self._make_site_table(site, costs) for site in self._sites.values()]
        for node in self._graph.graph.nodes:
            if node in self._sites or (node.op != "output" and node not in self._nodes):
                continue
            follows = node.op != "output" and self._follows_inputs(node)
            for source in filter(self.find_image, node.all_input_nodes):
                tables.append(self._make_edge_table(source, node if follows else None, costs))
            if follows and self._layouts[node].seconds:
                seconds: dict[tuple[str, ...], float] = {
                    (layout,): each for layout, each in self._layouts[node].seconds.items()
                }
                tables.append(CostTable((node,), seconds))
        return tables

    def choose_input_layout(
        self, site: ConvSite, given_layout: str | None, output_layout: str, costs: LayoutCosts
    ) -> str:
        """Return the layout in which a site's kernel reads an image of a given layout; None stands for both."""
        return min(
            sorted(UNIFORM_LAYOUTS, key=(given_layout or output_layout).__ne__),
            key=lambda layout: self._compute_site_seconds(site, given_layout, layout, output_layout, costs),
        )

    def insert_conversions(self, chosen: Mapping[Hashable, str], metadata: Mapping[fx.Node, TensorMetadata]) -> int:
        """Insert conversions before nodes that need another layout, and of the results; return their number.

        Fused convolutions convert their inputs themselves.
        """
        num_conversions = 0
        for node in self._nodes:
            for source in filter(self.find_image, node.all_input_nodes):
                if node.target is convert_images:  # a shared conversion
                    num_conversions += chosen[node] != chosen[source]
                    continue
                layout = chosen[node] if self._follows_inputs(node) else self.recorded_layout(source)
                if layout != chosen[source]:
                    self._insert_before(node, source, convert_images, layout)
                    num_conversions += 1
        output = next(node for node in self._graph.graph.nodes if node.op == "output")
        for source in output.all_input_nodes:
            if result_layout := _find_result_layout(metadata.get(source)):
                self._insert_before(output, source, restore_strides, result_layout)
                num_conversions += self.find_image(source) is not None and result_layout != chosen[source]
        return num_conversions

    def _insert_before(self, node: fx.Node, source: fx.Node, function: Callable[..., Any], layout: str) -> None:
        with self._graph.graph.inserting_before(node):
            converted = self._graph.graph.call_function(function, (source, layout))
        node.replace_input_with(source, converted)

    def _follows_inputs(self, node: fx.Node) -> bool:
        return node in self._layouts and self._layouts[node].follows_inputs

    def _make_edge_table(self, source: fx.Node, node: fx.Node | None, costs: LayoutCosts) -> CostTable:
        """Return the costs of the conversions between two nodes, or to the recorded layout if `node` is None."""
        seconds = costs.conversion_seconds(self._layouts[source].nbytes)
        if node is None:
            own_layout = self.recorded_layout(source)
            return CostTable((source,), {(layout,): seconds * (layout != own_layout) for layout in UNIFORM_LAYOUTS})
        if source in self._layouts[node].shared_inputs:
            seconds = FORBIDDEN_SECONDS
        return CostTable(
            (source, node), {pair: seconds * (len({*pair}) > 1) for pair in product(*[UNIFORM_LAYOUTS] * 2)}
        )

    def _make_site_table(self, site: ConvSite, costs: LayoutCosts) -> CostTable:
        """Return the costs of a fused convolution by the layouts of its input, its residual and its output."""
        source, residual = self.find_image(site.input_node), self.find_image(site.residual)
        variables = tuple(dict.fromkeys(filter(None, (source, residual, site.nodes[-1]))))
        seconds = {}
        for values in product(*[UNIFORM_LAYOUTS] * len(variables)):
            layouts = dict(zip(variables, values, strict=True))
            output_layout, given_layout = layouts[site.nodes[-1]], layouts[source] if source else None
            cost = min(
                self._compute_site_seconds(site, given_layout, layout, output_layout, costs)
                for layout in UNIFORM_LAYOUTS
            )
            if residual and layouts[residual] != output_layout:
                cost += costs.conversion_seconds(self._layouts[residual].nbytes)
            seconds[values] = cost
        return CostTable(variables, seconds)

    def _compute_site_seconds(
        self, site: ConvSite, given_layout: str | None, input_layout: str, output_layout: str, costs: LayoutCosts
    ) -> float:
        """Return the seconds of a kernel, with the conversion of its input if it has another layout."""
        # Transposed convolutions have no mixed layouts.
        seconds_by_layout = costs.kernel_seconds(site.workload_text)
        seconds = seconds_by_layout.get(join_layouts(input_layout, output_layout), FORBIDDEN_SECONDS)
        if given_layout in (None, input_layout):
            return seconds
        return seconds + costs.conversion_seconds(self._layouts[site.input_node].nbytes)


def _insert_shared_conversions(graph: fx.GraphModule, recorder: LayoutRecorder) -> list[fx.Node]:
    """Insert a node that may convert an image once for all that read it, and return these nodes.

    Convolutions and nodes that follow their inputs need none, because they can compute the other layout. The readers
    must not share memory with the image, as they do if they write to it.
    """
    inserted = []
    for node in list(graph.graph.nodes):
        recorded = recorder.layouts.get(node)
        if not recorded or not recorded.layout or recorded.follows_inputs or len(node.users) < 2:
            continue
        metadata = recorder.metadata.get(node)
        is_shared = any(node in recorder.layouts[user].shared_inputs for user in node.users if user.op != "output")
        if metadata is None or is_shared or recorder.is_convolution(node):
            continue
        with graph.graph.inserting_after(node):
            conversion = graph.graph.call_function(convert_images, (node, recorded.layout))
        node.replace_all_uses_with(conversion, delete_user_cb=lambda user, own=conversion: user is not own)
        recorder.layouts[conversion] = NodeLayout(recorded.layout, recorded.nbytes, follows_inputs=True)
        recorder.metadata[conversion] = metadata
        inserted.append(conversion)
    return inserted


def convert_images(value: Any, layout: str) -> Any:
    """Return a value with the tensors (N, C, space) in it in a layout."""
    return tree_map_only(torch.Tensor, lambda tensor: lay_out(tensor, layout) if tensor.dim() > 2 else tensor, value)


def restore_strides(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor with the strides of a new one in a layout, also along axes of size 1."""
    tensor, strides = lay_out(tensor, layout), compute_strides(tensor.shape, layout)
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def _find_result_layout(metadata: TensorMetadata | None) -> str | None:
    """Return the layout whose strides a result has; None if it is no image, or a view of one."""
    if metadata is None or len(metadata.shape) < 3:
        return None
    return next(
        (layout for layout in UNIFORM_LAYOUTS if compute_strides(metadata.shape, layout) == metadata.stride), None
    )


def _lay_out_metadata(metadata: TensorMetadata, layout: str | None) -> TensorMetadata:
    """Return the metadata of the same tensor in a layout; None keeps it."""
    if layout in (None, metadata.layout):
        return metadata
    return replace(metadata, stride=compute_strides(metadata.shape, str(layout)))
