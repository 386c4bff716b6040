"""What a block's accesses ask, as the machine code makes them, beside what Nsight Compute counted on an H200."""

import gzip
import json
import math
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.block_accesses import count_block, count_block_accesses, find_costliest_requests
from tvmconv.compiler import sass
from tvmconv.errors import CompileError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
BESIDE = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200" / "kernels-beside.json.gz"
MEASURED = {
    row["schedule"]: row["measured"]
    for row in reversed(json.loads(gzip.decompress(BESIDE.read_bytes()))["kernels"])
    if row["workload"] == LAYER
}


def kernel(schedule, text=LAYER):
    return tc.build(tc.parse(text), schedule, arch="sm_90")


@pytest.mark.parametrize("schedule", ["tiling", "vthread", "conflict_free", "implicit_gemm"])
def test_wavefronts_are_those_that_a_gpu_counted(schedule):
    """All blocks of these grids do alike in shared memory."""
    built = kernel(schedule)
    (step,) = built.kernels
    found = count_block_accesses(built, step).shared_accesses
    for kind in ("load", "store"):
        taken = sum(each.wavefronts for each in found if each.kind == kind) * math.prod(step.launch.grid)
        assert taken == MEASURED[schedule][f"shared_{kind}_wavefronts"], kind


def test_accesses_name_their_buffer_and_the_compiled_width():
    built = kernel("vthread")
    found = count_block_accesses(built, built.kernels[0])
    widths = {(each.buffer, each.kind): each.nbytes for each in found.shared_accesses}
    assert widths == {
        ("padded_shared", "load"): 8,
        ("weight_shared", "load"): 16,
        ("padded_shared", "store"): 4,
        ("weight_shared", "store"): 4,
    }
    assert {(each.array, each.kind) for each in found.global_accesses} == {("X", "load"), ("K", "load"), ("Y", "store")}


def test_what_the_compiler_drops_is_not_there():
    """Of a stride of 2 every other value is read and not used."""
    built = kernel("tiling", "conv2d:1x8x32x32,16x8x3x3,s2,p1")
    (step,) = built.kernels
    loads = [
        sum(each.wavefronts for each in found if each.kind == "load")
        for found in (count_block_accesses(built, step).shared_accesses, count_block(built, step).shared_accesses)
    ]
    assert loads[0] < loads[1]


def test_without_a_disassembler_accesses_are_those_of_the_text(monkeypatch):
    def missing(image, *, with_lines=False):
        raise CompileError("no nvdisasm")

    monkeypatch.setattr(sass, "disassemble", missing)
    built = kernel("tiling")
    (step,) = built.kernels
    assert count_block_accesses(built, step).shared_accesses == count_block(built, step).shared_accesses
    assert count_block_accesses(built, step).global_accesses == count_block(built, step).global_accesses
    assert count_block_accesses(built, step).instruction_counts is None


@pytest.mark.parametrize("schedule", ["vthread", "conflict_free"])
def test_costliest_requests_are_of_counted_accesses(schedule):
    built = kernel(schedule)
    (step,) = built.kernels
    found = count_block_accesses(built, step)
    named = {("shared", each.kind, each.buffer, each.statement_index): each for each in found.shared_accesses}
    named |= {("global", each.kind, each.array, each.statement_index): each for each in found.global_accesses}
    requests = find_costliest_requests(built, step)
    assert {(each.memory_space, each.kind, each.name, each.statement_index) for each in requests} == set(named)
    for request in requests:
        access = named[request.memory_space, request.kind, request.name, request.statement_index]
        whole = access.wavefronts if request.memory_space == "shared" else access.sectors
        assert whole / access.num_requests <= request.cost <= 32 * max(1, request.access_bytes // 4)
        assert request.access_bytes <= access.nbytes
        assert min(request.addresses) >= 0
