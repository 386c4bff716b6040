"""What a block's accesses ask, as the machine code makes them, beside what Nsight Compute counted on an H200."""

import gzip
import json
import math
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.asked import asked_by, costliest_requests
from tvmconv.analysis.counts import counts
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
    (step,) = built.steps
    found = asked_by(built, step).shared
    for kind in ("load", "store"):
        taken = sum(each.wavefronts for each in found if each.kind == kind) * math.prod(step.launch.grid)
        assert taken == MEASURED[schedule][f"shared_{kind}_wavefronts"], kind


def test_accesses_name_their_buffer_and_the_compiled_width():
    built = kernel("vthread")
    found = asked_by(built, built.steps[0])
    widths = {(each.buffer, each.kind): each.nbytes for each in found.shared}
    assert widths == {
        ("padded_shared", "load"): 8,
        ("weight_shared", "load"): 16,
        ("padded_shared", "store"): 4,
        ("weight_shared", "store"): 4,
    }
    assert {(each.array, each.kind) for each in found.touched} == {("X", "load"), ("K", "load"), ("Y", "store")}


def test_what_the_compiler_drops_is_not_there():
    """Of a stride of 2 every other value is read and not used."""
    built = kernel("tiling", "conv2d:1x8x32x32,16x8x3x3,s2,p1")
    (step,) = built.steps
    loads = [
        sum(each.wavefronts for each in found if each.kind == "load")
        for found in (asked_by(built, step).shared, counts(built, step).shared)
    ]
    assert loads[0] < loads[1]


def test_without_a_disassembler_accesses_are_those_of_the_text(monkeypatch):
    def missing(image, *, lines=False):
        raise CompileError("no nvdisasm")

    monkeypatch.setattr(sass, "disassemble", missing)
    built = kernel("tiling")
    (step,) = built.steps
    assert asked_by(built, step).shared == counts(built, step).shared
    assert asked_by(built, step).touched == counts(built, step).touched
    assert asked_by(built, step).executed is None


@pytest.mark.parametrize("schedule", ["vthread", "conflict_free"])
def test_costliest_requests_are_of_counted_accesses(schedule):
    built = kernel(schedule)
    (step,) = built.steps
    found = asked_by(built, step)
    named = {("shared", each.kind, each.buffer, each.statement): each for each in found.shared}
    named |= {("global", each.kind, each.array, each.statement): each for each in found.touched}
    requests = costliest_requests(built, step)
    assert {(each.space, each.kind, each.name, each.statement) for each in requests} == set(named)
    for request in requests:
        access = named[request.space, request.kind, request.name, request.statement]
        whole = access.wavefronts if request.space == "shared" else access.sectors
        assert whole / access.requests <= request.takes <= 32 * max(1, request.nbytes // 4)
        assert request.nbytes <= access.nbytes
        assert min(request.addresses) >= 0
