import subprocess
import sys

import pytest

from tvmconv import devices
from tvmconv.devices import Arch, find_device, list_devices, opencl
from tvmconv.devices.cuda import device as cuda
from tvmconv.devices.device import DeviceNotFoundError
from tvmconv.errors import DeviceError

UNKNOWN = ("", "gpu", "cuda:", "cuda:-1", "opencl:x", "opencl:" + "9" * 5000, "opencl:٠")


@pytest.mark.parametrize("text", [*UNKNOWN, "sm_9", "sm_٩٠", "sm_90:0", "rpc:", "CUDA:0"])
def test_unknown_text_is_quoted_with_the_known_forms(text):
    forms = r"expected auto, cuda:N, opencl:N, rpc:KEY, or an architecture .* sm_90"
    with pytest.raises(DeviceError, match=forms) as caught:
        find_device(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_out_of_range_tells_what_there_is(opencl):
    with pytest.raises(DeviceError, match=r"no device 'opencl:99': there (is|are) opencl:0"):
        find_device("opencl:99")


def test_an_architecture_has_a_target_and_does_not_run():
    arch = find_device("sm_90")
    assert isinstance(arch, Arch)
    assert arch.make_target().attrs["arch"] == "sm_90"
    with pytest.raises(DeviceError, match="sm_90 is to compile for only"):
        arch.load(None)


def test_auto_falls_back_to_opencl_where_there_is_no_gpu(opencl, no_driver):
    assert find_device("auto").text == "opencl:0"


def test_auto_with_no_device_at_all_names_both_remedies(monkeypatch, no_driver):
    def none():
        raise DeviceNotFoundError("opencl", "no driver", "pip install it")

    monkeypatch.setitem(devices._BACKENDS, "opencl", none)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver.*pip install it"):
        find_device("auto")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (0, r"no cuda device: no NVIDIA driver; install it .* or use opencl:0"),
        (12040, r"driver is of CUDA 12\.4; update it"),
    ],
)
def test_a_missing_or_old_driver_is_told_with_the_remedy(monkeypatch, no_driver, version, message):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (runtime.cudaError_t.cudaSuccess, version))
    with pytest.raises(DeviceError, match=message):
        find_device("cuda:0")
    if version:  # `auto` replaces no GPU for want of a new driver
        with pytest.raises(DeviceError, match=message):
            find_device("auto")


@pytest.mark.parametrize("has_driver", [True, False])
def test_auto_replaces_no_gpu_for_want_of_cuda_bindings(monkeypatch, opencl, has_driver, tmp_path):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(cuda, "DRIVER_FILES", (str(tmp_path / ("" if has_driver else "absent")),))
    with pytest.raises(DeviceError, match=r'pip install "cuda-bindings==13\.\*"'):
        find_device("cuda:0")
    if not has_driver:
        assert find_device("auto") == opencl
        return
    with pytest.raises(DeviceError, match=r"cuda-bindings does not import .* pip install \"cuda-bindings"):
        find_device("auto")


def test_missing_pyopencl_is_told_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    opencl._query_devices.cache_clear()
    with pytest.raises(DeviceError, match=r'pip install "pyopencl\[pocl\]"'):
        find_device("opencl:0")


def test_inventory_lists_devices_and_the_compiler(opencl):
    entries = {entry.text: entry for entry in list_devices()}
    assert entries["opencl:0"].device == opencl
    assert entries["sm_NN"].name or entries["sm_NN"].remedy


def test_inventory_does_not_import_tvm():
    code = "import sys; from tvmconv.devices import list_devices; list_devices(); sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def no_driver(monkeypatch):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    error = runtime.cudaError_t
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (error.cudaErrorInsufficientDriver, None))
    monkeypatch.setattr(runtime, "cudaDriverGetVersion", lambda: (error.cudaSuccess, 0))
