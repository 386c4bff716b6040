"""Claims about every schedule of the library, whatever its operator."""

import pytest
from nasty import NASTY, NASTY_1D, NASTY_3D
from nasty_filters import NASTY_FILTERS

import tvmconv as tc

SCHEDULES = tc.schedules()
NAMES = [f"{s.operator}-{s.name}" for s in SCHEDULES]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_every_schedule_explains_itself(schedule):
    assert 20 < len(schedule.summary) <= 120
    assert schedule.summary.endswith(".")
    assert len(schedule.doc.splitlines()) >= 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=NAMES)
def test_every_schedule_has_a_space_of_a_workload_that_it_applies_to(schedule):
    convolutions = (*NASTY_1D, *NASTY, *NASTY_3D)
    texts = (*convolutions, *NASTY_FILTERS, *(f"{text},f16,nhwc" for text in convolutions))
    workload = next(w for w in map(tc.parse, texts) if schedule.applies(w))
    assert schedule.space(workload).size >= 1
