"""Machine code: instructions and loops of a text, how often loops run, and how long a warp takes alone."""

import numpy as np
import pytest
from scipy.optimize import nnls

import tvmconv as tc
from tvmconv.analysis.machine_code.operations import Loop, Operation, code
from tvmconv.analysis.machine_code.trips import BARRIERS, LOADED, MULTIPLICATIONS, find_trips, nonnegative
from tvmconv.analysis.machine_code.warp import L2_CLOCKS, Warp
from tvmconv.compiler.listing import parse

TEXT = """
\t.section\t.text.one,"ax",@progbits
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64+0x10] ;
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_2:
        /*0030*/                   FFMA.FTZ R8, R4, R5.reuse, R8 ;
        /*0040*/                   FFMA R9, R4, R5, R9 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/              @!P1 BRA `(.L_x_1) ;
        /*0070*/                   STS.64 [R10], R8 ;
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
        /*00a0*/                   NOP;
"""


@pytest.fixture
def one():
    return code(parse(TEXT)["one"])


def chain(*instructions):
    warp = Warp()
    warp.run(list(instructions))
    return warp.clocks


def multiply(to, *of):
    return Operation("FFMA", (), (("R", to),), tuple(("R", each) for each in of))


def test_branches_back_are_loops(one):
    assert [type(part) for part in one] == [Operation, Loop, Operation, Operation, Operation]
    outer = one[1]
    assert [getattr(part, "name", "loop") for part in outer.body] == ["LDG", "BAR", "loop", "BRA"]


def test_a_wide_load_writes_registers_in_a_row_and_reads_its_address(one):
    load = one[1].body[0]
    assert load.writes == (("R", 4), ("R", 5), ("R", 6), ("R", 7))
    assert {("R", 2), ("R", 3), ("UR", 4)} <= set(load.reads)


def test_a_store_reads_what_it_stores(one):
    assert not one[2].writes
    assert {("R", 8), ("R", 9), ("R", 10)} <= set(one[2].reads)


def test_loops_run_as_often_as_what_is_in_them_has_to(one):
    find_trips(one, {MULTIPLICATIONS: 2 * 6 * 5, BARRIERS: 6, LOADED: 6 * 16})
    outer = one[1]
    assert outer.trips == pytest.approx(6)
    assert outer.body[2].trips == pytest.approx(5)


def test_what_a_warp_issues_counts_each_trip(one):
    find_trips(one, {MULTIPLICATIONS: 2 * 6 * 5, BARRIERS: 6, LOADED: 6 * 16})
    warp = Warp()
    warp.run(one)
    assert warp.issued["FFMA"] == pytest.approx(60)
    assert warp.issued["LDG"] == pytest.approx(6)


def test_each_trip_of_a_loop_that_waits_for_a_load_takes_its_latency(one):
    find_trips(one, {MULTIPLICATIONS: 2 * 6 * 5, BARRIERS: 6, LOADED: 6 * 16})
    warp = Warp()
    warp.run(one)
    assert 6 * L2_CLOCKS < warp.clocks < 8 * L2_CLOCKS


def test_what_depends_on_the_result_before_waits_for_it():
    assert chain(*[multiply(1, 1, 2)] * 10) == 9 * 4 + 1
    assert chain(*[multiply(10 + each, 1, 2) for each in range(10)]) == 10


def test_asynchronous_copies_are_waited_for_by_group():
    copy, close = Operation("LDGSTS", (), (), ()), Operation("LDGDEPBAR", (), (), ())
    assert chain(copy, close, Operation("DEPBAR", (), (), (), pending=0)) > L2_CLOCKS
    assert chain(copy, close, Operation("DEPBAR", (), (), (), pending=1)) < 10


@pytest.mark.parametrize("config", [{}, {"auto_unroll_max_step": 0, "tile_rc": (-1, 2)}])
def test_a_kernel_issues_the_multiplications_of_its_text(config):
    kernel = tc.build(tc.parse("conv2d:1x16x16x16,16x16x3x3,s1,p1"), "direct", arch="sm_90", config=config)
    found = code(kernel.listings[kernel.steps[0].name])
    from tvmconv.analysis.memory.traffic import traffic

    needed = traffic(kernel).counts["multiplications"].elements / kernel.launch.threads
    find_trips(found, {MULTIPLICATIONS: needed})
    warp = Warp()
    warp.run(found)
    assert warp.issued["FFMA"] + warp.issued["FMUL"] == pytest.approx(needed, rel=0.02)


def test_the_least_squares_are_those_of_scipy():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows = np.abs(rng.normal(size=(5, 4))) * (rng.random((5, 4)) < 0.6)
        values = rng.normal(size=5)
        own, theirs = nonnegative(rows, values), nnls(rows, values)[0]
        assert np.linalg.norm(rows @ own - values) == pytest.approx(np.linalg.norm(rows @ theirs - values))
