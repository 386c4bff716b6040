"""Disassembly, counts of its instructions, its instructions by line, and the code sections of a cubin."""

import shutil
import sys
import tempfile

import pytest

import tvmconv as tc
from tvmconv.compiler import nvrtc, sass
from tvmconv.compiler.sass import extract_code_sections
from tvmconv.compiler.sass_listing import SassInstruction, parse_disassembly
from tvmconv.errors import CompileError

needs_nvrtc = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))

MULTIPLY_ADD = """extern "C" __global__ void main_kernel(float* x) {
  x[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x + 32] + x[threadIdx.x + 64];
}"""

NVDISASM = """
.text.main_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.Y ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0030*/             @!UPT UIADD3 UR4, UR4, UR4, URZ ;
.L_x_1:
        /*0040*/               @P1 FFMA R0, R1, R2, R3 ;
        /*0050*/                   LDS.64 R2, [R0+UR4+0x10] ;
        /*0060*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], [R4.64] ;
        /*0070*/                   FFMA.FTZ R0, R1, R2, R3 ;
        /*12a80*/                  BRA `(.L_x_1) ;
"""

CUOBJDUMP = """
	code for sm_90
		Function : main_kernel
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;        /* 0x00000a00ff017b82 */
                                                                 /* 0x000fe20000000800 */
        /*0010*/                   STL [R1+0x4], R0 ;            /* 0x0000000000007919 */
"""


def test_counts_know_predicates_and_widths():
    assert sass.count_instructions(NVDISASM) == {
        "FFMA": 2,
        "LDC": 1,
        "S2R": 1,
        "LDG.E.128": 1,
        "UIADD3": 1,
        "LDS.64": 1,
        "LDGSTS.E.128": 1,
        "BRA": 1,
    }


def test_counts_do_not_take_encodings_for_instructions():
    assert sass.count_instructions(CUOBJDUMP) == {"LDC": 1, "STL": 1}


@needs_nvrtc
def test_no_file_is_left_behind(tmp_path, monkeypatch):
    image = nvrtc.compile_cubin(MULTIPLY_ADD, "sm_90").image
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sass.disassemble(image)
    assert list(tmp_path.iterdir()) == []


@needs_nvrtc
def test_what_is_no_cubin_is_refused_in_one_line():
    with pytest.raises(CompileError, match=r"cannot disassemble the 4 bytes given: .+") as caught:
        sass.disassemble(b"none")
    assert "\n" not in str(caught.value)


def test_nvdisasm_of_a_usual_toolkit_is_found_without_path(monkeypatch, tmp_path):
    tool = tmp_path / "bin/nvdisasm"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '/*0000*/ NOP ;'\n")
    tool.chmod(0o755)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sass, "SYSTEM_CUDA_DIR", str(tmp_path))
    assert sass.count_instructions(sass.disassemble(b"")) == {"NOP": 1}


def test_without_a_disassembler_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(CompileError, match=r"pip install -e '\.\[cuda\]'\)$"):
        sass.disassemble(b"")


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


@pytest.mark.sample(1)
@needs_nvrtc
@pytest.mark.parametrize(("workload", "schedule"), CASES)
def test_telling_lines_changes_no_instruction(workload, schedule):
    kernel = tc.build(tc.parse(workload), schedule, arch="sm_90")
    without = parse_disassembly(kernel.sass)
    assert {name: [e.text for e in each] for name, each in kernel.listings.items()} == {
        name: [e.text for e in each] for name, each in without.items()
    }


def test_a_kernel_has_its_code_in_a_section_of_its_name():
    kernel = tc.build(tc.parse("conv2d:1x4x8x8,16x4x3x3,p1"), "tiling", arch="sm_90")
    (found,) = [name for name in extract_code_sections(kernel.cubin.image) if name.endswith(kernel.kernels[0].name)]
    instructions = kernel.listings[kernel.kernels[0].name]
    assert len(extract_code_sections(kernel.cubin.image)[found]) == 16 * len(instructions)


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x02", b"no cubin", b"\x7fELF\x01" + bytes(100)])
def test_what_is_no_cubin_is_refused(image):
    with pytest.raises(CompileError, match=r"expected a [\w-]+ ELF file"):
        extract_code_sections(image)
