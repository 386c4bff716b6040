"""What a block does is told in a table with a line for each operation that happens, and in two ratios."""

import pytest

import tvmconv as tc
from tvmconv.analysis.lowered.operations import (
    ADDITIONS,
    ARITHMETIC,
    CONSTANT_LOADS,
    GLOBAL_LOADS,
    GLOBAL_STORES,
    MEMORY,
    MULTIPLICATIONS,
)
from tvmconv.analysis.memory.traffic import Count, Traffic
from tvmconv.reports.stages import STAGES, stage_text
from tvmconv.reports.traffic import table


@pytest.fixture
def counted():
    """Of a block of 64 threads, each of which sums up three products."""
    happens = {
        GLOBAL_LOADS: Count(192, 6, 768),
        GLOBAL_STORES: Count(64, 2, 256),
        CONSTANT_LOADS: Count(192, 6, 768),
        MULTIPLICATIONS: Count(192, 6, 768),
        ADDITIONS: Count(192, 6, 768),
    }
    return Traffic(64, 64, {**dict.fromkeys((*MEMORY, *ARITHMETIC), Count()), **happens})


def test_the_table_has_a_line_for_each_operation_that_happens(counted):
    rows = table(counted).rows
    assert [row[0] for row in rows] == [GLOBAL_LOADS, GLOBAL_STORES, CONSTANT_LOADS, MULTIPLICATIONS, ADDITIONS]
    assert rows[0][1:] == ("3.00", "192", "6")


def test_a_kernels_traffic_is_one_of_its_stages():
    kernel = tc.build(tc.parse("filter1d:1000,k3"), "basic", device="opencl:0")
    assert STAGES[-1] == "traffic"
    assert stage_text(kernel, "traffic").startswith("the busiest block: ")
    assert stage_text(kernel, "source") == kernel.source
