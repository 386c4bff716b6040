"""Timings of PyTorch's calls on the CPU, whatever else the machine does."""

import itertools
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is missing")

from tvmconv.torch import timing  # noqa: E402


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_that_wait_for_a_time_slice_do_not_count(two_threads):
    def call():
        if torch.get_num_threads() > 1:
            time.sleep(0.016)

    assert timing.time_call(call, torch.device("cpu")) < 0.001
    assert torch.get_num_threads() == 2


def test_calls_that_were_disturbed_do_not_count():
    slow = itertools.cycle([True, False, False])
    seconds = timing.time_wall_clock(lambda: time.sleep(0.01 if next(slow) else 0.0005), lambda: None)
    assert seconds < 0.003
