"""What a block's accesses request: sectors by hand, and counts of machine code and TIR beside those of an H200."""

import functools
import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

import tvmconv as tc
from tvmconv.analysis import block_accesses
from tvmconv.analysis.block_accesses import count_block, count_block_accesses, find_costliest_requests
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.analysis.memory.coalescing import count_global_accesses, count_sectors
from tvmconv.analysis.memory.footprint import compute_footprints, count_dram_bytes
from tvmconv.analysis.memory.requests import find_worst_requests
from tvmconv.analysis.tir import scopes
from tvmconv.analysis.tir.scopes import iterate_statements
from tvmconv.arithmetic import ceil_div
from tvmconv.compiler import sass
from tvmconv.errors import CompileError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
SMALL = "conv2d:1x16x14x14,32x16x3x3,s1,p1"
LONG = tc.parse("conv2d:1x512x7x7,512x512x3x3,s1,p1")  # 2.4 million multiplications a thread, by the naive kernel
BESIDE = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200/experiments" / "kernels-beside.json.gz"
MEASURED = {
    row["schedule"]: row["measured"]
    for row in reversed(json.loads(gzip.decompress(BESIDE.read_bytes()))["kernels"])
    if row["workload"] == LAYER
}
LANES, ALL = np.arange(32), np.ones(32, bool)


@functools.cache
def build(schedule, text=LAYER):
    return tc.build(tc.parse(text), schedule, arch="sm_90")


@pytest.mark.parametrize(
    ("addresses", "nbytes", "expected"),
    [
        (LANES * 4, 4, (1, 4, 4, 1)),
        (LANES[::-1] * 4, 4, (1, 4, 4, 1)),
        (LANES * 4 + 4, 4, (1, 5, 4, 2)),  # one element late
        (LANES * 8, 4, (1, 8, 4, 2)),
        (LANES * 32, 4, (1, 32, 4, 8)),
        (LANES * 4096, 4, (1, 32, 4, 32)),
        (LANES * 0, 4, (1, 1, 1, 1)),
        (LANES * 2, 2, (1, 2, 2, 1)),
        (LANES * 16, 16, (1, 16, 16, 4)),
        (LANES * 64, 16, (1, 32, 16, 16)),
        (LANES // 8 * 128, 4, (1, 4, 1, 4)),
        (LANES * 16 + 24, 16, (1, 17, 16, 5)),  # every other one lies across a border
    ],
)
def test_a_request_takes_the_sectors_and_lines_it_touches(addresses, nbytes, expected):
    assert count_sectors(addresses[None], ALL[None], nbytes) == expected


@pytest.mark.parametrize(("active", "expected"), [(LANES < 3, (1, 3, 1, 1)), (LANES < 0, (0, 0, 0, 0))])
def test_threads_that_take_no_part_touch_no_sector(active, expected):
    assert count_sectors(LANES[None] * 32, active[None], 4) == expected


@pytest.mark.parametrize(
    ("addresses", "active", "is_copy", "sectors"),
    [
        (LANES % 16 * 16, ALL, False, 16),  # two rows of 256 bytes that are the same
        (LANES * 16 + 16, ALL, False, 17),  # a sector lies over the end of each quarter
        # As `grouped_nhwc` loads filters of 8 channels a group: eight lanes read what the eight before them read.
        (LANES % 4 * 576, ALL, False, 4),
        (LANES % 8 // 4 * 576 + LANES // 16 * 2048, ALL, False, 4),
        (LANES % 4 * 576, LANES != 9, False, 12),  # the second quarter is another one, and the third again
        (LANES % 4 * 576, ALL, True, 16),  # as `mma_sync` copies: every quarter counts, by Nsight Compute
    ],
)
def test_a_quarter_warp_that_repeats_another_is_free(addresses, active, is_copy, sectors):
    assert count_sectors(addresses[None], active[None], 16, is_copy=is_copy)[1] == sectors


def test_the_default_schedule_reads_neighbouring_columns():
    """A thread a column of the output: inputs and outputs are neighbours, and of the filter all read one number."""
    accesses = count_global_accesses(build("default", "conv2d:1x4x64x64,4x4x3x3,s1,p1"))
    found = {(each.array, each.kind): each for each in accesses}
    assert found["K", "load"].sectors == found["K", "load"].num_requests
    assert found["K", "load"].sectors == found["K", "load"].min_sectors
    assert found["Y", "store"].sectors == found["Y", "store"].min_sectors


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["tiling", "vthread", "conflict_free", "implicit_gemm"])
def test_wavefronts_are_those_that_a_gpu_counted(schedule):
    """All blocks of these grids do alike in shared memory."""
    (step,) = build(schedule).kernels
    found = count_block_accesses(build(schedule), step).shared_accesses
    for kind in ("load", "store"):
        taken = sum(each.wavefronts for each in found if each.kind == kind) * math.prod(step.launch.grid)
        assert taken == MEASURED[schedule][f"shared_{kind}_wavefronts"], kind


def test_accesses_name_their_buffer_and_the_compiled_width():
    found = count_block_accesses(build("vthread"), build("vthread").kernels[0])
    assert {(each.buffer, each.kind): each.nbytes for each in found.shared_accesses} == {
        ("padded_shared", "load"): 8,
        ("weight_shared", "load"): 16,
        ("padded_shared", "store"): 4,
        ("weight_shared", "store"): 4,
    }
    assert {(each.array, each.kind) for each in found.global_accesses} == {("X", "load"), ("K", "load"), ("Y", "store")}


def test_loads_that_the_compiler_drops_are_not_counted():
    """Of a stride of 2 every other value is read and not used."""
    built = build("tiling", "conv2d:1x8x32x32,16x8x3x3,s2,p1")
    (step,) = built.kernels
    from_sass, from_tir = (
        sum(each.wavefronts for each in found.shared_accesses if each.kind == "load")
        for found in (count_block_accesses(built, step), count_block(built, step))
    )
    assert from_sass < from_tir


def test_without_a_disassembler_the_tir_is_counted(monkeypatch):
    def missing(image, *, with_lines=False):
        raise CompileError("no nvdisasm")

    monkeypatch.setattr(sass, "disassemble", missing)
    built = tc.build(tc.parse(LAYER), "tiling", arch="sm_90")
    (step,) = built.kernels
    found, from_tir = count_block_accesses(built, step), count_block(built, step)
    assert found.instruction_counts is None
    assert (found.shared_accesses, found.global_accesses) == (from_tir.shared_accesses, from_tir.global_accesses)


def test_a_block_too_long_to_execute_is_counted_by_its_tir(monkeypatch):
    monkeypatch.setattr(block_accesses, "MAX_BLOCK_INSTRUCTIONS", 10_000)
    kernel = tc.build(LONG, "default", arch="sm_90")
    (step,) = kernel.kernels
    found = count_block_accesses(kernel, step)
    assert found.instruction_counts is None
    loads = {access.array: access.num_requests for access in found.global_accesses if access.kind == "load"}
    products = LONG.flops // 2 // (LONG.P * LONG.Q)  # of a thread, which has all channels of a pixel
    assert loads["K"] == pytest.approx(products * ceil_div(step.launch.threads_per_block, 32), rel=0.01)
    assert compute_footprints(kernel, step) is None  # each array is read once
    assert count_dram_bytes(kernel) == LONG.min_bytes


@pytest.mark.parametrize("schedule", ["vthread", "conflict_free"])
def test_costliest_requests_are_of_counted_accesses(schedule):
    (step,) = build(schedule).kernels
    found = count_block_accesses(build(schedule), step)
    named = {("shared", each.kind, each.buffer, each.statement_index): each for each in found.shared_accesses}
    named |= {("global", each.kind, each.array, each.statement_index): each for each in found.global_accesses}
    requests = find_costliest_requests(build(schedule), step)
    assert {(each.memory_space, each.kind, each.name, each.statement_index) for each in requests} == set(named)
    for request in requests:
        access = named[request.memory_space, request.kind, request.name, request.statement_index]
        whole = access.wavefronts if request.memory_space == "shared" else access.sectors
        assert whole / access.num_requests <= request.cost <= 32 * max(1, request.access_bytes // 4)
        assert request.access_bytes <= access.nbytes
        assert min(request.addresses) >= 0


@pytest.mark.parametrize("schedule", ["tiling", "vthread", "conflict_free"])
def test_no_request_costs_more_than_its_access_could(schedule):
    kernel = build(schedule, SMALL)
    requests = find_worst_requests(kernel)
    assert len(requests) == len([*count_shared_accesses(kernel), *count_global_accesses(kernel)])
    assert all(1 <= each.min_cost <= each.cost <= 32 * max(1, each.access_bytes // 4) for each in requests)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [(SMALL, "tiling"), (SMALL, "direct"), ("conv2d:1x64x16x16,64x64x3x3,s1,p1,f16,nhwc", "mma_sync")],
)
def test_a_request_names_its_statement(text, schedule):
    kernel = build(schedule, text)
    listed = [statement for statement, _ in iterate_statements(kernel.kernels[0].function)]
    assert all(each.name in str(listed[each.statement_index]) for each in find_worst_requests(kernel))


@pytest.mark.parametrize(
    ("text", "sampled"), [("conv2d:1x48x14x14,32x48x3x3,s1,p1", 48), ("conv2d:2x24x9x11,40x24x5x3,s2,p1", 24)]
)
@pytest.mark.parametrize("schedule", ["default", "tiling"])
def test_sampled_iterations_stand_for_all(text, sampled, schedule, monkeypatch):
    """One of each 9 or 15, as many as the filter has taps: it is not always the same tap."""

    def counted():
        kernel = tc.build(tc.parse(text), schedule, arch="sm_90")
        return count_block(kernel, kernel.kernels[0])

    exact = counted()
    monkeypatch.setattr(scopes, "MAX_ITERATIONS", 100)
    monkeypatch.setattr(scopes, "NUM_SAMPLED_ITERATIONS", sampled)
    some = counted()
    for unit, attribute in (("sectors", "global_accesses"), ("wavefronts", "shared_accesses")):
        for ours, wanted in zip(getattr(some, attribute), getattr(exact, attribute), strict=True):
            assert ours.num_requests == pytest.approx(wanted.num_requests, rel=0.03)
            for name in (unit, f"min_{unit}"):
                assert getattr(ours, name) == pytest.approx(getattr(wanted, name), rel=0.1), name
    assert some.traffic.flops == pytest.approx(exact.traffic.flops, rel=0.03)
