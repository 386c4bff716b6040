"""Shared accesses as the compiler merges them, beside those that Nsight Compute counted on an H200."""

import json
import math
from pathlib import Path

import pytest

import tvmconv as tc
from tvmconv.analysis.machine_code.merged import as_compiled
from tvmconv.analysis.memory.banks import shared_accesses
from tvmconv.compiler import sass
from tvmconv.errors import CompileError

LAYER = "conv2d:1x64x56x56,64x64x3x3,s1,p1"
BESIDE = Path(__file__).parents[2] / "tuning_logs" / "nvidia-h200" / "layers-beside.json"
MEASURED = {
    row["schedule"]: row["measured"]
    for row in json.loads(BESIDE.read_text())["kernels"]
    if row["workload"] == LAYER and row["schedule"] != "direct"
}


def kernel(schedule):
    return tc.build(tc.parse(LAYER), schedule, arch="sm_90")


@pytest.mark.parametrize("schedule", ["tiling", "columns", "vthread", "conflict_free", "implicit_gemm"])
def test_wavefronts_are_those_that_a_gpu_counted(schedule):
    built = kernel(schedule)
    (step,) = built.steps
    found = as_compiled(built, step)
    for kind in ("load", "store"):
        taken = sum(each.wavefronts for each in found if each.kind == kind) * math.prod(step.launch.grid)
        assert taken == pytest.approx(MEASURED[schedule][f"shared_{kind}_wavefronts"], rel=0.02), kind


def test_neighbouring_loads_of_a_thread_are_wide():
    built = kernel("vthread")
    widths = {(each.buffer, each.kind): each.nbytes for each in as_compiled(built, built.steps[0])}
    assert widths["padded_shared", "load"] == 8
    assert widths["weight_shared", "load"] == 16
    assert widths["padded_shared", "store"] == 4


def test_without_a_disassembler_accesses_are_those_of_the_text(monkeypatch):
    def missing(image, *, lines=False):
        raise CompileError("no nvdisasm")

    monkeypatch.setattr(sass, "disassemble", missing)
    built = kernel("tiling")
    assert as_compiled(built, built.steps[0]) == shared_accesses(built, built.steps[0])
