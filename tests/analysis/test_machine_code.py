"""Machine code: its instructions, loops and arithmetic, and how long a warp takes alone."""

import pytest

import tvmconv as tc
from tvmconv.analysis.block_accesses import count_block, count_block_accesses
from tvmconv.analysis.sass.instruction_mix import (
    ARITHMETIC,
    MOVES,
    SHARED,
    analyze_mix,
    classify_instruction,
    count_access_widths,
    count_lane_clocks,
    count_lane_flops,
    count_matrix_flops,
)
from tvmconv.analysis.sass.linked_sources import link_sources
from tvmconv.analysis.sass.warp_pipeline import SassLoop, SassOp, WarpPipeline, build_code
from tvmconv.compiler.sass_listing import parse_disassembly
from tvmconv.target import INSTRUCTION_CLOCKS, L2_CLOCKS

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


# Of one warp that runs the outer loop 6 times and the inner one 5 times in each.
EXECUTED = (1, 6, 6, 30, 30, 30, 6, 1, 1, 0, 0)
BACK = (0, 0, 0, 0, 0, 24, 5, 0, 0, 0, 0)

# A loop whose turns end behind the kernel's end, from where they go on in its middle.
BEHIND = """
.text.one:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
        /*0010*/                   FADD R4, R4, R5 ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0030*/                   FMUL R4, R4, R5 ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   STG.E [R2.64], R4 ;
        /*0060*/                   EXIT ;
.L_x_2:
        /*0070*/                   FFMA R4, R4, R5, R6 ;
        /*0080*/                   BRA `(.L_x_3) ;
"""


@pytest.fixture
def one():
    return build_code(parse_disassembly(TEXT)["one"], EXECUTED, BACK)


def times(body, name):
    """How often a warp runs the instructions of a name, by the loops around them."""
    return sum(
        part.trip_count * times(part.body, name) if isinstance(part, SassLoop) else part.name == name for part in body
    )


def chain(*instructions):
    warp = WarpPipeline()
    warp.execute(list(instructions))
    return warp.clocks


def multiply(to, *of):
    return SassOp("FFMA", (("R", to),), tuple(("R", each) for each in of))


def test_branches_back_are_loops_with_their_trip_counts(one):
    assert [type(part) for part in one] == [SassOp, SassLoop, SassOp, SassOp]
    outer = one[1]
    assert [getattr(part, "name", "loop") for part in outer.body] == ["LDG", "BAR", "loop", "BRA"]
    assert (outer.trip_count, outer.body[2].trip_count) == (6, 5)


def test_a_wide_load_writes_registers_in_a_row(one):
    load = one[1].body[0]
    assert load.written_registers == (("R", 4), ("R", 5), ("R", 6), ("R", 7))
    assert {("R", 2), ("R", 3), ("UR", 4)} <= set(load.read_registers)


def test_a_loop_has_its_instructions_wherever_they_lie():
    found = build_code(parse_disassembly(BEHIND)["one"], (1, 9, 9, 9, 9, 1, 1, 9, 9), (0, 0, 0, 0, 8, 0, 0, 0, 9))
    assert [getattr(part, "name", "loop") for part in found] == ["S2R", "loop", "STG", "EXIT"]
    assert [part.name for part in found[1].body] == ["FADD", "BRA", "FMUL", "BRA", "FFMA", "BRA"]
    assert found[1].trip_count == 9


def test_each_trip_that_waits_for_a_load_takes_its_latency(one):
    warp = WarpPipeline()
    warp.execute(one)
    assert 6 * L2_CLOCKS < warp.clocks < 8 * L2_CLOCKS


def test_what_depends_on_the_result_before_waits_for_it():
    assert chain(*[multiply(1, 1, 2)] * 10) == 9 * 4 + 1
    assert chain(*[multiply(10 + each, 1, 2) for each in range(10)]) == 10


def build_lines(*lines):
    text = "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    (listing,) = parse_disassembly(f".text.one:\n{text}\n").values()
    return build_code(listing, [1] * len(lines), [0] * len(lines))


def test_what_is_shuffled_is_waited_for():
    assert chain(*build_lines("SHFL.DOWN PT, R5, R4, 0x1, 0x1f", "FADD R6, R5, R5")) > INSTRUCTION_CLOCKS["SHFL"]


def test_the_groups_that_a_wait_leaves_are_its_second_operand():
    code = build_lines("DEPBAR.LE SB0, 0x2", "DEPBAR.LE SB0, 0x1, {2,1}")
    assert [each.max_pending_groups for each in code] == [2, 1]


def test_asynchronous_copies_are_waited_for_by_group():
    copy, close = SassOp("LDGSTS", (), ()), SassOp("LDGDEPBAR", (), ())
    assert chain(copy, close, SassOp("DEPBAR", (), (), max_pending_groups=0)) > L2_CLOCKS
    assert chain(copy, close, SassOp("DEPBAR", (), (), max_pending_groups=1)) < 10


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("arch", "config"),
    [("sm_75", {}), ("sm_90", {"auto_unroll_max_step": 0, "tile_rc": (-1, 2)}), ("sm_100", {})],
)
def test_loops_say_how_often_a_warp_runs_each_instruction(arch, config):
    """In this kernel all warps run all arithmetic: by its loops, and as it was executed."""
    kernel = tc.build(tc.parse("conv2d:1x16x16x16,16x16x3x3,s1,p1"), "direct", arch=arch, config=config)
    (step,) = kernel.kernels
    executed = count_block_accesses(kernel, step).instruction_counts
    found = build_code(
        kernel.listings[step.name],
        [each.num_executed for _, each in executed],
        [each.num_backward_branches for _, each in executed],
    )
    needed = count_block(kernel, step).traffic.counts["multiplications"].num_elements / kernel.launch.threads_per_block
    assert times(found, "FFMA") + times(found, "FMUL") == pytest.approx(needed)
    assert any(isinstance(part, SassLoop) for part in found)


LAYER = "conv2d:1x64x16x16,64x64x3x3,s1,p1"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "schedule", "arch", "config"),
    [
        (LAYER, "tiling", "sm_90", {}),
        (f"{LAYER},bias,relu", "direct", "sm_100", {}),
        (LAYER, "vthread", "sm_75", {}),
        (f"{LAYER},f16", "tiling", "sm_90", {}),
        (f"{LAYER},f16,nhwc", "mma_sync", "sm_90", {}),
        (f"{LAYER},tf32,nhwc", "mma_sync", "sm_80", {}),
        (f"{LAYER},f16,nhwc", "hopper", "sm_90", {"block_n": 32}),
        ("conv2d:1x64x16x16,64x1x3x3,s1,p1,g64,f16,nhwc", "depthwise_nhwc", "sm_90", {}),
        ("filter2d:256x256x1,5x5", "basic", "sm_90", {}),
    ],
)
def test_arithmetic_is_that_of_the_text(text, schedule, arch, config):
    """In these kernels the compiler finds nothing that could be left out, and all threads take part."""
    kernel = tc.build(tc.parse(text), schedule, arch=arch, config=config)
    (step,) = kernel.kernels
    executed = count_block_accesses(kernel, step).instruction_counts
    flops = sum(
        (count_lane_flops(instruction) + count_matrix_flops(instruction)) * each.num_executed
        for instruction, each in executed
    )
    assert flops == count_block(kernel, step).traffic.flops


@pytest.mark.parametrize(
    ("line", "clocks", "flops"),
    [
        ("FFMA.FTZ R8, R4, R5.reuse, R8", 1, 64),
        ("FADD R8, R4, R5", 1, 32),
        ("FFMA2 R8, R4.F32x2.HI_LO, R6.F32x2.HI_LO, R8.F32x2.HI_LO", 2, 128),
        ("HFMA2.MMA R8, R4, R5, R8", 1, 128),
        ("HFMA2.MMA R8, -RZ, RZ, 0, 2.384185791015625e-07", 0, 0),  # a constant
        ("HADD2.F32 R8, -RZ, R4.H0_H0", 1, 0),  # a half as float32
        ("IMAD R8, R4, R5, R6", 0, 0),
    ],
)
def test_instructions_have_their_flops_and_lane_clocks(line, clocks, flops):
    (instruction,) = parse_disassembly(f".text.one:\n        /*0000*/                   {line} ;")["one"]
    assert (count_lane_clocks(instruction), count_lane_flops(instruction)) == (clocks, flops)


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
