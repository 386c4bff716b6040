"""The transposed weight of a gradient, for operands that matrix instructions read along the filters."""

from __future__ import annotations

import math

from tvmconv.workloads import Conv

from ...tir_builder import Buffer, allocate
from ..layout_conversion import emit_transpose


def emit_transposed_filters(forward: Conv, filters: Buffer) -> Buffer:
    """Emit the transposition of a weight, and return the transposed one in a workspace.

    A weight (filters, taps, channels of a group) becomes (taps, channels of a group, filters).
    """
    columns = math.prod(forward.kernel) * (forward.C // forward.groups)
    transposed = allocate("K_transposed", forward.O * columns, forward.storage, "global")
    emit_transpose(filters, transposed, 1, forward.O, columns)
    return transposed
