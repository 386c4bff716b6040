"""A library to compare with is one new file in the folder: it is found, and the command line offers it."""

import sys

import pytest

from tvmconv import baselines
from tvmconv.baselines.base import REGISTRY, baseline
from tvmconv.cli import main
from tvmconv.errors import Error


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A new file of the folder."""
    (tmp_path / "quick.py").write_text(
        "from tvmconv.baselines.base import baseline\n"
        '@baseline("quick")\n'
        "def time_quick(w, inputs, *, device, cold=False, seconds=0.5): ...\n"
    )
    before = dict(baselines.load_baselines())
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    yield
    sys.modules.pop("tvmconv.baselines.quick", None)
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_new_file_is_a_new_library(file):
    assert list(baselines.load_baselines()) == ["copy", "cublas", "cudnn", "cupy", "quick"]


def test_the_command_line_offers_it(file, capsys):
    main(["run", "conv2d:1x4x8x8,4x4x1x1", "--baseline", "slow"])
    assert "quick" in capsys.readouterr().err


def test_two_files_cannot_take_one_name():
    def time_cudnn(w, inputs, **how): ...

    baselines.load_baselines()
    with pytest.raises(Error, match=r"baseline cudnn is defined in tvmconv\.baselines\.cudnn and "):
        baseline("cudnn")(time_cudnn)
