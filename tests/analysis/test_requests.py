"""What a warp's request looks like on the banks and sectors, beside the counts of whole kernels."""

import pytest

import tvmconv as tc
from tvmconv.analysis.memory.bank_conflicts import count_shared_accesses
from tvmconv.analysis.memory.coalescing import count_global_accesses
from tvmconv.analysis.memory.requests import find_worst_requests
from tvmconv.analysis.tir.scopes import iterate_statements

LAYER = tc.parse("conv2d:1x16x14x14,32x16x3x3,s1,p1")


def requests(schedule, workload=LAYER, **config):
    return find_worst_requests(tc.build(workload, schedule, arch="sm_90", config=config))


@pytest.mark.parametrize("schedule", ["tiling", "vthread", "conflict_free"])
def test_no_request_takes_more_than_its_access_could(schedule):
    kernel = tc.build(LAYER, schedule, arch="sm_90")
    counted = [*count_shared_accesses(kernel), *count_global_accesses(kernel)]
    assert len(counted) == len(find_worst_requests(kernel))
    for request in find_worst_requests(kernel):
        assert 1 <= request.min_cost <= request.cost <= 32 * max(1, request.access_bytes // 4)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [(LAYER.text, "tiling"), (LAYER.text, "direct"), ("conv2d:1x64x16x16,64x64x3x3,s1,p1,f16,nhwc", "mma_sync")],
)
def test_a_request_tells_its_statement(text, schedule):
    kernel = tc.build(tc.parse(text), schedule, arch="sm_90")
    listed = [statement for statement, _ in iterate_statements(kernel.kernels[0].function)]
    for request in find_worst_requests(kernel):
        assert request.name in str(listed[request.statement_index])
