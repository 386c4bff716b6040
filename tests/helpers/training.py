"""Random convolutions of PyTorch for training, and kernels for them that are built from one schedule."""

import contextlib
import copy
import random

import torch
from torch import nn

from tvmconv import registry
from tvmconv.devices import find_device
from tvmconv.measure.builder import BuilderInput, build_all
from tvmconv.torch import functional
from tvmconv.torch.conv_call import make_workload
from tvmconv.torch.kernel_table import table
from tvmconv.torch.kernels import AvailableKernel
from tvmconv.torch.product_task import make_entry

FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def draw_module(seed):
    """A random convolution or transposed convolution, and the shape of its input."""
    draw = random.Random(seed)
    ndim, transposed = draw.choice([1, 2, 2, 2, 3]), draw.random() < 0.3
    groups = draw.choice([1, 1, 2, 4])
    channels, filters = groups * draw.choice([1, 2, 4]), groups * draw.choice([1, 3, 4])
    kernel = [draw.choice([1, 2, 3, 5] if ndim < 3 else [1, 3]) for _ in range(ndim)]
    stride, dilation = ([draw.choice([1, 1, 2]) for _ in range(ndim)] for _ in range(2))
    options = {"dilation": dilation, "groups": groups, "bias": draw.random() < 0.5}
    if transposed:
        layer_type = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[ndim - 1]
        options |= {"stride": stride, "padding": [draw.randrange(size) for size in kernel]}
        options["output_padding"] = [draw.randrange(step) for step in stride]
    else:
        layer_type = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[ndim - 1]
        is_same = draw.random() < 0.3
        options |= (
            {"padding": "same"} if is_same else {"stride": stride, "padding": [draw.randrange(3) for _ in kernel]}
        )
    sizes = [draw.randrange(10, 14) for _ in range(ndim)]
    torch.manual_seed(seed)
    return layer_type(channels, filters, kernel, **options), (draw.choice([1, 3]), channels, *sizes)


def lay_out(tensor, is_last):
    """A tensor channels last, if it is asked for; a signal by its strides."""
    if not is_last:
        return tensor
    if tensor.dim() == 3:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous(memory_format=FORMATS[tensor.dim() - 2])


def run_with_gradients(layer, x, function=None):
    """The output of a layer, and the gradients of its input and parameters for a loss with random factors.

    The function computes the layer; by default it is the layer itself.
    """
    x = x.detach().requires_grad_()
    y = (layer if function is None else function)(x)
    factors = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    parameters = list(layer.parameters())
    # The factors are exact in each dtype, so that all dtypes have the same loss.
    factors = (factors * 16).round() / 16
    return [y, *torch.autograd.grad(y, [x, *parameters], factors.to(y.device, y.dtype))]


def differ(results, wanted, floor=0.0):
    """The largest relative L2 difference of tensors from those in float64.

    Differences of tensors whose norm is below `floor` times the largest norm are relative to that bound: a scale that a
    later normalization removes has a gradient of zero, of which 16 bits keep the rounding errors.
    """
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(results, wanted, strict=True)]
    bound = floor * max(float(other.norm()) for _, other in pairs)
    return max(float((one - other).norm()) / max(float(other.norm()), bound) for one, other in pairs if other.any())


def in_double(layer):
    """A copy of a layer of PyTorch in float64, with the same values."""
    return copy.deepcopy(layer).double()


@contextlib.contextmanager
def by_operators(run):
    """Compute the calls of a function by tvmconv's operators, which run PyTorch's kernels if there are no others."""
    with functional.record_calls() as calls:
        run()
    added = {recorded.call for recorded in calls} - table.calls
    table.calls.update(added)
    try:
        yield calls
    finally:
        table.calls.difference_update(added)


def build_entries(call, schedules, device="opencl:0"):
    """Build an entry of the kernel table for each product, by the named schedules."""
    found = find_device(device)
    workloads = [make_workload(product, call) for product in schedules]
    inputs = [
        BuilderInput(workload, registry.find_schedule(workload, name), {})
        for workload, name in zip(workloads, schedules.values(), strict=True)
    ]
    entries = {}
    for product, workload, result in zip(schedules, workloads, build_all(inputs, found), strict=True):
        assert result.executable is not None, result.message
        kernel = AvailableKernel(workload.text, "", "default", result.executable, found, call.device)
        entries[product] = make_entry(kernel)
    return entries
