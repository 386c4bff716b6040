"""Machine code by instruction and by line."""

import pytest

import tvmconv as tc
from tvmconv.compiler import nvrtc
from tvmconv.compiler.sass_listing import SassInstruction, parse_disassembly

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))

TEXT = """
.text.main_kernel:
	//## File "/a/kernel.cu", line 171
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
	//## File "/a/kernel.cu", line 150 inlined at "/a/kernel.cu", line 336
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R2.64] ;
	//## File "/a/cuda_fp16.hpp", line 12
        /*0020*/               @P1 BRA `(.L_x_1) ;
.text.main_kernel_1:
        /*0000*/                   EXIT ;
"""
CASES = [
    ("conv2d:1x64x56x56,64x64x3x3,s1,p1", "tiling"),
    ("conv2d:1x64x56x56,64x64x3x3,s1,p1,f16,nhwc", "hopper"),
    pytest.param("conv2d:1x512x7x7,512x512x3x3,s1,p1,f16,nhwc", "mma_sync", marks=pytest.mark.slow),  # in two steps
]


def test_an_instruction_has_its_parts():
    found = parse_disassembly(TEXT)["main_kernel"][1]
    assert found == SassInstruction(0x10, "@!P0", "LDG", ("E", "128"), "R4, desc[UR6][R2.64]", None, 336)


def test_a_branch_has_the_address_of_its_label():
    assert parse_disassembly(TEXT)["main_kernel"][2].target_address == 0x10


@needs_nvrtc
@pytest.mark.parametrize(("workload", "schedule"), CASES)
def test_telling_lines_changes_no_instruction(workload, schedule):
    kernel = tc.build(tc.parse(workload), schedule, arch="sm_90")
    without = parse_disassembly(kernel.sass)
    assert {name: [e.text for e in each] for name, each in kernel.listings.items()} == {
        name: [e.text for e in each] for name, each in without.items()
    }
