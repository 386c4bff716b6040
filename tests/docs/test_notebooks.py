"""Tutorials are notebooks as text: what jupytext makes of them can run."""

import ast

import pytest
from doc_blocks import ROOT, blocks

TUTORIALS = [*sorted((ROOT / "docs/tutorials").glob("*.md")), ROOT / "docs/kernels.md"]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_each_block_is_a_cell(page):
    jupytext = pytest.importorskip("jupytext")
    cells = [cell for cell in jupytext.read(page).cells if cell.cell_type == "code"]
    marks = [mark for cell in cells for mark in cell.metadata if mark in ("run", "gpu", "file")]
    assert len(marks) == len(cells) > 0
    assert {block.language for section in blocks(page).values() for block in section} <= {"python", "sh", "py", "text"}
    for cell, mark in zip(cells, marks, strict=True):
        first_line, _, code = cell.source.partition("\n")
        assert first_line.startswith("%%writefile ") == (mark == "file")
        if first_line != "%%sh":
            ast.parse(code if mark == "file" else cell.source)
