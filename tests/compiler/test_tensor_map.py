"""Kernels that take tensor maps, from the word that declares one to machine code."""

from dataclasses import replace

import emulate
import mapped
import pytest
from tvmconv.builtin.tir_builder import build_schedule

import tvmconv as tc
from tvmconv.compiler import nvrtc, sass
from tvmconv.compiler.device_lowering import lower_module
from tvmconv.compiler.source import strip_preamble
from tvmconv.devices import find_device

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))


def lowered(device="sm_90", **maps):
    """The program, with another map perhaps."""
    schedule = build_schedule(mapped.WORKLOAD, lambda arguments: mapped.program(arguments, **maps))
    return lower_module(schedule.mod, find_device(device).make_target())


@pytest.fixture(scope="module")
def kernel():
    return tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90")


def test_parameter_is_a_map_over_an_array_or_its_address():
    first, second = lowered().kernels
    assert [(p.name, p.index, p.tensor_map) for p in first.parameters] == [
        ("K_map", 1, mapped.WEIGHT),
        ("X_map", 0, mapped.IMAGE),
        ("sums_ptr", 3, None),
    ]
    assert first.tensor_maps == ((0, mapped.WEIGHT), (1, mapped.IMAGE))
    assert second.tensor_maps == ()


def test_text_takes_maps_by_value_and_declares_their_type():
    text = lowered().source
    assert "const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap X_map" in text
    assert text.startswith("#ifdef __CUDACC_RTC__\nstruct alignas(64) CUtensorMap { unsigned long long opaque[16]; };")
    assert "struct" not in strip_preamble(text)


@needs_nvrtc
def test_a_step_tells_its_maps_and_whether_it_waits_by_itself(kernel):
    first, second = kernel.executable.kernels
    assert (first.arguments, first.tensor_maps) == ((1, 0, 3), ((0, mapped.WEIGHT), (1, mapped.IMAGE)))
    assert (second.arguments, second.tensor_maps) == ((2, 3), ())
    assert [step.uses_pdl for step in kernel.executable.kernels] == [False, True]


@needs_nvrtc
def test_wgmma_is_compiled_for_the_architecture_that_has_it(kernel):
    assert "for 'sm_90a'" in kernel.cubin.log
    assert ".target sm_90a" in kernel.ptx
    assert kernel.device.arch == "sm_90"
    instructions = sass.disassemble(kernel.cubin.image)
    assert "HGMMA.64x64x16.F32" in instructions
    assert "UTMALDG.4D.IM2COL" in instructions
    assert kernel.resources.spills == 0


@pytest.mark.parametrize(
    ("source", "arch", "compiled"),
    [
        ('asm("wgmma.fence.sync.aligned;");', "sm_90", "sm_90a"),
        ('asm("setmaxnreg.inc.sync.aligned.u32 232;");', "sm_90", "sm_90a"),
        ('asm("setmaxnreg.inc.sync.aligned.u32 232;");', "sm_100", "sm_100a"),
        ('asm("wgmma.fence.sync.aligned;");', "sm_90a", "sm_90a"),
        ('asm("wgmma.fence.sync.aligned;");', "sm_80", "sm_80"),
        ('asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 …");', "sm_90", "sm_90"),
    ],
)
def test_only_what_an_architecture_alone_has_is_compiled_for_it(source, arch, compiled):
    assert nvrtc.select_arch_variant(source, arch) == compiled


def test_map_that_tma_cannot_take_is_refused_before_compiling():
    with pytest.raises(tc.CompileError, match="expected a copy of at most 256·256·256 elements"):
        lowered(weight=replace(mapped.WEIGHT, box=(64, 1, 512)))


def test_a_map_of_more_than_its_array_is_refused():
    larger = replace(mapped.WEIGHT, extents=(64, 9, 65))
    with pytest.raises(tc.CompileError, match="64·9·65 float16, 64·1·64 at a time, exceeds its array of 73728 bytes"):
        lowered(weight=larger)


def test_a_map_on_opencl_is_refused():
    with pytest.raises(tc.CompileError, match="tensor maps: expected the target cuda, not opencl"):
        lowered("opencl:0")


@needs_nvrtc
def test_tvms_runtime_does_not_launch_such_a_kernel(kernel):
    with pytest.raises(tc.CompileError, match="main_kernel takes tensor maps, which TVM's runtime does not encode"):
        kernel.lowered_module.build_runtime_module()


def test_a_kernel_of_tensor_maps_computes_what_it_should():
    kernel = tc.build(mapped.WORKLOAD, mapped.SCHEDULE, arch="sm_90")
    assert emulate.error(kernel.lowered_module, mapped.WORKLOAD) <= mapped.WORKLOAD.tolerance
