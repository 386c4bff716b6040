import pytest

from tvmconv import cli


@pytest.fixture
def bench(request):
    """Run `tvmconv bench`, by default the benchmark that the test file names; the exit status."""
    name = request.path.stem.removeprefix("test_").replace("_", "-")
    return lambda words, benchmark=name: cli.main(["bench", benchmark, *map(str, words)])
