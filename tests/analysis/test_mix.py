"""What machine code is made of, its loops, and the widths that the compiler made."""

import pytest

import tvmconv as tc
from tvmconv.analysis.machine_code.linked import linked
from tvmconv.analysis.machine_code.loops import loops
from tvmconv.analysis.machine_code.mix import ARITHMETIC, MOVES, SHARED, class_of, mix, widths
from tvmconv.compiler import nvrtc
from tvmconv.compiler.listing import parse

pytestmark = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))

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
    (loop,) = loops(parse(COLD)["main_kernel"])
    assert sorted(loop.inside) == [1, 2, 3, 4, 6, 7]


def test_the_inner_loop_is_that_with_the_arithmetic():
    inner = mix(parse(NESTED)["main_kernel"]).inner
    assert (inner.slots, inner.working, inner.has_loops) == (2, 1, False)


def test_a_multiply_add_of_zeros_is_a_move():
    (found,) = parse(".text.k:\n /*0000*/ HFMA2.MMA R7, -RZ, RZ, 0, 0 ;")["k"]
    assert class_of(found) == MOVES


def test_the_unrolled_taps_of_tiling_are_its_multiply_adds(tiling):
    taps, outputs, steps = 3, 64, 3  # of a thread; the compiler unrolls three rows
    assert mix(tiling.listings["main_kernel"]).classes[ARITHMETIC] == taps * outputs * steps


def test_the_compiler_merges_neighbouring_loads_of_a_statement(tiling):
    (own,) = linked(tiling)
    text = tiling.stage("lowered").split("\n")
    (statement,) = [
        n for n, lines in own.lowered.items() if "weight_shared_local[" in text[lines.start - 1].split("=")[0]
    ]
    assert set(widths(own.by_statement[statement], "shared", "load")) == {"LDS.128"}


def test_shared_accesses_of_all_statements_are_all_there_are(tiling):
    (own,) = linked(tiling)
    found = sum(
        sum(widths(each, "shared", kind).values())
        for number, each in own.by_statement.items()
        if number is not None
        for kind in ("load", "store")
    )
    assert found == mix(own.listing).classes[SHARED]
