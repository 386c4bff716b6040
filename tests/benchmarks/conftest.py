from concurrent.futures import ThreadPoolExecutor

import pytest

from tvmconv import cli
from tvmconv.benchmarks import prebuild


@pytest.fixture
def bench(request):
    """Run `tvmconv bench`, by default the benchmark that the test file names; the exit status."""
    name = request.path.stem.removeprefix("test_").replace("_", "-")
    return lambda words, benchmark=name: cli.main(["bench", benchmark, *map(str, words)])


@pytest.fixture
def prebuild_in_threads(monkeypatch):
    """`bench prebuild` builds in this process: its processes take two seconds to load TVM, each time."""
    monkeypatch.setattr(prebuild, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
