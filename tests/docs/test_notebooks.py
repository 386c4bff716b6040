"""Notebooks, which are kept as text, run without a GPU."""

import os
import subprocess
from pathlib import Path

import pytest
from cubins import needs_nvrtc

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.py"))


@needs_nvrtc
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_runs(notebook, tmp_path, python):
    environment = {**os.environ, "MPLBACKEND": "agg"}
    subprocess.run([*python, notebook], cwd=tmp_path, env=environment, check=True, capture_output=True)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_has_text_and_code(notebook):
    jupytext = pytest.importorskip("jupytext")
    kinds = [cell.cell_type for cell in jupytext.read(notebook).cells]
    assert {"markdown", "code"} <= {*kinds}
