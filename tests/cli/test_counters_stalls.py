"""`tvmconv counters --stalls`: a GPU's counters beside the code's, without a GPU."""

import json

import pytest

import tvmconv as tc
from tvmconv import cli
from tvmconv.analysis.nsight import ncu
from tvmconv.experiments.counters import Counters
from tvmconv.experiments.kernel_metrics import KernelMetricsFile

SMALL = "conv2d:1x4x8x8,16x4x3x3,p1"
OUTPUTS = 16 * 8 * 8
READ = {"nanoseconds": 2500.0, "dram_read_bytes": 3.0 * OUTPUTS, "occupancy_percent": 50.0, "barrier": 0.5}
READ |= {"long_scoreboard": 7.25, "wait": 2.0}


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Run the script with the same counters for two launches; what it printed, and the folder that it wrote to."""

    def run(*words):
        monkeypatch.setattr(ncu, "profile_command", lambda command, metrics: iter([READ, READ]))
        status = cli.main(["counters", *words, "-o", str(tmp_path)])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out, tmp_path

    return run


def arguments():
    return (SMALL, "--stalls", "--schedules", "tiling", "--device", "sm_90")  # the naive schedule comes with it


def test_a_line_has_what_was_counted_of_a_schedule(measured):
    out, _ = measured(*arguments())
    line = next(line for line in out.splitlines() if line.startswith("tiling"))
    assert line.split()[1:6] == ["2.50", "—", "—", "—", "3.00"]  # microseconds, three busy units, bytes read from DRAM
    assert line.endswith("50.0%  long scoreboard 7.25, wait 2.00")


def test_what_ncu_does_not_have_is_left_blank(measured):
    out, _ = measured(*arguments())
    line = next(line for line in out.splitlines() if line.startswith("default"))
    assert line.split()[6] == "—"  # bytes written


def test_the_counts_of_the_code_are_kept_beside_those_of_the_gpu(measured):
    _, folder = measured(*arguments())
    default, tiling = json.loads((folder / "conv2d-counters.json").read_text())["kernels"]
    assert (default["schedule"], default["outputs"]) == ("default", OUTPUTS)
    assert tiling["metrics"]["dram_read_bytes"] == 3 * OUTPUTS
    assert tiling["code"]["shared loads"] > 0
    assert default["code"]["shared loads"] == 0


def test_the_page_can_be_made_again_from_the_json(measured):
    _, folder = measured(*arguments())
    page = (folder / "conv2d-counters.md").read_text()
    assert f"## {tc.parse(SMALL).text}" in page
    assert "tvmconv counters conv2d" in page
    measured("--from", str(folder / "conv2d-counters.json"))
    assert (folder / "conv2d-counters.md").read_text() == page


def test_a_summary_goes_between_the_markers_of_a_page(measured, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- conv2d-counters -->\nold\n<!-- /conv2d-counters -->\nafter\n")
    measured(*arguments(), "--update-page", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert "| tiling | 2.50 |" in text
    assert "old" not in text


def test_kernels_of_several_workloads_have_a_line_each(measured, tmp_path):
    files = []
    for text in (SMALL, "conv2d:1x4x9x9,16x4x3x3,p1"):
        _, folder = measured(text, *arguments()[1:])
        file = KernelMetricsFile.read(folder / "conv2d-counters.json", Counters)
        KernelMetricsFile(file.name, file.provenance, file.kernels[1:]).write(tmp_path / str(len(files)), "")
        files.append(tmp_path / str(len(files)) / "conv2d-counters.json")
    page = tmp_path / "page.md"
    page.write_text("<!-- conv2d-counters -->\n<!-- /conv2d-counters -->\n")
    measured(*(word for file in files for word in ("--from", str(file))), "--update-page", str(page))
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `conv2d")]
    assert [line.split("|")[2].strip() for line in lines] == ["2.50", "2.50"]
    assert all(line.endswith("| long scoreboard 7.25, wait 2.00 |") for line in lines)


def test_counts_of_the_code_can_be_left_out(measured):
    out, folder = measured(*arguments(), "--no-code")
    kernels = json.loads((folder / "conv2d-counters.json").read_text())["kernels"]
    assert [(row["code"], row["ratio"]) for row in kernels] == [({}, None)] * 2
    assert "--no-code" in out


def test_workloads_are_needed_in_one_line(capsys):
    assert cli.main(["counters", "--stalls"]) == 2
    assert "--stalls needs at least one workload" in capsys.readouterr().err


def test_the_kernel_of_a_log_is_measured_alone(monkeypatch, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    kernel = tc.build(SMALL, "tiling", arch="sm_90")
    log.write_text(
        tc.Record(kernel.workload, "tiling", kernel.config, (1e-6,), target="cuda -arch=sm_90").line() + "\n"
    )
    monkeypatch.setattr(ncu, "profile_command", lambda command, metrics: iter([READ]))
    words = ["counters", SMALL, "--stalls", "--schedules", "tuned", "--device", "sm_90"]
    assert cli.main([*words, "--log", str(log), "-o", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "conv2d-counters.json").read_text())["kernels"]
    assert row["schedule"] == "tuned"
    assert cli.main(words) == 2
    assert "--schedules tuned needs --log" in capsys.readouterr().err
