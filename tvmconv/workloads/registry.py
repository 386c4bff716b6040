"""The operators by name, and the way from a text to a workload."""

from __future__ import annotations

from tvmconv.errors import WorkloadError
from tvmconv.workloads.base import Workload
from tvmconv.workloads.conv2d import Conv2d
from tvmconv.workloads.filters import Filter1d, Filter2d
from tvmconv.workloads.text import quote

OPERATORS: dict[str, type[Conv2d | Filter1d | Filter2d]] = {
    operator.operator: operator for operator in (Conv2d, Filter1d, Filter2d)
}


def parse(text: str) -> Workload:
    """Read a workload from its text, such as `conv2d:1x64x56x56,64x64x3x3,s1,p1`.

    Raises:
        WorkloadError: the operator is unknown, the text malformed, or its numbers contradict each other.
    """
    operator, colon, _ = text.partition(":")
    if not colon:
        raise WorkloadError(f"{quote(text)}: expected OPERATOR:SIZES, as in {Conv2d.EXAMPLE}")
    if operator not in OPERATORS:
        raise WorkloadError(f"unknown operator {quote(operator)}: expected one of {', '.join(OPERATORS)}")
    return OPERATORS[operator].parse(text)
