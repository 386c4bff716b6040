"""The emulator computes what an H100 has computed (tests/data/golden_sm_90.npz), and refuses what the H100 refuses."""

import json
from pathlib import Path

import emulate
import golden_kernels
import numpy as np
import pytest

from tvmconv.emulator.errors import ExecutionError

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_sm_90.npz")
REFUSED = json.loads(str(GOLDEN["about"]))["failures"]


def test_each_golden_kernel_is_recorded():
    assert set(golden_kernels.KERNELS) == {*GOLDEN.files, *REFUSED} - {"about"}


@pytest.mark.sample(24)
@pytest.mark.parametrize("name", GOLDEN.files[1:])
def test_emulator_agrees_with_the_hardware(name):
    kernel = golden_kernels.KERNELS[name]
    found = emulate.run(kernel.lower(), kernel.inputs).reshape(-1)
    recorded = GOLDEN[name].view(found.dtype)
    if kernel.tolerance:
        atol = kernel.tolerance * np.abs(recorded.astype(np.float64)).max()
        np.testing.assert_allclose(found.astype(np.float64), recorded.astype(np.float64), rtol=0, atol=atol)
    else:
        np.testing.assert_array_equal(found.view(np.uint8), recorded.view(np.uint8))


@pytest.mark.parametrize("name", REFUSED)
def test_emulator_refuses_what_the_hardware_refuses(name):
    kernel = golden_kernels.KERNELS[name]
    with pytest.raises(ExecutionError):
        emulate.run(kernel.lower(), kernel.inputs)
