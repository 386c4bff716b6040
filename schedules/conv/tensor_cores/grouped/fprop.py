"""Grouped convolutions with few channels per group, by mma.sync.

The kernel is that of gradients of inputs, with the window of X in place of that of dY. Filters stay in registers, and
pixels of a strided convolution are further apart in the window. Biases and activations are applied to the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.s_tir import Schedule

from tvmconv.registry import schedule
from tvmconv.space import Knobs
from tvmconv.workloads import Conv
from tvmconv.workloads.layout import CHANNELS_LAST

from ....tir_builder import Expr
from ...layout_conversion import build_channels_last_schedule
from ..gemm.epilogue_ops import EpilogueOps
from .dgrad import GroupedDgradKernel
from .fprop_config import GroupedFpropConfig, can_form_units


@schedule(
    *("conv1d", "conv2d", "conv3d"),
    dtypes=("float16", "bfloat16"),
    usage=lambda w, c: GroupedFpropConfig.compute_usage(w.to_channels_last(), c),
    condition=can_form_units,
    search_if=lambda w: w.layout == CHANNELS_LAST and can_form_units(w),
    starting_configs=lambda w: GroupedFpropConfig.list_starting_configs(w.to_channels_last()),
    supersedes=("implicit_gemm", "tensor_core"),
    device_kinds=("cuda",),
    min_arch=80,
)
def grouped_mma_sync(s: Schedule, w: Conv, k: Knobs) -> Schedule:
    """Multiply octets of channels of X, in shared memory, by filters that stay in registers."""
    config = GroupedFpropConfig.declare_knobs(w.to_channels_last(), k)
    return build_channels_last_schedule(w, lambda arguments: GroupedFpropKernel(config, arguments).emit())


class GroupedFpropKernel(GroupedDgradKernel):
    """Emitter of the kernel, whose window is that of X, and whose tile is that of Y."""

    def locate_filter(self, tap: int, channel: Expr, channel_in: Expr) -> tuple[Expr, ...]:
        """Return the index in K of a tap's weight, from a channel of X in a unit to one of Y."""
        first_output = (self.first_unit + self.unit) * self.config.outputs_per_unit
        inputs = self.view.C // self.view.groups
        return self.shape.array_index(first_output + channel, self.shape.tap_from_index(tap), channel_in % inputs)

    def pack_results(self, sums: Sequence[Expr], channel: Expr) -> None:
        """Apply the epilogue to the sums of two neighbouring channels of the CTA, and round them to a word."""
        ops = EpilogueOps.from_workload(self.view)
        first_channel = self.first_unit * self.config.outputs_per_unit + channel

        def apply(value: Expr, offset: int) -> Expr:
            return ops.apply(value, lambda name: self.arguments[name][first_channel + offset])

        results = [apply(value, offset) for offset, value in enumerate(sums)]
        ops.pack(self.packed, 0, results)
