"""Operators of 8-bit convolutions: `tvmconv::quantize`, and `tvmconv::quantized_conv` with an installed kernel.

`tvmconv::quantize_gated` rounds the product of an activation and a gate. On the CPU, PyTorch computes both roundings.
"""

from __future__ import annotations

import torch

from tvmconv.errors import Error
from tvmconv.torch.eight_bit_rounding import round_to_8_bits
from tvmconv.torch.operator import check_tensors, find_kernel, refresh_weight
from tvmconv.torch.operator_library import define_operator
from tvmconv.torch.quantize_kernel import can_quantize_gated, launch_quantize, launch_quantize_gated
from tvmconv.torch.signature import QUANTIZATION_OPS, parse_signature
from tvmconv.torch.tensor_layout import allocate_like, lay_out
from tvmconv.workloads.layout import CHANNELS_LAST


def _quantize_on_cpu(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0) -> torch.Tensor:
    return lay_out(round_to_8_bits(x.float() * factor, dtype, zero_point), CHANNELS_LAST)


def _quantize_on_gpu(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0) -> torch.Tensor:
    x = lay_out(x, CHANNELS_LAST)
    y = allocate_like(x, CHANNELS_LAST, dtype=dtype)
    launch_quantize(x, factor, y, zero_point)
    return y


def _quantize_gated_on_cpu(
    x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0
) -> torch.Tensor:
    return _quantize_on_cpu(x.float() * gate.float(), factor, dtype, zero_point)


def _quantize_gated_on_gpu(
    x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0
) -> torch.Tensor:
    x = lay_out(x, CHANNELS_LAST)
    if not can_quantize_gated(x, gate):
        return _quantize_on_gpu(x * gate, factor, dtype, zero_point)
    y = allocate_like(x, CHANNELS_LAST, dtype=dtype)
    launch_quantize_gated(x, gate.reshape(gate.shape[:2]).contiguous(), factor, y, zero_point)
    return y


def _make_fake_quantized_gated(
    x: torch.Tensor, gate: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0
) -> torch.Tensor:
    return _make_fake_quantized(x, factor, dtype, zero_point)


def _make_fake_quantized(
    x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, zero_point: int = 0
) -> torch.Tensor:
    return allocate_like(x, CHANNELS_LAST, dtype=dtype)


def _run_quantized_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    scale: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    quantize: torch.Tensor | None,
    slope: torch.Tensor | None,
    workload: str,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    launcher_function, signature = find_kernel(workload, x.device)
    check_tensors(signature, x, weight, bias, add)
    arguments = dict(zip(QUANTIZATION_OPS, (scale, tensor_scale, quantize, zero_point), strict=True))
    quantization = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    if tuple(quantization) != signature.quantization_ops or (slope is None) == signature.takes_slope:
        names = ", ".join(quantization) or "-"
        raise Error(f"{signature.workload.text}: expected the arguments of its epilogue, not {names}")
    for name, tensor in (*quantization.items(), *([("slope", slope)] if slope is not None else [])):
        count = signature.workload.O if name in ("scale", "slope") else 1
        if tensor.numel() != count or tensor.dtype != torch.float32 or tensor.device != x.device:
            raise Error(f"{signature.workload.text}: {name}: expected {count} numbers in float32 on {x.device}")
    refresh_weight(weight)
    residual = None if add is None else signature.to_output_layout(add)
    operands = (signature.to_input_layout(x), signature.to_input_layout(weight), bias, residual, slope)
    return launcher_function(*operands, quantization=quantization)


def _make_fake_output(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add: torch.Tensor | None,
    scale: torch.Tensor | None,
    tensor_scale: torch.Tensor | None,
    quantize: torch.Tensor | None,
    slope: torch.Tensor | None,
    workload: str,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    return parse_signature(workload).allocate_output(x.device)


quantize = define_operator(
    "quantize(Tensor x, Tensor factor, ScalarType dtype, int zero_point=0) -> Tensor",
    cpu=_quantize_on_cpu,
    cuda=_quantize_on_gpu,
    fake=_make_fake_quantized,
)
quantize_gated = define_operator(
    "quantize_gated(Tensor x, Tensor gate, Tensor factor, ScalarType dtype, int zero_point=0) -> Tensor",
    cpu=_quantize_gated_on_cpu,
    cuda=_quantize_gated_on_gpu,
    fake=_make_fake_quantized_gated,
)
quantized_conv = define_operator(
    "quantized_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? add, Tensor? scale, Tensor? tensor_scale,"
    " Tensor? quantize, Tensor? slope, str workload, Tensor? zero_point=None) -> Tensor",
    cpu=_run_quantized_conv,
    fake=_make_fake_output,
)
