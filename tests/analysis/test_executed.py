"""Machine code that is executed for its addresses: operations beside Python's integers, kernels beside their TIR."""

import itertools
import math
import random

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.analysis.memory.coalescing import count_global_accesses
from tvmconv.analysis.sass.interpreter.block_execution import SassInterpreter
from tvmconv.analysis.sass.interpreter.logic import evaluate_lut
from tvmconv.analysis.sass.interpreter.request_counts import (
    count_launch_requests,
    count_requests,
    count_requests_by_block,
    sample_grid,
)
from tvmconv.compiler.executable import LaunchConfig
from tvmconv.compiler.sass_listing import parse_disassembly
from tvmconv.errors import AnalysisError

MASK = (1 << 32) - 1


def listing(*lines):
    """Machine code of these instructions and labels, which begin with a dot, as nvdisasm prints it."""
    text, address = [".text.main:"], 0
    for line in (*lines, "EXIT"):
        if line.startswith("."):
            text.append(f"{line}:")
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return parse_disassembly("\n".join(text))["main"]


def stored(*lines, threads=32, constants=None, blocks=((0, 0, 0),)):
    """The shared addresses that a program stores to, one list a store, of the threads that do."""
    found = []
    machine = SassInterpreter(
        listing(*lines),
        LaunchConfig((4, 1, 1), (threads, 1, 1)),
        lambda bank, offset: (constants or {}).get(offset) if bank == 0 else None,
    )
    run = machine.execute_blocks(list(blocks), lambda one: found.append(one.addresses[one.is_active].tolist()))
    return found, run


def value(*lines, **given):
    """What is in R0 after some instructions."""
    ((addresses, *_), *_), _ = stored(*lines, "STS [R0], RZ", **given)
    return addresses


def signed(number):
    return (number & MASK) - (1 << 32) * (number >> 31 & 1)


random.seed(5)
NUMBERS = [0, 1, 2, 31, 0x7FFFFFFF, 0x80000000, MASK, *(random.getrandbits(32) for _ in range(3))]
PAIRS = list(itertools.product(NUMBERS, NUMBERS))


def operands(a, b, c=0):
    return f"MOV R1, {a:#x}", f"MOV R2, {b:#x}", f"MOV R3, {c:#x}"


OPERATIONS = {
    "IADD3 R0, R1, R2, 0x5": lambda a, b: a + b + 5,
    "IADD3 R0, R1, -R2, RZ": lambda a, b: a - b,
    "VIADD R0, R1, -0x7": lambda a, b: a - 7,
    "IMAD R0, R1, R2, R1": lambda a, b: a * b + a,
    "IMAD R0, R1, -0x3, R2": lambda a, b: -3 * a + b,
    "IMAD.SHL.U32 R0, R1, 0x8, RZ": lambda a, b: 8 * a,
    "IMAD.IADD R0, R1, 0x1, -R2": lambda a, b: a - b,
    "IMAD.HI R0, R1, 0x2aaaaaab, RZ": lambda a, b: signed(a) * 0x2AAAAAAB >> 32,
    "IMAD.HI.U32 R0, R1, R2, RZ": lambda a, b: a * b >> 32,
    "LEA R0, R1, R2, 0x3": lambda a, b: (a << 3) + b,
    "LEA.HI R0, R1, R2, RZ, 0x1d": lambda a, b: (a >> 3) + b,
    "LEA.HI.SX32 R0, R1, R2, 0x1d": lambda a, b: (signed(a) >> 3) + b,
    "SHF.L.U32 R0, R1, 0x7, RZ": lambda a, b: a << 7,
    "SHF.R.U32.HI R0, RZ, 0x7, R1": lambda a, b: a >> 7,
    "SHF.R.S32.HI R0, RZ, 0x1f, R1": lambda a, b: signed(a) >> 31,
    "SHF.L.U64.HI R0, R1, 0x4, R2": lambda a, b: ((b << 32 | a) << 4) >> 32,
    "LOP3.LUT R0, R1, R2, RZ, 0xc0, !PT": lambda a, b: a & b,
    "LOP3.LUT R0, R1, R2, R1, 0x1e, !PT": lambda a, b: a ^ (b | a),
    "PRMT R0, R1, 0x5410, R2": lambda a, b: (a & 0xFFFF) | b << 16,
    "PRMT R0, R1, 0x9910, R2": lambda a, b: (a & 0xFFFF) | (0xFFFF0000 if a & 0x8000 else 0),
    "VIADDMNMX R0, R1, R2, 0x64, PT": lambda a, b: min(signed(a + b), 100),
    "VIMNMX R0, R1, R2, !PT": lambda a, b: max(signed(a), signed(b)),
    "VIMNMX.U32 R0, PT, PT, R1, R2, !PT": lambda a, b: max(a, b),
    "IABS R0, R1": lambda a, b: abs(signed(a)),
    "IDP.2A.LO.U16.U8 R0, R1, R2, R1": lambda a, b: (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF) + a,
}


@pytest.mark.sample(21)
@pytest.mark.parametrize("text", OPERATIONS)
def test_operations_give_what_integers_give(text):
    for a, b in PAIRS:
        assert value(*operands(a, b), text) == OPERATIONS[text](a, b) & MASK, (hex(a), hex(b))


COMPARISONS = {
    "ISETP.LT.AND P0, PT, R1, R2, PT": lambda a, b: signed(a) < signed(b),
    "ISETP.GE.U32.AND P0, PT, R1, R2, PT": lambda a, b: a >= b,
    "ISETP.NE.AND P1, P0, R1, R2, PT": lambda a, b: a == b,
    "LOP3.LUT P0, RZ, R1, 0x80000000, RZ, 0xc0, !PT": lambda a, b: bool(a >> 31),
    "IADD3 R4, P0, R1, R2, RZ": lambda a, b: a + b > MASK,
    "IADD3 R4, P0, R1, -R2, RZ": lambda a, b: a >= b,
    "LEA R4, P0, R1, R2, 0x2": lambda a, b: (a << 2 & MASK) + b > MASK,
}


@pytest.mark.parametrize("text", COMPARISONS)
def test_predicates_are_those_of_integers(text):
    for a, b in PAIRS:
        assert value(*operands(a, b), text, "SEL R0, RZ, 0x40, !P0") == 0x40 * COMPARISONS[text](a, b)


def test_a_table_of_three_bits_is_looked_up():
    a, b, c = (np.array([number], np.uint32) for number in (0xF0, 0xCC, 0xAA))
    assert [int(evaluate_lut(table, a, b, c)[0]) & 0xFF for table in range(256)] == list(range(256))


def test_values_of_64_bits_carry():
    """What a pointer takes: a product, added to a pair of registers, with and without a carry by itself."""
    for low, high in ((0xFFFFFFF0, 3), (16, 0)):
        begin = "MOV R2, 0x64", f"MOV R4, {low:#x}", f"MOV R5, {high:#x}"
        wanted = (high << 32 | low) + 400
        ways = (
            ("IMAD.WIDE R6, R2, 0x4, R4",),
            ("LEA R6, P1, R2, R4, 0x2", "LEA.HI.X.SX32 R7, R2, R5, 0x2, P1"),
            ("IADD3 R6, P0, R4, 0x190, RZ", "IADD3.X R7, RZ, R5, RZ, P0, !PT"),
            ("IADD.64 R6, R4, 0x190",),
        )
        for way in ways:
            (addresses,), _ = stored(*begin, *way, "STG.E desc[UR4][R6.64+0x8], R2")
            assert set(addresses) == {wanted + 8}, way


def test_a_uniform_pair_is_a_base_for_offsets_of_32_bits():
    """As compute capability 7.5 has them: a mark tells that the register is one word, so the uniform one is two."""
    base = "ULDC.64 UR4, c[0x0][0x178]"
    constants = {0x178: 0xFFFFFFF8, 0x17C: 0x5}
    for text in ("[R2.U32+UR4+0x10]", "[UR4+0x24]"):
        (addresses,), _ = stored(base, "MOV R2, 0x14", f"STG.E.SYS {text}, R2", constants=constants)
        assert set(addresses) == {0x5_FFFFFFF8 + 0x24}, text


def test_an_address_outside_of_all_arrays_is_an_error():
    kernel = tc.build(tc.parse("conv2d:1x4x8x8,4x4x1x1"), "default", arch="sm_90")
    code = listing("MOV R2, 0x10", "MOV R3, RZ", "STG.E desc[UR4][R2.64], R2")
    with pytest.raises(AnalysisError, match=r"^STG is executed at an address outside of all arrays$"):
        count_requests(kernel.executable.kernels[0], code, "sm_90", [(0, 0, 0)])


def test_spilled_registers_and_constants_come_back():
    assert value("MOV R5, 0x30", "STL [R1+0x8], R5", "MOV R5, RZ", "LDL R0, [R1+0x8]") == 0x30
    assert value("HFMA2.MMA R0, -RZ, RZ, 0, 2.384185791015625e-07") == 4
    assert value("LDC R0, c[0x0][0x210]", constants={0x210: 0x77}) == 0x77
    assert value("ULDC.64 UR4, c[0x0][0x210]", "IMAD.U32 R0, RZ, RZ, UR5", constants={0x210: 1, 0x214: 0x88}) == 0x88


def test_predicates_are_packed_and_unpacked():
    lines = "ISETP.EQ.AND P1, PT, RZ, RZ, PT", "P2R R2, PR, RZ, 0x2", "PLOP3.LUT P1, PT, PT, PT, PT, 0x0, 0x0"
    assert value(*lines, "R2P PR, R2, 0x2", "SEL R0, RZ, 0x20, !P1") == 0x20
    assert value("MOV R2, 0x100", "R2P PR, R2.B1, 0x1", "SEL R0, RZ, 0x20, !P0") == 0x20
    lines = "MOV R3, 0x70f", "ISETP.EQ.AND P1, PT, RZ, RZ, PT", "PLOP3.LUT P2, PT, PT, PT, PT, 0x0, 0x0"
    assert value(*lines, "P2R.B1 R0, PR, R3, 0x6") == 0x30F


def test_threads_that_part_meet_again():
    """A loop of as many turns as the thread's number: each turn's store is one request, and the one behind it, too."""
    lines = (
        "S2R R1, SR_TID.X",
        "MOV R2, RZ",
        "BSSY B0, `(.L_meet)",
        ".L_again",
        "ISETP.GE.AND P0, PT, R2, R1, PT",
        "@P0 BRA `(.L_meet)",
        "STS [R1], RZ",
        "VIADD R2, R2, 0x1",
        "BRA `(.L_again)",
        ".L_meet",
        "BSYNC B0",
        "STS [R2], RZ",
    )
    found, run = stored(*lines)
    assert [len(each) for each in found] == [*range(31, 0, -1), 32]
    assert found[-1] == list(range(32))
    assert run.executions_by_block[3] == 32  # the comparison
    assert run.executions_by_block[-1] == 1
    assert run.backward_branches_by_block[7] == 31
    assert run.backward_branches_by_block.sum() == 31


def test_a_loop_with_two_branches_back_is_counted():
    """Threads of odd numbers end a turn early, and go on with the others."""
    lines = (
        "S2R R1, SR_TID.X",
        "LOP3.LUT R3, R1, 0x1, RZ, 0xc0, !PT",
        "ISETP.NE.AND P1, PT, R3, RZ, PT",
        "MOV R2, RZ",
        ".L_again",
        "VIADD R2, R2, 0x1",
        "ISETP.GE.AND P0, PT, R2, 0x5, PT",
        "@P0 EXIT",
        "@P1 BRA `(.L_again)",
        "STS [R1], RZ",
        "BRA `(.L_again)",
    )
    found, run = stored(*lines, threads=64)
    assert len(found) == 4
    assert run.executions_by_block[4] == 10
    assert run.backward_branches_by_block.sum() == 8


def test_several_blocks_are_executed_together():
    lines = "S2R R1, SR_CTAID.X", "LEA R2, R1, 0x4, 0x7", "STS [R2], RZ"
    (found,), run = stored(*lines, threads=8, blocks=[(n, 0, 0) for n in range(3)])
    assert found == [4] * 8 + [132] * 8 + [260] * 8
    assert run.executions_by_block.sum(axis=1).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (("LDS R1, [RZ]", "STS [R1], RZ"), "STS .* depends on an unknown value"),
        (("LDS R1, [RZ]", "ISETP.GT.AND P0, PT, R1, RZ, PT", "@P0 STS [RZ], RZ"), "depends on an unknown value"),
        (("RET.REL.NODEC R2",), "unsupported instruction RET"),
        ((".L_x", "STS [RZ], RZ", "BRA `(.L_x)"), "takes more than"),
    ],
)
def test_what_is_not_known_or_not_understood_is_an_error(lines, match, monkeypatch):
    monkeypatch.setattr("tvmconv.analysis.sass.interpreter.block_execution.MAX_INSTRUCTIONS", 1000)
    with pytest.raises(AnalysisError, match=match):
        stored(*lines)


def test_arithmetic_is_left_out():
    lines = "S2R R1, SR_TID.X", "LDS R4, [R1]", "FFMA R5, R4, R4, R5", "FADD R5, R5, R4", "STS [R1], R5"
    _, run = stored(*lines)
    assert run.num_executed == 4  # the thread's number, two accesses, the end
    assert run.executions_by_block.sum(axis=1).tolist() == [1] * 6


KERNELS = [
    ("conv2d:2x5x9x11,7x5x3x3,s2,p1", "default"),
    ("conv2d:1x16x14x14,32x16x3x3,s1,p1", "tiling"),
    ("conv2d:1x16x14x14,32x16x3x3,s1,p1", "vthread"),
    ("conv2d:1x8x13x13,24x8x3x3,s1,p1", "conflict_free"),
    ("filter1d:4099,k5", "halo_blocks"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("text", "schedule", "arch"),
    [
        pytest.param(*kernel, arch, marks=[] if i == j else pytest.mark.slow)
        for i, kernel in enumerate(KERNELS)
        for j, arch in enumerate(("sm_75", "sm_80", "sm_90", "sm_100", "sm_120"))
    ],
)
def test_stores_are_those_of_the_lowered_tir(text, schedule, arch):
    """Of stores to global memory the compiler can neither merge, drop nor hoist any in these kernels."""
    kernel = tc.build(tc.parse(text), schedule, arch=arch)
    (step,), (compiled,) = kernel.kernels, kernel.executable.kernels
    block = tuple(extent // 2 for extent in step.launch.grid)
    counts = count_requests(compiled, kernel.listings[step.name], arch, [block])
    ours = [each for each, code in zip(counts, kernel.listings[step.name], strict=True) if code.opcode == "STG"]
    wanted = [each for each in count_global_accesses(kernel, step) if each.kind == "store"]
    assert sum(each.num_sectors for each in ours) == sum(each.sectors for each in wanted)
    assert sum(each.num_requests for each in ours) == sum(each.num_requests for each in wanted)
    assert set().union(*(each.array_indices for each in ours)) == {len(kernel.executable.arrays) - 1}


def test_matrices_and_asynchronous_copies_are_those_of_the_text():
    """`ldmatrix`, `cp.async` and what goes back to the output: as executing the text tells."""
    kernel = tc.build(tc.parse("conv2d:1x64x8x8,64x64x1x1,s1,p0,f16,nhwc"), "mma_sync", arch="sm_80")
    (step,) = kernel.kernels
    code = kernel.listings[step.name]
    counts = count_requests(kernel.executable.kernels[0], code, "sm_80", [(0, 0, 0)])
    from_text = count_shared_accesses(kernel, step)
    copied = sum(each.num_wavefronts for each, i in zip(counts, code, strict=True) if i.opcode in ("LDGSTS", "STS"))
    assert copied == sum(each.wavefronts for each in from_text if each.kind == "store")
    loaded = sum(each.num_wavefronts for each, i in zip(counts, code, strict=True) if i.opcode in ("LDSM", "LDS"))
    assert loaded <= sum(each.wavefronts for each in from_text if each.kind == "load")  # some are not needed


@pytest.mark.parametrize("grid", [(2, 3, 2), (1, 1, 1), (1000, 1, 1), (7, 99, 3), (1, 56, 64)])
def test_the_blocks_that_come_first_are_spread_over_a_grid(grid):
    found = sample_grid(grid, 64)
    assert len(found) == len(set(found)) == min(64, math.prod(grid))
    for first in (found, found[:32]) if len(found) == 64 else (found,):
        for axis, extent in enumerate(grid):
            places = [block[axis] for block in first]
            assert sum(places) / len(places) == pytest.approx((extent - 1) / 2, abs=0.12 * extent)


def test_all_blocks_of_a_grid_are_counted_where_they_are_short():
    kernel = tc.build(tc.parse("conv2d:1x4x30x30,8x4x3x3,s1,p1"), "tiling", arch="sm_90")
    (step,) = kernel.executable.kernels
    code = kernel.listings[step.name]
    grid = count_launch_requests(step, code, "sm_90")
    assert grid.block_fraction == 1
    blocks = list(itertools.product(*map(range, step.launch.grid)))
    one_by_one = [count_requests(step, code, "sm_90", [block]) for block in blocks]
    for place, each in enumerate(grid.instruction_counts):
        assert each.num_sectors == sum(counts[place].num_sectors for counts in one_by_one)
        assert each.num_executed == sum(counts[place].num_executed for counts in one_by_one)


def test_blocks_counted_together_have_the_counts_of_each_alone():
    kernel = tc.build(tc.parse("conv2d:1x4x30x30,8x4x3x3,s1,p1"), "tiling", arch="sm_90")
    (step,) = kernel.executable.kernels
    code = kernel.instructions[step.name]
    blocks = [(0, 0, 0), tuple(extent - 1 for extent in step.launch.grid)]
    together = count_requests_by_block(step, code, "sm_90", blocks)
    assert together == [count_requests(step, code, "sm_90", [block]) for block in blocks]
