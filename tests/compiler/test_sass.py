"""Disassembly, and counting instructions in it."""

import shutil
import sys
import tempfile

import pytest

from tvmconv.compiler import nvrtc, sass
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
