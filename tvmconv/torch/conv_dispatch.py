"""The choice at each call of a convolution for training: tvmconv's operators, or PyTorch's function.

A convolution is described by its `ConvCall`: shapes, options, dtype, layout and device. tvmconv's operators compute a
call if the kernel table has a kernel for one of its three products. `tvmconv.torch.functional` lists the tensors that
have no call, and are left to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tvmconv.errors import Error
from tvmconv.torch.conv_autograd import run_call, run_call_with_stats, run_operator, run_operator_with_stats
from tvmconv.torch.conv_call import FORWARD_STATS, KERNEL_DTYPES, ConvCall
from tvmconv.torch.conv_operators import make_call
from tvmconv.torch.kernel_table import RecordedCall, table
from tvmconv.torch.layer import is_tf32_allowed
from tvmconv.torch.operator_library import is_transformed

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
SPATIAL_NDIMS = (1, 2, 3)
MAX_CACHED_CALLS = 4096
OTHER_CALL_MESSAGE = "a compiled convolution has another dtype or shape than when its graph was captured"

IntOrSizes = int | Sequence[int]

_call_cache: dict[Any, ConvCall | None] = {}  # by the properties of the tensors and the options


def convolve(
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: IntOrSizes,
    padding: IntOrSizes | str,
    dilation: IntOrSizes,
    groups: int,
    output_padding: IntOrSizes | None = None,
    *,
    path: str = "",
    uses_operator: bool | None = None,
    wants_stats: bool = False,
) -> torch.Tensor:
    """Compute a convolution by tvmconv's operators, or by PyTorch's function.

    With `output_padding`, the convolution is transposed. The path is that of a module, for recordings.
    `uses_operator` is None for the decision by the kernel table at each call. A compiled graph then has the operator
    for tensors on a GPU, because its calls have to look up the table. False stands for PyTorch's function. With
    `wants_stats`, a kernel that returns the statistics of the output attaches them, for the normalization that follows.
    """
    if torch.compiler.is_dynamo_compiling():
        if uses_operator or (uses_operator is None and x.device.type == "cuda"):
            call = _make_call(x, weight, bias, stride, padding, dilation, groups, output_padding)
            if call is not None:
                return run_operator(x, weight, bias, call)
    elif table.recorded is not None or (table.calls and uses_operator is not False):
        call = _find_call(x, weight, bias, stride, padding, dilation, groups, output_padding)
        if call is not None:
            if table.recorded is not None:
                table.recorded.append(_record(path, x, weight, bias, call))
            if call in table.calls and uses_operator is not False and not is_transformed():
                entry = table.find(FORWARD_STATS, call) if wants_stats and bias is None else None
                if entry is not None:
                    return run_call_with_stats(x, weight, call, entry)
                return run_call(x, weight, bias, call)
    if output_padding is None:
        return function(x, weight, bias, stride, padding, dilation, groups)
    return function(x, weight, bias, stride, padding, output_padding, groups, dilation)


def convolve_with_stats(
    x: torch.Tensor, weight: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute a convolution and the statistics of its output by the operator, while a graph is compiled.

    The convolution has no bias; the options are stride, padding, dilation and groups. None if PyTorch computes it.
    """
    call = _make_call(x, weight, None, *options)
    return None if call is None else run_operator_with_stats(x, weight, call)


def convolve_by_operator(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor:
    """Compute a convolution by the operator, also of tensors that stand for others while a graph is compiled.

    The options are stride, padding, dilation, groups and, of a transposed convolution, output padding.
    """
    return run_operator(x, weight, bias, _require_call(x, weight, bias, *options))


def convolve_with_stats_by_operator(
    x: torch.Tensor, weight: torch.Tensor, bias: None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a convolution and the statistics of its output, as `convolve_by_operator`."""
    return run_operator_with_stats(x, weight, _require_call(x, weight, bias, *options))


def _require_call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> ConvCall:
    call = _make_call(x, weight, bias, *options)
    if call is None:
        raise Error(OTHER_CALL_MESSAGE)
    return call


def _find_call(x: Any, weight: Any, bias: Any, *options: Any) -> ConvCall | None:
    """Return the call of plain tensors from the cache, or make it; None if PyTorch computes it.

    The key has everything that decides about the call. Its cost counts, because every convolution pays it.
    """
    if type(x) not in PLAIN_TENSORS or type(weight) not in PLAIN_TENSORS:
        return None
    bias_key = None
    if bias is not None:
        if type(bias) not in PLAIN_TENSORS:
            return None
        bias_key = bias.shape, bias.dtype, bias.device
    device_type, dtype = x.device.type, x.dtype
    uses_autocast = torch.is_autocast_enabled(device_type)
    settings = torch.get_autocast_dtype(device_type) if uses_autocast else None
    if dtype is torch.float32:
        settings = settings, is_tf32_allowed()
    if x.layout is not torch.strided or weight.layout is not torch.strided:
        return None
    x_key, weight_key = (x.shape, x.stride(), dtype, x.device), (weight.shape, weight.stride(), weight.dtype)
    key = x_key, weight_key, weight.device, bias_key, settings, options
    try:
        return _call_cache[key]
    except KeyError:
        call = _make_call(x, weight, bias, *options)
    except TypeError:  # an option is a list, which has no hash
        return _make_call(x, weight, bias, *options)
    if len(_call_cache) >= MAX_CACHED_CALLS:
        _call_cache.clear()
    _call_cache[key] = call
    return call


def _make_call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: IntOrSizes,
    padding: IntOrSizes | str,
    dilation: IntOrSizes,
    groups: int,
    output_padding: IntOrSizes | None = None,
) -> ConvCall | None:
    """Return the call in autocast's dtype if it is enabled; None if PyTorch computes it.

    Calls that PyTorch rejects are among the latter, so that its errors are those that users know.
    """
    dtype, ndim = _find_dtype(x, weight, bias), x.dim() - 2
    has_axes = weight.dim() == x.dim() and ndim in SPATIAL_NDIMS and (bias is None or bias.dim() == 1)
    if dtype is None or not has_axes or 0 in (*x.shape, *weight.shape):
        return None
    strides, dilations = _expand(stride, ndim), _expand(dilation, ndim)
    more = _expand(0 if output_padding is None else output_padding, ndim)
    if strides is None or dilations is None or more is None or min(*strides, *dilations) < 1:
        return None
    sides = _find_sides(padding, strides, dilations, weight.shape[2:])
    if sides is None or not _has_fitting_channels(x, weight, bias, groups, is_transposed=output_padding is not None):
        return None
    call = make_call(
        *(x.shape, weight.shape, dtype, x.device, strides, sides, dilations, groups),
        *(output_padding is not None, more, _is_channels_last(x) or _is_channels_last(weight)),
    )
    return call if min(call.output_shape) > 0 else None


def _find_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """Return the dtype in which a convolution is computed; None if tvmconv has no kernels of it."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if any(tensor.dtype not in KERNEL_DTYPES or tensor.device != x.device for tensor in tensors):
        return None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        return dtype if dtype in KERNEL_DTYPES else None
    return x.dtype if all(tensor.dtype is x.dtype for tensor in tensors) else None


def _expand(value: Any, ndim: int) -> tuple[int, ...] | None:
    """Return one number for each axis; None for what is neither one number nor one for each axis."""
    if isinstance(value, int):
        return (value,) * ndim
    values = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    values = values * ndim if len(values) == 1 else values
    return values if len(values) == ndim and all(isinstance(number, int) for number in values) else None


def _find_sides(
    padding: IntOrSizes | str, stride: tuple[int, ...], dilation: tuple[int, ...], kernel: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the zeros before all axes and after all axes; None if the padding is not valid."""
    if padding == "valid":
        return (0,) * (2 * len(kernel))
    if padding == "same":
        if max(stride) > 1:
            return None
        totals = [step * (taps - 1) for step, taps in zip(dilation, kernel, strict=True)]
        return *(total // 2 for total in totals), *(total - total // 2 for total in totals)
    sizes = _expand(padding, len(kernel))
    return None if sizes is None or min(sizes) < 0 else sizes * 2


def _has_fitting_channels(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int, *, is_transposed: bool
) -> bool:
    """Return whether the channels of the tensors fit to each other."""
    if groups < 1 or weight.shape[0] % groups:
        return False
    if is_transposed:
        fits, channels = x.shape[1] == weight.shape[0], weight.shape[1] * groups
    else:
        fits, channels = x.shape[1] == weight.shape[1] * groups, weight.shape[0]
    return fits and (bias is None or bias.shape[0] == channels)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Return whether the channels of an image are neighbours in memory; False where both layouts are the same."""
    shape = tensor.shape
    return shape[1] > 1 and tensor.stride(1) == 1 and max(shape[2:]) > 1


def _record(path: str, x: torch.Tensor, weight: torch.Tensor, bias: Any, call: ConvCall) -> RecordedCall:
    # Checkpointing may run the forward pass without gradients, and needs them later.
    needs_dgrad = x.requires_grad if torch.is_grad_enabled() else weight.requires_grad
    strides = tuple(x.stride()), tuple(weight.stride())
    bias_dtype = None if bias is None else bias.dtype
    return RecordedCall(path, call, bias_dtype, needs_dgrad, weight.requires_grad, *strides)
