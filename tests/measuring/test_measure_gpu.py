"""On a GPU, too, a candidate costs at most itself; and a tuner's time is that of the kernel."""

import pytest
from faulty_schedules import EXPECTED
from measuring import measure

import tvmconv as tc
from tvmconv.logs.record import ErrorKind
from tvmconv.registry import find_schedule

CONV = tc.parse("conv2d:1x64x64x64,64x64x3x3,s1,p1")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fault", ["wrong", "unwritten", "out_of_bounds", "endless", "wide"])
def test_faulty_kernel_is_one_record_and_the_others_are_measured(gpu, fault):
    configs = [{"fault": name, "number": i} for i, name in enumerate(("none", fault, "none", "none"))]
    records = measure(configs, device=gpu, run_timeout=3.0, memory_limit=4 << 30)
    errors = {record.config["number"]: record.error for record in records}
    assert len(records) == 4
    assert errors == {0: ErrorKind.NONE, 1: EXPECTED[fault], 2: ErrorKind.NONE, 3: ErrorKind.NONE}
    assert all("\n" not in record.message for record in records)


@pytest.mark.parametrize("name", ["default", "tiling", "vthread"])
def test_a_time_agrees_with_that_of_the_built_kernel(gpu, name):
    schedule = find_schedule(CONV, name)
    (record,) = measure(
        [schedule.space(CONV).default], device=gpu, schedule=schedule, workload=CONV, memory_limit=4 << 30
    )
    kernel = tc.build(CONV, schedule, device=gpu, config=record.config)
    assert record.cost == pytest.approx(kernel.time(seconds=0.1).median, rel=0.1)  # other processes use the GPU, too
    assert record.resources["registers"] == kernel.resources.registers
    assert record.target == f"cuda -arch={gpu.arch}"
