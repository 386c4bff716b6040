"""The lanes of a request on the banks: a row a wavefront."""

import re

import pytest

from tvmconv.analysis.memory.requests import CostliestRequest
from tvmconv.reports.page.memory import _render_banks


def request(addresses, nbytes, takes):
    lanes = tuple(range(32))
    return CostliestRequest("shared", "load", "tile", 0, nbytes, lanes, tuple(map(addresses, lanes)), takes, takes)


@pytest.mark.parametrize(
    ("addresses", "nbytes", "takes"),
    [
        (lambda lane: 4 * lane, 4, 1),
        (lambda lane: 8 * lane, 4, 2),  # every other bank
        (lambda lane: 8 * lane, 8, 2),  # half a warp at a time
        (lambda lane: 16 * lane, 16, 4),  # a quarter at a time
        (lambda lane: 64, 16, 2),  # quarters of one address, two at a time
        (lambda lane: 512 * lane, 4, 32),
    ],
)
def test_rows_are_as_many_as_the_request_takes(addresses, nbytes, takes):
    picture = str(_render_banks(request(addresses, nbytes, takes), "told"))
    assert len(re.findall(r">wavefront \d+<", picture)) == takes
