"""What a block does is told in a table with a line for each operation that happens, and in two ratios."""

import pytest

import tvmconv as tc
from tvmconv.analysis.memory.traffic import BlockTraffic, OperationCount
from tvmconv.analysis.tir.operations import (
    ADDITIONS,
    ARITHMETIC,
    CONSTANT_LOADS,
    GLOBAL_LOADS,
    GLOBAL_STORES,
    MEMORY,
    MULTIPLICATIONS,
)
from tvmconv.cli.show import IR_LEVELS, format_ir_level, make_traffic_table


@pytest.fixture
def counted():
    """Of a block of 64 threads, each of which sums up three products."""
    happens = {
        GLOBAL_LOADS: OperationCount(192, 6, 768),
        GLOBAL_STORES: OperationCount(64, 2, 256),
        CONSTANT_LOADS: OperationCount(192, 6, 768),
        MULTIPLICATIONS: OperationCount(192, 6, 768),
        ADDITIONS: OperationCount(192, 6, 768),
    }
    return BlockTraffic(64, 64, {**dict.fromkeys((*MEMORY, *ARITHMETIC), OperationCount()), **happens})


def test_the_table_has_a_line_for_each_operation_that_happens(counted):
    rows = make_traffic_table(counted).rows
    assert [row[0] for row in rows] == [GLOBAL_LOADS, GLOBAL_STORES, CONSTANT_LOADS, MULTIPLICATIONS, ADDITIONS]
    assert rows[0][1:] == ("3.00", "192", "6")


def test_a_kernels_traffic_is_one_of_its_stages():
    kernel = tc.build(tc.parse("filter1d:1000,k3"), "basic", device="opencl:0")
    assert IR_LEVELS[-1] == "traffic"
    assert format_ir_level(kernel, "traffic").startswith("the busiest block: ")
    assert format_ir_level(kernel, "source") == kernel.source
