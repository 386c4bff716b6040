"""`tvmconv bench layouts`: its workloads and its table; the measurement needs a GPU."""

import pytest

from tvmconv.benchmarks.layouts import LayoutTimes, list_groups, list_layers, make_layouts_table, read_measured
from tvmconv.cli.errors import UsageError


def test_files_and_texts_name_convolutions_channels_first(tmp_path):
    (tmp_path / "layers.txt").write_text("# ResNet\nconv2d:1x8x8x8,8x8x3x3,s1,p1,nhwc,f16\n\n")
    layers = list_layers([str(tmp_path / "layers.txt"), "conv1d:1x8x8,8x8x3,s1,p1"])
    assert [w.text for w in layers] == ["conv2d:1x8x8x8,8x8x3x3,s1,p1,f16", "conv1d:1x8x8,8x8x3,s1,p1"]
    with pytest.raises(UsageError, match="expected a convolution"):
        list_layers(["filter1d:64,k3"])


def test_layers_of_suites_are_grouped_by_network(tmp_path):
    (tmp_path / "a.json").write_text('[{"name": "x.1", "text": "conv1d:1x8x8,8x8x3,s1,p1"}]')
    groups = list_groups([str(tmp_path / "a.json"), "conv1d:1x8x9,8x8x3,s1,p1"])
    assert {name: [w.input_size for w in layers] for name, layers in groups.items()} == {"x": [(8,)], "others": [(9,)]}


def test_table_has_ratios_and_their_geometric_means():
    seconds = {"nchw": 2e-6, "nhwc": 1e-6, "cuDNN nchw": 8e-6, "cuDNN nhwc": 4e-6}
    measured = [LayoutTimes("a", seconds), LayoutTimes("b", {"nchw": 1e-6, "nhwc": 2e-6})]
    table = make_layouts_table(measured, ["nchw", "nhwc"])
    assert table.rows[0] == ("`a`", "2.00", "1.00", "8.00", "4.00", "4.00", "2.00", "0.500")
    assert table.rows[1] == ("`b`", "1.00", "2.00", "—", "—", "—", "—", "2.00")
    assert table.rows[2][-3:] == ("4.00", "2.00", "1.00")


@pytest.mark.parametrize("text", ["", "[1]", '[{"seconds": {}}]', '[{"workload": "a", "seconds": 1}]'])
def test_a_file_of_something_else_is_not_continued(tmp_path, text):
    file = tmp_path / "layouts.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"expected a file layouts\.json of tvmconv bench layouts"):
        read_measured(file)
