import pytest
from nasty import NASTY

import tvmconv as tc


@pytest.fixture(scope="module", params=NASTY)
def problem(request):
    """Inputs and reference of a nasty workload, shared by all schedules of a module."""
    return tc.Problem(tc.parse(request.param))
