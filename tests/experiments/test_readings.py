"""What scripts measured of kernels is read as it was written, and anything else is refused."""

from dataclasses import dataclass

import pytest

from tvmconv.errors import Error
from tvmconv.experiments.kernel_metrics import KernelMetricsFile


@dataclass(frozen=True)
class Row:
    schedule: str
    counts: dict[str, float]


ROWS = [Row("basic", {"loads": 2.5}), Row("µ", {})]


@pytest.mark.parametrize("totals", [{}, {"graph": [1.5e-4, 0.01]}])
def test_it_is_read_as_it_was_written(tmp_path, totals):
    measured = KernelMetricsFile("größe", "a GPU; `python measure.py`", ROWS, totals)
    measured.write(tmp_path / "new", "a page")
    assert KernelMetricsFile.read(tmp_path / "new" / "größe.json", Row) == measured
    assert (tmp_path / "new" / "größe.md").read_text(encoding="utf-8") == "a page\n"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "no JSON",
        '{"name": "a", "provenance": "b"}',
        '{"name": "a", "provenance": "b", "kernels": [], "totals": 3}',
        '{"name": "a", "provenance": "b", "kernels": [{"schedule": "basic"}]}',
        '{"name": "a", "provenance": "b", "kernels": [{"schedule": "basic", "counts": {}, "more": 1}]}',
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(Error, match="no such readings"):
        KernelMetricsFile.read(file, Row)
