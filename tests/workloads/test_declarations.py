"""Tensor expressions of convolutions and filters: they compute the reference, and stages around the sum go inline."""

import pytest
import tvm
from hypothesis import given, settings
from nasty_workloads import CONVOLUTIONS, FILTERS, declares_its_reference
from strategies import any_convolutions

from tvmconv.workloads import parse


@pytest.mark.sample(8)
@pytest.mark.parametrize("text", [*CONVOLUTIONS, *FILTERS])
def test_declaration_computes_the_reference(text):
    assert declares_its_reference(parse(text))


@given(any_convolutions(max_flops=20_000))
@settings(max_examples=10)
def test_declaration_of_any_convolution_computes_the_reference(workload):
    assert declares_its_reference(workload)


@pytest.mark.parametrize("text", [*CONVOLUTIONS, "conv2d:2x4x5x7,6x2x3x3,p1,g2,f16,nhwc,bias,add,silu", *FILTERS])
def test_all_stages_but_the_sum_can_be_inlined(text):
    schedule = tvm.s_tir.Schedule(parse(text).prim_func())
    total = schedule.get_sblock("sum")
    schedule.cache_write(total, 0, "local")
    schedule.reverse_compute_inline(schedule.get_sblock("Y"))
    for stage in ("padded", "weight") if text.startswith("conv") else ("padded",):
        schedule.compute_inline(schedule.get_sblock(stage))
    blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
    assert [schedule.get(block).name_hint for block in blocks] == ["sum", "sum_local"]


@pytest.mark.parametrize(("text", "shape"), [("filter1d:13,k5", (17,)), ("filter2d:7x11x3,3x5", (9, 15, 3))])
def test_padded_stage_has_the_ghost_cells_that_the_mask_reaches(text, shape):
    schedule = tvm.s_tir.Schedule(parse(text).prim_func())
    axes = schedule.get(schedule.get_sblock("padded")).iter_vars
    assert tuple(int(axis.dom.extent) for axis in axes) == parse(text).padded_shape == shape
