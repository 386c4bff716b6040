"""How kernels of CUDA get their parameters from PyTorch's tensors, without a GPU: the driver is replaced."""

import contextlib
import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tvmconv.compiler.executable import ArrayType, CompiledKernel, Executable, LaunchConfig
from tvmconv.errors import DeviceError
from tvmconv.torch import launch, source_kernels
from tvmconv.torch.signature import parse_signature

STEP = CompiledKernel(b"", "main", LaunchConfig((1, 1, 1), (32, 1, 1)), arguments=(2, 0, 3, 1), shared_bytes=0)


class Recorder:
    """Stands for a kernel function: keeps the first word of each parameter of its launches."""

    launches: list = []  # noqa: RUF012

    def __init__(self, code, name, dynamic_shared_bytes):
        self.name = name

    def make_launcher(self, shape, stream, *, use_pdl):
        def queue(laid):
            addresses = (ctypes.c_uint64 * 4).from_address(laid.address)
            words = tuple(ctypes.c_uint64.from_address(address).value for address in addresses)
            self.launches.append((self.name, shape, words, stream, use_pdl))

        return queue


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(launch, "CudaFunction", Recorder)
    monkeypatch.setattr(Recorder, "launches", [])
    monkeypatch.setattr(launch, "encode_tensor_map", lambda told, pointer: (told * 1000 + pointer, 7))
    return Recorder.launches


def test_parameters_are_addresses_in_the_functions_order(recorded):
    step = launch._LoadedFunction(STEP)
    step.enqueue([10, 20, 30, 40], stream=5)
    step.enqueue([11, 21, 31, 41], stream=6)
    assert recorded == [
        ("main", STEP.launch, (30, 10, 40, 20), 5, False),
        ("main", STEP.launch, (31, 11, 41, 21), 6, False),
    ]


def test_a_kernel_that_waits_by_itself_is_launched_early(recorded):
    launch._LoadedFunction(replace(STEP, uses_pdl=True)).enqueue([10, 20, 30, 40], stream=5)
    assert recorded == [("main", STEP.launch, (30, 10, 40, 20), 5, True)]


def test_a_tensor_map_is_encoded_once_for_an_address(recorded, monkeypatch):
    asked = []
    monkeypatch.setattr(
        launch, "encode_tensor_map", lambda told, pointer: asked.append(pointer) or (told * 1000 + pointer, 7)
    )
    step = launch._LoadedFunction(replace(STEP, tensor_maps=((1, 3),)))
    for first in (10, 10, 12, 10):
        step.enqueue([first, 20, 30, 40], stream=0)
    assert asked == [10, 12]
    assert [words[1] for _, _, words, _, _ in recorded] == [3010, 3010, 3012, 3010]
    for first in range(100, 100 + 2 * launch.MAX_TENSOR_MAPS):
        step.enqueue([first, 20, 30, 40], stream=0)
    assert step._encode_map.cache_info().currsize == launch.MAX_TENSOR_MAPS


def test_kernels_of_a_source_keep_launchers(recorded, monkeypatch):
    streams, made = iter((5, 5, 6, 5)), []
    fakes = {"get_device_capability": lambda _: (9, 0), "current_device": lambda: 0, "device": contextlib.nullcontext}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    cubin = SimpleNamespace(image=b"", kernels={"main": None})
    monkeypatch.setattr(source_kernels.nvrtc, "compile_cubin", lambda *_: cubin)
    monkeypatch.setattr(source_kernels, "make_context_current", lambda _: None)
    monkeypatch.setattr(source_kernels, "get_current_stream", lambda _: next(streams))
    monkeypatch.setattr(source_kernels, "CudaFunction", lambda code, name: made.append(name) or Recorder(code, name, 0))
    monkeypatch.setattr(source_kernels, "MAX_LAUNCHERS", 2)
    kernels, shape = source_kernels.SourceKernels("", torch.device("cuda:0")), STEP.launch
    x = torch.zeros(1)
    for number, grid in enumerate((1, 1, 1, 2)):
        kernels.launch("main", replace(shape, grid=(grid, 1, 1)), [x, number, 1.0, None])
    assert [(each[2], each[3]) for each in recorded] == [
        ((x.data_ptr(), number, 0x3F800000, 0), stream) for number, stream in enumerate((5, 5, 6, 5))
    ]
    assert [each[1].grid[0] for each in recorded] == [1, 1, 1, 2]
    assert (len(made), len(kernels._launchers), len(kernels._free_params["main"])) == (1, 1, 1)


def test_kernels_that_read_constant_memory_are_refused():
    array = ArrayType((1,), "float32")
    program = Executable((replace(STEP, constants=((0, "k"),)),), (array, array, array))
    form = parse_signature("conv2d:1x1x1x1,1x1x1x1")
    with pytest.raises(DeviceError, match="constant memory"):
        launch.make_launcher(form, program, None, torch.device("cpu"))
