"""Networks side by side, from files of comparisons."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPARED = ROOT / "tuning_logs" / "nvidia-h200" / "resnet50" / "resnet50-tuned.json"


def test_the_table_goes_between_a_pages_markers(bench, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- networks -->\nold\n<!-- /networks -->\nafter\n")
    assert bench([str(COMPARED), "--update-page", str(page)]) == 0
    assert "resnet50" in capsys.readouterr().out
    assert "old" not in page.read_text()
    assert "| resnet50 | f32 | nchw | 1 | cudnn | 23 |" in page.read_text()


def test_what_is_no_comparison_is_refused_in_one_line(bench, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text("[]")
    assert bench([str(file)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
