"""Configs of `grouped_mma_sync` for convolutions: those of gradients of inputs, without classes of pixels."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvmconv.workloads import Conv

from .dgrad_config import MAX_STRIDE, MAX_UNIT_CHANNELS, GroupedDgradConfig
from .tile_config import can_divide_into_units


@dataclasses.dataclass(frozen=True)
class GroupedFpropConfig(GroupedDgradConfig):
    """One config, or many configs as columns, of a convolution that is channels last."""

    @classmethod
    def view_as_convolution(cls, w: Any) -> Any:
        """Return the convolution itself."""
        return w

    @property
    def argument_roles(self) -> dict[str, str]:
        """Names of the arguments in a direct convolution, which are their own."""
        return {}


def can_form_units(w: Conv) -> bool:
    """Whether groups are units of at most 64 channels in octets, filters have one plane, and no residual is added."""
    has_no_residual = all(operation.argument_kind in (None, "channel") for operation in w.argument_ops)
    view = w.to_channels_last()
    is_simple = max(w.stride) <= MAX_STRIDE and has_no_residual
    return is_simple and can_divide_into_units(view, MAX_UNIT_CHANNELS) and GroupedFpropConfig.has_config(view)
