"""Kernels compiled without a GPU for the architectures that have asynchronous copies."""

import pytest

import tvmconv as tc
from tvmconv import registry
from tvmconv.compiler import nvrtc
from tvmconv.target import get_block_limits

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # since cp.async
DTYPES = ("f16", "bf16", "tf32")

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


def space_of(w, schedule, arch="sm_90"):
    """The configs of a schedule that an architecture has room for."""
    return registry.find_schedule(w, schedule).space(w, get_block_limits(arch))


def check_spills(w, schedule, arch):
    """That the default compiles, and has all that it keeps in registers."""
    resources = tc.build(w, schedule, arch=arch).resources
    assert (resources.spills, resources.stack_bytes) == (0, 0), w
    assert 0 < resources.registers <= 255
