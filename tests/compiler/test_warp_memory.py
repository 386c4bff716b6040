"""What the lanes of a warp hold together is spread over them, or the kernel is refused: TVM alone would not say so."""

import re

import pytest
from tvmconv.builtin.conv.tensor_cores import tensorized_config

import tvmconv as tc
from tvmconv.compiler.device_lowering import list_warp_buffers, lower_module
from tvmconv.devices import find_device
from tvmconv.registry import find_schedule as find_schedule

W = tc.parse("conv2d:1x16x6x6,16x16x3x3,s1,p1,f16,nhwc")


def scheduled(name):
    return find_schedule(W, name).apply(W)[0].mod


def test_no_buffer_of_a_warp_is_left():
    (step,) = lower_module(scheduled("tensor_core"), find_device("sm_80").make_target()).kernels
    assert list_warp_buffers(step.function) == []


def test_a_kernel_in_which_one_is_left_is_refused(monkeypatch):
    """TVM's own pipeline spreads one of them."""
    monkeypatch.setattr("tvmconv.compiler.device_lowering._lower_warp_buffers", lambda device: device)
    with pytest.raises(
        tc.CompileError, match=r"^TVM cannot distribute [\w.]+, with the scope warp, over the lanes of a"
    ):
        lower_module(scheduled("tensor_core"), find_device("sm_80").make_target())


def test_no_register_is_chosen_by_the_lane():
    """A place that TVM cannot tell before the kernel runs would be an array in memory, and not in registers."""
    for dtype in ("f16", "tf32"):
        w = tc.parse(f"conv2d:1x64x7x7,64x64x3x3,s1,p1,{dtype},nhwc")
        products = re.findall(
            r"T.ptx_legacy.mma\(.*", tc.build(w, "tensor_core", arch="sm_80").format_ir_level("lowered")
        )
        assert products
        assert not [product for product in products if "threadIdx" in product]


def test_what_tvm_cannot_write_is_an_error_of_the_kernel(monkeypatch):
    monkeypatch.setattr(tensorized_config, "can_prefetch_fragments", lambda w, plan: plan.stages > 0)
    w = tc.parse("conv2d:1x32x9x9,16x32x1x1,s1,p0,f16,nhwc")
    kernel = tc.build(w, "tensor_core", arch="sm_80", config={"block_k": 32, "stages": 3, "fragment_prefetch": 1})
    with pytest.raises(tc.CompileError, match=r"^TVM cannot write the kernel: cp_async_wait_group: immediate operands"):
        _ = kernel.source
