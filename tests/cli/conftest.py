import pytest

from tvmconv.cli import main


@pytest.fixture
def run(capsys):
    """Run a command; its exit status, stdout and stderr."""

    def run(*words):
        status = main([*map(str, words)])
        return status, *capsys.readouterr()

    return run
