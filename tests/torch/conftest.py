"""A block of a network by our kernels; modules that need PyTorch are imported where it is asked for."""

import copy
import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]  # PyTorch is missing


@pytest.fixture(scope="session", autouse=True)
def short_timings():
    """A call is timed for a tenth of the time: as accurate times are for the tests of timing alone."""
    from tvmconv.torch import timing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "TIMING_SECONDS", timing.TIMING_SECONDS / 10)
        patch.setattr(timing, "MAX_TIMING_SECONDS", timing.MAX_TIMING_SECONDS / 10)
        yield


@pytest.fixture(scope="session", autouse=True)
def kernels_built_once():
    """Models of many tests have the same layers, whose kernels this process builds once."""
    from tvmconv.measure import builder

    build, results = builder.build_executable, {}

    def build_once(setup, schedule_name, config, workload):
        key = setup.device.text, workload.text, setup.schedules[schedule_name], str(sorted(config.items()))
        if key not in results:
            results[key] = build(setup, schedule_name, config, workload)
        return results[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "build_executable", build_once)
        yield results


@pytest.fixture(scope="session")
def block():
    from small_models import Block, with_statistics

    return with_statistics(Block())


@pytest.fixture(scope="session")
def made(block):
    from small_models import optimized

    return optimized(block)


@pytest.fixture
def faster(made):
    """A copy to be changed."""
    return copy.deepcopy(made)
