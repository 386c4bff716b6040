"""What machine code is made of, its loops, and the widths that the compiler made."""

import pytest

import tvmconv as tc
from tvmconv.analysis.sass.instruction_mix import (
    ARITHMETIC,
    MOVES,
    SHARED,
    analyze_mix,
    classify_instruction,
    count_access_widths,
)
from tvmconv.analysis.sass.linked_sources import link_sources
from tvmconv.analysis.sass.loops import find_loops
from tvmconv.compiler import nvrtc
from tvmconv.compiler.sass_listing import parse_disassembly

pytestmark = pytest.mark.skipif(nvrtc.explain_unavailability() is not None, reason=str(nvrtc.explain_unavailability()))

COLD = """
.text.main_kernel:
        /*0000*/                   MOV R1, R2 ;
.L_x_1:
        /*0010*/                   FFMA R1, R2, R3, R1 ;
        /*0020*/              @!P2 BRA `(.L_x_2) ;
.L_x_3:
        /*0030*/                   FFMA R1, R2, R3, R1 ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   NANOSLEEP 0x5 ;
        /*0070*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*0080*/                   BRA `(.L_x_4) ;
        /*0090*/                   NOP ;
"""
NESTED = """
.text.main_kernel:
.L_x_1:
        /*0000*/                   LDS.128 R4, [R2] ;
.L_x_2:
        /*0010*/                   FFMA R1, R2, R3, R1 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
"""


@pytest.fixture(scope="module")
def tiling():
    return tc.build(tc.parse("conv2d:1x64x56x56,64x64x3x3,s1,p1"), "tiling", arch="sm_90")


def test_code_behind_the_end_makes_no_other_loop():
    (loop,) = find_loops(parse_disassembly(COLD)["main_kernel"])
    assert sorted(loop.all_indices) == [1, 2, 3, 4, 6, 7]


def test_the_inner_loop_is_that_with_the_arithmetic():
    inner = analyze_mix(parse_disassembly(NESTED)["main_kernel"]).inner_loop
    assert (inner.num_issue_slots, inner.num_work_slots, inner.has_loops) == (2, 1, False)


def test_a_multiply_add_of_zeros_is_a_move():
    (found,) = parse_disassembly(".text.k:\n /*0000*/ HFMA2.MMA R7, -RZ, RZ, 0, 0 ;")["k"]
    assert classify_instruction(found) == MOVES


def test_the_unrolled_taps_of_tiling_are_its_multiply_adds(tiling):
    taps, outputs, steps = 3, 64, 3  # of a thread; the compiler unrolls three rows
    assert analyze_mix(tiling.listings["main_kernel"]).class_counts[ARITHMETIC] == taps * outputs * steps


def test_the_compiler_merges_neighbouring_loads_of_a_statement(tiling):
    (own,) = link_sources(tiling)
    text = tiling.format_ir_level("lowered").split("\n")
    (statement,) = [
        n for n, lines in own.lowered_lines.items() if "weight_shared_local[" in text[lines.start - 1].split("=")[0]
    ]
    assert set(count_access_widths(own.instructions_by_statement[statement], "shared", "load")) == {"LDS.128"}


def test_shared_accesses_of_all_statements_are_all_there_are(tiling):
    (own,) = link_sources(tiling)
    found = sum(
        sum(count_access_widths(each, "shared", kind).values())
        for number, each in own.instructions_by_statement.items()
        if number is not None
        for kind in ("load", "store")
    )
    assert found == analyze_mix(own.listing).class_counts[SHARED]
