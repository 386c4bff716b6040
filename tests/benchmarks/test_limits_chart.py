"""The chart of the shares of the physical limit that the layers of networks reach."""

from pathlib import Path

from tvmconv.experiments.sweep import Sweep
from tvmconv.reports.network_limits import compute_network_shares
from tvmconv.workloads import Layer

LOGS = Path(__file__).parents[2] / "tuning_logs"
MEASURED = LOGS / "nvidia-h200/batches/batch-energy-tuned.json.gz"


def test_a_network_has_its_measured_layers_from_the_lowest_share_on():
    results = {result.workload: result for result in Sweep.read(MEASURED).results}
    layers = [Layer(f"some.{number}", workload, 1) for number, workload in enumerate(results)]
    (network,) = compute_network_shares(results, [*layers, Layer("some.99", layers[0].workload, 1)])
    assert network.network == "some"
    tuned = network.shares["tuned"]
    assert len(tuned) == len(results)
    assert list(tuned) == sorted(tuned)


def test_the_chart_is_drawn(bench, tmp_path, capsys):
    chart = tmp_path / "limits.png"
    suite = LOGS / "batch-networks.json"
    assert bench([str(MEASURED), "--networks", str(suite), "-o", str(chart)]) == 0
    assert chart.read_bytes().startswith(b"\x89PNG")
    assert "networks in" in capsys.readouterr().out


def test_files_without_a_layer_of_the_networks_are_refused(bench, tmp_path, capsys):
    suite = tmp_path / "suite.json"
    suite.write_text('[{"name": "a.1", "text": "conv2d:1x8x8x8,8x8x1x1,s1,p0"}]')
    assert bench([str(MEASURED), "--networks", str(suite), "-o", str(tmp_path / "x.png")]) == 2
    assert "no layer of" in capsys.readouterr().err
