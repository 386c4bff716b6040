"""Machine code: instructions and loops of a text, how often loops run, and how long a warp takes alone."""

import pytest

import tvmconv as tc
from tvmconv.analysis.block_accesses import count_block, count_block_accesses
from tvmconv.analysis.sass.instruction_mix import count_lane_clocks, count_lane_flops, count_matrix_flops
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


def test_branches_back_are_loops(one):
    assert [type(part) for part in one] == [SassOp, SassLoop, SassOp, SassOp]
    outer = one[1]
    assert [getattr(part, "name", "loop") for part in outer.body] == ["LDG", "BAR", "loop", "BRA"]


def test_a_wide_load_writes_registers_in_a_row(one):
    load = one[1].body[0]
    assert load.written_registers == (("R", 4), ("R", 5), ("R", 6), ("R", 7))
    assert {("R", 2), ("R", 3), ("UR", 4)} <= set(load.read_registers)


def test_loops_run_as_often_as_a_warp_comes_to_their_begin(one):
    outer = one[1]
    assert outer.trip_count == 6
    assert outer.body[2].trip_count == 5


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


def test_what_is_shuffled_is_waited_for():
    lines = "SHFL.DOWN PT, R5, R4, 0x1, 0x1f", "FADD R6, R5, R5"
    text = "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    (listing,) = parse_disassembly(f".text.one:\n{text}\n").values()
    assert chain(*build_code(listing, [1, 1], [0, 0])) > INSTRUCTION_CLOCKS["SHFL"]


def test_the_groups_that_a_wait_leaves_are_its_second_operand():
    lines = "DEPBAR.LE SB0, 0x2", "DEPBAR.LE SB0, 0x1, {2,1}"
    text = "\n".join(f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(lines))
    (listing,) = parse_disassembly(f".text.one:\n{text}\n").values()
    assert [each.max_pending_groups for each in build_code(listing, [1, 1], [0, 0])] == [2, 1]


def test_asynchronous_copies_are_waited_for_by_group():
    copy, close = SassOp("LDGSTS", (), ()), SassOp("LDGDEPBAR", (), ())
    assert chain(copy, close, SassOp("DEPBAR", (), (), max_pending_groups=0)) > L2_CLOCKS
    assert chain(copy, close, SassOp("DEPBAR", (), (), max_pending_groups=1)) < 10


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
