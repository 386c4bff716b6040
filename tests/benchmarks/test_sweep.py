import json

import pytest

from tvmconv import cli
from tvmconv.workloads import Layer, parse


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of a sweep over two small layers."""
    folder = tmp_path_factory.mktemp("measured")
    layers = tuple(Layer(f"{c}_channels", parse(f"conv2d:1x{c}x6x6,{c}x{c}x3x3,p1"), 1) for c in (2, 12, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tvmconv.experiments.sweep.suite", lambda *_, **how: layers)
        words = ["--device", "opencl:0", "--seconds", "0.01", "--only", "2_", "-o", str(folder)]
        assert cli.main(["bench", "sweep", *words]) == 0
    return folder


@pytest.mark.slow
def test_a_part_of_their_name_selects_layers(measured):
    assert [layer["label"] for layer in json.loads((measured / "d2l-2_.json").read_text())["layers"]] == ["2", "12"]


def test_the_table_has_a_line_a_layer_and_its_provenance(measured):
    text = (measured / "d2l-2_.md").read_text()
    assert "| 12 |" in text
    assert "TVM 0." in text
    assert "`tvmconv bench sweep --device opencl:0" in text


def test_a_sweep_is_drawn_again_from_its_json_alone(bench, measured, tmp_path):
    assert bench(["--from", str(measured / "d2l-2_.json"), "-o", str(tmp_path)]) == 0
    for name in ("d2l-2_.json", "d2l-2_.md", "d2l-2_.png"):
        assert (tmp_path / name).read_bytes() == (measured / name).read_bytes()


def test_redrawing_in_place_leaves_the_numbers_unchanged(bench, measured, tmp_path):
    for name in ("a", "b"):
        text = (measured / "d2l-2_.json").read_text().replace("d2l-2_", name)
        (tmp_path / f"{name}.json").write_text(text + "\n")
    assert bench(["--from", *(str(tmp_path / f"{name}.json") for name in "ab"), "-o", str(tmp_path)]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{name}.{end}" for name in "ab" for end in ("json", "md", "png")
    }
    assert (tmp_path / "a.json").read_text().endswith("\n\n")
